"""A folder of your own pictures with captions into WebDataset tars.

    python data_pipeline/01f_folder.py --in my_pictures --out data/mine                       # cat.jpg and cat.txt
    python data_pipeline/01f_folder.py --in my_pictures --out data/mine --captions list.csv   # columns file, caption
    python data_pipeline/01f_folder.py --in my_pictures --out data/mine --template "a photo of {name}" --size 512

Writes data/mine/images/00000.tar, 00000.parquet, ... and manifest.json. Folders inside are searched too, in the order
of their names. Captions come from one place: a text file beside each picture; or --captions, a .csv with a header or a
.jsonl, with `file` (or file_name: the path inside the folder) and `caption` (or text); or --template, where {name} is
the file's name without its ending and {folder} its folder's name, with _ and - as spaces. Pictures are copied as they
are, or with --size resized and cropped to a square JPEG. What cannot be decoded, or has no caption, is left out and
counted by reason. Run the same command again to go on after a stop; a folder that has changed needs a new --out.
"""

import argparse
import csv
import hashlib
import json
from pathlib import Path

import _path  # noqa: F401

from sd.errors import InputError, run
from sd.metadata import find_column
from sd.pictures import Reject, decode_image, encode_jpeg, read_header, resize_crop
from sd.shards import IMAGE_EXTENSIONS, ShardWriter, build_shards
from sd.text import check_template, clean_text


def find_pictures(folder: Path) -> list[str]:
    """The paths of all pictures inside a folder, with / between parts, sorted; fails if there is none."""
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder: give the folder of your pictures as --in")
    endings = {"." + extension for extension in IMAGE_EXTENSIONS}
    paths = (path for path in folder.rglob("*") if path.suffix.lower() in endings and path.is_file())
    found = sorted(path.relative_to(folder).as_posix() for path in paths)
    if not found:
        raise InputError(f"no pictures in {folder}: it should hold files that end in {', '.join(sorted(endings))}")
    return found


def read_captions(path: Path) -> dict[str, str]:
    """Caption by file from a .csv or .jsonl."""
    try:
        text = path.read_text("utf-8-sig")
        if path.suffix.lower() == ".csv":
            rows = list(csv.DictReader(text.splitlines()))
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(
            f"cannot read captions from {path} ({error}): give a UTF-8 .csv with a header, or a .jsonl"
        ) from None
    captions = {}
    for number, row in enumerate(rows, 1):
        file = next((row[name] for name in ("file", "file_name", "filename") if name in row), None)
        column = find_column(row, "caption")
        if not isinstance(file, str) or column is None:
            raise InputError(
                f"{path}, entry {number}, has no file and caption (it has {', '.join(map(str, row))}): add them"
            )
        captions[file.removeprefix("./").replace("\\", "/")] = row[column]
    return captions


def caption_of(folder: Path, file: str, captions: dict[str, str] | None, template: str | None) -> str:
    """The caption of a picture; '' if it has none."""
    if captions is not None:
        caption = captions.get(file)
    elif template is not None:
        words = [part.replace("_", " ").replace("-", " ") for part in (Path(file).stem, (folder / file).parent.name)]
        caption = template.format(name=words[0], folder=words[1])
    else:
        beside = (folder / file).with_suffix(".txt")
        caption = beside.read_text("utf-8-sig", errors="replace") if beside.exists() else None
    return clean_text(caption).strip() if isinstance(caption, str) else ""


def write_shard(path: Path, number: int, files: list[tuple[str, str]], folder: Path, size: int | None) -> int:
    """Writes (file, caption) pairs into one shard; returns how many it has dealt with."""
    with ShardWriter(path) as shard:
        for place, (file, caption) in enumerate(files):
            try:
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--in", dest="folder", required=True, type=Path, help="folder of pictures")
    parser.add_argument("--out", required=True, help="folder of the source, e.g. data/mine; gets images/*.tar")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--captions", type=Path, help=".csv or .jsonl with file and caption; default: .txt files beside")
    group.add_argument("--template", help='caption made from names, e.g. "a photo of {name}"')
    parser.add_argument("--size", type=int, help="resize and crop to this side in pixels; default: copy as it is")
    parser.add_argument("--shard_size", type=int, default=1000, help="pictures a tar, at most 10,000")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    args = parser.parse_args()
    if (args.size is not None and args.size < 8) or not 1 <= args.shard_size <= 10_000:
        raise InputError("--size must be at least 8, --shard_size from 1 to 10,000")
    if args.template is not None:
        check_template(args.template, ("name", "folder"))

    files = find_pictures(args.folder)
    captions = read_captions(args.captions) if args.captions else None
    items = [(file, caption_of(args.folder, file, captions, args.template)) for file in files]
    stats = [(args.folder / file).stat() for file in files]
    content = [[*item, stat.st_size, stat.st_mtime_ns] for item, stat in zip(items, stats, strict=True)]
    settings = {
        "pictures_and_captions": hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16],
        "size": args.size,
        "shard_size": args.shard_size,
    }
    manifest = build_shards(
        args.out,
        "01f_folder.py",
        settings,
        items,
        write_shard,
        (args.folder, args.size),
        args.shard_size,
        args.workers,
    )
    print(f"{manifest['pictures']:,} pictures in {manifest['shards']} shards: {args.out}/images")
    print(f"rejected: {manifest['rejected'] or 'none'}")


if __name__ == "__main__":
    run(main)
