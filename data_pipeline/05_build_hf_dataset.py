"""Token batches (parquet) to the Arrow dataset that training reads, with a train and a val split.

    python data_pipeline/05_build_hf_dataset.py --in data/shapes/tokens --out data/shapes/dataset --val_fraction 0.02
    python data_pipeline/05_build_hf_dataset.py --in data/diffusiondb/tokens data/journeydb/tokens \\
        --out data/synthetic/dataset

The folder opens with `datasets.load_from_disk` of the Hugging Face library, though pyarrow alone writes it:
dataset_dict.json; train/ and val/ with state.json, dataset_info.json and data-00000-of-00001.arrow, ... (streams); and
manifest.json (counts, tokenizer hash, length, vocabulary). Columns: image_key (string), input_ids (L int32), caption
(string). Whether a row is in val depends on its image key alone, so that a row never changes sides as data grow; a
larger --val_fraction moves rows from train to val only. One exception: of a source of two or more rows of which none
would be held out, the row whose key has the lowest hash is, until data that come later bring another. Built in a
temporary folder and renamed; if the token batches have changed since, it is built anew, else the script says that it is
done.
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
from sd.workers import progress

BATCH_ROWS = 1000  # rows a record batch
READ_ROWS = 50_000
AGAIN = "run 04_tokenise.py again"


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


def read_batches(path: Path, schema: pa.Schema, count: int = READ_ROWS) -> Iterator[pa.RecordBatch]:
    """The rows of a token file, `count` at a time, as batches of `schema`; fails in one sentence where
    it has other columns, or nulls."""
    with reading(path, AGAIN):
        batches = pq.ParquetFile(path).iter_batches(count, columns=schema.names)
    while True:
        with reading(path, AGAIN):
            if (batch := next(batches, None)) is None:
                return
            batch = batch.select(schema.names).cast(schema)
            if empty := [name for name in schema.names if batch.column(name).null_count]:
                raise ValueError(f"its column {empty[0]} has nulls")
        yield batch


def read_rows(folders: list[Path], manifests: list[dict], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """All rows of all token folders, in order, as batches of `schema`; fails at a repeated image key."""
    keys = Hashes()
    for folder, manifest in zip(folders, manifests, strict=True):
        for shard in manifest["shards"]:
            for batch in read_batches(folder / shard, schema):
                names = batch.column("image_key")
                new = keys.add_new(hash_texts(names.cast(pa.large_string())))
                if not new.all():
                    name = names[int(np.flatnonzero(~new)[0])].as_py()
                    raise InputError(
                        f"{folder / shard} repeats the image key {name}: give each source its own --source in 04"
                    )
                yield batch


def held_out_keys(folders: list[Path], manifests: list[dict], val_fraction: float) -> set[str]:
    """Keys that go to val though their fraction is not below val_fraction: of each source of two or more rows that
    would otherwise have no row in val, the key of lowest fraction. Reads no further than to a row that is in val."""
    held_out = set()
    for source in dict.fromkeys(manifest["source"] for manifest in manifests if val_fraction > 0):
        lowest, rows = (1.0, ""), 0
        for keys in read_keys(source, folders, manifests):
            rows += len(keys)
            lowest = min([lowest, *((key_fraction(key), key) for key in keys)])
            if lowest[0] < val_fraction:
                break
        if rows > 1 and lowest[0] >= val_fraction:
            held_out.add(lowest[1])
    return held_out


def read_keys(source: str, folders: list[Path], manifests: list[dict]) -> Iterator[list[str]]:
    """The image keys of one source, some at a time."""
    for folder, manifest in zip(folders, manifests, strict=True):
        for shard in manifest["shards"] if manifest["source"] == source else ():
            for batch in read_batches(folder / shard, pa.schema({"image_key": pa.string()}), BATCH_ROWS):
                yield batch.column(0).to_pylist()


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


def build(folder: Path, folders: list[Path], manifests: list[dict], val_fraction: float, file_rows: int) -> dict:
    """Writes the dataset into `folder` (which must not exist); returns the rows of each split."""
    length = manifests[0]["max_length"]
    features = {
        "image_key": {"dtype": "string", "_type": "Value"},
        "input_ids": {"feature": {"dtype": "int32", "_type": "Value"}, "length": length, "_type": "Sequence"},
        "caption": {"dtype": "string", "_type": "Value"},
    }
    schema = pa.schema(
        {"image_key": pa.string(), "input_ids": pa.list_(pa.int32(), length), "caption": pa.string()},
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    held_out = held_out_keys(folders, manifests, val_fraction)
    folder.mkdir(parents=True)
    splits = {name: SplitWriter(folder / name, schema, file_rows) for name in ("train", "val")}
    with progress(sum(m["rows"] for m in manifests), "05_build_hf_dataset.py", "row") as bar:
        for batch in read_rows(folders, manifests, schema):
            keys = batch.column("image_key").to_pylist()
            in_val = [key_fraction(key) < val_fraction or key in held_out for key in keys]
            in_val = np.array(in_val, bool)
            splits["train"].write(batch.filter(pa.array(~in_val)))
            splits["val"].write(batch.filter(pa.array(in_val)))
            bar.update(len(batch))
    tag = json.dumps([manifests, val_fraction])
    for name, split in splits.items():
        split.close(name, features, tag)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return {name: split.rows for name, split in splits.items()}


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("input and output")
    g.add_argument("--in", dest="tokens", required=True, nargs="+", type=Path, help="folders of 04_tokenise.py")
    g.add_argument("--out", required=True, type=Path, help="folder of the dataset")

    g = p.add_argument_group("how it is cut")
    g.add_argument("--val_fraction", type=float, default=0.01, help="share of rows held out")
    g.add_argument("--file_rows", type=int, default=1_000_000, help="rows an Arrow file, at most")
    args = p.parse_args()
    if not 0 <= args.val_fraction < 1 or args.file_rows < 1:
        raise InputError(
            f"--val_fraction is {args.val_fraction} and must lie in [0, 1), --file_rows must be at least 1"
        )

    manifests = read_manifests(args.tokens)
    inputs = [
        {"source": m["source"], "rows": m["rows"], "manifest_sha256": sha256(folder / "manifest.json")}
        for folder, m in zip(args.tokens, manifests, strict=True)
    ]
    settings = {"val_fraction": args.val_fraction, "file_rows": args.file_rows, "inputs": inputs}
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
    counts = build(temporary, args.tokens, manifests, args.val_fraction, args.file_rows)
    if not counts["train"]:
        shutil.rmtree(temporary)
        advice = "lower --val_fraction" if counts["val"] else "give token folders that hold some"
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


if __name__ == "__main__":
    run(main)
