"""Blocks of self-contained HTML pages: curves, heat maps, tables, pictures, sliders. No page loads anything.

Every block returns Html. Text that is not Html is escaped wherever a block takes it, so that captions, paths and
settings can hold what they like. Pages are light or dark as the reader's system is, and fit a phone; without JavaScript
the curves, tables and pictures are there still, and hovering, sorting and the sliders are not.
"""

import base64
import html
import io
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image

POINTS = 600  # of a curve, at most about so many are drawn
COLUMNS = 240  # of a heat map
TICKS = 5  # of an axis, about so many
HEAT = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))  # from low to high


class Html(str):
    """Markup. Any other string is text."""


def escape(part: object) -> Html:
    """Html as it is; anything else as text."""
    return part if isinstance(part, Html) else Html(html.escape(str(part)))


def _block(part: object) -> str:
    """Html as it is; text as a paragraph."""
    return part if isinstance(part, Html) else f"<p>{escape(part)}</p>"


def document(title: str, parts: Iterable[str]) -> str:
    """A whole page. Its policy forbids the browser to load anything that is not in it."""
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style></head>\n<body><main>\n<h1>{escape(title)}</h1>\n"
        + "\n".join(map(_block, parts))
        + f"\n</main>\n<script>{SCRIPT}</script></body></html>\n"
    )


def section(heading: str, *parts: str) -> Html:
    """Parts under a heading. Text among them becomes paragraphs; empty ones vanish."""
    return Html(f"<section><h2>{escape(heading)}</h2>\n" + "\n".join(_block(p) for p in parts if p) + "</section>")


def subsection(heading: str, *parts: str) -> Html:
    """As section(), one level below."""
    return Html(f"<h3>{escape(heading)}</h3>\n" + "\n".join(_block(p) for p in parts if p))


def folded(heading: str, *parts: str) -> Html:
    """Parts behind a heading that opens on a click: what most readers do not want to see at first."""
    body = "\n".join(_block(p) for p in parts if p)
    return Html(f"<details><summary>{escape(heading)}</summary>\n{body}</details>")


def beside(*parts: str) -> Html:
    """Parts side by side where there is room, else one below another."""
    return Html('<div class="beside">' + "".join(f"<div>{_block(p)}</div>" for p in parts if p) + "</div>")


def code(text: str) -> Html:
    """A command line, to be copied as it is; its lines end between words, never at a hyphen."""
    return Html("<pre>" + " ".join(f"<span>{escape(word)}</span>" for word in text.split(" ")) + "</pre>")


def figures(numbers: Mapping[str, object]) -> Html:
    """A row of few large numbers with their names below."""
    tiles = (f"<div><b>{_cell(value)}</b><span>{escape(name)}</span></div>" for name, value in numbers.items())
    return Html(f'<div class="figures">{"".join(tiles)}</div>')


def _data(value: object) -> str:
    """JSON for a script element, which no text in it can end."""
    words = json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json">{words}</script>'


# ----------------------------------------------------------------------------------------------------------------
# Axes
# ----------------------------------------------------------------------------------------------------------------


def short(value: float | None) -> str:
    """A number in few characters: 12345 -> 12.3k, 0.00031 -> 3.1e-4; None, NaN -> –."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.99995 and (size >= 1e4 or unit > 1e3):
            return f"{value / unit:.4g}{letter}"
    if size and size < 1e-3:
        digits, power = f"{value:.3e}".split("e")
        return f"{float(digits):g}e{int(power)}"
    return f"{value:.4g}"


def ticks(low: float, high: float, log: bool = False, count: int = TICKS) -> list[float]:
    """Round numbers from low to high, which are finite; at least one if low < high."""
    if log and low > 0:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for digits in ((1,), (1, 3), (1, 2, 5)):
            step = max(1, round(len(powers) / count)) if digits == (1,) else 1
            found = [d * 10.0**p for p in powers if p % step == 0 for d in digits if low <= d * 10.0**p <= high]
            if len(found) >= 3:
                return found
    step = 10.0 ** math.floor(math.log10((high - low) / count)) if high > low else 1.0
    step *= next((m for m in (1, 2, 5) if (high - low) / (step * m) <= count), 10)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(i * step, 12) if step > 1e-9 else i * step for i in range(first, last + 1)]


def thin(points: Sequence[tuple], limit: int = POINTS) -> list[tuple]:
    """At most about `limit` of the points (x, y), in order: of each stretch the lowest and the highest, and one that is
    None or not finite, if there is one, so that spikes and gaps stay; the first and the last point too."""
    if len(points) <= limit:
        return list(points)
    y = np.array([math.nan if p[1] is None else p[1] for p in points], float)
    kept = {0, len(points) - 1}
    for part in np.array_split(np.arange(len(points)), limit // 2):
        good = part[np.isfinite(y[part])]
        if len(good):
            kept |= {int(good[y[good].argmin()]), int(good[y[good].argmax()])}
        if len(good) < len(part):
            kept.add(int(part[~np.isfinite(y[part])][0]))
    return [points[i] for i in sorted(kept)]


def _rounded(value: float | None) -> float | None:
    """To five digits, and whole numbers as such: what a page keeps of it. None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return int(value) if float(value).is_integer() and abs(value) < 1e15 else float(f"{value:.5g}")


class _Axes:
    """A plot's ranges: where values lie on it, in thousandths from the left and from the top."""

    def __init__(self, xs: Collection[float], ys: Collection[float], log: bool):
        self.log = log
        self.left, self.right = min(xs), max(xs)
        low, high = min(ys), max(ys)
        if self.left == self.right:
            self.left, self.right = self.left - 0.5, self.right + 0.5
        if log:
            margin = max((high / low) ** 0.04, 1.02)
            self.low, self.high = low / margin, high * margin
        else:
            margin = 0.05 * (high - low) or abs(high) * 0.05 or 1.0
            self.low = 0.0 if 0 <= low <= 0.35 * high else low - margin
            self.high = high + margin

    def x(self, value: float) -> int:
        return round(1000 * (value - self.left) / (self.right - self.left))

    def y(self, value: float) -> int:
        low, high, value = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return round(1000 * (high - value) / (high - low))

    def drawn(self, value: float | None) -> bool:
        """Whether there is a place for it."""
        return value is not None and math.isfinite(value) and (value > 0 or not self.log)

    def line(self, points: Sequence[tuple]) -> str:
        """The path through points; a point that cannot be drawn is a gap. A lone point becomes a dot."""
        words, pen = [], False
        for i, (x, y) in enumerate(points):
            if not self.drawn(y):
                pen = False
                continue
            words.append(f"{'L' if pen else 'M'}{self.x(x)} {self.y(y)}")
            if not pen and (i + 1 == len(points) or not self.drawn(points[i + 1][1])):
                words.append("h0")
            pen = True
        return "".join(words)

    def labels(self) -> str:
        """Grid lines' numbers, as HTML, whose size does not change with the plot's."""
        across = (f'<i style="left:{self.x(v) / 10:g}%">{short(v)}</i>' for v in ticks(self.left, self.right))
        up = (f'<i style="top:{self.y(v) / 10:g}%">{short(v)}</i>' for v in ticks(self.low, self.high, self.log))
        return f'<div class="xs">{"".join(across)}</div><div class="ys">{"".join(up)}</div>'

    def lines(self) -> str:
        """The grid as an SVG path."""
        across = (f"M{self.x(v)} 0V1000" for v in ticks(self.left, self.right))
        up = (f"M0 {self.y(v)}H1000" for v in ticks(self.low, self.high, self.log))
        return "".join([*across, *up])


# ----------------------------------------------------------------------------------------------------------------
# Curves and heat maps
# ----------------------------------------------------------------------------------------------------------------


def curves(series: Mapping[str, Sequence[tuple]], x: str, y: str, log: bool = False, marks: Iterable[tuple] = (),
           bands: Mapping[str, Sequence[tuple]] | None = None, look: Mapping[str, tuple] | None = None,
           faint: Collection[str] = ()) -> Html:  # fmt: skip
    """Curves over one x, with a legend whose entries hide and show them, and all values at the pointer's x.

    series: points (x, y) by name, with rising x; y None or not finite is a gap, and on a logarithmic axis what is not
    positive too. Long ones are thinned (thin()).
    x, y: names of the axes. y stands above the plot as its title.
    marks: (x, text) of vertical lines. bands: (x, low, high) by the name of the series behind which they are
    drawn, in its colour. look: a series' colour, 0 to 9 or 'r0' to 'r9' for a ramp, and whether it is dashed; the
    others take colours in order. faint: series drawn thin and pale, as the raw numbers behind a mean are.
    """
    series = {name: thin([(px, py) for px, py in points]) for name, points in series.items()}
    bands = {name: [b for b in thin(band) if all(map(math.isfinite, b))] for name, band in (bands or {}).items()}
    good = _Axes([0, 1], [1, 2], log).drawn
    xs = [px for points in series.values() for px, py in points if good(py)]
    ys = [py for points in series.values() for _, py in points if good(py)]
    if not xs:
        return Html(f'<figure class="chart"><figcaption>{escape(y)}</figcaption><p>No numbers yet.</p></figure>')
    ys += [v for name, band in bands.items() if name not in faint for _, *pair in band for v in pair if good(v)]
    axes = _Axes(xs, ys, log)
    shapes, legend, values = [f'<path class="grid" d="{axes.lines()}"/>'], [], []
    colours = {name: ((look or {}).get(name) or (i % 10, False)) for i, name in enumerate(series)}
    for name, band in bands.items():
        there = [(axes.x(a), axes.y(max(low, axes.low)), axes.y(high)) for a, low, high in band if good(high)]
        outline = [f"{a} {high}" for a, _, high in there] + [f"{a} {low}" for a, low, _ in reversed(there)]
        if outline:
            style = f"fill:var(--c{colours[name][0]})"
            shapes.append(f'<path class="band" style="{style}" d="M{"L".join(outline)}Z"/>')
    for i, (name, points) in enumerate(series.items()):
        colour, dashed = colours[name]
        kind = " ".join(["line", *["dashed"] * bool(dashed), *["faint"] * (name in faint)])
        style = f"stroke:var(--c{colour})"
        shapes.append(f'<path class="{kind}" data-i="{i}" style="{style}" d="{axes.line(points)}"/>')
        swatch = f'<svg viewBox="0 0 18 8"><path class="{kind}" style="{style}" d="M0 4H18"/></svg>'
        legend.append(f'<button type="button" data-i="{i}">{swatch}{escape(name)}</button>')
        good_points = [(_rounded(px), _rounded(py)) for px, py in points]
        values.append([name, f"var(--c{colour})", [p[0] for p in good_points], [p[1] for p in good_points]])
    for mark, words in marks:
        if axes.left <= mark <= axes.right:
            shapes.append(f'<path class="mark" d="M{axes.x(mark)} 0V1000"><title>{escape(words)}</title></path>')
    scale = " (log)" if log else ""
    if len(legend) == 1 and next(iter(series)).casefold() in y.casefold():  # the title says it
        legend = []
    data = _data({"x": x, "left": axes.left, "right": axes.right, "series": values})
    return Html(
        f'<figure class="chart curves"><figcaption>{escape(y)}<small>{scale}</small></figcaption>'
        f'<div class="plot" role="img" aria-label="{escape(y)} over {escape(x)}">'
        f'<svg class="lines" viewBox="0 0 1000 1000" preserveAspectRatio="none">{"".join(shapes)}</svg>'
        f'{axes.labels()}<div class="at"></div></div><div class="xname">{escape(x)}</div>'
        f'<div class="legend">{"".join(legend)}</div>{data}</figure>'
    )


def heat(rows: Mapping[str, Sequence[float | None]], x: Sequence[float], x_name: str, title: str,
         log: bool = True) -> Html:  # fmt: skip
    """A heat map with a row for each name over the same x, and the value at the pointer. Cells without a number stay
    empty, and with `log` those that are not positive too. Many columns are thinned to the largest value of each
    stretch, so that spikes stay."""
    good = _Axes([0, 1], [1, 2], log).drawn
    parts = np.array_split(np.arange(len(x)), min(COLUMNS, len(x))) if len(x) else []
    cells = [[max((row[i] for i in part if i < len(row) and good(row[i])), default=None) for part in parts]
             for row in rows.values()]  # fmt: skip
    found = [v for row in cells for v in row if v is not None]
    if not found:
        return Html(f'<figure class="chart"><figcaption>{escape(title)}</figcaption><p>No numbers yet.</p></figure>')
    scaled = math.log if log else float
    low, span = scaled(min(found)), (scaled(max(found)) - scaled(min(found))) or 1.0
    pixels = np.zeros((len(cells), len(parts)), np.uint8)  # [rows, columns], 0: empty
    for i, row in enumerate(cells):
        pixels[i] = [0 if v is None else 1 + round(254 * (scaled(v) - low) / span) for v in row]
    ramp = [np.interp(np.linspace(0, 4, 255), range(5), [c[k] for c in HEAT]) for k in range(3)]
    image = Image.frombytes("P", pixels.shape[::-1], pixels.tobytes())
    image.putpalette([0, 0, 0, *np.stack(ramp, axis=1).round().astype(int).ravel().tolist()])
    file = io.BytesIO()
    image.save(file, "PNG", transparency=0)
    names = "".join(f"<i><bdi>{escape(name)}</bdi></i>" for name in rows)
    below = f"{x_name}; of each {len(parts[0])} the largest" if len(parts[0]) > 1 else x_name
    first, last = x[0], x[-1]
    axes = _Axes([first, last], [1, 2], False)
    at = [_rounded(x[int(part[0])]) for part in parts]
    data = _data({"x": x_name, "at": at, "rows": list(rows), "cells": [[_rounded(v) for v in row] for row in cells]})
    colours = ",".join("rgb({},{},{})".format(*c) for c in HEAT)
    scale = f'{short(min(found))}<b style="background:linear-gradient(to right,{colours})"></b>{short(max(found))}'
    across = "".join(f'<i style="left:{axes.x(v) / 10:g}%">{short(v)}</i>' for v in ticks(first, last))
    return Html(
        f'<figure class="chart heat"><figcaption>{escape(title)} <span class="scale">{scale}</span></figcaption>'
        f'<div class="cells" style="--rows:{len(cells)}"><div class="names">{names}</div>'
        f'<div class="plot" role="img" aria-label="{escape(title)}"><img alt="" src="{_uri(file.getvalue(), "png")}">'
        f'<div class="xs">{across}</div><div class="at"></div></div></div>'
        f'<div class="xname">{escape(below)}</div>{data}</figure>'
    )


# ----------------------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------------------


def _cell(value: object) -> Html:
    """A table's cell: None as –, numbers with their thousands apart, anything else as text."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return escape("–" if value is None else value)
    return Html(f"{value:,}" if isinstance(value, int) else short(value))


def table(columns: Sequence[str], rows: Iterable[Sequence], sortable: bool = True) -> Html:
    """A table; a click on a column's name sorts by it. Columns of numbers are right-aligned, and sort as numbers."""
    rows = [list(row) for row in rows]
    number = [
        any(isinstance(row[i], int | float) and not isinstance(row[i], bool) for row in rows)
        and all(row[i] is None or isinstance(row[i], int | float) for row in rows)
        for i in range(len(columns))
    ]
    kind = [' class="number"' if n else "" for n in number]

    def one(row: list) -> str:
        keys = [f' data-v="{float(v)!r}"' if n and v is not None else "" for v, n in zip(row, number)]
        return "".join(f"<td{c}{k}>{_cell(v)}</td>" for v, c, k in zip(row, kind, keys))

    head = "".join(f"<th{c}>{escape(name)}</th>" for name, c in zip(columns, kind))
    body = "".join(f"<tr>{one(row)}</tr>" for row in rows)
    name = ' class="sortable"' if sortable and len(rows) > 1 else ""
    return Html(f'<div class="wide"><table{name}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>')


# ----------------------------------------------------------------------------------------------------------------
# Pictures
# ----------------------------------------------------------------------------------------------------------------


def _uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def thumbnail(picture: Image.Image | Path | str, side: int, limit: int | None = None) -> tuple[str, int, int]:
    """A picture as a WebP data URI, its longer side at most `side` pixels; and the width and height to show it at.
    limit: bytes of the URI, for which quality is given up, and then pixels. Files' thumbnails are kept in memory for
    the next page. OSError if the file is no picture."""
    if isinstance(picture, Image.Image):
        return _thumbnail(picture.copy(), side, limit)
    stat = Path(picture).stat()
    return _thumbnail_of_file(str(picture), stat.st_mtime_ns, stat.st_size, side, limit)


@lru_cache(maxsize=512)
def _thumbnail_of_file(path: str, time: int, size: int, side: int, limit: int | None):
    with Image.open(path) as image:
        return _thumbnail(image, side, limit)


def _thumbnail(image: Image.Image, side: int, limit: int | None) -> tuple[str, int, int]:
    small = image if image.mode == "RGB" and max(image.size) > side else image.convert("RGB")
    small.thumbnail((side, side), Image.Resampling.BICUBIC, reducing_gap=1.1)
    size, quality = small.size, 75
    while True:
        file = io.BytesIO()
        small.save(file, "WEBP", quality=quality, method=2)
        excess = file.tell() * 4 / 3 / limit if limit else 0.0
        if excess <= 1 or max(small.size) <= 64:
            return _uri(file.getvalue(), "webp"), *size
        if quality > 40 and excess < 2:
            quality = 40
        else:
            quality, smaller = 40, 0.9 / math.sqrt(excess)
            small = small.resize([max(1, round(smaller * s)) for s in small.size], Image.Resampling.BICUBIC)


def _image(picture: Image.Image | Path | str, side: int, limit: int | None, alt: str, more: str = "") -> Html:
    """An img element, or a sentence where the file is no picture any more."""
    try:
        uri, width, height = thumbnail(picture, side, limit)
    except (OSError, ValueError, Image.DecompressionBombError):
        return Html(f"<p{more}>{escape(picture)} is no picture that can be read.</p>")
    return Html(f'<img src="{uri}" width="{width}" height="{height}" alt="{escape(alt)}"{more}>')


def pictures(items: Iterable[tuple[str, Image.Image | Path | str]], thumb: int = 160) -> Html:
    """Thumbnails with labels below. thumb: pixels of the longer side."""
    shown = (f"<figure>{_image(p, thumb, None, label)}<figcaption>{escape(label)}</figcaption></figure>"
             for label, p in items)  # fmt: skip
    return Html(f'<div class="pictures" style="--thumb:{thumb}px">{"".join(shown)}</div>')


def slider(frames: Sequence[tuple[str, Image.Image | Path | str]], side: int = 800,
           budget: int = 3_000_000) -> Html:  # fmt: skip
    """One picture at a time, chosen with a slider; the last is shown first. side: pixels of the longer side at most;
    budget: bytes for all of them together, shared evenly."""
    if not frames:
        return Html("<p>No pictures yet.</p>")
    last = len(frames) - 1
    shown = [_image(picture, side, budget // len(frames), label, "" if i == last else " hidden")
             for i, (label, picture) in enumerate(frames)]  # fmt: skip
    labels = _data([label for label, _ in frames])
    return Html(
        f'<div class="slider"><label><output>{escape(frames[-1][0])}</output>'
        f'<input type="range" min="0" max="{last}" value="{last}" aria-label="which picture"></label>'
        f'<div class="frames">{"".join(shown)}</div>{labels}</div>'
    )


# ----------------------------------------------------------------------------------------------------------------
# Style and script
# ----------------------------------------------------------------------------------------------------------------

STYLE = """
:root{color-scheme:light dark;--back:#fff;--panel:#f6f7f9;--ink:#1b1f24;--pale:#5d6670;--rule:#dde1e6;--link:#0b57d0;
--c0:#1667c7;--c1:#d2590b;--c2:#13875a;--c3:#a83fa0;--c4:#b3261e;--c5:#0f8a9c;--c6:#8a6100;--c7:#6f5bd0;--c8:#4f7a1c;
--c9:#6b7280;--cr0:#26307c;--cr1:#2b4fa0;--cr2:#2a70b0;--cr3:#2190a8;--cr4:#2aa487;--cr5:#62ac4d;--cr6:#a5a521;
--cr7:#d18a12;--cr8:#d4601c;--cr9:#b8322a}
@media (prefers-color-scheme:dark){:root{--back:#14171a;--panel:#1c2024;--ink:#e6e8ea;--pale:#9aa4ae;--rule:#32383f;
--link:#8ab4f8;--c0:#6aa9f7;--c1:#f09a52;--c2:#4cc38f;--c3:#db7fd3;--c4:#f2796f;--c5:#4fc4d6;--c6:#d6a93c;--c7:#a798f0;
--c8:#97c15c;--c9:#a0a8b3;--cr0:#7f8cf0;--cr1:#6f9ef5;--cr2:#5cb4ee;--cr3:#4cc8d8;--cr4:#55d3ad;--cr5:#8fd672;
--cr6:#cfcf4f;--cr7:#f0b040;--cr8:#f58d4a;--cr9:#f0675c}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1280px;margin:0 auto;padding:16px clamp(12px,2.5vw,32px) 48px}
h1{font-size:24px;line-height:1.25;margin:8px 0 12px;overflow-wrap:anywhere}
h2{font-size:18px;margin:32px 0 10px;padding-top:10px;border-top:1px solid var(--rule)}
h3{font-size:15px;margin:16px 0 6px;overflow-wrap:anywhere}
p{margin:8px 0;max-width:75ch;overflow-wrap:anywhere}
a{color:var(--link)}
pre{margin:8px 0;padding:10px 12px;background:var(--panel);border:1px solid var(--rule);border-radius:6px;
font:13px/1.5 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;overflow-wrap:anywhere}
pre span{display:inline-block;max-width:100%}
details{margin:12px 0}
summary{cursor:pointer;font-weight:600}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(125px,1fr));gap:8px;margin:12px 0}
.figures div{background:var(--panel);border:1px solid var(--rule);border-radius:6px;padding:8px 12px}
.figures b{display:block;font-size:19px;line-height:1.3;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.figures span{color:var(--pale);font-size:13px}
.beside{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,370px),1fr));gap:20px 28px;margin:10px 0}
.beside>div{min-width:0}
.chart{margin:0 0 8px;position:relative}
.chart figcaption{font-weight:600;margin-bottom:6px}
.chart small{color:var(--pale);font-weight:400}
.plot{position:relative;height:230px;margin:0 8px 20px 46px;border-left:1px solid var(--pale);
border-bottom:1px solid var(--pale);touch-action:pan-y;cursor:crosshair}
.plot>svg{position:absolute;width:100%;height:100%;overflow:hidden}
.line{fill:none;stroke-width:1.7;stroke-linejoin:round;stroke-linecap:round;vector-effect:non-scaling-stroke}
.dashed{stroke-dasharray:5 4;stroke-linecap:butt}
.faint{stroke-width:1;opacity:.35}
.band{opacity:.18;stroke:none}
.grid{fill:none;stroke:var(--rule);stroke-width:1;vector-effect:non-scaling-stroke}
.mark{fill:none;stroke:var(--pale);stroke-width:1;stroke-dasharray:2 3;vector-effect:non-scaling-stroke}
.xs i,.ys i{position:absolute;font:normal 12px/1 system-ui,"DejaVu Sans",sans-serif;color:var(--pale);
white-space:nowrap;font-variant-numeric:tabular-nums;pointer-events:none}
.xs i{top:calc(100% + 6px);transform:translateX(-50%)}
.ys i{right:calc(100% + 6px);transform:translateY(-50%)}
.xname{text-align:right;font-size:12px;color:var(--pale);margin:-2px 8px 2px 0}
.at{position:absolute;display:none;top:0;bottom:0;width:1px;background:var(--ink);pointer-events:none}
.tip{position:absolute;display:none;z-index:3;top:4px;max-width:85%;padding:6px 9px;background:var(--back);
border:1px solid var(--pale);border-radius:6px;font-size:12px;line-height:1.45;pointer-events:none;
box-shadow:0 2px 8px #0004;font-variant-numeric:tabular-nums}
.tip div{display:flex;gap:10px;justify-content:space-between;white-space:nowrap}
.tip span{overflow:hidden;text-overflow:ellipsis}
.tip em{display:inline-block;width:9px;height:9px;margin-right:5px;border-radius:2px}
.legend{display:flex;flex-wrap:wrap;gap:2px 4px;margin-left:40px}
.legend button{all:unset;cursor:pointer;font-size:12px;line-height:1.3;padding:3px 6px;border-radius:4px;
overflow-wrap:anywhere}
.legend button:focus-visible{outline:2px solid var(--link)}
.legend button.off{opacity:.4;text-decoration:line-through}
.legend svg{width:18px;height:8px;margin-right:5px}
.legend .faint{opacity:.6}
.cells{display:flex}
.names{flex:none;max-width:max(108px,24%);display:grid;grid-template-rows:repeat(var(--rows),15px)}
.names i{font:normal 11px/15px ui-monospace,"DejaVu Sans Mono",monospace;color:var(--pale);white-space:nowrap;
overflow:hidden;text-overflow:ellipsis;direction:rtl;text-align:left;padding-right:6px}
.cells .plot{flex:1;min-width:0;height:calc(15px*var(--rows));margin-left:0}
.cells img{position:absolute;width:100%;height:100%;image-rendering:pixelated}
.scale{font-weight:400;font-size:12px;color:var(--pale);white-space:nowrap}
.scale b{display:inline-block;width:90px;height:10px;margin:0 6px;border-radius:2px}
.wide{overflow-x:auto;margin:8px 0}
table{border-collapse:collapse;font-size:14px}
th,td{text-align:left;vertical-align:top;padding:4px 14px 4px 0;border-bottom:1px solid var(--rule)}
td{overflow-wrap:anywhere;min-width:11ch}
th{color:var(--pale);font-weight:600;white-space:nowrap}
td.number,th.number{min-width:0;text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
.sortable th{cursor:pointer}
th[data-order="1"]::after{content:" ▲"}
th[data-order="-1"]::after{content:" ▼"}
.pictures{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,var(--thumb)),1fr));gap:12px}
.pictures figure{margin:0;font-size:13px;line-height:1.35;overflow-wrap:anywhere}
img{max-width:100%;height:auto}
.slider label{display:block}
.slider output{display:block;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.slider{max-width:800px}
.slider input{width:100%;margin:6px 0 10px}
.frames img{display:block;width:100%;border-radius:4px}
.frames [hidden]{display:none}
"""

SCRIPT = """
"use strict";
const all = (s, from = document) => [...from.querySelectorAll(s)];
const data = el => JSON.parse(el.querySelector('script[type="application/json"]').textContent);
const short = v => {
  if (v === null || v === undefined) return "–";
  const a = Math.abs(v);
  if (a >= 1e5 && Number.isInteger(v) || Number.isInteger(v)) return v.toLocaleString("en");
  return a < 1e-3 ? v.toExponential(2).replace("e+", "e") : String(Number(v.toPrecision(4)));
};
function make(tag, text, colour) {
  const el = document.createElement(tag);
  if (text !== undefined) el.textContent = text;
  if (colour) el.style.background = colour;
  return el;
}
function hover(figure, rows) {  // rows(fraction from the left, from the top) -> [where, [[name, value, colour], ...]]
  const plot = figure.querySelector(".plot"), at = figure.querySelector(".at"), tip = make("div");
  tip.className = "tip";
  plot.append(tip);
  const move = e => {
    const box = plot.getBoundingClientRect();
    const fx = Math.min(1, Math.max(0, (e.clientX - box.left) / box.width));
    const fy = Math.min(0.9999, Math.max(0, (e.clientY - box.top) / box.height));
    const [where, lines] = rows(fx, fy);
    tip.replaceChildren(make("strong", where), ...lines.map(([name, value, colour]) => {
      const row = make("div"), label = make("span");
      if (colour) label.append(make("em", "", colour));
      label.append(name);
      row.append(label, make("b", short(value)));
      return row;
    }));
    tip.style.display = at.style.display = "block";
    at.style.left = fx * 100 + "%";
    tip.style.left = fx < 0.5 ? `calc(${fx * 100}% + 10px)` : "";
    tip.style.right = fx < 0.5 ? "" : `calc(${(1 - fx) * 100}% + 10px)`;
  };
  const leave = () => { tip.style.display = at.style.display = "none"; };
  plot.addEventListener("pointermove", move);
  plot.addEventListener("pointerdown", move);
  plot.addEventListener("pointerleave", leave);
}
function nearest(xs, x) {
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1; else high = middle;
  }
  return low > 0 && x - xs[low - 1] < xs[low] - x ? low - 1 : low;
}
for (const figure of all(".curves")) {
  const d = data(figure), off = new Set();
  const slack = (d.right - d.left) / 50;
  hover(figure, fx => {
    const x = d.left + fx * (d.right - d.left), lines = [];
    let where = null;
    d.series.forEach(([name, colour, xs, ys], i) => {
      if (off.has(i) || !xs.length) return;
      const n = nearest(xs, x), near = x >= xs[0] - slack && x <= xs[xs.length - 1] + slack;
      if (near && (where === null || Math.abs(xs[n] - x) < Math.abs(where - x))) where = xs[n];
      lines.push([name, near ? ys[n] : null, colour]);
    });
    return [`${d.x} ${short(where === null ? Number(x.toPrecision(4)) : where)}`, lines];
  });
  for (const button of all(".legend button", figure)) button.addEventListener("click", () => {
    const i = Number(button.dataset.i), hide = !off.has(i);
    if (hide) off.add(i); else off.delete(i);
    button.classList.toggle("off", hide);
    for (const path of all(`path[data-i="${i}"]`, figure)) path.style.display = hide ? "none" : "";
  });
}
for (const figure of all(".heat")) {
  const d = data(figure);
  hover(figure, (fx, fy) => {
    const column = Math.min(d.at.length - 1, Math.floor(fx * d.at.length)), row = Math.floor(fy * d.rows.length);
    return [`${d.x} ${short(d.at[column])}`, [[d.rows[row], d.cells[row][column]]]];
  });
}
const sliders = all(".slider").map(slider => {
  const labels = data(slider), input = slider.querySelector("input"), frames = all(".frames > *", slider);
  const show = n => {
    input.value = n;
    frames.forEach((frame, i) => { frame.hidden = i !== n; });
    slider.querySelector("output").textContent = labels[n];
  };
  return { labels, input, show, place: slider.closest(".beside") };
});
for (const one of sliders) one.input.addEventListener("input", () => {
  const n = Number(one.input.value);
  one.show(n);
  for (const other of sliders) if (other !== one && one.place && other.place === one.place) {
    const same = other.labels.indexOf(one.labels[n]);  // of two runs side by side: the same step, where both have it
    if (same >= 0) other.show(same);
  }
});
for (const table of all("table.sortable")) all("th", table).forEach((th, column) => th.addEventListener("click", () => {
  const order = th.dataset.order === "1" ? -1 : 1, body = table.tBodies[0];
  all("th", table).forEach(other => delete other.dataset.order);
  th.dataset.order = order;
  const key = row => {
    const cell = row.cells[column];
    return th.className === "number" ? Number(cell.dataset.v ?? "NaN") : cell.textContent;
  };
  const rows = [...body.rows].map(row => [key(row), row]);
  rows.sort(([a], [b]) => typeof a === "string" ? order * a.localeCompare(b)
    : Number.isNaN(a) || Number.isNaN(b) ? Number.isNaN(a) - Number.isNaN(b) : order * (a - b));
  body.append(...rows.map(([, row]) => row));
}));
"""
