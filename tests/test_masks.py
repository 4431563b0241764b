"""Masks of pictures (--masks): which file is whose, the weights that they become, and the loss that these make.

pytest tests/test_masks.py
"""

import io
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro
from test_pictures import index_of, keys, picture, sample, train, write_folder, write_tar

import sd.index
import sd.masks
from sd.data import Batch
from sd.device import Place
from sd.encoder import Encoder
from sd.errors import InputError
from sd.index import Captions, find_parts
from sd.objective import sample_losses, validate
from sd.online import Cut, Latents, Pictures
from sd.pictures import encode_png
from sd.text import load_tokenizer
from sd.weights.read import load_vae
from SD_Model import NoiseSchedule

WITH = Captions(masks=True)


def grey(array: np.ndarray) -> bytes:
    """A PNG of one channel."""
    return encode_png(np.repeat(array[:, :, None], 3, axis=2))


def left_half(height: int = 72, width: int = 96) -> np.ndarray:
    """White on the left, black on the right."""
    mask = np.zeros((height, width), np.uint8)
    mask[:, : width // 2] = 255
    return mask


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """What micro has, and cat/: 24 pictures without masks."""
    root = micro.make_data(tmp_path_factory.mktemp("masks") / "data", {})
    write_folder(root / "cat", 24)
    return root


def split_of(root: Path, pictures, cutting: Cut, floor: float = 0.0) -> Pictures:
    parts = find_parts(str(pictures), WITH, None, Counter())
    index, *_ = indexed(pictures)
    settings = {"window": 0, "seed": 3, "strict": False, "picture_memory": 1.0, "mask_floor": floor}
    latents = Latents(Encoder(load_vae(root / "vae"), torch.device("cpu"), torch.float32), 1)
    return Pictures(index.table, [len(index.table)], parts, load_tokenizer(str(root / "tokenizer")), latents, (4, 8, 8),
                    cutting, settings, None, print)  # fmt: skip


def indexed(pictures):
    """(Index, what was passed over) with masks."""
    left_out = Counter()
    parts = find_parts(str(pictures), WITH, None, left_out)
    sd.index.build_index(parts, 0, lambda _: None)
    index = sd.index.read_index(parts, [], None, True)
    return index, left_out + index.rejects


# ----------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------


def test_folders_lists_and_tars_find_the_mask_of_each_picture(tmp_path):
    folder = write_folder(tmp_path / "cat", 4)
    (folder / "p00.mask.png").write_bytes(grey(left_half()))
    (folder / "p02.mask.png").write_bytes(grey(left_half(9, 9)))
    (folder / "p03.mask.png").write_bytes(grey(left_half())[:-30])  # cut
    (folder / "alone.mask.png").write_bytes(grey(left_half()))
    (folder / "alone.mask.txt").write_text("a caption makes no picture of it")
    index, left_out = indexed(folder)
    assert keys(index) == ["cat/p00.jpg", "cat/p01.jpg", "cat/p02.jpg"]
    assert index.table["mask"].to_pylist() == [0, None, 0]
    length = (folder / "p02.mask.png").stat().st_size
    assert index.table["mask_bytes"].to_pylist()[2] == length
    assert (left_out["mask"], left_out["damaged_mask"]) == (1, 1)

    (folder / "p01.mask.png").write_bytes(grey(left_half()))  # later: it is found
    assert indexed(folder)[0].table["mask"].null_count == 0
    assert index_of(folder)[1]["mask"] == 5 and "mask" not in index_of(folder)[0].table.column_names  # without --masks

    (tmp_path / "list.csv").write_text("file,caption\ncat/p00.jpg,one\ncat/p01.jpg,two\n")
    assert indexed(tmp_path / "list.csv")[0].table["mask"].to_pylist() == [0, 0]

    members = sample("a.v1", 0) + sample("b", 1) + [("a.v1.mask.png", grey(left_half())), ("c.mask.png", b"x")]
    tar = write_tar(tmp_path / "s/images/00000.tar", members)
    index, left_out = indexed(tar)
    assert keys(index) == ["s/00000/a.v1", "s/00000/b"] and left_out["mask"] == 1
    offset, length = index.table["mask"].to_pylist()[0], index.table["mask_bytes"].to_pylist()[0]
    assert tar.read_bytes()[offset : offset + length] == grey(left_half())
    assert index.table["mask"].to_pylist()[1] is None


@pytest.mark.parametrize("ending", [".mask.PNG", ".MASK.PNG"])
def test_endings_of_masks_in_capital_letters_are_found_and_never_pictures(ending, root, tmp_path):
    folder = write_folder(tmp_path / "cat", 2)
    (folder / f"p00{ending}").write_bytes(grey(left_half()))
    (folder / f"alone{ending}").write_bytes(grey(left_half()))
    (folder / f"alone{ending[:-4]}.txt").write_text("a caption makes no picture of it")
    (tmp_path / "list.csv").write_text("file,caption\ncat/p00.jpg,one\ncat/p01.jpg,two\n")
    members = sample("a", 0) + sample("b", 1) + [("a" + ending, grey(left_half()))]
    tar = write_tar(tmp_path / "s/images/00000.tar", members)
    for pictures in (folder, tmp_path / "list.csv", tar):
        assert [mask is not None for mask in indexed(pictures)[0].table["mask"].to_pylist()] == [True, False]
        weights = split_of(root, pictures, Cut(64)).weights(np.arange(2))
        assert weights[0, 0].tolist() == [1] * 4 + [0] * 4 and (weights[1] == 1).all()
    assert indexed(folder)[1]["mask"] == 1


# ----------------------------------------------------------------------------------------------------------------
# Weights
# ----------------------------------------------------------------------------------------------------------------


def test_a_mask_becomes_the_mean_grey_of_each_place_above_the_floor():
    square = np.zeros((64, 64), np.uint8)
    square[:, :24] = 255
    square[:32, 24:32] = 51  # a fifth
    square[32:, 28:32] = 255  # half a place
    weights = sd.masks.loss_weights(square, (8, 8), 0.0)
    assert weights.dtype == np.float32 and (weights[:, :3] == 1).all() and (weights[:, 4:] == 0).all()
    assert np.allclose(weights[:4, 3], 0.2) and np.allclose(weights[4:, 3], 0.5)
    assert np.allclose(sd.masks.loss_weights(square, (8, 8), 0.1), 0.1 + 0.9 * weights)
    assert (sd.masks.loss_weights(np.full((64, 64), 255, np.uint8), (8, 8), 0.3) == 1).all()


def test_masks_may_have_any_size_and_kind():
    wanted = left_half()
    for height, width in ((72, 96), (36, 48), (144, 192)):
        found = sd.masks.read_mask(grey(left_half(height, width)), (72, 96))
        assert found.shape == (72, 96) and (found[:, :46] == 255).all() and (found[:, 50:] == 0).all()
    assert (sd.masks.read_mask(grey(wanted), (72, 96)) == wanted).all()
    for mode in ("1", "L", "P", "RGBA"):
        file = io.BytesIO()
        Image.fromarray(wanted).convert(mode).save(file, "PNG")
        assert (sd.masks.read_mask(file.getvalue(), (72, 96)) == wanted).all(), mode


def test_what_is_transparent_in_a_mask_does_not_count():
    """As programs that cut out a subject leave it: white on the left, nothing on the right, in any colour."""
    for hidden in (0, 255):
        levels = np.maximum(left_half(), np.uint8(hidden))
        image = Image.merge("LA", [Image.fromarray(levels), Image.fromarray(left_half())])
        for mode in ("LA", "RGBA"):
            file = io.BytesIO()
            image.convert(mode).save(file, "PNG")
            assert (sd.masks.read_mask(file.getvalue(), (72, 96)) == left_half()).all(), (mode, hidden)
    file = io.BytesIO()
    half = Image.fromarray(np.full((72, 96), 128, np.uint8))
    Image.merge("LA", [half, half]).save(file, "PNG")
    assert set(sd.masks.read_mask(file.getvalue(), (72, 96)).flat) == {64}
    Image.fromarray(left_half() // 255).convert("P").save(palette := io.BytesIO(), "PNG", transparency=0)
    assert (sd.masks.read_mask(palette.getvalue(), (72, 96))[:, 48:] == 0).all()


def test_a_mask_is_cut_mirrored_and_scaled_as_its_picture_and_not_coloured():
    image = picture(3)
    image[:] = image[:, :, :1]  # its grey levels are the mask's
    rng, mirrored = np.random.default_rng(0), 0
    for cutting in (Cut(64), Cut(24, (0.3, 0.9), (0.8, 1.2)), Cut(96, (0.2, 0.5), flip=True), Cut(64, flip=True)):
        assert (cutting.mask(image[:, :, 0], None) == cutting(image, None)[:, :, 0]).all()
        for _ in range(20):
            draws = rng.random(8)
            cut = cutting.mask(image[:, :, 0], draws)
            assert (cut == cutting(image, draws)[:, :, 0]).all()
            assert (cut == cutting._replace(jitter=0.5).mask(image[:, :, 0], draws)).all()
            mirrored += cutting.flip and draws[4] < 0.5
    assert mirrored > 5


def test_each_showing_has_the_weights_of_its_own_picture_and_cut(root, tmp_path):
    """Kept or not, with pictures that have no mask between, and of the middle in validation."""
    folder = write_folder(tmp_path / "cat", 3)
    (folder / "p01.mask.png").write_bytes(grey(left_half(18, 24)))
    split = split_of(root, folder, Cut(64), 0.25)
    index, half = np.array([0, 1, 1]), np.array([1.0] * 4 + [0.25] * 4, np.float32)
    for _ in range(2):  # the second time from memory
        which, _, weights = split.shown(index, 0, np.arange(3))
        assert which.tolist() == [0, 1, 1] and weights.dtype == np.float32
        assert (weights[0] == 1).all() and np.allclose(weights[1:], half, atol=0.13)
        assert (weights[1:, :, [0, 1, 2, 5, 6, 7]] == half[[0, 1, 2, 5, 6, 7]]).all()
    assert (split.weights(np.array([1])) == weights[1]).all()
    turned = split_of(root, folder, Cut(64, flip=True))
    *_, weights = turned.shown(np.ones(20, int), 0, np.arange(20))
    sides = [(w[0, 0], w[0, 7]) for w in weights]
    assert set(sides) == {(1, 0), (0, 1)}
    *_, again = turned.shown(np.ones(20, int), 0, np.arange(20))
    assert (weights == again).all()
    assert turned.digest() != split_of(root, root / "cat", Cut(64)).digest()


# ----------------------------------------------------------------------------------------------------------------
# The loss
# ----------------------------------------------------------------------------------------------------------------


def batch_of(weights) -> Batch:
    g = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 3, 4, 10, 12, generator=g).transpose(0, 1)[:2].unbind(1)
    tensors = [x, noise, torch.tensor([100, 700]), torch.zeros(2, 3, dtype=torch.long)]
    return Batch.of(tensors + ([] if weights is None else [weights]))


def losses(weights) -> torch.Tensor:
    return sample_losses(lambda x, t, text: 0.5 * x, batch_of(weights), None, NoiseSchedule())


def test_white_masks_change_no_bit_and_others_take_the_mean_of_what_counts():
    batch, schedule = batch_of(None), NoiseSchedule()
    noisy = schedule.add_noise(batch.latents, batch.noise, batch.t)
    error = (0.5 * noisy - batch.noise) ** 2
    assert torch.equal(losses(torch.ones(2, 10, 12)), losses(None))
    weights = torch.zeros(2, 10, 12)
    weights[0, :, :5] = 1
    weights[1, 2:4] = 0.5
    wanted = torch.stack([error[0, :, :, :5].mean(), error[1, :, 2:4].mean()])  # how small it is does not matter
    assert torch.allclose(losses(weights), wanted)
    weights = torch.rand(2, 10, 12)
    assert torch.allclose(losses(weights), (error.mean(1) * weights).sum((1, 2)) / weights.sum((1, 2)))
    assert losses(torch.zeros(2, 10, 12)).tolist() == [0, 0]


def test_what_is_black_has_no_gradient():
    predicted = torch.zeros(2, 4, 10, 12, requires_grad=True)
    weights = torch.zeros(2, 10, 12)
    weights[:, :, 6:] = 1
    sample_losses(lambda *_: predicted, batch_of(weights), None, NoiseSchedule()).sum().backward()
    assert (predicted.grad[..., :6] == 0).all() and (predicted.grad[..., 6:] != 0).all()


def test_validation_counts_what_training_counts():
    class Half(torch.nn.Module):
        def forward(self, x, t, text):
            return 0.5 * x

    weights = torch.zeros(2, 10, 12)
    weights[:, :, 6:] = 1
    settings, place = {"batch": 1, "dtype": "fp32"}, Place(torch.device("cpu"), 0, 1, 0)
    found = validate(Half(), settings, [batch_of(weights)], lambda ids: None, NoiseSchedule(), place)
    assert found["loss"] == pytest.approx(losses(weights).mean().item())
    assert found["loss"] != pytest.approx(losses(None).mean().item())


# ----------------------------------------------------------------------------------------------------------------
# Runs
# ----------------------------------------------------------------------------------------------------------------

RANDOM = ("--crop_scale", "0.3,1", "--flip", "--max_steps", 6)


def masked(root: Path, folder: Path, mask: np.ndarray) -> Path:
    write_folder(folder / "cat", 24)
    for i in range(24):
        (folder / f"cat/p{i:02d}.mask.png").write_bytes(grey(mask))
    return folder / "cat"


def test_a_run_with_white_masks_is_the_run_without_and_one_with_masks_resumes_exactly(root, tmp_path):
    white = masked(root, tmp_path / "white", np.full((72, 96), 255, np.uint8))
    half = masked(root, tmp_path / "half", left_half())
    train(root, tmp_path / "plain", root / "cat", *RANDOM)
    text = train(root, tmp_path / "run_white", white, *RANDOM, "--masks")
    assert "masks: 24 of 24 pictures have one" in text
    (plain, _), (same, _) = (micro.contents(micro.checkpoints(tmp_path / n)[-1]) for n in ("plain", "run_white"))
    assert plain.keys() == same.keys() and all(torch.equal(plain[name], same[name]) for name in plain)
    assert micro.rows(tmp_path / "plain", "validation.jsonl") == micro.rows(tmp_path / "run_white", "validation.jsonl")

    train(root, tmp_path / "run_half", half, *RANDOM, "--masks", "--mask_floor", "0.1")
    other, _ = micro.contents(micro.checkpoints(tmp_path / "run_half")[-1])
    assert not all(torch.equal(plain[name], other[name]) for name in plain)
    more = (half, *RANDOM, "--masks", "--mask_floor", "0.1", "--workers", 2)
    train(root, tmp_path / "cut", *more, "--stop_at", 3)
    train(root, tmp_path / "cut", half, *RANDOM, "--resume")
    found = micro.differences(tmp_path / "run_half", tmp_path / "cut")
    assert [d for d in found if d != "state.json: settings"] == []
    for i in range(24):
        (half / f"p{i:02d}.mask.png").write_bytes(grey(255 - left_half()))
    text = train(root, tmp_path / "cut", half, *RANDOM, "--max_steps", 7, "--resume", expect=2)
    assert "put them back" in text


def test_flags_of_masks_are_refused_where_they_do_nothing(root, tmp_path):
    text = train(root, tmp_path / "a", root / "cat", *RANDOM, "--masks", expect=2)
    assert "--masks wants files such as x.mask.png beside x.png" in text and not (tmp_path / "a").exists()
    text = train(root, tmp_path / "b", root / "cat", *RANDOM, "--mask_floor", "0.1", expect=2)
    assert "--mask_floor is of --masks" in text
    text = train(root, tmp_path / "c", root / "cat", *RANDOM, "--masks", "--mask_floor", "1.5", expect=2)
    assert "--mask_floor wants a number from 0 to 1, found 1.5" in text


def test_a_damaged_mask_is_told_and_another_picture_stands_in(root, tmp_path):
    folder = write_folder(tmp_path / "cat", 2)
    data = grey(np.random.default_rng(0).integers(0, 256, (72, 96), np.uint8))
    (folder / "p00.mask.png").write_bytes(data)
    split, said = split_of(root, folder, Cut(64)), []
    split.say = said.append
    broken = bytearray(data)
    broken[60:70] = bytes(10)
    (folder / "p00.mask.png").write_bytes(bytes(broken))
    which, *_ = split.shown(np.array([0]), 0, np.arange(1))
    assert which.tolist() == [1] and "p00.jpg cannot be decoded (its mask: corrupt)" in said[0]


def test_a_picture_whose_mask_is_all_black_teaches_nothing_and_is_told(root, tmp_path):
    folder = write_folder(tmp_path / "cat", 2)
    (folder / "p00.mask.png").write_bytes(grey(np.zeros((72, 96), np.uint8)))
    split, said = split_of(root, folder, Cut(64)), []
    split.say = said.append
    which, _, weights = split.shown(np.array([0]), 0, np.arange(1))
    assert which.tolist() == [1] and (weights == 1).all() and "(its mask: all black)" in said[0]
    which, _, weights = split_of(root, folder, Cut(64), 0.1).shown(np.array([0]), 0, np.arange(1))
    assert which.tolist() == [0] and np.allclose(weights, 0.1)  # with a floor it counts everywhere alike
    (folder / "p01.mask.png").write_bytes(grey(np.zeros((72, 96), np.uint8)))
    with pytest.raises(InputError, match="none of the 2 pictures beside cat/p00.jpg can be decoded"):
        split_of(root, folder, Cut(64)).shown(np.array([0]), 0, np.arange(1))
