"""The prefill side of a node.

    bootstrap (Offer sent)  ->  inflight (Grant here)  ->  gone (Installed)        the scheduler computes meanwhile.

When a request ends here, the decode node gets an Abort, and the router gets a typed error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from prefill_node.bootstrap import Bootstrap
from prefill_node.groups_out import GroupMessage, GroupsOut
from prefill_node.handoff_out import HandoffOut
from prefill_node.inflight import Inflight
from prefill_node.loans import Loans
from prefill_node.pulls import TRANSPORTS, Pulls
from prefill_node.reach import Reach
from prefill_node.transport_choice import TransportChoice
from prefill_node.unread import Unread
from shared.core.errors import BatonError, HandoffFailed, PeerUnreachable
from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.states import PageState, QueueStage
from shared.node.loop.context import NodeContext
from shared.sched.steps.events import (
    ChunkLaunched,
    ChunkReady,
    Ended,
    HandoffUnpinned,
    LoanPreempted,
    PrefillDone,
    PullPreempted,
    SchedEvent,
)
from shared.transfer.interface import PageReceiver, PageSender
from shared.wire.codec import key_of, to_wire
from shared.wire.errors import error_of_peer
from shared.wire.messages import (
    Abort,
    Failed,
    FramesTaken,
    Generate,
    Grant,
    Installed,
    Lent,
    Pull,
    Ready,
    Refuse,
    Returned,
    Wait,
)
from shared.wire.peers import Received

NOTHING: Mapping[str, PageReceiver] = MappingProxyType({})


class PrefillSide:
    """Implements `shared.node.loop.side.Side`. The scheduler also has all requests of this side."""

    def __init__(
        self, ctx: NodeContext, senders: Mapping[str, PageSender], receivers: Mapping[str, PageReceiver] = NOTHING
    ) -> None:
        """Without `receivers`, this node pulls no prefix."""
        self._ctx = ctx
        unread = Unread(ctx.wake)
        self.choice = TransportChoice(ctx.facts.transports, ctx.log, ctx.facts.about_transports)
        self._reach = Reach(ctx.facts.silence_s)
        self.bootstrap = Bootstrap(ctx, self.choice, self._reach)
        self.inflight = Inflight(ctx, senders, unread)
        self.loans = Loans(ctx, {name: senders[name] for name in TRANSPORTS if name in senders}, unread)
        self.pulls = Pulls(ctx, {name: receivers[name] for name in TRANSPORTS if name in receivers})
        self.groups = GroupsOut(ctx, senders)

    def hand_over(self, generate: Generate, requests: Sequence[Request], now: float) -> Sequence[Request]:
        self.bootstrap.add_handoffs(generate, requests, now)
        return requests

    def bring_prefix(self, generate: Generate, req: Request, now: float) -> None:
        source = self.pulls.begin(generate, req, now)
        if source is not None:
            self._reach.dialled(source, now)

    def outside(self) -> list[Request]:
        return []

    def abort(self, key: RequestKey) -> None:
        """Do nothing: the scheduler's Ended event ends the request here too."""

    # ---- the decode node's answers

    def receive(self, received: Received, now: float) -> None:
        message = received.message
        self._reach.up(received.peer)
        if isinstance(message, Grant):
            self._granted(received.peer, message, now)
        elif isinstance(message, Installed):
            self._installed(received.peer, message, now)
        elif isinstance(message, FramesTaken):
            self._taken(received.peer, message, now)
        elif isinstance(message, Wait | Refuse | Failed):
            self._answered(received.peer, message, now)
        elif isinstance(message, Pull | Returned):
            self.loans.receive(received.peer, message, now)
        elif isinstance(message, Lent | Ready):
            self.pulls.receive(received, message, now)
        elif isinstance(message, GroupMessage):
            self.groups.receive(received.peer, message)
        else:
            self._ctx.drop(received.peer, f"{type(message).__name__} at a prefill node")

    def _granted(self, peer: str, grant: Grant, now: float) -> None:
        key = key_of(grant.key)
        handoff = self.bootstrap.offered.get(key)
        if handoff is None or handoff.peer != peer:
            if key not in self.inflight.granted:  # the request ended here: the peer must free its memory
                self._ctx.outbox.send(peer, Abort(grant.key, all_sequences=False))
            self._ctx.drop_late(peer, "Grant without an Offer", key)
            return
        del self.bootstrap.offered[key]
        self._ctx.metrics.observe_queue(QueueStage.BOOTSTRAP, now - handoff.since)
        self._ctx.spans.add_span(key, "offer", handoff.since, now, {"baton.peer": peer})
        self._ctx.core.queues.set_granted(key)
        try:
            self.inflight.add_handoff(handoff, grant, now)
            self.choice.granted(peer, handoff.offered, grant.transport)
        except HandoffFailed as error:
            self._ctx.outbox.send(peer, Abort(grant.key, all_sequences=False))
            self._fail(key, error)

    def _installed(self, peer: str, message: Installed, now: float) -> None:
        handoff = self._inflight_of(peer, message)
        if handoff is None:
            return
        if handoff.record is not None:
            self._ctx.metrics.observe("handoff_seconds", now - handoff.done_at)
            # The cost excludes the wait for memory: prompts without a hand-off wait for memory, too.
            self._ctx.metrics.observe("handoff_cost_seconds", now - max(handoff.done_at, handoff.since))
            self.choice.measured(peer, handoff.sending.sender.name, now - handoff.done_at)
            self._ctx.spans.handed_over(handoff.key, handoff.done_at, now, handoff.sending.sender.name)
        self._ctx.metrics.observe_queue(QueueStage.INFLIGHT, now - handoff.since)
        del self.inflight.granted[handoff.key]
        self._ctx.core.queues.complete_handoff(handoff.key)
        self.pulls.ended(handoff.key, now)  # Installed may come before the pages
        self._ctx.tombstones.bury(handoff.key, now)
        self.bootstrap.leader_gone(handoff.key, now)

    def _taken(self, peer: str, message: FramesTaken, now: float) -> None:
        handoff = self.inflight.granted.get(key_of(message.key))
        if handoff is not None and handoff.peer == peer and handoff.sending.lease == message.lease:
            self.inflight.taken(handoff, now)
        else:
            self.loans.receive(peer, message, now)

    def _answered(self, peer: str, message: Wait | Refuse | Failed, now: float) -> None:
        if isinstance(message, Failed):
            handoff = self._inflight_of(peer, message)
        else:
            handoff = self.bootstrap.offered.get(key_of(message.key))
            if handoff is not None and handoff.peer != peer:
                handoff = None
        if handoff is None:
            return
        handoff.heard_at = handoff.touched = now
        if not isinstance(message, Wait):
            self._fail(handoff.key, error_of_peer(peer, message))

    def _inflight_of(self, peer: str, message: Installed | Failed) -> HandoffOut | None:
        key = key_of(message.key)
        handoff = self.inflight.granted.get(key)
        if handoff is not None and handoff.peer == peer and handoff.sending.lease == message.lease:
            return handoff
        self._ctx.drop_late(peer, f"{type(message).__name__} of an unknown lease", key)
        return None

    # ---- scheduler events

    def event(self, event: SchedEvent, now: float) -> None:
        if isinstance(event, Ended):
            self._handoff_ended(event.key, now)
        elif isinstance(event, ChunkLaunched):
            self._launched(event)
        elif isinstance(event, ChunkReady | PrefillDone):
            self._progressed(event, now)
        elif isinstance(event, PullPreempted):
            self.pulls.preempted(event.row, now)
        elif isinstance(event, LoanPreempted):
            self.loans.preempted(event.name)
        elif isinstance(event, HandoffUnpinned):
            handoff = self.bootstrap.find_handoff(event.request.key)
            if handoff is not None:
                handoff.num_final_tokens, handoff.record = 0, None
                handoff.launched.clear()

    def _launched(self, event: ChunkLaunched) -> None:
        handoff = self.inflight.granted.get(event.key)
        if handoff is not None and handoff.request.row:  # no row: the request's pages were unpinned meanwhile
            self.inflight.launched(handoff, event)
        elif (handoff := self.bootstrap.find_handoff(event.key)) is not None:
            handoff.launched.append(event)

    def _progressed(self, event: ChunkReady | PrefillDone, now: float) -> None:
        key = event.request.key
        handoff = self.inflight.granted.get(key) or self.bootstrap.find_handoff(key)
        if handoff is None or not event.request.row:
            return
        if isinstance(event, ChunkReady):
            handoff.num_final_tokens = max(handoff.num_final_tokens, event.num_tokens)
        else:
            handoff.num_final_tokens, handoff.record, handoff.done_at = event.committed, event, now
            self._ctx.core.kv.set_tag(event.request.row, PageState.HELD)
        if key in self.inflight.granted:
            self.inflight.push(handoff, now)

    def _handoff_ended(self, key: RequestKey, now: float) -> None:
        handoff = self.bootstrap.forget(key) or self.inflight.granted.pop(key, None)
        if handoff is not None:
            self._ctx.outbox.send(handoff.peer, Abort(to_wire(key), all_sequences=False))
        self.bootstrap.leader_gone(key, now)
        self.pulls.ended(key, now)

    # ---- timeouts and lost peers

    def poll(self, now: float) -> None:
        self.groups.poll()
        self.loans.poll(now)
        self.pulls.poll(now)
        for peer in self._reach.overdue(now):
            self._unreachable(peer)
        for key, error in self.inflight.poll(now):
            self._fail(key, error)
        lease_s = self._ctx.facts.lease_s
        for handoff in self.bootstrap.unanswered(now - lease_s):
            self._fail(handoff.key, HandoffFailed(f"{handoff.peer} did not answer an offer in {lease_s:g} s"))

    def peer_up(self, peer: str) -> None:
        self._reach.up(peer)

    def peer_closed(self, peer: str, *, accepted: bool) -> None:
        """Handle a lost connection. A connection that the peer dialled serves only loans."""
        if accepted:
            self.loans.peer_closed(peer)
        else:
            self._give_up(peer, PeerUnreachable(f"{self._ctx.facts.node_id} has no connection to {peer}"))

    def _unreachable(self, peer: str) -> None:
        own, silence_s = self._ctx.facts.node_id, self._ctx.facts.silence_s
        self._ctx.log.warning((peer, "unreachable"), "can't reach a node", peer=peer, tried_s=silence_s)
        self._give_up(peer, PeerUnreachable(f"{own} could not reach {peer} in {silence_s:g} s"))

    def _give_up(self, peer: str, error: PeerUnreachable) -> None:
        """Hang up. The next hand-off dials again."""
        lost = [*self.bootstrap.of_peer(peer), *(h for h in self.inflight.granted.values() if h.peer == peer)]
        for handoff in lost:  # forget them first: an Abort to a closed peer would stay queued
            self.bootstrap.forget(handoff.key)
            self.inflight.granted.pop(handoff.key, None)
        for handoff in lost:
            self._fail(handoff.key, error)
        self._ctx.metrics.count("unreachable", len(lost))
        self.pulls.peer_closed(peer, error)
        self._reach.gone(peer)
        self.groups.peer_closed(peer)
        self.choice.forget_peer(peer)
        self._ctx.outbox.hang_up(peer)

    @property
    def wakes_at(self) -> float:
        return min(self.loans.wakes_at, self.pulls.wakes_at)

    @property
    def holds_rows(self) -> bool:
        return bool(self.pulls.copies.held)

    def leave(self) -> None:
        self.loans.end_all()

    def close(self) -> None:
        self.groups.table.close()

    def hands_over(self) -> dict[str, str]:
        return self.choice.reasons()

    def _fail(self, key: RequestKey, error: BatonError) -> None:
        handoff = self.inflight.granted.get(key)
        if handoff is not None and isinstance(error, HandoffFailed):
            self.choice.failed(handoff.peer, handoff.sending.sender.name)
        self._ctx.core.fail(key, error)
