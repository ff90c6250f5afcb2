"""A step failed: whose requests begin again, and who is not touched. Who ends with it: test_sched_suspects.py."""

from __future__ import annotations

import pytest

from shared.core.errors import HandoffFailed, StepFailed
from shared.core.sampling_params import SamplingParams
from shared.core.states import FinishReason
from shared.engine.plan import RowId
from shared.sched.steps.events import Ended
from tests.support.cores.core_rig import CoreKnobs, Job, assert_whole, make_core, run_local


def job(rid: int, length: int, max_tokens: int = 30) -> Job:
    return Job(rid, tuple(range(length)), SamplingParams(max_tokens=max_tokens, temperature=0.8), rid)


@pytest.mark.parametrize("output", [0, 5])
def test_a_failing_request_ends_with_its_error_and_frees_all(output: int) -> None:
    core = make_core(CoreKnobs("inline", chunk_size=16, page_size=4))
    request = job(0, 40).request()
    core.scheduler.intake.submit(request)
    while len(request.output_ids) < output:
        core.loop.step(block=True)
    core.queues.take_events()
    error = HandoffFailed("the peer is gone")
    for _ in range(2):  # the second time the key is unknown, which is legal
        core.queues.fail(request.key, error)
    (end,) = core.queues.take_events()
    assert isinstance(end, Ended) and end.reason is FinishReason.ERROR
    assert end.error is error
    while not core.loop.idle:
        core.loop.step(block=True)
    assert_whole(core)
    core.close()


def test_a_failed_step_of_a_former_life_leaves_the_next_alone() -> None:
    """The request gave its memory away while that step was in flight."""
    core = make_core(CoreKnobs("inline", chunk_size=16, page_size=4))
    one = job(0, 40)
    request = one.request()
    core.scheduler.intake.submit(request)
    while len(request.output_ids) < 5:
        core.loop.step(block=True)
    former = RowId(request.key, request.incarnation)
    core.queues.retract(request)
    for _ in range(2):  # the first makes a suspect of whom it names, the second ends him
        core.scheduler.results.step_failed((former,), (), StepFailed("injected"))
    outcome = run_local(core, [])
    assert request.output_ids == one.expected() and outcome.ends["r0"].error is None
    assert_whole(core)
    core.close()
