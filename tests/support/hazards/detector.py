"""The recorder: takes every declared access, keeps the clocks, and names both places of a pair that nothing orders.

Errors are collected, not raised where they are found: inside a closure an exception would be a failed step, from
which the engine recovers. `check` raises them on the host. Knows nothing of engines; `attach` wires it to one.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shared.device.events import Event, Ticket
from tests.support.hazards.clocks import HOST, Clock, Clocks, Launch
from tests.support.hazards.ledger import Access, Conflict, Ids, Ledger, Mode

ROOT = Path(__file__).resolve().parents[3]
SKIPPED = ("/tests/support/hazards/", "/shared/device/", "/torch/", "/contextlib.py", "/unittest/mock.py")
MAX_ERRORS = 20


class HazardError(AssertionError):
    """Two accesses that nothing orders, or one to a row or page of somebody else."""


class Detector:
    """Thread-safe. One host thread, which is the one that made it."""

    def __init__(self) -> None:
        self.clocks = Clocks()
        self.errors: list[str] = []
        self.num_accesses = 0
        self.ledgers: list[Ledger] = []
        self.host_thread = threading.get_ident()
        self._local = threading.local()
        self._lock = threading.RLock()
        self._places: list[str] = []
        self._place_ids: dict[tuple[object, ...], int] = {}
        self._fired: dict[int, tuple[Event, Clock]] = {}
        self._launch_of: dict[int, tuple[Event, Launch]] = {}
        self._tickets: dict[int, tuple[Ticket[Any], Launch]] = {}

    def ledger(self, name: str, unit: str, size: int) -> Ledger:
        self.ledgers.append(Ledger(name, unit, size))
        return self.ledgers[-1]

    @property
    def num_tolerated(self) -> int:
        """Checked reads that met another owner's write: their readers refuse what they got."""
        return sum(ledger.num_tolerated for ledger in self.ledgers)

    # ---- who is running

    @property
    def launch(self) -> Launch | None:
        """The closure that this thread is in."""
        launch: Launch | None = getattr(self._local, "launch", None)
        return launch

    def actor(self) -> int | None:
        """Return this thread's actor. A stream's thread between two closures, or an unknown thread, has None."""
        launch = self.launch
        if launch is not None:
            return launch.actor
        return HOST if threading.get_ident() == self.host_thread and not self.muted else None

    @property
    def muted(self) -> bool:
        return bool(getattr(self._local, "muted", False))

    @contextmanager
    def mute(self) -> Iterator[None]:
        """The detector's own look at tensors is no access."""
        before, self._local.muted = self.muted, True
        try:
            yield
        finally:
            self._local.muted = before

    @property
    def scopes(self) -> set[str]:
        """Buffers whose accessor is on the stack of this thread."""
        scopes: set[str] | None = getattr(self._local, "scopes", None)
        return scopes if scopes is not None else set()

    @contextmanager
    def scope(self, *names: str) -> Iterator[None]:
        before = self.scopes
        self._local.scopes = before | set(names)
        try:
            yield
        finally:
            self._local.scopes = before

    # ---- edges

    def register(self, launch: Launch, fires: Sequence[Event]) -> None:
        with self._lock:
            for event in fires:
                self._launch_of[id(event)] = (event, launch)

    def register_ticket(self, launch: Launch, ticket: Ticket[Any]) -> None:
        with self._lock:
            self._launch_of[id(ticket.done)] = (ticket.done, launch)
            self._tickets[id(ticket)] = (ticket, launch)

    @contextmanager
    def acting(self, launch: Launch) -> Iterator[None]:
        before = self.launch
        with self._lock:
            if not launch.started:
                launch.started = True
                marks, waits = launch.edges()
                for mark in [*marks, *(self.mark_of(event) for event in waits)]:
                    self.clocks.acquire(launch.actor, mark)
        self._local.launch = launch
        try:
            yield
        finally:
            self._local.launch = before

    def ended(self, launch: Launch) -> None:
        with self._lock:
            launch.end = self.clocks.release(launch.actor)

    def on_fire(self, event: Event) -> None:
        launch = self.launch
        if launch is not None:
            with self._lock:
                self._fired[id(event)] = (event, self.clocks.release(launch.actor))

    def on_seen(self, event: Event) -> None:
        """The running actor learned that the event is complete."""
        actor = self.actor()
        if actor is not None:
            with self._lock:
                self.clocks.acquire(actor, self.mark_of(event))

    def mark_of(self, event: Event) -> Clock | None:
        if id(event) in self._fired:
            return self._fired[id(event)][1]
        if id(event) in self._launch_of:
            return self._launch_of[id(event)][1].end_mark()
        return None

    def on_ticket_read(self, ticket: Ticket[Any], what: str) -> None:
        """A ticket's result is written at the closure's end: who reads it must know of that end."""
        actor, known = self.actor(), self._tickets.get(id(ticket))
        if actor is None or known is None or known[1].actor == actor:
            return
        with self._lock:
            launch = known[1]
            mark = launch.end_mark()
            if mark is None and launch.started is False and ticket.done.fired:
                return  # skipped, and nothing before it ever ran
            if mark is None:
                self.report(f"ticket of {launch.label}: its {what} is read before it ended\n  {self.here()}")
            elif mark[launch.actor] > self.clocks.of(actor)[launch.actor]:
                late = f"ticket of {launch.label}: nothing orders the read of its {what} behind its end"
                self.report(f"{late}\n  {self.here()}")

    # ---- accesses

    def access(self, ledger: Ledger, ids: Sequence[int] | Ids, mode: Mode, generations: Ids) -> None:
        actor = self.actor()
        if actor is None:
            return
        with self._lock:
            self.num_accesses += 1
            site = self._place()
            array = np.asarray(ids, np.int64)
            access = Access(actor, self.clocks.of(actor), site, mode, array, np.asarray(generations, np.int64))
            for conflict in ledger.access(access):
                self._report_conflict(ledger, conflict, site)

    def _report_conflict(self, ledger: Ledger, conflict: Conflict, site: int) -> None:
        ids = ", ".join(str(i) for i in conflict.ids[:8]) + (" ..." if len(conflict.ids) > 8 else "")
        other = self.place(conflict.other_site)
        self.report(f"{ledger.name}, {ledger.unit} {ids}: {conflict.kind}\n  {self.place(site)}\n  {other}")

    def place(self, site: int) -> str:
        return self._places[site] if site >= 0 else "(nobody yet)"

    def place_id(self) -> int:
        with self._lock:
            return self._place()

    def here(self) -> str:
        return self.place(self._place())

    def _place(self) -> int:
        """File, line and function of the nearest frame of ours, with stream and closure (which names the step)."""
        frame = sys._getframe(1)
        while frame.f_back is not None and any(part in frame.f_code.co_filename for part in SKIPPED):
            frame = frame.f_back
        launch = self.launch
        key = (frame.f_code, frame.f_lineno, launch.stream if launch else None, launch.label if launch else None)
        if key not in self._place_ids:
            self._place_ids[key] = len(self._places)
            file = frame.f_code.co_filename.removeprefix(f"{ROOT}/")
            who = f"stream {launch.stream}, {launch.label}" if launch is not None else "host"
            self._places.append(f"{who}: {file}:{frame.f_lineno} in {frame.f_code.co_name}")
        return self._place_ids[key]

    # ---- verdict

    def report(self, message: str) -> None:
        if len(self.errors) < MAX_ERRORS and message not in self.errors:
            self.errors.append(message)

    def check(self) -> None:
        if self.errors:
            raise HazardError("\n".join([f"{len(self.errors)} hazards", *self.errors]))
