"""sd/lora.py: adapters beside frozen weights: which layers have them, that they train as the mathematics says, that
nothing else changes, and that runs of them stop, go on, paint and refuse as others do."""

import copy
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import micro
from binding import rebind
from conftest import randomise

import sd.device
import sd.errors
import sd.fused
import sd.fused_ops
import sd.kernels
import sd.lora
import sd.objective
import sd.optim
import sd.plan
import sd.setup
import sd.step
import sd.weights.read
import SD_Convert
import SD_Model as M
import SD_Train

CPU = torch.device("cpu")
TEXT = M.PRESETS["micro"]["text"]


def settings_of(*more, phase="demo") -> dict:
    words = ["--phase", phase, "--model", "micro", "--lora", 4, "--dry_run", *more]
    return SD_Train.resolve(SD_Train.parse_args([str(w) for w in words]), None)


def text_encoder() -> M.TextEncoder:
    return M.TextEncoder.new(TEXT, micro.make_tokenizer())


def micro_unet(seed=1) -> M.UNet:
    return randomise(M.UNet(M.PRESETS["micro"]["unet"], "none"), seed)


def denoiser_of(settings, unet=None, text=None, up=0.0) -> sd.objective.Denoiser:
    """With adapters on the same random base each time; up: their standard deviation, instead of zero."""
    settings = settings | {"train_text_encoder": text is not None}
    denoiser = sd.setup.make_denoiser(unet or micro_unet(), text, settings)
    draw = torch.Generator().manual_seed(3)
    for a in denoiser.adapters.values() if up else ():
        a.up.weight.data.normal_(std=up, generator=draw)
    return denoiser


def inputs(text=False, batch=2):
    draw = torch.Generator().manual_seed(5)
    context = torch.randint(0, 200, (batch, 12), generator=draw) if text else torch.randn(batch, 7, 16, generator=draw)
    return torch.randn(batch, 4, 8, 8, generator=draw), torch.tensor([3, 900])[:batch], context


def losses(net, x, t, context) -> torch.Tensor:
    return F.mse_loss(net(x, t, context).float(), torch.linspace(-1, 1, x.numel()).view_as(x))


# ----------------------------------------------------------------------------------------------------------------
# Layers
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def full_size():
    """The UNet and text encoder of SD 1.5, without memory."""
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        return M.UNet(), CLIPTextModel(
            CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        )


@pytest.mark.parametrize(
    "which, conv, layers, per_rank",
    [("attention", False, 128, 199_296), ("transformer", False, 192, 423_936), ("all", True, 278, 423_936 + 626_880)],
)
def test_layers_and_parameters_of_the_full_unet(full_size, which, conv, layers, per_rank):
    unet, _ = full_size
    names = sd.lora.targets(unet, which, conv)
    assert len(names) == len(set(names)) == layers
    for rank in (1, 16):
        adapters = [sd.lora.LowRank(unet.get_submodule(n), rank, rank) for n in names]
        assert sum(p.numel() for a in adapters for p in a.parameters()) == per_rank * rank
    never = ("time_embed", "input_blocks.0.0", "out.", "norm", "in_layers.0", "out_layers.0")
    assert not [n for n in names if n.startswith(never[:3]) or any(part in n for part in never[3:])]
    # A list of its own each time: what a first network does with it, a second does not see.
    names.clear()
    assert len(sd.lora.targets(unet, which, conv)) == layers


def test_layers_and_parameters_of_the_text_encoder(full_size):
    _, text = full_size
    names = sd.lora.targets(text, "transformer", False)
    assert len(names) == 72 and len(sd.lora.targets(text, "attention", False)) == 48
    assert "encoder.layers.11.self_attn.out_proj" in names and "encoder.layers.0.mlp.fc1" in names
    adapters = [sd.lora.LowRank(text.get_submodule(n), 1, 1) for n in names]
    assert sum(p.numel() for a in adapters for p in a.parameters()) == 165_888


def test_shapes_names_and_beginning():
    """3x3 convolutions have the conv rank, the kernel, stride and padding of theirs; all else the plain rank; one scale
    for all. down is uniform within 1 / sqrt(fan in), up zero; other seeds draw others."""
    settings = settings_of("--lora_targets", "all", "--lora_conv", 2, "--lora_alpha", 8)
    unet = M.UNet(M.UNetConfig(channels=(16, 32), attention=(True, True), num_res_blocks=1, num_heads=2, context_dim=16,
                               norm_groups=4))  # fmt: skip
    denoiser = denoiser_of(settings, unet)
    found = sd.lora.adapters_of(denoiser)
    name = "unet.input_blocks.1.1.transformer_blocks.0.attn1.to_q"
    assert found[name].down.shape == (4, 16) and found[name].up.shape == (16, 4) and found[name].alpha == 8
    conv, strided, shortcut = (f"unet.{n}" for n in ("input_blocks.1.0.in_layers.2", "input_blocks.2.0.op",
                               "input_blocks.3.0.skip_connection"))  # fmt: skip
    assert found[conv].down.shape == (2, 16, 3, 3) and found[conv].up.shape == (16, 2, 1, 1) and found[conv].alpha == 4
    assert found[shortcut].down.shape == (4, 16, 1, 1) and found[shortcut].up.shape == (32, 4, 1, 1)
    assert denoiser.adapters[strided.replace(".", "/")].down.stride == (2, 2)
    assert {a.scale for a in denoiser.adapters.values()} == {2.0}
    for adapter in found.values():
        bound = adapter.down[0].numel() ** -0.5
        assert 0.6 * bound < adapter.down.abs().max() <= bound and not adapter.up.any()
        assert adapter.down.dtype == adapter.up.dtype == torch.float32
    again, same, other = (sd.lora.adapters_of(denoiser_of(settings | {"seed": seed})) for seed in (0, 0, 1))
    assert all(torch.equal(a.down, same[n].down) and not torch.equal(a.down, other[n].down) for n, a in again.items())


# ----------------------------------------------------------------------------------------------------------------
# Numbers
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_first_prediction_is_the_bases_to_the_bit(dtype):
    """Under bf16 the base's weights are halved, which changes no bit either."""
    settings = settings_of("--lora_targets", "all", "--dtype", dtype)
    text, ids = text_encoder(), inputs(text=True)
    base = sd.objective.Denoiser(micro_unet(), copy.deepcopy(text))
    with torch.no_grad():
        expected = sd.objective.in_autocast(base, CPU, dtype)(*ids)
    denoiser = denoiser_of(settings, text=text)
    sd.lora.settle_base(denoiser, settings)
    weight = denoiser.unet.input_blocks[1][1].proj_in.weight
    assert weight.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    assert torch.equal(sd.objective.in_autocast(denoiser, CPU, dtype)(*ids), expected)
    for a in denoiser.adapters.values():
        nn.init.normal_(a.up.weight)
    assert not torch.allclose(sd.objective.in_autocast(denoiser, CPU, dtype)(*ids), expected, rtol=0.1)


@pytest.mark.parametrize("checkpointed", ["none", "all"])
def test_gradients_are_those_of_the_merged_weight(checkpointed):
    """For W + s up down: d up = s dW down^T, d down = s up^T dW, by autograd's dW of a network with merged weights;
    the text encoder's through the UNet, whose blocks are recomputed or not."""
    settings = settings_of("--lora_targets", "all", "--lora_conv", 2, "--lora_alpha", 3)
    text = text_encoder()
    denoiser = denoiser_of(settings, text=text, up=0.3)
    adapters = sd.lora.adapters_of(denoiser)
    plain = sd.objective.Denoiser(micro_unet(), copy.deepcopy(denoiser.text_encoder))
    plain.unet.load_state_dict(sd.lora.merged(denoiser.unet.state_dict(), adapters, "unet"))
    own = denoiser.text_encoder.model.state_dict()
    plain.text_encoder.model.load_state_dict(sd.lora.merged(own, adapters, "text_encoder"))
    plain.text_encoder.requires_grad_(True)
    for m in plain.text_encoder.modules():  # the copy calls adapters, which the reference is to be without
        m.__dict__.pop("adapter", None)
        m.__class__ = nn.Linear if isinstance(m, sd.lora.AdaptedLinear) else m.__class__
    denoiser.unet.set_grad_checkpoint(checkpointed)
    denoiser.train()
    x = inputs(text=True)
    a, b = losses(denoiser, *x), losses(plain, *x)
    assert torch.allclose(a, b, rtol=1e-5)
    a.backward(), b.backward()
    assert any(n.startswith("text_encoder.") for n in adapters) and any(x.down.ndim == 4 for x in adapters.values())
    for name, adapter in adapters.items():
        part, _, layer = name.partition(".")
        reference = plain.unet if part == "unet" else plain.text_encoder.model
        dw = reference.get_submodule(layer).weight.grad.flatten(1)
        trained = denoiser.adapters[name.replace(".", "/")]
        scale = adapter.alpha / len(adapter.down)
        for found, expected in (
            (trained.up.weight.grad.flatten(1), scale * dw @ adapter.down.flatten(1).t()),
            (trained.down.weight.grad.flatten(1), scale * adapter.up.flatten(1).t() @ dw),
        ):
            assert expected.abs().max() > 0
            assert (found - expected).abs().max() < 1e-4 * expected.abs().max() + 1e-9, name
    assert all(p.grad is None for n, p in denoiser.named_parameters() if not n.startswith("adapters."))


def test_blocks_are_recomputed_in_eval_mode_too(monkeypatch):
    """diffusers 9850: what asks for memory is the gradient, not the mode."""
    denoiser, calls = denoiser_of(settings_of()), []
    real = M.checkpoint
    monkeypatch.setattr(M, "checkpoint", lambda *a, **k: calls.append(1) or real(*a, **k))
    denoiser.unet.set_grad_checkpoint("all")
    losses(denoiser.eval(), *inputs()).backward()
    assert len(calls) > 5 and not any(a.up.weight.grad is None for a in denoiser.adapters.values())


def steps_of(denoiser, settings, lrs, text=False, **more):
    """Training steps on one batch: Update, with its averages; the optimizer too."""
    settings = settings | {"decay": 0.0} | more
    ema = sd.lora.average_of(denoiser)
    optimizer = sd.optim.make_optimizer(denoiser, settings)
    for group in optimizer.param_groups:
        group["eps"] = 1e-16
    update = sd.step.Update(optimizer, denoiser, ema, settings | {"kernels": False}, 1)
    for lr in lrs:
        losses(denoiser, *inputs(text)).backward()
        sd.optim.check_all_trained(update.parameters)  # those of down are zero at first, not missing
        update(lr, float("inf"), 0.5)
        sd.optim.forget_gradients(update.parameters)
    return ema, optimizer


def test_alpha_and_learning_rate_go_together():
    """Rank 4: alpha 1 with twice the start and twice the rate is alpha 4, as Adam's steps do not know their gradients'
    size (FINETUNE: an lr says nothing without its alpha). With the same rate it is not."""
    ends = {}
    for alpha, times, lr in ((4, 1, 1e-2), (1, 2, 2e-2), ("other", 2, 1e-2)):
        settings = settings_of("--lora_alpha", 1 if alpha == "other" else alpha)
        denoiser = denoiser_of(settings)
        for a in denoiser.adapters.values():
            a.down.weight.data *= times
        steps_of(denoiser, settings, [lr] * 4)
        ends[alpha] = torch.cat([a.delta().flatten() for a in sd.lora.adapters_of(denoiser).values()])
    assert ends[4].abs().max() > 1e-3
    assert (ends[1] - ends[4]).norm() < 1e-3 * ends[4].norm()
    assert (ends["other"] - ends[4]).norm() > 0.1 * ends[4].norm()


def test_what_is_trained_is_what_was_planned():
    """Adapters, all of them, once each, in fp32, of UNet and text encoder at their own rates; every one moves; base and
    its hash stay, and the averages share its memory."""
    settings = settings_of("--lora_targets", "all", "--lora_conv", 2, "--text_lr", 0.25)
    denoiser = denoiser_of(settings, text=text_encoder())
    hashes = M.weights_hash(denoiser.unet), M.weights_hash(denoiser.text_encoder)
    before = {n: p.detach().clone() for n, p in denoiser.adapters.named_parameters()}
    ema, optimizer = steps_of(denoiser, settings, [1e-2, 1e-2], text=True)
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in listed} == {id(p) for p in denoiser.adapters.parameters()} and len(listed) == len(before)
    assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.dtype == torch.float32 for p in listed)
    numbers = {0.25: 0, 1.0: 0}
    for group in optimizer.param_groups:
        numbers[group["lr_scale"]] += sum(p.numel() for p in group["params"])
    assert numbers[0.25] == sum(p.numel() for n, p in denoiser.adapters.named_parameters() if n.startswith("text"))
    assert min(numbers.values()) > 100 and set(numbers) == {0.25, 1.0}
    assert not [n for n, p in denoiser.adapters.named_parameters() if torch.equal(p, before[n])]
    assert hashes == (M.weights_hash(denoiser.unet), M.weights_hash(denoiser.text_encoder))
    for (name, p), q in zip(denoiser.named_parameters(), ema.parameters(), strict=True):
        assert (p.data_ptr() == q.data_ptr()) == (not name.startswith("adapters.")) == (not p.requires_grad), name
        assert not q.requires_grad
    # The averaged network calls the averaged adapters.
    assert not torch.equal(ema(*inputs(text=True)), denoiser(*inputs(text=True)))
    live, averaged = sd.lora.adapters_of(denoiser), sd.lora.adapters_of(ema)
    name = "unet.input_blocks.1.1.proj_in"
    assert torch.equal(ema.adapters[name.replace(".", "/")].up.weight, averaged[name].up)
    # Two steps of one size each, from 0: 0.25 of the first and 0.5 of the second, so 0.625 of both.
    assert (averaged[name].up.norm() / live[name].up.norm()).item() == pytest.approx(0.625, abs=0.02)


def test_gradients_that_are_not_finite_change_nothing():
    denoiser, settings = denoiser_of(settings_of(), up=0.1), settings_of()
    ema = sd.lora.average_of(denoiser)
    settings["kernels"] = False
    update = sd.step.Update(sd.optim.make_optimizer(denoiser, settings), denoiser, ema, settings, 1)
    before = [p.detach().clone() for p in (*denoiser.parameters(), *ema.parameters())]
    x, t, context = inputs()
    losses(denoiser, x * float("inf"), t, context).backward()
    assert not update(1e-3, 1.0, 0.5).isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, (*denoiser.parameters(), *ema.parameters())))


# ----------------------------------------------------------------------------------------------------------------
# The fused network
# ----------------------------------------------------------------------------------------------------------------

fused = pytest.mark.skipif(sd.kernels.triton is None, reason="Triton is not installed")


@pytest.fixture
def large_tiles(monkeypatch):
    monkeypatch.setattr(sd.fused_ops, "BLOCK_R", 256)
    monkeypatch.setattr(sd.optim.FusedStep, "BLOCK", 1 << 13)


@fused
def test_the_fused_network_has_adapters_as_the_plain_one(large_tiles):
    """On all layers: joined products, time projections, convolutions of every kind, recomputed blocks."""
    settings = settings_of("--lora_targets", "all", "--lora_alpha", 3)
    unet = replace(M.PRESETS["micro"]["unet"], channels=(8, 16), attention=(False, True))
    plain = denoiser_of(settings, randomise(M.UNet(unet, "none")), up=0.3)
    fused = denoiser_of(settings, sd.fused.apply(randomise(M.UNet(unet, "none"))), up=0.3)
    fused.unet.set_grad_checkpoint("all")
    x, t, context = inputs()
    x = x[..., :3, :4]
    outputs = [net(x, t, context) for net in (plain, fused)]
    assert (outputs[0] - outputs[1]).abs().max() < 1e-4 * outputs[0].abs().max()
    for y in outputs:
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    for (name, p), q in zip(plain.adapters.named_parameters(), fused.adapters.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() < 1e-3 * p.grad.abs().max() + 1e-7, name
    assert all(p.grad is None for p in fused.unet.parameters())
    with torch.no_grad():
        assert (fused(x, t, context) - outputs[0]).abs().max() < 1e-4 * outputs[0].abs().max()


@fused
def test_fused_steps_multiply_with_copies_of_the_adapters_alone(large_tiles):
    """In bf16: the base's weights are halved once, adapters are fp32 with bf16 copies, which follow them."""
    settings = settings_of("--lora_targets", "attention", "--dtype", "bf16") | {"kernels": True, "accumulate": 1}
    denoiser = denoiser_of(settings, sd.fused.apply(micro_unet()), up=0.1)
    sd.lora.settle_base(denoiser, settings)
    ema = sd.lora.average_of(denoiser)
    update = sd.step.Update(sd.optim.make_optimizer(denoiser, settings), denoiser, ema, settings, 1)
    assert set(sd.fused.multiplied(denoiser)) == set(denoiser.adapters.parameters())
    before = M.weights_hash(denoiser.unet)
    exact = denoiser_of(settings, up=0.1)
    losses(exact, *inputs()).backward()
    with torch.autocast("cpu", torch.bfloat16):
        losses(denoiser, *inputs()).backward()
    expected = torch.cat([p.grad.flatten() for p in exact.adapters.parameters()])
    found = torch.cat([p.copy_bf16.gradient.float().flatten() for p in denoiser.adapters.parameters()])
    assert (found - expected).norm() < 0.05 * expected.norm()
    assert all(p.grad is None for p in denoiser.parameters())
    old = [p.detach().clone() for p in denoiser.adapters.parameters()]
    update(1e-2, 1.0, 0.5)
    for p, q in zip(denoiser.adapters.parameters(), old):
        assert p.dtype == torch.float32 and not torch.equal(p, q)
        assert torch.allclose(p.copy_bf16.float(), p.detach(), rtol=2**-7, atol=0)
    assert M.weights_hash(denoiser.unet) == before


# ----------------------------------------------------------------------------------------------------------------
# Runs
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return micro.make_data(tmp_path_factory.mktemp("lora") / "data", {"things": 42})


def train(data, out, *more, hook=None, world=1, expect=0, **environment) -> str:
    output = out.with_name(f"{out.name}.txt")
    output.unlink(missing_ok=True)
    argv = micro.flags(data, out, *more)
    if world == 1:
        pids = [micro.start(argv, output, hook, **environment)]
    else:
        pids = micro.start_ranks(world, argv, output, hook, **environment)
    found = [micro.status_of(pid) for pid in pids]
    assert all(status == expect for status in found), (found, output.read_text())
    return output.read_text()


@pytest.fixture(scope="module")
def base(data, tmp_path_factory) -> Path:
    """A run of the whole network, whose last checkpoint is what adapters stand beside."""
    out = tmp_path_factory.mktemp("base") / "base"
    train(data, out, "--zero_init", "none", "--max_steps", 2, "--save_steps", 2, "--val_steps", 0)
    return out


EVERYTHING = ("--lora", 4, "--lora_targets", "all", "--lora_conv", 2, "--train_text_encoder",
              "--grad_checkpoint", "all")  # fmt: skip


@pytest.fixture(scope="module")
def whole(data, base, tmp_path_factory) -> Path:
    """A run with all that adapters can have."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(data, out, *EVERYTHING, "--init_from", base, "--save_steps", 1)
    return out


def killed_in(step: int):
    """A hook: SIGKILL when that step's update begins, once the checkpoint before is written."""

    def hook(*_):
        calls, real = [], sd.optim.set_lr

        def counted(*args):
            calls.append(1)
            if len(calls) == step:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        rebind(sd.optim, "set_lr", counted)

    return hook


def last(out: Path) -> Path:
    return micro.checkpoints(out)[-1]


def test_a_checkpoint_holds_the_adapter_alone(base, whole):
    files = "lora.safetensors lora_ema.safetensors optimizer.pt model.json state.json manifest.json"
    assert {p.name for p in last(whole).iterdir()} == set(files.split())
    tensors = safetensors.torch.load_file(last(whole) / "lora.safetensors")
    names = {n.rpartition(".")[0] for n in tensors}
    assert {n.split(".")[0] for n in names} == {"unet", "text_encoder"}
    assert tensors.keys() == {f"{n}.{what}" for n in names for what in ("down", "up", "alpha")}
    for name in names:
        down, up, alpha = (tensors[f"{name}.{what}"] for what in ("down", "up", "alpha"))
        assert down.dtype == up.dtype == alpha.dtype == torch.float32 and alpha.ndim == 0 and alpha == len(down)
        assert len(down) == up.shape[1] == (2 if down.ndim == 4 and down.shape[2] == 3 else 4) and up.any()
    saved = json.loads((last(whole) / "model.json").read_text())
    source = sd.weights.read.open_model(base)
    assert saved["base"] == {
        "path": str(last(base)), "weights": "ema", "hash": M.weights_hash(source.unet())
    }  # fmt: skip
    moments = torch.load(last(whole) / "optimizer.pt", weights_only=True)["state"]
    assert len(moments) == 2 * len(names)
    assert sum(s["exp_avg"].numel() for s in moments.values()) == sum(t.numel() for t in tensors.values() if t.ndim)


def test_averages_follow_the_adapter(whole):
    """ema = d ema + (1 - d) live, from one checkpoint to the next."""
    live, ema = (
        [safetensors.torch.load_file(c / f"{name}.safetensors") for c in micro.checkpoints(whole)]
        for name in ("lora", "lora_ema")
    )
    for step in range(1, 12):
        d = sd.optim.ema_decay(0.9, step)
        for name, x in ema[step].items():
            assert torch.allclose(x, d * ema[step - 1][name] + (1 - d) * live[step][name], atol=1e-6), (step, name)
    assert any(not torch.equal(x, live[-1][name]) for name, x in ema[-1].items())


def test_a_killed_run_goes_on_to_the_bit(data, base, whole, tmp_path):
    more = (*EVERYTHING, "--init_from", base, "--save_steps", 1)
    train(data, tmp_path / "cut", *more, hook=killed_in(8), expect=-signal.SIGKILL)
    assert 0 < json.loads((last(tmp_path / "cut") / "state.json").read_text())["step"] < 12
    train(data, tmp_path / "cut", "--resume", "--save_steps", 1)  # the checkpoint says the rest
    assert micro.differences(whole, tmp_path / "cut") == []


def test_two_processes_killed_go_on_to_the_bit_and_in_bf16(data, base, tmp_path):
    """Adapters stay fp32 while the base is halved, after the stop too."""
    more = ("--lora", 2, "--init_from", base, "--batch", 2, "--accumulate", 2, "--save_steps", 2, "--dtype", "bf16",
            "--max_steps", 6)  # fmt: skip
    train(data, tmp_path / "whole", *more, world=2)
    train(data, tmp_path / "cut", *more, world=2, hook=killed_in(4), expect=-signal.SIGKILL)
    train(data, tmp_path / "cut", *more, "--resume", world=2)
    assert micro.differences(tmp_path / "whole", tmp_path / "cut") == []
    tensors, _ = micro.contents(last(tmp_path / "cut"))
    assert {t.dtype for t in tensors.values()} == {torch.float32}


def test_ranks_and_micro_batches_can_be_cut_in_any_way(data, base, tmp_path):
    more = ("--lora", 2, "--init_from", base, "--max_steps", 3, "--val_steps", 0, "--save_steps", 3)
    train(data, tmp_path / "one", *more, "--batch", 4)
    train(data, tmp_path / "two", *more, "--batch", 1, "--accumulate", 2, world=2)
    a, b = (micro.contents(last(tmp_path / name))[0] for name in ("one", "two"))
    assert a.keys() == b.keys()
    assert all(torch.allclose(a[k], b[k], rtol=1e-3, atol=1e-6) for k in a if k.startswith("lora"))


@fused
def test_runs_with_fused_kernels_train_as_plain_ones(data, base, tmp_path):
    """Same losses and norms to rounding, of two ranks that share the adapters' gradients."""

    def hook(*_):
        rebind(sd.kernels, "available", lambda device: True)
        rebind(sd.step, "graphs_run", lambda *_: False)
        sd.fused_ops.BLOCK_R, sd.optim.FusedStep.BLOCK = 256, 1 << 13

    more = ("--lora", 4, "--init_from", base, "--max_steps", 2, "--batch", 2, "--warmup", 0, "--val_steps", 0,
            "--save_steps", 1, "--channels_last")  # fmt: skip
    train(data, tmp_path / "plain", *more)
    train(data, tmp_path / "ranks", *more, "--kernels", "--batch", 1, hook=hook, world=2)
    for row, other in zip(*(micro.rows(tmp_path / name) for name in ("plain", "ranks")), strict=True):
        for name in ("loss", "grad_norm"):
            assert row[name] == pytest.approx(other[name], rel=2e-3)


def test_painting_and_exports_have_the_adapter(data, base, whole):
    """open_model's weights are the base's plus the product, live or averaged, of the text encoder too."""
    for weights, suffix in (("live", ""), ("ema", "_ema")):
        model, before = sd.weights.read.open_model(whole, weights), sd.weights.read.open_model(base).unet()
        tensors = safetensors.torch.load_file(last(whole) / f"lora{suffix}.safetensors")
        state, changed = before.state_dict(), 0
        for name, weight in model.tensors().items():
            layer = f"unet.{name.removesuffix('.weight')}"
            expected = state[name]
            if f"{layer}.up" in tensors:
                up, down = tensors[f"{layer}.up"], tensors[f"{layer}.down"]
                expected, changed = expected + (up.flatten(1) @ down.flatten(1)).view_as(expected), changed + 1
            assert torch.allclose(weight, expected, atol=1e-6), name
        assert changed == sum(n.startswith("unet.") and n.endswith(".up") for n in tensors)
        # The same network as training had: base and adapters apart.
        settings = settings_of("--lora_targets", "all", "--lora_conv", 2)
        encoder = M.TextEncoder.from_pretrained(str(data / "text_encoder"))
        denoiser = denoiser_of(settings, before.requires_grad_(True), encoder)
        sd.lora.load_adapters(denoiser, sd.lora.from_tensors(tensors, "it"), "it")
        merged = sd.objective.Denoiser(model.unet(), model.text_encoder())
        x = inputs(text=True)
        assert torch.allclose(denoiser(*x), merged(*x), atol=1e-5)
        assert not torch.allclose(sd.objective.Denoiser(model.unet(), M.TextEncoder.from_pretrained(
            str(data / "text_encoder")))(*x), merged(*x), atol=1e-5)  # fmt: skip


def refused(data, out, *more) -> str:
    text = train(data, out, *more, expect=2)
    lines = [line for line in text.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and "Traceback" not in text, text
    return lines[0]


def test_a_base_that_is_gone_or_another_is_refused_in_a_sentence(data, base, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(base, own)
    more = ("--lora", 2, "--max_steps", 2, "--save_steps", 1, "--val_steps", 0)
    train(data, tmp_path / "run", *more, "--init_from", own, "--stop_at", 1)
    files = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    own.rename(tmp_path / "moved")
    assert "nothing is there" in refused(data, tmp_path / "run", *more, "--resume")
    with pytest.raises(sd.errors.InputError, match="nothing is there"):
        sd.weights.read.open_model(tmp_path / "run")
    # Another model there: one number is another.
    shutil.copytree(tmp_path / "moved", own)
    file = last(own) / "unet_ema.safetensors"
    tensors = safetensors.torch.load_file(file)
    tensors["out.2.bias"] += 1e-3
    safetensors.torch.save_file(tensors, file)
    assert "belongs to other weights" in refused(data, tmp_path / "run", *more, "--resume")
    with pytest.raises(sd.errors.InputError, match="belongs to other weights"):
        sd.weights.read.open_model(tmp_path / "run")
    assert files == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    # Where it went, --init_from says.
    train(data, tmp_path / "run", *more, "--resume", "--init_from", tmp_path / "moved")
    saved = json.loads((last(tmp_path / "run") / "model.json").read_text())["base"]
    assert saved["path"].startswith(str(tmp_path / "moved")) and last(tmp_path / "run").name == "step_00000002"


def test_without_a_named_text_encoder_the_models_own_is_taken(data, base, whole, tmp_path):
    """Of a run the one that it names; of a single file the one in it; of a run of adapters its own, adapted."""
    file = tmp_path / "model.safetensors"
    SD_Convert.main([str(base), str(file), "--format", "ldm", "--dtype", "fp32"])
    for name, source in (("run", base), ("file", file), ("adapted", whole)):
        out, own = tmp_path / name, sd.weights.read.open_model(source).text_encoder()
        train(data, out, "--lora", 2, "--init_from", source, "--max_steps", 1, "--without", "text_encoder")
        state = json.loads((last(out) / "state.json").read_text())
        assert state["inputs"]["text encoder"] == M.weights_hash(own), name
        assert M.weights_hash(sd.weights.read.open_model(out).text_encoder()) == M.weights_hash(own), name
    plain = M.weights_hash(M.TextEncoder.from_pretrained(str(data / "text_encoder")))
    assert state["inputs"]["text encoder"] != plain  # of the adapted one


def test_a_base_whose_run_went_on_is_still_found(data, base, tmp_path):
    """--init_from RUN meant its newest checkpoint then; the command that goes on names the run again."""
    own = tmp_path / "own"
    shutil.copytree(base, own)
    more = ("--lora", 2, "--init_from", own, "--max_steps", 2, "--save_steps", 1, "--val_steps", 0)
    train(data, tmp_path / "run", *more, "--stop_at", 1)
    train(data, own, "--zero_init", "none", "--max_steps", 3, "--save_steps", 1, "--val_steps", 0, "--resume")
    assert len(micro.checkpoints(own)) == 2
    train(data, tmp_path / "run", *more, "--resume")
    saved = [json.loads((c / "model.json").read_text())["base"] for c in micro.checkpoints(tmp_path / "run")]
    assert saved[0] == saved[1] and saved[0]["path"] == str(micro.checkpoints(own)[0])


@pytest.mark.parametrize(
    "more, sentence",
    [
        (("--lora", 4), "--lora goes on from weights that are there"),
        (("--lora", 0), "--lora wants a rank from 1 to 4,096, found 0"),
        (("--lora_alpha", 4), "--lora_alpha is of an adapter: give --lora RANK too"),
        (("--lora_conv", 4), "--lora_conv is of an adapter"),
        (("--lora", 4, "--lora_conv", 4), "--lora_conv is of --lora_targets all, found transformer"),
        (("--lora", 4, "--lora_alpha", 0), "--lora_alpha wants a number above 0"),
        (("--lora", 4, "--lora_alpha", "nan"), "--lora_alpha wants a number above 0"),
    ],
)
def test_flags_that_make_no_adapter_are_refused(more, sentence):
    with pytest.raises(sd.errors.InputError, match=sentence):
        SD_Train.resolve(SD_Train.parse_args(["--phase", "demo", *map(str, more)]), None)


def test_another_rank_at_resume_is_refused(data, base, whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    assert "--lora 8 differs from the run's 4" in refused(data, tmp_path / "run", "--lora", 8, "--resume")


def test_an_adapter_file_of_other_layers_is_refused(whole):
    settings = settings_of("--lora_targets", "all", "--lora_conv", 2)
    tensors = safetensors.torch.load_file(last(whole) / "lora.safetensors")
    adapters = sd.lora.from_tensors({n: t for n, t in tensors.items() if n.startswith("unet.")}, "it")
    denoiser, name = denoiser_of(settings), "unet.input_blocks.1.1.proj_in"
    sd.lora.load_adapters(denoiser, adapters, "it")
    for wrong in (
        {n: a for n, a in adapters.items() if n != name},
        adapters | {name: adapters[name]._replace(alpha=1.0)},
        adapters | {name: adapters[name]._replace(up=adapters[name].up[:, :2])},
        adapters | {"unet.out.2": adapters[name]},
    ):
        with pytest.raises(sd.errors.InputError, match="it holds another adapter than this run's: 1 layers"):
            sd.lora.load_adapters(denoiser, wrong, "it")
    with pytest.raises(sd.errors.InputError, match="it is no adapter of this project"):
        sd.lora.from_tensors({"unet.a.down": torch.zeros(1, 1)}, "it")
    with pytest.raises(sd.errors.InputError, match="which the model has not"):
        sd.lora.merged({}, adapters, "unet")


def test_phases_that_go_on_from_a_model():
    for name, lora, lr in (("finetune", None, 2e-6), ("lora", 16, 1e-4)):
        settings = SD_Train.resolve(SD_Train.parse_args(["--phase", name, "--init_from", "x"]), None)
        wanted = dict(
            model="sd15", size=512, lr=lr, lr_schedule="constant", batch=4, accumulate=1, drop=0.05, ema=0.999,
            lora=lora, lora_alpha=lora and 16.0, lora_conv=None, train_text_encoder=False, warmup=0,
        )  # fmt: skip
        assert {k: settings[k] for k in wanted} == wanted and settings["lora_targets"] == "transformer"
        with pytest.raises(sd.errors.InputError, match="goes on from weights that are there"):
            SD_Train.resolve(SD_Train.parse_args(["--phase", name]), None)
        saved = SD_Train.resolve(SD_Train.parse_args(["--phase", name, "--resume"]), settings)
        assert saved == settings


# ----------------------------------------------------------------------------------------------------------------
# Plans
# ----------------------------------------------------------------------------------------------------------------


def test_memory_and_checkpoints_are_planned_for_the_adapter_alone(data, base, tmp_path):
    settings = settings_of("--lora_targets", "all") | {"kernels": False, "dtype": "bf16"}
    unet = M.UNet(M.PRESETS["micro"]["unet"])
    denoiser = denoiser_of(settings, unet)
    trained = sum(p.numel() for p in denoiser.adapters.parameters())
    found = sd.plan.memory_estimate(settings, denoiser, None, CPU)
    sd.lora.settle_base(denoiser, settings)
    assert found["weights"] == sum(p.numel() * p.element_size() for p in denoiser.parameters())
    assert (found["optimizer"], found["EMA"], found["gradients"]) == (8 * trained, 4 * trained, 4 * trained)
    assert found["peak"] > found["weights"] + 12 * trained + found["activations"]
    text = train(data, tmp_path / "run", "--lora", 4, "--dry_run", "--save_steps", 12)
    planned = float(text.split(" checkpoints of ")[1].split()[0])
    assert planned == 0.0 and "1 checkpoints" in text and not (tmp_path / "run").exists()
    full = settings_of("--model", "sd15") | {"lora": 16, "lora_alpha": 16.0}
    with torch.device("meta"):
        big = denoiser_of(full, M.UNet())
    assert sum(p.numel() for p in big.trained()) == 16 * 423_936


def test_activations_are_counted_with_the_adapters():
    """What a real pass keeps for its backward, but weights: frozen layers without an adapter keep no input."""
    settings = settings_of() | {"kernels": False, "dtype": "fp32", "grad_checkpoint": "none"}
    kept, storages, denoiser = [], {}, denoiser_of(settings)
    own = {p.untyped_storage().data_ptr() for p in denoiser.parameters()}

    def count(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        denoiser(torch.zeros(4, 4, 8, 8), torch.zeros(4), torch.zeros(4, M.TextEncoder.MAX_LENGTH, 16))
    real = sum(n for p, n in storages.items() if p not in own)
    assert sd.plan.activation_bytes(settings, 4, CPU)[0] == pytest.approx(real, rel=0.02)


def test_a_benchmark_needs_no_weights(data, tmp_path):
    text = train(data, tmp_path / "run", "--lora", 4, "--benchmark", 2, "--without", "data_root", "--without", "data")
    row = json.loads(text.splitlines()[-1])
    assert row["lora"] == 4 and row["lora_targets"] == "transformer" and row["images_per_s"] > 0
    assert sd.plan.passes({"lora": 4}) == 2 and sd.plan.passes({"lora": None}) == 3
