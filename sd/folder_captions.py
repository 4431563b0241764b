"""Captions of pictures in folders: in files beside them, in a list, or made from their names."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq

from sd import usertext
from sd.errors import InputError, reading
from sd.folders import IMAGE_EXTENSIONS, endings, is_picture, walk_folder
from sd.metadata import find_column
from sd.shards import CAPTION_EXTENSIONS

FILE_COLUMNS = ("file", "file_name", "filename", "path", "image")


def find_pictures(folder: Path, left_out: Counter) -> tuple[list[str], list[str]]:
    """The paths of all pictures inside a folder, with / between parts, sorted, and of the other files; fails if there
    is no picture. What is passed over is counted in left_out."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder of your pictures as --in")
    names = walk_folder(folder, left_out)
    found = [name for name in names if is_picture(name)]
    others = [name for name in names if not is_picture(name)]
    if not found:
        hidden = f", and {left_out['hidden']} pictures in hidden folders" if left_out["hidden"] else ""
        wanted = ", ".join(f".{extension}" for extension in IMAGE_EXTENSIONS)
        raise InputError(f"no pictures in {folder} (it holds {endings(names)}{hidden}): they should end in {wanted}")
    return found, others


def read_captions(path: Path, encoding: str | None, folder: Path, files: list[str], left_out: Counter) -> dict:
    """Caption by file from a list (see list_rows). Rows of pictures that are not in the folder are counted as
    listed_not_found, further rows of a picture, whose first caption counts, as listed_twice; fails if no row is of a
    picture in the folder."""
    known, captions, entry = set(files), {}, None
    for number, row in list_rows(path, encoding):
        where = f"{path}, row {number}"
        file_column, column = list_columns(row, where)
        entry = usertext.text_value(row, file_column, where)
        caption = usertext.text_value(row, column, where, null=True)
        if (file := locate(entry, folder, path, known)) is None:
            left_out["listed_not_found"] += 1
        elif file in captions:
            left_out["listed_twice"] += 1
        else:
            captions[file] = caption or ""
    if not captions:
        row = f"names a picture in {folder} (the last: {entry})" if entry else "is there"
        raise InputError(f"{path}: no row {row}: give paths inside that folder, such as {files[0]}")
    return captions


def list_rows(path: Path, encoding: str | None) -> Iterator[tuple[int, dict]]:
    """(row, {column: value}) of a .jsonl, a .parquet, or else a CSV with a header, which is its row 1."""
    if path.suffix.lower() == ".parquet":
        with reading(path, "give a parquet file that is whole"):
            file = pq.ParquetFile(path)
        number = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield number, row
        return
    rows = usertext.json_rows if path.suffix.lower() == ".jsonl" else usertext.csv_rows
    yield from rows(usertext.read_user_text(path, encoding, flag=usertext.FLAG), str(path))


def list_columns(row: dict, where: str) -> tuple[str, str]:
    """The columns of a list's row that hold the picture's file and its caption."""
    by_lower = {name.lower(): name for name in reversed(row)}
    file_column = next((by_lower[name] for name in FILE_COLUMNS if name in by_lower), None)
    column = find_column(row, "caption")
    if file_column is None or column is None:
        raise InputError(f"{where}, has no file and caption (it has {', '.join(row)}): add them")
    return file_column, column


def locate(entry: str, folder: Path, listed_in: Path, known: set[str]) -> str | None:
    """Which of the known files a list means: by its path inside the folder, from the folder above it, from the list's
    own, from the current one, or from the root. None if it is none of them."""
    entry = entry.strip().replace("\\", "/")
    if (name := os.path.normpath(entry).replace(os.sep, "/")) in known:
        return name
    for base in (folder.absolute().parent, listed_in.absolute().parent, Path.cwd()):
        for absolute in (os.path.abspath, os.path.realpath):  # as it is written, then through links
            name = os.path.relpath(absolute(base / entry), absolute(folder)).replace(os.sep, "/")
            if name in known:
                return name
    return None


class Beside:
    """The caption files of a folder, and which of them belong to a picture."""

    def __init__(self, others: list[str]):
        self.names: dict[str, list[str]] = {}
        for name in others:
            if name.rpartition(".")[2].lower() in CAPTION_EXTENSIONS:
                self.names.setdefault(self._key(name), []).append(name)
        self.alone = {name for names in self.names.values() for name in names}

    def _key(self, name: str) -> str:
        top, _, base = name.rpartition("/")
        return f"{top}/{base.lower()}"

    def of(self, file: str) -> str | None:
        """The caption file of a picture: that of the whole name first, and in the same case first."""
        stem = file.rpartition(".")[0]
        for wanted in [f"{start}.{e}" for start in (file, stem) for e in CAPTION_EXTENSIONS]:
            if found := self.names.get(self._key(wanted)):
                name = wanted if wanted in found else found[0]
                self.alone.discard(name)
                return name
        return None


def captions_beside(folder: Path, files: list[str], others: list[str], encoding: str | None, left_out: Counter) -> dict:
    """Caption by file from the text files beside the pictures; None, the reason being counted when the shards are
    written, for one that cannot be read: the first of these is named in a printed line."""
    beside, captions, unreadable = Beside(others), {}, []
    for file in files:
        if (name := beside.of(file)) is not None:
            try:
                captions[file] = usertext.read_user_text(folder / name, encoding, flag=usertext.FLAG)
            except InputError as error:
                captions[file] = None
                unreadable.append(str(error))
    left_out["caption_alone"] += len(beside.alone)
    if unreadable and not any(caption for caption in captions.values()):
        raise InputError(unreadable[0])
    if unreadable:
        print(f"note: {len(unreadable):,} captions cannot be read, and their pictures are left out; {unreadable[0]}")
    return captions


def captions_by_template(files: list[str], folder: Path, template: str) -> dict[str, str]:
    """Caption by file from the names of file and folder."""
    captions = {}
    for file in files:
        words = [part.replace("_", " ").replace("-", " ") for part in (Path(file).stem, (folder / file).parent.name)]
        captions[file] = template.format(name=words[0], folder=words[1])
    return captions
