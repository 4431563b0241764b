"""Optimizers beside AdamW: SGD, Lion, Adafactor, Muon, Prodigy, schedule-free AdamW; and weights kept in bf16.

Each is a torch.optim.Optimizer, so that its state is saved and loaded as AdamW's is. Unlike torch's, their step() takes
gradients that lie elsewhere than in `p.grad` (those of bf16 copies, sums over processes) and what to multiply these by;
it computes in fp32, and its state is fp32, whatever the weights' dtype. A group counts its own `steps`.
"""

import math
from collections.abc import Iterator

import torch
from torch import nn

Gradients = dict[nn.Parameter, torch.Tensor] | None  # None: they are in p.grad


OTHER_SHAPES = {"rows", "columns", "exp_avg_max", "exp_avg_sq_max"}  # in states; what else is there is as the weight is


def in_memory(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a dense tensor in the order of its memory, [numel], a view."""
    return x.as_strided((x.numel(),), (1,))


# ----------------------------------------------------------------------------------------------------------------
# Weights in bf16
# ----------------------------------------------------------------------------------------------------------------

WORD = 0xFFFFFFFF


def mixed(x: int) -> int:
    """32 bits from 32 bits, one to one, each of which depends on all (lowbias32 of C. Wellons' search for such
    functions, nullprogram.com/blog/2018/07/31). sd/kernels.py has the same as _mixed."""
    x = (x ^ x >> 16) * 0x7FEB352D & WORD
    x = (x ^ x >> 15) * 0x846CA68B & WORD
    return x ^ x >> 16


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """mixed(), of an int32 tensor; in place."""
    x ^= (x >> 16) & 0xFFFF  # the sign bit moves down with the others, and is cut off
    x *= 0x7FEB352D
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x846CA68B - (1 << 32)
    return x.bitwise_xor_((x >> 16) & 0xFFFF)


def signed(x: int) -> int:
    """The int32 with these 32 bits."""
    return x - (1 << 32) if x >> 31 else x


def rounding_key(seed: int, step: int) -> int:
    """32 bits that decide how the weights of a step are rounded."""
    return mixed(mixed(seed & WORD) ^ step)


def rounded(x: torch.Tensor, key: int, number: int) -> torch.Tensor:
    """fp32 to bf16, up or down at random, so that the mean over many roundings is x: a change far smaller than bf16's
    spacing, which rounding to the nearest would lose, is not lost (Zamirai et al. 2020, arXiv:2010.06192).

    The random bits are a function of the key, the tensor's number and the place in its memory, the same on all devices.
    """
    places = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    noise = _mixed(places.bitwise_xor_(signed(mixed(key ^ number)))).bitwise_and_(0xFFFF)
    bits = in_memory(x).view(torch.int32).add(noise).bitwise_and_(-0x10000)
    out = torch.empty_like(x, dtype=torch.bfloat16)
    in_memory(out).copy_(bits.view(torch.float32))
    return out


# ----------------------------------------------------------------------------------------------------------------
# One step
# ----------------------------------------------------------------------------------------------------------------


def _gradient(p: nn.Parameter, scale, gradients: Gradients) -> torch.Tensor | None:
    """Times scale, fp32; not to be changed, as it may be the gradient itself."""
    g = p.grad if gradients is None else gradients[p]
    return None if g is None else g.float() if isinstance(scale, float) and scale == 1 else g.float() * scale


def each_weight(optimizer, scale=1.0, gradients: Gradients = None) -> Iterator[tuple]:
    """(parameter, group, weight, gradient, state) of each one that has a gradient, for one step: weight and gradient in
    fp32 and of one layout. The weight is to be changed in place; that of a parameter kept in bf16 is then rounded. The
    gradient is not to be changed."""
    number = 0
    for group in optimizer.param_groups:
        group["steps"] += 1
        for p in group["params"]:
            number += 1
            g = _gradient(p, scale, gradients)
            if g is None:
                continue
            w = p.detach().float()  # the weight itself, if it is fp32
            if g.stride() != w.stride():
                g = torch.empty_like(w).copy_(g)
            yield p, group, w, g, optimizer.state[p]
            if p.dtype != w.dtype:
                p.detach().copy_(rounded(w, rounding_key(group["seed"], group["steps"]), number))


def adamw_(w, g, m, v, group: dict):
    """Loshchilov & Hutter 2017, arXiv:1711.05101, algorithm 2, in place."""
    (beta1, beta2), lr, t = group["betas"], group["lr"], group["steps"]
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    w.mul_(1 - lr * group["weight_decay"])
    w.addcdiv_(m, (v / (1 - beta2**t)).sqrt_().add_(group["eps"]), value=-lr / (1 - beta1**t))


class SGD(torch.optim.Optimizer):
    """With momentum: m = momentum m + g, w -= lr m; weight decay is a part of the gradient, as in torch's."""

    def __init__(self, params, lr: float, weight_decay: float, momentum: float = 0.9, seed: int = 0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, seed=seed, steps=0))

    @torch.no_grad()
    def step(self, scale=1.0, gradients: Gradients = None):
        for _, group, w, g, state in each_weight(self, scale, gradients):
            if not state:
                state["momentum"] = torch.zeros_like(w)
            state["momentum"].mul_(group["momentum"]).add_(g).add_(w, alpha=group["weight_decay"])
            w.sub_(state["momentum"], alpha=group["lr"])


class Lion(torch.optim.Optimizer):
    """The sign of a momentum (Chen et al. 2023, arXiv:2302.06675, algorithm 2). Every number of a weight changes by lr,
    so that it wants a third to a tenth of AdamW's lr, and that much more weight decay."""

    def __init__(self, params, lr: float, weight_decay: float, betas=(0.9, 0.99), seed: int = 0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, seed=seed, steps=0))

    @torch.no_grad()
    def step(self, scale=1.0, gradients: Gradients = None):
        for _, group, w, g, state in each_weight(self, scale, gradients):
            if not state:
                state["exp_avg"] = torch.zeros_like(w)
            m, (beta1, beta2) = state["exp_avg"], group["betas"]
            w.mul_(1 - group["lr"] * group["weight_decay"])
            w.sub_(torch.lerp(m, g, 1 - beta1).sign_(), alpha=group["lr"])
            m.lerp_(g, 1 - beta2)


class Adafactor(torch.optim.Optimizer):
    """Squares of gradients kept as the means of rows and of columns (Shazeer & Stern 2018, arXiv:1804.04235, algorithms
    4 and 5), with the learning rate as it is given, no momentum, and updates of an RMS of at most 1.

    A conv kernel [out, in, k, k] is the matrix [out, in k k]. torch.optim.Adafactor factors its last two axes, 3 x 3,
    which saves half and not nearly all, multiplies the learning rate by the weights' RMS, and waits for the device
    three times a weight.
    """

    def __init__(self, params, lr: float, weight_decay: float, seed: int = 0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, seed=seed, steps=0))

    @torch.no_grad()
    def step(self, scale=1.0, gradients: Gradients = None):
        for _, group, w, g, state in each_weight(self, scale, gradients):
            squares, forget = g.square().add_(1e-30), group["steps"] ** -0.8  # eps_1; 1 - beta_2 of this step
            if w.ndim > 1:
                squares = squares.flatten(1)  # [out, in k k]
                if not state:
                    state["rows"], state["columns"] = squares.new_zeros(len(w)), squares.new_zeros(squares.shape[1])
                rows = state["rows"].lerp_(squares.mean(1), forget)
                columns = state["columns"].lerp_(squares.mean(0), forget)
                update = g * ((rows / rows.mean()).rsqrt_()[:, None] * columns.rsqrt()).view(g.shape)
            else:
                if not state:
                    state["squares"] = torch.zeros_like(w)
                update = g * state["squares"].lerp_(squares, forget).rsqrt()
            update.div_(update.square().mean().sqrt_().clamp_(min=1.0))
            w.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    For conv kernels [out, in, k, k], taken as matrices [out, in k k]: all singular values of the update become about 1,
    so that directions with small gradients move too. Everything else (biases, norms) belongs to AdamW.
    """

    def __init__(self, params, lr: float, weight_decay: float, momentum: float = 0.95):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum))

    @torch.no_grad()
    def step(self):
        """As torch's fused AdamW does, leaves everything as it is if the attribute found_inf, a number on the device,
        is given and not 0. The device is not waited for."""
        found_inf = getattr(self, "found_inf", None)
        skip = None if found_inf is None else found_inf.bool()
        for group in self.param_groups:
            for params in self._alike(group["params"]):
                self._update(params, group, skip)

    @staticmethod
    def _alike(params: list[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Those whose matrices have one shape, to be orthogonalised together: a GPU has little to do with one. Each
        alone on other devices, where products of several would be rounded in another way than runs began with."""
        shapes = {}
        for i, p in enumerate(params):
            shapes.setdefault((len(p), p[0].numel()) if p.is_cuda else i, []).append(p)
        return list(shapes.values())

    def _update(self, params: list[nn.Parameter], group: dict, skip: torch.Tensor | None):
        """One step of weights whose matrices have one shape."""
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        momenta, gradients = [self.state[p]["momentum"] for p in params], [p.grad for p in params]
        shrink = 1 - group["lr"] * group["weight_decay"]
        if skip is not None:
            gradients = [torch.where(skip, m, g) for m, g in zip(momenta, gradients)]  # so that momenta stay
            shrink = torch.where(skip, 1.0, shrink).to(params[0].dtype)
        torch._foreach_lerp_(momenta, gradients, 1 - group["momentum"])
        updates = [u.flatten(1) for u in torch._foreach_lerp(gradients, momenta, group["momentum"])]  # Nesterov's
        matrices = orthogonalised(torch.stack(updates) if len(updates) > 1 else updates[0])
        gain = max(1.0, matrices.shape[-2] / matrices.shape[-1]) ** 0.5  # the same change per output, tall or wide
        if skip is not None:
            matrices = torch.where(skip, 0.0, matrices)
        changes = [m.view_as(p) for m, p in zip(matrices.view(len(params), *updates[0].shape), params)]
        torch._foreach_mul_(params, shrink)
        torch._foreach_sub_(params, changes, alpha=group["lr"] * gain)


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix, roughly: singular values to 0.7..1.2 by five Newton-Schulz steps. [M, N], or
    several [K, M, N]."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.mT if tall else matrix
    x = x / ((x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


class MuonAdamW(torch.optim.Optimizer):
    """Muon for the groups with `muon`, AdamW for the others, at one learning rate: Muon's updates are scaled to the RMS
    that AdamW's have, 0.2 (Liu et al. 2025, arXiv:2502.16982, section 2.2)."""

    def __init__(self, params, lr: float, weight_decay: float, betas=(0.9, 0.999), momentum=0.95, seed: int = 0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=1e-8, momentum=momentum,
                                      muon=False, seed=seed, steps=0))  # fmt: skip

    @torch.no_grad()
    def step(self, scale=1.0, gradients: Gradients = None):
        for _, group, w, g, state in each_weight(self, scale, gradients):
            if not group["muon"]:
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(w), torch.zeros_like(w)
                adamw_(w, g, state["exp_avg"], state["exp_avg_sq"], group)
                continue
            if not state:
                state["momentum"] = torch.zeros_like(w)
            m = state["momentum"].lerp_(g, 1 - group["momentum"])
            update = torch.lerp(g, m, group["momentum"]).flatten(1)  # Nesterov's; [out, in k k]
            update = orthogonalised(update.bfloat16() if w.is_cuda else update)  # five times as fast there
            gain = 0.2 * max(update.shape) ** 0.5
            w.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update.view(w.shape), alpha=group["lr"] * gain)


class Prodigy(torch.optim.Optimizer):
    """AdamW that finds its own step size (Mishchenko & Defazio 2023, arXiv:2306.06101, algorithm 4): d grows to an
    estimate of how far the weights are from where they are going. `lr`, the same for all groups, multiplies it: 1.

    As in the authors' program with safeguard_warmup, lr is left out of the sums that d is divided by, or a warm-up
    would make d too large.
    """

    def __init__(self, params, lr: float, weight_decay: float, betas=(0.9, 0.999), seed: int = 0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=1e-8, d0=1e-6, d=1e-6,
                                      numerator=0.0, seed=seed, steps=0))  # fmt: skip

    @torch.no_grad()
    def step(self, scale=1.0, gradients: Gradients = None):
        first, tops, bottoms = self.param_groups[0], [], []
        if any(group["lr"] != first["lr"] for group in self.param_groups):
            raise ValueError("Prodigy has one step size for all weights: all groups want the same lr")
        (beta1, beta2), d, d0, lr = first["betas"], first["d"], first["d0"], first["lr"]
        beta3 = math.sqrt(beta2)
        for p in (p for group in self.param_groups for p in group["params"]):
            g, w, state = _gradient(p, scale, gradients), p.detach().float(), self.state[p]
            if g is None:
                continue
            if not state:
                state["start"] = w.clone()
                state |= {name: torch.zeros_like(w) for name in ("exp_avg", "exp_avg_sq", "sum")}
            tops.append((g * (state["start"] - w)).sum())
            bottoms.append(state["sum"].mul_(beta3).add_(g, alpha=d / d0 * d).abs().sum())
        if not tops:
            return
        top, bottom = torch.stack([torch.stack(tops), torch.stack(bottoms)]).double().sum(1).tolist()
        first["numerator"] = beta3 * first["numerator"] + d / d0 * d * lr * top
        if bottom:  # else there is no gradient yet
            first["d"] = max(d, first["numerator"] / bottom)
        for _, group, w, g, state in each_weight(self, scale, gradients):
            m, v = state["exp_avg"], state["exp_avg_sq"]
            m.mul_(beta1).add_(g, alpha=d * (1 - beta1))
            v.mul_(beta2).addcmul_(g, g, value=d * d * (1 - beta2))
            w.mul_(1 - d * lr * group["weight_decay"])
            w.addcdiv_(m, v.sqrt().add_(first["d"] * group["eps"]), value=-d * lr)


class ScheduleFree(torch.optim.Optimizer):
    """AdamW whose average of the weights takes the place of a falling learning rate (Defazio et al. 2024,
    arXiv:2405.15682, algorithm 1; each step's weight in the average is the square of the largest lr so far).

    Its x, which is to be used, is where the EMA of other optimizers is: `averages`, to be set, has it for each weight.
    So it is saved, validated and painted as these are, and nothing has to be switched between training and use. The
    weights are its y, at which gradients are taken; its z is in the state.
    """

    averages: dict[nn.Parameter, torch.Tensor]

    def __init__(self, params, lr: float, weight_decay: float, betas=(0.9, 0.999), seed: int = 0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=1e-8, largest=0.0, total=0.0,
                                      seed=seed, steps=0))  # fmt: skip
        for group in self.param_groups:
            for p in group["params"]:
                z = p.detach().float().clone()
                self.state[p] |= {"z": z, "exp_avg_sq": torch.zeros_like(z)}

    @torch.no_grad()
    def step(self, scale=1.0, gradients: Gradients = None):
        for group in self.param_groups:
            group["largest"] = max(group["largest"], group["lr"])
            group["total"] += group["largest"] ** 2
        for p, group, w, g, state in each_weight(self, scale, gradients):
            (beta1, beta2), lr, z, v = group["betas"], group["lr"], state["z"], state["exp_avg_sq"]
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            change = g / (v / (1 - beta2 ** group["steps"])).sqrt_().add_(group["eps"])
            z.sub_(change.add_(w, alpha=group["weight_decay"]), alpha=lr)
            x = self.averages[p].lerp_(z, group["largest"] ** 2 / group["total"] if group["total"] else 1.0)
            w.copy_(torch.lerp(z, x, beta1))
