"""A study: the same training under other flags, seed by seed, and what came of it."""

import csv
import io
import itertools
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from sd.errors import InputError
from sd.files import atomic_path, read_json
from sd.log import read_rows

MEASURED = ("lowest held-out loss", "above the best", "at images", "last held-out loss", "images/s")  # of a summary
FIELDS = {"name": str, "about": str, "base": list, "grid": dict, "seeds": list, "measure": list, "figures": dict,
          "split": str, "weights": str, "skip": list}  # of a plan  # fmt: skip
OWN = ("--out", "--resume", "--seed", "--dry_run", "--benchmark", "--stop_at")  # flags that a plan may not set


class Trial(NamedTuple):
    """One training of a study. choice: the values of the grid that it stands for; seed; words: of SD_Train.py, without
    --out and --resume."""

    name: str
    choice: dict
    seed: int
    words: list[str]

    @property
    def label(self) -> str:
        """What it stands for, without the seed."""
        return label_of(self.choice)


def label_of(choice: dict) -> str:
    parts = [f"{flag.lstrip('-')} {show(value)}" for flag, value in choice.items()]
    return ", ".join(parts) or "as it is"


def show(value) -> str:
    """A value of the grid, in words."""
    if isinstance(value, bool) or value is None:
        return {True: "on", False: "off", None: "default"}[value]
    if isinstance(value, dict):
        return str(value["name"])
    if isinstance(value, list):
        return " ".join(map(show, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def read_plan(path: Path) -> dict:
    """A plan (see SD_Sweep.py), checked; InputError for what it may not hold."""
    plan = read_json(path)
    for name, value in plan.items():
        if name not in FIELDS:
            raise InputError(f"{path} wants {', '.join(FIELDS)}, found {name!r}")
        if not isinstance(value, FIELDS[name]):
            raise InputError(f"{path} wants a {FIELDS[name].__name__} for {name}, found {value!r}")
    if not plan.get("base"):
        raise InputError(f"{path} wants `base`, the words of the training that all have in common")
    plan = {"name": path.stem, "about": "", "grid": {}, "seeds": [0], "measure": [], "figures": {}, "split": "val",
            "weights": "ema", "skip": []} | plan  # fmt: skip
    if not plan["seeds"] or not all(type(s) is int for s in plan["seeds"]):
        raise InputError(f"{path} wants whole numbers for seeds, found {plan['seeds']}")
    for flag, values in plan["grid"].items():
        is_flag = flag.startswith("--") or (isinstance(values, list) and all(isinstance(v, dict) for v in values))
        if not is_flag or not isinstance(values, list) or not values:
            raise InputError(f"{path} wants a flag and a list of its values in grid, found {flag!r}: {values!r}")
        for value in values:
            if isinstance(value, dict) and (set(value) != {"name", "flags"} or not isinstance(value["flags"], list)):
                raise InputError(f'{path} wants {{"name": ..., "flags": [...]}} for a set of flags, found {value!r}')
    if taken := [w for w in [*map(str, plan["base"]), *plan["grid"]] if w.partition("=")[0] in OWN]:
        raise InputError(f"{path} sets {taken[0]}, which a study sets itself: leave it out (seeds are in `seeds`)")
    return plan


def with_words(plan: dict, words: list[str]) -> dict:
    """The plan with further words of SD_Train.py that all trainings have in common. The grid's words come after
    them, and count."""
    if taken := [w for w in words if w.partition("=")[0] in OWN]:
        raise InputError(f"{taken[0]} is what a study sets itself: leave it out of the words behind --")
    return plan | {"base": [*plan["base"], *words]}


def words_of(flag: str, value) -> list[str]:
    """A flag with a value of the grid: nothing for false and null, the flag alone for true, the flags of a set."""
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, dict):
        return [str(word) for word in value["flags"]]
    return [flag, *(str(v) for v in (value if isinstance(value, list) else [value]))]


def trials(plan: dict) -> list[Trial]:
    """All trainings of a plan: each choice of the grid with each seed, seed by seed, so that a study that is stopped
    early has compared all choices once. Choices that a row of `skip` describes are left out."""
    found, names = [], {}
    choices = [dict(zip(plan["grid"], values)) for values in itertools.product(*plan["grid"].values())]
    shown = [{flag: show(value) for flag, value in choice.items()} for choice in choices]
    kept = [c for c, s in zip(choices, shown) if not any(row.items() <= s.items() for row in plan["skip"])]
    for seed, choice in itertools.product(plan["seeds"], kept):
        words = [str(w) for w in plan["base"]]
        for flag, value in choice.items():
            words += words_of(flag, value)
        slug = re.sub(r"[^A-Za-z0-9.+-]+", "_", label_of(choice)).strip("_")[:120]
        name = f"{slug}-seed_{seed}"
        if names.setdefault(name, choice) != choice:
            raise InputError(f"two choices of the plan have the name {name}: give their values other names")
        found.append(Trial(name, choice, seed, [*words, "--seed", str(seed)]))
    return found


def curve(out: Path, split: str, weights: str) -> list[tuple[int, float]]:
    """(images seen, loss) of a run's validations."""
    rows = read_rows(out / "validation.jsonl")
    return [(r["images"], r["loss"]) for r in rows
            if r["split"] == split and r["weights"] == weights and r["loss"] is not None]  # fmt: skip


class Result(NamedTuple):
    """What a finished training came to."""

    trial: Trial
    losses: list[tuple[int, float]]  # held-out, by images seen
    lowest: float | None
    at: int | None  # images seen at the lowest
    last: float | None
    images_per_s: float | None  # median of the log's lines
    figures: dict[str, float]


def result_of(trial: Trial, out: Path, plan: dict) -> Result:
    losses = curve(out, plan["split"], plan["weights"])
    at, lowest = min(losses, key=lambda p: p[1], default=(None, None))
    rates = [r["images_per_s"] for r in read_rows(out / "log.jsonl") if r.get("images_per_s")]
    figures = {}
    for label, place in plan["figures"].items():
        file, _, path = place.replace("{out}", str(out)).rpartition(":")
        value = read_json(file) if Path(file).exists() else {}
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int | float):
            figures[label] = value
    rate = statistics.median(rates) if rates else None
    return Result(trial, losses, lowest, at, losses[-1][1] if losses else None, rate, figures)


def spread(values: list[float]) -> tuple[float, float | None]:
    """Mean and standard deviation over seeds; none of a single one."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def summary(results: list[Result], plan: dict) -> list[dict]:
    """A row for each choice: over its seeds, the mean and the standard deviation of all that was measured."""
    rows, groups = [], _by_label(results)
    means = {label: [r.lowest for r in group if r.lowest is not None] for label, group in groups.items()}
    means = {label: statistics.fmean(values) for label, values in means.items() if values}
    best = groups[min(means, key=means.get)] if means else []
    lowest = {r.trial.seed: r.lowest for r in best if r.lowest is not None}
    for label, group in groups.items():
        row = {"choice": label, "seeds": len(group)}
        measured = {
            "lowest held-out loss": [r.lowest for r in group],
            "above the best": [
                r.lowest - lowest[r.trial.seed] for r in group if r.lowest is not None and r.trial.seed in lowest
            ],  # fmt: skip
            "at images": [r.at for r in group],
            "last held-out loss": [r.last for r in group],
            "images/s": [r.images_per_s for r in group],
        }
        measured |= {name: [r.figures.get(name) for r in group] for name in plan["figures"]}
        for name, values in measured.items():
            values = [v for v in values if v is not None]
            row[name], row[f"{name}, deviation"] = spread(values) if values else (None, None)
        rows.append(row)
    return rows


def _by_label(results: list[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(result.trial.label, []).append(result)
    return groups


def mean_curves(results: list[Result], curves: dict[str, list]) -> dict[str, list[tuple[int, float]]]:
    """By choice, the mean over its seeds of the curves of its trials, where all of them have a value."""
    means = {}
    for label, group in _by_label(results).items():
        values = [dict(curves[r.trial.name]) for r in group]
        shared = sorted(set.intersection(*(set(v) for v in values)))
        means[label] = [(x, statistics.fmean(v[x] for v in values)) for x in shared]
    return means


def as_csv(rows: list[dict]) -> str:
    """A table of dictionaries with the same keys."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]) if rows else [])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def table_of(rows: list[dict], plan: dict) -> tuple[list[str], list[list[str]]]:
    """The head and the lines of a summary's table, in words."""
    columns = [*MEASURED, *plan["figures"]]
    lines = [[row["choice"], str(row["seeds"]), *(in_words(row, name) for name in columns)] for row in rows]
    return ["choice", "seeds", *columns], lines


def markdown(head: list[str], lines: list[list[str]]) -> str:
    """A table of Markdown."""
    cells = [f"| {' | '.join(line)} |" for line in [head, *lines]]
    return "\n".join([cells[0], "|---" * len(head) + "|", *cells[1:]]) + "\n"


def draw_curves(path: Path, held_out: dict[str, list[tuple[int, float]]], title: str):
    """A PNG of held-out losses by images seen, a curve a choice, with a dot at its lowest. No file without curves."""
    from matplotlib.figure import Figure

    held_out = {label: points for label, points in held_out.items() if points}
    if not held_out:
        return
    figure = Figure(figsize=(9, 5))
    axis = figure.subplots()
    for i, (label, points) in enumerate(held_out.items()):
        style = {"color": f"C{i % 10}", "ls": ("-", "--", ":", "-.")[i // 10 % 4]}
        axis.plot(*zip(*points), label=label, lw=1.2, **style)
        axis.plot(*min(points, key=lambda p: p[1]), marker="o", ms=5, color=style["color"])
    axis.set(title=title, xlabel="images seen", ylabel="held-out loss")
    axis.legend(fontsize=7, ncol=1 + len(held_out) // 13)
    figure.tight_layout()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def in_words(row: dict, name: str, digits: int = 4) -> str:
    """A figure of a summary's row with its deviation: 0.1234 ± 0.0012."""
    value, deviation = row[name], row[f"{name}, deviation"]
    if value is None:
        return "–"
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
    return shown if deviation is None else f"{shown} ± {deviation:.2g}"
