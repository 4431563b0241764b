"""Many pictures painted into a folder: numbered, shared by processes, gone on with after a stop."""

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch

from sd.device import DTYPES, Place
from sd.errors import InputError
from sd.features import PictureSet, together
from sd.files import claim_folder, make_writable, write_manifest
from sd.output import save_png
from sd.painting import (
    at_full_speed,
    encode_pairs,
    encoded_at_once,
    make_sampler,
    paint_batches,
    sampler_options,
)
from sd.prompts import check_seed, check_text, read_prompts
from sd.samplers import SAMPLERS
from sd.weights.read import Model
from sd.workers import progress
from SD_Model import weights_hash

PROGRAM = "SD_Evaluate.py"  # in the manifests of folders


@dataclass(frozen=True)
class Painting:
    """How pictures are painted; all of it but the last two decides what they are."""

    prompts: tuple[str, ...]  # picture i has prompts[i % len(prompts)], as plain text
    sampler: str
    steps: int
    cfg: float
    seed: int  # of picture 0; picture i has seed + i
    weights: str  # ema or live
    dtype: str
    size: int  # pixels a side
    n: int
    batch: int

    def about(self, model: Model) -> dict:
        """What each PNG says, beside its prompt and seed."""
        options = sampler_options(self.sampler, model.schedule, model.sampling)
        return {
            "steps": self.steps, "cfg": self.cfg, "sampler": self.sampler, "size": [self.size, self.size],
            "weights": self.weights, "dtype": self.dtype, "rng": "cpu", "prompt_syntax": "plain",
            "long_prompts": "padded", "spacing": options.get("spacing"),
        }  # fmt: skip


def prompts_for(file: str | None, real: PictureSet) -> tuple[str, ...]:
    """The prompts of a file, or the real pictures' captions in the order of the pictures' hashes. InputError if there
    are none."""
    if file is not None:
        return tuple(row["prompt"] for row in read_prompts(file))
    captions = [p.caption for p in real.pictures if p.caption]
    if not captions:
        raise InputError(f"the pictures of {real.source} have no captions to paint: give --prompts FILE")
    for i, caption in enumerate(captions):
        check_text(caption, f"{real.source}, caption {i}", "caption")
    return tuple(captions)


def check_painting(how: Painting):
    """InputError for settings that no model takes."""
    if how.sampler not in SAMPLERS:
        raise InputError(f"--sampler wants one of {', '.join(SAMPLERS)}, found {how.sampler!r}")
    if not math.isfinite(how.cfg):
        raise InputError(f"--cfg wants a number, found {how.cfg}")
    check_seed(how.seed, "--seed")
    check_seed(how.seed + how.n - 1, "--seed and --n", "the last seed")
    for name in ("n", "batch", "steps"):
        if getattr(how, name) < 1:
            raise InputError(f"--{name} wants at least 1, found {getattr(how, name)}")


def paint_folder(folder: Path, model: Model, source, how: Painting, place: Place) -> list[str]:
    """Paint pictures 000000.png to n - 1 that are not yet there; returns the names of all n.

    The folder's manifest keeps the hashes of the model and of all settings: InputError if they differ. Each process
    paints its share. A picture depends on its prompt, seed and settings, and on nothing else. source: what the PNGs
    call the model.
    """
    device, dtype = place.device, DTYPES[how.dtype]
    check_painting(how)
    if how.steps > model.schedule.steps:
        raise InputError(f"--steps wants 1 to {model.schedule.steps}, found {how.steps}")
    names = [f"{i:06d}.png" for i in range(how.n)]

    def load():
        return model.unet(device, dtype), model.vae().to(device, dtype), model.text_encoder()

    unet, vae, text_encoder = together(place, load)
    factor, z = vae.config.factor, vae.config.latent_channels
    if how.size % factor or how.size < factor:
        raise InputError(f"--size wants a multiple of {factor} for this model, found {how.size}")
    about, options = how.about(model), sampler_options(how.sampler, model.schedule, model.sampling)

    def claim() -> list[int]:
        make_writable(folder)
        parts = {"unet": unet, "vae": vae, "text_encoder": text_encoder}
        settings = {k: v for k, v in about.items() if v is not None} | {
            "seed": how.seed,
            "prompts": hashlib.sha256(json.dumps(how.prompts).encode()).hexdigest(),
            "schedule": model.schedule.config,
            "sampling": options,
            "model": {name: weights_hash(part) for name, part in parts.items()},
        }
        claim_folder(folder, PROGRAM, settings)
        write_manifest(folder, {"script": PROGRAM, "settings": settings, "complete": False})
        return [i for i, name in enumerate(names) if not (folder / name).is_file()]

    missing = together(place, claim, first_alone=True)[place.rank :: place.world]

    def work():
        if missing:
            told = about | {"model": str(source)}
            paint_numbers(folder, missing, model, how, told, (unet, vae, text_encoder), (z, factor), place)

    together(place, work)
    return names


@torch.no_grad()
def paint_numbers(folder: Path, numbers: list[int], model, how: Painting, about: dict, parts, shape, place: Place):
    """Paint the pictures of these numbers, each batch saved as soon as it is done. parts: UNet, VAE, text encoder;
    shape: latent channels, and pixels a latent."""
    device, dtype = place.device, DTYPES[how.dtype]
    z, factor = shape
    text_encoder = parts[2].to(device, dtype)
    unet, vae = at_full_speed(*parts[:2], device, dtype)
    sampler = make_sampler(how.sampler, model.schedule, model.sampling)
    window = encoded_at_once(how.batch)
    try:
        with progress(len(numbers), f"painting {folder.parent.name}", "img") as bar:
            for start in range(0, len(numbers), window):
                part = numbers[start : start + window]
                prompts = [how.prompts[i % len(how.prompts)] for i in part]
                contexts, nulls = encode_pairs(text_encoder, prompts, [""] * len(part))
                for k, picture in paint_batches(
                    unet, vae, contexts, nulls, [how.seed + i for i in part],
                    (z, how.size // factor, how.size // factor), sampler=sampler, steps=how.steps, cfg=how.cfg,
                    batch=how.batch, device=device, dtype=dtype,
                ):  # fmt: skip
                    own = {"prompt": prompts[k], "negative": "", "seed": how.seed + part[k]}
                    save_png(folder / f"{part[k]:06d}.png", picture, own | about)
                    bar.update()
    except torch.OutOfMemoryError:
        raise InputError(f"--batch {how.batch} is too much for {device}'s memory: give a smaller one") from None
