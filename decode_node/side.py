"""The decode side of a node.

    prealloc (Offer, no memory)  ->  transfer (granted, pages on their way)  -> prebuilt  ->  running, in the scheduler.

If a request ends before it is installed, its prefill node gets Failed, and immediately frees the request's pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from decode_node.handoff_in import HandoffIn
from decode_node.prealloc import Prealloc
from decode_node.prebuilt import process_prebuilt
from decode_node.transfer import Transfers
from shared.core.errors import Aborted, BatonError, DeadlineExceeded, HandoffFailed, PeerUnreachable
from shared.core.keys import RequestKey
from shared.core.request import Request, RequestState
from shared.node.loop.context import NodeContext
from shared.sched.steps.events import GrantRevoked, SchedEvent
from shared.transfer.interface import PageReceiver
from shared.wire.codec import key_of, to_wire
from shared.wire.errors import failed, refuse
from shared.wire.messages import (
    Abort,
    Broken,
    Generate,
    Installed,
    Offer,
    Prebuilt,
    Ready,
    StoreEntry,
)
from shared.wire.peers import Received


class DecodeSide:
    """Implements `shared.node.loop.side.Side`."""

    def __init__(self, ctx: NodeContext, receivers: Mapping[str, PageReceiver]) -> None:
        self._ctx = ctx
        self.prealloc = Prealloc(ctx)
        self.transfers = Transfers(ctx, receivers)

    def hand_over(self, generate: Generate, requests: Sequence[Request], now: float) -> Sequence[Request]:
        for req in requests:
            self._ctx.end(req.key, HandoffFailed(f"{self._ctx.facts.node_id} is a decode node: it hands nothing over"))
        return ()

    def outside(self) -> list[Request]:
        return self.prealloc.requests()

    def bring_prefix(self, generate: Generate, req: Request, now: float) -> None:
        """Do nothing: a decode node computes its prompts itself."""

    @property
    def wakes_at(self) -> float:
        return float("inf")

    @property
    def holds_rows(self) -> bool:
        return bool(self.transfers.copies.held)

    def leave(self) -> None:
        """Do nothing: no other node reads pages from a decode node."""

    # ---- messages from prefill nodes

    def receive(self, received: Received, now: float) -> None:
        message = received.message
        if isinstance(message, Offer):
            self.prealloc.add_offer(received.peer, message, now)
        elif isinstance(message, Ready | Prebuilt):
            self._arrived(received, message, now)
        elif isinstance(message, Abort):
            self._given_up(received.peer, message, now)
        elif isinstance(message, StoreEntry | Broken):
            self.transfers.groups.receive(received.peer, message)
        else:
            self._ctx.drop(received.peer, f"{type(message).__name__} at a decode node")

    def _arrived(self, received: Received, message: Ready | Prebuilt, now: float) -> None:
        handoff = self.transfers.find(received.peer, key_of(message.key), message.lease)
        if handoff is None:
            return
        try:
            if isinstance(message, Ready):
                self.transfers.ready(handoff, received, message, now)
            else:
                self.transfers.prebuilt(handoff, message, now)
        except HandoffFailed as error:
            self._fail(handoff, error)

    def _given_up(self, source: str, abort: Abort, now: float) -> None:
        """End a request that its prefill node has ended, unless the request is installed.

        An installed request goes on: the Abort was sent before Installed came, and the router may know already that
        the request runs here.
        """
        key = key_of(abort.key)
        if key in self._ctx.core.requests:
            handoff = self.transfers.open.get(key)
            if handoff is None or handoff.source != source:
                return
        elif self.prealloc.source_of(key) not in (None, source):
            return
        self._ctx.tombstones.bury(key, now)
        self.abort(key)
        self._ctx.core.abort(key)

    # ---- scheduler events

    def event(self, event: SchedEvent, now: float) -> None:
        if isinstance(event, GrantRevoked):
            self._revoked(event, now)

    def _revoked(self, event: GrantRevoked, now: float) -> None:
        handoff = self.transfers.revoked(event.request.key, event.row, now)
        if handoff is None:
            return
        wire = to_wire(handoff.key)
        if event.retracted:  # this node will compute the prompt itself: the source may free its pages
            self._ctx.outbox.send(handoff.source, Installed(wire, handoff.lease))
        else:
            self._ctx.outbox.send(handoff.source, failed(wire, handoff.lease, handoff.failure))

    # ---- one round

    def poll(self, now: float) -> None:
        for handoff, error in self.transfers.poll(now):
            self._give_back(handoff, error)
        for handoff, error in self.transfers.stalled(now):
            self._fail(handoff, error)
        self._install(now)
        self._expire_offers(now)
        for granted in self.prealloc.grant(now, self.transfers.open.values()):
            self.transfers.add_transfer(granted.waiting, granted.cached_prefix_len, now)

    def _install(self, now: float) -> None:
        open_handoffs = self.transfers.open.values()
        complete = [h for h in open_handoffs if h.complete and h.request.state is RequestState.GRANTED]
        for handoff in complete:
            del self.transfers.open[handoff.key]
        process_prebuilt(self._ctx, complete, now)

    def _expire_offers(self, now: float) -> None:
        for waiting in self.prealloc.take_expired(now):
            late = DeadlineExceeded("the request's deadline passed")
            self._ctx.outbox.send(waiting.source, refuse(waiting.offer.key, late))
            self._ctx.end(waiting.request.key, late)
        for waiting in self.prealloc.take_unknown(now):
            unknown = HandoffFailed("the request's router is not known here")
            self._ctx.outbox.send(waiting.source, refuse(waiting.offer.key, unknown))

    # ---- ends

    def abort(self, key: RequestKey) -> None:
        """Refuse the request's Offer. A granted request ends through the event GrantRevoked."""
        waiting = self.prealloc.take_offer(key)
        if waiting is not None:
            self._ctx.outbox.send(waiting.source, refuse(waiting.offer.key, Aborted("aborted")))

    def peer_up(self, peer: str) -> None:
        """Do nothing: a decode node dials no other node."""

    def peer_closed(self, peer: str, *, accepted: bool) -> None:
        """End the Offers of a lost prefill node, and the hand-offs that still need it."""
        error = PeerUnreachable(f"{self._ctx.facts.node_id} has lost its connection to {peer}")
        for waiting in self.prealloc.take_of_source(peer):
            self._ctx.end(waiting.request.key, error)
            self._ctx.metrics.count("unreachable")
        self.transfers.groups.peer_closed(peer)
        for handoff in self.transfers.of_source(peer):
            if handoff.needs_source:
                self._fail(handoff, error)
                self._ctx.metrics.count("unreachable")
        self.transfers.copies.forget_dead()

    def hands_over(self) -> dict[str, str]:
        return {}

    def close(self) -> None:
        self.transfers.groups.table.close()

    def _give_back(self, handoff: HandoffIn, error: BatonError) -> None:
        """Report a failed hand-off only to its source, because that node may already have answered the request."""
        if self.transfers.open.get(handoff.key) is handoff:
            handoff.failure = error
            self._ctx.core.abort(handoff.key)

    def _fail(self, handoff: HandoffIn, error: BatonError) -> None:
        if self.transfers.open.get(handoff.key) is handoff:
            self._ctx.core.fail(handoff.key, error)
