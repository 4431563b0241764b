"""What a training run leaves on disk: checkpoints, logs and curves.

    python SD_Run.py --plot runs/1_broad          # draw curves.png anew, of a running run too
    python SD_Run.py --lineage runs/2_hq       # the chain of parents of a checkpoint, run or export

Run folder: config.json, log.jsonl, validation.jsonl, health.jsonl, curves.png, samples/, checkpoints/step_00012000/.
Checkpoint: unet.safetensors, unet_ema.safetensors, text_encoder/ and text_encoder_ema/ (if trained), vae/ (if small),
optimizer.pt, model.json (what it is), state.json (where training stands), manifest.json (sha256 of every file).
"""

from pathlib import Path

from sd.cli import parser
from sd.errors import InputError, run
from sd.log import plot_run
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


def main(argv=None):
    p = parser(__doc__)
    what = p.add_argument_group("one of these").add_mutually_exclusive_group(required=True)
    what.add_argument("--plot", metavar="RUN", help="draw curves.png of a run folder anew")
    what.add_argument("--lineage", metavar="MODEL", help="print the chain of parents of a checkpoint, run or export")
    args = p.parse_args(argv)
    if args.lineage is not None:
        return print_lineage(args.lineage)
    if not (Path(args.plot) / "log.jsonl").is_file():
        raise InputError(f"--plot wants a run folder, and {args.plot} has no log.jsonl")
    plot_run(Path(args.plot))
    print(Path(args.plot) / "curves.png")


if __name__ == "__main__":
    run(main)
