"""Measure how fast queued requests start, and how long they then take. Sans-IO.

Both are averages of recent requests: the first per expected token, the second per used token.
"""

from __future__ import annotations

import math

from router.requests.answer_lengths import moved
from router.requests.journal import OpenRequest

MEMORY_S = 15.0
MIN_SECONDS = 1.0  # the rate counts as known after this time with a queue
MIN_STARTED = 4  # number of starts before the rate counts as known


class Pace:
    """Owned by Admission."""

    def __init__(self) -> None:
        self._at = 0.0
        self._was_backed_up = False
        self._seconds = 0.0
        self._tokens = 0.0
        self._num_started = 0
        self._mean_s: float | None = None
        self._mean_used: float | None = None

    def note(self, now: float, tokens: int, *, is_backed_up: bool) -> None:
        """Add the expected tokens of the request that started, or 0. Time without a queue is left out."""
        if self._was_backed_up:
            passed = max(0.0, now - self._at)
            fade = math.exp(-passed / MEMORY_S)
            self._seconds = self._seconds * fade + passed
            self._tokens = self._tokens * fade + tokens
            self._num_started += tokens > 0
        self._at, self._was_backed_up = now, is_backed_up

    def ended(self, request: OpenRequest, now: float) -> None:
        if request.started_at is not None:
            self._mean_s = moved(self._mean_s, now - request.started_at)
            self._mean_used = moved(self._mean_used, request.num_used)

    def seconds(self, num_tokens: float) -> float | None:
        """Return the time until these tokens have started; None if unknown."""
        if self._seconds < MIN_SECONDS or self._num_started < MIN_STARTED or not self._tokens:
            return None
        return num_tokens * self._seconds / self._tokens

    def service_s(self, num_tokens: int) -> float:
        """Return the time from start to end of a request that uses these tokens; 0 if unknown."""
        return num_tokens * self._mean_s / self._mean_used if self._mean_s and self._mean_used else 0.0
