"""Models written: single file, diffusers folder, this project's own folder."""

import json
import os
import time
from dataclasses import asdict, replace
from pathlib import Path

import safetensors
import torch

from sd.errors import InputError
from sd.files import digests, new_folder
from sd.weights import prediction as told
from sd.weights import vocabulary
from sd.weights.configs import CLIP_TEXT_SETTINGS
from sd.weights.int8 import FORMAT, KEY, to_int8
from sd.weights.names import ema_name, unet_names, vae_names, vae_rows
from sd.weights.parts import own_text, save_vae
from sd.weights.read import Model
from sd.weights.tensors import cast, save_tensors, short
from sd.weights.text import clip_state, packed_tokenizer, save_int8_folder, tokenizer_files
from SD_Model import VAE, NoiseSchedule, TextEncoder, UNetConfig, VAEConfig, weights_hash


def told_lineage(model: Model) -> dict:
    """What an export says of the run it comes from."""
    return {k: model.lineage[k] for k in ("lineage", "images", "step") if k in model.lineage}


def unlike_sd15(model: Model, vae: VAE, encoder: TextEncoder) -> list[str]:
    """In words, what other programs take for granted of SD 1.x's single files, and this model has otherwise."""
    odd, config = [], encoder.model.config
    if replace(model.unet_config, dropout=0.0) != UNetConfig():
        odd.append(f"its UNet has widths {model.unet_config.channels} or other heads, groups or blocks")
    if vae.config != VAEConfig():
        odd.append(f"its VAE has widths {vae.config.channels} and scale {vae.config.scaling_factor:g}")
    wanted = dict(vocab_size=vocabulary.CLIP_SIZE, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                  num_attention_heads=12, max_position_embeddings=77, hidden_act="quick_gelu")  # fmt: skip
    if found := {k: getattr(config, k) for k, v in wanted.items() if getattr(config, k) != v}:
        odd.append(f"its text encoder has {', '.join(f'{k} {v}' for k, v in found.items())}")
    usual = NoiseSchedule().config
    if found := {
        k: v for k, v in model.schedule.config.items() if v != usual[k] and k not in ("prediction", "zero_terminal_snr")
    }:
        odd.append(f"its schedule has {', '.join(f'{k} {v}' for k, v in found.items())}")
    return odd


def save_ldm(out: Path, model: Model, dtype: torch.dtype, ema: Model | None = None) -> list[str]:
    """Write one .safetensors of the original names: UNet, VAE, text encoder; with `ema`, its UNet as model_ema.

    Where the model predicts v, the tensors `v_pred` and `ztsnr` and a .yaml beside the file say so too. Returns remarks
    on what other programs will not take as it is.
    """
    vae, encoder = (
        model.vae(),
        (ema or model).text_encoder(),
    )  # one of them has room; the EMA's is the one to paint with
    vae.check_whole()  # for other programs
    if out.suffix != ".safetensors":
        raise InputError(f"a single file is written as .safetensors, and OUT is {out}")
    is_v = model.schedule.prediction == "v"
    for path in [out, told.beside(out)] if is_v else [out]:
        if path.exists():
            raise InputError(f"{path} exists already; remove it, or write elsewhere")
    if not is_v and told.beside(out).exists():
        raise InputError(f"{told.beside(out)} lies beside and would be taken for {out.name}'s; remove it")
    text = clip_state(encoder)
    tensors = {"model.diffusion_model." + k: t for k, t in cast("UNet", model.tensors(), dtype).items()}
    tensors |= {"first_stage_model." + k: t for k, t in cast("VAE", vae.state_dict(), dtype).items()}
    tensors |= {"cond_stage_model.transformer." + k: t for k, t in cast("text encoder", text, dtype).items()}
    positions = torch.arange(encoder.model.config.max_position_embeddings)[None]  # int64 [1, 77], whatever the dtype
    tensors["cond_stage_model.transformer.text_model.embeddings.position_ids"] = positions
    if ema is not None:
        tensors |= {ema_name(k): t for k, t in cast("UNet's EMA", ema.tensors(), dtype).items()}
        tensors["model_ema.decay"] = torch.tensor(0.9999)
        tensors["model_ema.num_updates"] = torch.tensor(model.lineage.get("ema_updates", 0), dtype=torch.int32)
    if is_v:
        tensors["v_pred"] = torch.tensor([])
    if model.schedule.config["zero_terminal_snr"]:
        tensors["ztsnr"] = torch.tensor([])
    described = {
        "unet": asdict(model.unet_config),
        "vae": asdict(vae.config),
        "text": {k: getattr(encoder.model.config, k) for k in CLIP_TEXT_SETTINGS},
        "schedule": model.schedule.config,
        "sampling": model.sampling,
        "size": model.size,
    }
    odd = unlike_sd15(model, vae, encoder)
    remarks = [f"other programs will not open it as SD 1.x: {'; '.join(odd)}"] if odd else []
    like = "-like/unet-" + "-".join(map(str, model.unet_config.channels)) if odd else ""
    packed, remark = packed_tokenizer(encoder.tokenizer)
    metadata = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"stable-diffusion-v1{like}",
        "modelspec.implementation": "https://github.com/CompVis/stable-diffusion",
        "modelspec.title": out.stem,
        "modelspec.date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "modelspec.resolution": f"{model.size}x{model.size}",
        "modelspec.prediction_type": model.schedule.prediction,
        "modelspec.predict_key": model.schedule.prediction,
        "sd_model": own_text(described),
        "sd_lineage": own_text(told_lineage(model)),
        "sd_tokenizer": packed,
    }
    tmp, yaml = out.with_name(out.name + ".tmp"), told.beside(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, tmp, metadata)
        with open(tmp, "rb") as f:
            os.fsync(f.fileno())
        if is_v:  # before the weights: without it they would be painted as epsilon's
            yaml.write_text(told.original_yaml(model.unet_config, vae.config, model.schedule.config), encoding="utf-8")
        os.replace(tmp, out)
    except (OSError, safetensors.SafetensorError) as e:
        tmp.unlink(missing_ok=True)
        if is_v:
            yaml.unlink(missing_ok=True)
        raise InputError(f"{out} could not be written ({short(e)})") from None
    return remarks + [remark] * bool(remark)


def diffusers_configs(model: Model, vae: VAE) -> dict[str, dict]:
    """{path in the folder: JSON} of a diffusers model."""
    if vae.config.patch > 1:
        raise InputError(
            f"the VAE has a space-to-depth stem (patch {vae.config.patch}), which the diffusers library has not; "
            f"use --format native or ldm"
        )
    u, v, s = model.unet_config, vae.config, model.schedule.config
    levels = len(v.channels)
    return {
        "model_index.json": {
            "_class_name": "StableDiffusionPipeline",
            "feature_extractor": [None, None],
            "image_encoder": [None, None],
            "requires_safety_checker": False,
            "safety_checker": [None, None],
            "scheduler": ["diffusers", "DDIMScheduler"],
            "text_encoder": ["transformers", "CLIPTextModel"],
            "tokenizer": ["transformers", "CLIPTokenizer"],
            "unet": ["diffusers", "UNet2DConditionModel"],
            "vae": ["diffusers", "AutoencoderKL"],
        },
        "unet/config.json": {
            "_class_name": "UNet2DConditionModel",
            "act_fn": "silu",
            "attention_head_dim": u.num_heads,  # that library's name for the number of heads
            "block_out_channels": u.channels,
            "center_input_sample": False,
            "cross_attention_dim": u.context_dim,
            "down_block_types": ["CrossAttnDownBlock2D" if a else "DownBlock2D" for a in u.attention],
            "downsample_padding": 1,
            "dropout": u.dropout,
            "flip_sin_to_cos": True,
            "freq_shift": 0,
            "in_channels": u.in_channels,
            "layers_per_block": u.num_res_blocks,
            "mid_block_scale_factor": 1,
            "norm_eps": 1e-5,
            "norm_num_groups": u.norm_groups,
            "out_channels": u.out_channels,
            "sample_size": model.size // v.factor,
            "up_block_types": ["CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(u.attention)],
        },
        "vae/config.json": {
            "_class_name": "AutoencoderKL",
            "act_fn": "silu",
            "block_out_channels": v.channels,
            "down_block_types": ["DownEncoderBlock2D"] * levels,
            "in_channels": 3,
            "latent_channels": v.latent_channels,
            "layers_per_block": v.num_res_blocks,
            "mid_block_add_attention": v.mid_attention,
            "norm_num_groups": v.norm_groups,
            "out_channels": 3,
            "sample_size": model.size,
            "scaling_factor": v.scaling_factor,
            "up_block_types": ["UpDecoderBlock2D"] * levels,
        },
        "scheduler/scheduler_config.json": {
            "_class_name": "DDIMScheduler",
            "beta_end": s["beta_end"],
            "beta_schedule": s["betas"],
            "beta_start": s["beta_start"],
            "clip_sample": False,
            "num_train_timesteps": s["steps"],
            "prediction_type": {"epsilon": "epsilon", "v": "v_prediction"}[s["prediction"]],
            "rescale_betas_zero_snr": s["zero_terminal_snr"],
            "set_alpha_to_one": model.sampling.get("set_alpha_to_one", False),
            "steps_offset": model.sampling.get("offset", 1),
            # a zero-SNR model is sampled from its very last timestep (Lin et al. 2023, section 3.3)
            "timestep_spacing": model.sampling.get("spacing", "trailing" if s["zero_terminal_snr"] else "leading"),
            "trained_betas": None,
        },
        "lineage.json": told_lineage(model),
    }


def save_diffusers(out: Path, model: Model, dtype: torch.dtype, live: Model | None = None):
    """Write a folder for StableDiffusionPipeline.from_pretrained; with `live`, its UNet as the non_ema variant too."""
    vae, encoder = model.vae(), model.text_encoder()
    vae.check_whole()  # for other programs
    text, configs = clip_state(encoder), diffusers_configs(model, vae)
    u, v = unet_names(model.unet_config), vae_names(vae.config)
    linear = vae_rows(vae.config)  # of the mid attention: 1x1 convs here, linear layers there
    linear = {ours for ours, theirs in linear if ".attentions.0." in theirs and not ours.endswith(".norm")}
    vae_state = {}
    for k, t in vae.state_dict().items():
        is_linear = k.endswith(".weight") and k.removesuffix(".weight") in linear
        vae_state[v[k]] = t.flatten(1) if is_linear else t
    with new_folder(out) as tmp:
        for name, values in configs.items():
            (tmp / name).parent.mkdir(exist_ok=True)
            (tmp / name).write_text(json.dumps(values, indent=2))
        files = {"unet/diffusion_pytorch_model": ("UNet", {u[k]: t for k, t in model.tensors().items()})}
        if live is not None:
            files["unet/diffusion_pytorch_model.non_ema"] = ("UNet", {u[k]: t for k, t in live.tensors().items()})
        files["vae/diffusion_pytorch_model"] = ("VAE", vae_state)
        files["text_encoder/model"] = ("text encoder", text)
        (tmp / "text_encoder").mkdir()
        for name, (part, state) in files.items():  # one after the other: a part's cast copy at a time
            save_tensors(cast(part, state, dtype), tmp / f"{name}.safetensors", {"format": "pt"})
        encoder.model.config.architectures = ["CLIPTextModel"]
        encoder.model.config.save_pretrained(tmp / "text_encoder")
        (tmp / "tokenizer").mkdir()
        for name, content in tokenizer_files(encoder.tokenizer).items():
            (tmp / "tokenizer" / name).write_text(content, encoding="utf-8")


def save_native(out: Path, ema: Model, live: Model, int8: bool = False, decoder_only: bool = False, only: str = ""):
    """Write a checkpoint folder of this project, to paint with or to start a run from (--init_from); fp32, or 8 bits.

    decoder_only: without the VAE's encoder. only: 'ema' or 'live', where one UNet is to be written, under that name.
    """
    vae, encoders = ema.vae(), {"text_encoder": live.text_encoder()}
    if decoder_only:
        vae.without_encoder()
    trained = ema.text_encoder()
    if weights_hash(trained) != weights_hash(encoders["text_encoder"]):
        encoders["text_encoder_ema"] = trained
    with new_folder(out) as tmp:
        for name, model in (("unet", live), ("unet_ema", ema))[: 1 if only else 2]:
            file = tmp / f"{name}.safetensors"
            if int8:
                save_tensors(to_int8("UNet", model.tensors()), file, {KEY: FORMAT})
            else:
                save_tensors(cast("UNet", model.tensors(), torch.float32), file)
        for name, encoder in encoders.items():
            if int8:
                save_int8_folder(encoder, tmp / name)
            else:
                encoder.save(tmp / name)
        save_vae(vae, tmp / "vae", int8)
        values = {
            "format": "checkpoint-1",
            "preset": "imported",
            "unet": asdict(ema.unet_config),
            "schedule": ema.schedule.config,
            "sampling": ema.sampling,
            "size": ema.size,
            "text_encoder": "text_encoder",
            "vae": "vae",
        }
        if ema.null != "empty":
            values["null"] = ema.null
        if only:
            values["weights"] = only
        (tmp / "model.json").write_text(json.dumps(values, indent=1))
        (tmp / "state.json").write_text(json.dumps(told_lineage(ema), indent=1))
        (tmp / "manifest.json").write_text(json.dumps(digests(tmp), indent=1))
