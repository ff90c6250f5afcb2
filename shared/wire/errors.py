"""Errors on the wire: a code and a message there, objects everywhere else. The only table between the two.

node -> router   SequenceEnd       a code, of NODE_ERRORS
D -> P           Refuse, Failed    no code: what D says of a hand-off is a failed hand-off, or that D is full
"""

from __future__ import annotations

from shared.core.errors import (
    AdapterMissing,
    BatonError,
    ConfigError,
    DeadlineExceeded,
    DeviceLost,
    HandoffFailed,
    IntegrityError,
    InvalidRequest,
    NodeDraining,
    Overloaded,
    PartnerLost,
    PartnerOverloaded,
    RankLost,
    StepFailed,
    TooLarge,
    WireError,
)
from shared.wire.messages import MAX_TEXT, Failed, Key, Refuse

# What a node may end a sequence with. The others are the router's own words.
NODE_ERRORS: tuple[type[BatonError], ...] = (
    AdapterMissing,
    ConfigError,
    DeadlineExceeded,
    DeviceLost,
    HandoffFailed,
    IntegrityError,
    InvalidRequest,
    NodeDraining,
    Overloaded,
    PartnerLost,
    PartnerOverloaded,
    RankLost,
    StepFailed,
    TooLarge,
    WireError,
)
BY_CODE = {kind.code: kind for kind in NODE_ERRORS}


def error_of(code: str, message: str, *, subject: str | None = None) -> BatonError:
    """Return the error that a node's code stands for. An unknown code, of a node of another version, is a plain
    BatonError: a fault of that node."""
    return BY_CODE.get(code, BatonError)(message, subject=subject)


def refuse(key: Key, error: BatonError) -> Refuse:
    """Return a decode node's no to an Offer. The message is cut, for it may quote the offer."""
    return Refuse(key, error.message[:MAX_TEXT], is_full=isinstance(error, Overloaded))


def failed(key: Key, lease: int, error: BatonError) -> Failed:
    """Return a decode node's word that a granted hand-off has failed. The message is cut, for it may quote a peer."""
    return Failed(key, lease, error.message[:MAX_TEXT])


def error_of_peer(peer: str, message: Refuse | Failed) -> BatonError:
    """Return what a prefill node makes of its decode node's words."""
    is_full = isinstance(message, Refuse) and message.is_full
    return (PartnerOverloaded if is_full else HandoffFailed)(f"{peer}: {message.reason}")
