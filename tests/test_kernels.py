"""The fused network (sd/kernels.py, fused_ops.py, fused.py), the optimizer's pass and shared gradients against the
plain network: on CPU through Triton's interpreter, on an NVIDIA GPU as they run there."""

import contextvars
import copy
import io
import os
import pickle
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import micro
from binding import rebind

import sd.fused
import sd.fused_ops
import sd.kernels
import sd.optim
import sd.parallel
import SD_Model as M

pytestmark = pytest.mark.skipif(sd.kernels.triton is None, reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cudnn.allow_tf32 = False


def randn(*shape, seed=0, scale=1.0, shift=0.0):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale + shift
    return x.to(DEVICE).requires_grad_()


def gradients(function, inputs):
    """Outputs, and the gradients of a random weighting of them."""
    outputs = function(*inputs)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    loss = sum((o * randn(*o.shape, seed=100 + i).detach()).sum() for i, o in enumerate(outputs))
    return [*outputs, *torch.autograd.grad(loss, inputs)]


def assert_same(fused, plain, inputs, tolerance=2e-5):
    for i, (a, b) in enumerate(zip(gradients(fused, inputs), gradients(plain, inputs), strict=True)):
        assert a.shape == b.shape
        error = (a - b).abs().max() / b.abs().max()
        assert error < tolerance, f"output or gradient {i}: {error:.2g} of the largest"


def norm_of(kind, *args, **kwargs):
    norm = kind(*args, **kwargs).to(DEVICE)
    with torch.no_grad():
        norm.weight.copy_(randn(*norm.weight.shape, seed=7))
        norm.bias.copy_(randn(*norm.bias.shape, seed=8))
    return norm


def functional(norm, x, w, b):
    if isinstance(norm, nn.GroupNorm):
        return F.group_norm(x, norm.num_groups, w, b, norm.eps)
    return F.layer_norm(x, (x.shape[-1],), w, b, norm.eps)


def stand_in(norm, w, b):
    """A norm whose weights are the given tensors, so that gradients reach them."""
    double = copy.copy(norm)
    double._parameters = {}
    double.weight, double.bias = w, b
    return double


# Channels per group that are no power of two, pixels that fill no tile, several tiles, three pixels.
@pytest.mark.parametrize(
    "shape,groups", [((2, 96, 5, 7), 8), ((1, 320, 13, 11), 32), ((3, 8, 1, 3), 4), ((1, 8, 70, 70), 4)]
)
@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize("given", ["x", "skip", "e"])
def test_group_norm(shape, groups, silu, given):
    B, C, H, W = shape
    norm = norm_of(nn.GroupNorm, groups, C, eps=1e-5)
    # A mean far from zero: E[x^2] - E[x]^2 in fp32 would lose the variance.
    x = randn(B, C - C // 4 if given == "skip" else C, H, W, shift=10.0)
    more = {"x": [], "skip": [randn(B, C // 4, H, W, seed=1)], "e": [randn(B, C, seed=2)]}[given]
    w, b = norm.weight.detach().clone().requires_grad_(), norm.bias.detach().clone().requires_grad_()

    def fused(x, w, b, *more):
        return sd.fused_ops.group_norm(x, stand_in(norm, w, b), silu, **({given: more[0]} if more else {}))[
            given == "e" :
        ]

    def plain(x, w, b, *more):
        if given == "skip":
            x = torch.cat([x, more[0]], dim=1)
        y = functional(norm, x + more[0][:, :, None, None] if given == "e" else x, w, b)
        y = F.silu(y) if silu else y
        return (y,) if given == "e" else (x, y)

    assert_same(fused, plain, [x, w, b, *more], 3e-4)


def test_group_norm_of_many_tiles(monkeypatch):
    """Over 64, which are put together in blocks."""
    monkeypatch.setattr(sd.fused_ops, "BLOCK_R", 2)
    test_group_norm((1, 8, 10, 15), 4, True, "x")


@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 77, 40), (5, 9, 320)])
@pytest.mark.parametrize("residual", [True, False])
def test_add_layer_norm(shape, residual):
    C = shape[-1]
    norm = norm_of(nn.LayerNorm, C)
    w, b = norm.weight.detach().clone().requires_grad_(), norm.bias.detach().clone().requires_grad_()
    inputs = [randn(*shape), randn(C, seed=1), w, b] + ([randn(*shape, seed=2)] if residual else [])

    def fused(a, ab, w, b, res=None):
        return sd.fused_ops.add_layer_norm(a, ab, res, stand_in(norm, w, b))

    def plain(a, ab, w, b, res=0.0):
        h = a + ab + res
        return h, functional(norm, h, w, b)

    assert_same(fused, plain, inputs)


@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 77, 80), (3, 50, 2 * 320)])
def test_geglu(shape):
    def plain(u, b):
        value, gate = (u + b).chunk(2, dim=-1)
        return value * F.gelu(gate)

    assert_same(sd.fused_ops.geglu, plain, [randn(*shape, scale=2), randn(shape[-1], seed=1)])


@pytest.mark.parametrize("rows, inputs, channels, fast", [(300, 128, 256, False), (77, 64, 128, True)])
def test_product_and_geglu_as_one_kernel(rows, inputs, channels, fast):
    """More tiles than programs, and a tile that is not full; gates far on either side. On a GPU in bf16."""
    if fast and DEVICE == "cpu":
        pytest.skip("the interpreter has no inline assembly")
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    if DEVICE == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("wants a Hopper GPU or later")
    x, w = randn(rows, inputs, scale=2).detach().to(dtype), randn(2 * channels, inputs, seed=1).detach().to(dtype) / 4
    b = randn(2 * channels, seed=2).detach()
    value, gate = (x.double() @ w.double().t() + b.double()).chunk(2, dim=-1)
    expected = value * F.gelu(gate)
    error = (sd.fused_ops._linear_geglu(x, w, b, fast).double() - expected).abs()
    relative = 2**-8 if dtype == torch.bfloat16 else 1e-5
    assert (error <= relative * expected.abs() + 1e-5 * value.abs().max()).all()
    assert (gate < -4).any() and (gate > 4).any()


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_softmax(scale):
    x = randn(3, 5, 300, scale=30).detach()
    y = sd.fused_ops.softmax(x, scale, torch.float32)
    assert torch.allclose(y, torch.softmax(scale * x, -1), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("at_once", [1 << 28, 2 * 30 * 30])
def test_attention_of_the_vae(at_once, monkeypatch):
    """All pictures at once, and in parts of two of three."""
    monkeypatch.setattr(sd.fused.FusedVAEAttention, "SCORES", at_once)
    torch.manual_seed(0)
    plain = M.VAEAttention(32, 8).to(DEVICE).requires_grad_(False)
    fused = copy.deepcopy(plain)
    fused.__class__, fused.norm.__class__ = sd.fused.FusedVAEAttention, sd.fused.FusedGroupNorm
    x = randn(3, 32, 5, 6, scale=3).detach()
    with torch.no_grad():
        assert torch.allclose(fused(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 700, 80)])
@pytest.mark.parametrize("residual", [True, False])
def test_add_bias(shape, residual):
    inputs = [randn(*shape), randn(shape[-1], seed=2)] + ([randn(*shape, seed=1)] if residual else [])
    assert_same(lambda a, b, r=None: sd.fused_ops.add_bias(a, r, b), lambda a, b, r=0.0: a + r + b, inputs)


def test_add_bias_of_feature_maps():
    inputs = [randn(2, 24, 5, 3), randn(2, 24, 5, 3, seed=1), randn(24, seed=2)]
    assert_same(sd.fused_ops.add_bias, lambda a, r, b: a + r + b[:, None, None], inputs)


@pytest.mark.parametrize("shape", [(2, 24, 5, 3), (1, 8, 70, 9), (3, 96, 13, 11)])
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_group_norm_takes_the_moments_of_add_bias(shape, residual, dtype, monkeypatch):
    """The norm that follows gives the same bits as one that reads the feature map itself, and does not read it."""
    C = shape[1]
    norm = norm_of(nn.GroupNorm, 8, C)
    a, res, bias = randn(*shape, shift=10).to(dtype), randn(*shape, seed=1).to(dtype), randn(C, seed=2)
    y = sd.fused_ops.add_bias(a.detach(), res if residual else None, bias.detach())
    fresh = sd.fused_ops.group_norm(y.detach().clone(), norm, silu=True)
    launch = sd.kernels.launch
    noted = lambda kernel, *args, **more: launch(kernel, *args, **more) or names.append(kernel)  # noqa: E731
    rebind(sd.kernels, "launch", noted, monkeypatch.setattr)
    names = []
    taken = sd.fused_ops.group_norm(y, norm, silu=True)
    assert len(names) == 2 and sd.kernels._gn_moments not in names
    assert all(torch.equal(*pair) for pair in zip(fresh, taken))


@pytest.fixture
def large_tiles(monkeypatch):
    """The interpreter's time goes by tiles; a GPU keeps its own."""
    if DEVICE == "cpu":
        monkeypatch.setattr(sd.fused_ops, "BLOCK_R", 256)
        monkeypatch.setattr(sd.optim.FusedStep, "BLOCK", 1 << 13)


def random_unet(*channels):
    torch.manual_seed(0)
    unet = M.UNet(M.UNetConfig(channels=channels, attention=(True,) * len(channels), num_res_blocks=1, num_heads=2,
                               context_dim=24, norm_groups=8), zero_init="none")  # fmt: skip
    for p in unet.parameters():
        nn.init.normal_(p, std=0.2 if p.ndim > 1 else 0.5)
    return unet.to(DEVICE)


def test_a_settled_network_joins_its_weights_once(large_tiles, monkeypatch):
    """The same bits; from the second pass on no weights are joined."""
    unet = sd.fused.apply(random_unet(32))
    inputs = randn(1, 4, 7, 5).detach(), torch.tensor([10], device=DEVICE), randn(1, 3, 24, seed=1).detach()
    with torch.no_grad():
        fresh = unet(*inputs)
        sd.fused.settle(unet)
        first = unet(*inputs)
        joined, cat = [], torch.cat
        monkeypatch.setattr(torch, "cat", lambda *args, **more: joined.append(args) or cat(*args, **more))
        assert torch.equal(first, fresh) and torch.equal(unet(*inputs), fresh)
    assert len(joined) == 1  # the timesteps' cosines and sines
    assert not any("kept" in name for name in unet.state_dict())


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_whole_network(checkpointed, large_tiles):
    """Output and every gradient, at a size with odd halves; state dict and a deep copy unchanged."""
    plain = random_unet(*((32,) if checkpointed else (32, 64)))
    fused = sd.fused.apply(copy.deepcopy(plain))
    assert [type(m).__name__ for m in (fused, fused.middle_block[0])] == ["FusedUNet", "FusedResBlock"]
    assert fused.state_dict().keys() == plain.state_dict().keys()
    fused = copy.deepcopy(fused)
    fused.set_grad_checkpoint("all" if checkpointed else "none")
    x, context = randn(2, 4, 7, 5), randn(2, 11, 24, seed=1)
    t = torch.tensor([3, 900], device=DEVICE)
    inputs = [x, context, *plain.parameters()]
    of_plain = gradients(lambda x, c, *_: plain(x, t, c), inputs)
    of_fused = gradients(lambda x, c, *_: fused(x, t, c), [x, context, *fused.parameters()])
    names = ["output", "latents", "context", *(n for n, _ in plain.named_parameters())]
    for name, a, b in zip(names, of_fused, of_plain, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() < 2e-3 * b.abs().max() + 1e-6, name


def test_what_keeps_the_plain_network():
    dropping = M.UNet(M.UNetConfig(channels=(32,), attention=(False,), num_heads=2, norm_groups=8, dropout=0.1))
    assert type(sd.fused.apply(dropping)) is M.UNet
    assert not sd.kernels.available(torch.device("cpu"))
    assert not sd.kernels.available(torch.device("mps"))


def test_optimizer_step():
    """Three steps against torch's clip_grad_norm_, AdamW and lerp: two groups, odd sizes, channels_last, a state that
    is carried on."""

    def setting():
        params = [nn.Parameter(randn(*s, seed=i).detach()) for i, s in enumerate([(33, 7), (5, 3, 3, 3), (4097,)])]
        params[1].data = params[1].data.contiguous(memory_format=torch.channels_last)
        groups = [{"params": params[:2], "weight_decay": 0.1, "lr_scale": 1.0},
                  {"params": params[2:], "weight_decay": 0.0, "lr_scale": 0.5}]  # fmt: skip
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.99), fused=DEVICE == "cuda")
        return params, optimizer, [p.detach().clone() for p in params]

    (pa, oa, ea), (pb, ob, eb) = setting(), setting()
    step = sd.optim.FusedStep(ob, dict(zip(pb, eb)))
    for i, lr in enumerate((1e-2, 2e-2, 5e-3)):
        if i == 2:
            step = sd.optim.FusedStep(ob, dict(zip(pb, eb)))
        for p, q in zip(pa, pb):
            p.grad = torch.empty_like(p).copy_(randn(*p.shape, seed=10 + i).detach())  # in the weight's layout
            q.grad = p.grad.clone()
        if i == 1:  # another layout, and an address that no vector load may start at
            pb[1].grad = pb[1].grad.contiguous()
            pb[2].grad = torch.cat([pb[2].grad[:1], pb[2].grad])[1:]
        norm = nn.utils.clip_grad_norm_(pa, 1.0)
        for group in oa.param_groups:
            group["lr"] = lr * group["lr_scale"]
        oa.step()
        torch._foreach_lerp_(ea, [p.detach() for p in pa], 0.1)
        found = step.norm()
        assert torch.allclose(found, norm)
        step.step(lr, found, 1.0, 0.9)
    for name, a, b in [*(("weights", *z) for z in zip(pa, pb)), *(("averages", *z) for z in zip(ea, eb))]:
        assert (a - b).abs().max() < 1e-6, name
    for p, q in zip(pa, pb):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.allclose(oa.state[p][key], ob.state[q][key], rtol=1e-5, atol=1e-9), key


def test_a_step_without_a_finite_norm_changes_nothing():
    p = nn.Parameter(randn(5000).detach())
    optimizer = torch.optim.AdamW([{"params": [p], "lr_scale": 1.0}], lr=1.0)
    average = p.detach().clone()
    step = sd.optim.FusedStep(optimizer, {p: average})
    for bad in (float("nan"), float("inf")):
        p.grad = torch.ones_like(p)
        p.grad[17] = bad
        before = [p.detach().clone(), average.clone(), *(optimizer.state[p][k].clone() for k in ("exp_avg", "step"))]
        step.step(0.1, step.norm(), 1.0, 0.9)
        step.skipped()
        after = [p, average, optimizer.state[p]["exp_avg"], optimizer.state[p]["step"]]
        assert all(torch.equal(a, b) for a, b in zip(before, after))
    p.grad = torch.ones_like(p)
    step.step(0.1, step.norm(), 1.0, 0.9)
    assert step.done == 1 == optimizer.state[p]["step"] and not torch.equal(p, before[0])


def test_bf16_copies_of_weights(large_tiles):
    """Products take the copies, which follow the weights; gradients come in bf16, and only there. They are
    as close to those in fp32 as plain autocast's are (the interpreter cuts bf16 off where a GPU rounds: half as close).
    """
    plain, fused = random_unet(32, 64), sd.fused.apply(random_unet(32, 64))
    x, context, t = randn(2, 4, 8, 8), randn(2, 11, 24, seed=1), torch.tensor([3, 900], device=DEVICE)
    groups = [{"params": list(fused.parameters()), "lr_scale": 1.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)
    halves = sd.fused.multiplied(fused)
    assert len(halves) == len(set(halves))
    assert sum(p.numel() for p in halves) > 0.8 * sum(p.numel() for p in fused.parameters())
    step = sd.optim.FusedStep(optimizer, {p: p.detach().clone() for p in fused.parameters()}, halves)

    def run(net, autocast):
        sd.optim.forget_gradients(net.parameters())
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            y = net(x, t, context)
        (y.float() * x.detach()).sum().backward()
        return [p.grad for p in net.parameters()]

    for _ in range(2 if DEVICE == "cuda" else 1):
        plain.load_state_dict(fused.state_dict())
        exact, rounded = run(plain, False), run(plain, True)
        run(fused, True)
        found = step.gradients()
        assert [g.dtype == torch.bfloat16 for g in found] == [p in set(halves) for p in fused.parameters()]
        assert all(p.grad is None for p in halves)
        assert all(torch.allclose(p.copy_bf16.float(), p.detach(), rtol=2**-7, atol=0) for p in halves)
        errors = [
            [((g.float() - e).norm() / e.norm()).item() for g, e in zip(grads, exact)] for grads in (found, rounded)
        ]
        # Not the sum: after a step, gradients of a few q and k are all noise, whichever way they are rounded.
        kernels, autocast = (statistics.geometric_mean(e) for e in errors)
        assert kernels < (1.1 if DEVICE == "cuda" else 2.5) * autocast
        step.step(1e-2, step.norm(), 1.0, 0.9)
    assert all(
        (p.copy_bf16.float() - q).abs().max() > 1e-3
        for p, q in zip(halves, sd.fused.multiplied(sd.fused.apply(random_unet(32, 64))))
    )


def test_kernels_are_compiled_ahead_as_they_are_launched(large_tiles, monkeypatch, capsys):
    """A pass of compile_ahead() launches none, and asks for every variant that a real pass launches, and no other; in
    Triton's mode also where another thread launches, as autograd's does on a GPU."""
    fused = sd.fused.apply(random_unet(32, 64))
    x, context, t = randn(2, 4, 8, 8), randn(2, 11, 24, seed=1), torch.tensor([3, 900], device=DEVICE)
    kind, asked, compiled = type(sd.kernels._add_bias), [], []
    run = kind.run

    def variant(kernel, args, constants):
        kinds = [(a.dtype, a.data_ptr() % 16 == 0) if isinstance(a, torch.Tensor) else a for a in args]
        return kernel.fn.__name__, tuple(kinds), tuple(sorted(constants.items()))

    def noted(self, *args, grid, warmup, **constants):
        (compiled if warmup else asked).append(variant(self, args, constants))
        return None if warmup else run(self, *args, grid=grid, warmup=warmup, **constants)

    active, seen = contextvars.ContextVar("active", default=False), []

    class Mode:
        def __init__(self, pool):
            assert pool._max_workers >= 1

        def __enter__(self):
            self.before = active.set(True)

        def __exit__(self, *_):
            active.reset(self.before)

    def warmed(self, *args, grid, **constants):
        seen.append(active.get())
        compiled.append(variant(self, args, constants))

    def step():
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = fused(x, t, context).float().sum()
            with ThreadPoolExecutor(1) as other:
                other.submit(loss.backward).result()

    monkeypatch.setattr(kind, "run", noted)
    monkeypatch.setattr(kind, "warmup", warmed)
    monkeypatch.setattr(sd.kernels.triton, "AsyncCompileMode", Mode)
    sd.kernels.compile_ahead(step)
    assert not asked and len(compiled) > 50 and all(seen)
    step()
    assert set(asked) == set(compiled)
    monkeypatch.setattr(Mode, "__exit__", lambda *_: 1 / 0)  # as where a kernel does not compile
    torch.manual_seed(5)
    sd.kernels.compile_ahead(lambda: torch.rand(3, device=DEVICE))
    assert sd.kernels._compiling is None and not active.get()
    assert "one after another (division by zero)" in capsys.readouterr().out
    drawn = torch.rand(3, device=DEVICE)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(3, device=DEVICE))


class TwoProducts(nn.Module):
    """A convolution with a bf16 copy and a product without."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = nn.Conv2d(3, 5, 3), nn.Linear(5, 2)

    def forward(self, x):
        h = nn.functional.conv2d(x.bfloat16(), sd.fused_ops.weight_of(self.conv)).float()
        return self.out(h.mean((2, 3)) + self.conv.bias)


def stand_in_for_peers(monkeypatch, possible: bool):
    for owner, name, value in micro.peer_memory(possible):
        monkeypatch.setattr(owner, name, value)


@pytest.mark.parametrize("fault", ["no memory", "not reached", "wrong sums"])
@pytest.mark.skipif(DEVICE == "cuda", reason="its processes have no GPU each")
def test_copies_that_fail_in_one_process_leave_all_to_an_all_reduce(fault, monkeypatch):
    stand_in_for_peers(monkeypatch, True)
    add_parts, connect = sd.kernels._add_parts, sd.parallel._symmetric_handle

    def fail(*args):
        raise RuntimeError("")

    def connected(memory):
        handle = connect(memory)
        return fail() if torch.distributed.get_rank() else handle

    class Wrong:
        def __getitem__(self, grid):
            return lambda own, others, total, *more, **constants: add_parts[grid](own, own, total, *more, **constants)

    def rank(r):
        if fault == "no memory" and r == 1:
            sd.parallel._symmetric_empty = fail
        if fault == "not reached":
            sd.parallel._symmetric_handle = connected
        if fault == "wrong sums" and r == 1:
            sd.kernels._add_parts = Wrong()
        torch.manual_seed(0)
        net = nn.Linear(5, 3)
        shared = sd.parallel.SharedGradients(list(net.parameters()), torch.float32)
        for _ in range(2):
            net(torch.full((1, 5), 1.0 + r)).square().sum().backward()
            shared.finish()
        total = torch.cat([v.flatten() for v in shared.sums])
        return pickle.dumps((type(shared.way).__name__, total.tolist()))

    found = io.BytesIO(micro.fork_ranks(rank))
    (way, first), (other_way, second) = pickle.load(found), pickle.load(found)
    assert way == other_way == "AllReduce" and first == second and any(first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world, count, copies", [(2, 3, False), (2, 3, True), (3, 1, True)])
@pytest.mark.skipif(DEVICE == "cuda", reason="its processes have no GPU each")
def test_processes_share_gradients(world, count, copies, dtype, monkeypatch):
    """gloo processes with other weights at first, several passes each or one, whose gradients come in fp32 or partly in
    bf16: the moments that the sums of all passes' gradients make, three steps long, then the weights and averages of a
    step; whether all weights are one bucket or each its own, by an all-reduce and by copies of the others' memory.
    With copies, each process updates a part of the convolution's weights, cut within a weight."""
    stand_in_for_peers(monkeypatch, copies)
    monkeypatch.setattr(sd.parallel.PeerCopies, "BLOCK", 16)

    def passes(rank):
        return [randn(4, 3, 6, 6, seed=10 * rank + i, scale=2.0).detach().cpu() for i in range(count)]

    def setting(seed, shared):
        torch.manual_seed(seed)
        net = TwoProducts().to(memory_format=torch.channels_last)
        shared = sd.parallel.SharedGradients(list(net.parameters()), dtype, [net.conv.weight]) if shared else None
        optimizer = torch.optim.AdamW([{"params": list(net.parameters()), "lr_scale": 1.0}], weight_decay=0.1)
        averages = {p: p.detach().clone() for p in net.parameters()}
        return net, shared, sd.optim.FusedStep(optimizer, averages, [net.conv.weight], not shared or count > 1, shared)

    def update(net, step, lr):
        """Moments, norm, weights, averages and bf16 copies afterwards, and how many weights were changed right away."""
        before, norm = net.conv.weight.detach().clone(), step.norm()
        assert torch.allclose(net.conv.weight.copy_bf16.float(), before, rtol=2**-7, atol=0)
        step.step(lr, norm, 1e9, 0.9)
        changed = int((net.conv.weight != before).sum())
        step.complete()
        kinds = list(zip(*(step._tensors(p) for p in step.parameters)))
        weights, first, second, averages = (torch.cat([t.flatten() for t in kind]) for kind in kinds)
        copy = net.conv.weight.copy_bf16
        assert torch.allclose(copy.float(), net.conv.weight.detach(), rtol=2**-7, atol=0)
        sd.optim.forget_gradients(net.parameters())
        return [x.tolist() for x in (first, second, norm[None], weights, averages, copy.float().flatten())], changed

    def rank(r):
        found, owned = [], []
        for sd.parallel.AllReduce.BUCKET in (1 << 20, 0):
            sd.parallel.PeerCopies.BUCKET = sd.parallel.AllReduce.BUCKET
            net, shared, step = setting(r, True)
            for n in range(4):
                if n == 1 and len(shared.buckets) == 1:  # a pass that breaks off
                    shared.arrived(net.out.weight)
                    shared.reset()
                for i, x in enumerate(passes(r)):
                    shared.last = i == count - 1
                    net(x).square().sum().backward()
                shared.finish()
                values, changed = update(net, step, 0.0 if n < 3 else 0.1)
                found.append(values)
            owned.append((changed, len(shared.buckets)))
        assert type(shared.way) is (sd.parallel.PeerCopies if copies else sd.parallel.AllReduce)
        return pickle.dumps((found, owned))

    shown = io.BytesIO(micro.fork_ranks(rank, world))
    ranks = [pickle.load(shown) for _ in range(world)]
    net, _, step = setting(0, False)
    expected = []
    for n in range(4):
        for r in range(world):
            for x in passes(r):
                net(x).square().sum().backward()
        assert step.gradients()[0].dtype == torch.float32 and net.conv.weight.grad is None
        expected.append(update(net, step, 0.0 if n < 3 else 0.1)[0])
    for found, owned in ranks:
        assert found == ranks[0][0]  # to the bit
        assert [buckets for _, buckets in owned] == [2 if copies else 1, 4]
        for i, values in enumerate(found):
            pairs = [(torch.tensor(a), torch.tensor(b)) for a, b in zip(values, expected[i % 4], strict=True)]
            errors = [((a - b).norm() / b.norm()).item() for a, b in pairs]
            moved = i % 4 == 3  # a step moves a number whose gradient is nearly 0 either way
            if dtype == torch.float32:
                assert max(errors) < (1e-5 if moved else 1e-6), (i, errors)
            else:
                assert max(errors) < (0.1 if moved else 1e-2) and errors[0] > 1e-4, (i, errors)
    for way in range(2):
        parts = [owned[way][0] for _, owned in ranks]
        weights = net.conv.weight.numel()
        assert sum(parts) == weights and min(parts) > 20 if copies else parts == [weights] * world


def test_every_kernel_compiles_for_a_gpu():
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(Path(__file__).parent.parent)}
    script = Path(__file__).parent / "compile_kernels.py"
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"_gn_dx", "_ln_backward", "_geglu_backward", "_adamw", "_pack"} <= set(done.stdout.split())
