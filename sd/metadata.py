"""The names under which sources keep a caption, a size or a score."""

import functools
import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pyarrow.parquet as pq

# Names of the same thing in LAION-400M, -2B, -aesthetic, COYO and img2dataset, best first, compared without case.
ALIASES = {
    "key": ("key",),
    "url": ("url", "image_url"),
    "caption": ("caption", "text"),
    "width": ("original_width", "width"),  # img2dataset's width is that after its own resizing
    "height": ("original_height", "height"),
    "similarity": ("similarity", "clip_similarity", "clip_similarity_vitl14", "clip_similarity_vitb32"),
    "aesthetic": ("aesthetic", "aesthetic_score", "aesthetic_score_laion_v2"),
    "pwatermark": ("pwatermark", "p_watermark", "watermark", "watermark_score"),
    "punsafe": ("punsafe", "p_unsafe", "unsafe", "nsfw_score_opennsfw2"),
}


def finished_counts(target: Path, notes: dict, name: str) -> Counter | None:
    """The counts that a parquet file has in its own metadata under `name`, if it was made with these `notes` (of its
    input and settings) by an earlier run; None if it has to be made."""
    if not target.exists():
        return None
    metadata = pq.read_metadata(target).metadata
    same = json.loads(metadata.get(b"notes", b"null")) == notes
    return Counter(json.loads(metadata[name.encode()])) if same else None


def find_column(names: Iterable[str], canonical: str) -> str | None:
    """Which of `names` is the column that ALIASES calls `canonical`; None if there is none."""
    return _find_column(tuple(names), canonical)


@functools.lru_cache(maxsize=1024)
def _find_column(names: tuple[str, ...], canonical: str) -> str | None:
    by_lower = {}
    for name in names:
        by_lower.setdefault(name.lower(), name)
    return next((by_lower[alias] for alias in ALIASES[canonical] if alias in by_lower), None)


def metadata_value(metadata: dict, canonical: str):
    """The value that a sample's metadata has for a name of ALIASES; None if it has none, or NaN."""
    name = find_column(metadata, canonical)
    value = metadata[name] if name is not None else None
    return None if isinstance(value, float) and math.isnan(value) else value
