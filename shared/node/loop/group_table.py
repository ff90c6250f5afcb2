"""Keep a node's process groups, one per peer. Send each peer its group's store entries, and report the group's end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.core.errors import HandoffFailed
from shared.node.loop.context import NodeContext
from shared.transfer.group_thread import Group
from shared.transfer.torch_groups import Transfer
from shared.wire.messages import Broken, StoreEntry
from shared.wire.ranges import MAX_TEXT

WINDOW = 6  # limit on agreed transfers that have not ended: one runs, the others wait, so that the group stays busy
MOST_POSTED = 2 * WINDOW  # limit on transfers that a sender has posted and `num_over` doesn't count yet
MAX_GROUPS = 64
END_S = 2.0  # time that each thread gets to stop when the node ends


@dataclass(slots=True, eq=False)
class GroupEntry:
    """The receiver chooses the group's `number`.

    The peers agreed upon `num_agreed` transfers; `num_over` of these have ended.
    """

    peer: str
    number: int
    transport: str
    group: Group
    num_agreed: int = 0
    num_over: int = 0
    unposted: deque[Transfer] = field(default_factory=deque)  # a sender's transfers that are agreed but not posted

    @property
    def has_room(self) -> bool:
        """Return whether one more transfer may be agreed upon. This limits the receiver's staging memory."""
        return self.num_agreed - self.num_over < WINDOW

    def post(self) -> None:
        while self.unposted and self.num_agreed - len(self.unposted) - self.num_over < MOST_POSTED:
            self.group.post(self.unposted.popleft())


class GroupTable:
    def __init__(self, ctx: NodeContext, rank: int) -> None:
        self._ctx = ctx
        self._rank = rank
        self._entries: dict[str, GroupEntry] = {}
        self._ended: list[Group] = []

    def __iter__(self) -> Iterator[GroupEntry]:
        return iter(list(self._entries.values()))

    def get(self, peer: str, number: int | None = None) -> GroupEntry | None:
        entry = self._entries.get(peer)
        return entry if entry is None or number in (None, entry.number) else None

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= MAX_GROUPS

    def open(self, peer: str, transport: str, number: int) -> GroupEntry:
        entry = GroupEntry(peer, number, transport, self._ctx.make_group(transport, self._rank))
        self._entries[peer] = entry
        return entry

    def deliver(self, peer: str, stored: StoreEntry) -> None:
        entry = self.get(peer, stored.group)
        if entry is not None:
            entry.group.deliver(stored.name, stored.value)

    def tell_peers(self) -> None:
        for entry in self:
            for name, value in entry.group.take_entries():
                self._ctx.outbox.send(entry.peer, StoreEntry(entry.number, name, value))

    def take_broken(self) -> list[tuple[GroupEntry, HandoffFailed]]:
        """Return the groups that ended by themselves. Inform their peers."""
        broken = [(entry, error) for entry in self if (error := entry.group.error) is not None]
        for entry, error in broken:
            self.end(entry, error, tell=True)
        return broken

    def end(self, entry: GroupEntry, error: HandoffFailed, *, tell: bool) -> None:
        """End a group without waiting for posted transfers."""
        if self._entries.get(entry.peer) is not entry:
            return
        del self._entries[entry.peer]
        entry.group.abort(error)
        self._ended = [group for group in self._ended if not group.join(0.0)] + [entry.group]
        self._ctx.log.warning((entry.peer, error.message), "process group over", peer=entry.peer, why=error.message)
        if tell:
            self._ctx.outbox.send(entry.peer, Broken(entry.number, error.message[:MAX_TEXT]))

    def close(self) -> None:
        """End all groups. Each thread gets END_S to leave a transfer."""
        for entry in self:
            self.end(entry, HandoffFailed("the node ends"), tell=False)
        for group in self._ended:
            group.join(END_S)
