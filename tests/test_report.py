"""06_report.py: one page that asks for nothing outside, whose numbers are those of the data."""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import numpy as np
import pytest
from test_data_pipeline import load, run, write_rows

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
    manifest = REPORT.common.read_json(shapes / "filtered" / "manifest.json")
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


@pytest.mark.skipif(not shutil.which("chromium"), reason="no browser")
def test_browser_draws_it(shapes, tmp_path):
    run("06_report.py", "--in", shapes, "--out", tmp_path / "a.html", "--pictures", 3)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", f"file://{tmp_path}/a.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert len(re.findall("<img ", done.stdout)) == 3 and "Refused" not in done.stderr
