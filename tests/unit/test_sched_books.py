"""A scheduler's own books: who is installed is in one of them only, and at rest all are empty."""

from __future__ import annotations

import random

import pytest

from shared.core.sampling_params import SamplingParams
from shared.node.core import NodeCore
from tests.support.core_pair import make_pair, run_pair
from tests.support.core_rig import CoreKnobs, Job, assert_streams, draw_jobs


def books(core: NodeCore) -> dict[str, int]:
    scheduler = core.scheduler
    names = ("requests", "waiting", "prefilling", "granted", "handed_off", "ungranted")
    return {name: len(getattr(scheduler, name)) for name in names} | {"running": len(scheduler.running)}


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
        core.scheduler.plan()  # rows that ended leave the batch here
        assert not any(books(core).values()), books(core)
    pair.close()
