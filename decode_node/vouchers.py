"""Whether a router stands behind an Offer, and until when. Each ticket opens one hand-off per sequence, once.

router's clock + (ours - its, as its Welcome came) + what two clocks may have drifted apart since = our clock
"""

from __future__ import annotations

from collections import OrderedDict

from shared.core.errors import BatonError, DeadlineExceeded, HandoffFailed
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.node.context import NodeContext
from shared.node.routers import RoutersWord
from shared.observe.metric_names import REFUSED_PREFIX, REFUSED_TICKET
from shared.wire.messages import Offer
from shared.wire.tickets import is_genuine

DRIFT = 0.001  # two clocks that NTP slews, 500 ppm each
MAX_SPENT = 1 << 16


class Vouchers:
    """Owned by Prealloc. `spent` holds keys until their tickets are over; the oldest go first when there are too
    many."""

    def __init__(self, ctx: NodeContext) -> None:
        self._ctx = ctx
        self._spent: OrderedDict[RequestKey, float] = OrderedDict()

    def refusal(self, req: Request, offer: Offer, source: str, now: float) -> BatonError | None:
        """Why an Offer is nobody's word; None when its router's word is not known here yet, or stands behind it. Then
        the request ends with its ticket, whatever the Offer says."""
        word = self._ctx.routers.word_of(req.key)
        if word is None:
            return None
        ticket = offer.ticket
        if ticket is None or not is_genuine(word.key, req.key, source, ticket):
            return self._refuse(source, "an Offer without a router's ticket")
        if req.key in self._spent:
            return self._refuse(source, "an Offer whose ticket was used before")
        if len(req.prompt_ids) + req.sampling.max_tokens > ticket.most_tokens:
            return self._refuse(source, "an Offer of more tokens than its ticket")
        until = local_time(word, ticket.deadline_ms, now)
        if until < now:
            return DeadlineExceeded("the ticket of the request is over")
        req.deadline = min(req.deadline, until)
        return None

    def spend(self, req: Request, now: float) -> None:
        """The ticket opens nothing any more for this sequence."""
        while self._spent and (len(self._spent) >= MAX_SPENT or next(iter(self._spent.values())) < now):
            self._spent.popitem(last=False)
        self._spent[req.key] = req.deadline

    def _refuse(self, source: str, why: str) -> HandoffFailed:
        self._ctx.metrics.count(f"{REFUSED_PREFIX}{REFUSED_TICKET}")
        self._ctx.log.warning((source, why), "refused an offer", peer=source, why=why)
        return HandoffFailed(why)


def local_time(word: RoutersWord, deadline_ms: int, now: float) -> float:
    """Return a router's time by our clock, or a little later: never earlier."""
    return deadline_ms / 1000 + word.ahead_s + DRIFT * (now - word.since)
