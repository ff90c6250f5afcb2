"""Grammar masks between the host and a step: made in time, from the drafts that the step verifies, and nobody waits for
those of a step that has failed."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from llguidance import LLMatcher

from shared.core.sampling_params import SamplingParams
from shared.engine.plan import RowId, StepPlan
from shared.model.math.interface import LayerMarks
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, assert_whole, draw_jobs, make_core, run_local
from tests.support.cores.core_rig import some_follow_grammars as constrained
from tests.support.cores.step_faults import break_at, run_with_fault
from tests.support.oracles.grammar_oracle import following

KNOBS = {
    "plain": CoreKnobs("simulated", chunk_size=16),
    "chain": CoreKnobs("simulated", chunk_size=16, width=4),
    "tree": CoreKnobs("simulated", chunk_size=16, width=6, topk=2, steps=3),
}
TOO_COMPLEX = LLMatcher.grammar_from_regex("(a?){1500}a{1500}")


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


@pytest.mark.parametrize("kind", KNOBS)
def test_a_grammar_that_fails_ends_nobody_in_a_launch(kind: str) -> None:
    """A plan has changed the scheduler already: until it is launched, its rows stay."""
    core = make_core(replace(KNOBS[kind], backend="inline"))
    launched, ended = core.scheduler.planner.launched, list[RowId]()

    def heard(plan: StepPlan, layers: LayerMarks | None) -> None:
        ended.extend(row_id for row_id in plan.row_ids if row_id.key not in core.queues.requests)
        launched(plan, layers)

    core.scheduler.planner.launched = heard  # type: ignore[method-assign]
    job = Job(0, (1, 2, 3), following(SamplingParams(30, temperature=0.0), TOO_COMPLEX), 5)
    error = run_local(core, [job]).ends["r0"].error
    assert error is not None and error.status == 400 and not ended
    assert_whole(core)
