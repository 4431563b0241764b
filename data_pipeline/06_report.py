"""One self-contained HTML page about a source: what was dropped and why, what the pictures and captions are like.

    python data_pipeline/06_report.py --in data/shapes                              # writes data/shapes/report.html
    python data_pipeline/06_report.py --in data/shapes --vae demo/vae               # with latents decoded
    python data_pipeline/06_report.py --data laion:0.6:150000,faces:0.4 --data_root data --out mixture.html

Reads what the other scripts left in data/<source>: images/, filtered/, tokens/, dataset/, latents/; what is absent is
said to be absent. The page has the funnel of 02_filter.py, histograms, duplicates, rejects by reason, random pictures
with captions (chosen by --seed), and latents decoded beside their pictures (if their VAE is there: --vae, or the one
that the latents' manifest names). It needs no network and no JavaScript. Columns are read in batches: 1.3 million rows
take seconds and under half a GB, pictures and latents apart.
"""

import argparse
import base64
import html
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import _path  # noqa: F401
import cv2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sd.cli import parser
from sd.errors import InputError, reading, run
from sd.files import atomic_write, make_folder, read_json
from sd.folders import IMAGE_EXTENSIONS
from sd.hashes import hash_texts
from sd.metadata import find_column
from sd.pictures import Reject, cut, decode_image
from sd.shards import MAX_MEMBER_BYTES
from sd.text import TEXT_LENGTH
from sd.workers import progress

BATCH_ROWS = 65_536
BARS = 48  # of a histogram, at most
PICTURE_SIDE = 200  # pixels of the longer side of an embedded picture
COLUMNS = ("width", "height", "aesthetic", "similarity", "url", "caption")  # as ALIASES in sd/metadata.py calls them
STEPS = {"images": "01, 03", "filtered": "02_filter.py", "tokens": "04_tokenise.py",
         "dataset": "05_build_hf_dataset.py", "latents": "encode_latents.py"}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------------
# Reading: what is in data/<source>


@dataclass
class Histogram:
    """Counts of a number in `bins` equal bins over [low, high] (of its logarithm with `log`); what lies outside goes
    into the first or last bin. `ticks` are values to label."""

    title: str
    low: float
    high: float
    ticks: list[float]
    log: bool = False
    bins: int = 1200
    label: Callable[[float], str] = "{:g}".format
    missing: int = 0

    def __post_init__(self):
        self.counts = np.zeros(self.bins, np.int64)

    def place(self, values):
        """Where values lie on the axis, in bins: 0 at `low`, `bins` at `high`."""
        low, high = (np.log2([self.low, self.high])) if self.log else (self.low, self.high)
        return ((np.log2(values) if self.log else values) - low) / (high - low) * self.bins

    def add(self, values: np.ndarray) -> None:
        """Counts values [rows]; NaN, infinities, and on a logarithmic axis what is not positive, are missing."""
        values = values.astype(np.float64)
        good = values[np.isfinite(values) & ((values > 0) | (not self.log))]
        self.missing += len(values) - len(good)
        bins = np.clip(self.place(good), 0, self.bins - 1).astype(np.int64)
        self.counts += np.bincount(bins, minlength=self.bins)

    def quantile(self, fraction: float) -> float:
        """The value in the middle of the bin that holds this quantile."""
        place = (np.searchsorted(np.cumsum(self.counts), fraction * self.counts.sum()) + 0.5) / self.bins
        low, high = (np.log2([self.low, self.high])) if self.log else (self.low, self.high)
        value = low + place * (high - low)
        return float(2**value if self.log else value)

    def bars(self) -> tuple[int, int, np.ndarray]:
        """The first bin drawn, the bins a bar, and the counts of the bars: the part of the axis that is used."""
        used = np.flatnonzero(self.counts)
        margin = max(self.bins // 100, (used[-1] - used[0]) // 20, 1)
        first, last = max(0, used[0] - margin), min(self.bins, used[-1] + 1 + margin)
        width = -(-(last - first) // BARS)
        counts = self.counts[first:last]
        return first, width, np.append(counts, np.zeros(-len(counts) % width, np.int64)).reshape(-1, width).sum(axis=1)


def new_histograms(max_length: int) -> dict[str, Histogram]:
    """The histograms of a source, by name; texts have at most max_length ids. Tokens have a bin a number."""
    sides = [16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    content = list(range(0, max_length - 1, max(1, max_length // 8)))
    return {
        "side": Histogram("Resolution: shorter side, pixels", 8, 16384, sides, log=True),
        "aspect": Histogram("Aspect: width to height", 1 / 8, 8, [1 / 4, 1 / 2, 1, 2, 4], log=True, label=ratio),
        "aesthetic": Histogram("Aesthetic score", 0, 12, [i / 2 for i in range(25)]),
        "similarity": Histogram("CLIP similarity of picture and caption", -0.2, 1, [i / 20 for i in range(-4, 21)]),
        "tokens": Histogram("Tokens of a caption, without start and end", -0.5, max_length - 1.5, content,
                            bins=max_length - 1),
    }  # fmt: skip


def ratio(value: float) -> str:
    """2 -> '2:1', 0.5 -> '1:2'."""
    return f"{value:.3g}:1" if value >= 1 else f"1:{1 / value:.3g}"


class Repeats:
    """How many texts of a column repeat an earlier one: 8 bytes of memory each."""

    def __init__(self):
        self.hashes: list[np.ndarray] = []

    def add(self, values: pa.Array) -> None:
        self.hashes.append(hash_texts(pc.cast(values.drop_null(), pa.large_string())))

    def counts(self) -> tuple[int, int]:
        """Texts, and how many of them are repeats."""
        hashes = np.sort(np.concatenate(self.hashes)) if self.hashes else np.empty(0, np.uint64)
        return len(hashes), int((hashes[1:] == hashes[:-1]).sum())


def table_of(folder: Path) -> tuple[str, list[Path]]:
    """The rows that come closest to what is trained on: tokens/, else filtered/, images/ or metadata/; ("", []) if
    there are none."""
    for step in ("tokens", "filtered", "images", "metadata"):
        if files := sorted((folder / step).glob("*.parquet")):
            return step, files
    return "", []


def read_table(files: list[Path], max_length: int) -> tuple[dict[str, Histogram], dict[str, Repeats], int]:
    """Histograms and repeats over all rows of parquet files, batch by batch, and the number of rows."""
    histograms, repeats = new_histograms(max_length), {"url": Repeats(), "sha256": Repeats(), "caption": Repeats()}
    rows, end = 0, None
    with progress(len(files), "06_report.py", "file") as bar:
        for path in files:
            file = open_parquet(path)
            names = {name: find_column(file.schema_arrow.names, name) for name in COLUMNS}
            names |= {name: name for name in ("sha256", "input_ids") if name in file.schema_arrow.names}
            names = {name: column for name, column in names.items() if column}
            for batch in file.iter_batches(BATCH_ROWS, columns=list(names.values())):
                columns = {name: batch.column(column) for name, column in names.items()}
                rows += len(batch)
                add_numbers(histograms, columns)
                for name in repeats:
                    if name in columns and is_text(columns[name].type):
                        repeats[name].add(columns[name])
                if "input_ids" in columns:
                    ids = columns["input_ids"].flatten().to_numpy().reshape(len(batch), -1)
                    end = end_token(ids) if end is None and len(ids) else end
                    histograms["tokens"].add((ids == end).argmax(axis=1) - 1)
            bar.update()
    return histograms, repeats, rows


def open_parquet(path: Path) -> pq.ParquetFile:
    """A parquet file, or fails in one sentence."""
    try:
        return pq.ParquetFile(path, buffer_size=1 << 20)
    except (pa.ArrowInvalid, OSError) as error:
        raise InputError(
            f"cannot read {path} as parquet ({str(error).splitlines()[0]}): make it again with its script"
        ) from None


def is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def add_numbers(histograms: dict[str, Histogram], columns: dict[str, pa.Array]) -> None:
    """Adds a batch to the histograms of its columns; a column that does not hold numbers is all missing."""
    values = {}
    for name in ("width", "height", "aesthetic", "similarity"):
        if name in columns:
            try:
                values[name] = pc.cast(columns[name], pa.float64()).to_numpy(zero_copy_only=False)
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                values[name] = np.full(len(columns[name]), np.nan)
    if "width" in values and "height" in values:
        histograms["side"].add(np.minimum(values["width"], values["height"]))
        with np.errstate(divide="ignore", invalid="ignore"):
            histograms["aspect"].add(values["width"] / values["height"])
    for name in ("aesthetic", "similarity"):
        if name in values:
            histograms[name].add(values[name])


def end_token(ids: np.ndarray) -> int:
    """The id that ends a text, from ids [N, L]: what all rows have before their padding, if that is one id; else text
    stands there, and padding and end are the same id, as CLIP's are."""
    padded = ids[ids[:, -1] == ids[:, -2]]
    if not len(padded):
        return int(ids[0, -1])
    last = (padded[:, ::-1] != padded[:, -1:]).argmax(axis=1)  # places from the right
    before = np.unique(padded[np.arange(len(padded)), ids.shape[1] - 1 - last])
    return int(before[0]) if len(before) == 1 and len(padded) > 1 else int(padded[0, -1])


def manifest_of(folder: Path) -> dict | None:
    """manifest.json of a folder; None if there is none, or if it is not finished."""
    if not (folder / "manifest.json").exists():
        return None
    manifest = read_json(folder / "manifest.json")
    return manifest if manifest.get("complete", True) else None


def rejects_of(folder: Path) -> list[tuple[str, str, int]]:
    """(step, reason, count) of pictures that were left out, from the stats and manifests of images, tokens, latents."""
    downloads = Counter()
    for path in sorted((folder / "images").glob("*_stats.json")):
        downloads.update(read_json(path).get("status_dict", {}))
    downloads.pop("success", None)
    found = [("images", downloads)]
    for step, name in (("tokens", "left_out"), ("latents", "rejects")):
        found.append((step, (manifest_of(folder / step) or {}).get(name, {})))
    return [(step, reason, n) for step, counts in found for reason, n in Counter(counts).most_common() if n]


# ---------------------------------------------------------------------------------------------------------------------
# Reading: pictures and latents


def pick_pictures(files: list[Path], count: int, seed: int) -> list[tuple[str, str, str]]:
    """(shard, key, caption) of random rows of parquet files with a column image_key or key; fewer if few."""
    sizes = np.array([open_parquet(path).metadata.num_rows for path in files])
    starts = np.cumsum(sizes) - sizes
    rows = np.sort(np.random.default_rng(seed).permutation(int(sizes.sum()))[:count])
    picked = []
    for path, start, size in zip(files, starts, sizes):
        wanted = rows[(rows >= start) & (rows < start + size)] - start
        file = open_parquet(path) if len(wanted) else None
        key = file and next((name for name in ("image_key", "key") if name in file.schema_arrow.names), None)
        caption = file and find_column(file.schema_arrow.names, "caption")
        if not key or not caption:
            continue
        done = 0
        for batch in file.iter_batches(BATCH_ROWS, columns=[key, caption]):
            here = wanted[(wanted >= done) & (wanted < done + len(batch))] - done
            for row in batch.take(pa.array(here)).to_pylist():
                shard, _, name = ("/" + f"{path.stem}/{row[key]}").rpartition("/")
                picked.append((shard.rpartition("/")[2], name, row[caption] or ""))
            done += len(batch)
    return picked


def read_pictures(images: Path, picked: list[tuple[str, str, str]]) -> dict[tuple[str, str], np.ndarray | str]:
    """(shard, key) -> picture uint8 [H, W, 3], or why it cannot be shown. Seeks from header to header of the tars."""
    found: dict[tuple[str, str], np.ndarray | str] = {}
    for shard in dict.fromkeys(shard for shard, _, _ in picked):
        wanted = {key for s, key, _ in picked if s == shard}
        try:
            with tarfile.open(images / f"{shard}.tar", "r:") as tar:
                for member in tar:
                    tar.members.clear()  # or the list grows with the tar
                    key, _, extension = member.name.removeprefix("./").rpartition("/")[2].partition(".")
                    usable = member.isreg() and member.size <= MAX_MEMBER_BYTES
                    if key in wanted and extension.lower() in IMAGE_EXTENSIONS and usable:
                        found[shard, key] = decode(tar.extractfile(member).read())
                        wanted.remove(key)
                    if not wanted:
                        break
        except (tarfile.TarError, OSError) as error:
            found |= {(shard, key): f"cannot read {shard}.tar: {error}" for key in wanted}
            continue
        found |= {(shard, key): f"not in {shard}.tar" for key in wanted}
    return found


def decode(data: bytes) -> np.ndarray | str:
    """The picture, or the reason for which it is rejected."""
    try:
        return decode_image(data)
    except Reject as reject:
        return reject.reason


def read_latents(folder: Path, manifest: dict, picked: list) -> dict[tuple[str, str], np.ndarray]:
    """(shard, key) -> scaled latents float32 [z, h, w] (the mean) of those pictures that have some."""
    found = {}
    shards = list(dict.fromkeys(shard for shard, _, _ in picked))
    for shard, path in [(s, p) for s in shards for p in sorted(folder.glob(f"{s}*.parquet"))]:
        if not re.fullmatch(re.escape(shard) + r"(_\d+x\d+)?", path.stem):  # of --buckets: one a size
            continue
        try:
            keys = pq.read_table(path, columns=["image_key", "row"])
            array = np.load(path.with_suffix(".npy"), mmap_mode="r")
        except (OSError, ValueError, EOFError, pa.ArrowInvalid):  # not encoded yet, or cut
            continue
        wanted = {key for s, key, _ in picked if s == shard}
        keys = keys.filter(pc.is_in(pc.replace_substring_regex(keys["image_key"], "^.*/", ""), pa.array(list(wanted))))
        for key, row in zip(keys["image_key"].to_pylist(), keys["row"].to_pylist()):
            latent = np.array(array[row], np.float32)
            found[shard, key.rpartition("/")[2]] = (
                latent[: len(latent) // 2] if manifest["kind"] == "moments" else latent
            )
    return found


def decode_latents(vae_source: str, manifest: dict, latents: list[np.ndarray]) -> list[np.ndarray]:
    """Pictures uint8 [H, W, 3] of scaled latents [z, h, w]. Fails if the VAE is another one than theirs."""
    import torch

    from sd.weights.read import load_vae
    from SD_Model import weights_hash

    try:
        vae = load_vae(vae_source)
    except InputError as error:
        raise InputError(
            f"cannot load the VAE {vae_source} ({error}): give --vae the one that encoded the latents"
        ) from None
    theirs, scale = manifest["vae"]["name"], manifest["scale"]["mean_times"]
    if weights_hash(vae) != manifest["vae"]["hash"]:
        raise InputError(
            f"the latents were made with the VAE {theirs}, and {vae_source} has other weights: give theirs"
        )
    if vae.config.scaling_factor != scale:
        raise InputError(
            f"the latents were made with the VAE {theirs} and the scale {scale}, and {vae_source} has another scale, "
            f"{vae.config.scaling_factor}: give theirs"
        )
    pictures = []
    with torch.inference_mode():
        for latent in latents:
            image = vae.decode(torch.from_numpy(latent)[None])[0].permute(1, 2, 0)  # [H, W, 3], -1..1
            pictures.append(((image + 1) * 127.5).round().clamp(0, 255).byte().numpy())
    return pictures


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


STYLE = """
:root { color-scheme: light; --ink: #1b1b1f; --soft: #63636e; --line: #e3e3e8; --bar: #3b6ea8; --drop: #c9803a; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2rem 1.1rem 4rem; max-width: 62rem; color: var(--ink); background: #fff;
       font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .3rem; letter-spacing: -.01em; }
h2 { font-size: 1.2rem; margin: 2.8rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
p { margin: .4rem 0 .8rem; max-width: 42rem; } .soft, figcaption { color: var(--soft); font-size: .875rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.5rem, 1fr)); gap: 1rem; margin: 1.4rem 0; }
.figures b { display: block; font-size: 1.45rem; line-height: 1.25; font-weight: 600; }
.figures span { color: var(--soft); font-size: .875rem; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; }
th { text-align: left; font-weight: 500; color: var(--soft); } td, th { padding: .32rem .7rem .32rem 0;
  border-bottom: 1px solid var(--line); overflow-wrap: anywhere; vertical-align: middle; }
.n { text-align: right; white-space: nowrap; overflow-wrap: normal; font-variant-numeric: tabular-nums; }
td.wide { width: 34%; padding-right: 0; } td.wide svg { display: block; width: 100%; height: .8rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 19rem), 1fr)); gap: 1.6rem 2rem; }
figure { margin: 0; } .charts figure > b { font-weight: 600; font-size: .9375rem; }
.charts svg { display: block; width: 100%; height: auto; margin: .3rem 0; }
svg text { fill: var(--soft); font-size: 11px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(8.5rem, 1fr)); gap: 1.2rem 1rem; }
.pictures img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; background: #f5f5f7;
  outline: 1px solid var(--line); }
.pictures figcaption { color: var(--ink); margin-top: .35rem; line-height: 1.35; overflow-wrap: anywhere; }
.pairs { grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); }
.pairs div { display: grid; grid-template-columns: 1fr 1fr; gap: 2px; }
.why { display: grid; place-items: center; aspect-ratio: 1; padding: .6rem; background: #f5f5f7; color: var(--soft);
       font-size: .8125rem; text-align: center; overflow-wrap: anywhere; }
.small img { image-rendering: pixelated; }
@media print { h2 { break-after: avoid; } figure { break-inside: avoid; } }
"""


def text(value) -> str:
    """Any value as HTML text."""
    return html.escape(str(value))


def section(title: str, *parts: str) -> str:
    return f"<section><h2>{text(title)}</h2>{''.join(parts)}</section>"


def absent(what: str) -> str:
    return f'<p class="soft">{text(what)}</p>'


def percent(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def bar(start: float, width: float, colour: str) -> str:
    """A horizontal bar; start and width are shares of the column."""
    width = max(width, 0.004) if width else 0  # few are still seen
    return (f'<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true"><rect x="{100 * start:.2f}" '
            f'width="{100 * width:.2f}" height="10" fill="var(--{colour})"/></svg>')  # fmt: skip


def table(head: list[str], rows: list[list[str]], numbers: set[int]) -> str:
    """A table of HTML cells; columns in `numbers` are aligned right, and the last one holds bars if its title is ''."""
    kinds = ["n" if i in numbers else "wide" if title == "" else "" for i, title in enumerate(head)]
    cells = [[f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row)] for row in rows]
    titles = "".join(f'<th class="{kind}">{text(title)}</th>' for kind, title in zip(kinds, head))
    return f"<table><thead><tr>{titles}</tr></thead><tbody>" + "".join(
        f"<tr>{''.join(row)}</tr>" for row in cells
    ) + "</tbody></table>"  # fmt: skip


def draw_funnel(manifest: dict | None) -> str:
    """Rows left after each rule of 02_filter.py."""
    if manifest is None:
        return absent("Not filtered: there is no finished filtered/ folder of 02_filter.py.")
    rows, left = manifest["rows"], manifest["rows"]
    lines = [["rows read", "", f"{rows:,}", bar(0, 1, "bar")]]
    limits = manifest["settings"].get("rules", {})
    for reason, count in manifest["dropped"].items():
        left -= count
        low, high = (limits.get(reason) or [None, None, None])[1:]
        low, high = (f"≥ {low:g}" if low is not None else "", f"≤ {high:g}" if high is not None else "")
        if below := limits.get(reason + "_below"):
            high = f"< {below[2]:g}"
        name = f"{text(reason)} <span class='soft'>{low} {high}</span>"
        share = count / rows if rows else 0
        lines.append([name, f"−{count:,}", f"{left:,}", bar(left / max(rows, 1), share, "drop")])
    lines.append(["<b>kept</b>", percent(left, rows), f"<b>{left:,}</b>", bar(0, left / max(rows, 1), "bar")])
    return table(["rule", "dropped", "left", ""], lines, {1, 2})


def draw_histogram(histogram: Histogram) -> str:
    """A figure with an inline SVG; without data a sentence says so."""
    title = f"<b>{text(histogram.title)}</b>"
    total = int(histogram.counts.sum())
    if not total:
        return f"<figure>{title}<p class='soft'>No values: the rows have no such column, or it is empty.</p></figure>"
    first, width, counts = histogram.bars()
    step, top = 400 / len(counts), counts.max()
    bars = "".join(
        f'<rect x="{i * step:.2f}" y="{110 - 100 * n / top:.2f}" width="{max(step - 1, 1):.2f}" '
        f'height="{100 * n / top:.2f}" fill="var(--bar)"><title>{n:,} ({n / total:.2%})</title></rect>'
        for i, n in enumerate(counts) if n
    )  # fmt: skip
    ticks, right = "", -100.0
    for value in histogram.ticks:
        x = (float(histogram.place(value)) - first) / width * step
        if 0 <= x <= 400 and x - right > 34:
            anchor = "start" if x < 14 else "end" if x > 386 else "middle"
            ticks += f'<path d="M{x:.1f} 110v4" stroke="#8a8a94"/>'
            ticks += f'<text x="{x:.1f}" y="126" text-anchor="{anchor}">{text(histogram.label(value))}</text>'
            right = x
    low, middle, high = (tidy(histogram, fraction) for fraction in (0.05, 0.5, 0.95))
    words = f"median {middle}, 90 % between {low} and {high}" if low != high else f"nearly all {middle}"
    words += f"; {histogram.missing:,} without a value" if histogram.missing else ""
    return (f'<figure>{title}<svg viewBox="0 0 400 130" role="img" aria-label="{text(words)}">{bars}'
            f'<path d="M0 110.5H400" stroke="#8a8a94"/>{ticks}</svg>'
            f"<figcaption>{text(words)}</figcaption></figure>")  # fmt: skip


def tidy(histogram: Histogram, fraction: float) -> str:
    """A quantile with as many digits as its bins are fine."""
    return histogram.label(float(f"{histogram.quantile(fraction):.2g}" if histogram.log else
                                 f"{histogram.quantile(fraction):.3g}"))  # fmt: skip


def data_uri(picture: np.ndarray) -> str:
    """RGB uint8 [H, W, 3] as a small JPEG in the page itself."""
    scale = PICTURE_SIDE / max(picture.shape[:2])
    if scale < 1:
        size = [max(1, round(side * scale)) for side in picture.shape[1::-1]]
        picture = cv2.resize(picture, size, interpolation=cv2.INTER_AREA)
    _, data = cv2.imencode(".jpg", np.ascontiguousarray(picture[:, :, ::-1]), [cv2.IMWRITE_JPEG_QUALITY, 85])
    return "data:image/jpeg;base64," + base64.b64encode(data.tobytes()).decode()


def image(picture: np.ndarray | str, alt: str) -> str:
    """An <img>, or the reason why there is none."""
    if isinstance(picture, str):
        return f'<span class="why">{text(picture)}</span>'
    return f'<img src="{data_uri(picture)}" alt="{text(alt)}">'


def draw_pictures(picked: list, pictures: dict) -> str:
    if not picked:
        return absent("No pictures: they have not been fetched, or the rows have neither image_key nor key.")
    figures = (
        f'<figure title="{text(shard)}/{text(key)}">{image(pictures[shard, key], caption)}'
        f"<figcaption>{text(caption)}</figcaption></figure>"
        for shard, key, caption in picked
    )
    shapes = [p.shape for p in pictures.values() if not isinstance(p, str)]
    small = " small" if shapes and max(max(shape[:2]) for shape in shapes) <= 96 else ""
    return f'<div class="pictures{small}">{"".join(figures)}</div>'


def draw_latents(folder: Path, vae: str | None, picked: list, pictures: dict) -> str:
    """Latents decoded beside the pictures that they were made from."""
    manifest = manifest_of(folder)
    if manifest is None:
        return absent("No latents: there is no finished latents/ folder of encode_latents.py.")
    about = (
        f"{manifest['count']:,} latents of {manifest['size']} px, {manifest['kind']}, VAE {manifest['vae']['name']}."
    )
    vae = vae or (manifest["vae"]["name"] if Path(manifest["vae"]["name"]).exists() else None)
    if vae is None:
        return absent(f"{about} Not decoded: their VAE is not on this machine; name one with --vae.")
    latents = read_latents(folder, manifest, picked)
    keys = [(s, k) for s, k, _ in picked if (s, k) in latents]
    shown = [k for k in keys if not isinstance(pictures.get(k), str | None)][:12]
    if not shown:
        return absent(f"{about} Not decoded: none of the pictures above has latents.")
    decoded = decode_latents(vae, manifest, [latents[k] for k in shown])
    captions, figures, errors = {(s, k): c for s, k, c in picked}, [], []
    for key, after in zip(shown, decoded):
        before = pictures[key]
        if manifest["crop"] == "center":
            before = cut(before, after.shape[:2])
        if before.shape == after.shape:
            errors.append(float(((before.astype(np.float64) - after) ** 2).mean()))
        both = image(before, captions[key]) + image(after, "its latents, decoded")
        figures.append(f"<figure><div>{both}</div><figcaption>{text(captions[key])}</figcaption></figure>")
    values = np.concatenate([latents[k].ravel() for k in shown])
    about += (
        f" Left the picture, right its latents decoded. The latents shown have mean {values.mean():.2f} and standard"
    )
    about += f" deviation {values.std():.2f} (about 1 is right)"
    if errors:
        about += f"; mean PSNR {np.mean(10 * np.log10(255**2 / np.maximum(errors, 1e-9))):.1f} dB"
    small = " small" if decoded[0].shape[0] <= 96 else ""
    return f'<p class="soft">{text(about)}.</p><div class="pictures pairs{small}">{"".join(figures)}</div>'


def draw_repeats(repeats: dict[str, Repeats]) -> str:
    """Repeats of URL, picture and caption among the rows."""
    names = {"url": "URL", "sha256": "picture (SHA-256)", "caption": "caption"}
    lines, missing = [], []
    for name, what in names.items():
        total, again = repeats[name].counts()
        if total:
            lines.append([what, f"{total:,}", f"{again:,}", percent(again, total), bar(0, again / total, "drop")])
        else:
            missing.append(what)
    note = absent(f"No column of: {', '.join(missing)}.") if missing else ""
    return (table(["the same", "rows", "repeats", "share", ""], lines, {1, 2, 3}) if lines else "") + note


def draw_rejects(rejects: list[tuple[str, str, int]], folder: Path) -> str:
    if not rejects:
        there = [step for step in ("images", "tokens", "latents") if manifest_of(folder / step) is not None]
        return absent(f"None in {', '.join(there)}." if there else "Unknown: no step has finished.")
    top = max(count for _, _, count in rejects)
    lines = [[text(step), text(reason), f"{n:,}", bar(0, n / top, "drop")] for step, reason, n in rejects]
    return table(["step", "reason", "pictures", ""], lines, {2})


def draw_mixture(sources: list) -> str:
    """The sources of a mixture (sd.data.Source): rows to train on, cap, share of the samples."""
    rows = [((manifest_of(s.dataset) or {}).get("counts") or {}).get("train", 0) for s in sources]
    used = [min(n, s.cap) if s.cap else n for s, n in zip(sources, rows)]
    weights = [n if s.weight is None else s.weight for s, n in zip(sources, used)]
    whole = sum(weights) or 1
    lines = []
    for source, n, count, weight in zip(sources, rows, used, weights):
        share = weight / whole
        passes = f"{share * sum(used) / count:.2f}" if count else "–"
        found = f"{n:,}" if n else "no dataset/"
        cap = f"{source.cap:,}" if source.cap else "–"
        lines.append([text(source.name), found, cap, f"{share:.1%}", passes, bar(0, share, "bar")])
    note = "Passes: how often a row is seen while as many samples are drawn as there are rows in all."
    return table(["source", "rows", "cap", "share", "passes", ""], lines, {1, 2, 3, 4}) + absent(note)


def draw_source(folder: Path, args: argparse.Namespace) -> str:
    """All sections about one source."""
    manifests = {step: manifest_of(folder / step) for step in STEPS}
    tokens = manifests["tokens"]
    step, files = table_of(folder)
    histograms, repeats, rows = read_table(files, tokens["max_length"] if tokens else TEXT_LENGTH)
    picked = pick_pictures(files, args.pictures, args.seed) if (folder / "images").exists() else []
    pictures = read_pictures(folder / "images", picked)
    counts = (manifests["dataset"] or {}).get("counts", {})
    figures = {
        "pictures": (manifests["images"] or {}).get("pictures"),
        "kept by the filter": (manifests["filtered"] or {}).get("kept"),
        "captions as tokens": (tokens or {}).get("captions", (tokens or {}).get("rows")),
        "to train on": counts.get("train"),
        "held out": counts.get("val"),
        "with latents": (manifests["latents"] or {}).get("pictures"),
    }
    tiles = "".join(
        f"<div><b>{'absent' if n is None else f'{n:,}'}</b><span>{name}</span></div>" for name, n in figures.items()
    )
    charts = "".join(draw_histogram(histogram) for histogram in histograms.values())
    read = absent(f"Over the {rows:,} rows of {step}/." if rows else "There are no rows to look at.")
    if tokens:
        captions = tokens.get("captions", tokens["rows"])
        cut = f"{tokens['truncated']:,} of {captions:,} captions ({percent(tokens['truncated'], captions)})"
        cut = (
            f"<p>{cut} are longer than {tokens['max_length']} ids and were cut; {tokens['tokens']:,} tokens in all.</p>"
        )
    else:
        cut = absent("Not tokenised: there is no finished tokens/ folder of 04_tokenise.py.")
    missing = [f"{name}/ ({script})" for name, script in STEPS.items() if manifests[name] is None]
    note = absent("Absent or not finished: " + ", ".join(missing) + ".") if missing else ""
    return "".join(
        [
            f'<h1>{text(folder.resolve().name)}</h1><div class="figures">{tiles}</div>{note}',
            section("What the filter dropped", draw_funnel(manifests["filtered"])),
            section("What the rows are like", read, f'<div class="charts">{charts}</div>'),
            section("Captions cut", cut),
            section("Duplicates", draw_repeats(repeats)),
            section("Rejected pictures", draw_rejects(rejects_of(folder), folder)),
            section(f"{len(picked)} random pictures", draw_pictures(picked, pictures)),
            section("Latents", draw_latents(folder / "latents", args.vae, picked, pictures)),
        ]
    )


def mixture_of(args: argparse.Namespace) -> list:
    """The sources of --data, read as SD_Train.py does."""
    from sd.data import parse_sources  # which brings torch

    try:
        return parse_sources({"data": args.data, "data_root": args.data_root, "dataset": None})
    except InputError as error:
        raise InputError(f"{str(error).rstrip('.')}: give e.g. --data laion:0.6:150000,faces:0.4") from None


def main() -> None:
    p = parser(__doc__)
    g = p.add_argument_group("input and output")
    g.add_argument("--in", dest="folders", nargs="+", type=Path, default=[], help="folders of sources; or --data")
    g.add_argument("--data", help="a mixture as in training, name[:weight[:cap]],... (default: --in's)")
    g.add_argument("--data_root", type=Path, default=Path("data"), help="where its sources lie")
    g.add_argument("--out", type=Path, help="the page (default: report.html in the one folder of --in)")

    g = p.add_argument_group("what it shows")
    g.add_argument("--vae", help="a VAE to decode latents with (default: the one that their manifest names)")
    g.add_argument("--pictures", type=int, default=24, help="random pictures of each source")
    g.add_argument("--seed", type=int, default=0, help="which pictures")
    args = p.parse_args()
    if bool(args.folders) == bool(args.data):
        raise InputError("wanted --in with folders of sources, or --data with a mixture, and not both")
    if args.pictures < 0:
        raise InputError(f"--pictures is {args.pictures} and must be at least 0")

    sources = mixture_of(args) if args.data else []
    folders = [args.data_root / source.name for source in sources] or args.folders
    for folder in folders:
        if not any((folder / step).is_dir() for step in (*STEPS, "metadata")):
            raise InputError(
                f"{folder} holds none of {', '.join(STEPS)}: give the folder of a source, e.g. data/shapes"
            )
    if args.out is None and len(folders) > 1:
        raise InputError("several sources go on one page: say where with --out")
    out = args.out or folders[0] / "report.html"
    make_folder(out.parent)

    names = ", ".join(folder.resolve().name for folder in folders)
    body = section("Sources by weight", draw_mixture(sources)) if sources else ""
    for folder in folders:
        with reading(folder, "see which of its files was changed, and make that step's folder again"):
            body += draw_source(folder, args)
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    page = (f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>Data: {text(names)}</title>'
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
            f"<body>{body}</body></html>\n")  # fmt: skip
    atomic_write(out, page)
    print(f"{names}: {len(page) / 2**20:.1f} MB in {out}")


if __name__ == "__main__":
    run(main)
