"""Check grammars on a thread, off the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from shared.core.errors import InvalidRequest, Overloaded
from shared.grammar.big_stack import one_thread

T = TypeVar("T")
MOST_WAITING = 64


def too_deep() -> InvalidRequest:
    return InvalidRequest("the request body is nested too deeply")


class CheckThread:
    """Owned by the handlers. Checks one request at a time. llguidance limits the time of each check."""

    def __init__(self) -> None:
        self._thread = one_thread("check")
        self._waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Raise Overloaded if too many callers wait."""
        if self._waiting >= MOST_WAITING:
            raise Overloaded("too many requests with grammars or tools wait to be checked; try again")
        self._waiting += 1
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except RecursionError:
            raise too_deep() from None
        finally:
            self._waiting -= 1
