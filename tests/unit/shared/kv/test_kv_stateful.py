"""Random lives of requests against a plain model: dicts of pages and prefixes, checked after every step.

The model keeps the CONTENT of every page (its page group and the prefix it was written for), written when a request
computes it and poisoned when the allocator takes it back. Whatever a row or a match points at must hold exactly its
prefix: so a page that is freed, evicted or handed out too early is seen as wrong content, not only as a wrong count.

A match must have what the next token reads in every group: all pages of a group without a window, and the last window's
pages of another. Rows leave pages behind, and some bring theirs whole, as hand-offs and pulls do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.core.states import TAGS, PageState
from shared.kv.group_cache import by_group, make_cache
from shared.kv.manager import KVManager, page_count
from shared.kv.pages import PageAllocator, PageIds
from shared.kv.prefix_cache import Firsts, Keys, Lock, Match
from shared.kv.rows import ReqToTokenPool

PAGES_OF_A_GROUP, NUM_ROWS, MAX_PAGES = 12, 5, 6
WINDOWS = [(0, 5), (5, 0), (5, 9), (0, 3, 6), (6,)]  # in tokens; 0: all
# Prompts that share prefixes all the time: a stem, and a short tail of two possible tokens.
STEMS = ((0,) * 12, (1,) * 12, (0, 1) * 6)
Content = tuple[int, tuple[int, ...]]  # page group, and every token up to the last one in the page


@dataclass(eq=False)
class Life:
    """`offered`: how many pages of tokens were offered to the cache. `computed`: tokens with KV."""

    row: int
    ids: list[int]
    computed: int
    offered: int
    tag: str


def prompts(min_size: int) -> st.SearchStrategy[list[int]]:
    stem = st.tuples(st.sampled_from(STEMS), st.integers(min_size, 12)).map(lambda pair: list(pair[0][: pair[1]]))
    return st.tuples(stem, st.lists(st.integers(0, 1), max_size=3)).map(lambda pair: pair[0] + pair[1])


def as_keys(ids: list[int]) -> Keys:
    return np.array(ids, dtype=np.int64)


class KVLives(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.running: list[Life] = []
        self.open_matches: list[tuple[Match, list[int]]] = []
        self.copies: list[tuple[int, Lock, list[tuple[int, ...]]]] = []  # page group, and each page's tokens
        self.contents: dict[int, Content] = {}  # page -> what it holds; absent: poisoned
        self.cached: dict[Content, int] = {}

    @initialize(
        page_size=st.sampled_from([1, 2, 4]),
        windows=st.just((0,)) | st.sampled_from(WINDOWS),
        enabled=st.booleans() | st.just(True),
    )
    def build(self, page_size: int, windows: tuple[int, ...], enabled: bool) -> None:
        self.enabled = enabled
        self.page_size, self.windows, self.num_groups = page_size, windows, len(windows)
        allocator = PageAllocator(1 + PAGES_OF_A_GROUP * len(windows), on_free=self.poison)
        rows = ReqToTokenPool(NUM_ROWS, MAX_PAGES * len(windows), len(windows))
        self.kv = KVManager(rows, allocator, make_cache(windows, page_size, enabled))

    def poison(self, pages: PageIds) -> None:
        for page in pages.tolist():
            content = self.contents.pop(page, None)
            if content is not None and self.cached.get(content) == page:
                del self.cached[content]

    # ---- the model

    def first_read(self, num_tokens: int) -> Firsts:
        """Return the first page of each group that a token behind `num_tokens` reads."""
        return tuple(max(0, num_tokens - window + 1) // self.page_size if window else 0 for window in self.windows)

    def page_at(self, ids: list[int], group: int, index: int) -> int:
        return self.cached.get((group, tuple(ids[: (index + 1) * self.page_size])), 0)

    def model_match(self, ids: list[int], max_tokens: int, unread: Firsts = ()) -> list[int]:
        """Return the page list of the longest match. No token reads pages before `unread`."""
        unread = unread or (0,) * self.num_groups
        for length in range(min(len(ids), max_tokens) // self.page_size, -1, -1):
            firsts = [max(pair) for pair in zip(self.first_read(length * self.page_size), unread, strict=True)]
            found = [
                self.page_at(ids, group, index) if index >= first else 0
                for index in range(length)
                for group, first in enumerate(firsts)
            ]
            gone = [index // self.num_groups < firsts[index % self.num_groups] for index in range(len(found))]
            if all(page or is_gone for page, is_gone in zip(found, gone, strict=True)):
                return found
        return []

    def write(self, life: Life, computed: int, offers: bool = True) -> int:
        """Compute tokens. Return how many pages the cache should take now, if it is offered them."""
        life.computed, num_taken = computed, 0
        pages = self.kv.rows.pages_of(life.row).tolist()
        num_full = computed // self.page_size
        for index in range(num_full):
            for group, page in enumerate(pages[index * self.num_groups : (index + 1) * self.num_groups]):
                content = group, tuple(life.ids[: (index + 1) * self.page_size])
                if page:
                    self.contents.setdefault(page, content)
                if page and offers and self.enabled and index >= life.offered:
                    num_taken += self.cached.setdefault(content, page) == page
        if offers:
            life.offered = max(life.offered, num_full)
        return num_taken

    # ---- rules

    @rule(ids=prompts(min_size=1), tag=st.sampled_from(TAGS))
    def admit(self, ids: list[int], tag: str) -> None:
        ids = ids[: self.page_size * MAX_PAGES]
        expected = self.model_match(ids, len(ids) - 1)
        match = self.kv.cache.match(as_keys(ids), len(ids) - 1, "admit")
        assert match.pages.tolist() == expected
        row = self.kv.alloc_row("life", tag)
        if row is None:
            assert len(self.running) == NUM_ROWS - 1
            self.kv.cache.unlock(match.lock)
            return
        self.kv.take_cached(row, match)
        if not self.kv.grow(row, page_count(len(ids), self.page_size) * self.num_groups - len(expected)):
            self.kv.release(row)
            return
        self.running.append(Life(row, list(ids), match.num_tokens, match.num_tokens // self.page_size, tag))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 8), offers=st.booleans())
    def compute_and_leave_behind(self, data: st.DataObject, num_tokens: int, offers: bool) -> None:
        """Rows without draft state offer no pages. What they leave behind is free."""
        life = data.draw(st.sampled_from(self.running))
        num_taken = self.write(life, min(len(life.ids), life.computed + num_tokens), offers)
        if offers:
            before = self.kv.rows.pages_of(life.row).tolist()
            assert self.kv.insert_prefix(life.row, as_keys(life.ids), life.computed) == num_taken
            assert self.kv.rows.pages_of(life.row).tolist() == before
        self.kv.leave_behind(life.row, life.computed)

    @rule(ids=prompts(min_size=1))
    def bring(self, ids: list[int]) -> None:
        """A pull: the row has only what the token behind it reads. It enters the cache, and the row ends."""
        num_pages = min(MAX_PAGES, len(ids) // self.page_size)
        ids = ids[: num_pages * self.page_size]
        unread = self.first_read(len(ids))
        found = self.kv.cache.find(as_keys(ids), len(ids), unread)
        num_found = len(found.pages) // self.num_groups
        if self.windows != (6,):  # a cache of one windowed group counts unread pages beyond the search
            assert found.pages.tolist() == self.model_match(ids, len(ids), unread)
        row = self.kv.alloc_row("pull", PageState.HELD)
        if row is None:
            return
        self.kv.take_cached(row, self.kv.cache.lock(found, "pull"))
        if self.kv.grow(row, num_pages * self.num_groups - len(found.pages), unread):
            pages = self.kv.rows.pages_of(row).tolist()
            has_page = [index // self.num_groups >= unread[index % self.num_groups] for index in range(len(pages))]
            assert [page > 0 for page in pages] == has_page
            num_taken = self.write(Life(row, ids, 0, num_found, PageState.HELD), len(ids))
            assert self.kv.insert_prefix(row, as_keys(ids), len(ids)) == num_taken
            assert self.model_match(ids, len(ids))[-self.num_groups :] or not ids or not self.enabled
        self.kv.release(row)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        life = data.draw(st.sampled_from(self.running))
        if len(life.ids) >= self.page_size * MAX_PAGES:
            return
        wanted = page_count(len(life.ids) + 1, self.page_size) * self.num_groups
        if self.kv.grow(life.row, wanted - int(self.kv.rows.num_pages[life.row])):
            life.ids.append(token)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        life = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        num_freed = self.kv.num_freed_by(life.row)
        before = self.kv.num_available
        self.kv.release(life.row)
        assert self.kv.num_available == before + num_freed

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tag=st.sampled_from(TAGS))
    def retag(self, data: st.DataObject, tag: str) -> None:
        life = data.draw(st.sampled_from(self.running))
        self.kv.set_tag(life.row, tag)
        life.tag = tag

    @rule(ids=prompts(min_size=0), max_tokens=st.integers(0, 15))
    def look_up(self, ids: list[int], max_tokens: int) -> None:
        """A loan, or an offer that waits: it pins a prefix without a row."""
        match = self.kv.cache.match(as_keys(ids), max_tokens, "offer")
        assert match.pages.tolist() == self.model_match(ids, max_tokens)
        self.open_matches.append((match, ids))

    @precondition(lambda self: self.open_matches)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        match, _ = self.open_matches.pop(data.draw(st.integers(0, len(self.open_matches) - 1)))
        self.kv.cache.unlock(match.lock)

    @rule(data=st.data(), most=st.integers(1, 3))
    def copy(self, data: st.DataObject, most: int) -> None:
        """The cold tier's copies pin pages, of a group without a window with all before them."""
        group = data.draw(st.integers(0, self.num_groups - 1))
        cache = by_group(self.kv.cache)[group]
        if nodes := cache.take_cold(most):
            self.copies.append((group, cache.pin(nodes, "copy"), [self.contents[node.page][1] for node in nodes]))

    @precondition(lambda self: self.copies)
    @rule(data=st.data())
    def end_copy(self, data: st.DataObject) -> None:
        group, lock, _ = self.copies.pop(data.draw(st.integers(0, len(self.copies) - 1)))
        by_group(self.kv.cache)[group].unlock(lock)

    @rule(n=st.integers(0, 4) | st.just(PAGES_OF_A_GROUP))
    def press(self, n: int) -> None:
        """Pages wanted and given back: evicts."""
        available = self.kv.num_available
        pages = self.kv.alloc_pages(n, "press")
        assert (pages is not None) == (n <= available)
        if pages is not None:
            assert not any(page in self.contents for page in pages.tolist()), "handed out while it held something"
            self.kv.allocator.free(pages)

    @precondition(lambda self: len(self.open_matches) > 1)
    @rule()
    def flush(self) -> None:
        self.kv.flush_cache()
        assert self.kv.cache.num_evictable == 0

    @precondition(lambda self: not self.running and not self.open_matches and not self.copies)
    @rule()
    def rest(self) -> None:
        self.kv.check_integrity(idle=True)
        assert self.kv.allocator.num_free + self.kv.cache.num_cached == self.kv.allocator.num_total

    # ---- what must hold

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        assert self.kv.cache.num_cached == len(self.cached)
        assert sorted(self.kv.cache.cached_pages().tolist()) == sorted(self.cached.values())
        gauges = self.kv.gauges()
        assert sum(gauges.values()) == self.kv.allocator.num_total and min(gauges.values()) >= 0
        tags = [life.tag for life in self.running]
        assert all(self.kv.row_gauges()[tag] == tags.count(tag) for tag in TAGS)
        pinned = {int(page) for match, _ in self.open_matches for page in match.pages if page}
        pinned |= {page for life in self.running for page in self.kv.rows.pages_of(life.row).tolist() if page}
        whole = [group for group, window in enumerate(self.windows) if not window]
        for life in self.running:  # a row pins the whole path, also where it has pages of its own
            pinned |= {self.page_at(life.ids, group, index) for group in whole for index in range(life.offered)}
        for group, _, pages in self.copies:
            for ids in pages:
                last = len(ids) // self.page_size
                pinned |= {self.page_at(list(ids), group, i) for i in range(0 if group in whole else last - 1, last)}
        assert self.kv.cache.num_evictable == len(set(self.cached.values()) - pinned)

    @invariant()
    def every_pointer_leads_to_its_prefix(self) -> None:
        for life in self.running:
            self.check_pages(self.kv.rows.pages_of(life.row).tolist(), life.ids, life.computed)
        for match, ids in self.open_matches:
            self.check_pages(match.pages.tolist(), ids, match.num_tokens)

    def check_pages(self, pages: list[int], ids: list[int], computed: int) -> None:
        """Every page that the token behind `computed` ones reads is there, and holds its prefix."""
        firsts = self.first_read(computed)
        for entry, page in enumerate(pages):
            index, group = divmod(entry, self.num_groups)
            assert page or index < firsts[group]
            if page and index < computed // self.page_size:
                assert self.contents[page] == (group, tuple(ids[: (index + 1) * self.page_size]))

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for life in self.running:
            self.kv.release(life.row)
        for match, _ in self.open_matches:
            self.kv.cache.unlock(match.lock)
        for group, lock, _ in self.copies:
            by_group(self.kv.cache)[group].unlock(lock)
        self.kv.check_integrity(idle=True)
        self.kv.flush_cache()
        assert self.kv.allocator.num_free == self.kv.allocator.num_total


TestKVLives = KVLives.TestCase
TestKVLives.settings = settings(
    max_examples=200,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate, Phase.shrink),  # "explain" traces every line: minutes, on a failure
)
