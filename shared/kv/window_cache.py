"""Cache prefixes for a pool with a sliding window in every layer. Each page is cached and pinned on its own.

    position p reads [p - window + 1, p]          so after n pages of a prompt only the last few are needed:

    | gone | gone | page 7 | page 3 |  p ...      a match of four pages; gone pages have number 0

An identity covers all earlier pages (`shared.core.page_identity`), so a page can stay cached without them.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.core.errors import IntegrityError
from shared.core.page_identity import ROOT, identities
from shared.kv.cached_page import CachedPage
from shared.kv.pages import PageIds
from shared.kv.prefix_cache import Added, Firsts, Found, Keys, Listener, Lock, Match


class WindowCache:
    """Scheduler thread only."""

    def __init__(self, page_size: int, window: int, enabled: bool = True) -> None:
        self.page_size = page_size
        self.window = window
        self.windows = (window,)
        self.enabled = enabled
        # number of earlier pages that a token at a page's first slot reads
        self._num_needed = -(-(window - 1) // page_size)
        self._page_of: dict[bytes, int] = {}
        self._identity_of: dict[int, bytes] = {}
        self._refs: dict[int, int] = {}  # number of requests' locks of each page that has some
        self._idle: OrderedDict[int, None] = OrderedDict()  # all other pages, least recently unpinned first
        self._copied: set[int] = set()  # pages of either kind that copies pin
        self._cold: dict[int, None] = {}  # of the idle pages those for `take_cold`, in that order
        self._locks: set[Lock] = set()
        self.listener: Listener | None = None
        self.num_pins = 0  # how often a request has locked evictable pages
        self._num_added = 0

    @property
    def num_cached(self) -> int:
        return len(self._identity_of)

    @property
    def num_evictable(self) -> int:
        return len(self._idle) - sum(page in self._idle for page in self._copied)

    def first_needed(self, num_tokens: int) -> Firsts:
        """Return the index of the first page that any token at a position >= num_tokens reads."""
        return (max(0, num_tokens - self.window + 1) // self.page_size,)

    def cached_pages(self) -> PageIds:
        return np.fromiter(self._identity_of, np.int32, len(self._identity_of))

    def cached_names(self) -> list[bytes]:
        return list(self._page_of)

    def is_locked(self, page: int) -> bool:
        return page in self._refs or page in self._copied

    def take_cold(self, most: int) -> list[CachedPage]:
        """Return up to `most` pages that requests held to their ends, the longest unused first, and each once a use.

        Pages that a row left behind are not among them: only a prompt that leaves its prompt there would need them.
        """
        pages = list(itertools.islice((page for page in self._cold if page not in self._copied), most))
        for page in pages:
            del self._cold[page]
        return [CachedPage(b"", page, None, self._identity_of[page]) for page in pages]

    def identity_of(self, node: CachedPage) -> bytes:
        return node.identity

    def pin(self, nodes: Sequence[CachedPage], owner: str) -> Lock:
        """Pin pages from `take_cold` while they are copied. This does not count as a use, as in PrefixCache."""
        lock = Lock(None, 0, owner, pages={node.page: node.page for node in nodes}, is_copy=True)
        self._copied |= lock.pages.keys()
        self._locks.add(lock)
        return lock

    def match(self, keys: Keys, max_tokens: int, owner: str = "unnamed", firsts: Firsts = ()) -> Match:
        """Return and pin the longest match that has every needed page, at most max_tokens tokens long."""
        return self.lock(self.find(keys, max_tokens, firsts), owner)

    def find(self, keys: Keys, max_tokens: int, firsts: Firsts = ()) -> Found:
        """Return what `match` would pin.

        Pages before the one in `firsts` are never read, so they count as matches.
        """
        limit = max(0, min(len(keys), max_tokens)) // self.page_size
        names = list(identities(keys[: limit * self.page_size].tobytes(), self.page_size))
        first = firsts[0] if firsts else 0
        return self.found(names, max(first, int(np.flatnonzero(self.matches(names, first))[-1])), first)

    def matches(self, names: Sequence[bytes], first_needed: int) -> npt.NDArray[np.bool_]:
        """Return for each n, from 0 to all, whether the needed ones of the first n pages are cached."""
        is_there = np.fromiter((name in self._page_of for name in names), np.bool_, len(names))
        is_there[:first_needed] = True
        counts = np.concatenate([[0], np.cumsum(is_there)])
        ends = np.arange(len(names) + 1)
        begins = np.maximum(0, ends - self._num_needed)
        return np.asarray(counts[ends] - counts[begins] == ends - begins)

    def found(self, names: Sequence[bytes], best: int, first_needed: int) -> Found:
        """Return what a match of `best` pages would pin."""
        limit, found = len(names), [self._page_of.get(name, 0) for name in names[:best]]
        pages = np.zeros(best, np.int32)
        first = max(first_needed, best - self._num_needed)
        pages[first:] = found[first:best]
        num_idle = sum(page in self._idle and page not in self._copied for page in found[first:best])
        end = min(best, limit)
        return Found(pages, num_idle, end, identity=names[end - 1] if end else ROOT, num_added=self._num_added)

    def has_news(self, found: Found) -> bool:
        """Return whether pages have entered since, perhaps the next ones of this prefix."""
        return self._num_added != found.num_added

    def lock(self, found: Found, owner: str) -> Match:
        self.num_pins += found.num_evictable > 0
        lock = Lock(None, found.num_pages, owner, identity=found.identity)
        self._locks.add(lock)
        for index in np.flatnonzero(found.pages).tolist():
            self._pin(lock, index, int(found.pages[index]))
        return Match(found.pages, len(found.pages) * self.page_size, lock)

    def insert(self, keys: Keys, pages: PageIds, lock: Lock) -> tuple[Lock, npt.NDArray[np.bool_]]:
        """Offer full pages, as in PrefixCache. Page number 0 stands for a page that is already gone.

        The lock pins new pages. Pages before its end cost nothing.
        """
        self._require_held(lock)
        taken = np.zeros(len(pages), np.bool_)
        if not self.enabled or len(pages) <= lock.num_pages:
            return lock, taken
        if len(keys) < len(pages) * self.page_size:
            raise IntegrityError(f"insert for {lock.owner!r}: {len(keys)} keys do not cover {len(pages)} pages")
        new = keys[lock.num_pages * self.page_size : len(pages) * self.page_size].tobytes()
        for index, identity in enumerate(identities(new, self.page_size, lock.identity), lock.num_pages):
            if page := int(pages[index]):
                if identity not in self._page_of:
                    part = keys[index * self.page_size : (index + 1) * self.page_size]
                    self._add(identity, page, lock.owner, (part.tobytes(), lock.identity))
                    self._pin(lock, index, page)
                taken[index] = self._page_of[identity] == page
            lock.num_pages, lock.identity = index + 1, identity
        return lock, taken

    def _add(self, identity: bytes, page: int, owner: str, added: Added) -> None:
        self._num_added += 1
        if page in self._identity_of:
            raise IntegrityError(f"insert for {owner!r}: page {page} is cached under another key")
        self._page_of[identity] = page
        self._identity_of[page] = identity
        self._idle[page] = None
        if self.listener is not None:
            self.listener(identity, added)

    def _pin(self, lock: Lock, index: int, page: int) -> None:
        lock.pages[index] = page
        self._refs[page] = self._refs.get(page, 0) + 1
        self._idle.pop(page, None)
        self._cold.pop(page, None)

    def _unpin(self, page: int) -> None:
        self._refs[page] -= 1
        if not self._refs[page]:
            del self._refs[page]
            self._idle[page] = None

    def trim(self, lock: Lock, firsts: Firsts) -> None:
        self._require_held(lock)
        for index in [index for index in lock.pages if index < firsts[0]]:
            self._unpin(lock.pages.pop(index))

    def unlock(self, lock: Lock) -> None:
        self._require_held(lock)
        pages = list(lock.pages.values())
        lock.pages.clear()
        if lock.is_copy:
            self._copied.difference_update(pages)
        else:
            for page in pages:
                self._unpin(page)
            self._cold |= {page: None for page in pages if page in self._idle}
        lock.held = False
        self._locks.discard(lock)

    def num_freed_by(self, lock: Lock) -> int:
        """Return how many pages no other lock pins."""
        return sum(self._refs[page] == 1 and page not in self._copied for page in lock.pages.values())

    def evict(self, n: int) -> PageIds:
        """The caller frees the pages."""
        pages = list(itertools.islice((page for page in self._idle if page not in self._copied), n))
        for page in pages:
            del self._idle[page]
            self._cold.pop(page, None)
            identity = self._identity_of.pop(page)
            del self._page_of[identity]
            if self.listener is not None:
                self.listener(identity, None)
        return np.array(pages, dtype=np.int32)

    def flush(self) -> PageIds:
        return self.evict(self.num_evictable)

    def _require_held(self, lock: Lock) -> None:
        if not lock.held or lock not in self._locks:
            raise IntegrityError(f"lock of {lock.owner!r} ({len(lock.pages)} pages) is not held")

    def problems(self, expect_idle: bool = False) -> list[str]:
        held = self._locks if expect_idle else ()
        found = [f"lock of {lock.owner!r} on {len(lock.pages)} pages is still held" for lock in held]
        refs = Counter(page for lock in self._locks if not lock.is_copy for page in lock.pages.values())
        copied = {page for lock in self._locks if lock.is_copy for page in lock.pages}
        if copied != self._copied or not copied <= self._identity_of.keys():
            found.append(f"copied pages are {sorted(self._copied)}, and the copies' locks say {sorted(copied)}")
        if not self._cold.keys() <= self._idle.keys():
            found.append(f"cold pages {sorted(self._cold.keys() - self._idle.keys())} are pinned or gone")
        if refs != self._refs:
            found.append(f"pages {sorted(refs.keys() ^ self._refs.keys())} or their counts differ from the locks'")
        if self._idle.keys() & refs.keys() or self._idle.keys() | refs.keys() != self._identity_of.keys():
            found.append(f"{len(self._idle)} idle and {len(refs)} pinned of {self.num_cached} pages do not add up")
        if {page: identity for identity, page in self._page_of.items()} != self._identity_of:
            found.append("identities and pages do not agree")
        return found
