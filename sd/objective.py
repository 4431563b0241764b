"""What training minimises: the denoiser, its loss over timesteps, and the same loss held still for validation."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from sd.data import Batch
from sd.device import Place
from SD_Model import NoiseSchedule, TextEncoder, UNet

BINS = 10  # of timesteps, equal widths, in logs and curves


class Denoiser(nn.Module):
    """What is trained: the UNet, and the text encoder if asked; or adapters beside both, which are frozen then."""

    def __init__(self, unet: UNet, text_encoder: TextEncoder | None):
        super().__init__()
        self.unet, self.text_encoder = unet, text_encoder
        self.adapters = None  # those of sd/lora.py's inject(), by the names of their layers

    def trained(self, part: str | None = None) -> list[nn.Parameter]:
        """What an optimizer changes; of a part alone, 'unet' or 'text_encoder', adapters beside it included."""
        named = self.named_parameters()
        return [p for n, p in named if p.requires_grad and n.removeprefix("adapters.").startswith(part or "")]

    def forward(self, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Noisy latents [B, z, h, w], timesteps [B] -> [B, z, h, w].

        text: token ids [B, L] where the text encoder is trained, else its ready context [B, L, D].
        """
        return self.unet(x, t, text if self.text_encoder is None else self.text_encoder(text))


def sample_losses(net, batch: Batch, text: torch.Tensor, schedule: NoiseSchedule) -> torch.Tensor:
    """Mean squared error of each sample's prediction, fp32 [B]. net(noisy, t, text) predicts.

    With the batch's weights w it is the weighted mean, sum(w error) / sum(w) over a sample's places: weights that are
    all 1 change nothing, to the bit, and a picture counts as much as any other, however little of it counts; 0 of a
    sample whose weights are all 0.
    """
    noisy = schedule.add_noise(batch.latents, batch.noise, batch.t)  # [B, z, h, w]
    target = schedule.target(batch.latents, batch.noise, batch.t)
    error = F.mse_loss(net(noisy, batch.t, text).float(), target, reduction="none")  # [B, z, h, w]
    if batch.weights is None:
        return error.mean(dim=(1, 2, 3))
    places, weights = batch.weights[0].numel(), batch.weights.sum(dim=(1, 2)).clamp(min=1e-6)
    return (error * batch.weights[:, None]).mean(dim=(1, 2, 3)) * (places / weights)


def loss_weight(t: torch.Tensor, schedule: NoiseSchedule, settings: dict) -> torch.Tensor | float:
    """Weight of each sample's loss by its timestep, fp32 [B].

    min_snr: Hang et al. 2023, eq. 8: min(SNR, gamma) on x_0's error, and so min(SNR, gamma)/(SNR + 1) on v's, which is
    0 where SNR is. min_snr_plus_1: min(SNR, gamma) + 1 on x_0's error. That is the 'SNR + 1' weighting of Salimans & Ho
    2022 (arXiv:2202.00512, section 4; a constant 1 on v's error) with the cap of Min-SNR on timesteps of little noise:
    on v's error it is 1 where SNR <= gamma, the last timestep included, and (gamma + 1)/(SNR + 1) elsewhere. debiased:
    1/sqrt(SNR) on epsilon (Yu et al. 2023, arXiv:2310.08442), which is sqrt(SNR) on x_0's error and so
    sqrt(SNR)/(SNR + 1) on v's.
    """
    if settings["weighting"] == "debiased":
        snr = schedule.snr(t)
        return snr.rsqrt() if schedule.prediction == "epsilon" else snr.sqrt() / (snr + 1)
    if settings["weighting"] == "min_snr" and settings["gamma"]:
        return schedule.min_snr_weight(t, settings["gamma"])
    if settings["weighting"] == "min_snr_plus_1" and settings["gamma"]:
        snr = schedule.snr(t)
        return (snr.clamp(max=settings["gamma"]) + 1) / (snr if schedule.prediction == "epsilon" else snr + 1)
    return 1.0


def describe_weights(schedule: NoiseSchedule, settings: dict) -> str:
    """One line on loss_weight: its first, middle and last values, and the share of the last twentieth of timesteps;
    a warning behind it where it gives none to the last timestep."""
    t = torch.arange(schedule.steps)
    weights = torch.as_tensor(loss_weight(t, schedule, settings)).double().expand(len(t))
    at = ", ".join(f"{weights[i]:.3g} at {i}" for i in (0, len(t) // 2, len(t) - 1))
    share = weights[-len(t) // 20 :].sum() / weights.sum()
    line = f"loss weights over timesteps ({settings['weighting']}, gamma {settings['gamma']:g}): {at}; the last "
    line += f"{len(t) // 20} timesteps have {share:.2%} of all"
    if not weights[-1] > 0:
        line += (
            f"\nwarning: --weighting {settings['weighting']} gives the last timestep no weight, and sampling begins "
            "there: what to paint from pure noise will not be learned; choose min_snr_plus_1 or none"
        )
    return line


def backward(net, batch: Batch, text: torch.Tensor, schedule: NoiseSchedule, settings: dict, share: float):
    """Add the gradients of share x the mean weighted loss of one micro-batch. Returns the weighted losses [B]."""
    loss = sample_losses(net, batch, text, schedule) * loss_weight(batch.t, schedule, settings)
    (loss.mean() * share).backward()
    return loss.detach()


def in_autocast(net, device: torch.device, dtype: str):
    """net, called under bf16 autocast where dtype says so."""

    def call(*args):
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "bf16"):
            return net(*args)

    return call


@torch.no_grad()
def validate(module: Denoiser, settings: dict, batches: list[Batch], text_of, schedule: NoiseSchedule, place: Place):
    """Unweighted mean squared error of fixed Batches, whole and by timestep bin. Ranks share the work and agree."""
    device, micro, was_training = place.device, settings["batch"], module.training
    sums, net = torch.zeros(2, BINS, dtype=torch.float64), in_autocast(module, device, settings["dtype"])
    module.eval()  # no dropout, which would draw random numbers too
    parts = [(batch, i) for batch in batches for i in range(0, len(batch.t), micro)]
    for batch, i in parts[place.rank :: place.world]:
        part = batch.map(lambda x, i=i: x[i : i + micro].to(device))
        error = sample_losses(net, part, text_of(part.ids), schedule).double().cpu()  # [B]
        bins = part.t.cpu() * BINS // schedule.steps
        sums[0].index_add_(0, bins, error)
        sums[1].index_add_(0, bins, torch.ones_like(error))
    module.train(was_training)
    if place.world > 1:
        sums = sums.to(device)
        dist.all_reduce(sums)
        sums = sums.cpu()
    by_bin = [float(s / n) if n else None for s, n in sums.T]
    return {"loss": float(sums[0].sum() / sums[1].sum()), "bins": by_bin}
