"""Percentiles and rates of a run with confidence intervals. Pure numpy.

Requests that run beside each other slow each other down, so their latencies are not independent, and an interval that
took them for it would be too narrow. Hence the circular block bootstrap (Politis and Romano 1992) over requests in the
order of their arrival, in blocks of about n^(1/3) (the order that Kunsch 1989 gives for means), and for pooled waits
between tokens always whole requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
RESAMPLES = 400
MOST_DRAWN = 16_000_000  # requests in all resamples together: longer runs get fewer, for memory's sake
LEVEL = 0.95
MAX_POOLED = 1_000_000  # waits that go into an interval; more would only take longer


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and the bounds of its 95 % interval; NaN all, where nothing was measured."""

    value: float
    low: float
    high: float


NOTHING = Estimate(math.nan, math.nan, math.nan)


class Resampling:
    """Draws which requests a second, equally likely run would have had: how often each, (resamples, num_requests)."""

    def __init__(self, num_requests: int, seed: int = 0, resamples: int = RESAMPLES) -> None:
        bounded = min(resamples, max(50, MOST_DRAWN // max(1, num_requests)))
        self.times = draw_times(num_requests, bounded, np.random.default_rng(seed))

    def interval(self, value: float, resampled: Sequence[float] | Floats) -> Estimate:
        """Percentile interval around a value computed from the run itself."""
        known = [one for one in resampled if not math.isnan(one)]
        if math.isnan(value) or not known:
            return NOTHING
        low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(value, min(value, float(low)), max(value, float(high)))

    def total(self, per_request: Sequence[float] | Floats, divisor: float) -> Estimate:
        """sum(per_request) / divisor: a mean, or a rate over a fixed time where slices of time stand for requests."""
        values = np.asarray(per_request, dtype=np.float64)
        if not len(values) or divisor <= 0:
            return NOTHING
        return self.interval(float(values.sum()) / divisor, self.times @ values / divisor)

    def share(self, hits: Sequence[float], of: Sequence[float]) -> Estimate:
        """sum(hits) / sum(of), both drawn together: a share stays one."""
        above, below = np.asarray(hits, dtype=np.float64), np.asarray(of, dtype=np.float64)
        if not below.sum():
            return NOTHING
        drawn = self.times @ below
        resampled = (self.times @ above)[drawn > 0] / drawn[drawn > 0]
        return self.interval(float(above.sum() / below.sum()), resampled)

    def quantiles(self, pooled: Pooled, levels: Sequence[float]) -> list[Estimate]:
        values = pooled.quantiles(levels, None)
        thin = pooled.thinned()
        resampled = [thin.quantiles(levels, times) for times in self.times]
        return [self.interval(value, [row[i] for row in resampled]) for i, value in enumerate(values)]


def draw_times(num_requests: int, resamples: int, rng: np.random.Generator) -> Counts:
    if num_requests == 0:
        return np.zeros((resamples, 0), dtype=np.int64)
    block = max(1, round(num_requests ** (1 / 3)))
    num_blocks = -(-num_requests // block)
    starts = rng.integers(0, num_requests, size=(resamples, num_blocks, 1))
    drawn = ((starts + np.arange(block)) % num_requests).reshape(resamples, -1)[:, :num_requests]
    return np.stack([np.bincount(row, minlength=num_requests) for row in drawn])


class Pooled:
    """Values that belong to requests: one per request, or all of its waits between tokens, each with a weight."""

    def __init__(self, values: Sequence[float], owners: Sequence[int], weights: Sequence[int]) -> None:
        """`owners[i]`: the position, in order of arrival, of the request that value i belongs to."""
        unordered = np.asarray(values, dtype=np.float64)
        order = np.argsort(unordered, kind="stable")
        self.values: Floats = unordered[order]
        self._owners: Counts = np.asarray(owners, dtype=np.int64)[order]
        self._weights: Counts = np.asarray(weights, dtype=np.int64)[order]

    def mean(self) -> float:
        total = float(self._weights.sum())
        return float((self.values * self._weights).sum()) / total if total else math.nan

    def thinned(self) -> Pooled:
        """Every so manieth in order of size: enough for an interval, and never for a figure."""
        every = slice(None, None, -(-len(self.values) // MAX_POOLED) or 1)
        thin = Pooled([], [], [])
        thin.values, thin._owners, thin._weights = self.values[every], self._owners[every], self._weights[every]
        return thin

    def quantiles(self, levels: Sequence[float], times: Counts | None) -> list[float]:
        """The smallest value that at least this share (by weight) does not exceed, each request `times` as often."""
        weights = self._weights if times is None else self._weights * times[self._owners]
        below = np.cumsum(weights)
        if not len(below) or below[-1] == 0:
            return [math.nan] * len(levels)
        # a share of 0.99 of 100 is the 99th, whatever floating point makes of the product
        wanted = np.ceil(np.asarray(levels) * below[-1] - 1e-9)
        return [float(one) for one in self.values[np.searchsorted(below, np.maximum(wanted, 1))]]


def one_each(values: Sequence[float]) -> Pooled:
    """One value per request, NaN where it has none."""
    owners = [i for i, value in enumerate(values) if not math.isnan(value)]
    return Pooled([values[i] for i in owners], owners, [1] * len(owners))


def quantile(values: Sequence[float] | Floats, level: float) -> float:
    """Without an interval."""
    return Pooled(list(values), [0] * len(values), [1] * len(values)).quantiles([level], None)[0]
