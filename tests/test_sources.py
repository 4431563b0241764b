"""The 01 scripts of public sources, on small archives in the layout of each: what is wanted arrives with its caption,
what is bad is counted, nothing is unpacked, and a stop costs nothing."""

import io
import json
import os
import signal
import stat
import subprocess
import sys
import tarfile
import time
import zipfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from binding import rebind
from PIL import Image
from test_data_pipeline import ENVIRONMENT, PIPELINE, load, run, run_process
from web import files

import sd.files
import sd.pictures
import sd.shards
import sd.sources


def picture(seed: int, width: int = 80, height: int = 64, kind: str = "JPEG") -> bytes:
    """A smooth picture that belongs to its seed."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    stream = io.BytesIO()
    Image.fromarray(small).resize((width, height), Image.BICUBIC).save(stream, kind)
    return stream.getvalue()


def samples(out: Path) -> list[dict]:
    """All samples of <out>/images, in order."""
    rejects = Counter()
    found = [s for tar in sorted((out / "images").glob("*.tar")) for _, s in sd.shards.iter_samples(tar, rejects)]
    assert not rejects
    return found


def captions(out: Path) -> dict[str, str]:
    """Caption by the end of the url."""
    return {sample["json"]["url"].rpartition("/")[2]: sample["txt"] for sample in samples(out)}


def manifest(out: Path, folder: str = "images") -> dict:
    return sd.files.read_json(out / folder / "manifest.json")


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def error_level(image: np.ndarray, data: bytes) -> float:
    """Mean difference of a picture and the square in the middle of the original."""
    wanted = sd.pictures.resize_crop(sd.pictures.decode_image(data), image.shape[0])
    return np.abs(image.astype(float) - wanted).mean()


# ---------------------------------------------------------------------------------------------------------------------
# LAION's metadata


def write_metadata(folder: Path, count: int = 3) -> Path:
    folder.mkdir()
    for shard in range(count):
        rows = {"URL": [f"http://x/{shard}/{n}" for n in range(50)], "TEXT": [f"text {n}" for n in range(50)]}
        pq.write_table(pa.table(rows), folder / f"part-{shard:05d}.parquet")
    return folder


def test_laion_from_a_folder(tmp_path):
    source, out = write_metadata(tmp_path / "mirror"), tmp_path / "data"
    run("01_laion_metadata.py", "--path", source, "--out", out, "--pattern", "*0000[02].parquet")
    got = contents(out / "metadata")
    assert manifest(out, "metadata")["rows"] == 100 and set(manifest(out, "metadata")["files"]) == got.keys() - {
        "manifest.json"
    }
    assert {name: got[name] for name in got if name.endswith("parquet")} == {
        name: data for name, data in contents(source).items() if "00001" not in name
    }
    # 02 takes it from there
    run("02_filter.py", "--in", out / "metadata", "--out", out / "filtered", "--min_caption", 6)
    assert manifest(out, "filtered")["kept"] == 100


def test_laion_from_a_server_that_cuts(tmp_path, monkeypatch):
    monkeypatch.setattr(sd.sources, "PAUSE", 0)
    source, out = write_metadata(tmp_path / "mirror"), tmp_path / "data"
    with files.serve(source) as web:
        web.cuts = ["part-00001.parquet"]
        urls = [f"{web.base}/{path.name}" for path in sorted(source.iterdir())]
        run("01_laion_metadata.py", "--url", *urls, "--out", out)
        asked = [size for _, name, size in web.log if name == "part-00001.parquet"]
        size = (source / "part-00001.parquet").stat().st_size
        assert asked == [None, f"bytes={size // 2}-"]
        before = len(web.log)
        run("01_laion_metadata.py", "--url", *urls, "--out", out)  # done: nothing is asked for
        assert len(web.log) == before
    got = contents(out / "metadata")
    assert {name: got[name] for name in got if name.endswith("parquet")} == contents(source)


def test_laion_from_a_hub_keeps_to_its_revision(tmp_path):
    source, out = write_metadata(tmp_path / "mirror"), tmp_path / "data"
    (source / "README.md").write_text("not wanted")

    def get(status=0, *flags):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(ENVIRONMENT, "HF_ENDPOINT", web.base)
            patch.setitem(ENVIRONMENT, "HF_HUB_OFFLINE", "0")
            patch.setitem(ENVIRONMENT, "HF_HOME", str(tmp_path / "home"))
            return run_process("01_laion_metadata.py", "--hub_id", "test/set", "--out", out, *flags, status=status)

    with files.serve(source) as web:
        get()
        assert manifest(out, "metadata")["settings"]["origin"]["revision"] == "a" * 40
        got = contents(out / "metadata")
        wanted = {name: data for name, data in contents(source).items() if name.endswith("parquet")}
        assert {name: got[name] for name in got if name.endswith("parquet")} == wanted
        web.revision = "b" * 40  # the data set moves on
        (out / "metadata" / "part-00001.parquet").unlink()
        web.log.clear()
        get()
        assert any(name.endswith("part-00001.parquet") for _, name, _ in web.log)
        assert all("resolve/" + "b" * 40 not in name for _, name, _ in web.log)
        assert contents(out / "metadata") == got
        assert "another --out" in get(2, "--revision", "b" * 40)


def test_laion_bad_files(tmp_path):
    source = write_metadata(tmp_path / "mirror")
    whole = (source / "part-00001.parquet").read_bytes()
    (source / "part-00001.parquet").write_bytes(whole[: len(whole) // 2])
    said = run("01_laion_metadata.py", "--path", source, "--out", tmp_path / "one", status=2)
    assert "part-00001.parquet is not a whole parquet" in said
    pq.write_table(pa.table({"URL": ["x"], "aesthetic": [5.0]}), source / "part-00001.parquet")
    said = run("01_laion_metadata.py", "--path", source, "--out", tmp_path / "two", status=2)
    assert "part-00001.parquet has no column caption" in said
    for out in ("one", "two"):
        assert not (tmp_path / out / "metadata" / "part-00001.parquet").exists()
    with files.serve(source) as web:  # a bad download is not kept: once the server is mended, the same command works
        (source / "part-00001.parquet").write_bytes(whole[: len(whole) // 2])
        flags = ["--url", f"{web.base}/part-00001.parquet", "--out", tmp_path / "four"]
        run("01_laion_metadata.py", *flags, status=2)
        (source / "part-00001.parquet").write_bytes(whole)
        run("01_laion_metadata.py", *flags)
    assert (tmp_path / "four" / "metadata" / "part-00001.parquet").read_bytes() == whole
    said = run("01_laion_metadata.py", "--hub_id", "test/set", "--out", tmp_path / "three", status=2)
    assert "cannot get test/set from the hub" in said  # HF_HUB_OFFLINE is set in the tests


# ---------------------------------------------------------------------------------------------------------------------
# DiffusionDB


def write_part(root: Path, number: int, pictures: dict[str, bytes], prompts: dict | None = None) -> zipfile.ZipFile:
    """images/part-00000N.zip as DiffusionDB has it: pictures and a JSON with p, se, c, st, sa of each."""
    path = root / "images" / f"part-{number:06d}.zip"
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = {name: {"p": f"prompt of {name}", "se": 7, "c": 7.5, "st": 50, "sa": "k_lms"} for name in pictures}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in pictures.items():
            archive.writestr(name, data)
        archive.writestr(f"part-{number:06d}.json", json.dumps(prompts or entries))
    return path


def write_diffusiondb(root: Path, parts: int = 2, each: int = 4) -> Path:
    names = []
    for number in range(1, parts + 1):
        pictures = {f"{number:04d}-{n}.png": picture(100 * number + n, 64, 64, "PNG") for n in range(each)}
        write_part(root, number, pictures)
        names += [(name, number) for name in pictures]
    rows = {
        "image_name": [name for name, _ in names],
        "part_id": pa.array([number for _, number in names], pa.uint16()),
        "image_nsfw": [0.1] * len(names),
        "prompt_nsfw": [n / 10 for n in range(len(names))],
    }
    pq.write_table(pa.table(rows), root / "metadata.parquet")
    return root


def test_diffusiondb(tmp_path):
    source, out = write_diffusiondb(tmp_path / "ddb"), tmp_path / "data"
    flags = ["--path", source, "--out", out, "--parts", "1-2", "--size", 32]
    run("01b_diffusiondb.py", *flags)
    got = samples(out)
    assert len(got) == 8 and manifest(out)["shards"] == 2 and not manifest(out)["rejected"]
    assert captions(out) == {f"{p:04d}-{n}.png": f"prompt of {p:04d}-{n}.png" for p in (1, 2) for n in range(4)}
    for place, sample in enumerate(got):
        image = sd.pictures.decode_image(sample["image"])
        assert sample["ext"] == "jpg" and image.shape == (32, 32, 3)
        assert error_level(image, picture(100 * (place // 4 + 1) + place % 4, 64, 64, "PNG")) < 3
        assert sample["json"]["punsafe"] == pytest.approx(max(0.1, place / 10))
        assert (sample["json"]["cfg"], sample["json"]["sampler"]) == (7.5, "k_lms")
    rows = pq.read_table(out / "images" / "00000.parquet")
    assert rows["caption"].to_pylist() == [s["txt"] for s in got[:4]]
    first = contents(out / "images")
    (out / "images" / "00001.tar").unlink()
    before = (out / "images" / "00000.tar").stat().st_mtime_ns
    run("01b_diffusiondb.py", *flags)
    assert contents(out / "images") == first and (out / "images" / "00000.tar").stat().st_mtime_ns == before
    assert len(list((source / "images").iterdir())) == 2  # what --path names is never deleted
    said = run("01b_diffusiondb.py", *flags[:-1], 64, status=2)
    assert "made with size = 32" in said


def test_diffusiondb_from_a_server_is_deleted_part_by_part(tmp_path, monkeypatch):
    monkeypatch.setattr(sd.sources, "PAUSE", 0)
    source, out = write_diffusiondb(tmp_path / "ddb"), tmp_path / "data"
    with files.serve(source) as web:
        web.cuts = ["images/part-000002.zip"]
        run("01b_diffusiondb.py", "--url", web.base, "--out", out, "--parts", "1-2", "--size", 32)
        assert len(samples(out)) == 8
        assert [p.name for p in (out / "raw").rglob("*") if p.is_file()] == ["metadata.parquet"]
        said = run("01b_diffusiondb.py", "--url", web.base, "--out", tmp_path / "b", "--parts", "3", status=2)
        assert "part-000003.zip" in said and "404" in said


def test_diffusiondb_hostile_part(tmp_path):
    """Each bad member is counted under its reason and the next good one is right."""
    root, out = tmp_path / "ddb", tmp_path / "data"
    good = {f"good{n}.png": picture(n, 64, 64, "PNG") for n in range(3)}
    bad = {
        "../../escape.png": picture(1),
        "/tmp/absolute.png": picture(2),
        "cut.png": picture(3, kind="PNG")[:-20],
        "page.png": b"<html>no</html>",
        "unprompted.png": picture(4),
        "bomb.png": big_png(),
    }
    names = [*good, *bad, "link.png", "claims.png", "broken.png"]
    prompts = {n.rpartition("/")[2]: {"p": f"prompt of {n}"} for n in names if n != "unprompted.png"}
    path = write_part(root, 1, {"good0.png": good["good0.png"], **bad}, prompts)
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo("link.png")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/hostname")
        archive.writestr("good1.png", good["good1.png"])
        archive.writestr(zipfile.ZipInfo("claims.png"), b"x")
        archive.writestr("broken.png", b"y" * 1000)
        archive.writestr("sub/good1.png", good["good1.png"])  # the same name again
        archive.writestr("good2.png", good["good2.png"])
        archive.getinfo("claims.png").file_size = 1 << 40
    data = path.read_bytes()
    path.write_bytes(data.replace(b"y" * 1000, b"y" * 999 + b"z"))  # its checksum is wrong now
    before = set(contents(tmp_path))
    run("01b_diffusiondb.py", "--path", root, "--out", out, "--parts", "1", "--size", "32", "--no_metadata")
    assert set(captions(out)) == set(good)
    assert manifest(out)["rejected"] == {
        "corrupt": 1, "duplicate_key": 1, "html": 1, "link": 1, "no_caption": 1, "too_large": 1, "too_many_pixels": 1,
        "truncated": 1, "unsafe_name": 2,
    }  # fmt: skip
    assert all(name.startswith("data/images/") for name in set(contents(tmp_path)) - before)


def big_png() -> bytes:
    """A small PNG that claims 40,000 x 40,000 pixels."""
    data = bytearray(picture(0, kind="PNG"))
    data[16:24] = (40_000).to_bytes(4, "big") * 2
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def test_diffusiondb_bad_input(tmp_path):
    source = write_diffusiondb(tmp_path / "ddb")
    flags = ["--path", source, "--out", tmp_path / "data", "--parts"]
    assert "--parts is 0-3" in run("01b_diffusiondb.py", *flags, "0-3", status=2)
    assert "there is no" in run("01b_diffusiondb.py", *flags, "1-3", status=2)
    path = source / "images" / "part-000001.zip"
    path.write_bytes(path.read_bytes()[:-100])
    said = run("01b_diffusiondb.py", "--path", source, "--out", tmp_path / "cut", "--parts", "1", status=2)
    assert "is not a whole zip" in said and not list((tmp_path / "cut" / "images").glob("*.tar"))


def test_diffusiondb_killed(tmp_path):
    """A kill between two shards and a run to the end give the bytes of an undisturbed run."""
    source = write_diffusiondb(tmp_path / "ddb", parts=3, each=300)
    flags = ["--path", source, "--parts", "1-3", "--size", 256]
    line = [sys.executable, PIPELINE / "01b_diffusiondb.py", *flags, "--out", tmp_path / "a"]
    process = subprocess.Popen([*map(str, line)], env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    while not (tmp_path / "a" / "images" / "00000.tar").exists():
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "a" / "images" / "00002.tar").exists()
    for out in ("a", "b"):
        run("01b_diffusiondb.py", *flags, "--out", tmp_path / out)
    assert contents(tmp_path / "a" / "images") == contents(tmp_path / "b" / "images")


# ---------------------------------------------------------------------------------------------------------------------
# JourneyDB


def write_tgz(path: Path, members: list[tuple]) -> None:
    """(name, bytes) are files, (name, bytes, type) links and devices."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as tar:
        for name, data, *kind in members:
            info = tarfile.TarInfo(name)
            if kind:
                info.type, info.linkname = kind[0], data.decode()
                tar.addfile(info)
            else:
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


def write_journeydb(root: Path, archives: int = 2, each: int = 3, packed: bool = True) -> Path:
    lines = []
    for number in range(archives):
        members = [("./" + f"{number:03d}", b"", tarfile.DIRTYPE)]
        for n in range(each):
            members.append((f"./{number:03d}/u{number}{n}.jpg", picture(10 * number + n)))
            entry = {"img_path": f"./{number:03d}/u{number}{n}.jpg", "prompt": f"cat {n} --ar 3:2 --v 4"}
            if n:
                entry["Task2"] = {"Caption": f"A picture of cat {number}{n}."}
            lines.append(json.dumps(entry))
        write_tgz(root / "data" / "train" / "imgs" / f"{number:03d}.tgz", members)
    text = ("\n".join([*lines, "not json", "[1]"]) + "\n").encode()
    name = root / "data" / "train" / "train_anno_realease_repath.jsonl"
    if packed:
        write_tgz(name.with_name(name.name + ".tgz"), [(name.name, text)])
    else:
        name.write_bytes(text)
    return root


@pytest.mark.parametrize("packed", [True, False])
def test_journeydb(tmp_path, packed):
    source, out = write_journeydb(tmp_path / "jdb", packed=packed), tmp_path / "data"
    run("01c_journeydb.py", "--path", source, "--out", out, "--archives", "0-1", "--size", 32)
    assert captions(out) == {
        f"u{a}{n}.jpg": f"A picture of cat {a}{n}." if n else "cat 0" for a in (0, 1) for n in range(3)
    }
    for place, sample in enumerate(samples(out)):
        image = sd.pictures.decode_image(sample["image"])
        assert image.shape == (32, 32, 3) and error_level(image, picture(10 * (place // 3) + place % 3)) < 3
    assert not manifest(out)["rejected"] and manifest(out)["shards"] == 2
    run("01c_journeydb.py", "--path", source, "--out", tmp_path / "p", "--archives", "1", "--caption", "prompt")
    assert captions(tmp_path / "p") == {f"u1{n}.jpg": f"cat {n}" for n in range(3)}


def test_journeydb_hostile_archive(tmp_path, monkeypatch):
    source, out = write_journeydb(tmp_path / "jdb", 1), tmp_path / "data"
    rebind(sd.sources, "MAX_MEMBER_BYTES", 1 << 20, monkeypatch.setattr)
    members = [
        ("000/u00.jpg", picture(0)),
        ("../../escape.jpg", picture(1)),
        ("/tmp/absolute.jpg", picture(1)),
        ("000/link.jpg", b"/etc/hostname", tarfile.SYMTYPE),
        ("000/hard.jpg", b"000/u00.jpg", tarfile.LNKTYPE),
        ("000/zeros.jpg", bytes(3 << 20)),  # packed to nothing
        ("000/unknown.jpg", picture(2)),
        ("000/empty.jpg", b""),
        ("000/u00.jpg", picture(3)),
        ("000/u01.jpg", picture(1)),
        ("000/u02.jpg", picture(2)),
    ]
    path = source / "data" / "train" / "imgs" / "000.tgz"
    write_tgz(path, members)
    before = set(contents(tmp_path))
    flags = ["--path", source, "--archives", "0", "--size", 32]
    run("01c_journeydb.py", *flags, "--out", out)
    assert list(captions(out)) == ["u00.jpg", "u01.jpg", "u02.jpg"]
    assert manifest(out)["rejected"] == {
        "duplicate_key": 1, "link": 2, "no_caption": 2, "too_large": 1, "unsafe_name": 2,
    }  # fmt: skip
    assert all(name.startswith("data/") for name in set(contents(tmp_path)) - before)
    assert (
        error_level(sd.pictures.decode_image(samples(out)[0]["image"]), picture(0)) < 3
    )  # the first of a name is kept
    path.write_bytes(path.read_bytes()[:-1500])  # cut: what came whole before is used
    run("01c_journeydb.py", *flags, "--out", tmp_path / "cut")
    assert manifest(tmp_path / "cut")["rejected"]["cut_tar"] == 1
    assert 1 <= len(captions(tmp_path / "cut")) < 3


@pytest.mark.parametrize(
    ("prompt", "clean"),
    [
        ("a cat --ar 3:2 --v 4", "a cat"),
        ("<https://s.mj.run/x1> a cat, --q 2 --uplight", "a cat"),
        ("a well-known cat -- sitting, 3:2", "a well-known cat -- sitting, 3:2"),
        ("cat --no dogs", "cat dogs"),
    ],
)
def test_journeydb_prompts(prompt, clean):
    assert load("01c_journeydb.py").clean_prompt(prompt) == clean


# ---------------------------------------------------------------------------------------------------------------------
# Folders and zips of pictures: faces, COCO, classes


def write_folder(root: Path, pictures: dict[str, bytes]) -> Path:
    for name, data in pictures.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def write_zip(path: Path, pictures: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in pictures.items():
            archive.writestr(name, data)
    return path


def faces(people: int = 4, each: int = 6) -> dict[str, bytes]:
    return {f"n{p:06d}/{n:04d}_01.jpg": picture(10 * p + n) for p in range(people) for n in range(each)}


ABOUT = 'Class_ID, Name, Sample_Num, Flag, Gender\nn000000, "Doe,_Jane", 6, 1, f\nn000001, "X", 6, 0, m\n'


def test_faces(tmp_path):
    folder, zipped = write_folder(tmp_path / "train", faces()), write_zip(tmp_path / "train.zip", faces())
    (tmp_path / "meta.csv").write_text(ABOUT)
    flags = ["--about", tmp_path / "meta.csv", "--size", 32, "--shard_size", 10]
    run("01d_faces.py", "--path", folder, "--out", tmp_path / "a", *flags)
    run("01d_faces.py", "--path", zipped, "--out", tmp_path / "b", *flags)
    run("01d_faces.py", "--path", folder, "--out", tmp_path / "c", *flags, "--seed", 1)
    texts = {out: {s["json"]["url"]: s["txt"] for s in samples(tmp_path / out)} for out in "abc"}
    assert len(texts["a"]) == 24 and texts["a"] == texts["b"]  # the seed and the name alone decide
    assert sum(texts["a"][url] != texts["c"][url] for url in texts["a"]) > 12
    templates = Counter(t.replace("woman", "x").replace("person", "x").replace("man", "x") for t in texts["a"].values())
    assert len(templates) >= 6 and max(templates.values()) < 10
    for url, text in texts["a"].items():
        person = {"n000000": "woman", "n000001": "man"}.get(url.split("/")[0].removeprefix("file:"), "person")
        assert person in text.replace("'s", "").split() or person + "," in text
        assert "Jane" not in text and "Doe" not in text


def test_faces_limited_and_linked(tmp_path):
    folder = write_folder(tmp_path / "train", faces())
    (tmp_path / "secret.jpg").write_bytes(picture(99))
    os.symlink(tmp_path / "secret.jpg", folder / "n000000" / "0000_00.jpg")
    run("01d_faces.py", "--path", folder, "--out", tmp_path / "a", "--size", 32, "--min_side", 64)
    assert manifest(tmp_path / "a")["rejected"] == {"link": 1} and len(samples(tmp_path / "a")) == 24
    run("01d_faces.py", "--path", folder, "--out", tmp_path / "b", "--size", 32, "--per_identity", 2)
    people = Counter(s["json"]["identity"] for s in samples(tmp_path / "b"))
    people["n000000"] += manifest(tmp_path / "b")["rejected"].get("link", 0)
    assert people == {f"n{p:06d}": 2 for p in range(4)}
    said = run("01d_faces.py", "--path", folder, "--out", tmp_path / "c", "--size", 32, "--min_side", 65, status=2)
    assert "rejected: link 1, too_small 24" in said  # nothing is left: not a success
    (tmp_path / "t.txt").write_text("a {persn}\n")
    flags = ["--path", folder, "--out", tmp_path / "d", "--templates", tmp_path / "t.txt"]
    assert "cannot be filled in" in run("01d_faces.py", *flags, status=2)
    assert not (tmp_path / "d").exists()


BOXES = {  # name: boxes as (category, x, y, width, height, iscrowd), of pictures of 120 x 60
    "000000000001.jpg": [(1, 90, 0, 20, 33, 0)],  # 0.55 of the height, at the right
    "000000000002.jpg": [(1, 0, 0, 20, 32, 0), (1, 0, 0, 10, 20, 0)],  # 0.533
    "000000000003.jpg": [(1, 0, 0, 100, 60, 1)],  # a crowd
    "000000000004.jpg": [(17, 0, 0, 100, 60, 0)],  # a cat
    "000000000005.jpg": [(1, 5, 10, 20, 20, 0), (1, 5, 0, 20, 60, 0)],  # the second one is tall
    "000000000006.jpg": [],
}


def coco_picture(name: str) -> bytes:
    """White, with a black box where the tallest person stands."""
    image = np.full((60, 120, 3), 255, np.uint8)
    for _, x, y, width, height, _ in BOXES[name][-1:]:
        image[y : y + height, x : x + width] = 0
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def write_coco(root: Path, zipped: bool) -> Path:
    """COCO's layout, or its zips as its server has them."""
    ids = {name: number for number, name in enumerate(BOXES, 1)}
    images = [
        {"id": i, "file_name": n, "height": 60, "width": 120, "coco_url": f"http://c/{n}"} for n, i in ids.items()
    ]
    texts = [
        {"image_id": i, "id": 10 * i + k, "caption": f"caption {k} of {i}\n"} for i in ids.values() for k in range(5)
    ]
    boxes = [
        {"image_id": ids[name], "category_id": c, "bbox": [x, y, w, h], "iscrowd": crowd, "id": 100 * ids[name] + n}
        for name, rows in BOXES.items()
        for n, (c, x, y, w, h, crowd) in enumerate(rows)
    ]
    categories = [{"id": 1, "name": "person"}, {"id": 17, "name": "cat"}]
    written = {
        "annotations/captions_train2017.json": {"images": images, "annotations": texts},
        "annotations/instances_train2017.json": {"images": images, "annotations": boxes, "categories": categories},
    }
    written = {name: json.dumps(content).encode() for name, content in written.items()}
    pictures = {f"train2017/{name}": coco_picture(name) for name in BOXES}
    if not zipped:
        return write_folder(root, {**written, **pictures})
    write_zip(root / "annotations" / "annotations_trainval2017.zip", written)
    write_zip(root / "zips" / "train2017.zip", pictures)
    return root


def test_coco(tmp_path):
    plain, zips = write_coco(tmp_path / "coco", False), write_coco(tmp_path / "server", True)
    run("01e_coco.py", "--path", plain, "--out", tmp_path / "a", "--size", 60)
    with files.serve(zips) as web:
        run("01e_coco.py", "--url", web.base, "--out", tmp_path / "b", "--size", 60)
    got = {s["json"]["url"]: s for s in samples(tmp_path / "a")}
    assert list(got) == ["http://c/000000000001.jpg", "http://c/000000000005.jpg"]
    assert contents(tmp_path / "a" / "images")["00000.tar"] == contents(tmp_path / "b" / "images")["00000.tar"]
    first, fifth = (sd.pictures.decode_image(s["image"]) for s in got.values())
    # columns 60..120: the box lies at 30..50 of the square; columns 0..60: the box at 5..25
    assert first[:30, 33:48].max() < 60 and first[:, :25].min() > 200 and first[36:].min() > 200
    assert fifth[:, 8:22].max() < 60 and fifth[:, 30:].min() > 200
    assert [s["json"]["person_height"] for s in got.values()] == [0.55, 1.0]
    assert all(s["txt"] in [f"caption {k} of {i}" for k in range(5)] for i, s in zip((1, 5), got.values(), strict=True))
    run("01e_coco.py", "--path", plain, "--out", tmp_path / "c", "--size", 60, "--min_height", 0.5)
    assert len(samples(tmp_path / "c")) == 3
    said = run("01e_coco.py", "--path", plain, "--out", tmp_path / "e", "--split", "val2017", status=2)
    assert "val2017" in said and not (tmp_path / "e").exists()


def test_coco_captions_vary_with_the_seed(tmp_path):
    make_items, rows = load("01e_coco.py").make_items, range(200)
    images = [{"id": i, "file_name": f"{i:012d}.jpg", "height": 10} for i in rows]
    texts = [{"image_id": i, "caption": f"{k}"} for i in rows for k in range(5)]
    boxes = [{"image_id": i, "category_id": 1, "bbox": [0, 0, 5, 8]} for i in rows]
    data = {"images": images, "annotations": texts}, {"images": images, "annotations": boxes}
    one, two = ([item[1] for item in make_items(*data, 0.55, seed, "")] for seed in (0, 1))
    assert Counter(one).keys() == set("01234") and max(Counter(one).values()) < 60
    assert one != two and one == [item[1] for item in make_items(*data, 0.55, 0, "")]


def test_coco_bad_annotations(tmp_path):
    plain = write_coco(tmp_path / "coco", False)
    path = plain / "annotations" / "instances_train2017.json"
    path.write_text(path.read_text()[:-20])
    assert "instances_train2017.json" in run("01e_coco.py", "--path", plain, "--out", tmp_path / "a", status=2)
    path.write_text('{"images": [{}], "annotations": [{}]}')
    assert "not as COCO's" in run("01e_coco.py", "--path", plain, "--out", tmp_path / "a", status=2)
    assert not (tmp_path / "a").exists()


def test_classes(tmp_path):
    names = ["n01440764/n01440764_1.JPEG", "n01440764/n01440764_2.JPEG", "n01443537/n01443537_1.JPEG", "n09/x.JPEG"]
    pictures = {name: picture(n) for n, name in enumerate(names)}
    folder, zipped = write_folder(tmp_path / "train", pictures), write_zip(tmp_path / "train.zip", pictures)
    (tmp_path / "index.json").write_text('{"0": ["n01440764", "tench"], "1": ["n01443537", "gold_fish"]}')
    (tmp_path / "names.json").write_text('{"n01440764": ["tench", "Tinca tinca"], "n01443537": "gold_fish"}')
    run("01g_classes.py", "--path", folder, "--classes", tmp_path / "index.json", "--out", tmp_path / "a", "--size", 32)
    wanted = {"n01440764_1.JPEG": "tench", "n01440764_2.JPEG": "tench", "n01443537_1.JPEG": "gold fish"}
    assert captions(tmp_path / "a") == {name: f"a photo of a {text}" for name, text in wanted.items()}
    assert manifest(tmp_path / "a")["rejected"] == {"no_caption": 1}
    assert samples(tmp_path / "a")[2]["json"]["class"] == "n01443537"
    flags = ["--classes", tmp_path / "names.json", "--out", tmp_path / "b", "--size", 32, "--template", "{name}"]
    with files.serve(tmp_path) as web:
        run("01g_classes.py", "--url", f"{web.base}/train.zip", *flags)
    assert captions(tmp_path / "b").keys() == wanted.keys() and zipped.exists()
    assert captions(tmp_path / "b")["n01443537_1.JPEG"] == "gold fish"


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ("[]", "JSON object"),
        ('{"n01": 3}', "give a name"),
        ('{"other": "x"}', "none of the folders"),
        ("{", "cannot read"),
        ("{}", "names no class"),
    ],
)
def test_classes_bad_json(tmp_path, classes, message):
    folder = write_folder(tmp_path / "train", {"n01/a.jpg": picture(0)})
    (tmp_path / "c.json").write_text(classes)
    said = run("01g_classes.py", "--path", folder, "--classes", tmp_path / "c.json", "--out", tmp_path / "a", status=2)
    assert message in said and not (tmp_path / "a").exists()
