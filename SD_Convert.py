"""Weights of Stable Diffusion 1.x, in and out.

    python SD_Convert.py runs/final final.safetensors --format ldm                  # ComfyUI, A1111: EMA weights, fp16
    python SD_Convert.py runs/final final_folder --format diffusers                 # StableDiffusionPipeline: fp32
    python SD_Convert.py runs/final full.ckpt.safetensors --format ldm --weights both --dtype fp32
    python SD_Convert.py v1-5-pruned.ckpt sd15 --format native                      # this project's checkpoint folder

open_model and load_vae read, whatever the format: this project's checkpoint and run folders, single files of the
original names (.safetensors, .ckpt, .pt), diffusers folders, hub names. One table of names (unet_rows, vae_rows) serves
both directions and matches whole key segments. Reading is strict: every key is accounted for and every shape checked,
or InputError lists the first differences and guesses the cause. Files are memory-mapped, so reading one never holds two
copies; pickles are read with weights_only alone.
"""

import argparse
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import safetensors
import torch
from safetensors.torch import save_file

from SD_Model import (
    VAE,
    InputError,
    NoiseSchedule,
    TextEncoder,
    UNet,
    UNetConfig,
    VAEConfig,
    config_from_dict,
    run_cli,
    weights_hash,
)

DEFAULT_VAE = "stabilityai/sd-vae-ft-mse"
DEFAULT_TEXT_ENCODER = "openai/clip-vit-large-patch14"
CLIP_TEXT_SETTINGS = ("num_attention_heads", "hidden_act", "layer_norm_eps", "bos_token_id", "eos_token_id",
                      "pad_token_id")  # of a text encoder, what shapes do not tell  # fmt: skip
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WORDS = {"ema": "EMA", "live": "live"}

# ----------------------------------------------------------------------------------------------------------------
# Names: rows (ours = the original's, diffusers') of module prefixes, read in both directions.
# ----------------------------------------------------------------------------------------------------------------

UNET_RES = [
    ("in_layers.0", "norm1"),
    ("in_layers.2", "conv1"),
    ("emb_layers.1", "time_emb_proj"),
    ("out_layers.0", "norm2"),
    ("out_layers.3", "conv2"),
    ("skip_connection", "conv_shortcut"),
]
# The VAE's mid attention as it is spelled in single files, in old folders and in today's folders.
VAE_ATTENTION = [
    ("norm", "q", "k", "v", "proj_out"),
    ("group_norm", "query", "key", "value", "proj_attn"),
    ("group_norm", "to_q", "to_k", "to_v", "to_out.0"),
]


def unet_rows(config: UNetConfig) -> list[tuple[str, str]]:
    """(our prefix, diffusers' prefix) of every module of the UNet whose name differs."""
    rows = [
        ("time_embed.0", "time_embedding.linear_1"),
        ("time_embed.2", "time_embedding.linear_2"),
        ("input_blocks.0.0", "conv_in"),
        ("middle_block.1", "mid_block.attentions.0"),
        ("out.0", "conv_norm_out"),
        ("out.2", "conv_out"),
    ]
    n, last = config.num_res_blocks, len(config.channels) - 1
    res = [("middle_block.0", "mid_block.resnets.0"), ("middle_block.2", "mid_block.resnets.1")]
    for i in range(last + 1):
        for j in range(n):
            block = f"input_blocks.{(n + 1) * i + j + 1}"
            res.append((f"{block}.0", f"down_blocks.{i}.resnets.{j}"))
            rows.append((f"{block}.1", f"down_blocks.{i}.attentions.{j}"))
        rows.append((f"input_blocks.{(n + 1) * (i + 1)}.0.op", f"down_blocks.{i}.downsamplers.0.conv"))
        attention = config.attention[last - i]
        for j in range(n + 1):
            block = f"output_blocks.{(n + 1) * i + j}"
            res.append((f"{block}.0", f"up_blocks.{i}.resnets.{j}"))
            if attention:
                rows.append((f"{block}.1", f"up_blocks.{i}.attentions.{j}"))
        rows.append((f"{block}.{2 if attention else 1}.conv", f"up_blocks.{i}.upsamplers.0.conv"))
    return rows + [(f"{ours}.{a}", f"{theirs}.{b}") for ours, theirs in res for a, b in UNET_RES]


def vae_rows(config: VAEConfig, attention: tuple[str, ...] = VAE_ATTENTION[2]) -> list[tuple[str, str]]:
    """(our prefix, diffusers' prefix) of every module of the VAE whose name differs; `attention` picks its spelling."""
    last = len(config.channels) - 1
    rows, res = [], []
    for side in ("encoder", "decoder"):
        rows.append((f"{side}.norm_out", f"{side}.conv_norm_out"))
        for a, b in zip(VAE_ATTENTION[0], attention):
            rows.append((f"{side}.mid.attn_1.{a}", f"{side}.mid_block.attentions.0.{b}"))
        res += [(f"{side}.mid.block_{k + 1}", f"{side}.mid_block.resnets.{k}") for k in (0, 1)]
    for i in range(last + 1):
        for j in range(config.num_res_blocks):
            res.append((f"encoder.down.{i}.block.{j}", f"encoder.down_blocks.{i}.resnets.{j}"))
        rows.append((f"encoder.down.{i}.downsample.conv", f"encoder.down_blocks.{i}.downsamplers.0.conv"))
        for j in range(config.num_res_blocks + 1):  # up.0 is the highest resolution here, the lowest there
            res.append((f"decoder.up.{last - i}.block.{j}", f"decoder.up_blocks.{i}.resnets.{j}"))
        rows.append((f"decoder.up.{last - i}.upsample.conv", f"decoder.up_blocks.{i}.upsamplers.0.conv"))
    names = [("norm1", "norm1"), ("conv1", "conv1"), ("norm2", "norm2"), ("conv2", "conv2")]
    names.append(("nin_shortcut", "conv_shortcut"))
    return rows + [(f"{ours}.{a}", f"{theirs}.{b}") for ours, theirs in res for a, b in names]


def rename(names, rows: list[tuple[str, str]]) -> dict[str, str]:
    """{our name: diffusers' name}. A row applies to a name whose first segments it is; no row: the name is the same."""
    table = dict(rows)
    out = {}
    for name in names:
        parts = name.split(".")
        heads = [".".join(parts[:k]) for k in range(len(parts), 0, -1)]
        head = next((h for h in heads if h in table), None)
        out[name] = name if head is None else table[head] + name[len(head) :]
    return out


def unet_names(config: UNetConfig) -> dict[str, str]:
    """{our name: diffusers' name} of every tensor of the UNet."""
    return rename(shapes_of(UNet, config), unet_rows(config))


def vae_names(config: VAEConfig, attention: tuple[str, ...] = VAE_ATTENTION[2]) -> dict[str, str]:
    """{our name: diffusers' name} of every tensor of the VAE."""
    return rename(shapes_of(VAE, config), vae_rows(config, attention))


def ema_name(name: str) -> str:
    """Our UNet name -> its EMA key in an original training checkpoint, which has no dots."""
    return "model_ema." + ("diffusion_model." + name).replace(".", "")


@functools.cache  # callers read the dict and do not change it
def shapes_of(cls, config) -> dict[str, torch.Size]:
    """{name: shape} of every tensor of UNet(config) or VAE(config), without memory for its weights."""
    with torch.device("meta"):
        return {name: t.shape for name, t in cls(config).state_dict().items()}


# ----------------------------------------------------------------------------------------------------------------
# Reading files
# ----------------------------------------------------------------------------------------------------------------


class Inert:
    """Stands in for a training framework's class inside a .ckpt: runs nothing, and holds nothing."""

    def __new__(cls, *args, **kwargs):
        return object.__new__(cls)

    def __init__(self, *args, **kwargs):
        pass

    def __setstate__(self, state):
        pass


# Modules whose objects lie beside the weights in honest original checkpoints. They become Inert; their code never runs.
INERT_MODULES = ("pytorch_lightning", "lightning", "lightning_fabric", "omegaconf", "numpy")


def read_tensors(path: Path) -> tuple[dict, dict]:
    """A weight file's content, memory-mapped, and its metadata.

    .safetensors gives {name: tensor}; pickles (.ckpt, .pt, .pth, .bin) whatever they hold, read with weights_only.
    Raises InputError for absent, damaged and unsafe files.
    """
    if not path.is_file():
        raise InputError(f"a weight file was wanted at {path}, and there is none")
    if path.suffix == ".safetensors":
        try:
            with safetensors.safe_open(path, "pt") as f:
                return {name: f.get_tensor(name) for name in f.keys()}, f.metadata() or {}
        except (safetensors.SafetensorError, OSError, RuntimeError) as e:
            raise InputError(f"{path} is not a whole safetensors file ({e}); copy or download it again") from None
    try:
        unsafe = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except ValueError:  # a legacy file, no zip: torch.load reads it, without mapping it, and finds for itself
        unsafe = []
    except Exception as e:  # the zip or pickle is damaged in one of many ways
        raise InputError(f"{path} is not a whole PyTorch file ({short(e)}); copy or download it again") from None
    inert = [(Inert, name) for name in unsafe if name.split(".")[0] in INERT_MODULES]
    foreign = sorted(set(unsafe) - {name for _, name in inert})
    if foreign:
        raise InputError(
            f"{path} would run foreign code when unpickled ({', '.join(foreign[:5])}), so it was not opened; ask for "
            f"its .safetensors version, or convert it where you trust it"
        )
    try:
        with torch.serialization.safe_globals(inert):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip(path))
    except Exception as e:  # UnpicklingError, RuntimeError, EOFError, ...: torch names no common class
        raise InputError(f"{path} is damaged, or would run foreign code ({short(e)}); use .safetensors") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a {type(content).__name__}, where a dict of weights was wanted")
    return content, {}


def is_zip(path: Path) -> bool:
    with open(path, "rb") as f:
        return f.read(4) == b"PK\x03\x04"


def short(e: Exception) -> str:
    """The first line of an error, at most 200 characters."""
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]


def read_json(path: Path) -> dict:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise InputError(f"a JSON file was wanted at {path}, and could not be read ({short(e)})") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} wants a JSON object")
    return values


WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module"}  # segments that DDP, compile and FSDP put into names


def tensors_only(content: dict) -> dict[str, torch.Tensor]:
    """The tensors of a pickled dict, without wrappers' segments in their names; other values (counters) are dropped."""
    return {
        ".".join(s for s in name.split(".") if s not in WRAPPERS): value
        for name, value in content.items()
        if isinstance(name, str) and isinstance(value, torch.Tensor)
    }


# ----------------------------------------------------------------------------------------------------------------
# Strictness
# ----------------------------------------------------------------------------------------------------------------


def guess_cause(tensors: dict[str, torch.Tensor]) -> str:
    """What a file that does not fit probably is; "" if nothing comes to mind."""
    names = tensors.keys()

    def any_starts(*heads):
        return any(name.startswith(heads) for name in names)

    def any_holds(*parts):
        return any(part in name for name in names for part in parts)

    def shape(*ends):
        return next((tuple(t.shape) for name, t in tensors.items() if name.endswith(ends)), ())

    if any_starts("lora_unet_", "lora_te") or any_holds(".lora_A.", ".lora_B.", "lora_down", "lora_up", "lora.down"):
        return "it looks like a LoRA, which is applied to a model and is none itself"
    if any_starts("conditioner.embedders", "model.diffusion_model.label_emb", "label_emb", "add_embedding"):
        return "it looks like SDXL, and this is SD 1.x"
    if any_holds("double_blocks", "joint_blocks"):
        return "it looks like a transformer model (Flux, SD 3), and this is SD 1.x"
    if any_starts("control_model.", "controlnet_cond_embedding", "input_hint_block"):
        return "it looks like a ControlNet, which is applied to a model and is none itself"
    if any_starts("cond_stage_model.model."):
        return "it looks like SD 2.x (OpenCLIP text encoder), and this is SD 1.x"
    if shape("input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight", "attn2.to_k.weight")[1:] == (1024,):
        return "it looks like SD 2.x (context width 1024), and this is SD 1.x"
    first = shape("input_blocks.0.0.weight") or (shape("conv_in.weight") if any_starts("time_embedding.") else ())
    if first[1:2] == (9,):
        return "it looks like an inpainting model (9 input channels)"
    if first and first[1] not in (4,):
        return f"its UNet has {first[1]} input channels: depth, instruction or another variant of SD"
    if any_holds("string_to_param", "emb_params"):
        return "it looks like a textual inversion"
    unet = any_holds("time_embed")
    if not unet and any_starts("encoder.down", "decoder.up", "quant_conv", "first_stage_model.", "vae."):
        return "it looks like a VAE"
    if not unet and any_starts("text_model.", "transformer.text_model.", "cond_stage_model."):
        return "it looks like a text encoder"
    if unet and not any_holds("encoder."):
        return "it looks like a UNet"
    return ""


def fit(part: str, source, wanted: dict[str, torch.Size], tensors: dict, ours: dict[str, str], original=None) -> dict:
    """Rename tensors by `ours` ({their name: our name}) and check them against `wanted` ({our name: shape}).

    1x1 convs and linear layers hold the same weights: 2-D and 4-D are taken for each other. Returns {our name: tensor},
    not copied. Raises InputError with the first ten differences; `original`, the whole file, helps to guess the cause.
    """
    fitted, differences = {}, []
    for name, tensor in tensors.items():
        mine = ours.get(name)
        if mine is None:
            differences.append(f"unexpected {name} {tuple(tensor.shape)}")
        elif mine in fitted:
            differences.append(f"{name}: a second tensor for {mine}")
        else:
            shape = wanted[mine]
            if tensor.shape != shape and squeezed(tensor.shape) == squeezed(shape):
                tensor = tensor.reshape(shape)
            fitted[mine] = tensor
            if tensor.shape != shape:
                differences.append(f"{name}: {tuple(shape)} wanted, {tuple(tensor.shape)} found")
            elif not tensor.dtype.is_floating_point or tensor.element_size() < 2:
                differences.append(f"{name}: fp32, fp16 or bf16 wanted, {tensor.dtype} found")
    differences += [f"missing {name} {tuple(shape)}" for name, shape in wanted.items() if name not in fitted]
    if differences:
        cause = guess_cause(tensors if original is None else original)
        more = f" and {len(differences) - 10} more" if len(differences) > 10 else ""
        raise InputError(
            f"{source} does not fit the {part} that was wanted"
            + (f"; {cause}" if cause else "")
            + f"; {len(differences)} differences: {'; '.join(differences[:10])}{more}"
        )
    return fitted


def squeezed(shape) -> tuple[int, ...]:
    """A 1x1 conv's shape as a linear layer's; others unchanged."""
    return tuple(shape[:2]) if tuple(shape[2:]) == (1, 1) else tuple(shape)


def fit_unet(source, config: UNetConfig, tensors: dict, original=None) -> dict[str, torch.Tensor]:
    """UNet tensors in original or diffusers names -> in our names."""
    names = unet_names(config)
    ours = {theirs: name for name, theirs in names.items()} | {name: name for name in names}
    return fit("UNet", source, shapes_of(UNet, config), tensors, ours, original)


def fit_vae(source, config: VAEConfig, tensors: dict) -> dict[str, torch.Tensor]:
    """VAE tensors in original or diffusers names, with any spelling of the attention -> in our names."""
    ours = {}
    for spelling in VAE_ATTENTION:
        there = vae_names(config, spelling)
        ours |= {theirs: name for name, theirs in there.items()}
        for name in there:  # original outer names with a folder's attention names happen too
            for a, b in zip(VAE_ATTENTION[0], spelling):
                if f".attn_1.{a}." in name:
                    ours[name.replace(f".attn_1.{a}.", f".attn_1.{b}.")] = name
        ours |= {name: name for name in there}
    return fit("VAE", source, shapes_of(VAE, config), tensors, ours)


# ----------------------------------------------------------------------------------------------------------------
# Architecture: from config.json, or from the shapes of a single file
# ----------------------------------------------------------------------------------------------------------------

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
    """Architecture from original names and shapes. Heads and norm groups leave no trace: SD 1.x has 8 and 32."""
    widths, attention, level = {}, {}, 0
    blocks = sorted({int(m[1]) for m in map(re.compile(r"input_blocks\.(\d+)\.").match, tensors) if m})
    counts = {}
    for i in blocks:
        if f"input_blocks.{i}.0.op.weight" in tensors:
            level += 1
        elif f"input_blocks.{i}.0.in_layers.2.weight" in tensors:
            widths[level] = tensors[f"input_blocks.{i}.0.in_layers.2.weight"].shape[0]
            attention[level] = f"input_blocks.{i}.1.proj_in.weight" in tensors
            counts[level] = counts.get(level, 0) + 1
    context = tensors.get("middle_block.1.transformer_blocks.0.attn2.to_k.weight")
    first, last = tensors.get("input_blocks.0.0.weight"), tensors.get("out.2.weight")
    if not widths or any(t is None or t.dim() < 2 for t in (context, first, last)) or len(set(counts.values())) != 1:
        cause = guess_cause(tensors) or f"its first keys are {list(tensors)[:5]}"
        raise InputError(f"{source} holds no UNet of SD 1.x; {cause}")
    config = UNetConfig(
        channels=tuple(widths.values()),
        attention=tuple(attention.values()),
        num_res_blocks=counts[0],
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


# ----------------------------------------------------------------------------------------------------------------
# Loading parts
# ----------------------------------------------------------------------------------------------------------------


def build(cls, config, state: dict[str, torch.Tensor], device="cpu", dtype=torch.float32):
    """UNet or VAE of copies of these weights, eval, without gradients; one tensor at a time."""
    with torch.device("meta"):
        module = cls(config)
    module.load_state_dict({k: t.to(device, dtype, copy=True) for k, t in state.items()}, assign=True)
    return module.eval().requires_grad_(False)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict | None = None):
    """A .safetensors file that others may read as far as the process's umask lets them; the library lets no one."""
    save_file(tensors, path, metadata)
    os.umask(umask := os.umask(0o022))
    os.chmod(path, 0o666 & ~umask)


def weights_file(folder: Path, stem: str, live: bool = False) -> Path:
    """The weight file of a diffusers or transformers folder; with `live`, the non-EMA variant where there is one."""
    kinds = [".non_ema"] * live + ["", ".fp16"]
    bins = "pytorch_model" if stem == "model" else stem
    for kind in kinds:
        for path in (folder / f"{stem}{kind}.safetensors", folder / f"{bins}{kind}.bin"):
            if path.is_file():
                return path
    found = sorted(os.listdir(folder))[:10] if folder.is_dir() else "no such folder"
    raise InputError(f"{stem}.safetensors or {bins}.bin was wanted in {folder}, found {found}")


def fetch(name: str, patterns: list[str]) -> Path:
    """A local path as it is; anything else is a hub name, downloaded or taken from the cache. InputError if neither."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", name) or path.suffix in (".safetensors", ".ckpt", ".pt"):
        raise InputError(f"weights were wanted at {name}, and there is no such file or folder")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as e:  # offline, unknown, gated, no disk: the hub's classes change between versions
        raise InputError(
            f"{name} is no local path, and could not be had from the model hub or its cache ({short(e)}); "
            f"give a local path, or run once with a network"
        ) from None


def load_vae(source: str | Path = DEFAULT_VAE) -> VAE:
    """A VAE in fp32 on the CPU, eval, without gradients.

    source: a folder written by save_vae, a checkpoint or run folder of this project, a diffusers VAE folder or a whole
    diffusers model, a standalone or full single file, or a hub name. Raises InputError.
    """
    path = fetch(str(source), ["config.json", "diffusion_pytorch_model.safetensors", "vae/*.json",
                               "vae/diffusion_pytorch_model.safetensors"])  # fmt: skip
    if path.is_file():
        return vae_from_file(path)
    if (path / "vae.json").is_file():
        config = config_from_dict(VAEConfig, read_json(path / "vae.json"))
        return build(VAE, config, fit_vae(path, config, read_tensors(path / "vae.safetensors")[0]))
    if (path / "model.json").is_file() or (path / "checkpoints").is_dir():
        return open_model(path).vae()
    if (path / "config.json").is_file():
        config = vae_config_from_folder(path / "config.json", read_json(path / "config.json"))
        tensors = tensors_only(read_tensors(weights_file(path, "diffusion_pytorch_model"))[0])
        return build(VAE, config, fit_vae(path, config, tensors))
    if (path / "vae").is_dir():
        return load_vae(path / "vae")
    raise InputError(f"a VAE was wanted in {path}: neither vae.json nor config.json nor vae/ is there")


def vae_from_file(path: Path) -> VAE:
    """The VAE of a standalone file, or of a full single file."""
    content, metadata = read_tensors(path)
    nested = content.get("state_dict")
    tensors = tensors_only(nested if isinstance(nested, dict) else content)
    for prefix in ("first_stage_model.", "vae."):
        if any(name.startswith(prefix) for name in tensors):
            tensors = {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
    return vae_from_tensors(path, tensors, own_description(path, metadata))


def vae_from_tensors(source, tensors: dict, described: dict) -> VAE:
    """A VAE of these tensors, of the described architecture or else of the one their shapes tell."""
    tensors = {name: t for name, t in tensors.items() if not name.startswith("loss.")}
    config = config_from_dict(VAEConfig, described["vae"]) if described else infer_vae_config(source, tensors)
    return build(VAE, config, fit_vae(source, config, tensors))


def own_description(path: Path, metadata: dict) -> dict:
    """What save_ldm wrote into a file's metadata about the networks, or {} for files of others."""
    try:
        described = json.loads(metadata.get("sd_model", "{}"))
        if described and not described.keys() >= {"unet", "vae", "text", "schedule", "sampling", "size"}:
            raise ValueError(f"it has {sorted(described)}")
    except (ValueError, AttributeError) as e:
        raise InputError(f"the metadata 'sd_model' of {path} is damaged or of another version ({short(e)})") from None
    return described


def save_vae(vae: VAE, folder: str | Path):
    """Write a VAE in this project's format: vae.json and vae.safetensors (fp32), whole or not at all."""
    folder = Path(folder)
    with new_folder(folder, replace=True) as tmp:
        (tmp / "vae.json").write_text(json.dumps(asdict(vae.config), indent=2))
        state = {k: t.detach().to("cpu", torch.float32).contiguous() for k, t in vae.state_dict().items()}
        save_tensors(state, tmp / "vae.safetensors")


class new_folder:
    """`with new_folder(path) as tmp:` fills tmp, which becomes path at the end, whole, or vanishes on an error."""

    def __init__(self, path: Path, replace: bool = False):
        self.path, self.tmp, self.replace = path, path.with_name(path.name + ".tmp"), replace

    def __enter__(self) -> Path:
        if self.path.exists() and not self.replace:
            raise InputError(f"{self.path} exists already; remove it, or write elsewhere")
        try:
            shutil.rmtree(self.tmp, ignore_errors=True)
            self.tmp.mkdir(parents=True)
        except OSError as e:
            raise InputError(f"{self.path} cannot be written ({e.strerror})") from None
        return self.tmp

    def __exit__(self, kind, error, trace):
        if kind is not None:
            shutil.rmtree(self.tmp, ignore_errors=True)
            return
        for file in self.tmp.rglob("*"):
            if file.is_file():
                with open(file, "rb") as f:
                    os.fsync(f.fileno())
        old = self.path.with_name(self.path.name + ".old")
        if self.path.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.rename(self.path, old)
        os.rename(self.tmp, self.path)
        shutil.rmtree(old, ignore_errors=True)


def clip_from_tensors(source, config, tensors: dict[str, torch.Tensor], tokenizer) -> TextEncoder:
    """A CLIP text encoder of these weights, strictly. Names with or without `text_model.`; fp32, eval."""
    from transformers import CLIPTextModel

    dropped = ("vision_model.", "visual_projection.", "text_projection", "logit_scale")  # a whole CLIP's other half
    tensors = {
        name.removeprefix("text_model."): t
        for name, t in tensors.items()
        if not name.startswith(dropped) and not name.endswith("position_ids")
    }
    with torch.device("meta"):
        empty = CLIPTextModel(config).state_dict()
    names = {name.removeprefix("text_model."): name for name in empty}  # transformers' own names, by version
    state = fit("text encoder", source, {name: t.shape for name, t in empty.items()}, tensors, names)
    # Copies, as the model keeps these very tensors, and a file may change under the ones that are mapped. Unlike
    # CLIPTextModel(config), from_pretrained draws no random weights first, which takes seconds.
    state = {name: t.to(torch.float32, copy=True) for name, t in state.items()}
    model, info = CLIPTextModel.from_pretrained(
        None, config=config, state_dict=state, dtype=torch.float32, output_loading_info=True
    )
    if lost := [*info["missing_keys"], *info["unexpected_keys"], *info["mismatched_keys"]]:
        raise InputError(f"this version of transformers did not take the text encoder's {lost[:5]} from {source}")
    return TextEncoder(model.eval().requires_grad_(False), tokenizer)


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


def load_tokenizer(name: str):
    """A transformers tokenizer from a folder or hub name; InputError if it cannot be had."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(
            f"a tokenizer was wanted at {name!r} and could not be loaded ({short(e)}); "
            f"give --text_encoder FOLDER, or run once with a network"
        ) from None


def tokenizer_from_text(files: dict[str, str]):
    """A tokenizer from the contents of its files ({name: text}), as a single file's metadata carries them."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / Path(name).name).write_text(text, encoding="utf-8")
        return load_tokenizer(folder)


def load_clip_folder(folder: Path, tokenizer: Path) -> TextEncoder:
    """The text encoder of a diffusers model: text_encoder/ and tokenizer/ are folders of their own."""
    from transformers import CLIPTextConfig

    values = read_json(folder / "config.json")
    if values.get("model_type") not in ("clip_text_model", "clip"):
        raise InputError(f"{folder} holds a {values.get('model_type')!r}, where a CLIP text model was wanted")
    tensors = tensors_only(read_tensors(weights_file(folder, "model"))[0])
    return clip_from_tensors(folder, CLIPTextConfig.from_pretrained(folder), tensors, load_tokenizer(str(tokenizer)))


# ----------------------------------------------------------------------------------------------------------------
# Models
# ----------------------------------------------------------------------------------------------------------------


@dataclass
class Model:
    """An opened model. Parts are loaded when they are asked for, so that not all need be in memory at once."""

    found: str  # one sentence: what it is, and which weights were taken
    unet_config: UNetConfig
    tensors: Callable[[], dict[str, torch.Tensor]]  # the UNet's, in our names, memory-mapped, in the file's dtype
    vae: Callable[[], VAE]  # fp32, CPU, eval, without gradients
    text_encoder: Callable[[], TextEncoder]  # the same
    schedule: NoiseSchedule = field(default_factory=NoiseSchedule)
    sampling: dict = field(default_factory=dict)  # spacing, offset, set_alpha_to_one, where the model names them
    size: int = 512  # pixels, of the pictures it was trained on
    lineage: dict = field(default_factory=dict)  # how it was trained, for the metadata of exports

    def unet_state(self) -> tuple[UNetConfig, dict[str, torch.Tensor]]:
        """The UNet's architecture and weights: our names, fp32, on the CPU."""
        return self.unet_config, {k: t.to(torch.float32, copy=True) for k, t in self.tensors().items()}

    def unet(self, device="cpu", dtype=torch.float32) -> UNet:
        """The UNet, eval, without gradients."""
        return build(UNet, self.unet_config, self.tensors(), device, dtype)


def open_model(source: str | Path, weights: str = "ema") -> Model:
    """Open any SD 1.x model. Raises InputError.

    source: a checkpoint or run folder of this project; a single file of the original names; a diffusers model or UNet
    folder; a UNet's .pt; a hub name. weights: 'ema' or 'live', where the source has both; `found` says what was taken.
    """
    if weights not in ("ema", "live"):
        raise InputError(f"--weights wants ema or live, found {weights!r}")
    path = fetch(str(source), ["*.json", "*/*.json", "tokenizer/*", "text_encoder/model.safetensors",
                               "unet/diffusion_pytorch_model.safetensors", "vae/diffusion_pytorch_model.safetensors",
                               "diffusion_pytorch_model.safetensors"])  # fmt: skip
    if path.is_file():
        return open_single_file(path, weights)
    if (path / "checkpoints").is_dir():
        path = newest_checkpoint(path)
    if (path / "model.json").is_file():
        return open_checkpoint(path, weights)
    if (path / "model_index.json").is_file() or (path / "unet").is_dir() or (path / "config.json").is_file():
        return open_folder(path, weights)
    raise InputError(
        f"a model was wanted at {path}: neither model.json (a checkpoint of this project) nor checkpoints/ (a run) nor "
        f"model_index.json (a diffusers folder) is there"
    )


# --- this project's checkpoints


def checkpoint_problem(folder: Path, skip: tuple[str, ...] = ()) -> str | None:
    """Why a checkpoint folder is not whole (checked against its manifest.json), or None. `skip`: files not to read."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        for name, digest in manifest.items():
            if name not in skip:
                with open(folder / name, "rb") as f:
                    if hashlib.file_digest(f, "sha256").hexdigest() != digest:
                        return f"{name} differs from its checksum"
    except (OSError, ValueError, AttributeError) as e:
        return f"{getattr(e, 'filename', None) or 'manifest.json'} cannot be read ({short(e)})"
    return None


def newest_checkpoint(run: Path) -> Path:
    """The newest whole checkpoint of a run folder. InputError if there is none."""
    problems = []
    for folder in sorted((run / "checkpoints").glob("step_*[0-9]"), key=lambda p: int(p.name[5:]), reverse=True):
        problem = checkpoint_problem(folder, skip=("optimizer.pt",))
        if problem is None:
            return folder
        problems.append(f"{folder.name}: {problem}")
    raise InputError(f"a whole checkpoint was wanted in {run / 'checkpoints'}, found {problems[:3] or 'none'}")


def open_checkpoint(folder: Path, weights: str) -> Model:
    values = read_json(folder / "model.json")
    if values.get("format") != "checkpoint-1":
        raise InputError(f"{folder / 'model.json'} wants format checkpoint-1, found {values.get('format')!r}")
    try:
        config = config_from_dict(UNetConfig, values["unet"])
        schedule = NoiseSchedule(**values["schedule"])
        vae, text = values["vae"], values["text_encoder"]
    except (KeyError, TypeError, ValueError) as e:
        raise InputError(f"{folder / 'model.json'} is incomplete or of another version ({e!r})") from None
    name = "unet_ema.safetensors" if weights == "ema" else "unet.safetensors"
    tensors = fit_unet(folder / name, config, read_tensors(folder / name)[0])

    def load_own_vae():
        if isinstance(vae, str):
            return load_vae(folder / vae)
        loaded = load_vae(vae["path"])
        if weights_hash(loaded) != vae["hash"]:
            raise InputError(f"the VAE at {vae['path']} is not the one {folder} was trained with (hashes differ)")
        return loaded

    def load_own_text_encoder():
        own = folder / "text_encoder_ema"
        if weights == "live" or not own.is_dir():
            own = folder / text  # a subfolder, or an absolute path
        return TextEncoder.from_pretrained(str(own) if own.is_dir() else text).requires_grad_(False)

    state = read_json(folder / "state.json") if (folder / "state.json").is_file() else {}
    return Model(
        found=f"{folder}: a checkpoint of this project (preset {values.get('preset')}), {WORDS[weights]} weights",
        unet_config=config,
        tensors=lambda: tensors,
        vae=load_own_vae,
        text_encoder=load_own_text_encoder,
        schedule=schedule,
        sampling=values.get("sampling", {}),
        size=values.get("size", 512),
        lineage=state,
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
    except ValueError as e:
        raise InputError(f"{source}: {e}") from None
    if values.get("timestep_spacing", "leading") not in ("leading", "trailing", "linspace"):
        raise InputError(
            f"{source} wants timestep_spacing leading, trailing or linspace: {values['timestep_spacing']!r}"
        )
    names = {"timestep_spacing": "spacing", "steps_offset": "offset", "set_alpha_to_one": "set_alpha_to_one"}
    return schedule, {ours: values[theirs] for theirs, ours in names.items() if theirs in values}


def open_folder(path: Path, weights: str) -> Model:
    """A diffusers model, or a UNet folder alone (then with SD 1.x's own VAE, text encoder and schedule)."""
    whole = (path / "unet").is_dir()
    unet = path / "unet" if whole else path
    if whole and weights == "ema" and (path / "unet_ema").is_dir():
        unet = path / "unet_ema"
    values = read_json(unet / "config.json")
    config = unet_config_from_folder(unet / "config.json", values)
    file = weights_file(unet, "diffusion_pytorch_model", live=weights == "live")
    tensors = fit_unet(file, config, tensors_only(read_tensors(file)[0]))
    which = "live" if ".non_ema." in file.name else "EMA" if unet.name == "unet_ema" else "its only"
    scheduler = path / "scheduler" / "scheduler_config.json"
    schedule, sampling = schedule_from_folder(scheduler, read_json(scheduler)) if scheduler.exists() else (None, {})
    lineage = path / "lineage.json"
    levels = len(read_json(path / "vae" / "config.json").get("block_out_channels", [0] * 4)) if whole else 4

    def load_text_encoder():
        if whole:
            return load_clip_folder(path / "text_encoder", path / "tokenizer")
        return TextEncoder.from_pretrained(DEFAULT_TEXT_ENCODER).requires_grad_(False)

    return Model(
        found=f"{path}: a diffusers {'folder' if whole else 'UNet'}, {which} weights ({file.name})",
        unet_config=config,
        tensors=lambda: tensors,
        vae=lambda: load_vae(path / "vae" if whole else DEFAULT_VAE),
        text_encoder=load_text_encoder,
        schedule=schedule or NoiseSchedule(),
        sampling=sampling,
        size=(values.get("sample_size") or 64) * 2 ** (levels - 1),
        lineage=read_json(lineage) if lineage.is_file() else {},
    )


# --- single files

# What original files carry beside the weights of the three networks: buffers that follow from the schedule, counters.
IGNORED = {
    "betas", "alphas_cumprod", "alphas_cumprod_prev", "sqrt_alphas_cumprod", "sqrt_one_minus_alphas_cumprod",
    "log_one_minus_alphas_cumprod", "sqrt_recip_alphas_cumprod", "sqrt_recipm1_alphas_cumprod", "posterior_variance",
    "posterior_log_variance_clipped", "posterior_mean_coef1", "posterior_mean_coef2", "lvlb_weights", "logvar",
    "scale_factor", "model_ema.decay", "model_ema.num_updates", "cond_stage_model.logit_scale",
    "cond_stage_model.text_projection", "cond_stage_model.transformer.text_projection.weight",
}  # fmt: skip
PARTS = {  # prefix in the file: part
    "model.diffusion_model.": "unet",
    "model_ema.": "ema",
    "first_stage_model.": "vae",
    "vae.": "vae",
    "cond_stage_model.transformer.": "text",
    "cond_stage_model.": "text",  # some files lack `transformer.`
}
LIVE_NAMES = ("state_dict", "model_state_dict", "unet", "model")  # where old training files keep their weights
EMA_NAMES = ("ema_state_dict", "unet_ema", "model_ema", "ema")


def split_single_file(path: Path, content: dict) -> dict[str, dict[str, torch.Tensor]]:
    """The content of a single file -> {part: {name without its prefix: tensor}}; parts of PARTS. Strict."""
    live = next((content[k] for k in LIVE_NAMES if isinstance(content.get(k), dict)), None)
    ema = next((content[k] for k in EMA_NAMES if isinstance(content.get(k), dict)), None)
    if live is None:
        live = content if ema is None else ema
    tensors = tensors_only(live)
    if not any(name.startswith(tuple(PARTS)) for name in tensors):  # a UNet alone
        tensors = {"model.diffusion_model." + name.removeprefix("unet."): t for name, t in tensors.items()}
    parts, unknown = {part: {} for part in PARTS.values()}, []
    for name, tensor in tensors.items():
        prefix = next((p for p in PARTS if name.startswith(p)), None)
        if name in IGNORED or name.startswith(("first_stage_model.loss.", "embedding_manager.")):
            continue
        if prefix is None:
            unknown.append(name)
        else:
            parts[PARTS[prefix]][name[len(prefix) :]] = tensor
    if ema is not None:  # an old training file: to the names that original files have
        for name, tensor in tensors_only(ema).items():
            parts["ema"][ema_name(name.removeprefix("unet."))[len("model_ema.") :]] = tensor
    open_clip = any(name.startswith("model.") for name in parts["text"])
    if unknown or open_clip or not (parts["unet"] or parts["ema"]):
        cause = guess_cause(tensors) or guess_cause(parts["unet"])
        raise InputError(
            f"{path} is no model of SD 1.x"
            + (f"; {cause}" if cause else "")
            + (f"; {len(unknown)} unknown keys: {', '.join(unknown[:10])}" if unknown else "")
        )
    return parts


def open_single_file(path: Path, weights: str) -> Model:
    """A single file of the original names: .safetensors, .ckpt; or a UNet's .pt."""
    content, metadata = read_tensors(path)
    parts = split_single_file(path, content)
    described = own_description(path, metadata)
    if not parts["unet"]:
        raise InputError(f"{path} has EMA weights alone, in names without dots, from which no architecture can be told")
    if described:
        config = config_from_dict(UNetConfig, described["unet"])
    else:
        config = infer_unet_config(path, parts["unet"])
    everything = {name: t for part in parts.values() for name, t in part.items()}
    tensors, which = fit_unet(path, config, parts["unet"], everything), "its only weights"
    if parts["ema"]:
        which = "live weights (it has EMA too)"
        if weights == "ema":
            shapes = shapes_of(UNet, config)
            dotless = {ema_name(name)[len("model_ema.") :]: name for name in shapes}
            tensors = fit("UNet's EMA", path, shapes, parts["ema"], dotless)
            which = "EMA weights (it has live ones too)"
    prediction = "v" if metadata.get("modelspec.prediction_type", "").startswith("v") else "epsilon"
    try:
        schedule = NoiseSchedule(**described.get("schedule", {"prediction": prediction}))
    except (TypeError, ValueError) as e:
        raise InputError(f"the metadata 'sd_model' of {path} has no schedule that is known here ({e})") from None

    def load_file_vae():
        return vae_from_tensors(path, parts["vae"], described) if parts["vae"] else load_vae(DEFAULT_VAE)

    def load_file_text_encoder():
        if not parts["text"]:
            return TextEncoder.from_pretrained(DEFAULT_TEXT_ENCODER).requires_grad_(False)
        clip = infer_clip_config(path, parts["text"])
        for key in CLIP_TEXT_SETTINGS:
            setattr(clip, key, described.get("text", {}).get(key, getattr(clip, key)))
        if "tokenizer" in metadata:
            tokenizer = tokenizer_from_text(json.loads(metadata["tokenizer"]))
        else:
            tokenizer = load_tokenizer(DEFAULT_TEXT_ENCODER)
        return clip_from_tensors(path, clip, parts["text"], tokenizer)

    kind = "single file" if parts["vae"] or parts["text"] else "UNet file"
    return Model(
        found=f"{path}: a {kind} of the original names, {which}",
        unet_config=config,
        tensors=lambda: tensors,
        vae=load_file_vae,
        text_encoder=load_file_text_encoder,
        schedule=schedule,
        sampling=described.get("sampling", {}),
        size=described.get("size", 512),
        lineage=json.loads(metadata.get("lineage", "{}")),
    )


# ----------------------------------------------------------------------------------------------------------------
# Writing
# ----------------------------------------------------------------------------------------------------------------

ASTRONAUT = "a photo of an astronaut riding a horse on mars"  # CLIP's tokenizer gives it these ids, no other does
ASTRONAUT_IDS = [49406, 320, 1125, 539, 550, 18376, 6765, 320, 4558, 525, 7496, 49407]


def cast(part: str, tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Contiguous tensors of the dtype. InputError where a finite value does not fit into it."""
    out = {}
    for name, tensor in tensors.items():
        out[name] = tensor.detach().to("cpu", dtype).contiguous()
        if dtype == torch.float16 and not out[name].isfinite().all():
            raise InputError(f"the {part}'s {name} has values beyond fp16's 65504; use --dtype bf16 or fp32")
    return out


def clip_state(encoder: TextEncoder) -> dict[str, torch.Tensor]:
    """A CLIP text encoder's weights under the names that files carry, `text_model.…`. InputError for other models."""
    if encoder.masked:
        kind = encoder.model.config.model_type
        raise InputError(f"the text encoder is a {kind}; other programs know CLIP's alone, so use --format native")
    return {"text_model." + k.removeprefix("text_model."): t for k, t in encoder.model.state_dict().items()}


def tokenizer_files(tokenizer) -> dict[str, str]:
    """{file name: content} of a tokenizer folder; vocab.json and merges.txt too, which older programs want."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {p.name: p.read_text(encoding="utf-8") for p in sorted(Path(folder).iterdir()) if p.is_file()}
    bpe = json.loads(files["tokenizer.json"])["model"]
    if bpe.get("type") != "BPE":
        raise InputError(
            f"a byte-pair tokenizer, as CLIP has, was wanted for other programs to read, found {bpe.get('type')}; "
            "--format native keeps this one"
        )
    pairs = [" ".join(pair) if isinstance(pair, list) else pair for pair in bpe["merges"]]
    files["vocab.json"] = json.dumps(bpe["vocab"], ensure_ascii=False)
    files["merges.txt"] = "\n".join(["#version: 0.2", *pairs, ""])
    return files


def told_lineage(model: Model) -> dict:
    """What an export says of the run it comes from."""
    return {k: model.lineage[k] for k in ("lineage", "images", "step") if k in model.lineage}


def save_ldm(out: Path, model: Model, dtype: torch.dtype, ema: Model | None = None):
    """Write one .safetensors of the original names: UNet, VAE, text encoder; with `ema`, its UNet as model_ema."""
    vae, encoder = (
        model.vae(),
        (ema or model).text_encoder(),
    )  # one of them has room; the EMA's is the one to paint with
    if out.suffix != ".safetensors":
        raise InputError(f"a single file is written as .safetensors, and OUT is {out}")
    if out.exists():
        raise InputError(f"{out} exists already; remove it, or write elsewhere")
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
    described = {
        "unet": asdict(model.unet_config),
        "vae": asdict(vae.config),
        "text": {k: getattr(encoder.model.config, k) for k in CLIP_TEXT_SETTINGS},
        "schedule": model.schedule.config,
        "sampling": model.sampling,
        "size": model.size,
    }
    metadata = {
        "format": "pt",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "stable-diffusion-v1",
        "modelspec.implementation": "https://github.com/CompVis/stable-diffusion",
        "modelspec.title": out.stem,
        "modelspec.date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "modelspec.resolution": f"{model.size}x{model.size}",
        "modelspec.prediction_type": model.schedule.prediction,
        "sd_model": json.dumps(described),
        "lineage": json.dumps(told_lineage(model)),
    }
    if encoder.tokenizer(ASTRONAUT)["input_ids"] != ASTRONAUT_IDS:
        metadata["tokenizer"] = json.dumps(tokenizer_files(encoder.tokenizer))
    tmp = out.with_name(out.name + ".tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        save_tensors(tensors, tmp, metadata)
        with open(tmp, "rb") as f:
            os.fsync(f.fileno())
        os.replace(tmp, out)
    except (OSError, safetensors.SafetensorError) as e:
        tmp.unlink(missing_ok=True)
        raise InputError(f"{out} could not be written ({short(e)})") from None


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


def save_native(out: Path, ema: Model, live: Model):
    """Write a checkpoint folder of this project, to paint with or to start a run from (--init_from); fp32."""
    vae, encoders = ema.vae(), {"text_encoder": live.text_encoder()}
    trained = ema.text_encoder()
    if weights_hash(trained) != weights_hash(encoders["text_encoder"]):
        encoders["text_encoder_ema"] = trained
    with new_folder(out) as tmp:
        for name, model in (("unet", live), ("unet_ema", ema)):
            save_tensors(cast("UNet", model.tensors(), torch.float32), tmp / f"{name}.safetensors")
        for name, encoder in encoders.items():
            encoder.save(tmp / name)
        save_vae(vae, tmp / "vae")
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
        (tmp / "model.json").write_text(json.dumps(values, indent=1))
        (tmp / "state.json").write_text(json.dumps(told_lineage(ema), indent=1))
        digests = {}
        for file in sorted(p for p in tmp.rglob("*") if p.is_file()):
            with open(file, "rb") as f:
                digests[str(file.relative_to(tmp))] = hashlib.file_digest(f, "sha256").hexdigest()
        (tmp / "manifest.json").write_text(json.dumps(digests, indent=1))


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "source", metavar="IN", help="a checkpoint or run folder, a single file, a diffusers folder or a hub name"
    )
    p.add_argument("out", metavar="OUT", help="a new .safetensors (ldm) or a new folder (diffusers, native)")
    p.add_argument("--format", required=True, choices=["ldm", "diffusers", "native"])
    p.add_argument("--weights", choices=["ema", "live", "both"], help="default: both for native, else ema")
    p.add_argument("--dtype", choices=list(DTYPES), help="default: fp16 for ldm, fp32 for folders")
    p.add_argument("--vae", help="take the VAE from here instead")
    p.add_argument("--text_encoder", help="take the text encoder from here instead: a transformers folder or hub name")
    args = p.parse_args(argv)
    weights = args.weights or ("both" if args.format == "native" else "ema")
    dtype = DTYPES[args.dtype or ("fp16" if args.format == "ldm" else "fp32")]
    if args.format == "native" and dtype != torch.float32:
        raise InputError(f"--format native is fp32, and --dtype is {args.dtype}")

    def opened(which: str) -> Model:
        model = open_model(args.source, which)
        if args.vae is not None:
            model.vae = lambda: load_vae(args.vae)
        if args.text_encoder is not None:
            model.text_encoder = lambda: TextEncoder.from_pretrained(args.text_encoder)
        print(model.found)
        return model

    out = Path(args.out)
    ema = opened("ema") if weights != "live" else None
    live = opened("live") if weights != "ema" else None
    if args.format == "native":
        save_native(out, ema or live, live or ema)
    elif args.format == "diffusers":
        save_diffusers(out, ema or live, dtype, live if ema else None)
    elif weights == "both":
        save_ldm(out, live, dtype, ema)
    else:
        save_ldm(out, ema or live, dtype)
    size = sum(f.stat().st_size for f in out.rglob("*")) if out.is_dir() else out.stat().st_size
    print(f"{out}: {size / 1e6:,.1f} MB, {args.format}, {weights} weights, {dtype}")


if __name__ == "__main__":
    run_cli(main)
