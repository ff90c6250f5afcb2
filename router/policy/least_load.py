"""The node with the least work before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from router.policy.interface import Picked, Reason, Wanted
from router.registry import RegisteredNode


class LeastLoad:
    """A node with room for the request's KV comes before one without, however little that one has to do. Then prefill
    nodes are compared by prompt tokens that wait, decode nodes by sequences that run or wait.

    A node's own report is up to a heartbeat old and knows other routers' requests; what this router sent is known at
    once. So the larger of both counts. Ties go to the node that was picked least often.
    """

    reads_caches = False

    def pick(self, nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        if len(nodes) == 1:
            return Picked(nodes[0], Reason.ONLY)
        needed = max(1, wanted.num_tokens)  # no node without a free page has room
        left = [node for node in nodes if node.free_tokens >= needed] or nodes
        for measure in MEASURES[left[0].role]:
            if len(left) > 1:
                left = lowest(left, measure)
        return least_picked(left)


Measure = Callable[[RegisteredNode], int]


def lowest(nodes: Sequence[RegisteredNode], measure: Measure) -> Sequence[RegisteredNode]:
    """Return the nodes of the lowest measure. Most placements are over after the first: the others cost nothing."""
    amounts = list(map(measure, nodes))
    least = min(amounts)
    return [node for node, amount in zip(nodes, amounts, strict=True) if amount == least]


def sequences(node: RegisteredNode) -> int:
    sent, reported = node.open_sequences, node.num_reported
    return sent if sent > reported else reported


def prompt_tokens(node: RegisteredNode) -> int:
    sent, reported = node.open_prompt_tokens, node.waiting_tokens
    return sent if sent > reported else reported


def least_picked(nodes: Sequence[RegisteredNode]) -> Picked:
    """Of nodes between which nothing else decides."""
    if len(nodes) == 1:
        return Picked(nodes[0], Reason.LOAD)
    return Picked(min(nodes, key=dispatched_first), Reason.TURN)


waiting_tokens, dispatched_first = attrgetter("waiting_tokens"), attrgetter("dispatched", "node_id")
MEASURES: dict[str, tuple[Measure, ...]] = {
    "prefill": (prompt_tokens, sequences),
    "decode": (sequences, waiting_tokens),
}
