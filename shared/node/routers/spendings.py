"""Pass on Spendings (a router's charges to its tenants) to the other routers, without reading them. Sans-IO.

    router A --Spending 7--> latest of A: 7 --next heartbeat--> routers B and C
    A's epoch ends: the message is forgotten

Memory is bounded: the node keeps the latest message of at most MOST_ROUTERS routers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shared.node.routers.dialled import DialledRouter
from shared.node.routers.lives import RouterLife
from shared.wire.messages import Spending

MOST_ROUTERS = 16


class Spendings:
    """Owned by the node."""

    def __init__(self) -> None:
        self._latest: dict[RouterLife, Spending] = {}

    def take_spending(self, message: Spending) -> None:
        life = RouterLife(message.router_id, message.router_epoch)
        known = self._latest.get(life)
        if known is None and len(self._latest) >= MOST_ROUTERS:
            return
        if known is None or message.number > known.number:
            self._latest[life] = message

    def news(self, links: Sequence[DialledRouter]) -> Iterator[tuple[str, Spending]]:
        """Forget unserved routers. Yield the messages that each served router lacks."""
        served = {link.life for link in links}
        self._latest = {life: message for life, message in self._latest.items() if life in served}
        for link in links:
            sent = link.session.spendings
            for life, message in self._latest.items():
                if life != link.life and sent.get(life, -1) < message.number:
                    sent[life] = message.number
                    yield link.peer, message
