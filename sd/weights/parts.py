"""A VAE alone, from a file or a folder, and what this project's files say of themselves."""

import json
import re
from dataclasses import asdict, fields
from pathlib import Path

import torch

from sd.errors import InputError
from sd.files import new_folder, read_json
from sd.weights.configs import infer_vae_config, vae_config_from_folder
from sd.weights.int8 import FORMAT, KEY, to_int8
from sd.weights.names import shapes_of
from sd.weights.tensors import (
    FILE_ENDINGS,
    build,
    fit,
    fit_vae,
    fp8_remark,
    read_tensors,
    save_tensors,
    short,
    tensors_only,
    without_left_overs,
)
from SD_Model import VAE, NoiseSchedule, UNetConfig, VAEConfig, config_from_dict

DEFAULT_VAE = "stabilityai/sd-vae-ft-mse"


def fetch(name: str, patterns: list[str]) -> Path:
    """A local path as it is; anything else is a hub name, downloaded or taken from the cache. InputError if neither."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) or path.suffix.lower() in FILE_ENDINGS:
        raise InputError(f"weights were wanted at {name}, and there is no such file or folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as e:  # offline, unknown, gated, no disk: the hub's classes change between versions
        raise InputError(
            f"{name} is no local path, and could not be had from the model hub or its cache ({short(e)}); "
            f"give a local path, or run once with a network"
        ) from None


def vae_from_file(path: Path, weights: str = "ema") -> VAE:
    """The VAE of a standalone file, or of a full single file."""
    content, metadata = read_tensors(path)
    nested = content.get("state_dict")
    tensors = tensors_only(nested if isinstance(nested, dict) else content)
    for prefix in ("first_stage_model.", "vae."):
        if any(name.startswith(prefix) for name in tensors):
            tensors = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
    described = own_description(path, metadata)[0]
    if not described:  # a folder's file, given without its folder: what lies beside it knows groups and scale
        config, own = path.with_name("config.json"), path.with_name("vae.json")
        if own.is_file() and any(name.startswith("encoder.down.") for name in tensors):
            described = {"vae": read_json(own)}
        elif config.is_file() and any(name.startswith("encoder.down_blocks.") for name in tensors):
            described = {"vae": asdict(vae_config_from_folder(config, read_json(config)))}
    return vae_from_tensors(path, tensors, described, weights)


def vae_from_tensors(source, tensors: dict, described: dict, weights: str = "ema") -> VAE:
    """A VAE of these tensors, of the described architecture or else of the one their shapes tell."""
    tensors, left_out = without_left_overs(tensors)
    copies = {name.removeprefix("model_ema."): t for name, t in tensors.items() if name.startswith("model_ema.")}
    copies = {name: t for name, t in copies.items() if not name.startswith("loss")}  # of the discriminator
    tensors = {name: t for name, t in tensors.items() if not name.startswith("model_ema.")}
    if "vae" in described:
        config = config_from_dict(VAEConfig, described["vae"])
    else:
        config = infer_vae_config(source, tensors)
    state, which = fit_vae(source, config, tensors), "live weights (it has EMA too)" if copies else "its only weights"
    if copies and weights == "ema":
        shapes, which = shapes_of(VAE, config), "EMA weights (it has live ones too)"
        state = fit("VAE's EMA", source, shapes, copies, {name.replace(".", ""): name for name in shapes})
    vae = build(VAE, config, state)
    vae.found = "\n  ".join(filter(None, [f"{source}: a VAE, {which}", fp8_remark(state), left_out]))
    return vae


def own_json(metadata: dict, name: str) -> dict:
    """A JSON object that save_ldm wrote into a file's metadata; {} for anything else. Exports older than the prefix
    `sd_` have the bare name."""
    for key in (f"sd_{name}", name):
        try:
            values = json.loads(metadata.get(key, ""))
        except (ValueError, TypeError, RecursionError):
            continue
        if isinstance(values, dict):
            return values
    return {}


def own_description(path: Path, metadata: dict) -> tuple[dict, str]:
    """(what save_ldm wrote into a file's metadata about the networks, or {}; a remark on a foreign value, or "").

    InputError where it is this project's and does not hold together.
    """
    described = own_json(metadata, "model")
    if not described.keys() >= {"unet", "vae", "text", "schedule", "sampling", "size"}:
        foreign = "sd_model" in metadata
        return {}, "its metadata 'sd_model' is not of this project and was not used" if foreign else ""
    try:
        for cls in (UNetConfig, VAEConfig):
            config = config_from_dict(cls, described["unet" if cls is UNetConfig else "vae"])
            values = {**asdict(config), "num_res_blocks": config.num_res_blocks or 1}  # of which there may be none
            odd = [f.name for f in fields(cls) if not alike(values[f.name], f.default)]
            if odd:
                raise ValueError(f"{cls.__name__} has other values for {odd}")
        NoiseSchedule(**described["schedule"])
        if not all(isinstance(described[k], dict) for k in ("text", "sampling")) or type(described["size"]) is not int:
            raise ValueError("text, sampling or size is no such thing")
    except (ValueError, TypeError, AttributeError, RuntimeError) as e:
        raise InputError(f"the metadata 'sd_model' of {path} is damaged or of another version ({short(e)})") from None
    return described, ""


def alike(value, default) -> bool:
    """Is a value of the default's kind: a number, a flag, or a tuple of such?"""
    if isinstance(default, tuple):
        return isinstance(value, tuple) and len(value) > 0 and all(alike(v, default[0]) for v in value)
    if isinstance(default, float):
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is type(default) and (isinstance(value, bool) or value > 0)


def load_own_vae(folder: Path) -> VAE:
    """A VAE of a folder that save_vae wrote."""
    config = config_from_dict(VAEConfig, read_json(folder / "vae.json"))
    tensors, metadata = read_tensors(folder / "vae.safetensors")
    if metadata.get("sd_parts") != "decoder":
        return build(VAE, config, fit_vae(folder, config, tensors))
    return build(lambda config: VAE(config).without_encoder(), config, fit_vae(folder, config, tensors, True))


def save_vae(vae: VAE, folder: str | Path, int8: bool = False):
    """Write a VAE in this project's format: vae.json and vae.safetensors (fp32, or 8 bits), whole or not at all. One
    without an encoder stays so."""
    folder = Path(folder)
    with new_folder(folder, replace=True) as tmp:
        (tmp / "vae.json").write_text(json.dumps(asdict(vae.config), indent=2))
        state = {k: t.detach().to("cpu", torch.float32).contiguous() for k, t in vae.state_dict().items()}
        metadata = {"sd_parts": "decoder"} if vae.encoder is None else {}
        if int8:
            state, metadata = to_int8("VAE", state), metadata | {KEY: FORMAT}
        save_tensors(state, tmp / "vae.safetensors", metadata or None)


def own_text(values: dict) -> str:
    """JSON for a file's metadata. The space keeps A1111's merger from parsing it and writing the dict back."""
    return " " + json.dumps(values)
