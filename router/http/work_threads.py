"""Run work that reads long bodies on threads.

The event loop holds queued work, because an executor's queue would keep cancelled work and its body.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

from router.http.body_budget import BodyHold
from shared.core.errors import InvalidRequest

T = TypeVar("T")
LONG_BODY_BYTES = 8_192  # longer bodies would delay streams by milliseconds
MOST_AT_ONCE = 8  # bodies that get their turn together; each takes about a millisecond of the event loop
NUM_THREADS = 4
HUGE_BODY_BYTES = 256 << 10  # a tokenizer needs hundreds of times a text's size


def too_deep() -> InvalidRequest:
    return InvalidRequest("the request body is nested too deeply")


class WorkThreads:
    """Owned by the event loop. `number`: how many threads the executor has."""

    def __init__(self, executor: Executor, number: int) -> None:
        self._executor = executor
        self._free = asyncio.Semaphore(number)

    async def run(self, work: Callable[[], T], hold: BodyHold) -> T:
        """Hold the body's bytes until the work's end, even if the caller is cancelled."""
        await self._free.acquire()
        own = hold.another()
        try:
            running = asyncio.wrap_future(self._executor.submit(work))
        except BaseException:
            self._ended(own)
            raise
        running.add_done_callback(lambda _: self._ended(own))
        running.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(running)
        except RecursionError:  # too deep for a template
            raise too_deep() from None

    def _ended(self, hold: BodyHold) -> None:
        hold.let_go()
        self._free.release()


def _retrieve(done: asyncio.Future[T]) -> None:
    """Keep asyncio from logging the error of a caller that was cancelled."""
    if not done.cancelled():
        done.exception()


class BodyWork:
    """Runs work for long bodies on threads, so that streams don't wait."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)
        self._long = _threads("body", NUM_THREADS)
        self._huge = _threads("huge-body", 1)

    async def turn(self) -> None:
        """Wait for the turn of a body that has arrived.

        Without turns, the event loop would read a thousand bodies before it comes back to nodes' messages."""
        await self._turns.acquire()
        asyncio.get_running_loop().call_soon(self._turns.release)

    async def in_time(self, raw: bytes, work: Callable[[], T], hold: BodyHold) -> T:
        if len(raw) >= LONG_BODY_BYTES:
            threads = self._huge if len(raw) > HUGE_BODY_BYTES else self._long
            return await threads.run(work, hold)
        try:
            return work()
        except RecursionError:
            raise too_deep() from None


def _threads(name: str, number: int) -> WorkThreads:
    return WorkThreads(ThreadPoolExecutor(number, thread_name_prefix=name), number)
