"""Move requests that wait for memory on a full decode node to a decode node with room. Sans-IO.

A request moves, at most MAX_MOVES times, if both conditions were true for MOVE_AFTER_S without a break:

- Its first tokens have arrived, and its decode node has begun none of its open sequences.
- The decode node's last report shows waiting requests, and no room for this request.

The new decode node must fit and reach the prefill node, have SPARE times the needed room, and have no waiting requests.
The prefill node stays, because its prefix cache has the prompt. A move counts neither as a failed attempt nor as a
node's fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from router.fleet.registry import RegisteredNode, Registry
from router.policy.placement import Placer
from router.requests.journal import OpenRequest
from router.requests.suspects import SuspectRequests
from shared.wire.messages import NodeLoad

MOVE_AFTER_S = 2.0
MAX_MOVES = 2
SPARE = 2


@dataclass(frozen=True, slots=True)
class Move:
    request: OpenRequest
    decode: RegisteredNode


@dataclass(slots=True)
class Promise:
    """Tokens promised to moved requests since the node's report `load`. They reduce the node's room."""

    load: NodeLoad | None
    num_tokens: int = 0


class Moves:
    def __init__(self, registry: Registry, placer: Placer, suspects: SuspectRequests) -> None:
        self._registry = registry
        self._placer = placer
        self._suspects = suspects
        self._promises: dict[str, Promise] = {}  # by peer

    def due(self, requests: Iterable[OpenRequest], now: float) -> list[Move]:
        self._drop_old_promises()
        late = [request for request in requests if self._has_waited(request, now)]
        roomy = self._with_room() if late else []
        if not roomy:
            return []
        late.sort(key=lambda request: request.attempt.waits_since or now)
        return [move for request in late if (move := self._move(request, roomy, now)) is not None]

    def _with_room(self) -> list[RegisteredNode]:
        apart = self._suspects.nodes()
        free = [node for node in self._registry if node.peer not in apart and not node.is_held_back]
        return [node for node in free if self._room(node) > 0]

    def _drop_old_promises(self) -> None:
        loads = {node.peer: node.report.load for node in self._registry}
        self._promises = {
            peer: promise for peer, promise in self._promises.items() if loads.get(peer) is promise.load is not None
        }

    def _has_waited(self, request: OpenRequest, now: float) -> bool:
        """Return whether the request may move. Record when the request began to wait."""
        attempt = request.attempt
        if not waits_for_memory(request):
            attempt.waits_since = None
            return False
        if attempt.waits_since is None:
            attempt.waits_since = now
        return request.num_moves < MAX_MOVES and now - attempt.waits_since >= MOVE_AFTER_S

    def _move(self, request: OpenRequest, roomy: Sequence[RegisteredNode], now: float) -> Move | None:
        wanted = SPARE * request.num_tokens
        rooms = {node: self._room(node) for node in self._placer.other_decodes(request, roomy, now)}
        target = max(rooms, key=lambda node: (rooms[node], node.node_id), default=None)
        if target is None or rooms[target] < wanted:
            return None
        self._promises.setdefault(target.peer, Promise(target.report.load)).num_tokens += wanted
        return Move(request, target)

    def _room(self, node: RegisteredNode) -> float:
        load = node.report.load
        if node.role != "decode" or load is None or load.waiting:
            return 0.0
        promise = self._promises.get(node.peer)
        return node.figures.room.free_tokens - (promise.num_tokens if promise is not None else 0)


def waits_for_memory(request: OpenRequest) -> bool:
    """Return whether the request's decode node seems to lack pages for it."""
    attempt, decode = request.attempt, request.attempt.decode
    if decode is None or attempt.prefill is None or attempt.waits_for_prefill:
        return False
    load = decode.report.load
    if load is None or not load.waiting or request.is_decoded:  # cheap checks first
        return False
    return not decode.has_room(request.num_tokens)
