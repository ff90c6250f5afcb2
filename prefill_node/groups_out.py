"""The sending side of process groups: what a decode node asks for is sent out of the pool, in the order in which it
asked.

    Join -> group    Take -> posted -> over

Whatever was asked for is sent, even when its request has ended meanwhile and the pages are somebody else's: the other
side counts on the order, and tells stale pages by their digests.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.core.errors import HandoffFailed
from shared.node.context import NodeContext
from shared.node.group_table import WINDOW, PairTable
from shared.transfer.interface import PageSender
from shared.transfer.staged import StagedSender
from shared.transfer.torch_groups import SENDER
from shared.wire.messages import Broken, Join, StoreEntry, Take

PairMessage = Join | StoreEntry | Take | Broken


class PairsOut:
    """Owner of the groups in which this node sends."""

    def __init__(self, ctx: NodeContext, senders: Mapping[str, PageSender]) -> None:
        self._ctx = ctx
        self._senders = {name: sender for name, sender in senders.items() if isinstance(sender, StagedSender)}
        self.table = PairTable(ctx, SENDER)

    def receive(self, peer: str, message: PairMessage) -> None:
        if isinstance(message, Join):
            self._join(peer, message)
        elif isinstance(message, StoreEntry):
            self.table.deliver(peer, message)
        elif isinstance(message, Take):
            self._take(peer, message)
        elif (pair := self.table.get(peer, message.group)) is not None:
            self.table.end(pair, f"{peer}: {message.reason}", tell=False)

    def _join(self, peer: str, join: Join) -> None:
        older = self.table.get(peer)
        if older is not None and join.group <= older.number:
            return  # heard before
        if older is not None:
            self.table.end(older, f"{peer} has a new one", tell=False)
        if join.transport not in self._senders or self.table.is_full:
            self._ctx.outbox.send(peer, Broken(join.group, "no process groups here, or too many"))
            return
        self.table.open(peer, join.transport, join.group)

    def _take(self, peer: str, take: Take) -> None:
        pair = self.table.get(peer, take.group)
        if pair is None:  # it is over here, and the peer has not heard so, or never will
            self._ctx.outbox.send(peer, Broken(take.group, "the group is over"))
            return
        if take.order < pair.num_agreed:
            return  # heard before
        sender = self._senders[pair.transport]
        try:
            sender.check(take)
            if take.order > pair.num_agreed:
                raise HandoffFailed(f"transfer {take.order} asked for, after {pair.num_agreed}")
            if len(pair.unposted) == WINDOW:  # the peer has none of them, and asks for no more before it has one
                raise HandoffFailed(f"{WINDOW + 1} transfers asked for that have not begun")
        except HandoffFailed as error:
            self.table.end(pair, error.message, tell=True)
            return
        pair.num_agreed += 1
        pair.unposted.append(sender.views(take))
        pair.post()

    def poll(self) -> None:
        for pair in self.table:
            pair.num_over += len(pair.group.take_finished())
            pair.post()
        self.table.take_broken()
        self.table.tell_peers()

    def peer_closed(self, peer: str) -> None:
        pair = self.table.get(peer)
        if pair is not None:
            self.table.end(pair, f"{peer} is gone", tell=False)
