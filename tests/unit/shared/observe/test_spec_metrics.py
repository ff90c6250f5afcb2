"""What speculation did, from the steps to the router's page: accepted drafts by position, verifies, where time went."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from shared.core.sampling_params import SamplingParams
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
