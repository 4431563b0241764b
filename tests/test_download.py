"""03_download.py against a web with faults on loopback: every URL is accounted for, a kill costs nothing.

img2dataset needs an environment of its own: IMG2DATASET_PYTHON names its Python, or `python
data_pipeline/03_download.py --setup` makes .venv-img2dataset. Without either, the tests that need it are skipped; the
slow one makes it.
"""

import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_data_pipeline import ENVIRONMENT, PIPELINE, load, run, run_process
from web import server

import sd.files
import sd.pictures
import sd.shards

ROOT = PIPELINE.parent
DOWNLOAD = load("03_download.py")
PYTHON = Path(os.environ.get("IMG2DATASET_PYTHON", DOWNLOAD.ENVIRONMENT / "bin" / "python"))
needs_engine = pytest.mark.skipif(not PYTHON.exists(), reason="no img2dataset: run 03_download.py --setup")
# what img2dataset 1.47 says to each fault that no second attempt mends
REASONS = {
    "missing": "HTTP Error 404: Not Found",
    "cut": "IncompleteRead(N bytes read, N more expected)",
    "html": "Image decoding error",
    "wrong_type": "Image decoding error",
    "loop": "redirect loop",
    "huge": "too_many_pixels",
    "opt_out": "Use of image disallowed by X-Robots-Tag directive",
}


def write_input(folder: Path, base: str, numbers) -> Path:
    """Filtered metadata of the pictures with these numbers, in two shards; returns their folder."""
    folder.mkdir(parents=True)
    numbers = list(numbers)
    for shard, part in enumerate((numbers[: len(numbers) // 2], numbers[len(numbers) // 2 :])):
        rows = {
            "url": [f"{base}/pictures/{n:05d}.jpg" for n in part],
            "caption": [f"picture number {n}" for n in part],
            "aesthetic": pa.array([n / 100 for n in part], pa.float32()),
            "width": [n for n in part],  # of img2dataset's own names: must not come through
        }
        pq.write_table(pa.table(rows), folder / f"{shard:05d}.parquet")
    return folder


def command(source: Path, out: Path, *flags) -> list[str]:
    fixed = ["--in", source, "--out", out, "--python", PYTHON, "--size", 64, "--threads", 8, "--timeout", 2]
    return [str(word) for word in (*fixed, *flags)]


def number_of(url: str) -> int:
    return int(Path(url).stem)


def samples(out: Path) -> dict[int, dict]:
    """Sample by picture number, of all tars; no number twice."""
    found = {}
    for tar in sorted((out / "images").glob("*.tar")):
        rejects = Counter()
        for _, sample in sd.shards.iter_samples(tar, rejects):
            assert found.setdefault(number_of(sample["json"]["url"]), sample) is sample
        assert not rejects
    return found


def expected_counts(numbers) -> Counter:
    faults = [server.fault_of(n) for n in numbers]
    return Counter(REASONS[fault] for fault in faults if fault in REASONS)


@needs_engine
def test_web_with_faults(tmp_path):
    numbers = range(100)
    with server.serve() as (base, log):
        source = write_input(tmp_path / "filtered", base, numbers)
        out = tmp_path / "data"
        run_process("03_download.py", *command(source, out, "--rounds", 2, "--shard_size", 60))
    manifest = sd.files.read_json(out / "images" / "manifest.json")
    wanted = {n for n in numbers if server.succeeds(n)}
    found = samples(out)
    assert set(found) == wanted and len(wanted) == 93
    assert manifest["pictures"] == 93 and manifest["rejected"] == expected_counts(numbers)
    assert manifest["pictures"] + sum(manifest["rejected"].values()) == manifest["urls"] == 100
    # only the failed are tried again, and of these not the ones whose answer was final
    again = {number_of(path) for path, times in log.items() if times > 1}
    assert again == {n for n in numbers if server.fault_of(n)} - {3, 83}  # missing, opt_out
    assert [counter["tried"] for counter in manifest["rounds"]] == [100, 8]
    for n, sample in found.items():
        assert sample["txt"] == f"picture number {n}"
        assert sample["json"]["aesthetic"] == pytest.approx(n / 100) and sample["json"]["row_id"] == n
        assert sample["json"]["original_width"] == 48 + n % 64
        original = cv2.imdecode(np.frombuffer(server.picture(n), np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
        height, width = sd.pictures.decode_image(sample["image"]).shape[:2]
        assert (width, height) == original.shape[1::-1]  # shorter sides are 64 or less: nothing is scaled up
        assert np.abs(sd.pictures.decode_image(sample["image"]) - original.astype(float)).mean() < 4
    before = {path: path.stat().st_mtime_ns for path in (out / "images").iterdir()}
    run_process("03_download.py", *command(source, out, "--rounds", 2, "--shard_size", 60))  # all done
    assert {p for p in before if p.stat().st_mtime_ns != before[p]} == {out / "images" / "manifest.json"}


@needs_engine
def test_opt_out_is_ignored_only_when_asked(tmp_path):
    with server.serve() as (base, _):
        source = write_input(tmp_path / "filtered", base, [83, 84])
        run_process("03_download.py", *command(source, tmp_path / "data", "--disallowed_header_directives"))
    assert set(samples(tmp_path / "data")) == {83, 84}


# ---------------------------------------------------------------------------------------------------------------------
# What needs no img2dataset


def write_shard(folder: Path, name: str, count: int, rows: int, stats: str | None = None, tar: bool = True) -> None:
    """A shard as img2dataset leaves it when it is killed at some point."""
    folder.mkdir(parents=True, exist_ok=True)
    if tar:
        with tarfile.open(folder / f"{name}.tar", "w") as file:
            file.addfile(tarfile.TarInfo("x.txt"), io.BytesIO())
    table = {"row_id": list(range(rows)), "status": ["success"] * rows, "error_message": [""] * rows}
    pq.write_table(pa.table(table), folder / f"{name}.parquet")
    (folder / f"{name}_stats.json").write_text(json.dumps({"count": count}) if stats is None else stats)


def test_only_finished_shards_are_taken(tmp_path):
    shards, images = tmp_path / "download.tmp" / "77" / "shards", tmp_path / "images"
    write_shard(shards, "00003", 5, 5)
    write_shard(shards, "00004", 5, 5, stats='{"count": ')  # cut while it was written
    write_shard(shards, "00005", 5, 4)  # a row was lost
    write_shard(shards, "00006", 5, 5, tar=False)  # the last one of the pass before, as a place holder
    write_shard(images, "00002", 5, 5, tar=False)  # stopped between the parquet and the tar
    DOWNLOAD.harvest(tmp_path / "download.tmp", images)
    assert sorted(p.name for p in images.iterdir()) == ["00003.parquet", "00003.tar", "00003_stats.json"]
    assert not (tmp_path / "download.tmp").exists()


def test_rows_and_rounds(tmp_path):
    """A row is tried until it succeeds, has its rounds, or got a final answer."""
    images = tmp_path / "images"
    images.mkdir()
    tries = [
        {0: "", 1: "timed out", 2: "HTTP Error 404: Not Found", 3: "IncompleteRead(17 bytes read, 4 more expected)"},
        {1: "timed out", 3: None},
    ]
    for shard, messages in enumerate(tries):
        (images / f"{shard:05d}.tar").touch()
        status = ["success" if message == "" else "failed_to_download" for message in messages.values()]
        table = {"row_id": list(messages), "status": status, "error_message": pa.array(messages.values(), pa.string())}
        pq.write_table(pa.table(table), images / f"{shard:05d}.parquet")
    outcome = DOWNLOAD.Outcome(5, images)
    assert [np.flatnonzero(outcome.todo(number)).tolist() for number in (1, 2, 3)] == [[4], [4], [1, 3, 4]]
    assert outcome.counts() == {
        "success": 1, "timed out": 1, "HTTP Error 404: Not Found": 1, "unknown": 1, "not tried": 1,
    }  # fmt: skip


def test_rows_to_do_keep_their_place(tmp_path, monkeypatch):
    monkeypatch.setattr(DOWNLOAD, "TODO_ROWS", 4)
    for shard, (url, rows) in enumerate((("URL", range(3)), ("url", range(3, 8)))):
        table = {url: [f"u{n}" for n in rows], "TEXT": [f"c{n}" for n in rows], "score": [float(n) for n in rows]}
        pq.write_table(pa.table(table), tmp_path / f"{shard}.parquet")
    files, names, along, rows = DOWNLOAD.read_inputs(str(tmp_path))
    assert along == ["score"] and rows == 8
    todo = np.array([1, 0, 1, 0, 0, 1, 1, 1], bool)
    tables = list(DOWNLOAD.rows_to_do(files, names, along, todo))
    merged = [row for table in tables for row in table.to_pylist()]
    assert merged == [{"row_id": n, "url": f"u{n}", "caption": f"c{n}", "score": n} for n in (0, 2, 5, 6, 7)]


@pytest.mark.parametrize(
    ("table", "flags", "message"),
    [
        ({"url": ["x"]}, [], "no column url or caption"),
        ({"url": pa.array([], pa.string()), "caption": pa.array([], pa.string())}, [], "has no rows"),
        ({"url": ["x"], "caption": ["y"]}, ["--python", "/nowhere/python"], "no working img2dataset"),
        ({"url": ["x"], "caption": ["y"]}, ["--rounds", "0"], "must be at least 1"),
        (None, [], "no .parquet files"),
    ],
)
def test_bad_input(tmp_path, table, flags, message):
    if table is not None:
        pq.write_table(pa.table(table), tmp_path / "00000.parquet")
    said = run("03_download.py", "--in", tmp_path, "--out", tmp_path / "data", *flags, status=2)
    assert message in said
    assert not (tmp_path / "data").exists()


# ---------------------------------------------------------------------------------------------------------------------
# From the web to training, with five kills


def kill_when(condition, line: list[str]) -> None:
    """Starts a command, kills it with -9 as soon as condition() holds, and checks that nothing of it lives on."""
    process = subprocess.Popen([sys.executable, *line], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)  # fmt: skip
    limit = time.time() + 120
    while not condition():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.time() < limit
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    out = line[line.index("--out") + 1]
    limit = time.time() + 10
    while any(out in words for words in running_commands()):
        assert time.time() < limit, "something of it lives on"
        time.sleep(0.1)


def running_commands() -> list[str]:
    """The command lines of this machine's processes, but for this one's."""
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue
    return [line for line in lines if "pytest" not in line]


def finish(line: list[str]) -> None:
    done = subprocess.run([sys.executable, *line], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def found(folder: Path, pattern: str, count: int = 1):
    return lambda: len(list(folder.glob(pattern))) >= count


@pytest.mark.slow
def test_two_thousand_pictures_with_five_kills(tmp_path):
    if not PYTHON.exists():
        run_process("03_download.py", "--setup")
    numbers = range(2000)
    flags = ("--shard_size", 100, "--workers", 2, "--threads", 16)
    calm, data = tmp_path / "calm", tmp_path / "data" / "shapes"  # shapes: the source that phase `demo` reads
    with server.serve() as (base, _):
        calm_source = write_input(tmp_path / "filtered", base, numbers)
        finish(["data_pipeline/03_download.py", *command(calm_source, calm, *flags)])
    with server.serve() as (base, _):
        write_input(data / "wanted", base, numbers)
        line = ["data_pipeline/03_download.py", *command(data / "wanted", data, *flags)]
        kill_when(found(data, "download.tmp/*/shards/*.tar"), line)
        kill_when(found(data, "download.tmp/*/shards/*_stats.json", 4), line)
        kill_when(lambda: found(data, "images/*.tar", 20)() and found(data, "download.tmp/*/shards/*.tar")(), line)
        finish(line)
    one, other = samples(calm), samples(data)
    assert set(one) == set(other) == {n for n in numbers if server.succeeds(n)}
    assert all(one[n]["image"] == other[n]["image"] and one[n]["txt"] == other[n]["txt"] for n in one)
    for out in (calm, data):
        manifest = sd.files.read_json(out / "images" / "manifest.json")
        assert manifest["urls"] == 2000 == manifest["pictures"] + sum(manifest["rejected"].values())
        assert manifest["rejected"] == expected_counts(numbers)

    images, tokenizer, latents = data / "images", data / "tokenizer", data / "latents"
    keep = ["--min_aesthetic", "2"]
    finish(["data_pipeline/02_filter.py", "--in", str(images), "--out", str(data / "filtered"), *keep])
    finish(["data_pipeline/04a_make_tokenizer.py", "--in", str(images), "--out", str(tokenizer), "--max_length", "16"])
    finish(["data_pipeline/04_tokenise.py", "--in", str(images), "--keep", str(data / "filtered"), "--out",
            str(data / "tokens"), "--tokenizer", str(tokenizer)])  # fmt: skip
    finish(["data_pipeline/05_build_hf_dataset.py", "--in", str(data / "tokens"), "--out", str(data / "dataset"),
            "--val_fraction", "0.05"])  # fmt: skip
    dataset = sd.files.read_json(data / "dataset" / "manifest.json")
    wanted = [n for n in other if n >= 200]  # aesthetic is number / 100
    assert sum(dataset["counts"].values()) == len(wanted)

    encode = ["encode_latents.py", "--images", str(images), "--vae", "demo/vae", "--out", str(latents), "--size", "64",
              "--batch", "32"]  # fmt: skip
    kill_when(found(latents, "*.npy", 2), encode)
    finish(encode)
    assert sum(np.load(path).shape[0] for path in latents.glob("*.npy")) == len(other)

    out = tmp_path / "run"
    train = ["SD_Train.py", "--phase", "demo", "--data_root", str(tmp_path / "data"), "--out", str(out), "--resume",
             "--tokenizer", str(tokenizer), "--train_text_encoder", "--max_steps", "12", "--save_steps", "3",
             "--wandb", "disabled"]  # fmt: skip
    kill_when(found(out, "checkpoints/step_*"), train)
    finish(train)
    losses = [json.loads(row)["loss"] for row in (out / "log.jsonl").read_text().splitlines()]
    assert losses and all(np.isfinite(losses))
    assert (out / "checkpoints" / "step_00000012").is_dir()
