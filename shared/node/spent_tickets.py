"""Remember which tickets were used, so that each ticket opens one thing."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")

MAX_SPENT = 1 << 16
KEPT_LONGER_S = 60.0  # time from a used ticket's deadline until it is forgotten: a later Welcome may move the deadline


class SpentTickets(Generic[K]):
    """The newest MAX_SPENT used tickets. K: what a ticket is used for."""

    def __init__(self) -> None:
        self._kept_until: OrderedDict[K, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept_until)

    def __contains__(self, use: K) -> bool:
        return use in self._kept_until

    def spend(self, use: K, deadline: float, now: float) -> None:
        """`deadline`: the ticket's own, on the node's clock; nothing that its holder says may shorten it."""
        kept = self._kept_until
        while kept and (len(kept) >= MAX_SPENT or next(iter(kept.values())) < now):
            kept.popitem(last=False)
        kept[use] = deadline + KEPT_LONGER_S
