"""What a sequence's end means as an error, and whether the node is to blame. Knows nothing of HTTP."""

from __future__ import annotations

from shared.core.errors import (
    AdapterMissing,
    BatonError,
    DeadlineExceeded,
    InvalidRequest,
    NodeDraining,
    NodeLost,
    Overloaded,
    PartnerDraining,
    PartnerOverloaded,
    PeerUnreachable,
)
from shared.core.states import FinishReason
from shared.wire.errors import error_of
from shared.wire.messages import SequenceEnd

_GOOD = (FinishReason.STOP.value, FinishReason.LENGTH.value)
MAX_MESSAGE_CHARS = 500
CLIENTS_WORD: dict[type[BatonError], type[BatonError]] = {
    PartnerOverloaded: Overloaded,
    PartnerDraining: NodeDraining,
    PeerUnreachable: NodeLost,
}


def error_of_end(end: SequenceEnd, node_id: str) -> BatonError | None:
    """None for an end that is an answer."""
    if end.reason in _GOOD:
        return None
    if end.reason == FinishReason.ABORT.value:
        return NodeLost(f"node {node_id} gave the request up")
    message = end.error_message[:MAX_MESSAGE_CHARS] or f"node {node_id} failed"
    return error_of(end.error_code, message, subject=node_id)


def is_partners(error: BatonError) -> bool:
    """Whether the node that sent it blames the other one of the hand-off."""
    return isinstance(error, PartnerDraining | PartnerOverloaded)


def is_node_fault(error: BatonError) -> bool:
    """Only 5xx count against a node; a full one (429) or a bad request (4xx) says nothing about its health, nor does
    its word that it can't reach another node, or that it lacks an adapter."""
    nobodys = isinstance(error, DeadlineExceeded | AdapterMissing | PeerUnreachable)
    return error.status >= 500 and not nobodys and not is_partners(error)


def is_nobodys_fault(error: BatonError) -> bool:
    """Whether the attempt ended without a failure: neither node, nor the request, is to blame."""
    return isinstance(error, PartnerDraining | PeerUnreachable)


def can_resume(error: BatonError) -> bool:
    """Whether another node may do better: not with a request that is wrong, nor when its time is over."""
    return not isinstance(error, InvalidRequest | DeadlineExceeded)


def given_up(error: BatonError, num_attempts: int) -> BatonError:
    """The last attempt's error, as the client gets it: which node was full is the router's concern."""
    kind = CLIENTS_WORD.get(type(error), type(error))
    tried = f"; given up after {num_attempts} attempts" if num_attempts > 1 else ""
    return kind(error.message + tried, subject=error.subject)
