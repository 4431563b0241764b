"""--shard: each process keeps and updates 1/world of the optimizer's state and of the weights' average.

That is stage 1 of Rajbhandari et al. 2019 (arXiv:1910.02054). Weights and gradients are whole in every process. The
trained weights are taken as one row of numbers, tensor after tensor, each in the order of its memory, and cut into one
piece a process. The optimizer is given flat views of its own piece, so that what it does is what it would do to these
numbers anyway, and after each step the processes exchange the weights that they have updated.

Checkpoints are those of any run: the first process is sent the rest, a tensor at a time, straight into host memory.
"""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from sd.adam8bit import SIZE, AdamW8bit, blocks_of
from sd.device import Place
from sd.errors import InputError
from sd.optim import strides, whole_of
from sd.optimizers import OTHER_SHAPES, in_memory
from sd.parallel import SharedGradients

UNIT = 4096  # numbers; within a tensor, cuts are at multiples of it, and neither side of one is shorter. So a piece has
# the 8-bit blocks of the whole tensor, and the processor's vectors begin where they would in it.

ROUND = 32 << 20  # numbers that all processes together exchange at once

ELEMENTWISE = ("adamw", "adamw8bit", "lion", "sgd")


def check_shard(settings: dict):
    """InputError unless --shard goes with the other settings."""
    if not settings["shard"]:
        return
    if settings["optimizer"] not in ELEMENTWISE:
        raise InputError(
            f"--shard cuts tensors where a process's part ends, and --optimizer {settings['optimizer']} looks at whole "
            f"tensors or at all of them at once: choose one of {', '.join(ELEMENTWISE)}, or drop --shard"
        )
    if settings["lora"]:
        raise InputError("--shard saves next to nothing with --lora, whose optimizer's state is small: drop --shard")
    if settings["ema_on_cpu"]:
        raise InputError(
            "--shard leaves a part of the average to each process's device, and --ema_on_cpu has all of it in host "
            "memory: drop one of the two"
        )
    if settings["weights_dtype"] != "fp32":
        raise InputError(
            f"--shard wants weights in fp32, found --weights_dtype {settings['weights_dtype']}, whose rounding depends "
            "on a number's place in its tensor: drop one of the two"
        )


def cuts(sizes: list[int], world: int) -> list[int]:
    """Where each process's part of a row of tensors of these sizes begins, and where the last one's ends: the allowed
    places that are nearest to equal parts, int [world + 1]."""
    total, found, start, tensor = sum(sizes), [0], 0, 0
    for k in range(1, world):
        target = total * k // world
        while start + sizes[tensor] < target:
            start, tensor = start + sizes[tensor], tensor + 1
        n, within = sizes[tensor], target - start
        below = within // UNIT * UNIT
        inside = [c for c in (below, below + UNIT, (n - UNIT) // UNIT * UNIT) if UNIT <= c <= n - UNIT]
        found.append(start + min([0, n, *inside], key=lambda c: abs(c - within)))
    return [*found, total]


class Shard:
    """This process's part, of an optimizer that from then on has flat views of it in the weights' place.

    parameters: all that is trained, in the optimizer's order; pieces: those views, by the parameter's number; averages:
    of each piece, fp32, or {}.
    """

    @torch.no_grad()
    def __init__(self, optimizer: torch.optim.Optimizer, averages: dict[nn.Parameter, nn.Parameter], place: Place):
        """optimizer: of weights that are on the device by now, its whole state still in host memory. averages: of each
        weight, in host memory, with its strides, or {}; from then on they are empty but between show() and hide()."""
        self.optimizer, self.place, self.module = optimizer, place, averages
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        sizes = [p.numel() for p in self.parameters]
        self.starts, self.ends = [sum(sizes[:i]) for i in range(len(sizes))], cuts(sizes, place.world)
        if any(a == b for a, b in zip(self.ends, self.ends[1:])):
            raise InputError(
                f"--shard wants a part for each of {place.world} processes, and the {sum(sizes):,} trained weights are "
                "too few: drop --shard"
            )
        self.spans = self._spans(place.rank)
        self.pieces = {i: nn.Parameter(self.part(i, self.parameters[i].detach())) for i in self.spans}
        self._cut_optimizer()
        self.averages = {i: self._own(i, averages[self.parameters[i]].detach()) for i in self.spans if averages}
        self.hide()
        self.rounds = self._plan()
        self.gathered = None  # of the first process: what gather() has collected

    def _spans(self, rank: int) -> dict[int, tuple[int, int]]:
        """Which numbers a process has: of each parameter, by its number in the list, where its share begins and ends in
        the parameter's memory."""
        first, end, spans = self.ends[rank], self.ends[rank + 1], {}
        for i, (start, p) in enumerate(zip(self.starts, self.parameters)):
            begin, stop = max(start, first) - start, min(start + p.numel(), end) - start
            if begin < stop:
                spans[i] = begin, stop
        return spans

    def part(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """This process's part of a tensor of parameter i's shape, flat, in the order of the parameter's memory: a view,
        unless the tensor lies otherwise."""
        p = self.parameters[i]
        if strides(x) != strides(p):
            x = torch.empty_like(p, dtype=x.dtype, device=x.device).copy_(x)
        return in_memory(x)[slice(*self.spans[i])]

    def _own(self, i: int, x: torch.Tensor) -> torch.Tensor:
        """A copy of that on the device, which keeps nothing of the rest alive."""
        return self.part(i, x).to(self.place.device, copy=True)

    def _cut_optimizer(self):
        optimizer, number = self.optimizer, {p: i for i, p in enumerate(self.parameters)}
        whole = dict(optimizer.state)
        optimizer.state.clear()
        self.numbers = [[number[p] for p in group["params"]] for group in optimizer.param_groups]
        for group, numbers in zip(optimizer.param_groups, self.numbers):
            group["params"] = [self.pieces[i] for i in numbers if i in self.pieces]
        for i, (begin, end) in self.spans.items():
            for name, value in whole.get(self.parameters[i], {}).items():
                if name in OTHER_SHAPES:
                    value = value[begin // SIZE : blocks_of(end)].to(self.place.device, copy=True)
                else:
                    value = self._own(i, value) if value.ndim else value.to(self.place.device)
                optimizer.state[self.pieces[i]][name] = value
        if isinstance(optimizer, AdamW8bit):
            maps = next(iter(optimizer.maps.values()))
            optimizer.maps = {self.place.device: tuple(m.to(self.place.device) for m in maps)}

    # Each step

    def parts(self, gradients: dict[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        """Of whole gradients by weight those of the pieces, by piece."""
        return {piece: self.part(i, gradients[self.parameters[i]]) for i, piece in self.pieces.items()}

    def _plan(self) -> list[list[list[torch.Tensor]]]:
        """What is exchanged when: for each round and process flat views of the weights."""
        size, rounds = ROUND // self.place.world, []
        for rank in range(self.place.world):
            number, room = 0, size
            for i, (begin, end) in self._spans(rank).items():
                while begin < end:
                    if number == len(rounds):
                        rounds.append([[] for _ in range(self.place.world)])
                    taken = min(room, end - begin)
                    flat = in_memory(self.parameters[i].detach())
                    rounds[number][rank].append(flat[begin : begin + taken])
                    begin, room = begin + taken, room - taken
                    if not room:
                        number, room = number + 1, size
        return rounds

    @torch.no_grad()
    def spread(self):
        """After a step: the weights that each process has updated to all others. All call this at once."""
        for views in self.rounds:
            counts = [sum(v.numel() for v in own) for own in views]
            sent = torch.zeros(max(counts), device=self.place.device)
            if views[self.place.rank]:
                torch.cat(views[self.place.rank], out=sent[: counts[self.place.rank]])
            found = torch.empty(len(counts) * len(sent), device=self.place.device)
            dist.all_gather_into_tensor(found, sent)
            for rank, (own, row) in enumerate(zip(views, found.split(len(sent)))):
                if rank != self.place.rank and own:
                    torch._foreach_copy_(own, row[: counts[rank]].split([v.numel() for v in own]))

    # When all of it is wanted

    def _whole(self, i: int, own: torch.Tensor | None, dtype, name: str = "", everywhere: bool = False) -> torch.Tensor:
        """Of parts of a tensor that belongs to parameter i, this process's being `own`, all of it: in the first
        process, or everywhere. All call this at once. The sum of the bits of numbers of which all but one are 0 has
        that one's bits, whatever the order."""
        p = self.parameters[i]
        begin, end = self.spans.get(i, (0, 0))
        if name in OTHER_SHAPES:
            whole = torch.zeros(blocks_of(p.numel()), dtype=dtype, device=self.place.device)
            begin, end = begin // SIZE, blocks_of(end)
        else:
            whole = torch.zeros_like(p, dtype=dtype, requires_grad=False)
        flat = in_memory(whole)
        if own is not None:
            flat[begin:end] = own
        bits = flat if dtype == torch.uint8 else flat.view(torch.int32)
        if everywhere:
            dist.all_reduce(bits)
        else:
            dist.reduce(bits, 0)
        return whole

    @torch.no_grad()
    def show(self):
        """The whole average into its module, in every process, until hide(). All call this at once."""
        for i, p in enumerate(self.parameters if self.module else ()):
            self.module[p].data = self._whole(i, self.averages.get(i), torch.float32, everywhere=True)

    def hide(self):
        for average in self.module.values():
            if average.numel():
                average.data = torch.empty(0, device=self.place.device)

    @torch.no_grad()
    def gather(self, folder):
        """The whole optimizer's state and average into the first process's host memory, for its folder's next save():
        `gathered`, a state_dict and the average by weight. All call this at once. folder: a RunFolder, None in the
        others."""
        if folder:
            folder.saver.wait()  # the last checkpoint is written from the same host memory
        kinds, averages, states = self._kinds(), {}, {}
        for i, p in enumerate(self.parameters):
            own = self.optimizer.state.get(self.pieces.get(i), {})
            for name, kind in kinds[i].items():
                if isinstance(kind, torch.dtype):
                    value = self._whole(i, own.get(name), kind, name)
                    value = folder and folder.to_host(value, f"/shard/{i}/{name}")
                else:
                    value = torch.tensor(kind)
                states.setdefault(i, {})[name] = value
            if self.module:
                whole = self._whole(i, self.averages.get(i), torch.float32)
                averages[p] = folder and folder.to_host(whole, f"/shard/{i}")
        groups = self.optimizer.state_dict()["param_groups"]
        groups = [group | {"params": list(numbers)} for group, numbers in zip(groups, self.numbers)]
        self.gathered = ({"state": states, "param_groups": groups}, averages) if folder else None

    def _kinds(self) -> dict[int, dict]:
        """What the state of each parameter is: by name its dtype, or of a count its value. All call this at once."""
        own, kinds = {}, defaultdict(dict)
        for i, piece in self.pieces.items():
            state = self.optimizer.state.get(piece, {})
            own[i] = {name: value.dtype if value.ndim else value.item() for name, value in state.items()}
        every = [None] * self.place.world
        dist.all_gather_object(every, own)
        for part in every:
            for i, names in part.items():
                kinds[i] |= names
        return kinds


class SummedParts:
    """SharedGradients as sd/optim.py's FusedStep wants them, of which it is to take the pieces alone."""

    buckets = ()  # nothing is left in parts that only complete() would join

    def __init__(self, shard: Shard, shared: SharedGradients):
        self.shard, self.shared, self._of, self._sums = shard, shared, None, []

    @property
    def way(self):
        return self.shared.way

    @property
    def sums(self) -> list[torch.Tensor]:
        """Of each piece."""
        if self._of is not self.shared.sums:  # the first step chooses where they lie
            whole = {p: g for (_, parts) in self.shared.way.shares() for (p, *_), g in parts}
            self._of, self._sums = self.shared.sums, list(self.shard.parts(whole).values())
        return self._sums

    def shares(self):
        return [(None, whole_of(list(self.shard.pieces.values())))]
