"""How late the client's own event loop was, at any time: a timer that should fire every 10 ms, and when it did.

A chunk says how late it was handled only by the newest byte of what was read at once; where a late client finds several
chunks together, the older ones' lateness is lost. This timer loses nothing. Knows nothing of requests.
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
    """`at[i]`: when beat i came, `late[i]` seconds after it was due. Seconds from the start of the run."""

    due: float
    at: array[float] = field(default_factory=lambda: array("d"))
    late: array[float] = field(default_factory=lambda: array("d"))

    def beat(self, now: float) -> None:
        self.at.append(now)
        self.late.append(max(0.0, now - self.due))
        self.due = now + BEAT_S

    def worst_between(self, begin: float, end: float) -> float:
        """How late the loop was at most, of beats that were due by `end` and came after `begin`."""
        worst = 0.0
        for i in range(bisect_right(self.at, begin), len(self.at)):
            if self.at[i] - self.late[i] > end:
                break
            worst = max(worst, self.late[i])
        return worst

    def samples(self) -> list[float]:
        """The lateness that something would have met, every 10 ms: a pause of a second is a hundred of these."""
        return [late - missed * BEAT_S for late in self.late for missed in range(1 + int(late / BEAT_S))]


@contextlib.contextmanager
def watching_lag(now: Callable[[], float]) -> Iterator[LoopLag]:
    """On the running loop, while the body lasts."""
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
