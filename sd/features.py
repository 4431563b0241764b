"""Sets of pictures to be measured, and their features, computed once for each content and kept in a folder."""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist
from PIL import Image

from sd.device import Place
from sd.errors import InputError
from sd.extractors import Extractor
from sd.files import atomic_path, make_folder
from sd.folders import is_picture, walk_folder
from sd.pictures import Reject, cut, decode_image, read_header
from sd.shards import caption_of, iter_samples, list_shards
from sd.workers import progress

PART = 1024  # features a file of the cache
GRIDS = "grid"  # how the names of grids begin, which SD_ImageGen.py writes beside its pictures
STANDARD_TABLE = 3688  # sum of the luminance table of JPEG's standard (ITU T.81, table K.1), which is quality 50


# ---------------------------------------------------------------------------------------------------------------------
# Processes
# ---------------------------------------------------------------------------------------------------------------------


def together(place: Place, function: Callable, first_alone: bool = False):
    """What function() returns, in every process: its own result, or with first_alone the first process's, which alone
    calls it. A user's or the system's error in one process is one in all: none waits for one that has ended."""
    result = error = None
    try:
        if place.first or not first_alone:
            result = function()
    except (InputError, OSError) as e:
        if place.world == 1:
            raise
        error = str(e)
    if place.world > 1:
        told: list = [None] * place.world
        dist.all_gather_object(told, (error, result if first_alone else None))
        error = next((e for e, _ in told if e is not None), None)
        result = told[0][1] if first_alone else result
    if error is not None:
        raise InputError(error)
    return result


# ---------------------------------------------------------------------------------------------------------------------
# Sets of pictures
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Picture:
    name: str  # inside its source
    sha256: str  # of its file
    kind: str  # png, jpg q95, ...
    size: tuple[int, int]  # height and width
    caption: str  # "" where there is none
    painted: dict | None  # what its PNG says of how it was painted


@dataclass
class PictureSet:
    """The pictures of a source, in the order of their files' hashes: it is the same whatever their names and order."""

    source: str
    pictures: list[Picture]
    rejects: Counter

    @property
    def sha256(self) -> str:
        """Of all pictures' hashes, sorted."""
        return hashlib.sha256("".join(p.sha256 for p in self.pictures).encode()).hexdigest()

    def first(self, n: int | None) -> "PictureSet":
        """n of them, chosen by the hashes of their files; all for None. InputError if there are fewer."""
        if n is not None and n > len(self.pictures):
            raise InputError(f"{n:,} pictures were wanted of {self.source}, and it has {len(self.pictures):,}")
        return PictureSet(self.source, self.pictures[:n], self.rejects)

    def formats(self) -> dict[str, int]:
        return dict(sorted(Counter(p.kind for p in self.pictures).items()))


def iter_files(source: str, rejects: Counter) -> Iterator[tuple[str, bytes, str]]:
    """(name, bytes, caption) of the pictures of a tar, a folder or glob of tars, or a folder of picture files, in which
    grids are left out."""
    folder = Path(source)
    if not (folder.is_dir() and not any(folder.glob("*.tar"))):
        tars = list_shards(source)
        same_names = len({tar.stem for tar in tars}) < len(tars)
        for tar in tars:
            for key, sample in iter_samples(tar, rejects):
                if sample["image"] is None:
                    rejects["no_image"] += 1
                    continue
                try:
                    caption = caption_of(sample)
                except Reject:
                    caption = ""
                yield f"{tar if same_names else tar.stem}/{key}", sample["image"], caption
        return
    names = [name for name in walk_folder(folder, rejects) if is_picture(name)]
    for name in names:
        path = folder / name
        if path.name.startswith(GRIDS) and path.suffix == ".png":
            rejects["grid"] += 1
            continue
        text = path.with_suffix(".txt")
        yield name, path.read_bytes(), text.read_text("utf-8", "replace").strip() if text.is_file() else ""


def jpeg_quality(data: bytes) -> str:
    """About the quality with which a JPEG was saved, by the sum of its luminance table, in the IJG's scale."""
    tables = Image.open(io.BytesIO(data)).quantization
    scale = 100 * sum(next(iter(tables.values()))) / STANDARD_TABLE if tables else 100
    return f"q{round(5000 / scale if scale > 100 else 100 - scale / 2)}"


def painted_with(data: bytes) -> dict | None:
    """The settings that SD_ImageGen.py and this program write into their PNGs."""
    if b"iTXtsd\0" not in data[: 1 << 16]:
        return None
    try:
        settings = json.loads(Image.open(io.BytesIO(data)).info["sd"])
    except (OSError, ValueError, KeyError, SyntaxError):
        return None
    return settings if isinstance(settings, dict) else None


def scan(source: str) -> PictureSet:
    """All pictures of a source; what cannot be opened is counted. InputError if nothing is left."""
    rejects, found = Counter(), []
    with progress(None, f"reading {Path(source).name}", "img") as bar:
        for name, data, caption in iter_files(source, rejects):
            bar.update()
            try:
                header = read_header(data)
                kind = f"{header.kind} {jpeg_quality(data)}" if header.kind == "jpg" else header.kind
            except Reject as reject:
                rejects[reject.reason] += 1
                continue
            size = (header.width, header.height) if header.orientation > 4 else (header.height, header.width)
            painted = painted_with(data) if header.kind == "png" else None
            caption = caption or (painted or {}).get("prompt") or ""
            found.append(Picture(name, hashlib.sha256(data).hexdigest(), kind, size, caption, painted))
    if not found:
        raise InputError(f"no picture was found in {source} (left out: {dict(rejects) or 'nothing'}): give another one")
    return PictureSet(source, sorted(found, key=lambda p: (p.sha256, p.name)), rejects)


# ---------------------------------------------------------------------------------------------------------------------
# Features
# ---------------------------------------------------------------------------------------------------------------------


class Cache:
    """Features by the sha256 of what they are of, in files that are whole or not there; several processes may add."""

    def __init__(self, folder: Path, identity: str):
        self.folder = make_folder(Path(folder) / identity)

    def load(self) -> dict[str, np.ndarray]:
        """Every key's features, fp32 [D]. A damaged file counts for nothing: its features are computed again."""
        found = {}
        for path in sorted(self.folder.glob("*.npz")):
            try:
                with np.load(path) as part:
                    found |= dict(zip(part["keys"].astype(str).tolist(), part["features"], strict=True))
            except Exception as e:  # numpy and zipfile raise errors of many kinds at damaged bytes
                print(f"note: {path} is damaged and left out ({type(e).__name__})")
        return found

    def add(self, keys: list[str], features: np.ndarray):
        """Write features [N, D] of N keys."""
        name = hashlib.sha256("".join(keys).encode()).hexdigest()[:24]
        with atomic_path(self.folder / f"{name}.npz") as temporary:
            with open(temporary, "wb") as file:
                np.savez(file, keys=np.array(keys, "S64"), features=features.astype(np.float32))


def fill(cache: Cache, batches: Iterator[tuple[list[str], np.ndarray]]):
    """Add batches of keys and features to the cache, PART and more at once; what was done stays after an error."""
    keys, features = [], []

    def write():
        if keys:
            cache.add(keys, np.concatenate(features))
        keys.clear(), features.clear()

    try:
        for new, values in batches:
            keys.extend(new)
            features.append(values)
            if len(keys) >= PART:
                write()
    finally:
        write()


def picture_batches(chosen: dict[str, Picture], source: str, extractor: Extractor, size: int, batch: int, workers: int):
    """(hashes, features) of the pictures named in `chosen`, the last and smaller batch too. Those that do not decode
    are passed over."""

    def prepare(data: bytes) -> np.ndarray | None:
        try:
            return cut(decode_image(data), (size, size))
        except Reject:
            return None

    def batches():
        group = []
        for name, data, _ in iter_files(source, Counter()):
            if name in chosen:
                group.append((chosen[name].sha256, data))
                if len(group) == batch:
                    yield group
                    group = []
        if group:
            yield group

    with ThreadPoolExecutor(max(1, workers)) as pool, progress(len(chosen), extractor.name, "img") as bar:
        for group in batches():
            decoded = zip((key for key, _ in group), pool.map(prepare, [data for _, data in group]))
            kept = [(key, picture) for key, picture in decoded if picture is not None]
            bar.update(len(group))
            if kept:
                yield [key for key, _ in kept], extractor(np.stack([picture for _, picture in kept]))


def features_of(
    pictures: PictureSet, extractor: Extractor, size: int, folder: Path, place: Place, batch: int, workers: int
) -> tuple[PictureSet, np.ndarray]:
    """(the pictures that decode, their features fp32 [N, D] in the same order). Pictures are first cut to size x size,
    as training cuts them. What the cache in `folder` lacks is shared among the processes."""
    cache = Cache(folder, extractor.identity(size))

    def find() -> list[Picture]:
        known = cache.load()
        return list({p.sha256: p for p in pictures.pictures if p.sha256 not in known}.values())  # one of equal files

    missing = together(place, find, first_alone=True)  # the others could see what the first ones have written by now
    share = {p.name: p for p in missing[place.rank :: place.world]}

    def work():
        if share:
            fill(cache, picture_batches(share, pictures.source, extractor, size, batch, workers))

    together(place, work)
    known = cache.load()
    good = [p for p in pictures.pictures if p.sha256 in known]
    rejects = pictures.rejects + Counter(undecodable=len(pictures.pictures) - len(good))
    if not good:
        raise InputError(f"no picture of {pictures.source} can be decoded: give another one")
    return PictureSet(pictures.source, good, rejects), np.stack([known[p.sha256] for p in good])


def text_features(texts: list[str], extractor: Extractor, folder: Path, batch: int = 256) -> np.ndarray:
    """Features fp32 [N, D] of texts, each distinct one computed once and kept."""
    cache = Cache(folder, f"{extractor.identity(0)}_texts")
    keys = {text: hashlib.sha256(text.encode("utf-8", "replace")).hexdigest() for text in texts}
    known = cache.load()
    missing = [text for text, key in keys.items() if key not in known]

    def batches():
        for start in range(0, len(missing), batch):
            part = missing[start : start + batch]
            yield [keys[text] for text in part], extractor.text(part).detach().float().cpu().numpy()

    fill(cache, batches())
    known = cache.load()
    return np.stack([known[keys[text]] for text in texts])
