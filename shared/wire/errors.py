"""Turns errors into codes and messages on the wire, and back.

node -> router                    SequenceEnd       a code of NODE_ERRORS
decode node D -> prefill node P   Refuse, Failed    a code of NODE_ERRORS; AT_PARTNER has the error that P raises
"""

from __future__ import annotations

from shared.core import errors
from shared.core.errors import BatonError, HandoffFailed
from shared.wire.messages import Failed, Key, Refuse
from shared.wire.ranges import MAX_TEXT

# Nodes end sequences with these errors. All other errors come from the router.
NODE_ERRORS: tuple[type[BatonError], ...] = (
    errors.AdapterMissing,
    errors.ConfigError,
    errors.DeadlineExceeded,
    errors.DeviceLost,
    errors.HandoffFailed,
    errors.IntegrityError,
    errors.InvalidRequest,
    errors.KernelRefused,
    errors.ModelChanged,
    errors.NodeDraining,
    errors.Overloaded,
    errors.PartnerDraining,
    errors.PartnerOverloaded,
    errors.PeerUnreachable,
    errors.RankLost,
    errors.StepFailed,
    errors.TooLarge,
    errors.WireError,
)
BY_CODE = {kind.code: kind for kind in NODE_ERRORS}


def error_of(code: str, message: str, *, subject: str | None = None) -> BatonError:
    """Return a BatonError for an unknown code."""
    return BY_CODE.get(code, BatonError)(message, subject=subject)


# If D is full or draining, the router places the request elsewhere. A missed deadline and an invalid request are final.
AT_PARTNER: dict[str, type[BatonError]] = {
    errors.Overloaded.code: errors.PartnerOverloaded,
    errors.NodeDraining.code: errors.PartnerDraining,
    errors.DeadlineExceeded.code: errors.DeadlineExceeded,
    errors.InvalidRequest.code: errors.InvalidRequest,
    errors.AdapterMissing.code: errors.AdapterMissing,
}


def refuse(key: Key, error: BatonError) -> Refuse:
    """Cut the error's text, because it may quote a message."""
    return Refuse(key, error.code, error.message[:MAX_TEXT])


def failed(key: Key, lease: int, error: BatonError) -> Failed:
    return Failed(key, lease, error.code, error.message[:MAX_TEXT])


def error_of_peer(peer: str, message: Refuse | Failed) -> BatonError:
    return AT_PARTNER.get(message.code, HandoffFailed)(f"{peer}: {message.reason}")
