"""Show a line of progress, if the output is a terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator

from rich.console import Console

from deploy.tools.beside import beside, every
from deploy.tools.generate.tally import Tally, progress_text

REDRAW_S = 0.5


@contextlib.asynccontextmanager
async def shown(tally: Tally, console: Console, *, quiet: bool) -> AsyncIterator[None]:
    if quiet or not console.is_terminal:
        yield
        return
    async with beside(redraw(tally, console)):
        yield


async def redraw(tally: Tally, console: Console) -> None:
    begun = time.monotonic()
    with console.status(progress_text(tally, 0.0)) as status:
        await every(REDRAW_S, lambda: status.update(progress_text(tally, time.monotonic() - begun)))
