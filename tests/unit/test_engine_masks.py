"""Grammar masks between the host and a step: made in time, from the drafts that the step verifies, and nobody waits for
those of a step that has failed."""

from __future__ import annotations

import random

import pytest

from tests.support.core_rig import CoreKnobs, assert_streams, assert_whole, draw_jobs, make_core, run_local
from tests.support.core_rig import some_follow_grammars as constrained
from tests.support.step_faults import break_at, run_with_fault

KNOBS = {
    "plain": CoreKnobs("simulated", chunk_size=16),
    "chain": CoreKnobs("simulated", chunk_size=16, width=4),
    "tree": CoreKnobs("simulated", chunk_size=16, width=6, topk=2, steps=3),
}


@pytest.mark.parametrize("kind", KNOBS)
def test_streams_follow_their_grammars(kind: str) -> None:
    core, jobs = make_core(KNOBS[kind]), constrained(draw_jobs(random.Random(2), 9))
    assert_streams(jobs, run_local(core, jobs))
    assert_whole(core)
    core.close()


@pytest.mark.parametrize("kind", KNOBS)
@pytest.mark.parametrize("place", ["forward", "copy"])
@pytest.mark.parametrize("nth", [2, 5, 9])
def test_a_step_waiting_for_masks_is_drained_when_another_fails(kind: str, place: str, nth: int) -> None:
    """The host will not make them any more: the results before the step's own never come."""
    core = make_core(KNOBS[kind])
    raised = break_at(core, place, nth)
    jobs = constrained(draw_jobs(random.Random(nth), 9))
    outcome = run_with_fault(core, jobs)
    assert raised() == 1 == core.loop.num_failed_steps
    assert_streams(jobs, outcome)
    assert_whole(core)
    core.close()
