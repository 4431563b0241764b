"""The optimizers: each against its paper's formulas in float64 and against other programs' where these are installed;
moments in 8 bits, weights in bf16, what is saved and resumed, and --fit.

pytest tests/test_optimizers.py
"""

import copy
import io
import math
import os
import pickle
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
sys.path.insert(0, str(Path(__file__).parent / "faults"))

import micro
from micro import contents, differences, flags, rows, start, status_of

import sd.adam8bit
import sd.checkpoints
import sd.fused
import sd.kernels
import sd.objective
import sd.optim
import sd.optimizers
import sd.plan
import sd.step
import sd.weights.read
import SD_Model
import SD_Train
from sd.adam8bit import AdamW8bit
from sd.errors import InputError
from sd.optimizers import SGD, Adafactor, Lion, MuonAdamW, Prodigy, ScheduleFree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = torch.device("cpu")
BF16 = "--weights_dtype", "bf16", "--dtype", "bf16"
needs_triton = pytest.mark.skipif(sd.kernels.triton is None, reason="Triton is not installed")


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return micro.make_data(tmp_path_factory.mktemp("optimizers") / "data", {"things": 42})


def train(data: Path, out: Path, *more, hook=None, expect=0) -> str:
    output = out.parent / f"{out.name}.txt"
    output.unlink(missing_ok=True)
    status, text = status_of(start(flags(data, out, *more), output, hook)), output.read_text()
    assert status == expect, text[-3000:]
    return text


def settings_of(*words) -> dict:
    """A run's settings, on the CPU."""
    args = SD_Train.parse_args(["--phase", "demo", "--model", "micro", *map(str, words)])
    settings = SD_Train.for_device(SD_Train.resolve(args, None), CPU)
    sd.optim.check_optimizer(args, settings, begins=True)
    return settings | {"kernels": bool(settings["kernels"])}


# ----------------------------------------------------------------------------------------------------------------
# Against formulas and other programs
# ----------------------------------------------------------------------------------------------------------------

LR, DECAY, STEPS = 0.01, 0.1, 7


def course(make, more=(), size=1.0) -> list[torch.Tensor]:
    """Where STEPS steps take a kernel that decays and a bias that does not, towards places far away and with gradients
    of many sizes. make(groups): an optimizer. more: extra keys of a group; size: of the weights at the start."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(6, 20) * size), nn.Parameter(torch.randn(9) * size)]
    goals = [torch.randn_like(p) * 3 for p in weights]
    groups = [
        {"params": [weights[0]], "weight_decay": DECAY, **dict(more)},
        {"params": [weights[1]], "weight_decay": 0.0},
    ]
    optimizer, draw = make(groups), torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for p, goal in zip(weights, goals):
            p.grad = (p.detach() - goal) * torch.rand(p.shape, generator=draw) ** 3
        optimizer.step()
    return [p.detach() for p in weights]


class Formula:
    """An optimizer of a test: rule(w, g, t, state, decay) -> w, all in float64."""

    def __init__(self, groups, rule, before=None):
        self.groups, self.rule, self.t, self.before = groups, rule, 0, before
        self.states = {p: {} for g in groups for p in g["params"]}
        self.exact = {p: p.detach().double() for p in self.states}

    def step(self):
        self.t += 1
        if self.before:
            self.before(self)
        for group in self.groups:
            for p in group["params"]:
                w = self.rule(self.exact[p], p.grad.double(), self.t, self.states[p], group["weight_decay"])
                self.exact[p] = w
                p.data = w.float()


def sgd(w, g, t, state, decay):
    state["m"] = 0.9 * state.get("m", 0) + g + decay * w
    return w - LR * state["m"]


def lion(w, g, t, state, decay):
    m = state.get("m", torch.zeros_like(w))
    state["m"] = 0.99 * m + 0.01 * g
    return w - LR * (torch.sign(0.9 * m + 0.1 * g) + decay * w)


def adamw(w, g, t, state, decay):
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * g
    v = state["v"] = 0.99 * state.get("v", 0) + 0.01 * g * g
    return w - LR * (m / (1 - 0.9**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-8) + decay * w)


def adafactor(w, g, t, state, decay):
    b, q = 1 - t**-0.8, g * g + 1e-30
    if w.ndim > 1:
        r = state["r"] = b * state.get("r", 0) + (1 - b) * q.sum(1)
        c = state["c"] = b * state.get("c", 0) + (1 - b) * q.sum(0)
        v = torch.outer(r, c) / r.sum()
    else:
        v = state["v"] = b * state.get("v", 0) + (1 - b) * q
    u = g / v.sqrt()
    return w - LR * (u / max(1, u.square().mean().sqrt()) + decay * w)


def muon(w, g, t, state, decay):
    if w.ndim == 1:
        return adamw(w, g, t, state, decay)
    m = state["m"] = 0.95 * state.get("m", 0) + 0.05 * g
    x = 0.05 * g + 0.95 * m
    x = x / x.norm()
    for _ in range(5):
        s = x @ x.T
        x = (3.4445 * torch.eye(len(x)).double() - 4.775 * s + 2.0315 * s @ s) @ x
    return w - LR * (0.2 * math.sqrt(max(w.shape)) * x + decay * w)


def schedule_free(w, g, t, state, decay):
    """w is y; constant lr, so that each step weighs as much in the average."""
    z, x = state.setdefault("z", w), state.setdefault("x", w)
    v = state["v"] = 0.99 * state.get("v", 0) + 0.01 * g * g
    z = state["z"] = z - LR * (g / ((v / (1 - 0.99**t)).sqrt() + 1e-8) + decay * w)
    x = state["x"] = (1 - 1 / t) * x + z / t
    return 0.1 * z + 0.9 * x


def prodigy_distance(self):
    """Algorithm 4's d, over all weights, before they move."""
    self.d, b3, top, bottom = getattr(self, "next_d", 1e-6), math.sqrt(0.99), 0.0, 0.0
    for p, state in self.states.items():
        g, start = p.grad.double(), state.setdefault("start", self.exact[p])
        s = state["s"] = b3 * state.get("s", 0) + self.d**2 / 1e-6 * g
        top, bottom = top + (g * (start - self.exact[p])).sum(), bottom + s.abs().sum()
        state["d"] = self
    self.top = b3 * getattr(self, "top", 0.0) + self.d**2 / 1e-6 * top
    self.next_d = max(self.d, (self.top / bottom).item())


def prodigy(w, g, t, state, decay):
    d, following = state["d"].d, state["d"].next_d
    m = state["m"] = 0.9 * state.get("m", 0) + 0.1 * d * g
    v = state["v"] = 0.99 * state.get("v", 0) + 0.01 * d**2 * g * g
    return w * (1 - d * decay) - d * m / (v.sqrt() + following * 1e-8)


def free(groups):
    """schedule-free, with averages; returns its y, as the others their weights."""
    optimizer = ScheduleFree(groups, LR, 0.0, (0.9, 0.99))
    optimizer.averages = {p: p.detach().clone() for group in groups for p in group["params"]}
    return optimizer


BETAS = (0.9, 0.99)
OURS = {
    "sgd": lambda g: SGD(g, LR, 0.0, 0.9),
    "lion": lambda g: Lion(g, LR, 0.0, BETAS),
    "adamw": lambda g: AdamW8bit(g, LR, 0.0, BETAS, eight_bits=False),
    "small": lambda g: AdamW8bit(g, LR, 0.0, BETAS),  # too small for 8 bits
    "adafactor": lambda g: Adafactor(g, LR, 0.0),
    "muon": lambda g: MuonAdamW(g, LR, 0.0, BETAS),
    "schedulefree": free,
    "prodigy": lambda g: Prodigy(g, 1.0, 0.0, BETAS),
}
RULES = dict(sgd=sgd, lion=lion, adamw=adamw, small=adamw, adafactor=adafactor, muon=muon, schedulefree=schedule_free,
             prodigy=prodigy)  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_formulas(name):
    more = {"muon": True} if name == "muon" else {}
    size = 0.0 if name == "prodigy" else 1.0  # its first steps are so short that fp32 rounds them off beside 1
    found = course(OURS[name], more, size)
    before = prodigy_distance if name == "prodigy" else None
    expected = course(lambda groups: Formula(groups, RULES[name], before), more, size)
    start = course(lambda groups: Formula(groups, lambda w, *_: w), more, size)
    for a, b, s in zip(found, expected, start):
        assert (b - s).norm() > (1e-5 if name == "prodigy" else 0.05)
        assert (a - b).norm() < 1e-4 * (b - s).norm()


def bitsandbytes():
    return pytest.importorskip("bitsandbytes", reason="an oracle of requirements-dev.txt")


def theirs(name: str):
    """The same optimizer of another program, for course()."""
    if name == "sgd":
        return lambda g: torch.optim.SGD(g, LR, momentum=0.9)
    if name == "adamw":
        return lambda g: torch.optim.AdamW(g, LR, BETAS)
    if name == "adafactor":
        from transformers.optimization import Adafactor as Other

        return lambda g: Other(g, LR, scale_parameter=False, relative_step=False)
    package = {"lion": "lion_pytorch", "schedulefree": "schedulefree", "prodigy": "prodigyopt"}[name]
    module = pytest.importorskip(package, reason="an oracle of requirements-dev.txt")
    if name == "lion":
        return lambda g: module.Lion(g, LR, BETAS)
    if name == "schedulefree":

        def training(g):
            optimizer = module.AdamWScheduleFree(g, LR, BETAS)
            optimizer.train()
            return optimizer

        return training
    return lambda g: module.Prodigy(g, 1.0, BETAS, safeguard_warmup=True)


@pytest.mark.parametrize("name", ["sgd", "adamw", "adafactor", "lion", "schedulefree", "prodigy"])
def test_other_programs(name):
    for a, b in zip(course(OURS[name]), course(theirs(name))):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def test_schedule_free_has_its_average_where_the_ema_is():
    """x is the reference's weights in eval mode, after a warm-up too, whose steps count less."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(50))
    goal, z, total, largest, v = torch.randn(50), p.detach().double(), 0.0, 0.0, 0.0
    ours = free([{"params": [p], "weight_decay": 0.0}])
    x = z
    for t, lr in enumerate([0.001, 0.01, 0.01, 0.005], 1):
        p.grad = p.detach() - goal
        largest = max(largest, lr)
        total += largest**2
        v = 0.99 * v + 0.01 * p.grad.double() ** 2
        z = z - lr * p.grad.double() / ((v / (1 - 0.99**t)).sqrt() + 1e-8)
        x = x + largest**2 / total * (z - x)
        ours.param_groups[0]["lr"] = lr
        ours.step()
        assert torch.allclose(ours.averages[p].double(), x, atol=1e-6)
        assert torch.allclose(p.detach().double(), 0.1 * z + 0.9 * x, atol=1e-6)


def test_muon_takes_kernels_as_matrices_and_says_how_much_it_has():
    settings = settings_of("--optimizer", "muon")
    net = sd.objective.Denoiser(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"], "none"), None)
    optimizer = sd.optim.make_optimizer(net, settings)
    owned = {p: group["muon"] for group in optimizer.param_groups for p in group["params"]}
    assert all(owned[p] == (p.ndim > 1) for p in net.parameters())
    share = sum(p.numel() for p in net.parameters() if p.ndim > 1) / sum(p.numel() for p in net.parameters())
    assert share > 0.9
    assert f"Muon has {share:.1%} of the numbers" in sd.optim.describe_optimizer(optimizer, net, settings)
    kernel = net.unet.input_blocks[0][0].weight
    before = kernel.detach().clone()
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    sd.optim.set_lr(optimizer, 1.0)
    optimizer.step()
    change = (before * (1 - settings["decay"]) - kernel.detach()).flatten(1) / (0.2 * math.sqrt(kernel[0].numel()))
    assert torch.linalg.svdvals(change).min() > 0.6 and torch.linalg.svdvals(change).max() < 1.3


def test_prodigy_wants_one_learning_rate():
    groups = [{"params": [nn.Parameter(torch.ones(3))], "lr": lr} for lr in (1.0, 0.5)]
    with pytest.raises(ValueError, match="the same lr"):
        Prodigy(groups, 1.0, 0.0).step()


def test_prodigy_grows_to_the_distance():
    """It leaves 1e-6 behind and comes close."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(100))
    goal, optimizer = torch.randn(100), Prodigy([p], 1.0, 0.0)
    for _ in range(200):
        p.grad = p.detach() - goal
        optimizer.step()
    assert 0.01 < optimizer.param_groups[0]["d"] < 3 and (p - goal).norm() < 0.2 * goal.norm()


# ----------------------------------------------------------------------------------------------------------------
# Moments in 8 bits
# ----------------------------------------------------------------------------------------------------------------


def eight(*shapes, channels_last=False, **more):
    """Random weights of these shapes, and their AdamW8bit."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(s, device=DEVICE)) for s in shapes]
    if channels_last:
        for p in weights:
            if p.ndim == 4:
                p.data = p.data.contiguous(memory_format=torch.channels_last)
    groups = [{"params": weights, "lr_scale": 1.0, "weight_decay": DECAY}]
    return weights, AdamW8bit(groups, LR, 0.0, BETAS, **more)


def test_values_of_eight_bits():
    for with_sign in (True, False):
        values = sd.adam8bit.dynamic_map(with_sign)
        assert len(values) == 256 == len(set(values.tolist())) and 0 in values and values[-1] == 1
        assert (values.diff() > 0).all() and values[0] == (0 if not with_sign else pytest.approx(-0.99296875))
        assert values[values > 0][0] == pytest.approx(5.5e-7 if with_sign else 3.25e-7)


def test_eight_bits_as_in_bitsandbytes():
    """From the same state, the same weights and codes; but its version for the CPU tells shares of a block's largest
    apart no better than to 1e-4."""
    other = bitsandbytes().optim.AdamW8bit
    for with_sign in (True, False):
        theirs = bitsandbytes().functional.create_dynamic_map(with_sign)
        assert torch.allclose(theirs, sd.adam8bit.dynamic_map(with_sign), rtol=3e-7, atol=0)
    (p,), ours = eight((40, 128))
    q = nn.Parameter(p.detach().cpu().clone())
    oracle = other([q], LR, BETAS, weight_decay=DECAY)
    for _ in range(4):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.cpu().clone()
        ours.step(), oracle.step()
        a, b = ours.state[p], oracle.state[q]
        assert torch.allclose(p.cpu(), q, atol=1e-6)
        for name, number in (("exp_avg", 1), ("exp_avg_sq", 2)):
            found, expected = a[name].cpu().flatten().int(), b[f"state{number}"].flatten().int()
            values = ours.maps[p.device][number - 1].cpu()
            tiny = (values[found] - values[expected]).abs() < 1e-4
            apart = torch.where(tiny, 0, (found - expected).abs())
            assert apart.max() <= 1 and (apart > 0).float().mean() < 0.01, name
            assert (found != expected).float().mean() < 0.05
            assert torch.allclose(a[f"{name}_max"].cpu(), b[f"absmax{number}"], rtol=1e-5)
            b[f"state{number}"].view(-1).copy_(a[name].cpu().flatten())
            b[f"absmax{number}"].copy_(a[f"{name}_max"])
        q.data.copy_(p.detach())


def test_eight_bits_train_as_fp32_does():
    """The loss of a small regression after 200 steps."""

    def loss(short: bool) -> float:
        torch.manual_seed(0)
        x, w = torch.randn(256, 64), torch.randn(64, 64)
        net = nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64))
        optimizer = AdamW8bit(net.parameters(), 3e-3, 0.0, eight_bits=short)
        assert (optimizer.state[net[0].weight]["exp_avg"].dtype == torch.uint8) == short
        for _ in range(200):
            optimizer.zero_grad()
            error = (net(x) - x @ w / 8).square().mean()
            error.backward()
            optimizer.step()
        return error.item()

    assert loss(True) == pytest.approx(loss(False), rel=0.1)
    assert loss(True) < 0.1


def test_eight_bits_by_the_whole_tensor():
    """Small tensors and the rest of a block: nothing of one tensor reaches another's block."""
    (a, b, c), optimizer = eight((4095,), (4097,), (65, 64))
    kinds = [optimizer.state[p]["exp_avg"].dtype for p in (a, b, c)]
    assert kinds == [torch.float32, torch.uint8, torch.uint8]
    assert [len(optimizer.state[p]["exp_avg_max"]) for p in (b, c)] == [17, 17]
    for p in (a, b, c):
        p.grad = torch.ones_like(p)
    b.grad[-1] = 1e6
    optimizer.step()
    assert optimizer.state[b]["exp_avg_max"][-1] == pytest.approx(1e5) and optimizer.state[b]["exp_avg_max"][0] < 1
    assert optimizer.state[c]["exp_avg_max"].max() < 1


def test_eight_bits_of_zeros_and_of_a_wide_range():
    """No NaN from a block of zeros or from inf; and a number whose square is far below its block's largest does not
    take a step of a million times lr when its gradient ends."""
    (p,), optimizer = eight((8, 1024))
    before = p.detach().clone()
    p.grad = torch.zeros_like(p)
    optimizer.step()
    assert torch.equal(p, before * (1 - LR * DECAY))
    assert not optimizer.state[p]["exp_avg_sq"].any() and not optimizer.state[p]["exp_avg_sq_max"].any()
    p.grad[0, 0], p.grad[0, 1:256] = 1.0, 1e-4  # squares 1e-8 of the largest, which 8 bits have nothing for
    optimizer.step()
    p.grad.zero_()
    for _ in range(5):
        last = p.detach().clone()
        optimizer.step()
        assert p.isfinite().all() and (p - last).abs().max() < 3 * LR
    p.grad[0, 0] = 3e38
    optimizer.step()
    assert all(t.isfinite().all() for t in (p, optimizer.state[p]["exp_avg_sq_max"], optimizer.state[p]["exp_avg_max"]))
    p.grad.zero_()
    optimizer.step()
    assert p.isfinite().all()


def assert_where_they_were(weights, optimizer, step):
    """step() leaves memory and layout of weights and moments."""
    tensors = [*weights, *(t for p in weights for t in optimizer.state[p].values())]
    before = [(t.data_ptr(), t.stride()) for t in tensors]
    step()
    assert before == [(t.data_ptr(), t.stride()) for t in tensors]


@pytest.mark.parametrize("name", OURS)
def test_memory_and_layout_stay(name):
    p = nn.Parameter(torch.randn(16, 32, 3, 3).contiguous(memory_format=torch.channels_last))
    p.grad = torch.randn(p.shape)  # in another layout
    optimizer = OURS[name]([{"params": [p], "weight_decay": 0.0} | ({"muon": True} if name == "muon" else {})])
    optimizer.step()
    assert_where_they_were([p], optimizer, optimizer.step)
    assert p.stride() == torch.empty(p.shape).contiguous(memory_format=torch.channels_last).stride()


def test_moments_follow_another_layout(tmp_path):
    """A checkpoint from a GPU, whose blocks run along channels_last, goes on where they do not: the moments are what
    they were, as nearly as 8 bits say it."""
    (p,), optimizer = eight((32, 32, 3, 3), channels_last=True)
    scale = torch.logspace(-3, 3, 32, device=DEVICE)[:, None, None, None]
    p.grad = torch.randn_like(p) * scale  # wrong blocks would be off by far
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (q,), other = eight((32, 32, 3, 3))
    sd.checkpoints.load_optimizer(tmp_path, other)
    for name, values in zip(("exp_avg", "exp_avg_sq"), other.maps[q.device]):
        a, b = ([o.state[w][name], o.state[w][f"{name}_max"]] for o, w in ((optimizer, p), (other, q)))
        assert b[0].is_contiguous() and b[0].dtype == torch.uint8
        a, b = (sd.adam8bit.decode(*x, values) for x in (a, b))
        assert torch.allclose(a, b, rtol=0.15, atol=1e-4 * a.abs().max().item())
        assert ((a - b).norm() / a.norm()) < 0.03
    assert not other.param_groups[0]["channels_last"]
    (r,), same = eight((32, 32, 3, 3), channels_last=True)
    sd.checkpoints.load_optimizer(tmp_path, same)
    assert all(torch.equal(same.state[r][k], v) for k, v in optimizer.state[p].items())


# ----------------------------------------------------------------------------------------------------------------
# Weights in bf16
# ----------------------------------------------------------------------------------------------------------------


def test_rounding_at_random():
    x = torch.full((100_000,), 1 + 2**-10)  # an eighth of bf16's step at 1
    found = sd.optimizers.rounded(x, 5, 1)
    assert found.dtype == torch.bfloat16 and set(found.tolist()) == {1.0, 1 + 2**-7}
    assert found.double().mean().item() - 1 == pytest.approx(2**-10, rel=0.05)
    exact = torch.tensor([0.0, -1.5, 2.0**-120, math.inf, -math.inf, 3e38]).bfloat16()
    assert torch.equal(sd.optimizers.rounded(exact.float(), 7, 3), exact)
    assert torch.equal(found, sd.optimizers.rounded(x, 5, 1))
    for key, number in ((6, 1), (5, 2)):  # the same places go up as often as chance has it
        both = (found > 1) & (sd.optimizers.rounded(x, key, number) > 1)
        assert both.float().mean().item() == pytest.approx(1 / 64, rel=0.15)
    grid = x.view(10, 100, 10, 10).contiguous(memory_format=torch.channels_last)
    assert sd.optimizers.rounded(grid, 5, 1).stride() == grid.stride()
    assert len({sd.optimizers.rounding_key(seed, step) for seed in range(30) for step in range(30)}) == 900
    assert [sd.optimizers.mixed(i) for i in (1, 0xFFFFFFFF)] == [
        torch.tensor(t).item() & 0xFFFFFFFF
        for t in sd.optimizers._mixed(torch.tensor([1, -1], dtype=torch.int32)).tolist()
    ]


def test_small_steps_are_not_lost():
    """1,000 steps of a thousandth of bf16's spacing move a weight by one spacing; to the nearest they would not."""
    p = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    optimizer = SGD([p], 1.0, 0.0, momentum=0.0)
    p.grad = torch.full_like(p, -(2**-7) / 1000)
    for _ in range(1000):
        optimizer.step()
    assert p.double().mean().item() == pytest.approx(1 + 2**-7, abs=0.1 * 2**-7)


@pytest.mark.parametrize("name", ["adamw8bit", "lion", "adafactor", "muon", "prodigy", "schedulefree", "sgd", "adamw"])
def test_state_of_bf16_weights_is_fp32_after_resume_too(name, tmp_path):
    """And a step after it is that of an optimizer which was never stopped."""
    settings = settings_of("--optimizer", name, "--weights_dtype", "bf16", "--dtype", "bf16")
    net = sd.objective.Denoiser(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"], "none"), None)
    ema = copy.deepcopy(net)
    one = sd.step.Update(sd.optim.make_optimizer(net, settings), net, ema, settings, 1)
    assert {p.dtype for p in net.parameters() if p.ndim > 1} == {torch.bfloat16}
    assert {p.dtype for p in [*ema.parameters(), *(p for p in net.parameters() if p.ndim == 1)]} == {torch.float32}

    def step(update, seed):
        for i, p in enumerate(update.parameters):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed + i)).to(p.dtype)
        return update(settings["lr"], 1.0, 0.5)

    step(one, 0), step(one, 1000)
    torch.save(one.optimizer.state_dict(), tmp_path / "optimizer.pt")
    again, again_ema = copy.deepcopy(net), copy.deepcopy(ema)
    two = sd.step.Update(sd.optim.make_optimizer(again, settings), again, again_ema, settings, 1)
    sd.checkpoints.load_optimizer(tmp_path, two.optimizer)
    for p, q in zip(one.parameters, two.parameters):
        a, b = one.optimizer.state[p], two.optimizer.state[q]
        assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)
        assert {t.dtype for t in a.values()} <= {torch.float32, torch.uint8}
    assert torch.equal(step(one, 2000), step(two, 2000))
    for a, b in zip([*net.parameters(), *ema.parameters()], [*again.parameters(), *again_ema.parameters()]):
        assert torch.equal(a, b)
    wanted, found = sd.optim.state_bytes(net, settings), 0
    for state in one.optimizer.state.values():
        found += sum(t.nbytes for t in state.values())
    assert wanted == found


# ----------------------------------------------------------------------------------------------------------------
# With fused kernels
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def large_blocks(monkeypatch):
    """Triton's interpreter takes its time by blocks."""
    if DEVICE == "cpu":
        for kind in (sd.optim.FusedStep, sd.optim.FusedStep8bit):
            monkeypatch.setattr(kind, "BLOCK", 1 << 12)


def assert_copies(weights):
    """They follow the weights. (The interpreter cuts off where a GPU rounds.)"""
    assert all(torch.allclose(p.copy_bf16.float(), p.detach().float(), rtol=2**-7, atol=0) for p in weights)


@needs_triton
@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("eight_bits", [True, False])
def test_one_pass_over_memory(eight_bits, short, large_blocks):
    """The kernel against plain torch: tensors of 8 bits and of fp32, odd sizes, channels_last, gradients in bf16 and in
    another layout, a norm that is not finite; the same bits of chance."""

    def setting():
        weights, optimizer = eight(
            (33, 130), (16, 32, 3, 3), (4097,), (5, 3), channels_last=True, eight_bits=eight_bits
        )
        if short:
            for p in weights[:2]:
                p.data = p.data.to(torch.bfloat16)
        return weights, optimizer, {p: p.detach().float().clone() for p in weights}

    (pa, plain, ea), (pb, one_pass, eb) = setting(), setting()
    step = sd.optim.FusedStep8bit(one_pass, eb, half=[] if short else pb[1:2])

    def everything():
        return [t for p in pb for t in (p, eb[p], *one_pass.state[p].values())]

    for i, lr in enumerate((1e-2, 2e-2, 5e-3)):
        for j, (p, q) in enumerate(zip(pa, pb)):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * i + j)).to(DEVICE)
            g = g.to(torch.bfloat16) if j == 1 else g
            p.grad = torch.empty_like(p).copy_(g)
            q.grad = g if p.dtype == g.dtype else g.float() if not (short and j < 2) else g.to(p.dtype)
            if j == 1 and not short:
                q.copy_bf16.gradient, q.grad = g, None
        if i == 1:
            bad = torch.tensor(math.nan, device=DEVICE)
            before = [t.clone() for t in everything()]
            step.step(lr, bad, 1.0, 0.9)
            step.skipped()
            assert all(torch.equal(a, b) for a, b in zip(before, everything()))
        norm = step.norm()
        sd.optim.set_lr(plain, lr)
        plain.step(min(1.0, 1.0 / (norm.item() + 1e-6)))
        sd.optim.update_ema(list(ea.values()), [p.detach() for p in pa], 0.9)
        step.step(lr, norm, 1.0, 0.9)
    for p, q in zip(pa, pb):
        # What lies at a border between two values of 8 bits, or of bf16, may fall to either side.
        def apart(a, b, least):
            return ((a.float() - b.float()).abs() > least).float().mean().item()

        assert apart(p, q, 1e-5 if p.dtype == torch.float32 else 0.0) < 0.01
        assert apart(ea[p], eb[q], 1e-5) < 0.01 and (ea[p] - eb[q]).abs().max() < 0.05
        a, b = plain.state[p], one_pass.state[q]
        for key in a:
            assert a[key].dtype == b[key].dtype and a[key].stride() == b[key].stride()
            if a[key].dtype == torch.uint8:
                assert (a[key].int() - b[key].int()).abs().float().mean() < 0.02, key
            else:
                assert torch.allclose(a[key], b[key], rtol=1e-2 if key.endswith("max") else 1e-4, atol=1e-7), key
    assert one_pass.param_groups[0]["steps"] == 3 == plain.param_groups[0]["steps"]
    if not short:
        assert_copies(pb[1:2])


@needs_triton
def test_one_pass_without_an_average(large_blocks):
    """--no_ema: the weights move as with one."""

    def run(averaged):
        (p,), adamw8bit = eight((70, 64))
        q = nn.Parameter(p.detach().clone())
        adamw = torch.optim.AdamW([{"params": [q], "lr_scale": 1.0}], 1.0, weight_decay=DECAY)
        for optimizer, w, kind in ((adamw8bit, p, sd.optim.FusedStep8bit), (adamw, q, sd.optim.FusedStep)):
            step = kind(optimizer, {w: w.detach().clone()} if averaged else {})
            for _ in range(2):
                w.grad = torch.ones_like(w) * 0.01
                step.step(LR, step.norm(), 1.0, 0.9)
        return p.detach(), q.detach()

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False)))


@needs_triton
@pytest.mark.parametrize(
    "name,weights", [("lion", "fp32"), ("lion", "bf16"), ("schedulefree", "fp32"), ("adamw8bit", "bf16")]
)
def test_updates_with_and_without_kernels(name, weights, large_blocks):
    """From the same gradients the same weights and averages, and copies that follow the weights."""
    words = "--optimizer", name, "--weights_dtype", weights, "--dtype", "bf16"
    found = []
    for kernels in (False, True):
        torch.manual_seed(0)
        unet = SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"], "none")
        unet.requires_grad_(False).input_blocks.requires_grad_(True)  # some, as is enough for the interpreter
        net = sd.objective.Denoiser(sd.fused.apply(unet) if kernels else unet, None)
        ema, settings = copy.deepcopy(net), settings_of(*words) | {"kernels": kernels}
        update = sd.step.Update(sd.optim.make_optimizer(net, settings), net, ema, settings, 1)
        for step in range(2):
            for i, p in enumerate(update.parameters):
                g = torch.randn(p.shape, generator=torch.Generator().manual_seed(i + 1000 * step)).bfloat16()
                if getattr(p, "copy_bf16", None) is not None:
                    p.copy_bf16.gradient = g
                else:
                    p.grad = g.to(p.dtype)
            update(1e-2, 1.0, 0.5)
            if name == "schedulefree" and step == 0:  # the first average is the first z, and no EMA moves it
                pairs = zip(net.parameters(), ema.parameters())
                assert all(torch.equal(e, update.optimizer.state[p]["z"]) for p, e in pairs if p.requires_grad)
        half = [p for p in sd.fused.multiplied(net) if p.requires_grad] if kernels else []
        assert_copies(half)
        assert len(half) > 5 or not kernels
        found.append([p.detach().float() for p in [*net.parameters(), *ema.parameters()]])
    for a, b in zip(*found):
        assert ((a - b).abs() > 1e-5).float().mean() < 0.01 and (a - b).abs().max() < 0.05


@needs_triton
@pytest.mark.parametrize("name", ["sgd", "adamw8bit"])
def test_processes_that_share_gradients_make_one_step(name, large_blocks):
    """Two with half a batch each end where one with all of it does, with the same bits in both; weights in bf16, whose
    rounding is the same in both, too."""
    settings = settings_of("--optimizer", name, *(BF16 if name == "adamw8bit" else ()))
    x = torch.randn(8, 80, generator=torch.Generator().manual_seed(0))

    def run(part, world):
        torch.manual_seed(0)
        net = sd.objective.Denoiser(nn.Linear(80, 80), None)
        start = net.unet.weight.detach().clone()
        ema, made = copy.deepcopy(net), settings | {"kernels": True}
        update = sd.step.Update(sd.optim.make_optimizer(net, made), net, ema, made, world)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=settings["dtype"] == "bf16"):
                loss = net.unet(part).float().square().sum()
            loss.backward()
            if world > 1:
                update.shared.finish()
            norm = update(0.01, 1.0, 0.5)
            sd.optim.forget_gradients(net.parameters())
        return norm, start, [p.detach() for p in net.parameters()]

    alone = run(x, 1)
    ranks = micro.fork_ranks(lambda r: pickle.dumps(run(x[4 * r : 4 * r + 4], 2)))
    file = io.BytesIO(ranks)
    one, two = pickle.load(file), pickle.load(file)
    assert all(torch.equal(a, b) for a, b in zip(one[2], two[2]))
    assert one[0] == pytest.approx(alone[0].item(), rel=0.02)
    moved = (alone[2][0].float() - alone[1]).norm()
    assert (one[2][0].float() - alone[2][0].float()).norm() < 0.15 * moved and moved > 0


# ----------------------------------------------------------------------------------------------------------------
# Through SD_Train
# ----------------------------------------------------------------------------------------------------------------

RUNS = {
    "adamw": ("--no_ema",),
    "adamw_bf16": BF16,
    "adamw8bit": (),
    "adamw8bit_bf16": (*BF16, "--no_ema"),
    "adafactor": (),
    "sgd": (),
    "lion": BF16,
    "muon": (),
    "prodigy": ("--without", "lr", "--text_lr", 1),
    "schedulefree": ("--without", "ema"),
}


@pytest.mark.parametrize("name", RUNS)
def test_resume_is_exact(name, data, tmp_path):
    """From step 3 of 5 on, with accumulation and a trained text encoder, whose groups are others."""
    more = ("--optimizer", name.split("_")[0], *RUNS[name], "--max_steps", 5, "--batch", 2, "--accumulate", 2,
            "--train_text_encoder", "--val_steps", 5, "--val_images", 2)  # fmt: skip
    if "--no_ema" in more:
        more += ("--without", "ema")
    text = train(data, tmp_path / "whole", *more)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    cut = tmp_path / "cut" / "checkpoints" / "step_00000003"
    train(data, tmp_path / "cut", *more, "--resume", cut)
    assert differences(tmp_path / "whole", tmp_path / "cut") == []
    tensors, state = contents(micro.checkpoints(tmp_path / "whole")[-1])
    assert f"optimizer: {name.split('_')[0]}, weights in {'bf16' if BF16[0] in more else 'fp32'}" in text
    loss = [row["loss"] for row in rows(tmp_path / "whole")]
    assert all(map(math.isfinite, loss)) and len(loss) == 5
    assert any(k.startswith("unet_ema") for k in tensors) == ("--no_ema" not in more)
    splits = {row["weights"] for row in rows(tmp_path / "whole", "validation.jsonl")}
    assert splits == ({"live"} if "--no_ema" in more else {"live", "ema"})
    assert {group["weight_decay"] for group in state["groups"]} == {0.0, 0.01}  # never a library's default


def test_a_model_without_average_is_its_live_weights(data, tmp_path):
    """It is painted with, opened by either name, and started from."""
    more = ("--no_ema", "--without", "ema", "--max_steps", 2, "--val_steps", 0, *BF16)
    train(data, tmp_path / "run", *more, "--sample_steps", 2)
    assert (tmp_path / "run" / "samples" / "step_00000002.png").is_file()
    checkpoint = micro.checkpoints(tmp_path / "run")[-1]
    live = sd.weights.read.open_model(checkpoint, weights="live").unet_state()[1]
    for a, b in zip(
        live.values(), sd.weights.read.open_model(tmp_path / "run", weights="ema").unet_state()[1].values()
    ):
        assert torch.equal(a, b)
    train(data, tmp_path / "next", *more, "--init_from", tmp_path / "run", "--lr", 1e-12, "--decay", 0)
    tensors = contents(micro.checkpoints(tmp_path / "next")[-1])[0]
    apart = [(tensors[f"unet.safetensors/{k}"].float() - v.float()).abs().max().item() for k, v in live.items()]
    assert max(apart) < 1e-3
    (checkpoint / "unet.safetensors").rename(checkpoint / "unet_ema.safetensors")
    assert "unet.safetensors" in sd.checkpoints.resume_problem(checkpoint)


def test_a_run_with_an_average_wants_it_on_resume(data, tmp_path):
    train(data, tmp_path / "run", "--max_steps", 1, "--val_steps", 0)
    checkpoint = micro.checkpoints(tmp_path / "run")[-1]
    manifest = sd.files.read_json(checkpoint / "manifest.json")
    del manifest["unet_ema.safetensors"]
    (checkpoint / "manifest.json").write_text(sd.checkpoints.json.dumps(manifest))
    assert "lacks unet_ema.safetensors" in sd.checkpoints.resume_problem(checkpoint)


def test_accumulation_is_a_larger_batch(data, tmp_path):
    """Gradients of micro-batches add up, and the learning rate goes by steps of the optimizer."""
    more = "--optimizer", "sgd", "--lr", 0.01, "--max_steps", 4, "--val_steps", 0, "--dtype", "fp32"
    train(data, tmp_path / "one", *more)
    train(data, tmp_path / "two", *more, "--batch", 2, "--accumulate", 2)
    for name in ("loss", "grad_norm"):
        one, two = ([row[name] for row in rows(tmp_path / run)] for run in ("one", "two"))
        assert one == pytest.approx(two, rel=1e-5)
    assert [r["lr"] for r in rows(tmp_path / "one")] == [r["lr"] for r in rows(tmp_path / "two")]


def test_what_suits_an_optimizer_where_no_flag_says_otherwise():
    assert settings_of("--optimizer", "prodigy")["lr"] == 1 and settings_of("--optimizer", "lion")["beta2"] == 0.99
    assert settings_of("--optimizer", "schedulefree")["lr_schedule"] == "constant"
    assert settings_of("--optimizer", "schedulefree", "--lr_schedule", "linear")["lr_schedule"] == "linear"
    assert settings_of()["lr"] == SD_Train.PHASES["demo"].lr and settings_of()["optimizer"] == "adamw"


@pytest.mark.parametrize(
    "more,mentions",
    [
        (["--optimizer", "prodigy", "--lr", "1e-4"], "--lr multiplies it"),
        (["--optimizer", "prodigy", "--train_text_encoder"], "add --text_lr 1"),
        (["--optimizer", "schedulefree", "--no_ema"], "drop --no_ema"),
        (["--optimizer", "schedulefree", "--ema", "0.9"], "drop --ema"),
        (["--no_ema", "--ema", "0.9"], "drop one of them"),
        (["--weights_dtype", "bf16"], "add --dtype bf16"),
        (["--lora", "2", "--no_ema", "--dry_run"], "of the adapter alone"),
        (["--lora", "2", *BF16, "--dry_run"], "those of an adapter stay in fp32"),
    ],
)
def test_flags_that_do_not_go_together(more, mentions):
    with pytest.raises(InputError, match=mentions):
        settings_of(*more)


def test_adapters_take_every_optimizer(data, tmp_path):
    """What they train is in its groups and nothing else; they go on exactly."""
    train(data, tmp_path / "base", "--max_steps", 1, "--val_steps", 0)
    for name, more in (("muon", ()), ("adafactor", ()), ("prodigy", ("--without", "lr"))):
        more = ("--optimizer", name, *more, "--max_steps", 5, "--val_steps", 5, "--val_images", 2, "--lora", 2)
        whole, cut = tmp_path / f"{name}_whole", tmp_path / f"{name}_cut"
        train(data, whole, *more, "--init_from", tmp_path / "base")
        shutil.copytree(whole, cut)
        train(data, cut, *more, "--resume", cut / "checkpoints" / "step_00000003")
        assert differences(whole, cut) == []
        state = contents(micro.checkpoints(whole)[-1])[1]
        adapters = contents(micro.checkpoints(whole)[-1])[0]
        trained = [k for k in adapters if k.startswith("lora.safetensors") and not k.endswith("alpha")]
        assert sum(len(group["params"]) for group in state["groups"]) == len(trained) > 10


def test_another_optimizer_is_refused_on_resume(data, tmp_path):
    train(data, tmp_path / "run", "--max_steps", 1, "--val_steps", 0, "--optimizer", "lion")
    text = train(data, tmp_path / "run", "--max_steps", 2, "--optimizer", "sgd", "--resume", expect=2)
    assert "cannot change on --resume" in text


# ----------------------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------------------


def fitted(gib: float, *words, begins=True, monkeypatch=None):
    args = SD_Train.parse_args(["--phase", "demo", "--model", "micro", "--fit", str(gib), *words])
    settings = SD_Train.for_device(SD_Train.resolve(args, None), CPU) | {"kernels": False}
    before, said = dict(settings), []
    sd.plan.fit(args, settings, None, None, CPU, begins, said.append)
    return {k: v for k, v in settings.items() if before[k] != v}, said


def estimate(settings, *_):
    """100 GiB, less what each change saves."""
    saved = {"no_ema": 10, "optimizer": 20, "weights_dtype": 10}
    start = {"no_ema": False, "optimizer": "adamw", "weights_dtype": "fp32"}
    peak = 100 - sum(n for name, n in saved.items() if settings[name] != start[name])
    peak -= {"none": 0, "resblocks": 10, "all": 20}[settings["grad_checkpoint"]]
    return {"peak": (peak - 20 * (1 - settings["batch"] / 32)) * 2**30 / 1.1}


CHEAPEST = [
    (105, {}),
    (95, {"no_ema": True}),
    (85, {"no_ema": True, "grad_checkpoint": "resblocks"}),
    (75, {"no_ema": True, "grad_checkpoint": "all"}),
    (55, {"no_ema": True, "grad_checkpoint": "all", "optimizer": "adamw8bit"}),
    (45, {"no_ema": True, "grad_checkpoint": "all", "optimizer": "adamw8bit", "weights_dtype": "bf16"}),
    (35, {"no_ema": True, "grad_checkpoint": "all", "optimizer": "adamw8bit", "weights_dtype": "bf16", "batch": 16,
          "accumulate": 2}),
]  # fmt: skip


@pytest.mark.parametrize("gib,wanted", CHEAPEST)
def test_fit_changes_no_more_than_needed(gib, wanted, monkeypatch):
    monkeypatch.setattr(sd.plan, "memory_estimate", estimate)
    changed, said = fitted(gib, "--dtype", "bf16")
    assert changed == wanted and len(said) == 1
    assert all(f"--{name}" in said[0] for name in wanted)


def test_fit_leaves_what_flags_ask_for_and_what_a_run_began_with(monkeypatch):
    monkeypatch.setattr(sd.plan, "memory_estimate", estimate)
    assert "no_ema" not in fitted(85, "--ema", "0.9")[0]
    assert fitted(71, "--optimizer", "lion", "--grad_checkpoint", "resblocks")[0]["no_ema"]
    assert fitted(85, begins=False)[0] == {"grad_checkpoint": "all"}  # nothing that a resume may not change
    assert "weights_dtype" not in fitted(56)[0]  # products in fp32
    with pytest.raises(InputError, match="is less than this training needs"):
        fitted(10)
    with pytest.raises(InputError, match="positive number of GiB"):
        fitted(0)


def test_memory_estimate_knows_the_optimizer():
    net = sd.objective.Denoiser(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"]), None)
    numbers = SD_Model.count_parameters(net)[1]
    matrices = sum(p.numel() for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d) for p in [m.weight])

    def parts(*words):
        return sd.plan.memory_estimate(settings_of(*words, "--dtype", "bf16"), net, None, CPU)

    plain, short = parts(), parts("--weights_dtype", "bf16", "--no_ema", "--optimizer", "adamw8bit")
    assert (plain["optimizer"], plain["weights"], plain["gradients"], plain["EMA"]) == (
        8 * numbers, 4 * numbers, 4 * numbers, 4 * numbers)  # fmt: skip
    assert short["weights"] == short["gradients"] == 4 * numbers - 2 * matrices and short["EMA"] == 0
    assert 0 < short["optimizer"] < plain["optimizer"] and short["peak"] < plain["peak"]
    assert short["activations"] < plain["activations"]  # no bf16 copies of weights are kept for the backward pass


def test_fit_through_the_program(data, tmp_path):
    """What it chose is what the run is made of, and a resume keeps to it."""
    more = ("--without", "ema", "--max_steps", 2, "--val_steps", 0, "--fit")
    text = train(data, tmp_path / "run", *more, 0.003, "--stop_at", 1)
    assert "fit 0.003 GiB: --cache_text, --no_ema" in text and "encoded once" in text
    text = train(data, tmp_path / "run", *more, 0.003, "--resume")
    assert rows(tmp_path / "run")[-1]["step"] == 2
    assert "is less than this training needs" in train(data, tmp_path / "small", *more, 1e-5, expect=2)
    assert not (tmp_path / "small").exists()


PICTURES = ("--pictures", "cat", "--init_from", "model")


def test_fit_begins_with_what_costs_no_speed(monkeypatch):
    """What is encoded first, then the rest; the EMA is put on the CPU only where it may not be left out."""
    from types import SimpleNamespace

    def other(settings, *_):
        saved = 5 * bool(settings["cache_text"]) + 3 * bool(settings["encode_first"]) + 10 * settings["ema_on_cpu"]
        return {"peak": estimate(settings)["peak"] - saved * 2**30 / 1.1}

    monkeypatch.setattr(sd.plan, "memory_estimate", other)

    def chosen(gib: float, *words, begins=True, text=True) -> dict:
        args = SD_Train.parse_args(["--phase", "finetune", "--model", "micro", "--batch", "32", "--dtype", "bf16",
                                    "--fit", str(gib), *words])  # fmt: skip
        settings = SD_Train.for_device(SD_Train.resolve(args, None), CPU) | {"kernels": False}
        before, said = dict(settings), []
        sd.plan.fit(args, settings, None, SimpleNamespace() if text else None, CPU, begins, said.append)
        changed = {k: v for k, v in settings.items() if before[k] != v}
        assert all(f"--{name}" in said[0] for name in changed)
        return changed

    first, both = {"cache_text": True}, {"cache_text": True, "encode_first": True}
    assert chosen(105, *PICTURES) == {}
    assert chosen(100, *PICTURES) == first  # 95 and 4.x of room
    assert chosen(97, *PICTURES) == both
    assert chosen(88, *PICTURES) == both | {"no_ema": True}
    assert chosen(78, *PICTURES) == both | {"no_ema": True, "grad_checkpoint": "resblocks"}
    assert chosen(97, *PICTURES, "--flip") == first | {"no_ema": True}  # cut anew: the VAE stays
    assert chosen(100, *PICTURES, "--no_cache_text") == {"encode_first": True, "no_ema": True}
    assert "cache_text" not in chosen(85, *PICTURES, "--no_cache_text")
    assert "encode_first" not in chosen(85, *PICTURES, "--no_encode_first")
    assert "encode_first" not in chosen(85, "--init_from", "model")  # latents on disk
    assert "cache_text" not in chosen(85, *PICTURES, text=False)
    assert "cache_text" not in chosen(75, *PICTURES, "--train_text_encoder")
    kept = both | {"grad_checkpoint": "all", "optimizer": "adamw8bit", "weights_dtype": "bf16"}
    assert chosen(47, *PICTURES, "--ema", "0.99") == kept
    assert chosen(41, *PICTURES, "--ema", "0.99") == kept | {"ema_on_cpu": True}
    assert chosen(67, *PICTURES, begins=False) == both | {"grad_checkpoint": "all", "ema_on_cpu": True}


def test_the_estimate_knows_what_is_off_the_device():
    net = sd.objective.Denoiser(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"]), None)
    numbers = SD_Model.count_parameters(net)[1]

    def parts(**changes):
        return sd.plan.memory_estimate(settings_of() | changes, net, None, CPU)

    plain, far = parts(), parts(ema_on_cpu=True)
    assert plain["EMA"] - far["EMA"] == plain["peak"] - far["peak"] == 4 * numbers and far["EMA"] == 0
    online, first = parts(pictures="cat"), parts(pictures="cat", encode_first=True)
    vae = SD_Model.count_parameters(SD_Model.VAE(SD_Model.PRESETS["micro"]["vae"]))[1]
    assert online["VAE"] == 4 * vae + 5 * 8 * 8 * 8 * 4  # 8 channels at an eighth of 64 pixels a side, fp32
    assert first["VAE"] == plain["VAE"] == 0 and online["peak"] - first["peak"] == online["VAE"]


def test_an_average_on_the_cpu_is_the_same_average(data, tmp_path):
    """In the checkpoints, bit for bit; validation and grids take the live weights; and a resume may change over."""
    more = ("--max_steps", 6, "--without", "save_steps", "--save_steps", 6)
    train(data, tmp_path / "near", *more)
    train(data, tmp_path / "far", *more, "--ema_on_cpu")
    (near, _), (far, _) = (micro.contents(micro.checkpoints(tmp_path / n)[-1]) for n in ("near", "far"))
    assert near.keys() == far.keys() and all(torch.equal(near[name], far[name]) for name in near)
    assert any("unet_ema" in name for name in near)
    told = [{row["weights"] for row in rows(tmp_path / n, "validation.jsonl")} for n in ("near", "far")]
    assert told == [{"live", "ema"}, {"live"}]
    train(data, tmp_path / "cut", *more, "--ema_on_cpu", "--stop_at", 3)
    train(data, tmp_path / "cut", *more, "--optimizer", "adamw", "--resume")
    cut, _ = micro.contents(micro.checkpoints(tmp_path / "cut")[-1])
    assert all(torch.equal(near[name], cut[name]) for name in near)


@needs_triton
@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_an_average_on_the_cpu_beside_kernels(name, large_blocks):
    """It moves as the one that the optimizer's pass has, after the weights; a skipped step moves neither."""
    found = []
    for far in (False, True):
        torch.manual_seed(0)
        net = sd.objective.Denoiser(nn.Linear(80, 80), None)
        ema = copy.deepcopy(net)
        settings = settings_of("--optimizer", name, *(["--ema_on_cpu"] if far else [])) | {"kernels": True}
        update = sd.step.Update(sd.optim.make_optimizer(net, settings), net, ema, settings, 1)
        for step in range(3):
            for i, p in enumerate(update.parameters):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(i + 10 * step))
                p.grad += math.nan if step == 1 else 0
            if not math.isfinite(update(1e-2, 1.0, 0.5)):
                update.skipped()
        found.append([p.detach().clone() for p in [*net.parameters(), *ema.parameters()]])
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(*found))
    assert all(torch.isfinite(a).all() for a in found[1]) and not torch.equal(found[1][0], found[1][2])


def test_far_averages_keep_to_the_layout():
    live = [torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last), torch.randn(5)]
    near = [torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last), torch.randn(5)]
    far = [e.clone() for e in near]
    sd.optim.update_ema(near, live, 0.9)
    sd.optim.FarAverage(far, live).update(0.9)
    assert all(torch.equal(a, b) for a, b in zip(near, far))
    short = [p.bfloat16() for p in live]
    sd.optim.update_ema(near, short, 0.9)
    sd.optim.FarAverage(far, short).update(0.9)
    assert all(torch.equal(a, b) for a, b in zip(near, far))


@pytest.mark.parametrize(
    "more, reason",
    [
        (("--no_ema",), "--ema_on_cpu is of an EMA, and --no_ema has none"),
        (("--optimizer", "schedulefree"), "--optimizer schedulefree has none"),
    ],
)
def test_an_average_on_the_cpu_wants_an_average(more, reason, data, tmp_path):
    assert reason in train(data, tmp_path / "run", "--without", "ema", "--ema_on_cpu", *more, expect=2)
