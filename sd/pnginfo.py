"""Settings in PNGs: written so that other programs read them, and read back to paint a picture again.

A picture carries two text chunks: `sd`, its settings as JSON, which this project reads; and `parameters`, the form of
A1111, which ComfyUI and others read too: prompt, a line `Negative prompt: …`, and a line of `name: value` pairs.
"""

import json
import math
import re
from pathlib import Path

from PIL import Image

from sd.errors import InputError
from sd.prompts import LORA_SYNTAX, SEEDS, a1111_prompt, foreign_syntax

# sampler: what A1111 calls it. DDPM is DDIM with eta 1, and Karras a schedule there.
SAMPLER_TITLES = {"ddpm": "DDIM", "ddim": "DDIM", "dpmpp_2m": "DPM++ 2M", "dpmpp_2m_karras": "DPM++ 2M",
                  "euler": "Euler", "euler_a": "Euler a", "heun": "Heun"}  # fmt: skip
# A1111's schedule that is, or comes closest to, a spacing of timesteps. It names none for DDIM.
SCHEDULE_TYPES = {"linspace": "Uniform", "trailing": "Simple", "leading": "DDIM"}
MODEL_ENDINGS = (".safetensors", ".sft", ".ckpt", ".pt", ".pth", ".bin")
# Fields of `parameters` that change no picture, or are looked at by name below.
KNOWN = {"Steps", "Sampler", "Schedule type", "CFG scale", "Seed", "Size", "Model", "Model hash", "Version", "RNG",
         "Clip skip", "Denoising strength", "CFG rescale", "Eta DDIM", "Emphasis", "Pad conds"}  # fmt: skip
PAIR = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')  # `name: value`, or `name: "quoted"`


def model_name(source: str | Path) -> str:
    """A model's name: its file or folder without the ending of weights, whatever other dots are in it."""
    name = Path(source).name or Path(source).resolve().name
    ending = Path(name).suffix
    return name[: -len(ending)] if ending.lower() in MODEL_ENDINGS else name


def schedule_type(sampler: str, spacing: str | None) -> str | None:
    """A1111's name for the sigmas of a sampler, None where it has none to choose. dpmpp_2m leaves out t = 0, as its
    SGM Uniform does."""
    if sampler in ("ddim", "ddpm"):
        return None
    if sampler == "dpmpp_2m_karras":
        return "Karras"
    return "SGM Uniform" if (sampler, spacing) == ("dpmpp_2m", "linspace") else SCHEDULE_TYPES.get(spacing)


def parameters_text(settings: dict) -> str:
    """Settings of a picture in A1111's form, so that A1111 means the same words, weights, noise and sigmas by it.

    settings: prompt, negative, seed, steps, cfg, sampler, size and model; where they are known spacing, prompt_syntax,
    padded, cfg_rescale, strength, lora (which A1111 reads in the prompt).
    """
    plain = settings.get("prompt_syntax") != "weights"
    prompt, negative = (a1111_prompt(settings[k], plain) for k in ("prompt", "negative"))
    prompt += "".join(f" <lora:{lora['name']}:{lora['weight']:g}>" for lora in settings.get("lora", []))
    pairs = {
        "Steps": settings["steps"],
        "Sampler": SAMPLER_TITLES[settings["sampler"]],
        "Schedule type": schedule_type(settings["sampler"], settings.get("spacing")),
        "CFG scale": settings["cfg"],
        "Seed": settings["seed"],
        "Size": "{}x{}".format(*settings["size"]),
        "Model": model_name(settings["model"]),
        "CFG rescale": settings.get("cfg_rescale"),
        "Denoising strength": settings.get("strength"),
        "Eta DDIM": 1.0 if settings["sampler"] == "ddpm" else None,
        "Emphasis": "Original" if not plain and re.search(r"[(\[]", prompt + negative) else None,
        "Pad conds": "True" if settings.get("padded") else None,
        "RNG": "CPU",
    }
    pairs = {k: str(v) for k, v in pairs.items() if v is not None}
    pairs = {k: json.dumps(v, ensure_ascii=False) if set(v) & set(',:"\n') else v for k, v in pairs.items()}
    return f"{prompt}\nNegative prompt: {negative}\n" + ", ".join(f"{k}: {v}" for k, v in pairs.items())


def split_parameters(text: str) -> tuple[str, str, dict[str, str]]:
    """`parameters` -> prompt, negative prompt, and the fields of the last line, as A1111 splits them."""
    *lines, last = text.strip().split("\n")
    pairs = PAIR.findall(last)
    if len(pairs) < 3:
        lines, pairs = [*lines, last], []
    sides: tuple[list[str], list[str]] = ([], [])
    side = 0
    for line in (line.strip() for line in lines):
        if line.startswith("Negative prompt:"):
            side, line = 1, line.removeprefix("Negative prompt:").strip()
        if line or sides[side]:
            sides[side].append(line)
    fields = {}
    for name, value in pairs:
        try:
            fields[name] = json.loads(value) if value[:1] == value[-1:] == '"' and len(value) > 1 else value.strip()
        except ValueError:
            fields[name] = value
    return "\n".join(sides[0]), "\n".join(sides[1]), fields


def sampler_of(title: str, schedule: str) -> tuple[str | None, str | None, str | None]:
    """A1111's sampler and schedule -> sampler, spacing, and what is different about them here; None if unknown."""
    for name in ("Karras", "SGM Uniform", "Simple", "Exponential", "Uniform"):  # older files: one name for both
        if title.endswith(" " + name):
            title, schedule = title.removesuffix(" " + name), name
    sampler = next((name for name, theirs in SAMPLER_TITLES.items() if theirs == title and name != "ddpm"), None)
    if sampler in (None, "ddim"):
        return sampler, None, None
    if sampler == "dpmpp_2m" and schedule in ("Automatic", "Karras"):  # Karras is A1111's default for it
        return "dpmpp_2m_karras", None, None
    exact = {"SGM Uniform": "linspace"} if sampler == "dpmpp_2m" else dict.fromkeys(
        ("Automatic", "Uniform", "Normal"), "linspace")  # fmt: skip
    near = {"Simple": "trailing", "DDIM": "leading", "SGM Uniform": "trailing"}
    if schedule in exact:
        return sampler, exact[schedule], None
    spacing = near.get(schedule, "linspace")
    return sampler, spacing, f"`Schedule type: {schedule}` becomes --spacing {spacing}, which is only near it"


def number(fields: dict[str, str], name: str, kind):
    """A field as int or float, None if it is absent; InputError if it is none."""
    if name not in fields:
        return None
    try:
        value = kind(fields[name])
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InputError(f"`{name}` in a picture's settings wants a number, found {fields[name]!r}")
    return value


def from_parameters(text: str) -> tuple[dict, list[str]]:
    """`parameters` -> settings by this project's names, and sentences about what cannot be honoured."""
    prompt, negative, fields = split_parameters(text)
    notes = [
        f"it was painted with the LoRA {found[1]!r}: give it as --lora PATH:{(found[2] or '1').split(':')[0]}"
        for found in LORA_SYNTAX.finditer(prompt)
    ]
    prompt = LORA_SYNTAX.sub("", prompt)
    settings = {"prompt": prompt, "negative": negative, "steps": number(fields, "Steps", int),
                "cfg": number(fields, "CFG scale", float), "seed": number(fields, "Seed", int),
                "strength": number(fields, "Denoising strength", float),
                "cfg_rescale": number(fields, "CFG rescale", float), "plain_prompt": False,
                "long_prompts": "padded" if fields.get("Pad conds") == "True" else "a1111"}  # fmt: skip
    if "Size" in fields:
        size = re.fullmatch(r"(\d+)x(\d+)", fields["Size"])
        if not size:
            raise InputError(f"`Size` in a picture's settings wants 512x512 or the like, found {fields['Size']!r}")
        settings |= {"width": int(size[1]), "height": int(size[2])}
    if "Sampler" in fields:
        sampler, spacing, note = sampler_of(fields["Sampler"], fields.get("Schedule type", "Automatic"))
        if sampler is None:
            settings["unknown_sampler"] = fields["Sampler"]
        settings |= {"sampler": sampler, "spacing": spacing}
        if sampler == "ddim":
            settings["ddim_timesteps"] = "a1111"
            if number(fields, "Eta DDIM", float) == 1:
                settings |= {"sampler": "ddpm", "ddim_timesteps": None}
                note = "DDIM with eta 1 becomes ddpm, whose timesteps differ a little"
            elif "Eta DDIM" in fields:
                note = f"`Eta DDIM: {fields['Eta DDIM']}` is not known here"
        notes += [note] * bool(note)
    if fields.get("RNG", "GPU") != "CPU":
        notes.append(f"its noise came from {fields.get('RNG', 'GPU')}, ours from the CPU: the picture will be another")
    if fields.get("Clip skip", "1") != "1":
        notes.append(f"`Clip skip: {fields['Clip skip']}` is not known here")
    if fields.get("Emphasis", "Original") != "Original":
        notes.append(f"`Emphasis: {fields['Emphasis']}` is not known here")
    others = [f"{name}: {value}" for name, value in fields.items() if name not in KNOWN]
    if others:
        notes.append(f"left aside: {', '.join(others)}")
    if not fields:
        notes.append("it has no line of settings, only a prompt")
    if "Model" in fields:
        settings["model_name"] = fields["Model"]
    return {k: v for k, v in settings.items() if v is not None}, notes


# What the chunk `sd` may hold of a picture, beside what follows from it.
TYPES = {"prompt": str, "negative": str, "seed": int, "steps": int, "cfg": (int, float), "sampler": str,
         "weights": str, "model": str, "cfg_rescale": (int, float), "init_image": str, "strength": (int, float),
         "vae": str, "text_encoder": str, "tokenizer": str, "prediction": str, "zero_terminal_snr": bool,
         "spacing": str, "ddim_timesteps": str, "long_prompts": str, "lora": list}  # fmt: skip


def from_own(values: dict) -> dict | None:
    """The chunk `sd` as settings, None if it is not this project's."""
    size = values.get("size")
    if not {"prompt", "seed", "steps", "sampler"} <= set(values) or any(
        not isinstance(values[k], kind) or (isinstance(values[k], bool) and kind is not bool)
        for k, kind in TYPES.items()
        if k in values
    ):
        return None
    settings = {k: values[k] for k in TYPES if k in values}
    if isinstance(size, list) and len(size) == 2 and all(type(v) is int for v in size):
        settings |= {"width": size[0], "height": size[1]}
    if loras := settings.pop("lora", []):
        kinds = {"path": str, "weight": int | float, "sha256": str}
        if not all(isinstance(a, dict) and all(isinstance(a.get(k), kind) for k, kind in kinds.items()) for a in loras):
            return None
        settings["lora"] = [f"{lora['path']}:{lora['weight']!r}" for lora in loras]
        settings["lora_hashes"] = [lora["sha256"] for lora in loras]
    settings["plain_prompt"] = values.get("prompt_syntax") != "weights"  # pictures from before there was a syntax
    return settings


def read_settings(path: str | Path) -> tuple[dict, list[str]]:
    """What a PNG says of how it was painted -> settings by the names of SD_ImageGen's flags, and sentences about what
    cannot be honoured. InputError if it says nothing."""
    try:
        with Image.open(path) as picture:
            if picture.format != "PNG":
                raise InputError(f"--from_png wants a PNG with its settings, found {picture.format} in {path}")
            texts = dict(picture.text)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as e:
        if isinstance(e, InputError):
            raise
        raise InputError(f"--from_png wants a PNG, and {path} could not be read as one ({e})") from None
    try:
        own = json.loads(texts.get("sd", "null"))
    except ValueError:
        own = None
    if isinstance(own, dict) and "prompts" in own and "prompt" not in own:
        raise InputError(f"--from_png wants one picture, and {path} is a grid of several: give one of those")
    settings = from_own(own) if isinstance(own, dict) else None
    notes = []
    if settings is None:
        if "parameters" not in texts:
            raise InputError(f"--from_png wants a PNG with settings, and {path} carries neither `sd` nor `parameters`")
        settings, notes = from_parameters(texts["parameters"])
    for prompt in {settings["prompt"], settings.get("negative", "")}:
        if not settings["plain_prompt"]:
            notes += [f"{name} is painted as plain words" for name in foreign_syntax(prompt)]
    if "seed" in settings and not 0 <= settings["seed"] < SEEDS:
        raise InputError(f"{path} says seed {settings['seed']}: give --seed, from 0 to {SEEDS - 1}")
    return settings, list(dict.fromkeys(notes))
