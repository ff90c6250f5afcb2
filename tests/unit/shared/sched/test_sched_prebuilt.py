"""The decode side of a hand-off, seen from the core: grant all or nothing, join without a forward, give back."""

from __future__ import annotations

import random

import pytest

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
