"""Grids of pictures with their prompts: pixels kept, text under the right picture, whatever the text"""

import itertools

import numpy as np
import pytest
import torch
from binding import rebind
from PIL import Image

import sd.painting
from sd.pictures import grid, label_font, wrap
from SD_Model import NoiseSchedule


def coloured(n, size):
    """n pictures, each of noise of its own."""
    return np.random.default_rng(0).integers(0, 256, (n, size, size, 3), np.uint8)


def ink(sheet):
    """Where a sheet has dark pixels."""
    return sheet.max(2) < 128


@pytest.mark.parametrize("size, scale, high", [(64, 2, 128 + 18), (128, 1, 128 + 18), (512, 1, 512 + 34)])
def test_labels_lie_under_their_pictures(size, scale, high):
    """Each label in its own cell and nowhere else; pictures pixel for pixel, small ones in larger pixels."""
    pictures, side = coloured(5, size), size * scale
    plain = grid(pictures, 3)
    assert plain.shape == (2 * (size + 2) + 2, 3 * (size + 2) + 2, 3)
    for lettered in range(5):
        labels = ["an apple" if i == lettered else "" for i in range(5)]
        sheet = grid(pictures, 3, labels=labels)
        assert sheet.shape == (2 * (high + 2) + 2, 3 * (side + 2) + 2, 3)
        for i in range(5):
            y, x = 2 + i // 3 * (high + 2), 2 + i % 3 * (side + 2)
            assert np.array_equal(sheet[y : y + side : scale, x : x + side : scale], pictures[i])
            assert np.array_equal(sheet[y + scale - 1 : y + side : scale, x : x + side : scale], pictures[i])
            assert np.array_equal(plain[2 + i // 3 * (size + 2) :, 2 + i % 3 * (size + 2) :][:size, :size], pictures[i])
            sheet[y : y + side, x : x + side] = 255
            assert ink(sheet[y + side : y + high, x : x + side]).any() == (i == lettered)
            sheet[y + side : y + high, x : x + side] = 255
        assert not ink(sheet).any()  # nothing between cells


def test_headings_stand_above_their_rows():
    pictures = np.full((4, 128, 128, 3), 255, np.uint8)
    for first, second in (("held-out pairs", ""), ("", "held-out pairs"), ("so long a heading that " * 9, "")):
        sheet = ink(grid(pictures, 2, labels=[""] * 4, headings=[first, second]))
        half = len(sheet) // 2
        assert sheet[:half].any() == bool(first) and sheet[half:].any() == bool(second)
        assert not sheet[20:half].any() and not sheet[half + 20 :].any()


def test_text_is_broken_between_words_and_elided_after_three_lines():
    font = label_font(128)
    text = "masterpiece, best quality, an extremely detailed portrait of an old sailor with a pipe"
    lines = wrap(text, font, 128)
    assert lines[:2] == ["masterpiece, best", "quality, an extremely"] and len(lines) == 3
    assert lines[2].endswith("…") and text.startswith(" ".join(lines)[:-1])
    whole = wrap(text, font, 128, 9)
    assert " ".join(whole) == text and all(font.getlength(line) <= 128 for line in [*lines, *whole])
    assert all(font.getlength(f"{a} {b.split()[0]}") > 128 for a, b in itertools.pairwise(whole))  # none is shorter
    assert wrap("a red apple\n", font, 128) == ["a red apple"] and wrap(" ", font, 128) == []
    assert wrap("a purple circle in the bottom right on a white background", font, 128)[2] == "background"
    word = "Donaudampfschifffahrtsgesellschaft"
    assert "".join(wrap(f"a {word}", font, 128)[1:]) == word


@pytest.mark.parametrize("size", [1, 64])
def test_any_text_can_be_drawn(size):
    """What the font lacks, half surrogates, control characters, right to left, a megabyte: no crash, the same size."""
    texts = [
        "赤いリンゴの絵" * 9,
        "🍎" * 40,
        "قطة حمراء",
        "\ud800x",
        "\x00\x07\x1b",
        "e\u0301" * 50,
        "\u202eabc",
        "x" * 2**20,
    ]
    texts += ["".join(map(chr, range(start, start + 64))) for start in range(0, 0x1800, 64)]
    sheet = grid(coloured(len(texts), size), labels=texts)
    assert ink(sheet[-60:]).any()
    assert sheet.shape == grid(coloured(len(texts), size), labels=["a word " * 40] * len(texts)).shape


def test_training_s_grids_name_their_prompts(tmp_path, monkeypatch):
    """The file that sample_grid writes is the labelled grid of what was decoded, under the prompts."""
    pictures, prompts = coloured(2, 64), ["a red circle", "a blue star"]
    rebind(sd.painting, "encode_pairs", lambda *a: ([], []), monkeypatch.setattr)
    rebind(sd.painting, "sample_latents", lambda *a, **k: torch.zeros(2, 4, 8, 8), monkeypatch.setattr)
    rebind(sd.painting, "decode_latents", lambda *a: pictures, monkeypatch.setattr)
    net = torch.nn.Linear(1, 1)
    net.config = type("Config", (), {"factor": 8, "latent_channels": 4})
    ema = type("Ema", (), {"unet": net, "text_encoder": None})
    settings = {"dtype": "fp32", "weights_dtype": "fp32", "size": 64, "sample_cfg": 3.0}
    sd.painting.sample_grid(tmp_path / "g.png", ema, None, net, NoiseSchedule(), prompts, settings, torch.device("cpu"))
    with Image.open(tmp_path / "g.png") as picture:
        assert np.array_equal(np.array(picture), grid(pictures, 4, labels=prompts))
    assert not np.array_equal(grid(pictures, 4, labels=prompts), grid(pictures, 4, labels=prompts[::-1]))
