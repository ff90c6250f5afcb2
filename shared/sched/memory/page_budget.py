"""Decide which requests get or return pages, so that a full pool never stops all requests. Each rule ended a livelock.

a  running rows reserve pages before any request is admitted; admission leaves pages for one step of each decoding row,
   and for the growth that is foreseen (growth.py)
b  a prompt reserves all its pages together; requests that hold pages go before the head of the queue
c  all holders of pages can be victims: the youngest arrival first, the oldest never; a retracted request keeps its
   place in the order of arrival
d  while held pages are coming back, a row that lacks pages skips a step, and no further request is retracted
e  a held row keeps its pages only until its pull or copy ends, and each pull and copy is sure to end
f  loans of cached pages end first, then pulls of prefixes, newest first; then a row may skip a step, a prompt may wait,
   or a request may be retracted
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from shared.core.page_identity import adapter_of, prefix_keys
from shared.core.request import Request, TokenIds
from shared.core.states import PageState, Tag
from shared.kv.manager import KVManager
from shared.kv.prefix_cache import Firsts, Found, Lock
from shared.sched.memory.ended import EndedRequests
from shared.sched.steps.settings import SchedSettings

LoanName = tuple[str, int]  # the peer that reads the pages, and the lease number in the peer's Pull


@dataclass(frozen=True, slots=True)
class Shortage:
    """`pages`: how many more pages must become available. 0: a row is lacking. `found`: the cached prefix."""

    pages: int
    found: Found | None = field(default=None, compare=False)


class PageBudget:
    def __init__(self, kv: KVManager, settings: SchedSettings) -> None:
        self.kv = kv
        self.ended = EndedRequests(kv)
        self._settings = settings
        self._held: dict[int, int] = {}  # row -> number of pages that its release frees
        # row of an open prefix pull -> number of its private pages; newest last (rule f)
        self._pulled: dict[int, int] = {}
        self._lent: dict[LoanName, Lock] = {}  # newest last (rule f)
        self.num_left = 0  # how many times a request has left its row
        self.num_saving = 0  # cached pages that a copy pins

    def cover(self, row: int, num_tokens: int) -> bool:
        """Give the row pages for its first num_tokens tokens. Return False if too few are free."""
        missing = self._settings.num_pages(num_tokens) - int(self.kv.rows.num_pages[row])
        return missing <= 0 or self.kv.grow(row, missing)

    def can_ever_hold(self, req: Request) -> bool:
        settings, longest = self._settings, len(req.ask.prompt_ids) + req.ask.sampling.max_tokens
        pages = settings.num_pages(longest + settings.overshoot)
        fits = pages <= min(self.kv.allocator.num_total, self.kv.rows.max_pages_per_row)
        return req.num_tokens > 0 and longest <= settings.max_context and fits

    def headroom(self, num_rows: int) -> int:
        """Return the largest number of pages that a step of `num_rows` decoding rows can take (rule a)."""
        return num_rows * self._settings.num_pages(self._settings.width)

    def reserve(
        self, req: Request, ids: TokenIds, extra: int, keep_free: int, tag: Tag, firsts: Firsts = ()
    ) -> int | Shortage:
        """Reserve a row, the cached prefix, and pages for `ids` plus `extra` tokens, or reserve nothing.

        Return the number of cached tokens, or the shortage. The prefix ends before the last token, and before the first
        token that prompt scores need. No step reads pages before `firsts`.
        """
        kv, owner = self.kv, str(req.key)
        if not kv.rows.num_free:
            return Shortage(0)
        most = len(ids) - 1 if req.first_unscored is None else req.first_unscored - 1
        found = kv.cache.find(self.prefix_keys(req, ids), most, firsts)
        end = self._settings.num_pages(len(ids) + extra)
        missing = len(kv.entries(len(found.pages), end, firsts))
        short = keep_free + missing + found.num_evictable - kv.num_available
        if short > 0:
            return Shortage(short, found)
        req.row = self._take(found, end, tag, owner, firsts)
        return len(found.pages) // kv.num_groups * self._settings.page_size

    def reserve_pulled(self, keys: TokenIds, first_page: int, num_pages: int, keep_free: int, owner: str) -> int | None:
        """Reserve a held row for pages [first_page, num_pages) of tokens, which a pull will bring, or reserve nothing.

        A windowed page group gets only what the next token reads. `keys` begin at page 0. Return None if rows or pages
        are short, or if pages before `first_page` are not cached any more. The row is given up before any request must
        wait (rule f).
        """
        kv = self.kv
        if kv.rows.num_free < 2:
            return None  # the last free row is kept for a request that computes
        firsts = self._pulled_from(num_pages)
        found = kv.cache.find(keys, first_page * self._settings.page_size, firsts)
        end = num_pages * kv.num_groups
        missing = len(kv.entries(len(found.pages), end, firsts))
        is_gone = len(found.pages) < first_page * kv.num_groups
        if is_gone or kv.num_available - found.num_evictable - missing < keep_free:
            return None
        row = self._take(found, end, PageState.HELD, owner, firsts)
        self._pulled[row] = missing
        return row

    def num_pulled(self, first_page: int, num_pages: int) -> int:
        """Return how many pages a pull of pages [first_page, num_pages) of tokens brings, of all page groups."""
        num_groups = self.kv.num_groups
        return len(self.kv.entries(first_page * num_groups, num_pages * num_groups, self._pulled_from(num_pages)))

    def _pulled_from(self, num_pages: int) -> Firsts:
        return self.kv.cache.first_needed(num_pages * self._settings.page_size)

    def _take(self, found: Found, end: int, tag: Tag, owner: str, firsts: Firsts = ()) -> int:
        """Return a new row with the cached prefix, and pages up to `end`, which the caller has counted."""
        row = self.kv.alloc_row(owner, tag)
        assert row is not None
        self.kv.take_cached(row, self.kv.cache.lock(found, owner))
        if not self.kv.grow(row, end - len(found.pages), firsts):
            raise AssertionError("pages vanished between the count and the reservation")
        return row

    def lend(self, name: LoanName, lock: Lock) -> None:
        self._lent[name] = lock

    def take_back(self, name: LoanName) -> None:
        lock = self._lent.pop(name, None)
        if lock is not None:
            self.kv.cache.unlock(lock)

    @property
    def newest_loan(self) -> LoanName | None:
        return next(reversed(self._lent), None)

    def remember(self, req: Request, ids: TokenIds) -> None:
        """Offer the full pages of `ids` to the prefix cache. The KV of these pages must be computed.

        Pages without draft KV are not offered: the next request with these pages would draft badly.
        """
        if req.lacks_draft_state:
            return
        keys = self.prefix_keys(req, ids)
        self.kv.insert_prefix(req.row, keys, len(keys))

    def settle(self, req: Request) -> None:
        """Note whether a request that will begin, or begin again, is longer than the model's short context."""
        adapter = adapter_of(req.ask.adapter, req.num_tokens, self._settings.adapters.short_context)
        if not req.row and adapter != req.ask.adapter:
            req.ask = replace(req.ask, adapter=adapter)
            req.page_names = None

    def prefix_keys(self, req: Request, ids: TokenIds) -> TokenIds:
        """Return cache keys; see `shared.core.page_identity`."""
        self.settle(req)
        keys = prefix_keys(ids.tobytes(), req.ask.adapter, self._settings.drafts.key_lookahead, req.ask.cache_salt)
        return np.frombuffer(keys, np.int64)

    def release(self, req: Request) -> None:
        self.num_left += 1
        self.ended.remember_end(req, self.kv.release(req.row))
        req.row = 0

    def hold(self, req: Request) -> int:
        """Keep the row, because a pull or copy may still use its pages."""
        self.num_left += 1
        row, req.row = req.row, 0
        self.kv.set_tag(row, PageState.HELD)
        self._held[row] = self.kv.num_freed_by(row)
        return row

    def hold_pulled(self, row: int) -> None:
        """Hold the row of an ended or given-up pull until the pull's copies end. Idempotent."""
        if row in self._pulled:
            self._held[row] = self._pulled.pop(row)

    @property
    def youngest_pulled(self) -> int | None:
        return next(reversed(self._pulled), None)

    def release_held(self, row: int) -> None:
        """No copy may be in flight."""
        self.hold_pulled(row)
        del self._held[row]
        self.kv.release(row)

    @property
    def holds_rows(self) -> bool:
        return bool(self._held)

    @property
    def num_held(self) -> int:
        """Return how many pages will come back: pages of held rows, and pages that a copy pins (rule d)."""
        return sum(self._held.values()) + self.num_saving


def pick_victim(holders: Iterable[Request]) -> Request | None:
    """Return the youngest holder of pages (rule c), or None if there is only one holder."""
    by_age = sorted(holders, key=lambda req: req.arrival)
    return by_age[-1] if len(by_age) > 1 else None
