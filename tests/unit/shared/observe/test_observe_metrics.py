"""Metrics: names, node reports with epochs, nodes that go, names made up by a peer."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from router.fleet.gateway_metrics import GatewayMetrics
from router.fleet.registry import Registry
from router.requests.new_request import NewRequest
from router.tenants.tenant import Tenant
from shared.core.sampling_params import SamplingParams
from shared.core.states import QueueStage, RowState
from shared.observe.metric_names import NODE_COUNTERS, NODE_HISTOGRAMS
from shared.observe.metrics import KEPT_S, MAX_REMEMBERED, ClusterMetrics, NodeReport, RequestMetrics, render
from shared.observe.node_metrics import MAX_SAMPLES, NodeMetrics
from shared.wire.messages import Heartbeat
from shared.wire.peers import Received
from tests.support.worlds.router_rig import hello, load
from tests.unit.router.dispatch.test_router_absence import Story

REPORT = NodeReport(
    node="decode-0",
    role="decode",
    epoch=1,
    pages_total=10,
    pages={"free": 6, "active": 4},
    rows={"free": 3, "running": 1},
    waiting=2,
    spec_width=3,
    counters={"steps": 5.0},
    observations={"step_seconds": [0.01, 0.02], "queue_seconds.waiting": [0.5]},
)
PLACE = {"node": "decode-0", "role": "decode"}


@pytest.fixture
def registry():
    return CollectorRegistry()


def changed(**fields):
    return dataclasses.replace(REPORT, **fields)


def test_labels_of_states_stay_as_dashboards_know_them(registry):
    metrics, node = ClusterMetrics(registry), NodeMetrics()
    for stage in QueueStage:
        node.observe_queue(stage, 0.5)
    metrics.update(changed(observations=node.take_observations()))
    labels = defaultdict(set)
    for sample in (sample for metric in registry.collect() for sample in metric.samples):
        labels[sample.name].add(sample.labels.get("state", sample.labels.get("stage")))
    assert labels["baton_kv_pages"] == {"free", "cached", "active", "granted", "held"}
    assert labels["baton_request_rows"] == {"free", "running", "prefilling", "granted", "held"}
    stages = {"bootstrap", "inflight", "prealloc", "prebuilt", "router", "transfer", "waiting"}
    assert labels["baton_queue_seconds_count"] == stages
    assert all(type(label) is str for found in labels.values() for label in found - {None})
    metrics.forget(REPORT.node)
    assert registry.get_sample_value("baton_request_rows", PLACE | {"state": RowState.FREE}) is None


def test_counters_rise_by_the_difference_and_survive_a_restart(registry):
    metrics = ClusterMetrics(registry)
    for epoch, total in ((1, 5), (1, 8), (1, 8), (2, 3), (2, 4)):
        metrics.update(changed(epoch=epoch, counters={"steps": float(total)}))
    assert registry.get_sample_value("baton_steps_total", {"node": "decode-0"}) == 12


def test_a_silent_node_loses_its_gauges_and_returns_counted_once(registry):
    metrics = ClusterMetrics(registry)
    metrics.update(REPORT)
    metrics.forget("decode-0")
    metrics.forget("decode-0")
    assert registry.get_sample_value("baton_kv_pool_pages", PLACE) is None
    assert registry.get_sample_value("baton_kv_pages", PLACE | {"state": "free"}) is None
    metrics.update(changed(counters={"steps": 6.0}))
    assert registry.get_sample_value("baton_kv_pool_pages", PLACE) == 10
    assert registry.get_sample_value("baton_steps_total", {"node": "decode-0"}) == 6


def steps_of(registry, node):
    return registry.get_sample_value("baton_steps_total", {"node": node})


def names_on(registry):
    found = {sample.labels.get("node") for metric in registry.collect() for sample in metric.samples}
    return found - {None}


def test_nothing_is_shown_of_a_node_that_is_gone_for_long(registry):
    """A node without --node-id is called by its process id: each start left some hundred lines on the page for good."""
    metrics = ClusterMetrics(registry)
    for number in range(50):
        metrics.update(changed(node=f"decode-{number}", counters={"steps": 1.0, "refused.key": 1.0}))
    metrics.sweep({f"decode-{number}" for number in range(50)}, 0.0)
    for number in range(1, 50):
        metrics.forget(f"decode-{number}")
    metrics.sweep({"decode-0"}, KEPT_S)
    assert len(names_on(registry)) == 50, "rates over time need it, and a silent node may come back"
    metrics.sweep({"decode-0"}, KEPT_S + 1)
    assert names_on(registry) == {"decode-0"} and b"decode-1" not in render(registry)


def test_a_router_shows_every_node_role_and_tenant():
    story = Story(silence_s=10 * KEPT_S)
    story.gateway.handle(Received("p@1", hello("prefill", "p")))
    for node in story.rig.registry:
        beat = Heartbeat(node.node_id, 1, msgspec.structs.replace(load(running=8), counters={"steps": 1.0}), False)
        story.gateway.handle(Received(node.peer, beat))
    for name in "tu":
        new = NewRequest([1, 2, 3], 1, SamplingParams(max_tokens=5), seed=7, tenant=Tenant(name))
        story.gateway.open([new] * 20)
    story.tick(2)
    queued = [story.metrics.get_sample_value("baton_queued_requests", {"tenant": name}) for name in "tu"]
    assert queued[0] and queued[1]
    picks = (one for metric in story.metrics.collect() for one in metric.samples if one.name == "baton_picks_total")
    assert {one.labels["role"] for one in picks} == {"prefill", "decode"}
    for _ in range(2):
        story.rig.now += 2 * KEPT_S
        story.tick(1)
    assert all(steps_of(story.metrics, name) == 1.0 for name in "abc"), "none of them has gone"


def test_a_node_that_comes_back_after_long_counts_on(registry):
    """A counter that falls would seem to be a restart; one that starts again at its total would count it twice."""
    metrics = ClusterMetrics(registry)
    for epoch, total in ((1, 5), (2, 3)):
        metrics.update(changed(epoch=epoch, counters={"steps": float(total)}))
    metrics.sweep((), 0.0)
    metrics.sweep((), KEPT_S + 1)
    assert steps_of(registry, "decode-0") is None
    metrics.update(changed(epoch=2, counters={"steps": 4.0}))
    assert steps_of(registry, "decode-0") == 9
    metrics.update(changed(epoch=3, counters={"steps": 2.0}))
    assert steps_of(registry, "decode-0") == 11


def test_what_is_remembered_of_nodes_that_are_gone_is_bounded(registry):
    metrics = ClusterMetrics(registry)
    for number in range(MAX_REMEMBERED + 10):
        metrics.update(changed(node=f"decode-{number}", observations={}))
        metrics.sweep((), 10.0 * KEPT_S * number)
    assert len(metrics._swept) == MAX_REMEMBERED and "decode-0" not in metrics._swept


def test_a_node_that_changes_its_role_is_shown_once(registry):
    metrics = ClusterMetrics(registry)
    metrics.update(REPORT)
    metrics.update(changed(role="prefill", epoch=2))
    assert registry.get_sample_value("baton_kv_pool_pages", PLACE) is None
    assert registry.get_sample_value("baton_kv_pool_pages", PLACE | {"role": "prefill"}) == 10


def test_names_a_peer_makes_up_are_dropped(registry):
    report = changed(
        counters={"evil": 1.0}, observations={"evil": [1.0], "queue_seconds.evil": [1.0]}, pages={"evil": 1}
    )
    ClusterMetrics(registry).update(report)
    assert b"evil" not in render(registry)


def test_what_clients_see(registry):
    metrics = RequestMetrics(registry)
    metrics.started()
    metrics.started()
    metrics.first_token(0.2)
    metrics.next_token(0.01)
    metrics.ended("stop", 1.5)
    metrics.refused("overloaded")
    assert registry.get_sample_value("baton_requests_total", {"outcome": "stop"}) == 1
    assert registry.get_sample_value("baton_requests_total", {"outcome": "overloaded"}) == 1
    assert registry.get_sample_value("baton_open_requests") == 1
    for name in ("ttft", "itl", "e2e"):
        assert registry.get_sample_value(f"baton_{name}_seconds_count") == 1


def test_samples_are_as_their_kinds_are_named(registry):
    """A gauge with a counter's suffix misleads; a `_created` sample per series costs two fifths of the page."""
    RequestMetrics(registry).refused("overloaded")
    ClusterMetrics(registry).update(REPORT)
    families = list(registry.collect())
    assert len(families) > 60
    assert not [family.name for family in families if family.type == "gauge" and family.name.endswith("_total")]
    assert b"_created" not in render(registry)


def test_gateways_read_the_whole_cluster_by_their_names(registry):
    nodes = Registry(5.0)
    for role, name in (("prefill", "p"), ("decode", "d"), ("decode", "silent")):
        known, _ = nodes.hello(name, hello(role, name), 0.0)
        known.reported(msgspec.structs.replace(
            load(running=2, prefilling=1, granted=3), pages={"free": 4, "cached": 1, "active": 5}, waiting=1
        ))  # fmt: skip
    known.is_silent = True
    GatewayMetrics(registry, nodes, lambda: 3, lambda: ["sql", "art"], lambda: 7.0)
    named = {
        "vllm:num_requests_waiting": ({}, 3 + 2),
        "vllm:num_requests_running": ({}, 6),
        "vllm:kv_cache_usage_perc": ({}, 0.5),
        "vllm:lora_requests_info": (
            {"max_lora": "2", "running_lora_adapters": "art,sql", "waiting_lora_adapters": ""}, 7.0
        ),
        "vllm:cache_config_info": ({"block_size": "16", "num_gpu_blocks": "20"}, 1),
    }  # fmt: skip
    assert {name: registry.get_sample_value(name, labels) for name, (labels, _) in named.items()} == {
        name: value for name, (_, value) in named.items()
    }


def test_gateways_of_a_router_without_nodes_read_no_load(registry):
    GatewayMetrics(registry, (), lambda: 0, list, lambda: 7.0)
    assert registry.get_sample_value("vllm:kv_cache_usage_perc") == 0
    assert b"cache_config_info{" not in render(registry)


def test_a_name_that_does_not_exist_is_a_mistake_in_the_node():
    node = NodeMetrics()
    for wrong in (lambda: node.count("stps"), lambda: node.observe("x", 1.0), lambda: node.observe_queue("x", 1.0)):
        with pytest.raises(KeyError, match="add it to metric_names"):
            wrong()


def test_samples_are_bounded():
    node = NodeMetrics()
    for _ in range(MAX_SAMPLES + 10):
        node.observe("step_seconds", 0.0)
    assert len(node.take_observations()["step_seconds"]) == MAX_SAMPLES
    assert node.take_observations() == {}, "they are handed over once"


def test_everything_a_node_can_report_is_shown(registry):
    node = NodeMetrics()
    for name in NODE_COUNTERS:
        node.count(name)
    for name in NODE_HISTOGRAMS:
        node.observe(name, 0.5)
    for stage in QueueStage:
        node.observe_queue(stage, 0.5)
    ClusterMetrics(registry).update(changed(counters=node.counters(), observations=node.take_observations()))
    for metric, _ in NODE_COUNTERS.values():
        assert registry.get_sample_value(metric, {"node": "decode-0"}) == 1, metric
    for metric, _ in NODE_HISTOGRAMS.values():
        assert registry.get_sample_value(f"{metric}_count", {"node": "decode-0"}) == 1, metric
    for stage in QueueStage:
        assert registry.get_sample_value("baton_queue_seconds_count", {"stage": stage}) == 1
