"""demo/drawings, the small model that comes along: its size, and that its pictures show what prompts say."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from demo.evaluate_drawings import colours_of
from sd import drawings
from sd.pictures import decode_image

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "demo/drawings"
ASKED = [  # thing, tint, background
    ("teddy bear", "purple", "white"),
    ("butterfly", "blue", "white"),
    ("house", "green", "white"),
    ("balloon", "orange", "white"),
    ("deciduous tree", "", "red"),
    ("mushroom", "", "grey"),
    ("sailboat", "", "black"),
    ("sun", "", "blue"),
]


@pytest.fixture(scope="module")
def painted(tmp_path_factory) -> list:
    """The pictures of ASKED, RGB uint8 [256, 256, 3]."""
    folder = tmp_path_factory.mktemp("shipped")
    prompts = [drawings.captions([thing], "fluent", ground, tint)[0] for thing, tint, ground in ASKED]
    (folder / "prompts.txt").write_text("\n".join(prompts))
    done = subprocess.run(
        [sys.executable, "SD_ImageGen.py", "--model", str(FOLDER), "--prompts_file", str(folder / "prompts.txt"),
         *"--sampler dpmpp_2m --steps 20 --cfg 5 --out".split(), str(folder)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [decode_image((folder / f"{i:05d}.png").read_bytes()) for i in range(len(ASKED))]


def test_it_is_small():
    network = sum((FOLDER / name).stat().st_size for name in ("unet.safetensors", "vae/vae.safetensors"))
    assert network <= 30e6
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) <= 45e6


def test_pictures_show_the_colours_that_are_asked_for(painted):
    """All eight; and the pictures of other prompts do not show them."""
    answers = [colours_of(picture) for picture in painted]
    for (thing, tint, ground), (colour, behind) in zip(ASKED, answers):
        assert behind == ground and tint in ("", colour), f"{tint} {thing} on {ground}: {colour} on {behind}"
    others = answers[1:] + answers[:1]
    assert not any(behind == ground and colour == tint for (_, tint, ground), (colour, behind) in zip(ASKED, others))


def test_make_paint_is_quick(tmp_path):
    """A picture in less than 20 seconds on two cores, and its path on the last line."""
    begun = time.perf_counter()
    done = subprocess.run(
        ["make", "-s", "paint", "VENV=none", f"PYTHON={sys.executable}", "PROMPT=a red apple, 3d render",
         f"OUT={tmp_path}"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert time.perf_counter() - begun < 20
    path = Path(done.stdout.splitlines()[-1])
    with Image.open(path) as picture:
        assert picture.size == (256, 256)
    assert colours_of(decode_image(path.read_bytes())) == ("red", "white")
