"""Steps that raise, in places where a step can raise, and what its requests may lose by it."""

from __future__ import annotations

import random
from collections.abc import Callable

from shared.core.errors import StepFailed
from shared.core.states import FinishReason
from shared.node.records.core import NodeCore
from tests.support.cores.core_rig import Job, Outcome, run_local

PLACES = ("forward", "sample", "propose", "extend", "copy")


class Fault(RuntimeError):
    pass


def break_at(core: NodeCore, place: str, nth: int) -> Callable[[], int]:
    """Make the nth call at that place raise; gives back how often it has raised."""
    calls, raised = 0, 0

    def faulty(original: Callable) -> Callable:
        def run(*args: object, **kwargs: object) -> object:
            nonlocal calls, raised
            calls += 1
            if calls == nth:
                raised += 1
                raise Fault(f"injected at {place}")
            return original(*args, **kwargs)

        return run

    worker = core.engine.worker
    if place == "forward":
        worker.model.forward = faulty(worker.model.forward)  # type: ignore[method-assign]
    elif place == "sample":
        worker.draw = faulty(worker.draw)  # type: ignore[method-assign]
    elif place in ("propose", "extend"):
        setattr(worker.drafter, place, faulty(getattr(worker.drafter, place)))
    else:
        stream = getattr(core.streams, place)
        launch = stream.launch
        stream.launch = lambda fn, *args, **kwargs: launch(faulty(fn), *args, **kwargs)
    return lambda: raised


def run_with_fault(core: NodeCore, jobs: list[Job]) -> Outcome:
    outcome = run_local(core, jobs, rng=random.Random(1))
    failed = {rid for rid, end in outcome.ends.items() if end.reason is FinishReason.ERROR}
    for job in jobs:
        stream, expected = outcome.streams[f"r{job.rid}"], job.expected()
        if f"r{job.rid}" in failed:
            assert stream == expected[: len(stream)], "a failed request had said something wrong"
        else:
            assert stream == expected, f"r{job.rid} was not in the failed step, and its stream is wrong"
    for rid in failed:
        error = outcome.ends[rid].error
        assert isinstance(error, StepFailed), outcome.ends[rid]
        assert "injected" in error.message
    return outcome
