"""sd/data.py: which pictures, in which order, with which noise; and data that are cut, missing or lying."""

import json
import sys
import threading
import time
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "faults"))
import micro

import sd.data
import sd.errors
import sd.shards
from sd.data import (
    STREAM_EPOCH,
    STREAM_SOURCE,
    Batch,
    BucketOrder,
    LatentStore,
    Prefetcher,
    SampleOrder,
    Source,
    Split,
    generator,
    make_batch,
    validation_batches,
)


class FakeSplit:
    """A Split of n pictures whose latents are constant: picture i is all i."""

    def __init__(self, n: int, shape=(4, 2, 2), moments=False):
        self.ids, self.moments = np.arange(n * 3, dtype=np.uint16).reshape(n, 3) + 1, moments
        self.latent_shape, self.shape, self.flipped = shape, np.zeros(n, int), True
        self.several, self.token_ids = False, lambda index, turn=0.0: self.ids[index].astype(np.int64)
        self.keys = pa.chunked_array([[f"s/{i}" for i in range(n)]])

    def __len__(self):
        return len(self.ids)

    def shown(self, index, mirrored, positions):
        return index, self.latents(index, mirrored), None

    def weights(self, index):
        return None

    def latents(self, index, mirrored=0):
        return (
            np.ones((len(index), *self.latent_shape), np.float32) * np.asarray(index, np.float32)[:, None, None, None]
        )


@pytest.fixture
def root(tmp_path) -> Path:
    return micro.make_data(tmp_path / "data", {"a": 60, "b": 20})


def source(root: Path, name: str, weight=None, cap=None) -> Source:
    return Source(name, weight, cap, root / name / "dataset", root / name / "latents")


def split_of(sources: list[Source], fraction=1.0) -> Split:
    return Split(sources, [LatentStore(s.latents, pretouch=True) for s in sources], "train", fraction)


# --- order


def test_an_epoch_is_a_permutation_and_each_is_another():
    order = SampleOrder([50], None, seed=3)
    epochs = [order.at(np.arange(e * 50, e * 50 + 50)) for e in range(4)]
    assert all(sorted(e) == list(range(50)) for e in epochs)
    assert len({tuple(e) for e in epochs}) == 4
    assert (SampleOrder([50], None, seed=4).epoch(0) != epochs[0]).any()
    # the answer does not depend on what was asked before, nor on how the positions are cut
    fresh = SampleOrder([50], None, seed=3)
    assert (fresh.at(np.arange(120, 180)) == np.concatenate(epochs)[120:180]).all()
    assert (
        np.concatenate([fresh.at(np.arange(i, i + 7)) for i in range(0, 196, 7)]) == np.concatenate(epochs)[:196]
    ).all()


def test_buckets_give_each_global_batch_one_shape():
    """Of each shape the pictures come as in the plain order, none left out; a batch comes as soon as it is full."""
    order, shape = (
        SampleOrder([70, 40], [0.5, 0.5], seed=5),
        np.random.default_rng(0).permutation([0] * 80 + [1] * 27 + [2] * 3),
    )
    buckets = BucketOrder(order, shape, 8)
    batches = [buckets.at(np.arange(8 * k, 8 * k + 8)) for k in range(60)]
    plain = np.concatenate([order.epoch(e) for e in range(6)])
    place, full_at = [np.flatnonzero(shape[plain] == k) for k in range(3)], []
    for batch in batches:
        k = shape[batch[0]]
        assert (batch == plain[place[k][:8]]).all()
        full_at.append(place[k][7])
        place[k] = place[k][8:]
    assert full_at == sorted(full_at) and len({shape[b[0]] for b in batches}) == 3
    fresh = BucketOrder(order, shape, 8)
    for k in (47, 46, 3, 59, 0):  # whatever was asked before
        assert (fresh.at(np.arange(8 * k + 2, 8 * k + 5)) == batches[k][2:5]).all()


def test_a_source_runs_through_all_its_pictures_before_one_comes_again():
    order = SampleOrder([30, 70], [0.5, 0.5], seed=0)
    seen = order.at(np.arange(1200))
    for first, size in ((0, 30), (30, 70)):
        own = seen[(seen >= first) & (seen < first + size)]
        assert all(len(set(own[i : i + size])) == size for i in range(0, len(own) - size, size))


@pytest.mark.parametrize("weights", [[0.37, 0.44, 0.09, 0.10], None])
def test_weights_hold_over_any_window(weights):
    sizes = [213, 250, 51, 58]
    order, total = SampleOrder(sizes, weights, seed=1), sum(sizes)
    which = np.repeat(np.arange(4), sizes)[order.at(np.arange(5 * total))]
    share = np.array(weights or sizes) / np.sum(weights or sizes)

    def worst(which):
        """Largest distance from the wanted count over windows that start and end anywhere."""
        taken = np.concatenate([np.zeros((1, 4)), np.cumsum(which[:, None] == np.arange(4), axis=0)])
        drift = taken - np.arange(len(taken))[:, None] * share
        return (drift.max(axis=0) - drift.min(axis=0)).max()

    assert worst(which) < 8
    drawn = np.random.default_rng(0).choice(4, len(which), p=share)  # control: weights that hold on average alone
    assert worst(drawn) > 25


def test_caps_and_fractions_go_by_the_key(root):
    everything = split_of([source(root, "a")])
    keys = everything.keys.to_pylist()
    by_hash = sorted(keys, key=sd.shards.key_fraction)
    for cap in (5, 20):
        assert set(split_of([source(root, "a", cap=cap)]).keys.to_pylist()) == set(by_hash[:cap])
    half = split_of([source(root, "a")], 0.5).keys.to_pylist()
    assert half == [k for k in keys if sd.shards.key_fraction(k) < 0.5] and 15 < len(half) < 45
    both = split_of([source(root, "a", cap=40), source(root, "b")], 0.5)
    assert both.sizes == [min(40, len(half)), len([k for k in both.keys.to_pylist() if k.startswith("b/")])]
    assert split_of([source(root, "a", cap=1000)]).sizes == [60]


def test_latents_captions_and_ids_stay_with_their_key(root):
    sources = [source(root, "a"), source(root, "b", cap=7)]
    split = split_of(sources, 0.7)
    for s in sources:
        stored = {}
        for path in sorted(s.latents.glob("*.parquet")):
            array, table = np.load(path.with_suffix(".npy")), pq.read_table(path)
            stored |= {k: array[r] for k, r in zip(table["image_key"].to_pylist(), table["row"].to_pylist())}
        keys, ids, _, captions = sd.data.read_split(s.dataset, "train")
        told = dict(zip(keys.to_pylist(), zip(ids.tolist(), captions.to_pylist())))
        for i, key in enumerate(split.keys.to_pylist()):
            if key in stored:
                assert (split.latents(np.array([i]))[0] == stored[key]).all()
                assert (split.ids[i].tolist(), split.captions[i].as_py()) == told[key]


@pytest.mark.parametrize("text", ["a:x", "a:-1", "a:0", "a:nan", "a:inf", "a:1:0", "a:1:2:3", ":1", "a:1,b", ""])
def test_faulty_mixtures_are_refused(text):
    with pytest.raises(sd.errors.InputError, match="--data wants"):
        sd.data.parse_sources({"dataset": None, "data_root": "data", "data": text})


def test_mixtures_are_parsed():
    a, b = sd.data.parse_sources({"dataset": None, "data_root": "d", "data": "a:0.5, b:2:10"})
    assert (a.weight, a.cap, b.weight, b.cap, b.latents) == (0.5, None, 2.0, 10, Path("d/b/latents"))


# --- samples


def test_a_sample_depends_on_seed_and_position_alone():
    split, order, null = FakeSplit(40), SampleOrder([40], None, 0), np.zeros(3, np.int64)

    def samples(cuts, seed=0, **kw):
        parts = [make_batch(split, order, np.arange(a, b), null, 0.3, seed, 1000, **kw) for a, b in zip(cuts, cuts[1:])]
        return [torch.cat(x) for x in zip(*(p[:4] for p in parts))], sum(p.seen for p in parts) % 2**64

    whole, seen = samples([0, 100])
    for cuts in ([0, 3, 50, 99, 100], list(range(101))):
        cut, seen_too = samples(cuts)
        assert all(torch.equal(a, b) for a, b in zip(whole, cut)) and seen == seen_too
    other, _ = samples([0, 100], seed=1)
    assert not torch.equal(whole[1], other[1]) and not torch.equal(whole[2], other[2])
    # no noise and no run of timesteps twice, in the second epoch either
    assert len({n.numpy().tobytes() for n in whole[1]}) == 100
    assert whole[2][:40].tolist() != whole[2][40:80].tolist()


def test_noise_and_timesteps_have_their_distributions():
    batch = make_batch(FakeSplit(9), SampleOrder([9], None, 0), np.arange(20000), np.zeros(3, int), 0, 0, 1000)
    assert abs(float(batch.noise.mean())) < 0.01 and abs(float(batch.noise.std()) - 1) < 0.01
    counts = torch.bincount(batch.t // 100, minlength=10)
    assert batch.t.min() == 0 and batch.t.max() == 999 and (counts - 2000).abs().max() < 200


def test_caption_dropout():
    """CASES 8: 0.100 +- 0.0064 over 20,000 samples; it varies inside a batch; dropped samples get the null's ids."""
    null = np.array([9007, 9008, 9009])
    batch = make_batch(FakeSplit(50), SampleOrder([50], None, 0), np.arange(20000), null, 0.1, 0, 1000)
    dropped = (batch.ids == torch.tensor(null)).all(dim=1)
    assert abs(float(dropped.float().mean()) - 0.1) < 0.0064
    by_batch = dropped.reshape(-1, 50).sum(dim=1)
    assert 0 < by_batch.float().mean() < 50 and len(by_batch.unique()) > 5
    kept = make_batch(FakeSplit(50), SampleOrder([50], None, 0), np.arange(200), null, 0.0, 0, 1000)
    assert not (kept.ids == torch.tensor(null)).all(dim=1).any()
    # what does not concern the caption is the same whatever the rate
    assert torch.equal(kept.noise, batch.noise[:200]) and torch.equal(kept.t, batch.t[:200])


def test_offset_noise():
    args = (FakeSplit(9, (4, 8, 8)), SampleOrder([9], None, 0), np.arange(4000), np.zeros(3, int), 0, 0, 1000)
    plain, offset = make_batch(*args), make_batch(*args, offset=0.5)
    added = offset.noise - plain.noise  # constant over each channel, of the asked deviation, another in each
    assert float((added - added.mean(dim=(2, 3), keepdim=True)).abs().max()) < 1e-5
    assert abs(float(added[:, :, 0, 0].std()) - 0.5) < 0.02
    assert abs(float(torch.corrcoef(added[:, :2, 0, 0].T)[0, 1])) < 0.1
    assert torch.equal(plain.t, offset.t)


def test_moments_are_drawn_from():
    class Moments(FakeSplit):
        def latents(self, index, mirrored=0):
            return np.concatenate(
                [np.full((len(index), 4, 2, 2), 3.0), np.full((len(index), 4, 2, 2), -2.0)], axis=1
            ).astype(np.float32)

    batch = make_batch(
        Moments(5, moments=True), SampleOrder([5], None, 0), np.arange(3000), np.zeros(3, int), 0, 0, 1000
    )
    assert batch.latents.shape == (3000, 4, 2, 2)
    assert abs(float(batch.latents.mean()) - 3) < 0.02 and abs(float(batch.latents.std()) - np.exp(-1)) < 0.02
    assert abs(float(torch.corrcoef(torch.stack([batch.latents.flatten(), batch.noise.flatten()]))[0, 1])) < 0.03


# --- mirror images


def mirror(folder: Path, without: frozenset[str] | set[str] = frozenset(), seed: int = 0):
    """What --flip makes of a folder of latents: each picture's mirror image (its columns from right to left), but for
    those in `without`. The rows are shuffled: only the key tells which belong together."""
    count, rng = 0, np.random.default_rng(seed)
    for path in sorted(folder.glob("*.parquet")):
        array, keys = np.load(path.with_suffix(".npy")), pq.read_table(path)["image_key"].to_pylist()
        rows = [(k, x) for k, x in zip(keys, array)]
        rows += [(k + sd.shards.FLIP, x[:, :, ::-1]) for k, x in zip(keys, array) if k not in without]
        rows = [rows[i] for i in rng.permutation(len(rows))]
        np.save(path.with_suffix(".npy"), np.stack([x for _, x in rows]))
        pq.write_table(pa.table({"image_key": [k for k, _ in rows], "row": np.arange(len(rows), dtype="i4")}), path)
        count += len(rows)
    edited(folder / "manifest.json", flip=True, count=count)


def batch_of(split: Split, positions, seed=0) -> Batch:
    return make_batch(split, SampleOrder(split.sizes, None, 0), positions, np.zeros(12, np.int64), 0.1, seed, 1000)


def test_half_of_the_showings_are_of_the_mirror_image(root):
    """... of the right picture; a picture that has none is always shown as it is; nothing else changes."""
    sources, positions = [source(root, "a"), source(root, "b")], np.arange(2000)
    plain = batch_of(split_of(sources), positions)
    keys = split_of(sources).keys.to_pylist()
    without = {k for k in keys if sd.shards.key_fraction(k) < 0.2}
    mirror(root / "a/latents", without)  # b has none at all
    split = split_of(sources)
    batch = batch_of(split, positions)
    assert split.keys.to_pylist() == keys and split.missing == 0
    assert all(torch.equal(a, b) for a, b in zip(batch[1:4], plain[1:4])) and batch.seen == plain.seen
    as_is = (batch.latents == plain.latents).flatten(1).all(dim=1)
    turned = (batch.latents == plain.latents.flip(3)).flatten(1).all(dim=1)
    assert (as_is ^ turned).all()
    shown = [keys[i] for i in SampleOrder(split.sizes, None, 0).at(positions)]
    has = torch.tensor([k.startswith("a/") and k not in without for k in shown])
    assert as_is[~has].all() and 400 < (~has).sum() < 1600
    share, count = float(turned[has].float().mean()), int(has.sum())
    assert abs(share - 0.5) < 4 * 0.5 / count**0.5
    # the same picture is now the one, now the other; neighbours are independent, and so are choice and timestep
    both = {k: {bool(t) for k2, t in zip(shown, turned) if k2 == k} for k in {k for k, h in zip(shown, has) if h}}
    assert all(len(x) == 2 for x in both.values())
    a, t = turned[has].float(), batch.t[has].float()
    for x, y in ((a[1:], a[:-1]), (a, t)):
        assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 4 / count**0.5


def test_the_choice_of_the_mirror_image_depends_on_seed_and_position_alone(root):
    mirror(root / "a/latents")
    split, whole = split_of([source(root, "a")]), batch_of(split_of([source(root, "a")]), np.arange(192))
    for ranks, micro_batch in ((1, 1), (2, 8), (3, 4), (4, 16)):
        parts = {}
        for first in range(0, 192, ranks * micro_batch):
            for rank in range(ranks):
                positions = np.arange(first + rank, first + ranks * micro_batch, ranks)
                parts |= {int(p): x for p, x in zip(positions, batch_of(split, positions).latents)}
        assert torch.equal(torch.stack([parts[p] for p in range(192)]), whole.latents)
    resumed = batch_of(split_of([source(root, "a")]), np.arange(77, 192))
    assert torch.equal(resumed.latents, whole.latents[77:])
    other = batch_of(split, np.arange(192), seed=1)  # the same pictures, mirrored at other times
    assert 40 < (other.latents != whole.latents).flatten(1).any(dim=1).sum() < 152


def test_validation_is_on_pictures_as_they_are(root):
    sources = [source(root, "a")]
    before = {name: validation_batches(split_of(sources), 40, name, 0, 1000)[0] for name in ("val", "train")}
    mirror(root / "a/latents")
    for name, batch in before.items():
        assert all(
            torch.equal(a, b) for a, b in zip(validation_batches(split_of(sources), 40, name, 0, 1000)[0][:4], batch)
        )


def test_without_mirror_images_the_draws_are_those_of_the_first_version(root):
    """Written out once more: a run that was begun before mirror images came goes on as it was."""
    split = split_of([source(root, "a"), source(root, "b")])
    batch = batch_of(split, np.arange(30, 130))
    for i, index in enumerate(SampleOrder(split.sizes, None, 0).at(np.arange(30, 130))):
        rng = sd.data.generator(0, 0, 30 + i)
        assert batch.t[i] == rng.integers(1000)
        assert (batch.ids[i].tolist() == split.ids[index].tolist()) == (rng.random() >= 0.1)
        assert (batch.noise[i].numpy() == rng.standard_normal((4, 8, 8), np.float32)).all()
        assert (batch.latents[i].numpy() == split.latents(np.array([index]))[0]).all()


def test_seen_tells_positions_and_keys_apart():
    h = sd.data.seen_hash
    assert (h(0, "a") + h(1, "b")) % 2**64 != (h(0, "b") + h(1, "a")) % 2**64
    assert h(1, "1 a") != h(11, "a") and 0 <= h(0, "a") < 2**64


def test_validation_is_fixed_and_stratified():
    split = FakeSplit(300)
    a, b = (validation_batches(split, 200, "val", 0, 1000)[0] for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a[:4], b[:4]))
    assert torch.bincount(a.t * 10 // 1000).tolist() == [20] * 10
    assert len(set(a.latents[:, 0, 0, 0].tolist())) == 200
    other = validation_batches(split, 200, "train", 0, 1000)[0]
    assert not torch.equal(a.noise, other.noise)
    assert len(validation_batches(FakeSplit(5), 200, "val", 0, 1000)[0].t) == 5  # fewer pictures than asked


# --- the loader's thread


def one(p) -> Batch:
    return Batch(*(torch.tensor([p]) for _ in range(4)), p)


def test_prefetcher_gives_all_in_order():
    loader = Prefetcher(one, range(20), torch.device("cpu"))
    assert [loader.next().seen for _ in range(20)] == list(range(20))
    loader.close()


def test_prefetcher_passes_errors_on_and_closes_whatever_waits():
    def make(p):
        if p == 6:
            raise RuntimeError("a bad disk")
        return one(p)

    loader = Prefetcher(make, range(20), torch.device("cpu"))
    assert [loader.next().seen for _ in range(6)] == list(range(6))
    with pytest.raises(RuntimeError, match="a bad disk"):
        loader.next()
    loader.close()
    # closed while the queue is full, and while the error waits behind a full queue
    for positions in (range(20), range(2, 20)):
        loader = Prefetcher(make, positions, torch.device("cpu"))
        time.sleep(0.3)
        closing = threading.Thread(target=loader.close, daemon=True)
        closing.start()
        closing.join(5)
        assert not closing.is_alive()


# --- data that are cut, missing or lying


def damage(path: Path, how: str):
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "cut header": data[:40]}[how])


@pytest.mark.parametrize("how", ["empty", "cut", "cut header"])
@pytest.mark.parametrize("name", ["00001.npy", "00001.parquet"])
def test_cut_latents_are_left_out_and_counted(root, name, how):
    """CASES 24."""
    damage(root / "a/latents" / name, how)
    split = split_of([source(root, "a")])
    assert split.unreadable == 1
    whole = {
        k for n in ("00000", "00002") for k in pq.read_table(root / f"a/latents/{n}.parquet")["image_key"].to_pylist()
    }
    assert set(split.keys.to_pylist()) == {k for k in whole if int(k[-9:]) >= 8}  # the first 8 are held out
    assert split.missing == 60 - len(split) > 0
    assert np.isfinite(split.latents(np.arange(len(split)))).all()


def test_index_of_another_shard_is_left_out(root):
    np.save(root / "a/latents/00001.npy", np.zeros((3, 4, 8, 8), np.float16))
    assert split_of([source(root, "a")]).unreadable == 1


def test_folder_of_single_files(root):
    """A .npy a picture: the same samples as packed; cut and empty files are counted."""
    packed = split_of([source(root, "a")])
    folder = root / "a/latents"
    for path in sorted(folder.glob("*.parquet")):
        array, table = np.load(path.with_suffix(".npy")), pq.read_table(path)
        for key, row in zip(table["image_key"].to_pylist(), table["row"].to_pylist()):
            file = folder / f"{key.removeprefix('a/')}.npy"
            file.parent.mkdir(exist_ok=True)
            np.save(file, array[row])
        path.unlink(), path.with_suffix(".npy").unlink()
    single = split_of([source(root, "a")])
    assert single.keys.to_pylist() == packed.keys.to_pylist()
    assert (single.latents(np.arange(60)) == packed.latents(np.arange(60))).all()
    files = sorted(folder.rglob("*.npy"))
    damage(files[20], "empty"), damage(files[30], "cut")
    assert split_of([source(root, "a")]).unreadable == 2 and len(split_of([source(root, "a")])) == 58


def edited(path: Path, **changes):
    manifest = json.loads(path.read_text())
    for name, value in changes.items():
        manifest.pop(name) if value is None else manifest.update({name: value})
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize("changes", [{"count": 99}, {"vae": None}, {"size": None}, {"complete": False}])
def test_faulty_latent_manifests_are_refused(root, changes):
    edited(root / "a/latents/manifest.json", **changes)
    with pytest.raises(sd.errors.InputError):
        split_of([source(root, "a")])


@pytest.mark.parametrize("content", [None, "", "[]", "{}", "{"])
def test_damaged_manifests_are_refused(root, content):
    for folder in ("latents", "dataset"):
        path = root / "a" / folder / "manifest.json"
        kept = path.read_text()
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(sd.errors.InputError):
            split_of([source(root, "a")])
        path.write_text(kept)
    split_of([source(root, "a")])


def test_lying_dataset_manifests_are_refused(root):
    edited(root / "a/dataset/manifest.json", counts={"train": 61, "val": 8})
    with pytest.raises(sd.errors.InputError, match="61 train rows, and 60 are there"):
        split_of([source(root, "a")])


def test_cut_datasets_are_refused(root):
    damage(root / "a/dataset/train/data.arrow", "cut")
    with pytest.raises(sd.errors.InputError, match="05"):
        split_of([source(root, "a")])


def test_counts_of_draws():
    order = SampleOrder([10, 90], [0.5, 0.5], 0)
    assert Counter((order.epoch(0) < 10).tolist()) == {True: 50, False: 50}


def order_by_definition(order: SampleOrder, e: int) -> np.ndarray:
    """An epoch as SampleOrder's was from the first revision on, whole arrays of 8 bytes a number at a time."""

    def permutation(source: int, epoch: int) -> np.ndarray:
        random, size = generator(order.seed, STREAM_SOURCE + 4 * source, epoch), order.sizes[source]
        if order.windows is None:
            return random.permutation(size)
        tars, at_once = order.windows
        tars = tars[order.offsets[source] : order.offsets[source] + size]
        tars, number = np.unique(tars, return_inverse=True)
        return np.lexsort((random.random(size), random.permutation(len(tars))[number] // at_once))

    times, index = [], []
    for s, (draws, size) in enumerate(zip(order.draws, order.sizes)):
        if draws:
            jitter = generator(order.seed, STREAM_EPOCH + 4 * s, e).random(draws)
            times.append((np.arange(draws) + jitter) / draws)
            first, last = e * draws, (e + 1) * draws
            own = [permutation(s, k) for k in range(first // size, (last - 1) // size + 1)]
            start = first - first // size * size
            index.append(np.concatenate(own)[start : start + draws] + order.offsets[s])
    return np.concatenate(index)[np.argsort(np.concatenate(times), kind="stable")]


@pytest.mark.parametrize("stretch", [1, 40, 1 << 22])
def test_orders_are_those_of_the_first_revision(stretch, monkeypatch):
    """Of one source and several, weighted or not, in windows or not, with tars that lie side by side or not: however
    little of an epoch is sorted at once."""
    monkeypatch.setattr(SampleOrder, "STRETCH", stretch)
    draw = np.random.default_rng(0)
    for case in range(40):
        sizes = [int(n) for n in draw.integers(1, 300, 1 + case % 4)]
        weights = [float(w) for w in draw.random(len(sizes)) + 0.01] if case % 3 else None
        tars = [draw.integers(0, 12, n).astype(np.int32) for n in sizes]
        windows = (np.concatenate([t if case % 5 == 0 else np.sort(t) for t in tars]), 1 + case % 4)
        order = SampleOrder(sizes, weights, case, windows if case % 2 else None)
        for e in (0, 1, 2, 7):
            assert (order.epoch(e) == order_by_definition(order, e)).all()
        assert order.epoch(7).dtype == np.uint32


def test_two_epochs_are_held_in_eight_bytes_a_picture_and_made_in_twenty():
    tracemalloc.start()
    size = 1_000_000
    for windows in (None, (np.repeat(np.arange(1000, dtype=np.int32), 1000), 8)):
        order, before = SampleOrder([size], None, 1, windows), tracemalloc.get_traced_memory()[0]
        order.at(np.arange(5)), order.at(np.arange(size, size + 5))
        held, most = (x - before for x in tracemalloc.get_traced_memory())
        assert held < 8.1 * size and most < 20 * size
        tracemalloc.reset_peak()
        del order
    tracemalloc.stop()
