"""Suspects: requests under which a node has died. One that kills its node must not be carried to all the others.

    node dies --> requests that ran there are suspects; requests that only waited there are not
    a suspect --> runs alone: on a node with nothing else of ours, which then gets nothing else
         |-- gets further than it had come when its node died: cleared
         '-- its node dies too, and no other suspect ran there: it ends, and nobody else is charged

What this can't know:
- Which of the requests that ran there did it, or whether any did: a machine may have lost its power. So one death ends
  nobody, and a second one ends a suspect only if no other suspect ran there. A request that two accidents hit in a row,
  the second before it got further than at the first, ends wrongly.
- What a node began in the instant before it died: the word for it (Begun, a token) may not have left. Such a request
  counts as one that waited, and max_attempts bounds what it can do.
- Whether a connection that closed is a death. One that had been quiet before was cut off, or its machine is gone, and
  that counts as none; a node that comes back as the same life had not died, and its suspects are cleared. So a request
  that takes a whole machine down is bounded by max_attempts only.
- What other routers have on a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.journal import Death, OpenRequest
from router.registry import RegisteredNode, Registry

CLEARED_AFTER = 32  # tokens beyond those it had when its node died: more than any node has computed and not sent


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of a node's death. `spares_others`: suspects of an earlier one ran there, so the others pay nothing."""

    culprit: OpenRequest | None
    suspects: Sequence[OpenRequest]
    spares_others: bool


class Suspects:
    """Owned by the dispatcher. Bounded: it holds open requests only."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._open: dict[str, OpenRequest] = {}  # by rid

    def judge(self, node: RegisteredNode, running: Sequence[OpenRequest]) -> Verdict:
        """A node is known to have died while it ran these requests."""
        known = [request for request in running if self.is_suspect(request)]
        if len(known) == 1:
            return Verdict(known[0], (), True)
        suspects = known or running
        for request in suspects:
            request.death = Death(node.peer, request.num_emitted)
            self._open[request.rid] = request
        return Verdict(None, suspects, bool(known))

    def is_suspect(self, request: OpenRequest) -> bool:
        death = request.death
        if death is None:
            return False
        has_died = self._registry.by_peer(death.peer) is None
        return has_died and request.num_emitted <= death.num_emitted + CLEARED_AFTER

    def nodes(self) -> frozenset[str]:
        """Peers where a suspect runs alone."""
        if not self._open:
            return frozenset()
        alone = [request for request in self._open.values() if request.is_alone and self.is_suspect(request)]
        return frozenset(node.peer for request in alone for node in request.nodes)

    def forget(self, request: OpenRequest) -> None:
        self._open.pop(request.rid, None)
