"""Locks by which processes on one or several machines share the shards of a folder."""

import json
import os
import socket
import threading
from pathlib import Path

from sd.files import link

HEARTBEAT_S = 20  # between signs of life of a process that holds locks

DEAD_AFTER_S = 180  # without one, on another machine; file systems may show times up to a minute late


# Sharing shards between processes
def process_start(pid: int) -> str | None:
    """When a process of this machine began, as Linux tells it; None if there is none, or it is dead and not buried."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else fields[18]


def machine_name() -> str:
    """The same for two processes only if they see each other's ids: kernel since its start, and namespace of ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: death is told by the heartbeat alone
        return f"{socket.gethostname()} {os.getpid()}"


class Locks:
    """The shards that this process has taken, each with a lock file NNNNN.<n>.lock; used in a `with` block.

    A lock is a hard link to a file that says which process this is, so one touch now and then keeps all of them fresh
    and it comes into being whole, for one of those who want it. An owner is dead when its process is gone from this
    machine, or was silent for DEAD_AFTER_S on another. To take over from a dead owner of lock n is to make lock n + 1:
    nothing is deleted, so of two thieves one fails, and a sleeper who wakes sees that he has lost. The locks of a shard
    are deleted, the oldest first, after its record is written; whoever takes one must then look for the record.
    """

    def __init__(self, out: Path):
        self.out, self.held = out, {}
        self.card = out / f"process.{socket.gethostname()}-{os.getpid()}.tmp"
        self.me = {"machine": machine_name(), "pid": os.getpid(), "start": process_start(os.getpid())}
        self.stopped = threading.Event()

    def __enter__(self) -> "Locks":
        for path in self.out.glob(f"*.{socket.gethostname()}-*.tmp"):  # left by the dead
            pid = path.name.rpartition("-")[2].removesuffix(".tmp")
            if pid.isdecimal() and Path("/proc/self").exists() and process_start(int(pid)) is None:
                path.unlink(missing_ok=True)
        self.card.write_text(json.dumps(self.me) + "\n")
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        for shard in list(self.held):
            self.release(shard)
        self.card.unlink(missing_ok=True)

    def _beat(self):
        while not self.stopped.wait(HEARTBEAT_S):
            try:
                os.utime(self.card)
            except OSError:  # a disk that is away for a moment; when it stays away the encoder will say so
                pass

    def _path(self, shard: str, n: int) -> Path:
        return self.out / f"{shard}.{n}.lock"

    def _alive(self, lock: Path) -> bool:
        try:
            owner, beat = json.loads(lock.read_text()), lock.stat().st_mtime
        except FileNotFoundError:
            return True  # deleted just now: its shard is finished, or free at the next look
        except ValueError:  # a power failure has emptied it
            owner, beat = {"machine": None}, lock.stat().st_mtime
        if owner["machine"] == self.me["machine"]:
            return process_start(owner["pid"]) == owner["start"]
        os.utime(self.card)
        return self.card.stat().st_mtime - beat < DEAD_AFTER_S  # both by the file system's clock

    def take(self, shard: str) -> bool:
        """Whether the shard is this process's now. It may have been finished in the meantime."""
        n = 0
        while self._path(shard, n).exists():
            n += 1
        if (n and self._alive(self._path(shard, n - 1))) or not link(self.card, self._path(shard, n)):
            return False
        self.held[shard] = n
        return True

    def holds(self, shard: str) -> bool:
        """Whether the shard is still this process's: not when it was taken for dead, as after a long sleep."""
        mine = self._path(shard, self.held[shard])
        later = self._path(shard, self.held[shard] + 1)
        try:
            return mine.samefile(self.card) and not later.exists()
        except FileNotFoundError:
            return False

    def release(self, shard: str):
        if self.holds(shard):
            for n in range(self.held[shard] + 1):
                self._path(shard, n).unlink(missing_ok=True)
        del self.held[shard]
