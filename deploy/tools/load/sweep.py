"""Search for the highest rate within an SLO. Pure.

The rate doubles until a run misses the SLO, or halves until one meets it. Then each run's rate is the geometric mean of
the highest passed and the lowest missed rate, until these are close.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

GROWTH = 2.0
CLOSE_ENOUGH = 1.1  # the search ends at this ratio of the lowest missed rate to the highest passed rate
MOST_RUNS = 12


@dataclass(slots=True)
class Sweep:
    first_rate: float
    needed: float  # share of requests that must be within the SLO
    shares: dict[float, float] = field(default_factory=dict)  # rate -> share within the SLO

    def next_rate(self) -> float | None:
        """Return None when the search is over."""
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
        """Record the share of a run's requests that met the SLO. NaN (nothing measured) counts as a miss."""
        self.shares[rate] = 0.0 if math.isnan(share) else share

    @property
    def least_missed(self) -> float | None:
        return min((rate for rate, share in self.shares.items() if share < self.needed), default=None)

    @property
    def best(self) -> float | None:
        """The highest passed rate below the lowest missed rate. A pass above a missed rate counts as luck."""
        limit = self.least_missed or math.inf
        return max((rate for rate, share in self.shares.items() if share >= self.needed and rate < limit), default=None)
