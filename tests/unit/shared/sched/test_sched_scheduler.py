"""Intake, ends and order of the scheduler: abort in every state, deadlines, siblings, the cap on ungranted pages,
what is reported to the node."""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import ValuesView

import pytest

from shared.core.errors import DeadlineExceeded, IntegrityError, TooLarge
from shared.core.keys import RequestKey, sequence_seed
from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.engine.lease import StepLease
from shared.engine.plan import StepPlan
from shared.node.records.core import NodeCore
from shared.sched.steps.draft_length import FixedWidth
from shared.sched.steps.events import Emitted, Ended, HandoffUnpinned
from shared.wire.messages import TokenLogprob
from tests.support.cores.core_pair import make_pair, run_pair
from tests.support.cores.core_rig import (
    CoreKnobs,
    Job,
    Outcome,
    assert_streams,
    assert_whole,
    draw_jobs,
    make_core,
    run_local,
)
from tests.support.oracles.hashlm_reference import reference_run

BACKENDS = ("inline", "cpu", "simulated")


def job(rid: int, num_prompt: int = 20, max_tokens: int = 30, **sampling: object) -> Job:
    rng = random.Random(rid)
    prompt = tuple(rng.randrange(95) for _ in range(num_prompt))
    return Job(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.8, **sampling), rid)  # type: ignore[arg-type]


def bring_to(core: NodeCore, req: Request, state: str) -> None:
    for _ in range(200):
        if req.state.value == state:
            return
        core.loop.step(block=True)
    raise AssertionError(f"{req.key} never was {state}")


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
    core.close()


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
        bring_to(core, victim, state)
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
        core.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_abort_in_every_state_of_a_hand_off(backend: str, side: str) -> None:
    """One side aborts after n rounds, whatever state that is; the other side hears of it in the next round."""
    seen = set()
    for rounds in range(0, 14):
        pair = make_pair(CoreKnobs(backend, page_size=4, chunk_size=16, seed=rounds))
        others = [job(rid, 30 + rid) for rid in range(2)]
        handoff = pair.submit(job(9, 50, 40))
        for _ in range(rounds):
            pair.tick()
        core = getattr(pair, side)
        record: Request = getattr(handoff, side)
        seen.add(record.state.value)
        if record.key in core.queues.requests:
            core.queues.abort(record.key)
        pair._take_events()
        pair.outcome.ends.pop("r9", None)
        if handoff.decode.key in pair.handoffs:
            _tell_the_other_side(pair, handoff)
        outcome = run_pair(pair, others)
        assert_streams(others, outcome)
        assert_whole(pair.prefill)
        assert_whole(pair.decode)
        pair.close()
    if backend != "cpu":  # threads decide which states are met
        assert seen >= (
            {"waiting", "prefilling", "finished"} if side == "prefill" else {"waiting", "granted", "running"}
        )


def _tell_the_other_side(pair, handoff) -> None:  # noqa: ANN001
    for core, record in ((pair.prefill, handoff.prefill), (pair.decode, handoff.decode)):
        core.queues.abort(record.key)
    pair._take_events()
    pair.outcome.ends.pop("r9", None)
    if handoff.pull is not None:
        handoff.pull.done.synchronize()
    if handoff.held_row:
        pair.decode.scheduler.queues.budget.release_held(handoff.held_row)
    del pair.handoffs[handoff.decode.key]


def test_an_abort_of_nobody_is_legal() -> None:
    core = make_core(CoreKnobs())
    req = job(0).request()
    core.queues.abort(req.key)
    core.scheduler.intake.submit(req)
    run_local(core, [])
    core.queues.abort(req.key)
    core.queues.fail(req.key, IntegrityError("late"))
    core.queues.complete_handoff(req.key)
    core.queues.set_granted(req.key)
    assert core.queues.take_events() == []
    core.close()


@pytest.mark.parametrize("state", ["waiting", "prefilling", "running"])
def test_a_deadline_ends_a_request_in_any_state(state: str) -> None:
    core = make_core(CoreKnobs(chunk_size=16))
    late, other = job(0, 60).request(), job(1, 60)
    late.deadline = 10.0
    core.scheduler.intake.submit(late)
    core.scheduler.intake.submit(other.request())
    bring_to(core, late, state)
    core.queues.expire(10.0)
    assert not late.finished, "at its deadline it is not late"
    core.queues.expire(10.5)
    assert late.finished
    outcome = run_local(core, [])
    assert outcome.ends["r0"].reason is FinishReason.ERROR
    assert isinstance(outcome.ends["r0"].error, DeadlineExceeded)
    assert_streams([other], outcome)
    assert_whole(core)
    core.close()


def test_a_granted_request_s_deadline_keeps_pages_for_the_pull() -> None:
    core = make_core(CoreKnobs())
    req = job(0).request()
    req.deadline = 1.0
    core.scheduler.grants.grant(req, "p")
    row = req.row
    core.queues.expire(2.0)
    assert req.finished and core.kv.tag(row) == "held"
    core.queues.budget.release_held(row)
    assert_whole(core)
    core.close()


# ---- siblings (n > 1)


def siblings(count: int, num_prompt: int = 41, max_tokens: int = 20) -> list[tuple[Job, Request]]:
    first, out = job(0, num_prompt, max_tokens), []
    for index in range(count):
        sibling = dataclasses.replace(first, rid=index, seed=sequence_seed(first.seed, index))
        key = RequestKey("test", 1, "n", 0, index)
        out.append((sibling, dataclasses.replace(sibling.request(), key=key, arrival=index)))
    return out


def run_siblings(core: NodeCore, family: list[tuple[Job, Request]]) -> None:
    streams: dict[int, list[int]] = defaultdict(list)
    for _, req in family:
        core.scheduler.intake.submit(req)
    while core.queues.requests or not core.loop.idle:
        core.loop.step(block=True)
        for event in core.queues.take_events():
            if isinstance(event, Emitted):
                streams[event.key.seq_index].extend(event.ids)
    for index, (sibling, _) in enumerate(family):
        assert streams[index] == sibling.expected()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", [True, False])
def test_siblings_wait_for_the_first_one_and_share_its_pages(backend: str, overlap: bool) -> None:
    core = make_core(CoreKnobs(backend, overlap, page_size=4, chunk_size=16, seed=1))
    family = siblings(4)
    run_siblings(core, family)
    assert [req.cached_tokens for _, req in family] == [0, 40, 40, 40]
    assert_whole(core)
    core.close()


def test_siblings_do_not_wait_where_there_is_nothing_to_share() -> None:
    core = make_core(CoreKnobs(page_size=4, prefix_cache=False))
    family = siblings(3)
    for _, req in family:
        core.scheduler.intake.submit(req)
    core.loop.step()
    assert not core.queues.waiting
    run_dry(core)
    core.close()


def test_siblings_do_not_wait_for_a_gone_leader() -> None:
    """The next one leads; a retracted leader is the oldest, and leads again."""
    for way_out, num_waiting in (("abort", 1), ("retract", 2)):
        core = make_core(CoreKnobs(page_size=4, chunk_size=16))
        family = siblings(3)
        for _, req in family:
            core.scheduler.intake.submit(req)
        core.loop.step()
        assert len(core.queues.waiting) == 2
        leader = family[0][1]
        core.queues.abort(leader.key) if way_out == "abort" else core.queues.retract(leader)
        core.loop.step()
        assert len(core.queues.prefilling) == 1 and len(core.queues.waiting) == num_waiting
        run_dry(core)
        assert_whole(core)
        core.close()


def test_a_gated_sibling_blocks_nobody_behind_it() -> None:
    core = make_core(CoreKnobs(page_size=4, chunk_size=16))
    for _, req in siblings(2):
        core.scheduler.intake.submit(req)
    core.scheduler.intake.submit(job(7, 9).request())
    core.loop.step()
    assert [req.key.seq_index for req in core.queues.waiting] == [1]
    run_dry(core)
    core.close()


# ---- the cap on ungranted pages


def test_hand_offs_without_a_grant_pin_pages_up_to_the_cap() -> None:
    core = make_core(CoreKnobs(page_size=4))
    core.scheduler.capacity.settings = dataclasses.replace(core.scheduler.settings, max_ungranted_pages=12)
    offers = [job(rid, 20).request(handoff_to="decode") for rid in range(4)]
    for req in offers:
        core.scheduler.intake.submit(req)
    core.scheduler.intake.submit(job(8, 20).request())
    for _ in range(6):
        core.loop.step()
    states = [req.state.value for req in offers]
    assert states == ["handed_off", "handed_off", "waiting", "waiting"], "5 pages each, 12 allowed"
    assert core.queues.requests[job(8).request().key].state.value == "running", "a local one is not in that queue"
    core.queues.set_granted(offers[0].key)
    for _ in range(4):
        core.loop.step()
    assert [req.state.value for req in offers] == ["handed_off"] * 3 + ["waiting"]
    for req in offers:
        core.queues.complete_handoff(req.key)
    run_local(core, [])
    core.close()


def test_one_hand_off_larger_than_the_cap_goes_alone() -> None:
    core = make_core(CoreKnobs(page_size=4))
    core.scheduler.capacity.settings = dataclasses.replace(core.scheduler.settings, max_ungranted_pages=3)
    offers = [job(rid, 20).request(handoff_to="decode") for rid in range(2)]
    for req in offers:
        core.scheduler.intake.submit(req)
    for _ in range(4):
        core.loop.step()
    assert [req.state.value for req in offers] == ["handed_off", "waiting"]
    core.queues.abort(offers[0].key)
    for _ in range(4):
        core.loop.step()
    assert offers[1].state.value == "handed_off"
    core.queues.abort(offers[1].key)
    run_local(core, [])
    assert_whole(core)
    core.close()


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
    core.close()


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
    for _ in range(4):
        core.loop.step(block=True)
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
    core.close()


# ---- what is reported


@pytest.mark.rule("H29")
def test_a_retraction_does_not_count_as_a_cache_hit() -> None:
    core = make_core(CoreKnobs(page_size=4))
    req = job(0, 22, 6).request()
    core.scheduler.intake.submit(req)
    bring_to(core, req, "running")
    core.loop.step(block=True)
    core.queues.retract(req)
    outcome = run_local(core, [])
    assert core.queues.counters.cached_prompt_tokens == 20 and outcome.ends["r0"].cached_tokens == 0
    core.close()


def test_each_retraction_is_counted() -> None:
    core = make_core(CoreKnobs(page_size=4))
    req = job(0, 22, 6).request()
    core.scheduler.intake.submit(req)
    for count in (1, 2):
        bring_to(core, req, "running")
        core.queues.retract(req)
        assert core.queues.counters.retractions == count
    run_dry(core)
    core.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 4])
def test_no_step_follows_those_that_end_an_answer(backend: str, width: int) -> None:
    core = make_core(CoreKnobs(backend, width=width))
    core.scheduler.planner.widths = FixedWidth(1)
    launched, launch = list[StepPlan](), core.engine.launch

    def counted(plan: StepPlan) -> StepLease:
        launched.append(plan)
        return launch(plan)

    core.engine.launch = counted  # type: ignore[method-assign]
    core.scheduler.intake.submit(job(0, max_tokens=12).request())
    run_dry(core)
    assert len(launched) == 12
    core.close()


def test_a_retracted_row_without_draft_state_is_recomputed_whole() -> None:
    """And then its pages are a prefix for others too."""
    core = make_core(CoreKnobs(page_size=4))
    req = job(0, 22, 6).request()
    core.scheduler.intake.submit(req)
    req.lacks_draft_state = True
    bring_to(core, req, "running")
    core.loop.step(block=True)
    core.queues.retract(req)
    assert not req.lacks_draft_state and core.kv.cache.num_cached == 0
    run_dry(core)
    assert core.kv.cache.num_cached > 22 // 4
    core.close()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("overlap", [True, False])
def test_each_token_comes_with_the_reference_s_logprobs(backend: str, width: int, overlap: bool) -> None:
    core = make_core(CoreKnobs(backend, overlap, chunk_size=16, width=width, seed=2))
    jobs = [job(rid, 10 + 7 * rid, 20, num_logprobs=num) for rid, num in enumerate((-1, 0, 3, 1))]
    events: dict[str, list[TokenLogprob]] = defaultdict(list)
    for one in jobs:
        core.scheduler.intake.submit(one.request())
    while core.queues.requests or not core.loop.idle:
        core.loop.step(block=True)
        for event in core.queues.take_events():
            if isinstance(event, Emitted):
                asked = jobs[int(event.key.rid[1:])].sampling.num_logprobs >= 0
                assert len(event.logprobs) == (len(event.ids) if asked else 0)
                events[event.key.rid].extend(event.logprobs)
    for one in jobs[1:]:
        expected = reference_run(one.prompt, one.sampling, one.seed, one.sampling.max_tokens)
        got = events[f"r{one.rid}"]
        assert [entry.logprob for entry in got] == pytest.approx(expected.logprobs, abs=1e-5)
        for entry, token in zip(got, expected.ids, strict=True):
            _check_top(entry, token, one.sampling.num_logprobs)
    core.close()


def _check_top(entry: TokenLogprob, token: int, num: int) -> None:
    assert len(entry.top_ids) == len(entry.top_logprobs) == num
    assert list(entry.top_logprobs) == sorted(entry.top_logprobs, reverse=True)
    assert all(entry.logprob <= best + 1e-6 for best in entry.top_logprobs[:1])
    if token in entry.top_ids:
        assert entry.logprob == pytest.approx(entry.top_logprobs[entry.top_ids.index(token)], abs=1e-6)


def test_positions_count_from_output_one_and_survive_retraction() -> None:
    """Outcome.take asserts that no gap and no other token appears at a position; retraction re-emits nothing."""
    core, outcome, positions = make_core(CoreKnobs("simulated", seed=3)), Outcome(), []
    req = job(0, 20, 30).request()
    core.scheduler.intake.submit(req)
    for loop in range(200):
        core.loop.step(block=True)
        for event in core.queues.take_events():
            if isinstance(event, Emitted):
                positions.extend(range(event.first_pos, event.first_pos + len(event.ids)))
                outcome.streams["r0"].extend(event.ids)
        if loop in (6, 15) and req.state.value == "running":
            core.queues.retract(req)
    assert req.incarnation == 2 and positions == list(range(len(job(0).expected())))
    assert outcome.streams["r0"] == job(0, 20, 30).expected()
    core.close()


def test_an_end_tells_its_numbers_of_output_and_cached_tokens() -> None:
    core = make_core(CoreKnobs(page_size=4))
    first = job(0, 22, 6)
    run_local(core, [first])
    again = run_local(core, [dataclasses.replace(first, rid=1)])
    end = again.ends["r1"]
    assert end.cached_tokens == 20 and end.num_output_tokens == len(first.expected())
    core.close()


def test_steps_alternate_without_mixing_and_nobody_starves() -> None:
    core = make_core(CoreKnobs(mix=False, chunk_size=8))
    decoding, long = job(0, 5, 60), job(1, 150, 5)
    core.scheduler.intake.submit(decoding.request())
    for _ in range(3):
        core.loop.step()
    core.scheduler.intake.submit(long.request())
    kinds = []
    launch = core.engine.launch
    core.engine.launch = lambda plan: (kinds.append((plan.num_prefill, plan.batch_size)), launch(plan))[1]  # type: ignore[method-assign]
    assert_streams([decoding, long], run_local(core, []))
    assert all(prefill in (0, size) for prefill, size in kinds), "a step is one or the other"
    assert kinds[:8].count((1, 1)) == 4 == kinds[:8].count((0, 1))
    core.close()


def test_mixed_and_plain_random_runs_end_whole() -> None:
    for seed in range(3):
        rng = random.Random(seed)
        core, jobs = make_core(CoreKnobs(num_pages=40, chunk_size=16, mix=bool(seed % 2))), draw_jobs(rng, 10)
        assert_streams(jobs, run_local(core, jobs, retract_every=6, rng=rng))
        assert_whole(core)
        core.close()
