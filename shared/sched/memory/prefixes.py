"""Know which pages of prompts are under way, so that a common prefix is computed once.

    leader     brings pages that others need; they enter the prefix cache as its chunks are processed, or as they arrive
    follower   waits while the next page that it lacks is under way; then it finds the page in the cache

A follower holds no memory and leads no one. It waits only for its own source: this node's prompts, or one prefill
node's hand-offs. An identity (`shared.core.page_identity`) covers the adapter, the salt and all earlier pages.
"""

from __future__ import annotations

from shared.core.page_identity import identities
from shared.core.request import Request
from shared.sched.memory.page_budget import PageBudget
from shared.sched.steps.settings import SchedSettings

MOST_NAMED = 1 << 16  # prompt tokens hashed in one round: the steps of others wait meanwhile
HERE = ""  # the source of prompts that this node computes
Page = tuple[str, bytes]  # source and identity


class PrefixesInFlight:
    def __init__(self, budget: PageBudget, settings: SchedSettings) -> None:
        self._budget = budget
        self._page_size = settings.page_size
        self._lookahead = settings.drafts.key_lookahead
        self._num_named = 0  # prompt tokens, in this round
        self._leaders: dict[Page, Request] = {}  # who brings the page
        self._leads: dict[Request, list[Page]] = {}  # its pages under way, the last one first
        self._waits_for: dict[Request, tuple[Request, int]] = {}  # follower -> leader and index of the next page
        self._num_begun = 0
        self._alone: dict[Request, tuple[str, int]] = {}  # without a leader of its source, at this `_num_begun`
        self._wanted: dict[Request, int] = {}  # leader -> tokens that its shortest follower lacks

    def begin(self, req: Request, source: str = HERE, pages: slice | None = None) -> None:
        """Note that pages of the request's prompt are under way; by default all from token `req.computed` on.

        A prompt whose tokens are scored leads no others: it is computed although it may be cached."""
        if req.lacks_draft_state or req.first_unscored is not None or not self._budget.kv.cache.enabled:
            return
        part = slice(req.computed // self._page_size, None) if pages is None else pages
        own = [page for name in self._names(req)[part] if (page := (source, name)) not in self._leaders]
        self._leads[req] = own[::-1]
        self._num_begun += bool(own)
        self._leaders.update(dict.fromkeys(own, req))

    def advance(self, req: Request) -> None:
        """Note that the cache has the request's pages up to token `req.computed`."""
        if pages := self._leads.get(req):
            num_cached = max(0, req.computed - self._lookahead) // self._page_size
            num_left = max(0, len(self._names(req)) - num_cached)
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
        self._alone.pop(req, None)

    def follows(self, req: Request) -> bool:
        return req in self._waits_for

    def new_round(self) -> None:
        self._wanted.clear()
        self._num_named = 0

    def makes_wait(self, req: Request, source: str = HERE) -> bool:
        """Return whether the request should wait. Its leader then counts as short as the request, so that waiting
        takes no longer than computing."""
        if self._leaders and req.page_names is None:
            if self._num_named >= MOST_NAMED:
                return True  # the next round looks
            self._num_named += len(req.ask.prompt_ids)
        is_alone = self._alone.get(req) == (source, self._num_begun)
        found = self._leader_of(req, source) if self._leaders and not is_alone else None
        if found is None:
            self.stop_waiting(req)
            self._alone[req] = source, self._num_begun
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
        _, first = self._waits_for.get(req, (None, 0))  # earlier pages have come
        most = req.num_tokens - 1 if req.first_unscored is None else req.first_unscored - 1
        for index in range(first, min(len(names), most // self._page_size)):
            leader = self._leaders.get((source, names[index]))
            if leader is not None:
                return leader, index
        return None

    def _names(self, req: Request) -> list[bytes]:
        """Return the identities of the prompt's full pages."""
        self._budget.settle(req)
        if req.page_names is None:
            keys = self._budget.prefix_keys(req, req.ask.prompt_ids)
            num_full = len(keys) // self._page_size * self._page_size
            req.page_names = list(identities(keys[:num_full].tobytes(), self._page_size))
        return req.page_names
