"""A simulated cluster that a fleet starts and stops: the production `Fleet`, its actors in virtual time."""

from __future__ import annotations

import functools
from dataclasses import replace

from deploy.ray import launch_plan
from deploy.ray.fleet import Fleet
from deploy.ray.lead import FleetView, LeadOrder, Lease
from deploy.ray.report import (
    IDLE,
    ROUTER,
    RUNNING,
    STOPPED,
    ActorPlace,
    ActorReport,
    Order,
    StartOrder,
    StopOrder,
    role_of,
)
from deploy.tools.plan.act.balance import Balancer
from deploy.tools.plan.act.sizing import Sizing
from deploy.tools.plan.layout import ClusterLayout
from deploy.tools.plan.profile import Profile
from deploy.tools.plan.tokens import SimTokens
from router.fleet.leaving import By, Leaving
from shared.config.processes import RayClusterConfig
from tests.support.worlds.acting_cluster import ActingCluster, is_idle

TICK_S = 0.5
HERE = ActorPlace("127.0.0.1", "a", "n", (0,))


class Port:
    """A FleetLead, of one leader."""

    def __init__(self, cluster: SizedCluster) -> None:
        self._cluster = cluster
        self._lease = Lease()

    def look(self) -> FleetView:
        return self._cluster.fleet.view()

    def lead(self, grow: str = "", give: str = "") -> FleetView | None:
        assert self._lease.take_lease("me", self._cluster.now)
        if grow or give:
            order = LeadOrder("me", grow, give)
            assert self._cluster.fleet.follow(order, self._cluster.now), "one wish at a time, and a possible one"
        return self._cluster.fleet.view()

    def release(self) -> None:
        self._lease.release("me")


class SizedCluster(ActingCluster):
    """`sizes`: (time, number of nodes that serve) after each change."""

    def __init__(
        self,
        config: RayClusterConfig,
        layout: ClusterLayout,
        profile: Profile,
        tokens: SimTokens,
        balancer: Balancer,
        start_s: float,
    ) -> None:
        super().__init__(layout, profile, tokens, balancer, restart_s=start_s)
        self._start_s = start_s
        self.port = Port(self)
        self.fleet = Fleet(config, launch_plan.names_at_start(config), 0.0)
        self._reports: dict[str, ActorReport] = {}
        for name in self.fleet.names:
            self._reports[name] = ActorReport(name, "1", HERE, RUNNING, routers=self._routers(config))
        self._name_as_fleet()
        self.sizing: Sizing | None = None
        self.sizes: list[tuple[float, int]] = []
        self._at(0.0, self._tick)

    def _name_as_fleet(self) -> None:
        """A simulated cluster counts all its nodes, a fleet those of each role."""
        names = [name for name in self.fleet.names if role_of(name) != ROUTER]
        for number, (node, name) in enumerate(zip(list(self.nodes), names, strict=True)):
            self._registry.remove(node.node)
            self.nodes[number] = self._make_node(node.node.role, number, name)
        self._by_id = {node.node.node_id: node for node in self.nodes}

    @staticmethod
    def _routers(config: RayClusterConfig) -> tuple[str, ...]:
        return (launch_plan.endpoint(config, f"{ROUTER}-0", HERE),)

    # ---- the command and the manager

    def _look(self) -> None:
        num_moves = len(self.moves)
        super()._look()
        if self.sizing is not None:
            move = self.sizing.turn(self.look(), None if len(self.moves) > num_moves else self._balancer.demand)
            if move is not None:
                self._balancer.begin([move], self.now)
                self._begin(move)

    def _tick(self) -> None:
        for name in self.fleet.members:
            self._reports.setdefault(name, ActorReport(name, "1", HERE, IDLE))
            self.fleet.hear(self._reports[name], self.now)
        for name, order in self.fleet.orders(self.now).items():
            self._carry_out(name, order)
        for name in self.fleet.gone(self.now):
            self.fleet.forget_member(name)
            del self._reports[name]
        self._at(self.now + TICK_S, self._tick)

    def _carry_out(self, name: str, order: Order) -> None:
        if isinstance(order, StartOrder):
            self._reports[name] = replace(self._reports[name], state=RUNNING, routers=self._routers(self.fleet.config))
            self._at(self.now + self._start_s, functools.partial(self._join, name))
        else:
            assert isinstance(order, StopOrder)
            self._drain(name)

    def _join(self, name: str) -> None:
        self._lives += 1
        node = self._make_node(role_of(name), len(self.nodes), name, self._lives)
        self.nodes.append(node)
        self._by_id[name] = node
        self.sizes.append((self.now, len(self._by_id)))

    def _drain(self, name: str) -> None:
        node = self._by_id[name]
        node.node.leaving = Leaving(By.NODE)
        if is_idle(node):
            del self._by_id[name]
            self._registry.remove(node.node)
            self._reports[name] = replace(self._reports[name], state=STOPPED)
            self.sizes.append((self.now, len(self._by_id)))
