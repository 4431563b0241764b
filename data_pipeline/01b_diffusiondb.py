"""DiffusionDB's zip parts into WebDataset tars of square JPEGs.

    python data_pipeline/01b_diffusiondb.py --hub_id poloclub/diffusiondb --out data/diffusiondb --workers 8
    python data_pipeline/01b_diffusiondb.py --path /mnt/diffusiondb --out data/diffusiondb --parts 1-20
    python data_pipeline/01b_diffusiondb.py --url https://mirror.org/diffusiondb --large --parts 1-100 --out data/ddb

A part is images/part-000001.zip (with --large diffusiondb-large-part-1/part-000001.zip, from 10001 on in -part-2):
1,000 PNG or WebP and part-000001.json, which has their prompts and settings. Each part becomes one tar; a part that was
downloaded is deleted once its tar is there, and none is ever unpacked to disk. metadata.parquet (with --large
metadata-large.parquet) gives the NSFW scores of prompt and picture, the larger of which becomes `punsafe`, for
02_filter.py; --no_metadata does without.

Run the same command again to go on after a stop. What is left out is counted by reason.
"""

import functools
import json
import zipfile
from pathlib import Path

import _path  # noqa: F401
import pyarrow as pa
import pyarrow.parquet as pq

from sd.cli import parser
from sd.errors import InputError, run
from sd.pictures import Reject
from sd.shards import ShardWriter
from sd.sources import (
    add_arguments,
    add_picture,
    begin,
    check_arguments,
    each_picture,
    fetch,
    forget,
    open_zip,
    parse_range,
    read_zip,
    write_all,
)
from sd.text import clean_text

MAX_PARTS = {False: 2_000, True: 14_000}
SETTINGS = {"se": "seed", "c": "cfg", "st": "steps", "sa": "sampler"}  # the JSON's names, and ours


def part_name(number: int, large: bool) -> str:
    """Where a part lies in the data set, e.g. images/part-000001.zip."""
    folder = f"diffusiondb-large-part-{1 if number <= 10_000 else 2}" if large else "images"
    return f"{folder}/part-{number:06d}.zip"


def read_prompts(archive: zipfile.ZipFile, part: str) -> dict[str, dict]:
    """What a part's JSON says of each picture; fails in one sentence."""
    names = [name for name in archive.namelist() if name.rpartition("/")[2] == f"{part}.json"]
    try:
        prompts = json.loads(read_zip(archive, archive.getinfo(names[0])))
        return {name: entry for name, entry in prompts.items() if isinstance(entry, dict)}
    except (IndexError, ValueError, AttributeError, Reject) as error:
        raise InputError(f"{archive.filename} has no readable {part}.json ({error}): get that part again") from None


def read_scores(metadata: Path | None, number: int) -> dict[str, float]:
    """The larger NSFW score by picture of a part; none if there is no metadata."""
    if metadata is None:
        return {}
    columns = ["image_name", "image_nsfw", "prompt_nsfw"]
    try:
        table = pq.read_table(metadata, columns=columns, filters=[("part_id", "=", number)])
    except (OSError, KeyError, pa.ArrowInvalid) as error:
        reason = str(error).splitlines()[0]
        raise InputError(
            f"{metadata} cannot be read as DiffusionDB's metadata ({reason}): get it again, or --no_metadata"
        ) from None
    rows = zip(*(table[name].to_pylist() for name in columns), strict=True)
    return {name: max(scores) for name, *scores in rows if None not in scores}


def write_shard(path: Path, place: int, parts: list[int], origin: dict, large: bool, raw: Path, metadata, size, side):
    """Writes one part into one shard; returns 1."""
    number = parts[0]
    zip_path = fetch(origin, part_name(number, large), raw)
    prompts, scores = None, read_scores(metadata, number)
    with open_zip(zip_path) as archive, ShardWriter(path) as shard:
        prompts = read_prompts(archive, zip_path.stem)
        members = ((info.filename, info) for info in archive.infolist() if not info.is_dir())
        for i, name, info in each_picture(members, shard):
            entry, key = prompts.get(name, {}), f"{number:06d}{i:04d}"
            about = {ours: entry.get(theirs) for theirs, ours in SETTINGS.items()}
            about |= {"url": f"diffusiondb:{zip_path.stem}/{name}", "punsafe": scores.get(name)}
            caption = clean_text(entry["p"]).strip() if isinstance(entry.get("p"), str) else ""
            add_picture(shard, key, functools.partial(read_zip, archive, info), caption, about, size, side)
    open_zip.cache_clear()
    forget(origin, zip_path)
    return 1


def main() -> None:
    p = parser(__doc__)
    add_arguments(p, "local copy of the data set", "address of a copy of the data set", True, None)
    g = p.add_argument_group("of DiffusionDB")
    g.add_argument("--parts", default="1-500", help="a range of parts")
    g.add_argument("--large", action="store_true", help="DiffusionDB large (14 million) instead of 2M")
    g.add_argument("--no_metadata", action="store_true", help="do without the NSFW scores")
    args = p.parse_args()
    check_arguments(args)
    parts = parse_range("--parts", args.parts, 1, MAX_PARTS[args.large], "1-500")
    names = ("parts", "large", "no_metadata", "size", "min_side")
    origin, settings, raw = begin("01b_diffusiondb.py", args, names)
    table = "metadata-large.parquet" if args.large else "metadata.parquet"
    metadata = None if args.no_metadata else fetch(origin, table, raw)
    extra = (origin, args.large, raw, metadata, args.size, args.min_side)
    write_all("01b_diffusiondb.py", args, settings, parts, write_shard, extra, 1)


if __name__ == "__main__":
    run(main)
