"""Hashes of many texts at once, to find those that come twice."""

import hashlib

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MAX_WORDS = 1024  # of four bytes that hash_texts reads: longer text is replaced by its BLAKE2b

MULTIPLIERS = np.random.Generator(np.random.Philox(key=0x5D)).integers(0, 1 << 64, (2, MAX_WORDS + 2), np.uint64)


def hash_texts(values: pa.Array) -> np.ndarray:
    """A 64-bit hash of each text (large_string, no nulls), uint64 [rows].

    MULTILINEAR of Lemire and Kaser, "Strongly universal string hashing is fast" (2014), over words of four bytes and
    the length, twice, 32 bits of each: two texts collide with probability 2^-64, any two of 10 million with 3e-6.
    """
    values = values.cast(pa.large_binary())
    if len(values) and pc.max(pc.binary_length(values)).as_py() > 4 * MAX_WORDS:
        short = (t if len(t) <= 4 * MAX_WORDS else hashlib.blake2b(t).digest() for t in values.to_pylist())
        values = pa.array(short, pa.large_binary())
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset :][: len(values) + 1]
    starts, lengths = offsets[:-1], np.diff(offsets)
    data = np.concatenate([np.frombuffer(values.buffers()[2] or b"", np.uint8), np.zeros(4, np.uint8)])
    words = np.ndarray(len(data) - 3, "<u4", data, strides=(1,))  # the four bytes at each place
    ends = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF], np.uint64)  # what of a word belongs to the text
    sums = [a[0] + a[1] * lengths.astype(np.uint64) for a in MULTIPLIERS]
    rows, word = np.flatnonzero(lengths), 0
    while len(rows):
        left = lengths[rows] - 4 * word
        value = words[starts[rows] + 4 * word] & ends[np.minimum(left, 4)]
        for a, total in zip(MULTIPLIERS, sums):
            total[rows] += a[word + 2] * value
        rows, word = rows[left > 4], word + 1
    return sums[0] >> np.uint64(32) << np.uint64(32) | sums[1] >> np.uint64(32)


class Hashes:
    """A set of 64-bit hashes in 8 bytes each: a large sorted array and a small one of the recent ones."""

    RECENT = 1 << 20

    def __init__(self):
        self.sorted = self.recent = np.empty(0, np.uint64)

    def contains(self, hashes: np.ndarray) -> np.ndarray:
        """bool [len(hashes)]."""
        order = np.argsort(hashes)  # neighbours are then looked up in the same piece of memory
        found = np.zeros(len(hashes), bool)
        for part in (self.sorted, self.recent):
            if len(part):
                places = np.searchsorted(part, hashes[order])
                found[order] |= part[np.minimum(places, len(part) - 1)] == hashes[order]
        return found

    def add(self, hashes: np.ndarray) -> None:
        """Adds hashes that are not in it."""
        hashes = np.unique(hashes)
        self.recent = np.insert(self.recent, np.searchsorted(self.recent, hashes), hashes)
        if len(self.recent) > max(self.RECENT, len(self.sorted) // 16):
            self.sorted = np.insert(self.sorted, np.searchsorted(self.sorted, self.recent), self.recent)
            self.recent = np.empty(0, np.uint64)

    def add_new(self, hashes: np.ndarray) -> np.ndarray:
        """Adds hashes; bool [len(hashes)]: whether each was new, the first of equal ones counting as new."""
        first = np.zeros(len(hashes), bool)
        first[np.unique(hashes, return_index=True)[1]] = True
        new = first & ~self.contains(hashes)
        self.add(hashes[new])
        return new
