"""Rows and prefixes where layers have page groups: each group's list has its own pages, and a window leaves only its
own behind."""

from __future__ import annotations

import numpy as np
import pytest

from shared.core.errors import IntegrityError
from shared.kv.group_cache import GroupCache, make_cache
from shared.kv.manager import KVManager
from shared.kv.pages import PageAllocator
from shared.kv.prefix_cache import PrefixCache
from shared.kv.rows import ReqToTokenPool
from shared.kv.window_cache import WindowCache

KEYS = np.arange(100, 140, dtype=np.int64)
PAGE = 4


def manager(num_pages: int = 40, windows: tuple[int, ...] = (0, 9), enabled: bool = True) -> KVManager:
    rows = ReqToTokenPool(5, 12 * len(windows), len(windows))
    return KVManager(rows, PageAllocator(num_pages), make_cache(windows, PAGE, enabled))


def started(kv: KVManager, num_pages: int, owner: str = "one") -> int:
    row = kv.alloc_row(owner)
    assert row is not None and kv.grow(row, num_pages * kv.num_groups)
    return row


def test_one_group_needs_no_more_than_its_cache() -> None:
    assert isinstance(make_cache((0,), PAGE, True), PrefixCache)
    assert isinstance(make_cache((9,), PAGE, True), WindowCache)
    assert isinstance(make_cache((9, 20), PAGE, True), GroupCache)


def test_a_table_has_room_for_every_group() -> None:
    with pytest.raises(ValueError, match="can't be divided among 2"):
        ReqToTokenPool(3, 5, 2)


def test_each_group_has_a_table() -> None:
    kv = manager()
    row = started(kv, 3)
    whole, windowed = kv.rows.snapshot([row])
    assert whole.tolist() == [[1, 3, 5]] and windowed.tolist() == [[2, 4, 6]]
    assert whole.flags.c_contiguous and windowed.flags.c_contiguous


def test_only_the_windowed_group_leaves_pages_behind() -> None:
    kv = manager()
    row = started(kv, 6)
    kv.leave_behind(row, 20)
    assert kv.cache.first_needed(20) == (0, 3)
    assert kv.rows.pages_of(row).tolist() == [1, 0, 3, 0, 5, 0, 7, 8, 9, 10, 11, 12]
    assert kv.num_held(row) == 9 and kv.allocator.num_free == 30
    kv.leave_behind(row, 20)
    assert kv.num_held(row) == 9
    kv.check_integrity()
    kv.release(row)
    kv.check_integrity(idle=True)
    assert kv.allocator.num_free == kv.allocator.num_total


def test_a_hole_in_a_group_s_list_is_an_error() -> None:
    kv = manager()
    row = started(kv, 3)
    kv.rows.table[row, 3] = 0
    kv._private[row, 3] = False
    with pytest.raises(IntegrityError, match=f"row {row} lists page 0"):
        kv.check_integrity()


def cached(kv: KVManager, num_pages: int, num_left: int = 0) -> int:
    """A row whose pages are cached; it has left behind what token `num_left` does not read."""
    row = started(kv, num_pages)
    kv.insert_prefix(row, KEYS, num_pages * PAGE)
    kv.leave_behind(row, num_left)
    return row


def test_a_match_needs_a_window_s_last_pages_and_all_others() -> None:
    kv = manager()
    kv.release(cached(kv, 6))
    match = kv.cache.match(KEYS, 23)
    assert match.num_tokens == 20 and match.pages.reshape(-1, 2).tolist() == [[1, 0], [3, 0], [5, 0], [7, 8], [9, 10]]
    row = kv.alloc_row("two")
    assert row is not None
    kv.take_cached(row, match)
    assert kv.rows.first_page[row].tolist() == [0, 3] and kv.grow(row, 2)
    kv.check_integrity()
    kv.release(row)
    kv.check_integrity(idle=True)


def test_a_match_ends_where_a_window_s_pages_are_gone() -> None:
    """Group 1 keeps pages 2 to 5 only if nobody evicts them: without page 3, prefixes of 4 and 5 pages are none."""
    kv = manager()
    kv.release(cached(kv, 6))
    windowed = kv.cache.by_group[1]  # type: ignore[union-attr]
    gone = next(page for page, name in windowed._identity_of.items() if page == 8)
    windowed._idle.move_to_end(gone, last=False)
    kv.allocator.free(windowed.evict(1))
    assert kv.cache.match(KEYS, 24).num_tokens == 24, "its window is pages 4 and 5"
    assert kv.cache.match(KEYS, 23).num_tokens == 12
    assert kv.cache.match(KEYS, 12).num_tokens == 12


def test_pages_that_no_step_reads_need_not_be_cached() -> None:
    """As on a decode node: the row begins at token 24, so its windowed layers read pages from 4 on."""
    kv = manager()
    kv.release(cached(kv, 3))
    firsts = kv.cache.first_needed(24)
    assert firsts == (0, 4)
    found = kv.cache.find(KEYS, 23, firsts)
    assert found.num_pages == 3 and found.pages.reshape(-1, 2).tolist() == [[1, 0], [3, 0], [5, 0]]
    row = kv.alloc_row("two")
    assert row is not None
    kv.take_cached(row, kv.cache.lock(found, "two"))
    free = kv.allocator.num_free
    assert kv.grow(row, 8, firsts) and free - kv.allocator.num_free == 7, "page 3 is not read in group 1"
    assert kv.rows.pages_of(row)[1::2].tolist()[:4] == [0] * 4 and kv.rows.first_page[row].tolist() == [0, 4]
    kv.check_integrity()


def test_all_groups_windowed_match_what_is_read() -> None:
    kv = manager(windows=(9, 17))
    assert kv.cache.find(KEYS, 23, kv.cache.first_needed(40)).num_pages == 5, "nobody reads the first five"
    kv.release(cached(kv, 6))
    assert kv.cache.find(KEYS, 23).num_pages == 5


def test_evicted_pages_keep_the_groups_shares() -> None:
    kv = manager(num_pages=100)
    for first in range(4):
        row = started(kv, 10)
        kv.insert_prefix(row, KEYS + 1000 * first, 40)
        kv.release(row)
    whole, windowed = kv.cache.by_group  # type: ignore[union-attr]
    assert whole.num_evictable == windowed.num_evictable == 40
    kv.allocator.free(kv.cache.evict(30))
    assert (whole.num_evictable, windowed.num_evictable) == (40, 10)
    kv.allocator.free(kv.cache.evict(25))
    assert (whole.num_evictable, windowed.num_evictable) == (20, 5)
    assert len(kv.cache.evict(40)) == 25


def test_a_lock_counts_what_it_frees_in_all_groups() -> None:
    kv = manager()
    row = cached(kv, 6)
    assert kv.num_freed_by(row) == 12 and kv.cache.num_evictable == 0
    kv.leave_behind(row, 20)
    assert kv.num_freed_by(row) == 9 and kv.cache.num_evictable == 3
    assert kv.num_available == kv.allocator.num_free + 3
    assert len(kv.cache.cached_pages()) == kv.cache.num_cached == 12
    kv.release(row)
    assert kv.flush_cache() == 12
    kv.check_integrity(idle=True)


def test_news_are_of_any_group() -> None:
    kv = manager()
    found = kv.cache.find(KEYS, 23)
    assert not kv.cache.has_news(found)
    kv.release(cached(kv, 2))
    assert kv.cache.has_news(found)


def test_names_are_those_of_the_first_group() -> None:
    kv, told = manager(), []
    kv.cache.listener = lambda name, is_cached: told.append((name, is_cached))
    kv.release(cached(kv, 3))
    assert len(told) == 3 and kv.cache.cached_names() == [name for name, _ in told]
    kv.flush_cache()
    assert len(told) == 6 and not kv.cache.cached_names()
    kv = manager(enabled=False)
    kv.release(cached(kv, 3))
    assert not kv.cache.num_cached and kv.allocator.num_free == kv.allocator.num_total
