"""What a core's steps gave its requests."""

from __future__ import annotations

from collections.abc import Sequence

from shared.engine.plan import StepResult
from shared.node.records.core import NodeCore
from tests.support.cores.core_rig import Job, Outcome


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
