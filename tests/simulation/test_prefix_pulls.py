"""Prefill nodes that pull pages from each other, in whole clusters with faults drawn by seed. All oracles of the
simulation hold: streams are exact, pages add up, a prompt waits for a pull no longer than it may."""

from __future__ import annotations

import random
from collections import Counter

from tests.support.sim.moods import MOODS, pulls
from tests.support.sim.plan import ClusterPlan, draw_base

SEEDS = range(100_000, 100_012)


def plan_of(seed: int) -> ClusterPlan:
    return pulls(draw_base(seed), random.Random(seed ^ MOODS))


def test_pulls_under_faults() -> None:
    from tests.support.sim.cluster import run_seed

    ends: Counter[str] = Counter()
    for seed in SEEDS:
        report = run_seed(seed, change=lambda plan, seed=seed: plan_of(seed))  # type: ignore[misc]
        assert not report.failure, f"seed {seed}: {report.failure}"
        ends += report.rare
    assert ends["pull.pulled"] >= 10, ends
