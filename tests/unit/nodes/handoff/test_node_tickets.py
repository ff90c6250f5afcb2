"""A decode node reserves memory on a router's word only: forged, foreign, used and late tickets open nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from decode_node import vouchers
from shared.core.errors import DeadlineExceeded, HandoffFailed, Overloaded
from shared.core.keys import RequestKey
from shared.core.sampling_params import SamplingParams
from shared.node.records.leases import Leases
from shared.node.records.spent_tickets import KEPT_LONGER_S, SpentTickets
from shared.node.routers.dialled import RouterState
from shared.node.routers.lives import SessionKey
from shared.wire.codec import key_of
from shared.wire.messages import Grant, Message, Offer, Prebuilt, Ready, Refuse, Welcome
from shared.wire.peers import PeerClosed, Received
from shared.wire.tickets import NodeTicket, is_genuine, make_ticket, ticket_key
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.oracles.grammar_oracle import GRAMMARS, Later, make_grammars
from tests.support.worlds.node_pair import (
    ROUTER,
    ROUTER_EPOCH,
    ROUTER_ID,
    SECRET,
    Net,
    make_node,
    name_of,
)


def job(number: int = 1, tokens: int = 20, max_tokens: int = 5) -> Job:
    prompt = tuple((number * 7 + i) % 40 for i in range(tokens))
    return Job(number, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.0), number)


class Pair:
    """A prefill node whose Offers a test may change, and keep, on their way to a decode node."""

    def __init__(self, knobs: CoreKnobs | None = None, epoch: int = 1) -> None:
        self.p, self.d = make_node("prefill", "p", knobs or CoreKnobs()), make_node("decode", "d", knobs or CoreKnobs())
        self.net = Net([self.p, self.d])
        self.offers: list[Offer] = []
        self.net.on_message = self._keep
        self.net.run()

    def _keep(self, source: str, target: str, message: Message) -> None:
        if isinstance(message, Offer):
            self.offers.append(message)

    def offer_of(self, one: Job, *, n: int = 1) -> Offer:
        """A genuine Offer that never arrived."""
        self.net.drop = lambda source, target, message: isinstance(message, Offer)
        key = self.net.generate(self.p, one, self.d, num_sequences=n)
        self.net.run()
        self.net.drop = lambda source, target, message: False
        assert self.offers[-1].key == key
        return self.offers[-1]

    def say(self, offer: Offer, source: str = "") -> Message | None:
        """The decode node's answer to an Offer that comes from this source."""
        before = len(self.net.seen)
        self.net.inboxes[name_of(self.d)].append(Received(source or name_of(self.p), offer))
        self.net.drop = lambda source, target, message: isinstance(message, Ready | Prebuilt)
        for _ in range(3):
            self.net.tick(name_of(self.d))
        answers = [message for _, _, message in self.net.seen[before:] if isinstance(message, Grant | Refuse)]
        return answers[0] if answers else None

    @property
    def num_refused(self) -> float:
        return self.d.ctx.metrics.counters()["refused.ticket"]


def changed(**fields: object) -> Callable[[Offer], Offer]:
    def change(offer: Offer) -> Offer:
        assert offer.ticket is not None
        return msgspec.structs.replace(offer, ticket=msgspec.structs.replace(offer.ticket, **fields))

    return change


def with_key(**fields: object) -> Callable[[Offer], Offer]:
    return lambda offer: msgspec.structs.replace(offer, key=msgspec.structs.replace(offer.key, **fields))


@pytest.mark.parametrize(
    "forge",
    [
        lambda offer: msgspec.structs.replace(offer, ticket=None),
        changed(code=b""),
        changed(code=bytes(32)),
        changed(most_tokens=1000),
        changed(deadline_ms=10**11),
        changed(num_sequences=5),
        with_key(rid="invented"),
        with_key(attempt=1),
        with_key(seq_index=1),
    ],
    ids=["none", "empty", "zeros", "more tokens", "later", "more sequences", "rid", "attempt", "sequence"],
)
def test_what_no_router_said_opens_nothing(forge: Callable[[Offer], Offer]) -> None:
    pair = Pair()
    answer = pair.say(forge(pair.offer_of(job())))
    assert isinstance(answer, Refuse) and answer.code == HandoffFailed.code and "ticket" in answer.reason
    assert pair.num_refused == 1 and not pair.d.side.outside() and not pair.d.ctx.core.requests


def test_a_ticket_is_for_one_prefill_node() -> None:
    pair = Pair()
    pair.net.inboxes["q@1"] = deque()
    answer = pair.say(pair.offer_of(job()), source="q@1")
    assert isinstance(answer, Refuse) and pair.num_refused == 1


def test_a_ticket_counts_the_tokens_of_prompt_and_answer() -> None:
    pair = Pair()
    offer = pair.offer_of(job(max_tokens=5))
    more = msgspec.structs.replace(offer.sampling, max_tokens=6)
    answer = pair.say(msgspec.structs.replace(offer, sampling=more))
    assert isinstance(answer, Refuse) and "more tokens" in answer.reason
    assert isinstance(pair.say(offer), Grant), "at the border"


def test_a_ticket_is_used_once() -> None:
    pair = Pair()
    offer = pair.offer_of(job())
    assert isinstance(pair.say(offer), Grant)
    pair.net.abort(pair.d, offer.key)
    pair.say(offer)
    pair.net.at(61.0)  # its tombstone is gone
    pair.net.tick(name_of(pair.d))
    answer = pair.say(offer)
    assert isinstance(answer, Refuse) and "used before" in answer.reason


def test_a_short_offer_leaves_nothing_of_its_ticket() -> None:
    """The defect: a ticket counted as used until the deadline that its Offer named, the prefill node's own word."""
    pair = Pair()
    offer, other = pair.offer_of(job(1)), pair.offer_of(job(2))
    assert offer.remaining_ms > 100
    assert isinstance(pair.say(msgspec.structs.replace(offer, remaining_ms=100)), Grant)
    for seconds in (1.0, 61.0):  # it is over, and its tombstone is gone
        pair.net.at(seconds)
        pair.net.tick(name_of(pair.d))
    assert isinstance(pair.say(other), Grant), "this one looks which used tickets are over"
    answer = pair.say(offer)
    assert isinstance(answer, Refuse) and "used before" in answer.reason


def test_an_offer_ends_with_its_ticket_whatever_it_says() -> None:
    """The defect: remaining_ms was the prefill node's own word, and renewals kept the memory until then."""
    pair = Pair()
    offer = pair.offer_of(job())
    soon = make(pair, offer, deadline_ms=10_000)
    assert isinstance(pair.say(msgspec.structs.replace(soon, remaining_ms=10**9)), Grant)
    (handoff,) = pair.d.side.transfers.open.values()
    for _ in range(9):
        pair.net.at(1.0)
        handoff.touched = pair.net.now  # as if renewed
        pair.net.tick(name_of(pair.d))
    assert pair.d.side.transfers.open
    pair.net.at(1.1)
    handoff.touched = pair.net.now
    pair.net.tick(name_of(pair.d))
    pair.net.tick(name_of(pair.d))
    assert not pair.d.side.transfers.open and not pair.d.ctx.core.requests


def make(pair: Pair, offer: Offer, **changes: int) -> Offer:
    """The same, as the router would have said it with other figures."""
    assert offer.ticket is not None
    fields = {name: getattr(offer.ticket, name) for name in ("num_sequences", "most_tokens", "deadline_ms")} | changes
    key = ticket_key(SECRET, name_of(pair.d))
    return msgspec.structs.replace(offer, ticket=make_ticket(key, key_of(offer.key), name_of(pair.p), **fields))


def test_a_ticket_that_is_over_opens_nothing() -> None:
    pair = Pair()
    offer = pair.offer_of(job())
    pair.net.at(10.0)
    answer = pair.say(make(pair, offer, deadline_ms=9_000))
    assert isinstance(answer, Refuse) and answer.code == DeadlineExceeded.code
    assert isinstance(pair.say(make(pair, offer, deadline_ms=10_001)), Grant)


def test_a_deadline_is_stretched_by_what_clocks_drift() -> None:
    word = SessionKey(b"k", ahead_s=-100.0, since=50.0)
    assert vouchers.local_time(word, 160_000, now=50.0) == 60.0
    assert vouchers.local_time(word, 160_000, now=1050.0) == 61.0


def test_an_offer_before_its_router_s_welcome_is_judged_after_it() -> None:
    pair = Pair()
    offer, forged = pair.offer_of(job(1)), changed(code=bytes(32))(pair.offer_of(job(2)))
    pair.d.ctx.routers.dialled[ROUTER].end(RouterState.DIALLED)
    assert pair.say(offer) is None and pair.say(forged) is None and len(pair.d.side.outside()) == 2
    assert not pair.d.idle, "who drains this node must not think that it has nothing left to do"
    pair.net.to_node(name_of(pair.d), Welcome(ROUTER_ID, ROUTER_EPOCH, connection=1))
    before = len(pair.net.seen)
    for _ in range(3):
        pair.net.tick(name_of(pair.d))
    kinds = [type(message) for _, _, message in pair.net.seen[before:] if isinstance(message, Grant | Refuse)]
    assert sorted(kind.__name__ for kind in kinds) == ["Grant", "Refuse"] and pair.num_refused == 1


def test_without_a_key_no_ticket_is_genuine() -> None:
    key = RequestKey("r", 1, "x", 0, 0)
    ticket = make_ticket(b"", key, "p@1", num_sequences=1, most_tokens=9, deadline_ms=1)
    assert isinstance(ticket, NodeTicket) and not is_genuine(b"", key, "p@1", ticket)
    assert is_genuine(b"k", key, "p@1", make_ticket(b"k", key, "p@1", num_sequences=1, most_tokens=9, deadline_ms=1))


# ---- shares


def test_a_source_that_finishes_nothing_leaves_others_a_quarter() -> None:
    pair = Pair(CoreKnobs(max_running=8))
    offers = [pair.offer_of(job(number)) for number in range(1, 9)]
    answers = [pair.say(offer) for offer in offers]
    assert [type(answer).__name__ for answer in answers] == ["Grant"] * 6 + ["NoneType"] * 2
    assert len(pair.d.side.outside()) == 2
    handoff = next(iter(pair.d.side.transfers.open.values()))
    pair.net.abort(pair.d, offers[0].key)
    pair.net.tick(name_of(pair.d))
    pair.net.tick(name_of(pair.d))
    assert handoff.key not in pair.d.side.transfers.open and len(pair.d.side.outside()) == 1, "room for one more"


# ---- grammars


def compile_later(pair: Pair) -> Later:
    """The compilations that the decode node asks for, from now on."""
    executor = Later()
    pair.d.ctx.core.scheduler.intake._grammars = make_grammars(executor)
    executor.run()  # the compiler's own beginning
    return executor


def with_grammar(pair: Pair, number: int) -> Offer:
    offer = pair.offer_of(job(number))
    return msgspec.structs.replace(offer, sampling=msgspec.structs.replace(offer.sampling, grammar=GRAMMARS[0]))


def test_no_grammar_is_compiled_without_a_ticket() -> None:
    """The defect: refused Offers filled an unbounded queue in front of the one thread that compiles."""
    pair = Pair()
    executor, offer = compile_later(pair), with_grammar(pair, 1)
    assert isinstance(pair.say(msgspec.structs.replace(offer, ticket=None)), Refuse)
    pair.d.ctx.facts = replace(pair.d.ctx.facts, max_waiting=0)
    answer = pair.say(offer)
    assert isinstance(answer, Refuse) and answer.code == Overloaded.code
    assert not executor.waiting
    pair.d.ctx.facts = replace(pair.d.ctx.facts, max_waiting=1)
    assert pair.say(offer) is None and len(executor.waiting) == 1
    executor.run()
    pair.net.tick(name_of(pair.d))
    assert pair.d.side.transfers.open


def test_an_early_offer_s_grammar_is_compiled_after_the_welcome() -> None:
    pair = Pair()
    executor, offer = compile_later(pair), with_grammar(pair, 1)
    pair.d.ctx.routers.dialled[ROUTER].end(RouterState.DIALLED)
    assert pair.say(offer) is None and not executor.waiting
    pair.net.to_node(name_of(pair.d), Welcome(ROUTER_ID, ROUTER_EPOCH, connection=1))
    pair.net.tick(name_of(pair.d))
    assert len(executor.waiting) == 1
    executor.run()
    pair.net.tick(name_of(pair.d))
    assert pair.d.side.transfers.open


@pytest.mark.parametrize("end", ["abort", "deadline", "source"])
def test_an_offer_that_ends_ungranted_compiles_nothing(end: str) -> None:
    pair = Pair()
    compile_later(pair)
    offer = with_grammar(pair, 1)
    assert pair.say(offer) is None
    (req,) = pair.d.side.outside()
    assert req.constraint is not None and not req.constraint.is_ready
    if end == "abort":
        pair.net.abort(pair.d, offer.key)
    elif end == "deadline":
        pair.net.at(10_000.0)
    else:
        pair.net.inboxes[name_of(pair.d)].append(PeerClosed(name_of(pair.p), accepted=True))
    pair.net.tick(name_of(pair.d))
    assert not pair.d.side.outside() and req.constraint.is_ready, "cancelled"


# ---- books


def test_a_used_ticket_is_kept_beyond_its_deadline() -> None:
    """A later Welcome may move the deadline, and the ticket would open again."""
    spent: SpentTickets[str] = SpentTickets()
    spent.spend("a", deadline=10.0, now=0.0)
    spent.spend("b", deadline=500.0, now=10.0 + KEPT_LONGER_S)
    assert "a" in spent and "b" in spent
    spent.spend("c", deadline=500.0, now=10.1 + KEPT_LONGER_S)
    assert "a" not in spent and "b" in spent


def test_so_many_used_tickets_are_kept_and_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.node.records.spent_tickets.MAX_SPENT", 3)
    spent: SpentTickets[int] = SpentTickets()
    for number in range(5):
        spent.spend(number, deadline=100.0, now=0.0)
    assert len(spent) == 3 and [number for number in range(5) if number in spent] == [2, 3, 4]


def test_leases_are_numbered_apart_in_each_epoch() -> None:
    first, second = Leases(7), Leases(8)
    numbers = [leases.next() for leases in (first, second) for _ in range(3)]
    assert len(set(numbers)) == 6 and [number >> 32 for number in numbers] == [7, 7, 7, 8, 8, 8]
    assert Leases((1 << 40) + 5).next() < 1 << 64, "a lease is 64 bits on the wire"
