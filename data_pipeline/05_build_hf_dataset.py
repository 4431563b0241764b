"""Token batches (parquet) to the Arrow dataset that training reads, with a train and a val split.

    python data_pipeline/05_build_hf_dataset.py --in data/shapes/tokens --out data/shapes/dataset --val_fraction 0.02
    python data_pipeline/05_build_hf_dataset.py --in data/diffusiondb/tokens data/journeydb/tokens \\
        --out data/synthetic/dataset
    python data_pipeline/05_build_hf_dataset.py --in data/emoji/tokens --out data/emoji/dataset --split_column

The folder opens with `datasets.load_from_disk` of the Hugging Face library, though pyarrow alone writes it:
dataset_dict.json; train/ and val/ with state.json, dataset_info.json and data-00000-of-00001.arrow, ... (streams); and
manifest.json (counts, tokenizer hash, length, vocabulary). Columns: image_key (string), input_ids (L int32), caption
(string); and where a picture has several captions, more_captions and more_input_ids (lists, which do not hold the
first). Whether a row is in val depends on the row alone, so that a row never changes sides as data grow: by default on
the hash of its image key, where a larger --val_fraction moves rows from train to val only. One exception: of a source
of two or more rows of which none would be held out, the row whose key has the lowest hash is, until data that come
later bring another. With --val_list the rows that it names are held out, and with --split_column those that say so
themselves; the hash then decides for no row (--val_list), or for those alone that say nothing (--split_column alone).
Built in a temporary folder and renamed; if the token batches have changed since, it is built anew, else the script says
that it is done.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import _path  # noqa: F401
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sd.cli import parser
from sd.errors import InputError, reading, run
from sd.files import make_folder, read_json, replace_folder, sha256, write_manifest
from sd.hashes import Hashes, hash_texts
from sd.shards import key_fraction
from sd.usertext import read_user_text, user_lines
from sd.workers import progress

BATCH_ROWS = 1000  # rows a record batch
READ_ROWS = 50_000
MORE = ("more_captions", "more_input_ids")
AGAIN = "run 04_tokenise.py again"
IN_TRAIN, IN_VAL = ("train",), ("val", "valid", "validation", "test", "held_out")  # what a --split_column may say


def read_manifests(folders: list[Path]) -> list[dict]:
    """The manifests of token folders; fails if one is unfinished or if they come from different tokenizers."""
    manifests = []
    for folder in folders:
        if not (folder / "manifest.json").exists():
            raise InputError(f"{folder} has no manifest.json: give a folder that 04_tokenise.py wrote")
        manifest = read_json(folder / "manifest.json")
        if manifest.get("script") != "04_tokenise.py":
            raise InputError(
                f"{folder} was written by {manifest.get('script')}: give a folder that 04_tokenise.py wrote"
            )
        if manifest.get("complete") is not True:
            raise InputError(f"{folder} is not finished: run the 04_tokenise.py command that made it again")
        kinds = {
            "tokenizer_hash": str,
            "max_length": int,
            "vocab_size": int,
            "source": str,
            "rows": int,
            "shards": dict,
        }
        for name, kind in kinds.items():
            if type(value := manifest.get(name)) is not kind:
                raise InputError(
                    f"{folder / 'manifest.json'} wants {kind.__name__} for {name}, found {str(value)[:80]}: {AGAIN}"
                )
        for name in ("tokenizer_hash", "max_length"):
            if manifests and manifest[name] != manifests[0][name]:
                raise InputError(
                    f"{folders[0]} and {folder} have different tokenizers ({name} {manifests[0][name]} and "
                    f"{manifest[name]}): tokenise both with the same --tokenizer"
                )
        for shard, rows in manifest["shards"].items():
            path = folder / shard
            with reading(path, AGAIN):
                found = pq.read_metadata(path).num_rows
            if found != rows:
                raise InputError(f"{path} does not have the {rows} rows of its manifest: run 04_tokenise.py again")
        manifests.append(manifest)
    return manifests


def read_batches(
    path: Path, schema: pa.Schema, count: int = READ_ROWS, split_column: str | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a token file, `count` at a time, as batches of `schema`; fails in one sentence where it has other
    columns, or nulls. A file without the columns of further captions has none of these. split_column: one more column
    of texts, which may be null or absent."""
    names = [*schema.names, *([split_column] if split_column else [])]
    with reading(path, AGAIN):
        file = pq.ParquetFile(path)
        known = [name for name in names if name in file.schema_arrow.names or name not in (*MORE, split_column)]
        batches = file.iter_batches(count, columns=known)
    while True:
        with reading(path, AGAIN):
            if (batch := next(batches, None)) is None:
                return
            columns = []
            for name in names:
                kind = schema.field(name).type if name in schema.names else pa.string()
                if name in known:
                    columns.append(batch.column(name).cast(kind))
                else:
                    columns.append(pa.array([[] if name in MORE else None] * len(batch), kind))
            batch = pa.record_batch(columns, names)
            if empty := [name for name in schema.names if batch.column(name).null_count]:
                raise ValueError(f"its column {empty[0]} has nulls")
        yield batch


def read_rows(
    folders: list[Path], manifests: list[dict], schema: pa.Schema, split_column: str | None
) -> Iterator[tuple[pa.RecordBatch, list[bool | None]]]:
    """All rows of all token folders, in order, as batches of `schema`, and which side each row names in split_column
    (see said); fails at a repeated image key."""
    keys = Hashes()
    for folder, manifest in zip(folders, manifests, strict=True):
        for shard in manifest["shards"]:
            for batch in read_batches(folder / shard, schema, split_column=split_column):
                names = batch.column("image_key")
                new = keys.add_new(hash_texts(names.cast(pa.large_string())))
                if not new.all():
                    name = names[int(np.flatnonzero(~new)[0])].as_py()
                    raise InputError(
                        f"{folder / shard} repeats the image key {name}: give each source its own --source in 04"
                    )
                yield batch.select(schema.names).replace_schema_metadata(schema.metadata), said(batch, split_column)


def said(batch: pa.RecordBatch, split_column: str | None) -> list[bool | None]:
    """Of each row whether its split_column says that it is held out; None where it says nothing."""
    if split_column is None:
        return [None] * len(batch)
    sides = {None: None, "": None, **dict.fromkeys(IN_TRAIN, False), **dict.fromkeys(IN_VAL, True)}
    texts = [text and text.strip().lower() for text in batch.column(split_column).to_pylist()]
    if odd := [i for i, text in enumerate(texts) if text not in sides]:
        raise InputError(
            f"{split_column} of {batch.column('image_key')[odd[0]]} is {texts[odd[0]][:40]!r}: --split_column wants "
            f"{IN_TRAIN[0]}, or {', '.join(IN_VAL[:-1])} or {IN_VAL[-1]} for rows held out"
        )
    return [sides[text] for text in texts]


class Sides:
    """Which rows are held out: those that --val_list names; else those whose --split_column says so; else, without
    --val_list, those whose key has a hash below val_fraction, and `also`."""

    def __init__(self, val_fraction: float, listed: set[str] | None, also: set[str]):
        self.val_fraction, self.listed, self.also = val_fraction, listed, also
        self.found: set[str] = set()  # lines of the list that name a row
        self.told = 0  # rows whose column says something
        self.by = dict.fromkeys(("--val_list", "--split_column", "hash"), 0)  # rows held out

    def in_val(self, keys: list[str], told: list[bool | None]) -> np.ndarray:
        """bool [N] of N rows, for their image keys and what `said` gives for them."""
        held_out = []
        for key, side in zip(keys, told, strict=True):
            names = {key, key.split("/", 2)[-1]} & self.listed if self.listed is not None else set()
            self.found |= names
            self.told += side is not None
            by = "--val_list" if names else "--split_column" if side else ""
            if side is None and self.listed is None and (key_fraction(key) < self.val_fraction or key in self.also):
                by = "hash"
            if by:
                self.by[by] += 1
            held_out.append(bool(by))
        return np.array(held_out, bool)


def read_list(path: Path) -> set[str]:
    """The lines of --val_list: image keys, or what follows <source>/<shard>/ in them."""
    lines = {line.strip() for line in user_lines(read_user_text(path))} - {""}
    if not lines:
        raise InputError(f"--val_list {path} names no row: give an image key, or its last part, on each line")
    return lines


def held_out_keys(
    folders: list[Path], manifests: list[dict], val_fraction: float, split_column: str | None
) -> set[str]:
    """Keys that go to val though their fraction is not below val_fraction: of each source of two or more rows that
    would otherwise have no row in val, the key of lowest fraction. Reads no further than to a row that is in val, or
    whose split_column says on which side it is."""
    held_out = set()
    for source in dict.fromkeys(manifest["source"] for manifest in manifests if val_fraction > 0):
        lowest, rows = (1.0, ""), 0
        for keys, told in read_keys(source, folders, manifests, split_column):
            rows += len(keys)
            lowest = min([lowest, *((key_fraction(key), key) for key in keys)])
            if lowest[0] < val_fraction or any(side is not None for side in told):
                break
        else:
            if rows > 1:
                held_out.add(lowest[1])
    return held_out


def read_keys(
    source: str, folders: list[Path], manifests: list[dict], split_column: str | None
) -> Iterator[tuple[list[str], list[bool | None]]]:
    """The image keys of one source, and what `said` gives for them, some at a time."""
    schema = pa.schema({"image_key": pa.string()})
    for folder, manifest in zip(folders, manifests, strict=True):
        for shard in manifest["shards"] if manifest["source"] == source else ():
            for batch in read_batches(folder / shard, schema, BATCH_ROWS, split_column):
                yield batch.column("image_key").to_pylist(), said(batch, split_column)


class SplitWriter:
    """Writes one split as Arrow stream files of at most `file_rows` rows, then the JSON files beside them."""

    def __init__(self, folder: Path, schema: pa.Schema, file_rows: int):
        self.folder, self.schema, self.file_rows = folder, schema, file_rows
        self.rows, self.rows_in_file, self.files, self.bytes = 0, 0, 0, 0
        self.waiting: list[pa.RecordBatch] = []
        self.stream = None
        folder.mkdir()
        self._open()

    def _open(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.stream = pa.ipc.new_stream(self.folder / f"{self.files}.arrow", self.schema)
        self.files += 1
        self.rows_in_file = 0

    def write(self, batch: pa.RecordBatch) -> None:
        """Appends rows."""
        self.waiting.append(batch)
        if sum(map(len, self.waiting)) >= BATCH_ROWS:
            self._flush()

    def _flush(self) -> None:
        table = pa.Table.from_batches(self.waiting, self.schema).combine_chunks()
        self.waiting = []
        start = 0
        while start < len(table):
            if self.rows_in_file == self.file_rows:
                self._open()
            piece = table.slice(start, min(BATCH_ROWS, self.file_rows - self.rows_in_file))
            self.stream.write_table(piece)
            self.rows += len(piece)
            self.rows_in_file += len(piece)
            self.bytes += piece.nbytes
            start += len(piece)

    def close(self, split: str, features: dict, tag: str) -> None:
        """Finishes the files and writes state.json and dataset_info.json."""
        self._flush()
        self.stream.close()
        names = [f"data-{i:05d}-of-{self.files:05d}.arrow" for i in range(self.files)]
        for i, name in enumerate(names):
            (self.folder / f"{i}.arrow").rename(self.folder / name)
        state = {
            "_data_files": [{"filename": name} for name in names],
            "_fingerprint": hashlib.sha256(f"{tag} {split}".encode()).hexdigest()[:16],
            "_format_columns": None,
            "_format_kwargs": {},
            "_format_type": None,
            "_output_all_columns": False,
            "_split": split,
        }
        info = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
        info["splits"] = {split: {"name": split, "num_bytes": self.bytes, "num_examples": self.rows}}
        (self.folder / "state.json").write_text(json.dumps(state, indent=2))
        (self.folder / "dataset_info.json").write_text(json.dumps(info, indent=2))


def build(
    folder: Path,
    folders: list[Path],
    manifests: list[dict],
    val_fraction: float,
    file_rows: int,
    split_column: str | None,
    listed: set[str] | None,
) -> tuple[dict, dict]:
    """Writes the dataset into `folder` (which must not exist); returns the rows of each split, and how many are held
    out by what."""
    length = manifests[0]["max_length"]
    text, ids = {"dtype": "string", "_type": "Value"}, {"dtype": "int32", "_type": "Value"}
    ids, ids_type = {"feature": ids, "length": length, "_type": "Sequence"}, pa.list_(pa.int32(), length)
    features = {"image_key": text, "input_ids": ids, "caption": text}
    types = {"image_key": pa.string(), "input_ids": ids_type, "caption": pa.string()}
    if has_more(folders, manifests):
        features |= {name: {"feature": one, "_type": "Sequence"} for name, one in zip(MORE, (text, ids))}
        types |= {name: pa.list_(one) for name, one in zip(MORE, (pa.string(), ids_type))}
    schema = pa.schema(types, metadata={"huggingface": json.dumps({"info": {"features": features}})})
    also = held_out_keys(folders, manifests, val_fraction, split_column) if listed is None else set()
    sides = Sides(val_fraction, listed, also)
    folder.mkdir(parents=True)
    splits = {name: SplitWriter(folder / name, schema, file_rows) for name in ("train", "val")}
    with progress(sum(m["rows"] for m in manifests), "05_build_hf_dataset.py", "row") as bar:
        for batch, told in read_rows(folders, manifests, schema, split_column):
            in_val = sides.in_val(batch.column("image_key").to_pylist(), told)
            splits["train"].write(batch.filter(pa.array(~in_val)))
            splits["val"].write(batch.filter(pa.array(in_val)))
            bar.update(len(batch))
    if split_column is not None and not sides.told:
        raise InputError(
            f"no row has a text in the column {split_column} that --split_column names: 04_tokenise.py keeps `split` "
            "of each picture's JSON; make the tokens with one, or drop the flag"
        )
    if missing := sorted((listed or set()) - sides.found):
        raise InputError(
            f"--val_list names {missing[0]}, and no row is called so ({len(missing):,} such lines): give image keys as "
            "<source>/<shard>/<key>, or <key> alone"
        )
    held_out_by = [split_column, sorted(listed) if listed else None]
    tag = json.dumps([manifests, val_fraction, *(held_out_by if any(held_out_by) else [])])
    for name, split in splits.items():
        split.close(name, features, tag)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return {name: split.rows for name, split in splits.items()}, sides.by


def has_more(folders: list[Path], manifests: list[dict]) -> bool:
    """Whether any token file has further captions."""
    for folder, manifest in zip(folders, manifests, strict=True):
        for shard in manifest["shards"]:
            with reading(folder / shard, AGAIN):
                if MORE[0] in pq.read_schema(folder / shard).names:
                    return True
    return False


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("input and output")
    g.add_argument("--in", dest="tokens", required=True, nargs="+", type=Path, help="folders of 04_tokenise.py")
    g.add_argument("--out", required=True, type=Path, help="folder of the dataset")

    g = p.add_argument_group("how it is cut")
    g.add_argument("--val_fraction", type=float, default=0.01, help="share of rows held out by hash of the key")
    g.add_argument("--split_column", nargs="?", const="split", metavar="NAME", help="column of the token batches that "
                   "says train or val (or valid, validation, test, held_out) of a row; `split` if no name follows; "
                   "rows without a text go by the hash (default: none)")  # fmt: skip
    g.add_argument("--val_list", type=Path, help="file of the rows to hold out, a line each: an image key, or its last "
                   "part; no row is then held out by hash (default: none)")  # fmt: skip
    g.add_argument("--file_rows", type=int, default=1_000_000, help="rows an Arrow file, at most")
    args = p.parse_args()
    if not 0 <= args.val_fraction < 1 or args.file_rows < 1:
        raise InputError(
            f"--val_fraction is {args.val_fraction} and must lie in [0, 1), --file_rows must be at least 1"
        )
    if args.split_column in ("", "image_key", "input_ids", "caption", *MORE):
        raise InputError(f"--split_column wants a column that says train or val, found {args.split_column!r}")

    manifests = read_manifests(args.tokens)
    inputs = [
        {"source": m["source"], "rows": m["rows"], "manifest_sha256": sha256(folder / "manifest.json")}
        for folder, m in zip(args.tokens, manifests, strict=True)
    ]
    settings = {"val_fraction": args.val_fraction, "file_rows": args.file_rows, "inputs": inputs}
    listed = read_list(args.val_list) if args.val_list else None
    if args.split_column is not None:
        settings["split_column"] = args.split_column
    if args.val_list:
        settings["val_list"] = sha256(args.val_list)
    if args.out.exists() and any(args.out.iterdir()):
        old = read_json(args.out / "manifest.json") if (args.out / "manifest.json").exists() else {}
        if old.get("script") != "05_build_hf_dataset.py":
            raise InputError(
                f"{args.out} holds files that this script did not write: give a new or empty folder as --out"
            )
        if old["settings"] == settings:
            print(f"done already: {old['counts']} rows in {args.out}")
            return

    make_folder(args.out.parent)
    temporary = args.out.with_name(args.out.name + ".tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    try:
        counts, held_out_by = build(
            temporary, args.tokens, manifests, args.val_fraction, args.file_rows, args.split_column, listed
        )
    except InputError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if not counts["train"]:
        shutil.rmtree(temporary)
        advice = "give token folders that hold some"
        if counts["val"]:
            advice = "lower --val_fraction" if held_out_by["hash"] else "let --val_list or --split_column name fewer"
        raise InputError(f"no row is left to train on ({counts['val']:,} are held out): {advice}")
    manifest = {
        "script": "05_build_hf_dataset.py",
        "settings": settings,
        "complete": True,
        **{name: manifests[0][name] for name in ("tokenizer_hash", "max_length", "vocab_size")},
        "sources": sorted({m["source"] for m in manifests}),
        "counts": counts,
    }
    write_manifest(temporary, manifest)
    replace_folder(temporary, args.out)
    print(f"{counts['train']:,} rows to train on, {counts['val']:,} held out: {args.out}")
    if args.split_column or args.val_list:
        print("held out by " + ", ".join(f"{by}: {count:,}" for by, count in held_out_by.items()))


if __name__ == "__main__":
    run(main)
