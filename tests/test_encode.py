"""encode_latents.py: right rows under right keys, scaled once, never half a shard, never a mix, never a NaN."""

import hashlib
import json
import os
import re
import signal
import sys
import time
import zlib
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from conftest import randomise

import encode_latents
import sd.data
import sd.errors
import sd.pictures
import sd.shards
import sd.speed
import sd.weights.parts
import SD_Model

SIZE = 32
CONFIG = SD_Model.VAEConfig(
    channels=(8,), num_res_blocks=0, norm_groups=4, mid_attention=False, patch=8, scaling_factor=0.5
)


def picture(seed: int, size: int = SIZE) -> np.ndarray:
    """A smooth random picture, uint8 [size, size, 3]."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    return cv2.resize(coarse, (size, size), interpolation=cv2.INTER_CUBIC)


def jpeg(seed: int) -> bytes:
    return cv2.imencode(".jpg", picture(seed, 64))[1].tobytes()


def write_tar(folder: Path, name: str, members: list[tuple[str, bytes, str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with sd.shards.ShardWriter(folder / f"{name}.tar") as shard:
        for key, data, extension in members:
            shard.add(key, data, extension, "a picture", {})
    return folder / f"{name}.tar"


def write_shards(folder: Path, shards: int, per_shard: int = 5) -> Path:
    """Tars 00000, 00001, ... of PNGs, whose keys and contents are all different."""
    for n in range(shards):
        seeds = range(100 * n, 100 * n + per_shard)
        write_tar(folder, f"{n:05d}", [(f"{s:09d}", sd.pictures.encode_png(picture(s)), "png") for s in seeds])
    return folder


def save_vae(folder: Path, seed: int = 0, change=None) -> SD_Model.VAE:
    """A small random VAE in a folder; change(vae) may edit it first."""
    vae = randomise(SD_Model.VAE(CONFIG), seed)
    with torch.no_grad():
        if change:
            change(vae)
    sd.weights.parts.save_vae(vae, folder)
    return vae


@pytest.fixture
def setup(tmp_path):
    """Folders of images (3 shards of source `things`) and a VAE."""
    images = write_shards(tmp_path / "things" / "images", 3)
    return images, tmp_path / "vae", save_vae(tmp_path / "vae")


def encode(images: Path, vae: Path, out: Path, *flags):
    encode_latents.main(
        ["--images", str(images), "--vae", str(vae), "--out", str(out), "--size", str(SIZE), "--batch", "2"]
        + ["--workers", "0", "--device", "cpu", *map(str, flags)]
    )


def refused(capsys, function, *args) -> str:
    """The line that bad input gets on stderr, after progress bars at most; the program ends with exit status 2."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        sd.errors.run(lambda: sd.errors.run(lambda: function(*args)))
    bars = ("reading:", "training:", "encoding:")
    lines = [line for line in capsys.readouterr().err.splitlines() if line and not line.startswith(bars)]
    assert stop.value.code == 2
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def read(out: Path, shard: str) -> tuple[list[str], np.ndarray]:
    """Keys in the order of their rows, and the rows."""
    table = pq.read_table(out / f"{shard}.parquet").to_pydict()
    assert table["row"] == list(range(len(table["row"])))
    return table["image_key"], np.load(out / f"{shard}.npy")


def manifest(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


@torch.no_grad()
def expected(vae, pictures: list[np.ndarray]) -> torch.Tensor:
    x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1
    return vae.encode(x)


def assert_latents(rows: np.ndarray, wanted: torch.Tensor):
    """Equal to what fp16 can tell."""
    np.testing.assert_allclose(rows.astype(np.float32), wanted.numpy(), rtol=2e-3, atol=1e-4)


def fingerprints(out: Path) -> dict:
    files = [p for p in sorted(out.iterdir()) if p.name not in ("manifest.json", "rejects.jsonl")]
    return {p.name: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in files}


def forked(function, *args, **environment) -> int:
    """Start function(*args) in a forked process with these variables; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.environ.update(environment)
        function(*args)
        status = 0
    finally:
        os._exit(status)


def status_of(pid: int) -> int:
    """Exit status of a forked process; minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# ---------------------------------------------------------------------------------------------------------------------


def test_rows_keys_manifest_and_records(setup, tmp_path):
    images, folder, vae = setup
    out = tmp_path / "latents"
    encode(images, folder, out, "--workers", 2)
    for n in range(3):
        keys, rows = read(out, f"{n:05d}")
        assert keys == [f"things/{n:05d}/{s:09d}" for s in range(100 * n, 100 * n + 5)]
        assert rows.dtype == np.float16 and rows.shape == (5, 4, 4, 4)
        assert_latents(rows, expected(vae, [picture(s) for s in range(100 * n, 100 * n + 5)]))
    assert manifest(out) == {
        "format": "latents-1",
        "vae": {"hash": SD_Model.weights_hash(vae), "name": str(folder), "config": manifest(out)["vae"]["config"]},
        "size": SIZE,
        "latent_shape": [4, 4, 4],
        "buckets": None,
        "crop": "center",
        "flip": False,
        "kind": "mean",
        "dtype": "float16",
        "computed_in": "fp32",
        "scaled": True,
        "scale": {"mean_times": 0.5},
        "count": 15,
        "pictures": 15,
        "shards": 3,
        "rejects": {},
    }
    assert SD_Model.config_from_dict(SD_Model.VAEConfig, manifest(out)["vae"]["config"]) == CONFIG
    record = json.loads((out / "00001.json").read_text())
    assert record["tar"]["sha256"] == hashlib.sha256((images / "00001.tar").read_bytes()).hexdigest()
    assert record["count"] == 5 and record["source"] == "things"
    assert not list(out.glob("*.tmp"))


def test_scaled_exactly_once(tmp_path):
    """Case 11: latents of standard deviation 5.49 come out of encode -> .npy -> loader with 1."""
    images = write_shards(tmp_path / "things" / "images", 2, per_shard=16)
    pictures = [picture(s) for n in range(2) for s in range(100 * n, 100 * n + 16)]

    def make_std_549(vae):
        factor = 5.49 / (expected(vae, pictures).std() / vae.config.scaling_factor)
        vae.quant_conv.weight[:4] *= factor
        vae.quant_conv.bias[:4] *= factor
        vae.config = replace(vae.config, scaling_factor=1 / 5.49)

    vae = save_vae(tmp_path / "vae", change=make_std_549)
    encode(images, tmp_path / "vae", tmp_path / "latents")
    store = sd.data.LatentStore(tmp_path / "latents", pretouch=False)
    loaded = np.stack([store.arrays[s][r] for s, r in zip(store.shard, store.row, strict=True)]).astype(np.float32)
    assert loaded.std() == pytest.approx(1.0, abs=0.002)
    assert manifest(tmp_path / "latents")["scaled"] is True
    with torch.no_grad():  # and decode takes them as they are
        mean, _ = vae.moments(torch.from_numpy(pictures[0]).permute(2, 0, 1)[None].float() / 127.5 - 1)
        wanted = vae.decoder(vae.post_quant_conv(mean))
        assert (vae.decode(torch.from_numpy(loaded[:1])) - wanted).abs().max() < 0.02 * wanted.abs().max()


def test_moments_are_scaled_together(setup, tmp_path):
    images, folder, vae = setup
    encode(images, folder, tmp_path / "latents", "--moments")
    _, rows = read(tmp_path / "latents", "00000")
    with torch.no_grad():
        x = torch.from_numpy(np.stack([picture(s) for s in range(5)])).permute(0, 3, 1, 2).float() / 127.5 - 1
        mean, logvar = vae.moments(x)
    scale = vae.config.scaling_factor
    assert rows.shape == (5, 8, 4, 4) and manifest(tmp_path / "latents")["kind"] == "moments"
    assert_latents(rows[:, :4], mean * scale)
    deviation = np.exp(0.5 * rows[:, 4:].astype(np.float32))  # of the scaled latent: scale times that of the raw one
    np.testing.assert_allclose(deviation, scale * (0.5 * logvar).exp().numpy(), rtol=3e-3)


def test_latents_do_not_depend_on_the_batch(setup, tmp_path):
    images, folder, _ = setup
    results = []
    for batch, workers in ((1, 0), (2, 3), (4, 1)):
        out = tmp_path / f"latents_{batch}"
        encode(images, folder, out, "--batch", batch, "--workers", workers)
        results.append([read(out, f"{n:05d}") for n in range(3)])
    for other in results[1:]:
        for (keys, rows), (other_keys, other_rows) in zip(results[0], other, strict=True):
            assert keys == other_keys
            np.testing.assert_allclose(rows.astype(np.float32), other_rows.astype(np.float32), rtol=2e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Bad pictures, bad numbers


def test_bad_bytes_among_good_pictures(tmp_path):
    """Case 22: each is counted by reason, and the next good picture has its own latents under its own key."""
    small = sd.pictures.encode_png(picture(7))
    bomb = small[:16] + (40_000).to_bytes(4, "big") * 2 + small[24:]
    bomb = bomb[:29] + zlib.crc32(bomb[12:29]).to_bytes(4, "big") + bomb[33:]
    whole = jpeg(1)
    members = [
        ("a0", sd.pictures.encode_png(picture(0)), "png"),
        ("bad0", whole[: len(whole) * 2 // 3], "jpg"),
        ("a1", sd.pictures.encode_png(picture(1)), "png"),
        ("bad1", b"", "jpg"),
        ("bad2", b"<!DOCTYPE html><html>404</html>", "jpg"),
        ("bad3", bomb, "png"),
        ("a2", sd.pictures.encode_png(picture(2)), "png"),
        ("bad4", b"\x00\x01\x02 not a picture", "webp"),
        ("a3", sd.pictures.encode_png(picture(3)), "png"),
    ]
    write_tar(tmp_path / "images", "00000", members)
    vae = save_vae(tmp_path / "vae")
    for workers in (0, 2):
        out = tmp_path / f"latents{workers}"
        encode(tmp_path / "images", tmp_path / "vae", out, "--workers", workers, "--source", "web")
        keys, rows = read(out, "00000")
        assert keys == [f"web/00000/a{i}" for i in range(4)]
        assert_latents(rows, expected(vae, [picture(i) for i in range(4)]))
        assert manifest(out)["rejects"] == {
            "empty": 1, "html": 1, "too_many_pixels": 1, "truncated": 1, "unsupported_format": 1,
        }  # fmt: skip
        assert manifest(out)["count"] == 4


def test_a_shard_without_a_good_picture(tmp_path):
    write_tar(tmp_path / "images", "00000", [("a", b"", "jpg")])
    save_vae(tmp_path / "vae")
    with pytest.raises(sd.errors.InputError, match="rejects: 1 empty"):  # nothing else is there: not a success
        encode(tmp_path / "images", tmp_path / "vae", tmp_path / "latents")
    assert not (tmp_path / "latents" / "manifest.json").exists()
    write_tar(tmp_path / "images", "00001", [("b", jpeg(1), "jpg")])
    encode(tmp_path / "images", tmp_path / "vae", tmp_path / "latents")
    keys, rows = read(tmp_path / "latents", "00000")
    assert keys == [] and rows.shape == (0, 4, 4, 4) and rows.dtype == np.float16
    assert manifest(tmp_path / "latents")["rejects"] == {"empty": 1}


def test_overflow_in_fp16_is_computed_again_in_fp32(setup, tmp_path):
    """Case 12: activations of half of the pictures beyond 65,504 between two layers, latents of ordinary size."""
    images, _, _ = setup
    pictures = [picture(s) for n in range(3) for s in range(100 * n, 100 * n + 5)]
    x = torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2).float() / 127.5 - 1

    def overflow_inside(vae):
        factor = 65_504 / float(vae.encoder(x).flatten(1).abs().amax(dim=1).median())
        for p in (vae.encoder.conv_out.weight, vae.encoder.conv_out.bias):
            p *= factor
        vae.quant_conv.weight /= factor

    vae = save_vae(tmp_path / "hot", change=overflow_inside)
    half = SD_Model.VAE(CONFIG).half()
    half.load_state_dict(vae.state_dict())
    with torch.no_grad():
        finite = half.encode(x.half()).isfinite().flatten(1).all(dim=1)
    assert 0 < finite.sum() < 15  # the trigger is real
    encode(images, tmp_path / "hot", tmp_path / "latents", "--dtype", "fp16", "--batch", 5)
    rows = np.concatenate([read(tmp_path / "latents", f"{n:05d}")[1] for n in range(3)])
    np.testing.assert_allclose(rows.astype(np.float32), expected(vae, pictures).numpy(), rtol=0.02, atol=0.01)
    assert_latents(rows[~finite], expected(vae, pictures)[~finite])  # fp32's precision, too
    assert manifest(tmp_path / "latents")["rejects"] == {}


def test_latents_beyond_fp16_are_rejected_and_counted(setup, tmp_path):
    """Case 12: what is not finite in fp32's fp16 copy either is never written."""
    images, _, _ = setup
    pictures = [picture(s) for n in range(3) for s in range(100 * n, 100 * n + 5)]

    def large(vae):
        largest = expected(vae, pictures).flatten(1).abs().amax(dim=1)
        for p in (vae.quant_conv.weight, vae.quant_conv.bias):
            p[:4] *= 65_504 / float(largest.median())

    vae = save_vae(tmp_path / "large", change=large)
    fits = expected(vae, pictures).flatten(1).abs().amax(dim=1) <= 65_504
    assert 0 < fits.sum() < 15
    for dtype in ("fp16", "fp32"):
        out = tmp_path / dtype
        encode(images, tmp_path / "large", out, "--dtype", dtype)
        parts = [read(out, f"{n:05d}") for n in range(3)]
        keys = [int(key.rpartition("/")[2]) for part, _ in parts for key in part]
        seeds = [100 * n + i for n in range(3) for i in range(5)]
        assert keys == [seed for seed, ok in zip(seeds, fits.tolist(), strict=True) if ok]
        assert all(np.isfinite(rows).all() for _, rows in parts)
        assert manifest(out)["rejects"] == {"nan_latent": int((~fits).sum())}
        assert manifest(out)["count"] == len(keys)


# ---------------------------------------------------------------------------------------------------------------------
# Going on, and refusing to mix


def test_run_again_leaves_finished_shards_alone(setup, tmp_path):
    images, folder, _ = setup
    out = tmp_path / "latents"
    encode(images, folder, out)
    before, first = fingerprints(out), manifest(out)
    encode(images, folder, out)
    assert fingerprints(out) == before and manifest(out) == first
    os.utime(images / "00001.tar")  # touched, the same bytes: only its record's time changes
    encode(images, folder, out)
    changed = {name for name, value in fingerprints(out).items() if value != before[name]}
    assert changed == {"00001.json"}


def test_changed_pictures_are_encoded_again(setup, tmp_path):
    """Case 12: also where size and time tell nothing of the change, and where a file of the shard is damaged."""
    images, folder, vae = setup
    out = tmp_path / "latents"
    encode(images, folder, out)
    before = fingerprints(out)
    new = [picture(s) for s in range(500, 505)]
    write_tar(images, "00001", [(f"{500 + i:09d}", sd.pictures.encode_png(p), "png") for i, p in enumerate(new)])
    whole = (out / "00002.npy").read_bytes()
    for damaged in (whole[:-10], b""):
        (out / "00002.npy").write_bytes(damaged)
        encode(images, folder, out)
        assert (out / "00002.npy").read_bytes() == whole
    np.save(out / "00002.npy", np.load(out / "00002.npy")[:4])  # whole, and not what its record says
    encode(images, folder, out)
    keys, rows = read(out, "00001")
    assert keys == [f"things/00001/{s:09d}" for s in range(500, 505)]
    assert_latents(rows, expected(vae, new))
    assert fingerprints(out)["00002.npy"][0] == before["00002.npy"][0]  # made whole again
    after = fingerprints(out)
    assert all(after[name] == before[name] for name in before if name.startswith("00000"))
    assert manifest(out)["count"] == 15


def test_a_new_shard_joins(setup, tmp_path):
    images, folder, _ = setup
    out = tmp_path / "latents"
    encode(images, folder, out)
    before = fingerprints(out)
    write_tar(images, "00003", [("000000900", sd.pictures.encode_png(picture(900)), "png")])
    encode(images, folder, out)
    assert manifest(out)["count"] == 16 and manifest(out)["shards"] == 4
    assert {n: v for n, v in fingerprints(out).items() if not n.startswith("00003")} == before


def test_another_vae_or_setting_is_refused_by_name(setup, tmp_path, capsys):
    images, folder, _ = setup
    out = tmp_path / "latents"
    encode(images, folder, out)
    save_vae(tmp_path / "other", seed=1)
    before = fingerprints(out)
    assert "a VAE of hash" in refused(capsys, encode, images, tmp_path / "other", out)
    assert "with size 32, and size 64" in refused(capsys, encode, images, folder, out, "--size", "64")
    assert "kind mean, and kind moments" in refused(capsys, encode, images, folder, out, "--moments")
    assert "computed_in fp32" in refused(capsys, encode, images, folder, out, "--dtype", "bf16")
    assert "belongs to cats" in refused(capsys, encode, images, folder, out, "--source", "cats")
    assert fingerprints(out) == before and manifest(out)["count"] == 15


@pytest.mark.parametrize("last_file", ["00001.npy", "00001.parquet", "00001.json", "manifest.json"])
def test_kill_9_leaves_no_half_shard(setup, tmp_path, last_file):
    """Case 23: killed in the moment before a file gets its name; what was finished stays as it is."""
    images, folder, _ = setup
    encode(images, folder, tmp_path / "whole")
    out = tmp_path / "latents"

    def run_until_killed():
        real = os.replace

        def replace_or_die(source, target):
            if Path(target).name == last_file:
                os.kill(os.getpid(), signal.SIGKILL)
            real(source, target)

        os.replace = replace_or_die
        encode(images, folder, out)

    assert status_of(forked(run_until_killed)) == -signal.SIGKILL
    assert not (out / "manifest.json").exists()
    before = fingerprints(out)
    assert "00000.json" in before and ("00001.json" in before) == (last_file == "manifest.json")
    encode(images, folder, out)
    after = fingerprints(out)
    finished = [name for name in before if name[:5] + ".json" in before and not name.endswith(".tmp")]
    assert len(finished) >= 3 and all(after[name] == before[name] for name in finished)
    assert not list(out.glob("*.tmp"))
    for n in range(3):
        keys, rows = read(out, f"{n:05d}")
        whole_keys, whole_rows = read(tmp_path / "whole", f"{n:05d}")
        assert keys == whole_keys and (rows == whole_rows).all()
    assert manifest(out) == manifest(tmp_path / "whole")


def test_kill_9_while_a_changed_shard_is_replaced(setup, tmp_path):
    """No old record may stand beside new latents."""
    images, folder, vae = setup
    out = tmp_path / "latents"
    encode(images, folder, out)
    write_tar(images, "00001", [("000000500", sd.pictures.encode_png(picture(500)), "png")])

    def run_until_killed():
        sd.latents.pq.write_table = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        encode(images, folder, out)

    assert status_of(forked(run_until_killed)) == -signal.SIGKILL
    assert not (out / "00001.json").exists() and not (out / "manifest.json").exists()
    encode(images, folder, out)
    assert_latents(read(out, "00001")[1], expected(vae, [picture(500)]))


def test_two_processes_share_the_shards(setup, tmp_path):
    images, folder, _ = setup
    encode(images, folder, tmp_path / "alone")
    together = tmp_path / "together"
    ranks = [forked(encode, images, folder, together, RANK=str(r), WORLD_SIZE="2") for r in range(2)]
    assert [status_of(pid) for pid in ranks] == [0, 0]
    assert manifest(together) == manifest(tmp_path / "alone")
    for n in range(3):
        assert read(together, f"{n:05d}")[0] == read(tmp_path / "alone", f"{n:05d}")[0]
        assert (read(together, f"{n:05d}")[1] == read(tmp_path / "alone", f"{n:05d}")[1]).all()


# ---------------------------------------------------------------------------------------------------------------------


def test_bad_input_gets_one_sentence(setup, tmp_path, capsys):
    images, folder, _ = setup
    out = tmp_path / "latents"
    assert "no .tar files" in refused(capsys, encode, tmp_path / "nowhere", folder, out)
    assert "no_vae, and there is no such" in refused(capsys, encode, images, tmp_path / "no_vae", out)
    assert "multiples of 8" in refused(capsys, encode, images, folder, out, "--size", "36")
    assert "--images and --out" in refused(capsys, encode_latents.main, ["--images", str(images)])
    write_tar(tmp_path / "things" / "more", "00000", [("a", sd.pictures.encode_png(picture(0)), "png")])
    assert "more than one 00000.tar" in refused(capsys, encode, tmp_path / "things" / "*" / "*.tar", folder, out)
    assert not out.exists()
    (tmp_path / "file").write_text("in the way")
    assert "cannot make the folder" in refused(capsys, encode, images, folder, tmp_path / "file" / "latents")
    strange = tmp_path / "strange"
    strange.mkdir()
    np.save(strange / "00000.npy", np.zeros(3))
    assert "no settings.json" in refused(capsys, encode, images, folder, strange)


def test_exit_status_of_the_program(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, encode_latents.__file__, "--images", "x", "--vae", "y", "--out", "z"]
    status = os.spawnv(os.P_WAIT, sys.executable, command)
    error = capfd.readouterr().err.strip()
    assert status == 2 and error.startswith("error: ") and "\n" not in error
    assert list(tmp_path.iterdir()) == []


def test_benchmark_ends_with_json(setup, capsys, monkeypatch):
    _, folder, _ = setup
    monkeypatch.setattr(sd.speed, "WARM_UP_S", 0.1)
    for flags in ([], ["--benchmark_decode"]):
        encode_latents.main(
            ["--benchmark", "0.3", "--vae", str(folder), "--size", "32", "--batch", "2", "--device", "cpu", *flags]
        )
        result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
        assert result["images"] == pytest.approx(result["img_per_s"] * result["seconds"], rel=0.05)
        assert result["images"] > 0 and result["seconds"] >= 0.3
        assert re.fullmatch(r"\d+(\.\d+)?", str(result["warmup_s"]))
    cores = result["img_per_s"] * result["decode_ms_per_picture"] / 1000
    assert result["decode_ms_per_picture"] > 0 and result["decode_cores"] == pytest.approx(
        cores,
        abs=0.01 + 5e-6 * result["img_per_s"],  # decode_ms_per_picture is rounded to 0.01 ms
    )


def test_decoding_is_timed_by_the_picture(tmp_path, monkeypatch):
    """A decoder that waits 20 ms a picture takes that much longer a picture."""
    tar, read = sd.speed.synthetic_tar(tmp_path, 32, 6), cv2.imdecode
    threads, plain = cv2.getNumThreads(), sd.speed.decode_ms(tar, 32, 2)
    monkeypatch.setattr(cv2, "imdecode", lambda *args: time.sleep(0.02) or read(*args))
    assert cv2.getNumThreads() == threads and plain < 10 and 18 < sd.speed.decode_ms(tar, 32, 2) - plain < 30
