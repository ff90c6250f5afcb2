"""Run one process group on a thread. The thread connects, then runs transfers in posted order.

    loop     post(transfer) --> |        take_finished() <--- |   take_entries(): for the peer
    thread                      connect, start, start, finish, finish, ...

A posted transfer can't be cancelled: if one side cancelled it, later transfers would be paired wrongly.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from shared.core.errors import HandoffFailed
from shared.transfer.link_store import LinkStore
from shared.transfer.torch_groups import TorchGroup, Transfer


class Group(Protocol):
    """One end of a process group of two, for the node's loop."""

    error: HandoffFailed | None  # why the group ended; None while the group works

    def post(self, transfer: Transfer) -> None:
        """The group owns the transfer until the transfer is finished."""
        ...

    def take_finished(self) -> list[Transfer]:
        """Return the finished transfers in posted order."""
        ...

    def take_entries(self) -> list[tuple[str, bytes]]: ...

    def deliver(self, name: str, value: bytes) -> None: ...

    def abort(self, error: HandoffFailed) -> None:
        """End the group. Never blocks."""
        ...

    def join(self, timeout_s: float) -> bool:
        """Wait after `abort`, and return whether the group has fully stopped."""
        ...


class GroupThread:
    """A Group whose thread calls `wake` when finished transfers or store entries can be taken."""

    def __init__(self, wire: TorchGroup, rank: int, wake: Callable[[], None]) -> None:
        self._wire, self._rank, self._wake = wire, rank, wake
        self._store = LinkStore(self._tell)
        self._posted: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._finished: deque[Transfer] = deque()
        self._entries: deque[tuple[str, bytes]] = deque()
        self.error: HandoffFailed | None = None
        self._thread = threading.Thread(target=self._main, name=f"pair-group-{rank}", daemon=True)
        self._thread.start()

    def post(self, transfer: Transfer) -> None:
        self._posted.put(transfer)

    def take_finished(self) -> list[Transfer]:
        return [self._finished.popleft() for _ in range(len(self._finished))]

    def take_entries(self) -> list[tuple[str, bytes]]:
        return [self._entries.popleft() for _ in range(len(self._entries))]

    def deliver(self, name: str, value: bytes) -> None:
        self._store.deliver(name, value)

    def abort(self, error: HandoffFailed) -> None:
        self.error = self.error or error
        self._store.fail(error)
        self._posted.put(None)
        self._wire.abort()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _tell(self, name: str, value: bytes) -> None:
        self._entries.append((name, value))
        self._wake()

    def _main(self) -> None:
        try:
            self._wire.connect(self._store, self._rank)
            self._carry_out()
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            self.error = self.error or HandoffFailed(f"{type(error).__name__}: {first_line}")
        self._wire.abort()
        self._wire.close()
        self._wake()

    def _carry_out(self) -> None:
        begun: deque[tuple[Any, Transfer]] = deque()
        while self._begin(begun):
            work, transfer = begun.popleft()
            self._wire.finish(work)
            self._finished.append(transfer)
            self._wake()

    def _begin(self, begun: deque[tuple[Any, Transfer]]) -> bool:
        """Start all posted transfers. If no transfer runs, first wait for one. Return False after `abort`."""
        while not begun or not self._posted.empty():
            transfer = self._posted.get()
            if transfer is None:
                return False
            begun.append((self._wire.start(transfer), transfer))
        return True
