"""Compute the wait before a retry. Pure."""

from __future__ import annotations

import email.utils
from dataclasses import dataclass

RETRYABLE = (429, 503)
LONGEST_RETRY_AFTER_S = 600.0


@dataclass(frozen=True, slots=True)
class Backoff:
    """Double the wait before each retry, from `first_s` up to `longest_s`."""

    first_s: float = 0.5
    longest_s: float = 30.0

    def wait_s(self, attempt: int, asked_for_s: float, chance: float) -> float:
        """Return the seconds before retry `attempt`, counted from 0.

        `asked_for_s`: the server's Retry-After. `chance`: a random number from 0 to 1, which spreads retries.
        """
        doubled = min(self.longest_s, self.first_s * 2.0 ** min(attempt, 30))
        return max(min(asked_for_s, LONGEST_RETRY_AFTER_S), doubled * (0.5 + chance / 2))


def retry_after_s(header: str, now: float) -> float:
    """Return the seconds in a Retry-After header; 0.0 if malformed. `now`: seconds since 1970."""
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except (ValueError, OverflowError):
        return 0.0
