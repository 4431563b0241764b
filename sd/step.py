"""One training step: micro-batches forward and backward, then the update."""

import contextlib
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from sd.data import Batch
from sd.fused import multiplied
from sd.graphs import GraphedBackward, NotRecorded
from sd.kernels import compile_ahead
from sd.networks import unet_config
from sd.objective import Denoiser, backward, in_autocast
from sd.optim import (
    AdamW8bit,
    FarAverage,
    FusedStep,
    FusedStep8bit,
    ScheduleFree,
    copy_weights,
    forget_gradients,
    gradient_norm,
    gradient_of,
    set_lr,
    total_norm,
    update_ema,
)
from sd.parallel import SharedGradients
from sd.sharding import Shard, SummedParts
from SD_Model import NoiseSchedule


def copies_weights(settings: dict) -> bool:
    """Whether the blocks multiply with bf16 copies of the weights that the optimizer's pass makes. Their gradients come
    in bf16, and are added up, over micro-batches and processes, in fp32."""
    return bool(settings["kernels"]) and settings["dtype"] == "bf16"


def updates_parts(settings: dict) -> bool:
    """Whether each process may update a part of the weights and copy the others': fp32 ones by AdamW. With --shard each
    does so by another way (sd/sharding.py); others all update all."""
    if settings["shard"] or not settings["peer_copies"]:
        return False
    return settings["optimizer"] == "adamw" and settings["weights_dtype"] == "fp32"


class Update:
    """What follows the backward pass: clipping, the optimizer, EMA; with fused kernels and AdamW, in 8 bits too, in one
    pass over memory.

    With these kernels, processes share gradients by SharedGradients (sd/parallel.py) instead of DDP.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, denoiser: Denoiser, ema: Denoiser, settings: dict, world: int,
                 shard: Shard | None = None):  # fmt: skip
        """ema: the denoiser itself, if there is no average. shard: where each process updates its part alone."""
        self.optimizer, self.fused, self.shared, self.kernels = optimizer, None, None, settings["kernels"]
        # Lists, as a walk over the modules takes milliseconds.
        pairs = [pair for pair in zip(denoiser.parameters(), ema.parameters()) if pair[0].requires_grad]
        self.parameters, self.averages = map(list, zip(*pairs))
        if ema is denoiser:
            self.averages = []
        self.shard, self.updated = shard, self.parameters
        if shard:
            self.updated, self.averages = list(shard.pieces.values()), list(shard.averages.values())
        self.far = None
        if settings["ema_on_cpu"]:
            self.far, self.averages = FarAverage(self.averages, self.parameters), []
        averages, self.copied = dict(zip(self.updated, self.averages)), []
        if isinstance(optimizer, ScheduleFree):  # whose average is not the EMA, but in its place
            optimizer.averages, self.averages = averages, []
        if self.kernels:
            copied, accumulates = multiplied(denoiser) if copies_weights(settings) else (), settings["accumulate"] > 1
            if world > 1:
                sums = torch.bfloat16 if settings["compress_gradients"] else torch.float32
                self.shared = SharedGradients(self.parameters, sums, copied, updates_parts(settings))
            in_one_pass = isinstance(optimizer, torch.optim.AdamW | AdamW8bit)
            if in_one_pass:
                kind = FusedStep8bit if isinstance(optimizer, AdamW8bit) else FusedStep
                own = (copied, accumulates, self.shared) if not shard else ((), False, SummedParts(shard, self.shared))
                self.fused = kind(optimizer, averages, *own)
            if shard or not in_one_pass:
                copy_weights(self.parameters, copied, accumulates, self.shared)
                self.copied = [p for p in self.parameters if p.copy_bf16 is not None and p.dtype == torch.float32]

    def __call__(self, lr: float, limit: float, decay: float) -> torch.Tensor:
        """Update weights and averages; returns the norm of the gradients before clipping. If that is not finite,
        nothing was updated, and skipped() is to be called."""
        set_lr(self.optimizer, lr)
        if self.fused:  # the device is not waited for
            norm = self.fused.norm()
            self.fused.step(lr, norm, limit, decay)
            self._spread()
            if self.far:
                self.fused.complete()  # of weights that other processes update
            self._far_average(norm, decay)
            return norm
        if isinstance(self.optimizer, torch.optim.AdamW):
            norm = nn.utils.clip_grad_norm_(self.parameters, limit, foreach=True)
            if math.isfinite(norm):
                if self.shard:
                    for piece, gradient in self._gradients().items():
                        piece.grad = gradient
                self.optimizer.step()
        else:
            norm = self._norm()
            if math.isfinite(norm):
                self.optimizer.step(min(1.0, limit / (norm.item() + 1e-6)), self._gradients())
        if self.averages and math.isfinite(norm):
            update_ema(self.averages, self.updated, decay)
        self._spread()
        self._far_average(norm, decay)
        return norm

    def _spread(self):
        """The updated weights to where they are multiplied with."""
        if self.shard:
            forget_gradients(self.updated)
            self.shard.spread()
        if self.copied:
            torch._foreach_copy_([p.copy_bf16 for p in self.copied], [p.detach() for p in self.copied])

    def _far_average(self, norm: torch.Tensor, decay: float):
        if self.far and math.isfinite(norm):
            self.far.update(decay)

    def _norm(self) -> torch.Tensor:
        if self.kernels:
            return gradient_norm(self.parameters, self.shared)
        return total_norm([p.grad for p in self.parameters if p.grad is not None])

    def _gradients(self) -> dict[nn.Parameter, torch.Tensor]:
        """By what is updated: whole weights, or this process's pieces."""
        found = {p: gradient_of(p) for p in self.parameters}
        if self.shared:
            found = {p: g for _, parts in self.shared.way.shares() for (p, *_), g in parts}
        return self.shard.parts(found) if self.shard else found

    def skipped(self):
        if self.fused:
            self.fused.skipped()

    def complete(self, show: bool):
        """Before anything but the next step reads weights, averages or the optimizer's state; all processes at once.
        show: the averages too, where each process has a part of them, until shown() is called."""
        if self.fused:
            self.fused.complete()
        if self.shard and show:
            self.shard.show()

    def shown(self):
        """After validation and painting: averages of which each process has a part are in these parts alone again."""
        if self.shard:
            self.shard.hide()


def peak_memory(update: Update) -> float:
    """GiB, with those that processes share, of which torch's allocator does not know. After the first step. From three
    processes on too high, by up to bf16 copies that move at the first step's end and count twice."""
    shared = update.shared.way.extra_bytes if update.shared else 0
    return (torch.cuda.max_memory_allocated() + shared) / 2**30


def graphs_run(settings: dict, shapes: int) -> bool:
    """Whether forward and backward passes are recorded as CUDA graphs: not for latents of several shapes, as each
    graph would hold gradients of its own."""
    return bool(settings["kernels"]) and shapes == 1 and not unet_config(settings).dropout


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
            self.graphed = GraphedBackward(self._plain, update.parameters, settings["accumulate"], update.shared)

    def _plain(self, *tensors: torch.Tensor, last: bool) -> torch.Tensor:
        text_of, schedule, settings = self.parts
        if self.shared:
            self.shared.last = last
        with averaging(self.model, last):
            batch = Batch.of(tensors)
            losses = backward(self.net, batch, text_of(batch.ids), schedule, settings, self.share)
        if self.shared and last:
            self.shared.finish()
        return losses

    def __call__(self, batch: Batch, first: bool, last: bool) -> torch.Tensor:
        """Weighted losses [B] of one micro-batch; the first, the last of its step?"""
        if not self.compiled:
            compile_ahead(lambda: self._plain(*batch.tensors, last=False))
            forget_gradients(self.parameters)
            self.compiled = True
        if self.graphed:
            try:
                return self.graphed(*batch.tensors, first=first, last=last)
            except NotRecorded as e:  # a text encoder that waits for the device, say
                self.say(f"note: going on without CUDA graphs ({str(e).splitlines()[0]})")
                self.without_graphs()
                if self.shared:
                    self.shared.reset()
        return self._plain(*batch.tensors, last=last)

    def without_graphs(self):
        """Give up the recorded passes, their gradients and their memory."""
        if self.graphed:
            torch.cuda.synchronize()
            self.graphed = None
            forget_gradients(self.parameters)
            torch.cuda.empty_cache()

    def end(self):
        """After a step: drop the gradients, unless the next step overwrites them where they are."""
        if not self.graphed:
            forget_gradients(self.parameters)


def averaging(model: nn.Module, last: bool):
    """The context of one micro-batch, forward and backward: only in a step's last one does DDP average gradients."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else contextlib.nullcontext()


def wrap(denoiser: Denoiser, settings: dict, world: int) -> nn.Module:
    """The module to call in training: in DDP if there are several processes, unless fused kernels run, whose bf16
    copies DDP cannot see."""
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
