"""What the simulated nodes' streams did, as files for `baton trace FILE DIR/*.steps.json`: one for each life of a node.

A simulated step takes no time. So each look at the clock is a microsecond after the one before, which shows the order.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from shared.observe.step_records import StepRecords

TICK_S = 1e-6
Clock = Callable[[], float]


class StepFiles:
    """`now`: the simulation's seconds, to which each node's clock is shifted at the end."""

    def __init__(self, folder: Path, now: Clock) -> None:
        self._folder = folder
        self._now = now
        self._lives: dict[str, tuple[StepRecords, Clock]] = {}

    def begin_life(self, name: str, records: StepRecords, clock: Clock) -> None:
        """`name`: of the node and its life. `clock`: the node's."""
        records.clock = rising(clock)
        records.begin_records()
        self._lives[name] = records, clock

    def write_all(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, (records, clock) in self._lives.items():
            told = {"node": name, "shift": self._now() - clock(), "rows": records.take_rows()}
            (self._folder / f"{name}.steps.json").write_text(json.dumps(told), encoding="utf-8")


def rising(clock: Clock) -> Clock:
    last = float("-inf")

    def look() -> float:
        nonlocal last
        last = max(clock(), last + TICK_S)
        return last

    return look
