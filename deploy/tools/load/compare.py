"""Compare two reports. Pure except for printing.

A difference is significant if it exceeds sqrt(a^2 + b^2), with the half widths a and b of the intervals. Figures
without an interval are not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table

from deploy.tools.traffic.figures.check import Check
from deploy.tools.traffic.figures.figures import Estimate
from deploy.tools.traffic.figures.outcome import LoadReport
from deploy.tools.traffic.figures.table import MARKS, NAMES, with_interval

Verdict = Literal["better", "worse", "same", ""]
COMPARED = ("p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class ComparedLine:
    name: str
    first: Estimate
    second: Estimate
    lower_is_better: bool
    scale: float = 1.0

    @property
    def change(self) -> float:
        return self.second.value / self.first.value - 1 if self.first.value else math.nan

    @property
    def verdict(self) -> Verdict:
        """How the second value compares with the first; "" without intervals."""
        noise = math.hypot(half_width(self.first), half_width(self.second))
        apart = self.second.value - self.first.value
        if math.isnan(noise) or math.isnan(apart):
            return ""
        if abs(apart) <= noise:
            return "same"
        return "better" if (apart < 0) == self.lower_is_better else "worse"


def half_width(estimate: Estimate) -> float:
    return (estimate.high - estimate.low) / 2


def lines_of(first: LoadReport, second: LoadReport) -> list[ComparedLine]:
    a, b = first.summary, second.summary
    latencies = [
        ComparedLine(f"{NAMES[name]} {level} ms", a.latencies[name][level], b.latencies[name][level], True, 1e3)
        for name in NAMES
        for level in COMPARED
    ]
    turns = {row.turns: row for row in b.talks.by_turn}
    by_turn = [
        ComparedLine(f"TTFT p50 ms, turn {row.turns}", row.ttft["p50"], turns[row.turns].ttft["p50"], True, 1e3)
        for row in a.talks.by_turn
        if row.turns in turns
    ]
    return [
        *latencies,
        *by_turn,
        ComparedLine("prompt tokens computed, %", a.talks.computed, b.talks.computed, True, 100),
        ComparedLine("requests that ended /s", a.requests_per_s, b.requests_per_s, False),
        ComparedLine("output tokens /s", a.output_tokens_per_s, b.output_tokens_per_s, False),
        ComparedLine("share within the SLO", a.slo_share, b.slo_share, False),
        ComparedLine("goodput /s", a.goodput, b.goodput, False),
        ComparedLine("smooth goodput, tokens /s", a.smooth_goodput, b.smooth_goodput, False),
    ]


def remarks(first: LoadReport, second: LoadReport) -> list[str]:
    found = []
    if first.model != second.model:
        found.append(f"other models: {first.model} and {second.model}")
    if first.summary.slo != second.summary.slo:
        found.append(f"other SLOs: {first.summary.slo} and {second.summary.slo}: goodput is not comparable")
    if first.command != second.command:
        found.append(f"other commands:\n  {first.command}\n  {second.command}")
    for name, report in (("first", first), ("second", second)):
        found += [f"{name}: {line}" for line in bad(report.checks)]
    return found


def bad(checks: Sequence[Check]) -> list[str]:
    return [f"check {one.name} {one.verdict}: {one.text}" for one in checks if one.verdict in ("failed", "doubtful")]


COLOURS = {"better": MARKS["ok"].replace("ok", "better"), "worse": "[red]worse[/]", "same": "no clear difference"}


def show(lines: Sequence[ComparedLine], first: str, second: str, console: Console) -> None:
    table = Table("", first, second, "change", "")
    for line in lines:
        change = "-" if math.isnan(line.change) else f"{line.change:+.1%}"
        values = (with_interval(one, line.scale) for one in (line.first, line.second))
        table.add_row(line.name, *values, change, COLOURS.get(line.verdict, ""))
    console.print(table)
