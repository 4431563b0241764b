"""What a run will take: steps, batches, work and memory, before it begins."""

import functools
import json
import math
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sd.checkpoints import MAX_STEPS
from sd.data import BucketOrder, SampleOrder, Split
from sd.device import peak_flops
from sd.errors import InputError
from sd.fused import apply, multiplied
from sd.lora import inject, settle_base
from sd.networks import unet_config
from sd.objective import Denoiser, in_autocast
from sd.online import MOST_AT_ONCE, VARIES
from sd.optim import cast_weights, kept_short, lr_at, state_bytes
from sd.setup import Data
from sd.step import copies_weights, updates_parts
from SD_Model import PRESETS, VAE, ResBlock, SpatialTransformer, TextEncoder, UNet, UNetConfig, count_parameters


def count_flops(function, *shapes: tuple[int, ...]) -> int:
    """FLOPs of function() on tensors of these shapes, counted by torch on the meta device; modules that the function
    makes are made there."""
    with torch.device("meta"), FlopCounterMode(display=False) as counter, torch.no_grad():
        function(*(torch.empty(shape) for shape in shapes))
    return counter.get_total_flops()


def unet_flops(config: UNetConfig, latent: tuple[int, int, int], tokens: int) -> int:
    """Of one latent through the UNet; with the backward pass three times that."""
    return count_flops(lambda *x: UNet(config)(*x), (1, *latent), (1,), (1, tokens, config.context_dim))


def passes(settings: dict) -> int:
    """A step's work, in forward passes: the backward pass is two, or beside adapters one, as it needs no gradients of
    the frozen weights."""
    return 2 if settings.get("lora") else 3


USUAL_MFU = 0.25  # of a card's peak, in dry runs: small networks on small pictures reach 0.12, the full one 0.4

ROOM = 4 << 30  # bytes for validation and sample grids, which cannot use the memory that graphs hold


def mean_flops(config: UNetConfig, split: Split) -> float:
    """unet_flops of a split's pictures, on average over their shapes."""
    one, tokens = len(split.shapes) == 1, split.length
    counts = [len(split)] if one else np.bincount(split.shape, minlength=len(split.shapes))
    each = [unet_flops(config, (config.in_channels, *shape[1:]), tokens) for shape in split.shapes]
    return float(np.average(each, weights=counts))


class Plan(NamedTuple):
    """Which samples a run takes, in which steps."""

    order: SampleOrder | BucketOrder
    global_batch: int  # samples of an optimizer step, over all processes
    total: int  # optimizer steps of the whole run; with --minutes, more than it can take
    first: int  # optimizer steps behind us
    end: int  # where this call stops

    @property
    def epochs(self) -> float:
        return self.total * self.global_batch / self.order.epoch_size

    def length(self, settings: dict) -> str:
        """How long the run is, in words."""
        if settings["minutes"]:
            return f"{settings['minutes']:g} minutes of steps of {self.global_batch} images"
        return f"{self.total:,} steps of {self.global_batch} images, {self.epochs:.2f} epochs"


class Course:
    """How far a run has come, for its learning rate and its end: by steps, or with --minutes by the time spent in
    training, which the first process measures. Times of the machine decide such a run, so that two are never alike."""

    def __init__(self, plan: Plan, settings: dict, seconds: float | None):
        """seconds: spent before this call."""
        self.plan, self.settings, self.seconds = plan, settings, seconds or 0.0
        self.limit = 60 * settings["minutes"] if settings["minutes"] else None
        self.whole = f"{settings['minutes']:g} minutes" if self.limit else f"{plan.total:,}"
        self._started = time.perf_counter() - self.seconds

    def now(self) -> float:
        """Seconds spent in training, by this process's clock. What all go by is `seconds`, the first one's."""
        return time.perf_counter() - self._started

    def lr(self, step: int) -> float:
        """The learning rate of a step."""
        return lr_at(step, self.plan.total, self.settings, self.limit and self.seconds / self.limit)

    def over(self, step: int) -> bool:
        """Whether the run ends with so many steps taken."""
        return step >= self.plan.total or (self.limit is not None and self.seconds >= self.limit)


def make_plan(args, settings: dict, data: Data, saved: dict | None, world: int, say) -> Plan:
    """The plan of a run that begins, or goes on from `saved`, its state.json. On resume the global batch stays, and
    settings["accumulate"] follows the number of processes. InputError if it makes no step or has its end behind it."""
    train = data.train
    order = SampleOrder(train.sizes, data.weights, settings["seed"], train.windows)
    global_batch = plan_batches(settings, world, saved and saved["global_batch"], args.accumulate is not None)
    if len(train.shapes) > 1:
        order = BucketOrder(order, train.shape, global_batch)
    images = settings["images"] or int(settings["epochs"] * order.epoch_size)
    total = settings["max_steps"] or images // global_batch
    if settings["minutes"]:
        total = MAX_STEPS
    if total < 1:
        what = f"{settings['epochs']} epochs of {order.epoch_size} pictures"
        raise InputError(f"{settings['images'] or what} make no step of {global_batch}")
    first = saved["step"] if saved else 0
    check_end(first, total, args.stop_at, say)
    if saved and settings["minutes"] and saved.get("seconds", 0) >= 60 * settings["minutes"]:
        say(f"nothing is left to do: the run has had its {settings['minutes']:g} minutes already")
    if len(train.shapes) > 1 and not settings["minutes"]:
        showings = np.bincount(train.shape, minlength=len(train.shapes)) * total * global_batch / order.epoch_size
        rare = ", ".join(f"{h} x {w}" for (_, h, w), n in zip(train.shapes, showings) if n < global_batch)
        say(f"shapes: {len(train.shapes)}; too rare for a step of {global_batch} in this run: {rare or 'none'}")
    return Plan(order, global_batch, total, first, min(total, args.stop_at or total))


def check_end(step: int, total: int, stop_at: int | None, say):
    """InputError if a run at `step` of `total` is past where it is asked to end, or too long; says if it is there."""
    if total > MAX_STEPS:
        raise InputError(
            f"at most {MAX_STEPS:,} steps were wanted, found {total:,}; give fewer --max_steps or --epochs"
        )
    for flag, end in (("--max_steps (or --epochs)", total), ("--stop_at", stop_at)):
        if end is not None and end < step:
            raise InputError(
                f"the run stands at step {step:,}, and is to end at step {end:,}: give a larger {flag}, or go back to "
                "an older checkpoint with --resume PATH"
            )
    if step == min(total, stop_at or total):
        say(f"nothing is left to do: the run stands at step {step:,} already")


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


def rank_positions(first: int, end: int, global_batch: int, micro: int, accumulate: int, rank: int, world: int):
    """Global positions [micro] of one rank's micro-batches in the steps from first to end, one after the other."""
    for step in range(first, end):
        for a in range(accumulate):
            start = step * global_batch + (a * world + rank) * micro
            yield np.arange(start, start + micro)


def activation_bytes(settings: dict, batch: int, device: torch.device) -> tuple[int, int]:
    """Bytes that a micro-batch of the UNet keeps for its backward, and the largest block's share of them, counted on
    fake tensors, which take no memory. bf16 copies of weights do not count.

    Of a checkpointed block, the inputs are kept, and the rest of one block at a time, while it is recomputed.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    config, which, kept, storages = unet_config(settings), settings["grad_checkpoint"], [], {}
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
        unet = UNet(config)
        if settings["kernels"]:
            apply(unet)
        denoiser = Denoiser(unet, None)
        if settings.get("lora"):
            inject(denoiser, settings)
            settle_base(denoiser, settings)
        cast_weights(unet, settings)
        held = list(denoiser.parameters())
        if copies_weights(settings):
            for p in set(multiplied(unet)) - set(kept_short(unet, settings)):
                p.copy_bf16 = torch.empty_like(p, dtype=torch.bfloat16, requires_grad=False)
                held.append(p.copy_bf16)
        weights = {p.untyped_storage()._cdata for p in held}
        for m in unet.modules():
            if isinstance(m, ResBlock | SpatialTransformer):
                m.register_forward_pre_hook(enter)
                m.register_forward_hook(leave)
        side = settings["size"] // PRESETS[settings["model"]]["vae"].factor
        latents = torch.empty(batch, config.in_channels, side, side)
        context = torch.empty(batch, TextEncoder.MAX_LENGTH, config.context_dim)
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
    tried = [{"grad_checkpoint": which} for which in ("none", "resblocks", "all")]
    which, wanted, _ = first_that_fits(tried, free, ROOM, settings, denoiser, text_encoder, device)
    say(f"grad_checkpoint auto: {which['grad_checkpoint']}, about {wanted / 2**30:.1f} of {free / 2**30:.1f} GiB")
    return which["grad_checkpoint"]


def first_that_fits(tried: list[dict], free: float, room: float, settings: dict, denoiser, text_encoder, device):
    """Of changes to the settings the first with which training fits into so many free bytes, else the last; the bytes
    it needs, without what is for validation and grids (`room`); whether it fits."""
    for changes in tried:
        wanted = memory_estimate(settings | changes, denoiser, text_encoder, device)["peak"]
        if wanted * 1.1 + room < free:
            return changes, wanted, True
    return changes, wanted, False


def fit(args, settings: dict, denoiser: Denoiser, text_encoder, device, begins: bool, say):
    """--fit: change the settings, no further than needed and in the order of what that costs, until training fits into
    so many GiB; say what was chosen. What a flag asks for stays, and so does what --resume may not change. InputError
    if nothing fits."""
    if args.fit is None:
        return
    if not 0 < args.fit < math.inf:
        raise InputError(f"--fit wants a positive number of GiB, found {args.fit:g}")
    if free_to_choose := args.grad_checkpoint in (None, "auto") and settings["grad_checkpoint"] == "auto":
        settings["grad_checkpoint"] = "none"
    changes, tried = {}, [{}]

    def then(**more):
        if any(settings[name] != value for name, value in more.items()):
            changes.update(more)
            tried.append(dict(changes))

    if args.cache_text is None and text_encoder is not None and not settings["train_text_encoder"]:
        then(cache_text=True)
    if args.encode_first is None and settings["pictures"] and not any(settings[name] for name in VARIES):
        then(encode_first=True)
    averages = settings["lora"] is None and settings["optimizer"] != "schedulefree"
    if begins and averages and args.no_ema is args.ema is args.ema_on_cpu is None:
        then(no_ema=True)
    levels = ["none", "resblocks", "all"]
    if free_to_choose or args.grad_checkpoint is None:
        for which in levels[levels.index(settings["grad_checkpoint"]) + 1 :]:
            then(grad_checkpoint=which)
    if begins and args.optimizer is None:
        then(optimizer="adamw8bit")
    if begins and args.weights_dtype is settings["lora"] is None and settings["dtype"] == "bf16":
        then(weights_dtype="bf16")
    if averages and args.ema_on_cpu is None and not (settings["no_ema"] or changes.get("no_ema")):
        then(ema_on_cpu=True)
    if args.accumulate is None:
        for parts in range(2, settings["batch"] + 1):
            if settings["batch"] % parts == 0:
                then(batch=settings["batch"] // parts, accumulate=settings["accumulate"] * parts)
    free = args.fit * 2**30
    chosen, wanted, fits = first_that_fits(tried, free, min(ROOM, free / 10), settings, denoiser, text_encoder, device)
    words = ", ".join(f"--{n}" if value is True else f"--{n} {value}" for n, value in chosen.items()) or "no change"
    if not fits:
        least = (wanted * 1.1 + min(ROOM, free / 10)) / 2**30
        raise InputError(
            f"--fit {args.fit:g} GiB is less than this training needs, about {least:.1f} GiB with {words}; choose a "
            "smaller --size or --model"
        )
    settings.update(chosen)
    say(f"fit {args.fit:g} GiB: {words}; about {wanted / 2**30:.1f} GiB in training steps")


def memory_estimate(settings: dict, denoiser: Denoiser, text_encoder: TextEncoder | None, device) -> dict[str, int]:
    """Bytes a device needs, by what they are for; gradients come while activations go, unless steps accumulate, and
    the gradients of one block's activations are there with both."""
    numbers = sum(p.numel() for p in denoiser.trained())
    held = 4 * (count_parameters(denoiser)[1] - numbers)  # the base of adapters
    if settings["dtype"] == "bf16":
        halves = (m.weight for m in denoiser.modules() if isinstance(m, nn.Linear | nn.Conv2d))
        held -= 2 * sum(w.numel() for w in halves if not w.requires_grad)
    if text_encoder is not None and denoiser.text_encoder is None and not settings["cache_text"]:
        held += 4 * count_parameters(text_encoder)[1]
    half = set(multiplied(denoiser)) if copies_weights(settings) else set()
    short = kept_short(denoiser, settings)
    copied, short = sum(p.numel() for p in half - set(short)), sum(p.numel() for p in short)
    half = sum(p.numel() for p in half)  # whose gradients are in bf16, as those of bf16 weights are
    one_pass = settings["accumulate"] == 1
    sent, sums = 0, 2 if settings["compress_gradients"] else 4
    world, local = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if world > 1 and settings["kernels"]:
        sent = sums * numbers
        if updates_parts(settings) and local == world:  # of copied weights one part of the sums
            copies = sent - (sums - 2) * copied * one_pass + sums * (numbers - copied) + 4 * copied // world
            sent = max(sent, copies)  # NCCL may have to do it
    names = "model unet size dtype kernels grad_checkpoint weights_dtype seed".split()
    names += [name for name in settings if name.startswith("lora")]
    decides = json.dumps({name: settings[name] for name in names})
    (one, block), (two, block_of_two) = (_activation_bytes(decides, n, device) for n in (1, 2))  # linear in the batch
    cut = world if settings["shard"] else 1
    parts = {
        "weights": 4 * numbers + held - 2 * short + 2 * copied,
        "optimizer": state_bytes(denoiser, settings) // cut,
        "EMA": 0 if settings["no_ema"] or settings["ema_on_cpu"] else 4 * numbers // cut,
        "VAE": vae_bytes(settings, device),
        "gradients": 4 * numbers - 2 * half * one_pass - 2 * max(0, short - half),
        "gradients sent": sent,
        "activations": one + (two - one) * (settings["batch"] - 1),
    }
    beside = parts["gradients"] + parts["activations"]
    if one_pass:
        beside = max(parts["gradients"], parts["activations"])
    beside += parts["gradients sent"]
    beside += block + (block_of_two - block) * (settings["batch"] - 1)
    return parts | {"peak": parts["weights"] + parts["optimizer"] + parts["EMA"] + parts["VAE"] + beside}


def vae_bytes(settings: dict, device: torch.device) -> int:
    """Bytes of a VAE of the preset that encodes --pictures beside the training steps: its weights in fp32, and in bf16
    if it computes in that, and about five of the largest tensors that it makes of so many pictures (an NVIDIA H200 took
    0.32 GiB a picture of 512 px, where that tensor is of 64 MiB). None with --encode_first."""
    if not settings["pictures"] or settings["encode_first"]:
        return 0
    config, number = PRESETS[settings["model"]]["vae"], 2 if settings["dtype"] == "bf16" else 4
    with torch.device("meta"):
        weights = count_parameters(VAE(config))[1] * (4 if number == 4 else 4 + number)
    at_once = min(settings["batch"], MOST_AT_ONCE) if device.type == "cuda" else 1
    return weights + 5 * at_once * config.channels[0] * (settings["size"] // config.patch) ** 2 * number


@functools.cache
def _activation_bytes(decides: str, batch: int, device: torch.device) -> tuple[int, int]:
    """activation_bytes, once for settings that are tried with other optimizers; decides: those it depends on, JSON."""
    return activation_bytes(json.loads(decides), batch, device)


def checkpoint_bytes(settings: dict, denoiser: Denoiser) -> int:
    """Live weights, EMA and the optimizer's state."""
    numbers = sum(p.numel() for p in denoiser.trained())
    short = sum(p.numel() for p in kept_short(denoiser, settings))
    return 4 * numbers * (1 if settings["no_ema"] else 2) - 2 * short + state_bytes(denoiser, settings)


def expected_rate(settings: dict, split: Split, device: torch.device) -> float | None:
    """Images a second and process, at a share of the card's peak that trainings reach; None for an unknown card."""
    peak = peak_flops(device)
    return peak and USUAL_MFU * peak / (passes(settings) * mean_flops(unet_config(settings), split))


def dry_run(out: Path, settings: dict, denoiser: Denoiser, text_encoder: TextEncoder, plan: Plan, split: Split, place):
    """Print the resolved configuration and the plan; draw the learning rate."""
    from matplotlib.figure import Figure

    print(json.dumps(settings, indent=1))
    total, device = plan.total, place.device
    print(f"{plan.length(settings)} of {plan.order.epoch_size:,}")
    if rate := expected_rate(settings, split, device):
        rate *= place.world
        print(f"{rate:,.0f} images/s, estimated at {USUAL_MFU:.0%} of the card's peak: ", end="")
        if settings["minutes"]:
            total = max(1, int(60 * settings["minutes"] * rate / plan.global_batch))
            images = total * plan.global_batch
            print(f"{total:,} steps, {images:,} images, {images / plan.order.epoch_size:.1f} epochs")
        else:
            print(f"{total * plan.global_batch / rate / 60:,.1f} minutes")
    elif settings["minutes"]:
        print(f"how many steps that makes is not known of a {device.type} device; taken for what follows: 1,000")
        total = 1000
    saves = sorted({*range(settings["save_steps"], total + 1, settings["save_steps"]), total})
    every, last = settings["keep_every"], settings["keep_last"]
    kept = {s for s in saves if every and s % every == 0} | set(saves[-last:] if last else saves)
    one = checkpoint_bytes(settings, denoiser) / 2**30
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
