"""Compiled tasks one after another on a team, in a single call that leaves the GIL. Knows nothing of their work.

A model's step is some hundred small tasks. Run from Python they would ask for the GIL as often, and a busy host thread
would hold up each of them; a program asks once.

    task 0: shares 0, 1, ...   | all done |   task 1: shares 0, 1, ...   | all done |   ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shared.kernel.jit import NUM_SHARES
from shared.kernel.team import Team
from shared.kernel.team_code import COUNTER_WORDS


class Program:
    """words: (tasks, n) int64, row i for task i, owned by the caller, who writes them between runs. A task has as many
    shares as its NUM_SHARES says: one per thread, unless the caller writes another number there."""

    def __init__(self, team: Team, tasks: Sequence[Any], words: npt.NDArray[np.int64]) -> None:
        self._team, self._compiled, self.words = team, tuple(tasks), words
        words[:, NUM_SHARES] = team.size
        rows = words.ctypes.data + words.strides[0] * np.arange(len(tasks))
        self._tasks = np.stack((np.array([task.address for task in tasks], np.int64), rows.astype(np.int64)), axis=1)
        self._counters = np.zeros((len(tasks), COUNTER_WORDS), np.int64)

    def run(self, stop: int | None = None, start: int = 0) -> None:
        """Tasks [start, stop), to the last one when not given. Whoever splits a program runs its parts in order."""
        stop = len(self._tasks) if stop is None else stop
        self._counters[start:stop].fill(0)
        tasks = self._tasks.ctypes.data + start * self._tasks.strides[0]
        counters = self._counters.ctypes.data + start * self._counters.strides[0]
        self._team.run(tasks, counters, stop - start)
