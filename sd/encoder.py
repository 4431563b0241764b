"""The VAE's encoder at full speed."""

import copy
import math

import numpy as np
import torch

from sd.device import compiled_or_plain
from sd.fused import apply
from sd.kernels import available
from SD_Model import VAE


# Latents
class Encoder:
    """Pictures to fp16 latents on one device: submit() starts, collect() waits, so that the two can overlap.

    Args:
        vae: fp32, eval.
        dtype: what the VAE computes in. Results that are not finite are computed again in fp32.
        moments: also the log-variance.
        pad_to: fill batches up to this many pictures with black ones, so that every shape is the same. None: not.
        compiled: through torch.compile.
    """

    def __init__(self, vae: VAE, device: torch.device, dtype: torch.dtype, moments=False, pad_to=None, compiled=False):
        vae.check_whole()
        self.layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self.exact = vae.to(device, memory_format=self.layout)
        self.fast = self.exact if dtype == torch.float32 else copy.deepcopy(self.exact).to(dtype)
        self.scale = vae.config.scaling_factor
        self.device, self.dtype, self.moments, self.pad_to = device, dtype, moments, pad_to
        self.compiled = compiled
        if available(device) and not compiled and self.fast is not self.exact:
            apply(self.fast)
        self.fast_moments = self.fast.moments  # until warm_up() compiles it

    def _latents(self, moments, pictures: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = (pictures.float() / 127.5 - 1).permute(0, 3, 1, 2)  # [B, 3, H, W] in -1..1, channels_last in memory
        mean, logvar = moments(x.to(dtype).contiguous(memory_format=self.layout))  # each [B, z, h, w]
        latents = mean.float() * self.scale  # as VAE.encode does
        if self.moments:  # ln var(s x) = ln var(x) + 2 ln s
            latents = torch.cat([latents, logvar.float() + 2 * math.log(self.scale)], dim=1)  # [B, 2z, h, w]
        return latents.half()

    def warm_up(self, size: int, batch: int):
        """Compile, where that was asked for; where it does not work, a line says so and it goes on without."""
        if not self.compiled:
            return

        def trial(moments):
            self.fast_moments = moments
            self.collect(self.submit(torch.zeros(batch, size, size, 3, dtype=torch.uint8)))

        self.fast_moments = compiled_or_plain(self.fast.moments, trial)
        self.compiled = self.fast_moments != self.fast.moments

    @torch.inference_mode()
    def submit(self, pictures: torch.Tensor, mirrored: bool = False):
        """Pictures uint8 [B, H, W, 3] on the CPU -> what collect() wants. On a GPU it does not wait."""
        count = len(pictures)
        if not count:
            return None
        pictures = pictures.to(self.device, non_blocking=True)
        if mirrored:
            pictures = pictures.flip(2)
        padded = pictures
        if self.pad_to and count < self.pad_to:
            padded = torch.cat([pictures, pictures.new_zeros(self.pad_to - count, *pictures.shape[1:])])
        latents = self._latents(self.fast_moments, padded, self.dtype)[:count]
        finite = latents.isfinite().flatten(1).all(dim=1)
        latents, finite = (t.to("cpu", non_blocking=True) for t in (latents, finite))
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        return pictures, latents, finite, copied

    @torch.inference_mode()
    def collect(self, submitted) -> tuple[np.ndarray, np.ndarray] | None:
        """fp16 [B, z or 2z, h, w], and bool [B]: which of them are finite. None for a batch without pictures."""
        if submitted is None:
            return None
        pictures, latents, finite, copied = submitted
        if copied:
            copied.synchronize()
        if self.fast is not self.exact and not finite.all():
            again = (~finite).nonzero()[:, 0]
            latents[again] = self._latents(self.exact.moments, pictures[again.to(self.device)], torch.float32).cpu()
            finite = latents.isfinite().flatten(1).all(dim=1)
        return latents.numpy(), finite.numpy()
