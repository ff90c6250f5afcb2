"""What a person at a terminal sees while a run lasts: one line, redrawn. Nobody else sees anything."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from rich.console import Console

from deploy.tools.generate.tally import Tally, progress_text

REDRAW_S = 0.5


@contextlib.asynccontextmanager
async def shown(tally: Tally, console: Console, *, quiet: bool) -> AsyncIterator[None]:
    """Show the tally while the body lasts."""
    if quiet or not console.is_terminal:
        yield
        return
    task = asyncio.create_task(redraw(tally, console))
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def redraw(tally: Tally, console: Console) -> None:
    begun = time.monotonic()
    with console.status(progress_text(tally, 0.0)) as status:
        while True:
            await asyncio.sleep(REDRAW_S)
            status.update(progress_text(tally, time.monotonic() - begun))
