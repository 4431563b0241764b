"""How few steps each sampler needs: paints held-out prompts with every sampler at several numbers of steps, measured.

    pip install -r requirements-data.txt
    python demo/sampler_steps.py --model runs/showcase/small/256 --prompts runs/showcase/prompts.jsonl \\
        --data runs/showcase/data/256/drawings/images --features runs/showcase/features.npz --out runs/sampler_steps
    python demo/sampler_steps.py --model runs/drawings --prompts prompts.jsonl --data data/drawings/images \\
        --samplers dpmpp_2m --steps 20 --weights ema live --out measured        # one figure of the average, one of live

The prompts are the held-out pairs of --prompts, the measure is that of demo/evaluate_drawings.py: is the real drawing
of the pair the nearest of all (top 1, top 5)? Pictures are painted at the size that the model was trained at; a prompt
has the same noise with every sampler. What is painted or measured is not done again: the same command goes on after a
stop.

Writes table.json (weights, sampler, steps: figures) and table.md. 'Fewest' are the steps of a sampler from which on it
stays within two standard errors of the best share of top 1 in the table.
"""

import json
import math
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo.evaluate_drawings import Extractor, World, measure, read_prompts  # noqa: E402
from sd.cli import parser  # noqa: E402
from sd.device import setup_device, usual_dtype  # noqa: E402
from sd.errors import InputError, run  # noqa: E402
from sd.files import atomic_write, make_folder, read_json  # noqa: E402
from sd.painted import Painting, paint_folder  # noqa: E402
from sd.pictures import read_numbered  # noqa: E402
from sd.samplers import SAMPLERS  # noqa: E402
from sd.weights.read import open_model  # noqa: E402

SEED = 1000  # of the first prompt, as in the prompts file


def fewest(by_steps: dict[str, dict], best: float) -> int | None:
    """The steps from which on the share of top 1 stays within two standard errors of the best; None if never.

    by_steps: steps, as text, to {'top1': share, 'of': prompts}. The error is the share's own, sqrt(p (1 - p) / n).
    """
    found = None
    for steps in sorted(map(int, by_steps), reverse=True):
        p, n = by_steps[str(steps)]["top1"], by_steps[str(steps)]["of"]
        if p + 2 * math.sqrt(p * (1 - p) / n) < best:
            break
        found = steps
    return found


def as_markdown(table: dict, real: dict | None) -> str:
    """The table for people: of each weights and sampler the top 1 / top 5 at each number of steps, and the fewest."""
    figures = [f for samplers in table.values() for by_steps in samplers.values() for f in by_steps.values()]
    columns = sorted({int(s) for samplers in table.values() for by_steps in samplers.values() for s in by_steps})
    best = max(f["top1"] for f in figures)
    lines = [
        f"Top 1 / top 5 of {figures[0]['of']} held-out pairs; by chance {figures[0]['chance']:.3f}"
        + (f"; a real drawing in another style {real['top1']:.3f} / {real['top5']:.3f}" if real else "") + ".",
        "",
        "| weights | sampler | " + " | ".join(f"{n} steps" for n in columns) + " | fewest |",
        "|---|---|" + "---|" * (len(columns) + 1),
    ]  # fmt: skip
    for weights, samplers in table.items():
        for sampler, by_steps in samplers.items():
            cells = [by_steps.get(str(n)) for n in columns]
            cells = [f"{c['top1']:.3f} / {c['top5']:.3f}" if c else "" for c in cells]
            lines.append(f"| {weights} | {sampler} | {' | '.join(cells)} | {fewest(by_steps, best) or 'more'} |")
    return "\n".join(lines) + "\n"


def main(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("what is painted")
    g.add_argument("--model", required=True, help="checkpoint or run folder, or any SD 1.x model")
    g.add_argument("--prompts", required=True, metavar="FILE", help="the .jsonl of evaluate_drawings.py")
    g.add_argument("--samplers", nargs="+", default=list(SAMPLERS), choices=SAMPLERS, help="which of them")
    g.add_argument("--steps", nargs="+", type=int, default=[5, 8, 10, 15, 20, 30, 50], help="numbers of steps")
    g.add_argument("--weights", nargs="+", default=["ema"], choices=["ema", "live"], help="average, last ones, or both")
    g.add_argument("--cfg", type=float, default=5.0, help="guidance scale")

    g = p.add_argument_group("how it is measured")
    g.add_argument("--data", type=Path, required=True, help="shards of real drawings, of 01i_emoji_styles.py")
    g.add_argument("--features", type=Path, help="a .npz that keeps their features between runs (default: no file)")

    g = p.add_argument_group("running")
    g.add_argument("--out", type=Path, required=True, help="folder of the pictures and the table")
    g.add_argument("--batch", type=int, default=100, help="pictures at once")
    g.add_argument("--device", help="cuda or cpu (default: cuda if there is one)")
    args = p.parse_args(argv)
    prompts = [row for row in read_prompts(args.prompts) if row["test"] == "held_out"]
    if len(prompts) < 2:
        raise InputError(f"{args.prompts} has {len(prompts)} held-out prompts, and 2 or more are needed: write it anew")
    place = setup_device(args.device)
    make_folder(args.out)
    world, real = None, None
    table: dict[str, dict] = {w: {s: {} for s in args.samplers} for w in args.weights}
    for weights in args.weights:
        model = open_model(args.model, weights)
        print(model.found)
        for sampler in args.samplers:
            for steps in sorted(set(args.steps)):
                folder = args.out / f"{weights}-{sampler}-{steps}"
                how = Painting(tuple(row["prompt"] for row in prompts), sampler, steps, args.cfg, SEED, weights,
                               usual_dtype(place.device), model.size, len(prompts), args.batch)  # fmt: skip
                paint_folder(folder, model, args.model, how, place)
                measured = folder / "figures.json"
                if not measured.exists():
                    world = world or World(args.data, Extractor(str(place.device), 64), args.features)
                    images = read_numbered(folder)
                    atomic_write(measured, json.dumps(measure(world, prompts, images, with_copies=False), indent=1))
                found = read_json(measured)
                if "held_out" not in found:
                    raise InputError(f"{args.data} does not hold the drawings that {args.prompts} asks for")
                found = found["held_out"]
                if found["reference_other_style"]["top1"] is not None:  # there are trained ones in other styles
                    real = found["reference_other_style"]
                table[weights][sampler][str(steps)] = {k: found[k] for k in ("top1", "top5", "of", "chance")} | {
                    "named": found["named_of_all"]["top1"]
                }
                print(f"{weights} {sampler} {steps}: top 1 {found['top1']:.3f}, top 5 {found['top5']:.3f}", flush=True)
    text = as_markdown(table, real)
    atomic_write(args.out / "table.json", json.dumps(table, indent=1) + "\n")
    atomic_write(args.out / "table.md", text)
    print(text)


if __name__ == "__main__":
    run(main)
