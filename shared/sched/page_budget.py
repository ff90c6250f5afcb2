"""Who gets pages and who gives them back: the rules that keep a full pool moving. Each of them ended a livelock.

a  running rows reserve before anyone is admitted; admission leaves one reservation per decoding row free
b  a prompt reserves all its pages at once; holders go before the head of the queue
c  victims are all holders, youngest arrival first, the oldest never; seniority survives retraction
d  while pages are on their way back (held), a short row skips a step rather than retract one more
e  pages wait only for something that surely ends: `held` rows wait for their pull or their copy, nothing else waits
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from shared.core.page_identity import prefix_keys
from shared.core.request import Request, TokenIds
from shared.core.states import PageState, Tag
from shared.kv.manager import KVManager, page_count
from shared.sched.settings import SchedSettings


class PageBudget:
    """Arithmetic and reservations over one KVManager; the scheduler decides, this counts."""

    def __init__(self, kv: KVManager, settings: SchedSettings) -> None:
        self.kv = kv
        self._settings = settings
        self._held: dict[int, int] = {}  # row -> its private pages
        self.num_left = 0  # rows that their requests have left, so far
        self.num_saving = 0  # cached pages that a copy into the cold tier pins for a moment

    def cover(self, row: int, num_tokens: int) -> bool:
        """Make the row's pages hold positions [0, num_tokens); False when the pool can't now."""
        missing = page_count(num_tokens, self._settings.page_size) - int(self.kv.rows.num_pages[row])
        return missing <= 0 or self.kv.grow(row, missing)

    def can_ever_hold(self, req: Request) -> bool:
        """Whether the empty pool has pages for the prompt, the longest answer and what steps in flight reserve."""
        settings, longest = self._settings, len(req.prompt_ids) + req.sampling.max_tokens
        pages = page_count(longest + settings.overshoot, settings.page_size)
        fits = pages <= min(self.kv.allocator.num_total, self.kv.rows.max_pages_per_row)
        return req.num_tokens > 0 and longest <= settings.max_context and fits

    def headroom(self, num_rows: int) -> int:
        """Pages that `num_rows` decoding rows may take in their next step (rule a)."""
        return num_rows * page_count(self._settings.width, self._settings.page_size)

    def reserve(
        self, req: Request, ids: TokenIds, extra: int, keep_free: int, tag: Tag, first_needed: int = 0
    ) -> int | None:
        """Row, cached prefix and all pages for `ids` plus `extra` tokens, or nothing at all. Returns the number of
        cached tokens; at least one token is left to compute, and all whose logits say how likely the next one of the
        prompt is, where that is still wanted. Pages before `first_needed` no step will read."""
        kv, owner = self.kv, str(req.key)
        if not kv.rows.num_free:
            return None
        most = len(ids) - 1 if req.first_unscored is None else req.first_unscored - 1
        match = kv.cache.match(self.prefix_keys(req, ids), most, owner, first_needed)
        missing = page_count(len(ids) + extra, self._settings.page_size) - len(match.pages)
        if kv.num_available - missing < keep_free:
            kv.cache.unlock(match.lock)
            return None
        row = kv.alloc_row(owner, tag)
        assert row is not None
        kv.take_cached(row, match)
        if not kv.grow(row, missing):
            raise AssertionError("pages vanished between the count and the reservation")
        req.row = row
        return match.num_tokens

    def remember(self, req: Request, ids: TokenIds) -> None:
        """Offer the full pages of `ids`, whose KV is computed, to the prefix cache; unless their draft KV is missing,
        for whoever found them would draft badly and never know."""
        if req.lacks_draft_state:
            return
        keys = self.prefix_keys(req, ids)
        self.kv.insert_prefix(req.row, keys, len(keys))

    def prefix_keys(self, req: Request, ids: TokenIds) -> TokenIds:
        """The keys of these tokens of a request, as `shared.core.page_identity` has them."""
        settings = self._settings
        keys = prefix_keys(ids.tobytes(), settings.adapter_slot(req), settings.key_lookahead, req.cache_salt)
        return np.frombuffer(keys, np.int64)

    def release(self, req: Request) -> None:
        self.num_left += 1
        self.kv.release(req.row)
        req.row = 0

    def hold(self, req: Request) -> int:
        """Take the row away from its request while a pull may still write into its pages."""
        self.num_left += 1
        row, req.row = req.row, 0
        self.kv.set_tag(row, PageState.HELD)
        self._held[row] = self.kv.num_private(row)
        return row

    def release_held(self, row: int) -> None:
        del self._held[row]
        self.kv.release(row)

    @property
    def num_held(self) -> int:
        """Pages on their way back (rule d)."""
        return sum(self._held.values()) + self.num_saving


def pick_victim(holders: Iterable[Request]) -> Request | None:
    """Youngest arrival; the oldest holder never (rule c)."""
    by_age = sorted(holders, key=lambda req: req.arrival)
    return by_age[-1] if len(by_age) > 1 else None
