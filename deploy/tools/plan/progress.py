"""Show simulations' progress: a line redrawn at a terminal, or a line every 10 s."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich.console import Console
from rich.status import Status

from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.traffic.load_plan import LoadShape

REDRAW_S = 0.5
LINE_S = 10.0


class PlanProgress:
    def __init__(self, console: Console, status: Status | None) -> None:
        self._console, self._status = console, status
        self._begun = self._shown_at = time.monotonic()
        self._number = 0
        self._what = ""

    def begins(self, layout: ClusterLayout, load: LoadShape) -> None:
        self._number += 1
        self._what = f"simulation {self._number}: {layout}, {{:.0f}} s of about {load.duration_s:.0f}"

    def passes(self, now: float) -> None:
        """`now`: the virtual time."""
        clock = time.monotonic()
        if clock - self._shown_at < (LINE_S if self._status is None else REDRAW_S):
            return
        self._shown_at = clock
        text = f"{self._what.format(now)}, after {clock - self._begun:.0f} s"
        if self._status is not None:
            self._status.update(text)
        else:
            self._console.print(text, markup=False, highlight=False)


@contextlib.contextmanager
def watching(console: Console) -> Iterator[PlanProgress]:
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status("simulating")) if console.is_terminal else None
        yield PlanProgress(console, status)
