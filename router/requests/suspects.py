"""Find requests that kill their nodes, before they kill all nodes. Sans-IO.

    node dies --> requests that ran there become suspects, requests that waited there don't
    a suspect --> runs alone: on a node with no other requests of ours, which gets no others meanwhile
         |-- emits CLEARED_AFTER more tokens: cleared
         '-- its node dies too, and no other suspect ran there: the suspect fails, no other request is charged

Limits:
- A node may die by accident, as in a power cut. So the first death ends no request. But two accidents in a row end an
  innocent request.
- If a node dies right after it began a request, Begun and the first token may be lost. The request then counts as
  waiting, and max_attempts bounds the harm.
- A connection that closes after a silence is not a death: the link or the machine has failed. So only max_attempts
  bounds requests that kill whole machines. If the same incarnation of the node returns, its suspects are cleared.
- Requests of other routers on a node are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.fleet.registry import RegisteredNode, Registry
from router.requests.journal import OpenRequest, Suspicion

# No node computes 32 tokens before it sends any.
CLEARED_AFTER = 32


@dataclass(frozen=True, slots=True)
class Verdict:
    """`spares_others`: suspects ran on the node, so other requests' attempts are excused."""

    culprit: OpenRequest | None
    suspects: Sequence[OpenRequest]
    spares_others: bool


class SuspectRequests:
    """Holds suspects, all of them open requests."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._open: dict[str, OpenRequest] = {}  # by rid

    def judge(self, node: RegisteredNode, running: Sequence[OpenRequest]) -> Verdict:
        known = [request for request in running if self.is_suspect(request)]
        if len(known) == 1:
            return Verdict(known[0], (), True)
        suspects = known or running
        for request in suspects:
            request.suspicion = Suspicion(node.peer, request.num_emitted)
            self._open[request.rid] = request
        return Verdict(None, suspects, bool(known))

    def is_suspect(self, request: OpenRequest) -> bool:
        suspicion = request.suspicion
        if suspicion is None:
            return False
        has_died = self._registry.by_peer(suspicion.peer) is None
        return has_died and request.num_emitted <= suspicion.num_emitted + CLEARED_AFTER

    def nodes(self) -> frozenset[str]:
        if not self._open:
            return frozenset()
        alone = [request for request in self._open.values() if request.attempt.is_alone and self.is_suspect(request)]
        return frozenset(node.peer for request in alone for node in request.attempt.nodes)

    def forget(self, request: OpenRequest) -> None:
        self._open.pop(request.rid, None)
