"""The node with the least work before it."""

from __future__ import annotations

from collections.abc import Sequence

from router.registry import RegisteredNode
from shared.core.states import RowState


class LeastLoad:
    """A node with room for the request's KV comes before one without, however little that one has to do. Then prefill
    nodes are compared by prompt tokens that wait, decode nodes by sequences that run or wait.

    A node's own report is up to a heartbeat old and knows other routers' requests; what this router sent is known at
    once. So the larger of both counts. Ties go to the node that was picked least often.
    """

    def pick(self, nodes: Sequence[RegisteredNode], num_tokens: int = 0) -> RegisteredNode:
        def rank(node: RegisteredNode) -> tuple[bool, int, int, int, str]:
            return (not node.has_room(num_tokens), *work_before(node), node.dispatched, node.node_id)

        return min(nodes, key=rank)


def work_before(node: RegisteredNode) -> tuple[int, int]:
    rows = node.load.rows if node.load else {}
    running = sum(rows.get(state, 0) for state in RowState if state is not RowState.FREE)
    waiting = node.load.waiting if node.load else 0
    waiting_tokens = node.load.waiting_tokens if node.load else 0
    sequences = max(node.open_sequences, running + waiting)
    if node.role == "prefill":
        return max(node.open_prompt_tokens, waiting_tokens), sequences
    return sequences, waiting_tokens
