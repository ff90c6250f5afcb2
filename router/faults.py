"""What a sequence's end means as an error, and whether the node is to blame. Knows nothing of HTTP."""

from __future__ import annotations

from shared.core.errors import (
    AdapterMissing,
    BatonError,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeDraining,
    NodeLost,
    Overloaded,
    PartnerOverloaded,
    StepFailed,
)
from shared.core.request import FinishReason
from shared.wire.messages import SequenceEnd

_KINDS: tuple[type[BatonError], ...] = (
    AdapterMissing,
    DeadlineExceeded,
    HandoffFailed,
    InvalidRequest,
    NodeDraining,
    NodeLost,
    Overloaded,
    StepFailed,
)
_BY_CODE = {kind.code: kind for kind in _KINDS} | {PartnerOverloaded.code: Overloaded}  # of two: the router's concern
_GOOD = (FinishReason.STOP.value, FinishReason.LENGTH.value)
MAX_MESSAGE_CHARS = 500


def error_of_end(end: SequenceEnd, node_id: str) -> BatonError | None:
    """None for an end that is an answer."""
    if end.reason in _GOOD:
        return None
    if end.reason == FinishReason.ABORT.value:
        return NodeLost(f"node {node_id} gave the request up")
    kind = _BY_CODE.get(end.error_code, BatonError)
    return kind(end.error_message[:MAX_MESSAGE_CHARS] or f"node {node_id} failed", subject=node_id)


def is_node_fault(end: SequenceEnd, error: BatonError) -> bool:
    """Only 5xx count against a node; a full one (429) or a bad request (4xx) says nothing about its health, nor does
    its word that another node is lost, or that it lacks an adapter."""
    is_fault = error.status >= 500 and not isinstance(error, DeadlineExceeded | AdapterMissing)
    return is_fault and end.error_code != NodeLost.code


def can_resume(error: BatonError) -> bool:
    """Whether another node may do better: not with a request that is wrong, nor when its time is over."""
    return not isinstance(error, InvalidRequest | DeadlineExceeded)


def given_up(error: BatonError, num_attempts: int) -> BatonError:
    """The last attempt's error, as the client gets it."""
    if num_attempts < 2:
        return error
    return type(error)(f"{error.message}; given up after {num_attempts} attempts", subject=error.subject)
