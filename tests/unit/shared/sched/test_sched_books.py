"""A scheduler's own books: who is installed is in one of them only, and at rest all are empty."""

from __future__ import annotations

import random

import pytest

from shared.core.sampling_params import SamplingParams
from shared.model.math.interface import LayerMarks
from shared.node.records.core import NodeCore
from shared.sched.steps.events import ChunkLaunched
from tests.support.cores.core_pair import make_pair, run_pair
from tests.support.cores.core_rig import CoreKnobs, Job, assert_streams, draw_jobs, make_core


def books(core: NodeCore) -> dict[str, int]:
    queues = core.queues
    names = ("requests", "waiting", "prefilling", "granted", "handed_off", "ungranted")
    return {name: len(getattr(queues, name)) for name in names} | {"running": len(queues.running)}


def test_an_installed_request_is_running_and_nothing_else() -> None:
    pair = make_pair(CoreKnobs("inline"))
    pair.submit(Job(0, tuple(range(40)), SamplingParams(max_tokens=30, temperature=0.0), 1))
    while len(pair.outcome.streams["r0"]) < 3:
        pair.tick()
    only = {"requests": 1, "running": 1}
    assert {name: number for name, number in books(pair.decode).items() if number} == only
    pair.close()


@pytest.mark.parametrize("retract_every", [0, 5])
def test_at_rest_no_book_holds_anybody(retract_every: int) -> None:
    pair = make_pair(CoreKnobs("inline", num_pages=40, chunk_size=16))
    jobs = draw_jobs(random.Random(2), 8)
    outcome = run_pair(pair, jobs, retract_every=retract_every)
    assert_streams(jobs, outcome)
    for core in (pair.prefill, pair.decode):
        core.scheduler.planner.plan()  # rows that ended leave the batch here
        assert not any(books(core).values()), books(core)
    pair.close()


def test_a_launched_step_announces_its_chunks() -> None:
    core = make_core(CoreKnobs("inline", chunk_size=16))
    jobs = [Job(rid, tuple(range(9 + rid)), SamplingParams(max_tokens=3, temperature=0.0), rid) for rid in (0, 1)]
    for job in jobs:
        core.scheduler.intake.submit(job.request())
    plan = core.scheduler.planner.plan()
    assert plan is not None and plan.num_prefill == 2
    core.queues.take_events()
    core.scheduler.planner.launched(plan, LayerMarks((1,)))
    announced = core.queues.take_events()
    assert [(one.key.rid, one.is_last) for one in announced if isinstance(one, ChunkLaunched)] == [
        ("r0", True),
        ("r1", False),
    ]
    core.scheduler.planner.launched(plan, None)
    assert not core.queues.take_events(), "nobody waits for layers"
