"""KVManager: every page has one owner, nothing moves, and whatever leaks is named with its owner."""

from __future__ import annotations

import numpy as np
import pytest

from shared.core.errors import IntegrityError
from shared.core.states import PageState, Tag
from shared.kv.manager import KVManager, page_count
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


def test_a_request_caches_its_full_pages_and_frees_the_rest() -> None:
    kv = build()
    row = open_row(kv, "r1", tokens(10), 3)
    before = kv.rows.pages_of(row).tolist()
    assert kv.insert_prefix(row, tokens(10), 10) == 2
    assert kv.rows.pages_of(row).tolist() == before, "pages of a row never move"
    assert kv.num_freed_by(row) == 3, "one is private, two would be evictable"
    kv.check_integrity()
    kv.release(row)
    kv.check_integrity(idle=True)
    assert kv.allocator.num_free == 6 and kv.cache.num_cached == 2 and kv.num_available == 8


def test_a_second_request_shares_the_prefix() -> None:
    kv = build()
    first = open_row(kv, "r1", tokens(10), 3)
    kv.insert_prefix(first, tokens(10), 10)
    second = open_row(kv, "r2", tokens(12), 4)
    shared = kv.rows.pages_of(first)[:2].tolist()
    assert kv.rows.pages_of(second)[:2].tolist() == shared
    assert kv.num_freed_by(second) == 2
    kv.release(first)
    kv.check_integrity()
    assert kv.rows.pages_of(second)[:2].tolist() == shared and kv.cache.num_evictable == 0
    kv.release(second)
    kv.check_integrity(idle=True)


def test_pages_another_cached_first_stay_private_and_are_freed() -> None:
    kv = build()
    first, second = (open_row(kv, owner, tokens(8), 2) for owner in ("r1", "r2"))
    assert kv.insert_prefix(first, tokens(8), 8) == 2
    assert kv.insert_prefix(second, tokens(8), 8) == 0
    assert kv.num_freed_by(second) == 2
    kv.check_integrity()
    kv.release(second)
    assert kv.allocator.num_free == 6
    kv.release(first)
    kv.check_integrity(idle=True)


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


def test_without_a_cache_everything_is_private() -> None:
    kv = build(enabled=False)
    row = open_row(kv, "r1", tokens(8), 2)
    assert kv.insert_prefix(row, tokens(8), 8) == 0
    assert kv.num_freed_by(row) == 2
    kv.release(row)
    kv.check_integrity(idle=True)
    assert kv.allocator.num_free == kv.allocator.num_total


def test_a_row_without_a_match_can_still_cache_pages() -> None:
    kv = build()
    row = kv.alloc_row("r1")
    assert row is not None and kv.grow(row, 2)
    assert kv.insert_prefix(row, tokens(8), 7) == 1
    kv.release(row)
    kv.check_integrity(idle=True)


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


def test_what_is_in_use_is_a_leak_only_where_nothing_should_be() -> None:
    kv = build()
    row = kv.alloc_row("alice")
    assert row is not None and kv.grow(row, 1)
    kv.insert_prefix(row, tokens(4), 4)
    assert complaint(kv) == complaint(kv, idle=False) == "" and kv.cache.problems() == []
    assert "row 1 of 'alice' leaked" in complaint(kv, idle=True)
    kv.release(row)
    assert complaint(kv, idle=True) == ""


def complaint(kv: KVManager, **idle: bool) -> str:
    try:
        kv.check_integrity(**idle)
    except IntegrityError as error:
        return error.message
    return ""


def test_no_row_is_left_when_all_are_in_use() -> None:
    kv = build(num_rows=2)
    assert kv.alloc_row("r1") == 1
    assert kv.alloc_row("r2") is None


class TestLeaksAreNamed:
    """One leak of each kind, made on purpose."""

    def test_row(self) -> None:
        kv = build()
        open_row(kv, "alice", tokens(4), 1)
        kv.check_integrity()
        with pytest.raises(IntegrityError, match="row 1 of 'alice' leaked"):
            kv.check_integrity(idle=True)

    def test_row_that_nobody_attached(self) -> None:
        kv = build()
        kv.rows.alloc_row()
        with pytest.raises(IntegrityError, match="row 1 is in use but no record owns it"):
            kv.check_integrity()

    def test_row_freed_behind_our_back(self) -> None:
        kv = build()
        row = open_row(kv, "alice", tokens(4), 1)
        kv.rows.free_row(row)
        with pytest.raises(IntegrityError, match="row 1 of 'alice' was freed"):
            kv.check_integrity()

    def test_lock(self) -> None:
        kv = build()
        row = open_row(kv, "alice", tokens(4), 1)
        kv.insert_prefix(row, tokens(4), 4)
        kv.cache.match(tokens(4), 4, "bob")
        kv.release(row)
        kv.check_integrity()
        with pytest.raises(IntegrityError, match="lock of 'bob' on 1 pages is still held"):
            kv.check_integrity(idle=True)

    def test_lock_that_pins_nothing(self) -> None:
        kv = build()
        kv.cache.match(tokens(4), 4, "bob")
        with pytest.raises(IntegrityError, match="lock of 'bob' on 0 pages"):
            kv.check_integrity(idle=True)

    def test_page(self) -> None:
        kv = build()
        kv.alloc_pages(1, "carol")
        with pytest.raises(IntegrityError, match="page 1 leaked, last owner 'carol'"):
            kv.check_integrity()

    def test_page_lost_from_a_row(self) -> None:
        kv = build()
        row = open_row(kv, "dave", tokens(8), 2)
        kv._private[row, 0] = False
        with pytest.raises(IntegrityError) as caught:
            kv.check_integrity()
        assert "page 1 leaked, last owner 'dave'" in caught.value.message
        assert "row 1 of 'dave' uses pages [1] that it neither owns nor pins" in caught.value.message

    def test_page_owned_twice(self) -> None:
        kv = build()
        first = open_row(kv, "erin", tokens(4), 1)
        second = open_row(kv, "frank", tokens(4), 1)
        kv.rows.table[second, 0] = kv.rows.table[first, 0]
        with pytest.raises(IntegrityError, match="page 1 is owned by row 1 of 'erin' and row 2 of 'frank'"):
            kv.check_integrity()

    def test_page_used_and_free(self) -> None:
        kv = build()
        row = open_row(kv, "grace", tokens(4), 1)
        kv.allocator.free(kv.rows.pages_of(row).copy())
        with pytest.raises(IntegrityError, match="page 1 is owned by row 1 of 'grace' and the free list"):
            kv.check_integrity()

    def test_page_used_but_not_pinned(self) -> None:
        kv = build()
        row = open_row(kv, "heidi", tokens(4), 1)
        kv.insert_prefix(row, tokens(4), 4)
        lock = kv._records[row].lock
        assert lock is not None
        kv.cache.unlock(lock)
        with pytest.raises(IntegrityError, match=r"row 1 of 'heidi' uses pages \[1\] that it neither owns nor pins"):
            kv.check_integrity()

    def test_many_problems_are_counted_and_the_first_ones_named(self) -> None:
        kv = build(num_pages=64)
        kv.alloc_pages(50, "ivan")
        with pytest.raises(IntegrityError, match="page 20 leaked, last owner 'ivan'; and 30 more$"):
            kv.check_integrity()


@pytest.mark.parametrize(("num_tokens", "pages"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_page_count_rounds_up(num_tokens: int, pages: int) -> None:
    assert page_count(num_tokens, PAGE) == pages
