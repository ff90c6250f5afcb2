"""Intake, ends and order of the scheduler: abort in every state, deadlines, siblings, the cap on ungranted pages,
what is reported to the node."""

from __future__ import annotations

import random
from collections.abc import ValuesView
from dataclasses import replace

import pytest

from shared.core.errors import DeadlineExceeded, IntegrityError, TooLarge
from shared.core.keys import RequestKey, sequence_seed
from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.model.math.interface import LayerMarks
from shared.node.records.core import NodeCore
from shared.sched.steps.draft_length import FixedWidth
from shared.sched.steps.events import ChunkLaunched, Ended, HandoffUnpinned
from tests.support.cores.core_rig import (
    CoreKnobs,
    Job,
    Outcome,
    assert_streams,
    assert_whole,
    make_core,
    run_local,
)
from tests.support.cores.steps import bring_to, plans_of, step, submit

BACKENDS = ("inline", "cpu", "simulated")


def job(rid: int, num_prompt: int = 20, max_tokens: int = 30, **sampling: object) -> Job:
    rng = random.Random(rid)
    prompt = tuple(rng.randrange(95) for _ in range(num_prompt))
    return Job(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.8, **sampling), rid)  # type: ignore[arg-type]


def run_dry(core: NodeCore) -> None:
    while core.queues.requests or not core.loop.idle:
        core.loop.step(block=True)
        core.queues.take_events()


def test_a_request_that_can_never_fit_ends_at_once() -> None:
    core = make_core(CoreKnobs(num_pages=5, page_size=16))
    for req in (job(0, 60, 30).request(), job(1, 500, 100).request(), job(2, 0).request()):
        core.scheduler.intake.submit(req)
        (event,) = core.queues.take_events()
        assert isinstance(event, Ended) and isinstance(event.error, TooLarge) and req.finished
    assert not core.queues.requests and core.scheduler.planner.plan() is None


@pytest.mark.rule("H24")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("state", ["waiting", "prefilling", "running"])
@pytest.mark.parametrize("width", [1, 4])
def test_abort_in_every_local_state_frees_all_and_harms_no_other(backend: str, state: str, width: int) -> None:
    for steps in range(4):
        core = make_core(CoreKnobs(backend, chunk_size=16, width=width, seed=steps, num_pages=60))
        others = [job(rid, 30 + rid) for rid in range(3)]
        for other in others:
            core.scheduler.intake.submit(other.request())
        victim = job(9, 60, 60).request()
        core.scheduler.intake.submit(victim)
        bring_to(state, core, victim)
        for _ in range(steps if state != "waiting" else 0):
            core.loop.step()
        if not victim.finished:
            core.queues.abort(victim.key)
        assert victim.finished and victim.row == 0
        core.kv.check_integrity()
        outcome = run_local(core, [])
        assert_streams(others, outcome)
        assert outcome.ends["r9"].num_output_tokens == len(outcome.streams["r9"]) == len(victim.output_ids)
        assert_whole(core)


def test_late_words_of_a_request_that_has_ended_are_legal() -> None:
    core = make_core(CoreKnobs())
    (req,) = submit(core, job(0))
    run_local(core, [])
    core.queues.abort(req.key)
    core.queues.fail(req.key, IntegrityError("late"))
    core.queues.complete_handoff(req.key)
    core.queues.set_granted(req.key)
    assert core.queues.take_events() == []


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running"])
def test_a_deadline_ends_a_request_in_any_state(state: str) -> None:
    core = make_core(CoreKnobs(chunk_size=16))
    late, other = job(0, 60).request(), job(1, 60)
    late.deadline = 10.0
    core.scheduler.intake.submit(late)
    core.scheduler.intake.submit(other.request())
    bring_to(state, core, late)
    core.queues.expire(10.0)
    assert not late.finished, "at its deadline it is not late"
    core.queues.expire(10.5)
    assert late.finished
    outcome = run_local(core, [])
    assert outcome.ends["r0"].reason is FinishReason.ERROR
    assert isinstance(outcome.ends["r0"].error, DeadlineExceeded)
    assert_streams([other], outcome)
    assert_whole(core)


# ---- siblings (n > 1)


def siblings(core: NodeCore, count: int) -> list[Job]:
    first = job(0, 41, 20)
    family = [replace(first, seq_index=index, seed=sequence_seed(first.seed, index)) for index in range(count)]
    for one in family:
        core.scheduler.intake.submit(one.request())
    return family


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_siblings_wait_for_the_first_one_and_share_its_pages(backend: str, overlap: bool) -> None:
    core = make_core(CoreKnobs(backend, overlap, page_size=4, chunk_size=16, seed=1))
    family = siblings(core, 4)
    outcome = run_local(core, [])
    assert list(outcome.streams.values()) == [one.expected() for one in family]
    assert [end.cached_tokens for _, end in sorted(outcome.ends.items())] == [0, 40, 40, 40]
    assert_whole(core)


def test_a_gated_sibling_blocks_nobody_behind_it() -> None:
    core = make_core(CoreKnobs(page_size=4, chunk_size=16))
    siblings(core, 2)
    core.scheduler.intake.submit(job(7, 9).request())
    core.loop.step()
    assert [req.key.seq_index for req in core.queues.waiting] == [1]
    run_dry(core)


# ---- the cap on ungranted pages


@pytest.mark.parametrize(("cap", "pinned"), [(12, 2), (3, 1)])
def test_hand_offs_without_a_grant_pin_pages_up_to_the_cap(cap: int, pinned: int) -> None:
    """Five pages each; one that is larger than the cap goes alone. A local one is not in that queue."""
    core = make_core(CoreKnobs(page_size=4, max_ungranted_pages=cap))
    offers = [job(rid, 20).request(handoff_to="decode") for rid in range(4)]
    local = job(8, 20).request()
    for req in (*offers, local):
        core.scheduler.intake.submit(req)
    bring_to("handed_off", core, offers[pinned - 1])
    bring_to("running", core, local)
    assert [req.state.value for req in offers] == ["handed_off"] * pinned + ["waiting"] * (4 - pinned)
    core.queues.set_granted(offers[0].key)
    bring_to("handed_off", core, offers[pinned])
    for req in offers:
        core.queues.complete_handoff(req.key)
    run_local(core, [])


def test_a_long_queue_behind_the_cap_is_counted_once_a_plan() -> None:
    """Counted anew for each who waits, a thousand of them took 100 ms of every plan."""

    class Watched(dict[RequestKey, Request]):
        rounds = 0

        def values(self) -> ValuesView[Request]:
            self.rounds += 1
            return super().values()

    core = make_core(CoreKnobs(page_size=4, max_ungranted_pages=12))
    core.queues.ungranted = watched = Watched()
    for rid in range(30):
        core.scheduler.intake.submit(job(rid, 20).request(handoff_to="decode"))
    assert core.scheduler.planner.plan() is not None and watched.rounds == 1
    assert len(core.queues.waiting) == 28, "5 pages each, 12 allowed"


@pytest.mark.parametrize("short_of", ["rows", "pages"])
def test_a_granted_prompt_pushes_out_those_without_a_grant(short_of: str) -> None:
    """Their decode node may be full of prompts that wait for memory here."""
    small = {"max_running": 2} if short_of == "rows" else {"num_pages": 13}
    core = make_core(CoreKnobs(page_size=4, **small))  # type: ignore[arg-type]
    pinned = [job(rid, 20, 9).request(handoff_to="decode") for rid in range(2)]
    for req in pinned:
        core.scheduler.intake.submit(req)
    while [req.state.value for req in pinned] != ["handed_off"] * 2:
        core.loop.step(block=True)
    outcome = Outcome()
    outcome.take(core)
    granted = job(2, 20, 9).request(handoff_to="decode")
    core.scheduler.intake.submit(granted)
    core.queues.set_granted(granted.key)
    step(core, 4)
    assert [req.state.value for req in (*pinned, granted)] == ["handed_off", "waiting", "handed_off"]
    assert pinned[1].key in {event.request.key for event in outcome.take(core) if isinstance(event, HandoffUnpinned)}
    core.queues.complete_handoff(granted.key)
    while pinned[1].state.value != "handed_off":
        core.loop.step(block=True)
    outcome.take(core)  # checks that its first token came again
    for req, one in zip(pinned, (job(0, 20, 9), job(1, 20, 9)), strict=True):
        assert outcome.streams[req.key.rid] == req.output_ids == one.expected()[:1]
        core.queues.complete_handoff(req.key)
    assert_whole(core)


# ---- what is reported


@pytest.mark.rule("H29")
def test_a_retraction_does_not_count_as_a_cache_hit() -> None:
    core = make_core(CoreKnobs(page_size=4))
    req = job(0, 22, 6).request()
    core.scheduler.intake.submit(req)
    bring_to("running", core, req)
    core.loop.step(block=True)
    core.queues.retract(req)
    outcome = run_local(core, [])
    assert core.queues.counters.cached_prompt_tokens == 20 and outcome.ends["r0"].cached_tokens == 0
    again = run_local(core, [replace(job(0, 22, 6), rid=1)])
    assert again.ends["r1"].cached_tokens == 20


def test_a_launched_step_announces_its_chunks() -> None:
    core = make_core(CoreKnobs(chunk_size=16))
    for rid in (0, 1):
        core.scheduler.intake.submit(job(rid, 9 + rid, 3).request())
    plan = core.scheduler.planner.plan()
    assert plan is not None and plan.num_prefill == 2
    core.queues.take_events()
    core.scheduler.planner.launched(plan, LayerMarks((1,)))
    announced = [event for event in core.queues.take_events() if isinstance(event, ChunkLaunched)]
    assert [(event.key.rid, event.is_last) for event in announced] == [("r0", True), ("r1", False)]
    core.scheduler.planner.launched(plan, None)
    assert not core.queues.take_events(), "nobody waits for layers"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 4])
def test_no_step_follows_those_that_end_an_answer(backend: str, width: int) -> None:
    core = make_core(CoreKnobs(backend, width=width))
    core.scheduler.planner.widths = FixedWidth(1)
    launched = plans_of(core)
    core.scheduler.intake.submit(job(0, max_tokens=12).request())
    run_dry(core)
    assert len(launched) == 12


def test_a_retracted_row_without_draft_state_is_recomputed_whole() -> None:
    """And then its pages are a prefix for others too."""
    core = make_core(CoreKnobs(page_size=4))
    req = job(0, 22, 6).request()
    core.scheduler.intake.submit(req)
    req.lacks_draft_state = True
    bring_to("running", core, req)
    core.loop.step(block=True)
    core.queues.retract(req)
    assert not req.lacks_draft_state and core.kv.cache.num_cached == 0
    run_dry(core)
    assert core.kv.cache.num_cached > 22 // 4


def test_steps_alternate_without_mixing_and_nobody_starves() -> None:
    core = make_core(CoreKnobs(mix=False, chunk_size=8))
    decoding, long = job(0, 5, 60), job(1, 150, 5)
    core.scheduler.intake.submit(decoding.request())
    step(core, 3)
    core.scheduler.intake.submit(long.request())
    plans = plans_of(core)
    assert_streams([decoding, long], run_local(core, []))
    kinds = [(plan.num_prefill, plan.batch_size) for plan in plans]
    assert all(prefill in (0, size) for prefill, size in kinds), "a step is one or the other"
    assert kinds[:8].count((1, 1)) == 4 == kinds[:8].count((0, 1))
