"""What lies between convolutions, products and attention, fused, with gradients.

    group_norm      [concatenate,] [add a vector a sample,] GroupNorm [, SiLU]; backward adds the residual's gradient
    add_layer_norm  add a bias and the residual, LayerNorm; backward adds the residual's gradient and sums the bias's
    geglu           add a bias, value x GELU(gate); without gradients on Hopper, the product before it too
    add_bias        add a bias and the residual, or the bias alone; of feature maps also what GroupNorm begins with

Activations are [B, C, H, W] in channels_last, or [..., C].
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from sd import kernels
from sd.kernels import GEGLU_TILE, floats, launch

BLOCK_C = 64  # channels of a tile: one 128-byte line of a pixel

BLOCK_R = 64  # pixels of a tile


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


def weight_of(module: nn.Module) -> torch.Tensor:
    """A convolution's or product's weight, in training that with bf16 copies the copy."""
    has_copy = getattr(module.weight, "copy_bf16", None) is not None and torch.is_grad_enabled()
    return _Half.apply(module.weight) if has_copy else module.weight


class _LowRank(torch.autograd.Function):
    """x w^T + scale (x down^T) up^T, in one dtype, where w is frozen: no gradient of it is made, and what the thin
    matrices give is added within their product's kernel, forward and backward. x [N, in], w [out, in]."""

    @staticmethod
    def forward(ctx, x, w, down, up, scale):
        h = x @ down.t()  # [N, r]
        ctx.save_for_backward(x, w, down, up, h)
        ctx.scale = scale
        return (x @ w.t()).addmm_(h, up.t(), alpha=scale)

    @staticmethod
    def backward(ctx, dy):
        x, w, down, up, h = ctx.saved_tensors
        dh, scale = dy @ up, ctx.scale  # [N, r]
        dx = (dy @ w).addmm_(dh, down, alpha=scale) if ctx.needs_input_grad[0] else None
        ddown = torch.addmm(down, dh.t(), x, beta=0, alpha=scale)  # with beta = 0, its first argument is not read
        return dx, None, ddown, torch.addmm(up, dy.t(), h, beta=0, alpha=scale), None


def product(x: torch.Tensor, w: torch.Tensor, *layers: nn.Module, bias=None) -> torch.Tensor:
    """x [..., in] times w^T, the weights of these layers one below the other, [out, in], plus bias [out]; with their
    adapters (sd/lora.py), which all of them have or none."""
    adapters = [m.adapter for m in layers if hasattr(m, "adapter")]
    if not adapters:
        return F.linear(x, w, bias)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    downs, ups = (
        [weight_of(a).flatten(1).to(dtype) for a in parts] for parts in zip(*((a.down, a.up) for a in adapters))
    )
    down, up = downs[0], ups[0]
    if len(adapters) > 1:
        down, up = torch.cat(downs), torch.block_diag(*ups)  # [r of all, in], [out, r of all]
    flat = x.reshape(-1, x.shape[-1]).to(dtype)
    y = _LowRank.apply(flat, w.to(dtype), down, up, adapters[0].scale).view(*x.shape[:-1], len(w))
    return y if bias is None else y + bias.to(dtype)


def convolution(x: torch.Tensor, conv: nn.Conv2d) -> torch.Tensor:
    """[B, in, H, W] -> [B, out, H', W'] without the bias; with the layer's adapter, if it has one."""
    y = F.conv2d(x, weight_of(conv), None, conv.stride, conv.padding)
    if not hasattr(conv, "adapter"):
        return y
    h = F.conv2d(x, weight_of(conv.adapter.down), None, conv.stride, conv.padding)  # [B, r, H', W']
    return y + F.conv2d(h * conv.adapter.scale, weight_of(conv.adapter.up))


def _channels_last(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None else x.contiguous(memory_format=torch.channels_last)


def _empty(like: torch.Tensor, channels: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """[B, channels, H, W] in channels_last."""
    B, _, H, W = like.shape
    return torch.empty(
        B, channels, H, W, dtype=dtype or like.dtype, device=like.device, memory_format=torch.channels_last
    )


def out_dtype(x: torch.Tensor) -> torch.dtype:
    """What the next product will want: autocast's dtype under autocast, or the input's."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


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
        joined, y = x if skip is None else _empty(x, C), _empty(x, C, out_dtype(x))
        means, stats = floats(x, B, C), floats(x, B, groups, 2)
        grid, given = (B * S, -(-C // BLOCK_C)), e is not None
        added, other = e if given else x, x if skip is None else skip
        tile, chunks = dict(BR=block, BC=BLOCK_C), dict(BS=min(64, _power(S)), BC=_power(C // groups))
        if part is None or skip is not None:
            part = floats(x, B, S, 2, C)
            launch(kernels._gn_moments, grid, x, other, joined, part, HW, C, C1, S, CAT=skip is not None, **tile)
        launch(
            kernels._gn_stats,
            (B, groups),
            part,
            added,
            stats,
            means,
            HW,
            C,
            groups,
            S,
            eps,
            E=given,
            BR=block,
            **chunks,
        )
        launch(
            kernels._gn_apply, grid, joined, added, stats, weight, bias, y, HW, C, groups, S, E=given, SILU=silu, **tile
        )
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
        part, dwb, dstats = floats(x, B, S, 2, C), floats(x, B, 2, C), torch.empty_like(stats)
        dx, dskip, de = _empty(x, C1), _empty(x, C - C1) if ctx.split else None, torch.empty_like(e) if given else None
        grid, how = (B * S, -(-C // BLOCK_C)), dict(E=given, SILU=ctx.silu, **ctx.tile)
        norm = (x, e if given else x, stats)
        launch(kernels._gn_dmoments, grid, *norm, weight, bias, dy, part, HW, C, groups, S, **how)
        launch(
            kernels._gn_dstats, (B, groups), part, stats, means, weight, dstats, de if given else part, dwb, HW, C,
            groups, S,
            E=given, **ctx.chunks,
        )  # fmt: skip
        launch(
            kernels._gn_dx, grid, *norm, dstats, weight, bias, dy, dy if dres is None else dres, dx,
            dskip if ctx.split else dx,
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
        h, y = torch.empty_like(a), torch.empty_like(a, dtype=out_dtype(a))
        stats = torch.empty(N, 2, dtype=torch.float32, device=a.device)
        BR = max(1, 2048 // BC)
        launch(kernels._ln_forward, (-(-N // BR),), a, ab, a if res is None else res, weight, bias, h, y, stats, N,
        C, eps,
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
        launch(kernels._ln_backward, (programs,), h, stats, weight, dy, dy if dres is None else dres, dx, part, N, C,
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
        launch(kernels._geglu_forward, (-(-N // BR), -(-C // BC)), u, bias, y, N, C, BR=BR, BC=BC, num_warps=2)
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
        launch(kernels._geglu_backward, grid, u, bias, dy.contiguous(), du, part, N, C, BR=BR, BC=BC, STEPS=steps,
                num_warps=2)  # fmt: skip
        return du, part.sum(0).to(bias.dtype)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, res, bias):
        C, maps = bias.shape[0], a.ndim == 4
        B, HW = (a.shape[0], a.shape[2] * a.shape[3]) if maps else (1, a.numel() // C)
        block, S = _pixel_chunks(HW)
        y, part = torch.empty_like(a if res is None else res), floats(a, *((B, S, 2, C) if maps else (0,)))
        launch(kernels._add_bias, (B * S, -(-C // BLOCK_C)), a, a if res is None else res, bias, y, part, HW, C, S,
                                  RES=res is not None, MOMENTS=maps, BR=block, BC=BLOCK_C)  # fmt: skip
        ctx.C, ctx.bias_dtype, ctx.has_res = C, bias.dtype, res is not None
        ctx.mark_non_differentiable(part)
        ctx.set_materialize_grads(False)
        return y, part

    @staticmethod
    def backward(ctx, dy, _):
        dy = _channels_last(dy) if dy.ndim == 4 else dy.contiguous()
        if not ctx.needs_input_grad[2]:  # a frozen bias
            return dy, dy if ctx.has_res else None, None
        N = dy.numel() // ctx.C
        programs, steps = _chunks(N, BLOCK_R)
        part = torch.empty(programs, ctx.C, dtype=torch.float32, device=dy.device)
        launch(
            kernels._column_sums,
            (programs, -(-ctx.C // BLOCK_C)),
            dy,
            part,
            N,
            ctx.C,
            BR=BLOCK_R,
            BC=BLOCK_C,
            STEPS=steps,
        )
        return dy, dy if ctx.has_res else None, part.sum(0).to(ctx.bias_dtype)


class SplitHeads(torch.autograd.Function):
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
        launch(kernels._pack, grid, *parts[:2], parts[-1], y, B * N, C, P=P, BR=BLOCK_R, BC=BLOCK_C)
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
    w, C = weight_of(proj), proj.out_features // 2
    BM, BN, BK = GEGLU_TILE
    one = x.is_cuda and not isinstance(x, FakeTensor) and not torch.is_grad_enabled()
    one = one and x.dtype == w.dtype == torch.bfloat16 and w.is_contiguous() and C % BN == x.shape[-1] % BK == 0
    if one:
        # Hopper and the large Blackwells have 177 KiB of shared memory a program; it pays from four tiles for each.
        gpu = torch.cuda.get_device_properties(x.device)
        one = gpu.major in (9, 10) and x.numel() // x.shape[-1] * C >= 4 * gpu.multi_processor_count * BM * BN
    if not one or hasattr(proj, "adapter"):
        return geglu(product(x, w, proj), proj.bias)
    return _linear_geglu(x.reshape(-1, x.shape[-1]), w, proj.bias).view(*x.shape[:-1], C)


def _linear_geglu(x, w, bias, fast: bool = True) -> torch.Tensor:
    """x [M, K], w [2N, K], bias [2N] -> [M, N]."""
    (M, K), N = x.shape, w.shape[0] // 2
    BM, BN, BK = GEGLU_TILE
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3
    launch(
        kernels._geglu_product, (min(programs, -(-M // BM) * (N // BN)),),
        kernels.TensorDescriptor.from_tensor(x, [BM, BK]), kernels.TensorDescriptor(w, [2, N, K], [N * K, K, 1], [2,
        BN, BK]), bias,
        kernels.TensorDescriptor.from_tensor(y, [BM, BN]), M, N, K, 8 if K < 1280 else 16, BM=BM, BN=BN, BK=BK,
        FAST=fast,
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


def softmax(x, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """softmax(scale x) over the last axis of fp32 [..., N], in dtype."""
    x = x.contiguous()
    y, N = torch.empty_like(x, dtype=dtype), x.shape[-1]
    BC = _power(N)
    launch(kernels._softmax, (x.numel() // N,), x, y, N, scale, BC=BC, num_warps=min(16, max(1, BC // 512)))
    return y
