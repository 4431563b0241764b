"""Log lines and curves of a run."""

import contextlib
import copy
import hashlib
import json
import math
import os
import sys
import threading
import time
from pathlib import Path

from sd.files import atomic_path, atomic_write
from sd.objective import BINS


class Window:
    """Sums over the steps since the last line of the log; part of a checkpoint, so that the log too resumes exactly."""

    def __init__(self, state: dict | None = None):
        zeros = {"losses": [0.0] * BINS, "counts": [0.0] * BINS, "norm": 0.0, "steps": 0, "skipped": 0}
        self.values = state or zeros
        self._started, self._timed, self._waited = time.perf_counter(), 0, 0.0

    def state(self) -> dict:
        """A copy, which later steps do not change."""
        return copy.deepcopy(self.values)

    def waited(self, seconds: float):
        """For the loader's next batch, with the device idle."""
        self._waited += seconds

    def add(self, sums: list[float], norm: float, skipped: bool):
        """sums: of losses, then of counts, by timestep bin, over the step's global batch."""
        v = self.values
        v["steps"] += 1
        v["skipped"] += skipped
        self._timed += 1
        if not skipped:
            v["losses"] = [a + b for a, b in zip(v["losses"], sums[:BINS])]
            v["counts"] = [a + b for a, b in zip(v["counts"], sums[BINS:])]
            v["norm"] += norm

    def row(self, step: int, global_batch: int, epoch_size: int, lr: float) -> dict:
        """The line of log.jsonl. loss: weighted, mean over the window's samples; bins: the same by timestep. None where
        there is nothing to take the mean of, as when all steps were skipped. data_wait: share of the time, 0 to 1."""
        v, taken, count = self.values, self.values["steps"] - self.values["skipped"], sum(self.values["counts"])
        seconds = time.perf_counter() - self._started
        return {
            "step": step,
            "images": step * global_batch,
            "epoch": step * global_batch / epoch_size,
            "loss": sum(v["losses"]) / count if count else None,
            "lr": lr,
            "grad_norm": v["norm"] / taken if taken else None,
            "skipped": v["skipped"],
            "images_per_s": self._timed * global_batch / seconds,
            "data_wait": self._waited / seconds,
            "bins": [a / n if n else None for a, n in zip(v["losses"], v["counts"])],
        }


class Log:
    """JSON lines beside the run, and wandb if it works. Neither a full disk nor a failing wandb stops training: lines
    wait in memory until there is room."""

    def __init__(self, out: Path, settings: dict, resumed_at: int):
        self.out, self.wandb, self._waiting = out, None, {}
        for name in ("log.jsonl", "validation.jsonl", "health.jsonl"):
            cut_log(out / name, resumed_at)
        mode = wandb_mode(settings["wandb"])
        if mode == "disabled":
            return
        try:
            import wandb

            self.wandb = wandb.init(
                project="stable-diffusion", name=out.name, config=settings, mode=mode, dir=str(out), resume="allow",
                id=hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16],
                settings=wandb.Settings(init_timeout=30),
            )  # fmt: skip
        except (Exception, SystemExit) as e:
            print(f"warning: wandb is off ({e or type(e).__name__})", file=sys.stderr)

    def write(self, name: str, row: dict):
        """Add a line to log.jsonl, validation.jsonl or health.jsonl, and its numbers to wandb, those by names too."""
        lines = self._waiting.setdefault(name, [])
        row = finite_or_null(row)
        lines.append(json.dumps(row, allow_nan=False) + "\n")
        try:
            with open(self.out / name, "ab") as f:
                size = f.tell()
                try:
                    f.write("".join(lines).encode())
                    f.flush()
                    lines.clear()
                except OSError:
                    os.ftruncate(f.fileno(), size)  # no half lines
                    raise
        except OSError as e:
            if len(lines) == 1:
                print(
                    f"\nwarning: {self.out / name} cannot be written ({e}); its lines wait in memory", file=sys.stderr
                )
        named = {
            f"{k}/{part}": v for k, by_name in row.items() if isinstance(by_name, dict) for part, v in by_name.items()
        }
        numbers = {k: v for k, v in (row | named).items() if isinstance(v, int | float)}
        self._to_wandb({f"{Path(name).stem}/{k}": v for k, v in numbers.items()}, row["step"])

    def picture(self, path: Path, step: int):
        self._to_wandb({"samples": path}, step)

    def _to_wandb(self, values: dict, step: int):
        if self.wandb is not None:
            try:
                import wandb

                values = {k: wandb.Image(str(v)) if isinstance(v, Path) else v for k, v in values.items()}
                self.wandb.log(values, step=step)
            except (Exception, SystemExit) as e:
                print(f"\nwarning: wandb is off ({e or type(e).__name__})", file=sys.stderr)
                self.wandb = None

    def close(self):
        """Let wandb finish its uploads, for a minute at most."""
        if self.wandb is not None:
            finishing = threading.Thread(target=self._finish, daemon=True)
            finishing.start()
            finishing.join(60)

    def _finish(self):
        with contextlib.suppress(Exception, SystemExit):
            self.wandb.finish()


def wandb_mode(asked: str) -> str:
    """--wandb; for auto, WANDB_MODE, else online if there is a key, else offline. What cannot be read holds no key."""
    if asked != "auto":
        return asked
    if mode := os.environ.get("WANDB_MODE"):
        return mode
    try:
        has_key = os.environ.get("WANDB_API_KEY") or b"wandb" in (Path.home() / ".netrc").read_bytes()
    except (OSError, RuntimeError):  # no such file, may not be read, no home at all
        has_key = False
    return "online" if has_key else "offline"


def finite_or_null(value):
    """A value for JSON, which has no NaN and no infinity: they become None, in dicts and lists too."""
    if isinstance(value, dict):
        return {k: finite_or_null(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_null(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rows_of(data: bytes) -> tuple[list[tuple[bytes, dict]], int]:
    """Whole lines of a log as (line, its row), and how many others there are: no UTF-8, no JSON, no row with a step. A
    last line without its end is a killed process's and does not count."""
    *lines, _ = data.split(b"\n")
    kept, damaged = [], 0
    for line in lines:
        try:
            row = json.loads(line.decode())
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                raise ValueError
            kept.append((line, row))
        except (ValueError, RecursionError):
            damaged += 1
    return kept, damaged


def append_json(path: Path, row: dict):
    """Add a line to a log; numbers that are not finite become null."""
    with open(path, "a") as file:
        file.write(json.dumps(finite_or_null(row), allow_nan=False) + "\n")


def cut_log(path: Path, step: int):
    """Drop the lines after the step that training goes on from, a last line that a kill cut short, and damaged lines,
    which are counted in a warning. A log that cannot be read is left as it is, with a warning."""
    try:
        data = path.read_bytes()
        kept, damaged = _rows_of(data)
        if damaged:
            lines = "line is" if damaged == 1 else "lines are"
            print(f"warning: {damaged} {lines} damaged in {path} and left out", file=sys.stderr)
        cut = b"".join(line + b"\n" for line, row in kept if row["step"] <= step)
        if cut != data:
            atomic_write(path, cut)
    except FileNotFoundError:
        pass
    except OSError as e:
        print(f"warning: {path} cannot be read or cut at step {step:,} ({e})", file=sys.stderr)


def read_rows(path: Path) -> list[dict]:
    """The rows of a .jsonl file, without lines that are damaged or cut short; [] if there is no file."""
    return [row for _, row in _rows_of(path.read_bytes())[0]] if path.exists() else []


def plot_run(out: Path):
    """curves.png beside the run: training and validation loss, validation loss by timestep bin, lr, images/s, and what
    SD_Evaluate.py measured of its checkpoints."""
    from matplotlib.figure import Figure

    train, val = read_rows(out / "log.jsonl"), read_rows(out / "validation.jsonl")

    def draw(axis, rows, value, **style):
        points = []
        for row in rows:
            with contextlib.suppress(LookupError, TypeError, ValueError):  # rows may lack what another version wrote
                points.append((row["step"], float(value(row))))
        points = [p for p in points if math.isfinite(p[1])]
        if points:
            axis.plot(*zip(*points), **style)

    measured = read_rows(out / "evaluation.jsonl")
    figure = Figure(figsize=(22.5 if measured else 18, 4))
    loss, by_bin, rate, speed, *distance = figure.subplots(1, 5 if measured else 4)
    draw(loss, train, lambda r: r["loss"], lw=0.5, color="0.7", label="training, weighted")
    for split, weights in (("val", "ema"), ("val", "live"), ("train", "ema"), ("train", "live")):
        part = [r for r in val if (r.get("split"), r.get("weights")) == (split, weights)]
        draw(loss, part, lambda r: r["loss"], label=f"{split}, {weights}", ls="-" if weights == "ema" else ":")
    held_out = [r for r in val if (r.get("split"), r.get("weights")) == ("val", "ema")]
    for b in range(BINS):
        colour = (b / BINS, 0.3, 1 - b / BINS)
        draw(by_bin, held_out, lambda r, b=b: r["bins"][b], label=f"t {b * 1000 // BINS}..", color=colour)
    draw(rate, train, lambda r: r["lr"])
    draw(speed, train, lambda r: r["images_per_s"])
    for request in dict.fromkeys(r.get("request") for r in measured):
        part = sorted((r for r in measured if r.get("request") == request), key=lambda r: r["step"])
        label = f"{part[0].get('extractor')}, {part[0].get('weights')}"
        draw(distance[0], part, lambda r: r["fd"], marker=".", label=label)
    titles = ("loss", "held-out loss by timestep, EMA", "learning rate", "images/s", "Fréchet distance")
    for axis, title in zip((loss, by_bin, rate, speed, *distance), titles):
        axis.set_title(title)
        axis.set_xlabel("step")
    for axis in (loss, by_bin, *distance):
        if axis.has_data():
            axis.set_yscale("log")
            axis.legend(fontsize=6, ncol=2)
    figure.tight_layout()
    with atomic_path(out / "curves.png") as temporary:
        figure.savefig(temporary, dpi=90, format="png")
