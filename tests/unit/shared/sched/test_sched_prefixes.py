"""A common prefix is computed once: the others wait for the one that computes it, and for nobody who waits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from shared.core.errors import BatonError
from shared.core.keys import RequestKey
from shared.core.sampling_params import SamplingParams
from shared.node.records.core import NodeCore
from tests.support.cores.core_rig import CoreKnobs, Job, Outcome, make_core
from tests.support.cores.steps import run_until_still, submit

ANSWER = SamplingParams(max_tokens=8, temperature=0.0)
STEM, OWN, PAGE = 168, 10, 16
COMMON = STEM // PAGE * PAGE
KNOBS = CoreKnobs(num_pages=2000, max_running=64, chunk_size=64)


def tokens(seed: int, num: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(95) for _ in range(num))


def jobs_of(num: int, stem: int = STEM, own: int = OWN, first: int = 0) -> list[Job]:
    return [Job(rid, tokens(0, stem) + tokens(rid + 1, own), ANSWER, rid) for rid in range(first, first + num)]


def steps_until(core: NodeCore, outcome: Outcome, name: str) -> int:
    """Step until the stream has a token."""
    begin = core.loop.num_steps
    while not outcome.streams.get(name):
        core.step(block=True)
        outcome.take(core)
    return core.loop.num_steps - begin


def check(core: NodeCore, jobs: list[Job], outcome: Outcome) -> None:
    for job in jobs:
        assert outcome.streams[f"r{job.rid}"] == job.expected_of(job.seed)
    core.kv.check_integrity(idle=True)
    prefixes = core.queues.prefixes
    assert not (prefixes._leaders or prefixes._leads or prefixes._waits_for or prefixes._wanted), "nothing is left"


@pytest.mark.parametrize("chunk_size", [48, 64, 512])
@pytest.mark.parametrize(
    "knobs", [{}, {"width": 4, "spec": "eagle"}, {"width": 3, "spec": "ngram"}, {"window": 40}], ids=str
)
def test_a_burst_computes_its_prefix_once(chunk_size: int, knobs: dict[str, Any]) -> None:
    core = make_core(replace(KNOBS, chunk_size=chunk_size, **knobs))
    jobs = [replace(job, window=knobs.get("window", 0)) for job in jobs_of(16)]
    submit(core, *jobs)
    outcome = run_until_still(core)
    assert core.queues.counters.prompt_tokens == COMMON + 16 * (STEM - COMMON + OWN)
    check(core, jobs, outcome)


def test_a_follower_needs_only_what_it_shares() -> None:
    """It begins when the common pages are computed; the other prompt goes on for long."""
    core = make_core(KNOBS)
    jobs = [*jobs_of(1, stem=64, own=300), *jobs_of(1, stem=64, first=1)]
    submit(core, *jobs)
    outcome = Outcome()
    assert steps_until(core, outcome, "r1") <= 4
    assert not outcome.streams.get("r0"), "the long prompt is not over"
    check(core, jobs, run_until_still(core, outcome=outcome))


def test_waiting_takes_no_longer_than_computing() -> None:
    """The prompt with the common prefix is long and not the oldest: it moves as if it were its short follower."""

    def first_token_step(shared: bool) -> int:
        core = make_core(replace(KNOBS, chunk_size=32))
        oldest = Job(0, tokens(50, 400), ANSWER, 0)
        leader = Job(1, tokens(0, 320) + tokens(51, 100), ANSWER, 1)
        middle = [Job(rid, tokens(60 + rid, 100), ANSWER, rid) for rid in (2, 3, 4)]
        follower = Job(5, tokens(0 if shared else 9, 48) + tokens(52, 4), ANSWER, 5)
        submit(core, oldest, leader, *middle, follower)
        return steps_until(core, Outcome(), "r5")

    assert first_token_step(shared=True) <= first_token_step(shared=False) + 1


@pytest.mark.parametrize("how", ["abort", "fail", "retract"])
def test_the_leader_s_end_releases_the_others(how: str) -> None:
    core, jobs = make_core(KNOBS), jobs_of(4)
    submit(core, *jobs)
    outcome = Outcome()
    core.step(block=True)
    outcome.take(core)
    queues, leader = core.queues, RequestKey("test", 1, "r0", 0, 0)
    assert [chunk.request.key for chunk in queues.prefilling] == [leader] and len(queues.waiting) == 3
    if how == "abort":
        queues.abort(leader)
    elif how == "fail":
        queues.fail(leader, BatonError("made up"))
    else:
        queues.retract(queues.requests[leader])
    core.step(block=True)
    outcome.take(core)
    assert len(queues.prefilling) == 1, "one of them computes now, the others wait for it"
    run_until_still(core, outcome=outcome)
    check(core, jobs if how == "retract" else jobs[1:], outcome)


@pytest.mark.parametrize("what", ["salt", "adapter", "scores", "no page", "no cache"])
def test_who_can_t_share_does_not_wait(what: str) -> None:
    knobs = replace(KNOBS, adapters=("a", "b"), chunk_size=32, prefix_cache=what != "no cache")
    first, second = jobs_of(2, stem=PAGE - 1 if what == "no page" else STEM)
    if what == "salt":
        second = replace(second, cache_salt=7)
    elif what == "adapter":
        first, second = replace(first, adapter="a"), replace(second, adapter="b")
    elif what == "scores":
        second = replace(second, sampling=replace(ANSWER, prompt_logprobs=0))
    core = make_core(knobs)
    submit(core, first, second)
    core.step(block=True)
    assert not core.queues.waiting, "both have begun"
    outcome = Outcome()
    outcome.take(core)
    check(core, [first, second], run_until_still(core, outcome=outcome))


def test_nobody_waits_for_a_prompt_under_suspicion() -> None:
    """After a step that failed, its prompts are computed each alone; the same prefix is computed by each."""
    core, jobs = make_core(KNOBS), jobs_of(3)
    submit(core, *jobs)
    queues = core.queues
    suspect = core.queues.requests[RequestKey("test", 1, "r0", 0, 0)]
    queues.suspects.add(suspect)
    core.step(block=True)
    assert len(core.queues.prefilling) == 2, "one that is not suspected computes the prefix for the third"
    outcome = Outcome()
    outcome.take(core)
    check(core, jobs, run_until_still(core, outcome=outcome))


def test_a_cached_prompt_waits_for_no_scored_one() -> None:
    """That one is computed although its prefix is cached."""
    core, outcome = make_core(KNOBS), Outcome()
    jobs = jobs_of(3, stem=400)
    submit(core, *jobs[:1])
    run_until_still(core, outcome=outcome)
    jobs[1] = replace(jobs[1], sampling=replace(ANSWER, prompt_logprobs=0))
    submit(core, *jobs[1:])
    assert steps_until(core, outcome, "r2") <= 3
    check(core, jobs, run_until_still(core, outcome=outcome))


def test_a_rewound_prompt_leads_nobody() -> None:
    core, jobs = make_core(KNOBS), jobs_of(2)
    core.scheduler.intake.submit(jobs[0].request(handoff_to="d"))
    core.step(block=True)
    leader = core.queues.prefilling[0].request
    core.queues.rewind(leader)
    core.scheduler.intake.submit(jobs[1].request())
    assert not core.queues.prefixes.makes_wait(core.queues.waiting[-1])
    core.queues.abort(leader.key)
    check(core, jobs[1:], run_until_still(core))


def test_few_prompts_are_hashed_in_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.sched.memory.prefixes.MOST_NAMED", 3 * (STEM + OWN))
    core, jobs = make_core(KNOBS), jobs_of(9)
    submit(core, *jobs)
    core.scheduler.planner.plan()
    assert sum(req.page_names is not None for req in core.queues.requests.values()) == 1 + 3, "the leader and three"
