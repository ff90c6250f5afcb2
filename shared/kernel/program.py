"""Runs compiled tasks one after another on a team, in a single call that leaves the GIL. Knows nothing of their work.

A model's step is some hundred small tasks. Run from Python they would ask for the GIL as often, and a busy host thread
would hold up each of them; a program asks once.

    task 0: shares 0, 1, ...   | all done |   task 1: shares 0, 1, ...   | all done |   ...

Threads take shares until there are none left, then wait for those others still have. So a team that gets fewer threads
than it asked for is slower, and nothing else.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import types

from shared.kernel.jit import NUM_SHARES, WORDS, call_plain, call_task, compile_c, longs_at, look_at, take_one
from shared.kernel.team import Team

COUNTER_WORDS = 16  # two cache lines a task: shares taken | shares done
DONE = 64  # bytes to the second

LOOKS_BEFORE_YIELD = 4000  # some microseconds: longer than a share takes that is nearly done

# The words of the driver.
NUM_TASKS, SHARES, TASKS, COUNTERS, YIELD = range(5)


class Program:
    """words: (tasks, n) int64, row i for task i, owned by the caller, who writes them between runs."""

    def __init__(self, team: Team, tasks: Sequence[Any], words: npt.NDArray[np.int64]) -> None:
        self._team, self._compiled, self.words = team, tuple(tasks), words
        words[:, NUM_SHARES] = team.size
        rows = words.ctypes.data + words.strides[0] * np.arange(len(tasks))
        self._tasks = np.stack((np.array([task.address for task in tasks], np.int64), rows.astype(np.int64)), axis=1)
        self._counters = np.zeros((len(tasks), COUNTER_WORDS), np.int64)
        self._driver = make_driver()
        addresses = (self._tasks.ctypes.data, self._counters.ctypes.data, yield_address())
        self._header = np.array([0, team.size, *addresses], np.int64)

    def run(self, stop: int | None = None, start: int = 0) -> None:
        """Tasks [start, stop), to the last one when not given. Whoever splits a program runs its parts in order."""
        stop = len(self._tasks) if stop is None else stop
        self._counters[start:stop].fill(0)
        self._header[NUM_TASKS] = stop - start
        self._header[TASKS] = self._tasks.ctypes.data + start * self._tasks.strides[0]
        self._header[COUNTERS] = self._counters.ctypes.data + start * self._counters.strides[0]
        self._team.enter(self._driver.address, self._header.ctypes.data)


def yield_address() -> int:
    """The C library's sched_yield, 0 where there is none."""
    try:
        return ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0
    except (OSError, AttributeError, TypeError):
        return 0


@functools.cache
def make_driver() -> Any:
    def drive(words: Any) -> None:
        shares = words[SHARES]
        for index in range(words[NUM_TASKS]):
            task = longs_at(words[TASKS] + index * 16)
            counter = words[COUNTERS] + index * COUNTER_WORDS * 8
            share = take_one(counter)
            while share < shares:
                call_task(task[0], task[1], share)
                take_one(counter + DONE)
                share = take_one(counter)
            looks = 0
            while look_at(counter + DONE) < shares:
                looks += 1
                # Whoever has the last share may have lost its core to another process: give it ours.
                if looks > LOOKS_BEFORE_YIELD and words[YIELD] != 0:
                    call_plain(words[YIELD])

    return compile_c(drive, types.void(WORDS))
