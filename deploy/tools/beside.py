"""Run background work during other work, such as a display during a load test."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine


@contextlib.asynccontextmanager
async def beside(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run `work` during the `with` block, then cancel it and wait for its end."""
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
