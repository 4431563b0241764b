"""Text, and negative text, to pictures.

    python SD_ImageGen.py --model runs/demo --prompt "a red circle" --out out
    python SD_ImageGen.py --model runs/final/checkpoints/step_00035000 --prompt "a portrait of an old sailor" \
        --negative "blurry, cropped" --steps 100 --cfg 8.5 --seed 7 --n 4 --out out
    python SD_ImageGen.py --model runs/final --prompts_file prompts.txt --batch 8 --out out
    python SD_ImageGen.py --model v1-5-pruned.safetensors --prompt "a lighthouse" --sampler dpmpp_2m_karras --steps 25
    python SD_ImageGen.py --model sd15_folder --prompt "the same in winter" --init_image house.jpg --strength 0.6

Picture i is drawn from seed + i by a CPU generator of its own, so it is the same whatever the batch, and nearly the
same on every device. PNGs carry their settings; several pictures also come as grid.png. Prompts may be of any length:
they are encoded in chunks of 75 tokens, joined along the sequence.
"""

import argparse
import json
import time
from pathlib import Path

from sd.device import DTYPES, layout, pick_device
from sd.errors import InputError, run
from sd.files import make_writable
from sd.fused import FusedUNet, apply
from sd.graphs import Graphed
from sd.painting import decode_latents, encode_pairs, fast, make_sampler, sample_latents
from sd.pictures import grid, load_picture, save_png
from sd.samplers import SAMPLERS
from sd.speed import sampling_benchmark
from sd.weights.read import load_vae, open_model
from SD_Model import TextEncoder


def read_jobs(args) -> list[dict]:
    """One job a picture: prompt, negative, seed. A prompts file has a prompt a line, or .jsonl objects with `prompt`
    and, if wanted, `negative` and `seed`."""
    if args.benchmark is not None and args.prompts_file is None:
        args.prompt = args.prompt or ""  # the words do not matter
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
    p.add_argument("--cfg_rescale", type=float, default=0.0, help="0 to 1; 0.7 for zero-SNR models, which burn else")
    p.add_argument("--sampler", default="ddim", help=", ".join(SAMPLERS))
    p.add_argument("--init_image", help="a picture to start from instead of noise")
    p.add_argument("--strength", type=float, default=0.75, help="0 to 1, with --init_image: how much may change")
    p.add_argument("--vae", help="a VAE other than the model's: folder, file or hub name")
    p.add_argument("--text_encoder", help="a text encoder other than the model's: folder or hub name")
    p.add_argument("--weights", choices=["ema", "live"], default="ema")
    p.add_argument("--device", help="cuda, cuda:1, mps or cpu; default: the best there is")
    p.add_argument("--dtype", choices=list(DTYPES), help="default: bf16 on CUDA, fp32 elsewhere")
    p.add_argument("--benchmark", type=int, metavar="STEPS", help="time so many steps with --batch, write nothing")
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
    for name in ("batch", "benchmark"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"--{name} wants at least 1, found {getattr(args, name)}")
    if not 0 <= args.cfg_rescale <= 1:
        raise InputError(f"--cfg_rescale wants 0 to 1, found {args.cfg_rescale}")
    model = open_model(args.model, weights=args.weights)
    print(model.found)
    height = args.height if args.height is not None else model.size
    width = args.width if args.width is not None else model.size
    if not 1 <= args.steps <= model.schedule.steps:
        raise InputError(f"--steps wants 1 to {model.schedule.steps}, found {args.steps}")
    sampler = make_sampler(args.sampler, model.schedule, model.sampling, args.strength)
    if args.init_image is not None:
        if not 0 < args.strength <= 1 or int(args.steps * args.strength) < 1:
            raise InputError(f"--strength wants 0 to 1 and, of {args.steps} steps, at least one; found {args.strength}")
    folder = out.parent if out.suffix.lower() == ".png" else out
    if args.benchmark is None:
        make_writable(folder)

    # Text encoder, UNet and VAE are on the device one after the other, never together.
    vae = model.vae() if args.vae is None else load_vae(args.vae)
    factor, z = vae.config.factor, vae.config.latent_channels
    if height < factor or width < factor or height % factor or width % factor:
        raise InputError(f"--width and --height want multiples of {factor}, found {width} x {height}")
    init = None
    if args.init_image is not None:
        picture = load_picture(args.init_image, width, height)
        init = vae.to(device, dtype).encode(picture.to(device, dtype)).float().cpu()  # [1, z, h, w]
        vae = vae.cpu()
    text_encoder = model.text_encoder() if args.text_encoder is None else TextEncoder.from_pretrained(args.text_encoder)
    text_encoder = text_encoder.to(device, dtype)
    contexts, nulls = encode_pairs(text_encoder, [j["prompt"] for j in jobs], [j["negative"] for j in jobs])
    del text_encoder
    unet = fast(model.unet(device, dtype), device, dtype)
    if args.benchmark:
        load_s = round(time.time() - started, 2)  # all three networks, and the prompt encoded
        if isinstance(unet, FusedUNet):
            apply(vae)
        row = sampling_benchmark(unet, vae, contexts[0], args, (z, height // factor, width // factor), device, dtype)
        return print(json.dumps({"benchmark": "sample", "model": args.model, "load_s": load_s} | row))
    if isinstance(unet, FusedUNet):
        unet, vae = Graphed(unet), apply(vae)
    latents = sample_latents(
        unet, contexts, nulls, [j["seed"] for j in jobs], (z, height // factor, width // factor), sampler=sampler,
        steps=args.steps, cfg=args.cfg, batch=args.batch, device=device, progress=True, rescale=args.cfg_rescale,
        init=init,
    )  # fmt: skip
    del unet
    pictures = decode_latents(vae.to(device, dtype, memory_format=layout(device)), latents, args.batch, device, dtype)

    common = {"steps": args.steps, "cfg": args.cfg, "sampler": args.sampler, "size": [width, height],
              "weights": args.weights, "model": str(args.model)}  # fmt: skip
    if args.cfg_rescale:
        common["cfg_rescale"] = args.cfg_rescale
    if init is not None:
        common |= {"init_image": args.init_image, "strength": args.strength}
    for i, (job, picture) in enumerate(zip(jobs, pictures)):
        save_png(out if folder != out else out / f"{i:05d}.png", picture, job | common)
    if len(jobs) > 1:
        save_png(out / "grid.png", grid(pictures), common | {"prompts": [j["prompt"] for j in jobs]})
    print(f"{len(jobs)} pictures of {width} x {height} in {time.time() - started:.1f} s: {out}")


if __name__ == "__main__":
    run(main)
