"""Define the stream interface, and the code that backends share to run a closure.

Work on a stream runs in launch order. Only events order work across streams:

    forward |--- step 1 ---*pub|--- step 2 ---|
    copy          wait(pub) . . |- lengths -|
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from shared.device.events import Event, EventNotFired, StreamSkipped, Ticket

R = TypeVar("R")
Closure = Callable[[], R | Generator[None, None, R]]


class Stream(Protocol):
    """Only the host thread that owns the stream calls launch, wait and reset. reset() opens the next epoch."""

    name: str

    def launch(self, fn: Closure[R], fires: Sequence[Event] = (), label: str = "") -> Ticket[R]:
        """Run fn after all earlier work of this stream.

        fn must fire every event in `fires`. The stream fires an unfired event with an error, before `ticket.done`.

        fn captures only values that are frozen at launch, and runs in torch.inference_mode. A generator function's
        yields are preemption points on the simulated backend. After an exception, later closures of the epoch are
        skipped (StreamSkipped).
        """
        ...

    def wait(self, event: Event) -> None:
        """Hold back later launches until the event has fired, with or without an error."""
        ...

    def reset(self) -> None:
        """Open a new stream epoch. Earlier launches of a failed epoch are still skipped."""
        ...

    def stop(self) -> None:
        """Skip work that has not started, wait for started work, and end the threads. Idempotent."""
        ...


class StreamEpochs:
    """The host opens the current epoch. The worker records the newest failed epoch."""

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
    fn: Closure[R]
    fires: tuple[Event, ...]
    ticket: Ticket[R]
    epoch: int
    label: str

    def settle(self, result: R | None, error: BaseException | None) -> None:
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
    """Run the work, or skip it if its epoch failed. Raise only BaseExceptions like KeyboardInterrupt."""
    run_unsettled(work, epochs)()
    error = work.ticket.error
    if error is not None and not isinstance(error, Exception):
        raise error


def run_unsettled(work: Work[Any], epochs: StreamEpochs) -> Callable[[], None]:
    """Run or skip the work. Return what settles it. Raise nothing."""
    if epochs.has_failed(work.epoch):
        return functools.partial(work.skip, "its stream epoch failed")
    try:
        result = run_to_end(work.fn)
    except BaseException as error:
        epochs.fail(work.epoch)
        return functools.partial(work.settle, None, error)
    return functools.partial(work.settle, result, None)
