"""--shard: each process keeps a part of the optimizer's state and of the average; nothing else changes by it. Processes
are forked and share gradients by gloo; where fused kernels run, through Triton's interpreter."""

import json
import pickle
import shutil
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro
from binding import rebind
from micro import differences, flags, start, start_ranks, status_of

import sd.checkpoints
import sd.fused
import sd.objective
import sd.optim
import sd.plan
import sd.setup
import sd.sharding
import sd.step
import SD_Model
import SD_Train
from sd.device import Place
from sd.errors import InputError

CPU = torch.device("cpu")
TEXT = ("--train_text_encoder", "--zero_init", "none", "--text_lr", 0.5)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    return micro.make_data(tmp_path_factory.mktemp("micro") / "data", {"things": 42})


def small_units():
    """So that the network of the tests, of some thousand weights, is cut within tensors, in several rounds."""
    rebind(sd.sharding, "UNIT", 256)
    rebind(sd.sharding, "ROUND", 3000)


def train(data: Path, out: Path, *more, world=1, hook=None, expect=0) -> str:
    """To the end, in so many processes; returns what they printed."""
    output = out.parent / f"{out.name}.txt"
    output.unlink(missing_ok=True)
    argv = flags(data, out, *more)

    def both(*_):
        small_units()
        if hook:
            hook()

    pids = start_ranks(world, argv, output, both) if world > 1 else [start(argv, output, both)]
    found = [status_of(pid) for pid in pids]
    text = output.read_text()
    assert all(status == expect for status in found), (found, text[-3000:])
    return text


# ----------------------------------------------------------------------------------------------------------------
# Where it is cut
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 8, 128])
def test_parts_are_nearly_equal_and_cut_at_whole_units(world):
    """Sizes as sd15 has them: no part is more than a unit or two from its share, and within a tensor cuts are at
    multiples of 4,096 from its beginning, at least that far from its end, so that 8-bit blocks are not cut."""
    sizes = [320, 11520, 29_491_200, 5, 4096, 8191, 38_000_001, 1280, 3_686_400] * 3
    ends, starts = sd.sharding.cuts(sizes, world), [sum(sizes[:i]) for i in range(len(sizes))]
    assert len(ends) == world + 1 and ends[0] == 0 and ends[-1] == sum(sizes)
    for k, end in enumerate(ends[1:-1], 1):
        assert abs(end - sum(sizes) * k / world) <= 2 * sd.sharding.UNIT
        start, size = next((s, n) for s, n in zip(starts, sizes) if s <= end < s + n)
        within = end - start
        assert within == 0 or (within % 4096 == 0 and size - within >= 4096)


def test_a_part_for_each_or_a_sentence():
    weights = [torch.nn.Parameter(torch.zeros(10))]
    with pytest.raises(InputError, match="part for each of 2 processes"):
        sd.sharding.Shard(torch.optim.AdamW(weights), {}, Place(CPU, 0, 2, 0))


# ----------------------------------------------------------------------------------------------------------------
# Whole runs
# ----------------------------------------------------------------------------------------------------------------

CASES = {
    "adamw": (),
    "text encoder": TEXT,
    "channels_last, clipping, accumulation": ("--channels_last", "--clip", 0.05, "--accumulate", 2, "--batch", 1),
    "adamw8bit": ("--optimizer", "adamw8bit", "--channels_last"),
    "lion": ("--optimizer", "lion"),
    "sgd": ("--optimizer", "sgd", "--lr", 1e-2),
    "no average": ("--no_ema", "--without", "ema"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_run_is_the_same_to_the_bit(name, data, tmp_path):
    """Weights, average, moments, losses, validation of both, after steps of which one is skipped."""
    more = ("--max_steps", 6, "--batch", 2, "--val_steps", 3, *CASES[name])

    def hook():  # the third step's losses are NaN, in all processes
        real, calls = sd.objective.backward, iter(range(100))
        bad = (4, 5) if "accumulation" in name else (2,)

        def backward(net, batch, *rest):
            if next(calls) in bad:
                batch = batch._replace(latents=batch.latents * float("nan"))
            return real(net, batch, *rest)

        rebind(sd.objective, "backward", backward)

    train(data, tmp_path / "whole", *more, world=2, hook=hook)
    text = train(data, tmp_path / "cut", *more, "--shard", world=2, hook=hook)
    assert "shard: each of 2 processes" in text and "not finite" in text
    assert differences(tmp_path / "whole", tmp_path / "cut", settings=False) == []
    saved = json.loads((micro.checkpoints(tmp_path / "cut")[-1] / "state.json").read_text())
    assert saved["settings"]["shard"] is True and saved["settings"]["channels_last"] == ("--channels_last" in more)


GO_ON = ("--max_steps", 8, "--save_steps", 4, "--val_steps", 4)


@pytest.fixture(scope="module")
def stopped(data, tmp_path_factory) -> Path:
    """Runs of two processes, whole and cut, that stopped at step 4."""
    folder = tmp_path_factory.mktemp("stopped")
    for name, flag in (("whole", ()), ("cut", ("--shard",))):
        train(data, folder / name, *GO_ON, "--batch", 6, "--stop_at", 4, *flag, world=2)
    assert differences(folder / "whole", folder / "cut", settings=False) == []
    return folder


@pytest.mark.parametrize("world, cut", [(1, True), (2, False), (3, True)])
def test_it_goes_on_in_other_numbers_of_processes(world, cut, data, stopped, tmp_path):
    """From the checkpoint of two processes with --shard: bit for bit as from that of two without."""
    more = GO_ON
    for name in ("whole", "cut"):
        shutil.copytree(stopped / name, tmp_path / name)
    batch = ("--batch", 12 // world)
    train(data, tmp_path / "whole", *more, *batch, "--resume", world=world)
    train(data, tmp_path / "cut", *more, *batch, "--resume", "--shard" if cut else "--no_shard", world=world)
    assert differences(tmp_path / "whole", tmp_path / "cut", settings=False) == []


def test_the_same_of_8_bit_moments_in_another_layout(data, tmp_path):
    """Blocks follow the memory of the whole tensor; where that changes at --resume, so do they, before they are cut."""
    more = ("--max_steps", 4, "--batch", 2, "--optimizer", "adamw8bit")
    for name, flag in (("whole", ()), ("cut", ("--shard",))):
        train(data, tmp_path / name, *more, "--stop_at", 2, "--channels_last", *flag, world=2)
        train(data, tmp_path / name, *more, "--contiguous", "--resume", world=2)
    assert differences(tmp_path / "whole", tmp_path / "cut", settings=False) == []


def test_the_first_process_paints_with_the_whole_average(data, tmp_path):
    """Only it paints, while the others go on: no process waits for another in a step that paints, validates or not."""
    for name, flag in (("whole", ()), ("cut", ("--shard",))):
        train(data, tmp_path / name, "--max_steps", 4, "--batch", 2, "--val_steps", 4, "--sample_steps", 2, "--vae",
              data / "vae", *flag, world=2)  # fmt: skip
    grids = [sorted((tmp_path / name / "samples").glob("*.png")) for name in ("whole", "cut")]
    assert [len(g) for g in grids] == [2, 2]
    assert [p.read_bytes() for p in grids[0]] == [p.read_bytes() for p in grids[1]]


# ----------------------------------------------------------------------------------------------------------------
# What is held
# ----------------------------------------------------------------------------------------------------------------


def settings_of(*more) -> dict:
    argv = ["--phase", "demo", "--model", "micro", "--device", "cpu", *map(str, more)]
    return SD_Train.for_device(SD_Train.resolve(SD_Train.parse_args(argv), None), CPU)


def storages(tensors) -> int:
    """Bytes of all memory that these keep alive."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def made(settings: dict, place: Place | None):
    """A Denoiser, its average's module, its Update, and its Shard if there is a place."""
    torch.manual_seed(0)
    denoiser = sd.objective.Denoiser(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"], "none"), None)
    ema = sd.setup.average_of(denoiser)
    memory = sd.setup.memory_format(settings)
    denoiser.to(memory_format=memory), ema.to(memory_format=memory)
    optimizer, shard = sd.optim.make_optimizer(denoiser, settings), None
    if place:
        shard = sd.sharding.Shard(optimizer, sd.setup.averages_of(denoiser, ema), place)
    return denoiser, ema, sd.step.Update(optimizer, denoiser, ema, settings, 2 if place else 1, shard), shard


def backward(denoiser):
    torch.manual_seed(0)
    denoiser(torch.randn(2, 4, 8, 8), torch.zeros(2), torch.randn(2, micro.LENGTH, 16)).square().sum().backward()


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "lion"])
def test_each_process_holds_its_part_alone(optimizer):
    """Bytes of memory that moments and averages keep alive, the whole tensors they were cut from included; also after
    the average was whole for a validation, and as --dry_run tells."""
    settings = settings_of("--optimizer", optimizer, "--shard", "--channels_last")

    def rank(r):
        small_units()
        denoiser, ema, update, shard = made(settings, Place(CPU, r, 2, r))
        backward(denoiser)
        update(1e-3, 1.0, 0.9)
        update.complete(True)
        whole = storages(ema.parameters())
        update.shown()
        states = [x for s in update.optimizer.state.values() for x in s.values() if x.ndim]
        held = [storages(states), storages([*update.averages, *ema.parameters()])]
        return pickle.dumps((held, whole, [p.untyped_storage().data_ptr() for p in shard.pieces.values()],
                             [p.untyped_storage().data_ptr() for p in denoiser.parameters()]))  # fmt: skip

    shown = BytesIO(micro.fork_ranks(rank))
    denoiser, ema, update, _ = made(settings, None)
    backward(denoiser)
    update(1e-3, 1.0, 0.9)
    states = [x for s in update.optimizer.state.values() for x in s.values() if x.ndim]
    all_held = [storages(states), storages(ema.parameters())]
    found = [pickle.load(shown) for _ in range(2)]
    for held, whole, pieces, weights in found:
        assert set(pieces) <= set(weights)  # views
        assert whole == all_held[1]
        for own, together in zip(held, all_held):
            assert 0.45 * together < own < 0.55 * together
    assert [sum(h) for h in zip(*(held for held, *_ in found))] == pytest.approx(all_held, rel=0.01)


class Kept:
    """What gather() needs of a RunFolder."""

    saver = SimpleNamespace(wait=lambda: None)

    @staticmethod
    def to_host(value, name):
        return value.clone()


def test_state_is_cut_and_put_together_again_bit_for_bit():
    """8-bit moments whose tensor is cut between its blocks, and averages with zeros of both signs and NaN of odd bits;
    and what lies otherwise than its weight is cut as the weight is."""

    def rank(r):
        small_units()
        torch.manual_seed(0)
        net = Two()
        ema = sd.setup.average_of(net)
        optimizer = sd.optim.make_optimizer(net, settings_of("--optimizer", "adamw8bit"))
        for state in optimizer.state.values():
            for x in state.values():
                x.copy_(torch.randint(0, 256, x.shape) if x.dtype == torch.uint8 else torch.randn(x.shape))
        for p in ema.parameters():
            bits = torch.randint(-(2**31), 2**31, p.shape, dtype=torch.int32)
            p.data.copy_(torch.where(bits % 3 == 0, -0.0, bits.view(torch.float32)))
        number = [p for group in optimizer.param_groups for p in group["params"]]
        whole = [{k: x.clone() for k, x in optimizer.state[p].items()} for p in number]
        wanted = {p: average.detach().clone() for p, average in sd.setup.averages_of(net, ema).items()}
        shard = sd.sharding.Shard(optimizer, sd.setup.averages_of(net, ema), Place(CPU, r, 2, r))
        i = number.index(net.conv.weight)
        begin, end = shard.spans[i]
        assert (begin, end) != (0, net.conv.weight.numel()) and begin % 256 == 0
        x = torch.randn(net.conv.weight.shape)  # contiguous, as the weight is not
        assert torch.equal(shard.part(i, x), x.permute(0, 2, 3, 1).flatten()[begin:end])
        shard.gather(Kept if r == 0 else None)
        if r:
            return pickle.dumps(shard.gathered)
        state, averages = shard.gathered
        same = [torch.equal(state["state"][n][k], x) for n, own in enumerate(whole) for k, x in own.items()]
        same += [torch.equal(averages[p].view(torch.int32), x.view(torch.int32)) for p, x in wanted.items()]
        return pickle.dumps(same)

    shown = BytesIO(micro.fork_ranks(rank))
    same, others = pickle.load(shown), pickle.load(shown)
    assert all(same) and len(same) == 2 * 4 + 2 + 4 and others is None


def test_the_estimate_of_memory_knows_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4"), monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    denoiser = sd.objective.Denoiser(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"]), None)
    numbers = SD_Model.count_parameters(denoiser)[1]
    whole, cut = (sd.plan.memory_estimate(settings_of(*more), denoiser, None, CPU) for more in ((), ("--shard",)))
    assert (whole["optimizer"], whole["EMA"]) == (8 * numbers, 4 * numbers)
    assert (cut["optimizer"], cut["EMA"]) == (2 * numbers, numbers)
    assert whole["peak"] - cut["peak"] == 9 * numbers
    assert sd.step.updates_parts(settings_of()) and not sd.step.updates_parts(settings_of("--shard"))
    assert sd.plan.checkpoint_bytes(settings_of("--shard"), denoiser) == 16 * numbers  # of the whole


# ----------------------------------------------------------------------------------------------------------------
# Fused kernels
# ----------------------------------------------------------------------------------------------------------------


class Two(torch.nn.Module):
    """A kernel and a table, in the layout and of the kinds that the pass over memory tells apart."""

    def __init__(self):
        super().__init__()
        self.conv, self.out = torch.nn.Conv2d(16, 40, 3), torch.nn.Linear(40, 9)
        self.to(memory_format=torch.channels_last)

    def forward(self, x, *_):
        return self.out(self.conv(x).mean(dim=(2, 3)))

    def trained(self, part):
        return list(self.parameters()) if part == "unet" else []


def fused_network():
    return sd.objective.Denoiser(sd.fused.apply(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"], "none")), None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="its processes have no GPU each")
@pytest.mark.parametrize(
    "optimizer, net, dtype, shape", [("adamw", Two, "fp32", (2, 16, 5, 5)), ("adamw8bit", Two, "fp32", (2, 16, 5, 5)),
                                     ("sgd", fused_network, "bf16", (1, 4, 4, 4))]
)  # fmt: skip
def test_updates_of_parts_with_fused_kernels(optimizer, net, dtype, shape):
    """The pass over memory of NVIDIA GPUs, and the bf16 copies that blocks multiply with: weights, averages, norms and
    copies of two processes with --shard against two without, to the bit."""
    settings = settings_of("--optimizer", optimizer) | {"kernels": True, "dtype": dtype, "peer_copies": False}

    def rank(r):
        small_units()
        found = []
        for cut in (False, True):
            torch.manual_seed(0)
            own, denoiser = settings | {"shard": cut}, net()
            ema, optimizer, shard = sd.setup.average_of(denoiser), sd.optim.make_optimizer(denoiser, own), None
            if cut:
                shard = sd.sharding.Shard(optimizer, sd.setup.averages_of(denoiser, ema), Place(CPU, r, 2, r))
            update = sd.step.Update(optimizer, denoiser, ema, own, 2, shard)
            # Triton's interpreter cuts digits off in a cast to bf16, and GPUs round as torch does.
            update.copied = [p for p in update.parameters if p.copy_bf16 is not None]
            norms = []
            for step in range(2 if net is fused_network else 4):
                torch.manual_seed(100 * step + r)
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                    out = denoiser(torch.randn(shape), torch.zeros(shape[0]), torch.randn(shape[0], micro.LENGTH, 16))
                out.float().square().sum().backward()
                update.shared.finish()
                norms.append(update(1e-2, 0.5, 0.5))
                sd.optim.forget_gradients(update.parameters)
            update.complete(True)
            copies = [p.copy_bf16.float() for p in update.copied]
            assert bool(copies) == (dtype == "bf16") and (update.fused is None) == (dtype == "bf16")
            found.append([*norms, *denoiser.parameters(), *ema.parameters(), *copies])
        assert len(found[0]) == len(found[1])
        return pickle.dumps([i for i, (a, b) in enumerate(zip(*found)) if not torch.equal(a, b)])

    shown = BytesIO(micro.fork_ranks(rank))
    for _ in range(2):
        assert pickle.load(shown) == []


# ----------------------------------------------------------------------------------------------------------------
# What it does not go with
# ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more, sentence",
    [
        (("--optimizer", "muon"), "--optimizer muon looks at whole"),
        (("--optimizer", "adafactor"), "--optimizer adafactor looks at whole"),
        (("--optimizer", "prodigy", "--lr", 1), "--optimizer prodigy looks at whole"),
        (("--optimizer", "schedulefree", "--without", "ema"), "--optimizer schedulefree looks at whole"),
        (("--lora", 4, "--init_from", "x"), "--shard saves next to nothing with --lora"),
        (("--ema_on_cpu",), "--shard leaves a part of the average to each process"),
        (("--weights_dtype", "bf16", "--dtype", "bf16"), "--shard wants weights in fp32, found --weights_dtype bf16"),
    ],
)
def test_what_it_does_not_go_with_is_said(more, sentence, data, tmp_path):
    text = train(data, tmp_path / "run", "--shard", *more, expect=2)
    assert text.count("error:") == 1 and sentence in text and not (tmp_path / "run").exists()


def test_one_process_keeps_all(data, tmp_path):
    train(data, tmp_path / "plain", "--max_steps", 3)
    text = train(data, tmp_path / "cut", "--max_steps", 3, "--shard")
    assert "shard: each" not in text
    assert differences(tmp_path / "plain", tmp_path / "cut", settings=False) == []
