"""What a step promises to publish is armed at its launch: whoever waits for it comes back even if the step raises."""

from __future__ import annotations

from collections.abc import Generator

import numpy as np
import pytest

from shared.core.sampling_params import SamplingParams
from shared.device.events import Event
from shared.engine.lease import StepLease
from shared.engine.plan import Admission
from tests.support.cores.core_pair import make_pair
from tests.support.cores.core_rig import CoreKnobs, Job, make_core
from tests.support.cores.scripted_core import Script, job


def raises(*args: object) -> Generator[None, None, None]:
    raise RuntimeError("injected")


@pytest.mark.parametrize("width", [4, 1])
@pytest.mark.parametrize("place", ["admit", "launch"])
def test_a_step_that_raises_fires_what_it_would_have_published(place: str, width: int) -> None:
    pair = make_pair(CoreKnobs("inline", width=width))
    engine, events = pair.decode.engine, list[Event | None]()
    original = getattr(engine, place)

    def watch(work: object) -> StepLease:
        lease: StepLease = original(work)
        events.append(lease.publish_ready)
        return lease

    setattr(engine, place, watch)
    engine._seed_relay = raises  # type: ignore[method-assign]
    engine.worker.sample = raises  # type: ignore[method-assign]
    job = Job(0, tuple(range(40)), SamplingParams(max_tokens=9, temperature=0.0), 1)
    if place == "admit":
        pair.submit(job)
    else:
        pair.decode.scheduler.intake.submit(job.request())
    for _ in range(200):
        if not events:
            pair.tick()
    (event, *_) = events
    assert (event is None) == (width == 1), "plain lengths are known without it"
    assert event is None or (event.fired and event.error is not None)
    pair.close()


def of_nobody(step: int) -> Admission:
    """What an idle data-parallel rank would launch."""
    none = np.zeros(0, np.int64)
    return Admission(step, (), none, none, none, {}, ())


@pytest.mark.rule("S3")
@pytest.mark.parametrize("backend", ["inline", "cpu", "simulated"])
def test_a_step_of_nobody_promises_nothing(backend: str) -> None:
    """The publish of an empty index records nothing (S3). An event that was armed for it would fire as forgotten, which
    the loop takes for a failed step."""
    core = make_core(CoreKnobs(backend, width=4, needs_cpu_seq_lens=True))
    lease = core.engine.admit(of_nobody(core.engine.new_step()))
    assert lease.publish_ready is None
    assert core.loop._resolve(), "no step has failed"
    core.loop.step(block=True)
    assert core.loop.idle and core.loop.num_failed_steps == 0


@pytest.mark.rule("S6")
def test_lengths_after_an_empty_step_are_those_of_the_one_before() -> None:
    script = Script(width=4, needs_cpu_seq_lens=True)
    engine = script.core.engine
    (req,) = script.submit(job(1, 9, 30))
    script.run_until_running(req)
    script.in_flight()
    newest = engine.leases[-1].publish_ready
    engine.admit(of_nobody(engine.new_step()))
    assert newest is not None and engine.newest_publish() is newest
    script.finish()
