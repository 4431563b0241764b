"""Text, and negative text, to pictures.

    python SD_ImageGen.py --model runs/demo --prompt "a red circle" --out out
    python SD_ImageGen.py --model runs/final/checkpoints/step_00035000 --prompt "a portrait of an old sailor" \
        --negative "blurry, cropped" --steps 100 --cfg 8.5 --seed 7 --n 4 --out out
    python SD_ImageGen.py --model runs/final --prompts_file prompts.txt --batch 8 --out out

Picture i is drawn from seed + i by a CPU generator of its own, so it is the same whatever the batch, and nearly the
same on every device. PNGs carry their settings; several pictures also come as grid.png.
"""

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tqdm import tqdm

import SD_Convert
from SD_Model import DDIM, DDPM, InputError, NoiseSchedule, run_cli

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(name: str | None) -> torch.device:
    """The named device, else CUDA, else Apple MPS, else the CPU. InputError if the named one is absent."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.split(":")[0]
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(kind):
        raise InputError(f"--device {name} was wanted, and this machine has {[k for k, v in present.items() if v]}")
    return torch.device(name)


def initial_noise(seeds: list[int], shape: tuple[int, int, int]) -> torch.Tensor:
    """Standard normal noise fp32 [len(seeds), z, h, w] on the CPU, each picture from its own generator."""
    return torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds])


def guided(unet, context, null_context, cfg: float):
    """The prediction model(x, t) under classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598).

    null + cfg (text - null), both from one UNet call. cfg 1 is the text alone, cfg 0 the null (or negative) alone.
    context, null_context [B, T, D] have the dtype the UNet runs in; x [B, C, H, W] may be of any.
    """
    one_sided = {1.0: context, 0.0: null_context}.get(float(cfg))
    both = None if one_sided is not None else torch.cat([null_context, context])  # [2B, T, D]

    def model(x: torch.Tensor, t) -> torch.Tensor:
        if one_sided is not None:
            ts = torch.full((len(x),), t, device=x.device)
            return unet(x.to(one_sided.dtype), ts, one_sided).to(x.dtype)
        ts = torch.full((2 * len(x),), t, device=x.device)
        null, text = unet(torch.cat([x, x]).to(both.dtype), ts, both).to(x.dtype).chunk(2)  # each [B, C, H, W]
        return null + cfg * (text - null)

    return model


def make_sampler(name: str, schedule: NoiseSchedule, settings: dict):
    """sample(model, x, steps, randn, callback) for a sampler's name. settings: spacing, offset and the like."""
    if name == "ddim":
        return DDIM(schedule, **settings).sample
    if name == "ddpm":
        return DDPM(schedule, **{k: v for k, v in settings.items() if k in ("spacing", "offset")}).sample
    raise InputError(f"--sampler wants ddpm or ddim, found {name!r}")


@torch.no_grad()
def sample_latents(unet, contexts, null_contexts, seeds, shape, *, sampler, steps, cfg, batch, device, progress=False):
    """Denoise len(seeds) pictures, `batch` at a time.

    contexts, null_contexts [N, T, D]; shape (z, h, w) of one latent; sampler from make_sampler.
    Returns fp32 [N, z, h, w] on the CPU.
    """
    out = []
    bar = tqdm(total=math.ceil(len(seeds) / batch) * steps, desc="sampling", unit="step", disable=not progress)
    for i in range(0, len(seeds), batch):
        part = seeds[i : i + batch]
        generators = [torch.Generator().manual_seed(s) for s in part]

        def randn(_, generators=generators):
            return torch.stack([torch.randn(shape, generator=g) for g in generators]).to(device)

        x = randn(None)  # the first draw of each picture's generator: initial_noise(part, shape)
        context, null = contexts[i : i + batch].to(device), null_contexts[i : i + batch].to(device)
        x = sampler(guided(unet, context, null, cfg), x, steps, randn=randn, callback=lambda *_: bar.update())
        out.append(x.float().cpu())
    bar.close()
    return torch.cat(out)


@torch.no_grad()
def decode_latents(vae, latents: torch.Tensor, batch: int, device, dtype=torch.float32) -> np.ndarray:
    """Scaled latents [N, z, h, w] -> uint8 RGB [N, H, W, 3]. InputError if the pictures are not finite."""
    pictures = []
    for part in latents.split(batch):
        images = vae.decode(part.to(device, dtype)).float()  # [B, 3, H, W], -1..1
        if not images.isfinite().all():
            raise InputError(f"the VAE gave non-finite pictures in {dtype}; use --dtype fp32 or bf16")
        images = ((images.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        pictures.append(images.permute(0, 2, 3, 1).cpu().numpy())
    return np.concatenate(pictures)


@torch.no_grad()
def encode_texts(text_encoder, texts: list[str], batch: int = 64) -> torch.Tensor:
    """Contexts [N, T, D] on the encoder's device, each distinct text encoded once."""
    distinct = list(dict.fromkeys(texts))
    contexts = torch.cat([text_encoder.encode(distinct[i : i + batch]) for i in range(0, len(distinct), batch)])
    return contexts[[distinct.index(t) for t in texts]] if len(distinct) < len(texts) else contexts


def grid(pictures: np.ndarray, columns: int | None = None, pad: int = 2) -> np.ndarray:
    """Pictures uint8 [N, H, W, 3] side by side on white: uint8 [rows (H + pad) + pad, ...]."""
    n, h, w, _ = pictures.shape
    columns = columns or math.ceil(math.sqrt(n))
    rows = math.ceil(n / columns)
    sheet = np.full((rows * (h + pad) + pad, columns * (w + pad) + pad, 3), 255, np.uint8)
    for i, picture in enumerate(pictures):
        y, x = (i // columns) * (h + pad) + pad, (i % columns) * (w + pad) + pad
        sheet[y : y + h, x : x + w] = picture
    return sheet


def save_png(path: Path, picture: np.ndarray, settings: dict | None = None):
    """Write uint8 RGB [H, W, 3], with its settings as JSON in the text chunk `sd`."""
    info = PngInfo()
    if settings:
        info.add_itxt("sd", json.dumps(settings, ensure_ascii=False))
    Image.fromarray(picture).save(path, pnginfo=info)


def read_jobs(args) -> list[dict]:
    """One job a picture: prompt, negative, seed. A prompts file has a prompt a line, or .jsonl objects with `prompt`
    and, if wanted, `negative` and `seed`."""
    if (args.prompt is None) == (args.prompts_file is None):
        raise InputError("give either --prompt TEXT or --prompts_file FILE")
    if args.n < 1:
        raise InputError(f"--n wants at least 1 picture a prompt, found {args.n}")
    lines = [{"prompt": args.prompt}]
    if args.prompts_file is not None:
        try:
            text = Path(args.prompts_file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"--prompts_file wants a UTF-8 text file, found {args.prompts_file} ({e})") from None
        lines = [{"prompt": line.strip()} for line in text.splitlines() if line.strip()]
        if args.prompts_file.endswith(".jsonl"):
            try:
                lines = [json.loads(line["prompt"]) for line in lines]
                lines = [{k: row[k] for k in ("prompt", "negative", "seed") if k in row} for row in lines]
            except (json.JSONDecodeError, TypeError) as e:
                raise InputError(f"{args.prompts_file} wants one JSON object a line ({e})") from None
        if not lines or any(not isinstance(row.get("prompt"), str) for row in lines):
            raise InputError(f"{args.prompts_file} wants at least one prompt, and in .jsonl a `prompt` on every line")
    jobs = []
    for row in lines:
        for k in range(args.n):
            seed = row["seed"] + k if "seed" in row else args.seed + len(jobs)
            jobs.append({"prompt": row["prompt"], "negative": row.get("negative", args.negative), "seed": seed})
    return jobs


def parse_args(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="a checkpoint or run folder, or any SD 1.x file or folder")
    p.add_argument("--prompt", help="what to paint")
    p.add_argument("--negative", default="", help="what to steer away from")
    p.add_argument("--prompts_file", help=".txt with a prompt a line, or .jsonl with prompt, negative, seed")
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--cfg", type=float, default=7.5, help="guidance scale; 1: the prompt alone, 0: the negative alone")
    p.add_argument("--seed", type=int, default=0, help="picture i uses seed + i")
    p.add_argument("--n", type=int, default=1, help="pictures a prompt")
    p.add_argument("--batch", type=int, default=4, help="pictures at once; does not change them")
    p.add_argument("--width", type=int, help="pixels, a multiple of 8; default: the size the model was trained at")
    p.add_argument("--height", type=int)
    p.add_argument("--sampler", default="ddim", help="ddpm or ddim")
    p.add_argument("--weights", choices=["ema", "live"], default="ema")
    p.add_argument("--device", help="cuda, cuda:1, mps or cpu; default: the best there is")
    p.add_argument("--dtype", choices=list(DTYPES), help="default: bf16 on CUDA, fp32 elsewhere")
    p.add_argument("--out", default="out", help="a folder, or a .png for one picture")
    return p.parse_args(argv)


def main(argv=None):
    args = parse_args(argv)
    started = time.time()
    device = pick_device(args.device)
    dtype = DTYPES[args.dtype or ("bf16" if device.type == "cuda" else "fp32")]
    jobs = read_jobs(args)
    out = Path(args.out)
    if out.suffix.lower() == ".png" and len(jobs) > 1:
        raise InputError(f"--out {out} names one picture and {len(jobs)} were asked for; give a folder")
    if args.batch < 1:
        raise InputError(f"--batch wants at least 1, found {args.batch}")
    model = SD_Convert.open_model(args.model, weights=args.weights)
    print(model.found)
    height, width = args.height or model.size, args.width or model.size
    if not 1 <= args.steps <= model.schedule.steps:
        raise InputError(f"--steps wants 1 to {model.schedule.steps}, found {args.steps}")
    sampler = make_sampler(args.sampler, model.schedule, model.sampling)
    folder = out.parent if out.suffix.lower() == ".png" else out
    try:  # find out before the work, not after it
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as e:
        raise InputError(f"--out wants a folder that can be written, found {folder} ({e.strerror})") from None

    # Text encoder, UNet and VAE are on the device one after the other, never together.
    text_encoder = model.text_encoder().to(device, dtype)
    contexts = encode_texts(text_encoder, [j["prompt"] for j in jobs])
    null_contexts = encode_texts(text_encoder, [j["negative"] for j in jobs])
    del text_encoder
    vae = model.vae()
    factor, z = vae.config.factor, vae.config.latent_channels
    if height < factor or width < factor or height % factor or width % factor:
        raise InputError(f"--width and --height want multiples of {factor}, found {width} x {height}")
    unet = model.unet().to(device, dtype, memory_format=torch.channels_last if device.type == "cuda" else None)
    latents = sample_latents(
        unet, contexts, null_contexts, [j["seed"] for j in jobs], (z, height // factor, width // factor),
        sampler=sampler, steps=args.steps, cfg=args.cfg, batch=args.batch, device=device, progress=True,
    )  # fmt: skip
    del unet
    pictures = decode_latents(vae.to(device, dtype), latents, args.batch, device, dtype)

    common = {"steps": args.steps, "cfg": args.cfg, "sampler": args.sampler, "size": [width, height],
              "weights": args.weights, "model": str(args.model)}  # fmt: skip
    for i, (job, picture) in enumerate(zip(jobs, pictures)):
        save_png(out if folder != out else out / f"{i:05d}.png", picture, job | common)
    if len(jobs) > 1:
        save_png(out / "grid.png", grid(pictures), common | {"prompts": [j["prompt"] for j in jobs]})
    print(f"{len(jobs)} pictures of {width} x {height} in {time.time() - started:.1f} s: {out}")


if __name__ == "__main__":
    run_cli(main)
