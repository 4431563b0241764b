"""The demo's measuring: right on drawn pictures and soft ones, at chance where pictures and prompts do not match."""

import json
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

import sd.pictures
import sd.shapes

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "demo"))
import evaluate  # noqa: E402

N = 240


@pytest.fixture(scope="module")
def drawn() -> tuple[list[np.ndarray], list[dict]]:
    """Pictures and truths, all combinations of both kinds of pairs about equally often."""
    rng = np.random.default_rng(5)
    truths = sd.shapes.shape_prompts("trained", N // 2, 5) + sd.shapes.shape_prompts("held_out", N // 2, 5)
    for truth in truths:
        truth["size"] = rng.uniform(*sd.shapes.RADIUS)
    return [sd.shapes.draw_jittered(truth, 64, rng) for truth in truths], truths


def test_drawn_pictures_are_right(drawn):
    assert min(evaluate.accuracy(*drawn).values()) >= 0.99


def test_every_size_is_right():
    for size in (32, 64, 128, 256):
        rng = np.random.default_rng(1)
        truths = [{**truth, "size": 0.16} for truth in sd.shapes.shape_prompts("trained", 40, 1)]
        images = [sd.shapes.draw_jittered(truth, size, rng) for truth in truths]
        assert min(evaluate.accuracy(images, truths).values()) >= 0.97, size


@pytest.mark.parametrize(
    "degrade",
    [
        lambda image, rng: cv2.GaussianBlur(image, (0, 0), 1.5),
        lambda image, rng: np.clip(image + rng.normal(0, 12, image.shape), 0, 255).astype(np.uint8),
        lambda image, rng: cv2.resize(cv2.resize(image, (32, 32), interpolation=cv2.INTER_AREA), (64, 64)),
        lambda image, rng: np.clip(image.astype(int) + rng.integers(-10, 11, 3), 0, 255).astype(np.uint8),
        evaluate.soften,
    ],
    ids=["blur", "noise", "half_size", "colour_shift", "blur_noise_jpeg"],
)
def test_soft_pictures_are_right(drawn, degrade):
    images, truths = drawn
    rng = np.random.default_rng(0)
    assert min(evaluate.accuracy([degrade(image, rng) for image in images], truths).values()) >= 0.98


def test_one_wrong_attribute_is_seen():
    truth = {"shape": "circle", "colour": "red", "position": "top left", "background": "white", "size": 0.16}
    others = {"shape": "square", "colour": "orange", "position": "centre", "background": "grey"}
    for name, value in others.items():
        picture = sd.shapes.draw_jittered({**truth, name: value}, 64, np.random.default_rng(0))
        measured = evaluate.accuracy([picture], [truth])
        assert measured == {**dict.fromkeys(evaluate.ATTRIBUTES, 1.0), name: 0.0, "all": 0.0}


def test_pictures_without_one_clear_shape_are_wrong():
    plain = np.full((64, 64, 3), 255, np.uint8)
    half = plain.copy()
    half[:, 32:] = (215, 30, 35)
    full_frame = np.full((64, 64, 3), (215, 30, 35), np.uint8)
    speck = plain.copy()
    speck[10:12, 10:12] = (215, 30, 35)
    bar = plain.copy()
    bar[30:34, 4:60] = (215, 30, 35)
    for picture in (plain, half, full_frame, speck, bar):
        assert evaluate.classify(picture)["shape"] is None
    assert evaluate.classify(plain) == {"shape": None, "colour": None, "position": None, "background": "white"}


def test_check_tells_a_bad_measure(monkeypatch):
    results, good = evaluate.check(N)
    assert good and set(results) == {"drawn", "soft", "shuffled", "noise"}
    assert 0.1 < results["shuffled"]["shape"] < 0.45 and results["shuffled"]["all"] < 0.05
    # a measure that agrees with every prompt is right on drawn pictures and not at chance on the others
    monkeypatch.setattr(evaluate, "classify", lambda image, shapes: dict.fromkeys(evaluate.ATTRIBUTES, Agreeable()))
    results, good = evaluate.check(20)
    assert results["drawn"]["all"] == 1 and not good
    # one that knows nothing is at chance, but not right on drawn pictures
    monkeypatch.setattr(evaluate, "classify", lambda image, shapes: dict.fromkeys(evaluate.ATTRIBUTES))
    assert not evaluate.check(20)[1]


class Agreeable:
    """Equal to everything."""

    def __eq__(self, other):
        return True

    __hash__ = None


def test_share(drawn):
    images, truths = drawn
    for attribute, value in (("colour", "red"), ("shape", "circle")):
        expected = sum(truth[attribute] == value for truth in truths) / N
        assert evaluate.share(images, attribute, value) == pytest.approx(expected, abs=0.01)


def command(*arguments, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "demo" / "evaluate.py"), *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == status, done.stderr
    if status == 2:
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    return done.stdout


def test_command_line(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    command("--write_prompts", 30, "--prompts", prompts)
    truths = [json.loads(line) for line in prompts.read_text().splitlines()]
    assert truths == sd.shapes.shape_prompts("held_out", 30, 0)
    assert prompts.with_suffix(".txt").read_text().splitlines() == [truth["prompt"] for truth in truths]
    images = tmp_path / "images"
    images.mkdir()
    for i, truth in enumerate(truths):
        wrong = {"background": "grey" if truth["background"] != "grey" else "black"} if i < 3 else {}
        picture = sd.shapes.draw_jittered({**truth, "size": 0.16, **wrong}, 64, np.random.default_rng(i))
        (images / f"{i:05d}.png").write_bytes(sd.pictures.encode_png(picture))
    (images / "grid.png").write_bytes(b"is not measured")
    last = json.loads(command("--images", images, "--prompts", prompts).splitlines()[-1])
    assert last == {"colour": 1.0, "shape": 1.0, "position": 1.0, "background": 0.9, "all": 0.9, "n": 30}
    (images / "00029.png").unlink()
    command("--images", images, "--prompts", prompts, status=2)
    command("--images", images, "--prompts", tmp_path / "none.jsonl", status=2)


def test_any_colour_is_never_a_held_out_pair():
    """named_share: that share has named colours and the pictures of a run without; the others a colour that stands
    out, that no caption names, and that is nearest to none of which the shape is held out."""
    rows = [sd.shapes.row(0, i, 64, 0.4) for i in range(600)]
    named = [truth["colour"] is not None for _, _, truth in rows]
    assert 0.35 < np.mean(named) < 0.45
    assert all(sd.shapes.row(0, i, 64, 1.0)[2]["colour"] for i in range(50))
    clear, colours = 0, set()
    for (picture, caption, truth), has_name in zip(rows, named):
        assert caption
        if has_name or truth["flaw"]:
            continue
        assert not any(colour in caption for colour in sd.shapes.COLOURS)
        found = evaluate.classify(picture)
        clear += found["shape"] == truth["shape"] and found["position"] == truth["position"]
        assert (truth["shape"], found["colour"]) not in sd.shapes.HELD_OUT
        colours.add(tuple(np.unique(picture.reshape(-1, 3), axis=0, return_counts=True)[0][0]))
    assert clear >= 0.97 * sum(not n and not t["flaw"] for n, (_, _, t) in zip(named, rows))
    assert len(colours) > 50
