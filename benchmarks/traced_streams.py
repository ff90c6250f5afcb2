"""Compare routers: one of another checkout, this one's without traces, and with 1 % of the requests traced.

    git worktree add ../old v1; python -m benchmarks.traced_streams ../old [--rounds 10] [--streams 64 512] [--json F]

Each run is one of benchmarks.open_streams: a router, stand-in nodes and clients, which ask again when an answer ends.
The three take turns, the other checkout first and last, and the tables compare as benchmarks.compare does: a figure is
worse (or better) when its median lies outside everything that the other checkout measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compare import Figure, show
from benchmarks.run import ROOT, machine

ANSWER_TOKENS, TOKENS_PER_S = 32, 2_000
OFF, TRACED = "nothing on", "1 % traced"


def measure(checkout: Path, streams: int, seconds: float, traced: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of one run. Raise RuntimeError if its streams were no whole load."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", "benchmarks.open_streams", "--checkout", str(checkout), "--json", str(path)]
        command += ["--streams", str(streams), "--seconds", str(seconds), "--tokens-per-s", str(TOKENS_PER_S)]
        # opened as often as answers end, so that each moment has its share of beginnings
        command += [
            "--max-tokens",
            str(ANSWER_TOKENS),
            "--per-s",
            str(TOKENS_PER_S / ANSWER_TOKENS),
            "--again",
            *traced,
        ]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)  # status 1: a late or hungry router
        figures: dict[str, Any] = json.loads(path.read_text())
    if figures["streams"] != streams or figures["lost"] or bool(figures["spans"]) != bool(traced):
        raise RuntimeError(f"{checkout}: {figures}")
    return figures


def named(figures: dict[str, Any]) -> dict[str, float]:
    return {
        "cpu_of_token_us": figures["cpu_us_per_token"],
        "memory_of_stream_kb": figures["kb_per_stream"],
        "router_mb": figures["router_full_mb"],
    }


def add(figures: dict[str, Figure], values: dict[str, float], *, is_old: bool) -> None:
    for name, value in values.items():
        figure = figures.setdefault(name, Figure())
        (figure.old if is_old else figure.new).append(value)


def compare(other: Path, streams: int, rounds: int, seconds: float) -> dict[str, dict[str, Figure]]:
    tables: dict[str, dict[str, Figure]] = {OFF: {}, TRACED: {}}
    for turn in range(rounds + 1):
        old = named(measure(other, streams, seconds))
        for table in tables.values():
            add(table, old, is_old=True)
        if turn < rounds:
            add(tables[OFF], named(measure(ROOT, streams, seconds)), is_old=False)
            add(tables[TRACED], named(measure(ROOT, streams, seconds, ("--traced", "0.01"))), is_old=False)
    return tables


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout; it runs in this environment")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 512])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run's steady phase")
    parser.add_argument("--json", type=Path, help="also write all values there")
    args = parser.parse_args()
    console = Console(width=120)
    console.print(machine())
    values: dict[str, Any] = {}
    for streams in args.streams:
        for title, figures in compare(args.other.resolve(), streams, args.rounds, args.seconds).items():
            show(f"{streams} streams, {title}", figures, console)
            values[f"{streams}, {title}"] = {name: vars_of(figure) for name, figure in figures.items()}
    if args.json:
        args.json.write_text(json.dumps(values, indent=1))
    return 0


def vars_of(figure: Figure) -> dict[str, list[float]]:
    return {"old": figure.old, "new": figure.new}


if __name__ == "__main__":
    sys.exit(main())
