"""--help of every program and script: a sentence, flags in groups with their defaults, examples that can be copied.

pytest tests/test_help.py
"""

import argparse
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

import SD_ImageGen
import SD_Train
from sd.cli import parser

ROOT = Path(__file__).resolve().parent.parent
PLACES = ROOT.glob("*.py"), ROOT.glob("data_pipeline/0*.py"), ROOT.glob("demo/*.py"), ROOT.glob("benchmarks/*.py")
FILES = [p.relative_to(ROOT) for place in PLACES for p in place
         if p.name != "SD_Model.py" and "\ndef main(" in p.read_text()]  # fmt: skip


class Reached(BaseException):
    """Carries a parser out of the program that was about to use it."""


@pytest.fixture
def parser_of(monkeypatch):
    """The parser that a file's main() makes before it does anything else."""

    def stop(self, *args):
        raise Reached(self)

    def make(path: Path) -> argparse.ArgumentParser:
        monkeypatch.setattr(sys, "path", [str((ROOT / path).parent), *sys.path])
        monkeypatch.setattr(sys, "argv", [path.name])
        spec = importlib.util.spec_from_file_location(f"help_of_{path.stem}", ROOT / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(Reached) as reached:
            module.main()
        return reached.value.args[0]

    return make


def flags_of(p: argparse.ArgumentParser) -> list[argparse.Action]:
    return [a for a in p._actions if a.help is not argparse.SUPPRESS and not isinstance(a, argparse._HelpAction)]


def optional(p: argparse.ArgumentParser, action: argparse.Action) -> bool:
    """Whether a flag takes a value and may be left out."""
    alternatives = [a for g in p._mutually_exclusive_groups if g.required for a in g._group_actions]
    return action.nargs != 0 and not action.required and action not in alternatives


def line_of(text: str, action: argparse.Action) -> str:
    """A flag's entry in --help, on one line."""
    name = action.option_strings[0] if action.option_strings else action.metavar or action.dest
    entry = re.search(rf"^  {re.escape(name)}\b.*(\n {{10,}}.*)*", text, re.M)
    return " ".join(entry[0].split())


@pytest.mark.parametrize("path", FILES, ids=str)
def test_help_has_a_sentence_groups_defaults_and_two_examples(path, parser_of, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    p = parser_of(path)
    text = p.format_help()
    usage, sentence = text.split("\n\n")[:2]
    assert usage.startswith(f"usage: {path.name}") and "\n" not in usage
    assert re.fullmatch(r"[^\s].*[.?]", sentence), sentence
    examples = text.partition("\nexamples:\n")[2].partition("\n\n")[0].splitlines()
    commands = [line for line in examples if re.match(r"    (python|torchrun) ", line)]
    assert len(commands) >= 2 and sum(path.name in c for c in commands) >= 2, examples
    continued = [i for i, line in enumerate(examples) if line.startswith("        ")]
    assert all(examples[i - 1].endswith("\\") for i in continued), examples

    flags, grouped = flags_of(p), [a for g in p._action_groups[2:] for a in g._group_actions]
    assert flags and all(a in grouped for a in flags), "a flag is in no group"
    for action in flags:
        assert action.help and action.help.strip(), f"{action.dest} has no help"
        line = line_of(text, action)
        assert line.count("(default: ") <= 1, line
        if not optional(p, action):
            assert action.default in (None, False, True), line
        elif "must be given" not in line and action.dest not in ("prompt", "folders"):  # which say what else may be
            assert "default: " in line, line
        if action.default is not None and optional(p, action) and action.default not in ([], False):
            values = action.default if isinstance(action.default, list | tuple) else [action.default]
            words = " ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values)
            assert f"(default: {words})" in line, line


@pytest.mark.parametrize("program, rows", [(SD_Train, SD_Train.Phase._fields[1:]), (SD_ImageGen, ())])
def test_defaults_behind_none_are_those_of_the_table(program, rows, parser_of, monkeypatch):
    """The flags of these two default to None; --help says what stands behind them, each value out of its table."""
    monkeypatch.setenv("COLUMNS", "200")
    p = parser_of(Path(f"{program.__name__}.py"))
    text, actions = p.format_help(), {a.dest: a for a in flags_of(p)}
    for name in rows:
        assert line_of(text, actions[name]).endswith("(default: the phase's)"), name
    shown = {n: v for n, v in program.DEFAULTS.items() if v not in (None, "") and not isinstance(v, bool)}
    assert len(shown) > 10
    for name, value in shown.items():
        assert actions[name].default is None
        word = f"{value:g}" if isinstance(value, float) else value
        assert line_of(text, actions[name]).endswith(f"(default: {word})"), name


def test_the_parser_keeps_layout_and_percent_signs_and_takes_what_argparse_takes(capsys):
    examples = "    python x.py --a 1 \\\n        --b 2   # 50 %\n    python x.py\n"
    doc = f"Does it. Well.\n\n{examples}\nFor readers of the file.\n"
    p = parser(doc, {"c": "the row's", "a": 5})
    g = p.add_argument_group("work")
    g.add_argument("IN", help="what")
    g.add_argument("--a", type=float, default=1e-4, help="a share of 1 %%")
    g.add_argument("--b", default="10%", help="a word")
    g.add_argument("--c", help="of the row")
    g.add_argument("--some_folder", nargs="+", default=["x", "y"], help="two")
    with pytest.raises(SystemExit) as end:
        p.parse_args(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and "readers" not in text
    assert f"examples:\n{examples}\n" in text
    for line in (
        "--a X  a share of 1 % (default: 0.0001)",
        "--b B  a word (default: 10%)",
        "--c C  of the row (default: the row's)",
        "--some_folder FOLDER [FOLDER ...]  two (default: x y)",
    ):
        assert re.search(r"\s+".join(map(re.escape, line.split())), text), line
    assert vars(p.parse_args(["in"])) == {"IN": "in", "a": 1e-4, "b": "10%", "c": None, "some_folder": ["x", "y"]}
    with pytest.raises(SystemExit) as end:
        p.parse_args(["in", "--d"])
    assert end.value.code == 2
    assert re.fullmatch(r"usage: \S+ IN \[flags\]\n\S+ error: unrecognized arguments: --d\n", capsys.readouterr().err)


def test_help_asks_for_nothing_and_ends_well():
    done = subprocess.run([sys.executable, "data_pipeline/01f_folder.py", "--help"], cwd=ROOT, capture_output=True)
    assert done.returncode == 0 and not done.stderr and b"\nexamples:\n" in done.stdout
