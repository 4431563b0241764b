"""SD_Model.py against the diffusers library (an oracle only), against closed forms and against published numbers.

    pytest tests/test_model.py
    pytest tests/test_model.py -m slow      # sd15 at full size: 7 GiB of memory

Every comparison with the library has a control: the same comparison with one deliberate fault must fail.
"""

import ast
import copy
import math
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, randomise, relative
from torch.utils._python_dispatch import TorchDispatchMode

import sd.weights.names
import SD_Model as M
from SD_Model import DDIM, DDPM, PRESETS, VAE, InputError, NoiseSchedule, TextEncoder, UNet, UNetConfig, VAEConfig

TOLERANCE = 1e-5  # relative to the largest value, fp32

# ----------------------------------------------------------------------------------------------------------------
# UNet
# ----------------------------------------------------------------------------------------------------------------

CROSS, PLAIN = "CrossAttn{}Block2D", "{}Block2D"


def library_unet(config: UNetConfig):
    down = [(CROSS if a else PLAIN).format("Down") for a in config.attention]
    up = [(CROSS if a else PLAIN).format("Up") for a in reversed(config.attention)]
    return diffusers.UNet2DConditionModel(
        block_out_channels=config.channels,
        down_block_types=down,
        up_block_types=up,
        layers_per_block=config.num_res_blocks,
        attention_head_dim=config.num_heads,  # that library's name for the number of heads
        cross_attention_dim=config.context_dim,
        norm_num_groups=config.norm_groups,
    ).eval()


def unet_pair(config: UNetConfig):
    """The library's UNet with every parameter random, and ours with the same weights."""
    theirs = randomise(library_unet(config))
    state, names = theirs.state_dict(), sd.weights.names.unet_names(config)
    ours = UNet(config).eval()
    assert set(names.values()) == set(state)
    ours.load_state_dict({k: state[v].reshape(ours.state_dict()[k].shape) for k, v in names.items()})
    return theirs, ours


def unet_inputs(config: UNetConfig, batch=2, size=(24, 40), tokens=77):
    g = torch.Generator().manual_seed(1)
    t = torch.tensor([999, 3, 250, 613][:batch])
    x = 0.1 * torch.randn(batch, config.in_channels, *size, generator=g)  # small: the norms' eps must count
    return x, t, torch.randn(batch, tokens, config.context_dim, generator=g)


WIDTHS = {
    "tiny": (PRESETS["tiny"]["unet"], 3, (8, 8)),
    "three levels": (UNetConfig((32, 64, 96), (True, True, False), 2, 4, 24, 16), 2, (24, 40)),
    "as sd15, thin": (UNetConfig((32, 64, 128, 128), num_heads=8, context_dim=48), 2, (24, 40)),
    "attention below": (UNetConfig((48, 32), (False, True), 3, 2, 16, 8), 4, (10, 6)),
}


@pytest.mark.parametrize("case", WIDTHS)
@torch.no_grad()
def test_unet_equals_library(case):
    config, batch, size = WIDTHS[case]
    theirs, ours = unet_pair(config)
    x, t, context = unet_inputs(config, batch, size)
    expected = theirs(x, t, context).sample
    assert relative(ours(x, t, context), expected) < TOLERANCE
    half = t.float() - 0.5  # fractional timesteps, as Euler and Heun use
    assert relative(ours(x, half, context), theirs(x, half, context).sample) < TOLERANCE
    assert relative(ours(x, half, context), expected) > 10 * TOLERANCE


def swap_geglu(unet):
    for m in unet.modules():
        if isinstance(m, M.GEGLU):
            m.forward = lambda x, m=m: (lambda gate, value: value * F.gelu(gate))(*m.proj(x).chunk(2, dim=-1))


def tanh_gelu(unet):
    for m in unet.modules():
        if isinstance(m, M.GEGLU):
            m.forward = lambda x, m=m: (lambda v, g: v * F.gelu(g, approximate="tanh"))(*m.proj(x).chunk(2, dim=-1))


def set_eps(kind, eps):
    def change(unet):
        for m in unet.modules():
            if isinstance(m, kind):
                for norm in [*m.children(), *(n for c in m.children() for n in c.children())]:
                    if isinstance(norm, torch.nn.GroupNorm):
                        norm.eps = eps

    return change


def double_heads(unet):
    for m in unet.modules():
        if isinstance(m, M.CrossAttention):
            m.heads *= 2


def shift_padding(unet):
    for m in unet.modules():
        if isinstance(m, M.Downsample):
            m.op.padding = (0, 0)
            m.forward = lambda x, m=m: m.op(F.pad(x, (0, 1, 0, 1)))  # the VAE's way


UNET_FAULTS = {
    "GEGLU halves swapped": swap_geglu,
    "tanh GELU": tanh_gelu,
    "eps 1e-6 in residual blocks": set_eps(M.ResBlock, 1e-6),
    "eps 1e-5 before transformers": set_eps(M.SpatialTransformer, 1e-5),
    "twice the heads": double_heads,
    "padding right and bottom": shift_padding,
}


@pytest.fixture(scope="module")
def thin_pair():
    config = WIDTHS["as sd15, thin"][0]
    theirs, ours = unet_pair(config)
    inputs = unet_inputs(config, 1, (16, 24))
    with torch.no_grad():
        return ours, inputs, theirs(*inputs).sample


@pytest.mark.parametrize("fault", [None, *UNET_FAULTS])
@torch.no_grad()
def test_unet_control_shows_a_fault(thin_pair, fault):
    ours, inputs, expected = thin_pair
    ours = copy.deepcopy(ours)
    if fault is None:
        assert relative(ours(*inputs), expected) < TOLERANCE
    else:
        UNET_FAULTS[fault](ours)
        assert relative(ours(*inputs), expected) > TOLERANCE, "the fault is not seen: the parity test cannot fail"


@torch.no_grad()
def test_unet_control_sine_first(thin_pair, monkeypatch):
    ours, inputs, expected = thin_pair
    right = M.timestep_embedding
    monkeypatch.setattr(M, "timestep_embedding", lambda t, dim: right(t, dim).roll(dim // 2, dims=-1))
    assert relative(ours(*inputs), expected) > 100 * TOLERANCE


def test_sd15_names_shapes_and_counts_equal_library():
    config = PRESETS["sd15"]["unet"]
    with torch.device("meta"):
        theirs, ours, vae = library_unet(config), UNet(config), VAE(PRESETS["sd15"]["vae"])
    assert M.count_parameters(ours) == (686, 859_520_964)
    assert M.count_parameters(vae) == (248, 83_653_863)
    names = sd.weights.names.unet_names(config)
    found = {k: tuple(v.shape) for k, v in theirs.state_dict().items()}
    assert {names[k]: tuple(v.shape) for k, v in ours.state_dict().items()} == found


@pytest.mark.slow
@torch.no_grad()
def test_sd15_equals_library_at_full_size():
    theirs, ours = unet_pair(PRESETS["sd15"]["unet"])
    x, t, context = unet_inputs(PRESETS["sd15"]["unet"], 2, (24, 40))
    assert relative(ours(x, t, context), theirs(x, t, context).sample) < TOLERANCE


@torch.no_grad()
def test_odd_latents_run_and_equal_library():
    config = WIDTHS["three levels"][0]
    theirs, ours = unet_pair(config)
    x, t, context = unet_inputs(config, 1, (33, 65))
    out = ours(x, t, context)
    assert out.shape == x.shape
    assert relative(out, theirs(x, t, context).sample) < TOLERANCE
    assert ours(*unet_inputs(config, 1, (1, 3))).shape == (1, 4, 1, 3)


def test_zero_init_variants():
    config = PRESETS["tiny"]["unet"]
    zeros = {}
    for which in ("all", "original", "none"):
        unet = UNet(config, zero_init=which)
        zeros[which] = {k for k, p in unet.named_parameters() if k.endswith(".weight") and not p.any()}
        with torch.no_grad():
            out = unet(*unet_inputs(config, 1, (8, 8), 7))
        assert (out.abs().max() == 0) == (which != "none")
    ends = {k: k.split(".", 2)[-1] for k in zeros["all"]}
    original = {k for k in ends if k.endswith(("out_layers.3.weight", "proj_out.weight")) or k == "out.2.weight"}
    extra = {k for k in ends if k.endswith(("to_out.0.weight", "ff.net.2.weight"))}
    assert zeros["none"] == set()
    assert zeros["original"] == original and len(original) > 10
    assert zeros["all"] == original | extra and len(extra) > 10
    with pytest.raises(ValueError, match="zero_init"):
        UNet(config, zero_init="some")


def test_gradient_checkpointing_gives_the_same_gradients():
    config = UNetConfig((32, 64), (True, True), 1, 4, 16, 16, dropout=0.1)
    unet = randomise(UNet(config)).train()
    x, t, context = unet_inputs(config, 2, (9, 12), 7)

    def gradients(which):
        unet.set_grad_checkpoint(which)
        unet.zero_grad()
        torch.manual_seed(5)  # dropout must repeat itself in the recomputation
        unet(x, t, context).square().mean().backward()
        return {k: p.grad.clone() for k, p in unet.named_parameters()}

    plain = gradients("none")
    for which in ("resblocks", "all"):
        recomputed = gradients(which)
        assert all(torch.equal(plain[k], recomputed[k]) for k in plain)
    assert all(g.abs().max() > 0 for g in plain.values())
    calls = []
    for kind, block in zip("rs", unet.middle_block):
        block._forward = lambda *a, kind=kind, forward=block._forward: calls.append(kind) or forward(*a)
    for which, wanted in (("none", "rs"), ("resblocks", "rsr"), ("all", "rssr")):
        calls.clear()
        gradients(which)  # a checkpointed block runs twice: forward, and again in the backward pass
        assert "".join(calls) == wanted


@pytest.mark.parametrize("dim", [320, 640, 1280])
def test_attention_heads_and_scale(dim):
    """Case 21: 8 heads, dims 40, 80 and 160, scale d^-0.5; spelled out in fp64."""
    attention = randomise(M.CrossAttention(dim, 48, 8), gain=3.0).double()
    x, context = torch.randn(2, 10, dim, dtype=torch.float64), torch.randn(2, 7, 48, dtype=torch.float64)

    def by_hand(heads, scale):
        out = []
        for i in range(heads):
            part = slice(i * dim // heads, (i + 1) * dim // heads)
            q, k, v = x @ attention.to_q.weight[part].T, context @ attention.to_k.weight[part].T, attention.to_v.weight
            out.append(torch.softmax(q @ k.transpose(1, 2) * scale, dim=-1) @ (context @ v[part].T))
        return torch.cat(out, dim=-1) @ attention.to_out[0].weight.T + attention.to_out[0].bias

    with torch.no_grad():
        assert relative(attention(x, context), by_hand(8, (dim / 8) ** -0.5)) < 1e-12
        assert relative(attention(x, context), by_hand(8, dim**-0.5)) > 1e-2
        assert relative(attention(x, context), by_hand(4, (dim / 4) ** -0.5)) > 1e-2


# ----------------------------------------------------------------------------------------------------------------
# VAE
# ----------------------------------------------------------------------------------------------------------------

VAES = {
    "as sd15, thin": VAEConfig((32, 64, 64, 96)),
    "two levels": VAEConfig((16, 32), 1, norm_groups=8, scaling_factor=0.5),
    "no attention": VAEConfig((32, 64), 1, latent_channels=3, norm_groups=16, mid_attention=False),
}


def library_vae(config: VAEConfig):
    n = len(config.channels)
    return diffusers.AutoencoderKL(
        block_out_channels=config.channels,
        down_block_types=("DownEncoderBlock2D",) * n,
        up_block_types=("UpDecoderBlock2D",) * n,
        layers_per_block=config.num_res_blocks,
        latent_channels=config.latent_channels,
        norm_num_groups=config.norm_groups,
        mid_block_add_attention=config.mid_attention,
        scaling_factor=config.scaling_factor,
    ).eval()


def vae_pair(config: VAEConfig):
    theirs = randomise(library_vae(config), gain=1.0)
    state, names = theirs.state_dict(), sd.weights.names.vae_names(config)
    ours = VAE(config).eval()
    assert set(names.values()) == set(state)
    ours.load_state_dict({k: state[v].reshape(ours.state_dict()[k].shape) for k, v in names.items()})
    return theirs, ours


@pytest.mark.parametrize("case", VAES)
@torch.no_grad()
def test_vae_equals_library(case):
    config = VAES[case]
    theirs, ours = vae_pair(config)
    factor = config.factor
    images = torch.rand(2, 3, 3 * factor, 5 * factor, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for dtype, tolerance in ((torch.float32, TOLERANCE), (torch.float64, 1e-11)):  # fp64: nothing but rounding differs
        theirs, ours, images = theirs.to(dtype), ours.to(dtype), images.to(dtype)
        posterior = theirs.encode(images).latent_dist
        mean, logvar = ours.moments(images)
        assert relative(mean, posterior.mean) < tolerance and relative(logvar, posterior.logvar) < tolerance
        latents = ours.encode(images)
        assert relative(latents, posterior.mean * config.scaling_factor) < tolerance
        assert relative(latents, posterior.mean) > 0.1  # control: the scale is there, once
        pictures = theirs.decode(latents / config.scaling_factor).sample
        assert relative(ours.decode(latents), pictures) < tolerance
        assert relative(ours.decode(latents / config.scaling_factor), pictures) > 10 * TOLERANCE


def test_vae_control_shows_a_fault():
    config = VAES["as sd15, thin"]
    theirs, ours = vae_pair(config)
    images = 0.2 * torch.rand(1, 3, 24, 40, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = theirs.encode(images).latent_dist.mean
        for m in ours.modules():
            if isinstance(m, M.VAEDownsample):
                m.forward = lambda x, m=m: F.conv2d(x, m.conv.weight, m.conv.bias, stride=2, padding=1)  # the UNet's
        assert relative(ours.moments(images)[0], expected) > 10 * TOLERANCE
        ours = vae_pair(config)[1]
        for m in ours.modules():
            if isinstance(m, torch.nn.GroupNorm):
                m.eps = 1e-5
        assert relative(ours.moments(images)[0], expected) > TOLERANCE


def test_vae_refuses_sizes_that_are_no_multiples():
    with pytest.raises(ValueError, match="multiples of 8"):
        VAE(VAES["as sd15, thin"]).moments(torch.zeros(1, 3, 12, 16))


@torch.no_grad()
def test_vae_with_stem_has_its_factor():
    vae = VAE(PRESETS["tiny"]["vae"])
    latents = vae.encode(torch.zeros(1, 3, 64, 48))
    assert latents.shape == (1, 4, 8, 6) and vae.decode(latents).shape == (1, 3, 64, 48)


# ----------------------------------------------------------------------------------------------------------------
# Noise schedule
# ----------------------------------------------------------------------------------------------------------------

SCHEDULES = [
    dict(betas=betas, prediction=prediction, zero_terminal_snr=zero)
    for betas in ("scaled_linear", "linear", "squaredcos_cap_v2")
    for prediction, zero in (("epsilon", False), ("v", False), ("v", True))
]


def library_scheduler(cls, s: NoiseSchedule, **kwargs):
    c = s.config
    return cls(
        beta_schedule=c["betas"],
        beta_start=c["beta_start"],
        beta_end=c["beta_end"],
        prediction_type={"epsilon": "epsilon", "v": "v_prediction"}[c["prediction"]],
        rescale_betas_zero_snr=c["zero_terminal_snr"],
        clip_sample=False,
        **kwargs,
    )


@pytest.mark.parametrize("kwargs", SCHEDULES, ids=str)
def test_schedule_equals_library(kwargs):
    s = NoiseSchedule(**kwargs)
    library = library_scheduler(diffusers.DDIMScheduler, s)
    # the library accumulates 1000 products in fp32 and, for the rescaling, divides them again
    assert (s.alphas_cumprod.float() - library.alphas_cumprod).abs().max() < 2e-6
    g = torch.Generator().manual_seed(0)
    x, noise = torch.randn(5, 4, 6, 8, generator=g), torch.randn(5, 4, 6, 8, generator=g)
    t = torch.tensor([0, 1, 400, 998, 999])
    tolerance = 3 * TOLERANCE if kwargs["zero_terminal_snr"] else TOLERANCE
    assert relative(s.add_noise(x, noise, t), library.add_noise(x, noise, t)) < tolerance
    expected = noise if s.prediction == "epsilon" else library.get_velocity(x, noise, t)
    assert relative(s.target(x, noise, t), expected) < tolerance
    other = NoiseSchedule(**{**kwargs, "betas": "linear" if kwargs["betas"] != "linear" else "scaled_linear"})
    assert relative(other.add_noise(x, noise, t), library.add_noise(x, noise, t)) > 100 * TOLERANCE
    for abar in (0.9, 0.2) + ((0.0,) if s.prediction == "v" else ()):
        x_t = math.sqrt(abar) * x + math.sqrt(1 - abar) * noise
        v = math.sqrt(abar) * noise - math.sqrt(1 - abar) * x
        x0, eps = s.x0_and_eps(noise if s.prediction == "epsilon" else v, x_t, abar)
        assert relative(x0, x) < TOLERANCE and relative(eps, noise) < TOLERANCE


def test_schedule_numbers():
    """Case 9, and the ends of the zero-terminal-SNR rescaling."""
    abar = NoiseSchedule().alphas_cumprod
    assert abar[0].item() == pytest.approx(0.99915, abs=1e-8) and abar[999].item() == pytest.approx(0.004660, abs=1e-6)
    assert NoiseSchedule("linear").alphas_cumprod[999].item() == pytest.approx(0.00158, abs=1e-5)
    zero = NoiseSchedule(prediction="v", zero_terminal_snr=True).alphas_cumprod
    assert zero[999] == 0 and zero[0] == pytest.approx(abar[0].item(), abs=1e-12)
    with pytest.raises(ValueError, match="prediction v"):
        NoiseSchedule(zero_terminal_snr=True)
    with pytest.raises(ValueError, match="betas wants"):
        NoiseSchedule("cosine")


def test_min_snr_weights():
    """Case 7."""
    t = torch.tensor([0, 100, 250, 999])
    eps, v = NoiseSchedule().min_snr_weight(t, 5), NoiseSchedule(prediction="v").min_snr_weight(t, 5)
    torch.testing.assert_close(eps, torch.tensor([0.004254, 0.59144, 1.0, 1.0]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(v, torch.tensor([0.00425, 0.52888, 0.67379, 0.00466]), rtol=2e-3, atol=5e-6)
    zero = NoiseSchedule(prediction="v", zero_terminal_snr=True)
    assert zero.snr(t)[3] == 0 and zero.min_snr_weight(t, 5)[3] == 0
    assert zero.min_snr_weight(torch.arange(1000), 5).isfinite().all()
    zero.prediction = "epsilon"  # not a useful model, but no NaN either
    assert zero.min_snr_weight(t, 5)[3] == 1


# ----------------------------------------------------------------------------------------------------------------
# DDPM and DDIM
# ----------------------------------------------------------------------------------------------------------------


def toy(x, t):
    """A smooth prediction that depends on x and on t."""
    return torch.tanh(0.8 * x + math.sin(float(t) / 100)) + 0.1 * x.roll(1, -1)


def run_library(scheduler, x, steps, generator=None, **kwargs):
    scheduler.set_timesteps(steps)
    for t in scheduler.timesteps:
        x = scheduler.step(toy(x, t), t, x, generator=generator, **kwargs).prev_sample
    return x


START = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(3))
SPACINGS = ("leading", "trailing", "linspace")


@pytest.mark.parametrize("spacing", SPACINGS[:2])
@pytest.mark.parametrize("kwargs", SCHEDULES, ids=str)
def test_50_steps_equal_library(kwargs, spacing):
    if kwargs["zero_terminal_snr"] and spacing == "leading":
        return  # a zero-SNR model is sampled from its last timestep, which is in no leading list
    s = NoiseSchedule(**kwargs)
    for eta in (0.0, 0.7):
        library = library_scheduler(
            diffusers.DDIMScheduler, s, timestep_spacing=spacing, steps_offset=1, set_alpha_to_one=False
        )
        expected = run_library(library, START, 50, torch.Generator().manual_seed(0), eta=eta)
        g = torch.Generator().manual_seed(0)

        def randn(x, g=g):
            return torch.randn(x.shape, generator=g)

        out = DDIM(s, spacing, 1, eta=eta).sample(toy, START, 50, randn)
        # a cosine schedule ends in abar of 1e-9, where the library's fp32 products keep few digits
        tolerance = 50 * TOLERANCE if kwargs["betas"] == "squaredcos_cap_v2" else TOLERANCE
        assert relative(out, expected) < tolerance
        wrong = DDIM(s, spacing, 1, eta=eta + 0.1).sample(toy, START, 50, randn)
        assert relative(wrong, expected) > 3 * tolerance
    library = library_scheduler(diffusers.DDPMScheduler, s, timestep_spacing=spacing)
    expected = run_library(library, START, 50, torch.Generator().manual_seed(0))
    g = torch.Generator().manual_seed(0)
    out = DDPM(s, spacing).sample(toy, START, 50, lambda x: torch.randn(x.shape, generator=g))
    assert relative(out, expected) < tolerance


def test_50_steps_control_wrong_previous_step():
    """Had the final step gone to abar = 1 where the library goes to abar_0, the comparison would show it."""
    s = NoiseSchedule()
    library = library_scheduler(diffusers.DDIMScheduler, s, steps_offset=1, set_alpha_to_one=False)
    expected = run_library(library, START, 50)
    assert relative(DDIM(s, set_alpha_to_one=True).sample(toy, START, 50), expected) > 10 * TOLERANCE
    assert relative(DDIM(s, offset=0).sample(toy, START, 50), expected) > 10 * TOLERANCE


@pytest.mark.parametrize("spacing", SPACINGS)
def test_timesteps_for_every_number_of_steps(spacing):
    """Case 10: exactly S, falling, distinct, within 0..999; and the library's own list wherever that is sound."""
    library = library_scheduler(diffusers.DDIMScheduler, NoiseSchedule(), timestep_spacing=spacing, steps_offset=1)
    agree = 0
    for S in range(1, 1001):
        ts = M.sampling_timesteps(S, spacing, 1)
        assert len(ts) == S and all(isinstance(t, int) for t in ts)
        assert 0 <= ts[-1] and ts[0] <= 999 and all(a > b for a, b in zip(ts, ts[1:]))
        library.set_timesteps(S)
        theirs = library.timesteps.tolist()
        sound = len(theirs) == S == len(set(theirs)) and max(theirs) <= 999 and min(theirs) >= 0
        if sound and S > 1:
            assert ts == theirs, f"{S} steps"
            agree += 1
    assert agree > 900
    for S in (0, 1001):
        with pytest.raises(ValueError, match="1 to 1000 steps"):
            M.sampling_timesteps(S, spacing)


COUNTS = [1, 2, 3, 7, 20, 30, 33, 50, 64, 99, 150, 333, 400, 501, 600, 750, 999, 1000]


@pytest.mark.parametrize("spacing", SPACINGS)
def test_scalar_oracle_keeps_epsilon(spacing):
    """Case 10: with x0 = 0.7 known, epsilon recomputed from x is the same at every step, whatever S."""
    s = NoiseSchedule()
    abar = s.alphas_cumprod.tolist()

    def path(sampler, S):
        seen = []

        def oracle(x, t):
            seen.append(((x - math.sqrt(abar[t]) * 0.7) / math.sqrt(1 - abar[t])).item())
            return torch.full_like(x, seen[-1])

        first = M.sampling_timesteps(S, spacing, 1)[0]
        x = torch.tensor([math.sqrt(abar[first]) * 0.7 + math.sqrt(1 - abar[first]) * 1.3], dtype=torch.float64)
        sampler.sample(oracle, x, S)
        assert len(seen) == S
        return max(abs(e - 1.3) for e in seen)

    class ByFormula(DDIM):  # control: the predecessor by t - T // S, as it is often written
        def step(self, x, pred, t, t_prev, noise=None):
            before = t - 1000 // self.S
            return super().step(x, pred, t, before if before >= 0 else None)

    for S in COUNTS:
        assert path(DDIM(s, spacing), S) < 1e-9
    faulty = ByFormula(s, spacing)
    faulty.S = 600
    assert (path(faulty, 600) > 1e-3) == (spacing != "leading"), "a formula is right where strides are all alike"


@pytest.mark.parametrize("spacing", SPACINGS)
def test_latents_are_not_clipped(spacing):
    """Case 10b: an oracle that always means x0 = 3 ends at 3, with epsilon and with v."""
    for prediction in ("epsilon", "v"):
        s = NoiseSchedule(prediction=prediction)
        abar = s.alphas_cumprod.tolist()

        def oracle(x, t, abar=abar, prediction=prediction):
            a, b = math.sqrt(abar[t]), math.sqrt(1 - abar[t])
            eps = (x - a * 3.0) / b
            return eps if prediction == "epsilon" else a * eps - b * 3.0

        x = torch.randn(64, dtype=torch.float64)
        for S in (1, 7, 50):
            assert (DDPM(s, spacing).sample(oracle, x, S) - 3).abs().max() < 1e-9
            assert (DDIM(s, spacing, set_alpha_to_one=True).sample(oracle, x, S) - 3).abs().max() < 1e-9
        # by default DDIM ends at abar_0's noise level, not at zero
        assert (DDIM(s, spacing).sample(oracle, x, 50) - 3).abs().max() < 0.2


def test_strided_ddpm_has_the_right_variance():
    """Case 9: for N(0, 1) data the model is known and every step linear; beta = 1 - abar_t/abar_prev, no last noise."""
    s = NoiseSchedule()
    drawn = []

    def randn(x):
        drawn.append(1)
        return torch.randn(x.shape, generator=g)

    g = torch.Generator().manual_seed(0)
    x = torch.randn(200_000, generator=g)
    out = DDPM(s).sample(lambda x, t: x * math.sqrt(1 - s.alphas_cumprod[t]), x, 20, randn)
    assert len(drawn) == 19
    abar = [*s.alphas_cumprod[list(range(950, -1, -50))].tolist(), 1.0]
    variance = 1.0
    for now, before in zip(abar, abar[1:]):
        beta = 1 - now / before
        factor = math.sqrt(now * before) * beta / (1 - now) + math.sqrt(now / before) * (1 - before) / (1 - now)
        variance = factor**2 * variance + beta * (1 - before) / (1 - now)
    assert out.var().item() == pytest.approx(variance, rel=0.01) and 0.7 < variance < 0.9


# ----------------------------------------------------------------------------------------------------------------
# Text encoder
# ----------------------------------------------------------------------------------------------------------------

CLIP = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2)
ASTRONAUT = [49406, 320, 1125, 539, 550, 18376, 6765, 320, 4558, 525, 7496, 49407]


def load_openai_tokenizer():
    """The tokenizer as OpenAI published it, from its file alone (the package around it wants torchvision)."""
    file = Path(next(iter(find_spec("open_clip").submodule_search_locations))) / "tokenizer.py"
    spec = spec_from_file_location("openai_tokenizer", file)
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SimpleTokenizer()


@pytest.fixture(scope="module")
def clip(clip_tokenizer):
    encoder = TextEncoder.new(CLIP, clip_tokenizer)
    randomise(encoder.model)
    return encoder


def test_clip_ids(clip):
    """Case 18: always 77 ids; the published ids; OpenAI's own algorithm for accents, elisions, emoji and spaces."""
    texts = ["", "a photo of an astronaut riding a horse on mars", "résumé you've  😀 a", "a " * 200]
    ids = clip.tokenize(texts)
    assert ids.shape == (4, 77) and ids.dtype == torch.long
    assert ids[0].tolist() == [49406] + [49407] * 76
    assert ids[1].tolist() == ASTRONAUT + [49407] * 65
    oracle = load_openai_tokenizer().encode(texts[2])
    assert ids[2].tolist()[:9] == [49406, *oracle, 49407] and 7334 in oracle
    assert ids[3].tolist() == [49406] + [320] * 75 + [49407]
    assert torch.equal(clip.tokenize(["a  photo\tOF an ASTRONAUT riding a horse on mars"])[0], ids[1])


@torch.no_grad()
def test_text_encoder_is_clip_without_mask(clip):
    ids = clip.tokenize(["a red circle", ""])
    expected = clip.model(input_ids=ids).last_hidden_state
    assert torch.equal(clip.encode(["a red circle", ""]), expected) and expected.shape == (2, 77, 64)
    masked = clip.model(input_ids=ids, attention_mask=(ids != 49407).long()).last_hidden_state
    assert relative(masked, expected) > 1e-3
    hidden = clip.model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    assert relative(hidden, expected) > 1e-3, "the last hidden state after the final norm, not before"


@torch.no_grad()
def test_text_encoder_saved_and_loaded(clip, tmp_path):
    clip.save(tmp_path / "text")
    again = TextEncoder.from_pretrained(str(tmp_path / "text"))
    texts = ["a red circle", "résumé  😀"]
    assert torch.equal(again.tokenize(texts), clip.tokenize(texts))
    assert torch.equal(again.encode(texts), clip.encode(texts))
    assert again.context_dim == 64


def test_incomplete_text_encoder_is_refused(clip, tmp_path):
    from safetensors.torch import load_file, save_file

    clip.save(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    dropped = next(k for k in weights if k.endswith("layers.1.mlp.fc2.weight"))
    save_file({k: v for k, v in weights.items() if k != dropped}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(InputError, match="lacks weights.*fc2"):
        TextEncoder.from_pretrained(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="could not be loaded"):
        TextEncoder.from_pretrained(str(tmp_path))
    with pytest.raises(InputError, match="could not be loaded"):
        TextEncoder.from_pretrained(str(tmp_path / "absent"))


@torch.no_grad()
def test_other_text_encoder_gets_its_padding_mask(tmp_path):
    from transformers import BertConfig, BertModel, BertTokenizer

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "circle"]
    tokenizer = BertTokenizer(vocab={w: i for i, w in enumerate(words)}, model_max_length=16)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )
    randomise(BertModel(config)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    encoder = TextEncoder.from_pretrained(str(tmp_path))
    ids = encoder.tokenize(["a red circle"])
    assert ids.shape == (1, 16) and ids[0, :6].tolist() == [2, 5, 6, 7, 3, 0] and encoder.context_dim == 32
    alone = encoder.model(input_ids=ids[:, :5]).last_hidden_state  # no padding at all
    assert relative(encoder.encode(["a red circle"])[:, :5], alone) < TOLERANCE
    unmasked = encoder.model(input_ids=ids).last_hidden_state[:, :5]
    assert relative(unmasked, alone) > 1e-3
    both = encoder.tokenize(["a red circle", "circle"])
    usual = encoder.model(input_ids=both, attention_mask=(both != 0).long()).last_hidden_state
    assert relative(encoder(both), usual) < TOLERANCE
    with NoWaiting():  # a device that is waited for cannot record the pass as a CUDA graph
        encoder(both)


class NoWaiting(TorchDispatchMode):
    """Refuses what brings a number of a tensor to Python."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), "the device is waited for"
        return function(*args, **(kwargs or {}))


# ----------------------------------------------------------------------------------------------------------------


def test_product_files_import_no_oracle():
    """diffusers, peft, datasets, open_clip and torchvision are for tests alone, and for benchmarks as what is raced."""
    banned = {"diffusers", "peft", "datasets", "open_clip", "torchvision", "accelerate", "lightning"}
    banned.add("pytorch_lightning")
    files = [
        p
        for p in ROOT.rglob("*.py")
        if not any(part.startswith(".") or part in ("tests", "benchmarks") for part in p.relative_to(ROOT).parts)
    ]  # folders with a dot: environments
    assert any(p.name == "SD_Model.py" for p in files)
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = banned & {n.split(".")[0] for n in names}
            assert not found, f"{path.relative_to(ROOT)} imports {found}"
            if path.name == "SD_Model.py":
                assert not any(n.startswith(("SD_", "sd", "encode_latents")) for n in names)


def test_config_from_dict_is_strict():
    values = {"channels": [32], "attention": [True]}
    with pytest.raises(InputError, match="wants exactly"):
        M.config_from_dict(UNetConfig, values)
    assert np.prod(PRESETS["tiny"]["vae"].factor) == 8
