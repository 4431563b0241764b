"""Speed and memory of data_pipeline/02_filter.py on made-up LAION metadata, beside the same query in DuckDB.

    python benchmarks/filter_bench.py --folder /tmp/filter_bench
    python benchmarks/filter_bench.py --folder /tmp/filter_bench --rows 10000000 --duckdb /tmp/venv/bin/python

Makes --rows rows in 24 shards of three schemas (LAION-aesthetic: URL, TEXT, AESTHETIC_SCORE; img2dataset: url, caption,
aesthetic; COYO: watermark_score, aesthetic_score_laion_v2), with nulls, NaN and repeated URLs; runs both with the
limits of laion_broad and one row a URL, each in a process of its own; checks that both keep the same rows. --duckdb is
a Python that has the package duckdb. Prints rows/s and the peak of resident memory; the last line is JSON.
10 million rows take 1 GB of disk.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sd.cli import parser  # noqa: E402

SCRIPT = Path(__file__).resolve().parent.parent / "data_pipeline" / "02_filter.py"
SHARDS = 24
GROUP_ROWS = 250_000
# What each schema calls id, URL, caption, width, height, similarity, aesthetic, watermark, unsafe.
SCHEMAS = (
    "SAMPLE_ID URL TEXT WIDTH HEIGHT similarity AESTHETIC_SCORE pwatermark punsafe".split(),
    "sample_id url caption original_width original_height similarity aesthetic pwatermark punsafe".split(),
    "id url text width height clip_similarity_vitl14 aesthetic_score_laion_v2 watermark_score "
    "nsfw_score_opennsfw2".split(),
)
KINDS = (pa.int32(), pa.float64(), pa.int64())  # of widths and heights, as the releases have them
WORDS = "a the of red blue old small photo house sea portrait with and in garden cat dog print vintage art".split()


def make_rows(first: int, count: int, schema: int) -> pa.Table:
    """Rows first, first + 1, ... in one of the schemas; a function of the arguments."""
    rng = np.random.default_rng([first, schema])
    ids = np.arange(first, first + count)
    pages = np.where(rng.random(count) < 0.05, rng.integers(0, first + count, count), ids)  # 5 % are repeated
    hosts = [f"https://img{i}.example.com/wp-content/uploads/" for i in range(50)]
    prefixes = pa.array(hosts).take(pa.array(pages % 50))
    urls = pc.binary_join_element_wise(prefixes, pc.cast(pa.array(pages * 2654435761), pa.string()), ".jpg", "")
    captions = [" ".join(rng.choice(WORDS, rng.integers(3, 16))) for _ in range(5000)]
    texts = pa.array([*captions, None, " "]).take(pa.array(rng.integers(0, 5002, count)))
    sides = [pa.array(rng.integers(200, 2000, count)).cast(KINDS[schema]) for _ in range(2)]
    scores = [
        rng.normal(0.30, 0.04, count),
        rng.normal(6.5, 0.6, count),
        rng.beta(0.5, 1.5, count),
        rng.beta(0.3, 3, count),
    ]
    columns = [pa.array(ids), urls, texts, *sides]
    for values in scores:
        values = values.astype(np.float32 if schema == 2 else np.float64)
        values[rng.random(count) < 0.01] = np.nan
        columns.append(pa.array(values, mask=rng.random(count) < 0.01))  # the mask makes nulls
    return pa.table(dict(zip(SCHEMAS[schema], columns)))


def make_data(folder: Path, rows: int) -> None:
    """Shards 00000.parquet, ... in folder/in; nothing if they are there."""
    if (folder / "made").exists() and (folder / "made").read_text() == str(rows):
        return
    shutil.rmtree(folder / "in", ignore_errors=True)
    (folder / "in").mkdir(parents=True)
    bounds = np.linspace(0, rows, SHARDS + 1).astype(int)
    for shard, (begin, end) in enumerate(zip(bounds[:-1], bounds[1:])):
        first = make_rows(begin, 0, shard % 3)
        with pq.ParquetWriter(folder / "in" / f"{shard:05d}.parquet", first.schema) as writer:
            for start in range(begin, end, GROUP_ROWS):
                writer.write_table(make_rows(start, min(GROUP_ROWS, end - start), shard % 3))
    (folder / "made").write_text(str(rows))


QUERY = """
import duckdb, sys
from pathlib import Path
source, target, schemas, threads = Path(sys.argv[1]), sys.argv[2], eval(sys.argv[3]), int(sys.argv[4])
duckdb.execute(f"set threads={threads}; set enable_progress_bar=false")
parts = []
for shard, path in enumerate(sorted(source.glob("*.parquet"))):
    names = dict(zip("id url caption width height similarity aesthetic pwatermark punsafe".split(), schemas[shard % 3]))
    columns = ", ".join(f'"{n}" as {c}' for c, n in names.items())
    parts.append(f"select {columns}, {shard} as shard, file_row_number as place "
                 f"from read_parquet('{path}', file_row_number=true)")
scores = {"aesthetic": ">= 6.5", "similarity": ">= 0.28", "pwatermark": "<= 0.5", "punsafe": "<= 0.5"}
rules = ["width >= 512", "height >= 512", "url is not null", "length(trim(caption)) >= 1"]
rules += [f"not isnan({c}) and {c} {rule}::{{kind}}" for c, rule in scores.items()]
def where(shard):
    return " and ".join(rules).format(kind="float" if shard % 3 == 2 else "double")
union = " union all ".join(f"select * from ({p}) where {where(i)}" for i, p in enumerate(parts))
duckdb.execute(f"copy (select * from ({union}) qualify row_number() over (partition by url order by shard, place) = 1)"
               f" to '{target}' (format parquet)")
"""


def measure(command: list[str]) -> tuple[float, float]:
    """Runs a command; seconds, and the peak of its resident memory in MiB."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"error: {command[1]} ended with status {os.waitstatus_to_exitcode(status)}")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def kept_ids(paths: list[Path]) -> np.ndarray:
    """The ids of all rows of parquet files, sorted."""
    parts = []
    for path in paths:
        name = next(n for n in pq.read_schema(path).names if n.lower() in ("sample_id", "id"))
        parts.append(pq.read_table(path, columns=[name]).column(0).to_numpy())
    return np.sort(np.concatenate(parts))


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("work")
    g.add_argument("--folder", type=Path, required=True, help="for the shards and the results")
    g.add_argument("--rows", type=int, default=10_000_000, help="of made-up metadata")
    g.add_argument("--threads", type=int, default=1, help="of each of the two programs")
    g.add_argument("--duckdb", metavar="PYTHON", help="a Python that has duckdb (default: without the comparison)")
    args = p.parse_args()

    make_data(args.folder, args.rows)
    out, other = args.folder / "out", args.folder / "duckdb.parquet"
    shutil.rmtree(out, ignore_errors=True)
    other.unlink(missing_ok=True)
    command = [sys.executable, str(SCRIPT), "--in", str(args.folder / "in"), "--out", str(out), "--for", "laion_broad"]
    seconds, peak = measure([*command, "--drop_duplicate_urls", "--workers", str(args.threads)])
    ids = kept_ids(sorted(out.glob("*.parquet")))
    result = {
        "rows": args.rows,
        "kept": len(ids),
        "threads": args.threads,
        "seconds": round(seconds, 1),
        "rows_per_s": round(args.rows / seconds),
        "peak_mib": round(peak),
    }
    print(f"02_filter.py: {args.rows:,} rows in {seconds:.1f} s, {args.rows / seconds:,.0f} rows/s, {peak:,.0f} MiB")
    if args.duckdb:
        query = [args.duckdb, "-c", QUERY, str(args.folder / "in"), str(other), repr(SCHEMAS), str(args.threads)]
        seconds, peak = measure(query)
        same = np.array_equal(ids, kept_ids([other]))
        print(f"DuckDB: {seconds:.1f} s, {args.rows / seconds:,.0f} rows/s, {peak:,.0f} MiB; the same rows: {same}")
        speed = result["seconds"] / seconds
        result |= {"duckdb_rows_per_s": round(args.rows / seconds), "duckdb_peak_mib": round(peak)}
        result |= {"time_over_duckdb": round(speed, 2), "same_rows": same}
    print(json.dumps(result))
    if args.duckdb and not same:
        raise SystemExit("error: the two programs keep different rows")


if __name__ == "__main__":
    main()
