"""The state machines as the simulation names them, and every transition that a long run must have taken."""

from __future__ import annotations

from shared.core.request import TRANSITIONS
from tests.support.sim.report import Step


def steps(machine: str, *chains: str) -> frozenset[Step]:
    """`a, b -> c, d`: every way from one of the first to one of the second."""
    found = set()
    for chain in chains:
        olds, news = (side.strip().split(", ") for side in chain.split("->"))
        found |= {(machine, old, new) for old in olds for new in news}
    return frozenset(found)


EXPECTED_REQUEST = frozenset(("request", old.value, new.value) for old in TRANSITIONS for new in TRANSITIONS[old])
EXPECTED_ROUTER = steps(
    "router",
    "new -> P+D queued, D queued, P queued, P+D streaming, D streaming, P streaming, parked",
    "new, P+D queued -> P+D handed over",
    *(f"{place} queued -> {place} streaming, over, retry" for place in ("P+D", "D", "P")),
    *(f"{place} streaming -> over, retry" for place in ("P+D", "D", "P")),
    "P+D streaming -> P+D handed over",
    "P+D handed over -> over, retry",
    "parked -> P+D queued, D queued, P queued, P+D streaming, D streaming, P streaming, over",
)
EXPECTED_SOURCE = steps(
    "source",
    "new -> offered, behind its leader",
    "behind its leader -> offered, gone",
    "offered -> told to wait, granted, record sent, gone",
    "told to wait -> granted, record sent, gone",
    "granted -> record sent, gone",
    "record sent -> gone",
)
EXPECTED_SINK = steps(
    "sink",
    "new -> waiting, granted",
    "waiting -> granted, gone",
    "granted -> pulling, record here, held, gone",
    "pulling -> granted, record here, held, gone",
    "record here -> held, gone",
    "held -> gone",
)
EXPECTED = EXPECTED_REQUEST | EXPECTED_ROUTER | EXPECTED_SOURCE | EXPECTED_SINK
