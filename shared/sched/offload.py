"""Offload: pages leave the pool for the cold tier and come back by copy, not by computing them again.

    save      cached pages that nobody uses, long before eviction       pinned, read, unpinned
    park      a running request that is retracted                       its row is held until its pages are out
    restore   at admission, behind what the prefix cache gave           into the row's own pages, digests checked

All copies run on the cold stream, in launch order, and their ends are inputs of a later round. Hand-offs run beside
them on the transfer stream; no page is of both at a time, for rows are held and locks kept until a copy's end was seen.

    forward    | step | step |    the newest step ...
    cold       | wait . . .  | park | restore |    ... is waited for: its rows' old owners may still write the pages
    transfer   | pull | describe | pull |          waits for steps alone

A restored request whose KV is whole goes on by stash, as a PREBUILT one does; the others compute what is missing.
Whatever does not come back, or not as it was, is computed. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shared.core.keys import RequestKey
from shared.core.page_identity import identities
from shared.core.request import Request, RequestState, TokenIds
from shared.core.states import PageState
from shared.engine.transfer_jobs import JobDone, TransferJobs
from shared.kv.accounting import raise_problems
from shared.kv.cold_store import ColdPage, ColdStore, Filing
from shared.kv.manager import KVManager
from shared.kv.pool import KVPool
from shared.kv.prefix_cache import CachedPage, Lock, PrefixCache
from shared.sched.events import SchedCounters
from shared.sched.page_budget import PageBudget
from shared.sched.settings import SchedSettings

MOST_SAVED_AT_ONCE = 32  # pages: the next copy waits no longer than for so many


@dataclass(frozen=True, slots=True)
class Save:
    """Cached pages on their way out. `lock` pins them; `num_pinned` of them would be evictable without it."""

    lock: Lock
    num_pinned: int


@dataclass(frozen=True, slots=True)
class Park:
    """A held row whose pages are on their way out; `keys` are those of the tokens whose KV they are."""

    row: int
    keys: TokenIds


@dataclass(slots=True, eq=False)
class Restore:
    """Pages on their way into the row of a request. Then it has the KV of `num_tokens`, or of `num_cached` if they are
    not what was stored. `revoked`: it was retracted or ended meanwhile, and the row is held until the copy is over."""

    request: Request
    row: int
    num_cached: int
    num_tokens: int
    pages: Sequence[tuple[bytes, ColdPage]]
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class ColdTier:
    """What the copies need: where from, where to, and the stream that makes them."""

    store: ColdStore
    pool: KVPool
    jobs: TransferJobs[Save | Park | Restore, None]

    def save(
        self, tag: Save | Park, filings: Sequence[tuple[Filing, int]], label: str, after_newest_step: bool
    ) -> None:
        def run() -> None:
            for filing, page in filings:
                self.store.store(filing, self.pool.page_view(page))

        self.jobs.launch(tag, run, label, after_newest_step)

    def load(self, tag: Restore, loads: Sequence[tuple[ColdPage, int, int]]) -> None:
        """(page of the tier, its place now, page of the pool); a launched step may still write the latter."""

        def run() -> None:
            for cold, place, page in loads:
                self.store.load(cold, place, self.pool.page_view(page))

        self.jobs.launch(tag, run, "restore", after_newest_step=True)


class NoOffload:
    """What Offload is without a cold tier: nothing leaves, nothing comes back."""

    num_jobs = 0
    restoring: Mapping[RequestKey, Restore] = MappingProxyType({})

    def wait(self) -> None:
        """Return at once: there is no copy."""

    def park(self, req: Request) -> bool:
        return False

    def save_cold(self) -> None:
        """Save nothing."""

    def restore(self, req: Request, ids: TokenIds, num_cached: int) -> bool:
        return False

    def revoke(self, req: Request) -> None:
        raise AssertionError(f"{req.key} is RESTORING, and there is no cold tier")

    def take_done(self) -> list[Restore]:
        return []

    def check_integrity(self, idle: bool = False) -> None:
        """There is nothing that could not add up."""

    def close(self) -> None:
        """There is nothing to close."""


class Offload:
    """Owner of requests in state RESTORING, and of rows and locks that wait for a copy. The scheduler's thread only."""

    def __init__(
        self, tier: ColdTier, kv: KVManager, settings: SchedSettings, budget: PageBudget, counters: SchedCounters
    ) -> None:
        self._tier = tier
        self._kv = kv
        self._settings = settings
        self._budget = budget
        self._counters = counters
        assert isinstance(kv.cache, PrefixCache)  # pools of windows have no cold tier
        self._cache = kv.cache
        self._is_saving = False
        self.restoring: dict[RequestKey, Restore] = {}

    @property
    def num_jobs(self) -> int:
        return len(self._tier.jobs)

    def wait(self) -> None:
        """For the oldest copy, if there is one."""
        self._tier.jobs.synchronize()

    # ---- out

    def park(self, req: Request) -> bool:
        """At the retraction of a running request: copy its pages out, and hold its row until that is done. False:
        there is nothing to copy, and the caller goes on as without a cold tier."""
        if req.state is not RequestState.RUNNING or self._settings.relays_drafts or req.lacks_draft_state:
            return False
        store, ids = self._tier.store, req.all_ids()[: req.computed]
        pages = self._kv.rows.pages_of(req.row).tolist()
        keys = self._budget.prefix_keys(req, ids)
        wanted = dict(zip(identities(keys.tobytes(), self._settings.page_size), pages, strict=False))
        missing = {identity: page for identity, page in wanted.items() if identity not in store}
        if not missing or len(missing) > store.num_host + store.num_disk:
            return False
        filings = [(store.add(identity), page) for identity, page in missing.items()]
        tag = Park(self._budget.hold(req), keys)
        self._tier.save(tag, filings, "park", after_newest_step=True)
        self._counters.offloaded_pages += len(filings)
        return True

    def save_cold(self) -> None:
        """Some of the pages that are nobody's, longest unused first, one copy at a time. Many are evicted at once, so
        it would be too late to begin when memory is short."""
        while not self._is_saving:
            nodes = self._cache.take_cold(MOST_SAVED_AT_ONCE)
            if not nodes:
                return
            unsaved = [node for node in nodes if self._cache.identity_of(node) not in self._tier.store]
            if unsaved:
                self._save(unsaved)

    def _save(self, nodes: Sequence[CachedPage]) -> None:
        cache, store = self._cache, self._tier.store
        before = cache.num_evictable
        lock = cache.pin(nodes[0], "offload")
        num_pinned = before - cache.num_evictable
        filings = [(store.add(cache.identity_of(node)), node.page) for node in nodes]
        self._is_saving = True
        self._budget.num_saving += num_pinned
        self._tier.save(Save(lock, num_pinned), filings, "save", after_newest_step=False)
        self._counters.offloaded_pages += len(filings)

    # ---- back

    def restore(self, req: Request, ids: TokenIds, num_cached: int) -> bool:
        """Row and pages for `ids` are reserved, and the prefix cache gave `num_cached` tokens: bring back what the cold
        tier has behind them. False: nothing. Of a request that has said something its last token needs no forward but
        its next step's, so all before it may come back, a page that is not full included."""
        if req.first_unscored is not None:
            return False  # its prompt is computed for its logits
        page_size, most = self._settings.page_size, len(ids) - 1
        if not req.output_ids or self._settings.relays_drafts:
            most -= most % page_size
        keys, first = self._budget.prefix_keys(req, ids)[:most], num_cached // page_size
        found: list[tuple[bytes, ColdPage]] = []
        for identity in list(identities(keys.tobytes(), page_size))[first:]:
            cold = self._tier.store.find(identity)
            if cold is None:
                break
            found.append((identity, cold))
        if not found:
            return False
        restore = Restore(req, req.row, num_cached, min(most, (first + len(found)) * page_size), found)
        pages = self._kv.rows.pages_of(req.row)[first:].tolist()
        self.restoring[req.key] = restore
        self._kv.set_tag(req.row, PageState.GRANTED)
        self._tier.load(restore, [(cold, cold.place, page) for (_, cold), page in zip(found, pages, strict=False)])
        return True

    def revoke(self, req: Request) -> None:
        """Retracted, or ended, while its pages come: they are free once nobody writes into them."""
        self.restoring.pop(req.key).revoked = True
        self._budget.hold(req)

    # ---- ends

    def take_done(self) -> list[Restore]:
        """Restored requests, no longer in `restoring`: the caller brings each into its next state."""
        return [restore for done in self._tier.jobs.take_done() for restore in self._ended(done)]

    def _ended(self, done: JobDone[Save | Park | Restore, None]) -> list[Restore]:
        tag = done.tag
        if isinstance(tag, Save):
            self._is_saving = False
            self._budget.num_saving -= tag.num_pinned
            self._cache.unlock(tag.lock)
        elif isinstance(tag, Park):
            self._kv.insert_prefix(tag.row, tag.keys, len(tag.keys))
            self._budget.release_held(tag.row)
        else:
            return self._came(tag, failed=done.error is not None)
        return []

    def _came(self, restore: Restore, failed: bool) -> list[Restore]:
        if failed:
            restore.num_tokens = restore.num_cached
            self._counters.offload_failures += 1
            for identity, cold in restore.pages:
                self._tier.store.drop(identity, cold)
        if restore.revoked:
            self._budget.release_held(restore.row)
            return []
        self._counters.restored_pages += 0 if failed else len(restore.pages)
        del self.restoring[restore.request.key]
        self._kv.set_tag(restore.row, PageState.ACTIVE)
        return [restore]

    def check_integrity(self, idle: bool = False) -> None:
        """The store adds up; idle: no copy is under way and nobody waits for one."""
        found = self._tier.store.problems()
        if idle and (self.num_jobs or self.restoring):
            found.append(f"{self.num_jobs} copies under way, {len(self.restoring)} requests wait for theirs")
        raise_problems("offload", found)

    def close(self) -> None:
        """After the streams have stopped."""
        self._tier.store.close()
