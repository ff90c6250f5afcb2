"""Looks for the highest rate within an SLO. Pure: is told how each run went, says which rate to run next.

The rate doubles until a run misses, then the gap between the best that passed and the least that missed is halved until
it is small. Steps are by ratio, for capacity is known in per cent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

GROWTH = 2.0
CLOSE_ENOUGH = 1.1  # least that missed / best that passed
MOST_RUNS = 12


@dataclass(slots=True)
class Sweep:
    """`needed`: the share of requests that must be within the SLO."""

    first_rate: float
    needed: float
    shares: dict[float, float] = field(default_factory=dict)  # rate -> share within the SLO

    def next_rate(self) -> float | None:
        """None: it is over."""
        if len(self.shares) >= MOST_RUNS:
            return None
        passed, missed = self.best, self.least_missed
        if not self.shares:
            return self.first_rate
        if missed is None:
            return max(self.shares) * GROWTH
        if passed is None:
            return missed / GROWTH
        return None if missed / passed <= CLOSE_ENOUGH else math.sqrt(missed * passed)

    def went(self, rate: float, share: float) -> None:
        """NaN: nothing was measured, which is a miss."""
        self.shares[rate] = 0.0 if math.isnan(share) else share

    @property
    def least_missed(self) -> float | None:
        return min((rate for rate, share in self.shares.items() if share < self.needed), default=None)

    @property
    def best(self) -> float | None:
        """The highest rate that passed below every one that missed: a lucky run beyond does not count."""
        limit = self.least_missed or math.inf
        return max((rate for rate, share in self.shares.items() if share >= self.needed and rate < limit), default=None)
