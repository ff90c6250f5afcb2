"""Memory that pulls and loans hold is the first to be given up: nobody waits for it, and nobody is retracted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.wire.messages import Key, Ready, Returned
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.node_pair import expected, name_of
from tests.support.worlds.prefix_pulls import PullPair, Slow, job

TIGHT = CoreKnobs(num_pages=18)  # 17 pages, 5 of which a pull takes


def open_pull(rig: PullPair) -> Key:
    """A pull that has its memory, and gets no pages."""
    rig.net.drop = lambda source, target, message: isinstance(message, Ready)
    key = rig.ask(job(2))
    rig.net.run(until=lambda: any(pull.row for pull in rig.asker.pulls.open.values()))
    assert rig.asker.pulls.open, "it took no memory"
    return key


def pair(knobs: CoreKnobs = TIGHT) -> PullPair:
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
    rig, old = pair(), job(7, tokens=20, max_tokens=200, seed=3)
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
    rig, old = pair(CoreKnobs(num_pages=23)), job(7, tokens=20, max_tokens=200, seed=3)
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
    rig, large = pair(), job(7, tokens=240, seed=3)
    key = open_pull(rig)
    waiting = rig.net.generate(rig.p, large)
    rig.net.run()
    assert rig.net.router.streams[waiting] == expected(large) and rig.count("pull.gave_way") == 1
    rig.finish(key, job(2))


@pytest.mark.rule("Lf")
def test_a_hand_off_gets_the_memory_of_a_pull() -> None:
    """It has no grant yet, so it comes after all others; but pulls come after it."""
    rig, large = pair(), job(7, tokens=240, seed=3)
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
    rig, other = pair(CoreKnobs(max_running=2)), job(7, tokens=20, max_tokens=200, seed=3)
    key = open_pull(rig)
    keys = [rig.net.generate(rig.p, other), rig.net.generate(rig.p, job(8, tokens=20, max_tokens=200, seed=4))]
    rig.net.run()
    assert all(rig.net.router.ends[one] for one in keys) and rig.count("pull.gave_way") == 1
    rig.finish(key, job(2))


def test_pages_that_a_copy_writes_come_back_after_it() -> None:
    """The pull has given way; its row waits for the copy in flight, and the running row for those pages alone."""
    rig, old = pair(replace(TIGHT, backend="cpu")), job(7, tokens=20, max_tokens=200, seed=3)
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
