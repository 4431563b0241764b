"""The layout: what may import what, and that the files of an older layout are still read.

pytest tests/test_house.py
"""

import ast
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import micro
from conftest import cpu_name

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {p.stem for p in ROOT.glob("*.py")} - {"SD_Model"}


def imported_by(path: Path) -> set[str]:
    """Names of the project's modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
    return {n for n in found if n.split(".")[0] in PROGRAMS | {"SD_Model", "sd", "data_pipeline", "demo", "tests"}}


def library() -> dict[str, Path]:
    """The modules of sd/ by name."""
    files = (p for p in (ROOT / "sd").rglob("*.py") if p.name != "__init__.py")
    return {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in files}


def circle(arrows: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a loop, or none."""
    done = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for other in sorted(arrows[name]):
            if found := walk(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(arrows) if (found := walk(name, []))), [])


def test_no_program_imports_a_program():
    assert {"SD_Train", "SD_ImageGen", "SD_Convert", "SD_TrainVAE", "encode_latents"} <= PROGRAMS
    scripts = [p for p in (ROOT / "data_pipeline").glob("*.py") if p.stem != "_path"]
    assert len(scripts) > 10
    for path in [ROOT / f"{name}.py" for name in PROGRAMS] + scripts:
        others = {n for n in imported_by(path) if n.split(".")[0] not in ("sd", "SD_Model")}
        assert not others, f"{path.name} imports {others}"


def test_library_imports_the_library_and_the_network_alone_and_has_no_circle():
    modules = library()
    assert len(modules) > 25
    arrows = {name: imported_by(path) for name, path in modules.items()}
    for name, others in arrows.items():
        wrong = {n for n in others if n.split(".")[0] not in ("sd", "SD_Model")}
        assert not wrong, f"{name} imports {wrong}"
    assert circle({name: others & modules.keys() for name, others in arrows.items()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]  # the test can fail


def test_the_network_stands_alone():
    assert not imported_by(ROOT / "SD_Model.py")


def test_there_is_one_error_for_users_mistakes():
    """SD_Model.py, which stands alone, has one of its own; nobody else raises or catches that one."""
    for path in [*library().values(), *ROOT.glob("*.py"), *(ROOT / "data_pipeline").glob("*.py")]:
        assert "SD_Model.InputError" not in imported_by(path), path


def test_data_scripts_start_without_torch():
    """Each of their worker processes imports the script anew: torch would cost it a second and 200 MB."""
    scripts = sorted(p for p in (ROOT / "data_pipeline").glob("0*.py"))
    code = "import runpy, sys\nfor p in sys.argv[1:]: runpy.run_path(p); assert 'torch' not in sys.modules, p"
    command = [sys.executable, "-c", code, *map(str, scripts)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(scripts[0].parent)}
    )
    assert len(scripts) > 12 and done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", [p.relative_to(ROOT) for p in (*ROOT.glob("*.py"), *library().values())], ids=str)
def test_every_file_says_what_it_is(path):
    assert ast.get_docstring(ast.parse((ROOT / path).read_text()))


# ----------------------------------------------------------------------------------------------------------------
# Files of revision fb70f60, of the layout before
# ----------------------------------------------------------------------------------------------------------------


def test_a_run_of_the_older_layout_is_read_and_resumed(tmp_path):
    """Data set, latents, log and checkpoint of a run that fb70f60 stopped after 6 of 12 steps. It ends here as it ended
    there: bit for bit on the torch and processor the file names, to rounding elsewhere."""
    with tarfile.open(ROOT / "tests/fixtures/run_fb70f60.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    expected, out = json.loads((tmp_path / "expected.json").read_text()), tmp_path / "run"
    output = tmp_path / "output.txt"
    argv = micro.flags(tmp_path / "data", out, "--accumulate", 2, "--batch", 2, "--resume")
    assert micro.status_of(micro.start(argv, output)) == 0, output.read_text()
    assert "from step 6" in output.read_text()
    log, validation = micro.rows(out), micro.rows(out, "validation.jsonl")
    assert [r["seen"] for r in log] == [r["seen"] for r in expected["log"]]  # the same pictures at the same positions
    for name in ("step", "images", "loss", "lr", "grad_norm"):
        assert np.allclose([r[name] for r in log], [r[name] for r in expected["log"]], rtol=1e-4), name
    assert np.allclose([r["loss"] for r in validation], [r["loss"] for r in expected["validation"]], rtol=1e-4)
    if (torch.__version__, cpu_name()) == (expected["torch"], expected["cpu"]):
        written = json.loads((out / "checkpoints/step_00000012/manifest.json").read_text())
        assert {name: written[name] for name in expected["weights"]} == expected["weights"]
