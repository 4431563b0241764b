"""How long a run is (--minutes), what its network is (--unet), and how much of its time it waits for data."""

import json
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro
from test_train import train

import sd.data
import sd.log
import sd.plan
from sd.errors import InputError
from sd.networks import read_overrides, unet_config
from SD_Model import PRESETS, UNetConfig
from SD_Model import InputError as NetworkError

MINUTES = 0.05  # three seconds
CLOCKED = ("--without", "max_steps", "--minutes", MINUTES, "--save_steps", 100_000)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return micro.make_data(tmp_path_factory.mktemp("course") / "data", {"things": 42})


def state(out: Path) -> dict:
    return json.loads((micro.checkpoints(out)[-1] / "state.json").read_text())


def log(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_a_run_of_minutes_ends_by_the_clock_and_its_learning_rate_falls_with_it(data, tmp_path):
    text = train(data, tmp_path / "run", *CLOCKED, "--val_steps", 100_000)
    saved, lines = state(tmp_path / "run"), log(tmp_path / "run")
    assert 3.0 <= saved["seconds"] < 4.5
    assert f"done: {saved['step']:,} steps" in text and saved["step"] > 20
    rates = [row["lr"] for row in lines]
    assert max(rates) > 0.9e-3 and rates[-1] < 0.05e-3  # the peak behind the warm-up, and nearly 1 % at the end
    assert rates[2:] == sorted(rates[2:], reverse=True)
    validated = [json.loads(line) for line in (tmp_path / "run/validation.jsonl").read_text().splitlines()]
    assert {row["step"] for row in validated} == {saved["step"]}  # the end has its validation, whatever its step


def test_a_run_of_minutes_goes_on_with_the_time_that_is_left(data, tmp_path):
    out = tmp_path / "run"
    train(data, out, *CLOCKED, "--stop_at", 4)
    first = state(out)
    assert first["step"] == 4 and 0 < first["seconds"] < 3
    train(data, out, *CLOCKED, "--resume")
    second = state(out)
    assert second["step"] > 4 and 3.0 <= second["seconds"] < 4.5
    assert log(out)[4]["lr"] > log(out)[-1]["lr"]
    text = train(data, out, *CLOCKED, "--resume")
    assert "nothing is left to do: the run has had its 0.05 minutes already" in text
    assert state(out)["step"] == second["step"]
    train(
        data, out, "--without", "max_steps", "--resume", "--max_steps", second["step"] + 2
    )  # steps instead, from here
    assert state(out)["step"] == second["step"] + 2 and "seconds" not in state(out)


def test_two_processes_of_a_run_of_minutes_agree(data, tmp_path):
    """Each has a clock of its own; learning rates that differ would be weights that differ, and an end that differs
    would hang."""
    train(data, tmp_path / "run", *CLOCKED, "--batch", 2, world=2)
    assert 3.0 <= state(tmp_path / "run")["seconds"] < 5


def test_the_first_process_tells_the_time():
    plan = sd.plan.Plan(None, 4, sd.plan.MAX_STEPS, 0, sd.plan.MAX_STEPS)
    settings = {"minutes": 1, "lr": 1.0, "warmup": 0, "lr_schedule": "linear"}
    course = sd.plan.Course(plan, settings, 20.0)
    assert 20 <= course.now() < 21
    course.seconds = 30.0  # what all were told
    assert course.lr(7) == pytest.approx(0.505) and not course.over(7)
    course.seconds = 60.0
    assert course.lr(8) == pytest.approx(0.01) and course.over(8)


@pytest.mark.parametrize("more", [("--minutes", 1), ("--epochs", 2, "--minutes", 1, "--without", "max_steps")])
def test_two_ends_are_refused(data, tmp_path, more):
    assert "both say how long to train" in train(data, tmp_path / "run", *more, expect=2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("minutes", [0, -1, "nan"])
def test_minutes_want_a_positive_number(data, tmp_path, minutes):
    more = "--without", "max_steps", "--minutes", minutes
    assert "--minutes wants a positive number" in train(data, tmp_path / "run", *more, expect=2)


def test_dry_run_of_minutes(data, tmp_path):
    text = train(data, tmp_path / "run", *CLOCKED, "--dry_run")
    assert "0.05 minutes of steps of 4 images of 42" in text and "how many steps that makes is not known" in text
    assert not (tmp_path / "run").exists()


def test_data_wait_is_the_share_of_time_that_the_loader_took(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(sd.log.time, "perf_counter", lambda: now[0])
    window = sd.log.Window()
    for _ in range(4):
        now[0] += 2.0
        window.waited(0.5)
        window.add([1.0] * 10 + [1.0] * 10, 1.0, False)
    row = window.row(4, 8, 100, 1e-3)
    assert row["data_wait"] == pytest.approx(0.25) and row["images_per_s"] == pytest.approx(4.0)


def test_the_loader_tells_how_long_it_kept_training_waiting():
    class Slow:
        seen = 0

        def map(self, function):
            return self

    def make(position):
        time.sleep(0.2 if position == 0 else 0)
        return Slow()

    loader = sd.data.Prefetcher(make, range(6), torch.device("cpu"))
    loader.next()
    assert 0.1 < loader.waited < 5
    time.sleep(0.3)  # while the next ones are made
    loader.next()
    assert loader.waited < 0.1
    loader.close()


def test_every_line_of_the_log_has_its_data_wait(data, tmp_path):
    train(data, tmp_path / "run", "--val_steps", 0)
    assert all(0 <= row["data_wait"] <= 1 for row in log(tmp_path / "run"))


# ----------------------------------------------------------------------------------------------------------------
# --unet
# ----------------------------------------------------------------------------------------------------------------


def test_overrides_of_each_kind():
    found = read_overrides(["channels=64,128", "attention=false,True", "num_heads=4", "dropout=0.1"])
    assert found == {"channels": [64, 128], "attention": [False, True], "num_heads": 4, "dropout": 0.1}
    config = unet_config({"model": "tiny", "unet": found})
    assert config == UNetConfig(channels=(64, 128), attention=(False, True), num_res_blocks=1, num_heads=4,
                                context_dim=64, norm_groups=8, dropout=0.1)  # fmt: skip
    assert unet_config({"model": "sd15"}) == unet_config({"model": "sd15", "unet": None}) == PRESETS["sd15"]["unet"]


@pytest.mark.parametrize(
    "word, said",
    [
        ("chanels=64,128", "NAME=VALUE of channels"),
        ("channels", "NAME=VALUE of channels"),
        ("channels=64,x", "channels wants int values, one a level"),
        ("num_heads=4,8", "num_heads wants one int"),
        ("num_heads=2.5", "num_heads wants one int"),
        ("attention=maybe,true", "attention wants bool values"),
        ("channels=", "channels wants int values"),
    ],
)
def test_other_words_are_refused(word, said):
    with pytest.raises(InputError, match=said):
        read_overrides([word])


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"channels": [32, 64, 96]}, "one value of attention for each of its 3 channels"),
        ({"channels": [36, 64]}, "norm_groups"),
        ({"num_heads": 5}, "num_heads"),
        ({"num_heads": 0}, "num_heads above 0"),
    ],
)
def test_networks_that_cannot_be_are_refused(changes, said):
    with pytest.raises((InputError, NetworkError), match=said):
        unet_config({"model": "tiny", "unet": changes})


def test_a_run_with_another_network_resumes_and_keeps_it(data, tmp_path):
    out, unet = tmp_path / "run", ("--unet", "channels=16", "num_heads=4")
    train(data, out, *unet, "--stop_at", 3)
    model = json.loads((micro.checkpoints(out)[-1] / "model.json").read_text())
    assert model["unet"]["channels"] == [16] and model["unet"]["num_heads"] == 4
    train(data, out, "--resume")  # without the flag: as it began
    assert state(out)["step"] == 12
    assert "cannot change on --resume" in train(data, out, "--resume", "--unet", "channels=32", expect=2)
    plain = tmp_path / "plain"
    train(data, plain, "--max_steps", 2, *unet, "--init_from", out)
    assert "holds a UNet of" in train(data, tmp_path / "other", "--init_from", out, expect=2)
