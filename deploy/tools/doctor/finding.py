"""A check's result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, LOOK, BROKEN = "ok", "look", "broken"
LEVELS = (OK, LOOK, BROKEN)  # from best to worst


@dataclass(frozen=True, slots=True)
class Finding:
    """`where`: a node, endpoint, file or machine. `advice`: "" if all is well."""

    check: str
    where: str
    level: str
    what: str
    advice: str = ""


def worst(findings: Sequence[Finding]) -> str:
    return max((finding.level for finding in findings), key=LEVELS.index, default=OK)


def or_well(found: list[Finding], check: str, where: str, what: str) -> list[Finding]:
    return found or [Finding(check, where, OK, what)]
