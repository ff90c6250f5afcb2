"""The verdict of one truth check. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "failed", "doubtful", "skipped"]


@dataclass(frozen=True, slots=True)
class Check:
    """`text`: the result in one line. `details`: single findings, the worst first."""

    name: str
    verdict: Verdict
    text: str
    details: tuple[str, ...] = ()


NEEDS_OURS = "skipped: this needs a Baton router's {what}, and the server is not one"


def needs_ours(name: str, what: str) -> Check:
    return Check(name, "skipped", NEEDS_OURS.format(what=what))
