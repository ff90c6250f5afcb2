"""Simulated time: a heap of callbacks. Knows nothing of what they do; equal times run in the order they were set."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Timers:
    """`now` in seconds of true time; nodes have clocks of their own that lie (see hosts.py)."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    def at(self, when: float, callback: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (max(when, self.now), next(self._order), callback))

    def after(self, delay: float, callback: Callable[[], None]) -> None:
        self.at(self.now + delay, callback)

    def run_until(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Everything due up to `until`, or until `stop()` holds after some callback."""
        while self._heap and self._heap[0][0] <= until:
            self.now, _, callback = heapq.heappop(self._heap)
            callback()
            if stop():
                return
        self.now = max(self.now, until)
