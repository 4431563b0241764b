"""What training sees: which pictures, in which order, with which noise.

A sample's randomness belongs to the sample: everything here is a function of (seed, global position), the number of
images seen before it, and of nothing else. Ranks, batches, accumulation and restarts only cut the same sequence.
"""

import contextlib
import hashlib
import json
import math
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from sd.errors import InputError, reading
from sd.shards import FLIP, key_fraction

DRAWING = 1  # version of how everything here is drawn; raise it when one seed no longer gives the same samples

MAX_SEED = 2**32 - 1  # seeds are half a word of the generators' keys


def check_seed(seed: int):
    """InputError unless a seed is within 0..MAX_SEED: larger ones would train like smaller ones."""
    if not 0 <= seed <= MAX_SEED:
        raise InputError(f"--seed wants a whole number from 0 to {MAX_SEED:,}, found {seed}")


def generator(*key: int) -> np.random.Generator:
    """A counter-based generator (Philox, Salmon et al. 2011) of its own for each key of up to three integers, the first
    two of which count modulo 2^32."""
    seed, stream, position = (*key, 0, 0)[:3]
    words = np.array([(seed & 0xFFFFFFFF) | (stream & 0xFFFFFFFF) << 32, position], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=words))


def permutation(random: np.random.Generator, size: int) -> np.ndarray:
    """random.permutation(size), in half of its memory where four bytes a number do: uint32, else int64 [size]."""
    numbers = np.arange(size, dtype=kind_of(size))
    random.shuffle(numbers)
    return numbers


def kind_of(size: int) -> type:
    """Of numbers below size."""
    return np.uint32 if size < 1 << 32 else np.int64


class Generators:
    """generator(seed, stream, position) for one position after the other: one Philox whose key is set anew, which takes
    a tenth of the time that making one takes. What is drawn is the same."""

    def __init__(self, seed: int, stream: int):
        self._bits = np.random.Philox(key=0)
        self.random = np.random.Generator(self._bits)
        self._state = self._bits.state  # counter 0, empty buffer
        self._key = self._state["state"]["key"]
        self._key[0] = (seed & 0xFFFFFFFF) | (stream & 0xFFFFFFFF) << 32

    def at(self, position: int) -> np.random.Generator:
        """The generator of a position; the one given before is this one now."""
        self._key[1] = position
        self._bits.state = self._state
        return self.random


def uniforms(seed: int, stream: int, positions: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each position, float64 [B], for what one draw of 53 bits decides: of all positions at
    once, in a fraction of the time that a generator each takes. Two rounds of SplitMix64 (Steele et al. 2014), the
    first on seed and stream, the second on its sum with the position."""
    key = np.array([(seed & 0xFFFFFFFF) | (stream & 0xFFFFFFFF) << 32], np.uint64)
    return (_mixed(_mixed(key) + np.asarray(positions).astype(np.uint64)) >> np.uint64(11)) * 2.0**-53


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's output for states x, uint64, which count modulo 2^64."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


STREAM_SAMPLE, STREAM_EPOCH, STREAM_SOURCE, STREAM_FLIP, STREAM_CAPTION = range(5)
STREAM_PICTURE = 8  # not of 1, 5, 9, ... and 2, 6, 10, ..., which are the further sources'
STREAM_VALIDATION = 1 << 20


class Source(NamedTuple):
    name: str
    weight: float | None
    cap: int | None
    dataset: Path
    latents: Path


def parse_sources(settings: dict) -> list[Source]:
    """`name[:weight[:cap]],...` below data_root, or the one --dataset with its --latents.

    Below a source's folder the dataset is the folder dataset_name, and the latents are latents_<size>, or latents where
    there is no such folder. settings: data_root, data, dataset, latents; and dataset_name and size, where one cares.
    """
    if settings["dataset"] is not None:
        return [
            Source(Path(settings["dataset"]).name, None, None, Path(settings["dataset"]), Path(settings["latents"]))
        ]
    root, sources, dataset = Path(settings["data_root"]), [], settings.get("dataset_name", "dataset")
    if dataset in ("", ".", "..") or Path(dataset).name != dataset:
        raise InputError(f"--dataset_name wants the name of a folder below each source, found {dataset!r}")
    for part in settings["data"].split(","):
        name, *numbers = part.strip().split(":")
        try:
            weight = float(numbers[0]) if numbers and numbers[0] else None
            cap = int(numbers[1]) if len(numbers) > 1 else None
            positive = (weight is None or 0 < weight < math.inf) and (cap is None or cap > 0)
            if not name or len(numbers) > 2 or not positive:
                raise ValueError
        except ValueError:
            raise InputError(f"--data wants name[:weight[:cap]],... with positive numbers, found {part!r}") from None
        latents = root / name / f"latents_{settings.get('size')}"
        if not latents.is_dir():
            latents = root / name / "latents"
        sources.append(Source(name, weight, cap, root / name / dataset, latents))
    if len({s.weight is None for s in sources}) > 1:
        raise InputError(f"--data wants weights for all sources or for none, found {settings['data']!r}")
    return sources


def read_manifest(folder: Path, what: str, names: tuple[str, ...]) -> dict:
    """manifest.json of a folder of `what`. InputError if it is absent, damaged, unfinished, or lacks one of `names`."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
    except OSError:
        raise InputError(
            f"{folder} was to hold {what}, and there is no {path.name}; run the command that makes it, or mend the path"
        ) from None
    except ValueError:
        raise InputError(f"{path} is damaged (not JSON); make {what} again") from None
    missing = [n for n in names if not isinstance(manifest, dict) or n not in manifest]
    if missing:
        raise InputError(f"{path} wants {', '.join(names)}, and {missing[0]} is missing; make {what} again")
    if not manifest.get("complete", True):
        raise InputError(f"{folder} holds {what}, not finished; run the command that makes it again")
    return manifest


def check_count(folder: Path, what: str, found: int, told: int):
    """InputError if a folder does not hold as many `what` as its manifest says."""
    if found != told:
        raise InputError(f"the manifest of {folder} tells of {told:,} {what}, and {found:,} are there; make them again")


def read_split(folder: Path, split: str) -> tuple[pa.ChunkedArray, np.ndarray, np.ndarray | None, pa.ChunkedArray]:
    """Of one split of an Arrow dataset, memory-mapped: image_key; token ids [M, L] of all captions, those of one
    picture beside each other, its first one first; how many captions each picture has, int [N], or None where each has
    one (M = N); and the first captions."""
    try:
        state = json.loads((folder / split / "state.json").read_text())
        tables = [
            pa.ipc.open_stream(pa.memory_map(str(folder / split / f["filename"]))).read_all()
            for f in state["_data_files"]
        ]
    except (OSError, ValueError, KeyError, pa.ArrowInvalid) as e:
        raise InputError(
            f"a dataset with a {split} split was wanted in {folder} ({e}); run data_pipeline/05 again"
        ) from None
    except (TypeError, AttributeError):
        raise InputError(f"{folder / split / 'state.json'} is damaged; run data_pipeline/05 again") from None
    if not tables:  # a split without rows may have no file
        return pa.chunked_array([], pa.string()), np.zeros((0, 1), np.uint16), None, pa.chunked_array([], pa.string())
    with reading(folder / split, "run data_pipeline/05 again"):
        names = ["image_key", "input_ids", "caption"]
        names += [name for name in ("more_input_ids",) if name in tables[0].column_names]
        table = pa.concat_tables(tables).select(names)
        if not pa.types.is_integer(getattr(table["input_ids"].type, "value_type", pa.null())):
            raise ValueError(f"input_ids are {table['input_ids'].type}, not lists of whole numbers")
        if empty := [name for name in table.column_names if table[name].null_count]:
            raise ValueError(f"column {empty[0]} has nulls")
        if any(table[name].type != pa.string() for name in ("image_key", "caption")):
            raise ValueError("image_key and caption are not texts")
        ids, counts = _ids(table["input_ids"]), None
        if "more_input_ids" in names:
            ids, counts = _with_more(ids, table["more_input_ids"])
    ids = ids.astype(np.uint16 if ids.max(initial=0) < 1 << 16 else np.int32)
    return table["image_key"], ids, counts, table["caption"]


def _ids(lists: pa.ChunkedArray) -> np.ndarray:
    """Lists of equally many whole numbers as one array [N, L]."""
    ids = [np.asarray(c.flatten()).reshape(len(c), -1) for c in lists.chunks if len(c)]
    return np.concatenate(ids) if ids else np.zeros((0, 1), np.int32)  # Split gives it the others' width


def _with_more(ids: np.ndarray, more: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray | None]:
    """First ids [N, L] and N lists of further ones as read_split gives them: all [M, L], and counts [N] or None."""
    if not pa.types.is_integer(getattr(getattr(more.type, "value_type", None), "value_type", pa.null())):
        raise ValueError(f"more_input_ids are {more.type}, not lists of lists of whole numbers")
    counts = 1 + pc.list_value_length(more).to_numpy().astype(np.int64)
    if len(ids) == counts.sum():
        return ids, None
    further = _ids(pa.chunked_array([c.flatten() for c in more.chunks]))
    if further.shape != (counts.sum() - len(ids), ids.shape[1]):
        raise ValueError("more_input_ids are not as long as input_ids")
    every = np.empty((counts.sum(), ids.shape[1]), ids.dtype)
    is_first = np.zeros(len(every), bool)
    is_first[np.cumsum(counts) - counts] = True
    every[is_first], every[~is_first] = ids, further
    return every, counts


class LatentStore:
    """Latents of one source: packed [N, C, h, w] fp16 arrays, memory-mapped so that ranks share the page cache, with an
    index of image keys; or a folder of one .npy [C, h, w] a picture, read into memory by threads.

    Files that are cut, empty or do not fit their index are left out and counted in `unreadable`. `left_out`: their
    names below the folder, sorted; `found`: sha256 of the names and shapes of the others.
    """

    def __init__(self, folder: Path, pretouch: bool):
        self.manifest = read_manifest(folder, "the latents", ("size", "scaled", "vae", "kind"))
        self.arrays, self.left_out, names = [], [], []
        index = sorted(folder.glob("*.parquet"))
        if index:
            keys, shards, rows = [], [], []
            for path in index:
                reading = path
                try:
                    table = pq.ParquetFile(path).read(columns=["image_key", "row"])
                    if table["row"].null_count or not pa.types.is_integer(table["row"].type):
                        raise ValueError("its rows are no whole numbers")
                    row = table["row"].to_numpy()
                    reading = path.with_suffix(".npy")
                    array = np.load(reading, mmap_mode="r")
                    if array.ndim != 4 or row.max(initial=-1) >= len(array) or row.min(initial=0) < 0:
                        raise ValueError("the array is not the index's")
                except Exception:  # numpy and pyarrow raise many: cut, empty, or of another shard
                    self.left_out.append(reading.name)
                    continue
                names.append(reading.name)
                keys += table["image_key"].cast(pa.string()).chunks
                rows.append(row)
                shards.append(np.full(len(table), len(self.arrays)))
                self.arrays.append(array)
            if pretouch:  # one rank a machine brings the files into the page cache, at disk speed
                with ThreadPoolExecutor(4) as pool:
                    list(pool.map(_read_through, [p.with_suffix(".npy") for p in index]))
            self.keys = pa.chunked_array(keys, type=pa.string())
            self.shard = np.concatenate([np.zeros(0, int), *shards])
            self.row = np.concatenate([np.zeros(0, int), *rows])
        else:
            files = sorted(folder.rglob("*.npy"))
            with ThreadPoolExecutor(16) as pool:
                loaded = list(pool.map(_load_or_none, files))
            good = [(f, a[None]) for f, a in zip(files, loaded) if a is not None and a.ndim == 3]
            names = [str(f.relative_to(folder)) for f, _ in good]
            self.left_out = sorted({str(f.relative_to(folder)) for f in files} - set(names))
            source = folder.parent.name
            self.keys = pa.chunked_array(
                [[f"{source}/{f.relative_to(folder).with_suffix('')}" for f, _ in good]], pa.string()
            )
            self.arrays = [a for _, a in good]
            self.shard, self.row = np.arange(len(good)), np.zeros(len(good), int)
        self.unreadable = len(self.left_out)
        self.found = hashlib.sha256()
        for name, array in zip(names, self.arrays):
            self.found.update(f"{name} {array.shape} {array.dtype}\n".encode())
        self.found = self.found.hexdigest()
        self.shapes = {a.shape[1:] for a in self.arrays}  # of one stored latent: one, or several of --buckets
        if not self.unreadable:
            check_count(folder, "latents", len(self.keys), self.manifest.get("count", len(self.keys)))


def _read_through(path: Path):
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as f:
        buffer = bytearray(1 << 24)
        while f.readinto(buffer):
            pass


def _load_or_none(path: Path) -> np.ndarray | None:
    try:
        return np.load(path)
    except Exception:  # numpy raises many
        return None


class Split:
    """Pictures of one split over all sources: token ids, latents, and where each source's pictures lie.

    shard, row: int32 [N, 2], where the latent of a picture lies and where that of its mirror image, which is found by
    its key; the picture's own again where there is none. shapes: those of latents; shape: int [N], which of them.
    ids: [M, L], of all captions, picture after picture; first: int64 [N + 1], where each picture's begin, or None where
    each has one. captions: the first of each.
    """

    windows = None  # see SampleOrder

    def __init__(self, sources: list[Source], stores: list[LatentStore], split: str, fraction: float):
        self.arrays, ids, counts, shard, row, keys, captions, self.sizes = [], [], [], [], [], [], [], []
        self.moments = stores[0].manifest["kind"] == "moments"
        self.missing, self.unreadable = 0, sum(s.unreadable for s in stores)
        self.flipped = any(s.manifest.get("flip") for s in stores)  # are there latents of mirror images?
        for source, store in zip(sources, stores):
            key, token_ids, count, caption = read_split(source.dataset, split)
            told = read_manifest(source.dataset, "the dataset", ("counts",))["counts"].get(split, 0)
            check_count(source.dataset, f"{split} rows", len(key), told)
            plain = mirrored = pc.index_in(key, store.keys).combine_chunks()
            if store.manifest.get("flip"):
                mirrored = pc.index_in(pc.binary_join_element_wise(key, FLIP, ""), store.keys).combine_chunks()
            kept = np.flatnonzero(np.asarray(plain.is_valid()))
            self.missing += len(key) - len(kept)
            if fraction < 1 or (source.cap is not None and source.cap < len(kept)):
                rank = np.array([key_fraction(k) for k in key.take(kept).to_pylist()])
                order = np.argsort(rank, kind="stable")[: source.cap]
                kept = np.sort(kept[order[rank[order] < fraction]])
            at = np.stack([plain.take(kept), pc.coalesce(mirrored, plain).take(kept)], axis=1)
            counts.append(None if count is None else count[kept])
            ids.append(
                token_ids[kept] if count is None else token_ids[runs((np.cumsum(count) - count)[kept], count[kept])]
            )
            shard.append((store.shard[at] + len(self.arrays)).astype(np.int32))
            row.append(store.row[at].astype(np.int32))
            keys.append(key.take(kept))
            captions.append(caption.take(kept))
            self.arrays += store.arrays
            self.sizes.append(len(kept))
        ids = [a for a in ids if len(a)] or ids[:1]  # a source without rows in this split has no width
        if len({a.shape[1] for a in ids}) > 1:
            raise InputError(
                f"the sources' token ids differ in length: {[a.shape[1] for a in ids]}; tokenise them alike"
            )
        self.ids, self.shard, self.row = np.concatenate(ids), np.concatenate(shard), np.concatenate(row)
        self.first = None
        if len(self.ids) > len(self.shard):
            counts = [np.ones(n, np.int64) if c is None else c for c, n in zip(counts, self.sizes)]
            self.first = np.cumsum(np.concatenate([np.zeros(1, np.int64), *counts]))
        self.shapes = sorted({a.shape[1:] for a in self.arrays})
        of_array = np.array([self.shapes.index(a.shape[1:]) for a in self.arrays], int)
        self.shape = of_array[self.shard[:, 0]]
        self.keys, self.captions = (pa.chunked_array([c for x in parts for c in x.chunks], pa.string())
                                    for parts in (keys, captions))  # fmt: skip

    def __len__(self) -> int:
        return len(self.shard)

    @property
    def several(self) -> bool:
        """Whether a picture has several captions."""
        return self.first is not None

    @property
    def length(self) -> int:
        """L, the token ids of a caption."""
        return self.ids.shape[1]

    def token_ids(self, index: np.ndarray, turn: np.ndarray | float = 0.0) -> np.ndarray:
        """Ids int64 [B, L] of one caption of each of these pictures. turn: which one, from 0, the first, to below 1; a
        number, or float [B]."""
        if self.first is not None:
            begin = self.first[index]
            index = begin + (turn * (self.first[index + 1] - begin)).astype(np.int64)
        return self.ids[index].astype(np.int64)

    def all_token_ids(self, chunk: int):
        """Those of all captions, in parts of up to so many, int64 [.., L]."""
        for first in range(0, len(self.ids), chunk):
            yield self.ids[first : first + chunk].astype(np.int64)

    def digest(self, sampled: int = 256) -> tuple[str, str]:
        """sha256 of the pictures' keys and all captions' token ids in their order; and of `sampled` stored latents,
        evenly spaced. To read all of them would take as long as an epoch's reading."""
        pictures, lengths, latents = (hashlib.sha256() for _ in range(3))
        for chunk in self.keys.chunks:
            if len(chunk):
                at = np.frombuffer(chunk.buffers()[1], np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
                lengths.update(np.diff(at))
                pictures.update(chunk.buffers()[2][int(at[0]) : int(at[-1])])
        pictures.update(lengths.digest() + f"{self.sizes} {self.ids.shape[1:]} {self.ids.dtype}".encode())
        pictures.update(np.ascontiguousarray(self.ids))
        if self.first is not None:
            pictures.update(self.first)
        for i in np.unique(np.linspace(0, len(self) - 1, min(sampled, len(self))).astype(int)):
            shard, row = self.shard[i, 0], self.row[i, 0]
            latents.update(np.ascontiguousarray(self.arrays[shard][row]))
        return pictures.hexdigest(), latents.hexdigest()

    def latents(self, index: np.ndarray, mirrored: np.ndarray | int = 0) -> np.ndarray:
        """Stored latents fp32 [B, C, h, w]; of the mirror image, if it has any, where `mirrored` (int [B]) is 1."""
        shard, row = self.shard[index, mirrored].tolist(), self.row[index, mirrored].tolist()
        out = np.empty((len(row), *self.arrays[shard[0]].shape[1:]), np.float32)
        for i, (s, r) in enumerate(zip(shard, row)):
            out[i] = self.arrays[s][r]
        return out

    def weights(self, index: np.ndarray) -> np.ndarray | None:
        """How much each place of these pictures' latents counts in the loss, fp32 [B, h, w]; None: all alike."""
        return None

    def shown(self, index: np.ndarray, mirrored: np.ndarray | int, positions: np.ndarray):
        """Which pictures are shown at these positions, where `index` is due, their stored latents, and weights. Those
        encoded while training (sd/online.py) are cut by the position, and others stand in for those that are damaged.
        """
        return index, self.latents(index, mirrored), self.weights(index)


def runs(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (counts[0] numbers), then those from starts[1], and so on: int64."""
    return np.arange(counts.sum()) + np.repeat(starts - (np.cumsum(counts) - counts), counts)


class SampleOrder:
    """Which picture stands at each global position of training.

    Epoch e of a source is a permutation of (seed, source, e). A mixture's epoch has as many positions as the sources
    have pictures; its weights hold over any window, since each source's draws are spread evenly over the epoch.

    windows: of pictures in tars that should be read in one place after the other, (tar of each picture, int [N]; W):
    an epoch of a source then shuffles its tars, and the pictures within each W tars that follow each other.

    It holds two epochs, of 4 bytes a picture each, and while it makes one at most as much again and 8 bytes more.
    """

    STRETCH = 1 << 22  # positions that are merged at once

    def __init__(self, sizes: list[int], weights: list[float] | None, seed: int, windows=None):
        self.sizes, self.seed, self.epoch_size, self.windows = sizes, seed, sum(sizes), windows
        weights = np.array(sizes if weights is None else weights, float)
        share = weights / weights.sum() * self.epoch_size
        self.draws = np.floor(share).astype(int)  # positions of an epoch that each source fills
        for s in np.argsort(self.draws - share, kind="stable")[: self.epoch_size - self.draws.sum()]:
            self.draws[s] += 1
        self.offsets = np.concatenate([[0], np.cumsum(sizes)])
        self._cache = {}

    def _permutation(self, source: int, epoch: int) -> np.ndarray:
        random, size = generator(self.seed, STREAM_SOURCE + 4 * source, epoch), self.sizes[source]
        if self.windows is None:
            return permutation(random, size)
        tars, at_once = self.windows
        tars = tars[self.offsets[source] : self.offsets[source] + size]
        begins = np.concatenate([[0], np.flatnonzero(tars[1:] != tars[:-1]) + 1, [size]])  # each tar's pictures
        key = random.random(size)
        if (np.diff(tars[begins[:-1]].astype(np.int64)) <= 0).any():  # they do not lie one after the other
            names, number = np.unique(tars, return_inverse=True)
            return np.lexsort((key, random.permutation(len(names))[number] // at_once)).astype(kind_of(size))
        window, index = random.permutation(len(begins) - 1) // at_once, np.empty(size, kind_of(size))
        by_window, done = np.argsort(window, kind="stable"), 0
        for some in np.split(by_window, np.flatnonzero(np.diff(window[by_window])) + 1):
            members = np.concatenate([np.arange(begins[k], begins[k + 1]) for k in some])
            index[done : done + len(members)] = members[np.argsort(key[members], kind="stable")]
            done += len(members)
        return index

    def epoch(self, e: int) -> np.ndarray:
        """Indices into the split, whole numbers [epoch_size], of epoch e."""
        if e not in self._cache:
            self._cache = {k: v for k, v in self._cache.items() if k == e - 1}
            index = [self._drawn(s, e) for s, draws in enumerate(self.draws) if draws]
            self._cache[e] = index[0] if len(index) == 1 else self._merged(index, e)
        return self._cache[e]

    def _drawn(self, source: int, e: int) -> np.ndarray:
        """What epoch e has of a source, in the order in which it comes."""
        draws, size = int(self.draws[source]), self.sizes[source]
        first, last = e * draws, (e + 1) * draws  # of the source's own endless sequence of epochs
        own = [self._permutation(source, k) for k in range(first // size, (last - 1) // size + 1)]
        start = first - first // size * size
        index = (own[0] if len(own) == 1 else np.concatenate(own))[start : start + draws]
        kind = kind_of(int(self.offsets[-1]))
        index = index.astype(kind, copy=False)
        return index + kind(self.offsets[source]) if self.offsets[source] else index

    def _merged(self, index: list[np.ndarray], e: int) -> np.ndarray:
        """Of what an epoch has of each source the order of all: by times at which each comes, evenly spread and
        jittered. These rise within a source, so that a stretch of the epoch can be sorted after the other."""
        sources = [s for s, draws in enumerate(self.draws) if draws]
        random = [generator(self.seed, STREAM_EPOCH + 4 * s, e) for s in sources]
        merged, done = np.empty(self.epoch_size, index[0].dtype), 0
        made, taken, waiting = [0] * len(index), [0] * len(index), [np.zeros(0)] * len(index)
        stretches = self.epoch_size // self.STRETCH + 1
        for stretch in range(1, stretches + 1):
            until, times, found = stretch / stretches if stretch < stretches else math.inf, [], []
            for k, own in enumerate(index):
                draws = len(own)
                end = draws if stretch == stretches else max(made[k], min(draws, int(until * draws) + 2))
                jittered = (np.arange(made[k], end) + random[k].random(end - made[k])) / draws
                waiting[k], made[k] = np.concatenate([waiting[k], jittered]), end
                count = int(np.searchsorted(waiting[k], until))
                times.append(waiting[k][:count])
                found.append(own[taken[k] : taken[k] + count])
                waiting[k], taken[k] = waiting[k][count:], taken[k] + count
            order = np.argsort(np.concatenate(times), kind="stable")
            merged[done : done + len(order)] = np.concatenate(found)[order]
            done += len(order)
        return merged

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Indices into the split at global positions (images seen before), int [B]."""
        epochs, within = np.divmod(np.asarray(positions, np.int64), self.epoch_size)
        index = np.empty(len(within), np.int64)
        for e in np.unique(epochs):
            index[epochs == e] = self.epoch(int(e))[within[epochs == e]]
        return index


class BucketOrder:
    """A SampleOrder for latents of several shapes, such that each global batch has one shape.

    The pictures of the plain order queue up by shape, and the queue that is first to hold a global batch is the next
    one. So all pictures come as often as in the plain order, up to those that wait at the end, and a batch's shape
    follows from the seed, its position and the size of a global batch.
    """

    def __init__(self, order: SampleOrder, shape: np.ndarray, batch: int):
        """shape: int [N], of each picture of the split; batch: pictures of a global batch."""
        self.order, self.shape, self.batch, self.epoch_size = order, shape, batch, order.epoch_size
        self._begin()

    def _begin(self):
        self._queues = [np.zeros(0, int) for _ in range(self.shape.max(initial=0) + 1)]
        self._epoch, self._first, self._batches = 0, 0, np.zeros((0, self.batch), int)  # those before _epoch

    def _advance(self):
        """To the next epoch's batches, int [batches, batch]."""
        index, batches, full_at = self.order.epoch(self._epoch), [], []
        for k, waiting in enumerate(self._queues):
            own = np.flatnonzero(self.shape[index] == k)
            joined = np.concatenate([waiting, index[own]])
            full = len(joined) // self.batch
            batches.append(joined[: full * self.batch].reshape(full, self.batch))
            full_at.append(own[np.arange(1, full + 1) * self.batch - 1 - len(waiting)])
            self._queues[k] = joined[full * self.batch :]
        self._first += len(self._batches)
        self._batches = np.concatenate(batches)[np.argsort(np.concatenate(full_at))]
        self._epoch += 1

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Indices into the split at global positions, which lie in one global batch, int [B]."""
        number = int(positions[0]) // self.batch
        if number < self._first:
            self._begin()
        while number >= self._first + len(self._batches):
            self._advance()
        return self._batches[number - self._first][positions - number * self.batch]


class Batch(NamedTuple):
    latents: torch.Tensor  # fp32 [B, z, h, w]
    noise: torch.Tensor  # fp32 [B, z, h, w]
    t: torch.Tensor  # int64 [B]
    ids: torch.Tensor  # int64 [B, L], those of "" where the caption is dropped
    seen: int = 0  # sum over the samples of seen_hash
    weights: torch.Tensor | None = None  # fp32 [B, h, w], of each place in the loss, where pictures have masks

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The four, and the weights if there are any."""
        return self[:4] if self.weights is None else (*self[:4], self.weights)

    def map(self, function) -> "Batch":
        """function on each of the tensors."""
        return Batch.of([function(x) for x in self.tensors], self.seen)

    @staticmethod
    def of(tensors, seen: int = 0) -> "Batch":
        """The batch that has these tensors."""
        return Batch(*tensors[:4], seen, *tensors[4:])


def seen_hash(position: int, key: str) -> int:
    """64 bits that stand for 'the picture `key` was trained on at this global position'. Their sum modulo 2^64 over a
    run, in whatever order, proves what was seen: it is in each line of log.jsonl and in each checkpoint."""
    return int.from_bytes(hashlib.blake2b(f"{position} {key}".encode(), digest_size=8).digest(), "big")


def make_batch(
    split: Split,
    order: SampleOrder | BucketOrder,
    positions: np.ndarray,
    null_ids: np.ndarray,
    drop: float,
    seed: int,
    steps: int,
    offset: float = 0.0,
) -> Batch:
    """The samples at these global positions. Each draws from its own generator, always in the same sequence. Whether a
    picture is mirrored (where its mirror image has a latent), and which of its captions it is shown with (where it has
    several), is drawn from others, so that the rest is as without.

    drop: probability that a caption is replaced by null_ids [L], those of ""; steps: timesteps of the noise schedule;
    offset: standard deviation of a noise that is constant over each channel, added to the noise (Guttenberg 2023,
    'Diffusion with offset noise'), so that the network learns to change a picture's mean brightness.
    """
    index, mirrored = order.at(positions), 0
    if split.flipped:
        coins = Generators(seed, STREAM_FLIP)
        mirrored = np.array([coins.at(int(p)).integers(2) for p in positions])
    turn = uniforms(seed, STREAM_CAPTION, positions) if split.several else 0.0
    index, stored, weights = split.shown(index, mirrored, positions)
    ids = split.token_ids(index, turn)
    z = stored.shape[1] // 2 if split.moments else stored.shape[1]
    latents, t = stored[:, :z].copy(), np.empty(len(index), np.int64)
    noise, seen, keys = np.empty_like(latents), 0, split.keys.take(pa.array(index)).to_pylist()
    samples = Generators(seed, STREAM_SAMPLE)
    for i, position in enumerate(positions.tolist()):
        rng = samples.at(position)
        t[i] = rng.integers(steps)
        if rng.random() < drop:
            ids[i] = null_ids
        rng.standard_normal(out=noise[i], dtype=np.float32)
        if split.moments:  # mean, log-variance -> a draw from the posterior
            latents[i] += np.exp(0.5 * stored[i, z:]) * rng.standard_normal(latents[i].shape, dtype=np.float32)
        if offset:
            noise[i] += offset * rng.standard_normal((z, 1, 1), dtype=np.float32)
        seen += seen_hash(position, keys[i])
    arrays = (latents, noise, t, ids) if weights is None else (latents, noise, t, ids, weights)
    return Batch.of([torch.from_numpy(a) for a in arrays], seen)


def validation_index(split: Split, count: int, name: str, seed: int) -> np.ndarray:
    """Which `count` pictures of a split are validated on; fixed by the seed."""
    return permutation(generator(seed, STREAM_VALIDATION + (name == "train"), 0), len(split))[:count].astype(np.int64)


def validation_batches(split: Split, count: int, name: str, seed: int, steps: int, say=print) -> list[Batch]:
    """Fixed pictures with fixed noise and stratified timesteps, a batch a shape: the loss on them moves only when the
    weights do. Pictures whose latents hold NaN or infinity are left out, and said: every loss would be NaN."""
    index = validation_index(split, count, name, seed)
    t = ((np.arange(len(index)) + 0.5) / len(index) * steps).astype(np.int64)
    stream, batches = STREAM_VALIDATION + (name == "train"), []
    for shape in np.unique(split.shape[index]):
        own = np.flatnonzero(split.shape[index] == shape)
        latents = split.latents(index[own])
        finite = np.isfinite(latents).all(axis=(1, 2, 3))
        for i in own[~finite]:
            say(f"warning: the latent of {split.keys[int(index[i])].as_py()} is not finite: it is left out of the "
                "validation; encode it again")  # fmt: skip
        if not finite.any():
            continue
        own, latents = own[finite], latents[finite]
        latents = latents[:, : latents.shape[1] // 2 if split.moments else latents.shape[1]].copy()
        noise = np.stack([generator(seed, stream, 1 + i).standard_normal(latents.shape[1:], np.float32) for i in own])
        arrays, weights = [latents, noise, t[own], split.token_ids(index[own])], split.weights(index[own])
        arrays += [] if weights is None else [weights]
        batches.append(Batch.of([torch.from_numpy(a) for a in arrays]))
    return batches


class Prefetcher:
    """Makes the coming micro-batches in a thread, a few ahead; pinned where the device is CUDA."""

    def __init__(self, make, positions, device: torch.device, depth: int = 4):
        self._queue, self._stop, self._device = queue.Queue(depth), threading.Event(), device
        self.waited = 0.0  # seconds that the last call of next() waited
        self._thread = threading.Thread(target=self._work, args=(make, positions), daemon=True)
        self._thread.start()

    def _work(self, make, positions):
        try:
            for p in positions:
                batch = make(p)
                self._put(batch.map(torch.Tensor.pin_memory) if self._device.type == "cuda" else batch)
                if self._stop.is_set():
                    return
        except Exception as e:  # raised again in next()
            self._put(e)

    def _put(self, item):
        """Wait for room, unless nobody takes any more."""
        while not self._stop.is_set():
            with contextlib.suppress(queue.Full):
                return self._queue.put(item, timeout=0.1)

    def next(self) -> Batch:
        started = time.perf_counter()
        item = self._queue.get()
        self.waited = time.perf_counter() - started
        if isinstance(item, Exception):
            raise item
        return item.map(lambda x: x.to(self._device, non_blocking=True))

    def close(self):
        self._stop.set()
        self._thread.join()
