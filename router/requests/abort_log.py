"""Record when each peer last got an Abort for a request."""

from __future__ import annotations

from collections import OrderedDict

from shared.wire.messages import Key

MAX_REMEMBERED = 4096
REPEAT_S = 1.0  # after this time an Abort is repeated: a full queue may drop it, or the request may come later


class AbortLog:
    """Maps (peer, key of the first sequence) to the time of the last Abort."""

    def __init__(self) -> None:
        self._sent: OrderedDict[tuple[str, Key], float] = OrderedDict()

    def remember(self, peer: str, key: Key, now: float) -> None:
        self._sent[(peer, key)] = now
        self._sent.move_to_end((peer, key))
        while len(self._sent) > MAX_REMEMBERED:
            self._sent.popitem(last=False)

    def knows(self, peer: str, key: Key) -> bool:
        return (peer, key) in self._sent

    def is_due(self, peer: str, key: Key, now: float) -> bool:
        sent_at = self._sent.get((peer, key))
        return sent_at is None or now - sent_at >= REPEAT_S
