"""Bootstrap: requests whose Offer has no Grant yet. Some of these requests are already prefilled.

If n > 1, a request's first sequence is the leader, the others are siblings. With a prefix cache, siblings are offered
once the leader is installed or ends. An installed leader's pages are cached, so only later pages travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prefill_node.handoff_out import HandoffOut
from prefill_node.reach import Reach
from prefill_node.transport_choice import TransportChoice
from shared.core.keys import RequestKey
from shared.core.request import Request, RequestState
from shared.node.loop.context import NodeContext
from shared.wire.codec import to_wire
from shared.wire.messages import Generate, Offer
from shared.wire.peers import peer_name


class Bootstrap:
    """Owns hand-offs until they are granted."""

    def __init__(self, ctx: NodeContext, choice: TransportChoice, reach: Reach) -> None:
        self._ctx = ctx
        self._choice = choice
        self._reach = reach
        self.offered: dict[RequestKey, HandoffOut] = {}
        self._followers: dict[RequestKey, list[HandoffOut]] = {}  # leader -> its siblings that are not offered yet

    def add_handoffs(self, generate: Generate, requests: Sequence[Request], now: float) -> None:
        peer = peer_name(generate.decode_node, generate.decode_epoch)
        handoffs = [HandoffOut(req, peer, generate.decode_endpoint, generate.ticket, now) for req in requests]
        leader = handoffs[0]
        self.offer(leader, now)
        if self._ctx.core.kv.cache.enabled and len(handoffs) > 1:
            self._followers[leader.key] = handoffs[1:]
            return
        for handoff in handoffs[1:]:
            self.offer(handoff, now)

    def offer(self, handoff: HandoffOut, now: float) -> None:
        req, ask, facts = handoff.request, handoff.request.ask, self._ctx.facts
        handoff.since = handoff.touched = now
        handoff.offered = self._choice.order(handoff.peer)
        self.offered[req.key] = handoff
        self._ctx.outbox.dial(handoff.peer, handoff.endpoint)
        self._reach.dialled(handoff.peer, now)
        offer = Offer(
            key=to_wire(req.key),
            source_node=facts.node_id,
            source_epoch=facts.epoch,
            prompt_ids=ask.prompt_ids.tolist(),
            # A sibling may have its first token before its Offer. The Offer leaves this token out, because the record
            # brings it. The request's state shows the token before the scheduler's event does.
            output_ids=req.output_ids[:-1] if req.state is RequestState.HANDED_OFF else list(req.output_ids),
            sampling=to_wire(ask.sampling),
            seed=ask.seed,
            remaining_ms=max(0, int(1000 * min(req.deadline - now, 1e9))),
            fingerprint=facts.fingerprint,
            host_id=facts.host_id,
            transports=handoff.offered,
            adapter=ask.adapter,
            cache_salt=ask.cache_salt,
            ticket=handoff.ticket,
            tenant=ask.tenant,
            trace=ask.trace,
        )
        self._ctx.outbox.send(handoff.peer, offer)

    def leader_gone(self, key: RequestKey, now: float) -> None:
        for handoff in self._followers.pop(key, []):
            if not handoff.request.finished:
                self.offer(handoff, now)

    def find_handoff(self, key: RequestKey) -> HandoffOut | None:
        """Return a hand-off even if it is not offered yet."""
        offered = self.offered.get(key)
        return offered or next((handoff for handoff in self._behind() if handoff.key == key), None)

    def forget(self, key: RequestKey) -> HandoffOut | None:
        """Return the hand-off if it was offered."""
        for leader, handoffs in list(self._followers.items()):
            self._followers[leader] = [handoff for handoff in handoffs if handoff.key != key]
        return self.offered.pop(key, None)

    def of_peer(self, peer: str) -> list[HandoffOut]:
        return [handoff for handoff in [*self.offered.values(), *self._behind()] if handoff.peer == peer]

    def unanswered(self, before: float) -> list[HandoffOut]:
        """Return the hand-offs whose peer has sent nothing since `before`, not even Wait."""
        return [handoff for handoff in self.offered.values() if handoff.silent_since < before]

    def _behind(self) -> Iterator[HandoffOut]:
        for handoffs in self._followers.values():
            yield from handoffs
