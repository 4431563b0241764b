"""Renders drawings of the same things in ten styles, with captions, into WebDataset tars.

    pip install -r requirements-data.txt
    python data_pipeline/01i_emoji_styles.py --fetch --packages data/packages      # npm pack, 43 MB; needs npm
    python data_pipeline/01i_emoji_styles.py --packages data/packages --out data/drawings --size 128 --workers 16
    python data_pipeline/01i_emoji_styles.py --fetch --packages data/packages --silhouettes data/silhouettes --size 256

Eleven packages of the npm registry hold drawings by the English name of what they show; --fetch gets them as .tgz
files, which can be carried to a machine without network. Each drawing gives a picture on white, two on coloured
backgrounds, two moved, turned and perhaps mirrored, two tinted ("a blue dog") where it has a main colour, and a part in
scenes of two things ("a cat to the left of a pizza"): about 74,000 pictures. Each picture's JSON has concept, style,
background, tint, kind, split (train or val), captions (five ways of saying it), package and licence; the .txt is the
first caption. What `val` shows is in no training picture in any form: pairs of a concept and a style, of a concept and
a colour, of two concepts (the rules are in sd/drawings.py). Left out: skin tones, flags of countries, clock faces,
families, symbols and signs, women's and men's versions of what people do. Run the same command again to go on after a
stop.

--silhouettes writes pictures for fine-tuning in a style that none of these packages has: plain ones on white of
@iconify-json/fluent-emoji-high-contrast 1.2.6 (MIT), of things by the same names, as NAME.png, NAME.txt ("red apple,
black silhouette") and NAME.json. `order` in the JSON is 1 to 240 of pictures to train on and 0 of 64 others, which
`SD_Train.py --pictures DIR --val_fraction 0.5` holds out: with --where "order<=60" it trains on 60, and the held-out
ones are the same for every number.
"""

import json
import re
import shutil
import subprocess
import tarfile
import unicodedata
from collections import Counter, defaultdict
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple

import _path  # noqa: F401
import cv2
import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sd import drawings
from sd.cli import parser
from sd.errors import InputError, run
from sd.files import atomic_write, claim_folder, make_folder, write_manifest
from sd.pictures import Reject, encode_png
from sd.shards import ShardWriter, build_shards, key_fraction

PACKAGES = {  # npm name: version, style, licence
    "@iconify-json/noto": ("1.2.9", "noto", "Apache-2.0"),
    "@iconify-json/openmoji": ("1.2.29", "openmoji", "CC-BY-SA-4.0"),
    "@iconify-json/twemoji": ("1.2.5", "twemoji", "CC-BY-4.0"),
    "@iconify-json/fluent-emoji-flat": ("1.2.6", "fluent_flat", "MIT"),
    "@lobehub/fluent-emoji-3d": ("1.1.0", "fluent", "MIT"),
    "@iconify-json/fluent-emoji": ("1.2.7", "fluent", "MIT"),  # the same drawings with gradients: they look as in 3d
    "@iconify-json/noto-v1": ("1.2.5", "noto_v1", "Apache-2.0"),
    "@iconify-json/emojione": ("1.2.3", "emojione", "CC-BY-4.0"),
    "@iconify-json/emojione-v1": ("1.2.3", "emojione_v1", "CC-BY-SA-4.0"),
    "@iconify-json/fxemoji": ("1.2.2", "fxemoji", "Apache-2.0"),
    "@iconify-json/streamline-emojis": ("1.2.4", "streamline", "CC-BY-4.0"),
}
SILHOUETTES = "@iconify-json/fluent-emoji-high-contrast"  # a style for fine-tuning, which the shards do not hold
FURTHER = {SILHOUETTES: ("1.2.6", "silhouette", "MIT")}
SILHOUETTE = "black silhouette"  # what captions call it
HELD_BELOW = 0.5  # silhouettes with a key_fraction below this are held out
TRAINED, HELD_OUT = 240, 64  # silhouettes
KINDS = ("plain", "colour", "jitter", "tint", "scene")
COLOURED = 2  # pictures on coloured backgrounds, of each drawing
JITTERED = 2
TINTED = 2  # in different colours, where the drawing can be tinted
SCENES = 2.5  # of two things, for each drawing that can be in one
DECIDED = 128  # pixels a side that decisions look at
EXTRA = 0.1  # share of the drawings that also show a held-out colour

SKIN = range(0x1F3FB, 0x1F400)
REGIONAL = range(0x1F1E6, 0x1F200)
TAG = range(0xE0000, 0xE0080)
HAIR = range(0x1F9B0, 0x1F9B4)
JOINER, FEMALE, MALE, RIGHT = 0x200D, 0x2640, 0x2642, 0x27A1
LEFT_OUT = re.compile(
    r"o'clock|thirty$|family|couple|holding hands|^kiss\b|keycap|button|arrow|input|\bsigns?\b|symbol|zodiac|facing"
    r"|\bletters?\b|square|circle|diamond|triangle|hundred points|exclamation|question|\bmark\b|^(men|women) with"
    r"|suit$|anger bubble|mx claus|breast-feeding|middle finger|pregnant|kaaba|bikini|face without"
)
# Names that do not say what is seen, as people would say it. The old name stays as another one where it helps.
RENAMED = {
    "bullseye": "dart target",
    "camping": "tent in the wild",
    "collision": "explosion",
    "construction": "construction barrier",
    "cooking": "frying pan with an egg",
    "cooked rice": "bowl of rice",
    "curry rice": "plate of curry",
    "dashing away": "puff of air",
    "dizzy": "dizzy star",
    "e-mail": "email letter",
    "ewe": "sheep",
    "field hockey": "field hockey stick",
    "flag in hole": "golf flag in a hole",
    "foggy": "foggy city",
    "high voltage": "lightning bolt",
    "ice": "ice cube",
    "ice hockey": "ice hockey stick",
    "label": "price tag",
    "link": "chain link",
    "locked": "padlock",
    "locked with key": "padlock with a key",
    "locked with pen": "padlock with a pen",
    "package": "cardboard box",
    "page with curl": "sheet of paper",
    "performing arts": "theatre masks",
    "person beard": "person with a beard",
    "person blond hair": "person with blond hair",
    "pick": "pickaxe",
    "popcorn": "box of popcorn",
    "unlocked": "open padlock",
    "watch": "wristwatch",
    "wedding": "wedding church",
}
NAMES = {  # other names in captions, besides those that `emoji` has
    "automobile": ("car",),
    "hot beverage": ("cup of coffee",),
    "deciduous tree": ("tree",),
    "airplane": ("plane",),
    "hamburger": ("burger",),
    "light bulb": ("bulb",),
    "open book": ("book",),
    "evergreen tree": ("fir tree",),
    "steaming bowl": ("bowl of soup",),
    "police car": ("patrol car",),
    "mobile phone": ("phone",),
    "television": ("tv",),
    "wrapped gift": ("present",),
    "sailboat": ("sailing boat",),
    "poultry leg": ("chicken leg",),
    "doughnut": ("donut",),
    "racing car": ("race car",),
    "locomotive": ("steam train",),
    "bouquet": ("bunch of flowers",),
    "spiral shell": ("seashell",),
    "lady beetle": ("ladybird",),
    "tangerine": ("mandarin",),
    "wastebasket": ("bin",),
    "bathtub": ("bath",),
    "eggplant": ("aubergine",),
    "high-heeled shoe": ("high heel",),
}
NOT_NAMES = set(
    "art|artificial satellite|barber|bath|birthday|boom|bow|bride|cake|chart|clap|cocktail|compression|crayon|date|feet"
    "|flags|flipper|golf|gun|hankey|harambe|hocho|imp|iphone|izakaya lantern|kissing|mag|mag right|medal|mute|notes"
    "|partly sunny|poo|poop|racehorse|rook|satisfied|shit|smoking|sound|speaker|stars|sunny|swim brief|tada|vhs|wave"
    "|zap|dash|fist oncoming|facepunch|muscle|pray|older man|older woman|joy cat|smile cat|smiley cat|smirk cat"
    "|scream cat|sleuth or spy|ok person|no good|information desk person|shopping|moyai|bamboo|three button mouse"
    "|computer|love hotel|hot springs|point up|point down|moon|earth asia|earth africa|earth americas|pouch".split("|")
)
# What a set calls by a name that another set gives to something else; None: not what the name says.
MEANT = {
    "@iconify-json/fxemoji": {
        **{animal: f"{animal} face" for animal in ("cat", "dog", "mouse", "pig", "tiger")},
        **{f"{animal}side": animal for animal in ("cat", "dog", "mouse", "pig", "tiger")},
        "sunrays": "sun",
        "window": None,
    },
    "@iconify-json/emojione-v1": {"window": None},
}


class Drawing(NamedTuple):
    """One drawing, with all that a worker needs."""

    concept: str
    style: str
    package: str
    group: str  # 'Food & Drink' and so on
    names: list[str]  # the concept, and other names of it
    held: set[str]  # the styles in which training does not see this concept
    body: str | bytes  # an SVG, or a WebP


def need(package: str, distribution: str):
    """Imports an optional package, or fails in one sentence."""
    try:
        return import_module(package)
    except ImportError:
        raise InputError(f"the package {distribution} is not installed: pip install -r requirements-data.txt") from None


# ---------------------------------------------------------------------------------------------------------------------
# Packages


def tgz_name(package: str) -> str:
    """How npm calls the file of a package, e.g. iconify-json-noto-1.2.9.tgz."""
    return f"{package.removeprefix('@').replace('/', '-')}-{(PACKAGES | FURTHER)[package][0]}.tgz"


def fetch(folder: Path, packages: dict[str, tuple[str, str, str]]) -> None:
    """Runs `npm pack` for each of the packages that is not in the folder yet."""
    if all((folder / tgz_name(package)).exists() for package in packages):
        return
    if shutil.which("npm") is None:
        raise InputError(
            "npm is not installed: install it (apt-get install npm), or run --fetch on a machine that has it and give "
            "the folder of .tgz files as --packages"
        )
    make_folder(folder)
    for package, (version, _, _) in packages.items():
        path = folder / tgz_name(package)
        if path.exists():
            continue
        temporary = make_folder(folder / "fetching.tmp")
        command = ["npm", "pack", "--silent", f"{package}@{version}", "--pack-destination", str(temporary)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0 or not (temporary / path.name).exists():
            last = (done.stderr or done.stdout).strip().splitlines()
            raise InputError(f"npm pack {package}@{version} failed ({last[-1] if last else 'no message'}): try again")
        (temporary / path.name).rename(path)
        temporary.rmdir()
        print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)")


def open_package(folder: Path, package: str) -> tarfile.TarFile:
    """The opened .tgz of a package, or fails in one sentence."""
    path = folder / tgz_name(package)
    if not path.exists():
        raise InputError(
            f"{path} is not there: run this script with --fetch --packages {folder} where npm is installed"
        )
    try:
        return tarfile.open(path, "r:gz")
    except (tarfile.TarError, OSError) as error:
        raise InputError(f"cannot read {path} ({error}): delete it and run --fetch again") from None


def read_member(tar: tarfile.TarFile, name: str) -> bytes:
    """The bytes of a file of an npm package."""
    try:
        return tar.extractfile(f"package/{name}").read()
    except (KeyError, EOFError, OSError, tarfile.TarError) as error:
        raise InputError(f"{tar.name} has no whole {name} ({error}): delete it and run --fetch again") from None


# ---------------------------------------------------------------------------------------------------------------------
# Which drawing shows what


def plain_code(characters: str) -> str:
    """Code points as the packages write them, without variation selectors: 1f3f4-200d-2620."""
    return "-".join(f"{ord(c):x}" for c in characters if c != "\ufe0f")


def squeeze(name: str) -> str:
    """A name without what sets differ in: case, accents, spaces, hyphens."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub("[^a-z0-9]", "", plain.lower())


def is_wanted(code: str, name: str, group: str) -> bool:
    """Whether pictures of these code points can be learned from their names."""
    points = [int(point, 16) for point in code.split("-")]
    if any(point in kind for point in points for kind in (SKIN, REGIONAL, TAG, HAIR)) or RIGHT in points[1:]:
        return False
    if JOINER in points and (MALE in points or FEMALE in points or points[0] in (0x1F468, 0x1F469)):
        return False
    return group != "Symbols" and not LEFT_OUT.search(name)


def read_names(icons: dict[str, tuple[dict, dict]]) -> tuple[dict[str, str], dict[str, list[str]], dict[str, str]]:
    """(name by code, other names by code, code by squeezed name), from `emoji`, Unicode and the sets themselves."""
    emoji = need("emoji", "emoji")
    names: dict[str, str] = {}
    others: dict[str, list[str]] = {}
    official: dict[str, str] = {}  # as `emoji` and the sets have it
    for characters, entry in emoji.EMOJI_DATA.items():
        code = plain_code(characters)
        name = " ".join(entry["en"].strip(":").replace("_", " ").replace("’", "'").split()).lower()
        names[code] = RENAMED.get(name, name)
        others[code] = [alias.strip(":").replace("_", " ") for alias in entry.get("alias", ())]
        official[code] = name
    meant: dict[str, dict[str, None]] = defaultdict(dict)  # squeezed name -> codes, the surest first
    for code, name in official.items():
        meant[squeeze(name)][code] = None
    for codes, _ in icons.values():
        for name, code in codes.items():
            if code in names:
                meant[squeeze(name)].setdefault(code)
    for code in names:
        if "-" not in code:
            meant[squeeze(unicodedata.name(chr(int(code, 16)), ""))].setdefault(code)
    for code, aliases in others.items():
        for alias in aliases:
            meant[squeeze(alias)].setdefault(code)
    meant.pop("", None)
    taken = set(names.values())
    usable = {}
    for code, aliases in others.items():
        name = names[code]
        usable[code] = [
            alias
            for alias in dict.fromkeys((*NAMES.get(name, ()), *aliases))
            if re.fullmatch(r"[a-z][a-z ]+", alias)
            and not alias.startswith("lower left")
            and alias not in taken
            and alias not in NOT_NAMES
            and squeeze(alias) != squeeze(name)
            and not (drawings.COLOUR_NAMES.search(alias) and not drawings.COLOUR_NAMES.search(name))
            and next(iter(meant.get(squeeze(alias), (code,)))) == code
            # other names of faces and gestures are mostly adjectives: 'pensive'
            and not re.search(r"hand|medal|fist", name)
            and (not re.search(r"face|person|cat$|monkey|laughing", name) or re.search(r"face|person|monkey", alias))
        ]
    return names, usable, {name: next(iter(codes)) for name, codes in meant.items()}


def read_set(folder: Path, package: str) -> tuple[dict, dict[str, str], dict]:
    """(icons.json, code by icon's name, metadata.json) of an Iconify set."""
    with open_package(folder, package) as tar:
        content = json.loads(read_member(tar, "icons.json"))
        codes = {name: code for code, name in json.loads(read_member(tar, "chars.json")).items()}
        about = json.loads(read_member(tar, "metadata.json"))
    return content, codes, about


def find_drawings(folder: Path) -> list[Drawing]:
    """All drawings that are used, in an order that mixes concepts and styles and is the same for ever."""
    sets, icons, groups = {}, {}, {}
    for package in PACKAGES:
        if package.startswith("@lobehub"):
            continue
        content, codes, about = read_set(folder, package)
        for alias, entry in content.get("aliases", {}).items():
            if entry["parent"] in codes:
                codes.setdefault(alias, codes[entry["parent"]])
        for group, members in about.get("categories", {}).items():
            for name in members:
                if name in codes:
                    groups.setdefault(codes[name], group)
        sets[package], icons[package] = content, (codes, about)
    names, others, code_of = read_names(icons)

    found: dict[tuple[str, str], Drawing] = {}  # (concept, package)
    bodies: set[str] = set()

    def add(package: str, code: str, body: str | bytes) -> None:
        name, group = names.get(code), groups.get(code, "")
        if name is None or not group or not is_wanted(code, name, group) or (name, package) in found:
            return
        if body in bodies:  # the same drawing under another name
            return
        bodies.add(body)
        style = PACKAGES[package][1]
        found[name, package] = Drawing(name, style, package, group, [name, *others[code]], set(), body)

    for package in PACKAGES:
        if package.startswith("@lobehub"):
            with open_package(folder, package) as tar:
                for member in tar:
                    path = Path(member.name)
                    if path.suffix == ".webp":
                        code = re.sub("-fe0f", "", path.stem)
                        if code in names and is_wanted(code, names[code], groups.get(code, "Symbols")):
                            add(package, code, tar.extractfile(member).read())
            continue
        content, (codes, about) = sets[package], icons[package]
        flags = set(about.get("categories", {}).get("Flags", ()))  # one of them is called 'turkey'
        for name, icon in sorted(content["icons"].items()):
            base = re.sub(r"-\d$", "", name) if package.endswith("streamline-emojis") else name
            base = MEANT.get(package, {}).get(name, base)
            code = base and (codes.get(name) or code_of.get(squeeze(base)))
            if code is not None and not icon.get("hidden") and (name not in flags or groups.get(code) == "Flags"):
                add(package, code, svg_of(icon, content))
    styles = defaultdict(set)
    for drawing in found.values():
        styles[drawing.concept].add(drawing.style)
    held = {concept: drawings.held_styles(concept, present) for concept, present in styles.items()}
    order = sorted(found.values(), key=lambda d: drawings.fraction("order", d.concept, d.package))
    return [drawing._replace(held=held[drawing.concept]) for drawing in order]


def find_silhouettes(folder: Path) -> list[Drawing]:
    """The silhouettes of animals, food, objects, places and activities, in an order that is the same for ever."""
    content, codes, about = read_set(folder, SILHOUETTES)
    names, _, _ = read_names({})
    found: dict[str, Drawing] = {}
    for group, members in about["categories"].items():
        for icon in sorted(set(members) & set(content["icons"]) & set(codes)):
            name = names.get(codes[icon])
            if name is None or not is_thing(group) or not is_wanted(codes[icon], name, group):
                continue
            body = svg_of(content["icons"][icon], content)
            found.setdefault(name, Drawing(name, FURTHER[SILHOUETTES][1], SILHOUETTES, group, [name], set(), body))
    return sorted(found.values(), key=lambda drawing: drawings.fraction("silhouettes", drawing.concept))


def svg_of(icon: dict, content: dict) -> str:
    """An icon of an Iconify set as an SVG file."""
    left, top = icon.get("left", 0), icon.get("top", 0)
    width = icon.get("width", content.get("width", 16))
    height = icon.get("height", content.get("height", 16))
    side = max(width, height)  # square, the drawing in the middle
    box = f"{left - (side - width) / 2:g} {top - (side - height) / 2:g} {side:g} {side:g}"
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="{box}">{icon["body"]}</svg>'
    )


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


def render(resvg, body: str | bytes, size: int) -> np.ndarray:
    """A drawing as RGBA uint8 [size, size, 4], or its own size for a WebP; Reject if it does not render or is blank."""
    try:
        data = body if isinstance(body, bytes) else resvg.svg_to_bytes(
            svg_string=body, width=size, height=size, skip_system_fonts=True
        )  # fmt: skip
    except (ValueError, RuntimeError):
        raise Reject("not_rendered") from None
    image = cv2.imdecode(np.frombuffer(bytes(data), np.uint8), cv2.IMREAD_UNCHANGED)
    if image is None or image.ndim != 3 or image.shape[2] != 4 or image.shape[0] != image.shape[1]:
        raise Reject("not_rendered")
    image = np.ascontiguousarray(image[..., [2, 1, 0, 3]])
    if (image[..., 3] > 127).mean() < 0.02:
        raise Reject("blank")
    return image


def choose(words, *key: str) -> list[str]:
    """The words in an order that belongs to the key."""
    return sorted(words, key=lambda word: drawings.fraction("choice", *key, word))


def can_mirror(name: str) -> bool:
    """Whether a mirrored picture still shows what the name says."""
    return not re.search(r"left|right|book|newspaper|calendar|abc|keyboard|bill|banknote|map|ticket|label", name)


class Look(NamedTuple):
    """A drawing as RGBA uint8: as large as pictures want it, and DECIDED pixels a side. What pictures there are is
    decided by the latter, so that those of any --size have the same keys and captions."""

    rgba: np.ndarray
    small: np.ndarray

    def tinted(self, colour: str) -> "Look | None":
        """In another colour; None if it cannot be."""
        small = drawings.tint_drawing(self.small, colour)
        if small is None:
            return None
        return Look(drawings.tint(self.rgba, drawings.main_colour(self.small), colour), small)


def look_at(resvg, body: str | bytes, size: int) -> Look:
    """The look of a drawing for pictures of that size; Reject if it does not render, is blank, or white on white."""
    rgba, small = render(resvg, body, 2 * size), render(resvg, body, DECIDED)
    if len(small) != DECIDED:  # a WebP
        small = cv2.resize(small, (DECIDED, DECIDED), interpolation=cv2.INTER_AREA)
    if (np.abs(drawings.on_ground(small, DECIDED, "white").astype(int) - 255).max(2) > 12).mean() < 0.02:
        raise Reject("white_on_white")
    return Look(rgba, small)


def pictures_of(drawing: Drawing, look: Look, size: int):
    """Yields (kind, picture RGB uint8, background, tint, split) for each picture of one drawing."""
    rgba, small = look
    concept, style, held = drawing.concept, drawing.style, drawing.held
    key = (concept, drawing.package)

    def split(background: str, tint: str) -> str:
        return drawings.split(concept, style, background, tint, held)

    yield "plain", drawings.on_ground(rgba, size, "white"), "white", "", split("white", "")
    if style in held:  # shown once, to compare with
        return
    fits = [
        c for c in choose(drawings.BACKGROUNDS, "ground", *key) if drawings.stands_out(small, drawings.BACKGROUNDS[c])
    ]
    trained = [colour for colour in fits if not drawings.held_colour(concept, colour)]
    unseen = [colour for colour in fits if drawings.held_colour(concept, colour)]
    extra = drawings.fraction("extra", *key) < EXTRA
    for colour in trained[:COLOURED] + unseen[: int(extra)]:
        yield "colour", drawings.on_ground(rgba, size, colour), colour, "", split(colour, "")

    rng = np.random.default_rng(int(drawings.fraction("jitter", *key) * 2**48))
    part = drawings.crop(rgba)
    for number in range(JITTERED):
        ground = trained[-1 - number // 2] if number % 2 and len(trained) > COLOURED + number // 2 else "white"
        picture = drawings.canvas(size, ground)
        side = rng.uniform(0.5, 0.9)
        centre = 0.5 + rng.uniform(-1, 1, 2) * (0.97 - side) / 2
        mirror = can_mirror(concept) and bool(rng.integers(2))
        drawings.place(part, picture, centre, side, rng.uniform(-12, 12), mirror)
        yield "jitter", picture, ground, "", split(ground, "")

    if can_tint(drawing):
        left = {"train": TINTED, "val": int(extra)}
        for tint in choose(drawings.TINTS, "tint", *key):
            side = split("white", tint)
            tinted = look.tinted(tint) if left[side] else None
            if tinted is not None:
                left[side] -= 1
                yield "tint", drawings.on_ground(tinted.rgba, size, "white"), "white", tint, side


def can_tint(drawing: Drawing) -> bool:
    """Whether 'a blue ...' can be said of it: not of people, nor of what has a colour in its name."""
    return "People" not in drawing.group and not drawings.COLOUR_NAMES.search(drawing.concept)


def is_thing(group: str) -> bool:
    """Whether a group holds animals and things, rather than people, faces and flags."""
    return bool(re.match("Animals|Food|Objects|Travel|Activit", group))


def in_scenes(drawing: Drawing) -> bool:
    """Whether it is a thing that stands beside others."""
    if re.search(
        r"sunrise|sunset|\bcity|night|milky|foggy|fireworks|\bmap\b|chart|moon|wave|fog$|park$|desert", drawing.concept
    ):
        return False
    return is_thing(drawing.group) and drawing.style not in drawing.held and len(drawing.concept.split()) <= 3


def scenes_of(made: list[tuple[Drawing, Look]], number: int, size: int):
    """Yields (two drawings, names of the two in the captions, relation, background, picture, split) for a shard."""
    rng = np.random.default_rng([0x5CE2E, number])
    by_package = defaultdict(list)
    for drawing, look in made:
        if in_scenes(drawing):
            by_package[drawing.package].append((drawing, look))
    for package in sorted(by_package):
        members = by_package[package]
        if len(members) < 2:
            continue
        for _ in range(round(SCENES * len(members))):
            (a, look_a), (b, look_b) = (members[i] for i in rng.choice(len(members), 2, replace=False))
            names = [a.concept, b.concept]
            looks = [look_a, look_b]
            for i, drawing in enumerate((a, b)):
                tint = str(rng.choice(list(drawings.TINTS)))
                if rng.random() < 0.25 and can_tint(drawing) and not drawings.held_colour(drawing.concept, tint):
                    tinted = looks[i].tinted(tint)
                    if tinted is not None:
                        looks[i], names[i] = tinted, f"{tint} {drawing.concept}"
            relation = str(rng.choice(drawings.RELATIONS))
            ground = str(rng.choice(["white", "white", *drawings.BACKGROUNDS]))
            if ground != "white" and not all(
                drawings.stands_out(look.small, drawings.BACKGROUNDS[ground])
                and not drawings.held_colour(drawing.concept, ground)
                for drawing, look in zip((a, b), looks)
            ):
                ground = "white"
            picture = drawings.canvas(size, ground)
            for look, centre in zip(looks, drawings.scene_centres(relation)):
                side = rng.uniform(0.38, 0.45)
                jitter = rng.uniform(-1, 1, 2) * 0.015
                drawings.place(drawings.crop(look.rgba), picture, np.array(centre) + jitter, side)
            split = "val" if drawings.held_scene(a.concept, b.concept) else "train"
            yield (a, b), names, relation, ground, picture, split


def about(drawing: Drawing, kind: str, ground: str, tint: str, split: str, captions: list[str], size: int) -> dict:
    """The metadata of a picture; '' where something does not apply."""
    return {
        "concept": drawing.concept,
        "style": drawing.style,
        "background": ground,
        "tint": tint,
        "kind": kind,
        "split": split,
        "other": "",
        "relation": "",
        "captions": captions,
        "package": drawing.package,
        "licence": PACKAGES[drawing.package][2],
        "width": size,
        "height": size,
    }


def write_shard(path: Path, number: int, items: list[Drawing], size: int) -> int:
    """Renders the drawings of one shard with all pictures of them; returns how many drawings it has dealt with."""
    resvg = need("resvg_py", "resvg-py")
    made = []
    count = 0
    with ShardWriter(path) as shard:

        def add(picture: np.ndarray, facts: dict) -> None:
            nonlocal count
            captions = facts["captions"]
            if facts["kind"] != "plain":  # the first caption is not always of the same form
                turn = count % len(captions)
                facts["captions"] = captions[turn:] + captions[:turn]
            shard.add(f"{number:05d}{count:05d}", encode_png(picture), "png", facts["captions"][0], facts)
            count += 1

        for drawing in items:
            try:
                look = look_at(resvg, drawing.body, size)
                for kind, picture, ground, tint, split in pictures_of(drawing, look, size):
                    captions = drawings.captions(drawing.names, drawing.style, ground, tint)
                    add(picture, about(drawing, kind, ground, tint, split, captions, size))
            except Reject as reject:
                shard.reject(reject.reason)
                continue
            made.append((drawing, look))
        for (a, b), names, relation, ground, picture, split in scenes_of(made, number, size):
            captions = drawings.scene_captions(*names, relation, a.style, ground)
            facts = about(a, "scene", ground, "", split, captions, size)
            add(picture, {**facts, "other": b.concept, "relation": relation})
    return len(items)


def write_silhouettes(packages: Path, out: Path, size: int) -> Counter:
    """Writes a folder of pictures with captions (see the first lines of this file); how many are trained and held out.
    Which side a picture is on is that of SD_Train.py: it depends on the folder's name and the file's alone."""
    resvg = need("resvg_py", "resvg-py")
    found = find_silhouettes(packages)
    version, style, licence = FURTHER[SILHOUETTES]
    settings = {"silhouettes": SILHOUETTES, "version": version, "licence": licence, "size": size}
    claim_folder(out, "01i_emoji_styles.py", settings)
    done = Counter()
    for drawing in found:
        name = re.sub("[^a-z0-9]+", "_", drawing.concept).strip("_")
        side = "held out" if key_fraction(f"{out.name}/{name}.png") < HELD_BELOW else "trained"
        if done[side] == (HELD_OUT if side == "held out" else TRAINED):
            continue
        try:
            look = look_at(resvg, drawing.body, size)
        except Reject:
            continue
        done[side] += 1
        facts = {"concept": drawing.concept, "style": style, "order": done[side] if side == "trained" else 0,
                 "package": SILHOUETTES, "licence": licence}  # fmt: skip
        atomic_write(out / f"{name}.png", encode_png(drawings.on_ground(look.rgba, size, "white")))
        atomic_write(out / f"{name}.txt", f"{drawing.concept}, {SILHOUETTE}\n")
        atomic_write(out / f"{name}.json", json.dumps(facts) + "\n")
    counts = dict(sorted(done.items()))
    write_manifest(out, {"script": "01i_emoji_styles.py", "settings": settings, "complete": True, "counts": counts})
    return done


def count_pictures(folder: Path) -> dict[str, dict[str, int]]:
    """How many pictures there are by kind, style, split and licence, from the shards' parquet files."""
    counts = {name: Counter() for name in ("kind", "style", "split", "licence")}
    for path in sorted(folder.glob("*.parquet")):
        table = pq.read_table(path, columns=list(counts))
        for name, counter in counts.items():
            for entry in pc.value_counts(table.column(name)).to_pylist():
                counter[entry["values"]] += entry["counts"]
    return {name: dict(sorted(counter.items())) for name, counter in counts.items()}


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("drawings")
    g.add_argument("--packages", type=Path, default=Path("data/packages"), help="folder of the packages' .tgz files")
    g.add_argument("--fetch", action="store_true", help="get the packages that are missing there, with npm")

    g = p.add_argument_group("pictures")
    g.add_argument(
        "--out", help="folder of the source, as data/drawings, which gets images/*.tar; default: nothing is rendered"
    )
    g.add_argument(
        "--silhouettes", type=Path, metavar="DIR", help="folder for pictures of another style, to fine-tune with; "
        "default: none are written"
    )  # fmt: skip
    g.add_argument("--size", type=int, default=128, help="side in pixels")
    g.add_argument("--limit", type=int, help="only so many drawings, of about six pictures each; default: all")

    g = p.add_argument_group("running")
    g.add_argument("--shard_size", type=int, default=100, help="drawings a tar, 2 to 1,000")
    g.add_argument("--workers", type=int, default=1, help="processes")
    args = p.parse_args()
    if not (args.fetch or args.out or args.silhouettes):
        raise InputError(
            "nothing to do: give --fetch to get the packages, --out or --silhouettes to render them, or both"
        )
    if args.size < 32 or not 2 <= args.shard_size <= 1000 or (args.limit is not None and args.limit < 1):
        raise InputError("--size must be at least 32, --shard_size from 2 to 1,000, --limit at least 1")
    if args.fetch:
        wanted = FURTHER if args.silhouettes else {}
        fetch(args.packages, wanted | PACKAGES if args.out or not wanted else wanted)
    if args.silhouettes:
        done = write_silhouettes(args.packages, args.silhouettes, args.size)
        print(f"{args.silhouettes}: {done['trained']} silhouettes to train on, {done['held out']} held out")
    if not args.out:
        return
    need("resvg_py", "resvg-py")
    found = find_drawings(args.packages)
    held = sum(len(held) for held in {drawing.concept: drawing.held for drawing in found}.values())
    concepts = len({drawing.concept for drawing in found})
    print(f"{len(found):,} drawings of {concepts:,} concepts; {held:,} pairs of concept and style held out")
    settings = {name: getattr(args, name) for name in ("size", "limit", "shard_size")}
    settings["packages"] = {name: {"version": v, "licence": licence} for name, (v, _, licence) in PACKAGES.items()}
    settings["versions"] = {name: metadata.version(name) for name in ("emoji", "resvg-py")}
    manifest = build_shards(
        args.out, "01i_emoji_styles.py", settings, found[: args.limit], write_shard, (args.size,), args.shard_size,
        args.workers,
    )  # fmt: skip
    counts = count_pictures(Path(args.out) / "images")
    write_manifest(Path(args.out) / "images", {**manifest, "counts": counts})
    print(f"{manifest['pictures']:,} pictures in {manifest['shards']} shards: {args.out}/images")
    for name, counter in counts.items():
        print(f"{name}: " + ", ".join(f"{value} {count:,}" for value, count in counter.items()))
    print(f"rejected: {manifest['rejected'] or 'none'}")


if __name__ == "__main__":
    run(main)
