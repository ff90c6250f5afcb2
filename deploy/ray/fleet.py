"""Who of a cluster is there, and what each is told next. Pure: takes reports and times, gives orders.

report: idle ---> Start(routers known, cores dealt) ---> running ---> (actor dies, Ray starts it again) idle ...
leaving: Stop ---> stopped ---> gone            started with routers that have moved: Stop ---> stopped ---> Start
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deploy.cluster.restart_policy import RestartPolicy
from deploy.ray import launch_plan as plan
from deploy.ray.report import (
    AWAY,
    DRAINED,
    FAILED,
    IDLE,
    ROUTER,
    RUNNING,
    STOPPED,
    ActorReport,
    Order,
    Place,
    StartOrder,
    StatusRow,
    StopOrder,
    index_of,
    role_of,
)
from shared.config.processes import RayClusterConfig

ROUTERS_WITHIN_S = 30.0  # after so long nodes start with the routers that are known
PLACED_WITHIN_S = 300.0
LOST_AFTER_S = 60.0
ENDED = (STOPPED, DRAINED, FAILED)
ABSENT = (DRAINED, FAILED)  # nodes that will not run again by themselves
KILLED = -9  # how a daemon ended is gone with its actor


@dataclass(slots=True)
class Member:
    """One actor: what it said last, and what became of it before."""

    name: str
    policy: RestartPolicy
    away_since: float
    report: ActorReport | None = None
    here: bool = False  # its newest call was answered
    place: Place | None = None
    ran: bool = False  # its daemon was started in this life, seen running or not
    restarts: int = 0
    start_at: float | None = 0.0  # None: never again
    cores: tuple[int, ...] = ()  # dealt to its daemon
    leaving: bool = False
    make_at: float | None = 0.0  # when its actor is made, if there is none; None: never again
    error: str = ""  # of its newest call, when that failed

    @property
    def state(self) -> str:
        if self.make_at is None:
            return FAILED
        if self.report is None or not self.here:
            return AWAY
        return FAILED if self.start_at is None and self.report.state == IDLE else self.report.state


@dataclass(slots=True)
class Fleet:
    """`names`: of the actors that are there from the start."""

    config: RayClusterConfig
    names: tuple[str, ...]
    since: float
    members: dict[str, Member] = field(init=False)

    def __post_init__(self) -> None:
        self.members = {}
        for name in self.names:
            self.add(name, self.since)

    # ---- who belongs to it

    def add(self, name: str, now: float) -> None:
        self.members[name] = Member(name, RestartPolicy(self.config.ray.max_restarts), away_since=now)

    def leave(self, name: str) -> None:
        """It is told to stop, and listed in `gone` when it has."""
        self.members[name].leaving = True

    def gone(self, now: float) -> list[str]:
        """Of those that leave. An actor that was started again meanwhile has no daemon left to wait for, nor has one
        that was not heard of for long; and a node that came later, and that Ray has no room for, is given up."""
        for member in self.members.values():
            hopeless = member.report is None and now - member.away_since > PLACED_WITHIN_S
            member.leaving = member.leaving or (hopeless and member.name not in self.names)
        return [member.name for member in self.members.values() if member.leaving and self._has_ended(member, now)]

    @staticmethod
    def _has_ended(member: Member, now: float) -> bool:
        return member.state in (IDLE, *ENDED) or (member.state == AWAY and now - member.away_since > LOST_AFTER_S)

    def forget(self, name: str) -> None:
        del self.members[name]

    def of_role(self, role: str) -> list[Member]:
        return [member for member in self.members.values() if role_of(member.name) == role]

    def is_steady(self, role: str, seen: int) -> bool:
        """Return whether all of this role run, and the routers see all of them: while one starts or leaves, the load
        says nothing about their number. Those that will not run again are absent."""
        members = [member for member in self.of_role(role) if member.state not in ABSENT]
        return len(members) == seen and all(member.state == RUNNING and not member.leaving for member in members)

    def next_name(self, role: str) -> str:
        used = {index_of(member.name) for member in self.of_role(role)}
        return f"{role}-{next(index for index in range(len(used) + 1) if index not in used)}"

    def may_grow(self, role: str, most: int) -> bool:
        """Return whether another node of this role may be made: where each fails at its start, it ends sometime."""
        return sum(member.state == FAILED for member in self.of_role(role)) < most

    def newest(self, role: str) -> str:
        """Return who leaves first: the last node that runs, or the last of all where none does."""
        members = self.of_role(role)
        running = [member for member in members if member.state not in ABSENT]
        return max((member.name for member in running or members), key=index_of)

    # ---- what is heard

    def hear(self, report: ActorReport, now: float) -> None:
        member = self.members[report.name]
        if member.report is not None and member.report.life != report.life:
            self._begin_life(member, now)
        member.report, member.place, member.here = report, report.place, True
        member.error = ""
        member.ran = member.ran or report.state == RUNNING
        member.cores = report.cores if report.state == RUNNING else member.cores

    def _begin_life(self, member: Member, now: float) -> None:
        """Ray has started the actor again. A daemon that keeps dying is started ever later, and then no more."""
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
        """Its actor is dead for good, Ray does not start it again: it is made anew, ever later, and then no more."""
        self.miss(name, now, error)
        member = self.members[name]
        delay = member.policy.delay_after_death(now, KILLED)
        member.make_at = None if delay is None else now + delay
        member.ran = False

    def may_be_made(self, name: str, now: float) -> bool:
        make_at = self.members[name].make_at
        return make_at is not None and now >= make_at

    # ---- what is to be done

    def orders(self, now: float) -> dict[str, Order]:
        routers = self.endpoints(now)
        found = {member.name: self._order(member, routers, now) for member in self.members.values()}
        return {name: order for name, order in found.items() if order is not None}

    def endpoints(self, now: float) -> tuple[str, ...]:
        """Where nodes dial; empty while too few routers have a place. One that is away is expected where it was."""
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
        """Whether routers are where it does not dial. One node after another, unless it serves nobody anyway; those
        that will not run again are not waited for."""
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
        member.ran = True  # it may be dead before it is heard of
        if role == ROUTER:
            return StartOrder(plan.router_config(self.config, member.name, place, cores))
        return StartOrder(plan.node_config(self.config, member.name, place, routers, cores))

    def _taken(self, member: Member) -> set[int]:
        """Cores of the others on its machine: those dealt a moment ago too, which no report names yet."""
        assert member.place is not None
        others = [m for m in self.members.values() if m is not member and m.place and m.place.host == member.place.host]
        return {core for other in others if other.state not in ENDED for core in other.cores}

    def problem(self, member: Member) -> str:
        """Why it can't be started where it is, "" if it can."""
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
        """Why nobody answers, as far as it is known."""
        if member.make_at is None:
            return f"its actor kept dying: {member.error}"
        wanted = plan.bundle_text(self.config, member.name)
        error = f": {member.error}" if member.error else ""
        return f"its actor does not answer; Ray places it where {wanted} are free{error}"


def misses(member: Member, routers: tuple[str, ...]) -> bool:
    """One that it dials and that is not known of now may come back."""
    return member.report is not None and not set(routers) <= set(member.report.routers)


def gave_up(member: Member, place: Place) -> str:
    """The last words of a daemon that kept dying went with its actors."""
    if member.start_at is not None:
        return ""
    return f"its daemon kept dying; what it said is on {place.ip}, in Ray's session folder, logs/worker-*.out"
