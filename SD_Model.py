"""Stable Diffusion 1.x in one file: the network and its mathematics.

    python SD_Model.py            # a table of every preset's parts and parameters

Contents, in reading order: presets, UNet, VAE, text encoder, noise schedule, the DDPM and DDIM samplers.
Parameter names of UNet and VAE are those of the original latent-diffusion checkpoints, so a single-file
checkpoint is these modules' state dict after its prefix is removed. This file imports no other file of the project.

Papers: DDPM (Ho et al. 2020, arXiv:2006.11239), DDIM (Song et al. 2021, arXiv:2010.02502), latent diffusion
(Rombach et al. 2022, arXiv:2112.10752), v-prediction (Salimans & Ho 2022, arXiv:2202.00512), Min-SNR (Hang et al.
2023, arXiv:2303.09556), zero terminal SNR (Lin et al. 2023, arXiv:2305.08891).
"""

import hashlib
import math
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class InputError(ValueError):
    """The user's mistake, in one sentence: what was wanted, what was found, what to do."""


# ----------------------------------------------------------------------------------------------------------------
# Presets: what a network is. How it is trained stands in SD_Train.PHASES.
# ----------------------------------------------------------------------------------------------------------------


def check_kinds(config) -> None:
    """InputError unless each value is of its default's kind, a number neither negative nor too large for a network."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(f.default, tuple):
            kind, values, wanted = type(f.default[0]), value if isinstance(value, tuple) else None, "a list of "
        else:
            kind, values, wanted = type(f.default), (value,), ""
        kinds = (int, float) if kind is float else (kind,)
        if not values or not all(type(v) in kinds and 0 <= v < 1 << 20 for v in values):
            raise InputError(f"{type(config).__name__} wants {wanted}{kind.__name__} for {f.name}, found {value!r}")
        if kind is not bool and min(values) == 0 and f.name not in ("num_res_blocks", "dropout"):
            raise InputError(f"{type(config).__name__} wants {f.name} above 0, found {value!r}")


@dataclass(frozen=True)
class UNetConfig:
    """Architecture of a UNet. Level i works at 1/2^i of the latent's size. InputError for values of another kind."""

    channels: tuple[int, ...] = (320, 640, 1280, 1280)  # width of each level
    attention: tuple[bool, ...] = (True, True, True, False)  # transformers at this level? (the middle always has one)
    num_res_blocks: int = 2  # residual blocks a level on the way down; one more on the way up
    num_heads: int = 8  # attention heads at every level; head width = channels / heads
    context_dim: int = 768  # width of the text encoder's output
    norm_groups: int = 32  # groups of every GroupNorm
    in_channels: int = 4  # latent channels in and out
    out_channels: int = 4
    dropout: float = 0.0  # inside residual blocks

    def __post_init__(self):
        check_kinds(self)


@dataclass(frozen=True)
class VAEConfig:
    """Architecture of an autoencoder. It shrinks height and width by factor = patch * 2^(levels - 1). InputError for
    values of another kind."""

    channels: tuple[int, ...] = (128, 256, 512, 512)  # width of each level
    num_res_blocks: int = 2  # residual blocks a level in the encoder; one more in the decoder
    latent_channels: int = 4
    norm_groups: int = 32
    mid_attention: bool = True  # self-attention at the lowest resolution
    patch: int = 1  # space-to-depth stem: patch x patch pixels become channels before the first conv (1: none)
    scaling_factor: float = 0.18215  # latents are multiplied by it, so that their standard deviation is about 1

    def __post_init__(self):
        check_kinds(self)

    @property
    def factor(self) -> int:
        return self.patch * 2 ** (len(self.channels) - 1)


def config_from_dict(cls, values: dict):
    """A UNetConfig or VAEConfig from JSON values. Unknown or missing names, and values of another kind, raise
    InputError."""
    if not isinstance(values, dict):
        raise InputError(f"{cls.__name__} wants an object of names and values, found {values!r}")
    known = {f.name for f in fields(cls)}
    if set(values) != known:
        raise InputError(f"{cls.__name__} wants exactly {sorted(known)}, found {sorted(values)}")
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


PRESETS = {
    # The original network: 859,520,964 + 83,653,863 parameters, text from CLIP ViT-L/14 (123,060,480).
    "sd15": dict(unet=UNetConfig(), vae=VAEConfig(), text=None),
    # Tens of millions: one GPU, minutes to hours; small pictures (128 to 256 px).
    "small": dict(
        unet=UNetConfig(channels=(128, 256, 384, 512), context_dim=384),
        vae=VAEConfig(channels=(64, 128, 256), norm_groups=16, mid_attention=False, patch=2, scaling_factor=1.0),
        text=dict(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6),
    ),
    # Trains on two CPU cores in minutes: 64 px pictures, 8 x 8 latents.
    "tiny": dict(
        unet=UNetConfig(
            channels=(32, 64), attention=(False, True), num_res_blocks=1, num_heads=2, context_dim=64, norm_groups=8
        ),
        vae=VAEConfig(
            channels=(32, 64), num_res_blocks=1, norm_groups=8, mid_attention=False, patch=4, scaling_factor=1.0
        ),
        text=dict(hidden_size=64, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4),
    ),
}

# ----------------------------------------------------------------------------------------------------------------
# UNet
# ----------------------------------------------------------------------------------------------------------------


def timestep_embedding(t: torch.Tensor, dim: int, max_period: float = 10000.0) -> torch.Tensor:
    """Sinusoidal embedding (Vaswani et al. 2017), cosines first. t [B], fractions allowed -> fp32 [B, dim]."""
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    args = t.float()[:, None] * freqs[None]  # [B, dim/2]
    return torch.cat([args.cos(), args.sin()], dim=-1)  # [B, dim]


class ResBlock(nn.Module):
    """GroupNorm, SiLU, conv; plus the time embedding; GroupNorm, SiLU, conv; plus the input."""

    def __init__(self, in_ch: int, out_ch: int, emb_dim: int, groups: int, dropout: float):
        super().__init__()
        self.in_layers = nn.Sequential(nn.GroupNorm(groups, in_ch), nn.SiLU(), nn.Conv2d(in_ch, out_ch, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb_dim, out_ch))
        self.out_layers = nn.Sequential(
            nn.GroupNorm(groups, out_ch), nn.SiLU(), nn.Dropout(dropout), nn.Conv2d(out_ch, out_ch, 3, padding=1)
        )
        self.skip_connection = nn.Identity() if in_ch == out_ch else nn.Conv2d(in_ch, out_ch, 1)
        self.grad_checkpoint = False

    def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
        if self.grad_checkpoint and torch.is_grad_enabled():
            return checkpoint(self._forward, x, emb, use_reentrant=False)
        return self._forward(x, emb)

    def _forward(self, x, emb):
        h = self.in_layers(x)  # [B, out_ch, H, W]
        h = h + self.emb_layers(emb)[:, :, None, None]
        h = self.out_layers(h)
        return self.skip_connection(x) + h


class CrossAttention(nn.Module):
    """Multi-head attention, scale head_dim^-0.5. Without a context it attends to itself."""

    def __init__(self, dim: int, context_dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(context_dim, dim, bias=False)
        self.to_v = nn.Linear(context_dim, dim, bias=False)
        self.to_out = nn.Sequential(nn.Linear(dim, dim), nn.Dropout(0.0))

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)  # [B, N, C], [B, M, C], [B, M, C]
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in (q, k, v))  # [B, heads, N or M, C/heads]
        out = F.scaled_dot_product_attention(q, k, v)  # [B, heads, N, C/heads]
        return self.to_out(out.transpose(1, 2).flatten(2))  # [B, N, C]


class GEGLU(nn.Module):
    """Linear to twice the width; value half times erf-GELU of the gate half (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.proj = nn.Linear(dim, 2 * inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, gate = self.proj(x).chunk(2, dim=-1)
        return value * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.net = nn.Sequential(GEGLU(dim, 4 * dim), nn.Dropout(0.0), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class TransformerBlock(nn.Module):
    """Self-attention, cross-attention to the text, feed-forward; each behind a LayerNorm and a residual."""

    def __init__(self, dim: int, context_dim: int, heads: int):
        super().__init__()
        self.attn1 = CrossAttention(dim, dim, heads)
        self.ff = FeedForward(dim)
        self.attn2 = CrossAttention(dim, context_dim, heads)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff(self.norm3(x))


class SpatialTransformer(nn.Module):
    """A transformer block over the pixels of a feature map, between two 1x1 convs, with a residual."""

    def __init__(self, channels: int, context_dim: int, heads: int, groups: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.proj_in = nn.Conv2d(channels, channels, 1)
        self.transformer_blocks = nn.ModuleList([TransformerBlock(channels, context_dim, heads)])
        self.proj_out = nn.Conv2d(channels, channels, 1)
        self.grad_checkpoint = False

    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        if self.grad_checkpoint and torch.is_grad_enabled():
            return checkpoint(self._forward, x, context, use_reentrant=False)
        return self._forward(x, context)

    def _forward(self, x, context):
        B, C, H, W = x.shape
        h = self.proj_in(self.norm(x))
        h = h.permute(0, 2, 3, 1).reshape(B, H * W, C)  # [B, HW, C]; no copy where memory is channels_last
        for block in self.transformer_blocks:
            h = block(h, context)
        h = h.reshape(B, H, W, C).permute(0, 3, 1, 2)  # [B, C, H, W]
        return x + self.proj_out(h)


class Downsample(nn.Module):
    """Strided conv padded by 1 on all sides: [B, C, H, W] -> [B, C, ceil(H/2), ceil(W/2)]."""

    def __init__(self, channels: int):
        super().__init__()
        self.op = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.op(x)


class Upsample(nn.Module):
    """Nearest-neighbour to the given size (the next skip's, so that odd sizes work), then a conv."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor, size) -> torch.Tensor:
        return self.conv(F.interpolate(x, size=size, mode="nearest"))


class UNet(nn.Module):
    """The denoiser of Stable Diffusion 1.x.

    Args:
        config: the architecture.
        zero_init: which layers start at zero. 'all': second conv of each residual block, attention output
            projections, feed-forward output, transformer proj_out, output conv. 'original': second conv, proj_out and
            output conv, as in the original code. 'none': PyTorch's defaults everywhere.
    """

    def __init__(self, config: UNetConfig = UNetConfig(), zero_init: str = "all"):
        super().__init__()
        if len(config.channels) != len(config.attention):
            raise ValueError(f"channels {config.channels} and attention {config.attention} differ in length")
        if zero_init not in ("all", "original", "none"):
            raise ValueError(f"zero_init wants all, original or none, found {zero_init!r}")
        self.config = config
        c, groups, last = config.channels, config.norm_groups, len(config.channels) - 1
        emb_dim = 4 * c[0]

        def res(in_ch, out_ch):
            return ResBlock(in_ch, out_ch, emb_dim, groups, config.dropout)

        def attn(ch):
            return SpatialTransformer(ch, config.context_dim, config.num_heads, groups)

        self.time_embed = nn.Sequential(nn.Linear(c[0], emb_dim), nn.SiLU(), nn.Linear(emb_dim, emb_dim))

        blocks = [[nn.Conv2d(config.in_channels, c[0], 3, padding=1)]]
        skips, ch = [c[0]], c[0]
        for level, width in enumerate(c):
            for _ in range(config.num_res_blocks):
                blocks.append([res(ch, width)] + ([attn(width)] if config.attention[level] else []))
                ch = width
                skips.append(ch)
            if level != last:
                blocks.append([Downsample(ch)])
                skips.append(ch)
        self.input_blocks = nn.ModuleList(nn.ModuleList(b) for b in blocks)

        self.middle_block = nn.ModuleList([res(ch, ch), attn(ch), res(ch, ch)])

        blocks = []
        for level in reversed(range(len(c))):
            for i in range(config.num_res_blocks + 1):
                layers = [res(ch + skips.pop(), c[level])]
                ch = c[level]
                if config.attention[level]:
                    layers.append(attn(ch))
                if level and i == config.num_res_blocks:
                    layers.append(Upsample(ch))
                blocks.append(layers)
        self.output_blocks = nn.ModuleList(nn.ModuleList(b) for b in blocks)
        self.out = nn.Sequential(nn.GroupNorm(groups, ch), nn.SiLU(), nn.Conv2d(ch, config.out_channels, 3, padding=1))
        self._zero_init(zero_init)

    def _zero_init(self, which: str):
        if which == "none":
            return
        layers = [self.out[2]]
        for m in self.modules():
            if isinstance(m, ResBlock):
                layers.append(m.out_layers[3])
            elif isinstance(m, SpatialTransformer):
                layers.append(m.proj_out)
            elif which == "all" and isinstance(m, CrossAttention):
                layers.append(m.to_out[0])
            elif which == "all" and isinstance(m, FeedForward):
                layers.append(m.net[2])
        for layer in layers:
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def set_grad_checkpoint(self, which: str):
        """Recompute in the backward pass (non-reentrant), instead of keeping the activations: those of residual blocks
        ('resblocks'), of residual and transformer blocks ('all'), or nothing ('none')."""
        if which not in ("none", "resblocks", "all"):
            raise ValueError(f"grad_checkpoint wants none, resblocks or all, found {which!r}")
        for m in self.modules():
            if isinstance(m, ResBlock | SpatialTransformer):
                m.grad_checkpoint = which == "all" or (which == "resblocks" and isinstance(m, ResBlock))

    def forward(self, latents: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Predict the noise (or v) in noisy latents.

        Args:
            latents: [B, in_channels, H, W], unit-variance latents with noise; any H and W from 1 up.
            timesteps: [B], 0..999, integers or fractions.
            context: [B, T, context_dim], the text encoder's last hidden state.
        Returns: [B, out_channels, H, W].
        """
        emb = self.time_embed(timestep_embedding(timesteps, self.config.channels[0]).to(latents.dtype))  # [B, 4c]
        h, skips = latents, []
        for layers in self.input_blocks:
            h = self._run(layers, h, emb, context)  # [B, c_level, H/2^level, W/2^level], halves rounded up
            skips.append(h)
        h = self._run(self.middle_block, h, emb, context)
        for layers in self.output_blocks:
            h = torch.cat([h, skips.pop()], dim=1)  # [B, c + c_skip, ...]
            h = self._run(layers, h, emb, context, size=skips[-1].shape[-2:] if skips else None)
        return self.out(h)

    @staticmethod
    def _run(layers, h, emb, context, size=None):
        for layer in layers:
            if isinstance(layer, ResBlock):
                h = layer(h, emb)
            elif isinstance(layer, SpatialTransformer):
                h = layer(h, context)
            elif isinstance(layer, Upsample):
                h = layer(h, size)  # doubles height and width, up to the skip's odd size
            else:
                h = layer(h)
        return h


# ----------------------------------------------------------------------------------------------------------------
# VAE
# ----------------------------------------------------------------------------------------------------------------


class VAEResBlock(nn.Module):
    def __init__(self, in_ch: int, out_ch: int, groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, in_ch, eps=1e-6)
        self.conv1 = nn.Conv2d(in_ch, out_ch, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, out_ch, eps=1e-6)
        self.conv2 = nn.Conv2d(out_ch, out_ch, 3, padding=1)
        self.nin_shortcut = nn.Identity() if in_ch == out_ch else nn.Conv2d(in_ch, out_ch, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.nin_shortcut(x) + h


class VAEAttention(nn.Module):
    """Single-head self-attention over all pixels; q, k, v and proj_out are 1x1 convs as in the original files."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        q, k, v = (f(h).flatten(2).transpose(1, 2)[:, None] for f in (self.q, self.k, self.v))  # [B, 1, HW, C]
        h = F.scaled_dot_product_attention(q, k, v)[:, 0]  # [B, HW, C]
        return x + self.proj_out(h.transpose(1, 2).reshape(x.shape))


class VAEMid(nn.Module):
    def __init__(self, channels: int, groups: int, attention: bool):
        super().__init__()
        self.block_1 = VAEResBlock(channels, channels, groups)
        self.attn_1 = VAEAttention(channels, groups) if attention else nn.Identity()
        self.block_2 = VAEResBlock(channels, channels, groups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block_2(self.attn_1(self.block_1(x)))


class VAEDownsample(nn.Module):
    """Strided conv padded on the right and bottom only."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))  # [B, C, H/2, W/2]


class VAEUpsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))  # [B, C, 2H, 2W]


class VAEEncoder(nn.Module):
    def __init__(self, config: VAEConfig):
        super().__init__()
        c, groups, self.patch = config.channels, config.norm_groups, config.patch
        self.conv_in = nn.Conv2d(3 * config.patch**2, c[0], 3, padding=1)
        self.down = nn.ModuleList()
        ch = c[0]
        for level, width in enumerate(c):
            stage = nn.Module()
            stage.block = nn.ModuleList()
            for _ in range(config.num_res_blocks):
                stage.block.append(VAEResBlock(ch, width, groups))
                ch = width
            if level != len(c) - 1:
                stage.downsample = VAEDownsample(ch)
            self.down.append(stage)
        self.mid = VAEMid(ch, groups, config.mid_attention)
        self.norm_out = nn.GroupNorm(groups, ch, eps=1e-6)
        self.conv_out = nn.Conv2d(ch, 2 * config.latent_channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.conv_in(F.pixel_unshuffle(x, self.patch) if self.patch > 1 else x)  # [B, c0, H/patch, W/patch]
        for stage in self.down:
            for block in stage.block:
                h = block(h)
            if hasattr(stage, "downsample"):
                h = stage.downsample(h)
        return self.conv_out(F.silu(self.norm_out(self.mid(h))))  # [B, 2z, H/factor, W/factor]


class VAEDecoder(nn.Module):
    def __init__(self, config: VAEConfig):
        super().__init__()
        c, groups, self.patch = config.channels, config.norm_groups, config.patch
        ch = c[-1]
        self.conv_in = nn.Conv2d(config.latent_channels, ch, 3, padding=1)
        self.mid = VAEMid(ch, groups, config.mid_attention)
        stages = []
        for level in reversed(range(len(c))):
            stage = nn.Module()
            stage.block = nn.ModuleList()
            for _ in range(config.num_res_blocks + 1):
                stage.block.append(VAEResBlock(ch, c[level], groups))
                ch = c[level]
            if level:
                stage.upsample = VAEUpsample(ch)
            stages.append(stage)
        self.up = nn.ModuleList(reversed(stages))  # up.0 is the highest resolution, and runs last
        self.norm_out = nn.GroupNorm(groups, ch, eps=1e-6)
        self.conv_out = nn.Conv2d(ch, 3 * config.patch**2, 3, padding=1)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        h = self.mid(self.conv_in(z))  # [B, c_last, h, w]
        for stage in reversed(self.up):
            for block in stage.block:
                h = block(h)
            if hasattr(stage, "upsample"):
                h = stage.upsample(h)
        h = self.conv_out(F.silu(self.norm_out(h)))  # [B, 3 patch^2, H/patch, W/patch]
        return F.pixel_shuffle(h, self.patch) if self.patch > 1 else h  # [B, 3, H, W]


class VAE(nn.Module):
    """The autoencoder between pictures and latents. Scaling of latents happens here and nowhere else."""

    def __init__(self, config: VAEConfig = VAEConfig()):
        super().__init__()
        self.config = config
        z = config.latent_channels
        self.encoder = VAEEncoder(config)
        self.decoder = VAEDecoder(config)
        self.quant_conv = nn.Conv2d(2 * z, 2 * z, 1)
        self.post_quant_conv = nn.Conv2d(z, z, 1)

    def without_encoder(self) -> "VAE":
        """Leaves out what only pictures go through: decode() alone is left. Returns itself."""
        self.encoder = self.quant_conv = None
        return self

    def check_whole(self):
        """InputError for a VAE without an encoder."""
        if self.encoder is None:
            raise InputError("this VAE has no encoder, as --decoder_only leaves it: give a whole one with --vae")

    def moments(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Posterior of images [B, 3, H, W] in -1..1, H and W multiples of the factor (ValueError otherwise).

        Returns mean and log-variance, each [B, z, H/factor, W/factor], unscaled; log-variance within -30..20.
        """
        self.check_whole()
        f = self.config.factor
        if images.shape[-2] % f or images.shape[-1] % f:
            raise ValueError(f"the VAE wants height and width in multiples of {f}, found {tuple(images.shape[-2:])}")
        mean, logvar = self.quant_conv(self.encoder(images)).chunk(2, dim=1)
        return mean, logvar.clamp(-30.0, 20.0)

    def encode(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, H, W] in -1..1 -> scaled latents [B, z, H/factor, W/factor], the posterior's mean."""
        return self.moments(images)[0] * self.config.scaling_factor

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Scaled latents [B, z, h, w] -> images [B, 3, factor h, factor w], about -1..1 (not clamped)."""
        return self.decoder(self.post_quant_conv(latents / self.config.scaling_factor))


# ----------------------------------------------------------------------------------------------------------------
# Text encoder
# ----------------------------------------------------------------------------------------------------------------


class TextEncoder(nn.Module):
    """Token ids to the context the UNet attends to: a thin wrapper of a transformers model and its tokenizer.

    CLIP's text model gives its last hidden state after the final norm, without a mask for padding, as SD 1.x wants.
    Other models that AutoModel loads get the padding mask they were trained with. Nothing is dropped out, in train()
    either: dropout would draw from a generator that all samples share.
    """

    MAX_LENGTH = 77  # tokens a text; a tokenizer may ask for fewer

    def __init__(self, model: nn.Module, tokenizer):
        super().__init__()
        self.model, self.tokenizer = model, tokenizer
        asked = tokenizer.model_max_length
        ends = tokenizer.eos_token_id, tokenizer.sep_token_id  # CLIP's and BERT's
        if tokenizer.pad_token_id is None or ends == (None, None):
            raise InputError("a tokenizer wants tokens for a text's end and for padding, and has none")
        if type(asked) not in (int, float) or not asked >= 3:  # start, a token, end
            raise InputError(f"a tokenizer wants a model_max_length of at least 3, found {asked!r}")
        self.max_length = int(min(self.MAX_LENGTH, asked))
        self.null_tokens = ()  # of guide_from_zeros
        self.masked = model.config.model_type not in ("clip", "clip_text_model")
        takes = hasattr(
            sys.modules[type(model).__module__], "create_bidirectional_mask"
        )  # a mask of four axes as it is
        self.whole_mask = takes and model.config._attn_implementation == "sdpa"
        for part in (model.config, *model.modules()):  # the settings too, which are saved and build the model again
            rates = ["p"] if isinstance(part, nn.modules.dropout._DropoutNd) else [n for n in vars(part) if "drop" in n]
            for name in rates:
                if isinstance(getattr(part, name), float):
                    setattr(part, name, 0.0)

    @property
    def context_dim(self) -> int:
        return self.model.config.hidden_size

    @classmethod
    def from_pretrained(cls, name: str = "openai/clip-vit-large-patch14") -> "TextEncoder":
        """Load model and tokenizer from a hub name or a local folder; InputError if it cannot."""
        from transformers import AutoConfig, AutoModel, AutoTokenizer, CLIPTextModel
        from transformers.utils import logging

        loud = logging.get_verbosity()
        logging.set_verbosity_error()  # no table of weights that are not there: it is judged below
        try:
            is_clip = AutoConfig.from_pretrained(name).model_type in ("clip", "clip_text_model")
            loader = CLIPTextModel if is_clip else AutoModel
            model, info = loader.from_pretrained(name, output_loading_info=True, dtype=torch.float32)
            tokenizer = AutoTokenizer.from_pretrained(name)
        except Exception as e:  # absent, offline, damaged: libraries' classes of errors are many, and change
            reason = str(e).strip().splitlines()[0][:300] if str(e).strip() else type(e).__name__
            raise InputError(
                f"a text encoder was wanted at {name!r}, a local folder or a hub name, and could not be loaded "
                f"({reason}); give a folder with --text_encoder, or run once with a network"
            ) from None
        finally:
            logging.set_verbosity(loud)
        missing = [k for k in info["missing_keys"] if not k.endswith("position_ids")]
        headless = any(k.startswith("pooler.") for k in missing)  # as without_head leaves it
        missing = [k for k in missing if not k.startswith("pooler.")]
        mismatched = list(info.get("mismatched_keys") or [])
        if missing or mismatched:
            raise InputError(f"the text encoder at {name!r} lacks weights: {(missing + mismatched)[:10]}")
        encoder = cls(model.eval(), tokenizer)
        return encoder.without_head() if headless else encoder

    @classmethod
    def new(cls, config: dict, tokenizer) -> "TextEncoder":
        """A CLIP text model with fresh weights, sized by config (CLIPTextConfig's names), for this tokenizer."""
        from transformers import CLIPTextConfig, CLIPTextModel

        model = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(tokenizer),
                max_position_embeddings=min(cls.MAX_LENGTH, tokenizer.model_max_length),
                bos_token_id=tokenizer.bos_token_id,
                eos_token_id=tokenizer.eos_token_id,
                pad_token_id=tokenizer.pad_token_id,
                **config,
            )
        )
        # Words start far apart (CLIP's own 0.02 would let the random layers drown them), so that they combine freely.
        nn.init.normal_(model.get_input_embeddings().weight, std=1.0)
        return cls(model.eval(), tokenizer)

    def shorten(self, length: int) -> "TextEncoder":
        """Texts are of `length` ids from here on; the tokenizer, which is saved, says so too. Returns itself.
        InputError if the model takes fewer."""
        most = min(self.max_length, getattr(self.model.config, "max_position_embeddings", None) or self.max_length)
        if not 3 <= length <= most:  # start, a token, end
            raise InputError(f"texts of {length} ids were wanted, and this text encoder takes 3 to {most}")
        self.max_length = self.tokenizer.model_max_length = length
        return self

    def guide_from_zeros(self) -> "TextEncoder":
        """The context of "" is zeros from here on: of ids that are start, end and padding alone. Returns itself."""
        self.null_tokens = tuple(self.tokenize([""]).unique().tolist())
        return self

    def without_head(self) -> "TextEncoder":
        """Drops what BERT and its kin have behind the last hidden state (their pooler): no loss would train it. Returns
        itself. A frozen encoder keeps its head, so that its weights' hash stays."""
        if getattr(self.model, "pooler", None) is not None:
            self.model.pooler = None  # its name stays, so that state dicts of older checkpoints load, head and all
        return self

    def save(self, folder: str, state: dict[str, torch.Tensor] | None = None):
        """Write model (with `state`, these weights) and tokenizer as transformers does; from_pretrained reads them."""
        self.model.save_pretrained(folder, state_dict=state)
        self.tokenizer.save_pretrained(folder)
        mode = (Path(folder) / "config.json").stat().st_mode  # as the umask has it; safetensors' own is 0600
        for file in Path(folder).glob("*.safetensors"):
            file.chmod(mode)

    def tokenize(self, texts: list[str]) -> torch.Tensor:
        """Texts -> int64 [B, max_length]: start, tokens (cut to fit), end, padding."""
        ids = self.tokenizer(texts, padding="max_length", truncation=True, max_length=self.max_length)["input_ids"]
        return torch.tensor(ids, dtype=torch.long)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [B, T] -> last hidden state [B, T, context_dim]."""
        mask = None
        if self.masked:
            mask = ids != self.tokenizer.pad_token_id  # [B, T]
            if self.whole_mask:  # of one with two axes the model would wait to learn whether it hides anything
                mask = mask[:, None, None].expand(-1, -1, ids.shape[1], -1)  # [B, 1, T, T]
            else:
                mask = mask.long()
        states = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        if self.null_tokens:
            empty = torch.stack([ids == token for token in self.null_tokens]).any(dim=0).all(dim=1)  # [B]
            states = states.masked_fill(empty[:, None, None], 0.0)
        return states

    def encode(self, texts: list[str]) -> torch.Tensor:
        """Texts -> context [B, max_length, context_dim] on the model's device. "" is the null condition."""
        return self(self.tokenize(texts).to(self.model.device))


# ----------------------------------------------------------------------------------------------------------------
# Noise schedule
# ----------------------------------------------------------------------------------------------------------------


class NoiseSchedule:
    """q(x_t | x_0) = N(sqrt(abar_t) x_0, (1 - abar_t) I) and what training derives from it (DDPM, eq. 4).

    Args:
        betas: 'scaled_linear' (SD 1.x: linear in sqrt(beta)), 'linear' (DDPM), or 'squaredcos_cap_v2' (cosine, Nichol
            & Dhariwal 2021, eq. 17, beta capped at 0.999).
        beta_start, beta_end: the ends of the first two.
        steps: T, the number of timesteps.
        prediction: what the network predicts, 'epsilon' or 'v'.
        zero_terminal_snr: shift and scale sqrt(abar) so that abar_{T-1} = 0 (Lin et al. 2023, algorithm 1). It wants
            prediction 'v', since epsilon says nothing of x_0 where abar = 0.

    abar is kept in fp64 on the CPU; per-timestep tables go to the device of the data in fp32.
    """

    def __init__(
        self,
        betas: str = "scaled_linear",
        beta_start: float = 0.00085,
        beta_end: float = 0.012,
        steps: int = 1000,
        prediction: str = "epsilon",
        zero_terminal_snr: bool = False,
    ):
        if prediction not in ("epsilon", "v"):
            raise ValueError(f"prediction wants epsilon or v, found {prediction!r}")
        if zero_terminal_snr and prediction != "v":
            raise ValueError("zero_terminal_snr wants prediction v: at abar = 0 epsilon carries nothing of the picture")
        f64 = torch.float64
        if betas == "scaled_linear":
            beta = torch.linspace(beta_start**0.5, beta_end**0.5, steps, dtype=f64) ** 2
        elif betas == "linear":
            beta = torch.linspace(beta_start, beta_end, steps, dtype=f64)
        elif betas == "squaredcos_cap_v2":
            bar = torch.cos((torch.arange(steps + 1, dtype=f64) / steps + 0.008) / 1.008 * math.pi / 2) ** 2
            beta = (1 - bar[1:] / bar[:-1]).clamp(max=0.999)
        else:
            raise ValueError(f"betas wants scaled_linear, linear or squaredcos_cap_v2, found {betas!r}")
        abar = torch.cumprod(1 - beta, dim=0)
        if zero_terminal_snr:
            root = abar.sqrt()
            root = (root - root[-1]) * root[0] / (root[0] - root[-1])  # last to 0, first kept
            abar = root**2
        self.config = dict(
            betas=betas, beta_start=beta_start, beta_end=beta_end, steps=steps, prediction=prediction,
            zero_terminal_snr=zero_terminal_snr,
        )  # fmt: skip
        self.steps, self.prediction = steps, prediction
        self.alphas_cumprod = abar  # fp64 [T]
        self._tables = {}

    def _at(self, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """sqrt(abar_t) and sqrt(1 - abar_t), fp32 [B, 1, 1, 1] on t's device."""
        if t.device not in self._tables:
            abar = self.alphas_cumprod
            self._tables[t.device] = torch.stack([abar.sqrt(), (1 - abar).sqrt()]).float().to(t.device)
        a, s = self._tables[t.device][:, t.long()]
        return a[:, None, None, None], s[:, None, None, None]

    def add_noise(self, x0: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """x_t = sqrt(abar_t) x_0 + sqrt(1 - abar_t) eps (DDPM, eq. 4). x0, noise [B, C, H, W]; t [B] integers."""
        a, s = self._at(t)
        return a * x0 + s * noise

    def target(self, x0: torch.Tensor, noise: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """What the network should output: eps, or v = sqrt(abar) eps - sqrt(1 - abar) x_0 (Salimans & Ho, app. D)."""
        if self.prediction == "epsilon":
            return noise
        a, s = self._at(t)
        return a * noise - s * x0

    def snr(self, t: torch.Tensor) -> torch.Tensor:
        """Signal-to-noise ratio abar / (1 - abar) at integer timesteps, fp32 [B] on t's device."""
        a, s = self._at(t)
        return (a / s).square().flatten()

    def min_snr_weight(self, t: torch.Tensor, gamma: float) -> torch.Tensor:
        """Min-SNR loss weight (Hang et al., eq. 8): min(SNR, gamma)/SNR for epsilon, /(SNR + 1) for v. fp32 [B]."""
        snr = self.snr(t)
        if self.prediction == "epsilon":
            return (gamma / snr).clamp(max=1.0)  # the same, and 1 rather than 0/0 at SNR = 0
        return snr.clamp(max=gamma) / (snr + 1)

    def x0_and_eps(self, pred: torch.Tensor, x: torch.Tensor, abar: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Split x_t into its clean and noise parts, given the network's prediction and the scalar abar_t."""
        a, s = math.sqrt(abar), math.sqrt(1 - abar)
        if self.prediction == "epsilon":
            return (x - s * pred) / a, pred
        return a * x - s * pred, a * pred + s * x


# ----------------------------------------------------------------------------------------------------------------
# Samplers
# ----------------------------------------------------------------------------------------------------------------


def sampling_timesteps(steps: int, spacing: str = "leading", offset: int = 0, total: int = 1000) -> list[int]:
    """Exactly `steps` distinct timesteps within 0..total-1, falling (Lin et al. 2023, table 2).

    'leading': multiples of total // steps plus the offset (SD 1.x, offset 1; smaller where it would leave the range).
    'trailing': from total - 1 down in strides of total / steps. 'linspace': from total - 1 to 0, both included.
    """
    if not 1 <= steps <= total:
        raise ValueError(f"sampling wants 1 to {total} steps, found {steps}")
    i = np.arange(steps)
    if spacing == "leading":
        ratio = total // steps
        t = i[::-1] * ratio
        t = t + min(offset, total - 1 - t[0])
    elif spacing == "trailing":
        t = np.round(np.arange(total, 0, -total / steps)[:steps]) - 1  # arange's own rounding: one too many at times
    elif spacing == "linspace":
        t = np.round(np.linspace(0, total - 1, steps))[::-1] if steps > 1 else i + total - 1  # one step: from noise
    else:
        raise ValueError(f"timestep spacing wants leading, trailing or linspace, found {spacing!r}")
    return [int(v) for v in t]


class DDPM:
    """Ancestral sampling over any list of timesteps (Ho et al., algorithm 2; posterior of eqs. 6 and 7).

    Between neighbours of the list beta = 1 - abar_t / abar_prev. The last step goes to abar = 1 and adds no noise.
    Latents are never clamped.
    """

    def __init__(self, schedule: NoiseSchedule, spacing: str = "leading", offset: int = 0):
        self.schedule, self.spacing, self.offset = schedule, spacing, offset

    def timesteps(self, steps: int) -> list[int]:
        return sampling_timesteps(steps, self.spacing, self.offset, self.schedule.steps)

    def step(self, x: torch.Tensor, pred: torch.Tensor, t: int, t_prev: int | None, noise=None) -> torch.Tensor:
        """From timestep t to t_prev (None: the end). x, pred, noise [B, C, H, W]; noise is unused at the end."""
        abar = float(self.schedule.alphas_cumprod[t])
        prev = 1.0 if t_prev is None else float(self.schedule.alphas_cumprod[t_prev])
        beta = 1 - abar / prev
        x0, _ = self.schedule.x0_and_eps(pred, x, abar)
        mean = math.sqrt(prev) * beta / (1 - abar) * x0 + math.sqrt(1 - beta) * (1 - prev) / (1 - abar) * x  # eq. 7
        if t_prev is None:
            return mean
        return mean + math.sqrt((1 - prev) / (1 - abar) * beta) * noise

    def sample(self, model, x: torch.Tensor, steps: int, randn=None, callback=None) -> torch.Tensor:
        """Noise x [B, C, H, W] -> latents. model(x, t) predicts, randn(x) draws alike noise, callback(i, x) watches."""
        ts = self.timesteps(steps)
        for i, t in enumerate(ts):
            t_prev = ts[i + 1] if i + 1 < len(ts) else None
            x = self.step(x, model(x, t), t, t_prev, None if t_prev is None else (randn or torch.randn_like)(x))
            if callback:
                callback(i, x)
        return x


class DDIM:
    """Deterministic sampling, or with noise of scale eta (Song et al., eqs. 12 and 16).

    Each step's predecessor is the next entry of the timestep list. The last step goes to abar_0, as SD 1.x does, or to
    1 with set_alpha_to_one. Latents are never clamped.
    """

    def __init__(
        self,
        schedule: NoiseSchedule,
        spacing: str = "leading",
        offset: int = 1,
        set_alpha_to_one: bool = False,
        eta: float = 0.0,
    ):
        self.schedule, self.spacing, self.offset, self.eta = schedule, spacing, offset, eta
        self.final_abar = 1.0 if set_alpha_to_one else float(schedule.alphas_cumprod[0])

    def timesteps(self, steps: int) -> list[int]:
        return sampling_timesteps(steps, self.spacing, self.offset, self.schedule.steps)

    def step(self, x: torch.Tensor, pred: torch.Tensor, t: int, t_prev: int | None, noise=None) -> torch.Tensor:
        """From timestep t to t_prev (None: the end). x, pred [B, C, H, W]; noise is wanted where eta > 0."""
        abar = float(self.schedule.alphas_cumprod[t])
        prev = self.final_abar if t_prev is None else float(self.schedule.alphas_cumprod[t_prev])
        x0, eps = self.schedule.x0_and_eps(pred, x, abar)
        sigma = self.eta * math.sqrt((1 - prev) / (1 - abar) * (1 - abar / prev))  # eq. 16
        x = math.sqrt(prev) * x0 + math.sqrt(1 - prev - sigma**2) * eps  # eq. 12
        return x + sigma * noise if sigma > 0 else x

    def sample(self, model, x: torch.Tensor, steps: int, randn=None, callback=None) -> torch.Tensor:
        """Noise x [B, C, H, W] -> latents. model(x, t) predicts, randn(x) draws alike noise, callback(i, x) watches."""
        ts = self.timesteps(steps)
        for i, t in enumerate(ts):
            t_prev = ts[i + 1] if i + 1 < len(ts) else None
            x = self.step(x, model(x, t), t, t_prev, (randn or torch.randn_like)(x) if self.eta > 0 else None)
            if callback:
                callback(i, x)
        return x


# ----------------------------------------------------------------------------------------------------------------


def count_parameters(module: nn.Module) -> tuple[int, int]:
    """Tensors and parameters of a module."""
    sizes = [p.numel() for p in module.parameters()]
    return len(sizes), sum(sizes)


def weights_hash(module: nn.Module | dict[str, torch.Tensor]) -> str:
    """sha256 over a module's state: names, shapes and values in fp32. Independent of device and of memory format."""
    digest = hashlib.sha256()
    for name, tensor in sorted((module if isinstance(module, dict) else module.state_dict()).items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def main():
    print(f"{'preset':8}{'part':32}{'tensors':>8}{'parameters':>14}")
    for name, preset in PRESETS.items():
        with torch.device("meta"):
            unet, vae = UNet(preset["unet"]), VAE(preset["vae"])
        parts = {
            "UNet": unet,
            "  time embedding": unet.time_embed,
            "  down": unet.input_blocks,
            "  middle": unet.middle_block,
            "  up": unet.output_blocks,
            "  out": unet.out,
            f"VAE, 1/{vae.config.factor} of the size": vae,
            "  encoder": vae.encoder,
            "  decoder": vae.decoder,
        }
        for part, module in parts.items():
            tensors, parameters = count_parameters(module)
            print(f"{name:8}{part:32}{tensors:8d}{parameters:14,d}")
        text = preset["text"] or "openai/clip-vit-large-patch14, 123,060,480 parameters"
        print(f"{name:8}text encoder: {text}")
        print(f"{name:8}{asdict(preset['unet'])}\n")


if __name__ == "__main__":
    main()
