"""Aborts that may overtake the message they abort. Bounded in number and in time; knows nothing of requests."""

from __future__ import annotations

from collections import OrderedDict

from shared.core.keys import RequestKey

ALL = -1  # seq_index that stands for every sequence of an attempt


class Tombstones:
    """Keys that must not begin (again), until their deadline. The oldest go first when there are too many."""

    def __init__(self, ttl_s: float, capacity: int = 8192) -> None:
        self._ttl_s = ttl_s
        self._capacity = capacity
        self._deadlines: OrderedDict[RequestKey, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._deadlines)

    def bury(self, key: RequestKey, now: float, all_sequences: bool = False) -> None:
        key = key.sibling(ALL) if all_sequences else key
        self._deadlines[key] = now + self._ttl_s
        self._deadlines.move_to_end(key)
        while len(self._deadlines) > self._capacity:
            self._deadlines.popitem(last=False)

    def covers(self, key: RequestKey) -> bool:
        return key in self._deadlines or key.sibling(ALL) in self._deadlines

    def expire(self, now: float) -> None:
        """All live equally long, so the oldest are at the front."""
        while self._deadlines and next(iter(self._deadlines.values())) < now:
            self._deadlines.popitem(last=False)
