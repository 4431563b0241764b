"""Trains an autoencoder from image shards, for those who have no pretrained one.

    python SD_TrainVAE.py --images data/shapes/images --model tiny --size 64 --out runs/vae --resume
    python SD_TrainVAE.py --images data/emoji/images_128 data/emoji/images_256 --model small --size 128,256 \\
        --batch 64 --minutes 4 --workers 16 --ram_gib 24 --out runs/vae_emoji
    python SD_TrainVAE.py --benchmark 50 --model small --size 128,256 --batch 64     # speed alone, on random pictures

The loss per value of pictures in -1..1 and per latent value, with z ~ N(mean, var) sampled anew at every step:

    l1_weight |x - y| + l2_weight (x - y)^2 + edge_weight |grad (x - y)| + kl_weight KL(N(mean, var) || N(0, 1))

(Kingma & Welling 2013, arXiv:1312.6114; the KL term as in latent diffusion, arXiv:2112.10752, but a mean, not a sum).
At the end the standard deviation of the latents is measured and scaling_factor set to 1 / it, so that latents have unit
variance. The run folder gets

    vae/             the result: vae.json and vae.safetensors, EMA weights
    result.json      PSNR, standard deviation of the latents; written last
    config.json      log.jsonl      validation.jsonl      samples/*.png (pictures above their reconstructions)
    checkpoints/step_00000500/      weights, EMA, optimizer, state; the last two are kept

Order and noise are functions of (seed, step), so a run that was killed and resumed equals one that was not: bit for bit
on a CPU. With --resume the same command starts, goes on, or says that it is done.

With several sizes the steps take turns: step i is of size i modulo their number, and log.jsonl gets a line of each.
result.json then also has psnr_by_size and latents_by_size; psnr is the mean over the sizes, and the latents of each
size count alike in the scaling factor.

With --minutes the learning rate falls with the seconds since the first step, those of earlier starts counted, and
training ends when they are over; writing the result takes some seconds more. How many steps that makes, and with which
rates, belongs to the machine: such a run is not repeated bit for bit.
"""

import json
import math
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from sd.autoencoder import Step, Trained, latent_statistics, new_trained, reconstruct
from sd.checkpoints import MAX_STEPS, OLDER, find_checkpoint, resume_problem
from sd.cli import parser
from sd.data import MAX_SEED, check_seed
from sd.device import pick_device, usual_dtype
from sd.errors import InputError, reading, run
from sd.files import digests, lock_run, make_folder, new_folder, read_json, write_json
from sd.kernels import available
from sd.log import append_json, cut_log
from sd.optim import fallen
from sd.output import save_png
from sd.picture_sets import PictureSet, digest_of, feed, load_sets, place, turns_done
from sd.pictures import check_side, grid
from sd.weights.parts import save_vae
from sd.weights.read import checkpoint_folders
from sd.weights.tensors import save_tensors
from sd.workers import check_workers, progress
from SD_Model import PRESETS, VAE, weights_hash

NEEDED = {"vae.safetensors", "vae_ema.safetensors", "optimizer.pt", "state.json"}  # to go on from a checkpoint

# Settings that may differ on resume.
MACHINE = {"images", "out", "resume", "save_steps", "log_steps", "ram_gib", "workers", "device", "kernels", "compile"}

WARM_UP = 5  # steps of a size before the benchmark's


# ---------------------------------------------------------------------------------------------------------------------


# Checkpoints and samples
def save_comparison(path: Path, pictures: torch.Tensor, reconstructions: torch.Tensor, columns: int = 8):
    """A PNG: rows of pictures, each row above its reconstructions."""
    rows = []
    for i in range(0, min(len(pictures), 4 * columns) // columns * columns or len(pictures), columns):
        rows += [pictures[i : i + columns].numpy(), reconstructions[i : i + columns].numpy()]
    path.parent.mkdir(exist_ok=True)
    save_png(path, grid(np.concatenate(rows), columns=min(columns, len(pictures))))


def save_checkpoint(out: Path, trained: Trained, config: dict):
    """checkpoints/step_NNNNNNNN, written under another name with its checksums, flushed, renamed; two are kept."""
    with new_folder(out / "checkpoints" / f"step_{trained.step:08d}", replace=True) as tmp:
        for name, module in (("vae", trained.vae), ("vae_ema", trained.ema)):
            state = {k: t.detach().cpu().contiguous() for k, t in module.state_dict().items()}
            save_tensors(state, tmp / f"{name}.safetensors")
        torch.save([optimizer.state_dict() for optimizer in trained.optimizers], tmp / "optimizer.pt")
        state = {"step": trained.step, "seconds": trained.seconds, "config": config}
        (tmp / "state.json").write_text(json.dumps(state, indent=1))
        (tmp / "manifest.json").write_text(json.dumps(digests(tmp), indent=1))
    for old in checkpoint_folders(out)[2:]:
        shutil.rmtree(old)


def checkpoint_problem(folder: Path) -> str | None:
    """Why training cannot go on from a checkpoint folder, or None."""
    return resume_problem(folder, NEEDED, {"step", "config"})


def same_config(config: dict, old: dict, where: Path):
    """InputError, naming the first difference, if a run was made with another configuration."""
    for name in config | old:
        if config.get(name) != old.get(name):
            raise InputError(
                f"{where} was made with {name} {old.get(name)}, and {name} {config.get(name)} is asked for now: give "
                "the same, or another --out"
            )


# ---------------------------------------------------------------------------------------------------------------------


# Training
def learning_rate(step: int, peak: float, warmup: int, max_steps: int) -> float:
    """Linear warm-up, then a cosine to 1 % of the peak. step 0, 1, 2, ...: the first takes a warmup-th of the peak (the
    UNet's starts from 1 %), and 1 % belongs to step max_steps, the one after the last."""
    return peak * warmed(step, warmup) * fallen(max(0, step - warmup) / max(1, max_steps - warmup))


def warmed(step: int, warmup: int) -> float:
    """The warm-up's share of the learning rate, 0 to 1."""
    return min(1.0, (step + 1) / max(1, warmup))


def open_trained(args, config: dict, device: torch.device) -> Trained:
    """Fresh networks and optimizers, or with --resume those of a checkpoint. The logs are cut to its step."""
    out, trained = Path(args.out), new_trained(args, device)
    folder = find_checkpoint(out, args.resume, problem=checkpoint_problem) if args.resume else None
    if folder:
        state = read_json(folder / "state.json")
        same_config(config, state["config"], folder)
        trained.step, trained.seconds = state["step"], state.get("seconds", 0.0)
        for name, module in (("vae", trained.vae), ("vae_ema", trained.ema)):
            with reading(folder / f"{name}.safetensors", OLDER):
                module.load_state_dict(load_file(folder / f"{name}.safetensors"))
        load_optimizers(folder, trained.optimizers, device)
        print(f"going on from {folder}, step {trained.step}" + (f" of {args.max_steps}" if args.max_steps else ""))
    for name in ("log.jsonl", "validation.jsonl"):
        cut_log(out / name, trained.step)
    return trained


def load_optimizers(folder: Path, optimizers: list[torch.optim.Optimizer], device: torch.device):
    """Their states from a checkpoint. InputError if it holds something else; no code of the file is run."""
    with reading(folder / "optimizer.pt", OLDER):
        states = torch.load(folder / "optimizer.pt", map_location=device, weights_only=True)
        for optimizer, saved in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(saved)


def train(args, config: dict, sets: list[PictureSet], device: torch.device) -> VAE:
    """The loop. Returns the EMA network."""
    out, trained = Path(args.out), open_trained(args, config, device)
    step_of, total = Step(trained, args, device), sum(len(s.train) for s in sets)

    def images(steps: int) -> int:
        return sum(n * batch for n, batch in zip(turns_done(steps, len(sets)), args.batch, strict=True))

    def over() -> bool:
        return trained.step >= args.max_steps if args.max_steps else trained.seconds >= 60 * args.minutes

    config_of = PRESETS[args.model]["vae"]
    batches = feed(sets, args.batch, (config_of.latent_channels, config_of.factor), args.seed, trained.step, device)
    with progress(args.max_steps, "training", "step") as bar:
        bar.update(trained.step)
        begin = since = time.perf_counter()
        before, seen = trained.seconds, images(trained.step)
        while not over():
            if args.max_steps:
                lr = learning_rate(trained.step, 1.0, args.warmup, args.max_steps)  # as a share of the peak
            else:
                lr = warmed(trained.step, args.warmup) * fallen(trained.seconds / (60 * args.minutes))
            batch = next(batches)
            terms = step_of(batch.pictures, batch.noise, lr)
            step, trained.seconds = trained.step, before + time.perf_counter() - begin
            bar.update(1)

            if step % args.log_steps < len(sets) or over():  # a line of each size
                step_of.check()
                now = time.perf_counter()
                record = {"step": step, "images": images(step), "epoch": images(step) / total}
                record |= {name: float(term) for name, term in terms.items()} | {"lr": lr * args.lr}
                record["images_per_s"] = round((images(step) - seen) / (now - since), 1)
                if len(sets) > 1:
                    record["size"] = args.size[batch.which]
                if args.minutes:
                    record["seconds"] = round(trained.seconds, 1)
                if step % args.log_steps == min(len(sets), args.log_steps) - 1:  # the last of these lines
                    since, seen = now, images(step)
                append_json(out / "log.jsonl", record)
                bar.set_postfix(loss=f"{record['loss']:.4f}", img_per_s=record["images_per_s"], refresh=False)
            if step % args.save_steps == 0 or over():
                step_of.check()
                validate(out, trained, sets, device, bar)
                save_checkpoint(out, trained, config)
    batches.close()
    return trained.ema


def validate(out: Path, trained: Trained, sets: list[PictureSet], device: torch.device, bar):
    """A line of validation.jsonl and a PNG: held-out pictures of each size above their reconstructions."""
    step, psnr = trained.step, []
    for s in sets:
        reconstructions, value = reconstruct(trained.ema, s.held_out, device)
        psnr.append(value)
        name = f"step_{step:08d}" + (f"_{s.size}px" if len(sets) > 1 else "")
        save_comparison(out / "samples" / f"{name}.png", s.held_out, reconstructions)
        at = f" at {s.size} px" if len(sets) > 1 else ""
        bar.write(f"step {step}: {value:.2f} dB on {len(s.held_out)} held-out pictures{at}")
    append_json(out / "validation.jsonl", {"step": step, "psnr": float(np.mean(psnr)), **by_size("psnr", sets, psnr)})


def by_size(name: str, sets: list[PictureSet], values: list) -> dict:
    """{name_by_size: {"128": value, ...}}; of one size nothing."""
    return {f"{name}_by_size": {str(s.size): v for s, v in zip(sets, values, strict=True)}} if len(sets) > 1 else {}


def finish(args, config: dict, ema: VAE, sets: list[PictureSet], device) -> dict:
    """Measure the latents, write <out>/vae with the scaling factor, and result.json last."""
    out = Path(args.out)
    statistics, *of_sizes = latent_statistics(ema, [s.train for s in sets], device)
    psnr = [reconstruct(ema, s.held_out, device)[1] for s in sets]
    ema.config = replace(ema.config, scaling_factor=1 / statistics["std"])
    save_vae(ema, out / "vae")
    result = {
        "psnr": float(np.mean(psnr)),
        **by_size("psnr", sets, psnr),
        "latents": statistics,
        **by_size("latents", sets, of_sizes),
        "scaling_factor": ema.config.scaling_factor,
        "vae_hash": weights_hash(ema),
        "config": config,
    }
    write_json(out / "result.json", result)
    return result


def benchmark(args, sets: list[PictureSet], device: torch.device) -> dict:
    """The speed of training steps of each size, after WARM_UP of them: pictures a second, milliseconds a step, the
    largest memory in GiB (CUDA), and the seconds before, in which kernels are compiled and algorithms chosen."""
    trained, vae, sizes = new_trained(args, device), PRESETS[args.model]["vae"], {}
    step_of = Step(trained, args, device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    for s, batch in zip(sets, args.batch, strict=True):
        batches = feed([s], [batch], (vae.latent_channels, vae.factor), args.seed, 0, device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        marks = []
        for steps in (WARM_UP, args.benchmark):
            wait()
            marks.append(time.perf_counter())
            for _ in range(steps):
                now = next(batches)
                step_of(now.pictures, now.noise, 0.01)
        step_of.check()
        wait()
        seconds = time.perf_counter() - marks[1]
        batches.close()
        peak = round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None
        sizes[str(s.size)] = {
            "images_per_s": round(args.benchmark * batch / seconds, 1),
            "ms_a_step": round(1e3 * seconds / args.benchmark, 2),
            "batch": batch,
            "peak_gib": peak,
            "warm_up_s": round(marks[1] - marks[0], 1),
        }
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    return {"sizes": sizes, "device": name, "dtype": args.dtype, "kernels": args.kernels, "compile": args.compile}


def random_sets(args) -> list[PictureSet]:
    """Pictures of noise, two batches of each size, for the benchmark."""
    draw = torch.Generator().manual_seed(args.seed)
    sets = []
    for size, batch in zip(args.size, args.batch, strict=True):
        train = torch.randint(256, (2 * batch, size, size, 3), dtype=torch.uint8, generator=draw)
        sets.append(PictureSet(train, train[:1], ""))
    return sets


# ---------------------------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("input and output")
    g.add_argument("--images", nargs="+", help="folder of tars, or a glob in quotes; or one for each size; must be "
                   "given, but for --benchmark")  # fmt: skip
    g.add_argument("--model", default="tiny", help=f"preset: {', '.join(PRESETS)}")
    g.add_argument("--out", help="run folder; must be given, but for --benchmark")
    g.add_argument("--resume", nargs="?", const="latest", metavar="CHECKPOINT", help="go on from the newest valid "
                   "checkpoint, if there is one, or from this one (default: begin anew)")  # fmt: skip

    g = p.add_argument_group("training")
    g.add_argument("--size", type=numbers, default=[64], metavar="N[,N]", help="side in pixels of the square that is "
                   "cut from the middle, or several, which take turns")  # fmt: skip
    g.add_argument("--max_steps", type=int, metavar="N", help="optimizer steps (default: 2000)")
    g.add_argument("--minutes", type=float, help="end by the clock instead, and let the learning rate follow it "
                   "(default: by --max_steps)")  # fmt: skip
    g.add_argument("--batch", type=numbers, default=[8], metavar="N[,N]", help="pictures a step of the largest size, "
                   "and of smaller ones as many more as have the same area; or of each size")  # fmt: skip
    g.add_argument("--optimizer", choices=["muon", "adamw"], default="muon", help="of conv kernels; AdamW has the rest")
    g.add_argument("--lr", type=float, default=2e-3, help="AdamW's peak learning rate")
    g.add_argument("--muon_lr", type=float, default=0.02, help="Muon's peak learning rate")
    g.add_argument("--warmup", type=int, default=50, help="steps of linear warm-up; then a cosine to 1 %% of the peak")
    g.add_argument("--weight_decay", type=float, default=0.01, help="AdamW's, never on biases and norms")
    g.add_argument("--grad_clip", type=float, default=1.0, help="largest global norm of the gradient")
    g.add_argument("--ema", type=float, default=0.995, help="decay of the weights' average, with warm-up")
    g.add_argument("--seed", type=int, default=0, help=f"of weights, order and noise, from 0 to {MAX_SEED:,}")

    g = p.add_argument_group("loss")
    g.add_argument("--l1_weight", type=float, default=1.0, help="of mean |x - y|")
    g.add_argument("--l2_weight", type=float, default=8.0, help="of mean (x - y)^2")
    g.add_argument("--edge_weight", type=float, default=0.0, help="of mean |grad x - grad y|")
    g.add_argument("--kl_weight", type=float, default=1e-3, help="of mean KL, in nats a latent value")

    g = p.add_argument_group("machine")
    g.add_argument("--save_steps", type=int, default=500, help="steps between checkpoints, each with a PSNR and a PNG")
    g.add_argument("--log_steps", type=int, default=25, help="steps between lines of log.jsonl")
    g.add_argument("--ram_gib", type=float, default=8.0, help="pictures are decoded into RAM once, up to this much")
    g.add_argument("--held_out_share", type=float, default=0.02, help="of the pictures, by hash of the key")
    g.add_argument("--workers", type=int, default=1, help="decoding processes; 0: none")
    g.add_argument("--device", help="cuda, cuda:1, mps or cpu (default: the best there is)")
    g.add_argument("--dtype", choices=["fp32", "bf16"], help="autocast (default: bf16 on CUDA, fp32 elsewhere)")
    g.add_argument("--kernels", action="store_true", default=None, help="fused Triton kernels (default: on NVIDIA "
                   "cards that run them, unless --compile is given)")  # fmt: skip
    g.add_argument("--no_kernels", dest="kernels", action="store_false", default=None, help="plain PyTorch instead")
    g.add_argument("--compile", action="store_true", help="torch.compile for each size, instead of the kernels")
    g.add_argument("--benchmark", type=int, metavar="STEPS", help="measure the speed of so many steps of each size, on "
                   "random pictures if no --images are given, and write nothing (default: train)")  # fmt: skip
    args = p.parse_args(argv)

    check_args(args)
    return args


def numbers(text: str) -> list[int]:
    """'128,256' -> [128, 256]."""
    return [int(word) for word in text.split(",")]


def check_args(args):
    """InputError for a value that cannot be."""
    if args.model not in PRESETS:
        raise InputError(f"--model {args.model} is not a preset; the presets are {', '.join(PRESETS)}")
    if args.benchmark is None and not (args.images and args.out):
        raise InputError("--images and --out are wanted (or --benchmark)")
    factor = PRESETS[args.model]["vae"].factor
    for size in args.size:
        if size < factor or size % factor:
            raise InputError(f"--size {size} was given; the preset {args.model} wants multiples of {factor}")
        check_side(size, factor)
    if len(set(args.size)) < len(args.size):
        raise InputError(f"--size names a size twice: {args.size}")
    if len(args.images or [""]) not in (1, len(args.size)):
        raise InputError(
            f"--images wants one folder, or one for each of the sizes {args.size}, found {len(args.images)}: "
            f"{args.images}"
        )
    if len(args.batch) not in (1, len(args.size)):
        raise InputError(f"--batch wants one number, or one for each of the sizes {args.size}, found {args.batch}")
    if args.minutes is not None and args.max_steps is not None:
        raise InputError("--minutes and --max_steps were both given: a run ends by one of them")
    if args.minutes is not None and not 0 < args.minutes < math.inf:
        raise InputError(f"--minutes wants a positive number, found {args.minutes}")
    if args.max_steps is None and args.minutes is None:
        args.max_steps = 2000
    if args.kernels and args.compile:
        raise InputError("--kernels and --compile exclude each other: give one of them")
    check_workers(args.workers)
    counts = (1 if n is None else n for n in (args.max_steps, args.benchmark))
    if min(*counts, *args.batch, args.save_steps, args.log_steps) < 1:
        raise InputError("--max_steps, --batch, --save_steps, --log_steps and --benchmark start at 1")
    if len(args.batch) == 1:
        args.batch = [round(args.batch[0] * max(args.size) ** 2 / size**2) for size in args.size]
    if args.max_steps and args.max_steps > MAX_STEPS:
        raise InputError(f"--max_steps wants {MAX_STEPS:,} at most, found {args.max_steps:,}")
    check_seed(args.seed)
    for name in ("lr", "muon_lr", "grad_clip", "ram_gib"):
        if not 0 < getattr(args, name) < math.inf:
            raise InputError(f"--{name} wants a positive number, found {getattr(args, name)}")
    for name in ("warmup", "weight_decay", "l1_weight", "l2_weight", "edge_weight", "kl_weight"):
        if not 0 <= getattr(args, name) < math.inf:
            raise InputError(f"--{name} wants a number from 0 up, found {getattr(args, name)}")
    for name in ("ema", "held_out_share"):
        if not 0 <= getattr(args, name) <= 1:
            raise InputError(f"--{name} wants a number from 0 to 1, found {getattr(args, name)}")


def main(argv=None):
    args = parse_args(argv)
    device = pick_device(args.device)
    args.dtype = args.dtype or usual_dtype(device)
    if args.kernels and not available(device):
        raise InputError(f"--kernels wants an NVIDIA GPU of 2020 or later and Triton, found {device}; drop the flag")
    if args.kernels is None:
        args.kernels = available(device) and not args.compile
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = True  # every size has one shape
    how = (args.workers, args.ram_gib, args.held_out_share)
    if args.benchmark is not None:
        sets = load_sets(args.images, args.size, *how) if args.images else random_sets(args)
        return print(json.dumps(benchmark(args, place(sets, device), device)))

    out = make_folder(args.out)
    if not args.resume and ((out / "result.json").exists() or checkpoint_folders(out)):
        raise InputError(f"{out} holds a run already: add --resume to go on with it, or give another --out")
    sets = load_sets(args.images, args.size, *how)
    config = config_of(args, sets)
    if (out / "result.json").exists():
        result = read_json(out / "result.json")
        same_config(config, result["config"], out)
        print(f"done before: {out / 'vae'}, {result['psnr']:.2f} dB; nothing to do")
        return
    images = single(args.images)
    write_json(out / "config.json", config | {"images": images, "device": str(device), "torch": torch.__version__})
    begin = time.perf_counter()
    with lock_run(out):
        sets = place(sets, device)
        ema = train(args, config, sets, device)
        result = finish(args, config, ema, sets, device)
    print(
        f"{out / 'vae'}: {result['psnr']:.2f} dB on {sum(len(s.held_out) for s in sets)} held-out pictures; latents "
        f"had a standard deviation of {result['latents']['std']:.3f}, so scaling_factor is "
        f"{result['scaling_factor']:.4f}; "
        f"{time.perf_counter() - begin:.0f} s"
    )


def config_of(args, sets: list[PictureSet]) -> dict:
    """What decides the result. Of a single size as runs began when there was no other."""
    config = {name: value for name, value in vars(args).items() if name not in MACHINE | {"benchmark"}}
    if args.minutes is None:
        del config["minutes"]
    config |= {"size": single(args.size), "batch": single(args.batch)}
    return config | {"vae": json.loads(json.dumps(asdict(PRESETS[args.model]["vae"]))), "pictures": digest_of(sets)}


def single(values: list):
    """The value of a list of one, else the list."""
    return values[0] if len(values) == 1 else values


if __name__ == "__main__":
    run(main)
