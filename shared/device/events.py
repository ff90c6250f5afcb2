"""Define events, which order work across streams, and tickets, which hold results and errors.

An event is armed before the launch of the work that fires it, so no wait can miss the event. An event only orders work:
a wait returns even after an error. Code that needs the data checks `Ticket.error`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shared.core.errors import StepFailed

R = TypeVar("R")
logger = logging.getLogger(__name__)


class StreamSkipped(StepFailed, code="stream_skipped"):
    """Raised for a closure that never ran, because its stream epoch had failed or the stream was stopped."""


class EventNotFired(StepFailed, code="event_not_fired"):
    """Raised if a closure left an armed event unfired; the stream fired the event instead."""


class EventDriver(Protocol):
    """The part of a stream backend that completes events. An event without a driver is a thread-safe flag."""

    def poll(self, event: Event) -> None:
        """Bring the event closer to completion, if possible. `query()` calls this."""
        ...

    def block(self, event: Event, timeout_s: float | None) -> None:
        """Wait for the event. Raise TimeoutError or DeadlockError."""
        ...

    def defer(self, event: Event) -> bool:
        """Return True if the driver will call `event.complete()`."""
        ...


class Event:
    """An event, armed from the start. `Stream.launch(fires=...)` names the work that will fire the event.

    `fired`: fire() was called. `query()` says whether all work before fire() is complete. On a device,
    this work may end after fire().
    """

    __slots__ = ("_callbacks", "_complete", "_driver", "_lock", "_waiter", "error", "fired", "name")

    def __init__(self, name: str = "event") -> None:
        self.name = name
        self.fired = False
        self.error: BaseException | None = None
        self._complete = False
        self._waiter: threading.Event | None = None  # made by the first waiter: most events are only queried
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Event], None]] = []
        self._driver: EventDriver | None = None

    def bind(self, driver: EventDriver) -> None:
        if self._driver is None:
            self._driver = driver

    @property
    def driver(self) -> EventDriver | None:
        return self._driver

    def fire(self, error: BaseException | None = None) -> None:
        """Any thread may fire. Later calls do nothing."""
        with self._lock:
            if self.fired:
                return
            self.fired = True
            self.error = error
        if self._driver is None or not self._driver.defer(self):
            self.complete()

    def complete(self) -> None:
        """Complete the event, and run its callbacks on this thread. Drivers call it."""
        with self._lock:
            self._complete = True
            callbacks, self._callbacks = self._callbacks, []
            if self._waiter is not None:
                self._waiter.set()
        for fn in callbacks:
            self._call(fn)

    def query(self) -> bool:
        if self._driver is not None and not self._complete:
            self._driver.poll(self)
        return self._complete

    def peek(self) -> bool:
        """Return whether the event is complete. Unlike `query`, run no step of a simulated world."""
        return self._complete

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block, but never raise the event's error."""
        if self._complete:
            return
        if self._driver is not None:
            self._driver.block(self, timeout_s)
        else:
            self.wait_flag(timeout_s)

    def wait_flag(self, timeout_s: float | None) -> None:
        """Wait for the completion. Raise TimeoutError after `timeout_s`."""
        with self._lock:
            if self._complete:
                return
            waiter = self._waiter = self._waiter or threading.Event()
        if not waiter.wait(timeout_s):
            raise TimeoutError(f"event {self.name} did not fire within {timeout_s} s")

    def add_callback(self, fn: Callable[[Event], None]) -> None:
        """Run fn, which must be short, on the completing thread, or immediately if the event is complete."""
        with self._lock:
            if not self._complete:
                self._callbacks.append(fn)
                return
        self._call(fn)

    def _call(self, fn: Callable[[Event], None]) -> None:
        try:
            fn(self)
        except Exception:  # a callback's bug must not kill the worker
            logger.exception("callback of event %s failed", self.name)

    def __repr__(self) -> str:
        state = "armed" if not self.fired else f"fired{'' if self._complete else ', pending'}"
        return f"Event({self.name}, {state}{f', {self.error!r}' if self.error else ''})"


class Ticket(Generic[R]):
    """`result` or `error` is set before `done` fires."""

    __slots__ = ("done", "error", "result")

    def __init__(self, label: str) -> None:
        self.done = Event(f"{label}.done")
        self.result: R | None = None
        self.error: BaseException | None = None

    def take(self, timeout_s: float | None = None) -> R:
        """Wait, then return the result or raise the closure's error."""
        self.done.synchronize(timeout_s)
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]  # None is a legal R
