"""The process groups of this node, one per peer. Entries of a group's store go to the peer, which also hears when the
group is over. Knows nothing of pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.core.errors import HandoffFailed
from shared.node.context import NodeContext
from shared.transfer.group_thread import Group
from shared.transfer.torch_groups import Transfer
from shared.wire.messages import Broken, StoreEntry
from shared.wire.ranges import MAX_TEXT

WINDOW = 6  # transfers agreed upon and not over: one is under way, the others wait, so that it never does
MOST_POSTED = 2 * WINDOW  # of a sender, and not over as far as it has heard, which may be later than the receiver
MAX_GROUPS = 64
END_S = 2.0  # how long the end of the process waits for a thread that was told to end


@dataclass(slots=True, eq=False)
class GroupEntry:
    """`number` is the receiver's for the group; `num_agreed` transfers were agreed upon, `num_over` are over."""

    peer: str
    number: int
    transport: str
    group: Group
    num_agreed: int = 0
    num_over: int = 0
    unposted: deque[Transfer] = field(default_factory=deque)  # a sender's: agreed upon, not given to the group yet

    @property
    def has_room(self) -> bool:
        """The receiver's: staging is bounded by what is under way."""
        return self.num_agreed - self.num_over < WINDOW

    def post(self) -> None:
        """The sender's: as much as it may. The rest waits until it has heard of the end of earlier ones."""
        while self.unposted and self.num_agreed - len(self.unposted) - self.num_over < MOST_POSTED:
            self.group.post(self.unposted.popleft())


class GroupTable:
    """Owned by the node's loop."""

    def __init__(self, ctx: NodeContext, rank: int) -> None:
        self._ctx = ctx
        self._rank = rank
        self._entries: dict[str, GroupEntry] = {}
        self._ended: list[Group] = []

    def __iter__(self) -> Iterator[GroupEntry]:
        return iter(list(self._entries.values()))

    def get(self, peer: str, number: int | None = None) -> GroupEntry | None:
        """The group with this peer, unless it is another one by now."""
        entry = self._entries.get(peer)
        return entry if entry is None or number in (None, entry.number) else None

    @property
    def is_full(self) -> bool:
        return len(self._entries) >= MAX_GROUPS

    def open(self, peer: str, transport: str, number: int) -> GroupEntry:
        """Starts connecting; the peer is doing so, too."""
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
        """Groups that ended by themselves, and why; their peers hear it."""
        broken = [(entry, error) for entry in self if (error := entry.group.error) is not None]
        for entry, error in broken:
            self.end(entry, error, tell=True)
        return broken

    def end(self, entry: GroupEntry, error: HandoffFailed, *, tell: bool) -> None:
        """Nothing that was posted is waited for: its peer is gone, or will not take part any more."""
        if self._entries.get(entry.peer) is not entry:
            return
        del self._entries[entry.peer]
        entry.group.abort(error)
        self._ended = [group for group in self._ended if not group.join(0.0)] + [entry.group]
        self._ctx.log.warning((entry.peer, error.message), "process group over", peer=entry.peer, why=error.message)
        if tell:
            self._ctx.outbox.send(entry.peer, Broken(entry.number, error.message[:MAX_TEXT]))

    def close(self) -> None:
        """At the node's end: threads are given a moment, none is left in a transfer if it can be helped."""
        for entry in self:
            self.end(entry, HandoffFailed("the node ends"), tell=False)
        for group in self._ended:
            group.join(END_S)
