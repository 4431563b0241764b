"""The drawings of many styles: which pairs are held out, what captions say, tints, the script, and the measure."""

import importlib
import io
import json
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "data_pipeline"), str(ROOT / "demo")]

import sd.errors  # noqa: E402
import sd.pictures  # noqa: E402
import sd.prompts  # noqa: E402
import sd.shards  # noqa: E402
from demo import sampler_steps, silhouettes  # noqa: E402
from sd import drawings, online  # noqa: E402
from sd.where import Where  # noqa: E402

script = importlib.import_module("01i_emoji_styles")
evaluate = importlib.import_module("evaluate_drawings")

THINGS = {  # code, name, group, and what its SVG shows: the shape is the concept's, the ground line the style's
    "1f415": ("dog", "Animals & Nature", '<circle cx="16" cy="16" r="11" fill="#c07830"/>'),
    "1f408": ("cat", "Animals & Nature", '<path d="M4 28 L16 4 L28 28z" fill="#e09020"/>'),
    "1f697": ("automobile", "Travel & Places", '<rect x="2" y="10" width="28" height="12" fill="#d03028"/>'),
    "1f355": ("pizza", "Food & Drink", '<path d="M4 6 H28 L16 29z" fill="#e8b830"/>'),
    "1f511": ("key", "Objects", '<rect x="13" y="2" width="6" height="28" fill="#3060d0"/>'),
    "1f3e0": ("house", "Travel & Places", '<path d="M2 16 L16 3 L30 16 V30 H2z" fill="#30a050"/>'),
    "1f477-1f3fb": ("construction-worker-light-skin-tone", "People & Body", '<rect width="30" height="30"/>'),
    "1f1eb-1f1f7": ("flag-france", "Flags", '<rect width="29" height="30"/>'),
    "1f468-200d-1f373": ("man-cook", "People & Body", '<rect width="28" height="30"/>'),
    "1f983": ("turkey-bird", "Animals & Nature", '<rect x="9" y="3" width="14" height="20" fill="#8040a0"/>'),
    "1f519": ("back-arrow", "Symbols", '<rect width="27" height="30"/>'),
}


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder of small .tgz files in the layout of the npm packages; each set draws in a line width of its own."""
    folder = tmp_path_factory.mktemp("packages")
    for number, package in enumerate([*script.PACKAGES, script.SILHOUETTES]):
        files = {}
        if package.startswith("@lobehub"):
            import cv2

            rgba = np.zeros((256, 256, 4), np.uint8)
            cv2.circle(rgba, (128, 128), 100, (40, 120, 190, 255), -1)
            files["assets/1f415.webp"] = cv2.imencode(".webp", rgba)[1].tobytes()
        else:
            line = f'<rect x="2" y="29" width="{number + 5}" height="2" fill="#000"/>'
            icons = {name: {"body": body + line} for name, _, body in THINGS.values()}
            icons["turkey"] = {"body": '<rect width="31" height="20" fill="#f00"/>'}  # the flag, without code point
            codes = {code: name for code, (name, _, _) in THINGS.items()}
            groups: dict = {}
            for name, group, _ in THINGS.values():
                groups.setdefault(group, []).append(name)
            groups["Flags"].append("turkey")
            content = {"prefix": "x", "icons": icons, "width": 32, "height": 32}
            for name, value in (("icons", content), ("chars", codes), ("metadata", {"categories": groups})):
                files[f"{name}.json"] = json.dumps(value).encode()
        with tarfile.open(folder / script.tgz_name(package), "w:gz") as tar:
            for name, data in files.items():
                info = tarfile.TarInfo(f"package/{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return folder


def run(monkeypatch, main, *argv: str) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *map(str, argv)])
    sd.errors.run(main)


@pytest.fixture(scope="module")
def shards(packages, tmp_path_factory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        out = tmp_path_factory.mktemp("made") / "drawings"
        run(patch, script.main, "--packages", packages, "--out", out, "--size", "64", "--shard_size", "30")
    return out / "images"


def rows_of(shards: Path) -> list[dict]:
    return [row for path in sorted(shards.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


# ---------------------------------------------------------------------------------------------------------------------
# The rules


def test_three_styles_of_a_concept_always_remain():
    shares = []
    for number in range(2000):
        styles = list(drawings.STYLES)[: 2 + number % 9]
        held = drawings.held_styles(f"thing {number}", styles)
        assert held <= set(styles)
        assert len(held) <= max(0, len(styles) - 3)
        assert held == drawings.held_styles(f"thing {number}", reversed(styles))  # the order does not matter
        if {"fluent", "fluent_flat"} <= set(styles):  # near copies of each other
            assert ("fluent" in held) == ("fluent_flat" in held)
        if len(styles) == 10:
            shares.append(len(held) / 10)
    assert abs(np.mean(shares) - drawings.HELD_STYLES) < 0.02


def test_held_pairs_never_change():
    """Values of the hash rule at its first release: others would make old held-out lists worthless."""
    assert drawings.fraction("style", "owl", "noto") == pytest.approx(0.41760884182665237, abs=1e-12)
    colours = [c for c in drawings.TINTS if drawings.held_colour("dog", c)]
    assert colours == ["purple"]
    assert not drawings.held_colour("dog", "white") and not drawings.held_colour("dog", "")
    assert drawings.held_scene("cat", "dog") == drawings.held_scene("dog", "cat")
    held = np.mean([drawings.held_colour(f"t{i}", c) for i in range(1000) for c in drawings.TINTS])
    assert abs(held - 0.15) < 0.02


def test_split_says_val_for_each_reason():
    name = "dog"
    held_colour = "purple"
    free = next(c for c in drawings.TINTS if not drawings.held_colour(name, c))
    assert drawings.split(name, "noto", "white", "", set()) == "train"
    assert drawings.split(name, "noto", "white", "", {"noto"}) == "val"
    assert drawings.split(name, "noto", free, "", {"noto"}) == "val"
    assert drawings.split(name, "noto", "white", held_colour, set()) == "val"
    assert drawings.split(name, "noto", held_colour, "", set()) == "val"
    assert drawings.split(name, "noto", "white", free, set()) == "train"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("owl", "an owl"), ("unicorn", "a unicorn"), ("glasses", "glasses"), ("bus", "a bus"), ("cactus", "a cactus"),
     ("compass", "a compass"), ("orange dog", "an orange dog"), ("blue scissors", "blue scissors"),
     ("ukulele", "a ukulele"), ("hourglass", "an hourglass"), ("rhinoceros", "a rhinoceros"), ("fire", "fire")],
)  # fmt: skip
def test_articles(name, wanted):
    assert drawings.with_article(name) == wanted


def test_captions_say_what_is_seen():
    made = drawings.captions(["automobile", "car"], "openmoji", "blue", "")
    assert made[0] == "automobile, ink outline drawing, blue background"
    assert all("blue background" in caption for caption in made)
    assert any("car" in caption.split() for caption in made[1:]) and len(set(made)) == 5
    tinted = drawings.captions(["dog"], "fluent", "white", "orange")
    assert tinted[0] == "orange dog, 3d render"
    assert all("orange dog" in caption for caption in tinted)
    assert "3d render of an orange dog" in tinted
    assert 0 < sum("white background" in caption for caption in tinted) < len(tinted)


def test_scene_captions_keep_their_places():
    made = drawings.scene_captions("cat", "owl", "left", "noto", "red")
    assert made[0] == "a cat to the left of an owl, shaded cartoon, on a red background"
    assert made[1].startswith("an owl to the right of a cat")
    made = drawings.scene_captions("cat", "owl", "above", "noto")
    assert made[0] == "a cat above an owl, shaded cartoon" and made[1].startswith("an owl below a cat")
    assert not any("next to" in caption for caption in made)


def blob(colour: tuple[int, int, int], second: tuple[int, int, int] | None = None) -> np.ndarray:
    """A disc, RGBA [64, 64, 4], with a black outline, and a small part of a second colour."""
    y, x = np.mgrid[:64, :64] - 31.5
    radius = np.hypot(x, y)
    rgba = np.zeros((64, 64, 4), np.uint8)
    rgba[radius < 28] = (10, 10, 10, 255)
    rgba[radius < 25] = (*colour, 255)
    if second is not None:
        rgba[(radius < 25) & (y < -14)] = (*second, 255)
    return rgba


@pytest.mark.parametrize("word", list(drawings.TINTS))
def test_a_tint_is_what_its_word_says(word):
    for brown in ((190, 130, 80), (215, 40, 45), (90, 60, 40)):
        tinted = drawings.tint_drawing(blob(brown, (60, 160, 70)), word)
        if word == "green" and tinted is None:
            continue
        red, green, blue = tinted[40, 32, :3].astype(int)
        assert {
            "red": red > 150 and max(green, blue) < 110,
            "orange": red > 200 and 90 < green < 200 and blue < 110,
            "yellow": red > 190 and green > 170 and blue < 130,
            "green": green > red + 30 and green > blue + 30,
            "blue": blue > red + 80 and blue > 150,
            "purple": blue > 120 and red > 80 and green < min(red, blue) - 20,
            "pink": red > 200 and green < 190 and blue > 130,
        }[word], (word, red, green, blue)
        assert (tinted[..., 3] == blob(brown)[..., 3]).all()
        assert tinted[4, 32, :3].max() < 40 or tinted[4, 32, 3] == 0  # the outline stays black
        if brown == (215, 40, 45):
            assert np.abs(tinted[12, 32, :3].astype(int) - (60, 160, 70)).max() < 12  # the leaf stays green


def test_what_has_no_main_colour_is_not_tinted():
    assert drawings.tint_drawing(blob((200, 200, 202)), "blue") is None
    rainbow = blob((215, 40, 45))
    for i in range(64):
        hue = np.array([[[i * 5.6, 1.0, 1.0]]], np.float32)
        import cv2

        rainbow[:, i, :3] = (cv2.cvtColor(hue, cv2.COLOR_HSV2RGB)[0, 0] * 255).astype(np.uint8)
    assert drawings.tint_drawing(rainbow, "blue") is None


def test_a_drawing_must_stand_out_from_its_background():
    red = blob((215, 40, 45))
    assert drawings.stands_out(red, drawings.BACKGROUNDS["blue"])
    assert not drawings.stands_out(red, drawings.BACKGROUNDS["black"])  # its outline would vanish
    assert not drawings.stands_out(red, drawings.BACKGROUNDS["red"])  # its inside would


def test_place_puts_the_middle_where_it_was_asked_for():
    for turn, side in ((0.0, 0.4), (10.0, 0.4), (0.0, 0.9), (7.0, 0.15)):
        canvas = drawings.canvas(96, "white")
        drawings.place(drawings.crop(blob((215, 40, 45))), canvas, (0.5, 0.35), side, turn)
        rows, columns = np.nonzero((canvas < 128).any(2))
        assert (columns.min() + columns.max() + 1) / 2 / 96 == pytest.approx(0.5, abs=0.012)
        if side < 0.7:
            assert (rows.min() + rows.max() + 1) / 2 / 96 == pytest.approx(0.35, abs=0.012)
        assert (columns.max() - columns.min() + 1) / 96 == pytest.approx(side, abs=0.03)


# ---------------------------------------------------------------------------------------------------------------------
# The script


def test_which_drawings_are_taken(packages):
    found = script.find_drawings(packages)
    assert {d.concept for d in found} == {"dog", "cat", "automobile", "pizza", "key", "house", "turkey"}
    assert {d.style for d in found if d.concept == "dog"} == set(drawings.STYLES)
    assert all("#f00" not in d.body for d in found if d.concept == "turkey")  # a bird, never the flag of that name
    assert sum(d.concept == "dog" for d in found) == 11  # two packages are of one style
    assert all(
        len({d.style for d in found if d.concept == c} - h) >= 3 for c, h in {d.concept: d.held for d in found}.items()
    )
    assert next(d for d in found if d.concept == "automobile").names == ["automobile", "car"]
    assert [(d.concept, d.package) for d in found] == [(d.concept, d.package) for d in script.find_drawings(packages)]


def test_names_of_sets_that_mean_something_else():
    assert script.MEANT["@iconify-json/fxemoji"]["cat"] == "cat face"
    assert script.squeeze("Piñata-2 x") == "pinata2x"
    assert not script.is_wanted("1f3c3-200d-2642", "man running", "People & Body")
    assert script.is_wanted("1f3c3", "person running", "People & Body")
    assert not script.is_wanted("1f550", "one o'clock", "Travel & Places")
    assert not script.is_wanted("31-20e3", "keycap: 1", "Symbols")
    assert script.is_wanted("23f0", "alarm clock", "Travel & Places")
    assert script.is_wanted("1f3f4-200d-2620", "pirate flag", "Flags")


def test_nothing_of_a_held_out_pair_is_trained(packages, shards):
    rows = rows_of(shards)
    held = {d.concept: d.held for d in script.find_drawings(packages)}
    assert {row["kind"] for row in rows} == set(script.KINDS)
    for row in rows:
        concepts = [row["concept"]] + ([row["other"]] if row["other"] else [])
        for concept in concepts:
            if row["split"] == "train" or row["kind"] == "scene":
                assert row["style"] not in held[concept]
            if row["split"] == "train":
                assert not drawings.held_colour(concept, row["background"])
                for tint in drawings.TINTS:
                    if f"{tint} {concept}" in row["captions"][0]:
                        assert not drawings.held_colour(concept, tint)
        if row["kind"] == "scene":
            assert (row["split"] == "val") == drawings.held_scene(*concepts)
        else:
            wanted = drawings.split(row["concept"], row["style"], row["background"], row["tint"], held[row["concept"]])
            assert row["split"] == wanted
    val = {(row["concept"], row["style"]) for row in rows if row["kind"] == "plain" and row["split"] == "val"}
    assert val == {(c, s) for c, styles in held.items() for s in styles}


def test_shards_are_in_the_project_s_form(shards):
    manifest = json.loads((shards / "manifest.json").read_text())
    rows = rows_of(shards)
    assert manifest["complete"] and manifest["pictures"] == len(rows) == sum(manifest["counts"]["kind"].values())
    assert manifest["settings"]["packages"]["@iconify-json/openmoji"]["licence"] == "CC-BY-SA-4.0"
    by_key = {row["key"]: row for row in rows}
    seen = 0
    for tar in sorted(shards.glob("*.tar")):
        for key, sample in sd.shards.iter_samples(tar):
            row = by_key[key]
            assert sample["txt"] == row["captions"][0] == sample["json"]["captions"][0]
            assert sample["json"]["split"] == row["split"] in ("train", "val")
            assert sample["json"]["licence"] == script.PACKAGES[row["package"]][2]
            image = sd.pictures.decode_image(sample["image"])
            assert image.shape == (64, 64, 3)
            corner = drawings.nearest_background(image[0, 0])
            assert corner == row["background"] or row["kind"] in ("scene", "jitter")
            if row["tint"]:
                mask, _ = evaluate.find_thing(image)
                assert drawings.colour_of(drawings.to_lab(image)[mask]) == row["tint"]
            seen += 1
    assert seen == len(rows)


def test_another_size_shows_the_same_things_under_the_same_keys(packages, shards, tmp_path, monkeypatch):
    """Latents of both sizes are found by these keys, and share one dataset of captions. A drawing whose edge a
    background hides at one size and not at another must not shift the rest."""
    small = drawings.stands_out

    def moody(rgba, background):  # decides by the size that it is shown
        return small(rgba, background) and len(rgba) % 3 != sum(background) % 3

    monkeypatch.setattr(drawings, "stands_out", moody)
    made = []
    for size in (32, 96):
        run(
            monkeypatch, script.main, "--packages", packages, "--out", tmp_path / str(size) / "drawings", "--size", size
        )
        made.append(
            [(r["key"], r["captions"], r["split"]) for r in rows_of(tmp_path / str(size) / "drawings" / "images")]
        )
    assert made[0] == made[1] and len(made[0]) > 50


def test_scenes_stand_as_their_captions_say(shards):
    hues = {"dog": "brown", "automobile": "red", "key": "blue", "house": "green"}
    tried = 0
    for tar in sorted(shards.glob("*.tar")):
        for _, sample in sd.shards.iter_samples(tar):
            row = sample["json"]
            if row["kind"] != "scene" or row["concept"] not in hues or row["other"] not in hues:
                continue
            if any(drawings.COLOUR_NAMES.search(c.split(", on a")[0]) for c in row["captions"]):
                continue  # one of them is tinted
            image = sd.pictures.decode_image(sample["image"])
            for half, name in zip(evaluate.halves(image, row["relation"]), (row["concept"], row["other"])):
                mask, _ = evaluate.find_thing(half)
                word = drawings.colour_of(drawings.to_lab(half)[mask])
                assert word == hues[name] or (name == "dog" and word == "orange"), (row["captions"][0], name, word)
            tried += 1
    assert tried >= 3


def test_two_runs_give_the_same_bytes_and_go_on_after_a_stop(packages, shards, tmp_path, monkeypatch):
    out = tmp_path / "again"
    arguments = ("--packages", packages, "--out", out, "--size", "64", "--shard_size", "30")
    run(monkeypatch, script.main, *arguments)
    first = sorted(shards.glob("*.tar"))[0]
    again = out / "images" / first.name
    assert again.read_bytes() == first.read_bytes()
    again.unlink()  # as if it had been stopped there
    others = {p: p.stat().st_mtime_ns for p in (out / "images").glob("*.tar")}
    run(monkeypatch, script.main, *arguments)
    assert again.read_bytes() == first.read_bytes()
    assert all(p.stat().st_mtime_ns == time for p, time in others.items())
    assert (out / "images/manifest.json").read_bytes() == (shards / "manifest.json").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to do"),
        (["--packages", "{none}", "--out", "{out}"], "run this script with --fetch"),
        (["--packages", "{none}", "--out", "{out}", "--size", "8"], "--size must be at least 32"),
        (["--packages", "{none}", "--fetch"], "npm is not installed"),
    ],
)
def test_bad_input_ends_in_one_sentence(arguments, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    places = {"none": tmp_path / "none", "out": tmp_path / "out"}
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, script.main, *[a.format(**places) for a in arguments])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and words in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_silhouettes_are_held_out_as_their_order_says(packages, tmp_path, monkeypatch, capsys):
    """What training holds out is what the JSON says, whichever number of pictures is trained on."""
    monkeypatch.setattr(script, "TRAINED", 2)
    out = tmp_path / "silhouettes"
    run(monkeypatch, script.main, "--packages", packages, "--silhouettes", out, "--size", "64")
    facts = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json") if path.stem != "manifest"}
    things = {"dog", "cat", "automobile", "pizza", "key", "house", "turkey"}  # no people, flags, symbols
    assert facts.keys() < things and len(facts) == 6  # of three on that side two are taken
    trained = {name: fact["order"] for name, fact in facts.items() if fact["order"]}
    held = facts.keys() - trained.keys()
    assert sorted(trained.values()) == [1, 2] and len(held) == 4
    assert all((out / f"{n}.txt").read_text() == f"{f['concept']}, black silhouette\n" for n, f in facts.items())
    assert all(f["licence"] == "MIT" and f["package"] == script.SILHOUETTES for f in facts.values())
    assert sd.pictures.read_picture(str(out / f"{min(held)}.png")).shape == (64, 64, 3)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["complete"] and manifest["settings"]["version"] == "1.2.6"
    assert manifest["counts"] == {"held out": len(held), "trained": len(trained)}

    settings = dict(caption=None, captions=None, caption_encoding=None, masks=False, index=str(tmp_path / "index"),
                    cache=None, cache_gib=1, window=0, strict=True)  # fmt: skip
    for most in (1, 2):
        _, index = online.indexed(str(out), settings, [], Where(f"order<={most}"), 1, lambda *_: None)
        sides = [set(), set()]
        for key, val in zip(index.table["key"].to_pylist(), online.held_out(index.table, 0.5)):
            sides[int(val)].add(Path(key).stem)
        assert sides == [{name for name, order in trained.items() if order <= most}, held]

    with pytest.raises(SystemExit):
        run(monkeypatch, script.main, "--packages", packages, "--silhouettes", out, "--size", "32")
    assert "was made with size = 64" in capsys.readouterr().err


def test_packages_that_are_all_there_are_fetched_without_npm(packages, monkeypatch, capsys):
    monkeypatch.setattr(script.shutil, "which", lambda name: None)
    before = sorted(path.name for path in packages.iterdir())
    run(monkeypatch, script.main, "--packages", packages, "--fetch")
    assert sorted(path.name for path in packages.iterdir()) == before and capsys.readouterr().err == ""


def test_a_damaged_package_is_named(packages, tmp_path, monkeypatch, capsys):
    for path in packages.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    hurt = tmp_path / script.tgz_name("@iconify-json/noto")
    hurt.write_bytes(hurt.read_bytes()[:200])
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, script.main, "--packages", tmp_path, "--out", tmp_path / "out")
    assert stop.value.code == 2 and "noto-1.2.9.tgz" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# The measure


def test_cut_out_does_not_see_the_background_or_the_place():
    thing = blob((215, 40, 45))
    made = []
    for ground, centre, side in (("white", (0.5, 0.5), 0.9), ("blue", (0.4, 0.45), 0.6), ("yellow", (0.6, 0.6), 0.5)):
        canvas = drawings.canvas(128, ground)
        drawings.place(drawings.crop(thing), canvas, centre, side)
        made.append(evaluate.cut_out(canvas, 64).astype(int))
    assert np.abs(made[0] - made[1]).mean() < 6 and np.abs(made[0] - made[2]).mean() < 6


def test_halves_follow_the_relation():
    image = np.zeros((8, 8, 3), np.uint8)
    image[:, 4:] = 10
    image[4:] += 100
    for relation, first, second in (("left", 0, 10), ("right", 10, 0), ("above", 0, 100), ("below", 100, 0)):
        a, b = evaluate.halves(image, relation)
        assert a[0, 0, 0] == first and b[0, 0, 0] == second


def test_classifier_and_retrieval_rank_by_right_answers():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=(20, 64))
    names = [f"n{i}" for i in range(20)]
    train = np.concatenate([truth + 0.3 * rng.normal(size=truth.shape) for _ in range(5)])
    classifier = evaluate.Classifier(train, names * 5)
    new = truth + 0.3 * rng.normal(size=truth.shape)
    assert (classifier.ranks(new, names) == 0).all()
    assert (classifier.ranks(new, names[1:] + names[:1]) > 0).all()
    assert (classifier.ranks(new[:2], ["unknown", "n1"]) == [20, 0]).all()
    assert evaluate.hits(np.array([0, 1, 4, 9]), 1, 5) == {"top1": 0.25, "top5": 0.75}
    assert (evaluate.retrieval(new, truth) == 0).all()
    assert (evaluate.retrieval(np.roll(new, 1, 0), truth) > 0).all()


class Colours:
    """Stands for the network: 8 x 8 pixels of what is cut out."""

    def __init__(self, *_):
        pass

    def __call__(self, images):
        small = [evaluate.cut_out(image, 8).reshape(-1) / 255 for image in images]
        x = np.array(small, np.float32).reshape(len(images), -1)
        return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_prompts_ask_for_what_is_held_out_and_the_generator_reads_them(shards, tmp_path, monkeypatch):
    path = tmp_path / "prompts.jsonl"
    run(monkeypatch, evaluate.main, "--data", shards, "--write_prompts", path)
    prompts = evaluate.read_prompts(str(path))
    pairs = {(r["concept"], r["style"]): r["split"] for r in rows_of(shards) if r["kind"] == "plain"}
    held = [p for p in prompts if p["test"] == "held_out"]
    assert {(p["concept"], p["style"]) for p in held} == {pair for pair, split in pairs.items() if split == "val"}
    assert all(pairs[p["concept"], p["style"]] == "train" for p in prompts if p["test"] == "trained")
    assert all(drawings.held_scene(p["concept"], p["other"]) for p in prompts if p["test"] == "scene")
    assert {p["tint"] for p in prompts if p["test"] == "colour"} == set(drawings.TINTS)
    assert {p["background"] for p in prompts if p["test"] == "background"} == set(drawings.BACKGROUNDS)
    assert len({p["seed"] for p in prompts}) == len(prompts)

    jobs = sd.prompts.read_prompts(path)
    assert [(j["prompt"], j["seed"]) for j in jobs] == [(p["prompt"], p["seed"]) for p in prompts]


def test_measuring_real_pictures_and_a_whole_run(shards, tmp_path, monkeypatch):
    from PIL import Image

    monkeypatch.setattr(evaluate, "Extractor", Colours)
    world = evaluate.World(shards, Colours(), tmp_path / "features.npz")
    kept = (tmp_path / "features.npz").stat().st_mtime_ns
    assert np.array_equal(evaluate.World(shards, Colours(), tmp_path / "features.npz").features, world.features)
    assert (tmp_path / "features.npz").stat().st_mtime_ns == kept  # the second time they were read
    prompts = evaluate.make_prompts(world.rows)
    images = evaluate.real_as_painted(world, prompts)
    shown = [(p, i) for p, i in zip(prompts, images) if i is not None]
    figures = evaluate.measure(world, [p for p, _ in shown], [i for _, i in shown])
    assert figures["background"]["right"] == 1 and figures["colour"]["right"] > 0.9
    assert figures["trained"]["top1"] > 0.9
    assert figures["names"]["of_all"]["top1"] > 0.9
    assert figures["held_out"]["top1"] == figures["held_out"]["reference_other_style"]["top1"]

    folder, asked = tmp_path / "painted", tmp_path / "asked.jsonl"
    folder.mkdir()
    asked.write_text("".join(json.dumps(p) + "\n" for p, _ in shown))
    for i, (_, image) in enumerate(shown):
        Image.fromarray(image).save(folder / f"{i:05d}.png")
    out = tmp_path / "out"
    arguments = ("--data", shards, "--prompts", asked, "--images", folder, "--out", out)
    run(monkeypatch, evaluate.main, *arguments)
    assert json.loads((out / "figures.json").read_text()) == json.loads(json.dumps(figures))
    assert Image.open(out / "colour.png").width == 6 + 134 * 10
    (folder / "00000.png").unlink()
    with pytest.raises(SystemExit) as stop:
        run(monkeypatch, evaluate.main, *arguments)
    assert stop.value.code == 2


# ---------------------------------------------------------------------------------------------------------------------
# Samplers and their steps


def test_the_fewest_steps_are_those_from_which_on_nothing_is_lost():
    def at(**top1):
        return {n[1:]: {"top1": p, "top5": p, "of": 100, "chance": 0.01} for n, p in top1.items()}

    # of .5 the standard error is .05: .4 is just within two of it, .39 is not (its own error is .0488)
    assert sampler_steps.fewest(at(_5=0.1, _8=0.405, _10=0.45, _20=0.5), 0.5) == 8
    assert sampler_steps.fewest(at(_5=0.1, _8=0.39, _10=0.45, _20=0.5), 0.5) == 10
    assert sampler_steps.fewest(at(_5=0.5, _8=0.2, _10=0.45), 0.5) == 10  # a lucky five does not count
    assert sampler_steps.fewest(at(_5=0.1, _50=0.2), 0.5) is None
    table = {"ema": {"heun": at(_5=0.1, _10=0.5)}, "live": {"heun": at(_10=0.2)}}
    text = sampler_steps.as_markdown(table, None)
    assert "| ema | heun | 0.100 / 0.100 | 0.500 / 0.500 | 10 |" in text
    assert "| live | heun |  | 0.200 / 0.200 | more |" in text


def test_pictures_are_painted_and_measured_once_for_each_sampler_and_number_of_steps(shards, tmp_path, monkeypatch):
    """With a painter that knows the real drawings: from 10 steps on it paints what is asked for, before something
    else, with live weights always something else."""
    from PIL import Image

    rows, asked = rows_of(shards), tmp_path / "prompts.jsonl"
    prompts = evaluate.make_prompts(evaluate.read_rows(shards))
    asked.write_text("".join(json.dumps(p) + "\n" for p in prompts))
    held = [p for p in prompts if p["test"] == "held_out"]
    pairs = evaluate.plain_pairs(evaluate.read_rows(shards))
    real = evaluate.read_pictures([pairs[p["concept"], p["style"]] for p in held])
    assert len(rows) > len(held) > 5
    painted, calls = [], []

    def paint_folder(folder, model, source, how, place):
        painted.append((how.weights, how.sampler, how.steps))
        assert how.prompts == tuple(p["prompt"] for p in held) and how.cfg == 5 and how.size == 64
        assert [how.seed + i for i in range(how.n)] == [p["seed"] for p in held]
        folder.mkdir(exist_ok=True)
        right = how.steps >= 10 and how.weights == "ema"
        for i in range(how.n):
            Image.fromarray(real[i if right else (i + 1) % len(real)]).save(folder / f"{i:06d}.png")

    class Model:
        found, size = "a model", 64

    plain = sampler_steps.measure
    monkeypatch.setattr(sampler_steps, "measure", lambda *a, **k: calls.append(k) or plain(*a, **k))
    monkeypatch.setattr(sampler_steps, "paint_folder", paint_folder)
    monkeypatch.setattr(sampler_steps, "open_model", lambda *_: Model())
    monkeypatch.setattr(sampler_steps, "Extractor", Colours)
    out = tmp_path / "out"
    argv = ["--model", "x", "--prompts", str(asked), "--data", str(shards), "--out", str(out), "--device", "cpu",
            "--samplers", "ddim", "heun", "--steps", "10", "5", "--weights", "ema", "live"]  # fmt: skip
    sampler_steps.main(argv)
    table = json.loads((out / "table.json").read_text())
    assert len(painted) == len(set(painted)) == 8 == len(calls)
    for sampler in ("ddim", "heun"):
        assert table["ema"][sampler]["10"]["top1"] == 1 and table["ema"][sampler]["5"]["top1"] == 0
        assert table["live"][sampler]["10"]["top1"] == 0
        assert table["ema"][sampler]["10"]["of"] == len(held)
        assert f"| ema | {sampler} | 0.000 / " in (out / "table.md").read_text()
    assert (out / "table.md").read_text().count("| 10 |") == 2
    sampler_steps.main(argv)
    assert len(calls) == 8 and table == json.loads((out / "table.json").read_text())  # measured once
    asked.write_text(json.dumps(prompts[-1]) + "\n")
    with pytest.raises(sd.errors.InputError, match="0 held-out prompts"):
        sampler_steps.main(argv)


def test_black_on_white_is_what_it_says():
    def with_square(ground, thing, side=40):
        image = np.full((64, 64, 3), ground, np.uint8)
        image[12 : 12 + side, 12 : 12 + side] = thing
        return image

    right = with_square(255, 0)
    assert silhouettes.is_black_on_white(right)
    assert not silhouettes.is_black_on_white(with_square(255, (20, 10, 110)))  # dark, and blue
    assert not silhouettes.is_black_on_white(with_square(255, 130))  # is grey
    assert not silhouettes.is_black_on_white(255 - right)  # white on black
    assert not silhouettes.is_black_on_white(with_square(255, 0, side=3))  # hardly anything
    assert silhouettes.is_black_on_white(np.clip(right.astype(int) + 8, 0, 250).astype(np.uint8))  # as a VAE gives it


def test_the_checkpoint_of_the_lowest_held_out_loss_is_painted_with(tmp_path):
    rows = [(10, "ema", "val", 3.0), (20, "ema", "val", 1.0), (20, "ema", "train", 9.0), (30, "ema", "val", 2.0),
            (40, "live", "val", 0.5), (40, "ema", "val", 2.5)]  # fmt: skip
    rows = [{"step": s, "weights": w, "split": p, "loss": loss, "images": s} for s, w, p, loss in rows]
    (tmp_path / "validation.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert silhouettes.best_checkpoint(tmp_path) == tmp_path  # a model, or a run without checkpoints
    for step in (10, 30, 40):  # that of 20 is gone
        (tmp_path / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    assert silhouettes.best_checkpoint(tmp_path).name == "step_00000030"
