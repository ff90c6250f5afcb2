"""Tell verdicts on stdout and, on stderr, how far a replay is: a line redrawn at a terminal, else one every LINE_S."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status

EXIT_DIFFERENT, EXIT_UNTOLD = 1, 2
LINE_S = 10.0


@dataclass(slots=True)
class ReplayCounts:
    equal: int = 0
    different: int = 0
    untold: int = 0
    tokens: int = 0

    def add(self, is_equal: bool | None) -> None:
        self.equal += is_equal is True
        self.different += is_equal is False
        self.untold += is_equal is None

    @property
    def exit_code(self) -> int:
        return EXIT_DIFFERENT if self.different else EXIT_UNTOLD if self.untold else 0

    def __str__(self) -> str:
        return f"{self.equal} equal, {self.different} different, {self.untold} not computed"


class ReplayProgress:
    """`counts`: all verdicts so far; `total`: the answers to compute."""

    def __init__(
        self,
        counts: ReplayCounts,
        total: int,
        console: Console,
        status: Status | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts, self._total = counts, total
        self._console, self._status, self._clock = console, status, clock
        self._begun = self._shown_at = clock()
        self._num_done = 0

    def tell(self, line: str) -> None:
        """Print a line on stdout, which may be another terminal, or a file."""
        if self._status is not None:
            self._status.stop()
        print(line, flush=True)
        if self._status is not None:
            self._status.start()

    def pass_one(self) -> None:
        self._num_done += 1
        clock = self._clock()
        text = f"{self._num_done} of {self._total} replayed: {self._counts} ({self._speed(clock)})"
        if self._status is not None:
            self._status.update(text)
        elif clock - self._shown_at >= LINE_S:
            self._shown_at = clock
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def summary(self) -> str:
        clock = self._clock()
        done = "" if self._num_done == self._total else f"interrupted after {self._num_done} of {self._total}: "
        seconds = clock - self._begun
        return f"{done}{self._counts}: {self._counts.tokens} tokens in {seconds:.1f} s ({self._speed(clock)})"

    def _speed(self, clock: float) -> str:
        seconds = clock - self._begun
        if not seconds:
            return "at once"
        return f"{self._counts.tokens / seconds:.0f} tokens/s, {self._num_done / seconds:.3g} answers/s"


@contextlib.contextmanager
def watching(counts: ReplayCounts, total: int) -> Iterator[ReplayProgress]:
    """Print the summary at the end, also after Ctrl-C."""
    console = Console(stderr=True)
    with contextlib.ExitStack() as stack:
        status = stack.enter_context(console.status("replaying")) if console.is_terminal else None
        progress = ReplayProgress(counts, total, console, status)
        stack.callback(lambda: progress.tell(progress.summary()))
        yield progress
