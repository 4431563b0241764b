"""What several NVIDIA GPUs of one host do together: exactness, scaling, faults, encoding and painting, in one call.

    python benchmarks/several_gpus.py --out runs/several_gpus                # all parts, 10 minutes at most
    python benchmarks/several_gpus.py --parts 1,3 --out runs/several_gpus    # some of them; lines are added to the file
    python benchmarks/several_gpus.py --trial --out runs/trial               # all of it tiny: two processes on a CPU

    1   exactness: the demo's network in two processes, killed with -9 and gone on with, against the same run
        undisturbed; with peer copies, NCCL, and --shard where there is such a flag; gone on with in one and in four
    2   scaling, with the real loader and text encoder at work: the sd15 network at 512 px, each GPU alone and 2, 4, 8
        together; NCCL alone; --accumulate 2; a LoRA; pictures from tars, decoded and encoded beside training
    3   faults of two processes: one killed, one stopped for a minute, NaN in one, SIGTERM while a checkpoint is written
    4   encode_latents.py under torchrun: each shard once, the same latents as one GPU's, and how fast
    5   2,000 prompts painted by all: the first 64 pictures against one GPU's, and how fast

Part 2 comes last and has all the time that is left; with --parts 2 these are 9 minutes, in which all of it is done.
Data are made at the start: random latents, captions and weights, and noisy JPEGs. A part has a limit of time, what
fails or has no time left is told, and the rest goes on. --out gets several_gpus.jsonl, a line for each thing that was
tried, and table.md. Exit status 1 if something that had to hold did not, or failed.
"""

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/faults"), str(ROOT / "benchmarks")]
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # this process forks, and must not open a GPU before

import large_data  # noqa: E402
import micro  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from binding import rebind  # noqa: E402

import sd.data  # noqa: E402
import sd.errors  # noqa: E402
import sd.weights.tensors  # noqa: E402
import SD_Model  # noqa: E402
import SD_Train  # noqa: E402
from sd.cli import parser  # noqa: E402
from sd.errors import InputError  # noqa: E402
from sd.log import finite_or_null  # noqa: E402
from sd.pictures import read_picture  # noqa: E402
from sd.setup import git_revision  # noqa: E402
from sd.weights.read import Model  # noqa: E402
from sd.weights.write import save_ldm  # noqa: E402

LIMITS = {1: 150, 3: 130, 4: 90, 5: 90, 2: 600}  # seconds of each part, in the order that they are tried in
GLOBAL, STEPS, SAVE = 32, 120, 20  # of parts 1 and 3: images a step, steps of a run, steps between its checkpoints
SLOW = 0.02  # seconds that a micro-batch of theirs takes at least, so that what disturbs a run hits it
CARDS = """import json, torch
n = torch.cuda.device_count()
print(json.dumps([torch.cuda.get_device_name(i) for i in range(n)]))"""


class NoTime(Exception):
    """There is none left for what was to be tried, or it took longer than it had."""


class Bench:
    """The machine, a working folder, the lines that were written, and the processes that are at work."""

    def __init__(self, args, work: Path):
        self.args, self.work, self.trial, self.out = args, work, args.trial, Path(args.out)
        cards = [] if args.trial else json.loads(subprocess.check_output([sys.executable, "-c", CARDS]))
        self.gpus, self.device = len(cards) or 2, "cpu" if args.trial else "cuda"
        if len(cards) < 2 and not args.trial:
            raise InputError(
                f"two or more NVIDIA GPUs were wanted, found {len(cards)}: run it on such a host, or --trial"
            )
        self.out.mkdir(parents=True, exist_ok=True)
        self.lines, self.end, self.part, self.count = [], math.inf, 0, 0
        self.about = {"card": cards[0] if cards else "cpu", "gpus": self.gpus, "cores": os.cpu_count(),
                      "torch": torch.__version__, "cuda": torch.version.cuda, "trial": self.trial,
                      "revision": args.revision or git_revision()}  # fmt: skip

    def note(self, name: str, held: bool | None = None, **figures):
        """A line of the file. held: None of what is measured only."""
        line = {"part": self.part, "name": name, "held": held, **figures}
        self.lines.append(line)
        with open(self.out / "several_gpus.jsonl", "a") as file:
            file.write(json.dumps(finite_or_null(self.about | line)) + "\n")
        print(json.dumps(finite_or_null(line)), flush=True)

    def of(self, real, tiny):
        """What holds on GPUs, or what does in a trial."""
        return tiny if self.trial else real

    def left(self) -> float:
        """Seconds; NoTime if there are none."""
        if (seconds := self.end - time.time()) <= 0:
            raise NoTime("no time was left")
        return seconds

    def tried(self, name: str, function, *args):
        """function(*args), whose failure is a line of the file and nothing more; returns its result, or None."""
        try:
            self.left()
            return function(*args)
        except NoTime as e:
            self.note(name, None, not_finished=str(e))
        except (Exception, SystemExit) as e:
            self.note(name, False, failed=f"{type(e).__name__}: {e}"[-800:])

    def new(self, name: str) -> Path:
        """A path in the working folder that is not there yet."""
        self.count += 1
        return self.work / f"{self.count:03d}_{name}"

    # --- processes

    def programs(self, words: list, world: int = 1, first: int = 0) -> list[subprocess.Popen]:
        """A program of the project in `world` processes of one group, on GPUs from `first` on; what they print goes to
        files, which `said` reads."""
        shared = {"CUDA_VISIBLE_DEVICES": ",".join(str(first + i) for i in range(world)), "HF_HUB_OFFLINE": "1"}
        shared["OMP_NUM_THREADS"] = str(max(1, (os.cpu_count() or 1) // self.gpus))
        if world > 1:
            shared |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(micro.free_port())}
        return [self.process(words, shared | ({"RANK": str(r), "LOCAL_RANK": str(r)} if world > 1 else {}))
                for r in range(world)]  # fmt: skip

    def process(self, words: list, environment: dict | None = None) -> subprocess.Popen:
        output = self.new("output.txt")
        with open(output, "wb") as file:
            made = subprocess.Popen([sys.executable, *map(str, words)], cwd=ROOT, stdout=file, stderr=file,
                                    env=os.environ | (environment or {}), start_new_session=True)  # fmt: skip
        made.output = output
        return made

    def finish(self, processes: list[subprocess.Popen], limit: float = math.inf) -> list[int]:
        """Their exit statuses; those that have no time left are killed, with what they started."""
        end = min(self.end, time.time() + limit)
        try:
            return [p.wait(max(0.1, end - time.time())) for p in processes]
        except subprocess.TimeoutExpired:
            raise NoTime(f"{Path(processes[0].args[1]).name} was not finished in its time") from None
        finally:
            for p in processes:
                if p.poll() is None:
                    os.killpg(p.pid, signal.SIGKILL)
                    p.wait()

    def said(self, process: subprocess.Popen) -> str:
        return process.output.read_text(errors="replace")

    def run(self, words: list, world: int = 1, first: int = 0) -> str:
        """What the first process of a program printed. RuntimeError unless all end well."""
        return self.well(self.programs(words, world, first))[0]

    def well(self, processes: list[subprocess.Popen]) -> list[str]:
        statuses = self.finish(processes)
        if any(statuses):
            said = next(self.said(p) for p, s in zip(processes, statuses) if s)
            raise RuntimeError(f"statuses {statuses}: {said[-500:]}")
        return [self.said(p) for p in processes]

    # --- trainings of the demo's network, in forks of this process, which spares their imports

    def begin(self, out: Path, *more, world: int = 2, hook=None) -> list[int]:
        argv = self.flags(out, *more, world=world)
        more = {"limit": 600}
        if world > 1:
            return micro.start_ranks(world, argv, out.with_suffix(".txt"), hook or slow, **more)
        return [micro.start(argv, out.with_suffix(".txt"), hook or slow, **more)]

    def flags(self, out: Path, *more, world: int = 2) -> list[str]:
        text = "--without", "text_encoder", "--tokenizer", self.demo / "tokenizer", "--train_text_encoder"
        return micro.flags(self.demo, out, "--device", self.device, "--model", "tiny", "--batch", GLOBAL // world,
                           "--max_steps", STEPS, "--save_steps", SAVE, "--val_steps", 0, *text, *more)  # fmt: skip

    def ends(self, pids: list[int], limit: float = math.inf) -> list[int]:
        """As finish, of forks."""
        end, statuses = min(self.end, time.time() + limit), {}
        while len(statuses) < len(pids):
            for pid in pids:
                if pid not in statuses and (found := os.waitpid(pid, os.WNOHANG))[0]:
                    statuses[pid] = os.waitstatus_to_exitcode(found[1])
            if time.time() > end:
                for pid in set(pids) - set(statuses):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                raise NoTime(f"processes did not end; of the others the statuses are {list(statuses.values())}")
            time.sleep(0.005)
        return [statuses[pid] for pid in pids]

    def train(self, out: Path, *more, world: int = 2, hook=None) -> Path:
        statuses = self.ends(self.begin(out, *more, world=world, hook=hook))
        if any(statuses):
            raise RuntimeError(f"statuses {statuses}: {out.with_suffix('.txt').read_text()[-500:]}")
        return out

    def reach(self, out: Path, condition, pids: list[int], limit: float = 90):
        """Wait for a condition while the processes live; without it, they are ended, and RuntimeError."""
        end = min(self.end, time.time() + limit)
        while not condition():
            dead = [p for p in pids if os.waitid(os.P_PID, p, os.WEXITED | os.WNOHANG | os.WNOWAIT)]
            if dead or time.time() > end:
                for pid in set(pids) - set(dead):
                    os.kill(pid, signal.SIGKILL)
                text = out.with_suffix(".txt").read_text()[-500:] if out.with_suffix(".txt").exists() else ""
                raise RuntimeError(f"{out.name} did not come to where it was to be disturbed: {text}")
            time.sleep(0.005)


def slow(*_):
    """A hook: each micro-batch takes SLOW seconds at least. Micro-batches are made in Python also where steps are
    replayed from a CUDA graph."""
    real = sd.data.make_batch
    rebind(sd.data, "make_batch", lambda *args: time.sleep(SLOW) or real(*args))


def logged(out: Path) -> int:
    """Steps that the log tells of."""
    path = out / "log.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def saved(out: Path) -> bool:
    return bool(micro.checkpoints(out))


def compare(a: Path, b: Path) -> dict:
    """How far two runs are apart. seen: are the images of every step the same; loss: the mean over steps, and the
    largest, of |a - b| / a; weights: the largest |a - b| / |a| (norms) of a tensor at the end; bits: are losses and
    weights the same to the bit."""
    rows = [micro.rows(out) for out in (a, b)]
    seen = [[(row["step"], row["seen"]) for row in part] for part in rows]
    tensors = [
        {k: t for k, t in micro.contents(micro.checkpoints(out)[-1])[0].items() if "unet" in k} for out in (a, b)
    ]
    apart = [abs(x["loss"] - y["loss"]) / x["loss"] for x, y in zip(*rows)]
    norms = [float((tensors[1][k] - t).norm() / t.norm().clamp(min=1e-6)) for k, t in tensors[0].items()]
    return {"seen": seen[0] == seen[1] and len(seen[0]) == STEPS, "loss": sum(apart) / len(apart),
            "loss_max": max(apart), "weights": max(norms), "bits": max(apart) == max(norms) == 0}  # fmt: skip


def same(found: dict) -> bool:
    """Whether a run is the other but for rounding: the same pictures in each step, and losses as near as those of two
    runs that differ in the order of sums."""
    return found["seen"] and found["loss"] < 0.01 and math.isfinite(found["weights"])


# ---------------------------------------------------------------------------------------------------------------------
# 1: exactness
# ---------------------------------------------------------------------------------------------------------------------


def exactness(b: Bench):
    ways = {"peer copies": [], "--no_peer_copies": ["--no_peer_copies"]}
    if '"--shard"' in (ROOT / "SD_Train.py").read_text():
        ways["--shard"] = ["--shard"]
    first = None
    for way, more in ways.items():
        whole = b.tried(f"{way}: undisturbed", lambda more=more: b.train(b.new("whole"), *more))
        if whole is None:
            continue
        if first is None:
            first = whole
            b.tried(
                "two undisturbed runs", lambda whole=whole: told(b, "two undisturbed runs", whole, b.train(b.new("x")))
            )
        else:
            name = f"{way}, undisturbed, against peer copies"
            b.tried(name, told, b, name, first, whole)
        cut = b.tried(f"{way}: killed", lambda more=more: killed(b, *more))
        if cut is None:
            continue
        others = [(2, more)]
        if way == "peer copies":
            others += [(n, []) for n in (1, 4) if n <= b.gpus]
        elif way == "--shard":
            others += [(2, [])] + [(n, ["--shard"]) for n in (4,) if n <= b.gpus]
        for world, how in others:
            name = f"{way}: killed, gone on with by {world}" + (f" {' '.join(how)}" if how else "")
            b.tried(name, lambda name=name, world=world, how=how, cut=cut, whole=whole: told(
                b, name, whole, b.train(copied(b, cut), *how, "--resume", world=world)))  # fmt: skip


def told(b: Bench, name: str, whole: Path, other: Path):
    found = compare(whole, other)
    b.note(name, same(found), **found)


def copied(b: Bench, out: Path) -> Path:
    return Path(shutil.copytree(out, b.new("copy")))


def killed(b: Bench, *more) -> Path:
    """A run whose processes were killed at once, behind its third checkpoint."""
    out = b.new("cut")
    pids = b.begin(out, *more)
    b.reach(out, lambda: logged(out) >= STEPS // 2 + 5 and saved(out), pids)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    b.ends(pids)
    return out


# ---------------------------------------------------------------------------------------------------------------------
# 2: scaling
# ---------------------------------------------------------------------------------------------------------------------


def scaling(b: Bench):
    steps = b.args.steps
    counts = [n for n in (2, 4, 8) if n <= b.gpus]
    latents = ["--data_root", b.large, "--data", "random"]
    rows = [("full", [], steps, counts), ("NCCL alone", ["--no_peer_copies"], steps // 2, counts[-1:]),
            ("LoRA of rank 16, batch 4", ["--lora", 16, "--batch", b.of(4, 2)], steps // 2, counts[-1:]),
            ("--accumulate 2", ["--accumulate", 2], steps // 4, counts[-1:])]  # fmt: skip
    for name, more, count, together in rows:
        alone = None
        if name != "NCCL alone" and name != "--accumulate 2":
            alone = b.tried(f"{name}, each alone", each_alone, b, f"{name}, each alone", [*latents, *more], count)
        for n in together:
            b.tried(f"{name}, {n} together", joined, b, f"{name}, {n} together", [*latents, *more], count, n, alone)
    pictures = ["--pictures", b.tars, "--vae", b.large / "vae", "--picture_memory", 0.001,
                "--workers", max(1, (os.cpu_count() or 1) // b.gpus)]  # fmt: skip
    n, name = counts[-1], "pictures from tars"
    alone = b.tried(f"{name}, one alone", joined, b, f"{name}, one alone", pictures, steps // 4, 1, None)
    b.tried(f"{name}, {n} together", joined, b, f"{name}, {n} together", pictures, steps // 4, n, alone)


def benchmark(b: Bench, more: list, steps: int) -> list:
    words = ["SD_Train.py", "--phase", "scratch_256", "--model", b.of("sd15", "tiny"), "--size", b.size, "--accumulate",
             1, "--batch", b.of(32, 4), "--text_encoder", b.large / "text_encoder", "--device", b.device,
             "--sample_steps", 0, "--wandb", "disabled", "--out", b.work / "none"]  # fmt: skip
    return [*words, *more, "--benchmark", max(2, steps)]  # of a flag that comes twice the last one counts


def figures_of(text: str) -> dict:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"benchmark"')]
    if not lines:
        raise RuntimeError(f"no figures were printed: {text[-500:]}")
    names = (
        "images_per_s ms_per_step data_wait_ms sharing_ms optimizer_ms peak_GiB first_step_s gradients_by mfu".split()
    )
    return {name: lines[-1][name] for name in names if lines[-1].get(name) is not None}


def each_alone(b: Bench, name: str, more: list, steps: int) -> float:
    """Every GPU with a training of its own, all at once; returns their mean images/s."""
    processes = [p for gpu in range(b.gpus) for p in b.programs(benchmark(b, more, steps), 1, gpu)]
    found = [figures_of(text) for text in b.well(processes)]
    rates = [f["images_per_s"] for f in found]
    b.note(name, None, images_per_s_each=rates, **{k: v for k, v in found[0].items() if k != "images_per_s"})
    return sum(rates) / len(rates)


def joined(b: Bench, name: str, more: list, steps: int, n: int, alone: float | None) -> float:
    """So many GPUs together; returns images/s. cores: so many of them decoding takes at this rate."""
    found = figures_of(b.run(benchmark(b, more, steps), n))
    against = {"times_one": round(found["images_per_s"] / alone, 3),
               "of_all_alone": round(found["images_per_s"] / alone / n, 4)} if alone else {}  # fmt: skip
    if "--pictures" in more:
        against |= {"decode_ms": round(b.decode_ms, 2), "cores": round(found["images_per_s"] * b.decode_ms / 1e3, 1)}
    b.note(name, None, processes=n, **found, **against)
    return found["images_per_s"]


# ---------------------------------------------------------------------------------------------------------------------
# 3: faults
# ---------------------------------------------------------------------------------------------------------------------


def faults(b: Bench):
    whole = b.tried("undisturbed", lambda: b.train(b.new("whole")))
    if whole is None:
        return
    for name, attack in (("one of two killed under torchrun", killed_under_torchrun),
                         ("one of two killed, the other left to itself", killed_alone), ("NaN in one", nan_in_one),
                         ("SIGTERM while a checkpoint is written", stopped_in_a_save), ("one stopped", one_stopped),
                         ):  # fmt: skip
        b.tried(name, attack, b, name, whole)


def gone_on_with(b: Bench, name: str, whole: Path, out: Path, held: bool = True, **figures):
    """Go on with a run to its end, and compare that."""
    found = compare(whole, b.train(out, "--resume"))
    b.note(name, held and same(found), **figures, **found)


def killed_under_torchrun(b: Bench, name: str, whole: Path):
    out = b.new("torchrun")
    words = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={micro.free_port()}", __file__,
             "--slow", *b.flags(out)]  # fmt: skip
    process = b.process(words, {"OMP_NUM_THREADS": "1"})
    try:
        b.reach(out, lambda: logged(out) > SAVE + 5 and saved(out), [process.pid])
        os.kill(rank_of(process.pid, 1), signal.SIGKILL)
        began = time.time()
        status = b.finish([process], 90)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    gone_on_with(b, name, whole, out, status != 0, status=status, ended_after_s=round(time.time() - began, 1))


def rank_of(torchrun: int, rank: int) -> int:
    """The process of a rank that a torchrun started."""
    for child in Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise RuntimeError(f"rank {rank} was not found")


def killed_alone(b: Bench, name: str, whole: Path):
    """As when srun or a person started them: the other process has to notice by itself, within --timeout."""
    out, timeout = b.new("alone"), b.of(15, 8)
    pids = b.begin(out, "--timeout", timeout)
    b.reach(out, lambda: logged(out) > SAVE + 5 and saved(out), pids)
    os.kill(pids[1], signal.SIGKILL)
    began = time.time()
    statuses = b.ends(pids, timeout + 60)
    figures = {"statuses": statuses, "ended_after_s": round(time.time() - began, 1), "timeout_s": timeout}
    gone_on_with(b, name, whole, out, statuses[0] != 0, **figures)


def one_stopped(b: Bench, name: str, whole: Path):
    out, seconds = b.new("stopped"), b.args.stop_s or b.of(60, 2)
    pids = b.begin(out)
    b.reach(out, lambda: logged(out) > SAVE + 5, pids)
    os.kill(pids[1], signal.SIGSTOP)
    time.sleep(1)
    before = logged(out)
    time.sleep(max(0, min(seconds - 1, b.end - time.time() - 5)))
    waited = logged(out)
    os.kill(pids[1], signal.SIGCONT)
    began = time.time()
    statuses = b.ends(pids)
    found = compare(whole, out) if not any(statuses) else {"said": out.with_suffix(".txt").read_text()[-300:]}
    b.note(name, not any(statuses) and same(found), stopped_s=seconds, steps_meanwhile=waited - before,
           ended_after_s=round(time.time() - began, 1), statuses=statuses, **found)  # fmt: skip


def nan_in_one(b: Bench, name: str, whole: Path):
    """In the latents of the second process, in three steps: both skip these."""
    wanted = [5, 6, 20]

    def hook(rank):
        slow()
        real = sd.data.make_batch

        def make_batch(split, order, positions, *args):
            batch = real(split, order, positions, *args)
            if rank == 1 and int(positions[0]) // GLOBAL in wanted:
                batch.latents[0, 0, 0, 0] = math.nan
            return batch

        rebind(sd.data, "make_batch", make_batch)

    out = b.train(b.new("nan"), hook=hook)
    skipped = [row["step"] - 1 for row in micro.rows(out) if row["skipped"]]
    tensors, state = micro.contents(micro.checkpoints(out)[-1])
    finite = all(bool(t.isfinite().all()) for t in tensors.values())
    held = skipped == wanted and finite and state["ema_updates"] == STEPS - len(wanted)
    b.note(name, held, skipped=skipped, updates=state["ema_updates"], finite=finite)


def stopped_in_a_save(b: Bench, name: str, whole: Path):
    def hook(*_):
        slow()
        real = sd.weights.tensors.save_tensors
        rebind(sd.weights.tensors, "save_tensors", lambda *args: real(*args) or time.sleep(0.5))

    out = b.new("sigterm")
    pids = b.begin(out, hook=hook)
    b.reach(out, lambda: any(out.glob("checkpoints/*.tmp")), pids)
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    began = time.time()
    statuses, seconds = b.ends(pids, 60), time.time() - began
    text = out.with_suffix(".txt").read_text()
    ended = {"statuses": statuses, "ended_after_s": round(seconds, 1), "checkpoints": len(micro.checkpoints(out))}
    gone_on_with(b, name, whole, out, not any(statuses) and "go on with:" in text, **ended)


# ---------------------------------------------------------------------------------------------------------------------
# 4: encoding
# ---------------------------------------------------------------------------------------------------------------------


def encoding(b: Bench):
    def encode(out: Path, tars) -> list:
        return ["encode_latents.py", "--images", tars, "--vae", b.large / "vae", "--size", b.size, "--out", out,
                "--device", b.device, "--workers", b.of(min(16, (os.cpu_count() or 1) // b.gpus), 0)]  # fmt: skip

    def rate(out: Path, gpus: int) -> tuple[int, float]:
        """Pictures, and how many a second behind the first shard of each GPU: what programs take to start does not
        count."""
        records = sorted((p.stat().st_mtime, json.loads(p.read_text())["count"]) for p in out.glob("[0-9]*.json"))
        seconds = records[-1][0] - records[gpus - 1][0]
        return sum(n for _, n in records), sum(n for _, n in records[gpus:]) / max(seconds, 1e-3)

    def one():
        out, began = b.new("one"), time.time()
        b.run(encode(out, b.tars / "0000[0-9].tar"))
        count, speed = rate(out, 1)
        b.note("one GPU", None, pictures=count, wall_s=round(time.time() - began, 1), images_per_s=round(speed, 1))
        return out

    def all_of_them():
        out, began = b.new("all"), time.time()
        words = ["-m", "torch.distributed.run", f"--nproc_per_node={b.gpus}", f"--master_port={micro.free_port()}",
                 *encode(out, b.tars)]  # fmt: skip
        said, wall = b.well([b.process(words, {"OMP_NUM_THREADS": "1"})])[0], time.time() - began
        done = [int(n) for n in re.findall(r"(\d+) shards encoded in", said)]
        count, speed = rate(out, b.gpus)
        shards, latents = sorted(out.glob("*.npy")), {}
        if alone:
            pairs = [(np.load(p), np.load(out / p.name)) for p in sorted(alone.glob("*.npy"))]
            latents = {"same_latents": all(np.array_equal(x, y) for x, y in pairs), "of_shards": len(pairs)}
        complete = len(shards) == len(list(b.tars.glob("*.tar"))) and (out / "manifest.json").exists()
        held = complete and sum(done) == len(shards) and len(done) == b.gpus and latents.get("same_latents", True)
        b.note(f"{b.gpus} GPUs under torchrun", held, pictures=count, wall_s=round(wall, 1), shards_of_each=done,
               images_per_s=round(speed, 1), **latents)  # fmt: skip

    alone = b.tried("one GPU", one)
    b.tried(f"{b.gpus} GPUs under torchrun", all_of_them)


# ---------------------------------------------------------------------------------------------------------------------
# 5: painting
# ---------------------------------------------------------------------------------------------------------------------


def painting(b: Bench):
    few, many = b.of(64, 4), b.of(2000, 12)
    prompts = [json.dumps({"prompt": f"picture {i}"}) + "\n" for i in range(many)]
    (b.work / "few.jsonl").write_text("".join(prompts[:few]))
    (b.work / "many.jsonl").write_text("".join(prompts))
    file = b.work / "painted.safetensors"
    unet = SD_Model.UNet(SD_Model.PRESETS[b.of("sd15", "tiny")]["unet"], "none")
    vae, text = SD_Model.VAE(b.vae_config), SD_Model.TextEncoder.from_pretrained(str(b.large / "text_encoder"))
    model = Model("", unet.config, unet.state_dict, lambda: vae, lambda: text, size=b.of(256, b.size))
    save_ldm(file, model, torch.float16)
    paint = ["SD_ImageGen.py", "--model", file, "--tokenizer", b.large / "text_encoder", "--sampler", "dpmpp_2m",
             "--steps", b.of(10, 2), "--cfg", 5, "--batch", b.of(16, 2), "--folders", few,
             "--device", b.device]  # fmt: skip

    def alone():
        out = b.new("one")
        b.run([*paint, "--prompts_file", b.work / "few.jsonl", "--out", out])
        return out

    def together():
        out, began = b.new("all"), time.time()
        b.run([*paint, "--prompts_file", b.work / "many.jsonl", "--out", out], b.gpus)
        wall = time.time() - began
        pictures = sorted(out.glob("*/*.png"))
        ends = sorted(p.stat().st_mtime for p in pictures)
        figures = {"pictures": len(pictures), "wall_s": round(wall, 1),
                   "images_per_s": round((len(ends) - 1) / max(ends[-1] - ends[0], 1e-3), 1)}  # fmt: skip
        held = len(pictures) == many
        if one:
            pairs = [(read_picture(p), read_picture(out / p.relative_to(one))) for p in sorted(one.glob("*/*.png"))]
            figures["identical"] = sum(bool((x == y).all()) for x, y in pairs)
            figures["of"], figures["varied"] = len(pairs), float(np.mean([x.std() for x, _ in pairs])) > 1
            held = held and figures["identical"] == len(pairs) == few
        b.note(f"{many} prompts, {b.gpus} GPUs", held, **figures)

    one = b.tried(f"{few} prompts, one GPU", alone)
    b.tried(f"{many} prompts, {b.gpus} GPUs", together)


# ---------------------------------------------------------------------------------------------------------------------


def make_demo(b: Bench):
    """Data of parts 1 and 3, of the demo's size: latents 8 x 8, texts of 12 ids."""
    micro.LENGTH = 12
    b.demo = micro.make_data(b.work / "demo", {"things": 512})


def make_large(b: Bench):
    """Data of the other parts."""
    b.data = large_data.make_large(b.work / "large", b.trial)
    b.large, b.tars, b.size = b.data.root, b.data.tars, b.data.size
    b.vae_config, b.decode_ms = b.data.vae_config, b.data.decode_ms


def as_table(about: dict, lines: list[dict]) -> str:
    """What was tried, for people."""
    said = ", ".join(f"{name} {value}" for name, value in about.items() if value not in (None, "", False))
    rows = [f"{said}", "", "| part | what | held | figures |", "|---|---|---|---|"]
    for line in lines:
        figures = {k: v for k, v in line.items() if k not in ("part", "name", "held")}
        words = ", ".join(
            f"{k} {v:.3g}" if isinstance(v, float) and abs(v) < 1 else f"{k} {v}" for k, v in figures.items()
        )
        held = {None: "", True: "yes", False: "NO"}[line["held"]]
        rows.append(f"| {line['part']} | {line['name']} | {held} | {words} |".replace("\n", " "))
    return "\n".join(rows) + "\n"


PARTS = {1: exactness, 2: scaling, 3: faults, 4: encoding, 5: painting}


def main(argv=None):
    p = parser(__doc__)
    g = p.add_argument_group("what is tried")
    g.add_argument("--parts", default="1,2,3,4,5", help="numbers with commas between")
    g.add_argument("--steps", type=int, help="of part 2 (default: 200; of its smaller rows half and a quarter)")
    g.add_argument("--stop_s", type=float, help="seconds that a process of part 3 is stopped (default: 60)")
    g.add_argument("--trial", action="store_true", help="everything tiny, in two processes on a CPU, with gloo")

    g = p.add_argument_group("running")
    g.add_argument("--out", default="runs/several_gpus", help="folder for several_gpus.jsonl and table.md")
    g.add_argument("--minutes", type=float, default=9.5, help="after which nothing is begun, and what runs is ended")
    g.add_argument("--revision", help="of the code, for the lines (default: what git says)")
    g.add_argument("--keep", action="store_true", help="leave the working folder, in TMPDIR, where it is")
    args = p.parse_args(argv)
    try:
        parts = [int(word) for word in args.parts.split(",")]
    except ValueError:
        parts = []
    if not parts or not set(parts) <= set(PARTS):
        raise InputError(f"--parts wants numbers from 1 to 5 with commas between, found {args.parts!r}")
    started, args.steps = time.time(), args.steps or (8 if args.trial else 200)
    work = Path(tempfile.mkdtemp(prefix="several_gpus_"))
    try:
        b = Bench(args, work)
        print(json.dumps(b.about), flush=True)
        last = started + 60 * args.minutes
        for part in [n for n in LIMITS if n in parts]:
            b.part, begun = part, time.time()
            b.end = min(last, begun + (LIMITS[part] if len(parts) > 1 else math.inf))
            make = make_demo if part in (1, 3) else make_large
            if not hasattr(b, "demo" if part in (1, 3) else "large"):
                b.tried("data", make, b)
            b.tried(PARTS[part].__name__, PARTS[part], b)
            b.note(f"part {part} as a whole", None, seconds=round(time.time() - begun, 1))
        table = as_table(b.about, b.lines)
        (b.out / "table.md").write_text(table)
        print(table)
    finally:
        if args.keep:
            print(f"working folder: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    if wrong := [line["name"] for line in b.lines if line["held"] is False]:
        raise SystemExit(f"error: {len(wrong)} did not hold: {', '.join(wrong)}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--slow"]:  # a training of part 3, which torchrun starts
        del sys.argv[1]
        slow()
        sd.errors.run(SD_Train.main)
    else:
        sd.errors.run(main)
