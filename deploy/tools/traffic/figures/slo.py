"""Bounds on one request's latencies. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields

from deploy.tools.traffic.figures.record import RequestRecord
from shared.core.errors import ConfigError

UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0}
BOUND = re.compile(r"(ttft|tpot|itl|e2e)\s*(?:<=?|=)\s*([0-9.]+)\s*(ms|s|)")


@dataclass(frozen=True, slots=True)
class Slo:
    """Bounds in seconds, or infinity. `itl` bounds an answer's longest wait for a token, and `tpot` the mean wait."""

    ttft: float = math.inf
    tpot: float = math.inf
    itl: float = math.inf
    e2e: float = math.inf

    def is_met(self, record: RequestRecord) -> bool:
        """Failed, cut and empty answers never meet the bounds."""
        if not record.is_whole:
            return False
        longest = max(record.gaps(), default=0.0)
        in_time = record.ttft <= self.ttft and record.tpot <= self.tpot
        return in_time and longest <= self.itl and record.e2e <= self.e2e

    def __str__(self) -> str:
        bounds = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return ", ".join(f"{name} <= {1e3 * bound:g} ms" for name, bound in bounds if bound < math.inf) or "none"


def parse_slo(text: str) -> Slo:
    """Parse bounds such as "ttft<1s,tpot<50ms". Raise ConfigError for other text."""
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = BOUND.fullmatch(part)
        if match is None or match[1] in found:
            raise ConfigError(
                f"--slo: {part!r} should look like ttft<500ms; known are ttft, tpot, itl and e2e, once each"
            )
        try:
            found[match[1]] = float(match[2]) * UNITS[match[3]]
        except ValueError:
            raise ConfigError(f"--slo: {match[2]!r} is not a number") from None
    return Slo(**found)
