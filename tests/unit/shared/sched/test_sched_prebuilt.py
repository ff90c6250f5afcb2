"""The decode side of a hand-off, seen from the core: grant all or nothing, join without a forward, give back."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shared.core.request import RequestState
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.engine.plan import Admission
from shared.sched.steps.events import Emitted, Ended, GrantRevoked
from shared.sched.steps.prebuilt import Arrival
from tests.support.cores.core_pair import CorePair, make_pair, run_pair
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, draw_jobs, make_core

BACKENDS = ("inline", "cpu", "simulated")


def job(rid: int, num_prompt: int = 20, max_tokens: int = 30, **sampling: object) -> Job:
    rng = random.Random(rid)
    prompt = tuple(rng.randrange(95) for _ in range(num_prompt))
    return Job(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.8, **sampling), rid)  # type: ignore[arg-type]


def until(pair: CorePair, ready: str, rid: int) -> None:
    """Tick until the decode core's record of a hand-off is in that state."""
    handoff = next(h for h in pair.handoffs.values() if h.decode.key.rid == f"r{rid}")
    for _ in range(100):
        if handoff.decode.state.value == ready:
            return
        pair.tick()
    raise AssertionError(f"r{rid} never was {ready}")


def arrival(core_request, token: int, committed: int) -> Arrival:  # noqa: ANN001
    return Arrival(core_request, token, committed, (), {})


def test_a_grant_is_all_or_nothing() -> None:
    core = make_core(CoreKnobs(page_size=4, num_pages=9, max_running=2))
    big, small = job(0, 40).request(), job(1, 8).request()
    assert core.scheduler.grants.grant(big, "p") is None, "11 pages of 8"
    assert big.row == 0 and big.state is RequestState.WAITING and core.kv.rows.num_free == 2
    assert core.scheduler.grants.grant(small, "p") == 0
    assert core.kv.gauges()["granted"] == 3 and core.kv.row_gauges()["granted"] == 1, "8 + width tokens, in pages of 4"
    core.kv.check_integrity()
    core.close()


def test_a_grant_leaves_room_for_one_step_of_every_decoding_row() -> None:
    """Rule a: the pages would do, but then the running row could not take its next one."""
    core = make_core(CoreKnobs(page_size=4, num_pages=11))
    core.scheduler.intake.submit(job(0, 7, 30).request())
    core.loop.step()
    core.loop.step()
    held = int(core.kv.rows.num_pages.sum())
    free = 10 - held
    fits = (free - 1) * 4 - 1  # tokens of a prompt whose pages, with one token more, leave one page free
    assert core.scheduler.grants.grant(job(1, fits + 1).request(), "p") is None
    assert core.scheduler.grants.grant(job(2, fits).request(), "p") == 0
    core.close()


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_what_can_fit_alone_is_granted_alone(page_size: int) -> None:
    """A grant that asks for more than an empty node has would wait until its deadline."""
    core = make_core(CoreKnobs(page_size=page_size, num_pages=1 + 128 // page_size))
    for rid, max_tokens in enumerate((1, 2, 3, 17)):
        most = next(n for n in range(128, 0, -1) if core.queues.budget.can_ever_hold(job(rid, n, max_tokens).request()))
        req = job(rid, most, max_tokens).request()
        assert core.scheduler.grants.grant(req, "p") == 0, f"{most} tokens and {max_tokens}"
        core.queues.abort(req.key)
        core.queues.budget.release_held(next(e.row for e in core.queues.take_events() if isinstance(e, GrantRevoked)))
    core.close()


def test_a_grant_counts_its_own_prefix_in_whole_pages() -> None:
    pair = make_pair(CoreKnobs(page_size=4))
    first, longer = job(0, 22, 1), replace(job(1, 1, 9), prompt=job(0, 22).prompt + (1, 2, 3))
    run_pair(pair, [replace(first, sampling=replace(first.sampling, max_tokens=5))])
    handoff = pair.submit(longer)
    while handoff.cached is None:
        pair.tick()
    assert handoff.cached == 20
    sent = []
    copy = pair._copy
    pair._copy = lambda source, target: (sent.append(len(target)), copy(source, target))[1]  # type: ignore[method-assign]
    assert_streams([longer], run_pair(pair, []))
    assert sent == [2], "25 tokens are 7 pages; 5 of them were there"
    pair.close()


@pytest.mark.rule("Rc")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("host_lengths", [True, False])
def test_rows_join_while_a_step_is_in_flight(backend: str, width: int, host_lengths: bool) -> None:
    """Regression (c): the running batch, speculative or not, has a step in flight when arrivals are merged into it."""
    joined_in_flight = 0
    for seed in range(4):
        pair = make_pair(CoreKnobs(backend, width=width, needs_cpu_seq_lens=host_lengths, seed=seed, page_size=4))
        admit = pair.decode.loop.admit

        def count(arrivals, admit=admit, pair=pair) -> None:  # noqa: ANN001
            nonlocal joined_in_flight
            joined_in_flight += bool(pair.decode.engine.leases) and len(pair.decode.scheduler.queues.running) > 0
            admit(arrivals)

        pair.decode.loop.admit = count  # type: ignore[method-assign]
        jobs = draw_jobs(random.Random(seed), 8)
        assert_streams(jobs, run_pair(pair, jobs, rng=random.Random(seed)))
        assert_whole(pair.prefill)
        assert_whole(pair.decode)
        pair.close()
    assert joined_in_flight > 3


def test_penalties_of_an_arrival_count_its_prompt_from_elsewhere() -> None:
    penalised = job(3, 30, 40, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3)
    pair = make_pair(CoreKnobs(width=4))
    assert_streams([penalised], run_pair(pair, [penalised]))
    pair.close()


@pytest.mark.parametrize("stop", [False, True])
def test_a_first_token_that_ends_its_request_joins_no_batch(stop: bool) -> None:
    """Prefill nodes end such requests themselves; a decode node must not rely on it."""
    core = make_core(CoreKnobs(page_size=4))
    ending = job(0, 8, 9, stop_token_ids=(77,)) if stop else job(0, 8, 1)
    requests = [ending.request(), job(1, 8, 9).request()]
    for req in requests:
        assert core.scheduler.grants.grant(req, "p") == 0
    admission = core.scheduler.grants.process_prebuilt([arrival(req, 77, 8) for req in requests])
    assert admission is not None and admission.req_pool_indices.tolist() == [requests[1].row]
    assert [req.key.rid for req in core.queues.running.reqs] == ["r1"]
    events = core.queues.take_events()
    emitted = [event for event in events if isinstance(event, Emitted)]
    assert [event.ids for event in emitted] == [(77,), (77,)], "both first tokens are repeated to the router"
    ended = [(event.key, event.reason) for event in events if isinstance(event, Ended)]
    assert ended == [(requests[0].key, FinishReason.STOP if stop else FinishReason.LENGTH)]
    assert requests[0].row == 0 and requests[0].key not in core.queues.requests
    core.close()


def test_nothing_is_launched_when_all_arrivals_ended() -> None:
    core = make_core(CoreKnobs(page_size=4))
    req = job(0, 8, 1).request()
    core.scheduler.grants.grant(req, "p")
    core.loop.admit([arrival(req, 5, 8)])
    assert not core.engine.leases and core.scheduler.planner.plan() is None
    assert_whole(core)
    core.close()


def test_an_admission_is_a_step_whose_tag_the_next_plan_expects() -> None:
    core = make_core(CoreKnobs(page_size=4))
    req = job(0, 8, 9).request()
    core.scheduler.grants.grant(req, "p")
    admission = core.scheduler.grants.process_prebuilt([arrival(req, 5, 8)])
    assert isinstance(admission, Admission) and admission.committed.tolist() == [8]
    lease = core.engine.admit(admission)
    assert lease.step == admission.step and list(core.engine.leases) == [lease], "no lease, no way back for its pages"
    plan = core.scheduler.planner.plan()
    assert plan is not None and plan.step > admission.step
    assert plan.expect_step.tolist() == [admission.step] and plan.seq_lens_cpu.tolist() == [8]
    core.close()


def test_a_prebuilt_row_s_length_is_published_if_a_backend_asks() -> None:
    core = make_core(CoreKnobs(page_size=4, width=4, needs_cpu_seq_lens=True))
    req = job(0, 8, 9).request()
    core.scheduler.grants.grant(req, "p")
    admission = core.scheduler.grants.process_prebuilt([arrival(req, 5, 8)])
    assert admission is not None
    core.engine.admit(admission)
    assert core.loop._resolve()
    assert core.queues.running.seq_lens.lo.tolist() == core.queues.running.seq_lens.hi.tolist() == [8]
    core.close()


def test_a_revoked_grant_keeps_its_pages_until_the_pull_is_over() -> None:
    core = make_core(CoreKnobs(page_size=4))
    req = job(0, 8, 9).request()
    core.scheduler.grants.grant(req, "p")
    row = req.row
    core.queues.retract(req)
    (event,) = core.queues.take_events()
    assert event == GrantRevoked(req, row, retracted=True) and req.row == 0
    assert core.kv.gauges()["held"] == 3 == core.queues.budget.num_held
    core.queues.budget.release_held(row)
    assert core.kv.gauges()["held"] == 0 == core.queues.budget.num_held
    assert core.queues.waiting == [req] and req.incarnation == 1
    core.close()


def test_an_aborted_grant_is_held_too() -> None:
    core = make_core(CoreKnobs(page_size=4))
    req = job(0, 8, 9).request()
    core.scheduler.grants.grant(req, "p")
    row = req.row
    core.queues.abort(req.key)
    revoked, ended = core.queues.take_events()
    assert revoked == GrantRevoked(req, row, retracted=False) and ended.reason is FinishReason.ABORT  # type: ignore[union-attr]
    assert core.kv.tag(row) == "held"
    core.queues.budget.release_held(row)
    assert_whole(core)
    core.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grant_retracted_while_its_pull_runs_is_computed_here(backend: str) -> None:
    pair = make_pair(CoreKnobs(backend, page_size=4, seed=2))
    jobs = [job(0, 50), job(1, 60)]
    handoff = pair.submit(jobs[0])
    until(pair, "granted", 0)
    while handoff.pull is None:
        pair.tick()
    pair.decode.scheduler.queues.retract(handoff.decode)
    pair._take_events()
    assert handoff.held_row and pair.decode.kv.tag(handoff.held_row) == "held"
    assert_streams(jobs, run_pair(pair, [jobs[1]]))
    assert handoff.decode.incarnation == 1
    assert_whole(pair.prefill)
    assert_whole(pair.decode)
    pair.close()


def test_only_hand_offs_report_their_chunks() -> None:
    pair = make_pair(CoreKnobs(page_size=4, chunk_size=16))
    chunks, outcome = [], pair.outcome
    take = outcome.take

    def watch(core) -> list[object]:  # noqa: ANN001
        others = take(core)
        chunks.extend((event.num_tokens, core) for event in others if type(event).__name__ == "ChunkReady")
        return others

    outcome.take = watch  # type: ignore[method-assign]
    pair.decode.scheduler.intake.submit(job(5, 40).request())
    assert_streams([job(0, 40)], run_pair(pair, [job(0, 40)]))
    assert chunks == [(16, pair.prefill), (32, pair.prefill)], "the last chunk is in PrefillDone"
    pair.close()
