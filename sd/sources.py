"""What the 01 scripts of public sources share: where files come from, and archives that are read without unpacking.

Files come from a folder (--path), a web server (--url) or a hub of data sets (--hub_id, at one pinned revision).
Nothing is written but what is asked for: names in archives are only ever compared, never used as paths on disk.
"""

import argparse
import functools
import hashlib
import http.client
import json
import os
import re
import shutil
import tarfile
import time
import urllib.request
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from sd.errors import InputError
from sd.files import claim_folder, counted, make_folder, read_json
from sd.folders import endings, is_hidden, is_picture, walk_folder
from sd.pictures import Reject, check_side, decode_image, encode_jpeg, resize_crop
from sd.shards import MAX_MEMBER_BYTES, ShardWriter, build_shards, key_fraction, plain_members
from sd.workers import check_workers

TRIES = 5  # of a file from a server

PAUSE = 1.0  # seconds after the first failure, twice as long after each further one

BLOCK = 1 << 20


def add_arguments(p: argparse.ArgumentParser, path_help: str, url_help: str, hub: bool, shard_size: int | None):
    """The flags that these scripts share; shard_size None where an archive is a shard."""
    g = p.add_argument_group(f"where from ({'--path, --url or --hub_id' if hub else '--path or --url'}) and where to")
    origin = g.add_mutually_exclusive_group(required=True)
    origin.add_argument("--path", help=path_help)
    origin.add_argument("--url", help=url_help)
    if hub:
        origin.add_argument("--hub_id", help="data set on a hub, e.g. poloclub/diffusiondb")
        g.add_argument("--revision", help="of the hub's data set (default: its newest, pinned in manifest.json)")
    g.add_argument("--out", required=True, type=Path, help="folder of the source; gets images/*.tar")

    g = p.add_argument_group("pictures")
    g.add_argument("--size", type=int, default=512, help="side in pixels of the square pictures")
    g.add_argument("--min_side", type=int, default=0, help="reject pictures whose shorter side is below this")
    g.add_argument("--seed", type=int, default=0, help="chooses among captions")

    g = p.add_argument_group("running")
    if shard_size is not None:
        g.add_argument("--shard_size", type=int, default=shard_size, help="pictures a tar, at most 10,000")
    g.add_argument("--workers", type=int, default=1, help="processes")


def check_arguments(args: argparse.Namespace) -> None:
    check_side(args.size)
    check_workers(args.workers)
    if args.min_side < 0 or not 1 <= getattr(args, "shard_size", 1) <= 10_000:
        raise InputError("--min_side must be at least 0, --shard_size from 1 to 10,000")


def parse_range(flag: str, text: str, lowest: int, highest: int, example: str) -> range:
    """The numbers of '7' or '1-500'; fails unless they lie between lowest and highest."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (highest, lowest - 1)
    if not lowest <= first <= last <= highest:
        raise InputError(f"{flag} is {text}: give a number or a range such as {example}, from {lowest} to {highest:,}")
    return range(first, last + 1)


def folder_of(name: str) -> str:
    """The folder right above a picture; '' if there is none."""
    return name.split("/")[-2] if "/" in name else ""


def each_picture(members: Iterable[tuple[str, object]], shard: ShardWriter) -> Iterator[tuple[int, str, object]]:
    """(number from 0, file name, what came with it) of the pictures among (path, what comes with it) of an archive. A
    hidden one and one whose file name was there before are rejected."""
    seen = set()
    for path, content in members:
        name = path.rpartition("/")[2]
        if not is_picture(name):
            continue
        if is_hidden(path):
            shard.reject("hidden")
        elif name in seen:
            shard.reject("duplicate_key")
        else:
            seen.add(name)
            yield len(seen) - 1, name, content


def choose(options: list, seed: int, key: str):
    """One of the options, always the same for this seed and key."""
    return options[int(key_fraction(f"{seed}/{key}") * len(options))]


def content_hash(items: list) -> str:
    """A short hash of names and captions, by which a changed source is noticed."""
    return hashlib.sha256(json.dumps(items, default=str).encode()).hexdigest()[:16]


def origin_of(args: argparse.Namespace, folder: Path) -> dict:
    """{path}, {url} or {hub_id, revision} as a dict that is part of a folder's settings. A hub's revision is the commit
    that `folder`'s manifest names, if there is one: a run that goes on takes the same files."""
    if args.path:
        return {"path": args.path}
    if args.url:
        return {"url": args.url}
    if (folder / "manifest.json").exists():
        old = read_json(folder / "manifest.json").get("settings", {}).get("origin", {})
        if old.get("hub_id") == args.hub_id and args.revision in (None, old.get("asked"), old.get("revision")):
            return old
    info = _ask_hub(args.hub_id, lambda hub: hub.HfApi().dataset_info(args.hub_id, revision=args.revision))
    return {"hub_id": args.hub_id, "revision": info.sha, "asked": args.revision}


def _ask_hub(hub_id: str, question: Callable):
    import httpx
    import huggingface_hub

    try:
        return question(huggingface_hub)
    except (OSError, ValueError, httpx.HTTPError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".:") or type(error).__name__
        raise InputError(
            f"cannot get {hub_id} from the hub ({reason}): check the name, the network and your access to it"
        ) from None


def list_hub(origin: dict) -> list[str]:
    """The names of all files of a hub's data set at the pinned revision."""
    hub_id, revision = origin["hub_id"], origin["revision"]
    return _ask_hub(hub_id, lambda hub: hub.HfApi().list_repo_files(hub_id, repo_type="dataset", revision=revision))


def fetch(origin: dict, name: str, folder: Path) -> Path:
    """A file on this machine: where it lies, for a path; else downloaded into `folder`, if it is not there already.
    A download that was cut goes on where it stopped. Fails in one sentence."""
    if "path" in origin:
        if not (path := Path(origin["path"]) / name).is_file():
            raise InputError(f"there is no {path}: give the folder that holds {name} as --path")
        return path
    target = folder / name
    if not target.exists():
        make_folder(target.parent)
        if "url" in origin:
            download(f"{origin['url'].rstrip('/')}/{name}", target)
        else:
            at = dict(repo_type="dataset", revision=origin["revision"], local_dir=folder)
            _ask_hub(origin["hub_id"], lambda hub: hub.hf_hub_download(origin["hub_id"], name, **at))
    return target


def forget(origin: dict, path: Path) -> None:
    """Deletes what fetch() downloaded; a file of --path stays."""
    if "path" not in origin:
        path.unlink(missing_ok=True)


def download(url: str, target: Path) -> None:
    """Downloads a file; the part of an earlier try is kept as *.tmp and continued. Fails in one sentence."""
    part = target.with_name(target.name + ".tmp")
    for attempt in range(TRIES):
        try:
            _download_rest(url, part)
            break
        except (OSError, http.client.HTTPException, ValueError) as error:
            final = isinstance(error, ValueError) or getattr(error, "code", 0) in (400, 401, 403, 404, 410)
            if final or attempt == TRIES - 1:
                raise InputError(
                    f"cannot get {url} ({error}): check the address, and run the command again to go on"
                ) from None
            time.sleep(PAUSE * 2**attempt)
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)


def _download_rest(url: str, part: Path) -> None:
    """Appends what is missing of a file; raises OSError if the server's answer ends early."""
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        answer = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is missing, or the part is of another file
            part.unlink()
            raise OSError("the part that was there does not fit") from None
        raise
    with answer, open(part, "ab" if answer.status == 206 else "wb") as file:
        length = answer.headers.get("Content-Length")
        written = 0
        while block := answer.read(BLOCK):
            file.write(block)
            written += len(block)
    if length is not None and written != int(length):
        raise OSError(f"the answer ended after {written} of {length} bytes")


def is_safe(name: str) -> bool:
    """Whether a member's name stays inside the folder it would be unpacked to."""
    parts = name.replace("\\", "/").split("/")
    return not name.startswith(("/", "\\")) and ".." not in parts and "\0" not in name and ":" not in parts[0]


def iter_tgz(path: Path, counts: Counter) -> Iterator[tuple[str, bytes]]:
    """(name, bytes) of the plain files of a .tar, .tar.gz or .tgz, read once from the front, unpacked nowhere. What is
    left out is counted: link, unsafe_name, too_large, cut_tar (what came whole before is yielded)."""
    try:
        with tarfile.open(path, "r|*") as tar:
            for member, name in plain_members(tar, counts, is_safe):
                data = tar.extractfile(member).read()
                if len(data) < member.size:
                    raise tarfile.ReadError("cut")
                yield name, data
    except (tarfile.TarError, EOFError, zlib.error, OSError) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        counts["cut_tar"] += 1


@functools.lru_cache(maxsize=4)
def open_zip(path: Path) -> zipfile.ZipFile:
    """A zip, opened once a process; fails in one sentence."""
    try:
        return zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError) as error:
        raise InputError(f"{path} is not a whole zip ({error}): get it again") from None


def read_zip(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> bytes:
    """A member's bytes; Reject: unsafe_name, link, too_large (claimed: not unpacked), corrupt (or encrypted)."""
    if not is_safe(info.filename):
        raise Reject("unsafe_name")
    if info.external_attr >> 28 == 0xA:
        raise Reject("link")
    if info.file_size > MAX_MEMBER_BYTES:
        raise Reject("too_large")
    try:
        return archive.read(info)  # never more than the claimed size
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError):
        raise Reject("corrupt") from None


def list_pictures(root: Path) -> list[str]:
    """The names of the pictures in a folder or a zip, with / between parts, sorted; fails if there is none. A line is
    printed that counts what is left out, by the reasons of common.walk_folder and not_a_picture."""
    counts = Counter()
    if root.is_dir():
        names = walk_folder(root, counts)
    elif root.is_file():
        names = {info.filename for info in open_zip(root).infolist() if not info.is_dir()}
        counts["hidden"] = sum(is_hidden(name) and is_picture(name) for name in names)
        names = [name for name in names if not is_hidden(name)]
    else:
        raise InputError(f"there is no {root}: give a folder or a zip")
    found = sorted(name for name in names if is_picture(name))
    counts["not_a_picture"] = len(names) - len(found)
    if not found:
        raise InputError(f"no pictures in {root} ({endings(names)}): give a folder or a zip that holds some")
    if counts.total():
        print(f"left out in {root}: {counted(counts)}")
    return found


def read_file(root: Path, name: str) -> bytes:
    """A file of a folder or a zip. Reject as read_zip, and no_image if it is not there; link if it is a link out of its
    own folder (a folder may be linked: its pictures are where they seem to be)."""
    if root.is_dir():
        path = root / name
        if not is_safe(name):
            raise Reject("unsafe_name")
        if os.path.dirname(os.path.realpath(path)) != os.path.realpath(path.parent):  # a loop is no error to these
            raise Reject("link")
        if not path.is_file():
            raise Reject("no_image")
        if path.stat().st_size > MAX_MEMBER_BYTES:
            raise Reject("too_large")
        return path.read_bytes()
    archive = open_zip(root)
    if name not in archive.NameToInfo:
        raise Reject("no_image")
    return read_zip(archive, archive.getinfo(name))


def square_around(image: np.ndarray, centre: tuple[float, float]) -> np.ndarray:
    """uint8 [H, W, 3] -> [S, S, 3], S the shorter side: the square whose middle is as near to (x, y) as it can be."""
    height, width = image.shape[:2]
    side = min(height, width)
    left = min(max(round(centre[0] - side / 2), 0), width - side)
    top = min(max(round(centre[1] - side / 2), 0), height - side)
    return image[top : top + side, left : left + side]


def add_picture(
    shard: ShardWriter, key: str, read: Callable[[], bytes], caption: str, about: dict, size: int, min_side: int
) -> None:
    """Adds a picture as a square JPEG of `size` with its caption, or counts why it is left out: no_caption, too_small,
    and the reasons of read() and decode_image(). about["centre"], (x, y) in pixels, is where the square should lie."""
    try:
        if not caption:
            raise Reject("no_caption")
        image = decode_image(read())
        height, width = image.shape[:2]
        if min(height, width) < min_side:
            raise Reject("too_small")
    except Reject as reject:
        shard.reject(reject.reason)
        return
    about = {"original_width": width, "original_height": height, "width": size, "height": size, **about}
    if centre := about.pop("centre", None):
        image = square_around(image, centre)
    shard.add(key, encode_jpeg(resize_crop(image, size)), "jpg", caption, about)


def write_shard(path: Path, number: int, items: list[tuple[str, str, dict]], root: Path, size: int, min_side: int):
    """Writes (name, caption, about) of pictures in a folder or a zip into one shard; returns how many."""
    with ShardWriter(path) as shard:
        for place, (name, caption, about) in enumerate(items):
            read = functools.partial(read_file, root, name)
            add_picture(shard, f"{number:05d}{place:04d}", read, caption, about, size, min_side)
    return len(items)


def begin(script: str, args: argparse.Namespace, names: tuple[str, ...]) -> tuple[dict, dict, Path]:
    """Claims <out>/images for a script whose archives come one by one. Returns origin and settings (those flags that
    `names` says, and the origin), and the folder for downloads. What an earlier run of other settings had downloaded
    before it was stopped is deleted."""
    images, raw = args.out / "images", args.out / "raw"
    origin = origin_of(args, images)
    settings = {name: getattr(args, name) for name in names} | {"origin": origin}
    if claim_folder(images, script, settings):
        for folder in (raw, args.out / "annotations"):
            shutil.rmtree(folder, ignore_errors=True)
    return origin, settings, raw


def build(script: str, args: argparse.Namespace, root: Path, items: list, settings: dict) -> None:
    """Writes (name, caption, about) of all pictures into <out>/images, and says what came of it."""
    settings = {"origin": args.path or args.url, "pictures_and_captions": content_hash(items), **settings}
    settings |= {name: getattr(args, name) for name in ("size", "min_side", "shard_size", "seed")}
    write_all(script, args, settings, items, write_shard, (root, args.size, args.min_side), args.shard_size)


def write_all(
    script: str,
    args: argparse.Namespace,
    settings: dict,
    items: Sequence,
    job: Callable,
    extra: tuple,
    shard_size: int,
    left_out: Counter | None = None,
) -> None:
    """common.build_shards with a script's flags, and two lines about what came of it."""
    manifest = build_shards(args.out, script, settings, items, job, extra, shard_size, args.workers, left_out)
    print(f"{manifest['pictures']:,} pictures in {manifest['shards']} shards: {args.out}/images")
    print(f"rejected: {manifest['rejected'] or 'none'}")


def root_of(args: argparse.Namespace) -> Path:
    """The folder or zip that --path names, or the zip at --url, downloaded to <out>/raw once."""
    if args.path:
        return Path(args.path)
    base, _, name = args.url.partition("?")[0].rpartition("/")
    return fetch({"url": base}, name, make_folder(args.out / "raw"))
