"""Errors on the wire: a code and a message there, objects everywhere else. The only table between the two."""

from __future__ import annotations

from shared.core.errors import (
    AdapterMissing,
    BatonError,
    ConfigError,
    DeadlineExceeded,
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

# What a node may end a sequence with. The others are the router's own words.
NODE_ERRORS: tuple[type[BatonError], ...] = (
    AdapterMissing,
    ConfigError,
    DeadlineExceeded,
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
