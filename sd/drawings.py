"""The world of the drawings: styles, colours, places, the words for them, and which pairs training never sees.

    drawings.held_styles("owl", {"twemoji", "noto", "openmoji", "fluent"})   # the styles in which no owl is trained
    drawings.held_colour("owl", "blue")                                     # whether no blue owl is trained
    drawings.captions(["owl"], "openmoji", "blue", "")[0]                    # owl, ink outline drawing, blue background

A *concept* is the English name of a thing ("red apple"), a *style* one way of drawing (a key of STYLES). The script
that makes the pictures and the one that measures painted ones share these rules. Nothing here is random: whatever looks
so is a hash of names, the same for ever.
"""

import hashlib
import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

import cv2
import numpy as np

STYLES = {  # the words that captions use: the first is the usual one
    "fluent": ("3d render", "glossy 3d icon"),
    "fluent_flat": ("bold flat icon", "icon of bold flat shapes"),
    "openmoji": ("ink outline drawing", "drawing with thick black outlines"),
    "twemoji": ("flat drawing", "flat illustration"),
    "noto": ("shaded cartoon", "cartoon with soft shading"),
    "noto_v1": ("two-tone cartoon", "rounded two-tone cartoon"),
    "emojione": ("clip art", "colourful clip art"),
    "emojione_v1": ("poster drawing", "retro poster drawing"),
    "fxemoji": ("minimal icon", "simple minimal icon"),
    "streamline": ("pastel sticker", "outlined pastel sticker"),
}

# Styles that draw a thing alike, with other shading: they are held out together, or one would be a copy of the other.
TWINS = {"fluent_flat": "fluent"}

BACKGROUNDS = {  # RGB; besides white
    "red": (215, 40, 45),
    "orange": (250, 145, 30),
    "yellow": (250, 225, 70),
    "green": (40, 160, 75),
    "blue": (50, 95, 215),
    "purple": (135, 60, 175),
    "pink": (250, 155, 195),
    "grey": (150, 150, 150),
    "black": (20, 20, 20),
}

TINTS = {  # CIE Lab lightness, chroma and hue (degrees) that a tinted drawing gets
    "red": (50.0, 75.0, 33.0),
    "orange": (69.0, 72.0, 62.0),
    "yellow": (87.0, 75.0, 94.0),
    "green": (57.0, 58.0, 143.0),
    "blue": (48.0, 62.0, 283.0),
    "purple": (42.0, 65.0, 313.0),
    "pink": (73.0, 48.0, 355.0),
}

COLOUR_WORDS = {  # RGB of what people call by each word, some examples each: a colour has the word of the nearest one
    "red": [(215, 40, 45), (235, 70, 65), (175, 25, 40), (140, 20, 25), (250, 55, 75)],
    "orange": [(250, 145, 30), (255, 170, 75), (235, 120, 40), (225, 105, 15), (250, 160, 60)],
    "yellow": [(250, 225, 70), (255, 205, 50), (255, 235, 140), (235, 200, 30), (200, 175, 30)],
    "green": [(40, 160, 75), (120, 190, 70), (20, 105, 55), (90, 210, 120), (170, 220, 110), (50, 140, 120)],
    "blue": [(50, 95, 215), (65, 160, 240), (30, 55, 140), (130, 190, 245), (40, 75, 190), (70, 190, 225)],
    "purple": [(135, 60, 175), (165, 110, 225), (90, 35, 120), (190, 130, 215), (110, 60, 200)],
    "pink": [(250, 155, 195), (245, 110, 165), (255, 190, 205), (225, 130, 165), (235, 80, 150)],
    "brown": [(130, 80, 45), (165, 110, 70), (95, 55, 35), (195, 150, 105)],
    "white": [(255, 255, 255), (235, 238, 242)],
    "grey": [(150, 150, 150), (110, 112, 118), (195, 198, 203)],
    "black": [(20, 20, 20), (50, 50, 55)],
}

RELATIONS = ("left", "right", "above", "below")  # where the first of two things is, seen from the second

# Shares held out for the measure. At most the pairs that leave a concept three trained styles are taken.
HELD_STYLES = 0.1
HELD_COLOURS = 0.15
HELD_SCENES = 0.10
MIN_TRAINED = 3

FAMILIAR = (  # things that everyone can name: the prompts of the measure's names and scenes
    "red apple", "dog", "automobile", "pizza", "house", "deciduous tree", "fire", "sun", "rainbow", "cat",
    "open book", "guitar", "rocket", "banana", "rose", "butterfly", "fish", "elephant", "penguin", "hamburger",
    "hot beverage", "bicycle", "airplane", "sailboat", "umbrella", "crown", "key", "light bulb", "snowman", "mushroom",
    "strawberry", "birthday cake", "robot", "ghost", "unicorn", "owl", "castle", "volcano", "balloon", "teddy bear",
)  # fmt: skip

COLOUR_NAMES = re.compile(r"\b(red|orange|yellow|green|blue|purple|pink|brown|white|grey|gray|black|golden?|silver)\b")
_NO_ARTICLE = re.compile(
    r"(?<![suo])s$|^(fire|rice|bread|fog|wind|hair|money|sake|beans?|broccoli|garlic|cooking|sushi|bacon|honey|butter|salt"
    r"|moss|ice|confetti|thread|yarn|poo|pile of poo|luggage|hockey|lacrosse|soccer|nose|collision|film frames)$"
    r"|^(two|three|people|men|women|crossed|clapping|folded|raising|palms|open hands|hear|see|speak)\b"
)


# ---------------------------------------------------------------------------------------------------------------------
# What training never sees


def fraction(*words: str) -> float:
    """A number in [0, 1) that belongs to these words for ever."""
    digest = hashlib.blake2b("/".join(("drawings", *words)).encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def held_styles(concept: str, styles: Iterable[str]) -> set[str]:
    """The styles, of those that a concept is drawn in, that training does not see it in; MIN_TRAINED always remain,
    and TWINS stay together."""
    families: dict[str, set[str]] = {}
    for style in styles:
        families.setdefault(TWINS.get(style, style), set()).add(style)
    held: set[str] = set()
    left = sum(map(len, families.values()))
    for number, family in sorted((fraction("style", concept, family), family) for family in families):
        if number < HELD_STYLES and left - len(families[family]) >= MIN_TRAINED:
            held |= families[family]
            left -= len(families[family])
    return held


def held_colour(concept: str, colour: str) -> bool:
    """Whether training never sees this concept in this colour, nor on a background of it. White is always seen."""
    return colour not in ("", "white") and fraction("colour", concept, colour) < HELD_COLOURS


def held_scene(first: str, second: str) -> bool:
    """Whether training never sees these two concepts together, in either order."""
    return fraction("scene", *sorted((first, second))) < HELD_SCENES


def split(concept: str, style: str, background: str, tint: str, held: set[str]) -> str:
    """`train` or `val` of a picture of one thing; `held` is what held_styles() gives for the concept."""
    unseen = style in held or held_colour(concept, background) or held_colour(concept, tint)
    return "val" if unseen else "train"


# ---------------------------------------------------------------------------------------------------------------------
# Words


def with_article(name: str) -> str:
    """'an owl' for 'owl', 'a unicorn', 'sunglasses' for 'sunglasses'; with a colour in front, the colour decides."""
    if _NO_ARTICLE.search(COLOUR_NAMES.sub("", name).strip()):
        return name
    vowel = re.match(r"[aeiou]|hour", name, re.IGNORECASE) and not re.match(
        r"(uni|eu|one|ukulele)", name, re.IGNORECASE
    )
    return f"{'an' if vowel else 'a'} {name}"


def captions(names: list[str], style: str, background: str = "white", tint: str = "") -> list[str]:
    """What a picture of one thing can be called: the plain form first, then other names, orders and words.

    names: the concept, then other names of it; style: a key of STYLES; background: a key of BACKGROUNDS, or 'white',
    which only some captions mention; tint: a key of TINTS, or ''."""
    usual, other = STYLES[style]
    called = [f"{tint} {name}".strip() for name in names]
    first, last = called[0], called[-1]
    middle = called[len(called) // 2]
    plain = background == "white"
    ground = f"{background} background"
    return [
        f"{first}, {usual}" + ("" if plain else f", {ground}"),
        f"{usual} of {with_article(last)}" + ("" if plain else f" on a {ground}"),
        f"{with_article(first)}, {usual}, on a {ground}",
        f"{with_article(middle)}, {other}" + ("" if plain else f", on a {ground}"),
        f"{usual}, {last}, {ground}",
    ]


def scene_captions(first: str, second: str, relation: str, style: str, background: str = "white") -> list[str]:
    """What a picture of two things can be called. `relation` is where the first is, seen from the second."""
    usual, other = STYLES[style]
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}[relation]
    a, b = with_article(first), with_article(second)
    ground = "" if background == "white" else f", on a {background} background"
    beside = relation in ("left", "right")

    def place(x: str, where: str, y: str) -> str:
        return f"{x} to the {where} of {y}" if beside else f"{x} {where} {y}"

    made = [f"{place(a, relation, b)}, {usual}{ground}", f"{place(b, opposite, a)}, {usual}{ground}"]
    if beside:
        made += [f"{a} next to {b}, {usual}{ground}", f"{b} next to {a}, {other}{ground}"]
    else:
        made += [f"{usual} of {place(a, relation, b)}{ground}", f"{place(b, opposite, a)}, {other}{ground}"]
    return [*made, f"{a} and {b}, {usual}{ground}"]


# ---------------------------------------------------------------------------------------------------------------------
# Colours


def to_lab(rgb: np.ndarray) -> np.ndarray:
    """RGB uint8 [..., 3] to CIE Lab float32 [..., 3] (L 0 to 100)."""
    flat = np.ascontiguousarray(rgb, np.float32).reshape(1, -1, 3) / 255
    return cv2.cvtColor(flat, cv2.COLOR_RGB2Lab).reshape(rgb.shape)


def from_lab(lab: np.ndarray) -> np.ndarray:
    """CIE Lab float32 [..., 3] to RGB uint8, cut to what RGB can show."""
    flat = np.ascontiguousarray(lab, np.float32).reshape(1, -1, 3)
    rgb = cv2.cvtColor(flat, cv2.COLOR_Lab2RGB).reshape(lab.shape)
    return np.rint(np.clip(rgb, 0, 1) * 255).astype(np.uint8)


_WORDS = list(COLOUR_WORDS)
_EXAMPLES = np.array(list(itertools.chain.from_iterable(COLOUR_WORDS.values())), np.uint8)
_WORD_OF_EXAMPLE = np.repeat(np.arange(len(_WORDS)), [len(examples) for examples in COLOUR_WORDS.values()])


def colour_words(lab: np.ndarray) -> np.ndarray:
    """The place in COLOUR_WORDS of the word for each colour: Lab [N, 3] -> int [N]."""
    distance = np.linalg.norm(lab[:, None] - to_lab(_EXAMPLES)[None], axis=2)
    return _WORD_OF_EXAMPLE[distance.argmin(1)]


def colour_of(lab: np.ndarray, least: float = 0.0) -> str:
    """The word for the colour of a thing, of its pixels Lab [N, 3]: the most frequent one among those that have a
    colour (outlines, highlights and shadows are grey); '' without any, or if its share of those is below `least`."""
    coloured = lab[np.hypot(lab[:, 1], lab[:, 2]) > 20]
    if len(coloured) < 0.2 * len(lab) or not len(lab):
        return ""
    counts = np.bincount(colour_words(coloured[:: max(1, len(coloured) // 1500)]), minlength=len(_WORDS))
    return _WORDS[int(counts.argmax())] if counts.max() >= least * counts.sum() else ""


def nearest_background(rgb: np.ndarray) -> str:
    """The word of the background that is nearest to a colour [3]: 'white' or a key of BACKGROUNDS."""
    palette = {"white": (255, 255, 255), **BACKGROUNDS}
    distance = np.linalg.norm(to_lab(np.array(list(palette.values()), np.uint8)) - to_lab(rgb.astype(np.uint8)), axis=1)
    return list(palette)[int(distance.argmin())]


class Colour(NamedTuple):
    """The main colour of a drawing, in CIE Lab: hue in degrees, lightness and chroma."""

    hue: float
    light: float
    chroma: float


def main_colour(rgba: np.ndarray) -> Colour | None:
    """The colour that most of a drawing, RGBA uint8 [H, W, 4], is of; None where there is no such."""
    lab, seen = to_lab(rgba[..., :3]), rgba[..., 3] > 127
    chroma = np.hypot(lab[..., 1], lab[..., 2])
    hue = np.degrees(np.arctan2(lab[..., 2], lab[..., 1]))
    coloured = seen & (chroma > 14)
    if coloured.sum() < 0.2 * max(1, seen.sum()):
        return None
    turns = np.bincount((hue[coloured] % 360 // 10).astype(int), minlength=36).astype(float)
    smooth = turns + np.roll(turns, 1) + np.roll(turns, -1)
    around = 10 * int(smooth.argmax()) + 5
    away = (hue - around + 180) % 360 - 180
    main = coloured & (np.abs(away) < 50)
    light_enough = seen & ((lab[..., 0] > 30) | coloured)  # not outlines
    if main.sum() < max(0.6 * coloured.sum(), 0.45 * light_enough.sum()):
        return None
    return Colour(around + np.median(away[main]), np.median(lab[..., 0][main]), np.median(chroma[main]))


def tint(rgba: np.ndarray, main: Colour, colour: str) -> np.ndarray:
    """A drawing, RGBA uint8 [H, W, 4], with its main colour turned into another (a key of TINTS): its hue is rotated,
    its lightness and chroma moved to that colour's, with shading kept. Parts of quite another hue, as a leaf at an
    apple, stay."""
    lab = to_lab(rgba[..., :3])
    chroma = np.hypot(lab[..., 1], lab[..., 2])
    away = (np.degrees(np.arctan2(lab[..., 2], lab[..., 1])) - main.hue + 180) % 360 - 180
    target_light, target_chroma, target_hue = TINTS[colour]
    # Full effect up to 45 degrees from the main hue, none from 60 on; none where there is no colour.
    part = np.clip((60 - np.abs(away)) / 15, 0, 1) * np.clip((chroma - 8) / 8, 0, 1)
    new_hue, new_chroma = np.radians(target_hue + 0.25 * away), chroma * (target_chroma / main.chroma)
    light = np.clip(lab[..., 0] + (target_light - main.light), 3, 97)
    new = np.stack([light, new_chroma * np.cos(new_hue), new_chroma * np.sin(new_hue)], -1)
    tinted = rgba.copy()
    tinted[..., :3] = from_lab(lab + part[..., None] * (new - lab))
    return tinted


def tint_drawing(rgba: np.ndarray, colour: str) -> np.ndarray | None:
    """A drawing, RGBA uint8 [H, W, 4], tinted; None where it has no main colour, or does not become what the word
    says."""
    main = main_colour(rgba)
    if main is None:
        return None
    tinted, seen = tint(rgba, main, colour), rgba[..., 3] > 127
    return tinted if colour_of(to_lab(tinted[..., :3])[seen], least=0.7) == colour else None


def stands_out(rgba: np.ndarray, background: tuple[int, int, int]) -> bool:
    """Whether a drawing, RGBA uint8 [H, W, 4], can be seen on a plain colour: most of its edge differs from it, and
    most of its inside."""
    solid = (rgba[..., 3] > 127).astype(np.uint8)
    width = max(1, len(rgba) // 40)
    edge = (solid - cv2.erode(solid, np.ones((2 * width + 1,) * 2, np.uint8), borderValue=0)).astype(bool)
    if not edge.any():
        return False
    distance = np.linalg.norm(to_lab(rgba[..., :3]) - to_lab(np.array(background, np.uint8)), axis=2)
    return bool((distance[edge] > 25).mean() > 0.6 and (distance[solid.astype(bool)] > 25).mean() > 0.5)


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def crop(rgba: np.ndarray) -> np.ndarray:
    """The part of an RGBA picture that holds something; the whole of it where that is nothing."""
    solid = rgba[..., 3] > 8
    if not solid.any():
        return rgba
    rows, columns = np.flatnonzero(solid.any(1)), np.flatnonzero(solid.any(0))
    return rgba[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def place(
    rgba: np.ndarray,
    canvas: np.ndarray,
    centre: tuple[float, float],
    side: float,
    turn: float = 0.0,
    mirror: bool = False,
) -> None:
    """Draws a drawing, RGBA uint8 [h, w, 4], on a canvas, RGB uint8 [H, W, 3], in place: its middle at `centre` (x, y
    over the canvas's side), its longer side `side` of the canvas's, turned by `turn` degrees, mirrored or not."""
    size = len(canvas)
    if mirror:
        rgba = rgba[:, ::-1]
    premultiplied = rgba.astype(np.float32)
    premultiplied[..., :3] *= premultiplied[..., 3:] / 255
    scale = side * size / max(rgba.shape[:2])
    if scale < 0.5 or (turn == 0 and scale < 1):  # linear interpolation would skip pixels
        wanted = scale if turn == 0 else 2 * scale
        shape = tuple(max(1, round(wanted * length)) for length in (rgba.shape[1], rgba.shape[0]))
        premultiplied = cv2.resize(premultiplied, shape, interpolation=cv2.INTER_AREA)
        scale = side * size / max(premultiplied.shape[:2]) if turn else 1.0
    high, wide = premultiplied.shape[:2]
    middle = (wide - 1) / 2, (high - 1) / 2
    move = cv2.getRotationMatrix2D(middle, turn, scale)
    move[:, 2] += np.array(centre) * size - 0.5 - middle
    if scale == 1 and turn == 0:
        move[:, 2] = np.rint(move[:, 2])  # whole pixels stay sharp
    warped = np.clip(cv2.warpAffine(premultiplied, move, (size, size), flags=cv2.INTER_LINEAR), 0, 255)
    canvas[:] = np.rint(warped[..., :3] + canvas * (1 - warped[..., 3:] / 255)).astype(np.uint8)


def scene_centres(relation: str) -> tuple[tuple[float, float], tuple[float, float]]:
    """The middles (x, y over the side) of the first and the second thing of a scene."""
    first = {"left": (0.26, 0.5), "right": (0.74, 0.5), "above": (0.5, 0.26), "below": (0.5, 0.74)}[relation]
    return first, (1 - first[0], 1 - first[1])


def canvas(size: int, background: str) -> np.ndarray:
    """A plain picture, RGB uint8 [size, size, 3], of 'white' or a key of BACKGROUNDS."""
    return np.full((size, size, 3), BACKGROUNDS.get(background, (255, 255, 255)), np.uint8)


def on_ground(rgba: np.ndarray, size: int, background: str) -> np.ndarray:
    """A drawing, RGBA uint8 [S, S, 4] with S >= size, on a plain background: RGB uint8 [size, size, 3]."""
    premultiplied = rgba.astype(np.float32)
    premultiplied[..., :3] *= premultiplied[..., 3:] / 255
    if len(rgba) != size:
        method = cv2.INTER_AREA if len(rgba) > size else cv2.INTER_CUBIC
        premultiplied = np.clip(cv2.resize(premultiplied, (size, size), interpolation=method), 0, 255)
    ground = canvas(size, background)
    return np.rint(premultiplied[..., :3] + ground * (1 - premultiplied[..., 3:] / 255)).astype(np.uint8)
