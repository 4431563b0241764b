"""sd/health.py and SD_Doctor.py: figures that change nothing, rules that find what is broken and accuse nobody else.

pytest tests/test_doctor.py
tests/doctor/run.py breaks whole runs on purpose; here each rule meets the fault that it is for, and its traps.
"""

import hashlib
import json
import math
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.torch
import torch

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import micro

import sd.health
import SD_Doctor
from sd.checkpoints import Progress
from sd.data import Batch
from sd.diagnosis import course, data, network, painted, probing
from sd.diagnosis.case import Case
from sd.diagnosis.findings import BROKEN, HEALTHY_RUNS, LOOK, NOT_JUDGED, WELL, as_page, in_lines
from sd.diagnosis.statistics import alternation, association, coverage, debiased, nearest, slope, standard_errors
from sd.objective import Denoiser
from sd.optim import clip_limit
from SD_Model import PRESETS, NoiseSchedule, UNet


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Data, and two runs of 24 steps on them that differ in health figures alone, one at the other's side."""
    root = micro.make_data(tmp_path_factory.mktemp("doctor"), {"things": 120})
    more = ("--max_steps", 24, "--save_steps", 24, "--accumulate", 2)
    pids = [micro.start(micro.flags(root, root / name, *more, "--health_steps", n), root / f"{name}.txt")
            for name, n in (("plain", 0), ("watched", 2))]  # fmt: skip
    assert [micro.status_of(pid) for pid in pids] == [0, 0], (root / "watched.txt").read_text()
    return root


def verdict_of(findings, rule: str) -> str:
    return {f.rule: f.verdict for f in findings}[rule]


# ----------------------------------------------------------------------------------------------------------------
# Health figures
# ----------------------------------------------------------------------------------------------------------------


def test_figures_change_nothing(world):
    assert micro.differences(world / "plain", world / "watched", settings=False) == []
    assert not (world / "plain" / "health.jsonl").exists()
    rows = micro.rows(world / "watched", "health.jsonl")
    assert [r["step"] for r in rows] == list(range(2, 25, 2))
    blocks = {"time_embed", "input_blocks.0", "input_blocks.1", "middle_block", "output_blocks.0", "output_blocks.1"}
    for name in ("grad_norm", "weight_norm", "update", "zero_share"):
        assert blocks | {"out"} == rows[-1][name].keys(), name
    assert blocks - {"time_embed"} | {"out"} == rows[-1]["activation_max"].keys()
    assert {"level 0, self", "level 0, text"} == rows[-1]["attention_max"].keys()


def small_net(zero_init="none"):
    torch.manual_seed(0)
    return Denoiser(UNet(PRESETS["micro"]["unet"], zero_init), None)


def health_of(net, average=None, rows=None, **settings):
    log = SimpleNamespace(write=lambda name, row: rows.append(row)) if rows is not None else None
    settings = {"health_steps": 1, "dtype": "fp32"} | settings

    def text_of(ids):
        return torch.ones(len(ids), 3, 16)

    return sd.health.Health(log, net, average or net, settings, NoiseSchedule(), text_of, None, None, False)


def one_batch(n=2):
    g = torch.Generator().manual_seed(1)
    x, noise = torch.randn(2, n, 4, 8, 8, generator=g)
    return Batch(x, noise, torch.tensor([10, 900][:n]), torch.zeros(n, 3, dtype=torch.int64))


def step(net, batch):
    noisy = NoiseSchedule().add_noise(batch.latents, batch.noise, batch.t)
    ((net(noisy, batch.t, torch.ones(2, 3, 16)) - batch.noise) ** 2).mean().backward()


def test_figures_are_right():
    """Against plain loops over the weights; of tensors with more numbers than are sampled, the estimate is near."""
    net, average, rows, batch = small_net(), small_net(), [], one_batch()
    with torch.no_grad():
        for p in average.parameters():
            p.add_(0.1 * torch.randn_like(p))
    health = health_of(net, average, rows)
    step(net, batch)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    health.before(0, batch)
    with torch.no_grad():
        for p in net.parameters():
            p.sub_(0.01 * torch.randn_like(p))
    health.after(1, 2.0, 1.0, 1e-3)
    row, own = rows[0], {n: p for n, p in net.named_parameters() if n.startswith("unet.middle_block.")}

    def norm(tensors):
        return math.sqrt(sum(float(t.detach().double().square().sum()) for t in tensors))

    assert row["grad_norm"]["middle_block"] == pytest.approx(norm(p.grad for p in own.values()), rel=1e-4)
    weight = norm(before[n] for n in own)
    assert row["weight_norm"]["middle_block"] == pytest.approx(weight, rel=1e-4)
    moved = norm(p - before[n] for n, p in own.items())
    assert row["update"]["middle_block"] == pytest.approx(moved / weight, rel=0.05)
    away = norm(a - b for a, b in zip(net.parameters(), average.parameters()))
    assert row["ema_distance"] == pytest.approx(away / norm(before.values()), rel=0.05)
    assert (row["clipped"], row["skipped"], row["lr"]) == (1, 0, 1e-3)
    assert "no_gradient" not in row and "zero_gradient" not in row


def test_attention_logits_are_the_networks_own():
    """Trap: of a network with one query a pixel all are looked at, and the largest is that of plain products."""
    net, batch, found = small_net(), one_batch(), []

    def watch(module, inputs):
        q, k = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (module.to_q(inputs[0]), module.to_k(inputs[1])))
        found.append(float((q @ k.mT).abs().max()) * q.shape[-1] ** -0.5)

    text = torch.randn(2, 3, 16)
    cross = [m.transformer_blocks[0].attn2 for m in net.modules() if hasattr(m, "transformer_blocks")]
    hooks = [m.register_forward_pre_hook(watch) for m in cross]
    with torch.no_grad():
        net(NoiseSchedule().add_noise(*batch[:3]), batch.t, text)
    for h in hooks:
        h.remove()
    seen = sd.health.probed(net, batch, text, NoiseSchedule(), "fp32")
    assert float(seen["attention_max", "level 0, text"]) == pytest.approx(max(found), rel=1e-4)


def test_one_transfer_a_line(monkeypatch):
    """Trap 41: a number of each tensor, fetched one by one, would wait for the device hundreds of times."""
    net, rows, batch, count = small_net(), [], one_batch(), []
    health = health_of(net, rows=rows)
    step(net, batch)
    for name in ("item", "tolist", "__float__", "__bool__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, real=real: count.append(1) or real(self))
    health.before(0, batch)
    health.after(1, 1.0, 1.0, 1e-3)
    assert rows and len(count) == 1


def test_weights_without_gradient_are_named():
    """Trap 39: no gradient is another thing than a gradient of zero; both are told, and not finite ones too."""
    net, rows, batch = small_net(), [], one_batch()
    health = health_of(net, rows=rows)
    step(net, batch)
    net.unet.out[2].bias.grad = None
    net.unet.out[0].bias.grad.zero_()
    net.unet.time_embed[0].bias.grad[1] = float("nan")
    health.before(0, batch)
    health.after(1, 1.0, 1.0, 1e-3)
    assert rows[0]["no_gradient"] == ["unet.out.2.bias"]
    assert rows[0]["zero_gradient"] == ["unet.out.0.bias"]
    assert rows[0]["gradient_not_finite"] == ["unet.time_embed.0.bias"]


def test_a_skipped_step_tells_what_was_in_it(world, tmp_path):
    """The key of the latent with a NaN is named, by the line and by the doctor, and training is as without figures."""
    keys = [f"things/00000/{i:09d}" for i in range(50)]
    root = micro.make_data(tmp_path, {"things": 42})
    for file in sorted((root / "things" / "latents").glob("*.npy"))[-1:]:
        values = np.load(file)
        values[-1, 2, 3, 4] = np.nan
        np.save(file, values)
    for name, n in (("on", 3), ("off", 0)):
        argv = micro.flags(root, root / name, "--health_steps", n, "--batch", 6)
        assert micro.status_of(micro.start(argv, root / f"{name}.txt")) == 0, (root / f"{name}.txt").read_text()
    rows = [r for r in micro.rows(root / "on", "health.jsonl") if r.get("skipped_step")]
    assert not (root / "off" / "health.jsonl").exists()
    assert rows and all(r["latents_not_finite"] == [keys[-1]] and keys[-1] in r["keys"] for r in rows)
    assert sum(r["skipped"] for r in micro.rows(root / "on")) == len(rows)
    assert micro.differences(root / "on", root / "off", settings=False) == []
    report = doctor(root / "on", tmp_path)
    assert keys[-1] in report["latents finite"]["evidence"] and report["latents finite"]["verdict"] == BROKEN
    assert report["skipped steps"]["verdict"] == BROKEN


def test_a_block_that_overflows_is_named():
    net, batch, rows = small_net(), one_batch(), []
    health = health_of(net, rows=rows)
    health.train = SimpleNamespace(keys=SimpleNamespace(take=lambda i: SimpleNamespace(to_pylist=lambda: ["a", "b"])),
                                   latents=lambda i: np.zeros((1, 4, 8, 8)))  # fmt: skip
    health.plan = SimpleNamespace(global_batch=2, order=SimpleNamespace(at=lambda p: p))
    with torch.no_grad():
        net.unet.middle_block[0].out_layers[3].weight.fill_(float("inf"))
    health.before(0, batch)
    health.after(1, float("nan"), 1.0, 1e-3)
    skipped = next(r for r in rows if r.get("skipped_step"))
    assert skipped["first_not_finite"] == "middle_block" and skipped["keys"] == ["a", "b"]


# ----------------------------------------------------------------------------------------------------------------
# --adaptive_clip
# ----------------------------------------------------------------------------------------------------------------


def test_adaptive_clip_bears_nan_and_spikes():
    """Trap 36: a mean that took a NaN would be NaN for ever, and one that took spikes would let the next ones "
    "through."""
    progress, settings, sums = Progress(), {"clip": 0.0, "adaptive_clip": 3.0}, [0.0] * 20
    for norm in [1.0] * 50 + [float("nan")] * 5 + [float("inf")] + [1000.0] * 20 + [1.0] * 10:
        progress.advance(norm, clip_limit(settings, progress.usual_norm()), sums)
    assert clip_limit(settings, progress.usual_norm()) == 3.0
    assert len(progress.norms) == 80 and progress.updates == 80 and progress.step == 86
    for _ in range(100):  # what was large for long is usual
        progress.advance(20.0, 3.0, sums)
    assert progress.usual_norm() == 20.0 and len(progress.norms) == 100


def test_adaptive_clip_goes_on_from_what_was_saved():
    progress = Progress()
    for norm in (1.0, 3.0, 2.0, 0.1):
        progress.advance(norm, math.inf, [0.0] * 20)
    saved = json.loads(json.dumps(progress.state()))
    again = Progress.resumed(saved, 0)
    assert again.norms == progress.norms and again.usual_norm() == 1.5
    del saved["norms"]  # an older revision's
    older = Progress.resumed(saved, 0)
    older.advance(1000.0, math.inf, [0.0] * 20)
    assert older.usual_norm() == saved["mean_norm"]
    saved["mean_norm"] = float("nan")
    assert Progress.resumed(saved, 0).usual_norm() == 0.0
    assert clip_limit({"clip": 1.0, "adaptive_clip": 3}, 0.0) == 1.0


# ----------------------------------------------------------------------------------------------------------------
# Statistics
# ----------------------------------------------------------------------------------------------------------------


def test_no_alarm_on_stationary_noise():
    """The usual rule, more than 60 changes of sign in 98, accuses most of independent noise; this one hardly any."""
    rng, n = np.random.default_rng(0), 100
    series = rng.standard_normal((1000, n))
    usual = np.mean([(np.diff(np.sign(np.diff(s))) != 0).sum() > 60 for s in series])
    assert usual > 0.8
    assert sum(alternation(s) > 4 for s in series) == 0
    assert np.mean([abs(slope(s)[0]) > 3 * slope(s)[1] for s in series]) < 0.01
    swinging = [0.5 * (-1) ** np.arange(n) + 0.3 * s for s in series[:50]]
    assert all(alternation(s) > 4 for s in swinging)
    falling = [-0.02 * np.arange(n) + s for s in series[:50]]
    assert np.mean([slope(s)[0] < -3 * slope(s)[1] for s in falling]) > 0.9


def test_losses_are_debiased_by_timestep():
    """Lines that drew easy timesteps look better and are not."""
    rng, level = np.random.default_rng(0), np.linspace(1, 0.1, 10)
    rows = []
    for i in range(200):
        have = rng.random(10) < 0.5
        have[0 if i % 2 else 9] = True
        rows.append(
            {"bins": [float(x) + 0.01 * float(rng.standard_normal()) if h else None for x, h in zip(level, have)]}
        )
    assert debiased(rows).std() < 0.02
    plain = [np.mean([b for b in r["bins"] if b is not None]) for r in rows]
    assert np.std(plain) > 0.05
    assert np.isnan(debiased([{"bins": [None] * 10}, {"bins": [1.0] * 10}])[0])
    assert len(debiased([])) == 0


def test_coverage_has_neighbourhoods_of_the_real_ones():
    """Trap 35: one mode of eight covers an eighth; by neighbourhoods of the made ones it would cover all."""
    rng = np.random.default_rng(0)
    modes = 20 * rng.standard_normal((8, 16))
    real = np.repeat(modes, 40, axis=0) + rng.standard_normal((320, 16))
    made = modes[0] + rng.standard_normal((320, 16))
    assert coverage(real, made) == pytest.approx(0.125, abs=0.01)
    assert coverage(made, made) == 1.0
    assert nearest(np.zeros((1, 4)), np.array([[3.0, 3, 3, 3], [1, 1, 1, 1]])) == pytest.approx([1.0])


def test_association_and_standard_errors():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (500, 8))
    y = x @ rng.standard_normal((8, 5)) + 3 * rng.standard_normal((500, 5))
    assert association(x, y) > 20
    strengths = [association(x, y[rng.permutation(500)], seed=i) for i in range(40)]
    assert max(strengths) < 5 and abs(np.mean(strengths)) < 0.6
    assert standard_errors([1.0, 1.0, 1.0, 1.0]) == math.inf and standard_errors([0.0, 0.0]) == 0.0
    assert standard_errors([1.0, 2.0, 3.0]) == pytest.approx(2 / (1 / 3**0.5))


# ----------------------------------------------------------------------------------------------------------------
# Rules on data
# ----------------------------------------------------------------------------------------------------------------


def latents_and_words(n=600):
    """Latents of variance 1 whose first channel a word tells."""
    rng = np.random.default_rng(0)
    red = rng.random(n) < 0.5
    latents = rng.standard_normal((n, 4, 8, 8)).astype(np.float32)
    latents[red, 0] += 0.8
    ids = np.full((n, 8), 1)
    ids[:, 0], ids[red, 1], ids[~red, 1], ids[:, 2] = 0, 5, 6, rng.integers(7, 20, n)
    return latents / latents.std(), ids


def test_rules_on_latents():
    latents, ids = latents_and_words()
    for factor, wanted in (
        (1, WELL),
        (1 / 0.18215, BROKEN),
        (0.18215, BROKEN),
        (1.45, LOOK),
        (0.69, LOOK),
        (0, BROKEN),
    ):
        assert data.latent_scale(latents * factor).verdict == wanted, factor
    assert data.duplicates(latents).verdict == WELL
    twice = np.concatenate([latents, latents[:300]])
    assert data.duplicates(twice).verdict == BROKEN and data.duplicates(twice).numbers["value"] == pytest.approx(1 / 3)
    assert data.alike(latents).verdict == data.alike(twice).verdict == WELL  # those are told by the other rule
    rng = np.random.default_rng(0)
    copies = latents[:1] + 0.02 * rng.standard_normal((580, 4, 8, 8)).astype(np.float32)
    assert data.alike(np.concatenate([latents[:20], copies])).verdict == BROKEN
    assert data.leak(latents[100:], latents[:100], False).verdict == WELL
    assert data.leak(latents[50:], latents[:100], False).verdict == BROKEN


def test_rules_on_captions():
    latents, ids = latents_and_words()
    rng = np.random.default_rng(1)
    assert data.captions_match(ids, latents).verdict == WELL
    assert data.captions_match(ids[rng.permutation(len(ids))], latents).verdict in (BROKEN, LOOK)
    assert data.captions_match(np.roll(ids, 1, 0), latents).verdict in (BROKEN, LOOK)  # off by a row
    assert data.captions_match(ids[:20], latents[:20]).verdict == NOT_JUDGED
    words = [f"caption {i}" for i in range(200)]
    assert data.captions_equal(words).verdict == WELL
    assert data.captions_equal(["a face"] * 195 + words[:5]).verdict == BROKEN
    assert data.captions_empty(words).verdict == WELL and data.captions_empty([""] * 190 + words[:10]).verdict == BROKEN
    assert data.captions_cut(ids).verdict == WELL
    full = np.concatenate([np.tile(np.arange(2, 9), (600, 1)), np.ones((600, 1), int)], axis=1)
    assert data.captions_cut(full).verdict == BROKEN


# ----------------------------------------------------------------------------------------------------------------
# Rules on schedules and networks
# ----------------------------------------------------------------------------------------------------------------


def model_of(**schedule):
    return SimpleNamespace(schedule=NoiseSchedule(**schedule))


@pytest.mark.parametrize(
    "schedule, wanted",
    [
        ({}, WELL),
        ({"betas": "linear"}, WELL),
        ({"betas": "squaredcos_cap_v2"}, WELL),  # its largest beta is 0.999
        ({"prediction": "v", "zero_terminal_snr": True}, WELL),  # its last one is 1
        ({"beta_end": 0.002}, BROKEN),
        ({"beta_end": 0.006}, LOOK),
    ],
)
def test_a_schedule_is_judged_by_where_it_ends(schedule, wanted):
    """Trap 40: a limit on beta would refuse the cosine schedule and those of zero terminal SNR."""
    case = SimpleNamespace(model=model_of(**schedule), source="nowhere")
    found = network.schedule(case)
    assert verdict_of(found, "end") == wanted and verdict_of(found, "beginning") == WELL


class Perfect:
    """The best prediction of x_0 ~ N(0, 1) under a schedule, in closed form: E[eps | x] = sqrt(1 - abar) x, and of v
    0."""

    def __init__(self, trained: NoiseSchedule):
        self.trained = trained

    def __call__(self, x, t, context):
        return self.trained._at(t)[1] * x if self.trained.prediction == "epsilon" else 0 * x


def trial(unet, told: NoiseSchedule, n=256):
    made = object.__new__(probing.Trial)
    g = torch.Generator().manual_seed(0)
    made.unet, made.schedule, made.device = unet, told, torch.device("cpu")
    made.latents, made.noise = torch.randn(2, n, 4, 8, 8, generator=g)
    made.t = ((torch.arange(n) + 0.5) / n * 1000).long()
    made.context, made.empty = torch.randn(n, 3, 16, generator=g), torch.randn(1, 3, 16, generator=g)
    return made


def test_a_network_tells_its_betas():
    families = {"scaled_linear": {}, "cosine": {"betas": "squaredcos_cap_v2"}, "linear": {"betas": "linear"}}
    for name, schedule in families.items():
        net = Perfect(NoiseSchedule(**schedule))
        for told, other in families.items():
            verdict = probing.betas(trial(net, NoiseSchedule(**other))).verdict
            assert (verdict == WELL) == (name == told), (name, told, verdict)


def test_a_network_tells_what_it_predicts():
    eps, v = NoiseSchedule(), NoiseSchedule(prediction="v")
    assert probing.prediction(trial(Perfect(eps), eps)).verdict == WELL
    assert probing.prediction(trial(Perfect(eps), v)).verdict == BROKEN
    case = SimpleNamespace(live=SimpleNamespace(schedule=eps, unet_config=PRESETS["micro"]["unet"], size=64),
                           device="cpu")  # fmt: skip
    context = torch.zeros(1, 3, 16)
    assert probing.prediction_of_noise(case, Perfect(eps), context).verdict == WELL
    case.live.schedule = v
    assert probing.prediction_of_noise(case, Perfect(eps), context).verdict == BROKEN


def test_a_fresh_network_is_not_accused():
    """Trap 38: behind zero-initialised outputs it predicts 0 at first, whatever it is to predict."""
    net = small_net("all").unet.eval()
    case = SimpleNamespace(
        live=SimpleNamespace(schedule=NoiseSchedule(), unet_config=net.config, size=64), device="cpu"
    )
    with torch.no_grad():
        assert probing.prediction_of_noise(case, net, torch.zeros(1, 3, 16)).verdict == NOT_JUDGED
        assert probing.prediction(trial(net, NoiseSchedule(), 32)).verdict == NOT_JUDGED


def test_zero_gradients_of_the_first_steps_are_healthy():
    """Trap 37: what lies before an output that begins at zero has no gradient until that has moved."""
    row = {"step": 2, "weight_norm": {"out": 1.0}, "zero_gradient": ["unet.time_embed.0.weight"],
           "zero_gradient_count": 1, "attention_max": {"level 0, "
           "self": 1.0}, "activation_max": {"out": 1.0}}  # fmt: skip
    case = Case("run", run=Path("run"), health=[row])
    assert verdict_of(network.from_health(case), "every weight has one") == NOT_JUDGED
    case.health.append(row | {"step": 200})
    assert verdict_of(network.from_health(case), "every weight has one") == BROKEN
    case.health.append({k: v for k, v in row.items() if "zero" not in k} | {"step": 400})
    assert verdict_of(network.from_health(case), "every weight has one") == WELL


def test_text_that_matters_and_zeros_for_null():
    """A network whose error depends on the context given: right, wrong, empty, zeros."""
    schedule = NoiseSchedule()

    case = SimpleNamespace(device="cpu")
    deaf = trial(Perfect(schedule), schedule)
    found = probing.text(case, deaf)
    assert verdict_of(found, "text") == BROKEN and verdict_of(found, "null condition") == WELL
    hears = trial(None, schedule)
    right = hears.context

    def net(x, t, context):
        """A little off, but for the picture's own context."""
        own = schedule._at(t)[1] * x
        known = torch.stack([(right == c).all(dim=(1, 2)).any() for c in context])
        at = torch.tensor([int((right == c).all(dim=(1, 2)).int().argmax()) for c in context])
        fits = known & (t == hears.t[at])
        return own * (1 - 0.2 * (~fits)[:, None, None, None])

    hears.unet = net
    assert verdict_of(probing.text(case, hears), "text") == WELL
    null = trial(None, schedule)
    null.unet = lambda x, t, c: schedule._at(t)[1] * x * (1 - 0.4 * (c != 0).any(2).any(1))[:, None, None, None]
    assert verdict_of(probing.text(case, null), "null condition") == BROKEN


def test_rules_on_painted_pictures():
    rng = np.random.default_rng(0)
    real, train = rng.standard_normal((2, 64, 4, 8, 8))
    assert painted.burnt(real * 1.1, real, 7.5).verdict == WELL
    assert (
        painted.burnt(real * 2.5, real, 7.5).verdict == BROKEN and painted.burnt(real * 0.2, real, 1).verdict == BROKEN
    )
    assert painted.enough_steps(real, real + 0.1, "ddim", 30).verdict == WELL
    assert painted.enough_steps(real, train, "ddim", 2).verdict == BROKEN
    assert painted.diversity(train, real, real).verdict == WELL
    assert painted.diversity(train[:1] + 0.05 * real, real, real).verdict == BROKEN
    assert painted.memorised(rng.standard_normal(real.shape), train, real).verdict == WELL
    assert painted.memorised(train + 0.1 * real, train, real).verdict == BROKEN


# ----------------------------------------------------------------------------------------------------------------
# Rules on a run's course
# ----------------------------------------------------------------------------------------------------------------


def course_of(held, seen=None, ema=None, settings=None, n=40, **row):
    """A run whose validations have these losses, one every 100 steps."""
    rows = []
    for i, loss in enumerate(held):
        for split, weights, value in (
            ("val", "live", loss), ("val", "ema", (ema or held)[i]), ("train", "live", (seen or held)[i]),
            ("train", "ema", (seen or held)[i]),
        ):  # fmt: skip
            rows.append({"step": 100 * (i + 1), "split": split, "weights": weights, "loss": value})
    rng = np.random.default_rng(0)
    log = [{"step": 10 * (i + 1), "epoch": 0.1 * (i + 1), "loss": 0.1, "skipped": 0, "grad_norm": 0.3,
            "bins": (0.1 + 0.01 * rng.standard_normal(10)).tolist(), "data_wait": 0.01} | row
           for i in range(n)]  # fmt: skip
    settings = {"max_steps": 1000, "warmup": 50, "clip": 1.0, "drop": 0.1, "ema": 0.99} | (settings or {})
    return Case("run", run=Path("run"), settings=settings, log=log, validation=rows)


FALLING = [0.5, 0.3, 0.2, 0.15, 0.13, 0.12]


@pytest.mark.parametrize(
    "rule, wanted, case",
    [
        ("warm-up", BROKEN, course_of(FALLING, settings={"warmup": 1000})),
        ("learned", BROKEN, course_of([1.0, 0.99, 0.98])),
        ("diverged", BROKEN, course_of([0.5, 0.2, 0.9, 1.5])),
        ("diverged", BROKEN, course_of([0.5, 0.2, math.nan])),
        ("overtraining", BROKEN, course_of([0.5, 0.2, 0.21, 0.25, 0.3], [0.5, 0.2, 0.18, 0.1, 0.05])),
        ("diverged", NOT_JUDGED, course_of([0.5, 0.2, 0.21, 0.25, 0.3], [0.5, 0.2, 0.18, 0.1, 0.05])),
        ("EMA moves", BROKEN, course_of(FALLING, ema=[0.999] * 6)),
        ("EMA lag", BROKEN, course_of(FALLING, ema=[0.9, 0.8, 0.7, 0.5, 0.3, 0.2])),
        ("EMA setting", LOOK, course_of(FALLING, settings={"ema": 1.0}, n=1000)),
        ("clipping", LOOK, course_of(FALLING, settings={"clip": 0.01})),
        ("caption dropout", LOOK, course_of(FALLING, settings={"drop": 0.0})),
        ("caption dropout", BROKEN, course_of(FALLING, settings={"drop": 1.0})),
        ("skipped steps", BROKEN, course_of(FALLING, skipped=2)),
        ("size of updates", NOT_JUDGED, course_of(FALLING)),
    ],
)
def test_rules_on_the_course(rule, wanted, case):
    found = course.check_course(case)
    assert verdict_of(found, rule) == wanted
    if rule == "overtraining":
        assert {f.rule: f for f in found}[rule].numbers == {"step": 200}


def test_a_healthy_course_is_not_accused():
    found = course.check_course(course_of(FALLING))
    assert {f.rule: f.verdict for f in found if f.verdict not in (WELL, NOT_JUDGED)} == {}
    assert (
        data.waits(course_of(FALLING)).verdict == WELL
        and data.waits(course_of(FALLING, data_wait=0.8)).verdict == BROKEN
    )


# ----------------------------------------------------------------------------------------------------------------
# The program
# ----------------------------------------------------------------------------------------------------------------


def doctor(source: Path, folder: Path, *more) -> dict[str, dict]:
    """The report by rule."""
    SD_Doctor.main([str(source), "--device", "cpu", "--json", str(folder / "report.json"), *map(str, more)])
    return {r["rule"]: r for r in json.loads((folder / "report.json").read_text())}


def contents(folder: Path) -> dict[str, str]:
    return {str(p): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_doctor_changes_nothing_and_judges_a_run(world, tmp_path, capsys):
    """Trap 42: nothing is repaired. Every rule that can judge this run, whose latents are noise, does."""
    before = contents(world)
    report = doctor(world / "watched", tmp_path, "--deep", "--steps", 4, "--cfg", 1, "--out", tmp_path / "page.html")
    assert contents(world) == before
    assert report["untrained weights"]["verdict"] == WELL and report["dead weights"]["verdict"] == WELL
    assert report["tokenizer"]["verdict"] == report["latent scale"]["verdict"] == report["whole"]["verdict"] == WELL
    assert report["text"]["verdict"] == BROKEN  # captions of noise tell nothing
    text, page = capsys.readouterr().out, (tmp_path / "page.html").read_text()
    for word in ("data: ", "checkpoint: well", "what to do: ", f"accused 0 of {HEALTHY_RUNS} healthy runs"):
        assert word in text, word
    assert page.startswith("<!DOCTYPE html>") and "http://" not in page


def test_a_log_alone_is_judged(world, tmp_path, capsys):
    """Of a folder without a checkpoint and without config.json: what the log tells, and the length is not known."""
    shutil.copy(world / "watched/log.jsonl", tmp_path)
    SD_Doctor.main([str(tmp_path)])
    said = capsys.readouterr().out
    assert re.search(r"well +skipped steps: 0 of 24 steps", said)
    assert re.search(r"not judged +warm-up: the run's length is not known", said), said


def test_a_checkpoint_and_a_foreign_file_are_judged(world, tmp_path):
    import SD_Convert

    checkpoint = micro.checkpoints(world / "watched")[-1]
    assert doctor(checkpoint, tmp_path)["weights finite"]["verdict"] == WELL
    file = tmp_path / "model.safetensors"
    SD_Convert.main([str(checkpoint), str(file), "--format", "ldm"])
    report = doctor(file, tmp_path)
    assert report["weights finite"]["verdict"] == report["end"]["verdict"] == WELL
    assert report["data"]["verdict"] == report["log"]["verdict"] == NOT_JUDGED
    source = world / "things"
    report = doctor(file, tmp_path, "--dataset", source / "dataset", "--latents", source / "latents")
    assert report["latent scale"]["verdict"] == WELL
    tensors = safetensors.torch.load_file(file)
    name = next(n for n in tensors if n.endswith("out.2.weight"))
    tensors[name].view(-1)[0] = float("nan")
    metadata = safetensors.safe_open(file, "pt").metadata()
    safetensors.torch.save_file(tensors, tmp_path / "broken.safetensors", metadata)
    report = doctor(tmp_path / "broken.safetensors", tmp_path)
    assert report["weights finite"]["verdict"] == BROKEN and "out.2.weight" in report["weights finite"]["evidence"]


def test_clamping_is_seen_in_a_folder_of_the_diffusers_library(tmp_path):
    path = tmp_path / "scheduler" / "scheduler_config.json"
    path.parent.mkdir()
    case = SimpleNamespace(model=model_of(), source=str(tmp_path))
    for values, wanted in (({"clip_sample": False}, WELL), ({}, WELL), ({"clip_sample": True}, BROKEN),
                           ({"thresholding": True}, BROKEN)):  # fmt: skip
        path.write_text(json.dumps(values))
        assert verdict_of(network.schedule(case), "clamp") == wanted


def test_damaged_checkpoints_are_named(world, tmp_path):
    """Of a run whose only one is damaged, and of a run that has a whole one before it."""
    run = tmp_path / "run"
    shutil.copytree(world / "watched", run)
    newest = micro.checkpoints(run)[-1]
    file = newest / "unet_ema.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 255
    file.write_bytes(content)
    report = doctor(run, tmp_path)
    assert report["whole"]["verdict"] == BROKEN and "unet_ema.safetensors" in report["whole"]["evidence"]
    assert report["model"]["verdict"] == NOT_JUDGED and report["latent scale"]["verdict"] == WELL
    shutil.copytree(micro.checkpoints(world / "watched")[-1], run / "checkpoints" / "step_00000012")
    report = doctor(run, tmp_path)
    assert report["whole"]["verdict"] == BROKEN and report["weights finite"]["verdict"] == WELL


@pytest.mark.parametrize(
    "words, mentions",
    [
        (["nowhere"], "nowhere"),
        (["RUN", "--steps", "0"], "--steps"),
        (["RUN", "--dataset", "x"], "--latents"),
        (["RUN", "--json", "no/such/folder.json"], "--json"),
    ],
)
def test_mistakes_are_told_in_one_sentence(words, mentions, world, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [str(world / "watched") if w == "RUN" else w for w in words]
    with pytest.raises(SystemExit) as end:
        SD_Doctor.run(lambda: SD_Doctor.main(words))
    error = capsys.readouterr().err
    assert end.value.code == 2 and mentions in error and error.startswith("error: ") and "Traceback" not in error


def test_a_report_has_its_gravest_verdicts_first():
    found = [data.captions_empty(["a"] * 10), data.captions_empty([""] * 10)]
    text = in_lines("title", found)
    assert text.index("  broken") < text.index("  well") and "data: broken" in text
    assert "<h1>&lt;script&gt;</h1>" in as_page("<script>", found)
