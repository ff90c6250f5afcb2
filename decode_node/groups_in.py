"""Receive announced pages through process groups, in order, into staging buffers.

    Ready -> waiting -> Take sent, staging posted -> arrived: the pull reads the staging buffer.

A transfer whose Take is sent can't be cancelled. Pages of an ended request are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from decode_node.handoff_in import HandoffIn
from shared.core.errors import HandoffFailed
from shared.node.loop.context import NodeContext
from shared.node.loop.group_table import GroupEntry, GroupTable
from shared.transfer.interface import PageReceiver
from shared.transfer.staged import StagedReceiver
from shared.transfer.torch_groups import RECEIVER
from shared.wire.messages import Broken, Join, Ready, StoreEntry, Take


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    handoff: HandoffIn
    ready: Ready
    receiver: StagedReceiver


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """`staging`: the buffer with the pages, or the error."""

    handoff: HandoffIn
    ready: Ready
    staging: torch.Tensor | HandoffFailed


class GroupsIn:
    """Owns the process groups through which this node receives, and the unfinished fetches."""

    def __init__(self, ctx: NodeContext, receivers: Mapping[str, PageReceiver]) -> None:
        self._ctx = ctx
        self._receivers = {name: r for name, r in receivers.items() if isinstance(r, StagedReceiver)}
        self._waiting: dict[str, deque[Fetch]] = {}  # by peer: fetches whose Take is not sent yet
        self._asked: dict[GroupEntry, deque[Fetch]] = {}  # by group: fetches whose Take is sent
        self._out: list[Fetched] = []
        self._num_groups = 0
        self.table = GroupTable(ctx, RECEIVER)

    def carries(self, transport: str) -> bool:
        return transport in self._receivers

    def meet(self, peer: str, transport: str) -> None:
        """Open a process group with the peer, unless one exists."""
        if self.table.get(peer) is not None or self.table.is_full:
            return  # the table may be full: then fetch() raises
        self._num_groups += 1
        self._ctx.outbox.send(peer, Join(transport, self._num_groups))
        self._asked[self.table.open(peer, transport, self._num_groups)] = deque()

    def fetch(self, handoff: HandoffIn, ready: Ready) -> None:
        """Start a fetch, which `poll` returns later. Raise HandoffFailed for an ended group or unusable pages."""
        fetch = Fetch(handoff, ready, self._receivers[handoff.transport])
        fetch.receiver.check(ready)
        if self.table.get(handoff.source) is None:
            raise HandoffFailed(f"the process group with {handoff.source} is over")
        handoff.num_fetching += 1
        self._waiting.setdefault(handoff.source, deque()).append(fetch)
        self._ask(handoff.source)

    def forget(self, handoff: HandoffIn) -> None:
        """Drop the hand-off's fetches whose Take is not sent yet."""
        waiting = self._waiting.pop(handoff.source, deque())
        kept = deque(fetch for fetch in waiting if fetch.handoff is not handoff)
        if kept:
            self._waiting[handoff.source] = kept

    def _ask(self, peer: str) -> None:
        entry, waiting = self.table.get(peer), self._waiting.get(peer)
        while entry is not None and waiting and entry.has_room:
            fetch = waiting.popleft()
            ready = fetch.ready
            take = Take(entry.number, entry.num_agreed, ready.pages, ready.first_layer, ready.num_layers)
            entry.num_agreed += 1
            self._ctx.outbox.send(peer, take)
            entry.group.post(fetch.receiver.make_staging(ready))
            self._asked[entry].append(fetch)
        if waiting is not None and not waiting:  # a restarted peer has a new name, so empty queues would pile up
            del self._waiting[peer]

    def receive(self, peer: str, message: StoreEntry | Broken) -> None:
        if isinstance(message, StoreEntry):
            self.table.deliver(peer, message)
        elif (entry := self.table.get(peer, message.group)) is not None:
            self._end(entry, HandoffFailed(f"{peer}: {message.reason}"))

    def poll(self) -> list[Fetched]:
        for entry in self.table:
            self._collect(entry)
            self._ask(entry.peer)
        for entry, error in self.table.take_broken():
            self._fail(entry, error)
        self.table.tell_peers()
        out, self._out = self._out, []
        return out

    def _collect(self, entry: GroupEntry) -> None:
        for staging in entry.group.take_finished():
            assert isinstance(staging, torch.Tensor)
            fetch = self._asked[entry].popleft()
            entry.num_over += 1
            fetch.handoff.num_fetching -= 1
            self._out.append(Fetched(fetch.handoff, fetch.ready, staging))

    def peer_closed(self, peer: str) -> None:
        """End the group, but keep staged pages valid."""
        entry = self.table.get(peer)
        if entry is not None:
            self._end(entry, HandoffFailed(f"{peer} is gone"))

    def _end(self, entry: GroupEntry, error: HandoffFailed) -> None:
        self._collect(entry)
        self.table.end(entry, error, tell=False)
        self._fail(entry, error)

    def _fail(self, entry: GroupEntry, error: HandoffFailed) -> None:
        lost = [*self._asked.pop(entry), *self._waiting.pop(entry.peer, ())]
        self._out += [Fetched(fetch.handoff, fetch.ready, error) for fetch in lost]
