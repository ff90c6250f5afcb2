"""Run background work, such as a display, during other work."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine


@contextlib.asynccontextmanager
async def concurrently(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Cancel `work` at the block's end, and await it."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def every(seconds: float, show: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        show()
