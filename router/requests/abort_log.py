"""Record when each peer last got an Abort for a request."""

from __future__ import annotations

from collections import OrderedDict

from shared.wire.messages import Key

MAX_REMEMBERED = 4096
REPEAT_S = 1.0  # after this time an Abort is repeated: a full queue may drop it, or the request may come later


class AbortLog:
    """Maps (peer, key of the first sequence) to the time of the last Abort."""

    def __init__(self) -> None:
        self._told: OrderedDict[tuple[str, Key], float] = OrderedDict()

    def remember(self, peer: str, key: Key, now: float) -> None:
        self._told[(peer, key)] = now
        self._told.move_to_end((peer, key))
        while len(self._told) > MAX_REMEMBERED:
            self._told.popitem(last=False)

    def knows(self, peer: str, key: Key) -> bool:
        return (peer, key) in self._told

    def is_due(self, peer: str, key: Key, now: float) -> bool:
        told = self._told.get((peer, key))
        return told is None or now - told >= REPEAT_S
