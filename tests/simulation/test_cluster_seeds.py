"""The whole cluster, simulated under faults: every stream is the reference's or ends with a declared error, and
nothing is left behind. `make sim SEEDS=1000` is the long form."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import partial

import pytest

from shared.config.settings.router_settings import BY_COST
from shared.model.hashlm.layer import STATE
from shared.observe.metrics import ClusterMetrics
from tests.support.sim.cluster import run_seed
from tests.support.sim.moods import draw_plan, in_page_groups
from tests.support.sim.plan import ClusterPlan
from tests.support.sim.run import run_many
from tests.support.sim.summary import Summary

FEW, MANY = 8, 50
FAR_AWAY = 1_000_000  # seeds of their own


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("shared.sched.loop").setLevel(logging.CRITICAL)


def assert_fine(summary: Summary) -> None:
    said = [
        f"seed {r.seed}: {r.failure}\n(python -m tests.support.sim.run --replay {r.seed})" for r in summary.failures
    ]
    assert not said, "\n".join(said)


@pytest.mark.rule("I5", "I9")
def test_a_few_seeds() -> None:
    summary, seed = Summary(), 0
    while summary.counted < FEW and not summary.failures:
        summary.add(run_seed(seed))
        seed += 1
    assert_fine(summary)
    assert summary.requests >= 20 * FEW and sum(summary.hits.values()) >= 3 * FEW and len(summary.hits) >= 5
    assert summary.counted >= summary.uncounted, "most seeds are too easy to prove anything"


def test_streams_are_right_where_prompts_start_by_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the nodes of the simulation measure of their own steps and hand-offs decides."""
    started: list[int] = []
    monkeypatch.setattr(ClusterMetrics, "started_by_cost", lambda metrics, count: started.append(count))
    summary, seed = Summary(), 0
    while sum(started) < 10 and not summary.failures:
        summary.add(run_seed(seed, change=lambda plan: replace(plan, local_tokens=BY_COST)))
        seed += 1
        assert seed < 100, "measured costs decide nothing"
    assert_fine(summary)


def through_groups(plan: ClusterPlan) -> ClusterPlan:
    """The same, with pages that go through process groups, layer by layer."""
    return replace(
        plan,
        nodes=tuple(
            replace(node, transports=("gloo",), knobs=replace(node.knobs, shared_memory=False, layer_ends=(1,)))
            for node in plan.nodes
        ),
    )


def test_a_few_seeds_through_process_groups() -> None:
    """Not in harsh mood: a network that loses messages and goes on is none of ours, and leaves groups half made."""
    summary, seed = Summary(), FAR_AWAY
    while summary.counted < FEW and not summary.failures:
        if draw_plan(seed).mood != "harsh":
            summary.add(run_seed(seed, change=through_groups))
        seed += 1
    assert_fine(summary)


@pytest.mark.parametrize("lower_window", [0, STATE], ids=["all", "state"])
def test_a_few_seeds_in_page_groups(lower_window: int) -> None:
    """The lower layer reads all tokens, or is a recurrence."""
    summary, seed = Summary(), FAR_AWAY
    while summary.counted < FEW and not summary.failures:
        summary.add(run_seed(seed, change=partial(in_page_groups, lower_window=lower_window)))
        seed += 1
    assert_fine(summary)


def test_many_seeds() -> None:
    summary = run_many(FAR_AWAY, MANY, jobs=min(2, os.cpu_count() or 1))
    assert_fine(summary)
    assert summary.counted >= MANY and len(summary.hits) >= 10, summary.hits
    assert len(summary.missing) <= 12, summary.missing


def test_a_seed_replays_exactly() -> None:
    first, second = run_seed(4), run_seed(4)
    assert first.digest == second.digest and first.num_steps == second.num_steps
    assert first.digest != run_seed(6).digest
