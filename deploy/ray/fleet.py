"""Track a cluster's actors, and decide each actor's next order. Pure.

report: idle ---> Start(known routers, cores) ---> running ---> (actor dies, Ray restarts it) idle ...
leaving: Stop ---> stopped ---> gone            started with routers that have moved: Stop ---> stopped ---> Start
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from deploy.cluster.restart_policy import RestartPolicy
from deploy.ray import launch_plan as plan
from deploy.ray.lead import FleetView, LeadOrder
from deploy.ray.report import (
    AWAY,
    DECODE,
    DRAINED,
    FAILED,
    IDLE,
    PREFILL,
    ROUTER,
    RUNNING,
    STOPPED,
    ActorPlace,
    ActorReport,
    Order,
    StartOrder,
    StatusRow,
    StopOrder,
    index_of,
    role_of,
)
from shared.config.processes import RayClusterConfig

ROUTERS_WITHIN_S = 30.0  # after this wait, nodes start with the routers known so far
PLACED_WITHIN_S = 300.0
LOST_AFTER_S = 60.0
ENDED = (STOPPED, DRAINED, FAILED)
ABSENT = (DRAINED, FAILED)  # nodes in these states do not start again by themselves
KILLED = -9  # assumed exit status of a dead actor's daemon; the real status is lost


@dataclass(slots=True)
class Member:
    name: str
    policy: RestartPolicy
    away_since: float
    report: ActorReport | None = None
    here: bool = False  # whether the actor answered the newest call
    place: ActorPlace | None = None
    ran: bool = False  # whether a daemon was started since the actor's last restart
    restarts: int = 0
    start_at: float | None = 0.0  # earliest time of the next start; None: never again
    cores: tuple[int, ...] = ()
    leaving: bool = False
    make_at: float | None = 0.0  # earliest time to make a missing actor; None: never
    error: str = ""  # the newest call's error, if it failed

    @property
    def state(self) -> str:
        if self.make_at is None:
            return FAILED
        if self.report is None or not self.here:
            return AWAY
        return FAILED if self.start_at is None and self.report.state == IDLE else self.report.state


@dataclass(slots=True)
class Fleet:
    """`names`: the initial actors' names."""

    config: RayClusterConfig
    names: tuple[str, ...]
    since: float
    members: dict[str, Member] = field(init=False)

    def __post_init__(self) -> None:
        self.members = {}
        for name in self.names:
            self.add_member(name, self.since)

    # ---- members

    def add_member(self, name: str, now: float) -> None:
        self.members[name] = Member(name, RestartPolicy(self.config.ray.max_restarts), away_since=now)

    def leave(self, name: str) -> None:
        self.members[name].leaving = True

    def gone(self, now: float) -> list[str]:
        """Return the leaving members that have ended. A member whose actor has restarted, or has not answered for
        LOST_AFTER_S, also counts as ended.

        If Ray does not place an added node within PLACED_WITHIN_S, this node leaves.
        """
        for member in self.members.values():
            hopeless = member.report is None and now - member.away_since > PLACED_WITHIN_S
            member.leaving = member.leaving or (hopeless and member.name not in self.names)
        return [member.name for member in self.members.values() if member.leaving and self._has_ended(member, now)]

    @staticmethod
    def _has_ended(member: Member, now: float) -> bool:
        return member.state in (IDLE, *ENDED) or (member.state == AWAY and now - member.away_since > LOST_AFTER_S)

    def forget_member(self, name: str) -> None:
        del self.members[name]

    def of_role(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if role_of(member.name) == role]

    def is_steady(self, role: str, serving: Mapping[str, str]) -> bool:
        """Return whether all nodes of this role run and the routers see all of them.

        Otherwise the load does not show how many nodes are needed. Failed and drained nodes do not count. `serving`:
        the role that each node has for the routers; `baton admin role` may have changed it.
        """
        members = [one for one in self.active() if serving.get(one.name, role_of(one.name)) == role]
        seen = {name for name, served in serving.items() if served == role}
        return {member.name for member in members} == seen and all(map(runs_on, members))

    def active(self) -> list[Member]:
        nodes = (member for member in self.members.values() if role_of(member.name) != ROUTER)
        return [member for member in nodes if member.state not in ABSENT]

    def next_name(self, role: str) -> str:
        used = {index_of(member.name) for member in self.of_role(role)}
        return f"{role}-{next(index for index in range(len(used) + 1) if index not in used)}"

    def may_grow(self, role: str, most: int) -> bool:
        """Return False if `most` nodes are active, or `most` nodes have failed."""
        num_failed = sum(member.state == FAILED for member in self.of_role(role))
        return num_failed < most and sum(role_of(member.name) == role for member in self.active()) < most

    def extra(self) -> list[str]:
        at_start = plan.names_at_start(self.config)
        return [one.name for one in self.active() if one.name not in at_start and runs_on(one)]

    def newest(self, role: str, serving: Mapping[str, str]) -> str | None:
        """Return the node that leaves first; None if none may leave."""
        found = [name for name in self.extra() if serving.get(name) == role]
        return max(found, key=index_of, default=None)

    # ---- a leader

    def view(self) -> FleetView:
        return FleetView(
            nodes=tuple(member.name for member in self.active()),
            extra=tuple(self.extra()),
            may_grow=tuple(role for role in (PREFILL, DECODE) if self.may_grow(role, plan.most(self.config, role))),
            is_steady=all(map(runs_on, self.active())),
            scaling=self.config.scaling,
        )

    def follow(self, order: LeadOrder, now: float) -> bool:
        """Carry out a leader's order. Return False for an order from an outdated view."""
        view = self.view()
        if not view.is_steady or (order.grow and order.grow not in view.may_grow):
            return False
        if order.give and order.give not in view.extra:
            return False
        if order.grow:
            self.add_member(self.next_name(order.grow), now)
        if order.give:
            self.leave(order.give)
        return True

    # ---- reports

    def hear(self, report: ActorReport, now: float) -> None:
        member = self.members[report.name]
        if member.report is not None and member.report.life != report.life:
            self._begin_life(member, now)
        member.report, member.place, member.here = report, report.place, True
        member.error = ""
        member.ran = member.ran or report.state == RUNNING
        member.cores = report.cores if report.state == RUNNING else member.cores

    def _begin_life(self, member: Member, now: float) -> None:
        """Record a restart of the actor. Its daemon starts after a delay that grows with each death."""
        member.restarts += 1
        delay = member.policy.delay_after_death(now, KILLED) if member.ran else 0.0
        member.start_at = None if delay is None else now + delay
        member.ran = False

    def miss(self, name: str, now: float, error: str = "") -> None:
        member = self.members[name]
        member.away_since = now if member.here else member.away_since
        member.here = False
        member.error = error or member.error

    def lose(self, name: str, now: float, error: str) -> None:
        """Record that the actor died for good."""
        self.miss(name, now, error)
        member = self.members[name]
        delay = member.policy.delay_after_death(now, KILLED)
        member.make_at = None if delay is None else now + delay
        member.ran = False

    def may_be_made(self, name: str, now: float) -> bool:
        make_at = self.members[name].make_at
        return make_at is not None and now >= make_at

    # ---- orders

    def orders(self, now: float) -> dict[str, Order]:
        routers = self.endpoints(now)
        found = {member.name: self._order(member, routers, now) for member in self.members.values()}
        return {name: order for name, order in found.items() if order is not None}

    def endpoints(self, now: float) -> tuple[str, ...]:
        """Return the routers' last known addresses, which nodes dial.

        Return no address until all routers are placed or ROUTERS_WITHIN_S has passed.
        """
        routers = self.of_role(ROUTER)
        known = [plan.endpoint(self.config, m.name, m.place) for m in routers if m.place is not None]
        return tuple(known) if len(known) == len(routers) or now - self.since > ROUTERS_WITHIN_S else ()

    def _order(self, member: Member, routers: tuple[str, ...], now: float) -> Order | None:
        state = member.state
        if member.leaving:
            return StopOrder() if state == RUNNING else None
        if state == RUNNING and self._must_move(member, routers, now):
            return StopOrder()
        if state not in (IDLE, STOPPED) or member.start_at is None or now < member.start_at:
            return None
        return self._start(member, routers)

    def _must_move(self, member: Member, routers: tuple[str, ...], now: float) -> bool:
        """Return whether this node must restart to dial moved routers.

        Nodes that lost all routers restart immediately. The others restart one at a time, while all nodes run; failed,
        drained and lost nodes are ignored.
        """
        if role_of(member.name) == ROUTER or not misses(member, routers):
            return False
        assert member.report is not None
        if not set(member.report.routers) & set(routers):
            return True
        nodes = [o for o in self.members.values() if role_of(o.name) != ROUTER and not self._is_out(o, now)]
        others_run = all(other.state == RUNNING for other in nodes)
        return others_run and member.name == min(other.name for other in nodes if misses(other, routers))

    @staticmethod
    def _is_out(member: Member, now: float) -> bool:
        return member.state in ABSENT or (member.state == AWAY and now - member.away_since > LOST_AFTER_S)

    def _start(self, member: Member, routers: tuple[str, ...]) -> StartOrder | None:
        place = member.place
        assert place is not None
        role = role_of(member.name)
        if role != ROUTER and (not routers or self.problem(member)):
            return None
        cores = plan.deal_cores(plan.cpus(self.config, role), place.cores, self._taken(member))
        member.cores = cores.cpus
        member.ran = True  # the daemon may die before its first report
        if role == ROUTER:
            return StartOrder(plan.router_config(self.config, member.name, place, cores))
        return StartOrder(plan.node_config(self.config, member.name, place, routers, cores))

    def _taken(self, member: Member) -> set[int]:
        assert member.place is not None
        others = [m for m in self.members.values() if m is not member and m.place and m.place.host == member.place.host]
        return {core for other in others if other.state not in ENDED for core in other.cores}

    def problem(self, member: Member) -> str:
        """Return why the member can't start on its machine; "" if it can."""
        if self.config.nodes.security.has_keys or member.place is None or role_of(member.name) == ROUTER:
            return ""
        addresses = {router.place.ip for router in self.of_role(ROUTER) if router.place is not None}
        if addresses <= {member.place.ip}:
            return ""
        return f"is on {member.place.ip}, and routers on {', '.join(sorted(addresses))}: that needs [security] keys"

    def rows(self) -> list[StatusRow]:
        return [self._row(member) for member in self.members.values()]

    def _row(self, member: Member) -> StatusRow:
        report, place = member.report, member.place
        if report is None or place is None:
            return StatusRow(member.name, member.state, words=self._absence(member))
        state = "leaving" if member.leaving else member.state
        known = self.problem(member) or report.words or gave_up(member, place)
        words = known if member.here else self._absence(member)
        return StatusRow(member.name, state, place.ip, place.ray_node, report.pid, report.cores, member.restarts, words)

    def _absence(self, member: Member) -> str:
        if member.make_at is None:
            return f"its actor kept dying: {member.error}"
        wanted = plan.bundle_text(self.config, member.name)
        error = f": {member.error}" if member.error else ""
        return f"its actor does not answer; Ray places it where {wanted} are free{error}"


def runs_on(member: Member) -> bool:
    return member.state == RUNNING and not member.leaving


def misses(member: Member, routers: tuple[str, ...]) -> bool:
    return member.report is not None and not set(routers) <= set(member.report.routers)


def gave_up(member: Member, place: ActorPlace) -> str:
    """Return "" if the daemon may still start. If it kept dying, return where its output is."""
    if member.start_at is not None:
        return ""
    return f"its daemon kept dying; its output is on {place.ip}, in Ray's session folder, logs/worker-*.out"
