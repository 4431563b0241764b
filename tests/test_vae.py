"""SD_TrainVAE.py: the loss, exact resume, honest measures, latents of unit variance."""

import hashlib
import json
import math
import os
import pickle
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from binding import rebind
from conftest import randomise
from safetensors.torch import load_file
from test_encode import forked, refused, status_of

import sd.autoencoder
import sd.encoder
import sd.files
import sd.fused
import sd.kernels
import sd.optim
import sd.optimizers
import sd.picture_sets
import sd.pictures
import sd.shapes
import sd.shards
import sd.weights.read
import SD_Model
import SD_TrainVAE
from sd.errors import InputError

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
    lengths = u.T @ sd.optimizers.orthogonalised(matrix) @ v.T
    diagonal = lengths.diagonal()
    assert (lengths - torch.diag(diagonal)).abs().max() < 1e-3
    assert 0.3 < diagonal.min() and diagonal.max() < 1.3


def test_muon_steps_down_a_badly_scaled_valley():
    """One step moves a kernel by lr in every direction, against the gradient; momentum and decay are its own."""
    p = torch.nn.Parameter(torch.eye(4).reshape(4, 4, 1, 1))
    muon = sd.optimizers.Muon([p], lr=0.1, weight_decay=0.5)
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


# ---------------------------------------------------------------------------------------------------------------------


# One size as ever
def old_muon(p, momentum, lr, decay=0.01):
    """A kernel's step as the first runs took it, one after the other."""
    momentum.lerp_(p.grad, 1 - 0.95)
    x = p.grad.lerp(momentum, 0.95).flatten(1)
    tall = x.shape[0] > x.shape[1]
    gain = max(1.0, x.shape[0] / x.shape[1]) ** 0.5
    x = x.T if tall else x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    p.mul_(1 - lr * decay)
    p.sub_((x.T if tall else x).view_as(p), alpha=lr * gain)


def test_one_size_trains_bit_for_bit_as_the_first_runs(images, run):
    """Against the plain loop that there was before steps stopped waiting for the device."""
    train_set = sd.picture_sets.load_pictures(str(images), SIZE, 0, 8.0, 0.2).train
    vae = sd.autoencoder.new_vae("tiny", 0)
    ema = [p.detach().clone() for p in vae.parameters()]
    kernels, vectors = ([p for p in vae.parameters() if (p.dim() > 1) == wide] for wide in (True, False))
    momenta = [torch.zeros_like(p) for p in kernels]
    adamw = torch.optim.AdamW(vectors, lr=1, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    weights = {"l1": 1.0, "l2": 8.0, "edge": 0.0, "kl": 1e-3}
    for step in range(STEPS):
        lr = SD_TrainVAE.learning_rate(step, 1.0, 2, STEPS)
        order = np.random.default_rng([0, step * 3 // len(train_set)]).permutation(len(train_set))
        x = train_set[order[step * 3 : step * 3 + 3]].permute(0, 3, 1, 2).float() / 127.5 - 1
        noise = sd.picture_sets.step_noise(0, step, (3, 4, 4, 4))
        vae.zero_grad(set_to_none=True)
        sd.autoencoder.losses(vae, x.contiguous(), noise, weights)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        with torch.no_grad():
            for p, momentum in zip(kernels, momenta, strict=True):
                old_muon(p, momentum, lr * 0.02)
        adamw.param_groups[0]["lr"] = lr * 2e-3
        adamw.step()
        sd.optim.update_ema(ema, list(vae.parameters()), min(0.995, (2 + step) / (11 + step)))
    saved = [load_file(run / "checkpoints" / "step_00000006" / f"{n}.safetensors") for n in ("vae", "vae_ema")]
    for (name, p), average in zip(vae.named_parameters(), ema, strict=True):
        assert (saved[0][name] == p).all() and (saved[1][name] == average).all(), name
    config = json.loads((run / "result.json").read_text())["config"]
    assert config["size"] == SIZE and config["batch"] == 3  # what checkpoints of older runs are compared with
    assert not {"minutes", "kernels", "compile", "benchmark"} & config.keys()


# Several sizes
@pytest.fixture(scope="module")
def both(images, tmp_path_factory) -> tuple[Path, Path]:
    """The drawn pictures in folders of 16 px and 32 px: the smaller ones are every other pixel of the larger."""
    folders = tuple(tmp_path_factory.mktemp("shapes") / f"images_{size}" for size in (16, 32))
    for folder, every in zip(folders, (2, 1), strict=True):
        folder.mkdir()
        for n in range(2):
            with sd.shards.ShardWriter(folder / f"{n:05d}.tar") as shard:
                for i in range(32):
                    picture = sd.shapes.sample(0, 32 * n + i, SIZE)[0][::every, ::every]
                    shard.add(f"{n}{i:04d}", sd.pictures.encode_png(np.ascontiguousarray(picture)), "png", "", {})
    return folders


def train_both(both, out: Path, *flags):
    SD_TrainVAE.main([*command(both[0], out, "--size", "16,32", *flags), "--images", *map(str, both)])


@pytest.fixture(scope="module")
def run_of_both(both, tmp_path_factory) -> tuple[Path, list]:
    """A finished run on both sizes, and the shapes of the pictures of its steps."""
    out, real, shapes = tmp_path_factory.mktemp("both") / "run", sd.autoencoder.losses, []

    def losses(vae, x, *more):
        shapes.append(tuple(x.shape))
        return real(vae, x, *more)

    with pytest.MonkeyPatch.context() as patch:
        rebind(sd.autoencoder, "losses", losses, patch.setattr)
        train_both(both, out, "--log_steps", 2)
    return out, shapes


def test_sizes_take_turns_and_have_equal_area(run_of_both):
    out, shapes = run_of_both
    assert shapes == [(12, 3, 16, 16), (3, 3, 32, 32)] * 3
    lines = [(r["step"], r["size"], r["images"]) for r in log(out)]
    assert lines == [(1, 16, 12), (2, 32, 15), (3, 16, 27), (4, 32, 30), (5, 16, 42), (6, 32, 45)]  # each size has some
    assert sd.picture_sets.turns_done(7, 3) == [3, 2, 2]
    batches = [SD_TrainVAE.parse_args(["--images", "x", "--out", "y", "--size", "128,256", "--batch", b]).batch
               for b in ("64", "128,64", "5,7")]  # fmt: skip
    assert batches == [[256, 64], [128, 64], [5, 7]]


def test_what_is_held_out_is_so_at_every_size(both):
    """Keys of the two folders differ in the folder: by these a picture would be seen in training at the other size."""
    small, large = sd.picture_sets.load_sets(list(map(str, both)), [16, 32], 0, 8.0, 0.2)
    assert 5 <= len(small.held_out) <= 25
    assert (large.held_out[:, ::2, ::2] == small.held_out).all()
    assert (large.train[:, ::2, ::2] == small.train).all()
    one = sd.picture_sets.load_sets([str(both[1])], [16, 32], 0, 8.0, 0.2)  # of one folder, cut to both
    assert [s.train.shape[1:] for s in one] == [(16, 16, 3), (32, 32, 3)]
    assert len(one[0].train) == len(one[1].train) == 64 - len(one[0].held_out)


def test_each_size_has_its_measures_and_all_have_the_scaling_factor(both, run_of_both):
    out, _ = run_of_both
    result = json.loads((out / "result.json").read_text())
    last = json.loads((out / "validation.jsonl").read_text().splitlines()[-1])
    vae, cpu = sd.weights.read.load_vae(out / "vae"), torch.device("cpu")
    sets = sd.picture_sets.load_sets(list(map(str, both)), [16, 32], 0, 8.0, 0.2)
    squares, means = [], []
    for s in sets:
        psnr = sd.autoencoder.reconstruct(vae, s.held_out, cpu)[1]
        assert result["psnr_by_size"][str(s.size)] == pytest.approx(psnr, abs=1e-3)
        with torch.no_grad():
            mean = vae.moments(sd.autoencoder.to_model(s.train, cpu))[0].double()
        assert result["latents_by_size"][str(s.size)]["std"] == pytest.approx(float(mean.std()), rel=1e-4)
        squares.append(float(mean.square().mean()))
        means.append(float(mean.mean()))
        assert (out / "samples" / f"step_00000006_{s.size}px.png").exists()
    assert result["psnr"] == pytest.approx(np.mean(list(result["psnr_by_size"].values())))
    assert last["psnr_by_size"] == pytest.approx(result["psnr_by_size"])
    deviation = (np.mean(squares) - np.mean(means) ** 2) ** 0.5  # sizes count alike, and not by their latents' area
    assert 1 / result["scaling_factor"] == pytest.approx(deviation, rel=1e-4) == result["latents"]["std"]
    assert abs(squares[0] / squares[1] - 1) > 1e-3  # or the line above could not fail


def test_two_sizes_killed_and_resumed_equal_uninterrupted(both, run_of_both, tmp_path):
    whole, out = run_of_both[0], tmp_path / "run"
    real, calls = sd.autoencoder.losses, []

    def killed():
        def losses(*a):
            calls.append(a)
            if len(calls) == 4:  # after a checkpoint of step 3, in the middle of a turn
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*a)

        sd.autoencoder.losses = losses
        train_both(both, out, "--log_steps", 2, "--save_steps", 3)

    assert status_of(forked(killed)) == -signal.SIGKILL
    train_both(both, out, "--resume", "--log_steps", 2, "--save_steps", 3)
    assert (out / "vae" / "vae.safetensors").read_bytes() == (whole / "vae" / "vae.safetensors").read_bytes()
    measured = ("step", "images", "epoch", "loss", "lr", "grad_norm", "size")
    assert [[r[m] for m in measured] for r in log(out)] == [[r[m] for m in measured] for r in log(whole)]


@pytest.mark.parametrize("device", ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
def test_the_feed_gives_what_belongs_to_the_step(device):
    """A thread works ahead, from any step on; each size has an order of its own."""
    sets = [sd.picture_sets.PictureSet(torch.arange(n).to(torch.uint8).view(n, 1, 1, 1).expand(n, s, s, 3), None, "")
            for n, s in ((10, 8), (7, 16))]  # fmt: skip
    feed = sd.picture_sets.feed(sets, [4, 2], (4, 8), 5, 3, torch.device(device))
    for step in range(3, 9):
        which, pictures, noise = (x if isinstance(x, int) else x.cpu() for x in next(feed))
        expected = sd.picture_sets.batch_indices(5, step // 2, (4, 2)[step % 2], (10, 7)[step % 2], step % 2)
        assert which == step % 2 and pictures[:, 0, 0, 0].tolist() == expected.tolist()
        assert (noise == sd.picture_sets.step_noise(5, step, ((4, 2)[which], 4, which + 1, which + 1))).all()
    feed.close()
    first, second = (sd.picture_sets.batch_indices(5, 0, 50, 50, which).tolist() for which in (0, 1))
    assert sorted(first) == sorted(second) and first != second


def test_an_array_grows_without_losing_pictures(images, monkeypatch):
    whole = sd.picture_sets.load_pictures(str(images), SIZE, 0, 8.0, 0.2)
    monkeypatch.setattr(sd.picture_sets, "GROWTH", 5 * SIZE * SIZE * 3)
    grown = sd.picture_sets.load_pictures(str(images), SIZE, 0, 8.0, 0.2)
    assert (grown.train == whole.train).all() and (grown.held_out == whole.held_out).all()
    digest = hashlib.sha256(whole.train.numpy().tobytes() + whole.held_out.numpy().tobytes()).hexdigest()
    assert grown.digest == whole.digest == digest


def test_flags_that_do_not_go_together(images, both, tmp_path, capsys):
    out = tmp_path / "run"
    for flags, words in (
        (["--size", "32,32"], "a size twice"),
        (["--size", "32,20"], "--size 20"),
        (["--size", "16,32", "--batch", "1,2,3"], "one for each of the sizes"),
        (["--images", "a", "b", "c", "--size", "16,32"], "one folder, or one for each of the sizes"),
        (["--minutes", "1"], "both given"),
        (["--kernels"], "wants an NVIDIA GPU"),
        (["--kernels", "--compile"], "exclude each other"),
    ):
        assert words in refused(capsys, train, images, out, *flags)
    assert "--images and --out" in refused(capsys, SD_TrainVAE.main, ["--images", "x"])
    assert "--minutes wants" in refused(capsys, SD_TrainVAE.main, ["--benchmark", "1", "--minutes", "0"])
    assert not out.exists()


# By the clock
def by_clock(images, out, seconds: list[float], monkeypatch, *flags):
    """A training of half a minute whose clock shows these seconds, one after the other."""
    shown = iter(seconds)
    clock = SimpleNamespace(perf_counter=lambda: next(shown))
    monkeypatch.setattr(SD_TrainVAE, "time", clock)
    argv = command(images, out, "--minutes", 0.5, *flags)
    del argv[argv.index("--max_steps") : argv.index("--max_steps") + 2]
    SD_TrainVAE.main(argv)


def test_minutes_set_the_learning_rate_and_the_end(images, tmp_path, monkeypatch):
    """Begun at second 100: steps end 12, 24 and 36 seconds later. The clock is looked at before, at the begin, after
    each step, for its line, and at the end."""
    out = tmp_path / "run"
    seconds = [99, 100, 112, 112, 124, 124, 136, 136, 140]
    by_clock(images, out, seconds, monkeypatch, "--warmup", 0)
    assert [r["seconds"] for r in log(out)] == [12, 24, 36]
    cosine = [0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * t / 30)) for t in (0, 12, 24)]
    assert [r["lr"] for r in log(out)] == pytest.approx([2e-3 * share for share in cosine])
    assert json.loads((out / "result.json").read_text())["config"]["minutes"] == 0.5


def test_seconds_count_on_at_resume(images, tmp_path, monkeypatch):
    out = tmp_path / "run"
    with pytest.raises(StopIteration):  # the clock breaks in the third step, after a checkpoint of 24 seconds
        by_clock(images, out, [99, 100, 112, 112, 124, 124], monkeypatch, "--warmup", 0)
    by_clock(images, out, [9, 10, 17, 17, 20], monkeypatch, "--warmup", 0, "--resume")
    assert [r["seconds"] for r in log(out)] == [12, 24, 31]
    assert log(out)[-1]["lr"] == pytest.approx(2e-3 * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * 24 / 30))))


# Speed
def step_args(**other) -> SimpleNamespace:
    args = SD_TrainVAE.parse_args(["--images", "x", "--out", "y", "--dtype", "fp32", "--no_kernels"])
    return SimpleNamespace(**vars(args) | other)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_told_of(optimizer):
    trained = sd.autoencoder.new_trained(step_args(optimizer=optimizer), torch.device("cpu"))
    step = sd.autoencoder.Step(trained, step_args(optimizer=optimizer), torch.device("cpu"))
    pictures, noise = torch.randint(256, (2, 16, 16, 3), dtype=torch.uint8), torch.randn(2, 4, 2, 2)

    def all_tensors() -> list[torch.Tensor]:
        states = [t for o in trained.optimizers for state in o.state.values() for t in state.values()]
        return [t.detach().clone() for t in (*trained.vae.parameters(), *states)]

    step(pictures, noise, 1.0)
    before = all_tensors()
    step(pictures, noise * math.nan, 1.0)
    after = all_tensors()
    assert len(before) > 60 and all((a == b).all() for a, b in zip(before, after, strict=True))
    step(pictures, noise, 1.0)  # a good one does not hide it, and is taken
    assert any((a != b).any() for a, b in zip(before, all_tensors(), strict=True))
    assert all(p.isfinite().all() for p in (*trained.vae.parameters(), *trained.ema.parameters()))
    with pytest.raises(InputError, match="not finite at step 1: try a smaller --lr"):
        step.check()


def test_nothing_is_saved_after_a_step_that_was_not_finite(images, tmp_path, monkeypatch):
    """Not even where no line of the log is due."""
    real, calls = sd.autoencoder.losses, []

    def losses(vae, x, noise, weights):
        calls.append(1)
        return real(vae, x, noise * (math.nan if len(calls) == 4 else 1), weights)

    rebind(sd.autoencoder, "losses", losses, monkeypatch.setattr)
    with pytest.raises(InputError, match="not finite at step 3"):
        train(images, tmp_path / "run", "--log_steps", 100)
    assert [p.name for p in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_00000002"]


def test_matrices_of_one_shape_are_orthogonalised_together_alike(monkeypatch):
    """As on a GPU: three wide, two tall and a lone one, at different scales, twice."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(4, 8, 3, 3), (40, 2, 3, 3), (4, 8, 3, 3), (5, 5, 1, 1), (40, 2, 3, 3), (4, 72, 1, 1)]
    start = [torch.randn(shape, generator=generator) for shape in shapes]
    grads = [
        [10.0 ** (i - 3) * torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)] for _ in "ab"
    ]

    def moved() -> list[torch.Tensor]:
        params = [torch.nn.Parameter(p.clone()) for p in start]
        muon = sd.optimizers.Muon(params, lr=0.1, weight_decay=0.1)
        for both in grads:
            for p, g in zip(params, both, strict=True):
                p.grad = g.clone()
            muon.step()
        return [p.detach() for p in params]

    one_by_one = moved()
    groups = lambda params: [[params[i] for i in group] for group in ((0, 2, 5), (1, 4), (3,))]  # noqa: E731
    monkeypatch.setattr(sd.optimizers.Muon, "_alike", staticmethod(groups))
    for a, b in zip(one_by_one, moved(), strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(sd.kernels.triton is None, reason="Triton is not installed")
def test_the_fused_autoencoder_trains_as_the_plain_one():
    """The terms of the loss and every gradient."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plain = randomise(sd.autoencoder.new_vae("tiny", 0)).to(device)
    fused = sd.fused.apply(randomise(sd.autoencoder.new_vae("tiny", 0)).to(device))
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(2, 3, 8, 8, generator=generator) * 2 - 1).to(device)
    noise = torch.randn(2, 4, 1, 1, generator=generator).to(device)
    weights = {"l1": 1.0, "l2": 8.0, "edge": 0.5, "kl": 0.1}
    found = []
    for vae in (plain, fused):
        terms = sd.autoencoder.losses(vae, x, noise, weights)
        terms["loss"].backward()
        found.append(({name: float(term.detach()) for name, term in terms.items()}, [p.grad for p in vae.parameters()]))
    assert type(fused.encoder.down[0].block[0]) is sd.fused.FusedVAEResBlock
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    for (name, _), a, b in zip(plain.named_parameters(), found[0][1], found[1][1], strict=True):
        assert (a - b).abs().max() <= 2e-3 * a.abs().max() + 1e-6, name


def test_without_a_compiler_training_and_encoding_go_on(images, run, tmp_path, monkeypatch, capsys):
    def broken(function, **_):
        def fails(*_):
            raise RuntimeError("no compiler")

        return fails

    monkeypatch.setattr(torch, "compile", broken)
    train(images, tmp_path / "run", "--compile")
    assert capsys.readouterr().out.count("torch.compile failed (RuntimeError), going on without it") == 1
    assert (tmp_path / "run/vae/vae.safetensors").read_bytes() == (run / "vae/vae.safetensors").read_bytes()

    encoder = sd.encoder.Encoder(
        sd.weights.read.load_vae(run / "vae"), torch.device("cpu"), torch.float32, compiled=True
    )
    encoder.warm_up(16, 2)
    assert "torch.compile failed" in capsys.readouterr().out and not encoder.compiled
    latents, finite = encoder.collect(encoder.submit(torch.zeros(2, 16, 16, 3, dtype=torch.uint8)))
    assert latents.shape == (2, 4, 2, 2) and finite.all()


def test_compiled_is_what_trains(monkeypatch):
    """Compiled once with static shapes, and used in every step."""
    asked, calls = [], []

    def compiled(function, dynamic=None):
        asked.append(dynamic)
        return lambda *a: calls.append(a[1].shape) or function(*a)

    monkeypatch.setattr(torch, "compile", compiled)
    trained = sd.autoencoder.new_trained(step_args(), torch.device("cpu"))
    step = sd.autoencoder.Step(trained, step_args(compile=True), torch.device("cpu"))
    for side in (16, 32, 16):
        step(torch.zeros(1, side, side, 3, dtype=torch.uint8), torch.zeros(1, 4, side // 8, side // 8), 1.0)
    assert asked == [False] and [shape[-1] for shape in calls] == [16, 16, 32, 16]  # the first is the trial


def test_benchmark_times_each_size_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    seen, real = [], sd.autoencoder.losses
    counted = lambda vae, x, *more: seen.append(len(x)) or real(vae, x, *more)  # noqa: E731
    rebind(sd.autoencoder, "losses", counted, monkeypatch.setattr)
    ticks = iter([0.0, 10.0, 14.0, 100.0, 101.0, 103.0])  # of each size: warm-up, steps, end
    monkeypatch.setattr(SD_TrainVAE, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    SD_TrainVAE.main("--benchmark 4 --size 16,32 --batch 2 --device cpu".split())
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    assert seen == [8] * 9 + [2] * 9
    rates = {name: (s["images_per_s"], s["ms_a_step"], s["warm_up_s"]) for name, s in sizes.items()}
    assert rates == {"16": (4 * 8 / 4, 1000, 10), "32": (4 * 2 / 2, 500, 1)}
    assert not list(tmp_path.iterdir())
