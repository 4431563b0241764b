"""Stages of a demonstration: command lines of the project's programs, run one after the other, once each."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

from sd.errors import InputError
from sd.files import atomic_write, read_json

ROOT = Path(__file__).resolve().parent.parent


class Stage(NamedTuple):
    """name; lines: of words, run by this Python; seconds: what it is expected to take, for the dry run; beside: it
    runs in the background, while the stages behind it run; after: names of such stages that must have ended before
    this one begins."""

    name: str
    lines: list[list[str]]
    seconds: float = 0.0
    beside: bool = False
    after: tuple[str, ...] = ()


class Stages:
    """Runs stages, and remembers in `file` which are done, with their command lines and seconds. A stage that was
    stopped is run again, and every program of this project goes on where it was."""

    def __init__(self, file: Path):
        self.file, self.running, self.stopped, self.lock = file, set(), False, threading.Lock()
        self.done = read_json(file) if file.exists() else {}

    def run(self, stages: list[Stage]) -> dict[str, float]:
        """All that are not done yet; returns the seconds of each. On SIGTERM or Ctrl-C the programs that run save and
        end, and so does this one, with status 1."""
        self._check(stages)
        for s in (signal.SIGTERM, signal.SIGINT):
            signal.signal(s, lambda *_: self._stop())
        try:
            self._run_all([s for s in stages if s.name not in self.done])
        except BaseException:
            self._stop()  # what runs in the background
            raise
        return {s.name: self.done[s.name]["seconds"] for s in stages}

    def _run_all(self, todo: list[Stage]):
        beside: dict[str, threading.Thread] = {}
        for i, stage in enumerate(todo, 1):
            before = [beside[name] for name in stage.after if name in beside]
            if not stage.beside:
                for thread in before:
                    self._join(thread)
            print(f"\n=== {i} of {len(todo)}: {stage.name}{' (in the background)' if stage.beside else ''} " + "=" * 40,
                  flush=True)  # fmt: skip
            if stage.beside:
                beside[stage.name] = self._start(stage, before)
            else:
                self._run(stage, None)
        for thread in beside.values():
            self._join(thread)

    def _check(self, stages: list[Stage]):
        for s in stages:
            if s.name in self.done and self.done[s.name]["lines"] != s.lines:
                raise InputError(
                    f"the stage '{s.name}' of {self.file.parent} was run with other flags than it would be now; remove "
                    "that folder, or give another --out"
                )

    def _start(self, stage: Stage, before: list[threading.Thread]) -> threading.Thread:
        """A thread that runs the stage, after those before it."""
        output = self.file.with_name(f"{stage.name.replace(' ', '_')}.txt")

        def work():
            for other in before:
                other.join()
                if other.failure:
                    thread.failure = other.failure
                    return
            try:
                self._run(stage, output)
            except SystemExit as e:
                thread.failure = f"{e}; see {output}"

        thread = threading.Thread(target=work)
        thread.failure = None
        thread.start()
        return thread

    def _join(self, thread: threading.Thread):
        while thread.is_alive():
            thread.join(0.2)  # so that signals are seen
        if thread.failure:
            raise SystemExit(thread.failure)

    def _run(self, stage: Stage, output: Path | None):
        started = time.time()
        for line in stage.lines:
            if self.stopped:
                raise SystemExit("stopped; run the same command again to go on")
            print(f"\n$ python {shlex.join(line)}", flush=True)
            with open(output, "ab") if output else contextlib.nullcontext() as file:
                process = subprocess.Popen(
                    [sys.executable, *line], cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}, stdout=file,
                    stderr=file, start_new_session=True,
                )  # fmt: skip
                with self.lock:
                    self.running.add(process)
                status = process.wait()
                with self.lock:
                    self.running.discard(process)
            if self.stopped:
                raise SystemExit("stopped; run the same command again to go on")
            if status:
                raise SystemExit(f"error: stage '{stage.name}' ended with status {status}; mend it and run again")
        seconds = time.time() - started
        with self.lock:
            self.done[stage.name] = {"lines": stage.lines, "seconds": round(seconds, 1)}
            atomic_write(self.file, json.dumps(self.done, indent=1))
        print(f"--- {stage.name}: {seconds:.0f} s", flush=True)

    def _stop(self):
        """Each program gets the signal once; the first process of a torchrun passes it on."""
        self.stopped = True
        for process in list(self.running):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)


def describe(stages: list[Stage], say=print):
    """The dry run: each stage's command lines and expected minutes, and those of all."""
    clock, ends = 0.0, {}
    for stage in stages:
        begin = max([clock, *(ends[name] for name in stage.after)])
        end = ends[stage.name] = begin + stage.seconds
        if not stage.beside:
            clock = end
        say(f"\n{begin / 60:5.1f} to {end / 60:4.1f} min  {stage.name}{' (in the background)' if stage.beside else ''}")
        for line in stage.lines:
            say(f"    python {shlex.join(line)}")
    say(f"\n{max(ends.values(), default=0.0) / 60:.0f} minutes in all, estimated")
