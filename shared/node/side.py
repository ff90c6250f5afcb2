"""The seam between a node and its side: what a prefill node and a decode node do differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.sched.events import SchedEvent
from shared.wire.messages import Generate
from shared.wire.peers import Received


class Side(Protocol):
    """What a prefill node and a decode node do differently. All calls come from `Node.tick`."""

    def hand_over(self, generate: Generate, requests: Sequence[Request], now: float) -> Sequence[Request]:
        """Take a Generate that names a decode node. Return the requests to prefill here."""
        ...

    def receive(self, received: Received, now: float) -> None:
        """A message of another node."""
        ...

    def event(self, event: SchedEvent, now: float) -> None:
        """Every event of the scheduler, tokens and ends included."""
        ...

    def poll(self, now: float) -> None:
        """Finished transfers, new grants, leases that ran out."""
        ...

    def abort(self, key: RequestKey) -> None:
        """Forget what waits outside the scheduler under this key."""
        ...

    def peer_up(self, peer: str) -> None:
        """A node that this one has dialled has answered."""
        ...

    def peer_closed(self, peer: str) -> None: ...

    def outside(self) -> list[Request]:
        """Requests that the scheduler does not know (yet)."""
        ...

    def hands_over(self) -> dict[str, str]:
        """By the name of a decode node: how its pages go there, and why so."""
        ...

    def close(self) -> None:
        """The node ends: let go of what transports hold open."""
        ...
