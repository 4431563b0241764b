"""How near painted pictures are to real ones: FID, KID and others, under a protocol that every result keeps.

    python SD_Evaluate.py --pictures painted --real data/laion/images --extractor efficientnet-lite0 --out measured
    python SD_Evaluate.py --model runs/7 --real data/coco/images --n 30000 --steps 50 --cfg 3 \\
        --extractor inception:weights-inception-2015-12-05-6726825d.pth --out measured
    python SD_Evaluate.py --model runs/7 --real data/coco/images --n 30000 --extractor transformers:clip-vit-large \\
        --resize torch_bicubic --measures cmmd,clip_score --out measured
    python SD_Evaluate.py --during runs/demo --real data/shapes/images --n 1000 --steps 20 --device cpu
    python SD_Evaluate.py --compare measured/a.json measured/b.json
    python SD_Evaluate.py --check
    torchrun --nproc_per_node 4 SD_Evaluate.py --model runs/7 --real data/coco/images --n 30000 --out measured

--out gets a JSON for each protocol and set of pictures, and with --model the painted pictures. Run the same command
again after a stop: no picture is painted twice, and no feature is computed twice for the same content. Measures depend
neither on the batch, nor on the number of processes, nor on the names and order of files. --during appends a line for
each checkpoint to RUN/evaluation.jsonl, and ends when the training has ended. docs/EVALUATION.md says what to trust.
"""

import contextlib
import datetime
import fcntl
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from sd.cli import parser
from sd.device import DTYPES, Place, find_ranks, pick_device, usual_dtype
from sd.errors import InputError, run
from sd.extractors import KINDS, RESIZES, Extractor, make_extractor
from sd.features import PictureSet, features_of, scan, text_features, together
from sd.files import make_writable, read_json, write_json
from sd.log import append_json, plot_run, read_rows
from sd.measures_check import check
from sd.painted import Painting, check_painting, paint_folder, prompts_for
from sd.pictures import check_side
from sd.protocol import FORMAT, MEASURES, choose_measures, compare, digest, label, measure, protocol_of, warnings_of
from sd.samplers import SAMPLERS
from sd.weights.read import checkpoint_folders, checkpoint_problem, checkpoint_step, open_model
from sd.workers import check_workers

LOG = "evaluation.jsonl"  # in a run folder


def parse_args(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("one of these").add_mutually_exclusive_group(required=True)
    g.add_argument("--pictures", metavar="SOURCE", help="measure these: a folder, a tar, or a folder or glob of tars")
    g.add_argument("--model", help="paint with this and measure it: a checkpoint or run, or any SD 1.x file or folder")
    g.add_argument("--during", metavar="RUN", help="measure each checkpoint of a run, once, as they come")
    g.add_argument("--compare", nargs=2, metavar=("A", "B"), help="set two results side by side, if that is fair")
    g.add_argument("--check", action="store_true", help="is the measuring right? Status 1 if it is not")

    g = p.add_argument_group("what is measured, and how")
    g.add_argument("--real", metavar="SOURCE", help="real pictures, as --pictures (default: none, they are wanted)")
    g.add_argument("--extractor", default="efficientnet-lite0", help=f"{', '.join(KINDS)}; weights come by hand")
    g.add_argument("--measures", metavar="LIST", help=f"fid, {', '.join(MEASURES)} (default: all that the extractor "
                   "allows)")  # fmt: skip
    g.add_argument("--resize", choices=list(RESIZES), help="to the extractor's size (default: tf1_bilinear for "
                   "inception, else pil_bicubic)")  # fmt: skip
    g.add_argument("--size", type=int, help="pixels that all pictures are first cut to (default: the painted ones')")
    g.add_argument("--n", type=int, help="painted pictures (default: 10000; with --during 1000, with --pictures all)")
    g.add_argument("--n_real", type=int, help="real pictures, chosen by their hashes (default: all)")
    g.add_argument("--out", type=Path, help="folder of results (default: evaluation; with --during in the run)")
    g.add_argument("--cache", type=Path, help="folder of features by content (default: features in --out)")
    g.add_argument("--differs", nargs="+", default=[], metavar="NAME", help="--compare: parts of the protocol that are "
                   "meant to differ, as steps (default: none)")  # fmt: skip

    g = p.add_argument_group("painting")
    g.add_argument("--prompts", metavar="FILE", help=".txt or .jsonl (default: the real pictures' captions)")
    g.add_argument("--sampler", default="ddim", help=", ".join(SAMPLERS))
    g.add_argument("--steps", type=int, default=50, help="sampling steps")
    g.add_argument("--cfg", type=float, default=7.5, help="guidance scale; 1: none")
    g.add_argument("--seed", type=int, default=0, help="picture i uses seed + i")
    g.add_argument("--weights", choices=["ema", "live"], default="ema", help="averaged or last weights")

    g = p.add_argument_group("a run that goes on")
    g.add_argument("--once", action="store_true", help="measure the checkpoints that are there, and end")
    g.add_argument("--every", type=float, default=30, metavar="SECONDS", help="how often to look for new ones")
    g.add_argument("--keep_pictures", action="store_true", help="keep what was painted of each checkpoint")

    g = p.add_argument_group("running")
    g.add_argument("--batch", type=int, default=32, help="pictures at once for features; does not change them")
    g.add_argument("--paint_batch", type=int, default=8, help="pictures painted at once; does not change them")
    g.add_argument("--workers", type=int, default=4, help="threads that decode pictures")
    g.add_argument("--device", help="cuda, cuda:1, mps or cpu (default: the best there is)")
    g.add_argument("--dtype", choices=list(DTYPES), help="of painting (default: bf16 on CUDA, fp32 elsewhere)")
    args = p.parse_args(argv)
    for name in ("n", "n_real", "batch", "paint_batch"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InputError(f"--{name} wants at least 1, found {getattr(args, name)}")
    if not 0 < args.every < 1e6:
        raise InputError(f"--every wants seconds, found {args.every}")
    if args.differs and not args.compare:
        raise InputError("--differs is for --compare: leave it out")
    if args.real is None and not (args.compare or args.check):
        raise InputError("--real is wanted: a folder, a tar, or a folder or glob of tars with real pictures")
    check_workers(args.workers)
    check_side(args.size)
    return args


def join_processes(name: str | None) -> Place:
    """This process's place. Several processes share pictures and talk little, and wait for each other as long as it
    takes: gloo, which has patience, on GPUs too."""
    rank, world, local = find_ranks(os.environ)
    device = pick_device(name)
    if device.type == "cuda" and world > 1:
        if local >= torch.cuda.device_count():
            raise InputError(f"LOCAL_RANK is {local}, and this machine has {torch.cuda.device_count()} GPUs")
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world, timeout=datetime.timedelta(days=2))
    return Place(device, rank, world, local)


# ---------------------------------------------------------------------------------------------------------------------
# One evaluation
# ---------------------------------------------------------------------------------------------------------------------


def evaluate(args, place: Place, extractor: Extractor, real: PictureSet, fake: PictureSet, about: dict) -> dict:
    """Measure a set of pictures and write the result, whose `path` is where. about: what else it says."""
    started, names = time.time(), choose_measures(args.measures, extractor)
    size = args.size
    if size is None:
        sides = {side for p in fake.pictures for side in p.size}
        if len(sides) > 1:
            raise InputError(
                f"the pictures of {fake.source} are not all squares of one size (sides of {min(sides)} to {max(sides)} "
                "pixels): give --size, to which all are cut"
            )
        size = sides.pop()
    if "clip_score" in names and (lacking := sum(not p.caption for p in fake.pictures)):
        raise InputError(
            f"--measures clip_score wants a prompt for each picture, and {lacking:,} of {fake.source} have none: paint "
            "with --model, or put a .txt beside each"
        )
    cache = args.cache or args.out / "features"
    real, a = features_of(real, extractor, size, cache, place, args.batch, args.workers)
    wanted = len(fake.pictures)
    fake, b = features_of(fake, extractor, size, cache, place, args.batch, args.workers)
    if len(fake.pictures) < wanted:
        raise InputError(f"{wanted - len(fake.pictures)} pictures of {fake.source} do not decode: paint them again")

    def judge() -> dict:
        captions = [p.caption for p in fake.pictures]
        texts = text_features(captions, extractor, cache) if "clip_score" in names else None
        found = measure(names, real, fake, a, b, texts)
        if texts is not None:
            found["clip_score"]["texts_cut"] = extractor.too_long(captions)
        protocol = protocol_of(real, fake, extractor, size)
        result = {
            "format": FORMAT,
            "measures": {name: {"label": label(name, extractor)} | values for name, values in found.items()},
            "protocol": protocol,
            "warnings": warnings_of(real, fake, size, a.shape[1], names),
            "about": about | {"real": args.real, "generated": fake.source, "generated_sha256": fake.sha256,
                              "device": str(place.device), "seconds": round(time.time() - started, 1)},
        }  # fmt: skip
        word = re.sub(r"[^\w.-]+", "_", extractor.name)
        path = args.out / f"{word}_{digest([protocol, fake.sha256, sorted(found)])[:12]}.json"
        write_json(path, result)
        return result | {"path": str(path)}

    return together(place, judge, first_alone=True)


def shown(result: dict) -> str:
    """A result in words: warnings, then values, then where it was written."""
    lines = [f"warning: {text}" for text in result["warnings"]]
    for values in result["measures"].values():
        spread = f" (std of subsets {values['std']:.3g})" if "std" in values else ""
        same = f", {values['identical']} identical" if "identical" in values else ""
        lines.append(f"{values['label']}: {values['value']:.6g}{spread}{same}")
    return "\n".join([*lines, result["path"]])


def painting(args, size: int, n: int, real: PictureSet, device) -> Painting:
    """How --model or --during paints."""
    dtype = args.dtype or usual_dtype(device)
    prompts = prompts_for(args.prompts, real)
    return Painting(
        prompts, args.sampler, args.steps, args.cfg, args.seed, args.weights, dtype, size, n, args.paint_batch
    )


def painted(folder: Path, names: list[str]) -> PictureSet:
    """Those pictures of a folder that were asked for; one that cannot be opened is an error."""
    found = scan(str(folder))
    wanted = set(names)
    chosen = [p for p in found.pictures if p.name in wanted]
    if len(chosen) < len(names):
        lost = sorted(wanted - {p.name for p in chosen})[0]
        raise InputError(f"{folder / lost} cannot be opened: delete it, and run the command again")
    return PictureSet(str(folder), chosen, found.rejects - found.rejects)


def evaluate_model(args, place: Place, extractor: Extractor, real: PictureSet, source, folder: Path, n: int) -> dict:
    """Paint with a model into a folder, and measure what it painted."""
    model = together(place, lambda: open_model(source, args.weights))
    if place.first:
        print(model.found)
    how = painting(args, args.size or model.size, n, real, place.device)
    names = paint_folder(folder, model, source, how, place)
    del model
    fake = together(place, lambda: painted(folder, names), first_alone=True)
    return evaluate(args, place, extractor, real, fake, {"model": str(source), "step": checkpoint_step(Path(source))})


# ---------------------------------------------------------------------------------------------------------------------
# A run, as it goes on
# ---------------------------------------------------------------------------------------------------------------------


def is_training(run: Path) -> bool:
    """Whether a process holds the run's lock."""
    try:
        with open(run / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock, or a file system without locks
        return False
    return False


def due(run: Path, request: str, failed: dict) -> tuple[Path, str] | None:
    """The oldest whole checkpoint that was not measured in this way yet, with the hash of its manifest."""
    done = {(row.get("checkpoint"), row.get("request")) for row in read_rows(run / LOG)}
    for folder in reversed(checkpoint_folders(run)):
        with contextlib.suppress(InputError):  # of a checkpoint that is removed just now
            own = digest(read_json(folder / "manifest.json"))[:16]
            if (own, request) in done or own in failed:
                continue
            fault = checkpoint_problem(folder, skip=("optimizer.pt",))
            if fault is None:
                return folder, own
            if folder.exists():
                failed[own] = f"{folder.name}: {fault}"
                print(f"warning: {failed[own]}: left out", file=sys.stderr)
    return None


def evaluate_run(args, place: Place, extractor: Extractor, real: PictureSet):
    """Measure each whole checkpoint of a run once; end when nobody trains in it any more and none is left."""
    run_folder, failed, measured = Path(args.during), {}, 0
    names = choose_measures(args.measures, extractor)
    how = painting(args, args.size or 8, args.n or 1000, real, place.device)
    check_painting(how)
    request = digest([extractor.protocol(), extractor.identity(args.size or 0), real.sha256, names, vars(how)])[:16]

    def next_one():
        training = is_training(run_folder)  # asked first: the last checkpoint is there before the lock is free
        return due(run_folder, request, failed), training

    while True:
        found, training = together(place, next_one, first_alone=True)
        if found is None:
            if args.once or not training:
                break
            time.sleep(args.every)
            continue
        checkpoint, own = found
        folder = args.out / f"{checkpoint.name}_{own}_{request}"
        try:
            result = evaluate_model(args, place, extractor, real, checkpoint, folder, how.n)
        except InputError as e:
            fault = f"{checkpoint.name}: {e}"
            if together(place, checkpoint.exists, first_alone=True):
                failed[own] = fault
            if place.first:
                print(f"warning: {fault}" + ("" if own in failed else "; it was removed meanwhile"), file=sys.stderr)
            continue
        measured += 1
        if place.first:
            add_row(run_folder, checkpoint, own, request, result)
            print(shown(result))
            if not args.keep_pictures:
                shutil.rmtree(folder)
    together(place, lambda: end_of_run(run_folder, request, measured, failed), first_alone=True)


def end_of_run(run_folder: Path, request: str, measured: int, failed: dict):
    """The last line, or InputError if there was nothing to do or some of it failed."""
    if failed:
        first = next(iter(failed.values()))
        raise InputError(f"{len(failed)} checkpoints could not be measured, and {measured} were: {first}")
    if not measured and not any(row.get("request") == request for row in read_rows(run_folder / LOG)):
        raise InputError(f"{run_folder} has no whole checkpoint, and nobody trains in it: start the training first")
    print(f"{measured} checkpoints measured: {run_folder / LOG}")


def add_row(run_folder: Path, checkpoint: Path, own: str, request: str, result: dict):
    """A line of the run's evaluation.jsonl, and its curves."""
    log = run_folder / LOG
    if log.exists() and log.read_bytes()[-1:] not in (b"", b"\n"):  # cut short by a kill
        with open(log, "a") as file:
            file.write("\n")
    values = {name: m["value"] for name, m in result["measures"].items()}
    row = {"step": checkpoint_step(checkpoint), "weights": result["protocol"]["generated"]["weights"]}
    row |= {"extractor": result["protocol"]["extractor"]["name"], **values, "checkpoint": own, "request": request}
    append_json(log, row | {"protocol": digest(result["protocol"])[:16], "result": result["path"]})
    with contextlib.suppress(OSError):  # a full disk
        plot_run(run_folder)


# ---------------------------------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------------------------------


def print_check(extractor: Extractor) -> bool:
    answers = check(extractor)
    for a in answers:
        word = "right" if a.right else "WRONG"
        print(f"{word}  {a.question}: {a.found:.6g}, wanted {a.wanted:.6g} within {a.tolerance:.1g}")
    wrong = sum(not a.right for a in answers)
    print(f"{len(answers)} answers, {wrong} wrong")
    return wrong == 0


def main(argv=None):
    args = parse_args(argv)
    if args.compare:
        print("\n".join(compare(args.compare, args.differs)))
        return
    place = join_processes(args.device)
    try:
        extractor = together(place, lambda: make_extractor(args.extractor, place.device, args.resize))
        if args.check:
            if not together(place, lambda: print_check(extractor), first_alone=True):
                raise SystemExit(1)
            return
        choose_measures(args.measures, extractor)
        if args.during and not Path(args.during).is_dir():
            raise InputError(f"--during wants a run folder, and there is none at {args.during}")
        args.out = args.out or (Path(args.during) / "evaluation" if args.during else Path("evaluation"))
        together(place, lambda: make_writable(args.out), first_alone=True)
        real = together(place, lambda: scan(args.real).first(args.n_real), first_alone=True)
        if args.during:
            evaluate_run(args, place, extractor, real)
            return
        if args.pictures:
            fake = together(place, lambda: scan(args.pictures).first(args.n), first_alone=True)
            result = evaluate(args, place, extractor, real, fake, {})
        else:
            result = evaluate_model(args, place, extractor, real, args.model, args.out / "pictures", args.n or 10_000)
        if place.first:
            print(shown(result))
            print(json.dumps({name: m["value"] for name, m in result["measures"].items()}))
    finally:
        if place.world > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
