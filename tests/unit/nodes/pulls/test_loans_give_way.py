"""A node lends what its own requests do not need, and no peer gets all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.wire.messages import Key, Lent, Pull, Ready, Returned
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.node_pair import expected, name_of
from tests.support.worlds.prefix_pulls import PullPair, Slow, job

TIGHT = CoreKnobs(num_pages=41)  # 40 pages, 5 of which may be lent to one peer


def lending(knobs: CoreKnobs = TIGHT) -> PullPair:
    """`s` has lent 5 pages, which nobody copies."""
    rig = PullPair(s_knobs=knobs)
    rig.warm(job(1))
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    rig.ask(job(2))
    rig.net.run()
    assert rig.lender.loans.open
    return rig


def test_pages_that_prompts_wait_for_are_not_lent() -> None:
    rig = PullPair(s_knobs=TIGHT)
    rig.warm(job(1))
    rig.net.hold = lambda source, target, message: isinstance(message, Pull)
    rig.ask(job(2))
    rig.net.run()
    ((_, _, pull),) = rig.net.kept
    first = rig.net.generate(rig.s, job(7, tokens=330, max_tokens=100, seed=3))
    rig.net.run(until=lambda: bool(rig.net.router.streams[first]))
    rig.net.generate(rig.s, job(8, tokens=300, seed=4))
    rig.net.run(until=lambda: bool(rig.s.ctx.core.queues.waiting))
    lent = rig.say(pull.message)
    assert not lent.num_pages and "its own requests" in lent.reason and rig.s.ctx.core.queues.waiting
    rig.net.at(2.0)
    rig.rest()


@pytest.mark.rule("Lf")
def test_a_loan_ends_where_a_prompt_needs_its_pages() -> None:
    rig, jobs = lending(), [job(7, tokens=280, max_tokens=60, seed=3), job(8, tokens=280, seed=4)]
    keys = [rig.net.generate(rig.s, one) for one in jobs]
    rig.net.run()
    assert [rig.net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    assert rig.count("loans_gave_way", rig.s) == 1 and not rig.lender.loans.open
    assert rig.count("pull.refused") == 1, "the other node heard of it, and computes"
    rig.rest()


@pytest.mark.rule("Lf")
def test_a_loan_ends_where_a_hand_off_needs_its_pages() -> None:
    rig, jobs = lending(), [job(7, tokens=280, max_tokens=60, seed=3), job(8, tokens=280, seed=4)]
    rig.net.no_way.add((name_of(rig.s), name_of(rig.d)))
    keys = [rig.net.generate(rig.s, one, rig.d) for one in jobs]
    rig.net.run()
    assert rig.count("loans_gave_way", rig.s) == 1
    assert all(req.row for req in rig.s.ctx.core.requests.values())
    for key in keys:
        rig.net.abort(rig.s, key)
    rig.rest()


@pytest.mark.rule("Lf")
def test_a_loan_ends_where_a_running_row_needs_its_pages() -> None:
    """Two rows of 18 pages in the end: nobody is retracted."""
    rig, jobs = lending(), [job(7, tokens=200, max_tokens=85, seed=3), job(8, tokens=200, max_tokens=85, seed=4)]
    keys = [rig.net.generate(rig.s, one) for one in jobs]
    rig.net.run()
    assert [rig.net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    assert rig.count("loans_gave_way", rig.s) == 1 and not rig.s.ctx.core.queues.counters.retractions
    rig.rest()


def test_a_loan_stays_where_a_prompt_lacks_a_row_alone() -> None:
    rig = lending(CoreKnobs(max_running=1))
    jobs = [job(7, tokens=40, max_tokens=60, seed=3), job(8, tokens=40, seed=4)]
    keys = [rig.net.generate(rig.s, one) for one in jobs]
    rig.net.run()
    assert all(rig.net.router.ends[key] for key in keys) and rig.lender.loans.open
    rig.net.at(2.0)
    rig.rest()


def test_a_loan_stays_where_only_foreseen_growth_is_lacking() -> None:
    rig = lending(replace(TIGHT, growth_reserve=1.0))
    speaks = rig.net.generate(rig.s, job(7, tokens=40, max_tokens=300, seed=3))
    rig.net.run(until=lambda: bool(rig.net.router.streams[speaks]))
    waits = rig.net.generate(rig.s, job(8, tokens=240, max_tokens=8, seed=4))
    rig.net.run(until=lambda: len(rig.net.router.streams[speaks]) >= 100)
    assert rig.s.ctx.core.queues.waiting and rig.lender.loans.open
    rig.net.abort(rig.s, waits)
    rig.net.at(2.0)
    rig.rest()


def test_no_peer_gets_all_that_may_be_lent() -> None:
    """16 pages may be lent in all, and 8 of them to one: 5 are, and 5 more would be too many."""
    rig = PullPair(s_knobs=CoreKnobs(num_pages=65))
    rig.warm(job(9, seed=5))
    rig.warm(job(1))
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    rig.ask(job(2))
    rig.ask(job(10, seed=5))
    rig.net.run()
    first, second = (lent for lent in rig.said(Lent, rig.s) if isinstance(lent, Lent))
    assert first.num_pages == 5 and not second.num_pages and "to one node" in second.reason
    rig.net.at(2.0)
    rig.rest()


# ---- pulls


TIGHT_PULL = CoreKnobs(num_pages=18)  # 17 pages, 5 of which a pull takes


def open_pull(rig: PullPair) -> Key:
    """A pull that has its memory, and gets no pages."""
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    key = rig.ask(job(2))
    rig.net.run(until=lambda: any(pull.row for pull in rig.asker.pulls.open.values()))
    assert rig.asker.pulls.open, "it took no memory"
    return key


def pulling(knobs: CoreKnobs = TIGHT_PULL) -> PullPair:
    """Only the asking node is short of memory."""
    rig = PullPair(knobs, s_knobs=CoreKnobs())
    rig.warm(job(1))
    return rig


def run_until_it_speaks(rig: PullPair, one: Job) -> Key:
    key = rig.net.generate(rig.p, one)
    rig.net.run(until=lambda: bool(rig.net.router.streams[key]))
    return key


@pytest.mark.rule("Lf")
def test_running_rows_go_on_while_pages_are_pulled() -> None:
    """The row needs 14 pages in the end; without the pull's it would stand still until that is over."""
    rig, old = pulling(), job(7, tokens=20, max_tokens=200, seed=3)
    running = run_until_it_speaks(rig, old)
    key = open_pull(rig)
    rig.net.run()
    assert rig.net.router.streams[running] == expected(old) and rig.net.router.ends[running]
    assert rig.count("pull.gave_way") == 1 and not rig.p.ctx.core.queues.counters.retractions
    assert rig.said(Returned, rig.p) and not rig.lender.loans.open
    rig.finish(key, job(2))


@pytest.mark.rule("Lf")
def test_the_youngest_pull_gives_way_first() -> None:
    """The other one follows: what the first gave up is too little for its own prompt, which must not wait either."""
    rig, old = pulling(CoreKnobs(num_pages=23)), job(7, tokens=20, max_tokens=200, seed=3)
    rig.warm(job(9, seed=5))
    running = run_until_it_speaks(rig, old)
    first = open_pull(rig)
    second = rig.ask(job(8, seed=5))
    rig.net.run()
    assert [message.key for message in rig.said(Returned, rig.p) if isinstance(message, Returned)] == [second, first]
    assert rig.net.router.streams[running] == expected(old)
    assert rig.net.router.streams[second] == expected(job(8, seed=5))
    rig.finish(first, job(2))


@pytest.mark.rule("Lf")
def test_a_prompt_gets_the_memory_of_a_pull() -> None:
    rig, large = pulling(), job(7, tokens=240, seed=3)
    key = open_pull(rig)
    waiting = rig.net.generate(rig.p, large)
    rig.net.run()
    assert rig.net.router.streams[waiting] == expected(large) and rig.count("pull.gave_way") == 1
    rig.finish(key, job(2))


@pytest.mark.rule("Lf")
def test_a_hand_off_gets_the_memory_of_a_pull() -> None:
    """It has no grant yet, so it comes after all others; but pulls come after it."""
    rig, large = pulling(), job(7, tokens=240, seed=3)
    key = open_pull(rig)
    rig.net.no_way.add((name_of(rig.p), name_of(rig.d)))
    waiting = rig.net.generate(rig.p, large, rig.d)
    rig.net.run()
    request = next(req for req in rig.p.ctx.core.requests.values() if req.key.rid == "r7")
    assert request.row and rig.count("pull.gave_way") == 1
    rig.net.abort(rig.p, waiting)
    rig.finish(key, job(2))


@pytest.mark.rule("Lf")
def test_a_prompt_gets_the_row_of_a_pull() -> None:
    rig, other = pulling(CoreKnobs(max_running=2)), job(7, tokens=20, max_tokens=200, seed=3)
    key = open_pull(rig)
    keys = [rig.net.generate(rig.p, other), rig.net.generate(rig.p, job(8, tokens=20, max_tokens=200, seed=4))]
    rig.net.run()
    assert all(rig.net.router.ends[one] for one in keys) and rig.count("pull.gave_way") == 1
    rig.finish(key, job(2))


def test_pages_that_a_copy_writes_come_back_after_it() -> None:
    """The pull has given way; its row waits for the copy in flight, and the running row for those pages alone."""
    rig, old = pulling(replace(TIGHT_PULL, backend="cpu")), job(7, tokens=20, max_tokens=200, seed=3)
    running = rig.net.generate(rig.p, old)
    rig.turn_until(lambda: bool(rig.net.router.streams[running]))
    rig.asker.pulls.copies.receivers = {"zmq": (slow := Slow(rig))}
    key = rig.ask(job(2))
    rig.turn_until(lambda: rig.count("pull.gave_way") > 0)
    assert slow.has_begun.is_set() and len(rig.asker.pulls.copies.held) == 1
    for _ in range(20):
        rig.net.turn()
    assert len(rig.asker.pulls.copies.held) == 1 and rig.p.ctx.core.queues.budget.num_held == 5
    slow.may_go.set()
    rig.net.run_until_ended([running])
    assert rig.net.router.streams[running] == expected(old)
    assert not rig.p.ctx.core.queues.counters.retractions
    rig.finish(key, job(2))
