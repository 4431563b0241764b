"""Pictures and captions as people have them: other names, encodings, lists, folders and kinds of picture than expected,
and steps that are left with nothing. The values were worked out by hand or with Pillow."""

import io
import json
import os
import struct
import warnings
import zlib
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageOps
from test_data_pipeline import (
    ALPHA,
    GREY,
    GREY_RGB,
    PICTURE,
    RGBA,
    encode,
    load,
    make_tar,
    on_white,
    raw_png,
    read_all,
    read_split,
    run,
)

import sd.errors
import sd.files
import sd.pictures
import sd.shards
import sd.stream
from sd import usertext
from sd.errors import InputError

JPEG = encode(PICTURE, "JPEG")
ODD = "a\u2028b\u0085c\x0bd\x0ce\x1cf"  # no character of these ends a line


def write(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def got(out: Path) -> dict[str, str]:
    """Caption by file of what 01f wrote."""
    return {s["json"]["url"].removeprefix("file:"): s["txt"] for _, s in read_all(out)}


def rejected(out: Path) -> dict[str, int]:
    return sd.files.read_json(out / "images" / "manifest.json")["rejected"]


# ---------------------------------------------------------------------------------------------------------------------
# Text (cases 39, 43, 44)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-be-mark", "utf-32-be-mark"])
def test_text_is_read_by_its_mark(encoding, tmp_path):
    text = "Ein Kätzchen, 子猫"
    name = encoding.removesuffix("-mark")
    data = ("\ufeff" * (name != encoding) + text).encode(name)
    (tmp_path / "a.txt").write_bytes(data)
    assert usertext.read_user_text(data) == usertext.read_user_text(tmp_path / "a.txt") == text
    if name != "utf-8":
        assert usertext.read_user_text(data, "cp1252") == text  # a mark is believed before a flag


@pytest.mark.parametrize(
    ("data", "encoding"),
    [
        ("café".encode("cp1252"), "cp1252"),
        ("子猫".encode("shift_jis"), "shift_jis"),
        ("cat".encode("utf-16-le"), "utf-16-le"),
    ],
)
def test_other_encodings_are_refused_by_name(data, encoding, tmp_path):
    (tmp_path / "cat.txt").write_bytes(data)
    with pytest.raises(InputError, match=r"cat\.txt .*--caption_encoding NAME") as caught:
        usertext.read_user_text(tmp_path / "cat.txt", flag="--caption_encoding")
    assert "\n" not in str(caught.value)
    with pytest.raises(InputError) as caught:
        usertext.read_user_text(tmp_path / "cat.txt")
    assert "--" not in str(caught.value)  # no flag is named that the program has not
    assert usertext.read_user_text(tmp_path / "cat.txt", encoding) == data.decode(encoding)
    for unknown in ("klingon", "hex"):
        with pytest.raises(InputError, match=unknown):
            usertext.check_encoding(unknown)
    with pytest.raises(InputError, match="none.txt"):
        usertext.read_user_text(tmp_path / "none.txt")


def test_lines_end_at_line_ends_only():
    assert usertext.user_lines(f"{ODD}\r\nb\rc\n\nd") == [ODD, "b", "c", "", "d"]
    assert usertext.user_lines("a\n") == ["a"] and usertext.user_lines("") == []


def test_rows_of_json():
    rows = usertext.json_rows(f'{{"a": "{chr(0x2028)}x"}}\n\n{{"a": null}}\n', "l")
    assert list(rows) == [(1, {"a": "\u2028x"}), (3, {"a": None})]
    for bad in ("5", "null", "[1, 2]", '"x"', "{", "[" * 100_000):
        with pytest.raises(InputError, match="l, row 2"):
            list(usertext.json_rows('{"a": 1}\n' + bad, "l"))
    assert usertext.text_value({"a": "x"}, "a", "l, row 1") == "x"
    assert usertext.text_value({"a": None}, "a", "l, row 1", null=True) is None
    for row, found in (({"a": None}, "null"), ({"a": 5}, "5"), ({"a": [1]}, r"\[1\]"), ({}, "not there")):
        with pytest.raises(InputError, match=f"l, row 1: a is {found}"):
            usertext.text_value(row, "a", "l, row 1")


def test_rows_of_csv():
    text = 'file,caption\r\n1.jpg,"a red\r\ncat"\r\n\r\n2.jpg,"a, b ""c"""\r\n3.jpg,' + ODD.replace("\x1c", "") + "\r\n"
    rows = list(usertext.csv_rows(text, "l"))
    assert [number for number, _ in rows] == [2, 4, 5]
    assert [row["caption"] for _, row in rows] == ["a red\r\ncat", 'a, b "c"', ODD.replace("\x1c", "")]
    for delimiter in ";\t":  # as spreadsheets write it in some countries
        assert list(usertext.csv_rows(f"file{delimiter}caption\na{delimiter}x, y", "l")) == [
            (2, {"file": "a", "caption": "x, y"})
        ]
    for bad, message in (
        ("3.jpg,a, b", "row 3, has 3 values"),
        ("3.jpg", "row 3, has 1 values"),
        ('3.jpg,"x', "row 3"),
    ):
        with pytest.raises(InputError, match=message):
            list(usertext.csv_rows(f"file,caption\n1.jpg,x\n{bad}\n", "l"))


# ---------------------------------------------------------------------------------------------------------------------
# Captions beside pictures, in folders and in tars (cases 42, 44)

BESIDE = ["x.txt", "x.caption", "x.jpg.txt", "x.jpg.caption", "x.TXT", "x.Caption", "x.JPG.txt", "X.txt"]


@pytest.mark.parametrize("name", BESIDE)
def test_caption_beside_a_picture(name, tmp_path):
    write(tmp_path / "in", {"sub/x.jpg": JPEG, f"sub/{name}": " a cat\n", "x.txt": "of another folder"})
    run("01f_folder.py", "--in", tmp_path / "in", "--out", tmp_path / "out")
    assert got(tmp_path / "out") == {"sub/x.jpg": "a cat"} and rejected(tmp_path / "out") == {"caption_alone": 1}
    if name != "X.txt":  # in a tar a key is a key
        tar = make_tar(tmp_path / "0.tar", [("sub/x.jpg", JPEG), (f"sub/{name}", b" a cat\n")])
        ((key, sample),) = sd.shards.iter_samples(tar, Counter())
        assert key == "sub/x" and sd.shards.caption_of(sample) == "a cat" and sample["ext"] == "jpg"


def test_the_nearest_caption_counts(tmp_path):
    files = {"x.jpg": JPEG, "x.png": encode(PICTURE, "PNG"), "x.jpg.txt": "jpg", "x.txt": "both", "x.caption": "no"}
    files |= {"y.jpg": JPEG, "Y.jpg": JPEG, "y.txt": "small", "Y.txt": "large"}
    run("01f_folder.py", "--in", write(tmp_path / "in", files), "--out", tmp_path / "out")
    assert got(tmp_path / "out") == {"x.jpg": "jpg", "x.png": "both", "y.jpg": "small", "Y.jpg": "large"}


def test_unreadable_captions_are_counted_and_named(tmp_path):
    texts = {
        "a": "café".encode(),
        "b": "café".encode("utf-16"),
        "c": "café".encode("cp1252"),
        "d": "子".encode("shift_jis"),
    }
    files = {f"{key}.jpg": JPEG for key in texts} | {f"{key}.txt": text for key, text in texts.items()}
    write(tmp_path / "in", files)
    said = run("01f_folder.py", "--in", tmp_path / "in", "--out", tmp_path / "out")
    assert got(tmp_path / "out") == {"a.jpg": "café", "b.jpg": "café"}
    assert rejected(tmp_path / "out") == {"caption_encoding": 2} and "c.txt" in said and "--caption_encoding" in said
    run("01f_folder.py", "--in", tmp_path / "in", "--out", tmp_path / "o2", "--caption_encoding", "cp1252")
    assert got(tmp_path / "o2")["c.jpg"] == "café" == got(tmp_path / "o2")["b.jpg"]
    for name in ("a.txt", "b.txt"):  # none is left that can be read
        (tmp_path / "in" / name).unlink()
    said = run("01f_folder.py", "--in", tmp_path / "in", "--out", tmp_path / "o3", status=2)
    assert "c.txt" in said and "--caption_encoding" in said and not (tmp_path / "o3").exists()
    said = run("01f_folder.py", "--in", tmp_path / "in", "--out", tmp_path / "o3", "--caption_encoding", "x", status=2)
    assert "no encoding is called 'x'" in said


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, small_tokenizer) -> Path:
    small_tokenizer.save_pretrained(folder := tmp_path_factory.mktemp("tokenizer"))
    return folder


def test_unreadable_captions_of_a_tar(tmp_path, tokenizer):
    images = write(tmp_path / "web" / "images", {"note.txt": ""})
    texts = {"0": "café".encode("utf-16"), "1": "café".encode("cp1252"), "2": b"a cat"}
    json_too = ("1.json", b'{"caption": "from the metadata"}')  # does not stand in for what cannot be read
    members = [m for key, text in texts.items() for m in ((f"{key}.jpg", JPEG), (f"{key}.caption", text))]
    make_tar(images / "00000.tar", [*members[:4], json_too, *members[4:]])
    flags = ["--in", images, "--tokenizer", tokenizer]
    said = run("04_tokenise.py", *flags, "--out", tmp_path / "t")
    assert pq.read_table(tmp_path / "t" / "00000.parquet")["caption"].to_pylist() == ["café", "a cat"]
    assert sd.files.read_json(tmp_path / "t" / "manifest.json")["left_out"] == {"caption_encoding": 1}
    assert "--caption_encoding" in said
    run("04_tokenise.py", *flags, "--out", tmp_path / "u", "--caption_encoding", "cp1252")
    assert pq.read_table(tmp_path / "u" / "00000.parquet")["caption"].to_pylist() == ["café", "café", "a cat"]
    make = ["--in", images, "--vocab_size", 520, "--max_length", 9]
    said = run("04a_make_tokenizer.py", *make, "--out", tmp_path / "v")
    assert "1 captions that are not UTF-8" in said
    # the pictures' latents do not hang on their captions
    batches = sd.stream.stream([images / "00000.tar"], 8, 4, 0)
    assert [key for batch in batches for key in batch.keys] == ["0", "1", "2"]


# ---------------------------------------------------------------------------------------------------------------------
# Lists (case 43) and class files (case 39)


def list_run(tmp_path: Path, name: str, text: str | bytes, status: int = 0, *flags) -> str:
    write(tmp_path / "in", {"cats/1.jpg": JPEG, "2.jpg": JPEG})
    write(tmp_path, {name: text})
    arguments = ["--in", tmp_path / "in", "--out", tmp_path / "out", "--captions", tmp_path / name, *flags]
    return run("01f_folder.py", *arguments, status=status)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.csv", "file,caption\n2.jpg,red, small\n", "row 2, has 3 values"),
        ("l.csv", "file,caption\n2.jpg\n", "row 2, has 1 values"),
        ("l.csv", "file\n2.jpg\n", "row 2, has no file and caption"),
        ("l.csv", b"file,caption\n2.jpg,caf\xe9\n", "--caption_encoding"),
        ("l.csv", "", "no row"),
        ("l.jsonl", '{"file": "2.jpg", "caption": "x"}\n5\n', "row 2, is 5"),
        ("l.jsonl", "null\n", "row 1, is null"),
        ("l.jsonl", "[1, 2]\n", "row 1, is [1, 2]"),
        ("l.jsonl", '{"file": "2.jpg", "caption": "x"}\n{"file": "2.jpg", "caption": 5}\n', "row 2: caption is 5"),
        ("l.jsonl", '{"file": null, "caption": "x"}\n', "row 1: file is null"),
        ("l.jsonl", '{"file": "elsewhere/9.jpg", "caption": "x"}\n', "elsewhere/9.jpg"),
        ("l.jsonl", '{"file": "2.jpg", "caption": null}\n', "none of 2 pictures"),
    ],
)
def test_bad_lists_are_one_sentence(tmp_path, name, text, message):
    assert message in list_run(tmp_path, name, text, 2)
    assert not (tmp_path / "out").exists()


def test_lists_keep_captions_whole(tmp_path):
    text = 'file;caption\r\ncats/1.jpg;"a red\r\ncat"\r\n2.jpg;x, ' + ODD.replace("\x1c", "") + "\r\n"
    list_run(tmp_path, "l.csv", ("\ufeff" + text).encode("utf-16-le"))
    assert got(tmp_path / "out") == {"cats/1.jpg": "a red\r\ncat", "2.jpg": "x, " + ODD.replace("\x1c", "").strip()}


@pytest.mark.parametrize("kind", ["inside", "dotted", "with the folder", "absolute", "backslashes"])
def test_paths_of_lists(tmp_path, kind):
    start = {
        "inside": "",
        "dotted": "./x/../",
        "with the folder": "in/",
        "absolute": f"{tmp_path}/in/",
        "backslashes": "",
    }
    path = start[kind] + "cats/1.jpg"
    path = path.replace("/", "\\") if kind == "backslashes" else path
    rows = [
        {"file_name": path, "text": "one"},
        {"file_name": path, "text": "two"},
        {"file_name": "no.jpg", "text": "x"},
    ]
    list_run(tmp_path, "l.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    assert got(tmp_path / "out") == {"cats/1.jpg": "one"}
    assert rejected(tmp_path / "out") == {"listed_not_found": 1, "listed_twice": 1, "no_caption": 1}


def test_files_of_people_may_have_a_mark(tmp_path):
    """Classes, templates, identities and blocklists."""
    write(tmp_path / "in", {"n1/1.jpg": JPEG})
    mark = "\ufeff"
    write(tmp_path, {"c.json": mark + '{"n1": "ca\u2028t"}', "t.txt": f"{mark}a {ODD} {{person}}\rb {{person}}"})
    write(tmp_path, {"m.csv": (mark + "Class_ID,Gender\nn1,f\n").encode("utf-16-le"), "bad.json": b'{"n1": "caf\xe9"}'})
    flags = ["--path", tmp_path / "in", "--size", 8, "--out"]
    run("01g_classes.py", *flags, tmp_path / "g", "--classes", tmp_path / "c.json", "--template", "{name}")
    assert [s["txt"] for _, s in read_all(tmp_path / "g")] == ["ca\u2028t"]
    said = run("01g_classes.py", *flags, tmp_path / "h", "--classes", tmp_path / "bad.json", status=2)
    assert "bad.json is not UTF-8" in said
    run("01d_faces.py", *flags, tmp_path / "d", "--templates", tmp_path / "t.txt", "--about", tmp_path / "m.csv")
    assert read_all(tmp_path / "d")[0][1]["txt"] in (f"a {ODD} woman", "b woman")
    pq.write_table(pa.table({"caption": ["a dog", "b cat"]}), tmp_path / "m.parquet")
    write(tmp_path, {"words.txt": f"{mark}dog\rx"})
    run("02_filter.py", "--in", tmp_path / "m.parquet", "--out", tmp_path / "f", "--blocklist", tmp_path / "words.txt")
    assert pq.read_table(tmp_path / "f" / "m.parquet")["caption"].to_pylist() == ["b cat"]


# ---------------------------------------------------------------------------------------------------------------------
# What counts as a picture (case 45)


def test_hidden_linked_and_other_files(tmp_path):
    outside = write(tmp_path / "outside", {"linked.jpg": JPEG, "linked.txt": "linked"})
    hidden = [
        ".ipynb_checkpoints/a.jpg",
        ".trash/b.jpg",
        "__MACOSX/._c.jpg",
        "s/@eaDir/d.jpg/x.jpg",
        "._e.jpg",
        "Thumbs.db",
    ]
    files = {name: JPEG for name in (*hidden, "s/1.jpg", "2.JFIF", "3.jpe", "4.heic", "5.jxl", "film.mp4")}
    files["4.heic"], files["5.jxl"] = b"\0\0\0\x18ftypheic" + bytes(99), b"\xff\x0a" + bytes(99)
    files["6.avif"] = encode(PICTURE, "AVIF")
    files |= {f"{n}.txt": str(n) for n in range(2, 7)} | {"s/1.txt": "1"}
    folder = write(tmp_path / "in", files)
    os.symlink(outside, folder / "link")
    os.symlink(folder, folder / "s" / "loop")
    os.symlink(folder / "s", folder / "again")
    os.symlink(tmp_path / "nowhere", folder / "broken.jpg")
    run("01f_folder.py", "--in", folder, "--out", tmp_path / "out")
    assert got(tmp_path / "out") == {
        "2.JFIF": "2", "3.jpe": "3", "6.avif": "6", "link/linked.jpg": "linked", "s/1.jpg": "1",
    }  # fmt: skip
    assert rejected(tmp_path / "out") == {
        "hidden": 5, "link_broken": 1, "link_repeated": 2, "not_a_picture": 1, "unsupported_format": 2,
    }  # fmt: skip
    assert {key: s["ext"] for key, s in read_all(tmp_path / "out")}["000000004"] == "avif"  # 6.avif is the fifth
    # a folder that is itself hidden, or a link, may be asked for
    os.symlink(outside, tmp_path / ".mine")
    run("01f_folder.py", "--in", tmp_path / ".mine", "--out", tmp_path / "o2")
    assert got(tmp_path / "o2") == {"linked.jpg": "linked"}


@pytest.mark.parametrize("zipped", [False, True])
def test_hidden_files_of_class_folders(tmp_path, zipped):
    import zipfile

    names = ["n1/1.jpg", "__MACOSX/n1/._1.jpg", "n1/.ipynb_checkpoints/1.jpg", "n1/read.me"]
    root = write(tmp_path / "in", dict.fromkeys(names, JPEG))
    os.symlink(write(tmp_path / "outside", {"2.jpg": JPEG}), root / "n2")
    if zipped:
        root = tmp_path / "in.zip"
        with zipfile.ZipFile(root, "w") as archive:
            for name in names:
                archive.writestr(name, JPEG)
    write(tmp_path, {"c.json": '{"n1": "tench", "n2": "gold fish", ".ipynb_checkpoints": "wrong"}'})
    flags = ["--path", root, "--classes", tmp_path / "c.json", "--size", 8, "--template", "{name}"]
    said = run("01g_classes.py", *flags, "--out", tmp_path / "out")
    assert got(tmp_path / "out") == {"n1/1.jpg": "tench"} | ({} if zipped else {"n2/2.jpg": "gold fish"})
    assert "hidden 2" in said and "not_a_picture 1" in said


def test_hidden_members_of_tars(tmp_path):
    names = ["a.jpg", "__MACOSX/._a.jpg", ".trash/b.jpg", "x/@eaDir/a.jpg", "c.jfif", "._c.txt"]
    rejects = Counter()
    tar = make_tar(tmp_path / "0.tar", [(name, JPEG) for name in names])
    assert [key for key, _ in sd.shards.iter_samples(tar, rejects)] == ["a", "c"] and rejects == {"hidden": 3}


# ---------------------------------------------------------------------------------------------------------------------
# Decoding (case 45, and the pictures of case 40)

RAMP = np.tile(np.linspace(0, 1, 60, dtype=np.float32), (40, 1))
RAMP_8 = np.repeat(np.rint(RAMP * 255).astype(np.uint8)[:, :, None], 3, 2)
DEEP = Image.fromarray(np.rint(RAMP * 65535).astype(np.uint16))


def turned(kind: str) -> tuple[bytes, np.ndarray]:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(PICTURE, kind, exif=exif)
    return data, np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


def late_exif() -> tuple[bytes, np.ndarray]:
    """A PNG whose EXIF chunk lies behind its pixels, where exiftool puts it."""
    exif = Image.Exif()
    exif[0x0112] = 6
    body, png = b"eXIf" + exif.tobytes()[6:], encode(PICTURE, "PNG")
    chunk = struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body))
    return png[:-12] + chunk + png[-12:], np.rot90(PICTURE, 3)


def kinds() -> dict[str, tuple[bytes, np.ndarray]]:
    """name -> (bytes, RGB picture)."""
    rgb_16 = cv2.imencode(".tiff", PICTURE[:, :, ::-1].astype(np.uint16) * 257)[1].tobytes()
    stereo = encode(PICTURE, "MPO", save_all=True, append_images=[Image.fromarray(PICTURE[::-1].copy())])
    return {
        "tiff": (encode(PICTURE, "TIFF"), PICTURE),
        "tiff_float": (encode(Image.fromarray(RAMP), "TIFF"), RAMP_8),
        "tiff_float_overshoot": (encode(Image.fromarray(RAMP * 1.2 - 0.1), "TIFF"), np.rint(np.clip(RAMP * 1.2 - 0.1, 0, 1) * 255)[:, :, None]),  # noqa: E501
        "tiff_16": (encode(DEEP, "TIFF"), RAMP_8),
        "tiff_16_rgb": (rgb_16, PICTURE),
        "tiff_1": (encode(Image.fromarray(GREY > 128), "TIFF", compression="group4"), (GREY > 128)[:, :, None] * 255),
        "tiff_cmyk": (encode(Image.fromarray(PICTURE).convert("CMYK"), "TIFF"), PICTURE),
        "tiff_transparent": (encode(RGBA, "TIFF"), on_white(PICTURE, ALPHA)),
        "tiff_turned": turned("TIFF"),
        "png_16": (encode(DEEP, "PNG"), RAMP_8),
        "png_late_exif": late_exif(),
        "pgm_16": (encode(DEEP, "PPM"), RAMP_8),
        "jp2_16": (encode(DEEP, "JPEG2000", quality_layers=[0]), RAMP_8),
        "jp2": (encode(PICTURE, "JPEG2000", quality_layers=[0]), PICTURE),
        "bmp": (encode(PICTURE, "BMP"), PICTURE),
        "gif_grey": (encode(GREY, "GIF"), GREY_RGB),
        "gif_transparent": (encode(GREY, "GIF", transparency=int(GREY[3, 3])), np.where(GREY_RGB == GREY[3, 3], 255, GREY_RGB)),  # noqa: E501
        "avif_turned": turned("AVIF"),
        "jpeg_stereo": (stereo, np.asarray(Image.open(io.BytesIO(stereo)).convert("RGB"))),
    }  # fmt: skip


@pytest.mark.parametrize("name", kinds())
def test_kinds_of_picture(name):
    data, expected = kinds()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = sd.pictures.decode_image(data)
    expected = np.broadcast_to(expected, image.shape) if expected.shape[:2] == image.shape[:2] else expected
    assert image.dtype == np.uint8 and image.shape == expected.shape and image.flags.c_contiguous
    assert np.abs(image.astype(int) - expected).max() <= (12 if name.startswith(("jpeg", "avif")) else 1)
    header = sd.pictures.read_header(data)
    shown = (header.height, header.width) if header.orientation < 5 else (header.width, header.height)
    assert shown == image.shape[:2] and header.kind in sd.folders.IMAGE_EXTENSIONS
    tall = sd.stream.nearest_size(data, [(8, 16), (16, 8)])
    assert tall == ((16, 8) if "turned" in name or "late" in name else (8, 16))


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_the_transparent_level_of_a_grey_png(depth):
    """Level 1 is transparent, of 0, 1, ... in pixels of `depth` bits."""
    levels = [i % 2**depth for i in range(16)]
    bits = "".join(f"{level:0{depth}b}" for level in levels)
    row = b"\0" + int(bits, 2).to_bytes(len(bits) // 8, "big")
    png = raw_png(16, 1, depth, 0, row, (b"tRNS", struct.pack(">H", 1)))
    wanted = [255 if level == 1 else round(level * 255 / (2**depth - 1)) for level in levels]
    assert sd.pictures.decode_image(png)[0, :, 0].tolist() == wanted


@pytest.mark.parametrize(
    ("image", "reason"),
    [(RAMP * 255, "value_range"), (RAMP * np.nan, "value_range"), ((RAMP * 9e6).astype(np.int32), "value_range")],
)
def test_numbers_of_unknown_range_are_rejected(image, reason):
    with pytest.raises(sd.pictures.Reject, match=reason):
        sd.pictures.decode_image(encode(Image.fromarray(image), "TIFF"))


def test_huge_claims_of_other_formats():
    """Nothing is allocated for a size that a header claims; between 89 and 100 million pixels Pillow would warn."""
    import tracemalloc

    tiny = {kind: bytearray(encode(PICTURE, kind)) for kind in ("BMP", "GIF")}
    tiny["BMP"][18:26] = struct.pack("<ii", 40_000, 40_000)
    tiny["GIF"][6:10] = struct.pack("<HH", 12_000, 12_000)
    tracemalloc.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for data in tiny.values():
            with pytest.raises(sd.pictures.Reject, match="too_many_pixels"):
                sd.pictures.decode_image(bytes(data))
        tiny["GIF"][6:10] = struct.pack("<HH", 9_700, 9_700)
        assert sd.pictures.read_header(bytes(tiny["GIF"])).width == 9_700
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_damage_is_rejected_whatever_the_byte():
    """Any byte turned round gives a picture of the right shape or a Reject; of a PNG always a Reject."""
    for kind in ("TIFF", "GIF", "AVIF", "BMP", "JPEG2000", "PNG"):
        data = encode(PICTURE, kind)
        for place in range(0, len(data), max(1, len(data) // 60)):
            broken = bytearray(data)
            broken[place] ^= 255
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    image = sd.pictures.decode_image(bytes(broken))
                except sd.pictures.Reject:
                    continue
            assert image.ndim == 3 and image.dtype == np.uint8 and kind != "PNG"


# ---------------------------------------------------------------------------------------------------------------------
# Nothing ends well with nothing (case 42), and a refused run costs nothing (case 68)


def test_a_folder_without_captions_or_pictures(tmp_path):
    write(tmp_path / "in", {"a.jpg": JPEG, "a.json": "{}", "b.jpg": JPEG})
    said = run("01f_folder.py", "--in", tmp_path / "in", "--out", tmp_path / "out", status=2)
    assert "none of 2 pictures" in said and ".json 1" in said and not (tmp_path / "out").exists()
    write(tmp_path / "none", {".trash/a.jpg": JPEG, "b.psd": b"x"})
    said = run("01f_folder.py", "--in", tmp_path / "none", "--out", tmp_path / "out", status=2)
    assert ".psd 1" in said and "1 pictures in hidden folders" in said


def test_pictures_that_are_all_rejected(tmp_path):
    """And the mended folder is taken under the same --out."""
    write(tmp_path / "in", {"n1/a.jpg": JPEG[:300], "n1/b.jpg": b""})
    write(tmp_path, {"c.json": '{"n1": "tench"}'})
    flags = ["--path", tmp_path / "in", "--classes", tmp_path / "c.json", "--size", 8, "--out", tmp_path / "out"]
    said = run("01g_classes.py", *flags, status=2)
    assert "empty 1" in said and "truncated 1" in said
    assert [path.name for path in (tmp_path / "out" / "images").iterdir()] == ["manifest.json"]
    write(tmp_path / "in", {"n1/c.jpg": JPEG})
    run("01g_classes.py", *flags)
    assert got(tmp_path / "out") == {"n1/c.jpg": "a photo of a tench"}


def test_tars_without_captions(tmp_path, tokenizer):
    images = write(tmp_path / "web" / "images", {"note.md": ""})
    make_tar(images / "00000.tar", [("a.jpg", JPEG), ("b.jpg", JPEG), ("b.txt", b" "), ("c.txt", b"alone")])
    flags = ["--in", images, "--tokenizer", tokenizer, "--out", tmp_path / "t"]
    said = run("04_tokenise.py", *flags, status=2)
    assert "empty_caption 2, no_image 1" in said and not list((tmp_path / "t").glob("*.parquet"))
    assert "not finished" in run("05_build_hf_dataset.py", "--in", tmp_path / "t", "--out", tmp_path / "d", status=2)
    make_tar(images / "00000.tar", [("a.jpg", JPEG)])
    assert "no caption" in run("04a_make_tokenizer.py", "--in", images, "--out", tmp_path / "v", status=2)
    make_tar(images / "00000.tar", [("a.jpg", JPEG), ("a.txt", b"a cat")])
    run("04_tokenise.py", *flags, "--source", "another")  # the refused run has not claimed the folder
    assert sd.files.read_json(tmp_path / "t" / "manifest.json")["rows"] == 1


def test_filter_that_keeps_nothing_or_lacks_a_column(tmp_path):
    pq.write_table(pa.table({"caption": ["x", "y"], "aesthetic": [5.0, 6.0]}), tmp_path / "m.parquet")
    flags = ["--in", tmp_path / "m.parquet", "--out", tmp_path / "f"]
    assert "no column" in run("02_filter.py", *flags, "--min_similarity", 0.3, status=2)
    said = run("02_filter.py", *flags, "--min_aesthetic", 7, status=2)  # without the flag that it complained of
    assert "aesthetic 2" in said and "relax" in said
    run("02_filter.py", *flags, "--min_aesthetic", 5.5)
    assert sd.files.read_json(tmp_path / "f" / "manifest.json")["kept"] == 1
    assert "another --out" in run("02_filter.py", *flags, "--min_aesthetic", 5, status=2)  # now there is something


def test_a_folder_is_free_until_something_is_in_it(tmp_path):
    assert sd.files.claim_folder(tmp_path, "s", {"a": 1}) and not sd.files.claim_folder(tmp_path, "s", {"a": 1})
    (tmp_path / "x.tar.host-1.tmp").write_text("")  # what a killed run leaves is nothing
    assert sd.files.claim_folder(tmp_path, "s", {"a": 2}) and sd.files.claim_folder(tmp_path, "t", {"a": 2})
    (tmp_path / "x.tar").write_text("")
    with pytest.raises(InputError, match="was made with a = 2"):
        sd.files.claim_folder(tmp_path, "t", {"a": 3})
    assert not sd.files.claim_folder(tmp_path, "t", {"a": 2})


def test_a_foreign_folder_is_left_alone_by_the_download(tmp_path, monkeypatch):
    module = load("03_download.py")
    monkeypatch.setattr(module, "engine_version", lambda python: "1.47.0")
    pq.write_table(pa.table({"url": ["u"], "caption": ["x"]}), tmp_path / "m.parquet")
    write(tmp_path / "out" / "images", {"mine.parquet": b"precious"})
    run("03_download.py", "--in", tmp_path / "m.parquet", "--out", tmp_path / "out", status=2)
    assert (tmp_path / "out" / "images" / "mine.parquet").read_bytes() == b"precious"


# ---------------------------------------------------------------------------------------------------------------------
# Held-out pictures of a small source (case 60)


def tokens(folder: Path, source: str, count: int) -> Path:
    """A folder as 04 writes it, with `count` rows in shards of 8."""
    folder.mkdir()
    shards = {}
    for start in range(0, count, 8):
        keys = [f"{source}/00000/{n:04d}" for n in range(start, min(start + 8, count))]
        ids = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(4 * len(keys), np.int32)), 4)
        table = pa.table({"image_key": keys, "input_ids": ids, "caption": ["x"] * len(keys)})
        pq.write_table(table, folder / f"{start:05d}.parquet")
        shards[f"{start:05d}.parquet"] = len(keys)
    facts = {"tokenizer_hash": "0", "max_length": 4, "vocab_size": 9, "source": source, "rows": count, "shards": shards}
    sd.files.write_manifest(folder, {"script": "04_tokenise.py", "complete": True, **facts})
    return folder


def lowest(source: str, count: int) -> str:
    return min((f"{source}/00000/{n:04d}" for n in range(count)), key=sd.shards.key_fraction)


def test_every_source_has_a_held_out_picture(tmp_path):
    rows = {"small": 20, "pair": 2, "one": 1, "many": 400}
    folders = [tokens(tmp_path / name, name, count) for name, count in rows.items()]
    out = tmp_path / "d"
    run("05_build_hf_dataset.py", "--in", *folders, "--out", out)  # --val_fraction 0.01
    keys = [f"{name}/00000/{n:04d}" for name, count in rows.items() for n in range(count)]
    below = {key for key in keys if sd.shards.key_fraction(key) < 0.01}
    assert not any(key.startswith(("small", "pair", "one")) for key in below) and below
    assert set(read_split(out, "val")) == below | {lowest("small", 20), lowest("pair", 2)}
    assert sorted(read_split(out, "train") + read_split(out, "val")) == sorted(keys)
    run("05_build_hf_dataset.py", "--in", folders[0], "--out", tmp_path / "none", "--val_fraction", 0)
    assert sd.files.read_json(tmp_path / "none" / "manifest.json")["counts"] == {"train": 20, "val": 0}


def test_a_dataset_with_nothing_to_train_on_is_refused(tmp_path):
    said = run("05_build_hf_dataset.py", "--in", tokens(tmp_path / "t", "t", 2), "--out", tmp_path / "d",
               "--val_fraction", 0.999, status=2)  # fmt: skip
    assert "lower --val_fraction" in said
    run("05_build_hf_dataset.py", "--in", tokens(tmp_path / "u", "u", 0), "--out", tmp_path / "d", status=2)
    assert not (tmp_path / "d").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Found by tests/test_fuzz.py


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--size", 2**64, "--size wants 16 to 10,000 pixels"),
        ("--size", 2**31, "--size wants 16 to 10,000 pixels"),
        ("--workers", 2**32, "--workers wants 0 to 1,024 processes"),
        ("--workers", -1, "--workers wants 0 to 1,024 processes"),
    ],
)
def test_numbers_beyond_all_machines(flag, value, said, tmp_path):
    assert said in run("00_make_shapes.py", "--out", tmp_path / "s", "--count", 1, flag, value, status=2)
    assert not (tmp_path / "s").exists()


@pytest.fixture
def two_rows(tmp_path) -> Path:
    """A token folder of two rows, as 04 writes it."""
    ids = pa.FixedSizeListArray.from_arrays(pa.array([1, 2, 3] * 2, pa.int32()), 3)
    table = pa.table({"image_key": ["s/0/0", "s/0/1"], "input_ids": ids, "caption": ["a", "b"]})
    (tmp_path / "tokens").mkdir()
    pq.write_table(table, tmp_path / "tokens/0.parquet")
    told = {"script": "04_tokenise.py", "complete": True, "tokenizer_hash": "x", "max_length": 3, "source": "s"}
    sd.files.write_manifest(tmp_path / "tokens", told | {"vocab_size": 9, "rows": 2, "shards": {"0.parquet": 2}})
    run("05_build_hf_dataset.py", "--in", tmp_path / "tokens", "--out", tmp_path / "sound")
    return tmp_path / "tokens"


@pytest.mark.parametrize("name", ["tokenizer_hash", "max_length", "source", "rows", "shards"])
def test_a_token_manifest_without_a_name(name, two_rows, tmp_path):
    told = sd.files.read_json(two_rows / "manifest.json")
    for value in (None, [1]):
        sd.files.write_manifest(two_rows, told | {name: value})
        message = run("05_build_hf_dataset.py", "--in", two_rows, "--out", tmp_path / "out", status=2)
        assert f"for {name}, found {value}" in message and "run 04_tokenise.py again" in message
    assert not (tmp_path / "out").exists()


def test_damaged_token_files(two_rows, tmp_path):
    table, file = pq.read_table(two_rows / "0.parquet"), two_rows / "0.parquet"
    spoiled = {
        "image_key": table.drop_columns(["image_key"]),
        "input_ids": table.set_column(1, "input_ids", pa.array([1.5, 2.5])),
        "nulls": table.set_column(2, "caption", pa.array(["a", None])),
    }
    for said, content in spoiled.items():
        pq.write_table(content, file)
        message = run("05_build_hf_dataset.py", "--in", two_rows, "--out", tmp_path / "out", status=2)
        assert f"cannot read {file}" in message and said in message + " input_ids"
    file.write_bytes(b"PAR1 and no more")
    assert f"cannot read {file}" in run("05_build_hf_dataset.py", "--in", two_rows, "--out", tmp_path / "out", status=2)
    assert not (tmp_path / "out").exists()


def test_memory_that_is_not_there_ends_in_a_sentence(capsys):
    """Python's and numpy's error, and the plain RuntimeError of torch on a CPU; others keep their trace."""
    import torch

    def allocate():
        torch.empty(1 << 50, dtype=torch.uint8)

    for main in (allocate, lambda: np.zeros(1 << 50, np.uint8), lambda: sd.errors.run(allocate)):
        with pytest.raises(SystemExit) as stop:
            sd.errors.run(main)
        text = capsys.readouterr().err
        assert stop.value.code == 2 and text.startswith("error: there is not enough memory") and text.count("\n") == 1

    def bug():
        raise RuntimeError("of another kind")

    with pytest.raises(RuntimeError):
        sd.errors.run(bug)


def test_more_pictures_or_tokens_than_can_be(tmp_path):
    assert "1 to 1,000,000,000" in run("00_make_shapes.py", "--out", tmp_path / "s", "--count", 2**64, status=2)
    (tmp_path / "s/images").mkdir(parents=True)
    make_tar(tmp_path / "s/images/00000.tar", [("0.png", encode(PICTURE, "PNG")), ("0.txt", b"a")])
    more = ("--in", tmp_path / "s/images", "--out", tmp_path / "t")
    assert "1,000,000" in run("04a_make_tokenizer.py", *more, "--vocab_size", 2**32, status=2)
    assert "--workers wants" in run("02_filter.py", *more, "--workers", 2**32, status=2)


def test_a_link_to_itself_is_counted(tmp_path):
    from sd.sources import read_file

    (tmp_path / "a.png").symlink_to("a.png")
    with pytest.raises(sd.pictures.Reject, match="no_image|link"):
        read_file(tmp_path, "a.png")


def test_an_error_of_several_lines_is_one(capsys):
    def main():
        raise OSError("first line\nsecond line\n")

    with pytest.raises(SystemExit):
        sd.errors.run(main)
    assert capsys.readouterr().err == "error: the system: first line: put that right and run the command again\n"
