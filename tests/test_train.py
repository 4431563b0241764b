"""SD_Train.py: exact resume, exact scaling, faults survived, bad input refused. Trainings of milliseconds a step, each
in a forked process of its own (tests/faults/micro.py); tests/faults/run.py attacks harder and longer."""

import copy
import errno
import importlib
import io
import itertools
import json
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro
from binding import rebind
from conftest import cpu_name
from micro import contents, flags, rows, start, start_ranks, status_of

import sd.checkpoints
import sd.data
import sd.device
import sd.errors
import sd.files
import sd.fused
import sd.fused_ops
import sd.graphs
import sd.kernels
import sd.log
import sd.objective
import sd.optim
import sd.painting
import sd.parallel
import sd.plan
import sd.speed
import sd.step
import sd.weights.parts
import sd.weights.read
import SD_Convert
import SD_Model
import SD_Run
import SD_Train

GOLDEN = Path(__file__).parent / "golden" / "train_micro.json"


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Two sources: `things` of 42 pictures (10.5 steps of 4 an epoch), `few` of 10."""
    return micro.make_data(tmp_path_factory.mktemp("micro") / "data", {"things": 42, "few": 10})


def train(data: Path, out: Path, *more, hook=None, world=1, expect=0, **environment) -> str:
    """Train to the end in one or more processes; returns what they printed."""
    output = (out.parent if out.parent.is_dir() else out.parent.parent) / f"{out.name}.txt"
    output.unlink(missing_ok=True)
    argv = flags(data, out, *more)
    pids = (
        start_ranks(world, argv, output, hook, **environment)
        if world > 1
        else [start(argv, output, hook, **environment)]
    )
    statuses, text = [status_of(pid) for pid in pids], output.read_text()
    assert all(s == expect for s in statuses), (statuses, text[-3000:])
    return text


def column(out: Path, name: str) -> list:
    return [row[name] for row in rows(out)]


def last_checkpoint(out: Path) -> Path:
    return micro.checkpoints(out)[-1]


def assert_equal_runs(a: Path, b: Path, settings=True):
    assert micro.differences(a, b, settings) == []


def patched(name: str, wrapper):
    """A hook for micro.start: a name of sd/objective.py becomes wrapper(the original)."""

    def hook(*_):
        rebind(sd.objective, name, wrapper(getattr(sd.objective, name)))

    return hook


def killed_in(call: int):
    """A hook: kill -9 in this call of backward, counted from 0 over all micro-batches, after a save under way."""

    def wrapper(real):
        count = iter(range(10**9))

        def backward(*args):
            if next(count) == call:
                [t.join() for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return backward

    return patched("backward", wrapper)


@pytest.fixture(scope="session")
def plain(data, tmp_path_factory) -> Path:
    """An undisturbed run of 12 steps of 4."""
    out = tmp_path_factory.mktemp("plain") / "run"
    train(data, out, curves=True)
    return out


# ----------------------------------------------------------------------------------------------------------------
# Exact resume
# ----------------------------------------------------------------------------------------------------------------

TEXT = ("--train_text_encoder", "--zero_init", "none", "--text_lr", 0.5)
CASES = {
    "mid-epoch": ((), 7),
    "epoch's edge": (("--batch", 6, "--save_steps", 7), 7),  # 42 pictures: step 7 ends the first epoch
    "in an accumulation window": (("--batch", 2, "--accumulate", 2), 15),
    "between saves and log lines": (("--log_steps", 5, "--save_steps", 4), 9),
    "text encoder": (TEXT, 8),
    "mixture, v, offset, adaptive clipping": (
        ("--data", "things:0.7,few:0.3:8", "--prediction", "v", "--zero_terminal_snr", "--offset_noise", 0.1,
         "--adaptive_clip", 1.05, "--lr_schedule", "linear"), 8),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_resume_after_kill_is_exact(case, data, plain, tmp_path):
    """CASES 1, 2, 15, 16."""
    more, call = CASES[case]
    whole, cut = plain, tmp_path / "cut"
    if more:
        whole = tmp_path / "whole"
        train(data, whole, *more)
    train(data, cut, *more, hook=killed_in(call), expect=-signal.SIGKILL)
    assert 0 < json.loads((last_checkpoint(cut) / "state.json").read_text())["step"] < 12
    train(data, cut, *more, "--resume")
    assert_equal_runs(whole, cut)


def test_resume_in_a_later_phase(data, plain, tmp_path):
    more = ("--init_from", plain, "--phase", "openmoji", "--max_steps", 9, "--data", "few")
    train(data, tmp_path / "whole", *more)
    train(data, tmp_path / "cut", *more, hook=killed_in(5), expect=-signal.SIGKILL)
    train(data, tmp_path / "cut", *more, "--resume")
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")
    assert column(tmp_path / "whole", "loss")[0] != column(plain, "loss")[0]


def test_resume_of_two_ranks_is_exact(data, tmp_path):
    more = ("--batch", 2, "--accumulate", 2, "--save_steps", 4, *TEXT)
    train(data, tmp_path / "whole", *more, world=2)
    train(data, tmp_path / "cut", *more, world=2, hook=killed_in(13), expect=-signal.SIGKILL)
    train(data, tmp_path / "cut", *more, "--resume", world=2)
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")


def on_this_device(*_):
    """A hook: the fused kernels run here too, through Triton's interpreter, one by one."""
    rebind(sd.kernels, "available", lambda device: True)
    rebind(sd.step, "graphs_run", lambda *_: False)
    sd.fused_ops.BLOCK_R = 256  # few and large tiles, as the interpreter's time goes by tiles
    sd.optim.FusedStep.BLOCK = 1 << 13


@pytest.mark.skipif(sd.kernels.triton is None, reason="Triton is not installed")
def test_fused_kernels_train_as_the_plain_network_does(data, tmp_path):
    """Same losses to rounding; exact resume, of moments in channels_last too; the checkpoint of one goes on with the
    other."""
    more = ("--max_steps", 2, "--batch", 2, "--warmup", 0, "--val_steps", 0, "--save_steps", 1, "--channels_last")
    train(data, tmp_path / "plain", *more)
    train(data, tmp_path / "fused", *more, "--kernels", hook=on_this_device)
    train(data, tmp_path / "cut", *more, "--kernels", "--stop_at", 1, hook=on_this_device)
    shutil.copytree(tmp_path / "cut", tmp_path / "changed")
    train(data, tmp_path / "cut", *more, "--kernels", "--resume", hook=on_this_device)
    whole, resumed = (contents(last_checkpoint(tmp_path / name))[0] for name in ("fused", "cut"))
    assert all(torch.equal(whole[k], resumed[k]) for k in whole.keys() | resumed.keys())
    train(data, tmp_path / "changed", *more, "--no_kernels", "--resume")
    for other in ("fused", "changed"):
        for name in ("loss", "grad_norm"):
            assert np.allclose(column(tmp_path / "plain", name), column(tmp_path / other, name), rtol=2e-3), other
    assert column(tmp_path / "plain", "loss")[0] != pytest.approx(column(tmp_path / "plain", "loss")[1], rel=0.02)


@pytest.mark.skipif(sd.kernels.triton is None, reason="Triton is not installed")
def test_ranks_with_fused_kernels_share_their_gradients(data, tmp_path):
    """A step of two ranks that recompute their blocks is one of two micro-batches."""
    more = ("--max_steps", 1, "--batch", 1, "--warmup", 0, "--val_steps", 0, "--sample_steps", 0, "--kernels")
    train(data, tmp_path / "one", *more, "--accumulate", 2, hook=on_this_device)
    train(data, tmp_path / "two", *more, "--grad_checkpoint", "all", world=2, hook=on_this_device)
    for name in ("loss", "grad_norm"):
        assert np.allclose(column(tmp_path / "one", name), column(tmp_path / "two", name), rtol=1e-5), name
    assert column(tmp_path / "one", "seen") == column(tmp_path / "two", "seen")


def copying(*_):
    """A hook: as on_this_device, and processes copy from each other's memory."""
    on_this_device()
    for owner, name, value in micro.peer_memory():
        setattr(owner, name, value)
    sd.parallel.PeerCopies.BUCKET, sd.parallel.PeerCopies.BLOCK = 20_000, 1 << 13  # several, few and large tiles


@pytest.mark.skipif(sd.kernels.triton is None, reason="Triton is not installed")
def test_ranks_that_update_a_part_of_the_weights_each(data, tmp_path):
    """They write the checkpoint, with weights, averages and moments, and the validation of ranks that update all."""
    more = ("--max_steps", 1, "--batch", 1, "--warmup", 0, "--val_steps", 1, "--val_images", 1, "--sample_steps", 0,
            "--clip", 0, "--adaptive_clip", 0, "--kernels", "--dtype", "bf16", "--zero_init", "none")  # fmt: skip
    train(data, tmp_path / "all", *more, "--no_peer_copies", world=2, hook=copying)
    assert "note:" not in train(data, tmp_path / "part", *more, world=2, hook=copying)
    whole, parts = (contents(last_checkpoint(tmp_path / name))[0] for name in ("all", "part"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[k], parts[k]) for k in whole)
    first, second = ((tmp_path / name / "validation.jsonl").read_text() for name in ("all", "part"))
    assert first == second and first.count("\n") > 2


def test_a_run_begun_before_a_setting_existed_takes_it_on_resume():
    saved = SD_Train.resolve(SD_Train.parse_args(["--phase", "demo"]), None)
    del saved["peer_copies"], saved["dtype"]
    for more, expected in (([], True), (["--no_peer_copies"], False)):
        args = SD_Train.parse_args(["--phase", "demo", "--resume", *more])
        assert SD_Train.resolve(args, dict(saved))["peer_copies"] is expected


def test_a_pass_that_cannot_be_recorded_goes_on_without_graphs(data, plain, tmp_path):
    def hook(*_):
        class Refusing(sd.graphs.GraphedBackward):
            def __call__(self, *inputs, first, last):
                self.function(*inputs, last=last)  # gradients that must not stay
                raise sd.graphs.NotRecorded("operation not permitted when stream is capturing")

        rebind(sd.step, "graphs_run", lambda *_: True)
        rebind(sd.graphs, "GraphedBackward", Refusing)
        torch.cuda.synchronize = lambda: None

    text = train(data, tmp_path / "run", hook=hook)
    assert text.count("going on without CUDA graphs (operation not permitted") == 1
    assert_equal_runs(plain, tmp_path / "run")


def recording(lying: bool):
    """A hook: passes are "recorded" as CUDA graphs are, and run again at each replay; lying: gradients are doubled."""

    class Graph:
        def pool(self):
            return "memory"

        def replay(self):
            steps = self.function.func.__self__  # whose first pass overwrites the gradients
            if self.first:
                sd.optim.forget_gradients(steps.parameters)
            self.out.copy_(self.function())
            if lying:
                torch._foreach_mul_([p.grad for p in steps.parameters], 2)

    def record(graph, function, pool=None):
        graph.function, graph.first, graph.out = function, pool is None, function()
        return graph.out

    def hook(*_):
        sd.step.graphs_run, torch.cuda.CUDAGraph = lambda *_: True, Graph
        sd.graphs._record, sd.graphs._warm_up = record, lambda function: [function() for _ in range(2)]
        torch.cuda.synchronize = lambda: None

    return hook


@pytest.mark.parametrize("accumulate", [1, 3])
def test_recorded_passes_train_as_plain_ones(accumulate, data, tmp_path):
    """The calls of a step's graphs, first, middle and last, on a CPU; graphs that give other numbers are not used."""
    more = ("--batch", 2, "--accumulate", accumulate, "--max_steps", 4)
    train(data, tmp_path / "plain", *more)
    assert "without CUDA graphs" not in train(data, tmp_path / "recorded", *more, hook=recording(lying=False))
    assert "graphs (the recorded pass gave other numbers" in train(
        data, tmp_path / "lying", *more, hook=recording(lying=True)
    )
    assert_equal_runs(tmp_path / "plain", tmp_path / "recorded")
    assert_equal_runs(tmp_path / "plain", tmp_path / "lying")


@pytest.mark.parametrize("world", [1, 3])
def test_two_ranks_resume_on_another_number(world, data, tmp_path):
    """The next unseen image comes next, and the global batch of 12 stays."""
    more = ("--batch", 2, "--accumulate", 3, "--max_steps", 6)
    train(data, tmp_path / "whole", *more, world=2)
    train(data, tmp_path / "cut", *more, "--stop_at", 3, world=2)
    train(data, tmp_path / "cut", "--batch", 2, "--max_steps", 6, "--without", "accumulate", "--resume", world=world)
    assert column(tmp_path / "whole", "seen") == column(tmp_path / "cut", "seen")
    assert column(tmp_path / "whole", "lr") == column(tmp_path / "cut", "lr")
    assert np.allclose(column(tmp_path / "whole", "loss"), column(tmp_path / "cut", "loss"), rtol=0, atol=1e-5)
    state = json.loads((last_checkpoint(tmp_path / "cut") / "state.json").read_text())
    assert (state["global_batch"], state["images"], state["settings"]["accumulate"]) == (12, 72, 6 // world)


def test_latents_of_several_shapes(data, tmp_path):
    """Each step has one shape; a killed run goes on exactly; two ranks are one; validation sees all shapes."""
    sides, wide = [(8, 8), (6, 10), (10, 6)], tmp_path / "data"
    shutil.copytree(data, wide)
    folder = wide / "things" / "latents"
    keys = [k for path in sorted(folder.glob("*.parquet")) for k in pq.read_table(path)["image_key"].to_pylist()]
    [path.unlink() for pattern in ("*.npy", "*.parquet") for path in folder.glob(pattern)]
    for i, (h, w) in enumerate(sides):
        own = [key for n, key in enumerate(keys) if n % 5 % 3 == i]
        values = np.random.default_rng(i).standard_normal((len(own), 4, h, w)).astype(np.float16)
        np.save(folder / f"00000_{h}x{w}.npy", values)
        table = pa.table({"image_key": own, "row": pa.array(range(len(own)), pa.int32())})
        pq.write_table(table, folder / f"00000_{h}x{w}.parquet")
    manifest = json.loads((folder / "manifest.json").read_text())

    def write(buckets):
        (folder / "manifest.json").write_text(json.dumps(manifest | {"buckets": [[8 * h, 8 * w] for h, w in buckets]}))

    write(sides[:2])
    assert "encode them again" in train(wide, tmp_path / "refused", expect=2)
    write(sides)
    record = tmp_path / "shapes"

    def noted(real):
        def backward(net, batch, *args):
            with open(record, "a") as f:
                f.write(f"{tuple(batch.latents.shape)}\n")
            return real(net, batch, *args)

        return backward

    text = train(wide, tmp_path / "whole", hook=patched("backward", noted))
    assert "shapes: 3; too rare for a step of 4 in this run: none" in text
    assert "this run: 10 x 6" in train(wide, tmp_path / "short", "--max_steps", 4)  # of the rarest, three are due
    shapes = record.read_text().split("\n")[:-1]
    assert len(shapes) == 12 and set(shapes) == {f"(4, 4, {h}, {w})" for h, w in sides}
    train(wide, tmp_path / "cut", hook=killed_in(8), expect=-signal.SIGKILL)
    train(wide, tmp_path / "cut", "--resume")
    assert_equal_runs(tmp_path / "whole", tmp_path / "cut")
    train(wide, tmp_path / "two", "--batch", 2, world=2)
    assert column(tmp_path / "whole", "seen") == column(tmp_path / "two", "seen")
    assert np.allclose(column(tmp_path / "whole", "loss"), column(tmp_path / "two", "loss"), rtol=0, atol=1e-5)
    one, two = (rows(tmp_path / name, "validation.jsonl") for name in ("whole", "two"))
    assert len(one) == len(two) > 0 and all(abs(a["loss"] - b["loss"]) < 1e-5 for a, b in zip(one, two))


def test_other_global_batch_is_refused(data, plain, tmp_path):
    shutil.copytree(plain, tmp_path / "run")
    text = train(data, tmp_path / "run", "--resume", "--batch", 3, expect=2)
    assert "global batch is 4" in text


def test_seen_is_what_the_order_says(data, plain):
    """CASES 1: every key once an epoch, the next epoch in another order; proved by the field `seen`."""
    settings = json.loads((plain / "config.json").read_text())
    sources = sd.data.parse_sources(settings)
    split = sd.data.Split(sources, [sd.data.LatentStore(s.latents, False) for s in sources], "train", 1.0)
    order = sd.data.SampleOrder(split.sizes, None, settings["seed"])
    keys = split.keys.take(order.at(np.arange(48))).to_pylist()
    assert sorted(keys[:42]) == sorted(split.keys.to_pylist()) and keys[:6] != keys[42:48]
    sums = list(itertools.accumulate(sd.data.seen_hash(i, key) for i, key in enumerate(keys)))
    assert column(plain, "seen") == [f"{sums[4 * n + 3] % 2**64:016x}" for n in range(12)]
    assert column(plain, "images") == [4 * n + 4 for n in range(12)]


def test_steps_are_optimizer_steps(data, tmp_path):
    """CASES 2: accumulation 4, save at 10, resume, stop at 20: 40 micro-batches each time, and 20 is the end."""
    calls = tmp_path / "calls"

    def count(real):
        def backward(*args):
            with open(calls, "a") as f:
                f.write("x")
            return real(*args)

        return backward

    more = ("--batch", 1, "--accumulate", 4, "--max_steps", 20, "--save_steps", 10, "--val_steps", 0)
    train(data, tmp_path / "run", *more, "--stop_at", 10, hook=patched("backward", count))
    assert len(calls.read_text()) == 40 and last_checkpoint(tmp_path / "run").name == "step_00000010"
    text = train(data, tmp_path / "run", *more, "--resume", hook=patched("backward", count))
    assert "from step 10" in text and len(calls.read_text()) == 80
    assert column(tmp_path / "run", "step") == list(range(1, 21))
    steps = {int(t) for k, t in contents(last_checkpoint(tmp_path / "run"))[0].items() if k.endswith("/step")}
    assert steps == {20}  # AdamW's own counter
    train(data, tmp_path / "run", *more, "--resume", hook=patched("backward", count))  # done already
    assert len(calls.read_text()) == 80


def test_learning_rate_after_resume(data, plain, tmp_path):
    """CASES 16: another --lr is applied; what cannot change is refused by name."""
    run = tmp_path / "run"
    train(data, run, "--stop_at", 6)
    train(data, run, "--resume", "--lr", 5e-4)
    before, after = column(plain, "lr"), column(run, "lr")
    assert after[:6] == before[:6] and np.allclose(after[6:], np.array(before[6:]) / 2, rtol=1e-12)
    for flag, value in (("--seed", 2), ("--drop", 0.5), ("--prediction", "v")):
        assert f"{flag} {value} differs" in train(data, run, "--resume", flag, value, expect=2)


def test_optimizer_goes_on(data, plain, tmp_path):
    """CASES 15: from a checkpoint loaded to the CPU, one step: n -> n + 1, parameters as without the stop."""
    for split in ([7], [6, 7]):
        for stop in split:
            train(data, tmp_path / f"run{len(split)}", "--stop_at", stop, "--resume")
    one, two = (contents(last_checkpoint(tmp_path / f"run{n}"))[0] for n in (1, 2))
    assert {float(t) for k, t in two.items() if k.endswith("/step")} == {7.0}
    assert max(float((one[k] - two[k]).abs().max()) for k in one) == 0  # the promise is 1e-6


# ----------------------------------------------------------------------------------------------------------------
# Exact scaling
# ----------------------------------------------------------------------------------------------------------------


def test_ranks_and_accumulation_make_the_same_run(data, tmp_path):
    """1 x 4 = 2 x 2 = 4 x 1 (ranks x accumulation); CASES 3: noise differs over ranks, weights do not."""
    ends = []
    for world in (1, 2, 4):
        out = tmp_path / f"ranks{world}"
        more = (
            "--batch",
            3,
            "--accumulate",
            4 // world,
            "--max_steps",
            8,
            "--zero_init",
            "none",
            "--lr_schedule",
            "constant",
        )
        train(data, out, *more, world=world, hook=recorder(tmp_path / f"noise{world}"), LOCAL_RANK=0)
        ends.append((out, contents(last_checkpoint(out))[0]))
        by_rank = [set(json.loads(f.read_text())) for f in sorted(tmp_path.glob(f"noise{world}_*"))]
        assert len(by_rank) == world and all(len(noise) == 8 * 12 // world for noise in by_rank)
        assert len(set.union(*by_rank)) == 8 * 12  # none twice, on whatever rank: the same set for all
        ends[-1] += (set.union(*by_rank),)
    (one, weights, noise), *others = ends
    for out, other_weights, other_noise in others:
        assert noise == other_noise
        assert column(one, "seen") == column(out, "seen")
        assert np.allclose(column(one, "loss"), column(out, "loss"), rtol=0, atol=1e-6)
        for row, other in zip(rows(one, "validation.jsonl"), rows(out, "validation.jsonl")):
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-6)
        moved = {k for k in weights if "optimizer" not in k}
        assert max(float((weights[k] - other_weights[k]).abs().max()) for k in moved) < 1e-4


def recorder(prefix: Path):
    """A hook: each rank writes hashes of the noise it trained on, and checks that all ranks end with the same weights.
    Every rank is told LOCAL_RANK=0, as the first ones of several machines are."""

    def hook(rank=0):
        seen, real, real_destroy = [], sd.objective.backward, dist.destroy_process_group

        def backward(net, batch, *args):
            seen.extend(hash(x.numpy().tobytes()) for x in batch.noise)
            prefix.with_name(f"{prefix.name}_{rank}").write_text(json.dumps(seen))
            return real(net, batch, *args)

        rebind(sd.objective, "backward", backward)
        real_wrap = sd.step.wrap

        def wrap(denoiser, *args):
            def destroy():
                own = torch.cat([p.detach().flatten() for p in denoiser.parameters()])
                low, high = own.clone(), own.clone()
                dist.all_reduce(low, dist.ReduceOp.MIN), dist.all_reduce(high, dist.ReduceOp.MAX)
                assert torch.equal(low, high)
                real_destroy()

            dist.destroy_process_group = destroy
            return real_wrap(denoiser, *args)

        rebind(sd.step, "wrap", wrap)

    return hook


def test_torchrun_equals_one_process(data, tmp_path):
    """50 steps at a constant lr of 1e-3: the same losses to 1e-5. A real torchrun, gloo."""
    more = ("--batch", 2, "--max_steps", 50, "--save_steps", 25, "--val_steps", 50,
            "--lr_schedule", "constant", "--warmup", 0, "--zero_init", "none")  # fmt: skip
    train(data, tmp_path / "one", *more, "--accumulate", 2)
    argv = flags(data, tmp_path / "two", *more)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={micro.free_port()}",
         micro.__file__, *argv], env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    one, two = (np.array(column(tmp_path / name, "loss")) for name in ("one", "two"))
    assert len(one) == 50 and np.abs(one - two).max() < 1e-5
    assert column(tmp_path / "one", "seen") == column(tmp_path / "two", "seen")
    start, end = (contents(c)[0] for c in sorted((tmp_path / "one/checkpoints").iterdir()))
    assert max(float((start[k] - end[k]).abs().max()) for k in start if k.startswith("unet.s")) > 1e-3  # weights moved


def test_gradients_are_averaged_once():
    """CASES 4: two gloo ranks, a zero weight, inputs [1, 3] and [2, 8], loss out/2, accumulation 2: 3.5 on both."""

    def gradients(rank: int, context) -> bytes:
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        reduced = []
        model.register_comm_hook(None, lambda _, bucket: reduced.append(1) or averaged(bucket))
        for a, x in enumerate([[1.0, 3.0], [2.0, 8.0]][rank]):
            with context(model, a == 1):
                (model(torch.tensor([[x]])).sum() / 2).backward()
        return f"{model.module.weight.grad.item()} {len(reduced)}\n".encode()

    def averaged(bucket):
        return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])

    def wrong(model, last):  # averages in every micro-batch
        return sd.step.averaging(model, True)

    for context, expected in ((sd.step.averaging, ["3.5 1"] * 2), (wrong, ["3.5 2"] * 2)):
        found = micro.fork_ranks(lambda rank, context=context: gradients(rank, context))
        assert found.decode().splitlines() == expected


def test_saves_and_previews_every_step_do_not_hang(data, tmp_path):
    """CASES 14: two ranks, all they do at every step, and no collective that only one joins."""
    often = ("--save_steps", 1, "--sample_steps", 1, "--val_steps", 1, "--keep_last", 1, "--max_steps", 4)
    started = time.time()
    train(data, tmp_path / "run", *often, world=2)
    assert time.time() - started < 60
    assert [c.name for c in (tmp_path / "run/checkpoints").iterdir()] == ["step_00000004"]
    assert len(list((tmp_path / "run/samples").glob("*.png"))) == 4


def test_disagreeing_ranks_stop(data, plain, tmp_path):
    """As when the second machine does not see the first one's run folder: an error, not a hang."""
    shutil.copytree(plain, tmp_path / "run")
    shutil.rmtree(last_checkpoint(tmp_path / "run"))
    output, port = tmp_path / "out.txt", micro.free_port()
    argv = [flags(data, tmp_path / name, "--resume", "--batch", 2) for name in ("run", "elsewhere")]
    pids = [start(a, output, RANK=r, LOCAL_RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            for r, a in enumerate(argv)]  # fmt: skip
    assert [status_of(p) for p in pids] == [2, 2]
    assert "processes disagree on where to go on" in output.read_text()


# ----------------------------------------------------------------------------------------------------------------
# Checkpoints
# ----------------------------------------------------------------------------------------------------------------


def failing_write(step: int, how):
    """A hook: writing the checkpoint of this step ends half-way with how()."""

    def hook(*_):
        real = sd.checkpoints.write_checkpoint

        def write(folder, snapshot):
            if snapshot["state"]["step"] != step:
                return real(folder, snapshot)
            (folder / "unet.safetensors").write_bytes(b"half of it")
            how()

        rebind(sd.checkpoints, "write_checkpoint", write)

    return hook


def full_disk():
    raise OSError(errno.ENOSPC, "No space left on device")


def test_full_disk_costs_only_that_checkpoint(data, plain, tmp_path):
    """CASES 13: the error is seen, training goes on, the previous checkpoint stays, the next one is written."""
    text = train(data, tmp_path / "run", hook=failing_write(6, full_disk))
    assert "step_00000006 was not written" in text and "No space left" in text
    assert [c.name[-2:] for c in sorted((tmp_path / "run/checkpoints").iterdir())] == ["03", "09", "12"]
    assert_equal_runs(plain, tmp_path / "run")
    # at the end of training it is an error, and --resume mends it
    text = train(data, tmp_path / "last", hook=failing_write(12, full_disk), expect=1)
    assert "could not be written" in text and last_checkpoint(tmp_path / "last").name[-2:] == "09"
    train(data, tmp_path / "last", "--resume")
    assert_equal_runs(plain, tmp_path / "last")
    two = train(data, tmp_path / "two", "--batch", 2, world=2, hook=failing_write(6, full_disk))  # and no rank hangs
    assert "step_00000006 was not written" in two


def test_kill_in_a_save_costs_only_that_checkpoint(data, plain, tmp_path):
    hook = failing_write(9, lambda: os.kill(os.getpid(), signal.SIGKILL))
    train(data, tmp_path / "run", hook=hook, expect=-signal.SIGKILL)
    assert (tmp_path / "run/checkpoints/step_00000009.tmp").is_dir()
    assert "from step 6" in train(data, tmp_path / "run", "--resume")
    assert_equal_runs(plain, tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.tmp"))


def test_damaged_checkpoints_are_skipped_by_name(data, plain, tmp_path):
    """A cut, a changed and an absent file, an empty manifest; they do not push sound ones out of --keep_last."""
    run = tmp_path / "run"
    train(data, run, "--stop_at", 9, "--save_steps", 1)
    c = {n: run / f"checkpoints/step_{n:08d}" for n in range(1, 10)}
    os.truncate(c[9] / "unet_ema.safetensors", 1000)
    with open(c[8] / "optimizer.pt", "r+b") as f:
        f.seek(500)
        byte = f.read(1)
        f.seek(500)
        f.write(bytes([byte[0] ^ 1]))
    (c[7] / "state.json").unlink()
    (c[6] / "manifest.json").write_text("{}")
    (c[5] / "manifest.json").write_text("[]")
    text = train(data, run, "--resume", "--save_steps", 3, "--keep_last", 2)
    for n, reason in (
        (9, "unet_ema.safetensors differs"),
        (8, "optimizer.pt differs"),
        (7, "state.json"),
        (6, "lacks"),
    ):
        assert f"skipping checkpoint step_{n:08d}: " in text and reason in text
    assert "from step 4" in text
    assert_equal_runs(plain, run, settings=False)
    assert [c.name for c in sorted((run / "checkpoints").glob("step_????????"))] == ["step_00000009", "step_00000012"]
    # named ones are refused, and so is a run that has none left
    assert "not one (" in train(data, tmp_path / "new", "--resume", c[9].with_name("step_00000009.aside"), expect=2)
    for checkpoint in (run / "checkpoints").glob("step_????????"):
        (checkpoint / "model.json").unlink()
    assert "no valid checkpoint is left" in train(data, run, "--resume", expect=2)


def test_going_back_sets_later_checkpoints_aside(data, plain, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(plain, run)
    train(data, run, "--resume", run / "checkpoints/step_00000003", "--stop_at", 7, "--keep_last", 2)
    names = {c.name for c in (run / "checkpoints").iterdir()}
    assert names == {"step_00000006", "step_00000007", *(f"step_{n:08d}.aside" for n in (6, 9, 12))}
    assert "from step 7" in train(data, run, "--resume")
    assert_equal_runs(plain, run, settings=False)


def test_keep_last_and_keep_every(data, tmp_path):
    train(data, tmp_path / "run", "--save_steps", 1, "--keep_last", 2, "--keep_every", 5)
    names = [int(c.name[5:]) for c in sorted((tmp_path / "run/checkpoints").iterdir())]
    assert names == [5, 10, 11, 12]


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_nothing_is_unpickled(data, plain, tmp_path):
    """CASES 17: own checkpoints load with weights_only=True; a pickle that would touch a file does not."""
    run, marker = tmp_path / "run", tmp_path / "marker"
    shutil.copytree(plain, run)
    torch.load(last_checkpoint(run) / "optimizer.pt", weights_only=True)
    bad = run / "checkpoints/step_00000009"
    torch.save({"state": Touch(str(marker))}, bad / "optimizer.pt")
    manifest = json.loads((bad / "manifest.json").read_text())
    manifest["optimizer.pt"] = sd.files.sha256(bad / "optimizer.pt")
    (bad / "manifest.json").write_text(json.dumps(manifest))
    text = train(data, run, "--resume", bad, expect=2)
    assert "optimizer.pt" in text and not marker.exists()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(bad / "optimizer.pt", weights_only=True)
    torch.load(bad / "optimizer.pt", weights_only=False)  # the control: it would have
    assert marker.exists()


def test_checkpoint_alone_can_paint(data, tmp_path):
    train(
        data,
        tmp_path / "run",
        *TEXT,
        "--without",
        "text_encoder",
        "--tokenizer",
        data / "tokenizer",
        "--sample_steps",
        12,
    )
    moved = shutil.copytree(last_checkpoint(tmp_path / "run"), tmp_path / "moved")
    for weights in ("ema", "live"):
        model = sd.weights.read.open_model(moved, weights)
        own = safetensors.torch.load_file(moved / ("unet_ema.safetensors" if weights == "ema" else "unet.safetensors"))
        assert all(torch.equal(own[k], t) for k, t in model.unet().state_dict().items())
        assert model.vae() and model.text_encoder()
    assert not torch.equal(
        *(sd.weights.read.open_model(moved, w).text_encoder().encode(["red 1"]) for w in ("ema", "live"))
    )


# ----------------------------------------------------------------------------------------------------------------
# Signals
# ----------------------------------------------------------------------------------------------------------------


def slowly(*_):
    """A hook: steps and saves that can be hit."""
    real, real_write = sd.objective.backward, sd.checkpoints.write_checkpoint
    rebind(sd.objective, "backward", lambda *args: time.sleep(0.05) or real(*args))
    rebind(sd.checkpoints, "write_checkpoint", lambda *args: time.sleep(0.4) or real_write(*args))


def until(condition, seconds=60):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "nothing happened"
        time.sleep(0.01)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_signal_saves_and_says_how_to_go_on(first, data, plain, tmp_path):
    """A second and a third signal, in the middle of the save, change nothing."""
    out, output = tmp_path / "run", tmp_path / "out.txt"
    pid = start(flags(data, out, "--save_steps", 100), output, slowly)
    until(lambda: (out / "log.jsonl").exists() and len(rows(out)) >= 2)
    os.kill(pid, first)
    until(lambda: list(out.glob("checkpoints/*")))
    os.kill(pid, signal.SIGTERM), os.kill(pid, signal.SIGINT)
    assert status_of(pid) == 0
    text = output.read_text()
    assert sd.checkpoints.resume_problem(last_checkpoint(out)) is None and "Traceback" not in text
    step = json.loads((last_checkpoint(out) / "state.json").read_text())["step"]
    assert f"stopped after step {step} of 12; go on with:" in text and step < 12
    command = text.split("go on with:\n")[1].split("\n")[0].split()
    assert command[:2] == ["python", "SD_Train.py"]
    assert status_of(start(command[2:], output)) == 0
    assert_equal_runs(plain, out, settings=False)


def test_signal_to_one_of_two_ranks_stops_both(data, tmp_path):
    out, output = tmp_path / "run", tmp_path / "out.txt"
    pids = start_ranks(2, flags(data, out, "--save_steps", 100, "--batch", 2), output, slowly)
    until(lambda: (out / "log.jsonl").exists() and len(rows(out)) >= 2)
    os.kill(pids[1], signal.SIGTERM)
    assert [status_of(p) for p in pids] == [0, 0]
    assert sd.checkpoints.resume_problem(last_checkpoint(out)) is None and len(rows(out)) < 12


def test_resume_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["SD_Train.py"])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    argv = ["--out", "my runs/1", "--resume", "a/b", "--stop_at", "5", "--stop_at=6", "--resume=latest", "--lr", "1"]
    assert SD_Train.resume_command(argv) == "python SD_Train.py --out 'my runs/1' --lr 1 --resume"
    assert SD_Train.resume_command(["--resume", "--lr", "1"]) == "python SD_Train.py --lr 1 --resume"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert SD_Train.resume_command([]) == "torchrun --nproc_per_node=2 SD_Train.py --resume"


# ----------------------------------------------------------------------------------------------------------------
# Numbers: NaN, EMA, validation, objectives, learning rate
# ----------------------------------------------------------------------------------------------------------------


def poisoned(rank: int, steps: set[int], path: Path):
    """A hook: this rank's latents are NaN in these steps (0, 1, ...)."""

    def hook(own_rank=0):
        real = sd.data.make_batch

        def make_batch(split, order, positions, *args):
            batch = real(split, order, positions, *args)
            if own_rank == rank and int(positions[0]) // 8 in steps:
                batch.latents[0, 0, 0, 0] = math.nan
            return batch

        rebind(sd.data, "make_batch", make_batch)

    return hook


def test_nan_on_one_rank_skips_the_step_on_all(data, tmp_path):
    text = train(data, tmp_path / "run", world=2, hook=poisoned(1, {2, 3, 7}, tmp_path))
    assert "step 3 skipped" in text and "step 8 skipped" in text and "(2 in a row)" in text
    assert column(tmp_path / "run", "skipped") == [0, 0, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0]
    tensors, state = contents(last_checkpoint(tmp_path / "run"))
    assert state["ema_updates"] == 9 and state["step"] == 12
    assert all(t.isfinite().all() for t in tensors.values())
    assert {float(t) for k, t in tensors.items() if k.endswith("/step")} == {9.0}


def test_many_nan_steps_stop_with_advice(data, tmp_path):
    text = train(
        data, tmp_path / "run", "--max_skipped", 3, world=2, expect=1, hook=poisoned(0, set(range(5, 12)), tmp_path)
    )
    assert "3 steps in a row" in text and "look for NaN" in text and "Traceback" not in text
    assert contents(last_checkpoint(tmp_path / "run"))[1]["step"] <= 6


def test_how_often_one_looks_changes_nothing(data, plain, tmp_path):
    """CASES 5: validation, samples and saves at every step or never: the same losses and weights."""
    train(data, tmp_path / "often", "--val_steps", 1, "--sample_steps", 3, "--save_steps", 1)
    train(data, tmp_path / "never", "--val_steps", 0, "--save_steps", 12)
    for run in ("often", "never"):
        assert rows(tmp_path / run) == rows(plain)
        weights = contents(last_checkpoint(tmp_path / run))[0]
        weights = {k: t for k, t in weights.items() if not k.startswith("vae")}
        assert all(torch.equal(t, weights[k]) for k, t in contents(last_checkpoint(plain))[0].items())
    each = {(r["step"], r["split"], r["weights"]): r for r in rows(tmp_path / "often", "validation.jsonl")}
    assert len(each) == 12 * 4
    for row in rows(plain, "validation.jsonl"):  # fixed pictures, noise and timesteps: the same number whenever
        assert each[row["step"], row["split"], row["weights"]] == row
        assert row["loss"] == pytest.approx(np.mean([b for b in row["bins"] if b is not None]), rel=0.2)
    assert each[12, "val", "ema"]["loss"] != each[12, "val", "live"]["loss"]


def test_validation_and_samples_leave_weights_and_random_state_alone(data, tmp_path):
    """CASES 5, on the functions themselves, with dropout, which draws random numbers when it is on."""
    torch.manual_seed(0)
    config = SD_Model.UNetConfig(channels=(8, 16), attention=(False, True), num_res_blocks=1, num_heads=2,
                                 context_dim=16, norm_groups=4, dropout=0.5)  # fmt: skip
    encoder = SD_Model.TextEncoder.from_pretrained(str(data / "text_encoder"))
    net, schedule = sd.objective.Denoiser(SD_Model.UNet(config, "none"), encoder), SD_Model.NoiseSchedule()
    net.train()
    batch = sd.data.Batch(
        torch.randn(8, 4, 8, 8), torch.randn(8, 4, 8, 8), torch.arange(8) * 100, encoder.tokenize(["a"] * 8)
    )
    before, state = SD_Model.weights_hash(net), torch.get_rng_state()
    settings, place = {"dtype": "fp32", "batch": 3}, sd.device.Place(torch.device("cpu"), 0, 1, 0)
    losses = [sd.objective.validate(net, settings, [batch], lambda ids: ids, schedule, place) for _ in "ab"]
    assert losses[0] == losses[1] and losses[0]["bins"][8:] == [None, None]
    settings = {"dtype": "fp32", "weights_dtype": "fp32", "size": 64, "sample_cfg": 3.0}
    vae = sd.weights.read.load_vae(data / "vae")
    sd.painting.sample_grid(
        tmp_path / "grid.png",
        copy.deepcopy(net).eval(),
        encoder,
        vae,
        schedule,
        ["a", "b"],
        settings,
        torch.device("cpu"),
    )
    assert (tmp_path / "grid.png").exists()
    assert SD_Model.weights_hash(net) == before and torch.equal(torch.get_rng_state(), state)
    assert all(m.training for m in net.unet.modules())


def test_ema_moves_in_fp32():
    """CASES 6: 1.0 towards 1.01, decay 0.9999, 10,000 updates: 1.0063 in fp32; in bf16 it would stay. Weights in bf16,
    which are 1.0078 there, have an average in fp32 too."""
    for dtype, wanted in ((torch.float32, 1.0063), (torch.bfloat16, 1.0049)):
        ema, live = torch.full((1, 1), 1.0), torch.full((1, 1), 1.01, dtype=dtype)
        for _ in range(10_000):
            sd.optim.update_ema([ema], [live], 0.9999)
        assert ema.dtype == torch.float32 and ema.item() == pytest.approx(wanted, abs=0.0002)
    assert sd.optim.ema_decay(0.9999, 0) == 0.1 and sd.optim.ema_decay(0.9999, 10**6) == 0.9999
    assert sd.optim.ema_decay(0.9999, 90) == pytest.approx(91 / 100)


def test_ema_starts_its_warm_up_anew_in_a_new_phase(data, plain, tmp_path):
    for which in ("same", "ema", "live"):
        out = tmp_path / which
        train(
            data, out, "--init_from", plain, "--init_weights", which, "--lr", 1e-12, "--max_steps", 1, "--val_steps", 0
        )
        tensors, state = contents(last_checkpoint(out))
        start = contents(last_checkpoint(plain))[0]
        assert state["ema_updates"] == 1
        for name in ("unet", "unet_ema"):
            source = {"same": name, "ema": "unet_ema", "live": "unet"}[which]
            key = "time_embed.0.weight"
            if (which, name) != ("same", "unet_ema"):  # that one moved to live by 0.9
                assert torch.allclose(
                    tensors[f"{name}.safetensors/{key}"], start[f"{source}.safetensors/{key}"], atol=1e-7
                )


def test_null_caption_is_the_generators(data):
    """CASES 8: what a dropped caption becomes is what an empty negative prompt is."""
    encoder = SD_Model.TextEncoder.from_pretrained(str(data / "text_encoder"))
    null = encoder.tokenize([""])
    assert torch.equal(null, sd.painting.chunk_ids(encoder, ""))
    contexts, nulls = sd.painting.encode_pairs(encoder, ["red 1"], [""])
    with torch.no_grad():
        assert torch.equal(nulls[0], encoder(null)[0]) and nulls[0].abs().max() > 0


def test_latents_reach_the_unet_as_they_lie_on_disk(data, tmp_path):
    """CASES 11, the loader's side: unit variance on disk is unit variance in the network, scaled by nobody."""
    seen = tmp_path / "seen.json"

    def wrapper(real):
        def losses(net, batch, text, schedule):
            if batch.latents.requires_grad is False and torch.is_grad_enabled():
                old = json.loads(seen.read_text()) if seen.exists() else []
                seen.write_text(json.dumps(old + [float(batch.latents.var())]))
            return real(net, batch, text, schedule)

        return losses

    train(data, tmp_path / "run", hook=patched("sample_losses", wrapper))
    variances = json.loads(seen.read_text())
    assert len(variances) == 12 and np.mean(variances) == pytest.approx(1, abs=0.03)


def test_loss_weights():
    schedule = SD_Model.NoiseSchedule()
    t = torch.tensor([0, 100, 250, 999])
    snr = schedule.snr(t)
    weigh = sd.objective.loss_weight
    assert torch.allclose(
        weigh(t, schedule, {"weighting": "min_snr", "gamma": 5}), torch.tensor([0.004254, 0.59144, 1, 1]), rtol=2e-4
    )
    assert (
        weigh(t, schedule, {"weighting": "none", "gamma": 5})
        == weigh(t, schedule, {"weighting": "min_snr", "gamma": 0})
        == 1
    )
    debiased = weigh(t, schedule, {"weighting": "debiased", "gamma": 5})
    assert torch.allclose(debiased, snr**-0.5) and debiased[-1] == pytest.approx(
        1 / math.sqrt(0.004660 / (1 - 0.004660)), rel=1e-3
    )
    v = SD_Model.NoiseSchedule(prediction="v", zero_terminal_snr=True)
    weights = weigh(t, v, {"weighting": "debiased", "gamma": 5})
    assert weights.isfinite().all() and weights[-1] == 0
    # the same objective in both parametrisations: v's error is sqrt(1 + 1/SNR) times epsilon's
    v = SD_Model.NoiseSchedule(prediction="v")
    for weighting in ("debiased", "min_snr"):
        a, b = (weigh(t, s, {"weighting": weighting, "gamma": 5}) for s in (schedule, v))
        assert torch.allclose(a * snr, b * (snr + 1), rtol=1e-4)


@pytest.mark.parametrize(
    "more",
    [("--offset_noise", 0.5), ("--weighting", "debiased"), ("--gamma", 1), ("--prediction", "v")],
)
def test_flags_of_the_objective_reach_it(more, data, plain, tmp_path):
    train(data, tmp_path / "run", *more, "--max_steps", 1, "--val_steps", 0)
    assert column(tmp_path / "run", "loss")[0] != column(plain, "loss")[0]


def test_v_and_zero_terminal_snr_run(data, tmp_path):
    more = ("--prediction", "v", "--zero_terminal_snr", "--betas", "squaredcos_cap_v2", "--weighting", "debiased")
    train(data, tmp_path / "run", *more, "--sample_steps", 12)
    losses = column(tmp_path / "run", "loss")
    assert len(losses) == 12 and np.isfinite(losses).all()
    told = json.loads((last_checkpoint(tmp_path / "run") / "model.json").read_text())["schedule"]
    assert (told["prediction"], told["zero_terminal_snr"], told["betas"]) == ("v", True, "squaredcos_cap_v2")
    assert "add --prediction v" in train(data, tmp_path / "next", "--init_from", tmp_path / "run", expect=2)
    assert "wants --prediction v" in train(data, tmp_path / "next", "--zero_terminal_snr", expect=2)


def test_adaptive_clipping(data, plain, tmp_path):
    limit = sd.optim.clip_limit
    assert limit({"clip": 1.0, "adaptive_clip": 0}, 5.0) == 1.0
    assert limit({"clip": 1.0, "adaptive_clip": 3}, 0.1) == pytest.approx(0.3)
    assert limit({"clip": 1.0, "adaptive_clip": 3}, 0.0) == 1.0  # no mean yet
    assert limit({"clip": 0, "adaptive_clip": 0}, 1.0) == math.inf
    train(data, tmp_path / "run", "--adaptive_clip", 0.5, "--clip", 0)
    assert column(tmp_path / "run", "loss")[:2] == column(plain, "loss")[:2]
    assert column(tmp_path / "run", "loss")[2:] != column(plain, "loss")[2:]


def test_learning_rate_schedules():
    def at(step, **kw):
        return sd.optim.lr_at(step, 101, {"lr": 1.0, "warmup": 10, "lr_schedule": "cosine"} | kw)

    assert at(0) == pytest.approx(0.01) and at(5) == pytest.approx(0.505) and at(10) == pytest.approx(1)
    assert at(55) == pytest.approx(0.505) and at(100) == pytest.approx(0.01)
    assert at(32, lr_schedule="cosine") > at(32, lr_schedule="linear")
    assert at(55, lr_schedule="linear") == pytest.approx(0.505) and at(99, lr_schedule="constant") == 1
    assert at(0, warmup=0) == 1 and at(0, warmup=0, lr_schedule="constant") == 1


def test_weight_decay_spares_biases_and_norms(data):
    encoder = SD_Model.TextEncoder.from_pretrained(str(data / "text_encoder"))
    net = sd.objective.Denoiser(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"]), encoder)
    settings = {"text_lr": 0.1, "decay": 0.01, "lr": 1.0, "beta1": 0.8, "beta2": 0.99}
    settings |= {"optimizer": "adamw", "weights_dtype": "fp32"}
    optimizer = sd.optim.make_optimizer(net, settings)
    sd.optim.set_lr(optimizer, 0.5)
    found = {id(p): (g["weight_decay"], g["lr"], g["betas"]) for g in optimizer.param_groups for p in g["params"]}
    assert len(found) == len(list(net.parameters()))
    for name, p in net.named_parameters():
        decays = not (name.endswith("bias") or "norm" in name or p.ndim == 1)
        assert found[id(p)] == (0.01 * decays, 0.05 if "text_encoder" in name else 0.5, (0.8, 0.99)), name


def test_golden_losses(data, tmp_path):
    """20 steps of the micro network: bit for bit on the torch and processor the file names, to 1e-4 elsewhere.
    Written anew by deleting the file and running this test."""
    train(data, tmp_path / "run", "--max_steps", 20, "--zero_init", "none", "--val_steps", 10)
    found = {"torch": torch.__version__, "cpu": cpu_name(), "loss": column(tmp_path / "run", "loss"),
             "validation": [r["loss"] for r in rows(tmp_path / "run", "validation.jsonl")]}  # fmt: skip
    if not GOLDEN.exists():
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    golden = json.loads(GOLDEN.read_text())
    if (golden["torch"], golden["cpu"]) == (found["torch"], found["cpu"]):
        assert found == golden
    for name in ("loss", "validation"):
        assert np.allclose(found[name], golden[name], rtol=0, atol=1e-4)


# ----------------------------------------------------------------------------------------------------------------
# Bad input: one sentence, status 2, nothing written
# ----------------------------------------------------------------------------------------------------------------


def copied(data: Path, tmp_path: Path) -> Path:
    """A copy of the data that may be spoiled; the VAE stays where the manifest says it is."""
    return shutil.copytree(data, tmp_path / "data")


def refused(data: Path, out: Path, *more, mentions: str):
    text = train(data, out, *more, expect=2)
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and mentions in errors[0], text
    assert "Traceback" not in text and text.rstrip().endswith(errors[0])
    assert not out.exists() or not any(out.rglob("*"))


@pytest.mark.parametrize(
    ("more", "mentions"),
    [
        (("--phase", "nonsense"), "laion_broad, laion_hq"),
        (("--phase", "8"), "a number from 1 to 7"),
        (("--model", "huge"), "--model wants one of"),
        (("--device", "tpu"), "--device tpu"),
        (("--data", "nowhere"), "no manifest.json"),
        (("--init_from", "no/such/model"), "no/such/model"),
        (("--text_encoder", "no/such/encoder"), "no/such/encoder"),
        (("--sample_prompts", "no/such/file"), "--sample_prompts wants"),
        (("--resume", "no/such/checkpoint"), "--resume wants a whole checkpoint"),
        (("--vae", "no/such/vae"), "no/such/vae"),
        (("--size", "128"), "latents of 128 px were wanted"),
        (("--compress_gradients",), "--compress_gradients wants NVIDIA GPUs"),
        (("--model", "tiny"), "attends to a context 64 wide"),
        (("--lr", "nan"), "--lr wants"),
        (("--batch", "0"), "--batch wants"),
        (("--drop", "1.5"), "--drop wants"),
        (("--max_steps", "0"), "--max_steps wants"),
        (("--beta2", "1"), "--beta2 wants"),
        (("--dataset", "data"), "--dataset and --latents"),
        (("--data", "things:2,few"), "weights for all sources or for none"),
        (
            ("--train_text_encoder", "--tokenizer", "no/such/tokenizer", "--without", "text_encoder"),
            "no/such/tokenizer",
        ),
    ],
)
def test_bad_flags(more, mentions, data, tmp_path):
    refused(data, tmp_path / "run", *more, mentions=mentions)


def test_too_short_a_run(data, tmp_path):
    refused(data, tmp_path / "run", "--without", "max_steps", "--epochs", 0.01, mentions="make no step")


def test_vae_of_other_latents(data, tmp_path):
    torch.manual_seed(1)
    sd.weights.parts.save_vae(SD_Model.VAE(SD_Model.PRESETS["micro"]["vae"]), tmp_path / "other")
    refused(data, tmp_path / "run", "--vae", tmp_path / "other", mentions="made with another VAE")
    refused(data, tmp_path / "run", "--vae", tmp_path / "other", "--sample_steps", 5, mentions="made with another VAE")


def test_latents_of_another_vae_than_the_parents(data, plain, tmp_path):
    spoiled = copied(data, tmp_path)
    path = spoiled / "things/latents/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["vae"]["hash"] = "0" * 64
    path.write_text(json.dumps(manifest))
    refused(spoiled, tmp_path / "run", "--init_from", plain, mentions="another VAE")
    refused(spoiled, tmp_path / "run", "--data", "things,few", mentions="different VAEs")
    run = shutil.copytree(plain, tmp_path / "resumed")
    assert "data changed since the checkpoint (things/latents)" in train(spoiled, run, "--resume", expect=2)


@pytest.mark.parametrize(
    ("folder", "changes", "mentions"),
    [
        ("latents", {"scaled": False}, "scaled latents were wanted"),
        ("latents", {"count": 51}, "tells of 51 latents, and 50 are there"),
        ("latents", {"latent_shape": [4, 16, 16]}, "encode them again"),
        ("dataset", {"counts": {"train": 43, "val": 8}}, "43 train rows, and 42 are there"),
        ("dataset", {"tokenizer_hash": "0"}, "another tokenizer"),
    ],
)
def test_lying_manifests(folder, changes, mentions, data, tmp_path):
    spoiled = copied(data, tmp_path)
    path = spoiled / "things" / folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(spoiled, tmp_path / "run", mentions=mentions)


def test_tokenizer_of_another_vocabulary(data, tmp_path):
    micro.make_tokenizer(words=3).save_pretrained(tmp_path / "other")
    more = ("--train_text_encoder", "--tokenizer", tmp_path / "other", "--without", "text_encoder")
    refused(data, tmp_path / "run", *more, mentions="another tokenizer")


def test_folder_that_cannot_be_written(data, tmp_path):
    (tmp_path / "file").write_text("")
    refused(data, tmp_path / "file/run", mentions="--out wants a folder that can be written")


def test_folder_in_use(data, plain, tmp_path):
    before = sorted(p.name for p in plain.rglob("*"))
    assert "holds a run already: add --resume" in train(data, plain, expect=2)
    text = train(data, tmp_path / "run", "--resume", plain, "--max_steps", 13)  # elsewhere is a fork of the run
    assert "from step 12" in text
    assert "holds another run" in train(data, tmp_path / "run", "--resume", plain, expect=2)
    assert sorted(p.name for p in plain.rglob("*")) == before


def test_two_trainings_in_one_folder(data, tmp_path):
    out = tmp_path / "run"
    pid = start(flags(data, out, "--max_steps", 400), tmp_path / "first.txt", slowly)
    until(lambda: (out / "log.jsonl").exists())
    assert "another process is training in" in train(data, out, "--resume", expect=2)
    os.kill(pid, signal.SIGTERM)
    assert status_of(pid) == 0


def test_preset_changed_since(data, plain, tmp_path):
    run = shutil.copytree(plain, tmp_path / "run")
    checkpoint = last_checkpoint(run)
    model = json.loads((checkpoint / "model.json").read_text())
    model["unet"]["num_heads"] = 4
    (checkpoint / "model.json").write_text(json.dumps(model))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["model.json"] = sd.files.sha256(checkpoint / "model.json")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert "and the preset is now" in train(data, run, "--resume", expect=2)


def test_cut_latents_are_survived_by_all_ranks(data, tmp_path):
    """CASES 24: skipped, counted, and the ranks agree on the number of steps."""
    spoiled = copied(data, tmp_path)
    os.truncate(spoiled / "things/latents/00001.npy", 100)
    os.truncate(spoiled / "few/latents/00000.npy", 0)
    text = train(
        spoiled,
        tmp_path / "run",
        "--data",
        "things,few",
        "--batch",
        2,
        "--without",
        "max_steps",
        "--epochs",
        2,
        world=2,
    )
    assert "2 unreadable latent files" in text and "done: " in text


# ----------------------------------------------------------------------------------------------------------------
# Log, plan, lineage
# ----------------------------------------------------------------------------------------------------------------


def test_log_lines_have_what_others_rely_on(plain):
    for row in map(json.loads, (plain / "log.jsonl").read_text().splitlines()):
        assert {"step", "images", "epoch", "loss", "lr", "grad_norm", "images_per_s", "bins", "seen"} <= row.keys()
    row = rows(plain)[0]
    assert len(row["bins"]) == 10 and row["epoch"] == pytest.approx(4 / 42)
    assert json.loads((plain / "config.json").read_text())["lr"] == 1e-3
    assert (plain / "curves.png").stat().st_size > 10_000
    state = json.loads((last_checkpoint(plain) / "state.json").read_text())
    assert state["settings"]["batch"] == 4 and state["lineage"][-1]["images"] == 48 and state["data"]


def test_loss_is_the_mean_over_samples(data, tmp_path):
    """A line of the log over five steps is the mean of five lines of one."""
    train(data, tmp_path / "five", "--log_steps", 4)
    train(data, tmp_path / "one")
    one = np.array(column(tmp_path / "one", "loss")).reshape(3, 4).mean(axis=1)
    assert np.allclose(column(tmp_path / "five", "loss"), one, rtol=1e-6)


def test_log_waits_for_room(tmp_path, monkeypatch, capsys):
    log = sd.log.Log(tmp_path, {"wandb": "disabled"}, 0)
    log.write("log.jsonl", {"step": 1})
    monkeypatch.setattr(os, "ftruncate", os.ftruncate)
    real = open

    class Full:
        """A file on a disk with room for three bytes."""

        def __init__(self, *args):
            self.file = real(*args)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def write(self, data):
            self.file.write(data[:3])
            self.file.flush()
            full_disk()

    monkeypatch.setattr(sd.log, "open", Full, raising=False)
    log.write("log.jsonl", {"step": 2})
    log.write("log.jsonl", {"step": 3})
    assert rows(tmp_path) == [{"step": 1}] and capsys.readouterr().err.count("cannot be written") == 1
    monkeypatch.setattr(sd.log, "open", real)
    log.write("log.jsonl", {"step": 4})
    assert rows(tmp_path) == [{"step": n} for n in (1, 2, 3, 4)]


def test_wandb_that_fails_stops_nothing(data, plain, tmp_path):
    """It cannot be started; or it fails later, at a picture."""
    for name, code in (("start", "def init(**k): raise RuntimeError('no server')\nSettings = dict"),
                       ("later", "class Run:\n def log(self, *a, **k): raise RuntimeError('gone')\n def finish(self): "
                                 "raise RuntimeError\ndef init(**k): return Run()\nSettings = dict")):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "wandb.py").write_text(code)

        def hook(name=name):
            sys.modules.pop("wandb", None)
            sys.path.insert(0, str(tmp_path / name))

        text = train(data, tmp_path / f"run_{name}", "--wandb", "offline", hook=hook)
        assert text.count("wandb is off") == 1
        assert rows(tmp_path / f"run_{name}") == rows(plain)


def test_dry_run_plans_and_writes_no_run(data, tmp_path):
    text = train(data, tmp_path / "run", "--dry_run", "--keep_last", 2, "--keep_every", 6)
    assert "12 steps of 4 images, 1.14 epochs of 42" in text and '"lr": 0.001' in text
    assert "4 checkpoints" in text and "3 kept at the end" in text
    assert not (tmp_path / "run").exists() and (tmp_path / "run_lr.png").stat().st_size > 5000


@pytest.mark.parametrize("kernels", [False, True])
@pytest.mark.parametrize("grad_checkpoint", ["none", "resblocks", "all"])
def test_activations_are_counted(grad_checkpoint, kernels):
    """The fake forward keeps what a real one keeps; without checkpointing, hooks see all of it."""
    if kernels and sd.kernels.triton is None:
        pytest.skip("Triton is not installed")
    settings = {"model": "micro", "size": 64, "dtype": "fp32", "kernels": kernels, "grad_checkpoint": grad_checkpoint}
    settings |= {"accumulate": 1, "weights_dtype": "fp32"}
    (one, _), (two, _), (four, block) = (sd.plan.activation_bytes(settings, n, torch.device("cpu")) for n in (1, 2, 4))
    assert four - two == 2 * (two - one) > 0
    net, kept, storages = SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"]), [], {}
    net = sd.fused.apply(net) if kernels else net
    own = {p.untyped_storage().data_ptr() for p in net.parameters()}

    def count(t):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
        net(torch.zeros(4, 4, 8, 8), torch.zeros(4), torch.zeros(4, SD_Model.TextEncoder.MAX_LENGTH, 16))
    real = sum(n for p, n in storages.items() if p not in own)
    assert 0.05 * real < block < 0.6 * real
    if grad_checkpoint == "none":
        assert four == pytest.approx(real, rel=0.02)
    else:
        assert 0.2 * real < four < 0.95 * real


@pytest.mark.skipif(sd.kernels.triton is None, reason="Triton is not installed")
@pytest.mark.parametrize("more", [{}, {"accumulate": 2}, {"compress_gradients": True}, {"peer_copies": False}])
def test_memory_of_shared_gradients_is_estimated(more):
    """What two processes' buckets take, without the bf16 copies, which they would hold anyway."""
    settings = SD_Train.resolve(SD_Train.parse_args(["--phase", "demo", "--model", "micro", "--batch", "1"]), None)
    settings |= {"kernels": True, "dtype": "bf16", "accumulate": 1, **more}

    def rank(r):
        copying()
        sd.parallel.PeerCopies.BLOCK = 16
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        net = sd.fused.apply(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"], "none"))
        denoiser = sd.objective.Denoiser(net, None)
        update = sd.step.Update(
            sd.optim.make_optimizer(denoiser, settings), denoiser, copy.deepcopy(denoiser), settings, 2
        )
        with torch.autocast("cpu", torch.bfloat16):
            out = net(torch.randn(1, 4, 8, 8), torch.zeros(1), torch.zeros(1, SD_Model.TextEncoder.MAX_LENGTH, 16))
        out.float().sum().backward()
        update.shared.finish()
        storages = {}
        for b in update.shared.buckets:
            for memory in (b.flat, b.sums, *(p.copy_bf16 for p in b.parameters if b.split)):
                storages[memory.untyped_storage().data_ptr()] = memory.untyped_storage().nbytes()
        copies = sum(2 * p.numel() for b in update.shared.buckets if b.split for p in b.parameters)
        estimate = sd.plan.memory_estimate(settings, denoiser, None, torch.device("cpu"))["gradients sent"]
        return pickle.dumps((sum(storages.values()) - copies, estimate))

    real, estimate = pickle.load(io.BytesIO(micro.fork_ranks(rank)))
    assert estimate == pytest.approx(real, rel=0.02)


def test_memory_of_shared_gradients_is_enough_for_nccl(monkeypatch):
    settings = SD_Train.resolve(SD_Train.parse_args(["--phase", "demo", "--model", "micro"]), None)
    denoiser = sd.objective.Denoiser(sd.fused.apply(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"])), None)
    monkeypatch.setenv("WORLD_SIZE", "8"), monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    settings |= {"kernels": True, "dtype": "bf16", "accumulate": 1}
    estimate = sd.plan.memory_estimate(settings, denoiser, None, torch.device("cpu"))["gradients sent"]
    assert estimate == 4 * SD_Model.count_parameters(denoiser)[1]


@pytest.mark.parametrize("free,wanted", [(80, "none"), (47, "resblocks"), (30, "all"), (10, "all")])
def test_auto_recomputes_as_little_as_fits(free, wanted, monkeypatch):
    peaks = {"none": 40 << 30, "resblocks": 38 << 30, "all": 20 << 30}
    monkeypatch.setattr(sd.plan, "memory_estimate", lambda settings, *_: {"peak": peaks[settings["grad_checkpoint"]]})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free << 30, 80 << 30))
    said = []
    cuda = torch.device("cuda")
    assert sd.plan.choose_grad_checkpoint({"grad_checkpoint": "auto"}, None, None, cuda, said.append) == wanted
    assert f"auto: {wanted}" in said[0]
    assert sd.plan.choose_grad_checkpoint({"grad_checkpoint": "all"}, None, None, cuda, said.append) == "all"
    assert sd.plan.choose_grad_checkpoint({"grad_checkpoint": "auto"}, None, None, torch.device("cpu"), print) == "none"


def test_lineage_can_be_printed(data, plain, tmp_path, capsys):
    train(data, tmp_path / "second", "--init_from", plain, "--phase", "openmoji", "--data", "few", "--max_steps", 5)
    SD_Convert.main([str(tmp_path / "second"), str(tmp_path / "model.safetensors"), "--format", "ldm"])
    capsys.readouterr()
    for model in (tmp_path / "second", last_checkpoint(tmp_path / "second"), tmp_path / "model.safetensors"):
        SD_Run.main(["--lineage", str(model)])
        text = capsys.readouterr().out
        parent = SD_Model.weights_hash(sd.weights.read.open_model(plain, "ema").unet())
        assert f"1. demo, 48 images, EMA weights {parent[:16]}" in text and "2. openmoji, 20 images" in text
        assert "things/latents  manifest" in text and "few/dataset  manifest" in text
    SD_Run.main(["--plot", str(plain)])
    with pytest.raises(sd.errors.InputError, match="no log.jsonl"):
        SD_Run.main(["--plot", str(tmp_path)])


def waiting(forward=0.0, backward=0.0, sharing=0.0, update=0.0, loader=0.0):
    """A hook: these parts of a training step take so many seconds more."""

    def later(owner, name, seconds):
        function = getattr(owner, name)

        def waited(*args, **kwargs):
            time.sleep(seconds(*args) if callable(seconds) else seconds)
            return function(*args, **kwargs)

        rebind(owner, name, waited) if isinstance(owner, types.ModuleType) else setattr(owner, name, waited)

    def hook(*_):
        later(sd.objective.Denoiser, "forward", forward)
        later(torch.Tensor, "backward", backward)
        later(sd.step, "averaging", lambda model, last: sharing * last)
        later(sd.step.Update, "__call__", update)
        later(sd.data, "make_batch", loader)

    return hook


def test_benchmark_finds_what_takes_the_time(data, tmp_path):
    def row(*more, hook=None, world=1):
        text = train(data, tmp_path / "run", "--benchmark", 3, *more, hook=hook, world=world)
        assert not (tmp_path / "run").exists()
        return json.loads(text.splitlines()[-1])

    names = ("forward_ms", "backward_ms", "optimizer_ms", "forward_backward_ms")
    usual, slow = (row("--batch", 2, "--accumulate", 2, hook=h) for h in (None, waiting(0.05, 0.1, 0, 0.15)))
    assert {k: usual[k] for k in ("data", "batch", "accumulate", "processes", "steps", "graphs", "sharing_ms")} == {
        "data": "loader", "batch": 2, "accumulate": 2, "processes": 1, "steps": 3, "graphs": False, "sharing_ms": None,
    }  # fmt: skip
    for found in (usual, slow):
        assert found["images_per_s"] == pytest.approx(4e3 / found["ms_per_step"], rel=0.01)
        assert 0.8 < (found["forward_backward_ms"] + found["optimizer_ms"]) / found["ms_per_step"] < 1.01
    for name, seconds in zip(names, (0.05, 0.1, 0.15, 2 * 0.15)):
        assert 0.9 * seconds < (slow[name] - usual[name]) / 1e3 < seconds + 0.045, name
    assert row("--batch", 2, hook=waiting(loader=0.1))["data_wait_ms"] > usual["data_wait_ms"] + 50
    two = row("--batch", 2, world=2, hook=waiting(sharing=0.1))
    assert two["processes"] == 2 and 80 < two["sharing_ms"] < 160 and two["forward_ms"] < 80
    assert two["images_per_s"] == pytest.approx(4e3 / two["ms_per_step"], rel=0.01)
    synthetic = row("--without", "data_root", "--without", "data", "--without", "text_encoder")
    assert synthetic["data"] == "synthetic" and synthetic["data_wait_ms"] < 5

    traced = row("--batch", 2, "--trace", tmp_path / "trace.json", hook=waiting(loader=0.1))
    trace = json.loads((tmp_path / "trace.json").read_text())
    updates = [e for e in trace["traceEvents"] if e.get("name", "").startswith("Optimizer.step#")]
    assert trace["steps"] == len(updates) == sd.speed.TRACED
    assert traced["data_wait_ms"] < 150  # of the timed steps alone
    for wrong, found in (
        (["--trace", "x"], "give that flag too"),
        (["--benchmark", 1, "--trace", "no/x"], "found no/x"),
    ):
        assert found in train(data, tmp_path / "run", *wrong, expect=2)


def test_kinds_of_kernels_in_a_trace(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(Path(SD_Train.__file__).parent / "benchmarks"))
    import trace_kinds

    kinds = {
        "void cudnn::ops::nchwToNhwcKernel<__nv_bfloat16, __nv_bfloat16, float, false, true>": "layout",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x64x64_4x1x1": "attention",
        "sm90_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128x128x64": "convolutions",
        "sm80_xmma_wgrad_implicit_gemm_indexed_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_tilesize128": "convolutions",
        "void cudnn::fusion::compute_dot_do_o<true>(void const*, void const*, void*, void*, unsigned": "attention",
        "void cudnn::fusion::convert_dq_to_16bits<true>(void const*, void*, unsigned int, unsigned": "attention",
        "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNT": "products",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<at::native::direct_copy_kernel_cuda>>":
            "strided copies",
        "void at::native::vectorized_elementwise_kernel<4, at::native::direct_copy_kernel_cuda(at::TensorIt)>": "other",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "sharing",
        "_adamw": "optimizer", "_gn_apply": "GroupNorm", "_ln_backward": "LayerNorm", "_geglu_forward": "GEGLU",
        "_geglu_product": "products", "_add_bias": "residuals, biases, packing",
    }  # fmt: skip
    assert {name: trace_kinds.kind_of(name) for name in kinds} == kinds
    sources = Path(SD_Train.__file__).parent.glob("sd/*.py")
    launched = {name for p in sources for name in re.findall(r"launch\(\s*kernels\.(_\w+)", p.read_text())}
    assert len(launched) > 10 and "other" not in map(trace_kinds.kind_of, launched)

    names, trace = list(kinds)[:3], tmp_path / "trace.json"
    events = [{"cat": "kernel", "name": n, "ts": 4000 * i, "dur": 3000} for i, n in enumerate(names)]
    events += [{"cat": "gpu_memcpy", "name": "Memcpy DtoD", "ts": 2000, "dur": 1500}]  # half of it beside a kernel
    events += [{"cat": "cpu_op", "name": "aten::conv2d", "ts": 0, "dur": 99999}]
    trace.write_text(json.dumps({"steps": 2, "traceEvents": events}))
    trace_kinds.main([str(trace)])
    *lines, last = capsys.readouterr().out.splitlines()
    row = json.loads(last)
    assert len(lines) == 4 and (row["ms_per_step"], row["idle_ms"]) == (5.5, 0.75)
    assert row["kinds"]["attention"] == {"ms": 1.5, "kernels": 0.5} and row["kinds"]["copies"]["ms"] == 0.75
    assert row["layout"] == names[:1]
    trace.write_text(json.dumps({"steps": 2, "traceEvents": events[-1:]}))
    with pytest.raises(sd.errors.InputError, match="no kernels of a GPU"):
        trace_kinds.main([str(trace)])
    trace.write_text("{}")
    with pytest.raises(sd.errors.InputError, match="is no trace from SD_Train.py"):
        trace_kinds.main([str(trace)])


@pytest.mark.skipif(sd.kernels.triton is None, reason="Triton is not installed")
def test_benchmark_of_ranks_that_copy_gradients(data, tmp_path):
    def hook(*_):
        copying()
        rebind(sd.speed, "PASSES", 1)

    more = ("--benchmark", 1, "--batch", 1, "--kernels", "--dtype", "bf16")
    row = json.loads(train(data, tmp_path / "run", *more, world=2, hook=hook).splitlines()[-1])
    assert row["gradients_by"] == "PeerCopies" and row["kernels"] and min(row["forward_ms"], row["backward_ms"]) > 0


def test_loss_benchmark_tells_rounding_from_other_training(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(SD_Train.__file__).parent / "benchmarks"))
    import loss_bench

    def pairs(*more):
        flags = ["--model", "micro", "--size", "64", "--steps", "12", "--batch", "4", "--pictures", "8", "--splits"]
        loss_bench.main([*flags, "1", "2", "--dtype", "fp32", "--device", "cpu", "--lr", "1e-3", *more])
        return {tuple(row["runs"]): row for row in json.loads(capsys.readouterr().out.splitlines()[-1])["pairs"]}

    def pair():
        return next(iter(pairs().values()))

    same, backward = pair(), sd.objective.backward
    exact = [row["all"] for runs, row in pairs("--dtype", "bf16").items() if runs[1] == "plain, fp32"]
    assert len(exact) == 2 and min(exact) > 3 * same["all"]  # bf16 rounds more than fp32 in another order
    assert same["all"] < 1e-5 and max(same["quarters"]) < 1e-5 and 0 < same["weights"] < 1e-3

    def weighted_otherwise(net, batch, text, schedule, settings, share):
        return backward(net, batch, text, schedule, settings | {"gamma": 1.0 if share == 1 else 5.0}, share)

    rebind(sd.objective, "backward", weighted_otherwise, monkeypatch.setattr)
    other = pair()
    assert other["all"] > 1e-3 and min(other["quarters"][1:]) > 1e-3 and other["weights"] > 0.01
    assert sum(other["quarters"]) / 4 == pytest.approx(other["all"], rel=1e-5)
    with pytest.raises(
        sd.errors.InputError, match="--batch 4 must be divisible by the numbers of micro-batches, found 3"
    ):
        loss_bench.main(["--batch", "4", "--splits", "1", "3"])


def test_benchmarks_race_by_turns(monkeypatch, capfd):
    monkeypatch.syspath_prepend(str(Path(SD_Train.__file__).parent / "benchmarks"))
    import train_bench

    def side(rate, **more):
        row = {"rate": rate, "card": "a card", **more}
        return [sys.executable, "-c", f"print('warming up'); print({json.dumps(json.dumps(row))})"]

    train_bench.race(side(30.0, peak_GiB=2.0), side(20.0, peak_GiB=3.0), 2, "rate", size=512)
    lines = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ours", "peer", "ours", "peer", "ours"]
    assert json.loads(lines[-1]) == {
        "size": 512, "card": "a card", "ours_rate": 30.0, "peer_rate": 20.0, "ours_peak_GiB": 2.0, "peer_peak_GiB": 3.0,
        "ratio": 1.5,
    }  # fmt: skip
    with pytest.raises(SystemExit, match="ended with status 3"):
        train_bench.race(side(1.0), [sys.executable, "-c", "raise SystemExit(3)"], 1, "rate")


@pytest.mark.parametrize(
    "script, flags",
    [
        ("train_bench", ["--peer", "checkpointed", "--steps", "30", "--", "--grad_checkpoint", "all"]),
        ("sample_bench", ["--pictures", "1", "--mode", "reduce-overhead"]),
        ("encode_bench", ["--size", "256"]),
    ],
)
def test_benchmark_scripts_race_their_own_two_sides(script, flags, monkeypatch, capsys):
    """Everything of each but the two sides' own work: their processes' commands are understood, their numbers found."""
    monkeypatch.syspath_prepend(str(Path(SD_Train.__file__).parent / "benchmarks"))
    import train_bench

    module = importlib.import_module(script)
    rate = {"train_bench": "images_per_s", "sample_bench": "evaluations_per_s", "encode_bench": "img_per_s"}[script]
    rows = {side: {rate: r, "card": "a card", "peak_GiB": r} for side, r in (("ours", 3.0), ("peer", 2.0))}

    def process(command):
        if command[1] == "SD_Train.py":
            args = SD_Train.parse_args(command[2:])
            assert (args.benchmark, args.batch, args.grad_checkpoint) == (30, 128, "all")
            return rows["ours"]
        monkeypatch.setattr(sys, "argv", command[1:])
        module.main()
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    for m in (train_bench, module):
        monkeypatch.setattr(m, "want_gpu", lambda: None)
        monkeypatch.setattr(m, "tune", lambda: None)
    for side in rows if script != "train_bench" else ():
        monkeypatch.setattr(module, side, lambda *_, side=side: rows[side])
    monkeypatch.setattr(train_bench, "peer_step", lambda size, batch, how: how)
    monkeypatch.setattr(train_bench, "time_peer", lambda step, batch, steps: rows["peer"])
    monkeypatch.setattr(train_bench, "last_json", process)
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *flags])
    module.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["ratio"] == 1.5 and last[f"ours_{rate}"] == 3.0 and last[f"peer_{rate}"] == 2.0
