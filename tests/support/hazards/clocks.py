"""Vector clocks of streams and host: what has surely happened before what. Knows nothing of tensors or pages.

    launch order on a stream, host -> launched closure, fire -> wait, fire -> host synchronize() or a true query()

Two accesses that no chain of these edges orders are a race, however the run at hand happened to interleave them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from shared.device.events import Event

MAX_ACTORS = 16
HOST = 0
Clock = list[int]


class Clocks:
    """One vector per actor; actor 0 is the host thread, the others are streams in the order of their naming."""

    def __init__(self) -> None:
        self.names = ["host"]
        self._vectors: list[Clock] = [[0] * MAX_ACTORS for _ in range(MAX_ACTORS)]
        for actor, vector in enumerate(self._vectors):
            vector[actor] = 1

    def add(self, name: str) -> int:
        if len(self.names) == MAX_ACTORS:
            raise ValueError(f"more than {MAX_ACTORS} actors")
        self.names.append(name)
        return len(self.names) - 1

    def of(self, actor: int) -> Clock:
        return self._vectors[actor]

    def release(self, actor: int) -> Clock:
        """Return the actor's clock as a mark, then advance the clock. Who sees the mark knows all before it."""
        mark = self._vectors[actor].copy()
        self._vectors[actor][actor] += 1
        return mark

    def acquire(self, actor: int, mark: Clock | None) -> None:
        if mark is not None:
            self._vectors[actor] = [max(mine, seen) for mine, seen in zip(self._vectors[actor], mark, strict=True)]


@dataclass(slots=True, eq=False)
class Launch:
    """One closure on its way through a stream. `facts`: what the host knew of rows and pages when it launched it."""

    actor: int
    stream: str
    label: str
    mark: Clock  # the host's, at launch
    waits: list[Event]
    previous: Launch | None
    facts: dict[str, Any] = field(default_factory=dict)
    started: bool = False
    end: Clock | None = None
    allowed: set[str] = field(default_factory=set)  # buffers an accessor handed out to this closure by reference

    def edges(self) -> tuple[list[Clock], list[Event]]:
        """Return the marks and events before the start of this closure, with those of skipped closures before it."""
        marks, waits, launch = [self.mark], list(self.waits), self.previous
        while launch is not None and not launch.started:
            marks.append(launch.mark)
            waits.extend(launch.waits)
            launch = launch.previous
        return marks, waits

    def end_mark(self) -> Clock | None:
        """Return the clock at its end, or for a skipped closure the end of the last one before it that ran."""
        launch: Launch | None = self
        while launch is not None and launch.end is None:
            if launch.started:
                return None  # still running
            launch = launch.previous
        return launch.end if launch is not None else None
