"""When a request that found no room is asked again: whenever it may fit now, and not each time that others go on."""

from __future__ import annotations

import numpy as np
import pytest

from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.core.states import PageState
from shared.kv.manager import KVManager
from shared.kv.pages import PageAllocator
from shared.kv.prefix_cache import PrefixCache
from shared.kv.rows import ReqToTokenPool
from shared.kv.window_cache import WindowCache
from shared.sched.memory.page_budget import PageBudget, Shortage
from shared.sched.memory.room import NoRoom
from shared.sched.steps.settings import SchedSettings
from tests.support.cores.core_rig import Job

PAGE, POOL, ROWS = 4, 41, 8  # page 0 is the sink
STEM = tuple(range(40))  # ten pages


class Site:
    """A pool, its budget, and one request that waits for room."""

    def __init__(self, window: int | None = None) -> None:
        settings = SchedSettings(PAGE, 1000, 64, 64)
        cache = PrefixCache(PAGE) if window is None else WindowCache(PAGE, window)
        self.kv = KVManager(ReqToTokenPool(ROWS, 250), PageAllocator(POOL), cache)
        self.budget = PageBudget(self.kv, settings)
        self.no_room = NoRoom(self.budget)
        self.num_requests = 0

    def request(self, ids: tuple[int, ...]) -> Request:
        self.num_requests += 1
        return Job(self.num_requests, ids, SamplingParams(max_tokens=4), self.num_requests).request()

    def begin(self, req: Request) -> None:
        found = self.budget.reserve(req, req.all_ids(), 0, 0, PageState.ACTIVE)
        assert not isinstance(found, Shortage)

    def hold(self, num_pages: int) -> int:
        row = self.kv.alloc_row("held", PageState.HELD)
        assert row is not None and self.kv.grow(row, num_pages)
        return row

    def cache_stem(self, num_tokens: int, row: int = 0) -> None:
        """A row that goes on, or one that has ended, brings these tokens of the stem into the cache."""
        own = row or self.kv.alloc_row("stem")
        assert own is not None and self.kv.grow(own, num_tokens // PAGE - int(self.kv.rows.num_pages[own]))
        self.kv.insert_prefix(own, np.asarray(STEM[:num_tokens]), num_tokens)
        if not row:
            self.kv.release(own)

    def waits(self, req: Request) -> bool:
        """Return whether a plan passes the request over. If not, it is tried, and noted again if it lacks room."""
        if self.no_room.lacking(req, 0) is not None:
            return True
        found = self.budget.reserve(req, req.all_ids(), 0, 0, PageState.ACTIVE)
        if isinstance(found, Shortage):
            self.no_room.note(req, found, 0)
        return False


def test_who_locks_the_waiting_one_s_prefix_makes_it_fit_later() -> None:
    """Its pages leave the room, and the waiting one needs them no more: what comes free next is enough."""
    site = Site()
    site.cache_stem(40)  # 10 pages, evictable
    held = site.hold(10)
    site.hold(10)  # 10 are free
    waiting = site.request(STEM + tuple(range(60)))  # 10 cached and 15 own: 5 too few
    assert not site.waits(waiting) and site.waits(waiting)
    site.begin(site.request(STEM + (1, 2, 3)))  # locks the ten, takes one
    site.kv.release(held)
    assert not site.waits(waiting) and waiting.row, "19 are free, and 15 needed; 20 were available before"


@pytest.mark.parametrize("window", [None, 8])
def test_the_next_page_of_its_prompt_makes_it_fit(window: int | None) -> None:
    """A grant's pages arrive, or a request with prompt scores computes them: nobody waits for those by name."""
    site = Site(window)
    row = site.kv.alloc_row("grant")
    assert row is not None and site.kv.grow(row, 10)
    site.hold(24)  # 6 are free
    waiting = site.request(STEM + (1, 2, 3))  # eleven pages
    assert not site.waits(waiting) and site.waits(waiting)
    site.cache_stem(40, row)
    assert not site.waits(waiting) and waiting.row


def test_an_evicted_prefix_is_looked_up_anew() -> None:
    site = Site()
    site.cache_stem(40)
    held = site.hold(20)
    waiting = site.request(STEM + tuple(range(100)))
    assert not site.waits(waiting) and site.waits(waiting)
    row = site.hold(15)  # evicts pages of the stem
    assert not site.waits(waiting), "what was found is gone"
    for each in (held, row):
        site.kv.release(each)
