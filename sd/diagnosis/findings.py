"""What a rule found, and how all of it is told: in lines, as JSON, as a page."""

import math
from typing import NamedTuple

from sd.page import document, section, table

SECTIONS = (
    "data", "schedule", "network", "gradients", "learning rate", "loss", "conditioning", "sampling", "diversity",
    "checkpoint",
)  # fmt: skip

WELL, LOOK, BROKEN, NOT_JUDGED = "well", "look here", "broken", "not judged"

HEALTHY_RUNS = 30  # of tests/doctor/run.py that were examined, by which false alarms are counted

FALSE_ALARMS: dict[str, int] = {}  # of them, how many a rule accused, where any


class Finding(NamedTuple):
    """One rule's verdict."""

    section: str  # of SECTIONS
    rule: str
    verdict: str  # WELL, LOOK, BROKEN or NOT_JUDGED
    evidence: str  # what was measured, with its limits or standard errors; or why nothing was
    advice: str = ""  # what to do
    numbers: dict = {}  # the same for programs

    @property
    def false_alarms(self) -> str:
        """How often the rule accuses healthy runs."""
        return f"accused {FALSE_ALARMS.get(self.rule, 0)} of {HEALTHY_RUNS} healthy runs"


def graded(section: str, rule: str, value: float, look: float, broken: float, words: str, advice: str, above=True,
           **numbers) -> Finding:  # fmt: skip
    """A verdict by two limits, beyond which a value is bad: above them, or below. Not finite is broken. words tells the
    value."""

    def beyond(limit):
        return not math.isfinite(value) or (value > limit if above else value < limit)

    verdict = BROKEN if beyond(broken) else LOOK if beyond(look) else WELL
    limits = f" ('look here' {'above' if above else 'below'} {look:g}, 'broken' {broken:g})"
    advice = "" if verdict == WELL else advice
    return Finding(section, rule, verdict, words + limits, advice, {"value": value} | numbers)


def worst(findings: list[Finding]) -> str:
    """The gravest verdict of some findings."""
    verdicts = {f.verdict for f in findings}
    return next((v for v in (BROKEN, LOOK, WELL) if v in verdicts), NOT_JUDGED)


def in_lines(title: str, findings: list[Finding]) -> str:
    """The report for a terminal: section after section, the gravest verdict first."""
    order, lines = (BROKEN, LOOK, WELL, NOT_JUDGED), [title, ""]
    for name in SECTIONS:
        own = sorted((f for f in findings if f.section == name), key=lambda f: order.index(f.verdict))
        lines.append(f"{name}: {worst(own)}")
        for f in own:
            lines.append(f"  {f.verdict:10} {f.rule}: {f.evidence}")
            if f.verdict in (BROKEN, LOOK):
                lines += [f"             what to do: {f.advice}", f"             this rule {f.false_alarms}"]
    counts = {v: sum(f.verdict == v for f in findings) for v in order}
    lines += ["", ", ".join(f"{n} {verdict}" for verdict, n in counts.items() if n)]
    return "\n".join(lines)


def as_rows(findings: list[Finding]) -> list[dict]:
    """The report as values of JSON."""
    return [f._asdict() | {"false_alarms": FALSE_ALARMS.get(f.rule, 0), "healthy_runs": HEALTHY_RUNS} for f in findings]


def as_page(title: str, findings: list[Finding]) -> str:
    """The report as one HTML page that asks for nothing outside."""
    columns = ("verdict", "rule", "what was measured", "what to do", "healthy runs accused")
    parts = []
    for name in SECTIONS:
        own = [f for f in findings if f.section == name]
        rows = [
            (f.verdict, f.rule, f.evidence, f.advice, f"{FALSE_ALARMS.get(f.rule, 0)} of {HEALTHY_RUNS}") for f in own
        ]
        parts.append(section(f"{name}: {worst(own)}", table(columns, rows)))
    return document(title, parts)
