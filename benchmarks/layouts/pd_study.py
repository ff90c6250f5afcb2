"""What was measured and planned for both layouts, and where the plan was wrong. Pure values."""

from __future__ import annotations

import math
from dataclasses import dataclass

SIDES = ("aggregated", "disaggregated")
FIELDS = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99", "tpot_p50", "goodput", "tokens_per_s")
NEEDED, GAP = 0.25, 0.15


@dataclass(frozen=True, slots=True)
class Figures:
    """Seconds, and requests or tokens per second."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    tpot_p50: float
    goodput: float
    tokens_per_s: float
    slo_share: float
    num_ok: int
    num_failed: int


@dataclass(frozen=True, slots=True)
class Row:
    """A mix on both layouts. Keys: "aggregated", "disaggregated"."""

    mix: str
    what: str
    rate: float
    is_held_out: bool
    measured: dict[str, Figures]
    planned: dict[str, Figures]

    def gap(self, figures: dict[str, Figures], name: str) -> float:
        """How far disaggregated is above aggregated; latencies count downwards, so more is always better."""
        one, other = (getattr(figures[side], name) for side in ("disaggregated", "aggregated"))
        if min(one, other) <= 0:
            return 0.0 if one == other else math.copysign(math.inf, one - other)
        return one / other - 1 if name in ("goodput", "tokens_per_s") else other / one - 1

    def error(self, side: str, name: str) -> float:
        planned, measured = getattr(self.planned[side], name), getattr(self.measured[side], name)
        return planned / measured - 1 if measured else (0.0 if not planned else math.inf)


@dataclass(frozen=True, slots=True)
class Study:
    machine: str
    seconds: float
    slo: str
    rows: list[Row]


def misses(found: Study) -> list[str]:
    """Where the planner was further off than it may be, or chose the wrong side of a clear gap."""
    lines = []
    for row in found.rows:
        for side in SIDES:
            off = [(name, row.error(side, name)) for name in FIELDS if abs(row.error(side, name)) > NEEDED]
            lines += [f"{row.mix}, {side}: {name} is {error:+.0%} off" for name, error in off]
        for name in ("ttft_p50", "itl_p99", "goodput"):
            real, virtual = row.gap(row.measured, name), row.gap(row.planned, name)
            if abs(real) > GAP and real * virtual <= 0:
                lines.append(f"{row.mix}: {name} is {real:+.0%} better disaggregated, the planner says {virtual:+.0%}")
    return lines
