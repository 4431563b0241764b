"""A folder of your own pictures with captions into WebDataset tars.

    python data_pipeline/01f_folder.py --in my_pictures --out data/mine                       # cat.jpg and cat.txt
    python data_pipeline/01f_folder.py --in my_pictures --out data/mine --captions list.csv   # columns file, caption
    python data_pipeline/01f_folder.py --in my_pictures --out data/mine --template "a photo of {name}" --size 512

Writes data/mine/images/00000.tar, 00000.parquet, ... and manifest.json. Folders inside are searched too, in the order
of their names, linked ones as well; hidden and system folders are not. Captions come from one place: a text file beside
each picture, cat.jpg.txt, cat.jpg.caption, cat.txt or cat.caption in whatever case; or --captions, a .csv with a header
or a .jsonl, with `file` (or file_name: the path inside the folder, or one that leads there) and `caption` (or text); or
--template, where {name} is the file's name without its ending and {folder} its folder's name, with _ and - as spaces.
Captions are UTF-8 (or UTF-16 with its mark), or in --caption_encoding. Pictures are copied as they are, or with --size
resized and cropped to a square JPEG. What cannot be decoded, or has no caption, is left out and counted by reason, and
so is whatever else lies there. Run the same command again to go on after a stop; a folder that has changed needs a new
--out.
"""

import hashlib
import json
import os
from collections import Counter
from pathlib import Path

import _path  # noqa: F401

from sd import usertext
from sd.cli import parser
from sd.errors import InputError, run
from sd.folders import IMAGE_EXTENSIONS, endings, is_picture, walk_folder
from sd.metadata import find_column
from sd.pictures import Reject, check_side, decode_image, encode_jpeg, read_header, resize_crop
from sd.shards import CAPTION_EXTENSIONS, ShardWriter
from sd.sources import write_all
from sd.text import add_encoding_argument, check_template, clean_text
from sd.workers import check_workers

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
    """Caption by file from a .csv or .jsonl. Rows of pictures that are not in the folder are counted as
    listed_not_found, further rows of a picture, whose first caption counts, as listed_twice; fails if no row is of a
    picture in the folder."""
    text = usertext.read_user_text(path, encoding, flag=usertext.FLAG)
    rows = usertext.json_rows if path.suffix.lower() == ".jsonl" else usertext.csv_rows
    known, captions, entry = set(files), {}, None
    for number, row in rows(text, str(path)):
        where = f"{path}, row {number}"
        by_lower = {name.lower(): name for name in reversed(row)}
        file_column = next((by_lower[name] for name in FILE_COLUMNS if name in by_lower), None)
        column = find_column(row, "caption")
        if file_column is None or column is None:
            raise InputError(f"{where}, has no file and caption (it has {', '.join(row)}): add them")
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


def clean(caption: str | None) -> str | None:
    """A caption as it is stored; None stays None."""
    return None if caption is None else clean_text(caption).strip()


def is_same(path: Path, other: Path | None) -> bool:
    return other is not None and path.resolve() == other.resolve()


def write_shard(path: Path, number: int, files: list[tuple], folder: Path, size: int | None) -> int:
    """Writes (file, caption) pairs into one shard, where caption is None if it cannot be read; returns how many it has
    dealt with."""
    with ShardWriter(path) as shard:
        for place, (file, caption) in enumerate(files):
            try:
                if caption is None:
                    raise Reject("caption_encoding")
                if not caption:
                    raise Reject("no_caption")
                data = (folder / file).read_bytes()
                image = decode_image(data)
                extension = read_header(data).kind
            except Reject as reject:
                shard.reject(reject.reason)
                continue
            height, width = image.shape[:2]
            about = {"url": f"file:{clean_text(file)}", "original_width": width, "original_height": height}
            if size is not None:
                data, extension = encode_jpeg(resize_crop(image, size)), "jpg"
                width = height = size
            about.update(width=width, height=height)
            shard.add(f"{number:05d}{place:04d}", data, extension, caption, about)
    return len(files)


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("pictures")
    g.add_argument("--in", dest="folder", required=True, type=Path, help="folder of pictures")
    g.add_argument("--out", required=True, help="folder of the source, e.g. data/mine; gets images/*.tar")
    g.add_argument("--size", type=int, help="resize and crop to this side in pixels (default: copy as it is)")

    g = p.add_argument_group("captions")
    place = g.add_mutually_exclusive_group()
    place.add_argument("--captions", type=Path, metavar="FILE", help=".csv or .jsonl with file and caption (default: "
                       "text files beside the pictures)")  # fmt: skip
    place.add_argument("--template", help='made from names, e.g. "a photo of {name}" (default: text files beside the '
                       'pictures)')  # fmt: skip
    add_encoding_argument(g)

    g = p.add_argument_group("running")
    g.add_argument("--shard_size", type=int, default=1000, help="pictures a tar, at most 10,000")
    g.add_argument("--workers", type=int, default=1, help="processes")
    args = p.parse_args()
    usertext.check_encoding(args.caption_encoding)
    check_side(args.size)
    check_workers(args.workers)
    if not 1 <= args.shard_size <= 10_000:
        raise InputError(f"--shard_size wants 1 to 10,000, found {args.shard_size:,}")
    if args.template is not None:
        check_template(args.template, ("name", "folder"))

    left_out = Counter()
    files, others = find_pictures(args.folder, left_out)
    if args.captions:
        captions = read_captions(args.captions, args.caption_encoding, args.folder, files, left_out)
    elif args.template is not None:
        captions = captions_by_template(files, args.folder, args.template)
    else:
        captions = captions_beside(args.folder, files, others, args.caption_encoding, left_out)
    items = [(file, clean(captions.get(file, ""))) for file in files]
    if not any(caption for _, caption in items):
        raise InputError(
            f"none of {len(files)} pictures in {args.folder} has a caption (beside them: {endings(others)}): "
            "give a text file beside each, such as cat.txt or cat.caption of cat.jpg, or --captions, or --template"
        )
    captions_end = CAPTION_EXTENSIONS
    left_out["not_a_picture"] = sum(
        name.rpartition(".")[2].lower() not in captions_end and not is_same(args.folder / name, args.captions)
        for name in others
    )
    stats = [(args.folder / file).stat() for file in files]
    content = [[*item, stat.st_size, stat.st_mtime_ns] for item, stat in zip(items, stats, strict=True)]
    settings = {
        "pictures_and_captions": hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16],
        "size": args.size,
        "shard_size": args.shard_size,
    }
    extra = (args.folder, args.size)
    write_all("01f_folder.py", args, settings, items, write_shard, extra, args.shard_size, left_out)


if __name__ == "__main__":
    run(main)
