"""What a training run leaves on disk: checkpoints, logs and curves.

Run folder: config.json, log.jsonl, validation.jsonl, curves.png, samples/, checkpoints/step_00012000/.
Checkpoint: unet.safetensors, unet_ema.safetensors, text_encoder/ and text_encoder_ema/ (if trained), vae/ (if small),
optimizer.pt, model.json (what it is), state.json (where training stands), manifest.json (sha256 of every file).
"""

import contextlib
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from pathlib import Path

import safetensors.torch
import torch

import SD_Convert
from data_pipeline import common
from SD_Model import InputError, TextEncoder

BINS = 10  # of timesteps, equal widths, in logs and curves


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _fsync(path: Path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def find_checkpoint(out: Path, resume: str) -> Path | None:
    """The checkpoint to go on from: the named one, or the newest valid one of the run (None if it has none)."""
    if resume != "latest":
        folder = Path(resume)
        if (folder / "checkpoints").is_dir():
            return find_checkpoint(folder, "latest")
        if fault := SD_Convert.checkpoint_problem(folder):
            raise InputError(
                f"--resume wants a whole checkpoint, and {folder} is not one ({fault}); try --resume latest"
            )
        return folder
    faults = []
    for folder in sorted((out / "checkpoints").glob("step_????????"), reverse=True):
        if fault := SD_Convert.checkpoint_problem(folder):
            faults.append(f"{folder.name}: {fault}")
            print(f"skipping checkpoint {folder.name}: {fault}")
            continue
        return folder
    if faults:
        raise InputError(
            f"no valid checkpoint is left in {out}/checkpoints ({'; '.join(faults)}); remove them to start anew"
        )
    return None


class Checkpointer:
    """Writes checkpoints from snapshots in host memory, in a thread: the loop waits for a copy and not for the disk.

    A folder is written under a temporary name, every file synced, checksummed in manifest.json, then renamed. A write
    that fails is reported, costs nothing that is already there, and training goes on.
    """

    def __init__(self, folder: Path, keep_last: int, keep_every: int):
        self.folder, self.keep_last, self.keep_every = folder, keep_last, keep_every
        self._thread, self.failed_last = None, False
        for stale in self.folder.glob("*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)

    def save(self, step: int, snapshot: dict):
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(step, snapshot))
        self._thread.start()

    def wait(self):
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, snapshot: dict):
        final = self.folder / f"step_{step:08d}"
        temporary = self.folder / f"step_{step:08d}.tmp"
        try:
            wanted = sum(t.numel() * t.element_size() for part in snapshot["weights"].values() for t in part.values())
            wanted += sum(
                t.numel() * t.element_size() for s in snapshot["optimizer"]["state"].values() for t in s.values()
            )
            free = shutil.disk_usage(self.folder).free
            if free < wanted * 1.02 + (1 << 20):
                raise OSError(f"{wanted / 1e9:.2f} GB are needed and {free / 1e9:.2f} GB are free")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write_checkpoint(temporary, snapshot)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(temporary, final)
            _fsync(self.folder)
            self.failed_last = False
        except Exception as e:  # whatever it is, training is worth more than this save
            self.failed_last = True
            print(
                f"\nwarning: checkpoint {final.name} was not written ({e}); the previous one is safe", file=sys.stderr
            )
            shutil.rmtree(temporary, ignore_errors=True)
            return
        kept = sorted(self.folder.glob("step_????????"))
        for old in kept[: -self.keep_last] if self.keep_last else []:
            if not self.keep_every or int(old.name[5:]) % self.keep_every:
                doomed = old.with_suffix(".tmp")  # first out of the way, so that a half-removed one is never chosen
                os.rename(old, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def write_checkpoint(folder: Path, snapshot: dict):
    """Write a snapshot's files and their manifest into an empty folder, synced to disk."""
    for name, tensors in snapshot["weights"].items():
        if name.startswith("unet"):
            safetensors.torch.save_file(tensors, folder / f"{name}.safetensors")
        else:  # text_encoder, text_encoder_ema: as transformers writes them
            encoder = snapshot["text_encoder"]
            state = {k.removeprefix("model."): v for k, v in tensors.items()}
            encoder.model.save_pretrained(folder / name, state_dict=state)
            encoder.tokenizer.save_pretrained(folder / name)
    if snapshot["vae"] is not None:
        SD_Convert.save_vae(snapshot["vae"], folder / "vae")
    torch.save(snapshot["optimizer"], folder / "optimizer.pt")
    (folder / "model.json").write_text(json.dumps(snapshot["model"], indent=1))
    (folder / "state.json").write_text(json.dumps(snapshot["state"], indent=1))
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    for path in files:
        _fsync(path)
    digests = {str(p.relative_to(folder)): sha256(p) for p in files}
    (folder / "manifest.json").write_text(json.dumps(digests, indent=1))
    _fsync(folder / "manifest.json")
    for path in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        _fsync(path)


def load_weights(checkpoint: Path, live, ema):
    """Live and EMA weights of a checkpoint into two Denoisers, strictly."""
    for net, suffix in ((live, ""), (ema, "_ema")):
        net.unet.load_state_dict(safetensors.torch.load_file(checkpoint / f"unet{suffix}.safetensors"))
        if net.text_encoder is not None:
            encoder = TextEncoder.from_pretrained(str(checkpoint / f"text_encoder{suffix}"))
            net.text_encoder.load_state_dict(encoder.state_dict())


def to_host(value):
    """A copy in host memory of a tensor, or of every tensor in dicts and lists."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {k: to_host(v) for k, v in value.items()}
    if isinstance(value, list):
        return [to_host(v) for v in value]
    return value


class Window:
    """Sums over the steps since the last line of the log; part of a checkpoint, so that the log too resumes exactly."""

    def __init__(self, state: dict | None = None):
        zeros = {"losses": [0.0] * BINS, "counts": [0.0] * BINS, "norm": 0.0, "steps": 0, "skipped": 0}
        self.values = state or zeros
        self._started, self._timed = time.perf_counter(), 0

    def state(self) -> dict:
        return self.values

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
        """The line of log.jsonl. loss: weighted, mean over the window's samples; bins: the same by timestep."""
        v, taken = self.values, max(1, self.values["steps"] - self.values["skipped"])
        return {
            "step": step,
            "images": step * global_batch,
            "epoch": step * global_batch / epoch_size,
            "loss": sum(v["losses"]) / max(1.0, sum(v["counts"])),
            "lr": lr,
            "grad_norm": v["norm"] / taken,
            "skipped": v["skipped"],
            "images_per_s": self._timed * global_batch / (time.perf_counter() - self._started),
            "bins": [a / n if n else None for a, n in zip(v["losses"], v["counts"])],
        }


class Log:
    """JSON lines beside the run, and wandb if it works; wandb can fail and training goes on."""

    def __init__(self, out: Path, settings: dict, resumed_at: int):
        self.out, self.wandb = out, None
        for name in ("log.jsonl", "validation.jsonl"):
            self._cut(out / name, resumed_at)
        mode = settings["wandb"]
        if mode == "auto":
            netrc = Path.home() / ".netrc"
            has_key = os.environ.get("WANDB_API_KEY") or (netrc.exists() and "wandb" in netrc.read_text())
            mode = os.environ.get("WANDB_MODE") or ("online" if has_key else "offline")
        if mode == "disabled":
            return
        try:
            import wandb

            self.wandb = wandb.init(
                project="stable-diffusion", name=out.name, config=settings, mode=mode, dir=str(out), resume="allow",
                id=hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:16],
            )  # fmt: skip
        except Exception as e:
            print(f"warning: wandb is off ({e})", file=sys.stderr)

    @staticmethod
    def _cut(path: Path, step: int):
        """Drop the lines after the step that training goes on from, and a last line that a kill cut short."""
        if path.exists():
            kept = []
            for line in path.read_text().splitlines():
                with contextlib.suppress(ValueError, KeyError):
                    if json.loads(line)["step"] <= step:
                        kept.append(line)
            common.atomic_write(path, "".join(line + "\n" for line in kept))

    def write(self, name: str, row: dict):
        with open(self.out / name, "a") as f:
            f.write(json.dumps(row) + "\n")
        self._to_wandb({f"{Path(name).stem}/{k}": v for k, v in row.items() if isinstance(v, int | float)}, row["step"])

    def picture(self, path: Path, step: int):
        if self.wandb is not None:
            import wandb

            self._to_wandb({"samples": wandb.Image(str(path))}, step)

    def _to_wandb(self, values: dict, step: int):
        if self.wandb is not None:
            try:
                self.wandb.log(values, step=step)
            except Exception as e:
                print(f"\nwarning: wandb is off ({e})", file=sys.stderr)
                self.wandb = None

    def close(self):
        if self.wandb is not None:
            with contextlib.suppress(Exception):
                self.wandb.finish()


def plot_run(out: Path):
    """curves.png beside the run: training and validation loss, validation loss by timestep bin, lr."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def rows(name):
        path = out / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    train, val = rows("log.jsonl"), rows("validation.jsonl")
    figure, axes = plt.subplots(1, 3, figsize=(15, 4))
    axes[0].plot(
        [r["step"] for r in train], [r["loss"] for r in train], lw=0.5, color="0.7", label="training, weighted"
    )
    for split, weights in (("val", "ema"), ("val", "live"), ("train", "ema")):
        part = [r for r in val if (r["split"], r["weights"]) == (split, weights)]
        axes[0].plot([r["step"] for r in part], [r["loss"] for r in part], label=f"{split}, {weights}")
    for b in range(BINS):
        part = [r for r in val if (r["split"], r["weights"]) == ("val", "ema") and r["bins"][b] is not None]
        label = f"t {b * 1000 // BINS}.."
        axes[1].plot(
            [r["step"] for r in part], [r["bins"][b] for r in part], label=label, color=plt.cm.viridis(b / BINS)
        )
    axes[2].plot([r["step"] for r in train], [r["lr"] for r in train])
    for axis, title in zip(axes, ("loss", "held-out loss by timestep, EMA", "learning rate")):
        axis.set_title(title)
        axis.set_xlabel("step")
    axes[0].set_yscale("log")
    axes[1].set_yscale("log")
    axes[0].legend(fontsize=7)
    axes[1].legend(fontsize=6, ncol=2)
    figure.tight_layout()
    figure.savefig(out / "curves.png", dpi=90)
    plt.close(figure)
