"""Overload in virtual time: tenants beside a greedy one, goodput at three times the capacity, and what is left behind.

Two nodes of eight rows, 20 tokens of 20 ms: 40 requests a second are all that they can do.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from router.tenants.tenant import Tenant
from tests.support.worlds.tenant_world import Load, Result, World

CAPACITY = 40.0  # requests a second
SECONDS = 30.0
GREEDY, FIRST, SECOND = (Tenant(name) for name in ("greedy", "first", "second"))
OTHERS = (Load(FIRST, 0.2 * CAPACITY, 20), Load(SECOND, 0.2 * CAPACITY, 20))
SEEDS = (1, 2, 3)


def goodput(loads: tuple[Load, ...], seed: int) -> float:
    """Tokens a second of answers that came in time."""
    return sum(World(loads, seed=seed).run(SECONDS).tokens.values()) / SECONDS


def share_in_time(result: Result, tenant: Tenant) -> float:
    return result.in_time[tenant.name] / result.asked[tenant.name]


@pytest.mark.parametrize("limit", [20, 200, 2000])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_greedy_tenant_costs_the_others_a_tenth_at_most(seed: int, limit: int) -> None:
    """Whatever limit their answers have: they use 20 tokens."""
    others = [replace(load, num_tokens=limit, share=20 / limit) for load in OTHERS]
    alone = World(others, seed=seed).run(SECONDS)
    beside = World((*others, Load(GREEDY, 2.6 * CAPACITY, 21)), seed=seed).run(SECONDS)
    for tenant in (FIRST, SECOND):
        assert share_in_time(alone, tenant) == 1.0
        assert share_in_time(beside, tenant) >= 0.9, (beside.in_time, beside.asked, beside.errors)
    assert share_in_time(beside, GREEDY) < 0.4


@pytest.mark.parametrize("seed", SEEDS)
def test_goodput_at_three_times_the_capacity_stays_near_the_peak(seed: int) -> None:
    peak = max(goodput((Load(FIRST, load * CAPACITY),), seed) for load in (0.7, 0.9, 1.1))
    assert peak >= 0.8 * CAPACITY * 20
    assert goodput((Load(FIRST, 3 * CAPACITY),), seed) >= 0.9 * peak


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_held_stays_within_its_bounds_and_all_of_it_goes(seed: int) -> None:
    """`run` looks that nothing is left."""
    world = World((Load(FIRST, 2 * CAPACITY, within_s=30.0), Load(SECOND, 4 * CAPACITY, within_s=30.0)), seed=seed)
    result = world.run(SECONDS)
    assert result.most_open <= 200 + 2 * (8 + 2)
    assert result.most_at_nodes <= 2 * 8, "what waits, waits where order counts"
    assert result.errors["queue_full"] > 0
    assert sum(result.in_time.values()) > 0.9 * CAPACITY * SECONDS


def test_answers_that_end_early_count_for_what_they_took() -> None:
    """The second tenant's answers end after a quarter of what they might take: of the tokens it gets its half."""
    loads = (Load(FIRST, 3 * CAPACITY, 20, within_s=50.0), Load(SECOND, 6 * CAPACITY, 40, share=0.25, within_s=50.0))
    used = World(loads, max_queued=400).run(SECONDS).used
    assert used["second"] / used["first"] == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_higher_priority_notices_nothing_of_a_flood(seed: int) -> None:
    high = replace(OTHERS[0], tenant=replace(FIRST, priority=1))
    result = World((high, Load(GREEDY, 3 * CAPACITY)), seed=seed).run(SECONDS)
    assert share_in_time(result, FIRST) >= 0.99
