"""Gets the metadata of a LAION release: parquet shards with URLs, captions and scores.

    python data_pipeline/01_laion_metadata.py --out data/laion --hub_id laion/laion2B-en-aesthetic
    python data_pipeline/01_laion_metadata.py --out data/laion --url https://mirror.org/part-00000.parquet ...
    python data_pipeline/01_laion_metadata.py --out data/laion --path /mnt/mirror/laion2B-en-aesthetic

Writes data/laion/metadata/*.parquet under their own names, unchanged, and manifest.json: the origin (of a hub the
commit, which later runs keep to), rows and bytes of each file. A file is taken only if it is whole and has a URL and
a caption under any of the names in ALIASES of sd/metadata.py. Run the same command again to go on after a stop: what is
there stays, and a file that was cut goes on where it stopped.
"""

import fnmatch
import shutil
from pathlib import Path

import _path  # noqa: F401
import pyarrow as pa
import pyarrow.parquet as pq

from sd.cli import parser
from sd.errors import InputError, run
from sd.files import (
    atomic_path,
    claim_folder,
    fail_empty,
    list_files,
    make_folder,
    refuse_repeated_names,
    write_manifest,
)
from sd.metadata import find_column
from sd.sources import download, fetch, list_hub, origin_of
from sd.workers import progress


def list_names(origin: dict, pattern: str) -> list[str]:
    """The parquet files of the origin whose name fits the pattern, sorted: paths, addresses or names on the hub."""
    if "path" in origin:
        names = [str(path) for path in list_files(origin["path"], ".parquet")]
    elif "url" in origin:
        names = list(origin["url"])
    else:
        names = [name for name in list_hub(origin) if name.endswith(".parquet")]
    names = sorted(name for name in names if fnmatch.fnmatch(name.rpartition("/")[2], pattern))
    if not names:
        raise InputError(f"no parquet files that fit {pattern} in {origin}: give another --pattern or origin")
    refuse_repeated_names([Path(name.partition("?")[0]) for name in names])
    return names


def get(origin: dict, name: str, target: Path, raw: Path) -> None:
    """Brings one file to `target`, after a look into it."""
    if "path" in origin:
        with atomic_path(target) as temporary:
            shutil.copyfile(name, temporary)
            check(temporary, name)
        return
    if "url" in origin:
        path = raw / target.name
        if not path.exists():
            download(name, path)
    else:
        path = fetch(origin, name, raw)
    check(path, name)
    path.rename(target)


def check(path: Path, name: str) -> None:
    """Fails unless a file is a whole parquet with a URL and a caption; a bad download is deleted first."""
    try:
        columns = pq.read_schema(path).names
    except (OSError, pa.ArrowInvalid) as error:
        path.unlink()
        raise InputError(
            f"{name} is not a whole parquet file ({str(error).splitlines()[0]}): get it from another origin"
        ) from None
    missing = [column for column in ("url", "caption") if find_column(columns, column) is None]
    if missing:
        path.unlink()
        raise InputError(f"{name} has no column {missing[0]} (it has {', '.join(columns)}): narrow --pattern")


def describe(path: Path) -> dict:
    return {"rows": pq.read_metadata(path).num_rows, "bytes": path.stat().st_size}


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("where from (--hub_id, --url or --path)")
    origin = g.add_mutually_exclusive_group(required=True)
    origin.add_argument("--hub_id", help="data set on a hub, e.g. laion/laion2B-en-aesthetic")
    origin.add_argument("--url", nargs="+", help="addresses of parquet files")
    origin.add_argument("--path", help="folder of parquet files, or a glob in quotes")
    g.add_argument("--revision", help="of the hub's data set (default: its newest, pinned in manifest.json)")
    g.add_argument("--pattern", default="*.parquet", help="which files, e.g. 'part-0000[0-9]*'")

    g = p.add_argument_group("where to")
    g.add_argument("--out", required=True, type=Path, help="folder of the source; gets metadata/*.parquet")
    args = p.parse_args()
    folder = args.out / "metadata"
    origin = origin_of(args, folder)
    names = list_names(origin, args.pattern)
    settings = {"origin": origin, "pattern": args.pattern}
    if claim_folder(folder, "01_laion_metadata.py", settings):
        shutil.rmtree(folder / "download.tmp", ignore_errors=True)  # of another origin
    raw = make_folder(folder / "download.tmp")
    targets = [folder / Path(name.partition("?")[0]).name for name in names]
    with progress(len(names), "01_laion_metadata.py", "file") as bar:
        for name, target in zip(names, targets, strict=True):
            if not target.exists():
                get(origin, name, target, raw)
            bar.update(1)
    shutil.rmtree(raw)
    files = {target.name: describe(target) for target in targets}
    rows = sum(file["rows"] for file in files.values())
    manifest = {"script": "01_laion_metadata.py", "settings": settings, "complete": True, "rows": rows, "files": files}
    if not rows:
        fail_empty(folder, manifest, targets, f"{len(files)} files of {origin} hold no rows: give other ones")
    write_manifest(folder, manifest)
    print(f"{rows:,} rows in {len(files)} files: {folder}")


if __name__ == "__main__":
    run(main)
