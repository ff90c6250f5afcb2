"""Check whether a router vouches for an Offer, and for how long. A ticket allows one hand-off per sequence.

time by our clock = time by the router's clock + lead of our clock when Welcome came + largest drift since then
"""

from __future__ import annotations

from shared.core.errors import BatonError, DeadlineExceeded, HandoffFailed
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.node.loop.context import NodeContext
from shared.node.records.spent_tickets import SpentTickets
from shared.node.routers.lives import local_time
from shared.observe.metric_names import REFUSED_PREFIX, REFUSED_TICKET
from shared.wire.messages import Offer
from shared.wire.tickets import is_genuine


class Vouchers:
    """Owned by Prealloc."""

    def __init__(self, ctx: NodeContext) -> None:
        self._ctx = ctx
        self.spent: SpentTickets[RequestKey] = SpentTickets()

    def refusal(self, req: Request, offer: Offer, source: str, now: float) -> BatonError | None:
        """Return why an Offer is refused; None if its ticket is valid or its router is not known yet.

        A valid ticket's deadline also limits the request's deadline.
        """
        session = self._ctx.routers.session_key_of(req.key)
        if session is None:
            return None
        ticket = offer.ticket
        if ticket is None or not is_genuine(session.key, req.key, source, ticket):
            return self._refuse(source, "an Offer without a router's ticket")
        if req.key in self.spent:
            return self._refuse(source, "an Offer whose ticket was used before")
        if len(req.ask.prompt_ids) + req.ask.sampling.max_tokens > ticket.most_tokens:
            return self._refuse(source, "an Offer of more tokens than its ticket allows")
        until = local_time(session, ticket.deadline_ms, now)
        if until < now:
            return DeadlineExceeded("the request's ticket has expired")
        req.deadline = min(req.deadline, until)
        return None

    def spend(self, req: Request, offer: Offer, now: float) -> None:
        session, ticket = self._ctx.routers.session_key_of(req.key), offer.ticket
        assert session is not None and ticket is not None
        self.spent.spend(req.key, local_time(session, ticket.deadline_ms, now), now)

    def _refuse(self, source: str, why: str) -> HandoffFailed:
        self._ctx.metrics.count(f"{REFUSED_PREFIX}{REFUSED_TICKET}")
        self._ctx.log.warning((source, why), "refused an offer", peer=source, why=why)
        return HandoffFailed(why)
