"""The processes of the simulated cluster: the production router and nodes, each on its own clock, network port and
(for nodes) engine on HashLM. A host outlives its process: it can be killed and started again with a new epoch.
"""

from __future__ import annotations

import io
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from prometheus_client import CollectorRegistry

from decode_node.side import DecodeSide
from prefill_node.pulls import TRANSPORTS
from prefill_node.side import PrefillSide
from router.dispatch.dispatcher import Dispatcher, DispatchLimits
from router.dispatch.gateway import TICK_S, Gateway
from router.fleet.registry import ROLES, Registry
from router.policy.placement import Placer
from router.policy.policies import make_policy
from router.requests.journal import Journal
from shared.node.assembly.fingerprint import make_fingerprint
from shared.node.loop.context import NodeContext, NodeFacts
from shared.node.loop.daemon import Daemon
from shared.node.loop.node import Node, Side
from shared.node.records.request_spans import RequestSpans
from shared.node.records.tombstones import Tombstones
from shared.node.routers.dialled import Routers
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.metric_names import PULL_PREFIX
from shared.observe.metrics import ClusterMetrics
from shared.observe.node_metrics import NodeMetrics
from shared.observe.step_records import StepRecords
from shared.transfer.transports import make_receiver, make_sender
from shared.wire.peers import Inbound, peer_name
from tests.support.cores.core_rig import MAX_CONTEXT, make_core
from tests.support.cores.simulated_streams import World
from tests.support.cores.twin_groups import TwinGroup
from tests.support.oracles.grammar_oracle import InItsTime, make_grammars
from tests.support.sim.plan import ClusterPlan, NodePlan, RouterPlan
from tests.support.sim.wire import Network, Port

DAWN_US = 1_700_000_000_000_000  # of the hosts' wall clocks
TIMED_EVERY = 7
PULL_NAMES = (PULL_PREFIX, "loans_")  # of counters
PULL_TOKEN_S = 0.005  # of computing, before nodes have measured it
COMPILE_S = 0.05  # of a grammar, at most
MOST_BEHIND = 3  # rounds in a row in which a device may run nothing


@dataclass
class Clock:
    """A host's idea of seconds: it may run fast or slow, and stand wrong."""

    net: Network
    offset: float = 0.0
    rate: float = 1.0
    base: float = 0.0

    def __call__(self) -> float:
        return self.offset + self.rate * (self.net.timers.now - self.base)

    def skew(self, rate: float) -> None:
        """From now on; no jump: a monotonic clock never jumps back."""
        self.offset, self.base, self.rate = self(), self.net.timers.now, rate


class Sleeper:
    """Calls `round` at the earliest time it was asked for."""

    def __init__(self, net: Network, round: Callable[[], None]) -> None:
        self._net, self._round = net, round
        self._due = float("inf")

    def at(self, when: float) -> None:
        if when < self._due:
            self._due = when
            self._net.timers.at(when, lambda: self._run(when))

    def _run(self, when: float) -> None:
        if when == self._due:
            self._due = float("inf")
            self._round()


class QuietLogger(Logger):
    """Warnings go into the trace; nothing is written."""

    def __init__(self, name: str, net: Network) -> None:
        super().__init__(name, io.StringIO(), level="warning")
        self._net = net
        self.told: list[str] = []

    def write(self, level: str, message: str, fields: dict[str, object]) -> None:
        if self.enabled(level):
            self.told.append(message)
            said = " ".join(f"{name}={value}" for name, value in fields.items())
            self._net.trace.note(self._net.timers.now, self.node, f"{level}: {message} {said}")


class NodeHost:
    """One machine with one node. `node` is None while the process is dead."""

    def __init__(self, net: Network, plan: NodePlan, cluster: ClusterPlan, rng: random.Random) -> None:
        self.net, self.plan, self.cluster, self.rng = net, plan, cluster, rng
        self.name = plan.node_id
        self.clock = Clock(net, offset=plan.clock_offset, rate=plan.clock_rate)
        self.wall_offset_us = plan.wall_offset_us
        self.lives = 0
        self._compiling = random.Random(f"{cluster.seed} {plan.node_id}")
        self.slowness = 1.0
        self.node: Node | None = None
        self.daemon: Daemon | None = None
        self.port: Port | None = None
        self.world: World | None = None
        self.num_steps = 0  # of the lives before this one
        self.engine_s = 0.0  # processor time inside the engine's loop, from a sample of its steps
        self._num_timed = 0
        self.num_behind = 0  # rounds in a row
        self.is_stuck = False  # its system answers heartbeats, its loop does nothing
        self.num_pauses = 0  # times that it was frozen or stuck
        self.pulls: Counter[str] = Counter()  # of the lives before this one, by outcome
        self.on_round: Callable[[NodeHost], None] = lambda host: None
        self.on_life: Callable[[str, StepRecords, Clock], None] = lambda name, records, clock: None

    def pulls_of_this_life(self) -> Counter[str]:
        """Return how often each end of a pull and of a loan came about."""
        told = self.node.ctx.metrics.counters() if self.node is not None else {}
        return Counter({name: int(count) for name, count in told.items() if name.startswith(PULL_NAMES) and count})

    # ---- life and death

    def start(self) -> None:
        self.lives += 1
        self.is_stuck, self.num_behind = False, 0
        epoch = DAWN_US + self.wall_offset_us + int(1e6 * self.net.timers.now)
        endpoint = f"tcp://{self.name}:{9000 + self.lives}"
        self.sleeper = Sleeper(self.net, self._round)
        self.port = Port(self.net, self.name, peer_name(self.name, epoch), endpoint, self._wake)
        self.port.name = f"{self.name}.{self.lives}"
        self.node = self._build(epoch, endpoint)
        self.on_life(self.port.name, self.node.ctx.core.engine.records, self.clock)
        log = QuietLogger(self.port.name, self.net)
        self.daemon = Daemon(self.node, self.port, log, self.cluster.drain_s, self.clock)
        self.net.trace.note(self.net.timers.now, self.port.name, f"starts as {self.port.identity}")
        self.daemon.dial_routers()
        self._wake()

    def _build(self, epoch: int, endpoint: str) -> Node:
        plan, lease_s = self.plan, self.cluster.lease_s
        self.world = World(self.rng.getrandbits(32)) if plan.knobs.backend == "simulated" else None
        core = make_core(plan.knobs, self.world, grammars=make_grammars(InItsTime(self._when_compiled), self._wake))
        core.loop.step = self._timed(core.loop.step)  # type: ignore[method-assign]
        drafter = core.engine.worker.drafter
        facts = NodeFacts(
            role=plan.role,
            node_id=plan.node_id,
            epoch=epoch,
            endpoint=endpoint,
            host_id="here",
            transports=plan.transports,
            fingerprint=make_fingerprint(
                *(core.model.spec, core.pool.planes, plan.knobs.page_size, drafter, "sim"),
                core.scheduler.intake.grammar_version,
            ),
            max_context=MAX_CONTEXT,
            max_running=plan.knobs.max_running,
            max_waiting=plan.max_waiting,
            lease_s=lease_s,
            silence_s=self.cluster.silence_s,
        )
        log = LogOnce(QuietLogger(f"{self.name}.{self.lives}", self.net), clock=self.clock)
        routers = Routers(tuple(router.endpoint for router in self.cluster.routers))
        books = (routers, Tombstones(lease_s), NodeMetrics(), log)
        spans = RequestSpans(None, core.engine.records)
        group = partial(TwinGroup, wake=self._wake)
        ctx = NodeContext(core, facts, *books, clock=self.clock, make_group=group, spans=spans)
        if plan.role == "prefill":
            senders = {name: make_sender(name, core.pool) for name in plan.transports}
            receivers = {name: make_receiver(name, core.pool) for name in plan.transports if name in TRANSPORTS}
            return Node(ctx, PrefillSide(ctx, senders, receivers))
        return Node(ctx, DecodeSide(ctx, {name: make_receiver(name, core.pool) for name in plan.transports}))

    def _timed(self, step: Callable[[bool], bool]) -> Callable[[bool], bool]:
        def timed(block: bool = False) -> bool:
            self._num_timed += 1
            if self._num_timed % TIMED_EVERY:  # to ask for the processor's time is slow
                return step(block)
            started = time.process_time()
            try:
                return step(block)
            finally:
                self.engine_s += TIMED_EVERY * (time.process_time() - started)

        return timed

    def kill(self, *, in_the_dark: bool = False) -> None:
        assert self.node is not None and self.port is not None
        if in_the_dark:
            self.net.dark.add(self.name)
        self.num_steps += self.node.ctx.core.loop.num_steps
        self.pulls += self.pulls_of_this_life()
        self.port.die(in_the_dark=in_the_dark)
        close_groups(self.node.side, in_the_dark=in_the_dark)
        self.node.ctx.core.close()
        self.node = self.daemon = None

    def restart(self) -> None:
        self.net.dark.discard(self.name)
        if self.node is None:
            self.start()

    def freeze(self) -> None:
        assert self.port is not None
        self.port.is_frozen = True
        self.num_pauses += 1

    def stick(self) -> None:
        self.is_stuck = True
        self.num_pauses += 1

    def thaw(self) -> None:
        if self.port is not None and self.port.is_frozen:
            self.port.thaw()
            self._wake()

    def skew(self, rate: float) -> None:
        """Change the clock's rate. The node sleeps by the same clock, so it wakes earlier if the clock runs faster."""
        self.clock.skew(rate)
        if self.node is not None:
            self._sleep()

    def come_loose(self) -> None:
        if self.is_stuck:
            self.is_stuck = False
            self._wake()

    @property
    def is_up(self) -> bool:
        alive = self.node is not None and self.port is not None
        return alive and not self.port.is_frozen and not self.is_stuck  # type: ignore[union-attr]

    # ---- its loop

    def _wake(self) -> None:
        self.sleeper.at(self.net.timers.now + self.rng.uniform(0.0, 0.0005) * self.slowness)

    def _when_compiled(self, known: Callable[[], None]) -> None:
        self.net.timers.at(self.net.timers.now + self._compiling.uniform(0.0, COMPILE_S) * self.slowness, known)

    def _round(self) -> None:
        if not self.is_up:
            return
        assert self.node is not None and self.daemon is not None and self.port is not None
        self.port.was_refused = False
        self.daemon.round()
        self.on_round(self)
        if self.daemon.finished:
            self._end()
            return
        self._plan_next()

    def _plan_next(self) -> None:
        """A step takes its time."""
        assert self.node is not None and self.port is not None
        core = self.node.ctx.core
        streams_busy = self._let_device_catch_up()
        if self.node.busy or self.port.was_refused or streams_busy or not core.loop.idle:
            self.sleeper.at(self.net.timers.now + self.plan.step_s * self.slowness * self.rng.uniform(0.5, 1.5))
        self._sleep()

    def _let_device_catch_up(self) -> bool:
        """Return whether its streams lagged behind. They catch up at random, and after MOST_BEHIND rounds: a node's
        timeouts allow for a slow device, not for one that stands still."""
        assert self.node is not None
        streams = self.node.ctx.core.streams.all()
        if self.world is None or not any(stream.items for stream in streams):  # type: ignore[attr-defined]
            self.num_behind = 0
            return False
        self.num_behind += 1
        if self.rng.random() < 0.4 or self.num_behind > MOST_BEHIND:
            self.world.run_until_idle()
            self.num_behind = 0
        return True

    def _sleep(self) -> None:
        """Sleep until the node has something to do, by its own clock."""
        assert self.node is not None
        wait = max(0.001, self.node.wakes_at - self.clock()) / self.clock.rate
        self.sleeper.at(self.net.timers.now + min(wait, self.node.ctx.facts.heartbeat_s))

    def _end(self) -> None:
        """Drained: it says goodbye and goes. A supervisor starts it again, in another role if it was told so."""
        assert self.daemon is not None and self.node is not None
        self.daemon.say_goodbye()
        self.node.ctx.core.kv.check_integrity(idle=self.node.idle)
        leaving = self.node.ctx.leaving
        then = leaving.then if leaving else ""
        if then in ROLES:
            knobs = replace(self.plan.knobs, shared_memory=then == "prefill" and "shm" in self.plan.transports)
            self.plan = replace(self.plan, role=then, knobs=knobs)
        self.kill()
        self.net.timers.after(self.rng.uniform(0.1, 1.0), self.restart)


def close_groups(side: Side, *, in_the_dark: bool) -> None:
    """What a system does for a process that ends, unless it ends with it: its connections are closed."""
    if in_the_dark:
        table = side.groups.table if isinstance(side, PrefillSide) else side.transfers.groups.table  # type: ignore[attr-defined]
        for pair in table:
            pair.group.vanish()
    side.close()


class RouterHost:
    """One machine with one router."""

    def __init__(self, net: Network, plan: RouterPlan, cluster: ClusterPlan, rng: random.Random) -> None:
        self.net, self.plan, self.cluster, self.rng = net, plan, cluster, rng
        self.name = plan.name or plan.router_id
        self.lives = 0
        self.gateway: Gateway | None = None
        self.before: Callable[[RouterHost, Inbound], None] = lambda host, inbound: None
        self.on_round: Callable[[RouterHost], None] = lambda host: None
        self.on_tick: Callable[[RouterHost], None] = lambda host: None

    def start(self) -> None:
        self.lives += 1
        cluster, timers = self.cluster, self.net.timers
        identity = self.identity
        self.sleeper = Sleeper(self.net, self._round)
        self.port = Port(self.net, self.name, f"{self.name}@{self.lives:x}", self.plan.endpoint, self._wake)
        policy = make_policy(self.plan.policy)
        follows_caches, router_id = policy.reads_caches or cluster.pulls, self.plan.router_id
        self.registry = Registry(cluster.silence_s, follows_caches=follows_caches, router_id=router_id)
        self.journal = Journal(lambda: "")  # a seed replays exactly
        placer = Placer(self.registry, policy, cluster.local_tokens)
        limits = DispatchLimits(
            *(cluster.max_open, cluster.max_attempts, cluster.request_timeout_s, cluster.resume_wait_s),
            pulls_prefixes=cluster.pulls,
            assumed_token_s=PULL_TOKEN_S,
        )
        dispatcher = Dispatcher(identity, self.registry, placer, self.journal, limits)
        metrics = ClusterMetrics(CollectorRegistry())
        self.log = QuietLogger(self.port.identity, self.net)
        clock = Clock(self.net, offset=self.rng.uniform(0, 1000))
        self.gateway = Gateway(identity, self.registry, dispatcher, self.port, metrics, self.log, clock)
        self.net.trace.note(timers.now, self.port.name, "starts")
        timers.after(TICK_S, lambda port=self.port: self._tick(port))  # type: ignore[misc]

    @property
    def identity(self) -> tuple[str, int]:
        """What it calls itself: id and epoch."""
        return self.plan.router_id, self.plan.first_epoch + self.lives

    def kill(self) -> None:
        self.port.die(in_the_dark=False)
        self.gateway = None

    def restart(self) -> None:
        if self.gateway is None:
            self.start()

    def _wake(self) -> None:
        self.sleeper.at(self.net.timers.now)

    @property
    def is_frozen(self) -> bool:
        return self.gateway is not None and self.port.is_frozen

    def freeze(self) -> None:
        self.port.is_frozen = True

    def thaw(self) -> None:
        """Its timers are due at once, and whatever came meanwhile is there."""
        if self.is_frozen:
            self.port.thaw()
            self._wake()
            self._tick(self.port)

    def _round(self) -> None:
        if self.gateway is None or self.is_frozen:
            return
        for inbound in self.port.poll():
            self.before(self, inbound)
            self.gateway.handle(inbound)
            self.on_round(self)

    def _tick(self, port: Port) -> None:
        if self.gateway is None or port is not self.port or self.is_frozen:
            return
        self.gateway.tick()
        self.on_round(self)
        self.on_tick(self)
        self.net.timers.after(TICK_S, lambda: self._tick(port))
