"""demo/stages.py and demo/showcase.py: each stage once, some in the background, a stop that loses nothing; and every
command line of the showcase is one that its program takes."""

import argparse
import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import SD_Sweep
from demo import showcase, stages
from demo.stages import Stage, Stages
from sd.errors import InputError
from sd.sweep import read_plan, trials

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import pathlib, signal, sys, time
name, seconds = sys.argv[1], float(sys.argv[2])
log = pathlib.Path("calls.txt")
def say(word):
    with open(log, "a") as f:
        f.write(f"{word} {name}\\n")
def stop(*_):
    say("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
say("begin")
if pathlib.Path(name + ".fails").exists():
    sys.exit(3)
time.sleep(seconds)
while len(sys.argv) > 3 and sys.argv[3] not in log.read_text():
    time.sleep(0.02)
say("end")
"""


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    (tmp_path / "work.py").write_text(SCRIPT)
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    yield tmp_path
    for s in (signal.SIGTERM, signal.SIGINT):
        signal.signal(s, signal.SIG_DFL)


def work(name: str, seconds: float = 0.0, until: tuple[str, ...] = (), **more) -> Stage:
    """A stage that takes so long, and until a line of that kind is in the log."""
    return Stage(name, [["work.py", name, str(seconds), *until]], **more)


def calls(root: Path) -> list[str]:
    return (root / "calls.txt").read_text().splitlines()


def test_each_stage_is_run_once_and_in_order(root):
    made = [work("a"), work("b"), Stage("c", [["work.py", "c1", "0"], ["work.py", "c2", "0"]])]
    seconds = Stages(root / "stages.json").run(made)
    assert list(seconds) == ["a", "b", "c"] and all(0 <= s < 20 for s in seconds.values())
    wanted = ["begin a", "end a", "begin b", "end b", "begin c1", "end c1", "begin c2", "end c2"]
    assert calls(root) == wanted
    Stages(root / "stages.json").run([*made, work("d")])
    assert calls(root) == [*wanted, "begin d", "end d"]


def test_a_stage_in_the_background_runs_beside_the_next_ones_up_to_the_one_after_it(root):
    made = [work("drawing", until=("end more",), beside=True),
            work("encoding", 0.1, beside=True, after=("drawing",)),
            work("training"), work("more"), work("large", after=("encoding",))]  # fmt: skip
    Stages(root / "stages.json").run(made)
    seen = calls(root)
    assert seen.index("end training") < seen.index("end drawing") and seen.index("end more") < seen.index("end drawing")
    assert seen.index("end drawing") < seen.index("begin encoding") < seen.index("end encoding")
    assert seen.index("end encoding") < seen.index("begin large")
    assert json.loads((root / "stages.json").read_text()).keys() == {"drawing", "encoding", "training", "more", "large"}


def test_a_stage_that_fails_is_run_again_and_those_before_are_not(root):
    (root / "b.fails").write_text("")
    with pytest.raises(SystemExit, match="stage 'b' ended with status 3"):
        Stages(root / "stages.json").run([work("a"), work("b"), work("c")])
    (root / "b.fails").unlink()
    Stages(root / "stages.json").run([work("a"), work("b"), work("c")])
    assert calls(root) == ["begin a", "end a", "begin b", "begin b", "end b", "begin c", "end c"]


def test_a_failure_in_the_background_is_told_where_it_is_waited_for(root):
    (root / "drawing.fails").write_text("")
    made = [work("drawing", beside=True), work("training", 0.1), work("large", after=("drawing",))]
    with pytest.raises(
        SystemExit, match="stage 'drawing' ended with status 3; mend it and run again; see .*drawing.txt"
    ):
        Stages(root / "stages.json").run(made)
    assert "begin large" not in calls(root) and "training" in json.loads((root / "stages.json").read_text())


def test_other_flags_for_what_is_done_are_refused(root):
    Stages(root / "stages.json").run([work("a")])
    with pytest.raises(InputError, match="stage 'a' .* was run with other flags"):
        Stages(root / "stages.json").run([work("a", 0.5)])


def test_a_stop_reaches_the_programs_and_nothing_counts_as_done(root):
    code = f"""if True:
        import pathlib, sys
        sys.path.insert(0, {str(ROOT)!r})
        from demo import stages
        stages.ROOT = pathlib.Path({str(root)!r})
        made = [stages.Stage(n, [["work.py", n, "30"]], beside=b) for n, b in (("drawing", True), ("training", False))]
        stages.Stages(pathlib.Path({str(root)!r}, "stages.json")).run(made)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    for _ in range(300):
        if (root / "calls.txt").exists() and len(calls(root)) == 2:
            break
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1 and "run the same command again to go on" in errors
    assert {"saved drawing", "saved training"} <= set(calls(root)) and not (root / "stages.json").exists()


# ----------------------------------------------------------------------------------------------------------------
# The showcase
# ----------------------------------------------------------------------------------------------------------------


class Reached(BaseException):
    pass


def flags_of(program: str, monkeypatch) -> argparse.ArgumentParser:
    """The parser of a program's main()."""
    monkeypatch.setattr(sys, "path", [str((ROOT / program).parent), *sys.path])
    spec = importlib.util.spec_from_file_location(f"flags_of_{Path(program).stem}", ROOT / program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def stop(self, *args):
        raise Reached(self)

    with monkeypatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Reached) as reached:
            module.main()
    return reached.value.args[0]


def planned(monkeypatch, capsys, *argv: str) -> tuple[list[Stage], str]:
    made = []
    monkeypatch.setattr(sys, "argv", ["showcase.py", "--dry_run", *argv])
    plain = showcase.stages
    monkeypatch.setattr(showcase, "stages", lambda *args: made.append(plain(*args)) or made[-1])
    showcase.main()
    return made[0], capsys.readouterr().out


def test_every_command_of_the_showcase_is_one_that_its_program_takes(monkeypatch, capsys):
    made, said = planned(monkeypatch, capsys, "--unet", "channels=64,128,160,192", "num_heads=4",
                         "--train=--prediction v")  # fmt: skip
    parsers, lines = {}, [line for stage in made for line in stage.lines if not line[0].startswith("-")]
    for program, *words in lines:
        if program not in parsers:
            parsers[program] = flags_of(program, monkeypatch)
        parsers[program].parse_args(words)  # or it exits
    assert len(parsers) == 9 and "minutes in all, estimated" in said
    trainings = [line for line in lines if line[0] == "SD_Train.py"]
    assert [line[2] for line in trainings] == ["drawings_128", "drawings_256"]
    assert all("--prediction v" in " ".join(line) and "num_heads=4" in line for line in trainings)


def test_what_one_stage_writes_another_reads(monkeypatch, capsys):
    """Folders that a later stage reads are those of an earlier one."""
    made, _ = planned(monkeypatch, capsys)
    lines = {stage.name: [" ".join(line) for line in stage.lines] for stage in made}
    data = "runs/showcase/data/drawings"
    assert f"--out {data}/dataset --split_column split" in lines["words"][-1]
    assert f"--out {data}/latents" in lines["encode at 128 px"][0]
    assert f"--out {data}/latents_256" in lines["encode at 256 px"][0]
    assert "--init_from runs/showcase/small/128" in lines["small: train at 256 px"][0]
    # Image keys begin with the folder above images/: it must be the same for both sizes, or no latent is found.
    images = [
        line.split("--images ")[1].split()[0]
        for name in ("encode at 128 px", "encode at 256 px")
        for line in lines[name]
    ]
    assert [Path(folder).parent.name for folder in images] == ["drawings", "drawings"] and images[0] != images[1]
    order = [stage.name for stage in made]
    assert order.index("encode at 256 px") < order.index("small: train at 128 px")
    after = {stage.name: set(stage.after) for stage in made}
    assert after["small: train at 128 px"] == {"words", "encode at 128 px"}
    assert after["small: train at 256 px"] == {"words", "encode at 256 px"}
    assert all(order.index(name) < order.index(stage.name) for stage in made for name in stage.after)
    assert order.index("train the autoencoder") < order.index("encode at 128 px") < order.index("encode at 256 px")


def test_two_networks_share_what_is_made_once(monkeypatch, capsys):
    small, full = (
        {stage.name: stage.lines for stage in planned(monkeypatch, capsys, *more)[0]}
        for more in ((), ("--run", "full", "--model", "sd15", "--unet", "context_dim=384", "--batch", "128,64"))
    )
    assert {name for name in small if small[name] == full.get(name)} == {
        "packages", "text encoder", "draw at 128 px", "words", "draw a part", "train the autoencoder",
        "draw at 256 px", "encode at 128 px", "encode at 256 px", "prompts"
    }  # fmt: skip


def test_an_autoencoder_that_is_there_is_not_trained_again(monkeypatch, capsys, tmp_path):
    own, given = (planned(monkeypatch, capsys, *more)[0] for more in ((), ("--vae", str(tmp_path))))
    left_out = {"draw a part", "train the autoencoder"}
    assert {s.name for s in own} - {s.name for s in given} == left_out
    encoding = [line for s in given for line in s.lines if line[0] == "encode_latents.py"]
    assert len(encoding) == 2 and all(line[line.index("--vae") + 1] == str(tmp_path) for line in encoding)


@pytest.mark.parametrize("name, more", [("128", ()), ("256", ("twice=1.6", "first=runs/x"))])
def test_the_ablations_trainings_and_measures_are_ones_that_the_programs_take(name, more, monkeypatch):
    plan = read_plan(ROOT / f"plans/showcase_{name}.json")
    plan = SD_Sweep.fill_in(plan, ["show=/tmp/show", "minutes=0.8", *more])
    todo, seen = trials(plan), []
    for program, lines in (("SD_Train.py", [t.words for t in todo]), ("demo/sampler_steps.py", plan["measure"])):
        parser = flags_of(program, monkeypatch)
        for line in lines:
            seen.append(parser.parse_args([w for w in line if w != program]))  # or it exits
    trained, measured = seen[: len(todo)], seen[-1]
    assert {t.seed for t in todo} == {0, 1} and len(todo) == {"128": 18, "256": 4}[name]
    assert all(a.phase == f"drawings_{name}" and str(a.data_root) == "/tmp/show/data" for a in trained)
    assert measured.weights == ["ema", "live"] and measured.steps == [20] and measured.samplers == ["dpmpp_2m"]
    for place in plan["figures"].values():  # what they name is what sampler_steps.py writes
        weights, sampler, steps, top = place.rpartition(":")[2].split(".")
        assert weights in measured.weights and sampler == "dpmpp_2m" and steps == "20" and top in ("top1", "top5")
        assert place.startswith("{out}/measured/table.json:") and str(measured.out) == "{out}/measured"
    if name == "256":
        assert [a.minutes for a in trained[:2]] == [1.6, 0.8] and [a.init_from for a in trained[:2]] == [None, "runs/x"]
        return
    plain = vars(trained[0])
    assert {a.minutes for a in trained} == {0.8}
    for one in trained[1 : len(todo) // 2]:  # each is the first with one thing changed
        changed = {k for k, v in vars(one).items() if v != plain[k]}
        assert len(changed) == 1 or changed == {"prediction", "weighting"}, changed
    assert {a.null for a in trained} == {None, "zeros"} and {a.optimizer for a in trained} == {None, "muon"}


@pytest.mark.parametrize(
    "words, said",
    [(["--run", "data"], "--run wants a folder's name"), (["--run", "a/b"], "--run"), (["--vae", "none"], "is not")],
)
def test_bad_names_are_refused(monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["showcase.py", "--dry_run", *words])
    with pytest.raises(InputError, match=said):
        showcase.main()
