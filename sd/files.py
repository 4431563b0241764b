"""Files and folders that are complete or not there: atomic writes, manifests, claims on a folder, hashes, locks."""

import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sd.errors import InputError


class new_folder:
    """`with new_folder(path) as tmp:` fills tmp, which becomes path at the end, whole, or vanishes on an error."""

    def __init__(self, path: Path, replace: bool = False):
        self.path, self.tmp, self.replace = path, path.with_name(path.name + ".tmp"), replace

    def __enter__(self) -> Path:
        if self.path.exists() and not self.replace:
            raise InputError(f"{self.path} exists already; remove it, or write elsewhere")
        try:
            shutil.rmtree(self.tmp, ignore_errors=True)
            self.tmp.mkdir(parents=True)
        except OSError as e:
            raise InputError(f"{self.path} cannot be written ({e.strerror})") from None
        return self.tmp

    def __exit__(self, kind, error, trace):
        if kind is not None:
            shutil.rmtree(self.tmp, ignore_errors=True)
        else:
            replace_folder(self.tmp, self.path)


def make_writable(folder: Path):
    """Make the folder and try to write there, before the work and not after it. InputError if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as e:
        raise InputError(f"--out wants a folder that can be written, found {folder} ({e.strerror})") from None


def sha256(path: Path) -> str:
    """Of a file's content, hexadecimal."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def stamp(path: Path) -> dict:
    """Size in bytes and times in ns: what tells quickly that a file is the same. The time of the last change of content
    or name (ctime) is there because the other one can be set, as rsync and cp -p do."""
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}


def digests(folder: Path) -> dict[str, str]:
    """sha256 of every file in a folder and those below it, by its path inside."""
    return {str(p.relative_to(folder)): sha256(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def lock_run(out: Path):
    """Hold a run folder until this process ends. InputError if another process trains in it. Returns the open lock."""
    lock = open(out / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"another process is training in {out}; wait for its end or stop it, or choose another --out"
        ) from None
    except OSError:  # a file system without locks
        pass
    return lock


def link(source: Path | str, target: Path) -> bool:
    """Give a file a second name, unless that is taken: of several processes that try, one succeeds."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    return True


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
        fsync(path.parent)
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


def fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no folders
            raise
    finally:
        os.close(descriptor)


def replace_folder(temporary: Path, folder: Path) -> None:
    """Renames `temporary` to `folder`, its files flushed, first moving an older `folder` out of the way, which is
    deleted last."""
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
    fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def make_folder(path: str | Path) -> Path:
    """Makes a folder (and those above it), or fails in one sentence."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {path}: {error.strerror}: give a folder that may be written"
        ) from None
    return Path(path)


def absolute(name: str) -> str:
    """A local path made absolute; a hub name as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def read_json(path: str | Path) -> dict:
    """A JSON object from a file, or fails in one sentence."""
    try:
        content = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read {path} ({error}): make it again with the script that wrote it") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} should hold a JSON object but holds a {type(content).__name__}: make it again")
    return content


def write_json(path: str | Path, content: dict) -> None:
    """Writes a JSON object, whole."""
    atomic_write(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_json_once(path: Path, content: dict):
    """Writes a JSON object, whole, unless the file is there: of several processes that try, one succeeds."""
    if not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp") as file:
            file.write(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            link(file.name, path)


def write_manifest(folder: str | Path, manifest: dict) -> None:
    """Writes manifest.json into a folder. It holds no times, so that the same data give the same bytes."""
    write_json(Path(folder) / "manifest.json", manifest)


def claim_folder(folder: str | Path, script: str, settings: dict) -> bool:
    """Makes an output folder with a manifest that says `complete: false`, or goes on with one that is there.

    Fails if the folder's manifest was written by another script or with other settings, or if it holds files and no
    manifest: old and new data are never mixed. A folder that an earlier run claimed and left empty is free.
    Returns whether the folder is a new one: not claimed before, or with other settings.
    """
    folder = make_folder(folder)
    settings = json.loads(json.dumps(settings))  # as they will be read back: tuples become lists
    strangers = [p.name for p in folder.iterdir() if not p.name.endswith(".tmp") and p.name != "manifest.json"]
    old = read_json(folder / "manifest.json") if (folder / "manifest.json").exists() else None
    if old is not None and (strangers or old.get("complete")):
        if old.get("script") != script:
            raise InputError(f"{folder} was written by {old.get('script')}, not by {script}: give another --out")
        before = old.get("settings", {})
        for name in {**before, **settings}:
            if before.get(name) != settings.get(name):
                raise InputError(
                    f"{folder} was made with {name} = {before.get(name)}, and {name} = {settings.get(name)} is asked "
                    "for now: give another --out, or delete that folder first"
                )
        return False
    if strangers and old is None:
        raise InputError(
            f"{folder} holds files ({strangers[0]}) but no manifest.json: give a new or empty folder as --out"
        )
    claim = {"script": script, "settings": settings, "complete": False}
    write_manifest(folder, claim)
    return old != claim


def fail_empty(folder: str | Path, manifest: dict, made: Iterable[Path], message: str) -> None:
    """Fails because a step has nothing to hand on. What it made is deleted first, so that the folder is free."""
    for path in made:
        path.unlink(missing_ok=True)
    write_manifest(folder, {"script": manifest["script"], "settings": manifest["settings"], "complete": False})
    raise InputError(message)


def counted(counts: dict[str, int]) -> str:
    """Counts by reason as a message shows them: 'no_caption 3, truncated 1', or 'nothing'."""
    return ", ".join(f"{reason} {count:,}" for reason, count in sorted(counts.items()) if count) or "nothing"


def fingerprint(*paths: Path) -> str:
    """A short hash of the names, sizes and times of files: changes when one of them is written anew."""
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(repr(stats).encode()).hexdigest()[:16]


def list_files(path_or_glob: str, suffix: str) -> list[Path]:
    """The files with that suffix in a folder, of a glob, or one file, sorted by path; fails if there is none."""
    if os.path.isdir(path_or_glob):
        found = glob.glob(os.path.join(glob.escape(path_or_glob), "*" + suffix))
    else:
        found = [name for name in glob.glob(path_or_glob, recursive=True) if name.endswith(suffix)]
    if not found:
        raise InputError(f"no {suffix} files in {path_or_glob}: give a folder that holds some, or a glob in quotes")
    return sorted(Path(name) for name in found)


def refuse_repeated_names(paths: list[Path]) -> None:
    """Fails if two inputs have the same file name, for then their outputs would have it too."""
    first: dict[str, Path] = {}
    for path in paths:
        if first.setdefault(path.name, path) != path:
            raise InputError(
                f"{first[path.name]} and {path} have the same name: run once for each folder, with its own --out"
            )


def refuse_strangers(folder: Path, suffix: str, expected: set[str]) -> None:
    """Fails if a folder holds finished outputs that none of the inputs makes: old and new data are never mixed."""
    for path in sorted(folder.glob("*" + suffix)):
        if path.name not in expected:
            raise InputError(
                f"{path} comes from none of the inputs, as if they had changed: delete it, or give another --out"
            )


def rename_new(temporary: Path, path: Path):
    """Give a file its final name. FileExistsError if another has it, even one that appeared just now."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(path) from None
        os.rename(temporary, path)
