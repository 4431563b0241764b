"""Pictures encoded while training: which of them are trained on and which are held out, and how they become latents.

Threads read, decode and cut the coming pictures; the thread that makes micro-batches encodes them, beside the training
step, so that the loop and its CUDA graphs get latents as from a folder of them. How a picture is cut, mirrored and
coloured depends on the seed and the global position alone, and its latent on no other picture of the batch.
"""

import copy
import hashlib
import math
import os
import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from sd.data import STREAM_PICTURE, BucketOrder, SampleOrder, generator, kind_of, runs
from sd.device import DTYPES, Place
from sd.encoder import Encoder
from sd.errors import InputError
from sd.files import counted
from sd.index import (
    Captions,
    Index,
    Part,
    build_index,
    field_names,
    find_parts,
    read_index,
    read_picture,
)
from sd.masks import MASK, loss_weights, read_mask
from sd.networks import unet_config
from sd.pictures import Reject, cut, decode_image, scaled
from sd.setup import Data
from sd.text import check_template, tokenize
from sd.weights.parts import DEFAULT_VAE
from sd.weights.read import load_vae
from sd.where import COLUMN, NUMBER, TEXT, Where
from sd.workers import check_workers
from SD_Model import PRESETS, TextEncoder, weights_hash

ONLINE_FLAGS = (  # what decides how pictures are read and cut: of no use with cached latents
    "captions", "caption", "caption_encoding", "where", "balance", "val_fraction", "crop_scale", "crop_aspect", "flip",
    "jitter", "window", "regularise", "index", "strict", "cache", "masks", "mask_floor",
    "encode_first",
)  # fmt: skip

MAX_GROUPS = 10_000  # values that --balance evens out

SMALL, SMALL_SHARE, LARGE_SHARE = 1000, 0.1, 0.01  # pictures of a small set; shares held out of such, and of others

BENIGN = {"hidden", "mask", "link_repeated", "caption_alone", "listed_twice"}  # what --strict lets pass

STRETCH = 1 << 18  # pictures whose rows are looked at at once, where all are

MOST_AT_ONCE = 16  # pictures that a GPU encodes in one pass

ENCODED_FIRST = 256  # pictures that are decoded, and then encoded, at a time by --encode_first

VARIES = ("crop_scale", "crop_aspect", "flip", "jitter")  # flags by which showings of a picture differ


# ----------------------------------------------------------------------------------------------------------------
# How a picture is cut
# ----------------------------------------------------------------------------------------------------------------


class Cut(NamedTuple):
    """From a decoded picture to the square that is encoded. With all but the size off, as encode_latents.py does."""

    size: int
    scale: tuple[float, float] | None = None  # share of the largest part's area that a random part has
    aspect: tuple[float, float] | None = None  # of a random part, width to height
    flip: bool = False
    jitter: float = 0.0  # brightness, contrast and saturation are multiplied by 1 - jitter to 1 + jitter

    @property
    def random(self) -> bool:
        return bool(self.scale or self.aspect or self.flip or self.jitter)

    def __call__(self, image: np.ndarray, draws: np.ndarray | None) -> np.ndarray:
        """uint8 [H, W, 3] -> [size, size, 3]. draws: eight numbers in [0, 1), each with one meaning, whatever else is
        off; None: the middle, as it is."""
        image = self._square(image, draws)
        if draws is not None and self.jitter:
            image = jittered(image, *(1 + self.jitter * (2 * draws[5:8] - 1)))
        return self._mirrored(image, draws)

    def mask(self, mask: np.ndarray, draws: np.ndarray | None) -> np.ndarray:
        """The same of a picture's mask, uint8 [H, W] -> [size, size], whose grey levels stay as they are."""
        return self._mirrored(self._square(mask, draws), draws)

    def _square(self, image: np.ndarray, draws: np.ndarray | None) -> np.ndarray:
        square = (self.size, self.size)
        if draws is None or not (self.scale or self.aspect):
            return cut(image, square)
        top, left, high, wide = self.part(*image.shape[:2], draws)
        return scaled(image[top : top + high, left : left + wide], square)

    def _mirrored(self, image: np.ndarray, draws: np.ndarray | None) -> np.ndarray:
        if draws is not None and self.flip and draws[4] < 0.5:
            image = image[:, ::-1]
        return np.ascontiguousarray(image)

    def part(self, height: int, width: int, draws: np.ndarray) -> tuple[int, int, int, int]:
        """Top, left, height and width of a random part of a picture: its aspect is uniform in the logarithm, its area a
        uniform share of the largest part of that aspect, its place uniform."""
        scale, aspect = self.scale or (1.0, 1.0), self.aspect or (1.0, 1.0)
        ratio = math.exp(math.log(aspect[0]) + draws[1] * (math.log(aspect[1]) - math.log(aspect[0])))
        side = math.sqrt(scale[0] + draws[0] * (scale[1] - scale[0]))
        wide = min(width, height * ratio)
        high, wide = max(1, round(side * wide / ratio)), max(1, round(side * wide))
        high, wide = min(high, height), min(wide, width)
        return int(draws[2] * (height - high + 1)), int(draws[3] * (width - wide + 1)), high, wide


GREY = np.array([0.299, 0.587, 0.114], np.float32)  # of red, green and blue (ITU-R BT.601)


def jittered(image: np.ndarray, brightness: float, contrast: float, saturation: float) -> np.ndarray:
    """uint8 [H, W, 3] with each of these three multiplied: all values; their distance from the picture's mean grey; and
    from the pixel's grey. Rounded and cut to 0..255 once, at the end."""
    x = image.astype(np.float32) * np.float32(brightness)
    middle = (x @ GREY).mean()
    x = middle + (x - middle) * np.float32(contrast)
    grey = (x @ GREY)[:, :, None]
    return np.rint(np.clip(grey + (x - grey) * np.float32(saturation), 0, 255)).astype(np.uint8)


def read_range(flag: str, text: str | None, least: float, most: float) -> tuple[float, float] | None:
    """'0.25,1' or '0.25' of a flag as two numbers, from `least` to `most`."""
    if text is None:
        return None
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or not least < numbers[0] <= numbers[-1] <= most:
        raise InputError(f"--{flag} wants two numbers such as 0.5,1, above {least:g} and up to {most:g}, found {text}")
    return numbers[0], numbers[-1]


def check_settings(settings: dict, given: set[str]):
    """InputError unless the settings of pictures make sense, and go with each other. given: names of the flags that the
    command line has."""
    if settings["pictures"] is None:
        if useless := [name for name in ONLINE_FLAGS if settings[name]]:
            raise InputError(
                f"--{useless[0]} is of --pictures, which are cut anew each time they are shown; latents on disk were "
                "cut when they were encoded (encode_latents.py has --crop, --flip and --buckets): give --pictures, or "
                f"drop --{useless[0]}"
            )
        return
    if both := [name for name in ("data", "dataset", "data_root") if name in given]:
        raise InputError(f"--pictures and --{both[0]} both say what to train on: give one of them")
    for name in ("pictures", "regularise"):
        if "pipe:" in (settings[name] or "") and name not in given:  # a run's folder may be somebody else's
            raise InputError(f"--{name} of this run has a command: give that flag again, for commands are run only so")
    for flag, least, most in (("crop_scale", 0, 1), ("crop_aspect", 0, 10)):
        read_range(flag, settings[flag], least, most)
    if not 0 <= settings["jitter"] < 1:
        raise InputError(f"--jitter wants a number from 0 to below 1, found {settings['jitter']}")
    if settings["val_fraction"] is not None and not 0 <= settings["val_fraction"] < 1:
        raise InputError(f"--val_fraction wants a number from 0 to below 1, found {settings['val_fraction']}")
    if settings["window"] < 0:
        raise InputError(f"--window wants a whole number from 0 up, found {settings['window']}")
    for name in ("picture_memory", "cache_gib"):
        if not 0 <= settings[name] < math.inf:
            raise InputError(f"--{name} wants a number of GiB from 0 up, found {settings[name]}")
    if not 0 <= settings["mask_floor"] <= 1:
        raise InputError(f"--mask_floor wants a number from 0 to 1, found {settings['mask_floor']}")
    if "mask_floor" in given and not settings["masks"]:
        raise InputError("--mask_floor is of --masks: give that flag too, or drop it")
    if settings["encode_first"] and (varies := [name for name in VARIES if settings[name]]):
        raise InputError(f"--encode_first is of pictures that are always cut alike: drop it, or --{varies[0]}")
    if settings["latent_fraction"] != 1:
        raise InputError("--latent_fraction is of latents on disk: drop it, or choose among --pictures with --where")
    if settings["workers"] is not None:
        check_workers(settings["workers"])
    if settings["caption"] is not None:
        if settings["captions"] is not None:
            raise InputError("--caption and --captions both say what the pictures show: give one of them")
        check_template(settings["caption"], ("name", "folder"))
    if settings["where"] is not None:
        Where(settings["where"])


# ----------------------------------------------------------------------------------------------------------------
# The pictures of a split
# ----------------------------------------------------------------------------------------------------------------


class Kept:
    """Arrays kept in memory while there is room; several threads may put and get."""

    def __init__(self, room: float):
        """room: in bytes."""
        self.room, self._arrays, self._lock = room, {}, threading.Lock()

    def get(self, key) -> np.ndarray | None:
        return self._arrays.get(key)

    def put(self, key, array: np.ndarray):
        with self._lock:
            if key not in self._arrays and array.nbytes <= self.room:
                self._arrays[key] = array
                self.room -= array.nbytes


class Latents:
    """Squares to latents, as encode_latents.py stores them: fp16, scaled, the posterior's mean. One at a time on a CPU
    and a fixed number on a GPU, so that a latent does not depend on what else is encoded."""

    def __init__(self, encoder: Encoder, at_once: int):
        self.encoder, self.at_once = encoder, at_once
        self.stream = torch.cuda.Stream(encoder.device) if encoder.device.type == "cuda" else None
        if self.stream:
            torch.cuda.synchronize(encoder.device)  # the weights are there

    def leave(self):
        """Take the VAE off the device, when nothing is left to be encoded."""
        for vae in (self.encoder.exact, self.encoder.fast):
            vae.to("cpu")
        if self.stream:
            torch.cuda.empty_cache()

    def __call__(self, squares: list[np.ndarray], keys: list[str]) -> list[np.ndarray]:
        """uint8 [size, size, 3] each -> fp16 [z, h, w] each. InputError if one is not finite, even in fp32."""
        latents = []
        with torch.cuda.stream(self.stream) if self.stream else nullcontext():
            for first in range(0, len(squares), self.at_once):
                batch = torch.from_numpy(np.stack(squares[first : first + self.at_once]))
                found, finite = self.encoder.collect(self.encoder.submit(batch))
                if not finite.all():
                    key = keys[first + int(np.flatnonzero(~finite)[0])]
                    raise InputError(f"the VAE gives {key} no finite latent: look at that picture, or leave it out")
                latents += list(found)
        return latents


class Pictures:
    """What training wants of a split (see sd.data.Split), of pictures that are read when they are due.

    keys, captions: the first of each; shapes: the one that all latents have.
    """

    moments = flipped = False
    missing = unreadable = 0

    def __init__(self, table: pa.Table, sizes: list[int], parts: list[Part], tokenizer, latents: Latents,
                 shape: tuple[int, int, int], cutting: Cut, settings: dict, pool, say, rows=None):  # fmt: skip
        """table: of an Index; sizes: of the sources. shape: of a latent. pool: of the threads that decode, or None.
        rows: which of the table's rows, source after source, int [N]; None: all. What is read of the table is where it
        lies, in files perhaps, and is not copied."""
        self._key, self._texts = _whole(table["key"]), _whole(table["captions"])
        self._part, self._offset, self._bytes = (
            _whole(table[name]).to_numpy(zero_copy_only=False) for name in ("part", "offset", "bytes")
        )
        self._ends = self._texts.offsets.to_numpy()  # of each row's captions
        self._texts, self._rows, self._count = self._texts.values, rows, len(table) if rows is None else len(rows)
        self.several = any((self._counts(rows) > 1).any() for rows in self._stretches())
        self.keys = Taken(self._key, self._at, len(self))
        self.captions = Taken(self._texts, lambda index: self._ends[self._at(index)], len(self))
        self._mask = self._mask_bytes = None  # where each row's mask lies; -1 where it has none
        if "mask" in table.column_names:
            self._mask, self._mask_bytes = (
                pc.fill_null(_whole(table[n]), -1).to_numpy(zero_copy_only=False) for n in ("mask", "mask_bytes")
            )
            self._floor = settings["mask_floor"]
        self.sizes, self.parts, self.tokenizer, self.say = sizes, parts, tokenizer, say
        self.shapes, self.shape = [shape], np.broadcast_to(np.int8(0), len(self))
        self.length = tokenize(tokenizer, [""]).shape[1]
        part = self._part if rows is None else self._part[rows] if settings["window"] else None
        self.windows = (part, settings["window"]) if settings["window"] else None
        self._source_ends = np.cumsum(sizes)
        self._latents, self._cut, self._seed, self._pool = latents, cutting, settings["seed"], pool
        self._strict, self._workers = settings["strict"], getattr(pool, "_max_workers", 0)
        self._kept = Kept(settings["picture_memory"] * 2**30)  # latents; of pictures that are cut anew, what is decoded
        self._coming, self._damaged, self._lock = {}, set(), threading.Lock()

    def _at(self, index) -> np.ndarray:
        """The table's rows of pictures."""
        return np.asarray(index) if self._rows is None else self._rows[index]

    def _counts(self, rows: np.ndarray) -> np.ndarray:
        """How many captions rows of the table have."""
        return self._ends[rows + 1] - self._ends[rows]

    def _stretches(self) -> Iterator[np.ndarray]:
        """The table's rows of all pictures in their order, int64, some at a time."""
        for first in range(0, len(self), STRETCH):
            yield self._at(np.arange(first, min(first + STRETCH, len(self)))).astype(np.int64)

    def __len__(self) -> int:
        return self._count

    def token_ids(self, index: np.ndarray, turn: np.ndarray | float = 0.0) -> np.ndarray:
        """As Split.token_ids; made when they are wanted."""
        rows = self._at(index)
        at = self._ends[rows]
        if self.several:
            at = at + (turn * self._counts(rows.astype(np.int64))).astype(np.int64)
        return tokenize(self.tokenizer, self._texts.take(pa.array(at)).to_pylist()).astype(np.int64)

    def all_token_ids(self, chunk: int):
        """As Split.all_token_ids."""
        for first in range(0, len(self._texts), chunk):
            texts = self._texts.slice(first, chunk).to_pylist()
            yield tokenize(self.tokenizer, texts).astype(np.int64)

    def digest(self, sampled: int = 256) -> tuple[str, str]:
        """sha256 of all keys and captions in their order; and of the lengths of the pictures' files and the bytes of
        `sampled` of them, evenly spaced."""
        told, files = (hashlib.sha256(f"{self.sizes} {len(self)}".encode()) for _ in range(2))
        for texts, places in ((self._key, lambda rows: rows), (self._texts, self._captions_of)):
            ends = np.frombuffer(texts.buffers()[1], np.int64)
            for rows in self._stretches():
                at = places(rows)
                told.update(ends[at + 1] - ends[at])
            for rows in self._stretches():
                taken = texts.take(pa.array(places(rows)))
                told.update(taken.buffers()[2] or b"")
        if self.several:
            first = np.zeros(1, np.int64)
            told.update(first)
            for rows in self._stretches():
                first = first[-1] + np.cumsum(self._counts(rows))
                told.update(first)
        for rows in self._stretches():
            files.update(np.ascontiguousarray(self._bytes[rows]))
        if self._mask is not None:
            for rows in self._stretches():
                files.update(np.ascontiguousarray(self._mask_bytes[rows]))
        for i in np.unique(np.linspace(0, len(self) - 1, min(sampled, len(self))).astype(int)):
            files.update(self._read(int(i)))
            if self._masked(i):
                files.update(self._read_mask(int(i)))
        return told.hexdigest(), files.hexdigest()

    def _captions_of(self, rows: np.ndarray) -> np.ndarray:
        """Where all captions of these rows are."""
        return runs(self._ends[rows], self._counts(rows))

    def _key_of(self, i: int) -> str:
        return self.keys[i].as_py()

    def _read(self, i: int) -> bytes:
        row = int(self._at(i))
        return read_picture(self.parts[self._part[row]], self._key_of(i), int(self._offset[row]), int(self._bytes[row]))

    def _masked(self, i: int) -> bool:
        return self._mask is not None and self._mask[int(self._at(i))] >= 0

    def _read_mask(self, i: int) -> bytes:
        row, name = int(self._at(i)), self._key_of(i)
        part = self.parts[self._part[row]]
        if part.masks:
            name = f"{part.prefix}/{part.masks[name[len(part.prefix) + 1 :]]}"
        return read_picture(part, name, int(self._mask[row]), int(self._mask_bytes[row]))

    def _grey(self, i: int, shape: tuple[int, int]) -> np.ndarray:
        """A picture's mask, uint8 [H, W] as the picture's shape. Raises Reject too where nothing of it would count."""
        try:
            grey = read_mask(self._read_mask(i), shape)
        except Reject as reject:
            raise Reject(f"its mask: {reject.reason}") from None
        if not self._floor and not grey.any():
            raise Reject("its mask: all black")
        return grey

    def _one(self, i: int, position: int | None) -> tuple[int, np.ndarray, np.ndarray | None]:
        """The picture that is shown at a position where picture i is due: its number; its square uint8 [size, size, 3]
        or its latent fp16 [z, h, w], if that is kept; and its mask's weights fp32 [h, w], if it has a mask. The next
        picture of its source stands in for one that is damaged, or whose mask is."""
        source = int(np.searchsorted(self._source_ends, i, side="right"))
        first, size = int(self._source_ends[source]) - self.sizes[source], self.sizes[source]
        random = self._cut.random and position is not None
        draws = generator(self._seed, STREAM_PICTURE, position).random(8) if random else None
        for k in range(size):
            which = first + (i - first + k) % size
            kept, mask, masked = self._kept.get(which), self._kept.get(("mask", which)), self._masked(which)
            if kept is not None and not self._cut.random and (mask is not None or not masked):
                return which, kept, mask
            try:
                decoded = kept is not None and self._cut.random
                image = kept if decoded else decode_image(self._read(which))
                if masked and (mask is None or not self._cut.random):
                    mask = self._grey(which, image.shape[:2])
            except Reject as reject:
                self._tell(which, reject.reason)
                continue
            if self._cut.random:
                self._kept.put(which, image)
                if masked:
                    self._kept.put(("mask", which), mask)
            if masked:
                mask = loss_weights(self._cut.mask(mask, draws), self.shapes[0][1:], self._floor)
                if not self._cut.random:
                    self._kept.put(("mask", which), mask)
            return which, self._cut(image, draws), mask
        raise InputError(f"none of the {size:,} pictures beside {self._key_of(i)} can be decoded: give others")

    def _tell(self, i: int, reason: str):
        """Of a damaged picture, once."""
        with self._lock:
            new = i not in self._damaged
            self._damaged.add(i)
        if self._strict:
            raise InputError(f"{self._key_of(i)} cannot be decoded ({reason}): put it right, or drop --strict")
        if new:
            self.say(f"\nwarning: {self._key_of(i)} cannot be decoded ({reason}): the next picture stands in for it")

    def _encoded(self, shown: list[tuple[int, np.ndarray, np.ndarray | None]]) -> np.ndarray:
        """Stored latents fp32 [B, z, h, w] of what _one gives."""
        squares = {i: x for i, (_, x, _) in enumerate(shown) if x.dtype == np.uint8}
        found = self._latents(list(squares.values()), [self._key_of(shown[i][0]) for i in squares])
        made = dict(zip(squares, found))
        if not self._cut.random:
            for i, latent in made.items():
                self._kept.put(shown[i][0], latent.copy())
        return np.stack([made.get(i, x) for i, (_, x, _) in enumerate(shown)]).astype(np.float32)

    def _weights(self, shown: list[tuple[int, np.ndarray, np.ndarray | None]]) -> np.ndarray | None:
        """Weights fp32 [B, h, w] of what _one gives, 1 where there is no mask; None where no masks are wanted."""
        if self._mask is None:
            return None
        whole = np.ones(self.shapes[0][1:], np.float32)
        return np.stack([whole if mask is None else mask for *_, mask in shown])

    def latents(self, index: np.ndarray, mirrored: int = 0) -> np.ndarray:
        """Latents fp32 [B, z, h, w] of the pictures' middle, as it is: what validation sees."""
        return self._encoded([self._one(int(i), None) for i in index])

    def weights(self, index: np.ndarray) -> np.ndarray | None:
        """As Split.weights, of the pictures' middle."""
        return self._weights([self._one(int(i), None) for i in index]) if self._mask is not None else None

    def shown(self, index: np.ndarray, mirrored, positions: np.ndarray):
        """As Split.shown: cut, mirrored and coloured as the positions have it."""
        shown = []
        for i, position in zip(index.tolist(), positions.tolist()):
            coming = self._coming.pop(position, None)
            shown.append(coming.result() if coming else self._one(i, position))
        return np.array([which for which, *_ in shown], np.int64), self._encoded(shown), self._weights(shown)

    def encode_all(self):
        """Encode all pictures, and keep their latents. Only of pictures that are cut alike at each showing. InputError
        if there is no room for them."""
        each = 2 * int(np.prod(self.shapes[0])) + (0 if self._mask is None else 4 * int(np.prod(self.shapes[0][1:])))
        if len(self) * each > self._kept.room:
            raise InputError(
                f"--encode_first (which --fit chooses too) keeps {len(self):,} latents, of "
                f"{len(self) * each / 2**30:.2f} GiB, and --picture_memory is {self._kept.room / 2**30:g}: raise it, "
                "or give --no_encode_first"
            )
        for first in range(0, len(self), ENCODED_FIRST):
            some = range(first, min(first + ENCODED_FIRST, len(self)))
            self._encoded(list((self._pool.map if self._pool else map)(lambda i: self._one(i, None), some)))

    def ahead(self, positions: Iterable[np.ndarray], order: SampleOrder | BucketOrder) -> Iterator[np.ndarray]:
        """The same micro-batches of positions; the pictures of those that follow are decoded meanwhile."""
        waiting, pictures = deque(), 0
        for some in positions:
            if self._pool:
                for i, position in zip(order.at(some).tolist(), some.tolist()):
                    self._coming[position] = self._pool.submit(self._one, i, position)
            waiting.append(some)
            pictures += len(some)
            while pictures > (2 * self._workers + len(some) if self._pool else 0):
                pictures -= len(waiting[0])
                yield waiting.popleft()
        yield from waiting


class Taken:
    """Texts that lie elsewhere, in another order: of an array those at at(index)."""

    def __init__(self, texts: pa.Array, at, count: int):
        self.texts, self.at, self.count = texts, at, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> pa.Scalar:
        return self.texts[int(self.at(range(self.count)[i]))]

    def take(self, index) -> pa.Array:
        return self.texts.take(pa.array(self.at(np.asarray(index))))


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array that begins at its buffers' beginning: itself, if it is that."""
    if column.num_chunks == 1 and not column.chunk(0).offset:
        return column.chunk(0)
    array = column.combine_chunks()
    array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
    return array.take(pa.array(np.arange(len(array)))) if array.offset else array


# ----------------------------------------------------------------------------------------------------------------
# Which pictures
# ----------------------------------------------------------------------------------------------------------------


def held_out(table: pa.Table, share: float | None) -> np.ndarray:
    """Which rows are held out, bool [N]: those whose key has a hash below the share (None: by how many there are), and
    if there are two or more, at least the one of the lowest."""
    fraction = _whole(table["fraction"]).to_numpy()
    if share is None:
        share = SMALL_SHARE if len(table) <= SMALL else LARGE_SHARE
    out = fraction < share
    if share and not out.any() and len(table) > 1:
        out[np.argmin(fraction)] = True
    return out


def balanced(rows: np.ndarray, field: str, index: Index, say) -> tuple[np.ndarray, list[int]]:
    """Rows of an index's table sorted by a field's values, and how many rows each value has. Rows without one are left
    out."""
    columns = [COLUMN[kind] + field for kind in (TEXT, NUMBER)]
    valid = {
        name: int(index.table[name].is_valid().to_numpy()[rows].sum())
        for name in columns
        if name in index.table.column_names
    }
    if not any(valid.values()):
        raise InputError(
            f"--balance wants a field, and no picture has {field!r}; these are there: {field_names(index)}"
        )
    coded = _whole(index.table[max(valid, key=valid.get)]).dictionary_encode()
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)[rows]
    known, codes = rows[codes >= 0], codes[codes >= 0]
    there = np.flatnonzero(np.bincount(codes, minlength=len(coded.dictionary)))
    names = coded.dictionary.take(pa.array(there)).to_pylist()
    if len(names) > MAX_GROUPS:
        raise InputError(f"--balance wants a field of at most {MAX_GROUPS:,} values, and {field} has {len(names):,}")
    rank = np.zeros(len(coded.dictionary), np.int32)
    rank[there[sorted(range(len(names)), key=names.__getitem__)]] = np.arange(len(names))
    sizes = np.bincount(rank[codes], minlength=len(names))
    say(f"--balance {field}: {len(names):,} values of {sizes.min():,} to {sizes.max():,} pictures, each shown as often "
        f"as any other; {len(rows) - len(known):,} pictures lack it and are left out")  # fmt: skip
    return known[np.argsort(rank[codes], kind="stable")], sizes.tolist()


class Store(NamedTuple):
    """What the checkpoint remembers of an index, as of a folder of latents."""

    found: str  # sha256 of what the parts' pictures are called
    left_out: list[str]


def parse_regularise(text: str) -> tuple[str, float]:
    """DIR:weight. InputError."""
    name, _, number = text.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not name or not 0 < weight < math.inf:
        raise InputError(f"--regularise wants DIR:weight with a positive weight, as in class_pictures:1, found {text}")
    return name, weight


def indexed(pictures: str, settings: dict, columns: list[str], where, workers: int, say) -> tuple[list[Part], Index]:
    """The parts that --pictures or --regularise names, and what is in them that `where`, a Where or None, is true of;
    says, and with --strict refuses, what is left out."""
    captions = Captions(settings["caption"], settings["captions"] and Path(settings["captions"]),
                        settings["caption_encoding"], settings["masks"])  # fmt: skip
    left_out = Counter()
    limit = settings["cache_gib"] * 2**30
    cache = (Path(settings["cache"]).absolute(), limit) if settings["cache"] else None
    parts = find_parts(pictures, captions, settings["index"] and Path(settings["index"]), left_out, cache)
    build_index(parts, workers, say)
    index = read_index(parts, columns, where, settings["masks"])
    left_out.update(index.rejects)
    first = f"; the first: {index.rejected[0][0]} ({index.rejected[0][1]})" if index.rejected else ""
    say(f"pictures: {index.pictures:,} in {pictures}; left out: {counted(left_out)}{first}")
    faults = {reason: n for reason, n in left_out.items() if n and reason not in BENIGN}
    if where:
        say(f"--where keeps {len(index.table):,} of {index.pictures:,} pictures; {index.lacking:,} lack a field that "
            "it names and are left out")  # fmt: skip
    if not index.pictures:
        raise InputError(
            f"no picture with a caption is in {pictures} (left out: {counted(left_out)}): put texts beside them, such "
            "as cat.txt of cat.jpg, or give --captions LIST or --caption TEXT"
        )
    if sum(index.got) > limit and not 0 < 2 * settings["window"] * max(index.got) <= limit:
        most = max(1, int(limit / max(index.got) / 2))
        raise InputError(
            f"the {len(index.got):,} tars of {pictures} take {sum(index.got) / 2**30:.1f} GiB, and --cache_gib is "
            f"{settings['cache_gib']:g}: raise it, or give --window W, with a W up to {most}, so that each tar is got "
            "once an epoch"
        )
    if settings["strict"] and faults:
        raise InputError(f"--strict wants all of {pictures}, and this is left out: {counted(faults)}{first}")
    return parts, index


# ----------------------------------------------------------------------------------------------------------------
# All of it
# ----------------------------------------------------------------------------------------------------------------


def name_vae(settings: dict, init_from: str | None):
    """Fill in the VAE of a run on pictures, where no flag names it: that of --init_from, or the one that the preset
    usually goes with."""
    if settings["vae"] is None and init_from is not None:
        settings["vae"] = str(init_from)
    if settings["vae"] is None:
        if PRESETS[settings["model"]]["text"] is not None:
            raise InputError(
                f"--pictures are encoded while training, and preset {settings['model']} has no usual VAE: name one "
                "with --vae, or a model that has one with --init_from"
            )
        settings["vae"] = DEFAULT_VAE


def load_pictures(settings: dict, text_encoder: TextEncoder, place: Place, say, dry_run: bool = False) -> Data:
    """The data of a run on --pictures: indexed, chosen, parted into training and held-out ones, ready to be encoded, or
    with --encode_first encoded, but in a dry run."""
    vae, size, channels = load_vae(settings["vae"]), settings["size"], unet_config(settings).in_channels
    factor = vae.config.factor
    if vae.config.latent_channels != channels or size % factor:
        raise InputError(
            f"latents of {channels} channels of pictures of {size} px were wanted, and {settings['vae']} makes "
            f"{vae.config.latent_channels} of sizes in multiples of {factor}: give another --vae or --size"
        )
    vae_info = {"name": settings["vae"], "hash": weights_hash(vae), "config": asdict(vae.config)}
    cuda = place.device.type == "cuda"
    at_once = min(settings["batch"], MOST_AT_ONCE) if cuda else 1
    latents = Latents(Encoder(vae, place.device, DTYPES[settings["dtype"]], pad_to=at_once), at_once)

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))  # of this machine's processes
    workers = min(16, share) if settings["workers"] is None else settings["workers"]
    pool = ThreadPoolExecutor(workers, "decode", lambda: cv2.setNumThreads(1)) if workers else None
    where, columns = settings["where"] and Where(settings["where"]), []
    if settings["balance"]:
        columns = [COLUMN[kind] + settings["balance"] for kind in (TEXT, NUMBER)]

    parts, index = indexed(settings["pictures"], settings, columns, where, workers, say)
    table = index.table
    out = held_out(table, settings["val_fraction"])
    train, val = (np.flatnonzero(which).astype(kind_of(len(table))) for which in (~out, out))
    if not len(train):
        raise InputError(
            f"no picture is left to train on ({len(val):,} are held out, {index.pictures:,} are in "
            f"{settings['pictures']}): change --where or --val_fraction"
        )
    sizes, weights = [len(train)], None
    if settings["balance"]:
        train, sizes = balanced(train, settings["balance"], index, say)
        weights = [1 / len(sizes)] * len(sizes)
    if settings["regularise"]:
        name, weight = parse_regularise(settings["regularise"])
        others, more = indexed(name, settings, [], None, workers, say)
        if same := {p.prefix for p in parts} & {p.prefix for p in others}:
            raise InputError(f"--regularise wants other pictures than --pictures, and both hold {same.pop()}")
        more = more.table.set_column(more.table.column_names.index("part"), "part",
                                     pa.array(more.table["part"].to_numpy() + np.int32(len(parts))))  # fmt: skip
        weights = [w for w in weights or [1.0]] + [weight]
        train = np.concatenate([train, np.arange(len(table), len(table) + len(more), dtype=train.dtype)])
        table = pa.concat_tables([table.select(more.column_names), more]).combine_chunks()  # in memory
        sizes, parts = [*sizes, len(more)], parts + others
    say(f"{len(train):,} training and {len(val):,} held-out pictures")
    if settings["masks"]:
        has_mask = pc.fill_null(table["mask"], -1).to_numpy() >= 0
        masked = sum(int(has_mask[rows].sum()) for rows in (train, val))
        if not masked:
            raise InputError(f"--masks wants files such as x{MASK} beside x.png, and no picture of "
                             f"{settings['pictures']} has one: make them, or drop the flag")  # fmt: skip
        say(f"masks: {masked:,} of {len(train) + len(val):,} pictures have one; the others count everywhere")
    if not len(val) and settings["val_steps"]:
        say("note: no held-out pictures; validation is on training pictures alone")

    tokenizer = copy.deepcopy(text_encoder.tokenizer)  # the other one paints meanwhile; neither may be used by two
    ranges = [read_range(flag, settings[flag], 0, most) for flag, most in (("crop_scale", 1), ("crop_aspect", 10))]
    cutting = Cut(size, *ranges, settings["flip"], settings["jitter"])
    shape = (channels, size // factor, size // factor)
    splits = [
        Pictures(table, n, parts, tokenizer, latents, shape, cutting, settings, pool, say, rows)
        for rows, n in ((train, sizes), (val, [len(val)]))
    ]
    if settings["encode_first"] and not dry_run:
        for split in splits:
            split.encode_all()
        latents.leave()
        say("pictures: all encoded; the VAE is off the device")
    names = hashlib.sha256("\n".join(part.prefix for part in parts).encode()).hexdigest()
    stores = {settings["pictures"]: Store(names, [])}
    return Data(*splits, weights, vae_info, {"VAE": vae_info["hash"]}, stores)
