"""Results of evaluations: what was measured, under which protocol, and whether two of them may be compared."""

import hashlib
import json
from pathlib import Path

import numpy as np

from sd import measures
from sd.errors import InputError
from sd.extractors import RESIZES, Extractor, versions
from sd.features import PictureSet
from sd.files import read_json

FORMAT = "evaluation-1"
MEASURES = ("fd", "kid", "precision", "recall", "density", "coverage", "copies", "cmmd", "clip_score")
OF_CLIP = ("cmmd", "clip_score")  # measures that want an extractor of pictures and texts
ENOUGH = 10_000  # pictures a side, below which the Fréchet distance depends on their number more than on the model
SHOWN = 10  # nearest pairs that a result lists
PAINTED = (  # of what a PNG says, what decides how it was painted
    "sampler", "steps", "cfg", "cfg_rescale", "spacing", "ddim_timesteps", "weights", "dtype", "prompt_syntax",
    "long_prompts", "negative",
)  # fmt: skip


def digest(value) -> str:
    """A hash of anything that JSON can tell."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------------------------------
# The protocol
# ---------------------------------------------------------------------------------------------------------------------


def painting_of(pictures: PictureSet) -> dict:
    """How a set was painted, as its PNGs say: one value where all say the same, 'several' or None (not known)
    otherwise; prompts and seeds by a hash of all of them."""
    told = [p.painted or {} for p in pictures.pictures]
    found = {}
    for name in PAINTED:
        values = {json.dumps(t.get(name), sort_keys=True) for t in told}
        found[name] = json.loads(values.pop()) if len(values) == 1 else "several"
    prompts = sorted(p.caption for p in pictures.pictures)
    seeds = sorted(str(t.get("seed")) for t in told)
    return found | {
        "prompts": digest(prompts) if any(prompts) else None,
        "seeds": digest(seeds) if any(t.get("seed") is not None for t in told) else None,
    }


def protocol_of(real: PictureSet, fake: PictureSet, extractor: Extractor, size: int) -> dict:
    """All that decides a measure beside the model itself. Results whose protocols differ are not compared."""
    return {
        "extractor": extractor.protocol() | {"resizing": RESIZES[extractor.resize]},
        "size": size,
        "cut": "the largest square in the middle, by area averaging (down) or cubic interpolation (up), to bytes",
        "real": {"n": len(real.pictures), "sha256": real.sha256, "formats": real.formats()},
        "generated": {"n": len(fake.pictures), "formats": fake.formats(), **painting_of(fake)},
        "kid": {"subsets": measures.KID_SUBSETS, "size": kid_size(real, fake), "seed": measures.KID_SEED},
        "neighbours": {"precision, recall": measures.NEAREST_PR, "density, coverage": measures.NEAREST_DC},
        "cmmd": {"sigma": measures.CMMD_SIGMA, "scale": measures.CMMD_SCALE},
        "versions": versions("torch", "numpy", "pillow", "opencv-python-headless") | extractor.packages,
    }


def kid_size(real: PictureSet, fake: PictureSet) -> int:
    """Pictures in each of KID's subsets: at most as many as there are."""
    return min(measures.KID_SIZE, len(real.pictures), len(fake.pictures))


def warnings_of(real: PictureSet, fake: PictureSet, size: int, width: int, names: list[str]) -> list[str]:
    """What a reader of the numbers has to know. width: of the features."""
    found, n = [], min(len(real.pictures), len(fake.pictures))
    if "fd" in names and n <= width:
        found.append(
            f"{n:,} pictures give singular covariances of {width:,} features: the Fréchet distance says little"
        )
    if "fd" in names and n < ENOUGH:
        found.append(
            f"the Fréchet distance falls with the number of pictures: {n:,} are fewer than {ENOUGH:,}, compare it only "
            "with such of as many"
        )
    if "kid" in names and n < measures.KID_SIZE:
        found.append(f"KID's subsets hold {n:,} pictures, and not {measures.KID_SIZE:,}")
    for what, pictures in (("real", real), ("generated", fake)):
        twice = len(pictures.pictures) - len({p.sha256 for p in pictures.pictures})
        if twice:
            found.append(f"{twice:,} {what} pictures are equal to others of theirs, and count as often as they come")
        if pictures.rejects:
            found.append(f"left out of the {what} pictures: {dict(pictures.rejects)}")
    lossy = [
        sum(count for kind, count in p.formats().items() if kind.startswith(("jpg", "webp"))) / len(p.pictures)
        for p in (real, fake)
    ]
    if abs(lossy[0] - lossy[1]) > 0.1:
        found.append(
            f"{lossy[0]:.0%} of the real pictures and {lossy[1]:.0%} of the generated ones are JPEG or WebP: the "
            "difference of formats is measured too"
        )
    small = sum(min(p.size) < size for p in real.pictures)
    if small:
        found.append(f"{small:,} real pictures are smaller than {size} pixels and were enlarged")
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Measuring
# ---------------------------------------------------------------------------------------------------------------------


def choose_measures(text: str | None, extractor: Extractor) -> list[str]:
    """The measures that --measures names, or all that the extractor allows. InputError for others."""
    if text is None:
        return [name for name in MEASURES if extractor.text or name not in OF_CLIP]
    names = ["fd" if name == "fid" else name for name in text.replace(" ", "").split(",") if name]
    if unknown := [name for name in names if name not in MEASURES]:
        raise InputError(f"--measures wants some of fid, {', '.join(MEASURES)}, found {unknown[0]!r}")
    if not names:
        raise InputError(f"--measures wants some of fid, {', '.join(MEASURES)}, found none")
    if (wrong := [name for name in names if name in OF_CLIP]) and extractor.text is None:
        raise InputError(f"--measures {wrong[0]} wants CLIP as --extractor, and {extractor.name} reads no texts")
    return [name for name in MEASURES if name in names]


def label(name: str, extractor: Extractor) -> str:
    """What a measure may be called: FID and KID alone are names of the published Inception's."""
    if extractor.inception and name in ("fd", "kid"):
        return {"fd": "FID", "kid": "KID"}[name]
    words = {"fd": "FD", "kid": "KID", "cmmd": "CMMD", "clip_score": "CLIP score"}
    return f"{words.get(name, name)} of {extractor.name}"


def measure(
    names: list[str], real: PictureSet, fake: PictureSet, real_features: np.ndarray, fake_features: np.ndarray,
    texts: np.ndarray | None = None,
) -> dict[str, dict]:  # fmt: skip
    """Each measure's value and what belongs to it. features [N, D], in the order of the sets; texts: of the generated
    pictures' prompts."""
    if (len(real_features), len(fake_features)) != (len(real.pictures), len(fake.pictures)):
        raise ValueError("every picture has to have its features")
    a, b = real_features.astype(np.float64), fake_features.astype(np.float64)
    if min(len(a), len(b)) <= measures.NEAREST_DC:
        raise InputError(
            f"more than {measures.NEAREST_DC} pictures a side are wanted, found {len(a)} real and {len(b)} generated"
        )
    found: dict[str, dict] = {}
    if "fd" in names:
        found["fd"] = {"value": measures.frechet_distance(a, b)}
    if "kid" in names:
        mean, spread = measures.kid(a, b, size=kid_size(real, fake))
        found["kid"] = {"value": mean, "std": spread}
    for pair, k in ((("precision", "recall"), measures.NEAREST_PR), (("density", "coverage"), measures.NEAREST_DC)):
        if set(pair) & set(names):
            values = measures.manifolds(a, b, k)
            found |= {name: {"value": values[name], "k": k} for name in pair if name in names}
    if "copies" in names:
        found["copies"] = copies(real, fake, a, b)
    if "cmmd" in names:
        found["cmmd"] = {"value": measures.cmmd(a, b)}
    if "clip_score" in names:
        found["clip_score"] = {"value": measures.clip_score(b, texts)}
    return found


def copies(real: PictureSet, fake: PictureSet, a: np.ndarray, b: np.ndarray) -> dict:
    """value: the share of generated pictures that are nearer to a real one than any other real one is. identical: how
    many have a real one's very features. nearest: the pairs of the smallest ratio of these two distances."""
    index, distance, own = measures.nearest(a, b)
    ratio = distance / np.maximum(own, 1e-12)
    first = np.lexsort((distance, ratio))[:SHOWN]
    pairs = [
        {"generated": fake.pictures[i].name, "real": real.pictures[index[i]].name, "distance": float(distance[i]),
         "to_next_real": float(own[i])} for i in first
    ]  # fmt: skip
    return {"value": float((distance < own).mean()), "identical": int((distance == 0).sum()), "nearest": pairs}


# ---------------------------------------------------------------------------------------------------------------------
# Comparing
# ---------------------------------------------------------------------------------------------------------------------


def flat(value, name: str = "") -> dict:
    """Nested dicts as one, with names such as generated.steps."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {k: v for key, part in value.items() for k, v in flat(part, f"{name}.{key}".lstrip(".")).items()}


def differences(a: dict, b: dict) -> list[tuple[str, object, object]]:
    """(name, value in a, value in b) of what differs between two protocols, in their order."""
    a, b = flat(a), flat(b)
    return [(name, a.get(name), b.get(name)) for name in {**a, **b} if a.get(name) != b.get(name)]


def meant(name: str, allowed: list[str]) -> bool:
    """Whether a name such as generated.steps is one of `allowed`: whole, by its last part, or by what it belongs to."""
    return any(name == word or name.startswith(f"{word}.") or name.endswith(f".{word}") for word in allowed)


def read_result(path: str | Path) -> dict:
    """A result's JSON. InputError unless it is one of this format."""
    content = read_json(path)
    if content.get("format") != FORMAT or not isinstance(content.get("protocol"), dict):
        raise InputError(f"{path} is no result of SD_Evaluate.py: a JSON with format {FORMAT!r} was wanted")
    return content


def compare(paths: list[str], allowed: list[str]) -> list[str]:
    """Lines that set two results side by side. InputError, with the first difference, if their protocols differ in
    anything that `allowed` does not name."""
    a, b = (read_result(path) for path in paths)
    found = differences(a["protocol"], b["protocol"])
    if refused := [d for d in found if not meant(d[0], allowed)]:
        name, x, y = refused[0]
        more = f", and {len(refused) - 1} further differences" if len(refused) > 1 else ""
        raise InputError(
            f"the two were measured differently and are not compared: {name} is {json.dumps(x)} in {paths[0]} and "
            f"{json.dumps(y)} in {paths[1]}{more}; measure one of them again, or name what is meant to differ with "
            f"--differs {name}"
        )
    if unused := [word for word in allowed if not any(meant(name, [word]) for name, _, _ in found)]:
        raise InputError(f"--differs {unused[0]}: the two do not differ in it; leave it out")
    lines = [f"{name}: {json.dumps(x)} and {json.dumps(y)}, as allowed" for name, x, y in found]
    both = [name for name in a["measures"] if name in b["measures"]]
    if not both:
        raise InputError(f"{paths[0]} and {paths[1]} have no measure in common: measure one of them again")
    width = max(len(a["measures"][name]["label"]) for name in both)
    for name in both:
        x, y = a["measures"][name], b["measures"][name]
        spread = f"  (std {x['std']:.3g} and {y['std']:.3g})" if "std" in x else ""
        change = y["value"] - x["value"]
        lines.append(f"{x['label']:{width}}  {x['value']:12.6g}  {y['value']:12.6g}  {change:+12.6g}{spread}")
    return lines
