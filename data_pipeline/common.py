"""What the data scripts share: shards, safe decoding, names, tokenising, and how they stop on bad input.

A script that is run as `python data_pipeline/02_filter.py` says `import common`; a file at the root of the
repository says `from data_pipeline import common`.

An image shard is a WebDataset tar as img2dataset writes it, with its metadata beside it:

    00000.tar           000000000.png, 000000000.txt (caption), 000000000.json (metadata), 000000001.png, ...
    00000.parquet       the metadata of the same pictures, one row each
    00000_stats.json    how many were tried, how many are in, how many were rejected for which reason

Whatever appears under its final name is complete: it was written under another name, flushed and renamed. A script
that was killed leaves only *.tmp files, which the next run of the same command replaces.
"""

import functools
import glob
import hashlib
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import socket
import struct
import sys
import tarfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from tqdm import tqdm

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif")  # what counts as the picture
MAX_PIXELS = 100_000_000  # a picture that claims more is rejected before anything is allocated (300 MB as RGB)
TEXT_LENGTH = 77  # ids of a text, start and end included
FLIP = "#flip"  # after the image key of a picture: its mirror image
MAX_MEMBER_BYTES = 256 << 20  # a tar member that claims more is skipped
MAX_WORDS = 1024  # of four bytes that hash_texts reads: longer text is replaced by its BLAKE2b
MULTIPLIERS = np.random.Generator(np.random.Philox(key=0x5D)).integers(0, 1 << 64, (2, MAX_WORDS + 2), np.uint64)

# Names of the same thing in LAION-400M, -2B, -aesthetic, COYO and img2dataset, best first, compared without case.
ALIASES = {
    "key": ("key",),
    "url": ("url", "image_url"),
    "caption": ("caption", "text"),
    "width": ("original_width", "width"),  # img2dataset's width is that after its own resizing
    "height": ("original_height", "height"),
    "similarity": ("similarity", "clip_similarity", "clip_similarity_vitl14", "clip_similarity_vitb32"),
    "aesthetic": ("aesthetic", "aesthetic_score", "aesthetic_score_laion_v2"),
    "pwatermark": ("pwatermark", "p_watermark", "watermark", "watermark_score"),
    "punsafe": ("punsafe", "p_unsafe", "unsafe", "nsfw_score_opennsfw2"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Stopping, and running a script


def fail(message: str) -> None:
    """Prints `error: <message>` to stderr and ends the program with status 2. For bad input; never returns.

    In a worker process the message goes to the main process, where run_script() calls this again.
    """
    if multiprocessing.parent_process() is not None:
        raise WorkerFailure(message)
    for bar in list(getattr(tqdm, "_instances", ())):  # or the message would stand at the end of a progress bar
        bar.leave = False
        bar.close()
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


class WorkerFailure(Exception):
    """What fail() raises in a worker process."""


class Reject(Exception):
    """A picture that is not used. `reason` is a short word under which it is counted."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


def run_script(main: Callable[[], None]) -> None:
    """Runs a script's main(). A full disk, a folder that may not be written and a dead worker end with one sentence
    and status 2, Ctrl-C with status 130; any other exception is a fault of the program and keeps its traceback."""
    try:
        main()
    except WorkerFailure as failure:
        fail(str(failure))
    except BrokenProcessPool:
        fail("a worker process was killed, probably for lack of memory: run the command again with fewer --workers")
    except OSError as error:
        fail(f"{error.filename or 'the system'}: {error.strerror or error}: put that right and run the command again")
    except KeyboardInterrupt:
        print("stopped: run the same command again to go on", file=sys.stderr)
        raise SystemExit(130) from None


def _follow_parent() -> None:
    """In a worker process: one thread for OpenCV, and a thread that ends this process when its parent has died."""
    cv2.setNumThreads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def end_with_parent() -> None:
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def parallel(function: Callable, jobs: Iterable[tuple], workers: int) -> Iterator:
    """Yields function(*job) for each job as it is done, in any order; in this process when workers <= 1.

    The first exception ends it. At most two jobs a worker wait in the queue, so `jobs` may be long.
    """
    if workers <= 1:
        for job in jobs:
            yield function(*job)
        return
    jobs = iter(jobs)
    fresh = multiprocessing.get_context("spawn")  # forking a process whose libraries have started threads may hang it
    with ProcessPoolExecutor(workers, fresh, initializer=_follow_parent) as pool:
        waiting = {pool.submit(function, *job) for job in itertools.islice(jobs, 2 * workers)}
        try:
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
                waiting.update(pool.submit(function, *job) for job in itertools.islice(jobs, len(done)))
        finally:
            pool.shutdown(cancel_futures=True)


def progress(total: int | None, description: str, unit: str) -> tqdm:
    """A progress bar on stderr; one line every ten seconds where stderr is a file."""
    interval = 0.2 if sys.stderr.isatty() else 10
    return tqdm(total=total, desc=description, unit=unit, unit_scale=True, mininterval=interval)


# ---------------------------------------------------------------------------------------------------------------------
# Files that are complete or not there


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Gives a temporary path beside `path`; what was written there is flushed and renamed to `path` at the end of the
    block, or deleted if the block raises. Several processes may write the same file at once: each has its own
    temporary file, and the last one to finish wins."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    for left in path.parent.glob(f"{glob.escape(path.name)}.{glob.escape(socket.gethostname())}-*.tmp"):
        if not _is_running(left.suffixes[-2].rpartition("-")[2]):
            left.unlink(missing_ok=True)  # of a process that was killed


def _is_running(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def atomic_write(path: str | Path, data: bytes | str) -> None:
    """Writes a whole file under atomic_path."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(temporary: Path, folder: Path) -> None:
    """Renames `temporary` to `folder`, first moving an older `folder` out of the way, which is deleted last."""
    for path in sorted(temporary.rglob("*")):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        if old.exists():
            shutil.rmtree(old)
        os.rename(folder, old)
    os.rename(temporary, folder)
    _sync_folder(folder.parent)
    if old.exists():
        shutil.rmtree(old)


def make_folder(path: str | Path) -> Path:
    """Makes a folder (and those above it), or fails in one sentence."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"cannot make the folder {path}: {error.strerror}: give a folder that may be written")
    return Path(path)


def read_json(path: str | Path) -> dict:
    """A JSON object from a file, or fails in one sentence."""
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        fail(f"cannot read {path} ({error}): make it again with the script that wrote it")
    if not isinstance(content, dict):
        fail(f"{path} should hold a JSON object but holds a {type(content).__name__}: make it again")
    return content


def write_manifest(folder: str | Path, manifest: dict) -> None:
    """Writes manifest.json into a folder. It holds no times, so that the same data give the same bytes."""
    atomic_write(Path(folder) / "manifest.json", json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")


def claim_folder(folder: str | Path, script: str, settings: dict) -> None:
    """Makes an output folder with a manifest that says `complete: false`, or goes on with one that is there.

    Fails if the folder's manifest was written by another script or with other settings, or if it holds files and no
    manifest: old and new data are never mixed.
    """
    folder = make_folder(folder)
    settings = json.loads(json.dumps(settings))  # as they will be read back: tuples become lists
    if (folder / "manifest.json").exists():
        old = read_json(folder / "manifest.json")
        if old.get("script") != script:
            fail(f"{folder} was written by {old.get('script')}, not by {script}: give another --out")
        before = old.get("settings", {})
        for name in {**before, **settings}:
            if before.get(name) != settings.get(name):
                fail(
                    f"{folder} was made with {name} = {before.get(name)}, and {name} = {settings.get(name)} is asked "
                    "for now: give another --out, or delete that folder first"
                )
        return
    strangers = [p.name for p in folder.iterdir() if not p.name.endswith(".tmp")]
    if strangers:
        fail(f"{folder} holds files ({strangers[0]}) but no manifest.json: give a new or empty folder as --out")
    write_manifest(folder, {"script": script, "settings": settings, "complete": False})


def check_template(template: str, fields: tuple[str, ...]) -> None:
    """Fails unless a caption template can be filled with these fields."""
    wanted = " and ".join(f"{{{field}}}" for field in fields)
    try:
        caption = template.format(**dict.fromkeys(fields, "x"))
    except (KeyError, IndexError, ValueError, AttributeError):
        fail(f"the template {template!r} cannot be filled in: it may hold {wanted} and no other braces")
    if not caption.strip():
        fail(f"the template {template!r} gives an empty caption: it may hold {wanted}")


def fingerprint(*paths: Path) -> str:
    """A short hash of the names, sizes and times of files: changes when one of them is written anew."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


# ---------------------------------------------------------------------------------------------------------------------
# Names


def list_files(path_or_glob: str, suffix: str) -> list[Path]:
    """The files with that suffix in a folder, of a glob, or one file, sorted by path; fails if there is none."""
    if os.path.isdir(path_or_glob):
        found = glob.glob(os.path.join(glob.escape(path_or_glob), "*" + suffix))
    else:
        found = [name for name in glob.glob(path_or_glob, recursive=True) if name.endswith(suffix)]
    if not found:
        fail(f"no {suffix} files in {path_or_glob}: give a folder that holds some, or a glob in quotes")
    return sorted(Path(name) for name in found)


def list_shards(path_or_glob: str) -> list[Path]:
    """The tars of a folder or glob, sorted by path; fails if there is none."""
    return list_files(path_or_glob, ".tar")


def refuse_repeated_names(paths: list[Path]) -> None:
    """Fails if two inputs have the same file name, for then their outputs would have it too."""
    first: dict[str, Path] = {}
    for path in paths:
        if first.setdefault(path.name, path) != path:
            fail(f"{first[path.name]} and {path} have the same name: run once for each folder, with its own --out")


def refuse_strangers(folder: Path, suffix: str, expected: set[str]) -> None:
    """Fails if a folder holds finished outputs that none of the inputs makes: old and new data are never mixed."""
    for path in sorted(folder.glob("*" + suffix)):
        if path.name not in expected:
            fail(f"{path} comes from none of the inputs, as if they had changed: delete it, or give another --out")


def source_of(tar_path: str | Path) -> str:
    """The name of the source a tar belongs to: the folder above `images` (laion for data/laion/images/00000.tar), or
    the tar's own folder if that has another name."""
    folder = Path(tar_path).resolve().parent
    return folder.parent.name if folder.name == "images" else folder.name


def image_key(source: str, shard: str, key: str) -> str:
    """The name of a picture over all sources, e.g. laion/00012/000120345."""
    return f"{source}/{shard}/{key}"


def key_fraction(key: str) -> float:
    """A number in [0, 1) that belongs to this key for ever: splits and capped subsets are made by comparing it."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48


def find_column(names: Iterable[str], canonical: str) -> str | None:
    """Which of `names` is the column that ALIASES calls `canonical`; None if there is none."""
    return _find_column(tuple(names), canonical)


@functools.lru_cache(maxsize=1024)
def _find_column(names: tuple[str, ...], canonical: str) -> str | None:
    by_lower = {}
    for name in names:
        by_lower.setdefault(name.lower(), name)
    return next((by_lower[alias] for alias in ALIASES[canonical] if alias in by_lower), None)


def metadata_value(metadata: dict, canonical: str):
    """The value that a sample's metadata has for a name of ALIASES; None if it has none, or NaN."""
    name = find_column(metadata, canonical)
    value = metadata[name] if name is not None else None
    return None if isinstance(value, float) and math.isnan(value) else value


def hash_texts(values: pa.Array) -> np.ndarray:
    """A 64-bit hash of each text (large_string, no nulls), uint64 [rows].

    MULTILINEAR of Lemire and Kaser, "Strongly universal string hashing is fast" (2014), over words of four bytes and
    the length, twice, 32 bits of each: two texts collide with probability 2^-64, any two of 10 million with 3e-6.
    """
    values = values.cast(pa.large_binary())
    if len(values) and pc.max(pc.binary_length(values)).as_py() > 4 * MAX_WORDS:
        short = (t if len(t) <= 4 * MAX_WORDS else hashlib.blake2b(t).digest() for t in values.to_pylist())
        values = pa.array(short, pa.large_binary())
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset :][: len(values) + 1]
    starts, lengths = offsets[:-1], np.diff(offsets)
    data = np.concatenate([np.frombuffer(values.buffers()[2] or b"", np.uint8), np.zeros(4, np.uint8)])
    words = np.ndarray(len(data) - 3, "<u4", data, strides=(1,))  # the four bytes at each place
    ends = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF, 0xFFFFFFFF], np.uint64)  # what of a word belongs to the text
    sums = [a[0] + a[1] * lengths.astype(np.uint64) for a in MULTIPLIERS]
    rows, word = np.flatnonzero(lengths), 0
    while len(rows):
        left = lengths[rows] - 4 * word
        value = words[starts[rows] + 4 * word] & ends[np.minimum(left, 4)]
        for a, total in zip(MULTIPLIERS, sums):
            total[rows] += a[word + 2] * value
        rows, word = rows[left > 4], word + 1
    return sums[0] >> np.uint64(32) << np.uint64(32) | sums[1] >> np.uint64(32)


class Hashes:
    """A set of 64-bit hashes in 8 bytes each: a large sorted array and a small one of the recent ones."""

    RECENT = 1 << 20

    def __init__(self):
        self.sorted = self.recent = np.empty(0, np.uint64)

    def contains(self, hashes: np.ndarray) -> np.ndarray:
        """bool [len(hashes)]."""
        order = np.argsort(hashes)  # neighbours are then looked up in the same piece of memory
        found = np.zeros(len(hashes), bool)
        for part in (self.sorted, self.recent):
            if len(part):
                places = np.searchsorted(part, hashes[order])
                found[order] |= part[np.minimum(places, len(part) - 1)] == hashes[order]
        return found

    def add(self, hashes: np.ndarray) -> None:
        """Adds hashes that are not in it."""
        hashes = np.unique(hashes)
        self.recent = np.insert(self.recent, np.searchsorted(self.recent, hashes), hashes)
        if len(self.recent) > max(self.RECENT, len(self.sorted) // 16):
            self.sorted = np.insert(self.sorted, np.searchsorted(self.sorted, self.recent), self.recent)
            self.recent = np.empty(0, np.uint64)

    def add_new(self, hashes: np.ndarray) -> np.ndarray:
        """Adds hashes; bool [len(hashes)]: whether each was new, the first of equal ones counting as new."""
        first = np.zeros(len(hashes), bool)
        first[np.unique(hashes, return_index=True)[1]] = True
        new = first & ~self.contains(hashes)
        self.add(hashes[new])
        return new


# ---------------------------------------------------------------------------------------------------------------------
# Writing shards


class ShardWriter:
    """Writes one shard: `with ShardWriter(folder / "00000.tar") as shard: shard.add(...)`.

    The tar is renamed into place last, so a tar that exists has its parquet and its stats beside it, and a shard whose
    tar exists is finished. The bytes depend on what was added alone (no times, no user names).
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.rows: list[dict] = []
        self.status: Counter = Counter()

    def __enter__(self) -> "ShardWriter":
        self._context = atomic_path(self.path)
        self._tar = tarfile.open(self._context.__enter__(), "w", format=tarfile.PAX_FORMAT)
        return self

    def add(self, key: str, image: bytes, extension: str, caption: str, metadata: dict) -> None:
        """Adds <key>.<extension>, <key>.txt and <key>.json. The JSON and the parquet row hold key, caption, the
        metadata and the SHA-256 of the picture's bytes."""
        if "." in key or "/" in key or not key:
            raise ValueError(f"a key is a name without dots and slashes, not {key!r}")
        row = {"key": key, "caption": caption, **metadata, "sha256": hashlib.sha256(image).hexdigest()}
        self._member(f"{key}.{extension}", image)
        self._member(f"{key}.txt", caption.encode())
        self._member(f"{key}.json", json.dumps(row, ensure_ascii=False).encode())
        self.rows.append(row)
        self.status["success"] += 1

    def reject(self, reason: str) -> None:
        """Counts a picture that is left out."""
        self.status[reason] += 1

    def _member(self, name: str, data: bytes) -> None:
        info = tarfile.TarInfo(name)  # its defaults: mtime 0, user and group 0, mode 0644
        info.size = len(data)
        self._tar.addfile(info, io.BytesIO(data))

    def __exit__(self, kind, value, traceback) -> None:
        self._tar.close()
        if kind is None:
            names = list(dict.fromkeys(name for row in self.rows for name in row))
            table = pa.table({name: [row.get(name) for row in self.rows] for name in names})
            with atomic_path(self.path.with_suffix(".parquet")) as temporary:
                pq.write_table(table, temporary)
            stats = {"count": self.status.total(), "successes": self.status["success"], "status_dict": self.status}
            atomic_write(stats_path(self.path), json.dumps(stats) + "\n")
        self._context.__exit__(kind, value, traceback)


def stats_path(tar_path: Path) -> Path:
    """00000_stats.json of 00000.tar."""
    return tar_path.with_name(tar_path.stem + "_stats.json")


def build_shards(
    out: str, script: str, settings: dict, items: Sequence, job: Callable, extra: tuple, shard_size: int, workers: int
) -> dict:
    """Writes items into <out>/images/00000.tar, 00001.tar, ... with `shard_size` items each, and the manifest.

    job(tar_path, shard_number, items_of_shard, *extra) writes one shard with ShardWriter and returns how many items it
    has dealt with; it must be a module's function, for it runs in worker processes. Finished shards are left alone.
    Returns the manifest: script, settings, complete, shards, pictures, rejected (by reason).
    """
    folder = make_folder(out) / "images"
    claim_folder(folder, script, settings)
    chunks = [items[i : i + shard_size] for i in range(0, len(items), shard_size)]
    paths = [folder / f"{number:05d}.tar" for number in range(len(chunks))]
    todo = [(paths[n], n, chunk, *extra) for n, chunk in enumerate(chunks) if not paths[n].exists()]
    with progress(sum(len(chunk) for _, _, chunk, *_ in todo), script, "img") as bar:
        for count in parallel(job, todo, workers):
            bar.update(count)
    status = Counter()
    for path in paths:
        status.update(read_json(stats_path(path))["status_dict"])
    manifest = {
        "script": script,
        "settings": settings,
        "complete": True,
        "shards": len(paths),
        "pictures": status.pop("success", 0),
        "rejected": dict(sorted(status.items())),
    }
    write_manifest(folder, manifest)
    return manifest


# ---------------------------------------------------------------------------------------------------------------------
# Reading shards

_MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")  # directories/basename to its first dot, then the extension


def iter_samples(
    tar_path: str | Path, rejects: Counter | None = None, images: bool = True
) -> Iterator[tuple[str, dict]]:
    """Yields (key, sample) for each picture of a tar, in order.

    sample = {"image": bytes or None, "ext": "jpg" or None, "txt": str or None, "json": dict}. As in WebDataset, members
    that follow each other and share a name up to the first dot of the basename are one sample. A sample without a
    picture has ext None. With images=False the pictures' bytes are skipped (image None, ext set).

    Nothing is written to disk. What is left out is counted in `rejects` by reason: link (links and devices),
    unsafe_name (absolute, with '..', not UTF-8), too_large, duplicate_key (the first one is kept), bad_json (the sample
    is yielded with {}), and cut_tar: the file ends in the middle, or has damage; what came whole before that is
    yielded. Without `rejects`, a line on stderr says it.
    """
    tar_path = Path(tar_path)
    counts = Counter() if rejects is None else rejects
    before = counts.copy()
    seen: set[str] = set()
    parts: set[str] | None = None  # what the first sample had: the last one of a cut tar is whole if it has that too
    key, sample = None, {}

    def is_new() -> bool:
        if key is None:
            return False
        if key in seen:
            counts["duplicate_key"] += 1
            return False
        seen.add(key)
        return True

    def parts_of(members: dict) -> set[str]:
        return {"image" if extension in IMAGE_EXTENSIONS else extension for extension in members}

    try:
        for name, data in _iter_members(tar_path, counts, images):
            match = _MEMBER.fullmatch(name)
            if not match:
                continue  # a file without an extension, or a hidden one: not a part of a sample
            new_key, extension = match[1], match[2].lower()
            if new_key != key:
                if is_new():
                    parts = parts or parts_of(sample)
                    yield key, _finish_sample(sample, counts)
                key, sample = new_key, {}
            if extension in sample or (extension in IMAGE_EXTENSIONS and any(e in IMAGE_EXTENSIONS for e in sample)):
                counts["duplicate_key"] += 1
            else:
                sample[extension] = data
        if is_new():
            yield key, _finish_sample(sample, counts)
    except tarfile.TarError:
        counts["cut_tar"] += 1
        if parts_of(sample) == (parts or {"image", "txt", "json"}) and is_new():
            yield key, _finish_sample(sample, counts)
    if rejects is None and counts != before:
        print(f"warning: {tar_path}: left out: {dict(counts)}", file=sys.stderr)


def _iter_members(tar_path: Path, counts: Counter, images: bool) -> Iterator[tuple[str, bytes | None]]:
    """(name, bytes) of the plain files of a tar; raises tarfile.TarError where the file is cut or damaged."""
    try:
        tar = tarfile.open(tar_path, "r:")
    except tarfile.TarError as error:
        raise tarfile.ReadError(str(error)) from None
    except OSError as error:
        fail(f"cannot read {tar_path}: {error.strerror}: give a tar that is there and may be read")
    with tar:
        for member, name in plain_members(tar, counts, _is_safe):
            skip = not images and name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS
            yield name, None if skip else tar.extractfile(member).read()
        # tarfile ends silently at a damaged header: a whole tar has a block of zeros there
        tar.fileobj.seek(tar.offset)
        if tar.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
            raise tarfile.ReadError("no end of archive")


def plain_members(
    tar: tarfile.TarFile, counts: Counter, is_safe: Callable[[str], bool]
) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """The plain files of an open tar and their names. Others are counted: link, unsafe_name, too_large."""
    for member in tar:
        tar.members.clear()  # or the list grows with the tar
        name = member.name.removeprefix("./")
        if member.isdir():
            continue
        if not member.isreg():
            counts["link"] += 1
        elif not is_safe(name):
            counts["unsafe_name"] += 1
        elif member.size > MAX_MEMBER_BYTES:
            counts["too_large"] += 1
        else:
            yield member, name


def _is_safe(name: str) -> bool:
    """Whether a key can be made of a name: inside the tar's folder, and UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return not name.startswith("/") and ".." not in name.split("/") and "\0" not in name


def _finish_sample(members: dict[str, bytes | None], counts: Counter) -> dict:
    extension = next((e for e in members if e in IMAGE_EXTENSIONS), None)
    text = members.get("txt")
    metadata = {}
    if "json" in members:
        try:
            metadata = json.loads(members["json"])
        except (ValueError, RecursionError):
            metadata = None
        if not isinstance(metadata, dict):
            counts["bad_json"] += 1
            metadata = {}
    return {
        "image": members[extension] if extension else None,
        "ext": extension,
        "txt": None if text is None else text.decode("utf-8-sig", "replace").strip(),
        "json": metadata,
    }


def caption_of(sample: dict) -> str:
    """A sample's caption: its .txt, else the caption of its metadata; '' if it has none (null is never 'nan')."""
    if sample["txt"] is not None:
        return sample["txt"]
    caption = metadata_value(sample["json"], "caption")
    return clean_text(caption).strip() if isinstance(caption, str) else ""


def clean_text(text: str) -> str:
    """Text that can be stored as UTF-8: JSON may hold halves of characters, which become '?'."""
    return text.encode("utf-8", "replace").decode()


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


class Header(NamedTuple):
    kind: str  # jpg, png or webp
    width: int  # pixels as stored, before any rotation
    height: int
    orientation: int  # EXIF, 1 to 8; 5 to 8 swap width and height
    transparent: bytes | None = None  # PNG: the one grey level or colour that is transparent (big-endian 16 bit each)
    depth: int = 8  # PNG: bits a channel


def read_header(data: bytes | None) -> Header:
    """Reads a picture's header and checks that its file is whole; decodes nothing. Raises Reject with the reason
    no_image, empty, html, unsupported_format (GIF, BMP, TIFF, AVIF, ... and anything unknown), animated, truncated,
    cmyk_without_adobe, or corrupt."""
    if data is None:
        raise Reject("no_image")
    if not data.strip(b"\0"):
        raise Reject("empty")
    try:
        if data[:2] == b"\xff\xd8":
            return _jpeg_header(data)
        if data[:8] == b"\x89PNG\r\n\x1a\n":
            return _png_header(data)
        if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
            return _webp_header(data)
    except (struct.error, IndexError):
        raise Reject("truncated") from None
    if b"<" == data.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]:
        raise Reject("html")
    raise Reject("unsupported_format")


_JPEG_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")  # inside a scan, FF00 and FFD0..FFD7 are data and restarts
_JPEG_FRAME = {0xC0, 0xC1, 0xC2, 0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF}


def _jpeg_header(data: bytes) -> Header:
    # Walks all segments up to the end-of-image marker: a thumbnail inside a segment has such a marker too.
    position, size, components, orientation, adobe, scans = 2, None, 3, 1, False, 0
    while True:
        match = _JPEG_MARKER.search(data, position)
        if not match:
            raise Reject("truncated")
        marker, position = data[match.end() - 1], match.end()
        if marker == 0xD9:
            break
        if marker in (0x01, 0xD8):  # markers without a length
            continue
        (length,) = struct.unpack_from(">H", data, position)
        segment = data[position + 2 : position + length]
        if length < 2:
            raise Reject("corrupt")
        if position + length > len(data):
            raise Reject("truncated")
        position += length
        if marker in _JPEG_FRAME and size is None:
            height, width, components = struct.unpack_from(">HHB", segment, 1)
            size = width, height
        elif marker == 0xE1 and segment.startswith(b"Exif\0\0"):
            orientation = _exif_orientation(segment[6:])
        elif marker == 0xEE and segment.startswith(b"Adobe"):
            adobe = True
        elif marker == 0xDA:
            scans += 1
    if size is None or not scans:
        raise Reject("corrupt")
    if components == 4 and not adobe:  # whether its inks are inverted is unknown, and OpenCV assumes that they are
        raise Reject("cmyk_without_adobe")
    return Header("jpg", *size, orientation)


def _png_header(data: bytes) -> Header:
    width, height, depth, colour_type = struct.unpack_from(">IIBB", data, 16)
    position, orientation, transparent, pixels = 8, 1, None, False
    while True:
        length, name = struct.unpack_from(">I4s", data, position)
        end = position + 12 + length
        if end > len(data):
            raise Reject("truncated")
        body = data[position + 8 : end - 4]
        if position == 8 and name != b"IHDR":
            raise Reject("corrupt")
        if name in (b"IHDR", b"PLTE", b"IDAT", b"tRNS"):
            if zlib.crc32(data[position + 4 : end - 4]) != struct.unpack_from(">I", data, end - 4)[0]:
                raise Reject("corrupt")
        if name == b"IEND":
            break
        if name == b"acTL":
            raise Reject("animated")
        if name == b"eXIf":
            orientation = _exif_orientation(body)
        if name == b"tRNS" and colour_type in (0, 2):
            transparent = body
        pixels = pixels or name == b"IDAT"
        position = end
    if not pixels:
        raise Reject("corrupt")
    return Header("png", width, height, orientation, transparent, depth)


def _webp_header(data: bytes) -> Header:
    (riff_size,) = struct.unpack_from("<I", data, 4)
    if riff_size + 8 > len(data):
        raise Reject("truncated")
    position, size, orientation = 12, None, 1
    while position + 8 <= riff_size + 8:
        name, length = struct.unpack_from("<4sI", data, position)
        body = data[position + 8 : position + 8 + length]
        if len(body) < length:
            raise Reject("truncated")
        if name in (b"ANIM", b"ANMF"):
            raise Reject("animated")
        if name == b"VP8X":
            if body[0] & 2:
                raise Reject("animated")
            size = int.from_bytes(body[4:7], "little") + 1, int.from_bytes(body[7:10], "little") + 1
        elif name == b"VP8 " and size is None:
            width, height = struct.unpack_from("<HH", body, 6)
            size = width & 0x3FFF, height & 0x3FFF
        elif name == b"VP8L" and size is None:
            (bits,) = struct.unpack_from("<I", body, 1)
            size = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        elif name == b"EXIF":
            orientation = _exif_orientation(body.removeprefix(b"Exif\0\0"))
        position += 8 + length + length % 2
    if size is None:
        raise Reject("corrupt")
    return Header("webp", *size, orientation)


def _exif_orientation(tiff: bytes) -> int:
    """The orientation tag (1 to 8) of EXIF data; 1 if there is none or the data make no sense."""
    order = {b"II": "<", b"MM": ">"}.get(tiff[:2])
    try:
        (start,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, start)
        for entry in range(entries):
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, start + 2 + 12 * entry)
            if tag == 0x0112:
                return value if 1 <= value <= 8 else 1
    except (struct.error, TypeError):
        pass
    return 1


def decode_image(data: bytes | None, size: int | None = None, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decodes a JPEG, PNG or WebP to RGB uint8 [H, W, 3]; with `size`, resized and cropped to [size, size, 3].

    EXIF rotation is applied; grey, palette, CMYK and 16-bit pictures become 8-bit RGB; transparency is composited on
    white. Colour profiles are ignored: values are taken as sRGB. Raises Reject with the reasons of read_header, and
    too_many_pixels (claimed by the header: nothing that large is allocated) or corrupt (it does not decode).
    """
    header = read_header(data)
    if header.width * header.height > max_pixels:
        raise Reject("too_many_pixels")
    if header.width * header.height == 0:
        raise Reject("corrupt")
    # Orientation is applied below, for all formats alike: which of them OpenCV rotates depends on its version.
    plain = header.kind == "jpg"
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION if plain else cv2.IMREAD_UNCHANGED
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        image = None
    if image is None or image.shape[:2] != (header.height, header.width):
        raise Reject("corrupt")
    image = _to_rgb(image, header)
    image = _upright(image, header.orientation)
    return np.ascontiguousarray(image) if size is None else resize_crop(image, size)


def _to_rgb(image: np.ndarray, header: Header) -> np.ndarray:
    """What OpenCV decoded (uint8 or uint16, [H, W] or [H, W, 1..4], BGR order) as RGB uint8 on white."""
    if image.ndim == 2:
        image = image[:, :, None]
    alpha = None
    if image.shape[2] in (2, 4):
        image, alpha = image[:, :, :-1], image[:, :, -1:]
    if image.shape[2] == 1:
        image = np.repeat(image, 3, axis=2)
    image = image[:, :, ::-1]
    if alpha is None and header.transparent is not None:
        clear = np.frombuffer(header.transparent[: len(header.transparent) // 2 * 2], ">u2")  # 1 or 3 values
        if header.depth < 8:
            clear = clear * (255 // (2**header.depth - 1))
        alpha = np.where((image == clear).all(axis=2, keepdims=True), 0, np.iinfo(image.dtype).max)
    if alpha is not None and alpha.min() < np.iinfo(image.dtype).max:
        top = np.float32(np.iinfo(image.dtype).max)
        image = image * (255 / top)
        image = 255 + (image - 255) * (alpha / top)  # white where nothing covers it
        return np.rint(image).astype(np.uint8)
    if image.dtype == np.uint16:
        return ((image.astype(np.uint32) + 128) // 257).astype(np.uint8)
    return image


def _upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """Undoes the rotation and mirroring that an EXIF orientation of 1 to 8 stands for."""
    if orientation in (5, 6, 7, 8):
        image = image.transpose(1, 0, 2)
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    return image


def resize_crop(image: np.ndarray, size: int, crop: str = "center") -> np.ndarray:
    """uint8 [H, W, 3] -> [size, size, 3]: the largest square in the middle, scaled by area averaging (down) or cubic
    interpolation (up). Cropping comes first, so that a very long picture costs no more than a square one."""
    if crop != "center":
        raise ValueError(f"crop must be 'center', not {crop!r}")
    return np.ascontiguousarray(cut(image, (size, size)))


def cut(image: np.ndarray, size: tuple[int, int], at: float | None = None) -> np.ndarray:
    """uint8 [H, W, 3] -> [*size, 3]: the largest part of size's aspect, from the middle, or with `at` in [0, 1) that
    far from the top or left; scaled by area averaging (down) or cubic interpolation (up)."""
    height, width = image.shape[:2]
    high = min(height, max(1, round(width * size[0] / size[1])))
    wide = min(width, max(1, round(height * size[1] / size[0])))
    top, left = (rest // 2 if at is None else int(at * (rest + 1)) for rest in (height - high, width - wide))
    image = image[top : top + high, left : left + wide]
    if (high, wide) != size:
        method = cv2.INTER_AREA if high > size[0] else cv2.INTER_CUBIC
        image = cv2.resize(np.ascontiguousarray(image), size[::-1], interpolation=method)
    return image


def encode_jpeg(image: np.ndarray) -> bytes:
    """RGB uint8 [H, W, 3] as a JPEG of quality 95."""
    ok, data = cv2.imencode(".jpg", np.ascontiguousarray(image[:, :, ::-1]), [cv2.IMWRITE_JPEG_QUALITY, 95])
    if not ok:
        raise ValueError(f"cannot encode an image of shape {image.shape}")
    return data.tobytes()


def encode_png(image: np.ndarray) -> bytes:
    """RGB uint8 [H, W, 3] as a PNG."""
    ok, data = cv2.imencode(".png", np.ascontiguousarray(image[:, :, ::-1]), [cv2.IMWRITE_PNG_COMPRESSION, 3])
    if not ok:
        raise ValueError(f"cannot encode an image of shape {image.shape}")
    return data.tobytes()


# ---------------------------------------------------------------------------------------------------------------------
# Tokenising


def load_tokenizer(path_or_name: str):
    """A transformers tokenizer from a folder or a hub name, or fails in one sentence."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path_or_name)
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".") if str(error).strip() else type(error).__name__
        fail(
            f"cannot load a tokenizer from {path_or_name} ({reason}): give a folder that holds one (as made by "
            "04a_make_tokenizer.py), or a name on a hub that can be reached"
        )
    return tokenizer


def text_length(tokenizer) -> int:
    """L, the ids of a text: 77 as CLIP, or fewer if the tokenizer asks for it."""
    return min(TEXT_LENGTH, tokenizer.model_max_length)


def tokenize(tokenizer, texts: list[str]) -> np.ndarray:
    """Token ids int32 [N, L], L = text_length(tokenizer): start, text, end, padding. Longer text is cut so that the row
    still ends with the end token. The same call as the generator's, so training and painting see the same ids."""
    length = text_length(tokenizer)
    rows = tokenizer(list(texts), padding="max_length", truncation=True, max_length=length)
    return np.array(rows["input_ids"], np.int32).reshape(-1, length)


def tokenizer_hash(tokenizer) -> str:
    """SHA-256 of what a tokenizer does: its vocabulary, its length, and the ids it gives to some difficult texts. The
    same over versions of the libraries and ways of saving, as long as the ids are the same."""
    probes = ["", "a photo of an astronaut riding a horse", "Résumé  you've 12,5 %\n🙂", "ÀÉ naïve CO2 don't"]
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.pad_token_id, tokenize(tokenizer, probes).tolist()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
