"""Runs: what a checkpoint holds and which folder is one, what may change at --resume, an environment that is not to be
trusted, ends that say what was done, damaged logs, numbers that are none, and the last timestep's weight. Trainings of
the micro network in this process."""

import contextlib
import copy
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro
from binding import rebind
from micro import checkpoints, flags, rows, start, status_of

import sd.checkpoints
import sd.data
import sd.device
import sd.files
import sd.log
import sd.objective
import sd.painting
import sd.setup
import sd.weights.read
import SD_Model
import SD_Train
import SD_TrainVAE
from sd.errors import InputError


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """`things` of 42 pictures, 8 held out; `bare` of 10 and none held out."""
    root = micro.make_data(tmp_path_factory.mktemp("micro") / "data", {"things": 42})
    vae = json.loads((root / "things/latents/manifest.json").read_text())["vae"]
    keys = [f"bare/00000/{i:09d}" for i in range(10)]
    micro.write_dataset(root / "bare/dataset", micro.make_tokenizer(), {"train": keys, "val": []})
    micro.write_latents(root / "bare/latents", keys, vae, seed=5)
    return root


@pytest.fixture
def own(data, tmp_path) -> Path:
    """A copy of the data that may be spoiled; the VAE stays where the manifest says it is."""
    return shutil.copytree(data, tmp_path / "data")


def train(data: Path, out: Path, *more) -> str:
    """Train in this process; returns what was printed. Exceptions pass, with what was printed as a note."""
    text, handlers = io.StringIO(), {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    plot, sd.log.plot_run = sd.log.plot_run, lambda out: None
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            SD_Train.main(flags(data, out, *more))
    finally:
        sd.log.plot_run = plot
        for s, handler in handlers.items():
            signal.signal(s, handler)
    return text.getvalue()


def refused(data: Path, out: Path, *more) -> str:
    """The one sentence that a training is refused with. Nothing in its run folder changes."""
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(InputError) as caught:
        train(data, out, *more)
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> Path:
    """12 steps of 4, logged every 4 steps and saved every 3."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(data, out, "--log_steps", 4)
    return out


@pytest.fixture
def half(whole, tmp_path) -> Path:
    """That run as it stood at step 6, in the middle of a line of its log."""
    out = shutil.copytree(whole, tmp_path / "half")
    for folder in checkpoints(out)[2:]:
        shutil.rmtree(folder)
    return out


def edit_state(checkpoint: Path, **changes):
    """Change values of state.json, None: drop them, and put the manifest right."""
    path = checkpoint / "state.json"
    state = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in state.items() if v is not None}))
    manifest = json.loads((checkpoint / "manifest.json").read_text()) | {"state.json": sd.files.sha256(path)}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def strict_rows(path: Path) -> list[dict]:
    def no_number(name):
        raise ValueError(f"{name} is no JSON")

    return [json.loads(line, parse_constant=no_number) for line in path.read_text().splitlines()]


# --- a checkpoint is a value


def test_steps_taken_during_a_write_do_not_get_into_the_checkpoint(data, whole, tmp_path, monkeypatch):
    """Case 59. The window of the log at step s has s mod 4 steps, however long the write takes."""
    real, handed = sd.checkpoints.write_checkpoint, []

    def slow_write(folder, snapshot):
        handed.append((copy.deepcopy({k: snapshot[k] for k in ("weights", "optimizer", "model", "state")}), snapshot))
        time.sleep(0.1)  # of steps that take 10 ms
        then, now = handed[-1]
        assert all(then[k] == now[k] for k in ("model", "state"))
        for name, tensors in then["weights"].items():
            assert all(torch.equal(tensors[k], now["weights"][name][k]) for k in tensors)
        real(folder, snapshot)

    rebind(sd.checkpoints, "write_checkpoint", slow_write, monkeypatch.setattr)
    text = train(data, tmp_path / "run", "--log_steps", 4)
    assert "was not written" not in text
    windows = [json.loads((c / "state.json").read_text())["window"]["steps"] for c in checkpoints(tmp_path / "run")]
    assert windows == [3, 2, 1, 0]
    for folder in checkpoints(tmp_path / "run")[1:]:
        shutil.rmtree(folder)
    train(data, tmp_path / "run", "--log_steps", 4, "--resume")
    assert rows(tmp_path / "run") == rows(whole) and len(rows(whole)) == 3
    assert micro.differences(tmp_path / "run", whole) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_all_files_of_a_checkpoint_follow_the_umask(data, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        train(data, tmp_path / "run", "--train_text_encoder", "--max_steps", 1, "--val_steps", 0)
    finally:
        os.umask(before)
    files = [p for p in checkpoints(tmp_path / "run")[0].rglob("*") if p.is_file()]
    assert {"text_encoder", "text_encoder_ema"} < {p.parent.name for p in files}
    assert {p.stat().st_mode & 0o777 for p in files} == {mode}


def test_a_file_system_that_syncs_no_folders_is_enough(tmp_path, monkeypatch):
    def fsync(fd):
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(22, "Invalid argument")
        raise OSError(5, "Input/output error")

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(os, "fsync", fsync)
    sd.files.fsync(tmp_path)
    with pytest.raises(OSError, match="Input/output error"):
        sd.files.fsync(tmp_path / "file")


# --- which folder is a checkpoint


def test_only_step_and_eight_digits_name_a_checkpoint(data, half, whole):
    """Case 61: a safety copy, an unfinished folder, a number in other words, a copy under another step."""
    newest, folder = checkpoints(half)[-1], half / "checkpoints"
    strangers = ["step_good.bak", "step_2000.tmp", "step_00001002_2", "step_000012", "step_000000012", "step_٠٠٠٠٠٠٠٩"]
    for name in strangers:
        shutil.copytree(newest, folder / name)
    (folder / "step_good.tmp").mkdir()
    shutil.copytree(newest, folder / "step_00000009")
    (folder / "step_00000008").write_text("a file")
    assert [p.name for p in sd.weights.read.checkpoint_folders(half)][-2:] == ["step_00000006", "step_00000003"]
    assert sd.weights.read.newest_checkpoint(half).name in ("step_00000009", "step_00000006")
    assert sd.checkpoints.find_checkpoint(half, "latest", lambda s: None) == newest
    text = train(data, half, "--log_steps", 4, "--resume")
    assert "skipping checkpoint step_00000009: its state.json is of step 6: a copy under another name" in text
    assert "from step 6" in text and "Traceback" not in text
    assert {name for name in [*strangers, "step_good.tmp"] if not (folder / name).is_dir()} == set()
    assert micro.differences(half, whole) == []


def test_painter_and_trainers_go_by_one_rule(half, tmp_path):
    newest = checkpoints(half)[-1]
    for name in ("step_99999999_2", "step_123456789", "step_1"):
        shutil.copytree(newest, half / "checkpoints" / name)
    assert sd.weights.read.newest_checkpoint(half) == newest == sd.checkpoints.find_checkpoint(half, "latest")
    vae = SD_Model.VAE(SD_Model.PRESETS["micro"]["vae"])
    for step in (2, 4):
        SD_TrainVAE.save_checkpoint(tmp_path, SD_TrainVAE.Trained(vae, vae, [], step), {"lr": 1})
    four = tmp_path / "checkpoints/step_00000004"
    for name in ("step_00000008_1", "step_9", "step_00000007"):
        shutil.copytree(four, tmp_path / "checkpoints" / name)
    find = sd.checkpoints.find_checkpoint
    assert find(tmp_path, "latest", lambda s: None, SD_TrainVAE.checkpoint_problem) == four
    assert SD_TrainVAE.checkpoint_problem(newest) == "its manifest lacks vae.safetensors"
    SD_TrainVAE.save_checkpoint(tmp_path, SD_TrainVAE.Trained(vae, vae, [], 10), {"lr": 1})
    names = {p.name for p in (tmp_path / "checkpoints").iterdir()}
    # two are kept, and no stranger is removed
    assert names == {"step_00000008_1", "step_9", "step_00000007", "step_00000010"}


# --- what decides a run


def damage(path: Path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("name", ["00001.npy", "00001.parquet"])
@pytest.mark.parametrize("how", [damage, Path.unlink])
def test_latents_that_cannot_be_read_any_more_are_refused_by_name(own, half, whole, name, how):
    """Case 62: on resume they would change the order of all pictures."""
    path = own / "things/latents" / name
    kept = path.read_bytes()
    how(path)
    message = refused(own, half, "--log_steps", 4, "--resume")
    if (how, name[-3:]) != (Path.unlink, "uet"):
        assert str(path) in message and "was read when the run began" in message and "--init_from" in message
    else:  # without its index, only the count tells
        assert "tells of 50 latents" in message
    path.write_bytes(kept)
    train(own, half, "--log_steps", 4, "--resume")
    assert micro.differences(half, whole, settings=False) == []


def test_latents_that_could_not_be_read_at_first_stay_out(own, tmp_path):
    path = own / "things/latents/00001.npy"
    kept = path.read_bytes()
    damage(path)
    assert "1 unreadable" in train(own, tmp_path / "run", "--stop_at", 3)
    assert json.loads((checkpoints(tmp_path / "run")[-1] / "state.json").read_text())["inputs"][
        "unreadable latent files"
    ] == [["00001.npy"]]
    path.write_bytes(kept)
    assert f"{path} could not be read when the run began" in refused(own, tmp_path / "run", "--resume")
    damage(path)
    assert "done: 12 steps" in train(own, tmp_path / "run", "--resume")


def test_single_latent_files_are_named_too(own):
    folder = own / "things/latents"
    for path in sorted(folder.glob("*.parquet")):
        array, table = np.load(path.with_suffix(".npy")), pq.read_table(path)
        for key, row in zip(table["image_key"].to_pylist(), table["row"].to_pylist()):
            (folder / key.removeprefix("things/")).parent.mkdir(exist_ok=True)
            np.save(folder / f"{key.removeprefix('things/')}.npy", array[row])
        path.unlink(), path.with_suffix(".npy").unlink()
    before = sd.data.LatentStore(folder, pretouch=False)
    damage(folder / "00000/000000030.npy")
    after = sd.data.LatentStore(folder, pretouch=False)
    assert (before.left_out, after.left_out) == ([], ["00000/000000030.npy"]) and before.found != after.found


def reversed_captions(root: Path, _):
    shutil.rmtree(root / "things/dataset/train")
    keys = [f"things/00000/{i:09d}" for i in range(8, 50)][::-1]
    micro.write_dataset(root / "x", micro.make_tokenizer(), {"train": keys})
    shutil.move(root / "x/train", root / "things/dataset/train")


def other_latents(root: Path, _):
    path = root / "things/latents/00002.npy"
    np.save(path, np.load(path) * np.float16(1.5))


def other_encoder(root: Path, monkeypatch):
    torch.manual_seed(9)
    SD_Model.TextEncoder.new(SD_Model.PRESETS["micro"]["text"], micro.make_tokenizer()).save(root / "text_encoder")


def other_drawing(root: Path, monkeypatch):
    rebind(sd.data, "DRAWING", sd.data.DRAWING + 1, monkeypatch.setattr)


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        (reversed_captions, "the training pictures or their captions"),
        (other_latents, "things/latents are others"),
        (other_encoder, "the text encoder has other weights"),
        (other_drawing, "draws random numbers otherwise"),
    ],
)
def test_other_inputs_are_refused_at_resume(change, mentions, own, half, whole, monkeypatch):
    """Case 63 and its siblings: what the manifests do not tell."""
    change(own, monkeypatch)
    message = refused(own, half, "--log_steps", 4, "--resume")
    assert mentions in message and "--init_from" in message


def test_inputs_may_move(data, own, half, whole):
    train(own, half, "--log_steps", 4, "--resume")  # another data_root and text encoder folder, of the same contents
    assert micro.differences(half, whole, settings=False) == []


def test_a_trained_text_encoder_is_the_checkpoints(own, tmp_path):
    train(own, tmp_path / "run", "--train_text_encoder", "--stop_at", 3)
    other_encoder(own, None)
    assert "done: 12 steps" in train(own, tmp_path / "run", "--train_text_encoder", "--resume")


def test_checkpoints_of_older_revisions_go_on_with_a_note(data, half, whole):
    """They have no hashes of inputs, and may be of a seed that is refused now."""
    edit_state(checkpoints(half)[-1], inputs=None)
    text = train(data, half, "--log_steps", 4, "--resume")
    assert "of an older revision and does not know the run's drawing, tokenizer, pictures" in text
    assert micro.differences(half, whole) == []


def test_two_folders_of_one_name_are_told_apart(own, tmp_path):
    """Case 65: --dataset a/x --latents b/x."""
    for kind in ("dataset", "latents"):
        (tmp_path / kind).mkdir()
        shutil.move(own / "things" / kind, tmp_path / kind / "x")
    more = ("--dataset", tmp_path / "dataset/x", "--latents", tmp_path / "latents/x")
    train(own, tmp_path / "run", *more, "--stop_at", 3)
    saved = json.loads((checkpoints(tmp_path / "run")[-1] / "state.json").read_text())["data"]
    manifests = {kind: tmp_path / kind / "x/manifest.json" for kind in ("dataset", "latents")}
    assert saved == {kind: sd.files.sha256(path) for kind, path in manifests.items()}
    # as the older revision wrote it: the latents' hash alone, under the name that both have
    edit_state(checkpoints(tmp_path / "run")[-1], data={"x": saved["latents"]})
    assert "does not know the run's dataset's manifest" in train(
        own, tmp_path / "run", *more, "--resume", "--stop_at", 6
    )
    for kind, path in manifests.items():
        kept = path.read_text()
        path.write_text(json.dumps(json.loads(kept) | {"note": "made anew"}))
        assert f"the data changed since the checkpoint ({kind})" in refused(own, tmp_path / "run", *more, "--resume")
        path.write_text(kept)


def two_ranks(data, tmp_path, first, second, hook=None) -> str:
    """What two processes print that are started with these flags and end with status 2."""
    output, port = tmp_path / "out.txt", micro.free_port()
    ranks = dict(WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    pids = [start(flags(data, tmp_path / "run", "--batch", 2, *more), output, hook and (lambda r=r: hook(r)), limit=30,
                  RANK=r, LOCAL_RANK=r, **ranks) for r, more in enumerate((first, second))]  # fmt: skip
    assert [status_of(p) for p in pids] == [2, 2], output.read_text()
    assert not (tmp_path / "run").exists()
    return output.read_text()


def test_ranks_agree_on_flags_and_inputs(data, whole, tmp_path):
    """Case 64."""
    assert "disagree on flags;" in two_ranks(data, tmp_path, ("--stop_at", 4), ("--stop_at", 6))
    assert "disagree on flags;" in two_ranks(data, tmp_path, (), ("--init_from", whole))

    def changed(name):
        """A hook: what `name` gives, where training calls it, has other weights on each rank."""

        def hook(rank):
            owner = SD_Train if hasattr(SD_Train, name) else sd.setup
            real = getattr(owner, name)

            def make(*args):
                module = real(*args)
                with torch.no_grad():
                    next(module.parameters()).add_(rank)
                return module

            setattr(owner, name, make)

        return hook

    assert "disagree on the text encoder;" in two_ranks(data, tmp_path, (), (), changed("load_text_encoder"))
    assert "disagree on the weights to start from;" in two_ranks(data, tmp_path, (), (), changed("UNet"))


# --- sources without held-out pictures


@pytest.mark.parametrize("mixture", ["things,bare", "bare,things"])
def test_a_source_without_held_out_pictures_beside_another(data, tmp_path, mixture):
    """Case 60."""
    text = train(data, tmp_path / "run", "--data", mixture, "--max_steps", 4)
    assert "no held-out pictures in bare; validation is on those of things" in text and "8 held-out" in text
    assert {r["split"] for r in rows(tmp_path / "run", "validation.jsonl")} == {"val", "train"}


def test_a_source_without_held_out_pictures_alone(data, tmp_path):
    text = train(data, tmp_path / "run", "--data", "bare", "--max_steps", 4)
    assert "no held-out pictures in bare; validation is on training pictures alone" in text
    assert {r["split"] for r in rows(tmp_path / "run", "validation.jsonl")} == {"train"}


def test_a_split_without_any_file_is_empty(own):
    (own / "bare/dataset/val/state.json").write_text(json.dumps({"_data_files": []}))
    sources = [sd.data.Source(n, None, None, own / n / "dataset", own / n / "latents") for n in ("bare", "things")]
    split = sd.data.Split(sources, [sd.data.LatentStore(s.latents, False) for s in sources], "val", 1.0)
    assert split.sizes == [0, 8] and split.ids.shape == (8, micro.LENGTH)


# --- the environment


@pytest.fixture
def clean(monkeypatch):
    for name in [n for n in os.environ if n.startswith(("SLURM_", "MASTER_", "WANDB_")) or "RANK" in n]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return monkeypatch


MEETING = {"MASTER_ADDR": "a", "MASTER_PORT": "1"}
SRUN = {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (0, 1, 0)),
        (MEETING, (0, 1, 0)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, 0)),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"} | MEETING, (1, 2, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"} | MEETING | SRUN, (3, 4, 0)),
        ({"RANK": "3", "WORLD_SIZE": "4"} | MEETING | SRUN, (3, 4, 1)),
        (MEETING | SRUN, (3, 4, 1)),
        (SRUN, (0, 1, 0)),
    ],
)
def test_ranks_come_from_torchrun_or_slurm(environment, expected):
    assert sd.device.find_ranks(environment) == expected


@pytest.mark.parametrize(
    ("environment", "mentions"),
    [
        ({"RANK": "1"}, "says RANK=1 and lacks WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "lacks LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "unset WORLD_SIZE"),
        ({"LOCAL_RANK": "1"}, "unset LOCAL_RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | MEETING, "from 0 to below WORLD_SIZE"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"} | MEETING, "from 0 to below WORLD_SIZE"),
        ({"RANK": "one"}, "whole numbers"),
    ],
)
def test_what_is_left_over_in_the_environment_is_refused(environment, mentions, data, tmp_path, clean):
    """Case 47."""
    for name, value in environment.items():
        clean.setenv(name, value)
    assert mentions in refused(data, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_key_of_wandb_is_found_where_nothing_can_be_read(tmp_path, clean):
    """Case 46. A home that is a file, one without access, none at all; a .netrc that is no UTF-8."""
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / "nowhere"):
        clean.setenv("HOME", str(home))
        assert sd.log.wandb_mode("auto") == "offline"
    clean.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_bytes(b"\xff\xfe machine x")
    assert sd.log.wandb_mode("auto") == "offline"
    (tmp_path / ".netrc").write_bytes(b"machine api.wandb.ai\n password \xff\n")
    assert sd.log.wandb_mode("auto") == "online"
    clean.setenv("WANDB_MODE", "disabled")
    with clean.context() as m:
        m.setattr(Path, "home", None)  # is not even asked
        assert (sd.log.wandb_mode("auto"), sd.log.wandb_mode("offline")) == ("disabled", "offline")
    clean.delenv("WANDB_MODE")
    for error in (PermissionError(13, "Permission denied"), RuntimeError("no home directory")):

        def home(error=error):
            raise error

        clean.setattr(Path, "home", home)
        assert sd.log.wandb_mode("auto") == "offline"


@pytest.mark.parametrize("code", [
    "raise SystemExit(3)",
    "syntax error",
    "Settings = dict\ndef init(**k): raise SystemExit",
    "Settings = dict\nclass Run:\n def log(*a, **k): raise SystemExit\n finish = log\ndef init(**_): return Run()",
])  # fmt: skip
def test_wandb_that_ends_the_program_does_not(code, tmp_path, monkeypatch, capsys):
    (tmp_path / "wandb.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    log = sd.log.Log(tmp_path, {"wandb": "offline"}, 0)
    log.write("log.jsonl", {"step": 1, "loss": 0.5})
    log.close()
    assert strict_rows(tmp_path / "log.jsonl") == [{"step": 1, "loss": 0.5}]
    assert capsys.readouterr().err.count("wandb is off") == 1
    sys.modules.pop("wandb", None)


# --- seeds and other numbers


def vae_flags(*more) -> list[str]:
    return ["--images", "x", "--out", "y", *map(str, more)]


@pytest.mark.parametrize("seed", [2**32, 2**32 + 5, 2**64, -1])
def test_seeds_outside_32_bits_are_refused(seed):
    """Case 48."""
    for parse in (
        lambda: SD_Train.resolve(SD_Train.parse_args(["--phase", "demo", "--seed", str(seed)]), None),
        lambda: SD_TrainVAE.parse_args(vae_flags("--seed", seed)),
    ):
        with pytest.raises(InputError, match=f"--seed wants a whole number from 0 to 4,294,967,295, found {seed}$"):
            parse()


def test_the_largest_seed_is_one_of_its_own():
    args = SD_Train.parse_args(["--phase", "demo", "--seed", str(2**32 - 1)])
    assert SD_Train.resolve(args, None)["seed"] == 2**32 - 1
    assert SD_TrainVAE.parse_args(vae_flags("--seed", 2**32 - 1)).seed == 2**32 - 1
    draws = [sd.data.generator(seed, 0, 7).random() for seed in (0, 1, 2**31, 2**32 - 1)]
    assert len(set(draws)) == 4


@pytest.mark.parametrize("flag", [
    "--lr inf", "--epochs inf", "--epochs nan", "--batch 0", "--gamma inf", "--text_lr nan", "--sample_cfg nan",
    "--sample_cfg inf", "--latent_fraction 0", "--latent_fraction nan", "--ema inf", "--beta1 nan", "--drop -0.1",
    "--warmup -1", "--decay inf", "--epochs 2e300",
])  # fmt: skip
def test_numbers_that_are_none_are_refused(flag):
    """Case 69."""
    name, value = flag.split()
    with pytest.raises(InputError, match=f"^{name} wants a .*number.*found {re.escape(value[:1])}"):
        SD_Train.resolve(SD_Train.parse_args(["--phase", "demo", name, value]), None)


@pytest.mark.parametrize("flag", [
    "--lr inf", "--muon_lr nan", "--grad_clip 0", "--weight_decay inf", "--kl_weight nan", "--ema 1.5",
    "--held_out_share -1", "--ram_gib inf", "--warmup -1",
])  # fmt: skip
def test_numbers_that_are_none_are_refused_for_the_vae(flag):
    name, value = flag.split()
    with pytest.raises(InputError, match=f"^{name} wants a .*number.*found {value}"):
        SD_TrainVAE.parse_args(vae_flags(name, value))


# --- ends


def test_an_end_that_lies_behind_is_refused(data, half, whole):
    """Case 49."""
    before = (half / "config.json").read_bytes()
    message = refused(data, half, "--resume", "--log_steps", 4, "--max_steps", 5)
    assert "stands at step 6, and is to end at step 5" in message and "--max_steps" in message
    assert "--stop_at" in refused(data, half, "--resume", "--log_steps", 4, "--stop_at", 5)
    assert (half / "config.json").read_bytes() == before
    text = train(data, half, "--resume", "--log_steps", 4, "--stop_at", 6)
    assert "nothing is left to do: the run stands at step 6 already" in text and "stopped after step 6 of 12" in text
    train(data, half, "--resume", "--log_steps", 4)
    assert micro.differences(half, whole) == []
    assert "nothing is left to do" in train(data, half, "--resume", "--log_steps", 4)


def test_epochs_at_resume_take_the_place_of_max_steps(data, half):
    """Case 67: 1.5 epochs of 42 pictures are 15 steps of 4."""
    text = train(data, half, "--without", "max_steps", "--resume", "--epochs", 1.5)
    assert "done: 15 steps" in text and rows(half)[-1]["step"] == 15
    assert json.loads((checkpoints(half)[-1] / "state.json").read_text())["settings"]["max_steps"] is None
    assert "done: 15 steps" in train(data, half, "--without", "max_steps", "--resume")
    assert "done: 16 steps" in train(data, half, "--resume", "--max_steps", 16)
    assert "give one of them" in refused(data, half, "--resume", "--epochs", 2)
    too_long = refused(data, half, "--without", "max_steps", "--resume", "--epochs", 1e9)
    assert "at most 99,999,999 steps" in too_long


# --- logs


DAMAGED = [b'{"step": 3, "loss": 0.1\xff}', b"null", b"5", b"[1]", b'{"step": "x"}', b'{"loss": 1}', b"{", b"",
           b'{"step": true}', b"[" * 5000]  # fmt: skip


def test_damaged_lines_of_a_log_are_left_out_and_counted(data, half, whole):
    """Case 66."""
    for name in ("log.jsonl", "validation.jsonl"):
        lines = (half / name).read_bytes().splitlines()
        (half / name).write_bytes(b"\n".join([*DAMAGED[:5], *lines, *DAMAGED[5:], b'{"step": 4, "lo']))
    text = train(data, half, "--log_steps", 4, "--resume")
    assert text.count("10 lines are damaged in") == 2 and text.count("warning") == 2
    assert micro.differences(half, whole) == []


def test_curves_of_a_damaged_log(half):
    (half / "log.jsonl").write_bytes(
        b"\n".join([*DAMAGED, b'{"step": 1, "loss": null}', b'{"step": 2, "lr": "x"}', b""])
    )
    (half / "validation.jsonl").write_text('{"step": 1}\n{"step": 2, "split": "val", "weights": "ema", "loss": NaN}\n')
    sd.log.plot_run(half)
    assert (half / "curves.png").stat().st_size > 1000
    assert [r["step"] for r in sd.log.read_rows(half / "log.jsonl")] == [1, 2]


def test_a_log_that_cannot_be_read_stops_nothing(data, half, capsys):
    (half / "log.jsonl").unlink()
    (half / "log.jsonl").mkdir()
    text = train(data, half, "--log_steps", 4, "--resume")
    assert "cannot be read or cut" in text and "cannot be written" in text and "done: 12 steps" in text


# --- NaN


def test_nan_in_a_held_out_latent_is_left_out_by_name(own, whole, tmp_path):
    path = own / "things/latents/00000.npy"
    array = np.load(path)
    array[2, 1, 3, 3] = np.nan
    np.save(path, array)
    text = train(own, tmp_path / "run", "--log_steps", 4)
    assert text.count("the latent of things/00000/000000002 is not finite") == 1
    found = strict_rows(tmp_path / "run/validation.jsonl")
    assert len(found) == len(rows(whole, "validation.jsonl")) == 12
    assert all(math.isfinite(row["loss"]) for row in found)
    # training is as without it, and so is the validation on training pictures
    before = rows(whole, "validation.jsonl")
    assert [r for r in found if r["split"] == "train"] == [r for r in before if r["split"] == "train"]
    assert [r for r in found if r["split"] == "val"] != [r for r in before if r["split"] == "val"]


def test_a_split_of_nan_is_not_validated_on():
    class Nothing:
        keys = ["a", "b"]
        ids, shape, moments = np.zeros((2, 3), np.uint16), np.zeros(2, int), False

        def __len__(self):
            return 2

        def latents(self, index):
            return np.full((len(index), 4, 2, 2), np.inf, np.float32)

    split, said = Nothing(), []
    split.keys = pa.chunked_array([["a", "b"]])
    settings = {"val_images": 8, "seed": 0, "val_steps": 1}
    assert sd.setup.fixed_batches(split, split, settings, 1000, said.append) == {}
    assert sum("latent of a is" in line for line in said) == 2


def test_a_line_of_skipped_steps_has_no_loss(data, tmp_path, monkeypatch):
    real = sd.data.make_batch

    def make_batch(split, order, positions, *args):
        batch = real(split, order, positions, *args)
        if 4 <= int(positions[0]) // 4 < 8:  # steps 5 to 8
            batch.latents[0, 0, 0, 0] = math.nan
        return batch

    rebind(sd.data, "make_batch", make_batch, monkeypatch.setattr)
    train(data, tmp_path / "run", "--log_steps", 4)
    one, two, three = strict_rows(tmp_path / "run/log.jsonl")
    assert (two["loss"], two["grad_norm"], two["skipped"], set(two["bins"])) == (None, None, 4, {None})
    assert one["loss"] > 0 and three["loss"] > 0 and (one["skipped"], three["skipped"]) == (0, 0)


def test_logs_are_always_json(tmp_path):
    log = sd.log.Log(tmp_path, {"wandb": "disabled"}, 0)
    log.write("validation.jsonl", {"step": 1, "loss": math.nan, "bins": [0.5, math.inf, None]})
    SD_TrainVAE.append_json(tmp_path / "validation.jsonl", {"step": 2, "psnr": -math.inf})
    expected = [{"step": 1, "loss": None, "bins": [0.5, None, None]}, {"step": 2, "psnr": None}]
    assert strict_rows(tmp_path / "validation.jsonl") == expected


def test_nan_of_the_unet_is_not_blamed_on_the_vae():
    vae = SD_Model.VAE(SD_Model.PRESETS["micro"]["vae"])
    latents = torch.zeros(1, 4, 8, 8)
    with pytest.raises(InputError, match="^the UNet gave latents that are not finite"):
        sd.painting.decode_latents(vae, latents * math.nan, 1, torch.device("cpu"))
    with torch.no_grad():
        vae.decoder.conv_out.bias.fill_(math.nan)
    with pytest.raises(InputError, match="^the VAE gave non-finite pictures"):
        sd.painting.decode_latents(vae, latents, 1, torch.device("cpu"))


# --- zero terminal SNR


def objective(*more) -> tuple[SD_Model.NoiseSchedule, dict]:
    settings = SD_Train.resolve(SD_Train.parse_args(["--phase", "demo", *more]), None)
    names = dict(prediction=settings["prediction"], zero_terminal_snr=settings["zero_terminal_snr"])
    return SD_Model.NoiseSchedule(settings["betas"], **names), settings


ZERO = ("--prediction", "v", "--zero_terminal_snr")


def test_zero_terminal_snr_keeps_weight_at_the_end():
    """Case 70. (min(SNR, 5) + 1)/(SNR + 1) on v's error: 1 wherever SNR <= 5."""
    schedule, settings = objective(*ZERO)
    assert settings["weighting"] == "min_snr_plus_1"
    t = torch.arange(1000)
    weights, snr = sd.objective.loss_weight(t, schedule, settings), schedule.snr(t)
    assert snr[-1] == 0 and torch.equal(weights[snr <= 5], torch.ones_like(weights[snr <= 5]))
    assert torch.allclose(weights[snr > 5], 6 / (snr[snr > 5] + 1)) and weights[-50:].sum() / weights.sum() > 0.05
    assert objective("--prediction", "v")[1]["weighting"] == objective()[1]["weighting"] == "min_snr"
    assert objective(*ZERO, "--weighting", "min_snr")[1]["weighting"] == "min_snr"
    assert sd.objective.loss_weight(t, schedule, settings | {"gamma": 0}) == 1
    # the same objective in both parametrisations, where both exist: v's error is 1 + 1/SNR times epsilon's
    epsilon, v = (SD_Model.NoiseSchedule(prediction=p) for p in ("epsilon", "v"))
    a, b = (sd.objective.loss_weight(t, s, settings) for s in (epsilon, v))
    assert torch.allclose(a * epsilon.snr(t), b * (v.snr(t) + 1), rtol=1e-4)


def test_runs_begun_with_another_weighting_keep_it():
    saved = objective(*ZERO)[1] | {"weighting": "min_snr", "seed": 2**32 + 1}
    args = SD_Train.parse_args(["--phase", "demo", "--resume"])
    resumed = SD_Train.resolve(args, saved)
    assert (resumed["weighting"], resumed["seed"]) == ("min_snr", 2**32 + 1)


def test_the_plan_says_the_weights(data, tmp_path):
    text = train(data, tmp_path / "run", *ZERO, "--dry_run")
    assert '"weighting": "min_snr_plus_1"' in text
    assert "(min_snr_plus_1, gamma 5): 0.0051 at 0, 1 at 500, 1 at 999; the last 50 timesteps have 5." in text
    assert "warning" not in text
    text = train(data, tmp_path / "run", *ZERO, "--weighting", "min_snr", "--dry_run")
    assert "0 at 999" in text and "gives the last timestep no weight" in text


class Toy(nn.Module):
    """v of one number, from the noisy number and its timestep."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(65, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, x, t, _):
        inputs = torch.cat([x.flatten(1), SD_Model.timestep_embedding(t, 64)], dim=1)
        return self.layers(inputs)[:, :, None, None]


def errors_at_the_end(*more) -> tuple[float, float]:
    """v's squared error at the last timestep after a short training on numbers of mean 1 and deviation 0.5; and that
    of predicting zero."""
    schedule, settings = objective(*ZERO, *more)
    torch.manual_seed(0)
    net, g = Toy(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)

    def batch(n, t=None):
        x0 = 1 + 0.5 * torch.randn(n, 1, 1, 1, generator=g)
        t = torch.randint(1000, (n,), generator=g) if t is None else torch.full((n,), t)
        return sd.data.Batch(x0, torch.randn(x0.shape, generator=g), t, torch.zeros(n, 1))

    for _ in range(300):
        optimizer.zero_grad()
        sd.objective.backward(net, batch(128), None, schedule, settings, 1.0)
        optimizer.step()
    last = batch(4096, 999)
    with torch.no_grad():
        error = sd.objective.sample_losses(net, last, None, schedule).mean()
        zero = sd.objective.sample_losses(lambda x, t, _: torch.zeros_like(x), last, None, schedule).mean()
    return float(error), float(zero)


def test_what_is_painted_from_pure_noise_is_learned():
    """At the last timestep v is -x_0, and the best guess is its mean: an error of 0.25, where zero has 1.25."""
    error, zero = errors_at_the_end()
    assert zero == pytest.approx(1.25, rel=0.05)
    assert error < 0.4
    without = errors_at_the_end("--weighting", "min_snr")[0]
    print(f"v's error at the last timestep: {error:.3f}, with min_snr {without:.3f}, of zero {zero:.3f}")
    assert without > 1.1 * error


# ----------------------------------------------------------------------------------------------------------------
# Found by tests/test_fuzz.py
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["unet.safetensors", "unet_ema.safetensors", "optimizer.pt"])
def test_a_checkpoint_file_that_its_checksum_does_not_betray(name, data, half):
    """Written so, or edited together with the manifest."""
    newest = checkpoints(half)[-1]
    (newest / name).write_bytes(b"\x08")
    edit_state(newest)
    manifest = json.loads((newest / "manifest.json").read_text()) | {name: sd.files.sha256(newest / name)}
    (newest / "manifest.json").write_text(json.dumps(manifest))
    assert f"cannot read {newest / name}" in (said := refused(data, half, "--resume")) and "older checkpoint" in said


@pytest.mark.parametrize("change", [{"settings": "x"}, {"step": [6]}, {"lineage": {}}, {"data": 1}])
def test_a_state_of_another_kind_is_no_checkpoint(change, data, half):
    edit_state(checkpoints(half)[-1], **change)
    assert f"another kind of value for {next(iter(change))}" in train(data, half, "--resume", "--stop_at", 4)


@pytest.mark.parametrize("content", ["[[]]", "null", '{"_data_files": [1]}', '{"_data_files": [{"filename": 5}]}'])
def test_a_split_whose_state_is_of_another_kind(content, own, tmp_path):
    (own / "things/dataset/train/state.json").write_text(content)
    assert "run data_pipeline/05 again" in refused(own, tmp_path / "run")


@pytest.mark.parametrize(
    ("column", "values"),
    [("input_ids", [1.5]), ("input_ids", [["x"]]), ("caption", [None]), ("image_key", [None]), ("image_key", [5])],
)
def test_a_split_with_columns_of_another_kind(column, values, own, tmp_path):
    file = own / "things/dataset/train/data.arrow"
    table = pa.ipc.open_stream(file.read_bytes()).read_all()
    at = table.column_names.index(column)
    kind = table[column].type if values == [None] else None
    table = table.set_column(at, column, pa.array(values * len(table), kind))
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    assert "run data_pipeline/05 again" in refused(own, tmp_path / "run")


@pytest.mark.parametrize("values", [[None], [-1], [1e9], ["x"]])
def test_an_index_whose_rows_are_none_is_left_out(values, own, tmp_path):
    file = sorted((own / "things/latents").glob("*.parquet"))[1]
    table = pq.read_table(file)
    kind = pa.int32() if values == [None] else None
    pq.write_table(table.set_column(1, "row", pa.array(values * len(table), kind)), file)
    assert "unreadable" in train(own, tmp_path / "run", "--max_steps", 1)


def test_a_latents_file_whose_header_does_not_end_is_left_out(own, tmp_path):
    file = sorted((own / "things/latents").glob("*.npy"))[0]
    file.write_bytes(file.read_bytes().replace(b"}", b"(", 1))  # Python's tokenizer fails on it, with its own error
    assert "unreadable" in train(own, tmp_path / "run", "--max_steps", 1)
