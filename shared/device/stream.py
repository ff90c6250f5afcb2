"""The stream interface, and what every backend does with one closure. Knows nothing of steps or tensors.

work on a stream runs in launch order; across streams only events order it:

    forward |--- step 1 ---*pub|--- step 2 ---|
    copy          wait(pub) . . |- lengths -|
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from shared.device.events import Event, EventNotFired, StreamSkipped, Ticket

R = TypeVar("R")
Closure = Callable[[], R | Generator[None, None, R]]


class Stream(Protocol):
    """`epoch` rises with reset(). Owned by one host thread: launch, wait and reset are called from there only."""

    name: str

    @property
    def epoch(self) -> int: ...

    def launch(self, fn: Closure[R], fires: Sequence[Event] = (), label: str = "") -> Ticket[R]:
        """Run fn after all earlier work of this stream. fn promises to fire every event in `fires`. Where fn
        does not (it raised, was skipped, forgot), the stream fires the event with an error, before `ticket.done`.

        fn captures only what is frozen at launch. It may be a generator function: each `yield` is a preemption
        point on the simulated backend and nothing on the others. It runs in torch.inference_mode. After an exception
        later closures of the same epoch are skipped (StreamSkipped).
        """
        ...

    def wait(self, event: Event) -> None:
        """Order only: all work launched after this starts after the event fired, with or without an error."""
        ...

    def reset(self) -> None:
        """Open a new stream epoch; what was launched before the reset is still skipped if its epoch failed."""
        ...

    def stop(self) -> None:
        """Skip what has not started, wait for what has, give threads back. Idempotent."""
        ...


class StreamEpochs:
    """Which epoch a stream is in and which one failed. Written by host (open) and worker (fail), one word each."""

    def __init__(self) -> None:
        self.current = 0
        self._newest_failed = -1

    def fail(self, epoch: int) -> None:
        self._newest_failed = max(self._newest_failed, epoch)

    def has_failed(self, epoch: int) -> bool:
        return epoch <= self._newest_failed

    def open_next(self) -> None:
        self.current += 1


@dataclass(slots=True, eq=False)
class Work(Generic[R]):
    """One launched closure on its way through a stream."""

    fn: Closure[R]
    fires: tuple[Event, ...]
    ticket: Ticket[R]
    epoch: int
    label: str

    def settle(self, result: R | None, error: BaseException | None) -> None:
        """The one way out of a stream: nobody who waits on an arm or on `done` is left behind."""
        self.ticket.result = result
        self.ticket.error = error
        for event in self.fires:
            if not event.fired:
                event.fire(error or EventNotFired(f"{self.label} ended without firing {event.name}"))
        self.ticket.done.fire(error)

    def skip(self, why: str) -> None:
        self.settle(None, StreamSkipped(f"{self.label} skipped: {why}"))


def make_work(fn: Closure[R], fires: Sequence[Event], label: str, stream: str, epoch: int) -> Work[R]:
    label = label or f"{stream}:{getattr(fn, '__name__', 'closure')}"
    return Work(fn, tuple(fires), Ticket(label), epoch, label)


def run_to_end(fn: Closure[R]) -> R:
    """Call fn; drive it through all its preemption points if it is a generator."""
    out = fn()
    if not inspect.isgenerator(out):
        return cast(R, out)
    generator = cast("Generator[None, None, R]", out)
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return cast(R, end.value)


def run_work(work: Work[Any], epochs: StreamEpochs) -> None:
    """Run, or skip in a failed epoch, and settle. Raises only what is no Exception (KeyboardInterrupt)."""
    if epochs.has_failed(work.epoch):
        work.skip("its stream epoch failed")
        return
    try:
        result = run_to_end(work.fn)
    except BaseException as error:
        epochs.fail(work.epoch)
        work.settle(None, error)
        if not isinstance(error, Exception):
            raise
    else:
        work.settle(result, None)
