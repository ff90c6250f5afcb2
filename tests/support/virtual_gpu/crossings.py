"""Counts what goes between host and virtual device, with the line of the project that asked for it.

syncs          the host waited and did not say so: .item(), .cpu(), nonzero, a copy into pageable memory
h2d_pageable   a copy out of pageable host memory, which stops host and stream on a real device
h2d_async, d2h_async   copies from and into pinned memory, which stop nobody
waits          the host waited and said so: synchronize() of an event, a stream, the device
data_ptrs      somebody asked for a tensor's address
undeferred     (deferring) a result's shape could not be told ahead, so the stream was drained: a gap of the tool
captured, replays   launches that went into a graph, and replays of graphs; what these launch is not counted again
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[3])
OWN = str(Path(__file__).resolve().parent)


@dataclass
class Counts:
    """`by_place`: how often, by "kind file:line operation", the file as seen from the project's root. `by_thread`: by
    "kind thread", launches included."""

    syncs: int = 0
    h2d_async: int = 0
    h2d_pageable: int = 0
    d2h_async: int = 0
    waits: int = 0
    data_ptrs: int = 0
    undeferred: int = 0
    launches: int = 0
    captured: int = 0
    replays: int = 0
    by_place: Counter[str] = field(default_factory=Counter)
    by_thread: Counter[str] = field(default_factory=Counter)

    def told(self) -> str:
        """One line, for whoever reads a test's output."""
        threads = [f"{name} {count}" for name, count in self.by_thread.items() if name.startswith("syncs")]
        ways = f"{self.syncs} syncs {threads}, {self.h2d_async} H2D, {self.d2h_async} D2H, {self.h2d_pageable} pageable"
        return f"{ways}; {self.by_place.most_common(6)}"


class Crossings:
    """Of one device, from all threads, for those who listen. `guard`: hears of each first, and may refuse it."""

    def __init__(self, guard: Callable[[str, str], None]) -> None:
        self._guard = guard
        self._listeners: list[Counts] = []
        self._lock = threading.Lock()

    @contextmanager
    def counting(self) -> Iterator[Counts]:
        counts = Counts()
        with self._lock:
            self._listeners = [*self._listeners, counts]
        try:
            yield counts
        finally:
            with self._lock:
                self._listeners = [other for other in self._listeners if other is not counts]

    def note(self, kind: str, operation: str) -> None:
        """`kind`: a field of Counts. Launches, and captured ones, have no place: there are too many."""
        self._guard(kind, operation)
        listeners = self._listeners
        if not listeners:
            return
        where = "" if kind in ("launches", "captured") else f"{kind} {place()} {operation}"
        with self._lock:
            for counts in listeners:
                setattr(counts, kind, getattr(counts, kind) + 1)
                counts.by_thread[f"{kind} {threading.current_thread().name}"] += 1
                if where:
                    counts.by_place[where] += 1


@cache
def in_project(filename: str) -> bool:
    """Whether a line of it is to blame: no library, and not the virtual device itself."""
    return filename.startswith(ROOT) and not filename.startswith(OWN) and "site-packages" not in filename


def place() -> str:
    """`file:line` of the innermost frame inside the project."""
    frame = sys._getframe(1)
    while frame is not None:
        if in_project(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename[len(ROOT) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?:0"
