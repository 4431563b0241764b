"""Parameter groups, learning rate, averages of the weights, and the optimizers."""

import math
from functools import partial

import torch
from torch import nn

from sd import kernels
from sd.errors import InputError
from sd.objective import Denoiser


def strides(x: torch.Tensor) -> list[int]:
    """Those that matter: a 1x1 kernel lies alike in channels_last and not."""
    return [step for step, size in zip(x.stride(), x.shape) if size > 1]


def total_norm(grads: list[torch.Tensor]) -> torch.Tensor:
    """Of gradients in fp32 and bf16 together, fp32."""
    kinds = ([g for g in grads if g.dtype == kind] for kind in (torch.float32, torch.bfloat16))
    norms = [n for kind in kinds if kind for n in torch._foreach_norm(kind, 2, dtype=torch.float32)]
    return torch.linalg.vector_norm(torch.stack(norms))


def gradient_of(p: nn.Parameter) -> torch.Tensor | None:
    """Where the last backward pass left it."""
    copy = getattr(p, "copy_bf16", None)
    return p.grad if copy is None else copy.gradient


def check_all_trained(parameters):
    """InputError if a weight has no gradient."""
    shapes = sorted({tuple(p.shape) for p in parameters if gradient_of(p) is None})
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


def gradient_norm(parameters, shared) -> torch.Tensor:
    """Of all gradients together, fp32; with `shared`, of those that processes have added up. InputError if a weight has
    none."""
    if shared is not None:
        return shared.way.norm()
    check_all_trained(parameters)
    return total_norm([gradient_of(p) for p in parameters])


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
                 accumulates: bool = False, shared=None):  # fmt: skip
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
        for bucket, parts in self.shared.shares() if self.shared else [(None, whole_of(self.parameters))]:
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
        grads = [gradient_of(p) for p in self.parameters]
        for i, (p, g) in enumerate(zip(self.parameters, grads)):
            if strides(g) != strides(p) or g.data_ptr() % 16:  # a slice of another gradient may lie anywhere
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
                kernels._adamw[(programs,)](
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


def whole_of(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, int, int]]:
    """Weights, where what is to be updated of them begins, and how many numbers it has: all."""
    return [(p, 0, p.numel()) for p in parameters]


def ema_decay(decay: float, updates: int) -> float:
    """Decay of the next update: warms up as (1 + n) / (10 + n) after n updates."""
    return min(decay, (1 + updates) / (10 + updates))


@torch.no_grad()
def update_ema(ema: list[torch.Tensor], live: list[torch.Tensor], decay: float):
    """ema = decay ema + (1 - decay) live, in fp32, in place."""
    torch._foreach_lerp_(ema, live, 1 - decay)


def lr_at(step: int, total: int, settings: dict, done: float | None = None) -> float:
    """Learning rate of optimizer step `step` (from 0): up from 1 % over the warm-up, then to 1 % at the last step.
    done: how much of the run is over, from 0 to 1, where its time ends it and not its steps."""
    peak, warmup = settings["lr"], settings["warmup"]
    if step < warmup:
        return peak * (0.01 + 0.99 * step / warmup)
    if settings["lr_schedule"] == "constant":
        return peak
    if done is None:
        done = (step - warmup) / max(1, total - 1 - warmup)
    return peak * fallen(done, settings["lr_schedule"])


def fallen(done: float, schedule: str = "cosine") -> float:
    """The learning rate after the warm-up, as a share of its peak: 1 at done = 0, 0.01 from done = 1 on. done: how much
    of the steps behind the warm-up is over; schedule: 'cosine' or 'linear'."""
    done = min(1.0, done)
    return 0.01 + 0.99 * (0.5 * (1 + math.cos(math.pi * done)) if schedule == "cosine" else 1 - done)


def make_optimizer(denoiser: Denoiser, settings: dict) -> torch.optim.AdamW:
    """AdamW. Matrices and kernels decay, biases and norms do not; the text encoder has its own multiple of the lr."""
    groups = []
    for part, scale in (("unet", 1.0), ("text_encoder", settings["text_lr"])):
        for decays in (True, False):
            params = [p for p in denoiser.trained(part) if (p.ndim > 1) == decays]
            if params:
                groups.append({"params": params, "weight_decay": settings["decay"] * decays, "lr_scale": scale})
    fused = next(denoiser.parameters()).device.type in ("cuda", "cpu")
    return torch.optim.AdamW(
        groups, lr=settings["lr"], betas=(settings["beta1"], settings["beta2"]), eps=1e-8, fused=fused
    )


def clip_limit(settings: dict, usual_norm: float) -> float:
    """The largest gradient norm let through: --clip, and --adaptive_clip times the usual norm (0: none yet)."""
    limits = [settings["clip"], settings["adaptive_clip"] * usual_norm]
    return min((limit for limit in limits if limit), default=math.inf)


def set_lr(optimizer: torch.optim.Optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]


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
