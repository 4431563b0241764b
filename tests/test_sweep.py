"""SD_Sweep.py: which trainings a plan means, that each is run once, and what the page says of them.

The trainings here are a script that writes what SD_Train.py would, so that a study takes a second.
"""

import csv
import json
import re
import sys
from pathlib import Path

import pytest

import sd.errors
import SD_Sweep
import SD_Train
from sd.errors import InputError
from sd.sweep import mean_curves, read_plan, result_of, summary, trials

STUB = """
import json, sys, time, signal
from pathlib import Path
words = sys.argv[1:]
get = lambda name, default: float(words[words.index(name) + 1]) if name in words else default
out = Path(words[words.index("--out") + 1])
with open(out / "calls.txt", "a") as f:
    f.write(" ".join(words) + chr(10))
if "--slow" in words:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    (out / "begun").write_text("")
    time.sleep(30)
lr, seed = get("--lr", 1.0), get("--seed", 0)
if lr == 13:
    sys.exit("error: unlucky")
rows = [{"step": s, "images": 4 * s, "split": split, "weights": weights,
         "loss": (s - 10 * lr) ** 2 + seed + (split == "train")}
        for s in (5, 10, 15, 20) for split in ("val", "train") for weights in ("ema", "live")]
(out / "validation.jsonl").write_text("".join(json.dumps(r) + chr(10) for r in rows))
(out / "log.jsonl").write_text(json.dumps({"step": 5, "images_per_s": 100 * lr}) + chr(10) + '{"step": 6, "ima')
"""
MEASURE = """
import json, pathlib, sys
pathlib.Path(sys.argv[1], "figures.json").write_text(json.dumps({"held_out": {"top1": 0.5}}))
"""


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    (tmp_path / "SD_Train.py").write_text(STUB)
    (tmp_path / "measure.py").write_text(MEASURE)
    monkeypatch.setattr(SD_Sweep, "ROOT", tmp_path)
    return tmp_path


def plan_file(root: Path, **plan) -> Path:
    path = root / "plan.json"
    path.write_text(json.dumps({"base": ["--phase", "lora"], **plan}))
    return path


def study(*argv) -> str | None:
    """Run; returns how it ended, None if well."""
    try:
        SD_Sweep.main([str(a) for a in argv])
    except SystemExit as e:
        return str(e.code)


def calls(out: Path) -> dict[str, list[str]]:
    return {p.parent.name: p.read_text().splitlines() for p in out.glob("*/calls.txt")}


def test_a_plan_means_each_choice_with_each_seed(root):
    plan = read_plan(plan_file(
        root, seeds=[0, 1], skip=[{"--lr": "0.001", "--flip": "on"}],
        grid={"--lr": [1e-3, 2e-3], "--flip": [True, False],
              "--optimizer": [{"name": "A", "flags": ["--optimizer", "adamw"]}]},
    ))  # fmt: skip
    found = trials(plan)
    assert [(t.choice["--lr"], t.choice["--flip"], t.seed) for t in found] == [
        (1e-3, False, 0), (2e-3, True, 0), (2e-3, False, 0), (1e-3, False, 1), (2e-3, True, 1), (2e-3, False, 1),
    ]  # seed by seed: a study that is stopped has compared all once  # fmt: skip
    assert found[1].words == ["--phase", "lora", "--lr", "0.002", "--flip", "--optimizer", "adamw", "--seed", "0"]
    assert found[0].words == ["--phase", "lora", "--lr", "0.001", "--optimizer", "adamw", "--seed", "0"]
    assert len({t.name for t in found}) == 6 and found[1].label == "lr 0.002, flip on, optimizer A"


@pytest.mark.parametrize(
    "plan, said",
    [
        ({"gird": {}}, "found 'gird'"),
        ({"base": []}, "wants `base`"),
        ({"grid": {"--lr": []}}, "a flag and a list of its values"),
        ({"grid": {"lr": [1]}}, "a flag and a list of its values"),
        ({"grid": {"--seed": [1, 2]}}, "which a study sets itself"),
        ({"base": ["--out=x"]}, "which a study sets itself"),
        ({"seeds": []}, "whole numbers for seeds"),
        ({"grid": {"--lr": [{"flags": ["--lr", "1"]}]}}, "for a set of flags"),
        ({"seeds": "0"}, "wants a list for seeds"),
    ],
)
def test_plans_that_cannot_be_are_refused(root, plan, said):
    with pytest.raises(InputError, match=said):
        read_plan(plan_file(root, **plan))


def test_a_study_runs_each_training_once_and_tells_what_came_of_it(root):
    out, plan = root / "study", plan_file(
        root, grid={"--lr": [1.0, 1.5]}, seeds=[0, 2], measure=[["measure.py", "{out}"]],
        figures={"top-1": "{out}/figures.json:held_out.top1", "none": "{out}/figures.json:held_out.top9"},
    )  # fmt: skip
    assert study(plan, "--out", out) is None
    assert {name: len(lines) for name, lines in calls(out).items()} == {
        "lr_1-seed_0": 1, "lr_1-seed_2": 1, "lr_1.5-seed_0": 1, "lr_1.5-seed_2": 1,
    }  # fmt: skip
    (out / "lr_1-seed_0" / "study.json").unlink()  # as if it had been stopped
    assert study(plan, "--out", out) is None
    assert {name: len(lines) for name, lines in calls(out).items()}["lr_1-seed_0"] == 2
    assert sum(len(lines) for lines in calls(out).values()) == 5

    rows = json.loads((out / "results.json").read_text())["summary"]
    first, second = rows
    assert first["choice"] == "lr 1" and first["seeds"] == 2 and first["top-1"] == 0.5 and first["none"] is None
    # (s - 10)^2 + seed is lowest at step 10, which is 40 images, with 0 and 2; for lr 1.5 at step 15
    assert first["lowest held-out loss"] == 1.0 and first["lowest held-out loss, deviation"] == pytest.approx(2**0.5)
    assert first["at images"] == 40 and second["at images"] == 60 and first["last held-out loss"] == 101.0
    assert first["images/s"] == 100 and second["images/s"] == 150  # and half a line at the log's end is no matter
    table = list(csv.DictReader((out / "results.csv").read_text().splitlines()))
    assert [float(r["at images"]) for r in table] == [40, 60]
    html = (out / "index.html").read_text()
    assert "lr 1.5" in html and "1 ± 1.4" in html


def test_curves_are_means_over_seeds(root):
    out, plan = root / "study", plan_file(root, grid={"--lr": [1.0]}, seeds=[0, 2])
    study(plan, "--out", out)
    found = read_plan(plan)
    results = [result_of(t, out / t.name, found) for t in trials(found)]
    assert mean_curves(results, {r.trial.name: r.losses for r in results}) == {
        "lr 1": [(20, 26.0), (40, 1.0), (60, 26.0), (80, 101.0)]
    }
    assert summary(results[:1], found)[0]["lowest held-out loss, deviation"] is None  # of one seed nothing is known


def test_a_training_that_fails_is_told_and_the_others_go_on(root, capsys):
    out, plan = root / "study", plan_file(root, grid={"--lr": [13, 1.0]})
    assert "1 of 2 trainings are not finished" in study(plan, "--out", out)
    assert (out / "lr_1-seed_0" / "study.json").exists() and not (out / "lr_13-seed_0" / "study.json").exists()
    assert "unlucky" in (out / "index.html").read_text()
    assert json.loads((out / "results.json").read_text())["summary"][0]["choice"] == "lr 1"


def test_names_of_a_plan_are_filled_in(root):
    out, plan = root / "study", plan_file(root, base=["--phase", "lora", "--pictures", "{pictures}"])
    with pytest.raises(InputError, match="leaves '{pictures}' open"):
        SD_Sweep.main([str(plan), "--out", str(out)])
    with pytest.raises(InputError, match="found 'picture=x'"):
        SD_Sweep.main([str(plan), "--out", str(out), "--set", "picture=x"])
    assert not out.exists()
    assert study(plan, "--out", out, "--set", "pictures=a b") is None
    assert "--pictures a b --seed 0" in next(iter(calls(out).values()))[0]


def test_gpus_share_the_trainings(root, monkeypatch):
    (root / "SD_Train.py").write_text(
        STUB + "(out / 'gpu').write_text(__import__('os').environ['CUDA_VISIBLE_DEVICES'])"
    )
    out, plan = root / "study", plan_file(root, grid={"--lr": [1.0, 2.0, 3.0, 4.0]})
    assert study(plan, "--out", out, "--gpus", "0,3") is None
    assert {p.read_text() for p in out.glob("*/gpu")} == {"0", "3"} and len(list(out.glob("*/gpu"))) == 4
    with pytest.raises(InputError, match="--gpus wants numbers"):
        SD_Sweep.main([str(plan), "--out", str(out), "--gpus", "a"])


def test_a_stop_is_passed_on_and_nothing_counts_as_done(root):
    import signal
    import subprocess
    import time

    out, plan = root / "study", plan_file(root, base=["--slow"], grid={"--lr": [1.0, 2.0]})
    here = str(Path(SD_Sweep.__file__).parent)
    code = f"""if True:
        import pathlib, sys
        sys.path.insert(0, {here!r})
        import SD_Sweep
        SD_Sweep.ROOT = pathlib.Path({str(root)!r})
        SD_Sweep.main([{str(plan)!r}, "--out", {str(out)!r}])
    """
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    begun = out / "lr_1-seed_0" / "begun"
    for _ in range(300):
        if begun.exists():
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and "not finished" in errors
    assert not list(out.glob("*/study.json")) and not (out / "lr_2-seed_0").exists()


def test_dry_run_prints_commands_and_writes_nothing(root, capsys):
    plan = plan_file(root, grid={"--lr": [1.0, 2.0]}, seeds=[0, 1, 2])
    study(plan, "--out", root / "study", "--dry_run")
    printed = capsys.readouterr().out
    assert printed.count("SD_Train.py") == 6 and "6 trainings: 2 choices with 3 seeds" in printed
    assert not (root / "study").exists()


def test_every_plan_that_is_shipped_is_one(capsys):
    for path in sorted((Path(SD_Sweep.__file__).parent / "plans").glob("*.json")):
        plan = read_plan(path)
        assert plan["about"] and len(trials(plan)) >= 2, path
        open_names = set(re.findall(r"\{(\w+)[*}]", json.dumps([plan["base"], plan["grid"], plan["measure"]]))) - {
            "out"
        }
        filled = SD_Sweep.fill_in(plan, [f"{name}=1" for name in open_names])
        for trial in trials(filled):  # words that the program takes
            SD_Train.parse_args(trial.words)
    assert sd.errors.InputError is InputError


def test_the_readme_s_study_is_one_that_can_be_run(capsys):
    readme = (Path(SD_Sweep.__file__).parent / "README.md").read_text()
    (line,) = (line for line in readme.splitlines() if line.startswith("python SD_Sweep.py"))
    SD_Sweep.main([*line.split()[2:], "--dry_run"])
    assert "--lr 1e-4 " in capsys.readouterr().out


def test_numbers_of_a_plan_are_multiplied_and_words_follow(root, capsys):
    plan = plan_file(root, base=["--lr", "{lr*0.3}", "--val_steps", "{val*4}"], grid={"--text_lr": ["{lr}", "{lr*10}"]})
    study(plan, "--out", root / "study", "--dry_run", "--set", "lr=1e-3", "val=12", "--", "--size", "256", "--lr", "5")
    lines = capsys.readouterr().out.splitlines()
    words = (
        "SD_Train.py --lr 0.0003 --val_steps 48 --size 256 --lr 5 --text_lr"  # the last of two counts; grid at the end
    )
    assert f"{words} 1e-3 --seed 0" in lines[0] and f"{words} 0.01 --seed 0" in lines[1] and len(lines) == 3
    for sets, said in ((["lr=1e-3"], "'{val[*]4}' open"), (["lr=x", "val=1"], "--set lr is no number: x"),
                       (["lr=1", "va=1"], "found 'va=1'")):  # fmt: skip
        with pytest.raises(InputError, match=said):
            SD_Sweep.main([str(plan), "--out", str(root / "study"), "--set", *sets])
    with pytest.raises(InputError, match="--seed is what a study sets itself"):
        SD_Sweep.main([str(plan), "--out", str(root / "study"), "--set", "lr=1", "val=1", "--", "--seed", "3"])


def test_choices_are_compared_seed_by_seed(root):
    """The stub's losses differ by 2 between seeds and by 0.25 between rates: seed by seed nothing is left of the 2."""
    out, plan = root / "study", plan_file(root, grid={"--lr": [1.0, 1.05]}, seeds=[0, 2])
    assert study(plan, "--out", out) is None
    best, other = json.loads((out / "results.json").read_text())["summary"]
    assert best["above the best"] == 0 == best["above the best, deviation"]
    assert other["above the best"] == pytest.approx(0.25) and other["above the best, deviation"] == pytest.approx(0)
    assert other["lowest held-out loss, deviation"] == pytest.approx(2**0.5)
    found = read_plan(plan)
    results = [result_of(t, out / t.name, found) for t in trials(found)]
    alone = [r for r in results if (r.trial.choice["--lr"], r.trial.seed) != (1.0, 2)]  # a seed that one choice lacks
    assert [row["above the best"] for row in summary(alone, found)] == [0, pytest.approx(0.25)]


def test_curves_and_table_are_files_of_their_own(root, monkeypatch):
    from matplotlib.axes import Axes

    drawn, plot = [], Axes.plot
    monkeypatch.setattr(
        Axes, "plot", lambda axis, *a, **k: (drawn.append(([*a], k.get("label"))), plot(axis, *a, **k))[1]
    )
    out, plan = root / "study", plan_file(root, grid={"--lr": [1.0, 1.5]}, seeds=[0, 2])
    assert study(plan, "--out", out) is None
    assert drawn[0] == ([(20, 40, 60, 80), (26.0, 1.0, 26.0, 101.0)], "lr 1") and drawn[1] == (
        [40, 1.0],
        None,
    )  # lowest
    assert drawn[3] == ([60, 1.0], None) and len(drawn) == 4
    assert (out / "curves.png").read_bytes()[:4] == b"\x89PNG"
    table = (out / "table.md").read_text().splitlines()
    assert table[0].startswith("| choice | seeds | lowest held-out loss | above the best | at images |")
    assert table[2].startswith("| lr 1 | 2 | 1 ± 1.4 | 0 ± 0 | 40 ± 0 | 101 ± 1.4 |") and len(table) == 4
