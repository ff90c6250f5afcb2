"""Rare events: what the protocol must get right and few seeds bring about. Each is counted when it happens, so that a
long run can say which of them it never met."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from prefill_node.side import PrefillSide
from shared.core.keys import RequestKey
from shared.core.request import Request, RequestState
from shared.wire.codec import key_of
from shared.wire.messages import Drain, Generate, Grant, Installed, Message, Offer, Wait, Welcome
from tests.support.sim.hosts import NodeHost

S = RequestState


@dataclass
class RareEvents:
    """Told of every message and of every move of a request."""

    lease_s: float
    counts: Counter[str] = field(default_factory=Counter)
    longest_wait_s: float = 0.0  # of an offer, for its grant
    _unpinned: dict[RequestKey, bool] = field(default_factory=dict)  # -> whether it was computed again
    _offered: dict[RequestKey, float] = field(default_factory=dict)  # when it came to the decode node
    _waited: dict[RequestKey, float] = field(default_factory=dict)  # told to wait since
    _drained: set[tuple[str, str]] = field(default_factory=set)

    def moved(self, req: Request, before: RequestState, after: RequestState) -> None:
        if after is S.WAITING and before is S.RUNNING and req.ask.sampling.grammar:
            self.counts["retracted under a grammar"] += 1
        if after is S.WAITING and before is S.GRANTED:
            self.counts["retracted after its grant"] += 1
        elif after is S.WAITING and req.handoff_to is not None and before in (S.PREFILLING, S.HANDED_OFF):
            self._unpinned[req.key] = False
        elif after is S.PREFILLING and req.key in self._unpinned:
            self._unpinned[req.key] = True

    def sent(self, host: str, message: Message, *, to: str) -> None:
        """`to`: a peer's name."""
        if isinstance(message, Drain):
            told = (host, to)
            self.counts["drain told again"] += told in self._drained
            self._drained.add(told)
        elif isinstance(message, Generate) and message.key.attempt:
            self._went_on(message)

    def _went_on(self, message: Generate) -> None:
        key = key_of(message.key)
        self.counts["resumed twice"] += key.attempt == 2
        self.counts["resumed under a grammar"] += bool(message.sampling.grammar and any(message.output_ids))
        former = RequestKey(key.router_id, key.router_epoch, key.rid, key.attempt - 1, key.seq_index)
        self.counts["wait then elsewhere"] += former in self._waited

    def arrives(self, host: NodeHost, peer: str, message: Message, now: float) -> None:
        """At a node, which has not read it yet."""
        node = host.node
        if node is None:
            return
        if isinstance(message, Welcome):
            link = node.ctx.routers.dialled.get(peer)
            newest = 0 if link is None else link.num_connections
            self.counts["Welcome of an old connection"] += message.connection not in (0, newest)
        elif isinstance(message, Offer):
            key = key_of(message.key)
            self._offered.setdefault(key, now)
            self.counts["offered under a grammar"] += bool(message.sampling.grammar)
            self.counts["tombstone before offer"] += node.ctx.tombstones.covers(key)
            self.counts["offer before its router's Welcome"] += node.ctx.routers.peer_of(key) is None
        elif isinstance(node.side, PrefillSide) and isinstance(message, Grant | Installed | Wait):
            self._answered(node.side, message, now)

    def _answered(self, side: PrefillSide, message: Grant | Installed | Wait, now: float) -> None:
        key = key_of(message.key)
        if isinstance(message, Wait):
            self._waited.setdefault(key, now)
        elif isinstance(message, Installed):
            self.counts["late Installed"] += key not in side.inflight.granted
        elif side.bootstrap.find_handoff(key) is None:
            self.counts["grant after give-up"] += 1
        else:
            self.counts["unpin then grant"] += key in self._unpinned
            self.counts["unpin then grant, computed again"] += self._unpinned.get(key, False)
            waited = now - self._offered.get(key, now)
            self.longest_wait_s = max(self.longest_wait_s, waited)
            self.counts["wait longer than a lease, then grant"] += waited > self.lease_s
