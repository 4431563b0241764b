"""Many pictures painted by many processes: a job's pictures in shards of fixed indices, each shard by one of them.

Which pictures are in a shard, and which are sampled together, depends on their indices alone, so the pictures are the
same whatever the number of processes and whenever they were stopped. The processes, on one machine or several, need not
know each other: they share the shards by lock files (sd/locks.py), as encode_latents.py does, and take over from the
dead.
"""

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from sd.errors import InputError
from sd.files import atomic_write, make_writable, read_json, write_json_once, write_manifest
from sd.locks import Locks
from sd.output import png_bytes
from sd.shards import ShardWriter, iter_samples
from sd.workers import progress

POLL_S = 1.0  # between looks at shards that are in other processes' hands
IEND = b"IEND\xaeB`\x82"  # the end of every whole PNG

Painted = Iterator[tuple[int, np.ndarray, dict]]  # index in the window, uint8 RGB [H, W, 3], its settings


class Bulk:
    """The pictures 0 to count - 1 of a job in `out`: in tars (00000.tar, ... as WebDataset has them: png, txt, json) or
    in folders of the same files (00000/, ...), `size` pictures in each. The key of picture i is i in nine digits."""

    def __init__(self, out: str, kind: str, size: int, count: int):
        """kind: tars or folders. InputError if the folder cannot be written or the numbers make no sense."""
        if not 1 <= size <= 100_000:
            raise InputError(f"--{kind} wants 1 to 100,000 pictures in each, found {size}")
        if Path(out).suffix.lower() in (".png", ".tar"):
            raise InputError(f"--{kind} wants a folder as --out, found {out}")
        self.out, self.kind, self.size, self.count = Path(out), kind, size, count
        self.shards, self.done = -(-count // size), 0
        make_writable(self.out)

    def claim(self, settings: dict):
        """settings: all that decides the pictures. InputError if the folder holds those of others."""
        own = {"script": "SD_ImageGen.py", "kind": self.kind, "shard_size": self.size, "count": self.count} | settings
        self.settings, path = json.loads(json.dumps(own)), self.out / "settings.json"
        if not path.exists() and (found := [p.name for p in self.out.iterdir() if not p.name.endswith(".tmp")]):
            raise InputError(f"{self.out} holds {found[0]} but no settings.json: give a new or empty folder as --out")
        write_json_once(path, self.settings)
        before = read_json(path)
        for name in {**before, **self.settings}:
            if before.get(name) != self.settings.get(name):
                raise InputError(
                    f"{self.out} was begun with {name} = {before.get(name)}, and {name} = {self.settings.get(name)} is "
                    "asked for now: give another --out, or delete that folder first"
                )

    def indices(self, shard: int) -> range:
        return range(shard * self.size, min(self.count, (shard + 1) * self.size))

    def missing(self, shard: int) -> list[int]:
        """Pictures of a shard that are not there, or not whole. A tar counts as a whole."""
        wanted = self.indices(shard)
        if self.kind == "folders":
            return [i for i in wanted if not all(map(_whole, self._files(i)))]
        path, rejects = self.out / f"{shard:05d}.tar", Counter()
        if not path.exists():
            return list(wanted)
        samples = iter_samples(path, rejects, images=False)
        found = [key for key, s in samples if s["ext"] == "png" and s["txt"] is not None and s["json"]]
        return [] if found == [_key(i) for i in wanted] and not rejects else list(wanted)

    def _files(self, i: int) -> list[Path]:
        stem = self.out / f"{i // self.size:05d}" / _key(i)
        return [stem.with_suffix(end) for end in (".txt", ".json", ".png")]

    def paint(self, job: Callable[[int], dict], painted: Callable[[list[dict], set[int]], Painted], window: int):
        """Paint until all shards are whole, here or by other processes; then write manifest.json. Prints what was done.

        job(i): prompt, negative, seed of picture i. painted(jobs, wanted) yields those of up to `window` jobs whose
        indices in the list are wanted, and perhaps others that are sampled with them.
        """
        started, left, told = time.perf_counter(), range(self.shards), False
        with Locks(self.out) as locks, progress(None, "painting", "img") as bar:
            left = [shard for shard in left if self.missing(shard)]
            open_at_start = sum(len(self.missing(shard)) for shard in left)
            while left:
                for shard in left:
                    if locks.take(f"{shard:05d}"):
                        if missing := self.missing(shard):
                            (self.out / "manifest.json").unlink(missing_ok=True)  # it says that all are there
                            self._paint_shard(shard, missing, job, painted, window, locks, bar)
                        locks.release(f"{shard:05d}")
                left = [shard for shard in left if self.missing(shard)]
                if left:
                    if not told:
                        print(f"waiting for other processes, which are at work on {len(left)} shards", flush=True)
                        told = True
                    time.sleep(POLL_S)
        manifest = self.settings | {"complete": True, "shards": self.shards, "pictures": self.count}
        write_manifest(self.out, manifest)
        seconds = max(time.perf_counter() - started, 1e-3)
        if not open_at_start:
            return print(f"all is there: {self.out} holds {self.count} pictures in {self.shards} {self.kind}")
        print(f"{self.done} pictures in {seconds:.1f} s, {self.done / seconds:.2f} images/s here and "
              f"{open_at_start / seconds:.2f} with all others; {self.out} holds {self.count} in {self.shards} "
              f"{self.kind}")  # fmt: skip

    def _paint_shard(self, shard: int, missing: list[int], job, painted, window: int, locks: Locks, bar):
        everything, pictures = self.indices(shard), {}
        for first in range(everything.start, everything.stop, window):
            part = range(first, min(everything.stop, first + window))
            wanted = {i - first for i in missing if i in part}
            if not wanted:
                continue
            for k, image, settings in painted([job(i) for i in part], wanted):
                bar.update()
                i, png = first + k, png_bytes(image, settings)
                settings = settings | {"width": image.shape[1], "height": image.shape[0]}
                if self.kind == "tars":
                    pictures[i] = png, settings
                elif k in wanted:
                    self._write(i, png, settings)
        if self.kind == "tars":
            if not locks.holds(f"{shard:05d}"):  # after a long sleep another took it over
                return
            with ShardWriter(self.out / f"{shard:05d}.tar") as tar:
                for i in everything:
                    png, settings = pictures[i]
                    tar.add(_key(i), png, "png", settings["prompt"], settings)
            self.done += len(everything)

    def _write(self, i: int, png: bytes, settings: dict):
        text, described, picture = self._files(i)
        picture.parent.mkdir(exist_ok=True)
        row = {"key": _key(i), "caption": settings["prompt"], **settings, "sha256": hashlib.sha256(png).hexdigest()}
        atomic_write(text, settings["prompt"])
        atomic_write(described, json.dumps(row, ensure_ascii=False))
        atomic_write(picture, png)  # last: where it is, the others are
        self.done += 1

    def told(self) -> str:
        return f"{self.done} of {self.count} pictures are painted by this process, in {self.out}"


def _key(i: int) -> str:
    return f"{i:09d}"


def _whole(path: Path) -> bool:
    """Whether a file is there and, if it is a PNG, has its end."""
    try:
        with open(path, "rb") as file:
            if path.suffix == ".png":
                file.seek(-min(8, path.stat().st_size), 2)
            return path.suffix != ".png" or file.read() == IEND
    except FileNotFoundError:
        return False
