"""Events, tickets and the errors that travel with them. Knows nothing of what the work computes.

An event is made and armed before the work that fires it is launched, so that a wait can never slip past it. It fires
once; the first fire wins. An event orders, it does not judge: waiting on one that fired with an error just returns,
and whoever needs the data looks at `Ticket.error`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from shared.core.errors import StepFailed

R = TypeVar("R")
logger = logging.getLogger(__name__)


class StreamSkipped(StepFailed):
    """The closure never ran: an earlier one of the same stream epoch failed, or the stream was stopped."""

    code = "stream_skipped"


class EventNotFired(StepFailed):
    """A closure ended without firing an event it was armed with; the stream fired it in its place."""

    code = "event_not_fired"


class EventDriver(Protocol):
    """What a stream backend puts behind its events; without one an event is a plain thread-safe flag."""

    def poll(self, event: Event) -> None:
        """The host asks `event.query()`."""
        ...

    def block(self, event: Event, timeout_s: float | None) -> None:
        """The host waits; returns when the event has completed, raises TimeoutError or DeadlockError."""
        ...

    def defer(self, event: Event) -> bool:
        """`event.fire()` was called. True: the driver calls `event.complete()` itself, once the device got there."""
        ...


class Event:
    """An event is armed from the moment it is made; `Stream.launch(fires=...)` says which work will fire it.

    `fired`: fire() was called; `query()`: all work before the fire is complete (a device lags).
    """

    __slots__ = ("_callbacks", "_complete", "_driver", "_lock", "_waiter", "error", "fired", "name")

    def __init__(self, name: str = "event") -> None:
        self.name = name
        self.fired = False
        self.error: BaseException | None = None
        self._complete = False
        self._waiter: threading.Event | None = None  # made by the first who blocks: most events are only asked
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Event], None]] = []
        self._driver: EventDriver | None = None

    def bind(self, driver: EventDriver) -> None:
        """Called by the stream that the event is armed on; the first driver stays."""
        if self._driver is None:
            self._driver = driver

    @property
    def driver(self) -> EventDriver | None:
        return self._driver

    def fire(self, error: BaseException | None = None) -> None:
        """Any thread. Only the first call counts."""
        with self._lock:
            if self.fired:
                return
            self.fired = True
            self.error = error
        if self._driver is None or not self._driver.defer(self):
            self.complete()

    def complete(self) -> None:
        """For drivers: what was before the fire is done. Runs the callbacks on this thread."""
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
        """Like query(), but never lets a simulated world move."""
        return self._complete

    def synchronize(self, timeout_s: float | None = None) -> None:
        """Block the calling thread until complete. Does not raise the event's error: an event only orders."""
        if self._complete:
            return
        if self._driver is not None:
            self._driver.block(self, timeout_s)
        else:
            self.wait_flag(timeout_s)

    def wait_flag(self, timeout_s: float | None) -> None:
        """The plain thread-safe wait, for drivers too."""
        with self._lock:
            if self._complete:
                return
            waiter = self._waiter = self._waiter or threading.Event()
        if not waiter.wait(timeout_s):
            raise TimeoutError(f"event {self.name} did not fire within {timeout_s} s")

    def add_callback(self, fn: Callable[[Event], None]) -> None:
        """Run fn once complete, on the completing thread; at once if it already is. fn must be short."""
        with self._lock:
            if not self._complete:
                self._callbacks.append(fn)
                return
        self._call(fn)

    def _call(self, fn: Callable[[Event], None]) -> None:
        try:
            fn(self)
        except Exception:  # a callback's bug must not kill the worker that completes everybody else's events
            logger.exception("callback of event %s failed", self.name)

    def __repr__(self) -> str:
        state = "armed" if not self.fired else f"fired{'' if self._complete else ', pending'}"
        return f"Event({self.name}, {state}{f', {self.error!r}' if self.error else ''})"


class Ticket(Generic[R]):
    """One launched closure. `result` or `error` is set before `done` fires."""

    __slots__ = ("done", "error", "result")

    def __init__(self, label: str) -> None:
        self.done = Event(f"{label}.done")
        self.result: R | None = None
        self.error: BaseException | None = None

    def take(self, timeout_s: float | None = None) -> R:
        """Wait, then give the result or raise what the closure raised."""
        self.done.synchronize(timeout_s)
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]  # None is a legal R
