"""SD_Evaluate.py: the measures against closed forms, torch-fidelity and prdc; features that depend on content alone;
protocols that are pinned; pictures and features that are made once; a run that is watched.

pytest tests/test_evaluate.py
"""

import fcntl
import importlib
import json
import shutil
import sys
import threading
import types
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent / "faults"))

import micro
from binding import rebind

import sd.extractors
import sd.features
import SD_Evaluate
from sd import measures, measures_check, protocol
from sd.device import Place
from sd.errors import InputError
from sd.extractors import Extractor, make_extractor, resized
from sd.features import PictureSet, features_of, scan, together
from sd.files import read_json
from sd.log import read_rows
from sd.pictures import encode_png
from sd.shapes import row
from sd.shards import ShardWriter

CPU = torch.device("cpu")
ALONE = Place(CPU, 0, 1, 0)


def pictures_of(count: int, size: int = 32, seed: int = 0) -> list[tuple[np.ndarray, str]]:
    """Drawn shapes uint8 [size, size, 3] with their captions."""
    return [(picture, caption) for picture, caption, _ in (row(seed, i, size) for i in range(count))]


def write_folder(folder: Path, pictures, names=None) -> Path:
    folder.mkdir()
    for i, (picture, caption) in enumerate(pictures):
        name = f"{i:05d}" if names is None else names[i]
        (folder / f"{name}.png").write_bytes(encode_png(picture))
        (folder / f"{name}.txt").write_text(caption)
    return folder


def write_tars(folder: Path, pictures, shard: int = 20) -> Path:
    folder.mkdir()
    for start in range(0, len(pictures), shard):
        with ShardWriter(folder / f"{start // shard:05d}.tar") as tar:
            for i, (picture, caption) in enumerate(pictures[start : start + shard], start):
                tar.add(f"{i:09d}", encode_png(picture), "png", caption, {})
    return folder


@pytest.fixture(scope="module")
def sets(tmp_path_factory) -> Path:
    """real/: tars of 45 pictures of 32 pixels; painted/: 33 others as files, with captions."""
    folder = tmp_path_factory.mktemp("sets")
    write_tars(folder / "real", pictures_of(45))
    write_folder(folder / "painted", pictures_of(33, seed=1))
    return folder


def evaluate(out: Path, *argv, code: int = 0) -> dict:
    """The result that a command line of SD_Evaluate writes."""
    before = set(out.glob("*.json"))
    SD_Evaluate.main([str(a) for a in (*argv, "--out", out, "--extractor", "pixels", "--device", "cpu")])
    new = set(out.glob("*.json")) - before
    return read_json(new.pop() if new else max(out.glob("*.json"), key=lambda p: p.stat().st_mtime))


def values(result: dict) -> dict[str, float]:
    return {name: m["value"] for name, m in result["measures"].items()}


# ---------------------------------------------------------------------------------------------------------------------
# Measures
# ---------------------------------------------------------------------------------------------------------------------


def test_check_gives_only_right_answers(capsys):
    SD_Evaluate.main(["--check", "--extractor", "pixels"])
    said = capsys.readouterr().out
    assert "0 wrong" in said and "WRONG" not in said and said.count("right  ") > 25


def biased_mmd(x, y):
    def kernel(p, q):
        return (p @ q.T / x.shape[1] + 1) ** 3

    return float(kernel(x, x).mean() + kernel(y, y).mean() - 2 * kernel(x, y).mean())


def coverage_by_clusters(real, fake, k, right=measures.manifolds):
    """Coverage by clusters that are found on the generated pictures: always 1, whatever they lack (trap 35)."""
    centres = fake[np.random.default_rng(0).choice(len(fake), 8, replace=False)]
    hit = {int(np.square(centres - x).sum(1).argmin()) for x in fake}
    return right(real, fake, k) | {"coverage": len(hit) / 8}


def kid_that_takes_what_there_is(real, fake, size=1000, right=measures.kid, **more):
    return right(real, fake, size=min(size, len(real), len(fake)), **more)


def root_of_elements(covariance):
    return np.sqrt(np.abs(covariance))


WRONG = {
    "root": root_of_elements,
    "moments": lambda x: (x.mean(0), np.cov(x, rowvar=False, bias=True)),
    "cubic_mmd": biased_mmd,
    "kid": kid_that_takes_what_there_is,  # trap 50: it says nothing of the smaller subset
    "radii": lambda x, k, right=measures.radii: right(x, k + 1),  # the row itself counted as a neighbour, or not
    "manifolds": coverage_by_clusters,
    "unit": lambda x: x,
    "nearest": lambda real, fake, right=measures.nearest: right(fake, real),
}


@pytest.mark.parametrize("name", WRONG)
def test_check_sees_a_wrong_measure(name, monkeypatch, capsys):
    """Traps 35, 43, 49 and 50, and other ways to be wrong: status 1."""
    monkeypatch.setattr(measures, name, WRONG[name])
    with pytest.raises(SystemExit) as end:
        SD_Evaluate.main(["--check", "--extractor", "pixels"])
    assert end.value.code == 1 and "WRONG" in capsys.readouterr().out


def test_coverage_of_one_mode_of_eight():
    """Trap 35: 0.125, where clusters that are found on the generated pictures say 1."""
    centres = 30 * np.eye(8)
    draw = np.random.default_rng(0)
    real = np.concatenate([draw.normal(size=(40, 8)) + c for c in centres])
    fake = draw.normal(size=(320, 8)) + centres[3]
    assert measures.manifolds(real, fake, 5)["coverage"] == pytest.approx(0.125, abs=0.01)
    assert coverage_by_clusters(real, fake, 5)["coverage"] == 1.0


def stand_ins(monkeypatch):
    """What torch-fidelity and prdc import and do not need here: torchvision, sklearn."""

    class Anything(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    names = ["torchvision", *(f"torchvision.{n}" for n in ("transforms", "transforms.functional", "datasets", "ops"))]
    for name in [*names, "torchvision.ops.misc", "torchvision.io", "torchvision.models", "sklearn", "sklearn.metrics"]:
        module = Anything(name)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, name, module)
        above, _, own = name.rpartition(".")
        if above:
            setattr(sys.modules[above], own, module)

    def pairwise_distances(x, y, metric, n_jobs):
        return np.sqrt(np.square(x[:, None] - y[None]).sum(2))

    sys.modules["sklearn.metrics"].pairwise_distances = pairwise_distances


def test_manifolds_are_those_of_prdc(monkeypatch):
    stand_ins(monkeypatch)
    oracle = importlib.import_module("prdc").compute_prdc
    draw = np.random.default_rng(3)
    real, fake = draw.normal(size=(150, 12)), draw.normal(size=(120, 12)) * 0.8 + 0.3
    for k in (3, 5):
        found, wanted = measures.manifolds(real, fake, k), oracle(real, fake, k)
        assert found == {name: pytest.approx(float(value), abs=1e-12) for name, value in wanted.items()}
        assert 0 < found["coverage"] < 1 and 0 < found["recall"] < 1


def random_inception(folder: Path, network) -> Path:
    """Weights of torch-fidelity's Inception that let pictures through: the usual random ones give next to nothing."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, tensor in network.state_dict().items():
        if tensor.dim() > 1:
            fan_in = tensor[0].numel()
            tensor = torch.randn(tensor.shape, generator=generator) * (2 / fan_in) ** 0.5
        state[name] = tensor.clone()
    torch.save(state, folder / "inception.pth")
    return folder / "inception.pth"


@pytest.fixture(scope="module")
def inception_file(tmp_path_factory) -> Path:
    module = sd.extractors.torch_fidelity_module("feature_extractor_inceptionv3")
    module.load_state_dict_from_url = lambda *_, **__: {}
    module.FeatureExtractorInceptionV3.load_state_dict = lambda *_: None
    return random_inception(tmp_path_factory.mktemp("weights"), module.FeatureExtractorInceptionV3("x", ["2048"]))


def test_numbers_are_those_of_torch_fidelity(monkeypatch, inception_file):
    """Its own network with the same random weights, then its own FID and KID: to 1e-4."""
    stand_ins(monkeypatch)
    for name in [m for m in sys.modules if m.split(".")[0] == "torch_fidelity"]:
        monkeypatch.delitem(sys.modules, name)
    theirs = importlib.import_module("torch_fidelity.feature_extractor_inceptionv3")
    fid, kid = (importlib.import_module(f"torch_fidelity.metric_{name}") for name in ("fid", "kid"))
    network = theirs.FeatureExtractorInceptionV3("x", ["2048"], feature_extractor_weights_path=str(inception_file))
    extractor = make_extractor(f"inception:{inception_file}", CPU)
    assert importlib.import_module("torch_fidelity").__file__  # the bare module that ours is loaded by is gone
    assert not extractor.inception and extractor.name.startswith("inception with the weights ")
    groups = [np.stack([p for p, _ in pictures_of(12, size, seed)]) for size, seed in ((40, 0), (40, 1))]
    ours = [extractor(group) for group in groups]
    with torch.no_grad():
        oracle = [network(torch.from_numpy(group).permute(0, 3, 1, 2))[0] for group in groups]
    for a, b in zip(ours, oracle):
        assert np.abs(a - b.numpy()).max() < 1e-5 * b.abs().max() and b.std(0).mean() > 1e-3
    # Of a part of the features: their general eigenvalues of 2048 x 2048 take a minute.
    a, b = (x[:, :96] * 3 for x in oracle)
    stats = [fid.fid_features_to_statistics(x.double()) for x in (a, b)]
    wanted = fid.fid_statistics_to_metric(*stats, False)["frechet_inception_distance"]
    assert measures.frechet_distance(a.numpy(), b.numpy()) == pytest.approx(wanted, rel=1e-4)
    wanted = kid.kid_features_to_metric(a.double(), b.double(), kid_subset_size=7, verbose=False)
    assert measures.kid(a.numpy(), b.numpy(), size=7) == pytest.approx(tuple(wanted.values()), rel=1e-4)
    big = [np.random.default_rng(s).normal(size=(200, 96)) * (1 + 0.2 * s) + 0.1 * s for s in (0, 1)]
    stats = [fid.fid_features_to_statistics(torch.from_numpy(x)) for x in big]
    wanted = fid.fid_statistics_to_metric(*stats, False)["frechet_inception_distance"]
    assert measures.frechet_distance(*big) == pytest.approx(wanted, rel=1e-6)


@pytest.mark.slow
def test_whole_fid_is_torch_fidelitys(monkeypatch, inception_file):
    stand_ins(monkeypatch)
    fid = importlib.import_module("torch_fidelity.metric_fid")
    extractor = make_extractor(f"inception:{inception_file}", CPU)
    ours = [extractor(np.stack([p for p, _ in pictures_of(40, 40, seed)])) for seed in (0, 1)]
    stats = [fid.fid_features_to_statistics(torch.from_numpy(x)) for x in ours]
    wanted = fid.fid_statistics_to_metric(*stats, False)["frechet_inception_distance"]
    assert measures.frechet_distance(*ours) == pytest.approx(wanted, rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# Extractors
# ---------------------------------------------------------------------------------------------------------------------


def test_only_the_published_inception_gives_fid():
    fake = Extractor("anything", "", 8, "pil_bicubic", lambda x: x, CPU)
    assert protocol.label("fd", fake) == "FD of anything" and protocol.label("kid", fake) == "KID of anything"
    fake.inception = True
    assert protocol.label("fd", fake) == "FID" and protocol.label("precision", fake) == "precision of anything"


def test_resizing_is_pinned():
    """Trap 44: each rule by hand; Pillow's widens its filter, torch's does not."""
    pictures = np.stack([p for p, _ in pictures_of(2, 64)])
    pil = resized(pictures, 20, "pil_bicubic")
    channel = Image.fromarray(pictures[1, :, :, 2].astype(np.float32)).resize((20, 20), Image.Resampling.BICUBIC)
    assert np.array_equal(pil[1, 2], np.asarray(channel).clip(0, 255))
    x = torch.from_numpy(pictures).permute(0, 3, 1, 2).float()
    antialiased = torch.nn.functional.interpolate(x, (20, 20), mode="bicubic", antialias=True)
    plain = resized(pictures, 20, "torch_bicubic")
    assert (pil - antialiased.clamp(0, 255)).abs().max() < 1 < 10 < (plain - antialiased).abs().max()
    module = sd.extractors.torch_fidelity_module("interpolate_compat_tensorflow")
    tf1 = resized(pictures, 20, "tf1_bilinear", module.interpolate_bilinear_2d_like_tensorflow1x)
    # TensorFlow 1: pixel i lies at i * 64 / 20, and not at (i + 0.5) * 64 / 20 - 0.5.
    at, part = int(3 * 3.2), 3 * 3.2 % 1
    wanted = x[0, 0, 0, at] * (1 - part) + x[0, 0, 0, at + 1] * part
    assert tf1[0, 0, 0, 3] == pytest.approx(wanted.item(), abs=1e-3)


def test_bytes_are_asked_for():
    """Trap 45."""
    extractor, picture = make_extractor("pixels", CPU), np.stack([p for p, _ in pictures_of(1)])
    assert extractor(picture).max() <= 1.001
    for wrong in (picture / np.float32(255), picture.astype(np.float32), picture.transpose(0, 3, 1, 2), picture[0]):
        with pytest.raises(ValueError, match="uint8"):
            extractor(wrong)


def with_batch_norm(train: bool) -> Extractor:
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.AdaptiveAvgPool2d(1))
    return Extractor("small", "", 16, "pil_bicubic", network.train(train), CPU)


def test_features_do_not_depend_on_the_batch():
    """Trap 46: 1 against 32; a network left in training fails --check."""
    extractor = make_extractor("efficientnet-lite0", CPU)
    pictures = np.stack([p for p, _ in pictures_of(32)])
    together, alone = extractor(pictures), np.concatenate([extractor(p[None]) for p in pictures[:6]])
    assert together.shape == (32, 1280) and np.abs(together[:6] - alone).max() < 1e-5 * np.abs(together).max()
    assert all(a.right for a in measures_check.extractor_answers(with_batch_norm(False)))
    assert not all(a.right for a in measures_check.extractor_answers(with_batch_norm(True)))


def test_no_weight_stays_random(tmp_path, inception_file):
    """Trap 48: a file that is absent, lacks a tensor, or has another is an error."""
    state = torch.load(inception_file, weights_only=True)
    with pytest.raises(InputError, match="there is none.*nothing is downloaded"):
        make_extractor(f"inception:{tmp_path / 'none.pth'}", CPU)
    for change in ({"fc.bias": None}, {"another": torch.zeros(1)}, {"fc.bias": torch.zeros(3)}):
        torch.save({k: v for k, v in (state | change).items() if v is not None}, tmp_path / "wrong.pth")
        with pytest.raises(InputError, match="wrong.pth has not the weights of .*Inception.*1 diff"):
            make_extractor(f"inception:{tmp_path / 'wrong.pth'}", CPU)
    with pytest.raises(InputError, match="SIDE wants"):
        make_extractor(f"file:{inception_file}", CPU)
    with pytest.raises(InputError, match="cannot read .*TorchScript"):
        make_extractor(f"file:{inception_file}:32", CPU)
    for wrong in ("fid", "inception", "pixels:x", ""):
        with pytest.raises(InputError, match="--extractor wants one of"):
            make_extractor(wrong, CPU)
    with pytest.raises(InputError, match="tf1_bilinear is for"):
        make_extractor("pixels", CPU, "tf1_bilinear")


def test_a_torchscript_file_gets_values_of_0_to_255(tmp_path):
    class Mean(torch.nn.Module):
        def forward(self, x):
            return x.mean((2, 3))

    torch.jit.script(Mean()).save(tmp_path / "mean.pt")
    extractor = make_extractor(f"file:{tmp_path / 'mean.pt'}:16", CPU)
    white = np.full((1, 16, 16, 3), 255, np.uint8)
    assert extractor(white).tolist() == [[255, 255, 255]] and extractor.name == "mean" and len(extractor.sha256) == 64


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory, small_tokenizer) -> Path:
    from transformers import CLIPConfig, CLIPModel

    folder = tmp_path_factory.mktemp("clip") / "small"
    one = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, projection_dim=24)
    text = one | dict(vocab_size=len(small_tokenizer), max_position_embeddings=77,
                      bos_token_id=small_tokenizer.bos_token_id, eos_token_id=small_tokenizer.eos_token_id,
                      pad_token_id=small_tokenizer.pad_token_id)  # fmt: skip
    config = CLIPConfig(text_config=text, vision_config=one | dict(image_size=32, patch_size=8), projection_dim=24)
    torch.manual_seed(1)
    CLIPModel(config).save_pretrained(folder)
    small_tokenizer.save_pretrained(folder)
    return folder


def test_clip_is_transformers_own(clip_folder, small_tokenizer, tmp_path):
    from transformers import CLIPModel

    extractor = make_extractor(f"transformers:{clip_folder}", CPU)
    theirs = CLIPModel.from_pretrained(clip_folder).eval()
    pictures, texts = np.stack([p for p, _ in pictures_of(3)]), ["a red circle", "a dog", "word " * 200]
    mean, std = (torch.tensor(v)[:, None, None] for v in sd.extractors.OPENAI)
    x = (torch.from_numpy(pictures).permute(0, 3, 1, 2) / 255 - mean) / std
    ids = small_tokenizer(texts, padding=True, truncation=True, max_length=77, return_tensors="pt")
    with torch.no_grad():
        wanted = theirs(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"], pixel_values=x)
    images, words = extractor(pictures), extractor.text(texts).numpy()
    assert np.allclose(measures.unit(images), wanted.image_embeds, atol=1e-5)  # 32 pixels: no resizing
    assert np.allclose(measures.unit(words), wanted.text_embeds, atol=1e-5)
    assert extractor.too_long(texts) == 1 and extractor.name == "clip of small"
    cosines = (wanted.image_embeds * wanted.text_embeds).sum(1)
    assert measures.clip_score(images, words) == pytest.approx(100 * cosines.clamp(min=0).mean().item(), abs=1e-3)
    # One tensor less, and transformers would fill it with random numbers.
    broken = shutil.copytree(clip_folder, tmp_path / "broken")
    state = theirs.state_dict()
    del state["visual_projection.weight"]
    import safetensors.torch

    safetensors.torch.save_file({k: v.contiguous() for k, v in state.items()}, broken / "model.safetensors")
    with pytest.raises(InputError, match="missing visual_projection.weight"):
        make_extractor(f"transformers:{broken}", CPU)


def test_clip_score_and_cmmd_of_a_folder(clip_folder, sets, tmp_path):
    argv = ["--pictures", sets / "painted", "--real", sets / "real", "--out", tmp_path, "--device", "cpu"]
    argv = [str(a) for a in (*argv, "--extractor", f"transformers:{clip_folder}", "--measures", "cmmd,clip_score")]
    SD_Evaluate.main(argv)
    result = read_json(next(tmp_path.glob("*.json")))
    extractor = make_extractor(f"transformers:{clip_folder}", CPU)
    painted = pictures_of(33, seed=1)
    images, texts = extractor(np.stack([p for p, _ in painted])), extractor.text([c for _, c in painted]).numpy()
    found = result["measures"]["clip_score"]
    assert found["value"] == pytest.approx(measures.clip_score(images, texts), abs=1e-4) and found["texts_cut"] == 0
    assert found["value"] != pytest.approx(measures.clip_score(images, texts[::-1]), abs=1e-4)
    real = extractor(np.stack([p for p, _ in pictures_of(45)]))
    assert values(result)["cmmd"] == pytest.approx(measures.cmmd(real, images), rel=1e-4)
    assert result["protocol"]["generated"]["prompts"] is not None
    with pytest.raises(InputError, match="clip_score wants CLIP"):
        evaluate(tmp_path, "--pictures", sets / "painted", "--real", sets / "real", "--measures", "clip_score")
    bare = write_folder(tmp_path / "bare", pictures_of(7))
    (bare / "00003.txt").unlink()
    with pytest.raises(InputError, match="wants a prompt for each picture, and 1 of"):
        SD_Evaluate.main([str(bare) if a == str(sets / "painted") else a for a in argv])


def test_open_clip(monkeypatch, tmp_path, sets):
    weights = tmp_path / "weights.pt"
    weights.write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(InputError, match="open_clip, which cannot be imported"):
        make_extractor(f"open_clip:ViT-B-32:{weights}", CPU)

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.project = torch.nn.Linear(3, 4)
            self.visual = types.SimpleNamespace(image_size=(24, 24), image_mean=None, image_std=(1.0, 1.0, 1.0))

        def encode_image(self, x):
            return self.project(x.mean((2, 3)))

        def encode_text(self, ids):
            return ids[:, :4].float()

    def tokenizer(texts, context_length=77):
        ids = torch.zeros(len(texts), context_length, dtype=torch.long)
        for i, text in enumerate(texts):
            ids[i, : min(len(text.split()), context_length)] = 1
        return ids

    library = types.SimpleNamespace(
        list_models=lambda: ["small"],
        create_model=lambda name, pretrained: Network(),
        get_tokenizer=lambda name: tokenizer,
    )
    monkeypatch.setitem(sys.modules, "open_clip", library)
    torch.manual_seed(0)
    network = Network()
    torch.save(network.state_dict(), weights)
    extractor = make_extractor(f"open_clip:small:{weights}", CPU)
    white = np.full((1, 30, 30, 3), 255, np.uint8)
    wanted = network.project(1 - torch.tensor(sd.extractors.OPENAI[0])).detach().numpy()
    assert np.allclose(extractor(white), wanted, atol=1e-5) and extractor.side == 24
    assert extractor.too_long(["one two", "word " * 78, "word " * 77]) == 1
    with pytest.raises(InputError, match="no architecture 'large'"):
        make_extractor(f"open_clip:large:{weights}", CPU)


# ---------------------------------------------------------------------------------------------------------------------
# Sets, and features by content
# ---------------------------------------------------------------------------------------------------------------------


def test_names_order_and_container_do_not_matter(sets, tmp_path):
    """The same pictures under other names, in another order, in tars: the same numbers to the last digit."""
    first = evaluate(tmp_path / "a", "--pictures", sets / "painted", "--real", sets / "real")
    painted = pictures_of(33, seed=1)
    write_tars(tmp_path / "tars", painted[::-1], shard=10)
    renamed = write_folder(tmp_path / "renamed", pictures_of(45), [f"{(7 * i) % 45:03d}x" for i in range(45)])
    second = evaluate(tmp_path / "b", "--pictures", tmp_path / "tars", "--real", renamed, "--batch", 1, "--workers", 1)
    assert values(first) == values(second) and first["protocol"] == second["protocol"]
    assert first["protocol"]["real"]["n"] == 45 and first["protocol"]["generated"]["n"] == 33
    fewer = evaluate(tmp_path / "a", "--pictures", sets / "painted", "--real", sets / "real", "--n_real", 20, "--n", 9)
    assert fewer["protocol"]["real"]["n"] == 20 and fewer["protocol"]["generated"]["n"] == 9
    other = evaluate(tmp_path / "b", "--pictures", tmp_path / "tars", "--real", renamed, "--n_real", 20, "--n", 9)
    assert values(fewer) == values(other)


def test_every_picture_counts_once(sets, tmp_path, monkeypatch):
    """Trap 52: 33 pictures by eights; without the last batch of one it ends in an error and no number."""
    pictures = scan(str(sets / "painted"))
    kept, features = features_of(pictures, make_extractor("pixels", CPU), 32, tmp_path / "a", ALONE, 8, 2)
    assert features.shape == (33, 768) and kept.pictures == pictures.pictures
    wanted = make_extractor("pixels", CPU)(np.stack([p for p, _ in pictures_of(33, seed=1)]))
    assert np.array_equal(features[np.lexsort(features.T)], wanted[np.lexsort(wanted.T)])
    right = sd.features.picture_batches

    def without_the_tail(*args):
        return (pair for pair in right(*args) if len(pair[0]) == 8)

    rebind(sd.features, "picture_batches", without_the_tail, monkeypatch.setattr)
    with pytest.raises(InputError, match="1 pictures of .* do not decode"):
        evaluate(tmp_path / "b", "--pictures", sets / "painted", "--real", sets / "real", "--batch", 8)
    short = PictureSet("x", pictures.pictures[:-1], Counter())
    with pytest.raises(ValueError, match="every picture"):
        protocol.measure(["fd"], pictures, short, features, features)


def test_features_are_computed_once(sets, tmp_path, monkeypatch):
    calls = []
    right = Extractor.__call__
    monkeypatch.setattr(Extractor, "__call__", lambda self, x: calls.append(len(x)) or right(self, x))
    argv = ["--pictures", sets / "painted", "--real", sets / "real", "--cache", tmp_path / "cache"]
    first = evaluate(tmp_path / "a", *argv)
    assert sum(calls) == 45 + 33
    calls.clear()
    second = evaluate(tmp_path / "b", *argv)
    assert not calls and values(first) == values(second)
    evaluate(tmp_path / "c", *argv, "--size", 24)  # cut to another size: other features
    assert sum(calls) == 45 + 33
    calls.clear()
    part = next((tmp_path / "cache" / make_extractor("pixels", CPU).identity(32)).glob("*.npz"))
    part.write_bytes(part.read_bytes()[:-200])  # damaged: computed again
    assert values(evaluate(tmp_path / "d", *argv)) == values(first) and sum(calls) in (45, 33)
    # The same file five times is computed once, and counts five times.
    calls.clear()
    folder = write_folder(tmp_path / "twice", pictures_of(8, seed=5))
    for i in range(4):
        shutil.copy(folder / "00002.png", folder / f"again{i}.png")
    result = evaluate(tmp_path / "e", "--pictures", folder, "--real", sets / "real", "--cache", tmp_path / "cache")
    assert sum(calls) == 8 and result["protocol"]["generated"]["n"] == 12
    assert any("4 generated pictures are equal to others" in w for w in result["warnings"])


def test_what_was_done_before_a_stop_is_kept(sets, tmp_path, monkeypatch):
    done = []
    right = Extractor.__call__

    def stops(self, x):
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(len(x))
        return right(self, x)

    pictures, extractor = scan(str(sets / "real")), make_extractor("pixels", CPU)
    monkeypatch.setattr(Extractor, "__call__", stops)
    with pytest.raises(KeyboardInterrupt):
        features_of(pictures, extractor, 32, tmp_path, ALONE, 10, 1)
    monkeypatch.setattr(Extractor, "__call__", lambda self, x: done.append(len(x)) or right(self, x))
    assert len(features_of(pictures, extractor, 32, tmp_path, ALONE, 10, 1)[1]) == 45
    assert done == [10, 10, 10, 10, 5]


def test_pictures_that_are_none_and_grids_are_left_out_and_said(tmp_path, sets):
    folder = write_folder(tmp_path / "own", pictures_of(9))
    shutil.copy(folder / "00000.png", folder / "grid.png")
    shutil.copy(folder / "00000.png", folder / "grid_00009.png")
    (folder / "cut.png").write_bytes((folder / "00001.png").read_bytes()[:100])
    found = scan(str(folder))
    assert len(found.pictures) == 9 and found.rejects == {"grid": 2, "truncated": 1}
    result = evaluate(tmp_path / "out", "--real", folder, "--pictures", sets / "painted")
    assert any("left out of the real pictures" in w and "truncated" in w for w in result["warnings"])
    (tmp_path / "none").mkdir()
    with pytest.raises(InputError, match="no picture was found"):
        scan(str(tmp_path / "none"))
    other = write_folder(tmp_path / "sizes", pictures_of(6) + pictures_of(6, 40))
    with pytest.raises(InputError, match="not all squares of one size.*give --size"):
        evaluate(tmp_path / "out", "--real", folder, "--pictures", other)


def test_warnings_of_few_pictures_and_of_formats(tmp_path, sets):
    """Trap 53: fewer pictures than features, JPEG against PNG; and the quality by the JPEG's own table."""
    folder = tmp_path / "jpegs"
    folder.mkdir()
    for i, (picture, _) in enumerate(pictures_of(12, seed=2)):
        Image.fromarray(picture).save(folder / f"{i}.jpg", quality=(50, 75, 90, 95)[i % 4])
    assert scan(str(folder)).formats() == {"jpg q50": 3, "jpg q75": 3, "jpg q90": 3, "jpg q95": 3}
    result = evaluate(tmp_path / "a", "--real", folder, "--pictures", sets / "painted")
    said = "\n".join(result["warnings"])
    assert "12 pictures give singular covariances of 768 features" in said
    assert "12 are fewer than 10,000" in said and "subsets hold 12 pictures" in said
    assert "100% of the real pictures and 0% of the generated ones are JPEG" in said
    many = [PictureSet("x", [p] * 12_000, Counter()) for p in scan(str(sets / "painted")).pictures[:2]]
    assert protocol.warnings_of(*many, 32, 768, ["fd", "kid"]) == [
        f"11,999 {what} pictures are equal to others of theirs, and count as often as they come"
        for what in ("real", "generated")
    ]
    assert result["protocol"]["kid"]["size"] == 12  # trap 50: never more than there are, and it says so


def test_copies_are_found(sets, tmp_path):
    folder = write_folder(tmp_path / "copied", pictures_of(30, seed=3) + pictures_of(2))
    found = evaluate(tmp_path / "out", "--pictures", folder, "--real", sets / "real")["measures"]["copies"]
    assert found["identical"] == 2
    first = found["nearest"][:2]
    assert {p["generated"] for p in first} == {"00030.png", "00031.png"}
    assert {p["real"] for p in first} == {"00000/000000000", "00000/000000001"}
    assert all(p["distance"] == 0 < p["to_next_real"] for p in first)


# ---------------------------------------------------------------------------------------------------------------------
# Protocols
# ---------------------------------------------------------------------------------------------------------------------


def test_results_of_different_protocols_are_not_compared(sets, tmp_path, capsys):
    for name, more in (("a", ()), ("b", ("--n", 32)), ("c", ("--resize", "torch_bicubic"))):
        evaluate(tmp_path / name, "--pictures", sets / "painted", "--real", sets / "real", *more)
    write_folder(tmp_path / "others", pictures_of(33, seed=9))
    evaluate(tmp_path / "d", "--pictures", tmp_path / "others", "--real", sets / "real")
    a, b, c, d = (str(next((tmp_path / n).glob("*.json"))) for n in "abcd")
    with pytest.raises(InputError, match=r"real|generated.n is 33 .* and 32") as refused:
        SD_Evaluate.main(["--compare", a, b])
    assert "generated.n is 33" in str(refused.value) and "--differs generated.n" in str(refused.value)
    with pytest.raises(InputError, match='extractor.resize is "pil_bicubic"'):  # trap 44
        SD_Evaluate.main(["--compare", a, c])
    with pytest.raises(InputError, match="generated.prompts"):
        SD_Evaluate.main(["--compare", a, d])
    with pytest.raises(InputError, match="--differs steps: the two do not differ in it"):
        SD_Evaluate.main(["--compare", a, d, "--differs", "prompts", "steps"])
    capsys.readouterr()
    SD_Evaluate.main(["--compare", a, d, "--differs", "prompts"])
    said = capsys.readouterr().out
    change = values(read_json(d))["fd"] - values(read_json(a))["fd"]
    line = next(line for line in said.splitlines() if line.startswith("FD of pixels"))
    assert float(line.split()[-1]) == pytest.approx(change, rel=1e-4) and "generated.prompts" in said
    # Everything that is pinned is minded.
    result = read_json(a)
    for name in protocol.flat(result["protocol"]):
        changed = json.loads(json.dumps(result))
        place = changed["protocol"]
        *above, last = name.split(".") if not name.startswith("neighbours") else name.split(".", 1)
        for part in above:
            place = place[part]
        place[last] = "another"
        (tmp_path / "changed.json").write_text(json.dumps(changed))
        with pytest.raises(InputError, match="measured differently"):
            protocol.compare([a, str(tmp_path / "changed.json")], [])
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(InputError, match="no result of SD_Evaluate"):
        protocol.compare([a, str(tmp_path / "other.json")], [])


@pytest.mark.parametrize("argv, words", [
    (["--pictures", "x"], "--real is wanted"),
    (["--pictures", "x", "--real", "y", "--n", "0"], "--n wants at least 1"),
    (["--pictures", "x", "--real", "y", "--differs", "n"], "--differs is for --compare"),
    (["--pictures", "x", "--real", "y", "--measures", "is"], "--measures wants some of"),
    (["--during", "no_such_run", "--real", "y"], "there is none at no_such_run"),
    (["--pictures", "x", "--real", "no_such_folder", "--out", "out"], "no .tar files in no_such_folder"),
])  # fmt: skip
def test_mistakes_are_said_in_a_sentence(argv, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=words):
        SD_Evaluate.main(argv + ["--extractor", "pixels", "--device", "cpu"])


# ---------------------------------------------------------------------------------------------------------------------
# Painting, runs, processes
# ---------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A run of the micro preset with checkpoints of steps 3, 6, 9 and 12, and real pictures in tars beside it."""
    folder = tmp_path_factory.mktemp("trained")
    root = micro.make_data(folder / "data", {"things": 42})
    argv = micro.flags(root, folder / "run")
    assert micro.status_of(micro.start(argv, folder / "out.txt")) == 0, (folder / "out.txt").read_text()
    write_tars(folder / "real", pictures_of(24, 64), shard=12)
    return folder


def painting(trained: Path, *more) -> list:
    return ["--model", trained / "run/checkpoints/step_00000012", "--real", trained / "real", "--steps", 2, "--n", 9,
            *more]  # fmt: skip


def test_painting_goes_on_and_depends_on_nothing_else(trained, tmp_path, monkeypatch):
    whole = evaluate(tmp_path / "a", *painting(trained))
    first = {p.name: p.read_bytes() for p in (tmp_path / "a/pictures").glob("*.png")}
    assert sorted(first) == [f"{i:06d}.png" for i in range(9)]
    told = whole["protocol"]["generated"]
    assert (told["n"], told["steps"], told["cfg"], told["sampler"], told["weights"]) == (9, 2, 7.5, "ddim", "ema")
    assert told["seeds"] and told["prompts"] and told["dtype"] == "fp32" and told["prompt_syntax"] == "plain"
    # The prompts are the real pictures' captions, in the order of their hashes.
    captions = [p.caption for p in scan(str(trained / "real")).pictures]
    painted = {p.name: p for p in scan(str(tmp_path / "a/pictures")).pictures}
    assert [painted[f"{i:06d}.png"].painted["prompt"] for i in range(9)] == captions[:9]
    assert [painted[f"{i:06d}.png"].painted["seed"] for i in range(9)] == list(range(9))
    # A part of them lost, another batch: what is there stays as it is, what is not is painted again.
    for i in (2, 5, 8):
        (tmp_path / f"a/pictures/{i:06d}.png").unlink()
    calls = []
    right = sd.painting.sample_batches
    rebind(
        sd.painting, "sample_batches", lambda *a, **k: calls.append(len(a[3])) or right(*a, **k), monkeypatch.setattr
    )
    again = evaluate(tmp_path / "a", *painting(trained, "--paint_batch", 1))
    assert sum(calls) == 3
    pixels = [np.array(Image.open(p)).astype(int) for p in sorted((tmp_path / "a/pictures").glob("*.png"))]
    before = [cv2.imdecode(np.frombuffer(first[n], np.uint8), 1)[:, :, ::-1].astype(int) for n in sorted(first)]
    assert max(np.abs(a - b).max() for a, b in zip(pixels, before)) <= 1
    assert values(again) == pytest.approx(values(whole), rel=0.05, abs=0.02)
    assert again["protocol"] == whole["protocol"]
    # Fewer of the same are those with the first numbers; other settings do not mix with them.
    assert evaluate(tmp_path / "a", *painting(trained, "--n", 7))["protocol"]["generated"]["n"] == 7
    for more, name in ((("--steps", 3), "steps"), (("--weights", "live"), "weights"), (("--seed", 5), "seed")):
        with pytest.raises(InputError, match=f"was made with {name} = "):
            evaluate(tmp_path / "a", *painting(trained, *more))
    other = painting(trained)
    other[1] = trained / "run/checkpoints/step_00000003"
    with pytest.raises(InputError, match="was made with model = "):
        evaluate(tmp_path / "a", *other)


def test_pictures_that_were_painted_here_are_measured_alike(trained, tmp_path):
    """--pictures of a folder that --model painted: the same protocol, so that the two may be compared."""
    first = evaluate(tmp_path / "a", *painting(trained))
    second = evaluate(tmp_path / "b", "--pictures", tmp_path / "a/pictures", "--real", trained / "real")
    assert first["protocol"] == second["protocol"] and values(first) == values(second)


def in_ranks(place: Place, argv: list[str]) -> bytes:
    rebind(SD_Evaluate, "join_processes", lambda name: place)
    rebind(sd.features.dist, "destroy_process_group", lambda: None)
    SD_Evaluate.main(argv)
    return b""


def test_two_processes_agree_with_one(trained, tmp_path):
    """Trap 47: each process paints and extracts its share, and both end with the result of one alone."""
    one = evaluate(tmp_path / "one", *painting(trained))
    argv = [str(a) for a in (*painting(trained), "--out", tmp_path / "two", "--extractor", "pixels", "--device", "cpu")]
    found = micro.fork_ranks(lambda rank: b"ended" + in_ranks(Place(CPU, rank, 2, rank), argv))
    assert found == b"endedended"
    two = read_json(next((tmp_path / "two").glob("*.json")))
    assert one["protocol"] == two["protocol"] and values(one) == pytest.approx(values(two), rel=0.05, abs=0.02)
    assert len(list((tmp_path / "two/pictures").glob("*.png"))) == 9
    parts = [np.load(p)["keys"] for p in (tmp_path / "two").glob("features/*/*.npz")]
    keys = np.concatenate(parts)
    assert len(parts) == 4 and len(keys) == len(set(keys.tolist())) == 24 + 9  # two a set, and nothing twice


def test_an_error_of_one_process_ends_all():
    """Trap 47: without `together`, the other would wait for ever."""

    def fails(rank: int) -> bytes:
        def work():
            if rank == 1:
                raise InputError("a sentence")
            return rank

        place = Place(CPU, rank, 2, rank)
        try:
            together(place, work)
        except InputError as e:
            return f"{rank} {e}; ".encode() + str(together(place, lambda: 5 + rank, first_alone=True)).encode() + b"\n"
        return b"none"

    assert micro.fork_ranks(fails) == b"0 a sentence; 5\n1 a sentence; 5\n"


def during(run: Path, trained: Path, *more):
    argv = ["--during", run, "--real", trained / "real", "--steps", 1, "--n", 7, "--extractor", "pixels", "--device",
            "cpu", "--measures", "fd,kid", *more]  # fmt: skip
    SD_Evaluate.main([str(a) for a in argv])


def test_each_checkpoint_of_a_run_is_measured_once(trained, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run, ignore=shutil.ignore_patterns("step_*"))
    for step in (3, 6):
        shutil.copytree(trained / f"run/checkpoints/step_{step:08d}", run / f"checkpoints/step_{step:08d}")
    damaged = run / "checkpoints/step_00000006/unet_ema.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + b"x")
    with pytest.raises(InputError, match="1 checkpoints could not be measured, and 1 were: step_00000006: unet_ema"):
        during(run, trained, "--once")
    damaged.write_bytes(whole)
    with open(run / "evaluation.jsonl", "a") as file:
        file.write('{"step": 6, "che')  # a kill in the middle of a line
    during(run, trained, "--once")
    during(run, trained, "--once")
    rows = read_rows(run / "evaluation.jsonl")
    assert [r["step"] for r in rows] == [3, 6] and all({"fd", "kid", "protocol"} <= set(r) for r in rows)
    assert rows[0]["protocol"] == rows[1]["protocol"] and rows[0]["fd"] != rows[1]["fd"]
    assert (run / "curves.png").is_file() and not list((run / "evaluation").glob("step_*"))
    assert len(list((run / "evaluation").glob("pixels*.json"))) == 2
    during(run, trained, "--once", "--seed", 9, "--keep_pictures")  # measured in another way: again
    assert len(read_rows(run / "evaluation.jsonl")) == 4
    assert len(list((run / "evaluation").glob("step_*/000006.png"))) == 2
    # Another network under an old number is another checkpoint.
    shutil.rmtree(run / "checkpoints/step_00000006")
    shutil.copytree(trained / "run/checkpoints/step_00000009", run / "checkpoints/step_00000006")
    during(run, trained, "--once")
    assert [r["step"] for r in read_rows(run / "evaluation.jsonl")] == [3, 6, 3, 6, 6]
    (tmp_path / "empty/checkpoints").mkdir(parents=True)
    with pytest.raises(InputError, match="has no whole checkpoint, and nobody trains in it"):
        during(tmp_path / "empty", trained)


def test_a_run_is_watched_until_its_training_ends(trained, tmp_path):
    """While a process holds the run's lock, new checkpoints are waited for; the last one is not missed."""
    run = tmp_path / "run"
    shutil.copytree(trained / "run", run, ignore=shutil.ignore_patterns("step_*"))
    lock = open(run / "lock", "w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    ended = threading.Event()

    def watch():
        during(run, trained, "--every", 0.05)
        ended.set()

    thread = threading.Thread(target=watch)
    thread.start()
    assert not ended.wait(0.3)
    for step in (3, 6):
        shutil.copytree(trained / f"run/checkpoints/step_{step:08d}", run / f"checkpoints/step_{step:08d}.tmp")
        (run / f"checkpoints/step_{step:08d}.tmp").rename(run / f"checkpoints/step_{step:08d}")
        if step == 3:
            while not read_rows(run / "evaluation.jsonl"):
                assert not ended.wait(0.05)
    lock.close()
    assert ended.wait(60)
    thread.join()
    assert [r["step"] for r in read_rows(run / "evaluation.jsonl")] == [3, 6]
