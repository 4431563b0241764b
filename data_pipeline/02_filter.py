"""Drops rows of metadata (parquet) that break a rule: scores, size, aspect, caption length, duplicate URLs.

    python data_pipeline/02_filter.py --in data/shapes/images --out data/shapes/filtered \
        --min_aesthetic 6 --min_similarity 0.25 --max_watermark 0.5 --max_unsafe 0.5
    python data_pipeline/02_filter.py --in 'data/laion/metadata/*.parquet' --out data/laion/filtered \
        --min_aesthetic 6.5 --min_similarity 0.28 --min_width 512 --min_height 512 --max_watermark 0.5 \
        --max_unsafe 0.5 --drop_duplicate_urls

Writes one parquet per input parquet, under the same name, and manifest.json with the funnel: rows read, dropped by
reason, kept; they add up. Columns are found under any of the names that LAION's releases use (ALIASES in common.py) and
leave under one name (url, caption, width, height, similarity, aesthetic, pwatermark, punsafe); all others are kept as
they are. Rules apply in the order of the funnel, and the first that fails takes the row.

A rule that is not asked for needs no column; one that is, fails if a shard lacks its column. A row with a null or NaN
where a rule needs a value is dropped, as `missing`: a null caption is not the text "nan". Of several rows with one URL
the first that passes all other rules is kept, over all shards. Reads batch by batch: memory does not grow with the
rows, but for 8 bytes a kept URL. Run the same command again to go on after a stop, or when shards were added.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import common

BATCH_ROWS = 65_536


@dataclass(frozen=True)
class Rule:
    """Keeps rows whose `column` (a name of ALIASES) lies within [low, high]; `reason` counts the dropped ones."""

    reason: str
    column: str
    low: float = -np.inf
    high: float = np.inf


def rules_of(args: argparse.Namespace) -> list[Rule]:
    """The rules that the flags ask for, in the order of the funnel."""
    rules = [
        Rule("width", "width", low=args.min_width) if args.min_width is not None else None,
        Rule("height", "height", low=args.min_height) if args.min_height is not None else None,
        Rule("aspect", "aspect", high=args.max_aspect) if args.max_aspect is not None else None,
        Rule("aesthetic", "aesthetic", low=args.min_aesthetic) if args.min_aesthetic is not None else None,
        Rule("similarity", "similarity", low=args.min_similarity) if args.min_similarity is not None else None,
        Rule("watermark", "pwatermark", high=args.max_watermark) if args.max_watermark is not None else None,
        Rule("unsafe", "punsafe", high=args.max_unsafe) if args.max_unsafe is not None else None,
        Rule("caption_short", "caption", low=args.min_caption) if args.min_caption > 0 else None,
        Rule("caption_long", "caption", high=args.max_caption) if args.max_caption is not None else None,
    ]
    return [rule for rule in rules if rule is not None]


def numbers(batch: pa.RecordBatch, column: str, shard: Path) -> np.ndarray:
    """The values a rule compares, float64 [rows], NaN where missing: a score, the ratio of the longer to the shorter
    side for 'aspect', the number of characters for 'caption'."""
    if column == "aspect":
        width, height = numbers(batch, "width", shard), numbers(batch, "height", shard)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.maximum(width, height) / np.minimum(width, height)
    name = common.find_column(batch.schema.names, column)
    if name is None:
        wanted = ", ".join(common.ALIASES[column])
        common.fail(f"{shard} has no column {column} (looked for {wanted}), which a rule needs: drop that rule's flag")
    values = batch.column(name)
    if column == "caption":
        return caption_lengths(values, shard, name)
    try:
        return pc.cast(values, pa.float64()).to_numpy(zero_copy_only=False)  # null becomes NaN
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        common.fail(f"{shard}: column {name} should hold numbers but holds {values.type}: drop the rule or convert it")


def caption_lengths(values: pa.Array, shard: Path, name: str) -> np.ndarray:
    """Characters of each caption without surrounding space, float64 [rows], NaN where it is null."""
    if pa.types.is_floating(values.type) and np.isnan(values.to_numpy(zero_copy_only=False)).all():
        values = pa.nulls(len(values))  # how pandas writes a column of nulls
    if pa.types.is_null(values.type):
        values = values.cast(pa.string())
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        common.fail(f"{shard}: column {name} should hold text but holds {values.type}: convert it")
    lengths = pc.utf8_length(pc.utf8_trim_whitespace(values))
    return pc.cast(lengths, pa.float64()).to_numpy(zero_copy_only=False)


def select(
    batch: pa.RecordBatch, rules: list[Rule], urls: common.SeenSet | None, shard: Path, funnel: Counter
) -> pa.RecordBatch:
    """The rows that pass all rules; counts all rows of the batch in the funnel."""
    keep = np.ones(len(batch), bool)
    cache: dict[str, np.ndarray] = {}
    for rule in rules:
        if rule.column not in cache:
            cache[rule.column] = numbers(batch, rule.column, shard)
        values = cache[rule.column]
        missing = keep & np.isnan(values)
        outside = keep & ((values < rule.low) | (values > rule.high))
        funnel["missing"] += int(missing.sum())
        funnel[rule.reason] += int(outside.sum())
        keep &= ~(missing | outside)
    if urls is not None:
        name = common.find_column(batch.schema.names, "url")
        if name is None:
            common.fail(f"{shard} has no column url, which --drop_duplicate_urls needs: drop that flag")
        column = batch.column(name)
        null = ~column.is_valid().to_numpy(zero_copy_only=False)
        funnel["missing"] += int((keep & null).sum())
        keep &= ~null
        places = np.flatnonzero(keep)
        new = urls.add(column.take(pa.array(places)).to_pylist())
        funnel["duplicate_url"] += int((~new).sum())
        keep[places[~new]] = False
    funnel["kept"] += int(keep.sum())
    return batch.filter(pa.array(keep))


def canonical_names(names: list[str]) -> list[str]:
    """Column names with LAION's various ones replaced by those of ALIASES; a name that is taken stays."""
    renamed = list(names)
    for canonical in common.ALIASES:
        name = common.find_column(renamed, canonical)
        if name is not None and canonical not in renamed:
            renamed[renamed.index(name)] = canonical
    return renamed


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Batches of a parquet file; the first one (perhaps without rows) is there even if the file has no rows."""
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            yield pa.RecordBatch.from_pylist([], schema=file.schema_arrow)
            yield from file.iter_batches(BATCH_ROWS)
    except (pa.ArrowInvalid, pa.ArrowSerializationError, OSError) as error:
        common.fail(f"cannot read {path} as parquet ({str(error).splitlines()[0]}): get it again, or remove it")


def filter_shard(source: Path, target: Path, rules: list[Rule], urls: common.SeenSet | None, notes: dict) -> Counter:
    """Writes the rows of `source` that pass to `target`, with the funnel and `notes` in the file's own metadata."""
    funnel: Counter = Counter()
    with common.atomic_path(target) as temporary:
        writer = None
        for batch in read_batches(source):
            kept = select(batch, rules, urls, source, funnel)
            kept = kept.rename_columns(canonical_names(kept.schema.names))
            if writer is None:
                writer = pq.ParquetWriter(temporary, kept.schema)
            writer.write_batch(kept)
        writer.add_key_value_metadata({"funnel": json.dumps(funnel), "notes": json.dumps(notes)})
        writer.close()
    return funnel


def finished(target: Path, notes: dict) -> Counter | None:
    """The funnel of a shard that was filtered before from the same input; None if it has to be done."""
    if not target.exists():
        return None
    metadata = pq.read_metadata(target).metadata
    same = json.loads(metadata.get(b"notes", b"null")) == notes
    return Counter(json.loads(metadata[b"funnel"])) if same else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--in", dest="inputs", required=True, help="folder or glob of parquet files")
    parser.add_argument("--out", required=True, help="folder of the filtered parquet files")
    parser.add_argument("--min_aesthetic", type=float, help="least aesthetic score, 0 to 10")
    parser.add_argument("--min_similarity", type=float, help="least CLIP similarity of picture and caption")
    parser.add_argument("--max_watermark", type=float, help="largest probability of a watermark")
    parser.add_argument("--max_unsafe", type=float, help="largest probability of NSFW content")
    parser.add_argument("--min_width", type=int, help="least width in pixels")
    parser.add_argument("--min_height", type=int, help="least height in pixels")
    parser.add_argument("--max_aspect", type=float, help="largest ratio of the longer to the shorter side")
    parser.add_argument("--min_caption", type=int, default=1, help="least characters of a caption; 0: no such rule")
    parser.add_argument("--max_caption", type=int, help="most characters of a caption")
    parser.add_argument("--drop_duplicate_urls", action="store_true", help="keep one row for each URL")
    parser.add_argument("--workers", type=int, default=1, help="threads that decode and compute")
    args = parser.parse_args()
    pa.set_cpu_count(max(args.workers, 1))

    rules = rules_of(args)
    sources = common.list_files(args.inputs, ".parquet")
    settings = {
        "rules": {r.reason: [r.column, *(x if np.isfinite(x) else None for x in (r.low, r.high))] for r in rules},
        "drop_duplicate_urls": args.drop_duplicate_urls,
    }
    out = Path(args.out)
    common.refuse_repeated_names(sources)
    common.claim_folder(out, "02_filter.py", settings)
    common.refuse_strangers(out, ".parquet", {source.name for source in sources})

    urls = common.SeenSet() if args.drop_duplicate_urls else None
    redone = False  # once a shard changed, which row of later shards is a duplicate may change too
    total: Counter = Counter()
    with common.progress(len(sources), "02_filter.py", "shard") as bar:
        for source in sources:
            target = out / source.name
            notes = {"input": common.fingerprint(source), **settings}
            funnel = None if redone and urls is not None else finished(target, notes)
            if funnel is None:
                redone = True
                funnel = filter_shard(source, target, rules, urls, notes)
            elif urls is not None:
                for batch in pq.ParquetFile(target).iter_batches(BATCH_ROWS, columns=["url"]):
                    urls.add(batch.column(0).to_pylist())
            total.update(funnel)
            bar.update()

    kept = total.pop("kept", 0)
    reasons = ["missing", *(rule.reason for rule in rules), *(["duplicate_url"] if urls is not None else [])]
    dropped = {reason: total[reason] for reason in reasons}
    manifest = {
        "script": "02_filter.py",
        "settings": settings,
        "complete": True,
        "shards": len(sources),
        "rows": kept + sum(dropped.values()),
        "dropped": dropped,
        "kept": kept,
    }
    common.write_manifest(out, manifest)
    left = manifest["rows"]
    print(f"{'rows':>16} {left:>12,}")
    for reason, count in dropped.items():
        left -= count
        print(f"{reason:>16} {-count:>12,} {left:>12,}")
    print(f"{'kept':>16} {kept:>12,}  ({kept / max(manifest['rows'], 1):.1%}): {out}")


if __name__ == "__main__":
    common.run_script(main)
