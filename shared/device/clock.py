"""Measure the time of a stream's work between two marks, which are set in stream order."""

from __future__ import annotations

import time
from typing import Protocol

from shared.device.gpu import Gpu, GpuEvent

Mark = float | GpuEvent


class Clock(Protocol):
    """Call `mark` inside a closure, and `seconds` on any thread after the stream has passed both marks."""

    def mark(self) -> Mark: ...

    def seconds(self, first: Mark, last: Mark) -> float: ...


class HostClock:
    """Measures on inline and cpu streams, where a closure's work is done when the closure returns."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, first: Mark, last: Mark) -> float:
        assert isinstance(first, float) and isinstance(last, float)
        return last - first


class CudaClock:
    """Times closures that only enqueue work, with events on the device's current stream."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def mark(self) -> Mark:
        mark = self._gpu.new_event(timing=True)
        mark.record()
        return mark

    def seconds(self, first: Mark, last: Mark) -> float:
        """Raise RuntimeError if the device has not reached both marks."""
        assert not isinstance(first, float) and not isinstance(last, float)
        return float(first.elapsed_time(last)) / 1000


class StillClock:
    """Stands still for simulated streams, whose runs must be repeatable."""

    def mark(self) -> Mark:
        return 0.0

    def seconds(self, first: Mark, last: Mark) -> float:
        return 0.0
