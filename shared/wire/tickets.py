"""A ticket is a router's permission for a hand-off or a pull. Without a ticket a node reserves and lends nothing.

    router: makes a secret at its start, and a key from it for each epoch of a node  --Welcome-->  node
    router --Generate(ticket)--> prefill node --Offer(ticket)--> decode node: checks the code with its own key

A prefill node knows only its own key, so it can't make tickets for other nodes. A ticket is bound to one attempt, to
the node that shows it, to the node that checks it (by that node's key), to a number of tokens and to a deadline. A
pull's ticket is also bound to the last page.
"""

from __future__ import annotations

import hmac
from typing import Annotated

import msgspec
from msgspec import Meta

from shared.core.keys import RequestKey
from shared.wire.ranges import MAX_CODE_BYTES, MAX_SEQUENCES, Count, Milliseconds, Name, PageName, Text, Unsigned

DIGEST = "sha256"
SECRET_BYTES = 32
HANDS_OVER = b""  # replaces the page in a hand-off's ticket
ENCODER = msgspec.msgpack.Encoder()


class NodeTicket(msgspec.Struct, frozen=True, array_like=True):
    num_sequences: Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
    most_tokens: Count  # limit on each sequence's tokens, prompt plus answer
    deadline_ms: Milliseconds  # by the router's clock
    code: Annotated[bytes, Meta(max_length=MAX_CODE_BYTES)]


class PrefixSource(msgspec.Struct, frozen=True, array_like=True):
    """A prefill node that has more of a prompt's pages than the asking node, as far as the router knows."""

    node: Name
    epoch: Unsigned
    endpoint: Text
    num_pages: Count  # counted from the prompt's first page
    last_page: PageName  # identity of the last of these pages
    within_ms: Milliseconds  # time that computing these pages would take
    ticket: NodeTicket  # checked by the node with the pages


def ticket_key(secret: bytes, node: str) -> bytes:
    """Return the key for one epoch of a node. Only that node and its router know it. `node`: its `peer_name`."""
    return hmac.digest(secret, node.encode(), DIGEST)


def make_ticket(
    key: bytes,
    request: RequestKey,
    holder: str,
    *,
    num_sequences: int,
    most_tokens: int,
    deadline_ms: int,
    page: bytes = HANDS_OVER,
) -> NodeTicket:
    """Return the ticket for all sequences of a request.

    `key`: the key of the node that checks the ticket. `holder`: the node that shows the ticket. `page`: for a pull, the
    last page's identity.
    """
    ticket = NodeTicket(num_sequences, most_tokens, deadline_ms, b"")
    return msgspec.structs.replace(ticket, code=_code(key, request, holder, ticket, page))


def is_genuine(key: bytes, request: RequestKey, holder: str, ticket: NodeTicket, page: bytes = HANDS_OVER) -> bool:
    if not key or request.seq_index >= ticket.num_sequences:
        return False
    return hmac.compare_digest(_code(key, request, holder, ticket, page), ticket.code)


def _code(key: bytes, request: RequestKey, holder: str, ticket: NodeTicket, page: bytes) -> bytes:
    words = (*request.sibling(0), holder, ticket.num_sequences, ticket.most_tokens, ticket.deadline_ms, page)
    return hmac.digest(key, ENCODER.encode(words), DIGEST)
