"""Triton kernels for the UNet on NVIDIA GPUs: what lies between its convolutions, products and attention, fused.

    SD_Kernels.apply(unet)      # swaps them in; same parameters, same names, same mathematics. A VAE too
    SD_Kernels.settle(unet)     # for sampling: the weights stay as they are
    SD_Kernels.Graphed(unet)    # the same network as CUDA graphs, for sampling: no time is lost between kernels

The plain network reads and writes each activation for every bias, norm, SiLU, GELU, addition and concatenation, under
autocast often in fp32. Here each such chain is one pass (norms: two), forward and backward, in fp32 inside and in the
activations' dtype outside:

    group_norm      [concatenate,] [add a vector a sample,] GroupNorm [, SiLU]; backward adds the residual's gradient
    add_layer_norm  add a bias and the residual, LayerNorm; backward adds the residual's gradient and sums the bias's
    geglu           add a bias, value x GELU(gate); without gradients on Hopper, the product before it too
    add_bias        add a bias and the residual, or the bias alone; of feature maps also what GroupNorm begins with

Products that share an input become one: q, k and v; k and v of the text; all residual blocks' time projections.
Memory is channels_last throughout: [B, C, H, W] lies as [B, H, W, C], so that a feature map is a matrix of pixels.

SD_Model.py is the reference, imports nothing from here, and runs wherever these kernels do not (CPU, MPS, GPUs before
Ampere, machines without Triton, dropout above zero).
"""

import contextvars
import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

from SD_Model import (
    VAE,
    CrossAttention,
    Downsample,
    InputError,
    ResBlock,
    SpatialTransformer,
    TransformerBlock,
    UNet,
    Upsample,
    VAEAttention,
    VAEDownsample,
    VAEResBlock,
    VAEUpsample,
    timestep_embedding,
)

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # a CPU build of torch
    triton = None

BLOCK_C = 64  # channels of a tile: one 128-byte line of a pixel
BLOCK_R = 64  # pixels of a tile
GEGLU_TILE = 128, 128, 64  # tokens, channels and inputs of a tile of _geglu_product


def available(device: torch.device) -> bool:
    """Whether the kernels run on a device: an NVIDIA GPU with bf16 (Ampere, 2020) or later, and Triton there."""
    return (
        triton is not None
        and device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def apply(net: UNet | VAE) -> UNet | VAE:
    """Give a UNet or VAE the fused forward passes below, in place. Parameters, their names and checkpoints stay."""
    fused = {VAEResBlock: FusedVAEResBlock, VAEAttention: FusedVAEAttention, nn.GroupNorm: FusedGroupNorm,
             VAEDownsample: FusedVAEDownsample, VAEUpsample: FusedVAEUpsample}  # fmt: skip
    if isinstance(net, UNet):
        fused = {UNet: FusedUNet, ResBlock: FusedResBlock, SpatialTransformer: FusedSpatialTransformer,
                 Downsample: FusedDownsample, Upsample: FusedUpsample}  # fmt: skip
    if not isinstance(net, UNet) or net.config.dropout == 0:
        for m in net.modules():
            m.__class__ = fused.get(type(m), type(m))
    return net


# ----------------------------------------------------------------------------------------------------------------
# Kernels. Tiles are [BR pixels or tokens, BC channels]; `part` holds sums over a chunk of BR pixels, later added up.
# ----------------------------------------------------------------------------------------------------------------

if triton is not None:
    # Numbers that only bound loops and masks: no kernel is compiled anew for their being 1 or a multiple of 16.
    sizes_vary = triton.jit(do_not_specialize=["HW", "C1", "S"])
    rows_vary = triton.jit(do_not_specialize=["N"])

    @triton.jit
    def _tile(x, row, c, C, mask):
        return tl.load(x + row[:, None] * C + c[None, :], mask=mask, other=0.0).to(tl.float32)

    @triton.jit
    def _store_moments(v, mask, part, b, s, c, HW, C, S, BR: tl.constexpr):
        mean = tl.sum(v, 0) / tl.minimum(HW - s * BR, BR)
        d = tl.where(mask, v - mean[None, :], 0.0)
        at = part + (b * S + s).to(tl.int64) * 2 * C + c
        tl.store(at, mean, mask=c < C)
        tl.store(at + C, tl.sum(d * d, 0), mask=c < C)

    @sizes_vary
    def _gn_moments(x, x2, joined, part, HW, C, C1, S, CAT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
        """Mean and sum of squared deviations of each channel over a chunk of pixels, into part [B, S, 2, C]."""
        b, s = tl.program_id(0) // S, tl.program_id(0) % S
        r, c = s * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
        mask, row = (r < HW)[:, None] & (c < C)[None, :], b.to(tl.int64) * HW + r
        if CAT:
            left = (c < C1)[None, :]
            v = _tile(x, row, c, C1, mask & left) + _tile(x2, row, c - C1, C - C1, mask & (left == 0))
            tl.store(joined + row[:, None] * C + c[None, :], v.to(joined.dtype.element_ty), mask=mask)
        else:
            v = _tile(x, row, c, C, mask)
        _store_moments(v, mask, part, b, s, c, HW, C, S, BR)

    @triton.jit
    def _chunk_moments(part, b, s, k, c, HW, C, S, W, BR: tl.constexpr):
        """Of chunks s [BS] and a group's channels: means, sums of squares [BS, BC], pixels [BS, 1], mask."""
        mask = (s < S)[:, None] & (k < W)[None, :]
        at = part + (b * S + s).to(tl.int64)[:, None] * 2 * C + c[None, :]
        n = tl.where(s < S, tl.minimum(HW - s * BR, BR), 0).to(tl.float32)[:, None]
        return tl.load(at, mask=mask, other=0.0), tl.load(at + C, mask=mask, other=0.0), n, mask

    @sizes_vary
    def _gn_stats(part, e, stats, means, HW, C, G, S, eps, E: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr,
                  BC: tl.constexpr):  # fmt: skip
        """Chunks of a group put together (Chan et al. 1979): stats [B, G, 2] mean and 1/std, means [B, C]."""
        b, g = tl.program_id(0), tl.program_id(1)
        W, k = C // G, tl.arange(0, BC)
        c = g * W + k
        add = tl.load(e + b * C + c, mask=k < W, other=0.0).to(tl.float32) if E else tl.zeros([BC], tl.float32)
        of_channel = tl.zeros([BC], tl.float32)
        for begin in range(0, S, BS):
            mean, m2, n, mask = _chunk_moments(part, b, begin + tl.arange(0, BS), k, c, HW, C, S, W, BR)
            of_channel += tl.sum(mean * n, 0) / HW
        of_channel += add
        of_group = tl.sum(tl.where(k < W, of_channel, 0.0), 0) / W
        total = tl.zeros([BC], tl.float32)
        for begin in range(0, S, BS):
            mean, m2, n, mask = _chunk_moments(part, b, begin + tl.arange(0, BS), k, c, HW, C, S, W, BR)
            d = tl.where(mask, mean + add[None, :] - of_group, 0.0)
            total += tl.sum(m2 + n * d * d, 0)
        var = tl.sum(total, 0) / (HW * W)
        tl.store(stats + (b * G + g) * 2, of_group)
        tl.store(stats + (b * G + g) * 2 + 1, 1.0 / tl.sqrt(var + eps))
        tl.store(means + b * C + c, of_channel, mask=k < W)

    @triton.jit
    def _normed(x, e, stats, b, row, c, C, G, mask, E: tl.constexpr):
        """Normalised tile, and 1/std by channel."""
        at = stats + (b * G + c // (C // G)) * 2
        mean, rstd = tl.load(at, mask=c < C, other=0.0), tl.load(at + 1, mask=c < C, other=0.0)
        if E:
            mean -= tl.load(e + b * C + c, mask=c < C, other=0.0).to(tl.float32)
        return (_tile(x, row, c, C, mask) - mean[None, :]) * rstd[None, :], rstd

    @sizes_vary
    def _gn_apply(x, e, stats, w, bias, y, HW, C, G, S, E: tl.constexpr, SILU: tl.constexpr, BR: tl.constexpr,
                  BC: tl.constexpr):  # fmt: skip
        b, s = tl.program_id(0) // S, tl.program_id(0) % S
        r, c = s * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
        mask, row = (r < HW)[:, None] & (c < C)[None, :], b.to(tl.int64) * HW + r
        v, rstd = _normed(x, e, stats, b, row, c, C, G, mask, E)
        v = v * tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        v += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        if SILU:
            v = v * tl.sigmoid(v)
        tl.store(y + row[:, None] * C + c[None, :], v.to(y.dtype.element_ty), mask=mask)

    @triton.jit
    def _gn_dz(x, e, stats, w, bias, dy, b, row, c, C, G, mask, E: tl.constexpr, SILU: tl.constexpr):
        """Normalised tile, gradient before the SiLU, weights, 1/std."""
        v, rstd = _normed(x, e, stats, b, row, c, C, G, mask, E)
        wc = tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)
        dz = _tile(dy, row, c, C, mask)
        if SILU:
            z = v * wc[None, :] + tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
            gate = tl.sigmoid(z)
            dz = dz * gate * (1.0 + z * (1.0 - gate))
        return v, dz, wc, rstd

    @sizes_vary
    def _gn_dmoments(x, e, stats, w, bias, dy, part, HW, C, G, S, E: tl.constexpr, SILU: tl.constexpr,
                     BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
        """Sums over a chunk of pixels of dz and dz * normalised, into part [B, S, 2, C]."""
        b, s = tl.program_id(0) // S, tl.program_id(0) % S
        r, c = s * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
        mask, row = (r < HW)[:, None] & (c < C)[None, :], b.to(tl.int64) * HW + r
        v, dz, wc, rstd = _gn_dz(x, e, stats, w, bias, dy, b, row, c, C, G, mask, E, SILU)
        at = part + (b * S + s).to(tl.int64) * 2 * C + c
        tl.store(at, tl.sum(dz, 0), mask=c < C)
        tl.store(at + C, tl.sum(tl.where(mask, dz * v, 0.0), 0), mask=c < C)

    @sizes_vary
    def _gn_dstats(part, stats, means, w, dstats, de, dwb, HW, C, G, S, E: tl.constexpr, BS: tl.constexpr,
                   BC: tl.constexpr):  # fmt: skip
        """Of a sample and group: means of dxhat and dxhat * xhat, into dstats [B, G, 2]; and by channel the sums over
        pixels: of dz and dz * xhat into dwb [B, 2, C], and of dx, the added vector's gradient, into de [B, C]."""
        b, g = tl.program_id(0), tl.program_id(1)
        W, k = C // G, tl.arange(0, BC)
        c = g * W + k
        sum1, sum2 = tl.zeros([BC], tl.float32), tl.zeros([BC], tl.float32)
        for begin in range(0, S, BS):
            s = begin + tl.arange(0, BS)
            mask = (s < S)[:, None] & (k < W)[None, :]
            at = part + (b * S + s).to(tl.int64)[:, None] * 2 * C + c[None, :]
            sum1 += tl.sum(tl.load(at, mask=mask, other=0.0), 0)  # [W]
            sum2 += tl.sum(tl.load(at + C, mask=mask, other=0.0), 0)
        tl.store(dwb + b * 2 * C + c, sum1, mask=k < W)
        tl.store(dwb + b * 2 * C + C + c, sum2, mask=k < W)
        wc = tl.load(w + c, mask=k < W, other=0.0).to(tl.float32)
        n = HW * W
        m1, m2 = tl.sum(wc * sum1, 0) / n, tl.sum(wc * sum2, 0) / n
        tl.store(dstats + (b * G + g) * 2, m1)
        tl.store(dstats + (b * G + g) * 2 + 1, m2)
        if E:
            mean, rstd = tl.load(stats + (b * G + g) * 2), tl.load(stats + (b * G + g) * 2 + 1)
            xhat = (tl.load(means + b * C + c, mask=k < W, other=0.0) - mean) * rstd * HW  # summed over pixels
            tl.store(de + b * C + c, (rstd * (wc * sum1 - HW * m1 - xhat * m2)).to(de.dtype.element_ty), mask=k < W)

    @sizes_vary
    def _gn_dx(x, e, stats, dstats, w, bias, dy, dres, dx, dx2, HW, C, C1, G, S, E: tl.constexpr, SILU: tl.constexpr,
               CAT: tl.constexpr, RES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):  # fmt: skip
        b, s = tl.program_id(0) // S, tl.program_id(0) % S
        r, c = s * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
        mask, row = (r < HW)[:, None] & (c < C)[None, :], b.to(tl.int64) * HW + r
        v, dz, wc, rstd = _gn_dz(x, e, stats, w, bias, dy, b, row, c, C, G, mask, E, SILU)
        at = dstats + (b * G + c // (C // G)) * 2
        m1, m2 = tl.load(at, mask=c < C, other=0.0), tl.load(at + 1, mask=c < C, other=0.0)
        d = rstd[None, :] * (dz * wc[None, :] - m1[None, :] - v * m2[None, :])
        if RES:
            d += _tile(dres, row, c, C, mask)
        d = d.to(dx.dtype.element_ty)
        if CAT:
            left = (c < C1)[None, :]
            tl.store(dx + row[:, None] * C1 + c[None, :], d, mask=mask & left)
            tl.store(dx2 + row[:, None] * (C - C1) + (c - C1)[None, :], d, mask=mask & (left == 0))
        else:
            tl.store(dx + row[:, None] * C + c[None, :], d, mask=mask)

    @rows_vary
    def _ln_forward(a, ab, res, w, bias, h, y, stats, N, C, eps, RES: tl.constexpr, BR: tl.constexpr,
                    BC: tl.constexpr):  # fmt: skip
        """h = a + ab [+ res]; y = LayerNorm(h) w + bias; stats [N, 2]: mean and 1/std."""
        r, c = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.arange(0, BC)
        mask = (r < N)[:, None] & (c < C)[None, :]
        v = _tile(a, r, c, C, mask) + tl.load(ab + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        if RES:
            v += _tile(res, r, c, C, mask)
        v = v.to(h.dtype.element_ty)
        tl.store(h + r[:, None] * C + c[None, :], v, mask=mask)
        v = v.to(tl.float32)  # of h as it is stored, and as the backward pass will see it
        mean = tl.sum(tl.where(mask, v, 0.0), 1) / C
        d = tl.where(mask, v - mean[:, None], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(d * d, 1) / C + eps)
        tl.store(stats + r * 2, mean, mask=r < N)
        tl.store(stats + r * 2 + 1, rstd, mask=r < N)
        v = d * rstd[:, None] * tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        v += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        tl.store(y + r[:, None] * C + c[None, :], v.to(y.dtype.element_ty), mask=mask)

    @rows_vary
    def _ln_backward(h, stats, w, dy, dres, dx, part, N, C, RES: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
                     STEPS: tl.constexpr):  # fmt: skip
        """dx = LayerNorm's gradient [+ dres]; part [programs, 3, C]: sums over tokens of dy * xhat, dy and dx."""
        c = tl.arange(0, BC)
        wc = tl.load(w + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        dw, db = tl.zeros([BR, BC], tl.float32), tl.zeros([BR, BC], tl.float32)
        dab = tl.zeros([BR, BC], tl.float32)
        for i in range(STEPS):
            r = (tl.program_id(0).to(tl.int64) * STEPS + i) * BR + tl.arange(0, BR)
            mask = (r < N)[:, None] & (c < C)[None, :]
            mean = tl.load(stats + r * 2, mask=r < N, other=0.0)[:, None]
            rstd = tl.load(stats + r * 2 + 1, mask=r < N, other=0.0)[:, None]
            v = tl.where(mask, (_tile(h, r, c, C, mask) - mean) * rstd, 0.0)
            g = _tile(dy, r, c, C, mask)
            dw += g * v
            db += g
            g = g * wc
            d = rstd * (g - (tl.sum(g, 1) / C)[:, None] - v * (tl.sum(g * v, 1) / C)[:, None])
            if RES:
                d += _tile(dres, r, c, C, mask)
            dab += tl.where(mask, d, 0.0)
            tl.store(dx + r[:, None] * C + c[None, :], d.to(dx.dtype.element_ty), mask=mask)
        at = part + tl.program_id(0) * 3 * C + c
        tl.store(at, tl.sum(dw, 0), mask=c < C)
        tl.store(at + C, tl.sum(db, 0), mask=c < C)
        tl.store(at + 2 * C, tl.sum(dab, 0), mask=c < C)

    @rows_vary
    def _geglu_forward(u, bias, y, N, C, BR: tl.constexpr, BC: tl.constexpr):
        """u [N, 2C], value and gate, plus bias [2C] -> y [N, C]."""
        r, c = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
        mask = (r < N)[:, None] & (c < C)[None, :]
        a = _tile(u, r, c, 2 * C, mask) + tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        g = _tile(u, r, c + C, 2 * C, mask) + tl.load(bias + C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        v = a * g * 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        tl.store(y + r[:, None] * C + c[None, :], v.to(y.dtype.element_ty), mask=mask)

    @rows_vary
    def _geglu_backward(u, bias, dy, du, part, N, C, BR: tl.constexpr, BC: tl.constexpr, STEPS: tl.constexpr):
        """du [N, 2C], and part [programs, 2C]: its sums over a program's tokens."""
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        ba = tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        bg = tl.load(bias + C + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        sum_a, sum_g = tl.zeros([BR, BC], tl.float32), tl.zeros([BR, BC], tl.float32)
        for i in range(STEPS):
            r = (tl.program_id(0).to(tl.int64) * STEPS + i) * BR + tl.arange(0, BR)
            mask = (r < N)[:, None] & (c < C)[None, :]
            a, g = _tile(u, r, c, 2 * C, mask) + ba, _tile(u, r, c + C, 2 * C, mask) + bg
            d = _tile(dy, r, c, C, mask)
            cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
            da, dg = d * g * cdf, d * a * (cdf + g * 0.3989422804014327 * tl.exp(-0.5 * g * g))
            sum_a += da
            sum_g += dg
            at = du + r[:, None] * 2 * C + c[None, :]
            tl.store(at, da.to(du.dtype.element_ty), mask=mask)
            tl.store(at + C, dg.to(du.dtype.element_ty), mask=mask)
        at = part + tl.program_id(0) * 2 * C + c
        tl.store(at, tl.sum(sum_a, 0), mask=c < C)
        tl.store(at + C, tl.sum(sum_g, 0), mask=c < C)

    @triton.jit
    def _gated(a, g, FAST: tl.constexpr):
        """a GELU(g), g times the normal distribution up to g: its tail by Abramowitz & Stegun 26.2.17, off by 7.5e-8 at
        most, as fp32 is; erf's two branches take twice as long. FAST: by the GPU's own reciprocal and power."""
        z, power = tl.abs(g), g * g * -0.7213475204444817
        if FAST:
            t = tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + 0.2316418882 * z], tl.float32, True, 1
            )
            e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [power], tl.float32, True, 1)
        else:
            t, e = 1.0 / (1.0 + 0.2316418882 * z), tl.exp2(power)
        tail = (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
        return a * (tl.maximum(g, 0.0) - z * (tail * t * e))

    @triton.jit(do_not_specialize=["M", "ROWS"])
    def _geglu_product(x, w, bias, y, M, N, K, ROWS, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
                       FAST: tl.constexpr):  # fmt: skip
        """y [M, N] = value x GELU(gate) of x [M, K] times w [2, N, K] plus bias [2N]. x, w and y are descriptors of
        tiles for the GPU to copy. A program makes one tile after another, and loads for the next while it finishes one;
        ROWS rows of tiles are made together, down them first, so that all find the weights in the cache."""
        across = N // BN
        for tile in tl.range(tl.program_id(0), tl.cdiv(M, BM) * across, tl.num_programs(0), flatten=True):
            top = tile // (ROWS * across) * ROWS
            rows, place = tl.minimum(tl.cdiv(M, BM) - top, ROWS), tile % (ROWS * across)
            r, c = (top + place % rows) * BM, place // rows * BN
            both = tl.zeros([BM, 2 * BN], tl.float32)
            for k in tl.range(0, K // BK):
                weights = tl.reshape(w.load([0, c, k * BK]), [2 * BN, BK])  # of BN values, then of their gates
                both = tl.dot(x.load([r, k * BK]), weights.T, both)
            a, g = tl.split(tl.permute(tl.reshape(both, [BM, 2, BN]), [0, 2, 1]))
            a += tl.load(bias + c + tl.arange(0, BN)).to(tl.float32)[None, :]
            g += tl.load(bias + N + c + tl.arange(0, BN)).to(tl.float32)[None, :]
            y.store([r, c], _gated(a, g, FAST).to(y.dtype))

    @sizes_vary
    def _add_bias(a, res, bias, y, part, HW, C, S, RES: tl.constexpr, MOMENTS: tl.constexpr, BR: tl.constexpr,
                  BC: tl.constexpr):  # fmt: skip
        """y = a + bias [+ res], and if asked what _gn_moments makes of y, part [B, S, 2, C]."""
        b, s = tl.program_id(0) // S, tl.program_id(0) % S
        r, c = s * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
        mask, row = (r < HW)[:, None] & (c < C)[None, :], b.to(tl.int64) * HW + r
        v = _tile(a, row, c, C, mask)
        if RES:
            v += _tile(res, row, c, C, mask)
        v += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        v = v.to(y.dtype.element_ty)
        tl.store(y + row[:, None] * C + c[None, :], v, mask=mask)
        if MOMENTS:
            _store_moments(tl.where(mask, v.to(tl.float32), 0.0), mask, part, b, s, c, HW, C, S, BR)

    @triton.jit
    def _softmax(x, y, C, scale, BC: tl.constexpr):
        """A row of y = softmax(scale x), [rows, C]."""
        c = tl.arange(0, BC)
        at = tl.program_id(0).to(tl.int64) * C + c
        v = tl.load(x + at, mask=c < C, other=float("-inf")).to(tl.float32) * scale
        v = tl.exp(v - tl.max(v, 0))
        tl.store(y + at, (v / tl.sum(v, 0)).to(y.dtype.element_ty), mask=c < C)

    @rows_vary
    def _pack(x1, x2, x3, y, N, C, P: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
        """P matrices [N, C] side by side: y [N, P C]."""
        r, c = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR), tl.program_id(1) * BC + tl.arange(0, BC)
        mask, at = (r < N)[:, None] & (c < C)[None, :], r[:, None] * C + c[None, :]
        to = y + r[:, None] * P * C + c[None, :]
        tl.store(to, tl.load(x1 + at, mask=mask), mask=mask)
        tl.store(to + C, tl.load(x2 + at, mask=mask), mask=mask)
        if P == 3:
            tl.store(to + 2 * C, tl.load(x3 + at, mask=mask), mask=mask)

    @rows_vary
    def _add_parts(own, others, total, squares, N, P: tl.constexpr, BLOCK: tl.constexpr):
        """total [N] = own [N] + each of others [P, N], in fp32 inside, and squares [N / BLOCK] sums of its squares."""
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        v = tl.load(own + i).to(tl.float32)
        for p in range(P):
            v += tl.load(others + p * N + i).to(tl.float32)
        v = v.to(total.dtype.element_ty)
        tl.store(total + i, v)
        v = v.to(tl.float32)
        tl.store(squares + tl.program_id(0), tl.sum(v * v, 0))

    @rows_vary
    def _column_sums(x, part, N, C, BR: tl.constexpr, BC: tl.constexpr, STEPS: tl.constexpr):
        """part [programs, C]: sums over a program's rows."""
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        total = tl.zeros([BR, BC], tl.float32)
        for i in range(STEPS):
            r = (tl.program_id(0).to(tl.int64) * STEPS + i) * BR + tl.arange(0, BR)
            total += _tile(x, r, c, C, (r < N)[:, None] & (c < C)[None, :])
        tl.store(part + tl.program_id(0) * C + c, tl.sum(total, 0), mask=c < C)

    @triton.jit(do_not_specialize=["begin"])
    def _adamw(table, rates, grads, chunks, begin, norm, limit, lr, beta1, beta2, eps, correction1, correction2, decay,
               K, BLOCK: tl.constexpr):  # fmt: skip
        """AdamW and the weights' average for BLOCK numbers of one of K tensors; nothing, if the norm is not finite.
        table [6, K]: addresses of weights, two moments, averages and bf16 copies (0: none), and sizes; rates [2, K]:
        multiples of lr, weight decays; grads [2, K]: addresses of gradients, and whether they are bf16, else fp32;
        chunks [.., 2]: tensor and block in it, of which the first program takes number begin."""
        at = chunks + 2 * (begin + tl.program_id(0))
        k, i = tl.load(at), tl.load(at + 1) * BLOCK + tl.arange(0, BLOCK)
        none = tl.zeros([BLOCK], tl.int32)  # makes blocks of numbers, as Triton's interpreter fails to compare these
        n = tl.load(norm + none)
        scale = tl.minimum(1.0, limit / (n + 1e-6))
        mask = (i < tl.load(table + 5 * K + k)) & (n < float("inf"))  # false for NaN too
        fp32 = tl.pointer_type(tl.float32)
        bf16 = tl.pointer_type(tl.bfloat16)
        p_at = tl.multiple_of(tl.load(table + k).to(fp32), 16) + i
        m_at = tl.multiple_of(tl.load(table + K + k).to(fp32), 16) + i
        v_at = tl.multiple_of(tl.load(table + 2 * K + k).to(fp32), 16) + i
        e_at = tl.multiple_of(tl.load(table + 3 * K + k).to(fp32), 16) + i
        half, g_at = tl.load(table + 4 * K + k), tl.load(grads + k)
        copied, short = half + none != 0, tl.load(grads + K + k) + none != 0
        rate, weight_decay = lr * tl.load(rates + k), tl.load(rates + K + k)
        g = tl.load(tl.multiple_of(g_at.to(bf16), 16) + i, mask=mask & short, other=0.0).to(tl.float32)
        g += tl.load(tl.multiple_of(g_at.to(fp32), 16) + i, mask=mask & (short == 0), other=0.0)
        g *= scale
        p, m, v = (tl.load(p_at, mask=mask, other=0.0), tl.load(m_at, mask=mask, other=0.0),
                   tl.load(v_at, mask=mask, other=0.0))  # fmt: skip
        m += (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        p -= rate * weight_decay * p
        p -= rate / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
        e = tl.load(e_at, mask=mask, other=0.0)
        tl.store(p_at, p, mask=mask)
        tl.store(m_at, m, mask=mask)
        tl.store(v_at, v, mask=mask)
        tl.store(e_at, e + (1.0 - decay) * (p - e), mask=mask)
        tl.store(tl.multiple_of(half.to(bf16), 16) + i, p.to(tl.bfloat16), mask=mask & copied)


# ----------------------------------------------------------------------------------------------------------------
# The optimizer's step
# ----------------------------------------------------------------------------------------------------------------


def _strides(x: torch.Tensor) -> list[int]:
    """Those that matter: a 1x1 kernel lies alike in channels_last and not."""
    return [step for step, size in zip(x.stride(), x.shape) if size > 1]


def _total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Of gradients in fp32 and bf16 together, fp32."""
    kinds = ([g for g in grads if g.dtype == kind] for kind in (torch.float32, torch.bfloat16))
    norms = [n for kind in kinds if kind for n in torch._foreach_norm(kind, 2, dtype=torch.float32)]
    return torch.linalg.vector_norm(torch.stack(norms))


def _gradient(p: nn.Parameter) -> torch.Tensor | None:
    """Where the last backward pass left it."""
    copy = getattr(p, "copy_bf16", None)
    return p.grad if copy is None else copy.gradient


def check_all_trained(parameters):
    """InputError if a weight has no gradient."""
    shapes = sorted({tuple(p.shape) for p in parameters if _gradient(p) is None})
    if shapes:
        raise InputError(
            f"every trained weight must take part in the loss, and some do not (shapes {shapes[:5]}), as in a text "
            "encoder with a head that is not used; train with --no_kernels"
        )


def forget_gradients(parameters):
    """Drop all gradients, of bf16 copies too."""
    for p in parameters:
        p.grad = None
        if getattr(p, "copy_bf16", None) is not None:
            p.copy_bf16.gradient = None


def gradient_norm(parameters, shared: "SharedGradients | None") -> torch.Tensor:
    """Of all gradients together, fp32; with `shared`, of those that processes have added up. InputError if a weight has
    none."""
    if shared is not None:
        return shared.way.norm()
    check_all_trained(parameters)
    return _total_norm([_gradient(p) for p in parameters])


class FusedStep:
    """Clipping, AdamW and the average of the weights in one pass over memory: 36 bytes a parameter instead of 48.

    Works on the state of a torch.optim.AdamW, which stays what is saved and loaded. Weights are fp32. With `half`, the
    pass also leaves a bf16 copy of the weights that the fused blocks multiply with, which is what autocast would make
    of them, and takes their gradients in bf16, as the products give them, or their fp32 sum: nothing is cast back and
    forth. With `shared`, it takes the gradients that processes have added up, and may leave a part of the weights to
    each process (Rajbhandari et al. 2019, arXiv:1910.02054, stage 1): then complete() is to be called before anything
    but the next pass reads weights, moments or averages.
    """

    BLOCK, WARPS = 512, 8

    def __init__(self, optimizer: torch.optim.AdamW, averages: dict[nn.Parameter, torch.Tensor], half=(),
                 accumulates: bool = False, shared: "SharedGradients | None" = None):  # fmt: skip
        """averages: of each of the optimizer's parameters. A state that is not there yet becomes zeros. half: weights
        from multiplied(), which DDP cannot see the gradients of. accumulates: over several backward passes a step."""
        self.shared, self.launches = shared, None
        self.optimizer, self.averages, half = optimizer, averages, set(half)  # kept alive, as their addresses are
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        device, counts = self.parameters[0].device, []
        for p in self.parameters:
            state = optimizer.state[p]
            if not state:
                state["step"] = torch.zeros((), device=device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            counts.append(state["step"])
            if any(t.stride() != p.stride() or t.dtype != torch.float32 for t in self._tensors(p)):
                raise ValueError("weights, moments and averages must lie alike in memory, in fp32")
            p.copy_bf16 = p.detach().to(torch.bfloat16) if p in half else None
            if p in half:
                p.copy_bf16.accumulates, p.copy_bf16.gradient = accumulates, None
                p.copy_bf16.arrived = None if shared is None else partial(shared.arrived, p)
        self.count = counts[0].to(device)  # of steps taken, one tensor for all
        for p in self.parameters:
            optimizer.state[p]["step"] = self.count
        self.done = int(self.count)

    def _tensors(self, p: nn.Parameter) -> list[torch.Tensor]:
        """A weight, its two moments and its average."""
        state = self.optimizer.state[p]
        return [p.detach(), state["exp_avg"], state["exp_avg_sq"], self.averages[p]]

    def _plan(self):
        """Tables for the kernel, after the first backward pass, when it is known what is whose to update."""
        group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        rows, rates, chunks, self.launches = [], [], [], []
        for bucket, parts in self.shared.shares() if self.shared else [(None, _whole(self.parameters))]:
            begin = len(chunks)
            for p, start, size in parts:
                chunks += [[len(rows), i] for i in range(-(-size // self.BLOCK))]
                copy = 0 if p.copy_bf16 is None else p.copy_bf16.data_ptr() + 2 * start
                rows.append([*(t.data_ptr() + 4 * start for t in self._tensors(p)), copy, size])
                rates.append([group_of[p]["lr_scale"], group_of[p]["weight_decay"]])
            self.launches.append((begin, len(chunks) - begin, bucket))
        device = self.parameters[0].device
        self.table = torch.tensor(rows, device=device).view(-1, 6).t().contiguous()  # [6, K]
        self.rates = torch.tensor(rates, device=device).view(-1, 2).t().contiguous()  # [2, K]
        self.chunks = torch.tensor(chunks, dtype=torch.int32, device=device)  # [.., 2]

    def gradients(self) -> list[torch.Tensor]:
        """One for each row of the table, lying as its weight does."""
        if self.shared is not None:
            return self.shared.sums
        check_all_trained(self.parameters)
        grads = [_gradient(p) for p in self.parameters]
        for i, (p, g) in enumerate(zip(self.parameters, grads)):
            if _strides(g) != _strides(p) or g.data_ptr() % 16:  # a slice of another gradient may lie anywhere
                grads[i] = torch.empty_like(p, dtype=g.dtype).copy_(g)
        return grads

    @torch.no_grad()
    def norm(self) -> torch.Tensor:
        """Of all gradients together, fp32."""
        return gradient_norm(self.parameters, self.shared)

    @torch.no_grad()
    def step(self, lr: float, norm: torch.Tensor, limit: float, decay: float):
        """One step with gradients scaled to a norm of at most limit; then averages = decay averages + (1 - decay)
        weights. If the norm is not finite, nothing happens, and skipped() is to be called. It waits for nothing."""
        grads = self.gradients()
        if self.launches is None:
            self._plan()
        addresses = torch.tensor([[g.data_ptr() for g in grads], [g.dtype == torch.bfloat16 for g in grads]])
        if self.table.is_cuda:
            addresses = addresses.pin_memory().to(self.table.device, non_blocking=True)
        group = self.optimizer.param_groups[0]
        (beta1, beta2), eps = group["betas"], group["eps"]
        self.done += 1
        corrections = 1 - beta1**self.done, 1 - beta2**self.done
        for begin, programs, bucket in self.launches:
            if programs:
                _adamw[(programs,)](
                    self.table, self.rates, addresses, self.chunks, begin, norm, float(limit), lr, beta1, beta2, eps,
                    *corrections, decay, len(grads), BLOCK=self.BLOCK, num_warps=self.WARPS,
                )  # fmt: skip
            if bucket:
                self.shared.way.spread(bucket)
        if self.shared:
            self.shared.way.wait()
        self.count += norm.isfinite()

    def skipped(self):
        self.done -= 1

    @torch.no_grad()
    def complete(self):
        """Weights, moments and averages as a whole in every process. All call this at once."""
        for bucket in self.shared.buckets if self.shared else ():
            if bucket.split:
                self.shared.way.complete(bucket, self._tensors)


def _whole(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, int, int]]:
    """Weights, where what is to be updated of them begins, and how many numbers it has: all."""
    return [(p, 0, p.numel()) for p in parameters]


class Bucket:
    """Weights whose gradients travel between processes together: flat memory to send from and flat memory for the sums,
    which may be one, and in both (if not split) a view for each weight, which lies as the weight does."""

    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, split: bool = False):
        """dtype: of what is sent. split: each process updates a part of these weights, all of which have bf16 copies,
        and these travel instead of the gradients' sums, of which each process has its part only."""
        self.parameters, self.dtype, self.split, self.missing = parameters, dtype, split, len(parameters)
        self.starts, self.size = [], 0
        for p in parameters:
            self.starts.append(self.size)
            self.size += -(-p.numel() // 8) * 8  # each begins at a multiple of 16 bytes

    def lay(self, flat: torch.Tensor, sums: torch.Tensor):
        self.flat, self.sums = flat, sums
        # A gradient's strides to the letter, where they say the same: one kernel copies many then.
        likes = [_gradient(p) if _strides(_gradient(p)) == _strides(p) else p for p in self.parameters]
        self.views, self.sum_views = self.views_of(flat, likes), None if self.split else self.views_of(sums, likes)

    def views_of(self, memory: torch.Tensor, likes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Of such flat memory, one for each weight, which lies as in `likes`."""
        begin = memory.storage_offset()
        return [memory.as_strided(x.shape, x.stride(), begin + start) for x, start in zip(likes, self.starts)]

    def fill(self) -> list[torch.Tensor]:
        """With the gradients, which are returned: whoever drops them gives their memory to what comes next."""
        grads = [_gradient(p) for p in self.parameters]
        torch._foreach_copy_(self.views, grads)
        forget_gradients(self.parameters)
        return grads


class AllReduce:
    """Adds up buckets over processes by the process group's own all-reduce, in the dtype they are sent in."""

    BUCKET = 32 << 20  # numbers
    extra_bytes = 0  # of memory that torch's allocator does not know

    def __init__(self, buckets: list[Bucket]):
        self.works, self.buckets = [], buckets
        for b in buckets:
            flat = torch.zeros(b.size, dtype=b.dtype, device=b.parameters[0].device)
            b.lay(flat, flat)

    def send(self, bucket: Bucket):
        bucket.fill()
        self.works.append(dist.all_reduce(bucket.flat, async_op=True))

    def wait(self):
        for work in self.works:
            work.wait()
        self.works.clear()

    def norm(self) -> torch.Tensor:
        """Of all sums together, fp32."""
        return _total_norm([b.sums for b in self.buckets])

    def shares(self):
        """As PeerCopies.shares()."""
        return [(None, [(part, view) for b in self.buckets for part, view in zip(_whole(b.parameters), b.sum_views)])]

    def reset(self):
        self.works.clear()


def _symmetric_empty(size: int, device: torch.device) -> torch.Tensor:
    """So many bytes that other processes' GPUs can be let into."""
    import torch.distributed._symmetric_memory as symmetric

    kind = getattr(symmetric, "get_backend", lambda device: None)(device)
    if kind in ("NVSHMEM", "NCCL"):
        raise RuntimeError(f"torch's symmetric memory is {kind}'s")
    return symmetric.empty(size, dtype=torch.uint8, device=device)


def _symmetric_handle(memory: torch.Tensor):
    """By which each process reaches the memory of all. All call this at once."""
    import torch.distributed._symmetric_memory as symmetric

    return symmetric.rendezvous(memory, dist.group.WORLD.group_name)


def _peers(device: torch.device, other: int) -> bool:
    """Whether a GPU reaches another's memory, atomic operations included (over PCIe these would wait for ever)."""
    if not torch.cuda.can_device_access_peer(device, other):
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    value, ours, theirs = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    failed = driver.cuDeviceGet(ctypes.byref(ours), device.index) or driver.cuDeviceGet(ctypes.byref(theirs), other)
    native_atomics = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    failed = failed or driver.cuDeviceGetP2PAttribute(ctypes.byref(value), native_atomics, ours, theirs)
    return not failed and value.value == 1


class PeerCopies:
    """Adds up buckets over the processes of one machine, whose GPUs read each other's memory with their copy engines:
    products and convolutions keep all multiprocessors, of which NCCL's kernels hold some.

    A bucket has a part for each process. Each process copies its part from all others and adds them up in fp32. Of
    weights with bf16 copies, it then updates its part alone, and copies the other parts' bf16 weights from those who
    updated them; of the few others, it copies the other parts' sums, and all update all. All have the same bits.
    """

    BUCKET = 8 << 20  # numbers; the last ones' way is what the backward pass does not hide
    BLOCK = 1024
    TIMEOUT_MS = 600_000  # NCCL's too; after it the waiting kernel fails

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Whether torchrun started all processes on this machine, and this one's GPU reaches those of the others."""
        world = dist.get_world_size()
        here = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", 0)) == world
        if not here or torch.cuda.device_count() < world:
            return False
        return all(_peers(device, i) for i in range(world) if i != device.index)

    @classmethod
    def made(cls, buckets: list[Bucket], dtype: torch.dtype) -> "PeerCopies | None":
        """For these buckets, where sums that travel have that dtype; None, in all processes, if one of them has not the
        memory, cannot reach the others' or finds other sums than an all-reduce."""
        way, fault = cls(buckets, dtype), None
        for step in (way._allocate, way._connect, way._try):
            try:
                step()
            except Exception as e:  # torch may yet change these functions, and NCCL does without them
                fault = (str(e) or type(e).__name__).splitlines()[0]
                print(f"note: gradients go by NCCL's kernels, not by copies ({fault})", flush=True)
            if not _agreed(fault is None, way.device):
                return None
        way._house_copies()
        return way

    def __init__(self, buckets: list[Bucket], dtype: torch.dtype):
        """To be had from made()."""
        self.buckets, self.dtype, self.device = buckets, dtype, buckets[0].parameters[0].device
        self.rank, self.world, self.kept = dist.get_rank(), dist.get_world_size(), []
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None

    def _allocate(self):
        unit, self.places, self.extra_bytes = self.world * self.BLOCK, [], 0
        for b in self.buckets:
            b.padded = -(-b.size // unit) * unit
            b.mine = slice(self.rank * b.padded // self.world, (self.rank + 1) * b.padded // self.world)
            for kind in (b.dtype, torch.bfloat16 if b.split else self.dtype):
                self.places.append((b.padded, kind, self.extra_bytes // kind.itemsize))
                self.extra_bytes += b.padded * kind.itemsize
        torch.cuda.empty_cache()  # this is not from torch's allocator, which holds all that the passes needed
        self.memory = _symmetric_empty(self.extra_bytes, self.device)
        largest = max(b.padded for b in self.buckets) // self.world
        kinds = {b.dtype for b in self.buckets}
        self.parts = {k: torch.empty((self.world - 1) * largest, dtype=k, device=self.device) for k in kinds}
        sizes = [b.padded // unit for b in self.buckets]
        self.squares = torch.zeros(sum(sizes), device=self.device)  # of this process's parts' sums
        for b, squares in zip(self.buckets, self.squares.split(sizes)):
            b.squares = squares

    def _connect(self):
        self.handle = _symmetric_handle(self.memory)
        views = iter([[self.handle.get_buffer(r, (n,), *at) for r in range(self.world)] for n, *at in self.places])
        for b in self.buckets:
            b.flats, b.results = next(views), next(views)  # what comes back: sums, or weights
            result = b.results[self.rank].zero_()
            b.lay(b.flats[self.rank].zero_(), _floats(result, b.padded // self.world) if b.split else result)
        if self.stream:
            torch.cuda.synchronize()

    def _try(self):
        """Of each kind the smallest bucket, against an all-reduce."""
        fine, tried = True, {(b.dtype, b.split): b for b in sorted(self.buckets, key=lambda b: -b.size)}.values()
        for b in tried:
            numbers = torch.arange(b.padded, dtype=torch.int32, device=b.flat.device)
            b.flat.copy_((numbers % 251 - 125) * (self.rank + 1))
            expected = b.flat.to(torch.float32, copy=True)
            dist.all_reduce(expected)
            self._add_up(b)
            self.wait()
            if b.split:
                fine &= torch.allclose(b.sums, expected[b.mine])
                b.results[self.rank][b.mine] = b.sums
                self.spread(b)
                self.wait()
            fine &= torch.allclose(b.results[self.rank].float(), expected, rtol=0.01)
        fine = _agreed(fine, self.device)  # after which nobody reads these any more
        for b in tried:
            b.flat.zero_(), b.results[self.rank].zero_()
        if not fine:
            raise RuntimeError("what was copied from the other GPUs' memory adds up to something else")

    def _house_copies(self):
        """The split weights' bf16 copies move to where other processes reach them."""
        for b in self.buckets:
            if b.split:
                for p, view in zip(b.parameters, b.views_of(b.results[self.rank], b.parameters)):
                    p.copy_bf16.data = view.copy_(p.copy_bf16)

    def _barrier(self):
        self.handle.barrier(0, self.TIMEOUT_MS)

    def send(self, bucket: Bucket):
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.kept += bucket.fill()
            self._add_up(bucket)

    def _add_up(self, bucket: Bucket):
        n, others = bucket.padded // self.world, self._others()
        parts, sums = self.parts[bucket.dtype], bucket.sums if bucket.split else bucket.sums[bucket.mine]
        self._barrier()  # all have filled theirs
        for i, other in enumerate(others):
            parts[i * n : (i + 1) * n].copy_(bucket.flats[other][bucket.mine])
        _add_parts[(n // self.BLOCK,)](
            bucket.flat[bucket.mine], parts, sums, bucket.squares, n, P=self.world - 1, BLOCK=self.BLOCK
        )
        if not bucket.split:
            self._collect(bucket)

    def _others(self) -> list[int]:
        """Each process begins with another."""
        return [(self.rank + i) % self.world for i in range(1, self.world)]

    def _collect(self, bucket: Bucket):
        """The other parts' results. Between a read of others' memory and the next write to it lies a norm(), for which
        all must have come so far."""
        n = bucket.padded // self.world
        self._barrier()  # all have made theirs
        for other in self._others():
            theirs = slice(other * n, (other + 1) * n)
            bucket.results[self.rank][theirs].copy_(bucket.results[other][theirs])

    def spread(self, bucket: Bucket):
        """The weights of a split bucket, of which this process has just updated its part."""
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self._collect(bucket)

    def shares(self):
        """What this process updates, in that order: a bucket to spread() afterwards or None, and pairs of a weight with
        the beginning and size of what is meant of it, in the order of memory, and of the sums of its gradients."""
        whole = [b for b in self.buckets if not b.split]
        yield None, [(part, view) for b in whole for part, view in zip(_whole(b.parameters), b.sum_views)]
        for b in self.buckets:
            if b.split:
                parts, first, end = [], b.mine.start, b.mine.stop
                for p, start in zip(b.parameters, b.starts):
                    begin, stop = max(start, first), min(start + p.numel(), end)
                    if begin < stop:
                        parts.append(((p, begin - start, stop - begin), b.sums[begin - first : stop - first]))
                yield b, parts

    def complete(self, bucket: Bucket, tensors_of):
        """Of a split bucket's weights, all parts of each of their fp32 tensors_of(weight), which lie as they do."""
        for tensors in zip(*map(tensors_of, bucket.parameters)):
            flat = _floats(bucket.flat, bucket.padded)
            views = bucket.views_of(flat, tensors)
            torch._foreach_copy_(views, list(tensors))
            dist.all_gather(list(flat.chunk(self.world)), flat[bucket.mine].clone())
            torch._foreach_copy_(list(tensors), views)

    def wait(self):
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)
        self.kept.clear()  # not before, as another stream reads them

    def norm(self) -> torch.Tensor:
        """Of all sums together, fp32."""
        total = self.squares.sum()
        dist.all_reduce(total)
        return total.sqrt()

    def reset(self):
        self.kept.clear()


def _agreed(fine: bool, device: torch.device) -> bool:
    """Whether that is so in all processes."""
    fine = torch.tensor(int(fine), device=device)
    dist.all_reduce(fine, dist.ReduceOp.MIN)
    return bool(fine)


class SharedGradients:
    """Gradients added up over processes while the backward pass still runs, as DistributedDataParallel does, but also
    within a CUDA graph and of bf16 copies, which that cannot.

    All processes start with the first one's weights. In a step's last backward pass (`last` is set before it), each
    bucket of weights is sent as soon as all its gradients are there; finish() waits for the sums. These are in fp32;
    with `dtype` bf16, what is sent is rounded, which halves the traffic, and so are sums that travel. Buckets follow
    the order in which the first pass finds the gradients, as the time projections of all blocks, being one product,
    come last.

    After finish(), shares() is what this process updates, and `sums` are of the gradients of that.
    """

    @torch.no_grad()
    def __init__(self, parameters: list[nn.Parameter], dtype: torch.dtype, half=(), copies: bool = True):
        """half: the weights that will have bf16 copies. copies: by PeerCopies where that is possible."""
        self.parameters, self.dtype, self.last, self.copies = parameters, dtype, True, copies
        self.buckets, self.order, self.way, self.sums = [], {}, None, []
        self.half = set(half)
        for p in parameters:
            dist.broadcast(p.data, 0)
            if p not in self.half:  # whose hook would be called too, though nothing is accumulated; see _Half
                p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, p: nn.Parameter):
        """The pass has come to its gradient."""
        if not self.last:
            return
        if not self.buckets:
            self.order[p] = None
            return
        bucket = self.bucket_of[p]
        bucket.missing -= 1
        if not bucket.missing:
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket):
        bucket.missing = len(bucket.parameters)
        self.way.send(bucket)

    def reset(self):
        """After a pass that broke off."""
        if self.way:
            self.way.reset()
        for bucket in self.buckets:
            bucket.missing = len(bucket.parameters)

    def finish(self):
        """After a step's last backward pass."""
        if not self.buckets:
            check_all_trained(self.parameters)
            place = {p: i for i, p in enumerate(self.parameters)}
            order = torch.tensor([place[p] for p in self.order], device=self.parameters[0].device)
            dist.broadcast(order, 0)  # all send the same
            self._choose_way([self.parameters[i] for i in order.tolist()])
            self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.parameters}
            self.sums = [sums for _, parts in self.way.shares() for _, sums in parts]
            for bucket in self.buckets:
                self._send(bucket)
        self.way.wait()

    def shares(self):
        """As PeerCopies.shares(), without the sums."""
        return [(bucket, [part for part, _ in parts]) for bucket, parts in self.way.shares()]

    @torch.no_grad()
    def _choose_way(self, order: list[nn.Parameter]):
        device = order[0].device
        if _agreed(self.copies and PeerCopies.possible(device), device):
            rounded = self.dtype == torch.bfloat16
            sent = (lambda p: self.dtype) if rounded else (lambda p: _gradient(p).dtype)
            self.buckets = self._cut(order, lambda p: (sent(p), p in self.half), PeerCopies.BUCKET)
            self.way = PeerCopies.made(self.buckets, self.dtype)
        if self.way is None:
            self.buckets = self._cut(order, lambda p: (self.dtype,), AllReduce.BUCKET)
            self.way = AllReduce(self.buckets)

    @staticmethod
    def _cut(order: list[nn.Parameter], kind_of, size: int) -> list[Bucket]:
        """Buckets of one kind each (dtype, split), somewhat larger than `size`, in the order in which they are full."""
        full, begun = [], {}
        for p in order:
            kind = kind_of(p)
            part = begun.setdefault(kind, [])
            part.append(p)
            if sum(q.numel() for q in part) > size:
                full.append((begun.pop(kind), kind))
        return [Bucket(part, *kind) for part, kind in full + [(part, kind) for kind, part in begun.items()]]


class _Half(torch.autograd.Function):
    """The bf16 copy of a weight; its gradient is left with the copy."""

    @staticmethod
    def forward(ctx, weight):
        ctx.copy = weight.copy_bf16
        return weight.copy_bf16.view_as(weight.copy_bf16)

    @staticmethod
    def backward(ctx, grad):
        if ctx.copy.gradient is not None:
            ctx.copy.gradient += grad
        else:
            ctx.copy.gradient = grad.float() if ctx.copy.accumulates else grad
        if ctx.copy.arrived:
            ctx.copy.arrived()


def _weight(module: nn.Module) -> torch.Tensor:
    """A convolution's or product's weight, in training that with bf16 copies the copy."""
    has_copy = getattr(module.weight, "copy_bf16", None) is not None and torch.is_grad_enabled()
    return _Half.apply(module.weight) if has_copy else module.weight


def multiplied(net: nn.Module) -> list[nn.Parameter]:
    """The weights of a network that _weight() gives to products and convolutions."""
    fused = FusedResBlock | FusedSpatialTransformer | FusedDownsample | FusedUpsample
    blocks = [m for m in net.modules() if isinstance(m, fused)]
    return [m.weight for block in blocks for m in block.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


# ----------------------------------------------------------------------------------------------------------------
# The same with gradients. Activations are [B, C, H, W] in channels_last, or [..., C].
# ----------------------------------------------------------------------------------------------------------------


def _channels_last(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None else x.contiguous(memory_format=torch.channels_last)


def _empty(like: torch.Tensor, channels: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[B, channels, H, W] in channels_last."""
    B, _, H, W = like.shape
    return torch.empty(
        B, channels, H, W, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last
    )


def _floats(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float32, device=like.device)


def _out_dtype(x: torch.Tensor) -> torch.dtype:
    """What the next product will want: autocast's dtype under autocast, or the input's."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


_compiling = None  # the context in which to compile kernels instead of launching them


def _launch(kernel, grid: tuple, *args, **constants):
    if isinstance(args[0], FakeTensor):  # of torch's counting mode: sizes and no memory
        return
    if _compiling is not None:
        _compiling.run(kernel.warmup, *args, grid=grid, **constants)
    else:
        kernel[grid](*args, **constants)


def compile_ahead(function):
    """Compile the kernels that function() launches, many at once, instead of each when its turn comes. It runs without
    them: what it computes, its gradients too, is garbage. Random numbers are drawn as if it had not run."""
    global _compiling
    if not hasattr(triton, "AsyncCompileMode"):
        return
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    threads = max(1, min(cores - 2, 16))  # two are for this thread and autograd's, in which cuDNN searches meanwhile

    def ahead():
        global _compiling
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
            # The mode is a variable of this context, which autograd's thread is given. All could run in one thread, but
            # cuDNN keeps the algorithms it finds to the thread, and would have to search for the backward pass again.
            _compiling = contextvars.copy_context()
            function()

    device = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(device):
            contextvars.copy_context().run(ahead)  # a mode that fails to end, ends with the context
    except Exception as e:  # what cannot be done without will say so when it is done in earnest
        why = (str(e) or type(e).__name__).splitlines()[0]
        print(f"note: kernels are compiled one after another ({why})", flush=True)
    finally:
        _compiling = None


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()


def _chunks(rows: int, block: int, programs: int = 256, most: int = 8) -> tuple[int, int]:
    """Programs, about so many and more, and tiles a program, at most so many, for sums over rows."""
    tiles = -(-rows // block)
    steps = min(most, max(1, tiles // programs))
    return -(-tiles // steps), steps


def _pixel_chunks(HW: int) -> tuple[int, int]:
    """Pixels of a chunk whose moments GroupNorm begins with, and chunks of a sample."""
    block = min(BLOCK_R, _power(HW))
    return block, -(-HW // block)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, skip, e, part, weight, bias, groups, eps, silu):
        x, skip = _channels_last(x), _channels_last(skip)
        B, C1, H, W = x.shape
        C, HW = C1 + (0 if skip is None else skip.shape[1]), H * W
        block, S = _pixel_chunks(HW)
        joined, y = x if skip is None else _empty(x, C), _empty(x, C, _out_dtype(x))
        means, stats = _floats(x, B, C), _floats(x, B, groups, 2)
        grid, given = (B * S, -(-C // BLOCK_C)), e is not None
        added, other = e if given else x, x if skip is None else skip
        tile, chunks = dict(BR=block, BC=BLOCK_C), dict(BS=min(64, _power(S)), BC=_power(C // groups))
        if part is None or skip is not None:
            part = _floats(x, B, S, 2, C)
            _launch(_gn_moments, grid, x, other, joined, part, HW, C, C1, S, CAT=skip is not None, **tile)
        _launch(_gn_stats, (B, groups), part, added, stats, means, HW, C, groups, S, eps, E=given, BR=block, **chunks)
        _launch(_gn_apply, grid, joined, added, stats, weight, bias, y, HW, C, groups, S, E=given, SILU=silu, **tile)
        ctx.save_for_backward(joined, e, weight, bias, stats, means)
        ctx.sizes, ctx.silu, ctx.split = (HW, C, C1, groups, S), silu, skip is not None
        ctx.tile, ctx.chunks = tile, chunks
        ctx.set_materialize_grads(False)
        return joined, y

    @staticmethod
    def backward(ctx, dres, dy):
        x, e, weight, bias, stats, means = ctx.saved_tensors
        HW, C, C1, groups, S = ctx.sizes
        B, given = x.shape[0], e is not None
        dy, dres = _channels_last(dy), _channels_last(dres)
        part, dwb, dstats = _floats(x, B, S, 2, C), _floats(x, B, 2, C), torch.empty_like(stats)
        dx, dskip, de = _empty(x, C1), _empty(x, C - C1) if ctx.split else None, torch.empty_like(e) if given else None
        grid, how = (B * S, -(-C // BLOCK_C)), dict(E=given, SILU=ctx.silu, **ctx.tile)
        norm = (x, e if given else x, stats)
        _launch(_gn_dmoments, grid, *norm, weight, bias, dy, part, HW, C, groups, S, **how)
        _launch(
            _gn_dstats, (B, groups), part, stats, means, weight, dstats, de if given else part, dwb, HW, C, groups, S,
            E=given, **ctx.chunks,
        )  # fmt: skip
        _launch(
            _gn_dx, grid, *norm, dstats, weight, bias, dy, dy if dres is None else dres, dx, dskip if ctx.split else dx,
            HW, C, C1, groups, S, CAT=ctx.split, RES=dres is not None, **how,
        )  # fmt: skip
        db, dw = dwb.sum(0).to(weight.dtype)  # [C], [C]
        return dx, dskip, de, None, dw, db, None, None, None


class _AddLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, ab, res, weight, bias, eps):
        a, C = a.contiguous(), a.shape[-1]
        res = None if res is None else res.contiguous()
        N, BC = a.numel() // C, _power(C)
        h, y = torch.empty_like(a), torch.empty_like(a, dtype=_out_dtype(a))
        stats = torch.empty(N, 2, dtype=torch.float32, device=a.device)
        BR = max(1, 2048 // BC)
        _launch(_ln_forward, (-(-N // BR),), a, ab, a if res is None else res, weight, bias, h, y, stats, N, C, eps,
                                    RES=res is not None, BR=BR, BC=BC)  # fmt: skip
        ctx.save_for_backward(h, stats, weight)
        ctx.has_res, ctx.bias_dtype = res is not None, ab.dtype
        ctx.set_materialize_grads(False)
        return h, y

    @staticmethod
    def backward(ctx, dres, dy):
        h, stats, weight = ctx.saved_tensors
        C = h.shape[-1]
        N, BC = h.numel() // C, _power(C)
        BR = max(1, 2048 // BC)
        programs, steps = _chunks(N, BR, programs=1024, most=32)
        dx, part = torch.empty_like(h), torch.empty(programs, 3, C, dtype=torch.float32, device=h.device)
        dy, dres = dy.contiguous(), None if dres is None else dres.contiguous()
        _launch(_ln_backward, (programs,), h, stats, weight, dy, dy if dres is None else dres, dx, part, N, C,
                                  RES=dres is not None, BR=BR, BC=BC, STEPS=steps)  # fmt: skip
        dw, db, dab = part.sum(0)
        return dx, dab.to(ctx.bias_dtype), dx if ctx.has_res else None, dw.to(weight.dtype), db.to(weight.dtype), None


class _GEGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, u, bias):
        u, C = u.contiguous(), u.shape[-1] // 2
        N, BC = u.numel() // (2 * C), min(128, _power(C))
        y = torch.empty(*u.shape[:-1], C, dtype=u.dtype, device=u.device)
        BR = 1024 // BC
        _launch(_geglu_forward, (-(-N // BR), -(-C // BC)), u, bias, y, N, C, BR=BR, BC=BC, num_warps=2)
        ctx.save_for_backward(u, bias)
        return y

    @staticmethod
    def backward(ctx, dy):
        u, bias = ctx.saved_tensors
        C = dy.shape[-1]
        N, BC = dy.numel() // C, min(128, _power(C))
        BR = 1024 // BC
        programs, steps = _chunks(N, BR)
        du, part = torch.empty_like(u), torch.empty(programs, 2 * C, dtype=torch.float32, device=u.device)
        grid = (programs, -(-C // BC))
        _launch(_geglu_backward, grid, u, bias, dy.contiguous(), du, part, N, C, BR=BR, BC=BC, STEPS=steps,
                num_warps=2)  # fmt: skip
        return du, part.sum(0).to(bias.dtype)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, res, bias):
        C, maps = bias.shape[0], a.ndim == 4
        B, HW = (a.shape[0], a.shape[2] * a.shape[3]) if maps else (1, a.numel() // C)
        block, S = _pixel_chunks(HW)
        y, part = torch.empty_like(a if res is None else res), _floats(a, *((B, S, 2, C) if maps else (0,)))
        _launch(_add_bias, (B * S, -(-C // BLOCK_C)), a, a if res is None else res, bias, y, part, HW, C, S,
                                  RES=res is not None, MOMENTS=maps, BR=block, BC=BLOCK_C)  # fmt: skip
        ctx.C, ctx.bias_dtype, ctx.has_res = C, bias.dtype, res is not None
        ctx.mark_non_differentiable(part)
        ctx.set_materialize_grads(False)
        return y, part

    @staticmethod
    def backward(ctx, dy, _):
        dy = _channels_last(dy) if dy.ndim == 4 else dy.contiguous()
        N = dy.numel() // ctx.C
        programs, steps = _chunks(N, BLOCK_R)
        part = torch.empty(programs, ctx.C, dtype=torch.float32, device=dy.device)
        _launch(_column_sums, (programs, -(-ctx.C // BLOCK_C)), dy, part, N, ctx.C, BR=BLOCK_R, BC=BLOCK_C, STEPS=steps)
        return dy, dy if ctx.has_res else None, part.sum(0).to(ctx.bias_dtype)


class _SplitHeads(torch.autograd.Function):
    """[B, N, P C], the side-by-side result of P products -> P views [B, heads, N, C / heads] of it, P 2 or 3."""

    @staticmethod
    def forward(ctx, y, P, heads):
        return tuple(part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in y.chunk(P, dim=-1))

    @staticmethod
    def backward(ctx, *grads):
        B, heads, N, d = grads[0].shape
        C, P = heads * d, len(grads)
        # Copies only where attention left another layout.
        parts = [g.transpose(1, 2).reshape(B * N, C).contiguous() for g in grads]
        y = torch.empty(B, N, P * C, dtype=parts[0].dtype, device=parts[0].device)
        grid = (-(-B * N // BLOCK_R), -(-C // BLOCK_C))
        _launch(_pack, grid, *parts[:2], parts[-1], y, B * N, C, P=P, BR=BLOCK_R, BC=BLOCK_C)
        return y, None, None


def group_norm(x, norm: nn.GroupNorm, silu: bool, skip=None, e=None) -> tuple[torch.Tensor, torch.Tensor]:
    """x, concatenated with skip and plus e as given; and its GroupNorm, followed by SiLU if asked.

    x [B, C1, H, W], skip [B, C2, H, W], e [B, C] (skip and e exclude each other) -> the first without e, for use as the
    residual, and the second, [B, C, H, W] in channels_last.
    """
    moments = x.__dict__.pop("moments", None)  # of add_bias(); whoever comes later makes them anew
    return _GroupNorm.apply(x, skip, e, moments, norm.weight, norm.bias, norm.num_groups, norm.eps, silu)


def add_layer_norm(a, bias, res, norm: nn.LayerNorm) -> tuple[torch.Tensor, torch.Tensor]:
    """h = a + bias [+ res], and LayerNorm(h). a, res [..., C], bias [C] -> [..., C] twice."""
    return _AddLayerNorm.apply(a, bias, res, norm.weight, norm.bias, norm.eps)


def geglu(u, bias) -> torch.Tensor:
    """value * GELU(gate) of u + bias, halves of the last axis: [..., 2C], [2C] -> [..., C]. Exact (erf) GELU."""
    return _GEGLU.apply(u, bias)


def linear_geglu(x, proj: nn.Linear) -> torch.Tensor:
    """geglu() of x's product with proj's weight, [..., D] -> [..., C]; as one kernel if it runs and pays."""
    w, C = _weight(proj), proj.out_features // 2
    BM, BN, BK = GEGLU_TILE
    one = x.is_cuda and not isinstance(x, FakeTensor) and not torch.is_grad_enabled()
    one = one and x.dtype == w.dtype == torch.bfloat16 and w.is_contiguous() and C % BN == x.shape[-1] % BK == 0
    if one:
        # Hopper and the large Blackwells have 177 KiB of shared memory a program; it pays from four tiles for each.
        gpu = torch.cuda.get_device_properties(x.device)
        one = gpu.major in (9, 10) and x.numel() // x.shape[-1] * C >= 4 * gpu.multi_processor_count * BM * BN
    if not one:
        return geglu(F.linear(x, w), proj.bias)
    return _linear_geglu(x.reshape(-1, x.shape[-1]), w, proj.bias).view(*x.shape[:-1], C)


def _linear_geglu(x, w, bias, fast: bool = True) -> torch.Tensor:
    """x [M, K], w [2N, K], bias [2N] -> [M, N]."""
    (M, K), N = x.shape, w.shape[0] // 2
    BM, BN, BK = GEGLU_TILE
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3
    _launch(
        _geglu_product, (min(programs, -(-M // BM) * (N // BN)),),
        TensorDescriptor.from_tensor(x, [BM, BK]), TensorDescriptor(w, [2, N, K], [N * K, K, 1], [2, BN, BK]), bias,
        TensorDescriptor.from_tensor(y, [BM, BN]), M, N, K, 8 if K < 1280 else 16, BM=BM, BN=BN, BK=BK, FAST=fast,
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return y


def add_bias(a, res, bias) -> torch.Tensor:
    """a + bias [+ res]: one or two [B, C, H, W] in channels_last or [..., C], and [C]. Feature maps carry their moments
    for a GroupNorm that follows."""
    if a.ndim == 4:
        y, moments = _AddBias.apply(_channels_last(a), _channels_last(res), bias)
        y.moments = moments
        return y
    return _AddBias.apply(a.contiguous(), None if res is None else res.contiguous(), bias)[0]


# ----------------------------------------------------------------------------------------------------------------
# The network, with these
# ----------------------------------------------------------------------------------------------------------------


def settle(unet: UNet) -> UNet:
    """Of a network whose weights will not change any more: what its products share is joined once, not in each pass."""
    for m in unet.modules():
        m.kept = {}
    return unet


def _once(module: nn.Module, what: str, make) -> torch.Tensor:
    """make(), which depends on the module's weights alone: each time, or after settle() the first time."""
    kept = getattr(module, "kept", None)
    if kept is None:
        return make()
    if what not in kept:
        kept[what] = make()
    return kept[what]


class FusedResBlock(ResBlock):
    """Takes the skip apart from x, and for the time embedding its own projection, conv bias included, [B, out_ch]."""

    def forward(self, x, e, skip=None):
        if self.grad_checkpoint and torch.is_grad_enabled():
            return checkpoint(self._forward, x, e, skip, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, e, skip)

    def _forward(self, x, e, skip=None):
        (norm1, _, conv1), (norm2, _, _, conv2) = self.in_layers, self.out_layers
        x, h = group_norm(x, norm1, silu=True, skip=skip)
        h = F.conv2d(h, _weight(conv1), padding=1)  # [B, out_ch, H, W]
        h = group_norm(h, norm2, silu=True, e=e)[1]
        h = F.conv2d(h, _weight(conv2), padding=1)
        bias, skip = conv2.bias, self.skip_connection
        if not isinstance(skip, nn.Identity):
            x = F.conv2d(x, _weight(skip))
            bias = _once(self, "bias", lambda: conv2.bias + skip.bias)
        return add_bias(h, x, bias)


def _attention(attn: CrossAttention, y: torch.Tensor, context: torch.Tensor | None) -> torch.Tensor:
    """CrossAttention without its last bias. y [B, N, C], context [B, M, D] -> [B, N, C]."""
    B, N, C = y.shape
    if context is None:
        w = _once(attn, "weights", lambda: torch.cat([_weight(attn.to_q), _weight(attn.to_k), _weight(attn.to_v)]))
        q, k, v = _SplitHeads.apply(F.linear(y, w), 3, attn.heads)  # [B, heads, N, d]
    else:
        q = F.linear(y, _weight(attn.to_q)).view(B, N, attn.heads, -1).transpose(1, 2)
        w = _once(attn, "weights", lambda: torch.cat([_weight(attn.to_k), _weight(attn.to_v)]))
        k, v = _SplitHeads.apply(F.linear(context, w), 2, attn.heads)  # [B, heads, M, d]
    h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C)
    return F.linear(h, _weight(attn.to_out[0]))


class FusedSpatialTransformer(SpatialTransformer):
    def forward(self, x, context):
        if self.grad_checkpoint and torch.is_grad_enabled():
            return checkpoint(self._forward, x, context, use_reentrant=False, preserve_rng_state=False)
        return self._forward(x, context)

    def _forward(self, x, context):
        B, C, H, W = x.shape
        x, h = group_norm(x, self.norm, silu=False)
        h = h.permute(0, 2, 3, 1).reshape(B, H * W, C)  # a view
        a, bias, res = F.linear(h, _weight(self.proj_in).view(C, C)), self.proj_in.bias, None
        for block in self.transformer_blocks:  # a + bias + res is the block's input
            a, bias, res = self._block(block, a, bias, res, context)
        h = add_bias(a, res, bias)
        h = F.linear(h, _weight(self.proj_out).view(C, C))
        return add_bias(h.view(B, H, W, C).permute(0, 3, 1, 2), x, self.proj_out.bias)

    @staticmethod
    def _block(block: TransformerBlock, a, bias, res, context):
        h, y = add_layer_norm(a, bias, res, block.norm1)
        h, y = add_layer_norm(_attention(block.attn1, y, None), block.attn1.to_out[0].bias, h, block.norm2)
        h, y = add_layer_norm(_attention(block.attn2, y, context), block.attn2.to_out[0].bias, h, block.norm3)
        up, down = block.ff.net[0].proj, block.ff.net[2]
        return F.linear(linear_geglu(y, up), _weight(down)), down.bias, h


def _conv(conv: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    return add_bias(F.conv2d(x, _weight(conv), None, conv.stride, conv.padding), None, conv.bias)


class FusedDownsample(Downsample):
    def forward(self, x):
        return _conv(self.op, x)


class FusedUpsample(Upsample):
    def forward(self, x, size):
        with torch.autocast("cuda", enabled=False):  # which would copy the pixels in fp32
            x = F.interpolate(x, size=size, mode="nearest")
        return _conv(self.conv, x)


class FusedUNet(UNet):
    """UNet.forward with the time projections of all residual blocks as one product, and skips joined inside norms."""

    def forward(self, latents, timesteps, context):
        dtype = _out_dtype(latents)
        emb = self.time_embed(timestep_embedding(timesteps, self.config.channels[0]).to(latents.dtype))  # [B, 4c]
        blocks = [m for m in self.modules() if isinstance(m, ResBlock)]
        w = _once(self, "weights", lambda: torch.cat([_weight(m.emb_layers[1]) for m in blocks]))
        b = _once(self, "biases", lambda: torch.cat([m.emb_layers[1].bias + m.in_layers[2].bias for m in blocks]))
        projected = F.linear(F.silu(emb), w, b).split([m.emb_layers[1].out_features for m in blocks], dim=1)
        of_block = {m: e.contiguous() for m, e in zip(blocks, projected)}
        context = context.to(dtype)  # once, and not for each product

        h, skips = latents.contiguous(memory_format=torch.channels_last), []
        for layers in self.input_blocks:
            h = self._run(layers, h, of_block, context)
            skips.append(h)
        h = self._run(self.middle_block, h, of_block, context)
        for layers in self.output_blocks:
            skip = skips.pop()
            h = self._run(layers, h, of_block, context, skips[-1].shape[-2:] if skips else None, skip)
        h = group_norm(h, self.out[0], silu=True)[1]
        return self.out[2](h)

    @staticmethod
    def _run(layers, h, of_block, context, size=None, skip=None):
        for layer in layers:
            if isinstance(layer, ResBlock):
                h, skip = layer(h, of_block[layer], skip), None
            elif isinstance(layer, SpatialTransformer):
                h = layer(h, context)
            elif isinstance(layer, Upsample):
                h = layer(h, size)
            else:
                h = layer(h)
        return h


class FusedGroupNorm(nn.GroupNorm):
    def forward(self, x):
        return group_norm(x, self, silu=False)[1]


class FusedVAEDownsample(VAEDownsample):
    def forward(self, x):
        return _conv(self.conv, F.pad(x, (0, 1, 0, 1)))


class FusedVAEUpsample(VAEUpsample):
    def forward(self, x):
        return _conv(self.conv, F.interpolate(x, scale_factor=2.0, mode="nearest"))


class FusedVAEAttention(VAEAttention):
    """As products with the whole matrix of weights between them, a few pictures at a time: torch has no fused attention
    for Hopper with a head as wide as this one, and the one it has takes 2.5 times as long."""

    SCORES = 1 << 28  # numbers at a time

    def forward(self, x):
        B, C, H, W = x.shape
        N = H * W
        if torch.is_grad_enabled() or N * N > self.SCORES:
            return super().forward(x)
        x, h = group_norm(x, self.norm, silu=False)
        h = h.permute(0, 2, 3, 1).reshape(B, N, C)  # a view
        q, k, v = (F.linear(h, f.weight.view(C, C), f.bias) for f in (self.q, self.k, self.v))
        parts = zip(*(y.split(self.SCORES // (N * N)) for y in (q, k, v)))
        h = torch.cat([torch.bmm(softmax(_scores(a, b), C**-0.5, c.dtype), c) for a, b, c in parts])
        h = F.linear(h, self.proj_out.weight.view(C, C))
        return add_bias(h.view(B, H, W, C).permute(0, 3, 1, 2), x, self.proj_out.bias)


def _scores(q, k) -> torch.Tensor:
    """q k^T of [B, N, C], [B, M, C] -> fp32 [B, N, M]."""
    if q.is_cuda and q.dtype != torch.float32:
        return torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32)
    return torch.bmm(q.float(), k.float().transpose(1, 2))


def softmax(x, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """softmax(scale x) over the last axis of fp32 [..., N], in dtype."""
    x = x.contiguous()
    y, N = torch.empty_like(x, dtype=dtype), x.shape[-1]
    BC = _power(N)
    _launch(_softmax, (x.numel() // N,), x, y, N, scale, BC=BC, num_warps=min(16, max(1, BC // 512)))
    return y


class FusedVAEResBlock(VAEResBlock):
    def forward(self, x):
        x, h = group_norm(x, self.norm1, silu=True)
        h = F.conv2d(h, self.conv1.weight, padding=1)  # [B, out_ch, H, W]
        h = group_norm(h, self.norm2, silu=True, e=self.conv1.bias.expand(len(h), -1).contiguous())[1]
        h = F.conv2d(h, self.conv2.weight, padding=1)
        bias = self.conv2.bias
        if not isinstance(self.nin_shortcut, nn.Identity):
            x = F.conv2d(x, self.nin_shortcut.weight)
            bias = bias + self.nin_shortcut.bias
        return add_bias(h, x, bias)


def _record(graph, function, pool=None):
    """Record function() into a CUDA graph. Other threads (loader, checkpoints) may go on pinning memory meanwhile."""
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return function()
    except Exception:
        torch.cuda.set_stream(before)  # which a recording that fails does not give back
        raise


def _warm_up(function):
    """Run function() as graphs are recorded, on a stream of its own: kernels are compiled, algorithms chosen."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


class Graphed:
    """A network's forward pass without gradients, recorded as a CUDA graph for each set of input shapes and replayed.

    Called like the network, with tensors; the weights must stay where they are.
    """

    def __init__(self, net: nn.Module):
        self.net, self.graphs = net, {}

    @torch.no_grad()
    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        key = tuple((tuple(x.shape), x.dtype) for x in inputs)
        if key not in self.graphs:
            static, graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
            compile_ahead(lambda: self.net(*static))
            _warm_up(lambda: self.net(*static))
            torch.cuda.empty_cache()
            self.graphs[key] = graph, static, _record(graph, lambda: self.net(*static))
        graph, static, out = self.graphs[key]
        torch._foreach_copy_(static, inputs)
        graph.replay()
        return out.clone()


class NotRecorded(RuntimeError):
    """In all processes: a pass could not be recorded in one of them, or the record does not do what the pass does."""


class GraphedBackward:
    """A training step's forward and backward passes recorded as CUDA graphs and replayed: the two or three thousand
    kernels of one cost one launch. Gradients stay in the same memory: a step's first pass overwrites them, the others
    add to it, and the last shares them with other processes, if there are any.
    """

    def __init__(self, function, parameters: list[nn.Parameter], passes: int, shared: SharedGradients | None = None):
        """function(*inputs, last=) calls backward and returns a tensor; its inputs' shapes never change. passes: in a
        step."""
        self.function, self.parameters, self.shared, self.graphs = function, parameters, shared, {}
        self.kinds = list(dict.fromkeys((i == 0, i == passes - 1) for i in range(passes)))  # first and last of a step?

    def __call__(self, *inputs: torch.Tensor, first: bool, last: bool) -> torch.Tensor:
        """NotRecorded at the first call, if at all."""
        if not self.graphs:
            self.static = [x.clone() for x in inputs]
            self._record()
        graph, out = self.graphs[first, last]
        torch._foreach_copy_(self.static, inputs)
        graph.replay()
        return out.clone()

    def _record(self):
        expected, failure, pool = self._step(), None, None  # the first, which shares no gradients before its end
        _warm_up(self._step)
        forget_gradients(self.parameters)  # the recording makes its own
        torch.cuda.empty_cache()  # what the warm-up took is not what the recording can use
        try:
            for kind in self.kinds:
                graph = torch.cuda.CUDAGraph()
                self.graphs[kind] = graph, _record(graph, partial(self.function, *self.static, last=kind[1]), pool)
                pool = graph.pool()
        except RuntimeError as e:
            failure = e
        if not self._all(failure is None):
            if isinstance(failure, torch.OutOfMemoryError):
                raise failure
            raise NotRecorded(str(failure or "") or "a process could not record its pass") from failure
        for kind in self.kinds:
            self.graphs[kind][0].replay()
        found = self.graphs[self.kinds[-1]][1], gradient_norm(self.parameters, self.shared)
        if not self._all(all(torch.allclose(a, b, 0.02, 1e-6, equal_nan=True) for a, b in zip(found, expected))):
            raise NotRecorded("the recorded pass gave other numbers than the pass itself")

    def _all(self, fine: bool) -> bool:
        """Whether that is so in all processes."""
        return fine if self.shared is None else _agreed(fine, self.static[0].device)

    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The passes of a step, not recorded, all on the same inputs: the last one's result, the gradients' norm."""
        forget_gradients(self.parameters)
        for _, last in self.kinds:
            out = self.function(*self.static, last=last)
        return out.clone(), gradient_norm(self.parameters, self.shared)
