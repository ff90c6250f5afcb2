"""When a dead child is started again. Pure: takes times, gives decisions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from shared.core.exit_codes import EXIT_DRAINED

WINDOW_S = 60.0
FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 15.0
EXIT_CONFIG = 2  # what our commands end with when their configuration can't work


@dataclass(slots=True)
class RestartPolicy:
    """Of one child. Delays double with each death within a minute; too many deaths, or a configuration that can't
    work, and it stays down."""

    max_restarts: int
    deaths: deque[float] = field(default_factory=deque)

    def delay_after_death(self, now: float, status: int) -> float | None:
        """Seconds until the next start, None for never."""
        if status in (EXIT_CONFIG, EXIT_DRAINED):
            return None
        self.deaths.append(now)
        while now - self.deaths[0] > WINDOW_S:
            self.deaths.popleft()
        if len(self.deaths) > self.max_restarts:
            return None
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (len(self.deaths) - 1)))
