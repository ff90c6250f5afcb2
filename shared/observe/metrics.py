"""The router's metrics on /metrics."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from shared.core.states import PageState, RowState
from shared.observe.metric_names import (
    FAMILIES,
    LATENCY_BUCKETS,
    NODE_COUNTERS,
    NODE_GAUGES,
    NODE_HISTOGRAMS,
    QUEUE_METRIC,
    QUEUE_PREFIX,
    QUEUE_STAGES,
    ROUTER_STAGE,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KEPT_S = 3600.0  # how long an absent node's counters are shown
MAX_REMEMBERED = 1024  # absent nodes whose counters are kept but not shown

# A `_created` sample beside each counter and histogram makes two fifths of the page, and Prometheus keeps each as a
# series of its own. The library has one switch for the process.
disable_created_metrics()


# Shown as 0 from the start: a rate sees no growth in a series that begins at 1.
ALARMING = (
    "internal_error",
    "node_lost",
    "handoff_failed",
    "step_failed",
    "deadline_exceeded",
    "no_nodes",
    "overloaded",
    "queue_full",
    "deadline_unreachable",
)


def render(registry: CollectorRegistry) -> bytes:
    return generate_latest(registry)


def latency(registry: CollectorRegistry, name: str, help: str, labels: Sequence[str] = ()) -> Histogram:
    return Histogram(name, help, labels, buckets=LATENCY_BUCKETS, registry=registry)


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter("baton_requests_total", "Requests by how they ended", ["outcome"], registry=registry)
        for outcome in ALARMING:
            self._requests.labels(outcome)
        self._ignored = Counter(
            "baton_ignored_fields_total", "Fields of requests that had no effect", ["field"], registry=registry
        )
        self._models = Counter(
            "baton_model_requests_total",
            "Requests that were admitted, by their model's name",
            ["model"],
            registry=registry,
        )
        self._continued = Counter(
            "baton_continued_streams_total", "Streams resumed after their reader's position", registry=registry
        )
        self._recomputed = Counter(
            "baton_recomputed_tokens_total", "Tokens computed again for resumed streams", registry=registry
        )
        self.replayed: Callable[[], None] = Counter(
            "baton_replayed_answers_total", "Answers sent again for an Idempotency-Key", registry=registry
        ).inc
        self._open = Gauge("baton_open_requests", "Requests that are not answered yet", registry=registry)
        ttft = latency(registry, "baton_ttft_seconds", "From a request's arrival to its first token")
        itl = latency(registry, "baton_itl_seconds", "Between two tokens of one request")
        self.first_token: Callable[[float], None] = ttft.observe
        self.next_token: Callable[[float], None] = itl.observe
        self._e2e = latency(registry, "baton_e2e_seconds", "From a request's arrival to its end")

    def ignored_field(self, field: str) -> None:
        """`field`: a name of our fixed set, or "other", but never a client's text."""
        self._ignored.labels(field).inc()

    def continued(self, num_recomputed: int) -> None:
        self._continued.inc()
        self._recomputed.inc(num_recomputed)

    def started(self) -> None:
        self._open.inc()

    def for_model(self, name: str) -> None:
        """`name`: of the model or of an adapter, never one that the router does not serve."""
        self._models.labels(name).inc()

    def ended(self, outcome: str, seconds: float) -> None:
        """`outcome`: one of our finish reasons or error codes, never a client's text."""
        self._open.dec()
        self._requests.labels(outcome).inc()
        self._e2e.observe(seconds)

    def refused(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Page counts add up to pages_total. Row counts add up to the node's rows."""

    node: str
    role: str
    epoch: int
    pages_total: int
    pages: Mapping[str, int]
    rows: Mapping[str, int]
    waiting: int
    spec_width: int
    counters: Mapping[str, float]
    observations: Mapping[str, Sequence[float]]
    kept_pages: int = 0
    missing_routers: int = 0
    slowness: float = 1.0


def make_counters(registry: CollectorRegistry) -> dict[str, tuple[Counter, tuple[str, ...]]]:
    """Return, by short name, a counter and its label values, without the first label, `node`."""
    counters: dict[str, tuple[Counter, tuple[str, ...]]] = {
        short: (Counter(name, help, ["node"], registry=registry), ()) for short, (name, help) in NODE_COUNTERS.items()
    }
    for family in FAMILIES:
        counter = Counter(family.metric, family.help, ["node", family.label], registry=registry)
        counters |= {family.prefix + value: (counter, (value,)) for value in family.values}
    return counters


@dataclass(slots=True)
class CounterSeries:
    """`shown`: the counters' values on the page."""

    epoch: int
    # time of the last sweep with the node present, or of the first sweep after a report; None: no sweep since then
    seen_at: float | None = None
    totals: dict[str, float] = field(default_factory=dict)  # the counters in the node's last report
    shown: dict[str, float] = field(default_factory=dict)


class ClusterMetrics:
    """Gauges, counters and histograms of all nodes.

    A counter rises by the difference from the epoch's last report, so totals never fall when a node restarts at zero.
    Unnamed processes get new node names at each start, so a node's series are removed after KEPT_S of absence. If the
    node returns, its counters continue, unless MAX_REMEMBERED other nodes have vanished since. Its histograms restart
    at zero.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        place = ["node", "role"]
        self._pages = Gauge("baton_kv_pages", "KV pages by state", [*place, "state"], registry=registry)
        self._rows = Gauge("baton_request_rows", "Request rows by state", [*place, "state"], registry=registry)
        self._gauges = {
            field: Gauge(name, help, place, registry=registry) for field, (name, help) in NODE_GAUGES.items()
        }
        self._counters = make_counters(registry)
        self._histograms = {
            short: latency(registry, name, help, ["node"]) for short, (name, help) in NODE_HISTOGRAMS.items()
        }
        self._queues = latency(registry, *QUEUE_METRIC, ["stage"])
        resumed = Counter("baton_resumed_total", "Attempts after the first, at any request", registry=registry)
        self.resumed: Callable[[int], None] = resumed.inc
        self.moved: Callable[[int], None] = Counter(
            "baton_moved_total", "Requests moved from a decode node without memory to another", registry=registry
        ).inc
        self._by_cost = Counter(
            "baton_started_by_cost_total",
            "Requests that began on their decode node because a hand-off would have cost more, as measured",
            registry=registry,
        )
        self._picks = Counter(
            "baton_picks_total", "Nodes that the policy picked, by reason", ["role", "reason"], registry=registry
        )
        self._sought = Counter(
            "baton_prefix_sources_total",
            "Prompts with more tokens cached at another prefill node, by why that node was named as a source or not",
            ["outcome"],
            registry=registry,
        )
        self._queued = (
            Gauge("baton_queued_requests", "Requests that wait in the router", ["tenant"], registry=registry),
            Gauge(
                "baton_queued_tokens",
                "Tokens of requests that wait in the router: prompts and expected answers",
                ["tenant"],
                registry=registry,
            ),
        )
        self._tenants: set[str] = set()  # tenants whose gauges are shown
        self._series: dict[str, CounterSeries] = {}  # counters of shown nodes
        # counters of nodes that are no longer shown, oldest first
        self._swept: OrderedDict[str, CounterSeries] = OrderedDict()
        self._shown: dict[str, str] = {}  # node -> the role in its gauges' labels

    def count(self, node: str, name: str, amount: float) -> None:
        self._counter(node, name).inc(amount)

    def started_by_cost(self, count: int) -> None:
        self._by_cost.inc(count)

    def picked(self, role: str, reason: str) -> None:
        self._picks.labels(role, reason).inc()

    def sought(self, outcome: str) -> None:
        self._sought.labels(outcome).inc()

    def waited(self, seconds: float) -> None:
        self._queues.labels(ROUTER_STAGE).observe(seconds)

    def queued(self, amounts: Mapping[str, tuple[int, int]]) -> None:
        for tenant in self._tenants - amounts.keys():
            for gauge in self._queued:
                gauge.remove(tenant)
        for tenant, both in amounts.items():
            for gauge, amount in zip(self._queued, both, strict=True):
                gauge.labels(tenant).set(amount)
        self._tenants = set(amounts)

    def update(self, report: NodeReport) -> None:
        if self._shown.get(report.node, report.role) != report.role:
            self.forget(report.node)
        self._set_gauges(report)
        self._add_counters(report)
        for name, samples in report.observations.items():
            self._observe(report.node, name, samples)

    def forget(self, node: str) -> None:
        """Drop a lost node's gauges. The counters stay, for rates and in case the node returns."""
        role = self._shown.pop(node, None)
        if role is None:
            return
        for state in PageState:
            self._pages.remove(node, role, state)
        for row_state in RowState:
            self._rows.remove(node, role, row_state)
        for gauge in self._gauges.values():
            gauge.remove(node, role)

    def sweep(self, present: Container[str], now: float) -> None:
        for node, series in list(self._series.items()):
            if series.seen_at is None or node in present:
                series.seen_at = now
            elif now - series.seen_at > KEPT_S:
                self._remove(node)

    def _remove(self, node: str) -> None:
        self.forget(node)
        series = self._swept[node] = self._series.pop(node)
        for name in series.shown:
            counter, labels = self._counters[name]
            counter.remove(node, *labels)
        for histogram in self._histograms.values():
            histogram.remove(node)
        while len(self._swept) > MAX_REMEMBERED:
            self._swept.popitem(last=False)

    def _bring_back(self, node: str) -> CounterSeries | None:
        series = self._swept.pop(node, None)
        for name, value in series.shown.items() if series is not None else ():
            self._counter(node, name).inc(value)
        return series

    def _counter(self, node: str, name: str) -> Counter:
        counter, labels = self._counters[name]
        return counter.labels(node, *labels)

    def _set_gauges(self, report: NodeReport) -> None:
        place = (report.node, report.role)
        self._shown[report.node] = report.role
        for state in PageState:
            self._pages.labels(*place, state).set(report.pages.get(state, 0))
        for row_state in RowState:
            self._rows.labels(*place, row_state).set(report.rows.get(row_state, 0))
        for name, gauge in self._gauges.items():
            gauge.labels(*place).set(getattr(report, name))

    def _add_counters(self, report: NodeReport) -> None:
        series = self._series.get(report.node) or self._bring_back(report.node) or CounterSeries(report.epoch)
        self._series[report.node] = series
        before = series.totals if series.epoch == report.epoch else {}
        known = {name: value for name, value in report.counters.items() if name in self._counters}
        for name, total in known.items():
            more = max(0.0, total - before.get(name, 0.0))
            if more or name not in series.shown:  # finding a counter is the costliest part of an update
                self._counter(report.node, name).inc(more)
                series.shown[name] = series.shown.get(name, 0.0) + more
        series.epoch, series.totals, series.seen_at = report.epoch, known, None

    def _observe(self, node: str, name: str, samples: Sequence[float]) -> None:
        histogram = self._histograms[name].labels(node) if name in self._histograms else self._queue(name)
        if histogram is not None:
            for sample in samples:
                histogram.observe(sample)

    def _queue(self, name: str) -> Histogram | None:
        stage = name.removeprefix(QUEUE_PREFIX)
        return self._queues.labels(stage) if name.startswith(QUEUE_PREFIX) and stage in QUEUE_STAGES else None
