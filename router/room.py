"""Whether a node has a row and KV memory for a request, by its last report. Cached pages give way, so they count."""

from __future__ import annotations

from router.registry import RegisteredNode
from shared.core.states import PageState, RowState


def free_tokens(node: RegisteredNode) -> float:
    """Return how many tokens its pages could take: none without a free row. A node that has not reported is empty."""
    load = node.load
    if load is None:
        return float("inf")
    rows_in_use = sum(count for state, count in load.rows.items() if state != RowState.FREE)
    if rows_in_use >= load.rows_total:
        return 0.0
    available = load.pages.get(PageState.FREE, 0) + load.pages.get(PageState.CACHED, 0)
    return available * node.hello.fingerprint.page_size


def has_room(node: RegisteredNode, num_tokens: int) -> bool:
    """Return whether it can take so many tokens now, without waiting. No node without a free page has room."""
    return free_tokens(node) >= max(1, num_tokens)
