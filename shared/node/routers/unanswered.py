"""Notice routers that don't answer, so that a wrong address is seen. Sans-IO."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shared.node.routers.dialled import DialledRouter, RouterState

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
        self._tell_at = 0.0  # the log gets no line earlier

    def look(self, links: Iterable[DialledRouter], now: float) -> Unanswered | None:
        """Return what to log now. A refused router has a line of its own."""
        late = sorted((link for link in links if _is_late(link, now)), key=lambda link: link.peer)
        if not late or now < self._tell_at:
            return None
        self._tell_at = now + TELL_AGAIN_S
        for link in late:
            link.is_reported = True
        first, since = late[0], late[0].silent_since
        assert since is not None
        return Unanswered(first.peer, round(now - since), first.state is RouterState.GREETED, len(late) - 1)


def _is_late(link: DialledRouter, now: float) -> bool:
    if link.state not in (RouterState.DIALLED, RouterState.GREETED, RouterState.RETURNING):
        link.silent_since, link.is_reported = None, False
        return False
    if link.silent_since is None:
        link.silent_since = now
    return now - max(link.silent_since, link.session.up_since) >= PATIENCE_S
