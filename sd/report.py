"""A run on one self-contained page, from its folder alone; and two runs on one, their curves overlaid.

What a folder lacks, because the run is young, older than this file or damaged, is left out.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from sd.diagnosis.case import Case
from sd.diagnosis.course import check_course
from sd.diagnosis.findings import BROKEN, LOOK, NOT_JUDGED, WELL, as_rows
from sd.files import atomic_write, sha256
from sd.log import read_rows
from sd.objective import BINS
from sd.page import (
    Html,
    beside,
    code,
    curves,
    document,
    figures,
    folded,
    heat,
    section,
    slider,
    subsection,
    table,
)
from sd.weights.read import checkpoint_folders

WINDOWS = 80  # means of training losses that are drawn; each with the 95 % interval of its mean
# Fields of log.jsonl that have a place of their own, or say nothing as curves; other numbers are drawn at the end.
KNOWN = {"step", "images", "epoch", "loss", "lr", "grad_norm", "skipped", "images_per_s", "data_wait", "bins", "seen",
         "mfu"}  # fmt: skip
GRIDS_BUDGET = 3_000_000  # bytes of a page's thumbnails of grids


@dataclass
class Run:
    """What is in a run folder."""

    folder: Path
    log: list[dict] = field(default_factory=list)
    validation: list[dict] = field(default_factory=list)
    evaluation: list[dict] = field(default_factory=list)
    health: list[dict] = field(default_factory=list)
    findings: list[dict] = field(default_factory=list)
    settings: dict = field(default_factory=dict)
    about: dict = field(default_factory=dict)  # run.json
    state: dict = field(default_factory=dict)  # the newest checkpoint's
    model: dict = field(default_factory=dict)
    checkpoint: Path | None = None
    grids: list[tuple[int, Path]] = field(default_factory=list)

    @property
    def step(self) -> int:
        """How far the run is known to be."""
        rows = [*self.log[-1:], *self.validation[-1:], self.state]
        return max((row["step"] for row in rows if type(row.get("step")) is int), default=0)

    @property
    def images_a_step(self) -> float:
        """Pictures of an optimizer step; 1 if nothing says so."""
        row = next((r for r in reversed(self.log) if number(r.get("images")) and r["step"]), None)
        return row["images"] / row["step"] if row else number(self.state.get("global_batch")) or 1


def number(value: object) -> float | None:
    """A number of a log, else None; true and false are none."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def _json(path: Path) -> dict:
    """A JSON object of a file; an empty one where there is none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        content = json.loads(path.read_text("utf-8"))
        if isinstance(content, dict):
            return content
    return {}


def read_run(folder: Path) -> Run:
    """Read what there is."""
    run = Run(folder, settings=_json(folder / "config.json"), about=_json(folder / "run.json"))
    for name in ("log", "validation", "evaluation", "health"):
        with contextlib.suppress(OSError):
            rows = read_rows(folder / f"{name}.jsonl")
            setattr(run, name, sorted(rows, key=lambda row: row["step"]))
    saved = _json(folder / "doctor.json").get("findings")
    run.findings = [row for row in saved if isinstance(row, dict)] if isinstance(saved, list) else []
    for checkpoint in checkpoint_folders(folder):
        if state := _json(checkpoint / "state.json"):
            run.checkpoint, run.state, run.model = checkpoint, state, _json(checkpoint / "model.json")
            break
    for path in sorted((folder / "samples").glob("step_*.png")):
        digits = path.stem.removeprefix("step_")
        if digits.isdecimal():
            run.grids.append((int(digits), path))
    return run


# ----------------------------------------------------------------------------------------------------------------
# Numbers
# ----------------------------------------------------------------------------------------------------------------


def points(rows: Iterable[dict], value: Callable[[dict], object], x: Callable[[dict], float]) -> list[tuple]:
    """(x, value) of each row; None where a row has no such number, which is a gap. [] if none has."""
    found = []
    for row in rows:
        try:
            found.append((x(row), number(value(row))))
        except (LookupError, TypeError):  # a row may lack what another version wrote
            found.append((x(row), None))
    return found if any(y is not None for _, y in found) else []


def means(found: list[tuple], windows: int = WINDOWS) -> tuple[list[tuple], list[tuple]]:
    """Means of neighbouring points, as (x, mean), and their intervals, (x, low, high): mean -+ 1.96 standard errors,
    the window's values being taken as independent. Points that are None are left out. Nothing for few points."""
    there = [(x, y) for x, y in found if y is not None]
    if len(there) < 3 * windows:
        windows = len(there) // 10
    if windows < 4:
        return [], []
    line, band = [], []
    for part in np.array_split(np.array(there, float), windows):
        (x, y), error = part.mean(axis=0).tolist(), float(part[:, 1].std(ddof=1)) / math.sqrt(len(part))
        line.append((x, y))
        band.append((x, y - 1.96 * error, y + 1.96 * error))
    return line, band


def split_of(run: Run, split: str, weights: str) -> list[dict]:
    return [row for row in run.validation if (row.get("split"), row.get("weights")) == (split, weights)]


def blocks(rows: list[dict]) -> dict[str, tuple[list[float], dict[str, list]]]:
    """Numbers by block that rows hold: objects of numbers, whatever they are called and however deep they lie. By
    title: the steps, and a list of values for each block. Where an object's entries are objects of the same few
    numbers, as in {"down.0": {"grad": 1, "weight": 2}}, there is one for each number."""
    found: dict[str, dict[float, dict]] = {}

    def walk(title: str, value: dict, step: float):
        inner = [v for v in value.values() if isinstance(v, dict)]
        if inner and len(inner) == len(value) > len(inner[0]) and all(v.keys() == inner[0].keys() for v in inner):
            value = {name: {block: v[name] for block, v in value.items()} for name in inner[0]}
        flat = {k: v for k, v in value.items() if v is None or number(v) is not None}
        if title and any(v is not None for v in flat.values()):
            found.setdefault(title, {}).setdefault(step, {}).update(flat)
        for name, deeper in value.items():
            if isinstance(deeper, dict):
                walk(f"{title} {name}".strip(), deeper, step)

    for row in rows:
        walk("", {k: v for k, v in row.items() if isinstance(v, dict)}, row["step"])
    maps = {}
    for title, by_step in found.items():
        names = dict.fromkeys(name for values in by_step.values() for name in values)
        maps[title] = list(by_step), {n: [values.get(n) for values in by_step.values()] for n in names}
    return maps


# ----------------------------------------------------------------------------------------------------------------
# Curves of one run or of two
# ----------------------------------------------------------------------------------------------------------------


class _Chart:
    """Series of one chart, of one run or of several: those of the second are dashed, in the same colours."""

    def __init__(self):
        self.series, self.bands, self.look, self.faint = {}, {}, {}, []

    def add(self, name: str, found: list[tuple], colour: object, run: int, of: str, band=(), faint: bool = False):
        """of: the run's name, where there are several."""
        if found:
            name = f"{of}: {name}" if of else name
            self.series[name], self.look[name] = found, (colour, run > 0)
            if band:
                self.bands[name] = band
            if faint:
                self.faint.append(name)

    def draw(self, x: str, y: str, log: bool = False, marks: Iterable[tuple] = ()) -> Html | str:
        if not self.series:
            return ""
        return curves(self.series, x, y, log, marks, self.bands, self.look, self.faint)


def draw_curves(runs: Mapping[str, Run]) -> Html:
    """All charts of runs by name; the name is on the page where there are two."""
    several = len(runs) > 1
    batches = {run.images_a_step for run in runs.values()}
    x_name = "images" if len(batches) > 1 else "step"
    names = ("loss", "held_out", "train_bins", "lr", "norm", "speed", "wait", "mfu", "skipped")
    chart: dict[str, _Chart] = {name: _Chart() for name in names}
    more: dict[str, _Chart] = {}
    marks = []
    for i, (title, run) in enumerate(runs.items()):
        scale = run.images_a_step if x_name == "images" else 1

        def x(row: dict, scale=scale) -> float:
            return row["step"] * scale

        of = title if several else ""
        get = partial(points, run.log, x=x)
        raw = get(lambda r: r["loss"])
        line, band = means(raw)
        if not several or not line:
            chart["loss"].add("training, weighted", raw, 9, i, of, faint=bool(line))
        chart["loss"].add("training, weighted, mean of a window", line, 9, i, of, band)
        for split, weights, colour in (
            ("val", "ema", 0),
            ("val", "live", 1),
            ("train", "ema", 2),
            ("train", "live", 3),
        ):
            if not several or split == "val":
                words = f"{'held out' if split == 'val' else 'training pictures'}, {weights.replace('ema', 'EMA')}"
                chart["loss"].add(words, points(split_of(run, split, weights), lambda r: r["loss"], x), colour, i, of)
        for b in range(BINS):
            words, colour = f"t {b * 1000 // BINS}–{(b + 1) * 1000 // BINS - 1}", f"r{b * 10 // BINS}"
            part = split_of(run, "val", "ema") or split_of(run, "val", "live")
            chart["held_out"].add(words, points(part, lambda r, b=b: r["bins"][b], x), colour, i, of)
            raw = [p for p in get(lambda r, b=b: r["bins"][b]) if p[1] is not None]
            chart["train_bins"].add(words, means(raw)[0] or raw, colour, i, of)
        for name, words, value in (
            ("lr", "learning rate", lambda r: r["lr"]),
            ("norm", "gradient norm", lambda r: r["grad_norm"]),
            ("speed", "images/s", lambda r: r["images_per_s"]),
            ("wait", "% of the time", lambda r: 100 * r["data_wait"]),
            ("mfu", "% of the peak", lambda r: 100 * r["mfu"]),
            ("skipped", "steps", lambda r: r["skipped"] or None),
        ):
            found = get(value)
            line = means(found)[0] if several and name in ("norm", "speed", "wait", "mfu") else []
            chart[name].add(words, found, i, i, of, faint=bool(line))
            chart[name].add(f"{words}, mean of a window", line, i, i, of)
        for name in dict.fromkeys(k for row in run.log for k in row if k not in KNOWN):
            more.setdefault(name, _Chart()).add(name.replace("_", " "), get(lambda r, name=name: r[name]), i, i, of)
        for name in dict.fromkeys(
            k for row in run.health for k in row if k not in KNOWN and number(row[k]) is not None
        ):
            found = [p for p in points(run.health, lambda r, name=name: r[name], x) if p[1] is not None]
            more.setdefault(name, _Chart()).add(name.replace("_", " "), found, i, i, of)
        add_evaluations(more, run, x, i, of)
        words = f"{title}: resumed" if several else "resumed"
        marks += [(s["step"] * scale, words) for s in sessions_of(run) if number(s.get("step")) and s["step"] > 0]
    titles = {
        "loss": ("Loss", True),
        "held_out": ("Held-out loss by timestep, EMA", True),
        "train_bins": ("Training loss by timestep, weighted", True),
        "lr": ("Learning rate", False),
        "norm": ("Gradient norm, before clipping", True),
        "speed": ("Images/s", False),
        "wait": ("Waiting for data, % of the time", False),
        "mfu": ("Model FLOPs utilisation, %", False),
        "skipped": ("Steps skipped, per line of the log", False),
    }
    drawn = [chart[name].draw(x_name, title, log, marks) for name, (title, log) in titles.items()]
    drawn += [c.draw(x_name, name.replace("_", " "), False, marks) for name, c in more.items()]
    if not any(drawn):
        return Html("<p>The log has no lines yet.</p>")
    note = Html("<p>Dotted: where the run was resumed.</p>") if marks else ""
    return Html(f"{note}{beside(*drawn)}")


def add_evaluations(more: dict[str, _Chart], run: Run, x: Callable, i: int, of: str):
    """Numbers of evaluation.jsonl: a chart for each measure, with a curve for each protocol and kind of weights, which
    are not compared with one another."""
    keys = [tuple(str(row[k]) for k in ("extractor", "weights", "protocol") if k in row) for row in run.evaluation]
    for name in dict.fromkeys(k for row in run.evaluation for k in row if k not in ("step", "images", "epoch")):
        labels = set()
        for colour, key in enumerate(dict.fromkeys(keys)):
            rows = [row for row, its in zip(run.evaluation, keys) if its == key]
            found = [p for p in points(rows, lambda r, name=name: r[name], x) if p[1] is not None]
            label = ", ".join(key[:2]) or name
            label = f"{label}, protocol {key[-1]}" if label in labels else label
            labels.add(label)
            more.setdefault(f"Evaluation: {name}", _Chart()).add(label, found, colour % 10, i, of)


# ----------------------------------------------------------------------------------------------------------------
# The other sections
# ----------------------------------------------------------------------------------------------------------------


def sessions_of(run: Run) -> list[dict]:
    """Each start of the run, from run.json."""
    found = run.about.get("sessions")
    return [s for s in found if isinstance(s, dict)] if isinstance(found, list) else []


def last(rows: list[dict], name: str) -> float | None:
    """The newest number of that name."""
    return next((row[name] for row in reversed(rows) if number(row.get(name)) is not None), None)


def duration(seconds: float) -> str:
    """7,380 -> '2 h 3 min'."""
    minutes = round(seconds / 60)
    days, hours = minutes // 1440, minutes // 60 % 24
    if days:
        return f"{days} d {hours} h"
    return f"{hours} h {minutes % 60} min" if hours else f"{minutes} min" if minutes else f"{seconds:.0f} s"


def key_numbers(run: Run) -> dict[str, object]:
    """What a reader wants to know first."""
    total, held_out = number(run.about.get("total")), split_of(run, "val", "ema") or split_of(run, "val", "live")
    losses = [(row["loss"], row["step"]) for row in held_out if number(row.get("loss")) is not None]
    speeds = [row["images_per_s"] for row in run.log[-50:] if number(row.get("images_per_s"))]
    speed = float(np.median(speeds)) if speeds else None
    numbers: dict[str, object] = {"step": run.step, "steps planned": total}
    numbers["images seen"] = round(run.step * run.images_a_step)
    numbers["epochs"] = last(run.log, "epoch")
    recent = [row["loss"] for row in run.log[-50:] if number(row.get("loss")) is not None]
    numbers["training loss, lately"] = float(np.mean(recent)) if recent else None
    numbers["held-out loss, newest"] = losses[-1][0] if losses else None
    if losses:
        numbers["lowest held-out loss"], numbers["its step"] = min(losses)
    numbers["images/s"] = speed
    if total and speed and run.step < total:
        numbers["left at this speed"] = duration((total - run.step) * run.images_a_step / speed)
    return numbers


def findings_of(run: Run) -> list[dict]:
    """The doctor's verdicts: those that can be had from the logs, judged now, and of other rules those of doctor.json,
    if SD_Doctor.py --json wrote one into the folder. The gravest come first."""
    case = Case(str(run.folder), run.folder, None, {}, run.settings, run.state, run.log, run.validation, run.health)
    try:
        found = as_rows(check_course(case))
    except (LookupError, TypeError, ValueError, ArithmeticError):  # lines of another version, or damaged
        found = []
    judged = {row["rule"] for row in found}
    found += [row for row in run.findings if row.get("rule") not in judged]
    order = (BROKEN, LOOK, WELL, NOT_JUDGED)
    return sorted(found, key=lambda row: order.index(row["verdict"]) if row.get("verdict") in order else 0)


def draw_findings(run: Run) -> list[Html | str]:
    """What the doctor says of the run: in the open what wants looking at, the rest folded."""
    found = findings_of(run)
    parts = []
    quiet = [row for row in found if row.get("verdict") in (WELL, NOT_JUDGED)]
    loud = [row for row in found if row not in quiet]
    names = ("verdict", "section", "rule", "evidence", "advice")

    def rows_of(rows: list[dict]) -> Html:
        shown = [n for n in names if any(row.get(n) for row in rows)]
        alarms = [f"{r['false_alarms']} of {r['healthy_runs']}" if "healthy_runs" in r else None for r in rows]
        cells = [[plain(r.get(n)) for n in shown] + [a] for r, a in zip(rows, alarms)]
        return table([*shown, "accuses healthy runs"], cells, sortable=False)

    if loud:
        parts.append(rows_of(loud))
    elif quiet:
        parts.append("Nothing in the logs wants looking at.")
    if quiet:
        parts.append(folded(f"{len(quiet)} rules found nothing, or had nothing to judge by", rows_of(quiet)))
    if found:
        parts.append("SD_Doctor.py also looks at the data and the weights, and with --deep at what the network does.")
    return parts


def plain(value: object) -> object:
    """A value for a cell: lists and objects as JSON, true and false in words."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def draw_blocks(run: Run) -> list[Html]:
    """Heat maps of whatever numbers by block the logs hold."""
    drawn = []
    for title, (steps, rows) in (blocks(run.log) | blocks(run.health)).items():
        values = [v for row in rows.values() for v in row if v is not None]
        mostly = (
            sum(v > 0 for v in values) > len(values) / 2
        )  # a few zeros, as of the first step's gradients, stay empty
        drawn.append(heat(rows, steps, "step", title.replace("_", " "), log=mostly and min(values) >= 0))
    return drawn


def prompts_of(path: Path) -> list[str]:
    """The prompts that a grid was painted with, in its order; [] if it does not say."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
        with Image.open(path) as image:
            found = json.loads(image.info["sd"])["prompts"]
        return found if isinstance(found, list) and all(isinstance(p, str) for p in found) else []
    return []


def draw_grids(run: Run, budget: int = GRIDS_BUDGET) -> list[Html | str]:
    """The slider through the sample grids, and their prompts."""
    if not run.grids:
        return []
    parts: list[Html | str] = [slider([(f"step {step:,}", path) for step, path in run.grids], budget=budget)]
    sets: dict[tuple, int] = {}
    for step, path in run.grids:
        if prompts := prompts_of(path):
            sets.setdefault(tuple(prompts), step)
    for prompts, step in sets.items():
        words = "Prompts, row by row" if len(sets) == 1 else f"Prompts from step {step:,} on"
        parts.append(folded(words, table(["", "prompt"], enumerate(prompts, 1), sortable=False)))
    return parts


def draw_settings(settings: dict) -> Html | str:
    return table(["setting", "value"], [[k, plain(v)] for k, v in settings.items()], sortable=False) if settings else ""


def draw_lineage(run: Run) -> Html | str:
    """The phases up to this one, oldest first."""
    chain = [entry for entry in run.state.get("lineage") or [] if isinstance(entry, dict)]
    rows = []
    for n, entry in enumerate(chain, 1):
        phase = f"{entry.get('phase')}" + (f" of {entry['path']}" if "path" in entry else "")
        digest = f"{entry['hash']}"[:16] if "hash" in entry else "the newest weights" if n == len(chain) else None
        rows.append([n, phase, number(entry.get("images")), digest, f"{entry.get('revision') or '–'}"[:12],
                     entry.get("torch")])  # fmt: skip
    names = ["", "phase", "images", "EMA weights handed on", "revision", "torch"]
    return table(names, rows, sortable=False) if rows else ""


def draw_data(run: Run) -> Html | str:
    """Each dataset's and latents' manifest: its hash, and what it says if it is there still."""
    hashes = run.state.get("data")
    if not isinstance(hashes, dict) or not hashes:
        return ""
    rows = [[name, f"{digest}"[:16], *manifest_now(run.settings, name, digest)] for name, digest in hashes.items()]
    if vae := run.state.get("vae"):
        rows.append(["VAE of the latents", f"{vae}"[:16], None, "weights"])
    return table(["data", "hash", "pictures", "now"], rows, sortable=False)


def manifest_now(settings: dict, name: str, digest: str) -> tuple[int | None, str]:
    """How many pictures a manifest counts, and whether it is the file of the run."""
    source, _, what = name.rpartition("/")
    if settings.get("dataset") and not source:
        folders = [Path(str(settings.get(what)))]
    else:
        place = Path(str(settings.get("data_root"))) / source
        if what == "dataset":
            folders = [place / str(settings.get("dataset_name") or "dataset")]
        else:
            folders = [place / f"latents_{settings.get('size')}", place / "latents"]
    path = next((p for f in folders if (p := f / "manifest.json").is_file()), None)
    if path is None:
        return None, "not found from here"
    manifest = _json(path)
    counts = manifest.get("counts")
    count = sum(filter(None, map(number, counts.values()))) if isinstance(counts, dict) else manifest.get("count")
    try:
        same = sha256(path) == digest
    except OSError:
        return None, "cannot be read"
    return (number(count), f"unchanged, {path.parent}") if same else (None, f"changed since, {path.parent}")


def draw_hardware(run: Run) -> Html | str:
    """Where the run was started, and each time it was resumed."""
    sessions = sessions_of(run)
    names = list(dict.fromkeys(name for s in sessions for name in s))
    rows = [[plain(s.get(name)) for name in names] for s in sessions]
    return table([{"step": "from step"}.get(n, n) for n in names], rows, sortable=False) if rows else ""


def model_words(run: Run) -> str:
    """What is trained, in a line."""
    s, unet = run.settings, run.model.get("unet")
    words = [f"Phase {s['phase']}"] if "phase" in s else []
    words += [f"network {s['model']}"] if "model" in s else []
    if isinstance(unet, dict) and isinstance(unet.get("channels"), list):
        words.append("UNet channels " + ", ".join(map(str, unet["channels"])))
    words += [f"{s['size']} pixels"] if "size" in s else []
    words += [f"prediction {s['prediction']}"] if "prediction" in s else []
    return "; ".join(words) + "." if words else ""


def last_section(run: Run) -> list[Html]:
    """How to go on, and where everything comes from."""
    resume = run.about.get("resume")
    parts = [section("Go on with this run", code(resume))] if isinstance(resume, str) and resume else []
    folded_settings = draw_settings(run.settings)
    for heading, drawn in (
        ("Settings", folded_settings and folded(f"{len(run.settings)} settings", folded_settings)),
        ("Lineage", draw_lineage(run)),
        ("Data", draw_data(run)),
        ("Hardware", draw_hardware(run)),
    ):
        if drawn:
            parts.append(section(heading, drawn))
    return parts


def written(runs: Iterable[Run]) -> str:
    """The page's last line."""
    where = ", ".join(f"{run.folder} at step {run.step:,}" for run in runs)
    return f"Written {time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())} from {where}."


def report(folder: Path) -> str:
    """The page of a run."""
    run = read_run(folder)
    name = folder.resolve().name
    parts = [model_words(run), figures({k: v for k, v in key_numbers(run).items() if v is not None})]
    for heading, drawn in (
        ("Health", draw_findings(run)),
        ("Curves", [draw_curves({name: run})]),
        ("Samples, EMA weights", draw_grids(run)),
        ("By block", draw_blocks(run)),
    ):
        if any(drawn):
            parts.append(section(heading, *drawn))
    return document(name, [*filter(None, parts), *last_section(run), written([run])])


def compare(*folders: Path) -> str:
    """The page of two runs: the second's curves are dashed."""
    names = [folder.resolve().name for folder in folders]
    if names[0] == names[1]:
        names = [str(folder) for folder in folders]
    runs = {name: read_run(folder) for name, folder in zip(names, folders)}
    a, b = runs.values()
    numbers = [key_numbers(run) for run in runs.values()]
    shown = list(dict.fromkeys(k for n in numbers for k in n))
    rows = [[k, *(n.get(k) for n in numbers)] for k in shown]
    differ = [k for k in {**a.settings, **b.settings} if a.settings.get(k) != b.settings.get(k)]
    settings = [[k, plain(a.settings.get(k)), plain(b.settings.get(k))] for k in differ]
    parts = [
        section("Key numbers", table(["", *runs], rows, sortable=False)),
        section("Settings that differ", table(["setting", *runs], settings, sortable=False) if settings else "None."),
        section("Curves", f"Solid: {names[0]}. Dashed: {names[1]}.", draw_curves(runs)),
    ]
    grids = [draw_grids(run, GRIDS_BUDGET // 2) for run in runs.values()]
    if any(grids):
        sides = [subsection(name, *(drawn or ["No pictures yet."])) for name, drawn in zip(runs, grids)]
        parts.append(section("Samples, EMA weights", beside(*sides)))
    for heading, draw in (("Lineage", draw_lineage), ("Data", draw_data), ("Hardware", draw_hardware)):
        sides = [subsection(name, drawn) for name, run in runs.items() if (drawn := draw(run))]
        if sides:
            parts.append(section(heading, *sides))
    return document(f"{names[0]} and {names[1]}", [*parts, written(runs.values())])


def write_report(folder: Path, out: Path | None = None):
    """Write a run's page, whole: report.html in its folder, or `out`."""
    atomic_write(out or folder / "report.html", report(folder))
