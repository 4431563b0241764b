"""The one way to report a user's error, and to run a program's main()."""

import sys
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool

from tqdm import tqdm


class InputError(ValueError):
    """The user's mistake, in one sentence: what was wanted, what was found, what to do. It travels from worker
    processes to the main one like any exception."""


def run(main: Callable[[], None]) -> None:
    """Run a program's main(). A user's mistake, a full disk, a folder that may not be written and a dead worker end
    with one sentence on stderr and status 2, Ctrl-C with 130; any other exception is a bug and keeps its traceback."""
    try:
        main()
    except BrokenProcessPool:
        _end("a worker process was killed, probably for lack of memory: run the command again with fewer --workers")
    except OSError as error:
        _end(f"{error.filename or 'the system'}: {error.strerror or error}: put that right and run the command again")
    except ValueError as error:
        if type(error).__name__ != "InputError":  # SD_Model.py stands alone, and has one of its own
            raise
        _end(str(error))
    except KeyboardInterrupt:
        print("stopped: run the same command again to go on", file=sys.stderr)
        raise SystemExit(130) from None


def _end(message: str) -> None:
    for bar in list(getattr(tqdm, "_instances", ())):  # or the message would stand at the end of a progress bar
        bar.leave = False
        bar.close()
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
