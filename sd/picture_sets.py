"""Pictures that fit in memory: read once at one size or several, and given to training a batch a step."""

import hashlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from sd.errors import InputError
from sd.shards import image_key, key_fraction, list_shards, source_of
from sd.stream import stream
from sd.workers import progress

MAX_HELD_OUT = 256  # pictures of a size that the PSNR is measured on

GROWTH = 2**28  # bytes by which an array of pictures grows


class PictureSet(NamedTuple):
    """Pictures of one size, uint8."""

    train: torch.Tensor  # [N, size, size, 3], on the CPU or a GPU
    held_out: torch.Tensor  # [M <= MAX_HELD_OUT, size, size, 3], on the CPU
    digest: str  # sha256 over both

    @property
    def size(self) -> int:
        return self.train.shape[1]


class Stack:
    """An array that grows: of 12 GB there is never a second copy, where the system can lengthen memory in its place (as
    Linux does)."""

    def __init__(self, size: int):
        self.array, self.count = np.empty((0, size, size, 3), np.uint8), 0
        self.step = max(1, GROWTH // (size * size * 3))  # pictures

    def add(self, pictures: np.ndarray):
        end = self.count + len(pictures)
        if end > len(self.array):
            self._resize(end + self.step)
        self.array[self.count : end] = pictures
        self.count = end

    def finished(self) -> np.ndarray:
        self._resize(self.count)
        return self.array

    def _resize(self, count: int):
        self.array.resize((count, *self.array.shape[1:]), refcheck=False)  # nobody else has a view of it


# ---------------------------------------------------------------------------------------------------------------------


# Reading
def load_pictures(
    images: str, size: int, workers: int, ram_gib: float, held_out_share: float, source: str | None = None
) -> PictureSet:
    """Decode all pictures once, and split them by hash of their keys, in which `source` stands for the folder's own.
    Where those to train on would take more than ram_gib, the first that fit are used, and a line says so."""
    tars = list_shards(images)
    limit = int(ram_gib * 2**30) // (size * size * 3)
    train, held_out, rejects, digest = Stack(size), Stack(size), {}, hashlib.sha256()
    with progress(None, "reading", "img") as bar, ThreadPoolExecutor(1) as beside:  # which hashes meanwhile
        hashed = None
        batches = stream(tars, size, batch=64, workers=workers)
        for batch in batches:
            prefix, shard = source or source_of(tars[batch.shard]), tars[batch.shard].stem
            keys = (image_key(prefix, shard, key) for key in batch.keys)
            held = np.array([key_fraction(key) < held_out_share for key in keys], bool)
            pictures = batch.pictures.numpy()
            new = pictures[~held][: limit - train.count]
            train.add(new)
            held_out.add(pictures[held][: MAX_HELD_OUT - held_out.count])
            if hashed:
                hashed.result()
            hashed = beside.submit(digest.update, new)
            bar.update(len(batch.keys))
            for reason, n in batch.rejects.items():
                rejects[reason] = rejects.get(reason, 0) + n
            if train.count >= limit:
                print(f"note: {limit:,} pictures fill --ram_gib {ram_gib:g}; what comes after {prefix}/{shard} is "
                      "unused")  # fmt: skip
                break
        batches.close()
    if not train.count or not held_out.count:
        raise InputError(
            f"pictures to train on and to hold out were wanted in {images}, found {train.count} and {held_out.count}: "
            "give more pictures"
        )
    train, held_out = train.finished(), held_out.finished()
    digest.update(held_out)
    at = f" at {size} px" if source else ""
    print(f"{len(train):,} pictures to train on{at}, {len(held_out)} held out; rejects: {rejects or 'none'}")
    return PictureSet(torch.from_numpy(train), torch.from_numpy(held_out), digest.hexdigest())


def load_sets(
    images: list[str], sizes: list[int], workers: int, ram_gib: float, held_out_share: float
) -> list[PictureSet]:
    """A set for each size, of one folder (or glob) or of one for each. What is held out at one size is at every other
    too, as keys of several folders differ in shard and name alone. The sizes share ram_gib by their areas."""
    if len(sizes) == 1:
        return [load_pictures(images[0], sizes[0], workers, ram_gib, held_out_share)]
    source = source_of(list_shards(images[0])[0])
    area = sum(size * size for size in sizes)
    folders = images * len(sizes) if len(images) == 1 else images
    return [
        load_pictures(folder, size, workers, ram_gib * size * size / area, held_out_share, source)
        for folder, size in zip(folders, sizes, strict=True)
    ]


def digest_of(sets: list[PictureSet]) -> str:
    """One sha256 for all sets; of one set its own."""
    digests = [s.digest for s in sets]
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def place(sets: list[PictureSet], device: torch.device) -> list[PictureSet]:
    """With the pictures to train on in a GPU's memory, where they take at most a third of what is free there."""
    if device.type != "cuda":
        return sets
    wanted, free = sum(s.train.nbytes for s in sets), torch.cuda.mem_get_info(device)[0]
    fits = wanted <= free / 3
    print(
        f"the pictures take {wanted / 2**30:.1f} GiB and stay in {'the GPU' if fits else 'main'} memory; "
        f"{free / 2**30:.1f} GiB of the GPU's are free"
    )
    return [s._replace(train=s.train.to(device)) for s in sets] if fits else sets


# ---------------------------------------------------------------------------------------------------------------------


# Order
@lru_cache(maxsize=4)
def _order(count: int, *seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(count)


def batch_indices(seed: int, turn: int, batch: int, count: int, which: int = 0) -> np.ndarray:
    """Which of `count` pictures of size number `which` its turn 0, 1, 2, ... sees: int64 [batch]. Epoch e is a
    permutation of (seed, e), for further sizes of (seed, e, which), and batches run across the edges of epochs."""
    positions = np.arange(turn * batch, (turn + 1) * batch)
    epochs = positions // count
    orders = {e: _order(count, seed, e, *((which,) if which else ())) for e in np.unique(epochs).tolist()}
    return np.array([orders[e][p] for e, p in zip(epochs.tolist(), (positions % count).tolist(), strict=True)])


def step_noise(seed: int, step: int, shape: tuple) -> torch.Tensor:
    """The standard normal noise of a step, fp32 on the CPU: CUDA's own generator would depend on the card."""
    digest = hashlib.blake2b(f"{seed} {step}".encode(), digest_size=8).digest()
    return torch.randn(shape, generator=torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1))


def turns_done(steps: int, sizes: int) -> list[int]:
    """How many of the first `steps` steps each size had: they take turns, step i is of size i modulo `sizes`."""
    return [(steps + sizes - 1 - which) // sizes for which in range(sizes)]


class Feed(NamedTuple):
    """What one step sees, on the device."""

    which: int  # of the sizes
    pictures: torch.Tensor  # uint8 [B, size, size, 3]
    noise: torch.Tensor  # fp32 [B, z, size / factor, size / factor]


def feed(
    sets: list[PictureSet], batches: list[int], latent: tuple[int, int], seed: int, begin: int, device, ahead: int = 3
) -> Iterator[Feed]:
    """Steps begin, begin + 1, ... without end. A thread chooses pictures and makes noise for `ahead` steps; the device
    is not waited for. batches: pictures a step of each size. latent: channels and factor of the autoencoder."""
    channels, factor = latent
    device = torch.device(device)
    pinned = device.type == "cuda"

    def make(step: int) -> tuple:
        which, turn = step % len(sets), step // len(sets)
        train, batch = sets[which].train, batches[which]
        chosen = torch.from_numpy(batch_indices(seed, turn, batch, len(train), which))
        if not train.is_cuda:
            chosen = train[chosen]  # [B, size, size, 3]
        side = sets[which].size // factor
        noise = step_noise(seed, step, (batch, channels, side, side))
        return which, *(t.pin_memory() if pinned else t for t in (chosen, noise))

    # Each thread has a current GPU of its own, the first one unless it is told; "cuda" alone has no index to tell.
    here = {"initializer": torch.cuda.set_device, "initargs": (device,)} if pinned and device.index is not None else {}
    with ThreadPoolExecutor(1, **here) as thread:
        waiting = deque(thread.submit(make, begin + i) for i in range(ahead))
        try:
            while True:
                which, chosen, noise = waiting.popleft().result()
                begin += 1
                waiting.append(thread.submit(make, begin + ahead - 1))
                chosen, noise = (t.to(device, non_blocking=True) for t in (chosen, noise))
                train = sets[which].train
                yield Feed(which, train[chosen] if train.is_cuda else chosen, noise)
        finally:
            thread.shutdown(cancel_futures=True)
