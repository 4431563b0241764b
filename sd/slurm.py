"""Slurm: what it tells a process that srun started, where such processes meet, and how a stopped run asks to go on."""

import re
import shutil
import socket
import subprocess

from sd.errors import InputError

# Exit status of a run with --requeue_signal that was stopped, and saved, before its end: "try again" in sysexits.h.
# Neither srun nor torchrun nor a shell ends with it: torchrun gives 1, srun its tasks' statuses and 128 + a signal.
UNFINISHED = 75
SIGNALS = ("USR1", "USR2")  # for --requeue_signal

TASK = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST")  # what tells where and under which number its tasks meet

FIRST_PORT, PORTS = 12_000, 20_000  # below 32768, where Linux begins to give ports to outgoing connections


def task_of_srun(environ) -> dict[str, str]:
    """torchrun's names of a task's numbers, where srun started this process; {} elsewhere.

    SLURM_STEP_NUM_TASKS and not SLURM_NTASKS: in a batch script, which is one process, the latter counts the tasks that
    an srun would start, and a training started there without srun would wait for them for ever.
    """
    return {name: environ[of] for name, of in TASK.items()} if all(of in environ for of in TASK.values()) else {}


def meeting_port(environ) -> int:
    """Port where the tasks of this step meet, the same on all machines: jobs that share a node have different ones.

    Slurm gives consecutive numbers, to each task of an array too (SLURM_JOB_ID; SLURM_ARRAY_JOB_ID is the same for all
    of them), so 20,000 jobs pass before a port comes again. The steps of one job, 0, 1, 2, ..., lie far apart.
    """
    job, step = environ["SLURM_JOB_ID"], environ.get("SLURM_STEP_ID", "0")
    if not (job.isdecimal() and step.isdecimal()):
        raise InputError(f"SLURM_JOB_ID and SLURM_STEP_ID want numbers, found {job!r} and {step!r}; set MASTER_PORT")
    return FIRST_PORT + (int(job) + 7919 * int(step)) % PORTS


def first_node(nodelist: str) -> str:
    """The first name of Slurm's list of nodes: rack1n007 of 'rack1n[007-012,020],rack2n1'."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodelist)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def meeting_address(environ) -> str:
    """Address of the node that has rank 0. InputError if it has none that this machine knows.

    A node's name need not resolve: Slurm itself uses its NodeAddr, which scontrol tells.
    """
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        return "127.0.0.1"
    node = address = first_node(environ["SLURM_STEP_NODELIST"])
    if shutil.which("scontrol"):
        shown = subprocess.run(["scontrol", "--oneliner", "show", "node", node], capture_output=True, text=True).stdout
        if named := re.search(r"\bNodeAddr=(\S+)", shown):
            address = named[1]
    try:
        socket.getaddrinfo(address, None)
    except OSError:
        raise InputError(
            f"an address of the node {node} was wanted, where rank 0 runs, and {address} does not resolve here; set "
            "MASTER_ADDR"
        ) from None
    return address


def meeting_point(environ) -> dict[str, str]:
    """MASTER_ADDR and MASTER_PORT of a step that srun started: those that are set, else from Slurm's variables."""
    found = {"MASTER_ADDR": environ.get("MASTER_ADDR") or meeting_address(environ)}
    return found | {"MASTER_PORT": environ.get("MASTER_PORT") or str(meeting_port(environ))}
