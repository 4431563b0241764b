"""Attacks real trainings and counts what they survive.

    python tests/faults/run.py                     # all faults, a few minutes on two cores; ends with a Markdown table
    python tests/faults/run.py --only kill --kills 200 --seed 7

Each training is a process (or several, or a torchrun) of SD_Train.py on a network of 65 thousand parameters, slowed
down where a fault has to hit something. 'Survived' means: it went on to the same end, bit for bit, as the run that
nothing disturbed (weights, EMA, optimizer, progress, every line of the log with the images seen), or, for bad input,
that it was refused in one sentence with status 2 and nothing written. Exit status 1 if anything was lost.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import micro  # noqa: E402
import torch  # noqa: E402
from binding import rebind  # noqa: E402
from micro import checkpoints, differences, flags, start, start_ranks, status_of  # noqa: E402

import sd.checkpoints  # noqa: E402
import sd.data  # noqa: E402
import sd.objective  # noqa: E402
import sd.weights.tensors  # noqa: E402

STEPS, SAVE, LOG = 40, 2, 4  # every other checkpoint is saved in the middle of a line of the log
RUN = ("--max_steps", STEPS, "--save_steps", SAVE, "--keep_last", 3, "--val_steps", 20, "--log_steps", LOG)


class Faults:
    """A working folder, its data and undisturbed runs, and the counts of the table."""

    def __init__(self, work: Path, rng: random.Random):
        self.work, self.rng, self.table, self.notes = work, rng, {}, []
        self.data = micro.make_data(work / "data", {"things": 42})
        self.whole = {}
        for world in (1, 2):
            self.whole[world] = self.new("whole")
            assert self.train(self.whole[world], world=world) == 0, self.text(self.whole[world])

    def new(self, name: str) -> Path:
        """A run folder that is not there yet."""
        return Path(tempfile.mkdtemp(prefix=f"{name}_", dir=self.work)) / "run"

    def begin(self, out: Path, *more, world=1, hook=None) -> list[int]:
        argv = flags(self.data, out, *RUN, "--batch", 4 // world, *more)
        output = out.with_suffix(".txt")
        return start_ranks(world, argv, output, hook) if world > 1 else [start(argv, output, hook)]

    def train(self, out: Path, *more, world=1, hook=None) -> int:
        """Train to the end; the worst status of its processes."""
        return max((status_of(pid) for pid in self.begin(out, *more, world=world, hook=hook)), key=abs)

    def text(self, out: Path) -> str:
        return out.with_suffix(".txt").read_text() if out.with_suffix(".txt").exists() else ""

    def count(self, fault: str, faults: list[str], times: int = 1):
        """Note that a fault was tried `times` times; `faults` says what went wrong, [] if nothing did."""
        row = self.table.setdefault(fault, [0, 0])
        row[0] += times
        row[1] += times if faults else 0
        print(
            f"{'LOST' if faults else 'survived'}: {fault}{': ' if faults else ''}{'; '.join(faults)[:500]}", flush=True
        )

    def ends_like_whole(self, out: Path, world=1, settings=True) -> list[str]:
        """Resume to the end; what differs from the undisturbed run."""
        status = self.train(out, "--resume", world=world)
        return (
            [f"status {status}: {self.text(out)[-300:]}"] if status else differences(self.whole[world], out, settings)
        )


def slow(*_):
    """A hook: each step takes 15 ms more, and each file of a checkpoint a few."""
    real, real_save = sd.objective.backward, sd.weights.tensors.save_tensors
    rebind(sd.objective, "backward", lambda *args: time.sleep(0.015) or real(*args))

    def save_tensors(*args):
        real_save(*args)
        time.sleep(0.015)

    rebind(sd.weights.tensors, "save_tensors", save_tensors)


def wait_for(condition, pids: list[int], seconds: float = 60) -> bool:
    """Wait for a condition while all processes live. False if one has ended or the time is up."""
    end = time.time() + seconds
    while time.time() < end:
        if condition():
            return True
        if any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids):
            return False
        time.sleep(0.002)
    return False


def logged(out: Path) -> int:
    """Steps that the log tells of."""
    path = out / "log.jsonl"
    return LOG * path.read_bytes().count(b"\n") if path.exists() else 0


def new_write(out: Path, seen: set[str]) -> bool:
    """Whether a checkpoint is being written that is not among those `seen`."""
    return any(p.name not in seen for p in out.glob("checkpoints/*.tmp"))


def kill(f: Faults, kills: int):
    """kill -9 at random moments of runs that are resumed again and again, then finished and compared."""
    done, run = 0, 0
    when = {"before the first checkpoint": 0, "after it": 0, "while one was written": 0}
    while done < kills:
        world = 2 if run % 4 == 3 else 1
        run, out, hits = run + 1, f.new("kill"), 0
        for _ in range(min(5, kills - done)):
            pids, before = f.begin(out, "--resume", world=world, hook=slow), logged(out)
            mode = f.rng.choice(["any", "writing", "writing", "step", "step"])
            if mode == "any":
                wait_for(lambda: False, pids, f.rng.uniform(0, 2))
            elif mode == "writing":
                seen = {p.name for p in out.glob("checkpoints/*")}
                wait_for(lambda seen=seen, out=out: new_write(out, seen), pids)
                time.sleep(f.rng.uniform(0, 0.04))
            else:
                steps = f.rng.randint(1, 12)
                wait_for(lambda out=out, before=before, steps=steps: logged(out) >= before + steps, pids, 5)
                time.sleep(f.rng.uniform(0, 0.02))
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)  # so that what was hit can be looked at
            writing, saved = bool(list(out.glob("checkpoints/*.tmp"))), bool(checkpoints(out))
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            if any([status_of(pid) == -signal.SIGKILL for pid in pids]):  # else it had ended before
                hits += 1
                when["after it" if saved else "before the first checkpoint"] += 1
                when["while one was written"] += writing
        f.count("kill -9", f.ends_like_whole(out, world), hits)
        done += hits
        shutil.rmtree(out.parent)
    f.notes.append(f"Of the kills, {when['after it']} came after the first checkpoint, {when['while one was written']} "
                   "while one was being written.")  # fmt: skip


def signals(f: Faults, times: int = 10):
    for i in range(times):
        kind, out = (signal.SIGTERM, signal.SIGINT)[i % 2], f.new("signal")
        pids = f.begin(out, hook=slow, world=1 + i % 4 // 2)
        wait_for(lambda out=out: logged(out) >= f.rng.randint(1, 20), pids)
        for n in range(3):  # the first stops it; the others come into the save
            for pid in pids:
                os.kill(pid, kind) if n == 0 or i % 3 else None
            time.sleep(0.02)
        faults = [f"status {s}" for s in map(status_of, pids) if s]
        if "go on with:" not in f.text(out):
            faults.append("no command to go on")
        f.count(kind.name, faults or f.ends_like_whole(out, len(pids)))


def cut_files(f: Faults, times: int = 20):
    """The newest checkpoint's files cut, or one bit turned: it is passed over, and training ends the same."""
    for i in range(times):
        out = f.new("cut")
        f.train(out, "--stop_at", 21)
        path = f.rng.choice(sorted(p for p in checkpoints(out)[-1].rglob("*") if p.is_file()))
        size, at = path.stat().st_size, f.rng.randrange(path.stat().st_size)
        if i % 2:
            os.truncate(path, at)
        else:
            data = bytearray(path.read_bytes())
            data[at] ^= 1 << f.rng.randrange(8)
            path.write_bytes(data)
        faults = f.ends_like_whole(out)
        # a bit in the manifest's spaces changes nothing and need not be noticed
        if "skipping checkpoint step_00000021" not in f.text(out) and path.name != "manifest.json":
            faults.append(f"{path.name}, {size} bytes, damaged at {at}, was not noticed")
        f.count("checkpoint file cut or bit turned", faults)


def full_disk(f: Faults):
    """A small tmpfs that is full before a save, and one that fills in the middle of it."""
    for moment in ("before", "in the middle"):
        mount = f.new("disk").parent
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", mount], capture_output=True).returncode:
            f.notes.append("The full disk was not tried: mounting a tmpfs needs root.")
            return
        try:
            out, ballast = mount / "run", mount / "ballast"

            def fill(ballast=ballast):
                try:
                    with open(ballast, "ab", buffering=0) as file:
                        while file.write(bytes(4096)):
                            pass
                except OSError:
                    pass

            def hook(moment=moment, fill=fill):
                real, real_save = sd.checkpoints.write_checkpoint, torch.save

                def write(folder, snapshot):
                    if snapshot["state"]["step"] >= 20 and moment == "in the middle":
                        torch.save = lambda *args: fill() or real_save(*args)
                    real(folder, snapshot)
                    if snapshot["state"]["step"] == 18 and moment == "before":
                        fill()

                rebind(sd.checkpoints, "write_checkpoint", write)

            status, text, faults = f.train(out, hook=hook), f.text(out), []
            if (
                status != 1
                or "Traceback" in text
                or "was not written" not in text
                or "could not be written" not in text
            ):
                faults.append(f"status {status}: {text[-300:]}")
            if not checkpoints(out) or sd.checkpoints.resume_problem(checkpoints(out)[-1]):
                faults.append("no sound checkpoint is left")
            ballast.unlink(missing_ok=True)
            f.count(f"disk full {moment} of a save" if moment != "before" else "disk full before a save",
                    faults or f.ends_like_whole(out))  # fmt: skip
        finally:
            subprocess.run(["umount", mount], check=True)


def one_rank(f: Faults, times: int = 3):
    """torchrun with two ranks, one of them killed: it ends with an error within its time, and can be resumed."""
    for i in range(times):
        out = f.new("rank")
        argv = flags(f.data, out, *RUN, "--batch", 2, "--max_steps", STEPS)
        process = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={micro.free_port()}",
             str(Path(__file__).parent / "micro.py"), "--slow", "0.015", *argv],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_for(lambda out=out: logged(out) >= f.rng.randint(3, 15), [process.pid], 120)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = {}
        for child in children:
            for variable in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                if variable.startswith(b"RANK="):
                    ranks[int(variable[5:])] = int(child)
        os.kill(ranks[i % 2], signal.SIGKILL)
        started, faults = time.time(), []
        try:
            if process.wait(60) == 0:
                faults.append("torchrun ended with status 0")
        except subprocess.TimeoutExpired:
            process.kill()
            faults.append("torchrun hung for 60 s")
        print(f"torchrun ended {time.time() - started:.1f} s after rank {i % 2} was killed")
        f.count("one rank of two killed under torchrun", faults or f.ends_like_whole(out, 2))


def nan(f: Faults):
    """NaN in one rank's latents: the step is skipped on both; many in a row stop training."""
    for rank in (0, 1):
        for steps in ({5, 6, 20}, set(range(10, 40))):

            def hook(own, rank=rank, steps=steps):
                real = sd.data.make_batch

                def make_batch(split, order, positions, *args):
                    batch = real(split, order, positions, *args)
                    if own == rank and int(positions[0]) // 4 in steps:
                        batch.latents[0, 0, 0, 0] = math.nan
                    return batch

                rebind(sd.data, "make_batch", make_batch)

            out, faults = f.new("nan"), []
            status = f.train(out, "--max_skipped", 5, "--log_steps", 1, world=2, hook=hook)
            skipped = [row["step"] - 1 for row in micro.rows(out) if row["skipped"]]
            wanted = sorted(steps)[:3] if len(steps) == 3 else sorted(steps)[:4]  # the fifth in a row ends it
            if skipped != wanted or status != (1 if len(steps) > 3 else 0):
                faults.append(f"status {status}, skipped {skipped}")
            tensors, state = micro.contents(checkpoints(out)[-1])
            if not all(t.isfinite().all() for t in tensors.values()):
                faults.append("NaN in the checkpoint")
            if len(steps) == 3 and state["ema_updates"] != STEPS - 3:
                faults.append(f"{state['ema_updates']} updates")
            f.count("NaN latents on one rank" if len(steps) == 3 else "NaN latents for ever on one rank", faults)


def manifests(f: Faults):
    """Missing, damaged and lying manifests are refused."""
    edits = [("latents", None), ("dataset", None), ("latents", "{"), ("dataset", "[]"), ("latents", {"count": 49}),
             ("latents", {"size": 32}), ("latents", {"scaled": False}), ("latents", {"latent_shape": [4, 16, 16]}),
             ("latents", {"kind": "moments"}), ("dataset", {"counts": {"train": 1, "val": 8}}),
             ("dataset", {"tokenizer_hash": "0"}), ("dataset", {"complete": False})]  # fmt: skip
    data = f.data
    for folder, edit in edits:
        f.data = f.new("manifest").parent / "data"
        shutil.copytree(data, f.data)
        path = f.data / "things" / folder / "manifest.json"
        if edit is None:
            path.unlink()
        else:
            path.write_text(edit if isinstance(edit, str) else json.dumps(json.loads(path.read_text()) | edit))
        out = f.data.parent / "run"
        status, text = f.train(out), f.text(out)
        wrong = status != 2 or text.count("error: ") != 1 or "Traceback" in text or out.exists()
        f.count("manifest missing or lying", [f"{folder} {edit}: status {status}: {text[-200:]}"] if wrong else [])
    f.data = data


def wandb(f: Faults):
    """wandb that cannot start, and one that fails later."""
    for body in ("def init(**k): raise RuntimeError('no server')",
                 "class Run:\n def log(self, *a, **k): raise RuntimeError('gone')\n def finish(self): log(self)\n"
                 "def init(**k): return Run()"):  # fmt: skip
        out = f.new("wandb")
        (out.parent / "wandb.py").write_text(f"{body}\nSettings = dict\n")

        def hook(folder=out.parent):
            sys.modules.pop("wandb", None)
            sys.path.insert(0, str(folder))

        status = f.train(out, "--wandb", "offline", hook=hook)
        faults = [f"status {status}"] if status else differences(f.whole[1], out, settings=False)
        f.count("wandb fails", faults if "wandb is off" in f.text(out) else [*faults, "it was not reported"])


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kills", type=int, default=50, help="kill -9 so many times")
    p.add_argument(
        "--only", choices=["kill", "signals", "cut_files", "full_disk", "one_rank", "nan", "manifests", "wandb"]
    )
    p.add_argument("--seed", type=int, default=0, help="of the random moments")
    p.add_argument("--limit", type=float, default=25, help="minutes after which no further kind of fault is begun")
    args = p.parse_args()
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="faults_") as work:
        f = Faults(Path(work), random.Random(args.seed))
        kinds = dict(kill=lambda f: kill(f, args.kills), signals=signals, cut_files=cut_files, full_disk=full_disk,
                     one_rank=one_rank, nan=nan, manifests=manifests, wandb=wandb)  # fmt: skip
        for name, attack in kinds.items():
            if args.only in (None, name):
                if time.time() - started > 60 * args.limit:
                    f.notes.append(f"Not tried for lack of time: {name}.")
                    continue
                attack(f)
    print("\n| fault | times | survived | lost |\n|---|---|---|---|")
    for fault, (times, lost) in f.table.items():
        print(f"| {fault} | {times} | {times - lost} | {lost} |")
    print("\n" + "\n".join([*f.notes, f"It took {(time.time() - started) / 60:.1f} minutes."]))
    sys.exit(any(lost for _, lost in f.table.values()))


if __name__ == "__main__":
    main()
