"""Foresee the memory that answers under way will still take, so that a stream that began goes on.

    length so far   |#####      |##         |########|      three rows, and how long they may go on
    all together    the sum falls with each row that ends: its highest point counts, not the sum of all ends

The need is the highest expected sum of the answers' tokens at any time ahead, plus a margin for chance. Pages that a
prompt found in the cache never count as coming back, because other requests share them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from shared.core.request import Request
from shared.engine.plan import Int64s
from shared.sched.requests.answer_lengths import CELL, Floats
from shared.sched.requests.queues import Queues
from shared.sched.steps.settings import SchedSettings

MARGIN = 1.5  # standard deviations


def times_ahead(most: int) -> Int64s:
    """Return cells ahead: each, then ever fewer."""
    ahead = [0]
    while ahead[-1] < most:
        ahead.append(max(ahead[-1] + 1, int(ahead[-1] * 1.35)))
    return np.asarray(ahead, np.int64)


class Growth:
    def __init__(self, settings: SchedSettings, queues: Queues) -> None:
        cache = queues.budget.kv.cache
        self._settings = settings
        self._queues = queues
        # a row's pages of a windowed group grow no more in number once the row is as long as the window
        self._window = min(settings.max_context, max(cache.windows) if all(cache.windows) else settings.max_context)
        self._page_tokens = settings.page_size / (cache.windows.count(0) or len(cache.windows))
        self._ahead = times_ahead(settings.max_context // CELL)
        self._look()

    def pages(self, req: Request | None = None) -> int:
        """Return the number of pages to keep free for the answers under way, and for this one if it begins.

        A request may begin alone, however long its answer may be.
        """
        settings = self._settings
        if not settings.growth_reserve:
            return 0
        if self._is_old():
            self._look()
        if not self._num_rows:
            return 0
        mean, variance = (self._mean, self._variance) if req is None else self._with(req)
        grown = self._queues.counters.output_tokens - self._num_tokens
        need = float((mean + MARGIN * np.sqrt(variance)).max() - mean[0]) - grown
        return max(0, int(settings.growth_reserve * need / self._page_tokens))

    def begin(self, req: Request) -> None:
        """Count a request that has just begun, without a look at the others. `pages` was asked for it."""
        if self._settings.growth_reserve:
            self._mean, self._variance = self._with(req)
            self._num_rows += req.handoff_to is None

    def doubt(self) -> None:
        """A row was retracted: answers may be longer than they were, and it counts no more until it begins again."""
        self._queues.lengths.doubt()
        self._look()

    def _is_old(self) -> bool:
        """Return whether one in sixteen rows has left, or each has grown by a cell. With many rows a look is slow."""
        left = self._queues.budget.num_left - self._num_left
        grown = self._queues.counters.output_tokens - self._num_tokens
        return 16 * left > self._num_rows or grown >= CELL * self._num_rows

    def _look(self) -> None:
        rows = self._by_group(self._queues.holders())
        lengths = self._queues.lengths
        self._num_left, self._num_tokens = self._queues.budget.num_left, self._queues.counters.output_tokens
        self._num_rows = sum(map(len, rows.values()))
        self._survival = {group: lengths.survival(group, cells_of(reqs)) for group, reqs in rows.items()}
        self._mean = self._variance = np.zeros(len(self._ahead))
        for group, reqs in rows.items():
            self._mean, self._variance = self._sum(group, reqs)

    def _by_group(self, reqs: Iterable[Request]) -> dict[int, list[Request]]:
        groups: dict[int, list[Request]] = defaultdict(list)
        for req in reqs:
            groups[self._queues.lengths.group_of(req.ask.tenant)].append(req)
        return groups

    def _with(self, req: Request) -> tuple[Floats, Floats]:
        if req.handoff_to is not None:
            return self._mean, self._variance  # its answer grows elsewhere
        return self._sum(self._queues.lengths.group_of(req.ask.tenant), [req])

    def _sum(self, group: int, reqs: Sequence[Request]) -> tuple[Floats, Floats]:
        """Return the answers' tokens at each time ahead, these requests added: expected number and variance."""
        if group not in self._survival:
            self._survival[group] = self._queues.lengths.survival(group, cells_of([]))
        now = np.asarray([len(req.output_ids) for req in reqs], np.int64)
        limit = np.asarray([req.ask.sampling.max_tokens for req in reqs], np.int64)
        # a row as long as the model's window grows no more
        most = np.asarray([max(len(req.output_ids), self._window - len(req.ask.prompt_ids)) for req in reqs], np.int64)
        tokens = now[:, None] + CELL * self._ahead
        alive = self._survival[group].alive(now // CELL, self._ahead) * (tokens < limit[:, None] + CELL)
        own = np.asarray([own_prompt(req) for req in reqs], np.int64)
        tokens = np.minimum(tokens, np.minimum(limit, most)[:, None]) + own[:, None]
        spread = tokens * tokens * alive * (1 - alive)
        return self._mean + (tokens * alive).sum(axis=0), self._variance + spread.sum(axis=0)


def own_prompt(req: Request) -> int:
    """Return how many of the prompt's tokens give their pages back when the request ends."""
    return len(req.ask.prompt_ids) - req.cached_tokens if req.row else 0


def cells_of(reqs: Sequence[Request]) -> Int64s:
    return np.asarray([len(req.output_ids) // CELL for req in reqs], np.int64)
