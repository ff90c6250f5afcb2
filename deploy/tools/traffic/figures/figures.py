"""Compute a run's percentiles and rates with confidence intervals. Pure numpy.

Concurrent requests are not independent. So we use the circular block bootstrap (Politis and Romano 1992) over requests
in order of arrival, in blocks of about n^(1/3) requests (the growth rate of Kunsch 1989 for means). A request is drawn
with its waits between tokens.
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
MOST_DRAWN = 16_000_000  # limit of requests in all resamples together, to bound memory
LEVEL = 0.95
MAX_POOLED = 1_000_000  # limit of waits from which an interval is computed, to bound time


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval; all NaN if nothing was measured."""

    value: float
    low: float
    high: float


NOTHING = Estimate(math.nan, math.nan, math.nan)


class Resampling:
    """Draw resamples, each treated as an equally likely run.

    `times` (resamples, num_requests): how often each resample has each request.
    """

    def __init__(self, num_requests: int, seed: int = 0, resamples: int = RESAMPLES) -> None:
        bounded = min(resamples, max(50, MOST_DRAWN // max(1, num_requests)))
        self.times = draw_times(num_requests, bounded, np.random.default_rng(seed))

    def interval(self, value: float, resampled: Sequence[float] | Floats) -> Estimate:
        known = [one for one in resampled if not math.isnan(one)]
        if math.isnan(value) or not known:
            return NOTHING
        low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Estimate(value, min(value, float(low)), max(value, float(high)))

    def total(self, per_request: Sequence[float] | Floats, divisor: float) -> Estimate:
        """Return sum(per_request) / divisor: a mean, or a rate over time slices."""
        values = np.asarray(per_request, dtype=np.float64)
        if not len(values) or divisor <= 0:
            return NOTHING
        return self.interval(float(values.sum()) / divisor, self.times @ values / divisor)

    def share(self, hits: Sequence[float], of: Sequence[float]) -> Estimate:
        """Return sum(hits) / sum(of), both from the same draws, so that the share stays within 1."""
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
    """Weighted values: one per request, or one per wait between its tokens."""

    def __init__(self, values: Sequence[float], owners: Sequence[int], weights: Sequence[int]) -> None:
        """`owners[i]`: the position of value i's request in order of arrival."""
        unordered = np.asarray(values, dtype=np.float64)
        order = np.argsort(unordered, kind="stable")
        self.values: Floats = unordered[order]
        self._owners: Counts = np.asarray(owners, dtype=np.int64)[order]
        self._weights: Counts = np.asarray(weights, dtype=np.int64)[order]

    def mean(self) -> float:
        total = float(self._weights.sum())
        return float((self.values * self._weights).sum()) / total if total else math.nan

    def thinned(self) -> Pooled:
        every = slice(None, None, -(-len(self.values) // MAX_POOLED) or 1)
        thin = Pooled([], [], [])
        thin.values, thin._owners, thin._weights = self.values[every], self._owners[every], self._weights[every]
        return thin

    def quantiles(self, levels: Sequence[float], times: Counts | None) -> list[float]:
        """Return each level's quantile: the smallest value at which the cumulative weight is at least this share.

        `times`: how often each request was drawn.
        """
        weights = self._weights if times is None else self._weights * times[self._owners]
        below = np.cumsum(weights)
        if not len(below) or below[-1] == 0:
            return [math.nan] * len(levels)
        # The 0.99 quantile of 100 values is the 99th, despite rounding.
        wanted = np.ceil(np.asarray(levels) * below[-1] - 1e-9)
        return [float(one) for one in self.values[np.searchsorted(below, np.maximum(wanted, 1))]]


def one_each(values: Sequence[float]) -> Pooled:
    owners = [i for i, value in enumerate(values) if not math.isnan(value)]
    return Pooled([values[i] for i in owners], owners, [1] * len(owners))


def quantile(values: Sequence[float] | Floats, level: float) -> float:
    return Pooled(list(values), [0] * len(values), [1] * len(values)).quantiles([level], None)[0]
