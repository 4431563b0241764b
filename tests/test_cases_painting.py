"""Painting: what people reported of programs of this kind, with the right values. Case numbers are those of the list.

pytest tests/test_cases_painting.py
"""

import codecs
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from binding import rebind
from conftest import make_pipeline, randomise
from PIL import Image
from PIL.PngImagePlugin import PngInfo

import sd.output
import sd.painting
import sd.pictures
import sd.samplers
import SD_ImageGen
from sd import pnginfo, prompts
from sd.errors import InputError
from sd.samplers import original_timesteps
from sd.usertext import read_user_text, user_lines
from SD_Model import NoiseSchedule, TextEncoder


@pytest.fixture(scope="module")
def model(small_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "sd-1.5.v2"
    make_pipeline(small_tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(clip_tokenizer):
    config = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    encoder = TextEncoder.new(config, clip_tokenizer)
    randomise(encoder.model)
    return encoder


def paint(model, out, *flags):
    SD_ImageGen.main(["--model", str(model), "--steps", "2", "--width", "32", "--height", "32", "--device", "cpu",
                      "--out", str(out), *flags])  # fmt: skip


def pixels(path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def no_model(monkeypatch):
    """Opening a model fails the test: what is wrong must be said before."""
    monkeypatch.setattr(SD_ImageGen, "open_model", lambda *a, **k: pytest.fail("a model was opened"))


# ----------------------------------------------------------------------------------------------------------------
# 37, 38: nothing done is lost or overwritten
# ----------------------------------------------------------------------------------------------------------------


def test_ctrl_c_keeps_what_is_done(model, tmp_path, monkeypatch, capsys):
    """Case 37: the third batch is interrupted: two batches are on disk, whole, and the program says so."""
    calls, decode = [], sd.painting.decode_latents

    def interrupted(*args, **kwargs):
        calls.append(names(tmp_path / "out"))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode(*args, **kwargs)

    rebind(sd.painting, "decode_latents", interrupted, monkeypatch.setattr)
    with pytest.raises(SystemExit) as stop:
        paint(model, tmp_path / "out", "--prompt", "a", "--n", "12", "--batch", "2")
    assert stop.value.code == 130 and "4 of 12 pictures" in capsys.readouterr().err
    assert calls == [[], ["00000.png", "00001.png"], [f"{i:05d}.png" for i in range(4)]]
    monkeypatch.undo()
    paint(model, tmp_path / "whole", "--prompt", "a", "--n", "4", "--batch", "2")
    for i in range(4):
        assert np.array_equal(pixels(tmp_path / "out" / f"{i:05d}.png"), pixels(tmp_path / "whole" / f"{i:05d}.png"))


def test_ctrl_c_before_the_first_picture(model, tmp_path, monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(SD_ImageGen, "open_model", interrupt)
    with pytest.raises(SystemExit) as stop:
        paint(model, tmp_path / "out", "--prompt", "a")
    assert stop.value.code == 130 and "0 of 1 pictures" in capsys.readouterr().err


def test_failing_picture_keeps_the_others(model, tmp_path, monkeypatch):
    """Its neighbours in the batch are saved, the batches before too, and the sentence names its seed."""
    decode = sd.painting.decode_latents

    def fail_at_5(vae, latents, batch, device, dtype):
        latents = latents.clone()
        wanted = sd.painting.initial_noise([5], tuple(latents.shape[1:]))
        bad = ((latents - wanted).abs().amax((1, 2, 3)) < 1e-5).nonzero()
        latents[bad] = torch.nan
        return decode(vae, latents, batch, device, dtype)

    rebind(sd.painting, "decode_latents", fail_at_5, monkeypatch.setattr)
    rebind(
        sd.painting, "make_sampler", lambda *a: lambda model, x, *b, **k: x, monkeypatch.setattr
    )  # the noise as it was
    with pytest.raises(InputError, match=r"seed 5 failed: the UNet.*; 7 of 12 pictures are painted"):
        paint(model, tmp_path / "out", "--prompt", "a", "--n", "12", "--batch", "4")
    assert names(tmp_path / "out") == [f"{i:05d}.png" for i in (0, 1, 2, 3, 4, 6, 7)]


def test_full_disk_leaves_no_half_picture(model, tmp_path, monkeypatch):
    write, calls = Path.write_bytes, []

    def full(path, data):
        calls.append(path)
        if len(calls) == 3:
            write(path, data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="00002.png could not be written .No space.*2 of 4 pictures"):
        paint(model, tmp_path / "out", "--prompt", "a", "--n", "4", "--batch", "1")
    assert names(tmp_path / "out") == ["00000.png", "00001.png"]


def test_too_little_memory_is_one_sentence(model, tmp_path, monkeypatch):
    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")
        yield

    rebind(sd.painting, "sample_batches", exhausted, monkeypatch.setattr)
    with pytest.raises(InputError, match="--batch 4 is too much for cpu's memory: 0 of 1"):
        paint(model, tmp_path / "out", "--prompt", "a")


def test_memory_does_not_grow_with_the_prompts(model, tmp_path, monkeypatch):
    """Of 300 pictures no more than 64 have contexts at once, and no more than a batch is decoded at once."""
    encoded, decoded, encode, decode = [], [], sd.painting.encode_pairs, sd.painting.decode_latents
    rebind(
        sd.painting,
        "encode_pairs",
        lambda e, a, b, c: encoded.append(len(a)) or encode(e, a, b, c),
        monkeypatch.setattr,
    )
    rebind(
        sd.painting, "decode_latents", lambda v, x, *a: decoded.append(len(x)) or decode(v, x, *a), monkeypatch.setattr
    )
    rebind(sd.painting, "make_sampler", lambda *a: lambda model, x, *b, **k: x, monkeypatch.setattr)
    rebind(sd.output, "save_png", lambda path, *a: path.touch(), monkeypatch.setattr)
    monkeypatch.setattr(sd.output.Output, "save_grid", lambda *a: None)
    paint(model, tmp_path / "out", "--prompt", "a", "--n", "300", "--batch", "30", "--width", "8", "--height", "8")
    assert max(encoded) == 60 and sum(encoded) == 300 and max(decoded) == 30 and sum(decoded) == 300
    assert len(names(tmp_path / "out")) == 300


def test_numbers_go_on_and_nothing_is_overwritten(model, tmp_path):
    """Case 38: three runs into one folder, with what another program left there; and one file."""
    out = tmp_path / "out"
    paint(model, out, "--prompt", "a", "--n", "2")
    first = {name: (out / name).read_bytes() for name in names(out)}
    assert sorted(first) == ["00000.png", "00001.png", "grid.png"]
    (out / "00007.png").write_bytes(b"not ours")
    paint(model, out, "--prompt", "b", "--n", "2", "--seed", "5")
    assert names(out) == ["00000.png", "00001.png", "00007.png", "00008.png", "00009.png", "grid.png", "grid_00008.png"]
    assert all((out / name).read_bytes() == data for name, data in first.items())
    assert (out / "00007.png").read_bytes() == b"not ours"
    paint(model, out, "--prompt", "b", "--seed", "5", "--overwrite")
    assert len(names(out)) == 7 and np.array_equal(pixels(out / "00000.png"), pixels(out / "00008.png"))

    paint(model, tmp_path / "one.png", "--prompt", "a")
    before = (tmp_path / "one.png").read_bytes()
    with pytest.raises(InputError, match="one.png is there already"):
        paint(model, tmp_path / "one.png", "--prompt", "b")
    assert (tmp_path / "one.png").read_bytes() == before
    paint(model, tmp_path / "one.png", "--prompt", "b", "--overwrite")
    assert (tmp_path / "one.png").read_bytes() != before


def test_the_last_line_names_the_files(model, tmp_path, capsys):
    """One picture: its path. Several: the first, the last and the grid, in as many columns as were asked for."""

    def last(out, *flags):
        paint(model, out, *flags)
        return capsys.readouterr().out.splitlines()[-1]

    out, prompts = tmp_path / "out", tmp_path / "prompts.jsonl"
    assert last(out, "--prompt", "a") == f"{out}/00000.png"
    assert last(tmp_path / "one.png", "--prompt", "a") == f"{tmp_path}/one.png"
    prompts.write_text("".join(json.dumps({"prompt": p, "seed": i}) + "\n" for i, p in enumerate(["b " * 99, "", "c"])))
    flags = ["--prompts_file", str(prompts), "--batch", "2", "--grid", "3"]
    assert last(out, *flags) == f"{out}/00001.png to {out}/00003.png, {out}/grid_00001.png"
    assert names(out) == ["00000.png", "00001.png", "00002.png", "00003.png", "grid_00001.png"]
    painted = np.stack([pixels(out / f"0000{i}.png") for i in (1, 2, 3)]).astype(np.uint8)
    assert np.array_equal(pixels(out / "grid_00001.png"), sd.pictures.grid(painted, 3, labels=["b " * 99, "", "c"]))
    with pytest.raises(InputError, match="--grid wants at least 1, found 0"):
        paint(model, out, *flags[:-1], "0")


def make(*words, **variables) -> subprocess.CompletedProcess:
    root = Path(SD_ImageGen.__file__).parent
    return subprocess.run(["make", "-s", "VENV=none", *words], cwd=root, capture_output=True, text=True,
                          env=os.environ | variables)  # fmt: skip


TYPED = ['it\'s $5 "a" `touch x` $(touch x) $$ ${HOME} \\ # %', "--help", "赤いリンゴ", "$(shell touch x)"]


@pytest.mark.parametrize("typed", TYPED)
def test_make_paint_hands_a_prompt_on_as_it_was_typed(tmp_path, typed):
    """On make's command line and in the environment, neither make nor the shell reads anything in it."""
    (tmp_path / "stub.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    stub = f"PYTHON={sys.executable} {tmp_path}/stub.py"
    for done in (make("paint", stub, f"PROMPT={typed}", f"MODEL=m {typed}"),
                 make("paint", stub, PROMPT=typed, MODEL=f"m {typed}")):  # fmt: skip
        given = json.loads(done.stdout)
        assert given[:3] == ["SD_ImageGen.py", f"--model=m {typed}", f"--prompt={typed}"], done.stderr


def test_make_paint_paints(model, tmp_path):
    """With a model in another folder: the last line is the picture's path."""
    python = f"PYTHON={sys.executable}"
    done = make("paint", python, f"MODEL={model}", f"OUT={tmp_path}/o's")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{tmp_path}/o's/00000.png"
    with Image.open(done.stdout.splitlines()[-1]) as picture:
        said = json.loads(picture.text["sd"])
    assert [said[k] for k in ("prompt", "sampler", "steps", "cfg")] == ["a red apple, 3d render", "dpmpp_2m", 20, 5]


def test_two_programs_in_one_folder(tmp_path, monkeypatch, capsys):
    """A number that another program took in the meantime is left to it."""
    picture, settings = np.zeros((8, 8, 3), np.uint8), {}
    ours, theirs = (sd.output.Output(str(tmp_path), 3, False) for _ in range(2))
    ours.save(0, picture, settings)
    theirs.save(0, picture + 1, settings)
    ours.save(1, picture, settings)
    theirs.save(1, picture + 1, settings)
    assert [pixels(tmp_path / f"{i:05d}.png").max() for i in range(4)] == [0, 1, 0, 1] and len(names(tmp_path)) == 4

    def no_links(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)  # as on FAT
    ours.save(2, picture, settings)
    with pytest.raises(FileExistsError):
        sd.output.save_png(tmp_path / "00004.png", picture + 1, None, overwrite=False)
    assert len(names(tmp_path)) == 5 and pixels(tmp_path / "00004.png").max() == 0


def test_a_grid_is_one_that_pillow_opens(tmp_path, monkeypatch, capsys):
    """Case 41: 720 pictures of 512 pixels would be refused; 289 with their prompts are 89.2 million pixels, below the
    warning; in 10 columns there may be as many rows as fit."""
    assert sd.output.grid_capacity(512, 512) == 17**2
    assert (17 * 600 + 2) * (17 * 514 + 2) <= Image.MAX_IMAGE_PIXELS < (18 * 600 + 2) * (18 * 514 + 2)
    assert sd.output.grid_capacity(512, 512, 10) == 280
    assert (28 * 600 + 2) * 5142 <= Image.MAX_IMAGE_PIXELS < (29 * 600 + 2) * 5142
    three = ["a word that is so long that it takes up three lines and more of them " * 2] * 4
    sheet = sd.pictures.grid(np.zeros((4, 512, 512, 3), np.uint8), labels=three)
    assert sheet.shape == (2 * 600 + 2, 2 * 514 + 2, 3)  # what the capacity counts on
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 354 * 262)
    output = sd.output.Output(str(tmp_path), 6, False)
    for i in (0, 5, 2, 4, 1, 3):  # long prompts are painted after short ones
        output.save(i, np.full((8, 8, 3), i, np.uint8), {})
    assert output.save_grid({}, three) == tmp_path / "grid.png"
    grid = pixels(tmp_path / "grid.png")
    assert grid.shape == (354, 262, 3)
    for i, (y, x) in enumerate((y, x) for y in (2, 178) for x in (2, 132)):
        assert (grid[y : y + 128, x : x + 128] == i).all()
    assert "the first 4 of 6" in capsys.readouterr().out


# ----------------------------------------------------------------------------------------------------------------
# 39: prompt files and seeds
# ----------------------------------------------------------------------------------------------------------------

TEXT = "ein Bär\u2028noch ein\x85Bär\x0bdrei\n\n  zwei \r\ndrei\rvier"
LINES = ["ein Bär\u2028noch ein\x85Bär\x0bdrei", "zwei", "drei", "vier"]


@pytest.mark.parametrize("mark,encoding", [
    (b"", "utf-8"), (codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
])  # fmt: skip
def test_prompt_files_as_people_save_them(tmp_path, mark, encoding):
    path = tmp_path / "prompts.txt"
    path.write_bytes(mark + TEXT.encode(encoding))
    rows = prompts.read_prompts(path)
    assert [row["prompt"] for row in rows] == LINES
    assert [row["where"] for row in rows] == [f"{path}, line {n}" for n in (1, 3, 4, 5)]
    assert sd.painting.sample_prompts({"sample_prompts": str(path)}, None) == LINES
    (tmp_path / "p.JSONL").write_bytes(mark + '{"prompt": "a\u2028b"}\r\n{"prompt": "c", "x": 1}'.encode(encoding))
    assert [row["prompt"] for row in prompts.read_prompts(tmp_path / "p.JSONL")] == ["a\u2028b", "c"]


@pytest.mark.parametrize("data", ["Bär".encode("cp1252"), "熊".encode("shift_jis"), "a bear".encode("utf-16-le"),
                                  b"\xff\xfea"])  # fmt: skip
def test_other_encodings_are_refused_by_name(tmp_path, data):
    (tmp_path / "p.txt").write_bytes(data)
    with pytest.raises(InputError, match="p.txt (is not|holds NUL).*: save it as UTF-8"):
        read_user_text(tmp_path / "p.txt")
    (tmp_path / "q.txt").write_bytes("Bär".encode("cp1252"))
    assert read_user_text(tmp_path / "q.txt", "cp1252") == "Bär" and user_lines("") == []


@pytest.mark.parametrize("row,message", [
    ('{"prompt": "c", "seed": "5"}', "seed wants a whole number from 0 to 4294967295, found '5'"),
    ('{"prompt": "c", "seed": null}', "seed wants"),
    ('{"prompt": "c", "seed": 1.5}', "seed wants"),
    ('{"prompt": "c", "seed": true}', "seed wants"),
    ('{"prompt": "c", "seed": -1}', "seed wants"),
    ('{"prompt": "c", "seed": 18446744073709551616}', "seed wants"),
    ('{"prompt": "c", "seed": 4294967295}', "last seed wants"),  # with --n 2 its second picture has 2^32
    ('{"prompt": "c", "negative": null}', "`negative` wants text, found null"),
    ('{"prompt": 5}', "`prompt` wants text, found 5"),
    ('{"prompt": "\\ud800"}', "`prompt` wants text in UTF-8"),
    ('{"prompt": "a\\u0000b"}', "`prompt` wants text in UTF-8"),
    ('{"prompt": "(a:1.2.3)"}', "a weight such as"),
    ('{"text": "c"}', "wants a JSON object with `prompt`"),
    ("5", "wants a JSON object with `prompt`"),
    ("null", "wants a JSON object with `prompt`"),
    ("[1, 2]", "wants a JSON object with `prompt`"),
    ("[" * 100_000, "wants a JSON object"),
    ("{'prompt': 'c'}", "wants a JSON object"),
])  # fmt: skip
def test_a_bad_row_is_named_before_any_work(tmp_path, no_model, row, message):
    """Case 39: the third row, on line 4, costs nothing of the two before it, which were not begun."""
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n' + row + "\n")
    with pytest.raises(InputError, match=rf"p.jsonl, line 4:? .*{re.escape(message)}"):
        paint(tmp_path, tmp_path / "out", "--prompts_file", str(path), "--n", "2")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("flags,message", [
    (["--prompt", "a", "--seed", str(2**64)], "--seed: seed wants"),
    (["--prompt", "a", "--seed", "-1"], "--seed: seed wants"),
    (["--prompt", "a", "--seed", str(2**32 - 2), "--n", "3"], "the last seed wants"),
    (["--prompt", "a", "--out", "pic.jpg"], "pic.jpg names no PNG"),
    (["--prompt", "a", "--cfg", "nan"], "--cfg wants"),
    (["--prompt", "a", "--n", "0"], "--n wants"),
    (["--prompt", "(a:1..2)"], "--prompt: a weight such as"),
    (["--prompt", "\udcff"], "wants text in UTF-8"),
    (["--prompt", "a", "--ddim_timesteps", "a1111", "--sampler", "euler"], "--ddim_timesteps is for"),
    (["--prompt", "a", "--spacing", "leading", "--sampler", "dpmpp_2m_karras"], "--spacing says nothing"),
    (["--prompts_file", "no.txt"], "cannot read no.txt"),
    (["--prompts_file", "p.csv"], "not .csv"),
    (["--from_png", "no.png"], "--from_png wants a PNG"),
])  # fmt: skip
def test_flags_are_checked_before_any_work(tmp_path, no_model, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=re.escape(message)):
        paint(tmp_path, "out", *flags)
    assert names(tmp_path) == []


def test_seeds_beyond_32_bits_would_repeat():
    """Why they are refused: torch's CPU generator drops the bits above."""
    assert torch.equal(sd.painting.initial_noise([7], (4, 2, 2)), sd.painting.initial_noise([7 + 2**32], (4, 2, 2)))
    assert prompts.SEEDS == 2**32


# ----------------------------------------------------------------------------------------------------------------
# 40: pictures to start from
# ----------------------------------------------------------------------------------------------------------------

RAMP = [0, 85, 170, 255]
DEEP = np.array([RAMP]) * 257


@pytest.mark.parametrize("name,picture", [
    ("16.png", Image.fromarray(DEEP.astype(np.uint16))),
    ("16.tif", Image.fromarray(DEEP.astype(np.uint16))),
    ("float.tif", Image.fromarray((np.array([RAMP]) / 255).astype(np.float32))),
    ("8.png", Image.fromarray(np.array([RAMP], np.uint8))),
    ("8.bmp", Image.fromarray(np.array([RAMP], np.uint8)).convert("RGB")),
])  # fmt: skip
def test_a_ramp_keeps_its_values(tmp_path, name, picture):
    picture.save(tmp_path / name)
    loaded = sd.painting.load_picture(str(tmp_path / name), 4, 1)
    assert loaded.shape == (1, 3, 1, 4)
    expected = (torch.tensor(RAMP) / 127.5 - 1).expand(1, 3, 1, 4)
    torch.testing.assert_close(loaded, expected, atol=1e-6, rtol=0)


def test_transparency_is_white_and_bad_pictures_are_refused(tmp_path):
    clear = np.zeros((2, 2, 4), np.uint8)
    clear[0, 0] = 10, 20, 30, 255
    for name in ("a.png", "a.tif", "a.webp"):
        Image.fromarray(clear).save(tmp_path / name, **({"lossless": True} if name == "a.webp" else {}))
        expected = np.full((2, 2, 3), 255)
        expected[0, 0] = 10, 20, 30
        assert np.array_equal(sd.pictures.read_picture(str(tmp_path / name)), expected), name
    for k, values in enumerate(([[0.0, 256.0]], [[-1.0, 1.0]], [[0.0, math.nan]], [RAMP])):  # what is white there?
        Image.fromarray(np.array(values, np.float32)).save(tmp_path / f"{k}.tif")
        with pytest.raises(InputError, match=f"{k}.tif is none .value_range.: save it as a PNG"):
            sd.pictures.read_picture(str(tmp_path / f"{k}.tif"))
    Image.new("RGB", (64, 64)).save(tmp_path / "cut.jpg")
    (tmp_path / "cut.jpg").write_bytes((tmp_path / "cut.jpg").read_bytes()[:-40])
    with pytest.raises(InputError, match="cut.jpg is none .truncated"):
        sd.pictures.read_picture(str(tmp_path / "cut.jpg"))
    (tmp_path / "page.png").write_text("<html>")
    with pytest.raises(InputError, match="page.png is none .html"):
        sd.pictures.read_picture(str(tmp_path / "page.png"))
    assert sd.pictures.decode_image((tmp_path / "a.png").read_bytes()).shape == (2, 2, 3)


# ----------------------------------------------------------------------------------------------------------------
# Prompt weights, BREAK, and 53: long prompts
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt,expected", [
    ("normal text", [[("normal text", 1.0)]]),
    ("", [[]]),
    ("an (important) word", [[("an ", 1.0), ("important", 1.1), (" word", 1.0)]]),
    ("(a:1.3) [b] ((c))", [[("a", 1.3), (" ", 1.0), ("b", 1 / 1.1), (" ", 1.0), ("c", 1.1 * 1.1)]]),
    ("(a (b:1.5):0.5)", [[("a ", 0.5), ("b", 0.75)]]),
    ("(open", [[("open", 1.1)]]),
    (r"\(literal\] \\", [[(r"(literal] " + "\\", 1.0)]]),
    ("smile :) or 16:9", [[("smile :) or 16:9", 1.0)]]),
    ("(x: 1.2 )", [[("x", 1.2)]]),
    ("one BREAK two\nBREAK\nthree", [[("one", 1.0)], [("two", 1.0)], [("three", 1.0)]]),
    ("(one BREAK two:1.2) BREAKER", [[("one", 1.2)], [("two", 1.2), (" BREAKER", 1.0)]]),
])  # fmt: skip
def test_weights_as_a1111_writes_them(prompt, expected):
    parsed = prompts.parse_prompt(prompt)
    assert [[text for text, _ in part] for part in parsed] == [[text for text, _ in part] for part in expected]
    for part, wanted in zip(parsed, expected):
        assert [w for _, w in part] == pytest.approx([w for _, w in wanted])


def test_weights_in_numbers(clip):
    """Token states times their weights, then the chunk's mean restored; recomputed here from the tokenizer up."""
    tokens = clip.tokenizer("a red cat on a mat")["input_ids"]
    assert len(tokens) == 8
    ids = torch.tensor([tokens + [tokens[-1]] * 69])
    weights = torch.ones(77)
    weights[2], weights[3] = 1.3 * 1.1, 1.1  # `red` and `cat`, behind the start and `a`
    with torch.no_grad():
        z = clip.model(input_ids=ids).last_hidden_state[0]
    expected = z * weights[:, None]
    expected = expected * (z.mean() / expected.mean())
    parsed = prompts.parse_prompt("a ((red:1.3) cat) on a mat")
    (context,) = sd.painting.encode_texts(clip, [parsed])
    torch.testing.assert_close(context, expected)
    assert (context - z).abs().max() > 0.1
    with_break = prompts.parse_prompt("a ((red:1.3) cat) on a mat BREAK a hat")
    first, second = sd.painting.encode_texts(clip, [with_break])[0].split(77)
    torch.testing.assert_close(first, expected)  # the mean is each chunk's own
    torch.testing.assert_close(second, sd.painting.encode_texts(clip, ["a hat"])[0])


def test_a_prompt_without_syntax_is_bit_for_bit_the_old_picture(model, tmp_path):
    for name, flags in (("on", []), ("off", ["--plain_prompt"])):
        paint(model, tmp_path / f"{name}.png", "--prompt", "a red circle, 16:9", "--negative", "b", *flags)
        paint(model, tmp_path / f"{name}2.png", "--prompt", "a (red:1.9) circle", "--negative", "b", *flags)
    assert np.array_equal(pixels(tmp_path / "on.png"), pixels(tmp_path / "off.png"))
    assert np.abs(pixels(tmp_path / "on2.png") - pixels(tmp_path / "off2.png")).max() > 1  # the flag does something
    for name, word in (("on2", "weights"), ("off2", "plain")):
        info = Image.open(tmp_path / f"{name}.png").info
        assert json.loads(info["sd"])["prompt_syntax"] == word
        assert ("Emphasis: Original" in info["parameters"]) == (name == "on2")
    # as revision fb70f60 computed it, without any of the new code
    opened = SD_ImageGen.open_model(model)
    encoder, vae = opened.text_encoder(), opened.vae()
    with torch.no_grad():
        states = encoder(torch.cat([encoder.tokenize([t]) for t in ("a red circle, 16:9", "b", "")]))
        both = torch.stack([states[1], states[0]])
        unet = opened.unet()

        def predict(x, t):
            null, text = unet(torch.cat([x, x]), torch.full((2,), t), both).chunk(2)
            return null + 7.5 * (text - null)

        x = torch.randn((1, 4, 4, 4), generator=torch.Generator().manual_seed(0))
        x = sd.samplers.ddim(predict, x, opened.schedule, 2, **opened.sampling)
        image = ((vae.decode(x).clamp(-1, 1) + 1) * 127.5).round()[0].permute(1, 2, 0).numpy()
    assert np.array_equal(pixels(tmp_path / "on.png"), image.astype(int))


def counts(clip, text, rule) -> list[int]:
    """Words in each chunk."""
    ids, _ = prompts.prompt_chunks(clip, prompts.parse_prompt(text), rule)
    return [int(((row != ids[0, 0]) & (row != clip.tokenizer.eos_token_id)).sum()) for row in ids]


def test_where_long_prompts_are_cut(clip):
    """Case 53: 70 words, a comma, then 20 words. A1111 moves what follows the comma on, if at most 20 tokens back."""
    text = "a " * 64 + ", " + "b " * 20
    assert counts(clip, text, "padded") == counts(clip, text, "comfyui") == [75, 10]
    assert counts(clip, text, "a1111") == [65, 20]  # the comma is token 64: 75 - 64 <= 20
    assert counts(clip, "a " * 55 + ", " + "b " * 40, "a1111") == [56, 40]  # 75 - 55 = 20: just in reach
    assert counts(clip, "a " * 54 + ", " + "b " * 40, "a1111") == [75, 20]  # out of reach
    assert counts(clip, "a " * 75 + ", " + "b " * 5, "a1111") == [75, 6]  # a comma does not move itself
    # ComfyUI: a weighted piece of fewer than 8 tokens stays whole, a longer one is cut
    short, long = "a " * 72 + "(b b b b b:1.2) c", "a " * 72 + "(b b b b b b b b:1.2) c"
    assert counts(clip, short, "comfyui") == [72, 6] and counts(clip, long, "comfyui") == [75, 6]
    assert counts(clip, short, "padded") == [75, 3] and counts(clip, "a BREAK b b", "comfyui") == [1, 2]


def test_only_padded_gives_both_sides_one_length(clip):
    long, short = "a " * 80, "b"
    for rule, lengths in (("padded", (154, 154)), ("a1111", (154, 77)), ("comfyui", (154, 77))):
        (context,), (null,) = sd.painting.encode_pairs(clip, [long], [short], rule)
        assert (len(context), len(null)) == lengths

    def attend(x, t, context):  # attention over the context: padding changes it
        return torch.einsum("bchw,btd->bchw", x, torch.softmax(context, 1) * context)

    x = torch.randn(1, 4, 2, 2)
    a, b = context[None], null[None]
    t = torch.zeros(1)
    expected = attend(x, t, b) + 3 * (attend(x, t, a) - attend(x, t, b))
    torch.testing.assert_close(sd.painting.guided(attend, a, b, 3.0)(x, 0), expected)


def test_conventions_paint_different_pictures(model, tmp_path):
    text = "word " * 40 + ", " + "red " * 40  # the small tokenizer needs more than one token a word
    for rule in prompts.LONG_PROMPTS:
        paint(model, tmp_path / f"{rule}.png", "--prompt", text, "--negative", "b", "--long_prompts", rule)
        info = Image.open(tmp_path / f"{rule}.png").info
        assert json.loads(info["sd"])["long_prompts"] == rule
        assert ("Pad conds: True" in info["parameters"]) == (rule == "padded")
    pictures = [pixels(tmp_path / f"{rule}.png") for rule in prompts.LONG_PROMPTS]
    assert np.abs(pictures[0] - pictures[1]).max() > 1 and np.abs(pictures[0] - pictures[2]).max() > 1


# ----------------------------------------------------------------------------------------------------------------
# 54: DDIM's timesteps
# ----------------------------------------------------------------------------------------------------------------


def test_the_original_codes_timesteps():
    assert original_timesteps(6) == [997, 831, 665, 499, 333, 167, 1]
    assert len(original_timesteps(30)) == 31 and original_timesteps(30)[:2] == [991, 958]
    assert original_timesteps(50)[:3] == [981, 961, 941]
    for steps in range(1, 1001):
        stride = 1000 // steps
        a1111 = sorted((int(t) for t in np.clip(np.arange(0, 1000, stride) + 1, 0, 999)), reverse=True)
        comfyui, t = [], 1
        while t < 1000:
            comfyui.append(t)
            t += stride
        assert original_timesteps(steps) == a1111
        assert original_timesteps(steps, clip=False) == comfyui[::-1]


@pytest.mark.parametrize("steps", [6, 20, 30])
def test_ddim_visits_them_and_ends_as_they_do(steps):
    """A1111 in x with abar_0 at the end; ComfyUI as Euler's method in x / sqrt(abar), from sigma times the noise."""
    schedule, seen = NoiseSchedule(), []
    abar = schedule.alphas_cumprod.double()
    g = torch.Generator().manual_seed(0)
    noise, w = torch.randn(1, 4, 3, 3, dtype=torch.float64, generator=g), 0.3

    def model(x, t):
        seen.append(int(t))
        return torch.tanh(x * w + t / 1000)

    ts = [1 + k * (1000 // steps) for k in range(1000 // (1000 // steps) + 1) if k * (1000 // steps) < 1000][::-1]
    x = noise
    for i, t in enumerate(ts):
        prev = abar[ts[i + 1]] if i + 1 < len(ts) else abar[0]
        eps = torch.tanh(x * w + t / 1000)
        x = prev.sqrt() * (x - (1 - abar[t]).sqrt() * eps) / abar[t].sqrt() + (1 - prev).sqrt() * eps
    ours = sd.samplers.ddim(model, noise, schedule, steps, timesteps="a1111")
    torch.testing.assert_close(ours, x)
    assert seen == ts

    sigmas = [*(math.sqrt((1 - abar[t]) / abar[t]) for t in ts), 0.0]
    y = noise * sigmas[0]
    for t, now, after in zip(ts, sigmas, sigmas[1:]):
        y = y + (after - now) * torch.tanh(y / math.sqrt(1 + now**2) * w + t / 1000)
    torch.testing.assert_close(sd.samplers.ddim(model, noise, schedule, steps, timesteps="comfyui"), y)
    seen.clear()
    sd.samplers.ddim(model, noise, schedule, steps)
    assert len(seen) == steps  # the default stays diffusers' list


def test_ddim_timesteps_reach_the_picture(model, tmp_path):
    for name in ("diffusers", "a1111", "comfyui"):
        paint(model, tmp_path / f"{name}.png", "--prompt", "a", "--steps", "6", "--ddim_timesteps", name)
        assert json.loads(Image.open(tmp_path / f"{name}.png").info["sd"])["ddim_timesteps"] == name
    pictures = [pixels(tmp_path / f"{name}.png") for name in ("diffusers", "a1111", "comfyui")]
    assert len({p.tobytes() for p in pictures}) == 3


# ----------------------------------------------------------------------------------------------------------------
# 41, 58: what the PNG says, and --from_png
# ----------------------------------------------------------------------------------------------------------------

BASE = {"prompt": "a", "negative": "", "seed": 1, "steps": 20, "cfg": 7.5, "sampler": "euler", "size": [512, 512],
        "model": "m", "prompt_syntax": "weights"}  # fmt: skip
THEIR_PAIR = re.compile(r'\s*(\w[\w \-/]+):\s*("(?:\\.|[^\\"])+"|[^,]*)(?:,|$)')  # A1111's pattern for the last line


def read_as_a1111(text: str) -> tuple[str, str, dict]:
    *lines, last = text.strip().split("\n")
    side, sides = 0, ["", ""]
    for line in lines:
        line = line.strip()
        if line.startswith("Negative prompt:"):
            side, line = 1, line[16:].strip()
        sides[side] += ("\n" if sides[side] else "") + line
    return *sides, dict(THEIR_PAIR.findall(last))


@pytest.mark.parametrize("sampler,spacing,title,schedule", [
    ("dpmpp_2m", "linspace", "DPM++ 2M", "SGM Uniform"), ("dpmpp_2m", "trailing", "DPM++ 2M", "Simple"),
    ("dpmpp_2m_karras", None, "DPM++ 2M", "Karras"), ("euler", "linspace", "Euler", "Uniform"),
    ("euler_a", "trailing", "Euler a", "Simple"), ("heun", "leading", "Heun", "DDIM"),
    ("ddim", "leading", "DDIM", None),
    ("ddpm", "leading", "DDIM", None),
])  # fmt: skip
def test_samplers_by_names_that_a1111_has(sampler, spacing, title, schedule):
    fields = read_as_a1111(pnginfo.parameters_text(BASE | {"sampler": sampler, "spacing": spacing}))[2]
    assert (fields["Sampler"], fields.get("Schedule type"), fields["RNG"]) == (title, schedule, "CPU")
    assert fields.get("Eta DDIM") == ("1.0" if sampler == "ddpm" else None)
    back, notes = pnginfo.from_parameters(pnginfo.parameters_text(BASE | {"sampler": sampler, "spacing": spacing}))
    assert back["sampler"] == sampler and (schedule in (None, "Karras") or back["spacing"] == spacing)


@pytest.mark.parametrize("model,name", [
    ("models/sd-1.5.v2", "sd-1.5.v2"), ("models/v1-5.pruned.safetensors", "v1-5.pruned"), ("x.CKPT", "x"),
    ("runwayml/stable-diffusion-v1.5", "stable-diffusion-v1.5"), ("runs/7/", "7"),
])  # fmt: skip
def test_model_names_keep_their_dots(model, name):
    assert pnginfo.model_name(model) == name


HARD = [
    "a cat",
    "",
    "a (cat:1.3) [dog] BREAK ((bird))",
    "(a cat:1.3) BREAK (b BREAK c)",
    "cats AND dogs AND BREAK",
    "[a|b] and [c:d:0.5] 16:9",
    r"a \(literal\) back\\slash",
    "Negative prompt: x\n  Negative prompt: y\nSteps: 5, Sampler: z, Seed: 3",
    "<lora:thing:0.8> a, b",
    "smile :) (x",
]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("prompt", HARD)
def test_a1111_reads_the_words_that_were_painted(prompt, plain):
    """Split its way and parsed as its syntax, both prompts have the painted texts and weights, up to upper case."""
    settings = BASE | {"prompt": prompt, "negative": prompt[::-1], "prompt_syntax": "plain" if plain else "weights"}
    text = pnginfo.parameters_text(settings)
    *sides, fields = read_as_a1111(text)
    assert fields["Steps"] == "20" and fields["Size"] == "512x512"
    assert len(re.findall(r"(?m)^\s*Negative prompt:", text)) == 1
    for read, painted in zip(sides, (prompt, prompt[::-1])):
        assert not re.search(r"\bAND\b", read) and not re.search(r"<\w+:[^<>]+>", read)
        assert not re.search(r"(?<!\\)\[[^\[\]]*(\||:\s*[\d.]+\s*\])", read)
        meant = (((painted, 1.0),),) if plain else prompts.parse_prompt(painted)

        def words(parsed):
            pairs = [[(re.sub(r"\s+", "", t).lower().replace("< lora", "<lora"), w) for t, w in p] for p in parsed]
            return [[(t, round(w, 9)) for t, w in part if t] for part in pairs]

        assert words(prompts.parse_prompt(read)) == words(meant)
    ours = pnginfo.split_parameters(text)
    assert ours[0].split() == sides[0].split() and ours[1].split() == sides[1].split()


def test_the_negative_line_is_there_when_empty():
    assert "\nNegative prompt: \nSteps: 20" in pnginfo.parameters_text(BASE)


def test_from_png_paints_the_same_picture(model, tmp_path):
    """Ours: bit for bit, whatever the flags were; flags go on top, and the numbers go on behind."""
    out = tmp_path / "out"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8)).save(tmp_path / "in.png")
    runs = [["--sampler", "euler_a", "--spacing", "trailing", "--cfg", "4"], ["--ddim_timesteps", "a1111"],
            ["--plain_prompt", "--long_prompts", "a1111"], ["--sampler", "dpmpp_2m_karras", "--cfg_rescale", "0.3"],
            ["--init_image", str(tmp_path / "in.png"), "--strength", "0.5"]]  # fmt: skip
    for i, flags in enumerate(runs):
        paint(model, out, "--prompt", "a (red:1.4) circle", "--negative", "[b]", "--seed", "9", *flags)
        SD_ImageGen.main(["--from_png", str(out / f"{2 * i:05d}.png"), "--device", "cpu", "--out", str(out)])
        assert np.array_equal(pixels(out / f"{2 * i:05d}.png"), pixels(out / f"{2 * i + 1:05d}.png")), flags
        told = [json.loads(Image.open(out / f"{2 * i + k:05d}.png").info["sd"]) for k in (0, 1)]
        assert told[0] == told[1]
    SD_ImageGen.main(["--from_png", str(out / "00000.png"), "--seed", "10", "--device", "cpu", "--out",
                      str(tmp_path / "b.png")])  # fmt: skip
    assert np.abs(pixels(tmp_path / "b.png") - pixels(out / "00000.png")).max() > 1
    assert json.loads(Image.open(tmp_path / "b.png").info["sd"])["seed"] == 10


def with_text(path, **texts):
    info = PngInfo()
    for key, value in texts.items():
        info.add_itxt(key, value)
    Image.new("RGB", (8, 8)).save(path, pnginfo=info)
    return path


THEIRS = """a (cat:1.3), AND a dog
in two lines
Negative prompt: ugly
blurry
Steps: 4, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 6.5, Seed: 42, Size: 40x32, Model hash: abc, Model: x, \
Clip skip: 2, Hires upscale: 2, Lora hashes: "a: 1, b: 2", Version: v1.10.1"""


def test_from_png_of_a1111(model, tmp_path, capsys):
    path = with_text(tmp_path / "theirs.png", parameters=THEIRS)
    with pytest.raises(InputError, match="give --model"):
        SD_ImageGen.main(["--from_png", str(path)])
    SD_ImageGen.main(
        ["--from_png", str(path), "--model", str(model), "--device", "cpu", "--out", str(tmp_path / "a.png")]
    )
    told = json.loads(Image.open(tmp_path / "a.png").info["sd"])
    assert told["prompt"] == "a (cat:1.3), AND a dog\nin two lines" and told["negative"] == "ugly\nblurry"
    assert {k: told[k] for k in ("steps", "sampler", "cfg", "seed", "size", "prompt_syntax", "long_prompts")} == {
        "steps": 4, "sampler": "dpmpp_2m_karras", "cfg": 6.5, "seed": 42, "size": [40, 32], "prompt_syntax": "weights",
        "long_prompts": "a1111"}  # fmt: skip
    said = capsys.readouterr().out
    for word in ("Clip skip: 2", "Hires upscale: 2", "Lora hashes: a: 1, b: 2", "noise came from GPU", "AND", "'x'"):
        assert word in said


@pytest.mark.parametrize("line,expected", [
    ("Steps: 4, Sampler: DPM++ 2M, Seed: 1", {"sampler": "dpmpp_2m_karras"}),  # Automatic is Karras there
    ("Steps: 4, Sampler: DPM++ 2M Karras, Seed: 1", {"sampler": "dpmpp_2m_karras"}),
    ("Steps: 4, Sampler: DPM++ 2M, Schedule type: SGM Uniform, Seed: 1",
     {"sampler": "dpmpp_2m", "spacing": "linspace"}),
    ("Steps: 4, Sampler: Euler a, Seed: 1", {"sampler": "euler_a", "spacing": "linspace"}),
    ("Steps: 4, Sampler: DDIM, Seed: 1", {"sampler": "ddim", "ddim_timesteps": "a1111"}),
    ("Steps: 4, Sampler: DDIM, Seed: 1, Pad conds: True", {"long_prompts": "padded"}),
])  # fmt: skip
def test_their_samplers_read_back(line, expected):
    settings, _ = pnginfo.from_parameters("x\n" + line)
    assert expected.items() <= settings.items() and settings["prompt"] == "x"


@pytest.mark.parametrize("texts,message", [
    ({}, "neither `sd` nor `parameters`"),
    ({"sd": '{"prompts": ["a", "b"], "steps": 4}'}, "is a grid"),
    ({"sd": "{", "parameters": "x\nSteps: many, Sampler: Euler, Seed: 1"}, "`Steps`.*'many'"),
    ({"sd": '{"prompt": "x", "seed": 99999999999, "steps": 2, "sampler": "ddim", "model": "m"}'}, "says seed 9999"),
    ({"sd": '{"prompt": "x", "seed": 1, "steps": 2, "sampler": "plms", "model": "m"}'}, "--sampler wants"),
    ({"sd": '[1, 2]'}, "neither"),
])  # fmt: skip
def test_pngs_that_say_nothing_useful(tmp_path, no_model, texts, message):
    path = with_text(tmp_path / "a.png", **texts)
    with pytest.raises(InputError, match=message):
        SD_ImageGen.main(["--from_png", str(path), "--out", str(tmp_path / "out")])
    assert names(tmp_path) == ["a.png"]


def test_an_unknown_sampler_is_asked_for(model, tmp_path, no_model):
    path = with_text(tmp_path / "a.png", parameters="x\nNegative prompt: \nSteps: 4, Sampler: DPM++ SDE, Seed: 1")
    with pytest.raises(InputError, match="DPM.. SDE.*not known here: give --sampler"):
        SD_ImageGen.main(["--from_png", str(path), "--model", str(model), "--out", str(tmp_path / "out")])
    Image.new("RGB", (8, 8)).save(tmp_path / "a.jpg")
    with pytest.raises(InputError, match="found JPEG"):
        SD_ImageGen.main(["--from_png", str(tmp_path / "a.jpg"), "--model", str(model)])


# ----------------------------------------------------------------------------------------------------------------
# 28: what a file does not say of itself
# ----------------------------------------------------------------------------------------------------------------


def test_what_the_user_says_of_the_model_reaches_it(model, tmp_path, monkeypatch):
    open_model, calls = SD_ImageGen.open_model, []

    def watched(source, weights, *told):
        calls.append(told)
        return open_model(source, weights=weights)

    monkeypatch.setattr(SD_ImageGen, "open_model", watched)
    flags = ["--prediction", "v", "--zero_terminal_snr", "--tokenizer", "some/folder"]
    paint(model, tmp_path / "a.png", "--prompt", "a", *flags)
    paint(model, tmp_path / "b.png", "--prompt", "a")
    assert calls == [("v", True, "some/folder"), (None, None, None)]
    told = json.loads(Image.open(tmp_path / "a.png").info["sd"])
    assert (told["prediction"], told["zero_terminal_snr"], told["tokenizer"]) == ("v", True, "some/folder")
    SD_ImageGen.main(["--from_png", str(tmp_path / "a.png"), "--device", "cpu", "--out", str(tmp_path / "c.png")])
    assert calls[2] == calls[0]


# ----------------------------------------------------------------------------------------------------------------
# Found by tests/test_fuzz.py
# ----------------------------------------------------------------------------------------------------------------


def test_weights_with_an_encoder_whose_mean_is_zero():
    """A fresh encoder ends in a norm without biases, so that its mean is 0 but for rounding, and dividing by it gave
    pictures that are not finite. Then tokens are weighed and nothing is scaled; a mean that there is, is restored."""
    states = torch.nn.functional.layer_norm(torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(0)), (16,))
    weights = torch.ones(1, 12)
    weights[0, 3] = 1.3
    assert torch.equal(prompts.weigh(states, weights), states * weights[:, :, None])
    zero = torch.zeros(1, 12, 16)
    assert torch.equal(prompts.weigh(zero, weights), zero)
    states = states + 0.1
    assert abs(prompts.weigh(states, weights).mean().item() - 0.1) < 1e-6


@pytest.mark.parametrize("flag", ["--width", "--height"])
@pytest.mark.parametrize("value", [2**32, 2**63, 10**40, 0, -8])
def test_sides_beyond_all_pictures(flag, value, tmp_path, no_model):
    with pytest.raises(InputError, match=f"{flag} wants 1 to 10,000 pixels"):
        SD_ImageGen.main(["--model", "x", "--prompt", "a", "--out", str(tmp_path / "out"), flag, str(value)])
    assert not (tmp_path / "out").exists()
