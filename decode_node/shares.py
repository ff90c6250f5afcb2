"""Limit the memory of each source's unfinished hand-offs. So a stuck source leaves a quarter of the memory to other
sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from decode_node.handoff_in import HandoffIn, WaitingOffer
from shared.node.loop.context import NodeContext

MOST_OF_ONE_SOURCE = 0.75  # largest share of rows, pages and waiting offers for one source


class Shares:
    """Counts what each source holds, for one round of grants. A source's only hand-off may exceed the share."""

    def __init__(self, ctx: NodeContext, open_handoffs: Iterable[HandoffIn]) -> None:
        kv = ctx.core.kv
        self._num_pages = ctx.core.settings.num_pages
        self._most_pages = int(MOST_OF_ONE_SOURCE * kv.allocator.num_total)
        self._most_rows = int(MOST_OF_ONE_SOURCE * ctx.facts.max_running)
        self._pages: Counter[str] = Counter()
        self._rows: Counter[str] = Counter()
        self._full: set[str] = set()  # refused sources: their later offers wait, to keep the order
        for handoff in open_handoffs:
            self._add(handoff.source, handoff.ranges.end)

    def allow(self, waiting: WaitingOffer) -> bool:
        """Return whether the source may have another hand-off. A refusal holds for the whole round."""
        source = waiting.source
        if source in self._full:
            return False
        pages = self._pages[source] + self._num_pages(waiting.request.num_tokens)
        if self._rows[source] and (self._rows[source] >= self._most_rows or pages > self._most_pages):
            self._full.add(source)
            return False
        return True

    def take_share(self, waiting: WaitingOffer) -> None:
        self._add(waiting.source, self._num_pages(waiting.request.num_tokens))

    def _add(self, source: str, pages: int) -> None:
        self._pages[source] += pages
        self._rows[source] += 1
