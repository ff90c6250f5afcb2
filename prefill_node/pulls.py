"""Pulls: copy pages of prompts from another prefill node's cache instead of computing them.

    source named -> Pull sent -> Lent: row and pages reserved -> Ready: copied, checked -> in the prefix cache
                        |                 |                               |
                        '-----------------'--- no, late or broken --------'-> the prompt is computed.

The request waits in the scheduler without row and pages, at most as long as computing the pages would take. A row stays
reserved until the last copy into its pages has ended, even if the pull ends earlier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.core.errors import BatonError, HandoffFailed
from shared.core.keys import RequestKey
from shared.core.page_identity import adapter_of
from shared.core.request import Request, TokenIds
from shared.node.loop.context import NodeContext
from shared.node.loop.page_copies import PageCopies
from shared.node.records.leases import Leases
from shared.node.records.page_ranges import PageRanges
from shared.observe.metric_names import PULL_PREFIX
from shared.transfer.interface import WHOLE, PageReceiver, part_of, require_frames
from shared.wire.codec import key_of
from shared.wire.messages import FramesTaken, Generate, Key, Lent, Pull, Ready, Returned
from shared.wire.peers import Received, peer_name
from shared.wire.ranges import MAX_PULL_TOKENS

MOST_PULLS, MOST_OF_ONE_SOURCE = 32, 8
MOST_PINNED = 0.5  # share of the pool's pages that pulls may reserve
LONGEST_S = 10.0
SHUNNED_S = 5.0  # time for which a late source is not asked
MAX_SHUNNED = 256
TRANSPORTS = ("shm", "zmq")  # these need neither a process group nor a library's handle
NO_COST = ("ended", "lost")  # outcomes that do not show a pull's cost: their time is not counted


@dataclass(slots=True, eq=False)
class PrefixPull:
    """Pulls pages [first, num_pages) of a prompt's tokens, in all page groups.

    `keys`: the keys of all `num_pages` pages. `row`, `ranges`: 0 and None until the source lends pages."""

    key: Key
    request: Request
    source: str
    lease: int
    began: float
    until: float
    first: int
    num_pages: int
    keys: TokenIds
    transport: str = ""
    row: int = 0
    ranges: PageRanges | None = None
    num_pulling: int = 0


class Pulls:
    """Owns pulls."""

    def __init__(self, ctx: NodeContext, receivers: Mapping[str, PageReceiver]) -> None:
        self._ctx = ctx
        self._leases = Leases(ctx.facts.epoch)
        self._shunned: dict[str, float] = {}  # source -> time until which it is not asked
        self._sources: set[str] = set()  # asked sources that are not known to be gone
        self._by_request: dict[RequestKey, PrefixPull] = {}
        self.open: dict[int, PrefixPull] = {}  # by lease
        self.copies: PageCopies[PrefixPull] = PageCopies(ctx, receivers, "pull prefix")

    def begin(self, generate: Generate, req: Request, now: float) -> str | None:
        """Request pages from the source that the router named. Return the source; None if no pull has begun."""
        source = generate.source
        if source is None or req.key not in self._ctx.core.requests or not self._can_pull(req):
            return None
        peer = peer_name(source.node, source.epoch)
        if self._shunned.get(peer, now) > now or not self._may_ask(peer):
            self._count("not_asked")
            return None
        settings, ids = self._ctx.core.settings, req.all_ids()
        num_tokens = source.num_pages * settings.page_size
        if not 0 < num_tokens < min(len(ids), MAX_PULL_TOKENS + 1):  # one token is always left to compute
            return None
        asked = ids[: num_tokens + settings.drafts.key_lookahead]
        keys = self._ctx.core.queues.budget.prefix_keys(req, asked)[:num_tokens]
        # the router names pages by the prompt, also if a resumed answer has outgrown the short context
        named = adapter_of(generate.adapter, len(req.ask.prompt_ids), settings.adapters.short_context)
        if named != req.ask.adapter:
            self._count("not_asked")
            return None
        first = self._num_cached(keys)
        if first >= source.num_pages:
            self._count("cached_here")
            return None
        prefixes = self._ctx.core.queues.prefixes
        if prefixes.makes_wait(req):
            self._count("under_way")
            return None
        prefixes.begin(req, pages=slice(self._first_led(first, source.num_pages), source.num_pages))
        until = now + min(LONGEST_S, source.within_ms / 1000)
        pull = PrefixPull(generate.key, req, peer, self._leases.next(), now, until, first, source.num_pages, keys)
        self.open[pull.lease] = self._by_request[req.key] = pull
        req.awaits_prefix = True
        self._sources.add(peer)
        self._ctx.outbox.dial(peer, source.endpoint, brings_pages=True)
        self._ask(pull, generate, asked)
        return peer

    def _ask(self, pull: PrefixPull, generate: Generate, asked: TokenIds) -> None:
        source, facts = generate.source, self._ctx.facts
        assert source is not None
        message = Pull(
            key=pull.key,
            lease=pull.lease,
            prompt_ids=asked.tolist(),
            first_page=pull.first,
            num_pages=pull.num_pages,
            last_page=source.last_page,
            within_ms=source.within_ms,
            fingerprint=facts.fingerprint,
            host_id=facts.host_id,
            transports=list(self.copies.receivers),
            adapter=pull.request.ask.adapter,
            cache_salt=generate.cache_salt,
            ticket=source.ticket,
        )
        self._ctx.outbox.send(pull.source, message)

    def _may_ask(self, peer: str) -> bool:
        num_asked = sum(pull.source == peer for pull in self.open.values())
        return len(self.open) < MOST_PULLS and num_asked < MOST_OF_ONE_SOURCE

    def _can_pull(self, req: Request) -> bool:
        """Return False if log-probabilities of early prompt tokens are wanted."""
        has_cache = self._ctx.core.kv.cache.enabled
        return has_cache and bool(self.copies.receivers) and req.first_unscored is None

    def _num_cached(self, keys: TokenIds) -> int:
        kv = self._ctx.core.kv
        return len(kv.cache.find(keys, len(keys)).pages) // kv.num_groups

    def _first_led(self, first: int, num_pages: int) -> int:
        """Return the first page for which other prompts wait, while pages [first, num_pages) of tokens come.

        A prompt may begin behind each page whose windows are here or come. Where only a window's last pages come, that
        is the last page alone."""
        windows_begin = max(self._ctx.core.kv.cache.first_needed(num_pages * self._ctx.core.settings.page_size))
        return first if windows_begin <= first else num_pages - 1

    # ---- the source's answers

    def receive(self, received: Received, message: Lent | Ready, now: float) -> None:
        pull = self.open.get(message.lease)
        if pull is None or pull.source != received.peer or pull.key != message.key:
            self._ctx.drop_late(received.peer, "pages of no pull that is out", key_of(message.key))
            return
        try:
            if isinstance(message, Lent):
                self._lent(pull, message, now)
            else:
                self._ready(pull, received, message)
        except HandoffFailed as error:
            self._give_up(pull, "failed", error.message, now)

    def _lent(self, pull: PrefixPull, lent: Lent, now: float) -> None:
        if not lent.num_pages:
            self._give_up(pull, "refused", lent.reason, now)
            return
        if pull.row:
            return  # this answer has come before
        if not pull.first < lent.num_pages <= pull.num_pages or lent.transport not in self.copies.receivers:
            raise HandoffFailed(f"an invalid loan: {lent.num_pages} pages by {lent.transport!r}")
        row = self._reserve(pull, lent.num_pages)
        if row is None:
            self._give_up(pull, "no_memory", "no memory for the pages", now)
            return
        pull.row, pull.num_pages, pull.transport = row, lent.num_pages, lent.transport
        num_groups = self._ctx.core.kv.num_groups
        pages = self._ctx.core.pages_of(row)[: pull.num_pages * num_groups]
        pull.ranges = PageRanges(pages, pull.first * num_groups)

    def _reserve(self, pull: PrefixPull, num_pages: int) -> int | None:
        """Reserve a row, and memory that no waiting prompt and no running row needs. Return None if too little is
        free."""
        core, kv = self._ctx.core, self._ctx.core.kv
        waiting = [req for req in core.queues.waiting if req.may_begin]
        if waiting and kv.rows.num_free <= len(waiting) + 1:
            return None
        pulls = [*self.open.values(), *(pull for pull, _ in self.copies.held)]
        pinned = sum(other.ranges.num_wanted for other in pulls if other.ranges is not None)
        if pinned + core.queues.budget.num_pulled(pull.first, num_pages) > MOST_PINNED * kv.allocator.num_total:
            return None
        keep_free = core.scheduler.capacity.wanted()
        owner = f"pull for {pull.request.key}"
        return core.queues.budget.reserve_pulled(pull.keys, pull.first, num_pages, keep_free, owner)

    def _ready(self, pull: PrefixPull, received: Received, ready: Ready) -> None:
        """Pull announced pages, unless they were announced before. Raise HandoffFailed for pages that were not lent."""
        if not ready.pages:
            return
        if pull.ranges is None:
            raise HandoffFailed("pages before a loan")
        if part_of(ready, self._ctx.core.pool) != WHOLE:
            raise HandoffFailed("a part of a page, although whole pages were lent")
        require_frames(ready, received.frames, self._ctx.core.pool)
        if ready.inline:
            self._ctx.outbox.send(pull.source, FramesTaken(pull.key, pull.lease))
        if pull.ranges.claim(ready.first_page, len(ready.pages)):
            self.copies.launch(pull, pull.transport, ready, received.frames)

    # ---- one round

    def poll(self, now: float) -> None:
        for pull, ready, error in self.copies.take_done():
            if self.open.get(pull.lease) is not pull:
                continue
            if error is not None:
                self._give_up(pull, "failed", error.message, now)
                continue
            assert pull.ranges is not None
            pull.ranges.arrived(ready.first_page, len(ready.pages))
            if pull.ranges.complete:
                self._complete(pull, pull.ranges.num_wanted, now)
        for pull in [pull for pull in self.open.values() if pull.until <= now]:
            self._shun(pull.source, now)
            self._give_up(pull, "late", "computing is faster now", now)
        self.copies.free_held()

    def _complete(self, pull: PrefixPull, num_pulled: int, now: float) -> None:
        """Put the pages into the prefix cache, where the pull's request finds them. `num_pulled`: of all groups."""
        core = self._ctx.core
        core.kv.insert_prefix(pull.row, pull.keys, pull.num_pages * core.settings.page_size)
        core.queues.budget.release_held(pull.row)
        self._ctx.metrics.count("pulled_pages", num_pulled)
        self._ctx.metrics.count("pulled_tokens", (pull.num_pages - pull.first) * core.settings.page_size)
        self._over(pull, "pulled", now)
        self._ctx.outbox.send(pull.source, Returned(pull.key, pull.lease))

    def _give_up(self, pull: PrefixPull, outcome: str, why: str, now: float) -> None:
        """Let this node compute the prompt, and let the source unpin the pages."""
        self._ctx.log.info((pull.source, outcome), "computes a prefix", source=pull.source, outcome=outcome, why=why)
        self._drop(pull, outcome, now)
        self._ctx.outbox.send(pull.source, Returned(pull.key, pull.lease))

    def _drop(self, pull: PrefixPull, outcome: str, now: float) -> None:
        self._over(pull, outcome, now)
        if pull.row and not self.copies.end(pull, now):
            self._ctx.core.queues.budget.hold_pulled(pull.row)

    def _over(self, pull: PrefixPull, outcome: str, now: float) -> None:
        del self.open[pull.lease], self._by_request[pull.request.key]
        pull.request.awaits_prefix = False
        self._ctx.core.queues.prefixes.leave(pull.request)
        self._count(outcome)
        if outcome not in NO_COST:
            self._ctx.metrics.count("pull_seconds", max(0.0, now - pull.began))

    def _count(self, outcome: str) -> None:
        self._ctx.metrics.count(f"{PULL_PREFIX}{outcome}")

    def _shun(self, source: str, now: float) -> None:
        self._shunned = {name: until for name, until in self._shunned.items() if until > now}
        if len(self._shunned) < MAX_SHUNNED:
            self._shunned[source] = now + SHUNNED_S

    # ---- ends

    def ended(self, key: RequestKey, now: float) -> None:
        pull = self._by_request.get(key)
        if pull is not None:
            self._drop(pull, "ended", now)
            self._ctx.outbox.send(pull.source, Returned(pull.key, pull.lease))

    def preempted(self, row: int, now: float) -> None:
        """Give up the pull into this row, whose memory the scheduler has taken."""
        for pull in [pull for pull in self.open.values() if pull.row == row]:
            self._give_up(pull, "gave_way", "others need the memory", now)

    def peer_closed(self, peer: str, error: BatonError) -> None:
        """End the pulls from a lost source. Send nothing: a message would only wait in a queue."""
        lost = [pull for pull in self.open.values() if pull.source == peer]
        for pull in lost:
            self._ctx.log.info((peer, "lost"), "computes a prefix", source=peer, outcome="lost", why=error.message)
            self._drop(pull, "lost", pull.until)
        if peer in self._sources:
            self._sources.discard(peer)
            self.copies.forget_dead()

    @property
    def wakes_at(self) -> float:
        return min((pull.until for pull in self.open.values()), default=float("inf"))
