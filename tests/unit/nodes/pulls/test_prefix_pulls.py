"""A prefill node copies cached pages from another one, or computes: the stream is the same, and nothing is left."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest

from shared.device.events import Event
from shared.node.loop.node import Node
from shared.node.records.departure import Departure
from shared.node.run import check_at_exit
from shared.observe.log import Logger
from shared.wire.codec import key_of
from shared.wire.messages import FramesTaken, Lent, Message, Pull, Ready, Returned
from shared.wire.peers import Received
from tests.support.cores.core_rig import CoreKnobs
from tests.support.cores.hand_driven import HandDriven
from tests.support.worlds.node_pair import name_of
from tests.support.worlds.prefix_pulls import PullPair, Slow, changed, job

ONE = job(2)


def warm_pair(knobs: CoreKnobs | None = None, transport: str = "zmq", **more: Any) -> PullPair:
    """Its source has computed what ONE begins with."""
    rig = PullPair(knobs, transport, **more)
    rig.warm(job(1))
    return rig


@pytest.fixture
def rig() -> PullPair:
    return warm_pair()


def computed(rig: PullPair) -> int:
    rig.p.ctx.core.queues.counters.totals()
    return int(rig.p.ctx.core.queues.counters.prompt_tokens)


@pytest.mark.parametrize("transport", ["zmq", "shm"])
@pytest.mark.parametrize(
    "knobs",
    [
        CoreKnobs(),
        CoreKnobs(page_size=4),
        CoreKnobs(backend="cpu"),
        CoreKnobs(width=4, spec="eagle"),
        CoreKnobs(width=4, spec="ngram"),
    ],
)
def test_a_pulled_prefix_is_not_computed(knobs: CoreKnobs, transport: str) -> None:
    rig = warm_pair(knobs, transport)
    pages = 80 // knobs.page_size
    key = rig.ask(ONE, rig.source(ONE, pages))
    rig.finish(key, ONE)
    assert rig.count("pull.pulled") == 1 and rig.count("pulled_pages") == pages
    assert computed(rig) == len(ONE.prompt) - 80
    assert rig.count("loans", rig.s) == 1 and not rig.count("loans_expired", rig.s)


def test_prompts_with_one_prefix_wait_for_one_pull() -> None:
    rig, jobs = PullPair(CoreKnobs(max_running=16)), [job(number) for number in range(2, 6)]
    rig.warm(job(1))
    keys = [rig.ask(one) for one in jobs]
    rig.net.run_until_ended(keys)
    assert len(rig.said(Pull, rig.p)) == 1 and rig.count("pull.under_way") == 3
    assert computed(rig) == sum(len(one.prompt) - 80 for one in jobs)
    rig.rest()


def test_a_pull_in_vain_is_followed_by_one_computation() -> None:
    rig, jobs = PullPair(CoreKnobs(max_running=16, chunk_size=32)), [job(number) for number in range(2, 6)]
    rig.warm(job(1))
    rig.net.drop = lambda source, target, message: isinstance(message, Pull)
    keys = [rig.ask(one) for one in jobs]
    rig.net.run()
    assert not any(rig.net.router.ends[key] for key in keys)
    rig.net.at(1.1)
    rig.net.run_until_ended(keys)
    assert computed(rig) == 80 + sum(len(one.prompt) - 80 for one in jobs)
    rig.rest()


def test_a_source_with_fewer_pages_lends_those() -> None:
    rig, one = PullPair(), job(2)
    rig.warm(job(1, tokens=50))
    key = rig.ask(one)
    rig.finish(key, one)
    assert rig.count("pull.pulled") == 1 and rig.count("pulled_pages") == 3


def test_pages_of_an_adapter_and_a_salt_are_lent() -> None:
    knobs = CoreKnobs(adapters=("first", "second"))
    rig, one = (
        PullPair(knobs, s_knobs=replace(knobs, adapters=("second", "first"))),
        job(2, adapter="first", cache_salt=7),
    )
    rig.warm(job(1, adapter="first", cache_salt=7))
    key = rig.ask(one)
    rig.finish(key, one)
    assert rig.count("pull.pulled") == 1


def test_another_adapters_pages_are_not_lent() -> None:
    knobs = CoreKnobs(adapters=("first", "second"))
    rig, one = PullPair(knobs, s_knobs=replace(knobs, adapters=("second", "first"))), job(2, adapter="first")
    rig.warm(job(1, adapter="second"))  # with the number that the first one has at the node that asks
    key = rig.ask(one)
    rig.finish(key, one)
    assert rig.count("pull.refused") == 1 and not rig.count("pulled_pages")


# ---- whatever fails, the prompt is computed


def falls_back(rig: PullPair, outcome: str) -> None:
    one = job(2)
    key = rig.ask(one)
    rig.net.run()
    rig.net.at(1.1)
    rig.finish(key, one)
    assert rig.count(f"pull.{outcome}") == 1 and computed(rig) == len(one.prompt)


def test_pages_that_are_gone_are_computed() -> None:
    rig = PullPair()
    falls_back(rig, "refused")


@pytest.mark.parametrize("lost", [Pull, Ready])
def test_a_message_that_is_lost_costs_the_bound(rig: PullPair, lost: type[Message]) -> None:
    """Nothing more: at the bound the prompt is computed, and the source's loan ends by itself."""
    rig.net.drop = lambda source, target, message: isinstance(message, lost | Returned)
    key = rig.ask(ONE)
    rig.net.run()
    rig.p.next_heartbeat = 9.0
    assert not rig.net.router.streams[key] and rig.p.wakes_at == 1.0
    rig.net.at(0.99)
    rig.net.run()
    assert not rig.net.router.streams[key]
    rig.net.at(0.02)
    rig.net.run()
    assert rig.net.router.ends[key]
    rig.finish(key, ONE)
    assert rig.count("pull.late") == 1


def test_a_frozen_source_is_not_asked_again_at_once(rig: PullPair) -> None:
    rig.net.drop = lambda source, target, message: isinstance(message, Pull)
    falls_back(rig, "late")
    assert rig.asker.pulls._shunned
    rig.net.now = 1.2
    other = job(3, seed=1)
    rig.p.ctx.core.kv.flush_cache()
    rig.finish(rig.ask(other), other)
    assert rig.count("pull.not_asked") == 1


@pytest.mark.parametrize("kind", [Pull, Ready])
def test_a_source_that_dies_is_waited_for_no_longer(rig: PullPair, kind: type[Message]) -> None:
    rig.net.drop = lambda source, target, message: isinstance(message, kind)
    key = rig.ask(ONE)
    rig.net.run()
    rig.net.kill(rig.s)
    rig.net.run()
    assert rig.net.router.ends[key]
    rig.finish(key, ONE)
    assert rig.count("pull.lost") == 1


def test_pages_are_told_of_when_all_were_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then no router sends prompts to them, and no node may borrow them."""
    monkeypatch.setattr("prefill_node.send_queue.READY_BYTES", 1)  # one page in each message
    rig = warm_pair(transport="shm")
    told: list[bool] = []
    rig.p.ctx.core.kv.cache.listener = lambda identity, added: told.append(added is not None)
    rig.net.hold = lambda source, target, message: isinstance(message, Ready) and message.first_page == 4
    key = rig.ask(ONE)
    rig.net.run()
    (pull,) = rig.asker.pulls.open.values()
    assert pull.ranges is not None and pull.ranges.num_whole == 4
    assert not told and not rig.p.ctx.core.kv.cache.num_cached
    rig.s.ctx.core.pool.page_view(int(rig.net.kept[0][2].message.pages[0]))[0] ^= 1  # type: ignore[attr-defined]
    rig.net.let_go()
    rig.net.run(until=lambda: not rig.asker.pulls.open)
    assert rig.count("pull.failed") == 1 and not told
    rig.finish(key, ONE)


def test_an_answer_of_another_node_is_dropped(rig: PullPair) -> None:
    rig.net.hold = lambda source, target, message: isinstance(message, Lent | Ready)
    key = rig.ask(ONE)
    rig.net.run()
    held = [entry[2].message for entry in rig.net.kept if isinstance(entry[2].message, Lent)]
    rig.net.inboxes[name_of(rig.p)].append(Received(name_of(rig.d), held[0]))
    rig.net.run()
    assert not next(iter(rig.asker.pulls.open.values())).row
    rig.net.let_go()
    rig.finish(key, ONE)


def test_pages_that_were_not_asked_for_end_the_pull(rig: PullPair) -> None:
    """Those before the pull are cached here, and other requests read them."""
    rig.net.run_until_ended([rig.net.generate(rig.p, job(3, tokens=40))])
    rig.net.hold = lambda source, target, message: isinstance(message, Ready)
    key = rig.ask(ONE)
    rig.net.run()
    held = next(entry[2] for entry in rig.net.kept if isinstance(entry[2].message, Ready))
    assert isinstance(held.message, Ready) and held.message.first_page == 2
    frames = tuple(map(bytes, held.frames))
    lying = Received(name_of(rig.s), changed(held.message, first_page=1), frames)
    rig.net.inboxes[name_of(rig.p)].append(lying)
    rig.finish(key, ONE)
    assert rig.count("pull.failed") == 1


def test_lent_frames_that_do_not_fit_end_the_pull(rig: PullPair) -> None:
    """The defect: they were acknowledged, and kept until the copy, which a step in flight delays."""
    rig.net.hold = lambda source, target, message: isinstance(message, Ready) and target == name_of(rig.p)
    key = rig.ask(ONE)
    rig.net.run()
    (_, _, held), *_ = rig.net.kept
    rig.net.hold = lambda source, target, message: False
    rig.net.inboxes[name_of(rig.p)].append(
        Received(name_of(rig.s), held.message, tuple(bytes(8 << 20) for _ in held.frames))
    )
    rig.finish(key, ONE)
    assert rig.count("pull.failed") == 1 and not rig.said(FramesTaken, rig.p)


# ---- ends


def test_an_abort_ends_pull_and_loan(rig: PullPair) -> None:
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    key = rig.ask(ONE)
    rig.net.run()
    assert rig.asker.pulls.open and rig.lender.loans.open
    rig.net.abort(rig.p, key)
    rig.net.run()
    assert not rig.asker.pulls.open and not rig.lender.loans.open
    assert rig.count("pull.ended") == 1
    rig.rest()


def test_a_pull_ends_when_the_partner_computes_the_prompt(rig: PullPair) -> None:
    """The defect: the pull outlived its request. An idle node left with pages that nobody owned."""
    rig.net.drop = lambda source, target, message: isinstance(message, Ready) and target == name_of(rig.p)
    key = rig.ask(ONE, decode=rig.d)
    rig.net.run()
    assert rig.asker.pulls.open and rig.asker.inflight.granted
    scheduler = rig.d.ctx.core.scheduler
    scheduler.queues.retract(scheduler.queues.requests[key_of(key)])  # for lack of memory (rule c)
    rig.net.run()
    assert not rig.asker.pulls.open and not rig.lender.loans.open
    assert rig.count("pull.ended") == 1
    rig.net.settle(rig.p, rig.d, rig.s)
    rig.finish(key, ONE)


def test_a_row_stays_until_its_last_copy_has_ended() -> None:
    """A copy in flight writes the pages: nobody else may have them."""
    rig = warm_pair(CoreKnobs(backend="cpu"))
    rig.asker.pulls.copies.receivers = {"zmq": (slow := Slow(rig))}
    key = rig.ask(ONE)
    while not slow.has_begun.is_set():
        rig.net.turn()
    free = rig.p.ctx.core.kv.allocator.num_free
    rig.net.abort(rig.p, key)
    for _ in range(20):
        rig.net.turn()
    assert not rig.asker.pulls.open and len(rig.asker.pulls.copies.held) == 1
    assert rig.p.ctx.core.kv.allocator.num_free == free
    slow.may_go.set()
    while rig.asker.pulls.copies.held:
        rig.net.turn()
    assert rig.p.ctx.core.kv.allocator.num_free == free + 5
    rig.rest()


@pytest.mark.rule("H1")
def test_a_pulled_prefix_waits_for_the_newest_launched_step(rig: PullPair) -> None:
    """A page may have belonged to a request whose last step still runs and writes into it."""
    stream, core = HandDriven(), rig.p.ctx.core
    core.streams = core.engine.streams = replace(core.streams, transfer=stream)
    running = Event("last step of somebody else")
    core.engine.last_done = running
    key = rig.ask(ONE)
    rig.net.run()
    assert not stream.log, "a pull ran beside a step that may write the same pages"
    running.fire()
    stream.run()
    assert stream.log == ["pull prefix"]
    rig.finish(key, ONE)
    assert rig.count("pull.pulled") == 1


def test_a_lent_page_is_pinned_until_it_is_returned(rig: PullPair) -> None:
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    key = rig.ask(ONE)
    rig.net.run()
    assert rig.s.ctx.core.kv.flush_cache() < 6
    cached = rig.s.ctx.core.kv.cache.num_cached
    assert cached == 5
    rig.net.at(1.01)
    rig.net.run()
    assert rig.s.ctx.core.kv.flush_cache() == 5
    rig.finish(key, ONE)


def test_few_lent_pages_are_on_the_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two page sets of two pages and one of one, each after the one before was copied."""
    monkeypatch.setattr("prefill_node.unread.UNTAKEN_BYTES", 1)
    rig = PullPair()
    monkeypatch.setattr("prefill_node.send_queue.READY_BYTES", 2 * rig.s.ctx.core.pool.page_bytes)
    rig.warm(job(1))
    rig.net.hold = lambda source, target, message: isinstance(message, Ready)
    key = rig.ask(job(2))
    for _ in range(3):
        rig.net.run()
        assert len(rig.net.kept) == 1
        rig.net.release_held()
    rig.net.hold = lambda source, target, message: False
    rig.finish(key, job(2))
    assert rig.count("pull.pulled") == 1


def test_a_loan_ends_by_itself(rig: PullPair) -> None:
    rig.net.drop = lambda source, target, message: isinstance(message, Ready | Returned)
    key = rig.ask(ONE)
    rig.net.run()
    assert rig.lender.loans.open and rig.lender.wakes_at == 2.0
    rig.net.at(1.9)
    rig.net.run()
    assert rig.lender.loans.open
    rig.net.at(0.2)
    rig.net.run()
    assert not rig.lender.loans.open and rig.count("loans_expired", rig.s) == 1
    rig.finish(key, ONE)


def test_a_loan_ends_with_the_node_that_asked(rig: PullPair) -> None:
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    rig.ask(ONE)
    rig.net.run()
    rig.net.kill(rig.p)
    rig.net.run()
    assert not rig.lender.loans.open
    rig.net.settle(rig.s)


# ---- what is lent, and to whom


def pull_of(rig: PullPair, **fields: object) -> tuple[Pull, Lent]:
    """What the source answers to a Pull with these fields changed."""
    one = job(2)
    rig.net.drop = lambda source, target, message: isinstance(message, Pull)
    rig.ask(one)
    asked: list[Message] = []
    rig.net.on_message = lambda source, target, message: asked.append(message)
    rig.net.run()
    pull = next(message for message in asked if isinstance(message, Pull))
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    message = changed(pull, **fields)
    return message, rig.say(message)


def test_a_ticket_opens_one_loan_of_the_pages_it_names(rig: PullPair) -> None:
    pull, lent = pull_of(rig)
    assert lent.num_pages == 5
    again = rig.say(changed(pull, lease=pull.lease + 1))
    assert not again.num_pages and "used before" in again.reason


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"last_page": b"\x07" * 16}, "without a router's ticket"),
        ({"prompt_ids": list(range(80))}, "pages that its ticket does not allow"),
        ({"prompt_ids": list(range(200))}, "more tokens"),
        ({"num_pages": 4}, "differ in number"),
        ({"transports": ["gloo"]}, "no transport"),
        ({"adapter": "unknown"}, "pages that its ticket does not allow"),
    ],
)
def test_what_no_router_said_is_not_lent(rig: PullPair, fields: dict[str, object], why: str) -> None:
    _, lent = pull_of(rig, **fields)
    assert not lent.num_pages and why in lent.reason
    assert not rig.lender.loans.open


def test_a_refused_pull_is_said_of_the_node_that_asked(rig: PullPair) -> None:
    said: list[dict[str, object]] = []
    rig.s.ctx.log.warning = lambda kind, text, **fields: said.append(fields)  # type: ignore
    pull_of(rig, prompt_ids=list(range(80)))
    assert [fields["peer"] for fields in said] == [name_of(rig.p)]


def test_another_nodes_ticket_opens_nothing(rig: PullPair) -> None:
    rig.net.drop = lambda source, target, message: isinstance(message, Pull)
    asked: list[Message] = []
    rig.net.on_message = lambda source, target, message: asked.append(message)
    rig.ask(job(2))
    rig.net.run()
    pull = next(message for message in asked if isinstance(message, Pull))
    lent = rig.say(pull, peer=name_of(rig.d))
    assert not lent.num_pages and "ticket" in lent.reason
    assert rig.count("refused.ticket", rig.s) == 1


def test_a_late_ticket_opens_nothing(rig: PullPair) -> None:
    rig.net.now = 2e9
    _, lent = pull_of(rig)
    assert not lent.num_pages and "expired" in lent.reason


def test_pages_of_other_numbers_are_not_lent(rig: PullPair) -> None:
    other = changed(rig.p.ctx.facts.fingerprint, numerics=99)
    _, lent = pull_of(rig, fingerprint=other)
    assert not lent.num_pages and "numerics" in lent.reason


def test_pages_are_lent_to_a_neighbouring_version(rig: PullPair) -> None:
    ours = rig.p.ctx.facts.fingerprint
    _, lent = pull_of(rig, fingerprint=changed(ours, protocol=ours.protocol + 1))
    assert lent.num_pages == 5


def test_few_pages_are_lent_at_a_time() -> None:
    rig = warm_pair(s_knobs=CoreKnobs(num_pages=18))
    _, lent = pull_of(rig)
    assert not lent.num_pages and "limit of lent pages" in lent.reason


def test_a_node_that_leaves_lends_nothing(rig: PullPair) -> None:
    rig.s.ctx.leaving = Departure()
    _, lent = pull_of(rig)
    assert not lent.num_pages and "lends nothing" in lent.reason


# ---- what a pull may take


def test_a_pull_takes_no_row_that_somebody_waits_for() -> None:
    rig = warm_pair(CoreKnobs(max_running=1))
    rig.finish(rig.ask(ONE), ONE)
    assert rig.count("pull.no_memory") == 1


def test_a_pull_takes_no_pages_that_somebody_waits_for() -> None:
    rig = warm_pair(CoreKnobs(num_pages=9), s_knobs=CoreKnobs())
    rig.finish(rig.ask(ONE), ONE)
    assert rig.count("pull.no_memory") == 1


def test_one_source_is_asked_for_a_few_prompts_at_a_time() -> None:
    """It lends no more to one node. The others are computed, and do not wait for its answers."""
    rig, jobs = PullPair(CoreKnobs(max_running=16)), [job(number, seed=number) for number in range(2, 12)]
    rig.warm(job(1))
    rig.net.drop = lambda source, target, message: isinstance(message, Pull)
    keys = [rig.ask(one) for one in jobs]
    rig.net.run()
    assert len(rig.asker.pulls.open) == 8 and rig.count("pull.not_asked") == 2
    assert [key for key in keys if rig.net.router.ends[key]] == keys[8:]
    rig.net.at(1.1)
    rig.net.run_until_ended(keys)
    rig.rest()


def test_a_prompt_that_is_cached_here_is_not_pulled(rig: PullPair) -> None:
    first = job(3)
    rig.net.run_until_ended([rig.net.generate(rig.p, first)])
    rig.finish(rig.ask(ONE), ONE)
    assert rig.count("pull.cached_here") == 1 and not rig.said(Pull, rig.p)


def test_a_wrong_answer_raises_nothing(rig: PullPair) -> None:
    rig.net.hold = lambda source, target, message: isinstance(message, Lent)
    key = rig.ask(ONE)
    rig.net.run()
    lent = rig.net.kept[0][2].message
    assert isinstance(lent, Lent)
    rig.net.inboxes[name_of(rig.p)].append(Received(name_of(rig.s), changed(lent, num_pages=6)))
    rig.finish(key, ONE)
    assert rig.count("pull.failed") == 1


# ---- a node ends


def leave(rig: PullPair, node: Node) -> str:
    """The end of a drain, as the daemon has it. Return what is logged."""
    node.fail_all("its time is up")
    rig.net.tick(name_of(node))
    node.goodbye()
    log = io.StringIO()
    check_at_exit(node, Logger("exit", log))
    return log.getvalue()


def test_a_loan_ends_with_the_node_that_lends() -> None:
    rig = PullPair()
    rig.warm(job(1))
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    rig.ask(job(2))
    rig.net.run()
    assert rig.lender.loans.open and rig.s.idle, "a node does not stay for those that read its pages"
    assert leave(rig, rig.s) == ""
    rig.s.ctx.core.kv.check_integrity(idle=True)


def test_a_node_is_not_idle_while_a_copy_is_in_flight() -> None:
    rig = PullPair(CoreKnobs(backend="cpu"))
    rig.warm(job(1))
    rig.asker.pulls.copies.receivers = {"zmq": (slow := Slow(rig))}
    rig.ask(job(2))
    rig.turn_until(slow.has_begun.is_set)
    said = leave(rig, rig.p)
    assert not rig.p.idle and rig.asker.pulls.copies.held, "the copy still writes"
    assert said == ""
    slow.may_go.set()
    rig.turn_until(lambda: rig.p.idle)
    rig.p.ctx.core.kv.check_integrity(idle=True)
