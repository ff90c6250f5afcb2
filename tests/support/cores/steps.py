"""A core's steps: what a test brings into them, and what they gave its requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shared.core.keys import RequestKey
from shared.core.request import Request
from shared.engine.lease import StepLease
from shared.engine.plan import RowId, StepPlan, StepResult
from shared.node.records.core import NodeCore
from tests.support.cores.core_rig import Job, Outcome


def submit(core: NodeCore, *jobs: Job, handoff_to: str | None = None) -> list[Request]:
    requests = [job.request(handoff_to) for job in jobs]
    for req in requests:
        core.submit(req)
    return requests


def step(core: NodeCore, num_steps: int) -> None:
    for _ in range(num_steps):
        core.step(block=True)


def bring_to(state: str, core: NodeCore, *requests: Request) -> None:
    """Step until all of them are in that state."""
    for _ in range(200):
        if {req.state.value for req in requests} == {state}:
            return
        core.step(block=True)
    raise AssertionError(f"they never were {state}, but {[req.state.value for req in requests]}")


def plans_of(core: NodeCore) -> list[StepPlan]:
    """Return what fills with the plans that the core launches."""
    plans, launch = list[StepPlan](), core.engine.launch

    def heard(plan: StepPlan) -> StepLease:
        plans.append(plan)
        return launch(plan)

    core.engine.launch = heard  # type: ignore[method-assign]
    return plans


ROW = RowId(RequestKey("test", 1, "r0", 0, 0), 0)


def made_up_result(
    accept_lens: npt.NDArray[np.integer],
    seconds: float,
    *,
    width: int = 1,
    num_prefill: int = 0,
    prompt_tokens: int = 0,
) -> StepResult:
    """What a step took, a quarter of it for drafts, and how many tokens each of its rows got."""
    num_rows = len(accept_lens)
    return StepResult(
        step=1,
        row_ids=(ROW,) * num_rows,
        num_prefill=num_prefill,
        tokens=np.zeros((num_rows, width), np.int64),
        accept_lens=accept_lens.astype(np.int32),
        seq_lens=np.zeros(num_rows, np.int64),
        tag_ok=np.ones(num_rows, np.bool_),
        draft_state={},
        draft_seconds=0.25 * seconds,
        verify_seconds=0.75 * seconds,
        logprobs=np.zeros((num_rows, width), np.float32),
        top_ids=np.zeros((num_rows, width, 0), np.int64),
        top_logprobs=np.zeros((num_rows, width, 0), np.float32),
        prompt_tokens=prompt_tokens,
    )


def results_of(core: NodeCore) -> list[StepResult]:
    """Return what fills with the results that the core processes."""
    seen, process = list[StepResult](), core.scheduler.process

    def heard(result: StepResult) -> None:
        seen.append(result)
        process(result)

    core.scheduler.process = heard  # type: ignore[method-assign]
    return seen


def run_until_still(core: NodeCore, jobs: Sequence[Job] = (), outcome: Outcome | None = None) -> Outcome:
    """Submit jobs and run until nothing moves. `outcome`: what came before."""
    outcome = outcome or Outcome()
    for job in jobs:
        core.submit(job.request())
    while core.step(block=True):
        outcome.take(core)
    outcome.take(core)
    return outcome


def tokens_of(results: Sequence[StepResult], rid: str) -> list[int]:
    """Return how many tokens each step gave the request, for steps that it was in."""
    return [int(one.accept_lens[i]) for one in results for i, row in enumerate(one.row_ids) if row.key.rid == rid]
