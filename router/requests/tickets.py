"""Sign the tickets by which nodes accept hand-offs and pulls from each other. Sans-IO."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from router.fleet.registry import RegisteredNode
from router.requests.journal import OpenRequest
from shared.core.keys import RequestKey
from shared.wire.ranges import MAX_MS, MAX_SEQUENCES
from shared.wire.tickets import SECRET_BYTES, NodeTicket, make_ticket, ticket_key


class PageSpan(NamedTuple):
    """The first pages of a prompt. `last`: the last page's identity."""

    num_tokens: int
    last: bytes


class Tickets:
    """Signs for one router process. Nodes get only keys derived from the process's secret."""

    def __init__(self) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES)

    def key_of(self, peer: str) -> bytes:
        return ticket_key(self._secret, peer)

    def issue_pull(
        self, request: OpenRequest, key: RequestKey, prefill: RegisteredNode, source: RegisteredNode, pages: PageSpan
    ) -> NodeTicket:
        return make_ticket(
            self.key_of(source.peer),
            key,
            prefill.peer,
            num_sequences=1,
            most_tokens=pages.num_tokens + 1,
            deadline_ms=deadline_ms(request.deadline),
            page=pages.last,
        )

    def issue(
        self, request: OpenRequest, key: RequestKey, prefill: RegisteredNode, decode: RegisteredNode
    ) -> NodeTicket:
        return make_ticket(
            self.key_of(decode.peer),
            key,
            prefill.peer,
            num_sequences=min(request.asked.num_sequences, MAX_SEQUENCES),
            most_tokens=request.asked.most_tokens,
            deadline_ms=deadline_ms(request.deadline),
        )


def deadline_ms(deadline: float) -> int:
    return max(0, round(1000 * min(deadline, MAX_MS / 1000)))
