"""Notice Generates that a node never took. Sans-IO.

    Generate sent ... the second heartbeat without its key: Welcome ... the heartbeat that answers: taken, or vanished

A Welcome makes the node send a heartbeat at once. Connections keep the order, so this heartbeat decides for everything
sent before the Welcome, however slow the connection is.
"""

from __future__ import annotations

from shared.wire.messages import Key
from shared.wire.parts import Taken


class Unconfirmed:
    """The Generates sent on one connection of a node that no heartbeat has listed yet."""

    def __init__(self) -> None:
        self._sent: dict[Key, int] = {}  # when, oldest first, by the clock that Welcomes tell in ms
        self._beat_ms = 0
        self._asked_ms = 0  # when the node was asked last

    def sent(self, key: Key, now_ms: int) -> None:
        self._sent[key] = now_ms

    def vanished(self, taken: Taken) -> list[Key]:
        """Take a heartbeat. Return the Generates that the node will never take, once."""
        if not taken.clock_ms:  # an older node, which does not tell
            self._sent.clear()
        for key in taken.keys:
            self._sent.pop(key, None)
        # in the same ms the Welcome may have been the first
        gone = [key for key, sent_ms in self._sent.items() if sent_ms < taken.clock_ms]
        for key in gone:
            del self._sent[key]
        return gone

    def is_overdue(self, taken: Taken, now_ms: int) -> bool:
        """Return whether the node must be asked: a Generate was sent before the last heartbeat, and is not in this one.

        One question at a time: each answer goes to all routers, so that two late ones would ask each other's questions.
        """
        before, self._beat_ms = self._beat_ms, now_ms
        must_ask = taken.clock_ms >= self._asked_ms and next(iter(self._sent.values()), now_ms) < before
        if must_ask:
            self._asked_ms = now_ms
        return must_ask
