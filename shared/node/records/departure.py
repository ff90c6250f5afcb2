"""Say how a node that takes no new requests comes to its end: by a router's Drain, by a signal, or by both."""

from __future__ import annotations

from dataclasses import dataclass

INFINITY = float("inf")


@dataclass(frozen=True, slots=True)
class Departure:
    """All times are on the node's clock. The defaults say what holds without a Drain, or without a signal."""

    then: str = ""  # by a Drain: the next step once the node is idle; empty: wait
    move_at: float | None = None  # by a Drain: when routers move their unfinished requests; None: never
    until: float = INFINITY  # by a signal: the node ends once it is idle, and at this time at the latest

    @property
    def is_signalled(self) -> bool:
        return self.until < INFINITY

    def is_over(self, now: float, *, is_idle: bool) -> bool:
        """Return whether the node's process may end."""
        return now >= self.until or is_idle and (self.is_signalled or bool(self.then))

    def move_after_ms(self, now: float) -> int | None:
        """Return the time until routers move their unfinished requests; None: never."""
        return None if self.move_at is None else max(0, round(1000 * (self.move_at - now)))
