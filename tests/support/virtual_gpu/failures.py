"""Lets a virtual GPU fail where a test says: as one that reads an illegal address, and as one whose memory runs out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tests.support.virtual_gpu.queues import Queues

ILLEGAL = "CUDA error: an illegal memory access was encountered"
# When it is given work, when the work runs, or a copy to the host does, when a mark is waited for, when a stream is
# taken, when one is to wait for another, when memory is asked for.
PLACES = ("launch", "kernel", "copy", "event", "stream", "wait", "memory")


@dataclass(slots=True, eq=False)
class Failure:
    place: str
    after: int
    lasts: bool


class Failures:
    """Of one device. Any thread. `met`: one of them has come."""

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._expected: list[Failure] = []
        self.met = threading.Event()

    def fail_next(self, place: str, after: int = 0, *, lasts: bool = True) -> None:
        """At one of PLACES, after so many times that all went well there. `lasts`: every later call of the device
        raises too, but for memory that runs out."""
        assert place in PLACES, place
        self._expected.append(Failure(place, after, lasts))

    def meet(self, place: str) -> None:
        """The device is there: raise, if it is to fail."""
        failure = next((one for one in self._expected if one.place == place), None)
        if failure is None:
            return
        failure.after -= 1
        if failure.after >= 0:
            return
        self._expected.remove(failure)
        self.met.set()
        if place == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory, as the test says")
        if failure.lasts:
            self._queues.fault = ValueError(ILLEGAL)
        raise torch.AcceleratorError(ILLEGAL)

    def in_work(self, run: Callable[[], None], label: str) -> Callable[[], None]:
        """`run`, which may fail when its turn comes."""
        if not self._expected:
            return run
        places = ("kernel", "copy") if label == "copy to host" else ("kernel",)

        def run_or_fail() -> None:
            for place in places:
                self.meet(place)
            run()

        return run_or_fail
