"""How many tokens a node has room for, by its last report. Cached pages give way, so they count."""

from __future__ import annotations

from shared.core.states import PageState, RowState
from shared.wire.messages import NodeLoad


def tokens_in(load: NodeLoad, page_size: int) -> int:
    """Return how many tokens the free pages could take: none where no row is free."""
    rows_in_use = sum(load.rows.values()) - load.rows.get(RowState.FREE, 0)
    if rows_in_use >= load.rows_total:
        return 0
    return (load.pages.get(PageState.FREE, 0) + load.pages.get(PageState.CACHED, 0)) * page_size
