"""Our fine-tuning and the diffusers and PEFT libraries', one after the other on one NVIDIA GPU: LoRA and all weights.

    python benchmarks/finetune_bench.py --out finetune.jsonl              # at most 9 minutes; again: what is missing
    python benchmarks/finetune_bench.py --out finetune.jsonl --more       # the peer's other ways to be compiled too
    python benchmarks/finetune_bench.py --out trial.jsonl --trial         # tiny networks on the CPU: does it all run?

SD 1.5's network at 512 px on synthetic latents and text, in bf16 autocast: LoRA of rank 16 at batch 1, 4 and 16, at
batch 1 with recomputing too, and all weights with EMA at batch 1 and 4. Ours is SD_Train.py --benchmark; the peer is
finetune_peer.py, of which the fastest way counts. The peer's LoRA is on attention and feed-forward layers, ours on the
transformers' first and last projections too, which is an eighth more. The peer keeps no average of its LoRA, ours does.

What has to be compiled is compiled first, all at once, with the results in the compilers' caches; then each side is
timed alone. Each result is a line of --out. A job that does not fit into --minutes is left for the next call, which
runs what has no line yet. At the end a table with ratios is printed.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from train_bench import ROOT, want_gpu

from sd.cli import parser

PEER = str(Path(__file__).with_name("finetune_peer.py"))

ATTEMPT_S = 15  # a job is not begun with less time than that

WORKS = ["LoRA, batch 1", "LoRA, batch 4", "LoRA, batch 16", "LoRA, batch 1, recomputing", "all weights, batch 1",
         "all weights, batch 4"]  # fmt: skip


class Job(NamedTuple):
    """A process that ends with a line of JSON for each of its works."""

    side: str  # ours or peer
    how: str  # of the peer
    works: list[str]
    command: list[str]
    compiles: bool  # long enough to be done beside others, before anything is timed


def ours(work: str, words: list[str], trial: bool, steps: int) -> Job:
    small = ["--model", "tiny", "--size", "64", "--device", "cpu"] if trial else []
    command = [sys.executable, "SD_Train.py", *words, *small, "--benchmark", str(steps)]
    return Job("ours", "", [work], command, work == "LoRA, batch 4")  # whose kernels the others have too


def peer(works: list[str], kind: str, batches: list[int], how: str, trial: bool, steps: int) -> Job:
    command = [sys.executable, PEER, "--work", kind, "--batch", *map(str, batches), "--how", how, "--steps", str(steps)]
    return Job("peer", how, works, command + ["--trial"] * trial, how not in ("eager", "checkpointed"))


def jobs(trial: bool, more: bool, steps: int) -> list[Job]:
    """What matters most comes first."""
    lora = WORKS[:3]
    found = [ours(f"LoRA, batch {n}", ["--phase", "lora", "--batch", str(n)], trial, steps) for n in (4, 1, 16)]
    found.append(peer(lora, "lora", [1, 4, 16], "eager", trial, max(2, steps // 3)))
    for n in (4, 1, 16):
        found.append(peer([f"LoRA, batch {n}"], "lora", [n], "reduce-overhead", trial, steps))
    found += [ours(f"all weights, batch {n}", ["--phase", "finetune", "--batch", str(n)], trial, steps) for n in (4, 1)]
    found.append(peer(["all weights, batch 4"], "finetune", [4], "default", trial, steps))
    words = ["--phase", "lora", "--batch", "1", "--grad_checkpoint", "all"]
    found.append(ours(WORKS[3], words, trial, steps))
    found.append(peer([WORKS[3]], "lora", [1], "checkpointed", trial, max(2, steps // 4)))
    found.append(peer(WORKS[4:], "finetune", [1, 4], "eager", trial, max(2, steps // 4)))
    if more:
        for how in ("default", "max-autotune-no-cudagraphs"):
            found += [peer([f"LoRA, batch {n}"], "lora", [n], how, trial, steps) for n in (16, 4, 1)]
        for n in (4, 1):
            found.append(peer([f"all weights, batch {n}"], "finetune", [n], "reduce-overhead", trial, steps))
    return found


def start(command: list[str], log) -> subprocess.Popen:
    """In a process group of its own, which finish() can end whole."""
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(2, (os.cpu_count() or 4) // 3))}
    if "cpu" in command or "--trial" in command:
        threads["OMP_NUM_THREADS"] = "1"  # for networks this small
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                            env=os.environ | threads)  # fmt: skip


def finish(process: subprocess.Popen, seconds: float) -> list[dict] | None:
    """The lines of JSON that it printed; None if it failed or took longer."""
    try:
        text, _ = process.communicate(timeout=max(1, seconds))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None
    if process.returncode:
        return None
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def read_rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def table(rows: list[dict]) -> str:
    """Markdown: each work's images a second and GiB of both sides, and how many times the peer's fastest ours are."""
    lines = ["| 512 px | ours | estimated | peer, eager | peer, fastest | ratio |", "|---|---|---|---|---|---|"]

    def cell(row: dict | None, how: bool = False) -> str:
        if row is None:
            return ""
        peak = "" if row["peak_GiB"] is None else f", {row['peak_GiB']:.1f} GiB"
        return f"{row['images_per_s']:.1f} images/s{peak}{' (' + row['how'] + ')' if how else ''}"

    for work in WORKS:
        of_work = [row for row in rows if row["job"] == work]
        own = next((row for row in of_work if row["side"] == "ours"), None)
        others = [row for row in of_work if row["side"] == "peer"]
        if not of_work:
            continue
        plain = next((row for row in others if row["how"] in ("eager", "checkpointed")), None)
        best = max(others, key=lambda row: row["images_per_s"], default=None)
        ratio = f"{own['images_per_s'] / best['images_per_s']:.2f}" if own and best else ""
        estimate = f"{own['estimated_peak_GiB']:.1f} GiB" if own else ""
        lines.append(f"| {work} | {cell(own)} | {estimate} | {cell(plain)} | {cell(best, True)} | {ratio} |")
    return "\n".join(lines)


def main():
    p = parser(__doc__)
    g = p.add_argument_group("what")
    g.add_argument("--out", type=Path, default=Path("finetune.jsonl"), help="file of results, a line each, added to")
    g.add_argument("--minutes", type=float, default=9.0, help="that one call may take")
    g.add_argument("--steps", type=int, default=100, help="to time, of ours and the compiled peer; of the eager peer a "
                   "third or fewer")  # fmt: skip
    g.add_argument("--more", action="store_true", help="time the peer in all modes of torch.compile (without it in the "
                   "likeliest)")  # fmt: skip
    g.add_argument("--trial", action="store_true", help="tiny networks on the CPU, the peer not compiled")
    args = p.parse_args()
    if not args.trial:
        want_gpu()
    end = time.monotonic() + 60 * args.minutes
    todo = jobs(args.trial, args.more, 2 if args.trial else args.steps)
    if args.trial:
        todo = [job for job in todo if job.side == "ours" or not job.compiles]
    done = {(row["side"], row["how"], row["job"]) for row in read_rows(args.out)}
    todo = [job for job in todo if any((job.side, job.how, work) not in done for work in job.works)]
    failed, left = [], []
    with open(args.out.with_suffix(".log"), "a") as log:
        begun = [] if args.trial else [job for job in todo if job.compiles]
        for job, process in [(job, start([*job.command[:-1], "2"], log)) for job in begun]:  # instead of all steps
            found = finish(process, end - time.monotonic())
            print(f"compiled: {job.side} {job.how} {job.works[0]}: {'yes' if found else 'no'}", flush=True)
        for job in todo:
            if end - time.monotonic() < ATTEMPT_S:
                left.append(job)
                continue
            found = finish(start(job.command, log), end - time.monotonic())
            if not found:
                failed.append(job)
                continue
            with open(args.out, "a") as file:
                for work, row in zip(job.works, found, strict=True):
                    file.write(json.dumps({"job": work, "side": job.side, "how": job.how} | row) + "\n")
                    print(f"{job.side} {job.how} {work}: {row['images_per_s']} images/s", flush=True)
    print(table(read_rows(args.out)))
    for what, some in (("failed, or out of time (see the .log)", failed), ("left for another call", left)):
        for job in some:
            print(f"{what}: {job.side} {job.how} {', '.join(job.works)}")
    if failed or left:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
