"""WebDataset tars of pictures and captions: names and keys, reading, writing."""

import hashlib
import io
import json
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sd import usertext
from sd.errors import InputError
from sd.files import (
    atomic_path,
    atomic_write,
    claim_folder,
    counted,
    fail_empty,
    list_files,
    make_folder,
    read_json,
    write_manifest,
)
from sd.folders import IMAGE_EXTENSIONS, is_hidden, is_picture
from sd.metadata import metadata_value
from sd.pictures import Reject
from sd.text import clean_text
from sd.workers import parallel, progress

CAPTION_EXTENSIONS = ("txt", "caption")  # what counts as its caption: of cat.jpg cat.txt, or cat.jpg.txt

FLIP = "#flip"  # after the image key of a picture: its mirror image

MAX_MEMBER_BYTES = 256 << 20  # a tar member that claims more is skipped


def list_shards(path_or_glob: str) -> list[Path]:
    """The tars of a folder or glob, sorted by path; fails if there is none."""
    return list_files(path_or_glob, ".tar")


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
    out: str,
    script: str,
    settings: dict,
    items: Sequence,
    job: Callable,
    extra: tuple,
    shard_size: int,
    workers: int,
    left_out: Counter | None = None,
) -> dict:
    """Writes items into <out>/images/00000.tar, 00001.tar, ... with `shard_size` items each, and the manifest.

    job(tar_path, shard_number, items_of_shard, *extra) writes one shard with ShardWriter and returns how many items it
    has dealt with; it must be a module's function, for it runs in worker processes. Finished shards are left alone.
    left_out counts by reason what is not among the items; it is added to what the shards rejected.
    Returns the manifest: script, settings, complete, shards, pictures, rejected (by reason). Fails if no item has
    become a picture.
    """
    folder = make_folder(out) / "images"
    claim_folder(folder, script, settings)
    chunks = [items[i : i + shard_size] for i in range(0, len(items), shard_size)]
    paths = [folder / f"{number:05d}.tar" for number in range(len(chunks))]
    todo = [(paths[n], n, chunk, *extra) for n, chunk in enumerate(chunks) if not paths[n].exists()]
    with progress(sum(len(chunk) for _, _, chunk, *_ in todo), script, "img") as bar:
        for count in parallel(job, todo, workers):
            bar.update(count)
    status = Counter(left_out)
    for path in paths:
        status.update(read_json(stats_path(path))["status_dict"])
    manifest = {
        "script": script,
        "settings": settings,
        "complete": True,
        "shards": len(paths),
        "pictures": status.pop("success", 0),
        "rejected": {reason: count for reason, count in sorted(status.items()) if count},
    }
    if not manifest["pictures"]:
        made = [p for path in paths for p in (path, path.with_suffix(".parquet"), stats_path(path))]
        fail_empty(folder, manifest, made, f"no picture came into {folder} (rejected: {counted(status)}): see to these")
    write_manifest(folder, manifest)
    return manifest


_MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")  # directories/basename to its first dot, then the extension


def iter_samples(
    tar_path: str | Path, rejects: Counter | None = None, images: bool = True, encoding: str | None = None
) -> Iterator[tuple[str, dict]]:
    """Yields (key, sample) for each picture of a tar, in order.

    sample = {"image": bytes or None, "ext": "jpg" or None, "txt": str or None, "json": dict}. As in WebDataset, members
    that follow each other and share a name up to the first dot of the basename are one sample. A sample without a
    picture has ext None. With images=False the pictures' bytes are skipped (image None, ext set). "txt" is the caption
    of key.jpg.txt, key.jpg.caption, key.txt or key.caption, the first that is there, read as UTF-8, UTF-16 with its
    mark, or `encoding`; where it cannot be read, it is None, and the sample has "unreadable": True.

    Nothing is written to disk. What is left out is counted in `rejects` by reason: link (links and devices),
    unsafe_name (absolute, with '..', not UTF-8), too_large, hidden (pictures in hidden and system folders),
    duplicate_key (the first one is kept), bad_json (the sample is yielded with {}), and cut_tar: the file ends in the
    middle, or has damage; what came whole before that is yielded. Without `rejects`, a line on stderr says it.
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
        for name, data, _ in iter_members(tar_path, counts, images):
            match = _MEMBER.fullmatch(name)
            if is_hidden(name):
                counts.update({"hidden": 1} if is_picture(name) else {})
                continue
            if not match:
                continue  # a file without an extension, or a hidden one: not a part of a sample
            new_key, extension = match[1], match[2].lower()
            if new_key != key:
                if is_new():
                    parts = parts or parts_of(sample)
                    yield key, _finish_sample(sample, counts, encoding)
                key, sample = new_key, {}
            if extension in sample or (extension in IMAGE_EXTENSIONS and any(e in IMAGE_EXTENSIONS for e in sample)):
                counts["duplicate_key"] += 1
            else:
                sample[extension] = data
        if is_new():
            yield key, _finish_sample(sample, counts, encoding)
    except tarfile.TarError:
        counts["cut_tar"] += 1
        if parts_of(sample) == (parts or {"image", "txt", "json"}) and is_new():
            yield key, _finish_sample(sample, counts, encoding)
    if rejects is None and counts != before:
        print(f"warning: {tar_path}: left out: {dict(counts)}", file=sys.stderr)


def iter_members(tar_path: Path, counts: Counter, images: bool = True) -> Iterator[tuple[str, bytes | None, int]]:
    """(name, bytes, where they begin in the tar) of its plain files; raises tarfile.TarError where the tar is cut or
    damaged. With images=False pictures' bytes are None."""
    try:
        tar = tarfile.open(tar_path, "r:")
    except tarfile.TarError as error:
        raise tarfile.ReadError(str(error)) from None
    except OSError as error:
        raise InputError(
            f"cannot read {tar_path}: {error.strerror}: give a tar that is there and may be read"
        ) from None
    with tar:
        for member, name in plain_members(tar, counts, _is_safe):
            skip = not images and name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS
            yield name, None if skip else tar.extractfile(member).read(), member.offset_data
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


def _finish_sample(members: dict[str, bytes | None], counts: Counter, encoding: str | None) -> dict:
    extension = next((e for e in members if e in IMAGE_EXTENSIONS), None)
    endings = [f"{extension}.{e}" for e in CAPTION_EXTENSIONS] + list(CAPTION_EXTENSIONS)
    data = next((members[e] for e in endings if e in members), None)
    metadata = {}
    if "json" in members:
        try:
            metadata = json.loads(members["json"])
        except (ValueError, RecursionError):
            metadata = None
        if not isinstance(metadata, dict):
            counts["bad_json"] += 1
            metadata = {}
    sample = {"image": members[extension] if extension else None, "ext": extension, "txt": None, "json": metadata}
    if data is not None:
        try:
            sample["txt"] = usertext.read_user_text(data, encoding).strip()
        except InputError:
            sample["unreadable"] = True
    return sample


def caption_of(sample: dict) -> str:
    """A sample's caption: its .txt, else the caption of its metadata; '' if it has none (null is never 'nan'). Raises
    Reject("caption_encoding") if its .txt cannot be read."""
    if sample.get("unreadable"):
        raise Reject("caption_encoding")
    if sample["txt"] is not None:
        return sample["txt"]
    caption = metadata_value(sample["json"], "caption")
    return clean_text(caption).strip() if isinstance(caption, str) else ""
