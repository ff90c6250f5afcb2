"""Pick the node with the least pending work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

from router.fleet.registry import RegisteredNode
from router.policy.interface import Picked, Reason, Wanted


class LeastLoad:
    """Nodes with room for the request's KV come first. Then prefill nodes are compared by waiting prompt tokens, and
    decode nodes by open sequences.

    Other routers' requests count too, and work on slow nodes counts more (see RegisteredNode).
    """

    reads_caches = False

    def pick(self, nodes: Sequence[RegisteredNode], wanted: Wanted) -> Picked:
        if len(nodes) == 1:
            return Picked(nodes[0], Reason.ONLY)
        needed = max(1, wanted.num_tokens)  # a node without a free page has no room
        left = [node for node in nodes if node.figures.room.free_tokens >= needed] or nodes
        for measure in MEASURES[left[0].role]:
            if len(left) > 1:
                left = lowest(left, measure)
        return least_picked(left)


Measure = Callable[[RegisteredNode], float]


def lowest(nodes: Sequence[RegisteredNode], measure: Measure) -> Sequence[RegisteredNode]:
    amounts = list(map(measure, nodes))
    least = min(amounts)
    return [node for node, amount in zip(nodes, amounts, strict=True) if amount == least]


def least_picked(nodes: Sequence[RegisteredNode]) -> Picked:
    if len(nodes) == 1:
        return Picked(nodes[0], Reason.LOAD)
    return Picked(min(nodes, key=dispatched_first), Reason.TURN)


prompt_tokens = attrgetter("prompt_tokens")
weighted_sequences, weighted_tokens = attrgetter("weighted_sequences"), attrgetter("weighted_tokens")
waiting_tokens, dispatched_first = attrgetter("report.waiting_tokens"), attrgetter("ours.dispatched", "turn", "node_id")
MEASURES: dict[str, tuple[Measure, ...]] = {
    "prefill": (weighted_tokens, weighted_sequences),
    "decode": (weighted_sequences, waiting_tokens),
}
