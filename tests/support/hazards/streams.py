"""Watches streams, events and tickets: every edge between them becomes an edge of the vector clocks.

The classes are patched while `edges` is active and restored afterwards, so production code pays nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from shared.core.request import Request
from shared.device.events import Event, Ticket
from shared.device.stream import Closure, Stream
from shared.kv.manager import KVManager
from shared.kv.pages import PageAllocator
from shared.kv.rows import ReqToTokenPool
from shared.sched.steps.batch import ScheduleBatch
from shared.sched.steps.lengths import Lengths
from tests.support.hazards.clocks import HOST, Launch
from tests.support.hazards.detector import Detector
from tests.support.hazards.storages import StorageMode, StorageWatch

HOST_ONLY = (ScheduleBatch, Lengths, Request, ReqToTokenPool, PageAllocator, KVManager)
Facts = Callable[[], dict[str, Any]]


@contextmanager
def edges(detector: Detector) -> Iterator[None]:
    """Events and tickets report to the detector; host-only objects refuse to be read inside a closure."""
    with ExitStack() as stack:
        for method in ("fire", "query", "synchronize"):
            stack.enter_context(patch.object(Event, method, _watched(detector, method)))
        for name in ("result", "error"):
            stack.enter_context(patch.object(Ticket, name, _watched_slot(detector, name)))
        for kind in HOST_ONLY:
            stack.enter_context(patch.object(kind, "__getattribute__", _confined(detector, kind)))
        yield


def _watched(detector: Detector, method: str) -> Callable[..., Any]:
    original = getattr(Event, method)

    def fire(event: Event, error: BaseException | None = None) -> None:
        if not event.fired:
            detector.on_fire(event)
        original(event, error)

    def query(event: Event) -> bool:
        if not original(event):
            return False
        detector.on_seen(event)
        return True

    def synchronize(event: Event, timeout_s: float | None = None) -> None:
        original(event, timeout_s)
        detector.on_seen(event)

    return {"fire": fire, "query": query, "synchronize": synchronize}[method]


def _watched_slot(detector: Detector, name: str) -> property:
    slot = Ticket.__dict__[name]

    def read(ticket: Ticket[Any]) -> Any:
        detector.on_ticket_read(ticket, name)
        return slot.__get__(ticket, Ticket)

    return property(read, slot.__set__)


def _confined(detector: Detector, kind: type) -> Callable[[Any, str], Any]:
    plain = kind.__getattribute__

    def read(obj: Any, name: str) -> Any:
        launch = detector.launch
        if launch is not None and launch.actor != HOST and not name.startswith("__"):
            detector.report(f"{kind.__name__}.{name} is the host's, and is read inside a closure\n  {detector.here()}")
        return plain(obj, name)

    return read


class StreamWatch:
    """One stream: launches get the host's clock, waits become edges of the next launch."""

    def __init__(self, detector: Detector, storages: StorageWatch, stream: Stream, name: str, facts: Facts) -> None:
        self._detector, self._storages, self._facts = detector, storages, facts
        self._stream_name = name
        self._actor = detector.clocks.add(name)
        self._pending: list[Event] = []
        self._last: Launch | None = None
        self._launch, self._wait = stream.launch, stream.wait
        stream.launch = self.launch  # type: ignore[method-assign]
        stream.wait = self.wait  # type: ignore[method-assign]

    def wait(self, event: Event) -> None:
        self._pending.append(event)
        self._wait(event)

    def launch(self, fn: Closure[Any], fires: Sequence[Event] = (), label: str = "") -> Ticket[Any]:
        detector = self._detector
        label = label or f"{self._stream_name}:{getattr(fn, '__name__', 'closure')}"
        mark = detector.clocks.release(HOST)
        if self._last is not None and self._last.started:
            _forget_past(self._last)
        launch = Launch(self._actor, self._stream_name, label, mark, self._pending, self._last, self._facts())
        self._pending, self._last = [], launch
        detector.register(launch, fires)
        ticket = self._launch(self._traced(fn, launch), fires, label)
        detector.register_ticket(launch, ticket)
        return ticket

    def _traced(self, fn: Closure[Any], launch: Launch) -> Closure[Any]:
        detector = self._detector

        def run() -> Any:
            try:
                with detector.acting(launch), self._mode():
                    out = fn()
            except BaseException:
                detector.ended(launch)
                raise
            if isinstance(out, Generator):
                return self._drive(out, launch)
            detector.ended(launch)
            return out

        return run

    def _drive(self, steps: Generator[None, None, Any], launch: Launch) -> Generator[None, None, Any]:
        detector = self._detector
        try:
            while True:
                with detector.acting(launch), self._mode():
                    try:
                        next(steps)
                    except StopIteration as end:
                        return end.value
                yield
        finally:
            steps.close()
            detector.ended(launch)

    def _mode(self) -> Any:
        """The host thread is inside one mode already; a worker thread enters its own."""
        on_host = threading.get_ident() == self._detector.host_thread
        return ExitStack() if on_host else StorageMode(self._storages)


def _forget_past(launch: Launch) -> None:
    """One that has started needs nothing before it: let go of the chain."""
    launch.previous = None
