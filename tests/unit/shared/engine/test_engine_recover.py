"""A closure that raises: that step's requests begin again, every lease returns, the next request is served, and nothing
that the failed step did not compute stays behind as if it had. Who fails again: test_sched_suspects.py."""

from __future__ import annotations

import random
from collections.abc import Generator

import pytest

from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.device.events import Event
from shared.engine.lease import StepLease
from shared.engine.plan import Admission
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
from tests.support.cores.step_faults import PLACES, Fault, break_at, run_with_fault

BACKENDS = ("inline", "cpu", "simulated")


@pytest.mark.rule("Rf")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("overlap", [True, False])
def test_one_raise_costs_one_step_and_nobody_else(
    backend: str, place: str, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    for nth in (1, 5, 23):
        caplog.clear()
        knobs = CoreKnobs(backend, overlap, chunk_size=16, width=4, num_pages=60, seed=nth)
        core = make_core(knobs)
        raised = break_at(core, place, nth)
        outcome = run_with_fault(core, draw_jobs(random.Random(nth), 8))
        assert raised() == 1 == core.loop.num_failed_steps
        (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert f"injected at {place}" in said, "what is said is the cause, not what followed from it"
        assert all(end.reason is not FinishReason.ERROR for end in outcome.ends.values()), "all began again"
        after = draw_jobs(random.Random(nth + 100), 3)
        late = [Job(job.rid + 50, job.prompt, job.sampling, job.seed) for job in after]
        served = run_local(core, late)
        assert all(served.streams[f"r{job.rid}"] == job.expected() for job in late), "the next request is served"
        assert_whole(core)


def long_job(rid: int, prompt: tuple[int, ...], max_tokens: int = 30) -> Job:
    return Job(rid, prompt, SamplingParams(max_tokens=max_tokens, temperature=0.8), rid)


@pytest.mark.rule("Rf")
@pytest.mark.parametrize("way_out", ["retract", "abort"])
def test_a_row_gone_before_its_chunk_fails_leaves_no_garbage(way_out: str) -> None:
    """The second life of a request: it has output already, its chunk is in flight, it leaves, and then the chunk
    fails. What lies in its pages was never computed."""
    prompt = tuple(range(40))
    core = make_core(CoreKnobs("simulated", page_size=4, chunk_size=200, seed=0, prefix_cache=True))
    job, outcome = long_job(0, prompt), Outcome()
    req = job.request()
    core.scheduler.intake.submit(req)
    while len(req.output_ids) < 9:
        core.loop.step(block=True)
        outcome.take(core)
    core.queues.retract(req)
    core.kv.flush_cache()
    core.model.forward, forward = _raise, core.model.forward  # type: ignore[method-assign]
    while req.state.value != "running":
        core.loop._launch_next()
    if way_out == "retract":
        core.queues.retract(req)
    else:
        core.queues.abort(req.key)
    while core.loop.num_failed_steps == 0:
        core.loop.step(block=True)
    core.model.forward = forward  # type: ignore[method-assign]
    seen = tuple(req.all_ids().tolist())
    while not req.finished:
        core.loop.step(block=True)
    core.queues.take_events()
    late = long_job(9, seen)
    served = run_local(core, [late])
    assert served.streams["r9"] == late.expected()
    if way_out == "retract":
        assert req.output_ids == job.expected(), "the failed step was of its former life"
    assert_whole(core)


def _raise(*args: object) -> None:
    raise Fault("injected")


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_admission_that_raises_is_a_step_of_its_own(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    """PREBUILT has a lease like every step: its error is its own, not that of the step launched after it, and its own
    requests are computed here."""
    pair = make_pair(CoreKnobs(backend, seed=4))
    jobs = [long_job(rid, tuple(range(20 + rid)), 60) for rid in (0, 1)]
    seed_relay, admissions = pair.decode.engine._seed_relay, []

    def second_raises(admission: Admission, lease: StepLease, ready: Event | None) -> Generator[None, None, None]:
        admissions.append(admission)
        if len(admissions) == 2:
            raise Fault("injected at admission")
        return seed_relay(admission, lease, ready)

    pair.decode.engine._seed_relay = second_raises  # type: ignore[method-assign]
    pair.submit(jobs[0])
    while len(pair.outcome.streams["r0"]) < 5:
        pair.tick()
    outcome = run_pair(pair, [jobs[1]])
    assert_streams(jobs, outcome)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert pair.decode.loop.num_failed_steps == 1 and "injected at admission" in said
    assert_whole(pair.prefill)
    assert_whole(pair.decode)
    pair.close()
