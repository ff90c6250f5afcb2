"""Compute a node's room for tokens and requests from its last report.

A node serves requests in order of arrival, so it gets just enough requests to stay busy. Other requests wait in the
router, where priority, deadlines and tenants count.

    rows    [running running free free]                room: 2 free rows plus `ahead`
    rows    [running running running running] 3 wait   room: `ahead` minus 3 requests

Up to `ahead` requests may wait at a node. Cached pages count as free, because they can be evicted.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.core.states import PageState, RowState
from shared.wire.fitting import num_page_groups
from shared.wire.messages import Fingerprint, NodeLoad

AHEAD_SHARE = 4  # with 4 * n rows, n requests may wait, so that no row idles
MIN_AHEAD = 2
PROMPT_TOKENS_AHEAD = 8192  # prompt tokens that may wait at a node: a few chunks


@dataclass(frozen=True, slots=True)
class NodeRoom:
    free_tokens: float = float("inf")
    most_sequences: float = float("inf")  # limits on our open requests at the node
    most_prompt_tokens: float = float("inf")


def room_in(
    load: NodeLoad, fingerprint: Fingerprint, num_open: int, open_prompt_tokens: int, *, all_say_kept: bool
) -> NodeRoom:
    """`num_open`, `open_prompt_tokens`: ours at the time of the report. `all_say_kept`: see `tokens_in`."""
    groups = num_page_groups(fingerprint)  # a prompt takes a page in each
    tokens = tokens_in(load, fingerprint.page_size, all_say_kept=all_say_kept) // groups
    return NodeRoom(tokens, sequences_in(load, num_open), prompt_tokens_in(load, open_prompt_tokens))


def tokens_in(load: NodeLoad, page_size: int, *, all_say_kept: bool) -> int:
    """Return the tokens that free pages can take; 0 without a free row.

    A node keeps pages for the answers under way (rule a of `shared/sched/memory/page_budget.py`). A node of protocol 14
    keeps pages for the next step of each row, and does not report them. Beside it all nodes are compared by that
    number: else it would get all requests, until it retracts some."""
    rows_in_use = sum(load.rows.values()) - load.rows.get(RowState.FREE, 0)
    if rows_in_use >= load.rows_total:
        return 0
    num_free = load.pages.get(PageState.FREE, 0) + load.pages.get(PageState.CACHED, 0)
    num_stepping = rows_in_use - load.rows.get(RowState.HELD, 0)  # a row that was handed off takes no step
    num_kept = load.kept_pages if all_say_kept else num_stepping * -(-load.spec_width // max(1, page_size))
    return max(0, num_free - num_kept) * page_size


def sequences_in(load: NodeLoad, num_open: int) -> int:
    """Return how many of our sequences the node may hold. `num_open`: our sequences at the time of the report.

    Free rows don't count while requests wait for memory. At least `ahead` sequences are allowed, whatever other routers
    send."""
    ahead = max(MIN_AHEAD, load.rows_total // AHEAD_SHARE)
    free = 0 if load.waiting else load.rows.get(RowState.FREE, 0)
    return max(ahead, num_open + free + ahead - load.waiting)


def prompt_tokens_in(load: NodeLoad, num_open: int) -> int:
    """Return the limit on our open prompt tokens at the node."""
    return max(1, num_open + PROMPT_TOKENS_AHEAD - load.waiting_tokens)
