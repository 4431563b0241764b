"""Pictures from tars, decoded, cut and in batches."""

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader

from sd.errors import InputError
from sd.pictures import Reject, cut, decode_image, read_header
from sd.shards import iter_samples, key_fraction, source_of


# Pictures
class Job(NamedTuple):
    """Samples of one tar that become pictures of one size."""

    shard: int  # which of the tars
    prefix: str  # of its image keys: source/shard
    samples: list[tuple[str, bytes]]  # key, file; in the order of the tar
    size: tuple[int, int]  # height and width that they get
    rejects: Counter  # of the tar itself, by reason, with its last job
    rejected: list[tuple[str, str]]  # key, reason; likewise
    last: bool  # the last job of its tar


class Batch(NamedTuple):
    shard: int  # which of the tars
    keys: list[str]  # of the pictures, in the order of the tar
    sha256: list[str]  # of the pictures' files
    pictures: torch.Tensor  # uint8 [len(keys), H, W, 3], RGB
    rejects: Counter  # by reason: of these samples, and with the last batch of the tar itself
    rejected: list[tuple[str, str]]  # key, reason: those of `rejects` whose key is known
    last: bool  # the last batch of its tar


def bucket_sizes(size: int, step: int) -> list[tuple[int, int]]:
    """(height, width) in multiples of `step` whose area is within 10 % of size^2 and whose aspect is at most 2."""
    long = range(size, 2 * size + 1, step)
    pairs = [(round(size * size / side / step) * step, side) for side in long]
    pairs = [(a, b) for a, b in pairs if 0 < a <= b <= 2 * a and abs(a * b / size**2 - 1) <= 0.1]
    return sorted({*pairs, *((b, a) for a, b in pairs)})


def nearest_size(data: bytes | None, sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """Of `sizes` (height, width), the one whose aspect is nearest to a picture's, by its header. Raises Reject."""
    if len(sizes) == 1:
        return sizes[0]
    header = read_header(data)
    if not header.width * header.height:
        raise Reject("corrupt")
    aspect = math.log(header.width / header.height) * (-1 if header.orientation > 4 else 1)
    return min(sizes, key=lambda size: abs(math.log(size[1] / size[0]) - aspect))


def jobs(tars: Iterable[Path], sizes: list[tuple[int, int]], batch: int, source: str | None) -> Iterator[Job]:
    """The samples of tars, in order; no job crosses from one tar to the next, and every tar has a last one."""
    for shard, tar in enumerate(tars):
        prefix = f"{source or source_of(tar)}/{tar.stem}"
        groups, rejects, rejected = defaultdict(list), Counter(), []
        for key, sample in iter_samples(tar, rejects):
            try:
                size = nearest_size(sample["image"], sizes)
            except Reject as e:
                rejects[e.reason] += 1
                rejected.append((key, e.reason))
                continue
            groups[size].append((key, sample["image"]))
            if len(groups[size]) == batch:
                yield Job(shard, prefix, groups.pop(size), size, Counter(), [], last=False)
        rest = list(groups.items()) or [(sizes[0], [])]
        for size, samples in rest[:-1]:
            yield Job(shard, prefix, samples, size, Counter(), [], last=False)
        yield Job(shard, prefix, rest[-1][1], rest[-1][0], rejects, rejected, last=True)


class Decoder:
    """Jobs to batches, as the dataset of a DataLoader whose sampler gives the jobs: these are read in the main process
    when a worker is to have one, so the tars may be chosen late."""

    def __init__(self, crop: str):
        self.crop = crop

    def __getitem__(self, job: Job) -> Batch:
        keys, hashes, rejects, rejected = [], [], job.rejects.copy(), list(job.rejected)
        pictures = np.empty((len(job.samples), *job.size, 3), np.uint8)
        for key, data in job.samples:
            # not key_fraction of the bare key: it decides on train and val, and val would be cut at one side
            at = key_fraction(f"crop {job.prefix}/{key}") if self.crop == "random" else None
            try:
                pictures[len(keys)] = cut(decode_image(data), job.size, at)
            except Reject as e:
                rejects[e.reason] += 1
                rejected.append((key, e.reason))
                continue
            keys.append(key)
            hashes.append(hashlib.sha256(data).hexdigest())
        return Batch(job.shard, keys, hashes, torch.from_numpy(pictures[: len(keys)]), rejects, rejected, job.last)


def stream(
    tars: Iterable[Path], size: int, batch: int, workers: int, pin=False, buckets=None, crop="center", source=None
) -> Iterator[Batch]:
    """The pictures of tars, in order, decoded in `workers` processes (0: in this one); pinned on request.

    Every batch has one size: size x size, or one of `buckets` (height, width). InputError if a worker dies.
    """
    loader = DataLoader(
        Decoder(crop),
        sampler=jobs(tars, buckets or [(size, size)], batch, source),
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=_as_it_is,
        worker_init_fn=_one_thread,
        prefetch_factor=2 if workers else None,
        multiprocessing_context="spawn" if workers else None,  # a fork of a process whose OpenCV has threads can hang
    )
    try:
        yield from loader
    except RuntimeError as e:
        if "DataLoader worker" not in str(e):
            raise
        raise InputError(
            "a worker process was killed, probably for lack of memory or of /dev/shm: run the command again with fewer "
            "--workers or a smaller --batch"
        ) from None


def _as_it_is(item):
    return item


def _one_thread(worker: int):
    cv2.setNumThreads(1)
