"""A thread for the requests whose grammar is to be checked: the event loop serves all others meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from shared.core.errors import InvalidRequest, Overloaded
from shared.grammar.big_stack import one_thread

T = TypeVar("T")
MOST_WAITING = 64


def too_deep() -> InvalidRequest:
    """What JSON can hold may be too deep for a template or a schema."""
    return InvalidRequest("the request body is nested too deeply")


class CheckThread:
    """Owned by the handlers. One at a time: llguidance bounds what a single grammar takes."""

    def __init__(self) -> None:
        self._thread = one_thread("check")
        self._waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """Return what `work` returns. Raise Overloaded where too many wait; who is cancelled waits no more."""
        if self._waiting >= MOST_WAITING:
            raise Overloaded("too many requests with grammars or tools wait to be checked; try again")
        self._waiting += 1
        try:
            return await asyncio.wrap_future(self._thread.submit(work))
        except RecursionError:
            raise too_deep() from None
        finally:
            self._waiting -= 1
