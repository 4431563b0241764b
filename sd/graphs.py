"""CUDA graphs: passes recorded once and replayed."""

from functools import partial

import torch
from torch import nn

from sd.kernels import compile_ahead
from sd.optim import forget_gradients, gradient_norm
from sd.parallel import SharedGradients, agreed


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
        return fine if self.shared is None else agreed(fine, self.static[0].device)

    def _step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The passes of a step, not recorded, all on the same inputs: the last one's result, the gradients' norm."""
        forget_gradients(self.parameters)
        for _, last in self.kinds:
            out = self.function(*self.static, last=last)
        return out.clone(), gradient_norm(self.parameters, self.shared)
