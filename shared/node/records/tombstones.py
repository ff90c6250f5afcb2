"""Remember aborted and ended requests for a time, because an abort may arrive before its request."""

from __future__ import annotations

from collections import OrderedDict

from shared.core.keys import RequestKey

ALL = -1  # a seq_index that stands for every sequence of an attempt


class Tombstones:
    """Requests that must not begin (again) before a deadline. Beyond `capacity` the oldest keys are dropped."""

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
        """All keys are kept for the same time, so the oldest expire first."""
        while self._deadlines and next(iter(self._deadlines.values())) < now:
            self._deadlines.popitem(last=False)
