"""How a training run is doing, step by step: the figures of health.jsonl, by which SD_Doctor.py judges.

All of them are read and none is changed, and nothing random is drawn: a run is the same to the bit with them and
without. Norms are of whole tensors; what compares weights with earlier ones, or with their averages, is estimated from
up to SAMPLED evenly spaced numbers of each tensor, so that no second copy of the weights is held.
"""

import copy
import math

import numpy as np
import pyarrow as pa
import torch

from sd.data import Batch, BucketOrder, Split
from sd.log import Log
from sd.objective import Denoiser, in_autocast
from sd.optim import gradient_of
from sd.plan import Plan
from SD_Model import NoiseSchedule, SpatialTransformer

SAMPLED = 1024  # numbers of a tensor

PROBED = 2  # pictures of the last micro-batch, of which attention and activations are looked at

QUERIES = 64  # pixels whose attention logits are looked at, of each head

NAMED = 20  # tensors or pictures that a line names; of more it gives the number


def block_of(name: str) -> str:
    """The block of a weight of a Denoiser, an adapter's too: input_blocks.3, middle_block, out, text_encoder."""
    part, *rest = name.removeprefix("adapters.").replace("/", ".").split(".")
    if part == "text_encoder":
        return part
    numbered = rest[0] in ("input_blocks", "output_blocks")
    return ".".join(rest[:2]) if numbered else rest[0]


def spaced(x: torch.Tensor) -> torch.Tensor:
    """Up to SAMPLED evenly spaced numbers of a tensor, as a view where it lies in one piece of memory."""
    x = x.detach()
    n = min(x.numel(), SAMPLED)
    stride = x.numel() // n
    if sum((size - 1) * step for size, step in zip(x.shape, x.stride())) + 1 == x.numel():
        return x.as_strided((n,), (stride,))
    return x.flatten()[: n * stride : stride]


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The norm of each, fp32 [len(tensors)]."""
    out = [None] * len(tensors)
    for kind in {t.dtype for t in tensors}:
        at = [i for i, t in enumerate(tensors) if t.dtype == kind]
        for i, norm in zip(at, torch._foreach_norm([tensors[i].detach() for i in at], 2, dtype=torch.float32)):
            out[i] = norm
    return torch.stack(out)


class Probe:
    """Looks into a denoiser's forward pass: the largest activation and the root mean square behind each block, and the
    largest attention logits of each level, self- and cross-attention apart. Made for one pass at a time, plain or
    fused: `with Probe(net, height) as probe: net(...)`, then probe.seen, fp32 scalars by (figure, where)."""

    def __init__(self, net: Denoiser, height: int):
        """height: of the latents that will come."""
        self.net, self.height, self.seen, self._hooks = net, height, {}, []

    def __enter__(self):
        unet = self.net.unet
        watched = {f"input_blocks.{i}": b[-1] for i, b in enumerate(unet.input_blocks)}
        watched |= {"middle_block": unet.middle_block[-1]}
        watched |= {f"output_blocks.{i}": b[-1] for i, b in enumerate(unet.output_blocks)} | {"out": unet.out[2]}
        for name, module in watched.items():
            self._hooks.append(module.register_forward_hook(lambda m, x, y, name=name: self._activation(name, y)))
        for module in unet.modules():
            if isinstance(module, SpatialTransformer):
                self._hooks.append(module.register_forward_pre_hook(self._attention))
        return self

    def __exit__(self, *error):
        for hook in self._hooks:
            hook.remove()

    def _activation(self, name: str, y: torch.Tensor):
        y = y.detach().float()
        self.seen["activation_max", name] = y.abs().amax()
        self.seen["activation_rms", name] = y.square().mean().sqrt()

    def _attention(self, module: SpatialTransformer, inputs):
        x, context = inputs
        level = round(math.log2(max(1.0, self.height / x.shape[2])))
        h = module.proj_in(module.norm(x)).flatten(2).transpose(1, 2)  # [B, HW, C]
        for block in module.transformer_blocks:
            y = block.norm1(h)
            self._logits(f"level {level}, self", block.attn1, y, y)
            h = h + block.attn1(y)
            y = block.norm2(h)
            self._logits(f"level {level}, text", block.attn2, y, context)
            h = block(h, context)

    def _logits(self, name: str, attn, y: torch.Tensor, context: torch.Tensor):
        y = y[:, :: max(1, y.shape[1] // QUERIES)]  # [B, QUERIES, C]
        q, k = (z.unflatten(-1, (attn.heads, -1)).transpose(1, 2).float() for z in (attn.to_q(y), attn.to_k(context)))
        largest = (q @ k.mT).abs().amax() * q.shape[-1] ** -0.5
        before = self.seen.get(("attention_max", name))
        self.seen["attention_max", name] = largest if before is None else torch.maximum(before, largest)


@torch.no_grad()
def probed(net: Denoiser, batch: Batch, text: torch.Tensor, schedule: NoiseSchedule, dtype: str) -> dict:
    """Probe.seen of a batch, and the standard deviation of what is predicted of it."""
    was_training = net.training
    net.eval()  # no dropout, which would draw random numbers
    with Probe(net, batch.latents.shape[2]) as probe:
        noisy = schedule.add_noise(batch.latents, batch.noise, batch.t)  # [B, z, h, w]
        predicted = in_autocast(net, noisy.device, dtype)(noisy, batch.t, text)
    net.train(was_training)
    return probe.seen | {("prediction_std", ""): predicted.float().std()}


class Health:
    """Writes a line of health.jsonl every --health_steps steps, and one for each skipped step, with what was in its
    batch. Only the first process does; it looks at its own gradients, which are everybody's but where several GPUs
    share them by fused kernels: there no figures of gradients and updates are given."""

    def __init__(self, log: Log | None, denoiser: Denoiser, ema: Denoiser, settings: dict, schedule: NoiseSchedule,
                 text_of, train: Split, plan: Plan, shared: bool):  # fmt: skip
        """log: None for other processes. shared: whether update.shared is there (see sd/step.py)."""
        self.every, self.shared = settings["health_steps"], shared
        self.log = log if self.every else None
        self.denoiser, self.settings, self.schedule, self.text_of = denoiser, settings, schedule, text_of
        self.train, self.plan = train, plan
        pairs = [(name, p, average) for (name, p), average in zip(denoiser.named_parameters(), ema.parameters())
                 if p.requires_grad]  # fmt: skip
        self.names, self.parameters, self.averages = map(list, zip(*pairs))
        self.blocks = list(dict.fromkeys(map(block_of, self.names)))
        device = self.parameters[0].device
        self.block = torch.tensor([self.blocks.index(block_of(n)) for n in self.names], device=device)  # [P]
        self.steps, self.clipped, self.skipped, self.figures, self.batch = 0, 0, 0, None, None

    def _spread(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each sampled number: its block, and how many numbers it stands for."""
        counts = torch.tensor([min(p.numel(), SAMPLED) for p in self.parameters], device=self.block.device)
        sizes = torch.tensor([float(p.numel()) for p in self.parameters], device=self.block.device)
        return self.block.repeat_interleave(counts), (sizes / counts).repeat_interleave(counts)

    def _by_block(self, values: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        """Sums over blocks, fp32 [blocks]."""
        return torch.zeros(len(self.blocks), device=values.device).index_add_(0, block, values.float())

    @torch.no_grad()
    def before(self, step: int, batch: Batch):
        """Between the gradients of step `step` (from 0) and the update. batch: the last micro-batch."""
        self.batch, self.figures = batch, None
        if self.log is None or (step + 1) % self.every:
            return
        part = batch.map(lambda x: x[:PROBED])
        self.figures = probed(self.denoiser, part, self.text_of(part.ids), self.schedule, self.settings["dtype"])
        weights = norms(self.parameters)
        self.figures["weight_norm", None] = self._by_block(weights.square(), self.block).sqrt()
        self.old = torch.cat([spaced(p) for p in self.parameters])
        self.figures["gradients", None] = torch.zeros(0, device=weights.device)
        self.without = []
        if self.shared:
            return
        grads = [gradient_of(p) for p in self.parameters]
        self.without = [n for n, g in zip(self.names, grads) if g is None]
        at = [i for i, g in enumerate(grads) if g is not None]
        if not at:
            return
        grads, block = [grads[i] for i in at], self.block[at]
        each = norms(grads)
        samples = [spaced(g) for g in grads]
        counts = torch.tensor([len(s) for s in samples], device=each.device)
        zeros = (torch.cat([s.float() for s in samples]) == 0).float()
        self.at = at
        self.figures["gradients", None] = each
        self.figures["grad_norm", None] = self._by_block(each.square(), block).sqrt()
        total = self._by_block(counts, block)
        self.figures["zero_share", None] = self._by_block(zeros, block.repeat_interleave(counts)) / total

    @torch.no_grad()
    def after(self, step: int, norm: float, limit: float, lr: float):
        """After the update of a step (its number, from 1), which was skipped if its norm is not finite."""
        if self.log is None:
            return
        skipped = not math.isfinite(norm)
        self.steps, self.skipped, self.clipped = self.steps + 1, self.skipped + skipped, self.clipped + (norm > limit)
        if skipped:
            self.log.write("health.jsonl", {"step": step, "skipped_step": True} | self.suspects(step - 1))
        if self.figures is None:
            return
        block, stands_for = self._spread()
        new = torch.cat([spaced(p) for p in self.parameters])
        size = self.figures["weight_norm", None].clamp(min=1e-30)
        if not self.shared:
            self.figures["update", None] = self._by_block((new - self.old).square() * stands_for, block).sqrt() / size
        # With --no_ema they are the weights, and with --shard they are in parts.
        if self.averages[0] is not self.parameters[0] and self.averages[0].shape == self.parameters[0].shape:
            away = new - torch.cat([spaced(p) for p in self.averages]).to(new.device)  # --ema_on_cpu
            self.figures["ema_distance", ""] = (away.square() * stands_for).sum().sqrt() / size.norm()
        row = {"step": step, "lr": lr, "clipped": self.clipped / self.steps, "skipped": self.skipped}
        self.log.write("health.jsonl", row | self._row())
        self.steps = self.clipped = self.skipped = 0
        self.figures = self.old = None

    def _row(self) -> dict:
        """The figures as numbers, in one transfer."""
        flat = torch.cat([value.float().flatten() for value in self.figures.values()]).tolist()
        row, start = {}, 0
        for (what, where), value in self.figures.items():
            numbers, start = flat[start : start + value.numel()], start + value.numel()
            if what == "gradients":
                row |= named("zero_gradient", [self.names[self.at[i]] for i, n in enumerate(numbers) if n == 0])
                odd = [self.names[self.at[i]] for i, n in enumerate(numbers) if not math.isfinite(n)]
                row |= named("gradient_not_finite", odd)
            elif where is None:
                row[what] = dict(zip(self.blocks, numbers))
            elif where == "":
                row[what] = numbers[0]
            else:
                row.setdefault(what, {})[where] = numbers[0]
        return row | named("no_gradient", self.without)

    def suspects(self, step: int) -> dict:
        """What a step (from 0) was made of: its pictures' keys; those whose latents are not finite; and where none is,
        the first block behind which numbers are not finite."""
        size, order = self.plan.global_batch, self.plan.order
        if isinstance(order, BucketOrder):  # the loader's own is in use, in another thread
            order = BucketOrder(copy.copy(order.order), order.shape, order.batch)
        index = copy.copy(order).at(np.arange(step * size, (step + 1) * size))
        keys = self.train.keys.take(pa.array(index)).to_pylist()
        bad = []
        if isinstance(self.train, Split):  # others would encode their pictures anew
            bad = [k for i, k in zip(index, keys) if not np.isfinite(self.train.latents(np.array([i]))).all()]
        found = named("keys", keys) | named("latents_not_finite", bad)
        if not bad:
            seen = probed(self.denoiser, self.batch, self.text_of(self.batch.ids), self.schedule,
                          self.settings["dtype"])  # fmt: skip
            first = [name for (what, name), x in seen.items() if what == "activation_max" and not x.isfinite()]
            found |= {"first_not_finite": first[0] if first else None}
        return found


def named(what: str, names: list[str]) -> dict:
    """The first names, and how many there are."""
    return {what: names[:NAMED], f"{what}_count": len(names)} if names else {}
