"""Samplers: plain functions of one signature, by name in SAMPLERS.

    from sd.samplers import SAMPLERS
    latents = SAMPLERS["dpmpp_2m"](model, noise, schedule, 20)                            # text to picture
    latents = SAMPLERS["euler"](model, noise, schedule, 30, init=latents, strength=0.6)   # picture to picture

    sampler(model, x, schedule, steps, *, spacing, offset, randn=None, callback=None, init=None, strength=1.0)

model(x, t): the network's prediction (epsilon or v, as the schedule says), guidance included, for x of the variance-
    preserving convention, x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps; t may be fractional.
x: fp32 [B, C, h, w], standard normal noise. schedule: a NoiseSchedule. steps: 1 to schedule.steps.
spacing, offset: which timesteps (see sampling_timesteps); the defaults are the diffusers library's for that sampler.
randn(x): fresh noise like x, one generator a picture, for the samplers that need it (ddpm, euler_a, ddim with eta).
callback(i, x): called after step i, counted from 0, with x in the convention above.
init, strength: clean latents [B, C, h, w] to start from instead of pure noise, and the share of the steps to run.
Returns the clean latents [B, C, h, w].

All but ddpm and ddim work on y = x / sqrt(abar) = x_0 + sigma eps, with sigma = sqrt((1 - abar) / abar): there the
probability-flow ODE is dy/dsigma = (y - D) / sigma, D the predicted x_0 (Karras et al. 2022, arXiv:2206.00364, eq. 3).
"""

import math

import numpy as np
import torch

from SD_Model import DDIM, DDPM, NoiseSchedule, sampling_timesteps


def sigma_table(schedule: NoiseSchedule) -> np.ndarray:
    """sigma at every training timestep, rising, fp64 [T]. Where abar is 0 (zero terminal SNR) 2^-24 stands for it."""
    abar = schedule.alphas_cumprod.numpy()
    abar = np.where(abar > 0, abar, 2.0**-24)
    return np.sqrt((1 - abar) / abar)


def linspaced(steps: int, total: int) -> list[float]:
    """`steps` timesteps from total - 1 to 0, both included, fractional, falling; one step: total - 1 alone."""
    return np.linspace(total - 1, 0, steps).tolist()


def levels(schedule: NoiseSchedule, steps: int, spacing: str, offset: int) -> tuple[list[float], list[float]]:
    """Timesteps [steps] and sigmas [steps + 1], the last one 0, for Euler and Heun; linspace is not rounded."""
    total = schedule.steps
    ts = linspaced(steps, total) if spacing == "linspace" else sampling_timesteps(steps, spacing, offset, total)
    return ts, [*np.interp(ts, np.arange(total), sigma_table(schedule)).tolist(), 0.0]


def dpm_levels(schedule: NoiseSchedule, steps: int, spacing: str, offset: int, karras: bool):
    """Timesteps and sigmas for DPM-Solver++. With leading and linspace the step to t = 0 is left to the final one.

    karras: sigmas from the largest to the smallest, evenly spaced in sigma^(1/7) (Karras et al., eq. 5), and the
    fractional timesteps that belong to them.
    """
    total, table = schedule.steps, sigma_table(schedule)
    if karras:
        ramp = np.linspace(table[-1] ** (1 / 7), table[0] ** (1 / 7), steps)
        sigmas = ramp**7
        ts = np.interp(np.log(sigmas), np.log(table), np.arange(total))
    else:
        if spacing == "linspace" and steps < total:
            ts = np.round(np.linspace(0, total - 1, steps + 1))[:0:-1]
        elif spacing == "leading" and steps < total:
            ts = np.arange(steps, 0, -1) * (total // (steps + 1))
            ts = ts + min(offset, total - 1 - ts[0])
        else:  # trailing; or as many steps as there are timesteps
            ts = np.array(sampling_timesteps(steps, spacing, offset, total))
        sigmas = np.interp(ts, np.arange(total), table)
    return ts.tolist(), [*sigmas.tolist(), 0.0]


def first_step(steps: int, init: torch.Tensor | None, strength: float) -> int:
    """The step to start at: 0 without init or at strength 1, later the closer the result is to stay to init."""
    return 0 if init is None else steps - min(int(steps * strength), steps)


def start(x: torch.Tensor, sigma: float, init: torch.Tensor | None, pure: bool) -> torch.Tensor:
    """y at the first sigma: init plus noise; or noise alone, times sigma or, `pure`, times sqrt(1 + sigma^2)."""
    if init is not None:
        return init + sigma * x
    return x * (math.sqrt(1 + sigma**2) if pure else sigma)


def denoised(model, y: torch.Tensor, t: float, sigma: float, schedule: NoiseSchedule) -> torch.Tensor:
    """D(y, sigma): the clean latents that the network's prediction means."""
    abar = 1 / (1 + sigma**2)
    x = y * math.sqrt(abar)
    return schedule.x0_and_eps(model(x, t), x, abar)[0]


def watch(callback, i: int, y: torch.Tensor, sigma: float):
    if callback:
        callback(i, y / math.sqrt(1 + sigma**2))


def euler(model, x, schedule, steps, *, spacing="linspace", offset=0, randn=None, callback=None, init=None,
          strength=1.0):  # fmt: skip
    """Euler steps of the probability-flow ODE (Karras et al., algorithm 1 without its correction). Order 1."""
    ts, sigmas = levels(schedule, steps, spacing, offset)
    first = first_step(steps, init, strength)
    y = start(x, sigmas[first], init, spacing == "leading")
    for i in range(first, steps):
        slope = (y - denoised(model, y, ts[i], sigmas[i], schedule)) / sigmas[i]
        y = y + (sigmas[i + 1] - sigmas[i]) * slope
        watch(callback, i, y, sigmas[i + 1])
    return y


def euler_a(model, x, schedule, steps, *, spacing="linspace", offset=0, randn=torch.randn_like, callback=None,
            init=None, strength=1.0):  # fmt: skip
    """Ancestral: an Euler step to below the next sigma, then noise up to it, with DDPM's variance (Song et al. 2021,
    arXiv:2011.13456, eq. 46): up^2 = next^2 (now^2 - next^2) / now^2, down^2 = next^2 - up^2."""
    ts, sigmas = levels(schedule, steps, spacing, offset)
    first = first_step(steps, init, strength)
    y = start(x, sigmas[first], init, spacing == "leading")
    for i in range(first, steps):
        now, after = sigmas[i], sigmas[i + 1]
        up = after * math.sqrt((now**2 - after**2) / now**2)
        down = math.sqrt(after**2 - up**2)
        y = y + (down - now) * (y - denoised(model, y, ts[i], now, schedule)) / now
        if up > 0:
            y = y + up * randn(y)
        watch(callback, i, y, after)
    return y


def heun(model, x, schedule, steps, *, spacing="linspace", offset=0, randn=None, callback=None, init=None,
         strength=1.0):  # fmt: skip
    """Heun's method (Karras et al., algorithm 1): the mean of the slopes at both ends. Order 2, two predictions a step,
    one in the last."""
    ts, sigmas = levels(schedule, steps, spacing, offset)
    first = first_step(steps, init, strength)
    y = start(x, sigmas[first], init, spacing == "leading")
    for i in range(first, steps):
        now, after = sigmas[i], sigmas[i + 1]
        slope = (y - denoised(model, y, ts[i], now, schedule)) / now
        ahead = y + (after - now) * slope
        if after > 0:
            slope = (slope + (ahead - denoised(model, ahead, ts[i + 1], after, schedule)) / after) / 2
            ahead = y + (after - now) * slope
        y = ahead
        watch(callback, i, y, after)
    return y


def dpmpp_2m(model, x, schedule, steps, *, spacing="linspace", offset=0, randn=None, callback=None, init=None,
             strength=1.0, karras=False):  # fmt: skip
    """DPM-Solver++(2M) (Lu et al. 2022, arXiv:2211.01095, algorithm 2). Order 2, one prediction a step.

    With h = log(sigma_now / sigma_next): y_next = e^-h y + (1 - e^-h) M, where M = D + (D - D_before) h / (2 h_before)
    extrapolates the last two predictions to the middle of the step. The first and the last step are of order 1.
    """
    ts, sigmas = dpm_levels(schedule, steps, spacing, offset, karras)
    first = first_step(steps, init, strength)
    y = start(x, sigmas[first], init, True)
    before = h_before = None
    for i in range(first, steps):
        d = middle = denoised(model, y, ts[i], sigmas[i], schedule)
        ratio = sigmas[i + 1] / sigmas[i]  # e^-h
        h = -math.log(ratio) if ratio > 0 else math.inf
        if before is not None and ratio > 0:
            middle = d + (d - before) * (h / (2 * h_before))
        y = ratio * y + (1 - ratio) * middle
        before, h_before = d, h
        watch(callback, i, y, sigmas[i + 1])
    return y


def dpmpp_2m_karras(model, x, schedule, steps, **options):
    """dpmpp_2m on Karras sigmas, which put more of the steps at low noise; they have no use for spacing and offset."""
    return dpmpp_2m(model, x, schedule, steps, karras=True, **options)


def original_timesteps(steps: int, total: int = 1000, clip: bool = True) -> list[int]:
    """1 and every (total // steps)-th timestep after it, falling: the list of the original latent-diffusion code's
    DDIM, which has more than `steps` entries where they do not divide total (7 for 6, 31 for 30).

    Where the last would be total itself the original fails; A1111 puts it to total - 1 (clip), ComfyUI leaves it out.
    """
    if not 1 <= steps <= total:
        raise ValueError(f"sampling wants 1 to {total} steps, found {steps}")
    ts = [t + 1 for t in range(0, total, total // steps)]
    return [min(t, total - 1) for t in reversed(ts) if clip or t < total]


def along(sampler, ts: list[int], model, x, steps, noisy: bool, randn, callback, init, strength):
    """The steps of a DDPM or DDIM of SD_Model.py over timesteps ts, from noise or, with init, from the middle."""
    first = 0 if init is None else len(ts) - min(int(steps * strength), len(ts))
    if init is not None and first < len(ts):
        abar = float(sampler.schedule.alphas_cumprod[ts[first]])
        x = math.sqrt(abar) * init + math.sqrt(1 - abar) * x
    for i in range(first, len(ts)):
        t_prev = ts[i + 1] if i + 1 < len(ts) else None
        pred = model(x, ts[i])
        x = sampler.step(x, pred, ts[i], t_prev, randn(x) if noisy and t_prev is not None else None)
        if callback:
            callback(i, x)
    return x


def ddpm(model, x, schedule, steps, *, spacing="leading", offset=0, randn=torch.randn_like, callback=None, init=None,
         strength=1.0):  # fmt: skip
    """SD_Model.DDPM: ancestral sampling over the list of timesteps (Ho et al. 2020, algorithm 2)."""
    sampler = DDPM(schedule, spacing, offset)
    return along(sampler, sampler.timesteps(steps), model, x, steps, True, randn, callback, init, strength)


def ddim(model, x, schedule, steps, *, spacing="leading", offset=1, randn=torch.randn_like, callback=None, init=None,
         strength=1.0, set_alpha_to_one=False, timesteps="diffusers"):  # fmt: skip
    """SD_Model.DDIM, eta 0 (Song et al. 2021, eq. 12); set_alpha_to_one: the last step goes to abar = 1. Order 1.

    timesteps: 'diffusers' has exactly `steps` of them, by spacing and offset; 'a1111' and 'comfyui' have
    original_timesteps, from which A1111 ends at abar_0, as the original code does, and ComfyUI at abar = 1. ComfyUI
    also begins with noise of the first timestep's scale, not of scale 1, unless that is the noisiest.
    """
    sampler = DDIM(schedule, spacing, offset, set_alpha_to_one if timesteps == "diffusers" else timesteps == "comfyui")
    ts = sampler.timesteps(steps)
    if timesteps != "diffusers":
        ts = original_timesteps(steps, schedule.steps, clip=timesteps == "a1111")
        if timesteps == "comfyui" and init is None and ts[0] < schedule.steps - 1:
            x = math.sqrt(1 - float(schedule.alphas_cumprod[ts[0]])) * x
    return along(sampler, ts, model, x, steps, False, randn, callback, init, strength)


SAMPLERS = {
    "ddpm": ddpm,
    "ddim": ddim,
    "dpmpp_2m": dpmpp_2m,
    "dpmpp_2m_karras": dpmpp_2m_karras,
    "euler": euler,
    "euler_a": euler_a,
    "heun": heun,
}
