"""Threads that run a compiled program together, each on its own core (docs/cpu-kernels.md)."""

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

LINE_WORDS = 64  # words per core; core_words needs fewer
FUTEX_CALL = {"x86_64": 202, "aarch64": 98}  # system call numbers
_Leader = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_Helper = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """A worker's core. `line`: address of the core's words (core_words.py). `core`: None if the worker is not bound."""

    line: int
    is_own: bool
    core: int | None = None


class Team:
    """Runs one program at a time; a second caller waits. Threads start with the first program."""

    def __init__(self, size: int = 1, places: Sequence[WorkerPlace] = (), slot: int = 0, memory: object = None) -> None:
        """Use `size` threads or, with a core table, a thread on each of `places`, own cores first.

        The leader has the first place. `slot`: this process's slot in the table. `memory` holds the places' lines."""
        if (size > 1 or places) and not can_sleep():
            size, places = 1, ()
        lines = np.zeros((0 if places else size, LINE_WORDS), np.int64)
        own = [WorkerPlace(line.ctypes.data, is_own=True) for line in lines]
        self._places, self._slot, self._memory = tuple(places or own), slot, (lines, memory)
        self._lock = threading.Lock()
        self._crew: Crew | None = None

    @property
    def size(self) -> int:
        return len(self._places)

    def run(self, tasks: int, counters: int, num_tasks: int) -> None:
        """Run the program with tables (team_code.py) at these addresses, without the GIL."""
        with self._lock:
            if self._crew is None:
                self._crew = Crew(self._places, self._slot, self._memory)
                self._end = weakref.finalize(self, self._crew.stop)
                self._end.atexit = False  # daemon threads end with the process
            self._crew.run(tasks, counters, num_tasks)

    def rest(self) -> None:
        """Release the cores until the next program, unless a program runs."""
        if self._crew is not None and self._lock.acquire(blocking=False):
            try:
                self._crew.rest()
            finally:
                self._lock.release()

    def keep_to_own(self) -> None:
        with self._lock:
            if self._crew is None:
                self._places = tuple(place for place in self._places if place.is_own)
            else:
                self._crew.keep_to_own()

    def close(self) -> None:
        """End the helpers and leave the cores. Otherwise helpers end when the team is collected."""
        with self._lock:
            if self._crew is not None:
                self._end.detach()
                self._crew.rest()
                self._crew.stop()
                self._crew.join()
                self._crew = None


class Crew:
    def __init__(self, places: Sequence[WorkerPlace], slot: int, memory: object) -> None:
        """`memory` must stay valid until the helpers end."""
        from shared.kernel.team import team_code as code  # imports numba

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
        except RuntimeError:  # the system has no more threads
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
        self._words[self._num_workers] = len(self._workers)  # also ends the helpers that keep_to_own() excluded
        self._stop(self._words.ctypes.data)

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _serve(self, worker: int, place: WorkerPlace) -> None:
        if place.core is not None:
            try:
                os.sched_setaffinity(0, (place.core,))
            except OSError:  # this process may not run on that core
                if not place.is_own:
                    return
        self._help(self._words.ctypes.data, worker)


def can_sleep() -> bool:
    """Return whether threads can wait for a word's change."""
    if system_calls() is not None:
        return True
    logging.getLogger(__name__).warning("threads can't wait for each other on this system: one thread computes")
    return False


@functools.cache
def system_calls() -> tuple[int, int, int] | None:
    """Return syscall's address, the futex call's number and clock_gettime's address, or None without a known futex."""
    number = FUTEX_CALL.get(platform.machine(), 0) if sys.platform == "linux" else 0
    if number == 0 or sys.byteorder != "little":
        return None
    library = ctypes.CDLL(None)
    return address_of(library.syscall), number, address_of(library.clock_gettime)


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
