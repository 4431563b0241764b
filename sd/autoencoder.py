"""Training of an autoencoder: its loss, its measures, and one step."""

import copy
import math
from dataclasses import dataclass, replace

import torch

from sd.device import DTYPES, compiled_or_plain
from sd.errors import InputError
from sd.fused import apply
from sd.kernels import compile_ahead
from sd.optim import ema_decay, update_ema
from sd.optimizers import Muon
from SD_Model import PRESETS, VAE

MAX_MEASURED = 4096  # pictures of a size that the latents' standard deviation is measured on


# Loss and measures
def to_model(pictures: torch.Tensor, device: torch.device) -> torch.Tensor:
    """uint8 [B, H, W, 3] -> fp32 [B, 3, H, W] in -1..1 on the device."""
    x = pictures.to(device).permute(0, 3, 1, 2).float() / 127.5 - 1
    return x if device.type == "cuda" else x.contiguous()  # the permuted memory is channels_last already


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
def latent_statistics(vae: VAE, sets: list[torch.Tensor], device: torch.device, batch: int = 32) -> list[dict]:
    """Of all pictures, and then of each set, uint8 [N, H, W, 3], whose sides differ: the standard deviation of the
    unscaled latents (posterior means), in all and by channel, the channels' means, and the mean posterior standard
    deviation. Over up to MAX_MEASURED pictures of each set; among all, each set counts alike."""
    means, deviations = [], []
    for pictures in sets:
        parts, widths = [], []
        for part in pictures[:: max(1, len(pictures) // MAX_MEASURED)].split(batch):
            mean, logvar = vae.moments(to_model(part, device))
            parts.append(mean.cpu())
            widths.append((0.5 * logvar).exp().mean().cpu())
        means.append(torch.cat(parts).double())  # [N, z, h, w]
        deviations.append(torch.stack(widths).mean())
    of_each = [_statistics([m], [d]) for m, d in zip(means, deviations, strict=True)]
    return [_statistics(means, deviations), *of_each]


def _statistics(means: list[torch.Tensor], deviations: list[torch.Tensor]) -> dict:
    """latent_statistics() of sets whose posterior means are [N, z, h, w]."""
    channels = (0, 2, 3)
    return {
        "std": float(_deviation(means, (0, 1, 2, 3))),
        "channel_std": [round(v, 4) for v in _deviation(means, channels).tolist()],
        "channel_mean": [round(v, 4) for v in torch.stack([m.mean(channels) for m in means]).mean(0).tolist()],
        "posterior_std": float(torch.stack(deviations).mean()),
    }


def _deviation(parts: list[torch.Tensor], dim: tuple) -> torch.Tensor:
    """The standard deviation of the values of several tensors, each of which counts alike."""
    if len(parts) == 1:
        return parts[0].std() if len(dim) == 4 else parts[0].std(dim)
    square = torch.stack([part.square().mean(dim) for part in parts]).mean(0)
    return (square - torch.stack([part.mean(dim) for part in parts]).mean(0).square()).sqrt()


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


@dataclass
class Trained:
    """What training changes. step: how many are done; seconds: how long they took, in all starts of the run."""

    vae: VAE
    ema: VAE
    optimizers: list[torch.optim.Optimizer]
    step: int
    seconds: float = 0.0


def new_trained(args, device: torch.device) -> Trained:
    """Fresh networks and optimizers; the network that is trained with fused kernels if args.kernels."""
    vae = new_vae(args.model, args.seed)
    ema = copy.deepcopy(vae).requires_grad_(False).eval()
    memory = torch.channels_last if device.type == "cuda" else torch.contiguous_format
    vae, ema = (module.to(device, memory_format=memory) for module in (vae, ema))
    return Trained(apply(vae) if args.kernels else vae, ema, make_optimizers(vae, args), 0)


class Step:
    """A training step: loss, gradients, clipping, optimizers, EMA. The device is not waited for, where it has fused
    optimizers (CPU, CUDA)."""

    def __init__(self, trained: Trained, args, device: torch.device):
        self.trained, self.args, self.device = trained, args, device
        # Lists, as a walk over the modules takes milliseconds.
        self.parameters, self.averages = list(trained.vae.parameters()), list(trained.ema.parameters())
        self.weights = {name: getattr(args, f"{name}_weight") for name in ("l1", "l2", "edge", "kl")}
        self.losses, self.met = None, set()  # losses() or compiled; shapes of pictures so far
        self.bad = torch.full((), -1, device=device)  # the first step whose loss or gradient was not finite

    def __call__(self, pictures: torch.Tensor, noise: torch.Tensor, lr: float) -> dict[str, torch.Tensor]:
        """One step on uint8 [B, H, W, 3] at lr, a share of the peaks, with noise [B, z, h, w]. Returns the terms of the
        loss and the gradient's norm before clipping, on the device. Where these are not finite, weights and optimizers
        stay as they are, and check() says so."""
        trained, x = self.trained, to_model(pictures, self.device)
        self._prepare(x, noise)
        for optimizer in trained.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group["peak_lr"]
        terms = self._passes(self.losses, x, noise)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.args.grad_clip)
        broken = ~(terms["loss"] + norm).isfinite()
        self.bad = torch.where(broken & (self.bad < 0), trained.step, self.bad)
        if self.device.type not in ("cpu", "cuda"):
            self.check()
        for optimizer in trained.optimizers:
            if self.device.type in ("cpu", "cuda"):
                optimizer.found_inf = broken.float()  # as torch's GradScaler gives it to fused optimizers
            optimizer.step()
        trained.step += 1
        update_ema(self.averages, self.parameters, ema_decay(self.args.ema, trained.step))
        return terms | {"grad_norm": norm}

    def check(self):
        """InputError if a step so far was not finite. Waits for the device; to be called before weights are saved."""
        if (step := int(self.bad)) >= 0:
            raise InputError(f"the loss or its gradient was not finite at step {step}: try a smaller --lr")

    def _passes(self, losses, x: torch.Tensor, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        """The terms of the loss of x [B, 3, H, W]; leaves new gradients."""
        for p in self.parameters:
            p.grad = None
        dtype = DTYPES[self.args.dtype]
        with torch.autocast(self.device.type, dtype, enabled=dtype != torch.float32):
            terms = losses(self.trained.vae, x, noise, self.weights)
        terms["loss"].backward()
        return {name: term.detach() for name, term in terms.items()}

    def _prepare(self, x: torch.Tensor, noise: torch.Tensor):
        """The first time that pictures have this shape: compile what is to be compiled."""
        if x.shape in self.met:
            return
        self.met.add(x.shape)
        if self.args.kernels:
            compile_ahead(lambda: self._passes(losses, x, noise))
        if not self.args.compile:
            self.losses = losses
        elif self.losses is None:
            self.losses = compiled_or_plain(losses, lambda function: self._passes(function, x, noise), False)
