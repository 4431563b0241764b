"""06_report.py: one page that asks for nothing outside, whose numbers are those of the data."""

import re
import shutil
import subprocess
import tarfile
from html.parser import HTMLParser
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from test_data_pipeline import load, run, write_rows

import encode_latents
import sd.data
import sd.files
import sd.weights.parts
import SD_Model

REPORT = load("06_report.py")
VOID = {"meta", "img"}


class Page(HTMLParser):
    """Checks that tags are closed in order; collects attributes and text."""

    def __init__(self, content: str):
        super().__init__()
        self.open, self.attributes, self.texts, self.tags = [], [], [], []
        self.feed(content)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """data/shapes with images and filtered."""
    folder = tmp_path_factory.mktemp("data") / "shapes"
    run("00_make_shapes.py", "--out", folder, "--count", 300, "--shard_size", 100, "--size", 16)
    run("02_filter.py", "--in", folder / "images", "--out", folder / "filtered", "--min_aesthetic", 6)
    return folder


def test_page_is_whole_and_asks_for_nothing(shapes, tmp_path):
    run("06_report.py", "--in", shapes, "--out", tmp_path / "a.html", "--pictures", 5)
    content = (tmp_path / "a.html").read_text()
    page = Page(content)
    links = [value for name, value in page.attributes if name in ("src", "href")]
    assert len(links) == 5 and all(link.startswith("data:image/jpeg;base64,") for link in links)
    assert "script" not in page.tags and "link" not in page.tags and "http" not in content.replace("http-equiv", "")
    manifest = sd.files.read_json(shapes / "filtered" / "manifest.json")
    assert f"<b>{manifest['kept']:,}</b>" in content and f"−{manifest['dropped']['aesthetic']:,}" in content
    assert "Not tokenised" in content and "No latents" in content
    run("06_report.py", "--in", shapes, "--out", tmp_path / "b.html", "--pictures", 5)
    assert (tmp_path / "b.html").read_text() == content
    run("06_report.py", "--in", shapes, "--out", tmp_path / "c.html", "--pictures", 5, "--seed", 1)
    assert (tmp_path / "c.html").read_text() != content


def test_captions_are_text_and_repeats_are_counted(tmp_path):
    write_rows(tmp_path / "s" / "filtered" / "0.parquet", caption=["<script>x</script>"] * 3 + ["b"], url=list("aabc"))
    histograms, repeats, rows = REPORT.read_table([tmp_path / "s" / "filtered" / "0.parquet"], 77)
    assert rows == 4 and repeats["url"].counts() == (4, 1) and repeats["caption"].counts() == (4, 2)
    assert "&lt;script&gt;" in REPORT.draw_pictures([("0", "k", "<script>")], {("0", "k"): "no_image"})


def test_histogram_counts_every_value_and_the_missing():
    histogram = REPORT.new_histograms(77)["side"]
    histogram.add(np.array([64.0] * 50 + [512.0] * 49 + [1e9, np.nan, 0, -1]))
    assert histogram.counts.sum() == 100 == histogram.bars()[2].sum() and histogram.missing == 3
    assert abs(histogram.quantile(0.25) / 64 - 1) < 0.01 and abs(histogram.quantile(0.75) / 512 - 1) < 0.01


@pytest.mark.parametrize(("end", "pad"), [(49407, 49407), (7, 0)])
def test_tokens_end(end, pad):
    ids = np.full((3, 10), pad, np.int32)
    for row, text in enumerate(([5, 6], [8], [9] * 8)):
        ids[row, : len(text) + 2] = [1, *text, end]
    assert REPORT.end_token(ids) == end


def test_refusals(tmp_path, shapes):
    assert "--in" in run("06_report.py", status=2)
    assert "none of" in run("06_report.py", "--in", tmp_path, status=2)
    assert "--data wants" in run("06_report.py", "--data", "a:b:c:d", status=2)


# --- mixtures


def cells(content: str) -> list[list[str]]:
    """The texts of each row of the first table of a page."""
    rows = re.findall("<tr>(.*?)</tr>", content[: content.index("</table>")])
    return [[re.sub("<.*?>", "", cell) for cell in re.findall("<t[dh].*?>(.*?)</t[dh]>", row)] for row in rows]


@pytest.mark.parametrize(
    ("data", "caps", "weights"),
    [("a:0.6:150,b:0.4,c:1", [150, 500, 40], [0.6, 0.4, 1]), ("a,b,c::30", [1200, 500, 30], None)],
)
def test_mixture_says_how_training_draws(tmp_path, data, caps, weights):
    """Rows, cap, share, and passes over a source in an epoch: as SD_Data.SampleOrder draws them."""
    for name, count in (("a", 1200), ("b", 500), ("c", 40)):
        (tmp_path / name / "dataset").mkdir(parents=True)
        sd.files.write_manifest(tmp_path / name / "dataset", {"counts": {"train": count, "val": 7}})
    run("06_report.py", "--data", data, "--data_root", tmp_path, "--out", tmp_path / "mixture.html")
    content = (tmp_path / "mixture.html").read_text()
    assert Page(content).texts.count("Sources by weight") == 1
    head, *rows = cells(content)
    assert head == ["source", "rows", "cap", "share", "passes", ""]
    assert [row[:2] for row in rows] == [["a", "1,200"], ["b", "500"], ["c", "40"]]
    told = [part.split(":")[2] if part.count(":") == 2 else "–" for part in data.split(",")]
    assert [row[2] for row in rows] == told
    draws = sd.data.SampleOrder(caps, weights, seed=0).draws
    for (_, _, _, share, passes, _), count, drawn in zip(rows, caps, draws):
        assert abs(float(share.rstrip("%")) / 100 - drawn / sum(caps)) < 0.0005 + 1 / sum(caps)
        assert abs(float(passes) - drawn / count) < 0.005 + 1 / count


def test_mixture_without_a_dataset(tmp_path):
    (tmp_path / "a" / "images").mkdir(parents=True)
    run("06_report.py", "--data", "a", "--data_root", tmp_path, "--out", tmp_path / "a.html")
    assert cells((tmp_path / "a.html").read_text())[1:] == [["a", "no dataset/", "–", "0.0%", "–", ""]]


# --- latents and their VAE


@pytest.fixture(scope="module")
def encoded(tmp_path_factory):
    """A folder of 30 pictures with latents, and `vae` beside it, which encoded them."""
    root = tmp_path_factory.mktemp("encoded")
    run("00_make_shapes.py", "--out", root / "things", "--count", 30, "--shard_size", 10, "--size", 16)
    save_vae(root / "vae")
    encode_latents.main(
        [f"--images={root}/things/images", f"--vae={root}/vae", f"--out={root}/things/latents", "--size=16"]
        + ["--device=cpu", "--workers=0"]
    )
    return root


def save_vae(folder: Path, seed=0, scale=0.5):
    torch.manual_seed(seed)
    config = SD_Model.VAEConfig(
        channels=(8,), num_res_blocks=0, norm_groups=4, mid_attention=False, patch=4, scaling_factor=scale
    )
    sd.weights.parts.save_vae(SD_Model.VAE(config), folder)


def test_latents_are_decoded_by_their_own_vae(encoded, tmp_path):
    run("06_report.py", "--in", encoded / "things", "--out", tmp_path / "a.html", "--pictures", 5)
    page = Page((tmp_path / "a.html").read_text())
    assert page.tags.count("img") == 5 + 2 * 5 and any("mean PSNR" in text for text in page.texts)
    run(
        "06_report.py",
        "--in",
        encoded / "things",
        "--out",
        tmp_path / "b.html",
        "--pictures",
        5,
        "--vae",
        encoded / "vae",
    )
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()


def test_latents_of_buckets_and_mirror_images(encoded, tmp_path):
    """Each picture beside its latents in their shape; mirror images count once."""
    for i, (h, w) in enumerate([(20, 20), (20, 40), (40, 20)] * 3):
        (tmp_path / "own").mkdir(exist_ok=True)
        cv2.imwrite(str(tmp_path / f"own/{i}.png"), np.full((h, w, 3), 20 * i, np.uint8))
        (tmp_path / f"own/{i}.txt").write_text(f"number {i}")
    run("01f_folder.py", "--in", tmp_path / "own", "--out", tmp_path / "things")
    encode_latents.main(
        [f"--images={tmp_path}/things/images", f"--vae={encoded}/vae", f"--out={tmp_path}/things/latents", "--size=16"]
        + ["--device=cpu", "--workers=0", "--buckets", "--flip"]
    )
    assert len(list((tmp_path / "things/latents").glob("*.npy"))) == 3
    run("06_report.py", "--in", tmp_path / "things", "--out", tmp_path / "a.html")
    content = (tmp_path / "a.html").read_text()
    assert Page(content).tags.count("img") == 9 + 2 * 9 and "<b>9</b><span>with latents" in content


@pytest.mark.parametrize(("change", "message"), [({"seed": 1}, "other weights"), ({"scale": 0.25}, "another scale")])
def test_another_vae_is_refused(encoded, tmp_path, change, message):
    """One of other weights, and one of the same weights and another scaling factor; no page is written."""
    save_vae(tmp_path / "other", **change)
    arguments = "--in", encoded / "things", "--out", tmp_path / "a.html", "--vae", tmp_path / "other"
    said = run("06_report.py", *arguments, status=2)
    assert message in said and str(encoded / "vae") in said and not (tmp_path / "a.html").exists()


@pytest.mark.parametrize("content", [None, b"", b"no weights"])
def test_what_is_no_vae_is_refused(encoded, tmp_path, content):
    path = tmp_path / "vae.safetensors"
    if content is not None:
        path.write_bytes(content)
    arguments = "--in", encoded / "things", "--out", tmp_path / "a.html", "--vae", path
    assert "cannot load the VAE" in run("06_report.py", *arguments, status=2)


def test_a_vae_that_is_not_there_leaves_latents_undecoded(encoded, tmp_path):
    shutil.copytree(encoded / "things", tmp_path / "things")
    path = tmp_path / "things" / "latents" / "manifest.json"
    path.write_text(path.read_text().replace(str(encoded / "vae"), "some/hub"))
    run("06_report.py", "--in", tmp_path / "things")
    content = (tmp_path / "things" / "report.html").read_text()
    assert "30 latents of 16 px, mean, VAE some/hub. Not decoded" in content


# --- tars that cannot be read


def members(name: str, size: int, body: bytes) -> bytes:
    """The start of a tar: a member that says it has `size` bytes, and what follows its header."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT) + body


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda data, name: None, "cannot read 00001.tar"),
        (lambda data, name: b"", "cannot read 00001.tar"),
        (lambda data, name: b"\x1f\x8b" + data[2:], "cannot read 00001.tar"),
        (lambda data, name: data[:520], "cannot read 00001.tar"),
        (lambda data, name: data[:9000], "cannot read 00001.tar"),
        (lambda data, name: bytes(10240), "not in 00001.tar"),
        (lambda data, name: members(name, 1 << 50, data), "cannot read 00001.tar"),
        (lambda data, name: members(name, 512, b"<html>".ljust(512)), "html"),
    ],
    ids=["absent", "empty", "other format", "cut", "cut later", "no members", "claims a petabyte", "no picture"],
)
def test_pictures_of_spoilt_tars_are_told(encoded, tmp_path, spoil, message):
    """The page is made; the pictures of other tars are shown; in place of each lost one stands why."""
    shutil.copytree(encoded / "things" / "images", tmp_path / "things" / "images")
    path = tmp_path / "things" / "images" / "00001.tar"
    with tarfile.open(path) as tar:
        name = tar.getnames()[0]
    data = spoil(path.read_bytes(), name)
    path.unlink() if data is None else path.write_bytes(data)
    run("06_report.py", "--in", tmp_path / "things", "--pictures", 30)
    page = Page((tmp_path / "things" / "report.html").read_text())
    lost = [text for text in page.texts if "00001.tar" in text or text == "html"]
    shown = page.tags.count("img")
    assert 20 <= shown < 30 and shown + len(lost) == 30 and any(message in text for text in lost)


@pytest.mark.skipif(not shutil.which("chromium"), reason="no browser")
def test_browser_draws_it(shapes, tmp_path):
    run("06_report.py", "--in", shapes, "--out", tmp_path / "a.html", "--pictures", 3)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{tmp_path}/a.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert len(re.findall("<img ", done.stdout)) == 3 and "Refused" not in done.stderr
