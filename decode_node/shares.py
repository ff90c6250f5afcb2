"""How much of a decode node's memory the unfinished hand-offs of one source hold. A source that finishes none of them
leaves a quarter to the others; what is installed counts no more."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from decode_node.handoff_in import HandoffIn, WaitingOffer
from shared.kv.manager import page_count
from shared.node.context import NodeContext

MOST_OF_ONE_SOURCE = 0.75  # of rows and pages, and of the offers that may wait


class Shares:
    """For one round of grants. A source that holds nothing may have one hand-off, however long."""

    def __init__(self, ctx: NodeContext, open_handoffs: Iterable[HandoffIn]) -> None:
        kv = ctx.core.kv
        self._page_size = kv.page_size
        self._most_pages = int(MOST_OF_ONE_SOURCE * kv.allocator.num_total)
        self._most_rows = int(MOST_OF_ONE_SOURCE * ctx.facts.max_running)
        self._pages: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()
        self._full: set[str] = set()  # the younger ones of such a source wait, too: none overtakes
        for handoff in open_handoffs:
            self._add(handoff.source, handoff.ranges.end)

    def allow(self, waiting: WaitingOffer) -> bool:
        """Return whether its source may have this one, too."""
        source = waiting.source
        if source in self._full:
            return False
        pages = self._pages[source] + page_count(waiting.request.num_tokens, self._page_size)
        if self._rows[source] and (self._rows[source] >= self._most_rows or pages > self._most_pages):
            self._full.add(source)
            return False
        return True

    def take(self, waiting: WaitingOffer) -> None:
        """It was granted."""
        self._add(waiting.source, page_count(waiting.request.num_tokens, self._page_size))

    def _add(self, source: str, pages: int) -> None:
        self._pages[source] += pages
        self._rows[source] += 1
