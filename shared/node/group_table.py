"""Process groups of this node, one per peer, and what both sides of a pair do with them: entries of the store go to the
peer, a group that is over is told to it. Knows nothing of pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from shared.node.context import NodeContext
from shared.transfer.group_thread import Group
from shared.transfer.torch_groups import Transfer
from shared.wire.messages import MAX_TEXT, Broken, StoreEntry

WINDOW = 6  # transfers agreed upon and not over: one is under way, the others wait, so that it never does
MOST_POSTED = 2 * WINDOW  # of a sender, and not over as far as it has heard, which may be later than the receiver
MAX_PAIRS = 64
END_S = 2.0  # a thread that was told to end has so long, at the end of its process


@dataclass(slots=True, eq=False)
class Pair:
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


class PairTable:
    """Owned by the node's loop."""

    def __init__(self, ctx: NodeContext, rank: int) -> None:
        self._ctx = ctx
        self._rank = rank
        self._pairs: dict[str, Pair] = {}
        self._ended: list[Group] = []

    def __iter__(self) -> Iterator[Pair]:
        return iter(list(self._pairs.values()))

    def get(self, peer: str, number: int | None = None) -> Pair | None:
        """The pair with this peer, unless it is in another group by now."""
        pair = self._pairs.get(peer)
        return pair if pair is None or number in (None, pair.number) else None

    @property
    def is_full(self) -> bool:
        return len(self._pairs) >= MAX_PAIRS

    def open(self, peer: str, transport: str, number: int) -> Pair:
        """Starts connecting; the peer is doing so, too."""
        pair = Pair(peer, number, transport, self._ctx.make_group(transport, self._rank))
        self._pairs[peer] = pair
        return pair

    def deliver(self, peer: str, entry: StoreEntry) -> None:
        pair = self.get(peer, entry.group)
        if pair is not None:
            pair.group.deliver(entry.name, entry.value)

    def tell_peers(self) -> None:
        for pair in self:
            for name, value in pair.group.take_entries():
                self._ctx.outbox.send(pair.peer, StoreEntry(pair.number, name, value))

    def take_broken(self) -> list[Pair]:
        """Groups that ended by themselves; their peers hear it."""
        broken = [pair for pair in self if pair.group.error]
        for pair in broken:
            self.end(pair, pair.group.error, tell=True)
        return broken

    def end(self, pair: Pair, reason: str, *, tell: bool) -> None:
        """Nothing that was posted is waited for: its peer is gone, or will not take part any more."""
        if self._pairs.get(pair.peer) is not pair:
            return
        del self._pairs[pair.peer]
        pair.group.abort(reason)
        self._ended = [group for group in self._ended if not group.join(0.0)] + [pair.group]
        self._ctx.log.warning((pair.peer, reason), "process group over", peer=pair.peer, why=reason)
        if tell:
            self._ctx.outbox.send(pair.peer, Broken(pair.number, reason[:MAX_TEXT]))

    def close(self) -> None:
        """At the node's end: threads are given a moment, none is left in a transfer if it can be helped."""
        for pair in self:
            self.end(pair, "the node ends", tell=False)
        for group in self._ended:
            group.join(END_S)
