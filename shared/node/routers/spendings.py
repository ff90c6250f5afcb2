"""Pass on Spendings (a router's charges to its tenants) to the other routers, without reading them. Sans-IO.

    router A --Spending 7--> latest of A: 7 --next heartbeat--> routers B and C
    A's epoch ends: the message is forgotten

Memory is bounded: the node keeps the latest message of at most MOST_ROUTERS routers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shared.node.routers.lives import RouterLife
from shared.wire.messages import Spending

MOST_ROUTERS = 16


class Spendings:
    """Owned by the node."""

    def __init__(self) -> None:
        self._latest: dict[RouterLife, Spending] = {}
        self._told: dict[str, dict[RouterLife, int]] = {}  # peer -> router's epoch -> newest number sent to the peer

    def take(self, message: Spending) -> None:
        life = RouterLife(message.router_id, message.router_epoch)
        known = self._latest.get(life)
        if known is None and len(self._latest) >= MOST_ROUTERS:
            return
        if known is None or message.number > known.number:
            self._latest[life] = message

    def news(self, lives: Mapping[str, RouterLife]) -> Iterator[tuple[str, Spending]]:
        """Forget unserved routers. Yield the messages that each served router lacks."""
        served = set(lives.values())
        self._latest = {life: message for life, message in self._latest.items() if life in served}
        self._told = {peer: self._told.get(peer, {}) for peer in lives}
        for peer, own in lives.items():
            told = self._told[peer]
            for life, message in self._latest.items():
                if life != own and told.get(life, -1) < message.number:
                    told[life] = message.number
                    yield peer, message
