"""Many machines, without Slurm: ranks and meeting points from srun's variables, exit statuses, what the job scripts do
with them, processes that lose each other, and pictures painted by several processes. tests/slurm/run.py has the rest.

pytest tests/test_slurm_parts.py
"""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from binding import rebind
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import micro
from micro import checkpoints, differences, flags, start, start_ranks, status_of

import sd.bulk
import sd.checkpoints
import sd.device
import sd.errors
import sd.objective
import sd.slurm
import SD_ImageGen
from sd.errors import InputError

ROOT = Path(__file__).resolve().parent.parent

# What Slurm 22.05 set: in the script of a job of two nodes and two tasks, and in task 1 of its srun.
BATCH = {"SLURM_JOB_ID": "41", "SLURM_NODELIST": "n[1-2]", "SLURM_NTASKS": "2", "SLURM_PROCID": "0",
         "SLURM_LOCALID": "0", "SLURM_NNODES": "2", "SLURM_NODEID": "0"}  # fmt: skip
TASK = BATCH | {"SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_NODES": "2",
                "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_NODEID": "1"}  # fmt: skip
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return micro.make_data(tmp_path_factory.mktemp("data"), {"things": 42})


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """12 undisturbed steps of two ranks."""
    out = tmp_path_factory.mktemp("whole") / "run"
    pids = start_ranks(2, flags(data, out, "--batch", 2), out.with_suffix(".txt"))
    assert [status_of(p) for p in pids] == [0, 0], out.with_suffix(".txt").read_text()
    return out


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A scontrol that knows the node n1, and notes how it is called."""
    file = tmp_path / "bin/scontrol"
    file.parent.mkdir()
    file.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n'
                    'case "$*" in *"node n1") echo "NodeName=n1 NodeAddr=127.0.0.1 Port=1";; esac\n')  # fmt: skip
    file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{file.parent}:{os.environ['PATH']}")
    return tmp_path / "asked"


# --- ranks and where they meet


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TASK, (1, 2, 0)),
        (TASK | {"SLURM_LOCALID": "3", "SLURM_STEP_NUM_TASKS": "16", "SLURM_PROCID": "11"}, (11, 16, 3)),
        (TASK | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, (0, 1, 0)),
        (BATCH, (0, 1, 0)),  # one process, though SLURM_NTASKS is 2
        (TASK | TORCHRUN, (5, 8, 1)),  # torchrun, started by srun on each node
    ],
)
def test_ranks_come_from_srun_alone(environment, expected):
    assert sd.device.find_ranks(environment) == expected


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [("n1", "n1"), ("n[1-2]", "n1"), ("n[007-012,020],m3", "n007"), ("b,a[1-2]", "b"), ("r[2-3]n[4,6]-ib", "r2n4-ib"),
     ("gpu-a100-[03,01]", "gpu-a100-03")],
)  # fmt: skip
def test_the_first_node_of_a_list(nodelist, first):
    assert sd.slurm.first_node(nodelist) == first


def test_ports_of_jobs_that_share_a_node_differ():
    def port(**variables):
        return sd.slurm.meeting_port({k: str(v) for k, v in variables.items()})

    jobs = [port(SLURM_JOB_ID=90_000 + i, SLURM_STEP_ID=0) for i in range(20_000)]
    assert len(set(jobs)) == 20_000 and 1024 < min(jobs) and max(jobs) < 32_768
    # an array's tasks as Slurm numbers them: the array's number is that of its last task
    tasks = [port(SLURM_JOB_ID=j, SLURM_ARRAY_JOB_ID=2, SLURM_ARRAY_TASK_ID=t) for t, j in enumerate((3, 4, 2))]
    assert len(set(tasks)) == 3
    assert len({port(SLURM_JOB_ID=41, SLURM_STEP_ID=s) for s in range(20)}) == 20  # two sruns in one job
    with pytest.raises(InputError, match="set MASTER_PORT"):
        port(SLURM_JOB_ID="x")


def test_the_meeting_point_is_an_address_that_resolves(scontrol):
    port = str(sd.slurm.FIRST_PORT + 41)
    assert sd.slurm.meeting_point(TASK) == {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # n1 itself does not
    assert scontrol.read_text() == "--oneliner show node n1\n"
    one = TASK | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "m9"}
    assert sd.slurm.meeting_point(one)["MASTER_ADDR"] == "127.0.0.1"
    assert sd.slurm.meeting_point(TASK | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "5"}) == {
        "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "5"}  # fmt: skip
    with pytest.raises(InputError, match="node m9 .* does not resolve here; set MASTER_ADDR"):
        sd.slurm.meeting_point(TASK | {"SLURM_STEP_NODELIST": "m[9-10]"})


def test_two_tasks_of_srun_train_as_two_of_torchrun(data, whole, tmp_path, scontrol):
    out, job = tmp_path / "run", os.getpid()
    pids = [start(flags(data, out, "--batch", 2), tmp_path / "o", **TASK | {"SLURM_PROCID": r, "SLURM_JOB_ID": job})
            for r in (0, 1)]  # fmt: skip
    assert [status_of(p) for p in pids] == [0, 0], (tmp_path / "o").read_text()
    assert differences(whole, out) == []


# --- how a run ends


def at_step(step: int, rank: int, action):
    """A hook for start_ranks: action() in the middle of that step, counted from 0, of that rank."""

    def hook(own):
        real, calls = sd.objective.backward, []

        def backward(*args):
            calls.append(0)
            if own == rank and len(calls) == step + 1:
                action()
            return real(*args)

        rebind(sd.objective, "backward", backward)

    return hook


@pytest.mark.parametrize(
    ("sent", "more", "status"),
    [
        (signal.SIGUSR1, ("--requeue_signal", "USR1"), 75),
        (signal.SIGTERM, ("--requeue_signal", "USR1"), 75),  # a preemption
        (None, ("--requeue_signal", "USR1", "--stop_at", 8), 0),  # ends where it was told to
    ],
)
def test_a_signal_to_one_rank_saves_all_and_tells_by_the_status(data, whole, tmp_path, sent, more, status):
    out = tmp_path / "run"
    hook = at_step(7, 1, lambda: os.kill(os.getpid(), sent)) if sent else None
    pids = start_ranks(2, flags(data, out, "--batch", 2, *more), tmp_path / "o", hook)
    assert [status_of(p) for p in pids] == [status, status], (tmp_path / "o").read_text()
    assert "stopped after step 8 of 12" in (tmp_path / "o").read_text()
    assert checkpoints(out)[-1].name == "step_00000008"
    if sent == signal.SIGUSR1:
        pids = start_ranks(2, flags(data, out, "--batch", 2, *more, "--resume"), tmp_path / "o")
        assert [status_of(p) for p in pids] == [0, 0]  # done
        assert differences(whole, out) == []


def test_without_the_flag_the_signal_ends_the_process(data, tmp_path):
    hook = at_step(3, 0, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    pid = start(flags(data, tmp_path / "run"), tmp_path / "o", lambda: hook(0))
    assert status_of(pid) == -signal.SIGUSR1


def test_a_stopped_run_that_could_not_save_is_no_unfinished_one(data, tmp_path):
    """Or it would be started again and again: the status is 1 on all ranks, of which srun gives the highest."""

    def hook(rank):
        at_step(7, 0, lambda: os.kill(os.getpid(), signal.SIGUSR1))(rank)

        def full(*args):
            raise OSError(28, "No space left on device")

        rebind(sd.checkpoints, "write_checkpoint", full)

    argv = flags(data, tmp_path / "run", "--batch", 2, "--requeue_signal", "USR1", "--save_steps", 100)
    assert [status_of(p) for p in start_ranks(2, argv, tmp_path / "o", hook)] == [1, 1]
    assert (tmp_path / "o").read_text().count("could not be written; free some disk") == 1


def test_a_rank_whose_other_is_gone_or_silent_ends_with_one_sentence(data, tmp_path):
    for name, action in (("gone", lambda: os.kill(os.getpid(), signal.SIGKILL)), ("silent", lambda: time.sleep(20))):
        argv, began = flags(data, tmp_path / name, "--batch", 2, "--timeout", 2), time.time()
        pids = start_ranks(2, argv, tmp_path / f"{name}.txt", at_step(4, 1, action))
        assert status_of(pids[0]) == 2 and time.time() - began < 12
        os.kill(pids[1], signal.SIGKILL)
        status_of(pids[1])
        text = (tmp_path / f"{name}.txt").read_text()
        assert text.count("error: this process has lost the others") == 1 and "Traceback" not in text, text
        assert checkpoints(tmp_path / name)[-1].name == "step_00000003"


def test_a_timeout_that_is_none_is_refused(monkeypatch):
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="--timeout wants a positive number"):
            sd.device.setup_device("cpu", value)


# --- the job scripts


def script(command: str, folder: Path, **variables) -> subprocess.Popen:
    """A job's script that runs a command in bash, as slurm/*.sbatch do."""
    text = f"cd {ROOT}; source slurm/requeue.sh; run_and_requeue bash -c '{command}'"
    environ = os.environ | {"SLURM_JOB_ID": "41"} | variables
    return subprocess.Popen(["bash", "-c", text], env=environ, stdout=open(folder / "log", "w"))


@pytest.mark.parametrize(
    ("command", "sent", "variables", "status", "requeued"),
    [
        ("exit 0", None, {}, 0, False),
        ("exit 75", None, {}, 75, True),
        ("exit 1", None, {}, 1, False),
        ("exit 2", None, {"RETRY": "2"}, 2, False),  # no signal came: the user's mistake
        ('trap "exit 75" USR1; touch ready; while :; do sleep 0.05; done', "USR1", {}, 75, True),
        ('trap "exit 0" USR1; touch ready; while :; do sleep 0.05; done', "USR1", {}, 0, False),
        ('trap "exit 75" USR2; touch ready; while :; do sleep 0.05; done', "USR1", {"SIGNAL": "USR2"}, 75, True),
        ("touch ready; exec sleep 20", "USR1", {"SIGNAL": "TERM", "RETRY": "143"}, 143, True),
        ("touch ready; exec sleep 20", "USR1", {"RETRY": "138"}, 138, True),  # not ready for it yet
        ("touch ready; sleep 0.5; exit 75", "TERM", {}, 75, True),  # the script outlives what Slurm sends to all
        ("exit 75", None, {"SLURM_RESTART_COUNT": "3", "MAX_RESTARTS": "4"}, 75, True),
        ("exit 75", None, {"SLURM_RESTART_COUNT": "4", "MAX_RESTARTS": "4"}, 75, False),
    ],
)
def test_the_script_requeues_what_is_unfinished_and_nothing_else(
    command, sent, variables, status, requeued, tmp_path, scontrol
):
    process = script(command.replace("touch ready", f"touch {tmp_path}/ready"), tmp_path, **variables)
    if sent:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        process.send_signal(signal.Signals[f"SIG{sent}"])
    assert process.wait(10) == status
    assert (scontrol.read_text() if scontrol.exists() else "") == ("requeue 41\n" if requeued else "")


@pytest.mark.parametrize("name", ["train", "encode", "paint"])
def test_the_shipped_scripts_keep_their_log_and_are_valid(name):
    text = (ROOT / f"slurm/{name}.sbatch").read_text()
    for line in ("--open-mode=append", "--requeue", "--signal=B:USR1@"):
        assert f"\n#SBATCH {line}" in text
    assert subprocess.run(["bash", "-n", ROOT / f"slurm/{name}.sbatch"]).returncode == 0


# --- many pictures


@pytest.fixture(scope="module")
def painter(data, tmp_path_factory):
    """Flags that paint 20 pictures, some of long prompts, with a network of two steps of training."""
    folder = tmp_path_factory.mktemp("painter")
    pid = start(flags(data, folder / "run", "--max_steps", 2, "--vae", data / "vae"), folder / "o")
    assert status_of(pid) == 0, (folder / "o").read_text()
    prompts = [{"prompt": f"red {i}" + " and long" * (9 if i % 7 == 3 else 0)} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return ["--model", str(folder / "run"), "--prompts_file", str(folder / "prompts.jsonl"), "--steps", "2",
            "--device", "cpu", "--batch", "2", "--seed", "5"]  # fmt: skip


def paint(argv: list, hook=None) -> int:
    """Start SD_ImageGen.py's command line in a forked process; returns its id."""
    sys.stdout.flush(), sys.stderr.flush()
    if pid := os.fork():
        return pid
    status = 1
    try:
        if hook:
            hook()
        sd.errors.run(lambda: SD_ImageGen.main([str(word) for word in argv]))
        status = 0
    except SystemExit as e:
        status = e.code
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def files(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in sorted(out.rglob("*")) if p.is_file()}


def pictures(out: Path) -> dict[str, bytes]:
    """Names and bytes of all members of a folder's tars, or of its folders."""
    found = {}
    for path in sorted(out.glob("*.tar")):
        with tarfile.open(path) as tar:
            found |= {m.name: tar.extractfile(m).read() for m in tar}
    return found or {p.name: p.read_bytes() for p in out.glob("0*/*")}


@pytest.fixture(scope="module")
def alone(painter, tmp_path_factory):
    """What one process paints."""
    out = tmp_path_factory.mktemp("alone") / "out"
    assert status_of(paint([*painter, "--tars", 6, "--out", out])) == 0
    return out


def test_tars_hold_every_picture_once_with_its_prompt(alone, painter, tmp_path):
    found = pictures(alone)
    assert sorted(found) == sorted(f"{i:09d}.{end}" for i in range(20) for end in ("png", "txt", "json"))
    assert len({found[f"{i:09d}.png"] for i in range(20)}) == 20
    assert found["000000003.txt"] == b"red 3" + b" and long" * 9
    described = json.loads(found["000000019.json"])
    assert (described["seed"], described["caption"], described["width"]) == (24, "red 19", 64)
    assert [path.name for path in sorted(alone.glob("*.tar"))] == [f"{n:05d}.tar" for n in range(4)]
    argv = [*painter[:2], *painter[4:-1], 9, "--prompt", "red 4", "--out", tmp_path / "one.png"]
    assert status_of(paint(argv)) == 0
    (tmp_path / "four.png").write_bytes(found["000000004.png"])
    a, b = (Image.open(tmp_path / name) for name in ("one.png", "four.png"))
    assert max(abs(x - y) for x, y in zip(a.tobytes(), b.tobytes())) <= 1  # the same picture as without --tars


def test_two_processes_paint_what_one_does(alone, painter, tmp_path):
    out = tmp_path / "out"
    pids = [paint([*painter, "--tars", 6, "--out", out]) for _ in range(2)]
    assert [status_of(p) for p in pids] == [0, 0]
    assert files(out) == files(alone)  # tars, parquets, manifest: no lock is left, nothing else differs
    assert status_of(paint([*painter, "--folders", 7, "--out", tmp_path / "folders"])) == 0
    assert {p.parent.name for p in (tmp_path / "folders").glob("*/*.png")} == {"00000", "00001", "00002"}


@pytest.mark.parametrize("kind", ["tars", "folders"])
def test_what_is_there_and_whole_is_not_painted_again(painter, tmp_path, kind, capfd):
    """A kill after nine pictures, damage to what is there, a second process: the same files as undisturbed."""
    argv = [*painter, f"--{kind}", 6, "--out"]
    assert status_of(paint([*argv, tmp_path / "whole"])) == 0
    out, real, calls = tmp_path / "out", sd.bulk.png_bytes, []

    def counted(*args):
        calls.append(0)
        if len(calls) == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    assert status_of(paint([*argv, out], lambda: rebind(sd.bulk, "png_bytes", counted))) == -signal.SIGKILL
    before = {path: path.stat().st_mtime_ns for path in out.rglob("0*.png" if kind == "folders" else "*.tar")}
    assert len(before) == (8 if kind == "folders" else 1) and not (out / "manifest.json").exists()
    assert status_of(paint([*argv, out])) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before
    wanted = files(tmp_path / "whole")
    assert files(out) == wanted

    damaged = out / ("00002.tar" if kind == "tars" else "00002/000000013.png")
    os.truncate(damaged, damaged.stat().st_size // 2 if kind == "tars" else 100)
    gone = out / ("00003.tar" if kind == "tars" else "00001/000000008.txt")
    gone.unlink()
    capfd.readouterr()
    assert status_of(paint([*argv, out])) == 0
    assert files(out) == wanted
    # of a folder only what is missing; of tars 00002 with six and 00003 with two
    assert f"{8 if kind == 'tars' else 2} pictures in " in capfd.readouterr().out
    assert status_of(paint([*argv, out])) == 0
    assert "all is there" in capfd.readouterr().out


def test_a_folder_of_other_pictures_is_refused(alone, painter, tmp_path, capfd):
    before = files(alone)
    for more, mentions in (
        (("--cfg", 3), "begun with cfg = 7.5, and cfg = 3.0"),
        (("--tars", 7), "begun with shard_size = 6, and shard_size = 7"),
        (("--seed", 6), "begun with jobs = "),
        (("--weights", "live"), "begun with weights_hash = "),
        (("--folders", 6), "give one of them"),
        (("--grid", 2), "--grid is of a folder"),
        (("--overwrite",), "--overwrite is of a folder"),
        (("--tars", 0), "wants 1 to 100,000"),
    ):
        assert status_of(paint([*painter, "--tars", 6, "--out", alone, *more])) == 2
        assert mentions in capfd.readouterr().err
    (tmp_path / "a.txt").write_text("mine")
    assert status_of(paint([*painter, "--tars", 6, "--out", tmp_path])) == 2
    assert "holds a.txt but no settings.json" in capfd.readouterr().err
    assert files(alone) == before


def test_several_processes_do_not_paint_the_same_pictures_each(painter, tmp_path, capfd):
    def hook():
        os.environ.update(TORCHRUN)

    assert status_of(paint([*painter, "--out", tmp_path / "out"], hook)) == 2
    assert "8 processes were started, and each would paint all: add --tars" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()
