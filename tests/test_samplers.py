"""sd/samplers.py, sd/painting.py and SD_ImageGen.py: against closed form, and picture for picture against the
diffusers library.

pytest tests/test_samplers.py
"""

import json
import math
import re
import time

import diffusers
import numpy as np
import pytest
import torch
from binding import rebind
from conftest import make_pipeline, randomise
from PIL import Image

import sd.device
import sd.painting
import sd.plan
import sd.samplers
import sd.speed
import sd.weights.names
import SD_ImageGen
from sd.errors import InputError
from sd.samplers import SAMPLERS
from SD_Model import NoiseSchedule, TextEncoder

# ----------------------------------------------------------------------------------------------------------------
# Closed form: a mixture of Gaussians in one dimension
# ----------------------------------------------------------------------------------------------------------------

WEIGHTS, MEANS, STDS = (
    torch.tensor(v, dtype=torch.float64) for v in ([0.3, 0.5, 0.2], [-1.5, 0.4, 2.0], [0.3, 0.4, 0.2])
)


def mixture_cdf(y: torch.Tensor, sigma: float) -> torch.Tensor:
    """Of y = x_0 + sigma eps, x_0 from the mixture."""
    z = (y[..., None] - MEANS) / (STDS**2 + sigma**2).sqrt()
    return (WEIGHTS * torch.special.ndtr(z)).sum(-1)


def mixture_denoised(y: torch.Tensor, sigma: float) -> torch.Tensor:
    """E[x_0 | y]: the mixture's posterior mean."""
    var = STDS**2 + sigma**2
    logits = WEIGHTS.log() - (y[..., None] - MEANS) ** 2 / (2 * var) - var.log() / 2
    means = (MEANS * sigma**2 + y[..., None] * STDS**2) / var
    return (torch.softmax(logits, -1) * means).sum(-1)


def transported(y: torch.Tensor, sigma: float, to: float) -> torch.Tensor:
    """Where the probability-flow ODE takes y from one sigma to another. In one dimension the flow keeps the order of
    points, hence the value of the distribution function: bisection solves for it."""
    wanted = mixture_cdf(y, sigma)
    low, high = torch.full_like(y, -100.0), torch.full_like(y, 100.0)
    for _ in range(80):
        middle = (low + high) / 2
        below = mixture_cdf(middle, to) < wanted
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return (low + high) / 2


def mixture_model(schedule: NoiseSchedule):
    """The exact network for the mixture: epsilon or v at a timestep that may be fractional."""
    table = sd.samplers.sigma_table(schedule)

    def model(x, t):
        sigma = float(np.interp(float(t), np.arange(len(table)), table))
        a, s = 1 / math.sqrt(1 + sigma**2), sigma / math.sqrt(1 + sigma**2)
        x0 = mixture_denoised(x / a, sigma)
        eps = (x - a * x0) / s
        return eps if schedule.prediction == "epsilon" else a * eps - s * x0

    return model


QUANTILES = torch.special.ndtri(torch.linspace(0.02, 0.98, 41, dtype=torch.float64))


def error_between_ends(name: str, steps: int, prediction: str = "epsilon", **options) -> float:
    """Mean error at the smallest sigma that the sampler visits, having started at the largest: the last step, from
    there to 0, is not counted."""
    schedule = NoiseSchedule(prediction=prediction)
    table = sd.samplers.sigma_table(schedule)
    model, visited, after = mixture_model(schedule), [], {}

    def watched(x, t):
        visited.append(float(np.interp(float(t), np.arange(len(table)), table)))
        return model(x, t)

    SAMPLERS[name](watched, QUANTILES, schedule, steps, callback=lambda i, x: after.update({i: x}), **options)
    high, low = visited[0], visited[-1]
    y0 = QUANTILES * (high if name in ("euler", "heun") else math.sqrt(1 + high**2))
    y = after[steps - 2] * math.sqrt(1 + low**2)
    return (y - transported(y0, high, low)).abs().mean().item()


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("name,order", [("ddim", 1), ("euler", 1), ("heun", 2), ("dpmpp_2m_karras", 2)])
def test_error_falls_with_the_order(name, order, prediction):
    steps = [33, 65, 129, 257]  # 32, 64, 128, 256 steps between the ends
    options = {} if name == "dpmpp_2m_karras" else {"spacing": "linspace"}  # from the largest to the smallest sigma
    errors = [error_between_ends(name, n, prediction, **options) for n in steps]
    slopes = [math.log2(a / b) for a, b in zip(errors, errors[1:])]
    print(name, prediction, errors, slopes)
    assert abs(slopes[-1] - order) < 0.25, (errors, slopes)
    assert errors[-1] < (1e-2 if order == 1 else 2e-3)


def test_20_steps_of_dpm_beat_50_of_ddim():
    spacings = ("leading", "linspace", "trailing")
    ddim = min(error_between_ends("ddim", 50, spacing=spacing) for spacing in spacings)
    errors = {spacing: error_between_ends("dpmpp_2m", 20, spacing=spacing) for spacing in spacings}
    errors["karras"] = error_between_ends("dpmpp_2m_karras", 20)
    print(f"ddim, 50 steps: {ddim:.4f}; dpmpp_2m, 20 steps: {errors}")
    assert max(errors.values()) < ddim


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_number_of_steps(name):
    """Case 10 and 10b for every sampler: an oracle that means x0 = 3 ends at 3; timesteps are falling and in range."""
    schedule = NoiseSchedule()
    table = sd.samplers.sigma_table(schedule)
    for spacing in ("leading", "trailing", "linspace"):
        for steps in (1, 2, 3, 7, 20, 333, 600, 999, 1000):
            seen = []

            def oracle(x, t, seen=seen):
                seen.append(float(t))
                sigma = np.interp(float(t), np.arange(1000), table)
                return (x - 3 / math.sqrt(1 + sigma**2)) * math.sqrt(1 + sigma**2) / sigma

            options = {"set_alpha_to_one": True} if name == "ddim" else {}
            x = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            out = SAMPLERS[name](oracle, x, schedule, steps, spacing=spacing, **options)
            assert (out - 3).abs().max() < 1e-6, (spacing, steps)
            distinct = list(dict.fromkeys(seen))
            assert len(distinct) == steps and len(seen) == (2 * steps - 1 if name == "heun" else steps)
            assert all(0 <= t <= 999 for t in seen) and distinct == sorted(distinct, reverse=True)


@pytest.mark.parametrize("name", ["euler_a", "ddpm"])
def test_ancestral_noise_keeps_the_distribution(name):
    """For N(0, 1) data the model is known; variance stays about 1, and without the noise it would collapse."""
    schedule = NoiseSchedule()
    table = sd.samplers.sigma_table(schedule)

    def model(x, t):
        sigma = np.interp(float(t), np.arange(1000), table)
        return x * sigma / math.sqrt(1 + sigma**2)

    g = torch.Generator().manual_seed(0)
    x = torch.randn(100_000, generator=g)
    out = SAMPLERS[name](model, x, schedule, 200, randn=lambda x: torch.randn(x.shape, generator=g))
    assert 0.93 < out.var().item() < 1.02
    assert SAMPLERS[name](model, x, schedule, 200, randn=torch.zeros_like).var().item() < 0.5


# ----------------------------------------------------------------------------------------------------------------
# Pictures, against the library's own pipeline
# ----------------------------------------------------------------------------------------------------------------

LIBRARY = {
    "ddim": diffusers.DDIMScheduler,
    "ddpm": diffusers.DDPMScheduler,
    "dpmpp_2m": diffusers.DPMSolverMultistepScheduler,
    "euler": diffusers.EulerDiscreteScheduler,
    "euler_a": diffusers.EulerAncestralDiscreteScheduler,
    "heun": diffusers.HeunDiscreteScheduler,
}
SIZE = ("--width", "48", "--height", "32")
PROMPT, NEGATIVE = "a photo of an astronaut riding a horse", "blurry, résumé"


@pytest.fixture(scope="module", params=["epsilon", "v_prediction", "v_prediction, zero SNR"])
def pipeline(request, small_tokenizer, tmp_path_factory):
    """A random pipeline of the library, saved to a folder, and its scheduler's settings."""
    settings = {"prediction_type": request.param.split(",")[0]}
    if "zero" in request.param:
        settings |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    pipe = make_pipeline(small_tokenizer, scheduler=settings)
    folder = tmp_path_factory.mktemp("pipeline")
    pipe.save_pretrained(folder)
    return pipe, folder


def ours(folder, out, *flags):
    args = ["--model", str(folder), "--prompt", PROMPT, "--negative", NEGATIVE, "--steps", "10", "--cfg", "5.5",
            "--overwrite"]  # fmt: skip
    SD_ImageGen.main([*args, "--seed", "3", "--device", "cpu", "--dtype", "fp32", "--out", str(out), *flags])
    return np.asarray(Image.open(out)).astype(int)


def theirs(pipe, folder, name, **kwargs):
    """The library's picture, its scheduler made from the folder's JSON as its users do."""
    pipe.scheduler = LIBRARY[name].from_pretrained(folder, subfolder="scheduler")
    args = dict(
        prompt=PROMPT, negative_prompt=NEGATIVE, num_inference_steps=10, guidance_scale=5.5, height=32, width=48
    )
    out = pipe(**(args | kwargs), generator=torch.Generator().manual_seed(3), output_type="np").images[0]
    return (out * 255).round().astype(int)


@pytest.mark.parametrize("name", LIBRARY)
def test_same_picture_as_the_library(pipeline, name, tmp_path):
    pipe, folder = pipeline
    if name == "heun" and pipe.scheduler.config.get("rescale_betas_zero_snr"):
        return  # the library's Heun knows no zero SNR
    expected = theirs(pipe, folder, name)
    picture = ours(folder, tmp_path / "a.png", "--sampler", name, *SIZE)
    assert expected.std() > 10, "the picture must not be flat"
    assert np.abs(picture - expected).max() <= 1
    if name != "euler":  # which is DDIM in other variables
        other = ours(folder, tmp_path / "b.png", "--sampler", "euler", "--steps", "11", *SIZE)
        assert np.abs(other - expected).max() > 1, "control: another sampler paints another picture"


@pytest.mark.parametrize("spacing", ["linspace", "trailing"])
def test_same_picture_for_other_spacings(small_tokenizer, tmp_path, spacing):
    pipe = make_pipeline(small_tokenizer, scheduler={"timestep_spacing": spacing})
    pipe.save_pretrained(tmp_path / "model")
    # the library's DDIM takes t - T // S for the previous step, which is not in its list where that is linspaced
    for name in ["dpmpp_2m", "euler", "heun"] + ["ddim"] * (spacing == "trailing"):
        picture = ours(tmp_path / "model", tmp_path / "a.png", "--sampler", name, *SIZE)
        assert np.abs(picture - theirs(pipe, tmp_path / "model", name)).max() <= 1


def test_karras_sigmas_equal_library():
    schedule = NoiseSchedule("squaredcos_cap_v2")  # with it alone the library leaves the timesteps unrounded
    library = diffusers.DPMSolverMultistepScheduler(beta_schedule="squaredcos_cap_v2", use_karras_sigmas=True)
    library.set_timesteps(20)
    ts, sigmas = sd.samplers.dpm_levels(schedule, 20, "linspace", 0, karras=True)
    assert np.allclose(sigmas, library.sigmas.numpy(), rtol=2e-3)  # the library's abar is fp32: sigma_max is 2e4
    assert np.abs(np.array(ts) - library.timesteps.numpy()).max() <= 1
    plain = sd.samplers.dpm_levels(schedule, 20, "linspace", 0, karras=False)[1]
    assert not np.allclose(plain, sigmas, rtol=0.1)


def test_wrong_map_control(small_tokenizer, tmp_path, monkeypatch):
    """Two weights of one shape exchanged in the table: the picture must differ, or the comparison shows nothing."""
    pipe = make_pipeline(small_tokenizer)
    pipe.save_pretrained(tmp_path / "model")
    expected = theirs(pipe, tmp_path / "model", "ddim")
    assert np.abs(ours(tmp_path / "model", tmp_path / "a.png", *SIZE) - expected).max() <= 1
    right = sd.weights.names.unet_names

    def wrong(config):
        names = right(config)
        a, b = (f"middle_block.1.transformer_blocks.0.attn1.to_{k}.weight" for k in "qk")
        return {**names, a: names[b], b: names[a]}

    rebind(sd.weights.names, "unet_names", wrong, monkeypatch.setattr)
    assert np.abs(ours(tmp_path / "model", tmp_path / "b.png", *SIZE) - expected).max() > 1


def test_image_to_image_equals_library(small_tokenizer, tmp_path):
    pipe = make_pipeline(small_tokenizer)
    pipe.save_pretrained(tmp_path / "model")
    picture = np.random.default_rng(0).integers(0, 255, (4, 6, 3), np.uint8).repeat(8, 0).repeat(8, 1)
    Image.fromarray(picture).save(tmp_path / "in.png")
    library = diffusers.StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    # the library draws from the VAE's posterior; ours takes its mean, as training does
    mode = torch.from_numpy(picture).permute(2, 0, 1)[None].float() / 127.5 - 1
    with torch.no_grad():
        latents = pipe.vae.encode(mode).latent_dist.mean * pipe.vae.config.scaling_factor
    for name in ("ddim", "dpmpp_2m", "euler", "heun"):
        library.scheduler = LIBRARY[name].from_pretrained(tmp_path / "model", subfolder="scheduler")
        expected = library(
            PROMPT, latents, 0.65, 10, guidance_scale=5.5, negative_prompt=NEGATIVE,
            generator=torch.Generator().manual_seed(3), output_type="np",
        ).images[0]  # fmt: skip
        expected = (expected * 255).round().astype(int)
        flags = ["--sampler", name, *SIZE, "--init_image", str(tmp_path / "in.png")]
        out = ours(tmp_path / "model", tmp_path / "a.png", *flags, "--strength", "0.65")
        assert np.abs(out - expected).max() <= 1
        further = ours(tmp_path / "model", tmp_path / "a.png", *flags, "--strength", "0.95")
        assert np.abs(further - expected).max() > 1
    settings = json.loads(Image.open(tmp_path / "a.png").info["sd"])
    assert settings["strength"] == 0.95 and settings["init_image"].endswith("in.png")


def test_cfg_rescale_equals_library(small_tokenizer, tmp_path):
    pipe = make_pipeline(small_tokenizer, scheduler={"prediction_type": "v_prediction", "rescale_betas_zero_snr": True,
                                                    "timestep_spacing": "trailing"})  # fmt: skip
    pipe.save_pretrained(tmp_path / "model")
    expected = theirs(pipe, tmp_path / "model", "ddim", guidance_rescale=0.7)
    picture = ours(tmp_path / "model", tmp_path / "a.png", "--cfg_rescale", "0.7", *SIZE)
    assert np.abs(picture - expected).max() <= 1
    assert np.abs(ours(tmp_path / "model", tmp_path / "b.png", *SIZE) - expected).max() > 1


@pytest.mark.parametrize("name", ["euler_a", "ddpm", "dpmpp_2m", "heun"])
def test_batch_never_changes_a_picture(small_tokenizer, tmp_path, name):
    """Case 20, and a long prompt beside short ones: each picture alone, and in any batch, is the same."""
    make_pipeline(small_tokenizer).save_pretrained(tmp_path / "model")
    prompts = ["a red circle", "word " * 100, "a blue square", "a green star"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    common = ["--model", str(tmp_path / "model"), "--steps", "4", "--sampler", name, "--device", "cpu", "--width", "32",
              "--height", "24"]  # fmt: skip
    for batch in (1, 3):
        SD_ImageGen.main([*common, "--prompts_file", str(tmp_path / "prompts.txt"), "--seed", "5",
                          "--batch", str(batch), "--out", str(tmp_path / f"batch{batch}")])  # fmt: skip
    SD_ImageGen.main([*common, "--prompt", prompts[2], "--seed", "7", "--out", str(tmp_path / "alone.png")])
    one, three = (
        [np.asarray(Image.open(tmp_path / f"batch{b}" / f"{i:05d}.png")).astype(int) for i in range(4)] for b in (1, 3)
    )
    assert all(np.abs(a - b).max() <= 1 for a, b in zip(one, three))
    assert np.abs(np.asarray(Image.open(tmp_path / "alone.png")).astype(int) - one[2]).max() <= 1
    assert np.abs(one[0] - one[2]).max() > 8


def test_guidance():
    """Case 19: cfg 1 runs the prompt alone and 0 the negative alone, for every picture; rescaling is each picture's."""
    calls = []

    def unet(x, t, context):
        calls.append(len(x))
        return x * context.mean(dim=(1, 2))[:, None, None, None] + t[:, None, None, None] / 1000

    g = torch.Generator().manual_seed(0)
    x, text, null = (torch.randn(3, *shape, generator=g) for shape in ((4, 5, 6), (7, 8), (7, 8)))
    t = torch.full((3,), 500.25)
    a, b = unet(x, t, text), unet(x, t, null)
    for cfg, expected, rows in ((1.0, a, 3), (0.0, b, 3), (7.5, b + 7.5 * (a - b), 6)):
        calls.clear()
        torch.testing.assert_close(sd.painting.guided(unet, text, null, cfg)(x, 500.25), expected)
        assert calls == [rows]
    full = sd.painting.guided(unet, text, null, 7.5, rescale=1.0)(x, 500.25)
    torch.testing.assert_close(full.std(dim=(1, 2, 3)), a.std(dim=(1, 2, 3)))


# ----------------------------------------------------------------------------------------------------------------
# Long prompts, settings in the PNG, sizes
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clip(clip_tokenizer):
    config = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    encoder = TextEncoder.new(config, clip_tokenizer)
    randomise(encoder.model)
    return encoder


def test_long_prompts_in_chunks(clip):
    short, long = "a red circle", "a " * 75 + "b " * 10
    assert torch.equal(sd.painting.chunk_ids(clip, short), clip.tokenize([short]))
    assert torch.equal(sd.painting.chunk_ids(clip, ""), clip.tokenize([""]))
    assert torch.equal(sd.painting.chunk_ids(clip, "a " * 75), clip.tokenize(["a " * 75]))
    ids = sd.painting.chunk_ids(clip, long)
    assert torch.equal(ids, clip.tokenize(["a " * 75, "b " * 10]))
    (context, brief), (null, longer) = sd.painting.encode_pairs(clip, [long, short], ["blurry", long])
    assert context.shape == null.shape == longer.shape == (154, 32)
    with torch.no_grad():
        parts = clip.encode(["a " * 75, "b " * 10, "blurry", "", short])
    torch.testing.assert_close(context, parts[:2].flatten(0, 1))
    torch.testing.assert_close(null, parts[2:4].flatten(0, 1))
    torch.testing.assert_close(brief, torch.cat([parts[4], parts[3]]))


PAIR = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')  # as A1111 reads the last line


@pytest.mark.parametrize("prompt", ["a red circle", 'two lines,\nof 漢字: a "quoted" word'])
def test_parameters_text_is_read_back(small_tokenizer, tmp_path, prompt):
    make_pipeline(small_tokenizer).save_pretrained(tmp_path / "my, model")
    SD_ImageGen.main(["--model", str(tmp_path / "my, model"), "--prompt", prompt, "--negative", "blurry",
                      "--steps", "2", "--sampler", "euler_a", "--seed", "11", "--cfg", "6.5", "--width", "40",
                      "--height", "24", "--device", "cpu", "--out", str(tmp_path / "a.png")])  # fmt: skip
    *lines, last = Image.open(tmp_path / "a.png").info["parameters"].split("\n")
    assert "\n".join(lines) == f"{prompt}\nNegative prompt: blurry"
    found = {k: json.loads(v) if v.startswith('"') else v for k, v in PAIR.findall(last)}
    assert found == {"Steps": "2", "Sampler": "Euler a", "CFG scale": "6.5", "Seed": "11", "Size": "40x24",
                     "Model": "my, model", "Schedule type": "DDIM", "RNG": "CPU"}  # fmt: skip
    assert json.loads(Image.open(tmp_path / "a.png").info["sd"])["prompt"] == prompt


@pytest.mark.parametrize("flags,message", [
    (["--width", "44"], "multiples of 8"),
    (["--height", "0"], "multiples of 8"),
    (["--sampler", "plms"], "ddim"),
    (["--cfg_rescale", "1.5"], "--cfg_rescale wants"),
    (["--init_image", "absent.png"], "absent.png"),
    (["--init_image", "absent.png", "--strength", "0.01"], "--strength wants"),
    (["--steps", "0"], "--steps wants"),
])  # fmt: skip
def test_bad_flags_are_refused_before_any_work(small_tokenizer, tmp_path, monkeypatch, flags, message):
    make_pipeline(small_tokenizer).save_pretrained(tmp_path / "model")
    rebind(sd.painting, "encode_texts", lambda *a, **k: pytest.fail("work began"), monkeypatch.setattr)
    with pytest.raises(InputError, match=message):
        SD_ImageGen.main(["--model", str(tmp_path / "model"), "--prompt", "a", "--device", "cpu", "--out",
                          str(tmp_path / "out"), "--width", "32", "--height", "32", *flags])  # fmt: skip
    assert not list(tmp_path.glob("out/*.png"))


def test_benchmark_prints_its_figures_and_writes_nothing(small_tokenizer, tmp_path, capsys, monkeypatch):
    make_pipeline(small_tokenizer).save_pretrained(tmp_path / "model")
    size = ["--width", "32", "--height", "32", "--batch", "2"]
    common = ["--model", str(tmp_path / "model"), "--device", "cpu", "--out", str(tmp_path / "out"), *size]
    with pytest.raises(InputError, match="--benchmark wants at least 1, found 0"):
        SD_ImageGen.main([*common, "--benchmark", "0"])
    started, open_model = time.perf_counter(), SD_ImageGen.open_model
    monkeypatch.setattr(SD_ImageGen, "open_model", lambda *a, **k: time.sleep(0.3) or open_model(*a, **k))
    SD_ImageGen.main([*common, "--benchmark", "3"])
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0.3 <= row["load_s"] < time.perf_counter() - started
    assert (row["benchmark"], row["batch"], row["steps"], row["card"]) == ("sample", 2, 3, "cpu")
    assert row["torch"] == torch.__version__ and row["mfu"] is row["peak_GiB"] is None  # a CPU
    assert row["evaluations_per_s"] == pytest.approx(4e3 / row["ms_per_step"], rel=0.01)  # 2 pictures, 2 sides of CFG
    assert not (tmp_path / "out").exists()


def test_utilisation_is_of_the_flops_that_torch_counts(monkeypatch):
    conv = lambda x: torch.nn.Conv2d(3, 5, 3, padding=1)(x)  # noqa: E731
    # Each output of each of two pictures: a multiplication and an addition for every weight.
    assert sd.plan.count_flops(conv, (2, 3, 8, 8)) == 2 * 5 * 64 * 2 * 27
    rebind(sd.device, "peak_flops", lambda device: 2e12, monkeypatch.setattr)
    assert sd.speed.benchmark_facts(torch.device("cpu"), 5e11)["mfu"] == 0.25
