"""Loans: cached pages of this node that other prefill nodes copy.

    Pull -> checked, matched, pinned -> Lent, Ready ... -> Returned, the peer is gone, or the loan's time is over.

A peer can't write to the pages, and each loan has a deadline. So a dead or lying peer can only keep pages pinned until
that deadline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from prefill_node.send_queue import Sending, SendQueue
from prefill_node.unread import Unread
from shared.core.errors import HandoffFailed
from shared.core.keys import RequestKey
from shared.core.page_identity import KEY_BYTES, identities, prefix_keys
from shared.kv.group_cache import Cache
from shared.kv.prefix_cache import Found, Keys, PrefixCache
from shared.node.loop.context import NodeContext
from shared.node.records.spent_tickets import SpentTickets
from shared.node.routers.lives import local_time
from shared.observe.metric_names import REFUSED_PREFIX, REFUSED_TICKET
from shared.sched.memory.page_budget import LoanName
from shared.transfer.interface import PageSender
from shared.transfer.transports import choose_transport
from shared.wire.codec import key_of
from shared.wire.fitting import other_pages
from shared.wire.messages import FramesTaken, Key, Lent, Pull, Returned
from shared.wire.tickets import is_genuine

MOST_LOANS, MOST_OF_ONE_PEER = 32, 8
MOST_LENT = 0.25  # share of the pool's pages that loans may pin
MOST_LENT_TO_ONE = 0.125  # share that one peer's loans may pin; a peer's only loan may pin more
LONGEST_S = 10.0
LATER_S = 1.0  # time that a loan lasts after the peer's wait, because messages may be on their way
OWN_NEED = "its own requests need the pages"


@dataclass(slots=True, eq=False)
class Loan:
    """The scheduler's budget pins the loan's pages, and can unpin them for this node's requests (rule f).

    `num_pages`: how many are pinned, of all page groups."""

    key: Key
    peer: str
    num_pages: int
    until: float
    sending: Sending

    @property
    def name(self) -> LoanName:
        return self.peer, self.sending.lease


class Loans:
    """Owns all loans. The keys of `senders` are names from pulls.TRANSPORTS."""

    def __init__(self, ctx: NodeContext, senders: Mapping[str, PageSender], unread: Unread) -> None:
        self._ctx = ctx
        self._senders = senders
        self._spent: SpentTickets[RequestKey] = SpentTickets()
        self.open: dict[LoanName, Loan] = {}  # by (peer, lease)
        self.queue: SendQueue[Loan] = SendQueue(ctx, unread, self.open, lambda loan: loan.name)

    # ---- messages

    def receive(self, peer: str, message: Pull | FramesTaken | Returned, now: float) -> None:
        if isinstance(message, Returned):
            self._end((peer, message.lease))
        elif isinstance(message, FramesTaken):
            if (loan := self.open.get((peer, message.lease))) is not None:
                loan.sending.take_oldest()
        elif (peer, message.lease) not in self.open:  # otherwise the Pull is a duplicate
            try:
                self._lend(peer, message, now)
            except HandoffFailed as error:
                self._ctx.metrics.count("loans_refused")
                self._ctx.log.info((peer, error.message), "lends no pages", peer=peer, why=error.message)
                self._ctx.outbox.send(peer, Lent(message.key, message.lease, 0, "", error.message), back=True)

    def _lend(self, peer: str, pull: Pull, now: float) -> None:
        """Pin the requested pages that are cached. Raise HandoffFailed if no page may be lent."""
        kv, facts = self._ctx.core.kv, self._ctx.facts
        cache = kv.cache
        until = self._vouched_until(peer, pull, now)
        if self._ctx.leaving or not cache.enabled:
            raise HandoffFailed("this node lends nothing now")
        if differs := other_pages(facts.fingerprint, pull.fingerprint):
            raise HandoffFailed(f"{differs} differs")
        transport = choose_transport(facts.host_id, tuple(self._senders), pull.host_id, pull.transports)
        if transport is None:
            raise HandoffFailed("the two nodes have no transport in common")
        num_open = sum(loan.peer == peer for loan in self.open.values())
        if len(self.open) >= MOST_LOANS or num_open >= MOST_OF_ONE_PEER:
            raise HandoffFailed("too many loans are open")
        keys = self._keys_of(pull)
        found = cache.find(keys, len(keys))
        if last_name(cache, found, keys) != pull.last_page:
            raise self._refuse(peer, "a Pull of pages that its ticket does not allow")
        match = cache.lock(found, f"loan to {peer}")
        num_pages, num_pinned = len(match.pages) // kv.num_groups, int(np.count_nonzero(match.pages))
        if why := self._why_not(peer, num_pinned, num_pages > pull.first_page):
            cache.unlock(match.lock)
            raise HandoffFailed(why)
        until = min(until, now + min(LONGEST_S, pull.within_ms / 1000) + LATER_S)
        loan = Loan(pull.key, peer, num_pinned, until, Sending(pull.lease, self._senders[transport]))
        self.open[loan.name] = loan
        self._ctx.core.queues.budget.lend(loan.name, match.lock)
        self._ctx.metrics.count("loans")
        self._ctx.outbox.send(peer, Lent(pull.key, pull.lease, num_pages, transport, ""), back=True)
        first = pull.first_page * kv.num_groups
        self.queue.add_pages(loan, first, match.pages[first:])
        self.queue.launch()

    def _vouched_until(self, peer: str, pull: Pull, now: float) -> float:
        """Return the time when the ticket ends. Each ticket allows one loan."""
        key, ticket = key_of(pull.key), pull.ticket
        session = self._ctx.routers.session_key_of(key)
        if session is None:
            raise HandoffFailed("the request's router is not known here")
        if not is_genuine(session.key, key, peer, ticket, pull.last_page):
            raise self._refuse(peer, "a Pull without a router's ticket")
        if len(pull.prompt_ids) > ticket.most_tokens:
            raise self._refuse(peer, "a Pull of more tokens than its ticket allows")
        ends = local_time(session, ticket.deadline_ms, now)
        if ends < now:
            raise HandoffFailed("the ticket of the pull has expired")
        whole = key.sibling(0)
        if whole in self._spent:
            raise self._refuse(peer, "a Pull whose ticket was used before")
        self._spent.spend(whole, ends, now)
        return ends

    def _refuse(self, peer: str, why: str) -> HandoffFailed:
        self._ctx.metrics.count(f"{REFUSED_PREFIX}{REFUSED_TICKET}")
        self._ctx.log.warning((peer, why), "refused a pull", peer=peer, why=why)
        return HandoffFailed(why)

    def _keys_of(self, pull: Pull) -> Keys:
        """Return the keys that this node computes for the requested pages."""
        settings = self._ctx.core.settings
        tokens = np.asarray(pull.prompt_ids, dtype=np.int64).tobytes()
        keys = prefix_keys(tokens, pull.adapter, settings.drafts.key_lookahead, pull.cache_salt)
        if len(keys) != pull.num_pages * settings.page_size * KEY_BYTES:
            raise HandoffFailed("tokens and pages differ in number")
        return np.frombuffer(keys, np.int64)

    def _why_not(self, peer: str, num_pinned: int, has_more: bool) -> str:
        """`num_pinned`: pages that the loan would pin. `has_more`: whether it has pages that the peer lacks."""
        core, theirs = self._ctx.core, [loan.num_pages for loan in self.open.values() if loan.peer == peer]
        if not has_more:
            return "the pages are not cached any more"
        lent = sum(loan.num_pages for loan in self.open.values())
        if lent + num_pinned > MOST_LENT * core.kv.allocator.num_total:
            return "this loan would exceed the limit of lent pages"
        if theirs and sum(theirs) + num_pinned > MOST_LENT_TO_ONE * core.kv.allocator.num_total:
            return "this loan would exceed the limit of pages lent to one node"
        if core.kv.num_available < core.scheduler.capacity.wanted():
            return OWN_NEED
        return ""

    def poll(self, now: float) -> None:
        for done in self.queue.take_done():
            loan = done.sent
            if done.page_set is None:
                self._say_no(loan, f"pages from {done.first} on failed")
                self._end(loan.name)
                continue
            ready = done.page_set.ready(loan.key, loan.sending.lease, done.first)
            self._ctx.outbox.send(loan.peer, ready, done.page_set.frames, back=True)
        self.queue.launch()
        for name in [name for name, loan in self.open.items() if loan.until <= now]:
            self._ctx.metrics.count("loans_expired")
            self._end(name)

    # ---- ends

    def _end(self, name: LoanName) -> None:
        loan = self.open.pop(name, None)
        if loan is not None:
            self._ctx.core.queues.budget.take_back(name)

    def preempted(self, name: LoanName) -> None:
        loan = self.open.pop(name)
        self._ctx.metrics.count("loans_gave_way")
        self._say_no(loan, OWN_NEED)

    def _say_no(self, loan: Loan, why: str) -> None:
        self._ctx.outbox.send(loan.peer, Lent(loan.key, loan.sending.lease, 0, "", why), back=True)

    def end_all(self) -> None:
        for name in list(self.open):
            self._end(name)

    def peer_closed(self, peer: str) -> None:
        for name in [name for name in self.open if name[0] == peer]:
            self._end(name)

    @property
    def wakes_at(self) -> float:
        return min((loan.until for loan in self.open.values()), default=float("inf"))


def last_name(cache: Cache, found: Found, keys: Keys) -> bytes:
    """Return the name of the last page of `keys`. Cached pages have their names, so only the rest is hashed."""
    known = found.identity
    if isinstance(cache, PrefixCache) and found.node is not None:
        known = cache.identity_of(found.node)
    *_, last = known, *identities(keys[found.num_pages * cache.page_size :].tobytes(), cache.page_size, known)
    return last
