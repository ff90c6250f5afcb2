"""What a step took, on a clock of the test's own: from its first closure to the end of its second, drafting apart."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from shared.device.clock import Mark
from shared.engine.lease import StepTimes
from tests.support.cores.core_rig import CoreKnobs, draw_jobs, make_core, run_local
from tests.support.cores.steps import results_of

TICK_S = 0.25


class Listed:
    """A clock whose marks are these; by default nothing takes time but to mark it."""

    def __init__(self, *marks: float) -> None:
        self._marks = iter(marks or itertools.count(0.0, TICK_S))

    def mark(self) -> float:
        return next(self._marks)

    def seconds(self, first: Mark, last: Mark) -> float:
        assert isinstance(first, float) and isinstance(last, float)
        return last - first


@pytest.mark.parametrize(
    ("width", "spans"),
    [
        (1, {(0, 1)}),  # begin, end
        (4, {(1, 2), (2, 3)}),  # begin, (draft, draft,) extend, extend, end
    ],
)
def test_a_step_lasts_from_forward_start_to_sampling_end(width: int, spans: set[tuple[int, int]]) -> None:
    core = make_core(CoreKnobs("inline", width=width))
    core.streams = core.engine.streams = replace(core.streams, clock=Listed())
    results = results_of(core)
    run_local(core, draw_jobs(random.Random(1), 3))
    assert len(results) > 5
    found = {(result.draft_seconds / TICK_S, result.verify_seconds / TICK_S) for result in results}
    assert found == spans, "the drafter, all the rest"


def test_what_is_left_for_the_rest_is_never_less_than_nothing() -> None:
    """A device rounds each span by itself."""
    times = StepTimes(Listed(1.0, 0.5, 2.5, 2.0))
    times.mark()
    with times.drafting():
        pass
    times.mark()
    assert times.seconds() == (2.0, 0.0)
