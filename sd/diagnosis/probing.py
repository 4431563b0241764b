"""Rules that run the network once over noisy latents: what it predicts, of which schedule, and what text does to it."""

import math

import numpy as np
import torch

from sd.data import Batch
from sd.diagnosis.case import Case
from sd.diagnosis.findings import BROKEN, LOOK, NOT_JUDGED, WELL, Finding, graded
from sd.diagnosis.statistics import standard_errors
from sd.health import probed
from sd.objective import Denoiser
from SD_Model import NoiseSchedule

PICTURES, BATCH = 256, 32

BETAS = (("scaled_linear", 0.00085, 0.012), ("linear", 0.00085, 0.012), ("linear", 0.0001, 0.02),
         ("squaredcos_cap_v2", 0.00085, 0.012))  # fmt: skip


def check_network(case: Case) -> list[Finding]:
    if case.live is None:
        return []
    unet = case.live.unet(case.device)
    data = case.latents(1, PICTURES) or case.latents(0, PICTURES)
    if data is not None:
        finite = np.isfinite(data[1]).all(axis=(1, 2, 3))
        data = data[0][finite], data[1][finite]
    if data is None or case.text_encoder is None or len(data[0]) < 8:
        why = case.missing.get("data") or case.missing.get("text encoder") or "there are too few pictures"
        context = torch.zeros(1, 77, case.live.unet_config.context_dim)
        return [prediction_of_noise(case, unet, context), Finding("conditioning", "text", NOT_JUDGED, why)]
    trial = Trial(case, unet, *data, 1 if case.latents(1, 1) is not None else 0)
    found = [layers(case, trial), prediction(trial), betas(trial), *text(case, trial)]
    return [f for f in found if f is not None]


class Trial:
    """Pictures with fixed noise and stratified timesteps, and what the live network predicts of them."""

    def __init__(self, case: Case, unet, index: np.ndarray, latents: np.ndarray, split: int):
        self.unet, self.schedule, self.device = unet, case.live.schedule, case.device
        self.latents, n = torch.from_numpy(latents.copy()), len(latents)
        self.noise = torch.randn(self.latents.shape, generator=torch.Generator().manual_seed(0))
        order = torch.randperm(n, generator=torch.Generator().manual_seed(1))
        self.t = (((order + 0.5) / n) * self.schedule.steps).long()
        self.ids = torch.from_numpy(case.splits[split].token_ids(index))
        encoder = case.text_encoder.to(case.device)
        self.context = torch.cat([encoder(x.to(case.device)).cpu() for x in self.ids.split(BATCH)])  # [N, L, D]
        self.empty = encoder(encoder.tokenize([""]).to(case.device)).cpu()[:, : self.ids.shape[1]]  # [1, L, D]

    @torch.no_grad()
    def predicted(self, context: torch.Tensor, schedule: NoiseSchedule | None = None) -> torch.Tensor:
        """[N, z, h, w]; schedule: by which noise is added, where it is not the model's."""
        noisy = (schedule or self.schedule).add_noise(self.latents, self.noise, self.t)
        context, d = context.expand(len(noisy), -1, -1), self.device
        parts = zip(noisy.split(BATCH), self.t.split(BATCH), context.split(BATCH))
        return torch.cat([self.unet(x.to(d), t.to(d), c.to(d)).float().cpu() for x, t, c in parts])

    def losses(self, context: torch.Tensor) -> torch.Tensor:
        """fp32 [N], unweighted."""
        target = self.schedule.target(self.latents, self.noise, self.t)
        return (self.predicted(context) - target).square().mean(dim=(1, 2, 3))


def layers(case: Case, trial: Trial) -> Finding:
    """The first block behind which numbers are not finite."""
    batch = Batch(*(x[:4].to(case.device) for x in (trial.latents, trial.noise, trial.t, trial.ids)))
    seen = probed(Denoiser(trial.unet, None), batch, trial.context[:4].to(case.device), trial.schedule, "fp32")
    largest = {name: float(x) for (what, name), x in seen.items() if what == "activation_max"}
    bad = [name for name, x in largest.items() if not math.isfinite(x)]
    if bad:
        return Finding("network", "layers finite", BROKEN, f"in fp32, numbers are not finite from {bad[0]} on",
                       "look at that block's weights; go on from an older checkpoint", {"block": bad[0]})  # fmt: skip
    name = max(largest, key=largest.get)
    return graded("network", "layers finite", largest[name], 1e4, 6e4, f"the largest activation is "
                  f"{largest[name]:.3g}, "
                  f"behind {name}", "fp16 ends at 65,504: train and paint in bf16 or fp32")  # fmt: skip


NAMES = {"epsilon": "the noise", "v": "v"}


def prediction(trial: Trial) -> Finding:
    """Which target its output is nearer to."""
    out, told, errors = trial.predicted(trial.context), trial.schedule.prediction, {}
    for kind in ("epsilon", "v"):
        schedule = NoiseSchedule(**(trial.schedule.config | {"prediction": kind, "zero_terminal_snr": False}))
        if trial.schedule.config["zero_terminal_snr"]:
            schedule.alphas_cumprod = trial.schedule.alphas_cumprod
        target = schedule.target(trial.latents, trial.noise, trial.t)
        errors[kind] = float((out - target).square().mean() / target.square().mean())
    other = "v" if told == "epsilon" else "epsilon"
    words = (
        f"it is said to predict {NAMES[told]}; off by {errors[told]:.1%} of that, by {errors[other]:.1%} of "
        + (NAMES[other])
    )
    if min(errors.values()) > 0.8:
        return Finding("schedule", "prediction", NOT_JUDGED, f"it predicts nothing yet: {words}")
    if errors[other] < 0.7 * errors[told]:
        return Finding("schedule", "prediction", BROKEN, words, f"sample with --prediction {other}, and write that "
                       f"into "
                       "the model's description", errors)  # fmt: skip
    return Finding("schedule", "prediction", WELL, words, "", errors)


@torch.no_grad()
def prediction_of_noise(case: Case, unet, context: torch.Tensor) -> Finding:
    """Without data: at the last timestep, the noise is what comes in, and v has little of it."""
    schedule, config = case.live.schedule, case.live.unet_config
    side = max(8, case.live.size // 8)
    x = torch.randn(2, config.in_channels, side, side, generator=torch.Generator().manual_seed(0)).to(case.device)
    t = torch.full((2,), schedule.steps - 1, device=case.device)
    out = unet(x, t, context.expand(2, -1, -1).to(case.device)).float()
    if not out.isfinite().all():
        return Finding("network", "layers finite", BROKEN, "pure noise gives numbers that are not finite",
                       "look at the weights; go on from an older checkpoint")  # fmt: skip
    slope, told = float((out * x).mean() / x.square().mean()), schedule.prediction
    words = f"at the last timestep {slope:.0%} of what comes in comes out; it is said to predict {NAMES[told]}"
    if float(out.std()) < 0.1:
        return Finding("schedule", "prediction", NOT_JUDGED, "it predicts nothing yet")
    found = "epsilon" if slope > 0.7 else "v" if slope < 0.4 else None
    if found not in (told, None):
        return Finding("schedule", "prediction", BROKEN, words, f"sample with --prediction {found}")
    return Finding("schedule", "prediction", WELL, words)


def calibration(trial: Trial, schedule: NoiseSchedule, bins: int = 8) -> float:
    """How far a network is from a conditional mean: of it the regression of what is wanted on what is predicted has
    slope 1 at every level of noise. The mean distance from 1 over bins of timesteps."""
    out, off = trial.predicted(trial.context, schedule), []
    target = schedule.target(trial.latents, trial.noise, trial.t)
    for b in range(bins):
        own = trial.t * bins // schedule.steps == b
        if own.any() and float(out[own].square().mean()) > 1e-4:
            off.append(abs(float((out[own] * target[own]).mean() / out[own].square().mean()) - 1))
    return float(np.mean(off)) if off else math.nan


def betas(trial: Trial) -> Finding:
    """Under which schedule the network is best calibrated."""
    told = trial.schedule.config
    if told["zero_terminal_snr"]:
        return Finding("schedule", "betas", NOT_JUDGED, "there are no others to compare a zero-SNR schedule with")
    own, others = calibration(trial, trial.schedule), {}
    for name, start, end in BETAS:
        values = told | {"betas": name, "beta_start": start, "beta_end": end}
        schedule = NoiseSchedule(**values)
        if not torch.allclose(schedule.alphas_cumprod, trial.schedule.alphas_cumprod, atol=1e-4):
            others[f"{name} {start:g} to {end:g}"] = calibration(trial, schedule)
    best = min(others, key=others.get)
    words = f"off its calibration by {own:.3f} under its own schedule, by {others[best]:.3f} under {best}"
    if not math.isfinite(own):
        return Finding("schedule", "betas", NOT_JUDGED, "it predicts nothing yet")
    if own > 0.03 and others[best] < 0.6 * own:
        return Finding("schedule", "betas", BROKEN if others[best] < 0.4 * own else LOOK, words, "the model was "
                       "trained "
                       f"with another noise schedule than its description says: try {best}", others)  # fmt: skip
    return Finding("schedule", "betas", WELL, words, "", others)


def text(case: Case, trial: Trial) -> list[Finding]:
    """The same pictures, noise and timesteps (of the noisier 70 %) under other contexts: differences of the loss's
    logarithm, picture by picture, with their standard error."""
    n = len(trial.context)
    trial.t = (trial.schedule.steps * (0.3 + 0.7 * (trial.t + 0.5) / trial.schedule.steps)).long()  # where text tells
    right, empty = trial.losses(trial.context).log(), trial.losses(trial.empty).log()
    wrong = torch.stack([trial.losses(trial.context.roll(k, 0)).log() for k in (1, n // 3, n // 2)]).mean(dim=0)
    zeros = trial.losses(torch.zeros_like(trial.empty)).log()
    z = standard_errors((wrong - right).tolist())
    gain = float((wrong - right).mean())
    found = [
        graded("conditioning", "text", z, 3, 2, f"another picture's caption raises the loss by {gain:.2%}, {z:.1f} "
               f"standard errors ({n} pictures)", "the network does not listen: see that captions stand beside their "
               "own pictures, that --drop is small, that the text encoder's output differs from text to text, and "
               "train "
               "longer", above=False, gain=gain),
    ]  # fmt: skip
    better = standard_errors((empty - zeros).tolist())
    share = float((empty - zeros).mean())
    words = f"zeros in place of the empty caption change the loss by {-share:+.2%}, {-better:+.1f} standard errors"
    if better > 4 and share > 0.002:
        found.append(Finding("conditioning", "null condition", BROKEN if share > 0.02 else LOOK, words, "zeros seem to "
                             "have been the null condition in training, and guidance takes the empty caption's "
                             "encoding: train with that"))  # fmt: skip
    else:
        found.append(Finding("conditioning", "null condition", WELL, words))
    return found
