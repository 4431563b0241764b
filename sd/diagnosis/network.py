"""Rules on a model as it lies on disk: its noise schedule, its weights, its checkpoint."""

import math

import torch

from sd.diagnosis.case import Case, schedule_files
from sd.diagnosis.findings import BROKEN, NOT_JUDGED, WELL, Finding, graded
from SD_Model import UNet

LARGE = 200e6  # numbers; a larger network is not drawn anew to see what training changed, but with --deep


def check_model(case: Case, deep: bool) -> list[Finding]:
    found = checkpoint(case)
    if case.model is None:
        return [*found, Finding("network", "model", NOT_JUDGED, case.missing["model"])]
    found += schedule(case)
    live = dict(case.live.tensors())
    found.append(weights_finite(live, dict(case.model.tensors())))
    if not case.run or case.steps >= 10:  # behind zero-initialised outputs there is no gradient in the first steps
        found.append(dead(live))
    found += [untrained(case, live, deep), *from_health(case)]
    return [f for f in found if f is not None]


def checkpoint(case: Case) -> list[Finding]:
    if case.damaged:
        words = "; ".join(f"{name}: {why}" for name, why in list(case.damaged.items())[:3])
        return [Finding("checkpoint", "whole", BROKEN, words, "go on from a whole one: --resume takes the newest")]
    if case.checkpoint is None:
        return []
    return [Finding("checkpoint", "whole", WELL, f"{case.checkpoint.name} is as its manifest says")]


def schedule(case: Case) -> list[Finding]:
    """Where it ends counts, and that it falls; not how large a single beta is."""
    abar = case.model.schedule.alphas_cumprod
    end, start = float(abar[-1]), float(abar[0])
    found = [
        graded("schedule", "end", end, 0.03, 0.1, f"at the last of {len(abar)} timesteps {end:.2g} of the picture's "
               "variance is left (SD 1.x: 0.0047)", "sampling begins with pure noise, which such a network never saw: "
               "train with --betas scaled_linear, or with --zero_terminal_snr"),
        graded("schedule", "beginning", start, 0.98, 0.9, f"at the first timestep {start:.4f} of the picture's "
               f"variance "
               "is left (SD 1.x: 0.9992)", "fine detail is never learned: take smaller betas", above=False),
    ]  # fmt: skip
    if not bool((abar.diff() < 0).all()):
        found.append(Finding("schedule", "falls", BROKEN, "the signal does not fall at every timestep",
                             "take one of the known schedules"))  # fmt: skip
    for path, values in schedule_files(case.source):
        clamps = [k for k in ("clip_sample", "thresholding") if values.get(k)]
        if clamps:
            found.append(Finding("sampling", "clamp", BROKEN, f"{path} says {clamps[0]}: other programs clamp "
                                 f"latents at "
                                 f"{values.get('clip_sample_range', 1)}, beyond which a third of them lie",
                                 f"set {clamps[0]} to false: clamping is for pictures in -1..1"))  # fmt: skip
        else:
            found.append(Finding("sampling", "clamp", WELL, "latents are not clamped"))
    return found


def few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def weights_finite(live: dict, ema: dict) -> Finding:
    bad = [name for name, t in live.items() if not t.isfinite().all()]
    bad += [f"{name} (EMA)" for name, t in ema.items() if name not in bad and not t.isfinite().all()]
    if bad:
        return Finding("network", "weights finite", BROKEN, f"NaN or infinity in {few(bad)}",
                       "go on from an older checkpoint; a file in half precision may have overflowed: take fp32 or "
                       "bf16",
                       {"tensors": bad[:20]})  # fmt: skip
    largest = max(float(t.abs().max()) for t in live.values() if t.numel())
    return graded("network", "weights finite", largest, 1e3, 3e4, f"all finite, the largest {largest:.3g}",
                  "such weights do not bear half precision (65,504 is its largest number)")  # fmt: skip


def dead(live: dict) -> Finding:
    """Matrices and kernels that are all zero: they began so, and nothing moved them."""
    names = [name for name, t in live.items() if t.ndim > 1 and not t.any()]
    if names:
        return Finding("network", "dead weights", BROKEN, f"{len(names)} tensors are zero throughout: {few(names)}",
                       "see that they are trained (requires_grad, the optimizer's groups): they began at zero, and "
                       "what "
                       "lies before them gets no gradient", {"tensors": names[:20]})  # fmt: skip
    return Finding("network", "dead weights", WELL, f"none of {len(live)} tensors is zero throughout")


def untrained(case: Case, live: dict, deep: bool) -> Finding | None:
    """Tensors that are, to the bit, as the run's seed drew them."""
    lineage, settings = case.state.get("lineage", []), case.settings
    if len(lineage) != 1 or "seed" not in settings or case.steps < 10:
        return None
    if sum(t.numel() for t in live.values()) > LARGE and not deep:
        return Finding("network", "untrained weights", NOT_JUDGED, "the network is large: --deep draws it anew")
    state = torch.random.get_rng_state()
    torch.manual_seed(settings["seed"])
    drawn = UNet(case.model.unet_config, settings["zero_init"]).state_dict()
    torch.random.set_rng_state(state)
    same = [name for name, t in live.items() if torch.equal(t.float(), drawn[name]) and t.any()]
    zero = [name for name, t in live.items() if not t.any()]
    if same:
        return Finding("network", "untrained weights", BROKEN, f"{len(same)} of {len(live)} tensors are as the seed "
                       f"drew "
                       f"them: {few(same)}", "see that they are trained, and that the loss depends on them",
                       {"tensors": same[:20]})  # fmt: skip
    return Finding("network", "untrained weights", WELL, f"training changed all {len(live) - len(zero)} tensors that "
                   f"were "
                   "not drawn as zeros")  # fmt: skip


def from_health(case: Case) -> list[Finding]:
    """What the last lines of health.jsonl say of gradients, attention and activations."""
    rows = [r for r in case.health if "weight_norm" in r and r["step"] >= 10]
    if not rows:
        why = "health.jsonl has no line behind step 10 (--health_steps)"
        return [Finding("gradients", "every weight has one", NOT_JUDGED, why)] if case.run else []
    row, found = rows[-1], []
    without, zero = row.get("no_gradient", []), row.get("zero_gradient", [])
    if without or zero:
        n = row.get("no_gradient_count", 0) + row.get("zero_gradient_count", 0)
        found.append(Finding("gradients", "every weight has one", BROKEN, f"at step {row['step']:,}, {n} tensors "
                             f"have no "
                             f"gradient, or zeros alone: {few(without + zero)}", "see that the loss depends on them; "
                             "behind an output that began at zero and is not trained nothing is learned",
                             {"tensors": (without + zero)[:20]}))  # fmt: skip
    else:
        found.append(Finding("gradients", "every weight has one", WELL, f"at step {row['step']:,}"))
    logits, where = max((v or math.inf, k) for k, v in row["attention_max"].items())
    found.append(graded("network", "attention", logits, 100, 1000, f"the largest attention logit is {logits:.3g} "
                        f"({where})",
                        "attention has become a choice of one: lower --lr, or raise --decay"))  # fmt: skip
    largest, where = max((v or math.inf, k) for k, v in row["activation_max"].items())
    found.append(graded("network", "activations", largest, 1e4, 6e4, f"the largest activation is {largest:.3g} "
                        f"({where})",
                        "fp16 ends at 65,504: train and paint in bf16 or fp32"))  # fmt: skip
    return found
