"""What training from tars costs beside cached latents, and what the health figures cost, on one NVIDIA GPU.

    python benchmarks/from_tars.py --out runs/from_tars                      # 6 minutes on an H200 (estimate)
    python benchmarks/from_tars.py --trial --out runs/trial                  # all of it tiny, on a CPU

The sd15 network trains at 512 px (batch 32) and 256 px (batch 128), with text encoder, EMA and the real loader: from
cached latents, then from tars of JPEGs of 768 x 640 pixels, which are decoded and encoded beside it. Then it is trained
at 512 px with --health_steps 10 and with 0, from which follows what the figures cost at the usual 200. Data are made at
the start. --out gets from_tars.jsonl, a line for each, with card, cores, torch and revision; a table is printed.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from large_data import LargeData, make_large  # noqa: E402

from sd.cli import parser  # noqa: E402
from sd.errors import InputError, run  # noqa: E402
from sd.files import make_folder  # noqa: E402
from sd.log import read_rows  # noqa: E402
from sd.setup import git_revision  # noqa: E402

SIZES = {512: 32, 256: 128}  # pixels a side: batch
EVERY = 10  # steps between health figures, to measure them; 200 is usual
FIGURES = "images_per_s ms_per_step data_wait_ms forward_backward_ms optimizer_ms peak_GiB mfu".split()


def train(words: list, folder: Path) -> str:
    """What a training printed. RuntimeError unless it ends well."""
    done = subprocess.run([sys.executable, "SD_Train.py", *map(str, words)], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"HF_HUB_OFFLINE": "1"})  # fmt: skip
    (folder / "last_output.txt").write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"SD_Train.py ended with status {done.returncode}: {done.stderr[-800:]}")
    return done.stdout


def settings(data: LargeData, size: int, batch: int, trial: bool) -> list:
    return ["--phase", "scratch_256", "--model", "tiny" if trial else "sd15", "--size", size, "--batch", batch,
            "--accumulate", 1, "--text_encoder", data.root / "text_encoder", "--device", "cpu" if trial else "cuda",
            "--wandb", "disabled", "--sample_steps", 0]  # fmt: skip


def speeds(data: LargeData, steps: int, workers: int, trial: bool, folder: Path):
    """A line for each size and each way to the latents."""
    latents = ["--data_root", data.root, "--data", "random"]
    tars = ["--pictures", data.tars, "--vae", data.root / "vae", "--picture_memory", 0.001, "--workers", workers]
    for size, batch in ({64: 4, 32: 4} if trial else SIZES).items():
        cached = 0.0
        for name, more in (("cached latents", latents), ("tars of JPEGs", tars)):
            out = train([*settings(data, size, batch, trial), *more, "--out", folder / "none", "--benchmark", steps],
                        folder)  # fmt: skip
            found = next(json.loads(line) for line in out.splitlines() if line.startswith('{"benchmark"'))
            line = {"what": name, "size": size, "batch": batch, **{k: found[k] for k in FIGURES if k in found}}
            rate = found["images_per_s"]
            if more is tars:
                line |= {"of_cached": round(rate / cached, 3), "decode_ms": round(data.decode_ms, 2),
                         "cores_that_decode": round(rate * data.decode_ms / 1e3, 1)}  # fmt: skip
            else:
                cached = rate
            yield line | {"data_wait_share": round(found["data_wait_ms"] / found["ms_per_step"], 4)}


def health(data: LargeData, steps: int, trial: bool, folder: Path) -> dict:
    """What a row of health figures costs: from the medians of the rates of ten steps, with and without."""
    size, batch = (64, 4) if trial else (512, SIZES[512])
    seconds = {}
    for every in (0, EVERY):
        out = folder / f"health_{every}"
        train([*settings(data, size, batch, trial), "--data_root", data.root, "--data", "random", "--out", out,
               "--max_steps", steps, "--log_steps", EVERY, "--val_steps", 0, "--save_steps", steps, "--health_steps",
               every], folder)  # fmt: skip
        rates = [row["images_per_s"] for row in read_rows(out / "log.jsonl") if row["step"] > steps // 3]
        seconds[every] = batch / statistics.median(rates)  # a step
        if (rows := len(read_rows(out / "health.jsonl")) if every else 0) != (steps // EVERY if every else 0):
            raise RuntimeError(f"--health_steps {every} wrote {rows} rows in {steps} steps")
    row = (seconds[EVERY] - seconds[0]) * EVERY
    return {"what": "health figures", "size": size, "batch": batch, "ms_per_step": round(seconds[0] * 1e3, 2),
            f"ms_per_step_every_{EVERY}": round(seconds[EVERY] * 1e3, 2), "ms_a_row": round(row * 1e3, 1),
            "share_every_200": round(row / (200 * seconds[0]), 5)}  # fmt: skip


def main():
    p = parser(__doc__)
    g = p.add_argument_group("what is measured")
    g.add_argument("--steps", type=int, help="of each benchmark (default: 80, in a trial 4)")
    g.add_argument("--workers", type=int, help="threads that decode (default: as many as there are cores)")
    g.add_argument("--trial", action="store_true", help="everything tiny, on a CPU")

    g = p.add_argument_group("running")
    g.add_argument("--out", type=Path, default=Path("runs/from_tars"), help="folder for from_tars.jsonl")
    g.add_argument("--revision", help="of the code, for the lines (default: what git says)")
    args = p.parse_args()
    if not (args.trial or torch.cuda.is_available()):
        raise InputError("an NVIDIA GPU was wanted, and none is there: run it where one is, or with --trial")
    about = {"card": "cpu" if args.trial else torch.cuda.get_device_name(), "cores": os.cpu_count(),
             "torch": torch.__version__, "revision": args.revision or git_revision()}  # fmt: skip
    make_folder(args.out)
    work, lines = Path(tempfile.mkdtemp(prefix="from_tars_")), []

    def told(line: dict):
        lines.append(line)
        print(json.dumps(line), flush=True)
        with open(args.out / "from_tars.jsonl", "a") as file:
            file.write(json.dumps(about | line) + "\n")

    try:
        data = make_large(work / "large", args.trial, (32,) if args.trial else (256,))
        steps = args.steps or (4 if args.trial else 80)
        for line in speeds(data, steps, args.workers or os.cpu_count() or 1, args.trial, work):
            told(line)
        told(health(data, 30 if args.trial else 120, args.trial, work))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"\n| what | size, batch | images/s | of cached latents | waits for data |\n|{'---|' * 5}")
    for line in lines[:-1]:
        print(f"| {line['what']} | {line['size']}, {line['batch']} | {line['images_per_s']:.1f} | "
              f"{line.get('of_cached', '')} | {line['data_wait_share']:.1%} |")  # fmt: skip
    print(f"\nhealth figures: {lines[-1]['ms_a_row']} ms a row, {lines[-1]['share_every_200']:.2%} of 200 steps")


if __name__ == "__main__":
    run(main)
