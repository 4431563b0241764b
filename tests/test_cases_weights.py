"""Weight files as other programs write them: what is read, what is said, what is refused in a sentence.

pytest tests/test_cases_weights.py
"""

import copy
import gzip
import json
import os
import shutil
import stat
from dataclasses import asdict
from pathlib import Path

import pytest
import safetensors
import tokenizers
import torch
import yaml
from conftest import make_pipeline, randomise
from safetensors.torch import load_file, save_file
from test_convert import UNET, VAE_CONFIG, assert_equal, cached, convert, everything, original_ckpt, write_checkpoint

import sd.weights.names
import sd.weights.parts
import sd.weights.read
import sd.weights.tensors
import sd.weights.text
import sd.weights.write
import SD_Model
from sd.errors import InputError
from sd.weights import prediction, vocabulary
from sd.weights.read import load_text_encoder, load_vae, open_model
from SD_Model import VAE, NoiseSchedule, TextEncoder, UNet, UNetConfig, VAEConfig, config_from_dict, weights_hash

UNET_PREFIX, VAE_PREFIX, TEXT_PREFIX = "model.diffusion_model.", "first_stage_model.", "cond_stage_model.transformer."
TEXTS = ["a photo of an astronaut", "", vocabulary.PROBE]


@pytest.fixture(scope="module")
def checkpoint(small_tokenizer, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("run") / "step_00000020", small_tokenizer)


@pytest.fixture(scope="module")
def single(checkpoint, tmp_path_factory):
    """The checkpoint's EMA weights as a single file, fp32."""
    out = tmp_path_factory.mktemp("single") / "model.safetensors"
    return convert(checkpoint, out, "--format", "ldm", "--dtype", "fp32")


@pytest.fixture(scope="module")
def pipeline(small_tokenizer, tmp_path_factory):
    """A diffusers folder."""
    folder = tmp_path_factory.mktemp("pipe") / "model"
    make_pipeline(small_tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip_single(clip_tokenizer, tmp_path_factory):
    """A single file with CLIP's own tokenizer, and the text encoder that it was made of."""
    folder = tmp_path_factory.mktemp("clip")
    source = write_checkpoint(folder / "c", clip_tokenizer)
    file = convert(source, folder / "model.safetensors", "--format", "ldm", "--dtype", "fp32")
    return file, open_model(source).text_encoder()


def metadata_of(file: Path) -> dict[str, str]:
    with safetensors.safe_open(file, "pt") as f:
        return f.metadata() or {}


def bare(single: Path, out: Path, metadata=None, **more) -> Path:
    """The file's UNet as somebody else's: without this project's description, with further tensors and metadata."""
    state = {k: t for k, t in load_file(single).items() if k.startswith(UNET_PREFIX)}
    save_file(state | more, out, metadata)
    return out


def said(source, **given):
    """(prediction, zero terminal SNR, what was printed) of a model."""
    model = open_model(source, **given)
    return model.schedule.prediction, model.schedule.config["zero_terminal_snr"], model.found


# ----------------------------------------------------------------------------------------------------------------
# What is left over
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", VAE_PREFIX])
def test_vae_with_ema_counters_and_copies(tmp_path, prefix):
    """Case 26: counters are known by name; copies are the EMA weights, and --weights chooses."""
    config = VAEConfig((32, 64), 1, mid_attention=False)
    live, ema = (randomise(VAE(config), seed) for seed in (0, 1))
    state = {prefix + k: t for k, t in live.state_dict().items()}
    state |= {prefix + "model_ema.decay": torch.tensor(0.9999), prefix + "model_ema.num_updates": torch.tensor(840000)}
    save_file(state, tmp_path / "counters.safetensors")
    torch.save({"state_dict": state, "global_step": 840001}, tmp_path / "counters.ckpt")
    for name in ("counters.safetensors", "counters.ckpt"):
        assert weights_hash(load_vae(tmp_path / name)) == weights_hash(live)
    state |= {prefix + "model_ema." + k.replace(".", ""): t for k, t in ema.state_dict().items()}
    state[prefix + "model_ema.lossdiscriminatormain0weight"] = torch.zeros(3)
    state[prefix + "loss.discriminator.main.0.weight"] = torch.zeros(3)
    save_file(state, tmp_path / "copies.safetensors")
    assert weights_hash(load_vae(tmp_path / "copies.safetensors")) == weights_hash(ema)
    assert "EMA weights" in load_vae(tmp_path / "copies.safetensors").found
    found = load_vae(tmp_path / "copies.safetensors", "live")
    assert weights_hash(found) == weights_hash(live) and "live weights (it has EMA too)" in found.found
    del state[prefix + "model_ema.encoderconv_inweight"]
    save_file(state, tmp_path / "cut.safetensors")
    with pytest.raises(InputError, match="VAE's EMA .*missing encoder.conv_in.weight"):
        load_vae(tmp_path / "cut.safetensors")


def test_weights_chooses_the_vae_that_is_exported(checkpoint, tmp_path, capsys):
    config = VAEConfig((32, 64), 1, mid_attention=False)
    live, ema = (randomise(VAE(config), seed) for seed in (0, 1))
    copies = {"model_ema." + k.replace(".", ""): t for k, t in ema.state_dict().items()}
    save_file(live.state_dict() | copies, tmp_path / "vae.safetensors")
    for weights, wanted in (("ema", ema), ("live", live)):
        out = tmp_path / f"{weights}.safetensors"
        flags = ["--format", "ldm", "--dtype", "fp32", "--weights", weights, "--vae", str(tmp_path / "vae.safetensors")]
        assert weights_hash(open_model(convert(checkpoint, out, *flags)).vae()) == weights_hash(wanted)
        assert f"a VAE, {sd.weights.read.WORDS[weights]} weights" in capsys.readouterr().out


LEFT_OVER = ["denoiser.sigmas", "denoiser.log_sigmas", "ddim_sigmas", "ddim_alphas", "ddim_alphas_prev",
             "ddim_sqrt_one_minus_alphas", "global_step", "betas", "model_ema.decay",
             "cond_stage_model.logit_scale"]  # fmt: skip


def test_known_left_overs_are_ignored_and_listed(single, tmp_path):
    """Cases 27 and 57: tables of samplers, counters, a safety checker beside a whole model, and beside a UNet alone."""
    more = {name: torch.zeros(10) for name in LEFT_OVER}
    more |= {f"safety_checker.vision_model.encoder.layers.{i}.layer_norm1.bias": torch.zeros(4) for i in range(3)}
    save_file(load_file(single) | more, tmp_path / "whole.safetensors", metadata_of(single))
    assert_equal(everything(single, "ema"), everything(tmp_path / "whole.safetensors", "ema"))
    assert "left out" not in open_model(single).found
    unet = {k.removeprefix(UNET_PREFIX): t for k, t in load_file(single).items() if k.startswith(UNET_PREFIX)}
    save_file(unet | more, tmp_path / "unet.safetensors")
    for name in ("whole", "unet"):
        model = open_model(tmp_path / f"{name}.safetensors")
        line = next(line for line in model.found.splitlines() if "left out as known: " in line)
        listed = set(line.split(": ", 1)[1].split(", "))
        assert listed == {*LEFT_OVER, "safety_checker.* (3)"}
        assert_equal(model.tensors(), open_model(single).tensors())
    save_file(load_file(single) | {"denoiser.weight": torch.zeros(10)}, tmp_path / "new.safetensors")
    with pytest.raises(InputError, match="1 unknown keys: denoiser.weight"):
        open_model(tmp_path / "new.safetensors")


# ----------------------------------------------------------------------------------------------------------------
# What the network predicts
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metadata,tensors,text,wanted,why", [
    ({}, (), None, ("epsilon", False), "assumed"),
    ({}, ("v_pred",), None, ("v", False), "v_pred"),
    ({}, ("v_pred", "ztsnr"), None, ("v", True), "v_pred and ztsnr"),
    ({}, ("ztsnr",), None, ("v", True), "ztsnr"),
    ({"modelspec.prediction_type": "v"}, (), None, ("v", False), "modelspec.prediction_type"),
    ({"modelspec.prediction_type": "epsilon"}, (), None, ("epsilon", False), "modelspec.prediction_type"),
    ({"modelspec.predict_key": "v"}, (), None, ("v", False), "modelspec.predict_key"),
    ({"ss_v_parameterization": "True", "ss_zero_terminal_snr": "True"}, (), None, ("v", True), "ss_v_parameterization"),
    ({}, (), 'model: {params: {parameterization: "v"}}', ("v", False), "a.yaml"),
    ({}, (), "model: {params: {linear_start: 0.00085}}", ("epsilon", False), "a.yaml"),
    ({"modelspec.prediction_type": "epsilon"}, ("v_pred",), None, ("v", False), "although modelspec"),
    ({}, ("v_pred",), "model: {params: {parameterization: eps}}", ("v", False), "although a.yaml says epsilon"),
])  # fmt: skip
def test_prediction_is_read_wherever_it_is_said(single, tmp_path, metadata, tensors, text, wanted, why):
    """Cases 28 and 51: and what was taken is printed, with who says so."""
    file = bare(single, tmp_path / "a.safetensors", metadata or None, **{name: torch.tensor([]) for name in tensors})
    if text is not None:
        (tmp_path / "a.yaml").write_text(text)
    found = said(file)
    assert found[:2] == wanted and why in found[2] and f"predicts {wanted[0]}" in found[2]
    assert ("zero terminal SNR" in found[2]) == wanted[1]
    assert said(file, prediction="v", zero_terminal_snr=True)[:2] == ("v", True)
    assert said(file, prediction="epsilon")[:2] == ("epsilon", False)
    assert said(file, prediction="v", zero_terminal_snr=False)[:2] == ("v", False)


def test_schedule_of_a_yaml(single, tmp_path):
    file = bare(single, tmp_path / "a.safetensors")
    (tmp_path / "a.yaml").write_text("model: {params: {parameterization: v, linear_start: 0.001, linear_end: 0.02}}")
    wanted = NoiseSchedule(beta_start=0.001, beta_end=0.02, prediction="v")
    assert open_model(file).schedule.config == wanted.config


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system ['touch {marker}']", "model: [", "5", "model: {params: 3}", "\x00"]
)
def test_a_yaml_is_parsed_and_never_run(single, tmp_path, text):
    file, marker = bare(single, tmp_path / "a.safetensors"), tmp_path / "marker"
    (tmp_path / "a.yaml").write_text(text.replace("{marker}", str(marker)))
    found = said(file)
    assert found[0] == "epsilon" and "a.yaml beside it was not used" in found[2] and not marker.exists()


def test_what_cannot_be_predicted_is_refused(single, tmp_path):
    file = bare(single, tmp_path / "a.safetensors", {"modelspec.prediction_type": "epsilon"}, ztsnr=torch.tensor([]))
    with pytest.raises(InputError, match="zero terminal SNR by ztsnr and predicts epsilon.*--prediction v"):
        open_model(file)
    assert said(file, prediction="v")[:2] == ("v", True)
    assert said(file, zero_terminal_snr=False)[:2] == ("epsilon", False)
    with pytest.raises(InputError, match="--prediction wants epsilon or v"):
        open_model(file, prediction="x0")
    (tmp_path / "a.yaml").write_text("model: {params: {parameterization: x0}}")
    with pytest.raises(InputError, match="parameterization eps or v, found 'x0'"):
        open_model(file)


def test_flags_override_folders_and_checkpoints_too(checkpoint, pipeline):
    for source, who in ((checkpoint, "model.json"), (pipeline, "scheduler_config.json")):
        assert said(source)[:2] == ("epsilon", False) and who in said(source)[2]
        found = said(source, prediction="v", zero_terminal_snr=True)
        assert found[:2] == ("v", True) and f"although {who} says epsilon" in found[2]
    assert "assumed" in said(pipeline / "unet")[2]


def test_a_zero_snr_flag_gives_the_spacing_that_reaches_pure_noise(pipeline, tmp_path):
    """A folder of the usual schedule names leading timesteps, which leave the last one out."""
    assert open_model(pipeline).sampling["spacing"] == "leading"
    out = convert(pipeline, tmp_path / "v", "--format", "diffusers", "--prediction", "v", "--zero_terminal_snr")
    values = json.loads((out / "scheduler" / "scheduler_config.json").read_text())
    assert values["prediction_type"] == "v_prediction" and values["rescale_betas_zero_snr"] is True
    assert values["timestep_spacing"] == "trailing" and values["steps_offset"] == 1


def test_v_export_says_so_to_every_program(single, tmp_path, capsys):
    """Case 51: empty tensors, modelspec's two keys and a .yaml, each of which is enough to be read back."""
    source = bare(single, tmp_path / "source.safetensors")
    vae = tmp_path / "vae"
    sd.weights.parts.save_vae(open_model(single).vae(), vae)
    flags = ["--format", "ldm", "--vae", str(vae), "--text_encoder", str(single)]
    out = convert(source, tmp_path / "v.safetensors", *flags, "--prediction", "v", "--zero_terminal_snr")
    assert "predicts v with zero terminal SNR (--prediction; --zero_terminal_snr)" in capsys.readouterr().out
    state, metadata = load_file(out), metadata_of(out)
    assert state["v_pred"].numel() == 0 == state["ztsnr"].numel()
    assert metadata["modelspec.prediction_type"] == metadata["modelspec.predict_key"] == "v"
    params = yaml.safe_load((tmp_path / "v.yaml").read_text())["model"]["params"]
    assert params["parameterization"] == "v" and params["linear_end"] == 0.012 and params["timesteps"] == 1000
    assert params["unet_config"]["params"]["context_dim"] == 32 and said(out)[:2] == ("v", True)
    unet = {k: t for k, t in state.items() if k.startswith(UNET_PREFIX)}
    save_file(unet | {k: state[k] for k in prediction.MARKERS}, tmp_path / "tensors.safetensors")
    assert said(tmp_path / "tensors.safetensors")[:2] == ("v", True)
    save_file(unet, tmp_path / "modelspec.safetensors", {k: v for k, v in metadata.items() if "modelspec" in k})
    save_file(unet, tmp_path / "beside.safetensors")
    shutil.copy(tmp_path / "v.yaml", tmp_path / "beside.yaml")
    for name in ("modelspec", "beside"):
        assert said(tmp_path / f"{name}.safetensors")[:2] == ("v", False)
    plain = convert(out, tmp_path / "epsilon.safetensors", "--format", "ldm", "--prediction", "epsilon")
    assert prediction.MARKERS[0] not in load_file(plain) and not (tmp_path / "epsilon.yaml").exists()


def test_a_stray_yaml_is_never_overwritten_or_left_to_mislead(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "a.yaml").write_text("model: {}")
    for flags in (["--prediction", "v"], []):
        with pytest.raises(InputError, match="a.yaml"):
            convert(checkpoint, tmp_path / "a.safetensors", "--format", "ldm", *flags)
    assert [p.name for p in tmp_path.iterdir()] == ["a.yaml"]

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(InputError, match="could not be written"):
        convert(checkpoint, tmp_path / "b.safetensors", "--format", "ldm", "--prediction", "v")
    assert [p.name for p in tmp_path.iterdir()] == ["a.yaml"]


def test_the_original_configuration_is_the_one_of_sd15():
    """The numbers of the original v1-inference.yaml that decide the network."""
    params = yaml.safe_load(prediction.original_yaml(UNetConfig(), VAEConfig(), NoiseSchedule().config))["model"][
        "params"
    ]
    unet, vae = params["unet_config"]["params"], params["first_stage_config"]["params"]["ddconfig"]
    assert (unet["model_channels"], unet["channel_mult"], sorted(unet["attention_resolutions"])) == (
        320,
        [1, 2, 4, 4],
        [1, 2, 4],
    )
    assert (unet["num_heads"], unet["num_res_blocks"], unet["context_dim"]) == (8, 2, 768)
    assert (vae["ch"], vae["ch_mult"], vae["num_res_blocks"], vae["z_channels"]) == (128, [1, 2, 4, 4], 2, 4)
    assert (params["linear_start"], params["linear_end"], params["scale_factor"]) == (0.00085, 0.012, 0.18215)
    assert params["parameterization"] == "eps"


# ----------------------------------------------------------------------------------------------------------------
# Tokenizers and text encoders
# ----------------------------------------------------------------------------------------------------------------


def test_an_added_token_travels_with_a_single_file(clip_tokenizer, tmp_path, capsys):
    """Case 29."""
    clip_tokenizer.save_pretrained(tmp_path / "tokenizer")
    tokenizer = sd.weights.text.load_tokenizer(str(tmp_path / "tokenizer"))
    tokenizer.add_tokens(["<cat-toy>"])
    source = write_checkpoint(tmp_path / "c", tokenizer)
    file = convert(source, tmp_path / "a.safetensors", "--format", "ldm", "--dtype", "fp32")
    assert "note: its tokenizer is not CLIP's own" in capsys.readouterr().out
    texts = ["a photo of <cat-toy> on mars", *TEXTS]
    wanted, found = open_model(source).text_encoder(), open_model(file).text_encoder()
    assert len(found.tokenizer) == 49409 and 49408 in found.tokenize(texts)[0]
    assert torch.equal(wanted.tokenize(texts), found.tokenize(texts))
    assert torch.equal(wanted.encode(texts), found.encode(texts))
    # Written again by somebody who does not know of it: what is lost is said, and a folder mends it.
    metadata = {k: v for k, v in metadata_of(file).items() if k != "sd_tokenizer"}
    save_file(load_file(file), tmp_path / "lost.safetensors", metadata)
    assert "tokens that were added are lost unless --tokenizer" in open_model(tmp_path / "lost.safetensors").found
    tokenizer.save_pretrained(tmp_path / "added")
    again = open_model(tmp_path / "lost.safetensors", tokenizer=str(tmp_path / "added"))
    assert "are lost" not in again.found and torch.equal(again.text_encoder().encode(texts), wanted.encode(texts))


def test_a_tokenizer_of_more_tokens_than_embeddings_is_refused(single, clip_tokenizer, tmp_path):
    clip_tokenizer.save_pretrained(tmp_path / "t")
    with pytest.raises(InputError, match="knows 614 tokens and its tokenizer 49,408"):
        open_model(single, tokenizer=str(tmp_path / "t")).text_encoder()


def test_clips_vocabulary_is_carried_and_costs_little(clip_single):
    """Case 56: an own export is painted without any other file; 0.28 MB of metadata."""
    file, wanted = clip_single
    assert len(metadata_of(file)["sd_tokenizer"]) < 290_000
    found = open_model(file).text_encoder()
    assert torch.equal(found.tokenize(TEXTS), wanted.tokenize(TEXTS))
    assert torch.equal(found.encode(TEXTS), wanted.encode(TEXTS))
    assert found.tokenize([vocabulary.PROBE])[0, :20].tolist() == vocabulary.PROBE_IDS
    assert found.tokenize([""])[0].tolist() == [49406] + [49407] * 76


@pytest.mark.parametrize("place", ["package", "hub", "vocabulary", "merges", "folder", "own export"])
def test_clips_vocabulary_is_found_where_others_have_it(clip_single, clip_tokenizer, tmp_path, monkeypatch, place):
    """Cases 34 and 56: offline, for a file without one, and the text encoder stays the file's own."""
    import huggingface_hub.constants

    file, wanted = clip_single
    metadata = {k: v for k, v in metadata_of(file).items() if k != "sd_tokenizer"}
    save_file(load_file(file), tmp_path / "a.safetensors", metadata)
    hub, given = tmp_path / "hub", None
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(hub))
    files = vocabulary.clip_files(vocabulary.find_merges())
    if place != "package":
        monkeypatch.setattr(vocabulary, "find_spec", lambda name: None)
        with pytest.raises(InputError, match="--tokenizer FOLDER") as e:
            open_model(tmp_path / "a.safetensors").text_encoder()
        assert "--text_encoder" not in str(e.value) and "\n" not in str(e.value)
    if place in ("hub", "merges", "folder"):
        (tmp_path / "files" / "tokenizer").mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / "files" / "tokenizer" / name).write_text(text, encoding="utf-8")
    if place == "hub":
        cached(hub, "CompVis/stable-diffusion-v1-4", tmp_path / "files")
    elif place == "vocabulary":  # the original file: more merges than CLIP uses
        given = tmp_path / vocabulary.BPE_FILE
        lines = files["merges.txt"].split("\n")[:-1] + ["zz zz</w>", "qq qq</w>"]
        given.write_bytes(gzip.compress("\n".join(lines).encode()))
    elif place == "merges":
        given = tmp_path / "files" / "tokenizer" / "merges.txt"
    elif place == "folder":
        given = tmp_path / "files"  # tokenizer/ inside
    elif place == "own export":
        given = file
    found = open_model(tmp_path / "a.safetensors", tokenizer=given and str(given)).text_encoder()
    assert torch.equal(found.tokenize(TEXTS), wanted.tokenize(TEXTS))
    assert torch.equal(found.encode(TEXTS), wanted.encode(TEXTS))


def test_another_vocabulary_is_not_taken_for_clips(tmp_path, small_tokenizer):
    (tmp_path / "merges.txt").write_text("#version: 0.2\ni n\nt h\n")
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"#\ni n\n" * 1000)[:30])
    for name in ("merges.txt", "cut.txt.gz"):
        with pytest.raises(InputError, match="CLIP's vocabulary was wanted"):
            sd.weights.text.load_tokenizer(str(tmp_path / name))


def test_a_tokenizer_of_another_rule_is_not_the_standard_one(clip_tokenizer, small_tokenizer):
    tokenizer = sd.weights.text.tokenizer_from_text(vocabulary.clip_files(vocabulary.find_merges()))
    assert vocabulary.is_standard(clip_tokenizer, json.loads(clip_tokenizer.backend_tokenizer.to_str()))
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    assert vocabulary.is_standard(tokenizer, content)
    for name, value, usual in (("pad_token", "!", tokenizer.pad_token), ("model_max_length", 40, 77)):
        setattr(tokenizer, name, value)
        assert not vocabulary.is_standard(tokenizer, content)
        setattr(tokenizer, name, usual)
    tokenizer.backend_tokenizer.normalizer = tokenizers.normalizers.NFC()  # no lower case
    assert not vocabulary.is_standard(tokenizer, content)
    small = copy.deepcopy(small_tokenizer)
    small.pad_token, small.model_max_length = "!", 40
    small.add_tokens(["<cat-toy>"])
    packed, remark = sd.weights.text.packed_tokenizer(small)
    again = sd.weights.text.tokenizer_from_text(sd.weights.text.carried_tokenizer({"sd_tokenizer": packed}))
    assert "not CLIP's own" in remark and again.pad_token == "!" and again.model_max_length == 40
    texts = ["a <cat-toy>", *TEXTS]
    assert again(texts)["input_ids"] == small(texts)["input_ids"] and len(again) == len(small)


def text_forms(pipeline: Path, folder: Path) -> dict[str, tuple[Path, str | None]]:
    """{form: (path, tokenizer to give)} of one text encoder as programs hand it around."""
    tokenizer = str(pipeline / "tokenizer")
    state = load_file(pipeline / "text_encoder" / "model.safetensors")
    state = {"text_model." + k.removeprefix("text_model."): t for k, t in state.items()}
    rest = {"logit_scale": torch.tensor(4.6), "text_projection.weight": torch.zeros(32, 32)}
    ids = {"text_model.embeddings.position_ids": torch.arange(77)[None]}
    whole = {"vision_model.post_layernorm.bias": torch.zeros(4), "visual_projection.weight": torch.zeros(4, 4)}
    files = {
        "ComfyUI's CLIPSave": state | rest,
        "whole CLIP": state | rest | ids | whole,
        "prefixed": {TEXT_PREFIX + k: t for k, t in (state | ids).items()},
        "ComfyUI's inner names": {"text_encoders.clip_l.transformer." + k: t for k, t in state.items()},
        "no text_model": {k.removeprefix("text_model."): t for k, t in state.items()},
    }
    forms = {}
    for name, tensors in files.items():
        save_file({k: t.clone() for k, t in tensors.items()}, folder / f"{len(forms)}.safetensors")
        forms[name] = (folder / f"{len(forms)}.safetensors", tokenizer)
    torch.save({"state_dict": state}, folder / "clip.pt")
    bare_folder = shutil.copytree(pipeline / "text_encoder", folder / "text_encoder_alone")
    both = shutil.copytree(pipeline / "text_encoder", folder / "both")
    shutil.copytree(pipeline / "tokenizer", both, dirs_exist_ok=True)
    return forms | {"pickle": (folder / "clip.pt", tokenizer), "model": (pipeline, None), "transformers": (both, None),
                    "text_encoder/": (pipeline / "text_encoder", None), "alone": (bare_folder, tokenizer)}  # fmt: skip


def test_text_encoder_takes_every_form(pipeline, small_tokenizer, tmp_path):
    """Case 55."""
    wanted = open_model(pipeline).text_encoder()
    for form, (path, tokenizer) in text_forms(pipeline, tmp_path).items():
        if path.is_file():  # a single file does not name these: heads of 64, its tokenizer's ids
            found = sd.weights.read.text_encoder_from_file(
                path, *sd.weights.tensors.read_tensors(path), settings=dict(num_attention_heads=2), tokenizer=tokenizer
            )
            assert load_text_encoder(path, tokenizer).model.config.vocab_size == len(small_tokenizer)
        else:
            found = load_text_encoder(path, tokenizer)
        assert_equal(wanted.model.state_dict(), found.model.state_dict())
        assert torch.equal(wanted.encode(TEXTS), found.encode(TEXTS)), form
        assert not found.training and not any(p.requires_grad for p in found.parameters())


def test_text_encoder_of_own_forms_and_none(checkpoint, single, pipeline, tmp_path):
    wanted = open_model(checkpoint).text_encoder().encode(TEXTS)
    for source in (checkpoint, checkpoint / "text_encoder_ema", single):
        assert torch.equal(load_text_encoder(source).encode(TEXTS), wanted)
    with pytest.raises(InputError, match="a tokenizer alone, which --tokenizer takes"):
        load_text_encoder(pipeline / "tokenizer")
    lonely = shutil.copytree(pipeline / "text_encoder", tmp_path / "lonely")
    with pytest.raises(InputError, match="tokenizer of 614 tokens.*give --tokenizer"):
        load_text_encoder(lonely)
    sd.weights.parts.save_vae(randomise(VAE(VAE_CONFIG)), tmp_path / "vae")
    with pytest.raises(InputError, match="it looks like a VAE"):
        load_text_encoder(tmp_path / "vae" / "vae.safetensors")
    with pytest.raises(InputError, match="no config.json is there"):
        load_text_encoder(tmp_path / "vae")


@pytest.mark.parametrize("key", ["modelspec.encoder_layer", "ss_clip_skip"])
def test_clip_skip_leaves_out_the_last_layer(clip_single, tmp_path, key):
    """A model that was trained on the last layer but one says so; the last norm follows."""
    file, _ = clip_single
    state = {k: t for k, t in load_file(file).items() if k.startswith(TEXT_PREFIX)}
    save_file(state, tmp_path / "whole.safetensors")
    save_file(state, tmp_path / "skip.safetensors", {key: "2"})
    whole, skip = (load_text_encoder(tmp_path / f"{name}.safetensors") for name in ("whole", "skip"))
    ids = whole.tokenize(TEXTS)
    states = whole.model(input_ids=ids, output_hidden_states=True).hidden_states
    norm = whole.model.get_submodule(
        "final_layer_norm" if hasattr(whole.model, "final_layer_norm") else "text_model.final_layer_norm"
    )
    assert torch.equal(skip(ids), norm(states[-2])) and not torch.allclose(skip(ids), whole(ids))


# ----------------------------------------------------------------------------------------------------------------
# Files and folders
# ----------------------------------------------------------------------------------------------------------------


def test_folders_in_several_files(pipeline, small_tokenizer, tmp_path):
    """Case 30: an index and its shards, in every part, as safetensors and as pickles."""
    import diffusers

    pipe = diffusers.StableDiffusionPipeline.from_pretrained(pipeline)
    pipe.save_pretrained(tmp_path / "a", max_shard_size="60KB")
    for part in ("unet", "vae", "text_encoder"):
        assert len(list((tmp_path / "a" / part).glob("*-of-*.safetensors"))) > 1
    wanted = everything(pipeline, "ema")
    assert_equal(wanted, everything(tmp_path / "a", "ema"))
    assert weights_hash(load_vae(tmp_path / "a" / "vae")) == weights_hash(load_vae(pipeline))
    assert_equal(open_model(pipeline).tensors(), open_model(tmp_path / "a" / "unet").tensors())
    pipe.unet.save_pretrained(tmp_path / "a" / "unet", max_shard_size="60KB", safe_serialization=False)
    for file in (tmp_path / "a" / "unet").glob("*.safetensors*"):
        file.unlink()
    assert_equal(wanted, everything(tmp_path / "a", "ema"))
    shard = next((tmp_path / "a" / "vae").glob("*00001-of-*.safetensors"))
    index = next((tmp_path / "a" / "vae").glob("*.index.json"))
    shard.rename(tmp_path / "shard")
    with pytest.raises(InputError, match=f"{shard.name}, and there is none"):
        open_model(tmp_path / "a").vae()
    for values in ({"weight_map": {"a": "../shard"}}, {"weight_map": {"a": 5}}, {"weight_map": []}, {}):
        index.write_text(json.dumps(values))
        with pytest.raises(InputError, match="weight_map|no file beside it"):
            open_model(tmp_path / "a").vae()


@pytest.mark.parametrize("ending", [".ckpt", ".SAFETENSORS", ".sft", ".pt", "", ".bin"])
def test_first_bytes_decide_not_the_name(single, tmp_path, ending):
    """Case 31."""
    shutil.copy(single, tmp_path / f"a{ending}")
    assert_equal(open_model(single).tensors(), open_model(tmp_path / f"a{ending}").tensors())


def test_pickles_of_another_name(single, tmp_path):
    content = {"state_dict": load_file(single)}
    torch.save(content, tmp_path / "zip.safetensors")
    torch.save(content, tmp_path / "legacy.SAFETENSORS", _use_new_zipfile_serialization=False)
    torch.save(content, tmp_path / "none")
    for name in ("zip.safetensors", "legacy.SAFETENSORS", "none"):
        assert_equal(open_model(single).tensors(), open_model(tmp_path / name).tensors())


@pytest.mark.parametrize("content,message", [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "pointer of Git LFS"),
    (b"<!DOCTYPE html><html>", "web page"), (b"GGUF\x03\x00\x00\x00", "GGUF"), (b"", "empty"),
    (b"hello", "unknown kind"), (b"\x80\x02garbage that is no pickle", "damaged"), (b"\x80\x04\x95", "damaged"),
    (b"PK\x03\x04garbage", "not a whole"), (b"\x80\x02cposix\nsystem\n.", "GLOBAL posix.system"),
    ((10**9).to_bytes(8, "little") + b'{"a":', "not a whole safetensors"),
])  # fmt: skip
@pytest.mark.parametrize("ending", [".ckpt", ".safetensors"])
def test_no_message_advises_to_run_foreign_code(tmp_path, content, message, ending):
    file = tmp_path / f"a{ending}"
    file.write_bytes(content)
    for opener in (open_model, load_vae, load_text_encoder):
        with pytest.raises(InputError, match=message) as e:
            opener(file)
        text = str(e.value)
        assert "weights_only" not in text and "\n" not in text and str(file) in text


def test_sample_size_as_a_list(pipeline, tmp_path):
    """Case 32: height and width; the smaller side where they differ, 512 px where it is no number."""
    source = shutil.copytree(pipeline, tmp_path / "a")
    path = source / "unet" / "config.json"
    values = json.loads(path.read_text())
    for given, wanted in ((8, 64), ([8, 8], 64), ([8, 12], 64), (None, 512), ("8", 512), ([], 512), (True, 512)):
        path.write_text(json.dumps(values | {"sample_size": given}))
        assert open_model(source).size == wanted, given


def test_a_trainers_checkpoint_folder(checkpoint, pipeline, tmp_path):
    """Case 33: unet/, unet_ema/, an optimizer and a random state; VAE and text encoder are given."""
    folder = tmp_path / "checkpoint-500"
    shutil.copytree(pipeline / "unet", folder / "unet")
    shutil.copytree(pipeline / "unet", folder / "unet_ema")
    file = folder / "unet_ema" / "diffusion_pytorch_model.safetensors"
    save_file({k: t * 2 for k, t in load_file(file).items()}, file)
    config = folder / "unet_ema" / "config.json"
    counters = {"decay": 0.9999, "optimization_step": 500, "min_decay": 0.0, "inv_gamma": 1.0, "power": 0.7,
                "update_after_step": 0, "use_ema_warmup": False}  # fmt: skip
    config.write_text(json.dumps(json.loads(config.read_text()) | counters))
    (folder / "optimizer.bin").write_bytes(b"\x80")
    live, ema = open_model(folder, "live"), open_model(folder, "ema")
    assert "live weights" in live.found and "EMA weights" in ema.found and "assumed" in ema.found
    assert_equal(live.tensors(), open_model(pipeline).tensors())
    assert all(torch.equal(t, 2 * live.tensors()[k]) for k, t in ema.tensors().items())
    for part, flag in ((ema.vae, "--vae"), (ema.text_encoder, "--text_encoder")):
        with pytest.raises(InputError, match=f"give {flag}"):
            part()
    given = ["--format", "ldm", "--dtype", "fp32", "--vae", str(pipeline), "--text_encoder", str(pipeline)]
    out = convert(folder, tmp_path / "a.safetensors", *given)
    assert_equal(open_model(out).tensors(), ema.tensors())
    assert weights_hash(open_model(out).vae()) == weights_hash(load_vae(pipeline))
    shutil.rmtree(folder / "unet")
    for weights in ("ema", "live"):
        assert "EMA weights" in open_model(folder, weights).found


@pytest.mark.parametrize("metadata", [
    {"lineage": "merge of A and B"}, {"tokenizer": "openai/clip-vit-large-patch14"}, {"sd_model": "[]"},
    {"sd_model": "{"}, {"sd_model": '{"unet": 5}'}, {"sd_model": "null", "lineage": "[1]", "tokenizer": "{}"},
    {"tokenizer": '{"tokenizer.json": "x"}'}, {"sd_tokenizer": "AAAA"}, {"sd_tokenizer": '{"a": 1}'},
    {"sd_lineage": "5"}, {"modelspec.prediction_type": "sample"}, {"modelspec.encoder_layer": "two"},
    {"sd_model": "[" * 100_000},
], ids=lambda m: str(m)[:50])  # fmt: skip
def test_foreign_metadata_is_not_trusted(clip_single, tmp_path, metadata):
    """Case 35: opened as a file of others, with the standard tokenizer and no lineage."""
    file, _ = clip_single
    save_file(load_file(file), tmp_path / "a.safetensors", metadata)
    model = open_model(tmp_path / "a.safetensors")
    assert model.lineage == {} and model.schedule.prediction == "epsilon" and model.unet_config.num_heads == 8
    assert_equal(model.tensors(), open_model(file).tensors())
    assert sd.weights.text.carried_tokenizer(metadata) == {}  # and then it is CLIP's own
    assert ("'sd_model' is not of this project" in model.found) == ("sd_model" in metadata)


@pytest.mark.parametrize("change", [
    {"unet": 5}, {"size": "32"}, {"schedule": {"prediction": "x"}}, {"schedule": []}, {"sampling": 3}, {"text": None},
    {"unet": {"channels": "abc"}}, {"vae": {"scaling_factor": "0.18"}}, {"unet": {"num_heads": 0}},
])  # fmt: skip
def test_own_metadata_that_does_not_hold_together_is_refused(single, tmp_path, change):
    metadata = metadata_of(single)
    described = json.loads(metadata["sd_model"])
    for key, value in change.items():
        described[key] = described[key] | value if isinstance(value, dict) and key != "schedule" else value
    save_file(load_file(single), tmp_path / "a.safetensors", metadata | {"sd_model": json.dumps(described)})
    with pytest.raises(InputError, match="metadata 'sd_model' .* damaged or of another version"):
        open_model(tmp_path / "a.safetensors")


def test_exports_of_before_the_prefix_are_read(single, checkpoint, tmp_path):
    """They had `lineage` and `tokenizer` under bare names, as JSON."""
    metadata = metadata_of(single)
    files = sd.weights.text.tokenizer_files(open_model(checkpoint).text_encoder().tokenizer)
    old = {"sd_model": metadata["sd_model"].strip(), "lineage": metadata["sd_lineage"].strip(),
           "tokenizer": json.dumps(files), "modelspec.prediction_type": "epsilon"}  # fmt: skip
    save_file(load_file(single), tmp_path / "old.safetensors", old)
    assert_equal(everything(single, "ema"), everything(tmp_path / "old.safetensors", "ema"))
    model = open_model(tmp_path / "old.safetensors")
    assert model.unet_config == UNET and model.lineage == open_model(single).lineage != {}
    assert (
        model.text_encoder().tokenizer(TEXTS)["input_ids"]
        == open_model(single).text_encoder().tokenizer(TEXTS)["input_ids"]
    )


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_every_file_is_as_readable_as_the_umask_says(checkpoint, single, pipeline, small_tokenizer, tmp_path, umask):
    """Case 36: in exports of every format, and in what TextEncoder.save writes for checkpoints."""
    before = os.umask(umask)
    try:
        convert(checkpoint, tmp_path / "native", "--format", "native")
        convert(checkpoint, tmp_path / "folder", "--format", "diffusers")
        convert(checkpoint, tmp_path / "a.safetensors", "--format", "ldm", "--prediction", "v")
        encoder = open_model(checkpoint).text_encoder()
        state = {k: t + 1 for k, t in encoder.model.state_dict().items()}
        encoder.save(tmp_path / "encoder", state)
    finally:
        os.umask(before)
    modes = {str(p): stat.S_IMODE(p.stat().st_mode) for p in tmp_path.rglob("*") if p.is_file()}
    assert len(modes) > 20 and set(modes.values()) == {0o666 & ~umask}, modes
    assert_equal(TextEncoder.from_pretrained(str(tmp_path / "encoder")).model.state_dict(), state)


def merged_as_a1111_does(file: Path, out: Path) -> Path:
    """Metadata values that begin with a brace are parsed, and all are handed to the writer again."""
    metadata = {k: json.loads(v) if v[:1] == "{" else v for k, v in metadata_of(file).items()}
    save_file({k: t.half() if t.is_floating_point() else t for k, t in load_file(file).items()}, out, metadata)
    return out


def test_a1111s_merger_takes_every_export(checkpoint, single, clip_single, tmp_path):
    """Case 50: no value of ours begins with a brace, and the merged file is still read as ours."""
    v = convert(checkpoint, tmp_path / "v.safetensors", "--format", "ldm", "--prediction", "v", "--zero_terminal_snr")
    for n, file in enumerate((single, clip_single[0], v)):
        metadata = metadata_of(file)
        assert not any(value.startswith("{") for value in metadata.values())
        assert all(k.startswith(("modelspec.", "sd_")) or k == "format" for k in metadata)
        merged = merged_as_a1111_does(file, tmp_path / f"{n}.safetensors")
        old, new = open_model(file), open_model(merged)
        assert new.unet_config == old.unet_config == UNET and new.schedule.config == old.schedule.config
        assert new.lineage == old.lineage != {} and new.size == old.size
        assert new.text_encoder().tokenizer(TEXTS)["input_ids"] == old.text_encoder().tokenizer(TEXTS)["input_ids"]
        assert all(torch.equal(t.half(), new.tensors()[k]) for k, t in old.tensors().items())


@pytest.mark.parametrize("dtype", sd.weights.tensors.FP8, ids=str)
@pytest.mark.parametrize("alone", [True, False])
def test_fp8_files_are_widened(single, tmp_path, dtype, alone):
    """Case 52: whole or the UNet alone, in one byte a weight; and no scales are lost without a word."""
    state = {k: t for k, t in load_file(single).items() if k.startswith(UNET_PREFIX) or not alone}
    small = {k: t.to(dtype) if t.is_floating_point() else t for k, t in state.items()}
    save_file(small, tmp_path / "a.safetensors", None if alone else metadata_of(single))
    model = open_model(tmp_path / "a.safetensors")
    assert f"stored in {str(dtype).removeprefix('torch.')}, widened" in model.found
    wanted = {k.removeprefix(UNET_PREFIX): t.to(dtype).float() for k, t in state.items() if k.startswith(UNET_PREFIX)}
    assert_equal(wanted, model.unet_state()[1])
    assert_equal(wanted, model.unet().state_dict())
    if not alone:
        assert all(t.dtype == torch.float32 for t in everything(tmp_path / "a.safetensors", "ema").values())
        half = convert(tmp_path / "a.safetensors", tmp_path / "half.safetensors", "--format", "ldm")
        assert all(torch.equal(t.float(), wanted[k]) for k, t in open_model(half).tensors().items())
    name = UNET_PREFIX + "input_blocks.1.0.in_layers.2.scale_weight"
    save_file(small | {name: torch.tensor(2.0)}, tmp_path / "scaled.safetensors")
    with pytest.raises(InputError, match="scaled fp8"):
        open_model(tmp_path / "scaled.safetensors")


def test_shapes_that_are_not_sd15s_are_said(single, checkpoint, tmp_path, capsys):
    """Case 57."""
    assert metadata_of(single)["modelspec.architecture"] == "stable-diffusion-v1-like/unet-32-64-64"
    convert(checkpoint, tmp_path / "a.safetensors", "--format", "ldm")
    note = next(line for line in capsys.readouterr().out.splitlines() if "other programs will not open it" in line)
    assert "UNet has widths (32, 64, 64)" in note and "VAE has widths" in note and "vocab_size 614" in note


def test_what_sd15_is():
    """SD 1.5 itself is called so; each thing that other programs take for granted is noticed where it differs."""
    from types import SimpleNamespace as Space

    text = dict(vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                num_attention_heads=12, max_position_embeddings=77, hidden_act="quick_gelu")  # fmt: skip

    def odd(unet=UNetConfig(), vae=VAEConfig(), schedule=None, **changed):
        model = sd.weights.read.Model("", unet, dict, None, None, schedule or NoiseSchedule())
        return sd.weights.write.unlike_sd15(
            model, Space(config=vae), Space(model=Space(config=Space(**(text | changed))))
        )

    assert odd() == [] == odd(UNetConfig(dropout=0.1)) == odd(schedule=NoiseSchedule(prediction="v"))
    assert "heads" in odd(UNetConfig(num_heads=4))[0] and "scale 1" in odd(vae=VAEConfig(scaling_factor=1.0))[0]
    assert "49409" in odd(vocab_size=49409)[0] and "betas linear" in odd(schedule=NoiseSchedule("linear"))[0]
    assert len(odd(UNetConfig(num_heads=4), VAEConfig(patch=2), hidden_act="gelu")) == 3


@pytest.mark.parametrize("config", [UNetConfig((32, 64, 64), (True, True, False), 2, 8, 32),
                                    UNetConfig((64, 96), (False, True), 1, 8, 48)])  # fmt: skip
@pytest.mark.parametrize("prefix", ["", "unet."])
def test_a_unet_alone_under_diffusers_names(tmp_path, config, prefix):
    """Case 57: its architecture is told from its shapes."""
    unet = randomise(UNet(config))
    names = sd.weights.names.unet_names(config)
    state = {prefix + names[k]: t for k, t in unet.state_dict().items()}
    save_file(state, tmp_path / "a.safetensors")
    torch.save({"state_dict": state}, tmp_path / "a.ckpt")
    for name in ("a.safetensors", "a.ckpt"):
        model = open_model(tmp_path / name)
        assert model.unet_config == config and "UNet file of diffusers' names" in model.found
        assert_equal(unet.state_dict(), model.unet().state_dict())


def test_a_folders_file_alone_is_read_as_its_folder(pipeline, checkpoint):
    """Heads, groups, scale and schedule leave no trace in the weights; what lies beside the file knows them."""
    unet = open_model(pipeline / "unet" / "diffusion_pytorch_model.safetensors")
    assert unet.unet_config == open_model(pipeline).unet_config and unet.unet_config.num_heads == 4
    assert_equal(unet.tensors(), open_model(pipeline).tensors())
    vae = load_vae(pipeline / "vae" / "diffusion_pytorch_model.safetensors")
    assert vae.config == load_vae(pipeline).config and vae.config.norm_groups == 8
    own = open_model(checkpoint / "unet_ema.safetensors")
    assert own.unet_config == UNET and own.size == 32
    assert load_vae(checkpoint / "vae" / "vae.safetensors").config == VAE_CONFIG


def test_three_networks_of_a_folder_in_one_file(pipeline, tmp_path, small_tokenizer):
    """unet., vae. and text_encoder. before diffusers' own names."""
    config = UNetConfig((32, 64), (True, False), 1, 8, 32)
    names = sd.weights.names.unet_names(config)
    unet = randomise(UNet(config))
    state = {"unet." + names[k]: t for k, t in unet.state_dict().items()}
    vae = randomise(VAE(VAEConfig((32, 64), 1)))
    names = sd.weights.names.vae_names(vae.config)
    state |= {"vae." + names[k]: t for k, t in vae.state_dict().items()}
    text = load_file(pipeline / "text_encoder" / "model.safetensors")
    state |= {"text_encoder." + k: t for k, t in text.items()}
    save_file(state, tmp_path / "a.safetensors")
    model = open_model(tmp_path / "a.safetensors", tokenizer=str(pipeline / "tokenizer"))
    assert weights_hash(model.unet()) == weights_hash(unet) and weights_hash(model.vae()) == weights_hash(vae)
    assert_equal(open_model(pipeline).text_encoder().model.state_dict(), model.text_encoder().model.state_dict())


def test_an_original_file_with_all_of_it_at_once(single, tmp_path):
    """A .ckpt with buffers, counters, left-overs and a marker, named .safetensors."""
    content = original_ckpt(single)
    content["state_dict"] |= {name: torch.zeros(10) for name in LEFT_OVER} | {"v_pred": torch.tensor([])}
    torch.save(content, tmp_path / "a.safetensors")
    model = open_model(tmp_path / "a.safetensors")
    assert model.schedule.prediction == "v" and "first_stage_model.loss.*" in model.found
    assert_equal(model.tensors(), open_model(single).tensors())


def test_packed_files_are_bounded():
    bomb = vocabulary.pack({"a": "x" * 5_000_000})
    assert vocabulary.unpack(bomb)["a"] == "x" * 5_000_000
    with pytest.raises(ValueError, match="no packed files"):
        vocabulary.unpack(bomb, limit=1_000_000)
    for text in ("", "{}", "AAAA", vocabulary.pack({"a": 5}), vocabulary.pack([1])):
        with pytest.raises(ValueError, match="no packed files"):
            vocabulary.unpack(text)


# ----------------------------------------------------------------------------------------------------------------
# Found by tests/test_fuzz.py
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [UNetConfig, VAEConfig])
@pytest.mark.parametrize("value", [None, True, "8", [8], [[8]], ["8"], [None], [], 0, -1, 1.5, 2**63, float("nan"), {}])
def test_configs_take_no_value_of_another_kind(cls, value):
    """Each value in the place of each: refused where a network could not be built of it, else equal to what is kept."""
    default = asdict(cls())
    for name, right in default.items():
        given = tuple(value) if isinstance(value, list) else value
        like = type(right) is type(given) or (type(right) is float and type(given) is int)
        if isinstance(right, tuple):
            like = given == (8,) and type(right[0]) is int
        elif like and type(right) is not bool:
            like = given > 0 and given < 1 << 20 or (given == 0 and name in ("num_res_blocks", "dropout"))
        if like:
            assert getattr(config_from_dict(cls, default | {name: value}), name) == given
        else:
            with pytest.raises(SD_Model.InputError, match=f"{cls.__name__} wants .*{name}"):
                config_from_dict(cls, default | {name: value})


def test_vae_json_of_another_kind(tmp_path):
    vae = VAE(VAEConfig(channels=(8,), num_res_blocks=0, norm_groups=4, mid_attention=False, patch=8))
    sd.weights.parts.save_vae(vae, tmp_path / "vae")
    values = json.loads((tmp_path / "vae/vae.json").read_text())
    for wrong in ({"channels": 8}, {"channels": [[8]]}, {"norm_groups": None}, {"scaling_factor": 0}):
        (tmp_path / "vae/vae.json").write_text(json.dumps(values | wrong))
        with pytest.raises(SD_Model.InputError, match=f"VAEConfig wants .*{next(iter(wrong))}"):
            load_vae(str(tmp_path / "vae"))


@pytest.mark.parametrize(
    ("file", "name", "value"),
    [
        ("text_encoder/config.json", "num_hidden_layers", [2]),
        ("text_encoder/config.json", "initializer_range", " "),
        ("text_encoder/config.json", "hidden_act", None),
        ("tokenizer/tokenizer_config.json", "model_max_length", {}),
        ("tokenizer/tokenizer_config.json", "model_max_length", "77"),
        ("tokenizer/tokenizer_config.json", "model_max_length", 0),
        ("tokenizer/tokenizer.json", "model", [1]),
    ],
)
def test_text_folders_with_values_of_another_kind(file, name, value, pipeline, tmp_path):
    folder = shutil.copytree(pipeline, tmp_path / "model")
    values = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(values | {name: value}))
    with pytest.raises(ValueError, match="cannot read|could not be loaded|model_max_length") as caught:
        open_model(str(folder)).text_encoder()
    assert type(caught.value).__name__ == "InputError" and "\n" not in str(caught.value)


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="No such file or directory.*a.safetensors"):
        sd.weights.tensors.save_tensors({"a": torch.zeros(1)}, tmp_path / "absent/a.safetensors")


@pytest.mark.parametrize("name", ["beta_start", "beta_end", "num_train_timesteps"])
@pytest.mark.parametrize("value", ["0.012", None, [1]])
def test_scheduler_values_of_another_kind(name, value, pipeline, tmp_path):
    folder = shutil.copytree(pipeline, tmp_path / "model")
    file = folder / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {name: value}))
    with pytest.raises(InputError, match="scheduler_config.json"):
        open_model(str(folder))
