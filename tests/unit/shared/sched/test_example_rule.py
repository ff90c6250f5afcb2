"""The example of docs/where_tests_go.md: a rule of the scheduler, on the scheduler and its books alone."""

from __future__ import annotations

from shared.core.sampling_params import SamplingParams
from shared.sched.scheduler import make_scheduler
from shared.sched.steps.settings import SchedSettings
from tests.support.cores.core_rig import Job

BUDGET = 64  # prompt tokens of one step


def test_a_short_prompt_ends_in_the_first_step_beside_a_long_one() -> None:
    scheduler = make_scheduler(SchedSettings(16, 1024, BUDGET, BUDGET), num_pages=65, max_running=4)
    long, short = (Job(rid, (rid,) * n, SamplingParams(max_tokens=4), rid).request() for rid, n in ((1, 200), (2, 20)))
    for req in (long, short):
        scheduler.intake.submit(req)
    plan = scheduler.planner.plan()
    assert plan is not None
    shares = {row.key: tokens for row, tokens in zip(plan.row_ids, plan.q_lens.tolist(), strict=True)}
    assert shares == {long.key: BUDGET - 20, short.key: 20}
