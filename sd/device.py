"""Devices and processes: which there are, how fast they can be, and whether all agree."""

import os

import torch
import torch.distributed as dist

from sd.errors import InputError

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# Dense bf16 FLOP/s of tensor cores, from the makers' data sheets, for MFU.
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12, "3090": 71e12}


def pick_device(name: str | None) -> torch.device:
    """The named device, else CUDA, else Apple MPS, else the CPU. InputError if the named one is absent."""
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    kind = name.split(":")[0]
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(kind):
        raise InputError(f"--device {name} was wanted, and this machine has {[k for k, v in present.items() if v]}")
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # kernels and streams are the current device's
    return device


def layout(device: torch.device) -> torch.memory_format:
    """The memory format that convolutions are fastest in."""
    return torch.channels_last if device.type == "cuda" else torch.preserve_format


def peak_flops(device: torch.device) -> float | None:
    """Of the card, if it is in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)


def setup_device(name: str | None) -> tuple[torch.device, int, int, int]:
    """Device, rank, world size, local rank. Under torchrun, joins the process group (NCCL on CUDA, else gloo)."""
    device = pick_device(name)
    rank, world, local = (int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
    if device.type == "cuda":
        device = torch.device("cuda", device.index if world == 1 and device.index is not None else local)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    if world > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device, rank, world, local


def check_agreement(values: dict[str, int], device, world: int):
    """InputError unless all ranks found the same: on several machines they may see different disks."""
    if world > 1:
        low = torch.tensor(list(values.values()), dtype=torch.int64, device=device)
        high = low.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        differing = [name for name, a, b in zip(values, low.tolist(), high.tolist()) if a != b]
        if differing:
            raise InputError(
                f"the processes disagree on {', '.join(differing)}; start them with the same flags, and keep --out and "
                "the data where all machines see the same files"
            )


def sum_over_ranks(value: int, device, world: int) -> int:
    """Sum modulo 2^64 of a number of each rank."""
    if world > 1:
        total = torch.tensor(value % 2**64 - (value >> 63 & 1) * 2**64, dtype=torch.int64, device=device)
        dist.all_reduce(total)
        value = total.item()
    return value % 2**64
