"""SD_TrainVAE.py: the loss, exact resume, honest measures, latents of unit variance."""

import json
import math
import os
import pickle
import re
import signal
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import randomise
from safetensors.torch import load_file
from test_encode import forked, refused, status_of

import sd.autoencoder
import sd.files
import sd.optim
import sd.picture_sets
import sd.pictures
import sd.shapes
import sd.shards
import sd.weights.read
import SD_Model
import SD_TrainVAE

SIZE, STEPS = 32, 6


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Two shards of drawn pictures, 64 in all."""
    folder = tmp_path_factory.mktemp("shapes") / "images"
    folder.mkdir()
    for n in range(2):
        with sd.shards.ShardWriter(folder / f"{n:05d}.tar") as shard:
            for i in range(32):
                shard.add(
                    f"{n}{i:04d}", sd.pictures.encode_png(sd.shapes.sample(0, 32 * n + i, SIZE)[0]), "png", "", {}
                )
    return folder


def command(images: Path, out: Path, *flags) -> list[str]:
    argv = ["--images", str(images), "--model", "tiny", "--out", str(out), "--size", str(SIZE), "--batch", "3"]
    argv += ["--max_steps", str(STEPS), "--save_steps", "2", "--log_steps", "1", "--warmup", "2", "--workers", "0"]
    return argv + ["--held_out_share", "0.2", "--device", "cpu", *map(str, flags)]


def train(images: Path, out: Path, *flags):
    SD_TrainVAE.main(command(images, out, *flags))


def killed_at(step: int, *args):
    """In a forked process: training that is killed while it computes this step (0, 1, ...)."""
    real, calls = sd.autoencoder.losses, []

    def losses(*a):
        calls.append(a)
        if len(calls) == step + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*a)

    sd.autoencoder.losses = losses
    train(*args)


@pytest.fixture(scope="module")
def run(images, tmp_path_factory) -> Path:
    """A finished run that nothing disturbed."""
    out = tmp_path_factory.mktemp("run") / "run"
    train(images, out)
    return out


def log(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


# ---------------------------------------------------------------------------------------------------------------------


def test_loss_terms_against_their_definitions():
    vae = randomise(sd.autoencoder.new_vae("tiny", 0))
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(2, 3, 16, 16, generator=generator) * 2 - 1
    noise = torch.randn(2, 4, 2, 2, generator=generator)
    weights = {"l1": 0.5, "l2": 3.0, "edge": 0.25, "kl": 0.1}
    with torch.no_grad():
        terms = sd.autoencoder.losses(vae, x, noise, weights)
        mean, logvar = vae.moments(x)
        deviation = torch.exp(logvar / 2)
        y = vae.decode(mean + deviation * noise)  # a fresh VAE's scaling factor is 1
    assert terms["l1"] == pytest.approx(float((y - x).abs().mean()), rel=1e-5)
    assert terms["l2"] == pytest.approx(float(((y - x) ** 2).mean()), rel=1e-5)
    d = (y - x).numpy()
    edge = np.abs(d[..., 1:] - d[..., :-1]).mean() + np.abs(d[..., 1:, :] - d[..., :-1, :]).mean()
    assert terms["edge"] == pytest.approx(float(edge), rel=1e-5)
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(normal(mean, deviation), normal(0.0, 1.0)).mean()
    assert terms["kl"] == pytest.approx(float(kl), rel=1e-5)
    assert terms["loss"] == pytest.approx(float(sum(weights[n] * terms[n] for n in weights)), rel=1e-5)


def test_posterior_starts_narrow():
    vae = sd.autoencoder.new_vae("tiny", 0)
    with torch.no_grad():
        _, logvar = vae.moments(torch.rand(2, 3, 16, 16) * 2 - 1)
    assert (0.5 * logvar).exp().numpy() == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("shape", [(8, 72), (96, 36), (5, 5)])
def test_orthogonalised_keeps_directions_and_evens_lengths(shape):
    """U S V' becomes about U V', for singular values over two decades, whatever the scale."""
    rank = min(shape)
    u, _, v = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(0)), full_matrices=False)
    matrix = 1e-4 * u @ torch.diag(torch.logspace(0, -2, rank)) @ v
    lengths = u.T @ sd.optim.orthogonalised(matrix) @ v.T
    diagonal = lengths.diagonal()
    assert (lengths - torch.diag(diagonal)).abs().max() < 1e-3
    assert 0.3 < diagonal.min() and diagonal.max() < 1.3


def test_muon_steps_down_a_badly_scaled_valley():
    """One step moves a kernel by lr in every direction, against the gradient; momentum and decay are its own."""
    p = torch.nn.Parameter(torch.eye(4).reshape(4, 4, 1, 1))
    muon = sd.optim.Muon([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.diag(torch.tensor([1.0, 0.5, 0.2, 0.1])).reshape(4, 4, 1, 1)
    muon.step()
    moved = torch.eye(4) * (1 - 0.1 * 0.5) - p.detach().flatten(1)
    assert (moved.diagonal() > 0.06).all() and (moved.diagonal() < 0.13).all()
    assert (moved - torch.diag(moved.diagonal())).abs().max() < 1e-3


def test_order_and_noise_belong_to_the_step():
    count, batch = 10, 4
    seen = np.concatenate([sd.picture_sets.batch_indices(5, step, batch, count) for step in range(10)])
    epochs = seen.reshape(4, count)
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)  # every picture once, across batch edges
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert (
        sd.picture_sets.batch_indices(6, 0, batch, count) != sd.picture_sets.batch_indices(5, 0, batch, count)
    ).any()
    a, b, c, d = (sd.picture_sets.step_noise(*key, (1000,)) for key in ((5, 0), (5, 0), (5, 1), (6, 0)))
    assert (a == b).all()
    assert all(abs(float(torch.corrcoef(torch.stack([a, other]))[0, 1])) < 0.15 for other in (c, d))


def test_psnr_by_hand():
    """Reconstructions that are off by 0.1 on 0..1 have 20 dB; the mean is over pictures, not over pixels."""

    class Off:
        def encode(self, x):
            return x

        def decode(self, x):
            y = x.clone()
            y[0] += 0.2
            y[1] += 0.02
            return y

    pictures = torch.full((2, 8, 8, 3), 100, dtype=torch.uint8)
    results, psnr = sd.autoencoder.reconstruct(Off(), pictures, torch.device("cpu"))
    assert psnr == pytest.approx((20 + 40) / 2, abs=0.01)
    assert results.dtype == torch.uint8 and (results[0] == 126).all() and (results[1] == 103).all()


def test_run_folder_and_unit_variance(images, run):
    assert [record["step"] for record in log(run)] == list(range(1, STEPS + 1))
    assert {"step", "images", "epoch", "loss", "l1", "l2", "kl", "lr", "grad_norm", "images_per_s"} <= set(log(run)[0])
    validation = [json.loads(line) for line in (run / "validation.jsonl").read_text().splitlines()]
    assert [record["step"] for record in validation] == [2, 4, 6]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]
    sheet = cv2.imread(str(run / "samples" / "step_00000006.png"))
    assert sheet is not None and sheet.shape[2] == 3

    vae = sd.weights.read.load_vae(run / "vae")
    result = json.loads((run / "result.json").read_text())
    assert SD_Model.weights_hash(vae) == result["vae_hash"]
    ema = load_file(run / "checkpoints" / "step_00000006" / "vae_ema.safetensors")
    assert all((vae.state_dict()[name] == ema[name]).all() for name in ema)
    train_set, held_out, _ = sd.picture_sets.load_pictures(str(images), SIZE, 0, 8.0, 0.2)
    assert len(train_set) + len(held_out) == 64 and 5 <= len(held_out) <= 25
    with torch.no_grad():
        latents = vae.encode(sd.autoencoder.to_model(train_set, torch.device("cpu")))
    assert float(latents.std()) == pytest.approx(1.0, abs=1e-3)
    assert sd.autoencoder.reconstruct(vae, held_out, torch.device("cpu"))[1] == pytest.approx(result["psnr"], abs=1e-3)
    assert result["psnr"] == pytest.approx(validation[-1]["psnr"], abs=1e-3)


def test_it_learns(images, tmp_path):
    train(images, tmp_path / "run", "--max_steps", 60, "--save_steps", 60, "--batch", 8, "--seed", 1)
    losses = [record["loss"] for record in log(tmp_path / "run")]
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])


# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [3, 4])
def test_killed_and_resumed_equals_uninterrupted(images, run, tmp_path, step):
    """N + N steps with a kill -9 between equal 2 N, bit for bit: weights, EMA, optimizer, log."""
    out = tmp_path / "run"
    assert status_of(forked(killed_at, step, images, out)) == -signal.SIGKILL
    assert len(log(out)) == step and not (out / "vae").exists()
    train(images, out, "--resume")
    for name in ("vae", "vae_ema"):
        a, b = (load_file(r / "checkpoints" / "step_00000006" / f"{name}.safetensors") for r in (run, out))
        assert a.keys() == b.keys() and all((a[key] == b[key]).all() for key in a)
    a, b = (torch.load(r / "checkpoints" / "step_00000006" / "optimizer.pt", weights_only=True) for r in (run, out))
    assert len(a) == len(b) == 2
    for one, other in zip((x["state"] for x in a), (x["state"] for x in b), strict=True):
        assert one and one.keys() == other.keys()
        assert all((one[i][name] == other[i][name]).all() for i in one for name in one[i])
    measured = ("step", "images", "epoch", "loss", "l1", "l2", "edge", "kl", "lr", "grad_norm")
    assert [[r[m] for m in measured] for r in log(out)] == [[r[m] for m in measured] for r in log(run)]
    assert (out / "vae" / "vae.safetensors").read_bytes() == (run / "vae" / "vae.safetensors").read_bytes()
    assert (out / "vae" / "vae.json").read_bytes() == (run / "vae" / "vae.json").read_bytes()


def test_finished_run_says_so(images, run, capsys):
    before = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    train(images, run, "--resume")
    assert "done before" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()} == before
    assert "add --resume" in refused(capsys, train, images, run)
    assert "with lr 0.002, and lr 0.1" in refused(capsys, train, images, run, "--resume", "--lr", "0.1")
    assert {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()} == before


def interrupted(images: Path, out: Path) -> Path:
    """A run killed at step 5, with checkpoints of steps 2 and 4."""
    assert status_of(forked(killed_at, 5, images, out)) == -signal.SIGKILL
    return out / "checkpoints"


def test_other_settings_and_pictures_are_refused(images, tmp_path, capsys):
    interrupted(images, tmp_path / "run")
    for flags, message in (
        (["--lr", "0.1"], "with lr 0.002, and lr 0.1"),
        (["--max_steps", "8"], "with max_steps 6, and max_steps 8"),
        (["--kl_weight", "1"], "kl_weight"),
        (["--held_out_share", "0.3"], "held_out_share"),
    ):
        assert message in refused(capsys, train, images, tmp_path / "run", "--resume", *flags)
    assert "pictures" in refused(capsys, train, images / "00000.tar", tmp_path / "run", "--resume")


def test_damaged_checkpoints(images, run, tmp_path, capsys):
    """The newest whole one is taken, and a pickle that would run code is not run (case 17)."""
    checkpoints = interrupted(images, tmp_path / "run")
    newest = checkpoints / "step_00000004"
    weights = (newest / "vae.safetensors").read_bytes()
    (newest / "vae.safetensors").write_bytes(weights[:-100])
    train(images, tmp_path / "run", "--resume")
    assert re.search(r"skip.*step_00000004", capsys.readouterr().out)
    assert (tmp_path / "run/vae/vae.safetensors").read_bytes() == (run / "vae" / "vae.safetensors").read_bytes()

    checkpoints = interrupted(images, tmp_path / "evil")
    marker = tmp_path / "marker"

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(marker),))

    target = checkpoints / "step_00000004"
    (target / "optimizer.pt").write_bytes(pickle.dumps(Evil()))
    manifest = json.loads((target / "manifest.json").read_text())
    manifest["optimizer.pt"] = sd.files.sha256(target / "optimizer.pt")
    (target / "manifest.json").write_text(json.dumps(manifest))
    assert "optimizer.pt" in refused(capsys, train, images, tmp_path / "evil", "--resume")
    assert not marker.exists()


def test_bad_input_gets_one_sentence(images, tmp_path, capsys):
    out = tmp_path / "run"
    assert "presets are sd15" in refused(capsys, train, images, out, "--model", "huge")
    assert "multiples of" in refused(capsys, train, images, out, "--size", 20)
    assert "start at 1" in refused(capsys, train, images, out, "--batch", 0)
    assert "no .tar files" in refused(capsys, train, tmp_path / "nowhere", out)
    assert "hold out" in refused(capsys, train, images, out, "--held_out_share", 0)
    assert "checkpoint" in refused(capsys, train, images, out, "--resume", tmp_path / "nowhere")
    assert not (out / "vae").exists()
    refused_by_nan = refused(capsys, train, images, tmp_path / "nan", "--lr", 1e30)
    assert "smaller --lr" in refused_by_nan
    assert not (tmp_path / "nan" / "vae").exists()


def test_ram_limit_is_said(images, capsys):
    share = 20 * SIZE * SIZE * 3 / 2**30
    train_set, held_out, _ = sd.picture_sets.load_pictures(str(images), SIZE, 0, share, 0.2)
    assert len(train_set) == 20 and len(held_out) > 0
    assert "20 pictures fill --ram_gib" in capsys.readouterr().out


def test_learning_rate():
    rates = [SD_TrainVAE.learning_rate(step, 1.0, 4, 20) for step in range(20)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert all(a > b for a, b in zip(rates[5:], rates[6:], strict=False))
    assert rates[12] == pytest.approx(0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * 8 / 16)))
    assert 0.01 < rates[-1] < 0.03
    assert rates[7] == 1.0 * 1.0 * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * 3 / 16)))  # bit for bit, as runs began
    unet = [sd.optim.lr_at(step, 17, {"lr": 1.0, "warmup": 0, "lr_schedule": "cosine"}) for step in range(17)]
    assert unet == [sd.optim.fallen(step / 16) for step in range(17)] and unet[3] == rates[7]  # one fall for both
