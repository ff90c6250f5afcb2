"""Limit the memory of request bodies, for all connections together and for each address."""

from __future__ import annotations

from collections import Counter

from router.api.errors import BodiesFull

SHARE_OF_ONE = 0.75  # share of the budget that one address may use


class BodyBudget:
    """Owned by the event loop. A body's bytes count until the body is parsed or the request ends.

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
