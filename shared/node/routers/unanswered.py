"""Notice routers that don't answer, so that a wrong address is seen. Sans-IO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

PATIENCE_S = 5.0
TELL_AGAIN_S = 60.0


class Unanswered(NamedTuple):
    """One router that doesn't answer, and the number of others."""

    router: str
    for_s: int
    is_connected: bool
    num_others: int


class UnansweredRouters:
    """Owned by Membership. A router that has just connected gets PATIENCE_S once more."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}  # router -> since when it has not served the node
        self._up_since: dict[str, float] = {}  # connected router -> since when
        self._told: set[str] = set()
        self._tell_at = 0.0  # the log is told no earlier

    def up(self, peer: str, now: float) -> None:
        self._up_since[peer] = now

    def closed(self, peer: str) -> None:
        self._up_since.pop(peer, None)

    def look(self, unserved: Sequence[str], now: float) -> Unanswered | None:
        """Return what to log now. `unserved`: listed routers that don't serve the node."""
        self._since = {peer: self._since.get(peer, now) for peer in sorted(unserved)}
        self._told.intersection_update(self._since)
        late = [peer for peer, since in self._since.items() if now - self._begin(peer, since) >= PATIENCE_S]
        if not late or now < self._tell_at:
            return None
        self._tell_at = now + TELL_AGAIN_S
        self._told.update(late)
        first = late[0]
        return Unanswered(first, round(now - self._since[first]), first in self._up_since, len(late) - 1)

    def _begin(self, peer: str, since: float) -> float:
        return max(since, self._up_since.get(peer, since))

    def answers(self, peer: str) -> bool:
        """Return whether the log still says that this router doesn't answer."""
        is_told = peer in self._told
        self._told.discard(peer)
        return is_told
