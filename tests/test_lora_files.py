"""LoRA files: read in every spelling, added exactly, written so that others read them; what does not fit is refused.

Oracles: the diffusers library's load_lora_weights, PEFT's own merge, and LyCORIS' own products.

pytest tests/test_lora_files.py
"""

import hashlib
import json
import re
from dataclasses import asdict
from pathlib import Path

import diffusers
import lycoris.functional.general
import lycoris.functional.locon
import lycoris.functional.loha
import lycoris.functional.lokr
import numpy as np
import peft
import pytest
import safetensors
import torch
import transformers
from conftest import randomise
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file

import SD_Convert
import SD_ImageGen
from sd.errors import InputError
from sd.painting import initial_noise
from sd.weights.lora import Change, base_of, delta, read_lora, text_shapes
from sd.weights.merge import with_loras
from sd.weights.parts import save_vae
from sd.weights.read import open_model
from SD_Model import VAE, NoiseSchedule, TextEncoder, UNet, UNetConfig, VAEConfig, weights_hash

UNET = UNetConfig((32, 64), (True, False), 1, 4, 32, 16)
VAE_CONFIG = VAEConfig((16, 32, 32, 32), 1, norm_groups=8)
TEXT = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
TO_Q = "down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


@pytest.fixture(scope="module")
def model(small_tokenizer, tmp_path_factory):
    """A small model as a checkpoint folder of this project, its live and EMA weights different."""
    folder = tmp_path_factory.mktemp("model") / "step_00000020"
    folder.mkdir()
    for i, name in enumerate(("unet", "unet_ema")):
        save_file(randomise(UNet(UNET), i).state_dict(), folder / f"{name}.safetensors")
    encoder = TextEncoder.new(TEXT, small_tokenizer)
    randomise(encoder.model, 10)
    encoder.save(folder / "text_encoder")
    save_vae(randomise(VAE(VAE_CONFIG), 20), folder / "vae")
    values = {"format": "checkpoint-1", "preset": "test", "unet": asdict(UNET), "size": 32, "vae": "vae",
              "schedule": NoiseSchedule().config, "text_encoder": "text_encoder"}  # fmt: skip
    (folder / "model.json").write_text(json.dumps(values))
    return folder


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    """The same as a folder of the diffusers library."""
    return convert(model, tmp_path_factory.mktemp("diffusers") / "model", "--format", "diffusers")


@pytest.fixture(scope="module")
def base(model):
    return base_of(UNET, text_shapes(open_model(model).text_encoder()))


@pytest.fixture
def pipe(folder):
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def convert(source, out, *flags) -> Path:
    SD_Convert.main([str(source), str(out), *map(str, flags)])
    return out


def rand(*shape, seed=0, std=0.3) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * std


def weights_of(model, weights="ema") -> dict[str, torch.Tensor]:
    """fp32 weights of a model by our module names."""
    opened = open_model(model, weights) if isinstance(model, Path | str) else model
    unet = {f"unet.{k}": t.float() for k, t in opened.tensors().items()}
    text = {f"text_encoder.{k}": t.float() for k, t in opened.text_encoder().model.state_dict().items()}
    return {k.removesuffix(".weight"): t for k, t in (unet | text).items()}


ALPHAS = (1.0, 2.5, 6.0, 8.0)


def adapters(base, seed=0, convs=True, text=True, ranks=(2, 3, 4), alphas=ALPHAS, strength=0.3) -> dict[str, Change]:
    """A LoRA whose ranks and alphas differ from module to module, and no alpha is its rank."""
    out = {}
    for i, (name, shape) in enumerate(base.shapes.items()):
        if re.search(r"time_embed|input_blocks\.0\.|unet\.out\.", name):  # which trainers leave alone
            continue
        if (not text and name.startswith("text_encoder.")) or (not convs and ".transformer_blocks." not in name):
            continue
        rank, ones = ranks[i % len(ranks)], [1] * (len(shape) - 2)
        scale = strength * (shape[1:].numel() * rank) ** -0.5
        down, up = rand(rank, *shape[1:], seed=seed + 2 * i, std=1), rand(shape[0], rank, *ones, seed=seed + 2 * i + 1)
        out[name] = Change({"down": down, "up": up * scale / 0.3}, alphas[i % len(alphas)])
    return out


def kohya_name(base, name: str) -> str:
    """By the rule of that program: its prefix, and the path in the diffusers library with underscores."""
    part, path = base.theirs[name].split(".", 1)
    return {"unet": "lora_unet_", "text_encoder": "lora_te_"}[part] + path.replace(".", "_")


def kohya_tensors(base, changes, dtype=torch.float32) -> dict[str, torch.Tensor]:
    out = {}
    for name, change in changes.items():
        key = kohya_name(base, name)
        out |= {f"{key}.lora_{part}.weight": t.to(dtype).contiguous() for part, t in change.tensors.items()}
        out[f"{key}.alpha"] = torch.tensor(change.alpha).to(dtype)
    return out


def write_kohya(path: Path, base, changes, dtype=torch.float32, metadata=None) -> Path:
    save_file(kohya_tensors(base, changes, dtype), path, metadata)
    return path


def low_rank(change) -> torch.Tensor:
    """alpha / r * up down by a formula of its own: a convolution's columns summed one rank after the other."""
    down, up = change.tensors["down"].double(), change.tensors["up"].double()
    total = sum(up[:, k].reshape(-1, *[1] * (down.dim() - 1)) * down[k][None] for k in range(len(down)))
    return (total * change.alpha / len(down)).float()


def assert_changed_by(after, before, changes, weight=1.0, tolerance=2e-6):
    """Every module of `changes`, and no other, is changed by its low_rank."""
    for name, tensor in before.items():
        if name not in changes:
            assert torch.equal(after[name], tensor), name
        else:
            wanted = tensor + weight * low_rank(changes[name]).reshape(tensor.shape)
            assert not torch.equal(after[name], tensor) and (after[name] - wanted).abs().max() < tolerance, name


def paint(model, out, *flags) -> np.ndarray:
    flags = [*map(str, flags)]
    if "--prompt" not in flags and "--from_png" not in flags:
        flags += ["--prompt", "a red circle"]
    SD_ImageGen.main(["--model", str(model), "--out", str(out), "--device", "cpu", *flags])
    return np.array(Image.open(out)).astype(int)


def painted_by(pipe, seed=3) -> np.ndarray:
    latents = initial_noise([seed], (4, 4, 4))
    out = pipe("a red circle", negative_prompt="", num_inference_steps=4, guidance_scale=5.0, latents=latents,
               height=32, width=32, output_type="np")  # fmt: skip
    return (out.images[0] * 255).round().astype(int)


PAINT = ("--steps", 4, "--cfg", 5, "--seed", 3)


# ----------------------------------------------------------------------------------------------------------------
# Names
# ----------------------------------------------------------------------------------------------------------------


def test_the_modules_of_sd15_are_those_of_the_diffusers_library():
    """Names taken from that library's own network; counts and parameters are the published ones."""
    base = base_of()
    with torch.device("meta"):
        unet = diffusers.UNet2DConditionModel(cross_attention_dim=768)
    layers = {n: m.weight for n, m in unet.named_modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)}
    ours = {name: theirs.removeprefix("unet.") for name, theirs in base.theirs.items() if name.startswith("unet.")}
    assert sorted(ours.values()) == sorted(layers)
    for name, theirs in ours.items():
        assert base.shapes[name].numel() == layers[theirs].numel()
        assert base.ours["lora_unet_" + theirs.replace(".", "_")] == name
    inside = [name for name in ours if re.search(r"\.1\.(proj_|transformer)", name)]
    ends = ("time_embed", "input_blocks.0.", "out.")
    locon = [name for name in ours if not name.removeprefix("unet.").startswith(ends)]
    assert (len(inside), len(locon), len(base.shapes) - len(ours)) == (192, 278, 72)

    def parameters(names):
        return sum(base.shapes[n][0] + base.shapes[n][1:].numel() for n in names)

    assert parameters(inside) == 423_936 and parameters(n for n in base.shapes if n not in ours) == 165_888
    assert parameters(set(locon) - set(inside)) == 626_880
    assert base.ours[f"lora_unet_{TO_Q}"] == "unet.input_blocks.1.1.transformer_blocks.0.attn1.to_q"
    te = "lora_te_text_model_encoder_layers_11_self_attn_out_proj"
    assert base.ours[te] == "text_encoder.encoder.layers.11.self_attn.out_proj"


def test_no_spelling_stands_for_two_modules(base):
    for b in (base, base_of()):
        wanted = {spelling: set() for spelling in b.ours}
        for name in b.shapes:
            part, path = name.split(".", 1)
            for p in {path, b.theirs[name].split(".", 1)[1]}:
                head = "lora_unet_" if part == "unet" else "lora_te_"
                wanted.setdefault(p, set()).add(name)
                wanted.setdefault(head + p.replace(".", "_"), set()).add(name)
        assert all(names <= {b.ours[spelling]} for spelling, names in wanted.items())


def ldm_names(base, changes):
    out = {}
    for name, c in changes.items():
        head = "lora_unet_" + name[5:].replace(".", "_") if name.startswith("unet.") else kohya_name(base, name)
        out |= {f"{head}.lora_down.weight": c.tensors["down"], f"{head}.lora_up.weight": c.tensors["up"],
                f"{head}.alpha": torch.tensor(c.alpha)}  # fmt: skip
    return out


def dotted(down, up, text_down, text_up, rule=lambda name: name):
    """Names with dots, which carry no alpha: it is multiplied into up."""

    def make(base, changes):
        out = {}
        for name, c in changes.items():
            other = rule(base.theirs[name])
            ends = (down, up) if name.startswith("unet.") else (text_down, text_up)
            out[f"{other}{ends[0]}.weight"] = c.tensors["down"]
            out[f"{other}{ends[1]}.weight"] = c.tensors["up"] * (c.alpha / len(c.tensors["down"]))
        return out

    return make


def old_unet(name):
    """attn1.processor.to_q_lora.down, as the diffusers library wrote until 2023."""
    name = re.sub(r"(attn[12])\.(to_[qkv]|to_out)(\.0)?$", r"\1.processor.\2", name)
    return re.sub(r"\b(q|k|v|out)_proj$", r"to_\1", name)


def own_names(base, changes):
    out = {}
    for name, c in changes.items():
        out |= {f"{name}.{part}": t for part, t in c.tensors.items()} | {f"{name}.alpha": torch.tensor(c.alpha)}
    return out


SPELLINGS = {
    "kohya": kohya_tensors,
    "kohya, the original's names": ldm_names,
    "diffusers": dotted(".lora.down", ".lora.up", ".lora_linear_layer.down", ".lora_linear_layer.up"),
    "diffusers, PEFT's ends": dotted(".lora_A", ".lora_B", ".lora_A", ".lora_B"),
    "diffusers, an adapter's name": dotted(*[".lora_A.default", ".lora_B.default"] * 2),
    "diffusers, old": dotted(*["_lora.down", "_lora.up"] * 2, old_unet),
    "ComfyUI": dotted(*[".lora_down", ".lora_up"] * 2, lambda n: n.replace("unet.", "diffusion_model.")),
    "ours": own_names,
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_the_same_lora(base, model, tmp_path, spelling):
    changes = adapters(base, convs=spelling != "diffusers, old")
    tensors = SPELLINGS[spelling](base, changes)
    if spelling == "ComfyUI":  # which knows the original's names after diffusion_model.
        ours = {
            base.theirs[n].replace("unet.", "diffusion_model."): n.replace("unet.", "diffusion_model.") for n in changes
        }
        tensors = {re.sub(r"(.+)(\.lora_.+)", lambda m: ours[m[1]] + m[2], k): t for k, t in tensors.items()}
    save_file({k: t.contiguous() for k, t in tensors.items()}, tmp_path / "a.safetensors")
    lora = read_lora(str(tmp_path / "a.safetensors"), base)
    assert lora.changes.keys() == changes.keys()
    before = weights_of(model)
    for name, change in lora.changes.items():
        assert (delta(change, before[name]) - low_rank(changes[name]).reshape(before[name].shape)).abs().max() < 1e-6


def test_a_missing_alpha_is_the_rank(base, tmp_path):
    """Not 1, which would weaken the LoRA by its rank."""
    tensors = {k: t for k, t in kohya_tensors(base, adapters(base)).items() if not k.endswith(".alpha")}
    save_file(tensors, tmp_path / "a.safetensors")
    lora = read_lora(str(tmp_path / "a.safetensors"), base)
    assert all(change.scale == 1 for change in lora.changes.values())


# ----------------------------------------------------------------------------------------------------------------
# What a change adds: LyCORIS and PEFT
# ----------------------------------------------------------------------------------------------------------------

LINEAR, CONV = (24, 36), (24, 36, 3, 3)


def lycoris_cases():
    """name: (shape, tensors by LyCORIS' names, alpha, its own product)."""
    loha, lokr, locon = lycoris.functional.loha, lycoris.functional.lokr, lycoris.functional.locon
    r, k = 4, 9
    cases = {}
    down, up, mid = rand(r, 36, 1, 1), rand(24, r, 1, 1, seed=1), rand(r, r, 3, 3, seed=2)
    tensors = {"lora_down.weight": down, "lora_up.weight": up, "lora_mid.weight": mid}
    cases["LoCon, Tucker"] = CONV, tensors, 3.0, locon.diff_weight(down, up, mid, gamma=3 / r)
    a = [rand(24, r, seed=3), rand(r, 36, seed=4), rand(24, r, seed=5), rand(r, 36, seed=6)]
    names = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
    wanted = loha.diff_weight(a[1], a[0], a[3], a[2], None, None, gamma=3 / r)
    cases["LoHa"] = LINEAR, dict(zip(names, a)), 3.0, wanted
    a = [rand(24, r, seed=3), rand(r, 36 * k, seed=4), rand(24, r, seed=5), rand(r, 36 * k, seed=6)]
    wanted = loha.diff_weight(a[1], a[0], a[3], a[2], None, None, gamma=3 / r).reshape(CONV)
    cases["LoHa of a convolution"] = CONV, dict(zip(names, a)), 3.0, wanted
    a = [rand(r, 24, seed=3), rand(r, 36, seed=4), rand(r, 24, seed=5), rand(r, 36, seed=6)]
    t = [rand(r, r, 3, 3, seed=7), rand(r, r, 3, 3, seed=8)]
    wanted = loha.diff_weight(a[1], a[0], a[3], a[2], *t, gamma=3 / r)
    cases["LoHa, Tucker"] = CONV, dict(zip((*names, "hada_t1", "hada_t2"), (*a, *t))), 3.0, wanted

    def kron(w1=None, w1a=None, w1b=None, w2=None, w2a=None, w2b=None, t=None, scale=3 / r):
        flat = None if w2b is None or t is not None else w2b.reshape(r, 9, *([3, 3] if w2b.shape[1] > 9 else []))
        wanted = lokr.kron_weight(w1, w1a, w1b, w2, w2a, w2b if flat is None else flat, t, scale)
        names = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")
        return {n: x for n, x in zip(names, (w1, w1a, w1b, w2, w2a, w2b, t)) if x is not None}, 3.0, wanted

    w1, w1a, w1b = rand(6, 4), rand(6, r, seed=1), rand(r, 4, seed=2)
    cases["LoKr, both whole"] = LINEAR, *kron(w1, w2=rand(4, 9, seed=3), scale=1)
    cases["LoKr, w2 factored"] = LINEAR, *kron(w1, w2a=rand(4, r, seed=3), w2b=rand(r, 9, seed=4))
    cases["LoKr, both factored"] = LINEAR, *kron(None, w1a, w1b, None, rand(4, r, seed=3), rand(r, 9, seed=4))
    cases["LoKr, w1 factored"] = LINEAR, *kron(None, w1a, w1b, rand(4, 9, seed=3))
    cases["LoKr of a convolution"] = CONV, *kron(w1, w2a=rand(4, r, seed=3), w2b=rand(r, 81, seed=4))
    cases["LoKr, Tucker"] = CONV, *kron(w1, w2a=rand(r, 4, seed=3), w2b=rand(r, 9, seed=4), t=rand(r, r, 3, 3, seed=5))
    return cases


CASES = lycoris_cases()


def as_change(tensors, alpha) -> Change:
    short = {"lora_down.weight": "down", "lora_up.weight": "up", "lora_mid.weight": "mid"}
    return Change({short.get(k, k): t for k, t in tensors.items()}, alpha)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dora", ["", "rows", "columns"])
def test_lycoris_kinds_add_what_lycoris_adds(case, dora):
    """To 1e-6 of the largest weight; DoRA's lengths along either axis."""
    shape, tensors, alpha, added = CASES[case]
    weight = rand(*shape, seed=99)
    wanted, change = weight + added, as_change(tensors, alpha)
    if dora:
        lengths = rand(shape[0] if dora == "rows" else shape[1], seed=50, std=0.1).abs() + 1
        lengths = lengths.reshape(*([-1, 1] if dora == "rows" else [1, -1]), *[1] * (len(shape) - 2))
        wanted = lycoris.functional.general.weight_decompose(wanted, lengths, 1, dora == "rows")
        change.tensors["dora_scale"] = lengths
    found = weight + delta(change, weight)
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    assert (found - weight).abs().max() > 0.05 * weight.abs().max()


def test_dora_of_a_square_weight_goes_along_the_axis_that_its_shape_names():
    weight, change = rand(8, 8, seed=1), as_change({"lora_down.weight": rand(2, 8), "lora_up.weight": rand(8, 2)}, 2.0)
    lengths = rand(8, seed=3).abs() + 0.5
    rows, columns = (Change(change.tensors | {"dora_scale": lengths.reshape(s)}, 2.0) for s in ((8, 1), (1, 8)))
    assert torch.allclose((weight + delta(rows, weight)).norm(dim=1), lengths)
    assert torch.allclose((weight + delta(columns, weight)).norm(dim=0), lengths)


def test_lycoris_keys_are_found_in_a_file(base, model, tmp_path):
    """The names of a real file, with DoRA; LoKr of two whole matrices ignores its alpha."""
    q, conv = "input_blocks.1.1.transformer_blocks.0.attn1.to_q", "input_blocks.1.0.in_layers.2"
    loha = {"hada_w1_a": rand(32, 4), "hada_w1_b": rand(4, 32), "hada_w2_a": rand(32, 4), "hada_w2_b": rand(4, 32),
            "dora_scale": torch.ones(1, 32), "alpha": torch.tensor(2.0)}  # fmt: skip
    lokr = {"lokr_w1": rand(4, 4), "lokr_w2": rand(8, 8, 3, 3), "alpha": torch.tensor(1e10)}
    names = kohya_name(base, f"unet.{q}"), kohya_name(base, f"unet.{conv}")
    tensors = {f"{names[0]}.{k}": t for k, t in loha.items()} | {f"{names[1]}.{k}": t for k, t in lokr.items()}
    save_file(tensors, tmp_path / "a.safetensors")
    changed, _ = with_loras(open_model(model), [str(tmp_path / "a.safetensors")])
    before, after = weights_of(model), weights_of(changed)
    assert {n for n, t in before.items() if not torch.equal(t, after[n])} == {f"unet.{q}", f"unet.{conv}"}
    assert torch.allclose(after[f"unet.{q}"].norm(dim=0), torch.ones(32))
    kron = torch.kron(lokr["lokr_w1"][..., None, None], lokr["lokr_w2"])
    assert torch.allclose(after[f"unet.{conv}"], before[f"unet.{conv}"] + kron)
    flags = ("--format", "lora", "--dtype", "fp32", "--base", model)
    out = convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", *flags)
    assert load_file(out).keys() == tensors.keys()
    with safetensors.safe_open(out, "pt") as f:
        assert f.metadata()["ss_network_module"] == "lycoris.kohya"
    with pytest.raises(InputError, match="LoHa.* is no product of two matrices"):
        convert(tmp_path / "a.safetensors", tmp_path / "c", "--format", "diffusers", "--base", model)


PEFT_RUNS = {
    "alpha by module": dict(
        lora_alpha=6, rank_pattern={"attn2.to_k": 3}, alpha_pattern={"attn2.to_k": 5, "proj_in": 1}
    ),
    "rank-stabilised": dict(lora_alpha=6, use_rslora=True, rank_pattern={"attn2.to_k": 3}),
    "DoRA": dict(lora_alpha=6, use_dora=True),
}


@pytest.mark.parametrize("kind", PEFT_RUNS)
def test_a_folder_of_peft_adds_what_peft_merges(base, folder, model, tmp_path, kind):
    unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    config = peft.LoraConfig(r=4, target_modules=["to_k", "to_out.0", "proj_in", "conv1", "ff.net.2"],
                             init_lora_weights=False, **PEFT_RUNS[kind])  # fmt: skip
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(unet, config)
    for name, p in wrapped.named_parameters():
        if "magnitude" in name:
            p.data *= torch.rand(p.shape) + 0.5
    wrapped.save_pretrained(tmp_path / "adapter")
    merged = wrapped.merge_and_unload().state_dict()
    changed, _ = with_loras(open_model(model), [str(tmp_path / "adapter")])
    before, after = weights_of(model), weights_of(changed)
    moved = {name for name, t in before.items() if not torch.equal(t, after[name])}
    assert len(moved) > 12
    for name in before:
        if name.startswith("unet.") and name in base.theirs:
            wanted = merged[base.theirs[name].removeprefix("unet.") + ".weight"].reshape(after[name].shape)
            assert (after[name] - wanted).abs().max() < 2e-6 * max(1, wanted.abs().max()), name


def test_the_two_folders_of_peft_are_one_lora(base, folder, model, tmp_path):
    """unet/ and text_encoder/, as PEFT's own examples write them; each has its own alpha."""
    parts = {"unet": diffusers.UNet2DConditionModel.from_pretrained(folder / "unet"),
             "text_encoder": transformers.CLIPTextModel.from_pretrained(folder / "text_encoder")}  # fmt: skip
    before, alphas = weights_of(model), {"unet": 3, "text_encoder": 5}
    for part, module in parts.items():
        config = peft.LoraConfig(
            r=4, lora_alpha=alphas[part], target_modules=["to_q", "q_proj"], init_lora_weights=False
        )
        wrapped = peft.get_peft_model(module, config)
        wrapped.save_pretrained(tmp_path / part)
        parts[part] = wrapped.merge_and_unload().state_dict()
    after = weights_of(with_loras(open_model(model), [str(tmp_path)])[0])
    moved = [name for name, t in before.items() if not torch.equal(t, after[name])]
    assert len(moved) == 10 and sum("q_proj" in name for name in moved) == 2
    for name in moved:
        part, path = name.split(".", 1)
        wanted = parts[part].get(f"{path}.weight", parts[part].get(base.theirs[name].split(".", 1)[1] + ".weight"))
        assert (after[name] - wanted.reshape(after[name].shape)).abs().max() < 2e-6


def test_peft_folders_whose_base_is_another_are_refused(base, tmp_path):
    """PiSSA takes a part out of the base's own weights, which are then not the model's."""
    q = "base_model.model.down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    save_file({f"{q}.lora_A.weight": rand(4, 32), f"{q}.lora_B.weight": rand(32, 4)},
              tmp_path / "adapter_model.safetensors")  # fmt: skip
    for values, words in (({"init_lora_weights": "pissa_niter_16"}, "pissa"), ({"peft_type": "LOHA"}, "LOHA")):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 2} | values))
        with pytest.raises(InputError, match=words):
            read_lora(str(tmp_path), base)
    for values in ({"lora_alpha": "8"}, {"lora_alpha": float("nan")}, {"alpha_pattern": ["to_q"]},
                   {"alpha_pattern": {"(": 2}}, {"alpha_pattern": {"to_q": [1]}}):  # fmt: skip
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | values))
        with pytest.raises(InputError, match="alpha(_pattern)? wants"):
            read_lora(str(tmp_path), base)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4}))
    assert next(iter(read_lora(str(tmp_path), base).changes.values())).scale == 2  # PEFT's alpha where none is named: 8


# ----------------------------------------------------------------------------------------------------------------
# What does not fit is refused
# ----------------------------------------------------------------------------------------------------------------


def refused(kind, base, tensors):
    """A file's tensors, spoiled or turned into those of something else, and what the message has to say."""
    q, n = f"lora_unet_{TO_Q}", len(tensors)
    sdxl = {f"lora_te2_text_model_encoder_layers_{i}_mlp_fc1.lora_down.weight": rand(4, 8) for i in range(12)}
    sd2 = {k: rand(t.shape[0], 1024) if "attn2_to_k.lora_down" in k else t for k, t in tensors.items()}
    flux = {f"lora_unet_double_blocks_{i}_img_attn_qkv.lora_down.weight": rand(4, 8) for i in range(3)}
    return {
        "SDXL": (sdxl, f"0 of 12 tensors matched; it looks like a LoRA of SDXL.*over: {next(iter(sdxl))}.* 2 more"),
        "SDXL's first encoder": ({k.replace("lora_te_", "lora_te1_"): t for k, t in tensors.items()}, "SDXL"),
        "SD 2.x": (sd2, "SD 2.x"),
        "Flux": (flux, "0 of 3 tensors matched; it looks like a LoRA of a transformer model"),
        "a model": ({"time_embed.0.weight": rand(4, 4)}, "0 of 1 tensors matched; it looks like no LoRA"),
        "one of another": (tensors | {f"{q}.oft_blocks": rand(4, 4)}, f"{n} of {n + 1} .*left over: {q}.oft_blocks"),
        "a bias": (tensors | {f"{q}.lora_B.bias": rand(32)}, f"left over: {q}.lora_B.bias"),
        "no up": ({k: t for k, t in tensors.items() if k != f"{q}.lora_up.weight"}, "it has down alone"),
        "half a LoHa": ({f"{q}.hada_w1_a": rand(32, 4), f"{q}.hada_w1_b": rand(4, 32)}, "it has hada_w1_a, hada_w1_b"),
        "ranks": (tensors | {f"{q}.lora_up.weight": rand(32, 7)}, "1 of .* modules differ.*attn1.to_q"),
        "turned": (tensors | {f"lora_unet_{TO_Q[:-10]}ff_net_2.lora_down.weight": rand(2, 32),
                              f"lora_unet_{TO_Q[:-10]}ff_net_2.lora_up.weight": rand(128, 2)},
                   r"ff.net.2: \(32, 128\) wanted, \(128, 32\) found"),
        "NaN": (tensors | {f"{q}.lora_up.weight": rand(32, 2).log()}, f"{q}.lora_up.weight has values that are no fin"),
        "whole numbers": (tensors | {f"{q}.lora_up.weight": torch.ones(32, 2).to(torch.int8)}, "no finite fractions"),
        "twice": (tensors | {f"unet.{TO_Q}.lora_A.weight".replace("_attentions_0_", ".attentions.0.")
                             .replace("down_blocks_0", "down_blocks.0").replace("blocks_0_attn1_", "blocks.0.attn1."):
                             rand(2, 32)}, "a second `down`"),
        "many alphas": (tensors | {f"{q}.alpha": torch.ones(2)}, "alpha wants one number"),
        "DoRA": (tensors | {f"{q}.dora_scale": torch.ones(31, 1)}, r"dora_scale \(31, 1\) found"),
    }[kind]  # fmt: skip


KINDS = ["SDXL", "SDXL's first encoder", "SD 2.x", "Flux", "a model", "one of another", "a bias", "no up",
         "half a LoHa", "ranks", "turned", "NaN", "whole numbers", "twice", "many alphas", "DoRA"]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_what_does_not_fit_is_refused(base, tmp_path, kind):
    """Never an unchanged picture, and never a part of a LoRA."""
    tensors, words = refused(kind, base, kohya_tensors(base, adapters(base)))
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=words) as e:
        read_lora(str(tmp_path / "a.safetensors"), base)
    assert "\n" not in str(e.value)


def test_tensors_of_any_shape_fit_or_are_refused_in_a_sentence(base, model, tmp_path):
    """Each tensor of each kind in other shapes: no error of torch's gets out, and what is read can be added."""
    name = "unet.input_blocks.1.0.in_layers.2"  # [32, 32, 3, 3]
    kinds = [
        {"lora_down.weight": rand(4, 32, 3, 3), "lora_up.weight": rand(32, 4, 1, 1), "dora_scale": rand(32, 1, 1, 1)},
        {"lora_down.weight": rand(4, 32, 1, 1), "lora_up.weight": rand(32, 4, 1, 1),
         "lora_mid.weight": rand(4, 4, 3, 3)},
        {"hada_w1_a": rand(32, 4), "hada_w1_b": rand(4, 288), "hada_w2_a": rand(32, 4), "hada_w2_b": rand(4, 288)},
        {"lokr_w1": rand(4, 4), "lokr_w2_a": rand(8, 2), "lokr_w2_b": rand(2, 72)},
        {"lokr_w1_a": rand(4, 2), "lokr_w1_b": rand(2, 4), "lokr_w2_a": rand(2, 8), "lokr_w2_b": rand(2, 8),
         "lokr_t2": rand(2, 2, 3, 3)},
    ]  # fmt: skip
    weight, read = weights_of(model)[name], 0
    for tensors in kinds:
        for key, tensor in [("", torch.zeros(0)), *tensors.items()]:
            shapes = (
                [(), (1,), (0, 5), (3, 7), tensor.shape[::-1], (*tensor.shape, 1), (0, *tensor.shape[1:])]
                if key
                else [()]
            )
            for shape in shapes:
                spoiled = tensors | ({key: rand(*shape)} if key else {})
                save_file({f"{kohya_name(base, name)}.{k}": t for k, t in spoiled.items()}, tmp_path / "a.safetensors")
                try:
                    lora = read_lora(str(tmp_path / "a.safetensors"), base)
                except InputError as e:
                    assert key and "\n" not in str(e)
                    continue
                read += 1
                assert delta(lora.changes[name], weight).shape == weight.shape
                assert delta(lora.changes[name], weight).isfinite().all()
    assert read >= len(kinds)


@pytest.mark.parametrize("metadata, words", [
    ({"ss_base_model_version": "sdxl_base_v1-0"}, "SDXL"), ({"ss_v2": "True"}, "SD 2.x"),
    ({"modelspec.architecture": "stable-diffusion-xl-v1-base/lora"}, "SDXL"),
])  # fmt: skip
def test_its_metadata_say_what_a_file_is_for(base, tmp_path, metadata, words):
    save_file({"lora_unet_other.lora_down.weight": rand(4, 4)}, tmp_path / "a.safetensors", metadata)
    with pytest.raises(InputError, match=words):
        read_lora(str(tmp_path / "a.safetensors"), base)


@pytest.mark.parametrize("word, words", [
    ("nothing.safetensors", "there is no such file"), ("nothing.safetensors:x", "PATH:WEIGHT with a number"),
    ("a:nan", "PATH:WEIGHT with a number"), (":0.5", "PATH:WEIGHT"), (".", "is there"),
])  # fmt: skip
def test_flags_that_name_no_lora(model, tmp_path, monkeypatch, word, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        paint(model, tmp_path / "a.png", "--lora", word)
    assert not (tmp_path / "a.png").exists()


# ----------------------------------------------------------------------------------------------------------------
# Painting
# ----------------------------------------------------------------------------------------------------------------


def test_a_kohya_file_paints_what_the_diffusers_library_paints(base, model, pipe, tmp_path):
    """LoCon and text encoder, ranks different from module to module, at full and at other weight. One alpha for all:
    that library mixes up alphas of kohya's files that differ (its issue 3910 and later), which the other tests hold."""
    file = write_kohya(tmp_path / "a.safetensors", base, adapters(base, alphas=(2.5,)))
    without = paint(model, tmp_path / "0.png", *PAINT)
    assert abs(painted_by(pipe) - without).max() <= 1
    pipe.load_lora_weights(file)
    ours = paint(model, tmp_path / "1.png", *PAINT, "--lora", file)
    assert abs(painted_by(pipe) - ours).max() <= 1 and abs(ours - without).mean() > 5
    pipe.set_adapters(pipe.get_active_adapters(), 0.4)
    weaker = paint(model, tmp_path / "2.png", *PAINT, "--lora", f"{file}:0.4")
    assert abs(painted_by(pipe) - weaker).max() <= 1 and abs(ours - weaker).mean() > 2


def test_loras_add_up_and_change_nothing_else(base, model, tmp_path):
    """W + a dA + b dB; not A alone, not B added to what A made of a DoRA's base; weight 0 is the model itself."""
    a, b = adapters(base, 0), adapters(base, 500, text=False, convs=False)
    files = [write_kohya(tmp_path / f"{n}.safetensors", base, c) for n, c in (("a", a), ("b", b))]
    before = weights_of(model)
    both, _ = with_loras(open_model(model), [f"{files[0]}:0.7", f"{files[1]}:-0.3"])
    for name, after in weights_of(both).items():
        wanted = before[name]
        for weight, changes in ((0.7, a), (-0.3, b)):
            wanted = wanted + (weight * low_rank(changes[name]).reshape(wanted.shape) if name in changes else 0)
        assert (after - wanted).abs().max() < 2e-6, name
    assert_changed_by(weights_of(with_loras(open_model(model), [str(files[0])])[0]), before, a)
    none, _ = with_loras(open_model(model), [f"{files[0]}:0"])
    assert all(torch.equal(t, before[name]) for name, t in weights_of(none).items())


def test_a_lora_is_added_in_fp32_before_the_cast(base, model, tmp_path):
    """The network's bf16 weights are those nearest to W + dW; adding in bf16 would round twice, or lose dW."""
    changes = adapters(base, strength=1e-3)
    file = write_kohya(tmp_path / "a.safetensors", base, changes)
    moved, _ = with_loras(open_model(model), [str(file)])
    unet, before, halves = dict(moved.unet(dtype=torch.bfloat16).named_parameters()), weights_of(model), 0
    for name in (n for n in changes if n.startswith("unet.")):
        exact = before[name] + delta(changes[name], before[name])
        found = unet[name.removeprefix("unet.") + ".weight"]
        assert torch.equal(found, exact.bfloat16())
        halves += not torch.equal(found, before[name].bfloat16() + delta(changes[name], before[name]).bfloat16())
    assert halves > 20


def test_the_png_says_which_loras_and_paints_them_again(base, model, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_kohya(Path("a.safetensors"), base, adapters(base), metadata={"ss_output_name": "my cat"})
    write_kohya(Path("b:2.safetensors"), base, adapters(base, 500))
    loras = ("--lora", "a.safetensors:0.75", "--lora", "b:2.safetensors")
    ours = paint(model, tmp_path / "1.png", *PAINT, *loras)
    texts = Image.open("1.png").text
    hashes = [sha256(Path(p)) for p in ("a.safetensors", "b:2.safetensors")]
    assert json.loads(texts["sd"])["lora"] == [
        {"path": "a.safetensors", "name": "my_cat", "weight": 0.75, "sha256": hashes[0]},
        {"path": "b:2.safetensors", "name": "b_2", "weight": 1.0, "sha256": hashes[1]},
    ]
    assert texts["parameters"].startswith("a red circle <lora:my_cat:0.75> <lora:b_2:1>\nNegative prompt:")
    capsys.readouterr()
    again = paint(model, tmp_path / "2.png", "--from_png", "1.png")
    assert (again == ours).all() and "another file" not in capsys.readouterr().out
    alone = paint(
        model, tmp_path / "3.png", "--from_png", "1.png", "--lora", "a.safetensors:0.75"
    )  # a flag goes on top
    assert (alone == paint(model, tmp_path / "4.png", *PAINT, *loras[:2])).all() and (alone != ours).any()
    write_kohya(Path("a.safetensors"), base, adapters(base, 7))
    paint(model, tmp_path / "5.png", "--from_png", "1.png")
    assert "a.safetensors is another file now" in capsys.readouterr().out


def sha256(path: Path) -> str:

    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_lora_in_the_prompt_is_refused_with_the_flag_to_give(model, tmp_path):
    """A1111's syntax names no file: painted as words, it would be a LoRA that is not there."""
    for prompt in ("a cat <lora:ink:0.8>", "<lyco:ink:0.8:lbw=x> a cat"):
        with pytest.raises(InputError, match=r"give that LoRA as --lora PATH:0.8"):
            paint(model, tmp_path / "a.png", *PAINT, "--prompt", prompt)
    assert not (tmp_path / "a.png").exists()
    paint(model, tmp_path / "a.png", *PAINT, "--prompt", "a cat <lora:ink:0.8>", "--plain_prompt")


def test_from_a1111s_settings_the_flag_to_give_is_told(model, tmp_path, capsys):
    info = PngInfo()
    info.add_text(
        "parameters", "a red circle <lora:ink:0.8>\nSteps: 4, Sampler: Euler, CFG scale: 5, Seed: 3, Size: 32x32"
    )
    Image.new("RGB", (32, 32)).save(tmp_path / "a.png", pnginfo=info)
    paint(model, tmp_path / "b.png", "--from_png", tmp_path / "a.png")
    assert "with the LoRA 'ink': give it as --lora PATH:0.8" in capsys.readouterr().out
    assert json.loads(Image.open(tmp_path / "b.png").text["sd"])["prompt"] == "a red circle"


def test_a_lora_is_no_model(base, model, tmp_path):
    file = write_kohya(tmp_path / "a.safetensors", base, adapters(base))
    with pytest.raises(InputError, match="is a LoRA: give the model that it is for"):
        paint(file, tmp_path / "a.png", *PAINT)


# ----------------------------------------------------------------------------------------------------------------
# Written
# ----------------------------------------------------------------------------------------------------------------


def run_folder(path: Path, base, live, ema, model="models/v1-5.safetensors") -> Path:
    """A run that trained a LoRA beside the weights of `model`, as far as reading it goes."""
    folder = path / "checkpoints" / "step_00000300"
    folder.mkdir(parents=True)
    save_file(own_names(base, live), folder / "lora.safetensors")
    save_file(own_names(base, ema), folder / "lora_ema.safetensors")
    settings = {"lr": 1e-4, "seed": 7, "size": 512, "weighting": "min_snr", "gamma": 5, "lr_schedule": "cosine",
                "offset_noise": 0.05, "prediction": "epsilon"}  # fmt: skip
    values = {"format": "checkpoint-1", "unet": asdict(UNET), "schedule": NoiseSchedule().config, "size": 32,
              "vae": f"{model}/vae", "text_encoder": f"{model}/text_encoder", "preset": "test",
              "base": {"path": str(model), "weights": "ema"}}  # fmt: skip
    if Path(model).is_dir():
        values["base"]["hash"] = weights_hash(open_model(model).unet())
    (folder / "model.json").write_text(json.dumps(values))
    (folder / "state.json").write_text(json.dumps({"step": 300, "settings": settings}))
    files = {p.name: sha256(p) for p in folder.iterdir()}
    (folder / "manifest.json").write_text(json.dumps(files))
    return path


@pytest.fixture(scope="module")
def run(base, model, tmp_path_factory):
    return run_folder(tmp_path_factory.mktemp("runs") / "cat", base, adapters(base), adapters(base, 500), model)


def test_a_run_is_painted_and_written_as_others_read_it(base, model, run, tmp_path):
    """EMA unless live weights are asked for; kohya's names, shapes and scalars; fp16 unless another dtype is."""
    for weights, seed in (("ema", 500), ("live", 0)):
        changes = adapters(base, seed)
        after = weights_of(with_loras(open_model(model), [str(run)], weights)[0])
        assert_changed_by(after, weights_of(model), changes)
        out = convert(run, tmp_path / f"{weights}.safetensors", "--format", "lora", "--weights", weights)
        wanted = kohya_tensors(base, changes, torch.float16)
        found = load_file(out)
        assert found.keys() == wanted.keys()
        for key, tensor in wanted.items():
            assert found[key].dtype == torch.float16 and torch.equal(found[key], tensor), key
    shapes = {k: tuple(t.shape) for k, t in load_file(tmp_path / "ema.safetensors").items()}
    conv = "lora_unet_down_blocks_0_resnets_0_conv1"
    assert shapes[f"{conv}.lora_down.weight"][1:] == (32, 3, 3) and shapes[f"{conv}.lora_up.weight"][2:] == (1, 1)
    proj = "lora_unet_down_blocks_0_attentions_0_proj_in"
    assert shapes[f"{proj}.lora_down.weight"][1:] == (32, 1, 1) and shapes[f"{proj}.alpha"] == ()


def test_a_run_that_names_its_model_is_that_model_too(model, run, tmp_path):
    """--model RUN paints what --model BASE --lora RUN paints; as a single file the LoRA is merged into the model."""
    ours = paint(model, tmp_path / "a.png", *PAINT, "--lora", run)
    assert abs(paint(run, tmp_path / "b.png", *PAINT) - ours).max() <= 1
    merged = weights_of(with_loras(open_model(model), [str(run)])[0])
    out = convert(run, tmp_path / "a.safetensors", "--format", "ldm", "--dtype", "fp32")
    for name, tensor in weights_of(out).items():
        assert torch.allclose(tensor, merged[name], atol=2e-6), name


def header(path: Path) -> tuple[dict, bytes]:
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + n]), data[8 + n :]


def test_kohyas_metadata_are_what_a1111_looks_for(base, tmp_path):
    """Without ss_base_model_version A1111 hides the file; two runs get two aliases; the hash is of the data alone."""
    changes = {
        n: Change({k: t.clone() for k, t in c.tensors.items()}, 2.0) for n, c in adapters(base, ranks=(4,)).items()
    }
    for name in ("cat", "dog"):
        run = run_folder(tmp_path / f"runs_{name}", base, changes, changes)
        convert(run, tmp_path / f"{name}.safetensors", "--format", "lora", "--trigger", "a photo of sks")
    values, data = header(tmp_path / "cat.safetensors")
    metadata = values["__metadata__"]
    assert all(isinstance(v, str) for v in metadata.values())
    wanted = {"ss_v2": "False", "ss_base_model_version": "sd_v1", "ss_network_module": "networks.lora",
              "ss_network_dim": "4", "ss_network_alpha": "2", "ss_output_name": "cat", "ss_seed": "7",
              "ss_steps": "300",
              "ss_learning_rate": "0.0001", "ss_unet_lr": "0.0001", "ss_resolution": "(512, 512)", "ss_clip_skip": "1",
              "ss_min_snr_gamma": "5", "ss_noise_offset": "0.05", "ss_sd_model_name": "v1-5.safetensors",
              "modelspec.architecture": "stable-diffusion-v1/lora", "modelspec.prediction_type": "epsilon",
              "modelspec.trigger_phrase": "a photo of sks", "modelspec.resolution": "512x512"}  # fmt: skip
    assert wanted.items() <= metadata.items()
    assert json.loads(metadata["ss_network_args"]) == {"conv_dim": "4", "conv_alpha": "2"}

    assert metadata["sshs_model_hash"] == hashlib.sha256(data).hexdigest()
    assert header(tmp_path / "dog.safetensors")[0]["__metadata__"]["ss_output_name"] == "dog"


def test_kohyas_file_comes_back_bit_for_bit(base, model, tmp_path):
    """kohya -> ours -> kohya: tensors, and the metadata that it had."""
    told = {"ss_v2": "False", "ss_base_model_version": "sd_v1", "ss_network_dim": "x", "ss_network_args": "x",
            "ss_output_name": "first", "ss_tag_frequency": '{"a":1}', "ss_network_module": "networks.lora"}  # fmt: skip
    for dtype in ("fp16", "fp32"):
        kind = {"fp16": torch.float16, "fp32": torch.float32}[dtype]
        file = write_kohya(tmp_path / f"{dtype}.safetensors", base, adapters(base), kind, told)
        ours = convert(file, tmp_path / dtype, "--format", "native", "--base", model)
        back = convert(ours, tmp_path / f"{dtype}_back.safetensors", "--format", "lora", "--dtype", dtype)
        (before, data), (after, same) = header(file), header(back)
        assert told.items() <= after.pop("__metadata__").items() and before.pop("__metadata__")
        assert before == after and data == same


def test_what_is_written_paints_the_same_in_the_diffusers_library(base, model, run, pipe, tmp_path):
    """kohya's file; and the folder, whose alphas are multiplied into `up` for readers that lose them."""
    ours = paint(model, tmp_path / "a.png", *PAINT, "--lora", run)
    file = convert(run, tmp_path / "a.safetensors", "--format", "lora", "--dtype", "fp32")
    folder = convert(run, tmp_path / "folder", "--format", "diffusers")
    pipe.load_lora_weights(folder)
    assert abs(painted_by(pipe) - ours).max() <= 1
    tensors = load_file(folder / "pytorch_lora_weights.safetensors")
    assert not any("alpha" in key for key in tensors)
    save_file(tensors, tmp_path / "bare.safetensors")  # as a reader without metadata sees it
    for source in (folder, file, tmp_path / "bare.safetensors"):
        after = weights_of(with_loras(open_model(model), [str(source)])[0])
        assert_changed_by(after, weights_of(model), adapters(base, 500))
    even = write_kohya(tmp_path / "even.safetensors", base, adapters(base, alphas=(2.5,)))
    written = convert(convert(even, tmp_path / "native", "--format", "native", "--base", model),
                      tmp_path / "b.safetensors", "--format", "lora")  # fmt: skip
    pipe.unload_lora_weights()
    pipe.load_lora_weights(written)
    assert abs(painted_by(pipe) - paint(model, tmp_path / "b.png", *PAINT, "--lora", written)).max() <= 1


def test_what_is_written_loads_with_peft(base, model, folder, run, tmp_path):
    """By the settings that the folder's file carries; every rank by its module."""
    out = convert(run, tmp_path / "folder", "--format", "diffusers") / "pytorch_lora_weights.safetensors"
    metadata = json.loads(header(out)[0]["__metadata__"]["lora_adapter_metadata"])
    config = peft.LoraConfig(**{k.removeprefix("unet."): v for k, v in metadata.items() if k.startswith("unet.")})
    unet = diffusers.UNet2DConditionModel.from_pretrained(folder / "unet")
    wrapped = peft.get_peft_model(unet, config)
    state = {f"base_model.model.{k[5:]}": t for k, t in load_file(out).items() if k.startswith("unet.")}
    result = peft.set_peft_model_state_dict(wrapped, state)
    assert not result.unexpected_keys and not [k for k in result.missing_keys if "lora" in k]
    merged, before, changes = wrapped.merge_and_unload().state_dict(), weights_of(model), adapters(base, 500)
    for name in (n for n in base.shapes if n.startswith("unet.")):
        wanted = before[name] + (low_rank(changes[name]).reshape(before[name].shape) if name in changes else 0)
        found = merged[base.theirs[name].removeprefix("unet.") + ".weight"].reshape(wanted.shape)
        assert (found - wanted).abs().max() < 2e-6, name


def test_joined_loras_are_the_sum_of_their_changes(base, model, tmp_path):
    """Along the rank: no cross terms, as the mean of ups and downs apart has. One alone, weight 1, is itself."""
    a, b = adapters(base, 0), adapters(base, 500, text=False)
    files = [write_kohya(tmp_path / f"{n}.safetensors", base, c) for n, c in (("a", a), ("b", b))]
    flags = ("--format", "lora", "--dtype", "fp32", "--base", model)
    out = convert(f"{files[0]}:0.7", tmp_path / "ab.safetensors", "--lora", f"{files[1]}:-0.3", *flags)
    before, after = weights_of(model), weights_of(with_loras(open_model(model), [str(out)])[0])
    mean_apart = 0
    for name, wanted in before.items():
        for weight, changes in ((0.7, a), (-0.3, b)):
            wanted = wanted + (weight * low_rank(changes[name]).reshape(wanted.shape) if name in changes else 0)
        assert (after[name] - wanted).abs().max() < 2e-6, name
        if name in a and name in b and a[name].tensors["up"].shape == b[name].tensors["up"].shape:
            apart = {k: 0.7 * t - 0.3 * b[name].tensors[k] for k, t in a[name].tensors.items()}
            mean_apart += (
                before[name] + low_rank(Change(apart, a[name].alpha)).reshape(wanted.shape) - wanted
            ).abs().max() > 0.01
    assert mean_apart > 10
    alone = convert(files[0], tmp_path / "alone.safetensors", *flags)
    assert all(torch.equal(t, load_file(alone)[k]) for k, t in load_file(files[0]).items())
    half = convert(f"{files[0]}:1", tmp_path / "twice.safetensors", "--lora", f"{files[0]}:1", *flags)
    for name, change in read_lora(str(half), base).changes.items():  # of one scale: no number is touched
        assert torch.equal(change.tensors["up"][:, : change.rank // 2], a[name].tensors["up"])


def test_a_joined_lora_keeps_its_sum_in_fp16(base, model, tmp_path):
    """Its alpha is a number that fp16 holds: 0.7 times a rank is none, and would scale every module wrongly."""
    file = write_kohya(tmp_path / "a.safetensors", base, adapters(base), torch.float16)
    out = convert(f"{file}:0.7", tmp_path / "b.safetensors", "--format", "lora", "--base", model)
    source, found = read_lora(str(file), base).changes, read_lora(str(out), base).changes
    for name, change in found.items():
        down, up, scale = change.tensors["down"], change.tensors["up"].double(), 0.7 * source[name].scale
        assert torch.equal(down, source[name].tensors["down"])
        exact = source[name].tensors["up"].double() * scale
        assert ((up * change.scale - exact).abs() <= exact.abs() * 2**-11 + 1e-7).all(), name
        assert (up * change.scale * exact).sum() / exact.square().sum() == pytest.approx(1, abs=1e-4), name  # no bias


# ----------------------------------------------------------------------------------------------------------------
# Merged and averaged
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["ldm", "diffusers", "native"])
def test_a_lora_is_merged_in_fp32_and_cast_once(base, model, tmp_path, kind, capsys):
    """Every weight is the nearest of its dtype to W + dA + dB, and the file is as large as without LoRAs."""
    a, b = adapters(base, 0), adapters(base, 500, text=False)
    files = [write_kohya(tmp_path / f"{n}.safetensors", base, c) for n, c in (("a", a), ("b", b))]
    ending = ".safetensors" if kind == "ldm" else ""
    plain = convert(model, tmp_path / f"plain{ending}", "--format", kind, "--weights", "ema")
    capsys.readouterr()
    loras = ("--lora", f"{files[0]}:0.7", "--lora", f"{files[1]}:0.3")
    out = convert(model, tmp_path / f"merged{ending}", "--format", kind, "--weights", "ema", *loras)
    told = re.search(r"moves a weight by at most ([\d.e+-]+) \(", capsys.readouterr().out)
    before, after, worst = weights_of(model), weights_of(out), 0.0
    dtype = torch.float16 if kind == "ldm" else torch.float32
    for name, wanted in before.items():
        total = 0
        for weight, changes in ((0.7, a), (0.3, b)):
            total = total + (weight * delta(changes[name], wanted) if name in changes else 0)
        exact = wanted + total
        worst = max(worst, (exact - exact.to(dtype).float()).abs().max().item())
        assert torch.equal(after[name], exact.to(dtype).float()), name
    assert told and float(told[1]) == pytest.approx(worst, rel=0.05)

    def size(path):
        return sum(f.stat().st_size for f in ([path] if path.is_file() else path.rglob("*.safetensors")))

    assert abs(size(out) - size(plain)) < 200


def test_an_average_is_the_weighted_mean_in_fp32(model, small_tokenizer, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for path in model.rglob("*"):
        if path.is_file():
            (other / path.relative_to(model)).parent.mkdir(exist_ok=True, parents=True)
            (other / path.relative_to(model)).write_bytes(path.read_bytes())
    save_file(randomise(UNet(UNET), 77).state_dict(), other / "unet_ema.safetensors")
    encoder = TextEncoder.new(TEXT, small_tokenizer)
    randomise(encoder.model, 78)
    encoder.save(other / "text_encoder")
    out = convert(f"{model}:1", tmp_path / "mean", "--format", "native", "--weights", "ema", "--average", f"{other}:3")
    a, b, mean = weights_of(model), weights_of(other), weights_of(out)
    for name in a:
        assert torch.equal(mean[name], a[name] * 0.25 + b[name] * 0.75), name
    small = json.loads((other / "model.json").read_text())
    small["unet"]["channels"] = [32, 32]
    (other / "model.json").write_text(json.dumps(small))
    save_file(
        randomise(UNet(UNetConfig((32, 32), (True, False), 1, 4, 32, 16))).state_dict(), other / "unet_ema.safetensors"
    )
    for flags, words in ((["--average", other], "alike"), (["--average", f"{model}:-1"], "a sum above 0")):
        with pytest.raises(InputError, match=words):
            convert(model, tmp_path / "none", "--format", "native", "--weights", "ema", *flags)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("source, flags, words", [
    ("lora", ["--format", "ldm"], "is a LoRA: it is written as"),
    ("lora", ["--format", "lora", "--dtype", "int8"], "is a LoRA: it is written as"),
    ("lora", ["--format", "native", "--dtype", "fp16"], "fp32 of a LoRA"),
    ("lora", ["--format", "lora", "--vae", "x"], "--vae is for models"),
    ("lora", ["--format", "lora"], "modules differ"),  # of another size than SD 1.5, and no --base
    ("model", ["--format", "lora"], "--format lora is for LoRAs"),
    ("model", ["--format", "ldm", "--base", "x"], "--base is for LoRAs"),
    ("model:0.5", ["--format", "ldm"], "a weight of IN is for"),
])  # fmt: skip
def test_conversions_that_make_no_sense(base, model, tmp_path, source, flags, words):
    file = write_kohya(tmp_path / "a.safetensors", base, adapters(base))
    source = {"lora": str(file), "model": str(model), "model:0.5": f"{model}:0.5"}[source]
    with pytest.raises(InputError, match=words):
        convert(source, tmp_path / "out.safetensors", *flags)
    assert not (tmp_path / "out.safetensors").exists()
