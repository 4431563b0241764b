"""Image shards (tars) to token batches (parquet): image key, token ids, caption, and what is known of the picture.

    python data_pipeline/04_tokenise.py --in data/shapes/images --out data/shapes/tokens \\
        --tokenizer data/shapes/tokenizer --keep data/shapes/filtered
    python data_pipeline/04_tokenise.py --in data/laion/images --out data/laion/tokens \\
        --tokenizer openai/clip-vit-large-patch14 --workers 16

Writes 00000.parquet for 00000.tar, and manifest.json. Columns: image_key (<source>/<shard>/<key>), input_ids (L int32:
start, text, end, padding; longer text is cut and still ends with the end token), caption, and url, width, height,
similarity, aesthetic, pwatermark, punsafe, sha256 where the metadata has them. Where a picture's JSON has `captions`, a
list of texts, they follow its caption, each once, as more_captions and more_input_ids, and a text `split` is kept too:
files in which no picture has these lack the columns. --keep takes what 02_filter.py wrote:
rows are matched by shard and key where it has a `key` column, else by URL. The source is the name of the folder above
`images`, or --source. Captions are UTF-8 (or UTF-16 with its mark), or in --caption_encoding. Left out and counted by
reason: not_kept, empty_caption, caption_encoding, no_image, and what is wrong with a tar (cut_tar, hidden, ...). Run
the same command again to go on after a stop, or when shards were added.
"""

import functools
import json
import time
from collections import Counter
from pathlib import Path

import _path  # noqa: F401
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers

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
    read_json,
    refuse_repeated_names,
    refuse_strangers,
    write_manifest,
)
from sd.metadata import find_column, finished_counts, metadata_value
from sd.pictures import Reject
from sd.shards import caption_of, image_key, iter_samples, list_shards, source_of
from sd.text import (
    add_encoding_argument,
    clean_text,
    fast_tokenizer,
    load_tokenizer,
    text_length,
    tokenize,
    tokenizer_hash,
)
from sd.workers import check_workers, parallel, progress

BATCH_CAPTIONS = 4096
METADATA = {
    "url": pa.string(),
    "width": pa.int32(),
    "height": pa.int32(),
    "similarity": pa.float32(),
    "aesthetic": pa.float32(),
    "pwatermark": pa.float32(),
    "punsafe": pa.float32(),
    "sha256": pa.string(),
    "split": pa.string(),
}
IF_ANY = ("split", "more_captions", "more_input_ids")  # columns of those files alone in which a row has a value


@functools.lru_cache(maxsize=1)
def encoder_of(path: str, fast: str, max_length: int):
    """A function from captions to ids int32 [N, L] and to how many captions were cut. The tokenizer is loaded once a
    process: from `fast`, what fast_tokenizer gave of it, and only where that is '' from its path, with transformers."""
    if not fast:
        tokenizer = load_tokenizer(path, max_length)

        def encode(captions: list[str]) -> tuple[np.ndarray, int]:
            ids, length = tokenize(tokenizer, captions), text_length(tokenizer)
            return ids, sum(len(row) > length for row in tokenizer(captions, verbose=False)["input_ids"])

        return encode
    tokenizer = tokenizers.Tokenizer.from_str(fast)

    def encode(captions: list[str]) -> tuple[np.ndarray, int]:
        encodings = tokenizer.encode_batch_fast(captions)
        return np.array([e.ids for e in encodings], np.int32), sum(bool(e.overflowing) for e in encodings)

    return encode


def kept_keys(path: Path) -> set[str] | None:
    """The keys of a filtered parquet file; None if it has no column of keys."""
    if not path.exists():
        raise InputError(f"--keep has no {path.name} in {path.parent}: run 02_filter.py on all shards of --in first")
    if find_column(pq.read_schema(path).names, "key") is None:
        return None
    return set(pq.read_table(path, columns=["key"]).column(0).to_pylist())


@functools.lru_cache(maxsize=1)
def kept_urls(folder: Path) -> set[str]:
    """The URLs of all filtered parquet files of a folder, read once a process."""
    urls: set[str] = set()
    for path in sorted(folder.glob("*.parquet")):
        if find_column(pq.read_schema(path).names, "url") != "url":
            raise InputError(f"{path} has neither a column key nor url: give --keep a folder that 02_filter.py wrote")
        urls.update(pq.read_table(path, columns=["url"]).column(0).to_pylist())
    return urls


def keep_by_key(folder: Path) -> bool:
    """Whether a filtered folder names pictures by key (it was made from the parquet beside the tars), or by URL."""
    files = list_files(str(folder), ".parquet")
    if (folder / "manifest.json").exists() and not read_json(folder / "manifest.json")["complete"]:
        raise InputError(f"{folder} is not finished: run the 02_filter.py command that made it again")
    return find_column(pq.read_schema(files[0]).names, "key") is not None


def metadata_row(metadata: dict) -> dict:
    """The columns of METADATA from a sample's JSON; None where it has none or one of another type."""
    row = {}
    for name, kind in METADATA.items():
        value = metadata.get(name) if name in ("sha256", "split") else metadata_value(metadata, name)
        if pa.types.is_string(kind):
            row[name] = clean_text(value) if isinstance(value, str) else None
        else:
            usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 2**31
            row[name] = (int(value) if pa.types.is_integer(kind) else float(value)) if usable else None
    return row


def captions_or_reason(sample: dict, counts: Counter) -> list[str]:
    """A sample's captions, each once: its caption, then the texts of the list `captions` in its JSON. Empty if there is
    none that can be read, for which the reason is counted."""
    try:
        caption = caption_of(sample)
    except Reject as reject:
        counts[reject.reason] += 1
        return []
    listed = sample["json"].get("captions")
    texts = [clean_text(text).strip() for text in listed if isinstance(text, str)] if isinstance(listed, list) else []
    captions = [text for text in dict.fromkeys([caption, *texts]) if text]
    if not captions:
        counts["empty_caption"] += 1
    return captions


def tokenise_shard(
    tar: Path,
    target: Path,
    tokenizer_path: str,
    fast: str,
    padding: int,
    ends_with_padding: bool,
    source: str,
    keep: Path | None,
    by_key: bool,
    notes: dict,
    encoding: str | None = None,
) -> Counter:
    """Writes one parquet; returns the counts: rows, more_captions (if any), tokens (without padding), truncated, and
    what was left out. padding: its id, which is also that of a text's end where ends_with_padding."""
    length = notes["max_length"]
    encode = encoder_of(tokenizer_path, fast, length)
    keys = kept_keys(keep / f"{tar.stem}.parquet") if keep and by_key else None
    urls = kept_urls(keep) if keep and not by_key else None
    ids_type = pa.list_(pa.int32(), length)
    schema = pa.schema(
        {"image_key": pa.string(), "input_ids": ids_type, "caption": pa.string(), **METADATA}
        | {"more_captions": pa.list_(pa.string()), "more_input_ids": pa.list_(ids_type)}
    )
    counts, rejects = Counter(), Counter()

    def batch_of(rows: list[dict]) -> pa.RecordBatch:
        captions = [caption for row in rows for caption in row["captions"]]
        ids, truncated = encode(captions)
        counts.update(rows=len(rows), truncated=truncated)
        if len(captions) > len(rows):
            counts["more_captions"] += len(captions) - len(rows)
        counts["tokens"] += int((ids != padding).sum())
        if ends_with_padding:  # the end of each text counts, the padding after it does not
            counts["tokens"] += len(captions)
        more = np.array([len(row["captions"]) - 1 for row in rows])
        first = np.zeros(len(captions), bool)
        first[np.cumsum(more + 1) - more - 1] = True
        offsets = pa.array(np.concatenate([[0], np.cumsum(more)]), pa.int32())
        columns = {name: pa.array([row[name] for row in rows], kind) for name, kind in METADATA.items()}
        columns["image_key"] = pa.array([row["image_key"] for row in rows], pa.string())
        columns["caption"] = pa.array([row["captions"][0] for row in rows], pa.string())
        columns["input_ids"] = pa.FixedSizeListArray.from_arrays(pa.array(ids[first].reshape(-1)), type=ids_type)
        further = pa.array([caption for row in rows for caption in row["captions"][1:]], pa.string())
        columns["more_captions"] = pa.ListArray.from_arrays(offsets, further)
        further = pa.FixedSizeListArray.from_arrays(pa.array(ids[~first].reshape(-1)), type=ids_type)
        columns["more_input_ids"] = pa.ListArray.from_arrays(offsets, further)
        return pa.record_batch([columns[name] for name in schema.names], schema=schema)

    batches: list[pa.RecordBatch] = []
    rows: list[dict] = []
    for key, sample in iter_samples(tar, rejects, images=False, encoding=encoding):
        if sample["ext"] is None:
            counts["no_image"] += 1
        elif keys is not None and key not in keys:
            counts["not_kept"] += 1
        elif urls is not None and metadata_value(sample["json"], "url") not in urls:
            counts["not_kept"] += 1
        elif captions := captions_or_reason(sample, counts):
            name = image_key(source, tar.stem, key)
            rows.append({"image_key": name, "captions": captions, **metadata_row(sample["json"])})
        if len(rows) == BATCH_CAPTIONS:
            batches.append(batch_of(rows))
            rows = []
    if rows:
        batches.append(batch_of(rows))
    counts.update(rejects)
    used = [name for name in schema.names if name not in IF_ANY or any(map(has_value, (b[name] for b in batches)))]
    with atomic_path(target) as temporary:
        with pq.ParquetWriter(temporary, pa.schema([schema.field(name) for name in used])) as writer:
            for batch in batches:
                writer.write_batch(batch.select(used))
            writer.add_key_value_metadata({"counts": json.dumps(counts), "notes": json.dumps(notes)})
    return counts


def has_value(column: pa.Array) -> bool:
    """Whether a row of a column has a text, or a list with something in it."""
    return bool(len(column.flatten()) if pa.types.is_list(column.type) else column.null_count < len(column))


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("input and output")
    g.add_argument("--in", dest="images", required=True, help="folder or glob of tars")
    g.add_argument("--out", required=True, help="folder of the token batches")
    g.add_argument("--keep", type=Path, help="folder that 02_filter.py wrote (default: keep all)")
    g.add_argument("--source", help="name of the source (default: the folder above `images`)")

    g = p.add_argument_group("captions")
    g.add_argument("--tokenizer", default="openai/clip-vit-large-patch14", help="folder or hub name")
    g.add_argument("--max_length", type=int, metavar="N", help="ids of a caption, start and end included; the rest is "
                   "cut off (default: as many as the tokenizer takes, at most 77)")  # fmt: skip
    add_encoding_argument(g)

    g = p.add_argument_group("running")
    g.add_argument("--workers", type=int, default=1, help="processes")
    args = p.parse_args()
    usertext.check_encoding(args.caption_encoding)
    check_workers(args.workers)

    tars = list_shards(args.images)
    refuse_repeated_names(tars)
    sources = {args.source or source_of(tar) for tar in tars}
    if len(sources) > 1:
        raise InputError(
            f"the tars belong to several sources ({', '.join(sorted(sources))}): run once for each, or --source"
        )
    source = sources.pop()
    tokenizer = load_tokenizer(args.tokenizer, args.max_length)
    by_key = keep_by_key(args.keep) if args.keep else False
    settings = {
        "source": source,
        "tokenizer_hash": tokenizer_hash(tokenizer),
        "max_length": text_length(tokenizer),
        "vocab_size": len(tokenizer),
        "keep": str(args.keep) if args.keep else None,
    }
    if args.caption_encoding:
        settings["caption_encoding"] = args.caption_encoding
    out = Path(args.out)
    targets = {tar: out / f"{tar.stem}.parquet" for tar in tars}
    claim_folder(out, "04_tokenise.py", settings)
    refuse_strangers(out, ".parquet", {target.name for target in targets.values()})

    all_kept = sorted(args.keep.glob("*.parquet")) if args.keep else []
    padding, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    how = args.tokenizer, fast_tokenizer(tokenizer), padding, padding == end
    jobs, total = [], Counter()
    for tar, target in targets.items():
        kept = [path for path in all_kept if path.stem == tar.stem] if by_key else all_kept
        notes = {"input": fingerprint(tar, *kept), **settings}
        counts = finished_counts(target, notes, "counts")
        if counts is None:
            jobs.append((tar, target, *how, source, args.keep, by_key, notes, args.caption_encoding))
        else:
            total.update(counts)
    start, tokens, captions = time.perf_counter(), 0, 0
    with progress(len(jobs), "04_tokenise.py", "shard") as bar:
        for counts in parallel(tokenise_shard, jobs, args.workers):
            total.update(counts)
            tokens, captions = tokens + counts["tokens"], captions + counts["rows"] + counts["more_captions"]
            bar.set_postfix_str(f"{tokens / (time.perf_counter() - start):,.0f} tokens/s", refresh=False)
            bar.update()
    seconds = time.perf_counter() - start

    rows, tokens_in_all, truncated = (total.pop(name, 0) for name in ("rows", "tokens", "truncated"))
    captions_in_all = rows + total.pop("more_captions", 0)
    manifest = {
        "script": "04_tokenise.py",
        "settings": settings,
        "complete": True,
        **{name: settings[name] for name in ("source", "tokenizer_hash", "max_length", "vocab_size")},
        "shards": {target.name: pq.read_metadata(target).num_rows for target in targets.values()},
        "rows": rows,
        **({"captions": captions_in_all} if captions_in_all > rows else {}),
        "tokens": tokens_in_all,
        "truncated": truncated,
        "left_out": {reason: count for reason, count in sorted(total.items()) if count},
    }
    if not rows:
        message = f"no caption came of {args.images} (left out: {counted(total)}): "
        message += "each picture wants a caption, as key.txt, key.caption or in key.json"
        fail_empty(out, manifest, targets.values(), message)
    write_manifest(out, manifest)
    if jobs:
        print(f"{captions:,} captions now, {tokens / seconds:,.0f} tokens/s, {captions / seconds:,.0f} captions/s")
    cut = f"{truncated / captions_in_all:.2%} cut at {settings['max_length']} ids"
    print(f"{captions_in_all:,} captions of {source}, {cut}: {out}")
    print(f"left out: {counted(total)}")
    if unreadable := total["caption_encoding"]:
        print(f"note: {unreadable:,} captions are not UTF-8: name their encoding with {usertext.FLAG} NAME")


if __name__ == "__main__":
    run(main)
