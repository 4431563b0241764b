"""benchmarks/several_gpus.py: what it takes for the same run, and that nothing that fails or hangs stops the rest.

All of it runs with --trial in four minutes on two cores, which is no test of this folder.
"""

import importlib.util
import json
import os
import subprocess
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("several_gpus", ROOT / "benchmarks/several_gpus.py")
several = importlib.util.module_from_spec(spec)
spec.loader.exec_module(several)
from sd.errors import InputError  # noqa: E402


@pytest.fixture
def bench(tmp_path) -> several.Bench:
    return several.Bench(Namespace(trial=True, out=tmp_path / "out", revision="x"), tmp_path)


def lines(bench) -> list[dict]:
    return [json.loads(line) for line in (bench.out / "several_gpus.jsonl").read_text().splitlines()]


def test_runs_are_compared_by_pictures_losses_and_weights(monkeypatch):
    runs = {
        "a": ([1.0, 2.0], ["x", "y"], torch.tensor([3.0, 4.0])),
        "rounded": ([1.0, 2.002], ["x", "y"], torch.tensor([3.0, 4.005])),
        "other": ([1.0, 2.2], ["x", "y"], torch.tensor([3.0, 4.0])),
        "pictures": ([1.0, 2.0], ["x", "z"], torch.tensor([3.0, 4.0])),
        "broken": ([1.0, 2.0], ["x", "y"], torch.tensor([3.0, torch.nan])),
    }
    monkeypatch.setattr(several, "STEPS", 2)
    monkeypatch.setattr(several.micro, "checkpoints", lambda out: [out])
    monkeypatch.setattr(several.micro, "contents", lambda out: ({"unet/w": runs[out][2], "optimizer/0": None}, {}))
    monkeypatch.setattr(several.micro, "rows", lambda out: [
        {"step": i + 1, "loss": loss, "seen": seen} for i, (loss, seen) in enumerate(zip(*runs[out][:2]))])  # fmt: skip
    found = {name: several.compare("a", name) for name in runs}
    assert found["a"] == {"seen": True, "loss": 0, "loss_max": 0, "weights": 0, "bits": True}
    assert found["rounded"]["loss"] == pytest.approx(0.0005) and found["rounded"]["loss_max"] == pytest.approx(0.001)
    assert found["rounded"]["weights"] == pytest.approx(0.001, rel=1e-3) and not found["rounded"]["bits"]
    assert {name for name in runs if several.same(found[name])} == {"a", "rounded"}
    monkeypatch.setattr(several, "STEPS", 3)  # a run that lacks its end
    assert not several.same(several.compare("a", "a"))


def test_what_fails_is_told_and_the_rest_goes_on(bench):
    bench.part = 2

    def fail():
        raise RuntimeError("no such card")

    assert bench.tried("a", fail) is None and bench.tried("b", lambda: 7) == 7
    bench.end = time.time() - 1
    assert bench.tried("c", lambda: 8) is None
    first, second = lines(bench)
    assert first["name"] == "a" and first["held"] is False and first["failed"] == "RuntimeError: no such card"
    assert second["name"] == "c" and second["held"] is None and second["not_finished"] == "no time was left"
    assert first["revision"] == "x" and first["torch"] == torch.__version__ and first["cores"] == os.cpu_count()
    assert "| 2 | a | NO | failed RuntimeError: no such card |" in several.as_table(bench.about, bench.lines)


def test_what_takes_too_long_is_ended_with_all_that_it_started(bench, tmp_path):
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '60']); print(p.pid, flush=True); p.wait()"
    process = bench.process(["-c", code])
    while not (child := bench.said(process).strip()):
        time.sleep(0.01)
    with pytest.raises(several.NoTime):
        bench.finish([process], 0.1)
    assert process.poll() is not None
    for _ in range(500):
        if not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2]:
            break
        time.sleep(0.01)
    else:
        raise AssertionError("the child goes on")

    pid = subprocess.Popen(["sleep", "60"]).pid
    with pytest.raises(several.NoTime):
        bench.ends([pid], 0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_of_one_machine_what_cannot_be_is_refused(monkeypatch, tmp_path):
    with pytest.raises(InputError, match="--parts wants numbers from 1 to 5"):
        several.main(["--parts", "1,9", "--trial", "--out", str(tmp_path / "out")])
    monkeypatch.setattr(several.subprocess, "check_output", lambda words: '["a card"]')
    with pytest.raises(InputError, match="two or more NVIDIA GPUs were wanted, found 1"):
        several.main(["--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
