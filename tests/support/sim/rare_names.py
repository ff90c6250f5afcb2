"""The rare events that a long run must have met, by name. Loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping

ENOUGH = 20  # times in a long run
LONG_RUN = 2000  # seeds
EVENTS = (
    "unpin then grant",
    "unpin then grant, computed again",
    "revoke while pulling",
    "retracted after its grant",
    "tombstone before offer",
    "offer before its router's Welcome",
    "wait then elsewhere",
    "wait longer than a lease, then grant",
    "grant after give-up",
    "late Installed",
    "Welcome of an old connection",
    "drain told again",
    "resumed twice",
    "connection taken over",
    "dial never answered",
    "full queue",
    "half a message dropped",
    "offered under a grammar",
    "retracted under a grammar",
    "resumed under a grammar",
    "pull.pulled",
    "pull.refused",
    "pull.late",
    "pull.lost",
    "pull.ended",
    "pull.no_memory",
    "pull.not_asked",
    "pull.cached_here",
    "pull.under_way",
    "pull.gave_way",
    "loans_gave_way",
)


def seldom(counts: Mapping[str, int]) -> list[str]:
    """Events that happened less often than a long run must see them."""
    return [name for name in EVENTS if counts.get(name, 0) < ENOUGH]
