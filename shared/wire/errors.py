"""Errors on the wire: a code and a message there, objects everywhere else. The only table between the two.

node -> router   SequenceEnd       a code, of NODE_ERRORS
D -> P           Refuse, Failed    a code, of the same; what P tells the router then stands in AT_PARTNER
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
    KernelRefused,
    NodeDraining,
    Overloaded,
    PartnerDraining,
    PartnerOverloaded,
    PeerUnreachable,
    RankLost,
    StepFailed,
    TooLarge,
    WireError,
)
from shared.wire.messages import Failed, Key, Refuse
from shared.wire.ranges import MAX_TEXT

# What a node may end a sequence with. The others are the router's own words.
NODE_ERRORS: tuple[type[BatonError], ...] = (
    AdapterMissing,
    ConfigError,
    DeadlineExceeded,
    DeviceLost,
    HandoffFailed,
    IntegrityError,
    InvalidRequest,
    KernelRefused,
    NodeDraining,
    Overloaded,
    PartnerDraining,
    PartnerOverloaded,
    PeerUnreachable,
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


# What a decode node's word becomes at its prefill node, which tells the router. Where D is full, or leaves, nobody has
# failed, and the request goes on elsewhere; a deadline is over for every node. All else is a failed hand-off.
AT_PARTNER: dict[str, type[BatonError]] = {
    Overloaded.code: PartnerOverloaded,
    NodeDraining.code: PartnerDraining,
    DeadlineExceeded.code: DeadlineExceeded,
}


def refuse(key: Key, error: BatonError) -> Refuse:
    """Return a decode node's no to an Offer. The message is cut, for it may quote the offer."""
    return Refuse(key, error.code, error.message[:MAX_TEXT])


def failed(key: Key, lease: int, error: BatonError) -> Failed:
    """Return a decode node's word that a granted hand-off has failed. The message is cut, for it may quote a peer."""
    return Failed(key, lease, error.code, error.message[:MAX_TEXT])


def error_of_peer(peer: str, message: Refuse | Failed) -> BatonError:
    """Return what a prefill node makes of its decode node's words."""
    return AT_PARTNER.get(message.code, HandoffFailed)(f"{peer}: {message.reason}")
