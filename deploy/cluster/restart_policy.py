"""Decide when to restart a dead child."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shared.core.exit_codes import EXIT_CONFIG, EXIT_DRAINED

WINDOW_S = 60.0
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 15.0


@dataclass(slots=True)
class RestartPolicy:
    """Count one child's deaths in the last minute. Each further death doubles the delay of the restart.

    Too many deaths, a drain, or an unusable configuration keep the child down.
    """

    max_restarts: int
    deaths: deque[float] = field(default_factory=deque)

    def delay_after_death(self, now: float, status: int) -> float | None:
        """Return the seconds until the next start; None if the child stays down."""
        if status in (EXIT_CONFIG, EXIT_DRAINED):
            return None
        self.deaths.append(now)
        while now - self.deaths[0] > WINDOW_S:
            self.deaths.popleft()
        if len(self.deaths) > self.max_restarts:
            return None
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (len(self.deaths) - 1)))
