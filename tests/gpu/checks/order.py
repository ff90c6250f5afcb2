"""What a comparison of streams may miss: waits of the host, and work on two streams without an order."""

from __future__ import annotations

from dataclasses import replace

from tests.gpu.checks.streams import KINDS, outcome
from tests.gpu.failed_steps import no_failed_steps
from tests.gpu.place import Place
from tests.support.cores.core_rig import Job
from tests.support.gpus.cuda_core import make_core
from tests.support.gpus.cuda_jobs import jobs

NAMES = ("plain", "n-gram", "chain", "tree")
MOST_TOKENS = 64
WARM_STEPS, STEPS = 12, 20


def silent_steps(place: Place) -> dict[str, object]:
    """In the steady state no call of a step waits for the device: torch raises where one does."""
    figures: dict[str, object] = {}
    for name in NAMES[:1] if place.tiny else NAMES:
        core = make_core(KINDS[name], place.gpu)  # type: ignore[arg-type]
        try:
            for job in long_jobs(2 if place.tiny else 6):
                core.submit(job.request())
            for _ in range(WARM_STEPS):
                core.step(block=True)
            before = core.loop.num_steps
            with no_failed_steps(), place.no_host_waits():
                for _ in range(STEPS):
                    core.step(block=True)
            figures[f"{name}, steps without a wait"] = core.loop.num_steps - before
            assert core.loop.num_steps - before >= STEPS // 2, "the steps were not run"
        finally:
            core.close()
    return figures


def long_jobs(count: int) -> list[Job]:
    """Return requests that neither arrive nor end during the measurement."""
    endless = {"max_tokens": MOST_TOKENS, "min_tokens": 0, "stop_token_ids": ()}
    return [replace(job, sampling=replace(job.sampling, **endless)) for job in jobs(count)]


def races(place: Place) -> dict[str, object]:
    """Run, retract and draft for requests under torch's stream sanitizer."""
    watched, found = place.watched()
    figures: dict[str, object] = {}
    try:
        for name in NAMES[:1] if place.tiny else NAMES:
            figures[f"{name}, steps"] = outcome(watched, KINDS[name], place.tiny).num_steps
    finally:  # a step that raced has failed, and is run again, or ends everything: what was found says more
        assert not found, "\n".join(found)
    return figures
