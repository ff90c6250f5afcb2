"""The rules that keep a full pool moving, one by one (the livelocks: simulation/test_scripts_liveness)."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.engine.lease import StepLease
from shared.engine.plan import StepPlan
from shared.node.records.core import NodeCore
from shared.sched.memory.page_budget import pick_victim
from shared.sched.steps.events import GrantRevoked
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, draw_jobs, make_core, run_local


def job(rid: int, num_prompt: int, max_tokens: int = 60) -> Job:
    rng = random.Random(rid)
    prompt = tuple(rng.randrange(95) for _ in range(num_prompt))
    return Job(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.8), rid)


def core_with(num_free_pages: int, **knobs: object) -> NodeCore:
    """Page size 1 makes every token a page; no cache, so that what is free is all there is."""
    return make_core(CoreKnobs(page_size=1, num_pages=num_free_pages + 1, prefix_cache=False, **knobs))  # type: ignore[arg-type]


def submit(core: NodeCore, *jobs: Job) -> list[Request]:
    requests = [one.request() for one in jobs]
    for req in requests:
        core.scheduler.intake.submit(req)
    return requests


def states(*requests: Request) -> list[str]:
    return [req.state.value for req in requests]


def until_running(core: NodeCore, *requests: Request) -> None:
    for _ in range(20):
        if set(states(*requests)) == {"running"}:
            return
        core.loop.step(block=True)
    raise AssertionError(f"they are {states(*requests)}")


@pytest.mark.rule("La")
def test_rule_a_running_rows_reserve_before_anyone_is_admitted() -> None:
    """20 pages: the old row has 11; the new prompt wants the last 9, and the old row's next token wants one."""
    core = core_with(20)
    (old,) = submit(core, job(0, 8, 9))
    for _ in range(3):
        core.loop.step()
    pages = int(core.kv.rows.num_pages[old.row])
    (new,) = submit(core, job(1, 20 - pages - 1, 2))
    core.loop.step()
    assert int(core.kv.rows.num_pages[old.row]) == pages + 1 and states(old, new) == ["running", "waiting"]
    assert new.incarnation == 0, "it was never let in"
    core.close()


@pytest.mark.rule("La")
def test_rule_a_admission_leaves_a_reservation_per_decoding_row() -> None:
    core = core_with(30)
    submit(core, job(0, 5, 20), job(1, 5, 20))
    for _ in range(3):
        core.loop.step()
    free_next = core.kv.num_available - 2  # both rows take a page before anyone is admitted
    (tight,) = submit(core, job(2, free_next - 2, 2))
    core.loop.step()
    assert tight.state.value == "waiting", "it fits with its own first token, but not with a page for both old rows"
    core.queues.abort(tight.key)
    free_next = core.kv.num_available - 2
    (fits,) = submit(core, job(3, free_next - 3, 2))
    core.loop.step()
    assert fits.state.value != "waiting" and core.kv.num_available == 2
    core.close()


@pytest.mark.rule("Lb")
def test_rule_b_a_prompt_reserves_all_its_pages_at_once() -> None:
    core = core_with(40, chunk_size=4)
    (req,) = submit(core, job(0, 30, 5))
    core.loop.step()
    assert int(core.kv.rows.num_pages[req.row]) == 31 and req.computed <= 4
    core.close()


@pytest.mark.rule("Lb")
def test_rule_b_holders_go_before_a_retracted_head() -> None:
    """The head of the queue is older than all, and still whoever holds pages gets the next one first."""
    core = core_with(28, chunk_size=64)
    head, holder = submit(core, job(0, 9, 15), job(1, 9, 6))
    core.loop.step()
    core.loop.step()
    assert states(head, holder) == ["running", "running"]
    core.queues.retract(head)
    core.queues.waiting[0].arrival = -1
    before = int(core.kv.rows.num_pages[holder.row])
    available = core.kv.num_available
    core.scheduler.planner.plan()
    assert int(core.kv.rows.num_pages[holder.row]) > before and available > core.kv.num_available
    core.close()


@pytest.mark.rule("Lc")
@given(st.lists(st.integers(0, 50), unique=True, max_size=8))
def test_rule_c_the_youngest_arrival_goes_and_the_oldest_never(arrivals: list[int]) -> None:
    holders = [job(arrival, 3).request() for arrival in arrivals]
    victim = pick_victim(holders)
    if len(arrivals) < 2:
        assert victim is None
    else:
        assert victim is not None and victim.arrival == max(arrivals)


@pytest.mark.rule("Lc")
@pytest.mark.parametrize("youngest", ["running", "prefilling", "granted"])
def test_rule_c_all_holders_are_victims(youngest: str) -> None:
    core = core_with(30, chunk_size=64 if youngest == "running" else 3)
    old, victim = job(0, 6, 20).request(), job(1, 12, 12).request()
    core.scheduler.intake.submit(old)
    while old.state.value != "running":
        core.loop.step()
    if youngest == "granted":
        assert core.scheduler.grants.grant(victim, "p") == 0
    else:
        core.scheduler.intake.submit(victim)
        core.loop.step()
        core.loop.step() if youngest == "running" else None
    assert states(old, victim) == ["running", youngest]
    core.kv.alloc_row("stuffing")
    core.kv.grow(core.kv.rows.rows_in_use()[-1], core.kv.num_available)
    for _ in range(3):
        core.loop.step()
    assert states(old, victim) == ["running", "waiting"]
    revoked = [event for event in core.queues.take_events() if isinstance(event, GrantRevoked)]
    assert bool(revoked) == (youngest == "granted")
    core.close()


@pytest.mark.rule("Lc")
def test_rule_c_a_victim_s_pages_are_used_in_the_same_plan() -> None:
    core = core_with(30)
    old, victim = submit(core, job(0, 6, 20), job(1, 6, 20))
    until_running(core, old, victim)
    core.kv.alloc_row("stuffing")
    core.kv.grow(core.kv.rows.rows_in_use()[-1], core.kv.num_available)
    launch, plans = core.engine.launch, list[tuple[str, list[RequestKey]]]()

    def watch(plan: StepPlan) -> StepLease:
        plans.append((victim.state.value, [row_id.key for row_id in plan.row_ids]))
        return launch(plan)

    core.engine.launch = watch  # type: ignore[method-assign]
    for _ in range(5):
        core.loop.step(block=True)
    assert [keys for state, keys in plans if state == "waiting"][:1] == [[old.key]]
    assert len(plans) == 5, "no step was missed"
    core.close()


@pytest.mark.rule("Lc")
def test_rule_c_seniority_survives_retraction() -> None:
    core = core_with(60)
    first, second, third = submit(core, job(0, 5, 20), job(1, 5, 20), job(2, 5, 20))
    core.loop.step()
    core.loop.step()
    assert states(first, second, third) == ["running"] * 3
    for req in (second, third, first):
        core.queues.retract(req)
    assert core.queues.waiting == [first, second, third]
    assert [req.arrival for req in core.queues.waiting] == [0, 1, 2]
    core.close()


@pytest.mark.rule("H25", "Lc")
def test_rule_c_hand_offs_are_no_victims() -> None:
    """Their pages are promised to a peer."""
    core = core_with(30)
    handed = job(1, 10, 15).request(handoff_to="decode")
    (old,) = submit(core, job(0, 6, 20))
    core.loop.step()
    core.scheduler.intake.submit(handed)
    for _ in range(4):
        core.loop.step()
    assert handed.state.value == "handed_off"
    core.queues.set_granted(handed.key)
    core.kv.alloc_row("stuffing")
    core.kv.grow(core.kv.rows.rows_in_use()[-1], core.kv.num_available)
    before = int(core.kv.rows.num_pages[handed.row])
    for _ in range(4):
        core.loop.step()
    assert handed.state.value == "handed_off" and int(core.kv.rows.num_pages[handed.row]) == before
    assert old.incarnation == 0, "it waits for a page, it is not retracted for nothing"
    core.close()


def handed_off(core: NodeCore, *jobs: Job) -> list[Request]:
    offers = [one.request(handoff_to="decode") for one in jobs]
    for req in offers:
        core.scheduler.intake.submit(req)
    for _ in range(20):
        if states(*offers) == ["handed_off"] * len(offers):
            return offers
        core.loop.step(block=True)
    raise AssertionError(f"they are {states(*offers)}")


def stuff(core: NodeCore, num_pages: int) -> int:
    """Take pages away. Return the row that has them."""
    row = core.kv.alloc_row("stuffing")
    assert row is not None and core.kv.grow(row, num_pages)
    return row


@pytest.mark.rule("Lc")
def test_rule_c_ungranted_hand_offs_give_way_to_a_running_row() -> None:
    """Nobody else may have asked for their pages yet, and the decode node may wait for this very row."""
    core = core_with(30)
    (old,) = submit(core, job(0, 6, 20))
    until_running(core, old)
    (offer,) = handed_off(core, job(1, 10, 15))
    stuff(core, core.kv.num_available)
    before = len(old.output_ids)
    for _ in range(6):
        core.loop.step(block=True)
    assert states(offer) == ["waiting"] and len(old.output_ids) >= before + 4
    core.close()


def test_hand_offs_stay_if_their_memory_is_too_little() -> None:
    """The prompt lacks 27 pages, then 11. Each of the four hand-offs has five."""
    core = core_with(40)
    offers = handed_off(core, *(job(rid, 5, 9) for rid in range(4)))
    row = stuff(core, 16)
    (late,) = submit(core, job(9, 30, 5))
    for _ in range(10):
        core.loop.step()
    assert states(late, *offers) == ["waiting"] + ["handed_off"] * 4
    assert core.queues.counters.retractions == 0 and not core.loop.step()
    core.kv.release(row)
    until_running(core, late)
    assert states(*offers) == ["handed_off"] + ["waiting"] * 3
    core.close()


def test_hand_offs_that_gave_way_in_vain_give_way_once() -> None:
    """They share nine of their ten pages with a running row, so they free one page each."""
    core = make_core(CoreKnobs(page_size=4, num_pages=41))
    shared = job(0, 38, 60)
    (old,) = submit(core, shared)
    until_running(core, old)
    offers = handed_off(core, *(dataclasses.replace(shared, rid=rid) for rid in range(1, 5)))
    (late,) = submit(core, job(9, 120, 5))
    for _ in range(30):
        core.loop.step(block=True)
    assert core.queues.counters.retractions <= len(offers) and states(old) == ["running"]
    core.queues.abort(old.key)
    until_running(core, late)
    core.close()


@pytest.mark.rule("Ld")
def test_rule_d_a_short_row_skips_while_pages_are_coming_back() -> None:
    """One grant is revoked for the row that needs a page; until its pull is over nobody else is retracted."""
    core = core_with(44)
    old, young = submit(core, job(0, 6, 30), job(1, 6, 30))
    while states(old, young) != ["running", "running"]:
        core.loop.step()
    granted = job(2, 20).request()
    assert core.scheduler.grants.grant(granted, "p") == 0
    core.kv.alloc_row("stuffing")
    core.kv.grow(core.kv.rows.rows_in_use()[-1], core.kv.num_available)
    for _ in range(5):
        core.loop.step()
    assert states(old, young, granted) == ["running", "running", "waiting"]
    (revoked,) = [event for event in core.queues.take_events() if isinstance(event, GrantRevoked)]
    tokens = (len(old.output_ids), len(young.output_ids))
    core.loop.step()
    assert (len(old.output_ids), len(young.output_ids)) == tokens, "both skip"
    core.queues.budget.release_held(revoked.row)
    for _ in range(3):
        core.loop.step()
    assert len(old.output_ids) > tokens[0] and len(young.output_ids) > tokens[1] and young.incarnation == 0
    core.close()


@pytest.mark.rule("H43", "Le")
def test_rule_e_a_held_row_counts_until_its_event_frees_it() -> None:
    core = core_with(30)
    granted = job(0, 8).request()
    core.scheduler.grants.grant(granted, "p")
    core.queues.abort(granted.key)
    (revoked,) = [event for event in core.queues.take_events() if isinstance(event, GrantRevoked)]
    assert core.queues.budget.num_held == 9 and core.kv.num_available == 21
    core.kv.check_integrity()
    core.queues.budget.release_held(revoked.row)
    assert core.kv.num_available == 30
    assert_whole(core)
    core.close()


@pytest.mark.rule("H23")
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_pool_that_holds_one_request_serves_many(width: int, page_size: int) -> None:
    """The smallest pool that `submit` accepts them in."""
    for seed in range(3):
        rng = random.Random(seed)
        jobs = draw_jobs(rng, 8, max_prompt=60)
        most = max(len(one.prompt) + one.sampling.max_tokens + 3 * width for one in jobs)
        knobs = CoreKnobs(width=width, page_size=page_size, num_pages=-(-most // page_size) + 1, chunk_size=16)
        core = make_core(knobs)
        outcome = run_local(core, jobs, budget=1500)
        assert_streams(jobs, outcome)
        assert_whole(core)
        core.close()


@pytest.mark.parametrize("longest", range(12, 20))
def test_what_fits_fits_with_all_that_its_last_steps_reserve(longest: int) -> None:
    """Prompt, answer and three windows."""
    req = job(0, longest - 5, 5).request()
    for num_pages, fits in ((longest + 3, True), (longest + 2, False)):
        core = core_with(num_pages)
        assert core.settings.overshoot == 3 and core.queues.budget.can_ever_hold(req) is fits
        core.close()


def test_rows_that_their_requests_left_are_counted() -> None:
    """A pipeline launches late samplings before anybody else has such a row."""
    core = core_with(60)
    ended, retracted = submit(core, job(0, 6, 20), job(1, 6, 20))
    granted = job(2, 6, 20).request()
    assert core.scheduler.grants.grant(granted, "p") == 0
    until_running(core, ended, retracted)
    assert core.queues.budget.num_left == 0
    core.queues.abort(ended.key)
    assert core.queues.budget.num_left == 1
    core.queues.retract(retracted)
    assert core.queues.budget.num_left == 2
    core.queues.abort(granted.key)
    assert core.queues.budget.num_left == 3
    core.close()


@pytest.mark.rule("H13", "I6")
def test_lengths_never_pass_what_was_reserved() -> None:
    """I6: for every launched row committed + q_len <= pages x page size, with up to two windows in flight."""
    core = make_core(CoreKnobs("simulated", width=4, page_size=4, num_pages=90, chunk_size=16, seed=9))
    launch = core.engine.launch

    def check(plan):  # noqa: ANN001, ANN202
        pages = (plan.layout.page_table != 0).sum(axis=1)
        running = core.queues.running
        for b, row in enumerate(plan.req_pool_indices.tolist()):
            if b >= plan.num_prefill:
                hi = int(running.seq_lens.hi[running.req_pool_indices.tolist().index(row)])
                assert hi <= pages[b] * 4, "after this step the upper bound still lies in the row's pages"
        return launch(plan)

    core.engine.launch = check  # type: ignore[method-assign]
    jobs = draw_jobs(random.Random(4), 10)
    assert_streams(jobs, run_local(core, jobs))
    core.close()


def test_a_lone_row_that_pins_copies_of_its_pages_begins_again() -> None:
    """Both compute the same beginning in one step, for nobody waits for a prompt with scores; the cache has the short
    one's pages, and the long one's lock pins them beside its own copies. In a pool that holds it exactly once it would
    never get its last."""
    long = job(1, 48, 60)
    short = Job(0, long.prompt[:40], SamplingParams(max_tokens=2, prompt_logprobs=0), 0)
    core = make_core(CoreKnobs(page_size=8, num_pages=15, chunk_size=96))
    submit(core, short, long)
    outcome = run_local(core, [], budget=400)
    assert_streams([long, short], outcome)
    assert_whole(core)
    core.close()
