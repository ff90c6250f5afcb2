"""PrefixCache: the longest prefix in whole pages, pinned while locked, evicted oldest leaf first."""

from __future__ import annotations

import numpy as np
import pytest

from shared.core.errors import IntegrityError
from shared.kv.leaf_order import HEAP_SLACK
from shared.kv.pages import PageIds
from shared.kv.prefix_cache import Keys, Lock, PrefixCache
from tests.support.cores.books import check_books

PAGE = 4


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


def keys_of(*page_names: int) -> Keys:
    """One page of keys per name; equal names are equal pages."""
    return np.repeat(np.array(page_names, dtype=np.int64), PAGE) * 1000 + np.tile(np.arange(PAGE), len(page_names))


def put(cache: PrefixCache, names: tuple[int, ...], pages: PageIds, owner: str = "setup") -> Lock:
    """Insert as a request without a match would; the lock is the caller's."""
    lock, _ = cache.insert(keys_of(*names), pages, cache.match(keys_of(), 0, owner).lock)
    check_books(cache)
    return lock


def put_unlocked(cache: PrefixCache, names: tuple[int, ...], pages: PageIds) -> None:
    cache.unlock(put(cache, names, pages))


def test_matches_whole_pages_up_to_the_limit() -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 2, 3), ids(11, 12, 13))
    for names, num_keys, max_tokens, expected in [
        ((1, 2, 3), 12, 12, [11, 12, 13]),
        ((1, 2, 3), 12, 11, [11, 12]),
        ((1, 2, 3), 11, 99, [11, 12]),
        ((1, 2, 9), 12, 12, [11, 12]),
        ((9, 2, 3), 12, 12, []),
        ((1, 2, 3, 4), 16, 16, [11, 12, 13]),
        ((1, 2, 3), 12, 0, []),
        ((1, 2, 3), 12, -5, []),
        ((), 0, 8, []),
    ]:
        match = cache.match(keys_of(*names)[:num_keys], max_tokens)
        assert match.pages.tolist() == expected
        assert match.pages.dtype == np.int32
        assert match.num_tokens == len(expected) * PAGE
        check_books(cache)
        cache.unlock(match.lock)
    check_books(cache, True)


def test_a_page_matches_only_below_its_own_prefix() -> None:
    """KV depends on everything before it, so equal keys under another parent are another page."""
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 5), ids(11, 12))
    put_unlocked(cache, (2, 5), ids(21, 22))
    assert cache.match(keys_of(2, 5), 8).pages.tolist() == [21, 22]
    assert cache.num_cached == 4


def test_insert_takes_new_pages_and_leaves_the_caller_duplicates() -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 2), ids(11, 12))
    match = cache.match(keys_of(1), PAGE, "r2")
    lock, taken = cache.insert(keys_of(1, 2, 3), ids(11, 22, 23), match.lock)
    assert taken.tolist() == [False, False, True], "11 was taken before"
    assert not match.lock.held and lock.held and lock.num_pages == 3 and lock.owner == "r2"
    assert cache.num_cached == 3 and cache.num_evictable == 0
    check_books(cache)
    cache.unlock(lock)
    assert cache.match(keys_of(1, 2, 3), 99).pages.tolist() == [11, 12, 23]


def test_inserting_chunk_by_chunk_is_inserting_at_once() -> None:
    cache = PrefixCache(PAGE)
    lock = put(cache, (1,), ids(11))
    for n, new in ((2, [False, True]), (2, [False, False]), (4, [False, False, True, True])):
        lock, taken = cache.insert(keys_of(1, 2, 3, 4), ids(11, 12, 13, 14)[:n], lock)
        assert taken.tolist() == new
        check_books(cache)
    cache.unlock(lock)
    assert cache.num_cached == cache.num_evictable == 4


def test_a_shorter_insert_keeps_the_deeper_lock() -> None:
    cache = PrefixCache(PAGE)
    lock = put(cache, (1, 2, 3), ids(11, 12, 13))
    same, taken = cache.insert(keys_of(1), ids(11), lock)
    assert same is lock and taken.tolist() == [False]
    assert cache.evict(3).tolist() == []
    cache.unlock(lock)
    check_books(cache, True)


def test_a_locked_path_survives_eviction_and_the_rest_goes() -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 2, 3), ids(11, 12, 13))
    match = cache.match(keys_of(1, 2), 2 * PAGE)
    assert cache.num_evictable == 1
    assert cache.is_locked(12) and not cache.is_locked(13) and not cache.is_locked(99)
    assert cache.evict(99).tolist() == [13]
    check_books(cache)
    cache.unlock(match.lock)
    assert cache.num_evictable == 2
    assert cache.evict(99).tolist() == [12, 11]
    check_books(cache, True)


def test_two_locks_pin_until_both_are_gone() -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 2), ids(11, 12))
    first, second = (cache.match(keys_of(1, 2), 99).lock for _ in range(2))
    cache.unlock(first)
    assert cache.num_evictable == 0 and cache.evict(9).tolist() == []
    cache.unlock(second)
    assert cache.num_evictable == 2


def test_pages_used_since_are_cold_again_and_copied_ones_are_not() -> None:
    """A tier smaller than the cache would never come to rest if its own copying counted as use."""
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 2, 3), ids(11, 12, 13))
    cold = cache.take_cold(9)
    assert [node.page for node in cold] == [13, 12, 11]
    cache.unlock(cache.pin(cold, "the tier"))
    assert cache.take_cold(9) == []
    cache.unlock(cache.match(keys_of(1, 2, 3), 99).lock)
    cache.unlock(cache.pin(cold, "the tier"))
    assert [node.page for node in cache.take_cold(9)] == [13, 12, 11]
    check_books(cache, True)


def test_a_copy_does_not_change_the_order_of_eviction() -> None:
    """Otherwise the pages that are evicted next are those that no copy has reached yet."""
    cache = PrefixCache(PAGE)
    for name in range(1, 7):
        put_unlocked(cache, (name,), ids(10 + name))
    for node in cache.take_cold(1) + cache.take_cold(1):
        cache.unlock(cache.pin([node], "the tier"))
    assert cache.evict(3).tolist() == [11, 12, 13]
    check_books(cache, True)


def test_a_use_during_a_copy_makes_a_page_young() -> None:
    cache = PrefixCache(PAGE)
    for name in (1, 2):
        put_unlocked(cache, (name,), ids(10 + name))
    copy = cache.pin(cache.take_cold(1), "the tier")
    cache.unlock(cache.match(keys_of(1), 99).lock)
    cache.unlock(copy)
    assert cache.evict(1).tolist() == [12]


@pytest.mark.parametrize("copy_ends_first", [False, True])
def test_a_use_during_a_copy_makes_the_whole_path_due(copy_ends_first: bool) -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 2, 3), ids(11, 12, 13))
    put_unlocked(cache, (4,), ids(14))
    copy = cache.pin(cache.take_cold(3), "the tier")
    use = cache.match(keys_of(1, 2, 3), 99).lock
    for lock in (copy, use) if copy_ends_first else (use, copy):
        cache.unlock(lock)
    assert [node.page for node in cache.take_cold(9)] == [14]
    assert [node.page for node in cache.take_cold(9)] == [13, 12, 11]
    assert cache.evict(9).tolist() == [14, 13, 12, 11]
    check_books(cache, True)


def test_a_use_during_a_copy_makes_the_whole_path_young() -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 2), ids(11, 12))
    put_unlocked(cache, (3,), ids(13))
    copy = cache.pin(cache.take_cold(2), "the tier")
    cache.unlock(cache.match(keys_of(1, 2), 99).lock)
    cache.unlock(copy)
    other = cache.pin(cache.take_cold(1), "the tier")
    assert other.node is not None and other.node.page == 13
    assert cache.evict(1).tolist() == [12]
    cache.unlock(other)
    assert cache.evict(1).tolist() == [13]


def test_pages_whose_last_use_ends_during_a_copy_are_cold() -> None:
    cache = PrefixCache(PAGE)
    first, second = put(cache, (1, 2, 3), ids(11, 12, 13)), put(cache, (1, 2, 4), ids(11, 12, 14))
    cache.unlock(first)
    (own,) = cache.take_cold(9)
    copy = cache.pin([own], "the tier")
    cache.unlock(second)
    cache.unlock(copy)
    cold = [cache.take_cold(9), cache.take_cold(9)]
    assert sorted(node.page for nodes in cold for node in nodes) == [11, 12, 14]
    check_books(cache, True)


def test_a_pin_holds_the_whole_path_down_to_its_page() -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 2, 3), ids(11, 12, 13))
    path = cache.take_cold(9)[::-1]
    for depth, node in enumerate(path, start=1):
        lock = cache.pin([node], "the tier")
        assert lock.num_pages == depth and cache.num_evictable == 3 - depth
        assert [page for page in (11, 12, 13) if cache.is_locked(page)] == [11, 12, 13][:depth]
        check_books(cache)
        cache.unlock(lock)
    check_books(cache, True)


def test_the_longest_unlocked_leaf_goes_first_then_its_parents() -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 2), ids(11, 12))
    put_unlocked(cache, (1, 3), ids(11, 13))
    put_unlocked(cache, (4,), ids(14))
    cache.unlock(cache.match(keys_of(1, 2), 99).lock)  # 11 and 12 are the youngest now
    assert cache.evict(1).tolist() == [13]
    assert cache.evict(1).tolist() == [14]
    check_books(cache)
    assert cache.evict(5).tolist() == [12, 11]
    assert cache.num_cached == cache.num_evictable == 0


def test_a_chain_is_evicted_before_a_younger_one_is_touched() -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1, 2, 3), ids(11, 12, 13))
    put_unlocked(cache, (4, 5, 6), ids(14, 15, 16))
    assert cache.evict(4).tolist() == [13, 12, 11, 16]
    check_books(cache)


def test_flush_spares_what_is_locked() -> None:
    cache = PrefixCache(PAGE)
    lock = put(cache, (1,), ids(11))
    put_unlocked(cache, (1, 2), ids(11, 12))
    assert cache.flush().tolist() == [12]
    cache.unlock(lock)
    assert cache.flush().tolist() == [11]
    assert cache.match(keys_of(1), 99).num_tokens == 0


def test_the_eviction_order_stays_small_when_one_prefix_is_hot() -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (1,), ids(11))
    for _ in range(10 * HEAP_SLACK):
        cache.unlock(cache.match(keys_of(1), 99).lock)
    assert len(cache.leaves) <= 2 + HEAP_SLACK
    check_books(cache)


def test_unlocking_twice_names_the_owner() -> None:
    cache = PrefixCache(PAGE)
    for names in ((), (1,)):
        lock = put(cache, names, ids(11)[: len(names)], "r7")
        cache.unlock(lock)
        with pytest.raises(IntegrityError, match="'r7'.*given back already"):
            cache.unlock(lock)
        with pytest.raises(IntegrityError, match="'r7'.*given back already"):
            cache.insert(keys_of(1), ids(11), lock)
    check_books(cache, True)


def test_a_lock_of_another_cache_is_refused() -> None:
    lock = put(PrefixCache(PAGE), (1,), ids(11), "r8")
    with pytest.raises(IntegrityError, match="'r8'.*not one of this cache"):
        PrefixCache(PAGE).unlock(lock)


def test_a_leaked_lock_is_named() -> None:
    cache = PrefixCache(PAGE)
    put(cache, (1, 2), ids(11, 12), "r9")
    check_books(cache)
    with pytest.raises(IntegrityError, match="lock of 'r9' on 2 pages is still held"):
        check_books(cache, True)


@pytest.mark.parametrize(
    ("names", "pages", "error"),
    [
        ((1, 2, 3), ids(11, 12, 50), "page 50 is the sink or cached"),
        ((1, 2, 3), ids(11, 12, 0), "page 0 is the sink"),
        ((1, 2, 3, 4), ids(11, 12, 13, 13), "listed twice"),
        ((1, 9, 3), ids(11, 12, 13), "page 1 are not those of its lock"),
        ((1, 2), ids(11, 12, 13), "8 keys do not cover 3 pages"),
    ],
)
def test_a_bad_insert_is_refused_and_changes_nothing(names: tuple[int, ...], pages: PageIds, error: str) -> None:
    cache = PrefixCache(PAGE)
    put_unlocked(cache, (5,), ids(50))
    lock = put(cache, (1, 2), ids(11, 12), "r1")
    with pytest.raises(IntegrityError, match=f"'r1'.*{error}"):
        cache.insert(keys_of(*names), pages, lock)
    assert cache.num_cached == 3 and lock.held
    check_books(cache)
    cache.unlock(lock)
    check_books(cache, True)


def test_a_disabled_cache_caches_nothing_but_keeps_lock_rules() -> None:
    cache = PrefixCache(PAGE, enabled=False)
    match = cache.match(keys_of(1, 2), 99, "r1")
    lock, taken = cache.insert(keys_of(1, 2), ids(11, 12), match.lock)
    assert match.num_tokens == 0 and not taken.any() and cache.num_cached == 0
    with pytest.raises(IntegrityError, match="'r1'"):
        check_books(cache, True)
    cache.unlock(lock)
    check_books(cache, True)


def test_any_int64_keys_work_and_the_caller_s_array_is_not_kept() -> None:
    cache = PrefixCache(2)
    keys = np.array([-1, 2**62, 3, 4, 5, 6, 7, 8], dtype=np.int64)
    strided = np.stack([keys, keys], axis=1).reshape(-1)[::2]
    lock, _ = cache.insert(strided, ids(1, 2, 3, 4), cache.match(keys, 0).lock)
    cache.unlock(lock)
    strided[0] = 0
    assert cache.match(keys, 99).num_tokens == 8
    assert cache.match(keys.astype(np.int32), 4).num_tokens == 0  # 2**62 is another key in 32 bits


def test_integrity_names_what_was_corrupted() -> None:
    cache = PrefixCache(PAGE)
    lock = put(cache, (1, 2), ids(11, 12), "r1")
    assert lock.node is not None
    lock.node.refs += 1
    with pytest.raises(IntegrityError, match="page 12 has 2 refs, its locks .'r1'. and children give 1"):
        check_books(cache)
    lock.node.refs -= 1
    cache._num_evictable = 5
    with pytest.raises(IntegrityError, match="0 evictable pages, the counter says 5"):
        check_books(cache)
    cache._num_evictable = 0
    lock.node.page = 11
    with pytest.raises(IntegrityError, match="page 11 is cached twice"):
        check_books(cache)
    lock.node.page = 12
    cache.unlock(lock)
    cache.leaves._plain.clear()
    with pytest.raises(IntegrityError, match="page 12 is an unlocked leaf that eviction would never find"):
        check_books(cache)


def test_integrity_sees_a_page_that_was_evicted_under_a_lock() -> None:
    cache = PrefixCache(PAGE)
    lock = put(cache, (1,), ids(11), "r1")
    assert lock.node is not None
    cache._remove(lock.node)
    with pytest.raises(IntegrityError, match="lock of 'r1' pins a page that left the cache"):
        check_books(cache)
