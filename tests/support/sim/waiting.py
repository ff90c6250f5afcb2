"""Oracles and loads that today's code does not pass, each behind the name of its defect.

A mood or a check asks `is_due`. When the mend is merged its line goes, and what it held back counts at once. Nothing
else in the simulation is switched off.
"""

from __future__ import annotations

from collections.abc import Sequence

WAITING: dict[str, str] = {}


def mended(defects: Sequence[str]) -> None:
    """Hold the code to these already, in this process."""
    for defect in defects:
        WAITING.pop(defect, None)


def is_due(defect: str) -> bool:
    """Return whether the code is held to what this defect broke."""
    return defect not in WAITING
