"""Clusters in virtual time whose nodes tell the router of their steps, and of which some are slow for a while.

The planner's cluster: production placement, policies and schedulers, nodes that are made of step times.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import Profile, StepShape
from deploy.tools.plan.sim_cluster import SimCluster, SimNode
from deploy.tools.plan.tokens import SimTokens
from deploy.tools.traffic.figures.summary import Summary, summarize
from deploy.tools.traffic.load_plan import LoadPlan
from router.fleet.prompt_cost import COUNTERS
from router.fleet.slowness import STEP_SECONDS, Share
from router.policy.placement import Placer
from router.policy.policies import make_policy
from shared.core.request import RequestState
from shared.wire.messages import Heartbeat, NodeLoad

HEARTBEAT_S = 0.5


@dataclass(frozen=True, slots=True)
class Slow:
    """From `begin` to `end` a node's steps take `times` as long."""

    times: float
    begin: float = 0.0
    end: float = float("inf")


@dataclass(slots=True)
class Told:
    """What a node has measured. `samples`: since its last report."""

    prompts: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    samples: list[float] = field(default_factory=list)


class TellingCluster(SimCluster):
    """`measures`: whether reports have step times. `shares`: (time, node, share) of each change."""

    def __init__(
        self,
        layout: ClusterLayout,
        profile: Profile,
        tokens: SimTokens,
        policy: str,
        slow: Mapping[str, Slow],
        *,
        measures: bool,
    ) -> None:
        self._slow, self._measures = slow, measures
        self._told = [Told() for _ in range(layout.num_nodes)]
        self.shares: list[tuple[float, str, Share]] = []
        self.picked: list[tuple[float, str, int]] = []  # (time, node, its open sequences) of decode nodes
        super().__init__(layout, profile, tokens)
        self._placer = Placer(self._registry, make_policy(policy), layout.local_tokens)
        for number in range(layout.num_nodes):
            begin = HEARTBEAT_S * number / layout.num_nodes
            self._at(begin, lambda number=number: self._beat(number))  # type: ignore[misc]

    def _seconds_of(self, number: int) -> Callable[[StepShape, float], float]:
        whole = super()._seconds_of(number)

        def seconds(shape: StepShape, begin: float) -> float:
            slow = self._slow.get(self.nodes[number].node.node_id)
            times = slow.times if slow is not None and slow.begin <= begin < slow.end else 1.0
            took, told = times * whole(shape, begin), self._told[number]
            told.samples.append(took)
            if shape.pairs:
                told.prompts = [sum(both) for both in zip(told.prompts, (1, shape.tokens, took), strict=True)]
            return took

        return seconds

    def _beat(self, number: int) -> None:
        node, told = self.nodes[number], self._told[number]
        load = load_of(node, told if self._measures else Told())
        told.samples = []
        self._registry.heartbeat(Heartbeat(node.node.node_id, 1, load, False), self.now)
        share = node.node.figures.slowness.take_news()
        if share is not None:
            self.shares.append((self.now, node.node.node_id, share))
        if node.node.role == "decode":
            self.picked.append((self.now, node.node.node_id, node.node.ours.open_sequences))
        self._at(self.now + HEARTBEAT_S, lambda: self._beat(number))

    def sequences(self, begin: float, end: float = float("inf")) -> dict[str, float]:
        """Return the mean number of open sequences of each decode node in that time."""
        by_node: dict[str, list[int]] = {}
        for at, name, count in self.picked:
            if begin <= at < end:
                by_node.setdefault(name, []).append(count)
        return {name: sum(counts) / len(counts) for name, counts in by_node.items()}


def load_of(node: SimNode, told: Told) -> NodeLoad:
    scheduler = node.timed.scheduler
    kv, waiting = scheduler.queues.budget.kv, [*scheduler.queues.waiting, *(handoff.target for handoff in node.offers)]
    running = sum(req.state is RequestState.RUNNING for req in scheduler.queues.requests.values())
    total = kv.rows.num_total
    taken = min(total, len(scheduler.queues.requests) - len(scheduler.queues.waiting))
    rows = {"running": running, "prefilling": taken - running, "free": total - taken}
    num_tokens = sum(req.num_tokens for req in waiting)
    counters = dict(zip(COUNTERS, told.prompts, strict=True))
    pages = {state.value: count for state, count in kv.gauges().items()}
    samples = {STEP_SECONDS: told.samples[:512]} if told.samples else {}
    kept, num_pages = scheduler.capacity.keep_free(), kv.allocator.num_total
    return NodeLoad(num_pages, pages, total, rows, len(waiting), num_tokens, 1, counters, samples, {}, "", kept)


def play_telling(
    layout: ClusterLayout,
    profile: Profile,
    tokens: SimTokens,
    plan: LoadPlan,
    *,
    policy: str = "least_load",
    slow: Mapping[str, Slow] | None = None,
    measures: bool = True,
) -> tuple[Summary, TellingCluster]:
    world = TellingCluster(layout, profile, tokens, policy, slow or {}, measures=measures)
    driver = plan.load.driver([], plan.truth.every)
    records = world.play(driver, plan.load.duration_s + plan.drain_s)
    assert all(record.is_whole for record in records), [record.error for record in records if record.error]
    return summarize(records, plan.window(records), plan.slo, plan.reader, plan.load.seed), world


def flat(profile: Profile, seconds: float) -> Profile:
    """Steps that take as long whatever is in them, as on a GPU that reads its weights."""
    costs = replace(profile.nodes[1].alone, rise=(seconds, seconds * 1.0001))
    return replace(profile, nodes={1: replace(profile.nodes[1], alone=costs)}, paths={1: profile.paths[1]})
