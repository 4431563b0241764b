"""What a run's first process writes: the folder and its lock, log lines, grids, checkpoints."""

import contextlib
import json
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

from sd.checkpoints import Checkpointer, HostCopy
from sd.device import describe_machine
from sd.errors import InputError, short
from sd.files import absolute, atomic_write, lock_run
from sd.log import Log, plot_run
from sd.lora import adapters_of, to_tensors
from sd.plan import Plan, checkpoint_bytes
from sd.report import write_report
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


def describe_start(out: Path, plan: Plan, settings: dict, device, resume: str):
    """Write run.json, which says how to go on with the run, how long it is, and where it was started each time."""
    try:
        before = json.loads((out / "run.json").read_text())["sessions"] if plan.first else []
        sessions = [s for s in before if s["step"] < plan.first]
    except (OSError, ValueError, LookupError, TypeError):  # of an older revision, or damaged
        sessions = []
    processes = plan.global_batch // (settings["batch"] * settings["accumulate"])
    started = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    session = {"step": plan.first, "started": started, **describe_machine(device), "processes": processes}
    total = None if settings["minutes"] else plan.total
    about = {"resume": resume, "total": total, "sessions": [*sessions, session]}
    with contextlib.suppress(OSError):  # a full disk
        atomic_write(out / "run.json", json.dumps(about, indent=1))


class RunFolder:
    """The run folder of a training, open for writing. Nothing is written before one is made."""

    def __init__(self, out: Path, settings: dict, checkpoint: Path | None, trained: Trained, plan: Plan, data: Data,
                 inputs: dict, schedule: NoiseSchedule, text_encoder: TextEncoder, vae: VAE | None,
                 resume: str = ""):  # fmt: skip
        """resume: the command that goes on with the run."""
        self.out, self.settings, self.trained, self.plan = out, settings, trained, plan
        self.lock = make_run_folder(out, settings, checkpoint)
        small = vae is not None and count_parameters(vae)[1] * 4 <= SMALL_VAE
        vae_name, own_text = settings["vae"] or data.vae["name"], settings["train_text_encoder"] and not trained.base
        self.beside = {
            "text_encoder": text_encoder,
            "vae": vae if small else None,
            "model": {
                "format": "checkpoint-1",
                "preset": settings["model"],
                "unet": asdict(trained.denoiser.unet.config),
                "schedule": schedule.config,
                "size": settings["size"],
                "text_encoder": "text_encoder" if own_text else absolute(settings["text_encoder"]),
                "text_length": text_encoder.max_length,
                "vae": "vae" if small else {"path": absolute(vae_name), "hash": data.vae["hash"]},
            },
        }
        if settings["null"] != "empty":
            self.beside["model"]["null"] = settings["null"]
        if trained.base:  # whose weights are not in the checkpoint
            self.beside["model"]["base"] = trained.base
        self.decides = {"global_batch": plan.global_batch, "data": data.hashes, "inputs": inputs,
                        "vae": data.vae["hash"], "settings": dict(settings)}  # fmt: skip
        if trained.ema is trained.denoiser:
            self.beside["model"]["weights"] = "live"  # as in any folder that has one UNet
        self.to_host = HostCopy(
            next(trained.denoiser.parameters()).is_cuda, checkpoint_bytes(settings, trained.denoiser)
        )
        self.page = None  # the thread that writes it
        describe_start(out, plan, settings, next(trained.denoiser.parameters()).device, resume)
        self.log = Log(out, settings, trained.progress.step)
        self.saver = Checkpointer(
            out / "checkpoints", settings["keep_last"], settings["keep_every"], trained.progress.step, print
        )

    def snapshot(self, seen: int) -> dict:
        """Everything a checkpoint holds, copied to host memory. seen: the sum over all ranks."""
        trained, progress = self.trained, self.trained.progress
        averaged = trained.ema is not trained.denoiser
        if trained.base:
            modules = {"lora": trained.denoiser, "lora_ema": trained.ema}
            weights = {name: to_tensors(adapters_of(m)) for name, m in modules.items()}
        else:
            nets = {"": trained.denoiser} | ({"_ema": trained.ema} if averaged and not trained.shard else {})
            modules = {f"unet{name}": net.unet for name, net in nets.items()}
            if trained.denoiser.text_encoder is not None:
                modules |= {f"text_encoder{name}": net.text_encoder for name, net in nets.items()}
            weights = {name: m.state_dict() for name, m in modules.items()}
        optimizer = {} if trained.shard else trained.optimizer.state_dict()
        images = progress.step * self.plan.global_batch
        progress.lineage[-1]["images"] = images
        parts = self.to_host({"weights": weights, "optimizer": optimizer})
        if trained.shard:  # from all processes' parts, in host memory already
            parts["optimizer"], averages = trained.shard.gathered
            for name, module in modules.items() if averaged else ():
                live, own = parts["weights"][name], module.state_dict(keep_vars=True)
                parts["weights"][f"{name}_ema"] = {k: averages.get(own[k], x) for k, x in live.items()}
        self.to_host.wait()
        where = {"seen": seen, "images": images, "epoch": images / self.plan.order.epoch_size}
        return parts | self.beside | {"state": progress.state() | where | self.decides}

    def save(self, seen: int):
        """Write a checkpoint of where training stands, in the background."""
        started, step = time.perf_counter(), self.trained.progress.step
        self.saver.save(step, lambda: self.snapshot(seen))
        print(f"\ncheckpoint {step:,}: training waited {time.perf_counter() - started:.2f} s for the copy")

    def report(self):
        """Write report.html in the background, unless the one before is not finished: training never waits for it."""
        if self.page is None or not self.page.is_alive():
            self.page = threading.Thread(target=self._report, daemon=True)
            self.page.start()

    def _report(self):
        try:
            write_report(self.out)
        except Exception as e:  # a page is worth no run: whatever it stumbles over in a log or a picture
            print(f"\nwarning: {self.out / 'report.html'} was not written ({short(e)})", file=sys.stderr)

    def close(self):
        """After the last checkpoint is written: the page, curves, the log's end, and the lock."""
        self.saver.wait()
        if self.page is not None:
            self.page.join()
        self._report()
        with contextlib.suppress(OSError):  # a full disk
            plot_run(self.out)
        self.log.close()
        self.lock.close()
