"""What index and order of very many pictures take on one machine: memory and seconds of each process, and no pictures.

    python benchmarks/scale_index.py --images 30000000
    python benchmarks/scale_index.py --images 300000000 --folder /mnt/disk --processes 2

Writes the index files of a few tars with made-up keys and captions, and takes them for as many tars as there would be,
so that reading costs what it would and writing them nothing. Then one process after the other, each beside the earlier
ones, does what SD_Train.py --pictures does with them: reads the table, holds out, hashes all of it, makes two epochs'
orders and looks pictures up. Memory is what a process has of its own (RssAnon); files that it maps are shared, and the
system may drop them. The last line is JSON.
"""

import json
import multiprocessing
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sd.cli import parser  # noqa: E402
from sd.data import SampleOrder, kind_of, seen_hash, validation_index  # noqa: E402
from sd.index import Captions, Part, read_index  # noqa: E402
from sd.online import Cut, Pictures, held_out  # noqa: E402
from sd.shards import key_fraction  # noqa: E402

TAR = 10_000  # pictures

DISTINCT = 20  # tars that are made up


def memory() -> int:
    """Bytes that this process alone has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


class Watched:
    """`with Watched(found, name)`: the seconds it took, the most memory meanwhile, and what is held at the end, bytes
    above those at the program's start."""

    def __init__(self, found: dict, name: str, before: int):
        self.found, self.name, self.before, self.most = found, name, before, 0
        self.over = threading.Event()

    def _look(self):
        while not self.over.wait(0.02):
            self.most = max(self.most, memory())

    def __enter__(self):
        self.thread = threading.Thread(target=self._look, daemon=True)
        self.thread.start()
        self.begun = time.perf_counter()

    def __exit__(self, *error):
        seconds = time.perf_counter() - self.begun
        self.over.set()
        self.thread.join()
        now = memory()
        self.found[self.name] = {"s": round(seconds, 2), "most": max(self.most, now) - self.before,
                                 "held": now - self.before}  # fmt: skip
        print(f"  {self.name}: {self.found[self.name]}", flush=True)


class NoTokenizer:
    """Captions are looked up and not tokenised."""

    model_max_length = 77

    def __call__(self, texts, **_):
        return {"input_ids": [[0] * self.model_max_length for _ in texts]}


def write_parts(folder: Path, images: int) -> list[Part]:
    """As many parts as the pictures have tars; of each file several."""
    random, files = np.random.default_rng(0), []
    words = [f"{'word' * (1 + i % 3)}{i}"[: 2 + i % 9] for i in range(5000)]
    for n in range(DISTINCT):
        keys = [f"laion/{n:05d}/{i:09d}" for i in range(TAR)]
        captions = [[" ".join(words[w] for w in random.integers(0, 5000, random.integers(4, 16)))] for _ in keys]
        about = {"made_from": {"n": n}, "rejects": Counter(), "rejected": [], "pictures": TAR}
        length = random.integers(20_000, 200_000, TAR)
        table = pa.table({"key": keys, "offset": np.cumsum(length), "bytes": length, "captions": captions,
                          "fraction": [key_fraction(k) for k in keys], "n:width": random.random(TAR),
                          "t:folder": ["laion"] * TAR})  # fmt: skip
        path = folder / f"{n:05d}.parquet"
        pq.write_table(table.replace_schema_metadata({"index": json.dumps(about)}), path, compression="zstd")
        files.append((path, about["made_from"]))
    return [
        Part(path, f"laion/{i:06d}", Path(f"{i:06d}.tar"), made_from, None, Captions())
        for i, (path, made_from) in ((i, files[i % DISTINCT]) for i in range(images // TAR))
    ]


def process(number: int, parts: list[Part], settings: dict, out, done):
    found, before = {}, memory()
    print(f"process {number}:", flush=True)
    with Watched(found, "read_index", before):
        index = read_index(parts, [])
    with Watched(found, "split", before):
        held = held_out(index.table, None)
        train = np.flatnonzero(~held).astype(kind_of(len(held)))
        split = Pictures(index.table, [len(train)], parts, NoTokenizer(), None, (4, 64, 64), Cut(512), settings, None,
                         print, train)  # fmt: skip
        del held
    if settings["digest"]:
        split._read = lambda i: b""  # there are no tars
        with Watched(found, "digest", before):
            split.digest()
    with Watched(found, "validation", before):
        validation_index(split, 256, "train", 0)
    order = SampleOrder(split.sizes, None, 0, split.windows)
    for epoch in range(2):
        with Watched(found, f"epoch {epoch}", before):
            order.epoch(epoch)
    with Watched(found, "lookups", before):
        seen = 0
        for step in range(settings["steps"]):
            index = order.at(np.arange(step * 32, step * 32 + 32))
            keys, captions = (texts.take(index).to_pylist() for texts in (split.keys, split.captions))
            assert all(captions)
            seen += sum(map(seen_hash, range(step * 32, step * 32 + 32), keys))
    out.put({"pictures": len(split), "seen": f"{seen % 2**64:016x}", **found})
    done.wait()


def main():
    p = parser(__doc__, {})
    g = p.add_argument_group("what is simulated")
    g.add_argument("--images", type=int, default=30_000_000, help="pictures, in tars of 10,000")
    g.add_argument("--processes", type=int, default=2, help="of this machine, one after the other")
    g.add_argument("--window", type=int, default=0, help="as SD_Train.py --window: tars shuffled together; 0: all")
    g.add_argument("--steps", type=int, default=1000, help="lookups of 32 pictures each")
    g.add_argument("--no_digest", action="store_true", help="leave out the hashing, which reads all of the table")
    g.add_argument("--folder", help="for the files, some 140 bytes a picture (default: a temporary one)")
    args = p.parse_args()
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    context = multiprocessing.get_context("spawn")
    settings = {"window": args.window, "seed": 0, "strict": False, "picture_memory": 0.0, "steps": args.steps,
                "digest": not args.no_digest}  # fmt: skip
    out, done, workers, found = context.Queue(), context.Event(), [], []
    try:
        parts = write_parts(folder, args.images)
        for number in range(args.processes):
            workers.append(context.Process(target=process, args=(number, parts, settings, out, done), daemon=True))
            workers[-1].start()
            found.append(out.get())
        size = sum(f.stat().st_size for f in folder.rglob("columns-*/*"))
        parquet = sum(part.index.stat().st_size for part in parts[:DISTINCT]) / (DISTINCT * TAR)
        print(json.dumps({
            "benchmark": "scale_index", "images": len(parts) * TAR, "window": args.window,
            "parquet_bytes_a_picture": round(parquet, 1), "columns_bytes_a_picture": round(size / args.images, 1),
            "most_bytes_a_picture": [round(max(v["most"] for v in f.values() if isinstance(v, dict)) / args.images, 1)
                                     for f in found],
            "held_bytes_a_picture": [round(f["lookups"]["held"] / args.images, 1) for f in found], "processes": found,
        }))  # fmt: skip
    finally:
        done.set()
        for worker in workers:
            worker.join(10)
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
