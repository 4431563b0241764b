"""What a run's first process writes: the folder and its lock, log lines, grids, checkpoints."""

import contextlib
import json
import time
from dataclasses import asdict
from pathlib import Path

from sd.checkpoints import Checkpointer, HostCopy
from sd.errors import InputError
from sd.files import atomic_write, lock_run
from sd.log import Log, plot_run
from sd.plan import Plan, checkpoint_bytes
from sd.setup import Data, Trained
from sd.weights.read import checkpoint_folders
from SD_Model import VAE, NoiseSchedule, TextEncoder, count_parameters

SMALL_VAE = 64 << 20  # bytes; a VAE up to this goes into each checkpoint, a larger one by name and hash


def make_run_folder(out: Path, settings: dict, checkpoint: Path | None):
    """Make and lock the run folder; returns the lock, to be kept. InputError if a run is in it or it cannot be made."""
    holds_run = bool(checkpoint_folders(out))
    if holds_run and checkpoint is None:
        raise InputError(f"{out} holds a run already: add --resume to go on with it, or choose another --out")
    if holds_run and checkpoint.resolve().parent != (out / "checkpoints").resolve():
        raise InputError(f"{out} holds another run than {checkpoint}, which --resume names; choose another --out")
    try:
        (out / "samples").mkdir(parents=True, exist_ok=True)
        (out / "checkpoints").mkdir(exist_ok=True)
        lock = lock_run(out)
        atomic_write(out / "config.json", json.dumps(settings, indent=1))
    except OSError as e:
        raise InputError(f"--out wants a folder that can be written, found {out} ({e.strerror})") from None
    return lock


def absolute(name: str) -> str:
    """A local path made absolute; a hub name as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


class RunFolder:
    """The run folder of a training, open for writing. Nothing is written before one is made."""

    def __init__(self, out: Path, settings: dict, checkpoint: Path | None, trained: Trained, plan: Plan, data: Data,
                 inputs: dict, schedule: NoiseSchedule, text_encoder: TextEncoder, vae: VAE | None):  # fmt: skip
        self.out, self.settings, self.trained, self.plan = out, settings, trained, plan
        self.lock = make_run_folder(out, settings, checkpoint)
        small = vae is not None and count_parameters(vae)[1] * 4 <= SMALL_VAE
        vae_name, trains_text = settings["vae"] or data.vae["name"], settings["train_text_encoder"]
        self.beside = {
            "text_encoder": text_encoder,
            "vae": vae if small else None,
            "model": {
                "format": "checkpoint-1",
                "preset": settings["model"],
                "unet": asdict(trained.denoiser.unet.config),
                "schedule": schedule.config,
                "size": settings["size"],
                "text_encoder": "text_encoder" if trains_text else absolute(settings["text_encoder"]),
                "text_length": text_encoder.max_length,
                "vae": "vae" if small else {"path": absolute(vae_name), "hash": data.vae["hash"]},
            },
        }
        self.decides = {"global_batch": plan.global_batch, "data": data.hashes, "inputs": inputs,
                        "vae": data.vae["hash"], "settings": dict(settings)}  # fmt: skip
        if trained.ema is trained.denoiser:
            self.beside["model"]["weights"] = "live"  # as in any folder that has one UNet
        self.to_host = HostCopy(
            next(trained.denoiser.parameters()).is_cuda, checkpoint_bytes(settings, trained.denoiser)
        )
        self.log = Log(out, settings, trained.progress.step)
        self.saver = Checkpointer(
            out / "checkpoints", settings["keep_last"], settings["keep_every"], trained.progress.step, print
        )

    def snapshot(self, seen: int) -> dict:
        """Everything a checkpoint holds, copied to host memory. seen: the sum over all ranks."""
        trained, progress = self.trained, self.trained.progress
        nets = (
            {"": trained.denoiser} if trained.ema is trained.denoiser else {"": trained.denoiser, "_ema": trained.ema}
        )
        modules = {f"unet{name}": net.unet for name, net in nets.items()}
        if trained.denoiser.text_encoder is not None:
            modules |= {f"text_encoder{name}": net.text_encoder for name, net in nets.items()}
        images = progress.step * self.plan.global_batch
        progress.lineage[-1]["images"] = images
        parts = self.to_host({"weights": {name: m.state_dict() for name, m in modules.items()},
                              "optimizer": trained.optimizer.state_dict()})  # fmt: skip
        self.to_host.wait()
        where = {"seen": seen, "images": images, "epoch": images / self.plan.order.epoch_size}
        return parts | self.beside | {"state": progress.state() | where | self.decides}

    def save(self, seen: int):
        """Write a checkpoint of where training stands, in the background."""
        started, step = time.perf_counter(), self.trained.progress.step
        self.saver.save(step, lambda: self.snapshot(seen))
        print(f"\ncheckpoint {step:,}: training waited {time.perf_counter() - started:.2f} s for the copy")

    def close(self):
        """After the last checkpoint is written: curves, the log's end, and the lock."""
        self.saver.wait()
        with contextlib.suppress(OSError):  # a full disk
            plot_run(self.out)
        self.log.close()
        self.lock.close()
