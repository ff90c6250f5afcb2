"""Track pairs of nodes that can't reach each other, though this router reaches both. Sans-IO.

    closed --"can't reach" by one of the two--> open --open_s--> half open --one probe--> closed, or open twice as long

A restarted node has a new peer name, so its pairs are new. Nodes' breakers ignore these faults.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.fleet.breaker import Breaker
from router.fleet.registry import RegisteredNode
from router.requests.journal import OpenRequest

ALARM = "a prefill and a decode node can't reach each other"


@dataclass(slots=True, eq=False)
class BrokenPair:
    """`probe`: rid and attempt of the only request sent to the pair since it broke."""

    prefill: RegisteredNode
    decode: RegisteredNode
    since: float
    breaker: Breaker = field(default_factory=lambda: Breaker(max_faults=1))
    num_faults: int = 0
    probe: tuple[str, int] | None = None
    is_news: bool = True

    @property
    def name(self) -> str:
        return f"{self.prefill.node_id} -> {self.decode.node_id}"


class Pairs:
    """Owned by the placer."""

    def __init__(self) -> None:
        self._broken: dict[tuple[str, str], BrokenPair] = {}  # by peer names

    def __len__(self) -> int:
        return len(self._broken)

    def all(self) -> list[BrokenPair]:
        return list(self._broken.values())

    def reachable(self, prefills: Sequence[RegisteredNode], decode: RegisteredNode, now: float) -> list[RegisteredNode]:
        return [node for node in prefills if self._allows(node, decode, now)] if self._broken else list(prefills)

    def _allows(self, prefill: RegisteredNode, decode: RegisteredNode, now: float) -> bool:
        pair = self._broken.get((prefill.peer, decode.peer))
        return pair is None or pair.breaker.allows(now)

    def sent(self, request: OpenRequest) -> None:
        """If the request's pair is broken, use this request as the pair's probe."""
        pair = self._of(request)
        if pair is not None:
            pair.breaker.sent()
            pair.probe = (request.rid, request.attempt)

    def failed(self, request: OpenRequest, now: float) -> None:
        """Record that the request's nodes can't reach each other. On a broken pair, only the probe counts."""
        if request.prefill is None or request.decode is None:
            return
        pair = self._of(request)
        if pair is None:
            pair = BrokenPair(request.prefill, request.decode, now)
            self._broken[request.prefill.peer, request.decode.peer] = pair
        elif pair.probe != (request.rid, request.attempt):
            return
        pair.breaker.failed(now)
        pair.num_faults += 1
        pair.probe, pair.is_news = None, True

    def left(self, request: OpenRequest) -> None:
        """Judge the pair if this request was its probe. The pair has healed if the decode node began the request."""
        pair = self._of(request)
        if pair is None or pair.probe != (request.rid, request.attempt):
            return
        if request.begun_by_decode:
            self._heal(pair)
        else:
            pair.breaker.abandoned()
            pair.probe = None

    def look(self, find: Callable[[str], OpenRequest | None]) -> None:
        for pair in self.all():
            request = find(pair.probe[0]) if pair.probe is not None else None
            if request is not None and (request.rid, request.attempt) == pair.probe and request.begun_by_decode:
                self._heal(pair)

    def take_news(self) -> list[BrokenPair]:
        news = [pair for pair in self._broken.values() if pair.is_news]
        for pair in news:
            pair.is_news = False
        return news

    def forget(self, node: RegisteredNode) -> None:
        """Drop the pairs of a lost node, which may have been the cause."""
        self._broken = {key: pair for key, pair in self._broken.items() if node not in (pair.prefill, pair.decode)}

    def _of(self, request: OpenRequest) -> BrokenPair | None:
        if not self._broken or request.prefill is None or request.decode is None:
            return None
        return self._broken.get((request.prefill.peer, request.decode.peer))

    def _heal(self, pair: BrokenPair) -> None:
        del self._broken[pair.prefill.peer, pair.decode.peer]
