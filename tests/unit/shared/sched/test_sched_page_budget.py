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
from tests.support.cores.scripted_core import job
from tests.support.cores.steps import bring_to, step, submit


def core_with(num_free_pages: int, **knobs: object) -> NodeCore:
    """Page size 1 makes every token a page; no cache, so that what is free is all there is."""
    return make_core(CoreKnobs(page_size=1, num_pages=num_free_pages + 1, prefix_cache=False, **knobs))  # type: ignore[arg-type]


def states(*requests: Request) -> list[str]:
    return [req.state.value for req in requests]


def stuff(core: NodeCore, num_pages: int = 0) -> int:
    """Take pages away, by default all. Return the row that has them."""
    row = core.kv.alloc_row("stuffing")
    assert row is not None and core.kv.grow(row, num_pages or core.kv.num_available)
    return row


def revoked(core: NodeCore) -> list[int]:
    """Rows."""
    return [event.row for event in core.queues.take_events() if isinstance(event, GrantRevoked)]


@pytest.mark.rule("La")
def test_rule_a_running_rows_reserve_before_anyone_is_admitted() -> None:
    """20 pages: the old row has 11; the new prompt wants the last 9, and the old row's next token wants one."""
    core = core_with(20)
    (old,) = submit(core, job(0, 8, 9))
    step(core, 3)
    pages = int(core.kv.rows.num_pages[old.row])
    (new,) = submit(core, job(1, 20 - pages - 1, 2))
    core.loop.step()
    assert int(core.kv.rows.num_pages[old.row]) == pages + 1 and states(old, new) == ["running", "waiting"]
    assert new.incarnation == 0, "it was never let in"


@pytest.mark.rule("La")
def test_rule_a_admission_leaves_a_reservation_per_decoding_row() -> None:
    core = core_with(30)
    submit(core, job(0, 5, 20), job(1, 5, 20))
    step(core, 3)
    free_next = core.kv.num_available - 2  # both rows take a page before anyone is admitted
    (tight,) = submit(core, job(2, free_next - 2, 2))
    core.loop.step()
    assert tight.state.value == "waiting", "it fits with its own first token, but not with a page for both old rows"
    core.queues.abort(tight.key)
    free_next = core.kv.num_available - 2
    (fits,) = submit(core, job(3, free_next - 3, 2))
    core.loop.step()
    assert fits.state.value != "waiting" and core.kv.num_available == 2


@pytest.mark.rule("Lb")
def test_rule_b_a_prompt_reserves_all_its_pages_at_once() -> None:
    core = core_with(40, chunk_size=4)
    (req,) = submit(core, job(0, 30, 5))
    core.loop.step()
    assert int(core.kv.rows.num_pages[req.row]) == 31 and req.computed <= 4


@pytest.mark.rule("Lb")
def test_rule_b_holders_go_before_a_retracted_head() -> None:
    """The head of the queue is older than all, and still whoever holds pages gets the next one first."""
    core = core_with(28, chunk_size=64)
    head, holder = submit(core, job(0, 9, 15), job(1, 9, 6))
    step(core, 2)
    assert states(head, holder) == ["running", "running"]
    core.queues.retract(head)
    core.queues.waiting[0].arrival = -1
    before = int(core.kv.rows.num_pages[holder.row])
    available = core.kv.num_available
    core.scheduler.planner.plan()
    assert int(core.kv.rows.num_pages[holder.row]) > before and available > core.kv.num_available


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
    (old,), victim = submit(core, job(0, 6, 20)), job(1, 12, 12).request()
    bring_to("running", core, old)
    if youngest == "granted":
        assert core.scheduler.grants.grant(victim, "p") == 0
    else:
        core.submit(victim)
        step(core, 2 if youngest == "running" else 1)
    assert states(old, victim) == ["running", youngest]
    stuff(core)
    step(core, 3)
    assert states(old, victim) == ["running", "waiting"]
    assert len(revoked(core)) == (youngest == "granted")


@pytest.mark.rule("Lc")
def test_rule_c_a_victim_s_pages_are_used_in_the_same_plan() -> None:
    core = core_with(30)
    old, victim = submit(core, job(0, 6, 20), job(1, 6, 20))
    bring_to("running", core, old, victim)
    stuff(core)
    launch, plans = core.engine.launch, list[tuple[str, list[RequestKey]]]()

    def watch(plan: StepPlan) -> StepLease:
        plans.append((victim.state.value, [row_id.key for row_id in plan.row_ids]))
        return launch(plan)

    core.engine.launch = watch  # type: ignore[method-assign]
    step(core, 5)
    assert [keys for state, keys in plans if state == "waiting"][:1] == [[old.key]]
    assert len(plans) == 5, "no step was missed"


@pytest.mark.rule("Lc")
def test_rule_c_seniority_survives_retraction() -> None:
    core = core_with(60)
    first, second, third = submit(core, job(0, 5, 20), job(1, 5, 20), job(2, 5, 20))
    step(core, 2)
    assert states(first, second, third) == ["running"] * 3
    for req in (second, third, first):
        core.queues.retract(req)
    assert core.queues.waiting == [first, second, third]
    assert [req.arrival for req in core.queues.waiting] == [0, 1, 2]


@pytest.mark.rule("H25", "Lc")
def test_rule_c_hand_offs_are_no_victims() -> None:
    """Their pages are promised to a peer."""
    core = core_with(30)
    (old,) = submit(core, job(0, 6, 20))
    core.loop.step()
    (handed,) = submit(core, job(1, 10, 15), handoff_to="decode")
    bring_to("handed_off", core, handed)
    core.queues.set_granted(handed.key)
    stuff(core)
    before = int(core.kv.rows.num_pages[handed.row])
    step(core, 4)
    assert handed.state.value == "handed_off" and int(core.kv.rows.num_pages[handed.row]) == before
    assert old.incarnation == 0, "it waits for a page, it is not retracted for nothing"


@pytest.mark.rule("Lc")
def test_rule_c_ungranted_hand_offs_give_way_to_a_running_row() -> None:
    """Nobody else may have asked for their pages yet, and the decode node may wait for this very row."""
    core = core_with(30)
    (old,) = submit(core, job(0, 6, 20))
    bring_to("running", core, old)
    (offer,) = submit(core, job(1, 10, 15), handoff_to="decode")
    bring_to("handed_off", core, offer)
    stuff(core)
    before = len(old.output_ids)
    step(core, 6)
    assert states(offer) == ["waiting"] and len(old.output_ids) >= before + 4


def test_hand_offs_stay_if_their_memory_is_too_little() -> None:
    """The prompt lacks 27 pages, then 11. Each of the four hand-offs has five."""
    core = core_with(40)
    offers = submit(core, *(job(rid, 5, 9) for rid in range(4)), handoff_to="decode")
    bring_to("handed_off", core, *offers)
    row = stuff(core, 16)
    (late,) = submit(core, job(9, 30, 5))
    step(core, 10)
    assert states(late, *offers) == ["waiting"] + ["handed_off"] * 4
    assert core.queues.counters.retractions == 0 and not core.loop.step()
    core.kv.release(row)
    bring_to("running", core, late)
    assert states(*offers) == ["handed_off"] + ["waiting"] * 3


def test_hand_offs_that_gave_way_in_vain_give_way_once() -> None:
    """They share nine of their ten pages with a running row, so they free one page each."""
    core = make_core(CoreKnobs(page_size=4, num_pages=41))
    shared = job(0, 38, 60)
    (old,) = submit(core, shared)
    bring_to("running", core, old)
    offers = submit(core, *(dataclasses.replace(shared, rid=rid) for rid in range(1, 5)), handoff_to="decode")
    bring_to("handed_off", core, *offers)
    (late,) = submit(core, job(9, 120, 5))
    step(core, 30)
    assert core.queues.counters.retractions <= len(offers) and states(old) == ["running"]
    core.queues.abort(old.key)
    bring_to("running", core, late)


@pytest.mark.rule("Ld")
def test_rule_d_a_short_row_skips_while_pages_are_coming_back() -> None:
    """One grant is revoked for the row that needs a page; until its pull is over nobody else is retracted."""
    core = core_with(44)
    old, young = submit(core, job(0, 6, 30), job(1, 6, 30))
    bring_to("running", core, old, young)
    granted = job(2, 20, 60).request()
    assert core.scheduler.grants.grant(granted, "p") == 0
    stuff(core)
    step(core, 5)
    assert states(old, young, granted) == ["running", "running", "waiting"]
    (row,) = revoked(core)
    tokens = (len(old.output_ids), len(young.output_ids))
    core.loop.step()
    assert (len(old.output_ids), len(young.output_ids)) == tokens, "both skip"
    core.queues.budget.release_held(row)
    step(core, 3)
    assert len(old.output_ids) > tokens[0] and len(young.output_ids) > tokens[1] and young.incarnation == 0


@pytest.mark.rule("H43", "Le")
def test_rule_e_a_held_row_counts_until_its_event_frees_it() -> None:
    core = core_with(30)
    granted = job(0, 8).request()
    core.scheduler.grants.grant(granted, "p")
    core.queues.abort(granted.key)
    (row,) = revoked(core)
    assert core.queues.budget.num_held == 9 and core.kv.num_available == 21
    core.kv.check_integrity()
    core.queues.budget.release_held(row)
    assert core.kv.num_available == 30
    assert_whole(core)


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


def test_what_fits_fits_with_all_that_its_last_steps_reserve() -> None:
    """Prompt, answer and three windows."""
    for num_pages, fits in ((15, True), (14, False)):
        core = core_with(num_pages)
        assert core.queues.budget.can_ever_hold(job(0, 7, 5).request()) is fits


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
