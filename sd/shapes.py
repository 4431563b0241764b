"""The drawn world of the demo: four shapes, eight colours, five positions, three backgrounds; its words and pictures.

    from sd import shapes
    picture, truth = shapes.sample(seed=0, index=7, size=64)   # a trained pair of shape and colour
    prompts = shapes.shape_prompts("held_out", 256, seed=0)          # pairs that no training picture or caption has

A truth is a dict: shape, colour, position, background (words of the tables below), size (radius over picture side).
"""

import itertools

import cv2
import numpy as np

SHAPES = ("circle", "square", "triangle", "star")

NEW_SHAPES = ("heart",)  # which the demo never sees: what its fine-tuning is to learn

COLOURS = {  # RGB
    "red": (215, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (250, 225, 50),
    "green": (10, 150, 50),
    "cyan": (60, 205, 225),
    "blue": (25, 60, 220),
    "purple": (150, 40, 190),
    "pink": (250, 130, 190),
}

BACKGROUNDS = {"white": (255, 255, 255), "black": (0, 0, 0), "grey": (128, 128, 128)}  # RGB

POSITIONS = {  # the middle of the shape: x and y over picture side, y down
    "centre": (0.5, 0.5),
    "top left": (0.3, 0.3),
    "top right": (0.7, 0.3),
    "bottom left": (0.3, 0.7),
    "bottom right": (0.7, 0.7),
}

POSITION_JITTER = 0.02  # either way, over picture side

RADIUS = (0.19, 0.225)  # over picture side

# The pairs that training never sees: 6 of 32. No colour is in two of them and no shape in more than two, so that every
# word is trained with at least six partners of its eight colours, or three of its four shapes.
HELD_OUT = (
    ("circle", "green"),
    ("circle", "purple"),
    ("square", "red"),
    ("triangle", "blue"),
    ("triangle", "yellow"),
    ("star", "orange"),
)

TRAINED = tuple(pair for pair in itertools.product(SHAPES, COLOURS) if pair not in HELD_OUT)

# Rows that the filter should drop: name -> column of the metadata that shows it. Their pictures or captions are wrong.
FLAWS = {"wrong_caption": "similarity", "noise": "aesthetic", "stripes": "pwatermark", "chequers": "punsafe"}

FLAWED_SHARE = 0.05


def to_lab(rgb: np.ndarray) -> np.ndarray:
    """RGB uint8 [..., 3] to CIE Lab, float32, where equal distances look about equally different."""
    flat = np.ascontiguousarray(rgb.reshape(1, -1, 3), np.float32) / 255
    return cv2.cvtColor(flat, cv2.COLOR_RGB2Lab).reshape(rgb.shape)


def nearest(rgb: np.ndarray, palette: dict[str, tuple]) -> str:
    """The palette's name that is nearest to a colour [3], in Lab."""
    distances = np.linalg.norm(
        to_lab(np.array(list(palette.values()), np.uint8)) - to_lab(rgb.astype(np.uint8)), axis=1
    )
    return list(palette)[int(distances.argmin())]


def outline(shape: str) -> np.ndarray:
    """The outline of a shape, float64 [points, 2] (x, y down), around its centre of mass, of about a circle's extent
    with radius 1."""
    if shape == "circle":
        angles = np.arange(64) * (2 * np.pi / 64)
        return np.stack([np.cos(angles), np.sin(angles)], 1)
    if shape == "square":
        return np.array([[-1.0, -1], [1, -1], [1, 1], [-1, 1]])
    if shape == "triangle":
        angles = np.arange(3) * (2 * np.pi / 3) - np.pi / 2
        return 1.25 * np.stack([np.cos(angles), np.sin(angles)], 1)
    if shape == "star":
        angles = np.arange(10) * (2 * np.pi / 10) - np.pi / 2
        radii = np.where(np.arange(10) % 2 == 0, 1.25, 1.25 * 0.42)
        return radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
    if shape == "heart":
        t = np.arange(64) * (2 * np.pi / 64)
        y = 13 * np.cos(t) - 5 * np.cos(2 * t) - 2 * np.cos(3 * t) - np.cos(4 * t)
        return np.stack([16 * np.sin(t) ** 3, 0.85 - y], 1) / 15.5  # around its centre of mass
    raise ValueError(f"unknown shape {shape!r}: one of {', '.join(SHAPES + NEW_SHAPES)}")


def coverage(points: np.ndarray, size: int, factor: int = 4) -> np.ndarray:
    """How much of each pixel a polygon covers, float32 [size, size] from 0 to 1; points [n, 2] in pixels, where (0, 0)
    is the upper left corner of the picture."""
    fine = np.zeros((size * factor, size * factor), np.uint8)
    # the middle of the first fine pixel is at 0.5; fillPoly takes points in sixteenths of a pixel
    cv2.fillPoly(fine, [np.rint((points * factor - 0.5) * 16).astype(np.int32)], 255, shift=4)
    return cv2.resize(fine, (size, size), interpolation=cv2.INTER_AREA).astype(np.float32) / 255


def draw(truth: dict, centre: tuple[float, float], size: int, colour: np.ndarray | None = None) -> np.ndarray:
    """RGB uint8 [size, size, 3]: the shape around `centre` (x, y over picture side), anti-aliased, in the truth's
    colour or in `colour`, RGB [3]."""
    points = (np.array(centre) + truth["size"] * outline(truth["shape"])) * size
    cover = coverage(points, size)[:, :, None]
    background = np.array(BACKGROUNDS[truth["background"]], np.float32)
    colour = np.array(COLOURS[truth["colour"]] if colour is None else colour, np.float32)
    return np.rint(background + cover * (colour - background)).astype(np.uint8)


def _random_truth(rng: np.random.Generator, pairs: tuple) -> dict:
    shape, colour = pairs[rng.integers(len(pairs))]
    return {
        "shape": shape,
        "colour": colour,
        "position": list(POSITIONS)[rng.integers(len(POSITIONS))],
        "background": list(BACKGROUNDS)[rng.integers(len(BACKGROUNDS))],
        "size": round(float(rng.uniform(*RADIUS)), 4),
    }


def draw_jittered(truth: dict, size: int, rng: np.random.Generator, colour: np.ndarray | None = None) -> np.ndarray:
    """draw() at the position that the truth names, a little off."""
    x, y = POSITIONS[truth["position"]]
    dx, dy = rng.uniform(-POSITION_JITTER, POSITION_JITTER, 2)
    return draw(truth, (x + dx, y + dy), size, colour)


def any_colour(truth: dict, rng: np.random.Generator) -> np.ndarray:
    """A colour without a name, RGB uint8 [3], that stands out from the truth's background and is not nearest to one of
    which the truth's shape is held out."""
    background = to_lab(np.array(BACKGROUNDS[truth["background"]], np.uint8)[None])
    while True:
        colour = rng.integers(0, 256, 3).astype(np.uint8)
        if (truth["shape"], nearest(colour, COLOURS)) in HELD_OUT:
            continue
        if np.linalg.norm(to_lab(colour[None]) - background) > 30:
            return colour


def sample(
    seed: int, index: int, size: int, pairs: tuple = TRAINED, named_share: float = 1.0
) -> tuple[np.ndarray, dict]:
    """A picture RGB uint8 [size, size, 3] and its truth; depends on (seed, index) alone. named_share: of the pictures,
    how many have a colour of the table; the others have any_colour, and None in the truth."""
    rng = np.random.default_rng([seed, index])
    truth, colour = _random_truth(rng, pairs), None
    if named_share < 1 and rng.uniform() >= named_share:
        truth["colour"], colour = None, any_colour(truth, rng)
    return draw_jittered(truth, size, rng, colour), truth


def caption(
    shape: str | None = None, colour: str | None = None, position: str | None = None, background: str | None = None
) -> str:
    """A caption of the attributes that are given, e.g. 'a red circle in the top left on a white background', 'red',
    'a circle', 'in the centre'."""
    words = []
    if shape:
        noun = f"{colour} {shape}" if colour else shape
        words.append(f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}")
    elif colour:
        words.append(colour)
    if position:
        words.append(f"in the {position}")
    if background:
        words.append(f"on a {background} background")
    return " ".join(words)


def random_caption(truth: dict, rng: np.random.Generator) -> str:
    """A caption with some attributes left out: 75 % name all four, 10 % the shape alone, 5 % the colour alone, 4 %
    colour and shape, 6 % each attribute with probability one half."""
    kind = rng.uniform()
    if kind < 0.75:
        named = ["shape", "colour", "position", "background"]
    elif kind < 0.85:
        named = ["shape"]
    elif kind < 0.9:
        named = ["colour"]
    elif kind < 0.94:
        named = ["shape", "colour"]
    else:
        named = [name for name in ("shape", "colour", "position", "background") if rng.uniform() < 0.5]
    named = [name for name in named if truth[name]] or ["shape"]
    return caption(**{name: truth[name] for name in named})


def shape_prompts(kind: str, n: int, seed: int) -> list[dict]:
    """n full prompts, each {prompt, shape, colour, position, background}, for evaluation.

    kind 'held_out' has the pairs of HELD_OUT only, 'trained' those of TRAINED, 'new' the shapes of NEW_SHAPES in every
    colour. All combinations come equally often (to one), in an order that depends on the seed.
    """
    kinds = {"held_out": HELD_OUT, "trained": TRAINED, "new": tuple(itertools.product(NEW_SHAPES, COLOURS))}
    if kind not in kinds:
        raise ValueError(f"unknown kind {kind!r}: one of {', '.join(kinds)}")
    pairs = kinds[kind]
    combinations = list(itertools.product(pairs, POSITIONS, BACKGROUNDS))
    rng = np.random.default_rng(seed)
    chosen = []
    while len(chosen) < n:
        chosen += [combinations[i] for i in rng.permutation(len(combinations))]
    names = ("shape", "colour", "position", "background")
    truths = [dict(zip(names, (*pair, position, background), strict=True)) for pair, position, background in chosen[:n]]
    return [{"prompt": caption(**truth), **truth} for truth in truths]


def row(seed: int, index: int, size: int, named_share: float = 1.0) -> tuple[np.ndarray, str, dict]:
    """Picture `index` of a data set: RGB uint8 [size, size, 3], caption, and metadata with LAION's columns and the
    truth. One in twenty has a flaw (see FLAWS), which its scores tell: a filter that keeps aesthetic >= 6,
    similarity >= 0.25, pwatermark <= 0.5 and punsafe <= 0.5 drops exactly these. A third of the flawed rows have no
    score (null) in place of a bad one."""
    picture, truth = sample(seed, index, size, named_share=named_share)
    rng = np.random.default_rng([seed, index, 1])
    text = random_caption(truth, rng)
    scores = {
        "aesthetic": rng.uniform(6.5, 9.0),
        "similarity": rng.uniform(0.30, 0.42),
        "pwatermark": rng.uniform(0.0, 0.14),
        "punsafe": rng.uniform(0.0, 0.09),
    }
    flaw = None
    if rng.uniform() < FLAWED_SHARE:
        flaw = list(FLAWS)[rng.integers(len(FLAWS))]
        picture, text = _spoil(flaw, picture, text, rng)
        column = FLAWS[flaw]
        bad = {"aesthetic": (2.5, 4.5), "similarity": (0.05, 0.2), "pwatermark": (0.8, 1.0), "punsafe": (0.8, 1.0)}
        scores[column] = None if rng.uniform() < 1 / 3 else rng.uniform(*bad[column])
    metadata = {
        "url": f"https://shapes.invalid/{seed}/{index:08d}.png",
        "width": size,
        "height": size,
        **{name: None if score is None else round(score, 4) for name, score in scores.items()},
        **truth,
        "flaw": flaw,
    }
    return picture, text, metadata


def _spoil(flaw: str, picture: np.ndarray, text: str, rng: np.random.Generator) -> tuple[np.ndarray, str]:
    size = len(picture)
    y, x = np.mgrid[:size, :size]
    if flaw == "wrong_caption":
        return picture, caption(**{k: v for k, v in _random_truth(rng, TRAINED).items() if k != "size"})
    if flaw == "noise":
        return np.clip(picture + rng.normal(0, 80, picture.shape), 0, 255).astype(np.uint8), text
    if flaw == "stripes":
        covered = (x + y) % max(size // 8, 4) < max(size // 16, 2)
        return np.where(covered[:, :, None], np.uint8(200), picture), text
    covered = (x * 8 // size + y * 8 // size) % 2 == 0  # chequers
    return np.where(covered[:, :, None], np.uint8(30), picture), text
