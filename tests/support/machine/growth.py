"""Compare the processor time of work on a small and on a large input."""

from __future__ import annotations

import time
from collections.abc import Callable

TIMES = 16
LINEAR_AT_MOST = 64  # quadratic work takes 256 times as long
NUM_TRIES = 5


def grows_linearly(work: Callable[[int], object], size: int) -> bool:
    """Whether input of 16 times the size takes less than 64 times the processor time."""
    return _least_s(work, TIMES * size) < LINEAR_AT_MOST * _least_s(work, size)


def _least_s(work: Callable[[int], object], size: int) -> float:
    return min(_seconds(work, size) for _ in range(NUM_TRIES))


def _seconds(work: Callable[[int], object], size: int) -> float:
    started = time.thread_time()
    work(size)
    return time.thread_time() - started
