"""A torch.distributed Store for two processes, without sockets: entries travel as messages between the nodes.

    set(name, value)  ->  own entries, and to the peer        get, wait: block until the peer's entry was delivered

torch uses the store while it connects, on the group's thread. The store lacks `add` and `compare_set`, with which
libraries watch processes: here the nodes watch each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

from shared.core.errors import HandoffFailed

MAX_ENTRIES = 256


class LinkStore(dist.Store):
    """Calls `tell(name, value)` for each entry that this process sets. Any thread may call `deliver` and `fail`."""

    def __init__(self, tell: Callable[[str, bytes], None]) -> None:
        super().__init__()
        self._tell = tell
        self._entries: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._failure: HandoffFailed | None = None

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._own[key] = data
        self.deliver(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        """Block until the entry exists. Raise HandoffFailed after `fail`."""
        self.wait([key])
        value = self._entries[key]
        likes = [own for name, own in self._own.items() if name.rpartition("/")[0] == key.rpartition("/")[0]]
        if likes and len(value) != len(likes[0]):  # gloo does not check the length of a peer's address
            raise HandoffFailed(f"the peer's {key} has {len(value)} bytes, ours {len(likes[0])}: another torch?")
        return value

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait without a timeout; `fail` ends the wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or all(key in self._entries for key in keys))
            if self._failure is not None:
                raise HandoffFailed(self._failure.message)  # a separate error object for each waiting thread

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._entries for key in keys)

    def has_extended_api(self) -> bool:
        return False

    def deliver(self, key: str, value: bytes) -> None:
        """Keep a name's first entry. Drop entries beyond MAX_ENTRIES."""
        with self._changed:
            if len(self._entries) < MAX_ENTRIES:
                self._entries.setdefault(key, value)
            self._changed.notify_all()

    def fail(self, error: HandoffFailed) -> None:
        """Make present and future waits raise HandoffFailed."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()
