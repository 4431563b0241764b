"""Latents on disk: shards, records, manifest."""

import itertools
import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sd.errors import InputError
from sd.files import (
    atomic_path,
    atomic_write,
    make_folder,
    read_json,
    sha256,
    stamp,
    write_json,
    write_json_once,
)
from sd.shards import FLIP
from sd.stream import Batch

FORMAT = "latents-1"


# Files
def read_record(out: Path, shard: str) -> dict | None:
    """The record of a shard; None if there is none, or none that can be read."""
    try:
        return json.loads((out / f"{shard}.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def open_folder(out: Path, settings: dict):
    """Make the folder and its settings.json, or compare that of an earlier run; InputError names what differs."""
    make_folder(out)
    path = out / "settings.json"
    if not path.exists():
        if strangers := [p.name for p in out.iterdir() if p.suffix in (".npy", ".parquet", ".json")]:
            raise InputError(f"{out} holds {strangers[0]} but no settings.json: give a new or empty folder as --out")
        write_json_once(path, settings)
    old, new = read_json(path), json.loads(json.dumps(settings))
    old_vae, new_vae = old.get("vae", {}), new["vae"]
    for what, before, now in (
        ("a VAE of hash", old_vae.get("hash"), new_vae["hash"]),
        ("a VAE of config", old_vae.get("config"), new_vae["config"]),  # the scaling factor is no part of the hash
        *((name, old.get(name) or None, new[name] or None) for name in new if name != "vae"),
    ):
        if before != now:
            raise InputError(
                f"{out} was made with {what} {before}, and {what} {now} is asked for now: give another --out, or "
                "delete that folder first"
            )


def row_shape(settings: dict, size: tuple[int, int]) -> tuple[int, ...]:
    """The shape of one stored row of a picture of (height, width): [z, h, w], or [2z, h, w] with moments."""
    z, h, _ = settings["latent_shape"]
    factor = settings["size"] // h
    return (2 * z if settings["kind"] == "moments" else z), size[0] // factor, size[1] // factor


def arrays_of(shard: str, settings: dict) -> dict[str, tuple[int, int]]:
    """Names (without .npy and .parquet) that a shard's arrays can have, and the sizes of their pictures."""
    if not settings["buckets"]:
        return {shard: (settings["size"], settings["size"])}
    return {f"{shard}_{h}x{w}": (h, w) for h, w in settings["buckets"]}


def address(settings: dict) -> dict:
    """What, beside a picture's bytes, its latent depends on: stands in every record and index."""
    vae = {name: settings["vae"][name] for name in ("hash", "config")}
    return json.loads(json.dumps(settings | {"vae": vae}))


def whole(out: Path, shard: str, record: dict, settings: dict) -> bool:
    """Whether a shard's arrays are there, as its record tells of them, and made with these settings."""
    possible = arrays_of(shard, settings)
    if record["settings"] != address(settings) or not set(record["arrays"]) <= set(possible):
        return False
    for name, count in record["arrays"].items():
        try:
            shape = np.load(out / f"{name}.npy", mmap_mode="r").shape
            index = pq.read_metadata(out / f"{name}.parquet")
        except (OSError, ValueError, EOFError, pa.ArrowInvalid):  # missing, cut
            return False
        made_with = json.loads((index.metadata or {}).get(b"settings", b"null"))
        if shape != (count, *row_shape(settings, possible[name])) or index.num_rows != count:
            return False
        if made_with != record["settings"]:
            return False
    return True


def finished(out: Path, tar: Path, source: str, settings: dict, read: bool = False) -> bool:
    """Whether a tar's latents are there, whole, and made with these settings from the bytes that the tar has now. A tar
    whose times have changed is taken for another; with `read` it is read, to see whether it is."""
    record = read_record(out, tar.stem)
    if not isinstance(record, dict) or not {"source", "settings", "tar"} <= record.keys():  # of another kind: made anew
        return False
    if record["source"] != source:
        raise InputError(
            f"{out} holds {tar.stem} of the source {record['source']}, and {tar} belongs to {source}: give another "
            "--out"
        )
    if "arrays" not in record or not whole(out, tar.stem, record, settings):
        return False
    now = stamp(tar)
    if record["tar"] | now == record["tar"]:
        return True
    if not read or record["tar"]["bytes"] != now["bytes"] or record["tar"]["sha256"] != sha256(tar):
        return False
    write_json(out / f"{tar.stem}.json", record | {"tar": record["tar"] | now})  # touched, or copied here
    return True


def write_shard(out: Path, shard: str, arrays: dict[str, tuple[np.ndarray, list]], record: dict, settings: dict):
    """arrays: name -> latents fp16 [N, ...], and of each row image key and sha256. The record goes first and comes back
    last: no old record can stand beside new latents, whenever this is killed."""
    (out / f"{shard}.json").unlink(missing_ok=True)
    for name in set(arrays_of(shard, settings)) - set(arrays):  # buckets that have become empty
        (out / f"{name}.parquet").unlink(missing_ok=True)
        (out / f"{name}.npy").unlink(missing_ok=True)
    for name, (latents, index) in arrays.items():
        with atomic_path(out / f"{name}.npy") as temporary, open(temporary, "wb") as file:
            # as np.save does, which loses the error of a full disk: it writes through a buffer that C closes unchecked
            header = np.lib.format.header_data_from_array_1_0(latents)
            np.lib.format.write_array_header_1_0(file, header | {"fortran_order": False})
            file.write(np.ascontiguousarray(latents).data)
        keys, hashes = (pa.array(column, pa.string()) for column in (zip(*index) if index else ([], [])))
        table = pa.table({"image_key": keys, "row": pa.array(range(len(keys)), pa.int32()), "sha256": hashes})
        table = table.replace_schema_metadata({"settings": json.dumps(record["settings"])})
        with atomic_path(out / f"{name}.parquet") as temporary:
            pq.write_table(table, temporary)
    write_json(out / f"{shard}.json", record)


def write_manifest(out: Path, settings: dict, tars: list[Path]) -> dict:
    """Write rejects.jsonl and manifest.json from the shards' records."""
    names = {path.stem for path in out.glob("*.json")} - {"settings", "manifest"}
    records = [record for name in sorted(names) if (record := read_record(out, name))]
    if extra := len(records) - len(tars):
        print(f"note: {out} also holds {extra} shards of tars that are not among --images; the manifest counts them")
    rejects = Counter()
    for record in records:
        rejects.update(record["rejects"])
    lines = [{"image_key": key, "reason": reason} for record in records for key, reason in record["rejected"]]
    atomic_write(out / "rejects.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    count, scale = sum(record["count"] for record in records), settings["vae"]["config"]["scaling_factor"]
    shift = {"logvar_plus": 2 * math.log(scale)} if settings["kind"] == "moments" else {}
    manifest = {
        "format": FORMAT,
        **settings,
        "scaled": True,
        "scale": {"mean_times": scale, **shift},
        "count": count,
        "pictures": count // (2 if settings["flip"] else 1),
        "shards": len(records),
        "rejects": dict(sorted(rejects.items())),
    }
    write_json(out / "manifest.json", manifest)
    return manifest


# The two loops
class Shard:
    """What is known of one tar while it is encoded."""

    def __init__(self, prefix: str):
        self.prefix = prefix  # of its image keys
        self.latents, self.index = defaultdict(list), defaultdict(list)  # by size of the pictures
        self.rejects, self.rejected = Counter(), []

    def add(self, batch: Batch, results: list[tuple[np.ndarray, np.ndarray]]):
        """results: of the pictures, and if wanted of the mirrored ones: latents [B, ...] and which are finite [B]. A
        picture stays only if all of its latents are finite."""
        keys = [f"{self.prefix}/{key}" for key in batch.keys]
        self.rejects.update(batch.rejects)
        self.rejected += [(f"{self.prefix}/{key}", reason) for key, reason in batch.rejected]
        if not keys:
            return
        good = np.logical_and.reduce([finite for _, finite in results])
        self.rejected += [(key, "nan_latent") for key in itertools.compress(keys, ~good)]
        self.rejects.update({"nan_latent": int((~good).sum())} if not good.all() else {})
        rows = np.stack([latents for latents, _ in results], axis=1)[good]  # [B, 1 or 2, C, h, w]
        size = tuple(batch.pictures.shape[1:3])
        self.latents[size].append(rows.reshape(-1, *rows.shape[2:]))
        kept = itertools.compress(zip(keys, batch.sha256, strict=True), good)
        self.index[size] += [(key + end, sha) for key, sha in kept for end in ("", FLIP)[: len(results)]]

    def arrays(self, name: str, settings: dict) -> dict[str, tuple[np.ndarray, list]]:
        """What write_shard wants. Without buckets there is an array even if it is empty."""
        return {
            array: (np.concatenate(self.latents[size] or [np.empty((0, *row_shape(settings, size)), np.float16)]),
                    self.index[size])
            for array, size in arrays_of(name, settings).items() if self.index[size] or not settings["buckets"]
        }  # fmt: skip
