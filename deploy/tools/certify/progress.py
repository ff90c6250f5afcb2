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
    """`counts`: all verdicts so far, also of answers that are not computed."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = ReplayCounts()
        self._console, self._clock = console, clock
        self._status: Status | None = None
        self._begun = self._shown_at = clock()
        self._num_done, self._is_over = 0, False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Begin to count time. Print the summary at the end, also after Ctrl-C."""
        self._begun = self._shown_at = self._clock()
        with contextlib.ExitStack() as stack:
            if self._console.is_terminal:
                self._status = stack.enter_context(self._console.status("replaying"))
            stack.callback(lambda: self.tell(self.summary()))
            yield
            self._is_over = True

    def tell(self, line: str) -> None:
        """Print a line on stdout, which may be another terminal, or a file."""
        if self._status is not None:
            self._status.stop()
        print(line, flush=True)
        if self._status is not None:
            self._status.start()

    def tell_fault(self, is_equal: bool | None, line: str) -> None:
        """Count and tell an answer that is not computed."""
        self.counts.add(is_equal)
        self.tell(line)

    def pass_one(self) -> None:
        self._num_done += 1
        clock = self._clock()
        text = f"{self._num_done} replayed: {self.counts} ({self._speed(clock)})"
        if self._status is not None:
            self._status.update(text)
        elif clock - self._shown_at >= LINE_S:
            self._shown_at = clock
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def summary(self) -> str:
        clock = self._clock()
        done = "" if self._is_over else f"interrupted after {self._num_done}: "
        seconds = clock - self._begun
        return f"{done}{self.counts}: {self.counts.tokens} tokens in {seconds:.1f} s ({self._speed(clock)})"

    def _speed(self, clock: float) -> str:
        seconds = clock - self._begun
        if not seconds:
            return "at once"
        return f"{self.counts.tokens / seconds:.0f} tokens/s, {self._num_done / seconds:.3g} answers/s"
