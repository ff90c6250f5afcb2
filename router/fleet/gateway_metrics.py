"""Tell gateways in front of routers how busy the cluster is, by the names that they read.

The endpoint pickers of Kubernetes' Gateway API inference extension read vLLM's names unless told otherwise
(docs/proposals/003-model-server-protocol in kubernetes-sigs/gateway-api-inference-extension). They know neither nodes
nor roles, so each figure is that of the whole cluster. The values are read when somebody asks for the page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import Metric
from prometheus_client.metrics_core import GaugeMetricFamily
from prometheus_client.registry import Collector, CollectorRegistry

from router.fleet.registry import RegisteredNode
from shared.core.states import PageState, RowState

AT_WORK = (RowState.RUNNING, RowState.PREFILLING)
SPARE = (PageState.FREE, PageState.CACHED)
LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
CACHE_LABELS = ("block_size", "num_gpu_blocks")
LORA_HELP = "Time of this answer. Labels: adapters that every request may name; none waits to be loaded"
CACHE_HELP = "1. Labels: tokens per KV page, and the number of KV pages of all nodes"


class GatewayMetrics(Collector):
    """- nodes: the nodes that the router knows; the page leaves out silent nodes.
    - num_queued: requests that wait in this router.
    - adapters: names of the adapters that requests may name.
    - clock: Unix time in seconds.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        nodes: Iterable[RegisteredNode],
        num_queued: Callable[[], int],
        adapters: Callable[[], Iterable[str]],
        clock: Callable[[], float],
    ) -> None:
        self._nodes = nodes
        self._num_queued = num_queued
        self._adapters = adapters
        self._clock = clock
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        there = [node for node in self._nodes if not node.is_silent]
        loads = [node.report.load for node in there if node.report.load is not None]
        waiting = self._num_queued() + sum(load.waiting for load in loads)
        running = sum(load.rows.get(state, 0) for load in loads for state in AT_WORK)
        total = sum(load.pages_total for load in loads)
        spare = sum(load.pages.get(state, 0) for load in loads for state in SPARE)
        yield GaugeMetricFamily(
            "vllm:num_requests_waiting", "Requests that wait, in this router or on a node", value=waiting
        )
        yield GaugeMetricFamily("vllm:num_requests_running", "Requests in prefill or decode, on all nodes", running)
        yield GaugeMetricFamily(
            "vllm:kv_cache_usage_perc",
            "Part of all nodes' KV pages that requests use, from 0 to 1",
            value=1 - spare / total if total else 0.0,
        )
        names = sorted(self._adapters())
        lora = GaugeMetricFamily("vllm:lora_requests_info", LORA_HELP, labels=LORA_LABELS)
        lora.add_metric([str(len(names)), ",".join(names), ""], self._clock())
        yield lora
        cache = GaugeMetricFamily("vllm:cache_config_info", CACHE_HELP, labels=CACHE_LABELS)
        if there:
            cache.add_metric([str(there[0].hello.fingerprint.page_size), str(total)], 1)
        yield cache
