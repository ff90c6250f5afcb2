"""Breaks things: hosts, paths, clocks, single messages. Aims at hosts that serve an open request, and counts what hit
one: a fault that nobody noticed proves nothing."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from shared.core.request import RequestState
from shared.model.interface import Model
from shared.wire.messages import Drain, Message
from tests.support.sim.hosts import NodeHost, RouterHost
from tests.support.sim.plan import FaultPlan
from tests.support.sim.wire import Conn, Harshness, Network

MAX_TRIES, RETRY_S = 80, 0.025
Then = Literal["", "stop", "restart", "prefill", "decode"]
AIM = 0.9  # share of faults that look for a host with open requests
NOT_COUNTED = ("forced retraction",)  # no fault of a network or a process


@dataclass
class Faults:
    """`hits`: faults by kind that hit an open request. `first_at`: when the first one was tried. `are_over`: nothing
    strikes any more, and what was set to strike later does not."""

    net: Network
    nodes: Sequence[NodeHost]
    routers: Sequence[RouterHost]
    rng: random.Random
    is_gentle: bool
    hits: Counter[str] = field(default_factory=Counter)
    first_at: float = float("inf")
    are_over: bool = False

    def end(self) -> None:
        """All is well from now on: slow nodes, wrong clocks and failures that wait for their step too."""
        self.are_over = True
        self.net.heal()
        for host in self.nodes:
            host.thaw()
            host.come_loose()
            host.slowness = 1.0
            host.clock.skew(host.plan.clock_rate)
            if host.node is not None:
                disarm(host.node.ctx.core.model)
        for router in self.routers:
            router.thaw()

    # ---- who is in use

    def engaged(self) -> list[NodeHost]:
        """Hosts that run a part of an open request, by name."""
        names = {node.node_id for host in self._living_routers() for r in host.journal.all() for node in r.nodes}
        return [host for host in self.nodes if host.name in names and host.is_up]

    def _living_routers(self) -> list[RouterHost]:
        return [host for host in self.routers if host.gateway is not None]

    def partners(self, host: NodeHost) -> list[str]:
        """Other hosts that an open request ties to this one."""
        names: list[str] = []
        for router in self._living_routers():
            for request in router.journal.all():
                ids = [node.node_id for node in request.nodes]
                if host.name in ids:
                    names += [router.name, *(name for name in ids if name != host.name)]
        return list(dict.fromkeys(names))

    def _count(self, kind: str, host: str, is_engaged: bool) -> None:
        self.net.trace.note(self.net.timers.now, host, f"FAULT {kind}{'' if is_engaged else ' (no open request)'}")
        self.first_at = min(self.first_at, self.net.timers.now)
        if is_engaged and kind not in NOT_COUNTED:
            self.hits[kind] += 1

    # ---- messages

    def be_harsh(self, chances: Sequence[float]) -> None:
        self.net.harsh = Harshness(*chances)
        self.net.on_hit = self._message_hit
        if self.net.harsh.is_on:
            self.first_at = min(self.first_at, self.net.timers.now)

    def _message_hit(self, kind: str, message: Message) -> None:
        rids = {(key.router_id, key.router_epoch, key.rid) for key in keys_in(message)}
        for host in self._living_routers():
            if any((host.name, host.lives, request.rid) in rids for request in host.journal.all()):
                self.hits[kind] += 1
                return

    # ---- hosts and paths

    def strike(self, fault: FaultPlan, tries: int = MAX_TRIES) -> None:
        """Waits a while for a victim that is worth it."""
        if self.are_over:
            return
        if fault.kind in ("router restart", "router freeze"):
            self._strike_router(fault)
            return
        candidates = self.engaged() if fault.draw < AIM else [host for host in self.nodes if host.is_up]
        if (not candidates or self._is_too_much(fault)) and tries:
            self.net.timers.after(RETRY_S, lambda: self.strike(fault, tries - 1))
            return
        if not candidates or self._is_too_much(fault):
            return
        host = self.rng.choice(candidates)
        self._count(fault.kind, host.name, host in self.engaged())
        self._acts()[fault.kind](host, fault)

    def _is_too_much(self, fault: FaultPlan) -> bool:
        """Gentle: one node after the other, and never the last of them."""
        return self.is_gentle and not all(host.is_up and self._is_known(host) for host in self.nodes)

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
        }

    def _strike_router(self, fault: FaultPlan) -> None:
        awake = [host for host in self._living_routers() if not host.is_frozen]
        if not awake:
            return
        host = self.rng.choice(awake)
        self._count(fault.kind, host.name, len(host.journal) > 0)
        if fault.kind == "router freeze":
            host.freeze()
            self.net.timers.after(fault.lasts, host.thaw)
        else:
            host.kill()
            self.net.timers.after(min(fault.lasts, 2.0), host.restart)

    def _crash(self, host: NodeHost, fault: FaultPlan) -> None:
        host.kill()
        self.net.timers.after(fault.lasts, host.restart)

    def _power_loss(self, host: NodeHost, fault: FaultPlan) -> None:
        """Nobody is told; and the clock of the machine may be wrong when it is back."""
        host.kill(in_the_dark=True)
        if self.rng.random() < 0.3:
            host.wall_offset_us -= self.rng.randint(10**6, 10**8)
        self.net.timers.after(fault.lasts, host.restart)

    def _pair(self, host: NodeHost) -> frozenset[str]:
        return frozenset((host.name, self.rng.choice(self.partners(host) or [self.routers[0].name])))

    def _partition(self, host: NodeHost, fault: FaultPlan) -> None:
        pair = self._pair(host)
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
            self.net.close(conn, self.rng.choice((conn.near, conn.far)), "was cut")

    def _half_open(self, host: NodeHost, fault: FaultPlan) -> None:
        """One end knows; the other one not before it hears nothing for long, or asks."""
        conn = self._conn(host)
        if conn is not None:
            end = self.rng.choice((conn.near, conn.far))
            self.net.close(conn, end, "is closed on one side", says_goodbye=False)

    def _freeze(self, host: NodeHost, fault: FaultPlan) -> None:
        host.freeze()
        self.net.timers.after(fault.lasts, host.thaw)

    def _stick(self, host: NodeHost, fault: FaultPlan) -> None:
        """Its loop hangs; the threads of its system go on, so its connections look fine."""
        host.is_stuck = True
        self.net.timers.after(fault.lasts, host.come_loose)

    def _slow_node(self, host: NodeHost, fault: FaultPlan) -> None:
        host.slowness = self.rng.choice((5.0, 20.0))
        self.net.timers.after(fault.lasts, lambda: setattr(host, "slowness", 1.0))

    def _slow_path(self, host: NodeHost, fault: FaultPlan) -> None:
        pair = self._pair(host)
        self.net.extra_latency[pair] = self.rng.choice((0.05, 0.5, 2.0))
        self.net.timers.after(fault.lasts, lambda: self.net.extra_latency.pop(pair, None) and None)

    def _skew(self, host: NodeHost, fault: FaultPlan) -> None:
        host.clock.skew(self.rng.choice((0.5, 0.8, 1.25, 2.0)))
        self.net.timers.after(fault.lasts, lambda: host.clock.skew(host.plan.clock_rate))

    def _stop(self, host: NodeHost, fault: FaultPlan) -> None:
        """SIGTERM, and sometimes a second one that does not wait."""
        daemon = host.daemon
        assert daemon is not None
        daemon.stop()
        if not self.is_gentle and self.rng.random() < 0.3:
            self.net.timers.after(self.rng.uniform(0, 1), daemon.stop)

    def _admin_drain(self, host: NodeHost, fault: FaultPlan) -> None:
        self._tell_to_leave(host, "restart", fault)

    def _change_role(self, host: NodeHost, fault: FaultPlan) -> None:
        self._tell_to_leave(host, "decode" if host.plan.role == "prefill" else "prefill", fault)

    def _tell_to_leave(self, host: NodeHost, then: Then, fault: FaultPlan) -> None:
        """As an administrator does, at every router."""
        assert host.node is not None
        facts = host.node.ctx.facts
        for router in self._living_routers():
            node = router.registry.find(facts.node_id, facts.epoch)
            if node is not None and router.gateway is not None and not router.is_frozen:
                router.gateway.drain(node, Drain(facts.node_id, then), min(fault.lasts, 2.0))

    def _fail_step(self, host: NodeHost, fault: FaultPlan) -> None:
        """The next forward raises."""
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
        running = [req for req in scheduler.running.reqs if req.state is RequestState.RUNNING]
        prompts = [chunk.request for chunk in scheduler.prefilling if chunk.request.handoff_to is None]
        granted = list(scheduler.granted.values())
        kinds = [kind for kind in (running, prompts, granted) if kind]
        if kinds:
            scheduler.retract(self.rng.choice(self.rng.choice(kinds)))


def disarm(model: Model) -> None:
    """The class has the true forward, however often a failing one was set."""
    vars(model).pop("forward", None)


def keys_in(message: Message) -> list[object]:
    """Every request key that a message speaks of."""
    keys = [message.key] if hasattr(message, "key") else []
    return [*keys, *(part.key for name in ("runs", "ends") for part in getattr(message, name, ()))]
