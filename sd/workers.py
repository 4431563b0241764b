"""Work shared by processes of one machine, and its progress bar."""

import itertools
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait

import cv2
from tqdm import tqdm

from sd.errors import InputError

MAX_WORKERS = 1024  # far more than a machine has cores


def _follow_parent() -> None:
    """In a worker process: one thread for OpenCV, and a thread that ends this process when its parent has died."""
    cv2.setNumThreads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def check_workers(workers: int) -> None:
    if not 0 <= workers <= MAX_WORKERS:
        raise InputError(f"--workers wants 0 to {MAX_WORKERS:,} processes, found {workers:,}")


def parallel(function: Callable, jobs: Iterable[tuple], workers: int) -> Iterator:
    """Yields function(*job) for each job as it is done, in any order; in this process when workers <= 1.

    The first exception ends it. At most two jobs a worker wait in the queue, so `jobs` may be long.
    """
    check_workers(workers)
    if workers <= 1:
        for job in jobs:
            yield function(*job)
        return
    jobs = iter(jobs)
    fresh = multiprocessing.get_context("spawn")  # forking a process whose libraries have started threads may hang it
    with ProcessPoolExecutor(workers, fresh, initializer=_follow_parent) as pool:
        waiting = {pool.submit(function, *job) for job in itertools.islice(jobs, 2 * workers)}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
                waiting.update(pool.submit(function, *job) for job in itertools.islice(jobs, len(done)))
        finally:
            pool.shutdown(cancel_futures=True)


def progress(total: int | None, description: str, unit: str) -> tqdm:
    """A progress bar on stderr; one line every ten seconds where stderr is a file."""
    interval = 0.2 if sys.stderr.isatty() else 10
    return tqdm(total=total, desc=description, unit=unit, unit_scale=True, mininterval=interval)
