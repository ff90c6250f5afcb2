"""One request on its way to a decode node, as the prefill node sees it."""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.sched.events import PrefillDone
from shared.transfer.interface import PageSender


@dataclass(slots=True, eq=False)
class HandoffOut:
    """Pages in the request's own order; those before `next_page` are cached at the peer, or described already.

    | cached there | described, Ready sent | final, not described yet | being computed |
                                           ^ next_page
    """

    request: Request
    peer: str
    endpoint: str
    since: float  # when it came into the queue that it is in
    touched: float = 0.0  # last sign of life to or from the peer
    answered: bool = False
    lease: int = 0
    sender: PageSender | None = None  # None until granted
    next_page: int = 0
    num_final_tokens: int = 0
    num_describing: int = 0
    record: PrefillDone | None = None
    record_sent: bool = False
    done_at: float = 0.0

    @property
    def key(self) -> RequestKey:
        return self.request.key
