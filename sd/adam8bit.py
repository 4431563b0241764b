"""AdamW whose moments are kept in 8 bits (Dettmers et al. 2021, arXiv:2110.02861), beside weights in fp32 or bf16.

A moment's numbers are taken 256 at a time, in the order of its memory. Such a block keeps its largest absolute value in
fp32, and of each number, as a share of that, the nearest of 256 values: the place in dynamic_map(). Blocks begin anew
with each tensor, and tensors of less than 4,096 numbers keep fp32 moments. sd/optim.py has the same step in one pass
for NVIDIA GPUs.
"""

import torch
import torch.nn.functional as F
from torch import nn

from sd.optimizers import Gradients, adamw_, each_weight, in_memory

SIZE = 256  # numbers of a block
SMALLEST = 4096  # numbers of a tensor whose moments are in 8 bits


def dynamic_map(with_sign: bool) -> torch.Tensor:
    """The 256 values from -1, or 0, to 1 that 8 bits stand for, rising, fp32 (section 1.3 of the paper): seven decades
    down to 1e-7, each with twice as many values as the one below, in the middle of equal parts of it; 0 and 1."""
    values = [0.0, 1.0]
    for decade in range(7):
        parts = 2**decade if with_sign else 2 ** (decade + 1)
        middles = [(0.1 + 0.9 * (i + 0.5) / parts) * 10.0 ** (decade - 6) for i in range(parts)]
        values += middles + [-x for x in middles] * with_sign
    return torch.tensor(sorted(values), dtype=torch.float64).float()


def borders(values: torch.Tensor) -> torch.Tensor:
    """Between the values of a map, [255]: a share belongs to the value whose borders it is between."""
    return (values[1:] + values[:-1]) / 2


def blocks_of(numbers: int) -> int:
    return -(-numbers // SIZE)


def encode(x: torch.Tensor, values: torch.Tensor, codes: torch.Tensor, largest: torch.Tensor):
    """fp32 numbers into codes (uint8, of the same layout) and largest [blocks], for a map's values.

    A block of zeros is zeros, not 0/0. Of a map without sign, what is not 0 never becomes 0: AdamW divides by the root
    of such a number, and where a block has large and small ones, a small one's last update would be a million times
    too long.
    """
    flat = in_memory(x).clamp(max=torch.finfo(torch.float32).max)  # inf would make its whole block NaN
    blocks = F.pad(flat, (0, -len(flat) % SIZE)).view(-1, SIZE)
    torch.amax(blocks.abs(), 1, out=largest)
    shares = blocks / torch.where(largest > 0, largest, 1.0)[:, None]
    found = torch.bucketize(shares, borders(values), out_int32=True)
    if values[0] == 0:
        found = torch.where(blocks > 0, found.clamp(min=1), found)
    in_memory(codes).copy_(found.view(-1)[: len(flat)])


def decode(codes: torch.Tensor, largest: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The numbers that encode() took, nearly, fp32 in the codes' layout."""
    flat, out = in_memory(codes), torch.empty_like(codes, dtype=torch.float32)
    in_memory(out).copy_(values[flat.int()] * largest.repeat_interleave(SIZE)[: len(flat)])
    return out


class AdamW8bit(torch.optim.Optimizer):
    """See above. eight_bits=False keeps all moments in fp32: AdamW for weights that may be in bf16."""

    def __init__(self, params, lr: float, weight_decay: float, betas=(0.9, 0.999), eight_bits=True, seed: int = 0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, betas=betas, eps=1e-8, seed=seed, steps=0,
                                      channels_last=False))  # fmt: skip
        self.maps = {}  # with sign and without, by device
        for group in self.param_groups:
            for p in group["params"]:
                short = eight_bits and p.numel() >= SMALLEST
                group["channels_last"] |= in_channels_last(p)
                self.maps.setdefault(p.device, (dynamic_map(True).to(p.device), dynamic_map(False).to(p.device)))
                for name in ("exp_avg", "exp_avg_sq"):
                    kind = torch.uint8 if short else torch.float32
                    self.state[p][name] = torch.zeros_like(p, dtype=kind, requires_grad=False)
                    if short:
                        self.state[p][f"{name}_max"] = torch.zeros(blocks_of(p.numel()), device=p.device)

    def arrange(self):
        """After load_state_dict: blocks follow the weights' memory, where that of the saved ones had another layout."""
        for group in self.param_groups:
            before, now = group["channels_last"], any(map(in_channels_last, group["params"]))
            group["channels_last"] = now
            for p in group["params"] if before != now else ():
                for name, values in zip(("exp_avg", "exp_avg_sq"), self.maps[p.device]):
                    codes = self.state[p][name]
                    if p.ndim == 4 and codes.dtype == torch.uint8:
                        memory = torch.channels_last if before else torch.contiguous_format
                        largest = self.state[p][f"{name}_max"]
                        x = decode(codes.contiguous(memory_format=memory), largest, values)
                        encode(torch.empty_like(codes, dtype=x.dtype).copy_(x), values, codes, largest)

    @torch.no_grad()
    def step(self, scale=1.0, gradients: Gradients = None):
        for _, group, w, g, state in each_weight(self, scale, gradients):
            m, v = state["exp_avg"], state["exp_avg_sq"]
            if m.dtype != torch.uint8:
                adamw_(w, g, m, v, group)
                continue
            signed, unsigned = self.maps[w.device]
            new_m, new_v = decode(m, state["exp_avg_max"], signed), decode(v, state["exp_avg_sq_max"], unsigned)
            adamw_(w, g, new_m, new_v, group)
            encode(new_m, signed, m, state["exp_avg_max"])
            encode(new_v, unsigned, v, state["exp_avg_sq_max"])


def in_channels_last(p: nn.Parameter) -> bool:
    """Whether a kernel's memory follows that order; one of 1x1 lies alike in both."""
    return p.ndim == 4 and not p.is_contiguous()
