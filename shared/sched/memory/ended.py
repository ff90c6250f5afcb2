"""Find the cached pages of requests that have ended, to keep them by a router's word. Without this word, they are
evicted like all others."""

from __future__ import annotations

from collections import OrderedDict

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.kv.group_cache import by_group
from shared.kv.manager import KVManager
from shared.kv.prefix_cache import Lock, PrefixCache

MOST = 1024  # requests; a router's word comes within milliseconds of the end, or of the next answer's


class EndedRequests:
    """Scheduler thread only. Does nothing where a page group has a window: keeping a prefix needs all groups' pages."""

    def __init__(self, kv: KVManager) -> None:
        caches = by_group(kv.cache)
        self._cache = caches[0] if len(caches) == 1 and isinstance(caches[0], PrefixCache) else None
        if self._cache is not None:
            self._cache.leaves.num_total = kv.allocator.num_total
        self._ends: OrderedDict[RequestKey, tuple[Lock, int, int]] = OrderedDict()  # ended lock, tenant, prompt's pages

    def set_time(self, now: float) -> None:
        """`now`: in seconds, on any clock that only grows."""
        if self._cache is not None:
            self._cache.leaves.now = now

    def remember_end(self, req: Request, lock: Lock | None) -> None:
        if self._cache is not None and lock is not None:
            self._ends[req.key] = lock, req.ask.tenant, len(req.ask.prompt_ids) // self._cache.page_size
            if len(self._ends) > MOST:
                self._ends.popitem(last=False)

    def keep(self, key: RequestKey, seconds: float) -> None:
        """Keep the pages of an ended request for some seconds; 0: let them be evicted first. Ignore an unknown key."""
        lock, tenant, num_prompt = self._ends.get(key, (None, 0, 0))
        if self._cache is None or lock is None:
            return
        if seconds:
            self._cache.keep(lock, self._cache.leaves.now + seconds, tenant, num_prompt)
        else:
            self._cache.spend(lock)

    @property
    def num_saved_tokens(self) -> int:
        """Return how many cached tokens were used again that would have been evicted if they had not been kept."""
        return self._cache.leaves.num_saved * self._cache.page_size if self._cache is not None else 0
