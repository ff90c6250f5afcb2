"""A torch.distributed Store for two processes that has no socket of its own: entries travel as messages between nodes
that have proven to each other who they are. Knows nothing of those messages.

    set(name, value)  ->  own entries, and to the peer        get, wait: block until the peer's entry was delivered

torch calls it while it connects, from the group's own thread. What a library keeps in a store to watch its processes
(`add`, `compare_set`) is not there: nodes know better who lives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from shared.core.errors import HandoffFailed

MAX_ENTRIES = 256


class LinkStore(dist.Store):
    """`tell(name, value)` is called for each entry that is set here. `deliver` and `fail` may come from any thread."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._tell = tell
        self._entries: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failure: HandoffFailed | None = None

    def set(self, key: str, value: bytes | str) -> None:
        """An address or an id, for the peer."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._own[key] = data
        self.deliver(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        """Blocks until it is there. HandoffFailed once the group has been given up."""
        self.wait([key])
        value = self._entries[key]
        likes = [own for name, own in self._own.items() if name.rpartition("/")[0] == key.rpartition("/")[0]]
        if likes and len(value) != len(likes[0]):  # gloo takes a peer's address as it comes
            raise HandoffFailed(f"the peer's {key} has {len(value)} bytes, ours {len(likes[0])}: another torch?")
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Without a timeout of its own: who gives the group up calls `fail`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or all(key in self._entries for key in keys))
            if self._failure is not None:
                raise HandoffFailed(self._failure.message)  # a new one: several waits may raise, on several threads

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._entries for key in keys)

    def has_extended_api(self) -> bool:
        return False

    def deliver(self, key: str, value: bytes) -> None:
        """An entry of the peer's. The first of a name stays; more than a group needs are dropped."""
        with self._changed:
            if len(self._entries) < MAX_ENTRIES:
                self._entries.setdefault(key, value)
            self._changed.notify_all()

    def fail(self, error: HandoffFailed) -> None:
        """Whoever waits, now or later, raises."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
