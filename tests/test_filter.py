"""02_filter.py at scale: every rule against plain loops, duplicates over shards, phases, a kill, memory."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data_pipeline import ENVIRONMENT, PIPELINE, load, run, write_rows

import sd.files
import sd.hashes

BENCH = PIPELINE.parent / "benchmarks" / "filter_bench.py"
FILTER = load("02_filter.py")
NAN = float("nan")


def bench():
    """benchmarks/filter_bench.py as a module: it makes rows in LAION's schemas."""
    spec = importlib.util.spec_from_file_location("filter_bench", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_filter(source: Path, out: Path, *flags, status: int = 0) -> dict:
    """Runs 02_filter.py; its manifest, or what it printed if it fails."""
    done = run("02_filter.py", "--in", source, "--out", out, *flags, status=status)
    return sd.files.read_json(out / "manifest.json") if status == 0 else done


def column(folder: Path, name: str) -> list:
    """A column of all shards of a folder, in order."""
    return [v for path in sorted(folder.glob("*.parquet")) for v in pq.read_table(path)[name].to_pylist()]


# ---------------------------------------------------------------------------------------------------------------------
# Rules


@pytest.mark.parametrize(
    ("word", "caption", "blocked"),
    [
        ("sex", "a SEX shop", True),
        ("sex", "Sussex, sexy, unisex2", False),
        ("sex", "img_sex_001.jpg", True),
        ("sex", "sex", True),
        ("stock photo", "Stock   Photo of a cat", True),
        ("stock photo", "stock photos", False),
        ("straße", "die STRAßE hier", True),
        ("café", "CAFÉ noir", True),
        ("café", "cafe\u0301 noir", True),  # an accent of its own
        ("cafe", "café", False),
        ("caf", "café", False),
        ("x", "x\u0323", False),  # a mark belongs to its letter
        ("sex", "sex2", False),
        ("οδος", "Η ΟΔΟΣ", True),
        ("word", "ｗｏｒｄ in full width", True),
        ("c++", "learn C++ now", True),
        ("a.b", "a-b", False),
        ("nan", "banana", False),
    ],
)
def test_blocked_words(word, caption, blocked):
    captions = pa.array([caption, "harmless"], pa.large_string())
    assert FILTER.has_word(captions, FILTER.word_patterns([word])).tolist() == [blocked, False]


def test_long_blocklist_is_found_whole_and_fast():
    words = [f"bad{i}x" for i in range(3000)]
    captions = pa.array([f"a picture of bad{i}x things" for i in range(2999, 2000, -1)] + ["good"] * 2000)
    start = time.perf_counter()
    found = FILTER.has_word(captions.cast(pa.large_string()), FILTER.word_patterns(words))
    assert found.tolist() == [True] * 999 + [False] * 2000
    assert time.perf_counter() - start < 5


@pytest.mark.parametrize(
    ("url", "blocked"),
    [
        ("https://bad.com/x.jpg", True),
        ("http://IMG.cdn.Bad.COM:8080/x.jpg", True),
        ("https://user:pass@bad.com/x", True),
        ("//bad.com", True),
        ("bad.com/x", True),
        ("https://bad.com./x", True),
        ("https://bad.com?x", True),
        ("https://notbad.com/x", False),
        ("https://bad.com.example.org/x", False),
        ("https://example.org/bad.com", False),
        ("https://example.org/?u=https://bad.com/", False),
        ("https://example.org/@bad.com/", False),
        ("https://bad.co/x", False),
        ("", False),
    ],
)
def test_blocked_domains(url, blocked):
    urls = pa.array([url, "https://good.org/a.b.c.jpg"], pa.large_string())
    assert FILTER.in_domain(urls, ["Bad.com", "other.net"]).tolist() == [blocked, False]


def write_shards(folder: Path) -> None:
    """Two shards in two schemas; `id` says which rule should take the row."""
    rows = [  # id, url, caption, language, hash
        ("kept_0", "https://good.com/0", "a cat", "en", 1),
        ("language", "https://good.com/1", "a cat", "fr", 2),
        ("missing_0", "https://good.com/2", "a cat", None, 3),
        ("blocked_word", "https://good.com/3", "a Naked cat", "EN", 4),
        ("blocked_domain", "https://x.bad.com/4", "a cat", "en", 5),
        ("duplicate_url_0", "https://good.com/0", "a cat", "en", 6),
        ("duplicate_content_0", "https://good.com/6", "a cat", "en", 1),
        ("kept_1", "https://good.com/6", "a cat", "de", 7),  # the row before with this URL was dropped
        ("missing_1", None, "a cat", "de", 8),
        ("missing_2", "https://good.com/8", "a cat", "de", None),
        ("missing_3", "https://good.com/9", None, "de", 9),
        ("kept_2", "https://good.com/1", "naked-ish", "de", 2),
    ]
    names = [("SAMPLE_ID", "URL", "TEXT", "LANGUAGE", "hash"), ("id", "url", "caption", "lang", "MD5")]
    for shard, schema in enumerate(names):
        values = [list(v) for v in zip(*rows)]
        if shard == 1:  # the same rows again, with hexadecimal hashes: no row of this shard has a new URL
            values[4] = [None if h is None else f"{h:032X}" for h in values[4]]
            values[1] = [None if u is None else u + ("b" if u.endswith("/0") else "") for u in values[1]]
        write_rows(folder / f"{shard}.parquet", **dict(zip(schema, values)))


def test_funnel_of_all_texts_rules(tmp_path):
    write_shards(tmp_path / "in")
    (tmp_path / "words.txt").write_text("\ufeffnaked cat\n\n  drawn \n", "utf-8")
    (tmp_path / "domains.txt").write_text("bad.com\n")
    flags = ["--languages", "en, DE", "--blocklist", tmp_path / "words.txt", "--drop_duplicate_urls"]
    flags += ["--block_domains", tmp_path / "domains.txt", "--drop_duplicate_content"]
    manifest = run_filter(tmp_path / "in", tmp_path / "out", *flags)
    assert pq.read_table(tmp_path / "out" / "0.parquet")["SAMPLE_ID"].to_pylist() == ["kept_0", "kept_1", "kept_2"]
    assert pq.read_table(tmp_path / "out" / "1.parquet")["id"].to_pylist() == ["kept_0"]
    assert manifest["dropped"] == {
        "missing": 8,
        "caption_short": 0,
        "language": 2,
        "blocked_word": 2,
        "blocked_domain": 2,
        "duplicate_url": 5,  # of shard 1: all but its first row, which has a URL of its own
        "duplicate_content": 1,
    }
    assert manifest["rows"] == 24 == manifest["kept"] + sum(manifest["dropped"].values())
    (tmp_path / "words.txt").write_text("naked cat")  # other settings: refused
    assert "blocklist" in run_filter(tmp_path / "in", tmp_path / "out", *flags, status=2)


def test_phase_gives_the_rules_and_flags_go_before_it(tmp_path):
    for shard, kind in enumerate((pa.float32(), pa.float64())):
        write_rows(
            tmp_path / "in" / f"{shard}.parquet",
            TEXT=["exact", "aesthetic", "similarity", "watermark", "good"],
            AESTHETIC_SCORE=pa.array([7.5, 7.49, 8, 8, 8], kind),
            similarity=pa.array([0.3, 0.31, 0.299, 0.31, 0.31], kind),
            pwatermark=pa.array([0.1499, 0.1, 0.1, 0.15, 0], kind),
        )
    manifest = run_filter(tmp_path / "in", tmp_path / "hq", "--for", "laion_hq")
    assert column(tmp_path / "hq", "caption") == ["exact", "good"] * 2  # a watermark of 0.15 is not < 0.15
    assert [manifest["dropped"][r] for r in ("aesthetic", "similarity", "watermark")] == [2, 2, 2]
    run_filter(tmp_path / "in", tmp_path / "own", "--for", "laion_hq", "--max_watermark", 0.15, "--min_aesthetic", 7.49)
    assert column(tmp_path / "own", "caption") == ["exact", "aesthetic", "watermark", "good"] * 2
    done = run_filter(tmp_path / "in", tmp_path / "broad", "--for", "laion_broad", status=2)
    assert "0.parquet has no column width" in done and not list((tmp_path / "broad").glob("*.parquet"))


def test_limits_are_compared_in_the_precision_of_the_column(tmp_path):
    write_rows(tmp_path / "in" / "a.parquet", caption=["x"], similarity=pa.array([0.7], pa.float32()))
    assert run_filter(tmp_path / "in", tmp_path / "out", "--min_similarity", 0.7)["kept"] == 1  # 0.69999999 as float32


def test_refusals_are_one_sentence(tmp_path):
    write_rows(tmp_path / "in" / "a.parquet", url=["u"], caption=["c"], sha256=[1.5], language=["en"])
    write_rows(tmp_path / "in" / "b.parquet", url=["u"], caption=["c"], sha256=["h"])
    source, out = tmp_path / "in", tmp_path / "out"
    assert "b.parquet has no column language" in run_filter(source, out, "--languages", "en", status=2)
    assert not list(out.glob("*.parquet"))  # though a.parquet has one
    done = run_filter(source, tmp_path / "out2", "--drop_duplicate_content", status=2)
    assert "a.parquet" in done and "sha256" in done
    assert "none.txt" in run_filter(source, out, "--blocklist", tmp_path / "none.txt", status=2)
    (tmp_path / "empty.txt").write_text("\n \n")
    assert "no entries" in run_filter(source, out, "--block_domains", tmp_path / "empty.txt", status=2)
    bad = pa.StringArray.from_buffers(1, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe"))
    write_rows(tmp_path / "bad" / "bad.parquet", caption=bad)
    assert "bad.parquet" in run_filter(tmp_path / "bad", tmp_path / "out3", status=2)


# ---------------------------------------------------------------------------------------------------------------------
# Duplicates


def plain_hash(text: bytes) -> int:
    """MULTILINEAR as its paper has it, one word after the other."""
    words = [len(text), *(int.from_bytes(text[i : i + 4], "little") for i in range(0, len(text), 4))]
    halves = [(int(a[0]) + sum(int(m) * w for m, w in zip(a[1:], words))) % 2**64 >> 32 for a in sd.hashes.MULTIPLIERS]
    return halves[0] << 32 | halves[1]


def test_hashes_are_those_of_the_paper_and_tell_texts_apart():
    texts = ["", "\0", "\0\0\0\0", "a", "a\0", "abcd", "abcde", "abce", "é", "https://x.org/1", "https://x.org/2"]
    texts += ["x" * n for n in (4095, 4096)]
    hashes = sd.hashes.hash_texts(pa.array(texts, pa.large_string()))
    assert [int(h) for h in hashes] == [plain_hash(t.encode()) for t in texts]
    long = ["x" * 4097, "x" * 5000, "x" * 4999 + "y"]
    everything = sd.hashes.hash_texts(pa.array(texts + long, pa.large_string()))
    assert everything[: len(texts)].tolist() == hashes.tolist() and len(set(everything.tolist())) == len(texts + long)
    assert (
        sd.hashes.hash_texts(pa.array(["skip", *texts], pa.large_string()).slice(1, 5)).tolist() == hashes[:5].tolist()
    )
    assert len(sd.hashes.hash_texts(pa.array([], pa.large_string()))) == 0


def test_duplicates_are_those_of_a_plain_loop():
    rng = np.random.default_rng(0)
    seen = {"url": sd.hashes.Hashes(), "content": sd.hashes.Hashes()}
    for part in seen.values():
        part.RECENT = 50  # so that both arrays are used
    kept: dict[str, set] = {"url": set(), "content": set()}
    for _ in range(40):
        hashes = {name: rng.integers(0, 600, 60).astype(np.uint64) << np.uint64(50) for name in seen}
        expected = []
        for row in zip(*hashes.values()):
            reason = next((name for name, h in zip(hashes, row) if h in kept[name]), None)
            expected.append(reason)
            if reason is None:
                for name, h in zip(hashes, row):
                    kept[name].add(h)
        found = FILTER.find_duplicates(hashes, seen)
        assert [next((n for n in found if found[n][i]), None) for i in range(60)] == expected
    assert len(seen["url"].sorted) and len(seen["url"].sorted) + len(seen["url"].recent) == len(kept["url"])


def plain_filter(tables: list[pa.Table], schemas) -> list[int]:
    """The ids that laion_broad with one row a URL keeps, row by row."""
    kept, urls = [], set()
    for shard, table in enumerate(tables):
        for row in table.to_pylist():
            ident, url, caption, width, height, similarity, aesthetic, mark, unsafe = (
                row[n] for n in schemas[shard % 3]
            )
            values = (width, height, similarity, aesthetic, mark, unsafe, caption, url)
            if any(v is None or v != v for v in values) or not caption.strip() or url in urls:
                continue
            if shard % 3 == 2:
                similarity_limit = float(np.float32(0.28))
            else:
                similarity_limit = 0.28
            if min(width, height) >= 512 and similarity >= similarity_limit and aesthetic >= 6.5 and mark <= 0.5:
                if unsafe <= 0.5:
                    urls.add(url)
                    kept.append(ident)
    return kept


@pytest.fixture(scope="module")
def three_schemas(tmp_path_factory):
    """A folder of 6 shards in 3 schemas, and what a plain loop keeps."""
    folder, module = tmp_path_factory.mktemp("schemas"), bench()
    tables = [module.make_rows(4000 * shard, 4000, shard % 3) for shard in range(6)]
    for shard, table in enumerate(tables):
        pq.write_table(table, folder / f"{shard}.parquet")
    return folder, plain_filter(tables, module.SCHEMAS)


def ids(folder: Path) -> list[int]:
    tables = [pq.read_table(path) for path in sorted(folder.glob("*.parquet"))]
    return [v for t in tables for v in t[next(n for n in t.column_names if "id" in n.lower().split("_"))].to_pylist()]


def test_three_schemas_against_a_plain_loop(three_schemas, tmp_path, monkeypatch):
    folder, expected = three_schemas
    monkeypatch.setattr(FILTER, "BATCH_ROWS", 500)  # duplicates in one batch, over batches, and over shards
    manifest = run_filter(folder, tmp_path / "out", "--for", "laion_broad", "--drop_duplicate_urls")
    assert ids(tmp_path / "out") == expected and manifest["kept"] == len(expected) > 1000
    assert manifest["rows"] == 24_000 and manifest["dropped"]["duplicate_url"] > 20
    assert pq.read_metadata(tmp_path / "out" / "0.parquet").num_row_groups < 4  # not one a batch


def test_killed_and_resumed_keeps_the_same_rows(three_schemas, tmp_path):
    folder, expected = three_schemas
    command = [sys.executable, str(PIPELINE / "02_filter.py"), "--in", str(folder), "--out", str(tmp_path / "out")]
    command += ["--for", "laion_broad", "--drop_duplicate_urls"]
    child = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and not (tmp_path / "out" / "1.parquet").exists():
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    child.wait()
    left = sorted((tmp_path / "out").glob("*.parquet"))
    assert 2 <= len(left) < 6 and not sd.files.read_json(tmp_path / "out" / "manifest.json")["complete"]
    before = {path: path.stat().st_mtime_ns for path in left}
    manifest = run_filter(folder, tmp_path / "out", "--for", "laion_broad", "--drop_duplicate_urls")
    assert ids(tmp_path / "out") == expected and manifest["complete"]
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    assert not list((tmp_path / "out").glob("*.tmp"))


def test_resumed_duplicates_of_two_kinds(tmp_path):
    write_rows(tmp_path / "in" / "0.parquet", caption=["a"] * 2, url=["u0", "u1"], sha256=["AA", "aa"])
    write_rows(tmp_path / "in" / "1.parquet", caption=["a"] * 3, url=["u1", "u0", "u2"], sha256=["bb", "cc", "aA"])
    flags = ["--drop_duplicate_urls", "--drop_duplicate_content"]
    manifest = run_filter(tmp_path / "in", tmp_path / "out", *flags)
    assert column(tmp_path / "out", "url") == ["u0", "u1"] and column(tmp_path / "out", "sha256") == ["AA", "bb"]
    (tmp_path / "out" / "1.parquet").unlink()
    assert run_filter(tmp_path / "in", tmp_path / "out", *flags) == manifest
    assert column(tmp_path / "out", "sha256") == ["AA", "bb"]


@pytest.mark.slow  # a minute, 1 GB of disk
def test_ten_million_rows_in_a_gigabyte(tmp_path):
    command = [sys.executable, str(BENCH), "--folder", str(tmp_path), "--rows", "10000000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, **ENVIRONMENT})
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["peak_mib"] < 1000 and result["rows_per_s"] > 100_000 and result["kept"] > 1_000_000
