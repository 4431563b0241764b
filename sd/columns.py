"""Columns of a table in files that the processes of a machine map: they share their memory, and hold none of their own.

A column of numbers is a file of them. One of texts is a file of where each ends (int64, from 0), one of their bytes,
and one of a byte a text, 0 where it is null. One of lists of texts is a file of where each list ends, and its texts.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa

TEXTS, TEXT_LISTS = pa.large_string(), pa.large_list(pa.large_string())


class Writer:
    """Appends arrays of one type to a column's files. Texts may be null; numbers are NaN instead,
    or -1 if they are whole, and lists are neither."""

    def __init__(self, folder: Path, name: str, kind: pa.DataType):
        self.kind, self.count, self.bytes = kind, 0, 0
        endings = {TEXTS: ("ends", "bytes", "valid"), TEXT_LISTS: ("ends",)}.get(kind, ("values",))
        self.files = [open(folder / f"{name}.{ending}", "wb") for ending in endings]
        self.inner = Writer(folder, f"{name}.texts", TEXTS) if kind == TEXT_LISTS else None
        if kind in (TEXTS, TEXT_LISTS):
            self.files[0].write(bytes(8))

    def add(self, array: pa.Array):
        if self.kind not in (TEXTS, TEXT_LISTS):
            if pa.types.is_integer(self.kind):
                array = array.fill_null(-1)
            values = array.to_numpy(zero_copy_only=False)  # null becomes NaN
            self.files[0].write(np.ascontiguousarray(values, self.kind.to_pandas_dtype()))
            return
        ends = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
        first, last = int(ends[0]), int(ends[-1])
        self.files[0].write(np.ascontiguousarray(ends[1:] - first + self.bytes))
        self.bytes += last - first
        if self.inner:
            self.inner.add(array.values.slice(first, last - first))
        else:
            if last > first:
                self.files[1].write(array.buffers()[2][first:last])
            self.files[2].write(array.is_valid().to_numpy(zero_copy_only=False).tobytes())

    def close(self):
        for file in self.files:
            file.close()
        if self.inner:
            self.inner.close()


def write_columns(folder: Path, kinds: dict[str, pa.DataType], tables: Iterable[pa.Table], about):
    """Files of all tables' rows into an empty folder, and what about() says, JSON, as the last one. kinds: of the
    columns: numbers, TEXTS or TEXT_LISTS."""
    writers, rows = [Writer(folder, str(i), kind) for i, kind in enumerate(kinds.values())], 0
    try:
        for table in tables:
            rows += len(table)
            for name, writer in zip(kinds, writers):
                for chunk in table[name].chunks:
                    if len(chunk):
                        writer.add(chunk)
    finally:
        for writer in writers:
            writer.close()
    (folder / "about.json").write_text(json.dumps({"rows": rows} | about()))


def map_columns(folder: Path, kinds: dict[str, pa.DataType]) -> tuple[pa.Table, dict]:
    """The table of such a folder, whose memory is the files', and what was said about it."""
    about = json.loads((folder / "about.json").read_text())
    columns = [_column(folder / str(i), kind, about["rows"]) for i, kind in enumerate(kinds.values())]
    return pa.table(dict(zip(kinds, columns))), about


def _buffer(path: Path) -> pa.Buffer:
    """A file's bytes, mapped."""
    return pa.py_buffer(np.memmap(path, np.uint8, "r")) if path.stat().st_size else pa.py_buffer(b"")


def _column(path: Path, kind: pa.DataType, rows: int) -> pa.Array:
    if kind == TEXT_LISTS:
        ends = pa.Array.from_buffers(pa.int64(), rows + 1, [None, _buffer(Path(f"{path}.ends"))])
        texts = Path(f"{path}.texts.ends")
        return pa.LargeListArray.from_arrays(ends, _column(Path(f"{path}.texts"), TEXTS, texts.stat().st_size // 8 - 1))
    if kind == TEXTS:
        valid = np.frombuffer(_buffer(Path(f"{path}.valid")), bool)
        bits = None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))
        buffers = [bits, _buffer(Path(f"{path}.ends")), _buffer(Path(f"{path}.bytes"))]
        return pa.Array.from_buffers(kind, rows, buffers)
    values = _buffer(Path(f"{path}.values"))
    bits = None
    if pa.types.is_floating(kind):
        known = ~np.isnan(np.frombuffer(values, kind.to_pandas_dtype()))
        bits = None if known.all() else pa.py_buffer(np.packbits(known, bitorder="little"))
    return pa.Array.from_buffers(kind, rows, [bits, values])
