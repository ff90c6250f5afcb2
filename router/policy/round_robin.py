"""One node after the other, each role on its own."""

from __future__ import annotations

from collections.abc import Sequence

from router.policy.interface import Picked, Reason, Wanted
from router.registry import RegisteredNode


class RoundRobin:
    """Remembers the last node of each role by name, so that nodes coming and going don't reset the turn."""

    reads_caches = False

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def pick(self, nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        ordered = sorted(nodes, key=lambda node: node.node_id)
        last = self._last.get(ordered[0].role, "")
        chosen = next((node for node in ordered if node.node_id > last), ordered[0])
        self._last[chosen.role] = chosen.node_id
        return Picked(chosen, Reason.TURN if len(nodes) > 1 else Reason.ONLY)
