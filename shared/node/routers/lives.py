"""Define a router's epoch, and what a router says of its keys and its clock in that epoch."""

from __future__ import annotations

from dataclasses import dataclass

DRIFT = 0.001  # relative drift between two clocks that NTP slews by 500 ppm each


@dataclass(frozen=True, slots=True)
class RouterLife:
    """A router in one epoch. A restart changes only the epoch."""

    router_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A router's ticket key and clock, from the Welcome of one epoch."""

    key: bytes  # empty: the router sent no key, so no ticket is genuine
    ahead_s: float  # our clock minus the router's clock, plus the Welcome's transit time: an upper bound
    since: float
    clock_ms: int = 0  # the router's clock when it sent that Welcome


def local_time(session: SessionKey, deadline_ms: int, now: float) -> float:
    """Convert a router's deadline to our clock. The result may be a little late, but never early."""
    return deadline_ms / 1000 + session.ahead_s + DRIFT * (now - session.since)
