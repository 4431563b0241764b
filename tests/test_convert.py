"""sd/weights and SD_Convert.py: weights in and out, bit for bit; strict reading; files that are hostile, damaged or
something else.

pytest tests/test_convert.py
"""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import types
from dataclasses import asdict, replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import safetensors
import tokenizers
import torch
import transformers
from binding import rebind
from conftest import ROOT, make_pipeline, randomise
from diffusers.loaders import single_file_utils
from PIL import Image
from safetensors.torch import load_file, save_file

import sd.device
import sd.weights.configs
import sd.weights.names
import sd.weights.parts
import sd.weights.read
import sd.weights.tensors
import sd.weights.text
import sd.weights.vocabulary
import sd.weights.write
import SD_Convert
import SD_ImageGen
from sd.errors import InputError
from sd.weights.parts import save_vae
from sd.weights.read import load_vae, open_model
from SD_Model import PRESETS, VAE, NoiseSchedule, TextEncoder, UNet, UNetConfig, VAEConfig, weights_hash

UNET = UNetConfig((32, 64, 64), (True, True, False), 2, 4, 32, 16)
VAE_CONFIG = VAEConfig((16, 32, 32, 32), 1, norm_groups=8, scaling_factor=0.3)
TEXT = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
LINEAGE = [{"phase": "demo", "images": 640, "revision": "abc"}]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_checkpoint(folder: Path, tokenizer, vae_config=VAE_CONFIG, schedule=None, seed=0, size=32) -> Path:
    """A checkpoint folder as SD_Train writes it, with random weights; live and EMA differ, in the text encoder too."""
    folder.mkdir(parents=True)
    for i, name in enumerate(("unet", "unet_ema")):
        save_file(randomise(UNet(UNET), seed + i).state_dict(), folder / f"{name}.safetensors")
    for i, name in enumerate(("text_encoder", "text_encoder_ema")):
        encoder = TextEncoder.new(TEXT, tokenizer)
        randomise(encoder.model, seed + 10 + i)
        encoder.save(folder / name)
    save_vae(randomise(VAE(vae_config), seed + 20), folder / "vae")
    model = {"format": "checkpoint-1", "preset": "test", "unet": asdict(UNET), "size": size, "vae": "vae",
             "schedule": (schedule or NoiseSchedule()).config, "text_encoder": "text_encoder"}  # fmt: skip
    (folder / "model.json").write_text(json.dumps(model))
    (folder / "state.json").write_text(json.dumps({"step": 20, "images": 640, "lineage": LINEAGE, "ema_updates": 20}))
    files = [p for p in folder.rglob("*") if p.is_file()]
    (folder / "manifest.json").write_text(json.dumps({str(p.relative_to(folder)): sha256(p) for p in files}))
    return folder


@pytest.fixture(scope="module")
def checkpoint(small_tokenizer, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("run") / "step_00000020", small_tokenizer)


def convert(source, out, *flags):
    SD_Convert.main([str(source), str(out), *flags])
    return out


@pytest.fixture(scope="module")
def single(checkpoint, tmp_path_factory):
    """The checkpoint as a single file with live and EMA weights, fp32."""
    out = tmp_path_factory.mktemp("single") / "model.safetensors"
    return convert(checkpoint, out, "--format", "ldm", "--weights", "both", "--dtype", "fp32")


def everything(source, weights):
    """All tensors of a model: UNet, VAE and text encoder, by name."""
    model = open_model(source, weights)
    parts = {"unet": model.unet(), "vae": model.vae(), "text": model.text_encoder()}
    return {f"{part}.{k}": t for part, module in parts.items() for k, t in module.state_dict().items()}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]), name


# ----------------------------------------------------------------------------------------------------------------
# There and back
# ----------------------------------------------------------------------------------------------------------------


def test_round_trip_is_bit_for_bit(checkpoint, single, tmp_path):
    """ours -> LDM (with EMA keys without dots) -> ours -> diffusers -> ours, fp32."""
    back = convert(single, tmp_path / "back", "--format", "native")
    folder = convert(back, tmp_path / "folder", "--format", "diffusers", "--weights", "both")
    again = convert(folder, tmp_path / "again", "--format", "native")
    for weights in ("live", "ema"):
        wanted = everything(checkpoint, weights)
        if weights == "live":  # these formats have room for one text encoder: the EMA of a trained one
            wanted |= {k: t for k, t in everything(checkpoint, "ema").items() if k.startswith("text.")}
        for path in (single, back, folder, again):
            assert_equal(wanted, everything(path, weights))
        assert open_model(again, weights).unet_config == UNET
    assert open_model(again).vae().config == VAE_CONFIG
    live, ema = (open_model(single, w).unet_state()[1] for w in ("live", "ema"))
    assert not any(torch.equal(live[k], ema[k]) for k in live)


def test_every_key_is_written(checkpoint, single):
    unet, vae = sd.weights.names.shapes_of(UNet, UNET), sd.weights.names.shapes_of(VAE, VAE_CONFIG)
    keys = set(load_file(single))
    ema = {k for k in keys if k.startswith("model_ema.")}
    assert len(ema) == len(unet) + 2 and all("." not in k.removeprefix("model_ema.") for k in ema)
    assert "model_ema.diffusion_modeltime_embed0weight" in ema
    assert {k for k in keys if k.startswith("model.")} == {"model.diffusion_model." + k for k in unet}
    assert {k for k in keys if k.startswith("first_stage_model.")} == {"first_stage_model." + k for k in vae}
    assert len([k for k in keys if k.startswith("cond_stage_model.transformer.text_model.")]) == 2 * 16 + 4 + 1
    for kind, parts in (("UNet", sd.weights.names.unet_names(UNET)), ("VAE", sd.weights.names.vae_names(VAE_CONFIG))):
        assert len(set(parts.values())) == len(parts), f"two of the {kind}'s names are mapped to one"


def test_round_trip_control_wrong_map(checkpoint, tmp_path, monkeypatch):
    """Had the reader and the writer other tables, the comparison would show it."""
    folder = convert(checkpoint, tmp_path / "folder", "--format", "diffusers")
    table = sd.weights.names.UNET_RES
    wrong = [*table[:1], ("in_layers.2", "conv2"), *table[2:4], ("out_layers.3", "conv1"), table[5]]
    rebind(sd.weights.names, "UNET_RES", wrong, monkeypatch.setattr)
    with pytest.raises((InputError, AssertionError)):
        assert_equal(everything(checkpoint, "ema"), everything(folder, "ema"))


def test_pictures_are_the_same_in_every_format(checkpoint, single, tmp_path):
    """And the same as the library's, from the exported folder; the tokenizer, not CLIP's, travels along."""
    folder = convert(checkpoint, tmp_path / "folder", "--format", "diffusers")
    flags = ["--prompt", "a red circle", "--negative", "blurry", "--steps", "4", "--seed", "2", "--device", "cpu",
             "--overwrite"]  # fmt: skip
    pictures = []
    for source in (checkpoint, single, folder):
        SD_ImageGen.main(["--model", str(source), *flags, "--out", str(tmp_path / "a.png")])
        pictures.append(np.asarray(Image.open(tmp_path / "a.png")).astype(int))
    assert pictures[0].shape == (32, 32, 3) and pictures[0].std() > 5
    assert np.array_equal(pictures[0], pictures[1]) and np.array_equal(pictures[0], pictures[2])
    pipe = diffusers.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    theirs = pipe("a red circle", negative_prompt="blurry", num_inference_steps=4, output_type="np",
                  generator=torch.Generator().manual_seed(2))  # fmt: skip
    assert np.abs((theirs.images[0] * 255).round() - pictures[0]).max() <= 1
    assert json.loads((folder / "lineage.json").read_text())["lineage"] == LINEAGE


def test_single_file_passes_the_librarys_loader(checkpoint, tmp_path):
    file = convert(checkpoint, tmp_path / "a.safetensors", "--format", "ldm", "--dtype", "fp32")
    folder = convert(checkpoint, tmp_path / "folder", "--format", "diffusers")
    unet = diffusers.UNet2DConditionModel.from_single_file(file, config=str(folder), subfolder="unet")
    vae = diffusers.AutoencoderKL.from_single_file(file, config=str(folder), subfolder="vae")
    for part, module in (("unet", unet), ("vae", vae)):
        wanted = load_file(folder / part / "diffusion_pytorch_model.safetensors")
        assert_equal(wanted, {k: t for k, t in module.state_dict().items()})
    text = sd.weights.read.open_model(folder).text_encoder().model
    checkpoint_keys = load_file(file)
    loaded = single_file_utils.create_diffusers_clip_model_from_ldm(
        type(text), checkpoint_keys, config=str(folder), subfolder="text_encoder"
    )
    assert_equal(text.state_dict(), loaded.state_dict())


def test_sd15_single_file_has_the_originals_keys(clip_tokenizer, tmp_path, monkeypatch):
    """686 + 248 + 197 names and shapes, kept in a file; and the library's own converter takes every one of them."""
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device("meta"):
        unet, vae = UNet(), VAE()
        clip = CLIPTextConfig(hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12)
        text = TextEncoder(CLIPTextModel(clip), clip_tokenizer)
    written = {}
    as_is = lambda part, tensors, dtype: tensors  # noqa: E731  (meta tensors have no values)
    rebind(sd.weights.tensors, "cast", as_is, monkeypatch.setattr)
    monkeypatch.setattr(
        sd.weights.tensors, "save_file", lambda t, f, m: (written.update(t), f.touch(), written.update(meta=m))
    )
    model = sd.weights.read.Model("", UNetConfig(), unet.state_dict, lambda: vae, lambda: text)
    sd.weights.write.save_ldm(tmp_path / "sd15.safetensors", model, torch.float16)
    metadata = written.pop("meta")
    assert "tokenizer" not in metadata and metadata["modelspec.architecture"] == "stable-diffusion-v1"
    lines = sorted(f"{name} {'x'.join(map(str, t.shape))}" for name, t in written.items())
    assert lines == (ROOT / "tests" / "fixtures" / "sd15_single_file.txt").read_text().splitlines()
    counts = [sum(line.startswith(p) for line in lines) for p in ("model.", "first_stage_model.", "cond_stage_model.")]
    assert counts == [686, 248, 197] and sum(counts) == len(lines)
    positions = written["cond_stage_model.transformer.text_model.embeddings.position_ids"]
    assert positions.dtype == torch.int64 and torch.equal(positions, torch.arange(77)[None])
    with torch.device("meta"):
        theirs = diffusers.UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8)
        their_vae = diffusers.AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), layers_per_block=2, down_block_types=["DownEncoderBlock2D"] * 4,
            up_block_types=["UpDecoderBlock2D"] * 4,
        )  # fmt: skip
    for module, convert_names in (
        (theirs, single_file_utils.convert_ldm_unet_checkpoint),
        (their_vae, single_file_utils.convert_ldm_vae_checkpoint),
    ):
        found = convert_names(dict(written), dict(module.config))
        squeeze = sd.weights.names.squeezed
        assert {k: squeeze(t.shape) for k, t in found.items()} == {
            k: squeeze(t.shape) for k, t in module.state_dict().items()
        }


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_half_precision_files(checkpoint, tmp_path, dtype):
    file = convert(
        checkpoint, tmp_path / "half.safetensors", "--format", "ldm", *(["--dtype", dtype] * (dtype != "fp16"))
    )
    wanted = {k: t.to(sd.device.DTYPES[dtype]).float() for k, t in everything(checkpoint, "ema").items()}
    found = everything(file, "ema")
    assert_equal(wanted, found)
    dtypes = {k: t.dtype for k, t in load_file(file).items()}
    assert dtypes.pop("cond_stage_model.transformer.text_model.embeddings.position_ids") == torch.int64
    assert set(dtypes.values()) == {sd.device.DTYPES[dtype]}


def test_metadata_names_prediction_and_lineage(small_tokenizer, tmp_path):
    schedule = NoiseSchedule(prediction="v", zero_terminal_snr=True)
    source = write_checkpoint(tmp_path / "v", small_tokenizer, schedule=schedule)
    file = convert(source, tmp_path / "v.safetensors", "--format", "ldm")
    with safetensors.safe_open(file, "pt") as f:
        metadata = f.metadata()
    assert metadata["modelspec.prediction_type"] == "v" and metadata["modelspec.resolution"] == "32x32"
    assert json.loads(metadata["sd_lineage"]) == {"lineage": LINEAGE, "images": 640, "step": 20}
    model = open_model(file)
    assert model.schedule.config == schedule.config and model.lineage["lineage"] == LINEAGE and model.size == 32
    folder = convert(file, tmp_path / "v_folder", "--format", "diffusers")
    scheduler = json.loads((folder / "scheduler" / "scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "v_prediction" and scheduler["rescale_betas_zero_snr"] is True
    assert scheduler["timestep_spacing"] == "trailing"
    assert open_model(folder).schedule.config == schedule.config
    bare = {k: t for k, t in load_file(file).items()}  # a v-model of others: modelspec is all it says
    save_file(bare, tmp_path / "bare.safetensors", {"modelspec.prediction_type": "v"})
    assert sd.weights.tensors.read_tensors(tmp_path / "bare.safetensors")[1]["modelspec.prediction_type"] == "v"


def test_values_beyond_fp16_are_refused(checkpoint, tmp_path):
    source = shutil.copytree(checkpoint, tmp_path / "large")
    weights = load_file(source / "unet_ema.safetensors")
    weights["out.2.bias"][0] = 1e5
    save_file(weights, source / "unet_ema.safetensors")
    with pytest.raises(InputError, match="out.2.bias.*65504"):
        convert(source, tmp_path / "a.safetensors", "--format", "ldm")
    assert not (tmp_path / "a.safetensors").exists()
    convert(source, tmp_path / "a.safetensors", "--format", "ldm", "--dtype", "bf16")
    with pytest.raises(InputError, match="exists already"):
        convert(source, tmp_path / "a.safetensors", "--format", "ldm")


def test_tokenizer_that_others_cannot_read(checkpoint, tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "<unk>": 2}, unk_token="<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="</s>", unk_token="<unk>",
        model_max_length=77,
    )  # fmt: skip
    source = write_checkpoint(tmp_path / "words", tokenizer)
    for flags in (["--format", "ldm"], ["--format", "diffusers"]):
        with pytest.raises(InputError, match="byte-pair tokenizer.*found WordLevel; --format native"):
            convert(source, tmp_path / "out.safetensors", *flags)
        assert not list(tmp_path.glob("out*"))
    native = convert(source, tmp_path / "native", "--format", "native")
    assert open_model(native).text_encoder().tokenizer.vocab_size == 3


def test_stem_that_others_have_not(small_tokenizer, tmp_path):
    """A VAE with a space-to-depth stem goes into a single file and back, and into no folder of the library."""
    config = replace(VAE_CONFIG, channels=(32, 32), patch=4)
    source = write_checkpoint(tmp_path / "stem", small_tokenizer, vae_config=config)
    file = convert(source, tmp_path / "a.safetensors", "--format", "ldm", "--dtype", "fp32")
    assert open_model(file).vae().config == config
    assert_equal(everything(source, "ema"), everything(file, "ema"))
    with pytest.raises(InputError, match="space-to-depth"):
        convert(source, tmp_path / "folder", "--format", "diffusers")
    assert not list(tmp_path.glob("folder*"))


# ----------------------------------------------------------------------------------------------------------------
# What else can be opened
# ----------------------------------------------------------------------------------------------------------------


def test_weights_choice_says_what_it_found(checkpoint, single, tmp_path):
    assert "EMA" in open_model(single, "ema").found and "live" in open_model(single, "live").found
    one = convert(checkpoint, tmp_path / "one.safetensors", "--format", "ldm", "--dtype", "fp32")
    for weights in ("ema", "live"):
        assert "its only weights" in open_model(one, weights).found
    assert_equal(everything(one, "live"), everything(checkpoint, "ema"))  # EMA is what is exported by default
    with pytest.raises(InputError, match="--weights wants"):
        open_model(one, "both")


def original_ckpt(single: Path) -> dict:
    """The content of an original .ckpt: state_dict with schedule buffers, EMA and counters; the trainer's numbers."""
    state = load_file(single)
    for name in ("betas", "alphas_cumprod", "posterior_variance", "lvlb_weights", "logvar"):
        state[name] = torch.zeros(1000)
    state["first_stage_model.loss.logvar"] = torch.zeros(())
    return {"epoch": 7, "global_step": 470000, "pytorch-lightning_version": "1.4.2", "state_dict": state}


def test_original_ckpt_with_foreign_callback(checkpoint, single, tmp_path, monkeypatch):
    """An honest .ckpt carries its trainer's callback object: read, without running that class's code."""
    marker = tmp_path / "ran"
    names = ["pytorch_lightning", "pytorch_lightning.callbacks", "pytorch_lightning.callbacks.model_checkpoint"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))

    class ModelCheckpoint:
        def __init__(self):
            self.best = np.float64(0.25)  # a numpy scalar is there too

        def __setstate__(self, state):
            marker.touch()

    ModelCheckpoint.__module__, ModelCheckpoint.__qualname__ = names[-1], "ModelCheckpoint"
    sys.modules[names[-1]].ModelCheckpoint = ModelCheckpoint
    content = original_ckpt(single)
    content["callbacks"] = {ModelCheckpoint: {"monitor": "val/loss", "best": np.float64(0.3)}}
    content["hyper_parameters"] = {"callback": ModelCheckpoint()}
    torch.save(content, tmp_path / "honest.ckpt")
    model = open_model(tmp_path / "honest.ckpt", "ema")
    assert not marker.exists() and "EMA" in model.found
    assert model.unet_config == replace(UNET, num_heads=8, norm_groups=32)  # SD 1.x's: a .ckpt does not name them
    wanted = open_model(checkpoint, "ema").tensors()
    assert_equal(wanted, model.tensors())
    assert_equal(open_model(checkpoint, "live").tensors(), open_model(tmp_path / "honest.ckpt", "live").tensors())


class Hostile:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (exec, (f"open({str(self.marker)!r}, 'w')",))


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("key", ["state_dict", "callbacks"])
def test_hostile_ckpt_is_not_run(single, tmp_path, key, zipped):
    marker = tmp_path / "marker"
    content = original_ckpt(single) | {key: Hostile(marker)}
    torch.save(content, tmp_path / "a.ckpt", _use_new_zipfile_serialization=zipped)
    for opener in (open_model, load_vae):
        with pytest.raises(InputError, match="foreign code.*safetensors"):
            opener(tmp_path / "a.ckpt")
    assert not marker.exists()
    torch.load(tmp_path / "a.ckpt", weights_only=False)
    assert marker.exists(), "control: the file does write its marker when it is unpickled as pickles usually are"


def test_plain_pickle_is_not_run(tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "a.ckpt").write_bytes(pickle.dumps({"state_dict": Hostile(marker)}))
    with pytest.raises(InputError, match="safetensors"):
        open_model(tmp_path / "a.ckpt")
    assert not marker.exists()


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "unet.", "module._orig_mod.unet.", "_fsdp_wrapped_module."]
)
def test_old_training_files(checkpoint, tmp_path, prefix):
    live, ema = (dict(open_model(checkpoint, w).tensors()) for w in ("live", "ema"))
    content = {"model": {prefix + k: t for k, t in live.items()}, "ema": {prefix + k: t for k, t in ema.items()},
               "step": 5}  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    for weights, wanted in (("live", live), ("ema", ema)):
        model = open_model(tmp_path / "a.pt", weights)
        assert_equal(wanted, model.tensors())
        assert "UNet file" in model.found
    torch.save({"ema": content["ema"]}, tmp_path / "b.pt")
    assert_equal(ema, open_model(tmp_path / "b.pt", "ema").tensors())
    torch.save(content["model"], tmp_path / "c.pt")
    assert_equal(live, open_model(tmp_path / "c.pt").tensors())


SPELLINGS = dict(zip(("original", "old folder", "folder"), sd.weights.names.VAE_ATTENTION))


@pytest.mark.parametrize("layout", ["original", "folder"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_vae_files_of_every_spelling(tmp_path, layout, spelling):
    config = VAEConfig((32, 64, 64), 2)
    vae = randomise(VAE(config))
    state, names = {}, sd.weights.names.vae_names(config, SPELLINGS[spelling])
    for name, tensor in vae.state_dict().items():
        out = names[name] if layout == "folder" else name
        for a, b in zip(SPELLINGS["original"], SPELLINGS[spelling]):
            out = out.replace(f".attn_1.{a}.", f".attn_1.{b}.")
        is_linear = "attn" in name and tensor.dim() == 4 and spelling != "original"
        state[out] = tensor.flatten(1).clone() if is_linear else tensor
    assert len(state) == len(vae.state_dict())
    save_file(state, tmp_path / "a.safetensors")
    torch.save({"state_dict": state | {"loss.logvar": torch.zeros(())}}, tmp_path / "nested.ckpt")
    full = {"vae." + k: t for k, t in state.items()} | {"model.diffusion_model.out.2.bias": torch.zeros(4)}
    save_file(full, tmp_path / "full.safetensors")
    for file in ("a.safetensors", "nested.ckpt", "full.safetensors"):
        loaded = load_vae(tmp_path / file)
        assert loaded.config == config and weights_hash(loaded) == weights_hash(vae)
        assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    if layout == "folder":
        (tmp_path / "f").mkdir()
        save_file(state, tmp_path / "f" / "diffusion_pytorch_model.safetensors")
        (tmp_path / "f" / "config.json").write_text(json.dumps({
            "_class_name": "AutoencoderKL", "block_out_channels": [32, 64, 64], "layers_per_block": 2,
            "scaling_factor": 0.5, "down_block_types": ["DownEncoderBlock2D"] * 3,
        }))  # fmt: skip
        assert load_vae(tmp_path / "f").config == replace(config, scaling_factor=0.5)
        (tmp_path / "f" / "diffusion_pytorch_model.safetensors").unlink()
        torch.save(state, tmp_path / "f" / "diffusion_pytorch_model.bin")
        assert weights_hash(load_vae(tmp_path / "f")) == weights_hash(vae)


def test_vae_is_saved_whole_or_not_at_all(tmp_path, monkeypatch):
    vae = randomise(VAE(VAE_CONFIG))
    save_vae(vae, tmp_path / "vae")
    before = weights_hash(load_vae(tmp_path / "vae"))
    assert before == weights_hash(vae) and load_vae(tmp_path / "vae").config == VAE_CONFIG

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sd.weights.tensors, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save_vae(randomise(VAE(VAE_CONFIG), 1), tmp_path / "vae")
    assert weights_hash(load_vae(tmp_path / "vae")) == before and [p.name for p in tmp_path.iterdir()] == ["vae"]


def test_folder_decides_the_architecture(small_tokenizer, tmp_path):
    """Widths, heads, groups, context and schedule of a library's folder; its UNet alone; fp16 and .bin variants."""
    settings = {"prediction_type": "v_prediction", "beta_schedule": "linear", "beta_start": 0.001, "beta_end": 0.01,
                "timestep_spacing": "trailing", "set_alpha_to_one": True}  # fmt: skip
    pipe = make_pipeline(small_tokenizer, widths=(48, 96), scheduler=settings)
    pipe.save_pretrained(tmp_path / "a")
    model = open_model(tmp_path / "a")
    assert model.unet_config == UNetConfig((48, 96), (True, False), 1, 4, 32, 16)
    assert model.schedule.config == NoiseSchedule("linear", 0.001, 0.01, prediction="v").config
    assert model.sampling == {"spacing": "trailing", "offset": 1, "set_alpha_to_one": True} and model.size == 32
    alone = open_model(tmp_path / "a" / "unet")
    assert_equal(model.tensors(), alone.tensors())
    config, state = alone.unet_state()
    UNet(config).load_state_dict(state)
    assert all(t.dtype == torch.float32 for t in state.values())
    pipe.unet.half().save_pretrained(tmp_path / "a" / "unet", variant="fp16")
    (tmp_path / "a" / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    half = open_model(tmp_path / "a").unet_state()[1]
    assert all(torch.equal(half[k], state[k].half().float()) for k in state)


def test_run_folder_gives_its_newest_whole_checkpoint(checkpoint, tmp_path):
    for step in (20, 40, 60):
        shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints" / f"step_{step:08d}")
    (tmp_path / "run" / "checkpoints" / "step_00000080.tmp").mkdir()
    damaged = tmp_path / "run" / "checkpoints" / "step_00000060" / "unet.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    assert "step_00000040" in open_model(tmp_path / "run").found
    assert weights_hash(load_vae(tmp_path / "run")) == weights_hash(load_vae(checkpoint))
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000020")
    (tmp_path / "run" / "checkpoints" / "step_00000040" / "model.json").unlink()
    with pytest.raises(InputError, match="whole checkpoint"):
        open_model(tmp_path / "run")


def test_vae_by_hash(checkpoint, tmp_path):
    source = shutil.copytree(checkpoint, tmp_path / "c")
    shutil.move(source / "vae", tmp_path / "vae")
    values = json.loads((source / "model.json").read_text())
    values["vae"] = {"path": str(tmp_path / "vae"), "hash": weights_hash(load_vae(tmp_path / "vae"))}
    (source / "model.json").write_text(json.dumps(values))
    assert open_model(source).vae().config == VAE_CONFIG
    save_vae(randomise(VAE(VAE_CONFIG), 99), tmp_path / "vae")
    with pytest.raises(InputError, match="not the one"):
        open_model(source).vae()


def cached(hub: Path, name: str, files: Path):
    """Put a folder into the hub's cache as huggingface_hub does."""
    root = hub / ("models--" + name.replace("/", "--"))
    shutil.copytree(files, root / "snapshots" / "0123abcd")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd")


def test_hub_names_from_the_offline_cache(clip_tokenizer, small_tokenizer, tmp_path, monkeypatch):
    import huggingface_hub.constants

    hub = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    pipe = make_pipeline(small_tokenizer)
    pipe.save_pretrained(tmp_path / "pipe")
    cached(hub, "someone/model", tmp_path / "pipe")
    cached(hub, sd.weights.parts.DEFAULT_VAE, tmp_path / "pipe" / "vae")
    model = open_model("someone/model")
    assert model.text_encoder().context_dim == 32
    assert weights_hash(load_vae()) == weights_hash(model.vae()) == weights_hash(load_vae("someone/model"))
    with pytest.raises(InputError, match="hub or its cache"):
        open_model("someone/else")
    with pytest.raises(InputError, match="no such file or folder"):
        open_model("absent/model.safetensors")
    with pytest.raises(InputError, match="no such file or folder"):
        load_vae("/absent")


def test_single_file_with_clips_own_tokenizer(clip_tokenizer, tmp_path, monkeypatch):
    """Of CLIP's own tokenizer a file carries the merges; a file without them gets it from this machine or the hub."""
    source = write_checkpoint(tmp_path / "c", clip_tokenizer)
    file = convert(source, tmp_path / "a.safetensors", "--format", "ldm", "--dtype", "fp32")
    with safetensors.safe_open(file, "pt") as f:
        metadata = f.metadata()
    assert set(sd.weights.vocabulary.unpack(metadata.pop("sd_tokenizer"))) == {"merges.txt"}
    save_file(load_file(file), tmp_path / "b.safetensors", metadata)
    file = tmp_path / "b.safetensors"
    monkeypatch.setattr(sd.weights.vocabulary, "find_merges", lambda: None)
    clip_tokenizer.save_pretrained(tmp_path / "tokenizer")
    rebind(sd.weights.text, "DEFAULT_TEXT_ENCODER", str(tmp_path / "tokenizer"), monkeypatch.setattr)
    texts = ["a photo of an astronaut riding a horse on mars", ""]
    wanted = open_model(source).text_encoder()
    found = open_model(file).text_encoder()
    assert torch.equal(found.tokenize(texts), wanted.tokenize(texts))
    assert torch.equal(found.encode(texts), wanted.encode(texts))
    rebind(sd.weights.text, "DEFAULT_TEXT_ENCODER", "openai/not-there", monkeypatch.setattr)
    with pytest.raises(InputError, match="tokenizer was wanted"):
        open_model(file).text_encoder()


@pytest.mark.parametrize(
    "prefix", ["cond_stage_model.transformer.", "cond_stage_model.", "cond_stage_model.text_model."]
)
def test_text_encoder_names_vary(single, tmp_path, prefix):
    """Some files lack `text_model.`, some lack `transformer.`."""
    full = "cond_stage_model.transformer.text_model."
    state = {prefix + k.removeprefix(full) if k.startswith(full) else k: t for k, t in load_file(single).items()}
    with safetensors.safe_open(single, "pt") as f:
        save_file(state, tmp_path / "a.safetensors", f.metadata())
    assert_equal(everything(single, "ema"), everything(tmp_path / "a.safetensors", "ema"))


def test_a_transformers_that_takes_no_weights_is_noticed(single, monkeypatch):
    real = transformers.CLIPTextModel.from_pretrained.__func__

    def lossy(cls, *args, state_dict, **more):
        lost = {"embeddings.token_embedding.weight", "text_model.embeddings.token_embedding.weight"}
        return real(cls, *args, state_dict={k: t for k, t in state_dict.items() if k not in lost}, **more)

    monkeypatch.setattr(transformers.CLIPTextModel, "from_pretrained", classmethod(lossy))
    with pytest.raises(InputError, match="did not take the text encoder's .*token_embedding.weight"):
        open_model(single).text_encoder()


def test_reading_holds_one_copy(tmp_path):
    """A file is mapped: opening costs next to nothing, building the UNet one fp32 copy, whatever else is inside."""
    config = UNetConfig((128, 256, 256), (True, True, False), 2, 8, 64, 32)
    shapes = sd.weights.names.shapes_of(UNet, config)
    state = {"model.diffusion_model." + k: torch.zeros(s) for k, s in shapes.items()}
    state |= {sd.weights.names.ema_name(k): torch.zeros(s) for k, s in shapes.items()}
    size = sum(s.numel() for s in shapes.values()) * 4
    torch.save({"state_dict": state}, tmp_path / "a.ckpt")
    save_file(state, tmp_path / "a.safetensors")
    del state
    program = """
import sys, threading, time
import torch, sd.weights.read
def anonymous():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))
start, peak, done = anonymous(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)
thread = threading.Thread(target=watch)
thread.start()
model = sd.weights.read.open_model(sys.argv[1])
opened = max(peak, anonymous()) - start
unet = model.unet()
done = True
thread.join()
print(opened, max(peak, anonymous()) - start)
"""
    for name in ("a.ckpt", "a.safetensors"):
        result = subprocess.run([sys.executable, "-c", program, str(tmp_path / name)], capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        opened, built = map(int, result.stdout.split())
        print(f"{name}: UNet {size / 1e6:.0f} MB, opened {opened / 1e6:.0f} MB, built {built / 1e6:.0f} MB")
        assert opened < 0.3 * size and built < 1.3 * size


# ----------------------------------------------------------------------------------------------------------------
# What is refused, and what the message guesses
# ----------------------------------------------------------------------------------------------------------------

UNET_PREFIX = "model.diffusion_model."


def altered(state, kind):
    """A single file's tensors, turned into those of something else."""
    first, key = UNET_PREFIX + "input_blocks.0.0.weight", UNET_PREFIX + "time_embed.0.weight"
    if kind == "inpainting":
        return state | {first: torch.zeros(32, 9, 3, 3)}
    if kind == "depth":
        return state | {first: torch.zeros(32, 5, 3, 3)}
    if kind == "SD 2.x text":
        state = {k: t for k, t in state.items() if not k.startswith("cond_stage_model.")}
        return state | {"cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight": torch.zeros(4)}
    if kind == "SDXL":
        return state | {"conditioner.embedders.0.transformer.text_model.final_layer_norm.bias": torch.zeros(4)}
    if kind == "LoRA":
        name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
        return {f"{name}.lora_down.weight": torch.zeros(4, 32), f"{name}.alpha": torch.tensor(4.0)}
    if kind == "VAE":
        return {k.removeprefix("first_stage_model."): t for k, t in state.items() if k.startswith("first_stage_model.")}
    if kind == "text":
        prefix = "cond_stage_model.transformer."
        return {k.removeprefix(prefix): t for k, t in state.items() if k.startswith(prefix)}
    if kind == "ControlNet":
        return {
            "control_model." + k.removeprefix(UNET_PREFIX): t for k, t in state.items() if k.startswith(UNET_PREFIX)
        }
    if kind == "missing":
        return {k: t for k, t in state.items() if k != key}
    if kind == "unexpected":
        return state | {UNET_PREFIX + "input_blocks.1.0.extra.weight": torch.zeros(1)}
    if kind == "foreign":
        return state | {"something.else": torch.zeros(1)}
    if kind == "shape":
        return state | {key: torch.zeros(3, 3)}
    if kind == "dtype":
        return state | {key: state[key].to(torch.int8)}
    if kind == "second":  # one weight under two names
        return state | {UNET_PREFIX + "conv_in.weight": state[first]}
    raise AssertionError(kind)


SD15_SHAPES = sd.weights.names.shapes_of(UNet, PRESETS["sd15"]["unet"])

REFUSED = {
    "inpainting": "inpainting",
    "depth": "depth",
    "SD 2.x text": "SD 2.x",
    "SDXL": "SDXL",
    "LoRA": "LoRA",
    "VAE": "VAE",
    "text": "text encoder",
    "ControlNet": "ControlNet",
    "missing": "missing time_embed.0.weight",
    "unexpected": "unexpected input_blocks.1.0.extra.weight",
    "foreign": "something.else",
    "shape": "time_embed.0.weight: .* wanted, .3, 3. found",
    "dtype": "int8 found",
    "second": "a second tensor",
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("described", [True, False])
def test_refused_with_a_guess(single, tmp_path, kind, described):
    """Whether or not the file's metadata says what it should be."""
    with safetensors.safe_open(single, "pt") as f:
        metadata = f.metadata()
    if not described:  # heads and groups must then be SD 1.x's own
        del metadata["sd_model"]
    state = {k: t for k, t in load_file(single).items() if not k.startswith("model_ema.")}
    state = {k: t.clone() for k, t in altered(state, kind).items()}
    save_file(state, tmp_path / "a.safetensors", metadata)
    with pytest.raises(InputError, match=REFUSED[kind]) as e:
        open_model(tmp_path / "a.safetensors").vae()
    assert "\n" not in str(e.value)


def test_sd2_by_its_context_width(tmp_path):
    shapes = {k: (s[0], 1024) if ".attn2.to_k" in k or ".attn2.to_v" in k else s for k, s in SD15_SHAPES.items()}
    tensors = {k: torch.empty(s, device="meta") for k, s in shapes.items()}
    with pytest.raises(InputError, match="SD 2.x"):
        sd.weights.configs.infer_unet_config("a.safetensors", tensors)


def test_first_ten_differences(single, tmp_path):
    state = {k: t for k, t in load_file(single).items() if "attn1" not in k}
    with safetensors.safe_open(single, "pt") as f:
        save_file(state, tmp_path / "a.safetensors", f.metadata())
    with pytest.raises(InputError) as e:
        open_model(tmp_path / "a.safetensors")
    assert str(e.value).count("missing") == 10 and "differences" in str(e.value) and "more" in str(e.value)


@pytest.mark.parametrize("part,change,message", [
    ("unet", {"in_channels": 9}, "inpainting"),
    ("unet", {"attention_head_dim": [5, 10, 20]}, "SD 2.x"),
    ("unet", {"addition_embed_type": "text_time"}, "another network"),
    ("unet", {"act_fn": "gelu"}, "another network"),
    ("unet", {"mystery": 3}, "unknown mystery"),
    ("unet", {"block_out_channels": [32, 64, 96]}, "differences"),
    ("unet", {"down_block_types": ["DownBlock2D"] * 2 + ["CrossAttnDownBlock2D"]}, "mirrored"),
    ("vae", {"shift_factor": 0.1}, "another network"),
    ("vae", {"latent_channels": 16}, "differences"),
    ("scheduler", {"prediction_type": "sample"}, "prediction_type"),
    ("scheduler", {"beta_schedule": "sigmoid"}, "betas wants"),
    ("scheduler", {"timestep_spacing": "karras"}, "timestep_spacing"),
])  # fmt: skip
def test_folders_of_another_network(small_tokenizer, tmp_path, part, change, message):
    make_pipeline(small_tokenizer).save_pretrained(tmp_path)
    path = tmp_path / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        open_model(tmp_path).vae()


def test_damaged_and_absent(checkpoint, single, tmp_path):
    content = single.read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(content[: len(content) // 2])
    (tmp_path / "text.safetensors").write_text("<html>not found</html>")
    (tmp_path / "text.ckpt").write_text("<html>not found</html>")
    torch.save(original_ckpt(single), tmp_path / "whole.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "whole.ckpt").read_bytes()[:100_000])
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save({"a": 1}, tmp_path / "nothing.pt")
    (tmp_path / "empty").mkdir()
    for name in ("cut.safetensors", "text.safetensors", "text.ckpt", "cut.ckpt", "list.pt", "nothing.pt", "empty"):
        for opener in (open_model, load_vae):
            with pytest.raises(InputError) as e:
                opener(tmp_path / name)
            assert name.split(".")[0] in str(e.value) and "\n" not in str(e.value)
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    (broken / "model.json").write_text("{")
    with pytest.raises(InputError, match="model.json"):
        open_model(broken)
    (broken / "model.json").write_text('{"format": "checkpoint-9"}')
    with pytest.raises(InputError, match="checkpoint-1"):
        open_model(broken)


@pytest.mark.parametrize("flags,message", [
    (["{single}", "{tmp}/out.ckpt", "--format", "ldm"], "written as .safetensors"),
    (["{single}", "{tmp}/out", "--format", "native", "--dtype", "fp16"], "native is fp32 or int8"),
    (["{tmp}/absent.safetensors", "{tmp}/out", "--format", "native"], "no such file or folder"),
    (["{single}", "{tmp}", "--format", "diffusers"], "exists already"),
])  # fmt: skip
def test_program_refuses(single, tmp_path, flags, message):
    flags = [f.format(single=single, tmp=tmp_path) for f in flags]
    with pytest.raises(InputError, match=message):
        SD_Convert.main(flags)
    assert not (tmp_path / "out").exists()


def test_program_exits_with_2(tmp_path):
    result = subprocess.run(
        [sys.executable, str(ROOT / "SD_Convert.py"), str(tmp_path / "a.ckpt"), "b", "--format", "native"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert result.returncode == 2 and result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_weight_files_are_as_readable_as_the_umask_says(tmp_path, umask):
    before = os.umask(umask)
    try:
        sd.weights.tensors.save_tensors({"a": torch.ones(3)}, tmp_path / "a.safetensors")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert (tmp_path / "a.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_unet_is_read_in_the_dtype_asked_for(small_tokenizer, tmp_path):
    make_pipeline(small_tokenizer).save_pretrained(tmp_path / "model")
    model = sd.weights.read.open_model(tmp_path / "model")
    full, half = model.unet().state_dict(), model.unet(dtype=torch.bfloat16).state_dict()
    assert all(half[k].dtype == torch.bfloat16 and torch.equal(half[k], t.bfloat16()) for k, t in full.items())
