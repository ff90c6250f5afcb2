"""Track pairs of nodes that can't reach each other, though this router reaches both. Sans-IO.

    closed --"can't reach" by one of the two--> open --open_s--> half open --one probe--> closed, or open twice as long

A restarted node has a new peer name, so its pairs are new. Nodes' breakers ignore these faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from router.fleet.breaker import Breaker
from router.fleet.registry import RegisteredNode
from router.requests.attempt import Attempt

ALARM = "a prefill and a decode node can't reach each other"


@dataclass(slots=True, eq=False)
class BrokenPair:
    """`probe`: the only attempt sent to the pair since it broke."""

    prefill: RegisteredNode
    decode: RegisteredNode
    since: float
    breaker: Breaker = field(default_factory=lambda: Breaker(max_faults=1))
    num_faults: int = 0
    probe: Attempt | None = None
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

    def sent(self, attempt: Attempt) -> None:
        """If the attempt's pair is broken, use this attempt as the pair's probe."""
        pair = self._of(attempt)
        if pair is not None:
            pair.breaker.sent()
            pair.probe = attempt

    def failed(self, attempt: Attempt, now: float) -> None:
        """Record that the attempt's nodes can't reach each other. On a broken pair, only the probe counts."""
        if attempt.prefill is None or attempt.decode is None:
            return
        pair = self._of(attempt)
        if pair is None:
            pair = BrokenPair(attempt.prefill, attempt.decode, now)
            self._broken[attempt.prefill.peer, attempt.decode.peer] = pair
        elif pair.probe is not attempt:
            return
        pair.breaker.failed(now)
        pair.num_faults += 1
        pair.probe, pair.is_news = None, True

    def left(self, attempt: Attempt) -> None:
        """Judge the pair if this attempt was its probe. The pair has healed if the decode node began the request."""
        pair = self._of(attempt)
        if pair is None or pair.probe is not attempt:
            return
        if attempt.begun_by_decode:
            self._heal(pair)
        else:
            pair.breaker.abandoned()
            pair.probe = None

    def look(self) -> None:
        for pair in self.all():
            if pair.probe is not None and pair.probe.begun_by_decode:
                self._heal(pair)

    def take_news(self) -> list[BrokenPair]:
        news = [pair for pair in self._broken.values() if pair.is_news]
        for pair in news:
            pair.is_news = False
        return news

    def forget(self, node: RegisteredNode) -> None:
        """Drop the pairs of a lost node, which may have been the cause."""
        self._broken = {key: pair for key, pair in self._broken.items() if node not in (pair.prefill, pair.decode)}

    def _of(self, attempt: Attempt) -> BrokenPair | None:
        if not self._broken or attempt.prefill is None or attempt.decode is None:
            return None
        return self._broken.get((attempt.prefill.peer, attempt.decode.peer))

    def _heal(self, pair: BrokenPair) -> None:
        del self._broken[pair.prefill.peer, pair.decode.peer]
