"""Remember which tickets were used, so that each ticket opens one thing."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)

MAX_SPENT = 1 << 16
KEPT_LONGER_S = 60.0  # time from a used ticket's deadline until it is forgotten: a later Welcome may move the deadline


class SpentTickets(Generic[K]):
    """The newest MAX_SPENT used tickets, by their hashes: they take 9 MB. K: what a ticket is used for."""

    def __init__(self) -> None:
        self._hashes: set[int] = set()
        self._in_order: deque[int] = deque()
        self._kept_until: deque[float] = deque()  # of each in `_in_order`

    def __len__(self) -> int:
        return len(self._in_order)

    def __contains__(self, use: K) -> bool:
        return hash(use) in self._hashes

    def spend(self, use: K, deadline: float, now: float) -> None:
        """`deadline`: the ticket's own, on the node's clock; nothing that its holder says may shorten it."""
        while self._kept_until and (len(self) >= MAX_SPENT or self._kept_until[0] < now):
            self._kept_until.popleft()
            self._hashes.discard(self._in_order.popleft())
        use_hash = hash(use)
        self._hashes.add(use_hash)
        self._in_order.append(use_hash)
        self._kept_until.append(deadline + KEPT_LONGER_S)
