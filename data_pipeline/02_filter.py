"""Drops rows of metadata (parquet) that break a rule: scores, size, language, caption, blocklists, duplicates.

    python data_pipeline/02_filter.py --in 'data/laion/metadata/*.parquet' --out data/laion/filtered \\
        --for laion_broad --drop_duplicate_urls
    python data_pipeline/02_filter.py --in data/shapes/images --out data/shapes/filtered \\
        --min_aesthetic 6 --min_similarity 0.25 --max_watermark 0.5 --max_unsafe 0.5
    python data_pipeline/02_filter.py --in data/multi/metadata --out data/multi/filtered --for laion_hq \\
        --max_unsafe 0.5 --languages en,de --blocklist words.txt --block_domains domains.txt --drop_duplicate_content

Writes one parquet per input parquet, under the same name, and manifest.json with the funnel: rows read, dropped by
reason, kept; they add up. Columns are found under any of the names that LAION's releases use (sd/metadata.py) and
leave under one name (url, caption, width, height, similarity, aesthetic, pwatermark, punsafe); all others are kept as
they are. Rules apply in the order of the funnel, and the first that fails takes the row. --for takes the rules of a
phase (PHASES below); a flag that is given as well replaces the phase's value.

A rule that is not asked for needs no column; one that is, fails if a shard lacks its column, before anything is read. A
row with a null or NaN where a rule needs a value is dropped, as `missing`: a null caption is not the text "nan". A
limit is compared in the column's own precision: a float32 score of 0.7 passes --min_similarity 0.7.

A row is a duplicate if a row that is kept, before it in this or an earlier shard, has its URL (or its content hash).
Reads batch by batch: memory does not grow with the rows, but for 8 bytes a kept row and kind of duplicate. Run the same
command again to go on after a stop, or when shards were added. 10 million rows take about 20 s on one core.
"""

import argparse
import hashlib
import json
import re
import time
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import _path  # noqa: F401
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sd import usertext
from sd.cli import parser
from sd.errors import InputError, run
from sd.files import (
    atomic_path,
    claim_folder,
    counted,
    fail_empty,
    fingerprint,
    list_files,
    refuse_repeated_names,
    refuse_strangers,
    write_manifest,
)
from sd.hashes import Hashes, hash_texts
from sd.metadata import ALIASES, find_column, finished_counts
from sd.workers import check_workers, progress

BATCH_ROWS = 65_536
READ_BYTES = 1 << 20  # of a column at a time; without it a whole column of a row group would lie in memory

# The recipe's limits. It says "no watermark/NSFW" for laion_broad: 0.5 is what this project takes that to mean.
PHASES = {
    "laion_broad": {"min_aesthetic": 6.5, "min_similarity": 0.28, "min_width": 512, "min_height": 512,
                    "max_watermark": 0.5, "max_unsafe": 0.5},
    "laion_hq": {"min_aesthetic": 7.5, "min_similarity": 0.30, "watermark_below": 0.15},
}  # fmt: skip

FILTER_ALIASES = {  # beside those of sd/metadata.py; these columns keep their own names
    "language": ("language", "lang"),
    "content": ("sha256", "md5", "hash"),  # `hash` is LAION's own: of URL and caption
}


@dataclass(frozen=True)
class Rule:
    """Keeps rows whose `column` (a name of FILTER_ALIASES) lies within [low, high], or, with `below`, within
    [low, high). `reason` counts the dropped ones."""

    reason: str
    column: str
    low: float | None = None
    high: float | None = None
    below: bool = False

    def outside(self, values: np.ndarray) -> np.ndarray:
        """bool [rows]; NaN is not outside. Limits are rounded as the values were when they were stored."""
        out = np.zeros(len(values), bool)
        limit = values.dtype.type
        if self.low is not None:
            out |= values < limit(self.low)
        if self.high is not None:
            out |= values >= limit(self.high) if self.below else values > limit(self.high)
        return out


def rules_of(args: argparse.Namespace) -> list[Rule]:
    """The rules on numbers that the flags ask for, in the order of the funnel."""
    rules = [
        Rule("width", "width", low=args.min_width),
        Rule("height", "height", low=args.min_height),
        Rule("aspect", "aspect", high=args.max_aspect),
        Rule("aesthetic", "aesthetic", low=args.min_aesthetic),
        Rule("similarity", "similarity", low=args.min_similarity),
        Rule("watermark", "pwatermark", high=args.max_watermark),
        Rule("watermark", "pwatermark", high=args.watermark_below, below=True),
        Rule("unsafe", "punsafe", high=args.max_unsafe),
        Rule("caption_short", "caption", low=args.min_caption or None),
        Rule("caption_long", "caption", high=args.max_caption),
    ]
    return [rule for rule in rules if rule.low is not None or rule.high is not None]


@dataclass(frozen=True)
class Asked:
    """All that is asked for: rules on numbers, and the other rules (empty: not asked for)."""

    rules: list[Rule]
    languages: list[str]
    patterns: list[str]  # regular expressions of blocked words
    domains: list[str]
    duplicates: dict[str, str]  # reason -> column

    def columns(self) -> list[str]:
        """The columns that are needed, by their names of FILTER_ALIASES."""
        sides = [side for rule in self.rules if rule.column == "aspect" for side in ("width", "height")]
        plain = [rule.column for rule in self.rules if rule.column != "aspect"]
        texts = {"language": self.languages, "caption": self.patterns, "url": self.domains}
        names = sides + plain + [name for name, rule in texts.items() if rule] + list(self.duplicates.values())
        return list(dict.fromkeys(names))

    def reasons(self) -> list[str]:
        """The reasons of the funnel, in its order."""
        texts = {"language": self.languages, "blocked_word": self.patterns, "blocked_domain": self.domains}
        names = ["missing", *(rule.reason for rule in self.rules), *(r for r, rule in texts.items() if rule)]
        return list(dict.fromkeys([*names, *self.duplicates]))


# ---------------------------------------------------------------------------------------------------------------------
# Columns


def find(names: list[str], column: str) -> str | None:
    """Which of `names` is the column that this script calls `column`; None if there is none."""
    if column in ALIASES:
        return find_column(names, column)
    by_lower = {name.lower(): name for name in reversed(names)}
    return next((by_lower[alias] for alias in FILTER_ALIASES[column] if alias in by_lower), None)


def check_columns(source: Path, columns: list[str]) -> None:
    """Fails if a parquet file cannot be read, or lacks a column that a rule needs."""
    names = next(read_batches(source)).schema.names
    for column in columns:
        if find(names, column) is None:
            wanted = ", ".join((ALIASES | FILTER_ALIASES)[column])
            raise InputError(
                f"{source} has no column {column} (looked for {wanted}), which a rule needs: drop that rule's flag"
            )


def numbers(batch: pa.RecordBatch, column: str, shard: Path) -> np.ndarray:
    """The values a rule compares, [rows], NaN where missing: a score in its own precision, float64 else; the ratio of
    the longer to the shorter side for 'aspect', the number of characters for 'caption'."""
    if column == "aspect":
        sides = [numbers(batch, side, shard).astype(np.float64) for side in ("width", "height")]
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.maximum(*sides) / np.minimum(*sides)
    if column == "caption":
        lengths = pc.utf8_length(pc.utf8_trim_whitespace(texts(batch, column, shard)))
        return pc.cast(lengths, pa.float64()).to_numpy(zero_copy_only=False)
    name = find(batch.schema.names, column)
    values = batch.column(name)
    try:
        if not pa.types.is_floating(values.type):
            values = pc.cast(values, pa.float64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise InputError(
            f"{shard}: column {name} should hold numbers but holds {values.type}: drop the rule or convert it"
        ) from None
    return values.to_numpy(zero_copy_only=False)  # null becomes NaN


def texts(batch: pa.RecordBatch, column: str, shard: Path) -> pa.Array:
    """A column as text [rows], null where missing. Numbers are text in a column of content hashes only."""
    name = find(batch.schema.names, column)
    values, kind = batch.column(name), batch.column(name).type
    if pa.types.is_floating(kind) and np.isnan(values.to_numpy(zero_copy_only=False)).all():
        return pa.nulls(len(values), pa.large_string())  # how pandas writes a column of nulls
    plain = pa.types.is_null(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if plain or pa.types.is_dictionary(kind) or (column == "content" and pa.types.is_integer(kind)):
        return pc.cast(values, pa.large_string())
    raise InputError(f"{shard}: column {name} should hold text but holds {kind}: convert it")


# ---------------------------------------------------------------------------------------------------------------------
# Blocklists


def read_list(path: str | None) -> list[str]:
    """The lines of a text file that are not blank, without space around them; [] without a file."""
    if path is None:
        return []
    found = [line.strip() for line in usertext.user_lines(usertext.read_user_text(path)) if line.strip()]
    if not found:
        raise InputError(f"the list {path} has no entries: give a file with one entry a line, or drop its flag")
    return found


def word_patterns(words: list[str]) -> list[str]:
    """Regular expressions that find one of the words or phrases between characters that are not letters or digits.
    500 in each: beyond a few thousand RE2 leaves its fast path, 60 times slower."""
    edge = r"[^\pL\pM\pN]"
    escaped = [r"\s+".join(re.escape(part) for part in unicodedata.normalize("NFKC", w).split()) for w in words]
    chunks = [escaped[i : i + 500] for i in range(0, len(escaped), 500)]
    return [f"(?:^|{edge})(?:{'|'.join(chunk)})(?:{edge}|$)" for chunk in chunks]


def has_word(captions: pa.Array, patterns: list[str]) -> np.ndarray:
    """bool [rows]: whether a caption (not null) holds a blocked word, in whatever case or width of its letters."""
    captions = pc.utf8_normalize(captions, "NFKC")
    found = np.zeros(len(captions), bool)
    for pattern in patterns:
        found |= pc.match_substring_regex(captions, pattern, ignore_case=True).to_numpy(zero_copy_only=False)
    return found


def in_domain(urls: pa.Array, domains: list[str]) -> np.ndarray:
    """bool [rows]: whether the host of a URL (not null) is one of the domains, or below one."""
    host = r"^\s*(?:[A-Za-z][A-Za-z0-9+.-]*://|//)?(?:[^/?#\\]*@)?(?P<host>[^/?#\\:]*)"
    hosts = pc.struct_field(pc.extract_regex(urls, host), "host")
    hosts = pc.utf8_rtrim(pc.utf8_lower(hosts), ".")
    wanted = pa.array([domain.lower().strip(".") for domain in domains], pa.large_string())
    found = pc.is_in(hosts, wanted).to_numpy(zero_copy_only=False).copy()
    while pc.any(pc.match_substring(hosts, ".")).as_py():  # a.b.c, then b.c, then c
        hosts = pc.replace_substring_regex(hosts, r"^[^.]*\.?", "", max_replacements=1)
        found |= pc.is_in(hosts, wanted).to_numpy(zero_copy_only=False)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Duplicates


def find_duplicates(hashes: dict[str, np.ndarray], seen: dict[str, Hashes]) -> dict[str, np.ndarray]:
    """For each reason bool [rows]: which rows are duplicates of a kept row before them; the others are added to `seen`.

    A row has one reason at most. Rows that share a hash inside the batch are looked at one after the other.
    """
    rows = len(next(iter(hashes.values())))
    keep, shared = np.ones(rows, bool), np.zeros(rows, bool)
    for values in hashes.values():
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        shared |= counts[inverse] > 1
    old = {reason: seen[reason].contains(values) for reason, values in hashes.items()}
    dropped = {}
    for reason in hashes:
        dropped[reason] = keep & old[reason] & ~shared
        keep &= ~dropped[reason]
    taken: dict[str, set] = {reason: set() for reason in hashes}
    for row in np.flatnonzero(shared):
        same = next((r for r in hashes if old[r][row] or hashes[r][row] in taken[r]), None)
        if same is None:
            for reason in hashes:
                taken[reason].add(hashes[reason][row])
        else:
            keep[row], dropped[same][row] = False, True
    for reason, values in hashes.items():
        seen[reason].add(values[keep])
    return dropped


# ---------------------------------------------------------------------------------------------------------------------
# Filtering


class Dropper:
    """The rows of one batch that are still in, and the funnel that counts those that are not."""

    def __init__(self, batch: pa.RecordBatch, funnel: Counter):
        self.batch, self.funnel = batch, funnel

    def drop(self, reason: str, rows: np.ndarray) -> None:
        """Drops the rows (bool) for a reason."""
        count = int(rows.sum())
        if count:
            self.funnel[reason] += count
            self.batch = self.batch.filter(pa.array(~rows))

    def texts(self, column: str, shard: Path) -> pa.Array:
        """A column as text, after rows without one were dropped."""
        values = texts(self.batch, column, shard)
        if values.null_count:
            self.drop("missing", values.is_null().to_numpy(zero_copy_only=False))
            values = values.drop_null()
        return values


def select(batch: pa.RecordBatch, asked: Asked, seen: dict, shard: Path, funnel: Counter) -> pa.RecordBatch:
    """The rows that pass all rules; counts all rows of the batch in the funnel. Adds to `seen` (reason -> Hashes)."""
    left = Dropper(batch, funnel)
    try:
        drop_numbers(left, asked.rules, shard)
        if asked.languages:
            known = pc.is_in(pc.utf8_lower(left.texts("language", shard)), pa.array(asked.languages, pa.large_string()))
            left.drop("language", ~known.to_numpy(zero_copy_only=False))
        if asked.patterns:
            left.drop("blocked_word", has_word(left.texts("caption", shard), asked.patterns))
        if asked.domains:
            left.drop("blocked_domain", in_domain(left.texts("url", shard), asked.domains))
    except pa.ArrowInvalid as error:
        raise InputError(f"{shard} holds text that is not UTF-8 ({error}): convert it") from None
    for column in asked.duplicates.values():
        left.texts(column, shard)
    hashes = {reason: content_hash(left, column, shard) for reason, column in asked.duplicates.items()}
    if hashes:
        dropped = find_duplicates(hashes, seen)
        funnel.update({reason: int(rows.sum()) for reason, rows in dropped.items()})
        left.batch = left.batch.filter(pa.array(~np.logical_or.reduce(list(dropped.values()))))
    funnel["kept"] += len(left.batch)
    return left.batch


def drop_numbers(left: Dropper, rules: list[Rule], shard: Path) -> None:
    """Applies the rules on numbers. All but the caption's see the whole batch: copying it costs more than comparing."""
    for group in ([r for r in rules if r.column != "caption"], [r for r in rules if r.column == "caption"]):
        keep = np.ones(len(left.batch), bool)
        cache: dict[str, np.ndarray] = {}
        for rule in group:
            if rule.column not in cache:
                cache[rule.column] = numbers(left.batch, rule.column, shard)
            values = cache[rule.column]
            missing = keep & np.isnan(values)
            outside = keep & rule.outside(values)
            left.funnel["missing"] += int(missing.sum())
            left.funnel[rule.reason] += int(outside.sum())
            keep &= ~(missing | outside)
        left.batch = left.batch.filter(pa.array(keep))


def content_hash(left: Dropper, column: str, shard: Path) -> np.ndarray:
    """hash_texts of a column without nulls; hexadecimal digits of a content hash in either case are the same."""
    values = texts(left.batch, column, shard)
    return hash_texts(pc.ascii_lower(values) if column == "content" else values)


def renamed(batch: pa.RecordBatch) -> pa.RecordBatch:
    """A batch whose columns of ALIASES (sd/metadata.py) have their own names; where such a name is taken, it stays."""
    names = list(batch.schema.names)
    for canonical in ALIASES:
        name = find_column(names, canonical)
        if name is not None and canonical not in names:
            names[names.index(name)] = canonical
    return batch.rename_columns(names)


def read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Batches of a parquet file; the first one (perhaps without rows) is there even if the file has no rows."""
    try:
        with pq.ParquetFile(path, buffer_size=READ_BYTES) as file:
            yield pa.RecordBatch.from_pylist([], schema=file.schema_arrow)
            yield from file.iter_batches(BATCH_ROWS)
    except (pa.ArrowInvalid, pa.ArrowSerializationError, OSError) as error:
        raise InputError(
            f"cannot read {path} as parquet ({str(error).splitlines()[0]}): get it again, or remove it"
        ) from None


def filter_shard(source: Path, target: Path, asked: Asked, seen: dict, notes: dict) -> Counter:
    """Writes the rows of `source` that pass to `target`, with the funnel and `notes` in the file's own metadata."""
    funnel: Counter = Counter()
    with atomic_path(target) as temporary:
        with pq.ParquetWriter(temporary, renamed(next(read_batches(source))).schema) as writer:
            waiting: list[pa.RecordBatch] = []  # few rows of a batch may pass, and row groups should not be tiny
            for batch in read_batches(source):
                waiting.append(renamed(select(batch, asked, seen, source, funnel)))
                if sum(map(len, waiting)) >= BATCH_ROWS:
                    writer.write_table(pa.Table.from_batches(waiting))
                    waiting = []
            if waiting:
                writer.write_table(pa.Table.from_batches(waiting))
            writer.add_key_value_metadata({"funnel": json.dumps(funnel), "notes": json.dumps(notes)})
    return funnel


def remember(target: Path, asked: Asked, seen: dict) -> None:
    """Adds the rows that an earlier run kept to `seen`."""
    for batch in read_batches(target):
        for reason, column in asked.duplicates.items():
            seen[reason].add(content_hash(Dropper(batch, Counter()), column, target))


def digest(entries: list[str]) -> str:
    """What stands for a long list in the settings."""
    return hashlib.sha256("\n".join(entries).encode()).hexdigest()[:16]


def parse_args() -> argparse.Namespace:
    of_phases = {name for rules in PHASES.values() for name in rules}
    p = parser(__doc__, dict.fromkeys(of_phases, "the phase's, else no such rule"))
    g = p.add_argument_group("input and output")
    g.add_argument("--in", dest="inputs", required=True, help="folder or glob of parquet files")
    g.add_argument("--out", required=True, help="folder of the filtered parquet files")
    g.add_argument("--workers", type=int, default=1, help="threads that decode and compute")

    g = p.add_argument_group("rules")
    g.add_argument("--for", dest="phase", choices=PHASES, help="the rules of a phase; a flag that is given "
                   "replaces its value (default: none)")  # fmt: skip
    g.add_argument("--min_aesthetic", type=float, help="least aesthetic score, 0 to 10")
    g.add_argument("--min_similarity", type=float, help="least CLIP similarity of picture and caption")
    g.add_argument("--max_watermark", type=float, help="largest probability of a watermark")
    g.add_argument("--watermark_below", type=float, help="the same, but this value itself is dropped")
    g.add_argument("--max_unsafe", type=float, help="largest probability of NSFW content")
    g.add_argument("--min_width", type=int, help="least width in pixels")
    g.add_argument("--min_height", type=int, help="least height in pixels")
    g.add_argument("--max_aspect", type=float, help="largest ratio of the longer to the shorter side (default: any)")
    g.add_argument("--min_caption", type=int, default=1, help="least characters of a caption; 0: no such rule")
    g.add_argument("--max_caption", type=int, help="most characters of a caption (default: any)")
    g.add_argument("--languages", help="keep rows whose language is one of these, e.g. en,de (default: any)")
    g.add_argument("--blocklist", metavar="FILE", help="a word or phrase a line; captions that hold one are dropped "
                   "(default: none)")  # fmt: skip
    g.add_argument("--block_domains", metavar="FILE", help="a domain a line; URLs on it or below it are dropped "
                   "(default: none)")  # fmt: skip
    g.add_argument("--drop_duplicate_urls", action="store_true", help="keep one row for each URL")
    g.add_argument("--drop_duplicate_content", action="store_true", help="keep one row for each sha256, md5 or hash")
    args = p.parse_args()
    for name, value in PHASES.get(args.phase, {}).items():
        replaced = name == "watermark_below" and args.max_watermark is not None
        replaced = replaced or (name == "max_watermark" and args.watermark_below is not None)
        if getattr(args, name) is None and not replaced:
            setattr(args, name, value)
    return args


def settings_of(args: argparse.Namespace, asked: Asked) -> dict:
    """What the outputs depend on, for the manifest; rules that are not asked for do not appear."""
    rules: dict[str, list] = {}
    for rule in asked.rules:
        rules[rule.reason + "_below" * rule.below] = [rule.column, rule.low, rule.high]
    others = {
        "languages": asked.languages,
        "blocklist": digest(asked.patterns) if asked.patterns else None,
        "block_domains": digest(asked.domains) if asked.domains else None,
        "drop_duplicate_content": args.drop_duplicate_content,
    }
    others = {name: value for name, value in others.items() if value}
    return {"rules": rules, "drop_duplicate_urls": args.drop_duplicate_urls, **others}


def main() -> None:
    args = parse_args()
    check_workers(args.workers)
    pa.set_cpu_count(max(args.workers, 1))
    duplicates = {"duplicate_url": args.drop_duplicate_urls and "url"}
    duplicates["duplicate_content"] = args.drop_duplicate_content and "content"
    asked = Asked(
        rules=rules_of(args),
        languages=sorted({part.strip().lower() for part in (args.languages or "").split(",") if part.strip()}),
        patterns=word_patterns(read_list(args.blocklist)),
        domains=read_list(args.block_domains),
        duplicates={reason: column for reason, column in duplicates.items() if column},
    )
    settings = settings_of(args, asked)
    sources = list_files(args.inputs, ".parquet")
    out = Path(args.out)
    refuse_repeated_names(sources)
    claim_folder(out, "02_filter.py", settings)  # free again until a shard is written
    refuse_strangers(out, ".parquet", {source.name for source in sources})
    for source in sources:
        check_columns(source, asked.columns())

    seen = {reason: Hashes() for reason in asked.duplicates}
    redone = False  # once a shard changed, which row of later shards is a duplicate may change too
    total: Counter = Counter()
    start, read = time.perf_counter(), 0
    with progress(len(sources), "02_filter.py", "shard") as bar:
        for source in sources:
            target = out / source.name
            notes = {"input": fingerprint(source), **settings}
            funnel = None if redone and seen else finished_counts(target, notes, "funnel")
            if funnel is None:
                redone = True
                funnel = filter_shard(source, target, asked, seen, notes)
                read += funnel.total()
            elif seen:
                remember(target, asked, seen)
            total.update(funnel)
            bar.update()
    seconds = time.perf_counter() - start

    kept = total.pop("kept", 0)
    dropped = {reason: total[reason] for reason in asked.reasons()}
    manifest = {
        "script": "02_filter.py",
        "settings": settings,
        "complete": True,
        "shards": len(sources),
        "rows": kept + sum(dropped.values()),
        "dropped": dropped,
        "kept": kept,
    }
    if kept:
        write_manifest(out, manifest)
    left = manifest["rows"]
    print(f"{'rows':>17} {left:>12,}")
    for reason, count in dropped.items():
        left -= count
        print(f"{reason:>17} {-count:>12,} {left:>12,}")
    print(f"{'kept':>17} {kept:>12,}  ({kept / max(manifest['rows'], 1):.1%}): {out}")
    if not kept:
        made = [out / source.name for source in sources]
        reasons = counted(dropped)
        fail_empty(out, manifest, made, f"no row of {args.inputs} is left ({reasons}): relax the rules")
    if read:
        print(f"{read:,} rows now, {read / seconds:,.0f} rows/s")


if __name__ == "__main__":
    run(main)
