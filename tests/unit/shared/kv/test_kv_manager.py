"""KVManager: every page has one owner, nothing moves, and whatever leaks is named with its owner."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from shared.core.errors import IntegrityError
from shared.core.states import PageState, Tag
from shared.kv.manager import KVManager
from shared.kv.pages import PageAllocator
from shared.kv.prefix_cache import Keys, PrefixCache
from shared.kv.rows import ReqToTokenPool

PAGE = 4


def build(num_pages: int = 9, num_rows: int = 4, max_pages: int = 6, enabled: bool = True) -> KVManager:
    rows = ReqToTokenPool(num_rows, max_pages)
    return KVManager(rows, PageAllocator(num_pages), PrefixCache(PAGE, enabled))


def tokens(n: int, start: int = 0) -> Keys:
    return np.arange(start, start + n, dtype=np.int64)


def open_row(kv: KVManager, owner: str, keys: Keys, num_pages: int, tag: Tag = PageState.ACTIVE) -> int:
    """What admission does: match, row, cached pages, the rest private."""
    match = kv.cache.match(keys, len(keys) - 1, owner)
    row = kv.alloc_row(owner, tag)
    assert row is not None
    kv.take_cached(row, match)
    assert kv.grow(row, num_pages - len(match.pages))
    kv.check_integrity()
    return row


def test_allocation_evicts_no_more_than_needed_and_never_in_vain() -> None:
    kv = build(num_pages=7)
    row = open_row(kv, "r1", tokens(16), 4)
    kv.insert_prefix(row, tokens(16), 16)
    assert kv.alloc_pages(3) is None, "a pinned prefix is not available"
    kv.release(row)
    assert kv.alloc_pages(7) is None
    assert kv.cache.num_cached == 4, "nothing is evicted in vain"
    pages = kv.alloc_pages(3)
    assert pages is not None and kv.cache.num_cached == 3 and kv.num_available == 3
    kv.allocator.free(pages)
    assert kv.flush_cache() == 3
    kv.check_integrity(idle=True)
    assert kv.allocator.num_free == kv.allocator.num_total


def test_grow_is_all_or_nothing() -> None:
    kv = build(num_pages=5)
    row = open_row(kv, "r1", tokens(4), 2)
    assert not kv.grow(row, 3)
    assert kv.rows.num_pages[row] == 2 and kv.allocator.num_free == 2
    with pytest.raises(IntegrityError, match="'r1' has room for 4 more pages, not 5"):
        kv.grow(row, 5)
    kv.check_integrity()


@pytest.mark.rule("H43")
def test_gauges_partition_pages_and_rows() -> None:
    kv = build(num_pages=16, num_rows=6)
    evictable = open_row(kv, "r0", tokens(8, 500), 2)
    kv.insert_prefix(evictable, tokens(8, 500), 8)
    kv.release(evictable)
    held = open_row(kv, "r1", tokens(9), 3, PageState.HELD)
    kv.insert_prefix(held, tokens(9), 9)
    active = open_row(kv, "r2", tokens(9), 4)
    granted = open_row(kv, "r3", tokens(4, 900), 1, PageState.GRANTED)
    # 2 pages are shared by "held" and "active" and count once, for the stronger of the two
    assert kv.gauges() == {"free": 7, "cached": 2, "active": 4, "granted": 1, "held": 1}
    assert kv.row_gauges() == {"free": 2, "active": 1, "granted": 1, "held": 1}
    assert kv.owner(granted) == "r3" and kv.tag(granted) == "granted"
    kv.set_tag(granted, PageState.ACTIVE)
    kv.release(active)
    assert kv.gauges() == {"free": 9, "cached": 2, "active": 1, "granted": 0, "held": 3}
    assert sum(kv.gauges().values()) == kv.allocator.num_total


@pytest.mark.rule("H39")
def test_a_page_on_its_way_to_a_row_is_active() -> None:
    kv = build()
    assert kv.alloc_pages(2, "r1") is not None
    assert kv.gauges()["active"] == 2


def test_an_unknown_tag_is_refused_before_anything_changes() -> None:
    kv = build()
    row = kv.rows.alloc_row()
    assert row is not None
    with pytest.raises(ValueError, match="'busy'"):
        kv.attach(row, "r1", "busy")
    kv.attach(row, "r1")
    with pytest.raises(ValueError, match="'busy'"):
        kv.set_tag(row, "busy")
    with pytest.raises(ValueError, match="'busy'"):
        kv.alloc_row("r2", "busy")
    assert kv.rows.rows_in_use() == [row] and kv.tag(row) == "active"


def test_misuse_of_rows_is_refused() -> None:
    kv = build()
    row = open_row(kv, "r1", tokens(8), 2)
    kv.insert_prefix(row, tokens(8), 8)
    with pytest.raises(IntegrityError, match="row 1 belongs to 'r1' already"):
        kv.attach(row, "r2")
    match = kv.cache.match(tokens(8), 8, "r3")
    with pytest.raises(IntegrityError, match="row 1 of 'r1' is not empty"):
        kv.take_cached(row, match)
    kv.cache.unlock(match.lock)
    fresh = kv.alloc_row("r3")
    assert fresh is not None
    with pytest.raises(IntegrityError, match="'r3': the match's lock was given back"):
        kv.take_cached(fresh, match)
    kv.release(fresh)
    with pytest.raises(IntegrityError, match="row 2 has no owner"):
        kv.release(fresh)
    with pytest.raises(IntegrityError, match="row 2 has no owner"):
        kv.grow(fresh, 1)
    kv.check_integrity()


def use_a_row(kv: KVManager) -> None:
    open_row(kv, "alice", tokens(4), 1)


def free_a_row_behind_its_owner(kv: KVManager) -> None:
    kv.rows.free_row(open_row(kv, "alice", tokens(4), 1))


def forget_a_lock(kv: KVManager) -> None:
    row = open_row(kv, "alice", tokens(4), 1)
    kv.insert_prefix(row, tokens(4), 4)
    kv.cache.match(tokens(4), 4, "bob")
    kv.release(row)


def forget_pages(kv: KVManager) -> None:
    kv.alloc_pages(21, "carol")


def lose_a_page_from_a_row(kv: KVManager) -> None:
    kv._private[open_row(kv, "dave", tokens(8), 2), 0] = False


def list_a_page_twice(kv: KVManager) -> None:
    first, second = (open_row(kv, owner, tokens(4), 1) for owner in ("erin", "frank"))
    kv.rows.table[second, 0] = kv.rows.table[first, 0]


def free_a_page_in_use(kv: KVManager) -> None:
    kv.allocator.free(kv.rows.pages_of(open_row(kv, "grace", tokens(4), 1)).copy())


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (use_a_row, ["row 1 of 'alice' leaked"]),
        (free_a_row_behind_its_owner, ["row 1 of 'alice' was freed"]),
        (forget_a_lock, ["lock of 'bob' on 1 pages is still held"]),
        (forget_pages, ["page 20 leaked, last owner 'carol'", "; and 1 more"]),
        (
            lose_a_page_from_a_row,
            ["page 1 leaked, last owner 'dave'", "row 1 of 'dave' uses pages [1] that it neither owns nor pins"],
        ),
        (list_a_page_twice, ["page 1 is owned by row 1 of 'erin' and row 2 of 'frank'"]),
        (free_a_page_in_use, ["page 1 is owned by row 1 of 'grace' and the free list"]),
    ],
)
def test_each_kind_of_leak_is_named(leak: Callable[[KVManager], None], named: list[str]) -> None:
    kv = build(num_pages=32)
    leak(kv)
    with pytest.raises(IntegrityError) as caught:
        kv.check_integrity(idle=True)
    assert all(text in caught.value.message for text in named), caught.value.message
    if leak in (use_a_row, forget_a_lock):
        kv.check_integrity()  # no leak while somebody may be using it
