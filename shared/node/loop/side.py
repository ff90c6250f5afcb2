"""Define a node's side, the part in which prefill and decode nodes differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.sched.steps.events import SchedEvent
from shared.wire.messages import Generate
from shared.wire.peers import Received


class Side(Protocol):
    """All methods are called on the loop's thread."""

    def hand_over(self, generate: Generate, requests: Sequence[Request], now: float) -> Sequence[Request]:
        """Take a Generate that names a decode node. Return the requests that this node must prefill."""
        ...

    def bring_prefix(self, generate: Generate, req: Request, now: float) -> None:
        """Take a Generate whose prompt another node may have cached. `req`: the first request of this Generate."""
        ...

    def receive(self, received: Received, now: float) -> None: ...

    def event(self, event: SchedEvent, now: float) -> None:
        """Handle any event, including tokens and ends."""
        ...

    def poll(self, now: float) -> None:
        """Handle finished transfers, new grants and expired leases."""
        ...

    def abort(self, key: RequestKey) -> None:
        """Forget a request that waits outside the scheduler."""
        ...

    def peer_up(self, peer: str) -> None: ...

    def peer_closed(self, peer: str, *, accepted: bool) -> None:
        """`accepted`: the peer dialled, not this node."""
        ...

    def outside(self) -> list[Request]:
        """Return the requests that the scheduler doesn't know (yet)."""
        ...

    @property
    def holds_rows(self) -> bool:
        """Return whether copies still write rows whose requests are over. Such copies are sure to end."""
        ...

    def leave(self) -> None:
        """Release the pages that other nodes read."""
        ...

    def hands_over(self) -> dict[str, str]:
        """Return each decode node's transport, and why it was chosen."""
        ...

    @property
    def wakes_at(self) -> float:
        """Return the time at which `poll` has work without an event, or infinity."""
        ...

    def close(self) -> None: ...
