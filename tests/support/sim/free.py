"""Nobody waits for what is free: the books of each node after each of its rounds, and of routers after each tick.

What is looked for waits at the head of a queue, and what it waits for is there: a row and pages for an offer or a
prompt, an installed place for a hand-off that is complete, a sent record, a row whose last pull is over, a node for a
parked request. Nothing changes in a node's books between two of its rounds, so what was free after the one has waited
until the other. Longer than two steps and a round trip is too long, and so are some rounds or steps in a row.

Conservative: pages are counted as if the prefix cache had none of them, and nothing counts while a host is frozen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from decode_node.handoff_in import WaitingOffer
from decode_node.shares import Shares
from decode_node.side import DecodeSide
from prefill_node.side import PrefillSide
from shared.core.keys import RequestKey
from shared.core.request import Request, RequestState
from shared.node.loop.node import Node
from shared.sched.scheduler import Scheduler
from tests.support.sim.hosts import NodeHost, RouterHost
from tests.support.sim.oracles import Violation

LONGEST_STEP = 1.5  # a round's time is drawn up to so many of the node's steps
ROUND_TRIP_S = 0.02
MOST_ROUNDS = 4  # in a row, each of which could have ended it
MOST_STEPS = 3
MOST_TICKS = 3
Wait = tuple[str, RequestKey]  # for what, who


@dataclass
class Look:
    """A node's books after a round."""

    at: float
    life: tuple[int, int]  # its lives and pauses
    slowness: float
    is_still: bool  # no step is in flight
    waits: dict[Wait, Since] = field(default_factory=dict)
    head: RequestKey | None = None  # the first offer
    granted: frozenset[RequestKey] = frozenset()
    pulls_end: float = float("inf")  # by the node's clock: when the first of its pulls gives way to computing


@dataclass(frozen=True)
class Since:
    """How long somebody waits already."""

    at: float
    rounds: int
    steps: int  # of the node, when it began


class FreeWatch:
    """Of all hosts."""

    def __init__(self) -> None:
        self._looks: dict[str, Look] = {}
        # router, its life, rid, attempt -> ticks with nodes there
        self._parked: dict[tuple[str, int, str, int], int] = {}

    # ---- nodes

    def look_at_node(self, host: NodeHost, now: float) -> None:
        if host.node is None:
            return
        before = self._looks.get(host.name)
        if before is not None and before.life != (host.lives, host.num_pauses):
            before = None
        look = Look(now, (host.lives, host.num_pauses), host.slowness, host.node.ctx.core.loop.idle)
        if before is not None:
            check_gap(host, before, now)
        steps = host.node.ctx.core.loop.num_steps
        for wait in waits_of(host.node):
            since = before.waits.get(wait) if before is not None else None
            since = Since(now, 0, steps) if since is None else Since(since.at, since.rounds + 1, since.steps)
            look.waits[wait] = since
            check_row(host, wait, since, steps, now)
        check_pulls(host, look, before)
        self._check_order(host, look, before)
        self._looks[host.name] = look

    def _check_order(self, host: NodeHost, look: Look, before: Look | None) -> None:
        """Nobody behind the first offer is granted before it."""
        side = host.node.side if host.node is not None else None
        if not isinstance(side, DecodeSide):
            return
        assert host.node is not None
        head = first_offer(host.node)
        look.granted = frozenset(side.transfers.open)
        look.head = None if head is None else head.request.key
        if before is None or head is None or before.head != look.head:
            return
        for key in look.granted - before.granted:
            if side.transfers.open[key].request.arrival > head.request.arrival:
                raise Violation(f"{host.name} granted {key} before {head.request.key}, which was first", host.name)

    # ---- routers

    def look_at_router(self, host: RouterHost) -> None:
        """After a tick, in which every parked request was tried. One that was sent, and came back because the queue of
        its node was full, is another attempt."""
        is_served = any(node.is_there for node in host.registry)
        waiting = host.journal.parked() if is_served else ()
        parked = {(host.name, host.lives, request.rid, request.attempt.number) for request in waiting}
        for name in [name for name in self._parked if name[0] == host.name and name not in parked]:
            del self._parked[name]
        for name in parked:
            self._parked[name] = self._parked.get(name, 0) + 1
            if self._parked[name] > MOST_TICKS:
                word = f"{host.plan.router_id}/{name[2]}#"
                raise Violation(f"{host.name} keeps {word} parked though nodes are there", word)


def limit_s(host: NodeHost, before: Look) -> float:
    step_s = host.plan.step_s * LONGEST_STEP * max(host.slowness, before.slowness)
    return 2 * step_s + ROUND_TRIP_S


def check_gap(host: NodeHost, before: Look, now: float) -> None:
    """From one round to the next. While a step is in flight, its end is what the node sleeps for."""
    waited = now - before.at
    if before.is_still and before.waits and waited > limit_s(host, before):
        what, key = next(iter(before.waits))
        raise Violation(f"{host.name} did nothing for {waited:.3f} s, and {key} waited for {what}", host.name)


def check_pulls(host: NodeHost, look: Look, before: Look | None) -> None:
    """A prompt waits for another node's pages as long as it may, and no longer."""
    assert host.node is not None
    side, clock = host.node.side, host.clock()
    if not isinstance(side, PrefillSide):
        return
    pulling = {pull.request.key for pull in side.pulls.open.values()}
    for key, req in host.node.ctx.core.queues.requests.items():
        if req.awaits_prefix and key not in pulling:
            raise Violation(f"{host.name} keeps {key} for a pull that is over", host.name)
    look.pulls_end = min((pull.until for pull in side.pulls.open.values()), default=float("inf"))
    if look.pulls_end < clock:
        raise Violation(f"{host.name} waits for pages though computing them would have taken less", host.name)
    if before is not None and clock - before.pulls_end > 1.1 * limit_s(host, before):
        raise Violation(f"{host.name} slept {clock - before.pulls_end:.3f} s past the end of a pull", host.name)


def check_row(host: NodeHost, wait: Wait, since: Since, steps: int, now: float) -> None:
    """Over rounds in a row: prompts are let in by steps, all else in each round."""
    what, key = wait
    used = steps - since.steps
    is_over = used > MOST_STEPS if what == PROMPT else since.rounds > MOST_ROUNDS
    if is_over and now - since.at > 2 * host.plan.step_s:
        waited = f"{now - since.at:.3f} s, {since.rounds} rounds and {used} steps"
        raise Violation(f"{host.name} let {key} wait {waited} for {what}", host.name)


# ---- what waits for what is free

OFFER, PROMPT = "a row and pages that are free, with its offer", "a row and pages that are free"
INSTALL, RECORD, HELD = "its place in the batch", "its record to be sent", "its row's last pull, which is over"


def waits_of(node: Node) -> Iterator[Wait]:
    scheduler, side = node.ctx.core.scheduler, node.side
    prompt = first_prompt(node)
    if prompt is not None and fits_prompt(scheduler, prompt):
        yield PROMPT, prompt.key
    if isinstance(side, DecodeSide):
        yield from waits_at_decode(node, side)
    elif isinstance(side, PrefillSide):
        for handoff in side.inflight.granted.values():
            if handoff.record is not None and not handoff.record_sent:
                yield RECORD, handoff.key


def waits_at_decode(node: Node, side: DecodeSide) -> Iterator[Wait]:
    head = first_offer(node)
    if head is not None and has_room_for(node, head):
        yield OFFER, head.request.key
    for handoff in side.transfers.open.values():
        if handoff.complete and handoff.request.state is RequestState.GRANTED:
            yield INSTALL, handoff.key
    for handoff, _ in side.transfers.copies.held:
        if not handoff.num_pulling:
            yield HELD, handoff.key


def first_offer(node: Node) -> WaitingOffer | None:
    """The oldest one whose router is known here, whose grammar has been compiled, whose source does not hold as much as
    one source may, and which waits for no other one's pages."""
    assert isinstance(node.side, DecodeSide)
    shares = Shares(node.ctx, node.side.transfers.open.values())
    offers, routers = node.side.prealloc._offers.values(), node.ctx.routers
    known = (o for o in offers if o.request.may_begin and routers.peer_of(o.request.key) is not None)
    follows = node.ctx.core.queues.prefixes.follows
    return next((o for o in known if shares.allow(o) and not follows(o.request)), None)


def has_room_for(node: Node, offer: WaitingOffer) -> bool:
    scheduler, req = node.ctx.core.scheduler, offer.request
    follows = scheduler.queues.prefixes.follows
    first = next((other for other in scheduler.queues.waiting if other.may_begin and not follows(other)), None)
    return (first is None or first.arrival > req.arrival) and fits(scheduler, req, scheduler.settings.width)


def first_prompt(node: Node) -> Request | None:
    """The oldest one that waits for memory alone, unless an offer is older. Those that nobody has granted come last:
    they give way to all others, so what is free may be kept for one of these."""
    scheduler = node.ctx.core.scheduler
    wanted = [req for req in scheduler.queues.waiting if req.may_begin and not scheduler.queues.prefixes.follows(req)]
    prompt = min(wanted, key=lambda req: (req.key in scheduler.queues.ungranted, req.arrival), default=None)
    if prompt is None or not isinstance(node.side, DecodeSide):
        return prompt
    offer = first_offer(node)
    return None if offer is not None and offer.request.arrival < prompt.arrival else prompt


def fits_prompt(scheduler: Scheduler, req: Request) -> bool:
    if req.key in scheduler.queues.ungranted and not below_cap(scheduler, req):
        return False
    return fits(scheduler, req, 0 if req.handoff_to is not None else scheduler.settings.width)


def below_cap(scheduler: Scheduler, req: Request) -> bool:
    """What is computed without a grant pins so much at most; a single one may pin more."""
    holders = [scheduler.queues.requests[key] for key in scheduler.queues.ungranted]
    pages = [scheduler.queues.budget.kv.num_held(holder.row) for holder in holders if holder.row]
    own = scheduler.settings.num_pages(req.num_tokens)
    return not pages or sum(pages) + own <= scheduler.settings.max_ungranted_pages


def fits(scheduler: Scheduler, req: Request, extra: int) -> bool:
    """Row and pages without any from the prefix cache, and what answers under way will take stays free. What open pulls
    of prefixes hold is free: they give way."""
    kv, pulled = scheduler.queues.budget.kv, scheduler.queues.budget._pulled
    missing = scheduler.settings.num_pages(req.num_tokens + extra) - sum(pulled.values())
    return bool(kv.rows.num_free + len(pulled)) and kv.num_available - missing >= scheduler.capacity.keep_free(req)


def has_room(node: Node) -> bool:
    """Whether a decode node could grant something small: nobody waits, and a row and a page are free."""
    scheduler = node.ctx.core.scheduler
    is_empty = not scheduler.queues.waiting and isinstance(node.side, DecodeSide) and not node.side.prealloc.requests()
    return (
        is_empty
        and bool(scheduler.queues.budget.kv.rows.num_free)
        and scheduler.queues.budget.kv.num_available > scheduler.capacity.keep_free()
    )
