"""Fit step costs to measured steps, by non-negative least squares of relative errors. Pure.

Errors are relative, so a step that the operating system delayed can't dominate the fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from deploy.tools.plan.profile import ProfiledCosts, StepShape

Floats = npt.NDArray[np.float64]
KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
LEAST = 1e-10


def fit(shapes: Sequence[StepShape], seconds: Sequence[float]) -> tuple[ProfiledCosts, float]:
    """Return (costs, median relative error). Raise ValueError for too few shapes."""
    most = max((shape.tokens for shape in shapes), default=0)
    knots = tuple(knot for knot in KNOTS if knot < most) + (most,)
    if len(knots) < 2 or len(shapes) < len(knots) + 3:
        raise ValueError(f"{len(shapes)} steps of at most {most} tokens are too few to fit")
    times = np.asarray(seconds)
    parts = np.stack([columns(shape, knots) for shape in shapes])
    costs = solve(parts, times)
    error = float(np.median(np.abs(parts @ costs / times - 1)))
    rise = np.cumsum(costs[: len(knots)])
    per_sample, per_pair, per_key = costs[len(knots) :].tolist()
    return ProfiledCosts(knots, tuple(rise.tolist()), per_sample, per_pair, per_key), error


def columns(shape: StepShape, knots: Sequence[int]) -> Floats:
    """Return the costs' factors: 1, the filled share of each interval between knots, samples, pairs, and keys."""
    shares = [min(1.0, max(0.0, (shape.tokens - low) / (high - low))) for low, high in pairwise(knots)]
    return np.asarray([1.0, *shares, shape.samples, shape.pairs, shape.keys])


def solve(parts: Floats, times: Floats) -> Floats:
    scaled = parts / times[:, None]
    size = np.linalg.norm(scaled, axis=0)
    size[size == 0] = 1.0
    costs: Floats = non_negative(scaled / size) / size
    return costs


def non_negative(parts: Floats) -> Floats:
    """Return argmin |parts x - 1| over x >= 0.

    This is the active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974).
    """
    num = parts.shape[1]
    ones = np.ones(len(parts))
    x, is_free = np.zeros(num), np.zeros(num, dtype=bool)
    for _ in range(3 * num):
        slope = parts.T @ (ones - parts @ x)
        slope[is_free] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= LEAST * len(parts):
            break
        is_free[best] = True
        x = into_bounds(parts, ones, x, is_free)
    return x


def into_bounds(parts: Floats, wanted: Floats, x: Floats, is_free: npt.NDArray[np.bool_]) -> Floats:
    """Return the least-squares x over the free columns. A value that would become negative is fixed at 0 instead."""
    while True:
        goal = np.zeros(len(x))
        goal[is_free] = np.linalg.lstsq(parts[:, is_free], wanted, rcond=None)[0]
        out = is_free & (goal <= 0)
        if not out.any():
            return goal
        step = np.min(x[out] / np.maximum(x[out] - goal[out], LEAST))
        x = x + step * (goal - x)
        is_free &= x > LEAST
        x[~is_free] = 0.0
