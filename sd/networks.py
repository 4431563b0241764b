"""The UNet that a run's settings ask for: a preset, and what --unet changes of it."""

from dataclasses import fields, replace

from sd.errors import InputError
from SD_Model import PRESETS, UNetConfig

TRUTH = {"true": True, "false": False, "1": True, "0": False}


def read_overrides(words: list[str]) -> dict:
    """`name=value` or, of one value a level, `name=value,value,...` -> those fields of a UNetConfig, JSON's types.
    InputError for other words."""
    kinds, found = {f.name: f.default for f in fields(UNetConfig)}, {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in kinds:
            raise InputError(f"--unet wants NAME=VALUE of {', '.join(kinds)}, found {word!r}")
        several = isinstance(kinds[name], tuple)
        kind = type(kinds[name][0] if several else kinds[name])
        try:
            read = TRUTH.__getitem__ if kind is bool else kind
            values = [read(part.strip().lower()) for part in text.split(",")]
        except (ValueError, KeyError):
            values = []
        if not values or (len(values) > 1 and not several):
            wanted = f"{kind.__name__} values, one a level, with commas between" if several else f"one {kind.__name__}"
            raise InputError(f"--unet {name} wants {wanted}, found {text!r}")
        found[name] = values if several else values[0]
    return found


def unet_config(settings: dict) -> UNetConfig:
    """The preset settings["model"] with the fields of settings["unet"]. InputError if they make no network."""
    changes = {k: tuple(v) if isinstance(v, list) else v for k, v in (settings.get("unet") or {}).items()}
    config = replace(PRESETS[settings["model"]]["unet"], **changes)
    levels, widths = len(config.channels), config.channels
    if len(config.attention) != levels:
        raise InputError(
            f"a UNet wants one value of attention for each of its {levels} channels {widths}, found "
            f"{config.attention}; add attention=... to --unet"
        )
    if odd := [w for w in widths if w % config.norm_groups or w % config.num_heads]:
        raise InputError(
            f"a UNet wants channels that norm_groups ({config.norm_groups}) and num_heads ({config.num_heads}) divide, "
            f"found {odd[0]}"
        )
    return config
