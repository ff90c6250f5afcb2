"""Keeps requests away from a node that keeps failing, and lets one through now and then to see. Sans-IO.

Only the node's own faults count (its errors, a refused send): never a 4xx and never a client that hangs up.

    closed --max_faults in a row--> open --open_s passed--> half open --one probe--> closed, or open again
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_OPEN_S = 60.0


@dataclass(slots=True)
class Breaker:
    """One per node. `now` is a monotonic clock in seconds."""

    max_faults: int = 3
    open_s: float = 2.0

    _faults: int = 0
    _open_until: float | None = None  # None: closed
    _times_opened: int = 0
    _probing: bool = False

    def allows(self, now: float) -> bool:
        """Whether a request may go there. Half open: one at a time."""
        if self._open_until is None:
            return True
        return now >= self._open_until and not self._probing

    def sent(self) -> None:
        """A request went there; in the half-open state it is the probe."""
        self._probing = self._open_until is not None

    def succeeded(self) -> None:
        self._faults = 0
        self._times_opened = 0
        self._open_until = None
        self._probing = False

    def failed(self, now: float) -> None:
        self._faults += 1
        if self._open_until is not None or self._faults >= self.max_faults:
            # each failed probe doubles the wait
            self._open_until = now + min(self.open_s * 2**self._times_opened, MAX_OPEN_S)
            self._times_opened += 1
        self._probing = False

    def abandoned(self) -> None:
        """The probe ended without a verdict (its client hung up): another one may go."""
        self._probing = False
