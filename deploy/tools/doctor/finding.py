"""What a check says: how bad, where, what, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

OK, LOOK, BROKEN = "ok", "look", "broken"
LEVELS = (OK, LOOK, BROKEN)  # from good to bad


@dataclass(frozen=True, slots=True)
class Finding:
    """`check`: what was looked at; `where`: node, endpoint, file or machine; `advice` is empty when all is well."""

    check: str
    where: str
    level: str
    what: str
    advice: str = ""


def worst(findings: Sequence[Finding]) -> str:
    return max((finding.level for finding in findings), key=LEVELS.index, default=OK)


def or_well(found: list[Finding], check: str, where: str, what: str) -> list[Finding]:
    """What was found; that all is well where that is nothing."""
    return found or [Finding(check, where, OK, what)]
