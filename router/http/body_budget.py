"""Limit the memory of request bodies, for all connections together and for each address."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from router.http.errors import BodiesFull

SHARE_OF_ONE = 0.75  # share of the budget that one address may use


class BodyBudget:
    """Owned by the event loop. A body's bytes count until its last `BodyHold` ends.

    `largest`: the size of the largest allowed body. One such body always fits into an empty budget.
    """

    def __init__(self, limit: int, largest: int = 0) -> None:
        self._limit = limit
        self._most_of_one = max(int(SHARE_OF_ONE * limit), min(largest, limit))
        self._of_source: Counter[str] = Counter()
        self.used = 0

    def take(self, source: str, num_bytes: int) -> None:
        """Raise BodiesFull if the bytes don't fit. `source`: the client's address."""
        if self.used + num_bytes > self._limit:
            raise BodiesFull("the server's memory for request bodies is full; try again")
        if self._of_source[source] + num_bytes > self._most_of_one:
            raise BodiesFull("the server's memory for request bodies of one address is full; try again")
        self.used += num_bytes
        self._of_source[source] += num_bytes

    def give_back(self, source: str, num_bytes: int) -> None:
        self.used -= num_bytes
        self._of_source[source] -= num_bytes
        if not self._of_source[source]:
            del self._of_source[source]


@dataclass(slots=True)
class HeldBytes:
    num_bytes: int = 0
    num_holds: int = 0


class BodyHold:
    """One holder of a body's bytes: an exchange, work on a thread, or an answer without a client. Owned by the loop."""

    def __init__(self, budget: BodyBudget | None, source: str, held: HeldBytes | None = None) -> None:
        """`held`: shared by all holds of a body; None for a new body."""
        self._budget = budget
        self._source = source
        self._held = held or HeldBytes()
        self._held.num_holds += 1
        self._is_over = False

    def take(self, num_bytes: int) -> None:
        """Raise BodiesFull if the bytes don't fit."""
        if self._budget is not None:
            self._budget.take(self._source, num_bytes)
            self._held.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Give some of the taken bytes back early."""
        if self._budget is not None:
            self._budget.give_back(self._source, num_bytes)
            self._held.num_bytes -= num_bytes

    def another(self) -> BodyHold:
        return BodyHold(self._budget, self._source, self._held)

    def let_go(self) -> None:
        """Give the bytes back if no other hold is left. Idempotent."""
        if self._is_over:
            return
        self._is_over = True
        self._held.num_holds -= 1
        if self._budget is not None and not self._held.num_holds:
            self._budget.give_back(self._source, self._held.num_bytes)
