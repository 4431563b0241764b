"""Triton kernels for NVIDIA GPUs, and how they are compiled and launched. sd/fused_ops.py gives them gradients.

Their names begin with an underscore, by which a trace tells them from torch's own kernels.
"""

import contextvars
import os
from concurrent.futures import ThreadPoolExecutor

import torch
from torch._subclasses.fake_tensor import FakeTensor

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: F401  (used as kernels.TensorDescriptor)
except ImportError:  # a CPU build of torch
    triton = None

GEGLU_TILE = 128, 128, 64  # tokens, channels and inputs of a tile of _geglu_product


def available(device: torch.device) -> bool:
    """Whether the kernels run on a device: an NVIDIA GPU with bf16 (Ampere, 2020) or later, and Triton there."""
    return (
        triton is not None
        and device.type == "cuda"
        and torch.version.cuda is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


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
        table [6, K]: addresses of weights, two moments, averages and bf16 copies (0: none of them), and sizes; rates
        [2, K]: multiples of lr, weight decays; grads [2, K]: addresses of gradients, and whether they are bf16, else
        fp32; chunks [.., 2]: tensor and block in it, of which the first program takes number begin."""
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
        averaged = mask & (tl.load(table + 3 * K + k) + none != 0)
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
        e = tl.load(e_at, mask=averaged, other=0.0)
        tl.store(p_at, p, mask=mask)
        tl.store(m_at, m, mask=mask)
        tl.store(v_at, v, mask=mask)
        tl.store(e_at, e + (1.0 - decay) * (p - e), mask=averaged)
        tl.store(tl.multiple_of(half.to(bf16), 16) + i, p.to(tl.bfloat16), mask=mask & copied)

    @triton.jit
    def _mixed(x):
        """mixed() of sd/optimizers.py, of uint32."""
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def _rounded(x, i, key):
        """rounded() of sd/optimizers.py, of a tensor's numbers i, still as fp32."""
        noise = _mixed(i.to(tl.uint32) ^ key) & 0xFFFF
        return ((x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)

    @triton.jit
    def _moment(at, max_at, values, i, mask, short, rows):
        """Numbers of a moment, [R, 256] fp32: in 8 bits where short, with each row's largest beside them."""
        codes = tl.load(at.to(tl.pointer_type(tl.uint8)) + i, mask=mask & short, other=0)
        largest = tl.load(max_at.to(tl.pointer_type(tl.float32)) + rows, mask=rows >= 0, other=0.0)
        x = tl.load(values + codes.to(tl.int32)) * largest[:, None]
        return tl.where(short, x, tl.load(at.to(tl.pointer_type(tl.float32)) + i, mask=mask & (short == 0), other=0.0))

    @triton.jit
    def _keep_moment(x, at, max_at, borders, i, mask, short, rows, SIGN: tl.constexpr):
        """As encode() of sd/adam8bit.py, or in fp32; where _moment found it."""
        tl.store(at.to(tl.pointer_type(tl.float32)) + i, x, mask=mask & (short == 0))
        x = tl.minimum(x, 3.4028234663852886e38)
        largest = tl.max(tl.where(mask, tl.abs(x), 0.0), 1)
        share = x / tl.where(largest > 0, largest, 1.0)[:, None]
        code = tl.zeros(x.shape, tl.int32)
        for power in tl.static_range(8):  # how many of the 255 borders are below
            higher = code + (128 >> power)
            code = tl.where(share > tl.load(borders + higher - 1), higher, code)
        if not SIGN:
            code = tl.where(x > 0, tl.maximum(code, 1), code)
        tl.store(at.to(tl.pointer_type(tl.uint8)) + i, code.to(tl.uint8), mask=mask & short)
        tl.store(max_at.to(tl.pointer_type(tl.float32)) + rows, largest, mask=rows >= 0)

    @triton.jit(do_not_specialize=["begin", "key"])
    def _adamw8bit(table, rates, grads, chunks, maps, begin, norm, limit, lr, beta1, beta2, eps, correction1,
                   correction2, decay, key, K, ROWS: tl.constexpr):  # fmt: skip
        """As _adamw, for ROWS blocks of 256 numbers of one of K tensors, whose moments may be in 8 bits, and weights in
        bf16. table [10, K]: as there, then addresses of the moments' blocks' largest values (0: fp32 moments), whether
        weights are bf16, and the tensor's number; maps [4, 256]: values of the first moment and borders between them,
        and of the second; key: 32 bits for rounding at random."""
        at = chunks + 2 * (begin + tl.program_id(0))
        k, first = tl.load(at), tl.load(at + 1) * ROWS
        rows = first + tl.arange(0, ROWS)
        i = rows[:, None] * 256 + tl.arange(0, 256)[None, :]
        none = tl.zeros([ROWS, 256], tl.int32)
        n = tl.load(norm + none)
        scale = tl.minimum(1.0, limit / (n + 1e-6))
        size = tl.load(table + 5 * K + k)
        mask = (i < size) & (n < float("inf"))
        fp32 = tl.pointer_type(tl.float32)
        bf16 = tl.pointer_type(tl.bfloat16)
        p_at = tl.multiple_of(tl.load(table + k), 16)  # addresses
        e_at = tl.multiple_of(tl.load(table + 3 * K + k), 16)
        half = tl.multiple_of(tl.load(table + 4 * K + k), 16)
        m_at = tl.multiple_of(tl.load(table + K + k), 16)
        m_max = tl.load(table + 6 * K + k)
        v_at = tl.multiple_of(tl.load(table + 2 * K + k), 16)
        v_max = tl.load(table + 7 * K + k)
        short = m_max + none != 0
        there = (rows * 256 < size) & (m_max + rows * 0 != 0) & (tl.load(norm + rows * 0) < float("inf"))
        rows = tl.where(there, rows, -1)  # of which the largest values are kept
        p_short, g_short = tl.load(table + 8 * K + k) + none != 0, tl.load(grads + K + k) + none != 0
        g_at = tl.multiple_of(tl.load(grads + k), 16)
        rate, weight_decay = lr * tl.load(rates + k), tl.load(rates + K + k)
        g = tl.load(g_at.to(bf16) + i, mask=mask & g_short, other=0.0).to(tl.float32)
        g += tl.load(g_at.to(fp32) + i, mask=mask & (g_short == 0), other=0.0)
        g *= scale
        p = tl.load(p_at.to(bf16) + i, mask=mask & p_short, other=0.0).to(tl.float32)
        p += tl.load(p_at.to(fp32) + i, mask=mask & (p_short == 0), other=0.0)
        m = _moment(m_at, m_max, maps, i, mask, short, rows)
        v = _moment(v_at, v_max, maps + 512, i, mask, short, rows)
        m += (1.0 - beta1) * (g - m)
        v = beta2 * v + (1.0 - beta2) * g * g
        p -= rate * weight_decay * p
        p -= rate / correction1 * m / (tl.sqrt(v) / tl.sqrt(correction2) + eps)
        own = _mixed((key ^ tl.load(table + 9 * K + k).to(tl.int32)).to(tl.uint32))
        p = tl.where(p_short, _rounded(p, i, own), p)
        averaged = mask & (e_at + none != 0)
        e = tl.load(e_at.to(fp32) + i, mask=averaged, other=0.0)
        tl.store(e_at.to(fp32) + i, e + (1.0 - decay) * (p - e), mask=averaged)
        tl.store(p_at.to(bf16) + i, p.to(tl.bfloat16), mask=mask & p_short)
        tl.store(p_at.to(fp32) + i, p, mask=mask & (p_short == 0))
        tl.store(half.to(bf16) + i, p.to(tl.bfloat16), mask=mask & (half + none != 0))
        _keep_moment(m, m_at, m_max, maps + 256, i, mask, short, rows, True)
        _keep_moment(v, v_at, v_max, maps + 768, i, mask, short, rows, False)


def floats(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float32, device=like.device)


_compiling = None  # the context in which to compile kernels instead of launching them


def launch(kernel, grid: tuple, *args, **constants):
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
