"""The main job on an embedded default: pictures, latents, training, and a check of what the model paints.

    python demo/run.py                          # or: make demo
    python demo/run.py --make_vae               # with an autoencoder of its own

Every stage is one of the project's own programs with the flags printed here. Run again after a stop and it goes on;
when all is done it says so. Everything lies in runs/demo; `make clean_demo` removes it.
"""

import json
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo import evaluate  # noqa: E402
from demo.stages import Stage, Stages  # noqa: E402
from sd.cli import parser  # noqa: E402
from sd.errors import run  # noqa: E402
from sd.files import atomic_write  # noqa: E402
from sd.pictures import read_numbered  # noqa: E402
from sd.shapes import shape_prompts  # noqa: E402

# What the README promises; below it the demo fails. The aim is 0.97 each and 0.95 for all four.
PROMISED = {"colour": 0.95, "shape": 0.88, "position": 0.97, "background": 0.97, "all": 0.85}
EVALUATED = 256  # pictures each of three sets
TRAINING = (
    "--text_lr 0.003 --beta2 0.99 --max_steps 2600 --channels_last --save_steps 500 --val_steps 1000 --sample_cfg 3 "
    "--wandb disabled"
).split()
SAMPLING = "--sampler dpmpp_2m --steps 12 --cfg 3 --batch 128".split()


def stages(out: Path, make_vae: bool) -> list[Stage]:
    """All of them, in order."""
    source = out / "data" / "shapes"
    images, tokenizer = source / "images", source / "tokenizer"
    colourful = out / "data" / "any_colour"  # of many colours, an autoencoder's outlines are cleaner
    vae = out / "vae" / "vae" if make_vae else "demo/vae"
    keep = ["--min_aesthetic", "6", "--min_similarity", "0.25", "--max_watermark", "0.5", "--max_unsafe", "0.5"]
    paint = ["SD_ImageGen.py", "--model", out / "train", *SAMPLING, "--overwrite"]  # a stage that stopped begins anew
    circles = [*paint, "--prompt", "a circle", "--n", EVALUATED]
    commands = {
        "draw pictures": [["data_pipeline/00_make_shapes.py", "--out", source, "--count", 8000, "--size", 64]],
        "filter": [["data_pipeline/02_filter.py", "--in", images, "--out", source / "filtered", *keep]],
        "tokenise": [
            ["data_pipeline/04a_make_tokenizer.py", "--in", images, "--out", tokenizer, "--max_length", 16],
            ["data_pipeline/04_tokenise.py", "--in", images, "--keep", source / "filtered", "--out", source / "tokens",
             "--tokenizer", tokenizer],
            ["data_pipeline/05_build_hf_dataset.py", "--in", source / "tokens", "--out", source / "dataset",
             "--val_fraction", 0.03],
        ],
        "train a VAE": [
            ["data_pipeline/00_make_shapes.py", "--out", colourful, "--count", 16000, "--size", 64,
             "--named_share", 0.4],
            ["SD_TrainVAE.py", "--model", "tiny", "--images", colourful / "images", "--out", out / "vae", "--size", 64,
             "--batch", 64, "--max_steps", 4000, "--kl_weight", "1e-4", "--resume"],
        ],
        "encode latents": [["encode_latents.py", "--images", images, "--vae", vae, "--out", source / "latents",
                            "--size", 64, "--batch", 128]],
        "train": [["SD_Train.py", "--phase", "demo", "--data_root", out / "data", "--out", out / "train", "--resume",
                   "--tokenizer", tokenizer, "--train_text_encoder", *TRAINING]],
        "paint": [
            [*paint, "--prompts_file", out / "prompts.jsonl", "--out", out / "held_out"],
            [*circles, "--out", out / "circles"],
            [*circles, "--negative", "red", "--out", out / "circles_not_red"],
        ],
    }  # fmt: skip
    if not make_vae:
        del commands["train a VAE"]
    return [Stage(name, [[str(word) for word in line] for line in lines]) for name, lines in commands.items()]


def measure(out: Path) -> dict:
    """Accuracy on prompts whose pair of shape and colour was never trained, and what a negative prompt does."""
    prompts = [json.loads(line) for line in (out / "prompts.jsonl").read_text().splitlines()]
    result = evaluate.accuracy(read_numbered(out / "held_out"), prompts)
    plain, negative = read_numbered(out / "circles"), read_numbered(out / "circles_not_red")
    result["red_without_negative"] = evaluate.share(plain, "colour", "red")
    result["red_with_negative"] = evaluate.share(negative, "colour", "red")
    result["circles_with_negative"] = evaluate.share(negative, "shape", "circle")
    return result


def report(out: Path, result: dict) -> list[str]:
    """Print the table and the JSON line; returns what falls short of the promise."""
    print(f"\n{EVALUATED} prompts whose (shape, colour) pair was never trained: {out}/held_out/grid.png\n")
    short = [k for k, least in PROMISED.items() if result[k] < least]
    for name, least in PROMISED.items():
        print(f"  {name:12} {result[name]:.3f}   promised {least}{'   TOO LOW' if name in short else ''}")
    before, after = result["red_without_negative"], result["red_with_negative"]
    print(f"\n'a circle': {before:.1%} red; with --negative red {after:.1%} red, "
          f"{result['circles_with_negative']:.1%} circles\n")  # fmt: skip
    if before < 0.08 or after > before / 4:
        short.append("negative prompt")
    if result["circles_with_negative"] < 0.9:
        short.append("circles with a negative prompt")
    if short:
        print(f"below the promise: {', '.join(short)}", file=sys.stderr)
    print(json.dumps({k: round(result[k], 4) for k in (*PROMISED, "minutes")}))
    return short


def main():
    p = parser(__doc__)
    g = p.add_argument_group("the demo")
    g.add_argument("--out", default="runs/demo", help="folder of all that it makes")
    g.add_argument("--make_vae", action="store_true", help="train the autoencoder anew instead of using demo/vae")
    args = p.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / "prompts.jsonl", "".join(
        json.dumps(row) + "\n" for row in shape_prompts("held_out", EVALUATED, seed=0)))  # fmt: skip
    runner, plan = Stages(out / "stages.json"), stages(out, args.make_vae)
    if runner.done:
        whole = len(runner.done) == len(plan)
        print(f"the demo is done already; everything is in {out}" if whole else
              f"going on with {out}: done are {', '.join(runner.done)}")  # fmt: skip
    seconds = runner.run(plan)
    started = time.time()
    result = measure(out)
    result["minutes"] = round((sum(seconds.values()) + time.time() - started) / 60, 2)
    if report(out, result):
        raise SystemExit(1)


if __name__ == "__main__":
    run(main)
