"""Compares two checkouts by the parts of `make bench`: another one (say of the last release) against this one.

    git worktree add ../old v1; python -m benchmarks.compare ../old [--rounds 3] [--dtype float32] [--only http_shm]

The two take turns, the other checkout first and last, so that a machine whose speed drifts hurts both, and the other
checkout against itself shows how much of a difference is noise. A figure of this checkout is called
worse (or better) when its median lies outside everything that the other checkout measured.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import parser_with_json
from benchmarks.run import ROOT, Part, flat, machine, measure, num_cores, parts

LOWER_IS_BETTER = re.compile(r"_[mu]s$|(?<!tok)_s$|_[km]b$|seconds")
WITHOUT_NUMBERS = ("transfer", "router")  # parts that have no dtype
NOT_A_SPEED = ("setup", "flips", "machine")


@dataclass(slots=True)
class Figure:
    """What was measured of one figure, in order of time; the other checkout has one value more."""

    old: list[float] = field(default_factory=list)
    new: list[float] = field(default_factory=list)

    def verdict(self, name: str) -> str:
        middle = statistics.median(self.new)
        if min(self.old) <= middle <= max(self.old):
            return ""
        is_lower = middle < min(self.old)
        return "better" if is_lower == bool(LOWER_IS_BETTER.search(name)) else "worse"


def with_dtype(part: Part, dtype: str) -> Part:
    """The same part in another number format, for machines without bfloat16 of their own, where it has one."""
    if not dtype or part.name in WITHOUT_NUMBERS:
        return part
    command = list(part.command)
    if "--dtype" in command:
        command[command.index("--dtype") + 1] = dtype
    else:
        command += ["--dtype", dtype]
    return Part(part.name, part.threads, tuple(command))


def compare(part: Part, other: Path, rounds: int, console: Console) -> dict[str, Figure]:
    figures: dict[str, Figure] = {}
    for checkout in (*(other, ROOT) * rounds, other):
        for name, value in flat(measure(part, console, checkout) or {}):
            if isinstance(value, int | float) and not any(word in name for word in NOT_A_SPEED):
                figure = figures.setdefault(name, Figure())
                (figure.new if checkout is ROOT else figure.old).append(float(value))
    return {name: figure for name, figure in figures.items() if figure.old and figure.new}


def show(title: str, figures: dict[str, Figure], console: Console) -> None:
    table = Table("figure", "other", "this", "this / other", "other's own range", "", title=title, title_justify="left")
    for name, figure in figures.items():
        old, new = statistics.median(figure.old), statistics.median(figure.new)
        low, high = (f"{value / old:.2f}" if old else "-" for value in (min(figure.old), max(figure.old)))
        ratio = f"{new / old:.2f}" if old else "-"
        table.add_row(name, f"{old:,.2f}", f"{new:,.2f}", ratio, f"{low} to {high}", figure.verdict(name))
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("other", type=Path, help="the other checkout; it runs in this environment")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="", help="instead of each part's own: float32 where bfloat16 is emulated")
    parser.add_argument("--full", action="store_true", help="as many repetitions as `make bench`, not as --quick")
    parser.add_argument("--only", nargs="*", help="names of parts")
    args = parser.parse_args(argv)
    console = Console(width=120)
    console.print(machine())
    values: dict[str, Any] = {}
    for part in parts(not args.full, num_cores()):
        if not args.only or part.name in args.only:
            figures = compare(with_dtype(part, args.dtype), args.other.resolve(), args.rounds, console)
            show(part.name, figures, console)
            values[part.name] = {name: {"old": figure.old, "new": figure.new} for name, figure in figures.items()}
    if args.json:
        args.json.write_text(json.dumps(values, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
