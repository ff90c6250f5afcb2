"""How much one `receive` may take before others have their turn: messages, bytes to decode, and time."""

from __future__ import annotations

import time

MAX_BATCH = 1024
BATCH_BYTES = 1 << 20  # of messages; page frames behind them are not looked at
BATCH_S = 0.005


class Budget:
    """Of one `receive`. It is spent by whatever comes first; one message is always taken."""

    __slots__ = ("_bytes_left", "_messages_left", "_until")

    def __init__(self) -> None:
        self._messages_left, self._bytes_left = MAX_BATCH, BATCH_BYTES
        self._until = time.monotonic() + BATCH_S

    def take(self, num_bytes: int) -> None:
        """A message of that size was decoded."""
        self._messages_left -= 1
        self._bytes_left -= num_bytes

    @property
    def is_spent(self) -> bool:
        """Whether the rest has to wait for the next turn."""
        if self._messages_left == MAX_BATCH:
            return False
        return self._messages_left <= 0 or self._bytes_left <= 0 or time.monotonic() >= self._until
