"""Compare routers: one of another checkout, this one's without traces, and with 1 % of the requests traced.

    git worktree add ../old v1; python -m benchmarks.routers.traced_streams ../old [--rounds 10] [--json F]

Each run is one of benchmarks.routers.open_streams: a router, stand-in nodes and clients, which ask again when an answer
ends. The three take turns, the other checkout first and last, and the tables compare as benchmarks.compare does: a
figure is worse (or better) when its median lies outside everything that the other checkout measured. Memory of a stream
is the difference between routers with many and with more streams: first requests fill memory that the start left free,
and more of it or less tells nothing of streams.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.compare import Figure, show
from benchmarks.report import parser_with_json
from benchmarks.run import ROOT, machine

ANSWER_TOKENS, TOKENS_PER_S = 32, 2_000
OFF, TRACED = "nothing on", "1 % traced"


def measure(checkout: Path, streams: int, seconds: float, traced: Sequence[str] = ()) -> dict[str, Any]:
    """Return the figures of one run. Raise RuntimeError if streams or spans are missing."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks.routers.open_streams",
            "--checkout",
            str(checkout),
            "--json",
            str(path),
        ]
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
    print(checkout.name, streams, *traced, named(figures), file=sys.stderr, flush=True)  # ten rounds may be interrupted
    return figures


def named(figures: dict[str, Any]) -> dict[str, float]:
    return {"cpu_of_token_us": figures["cpu_us_per_token"], "router_mb": figures["router_full_mb"]}


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


def growth(many: Figure, more: Figure, streams: int) -> Figure:
    """Return kB of each of the `streams` by which the runs differ."""

    def grown(before: Sequence[float], after: Sequence[float]) -> list[float]:
        return [1e3 * (last - first) / streams for first, last in zip(before, after, strict=True)]

    return Figure(grown(many.old, more.old), grown(many.new, more.new))


def main() -> int:
    parser = parser_with_json(__doc__)
    parser.add_argument("other", type=Path, help="the other checkout; it runs in this environment")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--streams", type=int, nargs="*", default=[64, 512, 1536])
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run's steady phase")
    args = parser.parse_args()
    console = Console(width=120)
    console.print(machine())
    values: dict[str, Any] = {}
    last: tuple[int, dict[str, dict[str, Figure]]] | None = None
    for streams in sorted(args.streams):
        tables = compare(args.other.resolve(), streams, args.rounds, args.seconds)
        for title, figures in tables.items():
            if last is not None:
                many = last[1][title]["router_mb"]
                figures["memory_of_stream_kb"] = growth(many, figures["router_mb"], streams - last[0])
            show(f"{streams} streams, {title}", figures, console)
            values[f"{streams}, {title}"] = {name: asdict(figure) for name, figure in figures.items()}
        last = streams, tables
    if args.json:
        args.json.write_text(json.dumps(values, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
