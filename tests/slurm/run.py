"""Trains through the shipped slurm/*.sbatch on a Slurm of this machine's own, disturbs the jobs, and says what held.

    python tests/slurm/run.py            # about 2 minutes on two cores; the last line is one JSON object

Two nodes on loopback, two ranks. Each disturbed run must end, bit for bit, as the undisturbed one: weights, average,
optimizer, progress, and every line of the log. Needs root and Debian's slurmd slurmctld slurm-client munge; installs
nothing. Exit status: 0 if all held, 1 if not, 2 if Slurm cannot be started here.
"""

import argparse
import io
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "tests/faults")]
import micro  # noqa: E402
import numpy as np  # noqa: E402
from cluster import Cluster, missing  # noqa: E402
from PIL import Image  # noqa: E402

from sd.shards import ShardWriter  # noqa: E402

ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY")
STEPS, SLOW = 500, 0.06  # a step takes at least so many seconds, however busy the machine is
LIMIT = 420  # seconds for all jobs, on a machine that has other work too


class Jobs:
    """The jobs of this test, their logs, and what held."""

    def __init__(self, work: Path, cluster: Cluster):
        self.work, self.cluster, self.held, self.times = work, cluster, {}, {}
        self.began = time.time()
        self.data = micro.make_data(work / "data", {"things": 42})
        self.python = work / "python"  # in SD_Train.py's place: the same with the preset `micro`, and slower
        program = f'"{sys.executable}" "{ROOT}/tests/faults/micro.py" --slow {SLOW}'
        self.python.write_text(f'#!/bin/bash\nshift\nexec {program} "$@"\n')
        self.python.chmod(0o755)

    def check(self, name: str, held: bool, note: str = ""):
        self.held[name] = bool(held) and self.held.get(name, True)
        print(f"{time.time() - self.began:5.1f} s  {'held' if held else 'DID NOT HOLD'}: {name} {note}", flush=True)

    def train(self, name: str, *options, more=()) -> int:
        """Submit slurm/train.sbatch on two nodes; its run folder is work/name, its log beside it."""
        flags = micro.flags(self.data, self.work / name, "--batch", 2, "--max_steps", STEPS, "--save_steps", 50,
                                 "--val_steps", 200, "--log_steps", 2, *more)  # fmt: skip
        return self.submit(name, "--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", *options,
                           f"{ROOT}/slurm/train.sbatch", *flags, python=self.python)  # fmt: skip

    def submit(self, name: str, *words, python: Path) -> int:
        own = f"--chdir={ROOT}", "--gpus-per-node=0", f"--output={self.log_of(name)}"
        return self.cluster.sbatch(*own, *words, PYTHON=str(python))

    def log_of(self, name: str) -> Path:
        return self.work / f"{name}.log"

    def text(self, name: str) -> str:
        return self.log_of(name).read_text(errors="replace") if self.log_of(name).exists() else ""

    def steps(self, name: str) -> int:
        """Steps that the run's log tells of."""
        path = self.work / name / "log.jsonl"
        return 2 * path.read_bytes().count(b"\n") if path.exists() else 0

    def state(self, job: int) -> str:
        return self.cluster.job(job).get("JobState", "?")

    def wait(self, condition, what: str, seconds: float = 90) -> bool:
        end = min(time.time() + seconds, self.began + LIMIT)
        while not condition():
            if time.time() > end:
                print(f"{time.time() - self.began:5.1f} s  gave up waiting: {what}", flush=True)
                return False
            time.sleep(0.2)
        return True

    def wait_end(self, job: int) -> dict:
        self.wait(lambda: self.state(job) in ENDED, f"the end of job {job}", LIMIT)
        return self.cluster.job(job)

    def rank(self, job: int, rank: int) -> int:
        """The process of a rank."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                variables = path.read_bytes().split(b"\0")
                command = (path.parent / "cmdline").read_bytes()
            except OSError:
                continue
            wanted = f"SLURM_JOB_ID={job}".encode(), f"SLURM_PROCID={rank}".encode(), b"SLURM_STEP_ID=0"
            if set(wanted) <= set(variables) and b"micro.py" in command:
                return int(path.parent.name)
        raise RuntimeError(f"rank {rank} of job {job} is not there")

    def same(self, name: str) -> list[str]:
        """What differs between the ends of a run and of the undisturbed one."""
        return micro.differences(self.work / "whole", self.work / name)


def killed(jobs: Jobs, job: int) -> int:
    """kill -9 of rank 1; the same command again, in a partition whose jobs may be preempted. Returns that job."""
    jobs.wait(lambda: jobs.steps("killed") > 55, "a checkpoint of the run to be killed")
    os.kill(jobs.rank(job, 1), signal.SIGKILL)
    when = time.time()
    end = jobs.wait_end(job)
    jobs.times["s_from_kill_to_end"] = round(time.time() - when, 1)
    ends = end["JobState"], end["ExitCode"], end["Restarts"]
    told = "has lost the others" in jobs.text("killed")
    jobs.check("killed_rank_fails_the_job", ends == ("FAILED", "137:0", "0") and told, " ".join(ends))
    return jobs.train("killed", "--partition=low")


def time_up(jobs: Jobs, job: int):
    """The limit is moved to where less is left than the 120 s of --signal: Slurm sends USR1. The rest may take long."""
    minutes, seconds = map(int, jobs.cluster.job(job)["RunTime"].split(":")[-2:])
    jobs.cluster.ask("scontrol", "update", f"JobId={job}", f"TimeLimit={minutes + 2}")
    when = time.time()
    jobs.wait(lambda: jobs.state(job) == "PENDING", "USR1 and the requeue")
    jobs.times["s_from_limit_moved_to_requeue"] = round(time.time() - when, 1)
    jobs.cluster.ask("scontrol", "update", f"JobId={job}", "TimeLimit=30")


def preempted(jobs: Jobs, job: int, others: list[int]):
    """A job of a higher partition needs one core more than is free: Slurm takes `job` away, and starts it again."""
    jobs.wait(lambda: "from step" in jobs.text("killed").partition("137")[2], "the start after the kill")
    before = jobs.steps("killed")
    jobs.wait(lambda: jobs.steps("killed") > before + 20, "steps after the kill")
    running = [j for j in [job, *others] if jobs.state(j) == "RUNNING"]
    urgent = jobs.cluster.sbatch("--nodes=2", "--ntasks-per-node=1", f"--cpus-per-task={5 - len(running)}",
                                 "--output=/dev/null", "--wrap=sleep 1")  # fmt: skip
    jobs.wait(lambda: jobs.state(job) == "PENDING", "the preemption")
    jobs.wait(lambda: jobs.state(urgent) in ENDED, "the urgent job")


def encode(jobs: Jobs) -> int:
    """slurm/encode.sbatch as an array of two."""
    (jobs.work / "images").mkdir()
    rng = np.random.default_rng(0)
    for n in range(4):
        with ShardWriter(jobs.work / f"images/{n:05d}.tar") as shard:
            for i in range(8):
                file = io.BytesIO()
                Image.fromarray(rng.integers(0, 256, (64, 64, 3), np.uint8)).save(file, "PNG")
                shard.add(f"{n:05d}{i:04d}", file.getvalue(), "png", "x", {})
    return jobs.submit("encode", "--array=0-1", "--cpus-per-task=1", f"{ROOT}/slurm/encode.sbatch", "--images",
                       jobs.work / "images", "--vae", jobs.data / "vae", "--size", 64, "--device", "cpu", "--out",
                       jobs.work / "latents", python=Path(sys.executable))  # fmt: skip


def disturb(jobs: Jobs):
    """Start everything, disturb it at its time, and compare."""
    c = jobs.cluster
    whole = jobs.train("whole")
    limited = jobs.train("limited", "--time=30", "--signal=B:USR1@120")
    doomed = jobs.train("killed")
    jobs.wait(lambda: min(jobs.steps(n) for n in ("whole", "limited", "killed")) > 0, "all runs' first steps")
    at_once = [jobs.state(j) for j in (whole, limited, doomed)]
    jobs.check("jobs_at_once_do_not_collide", at_once == ["RUNNING"] * 3, " ".join(at_once))

    again = killed(jobs, doomed)
    time_up(jobs, limited)
    preempted(jobs, again, [whole, limited])
    wrong = jobs.train("wrong", more=["--lr", "-1"])
    array = encode(jobs)
    end = jobs.wait_end(whole)
    jobs.check("done_ends_with_0", (end["JobState"], end["ExitCode"]) == ("COMPLETED", "0:0"))

    end, text = jobs.wait_end(limited), jobs.text("limited")
    stops = [int(n.replace(",", "")) for n in re.findall(r"stopped after step ([\d,]+)", text)]
    starts = [int(n.replace(",", "")) for n in re.findall(r"from step ([\d,]+)", text)]
    ready = len(stops) > 0 and stops == starts[1:] and 0 < stops[0] < STEPS
    left = len(re.findall(r"task \d: Exited with exit code 75", text))
    jobs.check("usr1_saves_all_ranks_at_one_step", ready and left == 2 * len(stops), f"at {stops}")
    jobs.check("requeued_until_done", end["JobState"] == "COMPLETED" and int(end["Restarts"]) >= 1,
               f"{end['Restarts']} restarts")  # fmt: skip
    jobs.check("log_not_truncated", len(starts) > 1 and starts[0] == 0, f"starts from {starts}")
    jobs.check("same_weights_after_requeue", not (found := jobs.same("limited")), str(found[:3] or ""))

    end = jobs.wait_end(wrong)
    ends = end["JobState"], end["ExitCode"], end["Restarts"]
    jobs.check("users_mistake_is_not_requeued", ends == ("FAILED", "2:0", "0"), " ".join(ends))
    jobs.wait(lambda: all(t.get("JobState") in ENDED for t in c.tasks(array)), "the array")
    states, numbers = ([t.get(name) for t in c.tasks(array)] for name in ("JobState", "JobId"))
    path = jobs.work / "latents/manifest.json"
    manifest = json.loads(path.read_text()) if path.exists() else {}
    jobs.check("encode_array_shares_shards", states == ["COMPLETED"] * 2 and manifest.get("count") == 32
               and len(set(numbers)) == 2, f"{' '.join(states)}, {manifest.get('count')} latents")  # fmt: skip
    end = jobs.wait_end(again)
    stops = re.findall(r"stopped after step ([\d,]+)", jobs.text("killed"))
    jobs.check("preempted_job_saves_and_goes_on", end["JobState"] == "COMPLETED" and end["Restarts"] == "1" and stops,
               f"stopped at {stops}")  # fmt: skip
    jobs.check("same_weights_after_kill_and_preemption", not (found := jobs.same("killed")), str(found[:3] or ""))


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--keep", action="store_true", help="leave the logs where they are")
    args = p.parse_args()
    if reason := missing():
        print(f"not tried: {reason}", file=sys.stderr)
        print(json.dumps({"test": "slurm", "tried": False, "reason": reason}))
        sys.exit(2)
    work, started = Path(tempfile.mkdtemp(prefix="slurm_test_")), time.time()
    cluster = Cluster(work / "cluster")
    with cluster:
        jobs = Jobs(work, cluster)
        disturb(jobs)
    jobs.check("everything_started_is_stopped", not cluster.own())
    failed = [name for name, held in jobs.held.items() if not held]
    if args.keep or failed:
        print(f"logs: {work}")
    else:
        shutil.rmtree(work)
    summary = {"test": "slurm", "tried": True, "held": len(jobs.held) - len(failed), "of": len(jobs.held)}
    print(json.dumps(summary | jobs.held | jobs.times | {"seconds": round(time.time() - started)}))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
