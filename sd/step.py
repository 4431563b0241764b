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
from sd.optim import FusedStep, forget_gradients, set_lr, update_ema
from sd.parallel import SharedGradients
from SD_Model import NoiseSchedule


def copies_weights(settings: dict) -> bool:
    """Whether the blocks multiply with bf16 copies of the weights that the optimizer's pass makes. Their gradients come
    in bf16, and are added up, over micro-batches and processes, in fp32."""
    return bool(settings["kernels"]) and settings["dtype"] == "bf16"


class Update:
    """What follows the backward pass: clipping, AdamW, EMA; with fused kernels in one pass over memory.

    With these, processes share gradients by SharedGradients (sd/parallel.py) instead of DDP.
    """

    def __init__(self, optimizer: torch.optim.AdamW, denoiser: Denoiser, ema: Denoiser, settings: dict, world: int):
        self.optimizer, self.fused, self.shared = optimizer, None, None
        # Lists, as a walk over the modules takes milliseconds.
        pairs = [pair for pair in zip(denoiser.parameters(), ema.parameters()) if pair[0].requires_grad]
        self.parameters, self.averages = map(list, zip(*pairs))
        if settings["kernels"]:
            copied = multiplied(denoiser) if copies_weights(settings) else ()
            if world > 1:
                sums = torch.bfloat16 if settings["compress_gradients"] else torch.float32
                self.shared = SharedGradients(self.parameters, sums, copied, settings["peer_copies"])
            self.fused = FusedStep(
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
            compile_ahead(lambda: self._plain(*batch[:4], last=False))
            forget_gradients(self.parameters)
            self.compiled = True
        if self.graphed:
            try:
                return self.graphed(*batch[:4], first=first, last=last)
            except NotRecorded as e:  # a text encoder that waits for the device, say
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
