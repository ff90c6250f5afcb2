"""Cache prefixes for a pool with page groups: each group's pages are in a cache of their own, by its window.

    group 0, all tokens:       | 7 | 3 | 12 | 9 |         a match of n pages needs all n of group 0,
    group 1, a window:         | . | . | 4  | 2 |         and of each windowed group only the last few

Pages are listed as in a row: entry i * G + g is group g's page i. Only one group's names are told to the router.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.core.page_identity import ROOT, identities
from shared.kv.pages import PageIds
from shared.kv.prefix_cache import Firsts, Found, Keys, Listener, Lock, Match, PrefixCache
from shared.kv.window_cache import WindowCache

# Of the evictable pages, each windowed group keeps this share of what a whole group keeps. Most of its pages were left
# behind by a row that went on, and are needed only where another prompt leaves that row's prompt.
WINDOW_SHARE = 1 / 4
LEAST_PART = 16  # eviction takes at most this part of a group's pages before it compares the groups again


class GroupCache:
    """Scheduler thread only. The first group's cache decides which names are cached."""

    def __init__(self, page_size: int, windows: Sequence[int], enabled: bool = True) -> None:
        self.page_size = page_size
        self.enabled = enabled
        self.windows = tuple(windows)
        self.by_group = tuple(
            WindowCache(page_size, window, enabled) if window else PrefixCache(page_size, enabled) for window in windows
        )
        self._shares = [WINDOW_SHARE if window else 1.0 for window in windows]

    @property
    def num_cached(self) -> int:
        return sum(cache.num_cached for cache in self.by_group)

    @property
    def num_evictable(self) -> int:
        return sum(cache.num_evictable for cache in self.by_group)

    @property
    def num_pins(self) -> int:
        return sum(cache.num_pins for cache in self.by_group)

    @property
    def listener(self) -> Listener | None:
        return self.by_group[0].listener

    @listener.setter
    def listener(self, listener: Listener | None) -> None:
        self.by_group[0].listener = listener

    def cached_names(self) -> list[bytes]:
        return self.by_group[0].cached_names()

    def cached_pages(self) -> PageIds:
        return np.concatenate([cache.cached_pages() for cache in self.by_group])

    def is_locked(self, page: int) -> bool:
        return any(cache.is_locked(page) for cache in self.by_group)

    def first_needed(self, num_tokens: int) -> Firsts:
        return tuple(first for cache in self.by_group for first in cache.first_needed(num_tokens))

    def match(self, keys: Keys, max_tokens: int, owner: str = "unnamed", firsts: Firsts = ()) -> Match:
        return self.lock(self.find(keys, max_tokens, firsts), owner)

    def find(self, keys: Keys, max_tokens: int, firsts: Firsts = ()) -> Found:
        """Return the longest match that has every group's needed pages. Pages before `firsts` are never read."""
        firsts = firsts or (0,) * len(self.by_group)
        most = max(0, min(len(keys), max_tokens)) // self.page_size
        for cache in self.by_group:
            if isinstance(cache, PrefixCache):
                most = min(most, cache.find(keys, most * self.page_size).num_pages)
        names = list(identities(keys[: most * self.page_size].tobytes(), self.page_size))
        may_end = np.ones(most + 1, np.bool_)
        for cache, first in zip(self.by_group, firsts, strict=True):
            if isinstance(cache, WindowCache):
                may_end &= cache.matches(names, first)
        length = int(np.flatnonzero(may_end)[-1])
        parts = [
            cache.found(names, length, min(first, length))
            if isinstance(cache, WindowCache)
            else cache.find(keys, length * self.page_size)
            for cache, first in zip(self.by_group, firsts, strict=True)
        ]
        pages = np.zeros((length, len(parts)), np.int32)
        for group, part in enumerate(parts):
            pages[:, group] = part.pages
        identity = names[length - 1] if length else ROOT
        num_evictable = sum(part.num_evictable for part in parts)
        return Found(pages.ravel(), num_evictable, length, identity=identity, parts=tuple(parts))

    def has_news(self, found: Found) -> bool:
        return any(cache.has_news(part) for cache, part in zip(self.by_group, found.parts, strict=True))

    def lock(self, found: Found, owner: str) -> Match:
        matches = [cache.lock(part, owner) for cache, part in zip(self.by_group, found.parts, strict=True)]
        lock = Lock(None, found.num_pages, owner, parts=tuple(match.lock for match in matches))
        return Match(found.pages, found.num_pages * self.page_size, lock)

    def insert(self, keys: Keys, pages: PageIds, lock: Lock) -> tuple[Lock, npt.NDArray[np.bool_]]:
        """Offer full pages, as in PrefixCache and WindowCache."""
        num_groups = len(self.by_group)
        taken = np.zeros(len(pages), np.bool_)
        locks = []
        for group, (cache, part) in enumerate(zip(self.by_group, lock.parts, strict=True)):
            own, taken[group::num_groups] = cache.insert(keys, pages[group::num_groups], part)
            locks.append(own)
        lock.parts, lock.num_pages = tuple(locks), max(lock.num_pages, len(pages) // num_groups)
        return lock, taken

    def trim(self, lock: Lock, firsts: Firsts) -> None:
        for cache, part, first in zip(self.by_group, lock.parts, firsts, strict=True):
            cache.trim(part, (first,))

    def unlock(self, lock: Lock) -> None:
        for cache, part in zip(self.by_group, lock.parts, strict=True):
            cache.unlock(part)
        lock.held = False

    def num_freed_by(self, lock: Lock) -> int:
        return sum(cache.num_freed_by(part) for cache, part in zip(self.by_group, lock.parts, strict=True))

    def evict(self, n: int) -> PageIds:
        """Return at most n pages for the caller to free. The groups keep pages in the ratio of their shares."""
        left = [cache.num_evictable for cache in self.by_group]
        before = list(left)
        n = min(n, sum(left))
        while n > 0:
            most = max(range(len(left)), key=lambda group: left[group] / self._shares[group])
            num = min(n, max(1, left[most] // LEAST_PART))
            left[most], n = left[most] - num, n - num
        return np.concatenate(
            [cache.evict(old - new) for cache, old, new in zip(self.by_group, before, left, strict=True)]
        )

    def flush(self) -> PageIds:
        return self.evict(self.num_evictable)

    def problems(self, expect_idle: bool = False) -> list[str]:
        return [problem for cache in self.by_group for problem in cache.problems(expect_idle)]


Cache = PrefixCache | WindowCache | GroupCache


def by_group(cache: Cache) -> tuple[PrefixCache | WindowCache, ...]:
    """Return the cache of each page group."""
    return cache.by_group if isinstance(cache, GroupCache) else (cache,)


def make_cache(windows: Sequence[int], page_size: int, enabled: bool) -> Cache:
    """`windows`: of each page group, in tokens; 0: its layers read all tokens."""
    if len(windows) > 1:
        return GroupCache(page_size, windows, enabled)
    (window,) = windows
    return WindowCache(page_size, window, enabled) if window else PrefixCache(page_size, enabled)
