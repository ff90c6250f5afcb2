"""One request on its way to a decode node, as the prefill node sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.sched.events import ChunkLaunched, PrefillDone
from shared.transfer.interface import PageSender
from shared.wire.tickets import Ticket


@dataclass(slots=True, eq=False)
class HandoffOut:
    """Pages in the request's own order; those before `next_page` are cached at the peer, or described already. Of those
    before `layers_end` the first layers are described, or will be as soon as they are computed.

    | cached there | described, Ready sent | final, not described yet | being computed | to be computed |
                                           ^ next_page                                 ^ layers_end
    """

    request: Request
    peer: str
    endpoint: str
    ticket: Ticket | None
    since: float  # when it came into the queue that it is in
    touched: float = 0.0  # last sign of life to or from the peer
    heard_at: float | None = None  # offered: when the peer last said that it has to wait
    offered: list[str] = field(default_factory=list)  # transports, the one that is wanted first
    lease: int = 0
    sender: PageSender | None = None  # None until granted
    next_page: int = 0
    layers_end: int = 0
    launched: list[ChunkLaunched] = field(default_factory=list)  # until granted: what may be computed still by then
    num_final_tokens: int = 0
    num_describing: int = 0  # page sets that the transfer stream describes; those that wait for room don't count
    record: PrefillDone | None = None
    record_sent: bool = False
    done_at: float = 0.0

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def silent_since(self) -> float:
        """Offered: from when on the peer has said nothing of it."""
        return self.since if self.heard_at is None else self.heard_at
