"""Order the unlocked leaves of a prefix cache for eviction: spent ones, then plain ones, then kept ones.

    spent    branches that their conversation has left
    plain    all others, the longest unused first
    kept     ends of conversations that are expected back until a time

A leaf stands for its whole path, because only leaves are evicted. A kept leaf becomes plain when its time is over, when
a request uses it, or when more than half of the pool is kept. Then, and if only kept leaves are left, the oldest one of
the tenant that keeps most goes. So keeping changes only an order, and no request waits for it.

The oldest goes, because tools that have run for long go on for longer: the youngest of several will be
back first.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field

from shared.kv.cached_page import CachedPage

HEAP_SLACK = 64
KEPT_SHARE = 0.5  # of the pool's pages, what all tenants together may keep
SPENT = -1  # `used` of a page that is evicted before all plain ones
GONE = -1  # `stamp` of an evicted page


@dataclass(frozen=True, slots=True, eq=False)
class KeptPath:
    """`prompt_end`: the page that the conversation's next prompt has, even if it spells the answer otherwise.

    `num_prompt`: of the path down to it, the pages that belonged to no other conversation when the leaf was kept.
    `used`: the leaf's last use.
    """

    until: float
    tenant: int
    prompt_end: CachedPage
    num_prompt: int
    used: int


Timed = tuple[float, int, CachedPage, KeptPath]  # a time, push number, leaf


class PathPages:
    """The pages of some leaves' paths, each counted once, however many of the paths have it."""

    def __init__(self) -> None:
        self._uses: dict[CachedPage, int] = {}  # page -> its leaf (1), and its children in here

    def __len__(self) -> int:
        return len(self._uses)

    def count(self, leaf: CachedPage) -> None:
        page: CachedPage | None = leaf
        while page is not None and page.parent is not None:
            num = self._uses[page] = self._uses.get(page, 0) + 1
            page = page.parent if num == 1 else None

    def uncount(self, leaf: CachedPage) -> None:
        page: CachedPage | None = leaf
        while page is not None and page.parent is not None:
            self._uses[page] -= 1
            if self._uses[page]:
                return
            del self._uses[page]
            page = page.parent


@dataclass(slots=True)
class TenantKept:
    pages: PathPages = field(default_factory=PathPages)
    oldest_first: OrderedDict[CachedPage, KeptPath] = field(default_factory=OrderedDict)


class LeafOrder:
    """A call costs O(log n), amortized, and a keep its path's own pages, too.

    The owner sets `now`, in seconds, and `num_total`, the pool's pages."""

    def __init__(self, nodes: Sized) -> None:
        """`nodes`: all of the tree."""
        self.now = 0.0
        self.num_total = 0
        self._nodes = nodes
        self._pushes = itertools.count()
        # (used, push number, stamp, node); stale entries of both heaps are dropped when popped
        self._plain: list[tuple[int, int, int, CachedPage]] = []
        self._kept: dict[CachedPage, KeptPath] = {}
        self._leaf_of: dict[CachedPage, CachedPage] = {}  # prompt's end -> kept leaf
        self._soonest_first: list[Timed] = []  # by `until`
        self._tenants: dict[int, TenantKept] = {}
        self._kept_pages = PathPages()  # of all tenants
        self._horizon = 0  # latest use of an evicted plain leaf
        self.num_saved = 0  # pages used again that would have been evicted if they had not been kept

    def __len__(self) -> int:
        return len(self._plain)

    @property
    def num_kept(self) -> int:
        """Return the number of pages on kept paths."""
        return len(self._kept_pages)

    def evictable(self) -> set[CachedPage]:
        """Return all leaves that `pop` would find."""
        return {entry[3] for entry in self._plain if _is_current(entry)} | {n for n in self._kept if _is_leaf(n)}

    def push(self, node: CachedPage) -> None:
        """Add a leaf that was unlocked, or whose last child was evicted."""
        heapq.heappush(self._plain, (node.used, next(self._pushes), node.stamp, node))
        if len(self._plain) > 2 * len(self._nodes) + HEAP_SLACK:
            self._plain = list({entry[3]: entry for entry in self._plain if _is_current(entry)}.values())
            heapq.heapify(self._plain)

    def pop(self) -> CachedPage | None:
        """Take the leaf to evict next, or return None if there is none."""
        while self._soonest_first and self._soonest_first[0][0] <= self.now:
            _, _, node, kept = heapq.heappop(self._soonest_first)
            self._let_go(node, kept)
        while True:
            while self._plain:
                entry = heapq.heappop(self._plain)
                node = entry[3]
                if _is_current(entry) and node not in self._kept:
                    self._horizon = max(self._horizon, node.used)
                    node.stamp = GONE
                    return node
            if not self._kept:
                return None
            self._let_one_go()

    def keep(self, node: CachedPage, kept: KeptPath) -> None:
        """Keep a leaf. It may be locked meanwhile, by a copy."""
        if node in self._kept:
            self._forget(node)
        tenant = self._tenants.setdefault(kept.tenant, TenantKept())
        self._kept[node] = kept
        self._leaf_of[kept.prompt_end] = node
        tenant.pages.count(node)
        self._kept_pages.count(node)
        tenant.oldest_first[node] = kept
        self._push_timed((kept.until, next(self._pushes), node, kept))
        while self.num_kept > KEPT_SHARE * self.num_total:
            self._let_one_go()

    def use(self, node: CachedPage) -> None:
        """Note a request's use of a page. What was kept for it need not be kept."""
        leaf = self._leaf_of.get(node)
        if leaf is not None:
            kept = self._kept[leaf]
            self.num_saved += kept.num_prompt * (kept.used <= self._horizon)
            self._let_go(leaf, kept)

    def spend(self, path: Sequence[CachedPage]) -> None:
        """Let a leaf, and then the pages above it in `path`, be evicted first."""
        leaf = path[0]
        if leaf in self._kept:
            self._forget(leaf)
        for page in path:
            page.used = SPENT
        if _is_leaf(leaf):
            self.push(leaf)

    def _push_timed(self, entry: Timed) -> None:
        heapq.heappush(self._soonest_first, entry)
        if len(self._soonest_first) > 2 * len(self._kept) + HEAP_SLACK:
            self._soonest_first = [one for one in self._soonest_first if self._kept.get(one[2]) is one[3]]
            heapq.heapify(self._soonest_first)

    def _let_one_go(self) -> None:
        most = max(self._tenants.values(), key=lambda tenant: len(tenant.pages))
        self._let_go(*next(iter(most.oldest_first.items())))

    def _let_go(self, node: CachedPage, kept: KeptPath) -> None:
        if self._kept.get(node) is kept:
            self._forget(node)
            if _is_leaf(node):
                self.push(node)

    def _forget(self, node: CachedPage) -> None:
        kept = self._kept.pop(node)
        tenant = self._tenants[kept.tenant]
        tenant.pages.uncount(node)
        self._kept_pages.uncount(node)
        del tenant.oldest_first[node]
        if self._leaf_of.get(kept.prompt_end) is node:
            del self._leaf_of[kept.prompt_end]
        if not tenant.oldest_first:
            del self._tenants[kept.tenant]


def _is_leaf(node: CachedPage) -> bool:
    return node.refs == 0 and not node.children and node.stamp != GONE


def _is_current(entry: tuple[int, int, int, CachedPage]) -> bool:
    """Return whether a heap entry still stands for an unlocked leaf of the tree.

    A leaf gets a child only under a lock, so its next unlock changes the stamp.
    """
    used, _, stamp, node = entry
    return node.refs == 0 and node.stamp == stamp and node.used == used
