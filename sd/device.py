"""Devices and processes: which there are, how fast they can be, and whether all agree."""

import os
import platform
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from sd.errors import InputError
from sd.slurm import STEP, TASK, meeting_point, task_of_srun

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


def own_device(name: str | None) -> torch.device:
    """pick_device; of a machine's several GPUs that of this process's LOCAL_RANK or SLURM_LOCALID: for programs whose
    processes form no group."""
    device = pick_device(name)
    if device.type == "cuda" and device.index is None:
        local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0)))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)  # kernels, streams and events are the current device's
    return device


def usual_dtype(device: torch.device) -> str:
    """The name in DTYPES of what networks are computed in where no flag says so."""
    return "bf16" if device.type == "cuda" else "fp32"


def compiled_or_plain(function, trial, dynamic: bool | None = None):
    """torch.compile of a function; where trial(that) fails, the function as it is, and a line says so. dynamic: as
    torch.compile's; False: anew for each shape."""
    try:
        fast = torch.compile(function, dynamic=dynamic)
        trial(fast)
    except Exception as e:  # no compiler, an unsupported card: many kinds of error, and none is worth stopping for
        print(f"note: torch.compile failed ({type(e).__name__}), going on without it")
        return function
    return fast


def layout(device: torch.device) -> torch.memory_format:
    """The memory format that convolutions are fastest in."""
    return torch.channels_last if device.type == "cuda" else torch.preserve_format


def peak_flops(device: torch.device) -> float | None:
    """Of the card, if it is in the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for card, flops in PEAK_FLOPS.items() if card in name), None)


def describe_machine(device: torch.device) -> dict[str, str]:
    """What trains, in words, as far as it is known: the device, its memory, processor, memory and versions. Of the
    process's own device and machine; the other ones' are taken to be alike."""
    said = {"device": str(device.type)}
    if device.type == "cuda":
        card = torch.cuda.get_device_properties(device)
        said |= {"device": f"{card.name}, {card.total_memory / 2**30:.0f} GiB", "CUDA": f"{torch.version.cuda}"}
    try:
        names = [line.partition(":")[2].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        said |= {"processor": f"{os.cpu_count()} x {(names or [platform.machine()])[0]}", "memory": f"{memory:.0f} GiB"}
    except (OSError, ValueError):
        said["processor"] = f"{os.cpu_count()} x {platform.machine()}"
    return said | {"torch": torch.__version__, "Python": platform.python_version()}


def find_ranks(environ) -> tuple[int, int, int]:
    """Rank, world size and local rank that the environment tells of; (0, 1, 0) where nothing does.

    RANK, WORLD_SIZE and LOCAL_RANK (or Slurm's SLURM_LOCALID) count together with MASTER_ADDR and MASTER_PORT, as
    torchrun sets them; without RANK and WORLD_SIZE the tasks of an srun do, which meet at these two or, if one is not
    set, at a place that sd/slurm.py finds. InputError if a part is missing, as it is where a variable is left over from
    something else: such a process would wait for others, or take itself for one that writes nothing.
    """
    found = {name: environ[name] for name in TASK if name in environ}
    meeting = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if not found.keys() & {"RANK", "WORLD_SIZE"} and (not meeting or all(name in environ for name in STEP)):
        if task := task_of_srun(environ):
            found, meeting = task, []
    try:
        numbers = {name: int(value) for name, value in found.items()}
    except ValueError:
        raise InputError(f"whole numbers were wanted in the environment, found {found}; unset them") from None
    if all(numbers.get(name, single) == single for name, single in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))):
        return 0, 1, 0
    if "LOCAL_RANK" not in numbers and environ.get("SLURM_LOCALID", "").isdecimal():
        numbers["LOCAL_RANK"] = int(environ["SLURM_LOCALID"])
    told = " ".join(f"{name}={value}" for name, value in found.items())
    if missing := [name for name in TASK if name not in numbers] + meeting:
        raise InputError(
            f"the environment says {told} and lacks {', '.join(missing)}; start with torchrun or srun, or for one "
            f"process: unset {' '.join(found)}"
        )
    if not (0 <= numbers["RANK"] < numbers["WORLD_SIZE"] and numbers["LOCAL_RANK"] >= 0):
        raise InputError(f"RANK was wanted from 0 to below WORLD_SIZE, and the environment says {told}; unset them")
    return numbers["RANK"], numbers["WORLD_SIZE"], numbers["LOCAL_RANK"]


class Place(NamedTuple):
    """Where a process runs."""

    device: torch.device
    rank: int  # of all processes
    world: int  # how many processes there are
    local: int  # rank on this machine

    @property
    def first(self) -> bool:
        """The one process that writes files and speaks."""
        return self.rank == 0


def setup_device(name: str | None, timeout: float | None = None) -> Place:
    """This process's place. With several processes, joins their group (NCCL on CUDA, else gloo). timeout: seconds that
    they wait for each other; None: as torch does, 10 minutes with NCCL and 30 with gloo."""
    if timeout is not None and not 0 < timeout < 1e6:
        raise InputError(f"--timeout wants a positive number of seconds, found {timeout}")
    rank, world, local = find_ranks(os.environ)
    device = pick_device(name)
    if device.type == "cuda" and local >= torch.cuda.device_count():
        raise InputError(f"LOCAL_RANK is {local}, and this machine has {torch.cuda.device_count()} GPUs; start fewer")
    if world > 1:  # torch reads them
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local)}
        os.environ |= meeting_point(os.environ)
    if device.type == "cuda":
        device = torch.device("cuda", device.index if world == 1 and device.index is not None else local)
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        torch.backends.cudnn.benchmark = True
    if world > 1:
        limit = None if timeout is None else timedelta(seconds=timeout)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=limit)
    return Place(device, rank, world, local)


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
