"""Choose how many prompt tokens join the next step of running rows, so that the step stays within --itl-budget.

        measured      at most 0.9 of the budget            beyond the budget
        next chunk    more, in proportion, but no jump     less, in proportion, but at least half

No cost formula fits, because tokens may cost nothing until the device is busy. The size of a chunk that was too large
becomes a limit: each later chunk grows at most halfway to it. The limit slowly rises, so a delayed step causes only a
few small chunks. Equal results lead to equal chunks.
"""

from __future__ import annotations

import math
from typing import Protocol

from shared.engine.plan import StepResult

LEAST = 16  # tokens of the smallest chunk
AIM = 0.9  # share of the budget that steps should take; from there to the full budget, the chunk keeps its size
GROWTH = 1.5  # a step within the budget grows the chunk at most by this factor
SHRINK = 0.5  # one slow step shrinks the chunk at most to this share, because the system may have delayed the step
FORGET = 1.1  # a step within the budget raises the limit by this factor


class MixedChunk(Protocol):
    """Chooses a chunk for each plan with running rows, as WidthChoice chooses a width."""

    def choose(self) -> int:
        """Return how many prompt tokens may join running rows, at least 1."""
        ...

    def observe(self, result: StepResult) -> None: ...


class FixedChunk:
    def __init__(self, size: int) -> None:
        self._size = size

    def choose(self) -> int:
        return self._size

    def observe(self, result: StepResult) -> None:
        """Do nothing."""


def make_mixed_chunk(itl_budget_ms: float, most: int) -> MixedChunk:
    """Return the MixedChunk for this budget. 0 means no budget. `most`: tokens of the largest chunk."""
    return BudgetedChunk(itl_budget_ms / 1000, most) if itl_budget_ms > 0 else FixedChunk(most)


class BudgetedChunk:
    """Keeps the time of a whole step, running rows included, within `budget_s`."""

    def __init__(self, budget_s: float, most: int) -> None:
        self._budget_s = budget_s
        self._least, self._most = min(LEAST, most), most
        self._size = float(self._least)
        self._too_large = math.inf  # the limit, in tokens

    def choose(self) -> int:
        return int(self._size)

    def observe(self, result: StepResult) -> None:
        """Learn from a mixed step. A chunk below the allowed size shows nothing about larger chunks."""
        tokens, seconds = result.prompt_tokens, result.seconds
        if not tokens or seconds <= 0 or result.num_prefill == len(result.row_ids):
            return
        fitting = tokens * AIM * self._budget_s / seconds
        if seconds > self._budget_s:
            self._too_large = max(tokens, self._least)
            self._size = max(self._least, SHRINK * self._size, min(self._size, fitting))
        else:
            self._too_large *= FORGET
            grown = min(fitting, GROWTH * tokens, (tokens + self._too_large) / 2)
            self._size = min(self._most, max(self._size, grown))
