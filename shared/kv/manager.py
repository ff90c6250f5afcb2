"""Track the owner of each page of a node. KVManager knows owners by name, but no requests, streams or contents.

    every page is   free (allocator) | cached (prefix cache) | private (exactly one row)
    a row's pages   | from or in the cache, pinned by the row's lock | private ... |
    with windows    | 0 for each page that is not read | cached and private pages, in any order ...

A row's pages never move: caching changes the owner, not the block table. A row may be released while its last step
runs, because later steps run after it. A pull or copy that uses the row must end before the release.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shared.core.errors import IntegrityError
from shared.core.states import TAGS, PageState, Tag
from shared.kv.accounting import raise_problems
from shared.kv.group_cache import Cache
from shared.kv.pages import PageAllocator, PageIds
from shared.kv.prefix_cache import Firsts, Keys, Lock, Match
from shared.kv.rows import ReqToTokenPool

Entries = npt.NDArray[np.int64]  # places in a row's page list


@dataclass(slots=True, eq=False)
class RowRecord:
    """`lock` is None until `take_cached` or `insert_prefix`."""

    owner: str
    tag: Tag = PageState.ACTIVE
    lock: Lock | None = None


class KVManager:
    """Scheduler thread only."""

    def __init__(self, rows: ReqToTokenPool, allocator: PageAllocator, cache: Cache) -> None:
        self.rows = rows
        self.num_groups = rows.num_groups
        self.allocator = allocator
        self.cache = cache
        self.page_size = cache.page_size
        self._has_windows = any(cache.windows)
        self._records: dict[int, RowRecord] = {}
        self._private = np.zeros(rows.table.shape, np.bool_)
        # so that an error can name a leaked page's owner
        self._last_owner = np.full(allocator.num_pages, "", dtype=object)

    @property
    def num_available(self) -> int:
        return self.allocator.num_free + self.cache.num_evictable

    def alloc_pages(self, n: int, owner: str = "unnamed") -> PageIds | None:
        """Allocate n pages, evicting if needed, or return None. Pass the pages to `append`."""
        missing = n - self.allocator.num_free
        if missing > self.cache.num_evictable:
            return None
        if missing > 0:
            self.allocator.free(self.cache.evict(missing))
        pages = self.allocator.alloc(n)
        if pages is not None:
            self._last_owner[pages] = owner
        return pages

    def flush_cache(self) -> int:
        pages = self.cache.flush()
        self.allocator.free(pages)
        return len(pages)

    def alloc_row(self, owner: str, tag: Tag = PageState.ACTIVE) -> int | None:
        _require_tag(tag)
        row = self.rows.alloc_row()
        if row is not None:
            self.attach(row, owner, tag)
        return row

    def attach(self, row: int, owner: str, tag: Tag = PageState.ACTIVE) -> None:
        """Start the record of a row that `rows.alloc_row` returned."""
        _require_tag(tag)
        if row in self._records:
            raise IntegrityError(f"row {row} belongs to {self._records[row].owner!r} already", subject=owner)
        self._records[row] = RowRecord(owner, tag)

    def owner(self, row: int) -> str:
        return self._record(row).owner

    def tag(self, row: int) -> Tag:
        return self._record(row).tag

    def set_tag(self, row: int, tag: Tag) -> None:
        _require_tag(tag)
        self._record(row).tag = tag

    def take_cached(self, row: int, match: Match) -> None:
        """Put the match's pages at the start of an empty row. The row then owns the match's lock."""
        record = self._record(row)
        if record.lock is not None or self.rows.num_pages[row]:
            raise IntegrityError(f"row {row} of {record.owner!r} is not empty: it can't begin with cached pages")
        if not match.lock.held:
            raise IntegrityError(f"row {row} of {record.owner!r}: the match's lock was given back already")
        self.rows.append(row, match.pages)
        record.lock = match.lock

    def append(self, row: int, pages: PageIds) -> None:
        """Append pages from `alloc_pages`, which become private. A 0 stands for a page that no step reads."""
        owner = self._record(row).owner
        start = int(self.rows.num_pages[row])
        self.rows.append(row, pages)
        self._private[row, start : start + len(pages)] = pages != 0
        self._last_owner[pages] = owner

    def grow(self, row: int, n: int, firsts: Firsts = ()) -> bool:
        """Append n pages, or change nothing and return False. Pages before each group's `firsts` become 0."""
        owner, start = self._record(row).owner, int(self.rows.num_pages[row])
        room = self.rows.max_pages_per_row - start
        if n > room:  # raise, because more free pages would not help
            raise IntegrityError(f"row {row} of {owner!r} has room for {room} more pages, not {n}")
        entries = self.entries(start, start + n, firsts)
        pages = self.alloc_pages(len(entries), owner)
        if pages is None:
            return False
        if len(pages) < n:
            listed = np.zeros(n, np.int32)
            listed[entries - start] = pages
            pages = listed
        self.append(row, pages)
        return True

    def entries(self, start: int, end: int, firsts: Firsts = ()) -> Entries:
        """Return the entries [start, end) of a page list that are not before their group's page in `firsts`.

        firsts: one page per group, as from `first_needed`; (): 0.
        """
        found = np.arange(start, end)
        if not any(firsts):
            return found
        is_read = found // self.num_groups >= np.asarray(firsts)[found % self.num_groups]
        return found[is_read]

    def leave_behind(self, row: int, num_tokens: int) -> None:
        """Free the row's pages that no position >= `num_tokens` reads. Cached pages stay cached.

        Unfinished steps of the row must begin at `num_tokens` or later.
        """
        firsts = self.cache.first_needed(num_tokens) if self._has_windows else ()
        if not firsts or not self.rows.has_before(row, firsts):
            return
        dropped, entries = self.rows.drop_leading(row, firsts)
        mine = self._private[row, entries]
        self._private[row, entries] = False
        self.allocator.free(dropped[mine])
        lock = self._record(row).lock
        if lock is not None:
            self.cache.trim(lock, firsts)

    def num_held(self, row: int) -> int:
        """Return how many pages the row has, cached ones included."""
        return int(np.count_nonzero(self.rows.pages_of(row)))

    def num_freed_by(self, row: int) -> int:
        """Return how many pages become free or evictable when the row is released."""
        lock = self._record(row).lock
        return int(self._private[row].sum()) + (0 if lock is None else self.cache.num_freed_by(lock))

    def insert_prefix(self, row: int, keys: Keys, num_tokens: int) -> int:
        """Offer the row's full pages below num_tokens to the cache. Return how many of these the cache took now.

        keys: int64, one per token from the request's start. The step that computes the pages' KV must be launched.
        """
        record = self._record(row)
        n = min(num_tokens // self.page_size * self.num_groups, int(self.rows.num_pages[row]))
        pages = self.rows.table[row, :n]
        if record.lock is None:
            record.lock = self.cache.match(keys, 0, record.owner).lock
        record.lock, taken = self.cache.insert(keys, pages, record.lock)
        self._private[row, :n] &= ~taken
        return int(taken.sum())

    def release(self, row: int) -> Lock | None:
        """Free the row and its pages. Return the ended lock of its cached pages, if it had one."""
        record = self._record(row)
        mine = self._private[row, : self.rows.num_pages[row]]
        pages = self.rows.pages_of(row)[mine]
        self.allocator.free(pages)
        if record.lock is not None:
            self.cache.unlock(record.lock)
        self._private[row] = False
        del self._records[row]
        self.rows.free_row(row)
        return record.lock

    def gauges(self) -> dict[PageState, int]:
        """Return the number of pages by state. Tagged pages are private, or pinned in the cache."""
        tag_of = np.zeros(self.allocator.num_pages, np.int8)
        for code, tag in reversed(list(enumerate(TAGS, start=1))):  # ACTIVE is written last, over the other states
            for row in [row for row, record in self._records.items() if record.tag == tag]:
                tag_of[self.rows.pages_of(row)] = code
        counts = np.bincount(tag_of[1:], minlength=len(TAGS) + 1)
        granted, held = int(counts[2]), int(counts[3])
        free, cached = self.allocator.num_free, self.cache.num_evictable
        active = self.allocator.num_total - free - cached - granted - held
        return {
            PageState.FREE: free,
            PageState.CACHED: cached,
            PageState.ACTIVE: active,
            PageState.GRANTED: granted,
            PageState.HELD: held,
        }

    def row_gauges(self) -> dict[PageState, int]:
        counts = Counter(record.tag for record in self._records.values())
        return {PageState.FREE: self.rows.num_free} | {tag: counts[tag] for tag in TAGS}

    def _record(self, row: int) -> RowRecord:
        record = self._records.get(row)
        if record is None:
            raise IntegrityError(f"row {row} has no owner (released already?)")
        return record

    def check_integrity(self, idle: bool = False) -> None:
        """Raise unless free + cached + private == total, with one owner per page.

        `idle`: also raise if a row or lock is held.
        """
        raise_problems("KV manager", self.problems(idle))

    def problems(self, idle: bool) -> list[str]:
        found = self.allocator.problems() + self.rows.problems() + self._row_problems() + self._page_problems()
        if idle:
            found += [f"row {row} of {record.owner!r} leaked" for row, record in self._records.items()]
        return found + self.cache.problems(expect_idle=idle)

    def _row_problems(self) -> list[str]:
        found = []
        used = set(self.rows.rows_in_use())
        found += [f"row {row} is in use but no record owns it" for row in sorted(used - set(self._records))]
        found += [f"row {row} of {self._records[row].owner!r} was freed" for row in sorted(set(self._records) - used)]
        for row, record in self._records.items():
            pages = self.rows.pages_of(row)
            shared = pages[~self._private[row, : len(pages)] & (pages != 0)]
            loose = [page for page in shared.tolist() if not self.cache.is_locked(page)]
            if loose:
                found.append(f"row {row} of {record.owner!r} uses pages {loose} that it neither owns nor pins")
        return found

    def _page_problems(self) -> list[str]:
        free = self.allocator.is_free()
        cached = np.zeros_like(free)
        cached[self.cache.cached_pages()] = True
        private = self.rows.table[self._private]
        holders = np.bincount(private, minlength=len(free)) + free + cached
        leaked = np.flatnonzero(holders[1:] == 0) + 1
        found = [f"page {page} leaked, last owner {self._last_owner[page]!r}" for page in leaked]
        for page in np.flatnonzero(holders > 1):
            owners = self._owners_of(int(page), bool(free[page]), bool(cached[page]))
            found.append(f"page {page} is owned by {' and '.join(owners)}")
        return found

    def _owners_of(self, page: int, free: bool, cached: bool) -> list[str]:
        rows: list[int] = np.nonzero((self.rows.table == page) & self._private)[0].tolist()
        owners = [f"row {row} of {self._records[row].owner if row in self._records else 'nobody'!r}" for row in rows]
        return owners + ["the free list"] * free + ["the cache"] * cached


def _require_tag(tag: Tag) -> None:
    if tag not in TAGS:
        raise ValueError(f"tag {tag!r} is none of {', '.join(TAGS)}")


def page_count(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
