"""One table of names: this project's, which are the original's, and those of the diffusers library."""

import functools

import torch

from SD_Model import VAE, UNet, UNetConfig, VAEConfig

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


WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module"}  # segments that DDP, compile and FSDP put into names


def squeezed(shape) -> tuple[int, ...]:
    """A 1x1 conv's shape as a linear layer's; others unchanged."""
    return tuple(shape[:2]) if tuple(shape[2:]) == (1, 1) else tuple(shape)
