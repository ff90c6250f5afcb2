"""Prealloc: keep Offers until there is memory for their requests. Grant them in order of arrival. A grant reserves all
memory that its request needs.

Among Offers and the scheduler's waiting requests, the oldest gets memory first.

A source that hears nothing for a whole lease fails the hand-off. So the source gets a `Wait` immediately, and every
quarter of a lease.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from decode_node.handoff_in import HandoffIn, WaitingOffer
from decode_node.shares import MOST_OF_ONE_SOURCE, Shares
from decode_node.vouchers import Vouchers
from shared.core.errors import Aborted, BatonError, HandoffFailed, NodeDraining, Overloaded, TooLarge
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.states import QueueStage
from shared.node.assembly.fingerprint import difference
from shared.node.loop.context import NodeContext
from shared.node.records.convert import request_of
from shared.transfer.transports import choose_transport
from shared.wire.codec import key_of
from shared.wire.errors import refuse
from shared.wire.messages import Offer, Wait

WAITS_PER_LEASE = 4


@dataclass(frozen=True, slots=True)
class Granted:
    waiting: WaitingOffer
    cached_prefix_len: int


class Prealloc:
    """Owns Offers until they are granted."""

    def __init__(self, ctx: NodeContext) -> None:
        self._ctx = ctx
        self._vouchers = Vouchers(ctx)
        self._offers: dict[RequestKey, WaitingOffer] = {}
        # Offer -> time when its next `Wait` is due; earliest first
        self._wait_at: OrderedDict[RequestKey, float] = OrderedDict()

    def requests(self) -> list[Request]:
        return [waiting.request for waiting in self._offers.values()]

    def add_offer(self, source: str, offer: Offer, now: float) -> None:
        key = key_of(offer.key)
        if key in self._ctx.core.requests or key in self._offers:
            self._ctx.drop(source, "Offer of a known request")
            return
        req = request_of(offer, self._ctx.next_arrival(), now)
        facts = self._ctx.facts
        transport = choose_transport(facts.host_id, facts.transports, offer.host_id, offer.transports)
        refusal = self._refusal(req, offer) or self._vouchers.refusal(req, offer, source, now)
        if transport is None:
            refusal = refusal or HandoffFailed("the nodes have no transport in common")
        elif refusal is None and self._has_room(source):
            waiting = WaitingOffer(req, source, offer, transport, now, is_vouched=False)
            req.lacks_draft_state = bool(self._ctx.core.future_map.extras) and not waiting.has_drafts
            self._offers[key] = waiting
            self._ctx.spans.follow(key, offer.trace)
            self._wait_at[key] = now
            self._wait_at.move_to_end(key, last=False)
            if self._ctx.routers.session_key_of(key) is not None:
                self._begin(waiting, now)
            return
        refusal = refusal or Overloaded(f"{facts.node_id} has too many offers waiting")
        self._ctx.outbox.send(source, refuse(offer.key, refusal))

    def _has_room(self, source: str) -> bool:
        most = self._ctx.facts.max_waiting
        of_source = sum(waiting.source == source for waiting in self._offers.values())
        return len(self._offers) < most and of_source < max(1, int(MOST_OF_ONE_SOURCE * most))

    def _refusal(self, req: Request, offer: Offer) -> BatonError | None:
        ctx = self._ctx
        if ctx.tombstones.covers(req.key):
            return Aborted("aborted or ended already")
        if ctx.routers.is_over(req.key):
            return Aborted("its router has restarted since")
        if ctx.leaving is not None:
            return NodeDraining(f"{ctx.facts.node_id} is shutting down")
        if not ctx.core.queues.budget.can_ever_hold(req):
            return TooLarge(f"{req.num_tokens} tokens and an answer can never fit {ctx.facts.node_id}")
        misfit = difference(ctx.facts.fingerprint, offer.fingerprint) or self._other_masks(req, offer)
        if misfit:
            return HandoffFailed(misfit)
        return ctx.missing_adapter(req, is_offered=True) or ctx.bad_ids(req)

    def _other_masks(self, req: Request, offer: Offer) -> str:
        """Return how the two nodes' grammar versions differ, or "" if they are equal or the request has no grammar."""
        ours, theirs = self._ctx.facts.fingerprint.grammar, offer.fingerprint.grammar
        return f"grammar differs: {ours} here, {theirs} there" if req.ask.sampling.grammar and ours != theirs else ""

    def grant(self, now: float, open_handoffs: Iterable[HandoffIn]) -> list[Granted]:
        """Grant Offers in order while memory lasts, and send the `Wait`s that are due.

        Skip an Offer while its router's Welcome is missing, its grammar is not compiled, its source's share is full, or
        pages that it needs are already coming from its source.
        """
        core = self._ctx.core
        queues, prefixes = core.queues, core.queues.prefixes
        queues.oldest_offer = None
        granted: list[Granted] = []
        shares = Shares(self._ctx, open_handoffs) if self._offers else None
        for waiting in list(self._offers.values()):
            req = waiting.request
            if self._ctx.routers.peer_of(req.key) is None or not self._is_vouched(waiting, now):
                continue
            if not self._is_compiled(waiting):
                continue
            assert shares is not None
            if not shares.allow(waiting) or self._follows(waiting, now):
                continue
            older = (other for other in queues.waiting if other.may_begin and not prefixes.follows(other))
            first = next(older, None)
            older_waits = first is not None and first.arrival < req.arrival
            cached = None if older_waits else core.scheduler.grants.grant(req, waiting.source)
            if cached is None:
                queues.oldest_offer = req.arrival
                break
            self._forget(req.key)
            shares.take_share(waiting)
            self._ctx.metrics.observe_queue(QueueStage.PREALLOC, now - waiting.since)
            self._ctx.spans.add_span(req.key, "memory", waiting.since, now, {})
            granted.append(Granted(waiting, cached))
        self._tell_to_wait(now)
        return granted

    def _follows(self, waiting: WaitingOffer, now: float) -> bool:
        """Return whether the Offer waits for pages that its source brings for another request.

        Not for long: the source may be unable to begin the other request yet."""
        if now - waiting.since > self._ctx.facts.lease_s / WAITS_PER_LEASE:
            return False
        return self._ctx.core.queues.prefixes.makes_wait(waiting.request, waiting.source)

    def _is_vouched(self, waiting: WaitingOffer, now: float) -> bool:
        """Return whether the router vouches for the Offer. If the Offer came before its router's Welcome, its
        ticket is checked now, and the Offer may be refused."""
        if waiting.is_vouched:
            return True
        refusal = self._vouchers.refusal(waiting.request, waiting.offer, waiting.source, now)
        if refusal is not None:
            self._refuse(waiting, refusal)
            return False
        return self._begin(waiting, now)

    def _begin(self, waiting: WaitingOffer, now: float) -> bool:
        """Use up the ticket, and start to compile the grammar. Refuse the Offer and return False if that fails."""
        self._vouchers.spend(waiting.request, waiting.offer, now)
        waiting.is_vouched = True
        error = self._ctx.unconstrained(waiting.request)
        if error is not None:
            self._refuse(waiting, error)
        return error is None

    def _is_compiled(self, waiting: WaitingOffer) -> bool:
        """Return whether the grammar, if any, is compiled. Refuse the Offer if compilation failed."""
        req, constraint = waiting.request, waiting.request.constraint
        if not req.may_begin:
            return False
        if constraint is not None and constraint.error is not None:
            self._refuse(waiting, constraint.error)
            return False
        return True

    def _tell_to_wait(self, now: float) -> None:
        again = now + self._ctx.facts.lease_s / WAITS_PER_LEASE
        while self._wait_at and next(iter(self._wait_at.values())) <= now:
            key = next(iter(self._wait_at))
            self._wait_at[key] = again
            self._wait_at.move_to_end(key)
            waiting = self._offers[key]
            self._ctx.outbox.send(waiting.source, Wait(waiting.offer.key, "no memory now"))

    def _refuse(self, waiting: WaitingOffer, error: BatonError) -> None:
        self._forget(waiting.request.key)
        self._ctx.outbox.send(waiting.source, refuse(waiting.offer.key, error))

    def _forget(self, key: RequestKey) -> None:
        req = self._offers.pop(key).request
        del self._wait_at[key]
        self._ctx.core.queues.prefixes.stop_waiting(req)
        if req.constraint is not None:
            req.constraint.cancel()

    def source_of(self, key: RequestKey) -> str | None:
        found = self._offers.get(key)
        return None if found is None else found.source

    def take_offer(self, key: RequestKey) -> WaitingOffer | None:
        found = self._offers.get(key)
        if found is not None:
            self._forget(key)
        return found

    def take_of_source(self, source: str) -> list[WaitingOffer]:
        return self._take_offers(lambda waiting: waiting.source == source)

    def take_expired(self, now: float) -> list[WaitingOffer]:
        return self._take_offers(lambda waiting: waiting.request.deadline < now)

    def take_unknown(self, now: float) -> list[WaitingOffer]:
        """Remove and return Offers whose router's Welcome has been missing for `lease_s`."""
        lease_s, routers = self._ctx.facts.lease_s, self._ctx.routers
        return self._take_offers(
            lambda waiting: now - waiting.since > lease_s and routers.peer_of(waiting.request.key) is None
        )

    def _take_offers(self, wanted: Callable[[WaitingOffer], bool]) -> list[WaitingOffer]:
        taken = [waiting for waiting in self._offers.values() if wanted(waiting)]
        for waiting in taken:
            self._forget(waiting.request.key)
        return taken
