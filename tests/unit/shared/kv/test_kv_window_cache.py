"""WindowCache: what the window still reads is matched and pinned, page by page; what it has left is anybody's."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shared.core.errors import IntegrityError
from shared.kv.group_cache import by_group
from shared.kv.manager import KVManager
from shared.kv.pages import PageAllocator
from shared.kv.rows import ReqToTokenPool
from shared.kv.window_cache import WindowCache
from tests.support.cores.books import check_books

KEYS = np.arange(40, dtype=np.int64)


def cache_of(pages: list[int], window: int = 9) -> WindowCache:
    """Of the prompt KEYS in pages of 4; a page 0 has left."""
    cache = WindowCache(4, window)
    lock = cache.match(KEYS, 0).lock
    cache.insert(KEYS, np.array(pages, np.int32), lock)
    cache.unlock(lock)
    check_books(cache, True)
    return cache


def test_a_window_of_nine_needs_two_pages_of_four() -> None:
    cache = cache_of([11, 12, 13, 14])
    match = cache.match(KEYS, 16)
    assert match.pages.tolist() == [0, 0, 13, 14] and match.num_tokens == 16
    assert [page for page in range(20) if cache.is_locked(page)] == [13, 14] and cache.num_evictable == 2
    cache.unlock(match.lock)
    assert cache.num_evictable == 4


def test_what_a_window_has_left_behind_is_no_gap() -> None:
    assert cache_of([0, 12, 13, 14]).match(KEYS, 16).num_tokens == 16
    assert cache_of([0, 0, 13, 14]).match(KEYS, 16).num_tokens == 16
    assert cache_of([11, 12, 0, 14]).match(KEYS, 16).num_tokens == 8, "page 3 alone is too little"
    assert cache_of([0, 12, 13]).match(KEYS, 16).num_tokens == 12
    assert cache_of([0, 12]).match(KEYS, 16).num_tokens == 0
    assert cache_of([11]).match(KEYS, 16).num_tokens == 4, "nothing lies before the beginning"


def test_absent_pages_that_will_not_be_read_still_match() -> None:
    """As for a grant: the KV of 16 tokens comes from elsewhere, and position 16 reads from position 8 on."""
    cache = cache_of([11, 12, 13])
    assert [cache.first_needed(num) for num in (16, 8, 17)] == [(2,), (0,), (2,)]
    match = cache.match(KEYS, 15, firsts=(2,))
    assert match.pages.tolist() == [0, 0, 13]
    other = cache.match(KEYS, 15, firsts=(3,))
    assert other.pages.tolist() == [0, 0, 0] and not other.lock.pages


def test_pages_leave_one_by_one_as_the_window_moves_on() -> None:
    cache = cache_of([11, 12, 13, 14])
    match = cache.match(KEYS, 16)
    cache.trim(match.lock, (3,))
    assert not cache.is_locked(13) and cache.is_locked(14)
    assert cache.evict(9).tolist() == [11, 12, 13], "least recently used first"
    check_books(cache)
    cache.unlock(match.lock)
    with pytest.raises(IntegrityError, match="not held"):
        cache.unlock(match.lock)


def test_the_same_page_of_two_owners() -> None:
    cache = cache_of([11, 12])
    lock = cache.match(KEYS, 0).lock
    _, taken = cache.insert(KEYS, np.array([21, 12, 23], np.int32), lock)
    assert taken.tolist() == [False, True, True], "21 stays its owner's"
    _, taken = cache.insert(KEYS, np.array([21, 12, 23], np.int32), lock)
    assert not taken.any(), "they were offered before"
    other = cache.match(KEYS, 0).lock
    with pytest.raises(IntegrityError, match="another key"):
        cache.insert(KEYS[::-1], np.array([11], np.int32), other)
    cache.unlock(lock)
    cache.unlock(other)
    check_books(cache, True)


def cold_pages(cache: WindowCache, most: int = 9) -> list[int]:
    return [node.page for node in cache.take_cold(most)]


def test_pages_that_a_request_held_to_its_end_are_cold_once() -> None:
    cache = cache_of([11, 12, 13, 14])
    assert cold_pages(cache, 3) == [11, 12, 13] and cold_pages(cache) == [14] and cold_pages(cache) == []
    cache.unlock(cache.match(KEYS, 16).lock)
    assert cold_pages(cache) == [13, 14], "the last window"
    moving = cache.match(KEYS, 16).lock
    cache.trim(moving, (3,))
    cache.unlock(moving)
    assert cold_pages(cache) == [14], "13 was left behind"
    check_books(cache, True)


def test_a_copy_pins_pages_and_is_no_use() -> None:
    cache = cache_of([11, 12, 13, 14])
    nodes = cache.take_cold(2)
    assert [cache.identity_of(node) for node in nodes] == cache.cached_names()[:2]
    copy = cache.pin(nodes, "the tier")
    assert cache.num_evictable == 2 and cache.is_locked(11) and not cache.is_locked(13)
    assert cache.find(KEYS, 12).num_evictable == 1, "13; the copy has 12"
    assert cache.evict(1).tolist() == [13]
    with pytest.raises(IntegrityError, match="still held"):
        check_books(cache, True)
    cache.unlock(copy)
    assert cache.num_evictable == 3 and cold_pages(cache) == [14]
    assert cache.evict(9).tolist() == [11, 12, 14], "the order did not change"
    check_books(cache, True)


def test_a_use_while_pages_are_copied_makes_them_cold_again() -> None:
    cache = cache_of([11, 12, 13, 14])
    copy = cache.pin(cache.take_cold(9), "the tier")
    use = cache.match(KEYS, 12).lock
    assert cache.num_freed_by(use) == 0, "the copy keeps them"
    cache.unlock(use)
    assert cold_pages(cache) == [], "not before the copy has ended"
    cache.unlock(copy)
    assert cold_pages(cache) == [12, 13] and cache.evict(2).tolist() == [11, 14]
    check_books(cache, True)


def manager(num_pages: int = 12, window: int = 9) -> KVManager:
    return KVManager(ReqToTokenPool(4, 12), PageAllocator(num_pages), WindowCache(4, window))


def test_a_row_goes_on_without_the_pages_behind_its_window() -> None:
    kv = manager()
    row = kv.alloc_row("one")
    assert row is not None and kv.grow(row, 6)
    kv.insert_prefix(row, KEYS, 12)
    kv.leave_behind(row, 20)
    assert kv.cache.first_needed(20) == (3,) and kv.rows.table[row, :6].tolist() == [0, 0, 0, 4, 5, 6]
    assert kv.cache.num_evictable == 3 and kv.num_available == 8
    kv.leave_behind(row, 24)
    assert kv.allocator.num_free == 6, "a private one is free at once"
    kv.leave_behind(row, 20)
    kv.check_integrity()
    kv.release(row)
    kv.check_integrity(idle=True)
    kv.flush_cache()
    assert kv.allocator.num_free == kv.allocator.num_total


def test_a_row_begins_behind_what_its_window_does_not_reach() -> None:
    kv = manager()
    first, second = kv.alloc_row("one"), kv.alloc_row("two")
    assert first is not None and second is not None and kv.grow(first, 4)
    kv.insert_prefix(first, KEYS, 16)
    kv.take_cached(second, kv.cache.match(KEYS, 16))
    assert kv.rows.table[second, :4].tolist() == [0, 0, 3, 4] and kv.rows.first_page[second].tolist() == [2]
    assert kv.grow(second, 2)
    kv.check_integrity()
    kv.release(first)
    assert kv.cache.num_evictable == 2
    kv.release(second)
    kv.check_integrity(idle=True)


def test_random_lives_add_up() -> None:
    rng, kv = random.Random(5), manager(num_pages=30)
    prompts = [np.asarray([rng.randrange(3) for _ in range(40)], np.int64) for _ in range(4)]
    rows: dict[int, tuple[np.ndarray, int]] = {}
    copies = []
    for _ in range(800):
        if rng.random() < 0.1 and (nodes := by_group(kv.cache)[0].take_cold(3)):
            copies.append(by_group(kv.cache)[0].pin(nodes, "the tier"))
        if copies and rng.random() < 0.1:
            kv.cache.unlock(copies.pop(rng.randrange(len(copies))))
        if rng.random() < 0.3 and kv.rows.num_free:
            keys = rng.choice(prompts)
            row = kv.alloc_row("r")
            assert row is not None
            match = kv.cache.match(keys, rng.randrange(40))
            kv.take_cached(row, match)
            rows[row] = (keys, match.num_tokens)
        elif rows:
            row = rng.choice(list(rows))
            keys, length = rows[row]
            if rng.random() < 0.25 or length >= 40:
                kv.insert_prefix(row, keys, length)
                kv.release(row)
                del rows[row]
            elif kv.rows.num_pages[row] * 4 > length or kv.grow(row, 1):
                rows[row] = (keys, length + 1)
                kv.leave_behind(row, length + 1)
                if rng.random() < 0.2:
                    kv.insert_prefix(row, keys, length + 1)
        kv.check_integrity()
    for row in rows:
        kv.release(row)
    for copy in copies:
        kv.cache.unlock(copy)
    kv.check_integrity(idle=True)
