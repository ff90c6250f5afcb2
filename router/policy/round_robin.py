"""Take turns among the nodes of each role."""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.registry import RegisteredNode
from router.policy.interface import Picked, Reason, Wanted


class RoundRobin:
    """Remembers each role's last node by name, so nodes that come and go don't change the order."""

    reads_caches = False

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def pick(self, nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        ordered = sorted(nodes, key=lambda node: node.node_id)
        last = self._last.get(ordered[0].role, "")
        chosen = next((node for node in ordered if node.node_id > last), ordered[0])
        self._last[chosen.role] = chosen.node_id
        return Picked(chosen, Reason.TURN if len(nodes) > 1 else Reason.ONLY)
