"""Keep what a node's streams did, while somebody asks for it.

    begin_records -> add_row, mark, timed ... -> take_rows

Off, each call is one comparison, and nothing is kept.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import NamedTuple, TypeVar, cast

R = TypeVar("R")
Steps = Generator[None, None, object]
MOST_ROWS = 100_000  # the oldest go first


class StepRow(NamedTuple):
    track: str  # a stream's name, "host" for the loop's thread, "requests" for a request's stages
    name: str
    of: str  # the step's number, or the request's key
    begin: float
    end: float


class StepRecords:
    """Any thread may add rows. One thread begins and takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.is_on = False
        self._rows: deque[StepRow] = deque(maxlen=MOST_ROWS)

    def begin_records(self) -> None:
        self._rows.clear()
        self.is_on = True

    def take_rows(self) -> list[StepRow]:
        self.is_on = False
        return list(self._rows)

    def add_row(self, track: str, name: str, of: object, begin: float, end: float) -> None:
        if self.is_on:
            self._rows.append(StepRow(track, name, str(of), begin, end))

    def mark(self, track: str, name: str, of: object) -> None:
        if self.is_on:
            now = self.clock()
            self._rows.append(StepRow(track, name, str(of), now, now))

    def timed(self, track: str, name: str, of: object, fn: Callable[[], R]) -> Callable[[], R]:
        """Return a closure that does the same, and is recorded to a generator's end. Off: `fn` itself."""
        if not self.is_on:
            return fn

        def run() -> R:
            begin = self.clock()
            out = fn()
            if inspect.isgenerator(out):
                return cast("R", self._to_its_end(cast("Steps", out), track, name, of, begin))
            self.add_row(track, name, of, begin, self.clock())
            return out

        return run

    def _to_its_end(
        self, steps: Steps, track: str, name: str, of: object, begin: float
    ) -> Generator[None, None, object]:
        result = yield from steps
        self.add_row(track, name, of, begin, self.clock())
        return result
