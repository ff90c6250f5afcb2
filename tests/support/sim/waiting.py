"""Oracles and loads that today's code does not pass, each behind the name of its defect.

A mood or a check asks `is_due`. When the mend is merged its line goes, and what it held back counts at once. Nothing
else in the simulation is switched off.
"""

from __future__ import annotations

from collections.abc import Sequence

WAITING = {
    "E1": "offers behind the head of a decode node's queue hear nothing, and fail when they wait longer than a lease",
    "E2": "a pair that can't connect costs every request a lease: nothing ends the dial, nobody remembers the pair",
    "E3": "a place once given is never given up for a better one: until it is, no resume is a move",
    "E18": "a node drained at one router never ends while another router's streams run there",
    "E19": "two routers that say the same id take each other for restarted",
}


def mended(defects: Sequence[str]) -> None:
    """Hold the code to these already, in this process."""
    for defect in defects:
        WAITING.pop(defect, None)


def is_due(defect: str) -> bool:
    """Return whether the code is held to what this defect broke."""
    return defect not in WAITING
