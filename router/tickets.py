"""The router's word for hand-offs: what nodes are told, and the ticket of each request. Sans-IO."""

from __future__ import annotations

import secrets

from router.journal import OpenRequest
from router.registry import RegisteredNode
from shared.core.keys import RequestKey
from shared.wire.ranges import MAX_MS, MAX_SEQUENCES
from shared.wire.tickets import SECRET_BYTES, Ticket, make_ticket, ticket_key


class Tickets:
    """One per life of a router: its secret leaves the process only as the keys of nodes."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES)

    def key_of(self, peer: str) -> bytes:
        """Return the key of one life of a node, for its Welcome."""
        return ticket_key(self._secret, peer)

    def issue(self, request: OpenRequest, key: RequestKey, prefill: RegisteredNode, decode: RegisteredNode) -> Ticket:
        """Return the ticket with which the prefill node may hand this attempt to the decode node."""
        return make_ticket(
            self.key_of(decode.peer),
            key,
            prefill.peer,
            num_sequences=min(len(request.sequences), MAX_SEQUENCES),
            most_tokens=len(request.prompt_ids) + request.sampling.max_tokens,
            deadline_ms=deadline_ms(request.deadline),
        )


def deadline_ms(deadline: float) -> int:
    """Return a deadline of the router's clock as it stands in tickets."""
    return max(0, round(1000 * min(deadline, MAX_MS / 1000)))
