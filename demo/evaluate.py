"""Measures by classical vision (no network) whether painted pictures of shapes show what their prompts ask for.

    python demo/evaluate.py --write_prompts 256 --prompts prompts.jsonl          # also prompts.txt, one prompt a line
    python demo/evaluate.py --images out/ --prompts prompts.jsonl                # 00000.png, 00001.png, ... in order
    python demo/evaluate.py --check                                              # is the measuring itself right?

Ends with one line of JSON: colour, shape, position, background, all (shares from 0 to 1), n. How it measures: the
median of the border is the background; pixels nearer to the shape's colour than to the background are the shape; its
middle gives the colour, its centre of mass the position, and its overlap with ideal outlines of the same area the
shape. A picture without a clear shape on a plain background has no shape, colour or position: it counts as wrong.
"""

import functools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import cv2
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from sd.cli import parser  # noqa: E402
from sd.errors import InputError, run  # noqa: E402
from sd.files import atomic_write, make_folder  # noqa: E402
from sd.pictures import read_numbered  # noqa: E402
from sd.shapes import (  # noqa: E402
    BACKGROUNDS,
    COLOURS,
    POSITIONS,
    RADIUS,
    SHAPES,
    coverage,
    draw_jittered,
    nearest,
    outline,
    shape_prompts,
    to_lab,
)

ATTRIBUTES = ("colour", "shape", "position", "background")
SIDE = 256  # pictures are measured at this size: a mask of 64 px, enlarged smoothly, has smooth edges
TEMPLATE = 96  # side of the shape's own frame
CONTRAST = 20.0  # least distance in Lab between a shape and its background (the nearest pair of the palette has 50)
OVERLAP = 0.75  # least intersection over union of a mask with an ideal outline
AREA = (0.015, 0.30)  # of the picture (a drawn shape has 0.03 to 0.12)


def frame(mask: np.ndarray) -> np.ndarray:
    """A mask, bool [H, W], moved and scaled so that its centre of mass and its area are always the same: bool
    [TEMPLATE, TEMPLATE]."""
    moments = cv2.moments(mask.astype(np.uint8), binaryImage=True)
    scale = TEMPLATE * 0.45 / np.sqrt(moments["m00"])
    x, y = moments["m10"] / moments["m00"], moments["m01"] / moments["m00"]
    middle = (TEMPLATE - 1) / 2
    move = np.array([[scale, 0, middle - scale * x], [0, scale, middle - scale * y]])
    return cv2.warpAffine(mask.astype(np.float32), move, (TEMPLATE, TEMPLATE), flags=cv2.INTER_LINEAR) > 0.5


@functools.lru_cache
def templates(shapes: tuple[str, ...]) -> list[tuple[str, np.ndarray]]:
    """The ideal shapes, framed: each as drawn, and with corners rounded as blur rounds them, weakly and strongly."""
    made = []
    for shape in shapes:
        sharp = coverage(SIDE / 2 + SIDE / 5 * outline(shape), SIDE)
        made.append((shape, frame(sharp > 0.5)))
        for strength in (0.05, 0.1):
            blurred = cv2.GaussianBlur(sharp, (0, 0), strength * np.sqrt(sharp.sum()))
            made.append((shape, frame(blurred > 0.5)))
    return made


def find_shape(mask: np.ndarray, shapes: tuple[str, ...] = SHAPES) -> str | None:
    """The shape whose ideal outline overlaps best with a mask, bool [H, W]; None if that overlap is poor."""
    framed = frame(mask)
    overlap, shape = max(((framed & ideal).sum() / (framed | ideal).sum(), name) for name, ideal in templates(shapes))
    return shape if overlap >= OVERLAP else None


def classify(image: np.ndarray, shapes: tuple[str, ...] = SHAPES) -> dict[str, str | None]:
    """What a picture shows, RGB uint8 [H, W, 3] -> {shape (one of `shapes`), colour, position, background}; background
    always has a value, the others are None where there is no clear shape."""
    ring = max(1, round(min(image.shape[:2]) / 32))
    edge = np.ones(image.shape[:2], bool)
    edge[ring:-ring, ring:-ring] = False
    background = np.median(image[edge], axis=0)
    found = {"shape": None, "colour": None, "position": None, "background": nearest(background, BACKGROUNDS)}

    lab, plain = to_lab(image), to_lab(background.astype(np.uint8))
    distance = np.linalg.norm(cv2.blur(lab, (3, 3)) - plain, axis=2)  # [H, W]
    level = np.percentile(distance, 98)  # the shape's own distance: any shape covers more than 2 % of the picture
    if level < CONTRAST:
        return found
    # How far each pixel is on the way from the background's colour to the shape's, 0 to 1: unlike a distance, this is
    # not made larger by noise.
    way = np.median(lab[distance >= 0.9 * level], axis=0) - plain
    cover = cv2.resize((lab - plain) @ way / (way @ way), (SIDE, SIDE), interpolation=cv2.INTER_CUBIC)
    _, labels, stats, centres = cv2.connectedComponentsWithStats((cover > 0.5).astype(np.uint8))
    if len(stats) < 2:
        return found
    largest = 1 + int(stats[1:, cv2.CC_STAT_AREA].argmax())
    mask = labels == largest
    if not AREA[0] <= mask.mean() <= AREA[1]:
        return found
    found["shape"] = find_shape(mask, shapes)

    depth = cv2.distanceTransform(mask.astype(np.uint8), cv2.DIST_L2, 3)
    inner = depth > depth.max() / 2
    pixels = cv2.resize(image, (SIDE, SIDE), interpolation=cv2.INTER_NEAREST)[inner]  # [n, 3]
    found["colour"] = nearest(np.median(pixels, axis=0), COLOURS)

    centre = (centres[largest] + 0.5) / SIDE
    distances = [np.hypot(*(centre - place)) for place in POSITIONS.values()]
    found["position"] = list(POSITIONS)[int(np.argmin(distances))]
    return found


def share(images: Iterable[np.ndarray], attribute: str, value: str) -> float:
    """The share of pictures (RGB uint8 [H, W, 3]) whose `attribute` is `value`, e.g. share(images, "colour", "red")."""
    hits = [classify(image)[attribute] == value for image in images]
    return sum(hits) / len(hits)


def accuracy(images: Iterable[np.ndarray], prompts: list[dict], shapes: tuple[str, ...] = SHAPES) -> dict[str, float]:
    """The share of pictures that are right in each attribute, and in all of those that their prompt names."""
    right = {name: [] for name in (*ATTRIBUTES, "all")}
    for image, prompt in zip(images, prompts, strict=True):
        found = classify(image, shapes)
        named = {name: found[name] == prompt[name] for name in ATTRIBUTES if prompt.get(name)}
        for name, hit in named.items():
            right[name].append(hit)
        right["all"].append(all(named.values()))
    return {name: float(np.mean(hits)) for name, hits in right.items() if hits}


def check(n: int, seed: int = 0) -> tuple[dict[str, dict[str, float]], bool]:
    """Measures pictures whose truth is known: {kind: accuracy}, and whether all is as it must be.

    drawn: true pictures, at least 0.99 right; soft: the same, blurred, noisy and through JPEG as a small autoencoder's
    are, at least 0.98; shuffled: each picture with another one's prompt, and noise: random pixels, both no better than
    chance, that is the share of equal values among the prompts, give or take four standard errors.
    """
    rng = np.random.default_rng(seed)
    truths = shape_prompts("trained", n // 2, seed) + shape_prompts("held_out", n - n // 2, seed)
    for truth in truths:
        truth["size"] = rng.uniform(*RADIUS)
    images = [draw_jittered(truth, 64, rng) for truth in truths]
    order = rng.permutation(n)
    results = {
        "drawn": accuracy(images, truths),
        "soft": accuracy([soften(image, rng) for image in images], truths),
        "shuffled": accuracy(images, [truths[i] for i in order]),
        "noise": accuracy((rng.integers(0, 256, (64, 64, 3), np.uint8) for _ in range(n)), truths),
    }
    good = min(results["drawn"].values()) >= 0.99 and min(results["soft"].values()) >= 0.98
    for kind in ("shuffled", "noise"):
        for name, value in results[kind].items():
            good &= value <= (limit := chance(truths, name)) + 4 * np.sqrt(limit * (1 - limit) / n)
    return results, bool(good)


def chance(truths: list[dict], attribute: str) -> float:
    """How often a guesser who always says the most frequent value is right; 'all' is the product of the four."""
    if attribute == "all":
        return float(np.prod([chance(truths, name) for name in ATTRIBUTES]))
    values = [truth[attribute] for truth in truths]
    return max(values.count(value) for value in set(values)) / len(values)


def soften(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Blur (0.8 px at 64 px), noise (sigma 8) and JPEG at quality 70: 27 to 33 dB, as a small autoencoder."""
    blurred = cv2.GaussianBlur(image, (0, 0), 0.8 * image.shape[0] / 64)
    noisy = np.clip(blurred + rng.normal(0, 8, image.shape), 0, 255).astype(np.uint8)
    coded = cv2.imencode(".jpg", noisy[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 70])[1]
    return cv2.imdecode(coded, cv2.IMREAD_COLOR)[:, :, ::-1]


def read_prompts(path: str) -> list[dict]:
    """The prompts of a JSONL file, each {prompt, shape, colour, position, background}."""
    try:
        prompts = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise InputError(
            f"cannot read prompts from {path} ({error}): write them with --write_prompts N --prompts {path}"
        ) from None
    if not prompts or not all(isinstance(prompt, dict) and set(ATTRIBUTES) & set(prompt) for prompt in prompts):
        raise InputError(
            f"{path} should hold lines of JSON with shape, colour, position or background: use --write_prompts"
        )
    return prompts


def print_table(results: dict[str, dict[str, float]]) -> None:
    """One row a kind of pictures, one column an attribute."""
    names = (*ATTRIBUTES, "all")
    print(f"{'':>10}" + "".join(f"{name:>12}" for name in names))
    for kind, values in results.items():
        print(f"{kind:>10}" + "".join(f"{values[name]:>12.4f}" if name in values else f"{'-':>12}" for name in names))


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("measuring")
    g.add_argument("--images", help="folder with 00000.png, 00001.png, ...: one for each prompt, in order "
                   "(default: none)")  # fmt: skip
    g.add_argument("--prompts", metavar="FILE", help="JSONL file of prompts; must be given, but for --check")

    g = p.add_argument_group("instead")
    g.add_argument("--write_prompts", type=int, metavar="N", help="write N prompts of held-out pairs to --prompts "
                   "(default: measure)")  # fmt: skip
    g.add_argument("--check", action="store_true", help="measure drawn, shuffled and noise pictures")
    g.add_argument("--n", type=int, default=512, help="pictures for --check")
    g.add_argument("--seed", type=int, default=0, help="for --write_prompts and --check")
    args = p.parse_args()
    if not (args.check or args.prompts):
        raise InputError("nothing to do: give --check, or --prompts with --images or --write_prompts")
    if args.prompts and not (args.images or args.write_prompts):
        raise InputError("--prompts needs --images DIR to measure, or --write_prompts N to be written")

    if args.write_prompts:
        prompts = shape_prompts("held_out", args.write_prompts, args.seed)
        path = Path(args.prompts)
        make_folder(path.parent)
        atomic_write(path, "".join(json.dumps(prompt) + "\n" for prompt in prompts))
        atomic_write(path.with_suffix(".txt"), "".join(prompt["prompt"] + "\n" for prompt in prompts))
    if args.check:
        results, good = check(args.n, args.seed)
        print_table(results)
        if not good:
            print("the measuring is not right: drawn >= 0.99, soft >= 0.98, shuffled and noise at chance are needed")
            raise SystemExit(1)
    if args.images:
        prompts, images = read_prompts(args.prompts), read_numbered(args.images)
        if len(prompts) != len(images):
            raise InputError(
                f"{args.images} has {len(images)} pictures (00000.png, ...), {args.prompts} {len(prompts)} prompts"
            )
        measured = accuracy(images, prompts)
        print_table({"painted": measured})
        print(json.dumps({**{name: round(value, 4) for name, value in measured.items()}, "n": len(images)}))


if __name__ == "__main__":
    run(main)
