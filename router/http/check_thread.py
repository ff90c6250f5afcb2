"""Check grammars on a thread, off the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from router.http.body_budget import BodyHold
from router.http.work_threads import WorkThreads
from shared.core.errors import Overloaded
from shared.grammar.big_stack import one_thread

T = TypeVar("T")
MOST_WAITING = 64


class CheckThread:
    """Owned by the handlers. Checks one request at a time. llguidance limits the time of each check."""

    def __init__(self) -> None:
        self._thread = WorkThreads(one_thread("check"), 1)
        self._waiting = 0

    async def run(self, work: Callable[[], T], hold: BodyHold) -> T:
        """Raise Overloaded if too many callers wait."""
        if self._waiting >= MOST_WAITING:
            raise Overloaded("too many requests with grammars or tools wait to be checked; try again")
        self._waiting += 1
        try:
            return await self._thread.run(work, hold)
        finally:
            self._waiting -= 1
