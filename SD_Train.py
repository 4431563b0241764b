"""Train the UNet (and, if asked, the text encoder) on cached latents, phase after phase.

    python SD_Train.py --phase demo --data_root data --out runs/demo                                   # one device
    torchrun --nproc_per_node=2 SD_Train.py --phase laion_broad --data_root data --out runs/1_broad    # two GPUs
    torchrun --nproc_per_node=2 SD_Train.py --phase laion_hq --data_root data --out runs/2_hq --init_from runs/1_broad
    torchrun ... (the same command) --resume                                                # go on after any stop
    python SD_Train.py --phase 1 --data_root data --dry_run                                 # what would be done
    python SD_Train.py --phase 1 --benchmark 200                                            # speed on this card

On several machines, start the same torchrun line on each with --nnodes, --node_rank and --rdzv_endpoint, or use srun.

What is random about a sample (its place in the epoch, noise, timestep, caption drop) is a function of the seed and of
the sample's global position alone, so that ranks x batch x accumulation can be cut in any way, and a run killed at any
moment goes on as if nothing had happened.
"""

import argparse
import contextlib
import copy
import gc
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers.utils.logging import disable_progress_bar

import SD_Convert
import SD_ImageGen
import SD_Kernels
from data_pipeline import common
from SD_Data import (
    Batch,
    BucketOrder,
    LatentStore,
    Prefetcher,
    SampleOrder,
    Split,
    make_batch,
    parse_sources,
    read_manifest,
    validation_batches,
    validation_index,
)
from SD_Model import (
    PRESETS,
    InputError,
    NoiseSchedule,
    ResBlock,
    SpatialTransformer,
    TextEncoder,
    UNet,
    UNetConfig,
    count_parameters,
    run_cli,
    weights_hash,
)
from SD_Run import (
    BINS,
    Checkpointer,
    HostCopy,
    Log,
    Window,
    find_checkpoint,
    load_optimizer,
    load_weights,
    lock_run,
    plot_run,
    sha256,
)

# ----------------------------------------------------------------------------------------------------------------
# Phases: how a network is trained. Flags override a row; the row's name or number selects it.
# ----------------------------------------------------------------------------------------------------------------


class Phase(NamedTuple):
    number: int | None  # for --phase NUMBER
    model: str  # preset in SD_Model.PRESETS
    data: str  # sources below --data_root: name[:weight[:cap]], comma-separated; without weights, in proportion
    size: int  # pixels a side; the latents' manifest must agree
    epochs: float  # passes over the mixture
    lr: float  # peak learning rate
    warmup: int  # optimizer steps from 1 % to the peak, before the cosine to 1 %
    drop: float  # share of captions replaced by the empty one
    gamma: float  # Min-SNR gamma; 0: no weighting
    ema: float  # EMA decay, reached by warm-up
    betas: str  # noise schedule
    decay: float  # weight decay; never on biases and norms
    batch: int  # images a GPU and micro-batch
    accumulate: int  # micro-batches a step; the full run's 24 x 2 GPUs x 2 = 96 images a step


FINAL_MIX = "laion_hq:0.37,synthetic:0.44:250000,faces:0.09,fullbody:0.10"
CONSOLIDATE_MIX = "laion_hq:0.6:150000,faces:0.2:50000,fullbody:0.2:58000"
# fmt: off
PHASES = {
    #                    no    model    data             size  epochs  lr     warmup  drop  gamma  ema     betas                decay  batch  acc  # noqa: E501
    "laion_broad": Phase(1,    "sd15",  "laion",          512, 10,     1e-5,   500,   0.05, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "laion_hq":    Phase(2,    "sd15",  "laion_hq",       512,  7,     1e-5,   500,   0.05, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "synthetic":   Phase(3,    "sd15",  "synthetic",      512,  5,     1e-5,   500,   0.05, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "faces":       Phase(4,    "sd15",  "faces",          512,  7,     2e-6,   200,   0.15, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "fullbody":    Phase(5,    "sd15",  "fullbody",       512,  9,     1.5e-6, 150,   0.15, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "consolidate": Phase(6,    "sd15",  CONSOLIDATE_MIX,  512,  4,     1e-6,   100,   0.15, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "final":       Phase(7,    "sd15",  FINAL_MIX,        512,  6,     1e-6,   150,   0.15, 5,     0.9999, "scaled_linear",     1e-2,  24,   2),  # noqa: E501
    "scratch_256": Phase(None, "sd15",  "laion",          256, 10,     1e-4,  1000,   0.10, 5,     0.9999, "squaredcos_cap_v2", 0.0,   32,   1),  # noqa: E501
    "openmoji":    Phase(None, "small", "openmoji",       128, 400,    3e-4,   500,   0.10, 5,     0.999,  "scaled_linear",     1e-2, 128,   1),  # noqa: E501
    "demo":        Phase(None, "tiny",  "shapes",          64, 10,     2e-3,   100,   0.10, 5,     0.99,   "scaled_linear",     1e-2,  32,   1),  # noqa: E501
}
# fmt: on

# Everything else a run is made of. Each has a flag of its name.
DEFAULTS = dict(
    dataset=None, latents=None, data_root="data", vae=None, text_encoder=None, tokenizer=None,
    train_text_encoder=False, text_lr=0.1, prediction="epsilon", zero_terminal_snr=False, zero_init="all",
    weighting="min_snr", offset_noise=0.0, lr_schedule="cosine", beta1=0.9, beta2=0.999, clip=1.0, adaptive_clip=0.0,
    latent_fraction=1.0, seed=0, max_steps=None,
    grad_checkpoint="none", kernels=None, compile=False, compress_gradients=False, peer_copies=True,
    dtype=None, channels_last=None, save_steps=1000, keep_last=3, keep_every=0,
    val_steps=500, val_images=256, sample_steps=1000, sample_prompts=None, sample_cfg=7.5, log_steps=10,
    max_skipped=10, wandb="auto",
)  # fmt: skip
# What --resume may change; the rest must stay as the run began.
CHANGEABLE = set(
    "dataset latents data_root vae text_encoder tokenizer max_steps epochs lr batch accumulate grad_checkpoint kernels "
    "compile compress_gradients peer_copies dtype channels_last save_steps keep_last keep_every val_steps val_images "
    "sample_steps sample_prompts sample_cfg log_steps max_skipped wandb".split()
)
SMALL_VAE = 64 << 20  # bytes; a VAE up to this goes into each checkpoint, a larger one by name and hash
PASSES = 5  # of benchmark, to tell forward and backward apart
TRACED = 3  # steps in its trace
ROOM = 4 << 30  # bytes for validation and sample grids, which cannot use the memory that graphs hold


def parse_args(argv=None) -> argparse.Namespace:
    """Flags default to None and override the phase's row (or, on --resume, what the run began with)."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on = dict(action="store_true", default=None)

    g = p.add_argument_group("what to train")
    g.add_argument("--phase", required=True, help=f"row of PHASES, by name or number: {', '.join(PHASES)}")
    g.add_argument("--model", help=f"network preset: {', '.join(PRESETS)}")
    g.add_argument("--init_from", help="start from these weights: checkpoint, run folder, or any SD 1.x file or folder")
    g.add_argument("--init_weights", choices=["same", "ema", "live"], default="same",
                   help="of --init_from: live to live and EMA to EMA (same), or both from one")  # fmt: skip
    g.add_argument("--text_encoder", help="folder or hub name; default openai/clip-vit-large-patch14 for sd15")
    g.add_argument("--tokenizer", help="folder: start a fresh text encoder of the preset's size for this tokenizer")
    g.add_argument("--train_text_encoder", help="train it with the UNet", **on)
    g.add_argument("--text_lr", type=float, help="its learning rate, as a multiple of --lr (0.1)")
    g.add_argument("--vae", help="for sample grids; default: the one the latents were made with")
    g.add_argument("--zero_init", choices=["all", "original", "none"], help="which layers start at zero")

    g = p.add_argument_group("data")
    g.add_argument("--data_root", help="folder of <source>/dataset and <source>/latents (data)")
    g.add_argument("--data", help="sources: name[:weight[:cap]],...")
    g.add_argument("--dataset", help="instead: one dataset folder ...")
    g.add_argument("--latents", help="... and its latents")
    g.add_argument("--size", type=int, help="pixels a side")
    g.add_argument(
        "--latent_fraction", type=float, help="use this share of the pictures, chosen by hash of the key (1)"
    )

    g = p.add_argument_group("optimisation")
    g.add_argument("--epochs", type=float)
    g.add_argument("--max_steps", type=int, help="optimizer steps of the whole run, instead of --epochs")
    g.add_argument("--stop_at", type=int, help="save and stop after this step; the schedule stays as planned")
    g.add_argument("--batch", type=int, help="images a GPU and micro-batch")
    g.add_argument("--accumulate", type=int, help="micro-batches a step")
    g.add_argument("--lr", type=float)
    g.add_argument("--lr_schedule", choices=["cosine", "linear", "constant"], help="after the warm-up (cosine)")
    g.add_argument("--warmup", type=int)
    g.add_argument("--decay", type=float, help="weight decay")
    g.add_argument("--beta1", type=float)
    g.add_argument("--beta2", type=float)
    g.add_argument("--clip", type=float, help="largest global gradient norm; 0: any (1)")
    g.add_argument(
        "--adaptive_clip", type=float, help="and at most this multiple of the norm's running mean, say 3; 0: any (0)"
    )
    g.add_argument("--ema", type=float)
    g.add_argument("--seed", type=int)

    g = p.add_argument_group("diffusion")
    g.add_argument("--betas", choices=["scaled_linear", "linear", "squaredcos_cap_v2"])
    g.add_argument("--prediction", choices=["epsilon", "v"])
    g.add_argument("--zero_terminal_snr", help="with --prediction v", **on)
    g.add_argument("--weighting", choices=["min_snr", "debiased", "none"], help="of the loss over timesteps (min_snr)")
    g.add_argument("--gamma", type=float, help="of Min-SNR; 0: no weighting")
    g.add_argument("--offset_noise", type=float, help="standard deviation of a constant noise a channel, say 0.1 (0)")
    g.add_argument("--drop", type=float, help="caption dropout")

    g = p.add_argument_group("speed and memory")
    g.add_argument("--device", help="cuda, mps or cpu; default: the best there is")
    g.add_argument("--dtype", choices=["fp32", "bf16"], help="autocast; default bf16 on CUDA, fp32 elsewhere")
    g.add_argument("--grad_checkpoint", choices=["none", "resblocks", "all", "auto"],
                   help="blocks to recompute in backward, to save memory: residual ones, transformers too, or as "
                   "few as fit the card (none)")  # fmt: skip
    g.add_argument("--kernels", help="fused Triton kernels; default on NVIDIA cards that run them", **on)
    g.add_argument("--no_kernels", dest="kernels", action="store_false", default=None)
    g.add_argument("--compile", help="instead: torch.compile of each residual block and transformer", **on)
    g.add_argument("--compress_gradients", help="average gradients over GPUs in bf16: half the traffic, rounded", **on)
    g.add_argument("--no_peer_copies", dest="peer_copies", action="store_false", default=None,
                   help="let NCCL share gradients even if GPUs reach each other; all update all weights")  # fmt: skip
    g.add_argument("--channels_last", help="memory format; default on CUDA", **on)
    g.add_argument("--contiguous", dest="channels_last", action="store_false", default=None)

    g = p.add_argument_group("the run")
    g.add_argument("--out", help="run folder (runs/<phase>)")
    g.add_argument(
        "--resume", nargs="?", const="latest", help="go on from the newest valid checkpoint, or from this one"
    )
    g.add_argument("--save_steps", type=int, help="steps between checkpoints (1000)")
    g.add_argument("--keep_last", type=int, help="checkpoints kept; 0: all (3)")
    g.add_argument("--keep_every", type=int, help="and for ever, each of this many steps (0: none)")
    g.add_argument("--val_steps", type=int, help="steps between validations; 0: never (500)")
    g.add_argument("--val_images", type=int, help="pictures of each validation split (256)")
    g.add_argument("--sample_steps", type=int, help="steps between sample grids; 0: never (1000)")
    g.add_argument("--sample_prompts", help="file with a prompt a line; default: eight held-out captions")
    g.add_argument("--sample_cfg", type=float, help="guidance of the sample grids (7.5)")
    g.add_argument("--log_steps", type=int, help="steps a line of log.jsonl (10)")
    g.add_argument("--max_skipped", type=int, help="stop after so many non-finite steps in a row (10)")
    g.add_argument("--wandb", choices=["auto", "online", "offline", "disabled"], help="auto: offline without a key")
    g.add_argument("--dry_run", action="store_true", help="print the resolved configuration and plan, and stop")
    g.add_argument(
        "--benchmark",
        type=int,
        metavar="STEPS",
        help="time so many steps, on synthetic latents if no data are named, and stop",
    )
    g.add_argument(
        "--trace", metavar="FILE", help="of --benchmark: write a trace of three more steps (Chrome's format)"
    )
    return p.parse_args(argv)


def phase_named(name: str) -> str:
    by_number = {str(row.number): key for key, row in PHASES.items() if row.number}
    name = by_number.get(name, name)
    if name not in PHASES:
        raise InputError(f"--phase wants one of {', '.join(PHASES)} or a number from 1 to 7, found {name!r}")
    return name


def resolve(args, saved: dict | None) -> dict:
    """The run's settings: the phase's row and DEFAULTS, or on resume the saved settings; flags on top."""
    phase = phase_named(args.phase)
    row = PHASES[phase]._asdict()
    row.pop("number")
    settings = {"phase": phase} | row | DEFAULTS | (saved or {})
    if saved is not None and saved["phase"] != phase:
        raise InputError(
            f"this run is of phase {saved['phase']}, and --phase {phase} was given; start it in another --out"
        )
    for name in settings:
        value = getattr(args, name, None)
        if value is None or name == "phase":
            continue
        if saved is not None and value != settings[name] and name not in CHANGEABLE:
            raise InputError(
                f"--{name} {value} differs from the run's {settings[name]} and cannot change on --resume; drop the "
                "flag, or start a new run with --init_from"
            )
        settings[name] = value
    if settings["model"] not in PRESETS:
        raise InputError(f"--model wants one of {', '.join(PRESETS)}, found {settings['model']!r}")
    for name in ("batch", "accumulate", "epochs", "lr", "save_steps", "log_steps", "val_images", "max_skipped"):
        if not settings[name] > 0:
            raise InputError(f"--{name} wants a positive number, found {settings[name]}")
    for name in ("warmup", "decay", "clip", "adaptive_clip", "gamma", "offset_noise", "text_lr", "keep_last",
                 "keep_every", "val_steps", "sample_steps", "seed"):  # fmt: skip
        if not 0 <= settings[name] < math.inf:
            raise InputError(f"--{name} wants a number from 0 up, found {settings[name]}")
    for name in ("drop", "ema", "latent_fraction"):
        if not 0 <= settings[name] <= 1:
            raise InputError(f"--{name} wants a number from 0 to 1, found {settings[name]}")
    for name in ("beta1", "beta2"):
        if not 0 <= settings[name] < 1:
            raise InputError(f"--{name} wants a number from 0 to below 1, found {settings[name]}")
    for name, value in (("max_steps", settings["max_steps"]), ("stop_at", args.stop_at), ("benchmark", args.benchmark)):
        if value is not None and value < 1:
            raise InputError(f"--{name} wants a positive number, found {value}")
    if args.trace and not args.benchmark:
        raise InputError("--trace is of --benchmark's steps: give that flag too")
    if args.trace and not Path(args.trace).absolute().parent.is_dir():
        raise InputError(f"--trace wants a file in a folder that is there, found {args.trace}")
    if settings["zero_terminal_snr"] and settings["prediction"] != "v":
        raise InputError(
            "--zero_terminal_snr wants --prediction v: where no signal is left, the noise says nothing of it"
        )
    if args.kernels and args.compile:
        raise InputError("--kernels and --compile exclude each other: choose one")
    settings["compile"] = bool(settings["compile"]) and not args.kernels  # the flag given now counts
    if (settings["dataset"] is None) != (settings["latents"] is None):
        raise InputError("--dataset and --latents name one source together: give both, or --data_root alone")
    return settings


# ----------------------------------------------------------------------------------------------------------------
# The trained module, its EMA, learning rate, one micro-batch
# ----------------------------------------------------------------------------------------------------------------


class Denoiser(nn.Module):
    """What is trained: the UNet, and the text encoder if asked."""

    def __init__(self, unet: UNet, text_encoder: TextEncoder | None):
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder

    def forward(self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Noisy latents [B, z, h, w], timesteps [B] -> [B, z, h, w].

        text: token ids [B, L] where the text encoder is trained, else its ready context [B, L, D].
        """
        return self.unet(x, t, text if self.text_encoder is None else self.text_encoder(text))


def ema_decay(decay: float, updates: int) -> float:
    """Decay of the next update: warms up as (1 + n) / (10 + n) after n updates."""
    return min(decay, (1 + updates) / (10 + updates))


@torch.no_grad()
def update_ema(ema: list[torch.Tensor], live: list[torch.Tensor], decay: float):
    """ema = decay ema + (1 - decay) live, in fp32, in place."""
    torch._foreach_lerp_(ema, live, 1 - decay)


def lr_at(step: int, total: int, settings: dict) -> float:
    """Learning rate of optimizer step `step` (from 0): up from 1 % over the warm-up, then to 1 % at the last step."""
    peak, warmup = settings["lr"], settings["warmup"]
    if step < warmup:
        return peak * (0.01 + 0.99 * step / warmup)
    if settings["lr_schedule"] == "constant":
        return peak
    done = min(1.0, (step - warmup) / max(1, total - 1 - warmup))
    fall = 0.5 * (1 + math.cos(math.pi * done)) if settings["lr_schedule"] == "cosine" else 1 - done
    return peak * (0.01 + 0.99 * fall)


def make_optimizer(denoiser: Denoiser, settings: dict) -> torch.optim.AdamW:
    """AdamW. Matrices and kernels decay, biases and norms do not; the text encoder has its own multiple of the lr."""
    groups = []
    for module, scale in ((denoiser.unet, 1.0), (denoiser.text_encoder, settings["text_lr"])):
        if module is None:
            continue
        for decays in (True, False):
            params = [p for p in module.parameters() if (p.ndim > 1) == decays]
            groups.append({"params": params, "weight_decay": settings["decay"] * decays, "lr_scale": scale})
    fused = next(denoiser.parameters()).device.type in ("cuda", "cpu")
    return torch.optim.AdamW(
        groups, lr=settings["lr"], betas=(settings["beta1"], settings["beta2"]), eps=1e-8, fused=fused
    )


def copies_weights(settings: dict) -> bool:
    """Whether the blocks multiply with bf16 copies of the weights that the optimizer's pass makes. Their gradients come
    in bf16, and are added up, over micro-batches and processes, in fp32."""
    return bool(settings["kernels"]) and settings["dtype"] == "bf16"


class Update:
    """What follows the backward pass: clipping, AdamW, EMA; with fused kernels in one pass over memory.

    With these, processes share gradients by SD_Kernels.SharedGradients instead of DDP.
    """

    def __init__(self, optimizer: torch.optim.AdamW, denoiser: Denoiser, ema: Denoiser, settings: dict, world: int):
        self.optimizer, self.fused, self.shared = optimizer, None, None
        # Lists, as a walk over the modules takes milliseconds.
        self.parameters, self.averages = list(denoiser.parameters()), list(ema.parameters())
        if settings["kernels"]:
            copied = SD_Kernels.multiplied(denoiser) if copies_weights(settings) else ()
            if world > 1:
                sums = torch.bfloat16 if settings["compress_gradients"] else torch.float32
                self.shared = SD_Kernels.SharedGradients(self.parameters, sums, copied, settings["peer_copies"])
            self.fused = SD_Kernels.FusedStep(
                optimizer, dict(zip(self.parameters, self.averages)), copied, settings["accumulate"] > 1, self.shared
            )

    def __call__(self, lr: float, limit: float, decay: float) -> torch.Tensor:
        """Update weights and averages; returns the norm of the gradients before clipping. If that is not finite,
        nothing was updated, and skipped() is to be called."""
        set_lr(self.optimizer, lr)
        if self.fused:  # the device is not waited for
            norm = self.fused.norm()
            self.fused.step(lr, norm, limit, decay)
            return norm
        norm = nn.utils.clip_grad_norm_(self.parameters, limit, foreach=True)
        if math.isfinite(norm):
            self.optimizer.step()
            update_ema(self.averages, self.parameters, decay)
        return norm

    def skipped(self):
        if self.fused:
            self.fused.skipped()

    def complete(self):
        """Before anything but the next step reads weights, averages or the optimizer's state; all processes at once."""
        if self.fused:
            self.fused.complete()


def peak_memory(update: Update) -> float:
    """GiB, with those that processes share, of which torch's allocator does not know. After the first step. From three
    processes on too high, by up to bf16 copies that move at the first step's end and count twice."""
    shared = update.shared.way.extra_bytes if update.shared else 0
    return (torch.cuda.max_memory_allocated() + shared) / 2**30


def sample_losses(net, batch: Batch, text: torch.Tensor, schedule: NoiseSchedule) -> torch.Tensor:
    """Mean squared error of each sample's prediction, fp32 [B]. net(noisy, t, text) predicts."""
    noisy = schedule.add_noise(batch.latents, batch.noise, batch.t)  # [B, z, h, w]
    target = schedule.target(batch.latents, batch.noise, batch.t)
    return F.mse_loss(net(noisy, batch.t, text).float(), target, reduction="none").mean(dim=(1, 2, 3))


def loss_weight(t: torch.Tensor, schedule: NoiseSchedule, settings: dict) -> torch.Tensor | float:
    """Weight of each sample's loss by its timestep, fp32 [B].

    min_snr: Hang et al. 2023, eq. 8. debiased: 1/sqrt(SNR) on epsilon (Yu et al. 2023, arXiv:2310.08442), which is
    sqrt(SNR) on x_0's error and so sqrt(SNR)/(SNR + 1) on v's.
    """
    if settings["weighting"] == "debiased":
        snr = schedule.snr(t)
        return snr.rsqrt() if schedule.prediction == "epsilon" else snr.sqrt() / (snr + 1)
    if settings["weighting"] == "min_snr" and settings["gamma"]:
        return schedule.min_snr_weight(t, settings["gamma"])
    return 1.0


def backward(net, batch: Batch, text: torch.Tensor, schedule: NoiseSchedule, settings: dict, share: float):
    """Add the gradients of share x the mean weighted loss of one micro-batch. Returns the weighted losses [B]."""
    loss = sample_losses(net, batch, text, schedule) * loss_weight(batch.t, schedule, settings)
    (loss.mean() * share).backward()
    return loss.detach()


def graphs_run(settings: dict, shapes: int) -> bool:
    """Whether forward and backward passes are recorded as CUDA graphs: not for latents of several shapes, as each
    graph would hold gradients of its own."""
    return bool(settings["kernels"]) and shapes == 1 and not PRESETS[settings["model"]]["unet"].dropout


class MicroSteps:
    """The micro-batches of training steps: forward and backward of each, where that works as a CUDA graph. In a step's
    last one, processes share their gradients."""

    def __init__(
        self, model: nn.Module, text_of, schedule: NoiseSchedule, settings: dict, update: Update, device, say, shapes=1
    ):
        """model: the denoiser, in DDP if there are several processes and no update.shared. shapes: how many latents
        have."""
        self.model, self.parts, self.say = model, (text_of, schedule, settings), say
        self.net = in_autocast(model, device, settings["dtype"])
        self.parameters, self.shared, self.graphed = update.parameters, update.shared, None
        self.compiled = not settings["kernels"]  # if not, the first call begins with that
        self.share = 1 / settings["accumulate"]  # of a micro-batch in the step's gradient
        if self.shared:  # whose sums are no means
            self.share /= dist.get_world_size()
        if graphs_run(settings, shapes):
            self.graphed = SD_Kernels.GraphedBackward(
                self._plain, update.parameters, settings["accumulate"], update.shared
            )

    def _plain(self, latents, noise, t, ids, last: bool) -> torch.Tensor:
        text_of, schedule, settings = self.parts
        if self.shared:
            self.shared.last = last
        with averaging(self.model, last):
            batch = Batch(latents, noise, t, ids)
            losses = backward(self.net, batch, text_of(ids), schedule, settings, self.share)
        if self.shared and last:
            self.shared.finish()
        return losses

    def __call__(self, batch: Batch, first: bool, last: bool) -> torch.Tensor:
        """Weighted losses [B] of one micro-batch; the first, the last of its step?"""
        if not self.compiled:
            SD_Kernels.compile_ahead(lambda: self._plain(*batch[:4], last=False))
            SD_Kernels.forget_gradients(self.parameters)
            self.compiled = True
        if self.graphed:
            try:
                return self.graphed(*batch[:4], first=first, last=last)
            except SD_Kernels.NotRecorded as e:  # a text encoder that waits for the device, say
                self.say(f"note: going on without CUDA graphs ({str(e).splitlines()[0]})")
                self.without_graphs()
                if self.shared:
                    self.shared.reset()
        return self._plain(*batch[:4], last=last)

    def without_graphs(self):
        """Give up the recorded passes, their gradients and their memory."""
        if self.graphed:
            torch.cuda.synchronize()
            self.graphed = None
            SD_Kernels.forget_gradients(self.parameters)
            torch.cuda.empty_cache()

    def end(self):
        """After a step: drop the gradients, unless the next step overwrites them where they are."""
        if not self.graphed:
            SD_Kernels.forget_gradients(self.parameters)


def averaging(model: nn.Module, last: bool):
    """The context of one micro-batch, forward and backward: only in a step's last one does DDP average gradients."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else contextlib.nullcontext()


def clip_limit(settings: dict, mean_norm: float) -> float:
    """The largest gradient norm let through: --clip, and --adaptive_clip times the mean norm so far (0: none yet)."""
    limits = [settings["clip"], settings["adaptive_clip"] * mean_norm]
    return min((limit for limit in limits if limit), default=math.inf)


def set_lr(optimizer: torch.optim.Optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


def wrap(denoiser: Denoiser, settings: dict, world: int) -> nn.Module:
    """The module to call in training: its blocks compiled if asked; in DDP if there are several processes, unless
    fused kernels run, whose bf16 copies DDP cannot see."""
    if settings["compile"]:
        for m in denoiser.unet.modules():
            if isinstance(m, ResBlock | SpatialTransformer):
                m.compile(dynamic=False)
        # There are over 20 kinds of residual blocks, for each shape of latents.
        torch._dynamo.config.recompile_limit, torch._dynamo.config.accumulated_recompile_limit = 512, 4096
    if world == 1 or settings["kernels"]:
        return denoiser
    device = next(denoiser.parameters()).device
    ddp = DistributedDataParallel(
        denoiser,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    if settings["compress_gradients"] and device.type == "cuda":  # a run from GPUs may go on elsewhere
        ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp


def in_autocast(net, device: torch.device, dtype: str):
    """net, called under bf16 autocast where dtype says so."""

    def call(*args):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
            return net(*args)

    return call


def mean_flops(config: UNetConfig, split: Split) -> float:
    """unet_flops of a split's pictures, on average over their shapes."""
    counts, tokens = np.bincount(split.shape, minlength=len(split.shapes)), split.ids.shape[1]
    each = [SD_ImageGen.unet_flops(config, (config.in_channels, *shape[1:]), tokens) for shape in split.shapes]
    return float(np.average(each, weights=counts))


# ----------------------------------------------------------------------------------------------------------------
# Validation and samples: always on modules of their own, so nothing is swapped in and out of the trained one
# ----------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def validate(
    module: Denoiser, dtype: str, batches: list[Batch], text_of, schedule, micro: int, device, rank: int, world: int
):
    """Unweighted mean squared error of fixed Batches, whole and by timestep bin. Ranks share the work and agree."""
    sums, net, was_training = (
        torch.zeros(2, BINS, dtype=torch.float64),
        in_autocast(module, device, dtype),
        module.training,
    )
    module.eval()  # no dropout, which would draw random numbers too
    parts = [(batch, i) for batch in batches for i in range(0, len(batch.t), micro)]
    for batch, i in parts[rank::world]:
        part = batch.map(lambda x, i=i: x[i : i + micro].to(device))
        error = sample_losses(net, part, text_of(part.ids), schedule).double().cpu()  # [B]
        bins = part.t.cpu() * BINS // schedule.steps
        sums[0].index_add_(0, bins, error)
        sums[1].index_add_(0, bins, torch.ones_like(error))
    module.train(was_training)
    if world > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
        sums = sums.cpu()
    by_bin = [float(s / n) if n else None for s, n in sums.T]
    return {"loss": float(sums[0].sum() / sums[1].sum()), "bins": by_bin}


def sample_prompts(settings: dict, split: Split) -> list[str]:
    """--sample_prompts, or eight captions of the split."""
    if settings["sample_prompts"] is None:
        return split.captions.take(validation_index(split, 8, "val", settings["seed"])).to_pylist()
    try:
        lines = Path(settings["sample_prompts"]).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise InputError(
            f"--sample_prompts wants a UTF-8 text file, found {settings['sample_prompts']} "
            f"({getattr(e, 'strerror', None) or e})"
        ) from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise InputError(f"--sample_prompts wants a prompt a line, and {settings['sample_prompts']} is empty")
    return prompts


def sample_grid(path: Path, ema: Denoiser, text_encoder, vae, schedule, prompts: list[str], settings: dict, device):
    """Write a grid of pictures: fixed prompts and seeds, EMA weights. A picture that fails stops no training."""
    encoder = ema.text_encoder or text_encoder
    f, z = vae.config.factor, vae.config.latent_channels
    try:
        contexts, nulls = SD_ImageGen.encode_pairs(encoder, prompts, [""] * len(prompts))
        latents = SD_ImageGen.sample_latents(
            in_autocast(ema.unet, device, settings["dtype"]),
            contexts,
            nulls,
            list(range(len(prompts))),
            (z, settings["size"] // f, settings["size"] // f),
            sampler=SD_ImageGen.make_sampler("ddim", schedule, {}),
            steps=30,
            cfg=settings["sample_cfg"],
            batch=4,  # memory beside that of training is scarce
            device=device,
        )
        decoder = copy.deepcopy(vae).to(device)  # the VAE itself may be on its way to a checkpoint
        pictures = SD_ImageGen.decode_latents(decoder, latents, 2, device)
        SD_ImageGen.save_png(path, SD_ImageGen.grid(pictures, columns=4), {"prompts": prompts})
    except (OSError, InputError, torch.OutOfMemoryError) as e:  # a full disk, NaN, a full card
        print(f"\nwarning: {path} was not written ({e})", file=sys.stderr)


# ----------------------------------------------------------------------------------------------------------------
# Setting up
# ----------------------------------------------------------------------------------------------------------------


def git_revision() -> str:
    try:
        here = Path(__file__).resolve().parent
        return subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def setup_device(name: str | None) -> tuple[torch.device, int, int, int]:
    """Device, rank, world size, local rank. Under torchrun, joins the process group (NCCL on CUDA, else gloo)."""
    device = SD_ImageGen.pick_device(name)
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if device.type == "cuda":
        device = torch.device("cuda", device.index if world == 1 and device.index is not None else local)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, rank, world, local


def plan_batches(settings: dict, world: int, saved_global: int | None, given_accumulate: bool) -> int:
    """The global batch. On resume it stays what it was: accumulation follows the number of processes."""
    total = settings["batch"] * settings["accumulate"] * world
    if saved_global is None or total == saved_global:
        return total
    if not given_accumulate and saved_global % (settings["batch"] * world) == 0:
        settings["accumulate"] = saved_global // (settings["batch"] * world)
        return saved_global
    raise InputError(
        f"the run's global batch is {saved_global}, and --batch {settings['batch']} x --accumulate "
        f"{settings['accumulate']} x {world} processes make {total}; choose --batch and --accumulate to make it "
        f"{saved_global}"
    )


def load_text_encoder(settings: dict, checkpoint: Path | None) -> TextEncoder:
    """find_text_encoder, whose output must be as wide as the UNet's context."""
    encoder, wanted = find_text_encoder(settings, checkpoint), PRESETS[settings["model"]]["unet"].context_dim
    if encoder.context_dim != wanted:
        raise InputError(
            f"preset {settings['model']} attends to a context {wanted} wide, and the text encoder "
            f"{settings['text_encoder']} gives {encoder.context_dim}"
        )
    return encoder


def find_text_encoder(settings: dict, checkpoint: Path | None) -> TextEncoder:
    """The checkpoint's, if trained there; else --text_encoder, a fresh one for --tokenizer, or the preset's default."""
    if checkpoint is not None and (checkpoint / "text_encoder").is_dir():
        return TextEncoder.from_pretrained(str(checkpoint / "text_encoder"))
    text = PRESETS[settings["model"]]["text"]
    if settings["text_encoder"] is None and settings["tokenizer"] is not None:
        if text is None:
            raise InputError(f"preset {settings['model']} has no text encoder of its own; give --text_encoder")
        if not settings["train_text_encoder"]:
            raise InputError("--tokenizer starts a fresh text encoder, which must be trained: add --train_text_encoder")
        return TextEncoder.new(text, common.load_tokenizer(settings["tokenizer"]))
    if settings["text_encoder"] is None:
        if text is not None:
            raise InputError(
                f"preset {settings['model']} wants a text encoder: --text_encoder FOLDER, or --tokenizer FOLDER "
                "--train_text_encoder for a fresh one"
            )
        settings["text_encoder"] = "openai/clip-vit-large-patch14"
    return TextEncoder.from_pretrained(settings["text_encoder"])


class Data(NamedTuple):
    train: Split
    val: Split
    weights: list[float] | None  # of the sources; None: in proportion to their pictures
    vae: dict  # name, hash and config of the VAE that made the latents
    hashes: dict[str, str]  # sha256 of each manifest


def load_data(settings: dict, text_encoder: TextEncoder, pretouch: bool) -> Data:
    """Datasets and latents of a run. Refuses those that do not fit it: another size, VAE, scale or tokenizer."""
    sources, channels = parse_sources(settings), PRESETS[settings["model"]]["unet"].in_channels
    for s in sources:
        found = read_manifest(s.dataset, "the dataset", ("tokenizer_hash", "counts"))["tokenizer_hash"]
        if found != common.tokenizer_hash(text_encoder.tokenizer):
            raise InputError(
                f"the ids in {s.dataset} come from another tokenizer than the text encoder's; tokenise again (04, 05)"
            )
    stores = [LatentStore(s.latents, pretouch) for s in sources]
    first = stores[0].manifest
    for s, store in zip(sources, stores):
        m = store.manifest
        if m["size"] != settings["size"]:
            raise InputError(
                f"latents of {settings['size']} px were wanted, and those in {s.latents} are of {m['size']}"
            )
        if not m["scaled"]:
            raise InputError(f"scaled latents were wanted, and {s.latents} says they are not; encode them again")
        if m["vae"]["hash"] != first["vae"]["hash"] or m["kind"] != first["kind"]:
            raise InputError(f"{s.latents} and {sources[0].latents} were made by different VAEs or settings")
        z, h, w = m.get("latent_shape") or min(store.shapes, default=(channels, 0, 0))
        stored = 2 * z if m["kind"] == "moments" else z
        wanted = {(stored, h * a // m["size"], w * b // m["size"]) for a, b in m.get("buckets") or [[m["size"]] * 2]}
        if z != channels or not store.shapes <= wanted:
            raise InputError(
                f"latents of {channels} channels were wanted in {s.latents}; its manifest says {sorted(wanted)} and "
                f"its arrays are {sorted(store.shapes)}; encode them again"
            )
    weights = [s.weight for s in sources] if sources[0].weight is not None else None
    train = Split(sources, stores, "train", settings["latent_fraction"])
    val = Split([s._replace(cap=None) for s in sources], stores, "val", 1.0)
    for s, n in zip(sources, train.sizes):
        if n == 0:
            raise InputError(
                f"no picture of {s.dataset} has a latent in {s.latents}; were both made from the same shards?"
            )
    hashes = {}
    for s in sources:
        for folder in (s.dataset, s.latents):
            name = folder.name if settings["dataset"] else str(folder.relative_to(settings["data_root"]))
            hashes[name] = sha256(folder / "manifest.json")
    return Data(train, val, weights, first["vae"], hashes)


def load_vae(settings: dict, vae_info: dict):
    """The VAE for sample grids; it must be the one the latents were made with."""
    name = settings["vae"] or vae_info["name"]
    vae = SD_Convert.load_vae(name)
    if weights_hash(vae) != vae_info["hash"]:
        raise InputError(
            f"the latents were made with another VAE than {name}; give theirs ({vae_info['name']}) with --vae"
        )
    return vae


def init_weights(args, denoiser: Denoiser, ema: Denoiser, prediction: str, vae_hash: str, say) -> list[dict]:
    """Weights of --init_from into live and EMA; returns the lineage that the new run continues."""
    wanted = {"same": ("live", "ema"), "ema": ("ema", "ema"), "live": ("live", "live")}[args.init_weights]
    for net, weights in zip((denoiser, ema), wanted):
        source = SD_Convert.open_model(args.init_from, weights=weights)
        config, state = source.unet_state()
        if config != net.unet.config:
            raise InputError(f"{args.init_from} holds a UNet of {config}, and the preset wants {net.unet.config}")
        if source.schedule.prediction != prediction:
            raise InputError(
                f"{args.init_from} predicts {source.schedule.prediction}, and this run {prediction}; add --prediction "
                f"{source.schedule.prediction}"
            )
        if source.lineage.get("vae", vae_hash) != vae_hash:
            raise InputError(
                f"{args.init_from} was trained on the latents of another VAE than this run's; encode the pictures with "
                "its VAE, or start without --init_from"
            )
        net.unet.load_state_dict(state)
        if net.text_encoder is not None:
            net.text_encoder.load_state_dict(source.text_encoder().state_dict())
    say(source.found)
    lineage = source.lineage.get("lineage") or [{"phase": "import", "path": str(args.init_from)}]
    lineage[-1]["hash"] = weights_hash(ema.unet)  # of the parent's weights, so that it can be found again
    return lineage


@dataclass
class Progress:
    """Where training stands."""

    step: int = 0  # optimizer steps behind us, skipped ones too
    updates: int = 0  # of the EMA
    skipped: int = 0  # steps in a row whose gradients were not finite
    mean_norm: float = 0.0  # running mean of the gradient norm after clipping, for --adaptive_clip; 0: none yet
    seen: int = 0  # sum modulo 2^64 of seen_hash, this rank's share
    lineage: list[dict] = field(default_factory=list)  # the phases up to this one
    window: Window = field(default_factory=Window)  # of the log

    def state(self) -> dict:
        """For state.json; `seen` is to be the sum over ranks there."""
        return {"step": self.step, "ema_updates": self.updates, "skipped": self.skipped, "mean_norm": self.mean_norm,
                "seen": self.seen, "lineage": copy.deepcopy(self.lineage), "window": self.window.state()}  # fmt: skip

    @classmethod
    def resumed(cls, saved: dict, rank: int) -> "Progress":
        return cls(saved["step"], saved["ema_updates"], saved["skipped"], saved["mean_norm"],
                   saved["seen"] if rank == 0 else 0, saved["lineage"], Window(saved["window"]))  # fmt: skip


def make_run_folder(out: Path, settings: dict, checkpoint: Path | None):
    """Make and lock the run folder; returns the lock, to be kept. InputError if a run is in it or it cannot be made."""
    holds_run = any((out / "checkpoints").glob("step_????????"))
    if holds_run and checkpoint is None:
        raise InputError(f"{out} holds a run already: add --resume to go on with it, or choose another --out")
    if holds_run and checkpoint.resolve().parent != (out / "checkpoints").resolve():
        raise InputError(f"{out} holds another run than {checkpoint}, which --resume names; choose another --out")
    try:
        (out / "samples").mkdir(parents=True, exist_ok=True)
        (out / "checkpoints").mkdir(exist_ok=True)
        lock = lock_run(out)
        common.atomic_write(out / "config.json", json.dumps(settings, indent=1))
    except OSError as e:
        raise InputError(f"--out wants a folder that can be written, found {out} ({e.strerror})") from None
    return lock


def check_agreement(values: dict[str, int], device, world: int):
    """InputError unless all ranks found the same: on several machines they may see different disks."""
    if world > 1:
        low = torch.tensor(list(values.values()), dtype=torch.int64, device=device)
        high = low.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        differing = [name for name, a, b in zip(values, low.tolist(), high.tolist()) if a != b]
        if differing:
            raise InputError(
                f"the processes disagree on {', '.join(differing)}; start them with the same flags, and keep --out and "
                "the data where all machines see the same files"
            )


def sum_over_ranks(value: int, device, world: int) -> int:
    """Sum modulo 2^64 of a number of each rank."""
    if world > 1:
        total = torch.tensor(value % 2**64 - (value >> 63 & 1) * 2**64, dtype=torch.int64, device=device)
        dist.all_reduce(total)
        value = total.item()
    return value % 2**64


def absolute(name: str) -> str:
    """A local path made absolute; a hub name as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def resume_command(argv: list[str]) -> str:
    """The command line that goes on with this run."""
    words, dropped = [], False
    for i, word in enumerate(argv):
        flag, equals, _ = word.partition("=")
        takes_value = flag in ("--stop_at", "--resume") and not equals
        if not dropped and flag not in ("--stop_at", "--resume"):
            words.append(word)
        dropped = takes_value and i + 1 < len(argv) and not argv[i + 1].startswith("--")
    processes = os.environ.get("LOCAL_WORLD_SIZE")
    start = ["torchrun", f"--nproc_per_node={processes}"] if processes else ["python"]
    nodes = int(os.environ.get("GROUP_WORLD_SIZE", 1))
    note = f"   # with the rendezvous flags of before, on each of the {nodes} machines" if nodes > 1 else ""
    return shlex.join([*start, sys.argv[0], *words, "--resume"]) + note


# ----------------------------------------------------------------------------------------------------------------
# The run
# ----------------------------------------------------------------------------------------------------------------


def main(argv=None):
    args = parse_args(argv)
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    disable_progress_bar()  # of transformers, whose bars would break ours
    out = Path(args.out or f"runs/{phase_named(args.phase)}")
    device, rank, world, local = setup_device(args.device)
    say = print if rank == 0 else lambda *a, **k: None

    # What to do: the settings, and the checkpoint to go on from.
    checkpoint = find_checkpoint(out, args.resume, say) if args.resume else None
    saved = json.loads((checkpoint / "state.json").read_text()) if checkpoint else None
    settings = resolve(args, saved and saved["settings"])
    settings["dtype"] = settings["dtype"] or ("bf16" if device.type == "cuda" else "fp32")
    if settings["channels_last"] is None:
        settings["channels_last"] = device.type == "cuda"
    memory = torch.channels_last if settings["channels_last"] else torch.contiguous_format
    schedule = NoiseSchedule(
        settings["betas"], prediction=settings["prediction"], zero_terminal_snr=settings["zero_terminal_snr"]
    )

    # Networks and data. Fresh weights are drawn on the CPU from the seed, so that every device and rank starts alike.
    torch.manual_seed(settings["seed"])
    unet = UNet(PRESETS[settings["model"]]["unet"], settings["zero_init"])
    if args.compress_gradients and device.type != "cuda":
        raise InputError(f"--compress_gradients wants NVIDIA GPUs, found {device}; drop the flag")
    if args.kernels and not SD_Kernels.available(device):
        raise InputError(f"--kernels wants an NVIDIA GPU of 2020 or later and Triton, found {device}; drop the flag")
    if args.kernels is None:  # also on resume, which may be on another machine
        settings["kernels"] = SD_Kernels.available(device) and not settings["compile"]
    if settings["kernels"]:
        SD_Kernels.apply(unet)
    if args.benchmark and args.data_root is args.dataset is args.data is None:
        unet.set_grad_checkpoint(choose_grad_checkpoint(settings, Denoiser(unet, None), None, device, say))
        plain = Denoiser(unet, None)
        return benchmark(args.benchmark, settings, plain, schedule, memory, device, rank, world, args.trace)
    text_encoder = load_text_encoder(settings, checkpoint)
    trains_text = settings["train_text_encoder"]
    text_encoder.requires_grad_(trains_text)
    denoiser = Denoiser(unet, text_encoder if trains_text else None)
    data = load_data(settings, text_encoder, pretouch=local == 0)
    train, val = data.train, data.val
    say(f"data: {len(train):,} training and {len(val):,} held-out pictures; {train.missing + val.missing:,} without a "
        f"latent, {train.unreadable:,} unreadable latent files")  # fmt: skip
    if saved and (changed := sorted(set(saved["data"].items()) ^ set(data.hashes.items()))):
        raise InputError(
            f"the data changed since the checkpoint ({changed[0][0]}); put it back, or start a new run with --init_from"
        )
    order = SampleOrder(train.sizes, data.weights, settings["seed"])
    global_batch = plan_batches(settings, world, saved and saved["global_batch"], args.accumulate is not None)
    if len(train.shapes) > 1:
        order = BucketOrder(order, train.shape, global_batch)
    unet.set_grad_checkpoint(choose_grad_checkpoint(settings, denoiser, text_encoder, device, say))
    total = settings["max_steps"] or int(settings["epochs"] * order.epoch_size) // global_batch
    if total < 1:
        raise InputError(f"{settings['epochs']} epochs of {order.epoch_size} pictures make no step of {global_batch}")
    if len(train.shapes) > 1:
        showings = np.bincount(train.shape, minlength=len(train.shapes)) * total * global_batch / order.epoch_size
        rare = ", ".join(f"{h} x {w}" for (_, h, w), n in zip(train.shapes, showings) if n < global_batch)
        say(f"shapes: {len(train.shapes)}; too rare for a step of {global_batch} in this run: {rare or 'none'}")
    micro, accumulate, null_ids = settings["batch"], settings["accumulate"], text_encoder.tokenize([""])[0].numpy()

    @torch.no_grad()
    def text_of(ids: torch.Tensor) -> torch.Tensor:
        """What the denoiser wants of the text: ids if it trains the text encoder, else the frozen encoder's context."""
        return ids if trains_text else in_autocast(text_encoder, device, settings["dtype"])(ids)

    def next_batches(positions: np.ndarray) -> Batch:
        return make_batch(
            train, order, positions, null_ids, settings["drop"], settings["seed"], schedule.steps,
            settings["offset_noise"],
        )  # fmt: skip

    def loader_of(first: int, end: int) -> Prefetcher:
        """This rank's micro-batches of the steps from first to end."""
        positions = rank_positions(first, end, global_batch, micro, accumulate, rank, world)
        return Prefetcher(next_batches, positions, device)

    if args.benchmark:
        text_encoder.to(device).eval()
        steps = args.benchmark + warm_up_steps(args.benchmark, len(train.shapes)) + (TRACED if args.trace else 0)
        return benchmark(
            args.benchmark, settings, denoiser, schedule, memory, device, rank, world, args.trace, loader_of(0, steps),
            text_of, len(train.shapes),
        )  # fmt: skip
    if args.dry_run:
        return dry_run(out, settings, denoiser, text_encoder, total, global_batch, order, device) if rank == 0 else None
    vae = load_vae(settings, data.vae) if settings["sample_steps"] or settings["vae"] else None
    prompts = sample_prompts(settings, val if len(val) else train)

    # Weights, optimizer and progress: from the checkpoint, from --init_from, or fresh.
    ema = copy.deepcopy(denoiser).requires_grad_(False).eval()
    if checkpoint:
        load_weights(checkpoint, denoiser, ema)
        progress = Progress.resumed(saved, rank)
    else:
        progress = Progress()
        if args.init_from:
            progress.lineage = init_weights(args, denoiser, ema, settings["prediction"], data.vae["hash"], say)
        progress.lineage.append({"phase": settings["phase"], "data": data.hashes, "images": 0,
                                 "revision": git_revision(), "torch": torch.__version__})  # fmt: skip
    denoiser.to(device, memory_format=memory).train()
    ema.to(device, memory_format=memory)
    text_encoder.to(device).eval()
    optimizer = make_optimizer(denoiser, settings)
    if checkpoint:
        load_optimizer(checkpoint, optimizer)
    agreed = {"where to go on": progress.step, "the number of steps": total, "readable latents": train.unreadable}
    agreed |= {"the data": zlib.crc32(str(data.hashes).encode()), "settings": zlib.crc32(json.dumps(settings).encode())}
    check_agreement(agreed, device, world)
    update = Update(optimizer, denoiser, ema, settings, world)
    lock = make_run_folder(out, settings, checkpoint) if rank == 0 else None  # nothing was written before this line
    model = wrap(denoiser, settings, world)
    micro_steps = MicroSteps(model, text_of, schedule, settings, update, device, say, len(train.shapes))

    fixed = {
        name: validation_batches(split, settings["val_images"], name, settings["seed"], schedule.steps)
        for name, split in (("val", val), ("train", train)) if len(split)
    }  # fmt: skip
    saver, log, to_host = None, None, None
    if rank == 0:
        to_host = HostCopy(pin=device.type == "cuda", size=16 * count_parameters(denoiser)[1])  # live, EMA, 2 x Adam
        saver = Checkpointer(out / "checkpoints", settings["keep_last"], settings["keep_every"], progress.step, print)
        log = Log(out, settings, progress.step)
    say(f"settings: {json.dumps(settings)}")
    say(f"{settings['phase']}: {total:,} steps of {global_batch} images ({world} x {micro} x {accumulate}), "
        f"{total * global_batch / order.epoch_size:.2f} epochs; UNet {count_parameters(unet)[1]:,} parameters; "
        f"{device}, {settings['dtype']}; from step {progress.step:,}")  # fmt: skip

    def snapshot() -> dict:
        """Everything a checkpoint holds, copied to host memory."""
        modules = {"unet": denoiser.unet, "unet_ema": ema.unet}
        if trains_text:
            modules |= {"text_encoder": denoiser.text_encoder, "text_encoder_ema": ema.text_encoder}
        small = vae is not None and count_parameters(vae)[1] * 4 <= SMALL_VAE
        vae_name, images = settings["vae"] or data.vae["name"], progress.step * global_batch
        progress.lineage[-1]["images"] = images
        parts = to_host({"weights": {name: m.state_dict() for name, m in modules.items()},
                         "optimizer": optimizer.state_dict()})  # fmt: skip
        to_host.wait()
        return parts | {
            "text_encoder": text_encoder,
            "vae": vae if small else None,
            "model": {
                "format": "checkpoint-1",
                "preset": settings["model"],
                "unet": asdict(unet.config),
                "schedule": schedule.config,
                "size": settings["size"],
                "text_encoder": "text_encoder" if trains_text else absolute(settings["text_encoder"]),
                "vae": "vae" if small else {"path": absolute(vae_name), "hash": data.vae["hash"]},
            },
            "state": progress.state() | {
                "seen": seen_by_all,
                "images": images,
                "epoch": images / order.epoch_size,
                "global_batch": global_batch,
                "data": data.hashes,
                "vae": data.vae["hash"],
                "settings": dict(settings),
            },
        }  # fmt: skip

    # The first signal asks for a save at the next step boundary; later ones change nothing, so none can break the save.
    stop = threading.Event()
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, lambda *_: stop.set())

    peak = SD_ImageGen.peak_flops(device)
    flops = 3 * mean_flops(unet.config, train) if peak else None
    first, end = progress.step, min(total, args.stop_at or total)
    loader = loader_of(first, end)
    bar = tqdm(total=total, initial=first, disable=rank != 0, unit="step", dynamic_ncols=True, mininterval=1.0)
    try:
        while progress.step < end:
            # One optimizer step: the gradients of the mean loss over the global batch, however it is cut.
            lr = lr_at(progress.step, total, settings)
            if unet.config.dropout:
                key = [settings["seed"], progress.step, rank]
                torch.manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))
            stats = torch.zeros(1 + 2 * BINS, device=device)  # stop flag, losses and counts by timestep bin
            for a in range(accumulate):
                batch = loader.next()
                losses = micro_steps(batch, first=a == 0, last=a == accumulate - 1)
                bins = F.one_hot(batch.t * BINS // schedule.steps, BINS).float()  # [B, BINS]
                stats[1 : 1 + BINS] += losses @ bins
                stats[1 + BINS :] += bins.sum(dim=0)
                progress.seen += batch.seen
            limit = clip_limit(settings, progress.mean_norm)
            norm = update(lr, limit, ema_decay(settings["ema"], progress.updates))
            stats[0] = float(stop.is_set())
            if world > 1:
                dist.all_reduce(stats)
            norm, (stopping, *sums) = norm.item(), stats.tolist()  # the step's one wait for the device
            if math.isfinite(norm):  # the same on all ranks
                progress.updates, progress.skipped = progress.updates + 1, 0
                progress.mean_norm += (min(norm, limit) - progress.mean_norm) * (0.01 if progress.mean_norm else 1)
            else:
                update.skipped()
                progress.skipped += 1
                say(f"\nwarning: step {progress.step + 1} skipped, its gradients are not finite "
                    f"({progress.skipped} in a row)")  # fmt: skip
            micro_steps.end()
            progress.step += 1
            progress.window.add(sums, norm, progress.skipped > 0)
            bar.update()
            if progress.skipped >= settings["max_skipped"]:
                raise SystemExit(
                    f"error: {progress.skipped} steps in a row had gradients that are not finite; look for NaN in the "
                    "latents, lower --lr, or go on from an older checkpoint with --resume PATH"
                    if rank == 0
                    else 1
                )

            step = progress.step
            done = step == end or stopping
            logging, saving = step % settings["log_steps"] == 0, done or step % settings["save_steps"] == 0
            if logging or saving:
                seen_by_all = sum_over_ranks(progress.seen, device, world)
            if logging:
                row = progress.window.row(step, global_batch, order.epoch_size, lr) | {"seen": f"{seen_by_all:016x}"}
                speed = f"{row['images_per_s']:.1f} img/s"
                if peak:
                    row["mfu"] = row["images_per_s"] / world * flops / peak
                    speed += f", MFU {row['mfu']:.1%}"
                bar.set_postfix_str(f"loss {row['loss']:.4f}, lr {lr:.1e}, {speed}")
                if log:
                    log.write("log.jsonl", row)
                progress.window = Window()
            validating, painting = (
                settings[n] and (step % settings[n] == 0 or step == total) for n in ("val_steps", "sample_steps")
            )
            if validating or painting or saving or step == first + 1:  # where whatever it lacks is seen at once
                update.complete()
            if validating:
                for weights_name, module in (("live", denoiser), ("ema", ema)):
                    for split, part in fixed.items():
                        result = validate(
                            module, settings["dtype"], part, text_of, schedule, micro, device, rank, world
                        )
                        if log:
                            row = {"step": step, "images": step * global_batch, "split": split, "weights": weights_name}
                            log.write("validation.jsonl", row | result)
            if rank == 0 and painting:
                path = out / "samples" / f"step_{step:08d}.png"
                sample_grid(path, ema, text_encoder, vae, schedule, prompts, settings, device)
                log.picture(path, step)
            if rank == 0 and saving:
                started = time.perf_counter()
                saver.save(step, snapshot)
                say(f"\ncheckpoint {step:,}: training waited {time.perf_counter() - started:.2f} s for the copy")
            if step == first + 2 and device.type == "cuda":  # Adam's state is there from the first step's end
                say(f"\npeak memory: {peak_memory(update):.2f} GiB")
            if done:
                break
    finally:
        loader.close()
        bar.close()
        if saver:
            saver.wait()
    if rank == 0:
        with contextlib.suppress(OSError):  # a full disk
            plot_run(out)
        log.close()
        if progress.step < total:
            command = resume_command(sys.argv[1:] if argv is None else argv)
            say(f"stopped after step {progress.step:,} of {total:,}; go on with:\n  {command}")
        else:
            say(f"done: {total:,} steps, {total * global_batch:,} images; {out}/checkpoints/step_{progress.step:08d}")
        lock.close()
    if world > 1:
        dist.barrier()
        # DDP goes first. Were it the group's last owner, its destructor would wait, with Python's lock in hand, for
        # gloo's threads, and these sometimes wait for that lock (seen with torch 2.13).
        del model, micro_steps
        gc.collect()
        dist.destroy_process_group()
    if saver and saver.failed_last:
        raise SystemExit("error: the last checkpoint could not be written; free some disk and run again with --resume")


def rank_positions(first: int, end: int, global_batch: int, micro: int, accumulate: int, rank: int, world: int):
    """Global positions [micro] of one rank's micro-batches in the steps from first to end, one after the other."""
    for step in range(first, end):
        for a in range(accumulate):
            start = step * global_batch + (a * world + rank) * micro
            yield np.arange(start, start + micro)


# ----------------------------------------------------------------------------------------------------------------
# Plans and speed
# ----------------------------------------------------------------------------------------------------------------


def activation_bytes(settings: dict, batch: int, device: torch.device) -> tuple[int, int]:
    """Bytes that a micro-batch of the UNet keeps for its backward, and the largest block's share of them, counted on
    fake tensors, which take no memory. bf16 copies of weights do not count.

    Of a checkpointed block, the inputs are kept, and the rest of one block at a time, while it is recomputed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    preset, which, kept, storages = PRESETS[settings["model"]], settings["grad_checkpoint"], [], {}
    begun, of_block, recomputed = [], [0], []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            storages[storage._cdata] = storage.nbytes()
            kept.append(tensor)  # alive, so that no other storage gets its address
        return tensor

    def enter(_, inputs):
        for x in inputs:
            if x is not None:
                count(x)
        begun.append(sum(storages.values()))

    def leave(block, *_):
        of_block.append(sum(storages.values()) - begun[-1])
        if which == "all" or (which == "resblocks" and isinstance(block, ResBlock)):
            recomputed.append(of_block[-1])

    with FakeTensorMode(), torch.device(device):
        unet = UNet(preset["unet"])
        if settings["kernels"]:
            SD_Kernels.apply(unet)
        held = list(unet.parameters())
        if copies_weights(settings):
            for p in SD_Kernels.multiplied(unet):
                p.copy_bf16 = torch.empty_like(p, dtype=torch.bfloat16, requires_grad=False)
                held.append(p.copy_bf16)
        weights = {p.untyped_storage()._cdata for p in held}
        for m in unet.modules():
            if isinstance(m, ResBlock | SpatialTransformer):
                m.register_forward_pre_hook(enter)
                m.register_forward_hook(leave)
        side = settings["size"] // preset["vae"].factor
        latents = torch.empty(batch, preset["unet"].in_channels, side, side)
        context = torch.empty(batch, TextEncoder.MAX_LENGTH, preset["unet"].context_dim)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
            in_autocast(unet, device, settings["dtype"])(latents, torch.zeros(batch, dtype=torch.long), context)
    return sum(storages.values()) - sum(recomputed) + max(recomputed, default=0), max(of_block)


def choose_grad_checkpoint(settings: dict, denoiser: Denoiser, text_encoder, device, say) -> str:
    """--grad_checkpoint; for auto, the value of it that recomputes least and fits into the device's free memory."""
    if settings["grad_checkpoint"] != "auto":
        return settings["grad_checkpoint"]
    if device.type != "cuda":
        return "none"
    free = torch.cuda.mem_get_info(device)[0]
    if dist.is_initialized():  # all recompute alike
        least = torch.tensor(free, device=device)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        free = int(least)
    for which in ("none", "resblocks", "all"):
        wanted = memory_estimate(settings | {"grad_checkpoint": which}, denoiser, text_encoder, device)["peak"]
        if wanted * 1.1 + ROOM < free:
            break
    say(f"grad_checkpoint auto: {which}, about {wanted / 2**30:.1f} of {free / 2**30:.1f} GiB")
    return which


def memory_estimate(settings: dict, denoiser: Denoiser, text_encoder: TextEncoder | None, device) -> dict[str, int]:
    """Bytes a device needs, by what they are for; gradients come while activations go, unless steps accumulate, and
    the gradients of one block's activations are there with both."""
    numbers = count_parameters(denoiser)[1]
    frozen = 0 if text_encoder is None or denoiser.text_encoder is not None else count_parameters(text_encoder)[1]
    copied = sum(p.numel() for p in SD_Kernels.multiplied(denoiser)) if copies_weights(settings) else 0
    one_pass = settings["accumulate"] == 1
    sent, sums = 0, 2 if settings["compress_gradients"] else 4
    world, local = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world > 1 and settings["kernels"]:
        sent = sums * numbers
        if settings["peer_copies"] and local == world:  # of copied weights one part of the sums
            copies = sent - (sums - 2) * copied * one_pass + sums * (numbers - copied) + 4 * copied // world
            sent = max(sent, copies)  # NCCL may have to do it
    (one, block), (two, block_of_two) = (activation_bytes(settings, n, device) for n in (1, 2))  # linear in the batch
    parts = {
        "weights": 4 * (numbers + frozen) + 2 * copied,
        "Adam": 8 * numbers,
        "EMA": 4 * numbers,
        "gradients": 4 * numbers - 2 * copied * one_pass,
        "gradients sent": sent,
        "activations": one + (two - one) * (settings["batch"] - 1),
    }
    beside = parts["gradients"] + parts["activations"]
    if one_pass:
        beside = max(parts["gradients"], parts["activations"])
    beside += parts["gradients sent"]
    beside += block + (block_of_two - block) * (settings["batch"] - 1)
    return parts | {"peak": parts["weights"] + parts["Adam"] + parts["EMA"] + beside}


def dry_run(out: Path, settings, denoiser, text_encoder, total: int, global_batch: int, order: SampleOrder, device):
    """Print the resolved configuration and the plan; draw the learning rate."""
    from matplotlib.figure import Figure

    print(json.dumps(settings, indent=1))
    epochs = total * global_batch / order.epoch_size
    print(f"{total:,} steps of {global_batch} images, {epochs:.2f} epochs of {order.epoch_size:,}")
    saves = sorted({*range(settings["save_steps"], total + 1, settings["save_steps"]), total})
    every, last = settings["keep_every"], settings["keep_last"]
    kept = {s for s in saves if every and s % every == 0} | set(saves[-last:] if last else saves)
    one = count_parameters(denoiser)[1] * 16 / 2**30  # live, EMA, Adam's two moments
    print(f"{len(saves):,} checkpoints of {one:.2f} GiB, {len(kept):,} kept at the end: {len(kept) * one:.2f} GiB, and "
          f"{one:.2f} more while one is written")  # fmt: skip
    memory = memory_estimate(settings, denoiser, text_encoder, device)
    print(f"memory of a {device.type} device, estimated: " +
          ", ".join(f"{name} {size / 2**30:.2f}" for name, size in memory.items()) + " GiB")  # fmt: skip
    for share in (0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1):
        step = min(total - 1, int(share * total))
        print(f"  step {step:>9,}  lr {lr_at(step, total, settings):.3e}")
    steps = np.unique(np.linspace(0, total - 1, min(total, 2000)).astype(int))
    figure = Figure(figsize=(7, 3))
    axis = figure.subplots()
    axis.plot(steps, [lr_at(int(s), total, settings) for s in steps])
    axis.set(xlabel="step", title="learning rate")
    figure.tight_layout()
    path = out.with_name(f"{out.name}_lr.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    print(f"learning rate: {path}")


def warm_up_steps(steps: int, shapes: int) -> int:
    """Of benchmark: for each shape of latents, kernels are compiled and algorithms chosen."""
    return min(20, steps) * shapes


def benchmark(
    steps: int, settings, denoiser, schedule, memory, device, rank, world, trace, loader=None, text_of=None, shapes=1
):
    """Time whole training steps: on latents and text of a loader, or on random ones that stay on the device. Prints a
    JSON line last; its ms are means over the steps after the warm-up, parts in the device's time. Forward and backward
    pass are told apart afterwards, in passes that are not recorded; sharing_ms is how much longer a micro-batch's
    passes take where processes share gradients in them. trace: a file for the first rank's trace of TRACED steps."""
    preset, micro, accumulate = PRESETS[settings["model"]], settings["batch"], settings["accumulate"]
    side, cuda = settings["size"] // preset["vae"].factor, device.type == "cuda"
    shape, tokens = (preset["unet"].in_channels, side, side), TextEncoder.MAX_LENGTH
    denoiser.to(device, memory_format=memory).train()
    ema = copy.deepcopy(denoiser).requires_grad_(False)
    update = Update(make_optimizer(denoiser, settings), denoiser, ema, settings, world)
    model = wrap(denoiser, settings, world)
    latents, noise = torch.randn(2, micro, *shape, device=device)
    text = torch.randn(micro, tokens, preset["unet"].context_dim, device=device)  # in the place of ids
    micro_steps = MicroSteps(model, text_of or (lambda x: x), schedule, settings, update, device, print, shapes)
    sync = torch.cuda.synchronize if cuda else lambda: None

    def now():  # a point in the device's time
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(a, b):
        return a.elapsed_time(b) if cuda else (b - a) * 1e3

    def end_step():
        update(settings["lr"], clip_limit(settings, 0.0), settings["ema"]).item()
        micro_steps.end()

    def whole_step():
        nonlocal batch, waited
        marks = [now()]
        for a in range(accumulate):
            asked = time.perf_counter()
            batch = loader.next() if loader else Batch(
                latents, noise, torch.randint(0, schedule.steps, (micro,), device=device), text)  # fmt: skip
            waited += time.perf_counter() - asked
            micro_steps(batch, first=a == 0, last=a == accumulate - 1)
        marks.append(now())
        end_step()
        return *marks, now()

    batch, waited, started = None, 0.0, time.perf_counter()
    whole_step()
    sync()
    first_step = time.perf_counter() - started
    for _ in range(warm_up_steps(steps, shapes) - 1):
        whole_step()
    sync()
    started, waited = time.perf_counter(), 0.0
    points = [whole_step() for _ in range(steps)]
    sync()
    seconds = (time.perf_counter() - started) / steps
    rate = micro * accumulate * world / seconds
    parts = {
        "data_wait": waited / steps * 1e3,
        "forward_backward": sum(ms(a, b) for a, b, _ in points) / steps,
        "optimizer": sum(ms(b, c) for _, b, c in points) / steps,
    }
    flops = SD_ImageGen.unet_flops(denoiser.unet.config, shape, tokens)
    peak_gib = round(peak_memory(update), 2) if cuda else None

    if trace:
        with torch.profiler.profile() as profiled:
            for _ in range(TRACED):
                whole_step()
            sync()
            profiled.add_metadata_json("steps", str(TRACED))
        if rank == 0:
            profiled.export_chrome_trace(trace)

    graphs, marks, passes = micro_steps.graphed is not None, [], {False: [], True: []}
    micro_steps.without_graphs()
    hook = denoiser.register_forward_hook(lambda *_: marks.append(now()))
    for i in range(1 + PASSES):
        for last in (False, True) if world > 1 else (True,):
            for timed in (False, True):  # the first keeps the device busy, so that the timed one's kernels are queued
                SD_Kernels.forget_gradients(update.parameters)
                if world > 1:
                    dist.all_reduce(torch.zeros(1, device=device))  # all processes begin together
                marks[:] = [now()]
                micro_steps(batch, first=True, last=last and timed)
            if i:  # after one to warm up
                passes[last].append((*marks, now()))
        end_step()
    hook.remove()
    sync()
    alone = passes[world == 1]
    parts["forward"], parts["backward"] = (sum(ms(p[j], p[j + 1]) for p in alone) / PASSES for j in (0, 1))
    sharing = sum(ms(p[0], p[2]) - ms(q[0], q[2]) for p, q in zip(passes[True], alone)) / PASSES if world > 1 else None

    if rank == 0:
        print(json.dumps({
            "benchmark": "train", "model": settings["model"], "size": settings["size"], "batch": micro,
            "accumulate": accumulate, "processes": world, "dtype": settings["dtype"], "kernels": settings["kernels"],
            "compile": settings["compile"], "channels_last": settings["channels_last"],
            "grad_checkpoint": settings["grad_checkpoint"], "steps": steps, "data": "loader" if loader else "synthetic",
            "shapes": shapes, "graphs": graphs,
            "images_per_s": round(rate, 2), "ms_per_step": round(seconds * 1e3, 2),
            **{f"{name}_ms": round(value, 2) for name, value in parts.items()},
            "sharing_ms": None if sharing is None else round(sharing, 2),
            "first_step_s": round(first_step, 2),
            "gradients_by": update.shared and type(update.shared.way).__name__,
            **SD_ImageGen.benchmark_facts(device, rate / world * 3 * flops),
            "peak_GiB": peak_gib,  # of the timed steps, with what processes share
        }))  # fmt: skip
    if world > 1:
        del model, micro_steps  # as at the end of main
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    run_cli(main)
