"""Tars that lie on a server or come out of a command, kept in a folder of limited size while they are read."""

import fcntl
import hashlib
import os
import shlex
import subprocess
import urllib.parse
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from sd.errors import InputError
from sd.sources import download

BLOCK = 512  # bytes of a tar's block; a whole one ends with two of zeros


class Remote(NamedTuple):
    """A tar behind http://, https:// or pipe:COMMAND. What it holds must not change."""

    address: str
    folder: Path  # of the tars that are kept
    limit: float  # bytes that they may take together, but for one tar

    @property
    def name(self) -> Path:
        """Where the tar lies there: the path of the URL, or the command's last word that ends in .tar."""
        if self.address.startswith("pipe:"):
            words = [word for word in _words(self.address) if word.endswith(".tar")]
            if not words:
                raise InputError(f"{self.address} wants a word that ends in .tar, by which its pictures are named")
            return Path("/", urllib.parse.urlsplit(words[-1]).path.lstrip("/"))
        return Path("/", urllib.parse.unquote(urllib.parse.urlsplit(self.address).path).lstrip("/"))

    @property
    def place(self) -> str:
        """A file name that no other address has."""
        return f"{self.name.stem}-{hashlib.blake2b(self.address.encode(), digest_size=6).hexdigest()}"

    @property
    def path(self) -> Path:
        """Of the tar in the folder, while it is there."""
        return self.folder / f"{self.place}.tar"

    def open(self) -> int:
        """A descriptor of the tar, to read from; it stays good when the tar makes room for others. The tar is got now
        if it is not in the folder, by one of those that want it, while the others wait; tars that were not read for
        longest make room. InputError if it cannot be got, or is not whole."""
        with suppress(FileNotFoundError):
            os.utime(self.path)
            return os.open(self.path, os.O_RDONLY)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / f"{self.place}.lock", "w")
        except OSError as error:
            raise InputError(
                f"--cache wants a folder that can be written, found {self.folder} ({error.strerror})"
            ) from None
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the process ends, however it ends
            with suppress(FileNotFoundError):
                return os.open(self.path, os.O_RDONLY)
            fresh = self.folder / f"{self.place}.new"
            (_run if self.address.startswith("pipe:") else download)(self.address, fresh)
            self._check(fresh)
            descriptor = os.open(fresh, os.O_RDONLY)
            os.replace(fresh, self.path)
            self._make_room()
            return descriptor

    def _check(self, path: Path):
        """InputError, and the file is gone, unless a tar is whole and as long as when it was got before."""
        size, told = path.stat().st_size, self.folder / f"{self.place}.bytes"
        with open(path, "rb") as file:
            file.seek(max(0, size - 2 * BLOCK))
            whole = size >= 2 * BLOCK and size % BLOCK == 0 and file.read() == bytes(2 * BLOCK)
        same = not told.exists() or told.read_text() == str(size)
        if whole and same:
            told.write_text(str(size))
            return
        path.unlink()
        if not whole:
            raise InputError(
                f"{self.address} gave {size:,} bytes that are no whole tar: the stream was cut, or is none"
            )
        raise InputError(f"{self.address} gave {size:,} bytes, and {told.read_text()} when it was indexed: put it back")

    def _make_room(self):
        found = []
        for path in self.folder.glob("*.tar"):
            with suppress(FileNotFoundError):  # another process makes room too
                found.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.limit:
                break
            if path != self.path:
                path.unlink(missing_ok=True)
                total -= size


def is_remote(word: str) -> bool:
    return word.startswith(("http://", "https://", "pipe:"))


def _words(address: str) -> list[str]:
    """The command of pipe:COMMAND as a list of arguments. No shell reads it."""
    try:
        words = shlex.split(address.removeprefix("pipe:"))
    except ValueError as error:
        raise InputError(f"{address} wants a command, and its quotes do not match ({error})") from None
    if not words:
        raise InputError("pipe: wants a command behind it, such as pipe:aws s3 cp s3://bucket/00000.tar -")
    return words


def _run(address: str, target: Path):
    """What a command writes to its output, in a file. InputError if it does not end with status 0."""
    part, words = target.with_name(target.name + ".tmp"), _words(address)
    with open(part, "wb") as file:
        try:
            done = subprocess.run(words, stdout=file, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
        except OSError as error:
            part.unlink()
            raise InputError(
                f"{address}: {words[0]} cannot be run ({error.strerror}): install it, or mend it"
            ) from None
    if done.returncode:
        part.unlink()
        said = (done.stderr.decode(errors="replace").strip().splitlines() or ["it says nothing"])[-1][:200]
        raise InputError(f"{address} ended with status {done.returncode} ({said}): put that right")
    os.replace(part, target)
