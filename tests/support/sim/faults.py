"""Breaks things: hosts, paths, clocks, single messages. Aims at hosts that serve an open request, and counts what hit
one: a fault that nobody noticed proves nothing."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from prefill_node.side import PrefillSide
from shared.core.request import RequestState
from shared.model.math.interface import Model
from shared.wire.codec import encode
from shared.wire.messages import Drain, Generate, Message
from tests.support.sim.hosts import NodeHost, RouterHost
from tests.support.sim.plan import GENERATE_FAULTS, PULL_FAULTS, FaultPlan
from tests.support.sim.wire import MAX_STRAY_S, Conn, Harshness, Network

MAX_TRIES, RETRY_S = 80, 0.025
AROUND_S = 0.05  # a cause in the ledger lasts at least so long
FRAME_BYTE_S = (1e-4, 2e-4)  # a page of 16 tokens has 256 bytes or more
Then = Literal["", "stop", "restart", "prefill", "decode"]
AIM = 0.9  # share of faults that look for a host with open requests
NOT_COUNTED = ("forced retraction",)  # no fault of a network or a process
COUNTED_LATER = ("slow frames",)  # when the first page waits


@dataclass
class Faults:
    """`hits`: faults by kind that hit an open request. `first_at`: when the first one was tried. `are_over`: nothing
    strikes any more, and what was set to strike later does not. `note`: the ledger's. `told_to_leave`: a node, and how
    long its requests may stay."""

    net: Network
    nodes: Sequence[NodeHost]
    routers: Sequence[RouterHost]
    rng: random.Random
    is_gentle: bool
    hits: Counter[str] = field(default_factory=Counter)
    first_at: float = float("inf")
    are_over: bool = False
    note: Callable[[str, frozenset[str], float, float, int], None] = lambda kind, hosts, begins, ends, life: None
    _leaving: set[tuple[str, int]] = field(default_factory=set)  # hosts in the life that ends
    _slow_ways: set[frozenset[str]] = field(default_factory=set)  # pairs of hosts between which no page has waited yet
    told_to_leave: Callable[[NodeHost, float], None] = lambda host, within_s: None
    came_to_nothing: Callable[[Generate], None] = lambda generate: None
    _for_generates: deque[str] = field(default_factory=deque)  # kinds, each of which waits for the next Generate

    def __post_init__(self) -> None:
        self.net.tamper = self._tamper

    def end(self) -> None:
        """All is well from now on: slow nodes, wrong clocks and failures that wait for their step too."""
        self.are_over = True
        self._for_generates.clear()
        self.net.heal()
        for host in self.nodes:
            host.thaw()
            host.come_loose()
            host.slowness = 1.0
            host.skew(host.plan.clock_rate)
            if host.node is not None:
                disarm(host.node.ctx.core.model)
        for router in self.routers:
            router.thaw()

    # ---- who is in use

    def engaged(self) -> list[NodeHost]:
        """Hosts that run a part of an open request, by name."""
        names = {
            node.node_id for host in self._living_routers() for r in host.journal.all() for node in r.attempt.nodes
        }
        return [host for host in self.nodes if host.name in names and host.is_up]

    def _living_routers(self) -> list[RouterHost]:
        return [host for host in self.routers if host.gateway is not None]

    def partners(self, host: NodeHost) -> list[str]:
        """Other hosts that an open request ties to this one."""
        names: list[str] = []
        for router in self._living_routers():
            for request in router.journal.all():
                ids = [node.node_id for node in request.attempt.nodes]
                if host.name in ids:
                    names += [router.name, *(name for name in ids if name != host.name)]
        return list(dict.fromkeys(names))

    def _count(self, kind: str, host: str, is_engaged: bool) -> None:
        self.net.trace.note(self.net.timers.now, host, f"FAULT {kind}{'' if is_engaged else ' (no open request)'}")
        self.first_at = min(self.first_at, self.net.timers.now)
        if is_engaged and kind not in (*NOT_COUNTED, *COUNTED_LATER):
            self.hits[kind] += 1

    # ---- messages

    def be_harsh(self, chances: Sequence[float]) -> None:
        self.net.harsh = Harshness(*chances)
        self.net.on_hit = self._message_hit
        if self.net.harsh.is_on:
            self.first_at = min(self.first_at, self.net.timers.now)

    def _message_hit(self, kind: str, message: Message, hosts: frozenset[str]) -> None:
        self._broke(kind, hosts, MAX_STRAY_S)
        if self._is_of_an_open_request(message):
            self.hits[kind] += 1

    def _tamper(self, message: Message, data: bytes, hosts: frozenset[str]) -> bytes | None:
        """Hit single Generates, which their connection brings in order and whole otherwise."""
        if not isinstance(message, Generate) or not self._for_generates:
            return data
        kind = self._for_generates.popleft()
        self._count(kind, min(hosts), True)
        self._broke(kind, hosts, AROUND_S)
        self.came_to_nothing(message)
        return spoilt(kind, message, data, self.rng)

    def _is_of_an_open_request(self, message: Message) -> bool:
        rids = {(key.router_id, key.router_epoch, key.rid) for key in keys_in(message)}
        hosts = self._living_routers()
        return any((*host.identity, request.rid) in rids for host in hosts for request in host.journal.all())

    # ---- hosts and paths

    def strike(self, fault: FaultPlan, tries: int = MAX_TRIES) -> None:
        """Waits a while for a victim that is worth it."""
        if self.are_over:
            return
        if fault.kind in ("router restart", "router freeze"):
            self._strike_router(fault)
            return
        if fault.kind in GENERATE_FAULTS:
            self._for_generates.append(fault.kind)
            return
        if fault.pair:
            self._strike_pair(fault.kind, fault.pair, fault.lasts)
            return
        candidates = self._candidates(fault)
        if (not candidates or self._is_too_much(fault)) and tries:
            self.net.timers.after(RETRY_S, lambda: self.strike(fault, tries - 1))
            return
        if not candidates or self._is_too_much(fault):
            return
        self.hit(self.rng.choice(candidates), fault)

    def _candidates(self, fault: FaultPlan) -> list[NodeHost]:
        if fault.kind in PULL_FAULTS:
            return in_a_pull(self.nodes, lends=fault.kind != "borrower dies")
        return self.engaged() if fault.draw < AIM else [host for host in self.nodes if host.is_up]

    def hit(self, host: NodeHost, fault: FaultPlan) -> None:
        self._count(fault.kind, host.name, host in self.engaged())
        self._acts()[fault.kind](host, fault)

    def _broke(self, kind: str, hosts: frozenset[str], lasts: float, life: int = 0) -> None:
        """Into the ledger, from now on."""
        now = self.net.timers.now
        self.note(kind, hosts, now, now + max(lasts, AROUND_S), life)

    def _strike_pair(self, kind: str, pair: tuple[str, str], lasts: float) -> None:
        """Two hosts that the plan names, in this order."""
        self._count(kind, pair[0], True)
        self._acts_on_paths()[kind](pair, lasts)

    def _is_too_much(self, fault: FaultPlan) -> bool:
        """Gentle: one node after the other, and never the last of them. A router may not know yet that one leaves."""
        return self.is_gentle and not all(host.is_up and self._stays(host) for host in self.nodes)

    def _stays(self, host: NodeHost) -> bool:
        return (host.name, host.lives) not in self._leaving and self._is_known(host)

    def _is_known(self, host: NodeHost) -> bool:
        assert host.node is not None
        facts = host.node.ctx.facts
        nodes = [router.registry.find(facts.node_id, facts.epoch) for router in self._living_routers()]
        return all(node is not None and node.is_there for node in nodes)

    def _acts(self) -> dict[str, Callable[[NodeHost, FaultPlan], None]]:
        return {
            "crash": self._crash,
            "power loss": self._power_loss,
            "partition": self._partition,
            "short partition": self._short_partition,
            "reset": self._reset,
            "half open": self._half_open,
            "freeze": self._freeze,
            "stuck loop": self._stick,
            "slow node": self._slow_node,
            "slow path": self._slow_path,
            "skew": self._skew,
            "stop signal": self._stop,
            "forced retraction": self._retract,
            "failed step": self._fail_step,
            "admin drain": self._admin_drain,
            "role change": self._change_role,
            "drain at one router": self._drain_at_one,
            "lender dies": self._die,
            "borrower dies": self._die,
            "lender freezes": self._freeze,
            **{kind: self._on_a_path(act) for kind, act in self._acts_on_paths().items()},
        }

    def _acts_on_paths(self) -> dict[str, Callable[[tuple[str, str], float], None]]:
        return {
            "one way": self._one_way,
            "no answer": self._no_answer,
            "full queue": self._fill_queue,
            "cut within": self._cut_within,
            "slow frames": self._slow_frames,
        }

    def _on_a_path(self, act: Callable[[tuple[str, str], float], None]) -> Callable[[NodeHost, FaultPlan], None]:
        def on_a_path(host: NodeHost, fault: FaultPlan) -> None:
            first, second = self.rng.sample(sorted(self._pair(host)), k=2)
            act((first, second), fault.lasts)

        return on_a_path

    def _strike_router(self, fault: FaultPlan) -> None:
        awake = [host for host in self._living_routers() if not host.is_frozen]
        if not awake:
            return
        host = self.rng.choice(awake)
        self._count(fault.kind, host.name, len(host.journal) > 0)
        self._broke(fault.kind, frozenset((host.name,)), fault.lasts)
        if fault.kind == "router freeze":
            host.freeze()
            self.net.timers.after(fault.lasts, host.thaw)
        else:
            host.kill()
            self.net.timers.after(min(fault.lasts, 2.0), host.restart)

    def _leaves(self, host: NodeHost, kind: str) -> None:
        """The ledger: until it has started again."""
        self._leaving.add((host.name, host.lives))
        self._broke(kind, frozenset((host.name,)), float("inf"), host.lives)

    def _crash(self, host: NodeHost, fault: FaultPlan) -> None:
        self._leaves(host, fault.kind)
        host.kill()
        self.net.timers.after(fault.lasts, host.restart)

    def _power_loss(self, host: NodeHost, fault: FaultPlan) -> None:
        """Nobody is told; and the clock of the machine may be wrong when it is back."""
        self._leaves(host, fault.kind)
        host.kill(in_the_dark=True)
        if self.rng.random() < 0.3:
            host.wall_offset_us -= self.rng.randint(10**6, 10**8)
        self.net.timers.after(fault.lasts, host.restart)

    def _die(self, host: NodeHost, fault: FaultPlan) -> None:
        """Under the kind that the ledger knows."""
        die, kind = (self._crash, "crash") if fault.draw < 0.5 else (self._power_loss, "power loss")
        die(host, replace(fault, kind=kind))

    def _pair(self, host: NodeHost) -> frozenset[str]:
        return frozenset((host.name, self.rng.choice(self.partners(host) or [self.routers[0].name])))

    def _partition(self, host: NodeHost, fault: FaultPlan) -> None:
        pair = self._pair(host)
        self._broke(fault.kind, pair, fault.lasts)
        self.net.blocked.add(pair)
        self.net.trace.note(self.net.timers.now, host.name, f"no path: {' - '.join(sorted(pair))}")
        self.net.timers.after(fault.lasts, lambda: self._reconnect(pair))

    def _reconnect(self, pair: frozenset[str]) -> None:
        self.net.blocked.discard(pair)
        self.net.trace.note(self.net.timers.now, "network", f"path is back: {' - '.join(sorted(pair))}")
        self.net.kick()

    def _short_partition(self, host: NodeHost, fault: FaultPlan) -> None:
        """Too short for anybody to give up: a delay."""
        pair = self._pair(host)
        self._broke(fault.kind, pair, min(fault.lasts, 1.0))
        self.net.blocked.add(pair)
        self.net.timers.after(min(fault.lasts, 1.0), lambda: self._reconnect(pair))

    def _conn(self, host: NodeHost) -> Conn | None:
        pair = self._pair(host)
        assert host.port is not None
        mine = host.port.connections()
        fitting = [conn for conn in mine if conn.hosts == pair] or mine
        return self.rng.choice(fitting) if fitting else None

    def _reset(self, host: NodeHost, fault: FaultPlan) -> None:
        conn = self._conn(host)
        if conn is not None:
            self._broke(fault.kind, conn.hosts, 0.0)
            self.net.close(conn, self.rng.choice((conn.near, conn.far)), "was cut")

    def _half_open(self, host: NodeHost, fault: FaultPlan) -> None:
        """One end knows; the other one not before it hears nothing for long, or asks."""
        conn = self._conn(host)
        if conn is not None:
            end = self.rng.choice((conn.near, conn.far))
            self._broke(fault.kind, conn.hosts, self.net.silence.longest_s)
            self.net.close(conn, end, "is closed on one side", says_goodbye=False)

    # ---- paths that break in part

    def _one_way(self, path: tuple[str, str], lasts: float) -> None:
        """Nothing gets from the first to the second; the way back is open."""
        self._break_path("one way", self.net.one_way, path, lasts)

    def _no_answer(self, path: tuple[str, str], lasts: float) -> None:
        """Dials of the first to the second vanish."""
        self._break_path("no answer", self.net.unanswered, path, lasts)

    def _break_path(self, kind: str, broken: set[tuple[str, str]], path: tuple[str, str], lasts: float) -> None:
        self._broke(kind, frozenset(path), lasts)
        broken.add(path)
        self.net.trace.note(self.net.timers.now, path[0], f"{kind}: to {path[1]} for {lasts:.1f} s")

        def mend() -> None:
            broken.discard(path)
            self.net.kick()

        self.net.timers.after(lasts, mend)

    def _fill_queue(self, path: tuple[str, str], lasts: float) -> None:
        """Nobody reads: what the two send each other is refused."""
        pair = frozenset(path)
        conns = [conn for conn in self.net.conns if conn.hosts == pair]
        self._broke("full queue", pair, min(lasts, 1.0))
        self.net.stuffed.update(conns)
        self.net.timers.after(min(lasts, 1.0), lambda: self.net.stuffed.difference_update(conns))

    def _cut_within(self, path: tuple[str, str], lasts: float) -> None:
        """Their connection breaks in the middle of the next message that has several parts."""
        pair = frozenset(path)
        self._broke("cut within", pair, lasts)
        self.net.cut_within.add(pair)
        self.net.timers.after(lasts, lambda: self.net.cut_within.discard(pair))

    def _slow_frames(self, path: tuple[str, str], lasts: float) -> None:
        """Pages take long, as they do on a narrow way; messages behind a page wait for it. One hit, once a page of an
        open request waits."""
        pair = frozenset(path)
        self.net.byte_s[pair] = self.rng.choice(FRAME_BYTE_S)
        self.net.on_slow = self._page_waits
        self._slow_ways.add(pair)
        self._broke("slow frames", pair, lasts)
        self.net.timers.after(lasts, lambda: self.net.byte_s.pop(pair, None) and None)

    def _page_waits(self, message: Message, hosts: frozenset[str]) -> None:
        if hosts in self._slow_ways and self._is_of_an_open_request(message):
            self._slow_ways.discard(hosts)
            self.hits["slow frames"] += 1

    # ---- hosts that are slow, or leave

    def _freeze(self, host: NodeHost, fault: FaultPlan) -> None:
        self._broke(fault.kind, frozenset((host.name,)), fault.lasts)
        host.freeze()
        self.net.timers.after(fault.lasts, host.thaw)

    def _stick(self, host: NodeHost, fault: FaultPlan) -> None:
        """Its loop hangs; the threads of its system go on, so its connections look fine."""
        self._broke(fault.kind, frozenset((host.name,)), fault.lasts)
        host.stick()
        self.net.timers.after(fault.lasts, host.come_loose)

    def _slow_node(self, host: NodeHost, fault: FaultPlan) -> None:
        self._broke(fault.kind, frozenset((host.name,)), fault.lasts)
        host.slowness = self.rng.choice((5.0, 20.0))
        self.net.timers.after(fault.lasts, lambda: setattr(host, "slowness", 1.0))

    def _slow_path(self, host: NodeHost, fault: FaultPlan) -> None:
        pair = self._pair(host)
        self.net.extra_latency[pair] = self.rng.choice((0.05, 0.5, 2.0))
        self._broke(fault.kind, pair, fault.lasts)
        self.net.timers.after(fault.lasts, lambda: self.net.extra_latency.pop(pair, None) and None)

    def _skew(self, host: NodeHost, fault: FaultPlan) -> None:
        self._broke(fault.kind, frozenset((host.name,)), fault.lasts)
        host.skew(self.rng.choice((0.5, 0.8, 1.25, 2.0)))
        self.net.timers.after(fault.lasts, lambda: host.skew(host.plan.clock_rate))

    def _stop(self, host: NodeHost, fault: FaultPlan) -> None:
        """SIGTERM, and sometimes a second one that does not wait."""
        daemon = host.daemon
        assert daemon is not None
        self._leaves(host, fault.kind)
        daemon.stop()
        if not self.is_gentle and self.rng.random() < 0.3:
            self.net.timers.after(self.rng.uniform(0, 1), daemon.stop)

    def _admin_drain(self, host: NodeHost, fault: FaultPlan) -> None:
        self._tell_to_leave(host, "restart", fault, self._living_routers())

    def _drain_at_one(self, host: NodeHost, fault: FaultPlan) -> None:
        """The others hear of it from the node, or from nobody."""
        self._tell_to_leave(host, "restart", fault, [self.rng.choice(self._living_routers())])

    def _change_role(self, host: NodeHost, fault: FaultPlan) -> None:
        then: Then = "decode" if host.plan.role == "prefill" else "prefill"
        self._tell_to_leave(host, then, fault, self._living_routers())

    def _tell_to_leave(self, host: NodeHost, then: Then, fault: FaultPlan, routers: Sequence[RouterHost]) -> None:
        """As an administrator does."""
        assert host.node is not None
        self._leaves(host, fault.kind)
        self.told_to_leave(host, min(fault.lasts, 2.0))
        facts = host.node.ctx.facts
        for router in routers:
            node = router.registry.find(facts.node_id, facts.epoch)
            if node is not None and router.gateway is not None and not router.is_frozen:
                router.gateway.drain(node, Drain(facts.node_id, then), min(fault.lasts, 2.0))

    def _fail_step(self, host: NodeHost, fault: FaultPlan) -> None:
        """The next forward raises."""
        self._broke(fault.kind, frozenset((host.name,)), fault.lasts)
        assert host.node is not None
        model = host.node.ctx.core.model

        def raise_once(*args: Any, **kwargs: Any) -> Any:
            disarm(model)
            raise RuntimeError("a failure of the device, injected")

        model.forward = raise_once  # type: ignore[method-assign]
        self.net.timers.after(fault.lasts, lambda: disarm(model))

    def _retract(self, host: NodeHost, fault: FaultPlan) -> None:
        """Memory ran out for somebody, at a time of our choice."""
        assert host.node is not None
        scheduler = host.node.ctx.core.scheduler
        running = [req for req in scheduler.queues.running.reqs if req.state is RequestState.RUNNING]
        prompts = [chunk.request for chunk in scheduler.queues.prefilling if chunk.request.handoff_to is None]
        granted = list(scheduler.queues.granted.values())
        kinds = [kind for kind in (running, prompts, granted) if kind]
        if kinds:
            scheduler.queues.retract(self.rng.choice(self.rng.choice(kinds)))


def in_a_pull(hosts: Sequence[NodeHost], *, lends: bool) -> list[NodeHost]:
    """Return the hosts that lend pages to another prefill node now, or else that copy some."""
    found = []
    for host in hosts:
        side = host.node.side if host.node is not None else None
        if isinstance(side, PrefillSide) and host.is_up and (side.loans.open if lends else side.pulls.open):
            found.append(host)
    return found


def disarm(model: Model) -> None:
    """The class has the true forward, however often a failing one was set."""
    vars(model).pop("forward", None)


def spoilt(kind: str, generate: Generate, data: bytes, rng: random.Random) -> bytes | None:
    """Return what arrives instead of a Generate's bytes; None if nothing does."""
    if kind == "unreadable":  # of another version, or cut: its key can be read
        return rng.choice((data[: -rng.randint(1, 20)], data.replace(b"prompt_ids", b"prompt_idx", 1)))
    if kind == "unreadable key":
        return data.replace(b"Generate", b"Generale", 1)
    if kind == "earlier life" and generate.decode_node:  # nobody listens there any more
        gone = {"decode_epoch": generate.decode_epoch - 1, "decode_endpoint": f"tcp://{generate.decode_node}:9000"}
        return encode(msgspec.structs.replace(generate, **gone))
    return None


def keys_in(message: Message) -> list[object]:
    """Every request key that a message speaks of."""
    keys = [message.key] if hasattr(message, "key") else []
    return [*keys, *(part.key for name in ("runs", "ends") for part in getattr(message, name, ()))]
