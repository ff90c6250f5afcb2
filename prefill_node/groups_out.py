"""Send pages through process groups, in the order of a decode node's Takes.

    Join -> group opened    Take -> send posted -> send over

Each Take is answered, because the peer relies on the order of the answers. If a page was freed meanwhile, the peer sees
a wrong digest.
"""

from __future__ import annotations

from collections.abc import Mapping

from shared.core.errors import HandoffFailed
from shared.node.loop.context import NodeContext
from shared.node.loop.group_table import WINDOW, GroupTable
from shared.transfer.interface import PageSender
from shared.transfer.staged import StagedSender
from shared.transfer.torch_groups import SENDER
from shared.wire.messages import Broken, Join, StoreEntry, Take

GroupMessage = Join | StoreEntry | Take | Broken


class GroupsOut:
    """Owns the process groups through which this node sends."""

    def __init__(self, ctx: NodeContext, senders: Mapping[str, PageSender]) -> None:
        self._ctx = ctx
        self._senders = {name: sender for name, sender in senders.items() if isinstance(sender, StagedSender)}
        self.table = GroupTable(ctx, SENDER)

    def receive(self, peer: str, message: GroupMessage) -> None:
        if isinstance(message, Join):
            self._join(peer, message)
        elif isinstance(message, StoreEntry):
            self.table.deliver(peer, message)
        elif isinstance(message, Take):
            self._take_from(peer, message)
        elif (entry := self.table.get(peer, message.group)) is not None:
            self.table.end(entry, HandoffFailed(f"{peer}: {message.reason}"), tell=False)

    def _join(self, peer: str, join: Join) -> None:
        older = self.table.get(peer)
        if older is not None and join.group <= older.number:
            return  # a duplicate
        if older is not None:
            self.table.end(older, HandoffFailed(f"{peer} has a new one"), tell=False)
        if join.transport not in self._senders or self.table.is_full:
            self._ctx.outbox.send(peer, Broken(join.group, "no process groups here, or too many"))
            return
        self.table.open(peer, join.transport, join.group)

    def _take_from(self, peer: str, take: Take) -> None:
        entry = self.table.get(peer, take.group)
        if entry is None:  # the peer may not know yet that the group has ended
            self._ctx.outbox.send(peer, Broken(take.group, "the group is over"))
            return
        if take.order < entry.num_agreed:
            return  # a duplicate
        sender = self._senders[entry.transport]
        try:
            sender.check(take)
            if take.order > entry.num_agreed:
                raise HandoffFailed(f"the peer asked for transfer {take.order}, but {entry.num_agreed} is next")
            if len(entry.unposted) == WINDOW:  # a peer with WINDOW open transfers must wait until one of them ends
                raise HandoffFailed(f"{WINDOW + 1} transfers were asked for, and none has begun")
        except HandoffFailed as error:
            self.table.end(entry, error, tell=True)
            return
        entry.num_agreed += 1
        entry.unposted.append(sender.views(take))
        entry.post()

    def poll(self) -> None:
        for entry in self.table:
            entry.num_over += len(entry.group.take_finished())
            entry.post()
        self.table.take_broken()
        self.table.tell_peers()

    def peer_closed(self, peer: str) -> None:
        entry = self.table.get(peer)
        if entry is not None:
            self.table.end(entry, HandoffFailed(f"{peer} is gone"), tell=False)
