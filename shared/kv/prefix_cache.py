"""Cache prefixes in a radix tree with one node per page. Keys are int64, one per token.

    root -- key of page 0 --> node(page 7) -- key of page 1 --> node(page 3)   <- lock of "r1"
                                           `- key of page 1 --> node(page 9)   unlocked leaf: evictable

A node's `refs` counts its locks and its children with refs > 0. So a lock pins the whole path above it, and
locking a pinned path costs one addition.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from shared.core.errors import IntegrityError
from shared.core.page_identity import KEY_BYTES, ROOT, child_identity
from shared.kv.cached_page import CachedPage
from shared.kv.leaf_order import GONE, KeptPath, LeafOrder
from shared.kv.pages import PageIds

Keys = npt.NDArray[np.int64]
Added = tuple[bytes, bytes]  # a page's keys, and the identity of the page before it
Listener = Callable[[bytes, Added | None], None]  # gets the identity of a page that is cached now, or (None) gone
Firsts = tuple[int, ...]  # the first page of each page group that a step may read; (): 0 in all


@dataclass(slots=True, eq=False)
class Lock:
    """A lock pins the first num_pages pages of a path from the root.

    Without a match, `node` is None: the lock pins nothing, but must be unlocked once. A lock of a WindowCache has no
    node and pins `pages`: index in the request -> page; `identity` is that of page num_pages - 1.
    """

    node: CachedPage | None
    num_pages: int
    owner: str
    held: bool = True
    pages: dict[int, int] = field(default_factory=dict)
    identity: bytes = ROOT
    is_copy: bool = False  # whether the lock is for a copy
    parts: tuple[Lock, ...] = ()  # of a GroupCache: one lock per page group


@dataclass(frozen=True, slots=True)
class Found:
    """The longest cached prefix, which nothing pins yet. It is valid until the cache changes; see Match and Lock.

    `num_evictable`: how many of its pages a lock takes from the cache's `num_evictable`.
    """

    pages: PageIds
    num_evictable: int
    num_pages: int
    node: CachedPage | None = None
    identity: bytes = ROOT
    next_key: bytes = b""  # of the first page that is not cached, if the search was not at its end; see `has_news`
    num_added: int = 0  # by a WindowCache when this was found
    parts: tuple[Found, ...] = ()  # of a GroupCache: what each page group's cache found


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix. Page number 0: a page that no window reaches. Unlock `lock` or pass it to `insert`."""

    pages: PageIds
    num_tokens: int
    lock: Lock


class PrefixCache:
    """Scheduler thread only. Pages enter by `insert` and leave only by `evict` and `flush`."""

    def __init__(self, page_size: int, enabled: bool = True) -> None:
        self.page_size = page_size
        self.windows = (0,)  # of its page group; 0: its layers read all tokens
        self.enabled = enabled
        self._root = CachedPage(b"", 0, None, ROOT)
        self._nodes: dict[int, CachedPage] = {}  # by page id
        self._locks: set[Lock] = set()
        self._num_evictable = 0
        self.num_pins = 0  # how often a request or a copy has locked evictable pages
        self._clock = itertools.count(1)
        self.leaves = LeafOrder(self._nodes)
        self.listener: Listener | None = None
        # nodes that `take_cold` has not returned since their last use, in the order of unlocking; copies may lock them
        self._cold: dict[CachedPage, None] = {}

    @property
    def num_cached(self) -> int:
        return len(self._nodes)

    @property
    def num_evictable(self) -> int:
        """Return the number of pages on no locked path."""
        return self._num_evictable

    def cached_pages(self) -> PageIds:
        return np.fromiter(self._nodes, np.int32, len(self._nodes))

    def is_locked(self, page: int) -> bool:
        node = self._nodes.get(page)
        return node is not None and node.refs > 0

    def take_cold(self, most: int) -> list[CachedPage]:
        """Return up to `most` nodes: the longest unused one, then its ancestors. Each use returns a node once."""
        nodes: list[CachedPage] = []
        node = next(iter(self._cold), None)
        while node is not None and node in self._cold and len(nodes) < most:
            del self._cold[node]
            nodes.append(node)
            node = node.parent
        return nodes

    def cached_names(self) -> list[bytes]:
        return [self.identity_of(node) for node in self._nodes.values()]

    def identity_of(self, node: CachedPage) -> bytes:
        """See `shared.core.page_identity`."""
        path = []
        while not node.identity:
            assert node.parent is not None  # the root has an identity
            path.append(node)
            node = node.parent
        for child in reversed(path):
            child.identity = child_identity(node.identity, child.key)
            node = child
        return node.identity

    def pin(self, nodes: Sequence[CachedPage], owner: str) -> Lock:
        """Lock the path from the root to the first node while the path's pages are copied.

        This lock does not count as a use: otherwise a tier smaller than the cache would copy pages forever, and pages
        would leave in an order in which they are not copied.
        """
        node = nodes[0]
        depth, walk = 1, node.parent
        while walk is not None and walk is not self._root:
            depth, walk = depth + 1, walk.parent
        return self._lock(node, depth, owner, is_copy=True)

    def match(self, keys: Keys, max_tokens: int, owner: str = "unnamed", firsts: Firsts = ()) -> Match:
        """Return the longest cached prefix of at most max_tokens tokens, locked for `owner`."""
        return self.lock(self.find(keys, max_tokens, firsts), owner)

    def find(self, keys: Keys, max_tokens: int, firsts: Firsts = ()) -> Found:
        """Return what `match` would lock, without a lock. This does not count as a use."""
        node, nodes = self._root, list[CachedPage]()
        next_key = b""
        for key in self._page_keys(keys, max(0, min(len(keys), max_tokens)) // self.page_size):
            child = node.children.get(key)
            if child is None:
                next_key = key
                break
            node = child
            nodes.append(child)
        num_pinned = bisect.bisect_left(nodes, True, key=lambda page: page.refs == 0)  # pinned paths begin at the root
        pages = np.fromiter((page.page for page in nodes), np.int32, len(nodes))
        return Found(pages, len(nodes) - num_pinned, len(nodes), node, next_key=next_key)

    def has_news(self, found: Found) -> bool:
        """Return whether the page after `found` is cached now, or pages of `found` are gone."""
        node = found.node
        assert node is not None
        is_gone = node is not self._root and self._nodes.get(node.page) is not node
        return is_gone or (bool(found.next_key) and found.next_key in node.children)

    def lock(self, found: Found, owner: str) -> Match:
        assert found.node is not None
        self.num_pins += found.num_evictable > 0
        lock = self._lock(found.node, found.num_pages, owner)
        return Match(found.pages, len(found.pages) * self.page_size, lock)

    def insert(self, keys: Keys, pages: PageIds, lock: Lock) -> tuple[Lock, npt.NDArray[np.bool_]]:
        """Offer the first len(pages) full pages of a request; `keys` cover them.

        taken[i]: whether the cache took page i now. If the cache has another page for the same key, the caller keeps
        page i. The lock moves to the deepest node, unless it is already deeper. Pages under the lock cost nothing.
        """
        self._require_held(lock)
        taken = np.zeros(len(pages), np.bool_)
        if not self.enabled or len(pages) <= lock.num_pages:
            return lock, taken
        if len(keys) < len(pages) * self.page_size:
            raise IntegrityError(f"insert for {lock.owner!r}: {len(keys)} keys do not cover {len(pages)} pages")
        ids: list[int] = pages.tolist()
        node, depth, missing = lock.node or self._root, lock.num_pages, b""
        todo = self._page_keys(keys, len(ids), max(0, depth - 1))
        if depth and next(todo) != node.key:
            raise IntegrityError(f"insert for {lock.owner!r}: keys of page {depth - 1} are not those of its lock")
        for key in todo:
            child = node.children.get(key)
            if child is None:
                missing = key
                break
            node = child
            taken[depth] = node.page == ids[depth]
            depth += 1
        if depth < len(ids):
            self._refuse_bad(ids[depth:], lock)
            node = self._extend(node, itertools.chain((missing,), todo), ids[depth:])
            taken[depth:] = True
        new_lock = self._lock(node, len(pages), lock.owner)  # before the old lock ends, so the path stays pinned
        self.unlock(lock)
        return new_lock, taken

    def first_needed(self, num_tokens: int) -> Firsts:
        """Return 0: every page is needed."""
        return (0,)

    def trim(self, lock: Lock, firsts: Firsts) -> None:
        """Do nothing: every page is needed."""
        self._require_held(lock)

    def unlock(self, lock: Lock) -> None:
        self._require_held(lock)
        lock.held = False
        self._locks.discard(lock)
        stamp = next(self._clock)
        node = lock.node
        while node is not None and node.parent is not None:
            node.refs -= 1
            if not lock.is_copy:
                self.leaves.use(node)
                node.used, node.is_due = stamp, True
            if node.refs > 0:
                break
            node.stamp = stamp
            self._num_evictable += 1
            if node.is_due:
                self._cold[node], node.is_due = None, False
                node.parent.used, node.parent.is_due = max(node.parent.used, node.used), True
                if lock.is_copy:
                    self.leaves.use(node.parent)
            if not node.children:
                self.leaves.push(node)
            node = node.parent

    def keep(self, end: Lock, until: float, tenant: int, num_prompt: int) -> None:
        """Evict the path of a lock that was unlocked after others, until a time on the clock of `leaves.now`.

        num_prompt: the number of its pages that only the prompt fills."""
        node = end.node
        if node is None or node.children or node.stamp == GONE:
            return
        path = [node, *self._above(node)]
        num_own = 1 + sum(1 for _ in takewhile(lambda page: len(page.children) == 1, path[1:]))
        num_answer = min(max(0, end.num_pages - num_prompt), len(path) - 1)
        own_prompt = max(0, num_own - num_answer)
        self.leaves.keep(node, KeptPath(until, tenant, path[num_answer], own_prompt, node.used))

    def spend(self, end: Lock) -> None:
        """Evict the path of a lock that was unlocked first, as far as nothing else has it."""
        node = end.node
        if node is not None and not node.children and node.stamp != GONE and node.refs == 0:
            alone = takewhile(lambda page: page.refs == 0 and len(page.children) == 1, self._above(node))
            used = node.used
            self.leaves.spend([node, *takewhile(lambda page: page.used == used, alone)])

    def _above(self, node: CachedPage) -> Iterator[CachedPage]:
        while node.parent is not None and node.parent is not self._root:
            node = node.parent
            yield node

    def num_freed_by(self, lock: Lock) -> int:
        """Return how many pages no other lock pins."""
        count, node = 0, lock.node
        while node is not None and node is not self._root and node.refs == 1:
            count, node = count + 1, node.parent
        return count

    def evict(self, n: int) -> PageIds:
        """Return at most n pages for the caller to free, in the order of `leaves`."""
        pages: list[int] = []
        while len(pages) < n and (node := self.leaves.pop()) is not None:
            pages.append(self._remove(node))
        return np.array(pages, dtype=np.int32)

    def flush(self) -> PageIds:
        return self.evict(self._num_evictable)

    def _page_keys(self, keys: Keys, num_pages: int, first: int = 0) -> Iterator[bytes]:
        width = self.page_size * KEY_BYTES
        part = keys[first * self.page_size : num_pages * self.page_size]
        data = np.ascontiguousarray(part, dtype=np.int64).tobytes()
        return (data[start : start + width] for start in range(0, len(data), width))

    def _lock(self, node: CachedPage, num_pages: int, owner: str, is_copy: bool = False) -> Lock:
        lock = Lock(node if num_pages else None, num_pages, owner, is_copy=is_copy)
        self._locks.add(lock)
        walk: CachedPage | None = lock.node
        while walk is not None and walk is not self._root:
            walk.refs += 1
            if walk.refs > 1:
                break
            self._num_evictable -= 1
            if not is_copy:
                self._cold.pop(walk, None)
            walk = walk.parent
        return lock

    def _refuse_bad(self, ids: list[int], lock: Lock) -> None:
        for page in ids:
            if page == 0 or page in self._nodes:
                raise IntegrityError(f"insert for {lock.owner!r}: page {page} is the sink or cached under another key")
        if len(set(ids)) != len(ids):
            raise IntegrityError(f"insert for {lock.owner!r}: a page is listed twice in {ids}")

    def _extend(self, node: CachedPage, keys: Iterator[bytes], ids: list[int]) -> CachedPage:
        """Add a chain, which is evictable until `insert` locks it."""
        for key, page in zip(keys, ids, strict=True):
            child = CachedPage(key, page, node)
            node.children[key] = child
            self._nodes[page] = child
            if self.listener is not None:
                self.listener(self.identity_of(child), (key, self.identity_of(node)))
            node = child
        self._num_evictable += len(ids)
        return node

    def _remove(self, node: CachedPage) -> int:
        parent = node.parent
        assert parent is not None  # the root is never on the heap
        if self.listener is not None:
            self.listener(self.identity_of(node), None)
        del parent.children[node.key]
        del self._nodes[node.page]
        self._cold.pop(node, None)
        self._num_evictable -= 1
        if parent is not self._root and not parent.children and parent.refs == 0:
            self.leaves.push(parent)
        node.parent = None  # so what still knows the page, as an ended lock does, holds no more of its path
        return node.page

    def _require_held(self, lock: Lock) -> None:
        if not lock.held:
            raise IntegrityError(f"lock of {lock.owner!r} ({lock.num_pages} pages) was given back already")
        if lock not in self._locks:
            raise IntegrityError(f"lock of {lock.owner!r} ({lock.num_pages} pages) is not one of this cache")

    def problems(self, expect_idle: bool = False) -> list[str]:
        nodes = self._walk()
        held = self._locks if expect_idle else ()
        found = [f"lock of {lock.owner!r} on {lock.num_pages} pages is still held" for lock in held]
        counts = Counter(node.page for node in nodes)
        found += [f"page {page} is cached twice" for page, count in counts.items() if count > 1]
        if {id(node) for node in nodes} != {id(node) for node in self._nodes.values()}:
            found.append(f"{len(nodes)} nodes in the tree, {len(self._nodes)} in the page map")
        found += self._ref_problems(nodes)
        evictable = sum(node.refs == 0 for node in nodes)
        if evictable != self._num_evictable:
            found.append(f"{evictable} evictable pages, the counter says {self._num_evictable}")
        found += [f"page {node.page} is gone and counts as cold" for node in self._cold.keys() - set(nodes)]
        lost = {node for node in nodes if node.refs == 0 and not node.children} - self.leaves.evictable()
        return found + [f"page {node.page} is an unlocked leaf that eviction would never find" for node in lost]

    def _ref_problems(self, nodes: list[CachedPage]) -> list[str]:
        direct: dict[int, list[str]] = {}
        for lock in self._locks:
            if lock.node is not None:
                direct.setdefault(id(lock.node), []).append(lock.owner)
        found = []
        for node in nodes:
            owners = direct.pop(id(node), [])
            refs = len(owners) + sum(child.refs > 0 for child in node.children.values())
            if refs != node.refs:
                found.append(f"page {node.page} has {node.refs} refs, its locks {owners} and children give {refs}")
        gone = [owner for owners in direct.values() for owner in owners]
        return found + [f"lock of {owner!r} pins a page that left the cache" for owner in gone]

    def _walk(self) -> list[CachedPage]:
        nodes: list[CachedPage] = []
        todo = list(self._root.children.values())
        while todo:
            node = todo.pop()
            nodes.append(node)
            todo.extend(node.children.values())
        return nodes
