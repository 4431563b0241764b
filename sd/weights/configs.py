"""What a network is, told by a folder's JSON files or by the shapes of its tensors."""

import re

import torch

from sd.errors import InputError
from sd.weights.tensors import guess_cause
from SD_Model import NoiseSchedule, UNetConfig, VAEConfig

CLIP_TEXT_SETTINGS = ("num_attention_heads", "hidden_act", "layer_norm_eps", "bos_token_id", "eos_token_id",
                      "pad_token_id")  # of a text encoder, what shapes do not tell  # fmt: skip

# What a folder's config.json may say beside widths and counts, and still be this network. Absent means the value here.
UNET_FIXED = dict(
    center_input_sample=False, flip_sin_to_cos=True, freq_shift=0, mid_block_type="UNetMidBlock2DCrossAttn",
    only_cross_attention=False, downsample_padding=1, mid_block_scale_factor=1, act_fn="silu", norm_eps=1e-5,
    transformer_layers_per_block=1, dual_cross_attention=False, class_embed_type=None, addition_embed_type=None,
    num_class_embeds=None, encoder_hid_dim=None, encoder_hid_dim_type=None, resnet_time_scale_shift="default",
    resnet_skip_time_act=False, resnet_out_scale_factor=1.0, time_embedding_type="positional", time_embedding_dim=None,
    time_embedding_act_fn=None, timestep_post_act=None, time_cond_proj_dim=None, conv_in_kernel=3, conv_out_kernel=3,
    projection_class_embeddings_input_dim=None, attention_type="default", class_embeddings_concat=False,
    mid_block_only_cross_attention=None, cross_attention_norm=None, reverse_transformer_layers_per_block=None,
)  # fmt: skip

VAE_FIXED = dict(
    in_channels=3, out_channels=3, act_fn="silu", shift_factor=None, latents_mean=None, latents_std=None,
    use_quant_conv=True, use_post_quant_conv=True,
)  # fmt: skip

WITHOUT_EFFECT = {"sample_size", "upcast_attention", "use_linear_projection", "force_upcast", "addition_time_embed_dim",
                  "addition_embed_type_num_heads", "decay", "inv_gamma", "min_decay", "optimization_step", "power",
                  "update_after_step", "use_ema_warmup"}  # fmt: skip


def check_folder_config(source, values: dict, fixed: dict, used: set[str]):
    """InputError for settings of a config.json that this network does not have."""
    odd = [f"{k} {values[k]!r} instead of {v!r}" for k, v in fixed.items() if k in values and values[k] != v]
    known = set(fixed) | used | WITHOUT_EFFECT
    new = {k: v for k, v in values.items() if k not in known and k[0] != "_"}
    odd += [f"unknown {k} {v!r}" for k, v in new.items() if v is not None and v is not False]
    if odd:
        raise InputError(f"{source} describes another network than SD 1.x's: {'; '.join(odd[:10])}")


def unet_config_from_folder(source, values: dict) -> UNetConfig:
    """diffusers' UNet2DConditionModel config.json -> UNetConfig."""
    if values.get("_class_name", "UNet2DConditionModel") != "UNet2DConditionModel":
        raise InputError(f"{source} is a {values['_class_name']}, where a UNet2DConditionModel was wanted")
    down = values.get("down_block_types", ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"])
    up = values.get("up_block_types", ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3)
    heads = values.get("num_attention_heads") or values.get("attention_head_dim", 8)  # 'attention_head_dim' means heads
    heads = sorted(set(heads)) if isinstance(heads, list) else [heads]
    cross, layers = values.get("cross_attention_dim", 1280), values.get("layers_per_block", 2)
    if len(heads) > 1 or not isinstance(cross, int) or not isinstance(layers, int):
        raise InputError(
            f"{source} describes another network than SD 1.x's (heads {heads}, cross_attention_dim {cross}, "
            f"layers_per_block {layers}: one number each was wanted; SD 2.x and SDXL have other heads at every level)"
        )
    used = {"down_block_types", "up_block_types", "block_out_channels", "num_attention_heads", "attention_head_dim",
            "cross_attention_dim", "layers_per_block", "norm_num_groups", "in_channels", "out_channels",
            "dropout"}  # fmt: skip
    check_folder_config(source, values, UNET_FIXED, used)
    attention = tuple(name == "CrossAttnDownBlock2D" for name in down)
    mirrored = ["CrossAttnUpBlock2D" if a else "UpBlock2D" for a in reversed(attention)]
    if not set(down) <= {"CrossAttnDownBlock2D", "DownBlock2D"} or list(up) != mirrored:
        raise InputError(f"{source} has blocks {down} and {up}; SD 1.x has cross-attention or plain ones, mirrored")
    config = UNetConfig(
        channels=tuple(values.get("block_out_channels", (320, 640, 1280, 1280))),
        attention=attention,
        num_res_blocks=layers,
        num_heads=heads[0],
        context_dim=cross,
        norm_groups=values.get("norm_num_groups", 32),
        in_channels=values.get("in_channels", 4),
        out_channels=values.get("out_channels", 4),
        dropout=values.get("dropout", 0.0),
    )
    return checked_unet_config(source, config)


def checked_unet_config(source, config: UNetConfig) -> UNetConfig:
    """The config, if a text-to-image network can be built of it; else InputError."""
    if config.in_channels != config.out_channels:
        kind = "an inpainting model" if config.in_channels == 9 else "depth, instruction or another variant"
        raise InputError(
            f"{source} has a UNet of {config.in_channels} input and {config.out_channels} output channels; "
            f"it looks like {kind}, and text-to-image wants the same number (4)"
        )
    for width in config.channels:
        if width % config.norm_groups or width % config.num_heads:
            raise InputError(
                f"{source} has a UNet of width {width}, which {config.norm_groups} norm groups and "
                f"{config.num_heads} heads do not divide; a single file does not name these two: take its folder"
            )
    return config


def vae_config_from_folder(source, values: dict) -> VAEConfig:
    """diffusers' AutoencoderKL config.json -> VAEConfig."""
    if values.get("_class_name", "AutoencoderKL") != "AutoencoderKL":
        raise InputError(f"{source} is a {values['_class_name']}, where an AutoencoderKL was wanted")
    used = {"down_block_types", "up_block_types", "block_out_channels", "layers_per_block", "latent_channels",
            "norm_num_groups", "mid_block_add_attention", "scaling_factor"}  # fmt: skip
    check_folder_config(source, values, VAE_FIXED, used)
    blocks = {*values.get("down_block_types", []), *values.get("up_block_types", [])}
    if not blocks <= {"DownEncoderBlock2D", "UpDecoderBlock2D"}:
        raise InputError(f"{source} has blocks {sorted(blocks)}; this VAE has plain ones at every level")
    return VAEConfig(
        channels=tuple(values.get("block_out_channels", (64,))),
        num_res_blocks=values.get("layers_per_block", 1),
        latent_channels=values.get("latent_channels", 4),
        norm_groups=values.get("norm_num_groups", 32),
        mid_attention=values.get("mid_block_add_attention", True),
        scaling_factor=values.get("scaling_factor", 0.18215),  # absent in folders older than the setting
    )


def infer_unet_config(source, tensors: dict[str, torch.Tensor]) -> UNetConfig:
    """Architecture from names, the original's or diffusers', and shapes. Heads and norm groups leave no trace: SD 1.x
    has 8 and 32."""
    widths, attention, counts, level = {}, {}, {}, 0
    theirs = re.compile(r"down_blocks\.(\d+)\.resnets\.(\d+)\.conv1\.weight")
    found = sorted((int(m[1]), int(m[2]), name) for name in tensors if (m := theirs.fullmatch(name)))
    for level, j, name in found:
        widths[level] = tensors[name].shape[0]
        attention[level] = f"down_blocks.{level}.attentions.{j}.proj_in.weight" in tensors
        counts[level] = counts.get(level, 0) + 1
    blocks = sorted({int(m[1]) for m in map(re.compile(r"input_blocks\.(\d+)\.").match, tensors) if m})
    for i in blocks if not found else []:
        if f"input_blocks.{i}.0.op.weight" in tensors:
            level += 1
        elif f"input_blocks.{i}.0.in_layers.2.weight" in tensors:
            widths[level] = tensors[f"input_blocks.{i}.0.in_layers.2.weight"].shape[0]
            attention[level] = f"input_blocks.{i}.1.proj_in.weight" in tensors
            counts[level] = counts.get(level, 0) + 1
    middle, *ends = ("middle_block.1", "input_blocks.0.0", "out.2")
    if found:
        middle, *ends = ("mid_block.attentions.0", "conv_in", "conv_out")
    context = tensors.get(f"{middle}.transformer_blocks.0.attn2.to_k.weight")
    first, last = (tensors.get(f"{end}.weight") for end in ends)
    if not widths or any(t is None or t.dim() < 2 for t in (context, first, last)) or len(set(counts.values())) != 1:
        cause = guess_cause(tensors) or f"its first keys are {list(tensors)[:5]}"
        raise InputError(f"{source} holds no UNet of SD 1.x; {cause}")
    config = UNetConfig(
        channels=tuple(widths.values()),
        attention=tuple(attention.values()),
        num_res_blocks=next(iter(counts.values())),
        context_dim=context.shape[1],
        in_channels=first.shape[1],
        out_channels=last.shape[0],
    )
    if config.context_dim == 1024 and config.channels == UNetConfig().channels:
        raise InputError(f"{source} looks like SD 2.x (context width 1024, other heads), and this is SD 1.x")
    return checked_unet_config(source, config)


def infer_vae_config(source, tensors: dict[str, torch.Tensor]) -> VAEConfig:
    """Architecture from names (of either kind) and shapes. Norm groups (32) and scale (0.18215) are SD 1.x's."""
    pattern = re.compile(r"encoder\.(?:down|down_blocks)\.(\d+)\.(?:block|resnets)\.(\d+)\.conv1\.weight")
    found = {(int(m[1]), int(m[2])): t for name, t in tensors.items() if (m := pattern.fullmatch(name))}
    stem, latent = tensors.get("encoder.conv_in.weight"), tensors.get("post_quant_conv.weight")
    if not found or stem is None or latent is None:
        cause = guess_cause(tensors) or f"its first keys are {list(tensors)[:5]}"
        raise InputError(f"{source} holds no VAE of SD 1.x; {cause}")
    patch = round((stem.shape[1] / 3) ** 0.5)
    config = VAEConfig(
        channels=tuple(found[k].shape[0] for k in sorted(found) if k[1] == 0),
        num_res_blocks=max(j for _, j in found) + 1,
        latent_channels=latent.shape[0],
        mid_attention=any(".mid.attn_1." in name or ".mid_block.attentions." in name for name in tensors),
        patch=max(patch, 1),
    )
    if any(width % config.norm_groups for width in config.channels):
        raise InputError(f"{source} has a VAE of widths {config.channels}, which 32 norm groups do not divide")
    return config


def infer_clip_config(source, tensors: dict[str, torch.Tensor]):
    """CLIPTextConfig from shapes; heads of 64 as in every CLIP."""
    from transformers import CLIPTextConfig

    names = {name.removeprefix("text_model."): t for name, t in tensors.items()}
    tokens, positions = (names.get(f"embeddings.{k}_embedding.weight") for k in ("token", "position"))
    inner = names.get("encoder.layers.0.mlp.fc1.weight")
    if tokens is None or positions is None or inner is None:
        raise InputError(f"{source} holds no CLIP text encoder; {guess_cause(tensors) or list(tensors)[:5]}")
    layers = {name.split(".")[2] for name in names if name.startswith("encoder.layers.")}
    return CLIPTextConfig(
        vocab_size=tokens.shape[0],
        hidden_size=tokens.shape[1],
        max_position_embeddings=positions.shape[0],
        intermediate_size=inner.shape[0],
        num_hidden_layers=len(layers),
        num_attention_heads=max(tokens.shape[1] // 64, 1),
        projection_dim=tokens.shape[1],
    )


# --- diffusers folders
def schedule_from_folder(source, values: dict) -> tuple[NoiseSchedule, dict]:
    """scheduler_config.json -> (NoiseSchedule, sampling settings it names)."""
    prediction = {"epsilon": "epsilon", "v_prediction": "v"}.get(values.get("prediction_type", "epsilon"))
    if prediction is None or values.get("trained_betas") is not None:
        raise InputError(
            f"{source} wants prediction_type epsilon or v_prediction and no trained_betas, found "
            f"{values.get('prediction_type')!r} and {values.get('trained_betas')!r}"
        )
    try:
        schedule = NoiseSchedule(
            betas=values.get("beta_schedule", "linear"),
            beta_start=values.get("beta_start", 0.0001),
            beta_end=values.get("beta_end", 0.02),
            steps=values.get("num_train_timesteps", 1000),
            prediction=prediction,
            zero_terminal_snr=values.get("rescale_betas_zero_snr", False),
        )
    except (ValueError, TypeError, RuntimeError) as e:
        raise InputError(f"{source}: {e}") from None
    if values.get("timestep_spacing", "leading") not in ("leading", "trailing", "linspace"):
        raise InputError(
            f"{source} wants timestep_spacing leading, trailing or linspace: {values['timestep_spacing']!r}"
        )
    names = {"timestep_spacing": "spacing", "steps_offset": "offset", "set_alpha_to_one": "set_alpha_to_one"}
    return schedule, {ours: values[theirs] for theirs, ours in names.items() if theirs in values}


def pixels(sample_size, factor: int) -> int:
    """config.json's sample_size (a number, or height and width; in latents) in pixels: 512 where it says nothing."""
    sides = sample_size if isinstance(sample_size, list) else [sample_size]
    sides = [side for side in sides if type(side) is int and side > 0]
    return min(sides, default=64) * factor
