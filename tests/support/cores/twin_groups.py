"""A process group without threads or sockets: two ends in one process that find each other by what they are told of one
another, as real ones do, and hand buffers over at once. For tests whose order of events must be their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import ClassVar
from weakref import WeakValueDictionary

from shared.core.errors import HandoffFailed
from shared.transfer.torch_groups import SENDER, Transfer


def do_nothing() -> None:
    """Nobody needs waking."""


def sizes(transfer: Transfer) -> list[int]:
    return [row.numel() for row in transfer]


class TwinGroup:
    """See `shared.transfer.group_thread.Group`. `open` False: transfers stay under way, as with a slow peer."""

    ends: ClassVar[WeakValueDictionary[str, TwinGroup]] = WeakValueDictionary()
    made: ClassVar[int] = 0

    def __init__(self, transport: str, rank: int, wake: Callable[[], None] = do_nothing) -> None:
        TwinGroup.made += 1
        self.name = f"{transport}-{TwinGroup.made}"
        self.transport, self.rank, self._wake = transport, rank, wake
        TwinGroup.ends[self.name] = self
        self.error: HandoffFailed | None = None
        self.open = True
        self.posted: deque[Transfer] = deque()
        self._finished: list[Transfer] = []
        self._entries = [(f"0/{rank}", self.name.encode())]
        self._twin: TwinGroup | None = None

    def post(self, transfer: Transfer) -> None:
        if not self.error:
            self.posted.append(transfer)
            self.move()

    def move(self) -> None:
        """Transfers that both ends have posted, in order; a size that only one of them agreed to breaks both."""
        twin = self._twin
        while twin is not None and self.posted and twin.posted and self.open and twin.open:
            mine, theirs = self.posted.popleft(), twin.posted.popleft()
            if sizes(mine) != sizes(theirs):
                self.reset(f"{sizes(mine)} bytes against {sizes(theirs)}")
                twin.reset("the same")
                return
            source, target = (mine, theirs) if self.rank == SENDER else (theirs, mine)
            for target_row, source_row in zip(target, source, strict=True):
                target_row.copy_(source_row)
            self._finish(mine)
            twin._finish(theirs)

    def _finish(self, transfer: Transfer) -> None:
        self._finished.append(transfer)
        self._wake()

    def take_finished(self) -> list[Transfer]:
        finished, self._finished = self._finished, []
        return finished

    def take_entries(self) -> list[tuple[str, bytes]]:
        entries, self._entries = self._entries, []
        return entries

    def deliver(self, name: str, value: bytes) -> None:
        twin = TwinGroup.ends.get(value.decode())
        if twin is None or twin.error:
            self.reset("Connection refused")
            return
        self._twin = twin
        self.move()

    def abort(self, error: HandoffFailed) -> None:
        """As when a process closes its connection: the other end sees that."""
        self.error = self.error or error
        if self._twin is not None and self._twin._twin is self:
            self._twin.reset("Connection closed by peer")

    def vanish(self) -> None:
        """The machine lost its power: the other end sees nothing."""
        self.error, self._twin = HandoffFailed("gone"), None

    def reset(self, why: str) -> None:
        self.error = self.error or HandoffFailed(why)
        self._wake()

    def join(self, timeout_s: float) -> bool:
        return True
