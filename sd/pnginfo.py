"""Settings of a picture as text, as other programs write and read it."""

import json
from pathlib import Path

# What A1111 calls the samplers, so that other tools read them back.
SAMPLER_TITLES = {"ddpm": "DDPM", "ddim": "DDIM", "dpmpp_2m": "DPM++ 2M", "dpmpp_2m_karras": "DPM++ 2M Karras",
                  "euler": "Euler", "euler_a": "Euler a", "heun": "Heun"}  # fmt: skip


def parameters_text(settings: dict) -> str:
    """Settings of a picture in A1111's form: prompt, negative prompt, and one line of `name: value` pairs."""
    pairs = {
        "Steps": settings["steps"],
        "Sampler": SAMPLER_TITLES[settings["sampler"]],
        "CFG scale": settings["cfg"],
        "Seed": settings["seed"],
        "Size": "{}x{}".format(*settings["size"]),
        "Model": Path(settings["model"]).stem,
        "CFG rescale": settings.get("cfg_rescale"),
        "Denoising strength": settings.get("strength"),
    }
    pairs = {k: str(v) for k, v in pairs.items() if v is not None}
    pairs = {k: json.dumps(v, ensure_ascii=False) if set(v) & set(',:"\n') else v for k, v in pairs.items()}
    negative = f"Negative prompt: {settings['negative']}\n" if settings["negative"] else ""
    return f"{settings['prompt']}\n{negative}" + ", ".join(f"{k}: {v}" for k, v in pairs.items())
