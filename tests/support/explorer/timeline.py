"""A world's log as a table that a person can read: one column per stream, one line per thing that happened.

step  host                  schedule          forward                copy            transfer        cold
  12  launch sample(3)>forward
  13                                          > sample(3)
  13                                          * publish_ready
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.cores.simulated_streams import World

HOST = "host"
WORDS = {"start": "> ", "yield": "~ ", "end": "< ", "fire": "* ", "skip": "x ", "preempted": "|| ", "rank": "v "}
HOST_WORDS = ("launch", "wait", "sync", "reset")


def render(world: World, last: int | None = None) -> str:
    """> begins  ~ yields  < ends  * fires an event  || left half-way  v loses its rank  x skipped"""
    streams = list(world._streams)
    lines = world._log if last is None else world._log[-last:]
    columns = [HOST, *streams]
    cells = [_cell(stream, what, label) for _, stream, what, label in lines]
    current = HOST
    table: list[tuple[int, str, str]] = []
    for (step, stream, what, _), (column, text) in zip(lines, cells, strict=True):
        if what in ("start", "yield"):
            current = stream
        table.append((step, column if column else current, text))
    widths = {name: max([len(name), *(len(text) for _, column, text in table if column == name)]) for name in columns}
    head = " step  " + "  ".join(name.ljust(widths[name]) for name in columns)
    rows = [_row(step, column, text, columns, widths) for step, column, text in table]
    return "\n".join([head.rstrip(), *rows])


def _cell(stream: str, what: str, label: str) -> tuple[str, str]:
    """Column ('' = whoever runs) and text."""
    if what in HOST_WORDS:
        arrow = f" > {stream}" if stream and stream != HOST else ""
        return HOST, f"{what} {label}{arrow}"
    if what.startswith("fail"):
        return stream, f"! {label} raised"
    return stream, f"{WORDS.get(what, what + ' ')}{label}"


def _row(step: int, column: str, text: str, columns: Sequence[str], widths: dict[str, int]) -> str:
    cells = [(text if name == column else "").ljust(widths[name]) for name in columns]
    return f"{step:5d}  " + "  ".join(cells).rstrip()
