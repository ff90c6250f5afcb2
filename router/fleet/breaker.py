"""Keep requests away from a failing node, except for occasional probes. Sans-IO.

Only the node's faults count: errors and refused sends. A 4xx or a client that hangs up does not count.

    closed --max_faults in a row--> open --open_s passed--> half open --one probe--> closed, or open again
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_OPEN_S = 60.0
MAX_DOUBLINGS = 10  # after 10 doublings, any wait has reached MAX_OPEN_S


@dataclass(slots=True)
class Breaker:
    """Each node and each broken pair has a breaker. `now` is a monotonic clock in seconds."""

    max_faults: int = 3
    open_s: float = 2.0

    _faults: int = 0
    _open_until: float | None = None
    _times_opened: int = 0
    _probing: bool = False

    def allows(self, now: float) -> bool:
        """Return whether a request may be sent. A half-open breaker allows one request at a time."""
        if self._open_until is None:
            return True
        return now >= self._open_until and not self._probing

    def sent(self) -> None:
        self._probing = self._open_until is not None

    def succeeded(self) -> None:
        self._faults = 0
        self._times_opened = 0
        self._open_until = None
        self._probing = False

    def failed(self, now: float) -> None:
        """Record a fault. Each fault after a wait doubles the next wait.

        Faults during a wait change nothing, because most of the failed requests were sent before the wait."""
        self._faults += 1
        self._probing = False
        is_due = self._faults >= self.max_faults if self._open_until is None else now >= self._open_until
        if is_due:
            self._open_until = now + min(self.open_s * 2 ** min(self._times_opened, MAX_DOUBLINGS), MAX_OPEN_S)
            self._times_opened += 1

    def abandoned(self) -> None:
        self._probing = False
