"""Image shards to latent shards, through the VAE.

    python encode_latents.py --images data/laion/images --out data/laion/latents --size 512
    python encode_latents.py --images data/shapes/images --vae runs/vae/vae --out data/shapes/latents --size 64
    torchrun --nproc_per_node=2 encode_latents.py --images 'data/laion/images/*.tar' --out data/laion/latents
    python encode_latents.py --benchmark --vae runs/vae/vae --size 512           # speed alone, on synthetic pictures

Run the same command again after a stop: finished shards are left alone, unfinished ones and those whose tar has changed
are encoded (again). Start it as often as there are GPUs (torchrun, a Slurm array, by hand on several machines): all
that see the folder share its shards through lock files, take over from those that died, and end when all is finished.
Per tar NNNNN.tar the folder gets

    NNNNN.npy       fp16 [N, z, h, w]: scaled latents (the posterior's mean, as VAE.encode gives); with --moments fp16
                    [N, 2z, h, w]: the scaled mean, then the log-variance of the scaled latent. With --buckets one
                    array a size, NNNNN_HxW.npy (H, W in pixels), and one index beside each
    NNNNN.parquet   image_key (string, source/shard/key), row (int32), sha256 (string, of the picture's bytes). With
                    --flip each key is followed by key#flip: the mirrored picture. In the file's metadata: `settings`
    NNNNN.json      the record: a shard counts when this file is there. Tar, settings, counts, rejected keys by reason
    NNNNN.0.lock    while a process is at work on the shard (1, 2, ...: taken over from a dead one)
    settings.json   what all shards of the folder were made with; other settings or another VAE are refused
    rejects.jsonl   image_key and reason of every picture that is left out, where its key is known
    manifest.json   the totals; written last, when every shard of --images is finished

Whatever has its final name is whole: it was written under another name, flushed and renamed. Latents that are not
finite (an overflow in bf16 or fp16) are computed again in fp32, and rejected as `nan_latent` when that fails too.
"""

import argparse
import copy
import hashlib
import itertools
import json
import math
import os
import socket
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader

import SD_Kernels
from data_pipeline import common
from SD_Convert import DEFAULT_VAE, load_vae
from SD_ImageGen import DTYPES, benchmark_facts, count_flops, pick_device
from SD_Model import VAE, InputError, run_cli, weights_hash
from SD_Run import sha256

FORMAT = "latents-1"
WARM_UP_S = 3  # of --benchmark
HEARTBEAT_S = 20  # between signs of life of a process that holds locks
DEAD_AFTER_S = 180  # without one, on another machine; file systems may show times up to a minute late
POLL_S = 1.0  # between looks at shards that are in other processes' hands


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


class Job(NamedTuple):
    """Samples of one tar that become pictures of one size."""

    shard: int  # which of the tars
    prefix: str  # of its image keys: source/shard
    samples: list[tuple[str, bytes]]  # key, file; in the order of the tar
    size: tuple[int, int]  # height and width that they get
    rejects: Counter  # of the tar itself, by reason, with its last job
    rejected: list[tuple[str, str]]  # key, reason; likewise
    last: bool  # the last job of its tar


class Batch(NamedTuple):
    shard: int  # which of the tars
    keys: list[str]  # of the pictures, in the order of the tar
    sha256: list[str]  # of the pictures' files
    pictures: torch.Tensor  # uint8 [len(keys), H, W, 3], RGB
    rejects: Counter  # by reason: of these samples, and with the last batch of the tar itself
    rejected: list[tuple[str, str]]  # key, reason: those of `rejects` whose key is known
    last: bool  # the last batch of its tar


def bucket_sizes(size: int, step: int) -> list[tuple[int, int]]:
    """(height, width) in multiples of `step` whose area is within 10 % of size^2 and whose aspect is at most 2."""
    long = range(size, 2 * size + 1, step)
    pairs = [(round(size * size / side / step) * step, side) for side in long]
    pairs = [(a, b) for a, b in pairs if 0 < a <= b <= 2 * a and abs(a * b / size**2 - 1) <= 0.1]
    return sorted({*pairs, *((b, a) for a, b in pairs)})


def nearest_size(data: bytes | None, sizes: list[tuple[int, int]]) -> tuple[int, int]:
    """Of `sizes` (height, width), the one whose aspect is nearest to a picture's, by its header. Raises Reject."""
    if len(sizes) == 1:
        return sizes[0]
    header = common.read_header(data)
    if not header.width * header.height:
        raise common.Reject("corrupt")
    aspect = math.log(header.width / header.height) * (-1 if header.orientation > 4 else 1)
    return min(sizes, key=lambda size: abs(math.log(size[1] / size[0]) - aspect))


def jobs(tars: Iterable[Path], sizes: list[tuple[int, int]], batch: int, source: str | None) -> Iterator[Job]:
    """The samples of tars, in order; no job crosses from one tar to the next, and every tar has a last one."""
    for shard, tar in enumerate(tars):
        prefix = f"{source or common.source_of(tar)}/{tar.stem}"
        groups, rejects, rejected = defaultdict(list), Counter(), []
        for key, sample in common.iter_samples(tar, rejects):
            try:
                size = nearest_size(sample["image"], sizes)
            except common.Reject as e:
                rejects[e.reason] += 1
                rejected.append((key, e.reason))
                continue
            groups[size].append((key, sample["image"]))
            if len(groups[size]) == batch:
                yield Job(shard, prefix, groups.pop(size), size, Counter(), [], last=False)
        rest = list(groups.items()) or [(sizes[0], [])]
        for size, samples in rest[:-1]:
            yield Job(shard, prefix, samples, size, Counter(), [], last=False)
        yield Job(shard, prefix, rest[-1][1], rest[-1][0], rejects, rejected, last=True)


class Decoder:
    """Jobs to batches, as the dataset of a DataLoader whose sampler gives the jobs: these are read in the main process
    when a worker is to have one, so the tars may be chosen late."""

    def __init__(self, crop: str):
        self.crop = crop

    def __getitem__(self, job: Job) -> Batch:
        keys, hashes, rejects, rejected = [], [], job.rejects.copy(), list(job.rejected)
        pictures = np.empty((len(job.samples), *job.size, 3), np.uint8)
        for key, data in job.samples:
            # not key_fraction of the bare key: it decides on train and val, and val would be cut at one side
            at = common.key_fraction(f"crop {job.prefix}/{key}") if self.crop == "random" else None
            try:
                pictures[len(keys)] = common.cut(common.decode_image(data), job.size, at)
            except common.Reject as e:
                rejects[e.reason] += 1
                rejected.append((key, e.reason))
                continue
            keys.append(key)
            hashes.append(hashlib.sha256(data).hexdigest())
        return Batch(job.shard, keys, hashes, torch.from_numpy(pictures[: len(keys)]), rejects, rejected, job.last)


def stream(
    tars: Iterable[Path], size: int, batch: int, workers: int, pin=False, buckets=None, crop="center", source=None
) -> Iterator[Batch]:
    """The pictures of tars, in order, decoded in `workers` processes (0: in this one); pinned on request.

    Every batch has one size: size x size, or one of `buckets` (height, width). InputError if a worker dies.
    """
    loader = DataLoader(
        Decoder(crop),
        sampler=jobs(tars, buckets or [(size, size)], batch, source),
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=_as_it_is,
        worker_init_fn=_one_thread,
        prefetch_factor=2 if workers else None,
        multiprocessing_context="spawn" if workers else None,  # a fork of a process whose OpenCV has threads can hang
    )
    try:
        yield from loader
    except RuntimeError as e:
        if "DataLoader worker" not in str(e):
            raise
        raise InputError(
            "a worker process was killed, probably for lack of memory or of /dev/shm: run the command again with fewer "
            "--workers or a smaller --batch"
        ) from None


def _as_it_is(item):
    return item


def _one_thread(worker: int):
    cv2.setNumThreads(1)


# ---------------------------------------------------------------------------------------------------------------------
# Latents


class Encoder:
    """Pictures to fp16 latents on one device: submit() starts, collect() waits, so that the two can overlap.

    Args:
        vae: fp32, eval.
        dtype: what the VAE computes in. Results that are not finite are computed again in fp32.
        moments: also the log-variance.
        pad_to: fill batches up to this many pictures with black ones, so that every shape is the same. None: not.
        compiled: through torch.compile.
    """

    def __init__(self, vae: VAE, device: torch.device, dtype: torch.dtype, moments=False, pad_to=None, compiled=False):
        self.layout = torch.channels_last if device.type == "cuda" else torch.contiguous_format
        self.exact = vae.to(device, memory_format=self.layout)
        self.fast = self.exact if dtype == torch.float32 else copy.deepcopy(self.exact).to(dtype)
        self.scale = vae.config.scaling_factor
        self.device, self.dtype, self.moments, self.pad_to = device, dtype, moments, pad_to
        self.compiled = compiled
        if SD_Kernels.available(device) and not compiled and self.fast is not self.exact:
            SD_Kernels.apply(self.fast)
        self.fast_moments = torch.compile(self.fast.moments) if compiled else self.fast.moments

    def _latents(self, moments, pictures: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = (pictures.float() / 127.5 - 1).permute(0, 3, 1, 2)  # [B, 3, H, W] in -1..1, channels_last in memory
        mean, logvar = moments(x.to(dtype).contiguous(memory_format=self.layout))  # each [B, z, h, w]
        latents = mean.float() * self.scale  # as VAE.encode does
        if self.moments:  # ln var(s x) = ln var(x) + 2 ln s
            latents = torch.cat([latents, logvar.float() + 2 * math.log(self.scale)], dim=1)  # [B, 2z, h, w]
        return latents.half()

    def warm_up(self, size: int, batch: int):
        """Compile, where that was asked for; where it does not work, a line says so and it goes on without."""
        if not self.compiled:
            return
        try:
            self.collect(self.submit(torch.zeros(batch, size, size, 3, dtype=torch.uint8)))
        except Exception as e:  # no compiler, an unsupported card: many kinds of error, and none is worth stopping for
            print(f"note: torch.compile failed ({type(e).__name__}), going on without it")
            self.compiled, self.fast_moments = False, self.fast.moments

    @torch.inference_mode()
    def submit(self, pictures: torch.Tensor, mirrored: bool = False):
        """Pictures uint8 [B, H, W, 3] on the CPU -> what collect() wants. On a GPU it does not wait."""
        count = len(pictures)
        if not count:
            return None
        pictures = pictures.to(self.device, non_blocking=True)
        if mirrored:
            pictures = pictures.flip(2)
        padded = pictures
        if self.pad_to and count < self.pad_to:
            padded = torch.cat([pictures, pictures.new_zeros(self.pad_to - count, *pictures.shape[1:])])
        latents = self._latents(self.fast_moments, padded, self.dtype)[:count]
        finite = latents.isfinite().flatten(1).all(dim=1)
        latents, finite = (t.to("cpu", non_blocking=True) for t in (latents, finite))
        copied = None
        if self.device.type == "cuda":
            copied = torch.cuda.Event()
            copied.record()
        return pictures, latents, finite, copied

    @torch.inference_mode()
    def collect(self, submitted) -> tuple[np.ndarray, np.ndarray] | None:
        """fp16 [B, z or 2z, h, w], and bool [B]: which of them are finite. None for a batch without pictures."""
        if submitted is None:
            return None
        pictures, latents, finite, copied = submitted
        if copied:
            copied.synchronize()
        if self.fast is not self.exact and not finite.all():
            again = (~finite).nonzero()[:, 0]
            latents[again] = self._latents(self.exact.moments, pictures[again.to(self.device)], torch.float32).cpu()
            finite = latents.isfinite().flatten(1).all(dim=1)
        return latents.numpy(), finite.numpy()


# ---------------------------------------------------------------------------------------------------------------------
# Files


def stamp(tar: Path) -> dict:
    """Size in bytes and times in ns: what tells quickly that a tar is the same. The time of the last change of content
    or name (ctime) is there because the other one can be set, as rsync and cp -p do."""
    stat = tar.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}


def write_json(path: Path, content: dict):
    common.atomic_write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_record(out: Path, shard: str) -> dict | None:
    """The record of a shard; None if there is none, or none that can be read."""
    try:
        return json.loads((out / f"{shard}.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def open_folder(out: Path, settings: dict):
    """Make the folder and its settings.json, or compare that of an earlier run; InputError names what differs."""
    common.make_folder(out)
    path = out / "settings.json"
    if not path.exists():
        if strangers := [p.name for p in out.iterdir() if p.suffix in (".npy", ".parquet", ".json")]:
            raise InputError(f"{out} holds {strangers[0]} but no settings.json: give a new or empty folder as --out")
        with tempfile.NamedTemporaryFile("w", dir=out, suffix=".tmp") as file:
            file.write(json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            link(file.name, path)
    old, new = common.read_json(path), json.loads(json.dumps(settings))
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


def link(source: Path | str, target: Path) -> bool:
    """Give a file a second name, unless that is taken: of several processes that try, one succeeds."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    return True


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
    if record is None:
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
        with common.atomic_path(out / f"{name}.npy") as temporary, open(temporary, "wb") as file:
            np.save(file, latents)  # to an open file: np.save would append .npy to the temporary name
        keys, hashes = (pa.array(column, pa.string()) for column in (zip(*index) if index else ([], [])))
        table = pa.table({"image_key": keys, "row": pa.array(range(len(keys)), pa.int32()), "sha256": hashes})
        table = table.replace_schema_metadata({"settings": json.dumps(record["settings"])})
        with common.atomic_path(out / f"{name}.parquet") as temporary:
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
    common.atomic_write(out / "rejects.jsonl", "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
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


# ---------------------------------------------------------------------------------------------------------------------
# Sharing shards between processes


def process_start(pid: int) -> str | None:
    """When a process of this machine began, as Linux tells it; None if there is none, or it is dead and not buried."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else fields[18]


def machine_name() -> str:
    """The same for two processes only if they see each other's ids: kernel since its start, and namespace of ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux: death is told by the heartbeat alone
        return f"{socket.gethostname()} {os.getpid()}"


class Locks:
    """The shards that this process has taken, each with a lock file NNNNN.<n>.lock; used in a `with` block.

    A lock is a hard link to a file that says which process this is, so one touch now and then keeps all of them fresh
    and it comes into being whole, for one of those who want it. An owner is dead when its process is gone from this
    machine, or was silent for DEAD_AFTER_S on another. To take over from a dead owner of lock n is to make lock n + 1:
    nothing is deleted, so of two thieves one fails, and a sleeper who wakes sees that he has lost. The locks of a shard
    are deleted, the oldest first, after its record is written; whoever takes one must then look for the record.
    """

    def __init__(self, out: Path):
        self.out, self.held = out, {}
        self.card = out / f"process.{socket.gethostname()}-{os.getpid()}.tmp"
        self.me = {"machine": machine_name(), "pid": os.getpid(), "start": process_start(os.getpid())}
        self.stopped = threading.Event()

    def __enter__(self) -> "Locks":
        for path in self.out.glob(f"*.{socket.gethostname()}-*.tmp"):  # left by the dead
            pid = path.name.rpartition("-")[2].removesuffix(".tmp")
            if pid.isdecimal() and Path("/proc/self").exists() and process_start(int(pid)) is None:
                path.unlink(missing_ok=True)
        self.card.write_text(json.dumps(self.me) + "\n")
        threading.Thread(target=self._beat, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.stopped.set()
        for shard in list(self.held):
            self.release(shard)
        self.card.unlink(missing_ok=True)

    def _beat(self):
        while not self.stopped.wait(HEARTBEAT_S):
            try:
                os.utime(self.card)
            except OSError:  # a disk that is away for a moment; when it stays away the encoder will say so
                pass

    def _path(self, shard: str, n: int) -> Path:
        return self.out / f"{shard}.{n}.lock"

    def _alive(self, lock: Path) -> bool:
        try:
            owner, beat = json.loads(lock.read_text()), lock.stat().st_mtime
        except FileNotFoundError:
            return True  # deleted just now: its shard is finished, or free at the next look
        except ValueError:  # a power failure has emptied it
            owner, beat = {"machine": None}, lock.stat().st_mtime
        if owner["machine"] == self.me["machine"]:
            return process_start(owner["pid"]) == owner["start"]
        os.utime(self.card)
        return self.card.stat().st_mtime - beat < DEAD_AFTER_S  # both by the file system's clock

    def take(self, shard: str) -> bool:
        """Whether the shard is this process's now. It may have been finished in the meantime."""
        n = 0
        while self._path(shard, n).exists():
            n += 1
        if (n and self._alive(self._path(shard, n - 1))) or not link(self.card, self._path(shard, n)):
            return False
        self.held[shard] = n
        return True

    def holds(self, shard: str) -> bool:
        """Whether the shard is still this process's: not when it was taken for dead, as after a long sleep."""
        mine = self._path(shard, self.held[shard])
        later = self._path(shard, self.held[shard] + 1)
        try:
            return mine.samefile(self.card) and not later.exists()
        except FileNotFoundError:
            return False

    def release(self, shard: str):
        if self.holds(shard):
            for n in range(self.held[shard] + 1):
                self._path(shard, n).unlink(missing_ok=True)
        del self.held[shard]


def free_tars(tars: list[Path], sources: dict[Path, str], out: Path, settings: dict, locks: Locks) -> Iterator[Path]:
    """Take what is unfinished and in nobody's hands, one tar at a time, when it is wanted."""
    for tar in tars:
        if finished(out, tar, sources[tar], settings) or not locks.take(tar.stem):
            continue
        if finished(out, tar, sources[tar], settings, read=True):
            locks.release(tar.stem)
        else:
            (out / "manifest.json").unlink(missing_ok=True)  # it says that the folder is complete
            yield tar


# ---------------------------------------------------------------------------------------------------------------------
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
        self.index[size] += [(key + end, sha) for key, sha in kept for end in ("", common.FLIP)[: len(results)]]

    def arrays(self, name: str, settings: dict) -> dict[str, tuple[np.ndarray, list]]:
        """What write_shard wants. Without buckets there is an array even if it is empty."""
        return {
            array: (np.concatenate(self.latents[size] or [np.empty((0, *row_shape(settings, size)), np.float16)]),
                    self.index[size])
            for array, size in arrays_of(name, settings).items() if self.index[size] or not settings["buckets"]
        }  # fmt: skip


def encode(tars: Iterable[Path], total: int, out: Path, encoder: Encoder, settings: dict, locks: Locks, args) -> int:
    """Encode the tars, which this process has locked, into `out`; returns how many were written. total: for show."""
    begun, reading, done = [], [], 0
    with ThreadPoolExecutor(1) as beside, common.progress(None, "encoding", "img") as bar:

        def begin() -> Iterator[Path]:
            for tar in tars:
                before = stamp(tar)  # and compared with that at the end: what lies between was read from one tar
                reading.append(beside.submit(lambda tar=tar, before=before: before | {"sha256": sha256(tar)}))
                begun.append(tar)
                yield tar

        def finish(tar: Path, shard: Shard, looked: dict) -> bool:
            if looked | stamp(tar) != looked:
                raise InputError(f"{tar} was changed while it was read: run the command again when it is finished")
            arrays = shard.arrays(tar.stem, settings)
            counts = {name: len(index) for name, (_, index) in arrays.items()}
            record = {
                "source": shard.prefix.removesuffix(f"/{tar.stem}"),
                "tar": {"path": str(tar.resolve()), **looked},
                "settings": address(settings),
                "arrays": counts,
                "count": sum(counts.values()),
                "rejects": dict(sorted(shard.rejects.items())),
                "rejected": shard.rejected,
                "made_by": locks.me,
            }
            mine = locks.holds(tar.stem)
            if mine:
                write_shard(out, tar.stem, arrays, record, settings)
            else:
                print(f"note: another process took {tar.stem} over; leaving it to that one")
            locks.release(tar.stem)
            return mine

        def keep(batch: Batch, submitted: list):
            nonlocal shard, done
            tar = begun[batch.shard]
            shard = shard or Shard(f"{args.source or common.source_of(tar)}/{tar.stem}")
            shard.add(batch, [encoder.collect(s) for s in submitted])
            bar.update(len(batch.keys))
            if batch.last:
                done += finish(tar, shard, reading[batch.shard].result())
                shard = None
                bar.set_postfix(shards=f"{done} of {total}")

        # One batch is always on its way: while the device works on it, the results of the one before are stored.
        shard = pending = None
        batches = stream(
            begin(), args.size, args.batch, args.workers, encoder.device.type == "cuda", settings["buckets"], args.crop,
            args.source,
        )  # fmt: skip
        for batch in batches:
            submitted = [encoder.submit(batch.pictures, mirrored) for mirrored in (False, True)[: 1 + args.flip]]
            if pending:
                keep(*pending)
            pending = batch, submitted
        if pending:
            keep(*pending)
    return done


def encode_all(tars: list[Path], out: Path, encoder: Encoder, settings: dict, args):
    """Encode what is free until all shards are finished, here or by other processes; then write the manifest."""
    sources = {tar: args.source or common.source_of(tar) for tar in tars}
    begin, done, told = time.perf_counter(), 0, False
    with Locks(out) as locks:
        while left := [tar for tar in tars if not finished(out, tar, sources[tar], settings)]:
            free = free_tars(left, sources, out, settings, locks)
            if first := next(free, None):
                encoder.warm_up(args.size, args.batch)
                done += encode(itertools.chain([first], free), len(left), out, encoder, settings, locks, args)
                continue
            if any(not finished(out, tar, sources[tar], settings) for tar in left):
                if not told:
                    print(f"waiting for other processes, which are at work on {len(left)} shards", flush=True)
                    told = True
                time.sleep(POLL_S)
        manifest = write_manifest(out, settings, tars)
    rejects = ", ".join(f"{n} {reason}" for reason, n in manifest["rejects"].items()) or "none"
    print(
        f"{done} shards encoded in {time.perf_counter() - begin:.0f} s, {len(tars) - done} by others or before; "
        f"{out} holds {manifest['count']:,} latents in {manifest['shards']} shards; rejects: {rejects}"
    )


def synthetic_tar(folder: Path, size: int, count: int) -> Path:
    """A tar of smooth random JPEGs, 1.5 x 1.25 times `size`, as photos from the web might be."""
    rng = np.random.default_rng(0)
    with common.ShardWriter(folder / "00000.tar") as shard:
        for i in range(count):
            coarse = rng.integers(0, 256, (size // 16 + 1, size // 16 + 1, 3), np.uint8)
            picture = cv2.resize(coarse, (size * 3 // 2, size * 5 // 4), interpolation=cv2.INTER_CUBIC)
            picture = cv2.add(picture, rng.integers(0, 24, picture.shape, np.uint8))
            data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 92])[1].tobytes()
            shard.add(f"{i:09d}", data, "jpg", "", {})
    return folder / "00000.tar"


def decode_ms(tar: Path, size: int, batch: int) -> float:
    """To decode and cut out one of this tar's pictures on one core."""
    threads = cv2.getNumThreads()
    cv2.setNumThreads(1)
    for _ in range(2):  # the first reads the file
        begin = time.perf_counter()
        images = sum(len(b.pictures) for b in stream([tar], size, batch, 0))
    seconds = time.perf_counter() - begin
    cv2.setNumThreads(threads)  # as --workers 0 decodes here too
    return 1e3 * seconds / images


def benchmark(encoder: Encoder, args) -> dict:
    """Sustained images/s over args.benchmark seconds, after a warm-up of WARM_UP_S and at least 5 batches. With
    args.benchmark_decode, workers decode JPEGs beside it, and how many cores that takes at this rate is told."""
    cuda = encoder.device.type == "cuda"
    decode = None

    def random_pictures():
        generator = torch.Generator().manual_seed(0)
        shape = (args.batch, args.size, args.size, 3)
        ring = [torch.randint(256, shape, dtype=torch.uint8, generator=generator) for _ in range(4)]
        ring = [pictures.pin_memory() if cuda else pictures for pictures in ring]
        while True:
            yield from ring

    with tempfile.TemporaryDirectory() as folder:
        if args.benchmark_decode:
            tar = synthetic_tar(Path(folder), args.size, 4 * args.batch)
            decode = decode_ms(tar, args.size, args.batch)
            batches = stream([tar] * 1_000_000, args.size, args.batch, args.workers, pin=cuda)
            pictures = (batch.pictures for batch in batches if len(batch.pictures))
        else:
            pictures = random_pictures()
        begin = time.perf_counter()
        encoder.warm_up(args.size, args.batch)
        start = pending = None
        images = batches = 0
        while True:
            now = time.perf_counter()
            if start is None and batches >= 5 and now - begin >= WARM_UP_S:
                start, images = now, 0
            if start is not None and now - start >= args.benchmark:
                break
            submitted = encoder.submit(next(pictures))
            if pending is not None:
                images += len(encoder.collect(pending)[0])
            pending = submitted
            batches += 1
        if args.benchmark_decode:
            pictures.close()
            del pictures
    rate, config = images / (now - start), encoder.exact.config
    flops = count_flops(lambda pictures: VAE(config).encode(pictures), (1, 3, args.size, args.size))
    return {
        "img_per_s": round(rate, 2),
        "images": images,
        "seconds": round(now - start, 2),
        "warmup_s": round(start - begin, 2),
        "batch": args.batch,
        "size": args.size,
        "dtype": args.dtype,
        "compile": encoder.compiled,
        "decode_workers": args.workers if decode else None,
        "decode_ms_per_picture": round(decode, 2) if decode else None,
        "decode_cores": round(rate * decode / 1e3, 2) if decode else None,
        **benchmark_facts(encoder.device, rate * flops),
    }


# ---------------------------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", help="folder of tars, or a glob in quotes")
    parser.add_argument("--vae", default=DEFAULT_VAE, help="a VAE: folder, file or hub name")
    parser.add_argument("--out", help="folder for the latents")
    parser.add_argument(
        "--size", type=int, default=512, help="side in pixels of the square that is cut out (and of --buckets' square)"
    )
    parser.add_argument("--crop", choices=["center", "random"], default="center", help="random: by the image key")
    parser.add_argument("--flip", action="store_true", help="also the mirrored picture, under key" + common.FLIP)
    parser.add_argument("--buckets", action="store_true", help="sizes of about equal area, by the picture's aspect")
    parser.add_argument(
        "--bucket_step", type=int, help="their sides' divisor in pixels (64; below 256 px the VAE's factor)"
    )
    parser.add_argument("--batch", type=int, help="pictures at once (32 on a GPU, 8 on a CPU)")
    parser.add_argument(
        "--workers", type=int, help="decoding processes; 0: none (a GPU: up to 16; a CPU: 0, they need 10 s to start)"
    )
    parser.add_argument("--device", help="cuda, cuda:1, mps, cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), help="what the VAE computes in (cuda: bf16, others: fp32)")
    parser.add_argument("--source", help="first part of the image keys (default: the folder above images/)")
    parser.add_argument("--moments", action="store_true", help="store mean and log-variance, not the mean alone")
    parser.add_argument(
        "--compile", action="store_true", help="torch.compile the VAE, instead of the fused kernels that CUDA has"
    )
    parser.add_argument(
        "--benchmark", type=float, nargs="?", const=20.0, metavar="SECONDS",
        help="measure the speed on synthetic pictures (20 s after a warm-up), write nothing",
    )  # fmt: skip
    parser.add_argument("--benchmark_decode", action="store_true", help="with JPEGs decoded by the workers in the loop")
    args = parser.parse_args(argv)
    if args.benchmark is None and not (args.images and args.out):
        raise InputError("--images and --out are wanted (or --benchmark)")
    if args.size < 8 or (args.batch is not None and args.batch < 1) or (args.workers is not None and args.workers < 0):
        raise InputError("--size must be at least 8, --batch at least 1, --workers at least 0")
    return args


def main(argv=None):
    args = parse_args(argv)
    device = pick_device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device(
            "cuda", int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))) % torch.cuda.device_count()
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)  # kernels, streams and events are the current device's
        torch.backends.cudnn.benchmark = True  # batches are padded to one shape, or one for each bucket
    cuda = device.type == "cuda"
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args.batch = (32 if cuda else 8) if args.batch is None else args.batch
    args.workers = (min(16, cpus) if cuda else 0) if args.workers is None else args.workers
    args.dtype = ("bf16" if cuda else "fp32") if args.dtype is None else args.dtype

    vae = load_vae(args.vae)
    factor = vae.config.factor
    if args.size % factor:
        raise InputError(f"this VAE wants --size in multiples of {factor}, found {args.size}")
    step = args.bucket_step or (64 if args.size >= 256 else factor)
    if args.buckets and (step % factor or args.size % step):
        raise InputError(
            f"--bucket_step must be a multiple of the VAE's {factor} and divide --size {args.size}, found {step}"
        )
    pad_to = args.batch if cuda or args.compile else None
    vae_hash = weights_hash(vae)
    encoder = Encoder(vae, device, DTYPES[args.dtype], args.moments, pad_to, args.compile)
    if args.benchmark is not None:
        print(json.dumps(benchmark(encoder, args)))
        return

    tars = common.list_shards(args.images)
    if twice := [shard for shard, n in Counter(tar.stem for tar in tars).items() if n > 1]:
        raise InputError(f"{args.images} has more than one {twice[0]}.tar: encode each folder into an --out of its own")
    settings = {
        "vae": {"hash": vae_hash, "name": args.vae, "config": asdict(vae.config)},
        "size": args.size,
        "latent_shape": [vae.config.latent_channels, args.size // factor, args.size // factor],
        "buckets": bucket_sizes(args.size, step) if args.buckets else None,
        "crop": args.crop,
        "flip": args.flip,
        "kind": "moments" if args.moments else "mean",
        "dtype": "float16",
        "computed_in": args.dtype,
    }
    open_folder(Path(args.out), settings)
    encode_all(tars, Path(args.out), encoder, settings, args)


if __name__ == "__main__":
    common.run_script(lambda: run_cli(main))
