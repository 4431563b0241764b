"""Rules on the course of a run: learning rate, gradients, losses, averages, from its logs and settings."""

import math

import numpy as np

from sd.diagnosis.case import Case
from sd.diagnosis.findings import BROKEN, LOOK, NOT_JUDGED, WELL, Finding, graded
from sd.diagnosis.statistics import alternation, debiased, slope


def check_course(case: Case) -> list[Finding]:
    if case.run is None or not case.log:
        return [Finding("loss", "log", NOT_JUDGED, "there is no run's log here")]
    found = [warm_up(case), update_size(case), skipped(case), clipping(case), dropout(case), learned(case),
             diverged(case), oscillation(case), still_falling(case), overtrained(case), ema_moves(case), ema_lag(case),
             ema_setting(case)]  # fmt: skip
    return [f for f in found if f is not None]


def curve(case: Case, split: str, weights: str) -> tuple[list[int], np.ndarray]:
    """Steps and losses of validation.jsonl: the loss on fixed pictures, noise and timesteps."""
    rows = [r for r in case.validation if (r.get("split"), r.get("weights")) == (split, weights)]
    return [r["step"] for r in rows], np.array([math.nan if r["loss"] is None else r["loss"] for r in rows], float)


def stable(case: Case, weights: str) -> tuple[list[int], np.ndarray]:
    """The held-out loss, or without held-out pictures that of training ones."""
    steps, losses = curve(case, "val", weights)
    return (steps, losses) if len(losses) else curve(case, "train", weights)


# Learning rate
def warm_up(case: Case) -> Finding:
    total, warm = case.planned, case.settings.get("warmup", 0)
    if not total:
        return Finding("learning rate", "warm-up", NOT_JUDGED, "the run's length is not known")
    return graded("learning rate", "warm-up", warm / total, 0.5, 0.99, f"{warm:,} steps of {total:,}",
                  "shorten --warmup: the peak is never reached, or hardly used")  # fmt: skip


def update_size(case: Case) -> Finding:
    """How far a step moves the weights, as a share of them: the largest line of health.jsonl, all blocks together."""
    ratios = []
    for row in case.health:
        if isinstance(row.get("update"), dict) and row["step"] >= 3:
            sizes = {k: v for k, v in row["weight_norm"].items() if v}
            moved = sum((row["update"].get(k) or 0) ** 2 * v**2 for k, v in sizes.items())
            ratios.append((moved / sum(v**2 for v in sizes.values())) ** 0.5)
    if not ratios:
        return Finding("learning rate", "size of updates", NOT_JUDGED, "health.jsonl has no such line")
    largest = max(ratios)
    words = f"the largest step moves the weights by {largest:.2g} of their norm"
    if largest < 3e-6:
        return graded("learning rate", "size of updates", largest, 3e-6, 3e-7, words, "raise --lr: at this rate the "
                      "weights stay where they are", above=False)  # fmt: skip
    return graded("learning rate", "size of updates", largest, 0.03, 0.1, words,
                  "lower --lr: a healthy step moves them by a thousandth or a few")  # fmt: skip


# Gradients
def skipped(case: Case) -> Finding:
    count, last = sum(r.get("skipped", 0) for r in case.log), case.log[-1]["step"]
    notes = [r for r in case.health if r.get("skipped_step")]
    count, why = max(count, len(notes)), ""
    keys = sorted({k for r in notes for k in r.get("latents_not_finite", [])})
    layers = sorted({r["first_not_finite"] for r in notes if r.get("first_not_finite")})
    if keys:
        why = f"; latents that are not finite: {', '.join(keys[:5])}"
    elif layers:
        why = f"; the first numbers that are not finite come out of {', '.join(layers[:3])}"
    elif notes:
        why = f"; the first was step {notes[0]['step']:,}, with {', '.join(notes[0].get('keys', [])[:3])} ..."
    share = count / max(last, 1, notes[-1]["step"] if notes else 0)
    return graded("gradients", "skipped steps", share, 0, 0.05, f"{count:,} of {last:,} steps were skipped, their "
                  f"gradients not being finite{why}", "look at these pictures' latents; if they are fine, lower "
                  "--lr, or "
                  "train in bf16 or fp32", keys=keys[:20])  # fmt: skip


def clipping(case: Case) -> Finding | None:
    limit = case.settings.get("clip")
    norms = [r["grad_norm"] for r in case.log[len(case.log) // 4 :] if r.get("grad_norm") is not None]
    if not limit or len(norms) < 4:
        return None
    share = float(np.mean([n > limit for n in norms]))
    return graded("gradients", "clipping", share, 0.9, 1.1, f"{share:.0%} of {len(norms)} lines behind the first "
                  f"quarter "
                  f"have a mean norm above --clip {limit:g} (median {np.median(norms):.3g})", "raise --clip above the "
                  "usual norm, so that it stops spikes alone, or use --adaptive_clip 3")  # fmt: skip


# Conditioning
def dropout(case: Case) -> Finding | None:
    drop = case.settings.get("drop")
    if drop is None:
        return None
    words = f"{drop:.0%} of the captions are replaced by the empty one"
    if drop >= 0.9:
        return Finding(
            "conditioning", "caption dropout", BROKEN, words, "set --drop to 0.05 to 0.15: no caption is seen"
        )
    if drop > 0.5 or drop < 0.01:
        return Finding("conditioning", "caption dropout", LOOK, words, "set --drop to 0.05 to 0.15: guidance "
                       "compares with "
                       "the empty caption, which must be learned, and captions too")  # fmt: skip
    return Finding("conditioning", "caption dropout", WELL, words)


# Losses
def learned(case: Case) -> Finding:
    """Against the loss of a network that always says 0, which is 1 where noise of variance 1 is to be predicted."""
    steps, losses = stable(case, "live")
    if not len(losses) or not steps[-1] >= 100:
        return Finding("loss", "learned", NOT_JUDGED, "there is no validation behind step 100")
    last = float(losses[-1])
    return graded("loss", "learned", last, 0.7, 0.95, f"the loss at step {steps[-1]:,} is {last:.3g}; always saying 0 "
                  "gives about 1", "look at the verdicts on data, schedule and learning rate first; a run that is "
                  "short may only need more steps")  # fmt: skip


def diverged(case: Case) -> Finding:
    steps, losses = stable(case, "live")
    if len(losses) < 3:
        return Finding("loss", "diverged", NOT_JUDGED, "there are fewer than three validations")
    best = float(np.nanmin(losses)) if np.isfinite(losses).any() else math.nan
    ratio = float(losses[-1]) / best
    if curve(case, "train", "live")[1][-1:].size and overtrained_at(case) is not None:
        return Finding("loss", "diverged", NOT_JUDGED, "the held-out loss rises, that of training pictures does not: "
                       "overtrained")  # fmt: skip
    return graded("loss", "diverged", ratio, 1.15, 1.5, f"the last held-out loss is {ratio:.3f} of the lowest",
                  "lower --lr, and go on from the checkpoint of the lowest loss")  # fmt: skip


def training_curve(case: Case) -> np.ndarray:
    """debiased losses behind the first third of the log."""
    values = debiased(case.log)
    values = values[len(values) // 3 :]
    return values[np.isfinite(values)]


def oscillation(case: Case) -> Finding:
    values = training_curve(case)
    if len(values) < 20:
        return Finding("loss", "oscillation", NOT_JUDGED, f"{len(values)} lines of log are fewer than 20")
    z = alternation(values)
    return graded("loss", "oscillation", z, 4, 1e9, f"{z:.1f} standard errors below the autocorrelation of independent "
                  "noise (above 4, the loss swings to and fro; by chance once in 30,000 runs)", "lower --lr or "
                  "--beta1")  # fmt: skip


def still_falling(case: Case) -> Finding | None:
    values = training_curve(case)
    if len(values) < 20:
        return None
    half = values[len(values) // 2 :]
    b, error = slope(half)
    lines = f"{b:+.2g} a line of log, standard error {error:.2g}, over the last {len(half)} lines"
    words = "still falling" if b < -3 * error else "rising" if b > 3 * error else "level within its errors"
    return Finding("loss", "trend", WELL, f"{words}: {lines}", "", {"slope": b, "error": error})


def overtrained_at(case: Case) -> int | None:
    """The step of the lowest held-out loss, if it rises from there while that of training pictures falls on."""
    steps, held = curve(case, "val", "ema")
    _, seen = curve(case, "train", "ema")
    if len(held) < 4 or len(seen) != len(held) or not np.isfinite(held).all():
        return None
    at = int(held.argmin())
    rises = len(held) - at > 2 and held[-1] > 1.03 * held[at] and bool((held[at + 1 :] > held[at]).all())
    gap = (held[-1] - seen[-1]) - (held[at] - seen[at])
    return steps[at] if rises and gap > 0.05 * held[at] else None


def overtrained(case: Case) -> Finding:
    steps, held = curve(case, "val", "ema")
    _, seen = curve(case, "train", "ema")
    if len(held) < 4 or len(seen) != len(held):
        return Finding(
            "loss", "overtraining", NOT_JUDGED, "fewer than four validations on held-out and training pictures"
        )
    gap, at = float((held[-1] - seen[-1]) / held[-1]), overtrained_at(case)
    words = f"at step {steps[-1]:,} the held-out loss is {held[-1]:.4f}, that of training pictures {seen[-1]:.4f}"
    if at is not None:
        least = float(held.min())
        return Finding("loss", "overtraining", BROKEN if held[-1] > 1.2 * least else LOOK, f"the held-out loss was "
                       f"lowest "
                       f"at step {at:,}, {least:.4f}, and rises since; {words}", f"take the checkpoint of step "
                       f"{at:,} or "
                       "one near it; train with more pictures, or shorter", {"step": at})  # fmt: skip
    return graded("loss", "overtraining", gap, 0.15, 0.5, f"{words}: a gap of {gap:.1%}",
                  "pictures are being learned by heart: more pictures, or fewer steps")  # fmt: skip


# Averages
def ema_moves(case: Case) -> Finding | None:
    _, live = stable(case, "live")
    _, ema = stable(case, "ema")
    if len(live) < 2 or len(live) != len(ema) or not live[0] - live[-1] > 0.02 * live[0]:
        return None
    share = float((ema[0] - ema[-1]) / (live[0] - live[-1]))
    if ema[-1] <= 1.1 * live[-1]:
        share = max(share, 1.0)
    return graded("learning rate", "EMA moves", share, 0.3, 0.05, f"since the first validation its loss fell "
                  f"{share:.2f} "
                  "times as far as that of the live weights, or as low", "the averages do not follow: lower --ema, and "
                  "see that they are updated", above=False)  # fmt: skip


def ema_lag(case: Case) -> Finding | None:
    steps, live = stable(case, "live")
    _, ema = stable(case, "ema")
    if not len(live) or len(live) != len(ema):
        return None
    ratio = float(ema[-1] / live[-1])
    return graded("learning rate", "EMA lag", ratio, 1.1, 1.5, f"at step {steps[-1]:,} the averages' loss is "
                  f"{ratio:.3f} "
                  "of the live weights'", "--ema is too slow for so short a run, or the run is to go on; paint with "
                  "--weights live meanwhile")  # fmt: skip


def ema_setting(case: Case) -> Finding | None:
    decay = case.settings.get("ema")
    if decay is None or not case.steps:
        return None
    reach = 1 / max(1 - min(decay, (1 + case.steps) / (10 + case.steps)), 1e-9)
    words = f"--ema {decay:g} averages over {reach:,.0f} of {case.steps:,} steps"
    if decay >= 1:
        return Finding("learning rate", "EMA setting", LOOK, words, "1 never forgets: take 0.99 for runs of "
                       "thousands of "
                       "steps, 0.9999 for a million")  # fmt: skip
    return Finding("learning rate", "EMA setting", WELL, words)
