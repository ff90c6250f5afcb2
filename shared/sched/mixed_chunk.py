"""How many prompt tokens join the next step of running rows, so that it takes no longer than --itl-budget.

        measured      at most 0.9 of the budget            beyond the budget
        next chunk    more, in proportion, but no jump     less, in proportion, but no less than half

What a step costs is not written down as a formula: plain steps, long contexts and many rows are in its measured time,
and a token may cost nothing until the device is busy and much from there on. A size that was too large is approached by
halves, and forgotten a little with every step that was in time. So one step that the system held up costs a few small
chunks, and a size that is too large is tried again now and then.

Pure: results in, tokens out; the same results give the same chunks. Results come a step or more after their plan.
"""

from __future__ import annotations

import math
from typing import Protocol

from shared.engine.plan import StepResult

LEAST = 16  # tokens: prompts go on however small the budget is
AIM = 0.9  # of the budget: between this and the whole nothing changes
GROWTH = 1.5  # of a chunk that was in time
SHRINK = 0.5  # at most, by one step: the system may have held it up
FORGET = 1.1  # by so much a size that was too large rises, with each step that was in time


class MixedChunk(Protocol):
    """Asked for each plan, also for one that comes to nothing; told each result, in order."""

    def choose(self) -> int:
        """Return the most prompt tokens of a step that running rows share, at least 1."""
        ...

    def observe(self, result: StepResult) -> None: ...


class FixedChunk:
    """Always as large."""

    def __init__(self, size: int) -> None:
        self._size = size

    def choose(self) -> int:
        return self._size

    def observe(self, result: StepResult) -> None:
        """Nothing to learn."""


def make_mixed_chunk(itl_budget_ms: float, most: int) -> MixedChunk:
    """`itl_budget_ms`: 0 where there is none. `most`: tokens that no chunk exceeds."""
    return BudgetedChunk(itl_budget_ms / 1000, most) if itl_budget_ms > 0 else FixedChunk(most)


class BudgetedChunk:
    """Chunks begin small. `budget_s`: of a whole step, its running rows included."""

    def __init__(self, budget_s: float, most: int) -> None:
        self._budget_s = budget_s
        self._least, self._most = min(LEAST, most), most
        self._size = float(self._least)
        self._too_large = math.inf  # tokens

    def choose(self) -> int:
        return int(self._size)

    def observe(self, result: StepResult) -> None:
        """Learn from a step that had both. A chunk smaller than was allowed, as the end of a prompt, lets nothing grow
        beyond what was measured."""
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
