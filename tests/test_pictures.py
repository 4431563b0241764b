"""SD_Train.py --pictures: what is indexed, chosen and held out; how pictures are cut; and that a run on them is exact.

pytest tests/test_pictures.py
"""

import functools
import hashlib
import http.server
import io
import json
import os
import signal
import struct
import sys
import tarfile
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageEnhance

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro
from binding import rebind

import encode_latents
import sd.data
import sd.index
import sd.objective
import sd.online
import sd.shards
import sd.sources
import sd.text
import sd.weights.parts
from sd.data import SampleOrder
from sd.encoder import Encoder
from sd.errors import InputError
from sd.index import Captions, build_index, find_parts, read_index
from sd.online import Cut, Latents, Pictures, balanced, check_settings, held_out, jittered, read_range
from sd.pictures import decode_image, encode_jpeg, encode_png
from sd.text import load_tokenizer
from sd.weights.read import load_vae
from sd.where import Where


def picture(seed: int, height: int = 72, width: int = 96) -> np.ndarray:
    """uint8 [height, width, 3] of large coloured squares, a different one for each seed."""
    colours = np.random.default_rng(seed).integers(0, 256, (height // 12, width // 12, 3), dtype=np.uint8)
    return np.kron(colours, np.ones((12, 12, 1), np.uint8))


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def sample(key: str, seed: int, **metadata) -> list[tuple[str, bytes]]:
    """The members of one picture."""
    return [(f"{key}.jpg", encode_jpeg(picture(seed))), (f"{key}.txt", f"number {seed}".encode()),
            (f"{key}.json", json.dumps(metadata).encode())]  # fmt: skip


def write_folder(folder: Path, count: int, first: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(first, first + count):
        (folder / f"p{i:02d}.jpg").write_bytes(encode_jpeg(picture(i)))
        (folder / f"p{i:02d}.txt").write_text(f"number {i}")
    return folder


def index_of(text: str | Path, columns=(), captions=Captions(), workers=0, **more):  # noqa: B008
    """(Index, what was passed over, what was said)."""
    left_out, said = Counter(), []
    parts = find_parts(str(text), captions, more.get("index"), left_out)
    build_index(parts, workers, said.append)
    index = read_index(parts, list(columns), more.get("where") and Where(more["where"]))
    return index, left_out + index.rejects, said


def keys(index) -> list[str]:
    return index.table["key"].to_pylist()


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """VAE, tokenizer and text encoder of preset micro; cat/: 24 pictures, one of which is held out; tars/: those in
    three tars of 5, 17 and 2; one/: in one."""
    root = micro.make_data(tmp_path_factory.mktemp("pictures") / "data", {})
    write_folder(root / "cat", 24)
    files = [sample(f"{i:04d}", i, score=i / 24, kind="ab"[i % 2]) for i in range(24)]
    for number, part in enumerate((files[:5], files[5:22], files[22:])):
        write_tar(root / f"tars/images/{number:05d}.tar", sum(part, []))
    write_tar(root / "one/images/00000.tar", sum(files, []))
    return root


def pictures_of(root: Path, index_and_parts, cutting=None, pool=None, rows=None, **settings) -> Pictures:
    index, parts = index_and_parts
    settings = {"window": 0, "seed": 3, "strict": False, "picture_memory": 1.0} | settings
    latents = Latents(Encoder(load_vae(root / "vae"), torch.device("cpu"), torch.float32), 1)
    sizes = [len(index.table if rows is None else rows)]
    return Pictures(index.table, sizes, parts, load_tokenizer(str(root / "tokenizer")), latents, (4, 8, 8),
                    cutting or Cut(64), settings, pool, settings.pop("say", print), rows)  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------
# Many pictures: the table lies in files that processes share
# ----------------------------------------------------------------------------------------------------------------


def many(tmp_path: Path, captions: int = 2) -> Path:
    """Three tars of 7, 1 and 9 pictures; every third one has several captions, and some a score."""
    files = [
        sample(f"{i:04d}", i, **({"captions": [f"more {i} {k}" for k in range(captions - 1)]} if i % 3 == 0 else {}),
               **({"score": i / 17} if i % 2 else {}), **({"kind": "ab\u00e9"[i % 3]} if i % 5 else {}))
        for i in range(17)
    ]  # fmt: skip
    for number, part in enumerate((files[:7], files[7:8], files[8:])):
        write_tar(tmp_path / f"images/{number:05d}.tar", sum(part, []))
    return tmp_path / "images"


@pytest.mark.parametrize("captions", [1, 3])
@pytest.mark.parametrize("where", [None, "score<0.6"])
def test_a_table_in_files_is_the_table(captions, where, tmp_path, monkeypatch):
    """Rows, nulls, counts and the fields that are there, the first time and when the files are there already."""
    tars = many(tmp_path / "s", captions)
    wanted = ["n:score", "t:kind", "n:nothing"]
    plain, left_out, _ = index_of(tars, wanted, where=where)
    assert not list((tars / ".index").glob("columns-*")) and plain.table["n:score"].null_count == (0 if where else 9)
    monkeypatch.setattr(sd.index, "MAPPED", 16)
    real, written = sd.index.write_columns, []
    monkeypatch.setattr(sd.index, "write_columns", lambda *args: written.append(1) or real(*args))
    for _ in range(2):
        mapped, others, _ = index_of(tars, wanted, where=where)
        assert mapped.table.equals(plain.table) and mapped[1:] == plain[1:] and others == left_out
        assert [c.num_chunks for c in mapped.table.columns] == [1] * 9
    (folder,) = (tars / ".index").glob("columns-*")
    maps = [line.split()[-1] for line in open("/proc/self/maps") if str(folder) in line]
    assert any(name.endswith("0.bytes") for name in maps) and written == [1]
    assert index_of(tars, wanted, where="score<0.1")[0].table.num_rows == 1 and len(written) == 2
    write_tar(tars / "00001.tar", sample("other", 3))  # of other contents: other columns
    assert "s/00001/other" in keys(index_of(tars, wanted)[0]) and len(written) == 3


def test_an_index_that_cannot_hold_the_table_leaves_it_in_memory_and_a_full_disk_is_a_sentence(tmp_path, monkeypatch):
    tars = many(tmp_path / "s")
    plain = index_of(tars)[0]
    monkeypatch.setattr(sd.index, "MAPPED", 16)

    def full(folder, *_):
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as m:
        m.setattr(sd.index, "write_columns", full)
        with pytest.raises(InputError, match="cannot be written .No space left on device.: make room"):
            index_of(tars)
    assert not list((tars / ".index").glob("columns-*")) and not list((tars / ".index").glob("*.lock"))
    parts = find_parts(str(tars), Captions(), None, Counter())
    real = Path.touch
    monkeypatch.setattr(Path, "touch", lambda self: real(tmp_path / "no" / "such" / "folder"))
    assert read_index(parts, []).table.equals(plain.table) and not list((tars / ".index").glob("columns-*"))


def test_processes_wait_for_one_that_writes_the_table(tmp_path):
    tars = many(tmp_path / "s")
    plain = index_of(tars)[0]

    def rank(r):
        sd.index.MAPPED, sd.index.POLL_S, real = 16, 0.01, sd.index.write_columns

        def slow(*args):
            time.sleep(0.3)
            (tmp_path / f"written by {r}").touch()
            real(*args)

        sd.index.write_columns = slow
        return b"same" if index_of(tars)[0].table.equals(plain.table) else b"other"

    assert micro.fork_ranks(rank, 3) == b"same" * 3 and len(list(tmp_path.glob("written by *"))) == 1


@pytest.mark.parametrize("captions", [1, 3])
def test_pictures_are_hashed_and_shown_in_their_order_wherever_the_table_lies(captions, root, tmp_path, monkeypatch):
    """The digest as it always was: of all keys' lengths and bytes, of all captions' in the order of the pictures."""
    tars = many(tmp_path / "s", captions)
    chosen = np.array([3, 4, 0, 16, 9, 8, 15], np.uint32)
    rows = index_of(tars)[0].table.take(pa.array(chosen)).to_pylist()
    told = hashlib.sha256(b"[7] 7")
    every = [text for row in rows for text in row["captions"]]
    for texts in ([row["key"] for row in rows], every):
        told.update(np.array([len(t.encode()) for t in texts], np.int64))
        told.update("".join(texts).encode())
    if captions > 1:
        told.update(np.cumsum([0, *(len(row["captions"]) for row in rows)]).astype(np.int64))
    for mapped, stretch in ((False, 1 << 18), (False, 3), (True, 3)):
        monkeypatch.setattr(sd.index, "MAPPED", 16 if mapped else 10**6)
        monkeypatch.setattr(sd.online, "STRETCH", stretch)
        index, parts = index_of(tars)[0], find_parts(str(tars), Captions(), None, Counter())
        split = pictures_of(root, (index, parts), rows=chosen, window=1)
        assert split.digest()[0] == told.hexdigest() and split.several == (captions > 1)
        assert split.keys.take(np.arange(7)).to_pylist() == [row["key"] for row in rows]
        assert split.captions.take(np.arange(7)).to_pylist() == [row["captions"][0] for row in rows]
        assert split.windows[0].tolist() == [row["part"] for row in rows]
        last = [row["captions"][-1] for row in rows]
        wanted = sd.text.tokenize(split.tokenizer, last)
        assert (split.token_ids(np.arange(7), np.full(7, 0.999)) == wanted).all()
        assert split._read(3) == sd.index.read_picture(parts[2], *(rows[3][n] for n in ("key", "offset", "bytes")))


# ----------------------------------------------------------------------------------------------------------------
# --where
# ----------------------------------------------------------------------------------------------------------------

FIELDS = pa.table({"n:score": pa.array([0.1, 0.5, None, 0.9, np.nan]), "n:wide": [5.0, 1.0, 1.0, 0.9, 0.0],
                   "t:kind": ["a", "b", "a", None, "c"]})  # fmt: skip


@pytest.mark.parametrize(
    "words, rows",
    [
        ("score <= 0.5", [0, 1]),
        ("0.5>score", [0]),
        ("score=0.9 or score==0.1", [0, 3]),
        ("not score<0.5", [1, 3]),
        ("score < wide", [0, 1]),
        ("kind = 'a'", [0, 2]),
        ('kind in ("a", "b") and score >= .5', [1]),
        ("kind not in ('a')", [1, 4]),
        ("kind != 'b' and not (score > 0.5 or wide < 2)", [0]),
        ("score = 0.1 or kind = 'b' and wide = 9", [0]),  # 'and' binds closer
        ("`score` in (1e-1, +0.9)", [0, 3]),
        ("kind = 'a' or score > 0", [0, 1]),  # a row that lacks a field is left out, whatever the others say
    ],
)
def test_where_is_true_of_the_right_rows(words, rows):
    true, known = Where(words).rows(FIELDS)
    assert np.flatnonzero(true).tolist() == rows
    assert not (true & ~known).any()


@pytest.mark.parametrize(
    "words",
    ["__import__('os').system('touch x')", "score", "score <", "score < 'a'", "score in 3", "(score < 1", "1 < 2",
     "score < 1 kind = 'a'", "score = 1 or score = 'a'", "score; kind", "score <= 0.5.1", "", "lambda: 1",
     "score(1) = 1", "[score for score in kind]", "kind in ('a', 1)", "and", "(" * 99 + "score<1" + ")" * 99],
)  # fmt: skip
def test_where_refuses_what_is_no_comparison(words):
    """SCALE 67."""
    with pytest.raises(InputError, match="--where .* cannot be read"):
        Where(words)


def test_where_counts_rows_without_the_field_and_refuses_a_field_that_none_has(root):
    both = index_of(f"{root}/cat,{root}/tars/images", ["n:score"])[0].table["n:score"].to_pylist()
    assert both == [None] * 24 + [i / 24 for i in range(24)]  # tars come behind folders; null is not 0
    index, *_ = index_of(root / "tars/images", where="score < 0.25 and width = 96 and shard = '00001'")
    assert keys(index) == ["tars/00001/0005"] and (index.pictures, index.lacking) == (24, 0)
    both = index_of(f"{root}/tars/images,{root}/cat", ["n:score"], where="score >= 0.75")[0]
    assert both.table["n:score"].to_pylist() == [i / 24 for i in range(18, 24)]
    assert (both.pictures, both.lacking) == (48, 24)
    with pytest.raises(InputError, match="scor with a number, and no picture .* height, kind, score, shard"):
        index_of(root / "tars/images", where="scor < 1")
    with pytest.raises(InputError, match="kind with a number"):
        index_of(root / "tars/images", where="kind < 1")


# ----------------------------------------------------------------------------------------------------------------
# The index
# ----------------------------------------------------------------------------------------------------------------


def test_folders_have_captions_beside_in_lists_or_made_from_names(tmp_path):
    folder = tmp_path / "my_cat"
    for i, place in enumerate(("a.jpg", "b.png", "tom/c.jpg", "d.jpg")):
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_bytes((encode_png if place.endswith("png") else encode_jpeg)(picture(i)))
    (folder / "a.txt").write_text("one")
    (folder / "b.png.caption").write_text(" two\n")
    (folder / "tom/c.caption").write_text("three")
    (folder / "b.mask.png").write_bytes(encode_png(picture(9)))
    (folder / "tom/c.json").write_text(
        json.dumps({"score": 3, "ok": True, "list": [1], "captions": ["three", "third"]})
    )

    def told(**captions) -> dict:
        index, left_out, _ = index_of(folder, ["n:score", "n:ok", "t:folder"], Captions(**captions))
        rows = {row["key"].removeprefix("my_cat/"): row for row in index.table.to_pylist()}
        return {name: row["captions"] for name, row in rows.items()}, rows, left_out

    beside, rows, left_out = told()
    assert beside == {"a.jpg": ["one"], "b.png": ["two"], "tom/c.jpg": ["three", "third"]}
    assert (left_out["no_caption"], left_out["mask"]) == (1, 1)
    assert (rows["tom/c.jpg"]["n:score"], rows["tom/c.jpg"]["n:ok"], rows["a.jpg"]["n:score"]) == (3, 1, None)
    assert (rows["tom/c.jpg"]["t:folder"], rows["a.jpg"]["t:folder"]) == ("tom", "my_cat")
    made, *_ = told(template="a photo of {folder}")
    assert made == {"a.jpg": ["a photo of my cat"], "b.png": ["a photo of my cat"], "d.jpg": ["a photo of my cat"],
                    "tom/c.jpg": ["a photo of tom"]}  # fmt: skip
    pq.write_table(pa.table({"file": ["d.jpg", "tom/c.jpg"], "caption": ["D", "C"]}), tmp_path / "list.parquet")
    assert told(listed=tmp_path / "list.parquet")[0] == {
        "d.jpg": ["D"],
        "tom/c.jpg": ["C", "three", "third"][:1] + ["three", "third"],
    }
    (folder / "captions.jsonl").write_text('{"file_name": "d.jpg", "text": "of the list"}\n')
    assert told()[0]["d.jpg"] == ["of the list"]
    (tmp_path / "here.csv").write_text("path,caption,score\nmy_cat/a.jpg,A,0.5\nmy_cat/d.jpg,D,high\nnone.jpg,N,1\n")
    index, left_out, _ = index_of(tmp_path / "here.csv", ["n:score", "t:score"])
    assert [(r["key"], r["captions"], r["n:score"], r["t:score"]) for r in index.table.to_pylist()] == [
        ("here/my_cat/a.jpg", ["A"], 0.5, "0.5"), ("here/my_cat/d.jpg", ["D"], None, "high")]  # fmt: skip
    assert left_out["listed_not_found"] == 1


def test_odd_names_and_values_in_json_cost_no_index(tmp_path):
    folder = write_folder(tmp_path / "cat", 2)
    odd = '{"big": 1%s, "none": null, "nan": NaN, "half \\ud800": "\\ud800", "ok": 2, "n": {"a": 1}}' % ("0" * 400)
    (folder / "p00.json").write_text(odd)
    (folder / "p01.json").write_text("[1]")
    (tmp_path / os.fsdecode(b"cat/\xff.jpg")).write_bytes((folder / "p00.jpg").read_bytes())
    (tmp_path / os.fsdecode(b"cat/\xff.txt")).write_text("of another encoding")
    index, left_out, _ = index_of(folder, ["n:ok", "t:half ?"])
    assert [(r["n:ok"], r["t:half ?"]) for r in index.table.to_pylist()] == [(2, "?"), (None, None)]
    assert +left_out == {"unsafe_name": 1, "bad_json": 1}
    assert index.fields == {"key", "offset", "bytes", "captions", "fraction", "n:height", "n:ok", "n:width", "t:folder",
                            "t:half ?"}  # fmt: skip


def test_a_tar_is_read_at_the_members_places(root):
    index, left_out, _ = index_of(root / "tars/images", ["n:score", "t:kind", "n:height", "t:shard"])
    parts = find_parts(str(root / "tars/images"), Captions(), None, Counter())
    assert keys(index) == [f"tars/{0 if i < 5 else 1 if i < 22 else 2:05d}/{i:04d}" for i in range(24)]
    for i in (0, 7, 23):
        row = index.table.slice(i, 1).to_pylist()[0]
        data = sd.index.read_picture(parts[row["part"]], row["key"], row["offset"], row["bytes"])
        assert data == encode_jpeg(picture(i))
        assert (row["captions"], row["n:score"], row["t:kind"]) == ([f"number {i}"], i / 24, "ab"[i % 2])
        assert (row["n:height"], row["t:shard"]) == (72, row["key"].split("/")[1])
    assert not +left_out


def test_keys_with_dots_keys_that_come_twice_and_files_apart(tmp_path):
    """SCALE 54, 55: a key ends at the last dot; the first picture of a key counts; the shard is part of the key."""
    first = [*sample("a.v1.0", 0), *sample("a.v1.1", 1), *sample("dir.x/b", 2), *sample("a.v1.0", 3)]
    write_tar(tmp_path / "s/images/00000.tar", first)
    apart = sample("a.v1.0", 4) + sample("c", 5)
    write_tar(tmp_path / "s/images/00001.tar", sorted(apart, key=lambda m: m[0].rpartition(".")[2]))
    index, left_out, _ = index_of(tmp_path / "s/images")
    assert dict(zip(keys(index), index.table["captions"].to_pylist())) == {
        "s/00000/a.v1.0": ["number 0"], "s/00000/a.v1.1": ["number 1"], "s/00000/dir.x/b": ["number 2"],
        "s/00001/a.v1.0": ["number 4"], "s/00001/c": ["number 5"]}  # fmt: skip
    assert left_out["duplicate_key"] == 1
    write_tar(tmp_path / "other/s/images/00000.tar", sample("z", 6))
    with pytest.raises(InputError, match="same keys .s/00000/"):
        index_of(f"{tmp_path}/s/images/00000.tar,{tmp_path}/other/s/images/00000.tar")


def test_cut_empty_and_missing_tars_are_counted_and_refused_with_strict(tmp_path, root):
    """SCALE 64."""
    images = tmp_path / "s/images"
    whole = write_tar(images / "00.tar", sum((sample(f"{i}", i) for i in range(3)), [])).read_bytes()
    (images / "01.tar").write_bytes(whole[: len(whole) // 2])
    (images / "02.tar").write_bytes(b"")
    write_tar(images / "03.tar", [])
    write_tar(images / "05.tar", [("a.jpg", encode_jpeg(picture(0))[:-40]), ("a.txt", b"cut"), *sample("b", 1)])
    text = f"{images}/{{00..05}}.tar"
    index, left_out, _ = index_of(text)
    assert keys(index) == ["s/00/0", "s/00/1", "s/00/2", "s/01/0", "s/05/b"]
    assert +left_out == {"cut_tar": 2, "missing_tar": 1, "truncated": 1}
    settings = dict.fromkeys(("caption", "captions", "caption_encoding", "index", "cache"))
    settings |= {"strict": True, "cache_gib": 1.0, "window": 0, "masks": False}
    with pytest.raises(InputError, match="--strict wants .*cut_tar 2, missing_tar 1, truncated 1; the first: s/05/a"):
        sd.online.indexed(text, settings, [], None, 0, print)
    sd.online.indexed(str(root / "tars/images"), settings, [], None, 0, print)
    for nothing in (f"{images}/{{07..09}}.tar", str(tmp_path / "none"), f"{images}/*.tgz"):
        with pytest.raises(InputError, match="nothing is there"):
            index_of(nothing)


def test_the_index_is_made_once_again_only_of_what_changed_and_goes_on_after_a_stop(tmp_path, monkeypatch):
    for number in range(5):
        write_tar(tmp_path / f"s/images/{number}.tar", sample("a", number))
    real, made = sd.index.index_part, []

    def index_part(part):
        if len(made) == 3 and stop:
            raise KeyboardInterrupt
        made.append(part.path.stem)
        return real(part)

    monkeypatch.setattr(sd.index, "index_part", index_part)
    stop = True
    with pytest.raises(KeyboardInterrupt):
        index_of(tmp_path / "s/images")
    stop = False
    first, *_ = index_of(tmp_path / "s/images")
    assert made == ["0", "1", "2", "3", "4"]
    assert index_of(tmp_path / "s/images")[2] == [] and len(made) == 5
    write_tar(tmp_path / "s/images/2.tar", sample("b", 9))
    second, *_ = index_of(tmp_path / "s/images")
    assert made[5:] == ["2"] and keys(second) == [k if "/2/" not in k else "s/2/b" for k in keys(first)]
    assert index_of(tmp_path / "s/images", captions=Captions("a {name}"))[0].table["captions"].to_pylist()[0] == ["a a"]
    assert len(made) == 11
    monkeypatch.undo()
    other, _, said = index_of(tmp_path / "s/images", workers=2, index=tmp_path / "elsewhere")
    assert other.table.equals(second.table) and "5 pictures indexed" in said[0]
    assert not list(tmp_path.rglob("*.lock"))


# ----------------------------------------------------------------------------------------------------------------
# Which are held out, and in which order they come
# ----------------------------------------------------------------------------------------------------------------


def some_table(n: int, name="k") -> pa.Table:
    names = [f"{name}/{i}" for i in range(n)]
    return pa.table({"key": names, "fraction": [sd.shards.key_fraction(k) for k in names]})


@pytest.mark.parametrize("n", [1, 2, 5, 20, 300, 1000, 1001, 5000])
def test_a_share_is_held_out_by_the_key_and_at_least_one(n):
    """FINETUNE 31: the side of a key does not depend on the others, so the two never overlap, whatever n is."""
    table = some_table(n)
    out = held_out(table, None)
    share = 0.1 if n <= 1000 else 0.01
    assert out.sum() == 0 if n == 1 else out.sum() >= 1
    assert abs(out.sum() - share * n) <= 4 * np.sqrt(share * n) + 1
    assert not held_out(table, 0.0).any()
    fraction = table["fraction"].to_numpy()
    expected = fraction < share if (fraction < share).any() else (fraction == fraction.min()) & (n > 1)
    assert (out == expected).all()
    more = held_out(some_table(n + 7), share)[:n]
    assert (more <= out).all() and (more == out).all() | (out.sum() == 1)


@pytest.mark.parametrize("tars_at_once", [1, 3])
def test_windows_shuffle_tars_and_then_pictures_within_them(tars_at_once):
    tar = np.repeat(np.arange(10), [3, 9, 1, 4, 7, 5, 8, 2, 6, 5])
    order = SampleOrder([50], None, 7, (tar, tars_at_once))
    epochs = [order.epoch(e) for e in range(4)]
    assert all(sorted(e) == list(range(50)) for e in epochs) and len({tuple(e) for e in epochs}) == 4
    for epoch in epochs:
        seen, open_tars = tar[epoch], set()
        for i, t in enumerate(seen):  # a tar that is begun is read to its end before others than its window's begin
            open_tars.add(t)
            open_tars -= {x for x in open_tars if x not in seen[i + 1 :]}
            assert len(open_tars) <= tars_at_once
    assert len({tuple(dict.fromkeys(tar[e])) for e in epochs}) == 4
    fresh = SampleOrder([50], None, 7, (tar, tars_at_once))
    assert (fresh.at(np.arange(120, 170)) == np.concatenate(epochs)[120:170]).all()
    plain = SampleOrder([50], None, 7).epoch(0)
    assert len(set(tar[plain[:8]])) > 3


def test_balance_shows_every_value_as_often_as_every_other(root):
    values = ["dog"] * 40 + ["cat"] * 7 + [None] * 3 + ["cow"] * 13
    table = pa.table({"t:kind": values, "key": [f"{v}{i}" for i, v in enumerate(values)]})
    index = sd.index.Index(table, Counter(), [], set(table.column_names), [], 63, 0)
    said = []
    rows, sizes = balanced(np.arange(63), "kind", index, said.append)
    kinds = table["t:kind"].take(pa.array(rows)).to_pylist()
    assert sizes == [7, 13, 40] and kinds == ["cat"] * 7 + ["cow"] * 13 + ["dog"] * 40
    assert "3 values of 7 to 40" in said[0] and "3 pictures lack it" in said[0]
    order = SampleOrder(sizes, [1 / 3] * 3, 0)
    which = np.repeat(np.arange(3), sizes)[order.at(np.arange(600))]
    taken = np.cumsum(which[:, None] == np.arange(3), axis=0) - np.arange(1, 601)[:, None] / 3
    assert (taken.max(axis=0) - taken.min(axis=0)).max() < 4
    with pytest.raises(InputError, match="no picture has 'colour'"):
        balanced(np.arange(63), "colour", index, print)


# ----------------------------------------------------------------------------------------------------------------
# How they are cut and encoded
# ----------------------------------------------------------------------------------------------------------------


def odd_files() -> dict[str, bytes]:
    """Pictures by extension and what is odd about them."""

    def saved(image: Image.Image, kind: str, **more) -> bytes:
        image.save(file := io.BytesIO(), kind, **more)
        return file.getvalue()

    exif = Image.Exif()
    exif[0x0112] = 6
    upright = Image.fromarray(picture(1))
    clear = Image.fromarray(np.dstack([picture(2), np.full((72, 96), 0, np.uint8)]))
    return {
        "turned.jpg": saved(upright, "JPEG", exif=exif),
        "palette.png": saved(upright.quantize(16), "PNG"),
        "clear.png": saved(clear, "PNG"),
        "grey.png": saved(upright.convert("L"), "PNG"),
        "plain.png": saved(upright, "PNG"),
        "large.png": encode_png(np.kron(picture(5), np.ones((3, 2, 1), np.uint8))),
    }


def test_latents_are_those_of_encode_latents(root, tmp_path):
    """FINETUNE 33, 34 too: both turn pictures by their EXIF data and lay them on white."""
    members = [(name, data) for name, data in odd_files().items()]
    members += [(f"{name.partition('.')[0]}.txt", b"x") for name, _ in members]
    members.sort(key=lambda m: m[0].partition(".")[0])
    tar = write_tar(tmp_path / "s/images/00000.tar", members)
    encode_latents.main(["--images", str(tar.parent), "--out", str(tmp_path / "latents"), "--vae", str(root / "vae"),
                         "--size", "64", "--device", "cpu"])  # fmt: skip
    stored = np.load(tmp_path / "latents/00000.npy")
    order = pq.read_table(tmp_path / "latents/00000.parquet")["image_key"].to_pylist()
    parts = find_parts(str(tar), Captions(), None, Counter())
    index, *_ = index_of(tar, ["n:width", "n:height"])
    split = pictures_of(root, (index, parts))
    assert keys(index) == order and len(order) == 6
    made = split.latents(np.arange(6))
    assert made.dtype == np.float32 and np.allclose(made, stored, rtol=2e-3, atol=2e-3)
    assert (split.latents(np.arange(6)) == made).all()  # kept
    assert all((split.latents(np.array([i])) == made[i]).all() for i in range(6))
    widths = dict(zip(keys(index), index.table["n:width"].to_pylist()))
    assert (widths["s/00000/turned"], widths["s/00000/plain"]) == (72, 96)
    assert decode_image(odd_files()["clear.png"]).min() == 255


def test_with_all_off_the_middle_is_cut_and_draws_change_nothing():
    image = picture(0, 120, 84)
    middle = Image.fromarray(image[18:102]).resize((42, 42), Image.Resampling.BOX)
    assert (Cut(42)(image, None) == np.array(middle)).all()
    assert (Cut(42)(image, np.full(8, 0.9)) == Cut(42)(image, None)).all()
    assert not Cut(42).random and Cut(42, flip=True).random


def test_random_parts_keep_to_their_ranges():
    cutting, rng = Cut(32, (0.25, 1.0), (0.5, 2.0)), np.random.default_rng(0)
    tops, shares, ratios = [], [], []
    for _ in range(2000):
        top, left, high, wide = cutting.part(300, 500, rng.random(8))
        assert 0 <= top <= 300 - high and 0 <= left <= 500 - wide
        ratios.append(wide / high)
        largest = min(500, 300 * ratios[-1])
        shares.append(wide * high / (largest * largest / ratios[-1]))
        tops.append(top)
    assert 0.24 < min(shares) < 0.27 and 0.97 < max(shares) <= 1.02 and abs(np.mean(shares) - 0.625) < 0.02
    assert 0.49 < min(ratios) < 0.52 and 1.95 < max(ratios) < 2.05
    assert abs(np.mean(np.log(ratios))) < 0.03  # uniform in the logarithm
    assert len(set(tops)) > 100
    assert cutting.part(7, 5, np.full(8, 0.999))[2:] == (3, 5) and cutting.part(1, 1, np.zeros(8)) == (0, 0, 1, 1)


def test_jitter_is_that_of_pillow():
    image = picture(3)
    for factors in ((1.3, 1, 1), (0.7, 1, 1), (1, 0.6, 1), (1, 1, 1.4), (1, 1, 0.2)):
        wanted = Image.fromarray(image)
        names = ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color
        for enhance, factor in zip(names, factors):
            wanted = enhance(wanted).enhance(factor)
        assert np.abs(jittered(image, *factors).astype(int) - np.array(wanted)).max() <= 2, factors
    assert (jittered(image, 1, 1, 1) == image).all()


def test_jitter_goes_as_far_up_as_down():
    grey, rng = np.full((8, 8, 3), 100, np.uint8), np.random.default_rng(0)
    levels = [Cut(8, jitter=0.3)(grey, rng.random(8)).mean() for _ in range(500)]  # of brightness alone
    assert 70 <= min(levels) < 72 and 128 < max(levels) <= 130 and abs(np.mean(levels) - 100) < 3
    reds = np.full((8, 8, 3), 100, np.uint8) + np.array([50, 0, 0], np.uint8)
    spread = [np.ptp(Cut(8, jitter=0.3)(reds, rng.random(8))[0, 0].astype(int)) for _ in range(500)]
    assert min(spread) < 50 * 0.7 * 0.8 and max(spread) > 50 * 1.3 * 1.2  # and of saturation, times that


def test_a_showing_depends_on_seed_and_position_alone(root):
    parts = find_parts(str(root / "cat"), Captions(), None, Counter())
    index, *_ = index_of(root / "cat")
    cutting = Cut(64, (0.3, 0.9), (0.9, 1.1), True, 0.2)
    order = SampleOrder([24], None, 3)
    split = pictures_of(root, (index, parts), cutting)
    positions = np.arange(100, 112)
    whole = split.shown(order.at(positions), 0, positions)[1]
    with sd.online.ThreadPoolExecutor(2) as pool:
        other = pictures_of(root, (index, parts), cutting, pool, picture_memory=0.0)
        cuts = [positions[:5], positions[5:6], positions[6:]]
        parts_of = [other.shown(order.at(p), 0, p)[1] for p in other.ahead(iter(cuts), order)]
    assert (np.concatenate(parts_of) == whole).all()
    assert (
        pictures_of(root, (index, parts), cutting, seed=4).shown(order.at(positions), 0, positions)[1] != whole
    ).any()
    same = np.full(40, 5)
    showings = split.shown(same, 0, np.arange(40))[1]
    assert len({x.tobytes() for x in showings}) == 40
    mirrored = pictures_of(root, (index, parts), Cut(64, flip=True)).shown(same, 0, np.arange(40))[1]
    assert len({x.tobytes() for x in mirrored}) == 2
    assert 10 < sum((x == mirrored[0]).all() for x in mirrored) < 30
    assert (
        split.latents(np.array([5])) == pictures_of(root, (index, parts)).latents(np.array([5]))
    ).all()  # validation


def broken_png() -> bytes:
    """A PNG of good checksums whose pixels are no zlib stream."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 96, 72, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", b"no pixels") + chunk(b"IEND", b"")


def test_another_picture_stands_in_for_a_damaged_one_with_its_own_caption(root, tmp_path):
    folder = write_folder(tmp_path / "cat", 6)
    (folder / "p02.jpg").write_bytes(broken_png())  # whole, as its header and checksums say
    index, *_ = index_of(folder)
    parts, said = find_parts(str(folder), Captions(), None, Counter()), []
    split = pictures_of(root, (index, parts), say=said.append)
    which, latents, _ = split.shown(np.array([1, 2, 5, 2]), 0, np.arange(4))
    assert which.tolist() == [1, 3, 5, 3] and (latents[1] == latents[3]).all()
    assert len(said) == 1 and "cat/p02.jpg cannot be decoded (corrupt)" in said[0]
    with pytest.raises(InputError, match="p02.jpg cannot be decoded"):
        pictures_of(root, (index, parts), strict=True).shown(np.array([2]), 0, np.arange(1))
    null, order = np.zeros(micro.LENGTH, np.int64), SampleOrder([6], None, 0)
    order._cache = {0: np.array([2, 0, 1, 3, 4, 5])}
    batch = sd.data.make_batch(split, order, np.arange(2), null, 0.0, 0, 1000)
    assert batch.seen % 2**64 == sum(sd.data.seen_hash(p, f"cat/p0{i}.jpg") for p, i in ((0, 3), (1, 0))) % 2**64
    assert (batch.ids[0].numpy() == split.token_ids(np.array([3]))[0]).all()
    (folder / "p04.jpg").unlink()
    with pytest.raises(InputError, match="cat/p04.jpg, cannot be read any more"):
        pictures_of(root, (index, parts)).latents(np.array([4]))


def test_one_of_several_captions_is_drawn(root, tmp_path):
    members = sample("a", 0, captions=["second", "third", "number 0"]) + sample("b", 1)
    tar = write_tar(tmp_path / "s/images/0.tar", members)
    split = pictures_of(root, (index_of(tar)[0], find_parts(str(tar), Captions(), None, Counter())))
    wanted = [
        sd.text.tokenize(split.tokenizer, [text])[0].tolist() for text in ("number 0", "second", "third", "number 1")
    ]
    for turn, row in ((0.0, 0), (0.34, 1), (0.99, 2)):
        assert split.token_ids(np.array([0, 1]), np.full(2, turn)).tolist() == [wanted[row], wanted[3]]
    assert split.captions.take([0, 1]).to_pylist() == ["number 0", "number 1"] and split.length == micro.LENGTH


@pytest.mark.parametrize(
    "flag, value",
    [
        ("flip", True),
        ("crop_scale", "0.5,1"),
        ("jitter", 0.1),
        ("where", "a<1"),
        ("balance", "a"),
        ("regularise", "a:1"),
    ],
)
def test_flags_of_pictures_are_refused_with_cached_latents(flag, value):
    """FINETUNE 30."""
    off = dict.fromkeys(sd.online.ONLINE_FLAGS) | {"pictures": None, "jitter": 0.0, "window": 0, "flip": False}
    check_settings(off, set())
    with pytest.raises(InputError, match=f"--{flag} is of --pictures.*latents on disk were cut when they were encoded"):
        check_settings(off | {flag: value}, {flag})


class Files(http.server.SimpleHTTPRequestHandler):
    """A server of files: counts what it gave, and ends an answer early while its class says so."""

    given, cut = [], False

    def do_GET(self):
        Files.given.append(self.path)
        data = Path(self.directory + self.path).read_bytes()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if Files.cut else data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(root):
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Files, directory=str(root / "tars")))
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    Files.given, Files.cut = [], False
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()


def remote(text: str, cache: Path, limit: float = 1e9):
    parts = find_parts(text, Captions(), None, Counter(), (cache, limit))
    build_index(parts, 0, print)
    return parts, read_index(parts, [])


def read_all(parts, index) -> list[bytes]:
    return [sd.index.read_picture(parts[r["part"]], r["key"], r["offset"], r["bytes"]) for r in index.table.to_pylist()]


def test_tars_of_a_server_are_got_once_and_again_when_they_had_to_make_room(root, server, tmp_path, monkeypatch):
    monkeypatch.setattr(sd.sources, "PAUSE", 0.0)
    parts, index = remote(server + "/images/{00000..00002}.tar", tmp_path / "cache")
    assert [r["captions"] for r in index.table.to_pylist()] == [[f"number {i}"] for i in range(24)]
    assert read_all(parts, index) == [encode_jpeg(picture(i)) for i in range(24)]
    assert sorted(Files.given) == [f"/images/0000{i}.tar" for i in range(3)]
    [p.remote.path.unlink() for p in parts]
    small = [p._replace(remote=p.remote._replace(limit=0.0)) for p in parts]  # room for one tar alone
    with sd.online.ThreadPoolExecutor(6) as pool:
        rows = index.table.to_pylist()[::-1] + index.table.to_pylist()
        read = list(
            pool.map(lambda r: sd.index.read_picture(small[r["part"]], r["key"], r["offset"], r["bytes"]), rows)
        )
    assert read == [encode_jpeg(picture(i)) for i in [*range(23, -1, -1), *range(24)]]
    assert len(Files.given) >= 3 + 5
    small[1].remote.path.unlink(missing_ok=True)
    os.close(small[1].remote.open())
    assert list((tmp_path / "cache").glob("*.tar")) == [small[1].remote.path]
    settings = dict.fromkeys(("caption", "captions", "caption_encoding", "index", "strict"))
    settings |= {"cache": str(tmp_path / "cache"), "cache_gib": 1e-6, "window": 0, "masks": False}
    with pytest.raises(InputError, match="--cache_gib is 1e-06: raise it, or give --window"):
        sd.online.indexed(server + "/images/{00000..00002}.tar", settings, [], None, 0, print)
    Files.cut = True
    with pytest.raises(InputError, match="cannot get .*ended after"):
        remote(server + "/images/00001.tar", tmp_path / "other")
    with pytest.raises(InputError, match="--cache wants a folder"):
        index_of(server + "/images/00000.tar")


def test_commands_are_run_without_a_shell_and_cut_streams_are_errors(root, tmp_path):
    """SCALE 66."""
    tar, cache = root / "tars/images/00000.tar", tmp_path / "cache"
    parts, index = remote(f"pipe:cat {tar}", cache)
    assert read_all(parts, index) == [encode_jpeg(picture(i)) for i in range(5)]
    assert keys(index)[0] == "tars/00000/0000"
    for command, reason in (
        (f"cat {tar} | touch {tmp_path}/made", "ended with status 1"),
        (f"head -c 4000 {tar}", "4,000 bytes that are no whole tar"),
        (f"head -c 5120 {tar}", "5,120 bytes that are no whole tar"),
        ("false x.tar", "ended with status 1"),
        ("no_such_command x.tar", "no_such_command cannot be run"),
        ("cat 'x.tar", "quotes do not match"),
        ("cat x", "a word that ends in .tar"),
    ):
        with pytest.raises(InputError, match=reason):
            remote(f"pipe:{command}", tmp_path / "other")
    assert not (tmp_path / "made").exists() and not list((tmp_path / "other").glob("*.tar"))
    parts[0].remote.path.unlink()
    write_tar(copy := tmp_path / "tars/images/00000.tar", sample("z", 1))
    told = cache / f"{parts[0].remote.place}.bytes"
    told.write_text(str(copy.stat().st_size))
    with pytest.raises(InputError, match="when it was indexed: put it back"):
        read_all(parts, index)
    off = dict.fromkeys(sd.online.ONLINE_FLAGS) | {
        "pictures": f"pipe:cat {tar}",
        "jitter": 0.0,
        "window": 0,
        "caption": None,
    }
    off |= {"mask_floor": 0.0, "latent_fraction": 1.0, "workers": None, "picture_memory": 1.0, "cache_gib": 1.0}
    check_settings(off, {"pictures"})
    with pytest.raises(InputError, match="--pictures of this run has a command: give that flag again"):
        check_settings(off, {"resume"})


def test_ranges():
    assert read_range("crop_scale", "0.25,1", 0, 1) == (0.25, 1) and read_range("crop_scale", "0.5", 0, 1) == (0.5, 0.5)
    for text in ("", "0,1", "0.5,0.4", "0.5,1.1", "a", "0.1,0.2,0.3", "nan"):
        with pytest.raises(InputError, match="two numbers"):
            read_range("crop_scale", text, 0, 1)


# ----------------------------------------------------------------------------------------------------------------
# Runs
# ----------------------------------------------------------------------------------------------------------------


def train(root: Path, out: Path, pictures, *more, hook=None, world=1, expect=0) -> str:
    """Train 12 steps of 4 on pictures, in one or more processes; returns what they printed."""
    output = out.parent / f"{out.name}.txt"
    output.unlink(missing_ok=True)
    argv = micro.flags(root, out, "--without", "data", "--without", "data_root", "--pictures", pictures,
                       "--vae", root / "vae", "--workers", 0, *more)  # fmt: skip
    pids = micro.start_ranks(world, argv, output, hook) if world > 1 else [micro.start(argv, output, hook)]
    statuses, text = [micro.status_of(pid) for pid in pids], output.read_text()
    assert all(s == expect for s in statuses), (statuses, text[-3000:])
    return text


def killed_in(call: int):
    """A hook: kill -9 in this call of backward, counted from 0, after a save under way."""

    def hook(*_):
        real, count = sd.objective.backward, iter(range(10**9))

        def backward(*args):
            if next(count) == call:
                [t.join() for t in threading.enumerate() if "decode" not in t.name and not t.daemon
                 and t is not threading.main_thread()]  # fmt: skip
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        rebind(sd.objective, "backward", backward)

    return hook


ALL = ("--crop_scale", "0.3,1", "--crop_aspect", "0.9,1.1", "--flip", "--jitter", "0.2", "--max_steps", 15)


@pytest.fixture(scope="session")
def whole(root, tmp_path_factory) -> Path:
    """An undisturbed run of 15 steps of 4, over 2.5 epochs, on pictures that are cut, mirrored and coloured."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train(root, out, root / "tars/images/{00000..00002}.tar", *ALL)
    return out


def seen_of(names: list[str], steps: int, seed: int = 1) -> list[str]:
    """The `seen` of each step's line of the log, if every picture comes once an epoch, in SampleOrder's order."""
    order, total, lines = SampleOrder([len(names)], None, seed), 0, []
    for position, i in enumerate(order.at(np.arange(4 * steps))):
        total = (total + sd.data.seen_hash(position, names[i])) % 2**64
        lines.append(f"{total:016x}")
    return lines[3::4]


def test_every_picture_comes_once_an_epoch_and_none_is_of_the_held_out(root, whole):
    """SCALE 58, 59."""
    index, *_ = index_of(root / "tars/images")
    out = held_out(index.table, None)
    names = [k for k, o in zip(keys(index), out) if not o]
    assert 1 <= out.sum() <= 6 and 4 * 15 > 2 * len(names)
    assert [row["seen"] for row in micro.rows(whole)] == seen_of(names, 15)


def test_resume_after_a_kill_is_exact_with_threads_too(root, whole, tmp_path):
    """SCALE 62: epoch 3, and another number of workers; what was decoded ahead does not count."""
    more = (root / "tars/images/*.tar", *ALL)
    train(root, tmp_path / "cut", *more, "--workers", 2, hook=killed_in(13), expect=-signal.SIGKILL)
    train(root, tmp_path / "cut", *more, "--workers", 3, "--resume")
    assert [d for d in micro.differences(whole, tmp_path / "cut") if d != "state.json: settings"] == []


def test_two_processes_on_one_tar_show_the_same_pictures(root, tmp_path):
    """SCALE 56, 57: one tar, two processes, two threads each; and kept latents are those of the first showing."""
    more = (root / "one/images", "--max_steps", 9)
    train(root, tmp_path / "one", *more)
    train(root, tmp_path / "two", *more, "--batch", 2, "--workers", 2, world=2, hook=None)
    one, two = micro.rows(tmp_path / "one"), micro.rows(tmp_path / "two")
    assert [r["seen"] for r in one] == [r["seen"] for r in two]
    assert np.allclose([r["loss"] for r in one], [r["loss"] for r in two], rtol=1e-4)
    train(root, tmp_path / "cut", *more, "--batch", 2, world=2, hook=killed_in(7), expect=-signal.SIGKILL)
    train(root, tmp_path / "cut", *more, "--batch", 2, "--resume", world=2)
    assert [d for d in micro.differences(tmp_path / "two", tmp_path / "cut") if d != "state.json: settings"] == []
    train(root, tmp_path / "none", *more, "--picture_memory", 0)
    assert [d for d in micro.differences(tmp_path / "one", tmp_path / "none") if d != "state.json: settings"] == []


def test_validation_changes_nothing_of_the_training(root, tmp_path, whole):
    """FINETUNE 32."""
    train(root, tmp_path / "run", root / "tars/images", *ALL, "--val_steps", 0)
    (tensors, _), (others, _) = (micro.contents(micro.checkpoints(out)[-1]) for out in (whole, tmp_path / "run"))
    assert tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
    assert micro.rows(tmp_path / "run") == micro.rows(whole)
    assert len(micro.rows(whole, "validation.jsonl")) == 4 * 4  # at 4, 8, 12 and the end, of both splits and weights


def test_where_balance_regularise_and_images(root, tmp_path):
    text = train(root, tmp_path / "run", root / "tars/images", "--where", "score<0.5", "--balance", "kind", "--images",
                 50, "--without", "max_steps", "--regularise", f"{root}/cat:1", "--val_fraction", 0.2)  # fmt: skip
    assert "--where keeps 12 of 24 pictures; 0 lack" in text and "--balance kind: 2 values" in text
    assert "pictures: 24 in" in text and "12 steps of 4 images" in text
    state = json.loads((micro.checkpoints(tmp_path / "run")[-1] / "state.json").read_text())
    assert state["images"] == 48
    index, *_ = index_of(root / "tars/images", ["t:kind"], where="score<0.5")
    table = index.table
    rows, sizes = balanced(np.flatnonzero(~held_out(table, 0.2)), "kind", index, print)
    names = table["key"].take(pa.array(rows)).to_pylist() + keys(index_of(root / "cat")[0])
    order = SampleOrder([*sizes, 24], [0.5, 0.5, 1.0], 1)
    shown = order.at(np.arange(48))
    assert abs((shown >= len(rows)).sum() - 24) <= 2
    assert int(micro.rows(tmp_path / "run")[-1]["seen"], 16) == sum(
        sd.data.seen_hash(p, names[i]) for p, i in enumerate(shown)) % 2**64  # fmt: skip


def test_one_picture_is_enough_and_a_run_in_windows_is_exact(root, tmp_path):
    text = train(root, tmp_path / "one", write_folder(tmp_path / "cat", 1), "--max_steps", 2, "--val_steps", 1)
    assert "1 training and 0 held-out pictures" in text and "validation is on training pictures alone" in text
    assert {row["split"] for row in micro.rows(tmp_path / "one", "validation.jsonl")} == {"train"}
    train(root, tmp_path / "run", root / "tars/images", "--max_steps", 8, "--window", 1, "--val_fraction", 0)
    index, total = index_of(root / "tars/images")[0], 0
    order = SampleOrder([24], None, 1, (index.table["part"].to_numpy(), 1))
    for position, i in enumerate(order.at(np.arange(32))):
        total += sd.data.seen_hash(position, keys(index)[i])
    assert micro.rows(tmp_path / "run")[-1]["seen"] == f"{total % 2**64:016x}"


def test_a_run_does_not_go_on_with_other_pictures_or_another_vae(root, tmp_path):
    folder = write_folder(tmp_path / "cat", 8)
    train(root, tmp_path / "run", folder, "--max_steps", 6, "--stop_at", 3)
    (folder / "p03.txt").write_text("number 8")
    again = (folder, "--max_steps", 6, "--resume")
    assert "the training pictures or their captions are others" in train(root, tmp_path / "run", *again, expect=2)
    (folder / "p03.txt").write_text("number 3")
    torch.manual_seed(5)
    sd.weights.parts.save_vae(micro.SD_Model.VAE(micro.SD_Model.PRESETS["micro"]["vae"]), tmp_path / "vae")
    changed = train(root, tmp_path / "run", *again, "--vae", tmp_path / "vae", expect=2)
    assert "the data changed since the checkpoint (VAE)" in changed
    train(root, tmp_path / "run", *again)


def test_vae_and_text_encoder_come_with_the_model(root, tmp_path, whole):
    """As in `SD_Train.py --phase finetune --pictures DIR --init_from MODEL --out OUT`."""
    more = ("--without", "text_encoder", "--init_from", whole, "--caption", "a {folder}", "--max_steps", 4, "--phase",
            "finetune")  # fmt: skip
    argv = micro.flags(root, tmp_path / "run", "--without", "data", "--without", "data_root", "--pictures",
                       root / "cat", *more)  # fmt: skip
    output = tmp_path / "out.txt"
    assert micro.status_of(micro.start(argv, output)) == 0, output.read_text()
    settings = json.loads((tmp_path / "run/config.json").read_text())
    assert (settings["vae"], settings["text_encoder"]) == (str(whole), str((root / "text_encoder").resolve()))
    refused = train(root, tmp_path / "no", root / "cat", "--data", "things", expect=2)
    assert "--pictures and --data both say what to train on" in refused
