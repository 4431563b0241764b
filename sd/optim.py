"""Parameter groups, learning rate, averages of the weights, the choice of an optimizer, and AdamW in one pass."""

import math
from functools import partial

import torch
from torch import nn

from sd import kernels
from sd.adam8bit import SIZE, SMALLEST, AdamW8bit, blocks_of, borders
from sd.errors import InputError
from sd.objective import Denoiser
from sd.optimizers import (
    SGD,
    Adafactor,
    Lion,
    MuonAdamW,
    Prodigy,
    ScheduleFree,
    rounding_key,
    signed,
)


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


def copy_weights(parameters: list[nn.Parameter], half, accumulates: bool, shared):
    """Give the weights of `half` the bf16 copies that fused blocks multiply with; one that is bf16 itself is its own.
    accumulates: over several backward passes a step. shared: what is told when a copy's gradient is there, or None."""
    half = set(half)
    for p in parameters:
        p.copy_bf16 = p.detach().to(torch.bfloat16) if p in half else None
        if p in half:
            p.copy_bf16.accumulates, p.copy_bf16.gradient = accumulates, None
            p.copy_bf16.arrived = None if shared is None else partial(shared.arrived, p)


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
        """averages: of each of the optimizer's parameters, or of none. A state that is not there yet becomes zeros.
        half: weights from multiplied(), which DDP cannot see the gradients of. accumulates: over several backward
        passes a step."""
        self.shared, self.launches = shared, None
        self.optimizer, self.averages = optimizer, averages  # kept alive, as their addresses are
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._begin()
        for p in self.parameters:
            if any(t.stride() != p.stride() or t.dtype != torch.float32 for t in self._tensors(p)):
                raise ValueError("weights, moments and averages must lie alike in memory, in fp32")
        copy_weights(self.parameters, half, accumulates, shared)

    def _begin(self):
        device, counts = self.parameters[0].device, []
        for p in self.parameters:
            state = self.optimizer.state[p]
            if not state:
                state["step"] = torch.zeros((), device=device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            counts.append(state["step"])
        self.count = counts[0].to(device)  # of steps taken, one tensor for all
        for p in self.parameters:
            self.optimizer.state[p]["step"] = self.count
        self.done = int(self.count)

    def _tensors(self, p: nn.Parameter) -> list[torch.Tensor]:
        """A weight, its two moments and its average, if it has one."""
        state = self.optimizer.state[p]
        return [p.detach(), state["exp_avg"], state["exp_avg_sq"], *([self.averages[p]] if self.averages else [])]

    def _row(self, p: nn.Parameter, start: int, size: int) -> list[int]:
        """A column of the kernel's table, for so many of a weight's numbers."""
        copy = 0 if p.copy_bf16 is None else p.copy_bf16.data_ptr() + 2 * start
        return [*[*(t.data_ptr() + 4 * start for t in self._tensors(p)), 0][:4], copy, size]

    def _plan(self):
        """Tables for the kernel, after the first backward pass, when it is known what is whose to update."""
        group_of = {p: group for group in self.optimizer.param_groups for p in group["params"]}
        rows, rates, chunks, self.launches = [], [], [], []
        for bucket, parts in self.shared.shares() if self.shared else [(None, whole_of(self.parameters))]:
            begin = len(chunks)
            for p, start, size in parts:
                chunks += [[len(rows), i] for i in range(-(-size // self.BLOCK))]
                rows.append(self._row(p, start, size))
                rates.append([group_of[p]["lr_scale"], group_of[p]["weight_decay"]])
            self.launches.append((begin, len(chunks) - begin, bucket))
        device = self.parameters[0].device
        self.table = torch.tensor(rows, device=device).t().contiguous()  # [6, K]
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
                arguments = begin, norm, float(limit), lr, beta1, beta2, eps, *corrections, decay
                self._launch(programs, addresses, arguments)
            if bucket:
                self.shared.way.spread(bucket)
        if self.shared:
            self.shared.way.wait()
        self._count(norm)

    def _launch(self, programs: int, addresses: torch.Tensor, arguments: tuple):
        kernels._adamw[(programs,)](self.table, self.rates, addresses, self.chunks, *arguments, addresses.shape[1],
                                    BLOCK=self.BLOCK, num_warps=self.WARPS)  # fmt: skip

    def _count(self, norm: torch.Tensor):
        self.count += norm.isfinite()

    def skipped(self):
        self.done -= 1

    @torch.no_grad()
    def complete(self):
        """Weights, moments and averages as a whole in every process. All call this at once."""
        for bucket in self.shared.buckets if self.shared else ():
            if bucket.split:
                self.shared.way.complete(bucket, self._tensors)


class FusedStep8bit(FusedStep):
    """The same of an AdamW8bit, whose moments are in 8 bits or fp32, and whose weights are in fp32 or bf16. All
    processes update all weights."""

    BLOCK, WARPS = 4 * SIZE, 4

    def _begin(self):
        self.done = self.optimizer.param_groups[0]["steps"]
        device = self.parameters[0].device
        self.number = {p: i for i, p in enumerate(self.parameters, 1)}
        inf = torch.full((1,), math.inf, device=device)
        self.maps = torch.cat([x for m in self.optimizer.maps[device] for x in (m, borders(m), inf)])  # [4 x 256]

    def _tensors(self, p: nn.Parameter) -> list[torch.Tensor]:
        return self.averages and [self.averages[p]] or []

    def _row(self, p, start, size):
        state, own = self.optimizer.state[p], p.dtype == torch.bfloat16
        moments = [state["exp_avg"], state["exp_avg_sq"]]
        if any(t.stride() != p.stride() for t in moments):
            raise ValueError("weights and moments must lie alike in memory")
        copy = 0 if own or p.copy_bf16 is None else p.copy_bf16.data_ptr()
        average = self.averages[p].data_ptr() if self.averages else 0
        names = "exp_avg_max", "exp_avg_sq_max"
        largest = [state[name].data_ptr() if name in state else 0 for name in names]
        return [p.data_ptr(), *(t.data_ptr() for t in moments), average, copy, size, *largest, own, self.number[p]]

    def _launch(self, programs, addresses, arguments):
        group = self.optimizer.param_groups[0]
        key = signed(rounding_key(group["seed"], self.done))
        kernels._adamw8bit[(programs,)](self.table, self.rates, addresses, self.chunks, self.maps, *arguments, key,
                                        addresses.shape[1], ROWS=self.BLOCK // SIZE, num_warps=self.WARPS)  # fmt: skip

    def _count(self, norm):
        for group in self.optimizer.param_groups:
            group["steps"] = self.done

    def skipped(self):
        super().skipped()
        self._count(None)


def whole_of(parameters: list[nn.Parameter]) -> list[tuple[nn.Parameter, int, int]]:
    """Weights, where what is to be updated of them begins, and how many numbers it has: all."""
    return [(p, 0, p.numel()) for p in parameters]


def ema_decay(decay: float, updates: int) -> float:
    """Decay of the next update: warms up as (1 + n) / (10 + n) after n updates."""
    return min(decay, (1 + updates) / (10 + updates))


@torch.no_grad()
def update_ema(ema: list[torch.Tensor], live: list[torch.Tensor], decay: float):
    """ema = decay ema + (1 - decay) live, in fp32, in place."""
    if all(p.dtype == torch.float32 for p in live):
        torch._foreach_lerp_(ema, live, 1 - decay)
    else:
        for e, p in zip(ema, live):
            e.lerp_(p.float(), 1 - decay)


class FarAverage:
    """Averages in the CPU's memory of weights on a device: update_ema, one weight after the other, through one buffer.
    The device is waited for at each of them."""

    def __init__(self, averages: list[torch.Tensor], live: list[torch.Tensor]):
        """Both lie alike in memory, weight for weight; averages in fp32."""
        self.averages, self.live, cuda = averages, live, live[0].is_cuda
        self.buffer = torch.empty(max(p.numel() for p in live), dtype=torch.float32, pin_memory=cuda)

    @torch.no_grad()
    def update(self, decay: float):
        for e, p in zip(self.averages, self.live):
            e.lerp_(self.buffer[: p.numel()].as_strided(p.shape, p.stride()).copy_(p.detach()), 1 - decay)


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


OPTIMIZERS = "adamw adamw8bit adafactor sgd lion muon prodigy schedulefree".split()


def check_optimizer(args, settings: dict, begins: bool):
    """InputError if --optimizer does not go with the other flags; a run that begins gets what suits its optimizer where
    no flag says otherwise. args: the flags alone, of which those not given are None."""
    name = settings["optimizer"]
    if begins:
        if name == "prodigy" and args.lr is None:
            settings["lr"] = 1.0
        if name == "lion" and args.beta2 is None:
            settings["beta2"] = 0.99
        if name == "schedulefree" and args.lr_schedule is None:
            settings["lr_schedule"] = "constant"
    if name == "prodigy" and not 0.1 <= settings["lr"] <= 10:
        raise InputError(
            f"--optimizer prodigy finds the learning rate itself, and --lr multiplies it: 1, or 0.1 to 10, was wanted, "
            f"found {settings['lr']:g}"
        )
    if name == "prodigy" and settings["train_text_encoder"] and settings["text_lr"] != 1:
        raise InputError(
            "--optimizer prodigy has one step size for all weights, and --text_lr would give the text encoder another "
            f"({settings['text_lr']:g}); add --text_lr 1"
        )
    if name == "schedulefree" and settings["no_ema"]:
        raise InputError("--optimizer schedulefree keeps its average where the EMA is: drop --no_ema")
    if settings["lora"] and settings["no_ema"]:
        raise InputError("--no_ema saves next to nothing with --lora, whose average is of the adapter alone: drop it")
    if settings["lora"] and settings["weights_dtype"] == "bf16":
        raise InputError(
            "--weights_dtype bf16 is of weights that are trained, and those of an adapter stay in fp32: drop it (with "
            "--dtype bf16 the others are in bf16 anyway), or --lora"
        )
    if settings["ema_on_cpu"]:
        if settings["no_ema"] or name == "schedulefree":
            other = "--no_ema" if settings["no_ema"] else "--optimizer schedulefree"
            raise InputError(f"--ema_on_cpu is of an EMA, and {other} has none: drop one of them")
        if settings["lora"]:
            raise InputError("--ema_on_cpu saves next to nothing with --lora, whose average is of the adapter: drop it")
    if args.ema is not None and settings["no_ema"]:
        raise InputError("--no_ema keeps no average, whose decay --ema would be: drop one of them")
    if args.ema is not None and name == "schedulefree":
        raise InputError("--optimizer schedulefree has an average of its own: drop --ema")
    if settings["weights_dtype"] == "bf16" and settings["dtype"] == "fp32":
        raise InputError(
            "--weights_dtype bf16 wants products in bf16 too, found --dtype fp32 (the default where there is no NVIDIA "
            "GPU); add --dtype bf16"
        )


def kept_short(net: nn.Module, settings: dict) -> list[nn.Parameter]:
    """The trained weights that --weights_dtype bf16 is about: those of convolutions and products. Biases, norms and
    embeddings, which are few, stay in fp32."""
    if settings["weights_dtype"] == "fp32":
        return []
    weights = [m.weight for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    return [w for w in weights if w.requires_grad]


def cast_weights(net: nn.Module, settings: dict):
    """Trained weights to settings["weights_dtype"], in place."""
    for p in kept_short(net, settings):
        p.data = p.data.to(torch.bfloat16)


def embeddings(net: nn.Module) -> set[nn.Parameter]:
    """Tables of vectors, which Muon is not for."""
    return {m.weight for m in net.modules() if isinstance(m, nn.Embedding)}


def make_optimizer(denoiser: Denoiser, settings: dict) -> torch.optim.Optimizer:
    """The optimizer of what is trained; casts that to settings["weights_dtype"] first. Matrices and kernels decay,
    biases and norms do not; the text encoder has its own multiple of the lr."""
    cast_weights(denoiser, settings)
    name, groups = settings["optimizer"], []
    tables = embeddings(denoiser)
    for part, scale in (("unet", 1.0), ("text_encoder", settings["text_lr"])):
        for decays in (True, False):
            params = [p for p in denoiser.trained(part) if (p.ndim > 1) == decays]
            group = {"params": params, "weight_decay": settings["decay"] * decays, "lr_scale": scale}
            if name == "muon" and decays:
                groups.append(group | {"params": [p for p in params if p not in tables], "muon": True})
                group["params"] = [p for p in params if p in tables]
            groups.append(group)
    groups = [group for group in groups if group["params"]]
    betas = settings["beta1"], settings["beta2"]
    if name == "adamw" and settings["weights_dtype"] == "fp32":
        fused = next(denoiser.parameters()).device.type in ("cuda", "cpu")
        return torch.optim.AdamW(groups, lr=settings["lr"], betas=betas, eps=1e-8, fused=fused)
    common = dict(params=groups, lr=settings["lr"], weight_decay=settings["decay"], seed=settings["seed"])
    if name in ("adamw", "adamw8bit"):
        return AdamW8bit(**common, betas=betas, eight_bits=name == "adamw8bit")
    if name == "sgd":
        return SGD(**common, momentum=settings["beta1"])
    if name == "adafactor":
        return Adafactor(**common)
    kind = {"lion": Lion, "muon": MuonAdamW, "prodigy": Prodigy, "schedulefree": ScheduleFree}[name]
    return kind(**common, betas=betas)


def describe_optimizer(optimizer: torch.optim.Optimizer, denoiser: Denoiser, settings: dict) -> str:
    """One line on what is optimised how."""
    numbers = [(p, g) for g in optimizer.param_groups for p in g["params"]]
    total, state = sum(p.numel() for p, _ in numbers), state_bytes(denoiser, settings)
    line = f"optimizer: {settings['optimizer']}, weights in {settings['weights_dtype']}, state {state / 1e9:.2f} GB"
    if settings["optimizer"] == "muon":
        covered = sum(p.numel() for p, g in numbers if g["muon"])
        line += f"; Muon has {covered / total:.1%} of the numbers, AdamW the rest"
    if settings["optimizer"] == "adamw8bit":
        short = sum(p.numel() for p, _ in numbers if p.numel() >= SMALLEST)
        line += f"; 8 bits for {short / total:.1%} of the numbers, fp32 for the rest"
    return line


def state_bytes(denoiser: Denoiser, settings: dict) -> int:
    """Of the optimizer's state for what is trained."""
    name, tables, total = settings["optimizer"], embeddings(denoiser), 0
    for p in denoiser.trained():
        n = p.numel()
        if name == "adamw8bit" and n >= SMALLEST:
            total += 2 * (n + 4 * blocks_of(n))
        elif name == "adafactor" and p.ndim > 1:
            total += 4 * (len(p) + n // len(p))
        else:
            each = {
                "sgd": 4,
                "lion": 4,
                "adafactor": 4,
                "muon": 4 if p.ndim > 1 and p not in tables else 8,
                "prodigy": 16,
            }
            total += each.get(name, 8) * n
    return total


def clip_limit(settings: dict, usual_norm: float) -> float:
    """The largest gradient norm let through: --clip, and --adaptive_clip times the usual norm (0: none yet)."""
    limits = [settings["clip"], settings["adaptive_clip"] * usual_norm]
    return min((limit for limit in limits if limit), default=math.inf)


def set_lr(optimizer: torch.optim.Optimizer, lr: float):
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
