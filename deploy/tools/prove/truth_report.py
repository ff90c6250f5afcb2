"""The report on a server: as text, in the order of `baton load`'s, and as JSON.

It needs only a router's packages, so that people with another engine can install little.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deploy.columns import aligned
from deploy.tools.prove.asks import KINDS
from deploy.tools.prove.partings import Parting
from deploy.tools.prove.truths import WayRow
from deploy.tools.traffic.figures.check import Check

FORMAT = 1
EXIT_UNTRUE = 1
MARKS = {"ok": "ok", "failed": "FAILED", "doubtful": "doubtful", "skipped": "-"}
MAX_WIDTH = 120


@dataclass(frozen=True, slots=True)
class TruthReport:
    """`refused`: what the server does not offer, with its words. `noise`: in logprob, of `dtype`."""

    server: str
    engine: str
    model: str
    begun: str  # in UTC and ISO 8601
    command: str
    salt: str
    api: str
    dtype: str
    noise: float
    refused: Mapping[str, str]
    rows: Sequence[WayRow]
    partings: Sequence[Parting]
    checks: Sequence[Check]
    format: int = FORMAT


def text_of(report: TruthReport) -> str:
    width = min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 0)).columns)
    title = (
        f"{report.model} at {report.server}: {report.engine}, {report.api}, salt {report.salt}; "
        f"differences of up to {report.noise:g} in logprob count as noise ({report.dtype})"
    )
    return "\n".join(
        [
            *textwrap.wrap(title, width),
            "",
            aligned([["equal to the first stream", *KINDS, "below the noise", "differ"], *map(cells_of, report.rows)]),
            "",
            *(f"not offered: {name}: {why}" for name, why in report.refused.items()),
            "is it true?",
            *(line for check in report.checks for line in lines_of(check, width)),
        ]
    )


def cells_of(row: WayRow) -> list[str]:
    shares = [f"{equal}/{total}" if total else "-" for equal, total in (row.equal[kind] for kind in KINDS)]
    return [row.way, *shares, str(row.below), str(row.above)]


def lines_of(check: Check, width: int) -> Iterator[str]:
    """Yield the check's line, and its details below."""
    head = f"{check.name:11} {MARKS[check.verdict]:9} "
    blank = " " * len(head)
    for begin, text in ((head, check.text), *((blank, detail) for detail in check.details)):
        yield textwrap.fill(text, width, initial_indent=begin, subsequent_indent=blank)
