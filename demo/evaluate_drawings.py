r"""Measures whether painted drawings show what their prompts ask for, against real drawings that training never saw.

    pip install -r requirements-data.txt
    python demo/evaluate_drawings.py --data data/drawings/images --write_prompts prompts.jsonl
    python SD_ImageGen.py --model runs/drawings --prompts_file prompts.jsonl --sampler dpmpp_2m --steps 20 --cfg 5 \
        --out painted
    python demo/evaluate_drawings.py --data data/drawings/images --prompts prompts.jsonl --images painted --out measured
    python demo/evaluate_drawings.py --data data/drawings/images --check              # is the measuring itself right?

--data is what 01i_emoji_styles.py wrote. What is measured, each with what real drawings reach and what chance gives:

    held_out     300 pairs of a concept and a style that training never saw: is the real drawing of that pair the
                 nearest of the 300 (top 1, top 5)? Reference: a real drawing of that concept in another style as query.
    trained      the same for 100 trained pairs
    names        40 things that everyone can name in two styles: does a classifier of real drawings say the name, out of
                 all concepts and out of the 40? Its own accuracy is that on real held-out pairs.
    colour       'a blue dog': is the thing's colour called so? By classical vision.
    background   'on a blue background': is the border's colour that?
    scene        two things that were never seen together: does the classifier name both, each in its place?
    copies       how near painted held-out pairs are to the nearest training picture, and how near the real ones are

Features are those of EfficientNet-lite0 (ImageNet) of the thing alone, cut out, on white. Writes measured/figures.json
and a labelled grid of pictures of each test.
"""

import hashlib
import json
import sys
import tarfile
from collections import defaultdict
from pathlib import Path

import cv2
import numpy as np
import pyarrow.parquet as pq
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sd import drawings  # noqa: E402
from sd.cli import parser  # noqa: E402
from sd.errors import InputError, run  # noqa: E402
from sd.files import atomic_path, atomic_write, list_files, make_folder  # noqa: E402
from sd.pictures import decode_image, grid, read_numbered  # noqa: E402
from sd.workers import progress  # noqa: E402

SIDE = 224  # pixels that EfficientNet-lite0 sees
SHOWN = 128  # pixels a side of the pictures in grids
TESTS = {"held_out": 300, "trained": 100, "names": 80, "colour": 70, "background": 90, "scene": 32}  # prompts of each
NAME_STYLES = ("fluent", "openmoji")
COLUMNS = ("key", "concept", "style", "background", "tint", "kind", "split", "package")
NEAR = 0.05  # root mean square difference, of 0 to 1 at 32 px, below which a picture counts as a copy


# ---------------------------------------------------------------------------------------------------------------------
# Real drawings


def read_rows(folder: Path) -> list[dict]:
    """What is known of each picture of the shards, with its tar."""
    rows = []
    for path in list_files(str(folder), ".parquet"):
        if missing := set(COLUMNS) - set(pq.read_schema(path).names):
            raise InputError(f"{path} has no column {sorted(missing)[0]}: give a folder that 01i_emoji_styles.py wrote")
        tar = path.with_suffix(".tar")
        rows += [{**row, "tar": str(tar)} for row in pq.read_table(path, columns=list(COLUMNS)).to_pylist()]
    return rows


def read_pictures(rows: list[dict]) -> list[np.ndarray]:
    """The pictures of some rows, RGB uint8 [H, W, 3], in their order."""
    wanted = defaultdict(list)
    for place, row in enumerate(rows):
        wanted[row["tar"]].append(place)
    pictures: list = [None] * len(rows)
    for path, places in wanted.items():
        with tarfile.open(path) as tar:
            for place in places:
                data = tar.extractfile(f"{rows[place]['key']}.png").read()
                pictures[place] = decode_image(data)
    return pictures


def plain_pairs(rows: list[dict]) -> dict[tuple[str, str], dict]:
    """The row of the plain picture of each (concept, style); of several drawings in a style, the first package's."""
    pairs: dict = {}
    for row in sorted((r for r in rows if r["kind"] == "plain"), key=lambda r: r["package"], reverse=True):
        pairs.setdefault((row["concept"], row["style"]), row)
    return pairs


# ---------------------------------------------------------------------------------------------------------------------
# Prompts


def make_prompts(rows: list[dict]) -> list[dict]:
    """The prompts of all tests, in a fixed order, each with what it asks for and a seed of its own."""
    pairs = plain_pairs(rows)
    made = []

    def add(test: str, prompt: str, **asked) -> None:
        empty = {"style": "", "background": "white", "tint": "", "other": "", "relation": ""}
        made.append({"prompt": prompt, "seed": 1000 + len(made), "test": test, **empty, **asked})

    def ask(test: str, concept: str, style: str, background: str = "white", tint: str = "") -> None:
        prompt = drawings.captions([concept], style, background, tint)[0]
        add(test, prompt, concept=concept, style=style, background=background, tint=tint)

    for test, split in (("held_out", "val"), ("trained", "train")):
        chosen = [pair for pair, row in pairs.items() if row["split"] == split]
        chosen.sort(key=lambda pair: drawings.fraction("prompts", *pair))
        for concept, style in chosen[: TESTS[test]]:
            ask(test, concept, style)
    known = [name for name in drawings.FAMILIAR if any((name, style) in pairs for style in NAME_STYLES)]
    for name in known:
        for style in NAME_STYLES:
            ask("names", name, style)
    plain_names = [n for n in known if not drawings.COLOUR_NAMES.search(n) and n not in ("rainbow", "fire", "snowman")]
    for test, words in (("colour", list(drawings.TINTS)), ("background", list(drawings.BACKGROUNDS))):
        for i in range(TESTS[test] if plain_names else 0):
            word, name = words[i % len(words)], plain_names[(7 * i + i // len(words)) % len(plain_names)]
            style = NAME_STYLES[i // len(words) % 2] if word != "black" else "fluent"  # ink cannot be seen on black
            ask(test, name, style, **({"tint": word} if test == "colour" else {"background": word}))
    unseen = [(a, b) for i, a in enumerate(known) for b in known[i + 1 :] if drawings.held_scene(a, b)]
    unseen.sort(key=lambda pair: drawings.fraction("prompts", *pair))
    for i, (a, b) in enumerate(unseen[: TESTS["scene"]]):
        relation, style = drawings.RELATIONS[i % 4], NAME_STYLES[i // 4 % 2]
        prompt = drawings.scene_captions(a, b, relation, style)[0]
        add("scene", prompt, concept=a, other=b, relation=relation, style=style)
    return made


def read_prompts(path: str) -> list[dict]:
    """The prompts of a JSONL file that --write_prompts wrote."""
    try:
        prompts = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read prompts from {path} ({error}): write them with --write_prompts {path}") from None
    if not prompts or not all(isinstance(p, dict) and p.get("test") in TESTS and "concept" in p for p in prompts):
        raise InputError(
            f"{path} should hold lines of JSON with prompt, test and concept: write it with --write_prompts"
        )
    return prompts


# ---------------------------------------------------------------------------------------------------------------------
# Seeing


def find_thing(image: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(mask bool [H, W] of what is not background, the background's colour RGB [3]) of a picture on a plain ground."""
    ring = max(1, round(min(image.shape[:2]) / 32))
    edge = np.ones(image.shape[:2], bool)
    edge[ring:-ring, ring:-ring] = False
    background = np.median(image[edge], axis=0)
    distance = np.linalg.norm(drawings.to_lab(image) - drawings.to_lab(background.astype(np.uint8)), axis=2)
    mask = cv2.morphologyEx((distance > 12).astype(np.uint8), cv2.MORPH_OPEN, np.ones((2, 2), np.uint8))
    return mask.astype(bool), background


def colours_of(image: np.ndarray) -> tuple[str, str]:
    """The words for the colours of the thing ('' without any) and of the background of a picture on a plain ground."""
    mask, ground = find_thing(image)
    return drawings.colour_of(drawings.to_lab(image)[mask]), drawings.nearest_background(ground)


def cut_out(image: np.ndarray, side: int = SIDE) -> np.ndarray:
    """The thing of a picture alone, in the middle of a white square: RGB uint8 [side, side, 3]. The whole picture where
    nothing stands out."""
    mask, _ = find_thing(image)
    if mask.mean() < 0.01:
        return cv2.resize(image, (side, side), interpolation=cv2.INTER_AREA)
    # What is enclosed belongs to the thing, as the white inside of an outline.
    contours, _ = cv2.findContours(mask.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    filled = cv2.drawContours(np.zeros(mask.shape, np.uint8), contours, -1, 1, cv2.FILLED).astype(bool)
    alone = np.where(filled[..., None], image, 255).astype(np.uint8)
    rgba = drawings.crop(np.dstack([alone, filled.astype(np.uint8) * 255]))
    high, wide = rgba.shape[:2]
    square = np.full((max(high, wide),) * 2 + (3,), 255, np.uint8)
    top, left = (len(square) - high) // 2, (len(square) - wide) // 2
    square[top : top + high, left : left + wide] = rgba[..., :3]
    inner = round(0.9 * side)
    method = cv2.INTER_AREA if len(square) > inner else cv2.INTER_CUBIC
    framed = np.full((side, side, 3), 255, np.uint8)
    start = (side - inner) // 2
    framed[start : start + inner, start : start + inner] = cv2.resize(square, (inner, inner), interpolation=method)
    return framed


def halves(image: np.ndarray, relation: str) -> tuple[np.ndarray, np.ndarray]:
    """The parts of a scene where the first and the second thing should be."""
    high, wide = image.shape[0] // 2, image.shape[1] // 2
    if relation in ("left", "right"):
        parts = image[:, :wide], image[:, wide:]
    else:
        parts = image[:high], image[high:]
    return parts if relation in ("left", "above") else parts[::-1]


class Extractor:
    """EfficientNet-lite0's last 1,280 features, of unit length, of things cut out of pictures."""

    def __init__(self, device: str | None, batch: int):
        from sd.device import pick_device
        from sd.extractors import make_extractor  # torch, which prompts are written without

        self.batch, self.features = batch, make_extractor("efficientnet-lite0", pick_device(device))

    def __call__(self, images: list[np.ndarray]) -> np.ndarray:
        """RGB uint8 [H, W, 3] each -> fp32 [N, 1280]."""
        found = np.zeros((len(images), 1280), np.float32)
        with progress(len(images), "features", "img") as bar:
            for start in range(0, len(images), self.batch):
                cut = np.stack([cut_out(image) for image in images[start : start + self.batch]])
                found[start : start + len(cut)] = self.features(cut)
                bar.update(len(cut))
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


class Classifier:
    """Names of drawings: the nearest mean of a concept's real drawings, in features whitened by how drawings of one
    concept differ (linear discriminant analysis with a shrunken covariance)."""

    def __init__(self, features: np.ndarray, concepts: list[str], shrink: float = 0.1):
        self.names = sorted(set(concepts))
        place = np.array([self.names.index(c) for c in concepts])
        counts = np.bincount(place)
        means = np.zeros((len(self.names), features.shape[1]))
        np.add.at(means, place, features)
        means /= counts[:, None]
        self.middle = features.mean(0)
        rest = (features - means[place])[counts[place] > 1]
        within = rest.T @ rest / max(1, len(rest))
        size = np.trace(within) / len(within) + 1e-9
        values, vectors = np.linalg.eigh((1 - shrink) * within + shrink * size * np.eye(len(within)))
        self.whiten = vectors / np.sqrt(values)
        self.means = self._unit((means - self.middle) @ self.whiten)

    @staticmethod
    def _unit(x: np.ndarray) -> np.ndarray:
        return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-9)

    def ranks(self, features: np.ndarray, concepts: list[str], among: list[str] | None = None) -> np.ndarray:
        """How many other names are nearer than the right one, int [N]; -1 becomes a large number for unknown names."""
        names = [n for n in (among or self.names) if n in self.names]
        columns = [self.names.index(n) for n in names]
        scores = self._unit((features - self.middle) @ self.whiten) @ self.means[columns].T
        right = [scores[i, names.index(c)] if c in names else -np.inf for i, c in enumerate(concepts)]
        return (scores > np.array(right)[:, None]).sum(1)


def hits(ranks: np.ndarray, *tops: int) -> dict[str, float]:
    """Shares of ranks below each number: {'top1': ..., 'top5': ...}."""
    return {f"top{top}": round(float((ranks < top).mean()), 4) if len(ranks) else None for top in tops}


def retrieval(queries: np.ndarray, gallery: np.ndarray) -> np.ndarray:
    """How many pictures of the gallery are nearer to query i than picture i is, int [N]. Centred on the gallery."""
    middle = gallery.mean(0)
    a, b = Classifier._unit(queries - middle), Classifier._unit(gallery - middle)
    scores = a @ b.T
    return (scores > scores.diagonal()[:, None] + 1e-7).sum(1)


# ---------------------------------------------------------------------------------------------------------------------
# Measuring


class World:
    """The real drawings: rows, features of all plain pictures (kept in a file beside them), and the classifier."""

    def __init__(self, data: Path, extract: Extractor, keep: Path | None):
        self.rows, self.extract = read_rows(data), extract
        self.pairs = plain_pairs(self.rows)
        self.plain = [row for row in self.rows if row["kind"] == "plain"]
        identity = hashlib.sha256("".join(sorted(r["tar"][-9:] + r["key"] + r["split"] for r in self.plain)).encode())
        identity.update((data / "manifest.json").read_bytes() if (data / "manifest.json").exists() else b"")
        self.features = None
        if keep is not None and keep.exists():
            with np.load(keep) as file:
                if str(file["identity"]) == identity.hexdigest():
                    self.features = file["features"]
        if self.features is None:
            self.features = extract(read_pictures(self.plain))
            if keep is not None:
                with atomic_path(keep) as temporary, open(temporary, "wb") as file:
                    np.savez(file, features=self.features, identity=identity.hexdigest())
        self.place = {(row["tar"], row["key"]): i for i, row in enumerate(self.plain)}
        self.trained = np.array([row["split"] == "train" for row in self.plain])
        if not self.trained.any() or self.trained.all():
            counts = f"{self.trained.sum()} trained and {(~self.trained).sum()} held-out drawings"
            raise InputError(f"{data} has {counts}, and both kinds are needed: make it with a larger --limit")
        concepts = [row["concept"] for row in self.plain]
        self.concepts = concepts
        seen = [c for c, trained in zip(concepts, self.trained) if trained]
        self.classifier = Classifier(self.features[self.trained], seen)

    def of(self, rows: list[dict]) -> np.ndarray:
        """The features of some plain pictures."""
        return self.features[[self.place[row["tar"], row["key"]] for row in rows]]

    def other_style(self, concept: str, style: str) -> dict | None:
        """The row of a trained drawing of this concept in another style."""
        others = [p for p, row in self.pairs.items() if p[0] == concept and p[1] != style and row["split"] == "train"]
        return self.pairs[min(others, key=lambda p: drawings.fraction("other", style, *p))] if others else None


def measure(world: World, prompts: list[dict], images: list[np.ndarray], with_copies: bool = True) -> dict:
    """All figures of painted pictures, one for each prompt. See the head of this file. with_copies: of held-out pairs
    too, for which all training pictures are read."""
    figures: dict = {}
    by_test = defaultdict(list)
    for prompt, image in zip(prompts, images, strict=True):
        by_test[prompt["test"]].append((prompt, image))

    for test in ("held_out", "trained"):
        asked = [(p, i) for p, i in by_test[test] if (p["concept"], p["style"]) in world.pairs]
        if len(asked) < 2:
            continue
        rows = [world.pairs[p["concept"], p["style"]] for p, _ in asked]
        gallery, painted = world.of(rows), world.extract([i for _, i in asked])
        found = {**hits(retrieval(painted, gallery), 1, 5), "of": len(rows), "chance": round(1 / len(rows), 4)}
        others = [world.other_style(p["concept"], p["style"]) for p, _ in asked]
        have = [i for i, other in enumerate(others) if other is not None]
        middle = gallery.mean(0)
        scores = Classifier._unit(world.of([others[i] for i in have]) - middle) @ Classifier._unit(gallery - middle).T
        reference = (scores > scores[np.arange(len(have)), have][:, None] + 1e-7).sum(1)
        found["reference_other_style"] = hits(reference, 1, 5)
        ranks = world.classifier.ranks(painted, [p["concept"] for p, _ in asked])
        found["named_of_all"] = hits(ranks, 1, 5)
        by_style = defaultdict(list)
        for (p, _), rank in zip(asked, retrieval(painted, gallery)):
            by_style[p["style"]].append(rank == 0)
        found["top1_by_style"] = {style: round(float(np.mean(right)), 3) for style, right in sorted(by_style.items())}
        figures[test] = found
        if test == "held_out" and with_copies:
            figures["copies"] = copies(world, painted, gallery, [i for _, i in asked], rows)

    if by_test["names"]:
        asked = [p["concept"] for p, _ in by_test["names"]]
        painted = world.extract([i for _, i in by_test["names"]])
        familiar = sorted(set(asked))
        figures["names"] = {
            "of_all": hits(world.classifier.ranks(painted, asked), 1, 5),
            "of_familiar": hits(world.classifier.ranks(painted, asked, familiar), 1),
            "n": len(asked),
            "names": len(world.classifier.names),
            "familiar": len(familiar),
        }
    real = [(row, f) for row, f in zip(world.plain, world.features) if row["split"] == "val"]
    features = np.stack([f for _, f in real])
    known = [row["concept"] for row, _ in real]
    few = [i for i, c in enumerate(known) if c in drawings.FAMILIAR]
    figures["classifier_on_real_held_out"] = {
        "of_all": hits(world.classifier.ranks(features, known), 1, 5),
        "n": len(known),
        "of_familiar": hits(
            world.classifier.ranks(features[few], [known[i] for i in few], list(drawings.FAMILIAR)), 1
        ) if few else None,
        "n_familiar": len(few),
    }  # fmt: skip

    for test, column, chance in (
        ("colour", "tint", 1 / len(drawings.TINTS)),
        ("background", "background", 1 / (1 + len(drawings.BACKGROUNDS))),
    ):
        right, unseen_pair = [], []
        for prompt, image in by_test[test]:
            tint, ground = colours_of(image)
            right.append((tint if test == "colour" else ground) == prompt[column])
            unseen_pair.append(drawings.held_colour(prompt["concept"], prompt[column]))
        if right:
            of_unseen = [hit for hit, unseen in zip(right, unseen_pair) if unseen]
            figures[test] = {
                "right": round(float(np.mean(right)), 4),
                "n": len(right),
                "right_of_held_out": round(float(np.mean(of_unseen)), 4) if of_unseen else None,
                "n_held_out": len(of_unseen),
                "chance": round(chance, 4),
            }
    if by_test["scene"]:
        parts = [half for p, image in by_test["scene"] for half in halves(image, p["relation"])]
        asked = [name for p, _ in by_test["scene"] for name in (p["concept"], p["other"])]
        painted = world.extract(parts)
        ranks = world.classifier.ranks(painted, asked, list(drawings.FAMILIAR)).reshape(-1, 2)
        figures["scene"] = {
            "things_right_of_familiar": round(float((ranks == 0).mean()), 4),
            "both_right_of_familiar": round(float((ranks == 0).all(1).mean()), 4),
            "both_in_top5_of_familiar": round(float((ranks < 5).all(1).mean()), 4),
            "n": len(ranks),
        }
    return figures


def copies(world: World, painted: np.ndarray, real: np.ndarray, images: list[np.ndarray], rows: list[dict]) -> dict:
    """How near painted pictures of held-out pairs are to the nearest training picture, beside the real ones: cosine
    distance of features, and how many are pixel for pixel nearly a training picture."""
    trained = world.features[world.trained]
    near = {"painted": 1 - (painted @ trained.T).max(1), "real_held_out": 1 - (real @ trained.T).max(1)}
    small = [cut_out(i, 32).reshape(-1) / 255 for i in read_pictures([r for r in world.plain if r["split"] == "train"])]
    small = np.array(small, np.float32)
    squares = (small**2).sum(1)
    found = {}
    for name, pictures in (("painted", images), ("real_held_out", read_pictures(rows))):
        mine = np.array([cut_out(i, 32).reshape(-1) / 255 for i in pictures], np.float32)
        square = (mine**2).sum(1)[:, None] + squares - 2 * mine @ small.T
        distance = np.sqrt(np.maximum(square.min(1), 0) / small.shape[1])
        found[name] = {
            "median_feature_distance": round(float(np.median(near[name])), 4),
            "median_pixel_distance": round(float(np.median(distance)), 4),
            "copies": round(float((distance < NEAR).mean()), 4),
        }
    tenth = np.quantile(near["real_held_out"], 0.1)
    found["painted_nearer_than_the_nearest_tenth_of_real"] = round(float((near["painted"] < tenth).mean()), 4)
    return found


def real_as_painted(world: World, prompts: list[dict]) -> list[np.ndarray | None]:
    """A real picture that shows what each prompt asks for, None where there is none: of held-out pairs, the concept in
    another style; of scenes, two real drawings put together."""
    shown: list = [None] * len(prompts)
    chosen: dict[int, dict] = {}
    for i, prompt in enumerate(prompts):
        test, pair = prompt["test"], (prompt["concept"], prompt["style"])
        if test == "held_out":
            row = world.other_style(*pair)
        elif test in ("trained", "names"):
            row = world.pairs.get(pair)
        elif test in ("colour", "background"):
            kind, column = ("tint", "tint") if test == "colour" else ("colour", "background")
            fitting = [r for r in world.rows if r["kind"] == kind and r[column] == prompt[column]]
            row = min(fitting, key=lambda r: drawings.fraction(str(i), r["concept"], r["style"]), default=None)
        else:
            continue
        if row is not None:
            chosen[i] = row
    for i, picture in zip(chosen, read_pictures(list(chosen.values()))):
        shown[i] = picture
    for i, prompt in enumerate(prompts):
        if prompt["test"] != "scene":
            continue
        two = [world.pairs.get((name, prompt["style"])) for name in (prompt["concept"], prompt["other"])]
        if None in two:
            continue
        pictures = read_pictures(two)
        canvas = drawings.canvas(len(pictures[0]), "white")
        centres = drawings.scene_centres(prompt["relation"])
        for picture, centre in zip(pictures, centres):
            mask = np.full((*picture.shape[:2], 1), 255, np.uint8) * find_thing(picture)[0][..., None]
            drawings.place(drawings.crop(np.dstack([picture, mask])), canvas, centre, 0.42)
        shown[i] = canvas
    return shown


def check(world: World, prompts: list[dict]) -> tuple[dict, bool]:
    """Measures real pictures as if they were painted, and the same pictures under other prompts of their test:
    ({'real': figures, 'shuffled': figures}, whether they are as they must be)."""
    shown = [(p, i) for p, i in zip(prompts, real_as_painted(world, prompts)) if i is not None]
    real = measure(world, [p for p, _ in shown], [i for _, i in shown])
    by_test = defaultdict(list)
    for prompt, image in shown:
        by_test[prompt["test"]].append((prompt, image))
    mixed = []
    for test, members in by_test.items():
        # A shift by a third keeps no picture in its place; in lists that go round the words it changes those too.
        step = len(members) // 3 if test in ("held_out", "trained") else len(members) // 2 + 1
        mixed += [(p, members[(i + step) % len(members)][1]) for i, (p, _) in enumerate(members)]
    shuffled = measure(world, [p for p, _ in mixed], [i for _, i in mixed])

    def most(figure: dict, value: float) -> bool:  # at chance, give or take four standard errors
        n, chance = figure.get("n") or figure["of"], figure["chance"]
        return value <= chance + 4 * np.sqrt(chance * (1 - chance) / n) + 1 / n

    good = True
    for test, least in (("colour", 0.9), ("background", 0.95)):
        if test in real:
            good &= real[test]["right"] >= least and most(shuffled[test], shuffled[test]["right"])
    for test in ("held_out", "trained"):
        if test in real:
            same = test == "held_out"  # its real queries are the reference itself
            expected = real[test]["reference_other_style"]["top1"] if same else 1.0
            good &= abs(real[test]["top1"] - expected) < 0.02 and most(shuffled[test], shuffled[test]["top1"])
    if "names" in real:
        good &= real["names"]["of_all"]["top1"] > 0.7 and shuffled["names"]["of_all"]["top1"] < 0.1
    if "scene" in real:
        good &= real["scene"]["both_right_of_familiar"] > 0.7 and shuffled["scene"]["both_right_of_familiar"] < 0.1
    return {"real": real, "shuffled": shuffled}, bool(good)


# ---------------------------------------------------------------------------------------------------------------------
# Pictures for people


def label_grid(images: list[np.ndarray], labels: list[str]) -> np.ndarray:
    """Pictures of any sizes, ten a row, each with its label below it."""
    small = [np.asarray(Image.fromarray(i).resize((SHOWN, SHOWN), Image.Resampling.LANCZOS)) for i in images]
    return grid(np.stack(small), min(10, len(small)), pad=6, labels=labels)


def write_grids(world: World, prompts: list[dict], images: list[np.ndarray], out: Path) -> None:
    """One labelled grid a test, of at most 100 pictures; of held-out pairs each beside the real drawing."""
    for test in TESTS:
        members = [(p, i) for p, i in zip(prompts, images) if p["test"] == test]
        pictures, labels = [], []
        if test == "held_out":
            members = [(p, i) for p, i in members if (p["concept"], p["style"]) in world.pairs][:50]
            real = read_pictures([world.pairs[p["concept"], p["style"]] for p, _ in members])
            for (prompt, image), true in zip(members, real):
                pictures += [image, true]
                labels += [prompt["prompt"], "(real)"]
        else:
            pictures, labels = [i for _, i in members[:100]], [p["prompt"] for p, _ in members[:100]]
        if pictures:
            with atomic_path(out / f"{test}.png") as temporary:
                Image.fromarray(label_grid(pictures, labels)).save(temporary, format="PNG")


def read_painted(folder: str, n: int) -> list[np.ndarray]:
    """The pictures 00000.png, 00001.png, ... of a folder, in order; fails unless there are n of them."""
    images = read_numbered(folder)
    if len(images) != n:
        raise InputError(
            f"{folder} has {len(images)} pictures (00000.png, ...) for {n} prompts: paint the prompts file again"
        )
    return images


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("real drawings")
    g.add_argument("--data", type=Path, required=True, help="folder of shards that 01i_emoji_styles.py wrote")

    g = p.add_argument_group("what to do")
    g.add_argument("--write_prompts", metavar="FILE", help="write all tests' prompts to this .jsonl; default: do not")
    g.add_argument(
        "--prompts", metavar="FILE", help="the .jsonl that was painted; default: none, for --images it is wanted"
    )
    g.add_argument("--images", help="measure 00000.png, 00001.png, ... here, one a prompt; default: do not")
    g.add_argument("--check", action="store_true", help="measure real pictures as if painted, and shuffled ones")

    g = p.add_argument_group("running")
    g.add_argument(
        "--out", type=Path, help="folder for figures.json and grids; default: none, for --images it is wanted"
    )
    g.add_argument(
        "--features", type=Path, help="a .npz that keeps the features of --data between runs; default: no file"
    )
    g.add_argument("--batch", type=int, default=64, help="pictures at once")
    g.add_argument("--device", help="cuda or cpu; default: cuda if there is one")
    args = p.parse_args()
    if not (args.check or args.write_prompts or args.images):
        raise InputError("nothing to do: give --write_prompts FILE, --images DIR with --prompts and --out, or --check")
    if args.images and not (args.prompts and args.out):
        raise InputError("--images needs --prompts, the file that was painted, and --out, a folder for what is found")
    if args.write_prompts:
        if not args.write_prompts.endswith(".jsonl"):
            raise InputError(f"--write_prompts {args.write_prompts}: give a name that ends with .jsonl")
        prompts = make_prompts(read_rows(args.data))
        atomic_write(Path(args.write_prompts), "".join(json.dumps(p) + "\n" for p in prompts))
        print(f"{len(prompts)} prompts: {args.write_prompts}")
    if not (args.check or args.images):
        return
    painted = None
    if args.images:
        prompts = read_prompts(args.prompts)
        painted = read_painted(args.images, len(prompts))
    world = World(args.data, Extractor(args.device, args.batch), args.features)
    if args.check:
        results, good = check(world, make_prompts(world.rows))
        print(json.dumps(results, indent=1))
        if not good:
            print("the measuring is not right: real pictures must reach the reference, shuffled ones chance")
            raise SystemExit(1)
    if painted is not None:
        figures = measure(world, prompts, painted)
        make_folder(args.out)
        atomic_write(args.out / "figures.json", json.dumps(figures, indent=1) + "\n")
        write_grids(world, prompts, painted, args.out)
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    run(main)
