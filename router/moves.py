"""Moves: a request that waits for the memory of a full decode node goes to one that has room. Sans-IO.

One rule, asked with every tick. A request moves when, for MOVE_AFTER_S without a break,

    its prompt is computed (its first tokens are here), and its decode node has begun none of its open sequences;
    that node has, by its last report, requests that wait, and no room for this one;

and then another decode node that its prefill node can hand to has, by its last report, nobody who waits and room for
twice as much. The prefill node stays: its prefix cache has the prompt. A move costs no attempt and no breaker.

So that nothing goes to and fro, a request moves MAX_MOVES times at most, and what was moved to a node is taken off its
room until it reports anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.journal import OpenRequest
from router.placement import Placer
from router.registry import RegisteredNode, Registry
from router.suspects import Suspects
from shared.wire.messages import NodeLoad

MOVE_AFTER_S = 2.0
MAX_MOVES = 2
SPARE = 2  # times what the request needs


@dataclass(frozen=True, slots=True)
class Move:
    request: OpenRequest
    decode: RegisteredNode


@dataclass(slots=True)
class Promise:
    """What was moved to a node since that report of its came."""

    load: NodeLoad | None
    num_tokens: int = 0


class Moves:
    """Owned by the dispatcher."""

    def __init__(self, registry: Registry, placer: Placer, suspects: Suspects) -> None:
        self._registry = registry
        self._placer = placer
        self._suspects = suspects
        self._promises: dict[str, Promise] = {}  # by peer

    def due(self, requests: Iterable[OpenRequest], now: float) -> list[Move]:
        """Return who goes where now, the longest wait first."""
        self._drop_old_promises()
        late = [request for request in requests if self._has_waited(request, now)]
        roomy = self._with_room() if late else []
        if not roomy:
            return []
        late.sort(key=lambda request: request.waits_since or now)
        return [move for request in late if (move := self._move(request, roomy, now)) is not None]

    def _with_room(self) -> list[RegisteredNode]:
        """Return the decode nodes that have some room. Nobody is moved to where a suspect runs alone."""
        apart = self._suspects.nodes()
        return [node for node in self._registry if node.peer not in apart and self._room(node) > 0]

    def _drop_old_promises(self) -> None:
        loads = {node.peer: node.load for node in self._registry}
        self._promises = {
            peer: promise for peer, promise in self._promises.items() if loads.get(peer) is promise.load is not None
        }

    def _has_waited(self, request: OpenRequest, now: float) -> bool:
        """Note since when it waits; whether that is long enough."""
        if not waits_for_memory(request):
            request.waits_since = None
            return False
        if request.waits_since is None:
            request.waits_since = now
        return request.num_moves < MAX_MOVES and now - request.waits_since >= MOVE_AFTER_S

    def _move(self, request: OpenRequest, roomy: Sequence[RegisteredNode], now: float) -> Move | None:
        wanted = SPARE * request.num_tokens
        rooms = {node: self._room(node) for node in self._placer.other_decodes(request, roomy, now)}
        target = max(rooms, key=lambda node: (rooms[node], node.node_id), default=None)
        if target is None or rooms[target] < wanted:
            return None
        self._promises.setdefault(target.peer, Promise(target.load)).num_tokens += wanted
        return Move(request, target)

    def _room(self, node: RegisteredNode) -> float:
        """In tokens; none where others wait already, and none on prefill nodes."""
        if node.role != "decode" or node.load is None or node.load.waiting:
            return 0.0
        promise = self._promises.get(node.peer)
        return node.free_tokens - (promise.num_tokens if promise is not None else 0)


def waits_for_memory(request: OpenRequest) -> bool:
    """Whether its decode node, as far as can be known here, holds its offer back for want of pages."""
    decode = request.decode
    if decode is None or request.prefill is None or request.waits_for_prefill:
        return False
    load = decode.load
    if load is None or not load.waiting or request.is_decoded:  # in this order: it is asked of every request, often
        return False
    return not decode.has_room(request.num_tokens)
