"""Threads that run a compiled program together, each on a core of its own. Knows nothing of what it computes.

A team leads with the thread that calls it, and has a helper for every other core it may use: its own ones, and, where
nodes of one machine share a table of cores, those of others while these do not need them. Helpers sleep in compiled
code, outside the GIL. A library's threads (OpenMP, numba's) would not do: they take as many cores as they were told at
the start, however busy the machine is, and spin for them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import sys
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LINE_WORDS = 64  # as many as core_words needs, or more
FUTEX_CALL = {"x86_64": 202, "aarch64": 98}  # the number of Linux's system call
_Leader = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_Helper = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker computes. `line`: address of its core's words (core_words.py). `core`: where its thread stays;
    None: wherever the system likes."""

    line: int
    is_own: bool
    core: int | None = None


class Team:
    """Runs one program at a time: a second caller waits. Threads start with the first program."""

    def __init__(self, size: int = 1, places: Sequence[Place] = (), slot: int = 0, memory: object = None) -> None:
        """`size` threads, on cores of which nobody else is told. Or on `places`, own ones first, of which the first is
        the leader's: lines of a table, in which `slot` is this process's number. `memory`: what the lines lie in."""
        if (size > 1 or places) and not can_sleep():
            size, places = 1, ()
        lines = np.zeros((0 if places else size, LINE_WORDS), np.int64)
        own = [Place(line.ctypes.data, is_own=True) for line in lines]
        self._places, self._slot, self._memory = tuple(places or own), slot, (lines, memory)
        self._lock = threading.Lock()
        self._crew: Crew | None = None

    @property
    def size(self) -> int:
        """The most threads that run a program together."""
        return len(self._places)

    @property
    def has_run(self) -> bool:
        return self._crew is not None

    def run(self, tasks: int, counters: int, num_tasks: int) -> None:
        """Addresses of a program's tables (team_code.py). Returns when all of it is done; leaves the GIL meanwhile."""
        with self._lock:
            if self._crew is None:
                self._crew = Crew(self._places, self._slot, self._memory)
                self._end = weakref.finalize(self, self._crew.stop)
                self._end.atexit = False  # where the process ends, so do they
            self._crew.run(tasks, counters, num_tasks)

    def rest(self) -> None:
        """There is no work: others may have the cores until the next program. While one runs, nothing happens."""
        if self._crew is not None and self._lock.acquire(blocking=False):
            try:
                self._crew.rest()
            finally:
                self._lock.release()

    def keep_to_own(self) -> None:
        """Borrow no core from now on."""
        with self._lock:
            if self._crew is None:
                self._places = tuple(place for place in self._places if place.is_own)
            else:
                self._crew.keep_to_own()

    def close(self) -> None:
        """End the helpers; afterwards nobody looks at the places any more. Without it they end with the team."""
        with self._lock:
            if self._crew is not None:
                self._end.detach()
                self._crew.rest()
                self._crew.stop()
                self._crew.join()
                self._crew = None


class Crew:
    """A team's threads, and the words through which they hear of programs."""

    def __init__(self, places: Sequence[Place], slot: int, memory: object) -> None:
        """Compiles, or loads what was compiled, and starts the helpers. `memory`: must live as long as they do."""
        from shared.kernel import team_code as code  # numba, which is not there everywhere

        self._memory, self._num_own = memory, sum(place.is_own for place in places)
        self._calls = np.array(system_calls() or (0, 0, 0), np.int64)
        self._workers = np.array([(place.line, place.is_own) for place in places], np.int64)
        self._words = np.zeros(code.NUM_WORDS, np.int64)
        known = {code.CALLS: self._calls.ctypes.data, code.WORKERS: self._workers.ctypes.data}
        known |= {code.SLOT: slot, code.NUM_WORKERS: len(places)}
        self._words[list(known)] = list(known.values())
        self._num_workers = code.NUM_WORKERS
        self._program = [code.NUM_TASKS, code.TASKS, code.COUNTERS]
        self._compiled = code.make_leader(), code.make_helper(), code.make_rest(), code.make_stop()
        self._lead, self._help, self._rest, self._stop = (
            kind(made.address) for kind, made in zip((_Leader, _Helper, _Leader, _Leader), self._compiled, strict=True)
        )
        self._threads = [
            threading.Thread(target=self._serve, args=(worker, place), name=f"compute-{worker}", daemon=True)
            for worker, place in enumerate(places)
            if worker > 0
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError:  # the system has no more
            self.stop()
            raise

    def run(self, tasks: int, counters: int, num_tasks: int) -> None:
        self._words[self._program] = num_tasks, tasks, counters
        self._lead(self._words.ctypes.data)

    def keep_to_own(self) -> None:
        self._words[self._num_workers] = self._num_own

    def rest(self) -> None:
        self._rest(self._words.ctypes.data)

    def stop(self) -> None:
        self._words[self._num_workers] = len(self._workers)  # those that borrow no more hear it, too
        self._stop(self._words.ctypes.data)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: int, place: Place) -> None:
        if place.core is not None:
            try:
                os.sched_setaffinity(0, (place.core,))
            except OSError:  # this process may not run there
                if not place.is_own:
                    return
        self._help(self._words.ctypes.data, worker)


def can_sleep() -> bool:
    """Whether threads can wait here for a word to change. If not one thread computes, and the log says so."""
    if system_calls() is not None:
        return True
    logging.getLogger(__name__).warning("threads can't wait for each other on this system: one thread computes")
    return False


@functools.cache
def system_calls() -> tuple[int, int, int] | None:
    """Address of the C library's syscall, number of the futex, address of clock_gettime. None where there is no futex
    (Linux has it)."""
    number = FUTEX_CALL.get(platform.machine(), 0) if sys.platform == "linux" else 0
    if number == 0 or sys.byteorder != "little":
        return None
    library = ctypes.CDLL(None)
    return address_of(library.syscall), number, address_of(library.clock_gettime)


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
