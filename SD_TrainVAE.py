"""Trains an autoencoder from image shards, for those who have no pretrained one.

    python SD_TrainVAE.py --images data/shapes/images --model tiny --size 64 --out runs/vae --resume
    python SD_TrainVAE.py --images data/openmoji/images --model small --size 128 --max_steps 20000 --batch 64 \\
        --out runs/vae_openmoji
    python encode_latents.py --images data/shapes/images --vae runs/vae/vae --size 64 --out data/shapes/latents

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
"""

import copy
import hashlib
import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from sd.checkpoints import MAX_STEPS, OLDER, find_checkpoint, resume_problem
from sd.cli import parser
from sd.data import MAX_SEED, check_seed
from sd.device import DTYPES, pick_device, usual_dtype
from sd.errors import InputError, reading, run
from sd.files import digests, lock_run, make_folder, new_folder, read_json, write_json
from sd.log import append_json, cut_log
from sd.optim import Muon, ema_decay, fallen, update_ema
from sd.output import save_png
from sd.pictures import check_side, grid
from sd.shards import image_key, key_fraction, list_shards, source_of
from sd.stream import stream
from sd.weights.parts import save_vae
from sd.weights.read import checkpoint_folders
from sd.weights.tensors import save_tensors
from sd.workers import check_workers, progress
from SD_Model import PRESETS, VAE, weights_hash

MAX_HELD_OUT = 256  # pictures that the PSNR is measured on

MAX_MEASURED = 4096  # pictures that the latents' standard deviation is measured on

NEEDED = {"vae.safetensors", "vae_ema.safetensors", "optimizer.pt", "state.json"}  # to go on from a checkpoint

MACHINE = {"images", "out", "resume", "save_steps", "log_steps", "ram_gib", "workers", "device"}  # may differ on resume


# ---------------------------------------------------------------------------------------------------------------------


# Pictures
def load_pictures(images: str, size: int, workers: int, ram_gib: float, held_out_share: float) -> tuple:
    """Decode all pictures once, and split them by hash of their keys.

    Returns training pictures uint8 [N, size, size, 3], held-out ones [M <= MAX_HELD_OUT, size, size, 3], and a sha256
    over both. Where they would take more than ram_gib, the first that fit are used, and a line says so.
    """
    tars = list_shards(images)
    limit = int(ram_gib * 2**30) // (size * size * 3)
    train, held_out, count, rejects = [], [], 0, {}
    with progress(None, "reading", "img") as bar:
        batches = stream(tars, size, batch=64, workers=workers)
        for batch in batches:
            source, shard = source_of(tars[batch.shard]), tars[batch.shard].stem
            for key, picture in zip(batch.keys, batch.pictures.numpy(), strict=True):
                held = key_fraction(image_key(source, shard, key)) < held_out_share
                if not held:
                    train.append(picture)
                elif len(held_out) < MAX_HELD_OUT:
                    held_out.append(picture)
            count += len(batch.keys)
            bar.update(len(batch.keys))
            for reason, n in batch.rejects.items():
                rejects[reason] = rejects.get(reason, 0) + n
            if len(train) >= limit:
                print(
                    f"note: {limit:,} pictures fill --ram_gib {ram_gib:g}; what comes after {source}/{shard} is unused"
                )
                break
        batches.close()
    if not train or not held_out:
        raise InputError(
            f"pictures to train on and to hold out were wanted in {images}, found {len(train)} and {len(held_out)}: "
            "give more pictures"
        )
    train, held_out = np.stack(train[:limit]), np.stack(held_out)
    digest = hashlib.sha256(train)
    digest.update(held_out)
    print(f"{len(train):,} pictures to train on, {len(held_out)} held out; rejects: {rejects or 'none'}")
    return torch.from_numpy(train), torch.from_numpy(held_out), digest.hexdigest()


def batch_indices(seed: int, step: int, batch: int, count: int) -> np.ndarray:
    """Which of `count` pictures step 0, 1, 2, ... sees: int64 [batch]. Epoch e is a permutation of (seed, e), and
    batches run across the edges of epochs."""
    positions = np.arange(step * batch, (step + 1) * batch)
    epochs = positions // count
    orders = {int(e): np.random.default_rng([seed, int(e)]).permutation(count) for e in np.unique(epochs)}
    return np.array([orders[int(e)][p % count] for e, p in zip(epochs, positions, strict=True)])


def step_noise(seed: int, step: int, shape: tuple) -> torch.Tensor:
    """The standard normal noise of a step, fp32 on the CPU: CUDA's own generator would depend on the card."""
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1))


def to_model(pictures: torch.Tensor, device: torch.device) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> fp32 [B, 3, H, W] in -1..1 on the device."""
    x = pictures.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
    return x if device.type == "cuda" else x.contiguous()  # the permuted memory is channels_last already


# ---------------------------------------------------------------------------------------------------------------------


# Loss and measures
def losses(vae: VAE, x: torch.Tensor, noise: torch.Tensor, weights: dict) -> dict[str, torch.Tensor]:
    """The terms of the loss, and their weighted sum under 'loss'. x [B, 3, H, W], noise [B, z, h, w]."""
    mean, logvar = (m.float() for m in vae.moments(x))
    z = mean + (0.5 * logvar).exp() * noise
    y = vae.decoder(vae.post_quant_conv(z)).float()
    difference = y - x
    terms = {
        "l1": difference.abs().mean(),
        "l2": difference.square().mean(),
        "edge": difference.diff(dim=-1).abs().mean() + difference.diff(dim=-2).abs().mean(),
        "kl": 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean(),  # nats a latent value
    }
    return {"loss": sum(weights[name] * term for name, term in terms.items()), **terms}


@torch.no_grad()
def reconstruct(vae: VAE, pictures: torch.Tensor, device: torch.device, batch: int = 32) -> tuple:
    """uint8 [N, H, W, 3] through encoder (posterior mean) and decoder, in fp32.

    Returns the reconstructions, uint8, and their mean PSNR in dB: -10 log10 of each picture's mean squared error on
    the scale 0..1, averaged over pictures.
    """
    results, psnr = [], []
    for part in pictures.split(batch):
        x = to_model(part, device)
        y = vae.decode(vae.encode(x)).clamp(-1, 1)
        error = ((y - x) / 2).square().mean(dim=(1, 2, 3)).clamp(min=1e-10)  # [B]
        psnr.append(-10 * error.log10())
        results.append(((y + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).cpu())
    return torch.cat(results), float(torch.cat(psnr).mean())


@torch.no_grad()
def latent_statistics(vae: VAE, pictures: torch.Tensor, device: torch.device, batch: int = 32) -> dict:
    """Standard deviation of the unscaled latents (posterior means) over up to MAX_MEASURED pictures, in all and by
    channel, the channels' means, and the mean posterior standard deviation."""
    means, deviations = [], []
    for part in pictures[:: max(1, len(pictures) // MAX_MEASURED)].split(batch):
        mean, logvar = vae.moments(to_model(part, device))
        means.append(mean.cpu())
        deviations.append((0.5 * logvar).exp().mean().cpu())
    means = torch.cat(means).double()  # [N, z, h, w]
    return {
        "std": float(means.std()),
        "channel_std": [round(v, 4) for v in means.std(dim=(0, 2, 3)).tolist()],
        "channel_mean": [round(v, 4) for v in means.mean(dim=(0, 2, 3)).tolist()],
        "posterior_std": float(torch.stack(deviations).mean()),
    }


def save_comparison(path: Path, pictures: torch.Tensor, reconstructions: torch.Tensor, columns: int = 8):
    """A PNG: rows of pictures, each row above its reconstructions."""
    rows = []
    for i in range(0, min(len(pictures), 4 * columns) // columns * columns or len(pictures), columns):
        rows += [pictures[i : i + columns].numpy(), reconstructions[i : i + columns].numpy()]
    path.parent.mkdir(exist_ok=True)
    save_png(path, grid(np.concatenate(rows), columns=min(columns, len(pictures))))


# ---------------------------------------------------------------------------------------------------------------------


# Checkpoints
def save_checkpoint(out: Path, trained: "Trained", config: dict):
    """checkpoints/step_NNNNNNNN, written under another name with its checksums, flushed, renamed; two are kept."""
    with new_folder(out / "checkpoints" / f"step_{trained.step:08d}", replace=True) as tmp:
        for name, module in (("vae", trained.vae), ("vae_ema", trained.ema)):
            state = {k: t.detach().cpu().contiguous() for k, t in module.state_dict().items()}
            save_tensors(state, tmp / f"{name}.safetensors")
        torch.save([optimizer.state_dict() for optimizer in trained.optimizers], tmp / "optimizer.pt")
        (tmp / "state.json").write_text(json.dumps({"step": trained.step, "config": config}, indent=1))
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
def new_vae(preset: str, seed: int) -> VAE:
    """A VAE with fresh weights from the seed, whose posterior starts narrow (standard deviation 0.05): with PyTorch's
    default of about 1 the noise hides the signal at first, and the KL term switches off latent channels for good."""
    torch.manual_seed(seed)
    vae = VAE(replace(PRESETS[preset]["vae"], scaling_factor=1.0))  # known at the end
    z = vae.config.latent_channels
    with torch.no_grad():
        vae.quant_conv.weight[z:].zero_()  # rows z and up give the log-variance
        vae.quant_conv.bias[z:].fill_(2 * math.log(0.05))
    return vae


def make_optimizers(vae: VAE, args) -> list[torch.optim.Optimizer]:
    """Muon for conv kernels (unless --optimizer adamw) and AdamW for the rest. Each group knows its peak_lr; biases and
    norms do not decay."""
    kernels = [p for p in vae.parameters() if p.dim() > 1]
    vectors = [p for p in vae.parameters() if p.dim() <= 1]
    groups = [dict(params=vectors, weight_decay=0.0, peak_lr=args.lr)]
    optimizers = []
    if args.optimizer == "muon":
        optimizers.append(Muon([dict(params=kernels, peak_lr=args.muon_lr)], args.muon_lr, args.weight_decay))
    else:
        groups.append(dict(params=kernels, weight_decay=args.weight_decay, peak_lr=args.lr))
    fused = vectors[0].device.type in ("cpu", "cuda")
    return [*optimizers, torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=fused)]


def learning_rate(step: int, peak: float, warmup: int, max_steps: int) -> float:
    """Linear warm-up, then a cosine to 1 % of the peak. step 0, 1, 2, ...: the first takes a warmup-th of the peak (the
    UNet's starts from 1 %), and 1 % belongs to step max_steps, the one after the last."""
    fall = fallen(max(0, step - warmup) / max(1, max_steps - warmup))
    return peak * min(1.0, (step + 1) / max(1, warmup)) * fall


@dataclass
class Trained:
    """What training changes. step: how many are done."""

    vae: VAE
    ema: VAE
    optimizers: list[torch.optim.Optimizer]
    step: int


def open_trained(args, config: dict, device: torch.device) -> Trained:
    """Fresh networks and optimizers, or with --resume those of a checkpoint. The logs are cut to its step."""
    out, step = Path(args.out), 0
    vae = new_vae(args.model, args.seed)
    ema = copy.deepcopy(vae).requires_grad_(False).eval()
    folder = find_checkpoint(out, args.resume, problem=checkpoint_problem) if args.resume else None
    if folder:
        state = read_json(folder / "state.json")
        same_config(config, state["config"], folder)
        step = state["step"]
        for name, module in (("vae", vae), ("vae_ema", ema)):
            with reading(folder / f"{name}.safetensors", OLDER):
                module.load_state_dict(load_file(folder / f"{name}.safetensors"))
        print(f"going on from {folder}, step {step} of {args.max_steps}")
    for name in ("log.jsonl", "validation.jsonl"):
        cut_log(out / name, step)
    memory = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    vae, ema = (module.to(device, memory_format=memory) for module in (vae, ema))
    optimizers = make_optimizers(vae, args)
    if folder:
        load_optimizers(folder, optimizers, device)
    return Trained(vae, ema, optimizers, step)


def load_optimizers(folder: Path, optimizers: list[torch.optim.Optimizer], device: torch.device):
    """Their states from a checkpoint. InputError if it holds something else; no code of the file is run."""
    with reading(folder / "optimizer.pt", OLDER):
        states = torch.load(folder / "optimizer.pt", map_location=device, weights_only=True)
        for optimizer, saved in zip(optimizers, states, strict=True):
            optimizer.load_state_dict(saved)


def take_step(trained: Trained, pictures: torch.Tensor, lr: float, args) -> dict[str, torch.Tensor]:
    """One step on pictures uint8 [B, H, W, 3], at lr as a share of the peaks. Returns the terms of the loss and the
    gradient's norm before clipping. InputError if these are not finite; then nothing has changed."""
    vae, device, dtype = trained.vae, next(trained.vae.parameters()).device, DTYPES[args.dtype]
    for optimizer in trained.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr * group["peak_lr"]
    side = args.size // vae.config.factor
    noise = step_noise(args.seed, trained.step, (len(pictures), vae.config.latent_channels, side, side)).to(device)
    weights = {name: getattr(args, f"{name}_weight") for name in ("l1", "l2", "edge", "kl")}
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        terms = losses(vae, to_model(pictures, device), noise, weights)
    vae.zero_grad(set_to_none=True)
    terms["loss"].backward()
    terms = {name: term.detach() for name, term in terms.items()}
    norm = torch.nn.utils.clip_grad_norm_(vae.parameters(), args.grad_clip)
    if not math.isfinite(float(terms["loss"]) + float(norm)):
        raise InputError(f"the loss became {float(terms['loss'])} at step {trained.step}: try a smaller --lr")
    for optimizer in trained.optimizers:
        optimizer.step()
    trained.step += 1
    update_ema(list(trained.ema.parameters()), list(vae.parameters()), ema_decay(args.ema, trained.step))
    return terms | {"grad_norm": norm}


def train(args, config: dict, train_set: torch.Tensor, held_out: torch.Tensor, device: torch.device) -> VAE:
    """The loop. Returns the EMA network."""
    out, trained = Path(args.out), open_trained(args, config, device)
    with progress(args.max_steps, "training", "step") as bar:
        bar.update(trained.step)
        begin, since = time.perf_counter(), trained.step
        while trained.step < args.max_steps:
            lr = learning_rate(trained.step, 1.0, args.warmup, args.max_steps)  # as a share of the peak
            indices = batch_indices(args.seed, trained.step, args.batch, len(train_set))
            terms = take_step(trained, train_set[indices], lr, args)
            step = trained.step
            bar.update(1)

            if step % args.log_steps == 0 or step == args.max_steps:
                now = time.perf_counter()
                record = {"step": step, "images": step * args.batch, "epoch": step * args.batch / len(train_set)}
                record |= {name: float(term) for name, term in terms.items()} | {"lr": lr * args.lr}
                record["images_per_s"] = round((step - since) * args.batch / (now - begin), 1)
                begin, since = now, step
                append_json(out / "log.jsonl", record)
                bar.set_postfix(loss=f"{record['loss']:.4f}", img_per_s=record["images_per_s"], refresh=False)
            if step % args.save_steps == 0 or step == args.max_steps:
                reconstructions, psnr = reconstruct(trained.ema, held_out, device)
                append_json(out / "validation.jsonl", {"step": step, "psnr": psnr})
                save_comparison(out / "samples" / f"step_{step:08d}.png", held_out, reconstructions)
                save_checkpoint(out, trained, config)
                bar.write(f"step {step}: {psnr:.2f} dB on {len(held_out)} held-out pictures")
    return trained.ema


def finish(args, config: dict, ema: VAE, train_set: torch.Tensor, held_out: torch.Tensor, device) -> dict:
    """Measure the latents, write <out>/vae with the scaling factor, and result.json last."""
    out = Path(args.out)
    statistics = latent_statistics(ema, train_set, device)
    psnr = reconstruct(ema, held_out, device)[1]
    ema.config = replace(ema.config, scaling_factor=1 / statistics["std"])
    save_vae(ema, out / "vae")
    result = {
        "psnr": psnr,
        "latents": statistics,
        "scaling_factor": ema.config.scaling_factor,
        "vae_hash": weights_hash(ema),
        "config": config,
    }
    write_json(out / "result.json", result)
    return result


# ---------------------------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("input and output")
    g.add_argument("--images", required=True, help="folder of tars, or a glob in quotes")
    g.add_argument("--model", default="tiny", help=f"preset: {', '.join(PRESETS)}")
    g.add_argument("--out", required=True, help="run folder")
    g.add_argument("--resume", nargs="?", const="latest", metavar="CHECKPOINT", help="go on from the newest valid "
                   "checkpoint, if there is one, or from this one (default: begin anew)")  # fmt: skip

    g = p.add_argument_group("training")
    g.add_argument("--size", type=int, default=64, help="side in pixels of the square that is cut from the middle")
    g.add_argument("--max_steps", type=int, default=2000, help="optimizer steps")
    g.add_argument("--batch", type=int, default=8, help="pictures a step")
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
    args = p.parse_args(argv)

    check_args(args)
    return args


def check_args(args):
    """InputError for a value that cannot be."""
    if args.model not in PRESETS:
        raise InputError(f"--model {args.model} is not a preset; the presets are {', '.join(PRESETS)}")
    factor = PRESETS[args.model]["vae"].factor
    if args.size < factor or args.size % factor:
        raise InputError(f"--size {args.size} was given; the preset {args.model} wants multiples of {factor}")
    check_side(args.size, factor)
    check_workers(args.workers)
    if min(args.max_steps, args.batch, args.save_steps, args.log_steps) < 1:
        raise InputError("--max_steps, --batch, --save_steps and --log_steps start at 1")
    if args.max_steps > MAX_STEPS:
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
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    out = make_folder(args.out)
    if not args.resume and ((out / "result.json").exists() or checkpoint_folders(out)):
        raise InputError(f"{out} holds a run already: add --resume to go on with it, or give another --out")
    train_set, held_out, data_hash = load_pictures(
        args.images, args.size, args.workers, args.ram_gib, args.held_out_share
    )
    config = {name: value for name, value in vars(args).items() if name not in MACHINE}
    config |= {"vae": json.loads(json.dumps(asdict(PRESETS[args.model]["vae"]))), "pictures": data_hash}
    if (out / "result.json").exists():
        result = read_json(out / "result.json")
        same_config(config, result["config"], out)
        print(f"done before: {out / 'vae'}, {result['psnr']:.2f} dB; nothing to do")
        return
    write_json(out / "config.json", config | {"images": args.images, "device": str(device), "torch": torch.__version__})
    begin = time.perf_counter()
    with lock_run(out):
        ema = train(args, config, train_set, held_out, device)
        result = finish(args, config, ema, train_set, held_out, device)
    print(
        f"{out / 'vae'}: {result['psnr']:.2f} dB on {len(held_out)} held-out pictures; latents had a standard "
        f"deviation of {result['latents']['std']:.3f}, so scaling_factor is {result['scaling_factor']:.4f}; "
        f"{time.perf_counter() - begin:.0f} s"
    )


if __name__ == "__main__":
    run(main)
