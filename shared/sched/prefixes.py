"""Know which pages of prompts are under way, so that a common prefix is computed once.

    leader     brings pages that others need; they enter the prefix cache as its chunks are processed, or as they arrive
    follower   waits while the next page that it lacks is under way; then it finds the page in the cache

A follower holds no memory and leads no one. It waits only for its own source: this node's prompts, or one prefill
node's hand-offs. An identity (`shared.core.page_identity`) covers the adapter, the salt and all earlier pages.
"""

from __future__ import annotations

from shared.core.page_identity import identities
from shared.core.request import Request
from shared.sched.page_budget import PageBudget

HERE = ""  # the source of prompts that this node computes
Page = tuple[str, bytes]  # source and identity


class PrefixesUnderWay:
    def __init__(self, budget: PageBudget, page_size: int) -> None:
        self._budget = budget
        self._page_size = page_size
        self._leaders: dict[Page, Request] = {}  # who brings the page
        self._leads: dict[Request, list[Page]] = {}  # its pages under way, the last one first
        self._waits_for: dict[Request, tuple[Request, int]] = {}  # follower -> leader and index of the next page
        self._wanted: dict[Request, int] = {}  # leader -> tokens that its shortest follower lacks

    def begin(self, req: Request, source: str = HERE, pages: slice | None = None) -> None:
        """Note that pages of the request's prompt are under way; by default all from token `req.computed` on."""
        if req.lacks_draft_state or not self._budget.kv.cache.enabled:
            return
        part = slice(req.computed // self._page_size, None) if pages is None else pages
        own = [page for name in self._names(req)[part] if (page := (source, name)) not in self._leaders]
        self._leads[req] = own[::-1]
        self._leaders.update(dict.fromkeys(own, req))

    def advance(self, req: Request) -> None:
        """Note that the cache has the request's pages up to token `req.computed`."""
        if pages := self._leads.get(req):
            num_left = max(0, len(self._names(req)) - req.computed // self._page_size)
            while len(pages) > num_left:
                del self._leaders[pages.pop()]

    def leave(self, req: Request) -> None:
        """Forget a request that brings no more pages, and no longer waits."""
        for page in self._leads.pop(req, ()):
            del self._leaders[page]
        self.stop_waiting(req)
        self._wanted.pop(req, None)

    def stop_waiting(self, req: Request) -> None:
        self._waits_for.pop(req, None)

    def new_round(self) -> None:
        self._wanted.clear()

    def makes_wait(self, req: Request, source: str = HERE) -> bool:
        """Return whether the request should wait. Its leader then counts as short as the request, so that waiting
        takes no longer than computing."""
        found = self._leader_of(req, source) if self._leaders else None
        if found is None:
            self.stop_waiting(req)
            return False
        leader, index = self._waits_for[req] = found
        lacking = req.num_tokens - index * self._page_size
        self._wanted[leader] = min(lacking, self._wanted.get(leader, lacking))
        return True

    def urgency(self, req: Request, remaining: int) -> int:
        """Return the tokens that the request or its shortest follower lacks."""
        return min(remaining, self._wanted.get(req, remaining))

    def _leader_of(self, req: Request, source: str) -> tuple[Request, int] | None:
        """Return who brings the first page under way, and the page's index."""
        names = self._names(req)
        known = self._waits_for.get(req)
        if known is not None and self._leaders.get((source, names[known[1]])) is known[0]:
            return known
        most = req.num_tokens - 1 if req.first_unscored is None else req.first_unscored - 1
        for index, name in enumerate(names[: most // self._page_size]):
            leader = self._leaders.get((source, name))
            if leader is not None:
                return leader, index
        return None

    def _names(self, req: Request) -> list[bytes]:
        """Return the identities of the prompt's full pages."""
        if req.page_names is None:
            keys = self._budget.prefix_keys(req, req.prompt_ids)
            num_full = len(keys) // self._page_size * self._page_size
            req.page_names = list(identities(keys[:num_full].tobytes(), self._page_size))
        return req.page_names
