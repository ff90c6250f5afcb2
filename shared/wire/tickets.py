"""A router's word behind each hand-off: without one a decode node reserves nothing. Knows nothing of sockets.

    router: a secret per life, and of it a key for each life of a node  --Welcome-->  node
    router --Generate(ticket)--> prefill node --Offer(ticket)--> decode node: its own key makes the same code, or not

A prefill node knows its own key only, so it can't make a ticket for another node. A ticket is for one attempt of one
request, from one prefill node to one decode node, with so many tokens, until its deadline.
"""

from __future__ import annotations

import hmac
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.core.keys import RequestKey
from shared.wire.ranges import MAX_CODE_BYTES, MAX_SEQUENCES, Count, Milliseconds

DIGEST = "sha256"
SECRET_BYTES = 32
ENCODER = msgspec.msgpack.Encoder()


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The router's word that one prefill node may hand one attempt to one decode node."""

    num_sequences: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
    most_tokens: Count  # prompt and answer of each sequence
    deadline_ms: Milliseconds  # by the router's clock
    code: Annotated[bytes, Meta(max_length=MAX_CODE_BYTES)]


def ticket_key(secret: bytes, node: str) -> bytes:
    """Return the key of one life of a node (`peer_name`), known to it and its router alone."""
    return hmac.digest(secret, node.encode(), DIGEST)


def make_ticket(
    key: bytes, request: RequestKey, source: str, *, num_sequences: int, most_tokens: int, deadline_ms: int
) -> Ticket:
    """Return the ticket of a request (of all its sequences) for the decode node that has this key.

    most_tokens: prompt and answer of one sequence. deadline_ms: by the router's clock."""
    ticket = Ticket(num_sequences, most_tokens, deadline_ms, b"")
    return msgspec.structs.replace(ticket, code=_code(key, request, source, ticket))


def is_genuine(key: bytes, request: RequestKey, source: str, ticket: Ticket) -> bool:
    """Return whether the holder of the key made this ticket, for this request and this prefill node."""
    if not key or request.seq_index >= ticket.num_sequences:
        return False
    return hmac.compare_digest(_code(key, request, source, ticket), ticket.code)


def _code(key: bytes, request: RequestKey, source: str, ticket: Ticket) -> bytes:
    words = (*request.sibling(0), source, ticket.num_sequences, ticket.most_tokens, ticket.deadline_ms)
    return hmac.digest(key, ENCODER.encode(words), DIGEST)
