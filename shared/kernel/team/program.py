"""Runs compiled tasks one after another on a team, in a single call that releases the GIL.

A step has about a hundred tasks. If Python called each one, each call would wait for the GIL.

    task 0: shares 0, 1, ...   | all done |   task 1: shares 0, 1, ...   | all done |   ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.code.jit import NUM_SHARES
from shared.kernel.team.team import Team
from shared.kernel.team.team_code import COUNTER_WORDS


class Program:
    """A list of tasks. The caller owns `words` (tasks, n) int64, a row per task, and writes them between runs.

    Word NUM_SHARES is the number of threads unless the caller changes it."""

    def __init__(self, team: Team, tasks: Sequence[Any], words: npt.NDArray[np.int64]) -> None:
        self._team, self._compiled, self.words = team, tuple(tasks), words
        words[:, NUM_SHARES] = team.size
        rows = words.ctypes.data + words.strides[0] * np.arange(len(tasks))
        self._tasks = np.stack((np.array([task.address for task in tasks], np.int64), rows.astype(np.int64)), axis=1)
        self._counters = torch.zeros(len(tasks), COUNTER_WORDS, dtype=torch.int64).numpy()  # cache-aligned
        self._tables = self._tasks.ctypes.data, self._counters.ctypes.data

    def run(self, stop: int | None = None, start: int = 0) -> None:
        stop = len(self._tasks) if stop is None else stop
        self._counters[start:stop].fill(0)
        tasks, counters = self._tables
        self._team.run(
            tasks + start * self._tasks.strides[0], counters + start * self._counters.strides[0], stop - start
        )
