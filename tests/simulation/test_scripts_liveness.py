"""Memory liveness: each rule in the schedule in which its absence livelocks. Page size 1, so that every token is a
page; the budgets leave room above what the rules need."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shared.core.request import Request
from shared.core.states import FinishReason
from shared.node.records.core import NodeCore
from shared.sched.steps.events import GrantRevoked
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, assert_streams, make_core
from tests.support.cores.scripted_core import job


def tight_core(num_pages: int, **knobs: object) -> NodeCore:
    defaults: dict = {"page_size": 1, "prefix_cache": False, "max_running": 16}
    return make_core(CoreKnobs(num_pages=num_pages + 1, **(defaults | knobs)))


class OfferStorm:
    """A decode core under more offers than it can hold. A revoked one is given up and offered anew, as a router's next
    attempt would be; its pages come back in the next round, when its pull is known to be over."""

    def __init__(self, core: NodeCore, num_prompt: int) -> None:
        self.core = core
        self.num_prompt = num_prompt
        self.outcome = Outcome()
        self.num_offers = 0
        self.num_revoked = 0
        self.held: list[int] = []

    def offer(self) -> Request:
        self.num_offers += 1
        return job(1000 + self.num_offers, self.num_prompt, 5).request()

    def round(self) -> None:
        scheduler = self.core.scheduler
        for row in self.held:
            scheduler.queues.budget.release_held(row)
        self.held = []
        while not scheduler.queues.waiting and scheduler.grants.grant(self.offer(), "p") is not None:
            pass  # retracted requests come first
        self.core.loop.step()
        for event in self.outcome.take(self.core):
            if isinstance(event, GrantRevoked):
                self.num_revoked += 1
                self.held.append(event.row)
                scheduler.queues.abort(event.request.key)

    def run(self, until: Callable[[], bool], budget: int) -> None:
        for _ in range(budget):
            if until():
                return
            self.round()
        raise AssertionError(f"no end within {budget} steps, {self.num_revoked} grants were revoked")


def start(core: NodeCore, *jobs: Job) -> list[Request]:
    requests = [one.request() for one in jobs]
    for req in requests:
        core.scheduler.intake.submit(req)
    for _ in range(200):
        if all(req.state.value == "running" for req in requests):
            return requests
        core.loop.step()
    raise AssertionError("they never ran")


@pytest.mark.rule("La")
def test_rule_a_a_running_row_goes_on_under_a_storm_of_offers() -> None:
    """Every free page is asked for in every round. Admission leaves room for one reservation per decoding row; without
    it the row would need a page in each round, revoke a grant for it, and find the page granted away again."""
    core = tight_core(60)
    old = job(1, 8, 40)
    (req,) = start(core, old)
    storm = OfferStorm(core, 8)
    storm.run(lambda: req.finished, budget=120)
    assert storm.outcome.streams["r1"][-10:] == old.expected()[-10:] and storm.num_revoked < 40
    core.close()


@pytest.mark.rule("Lb")
def test_rule_b_two_long_prompts_do_not_wait_for_each_other() -> None:
    """Each fits alone, both do not: whoever begins has all its pages. With a chunk's pages each, none could end."""
    core = tight_core(40, chunk_size=8)
    jobs = [job(1, 34, 2), job(2, 34, 2)]
    for one in jobs:
        core.scheduler.intake.submit(one.request())
    outcome = Outcome()
    for _ in range(60):
        core.loop.step()
        outcome.take(core)
    assert len(outcome.ends) == 2, f"no end within 60 steps: {[r.state.value for r in core.queues.requests.values()]}"
    assert_streams(jobs, outcome)
    core.close()


@pytest.mark.rule("H38", "Lc")
def test_rule_c_a_grant_whose_sender_froze_gives_way() -> None:
    """Its pages are held for a transfer that never comes; it is younger than the row that needs one, so it goes."""
    core = tight_core(42)
    old = job(1, 8, 30)
    (req,) = start(core, old)
    frozen = job(2, 14, 5).request()
    assert core.scheduler.grants.grant(frozen, "p") == 0
    outcome = Outcome()
    for _ in range(80):
        core.loop.step()
        for event in outcome.take(core):
            if isinstance(event, GrantRevoked):
                core.queues.budget.release_held(event.row)
        if req.finished:
            break
    assert req.finished, f"no end within 80 steps: {req.state.value}"
    assert outcome.ends["r1"].reason is FinishReason.LENGTH
    assert req.incarnation == 0, "the oldest is never a victim"
    core.close()


@pytest.mark.rule("I10", "Lc")
def test_rule_c_the_oldest_ends_however_many_come_after_it() -> None:
    """A closed loop of young ones in a pool that is always short. Youngest first as victims, and seniority that
    survives retraction: the oldest runs as if it were alone."""
    core = tight_core(64, chunk_size=16)
    (req,) = start(core, job(1, 20, 40))
    rng, young, outcome, used = random.Random(1), 0, Outcome(), 0
    while not req.finished:
        used += 1
        assert used < 120, (
            f"no end within 120 steps: the oldest is {req.state.value}, {req.incarnation} times retracted"
        )
        while len(core.queues.requests) < 6:
            young += 1
            core.scheduler.intake.submit(job(1 + young, rng.randrange(3, 12), 15).request())
        core.loop.step()
        outcome.take(core)
    assert outcome.streams["r1"][-10:] == job(1, 20, 40).expected()[-10:] and req.incarnation == 0
    core.close()


@pytest.mark.rule("Ld")
def test_rule_d_a_missing_page_costs_one_grant_not_a_long_prompt() -> None:
    """While the revoked grant's pages are on their way back, short rows skip a step. Retracting on until somebody's
    pages are free at once would send the long prompt back to its beginning every time, so it never ends."""
    core = tight_core(600, chunk_size=2)
    start(core, *[job(rid, 8, 140) for rid in range(1, 4)])
    long = job(50, 120, 5).request()
    core.scheduler.intake.submit(long)
    core.loop.step()
    assert long.state.value == "prefilling"
    storm = OfferStorm(core, 30)
    storm.run(lambda: long.finished, budget=100)
    assert long.incarnation == 0
    core.close()


@pytest.mark.rule("Le")
def test_rule_e_pages_of_a_given_up_grant_come_back() -> None:
    """Whatever waits, waits for something that surely ends, and somebody is told when it may end it."""
    core = tight_core(40)
    for rid in range(1, 10):
        granted = job(rid, 12, 5).request()
        if core.scheduler.grants.grant(granted, "p") is None:
            break
        core.queues.abort(granted.key)
        for event in core.queues.take_events():
            if isinstance(event, GrantRevoked):
                core.queues.budget.release_held(event.row)
    last = job(20, 20, 10)
    core.scheduler.intake.submit(last.request())
    outcome = Outcome()
    for _ in range(40):
        core.loop.step()
        outcome.take(core)
    assert "r20" in outcome.ends, "no end within 40 steps"
    assert_streams([last], outcome)
    core.close()
