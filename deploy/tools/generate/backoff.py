"""How long to wait before a request is tried again. Pure."""

from __future__ import annotations

import email.utils
from dataclasses import dataclass

RETRYABLE = (429, 503)
LONGEST_RETRY_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waits double from `first_s` up to `longest_s`."""

    first_s: float = 0.5
    longest_s: float = 30.0

    def wait_s(self, attempt: int, asked_for_s: float, chance: float) -> float:
        """`attempt` from 0; `asked_for_s`: what the server wants; `chance` from 0 to 1 keeps many from coming back at
        the same instant."""
        doubled = min(self.longest_s, self.first_s * 2.0 ** min(attempt, 30))
        return max(min(asked_for_s, LONGEST_RETRY_AFTER_S), doubled * (0.5 + chance / 2))


def retry_after_s(header: str, now: float) -> float:
    """Seconds or an HTTP date; 0 for neither. `now`: seconds since 1970."""
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except (ValueError, OverflowError):
        return 0.0
