"""One outgoing hand-off, as the prefill node records it."""

from __future__ import annotations

from dataclasses import dataclass, field

from prefill_node.send_queue import Sending
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.sched.steps.events import ChunkLaunched, PrefillDone
from shared.wire.tickets import NodeTicket


@dataclass(slots=True, eq=False)
class HandoffOut:
    """Pages before `layers_end` are described in parts: first layers once computed, the rest once the pages are final.

    | cached there | described, Ready sent | final, not described yet | being computed | to be computed |
                                           ^ next_page                                 ^ layers_end
    """

    request: Request
    peer: str
    endpoint: str
    ticket: NodeTicket | None
    since: float  # time when the hand-off entered its present queue
    touched: float = 0.0  # time of the last message to or from the peer
    heard_at: float | None = None  # time of the peer's last answer; None before any
    offered: list[str] = field(default_factory=list)
    grant: Sending | None = None  # None until granted
    next_page: int = 0
    layers_end: int = 0
    launched: list[ChunkLaunched] = field(default_factory=list)  # chunks launched before the Grant
    num_final_tokens: int = 0
    record: PrefillDone | None = None
    record_sent: bool = False
    done_at: float = 0.0

    @property
    def key(self) -> RequestKey:
        return self.request.key

    @property
    def num_tokens(self) -> int:
        """Return how many tokens' KV the decode node needs."""
        return self.request.num_tokens - (self.record is not None)

    @property
    def sending(self) -> Sending:
        """The hand-off must have been granted."""
        assert self.grant is not None
        return self.grant

    @property
    def silent_since(self) -> float:
        return self.since if self.heard_at is None else self.heard_at
