"""How fast latents come into memory, and micro-batches out of it: the training loader alone, on the CPU.

    python benchmarks/loader_bench.py --processes 8 --size 512 --images 100000
    python benchmarks/loader_bench.py --processes 1 --size 256 --folder /mnt/disk

Writes random latents and token ids in the pipeline's formats to a temporary folder, reads them with a cold page cache,
then lets so many processes (one a GPU) make micro-batches as training does, all at once. The last line is JSON.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sd.cli import parser  # noqa: E402
from sd.data import LatentStore, Prefetcher, SampleOrder, Source, Split, make_batch  # noqa: E402

SHARD = 10_000


def write_source(folder: Path, images: int, side: int) -> Source:
    """Latents fp16 [4, side, side] and 77 token ids of so many pictures."""
    rng = np.random.default_rng(0)
    source = Source("random", None, None, folder / "dataset", folder / "latents")
    (source.dataset / "train").mkdir(parents=True)
    source.latents.mkdir()
    keys = [f"random/{i:09d}" for i in range(images)]
    for s, start in enumerate(range(0, images, SHARD)):
        part = keys[start : start + SHARD]
        latents = rng.standard_normal((len(part), 4, side, side), dtype=np.float32).astype(np.float16)
        np.save(source.latents / f"{s:05d}.npy", latents)
        pq.write_table(pa.table({"image_key": part, "row": np.arange(len(part))}), source.latents / f"{s:05d}.parquet")
    manifest = {"size": side * 8, "scaled": True, "vae": {}, "kind": "mean", "count": images}
    (source.latents / "manifest.json").write_text(json.dumps(manifest))
    ids = rng.integers(49408, size=(images, 77), dtype=np.int32)
    table = pa.table({"image_key": keys, "input_ids": pa.array(list(ids)), "caption": ["a caption"] * images})
    with pa.ipc.new_stream(source.dataset / "train" / "data.arrow", table.schema) as stream:
        stream.write_table(table)
    (source.dataset / "train" / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    (source.dataset / "manifest.json").write_text(json.dumps({"counts": {"train": images}}))
    return source


def drop_page_cache(folder: Path):
    os.sync()
    for path in folder.rglob("*.npy"):
        with open(path, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def draw(rank: int, source: Source, batch: int, batches: int, processes: int, barrier, rates):
    """One rank's loader: its own rate in images/s, all ranks running."""
    torch.set_num_threads(1)
    split = Split([source], [LatentStore(source.latents, pretouch=False)], "train", 1.0)
    order, null = SampleOrder(split.sizes, None, 0), np.zeros(77, np.int64)
    positions = (np.arange(batch) + (i * processes + rank) * batch for i in range(batches + 8))
    loader = Prefetcher(lambda p: make_batch(split, order, p, null, 0.1, 0, 1000), positions, torch.device("cpu"))
    for _ in range(8):  # the epoch's permutation, and the queue
        loader.next()
    barrier.wait()
    started = time.perf_counter()
    for _ in range(batches):
        loader.next()
    rates.put(batch * batches / (time.perf_counter() - started))
    barrier.wait()
    loader.close()


def main():
    p = parser(__doc__)
    g = p.add_argument_group("work")
    g.add_argument("--processes", type=int, default=8, help="loaders at once, one a GPU")
    g.add_argument("--size", type=int, default=512, help="pixels a side")
    g.add_argument("--images", type=int, default=100_000, help="latents to write and draw from")
    g.add_argument("--batch", type=int, default=32, help="images a micro-batch")
    g.add_argument("--seconds", type=float, default=10, help="about how long to draw")
    g.add_argument("--folder", help="where to write (default: the system's temporary folder)")
    args = p.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source = write_source(Path(folder), args.images, args.size // 8)
        size = sum(p.stat().st_size for p in source.latents.glob("*.npy"))
        drop_page_cache(source.latents)
        seconds = []
        for _ in range(2):  # from the disk, and from the page cache
            started = time.perf_counter()
            split = Split([source], [LatentStore(source.latents, pretouch=True)], "train", 1.0)
            seconds.append(time.perf_counter() - started)
        order = SampleOrder(split.sizes, None, 0)
        make_batch(split, order, np.arange(args.batch), np.zeros(77, np.int64), 0.1, 0, 1000)
        started = time.perf_counter()
        for i in range(8):
            make_batch(split, order, np.arange(args.batch) + i * args.batch, np.zeros(77, np.int64), 0.1, 0, 1000)
        alone = 8 * args.batch / (time.perf_counter() - started)
        batches = max(8, int(args.seconds * alone / args.batch))
        spawn = multiprocessing.get_context("spawn")
        barrier, rates = spawn.Barrier(args.processes), spawn.Queue()
        workers = [
            spawn.Process(target=draw, args=(rank, source, args.batch, batches, args.processes, barrier, rates))
            for rank in range(args.processes)
        ]
        for w in workers:
            w.start()
        found = [rates.get() for _ in workers]
        for w in workers:
            w.join()
    print(json.dumps({
        "benchmark": "loader", "size": args.size, "images": args.images, "GB": round(size / 1e9, 2),
        "open_disk_GB_per_s": round(size / 1e9 / seconds[0], 2),
        "open_again_GB_per_s": round(size / 1e9 / seconds[1], 2),
        "alone_images_per_s": round(alone, 1), "processes": args.processes, "batch": args.batch,
        "all_images_per_s": round(sum(found), 1), "slowest_images_per_s": round(min(found), 1), "cores": os.cpu_count(),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
