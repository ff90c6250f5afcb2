"""What speculation did, from the steps to the router's page: accepted drafts by position, verifies, where time went."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from shared.core.sampling_params import SamplingParams
from shared.engine.lease import StepTimes
from shared.node.records.core import NodeCore
from shared.node.records.report import StepWatch, node_load
from shared.node.records.request_spans import RequestSpans
from shared.observe.metrics import ClusterMetrics, NodeReport
from shared.observe.node_metrics import NodeMetrics
from tests.support.cores.core_rig import CoreKnobs, Job, make_core, run_local
from tests.support.oracles.hash_draft import expected_accept_len

HIT_RATE = 70


def page_of(core: NodeCore) -> CollectorRegistry:
    """What a node's heartbeat makes of it on the router."""
    metrics, registry = NodeMetrics(), CollectorRegistry()
    watch = StepWatch(core, metrics, lambda: 0.0, RequestSpans())
    watch.count()
    watch.count()  # nothing is counted twice
    load = node_load(core, metrics, (), {})
    ClusterMetrics(registry).update(
        NodeReport("d0", "decode", 1, load.pages_total, load.pages, load.rows, 0, load.spec_width, load.counters, {})
    )
    return registry


def values(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"node": "d0"} | labels)


def run_jobs(**knobs: object) -> NodeCore:
    core = make_core(CoreKnobs(hit_rate=HIT_RATE, prefix_cache=False, **knobs))  # type: ignore[arg-type]
    run_local(core, [Job(0, (1, 2, 3), SamplingParams(max_tokens=80), 5)])
    core.close()
    return core


def test_accepted_drafts_by_position() -> None:
    """One request: its verifies are those that HashDraft's hash makes at the lengths it passes."""
    page = page_of(run_jobs(width=4, overlap=False))
    accepted, committed = [], 3
    while committed < 3 + 79:
        accepted.append(expected_accept_len(committed, 4, HIT_RATE) - 1)
        committed += accepted[-1] + 1
    assert values(page, "baton_spec_steps_total") == len(accepted)
    assert values(page, "baton_spec_accepted_tokens_total") == sum(accepted)
    for position in (1, 2, 3):
        by_position = values(page, "baton_spec_accepted_at_total", position=str(position))
        assert by_position == sum(one >= position for one in accepted) > 0
    assert values(page, "baton_spec_width", role="decode") == 4


def test_time_goes_to_drafting_and_to_the_rest() -> None:
    page = page_of(run_jobs(width=4))
    assert (values(page, "baton_spec_draft_seconds_total") or 0) > 0
    assert (values(page, "baton_spec_verify_seconds_total") or 0) > 0


@pytest.mark.parametrize("knobs", [{"width": 1}, {"width": 4, "backend": "simulated"}])
def test_no_time_without_drafts_and_none_on_simulated_streams(knobs: dict[str, object]) -> None:
    page = page_of(run_jobs(**knobs))
    assert values(page, "baton_spec_draft_seconds_total") == values(page, "baton_spec_verify_seconds_total") == 0


def test_a_plain_step_is_no_verify() -> None:
    core = make_core(CoreKnobs(width=4, draw_widths=True, hit_rate=HIT_RATE, seed=1))
    launch, widths = core.engine.launch, []
    core.engine.launch = lambda plan: (widths.append(plan.width), launch(plan))[1]  # type: ignore[method-assign]
    run_local(core, [Job(0, (1, 2, 3), SamplingParams(max_tokens=80), 5)])
    core.close()
    drafted = sum(width > 1 for width in widths[1:])  # the first step computes the prompt
    assert values(page_of(core), "baton_spec_steps_total") == pytest.approx(drafted, abs=2)  # zombies at the end
    assert drafted < len(widths) - 3


class Ticks:
    """A clock that moves by one at each look."""

    def __init__(self) -> None:
        self._now = 0.0

    def mark(self) -> float:
        self._now += 1
        return self._now

    def seconds(self, first: float, last: float) -> float:
        return last - first


def test_step_times_are_two_parts_of_the_whole() -> None:
    times = StepTimes(Ticks())  # type: ignore[arg-type]
    times.mark()
    for _ in range(2):
        with times.drafting():
            pass
    times.mark()
    assert times.seconds() == (2.0, 3.0)
