"""Clocks that a stream's work reads: marks in stream order, and the seconds between two of them once both are reached.
Knows nothing of what is timed."""

from __future__ import annotations

import time
from typing import Protocol

from shared.device.gpu import Gpu, GpuEvent

Mark = float | GpuEvent


class Clock(Protocol):
    """`mark` is called inside a closure; `seconds` after the stream has passed both marks, on any thread."""

    def mark(self) -> Mark: ...

    def seconds(self, first: Mark, last: Mark) -> float: ...


class HostClock:
    """For streams whose work is done when the closure is: inline and cpu."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, first: Mark, last: Mark) -> float:
        assert isinstance(first, float) and isinstance(last, float)
        return last - first


class CudaClock:
    """For closures that only enqueue: an event of the device, recorded on the current stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def mark(self) -> Mark:
        mark = self._gpu.new_event(timing=True)
        mark.record()
        return mark

    def seconds(self, first: Mark, last: Mark) -> float:
        """RuntimeError when the device has not reached both."""
        assert not isinstance(first, float) and not isinstance(last, float)
        return float(first.elapsed_time(last)) / 1000


class StillClock:
    """For simulated streams, whose runs must be the same again: no time passes."""

    def mark(self) -> Mark:
        return 0.0

    def seconds(self, first: Mark, last: Mark) -> float:
        return 0.0
