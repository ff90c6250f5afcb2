"""Loads of the simulated cluster that are about one thing each, and the oracles for them: overload, a pair that does
not get together, drains at one of several routers, a router that says another's id."""

from __future__ import annotations

import logging

import pytest

from tests.support.sim.cluster import run_seed
from tests.support.sim.moods import LOADS, Load, draw_plan
from tests.support.sim.waiting import WAITING, is_due

SEEDS = range(2)


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("shared.sched.loop").setLevel(logging.CRITICAL)


def failures(load: Load) -> list[str]:
    reports = (run_seed(seed, change=lambda plan: load.plan(plan.seed)) for seed in SEEDS)
    return [f"seed {report.seed}: {report.failure}" for report in reports if report.failure]


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_a_load_is_borne_once_its_defect_is_mended(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not before: a defect that waits shows here, so that its line in the table can't outlive it."""
    was_due = is_due(load.defect)
    monkeypatch.delitem(WAITING, load.defect, raising=False)
    found = failures(load)
    if was_due:
        assert not found, "\n".join(found)
    else:
        assert found, f"{load.defect} shows no more: take its line out of tests/support/sim/waiting.py"


def test_full_nodes_fail_no_request_and_reuse_memory_at_once() -> None:
    """Prefill nodes give memory away and compute again, decode nodes grant one row after the other. Nothing breaks,
    so nothing may resume; and what a row's end sets free goes to the first in the queue at once."""
    overload = LOADS[0]
    reports = [run_seed(seed, change=lambda plan: overload.plan(plan.seed)) for seed in range(4)]
    assert not [report.failure for report in reports if report.failure]
    assert all(report.counts for report in reports)
    assert all(report.causes["resumes"] == report.causes["resumed: moved"] for report in reports), (
        "who moves lost nothing"
    )
    assert sum(report.rare["unpin then grant, computed again"] for report in reports) > 0


def test_each_lost_generate_is_placed_anew_once_and_no_other() -> None:
    lost = next(load for load in LOADS if load.name == "lost generates")
    reports = [run_seed(seed, change=lambda plan: lost.plan(plan.seed)) for seed in range(2, 6)]
    assert not [report.failure for report in reports if report.failure]
    assert all(report.counts and report.causes["resumes"] == sum(report.hits.values()) for report in reports)
    assert len({kind for report in reports for kind in report.hits}) == 4


def test_every_load_and_shape_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As they will be when nothing waits any more."""
    monkeypatch.setattr("tests.support.sim.waiting.WAITING", {})
    plans = [draw_plan(seed) for seed in range(600)]
    for load in LOADS:
        drawn = sum(plan == load.plan(seed) for seed, plan in enumerate(plans))
        assert drawn >= 600 * load.share / 2, load.name
    assert sum(len(plan.nodes) >= 8 for plan in plans) >= 112 and max(len(plan.nodes) for plan in plans) == 12
    assert sum(len(plan.routers) > 1 for plan in plans) >= 60 and {len(plan.routers) for plan in plans} == {1, 2, 3, 4}
