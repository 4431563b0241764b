"""Rules on what a model paints: burnt, unfinished, alike, or learned by heart. Judged on latents, beside real ones."""

import numpy as np
import torch

from sd.diagnosis.case import Case
from sd.diagnosis.findings import NOT_JUDGED, WELL, Finding, graded
from sd.diagnosis.statistics import coverage, nearest
from sd.errors import InputError, short
from sd.painting import encode_pairs, fast, make_sampler, sample_latents

PAINTED, FEWER = 16, 4

PROMPTS = ("a photo of a dog", "a red car in a street", "a bowl of fruit", "a portrait of a woman", "a house by the "
           "sea",
           "a mountain at night", "a cat on a chair", "a city in the rain")  # fmt: skip

NOISY = ("ddpm", "euler_a")  # samplers that draw noise on their way: two numbers of steps do not paint one picture


def check_painting(case: Case, sampler: str, steps: int, cfg: float) -> list[Finding]:
    if case.model is None:
        return []
    if case.text_encoder is None:
        return [Finding("sampling", "painting", NOT_JUDGED, case.missing["text encoder"])]
    try:
        return paint(case, sampler, steps, cfg)
    except (InputError, ValueError) as e:
        return [Finding("sampling", "painting", NOT_JUDGED, short(e))]


def paint(case: Case, sampler: str, steps: int, cfg: float) -> list[Finding]:
    model, encoder = case.model, case.text_encoder.to(case.device)
    unet = fast(model.unet(), case.device, torch.float32)
    held = case.latents(1, 512) or case.latents(0, 512)
    seen = case.latents(0)
    if held is None:
        prompts, shape = list(PROMPTS), (model.unet_config.in_channels, model.size // 8, model.size // 8)
    else:
        split = case.splits[1 if case.latents(1, 1) is not None else 0]
        prompts, shape = split.captions.take(held[0][:PAINTED].tolist()).to_pylist(), held[1].shape[1:]

    def painted(texts: list[str], count: int, guidance: float = cfg) -> np.ndarray:
        contexts, nulls = encode_pairs(encoder, texts, [""] * len(texts))
        made = sample_latents(
            unet, contexts, nulls, list(range(len(texts))), shape, steps=count, cfg=guidance, batch=16,
            sampler=make_sampler(sampler, model.schedule, model.sampling), device=case.device,
        )  # fmt: skip
        return made.numpy()

    made = painted(prompts, steps)
    if not np.isfinite(made).all():
        bad = float(np.mean(~np.isfinite(made).all(axis=(1, 2, 3))))
        return [graded("sampling", "painted latents", bad, 0, 0, f"{bad:.0%} of {len(made)} pictures are not finite",
                       "see the verdicts on the network's weights and layers")]  # fmt: skip
    real = held[1] if held is not None else None
    found = [burnt(made, real, cfg)]
    if sampler not in NOISY:
        few = prompts[:FEWER]
        found.append(enough_steps(made[: len(few)], painted(few, min(4 * steps, 1000)), sampler, steps))
    if real is not None and len(real) >= 16:
        found.append(diversity(made, real[: len(made)], real))
        known = case.splits[0].captions.take(seen[0][:PAINTED].tolist()).to_pylist()
        # Guidance moves pictures off those that were learned; what was learned by heart shows without it.
        found.append(
            memorised(painted(known, steps, 1.0), seen[1], held[1] if case.latents(1, 1) is not None else None)
        )
    return [f for f in found if f is not None]


def burnt(made: np.ndarray, real: np.ndarray | None, cfg: float) -> Finding:
    """The spread of painted latents against that of real ones (1, where there are none)."""
    ratio = float(made.std() / (1.0 if real is None else real.std()))
    words = f"painted latents spread {ratio:.2f} times as far as real ones at --cfg {cfg:g}"
    if ratio < 1:
        return graded("sampling", "contrast", ratio, 0.6, 0.3, words, "pictures are pale: train longer, raise --cfg, "
                      "and "
                      "see the verdicts on schedule and prediction", above=False)  # fmt: skip
    return graded("sampling", "contrast", ratio, 1.4, 2, words, "colours burn: lower --cfg, or give --cfg_rescale "
                  "0.7; see "
                  "the verdicts on schedule and prediction")  # fmt: skip


def enough_steps(made: np.ndarray, better: np.ndarray, sampler: str, steps: int) -> Finding:
    off = float(((made - better) ** 2).mean() / better.var())
    return graded("sampling", "steps", off, 0.15, 0.5, f"{steps} steps of {sampler} paint pictures that are off by "
                  f"{off:.1%} of their variance from those of four times as many", "take more --steps, or a sampler "
                  "that "
                  "needs fewer, such as dpmpp_2m")  # fmt: skip


def flat(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1).astype(np.float64)


def spread(x: np.ndarray) -> float:
    """Root mean square distance of pictures from their mean."""
    return float(np.sqrt(((x - x.mean(axis=0)) ** 2).mean()))


def diversity(made: np.ndarray, real: np.ndarray, reference: np.ndarray) -> Finding:
    """Pictures of as many captions, painted and real."""
    ratio = spread(flat(made)) / max(spread(flat(real)), 1e-6)
    share = coverage(flat(real), flat(made)) if len(real) > 6 else float("nan")
    return graded("diversity", "pictures differ", ratio, 0.5, 0.3, f"pictures of {len(made)} captions differ "
                  f"{ratio:.2f} "
                  f"times as much as real ones do; they reach {share:.0%} of the real ones' neighbourhoods (k = 5)",
                  "the network paints one picture for all: see the verdicts on data and conditioning", above=False,
                  coverage=share)  # fmt: skip


def memorised(made: np.ndarray, train: np.ndarray, held: np.ndarray | None) -> Finding:
    """How near painted pictures of training captions are to training pictures, beside held-out ones."""
    if held is None or len(held) < 16:
        return Finding("diversity", "learned by heart", NOT_JUDGED, "there are no held-out pictures to compare with")
    finite = train[np.isfinite(train).all(axis=(1, 2, 3))]
    near = float(np.median(nearest(flat(made), flat(finite))))
    usual = float(np.median(nearest(flat(held), flat(finite))))
    if usual == 0:
        return Finding("diversity", "learned by heart", NOT_JUDGED, "held-out pictures are training pictures")
    ratio = near / usual
    finding = graded("diversity", "learned by heart", ratio, 0.7, 0.4, f"painted pictures lie {ratio:.2f} times as "
                     f"far from "
                     "the nearest training picture as held-out ones do (medians)", "pictures are copied: more "
                     "pictures, "
                     "fewer steps, no duplicates", above=False)  # fmt: skip
    return finding if finding.verdict != WELL else finding._replace(advice="")
