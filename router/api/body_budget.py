"""What request bodies may take together, all connections counted."""

from __future__ import annotations

from router.api.errors import BodiesFull


class BodyBudget:
    """Owned by the event loop's thread. Bytes count from their arrival until the request is parsed, or has ended."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0

    def take(self, num_bytes: int) -> None:
        """Raise BodiesFull where they do not fit."""
        if self.used + num_bytes > self._limit:
            raise BodiesFull("the server holds as many request bodies as it may; try again")
        self.used += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self.used -= num_bytes
