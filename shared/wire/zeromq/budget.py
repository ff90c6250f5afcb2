"""Limits the messages, bytes and CPU time of one `receive`, so that other tasks get their turn.

By the clock, a process that waits for a core would read a single message in each turn, and fall behind its peers."""

from __future__ import annotations

import time

MAX_BATCH = 1024
BATCH_BYTES = 1 << 20  # page frames are not counted
BATCH_S = 0.005


class Budget:
    """Is spent once one limit is reached, but never before the first message."""

    __slots__ = ("_bytes_left", "_messages_left", "_until")

    def __init__(self) -> None:
        self._messages_left, self._bytes_left = MAX_BATCH, BATCH_BYTES
        self._until = time.thread_time() + BATCH_S

    def take(self, num_bytes: int) -> None:
        self._messages_left -= 1
        self._bytes_left -= num_bytes

    @property
    def is_spent(self) -> bool:
        if self._messages_left == MAX_BATCH:
            return False
        return self._messages_left <= 0 or self._bytes_left <= 0 or time.thread_time() >= self._until
