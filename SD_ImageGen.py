"""Text, and negative text, to pictures.

    python SD_ImageGen.py --model runs/demo --prompt "a red circle" --out out
    python SD_ImageGen.py --model runs/final/checkpoints/step_00035000 --prompt "a portrait of an old sailor" \\
        --negative "blurry, cropped" --steps 100 --cfg 8.5 --seed 7 --n 4 --out out
    python SD_ImageGen.py --model runs/final --prompts_file prompts.jsonl --batch 8 --grid 6 --out out
    python SD_ImageGen.py --model v1-5-pruned.safetensors --prompt "a lighthouse" --sampler dpmpp_2m_karras --steps 25
    python SD_ImageGen.py --model sd15_folder --prompt "the same in winter" --init_image house.jpg --strength 0.6
    python SD_ImageGen.py --model runs/final --lora cat.safetensors:0.8 --lora runs/ink --prompt "a cat, ink drawing"
    python SD_ImageGen.py --model runs/final --from_png out/00003.png --steps 100 --out more
    torchrun --nproc_per_node=8 SD_ImageGen.py --model runs/final --prompts_file 30k.jsonl --tars --out painted

Picture i is drawn from seed + i by a CPU generator of its own, so it is the same whatever the batch, and nearly the
same on every device. Each batch is saved as soon as it is done; numbers go on behind the pictures that are in the
folder, and nothing is overwritten without --overwrite. PNGs carry their settings; several pictures also come as a grid
with each one's prompt below it. The last line that is printed names the files.

With --tars or --folders any number of processes (torchrun, srun, a Slurm array, by hand on several machines) share the
pictures of one call. They paint what is missing in --out and end when all is there: the same command goes on after any
stop, and the pictures are the same whatever the number of processes.

Prompts have A1111's syntax of weights, `(word:1.3)`, `(word)`, `[word]`, `\\(` and BREAK, unless --plain_prompt is
given, and may be of any length: they are encoded in chunks of 75 tokens, joined along the sequence. docs/PAINTING.md
says how.
"""

import argparse
import hashlib
import json
import math
import os
import sys
import time

import torch
from tqdm import tqdm

from sd.bulk import Bulk
from sd.cli import parser
from sd.device import DTYPES, find_ranks, own_device, pick_device, usual_dtype
from sd.errors import InputError, run
from sd.fused import FusedUNet, apply
from sd.output import Output
from sd.painting import (
    at_full_speed,
    encode_pairs,
    encoded_at_once,
    fast,
    load_picture,
    make_sampler,
    paint_batches,
    sampler_options,
)
from sd.pictures import check_side
from sd.pnginfo import read_settings
from sd.prompts import (
    LONG_PROMPTS,
    SEEDS,
    check_loras,
    check_seed,
    check_text,
    foreign_syntax,
    parse_prompt,
    read_prompts,
)
from sd.samplers import SAMPLERS
from sd.speed import sampling_benchmark
from sd.weights.lora import is_lora, names_its_model
from sd.weights.merge import with_loras
from sd.weights.read import Model, load_text_encoder, load_vae, null_of, open_model
from SD_Model import weights_hash


def read_rows(args) -> list[dict]:
    """What is to be painted, --n pictures each: prompt, negative, where (for messages) and, if the row has one, seed.
    InputError for whatever is wrong with any of them."""
    if args.benchmark is not None and args.prompts_file is None:
        args.prompt = args.prompt or ""  # the words do not matter
    if (args.prompt is None) == (args.prompts_file is None):
        raise InputError("give either --prompt TEXT or --prompts_file FILE")
    rows = [{"prompt": args.prompt, "where": "--prompt"}]
    if args.prompts_file is not None:
        rows = read_prompts(args.prompts_file)
    check_text(args.negative, "--negative", "negative")
    notes = {}
    for i, row in enumerate(rows):
        row.setdefault("negative", args.negative)
        check_text(row["prompt"], row["where"], "prompt")
        last = row["seed"] + args.n - 1 if "seed" in row else args.seed + (i + 1) * args.n - 1
        check_seed(last, row["where"], "the last seed")
        if args.plain_prompt:
            continue
        for side in ("prompt", "negative"):
            try:
                check_loras(row[side])
                parse_prompt(row[side])
            except InputError as e:
                raise InputError(f"{row['where']}: {e}, or give --plain_prompt") from None
            notes |= dict.fromkeys(foreign_syntax(row[side]))
    for name in notes:
        print(f"note: {name} is painted as plain words here")
    return rows


def job(rows: list[dict], args, i: int) -> dict:
    """Prompt, negative and seed of picture i."""
    row, k = rows[i // args.n], i % args.n
    seed = row["seed"] + k if "seed" in row else args.seed + i
    return {"prompt": row["prompt"], "negative": row["negative"], "seed": seed}


# What holds where neither a flag nor --from_png says otherwise.
DEFAULTS = dict(negative="", steps=50, cfg=7.5, seed=0, n=1, batch=4, cfg_rescale=0.0, sampler="ddim", strength=0.75,
                plain_prompt=False, long_prompts="padded", ddim_timesteps="diffusers", weights="ema", out="out",
                overwrite=False)  # fmt: skip


def parse_args(argv=None):
    p = parser(__doc__, DEFAULTS)
    g = p.add_argument_group("what to paint with, and where to")
    g.add_argument("--model", help="a checkpoint or run folder, or any SD 1.x file or folder; must be given")
    g.add_argument("--from_png", metavar="FILE", help="paint again what a PNG says, ours or A1111's; flags go on top, "
                   "and what it says before the defaults (default: none)")  # fmt: skip
    g.add_argument("--out", help="a folder, or a .png for one picture")
    g.add_argument("--overwrite", action="store_true", default=None, help="number from 0 and write over what is there")
    g.add_argument("--grid", type=int, metavar="COLUMNS", help="pictures in a row of the grid (default: as many as "
                   "there are rows)")  # fmt: skip

    g = p.add_argument_group("prompts")
    g.add_argument("--prompt", help="what to paint; or --prompts_file")
    g.add_argument("--negative", help="what to steer away from (default: nothing)")
    g.add_argument("--prompts_file", metavar="FILE", help=".txt with a prompt a line, or .jsonl with prompt, negative, "
                   "seed (default: none)")  # fmt: skip
    g.add_argument("--plain_prompt", action=argparse.BooleanOptionalAction,
                   help="brackets, BREAK and backslashes are words, not A1111's syntax of weights")  # fmt: skip
    g.add_argument("--long_prompts", choices=LONG_PROMPTS, help="over 75 tokens: cut every 75, the shorter of prompt "
                   "and negative padded; or cut at commas, or between weighted words, as A1111 and ComfyUI do by "
                   "default, without padding")  # fmt: skip
    g.add_argument("--seed", type=int, help=f"picture i uses seed + i; 0 to {SEEDS - 1}")
    g.add_argument("--n", type=int, help="pictures a prompt")

    g = p.add_argument_group("many pictures, by any number of processes, resumable")
    g.add_argument("--tars", type=int, nargs="?", const=256, metavar="PICTURES", help="into WebDataset tars of so many "
                   "(256 if no number follows): png, txt, json (default: one folder of numbered pictures)")  # fmt: skip
    g.add_argument("--folders", type=int, nargs="?", const=256, metavar="PICTURES", help="the same files in folders of "
                   "so many (default: one folder of numbered pictures)")  # fmt: skip

    g = p.add_argument_group("sampling")
    g.add_argument("--sampler", help=", ".join(SAMPLERS))
    g.add_argument("--steps", type=int, help="sampling steps")
    g.add_argument("--cfg", type=float, help="guidance scale; 1: the prompt alone, 0: the negative alone")
    g.add_argument("--cfg_rescale", type=float, help="0 to 1; 0.7 for zero-SNR models, which burn else")
    g.add_argument("--spacing", choices=["leading", "trailing", "linspace"],
                   help="which timesteps (default: the model's, else diffusers' own for the sampler)")  # fmt: skip
    g.add_argument("--ddim_timesteps", choices=["diffusers", "a1111", "comfyui"], help="ddim: exactly --steps of them, "
                   "or the list of the original code, which A1111 and ComfyUI use: 31 for 30")  # fmt: skip
    g.add_argument("--width", type=int, help="pixels, a multiple of 8 (default: the size the model was trained at)")
    g.add_argument("--height", type=int, help="the same (default: the size the model was trained at)")
    g.add_argument("--init_image", metavar="FILE", help="a picture to start from (default: noise)")
    g.add_argument("--strength", type=float, help="0 to 1, with --init_image: how much may change")

    g = p.add_argument_group("the model")
    g.add_argument("--weights", choices=["ema", "live"], help="the average of the weights, or the last ones")
    g.add_argument("--lora", action="append", metavar="PATH[:WEIGHT]", help="add it to the model's weights; several "
                   "times for several, which add up (default: none; weight 1)")  # fmt: skip
    g.add_argument("--vae", help="folder, file or hub name (default: the model's)")
    g.add_argument("--text_encoder", help="folder or hub name (default: the model's)")
    g.add_argument("--tokenizer", help="folder or hub name (default: the model's)")
    g.add_argument("--prediction", choices=["epsilon", "v"], help="what the UNet predicts (default: what the file "
                   "says, else epsilon)")  # fmt: skip
    g.add_argument("--zero_terminal_snr", action=argparse.BooleanOptionalAction, default=None,
                   help="is its last timestep pure noise (default: what the file says, else no)")  # fmt: skip

    g = p.add_argument_group("running")
    g.add_argument("--batch", type=int, help="pictures at once; does not change them")
    g.add_argument("--device", help="cuda, cuda:1, mps or cpu (default: the best there is)")
    g.add_argument("--dtype", choices=list(DTYPES), help="of networks (default: bf16 on CUDA, fp32 elsewhere)")
    g.add_argument("--benchmark", type=int, metavar="STEPS", help="time so many steps with --batch and write nothing "
                   "(default: paint)")  # fmt: skip
    return p.parse_args(argv)


def settle(args):
    """Fill what no flag said from --from_png, then from DEFAULTS, and check it. InputError, or the same args."""
    if args.ddim_timesteps is not None and (args.spacing is not None or args.sampler not in (None, "ddim")):
        raise InputError("--ddim_timesteps is for --sampler ddim, and replaces --spacing: leave one of them out")
    if args.spacing is not None and args.sampler == "dpmpp_2m_karras":
        raise InputError("--spacing says nothing to dpmpp_2m_karras, whose sigmas are its own: leave it out")
    if args.from_png is not None:
        given, notes = read_settings(args.from_png)
        name, sampler = given.pop("model_name", None), given.pop("unknown_sampler", None)
        args.lora_hashes = given.pop("lora_hashes", []) if args.lora is None else []
        if sampler is not None and args.sampler is None:
            raise InputError(f"{args.from_png} wants the sampler {sampler!r}, which is not known here: give --sampler")
        if args.prompts_file is not None:
            given = {k: v for k, v in given.items() if k not in ("prompt", "negative")}
        if args.spacing is not None or args.sampler is not None:
            given.pop("ddim_timesteps", None)
        if args.ddim_timesteps is not None or args.sampler is not None:
            given.pop("spacing", None)
        for key, value in given.items():
            if getattr(args, key) is None:
                setattr(args, key, value)
        if args.init_image is None and "strength" in given:
            notes.append("it was painted over another picture, or in two passes: give --init_image for the first")
        if args.model is None:
            raise InputError(f"{args.from_png} names the model {name!r} and not where it lies: give --model")
        if name is not None:
            notes.append(f"it was painted with the model {name!r}, this one with {args.model}")
        for note in notes:
            print(f"note on {args.from_png}: {note}")
    else:
        args.lora_hashes = []
    if args.model is None:
        raise InputError("--model wants a checkpoint, a run folder, or any SD 1.x file or folder")
    for key, value in DEFAULTS.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    if args.sampler not in SAMPLERS:
        raise InputError(f"--sampler wants one of {', '.join(SAMPLERS)}, found {args.sampler!r}")
    for name, known in (("long_prompts", LONG_PROMPTS), ("ddim_timesteps", ("diffusers", "a1111", "comfyui"))):
        if getattr(args, name) not in known:
            raise InputError(f"--{name} wants one of {', '.join(known)}, found {getattr(args, name)!r}")
    for name in ("n", "batch", "benchmark", "steps", "grid"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"--{name} wants at least 1, found {getattr(args, name)}")
    if not math.isfinite(args.cfg):
        raise InputError(f"--cfg wants a number, found {args.cfg}")
    if not 0 <= args.cfg_rescale <= 1:
        raise InputError(f"--cfg_rescale wants 0 to 1, found {args.cfg_rescale}")
    if args.init_image is not None and not (0 < args.strength <= 1 and int(args.steps * args.strength) >= 1):
        raise InputError(f"--strength wants 0 to 1 and, of {args.steps} steps, at least one; found {args.strength}")
    check_seed(args.seed, "--seed")
    for name in ("width", "height"):
        check_side(getattr(args, name), 1, f"--{name}", "pixels, in multiples of 8")
    return args


def open_for(args) -> Model:
    """The model that the flags name, with what they say about it. args.lora becomes what PNGs say of the LoRAs."""
    if is_lora(args.model) and not names_its_model(args.model):
        raise InputError(f"--model {args.model} is a LoRA: give the model that it is for, and this one as --lora")
    model = open_model(args.model, args.weights, args.prediction, args.zero_terminal_snr, args.tokenizer)
    if args.vae is not None:
        model.vae = lambda: load_vae(args.vae, args.weights)
    if args.text_encoder is not None:
        given = args.text_encoder, args.tokenizer, model.text_length
        model.text_encoder = lambda: null_of(load_text_encoder(*given), model.null)
    if args.lora:
        model, loras = with_loras(model, args.lora, args.weights)
        for (lora, _), sha256 in zip(loras, args.lora_hashes):
            if lora.sha256 != sha256:
                print(f"note on {args.from_png}: {lora.path} is another file now, and the picture will be another")
        args.lora = [{"path": lora.path, "name": lora.name, "weight": w, "sha256": lora.sha256} for lora, w in loras]
    print(model.found)
    return model


def output_for(args, count: int) -> Output | Bulk:
    """Where `count` pictures go. InputError for flags that do not go together."""
    if args.tars is None and args.folders is None:
        try:
            world = find_ranks(os.environ)[1]
        except InputError:  # of something else: one process needs no rank
            world = 1
        if world > 1:
            raise InputError(f"{world} processes were started, and each would paint all: add --tars or --folders")
        return Output(args.out, count, args.overwrite, args.grid)
    if odd := [name for name in ("overwrite", "grid") if getattr(args, name)]:
        raise InputError(f"--{odd[0]} is of a folder of numbered pictures: drop it, or --tars and --folders")
    if args.tars is not None and args.folders is not None:
        raise InputError("--tars and --folders are two forms of the same: give one of them")
    return Bulk(args.out, *(("tars", args.tars) if args.folders is None else ("folders", args.folders)), count)


def main(argv=None):
    args = settle(parse_args(argv))
    output = None
    try:
        rows = read_rows(args)
        if args.benchmark is None:
            output = output_for(args, len(rows) * args.n)
        paint(args, rows, output)
    except KeyboardInterrupt:
        print(f"\nstopped: {output.told() if output else 'nothing was begun'}", file=sys.stderr)
        raise SystemExit(130) from None


def paint(args, rows: list[dict], output: Output | Bulk | None):
    """Open the model and paint all rows, batch after batch, each saved when it is done; or time it, --benchmark."""
    started = time.time()
    bulk = isinstance(output, Bulk)
    device = own_device(args.device) if bulk else pick_device(args.device)
    dtype = DTYPES[args.dtype or usual_dtype(device)]
    model = open_for(args)
    height = args.height if args.height is not None else model.size
    width = args.width if args.width is not None else model.size
    if args.steps > model.schedule.steps:
        raise InputError(f"--steps wants 1 to {model.schedule.steps}, found {args.steps}")
    sampling = dict(model.sampling)
    if args.spacing is not None:
        sampling["spacing"] = args.spacing
    if args.ddim_timesteps != "diffusers":
        sampling["timesteps"] = args.ddim_timesteps
    sampler = make_sampler(args.sampler, model.schedule, sampling, args.strength)
    picture = init = None
    if args.init_image is not None and min(width, height) > 0:
        picture = load_picture(args.init_image, width, height)

    vae = model.vae()
    factor, z = vae.config.factor, vae.config.latent_channels
    if height < factor or width < factor or height % factor or width % factor:
        raise InputError(f"--width and --height want multiples of {factor}, found {width} x {height}")
    shape = z, height // factor, width // factor
    vae = vae.to(device, dtype)
    if picture is not None:
        init = vae.encode(picture.to(device, dtype)).float().cpu()  # [1, z, h, w]
    text_encoder = model.text_encoder().to(device, dtype)
    if args.benchmark:
        context = encode_jobs(text_encoder, [job(rows, args, 0)], args)[0][0]
        unet = fast(model.unet(device, dtype), device, dtype)
        load_s = round(time.time() - started, 2)  # all three networks, and the prompt encoded
        if isinstance(unet, FusedUNet):
            apply(vae)
        row = sampling_benchmark(unet, vae, context, args, shape, device, dtype)
        return print(json.dumps({"benchmark": "sample", "model": args.model, "load_s": load_s} | row))
    unet, about = model.unet(device, dtype), settings_for_png(args, model, sampling, (width, height))
    if bulk:
        jobs = [job(rows, args, i) for i in range(output.count)]
        hashes = {name: weights_hash(part) for name, part in
                  (("unet", unet), ("vae", vae), ("text_encoder", text_encoder.model))}  # fmt: skip
        texts = hashlib.sha256(json.dumps(jobs).encode()).hexdigest()
        output.claim({"jobs": texts, "dtype": str(dtype), "weights_hash": hashes} | about)
    unet, vae = at_full_speed(unet, vae, device, dtype)
    bar = tqdm(total=output.count * args.steps, desc="sampling", unit="step", disable=bulk)

    def painted(jobs: list[dict], wanted: set[int] | None = None):
        """The jobs' pictures, in batches: index, uint8 RGB [H, W, 3], and what it says about itself."""
        contexts, nulls = encode_jobs(text_encoder, jobs, args)
        for i, image in paint_batches(
            unet, vae, contexts, nulls, [j["seed"] for j in jobs], shape, sampler=sampler, steps=args.steps,
            cfg=args.cfg, batch=args.batch, device=device, dtype=dtype, watch=bar.update, rescale=args.cfg_rescale,
            init=init, wanted=wanted,
        ):  # fmt: skip
            long = len(contexts[i]) > text_encoder.max_length
            yield i, image, jobs[i] | about | ({"padded": True} if long and args.long_prompts == "padded" else {})

    window = encoded_at_once(args.batch)
    try:
        if bulk:
            return output.paint(lambda i: job(rows, args, i), painted, window)
        with bar:
            for first in range(0, output.count, window):
                jobs = [job(rows, args, i) for i in range(first, min(output.count, first + window))]
                for i, image, settings in painted(jobs):
                    output.save(first + i, image, settings)
        sheet = output.save_grid(about, [job(rows, args, i)["prompt"] for i in range(len(output.paths))])
    except torch.OutOfMemoryError:
        raise InputError(f"--batch {args.batch} is too much for {device}'s memory: {output.told()}") from None
    except InputError as e:
        raise InputError(f"{e}; {output.told()}") from None
    print(f"{output.done} pictures of {width} x {height} in {time.time() - started:.1f} s:")
    print(output.written() + (f", {sheet}" if sheet else ""))


def encode_jobs(text_encoder, jobs: list[dict], args) -> tuple[list, list]:
    """Contexts of the jobs' prompts and negatives, each [T, D]."""
    sides = [[j[side] if args.plain_prompt else parse_prompt(j[side]) for j in jobs] for side in ("prompt", "negative")]
    return encode_pairs(text_encoder, *sides, args.long_prompts)


def settings_for_png(args, model, sampling: dict, size: tuple[int, int]) -> dict:
    """What every picture of a run says about itself, beside prompt, negative and seed."""
    spacing = sampler_options(args.sampler, model.schedule, sampling).get("spacing")  # karras takes what the model says
    settings = {"steps": args.steps, "cfg": args.cfg, "sampler": args.sampler, "size": list(size),
                "weights": args.weights, "model": str(args.model), "rng": "cpu",
                "prompt_syntax": "plain" if args.plain_prompt else "weights",
                "long_prompts": args.long_prompts}  # fmt: skip
    if args.sampler != "dpmpp_2m_karras" and args.ddim_timesteps == "diffusers":
        settings["spacing"] = spacing
    if args.sampler == "ddim":
        settings["ddim_timesteps"] = args.ddim_timesteps
    if args.init_image is not None:
        settings |= {"init_image": args.init_image, "strength": args.strength}
    extra = ("lora", "vae", "text_encoder", "tokenizer", "prediction", "zero_terminal_snr", "cfg_rescale")
    return settings | {k: getattr(args, k) for k in extra if getattr(args, k)}


if __name__ == "__main__":
    run(main)
