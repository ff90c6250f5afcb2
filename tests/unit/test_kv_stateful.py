"""Random lives of requests against a plain model: dicts of pages and prefixes, checked after every step.

The model keeps the CONTENT of every page (the prefix it was written for), written when a request computes it and
poisoned when the allocator takes it back. Whatever a row or a match points at must hold exactly its prefix: so a page
that is freed, evicted or handed out too early is seen as wrong content, not only as a wrong count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shared.core.states import TAGS
from shared.kv.manager import KVManager, page_count
from shared.kv.pages import PageAllocator, PageIds
from shared.kv.prefix_cache import Keys, Match, PrefixCache
from shared.kv.rows import ReqToTokenPool

NUM_PAGES, NUM_ROWS, MAX_PAGES = 13, 5, 6
# Prompts that share prefixes all the time: a stem, and a short tail of two possible tokens.
STEMS = ((0,) * 12, (1,) * 12, (0, 1) * 6)
Content = tuple[int, ...]  # every token from the request's first to the last one in the page


@dataclass(eq=False)
class Life:
    """One request of the model. `computed` tokens of it have KV; `offered` pages are in the cache, if there is one."""

    row: int
    ids: list[int]
    computed: int
    tag: str
    offered: int

    def content(self, page: int, page_size: int) -> Content:
        return tuple(self.ids[: (page + 1) * page_size])


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
        self.contents: dict[int, Content] = {}  # page -> what it holds; absent: poisoned
        self.cached: dict[Content, int] = {}  # full prefix -> page

    @initialize(page_size=st.sampled_from([1, 2, 4]), enabled=st.booleans() | st.just(True))
    def build(self, page_size: int, enabled: bool) -> None:
        self.page_size = page_size
        self.enabled = enabled
        allocator = PageAllocator(NUM_PAGES, on_free=self.poison)
        self.kv = KVManager(ReqToTokenPool(NUM_ROWS, MAX_PAGES), allocator, PrefixCache(page_size, enabled))

    def poison(self, pages: PageIds) -> None:
        for page in pages.tolist():
            content = self.contents.pop(page, None)
            if content is not None and self.cached.get(content) == page:
                del self.cached[content]

    def model_match(self, ids: list[int], max_tokens: int) -> list[int]:
        pages: list[int] = []
        for n in range(self.page_size, min(len(ids), max_tokens) + 1, self.page_size):
            page = self.cached.get(tuple(ids[:n]))
            if page is None:
                break
            pages.append(page)
        return pages

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
        if not self.kv.grow(row, page_count(len(ids), self.page_size) - len(expected)):
            self.kv.release(row)
            return
        self.running.append(Life(row, list(ids), match.num_tokens, tag, len(expected)))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), num_tokens=st.integers(1, 8))
    def compute_and_cache(self, data: st.DataObject, num_tokens: int) -> None:
        """One prefill chunk: KV is written, then its full pages are offered."""
        life = data.draw(st.sampled_from(self.running))
        life.computed = min(len(life.ids), life.computed + num_tokens)
        pages = self.kv.rows.pages_of(life.row).tolist()
        num_full = life.computed // self.page_size
        for i in range(num_full):
            self.contents.setdefault(pages[i], life.content(i, self.page_size))
            if self.enabled:
                self.cached.setdefault(life.content(i, self.page_size), pages[i])
        new = range(life.offered, num_full)
        expected = sum(self.cached.get(life.content(i, self.page_size)) == pages[i] for i in new)
        life.offered = max(life.offered, num_full)
        assert self.kv.insert_prefix(life.row, as_keys(life.ids), life.computed) == expected
        assert self.kv.rows.pages_of(life.row).tolist() == pages

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 1))
    def decode(self, data: st.DataObject, token: int) -> None:
        life = data.draw(st.sampled_from(self.running))
        if len(life.ids) >= self.page_size * MAX_PAGES:
            return
        missing = page_count(len(life.ids) + 1, self.page_size) - int(self.kv.rows.num_pages[life.row])
        if self.kv.grow(life.row, missing):
            life.ids.append(token)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        life = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.kv.release(life.row)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tag=st.sampled_from(TAGS))
    def retag(self, data: st.DataObject, tag: str) -> None:
        life = data.draw(st.sampled_from(self.running))
        self.kv.set_tag(life.row, tag)
        life.tag = tag

    @rule(ids=prompts(min_size=0), max_tokens=st.integers(0, 15))
    def look_up(self, ids: list[int], max_tokens: int) -> None:
        """A peer's Offer that waits: it pins a path without a row."""
        match = self.kv.cache.match(as_keys(ids), max_tokens, "offer")
        assert match.pages.tolist() == self.model_match(ids, max_tokens)
        self.open_matches.append((match, ids))

    @precondition(lambda self: self.open_matches)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        match, _ = self.open_matches.pop(data.draw(st.integers(0, len(self.open_matches) - 1)))
        self.kv.cache.unlock(match.lock)

    @rule(n=st.integers(0, 4) | st.just(NUM_PAGES - 1))
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

    @precondition(lambda self: not self.running and not self.open_matches)
    @rule()
    def rest(self) -> None:
        self.kv.check_integrity(idle=True)
        assert self.kv.allocator.num_free + self.kv.cache.num_cached == self.kv.allocator.num_total

    @invariant()
    def everything_adds_up(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        assert self.kv.cache.num_cached == len(self.cached)
        assert sorted(self.kv.cache.cached_pages().tolist()) == sorted(self.cached.values())
        gauges = self.kv.gauges()
        assert sum(gauges.values()) == NUM_PAGES - 1 and min(gauges.values()) >= 0
        tags = [life.tag for life in self.running]
        assert all(self.kv.row_gauges()[tag] == tags.count(tag) for tag in TAGS)

    @invariant()
    def every_pointer_leads_to_its_prefix(self) -> None:
        for life in self.running:
            pages = self.kv.rows.pages_of(life.row).tolist()
            assert len(pages) == page_count(len(life.ids), self.page_size)
            for i in range(life.computed // self.page_size):
                assert self.contents[pages[i]] == life.content(i, self.page_size)
        for match, ids in self.open_matches:
            for i, page in enumerate(match.pages.tolist()):
                assert self.contents[page] == tuple(ids[: (i + 1) * self.page_size])

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for life in self.running:
            self.kv.release(life.row)
        for match, _ in self.open_matches:
            self.kv.cache.unlock(match.lock)
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
