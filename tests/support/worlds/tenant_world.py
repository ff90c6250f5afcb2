"""Tenants before a router in virtual time: its real dispatcher, and nodes that only take time.

A node runs `ROWS` requests at once, each for as long as its tokens take, and has a queue of its own, in order of
arrival. It reports twice a second. Clients come at random, want their answer within a time, and do not come back.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from router.fleet.registry import RegisteredNode
from router.requests.effects import Effects, Failure, Update
from router.tenants.tenant import Tenant
from shared.core.errors import BatonError
from shared.wire.messages import Abort, Generate, Heartbeat, NodeLoad, SequenceEnd, TokenRun, Tokens
from tests.support.worlds.router_rig import RouterRig

ROWS = 8
TOKEN_S = 0.02
BEAT_S, TICK_S = 0.5, 0.25
PROMPT = 16


@dataclass(frozen=True)
class Load:
    """What one tenant asks for: so many requests a second of up to so many tokens, of which a share is used."""

    tenant: Tenant
    rate: float
    num_tokens: int = 20
    share: float = 1.0
    within_s: float = 3.0


@dataclass
class TimedNode:
    node: RegisteredNode
    waiting: deque[Generate] = field(default_factory=deque)
    running: dict[str, Generate] = field(default_factory=dict)


@dataclass
class Result:
    """By tenant. `in_time`: answers that came within their clients' time."""

    asked: Counter[str] = field(default_factory=Counter)
    in_time: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)  # of these answers
    used: Counter[str] = field(default_factory=Counter)  # by all that ended while clients came, with their prompts
    errors: Counter[str] = field(default_factory=Counter)
    most_open: int = 0
    most_at_nodes: int = 0
    ended_at: float = 0.0


class World:
    """The router, its nodes and their clients. Owned by one test."""

    def __init__(self, loads: Sequence[Load], *, nodes: int = 2, seed: int = 1, max_queued: int = 200) -> None:
        self.rng, self.loads = random.Random(seed), loads
        self.rig = RouterRig(max_open=1000, max_queued=max_queued, local_tokens=1000)
        self.nodes = [TimedNode(self.rig.join("decode", f"d{number}")) for number in range(nodes)]
        self.by_peer = {one.node.peer: one for one in self.nodes}
        self.result, self.until = Result(), 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._asked: dict[str, tuple[Load, float]] = {}  # by rid: whose, and until when

    def run(self, seconds: float) -> Result:
        """Clients come for so long; then everything ends."""
        self.until = seconds
        for one in self.nodes:
            self._beat(one, seconds)
        self._tick(seconds)
        for load in self.loads:
            self._at(self.rng.expovariate(load.rate), lambda load=load: self._come(load, seconds))  # type: ignore[misc]
        while self._agenda:
            self.rig.now, _, action = heapq.heappop(self._agenda)
            action()
        self.result.ended_at = self.rig.now
        self.rig.check_quiet()
        return self.result

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (when, next(self._order), action))

    def _come(self, load: Load, until: float) -> None:
        self._ask(load)
        again = self.rig.now + self.rng.expovariate(load.rate)
        if again < until:
            self._at(again, lambda: self._come(load, until))

    def _ask(self, load: Load) -> None:
        result, name = self.result, load.tenant.name
        result.asked[name] += 1
        try:
            self.rig.open([1] * PROMPT, max_tokens=load.num_tokens, tenant=load.tenant, within_s=load.within_s)
        except BatonError as error:
            result.errors[error.code] += 1
            return
        (rid,) = [request.rid for request in self.rig.journal.all() if request.rid not in self._asked][-1:] or [""]
        self._asked[rid] = (load, self.rig.now + load.within_s)
        result.most_open = max(result.most_open, len(self.rig.journal))
        self._apply(self.rig.opened)

    def _apply(self, effects: Effects) -> None:
        for peer, message in effects.sends:
            if isinstance(message, Generate):
                self.by_peer[peer].waiting.append(message)
                self._fill(self.by_peer[peer])
            elif isinstance(message, Abort):
                one = self.by_peer[peer]
                one.waiting = deque(generate for generate in one.waiting if generate.key.rid != message.key.rid)
                one.running.pop(message.key.rid, None)
                self._fill(one)
        for news in effects.news:
            if isinstance(news, Failure):
                self.result.errors[news.error.code] += 1
            elif isinstance(news, Update) and news.end is not None:
                self._ended(*self._asked[news.rid], news.end.num_output_tokens)
        at_nodes = max(len(one.waiting) + len(one.running) for one in self.nodes)
        self.result.most_at_nodes = max(self.result.most_at_nodes, at_nodes)

    def _ended(self, load: Load, until: float, num_tokens: int) -> None:
        name = load.tenant.name
        if self.rig.now <= self.until:
            self.result.used[name] += PROMPT + num_tokens
        if self.rig.now <= until:
            self.result.in_time[name] += 1
            self.result.tokens[name] += num_tokens

    def _fill(self, one: TimedNode) -> None:
        while one.waiting and len(one.running) < ROWS:
            generate = one.waiting.popleft()
            rid = generate.key.rid
            one.running[rid] = generate
            load = next(load for load in self.loads if load.num_tokens == generate.sampling.max_tokens)
            num = max(1, round(load.share * load.num_tokens))
            self._at(self.rig.now + num * TOKEN_S, partial(self._end, one, generate, num))

    def _end(self, one: TimedNode, generate: Generate, num: int) -> None:
        if one.running.pop(generate.key.rid, None) is None:
            return
        node, key = one.node, generate.key
        runs, ends = [TokenRun(key, 0, [1] * num, [])], [SequenceEnd(key, "stop", num, 0, "", "")]
        self._fill(one)
        self._apply(self.rig.dispatcher.tokens(Tokens(node.node_id, node.hello.epoch, runs, ends), self.rig.now))

    def _beat(self, one: TimedNode, until: float) -> None:
        running, waiting = len(one.running), len(one.waiting)
        rows = {"free": ROWS - running, "running": running}
        load = NodeLoad(100, {"free": 100}, ROWS, rows, waiting, waiting * PROMPT, 1, {}, {}, {}, "")
        self.rig.registry.heartbeat(Heartbeat(one.node.node_id, one.node.hello.epoch, load, False), self.rig.now)
        self._apply(self.rig.beat(one.node))
        if self.rig.now < until + 30.0:
            self._at(self.rig.now + BEAT_S, lambda: self._beat(one, until))

    def _tick(self, until: float) -> None:
        self._apply(self.rig.dispatcher.tick(self.rig.now))
        if self.rig.now < until + 30.0:
            self._at(self.rig.now + TICK_S, lambda: self._tick(until))
