"""What a training run leaves on disk: checkpoints, logs and curves.

    python SD_Run.py --plot runs/1_broad          # draw curves.png anew, of a running run too
    python SD_Run.py --lineage MODEL              # its chain of parents; MODEL: a checkpoint, run or export

Run folder: config.json, log.jsonl, validation.jsonl, curves.png, samples/, checkpoints/step_00012000/.
Checkpoint: unet.safetensors, unet_ema.safetensors, text_encoder/ and text_encoder_ema/ (if trained), vae/ (if small),
optimizer.pt, model.json (what it is), state.json (where training stands), manifest.json (sha256 of every file).
"""

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import shutil
import sys
import threading
import time
from pathlib import Path

import safetensors.torch
import torch

import SD_Convert
from data_pipeline import common
from SD_Model import InputError, TextEncoder, UNetConfig, config_from_dict, run_cli

BINS = 10  # of timesteps, equal widths, in logs and curves
STEPS_NAME = "step_????????"  # of finished checkpoints below checkpoints/
STATE = {"settings", "global_batch", "data", "step", "ema_updates", "skipped", "mean_norm", "seen", "lineage", "window"}
NEEDED = {"unet.safetensors", "unet_ema.safetensors", "optimizer.pt", "model.json", "state.json"}  # to go on from one


def sha256(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _fsync(path: Path):
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def resume_problem(folder: Path) -> str | None:
    """Why training cannot go on from a checkpoint folder, or None."""
    if fault := SD_Convert.checkpoint_problem(folder):
        return fault
    if missing := NEEDED - set(json.loads((folder / "manifest.json").read_text())):
        return f"its manifest lacks {sorted(missing)[0]}"
    if missing := STATE - set(json.loads((folder / "state.json").read_text())):
        return f"its state.json has no {sorted(missing)[0]}: weights alone, or of another version; try --init_from"
    return None


def find_checkpoint(out: Path, resume: str, say=print) -> Path | None:
    """The checkpoint to go on from: the named one, or the newest valid one of the run (None if it has none)."""
    if resume != "latest":
        folder = Path(resume)
        if (folder / "checkpoints").is_dir():
            return find_checkpoint(folder, "latest", say)
        if fault := resume_problem(folder):
            raise InputError(
                f"--resume wants a whole checkpoint, and {folder} is not one ({fault}); try --resume latest"
            )
        return folder
    faults = []
    for folder in sorted((out / "checkpoints").glob(STEPS_NAME), reverse=True):
        if fault := resume_problem(folder):
            faults.append(f"{folder.name}: {fault}")
            say(f"skipping checkpoint {folder.name}: {fault}")
            continue
        return folder
    if faults:
        raise InputError(
            f"no valid checkpoint is left in {out}/checkpoints ({'; '.join(faults)}); remove them to start anew"
        )
    return None


def lock_run(out: Path):
    """Hold a run folder until this process ends. InputError if another process trains in it. Returns the open lock."""
    lock = open(out / "lock", "w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"another process is training in {out}; wait for its end or stop it, or choose another --out"
        ) from None
    except OSError:  # a file system without locks
        pass
    return lock


class HostCopy:
    """Copies of tensors in host memory, in buffers made once and used again for the next checkpoint. For CUDA they are
    pinned: then the copy runs at the bus's full speed, without the driver's detour through its own small buffer."""

    CHUNK = 1 << 30  # bytes pinned at a time; a power of two, to which torch's allocator would round up anyway

    def __init__(self, pin: bool, size: int = 0):
        """size: bytes to be pinned ahead, in a thread, since the driver takes a second for a few GB of them."""
        self.pin, self.buffers = pin, {}
        self._chunks = []  # [bytes, how many are given away]
        self._thread = threading.Thread(target=self._reserve, args=(size,), daemon=True)
        if pin:
            self._thread.start()

    def _reserve(self, size: int):
        for _ in range(0, size, self.CHUNK):
            self._chunks.append([torch.empty(self.CHUNK, dtype=torch.uint8, pin_memory=True).numpy(), 0])

    def _buffer(self, value: torch.Tensor) -> torch.Tensor:
        size = value.numel() * value.element_size()
        if not self.pin or size == 0 or size > self.CHUNK:
            return torch.empty(value.shape, dtype=value.dtype, pin_memory=self.pin)
        chunk = next((c for c in self._chunks if c[1] + size <= self.CHUNK), None)
        if chunk is None:
            self._reserve(1)
            chunk = self._chunks[-1]
        start, chunk[1] = chunk[1], chunk[1] + size + -size % 64
        # A storage of its own for each tensor, as torch.save writes whole storages.
        return torch.frombuffer(chunk[0], dtype=value.dtype, count=value.numel(), offset=start).view(value.shape)

    def __call__(self, value, name: str = ""):
        """A copy of a tensor, or of every tensor in dicts and lists. Call wait() before it is read."""
        if isinstance(value, torch.Tensor):
            buffer = self.buffers.get(name)
            if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
                if self._thread.is_alive():
                    self._thread.join()
                buffer = self.buffers[name] = self._buffer(value)
            return buffer.copy_(value.detach(), non_blocking=self.pin)
        if isinstance(value, dict):
            return {k: self(v, f"{name}/{k}") for k, v in value.items()}
        if isinstance(value, list):
            return [self(v, f"{name}/{i}") for i, v in enumerate(value)]
        return value

    def wait(self):
        if self.pin:
            torch.cuda.synchronize()


class Checkpointer:
    """Writes checkpoints from snapshots in host memory, in a thread: the loop waits for a copy and not for the disk.

    A folder is written under a temporary name, every file synced, checksummed in manifest.json, then renamed. A write
    that fails is reported, costs nothing that is already there, and training goes on.
    """

    def __init__(self, folder: Path, keep_last: int, keep_every: int, step: int, say=print):
        """keep_last: newest checkpoints kept, 0: all. step: where training stands; checkpoints of later steps (damaged,
        or of a course that was given up with --resume PATH) are set aside, or they would count as the newest."""
        self.folder, self.keep_last, self.keep_every = folder, keep_last, keep_every
        self._thread, self.failed_last = None, False
        for stale in self.folder.glob("*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        for later in sorted(folder.glob(STEPS_NAME)):
            if int(later.name[5:]) > step:
                aside = later.with_name(f"{later.name}.aside")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(later, aside)
                say(f"{later} is of a later step than {step:,}, where training goes on: renamed to {aside.name}")

    def save(self, step: int, take_snapshot):
        """Write take_snapshot() in the background. The last write is waited for first: its buffers are used again."""
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(step, take_snapshot()))
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
        kept = sorted(self.folder.glob(STEPS_NAME))
        for old in kept[: -self.keep_last] if self.keep_last else []:
            if not self.keep_every or int(old.name[5:]) % self.keep_every:
                doomed = old.with_suffix(".tmp")  # first out of the way, so that a half-removed one is never chosen
                with contextlib.suppress(OSError):
                    os.rename(old, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def write_checkpoint(folder: Path, snapshot: dict):
    """Write a snapshot's files and their manifest into an empty folder, synced to disk."""
    for name, tensors in snapshot["weights"].items():
        if name.startswith("unet"):
            SD_Convert.save_tensors(tensors, folder / f"{name}.safetensors")
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
    config = config_from_dict(UNetConfig, json.loads((checkpoint / "model.json").read_text())["unet"])
    if config != live.unet.config:
        raise InputError(f"{checkpoint} holds a UNet of {config}, and the preset is now {live.unet.config}")
    for net, suffix in ((live, ""), (ema, "_ema")):
        net.unet.load_state_dict(safetensors.torch.load_file(checkpoint / f"unet{suffix}.safetensors"))
        if net.text_encoder is not None:
            encoder = TextEncoder.from_pretrained(str(checkpoint / f"text_encoder{suffix}"))
            net.text_encoder.load_state_dict(encoder.state_dict())


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer):
    """AdamW's state of a checkpoint. Nothing but tensors and plain values is unpickled."""
    try:
        optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True))
        for p, state in optimizer.state.items():  # fused steps want moments that lie in memory as their weights do
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.empty_like(p, requires_grad=False).copy_(state[name])
    except (pickle.UnpicklingError, RuntimeError, ValueError, KeyError) as e:
        raise InputError(
            f"the optimizer's state was wanted in {checkpoint / 'optimizer.pt'}, and it is not that of this run "
            f"({str(e).splitlines()[0][:200]}); try an older checkpoint with --resume PATH"
        ) from None


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
    """JSON lines beside the run, and wandb if it works. Neither a full disk nor a failing wandb stops training: lines
    wait in memory until there is room."""

    def __init__(self, out: Path, settings: dict, resumed_at: int):
        self.out, self.wandb, self._waiting = out, None, {}
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
                settings=wandb.Settings(init_timeout=30),
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
        """Add a line to log.jsonl or validation.jsonl, and its numbers to wandb."""
        lines = self._waiting.setdefault(name, [])
        lines.append(json.dumps(row) + "\n")
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
        self._to_wandb({f"{Path(name).stem}/{k}": v for k, v in row.items() if isinstance(v, int | float)}, row["step"])

    def picture(self, path: Path, step: int):
        self._to_wandb({"samples": path}, step)

    def _to_wandb(self, values: dict, step: int):
        if self.wandb is not None:
            try:
                import wandb

                values = {k: wandb.Image(str(v)) if isinstance(v, Path) else v for k, v in values.items()}
                self.wandb.log(values, step=step)
            except Exception as e:
                print(f"\nwarning: wandb is off ({e})", file=sys.stderr)
                self.wandb = None

    def close(self):
        """Let wandb finish its uploads, for a minute at most."""
        if self.wandb is not None:
            finishing = threading.Thread(target=self._finish, daemon=True)
            finishing.start()
            finishing.join(60)

    def _finish(self):
        with contextlib.suppress(Exception):
            self.wandb.finish()


def read_rows(path: Path) -> list[dict]:
    """The lines of a .jsonl file, without those that a kill cut short; [] if there is no file."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return rows


def plot_run(out: Path):
    """curves.png beside the run: training and validation loss, validation loss by timestep bin, lr, images/s."""
    from matplotlib.figure import Figure

    train, val = read_rows(out / "log.jsonl"), read_rows(out / "validation.jsonl")

    def draw(axis, rows, value, **style):
        rows = [r for r in rows if value(r) is not None]
        if rows:
            axis.plot([r["step"] for r in rows], [value(r) for r in rows], **style)

    figure = Figure(figsize=(18, 4))
    loss, by_bin, rate, speed = figure.subplots(1, 4)
    draw(loss, train, lambda r: r["loss"], lw=0.5, color="0.7", label="training, weighted")
    for split, weights in (("val", "ema"), ("val", "live"), ("train", "ema"), ("train", "live")):
        part = [r for r in val if (r["split"], r["weights"]) == (split, weights)]
        draw(loss, part, lambda r: r["loss"], label=f"{split}, {weights}", ls="-" if weights == "ema" else ":")
    held_out = [r for r in val if (r["split"], r["weights"]) == ("val", "ema")]
    for b in range(BINS):
        colour = (b / BINS, 0.3, 1 - b / BINS)
        draw(by_bin, held_out, lambda r, b=b: r["bins"][b], label=f"t {b * 1000 // BINS}..", color=colour)
    draw(rate, train, lambda r: r["lr"])
    draw(speed, train, lambda r: r["images_per_s"])
    titles = ("loss", "held-out loss by timestep, EMA", "learning rate", "images/s")
    for axis, title in zip((loss, by_bin, rate, speed), titles):
        axis.set_title(title)
        axis.set_xlabel("step")
    for axis in (loss, by_bin):
        if axis.has_data():
            axis.set_yscale("log")
            axis.legend(fontsize=6, ncol=2)
    figure.tight_layout()
    figure.savefig(out / "curves.png", dpi=90)


def print_lineage(source: str):
    """The chain of parents of a model: phase, images, parent's hash, data, from the first phase to the last."""
    model = SD_Convert.open_model(source)
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
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = p.add_mutually_exclusive_group(required=True)
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
    run_cli(main)
