"""JourneyDB's tgz archives into WebDataset tars of square JPEGs.

    python data_pipeline/01c_journeydb.py --hub_id JourneyDB/JourneyDB --out data/journeydb --archives 0-9
    python data_pipeline/01c_journeydb.py --path /mnt/JourneyDB --out data/journeydb --caption prompt

An archive is data/train/imgs/000.tgz with 000/<name>.jpg; the annotations are one JSON a line, with img_path
(./000/<name>.jpg), prompt and Task2.Caption, in data/train/train_anno_realease_repath.jsonl.tgz (or that .jsonl, as it
is). Each archive becomes one tar, read once from the front; one that was downloaded is deleted once its tar is there.
--caption caption takes Task2's caption, and the prompt where there is none; Midjourney's flags (`--ar 3:2`) and
addresses are taken out of prompts.

Run the same command again to go on after a stop. What is left out is counted by reason.
"""

import contextlib
import json
import re
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import _path  # noqa: F401

from sd.cli import parser
from sd.errors import InputError, run
from sd.files import make_folder, replace_folder
from sd.shards import ShardWriter
from sd.sources import (
    add_arguments,
    add_picture,
    begin,
    check_arguments,
    each_picture,
    fetch,
    forget,
    iter_tgz,
    parse_range,
    write_all,
)
from sd.text import clean_text

ANNOTATIONS = "data/train/train_anno_realease_repath.jsonl"
FLAGS = re.compile(r"<?https?://\S+>?|\s--?[a-z]+(?:\s+[\d.:]+(?=\s|$))?(?=\s|$)", re.IGNORECASE)


def clean_prompt(prompt: str) -> str:
    """A prompt without addresses and Midjourney's flags: 'a cat --ar 3:2 --v 4' -> 'a cat'."""
    return " ".join(FLAGS.sub(" ", " " + prompt).split()).strip(" ,")


def caption_of(entry: dict, kind: str) -> str:
    """The caption of an annotation; '' if it has none."""
    task = entry.get("Task2")
    caption = task.get("Caption") if isinstance(task, dict) and kind == "caption" else None
    if not isinstance(caption, str) or not caption.strip():
        prompt = entry.get("prompt")
        caption = clean_prompt(prompt) if isinstance(prompt, str) else ""
    return clean_text(caption).strip()


def annotation_lines(path: Path) -> Iterator[bytes]:
    """The lines of a .jsonl, or of the one inside a .jsonl.tgz, one after the other."""
    if path.suffix != ".tgz":
        with open(path, "rb") as file:
            yield from file
        return
    try:
        with tarfile.open(path, "r|gz") as tar:
            for member in tar:
                if member.isreg() and member.name.endswith(".jsonl"):
                    yield from tar.extractfile(member)
                    return
    except (tarfile.TarError, EOFError, OSError) as error:
        raise InputError(f"{path} is not a whole archive ({error}): get it again") from None
    raise InputError(f"{path} holds no .jsonl: give JourneyDB's annotations")


def split_annotations(path: Path, folder: Path, archives: range, kind: str) -> None:
    """Writes <folder>/000.jsonl, ...: [name, caption] of the pictures of each archive. The annotations are read line by
    line: they would not fit into every worker's memory."""
    temporary = make_folder(folder.with_name(folder.name + ".tmp"))
    bad = 0
    with contextlib.ExitStack() as stack:
        files = {
            f"{number:03d}": stack.enter_context(open(temporary / f"{number:03d}.jsonl", "w")) for number in archives
        }
        for line in annotation_lines(path):
            try:
                entry = json.loads(line)
                archive, _, name = entry["img_path"].removeprefix("./").rpartition("/")
            except (ValueError, KeyError, TypeError, AttributeError):
                bad += 1
                continue
            if file := files.get(archive.rpartition("/")[2]):
                file.write(json.dumps([name, caption_of(entry, kind)]) + "\n")
    if bad:
        print(f"{bad:,} annotations that cannot be read were left out")
    replace_folder(temporary, folder)


def write_shard(path: Path, place: int, numbers: list[int], origin: dict, annotations: Path, raw: Path, size, side):
    """Writes one archive into one shard; returns 1."""
    name = f"{numbers[0]:03d}"
    archive = fetch(origin, f"data/train/imgs/{name}.tgz", raw)
    captions = dict(json.loads(line) for line in open(annotations / f"{name}.jsonl"))
    counts = Counter()
    with ShardWriter(path) as shard:
        for i, base, data in each_picture(iter_tgz(archive, counts), shard):
            key = f"{name}{i:06d}"
            about = {"url": f"journeydb:{name}/{clean_text(base)}"}
            add_picture(shard, key, lambda data=data: data, captions.get(base, ""), about, size, side)
        shard.status.update(counts)
    forget(origin, archive)
    return 1


def main() -> None:
    p = parser(__doc__)
    add_arguments(p, "local copy of the data set", "address of a copy of the data set", True, None)
    g = p.add_argument_group("of JourneyDB")
    g.add_argument("--archives", default="0-9", help="a range of archives, from 0 to 199")
    g.add_argument("--caption", choices=("caption", "prompt"), default="caption", help="what becomes the caption")
    args = p.parse_args()
    check_arguments(args)
    archives = parse_range("--archives", args.archives, 0, 199, "0-9")
    origin, settings, raw = begin("01c_journeydb.py", args, ("archives", "caption", "size", "min_side"))
    annotations = args.out / "annotations"
    if not annotations.exists():
        plain = args.path and (Path(args.path) / ANNOTATIONS).is_file()
        source = fetch(origin, ANNOTATIONS if plain else ANNOTATIONS + ".tgz", raw)
        split_annotations(source, annotations, archives, args.caption)
    extra = (origin, annotations, raw, args.size, args.min_side)
    write_all("01c_journeydb.py", args, settings, archives, write_shard, extra, 1)


if __name__ == "__main__":
    run(main)
