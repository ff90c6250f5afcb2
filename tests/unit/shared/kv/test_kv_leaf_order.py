"""LeafOrder: conversations that are expected back are evicted last, up to their tenant's share."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shared.kv.leaf_order import HEAP_SLACK, KEPT_SHARE
from shared.kv.pages import PageIds
from shared.kv.prefix_cache import Keys, Lock, PrefixCache
from tests.support.cores.books import check_books

PAGE = 4
ANNA, BERT = 1, 2


def keys_of(*names: int) -> Keys:
    return np.repeat(np.array(names, dtype=np.int64), PAGE) * 1000 + np.tile(np.arange(PAGE), len(names))


def ids(*pages: int) -> PageIds:
    return np.array(pages, dtype=np.int32)


def cache_of(num_total: int = 100) -> PrefixCache:
    cache = PrefixCache(PAGE)
    cache.leaves.num_total = num_total
    return cache


def put(cache: PrefixCache, *names: int) -> Lock:
    """Cache a path, each page under its name, and return its ended lock."""
    lock, _ = cache.insert(keys_of(*names), ids(*names), cache.match(keys_of(), 0).lock)
    cache.unlock(lock)
    return lock


def keep(cache: PrefixCache, end: Lock, until: float, tenant: int, num_prompt: int = 99) -> None:
    cache.keep(end, until, tenant, num_prompt)


def use(cache: PrefixCache, *names: int) -> None:
    cache.unlock(cache.match(keys_of(*names), 99).lock)


def evicted(cache: PrefixCache, n: int = 99) -> list[int]:
    check_books(cache)
    pages: list[int] = cache.evict(n).tolist()
    check_books(cache)
    return pages


def test_when_its_time_is_over_it_is_evicted_by_its_age() -> None:
    cache = cache_of()
    keep(cache, put(cache, 11, 12), 30.0, ANNA)
    put(cache, 21, 22)
    cache.leaves.now = 29.0
    assert evicted(cache, 1) == [22]
    cache.leaves.now = 30.0
    assert evicted(cache) == [12, 11, 21]


def test_who_comes_back_is_not_kept_any_longer() -> None:
    cache = cache_of()
    keep(cache, put(cache, 11, 12), 30.0, ANNA)
    put(cache, 21)
    use(cache, 11, 12)
    put(cache, 31)
    assert cache.leaves.num_kept == 0
    assert evicted(cache) == [21, 12, 11, 31]


def test_who_comes_back_with_another_spelling_is_back() -> None:
    cache = cache_of()
    keep(cache, put(cache, 11, 12, 13), 30.0, ANNA, num_prompt=2)
    put(cache, 21)
    assert evicted(cache, 1) == [21]
    put(cache, 11)
    assert cache.leaves.num_kept == 3, "another one that begins alike"
    put(cache, 11, 12, 33)
    assert cache.leaves.num_kept == 0 and cache.leaves.num_saved == 2
    assert evicted(cache) == [13, 33, 12, 11]


def test_a_copy_is_no_return() -> None:
    cache = cache_of()
    keep(cache, put(cache, 11, 12), 30.0, ANNA)
    put(cache, 21)
    cache.unlock(cache.pin(cache.take_cold(9), "copy"))
    assert evicted(cache) == [21, 12, 11]


def test_who_comes_back_during_a_copy_is_back() -> None:
    cache = cache_of()
    keep(cache, put(cache, 11, 12, 13), 30.0, ANNA, num_prompt=1)
    copy = cache.pin(cache.take_cold(9), "copy")
    use(cache, 11, 12, 13)
    cache.unlock(copy)
    assert cache.leaves.num_kept == 0


def test_of_kept_ones_the_oldest_is_evicted_first() -> None:
    cache = cache_of()
    for name, until in ((11, 20.0), (21, 40.0), (31, 30.0)):
        keep(cache, put(cache, name), until, ANNA)
    assert evicted(cache) == [11, 21, 31]


def test_a_tenant_keeps_no_more_than_its_share() -> None:
    cache = cache_of(num_total=12)
    share = KEPT_SHARE * 12
    for name in range(11, 19):
        keep(cache, put(cache, name), 50.0, ANNA)
    assert cache.leaves.num_kept == share == 6
    put(cache, 21)
    assert evicted(cache) == [11, 12, 21, 13, 14, 15, 16, 17, 18], "the oldest two lost their place"


def test_tenants_keep_equal_parts() -> None:
    cache = cache_of(num_total=12)
    for name in range(11, 17):
        keep(cache, put(cache, name), 50.0, ANNA)
    for name in range(21, 27):
        keep(cache, put(cache, name), 90.0, BERT)
    assert cache.leaves.num_kept == 6
    assert evicted(cache) == [11, 12, 13, 21, 22, 23, 14, 24, 15, 25, 16, 26]


def test_many_tenants_keep_no_more_than_the_share() -> None:
    cache = cache_of(num_total=24)
    for tenant in range(12):
        for name in range(100 * tenant + 1, 100 * tenant + 1 + 12 // (tenant + 1)):
            keep(cache, put(cache, name), 50.0, tenant)
            assert cache.leaves.num_kept <= KEPT_SHARE * 24


def test_pages_of_two_kept_conversations_count_once() -> None:
    cache = cache_of(num_total=20)
    ends = [put(cache, *range(11, 19), end) for end in (21, 22)]
    for tenant, end in zip((ANNA, BERT), ends, strict=True):
        keep(cache, end, 50.0, tenant)
    assert cache.leaves.num_kept == 8 + 2
    use(cache, *range(11, 19), 21)
    assert cache.leaves.num_kept == 8 + 1
    use(cache, *range(11, 19), 22)
    assert cache.leaves.num_kept == 0


def test_nobody_keeps_a_long_prompt_by_asking_twice() -> None:
    cache = cache_of(num_total=20)
    ends = [put(cache, *range(11, 31), end) for end in (41, 42)]
    for end in ends:
        keep(cache, end, 50.0, ANNA)
    assert cache.leaves.num_kept == 0, "which is longer than the share"


def test_a_spent_branch_goes_first_and_its_trunk_stays() -> None:
    cache = cache_of()
    put(cache, 31)
    end = put(cache, 11, 12, 13)
    put(cache, 11, 22)
    put(cache, 41)
    use(cache, 11)
    cache.spend(end)
    assert evicted(cache) == [13, 12, 31, 22, 41, 11]


def test_a_branch_that_goes_on_is_not_spent() -> None:
    cache = cache_of()
    put(cache, 31)
    end = put(cache, 11, 12)
    put(cache, 11, 12, 13)
    cache.spend(end)
    running = cache.match(keys_of(11, 12, 13), 99).lock
    cache.spend(running)
    cache.unlock(running)
    assert evicted(cache) == [31, 13, 12, 11]


def test_what_another_request_has_used_since_is_not_spent() -> None:
    cache = cache_of()
    end = put(cache, 11, 12, 13)
    put(cache, 21)
    use(cache, 11)
    cache.spend(end)
    assert evicted(cache) == [13, 12, 21, 11]


def test_an_ended_lock_holds_no_evicted_path() -> None:
    cache = cache_of()
    end = put(cache, 11, 12)
    assert evicted(cache) == [12, 11]
    assert end.node is not None and end.node.parent is None


def test_what_is_gone_is_neither_kept_nor_spent() -> None:
    cache = cache_of()
    end = put(cache, 11)
    assert evicted(cache) == [11]
    keep(cache, end, 30.0, ANNA)
    cache.spend(end)
    assert cache.leaves.num_kept == 0 and evicted(cache) == []


def test_only_pages_that_would_have_been_evicted_count_as_saved() -> None:
    cache = cache_of()
    keep(cache, put(cache, 11, 12), 30.0, ANNA)
    use(cache, 11, 12)
    assert cache.leaves.num_saved == 0, "nothing was evicted"
    keep(cache, put(cache, 11, 12), 30.0, ANNA)
    put(cache, 21)
    assert evicted(cache, 1) == [21]
    use(cache, 11, 12)
    assert cache.leaves.num_saved == 2
    use(cache, 11, 12)
    assert cache.leaves.num_saved == 2


def test_the_order_stays_small() -> None:
    cache = cache_of()
    end = put(cache, 11)
    for until in range(10 * HEAP_SLACK):
        keep(cache, end, float(until), ANNA)
        cache.spend(end)
        keep(cache, end, float(until), ANNA)
    leaves = cache.leaves
    assert max(len(leaves._plain), len(leaves._soonest_first)) <= 2 + HEAP_SLACK + 1
    assert evicted(cache) == [11]


@pytest.mark.parametrize("seed", range(8))
def test_whatever_is_kept_or_spent_every_page_can_be_evicted(seed: int) -> None:
    rng, cache = random.Random(seed), cache_of(num_total=40)
    free, ends, locks = list(range(1, 41)), list[Lock](), list[Lock]()
    for _ in range(600):
        cache.leaves.now += rng.random()
        what = rng.randrange(5)
        if what == 0:
            names = [rng.randrange(1, 6) for _ in range(rng.randrange(1, 6))]
            match = cache.match(keys_of(*names), 99)
            num_new = len(names) - len(match.pages)
            if num_new > len(free):
                free += cache.evict(num_new - len(free)).tolist()
            if num_new > len(free):
                cache.unlock(match.lock)
                continue
            fresh = [free.pop() for _ in range(num_new)]
            lock, _ = cache.insert(keys_of(*names), ids(*match.pages.tolist(), *fresh), match.lock)
            locks.append(lock)
        elif what == 1 and locks:
            ends.append(locks.pop(rng.randrange(len(locks))))
            cache.unlock(ends[-1])
        elif what == 2 and ends:
            keep(cache, rng.choice(ends), cache.leaves.now + rng.random() * 20, rng.randrange(3))
        elif what == 3 and ends:
            cache.spend(rng.choice(ends))
        elif what == 4:
            free += cache.evict(rng.randrange(4)).tolist()
        check_books(cache)
        kept = {page for leaf in cache.leaves._kept for page in (leaf, *cache._above(leaf))}
        assert cache.leaves.num_kept == len(kept) <= KEPT_SHARE * 40
    for lock in locks:
        cache.unlock(lock)
    free += cache.flush().tolist()
    assert sorted(free) == list(range(1, 41)) and cache.leaves.num_kept == 0
