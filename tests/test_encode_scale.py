"""encode_latents.py at scale: shards shared and taken over, crops, mirrors, sizes, and no stale or broken latent."""

import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from test_encode import (
    CONFIG,
    SIZE,
    assert_latents,
    encode,
    expected,
    fingerprints,
    forked,
    manifest,
    picture,
    read,
    refused,
    save_vae,
    status_of,
    write_shards,
    write_tar,
)

import encode_latents
import sd.data
import sd.encoder
import sd.latents
import sd.locks
import sd.pictures
import sd.shards
import sd.stream
import sd.weights.parts


def record(out: Path, shard: str) -> dict:
    return json.loads((out / f"{shard}.json").read_text())


def png_tar(folder: Path, name: str, pictures: dict[str, np.ndarray]) -> Path:
    return write_tar(folder, name, [(key, sd.pictures.encode_png(image), "png") for key, image in pictures.items()])


def rejects(out: Path) -> set[tuple[str, str]]:
    rows = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    return {(row["image_key"], row["reason"]) for row in rows}


@pytest.fixture
def vae(tmp_path):
    return save_vae(tmp_path / "vae")


# ---------------------------------------------------------------------------------------------------------------------
# Crops, mirrors, sizes


@pytest.mark.parametrize("shape", [(40, 40), (32, 90), (90, 32), (20, 31), (1, 300)])
def test_cut_is_the_crop_of_the_other_scripts(shape):
    image = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    assert (sd.pictures.cut(image, (SIZE, SIZE)) == sd.pictures.resize_crop(image, SIZE)).all()
    assert sd.pictures.cut(image, (24, 40), at=0.999999).shape == (24, 40, 3)


def test_random_crop_belongs_to_the_key(tmp_path, vae):
    """Each stored latent is that of one window; windows lie all over the picture, and not as train and val do."""
    wide = np.random.default_rng(1).integers(0, 256, (SIZE, SIZE + 15, 3), np.uint8)
    keys = [f"{i:03d}" for i in range(64)]
    png_tar(tmp_path / "things" / "images", "00000", dict.fromkeys(keys, wide))
    encode(tmp_path / "things" / "images", tmp_path / "vae", tmp_path / "a", "--crop", "random")
    found, rows = read(tmp_path / "a", "00000")
    windows = expected(vae, [wide[:, i : i + SIZE] for i in range(16)]).numpy()
    distance = np.abs(rows.astype(np.float32)[:, None] - windows).max(axis=(2, 3, 4))  # [64, 16]
    assert distance.min(axis=1).max() < 0.01 < np.sort(distance, axis=1)[:, 1].min()
    offsets = distance.argmin(axis=1)
    assert len(set(offsets)) >= 12 and abs(offsets.mean() - 7.5) < 2.5
    assert abs(np.corrcoef(offsets, [sd.shards.key_fraction(key) for key in found])[0, 1]) < 0.5
    png_tar(tmp_path / "again" / "images", "00000", dict.fromkeys(keys[::-1], wide))  # another place in the tar
    other = ("--crop", "random", "--source", "things", "--batch", "5")
    encode(tmp_path / "again" / "images", tmp_path / "vae", tmp_path / "b", *other)
    assert_latents(read(tmp_path / "b", "00000")[1][::-1], torch.from_numpy(windows[offsets]))
    assert manifest(tmp_path / "a")["crop"] == "random"


def test_flip_gives_each_picture_a_mirrored_row(tmp_path, vae):
    images = write_shards(tmp_path / "things" / "images", 1)
    out = tmp_path / "latents"
    encode(images, tmp_path / "vae", out, "--flip")
    keys, rows = read(out, "00000")
    plain = [f"things/00000/{s:09d}" for s in range(5)]
    assert keys == [key + end for key in plain for end in ("", "#flip")]
    assert_latents(rows[0::2], expected(vae, [picture(s) for s in range(5)]))
    assert_latents(rows[1::2], expected(vae, [picture(s)[:, ::-1].copy() for s in range(5)]))
    assert (manifest(out)["flip"], manifest(out)["count"], manifest(out)["pictures"]) == (True, 10, 5)
    store = sd.data.LatentStore(out, pretouch=False)  # which counts them against the manifest
    assert store.keys.to_pylist() == keys


def test_moments_draw_the_scaled_posterior(tmp_path, vae):
    """A draw from what is stored has the distribution of scale x (a draw from the VAE's posterior)."""
    images = write_shards(tmp_path / "things" / "images", 1, per_shard=2)
    out = tmp_path / "latents"
    encode(images, tmp_path / "vae", out, "--moments")
    rows = read(out, "00000")[1].astype(np.float64)
    with torch.no_grad():
        x = torch.from_numpy(np.stack([picture(0), picture(1)])).permute(0, 3, 1, 2).float() / 127.5 - 1
        mean, logvar = (m.double().numpy() for m in vae.moments(x))
    rng = np.random.default_rng(0)
    raw = 0.5 * (mean + np.exp(0.5 * logvar) * rng.standard_normal((20_000, *mean.shape)))  # CONFIG's scale is 0.5
    drawn = rows[:, :4] + np.exp(0.5 * rows[:, 4:]) * rng.standard_normal((20_000, *mean.shape))
    deviation = raw.std(axis=0)
    assert np.abs(drawn.std(axis=0) / deviation - 1).max() < 0.04
    assert (np.abs(drawn.mean(axis=0) - raw.mean(axis=0)) / deviation).max() < 0.06
    assert manifest(out)["scale"] == {"mean_times": 0.5, "logvar_plus": pytest.approx(2 * np.log(0.5))}
    assert manifest(out)["scaled"] is True


def test_bucket_sizes():
    sizes = sd.stream.bucket_sizes(512, 64)
    assert sizes == [(384, 640), (384, 704), (448, 576), (512, 512), (576, 448), (640, 384), (704, 384)]
    for size, step in ((256, 64), (768, 64), (1024, 64), (64, 8), (SIZE, 8)):
        found = sd.stream.bucket_sizes(size, step)
        assert (size, size) in found and {(w, h) for h, w in found} == set(found)
        for h, w in found:
            assert h % step == w % step == 0 and abs(h * w / size**2 - 1) <= 0.1 and 0.5 <= w / h <= 2


def test_buckets_take_each_picture_to_the_nearest_aspect(tmp_path, vae):
    """By the upright picture; arrays and indices a bucket; a batch of one size only; empty buckets leave no file."""
    rng = np.random.default_rng(2)
    shapes = [(50, 50), (30, 60), (60, 30), (31, 31), (30, 50), (45, 50), (33, 54)] * 2
    images = {f"{i:03d}": rng.integers(0, 256, (*shape, 3), np.uint8) for i, shape in enumerate(shapes)}
    wanted = {"24x40": [1, 4, 6, 8, 11, 13], "32x32": [0, 3, 5, 7, 10, 12], "40x24": [2, 9]}
    members = [(key, sd.pictures.encode_png(image), "png") for key, image in images.items()]
    lying = cv2.imencode(".jpg", images["001"])[1].tobytes()  # 30 high, 60 wide, and to be turned by 90 degrees
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    lying = lying[:2] + b"\xff\xe1" + (len(exif) + 2).to_bytes(2, "big") + exif + lying[2:]
    folder = tmp_path / "things" / "images"
    write_tar(folder, "00000", [*members, ("lying", lying, "jpg"), ("bad", b"<html>", "jpg")])
    for workers in (0, 2):
        out = tmp_path / f"latents{workers}"
        encode(folder, tmp_path / "vae", out, "--buckets", "--batch", 4, "--workers", workers)
        assert manifest(out)["buckets"] == [[24, 40], [32, 32], [40, 24]] and manifest(out)["count"] == 15
        assert manifest(out)["rejects"] == {"html": 1}
        assert {p.stem for p in out.glob("*.npy")} == {f"00000_{name}" for name in wanted}
        for name, numbers in wanted.items():
            size = tuple(map(int, name.split("x")))
            keys, rows = read(out, f"00000_{name}")
            upright = name == "40x24"
            assert keys == [f"things/00000/{i:03d}" for i in numbers] + ["things/00000/lying"] * upright
            pictures = [sd.pictures.cut(images[f"{i:03d}"], size) for i in numbers]
            assert_latents(rows[: len(numbers)], expected(vae, pictures))
            assert rows.shape[1:] == (4, size[0] // 8, size[1] // 8)
    write_tar(folder, "00000", members[:1])
    encode(folder, tmp_path / "vae", out, "--buckets")
    assert {p.stem for p in out.glob("*.parquet")} == {p.stem for p in out.glob("*.npy")} == {"00000_32x32"}
    assert manifest(out)["count"] == 1


# ---------------------------------------------------------------------------------------------------------------------
# Never a stale latent, never a broken one


def test_index_tells_what_each_latent_was_made_from(tmp_path, vae):
    images = write_shards(tmp_path / "things" / "images", 1)
    encode(images, tmp_path / "vae", tmp_path / "latents")
    table = pq.read_table(tmp_path / "latents" / "00000.parquet")
    hashes = [hashlib.sha256(sd.pictures.encode_png(picture(s))).hexdigest() for s in range(5)]
    assert table["sha256"].to_pylist() == hashes
    settings = json.loads(table.schema.metadata[b"settings"])
    assert settings["vae"]["hash"] == manifest(tmp_path / "latents")["vae"]["hash"] and settings["crop"] == "center"


def test_changed_bytes_under_the_same_key_size_and_time(tmp_path, vae):
    """As after rsync -t or cp -p of another picture."""
    folder, out = tmp_path / "things" / "images", tmp_path / "latents"
    images = [np.full((SIZE, SIZE, 3), value, np.uint8) for value in (10, 200)]
    files = [cv2.imencode(".png", image, [cv2.IMWRITE_PNG_COMPRESSION, 0])[1].tobytes() for image in images]
    tar = write_tar(folder, "00000", [("a", files[0], "png")])
    encode(folder, tmp_path / "vae", out)
    before, size = tar.stat(), tar.stat().st_size
    write_tar(folder, "00000", [("a", files[1], "png")])
    os.utime(tar, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert tar.stat().st_size == size and tar.stat().st_mtime_ns == before.st_mtime_ns
    encode(folder, tmp_path / "vae", out)
    assert_latents(read(out, "00000")[1], expected(vae, images[1:]))


def test_files_of_another_folder_are_not_taken_for_this_ones(tmp_path, vae):
    images = write_shards(tmp_path / "things" / "images", 2)
    other_vae = save_vae(tmp_path / "other", seed=1)
    encode(images, tmp_path / "vae", tmp_path / "a")
    encode(images, tmp_path / "other", tmp_path / "b")
    for name in ("00001.json", "00001.npy", "00001.parquet"):
        (tmp_path / "b" / name).write_bytes((tmp_path / "a" / name).read_bytes())
    (tmp_path / "b" / "00000.parquet").write_bytes((tmp_path / "a" / "00000.parquet").read_bytes())
    encode(images, tmp_path / "other", tmp_path / "b")
    for n in range(2):
        settings = json.loads(pq.read_metadata(tmp_path / "b" / f"{n:05d}.parquet").metadata[b"settings"])
        assert settings["vae"]["hash"] == manifest(tmp_path / "b")["vae"]["hash"]
        assert_latents(
            read(tmp_path / "b", f"{n:05d}")[1], expected(other_vae, [picture(100 * n + i) for i in range(5)])
        )


def test_another_scale_crop_flip_or_bucket_is_refused(tmp_path, vae, capsys):
    images, out = write_shards(tmp_path / "things" / "images", 1), tmp_path / "latents"
    encode(images, tmp_path / "vae", out)
    before = fingerprints(out)
    vae.config = replace(CONFIG, scaling_factor=0.25)  # the same weights, and so the same hash
    sd.weights.parts.save_vae(vae, tmp_path / "quarter")
    assert "a VAE of config" in refused(capsys, encode, images, tmp_path / "quarter", out)
    for flags, what in ((("--crop", "random"), "crop center"), (("--flip",), "flip None"), (("--buckets",), "buckets")):
        assert f"was made with {what}" in refused(capsys, encode, images, tmp_path / "vae", out, *flags)
    wrong = refused(capsys, encode, images, tmp_path / "vae", tmp_path / "new", "--buckets", "--bucket_step", 12)
    assert "--bucket_step must be a multiple of the VAE's 8" in wrong and not (tmp_path / "new").exists()
    assert fingerprints(out) == before


@pytest.mark.parametrize("flip", [False, True])
def test_rejected_pictures_are_listed_with_their_keys(tmp_path, vae, flip):
    """Also one whose mirrored latent alone is not finite: it stays out as a whole."""
    left_half = np.zeros((SIZE, SIZE, 3), np.uint8)
    left_half[:, : SIZE // 2] = 255

    folder, out = tmp_path / "things" / "images", tmp_path / "latents"
    png = sd.pictures.encode_png
    members = [("good", png(picture(0)), "png"), ("one_side", png(left_half), "png"),
               ("html", b"<html>", "jpg"), ("empty", b"", "jpg")]  # fmt: skip
    write_tar(folder, "00000", members)
    patch = pytest.MonkeyPatch()
    real = sd.encoder.Encoder._latents

    def latents(self, moments, pictures, dtype):
        result = real(self, moments, pictures, dtype)
        broken = (pictures[:, 0, -1 if flip else 0] == 255).all(dim=-1)  # white at the right (mirrored) or left edge
        result[broken] = float("nan")
        return result

    patch.setattr(sd.encoder.Encoder, "_latents", latents)
    try:
        encode(folder, tmp_path / "vae", out, *["--flip"] * flip)
    finally:
        patch.undo()
    keys, rows = read(out, "00000")
    assert keys == ["things/00000/good", "things/00000/good#flip"][: 1 + flip] and np.isfinite(rows).all()
    assert rejects(out) == {
        ("things/00000/one_side", "nan_latent"), ("things/00000/html", "html"), ("things/00000/empty", "empty"),
    }  # fmt: skip
    assert manifest(out)["rejects"] == {"empty": 1, "html": 1, "nan_latent": 1} == record(out, "00000")["rejects"]


# ---------------------------------------------------------------------------------------------------------------------
# Locks


def write_lock(path: Path, owner: dict, age: float = 0):
    path.write_text(json.dumps(owner))
    os.utime(path, (time.time() - age,) * 2)


def test_only_the_dead_lose_their_shards(tmp_path):
    with sd.locks.Locks(tmp_path) as locks:
        me = locks.me
        child = forked(os._exit, 0)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # dead, and not buried
        elsewhere = {"machine": "elsewhere", "pid": 1, "start": "1"}
        for name, owner, age, taken in (
            ("alive", me, 10_000, False),  # silent, but its process is there: stopped, say
            ("unburied", me | {"pid": child}, 0, True),
            ("reused", me | {"start": "1"}, 0, True),  # the process of that number is another
            ("far", elsewhere, sd.locks.DEAD_AFTER_S - 20, False),
            ("far_silent", elsewhere, sd.locks.DEAD_AFTER_S + 20, True),
            ("far_ahead", elsewhere, -3600, False),
        ):
            write_lock(tmp_path / f"{name}.0.lock", owner, age)
            assert locks.take(name) is taken, name
            assert (tmp_path / f"{name}.1.lock").exists() is taken
            if taken:
                assert locks.holds(name)
                locks.release(name)
                assert not list(tmp_path.glob(f"{name}.*"))
        status_of(child)
        (tmp_path / "empty.0.lock").write_text("")  # after a power failure
        assert not locks.take("empty")
        os.utime(tmp_path / "empty.0.lock", (0, 0))
        assert locks.take("empty")
    assert {p.name for p in tmp_path.iterdir()} == {f"{name}.0.lock" for name in ("alive", "far", "far_ahead")}


def test_heartbeat_keeps_all_locks_fresh(tmp_path, monkeypatch):
    monkeypatch.setattr(sd.locks, "HEARTBEAT_S", 0.05)
    with sd.locks.Locks(tmp_path) as locks:
        assert locks.take("a") and locks.take("b")
        os.utime(locks.card, (0, 0))
        deadline = time.monotonic() + 10
        while (tmp_path / "b.0.lock").stat().st_mtime < 1 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert all((tmp_path / f"{name}.0.lock").stat().st_mtime > 1 for name in "ab")


def thief(folder: Path, rounds: int, barrier, number: int):
    """Tries for the same dead locks as the others, at the same moment; notes what it got."""
    with sd.locks.Locks(folder) as locks:
        barrier.wait()
        for n in range(rounds):
            barrier.wait()
            (folder / f"{number}.{n}.got").write_text(str(int(locks.take(f"{n:05d}"))))
        barrier.wait()


def test_of_several_thieves_one_succeeds(tmp_path):
    rounds, thieves = 150, 4
    for n in range(rounds):
        write_lock(tmp_path / f"{n:05d}.0.lock", {"machine": "elsewhere", "pid": 1, "start": "1"}, age=1e6)
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(thieves)
    processes = [context.Process(target=thief, args=(tmp_path, rounds, barrier, i)) for i in range(thieves)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    got = [[int((tmp_path / f"{i}.{n}.got").read_text()) for i in range(thieves)] for n in range(rounds)]
    assert [sum(row) for row in got] == [1] * rounds


def test_one_who_was_taken_for_dead_writes_nothing(tmp_path, vae, capsys, monkeypatch):
    """It slept too long; the other one is at work, then finished. The sleeper's rows are dropped, his locks stay."""
    images, out = write_shards(tmp_path / "things" / "images", 1), tmp_path / "latents"
    later, real = out / "00000.1.lock", sd.latents.Shard.arrays

    def sleep(self, *args):
        assert not later.exists(), "it took the shard again while the other one was at work on it"
        write_lock(later, {"machine": "elsewhere", "pid": 1, "start": "1"})
        return real(self, *args)

    def other_one_gives_up(_):
        assert not (out / "00000.json").exists() and (out / "00000.0.lock").exists()
        os.utime(later, (0, 0))
        monkeypatch.setattr(sd.latents.Shard, "arrays", real)

    monkeypatch.setattr(sd.latents.Shard, "arrays", sleep)
    monkeypatch.setattr(encode_latents.time, "sleep", other_one_gives_up)
    encode(images, tmp_path / "vae", out)
    text = capsys.readouterr().out
    assert "another process took 00000 over" in text and "waiting for other processes" in text
    assert "1 shards encoded" in text and manifest(out)["count"] == 5 and not list(out.glob("*.lock"))


def start(images: Path, vae: Path, out: Path) -> subprocess.Popen:
    command = [sys.executable, encode_latents.__file__, "--images", images, "--vae", vae, "--out", out, "--size", SIZE]
    command += ["--batch", 2, "--device", "cpu"]
    return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def stop_at_work(processes: list[subprocess.Popen], out: Path) -> tuple[subprocess.Popen, str]:
    """Stop (SIGSTOP) the first of these processes that has finished a shard and has another in hand: it and that."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in processes:
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.02)
            owners = {p.name[:5]: json.loads(p.read_text())["pid"] for p in out.glob("*.lock")}
            mine = [shard for shard, pid in owners.items() if pid == process.pid]
            mine = [shard for shard in mine if not (out / f"{shard}.json").exists()]
            if mine and made_by(out, process):
                return process, mine[0]
            process.send_signal(signal.SIGCONT)
            time.sleep(0.05)
    raise AssertionError("none had a shard in hand")


def made_by(out: Path, process: subprocess.Popen) -> list[str]:
    records = {p.stem: json.loads(p.read_text()) for p in out.glob("[0-9]*.json")}
    return sorted(shard for shard, content in records.items() if content["made_by"]["pid"] == process.pid)


def test_a_third_process_takes_over_from_one_that_was_killed(tmp_path, vae):
    """Real processes: two share the shards; one is killed -9 with a shard in hand, one stopped with another; a third
    finishes what the dead one had and all that is free, not what the stopped one holds. No shard is done twice."""
    shards, each = 12, 80
    images, out = write_shards(tmp_path / "things" / "images", shards, per_shard=each), tmp_path / "latents"
    both = [start(images, tmp_path / "vae", out) for _ in range(2)]
    first, lost = stop_at_work(both, out)
    both.remove(first)
    second, held = stop_at_work(both, out)
    assert lost != held
    first.kill()  # and not waited for: a dead process that nobody has buried
    before = made_by(out, first)
    third = start(images, tmp_path / "vae", out)
    deadline = time.monotonic() + 60
    while len(list(out.glob("[0-9]*.json"))) < shards - 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    assert not (out / f"{held}.json").exists() and not (out / "manifest.json").exists() and third.poll() is None
    second.send_signal(signal.SIGCONT)
    texts = [process.communicate(timeout=60)[0] for process in (second, third)]
    assert second.returncode == third.returncode == 0 and first.wait() == -signal.SIGKILL
    assert lost in made_by(out, third) and held in made_by(out, second) and made_by(out, first) == before
    counts = [int(text.strip().splitlines()[-1].split()[0]) for text in texts]  # "N shards encoded ..."
    assert sum(counts) + len(before) == shards and counts[0] == len(made_by(out, second))
    assert not list(out.glob("*.lock")) and not list(out.glob("*.tmp"))
    encode(images, tmp_path / "vae", tmp_path / "alone")
    assert manifest(out) == manifest(tmp_path / "alone")
    for n in range(shards):
        keys, rows = read(out, f"{n:05d}")
        alone_keys, alone_rows = read(tmp_path / "alone", f"{n:05d}")
        assert keys == alone_keys
        np.testing.assert_allclose(rows, alone_rows, rtol=2e-3, atol=1e-3)  # fp16; threads differ in the order of sums


def test_a_cpu_decodes_without_worker_processes(tmp_path, vae, monkeypatch):
    """They need seconds to start, longer than small pictures take to decode."""
    images = write_shards(tmp_path / "things" / "images", 1)
    asked, real = [], sd.stream.DataLoader

    def loader(*args, **options):
        asked.append(options["num_workers"])
        return real(*args, **options)

    monkeypatch.setattr(sd.stream, "DataLoader", loader)
    flags = ["--vae", str(tmp_path / "vae"), "--size", str(SIZE), "--device", "cpu"]
    encode_latents.main(["--images", str(images), "--out", str(tmp_path / "latents"), *flags])
    assert asked == [0]
