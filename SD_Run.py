"""What a training run leaves on disk: checkpoints, logs, curves and a page about it.

    python SD_Run.py runs/1_broad --report                               # write report.html anew, of a running run too
    python SD_Run.py --compare runs/1_broad runs/2_hq --out both.html    # two runs on one page, their curves overlaid
    python SD_Run.py --plot runs/1_broad                                 # draw curves.png anew
    python SD_Run.py --lineage runs/2_hq                                 # the parents of a checkpoint, run or export

Run folder: config.json, run.json (how to go on, and where it ran), log.jsonl, validation.jsonl, health.jsonl,
curves.png, report.html, evaluation.jsonl (of SD_Evaluate.py), samples/, checkpoints/step_00012000/.
Checkpoint: unet.safetensors, unet_ema.safetensors, text_encoder/ and text_encoder_ema/ (if trained), vae/ (if small),
optimizer.pt, model.json (what it is), state.json (where training stands), manifest.json (sha256 of every file).
"""

from pathlib import Path

from sd.cli import parser
from sd.errors import InputError, run
from sd.files import atomic_write
from sd.log import plot_run
from sd.report import compare, write_report
from sd.weights.read import open_model


def print_lineage(source: str):
    """The chain of parents of a model: phase, images, parent's hash, data, from the first phase to the last."""
    model = open_model(source)
    print(model.found)
    chain = model.lineage.get("lineage") or []
    if not chain:
        print("it says nothing of how it was trained")
    for n, entry in enumerate(chain, 1):
        name = entry["phase"] if "path" not in entry else f"{entry['phase']} of {entry['path']}"
        images = f", {entry['images']:,} images" if "images" in entry else ""
        weights = f", EMA weights {entry['hash'][:16]}" if "hash" in entry else ""
        made_by = f" (revision {entry['revision'][:12]})" if entry.get("revision") else ""
        print(f"{n}. {name}{images}{weights}{made_by}")
        for data, digest in entry.get("data", {}).items():
            print(f"     {data}  manifest {digest[:16]}")


def run_at(folder: str, flag: str) -> Path:
    """A run folder. InputError if it has no log."""
    if not (Path(folder) / "log.jsonl").is_file():
        raise InputError(f"{flag} wants a run folder, and {folder} has no log.jsonl")
    return Path(folder)


def page_at(out: str) -> Path:
    """Where a page is to be written. InputError if it cannot be there."""
    if Path(out).is_dir() or not Path(out).absolute().parent.is_dir():
        raise InputError(f"--out wants a file in a folder that is there, found {out}")
    return Path(out)


def main(argv=None):
    p = parser(__doc__)
    p.add_argument_group("the run").add_argument(
        "run", nargs="?", metavar="RUN", help="run folder; with --report it must be given"
    )
    what = p.add_argument_group("one of these").add_mutually_exclusive_group(required=True)
    what.add_argument("--report", action="store_true", help="write RUN's page anew: curves, grids, settings, lineage")
    what.add_argument("--compare", nargs=2, metavar=("A", "B"), help="write a page of two runs, their curves overlaid")
    what.add_argument("--plot", metavar="RUN", help="draw curves.png of a run folder anew")
    what.add_argument("--lineage", metavar="MODEL", help="print the chain of parents of a checkpoint, run or export")
    p.add_argument_group("output").add_argument(
        "--out", metavar="FILE", help="the page (default: report.html in RUN; compare.html here)"
    )
    args = p.parse_args(argv)
    if (args.run is not None) != args.report:
        raise InputError(f"RUN and --report go together: give {'--report too' if args.run else 'the run folder too'}")
    if args.out is not None and not (args.report or args.compare):
        raise InputError("--out is of --report and --compare: drop it")
    if args.lineage is not None:
        return print_lineage(args.lineage)
    if args.plot is not None:
        plot_run(run_at(args.plot, "--plot"))
        return print(Path(args.plot) / "curves.png")
    if args.report:
        folder = run_at(args.run, "--report")
        out = page_at(args.out) if args.out else folder / "report.html"
        write_report(folder, out)
    else:
        a, b = (run_at(folder, "--compare") for folder in args.compare)
        if a.resolve() == b.resolve():
            raise InputError(f"--compare wants two runs, found {a} twice")
        out = page_at(args.out or "compare.html")
        atomic_write(out, compare(a, b))
    print(f"{out}: {out.stat().st_size / 2**20:.1f} MB")


if __name__ == "__main__":
    run(main)
