"""sd/page.py and sd/report.py: pages about runs, read by a parser and opened in a browser where there is one.

pytest tests/test_page.py
"""

import base64
import io
import json
import os
import re
import shutil
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro
from binding import rebind

import sd.page
import sd.report
import SD_Run
from sd.diagnosis.findings import HEALTHY_RUNS, LOOK, Finding, as_rows
from sd.errors import InputError
from sd.output import save_png
from sd.page import beside, curves, document, escape, heat, pictures, section, short, slider, table, thin, ticks
from sd.report import Run, blocks, draw_blocks, key_numbers, means, read_run, report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class Page(HTMLParser):
    """What a page is made of: its elements with their attributes, its text, its data, and addresses it would load."""

    def __init__(self, page: str):
        super().__init__()
        self.elements, self.data, self._open, self.text = [], [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._open.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script" and attributes.get("type") == "application/json":
            self.data.append(json.loads(data))
        elif tag not in ("script", "style"):
            self.text += data + " "

    def all(self, tag: str, kind: str | None = None) -> list[dict]:
        return [a for t, a in self.elements if t == tag and (kind is None or kind in a.get("class", "").split())]

    def loaded(self) -> list[str]:
        """Addresses of everything that a browser would fetch."""
        names = [v for _, a in self.elements for k, v in a.items() if k in ("src", "href", "srcset", "data", "action")]
        return [v for v in names if not v.startswith("data:")]


def image_of(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


def noise(side: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8))


# ----------------------------------------------------------------------------------------------------------------
# Blocks
# ----------------------------------------------------------------------------------------------------------------


def test_thinning_keeps_spikes_gaps_and_both_ends():
    points = [(i, float(np.sin(i / 500))) for i in range(10_000)]
    points[5003], points[5004], points[7777] = (5003, 99.0), (5004, -99.0), (7777, None)
    points[8888] = (8888, float("nan"))
    few = thin(points)
    assert 500 < len(few) < 640 and few == sorted(few, key=lambda p: p[0])
    assert {points[i] for i in (0, 5003, 5004, 7777, 9999)} <= set(few) and 8888 in [p[0] for p in few]
    assert thin(points[:600]) == points[:600]


def test_round_numbers_of_axes():
    assert ticks(0, 100_000) == [0, 20_000, 40_000, 60_000, 80_000, 100_000]
    assert ticks(0.13, 0.42) == [0.2, 0.3, 0.4]
    assert ticks(1e-6, 3e-3, log=True) == [1e-6, 1e-5, 1e-4, 1e-3]
    assert ticks(0.05, 1.2, log=True) == pytest.approx([0.1, 0.3, 1.0])
    assert ticks(0.101, 0.104, log=True) == pytest.approx([0.101, 0.102, 0.103, 0.104])  # no power of ten is near
    assert ticks(2.0, 2.0) == [2.0]
    said = (0, 1234, 12_345, 100_000, 25_600_000, 0.1599, 3.1e-4, -2e-7, None, float("nan"))
    assert [short(v) for v in said] == ["0", "1234", "12.35k", "100k", "25.6M", "0.1599", "3.1e-4", "-2e-7", "–", "–"]


def test_curves_are_where_their_values_are():
    page = Page(curves({"a": [(0, 0.0), (5, None), (10, 20.0), (20, 10.0)]}, "step", "Loss", marks=[(5, "resumed")]))
    line, mark = page.all("path", "line")[0]["d"], page.all("path", "mark")[0]["d"]
    assert line == "M0 1000h0M500 48L1000 524" and mark == "M250 0V1000"  # from 0 to 21: 5 % above the highest
    assert page.data == [{"x": "step", "left": 0, "right": 20, "series": [["a", "var(--c0)", [0, 5, 10, 20],
                                                                           [0, None, 20, 10]]]}]  # fmt: skip
    log = Page(curves({"a": [(0, 1.0), (1, 0.0), (2, 100.0), (3, 10.0)]}, "step", "Loss", log=True))
    place = [int(n) for n in re.findall(r"[ML]\d+ (\d+)", log.all("path", "line")[0]["d"])]
    assert len(place) == 3 and place[0] - place[2] == pytest.approx(place[2] - place[1], abs=1)  # 0 is no logarithm's
    band = Page(curves({"a": [(0, 1.0), (1, 3.0)]}, "x", "y", bands={"a": [(0, 0.0, 4.0), (1, 2.0, 4.0)]}))
    assert band.all("path", "band")[0]["d"] == "M0 48L1000 48L1000 524L0 1000Z"
    assert "No numbers yet" in curves({"a": [(0, None), (1, float("inf"))]}, "step", "Loss")
    flat = Page(curves({"a": [(0, 0), (1, 0)]}, "x", "y"))
    assert flat.all("path", "line")[0]["d"] == "M0 1000L1000 1000"  # on the ground
    two = Page(curves({"a": [(0, 1)], "b": [(0, 2)]}, "x", "y", look={"b": (0, True)}))
    styles = [(p["style"], "dashed" in p["class"]) for p in two.all("path", "line") if "data-i" in p]
    assert styles == [("stroke:var(--c0)", False), ("stroke:var(--c0)", True)]


def test_heat_maps_colour_by_value_and_keep_the_largest():
    rows = {"low": [1.0, 1.0, None], "high": [1.0, 10.0, 100.0]}
    page = Page(heat(rows, [0, 10, 20], "step", "Norms"))
    image = image_of(page.all("img")[0]["src"]).convert("RGBA")
    assert image.size == (3, 2) and image.getpixel((2, 0))[3] == 0  # nothing there
    assert image.getpixel((0, 0)) == (*sd.page.HEAT[0], 255) == image.getpixel((0, 1))
    assert image.getpixel((2, 1)) == (*sd.page.HEAT[-1], 255)
    assert np.abs(np.array(image.getpixel((1, 1))[:3]) - sd.page.HEAT[2]).max() <= 2  # half way, in logarithms
    long = [1.0] * 10_000
    long[4321] = 50.0
    data = Page(heat({"a": long}, range(10_000), "step", "Norms")).data[0]
    assert max(data["cells"][0]) == 50 and len(data["at"]) == len(data["cells"][0]) == sd.page.COLUMNS
    column = data["cells"][0].index(50)
    assert data["at"][column] <= 4321 < data["at"][column + 1]
    assert "No numbers yet" in heat({"a": [None]}, [0], "step", "Norms")


def test_text_is_text_wherever_it_comes():
    bad = "</script><script>alert('&')</script>"
    blocks_of = [
        bad,
        section(bad, bad),
        sd.page.subsection(bad, bad),
        sd.page.folded(bad, bad),
        sd.page.code(bad),
        sd.page.figures({bad: bad}),
        beside(bad),
        curves({bad: [(0, 1)], "b": [(0, 2)]}, bad, bad, marks=[(0, bad)]),
        heat({bad: [1.0]}, [0], bad, bad),
        table([bad], [[bad]]),
        pictures([(bad, noise(8)), (bad, bad)]),
        slider([(bad, noise(8)), (bad, Path("nowhere.png"))]),
    ]
    page = Page(document(bad, blocks_of))
    scripts = page.all("script")
    assert len(scripts) == 4 and [s for s in scripts if "type" not in s] == [{}]  # the page's own, and data of three
    assert page.text.count(bad) >= 20 and page.data[0]["series"][0][0] == bad and page.data[2] == [bad, bad]
    assert "nowhere.png is no picture that can be read" in page.text
    assert escape(escape("<")) == "&lt;"


def test_tables_align_numbers_and_say_none():
    page = Page(table(["name", "n"], [["a", 20_000], ["b", None], ["c", 1e-5]]))
    assert page.all("td", "number")[0]["data-v"] == "20000.0" and "data-v" not in page.all("td", "number")[1]
    assert len(page.all("td", "number")) == 3 and page.text.split() == "name n a 20,000 b – c 1e-5".split()
    assert page.all("table", "sortable") and not Page(table(["a"], [[1]])).all("table", "sortable")
    assert not Page(table(["a"], [[1], ["x"]])).all("td", "number")


def test_pictures_keep_to_their_budget(tmp_path):
    noise(900).save(tmp_path / "a.bmp")
    frames = [(f"step {i}", tmp_path / "a.bmp") for i in range(5)]
    page = slider(frames, budget=50_000)
    images = Page(page).all("img")
    assert sum(len(i["src"]) for i in images) <= 52_000 and ["hidden" in i for i in images] == [True] * 4 + [False]
    assert all(i["width"] == "800" for i in images)  # shown as large as the others of a slider, whatever was given up
    assert image_of(images[0]["src"]).size[0] < 400
    noise(900, 1).save(tmp_path / "a.bmp")  # written anew, with as many bytes: the old thumbnail is not shown
    assert Page(slider(frames, budget=50_000)).all("img")[0]["src"] != images[0]["src"]
    wide = Page(pictures([("a", Image.new("RGB", (400, 100)))], thumb=40)).all("img")[0]
    assert (wide["width"], wide["height"]) == ("40", "10") == tuple(map(str, image_of(wide["src"]).size))


# ----------------------------------------------------------------------------------------------------------------
# A run's page
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """A run of 12 steps that was stopped after 6 and resumed; grids at 4, 8 and 12."""
    root = tmp_path_factory.mktemp("page")
    data, out, text = micro.make_data(root / "data", {"things": 42}), root / "run", root / "out.txt"
    for more in (["--stop_at", 6], ["--resume"]):
        argv = micro.flags(data, out, "--sample_steps", 4, *more)
        assert micro.status_of(micro.start(argv, text, only_page)) == 0, text.read_text()
        if "--stop_at" in more:
            shutil.copy(out / "report.html", root / "half.html")
    assert "warning" not in text.read_text()
    return out


def only_page():
    """A hook: the page is written again, which micro.start leaves out."""
    rebind(sd.report, "write_report", PAGE)


PAGE = sd.report.write_report


def test_a_run_leaves_its_page(run_folder):
    half, whole = (Page((p).read_text()) for p in (run_folder.parent / "half.html", run_folder / "report.html"))
    assert half.loaded() == whole.loaded() == []
    assert re.search(r"\b6 step 12 steps planned 24 images seen", half.text)
    assert re.search(r"\b12 step 12 steps planned 48 images seen", whole.text)
    labels = ["step 4", "step 8", "step 12"]
    assert labels in whole.data and labels[:1] in half.data
    charts = {s[0]: s for d in whole.data if "series" in d for s in d["series"]}
    log, val = micro.rows(run_folder), micro.rows(run_folder, "validation.jsonl")
    assert charts["training, weighted"][2:] == [
        [r["step"] for r in log],
        pytest.approx([r["loss"] for r in log], rel=1e-4),
    ]
    for name, key in (("held out, EMA", ("val", "ema")), ("held out, live", ("val", "live")),
                      ("training pictures, EMA", ("train", "ema"))):  # fmt: skip
        found = [r["loss"] for r in val if (r["split"], r["weights"]) == key]
        assert charts[name][2:] == [[4, 8, 12], pytest.approx(found, rel=1e-4)], name
    assert charts["learning rate"][3] == pytest.approx([r["lr"] for r in log], rel=1e-4)
    assert [p["d"] for p in whole.all("path", "mark")][0] == "M455 0V1000"  # resumed at 6, between 1 and 12
    state = json.loads((micro.checkpoints(run_folder)[-1] / "state.json").read_text())
    for name, digest in state["data"].items():
        assert name in whole.text and digest[:16] in whole.text
    assert f"unchanged, {run_folder.parent}/data/things/latents" in whole.text
    assert "red 0" in whole.text and "zero_terminal_snr" in whole.text and f"{os.cpu_count()} x " in whole.text


def test_the_page_says_how_to_go_on_and_where_it_ran(run_folder):
    about = json.loads((run_folder / "run.json").read_text())
    assert [s["step"] for s in about["sessions"]] == [0, 6] and about["total"] == 12
    assert about["sessions"][0]["device"] == "cpu" and about["sessions"][0]["processes"] == 1
    assert about["resume"].startswith("python SD_Train.py --phase demo ") and about["resume"].endswith(" --resume")
    assert about["resume"].count("--resume") == 1 and "--stop_at" not in about["resume"]
    assert about["resume"] in " ".join(Page((run_folder / "report.html").read_text()).text.split())


def test_a_page_that_fails_stops_no_run(run_folder, tmp_path):
    def broken(folder, out=None):
        raise KeyError("no such thing")

    argv = micro.flags(run_folder.parent / "data", tmp_path / "run", "--sample_steps", 4, "--stop_at", 6)
    text = tmp_path / "out.txt"
    pid = micro.start([*argv, "--max_steps", "12"], text, lambda: rebind(sd.report, "write_report", broken))
    assert micro.status_of(pid) == 0
    assert "report.html was not written ('no such thing')" in text.read_text()
    argv = micro.flags(run_folder.parent / "data", tmp_path / "run", "--sample_steps", 4, "--resume")
    assert micro.status_of(micro.start(argv, text, only_page)) == 0
    assert (tmp_path / "run" / "report.html").exists()
    assert micro.differences(run_folder, tmp_path / "run") == []  # the page changes nothing about the training


def test_training_does_not_wait_for_the_page(run_folder, tmp_path):
    """Each page takes longer than the run: one is written during it, and the last at its end."""

    def slow(folder, out=None):
        with open(folder / "pages", "a") as file:
            file.write(f"{len(micro.rows(folder))} ")
        time.sleep(1.5)

    argv = micro.flags(run_folder.parent / "data", tmp_path / "run", "--val_steps", 1)
    pid = micro.start(argv, tmp_path / "out.txt", lambda: rebind(sd.report, "write_report", slow))
    assert micro.status_of(pid) == 0
    pages = [int(n) for n in (tmp_path / "run" / "pages").read_text().split()]
    assert pages[0] < 12 == pages[-1] and len(pages) < 6


def test_damaged_folders_have_a_page_still(run_folder, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(run_folder, out)
    whole = (out / "log.jsonl").read_bytes()
    rows = [{"step": 13, "loss": None, "bins": 3}, {"step": 14, "loss": "x", "lr": [1], "norms": {"a": {"b": True}}}]
    (out / "log.jsonl").write_bytes(whole[:-30] + b"\n\xff{}\n" + "\n".join(map(json.dumps, rows)).encode() + b"\n")
    for name in ("config.json", "run.json", "validation.jsonl", "evaluation.jsonl", "health.jsonl", "doctor.json"):
        (out / name).write_bytes(b'[1, {"a": \xff')
    for name in ("state.json", "model.json"):
        for checkpoint in micro.checkpoints(out):
            (checkpoint / name).write_text("[" * 100_000)
    (out / "samples" / "step_00000008.png").write_bytes(b"\x89PNG")
    page = Page(report(out))
    assert "step_00000008.png is no picture that can be read" in page.text and page.loaded() == []
    assert re.search(r"\b14 step", page.text)
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "The log has no lines yet" in report(empty)


def test_means_have_the_interval_of_their_mean():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(20):
        line, band = means([(i, float(y)) for i, y in enumerate(rng.normal(5, 2, 8000))])
        assert len(line) == len(band) == 80 and line[0][0] == 49.5  # of 0 to 99
        inside += sum(low < 5 < high for _, low, high in band)
        assert np.mean([high - low for _, low, high in band]) == pytest.approx(2 * 1.96 * 2 / 10, rel=0.05)
    assert 0.93 < inside / 1600 < 0.97
    assert means([(0, 1.0), (1, None), (2, 3.0)]) == ([], [])


def test_whatever_numbers_by_block_there_are_become_maps():
    by_name = [{"step": 0, "norms": {"grad": {"a": 1.0, "b": 2.0, "c": 0}}, "bins": [1], "loss": 1},
               {"step": 5, "norms": {"grad": {"a": 3.0, "d": 4.0}}}]  # fmt: skip
    assert blocks(by_name) == {
        "norms grad": ([0, 5], {"a": [1.0, 3.0], "b": [2.0, None], "c": [0, None], "d": [None, 4.0]})
    }
    by_block = [{"step": 7, "health": {b: {"grad": i, "weight": 2 * i} for i, b in enumerate("abc")}}]
    assert blocks(by_block) == {
        "health grad": ([7], {"a": [0], "b": [1], "c": [2]}),
        "health weight": ([7], {"a": [0], "b": [2], "c": [4]}),
    }
    zeros = [{"step": i, "share": {"a": 0.0}, "norm": {"a": float(i), "b": 1.0}} for i in range(3)]
    share, norm = (Page(drawn).data[0]["cells"] for drawn in draw_blocks(Run(Path("x"), health=zeros)))
    assert share == [[0, 0, 0]] and norm == [[None, 1, 2], [1, 1, 1]]  # no logarithm of what is zero everywhere
    assert blocks([{"step": 0, "word": {"a": "x"}, "flag": {"a": True}}]) == {}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory, run_folder) -> Path:
    """A made-up run of 100,000 steps, logged every 10, with 100 grids, norms by block, evaluations and a finding."""
    out, rng = tmp_path_factory.mktemp("long") / "long", np.random.default_rng(0)
    shutil.copytree(run_folder, out)
    (out / "report.html").unlink()
    noisy = rng.normal(1, 0.05, (10_000, 10))
    with open(out / "log.jsonl", "w") as file:
        for i, values in enumerate(noisy.tolist()):
            row = dict(step=10 * i + 10, images=2560 * i + 2560, epoch=i / 1000, loss=values[0], lr=1e-4, skipped=0,
                       grad_norm=41.5 if i == 6332 else values[1], images_per_s=2400 * values[2], data_wait=0.01,
                       bins=values, seen="0", tokens_per_s=values[3])  # fmt: skip
            if i % 50 == 49:
                row["norms"] = {f"down.{b}": {"gradient": values[0] + b, "weight": values[1]} for b in range(30)}
            file.write(json.dumps(row) + "\n")
    with open(out / "validation.jsonl", "w") as file:
        for i in range(200):
            for split, weights in (("val", "live"), ("val", "ema"), ("train", "live"), ("train", "ema")):
                bins = [0.2 - i / 2000 + 0.01 * b + (weights == "live") / 100 for b in range(10)]
                row = dict(step=500 * i + 500, split=split, weights=weights, loss=float(np.mean(bins)), bins=bins)
                file.write(json.dumps(row) + "\n")
    with open(out / "evaluation.jsonl", "w") as file:
        for i in range(20):
            for weights in ("ema", "live"):
                row = dict(step=5000 * i + 5000, weights=weights, extractor="pixels", fd=90.0 - i, checkpoint=f"c{i}")
                file.write(json.dumps(row | dict(protocol="ab12", result=f"r{i}")) + "\n")
    found = Finding("data", "latents", LOOK, "a <mean> of 3", "encode again")
    (out / "doctor.json").write_text(json.dumps({"source": "run", "findings": as_rows([found])}))
    shutil.rmtree(out / "samples"), (out / "samples").mkdir()
    grids = [np.asarray(noise(24, seed).resize((520, 280), Image.Resampling.BICUBIC)) for seed in range(3)]
    for i, picture in enumerate(grids):
        save_png(out / "samples" / f"step_{1000 * i + 1000:08d}.png", picture, {"prompts": ["a cat", "a <dog>"]})
    for i in range(3, 100):
        os.link(
            out / "samples" / f"step_{1000 * (i % 3) + 1000:08d}.png", out / f"samples/step_{1000 * i + 1000:08d}.png"
        )
    (out / "run.json").write_text(json.dumps(json.loads((out / "run.json").read_text()) | {"total": 125_000}))
    return out


def test_a_long_run_has_a_small_page_in_seconds(long_run, capsys):
    started = time.process_time()
    SD_Run.main([str(long_run), "--report"])
    assert time.process_time() - started < 10
    assert capsys.readouterr().out.startswith(f"{long_run}/report.html: ")
    text = (long_run / "report.html").read_text()
    page = Page(text)
    assert 500_000 < len(text) < 5_000_000 and page.loaded() == []
    assert len(page.all("img")) == 100 + 2  # grids, maps
    charts = {s[0]: s for d in page.data if "series" in d for s in d["series"]}
    assert max(charts["gradient norm"][3]) == 41.5  # the spike of one line in 10,000
    assert all(len(s[2]) < 700 for s in charts.values()) and charts["pixels, ema"][3][-1] == 71
    assert "tokens per s" in charts and len(charts["pixels, live"][2]) == 20
    words = " ".join(page.text.split())
    assert f"{LOOK} data latents a <mean> of 3 encode again 0 of {HEALTHY_RUNS}" in words
    assert "oscillation" in words.partition("rules found nothing, or had nothing to judge by")[2]
    numbers = key_numbers(read_run(long_run))
    assert numbers["lowest held-out loss"] == pytest.approx(0.1455) and numbers["its step"] == 100_000
    seconds = 25_000 * 256 / numbers["images/s"]
    assert numbers["left at this speed"] == f"{round(seconds / 60)} min"


def test_two_runs_lie_on_one_page(run_folder, long_run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    settings = json.loads((run_folder / "config.json").read_text())
    (long_run / "config.json").write_text(json.dumps(settings | {"lr": 0.007}))
    SD_Run.main(["--compare", str(run_folder), str(long_run)])
    page = Page((tmp_path / "compare.html").read_text())
    charts = {s[0]: s for d in page.data if "series" in d for s in d["series"]}
    assert {"run: held out, EMA", "long: held out, EMA", "long: learning rate"} <= charts.keys()
    assert charts["long: held out, EMA"][2][-1] == 100_000 * 256  # batches differ: by images
    assert charts["run: held out, EMA"][2] == [16, 32, 48]
    differ = " ".join(page.text.split()).partition("Settings that differ setting run long ")[2].partition(" Curves")[0]
    assert differ == "lr 0.001 0.007"
    dashed = [p for p in page.all("path", "dashed") if "data-i" in p]
    assert len(dashed) == sum(s[0].startswith("long: ") for d in page.data if "series" in d for s in d["series"])
    assert len(page.all("input")) == 2 and page.loaded() == []
    for argv, words in (
        ([str(run_folder)], "--report"),
        (["--report"], "give the run folder too"),
        ([str(tmp_path), "--report"], "has no log.jsonl"),
        (["--compare", str(run_folder), str(tmp_path)], "has no log.jsonl"),
        (["--compare", str(run_folder), str(run_folder)], "wants two runs"),
        (["--plot", str(run_folder), "--out", "x.html"], "--out is of --report"),
        ([str(run_folder), "--report", "--out", "no/x.html"], "in a folder that is there"),
        ([str(run_folder), "--report", "--out", str(tmp_path)], "found"),
    ):
        with pytest.raises((InputError, SystemExit)) as end:
            SD_Run.main(argv)
        assert words in str(end.value) + capsys.readouterr().err, argv
    assert [p.name for p in tmp_path.iterdir()] == ["compare.html"]


# ----------------------------------------------------------------------------------------------------------------
# In a browser
# ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as p:
        path = next(filter(None, map(shutil.which, BROWSERS)), None) or p.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium on this machine: apt-get install chromium")
        browser = p.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


def opened(browser, path: Path, width: int):
    """A page without network; what it says to the console and asks for is in page.heard."""
    page = browser.new_context(viewport={"width": width, "height": 900}, offline=True, locale="en").new_page()
    page.heard = []
    page.on("console", lambda m: page.heard.append(m.text))
    page.on("pageerror", lambda e: page.heard.append(str(e)))
    page.on("request", lambda r: r.url.startswith("data:") or page.heard.append(r.url))
    page.goto(path.as_uri())
    return page


def hovered(page, chart, across: float, down: float = 0.5) -> list[str]:
    """What stands beside the pointer."""
    plot = chart.locator(".plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + box["width"] * across, box["y"] + box["height"] * down)
    return plot.locator(".tip").inner_text().split("\n")


@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser(browser, long_run, width):
    SD_Run.main([str(long_run), "--report"])
    page = opened(browser, long_run / "report.html", width)
    assert page.evaluate("document.documentElement.scrollWidth") == width  # nothing sticks out

    chart = page.locator(".curves", has_text="Held-out loss by timestep").first
    where, *rest = hovered(page, chart, 0.5)
    step = int(where.removeprefix("step ").replace(",", ""))
    assert abs(step - 50_250) <= 500 and len(rest) == 20
    value = 0.2 - (step / 500 - 1) / 2000
    assert rest[:2] == ["t 0–99", f"{float(f'{value:.4g}'):g}"] and float(rest[-1]) == pytest.approx(
        value + 0.09, abs=1e-4
    )
    tip, plot = chart.locator(".tip").bounding_box(), page.viewport_size
    assert tip["x"] >= 0 and tip["x"] + tip["width"] <= plot["width"]
    chart.locator(".legend button").first.click()
    assert len(hovered(page, chart, 0.5)) == 1 + 18
    assert chart.locator("path[data-i='0'].line").first.evaluate("e => getComputedStyle(e).display") == "none"

    where, row, value = hovered(page, page.locator(".heat").first, 0.999, 29.5 / 30)
    assert row == "down.29" and 29.8 < float(value) < 30.2 and where.startswith("step ")
    page.mouse.move(1, 1)
    assert page.locator(".heat .tip").first.is_hidden()

    box = page.locator(".slider input")
    assert (
        page.locator(".slider img:visible").count() == 1
        and page.locator(".slider output").inner_text() == "step 100,000"
    )
    before = page.locator(".slider img:visible").get_attribute("src")
    box.focus()
    for _ in range(4):
        page.keyboard.press("ArrowLeft")
    assert page.locator(".slider output").inner_text() == "step 96,000"
    assert page.locator(".slider img:visible").count() == 1
    assert page.locator(".slider img:visible").get_attribute("src") != before
    assert page.heard == [(long_run / "report.html").as_uri()]


def test_tables_and_paired_sliders_in_a_browser(browser, tmp_path):
    frames = [(f"step {i}", noise(16, i)) for i in (1, 2, 3)]
    rows = [["b", 10, 2.5], ["a", 9, None], ["c", 100, 1e-9]]
    parts = [table(["name", "n", "v"], rows), beside(slider(frames), slider(frames[:2])), slider(frames)]
    (tmp_path / "page.html").write_text(document("Page", parts))
    page = opened(browser, tmp_path / "page.html", 390)

    def names() -> str:
        return "".join(page.locator("td:first-child").all_inner_texts())

    orders = []
    for column in (0, 1, 1, 2, 2):
        page.locator("th").nth(column).click()
        orders.append(names())
    assert orders == ["abc", "abc", "cba", "cba", "bca"]  # numbers as numbers, and what is none last
    page.locator("input").first.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.locator("output").all_inner_texts() == ["step 1", "step 1", "step 3"]
    page.keyboard.press("End")
    assert page.locator("output").all_inner_texts() == ["step 3", "step 1", "step 3"]
    assert page.heard == [(tmp_path / "page.html").as_uri()]
