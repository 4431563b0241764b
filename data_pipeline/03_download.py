"""Downloads the pictures of filtered metadata into WebDataset tars, with img2dataset.

    python data_pipeline/03_download.py --setup                                     # once: makes .venv-img2dataset
    python data_pipeline/03_download.py --in data/laion/filtered --out data/laion --workers 16 --threads 64
    python data_pipeline/03_download.py --in data/laion/filtered --out data/laion --rounds 5   # more, later

Writes data/laion/images/00000.tar, 00000.parquet, 00000_stats.json, ... and manifest.json, the report: pictures + the
sum of rejected = urls. --in is what 02_filter.py wrote: parquet with url and caption under any of their names; the
other columns (scores, language, ...) go along into the pictures' metadata, with row_id, the row's place in --in.

Pictures whose shorter side is above --size are scaled down to it, the ratio kept, none is scaled up, and all become
JPEGs of quality 95. A URL that failed is tried again in the next round, on its own, into further shards; one that
answered 404, 410 or 451, opted out, or is too small is not. Pictures whose server sends `X-Robots-Tag: noai`,
`noimageai`, `noindex` or `noimageindex` are not used unless --disallowed_header_directives says otherwise.

Run the same command again to go on after a stop: shards that were finished are kept, the rest is done again.
img2dataset forces older versions of three libraries, so it lives in an environment of its own.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import _path  # noqa: F401
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sd.cli import parser
from sd.errors import InputError, run
from sd.files import claim_folder, fingerprint, list_files, make_folder, read_json, write_manifest
from sd.metadata import find_column
from sd.pictures import MAX_PIXELS
from sd.shards import stats_path
from sd.workers import progress

ENVIRONMENT = Path(__file__).resolve().parent.parent / ".venv-img2dataset"
REQUIREMENT = "img2dataset==1.47.0"
TODO_ROWS = 1_000_000  # rows of one input file of img2dataset, which reads it whole
# img2dataset writes these itself and refuses or overwrites columns of the same name
RESERVED = {"key", "caption", "url", "width", "height", "original_width", "original_height", "status", "error_message"}
RESERVED |= {"exif", "md5", "sha256", "sha512", "row_id"}
FINAL = ("HTTP Error 404", "HTTP Error 410", "HTTP Error 451", "Use of image disallowed", "image too small",
         "image area too large", "aspect ratio too large")  # fmt: skip
# Runs "$@" and ends it, with all that it started, when stdin closes: that is when this script ends, however it ends.
SUPERVISOR = 'exec 3<&0; "$@" </dev/null & work=$!; { cat >/dev/null; kill -9 0; } <&3 & wait $work'


# ---------------------------------------------------------------------------------------------------------------------
# The environment of img2dataset


def set_up(folder: Path) -> None:
    """Makes a virtual environment with img2dataset in it, or fails in one sentence."""
    make_folder(folder)
    (folder / ".gitignore").write_text("*\n")
    python = os.environ.get("PYTHON", sys.executable)
    for command in ([python, "-m", "venv", folder], [folder / "bin" / "python", "-m", "pip", "install", REQUIREMENT]):
        print("$", *command, flush=True)
        try:
            status = subprocess.run(command).returncode
        except FileNotFoundError:
            raise InputError(f"there is no {command[0]}: set PYTHON to a Python of version 3.10 to 3.12") from None
        if status:
            raise InputError(f"{command[0]} ended with status {status}: see its message above, then run --setup again")


def engine_version(python: Path) -> str:
    """The version of img2dataset in an environment, or fails in one sentence."""
    question = "import img2dataset, importlib.metadata as m; print(m.version('img2dataset'))"
    try:
        done = subprocess.run([python, "-c", question], capture_output=True, text=True)
    except OSError:
        done = None
    if done is None or done.returncode:
        raise InputError(
            f"{python} has no working img2dataset: run with --setup once (this Python, or the one that the environment "
            "variable PYTHON names, must be of version 3.10 to 3.12), or give one that has it as --python"
        )
    return done.stdout.split()[-1]


# ---------------------------------------------------------------------------------------------------------------------
# The rows to download


def read_inputs(folder: str) -> tuple[list[Path], dict[str, tuple[str, str]], list[str], int]:
    """The parquet files of --in, (name of url, name of caption) by file, the columns that go along, the rows."""
    files = list_files(folder, ".parquet")
    names, schemas, rows = {}, [], 0
    for path in files:
        try:
            file = pq.ParquetFile(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise InputError(
                f"cannot read {path} ({str(error).splitlines()[0]}): make it again with 02_filter.py"
            ) from None
        found = [find_column(file.schema_arrow.names, name) for name in ("url", "caption")]
        if None in found:
            raise InputError(
                f"{path} has no column url or caption (it has {', '.join(file.schema_arrow.names)}): add it"
            )
        names[str(path)] = tuple(found)
        schemas.append({field.name: field.type for field in file.schema_arrow})
        rows += file.metadata.num_rows
    if not rows:
        raise InputError(f"{folder} has no rows: relax the rules of 02_filter.py")
    along = [name for name, kind in schemas[0].items() if goes_along(name, kind)]
    along = [n for n in along if all(s.get(n) == schemas[0][n] for s in schemas) and n not in names[str(files[0])]]
    return files, names, along, rows


def goes_along(name: str, kind: pa.DataType) -> bool:
    """Whether a column is kept beside the picture: what JSON can hold, under a name that img2dataset leaves free."""
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return name.lower() not in RESERVED and (plain or pa.types.is_string(kind) or pa.types.is_large_string(kind))


def rows_to_do(files: list[Path], names: dict, along: list[str], todo: np.ndarray) -> Iterator[pa.Table]:
    """Tables of at most TODO_ROWS rows: url, caption, row_id and what goes along, for the rows where todo is True."""
    first, waiting, count = 0, [], 0
    for path in files:
        for batch in pq.ParquetFile(path).iter_batches(columns=[*names[str(path)], *along]):
            chosen = np.flatnonzero(todo[first : first + len(batch)])
            columns = [batch[name] for name in (*names[str(path)], *along)]
            table = pa.table([pa.array(np.arange(first, first + len(batch))), *columns],
                             names=["row_id", "url", "caption", *along])  # fmt: skip
            waiting.append(table.take(chosen))
            count += len(chosen)
            first += len(batch)
            if count >= TODO_ROWS - batch.num_rows:
                yield pa.concat_tables(waiting)
                waiting, count = [], 0
    if count:
        yield pa.concat_tables(waiting)


# ---------------------------------------------------------------------------------------------------------------------
# Finished shards, and what became of each row


def finished(folder: Path) -> Iterator[tuple[Path, int]]:
    """(tar, rows) of the shards that img2dataset has finished: the stats, which it writes last, are whole."""
    for stats in sorted(folder.glob("*_stats.json")):
        tar = stats.with_name(stats.name.replace("_stats.json", ".tar"))
        try:
            count = json.loads(stats.read_text())["count"]
            whole = tar.exists() and pq.read_metadata(tar.with_suffix(".parquet")).num_rows == count
        except (ValueError, KeyError, OSError, pa.ArrowInvalid):
            continue
        if whole:
            yield tar, count


def harvest(staging: Path, images: Path) -> None:
    """Moves finished shards from where img2dataset writes to images/, the tar last, and deletes what is left."""
    for shards in sorted(staging.glob("*/shards")):
        for tar, _ in finished(shards):
            for path in (tar.with_suffix(".parquet"), stats_path(tar), tar):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
                os.replace(path, images / path.name)
    shutil.rmtree(staging, ignore_errors=True)
    for path in [*images.glob("*.parquet"), *images.glob("*_stats.json")]:
        if not (images / f"{path.stem.removesuffix('_stats')}.tar").exists():
            path.unlink()


def short_reason(message: str | None) -> str:
    """An error message of img2dataset as a reason that many pictures may share."""
    message = message or ""
    if "infinite loop" in message:
        return "redirect loop"
    if "CV_IO_MAX_IMAGE" in message:
        return "too_many_pixels"
    line = message.strip().partition("\n")[0] or "unknown"
    return re.sub(r"\b\d+ (bytes|more)", r"N \1", line.strip("<>"))[:80]


class Outcome:
    """What became of each row, from the parquet of the finished shards: tries, success, and the last reason."""

    def __init__(self, rows: int, images: Path):
        self.tries = np.zeros(rows, np.int16)
        self.reason = np.zeros(rows, np.int32)  # a number of self.reasons
        self.reasons = {"not tried": 0, "success": 1}
        self.rounds: list[Counter] = []
        self.tars = sorted(images.glob("*.tar"))
        for tar in self.tars:
            self._add(pq.read_table(tar.with_suffix(".parquet"), columns=["row_id", "status", "error_message"]))

    def _add(self, table: pa.Table) -> None:
        for row, status, message in zip(*(table[name].to_pylist() for name in table.column_names), strict=True):
            reason = "success" if status == "success" else short_reason(message)
            self.reason[row] = self.reasons.setdefault(reason, len(self.reasons))
            self.tries[row] += 1
            while len(self.rounds) < self.tries[row]:
                self.rounds.append(Counter())
            self.rounds[self.tries[row] - 1].update(tried=1, succeeded=int(status == "success"))

    def todo(self, number: int) -> np.ndarray:
        """bool [rows]: what round `number` (from 1) has yet to try."""
        final = [number for name, number in self.reasons.items() if name == "success" or name.startswith(FINAL)]
        return (self.tries < number) & ~np.isin(self.reason, final)

    def counts(self) -> Counter:
        """Rows by reason; they add up to all rows."""
        totals = np.bincount(self.reason, minlength=len(self.reasons))
        return Counter({name: int(n) for name, n in zip(self.reasons, totals, strict=True) if n})


# ---------------------------------------------------------------------------------------------------------------------
# Downloading


def engine_command(args: argparse.Namespace, python: Path, folder: Path, along: list[str]) -> list[str]:
    """The command line of img2dataset for one pass."""
    flags = {
        "url_list": folder / "todo",
        "input_format": "parquet",
        "url_col": "url",
        "caption_col": "caption",
        "save_additional_columns": json.dumps(["row_id", *along]),
        "output_folder": folder / "shards",
        "output_format": "webdataset",
        "number_sample_per_shard": args.shard_size,
        "image_size": args.size,
        "resize_mode": "keep_ratio",
        "resize_only_if_bigger": True,
        "encode_format": "jpg",
        "encode_quality": args.quality,
        "min_image_size": args.min_side,
        "max_image_area": MAX_PIXELS,
        "processes_count": args.workers,
        "thread_count": args.threads,
        "timeout": args.timeout,
        "distributor": args.distributor,
        "incremental_mode": "extend",
        "compute_hash": "sha256",
        "enable_wandb": False,
    }
    if args.user_agent_token:
        flags["user_agent_token"] = args.user_agent_token
    if args.disallowed_header_directives is not None:
        flags["disallowed_header_directives"] = json.dumps(args.disallowed_header_directives)
    return [str(python), "-m", "img2dataset.main", *(f"--{name}={value}" for name, value in flags.items())]


def run_pass(args: argparse.Namespace, python: Path, inputs: tuple, outcome: Outcome, todo: np.ndarray, title: str):
    """Runs img2dataset over the rows of todo and brings its finished shards to images/."""
    files, names, along, _ = inputs
    staging, images = Path(args.out) / "download.tmp", Path(args.out) / "images"
    folder = staging / str(os.getpid())
    make_folder(folder / "todo")
    make_folder(folder / "shards")
    for number, table in enumerate(rows_to_do(files, names, along, todo)):
        pq.write_table(table, folder / "todo" / f"{number:05d}.parquet")
    if outcome.tars:  # in its mode `extend`, img2dataset goes on after the highest number that it finds
        shutil.copy(stats_path(outcome.tars[-1]), folder / "shards")
    limits = {"OPENCV_IO_MAX_IMAGE_PIXELS": str(MAX_PIXELS)}  # or 40,000 x 40,000 zeros would be unpacked
    command = ["sh", "-c", SUPERVISOR, "sh", *engine_command(args, python, folder, along)]
    with open(Path(args.out) / "img2dataset.log", "ab") as log, progress(int(todo.sum()), title, "url") as bar:
        engine = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True,
                                  env={**os.environ, **limits})  # fmt: skip
        try:
            while engine.poll() is None:
                time.sleep(0.5)
                bar.update(sum(count for _, count in finished(folder / "shards")) - bar.n)
        finally:
            engine.stdin.close()
    harvest(staging, images)


def report(outcome: Outcome, args: argparse.Namespace, settings: dict) -> None:
    """Writes manifest.json and prints what became of the URLs."""
    counts = outcome.counts()
    manifest = {
        "script": "03_download.py",
        "settings": settings,
        "complete": True,
        "shards": len(outcome.tars),
        "urls": counts.total(),
        "pictures": counts.pop("success", 0),
        "rejected": dict(sorted(counts.items())),
        "rounds": [dict(counter) for counter in outcome.rounds],
    }
    if manifest["pictures"]:
        write_manifest(Path(args.out) / "images", manifest)
    for number, counter in enumerate(outcome.rounds, 1):
        print(f"round {number}: {counter['tried']:,} URLs tried, {counter['succeeded']:,} pictures")
    for reason, count in counts.most_common():
        print(f"  {count:>10,}  {reason}")
    if not manifest["pictures"]:
        raise InputError(
            f"none of {manifest['urls']:,} URLs gave a picture: see the reasons above, and try more --rounds"
        )
    print(f"{manifest['pictures']:,} pictures of {manifest['urls']:,} URLs: {args.out}/images")


def parse_arguments() -> argparse.Namespace:
    p = parser(__doc__)
    g = p.add_argument_group("input and output")
    g.add_argument("--in", dest="folder", help="folder that 02_filter.py wrote, or a glob of parquet; must be given, "
                   "but for --setup alone")  # fmt: skip
    g.add_argument("--out", help="folder of the source, e.g. data/laion; gets images/*.tar; must be given, but for "
                   "--setup alone")  # fmt: skip

    g = p.add_argument_group("img2dataset")
    g.add_argument("--setup", action="store_true", help=f"first make {ENVIRONMENT.name} with {REQUIREMENT}")
    g.add_argument("--env", type=Path, default=ENVIRONMENT, help="where that environment lies")
    g.add_argument("--python", type=Path, help="the Python of another environment that has img2dataset (default: "
                   "--env's)")  # fmt: skip

    g = p.add_argument_group("pictures")
    g.add_argument("--size", type=int, default=512, help="longest shorter side in pixels; none is scaled up")
    g.add_argument("--min_side", type=int, default=0, help="reject pictures whose shorter side is below this")
    g.add_argument("--quality", type=int, default=95, help="of the JPEGs")

    g = p.add_argument_group("running")
    g.add_argument("--rounds", type=int, default=3, help="how often a URL that fails is tried")
    g.add_argument("--shard_size", type=int, default=10_000, help="URLs a tar")
    g.add_argument("--workers", type=int, default=1, help="processes")
    g.add_argument("--threads", type=int, default=64, help="downloads at once, a process")
    g.add_argument("--timeout", type=int, default=10, help="seconds without an answer")
    g.add_argument("--distributor", choices=("multiprocessing", "pyspark", "ray"), default="multiprocessing",
                   help="what img2dataset shares the work by")  # fmt: skip

    g = p.add_argument_group("manners")
    g.add_argument("--user_agent_token", help="a name for the User-Agent header and for X-Robots-Tag rules (default: "
                   "none)")  # fmt: skip
    g.add_argument("--disallowed_header_directives", nargs="*", help="X-Robots-Tag directives that forbid use; "
                   "with none after the flag, the tag is ignored (default: noai noimageai noindex "
                   "noimageindex)")  # fmt: skip
    args = p.parse_args()
    if not args.setup and not (args.folder and args.out):
        raise InputError("--in and --out are needed: the filtered parquet and the folder of the source")
    if bool(args.folder) != bool(args.out):
        raise InputError("--in and --out go together: give both, or --setup alone")
    if args.size < 8 or args.min_side < 0 or not 1 <= args.quality <= 100 or args.shard_size < 2:
        raise InputError("--size must be at least 8, --min_side 0, --quality from 1 to 100, --shard_size at least 2")
    if min(args.rounds, args.workers, args.threads, args.timeout) < 1:
        raise InputError("--rounds, --workers, --threads and --timeout must be at least 1")
    return args


def main() -> None:
    args = parse_arguments()
    if args.setup:
        set_up(args.env)
    if not args.folder:
        return
    inputs = read_inputs(args.folder)
    python = args.python or args.env / "bin" / "python"
    settings = {
        "rows": fingerprint(*inputs[0]),
        "img2dataset": engine_version(python),
        "disallowed_header_directives": args.disallowed_header_directives,
    }
    settings |= {name: getattr(args, name) for name in ("size", "min_side", "quality", "shard_size")}
    images = Path(args.out) / "images"
    staging, manifest = Path(args.out) / "download.tmp", images / "manifest.json"
    if manifest.exists() and read_json(manifest).get("script") == "03_download.py":
        harvest(staging, images)  # before claim_folder, so that it sees whether the folder is taken
    if claim_folder(images, "03_download.py", settings):
        shutil.rmtree(staging, ignore_errors=True)
    outcome = Outcome(inputs[-1], images)
    for number in range(1, args.rounds + 1):
        while (todo := outcome.todo(number)).any():
            before = outcome.tries.sum()
            run_pass(args, python, inputs, outcome, todo, f"round {number}")
            outcome = Outcome(inputs[-1], images)
            if outcome.tries.sum() == before:
                raise InputError(
                    f"img2dataset finished no shard: see {args.out}/img2dataset.log, put it right and run again"
                )
    report(outcome, args, settings)


if __name__ == "__main__":
    run(main)
