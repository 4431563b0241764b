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
from collections import Counter
from pathlib import Path

import _path  # noqa: F401

from sd import usertext
from sd.cli import parser
from sd.errors import InputError, run
from sd.folder_captions import captions_beside, captions_by_template, find_pictures, read_captions
from sd.folders import endings
from sd.pictures import Reject, check_side, decode_image, encode_jpeg, read_header, resize_crop
from sd.shards import CAPTION_EXTENSIONS, ShardWriter
from sd.sources import write_all
from sd.text import add_encoding_argument, check_template, clean_text
from sd.workers import check_workers


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
