"""Loans: cached pages of this node that other prefill nodes copy.

    Pull -> checked, matched, pinned -> Lent, Ready ... -> Returned, the peer is gone, or the loan's time is over.

A peer can't write to the pages, and each loan has a deadline. So a dead or lying peer can only keep pages pinned until
that deadline.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from prefill_node.unread import Unread, take
from shared.core.errors import HandoffFailed
from shared.core.page_identity import KEY_BYTES, identities, prefix_keys
from shared.engine.transfer_jobs import TransferJobs
from shared.kv.prefix_cache import PrefixCache
from shared.node.context import NodeContext
from shared.node.routers.lives import local_time
from shared.observe.metric_names import REFUSED_PREFIX, REFUSED_TICKET
from shared.sched.page_budget import LoanName
from shared.transfer.interface import READY_BYTES, PageList, PageSender, PageSet
from shared.transfer.transports import choose_transport
from shared.wire.codec import key_of
from shared.wire.fitting import REPORTED_ONLY
from shared.wire.messages import Fingerprint, FramesTaken, Key, Lent, Pull, Returned
from shared.wire.tickets import is_genuine

MOST_LOANS, MOST_OF_ONE_PEER = 32, 8
MOST_LENT = 0.25  # share of the pool's pages that loans may pin
MOST_LENT_TO_ONE = 0.125  # share that one peer's loans may pin; a peer's only loan may pin more
LONGEST_S = 10.0
LATER_S = 1.0  # time that a loan lasts after the peer's wait, because messages may be on their way
OWN_NEED = "its own requests need the pages"
MAX_SPENT = 1 << 16
KEPT_LONGER_S = 60.0  # time from a used ticket's deadline until it is forgotten: a later Welcome may move the deadline


@dataclass(slots=True, eq=False)
class Loan:
    """The scheduler's budget pins the loan's pages, and can unpin them for this node's requests (rule f)."""

    key: Key
    peer: str
    lease: int
    num_pages: int
    sender: PageSender
    until: float
    untaken: deque[int] = field(default_factory=deque)  # see unread.Sent


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    loan: Loan
    first: int
    pages: PageList


class Loans:
    """Owns all loans. The keys of `senders` are names from pulls.TRANSPORTS."""

    def __init__(self, ctx: NodeContext, senders: Mapping[str, PageSender], unread: Unread) -> None:
        self._ctx = ctx
        self._senders = senders
        self._unread = unread
        self._jobs: TransferJobs[tuple[Loan, int], PageSet] = TransferJobs(ctx.core.engine)
        self._waiting: deque[Waiting] = deque()
        self._spent: OrderedDict[tuple[str, int, str, int], float] = OrderedDict()
        self.open: dict[LoanName, Loan] = {}  # by (peer, lease)

    # ---- messages

    def receive(self, peer: str, message: Pull | FramesTaken | Returned, now: float) -> None:
        if isinstance(message, Returned):
            self._end((peer, message.lease))
        elif isinstance(message, FramesTaken):
            if (loan := self.open.get((peer, message.lease))) is not None:
                take(loan)
        elif (peer, message.lease) not in self.open:  # otherwise the Pull is a duplicate
            try:
                self._lend(peer, message, now)
            except HandoffFailed as error:
                self._ctx.metrics.count("loans_refused")
                self._ctx.log.info((peer, error.message), "lends no pages", peer=peer, why=error.message)
                self._ctx.outbox.send(peer, Lent(message.key, message.lease, 0, "", error.message), back=True)

    def _lend(self, peer: str, pull: Pull, now: float) -> None:
        """Pin the requested pages that are cached. Raise HandoffFailed if no page may be lent."""
        cache, facts = self._ctx.core.kv.cache, self._ctx.facts
        until = self._vouched_until(peer, pull, now)
        if self._ctx.leaving or not isinstance(cache, PrefixCache) or not cache.enabled:
            raise HandoffFailed("this node lends nothing now")
        if differs := other_pages(facts.fingerprint, pull.fingerprint):
            raise HandoffFailed(f"{differs} differs")
        transport = choose_transport(facts.host_id, tuple(self._senders), pull.host_id, pull.transports)
        if transport is None:
            raise HandoffFailed("the two nodes have no transport in common")
        num_open = sum(loan.peer == peer for loan in self.open.values())
        if len(self.open) >= MOST_LOANS or num_open >= MOST_OF_ONE_PEER:
            raise HandoffFailed("too many loans are open")
        keys = self._keys_of(peer, pull)
        match = cache.match(keys, pull.num_pages * cache.page_size, f"loan to {peer}")
        if why := self._why_not(peer, len(match.pages), pull.first_page):
            cache.unlock(match.lock)
            raise HandoffFailed(why)
        until = min(until, now + min(LONGEST_S, pull.within_ms / 1000) + LATER_S)
        loan = Loan(pull.key, peer, pull.lease, len(match.pages), self._senders[transport], until)
        self.open[peer, pull.lease] = loan
        self._ctx.core.scheduler.budget.lend((peer, pull.lease), match.lock)
        self._ctx.metrics.count("loans")
        self._ctx.outbox.send(peer, Lent(pull.key, pull.lease, len(match.pages), transport, ""), back=True)
        self._queue(loan, pull.first_page, match.pages[pull.first_page :])

    def _vouched_until(self, peer: str, pull: Pull, now: float) -> float:
        """Return the time when the ticket ends. Each ticket allows one loan."""
        key, ticket = key_of(pull.key), pull.ticket
        word = self._ctx.routers.word_of(key)
        if word is None:
            raise HandoffFailed("the request's router is not known here")
        if not is_genuine(word.key, key, peer, ticket, pull.last_page):
            raise self._refuse(peer, "a Pull without a router's ticket")
        if len(pull.prompt_ids) > ticket.most_tokens:
            raise self._refuse(peer, "a Pull of more tokens than its ticket allows")
        ends = local_time(word, ticket.deadline_ms, now)
        if ends < now:
            raise HandoffFailed("the ticket of the pull has expired")
        whole = (key.router_id, key.router_epoch, key.rid, key.attempt)
        if whole in self._spent:
            raise self._refuse(peer, "a Pull whose ticket was used before")
        while self._spent and (len(self._spent) >= MAX_SPENT or next(iter(self._spent.values())) < now):
            self._spent.popitem(last=False)
        self._spent[whole] = ends + KEPT_LONGER_S
        return ends

    def _refuse(self, peer: str, why: str) -> HandoffFailed:
        self._ctx.metrics.count(f"{REFUSED_PREFIX}{REFUSED_TICKET}")
        self._ctx.log.warning((peer, why), "refused a pull", peer=peer, why=why)
        return HandoffFailed(why)

    def _keys_of(self, peer: str, pull: Pull) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """Return the keys that this node computes for the requested pages. Raise HandoffFailed if the ticket names
        other pages."""
        settings = self._ctx.core.settings
        if pull.adapter and pull.adapter not in settings.adapters:
            raise HandoffFailed("the request's adapter is not here")
        slot = settings.adapters.index(pull.adapter) + 1 if pull.adapter else 0
        tokens = np.asarray(pull.prompt_ids, dtype=np.int64).tobytes()
        keys = prefix_keys(tokens, slot, settings.key_lookahead, pull.cache_salt)
        if len(keys) != pull.num_pages * settings.page_size * KEY_BYTES:
            raise HandoffFailed("tokens and pages differ in number")
        *_, last = identities(keys, settings.page_size)
        if last != pull.last_page:
            raise self._refuse(peer, "a Pull of pages that its ticket does not allow")
        return np.frombuffer(keys, np.int64)

    def _why_not(self, peer: str, num_cached: int, first_page: int) -> str:
        core, theirs = self._ctx.core, [loan.num_pages for loan in self.open.values() if loan.peer == peer]
        if num_cached <= first_page:
            return "the pages are not cached any more"
        lent = sum(loan.num_pages for loan in self.open.values())
        if lent + num_cached > MOST_LENT * core.kv.allocator.num_total:
            return "this loan would exceed the limit of lent pages"
        if theirs and sum(theirs) + num_cached > MOST_LENT_TO_ONE * core.kv.allocator.num_total:
            return "this loan would exceed the limit of pages lent to one node"
        if core.kv.num_available < core.scheduler.capacity.wanted():
            return OWN_NEED
        return ""

    # ---- describing

    def _queue(self, loan: Loan, first: int, pages: PageList) -> None:
        most = max(1, READY_BYTES // self._ctx.core.pool.page_bytes)
        for start in range(0, len(pages), most):
            self._waiting.append(Waiting(loan, first + start, pages[start : start + most]))
        self._launch_waiting()

    def _launch_waiting(self) -> None:
        entries, self._waiting = self._waiting, deque()
        full: set[str] = set()
        for entry in entries:
            loan = entry.loan
            if self.open.get((loan.peer, loan.lease)) is not loan:
                continue
            num_bytes = len(entry.pages) * self._ctx.core.pool.page_bytes if loan.sender.is_inline else 0
            if loan.peer in full or not self._unread.has_room(loan, loan.sender, num_bytes, self.open.values()):
                full.add(loan.peer)
                self._waiting.append(entry)
                continue
            self._unread.begin(loan, num_bytes)
            self._jobs.launch((loan, entry.first), partial(loan.sender.describe, entry.pages), f"lend({entry.first})")

    def poll(self, now: float) -> None:
        for done in self._jobs.take_done():
            loan, first = done.tag
            self._unread.described(loan.peer, done.value)
            if self.open.get((loan.peer, loan.lease)) is not loan:
                continue  # the loan has ended: its pages may have a new owner
            if done.value is None:
                failed = Lent(loan.key, loan.lease, 0, "", f"pages from {first} on failed")
                self._ctx.outbox.send(loan.peer, failed, back=True)
                self._end((loan.peer, loan.lease))
                continue
            ready = done.value.ready(loan.key, loan.lease, first)
            self._ctx.outbox.send(loan.peer, ready, done.value.frames, back=True)
        self._unread.take_read()
        self._launch_waiting()
        for name in [name for name, loan in self.open.items() if loan.until <= now]:
            self._ctx.metrics.count("loans_expired")
            self._end(name)

    # ---- ends

    def _end(self, name: LoanName) -> None:
        loan = self.open.pop(name, None)
        if loan is not None:
            self._ctx.core.scheduler.budget.take_back(name)

    def gave_way(self, name: LoanName) -> None:
        loan = self.open.pop(name)
        self._ctx.metrics.count("loans_gave_way")
        self._ctx.outbox.send(loan.peer, Lent(loan.key, loan.lease, 0, "", OWN_NEED), back=True)

    def end_all(self) -> None:
        for name in list(self.open):
            self._end(name)

    def peer_closed(self, peer: str) -> None:
        for name in [name for name in self.open if name[0] == peer]:
            self._end(name)

    @property
    def wakes_at(self) -> float:
        return min((loan.until for loan in self.open.values()), default=float("inf"))


def other_pages(ours: Fingerprint, theirs: Fingerprint) -> str:
    """Return the first field in which the two nodes' pages differ, or "". Draft planes are compared, too, because both
    nodes use every plane."""
    names = (name for name in Fingerprint.__struct_fields__ if name not in REPORTED_ONLY)
    return next((name for name in names if getattr(ours, name) != getattr(theirs, name)), "")
