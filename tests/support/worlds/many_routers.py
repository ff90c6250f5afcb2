"""Several routers that place requests on the same nodes, in a time of their own: production registries, placers and
policies; nodes that are books with a speed, and tell each router of themselves once in a heartbeat.

    arrival -> one of the routers -> place, occupy -> prefill node: prompts one after another -> decode node: its time
"""

from __future__ import annotations

import heapq
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.fleet.registry import Registry
from router.policy.interface import Wanted
from router.policy.placement import Placer
from router.policy.policies import make_policy
from router.requests.attempt import Attempt
from router.requests.new_request import NewRequest
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Heartbeat, Hello, NodeLoad
from shared.wire.parts import OthersLoad
from shared.wire.peers import peer_name
from tests.support.worlds.router_rig import FINGERPRINT

HEARTBEAT_S = 0.5
ROWS = 256


@dataclass(frozen=True, slots=True)
class Traffic:
    """Poisson arrivals of `rate` a second for `duration_s`, each at a router by `shares`."""

    rate: float
    duration_s: float = 120.0
    prompt_tokens: int = 200
    decode_s: float = 4.0
    shares: tuple[float, ...] = (1.0, 1.0, 1.0)


@dataclass(eq=False, slots=True)
class Work:
    """One request on a node. `of`: its router."""

    of: int
    num_tokens: int = 0


@dataclass(eq=False)
class BookNode:
    """A node as its books have it. Prompts take their time one after another, sequences all at once."""

    name: str
    role: str
    tokens_per_s: float
    prompts: list[Work] = field(default_factory=list)
    sequences: list[Work] = field(default_factory=list)
    busy_until: float = 0.0

    def load(self) -> NodeLoad:
        rows = {"running": len(self.sequences), "free": ROWS - len(self.sequences)}
        waiting = sum(work.num_tokens for work in self.prompts)
        return NodeLoad(10_000, {"free": 10_000}, ROWS, rows, len(self.prompts), waiting, 1, {}, {}, {}, "")

    def others(self, router: int) -> OthersLoad:
        prompts = [work for work in self.prompts if work.of != router]
        sequences = [work for work in self.sequences if work.of != router]
        num_tokens = sum(work.num_tokens for work in prompts)
        routers = {work.of for work in (*prompts, *sequences)}
        return OthersLoad(len(routers), len(prompts) + len(sequences), len(sequences), num_tokens)


class Site:
    """`spread`: of the running sequences, at each arrival, how many the fullest node had beyond its share."""

    def __init__(self, policy: str, num_routers: int, prefills: int, decodes: int, seed: int) -> None:
        self.now, self._due, self._count = 0.0, [], 0  # type: ignore[var-annotated]
        self._rng = random.Random(seed)
        self.nodes = [BookNode(f"p{i}", "prefill", 4000.0) for i in range(prefills)]
        self.nodes += [BookNode(f"d{i}", "decode", 4000.0) for i in range(decodes)]
        self.registries = [Registry(1e9, router_id=f"router-{index}") for index in range(num_routers)]
        self._placers = [Placer(registry, make_policy(policy), 0) for registry in self.registries]
        self.spread: list[float] = []
        self.waits: list[float] = []
        for node in self.nodes:
            for registry in self.registries:
                told = Hello(node.role, node.name, 1, "tcp://n", FINGERPRINT, 4096, ROWS, "h", ["zmq"], 1, [])
                registry.hello(peer_name(node.name, 1), told, 0.0)
            self._at(self._rng.uniform(0.0, HEARTBEAT_S), lambda node=node: self._beat(node))  # type: ignore[misc]

    def _at(self, when: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (when, self._count, what))

    def _beat(self, node: BookNode) -> None:
        for index, registry in enumerate(self.registries):
            beat = Heartbeat(node.name, 1, node.load(), False, others=node.others(index))
            registry.heartbeat(beat, self.now)
        self._at(self.now + HEARTBEAT_S, lambda: self._beat(node))

    def play(self, traffic: Traffic) -> Site:
        at = 0.0
        while (at := at + self._rng.expovariate(traffic.rate)) < traffic.duration_s:
            (router,) = self._rng.choices(range(len(traffic.shares)), traffic.shares)
            seconds = self._rng.expovariate(1 / traffic.decode_s)
            num_tokens = round(traffic.prompt_tokens * self._rng.uniform(0.5, 1.5))
            of = router % len(self.registries)
            self._at(at, lambda of=of, n=num_tokens, s=seconds: self._arrive(of, n, s))  # type: ignore[misc]
        while self._due and self.now < traffic.duration_s:
            self.now, _, what = heapq.heappop(self._due)
            what()
        return self

    def _arrive(self, of: int, num_tokens: int, seconds: float) -> None:
        placement = self._placers[of].place(Wanted(num_tokens, self.now))
        attempt = Attempt(NewRequest([0] * num_tokens, 1, SamplingParams(max_tokens=1000), 0), None)
        attempt.occupy(placement.prefill, placement.decode)
        prefiller, runner = self._node(attempt.prefiller), self._node(attempt.runner)
        prompt, sequence = Work(of, num_tokens), Work(of)
        prefiller.prompts.append(prompt)
        runner.sequences.append(sequence)
        start = max(self.now, prefiller.busy_until)
        self.waits.append(start - self.now)
        prefiller.busy_until = start + num_tokens / prefiller.tokens_per_s
        self._note(runner.role)

        def computed() -> None:
            attempt.prompt_done()
            prefiller.prompts.remove(prompt)
            self._at(self.now + seconds, ended)

        def ended() -> None:
            attempt.release()
            runner.sequences.remove(sequence)

        self._at(prefiller.busy_until, computed)

    def _node(self, node: object) -> BookNode:
        return next(one for one in self.nodes if one.name == node.node_id)  # type: ignore[attr-defined]

    def _note(self, role: str) -> None:
        counts = [len(node.sequences) for node in self.nodes if node.role == role]
        self.spread.append(max(counts) - sum(counts) / len(counts))

    @property
    def beyond_share(self) -> float:
        """Sequences that the fullest node had beyond the mean, on average."""
        return statistics.mean(self.spread)

    @property
    def wait_s(self) -> float:
        return statistics.mean(self.waits)


def figures(policy: str, num_routers: int, traffic: Traffic, seeds: Sequence[int] = range(4)) -> tuple[float, float]:
    """Return (sequences beyond its share on the fullest node, seconds that a prompt waits)."""
    sites = [Site(policy, num_routers, 4, 4, seed).play(traffic) for seed in seeds]
    return statistics.mean(site.beyond_share for site in sites), statistics.mean(site.wait_s for site in sites)
