"""Acts of somebody hostile, each repeated on a thread of its own, against endpoints that may change meanwhile."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MIB = 1 << 20
ACT_BYTES = 32 << 10  # what each connection counts for beside its bytes, so that a pace bounds their number, too
AWAY_S = 0.01  # after a connection that was refused


@dataclass(frozen=True, slots=True)
class Aim:
    """Whom to trouble, and how much each thread may send."""

    endpoints: Sequence[str]
    bytes_per_s: float = float("inf")


class Hammer:
    """`sent_bytes` and `counts` say what it did. `stop` ends its threads; what one of them raised is raised there."""

    def __init__(self, aim: Aim, acts: Sequence[Callable[[str], None]]) -> None:
        self.counts: Counter[str] = Counter()
        self.sent_bytes = 0
        self._aim = aim
        self._error: BaseException | None = None
        self._own = threading.local()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._repeat, args=(act,), daemon=True) for act in acts]
        for thread in self._threads:
            thread.start()

    @property
    def has_stopped(self) -> bool:
        return self._stopping.is_set() or self._error is not None

    def aim(self, aim: Aim) -> None:
        """Threads turn to the others as soon as their act has ended; long ones look whether they still mean this."""
        self._aim = aim

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error

    def _repeat(self, act: Callable[[str], None]) -> None:
        turn = 0
        while not self._stopping.is_set():
            endpoints = self._aim.endpoints
            try:
                self.spend(ACT_BYTES)
                act(endpoints[turn % len(endpoints)])
            except OSError:
                self.counts["turned away"] += 1
                self.pause(AWAY_S)
            except BaseException as error:
                self._error = error
                return
            turn += 1

    # ---- for acts

    def is_meant(self, endpoint: str) -> bool:
        return not self._stopping.is_set() and endpoint in self._aim.endpoints

    def pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    def spend(self, num_bytes: int) -> None:
        """Wait until this thread may send so much."""
        now = time.monotonic()
        due = max(getattr(self._own, "due", now), now) + num_bytes / self._aim.bytes_per_s
        self._own.due = due
        self.sent_bytes += num_bytes
        if due > now:
            self._stopping.wait(due - now)
