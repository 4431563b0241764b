"""Image shards to latent shards, through the VAE.

    python encode_latents.py --images data/laion/images --out data/laion/latents --size 512
    python encode_latents.py --images data/shapes/images --vae runs/vae/vae --out data/shapes/latents --size 64
    torchrun --nproc_per_node=2 encode_latents.py --images 'data/laion/images/*.tar' --out data/laion/latents
    python encode_latents.py --benchmark --vae runs/vae/vae --size 512           # speed alone, on synthetic pictures

Run the same command again after a stop: finished shards are left alone, unfinished ones and those whose tar has changed
are encoded (again). Under torchrun the processes share the shards. Per tar NNNNN.tar the folder gets

    NNNNN.npy       fp16 [N, z, h, w]: scaled latents (the posterior's mean, as VAE.encode gives); with --moments fp16
                    [N, 2z, h, w]: the scaled mean, then the log-variance of the scaled latent
    NNNNN.parquet   image_key (string, source/shard/key) and row (int32), in the order of the tar
    NNNNN.json      the record: a shard counts when this file is there. Source size, time and sha256, VAE, rejects
    settings.json   what all shards of the folder were made with; other settings or another VAE are refused
    manifest.json   the totals; written last, when every shard of --images is finished

Whatever has its final name is whole: it was written under another name, flushed and renamed. Latents that are not
finite (an overflow in bf16 or fp16) are computed again in fp32, and rejected as `nan_latent` when that fails too.
"""

import argparse
import copy
import json
import math
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from data_pipeline import common
from SD_Convert import DEFAULT_VAE, load_vae
from SD_ImageGen import DTYPES, pick_device
from SD_Model import VAE, InputError, run_cli, weights_hash
from SD_Run import sha256

FORMAT = "latents-1"
READ_AHEAD = 2  # shards that are read and hashed ahead of the one being encoded, so that the workers find them in RAM
WARM_UP_S = 3  # of --benchmark


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


class Batch(NamedTuple):
    shard: int  # which of the tars
    number: int  # 0, 1, 2, ... over all tars
    keys: list[str]  # of the pictures, in the order of the tar
    pictures: torch.Tensor  # uint8 [len(keys), size, size, 3], RGB
    rejects: Counter  # by reason: of these samples, and with the last batch of the tar itself
    last: bool  # the last batch of its tar


class PictureStream(IterableDataset):
    """The pictures of tars, in order: batch by batch, no batch crossing from one tar to the next.

    Every worker reads every tar and decodes each workers-th batch only. Reading costs little beside decoding, a shard
    is shared by all workers, and since DataLoader takes from the workers in turn the batches come in order.
    """

    def __init__(self, tars: list[Path], size: int, batch: int):
        self.tars, self.size, self.batch = tars, size, batch

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        mine, workers = (info.id, info.num_workers) if info else (0, 1)
        number = 0
        for shard, tar in enumerate(self.tars):
            samples, of_tar = [], Counter()
            for key, sample in common.iter_samples(tar, of_tar):
                samples.append((key, sample["image"]))
                if len(samples) == self.batch:
                    if number % workers == mine:
                        yield self._decode(shard, number, samples, Counter(), last=False)
                    number, samples = number + 1, []
            if number % workers == mine:
                yield self._decode(shard, number, samples, of_tar, last=True)
            number += 1

    def _decode(self, shard: int, number: int, samples: list, rejects: Counter, last: bool) -> Batch:
        keys, pictures = [], np.empty((len(samples), self.size, self.size, 3), np.uint8)
        for key, data in samples:
            try:
                pictures[len(keys)] = common.decode_image(data, self.size)
                keys.append(key)
            except common.Reject as e:
                rejects[e.reason] += 1
        return Batch(shard, number, keys, torch.from_numpy(pictures[: len(keys)]), rejects, last)


def stream(tars: list[Path], size: int, batch: int, workers: int, pin: bool = False) -> Iterator[Batch]:
    """The batches of PictureStream, decoded in `workers` processes (0: in this one), in order; pinned on request.

    InputError if a worker dies.
    """
    loader = DataLoader(
        PictureStream(tars, size, batch),
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        collate_fn=_as_it_is,
        worker_init_fn=_one_thread,
        prefetch_factor=2 if workers else None,
        multiprocessing_context="spawn" if workers else None,  # a fork of a process whose OpenCV has threads can hang
    )
    try:
        for number, item in enumerate(loader):
            assert item.number == number, "batches out of order"
            yield item
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
    def submit(self, pictures: torch.Tensor):
        """Pictures uint8 [B, H, W, 3] on the CPU -> what collect() wants. On a GPU it does not wait."""
        count = len(pictures)
        if not count:
            return None
        pictures = pictures.to(self.device, non_blocking=True)
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
    """Size in bytes and modification time in ns: what tells quickly that a tar is the same."""
    stat = tar.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def write_json(path: Path, content: dict):
    common.atomic_write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_record(out: Path, shard: str) -> dict | None:
    """The record of a shard; None if there is none, or none that can be read."""
    try:
        return json.loads((out / f"{shard}.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def claim(out: Path, settings: dict):
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
            try:
                os.link(file.name, path)  # unlike a rename it fails if another process was first
            except FileExistsError:
                pass
    old = common.read_json(path)
    for what, before, now in (
        ("a VAE of hash", old.get("vae", {}).get("hash"), settings["vae"]["hash"]),
        *((name, old.get(name), settings[name]) for name in settings if name != "vae"),
    ):
        if before != now:
            raise InputError(
                f"{out} was made with {what} {before}, and {what} {now} is asked for now: give another --out, or "
                "delete that folder first"
            )


def row_shape(settings: dict) -> tuple[int, ...]:
    """The shape of one stored row: [z, h, w], or [2z, h, w] with moments."""
    z, h, w = settings["latent_shape"]
    return (2 * z if settings["kind"] == "moments" else z), h, w


def finished(out: Path, tar: Path, source: str, settings: dict) -> bool:
    """Whether a tar's latents are there, whole, and made from the bytes that the tar has now."""
    record = read_record(out, tar.stem)
    if record is None:
        return False
    if record["source"] != source:
        raise InputError(
            f"{out} holds {tar.stem} of the source {record['source']}, and {tar} belongs to {source}: give another "
            "--out"
        )
    try:
        shape = np.load(out / f"{tar.stem}.npy", mmap_mode="r").shape
        rows = pq.read_metadata(out / f"{tar.stem}.parquet").num_rows
    except (OSError, ValueError, EOFError, pa.ArrowInvalid):  # missing, cut
        return False
    if shape != (record["count"], *row_shape(settings)) or rows != record["count"]:
        return False
    if record["tar"] | stamp(tar) == record["tar"]:
        return True
    if record["tar"]["bytes"] != tar.stat().st_size or record["tar"]["sha256"] != sha256(tar):
        return False
    write_json(out / f"{tar.stem}.json", record | {"tar": record["tar"] | stamp(tar)})  # touched, or copied here
    return True


def write_shard(out: Path, shard: str, latents: np.ndarray, keys: list[str], record: dict):
    """latents fp16 [N, ...] and their N image keys. The record goes first and comes back last: no old record can stand
    beside new latents, whenever this is killed."""
    (out / f"{shard}.json").unlink(missing_ok=True)
    with common.atomic_path(out / f"{shard}.npy") as temporary, open(temporary, "wb") as file:
        np.save(file, latents)  # to an open file: np.save would append .npy to the temporary name
    table = pa.table({"image_key": pa.array(keys, pa.string()), "row": pa.array(range(len(keys)), pa.int32())})
    with common.atomic_path(out / f"{shard}.parquet") as temporary:
        pq.write_table(table, temporary)
    write_json(out / f"{shard}.json", record)


def remove_leftovers(out: Path):
    """Delete the temporary files of processes of this machine that are dead."""
    for path in out.glob(f"*.{socket.gethostname()}-*.tmp"):
        try:
            os.kill(int(path.name.rpartition("-")[2].removesuffix(".tmp")), 0)
        except ProcessLookupError:
            path.unlink(missing_ok=True)
        except (PermissionError, ValueError):  # alive, of another user; not a process's file
            pass


def write_manifest(out: Path, settings: dict, tars: list[Path]) -> dict | None:
    """Write manifest.json from the shards' records. None, and no manifest, while a tar's shard is unfinished: whichever
    process finishes last finds them all."""
    records = {path.stem: read_record(out, path.stem) for path in sorted(out.glob("*.npy"))}
    records = {shard: record for shard, record in records.items() if record}
    for tar in tars:
        record = records.get(tar.stem)
        if record is None or record["tar"] | stamp(tar) != record["tar"]:
            return None
    if extra := len(records) - len(tars):
        print(f"note: {out} also holds {extra} shards of tars that are not among --images; the manifest counts them")
    rejects = Counter()
    for record in records.values():
        rejects.update(record["rejects"])
    manifest = {
        "format": FORMAT,
        **settings,
        "scaled": True,
        "count": sum(record["count"] for record in records.values()),
        "shards": len(records),
        "rejects": dict(sorted(rejects.items())),
    }
    write_json(out / "manifest.json", manifest)
    return manifest


# ---------------------------------------------------------------------------------------------------------------------
# The two loops


def encode(todo: list[Path], sources: dict[Path, str], out: Path, encoder: Encoder, settings: dict, args):
    """Encode the tars `todo` into `out`, one after the other."""
    with (
        ThreadPoolExecutor(1) as ahead,
        common.progress(None, "encoding", "img") as bar,
    ):

        def read(tar: Path):
            before = stamp(tar)
            return before | {"sha256": sha256(tar)}

        reading = [ahead.submit(read, tar) for tar in todo[:READ_AHEAD]]
        latents, keys, rejects = [], [], Counter()
        done = 0

        def keep(batch: Batch, result):
            nonlocal latents, keys, rejects, done
            tar = todo[batch.shard]
            rejects.update(batch.rejects)
            if result is not None:
                values, finite = result
                latents.append(values[finite])
                keys += [k for k, ok in zip(batch.keys, finite, strict=True) if ok]
                if bad := int((~finite).sum()):
                    rejects["nan_latent"] += bad
            bar.update(len(batch.keys))
            if not batch.last:
                return
            source = sources[tar]
            of_tar = reading[batch.shard].result()
            if of_tar | stamp(tar) != of_tar:
                raise InputError(f"{tar} was changed while it was read: run the command again when it is finished")
            record = {
                "source": source,
                "tar": {"path": str(tar.resolve()), **of_tar},
                "vae": settings["vae"]["hash"],
                "settings": {name: settings[name] for name in settings if name != "vae"},
                "count": len(keys),
                "rejects": dict(sorted(rejects.items())),
            }
            rows = np.concatenate(latents) if latents else np.empty((0, *row_shape(settings)), np.float16)
            write_shard(out, tar.stem, rows, [common.image_key(source, tar.stem, key) for key in keys], record)
            latents, keys, rejects = [], [], Counter()
            done += 1
            if batch.shard + READ_AHEAD < len(todo):
                reading.append(ahead.submit(read, todo[batch.shard + READ_AHEAD]))
            bar.total = round(bar.n / done * len(todo))  # shards are about equal: a guess that gets better
            bar.set_postfix(shards=f"{done}/{len(todo)}")

        # One batch is always on its way: while the device works on it, the results of the one before are stored.
        pending = None
        for batch in stream(todo, args.size, args.batch, args.workers, pin=encoder.device.type == "cuda"):
            submitted = encoder.submit(batch.pictures)
            if pending:
                keep(pending[0], encoder.collect(pending[1]))
            pending = batch, submitted
        if pending:
            keep(pending[0], encoder.collect(pending[1]))


def synthetic_tar(folder: Path, size: int, count: int) -> Path:
    """A tar of smooth random JPEGs, 5:4 and a quarter larger than `size`, as photos from the web might be."""
    rng = np.random.default_rng(0)
    with common.ShardWriter(folder / "00000.tar") as shard:
        for i in range(count):
            coarse = rng.integers(0, 256, (size // 16 + 1, size // 16 + 1, 3), np.uint8)
            picture = cv2.resize(coarse, (size * 3 // 2, size * 5 // 4), interpolation=cv2.INTER_CUBIC)
            picture = cv2.add(picture, rng.integers(0, 24, picture.shape, np.uint8))
            data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 92])[1].tobytes()
            shard.add(f"{i:09d}", data, "jpg", "", {})
    return folder / "00000.tar"


def benchmark(encoder: Encoder, args) -> dict:
    """Sustained images/s over args.benchmark seconds, after a warm-up of WARM_UP_S and at least 5 batches."""
    cuda = encoder.device.type == "cuda"

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
    return {
        "img_per_s": round(images / (now - start), 2),
        "images": images,
        "seconds": round(now - start, 2),
        "warmup_s": round(start - begin, 2),
        "batch": args.batch,
        "size": args.size,
        "device": torch.cuda.get_device_name(encoder.device) if cuda else encoder.device.type,
        "dtype": args.dtype,
        "compile": encoder.compiled,
        "decode_workers": args.workers if args.benchmark_decode else None,
        "peak_gib": round(torch.cuda.max_memory_allocated(encoder.device) / 2**30, 2) if cuda else None,
        "torch": torch.__version__,
    }


# ---------------------------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--images", help="folder of tars, or a glob in quotes")
    parser.add_argument("--vae", default=DEFAULT_VAE, help="a VAE: folder, file or hub name")
    parser.add_argument("--out", help="folder for the latents")
    parser.add_argument(
        "--size", type=int, default=512, help="side in pixels of the square that is cut from the middle"
    )
    parser.add_argument("--batch", type=int, help="pictures at once (32 on a GPU, 8 on a CPU)")
    parser.add_argument("--workers", type=int, help="decoding processes; 0: none (a GPU: up to 16; a CPU: 1)")
    parser.add_argument("--device", help="cuda, cuda:1, mps, cpu")
    parser.add_argument("--dtype", choices=list(DTYPES), help="what the VAE computes in (cuda: bf16, others: fp32)")
    parser.add_argument("--source", help="first part of the image keys (default: the folder above images/)")
    parser.add_argument("--moments", action="store_true", help="store mean and log-variance, not the mean alone")
    parser.add_argument(
        "--compile", action="store_true", default=None, help="torch.compile the VAE (cuda: the default)"
    )
    parser.add_argument("--no_compile", dest="compile", action="store_false", help="start sooner, then run slower")
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
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device = pick_device(args.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    cuda = device.type == "cuda"
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args.batch = (32 if cuda else 8) if args.batch is None else args.batch
    args.workers = (min(16, cpus) if cuda else 1) if args.workers is None else args.workers
    args.dtype = ("bf16" if cuda else "fp32") if args.dtype is None else args.dtype
    args.compile = cuda if args.compile is None else args.compile

    vae = load_vae(args.vae)
    factor = vae.config.factor
    if args.size % factor:
        raise InputError(f"this VAE wants --size in multiples of {factor}, found {args.size}")
    pad_to = args.batch if cuda or args.compile else None
    vae_hash = weights_hash(vae)
    encoder = Encoder(vae, device, DTYPES[args.dtype], args.moments, pad_to, args.compile)
    if args.benchmark is not None:
        print(json.dumps(benchmark(encoder, args)))
        return

    tars = common.list_shards(args.images)
    sources = {tar: args.source or common.source_of(tar) for tar in tars}
    if twice := [shard for shard, n in Counter(tar.stem for tar in tars).items() if n > 1]:
        raise InputError(f"{args.images} has more than one {twice[0]}.tar: encode each folder into an --out of its own")
    settings = {
        "vae": {"hash": vae_hash, "name": args.vae, "config": asdict(vae.config)},
        "size": args.size,
        "latent_shape": [vae.config.latent_channels, args.size // factor, args.size // factor],
        "crop": "center",
        "kind": "moments" if args.moments else "mean",
        "dtype": "float16",
        "computed_in": args.dtype,
    }
    out = Path(args.out)
    claim(out, settings)
    remove_leftovers(out)
    mine = tars[rank::world]
    todo = [t for t in mine if not finished(out, t, sources[t], settings)]
    begin = time.perf_counter()
    if todo:
        (out / "manifest.json").unlink(missing_ok=True)  # it says that the folder is complete
        encoder.warm_up(args.size, args.batch)
        encode(todo, sources, out, encoder, settings, args)
    manifest = write_manifest(out, settings, tars)
    work = f"{len(todo)} shards encoded in {time.perf_counter() - begin:.0f} s, {len(mine) - len(todo)} were finished"
    if manifest is None:
        print(f"{work}; other processes are still at work on {out}")
    else:
        rejects = ", ".join(f"{n} {reason}" for reason, n in manifest["rejects"].items()) or "none"
        print(f"{work}; {out} holds {manifest['count']:,} latents in {manifest['shards']} shards; rejects: {rejects}")


if __name__ == "__main__":
    common.run_script(lambda: run_cli(main))
