"""What a run leaves to go on from: snapshots, checkpoints, and how they are found and loaded."""

import contextlib
import copy
import json
import math
import os
import shutil
import statistics
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch

from sd.adam8bit import AdamW8bit
from sd.errors import InputError, reading
from sd.files import digests, fsync, read_json
from sd.log import Window
from sd.lora import from_tensors, load_adapters
from sd.optimizers import OTHER_SHAPES
from sd.weights.parts import save_vae
from sd.weights.read import checkpoint_folders, checkpoint_problem, checkpoint_step
from sd.weights.tensors import save_tensors
from SD_Model import TextEncoder, UNetConfig, config_from_dict

OLDER = "it is damaged or of another run; go on from an older checkpoint with --resume PATH"

MAX_STEPS = 99_999_999  # as many as eight digits of a checkpoint's name can tell

STATE = {"settings", "global_batch", "data", "step", "ema_updates", "skipped", "mean_norm", "seen", "lineage", "window"}

AVERAGE = "unet_ema.safetensors"  # which runs with --no_ema do not have

ADAPTERS = {"lora.safetensors", "lora_ema.safetensors"}  # instead of weights, where adapters are trained

RECENT = 100  # steps whose gradient norms --adaptive_clip goes by

NEEDED = {"unet.safetensors", AVERAGE, "optimizer.pt", "model.json", "state.json"}  # to go on from one


def resume_problem(folder: Path, needed: set[str] = NEEDED, state: set[str] = STATE) -> str | None:
    """Why training cannot go on from a checkpoint folder, or None. needed: its files; state: names in state.json."""
    if fault := checkpoint_problem(folder):
        return fault
    files = set(read_json(folder / "manifest.json"))
    if files & ADAPTERS and needed is NEEDED:
        needed = NEEDED - {"unet.safetensors", AVERAGE} | ADAPTERS
    lacking = needed - files
    if lacking and lacking != {AVERAGE}:
        return f"its manifest lacks {sorted(lacking)[0]}"
    try:
        saved, named = json.loads((folder / "state.json").read_text()), checkpoint_step(folder)
    except ValueError:
        saved = None
    if not isinstance(saved, dict):
        return "its state.json is damaged"
    if missing := state - set(saved):
        return f"its state.json has no {sorted(missing)[0]}: weights alone, or of another version; try --init_from"
    kinds = {"settings": dict, "config": dict, "data": dict, "inputs": dict, "lineage": list, "step": int, "seen": int}
    if odd := [name for name, kind in kinds.items() if name in saved and type(saved[name]) is not kind]:
        return f"its state.json has another kind of value for {odd[0]}"
    if lacking and not saved["settings"].get("no_ema"):
        return f"its manifest lacks {AVERAGE}"
    if named not in (None, saved["step"]):
        return f"its state.json is of step {saved['step']:,}: a copy under another name"
    return None


def find_checkpoint(out: Path, resume: str, say=print, problem=resume_problem) -> Path | None:
    """The checkpoint to go on from: the named one, or the newest valid one of the run (None if it has none).
    problem(folder) says why a folder is not valid, or None."""
    if resume != "latest":
        folder = Path(resume)
        if (folder / "checkpoints").is_dir():
            return find_checkpoint(folder, "latest", say, problem)
        if fault := problem(folder):
            raise InputError(
                f"--resume wants a whole checkpoint, and {folder} is not one ({fault}); try --resume latest"
            )
        return folder
    faults = []
    for folder in checkpoint_folders(out):
        if fault := problem(folder):
            faults.append(f"{folder.name}: {fault}")
            say(f"skipping checkpoint {folder.name}: {fault}")
            continue
        return folder
    if faults:
        raise InputError(
            f"no valid checkpoint is left in {out}/checkpoints ({'; '.join(faults)}); remove them to start anew"
        )
    return None


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
        for stale in self.folder.glob("step_*.tmp"):
            if checkpoint_step(stale.with_suffix("")) is not None:  # others are not of this program
                shutil.rmtree(stale, ignore_errors=True)
        for later in checkpoint_folders(folder.parent):
            if checkpoint_step(later) > step:
                aside = later.with_name(f"{later.name}.aside")
                shutil.rmtree(aside, ignore_errors=True)
                os.rename(later, aside)
                say(f"{later} is of a later step than {step:,}, where training goes on: renamed to {aside.name}")

    def save(self, step: int, take_snapshot):
        """Write take_snapshot() in the background. The last write is waited for first: its buffers are used again.

        The snapshot's tensors are to be copies; all that is small is copied here, so that steps taken during the write
        do not get into it."""
        self.wait()
        snapshot = take_snapshot()
        snapshot |= {name: copy.deepcopy(snapshot[name]) for name in ("model", "state")}
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
            os.rename(temporary, final)
            fsync(self.folder)
            self.failed_last = False
        except Exception as e:  # whatever it is, training is worth more than this save
            self.failed_last = True
            print(
                f"\nwarning: checkpoint {final.name} was not written ({e}); the previous one is safe", file=sys.stderr
            )
            shutil.rmtree(temporary, ignore_errors=True)
            return
        for old in checkpoint_folders(self.folder.parent)[self.keep_last :] if self.keep_last else []:
            if not self.keep_every or checkpoint_step(old) % self.keep_every:
                doomed = old.with_suffix(".tmp")  # first out of the way, so that a half-removed one is never chosen
                with contextlib.suppress(OSError):
                    os.rename(old, doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def write_checkpoint(folder: Path, snapshot: dict):
    """Write a snapshot's files and their manifest into an empty folder, synced to disk."""
    for name, tensors in snapshot["weights"].items():
        if name.startswith(("unet", "lora")):
            save_tensors(tensors, folder / f"{name}.safetensors")
        else:  # text_encoder, text_encoder_ema: as transformers writes them
            encoder = snapshot["text_encoder"]
            state = {k.removeprefix("model."): v for k, v in tensors.items()}
            encoder.save(folder / name, state)
    if snapshot["vae"] is not None:
        save_vae(snapshot["vae"], folder / "vae")
    torch.save(snapshot["optimizer"], folder / "optimizer.pt")
    (folder / "model.json").write_text(json.dumps(snapshot["model"], indent=1))
    (folder / "state.json").write_text(json.dumps(snapshot["state"], indent=1))
    for path in folder.rglob("*"):
        if path.is_file():
            fsync(path)
    (folder / "manifest.json").write_text(json.dumps(digests(folder), indent=1))
    fsync(folder / "manifest.json")
    for path in [p for p in folder.rglob("*") if p.is_dir()] + [folder]:
        fsync(path)


def load_weights(checkpoint: Path, live, ema):
    """Live and EMA weights of a checkpoint into two Denoisers, strictly; into one, if both are the same. Of adapters if
    they have such."""
    config = config_from_dict(UNetConfig, read_json(checkpoint / "model.json")["unet"])
    if config != live.unet.config:
        raise InputError(f"{checkpoint} holds a UNet of {config}, and the preset is now {live.unet.config}")
    for net, suffix in ((live, ""), (ema, "_ema"))[: 1 if ema is live else 2]:
        if net.adapters is not None:
            file = checkpoint / f"lora{suffix}.safetensors"
            with reading(file, OLDER):
                load_adapters(net, from_tensors(safetensors.torch.load_file(file), file), file)
            continue
        file = checkpoint / f"unet{suffix}.safetensors"
        with reading(file, OLDER):
            net.unet.load_state_dict(safetensors.torch.load_file(file))
        if net.text_encoder is not None:
            encoder = TextEncoder.from_pretrained(str(checkpoint / f"text_encoder{suffix}"))
            net.text_encoder.load_state_dict(encoder.state_dict())


def load_optimizer(checkpoint: Path, optimizer: torch.optim.Optimizer):
    """The optimizer's state of a checkpoint. Nothing but tensors and plain values is unpickled."""
    file = checkpoint / "optimizer.pt"
    with reading(file, OLDER):
        saved = torch.load(file, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(saved)
        numbers = [n for group in saved["param_groups"] for n in group["params"]]
        for n, p in zip(numbers, [p for group in optimizer.param_groups for p in group["params"]]):
            # torch has cast all to the weight's dtype. Fused steps want moments that lie in memory as their weights do.
            for name, value in saved["state"].get(n, {}).items():
                if name in OTHER_SHAPES:
                    optimizer.state[p][name] = value.to(p.device, copy=True)
                elif name != "step":
                    kept = torch.empty_like(p, dtype=value.dtype, requires_grad=False)
                    optimizer.state[p][name] = kept.copy_(value)
        if isinstance(optimizer, AdamW8bit):
            optimizer.arrange()


@dataclass
class Progress:
    """Where training stands."""

    step: int = 0  # optimizer steps behind us, skipped ones too
    updates: int = 0  # of the EMA
    skipped: int = 0  # steps in a row whose gradients were not finite
    mean_norm: float = 0.0  # running mean of the gradient norm after clipping; 0: none yet
    seen: int = 0  # sum modulo 2^64 of seen_hash, this rank's share
    lineage: list[dict] = field(default_factory=list)  # the phases up to this one
    window: Window = field(default_factory=Window)  # of the log
    seconds: float | None = None  # spent in training, where --minutes ends it
    norms: list[float] = field(default_factory=list)  # the last RECENT steps' before clipping, for --adaptive_clip

    def advance(self, norm: float, limit: float, sums: list[float]) -> bool:
        """One step on: whether it was taken. A step whose gradients' norm is not finite counts and is skipped. limit:
        the largest norm let through; sums: see Window.add."""
        taken = math.isfinite(norm)
        if taken:
            self.updates, self.skipped = self.updates + 1, 0
            self.norms = [*self.norms, norm][-RECENT:]
            self.mean_norm += (min(norm, limit) - self.mean_norm) * (0.01 if self.mean_norm else 1)
        else:
            self.skipped += 1
        self.step += 1
        self.window.add(sums, norm, not taken)
        return taken

    def usual_norm(self) -> float:
        """The median of the last steps' gradient norms, 0 if there are none yet: neither a spike nor a step that was
        skipped moves it much, and what was large for long becomes usual."""
        return statistics.median(self.norms) if self.norms else 0.0

    def state(self) -> dict:
        """For state.json; `seen` is to be the sum over ranks there."""
        state = {"step": self.step, "ema_updates": self.updates, "skipped": self.skipped, "mean_norm": self.mean_norm,
                 "seen": self.seen, "lineage": copy.deepcopy(self.lineage), "window": self.window.state(),
                 "norms": list(self.norms)}  # fmt: skip
        return state if self.seconds is None else state | {"seconds": self.seconds}

    @classmethod
    def resumed(cls, saved: dict, rank: int) -> "Progress":
        seen, mean = saved["seen"] if rank == 0 else 0, saved["mean_norm"]
        of_mean = [mean] * 10 if mean and math.isfinite(mean) else []  # older revisions saved a mean alone
        return cls(saved["step"], saved["ema_updates"], saved["skipped"], saved["mean_norm"], seen, saved["lineage"],
                   Window(saved["window"]), saved.get("seconds"), saved.get("norms", of_mean))  # fmt: skip
