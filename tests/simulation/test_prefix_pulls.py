"""Prefill nodes that pull pages from each other, in whole clusters with faults drawn by seed. All oracles of the
simulation hold: streams are exact, pages add up, a prompt waits for a pull no longer than it may."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.support.sim.moods import MOODS, in_page_groups, pulls, tight_pulls
from tests.support.sim.plan import PULL_FAULTS, ClusterPlan, draw_base

SEEDS = range(100_000, 100_015)
WINDOWED_SEEDS = range(100_000, 100_005)
TIGHT_SEEDS = (400_015, 400_030, 400_090, 400_095)  # loans and pulls give way here, and nodes die while they lend


def ends_of(seeds: Sequence[int], make: Callable[[ClusterPlan, random.Random], ClusterPlan]) -> Counter[str]:
    """Run the seeds; return how often each rare event came about, and each fault that hit a request."""
    from tests.support.sim.cluster import run_seed

    def plan_of(seed: int) -> ClusterPlan:
        return make(draw_base(seed), random.Random(seed ^ MOODS))

    ends: Counter[str] = Counter()
    for seed in seeds:
        report = run_seed(seed, change=lambda plan, seed=seed: plan_of(seed))  # type: ignore[misc]
        assert not report.failure, f"seed {seed}: {report.failure}"
        ends += report.rare + report.hits
    return ends


def test_pulls_under_faults() -> None:
    ends = ends_of(SEEDS, pulls)
    assert ends["pull.pulled"] >= 10, ends


def test_pulls_with_little_memory() -> None:
    ends = ends_of(TIGHT_SEEDS, tight_pulls)
    assert ends["pull.pulled"] >= 20 and ends["pull.gave_way"] and ends["loans_gave_way"], ends
    assert ends["slow frames"] and sum(ends[kind] for kind in PULL_FAULTS) >= 2, ends


@pytest.mark.parametrize("lower_window", [0, None], ids=["two groups", "all windowed"])
def test_pulls_of_windows(lower_window: int | None) -> None:
    """A pull brings of each page group what the next token reads, whatever fails."""
    ends = ends_of(WINDOWED_SEEDS, lambda plan, rng: in_page_groups(pulls(plan, rng), lower_window))
    assert ends["pull.pulled"] >= 5, ends
