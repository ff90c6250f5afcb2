"""Rows and prefixes where layers have page groups: each group's list has its own pages, and a window leaves only its
own behind."""

from __future__ import annotations

import numpy as np
import pytest

from shared.kv.group_cache import make_cache
from shared.kv.manager import KVManager
from shared.kv.pages import PageAllocator
from shared.kv.rows import ReqToTokenPool

KEYS = np.arange(100, 140, dtype=np.int64)
PAGE = 4


def manager(num_pages: int = 40, windows: tuple[int, ...] = (0, 9), enabled: bool = True) -> KVManager:
    rows = ReqToTokenPool(5, 12 * len(windows), len(windows))
    return KVManager(rows, PageAllocator(num_pages), make_cache(windows, PAGE, enabled))


def started(kv: KVManager, num_pages: int, owner: str = "one") -> int:
    row = kv.alloc_row(owner)
    assert row is not None and kv.grow(row, num_pages * kv.num_groups)
    return row


def test_a_table_has_room_for_every_group() -> None:
    with pytest.raises(ValueError, match="can't be divided among 2"):
        ReqToTokenPool(3, 5, 2)


def test_each_group_has_a_table() -> None:
    kv = manager()
    row = started(kv, 3)
    whole, windowed = kv.rows.snapshot([row])
    assert whole.tolist() == [[1, 3, 5]] and windowed.tolist() == [[2, 4, 6]]
    assert whole.flags.c_contiguous and windowed.flags.c_contiguous


def cached(kv: KVManager, num_pages: int, num_left: int = 0) -> int:
    """A row whose pages are cached; it has left behind what token `num_left` does not read."""
    row = started(kv, num_pages)
    kv.insert_prefix(row, KEYS, num_pages * PAGE)
    kv.leave_behind(row, num_left)
    return row


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


def test_news_are_of_any_group() -> None:
    kv = manager()
    found = kv.cache.find(KEYS, 23)
    assert not kv.cache.has_news(found)
    kv.release(cached(kv, 2))
    assert kv.cache.has_news(found)
