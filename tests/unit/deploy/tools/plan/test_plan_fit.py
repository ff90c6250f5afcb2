"""Step costs out of measured steps: what was put in comes out, held-up steps change nothing, no cost is negative."""

from __future__ import annotations

import random

import pytest

from deploy.tools.plan.fit import fit
from deploy.tools.plan.profile import ProfiledCosts, StepShape

TRUE = ProfiledCosts((1, 8, 64, 512), (0.008, 0.011, 0.04, 0.25), 2e-4, 3e-7, 1e-6)


def shapes(num: int, seed: int = 1) -> list[StepShape]:
    rng = random.Random(seed)
    found = []
    for _ in range(num):
        rows = rng.choice((0, 1, 2, 4, 8, 16, 32))
        chunk = rng.choice((0, 8, 32, 64, 128, 256, 480)) if rows else rng.choice((8, 64, 256, 512))
        before = rng.choice((0, 256, 1024))
        pairs = chunk * before + chunk * (chunk + 1) // 2
        found.append(StepShape(chunk + rows, rows + (chunk > 0), pairs, rows * rng.choice((40, 400, 1500))))
    return found


def worst_error(costs: ProfiledCosts, over: list[StepShape]) -> float:
    return max(abs(costs.seconds(shape) / TRUE.seconds(shape) - 1) for shape in over)


def test_costs_come_out_as_they_went_in() -> None:
    steps = shapes(400)
    costs, error = fit(steps, [TRUE.seconds(shape) for shape in steps])
    assert error < 0.02
    assert worst_error(costs, shapes(200, seed=2)) < 0.06


def test_steps_that_the_system_held_up_change_little() -> None:
    steps, rng = shapes(400), random.Random(3)
    seconds = [TRUE.seconds(shape) * (8 if rng.random() < 0.1 else 1) for shape in steps]
    costs, _ = fit(steps, seconds)
    assert worst_error(costs, shapes(200, seed=2)) < 0.08


def test_no_cost_is_below_nothing() -> None:
    steps, rng = shapes(120), random.Random(4)
    costs, _ = fit(steps, [TRUE.seconds(shape) * rng.uniform(0.5, 2) for shape in steps])
    assert min(costs.per_sample, costs.per_pair, costs.per_key, costs.rise[0]) >= 0
    assert list(costs.rise) == sorted(costs.rise)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit(shapes(5), [1.0] * 5)


def test_between_and_beyond_the_knots_lines_go_on() -> None:
    costs = ProfiledCosts((1, 9), (1.0, 3.0), 0.0, 0.0, 0.0)
    assert costs.seconds(StepShape(5, 0)) == 2.0
    assert costs.seconds(StepShape(17, 0)) == 5.0
