"""Measure how late the client's event loop is, by a timer every 10 ms.

The timer is needed because a read of several chunks shows only the newest byte's lateness.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

BEAT_S = 0.010


@dataclass(slots=True)
class LoopLag:
    """`at[i]`: the time of beat i, in seconds from the run's start. `late[i]`: its lateness in seconds."""

    due: float
    at: array[float] = field(default_factory=lambda: array("d"))
    late: array[float] = field(default_factory=lambda: array("d"))

    def beat(self, now: float) -> None:
        self.at.append(now)
        self.late.append(max(0.0, now - self.due))
        self.due = now + BEAT_S

    def worst_between(self, begin: float, end: float) -> float:
        """Return the worst lateness of beats that came after `begin` and were due by `end`."""
        worst = 0.0
        for i in range(bisect_right(self.at, begin), len(self.at)):
            if self.at[i] - self.late[i] > end:
                break
            worst = max(worst, self.late[i])
        return worst

    def samples(self) -> list[float]:
        """Return how late an event in each 10 ms would have been handled."""
        return [late - missed * BEAT_S for late in self.late for missed in range(1 + int(late / BEAT_S))]


@contextlib.contextmanager
def watching_lag(now: Callable[[], float]) -> Iterator[LoopLag]:
    loop = asyncio.get_running_loop()
    loop_lag = LoopLag(now() + BEAT_S)
    timer: asyncio.TimerHandle

    def beat() -> None:
        nonlocal timer
        loop_lag.beat(now())
        timer = loop.call_later(BEAT_S, beat)

    timer = loop.call_later(BEAT_S, beat)
    try:
        yield loop_lag
    finally:
        timer.cancel()
