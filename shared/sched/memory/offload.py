"""Copy KV pages from the pool to the cold tier, and back, so that they need not be computed again.

    save      copies out cached pages that no request uses; of a windowed page group only those at a request's end
    park      copies out the pages of a retracted running request
    restore   copies in the pages after the cached prefix, at admission

Copies run on the cold stream, in launch order. A copy's row and lock are kept until a later round sees the copy's end.
So no page gets a new owner while a copy uses it.

    forward    | step | step |
    cold       | wait . . .  | park | restore |    waits for the newest step, which may still write the pages
    transfer   | pull | describe | pull |          waits only for steps

A request whose KV is complete goes on without a forward, like a PREBUILT record. Tokens of missing or damaged pages are
computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from shared.core.keys import RequestKey
from shared.core.page_identity import identities
from shared.core.request import Request, RequestState, TokenIds
from shared.core.states import PageState
from shared.engine.transfer_jobs import JobDone, TransferJobs
from shared.kv.accounting import raise_problems
from shared.kv.cached_page import CachedPage
from shared.kv.cold_store import ColdPage, ColdStore, Filing
from shared.kv.group_cache import by_group
from shared.kv.manager import KVManager
from shared.kv.pool import KVPool
from shared.kv.prefix_cache import Lock
from shared.sched.memory.page_budget import PageBudget
from shared.sched.steps.events import SchedCounters
from shared.sched.steps.settings import SchedSettings

MOST_SAVED_AT_ONCE = 32  # pages in one copy, so that the next copy does not wait long


@dataclass(frozen=True, slots=True)
class Save:
    """A copy of cached pages to the cold tier.

    `lock`: of the page group's cache; it pins the pages, of which `num_pinned` were evictable.
    """

    group: int
    lock: Lock
    num_pinned: int


@dataclass(frozen=True, slots=True)
class Park:
    row: int
    keys: TokenIds


@dataclass(slots=True, eq=False)
class Restore:
    """A copy of pages into a request's row, which then has the KV of `num_tokens` tokens.

    If pages are damaged, the row keeps only `num_cached` tokens. `revoked`: the request has ended or was retracted; its
    row is held until the copy ends.
    """

    request: Request
    row: int
    num_cached: int
    num_tokens: int
    pages: Sequence[tuple[bytes, ColdPage]]
    revoked: bool = False


@dataclass(frozen=True, slots=True)
class ColdTier:
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
        """Begin a copy from the tier. A load: the tier's page, its current place, the pool page to fill."""

        def run() -> None:
            for cold, place, page in loads:
                self.store.load(cold, place, self.pool.page_view(page))

        self.jobs.launch(tag, run, "restore", after_newest_step=True)


def cold_name(identity: bytes, group: int) -> bytes:
    """Return the tier's name of a page group's page."""
    return identity + bytes([group])


class NoOffload:
    num_jobs = 0
    restoring: Mapping[RequestKey, Restore] = MappingProxyType({})

    def wait(self) -> None:
        """Do nothing."""

    def park(self, req: Request) -> bool:
        return False

    def save_cold(self) -> None:
        """Do nothing."""

    def restore(self, req: Request, ids: TokenIds, num_cached: int) -> bool:
        return False

    def revoke(self, req: Request) -> None:
        raise AssertionError(f"{req.key} is RESTORING, and there is no cold tier")

    def take_done(self) -> list[Restore]:
        return []

    def check_integrity(self, idle: bool = False) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class Offload:
    """Owns RESTORING requests, and the rows and locks held for copies. Scheduler thread only."""

    def __init__(
        self, tier: ColdTier, kv: KVManager, settings: SchedSettings, budget: PageBudget, counters: SchedCounters
    ) -> None:
        self._tier = tier
        self._kv = kv
        self._settings = settings
        self._budget = budget
        self._counters = counters
        self._caches = by_group(kv.cache)
        self._is_saving = False
        self.restoring: dict[RequestKey, Restore] = {}

    @property
    def num_jobs(self) -> int:
        return len(self._tier.jobs)

    def wait(self) -> None:
        self._tier.jobs.synchronize()

    # ---- out

    def park(self, req: Request) -> bool:
        """Copy a retracted running request's pages to the tier, and hold its row until the copy ends.

        Return False if there is nothing to copy. The caller then frees the row.
        """
        if req.state is not RequestState.RUNNING or self._settings.drafts.relays_drafts or req.lacks_draft_state:
            return False
        store, ids = self._tier.store, req.all_ids()[: req.computed]
        pages = self._kv.rows.pages_of(req.row).tolist()
        keys = self._budget.prefix_keys(req, ids)
        wanted = zip(self._names(keys), pages, strict=False)
        missing = {name: page for name, page in wanted if page and name not in store}
        if not missing or len(missing) > store.num_host + store.num_disk:
            return False
        filings = [(store.add_page(name), page) for name, page in missing.items()]
        tag = Park(self._budget.hold(req), keys)
        self._tier.save(tag, filings, "park", after_newest_step=True)
        self._counters.offloaded_pages += len(filings)
        return True

    def save_cold(self) -> None:
        """Copy unused pages to the tier, longest unused first, one copy at a time.

        Copying starts before memory is short, because evictions do not wait for copies. Windowed groups come first:
        they have few such pages, and without these the other groups' are of no use.
        """
        for group in reversed(range(len(self._caches))):
            cache = self._caches[group]
            while not self._is_saving and (nodes := cache.take_cold(MOST_SAVED_AT_ONCE)):
                names = {node: cold_name(cache.identity_of(node), group) for node in nodes}
                unsaved = {node: name for node, name in names.items() if name not in self._tier.store}
                if unsaved:
                    self._save(group, unsaved)

    def _save(self, group: int, names: Mapping[CachedPage, bytes]) -> None:
        cache, store = self._caches[group], self._tier.store
        before = cache.num_evictable
        lock = cache.pin(list(names), "offload")
        num_pinned = before - cache.num_evictable
        filings = [(store.add_page(name), node.page) for node, name in names.items()]
        self._is_saving = True
        self._budget.num_saving += num_pinned
        self._tier.save(Save(group, lock, num_pinned), filings, "save", after_newest_step=False)
        self._counters.offloaded_pages += len(filings)

    def _names(self, keys: TokenIds) -> Iterator[bytes]:
        """Yield the tier's names of a row's pages, as the row lists them."""
        for identity in identities(keys.tobytes(), self._settings.page_size):
            for group in range(len(self._caches)):
                yield cold_name(identity, group)

    # ---- back

    def restore(self, req: Request, ids: TokenIds, num_cached: int) -> bool:
        """Copy the pages after the first `num_cached` tokens back from the tier. Return False if the tier has too few.

        The request's row and pages must be reserved. A request without output, or with relayed drafts, gets only
        full pages. Other requests need KV for all tokens except the last, so a partly full last page is restored too.
        """
        if req.first_unscored is not None:
            return False  # scores need the prompt's logits
        page_size, most = self._settings.page_size, len(ids) - 1
        if not req.output_ids or self._settings.drafts.relays_drafts:
            most -= most % page_size
        names, first = list(self._names(self._budget.prefix_keys(req, ids)[:most])), num_cached // page_size
        end = self._longest(names, first, most)
        if end == first:
            return False
        num_tokens, num_groups = min(most, end * page_size), len(self._caches)
        entries = self._kv.entries(first * num_groups, end * num_groups, self._kv.cache.first_needed(num_tokens))
        pages = self._kv.rows.pages_of(req.row)[entries].tolist()
        found = [(names[entry], self._cold_page(names[entry])) for entry in entries]
        restore = Restore(req, req.row, num_cached, num_tokens, found)
        self.restoring[req.key] = restore
        self._kv.set_tag(req.row, PageState.GRANTED)
        self._tier.load(restore, [(cold, cold.place, page) for (_, cold), page in zip(found, pages, strict=True)])
        return True

    def _cold_page(self, name: bytes) -> ColdPage:
        cold = self._tier.store.find(name)
        assert cold is not None, f"page {name.hex()} is read, and the cold tier does not have it"
        return cold

    def _longest(self, names: Sequence[bytes], first: int, most: int) -> int:
        """Return the most pages of tokens that a row with the first `first` ones can have.

        Groups without a window need all pages, windowed ones only the pages that the next token reads. `most`: how many
        tokens `names` cover.
        """
        store, windows = self._tier.store, self._kv.cache.windows
        whole = [group for group, window in enumerate(windows) if not window]
        num_groups, end = len(windows), first
        while end * num_groups < len(names) and all(names[end * num_groups + group] in store for group in whole):
            end += 1
        while end > first:
            needed = self._kv.cache.first_needed(min(most, end * self._settings.page_size))
            firsts = tuple(page if window else end for page, window in zip(needed, windows, strict=True))
            entries = self._kv.entries(max(first, min(firsts)) * num_groups, end * num_groups, firsts)
            missing = next((entry for entry in entries.tolist() if names[entry] not in store), None)
            if missing is None:
                break
            end = missing // num_groups  # every longer row reads this page, too
        return end

    def revoke(self, req: Request) -> None:
        """Cancel a restore. The row is freed once the copy has ended."""
        self.restoring.pop(req.key).revoked = True
        self._budget.hold(req)

    # ---- ends

    def take_done(self) -> list[Restore]:
        return [restore for done in self._tier.jobs.take_done() for restore in self._ended(done)]

    def _ended(self, done: JobDone[Save | Park | Restore, None]) -> list[Restore]:
        tag = done.tag
        if isinstance(tag, Save):
            self._is_saving = False
            self._budget.num_saving -= tag.num_pinned
            self._caches[tag.group].unlock(tag.lock)
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
        if not failed:
            self._counters.restored_pages += len(restore.pages)
            self._kv.leave_behind(restore.row, restore.num_tokens)  # pages that were not copied, and are not read
        del self.restoring[restore.request.key]
        self._kv.set_tag(restore.row, PageState.ACTIVE)
        return [restore]

    def check_integrity(self, idle: bool = False) -> None:
        """With `idle`, also raise if a copy or restore is open."""
        found = self._tier.store.problems()
        if idle and (self.num_jobs or self.restoring):
            found.append(f"{self.num_jobs} copies are open, {len(self.restoring)} requests wait for a restore")
        raise_problems("offload", found)

    def close(self) -> None:
        """Call this after the streams have stopped."""
        self._tier.store.close()
