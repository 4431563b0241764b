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

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch

from sd.cli import parser
from sd.device import DTYPES, own_device, usual_dtype
from sd.encoder import Encoder
from sd.errors import InputError, run
from sd.files import sha256, stamp
from sd.latents import Shard, address, finished, open_folder, write_manifest, write_shard
from sd.locks import Locks
from sd.pictures import check_side
from sd.shards import FLIP, list_shards, source_of
from sd.speed import encoding_benchmark
from sd.stream import Batch, bucket_sizes, stream
from sd.weights.parts import DEFAULT_VAE
from sd.weights.read import load_vae
from sd.workers import check_workers, progress
from SD_Model import VAE, weights_hash

POLL_S = 1.0  # between looks at shards that are in other processes' hands


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


def encode(tars: Iterable[Path], total: int, out: Path, encoder: Encoder, settings: dict, locks: Locks, args) -> int:
    """Encode the tars, which this process has locked, into `out`; returns how many were written. total: for show."""
    begun, reading, done = [], [], 0
    with ThreadPoolExecutor(1) as beside, progress(None, "encoding", "img") as bar:

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
            shard = shard or Shard(f"{args.source or source_of(tar)}/{tar.stem}")
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
    sources = {tar: args.source or source_of(tar) for tar in tars}
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
    if not manifest["count"]:
        (out / "manifest.json").unlink(missing_ok=True)
        raise InputError(f"no picture of {args.images} gave a latent (rejects: {rejects}): see {out}/rejects.jsonl")
    print(
        f"{done} shards encoded in {time.perf_counter() - begin:.0f} s, {len(tars) - done} by others or before; "
        f"{out} holds {manifest['count']:,} latents in {manifest['shards']} shards; rejects: {rejects}"
    )


# ---------------------------------------------------------------------------------------------------------------------


def parse_args(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("input and output")
    g.add_argument("--images", help="folder of tars, or a glob in quotes; must be given, but for --benchmark")
    g.add_argument("--out", help="folder for the latents; must be given, but for --benchmark")
    g.add_argument("--source", help="first part of the image keys (default: the folder above images/)")

    g = p.add_argument_group("what is encoded")
    g.add_argument("--vae", default=DEFAULT_VAE, help="a VAE: folder, file or hub name")
    g.add_argument("--size", type=int, default=512, help="side in pixels of the square that is cut out, and of "
                   "--buckets' square")  # fmt: skip
    g.add_argument("--crop", choices=["center", "random"], default="center", help="which square; random: by the key")
    g.add_argument("--flip", action="store_true", help="also the mirrored picture, under key" + FLIP)
    g.add_argument("--buckets", action="store_true", help="sizes of about equal area, by the picture's aspect")
    g.add_argument("--bucket_step", type=int, help="their sides' divisor in pixels (default: 64; below 256 px the "
                   "VAE's factor)")  # fmt: skip
    g.add_argument("--moments", action="store_true", help="store mean and log-variance, not the mean alone")

    g = p.add_argument_group("speed")
    g.add_argument("--batch", type=int, help="pictures at once (default: 32 on a GPU, 8 on a CPU)")
    g.add_argument("--workers", type=int, help="decoding processes; 0: none (default: a GPU: up to 16; a CPU: 0, they "
                   "need 10 s to start)")  # fmt: skip
    g.add_argument("--device", help="cuda, cuda:1, mps or cpu (default: the best there is)")
    g.add_argument("--dtype", choices=list(DTYPES), help="what the VAE computes in (default: bf16 on CUDA, fp32 "
                   "elsewhere)")  # fmt: skip
    g.add_argument("--compile", action="store_true", help="torch.compile the VAE, instead of the fused kernels that "
                   "CUDA has")  # fmt: skip
    g.add_argument("--benchmark", type=float, nargs="?", const=20.0, metavar="SECONDS", help="measure the speed on "
                   "synthetic pictures, write nothing; 20 s after a warm-up (default: encode)")  # fmt: skip
    g.add_argument("--benchmark_decode", action="store_true", help="with JPEGs decoded by the workers in the loop")
    args = p.parse_args(argv)
    if args.benchmark is None and not (args.images and args.out):
        raise InputError("--images and --out are wanted (or --benchmark)")
    check_side(args.size)
    check_workers(args.workers or 0)
    if args.batch is not None and args.batch < 1:
        raise InputError(f"--batch wants at least 1, found {args.batch}")
    return args


def device_of(args) -> torch.device:
    """The device to encode on, and what the flags leave to it: --batch, --workers, --dtype."""
    device = own_device(args.device)
    cuda = device.type == "cuda"
    if cuda:
        torch.backends.cudnn.benchmark = True  # batches are padded to one shape, or one for each bucket
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args.batch = (32 if cuda else 8) if args.batch is None else args.batch
    args.workers = (min(16, cpus) if cuda else 0) if args.workers is None else args.workers
    args.dtype = args.dtype or usual_dtype(device)
    return device


def settings_of(args, vae: VAE) -> dict:
    """What decides the latents: the manifest's settings. InputError if they do not go with the VAE."""
    factor = vae.config.factor
    if args.size % factor:
        raise InputError(f"this VAE wants --size in multiples of {factor}, found {args.size}")
    step = args.bucket_step or (64 if args.size >= 256 else factor)
    if args.buckets and (step % factor or args.size % step):
        raise InputError(
            f"--bucket_step must be a multiple of the VAE's {factor} and divide --size {args.size}, found {step}"
        )
    return {
        "vae": {"hash": weights_hash(vae), "name": args.vae, "config": asdict(vae.config)},
        "size": args.size,
        "latent_shape": [vae.config.latent_channels, args.size // factor, args.size // factor],
        "buckets": bucket_sizes(args.size, step) if args.buckets else None,
        "crop": args.crop,
        "flip": args.flip,
        "kind": "moments" if args.moments else "mean",
        "dtype": "float16",
        "computed_in": args.dtype,
    }


def main(argv=None):
    args = parse_args(argv)
    device = device_of(args)
    vae = load_vae(args.vae)
    settings = settings_of(args, vae)
    pad_to = args.batch if device.type == "cuda" or args.compile else None
    encoder = Encoder(vae, device, DTYPES[args.dtype], args.moments, pad_to, args.compile)
    if args.benchmark is not None:
        return print(json.dumps(encoding_benchmark(encoder, args)))
    tars = list_shards(args.images)
    if twice := [shard for shard, n in Counter(tar.stem for tar in tars).items() if n > 1]:
        raise InputError(f"{args.images} has more than one {twice[0]}.tar: encode each folder into an --out of its own")
    open_folder(Path(args.out), settings)
    encode_all(tars, Path(args.out), encoder, settings, args)


if __name__ == "__main__":
    run(main)
