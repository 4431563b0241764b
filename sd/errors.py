"""The one way to report a user's error, and to run a program's main()."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from tqdm import tqdm


class InputError(ValueError):
    """The user's mistake, in one sentence: what was wanted, what was found, what to do. It travels from worker
    processes to the main one like any exception."""


def short(error: BaseException) -> str:
    """The first line of an error, at most 200 characters; its class's name if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".: ")


@contextmanager
def reading(what: str, advice: str) -> Iterator[None]:
    """A block in which libraries open what a user gave, and nothing else happens: whatever they raise becomes an
    InputError, 'cannot read WHAT (the reason): ADVICE'. Their classes of errors are many and change."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        if type(error).__name__ == "InputError" or _lacks_memory(error):
            raise
        kind = "" if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: "
        raise InputError(f"cannot read {what} ({kind}{short(error)}): {advice}") from None


def run(main: Callable[[], None]) -> None:
    """Run a program's main(). A user's mistake, a full disk, a folder that may not be written, a lack of memory, a dead
    worker and processes that lost each other end with one sentence on stderr and status 2, Ctrl-C with 130; any other
    exception is a bug and keeps its traceback."""
    try:
        main()
    except BrokenProcessPool:
        _end("a worker process was killed, probably for lack of memory: run the command again with fewer --workers")
    except Exception as error:
        if found := system_error(error):
            reason = found.strerror or short(found)
            _end(f"{found.filename or 'the system'}: {reason}: put that right and run the command again")
        if type(error).__name__ == "InputError":  # SD_Model.py stands alone, and has one of its own
            _end(str(error))
        if _lost_others(error):
            _end(f"this process has lost the others, or did not find them ({short(error)}): see what they say of their "
                 "end, then start all again, a training with --resume")  # fmt: skip
        if _lacks_memory(error):
            _end(f"there is not enough memory ({short(error)}): choose smaller sizes and batches, or fewer --workers")
        raise
    except KeyboardInterrupt:
        print("stopped: run the same command again to go on", file=sys.stderr)
        raise SystemExit(130) from None


def system_error(error: Exception, path: object = None) -> OSError | None:
    """The OSError that an error is, or that it stands for: safetensors and tokenizers, which are written in Rust, raise
    their own, or a bare Exception, that ends in '(os error 28)'. path: the file's, where the error does not name it."""
    if isinstance(error, OSError):
        return error
    if named := re.search(r"\(os error (\d+)\)", str(error)):
        return OSError(int(named[1]), os.strerror(int(named[1])), None if path is None else str(path))
    return None


def _lacks_memory(error: Exception) -> bool:
    """numpy's and Python's MemoryError, torch's on a GPU, and the plain RuntimeError that torch raises on a CPU. Not
    imported: the data scripts do without torch."""
    torch_says = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or torch_says


def _lost_others(error: Exception) -> bool:
    """What torch raises where processes of a group do not meet, one of them dies, or the network is cut."""
    kinds = {"DistBackendError", "DistNetworkError", "DistStoreError"}
    gloo = r"Timed out waiting \d+ms for \w+ operation|Connection (closed|reset) by peer|Connection timed out"
    return type(error).__name__ in kinds or (isinstance(error, RuntimeError) and bool(re.search(gloo, str(error))))


def _end(message: str) -> None:
    for bar in list(getattr(tqdm, "_instances", ())):  # or the message would stand at the end of a progress bar
        bar.leave = False
        bar.close()
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
