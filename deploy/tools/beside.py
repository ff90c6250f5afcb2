"""Something that goes on while something else lasts: what a person is shown during a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine


@contextlib.asynccontextmanager
async def beside(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run the work while the body lasts; then cancel it, and wait until it has ended."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def every(seconds: float, show: Callable[[], None]) -> None:
    """Call `show` again and again, after a pause each time."""
    while True:
        await asyncio.sleep(seconds)
        show()
