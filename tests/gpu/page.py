"""The results as one JSON and one page, for a folder that holds what was found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.gpu.book import BAD, PASSED, Book, Outcome
from tests.gpu.plan import Check, measured

SUMMARY, PAGE = "summary.json", "report.md"
NOT_YET = "not run yet"


def write_results(book: Book, checks: Sequence[Check], folder: Path) -> None:
    """`checks`: all that there are; those without a result are named too."""
    outcomes = [(check, book.outcome(check.name)) for check in checks]
    told = {
        "runs": [asdict(run) for run in book.runs],
        "checks": [row_of(book, check, outcome) for check, outcome in outcomes],
        "counts": counts([outcome for _, outcome in outcomes]),
    }
    (folder / SUMMARY).write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    (folder / PAGE).write_text(page(told), encoding="utf-8")


def row_of(book: Book, check: Check, outcome: Outcome | None) -> dict[str, Any]:
    if outcome is None:
        return asdict(Outcome(check.name, NOT_YET, 0.0, {})) | {"run": None}
    recorded = book.ended.get(check.name)
    return asdict(outcome) | {"run": None if recorded is None else recorded.run}


def measured_by(book: Book, checks: Sequence[Check]) -> dict[str, Any]:
    """What later runs compare with, in plan.measured's form. Of checks that did not pass, what was known stays."""
    passed = {check.name: book.ended[check.name].outcome for check in checks if is_passed(book, check)}
    known = measured()
    return {
        "machine": dict(book.runs[-1].machine),
        "date": datetime.now(UTC).date().isoformat(),
        "seconds": known["seconds"] | {name: round(outcome.seconds, 1) for name, outcome in passed.items()},
        "figures": known["figures"] | {name: dict(outcome.figures) for name, outcome in passed.items()},
    }


def is_passed(book: Book, check: Check) -> bool:
    return check.name in book.ended and book.ended[check.name].outcome.state == PASSED


def counts(outcomes: Sequence[Outcome | None]) -> dict[str, int]:
    states = [NOT_YET if outcome is None else outcome.state for outcome in outcomes]
    return {state: states.count(state) for state in sorted(set(states))}


def page(told: Mapping[str, Any]) -> str:
    said = ", ".join(f"{count} {state}" for state, count in told["counts"].items())
    lines = ["# Checks on a GPU", "", f"In all: {said}.", "", "## Machine", ""]
    for nth, run in enumerate(told["runs"]):
        facts = "; ".join(f"{name} {value}" for name, value in run["machine"].items())
        lines.append(f"- run {nth}, code {run['code']}: {facts}")
    before = measured()
    lines += ["", f"Figures of before: {before['machine'].get('GPU', 'nothing')}, {before['date']}.", "", "## Results"]
    lines += ["", "| check | state | seconds | before | run |", "|---|---|---:|---:|---:|"]
    for row in told["checks"]:
        run, seconds = "" if row["run"] is None else row["run"], before["seconds"].get(row["name"], "")
        lines.append(f"| {row['name']} | {row['state']} | {row['seconds']:.0f} | {number(seconds)} | {run} |")
    for row in told["checks"]:
        lines += section(row)
    return "\n".join(lines) + "\n"


def section(row: Mapping[str, Any]) -> list[str]:
    """What a check measured, and what it said where it did not pass."""
    lines: list[str] = []
    if row["figures"]:
        known = measured()["figures"].get(row["name"], {})
        lines += ["", f"## {row['name']}", "", "| figure | value | before |", "|---|---:|---:|"]
        lines += [
            f"| {name} | {number(value)} | {number(known.get(name, ''))} |" for name, value in row["figures"].items()
        ]
    if row["state"] in BAD:
        lines += ["", f"## {row['name']}: {row['state']}", "", "```", row["told"], "```"]
    elif row["state"] != PASSED and row["told"]:
        lines += ["", f"{row['name']}: {row['state']}, {row['told']}"]
    return lines


def number(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
