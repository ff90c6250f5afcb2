"""A lender hashes of a Pull's pages only those that it does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from prefill_node import loans
from shared.core.page_identity import KEY_BYTES, ROOT, identities
from shared.kv.group_cache import Cache, GroupCache
from shared.kv.prefix_cache import PrefixCache
from shared.kv.window_cache import WindowCache

PAGE, NUM_PAGES = 4, 6
KEYS = np.arange(PAGE * NUM_PAGES, dtype=np.int64)


def filled(cache: Cache, num_pages: int) -> Cache:
    """The cache with the first pages of KEYS."""
    lock = cache.match(KEYS, 0).lock
    pages = np.arange(1, 1 + num_pages * len(cache.windows), dtype=np.int32)
    lock, _ = cache.insert(KEYS, pages, lock)
    cache.unlock(lock)
    return cache


@pytest.mark.parametrize("num_cached", [0, 2, NUM_PAGES])
@pytest.mark.parametrize(
    "cache", [lambda: PrefixCache(PAGE), lambda: WindowCache(PAGE, 6), lambda: GroupCache(PAGE, (0, 6))]
)
def test_only_what_is_not_cached_is_hashed(
    cache: Callable[[], Cache], num_cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = []

    def counted(keys: bytes, page_size: int, parent: bytes = ROOT) -> Iterator[bytes]:
        hashed.append(len(keys) // (page_size * KEY_BYTES))
        return identities(keys, page_size, parent)

    lender = filled(cache(), num_cached)
    found = lender.find(KEYS, len(KEYS))
    monkeypatch.setattr(loans, "identities", counted)
    *_, last = identities(KEYS.tobytes(), PAGE)
    assert loans.last_name(lender, found, KEYS) == last
    assert hashed == [NUM_PAGES - num_cached]
