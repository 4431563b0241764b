"""--cache_text and --encode_first: what is encoded once gives training the numbers that encoding it each time gives.

pytest tests/test_text_cache.py
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro
from test_pictures import broken_png, train, write_folder

import sd.online
import sd.plan
import sd.text_cache
import SD_Model
import SD_Train
from sd.data import Batch
from sd.errors import InputError
from sd.setup import text_for
from sd.text_cache import EncodedTexts, cache_texts, distinct_ids

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """What micro has, with things/ of 42 pictures; cat/: 12 pictures of one to three captions, some alike."""
    root = micro.make_data(tmp_path_factory.mktemp("texts") / "data", {"things": 42})
    write_folder(root / "cat", 12)
    for i in range(12):
        more = ["the same"] * (i % 2) + [f"another {i}"] * (i % 3)
        (root / f"cat/p{i:02d}.json").write_text(json.dumps({"captions": more}))
    return root


@pytest.fixture(scope="module")
def encoder(root) -> SD_Model.TextEncoder:
    return SD_Model.TextEncoder.from_pretrained(str(root / "text_encoder")).eval()


def settings_of(**more) -> dict:
    return {"train_text_encoder": False, "dtype": "fp32", "batch": 4, "cache_text": True, "caption_memory": 1.0} | more


def split_of(*texts) -> SimpleNamespace:
    """A split that has token ids alone."""
    ids = np.array([[t, t + 1, 0] for t in texts]).reshape(-1, 3)
    return SimpleNamespace(all_token_ids=lambda chunk: (ids[i : i + chunk] for i in range(0, len(ids), chunk)))


def test_every_text_is_there_once(monkeypatch):
    monkeypatch.setattr(sd.text_cache, "CHUNK", 2)
    data = SimpleNamespace(train=split_of(5, 3, 5, 9), val=split_of(3, 300))
    found = distinct_ids(data, np.array([7, 8, 0]))
    assert found.dtype == np.int64
    assert sorted(map(tuple, found)) == [(3, 4, 0), (5, 6, 0), (7, 8, 0), (9, 10, 0), (300, 301, 0)]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_contexts_are_those_that_the_encoder_gives(encoder, dtype):
    """To the bit, whatever order they come in; in bf16 as the UNet's products would round them."""
    settings = settings_of(dtype=dtype)
    text_of, texts = text_for(encoder, settings, CPU), [f"a picture of {i}" for i in range(10)]
    ids, calls = np.asarray(encoder.tokenize([*texts, ""])).astype(np.int64), []
    encoded = EncodedTexts(ids, lambda some: (calls.append(len(some)), text_of(some))[1], settings, CPU)
    assert calls == [4, 4, 4]  # 11 texts, in batches of the size that training has
    for order in ([3, 1, 10, 0], [9, 9, 2, 8]):
        batch = Batch(*torch.zeros(3, 4), torch.from_numpy(ids[order]), 5, torch.ones(4, 2, 2))
        found, wanted = encoded(batch), text_of(batch.ids)
        assert found.ids.dtype == wanted.dtype and found.seen == 5 and found.weights is batch.weights
        assert torch.equal(found.ids, wanted if dtype == "fp32" else wanted.bfloat16().to(wanted.dtype))
    assert encoded.contexts.dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)


def test_the_text_encoder_leaves_the_device_and_the_memory_is_bounded():
    class Stub:
        context_dim, places = 8, []

        def eval(self):
            return self

        def to(self, place):
            self.places.append(str(place))

    data, said = SimpleNamespace(train=split_of(5, 3), val=split_of()), []
    null, text_of = np.array([7, 8, 0]), lambda ids: torch.zeros(len(ids), 3, 8)
    encoded, after = cache_texts(settings_of(), data, null, Stub(), text_of, torch.device("cpu", 0), said.append)
    assert Stub.places == ["cpu:0", "cpu"] and "captions: 3 encoded once" in said[0]
    contexts = torch.rand(2, 3, 8)
    assert after(contexts) is contexts
    bytes_ = 3 * 3 * 8 * 4
    cache_texts(settings_of(caption_memory=bytes_ / 2**30), data, null, Stub(), text_of, CPU, said.append)
    with pytest.raises(InputError, match="keeps 3 encoded captions.*--no_cache_text"):
        cache_texts(settings_of(caption_memory=(bytes_ - 1) / 2**30), data, null, Stub(), text_of, CPU, print)
    Stub.places.clear()
    encoded, same = cache_texts(settings_of(cache_text=None), data, null, Stub(), text_of, CPU, print)
    assert Stub.places == ["cpu"] and same is text_of and encoded(null) is null
    cache_texts(settings_of(cache_text=None, train_text_encoder=True), data, null, Stub(), text_of, CPU, print)
    assert Stub.places == ["cpu"]  # it goes with what is trained


def test_the_estimate_leaves_the_text_encoder_out(encoder):
    args = SD_Train.parse_args(["--phase", "demo", "--model", "micro"])
    settings = SD_Train.for_device(SD_Train.resolve(args, None), CPU) | {"kernels": False}
    net = sd.plan.Denoiser(SD_Model.UNet(SD_Model.PRESETS["micro"]["unet"]), None)
    peaks = [sd.plan.memory_estimate(settings | {"cache_text": c}, net, encoder, CPU)["peak"] for c in (None, True)]
    assert peaks[0] - peaks[1] == 4 * SD_Model.count_parameters(encoder)[1]


def same(a: Path, b: Path) -> bool:
    found = micro.differences(a, b)
    return [d for d in found if d != "state.json: settings"] == []


def test_runs_are_the_same_to_the_bit_with_and_without(root, tmp_path):
    """Of pictures with several captions, some of which are dropped; validation too; and a run may change over."""
    more = (root / "cat", "--max_steps", 9, "--drop", "0.3", "--flip")
    train(root, tmp_path / "plain", *more)
    text = train(root, tmp_path / "cached", *more, "--cache_text")
    assert "encoded once" in text and "the text encoder is off the device" in text
    assert same(tmp_path / "plain", tmp_path / "cached")
    train(root, tmp_path / "cut", *more, "--cache_text", "--stop_at", 4)
    train(root, tmp_path / "cut", *more, "--no_cache_text", "--resume")
    assert same(tmp_path / "plain", tmp_path / "cut")


def test_runs_on_cached_latents_too_with_pictures_painted(root, tmp_path):
    for name, more in (("plain", ()), ("cached", ("--cache_text",))):
        argv = micro.flags(
            root, tmp_path / name, "--drop", "0.3", "--without", "sample_steps", "--sample_steps", 6, *more
        )
        assert micro.status_of(micro.start(argv, tmp_path / f"{name}.txt")) == 0, (tmp_path / f"{name}.txt").read_text()
    assert same(tmp_path / "plain", tmp_path / "cached")
    grids = [(tmp_path / name / "samples/step_00000012.png").read_bytes() for name in ("plain", "cached")]
    assert grids[0] == grids[1]


def test_flags_that_no_cache_can_have_are_refused(root, tmp_path):
    text = train(root, tmp_path / "a", root / "cat", "--cache_text", "--train_text_encoder", expect=2)
    assert "--cache_text wants a text encoder that stays as it is" in text
    text = train(root, tmp_path / "b", root / "cat", "--cache_text", "--caption_memory", "1e-9", expect=2)
    assert "raise it, or give --no_cache_text" in text and not (tmp_path / "b").exists()


# ----------------------------------------------------------------------------------------------------------------
# Pictures
# ----------------------------------------------------------------------------------------------------------------


def test_pictures_encoded_first_are_the_same_and_the_vae_is_done_then(root, tmp_path):
    def closed():
        """From the first batch on, nothing may be encoded."""
        real = sd.online.Latents.leave

        def leave(self):
            real(self)
            self.encoder.submit = None

        sd.online.Latents.leave = leave

    folder = write_folder(tmp_path / "cat", 12)
    (folder / "p03.jpg").write_bytes(broken_png())  # another picture stands in for it
    more = (folder, "--max_steps", 9)
    assert "cannot be decoded" in train(root, tmp_path / "plain", *more)
    text = train(root, tmp_path / "first", *more, "--encode_first", "--workers", 2, hook=closed)
    assert "pictures: all encoded; the VAE is off the device" in text
    assert same(tmp_path / "plain", tmp_path / "first")


def test_all_is_encoded_first_or_the_run_is_refused(root, tmp_path):
    text = train(root, tmp_path / "a", root / "cat", "--encode_first", "--flip", expect=2)
    assert "--encode_first is of pictures that are always cut alike: drop it, or --flip" in text
    text = train(root, tmp_path / "b", root / "cat", "--encode_first", "--picture_memory", "1e-6", expect=2)
    assert "and --picture_memory is 1e-06: raise it, or give --no_encode_first" in text
    assert not (tmp_path / "b").exists()


def test_fit_and_the_dry_run_count_alike(root, tmp_path):
    """What --fit says of memory is the peak that the dry run tells, and the VAE counts until it is off the device."""
    more = (root / "cat", "--max_steps", 2, "--fit")
    text = train(root, tmp_path / "run", *more, "1", "--dry_run")
    assert "fit 1 GiB: no change" in text and "VAE 0.00" in text and not (tmp_path / "run").exists()
    for gib in (0.01, 0.0035, 0.003):
        text = train(root, tmp_path / "run", *more, gib, "--without", "ema", "--dry_run")
        settings = json.loads(text[text.index("{\n") : text.rindex("}") + 1])
        told = text.partition(f"fit {gib:g} GiB: ")[2].partition(";")[0]
        for name in ("cache_text", "encode_first", "no_ema"):
            assert bool(settings[name]) == (f"--{name}" in told), told
        assert "all encoded" not in text
    assert "--cache_text, --encode_first" in told
