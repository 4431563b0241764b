"""Draws captioned pictures of shapes into WebDataset tars with LAION's metadata columns: data for the demo.

    python data_pipeline/00_make_shapes.py --out data/shapes --count 10000 --seed 0 --size 64
    python data_pipeline/00_make_shapes.py --out data/any_colour --count 16000 --named_share 0.4
    python data_pipeline/00_make_shapes.py --out data/shapes_128 --count 50000 --size 128 --workers 4

Writes data/shapes/images/00000.tar, 00000.parquet, 00000_stats.json, ..., manifest.json. Picture i depends on the seed
and i alone. 10,000 pictures of 64 px take about 10 s on one core. What is drawn, what is held out of training and which
rows the filter should drop is in shapes.py. Run the same command again after a stop: finished shards are left alone.
"""

from pathlib import Path

import _path  # noqa: F401

from sd.cli import parser
from sd.errors import InputError, run
from sd.pictures import check_side, encode_png
from sd.shapes import row
from sd.shards import ShardWriter, build_shards
from sd.workers import check_workers

MAX_PICTURES = 1_000_000_000  # as many as the nine digits of a key can tell


def write_shard(path: Path, number: int, indices: range, seed: int, size: int, named_share: float = 1.0) -> int:
    """Draws the pictures `indices` into one shard; returns how many."""
    with ShardWriter(path) as shard:
        for place, index in enumerate(indices):
            picture, caption, metadata = row(seed, index, size, named_share)
            shard.add(f"{number:05d}{place:04d}", encode_png(picture), "png", caption, metadata)
    return len(indices)


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("pictures")
    g.add_argument("--out", required=True, help="folder of the source, e.g. data/shapes; gets images/*.tar")
    g.add_argument("--count", type=int, default=10_000, help="how many pictures")
    g.add_argument("--seed", type=int, default=0, help="chooses what is drawn")
    g.add_argument("--size", type=int, default=64, help="side in pixels")
    g.add_argument("--named_share", type=float, default=1.0, help="of the pictures, how many have one of the eight "
                   "colours; the others have any, which captions do not name: for an autoencoder")  # fmt: skip

    g = p.add_argument_group("running")
    g.add_argument("--shard_size", type=int, default=1000, help="pictures a tar, at most 10,000")
    g.add_argument("--workers", type=int, default=1, help="processes")
    args = p.parse_args()
    check_side(args.size, 16)
    check_workers(args.workers)
    if not 1 <= args.count <= MAX_PICTURES or args.seed < 0 or not 1 <= args.shard_size <= 10_000:
        raise InputError("--count must be from 1 to 1,000,000,000, --seed at least 0, --shard_size from 1 to 10,000")
    if not 0 <= args.named_share <= 1:
        raise InputError(f"--named_share wants 0 to 1, found {args.named_share}")
    settings = {"count": args.count, "seed": args.seed, "size": args.size, "shard_size": args.shard_size}
    extra = (args.seed, args.size)
    if args.named_share < 1:
        settings["named_share"] = args.named_share
        extra += (args.named_share,)
    manifest = build_shards(
        args.out, "00_make_shapes.py", settings, range(args.count), write_shard, extra, args.shard_size, args.workers
    )
    print(f"{manifest['pictures']:,} pictures in {manifest['shards']} shards: {args.out}/images")


if __name__ == "__main__":
    run(main)
