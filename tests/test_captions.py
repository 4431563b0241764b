"""Several captions a picture, from the tars to the batches; rows held out by a list or a column; and datasets and
latents of several kinds side by side."""

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro
from micro import differences
from test_cases_runs import train
from test_data_pipeline import PIPELINE, load, run

import sd.data
import sd.files
import sd.shards
import sd.text
from sd.data import LatentStore, SampleOrder, Source, Split, make_batch, validation_batches
from sd.errors import InputError

NAMES = "image_key input_ids caption url width height similarity aesthetic pwatermark punsafe sha256".split()


# --- 04: from tars to tokens


SAMPLES = {  # of shard 1: caption, what else the JSON holds, the captions that come of it
    "a": ("cat 1", {"captions": ["cat 1", "a cat", "  the cat ", "", "a cat", None, 5], "split": "val"},
          ["cat 1", "a cat", "the cat"]),
    "b": ("cat 2", {"captions": ["other", "cat 2"], "split": "train"}, ["cat 2", "other"]),
    "c": ("cat 3", {"captions": "cat cat"}, ["cat 3"]),
    "d": ("", {"captions": [" ", "first \ud800", "more words than the twelve ids"]},
          ["first ?", "more words than the twelve ids"]),
    "e": ("", {"captions": [None, ""]}, []),
}  # fmt: skip


@pytest.fixture
def emoji(tmp_path) -> Path:
    """emoji/ with a tokenizer of 12 ids and two shards, the first of one caption a picture."""
    folder = tmp_path / "emoji"
    micro.make_tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "images").mkdir()
    with sd.shards.ShardWriter(folder / "images/00000.tar") as shard:
        for i in range(5):
            shard.add(f"p{i}", b"x", "png", f"dog {i}", {"captions": [f"dog {i}"] * (i % 3), "width": 5})
    with sd.shards.ShardWriter(folder / "images/00001.tar") as shard:
        for key, (caption, _, _) in SAMPLES.items():
            shard.add(key, b"x", "png", caption, {})
    rewrite_json(folder / "images/00001.tar")
    return folder


def rewrite_json(tar: Path):
    """The tar with SAMPLES' JSON, which may hold halves of characters."""
    members = []
    with tarfile.open(tar) as old:
        for member in old:
            members.append((member, old.extractfile(member).read()))
    with tarfile.open(tar, "w") as new:
        for member, data in members:
            if member.name.endswith(".json"):
                data = json.dumps(SAMPLES[member.name[0]][1]).encode()
                member.size = len(data)
            new.addfile(member, io.BytesIO(data))


def tokenise(folder: Path, *more, out="tokens") -> str:
    paths = ["--in", folder / "images", "--out", folder / out, "--tokenizer", folder / "tokenizer"]
    return run("04_tokenise.py", *paths, *more)


def test_04_keeps_all_captions_and_the_split(emoji):
    text = tokenise(emoji)
    plain, rich = (pq.read_table(emoji / f"tokens/0000{i}.parquet") for i in (0, 1))
    assert plain.column_names == NAMES and rich.column_names == [*NAMES, "split", "more_captions", "more_input_ids"]
    rows, tokenizer = rich.to_pylist(), micro.make_tokenizer()
    assert [row["image_key"][-1] for row in rows] == ["a", "b", "c", "d"]
    for row in rows:
        captions = SAMPLES[row["image_key"][-1]][2]
        assert [row["caption"], *row["more_captions"]] == captions
        ids = [row["input_ids"], *row["more_input_ids"]]
        assert ids == sd.text.tokenize(tokenizer, captions).tolist()
    assert [row["split"] for row in rows] == ["val", "train", None, None]
    manifest = sd.files.read_json(emoji / "tokens/manifest.json")
    every = [text for _, _, captions in SAMPLES.values() for text in captions] + [f"dog {i}" for i in range(5)]
    lengths = [len(ids) for ids in tokenizer(every)["input_ids"]]
    assert (manifest["rows"], manifest["captions"]) == (9, 13) and manifest["left_out"] == {"empty_caption": 1}
    assert manifest["truncated"] == sum(n > 12 for n in lengths) > 0
    assert manifest["tokens"] == sum(min(n, 12) for n in lengths)
    assert "13 captions of emoji" in text


def test_04_of_one_caption_a_picture_is_as_it_was(emoji):
    for path in (emoji / "images").glob("00001*"):
        path.unlink()
    tokenise(emoji)
    manifest = sd.files.read_json(emoji / "tokens/manifest.json")
    assert "captions" not in manifest and manifest["rows"] == 5
    run("05_build_hf_dataset.py", "--in", emoji / "tokens", "--out", emoji / "dataset")
    with pa.ipc.open_stream(emoji / "dataset/train/data-00000-of-00001.arrow") as stream:
        assert stream.schema.names == NAMES[:3]
        features = json.loads(stream.schema.metadata[b"huggingface"])["info"]["features"]
    assert list(features) == NAMES[:3]
    settings = sd.files.read_json(emoji / "dataset/manifest.json")["settings"]
    assert set(settings) == {"file_rows", "inputs", "val_fraction"}


def test_04_gives_the_same_with_the_library_in_rust_alone(emoji, monkeypatch):
    """And without transformers, which costs a process seconds. A tokenizer whose class does more is used whole."""
    tokenise(emoji)
    monkeypatch.setattr(load("04_tokenise.py"), "fast_tokenizer", lambda tokenizer: "")
    tokenise(emoji, out="slow")
    for path in sorted((emoji / "tokens").iterdir()):
        assert path.read_bytes() == (emoji / "slow" / path.name).read_bytes(), path.name
    tokenizer = micro.make_tokenizer()
    assert sd.text.fast_tokenizer(tokenizer)

    class More(type(tokenizer)):
        def __call__(self, texts, **more):
            return super().__call__([text.replace("photo", "x") for text in texts], **more)

    tokenizer.__class__ = More
    assert sd.text.fast_tokenizer(tokenizer) == ""


def test_a_worker_of_04_does_without_transformers(emoji):
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import importlib; from pathlib import Path\n"
        "script = importlib.import_module('04_tokenise'); fast = Path(sys.argv[2]).read_text()\n"
        "encode = script.encoder_of('nowhere', fast, 12); print(encode(['cat 1', 'a ' * 30])[1])\n"
        "assert 'transformers' not in sys.modules"
    )
    (emoji / "fast").write_text(sd.text.fast_tokenizer(micro.make_tokenizer()))
    command = [sys.executable, "-c", code, PIPELINE, emoji / "fast"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["1"], done.stderr


# --- 05: from tokens to a dataset


def token_folder(folder: Path, source: str, count: int, split=None, captions=None, column="split") -> Path:
    """A folder as 04 writes it: rows <source>/00000/0000 and so on, in shards of 7; split, captions: of each row."""
    folder.mkdir()
    tokenizer, shards = micro.make_tokenizer(), {}
    for start in range(0, count, 7):
        rows = range(start, min(start + 7, count))
        texts = [f"{source} {i}" for i in rows]
        ids = sd.text.tokenize(tokenizer, texts)
        kind = pa.list_(pa.int32(), micro.LENGTH)
        columns = {"image_key": [f"{source}/00000/{i:04d}" for i in rows], "caption": texts,
                   "input_ids": pa.FixedSizeListArray.from_arrays(ids.ravel(), type=kind)}  # fmt: skip
        if split and any(split[i] for i in rows):
            columns[column] = pa.array([split[i] for i in rows], pa.string())
        if captions and any(captions[i] for i in rows):
            columns["more_captions"] = pa.array([captions[i] for i in rows], pa.list_(pa.string()))
            more = [sd.text.tokenize(tokenizer, captions[i]).tolist() if captions[i] else [] for i in rows]
            columns["more_input_ids"] = pa.array(more, pa.list_(kind))
        pq.write_table(pa.table(columns), folder / f"{start:05d}.parquet")
        shards[f"{start:05d}.parquet"] = len(texts)
    facts = {"max_length": micro.LENGTH, "vocab_size": len(tokenizer), "source": source, "rows": count}
    facts |= {"tokenizer_hash": sd.text.tokenizer_hash(tokenizer), "shards": shards}
    sd.files.write_manifest(folder, {"script": "04_tokenise.py", "complete": True, **facts})
    return folder


def build(out: Path, *arguments, status=0) -> str:
    text = run("05_build_hf_dataset.py", "--out", out, "--in", *arguments, status=status)
    assert not out.with_name(out.name + ".tmp").exists()
    return text


def sides(out: Path) -> dict[str, set[str]]:
    return {split: set(sd.data.read_split(out, split)[0].to_pylist()) for split in ("train", "val")}


MORE = [[f"view {i} {k}" for k in range(i % 4)] for i in range(40)]  # 0 to 3 further captions


def test_05_writes_all_captions(tmp_path):
    """Beside a source of one caption each, in several files, and as the datasets library reads it."""
    rich = token_folder(tmp_path / "rich", "rich", 40, captions=MORE)
    plain = token_folder(tmp_path / "plain", "plain", 30)
    build(tmp_path / "d", plain, rich, "--file_rows", 9, "--val_fraction", 0.2)
    library = pytest.importorskip("datasets").load_from_disk(str(tmp_path / "d"))
    tokenizer, found = micro.make_tokenizer(), 0
    for split in ("train", "val"):
        keys, ids, counts, captions = sd.data.read_split(tmp_path / "d", split)
        ends, table = np.cumsum(counts), library[split].to_list()
        assert [row["image_key"] for row in table] == keys.to_pylist()
        for i, (key, caption) in enumerate(zip(keys.to_pylist(), captions.to_pylist())):
            source, number = key.split("/")[0], int(key[-4:])
            wanted = [f"{source} {number}", *(MORE[number] if source == "rich" else [])]
            assert caption == wanted[0] and [table[i]["caption"], *table[i]["more_captions"]] == wanted
            own = sd.text.tokenize(tokenizer, wanted).tolist()
            assert ids[ends[i] - counts[i] : ends[i]].tolist() == own
            assert [table[i]["input_ids"], *table[i]["more_input_ids"]] == own
            found += 1
    assert found == 70


def test_05_holds_out_the_rows_whose_column_says_so(tmp_path):
    """A source that says nothing goes by the hash, and so do silent rows; without the flag all do."""
    words = ["train", "VAL ", "valid", "validation", "test", "held_out", None, ""]
    said = [words[i % 8] for i in range(40)]
    rich, plain = token_folder(tmp_path / "a", "a", 40, said), token_folder(tmp_path / "b", "b", 20)
    text = build(tmp_path / "d", rich, plain, "--split_column", "--val_fraction", 0.3)
    hashed = {key for source, n in (("a", 40), ("b", 20)) for i in range(n)
              if sd.shards.key_fraction(key := f"{source}/00000/{i:04d}") < 0.3}  # fmt: skip
    told = {f"a/00000/{i:04d}" for i in range(40) if i % 8 in (1, 2, 3, 4, 5)}
    silent = {key for key in hashed if key.startswith("b") or int(key[-4:]) % 8 > 5}
    assert 0 < len(silent) < len(hashed) and sides(tmp_path / "d")["val"] == told | silent
    assert f"--val_list: 0, --split_column: 25, hash: {len(silent)}" in text
    build(tmp_path / "plain", rich, plain, "--val_fraction", 0.3)
    assert sides(tmp_path / "plain")["val"] == hashed
    # no row of a source that says something is held out for want of one; one of a source that says nothing is
    lowest = min(range(20), key=lambda i: sd.shards.key_fraction(f"c/00000/{i:04d}"))
    train = token_folder(tmp_path / "c", "c", 20, [None if i == lowest else "train" for i in range(20)])
    build(tmp_path / "e", train, plain, "--split_column", "split", "--val_fraction", 1e-9)
    lowest = min((f"b/00000/{i:04d}" for i in range(20)), key=sd.shards.key_fraction)
    assert sides(tmp_path / "e")["val"] == {lowest}


def test_05_holds_out_the_rows_of_a_list(tmp_path):
    """Whole keys, or what follows source and shard; none by hash; beside a column its rows too."""
    said = ["train" if i % 2 else None for i in range(39)] + ["val"]
    rich, plain = token_folder(tmp_path / "a", "a", 40, said), token_folder(tmp_path / "b", "b", 20)
    (tmp_path / "list.txt").write_bytes("\ufeffa/00000/0001\r\n\r\n 0012 \r\nb/00000/0003".encode())
    named = {"a/00000/0001", "a/00000/0012", "b/00000/0012", "b/00000/0003"}
    more = ["--val_list", tmp_path / "list.txt", "--val_fraction", 0.5]
    build(tmp_path / "d", rich, plain, *more)
    assert sides(tmp_path / "d")["val"] == named
    build(tmp_path / "d", rich, plain, *more, "--split_column")  # other settings: built anew
    assert sides(tmp_path / "d")["val"] == named | {"a/00000/0039"}
    assert "done already" in build(tmp_path / "d", rich, plain, *more, "--split_column")
    build(tmp_path / "d", rich, plain, *more)
    (tmp_path / "list.txt").write_text("0012\n")
    assert "done already" not in build(tmp_path / "d", rich, plain, *more)
    assert sides(tmp_path / "d")["val"] == {"a/00000/0012", "b/00000/0012"}


def test_05_refuses_lists_and_columns_that_say_nothing_or_nonsense(tmp_path):
    rich = token_folder(tmp_path / "a", "a", 20, [None] * 9 + ["dev"] + [None] * 10)
    text = build(tmp_path / "d", rich, "--split_column", status=2)
    assert "split of a/00000/0009 is 'dev'" in text and "held_out" in text
    (tmp_path / "l").write_text("0003\na/00000/00\n")
    text = build(tmp_path / "d", rich, "--val_list", tmp_path / "l", status=2)
    assert "names a/00000/00, and no row" in text
    (tmp_path / "l").write_text("\n \n")
    assert "names no row" in build(tmp_path / "d", rich, "--val_list", tmp_path / "l", status=2)
    assert "cannot read" in build(tmp_path / "d", rich, "--val_list", tmp_path / "none", status=2)
    assert "column part that" in build(tmp_path / "d", rich, "--split_column", "part", status=2)
    for name in ("", "caption", "more_input_ids"):
        assert "a column that says" in build(tmp_path / "d", rich, "--split_column", name, status=2)
    everything = token_folder(tmp_path / "b", "b", 9, ["val"] * 9)
    assert "name fewer" in build(tmp_path / "d", everything, "--split_column", status=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "l"]


# --- sd/data.py: from datasets to batches


@pytest.fixture
def root(tmp_path) -> Path:
    return with_captions(micro.make_data(tmp_path / "data", {"a": 60, "b": 20}) / "a/dataset").parent.parent


def with_captions(dataset: Path, changed: dict | None = None) -> Path:
    """Gives picture i of each split i % 4 further captions 'view i k'; changed: others, by (i, k)."""
    tokenizer = micro.make_tokenizer()
    for split in ("train", "val"):
        path = dataset / split / "data.arrow"
        table = pa.ipc.open_stream(path.read_bytes()).read_all().select(["image_key", "caption", "input_ids"])
        more = [[(changed or {}).get((i, k), f"view {i} {k}") for k in range(i % 4)] for i in range(len(table))]
        ids = [sd.text.tokenize(tokenizer, texts).tolist() if texts else [] for texts in more]
        table = table.append_column("more_captions", pa.array(more, pa.list_(pa.string())))
        kind = pa.list_(pa.list_(pa.int32(), micro.LENGTH))
        table = table.append_column("more_input_ids", pa.array(ids, kind))
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table, max_chunksize=7)
    return dataset


def without_captions(dataset: Path):
    for split in ("train", "val"):
        path = dataset / split / "data.arrow"
        table = pa.ipc.open_stream(path.read_bytes()).read_all().select(["image_key", "caption", "input_ids"])
        with pa.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)


def split_of(root: Path, *names: str, split="train", cap=None, fraction=1.0) -> Split:
    sources = [Source(name, None, cap, root / name / "dataset", root / name / "latents") for name in names]
    return Split(sources, [LatentStore(s.latents, False) for s in sources], split, fraction)


def batch_of(split: Split, positions, seed=0, drop=0.1):
    order = SampleOrder(split.sizes, None, 0)
    return make_batch(split, order, np.asarray(positions), np.zeros(micro.LENGTH, int), drop, seed, 1000)


def captions_of(key: str) -> list[str]:
    """All captions of a training picture of root."""
    source, i = key.split("/")[0], int(key[-9:]) - 8
    return [f"{('red', 'green', 'blue')[i % 3]} {i}"] + [f"view {i} {k}" for k in range(i % 4) if source == "a"]


@pytest.mark.parametrize("names", [("a",), ("b", "a"), ("a", "b")])
@pytest.mark.parametrize("cap, fraction", [(None, 1.0), (15, 0.7)])
def test_captions_stay_with_their_picture(root, names, cap, fraction):
    split, tokenizer = split_of(root, *names, cap=cap, fraction=fraction), micro.make_tokenizer()
    keys = split.keys.to_pylist()
    assert len(split) == len(keys) == sum(split.sizes) and split.first[-1] == len(split.ids)
    for i, key in enumerate(keys):
        wanted = captions_of(key)
        assert split.captions[i].as_py() == wanted[0]
        turns = (np.arange(len(wanted)) + 0.5) / len(wanted)
        found = split.token_ids(np.full(len(wanted), i), turns)
        assert found.tolist() == sd.text.tokenize(tokenizer, wanted).tolist()
        assert split.token_ids(np.array([i])).tolist() == found[:1].tolist()
        assert split.token_ids(np.array([i]), np.array([1 - 2**-53])).tolist() == found[-1:].tolist()


def test_a_showing_draws_its_caption_from_seed_and_position_alone(root):
    split, tokenizer = split_of(root, "a", "b"), micro.make_tokenizer()
    positions = np.arange(80 * 60)
    batch, index = batch_of(split, positions, drop=0), SampleOrder(split.sizes, None, 0).at(positions)
    cut = [batch_of(split, part, drop=0).ids for part in np.array_split(positions, 7)]
    assert torch.equal(torch.cat(cut), batch.ids)
    shuffled = np.random.default_rng(0).permutation(positions)
    assert torch.equal(batch_of(split, shuffled, drop=0).ids, batch.ids[shuffled])
    assert not torch.equal(batch_of(split, positions, seed=1, drop=0).ids, batch.ids)
    keys, shares = split.keys.to_pylist(), {}
    for i, ids in zip(index.tolist(), batch.ids.tolist()):
        known = sd.text.tokenize(tokenizer, captions_of(keys[i])).tolist()
        shares.setdefault(len(known), np.zeros(len(known)))[known.index(ids)] += 1
    assert set(shares) == {1, 2, 3, 4}
    for n, counts in shares.items():  # within four standard deviations of equal shares
        assert np.abs(counts - counts.sum() / n).max() <= 4 * (counts.sum() / n * (1 - 1 / n)) ** 0.5


def test_all_else_that_is_drawn_stays_as_it_is(root):
    several = split_of(root, "a", "b")
    batch, held_out = batch_of(several, range(300)), split_of(root, "a", split="val")
    validation = validation_batches(held_out, 8, "val", 0, 1000)[0]
    digests = several.digest(), held_out.digest()
    without_captions(root / "a/dataset")
    single = split_of(root, "a", "b")
    plain, plain_validation = batch_of(single, range(300)), split_of(root, "a", split="val")
    for name in ("latents", "noise", "t", "seen"):
        assert np.array_equal(getattr(batch, name), getattr(plain, name)), name
    null = ~batch.ids.any(dim=1)
    assert torch.equal(null, ~plain.ids.any(dim=1)) and 10 < null.sum() < 60  # the same captions are dropped
    assert not torch.equal(batch.ids, plain.ids)
    others = validation_batches(plain_validation, 8, "val", 0, 1000)[0]
    assert all(torch.equal(a, b) for a, b in zip(validation[:4], others[:4]))  # validation is on the first captions
    assert digests[0][0] != single.digest()[0] and digests[1][0] != plain_validation.digest()[0]


def test_one_caption_each_in_a_list_is_a_dataset_without_lists(root):
    """Lists that are all empty change nothing, the digest included."""
    plain = split_of(root, "b")
    path = root / "b/dataset/train/data.arrow"
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    empty = pa.array([[]] * len(table), pa.list_(pa.list_(pa.int32(), micro.LENGTH)))
    table = table.append_column("more_input_ids", empty)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)
    listed = split_of(root, "b")
    assert plain.first is listed.first is None and plain.digest() == listed.digest()


def test_the_digest_covers_all_captions_and_whose_they_are(root):
    before = split_of(root, "a").digest()[0]
    with_captions(root / "a/dataset", {(7, 2): "another"})
    assert split_of(root, "a").digest()[0] != before
    with_captions(root / "a/dataset")
    split = split_of(root, "a")
    assert split.digest()[0] == before
    split.first = split.first.copy()
    split.first[3] += 1  # the same ids, one of them another picture's
    assert split.digest()[0] != before


@pytest.mark.parametrize("fault, said", [("null", "nulls"), ("length", "as long"), ("type", "not lists of lists")])
def test_faulty_lists_of_captions_are_refused(root, fault, said):
    path = root / "a/dataset/train/data.arrow"
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    more = {
        "null": pa.array([None] + [[]] * 59, pa.list_(pa.list_(pa.int32(), micro.LENGTH))),
        "length": pa.array([[[1, 2]]] + [[]] * 59, pa.list_(pa.list_(pa.int32()))),
        "type": pa.array([["x"]] * 60),
    }[fault]
    table = table.drop_columns(["more_input_ids"]).append_column("more_input_ids", more)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(InputError, match=said):
        split_of(root, "a")


def test_uniforms_are_splitmix64():
    """The generator's published outputs for the seed 0 (Vigna, splitmix64.c); no position has another's number."""
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert sd.data._mixed(np.arange(3, dtype=np.uint64)).tolist() == first
    a, b = (sd.data.uniforms(seed, 4, np.arange(100_000)) for seed in (0, 1))
    assert a.min() >= 0 and a.max() < 1 and abs(a.mean() - 0.5) < 0.004
    assert len(np.unique(np.concatenate([a, b]))) == 200_000 and abs(np.corrcoef(a, b)[0, 1]) < 0.015
    assert abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.015


# --- SD_Train.py


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """`things` of 42 pictures with several captions, 8 held out; `bare` of 10 with one, none held out."""
    root = micro.make_data(tmp_path_factory.mktemp("micro") / "data", {"things": 42})
    with_captions(root / "things/dataset")
    vae = json.loads((root / "things/latents/manifest.json").read_text())["vae"]
    keys = [f"bare/00000/{i:09d}" for i in range(10)]
    micro.write_dataset(root / "bare/dataset", micro.make_tokenizer(), {"train": keys, "val": []})
    micro.write_latents(root / "bare/latents", keys, vae, seed=5)
    return root


def test_a_run_of_several_captions_resumes_and_knows_them(data, tmp_path):
    """In a mixture with a source that has one caption a picture and none held out, which comes first."""
    mixture = ["--data", "bare,things"]
    text = train(data, tmp_path / "whole", *mixture)
    assert "captions: 113 of the 52 training pictures" in text and "no held-out pictures in bare" in text
    train(data, tmp_path / "parts", *mixture, "--stop_at", 5)
    train(data, tmp_path / "parts", *mixture, "--resume")
    assert differences(tmp_path / "whole", tmp_path / "parts") == []
    changed = shutil.copytree(data, tmp_path / "data")
    with_captions(changed / "things/dataset", {(41, 0): "another"})
    with pytest.raises(InputError, match="training pictures or their captions are others"):
        train(changed, tmp_path / "parts", *mixture, "--resume", "--max_steps", 14)


def test_datasets_and_latents_of_several_kinds_lie_side_by_side(data, tmp_path):
    root = shutil.copytree(data, tmp_path / "data")
    things = root / "things"
    known = {"data_root": root, "data": "things", "dataset": None}
    for size in ({}, {"size": 64}):
        assert sd.data.parse_sources(known | size)[0][3:] == (things / "dataset", things / "latents")
    train(root, tmp_path / "plain", "--max_steps", 3)
    (things / "latents").rename(things / "latents_64")
    (things / "dataset").rename(things / "dataset_b")
    with pytest.raises(InputError, match=re.escape(str(things / "dataset") + " was to hold the dataset")):
        train(root, tmp_path / "run", "--max_steps", 3)
    # latents of another size beside those of this one, and another tokenizer's dataset
    shutil.copytree(things / "latents_64", things / "latents")
    manifest = json.loads((things / "latents/manifest.json").read_text())
    (things / "latents/manifest.json").write_text(json.dumps(manifest | {"size": 128}))
    assert sd.data.parse_sources(known | {"size": 64, "dataset_name": "dataset_b"})[0][3:] == (
        things / "dataset_b", things / "latents_64")  # fmt: skip
    train(root, tmp_path / "run", "--max_steps", 3, "--dataset_name", "dataset_b")
    assert differences(tmp_path / "plain", tmp_path / "run", settings=False) == []
    shutil.rmtree(things / "latents_64")
    with pytest.raises(InputError, match=f"64 px were wanted.*{things}/latents are of 128.*{things}/latents_64"):
        train(root, tmp_path / "other", "--dataset_name", "dataset_b")
    for name in ("", "..", "a/b", "/tmp"):
        with pytest.raises(InputError, match="--dataset_name wants the name"):
            sd.data.parse_sources(known | {"dataset_name": name})
    one = ["--dataset", things / "dataset_b", "--latents", things / "latents", "--dataset_name", "dataset_b"]
    with pytest.raises(InputError, match="--dataset_name is of sources below"):
        train(root, tmp_path / "other", *one)


def test_a_run_goes_on_where_its_dataset_has_another_name_now(data, tmp_path):
    """And so does one whose checkpoint was written before datasets had names."""
    root, run = shutil.copytree(data, tmp_path / "data"), tmp_path / "run"
    train(root, run, "--max_steps", 6, "--stop_at", 3)
    state = run / "checkpoints/step_00000003/state.json"
    saved = json.loads(state.read_text())
    assert saved["settings"].pop("dataset_name") == "dataset"
    state.write_text(json.dumps(saved))
    manifest = state.parent / "manifest.json"
    listed = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**listed, **{"state.json": sd.files.digests(state.parent)["state.json"]}}))
    (root / "things/dataset").rename(root / "things/renamed")
    assert "from step 3" in train(root, run, "--max_steps", 6, "--resume", "--dataset_name", "renamed")
