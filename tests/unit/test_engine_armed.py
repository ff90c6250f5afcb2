"""What a step promises to publish is armed at its launch: whoever waits for it comes back even if the step raises."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from shared.core.sampling_params import SamplingParams
from shared.device.events import Event
from shared.engine.lease import StepLease
from tests.support.core_pair import make_pair
from tests.support.core_rig import CoreKnobs, Job


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
        pair.decode.scheduler.submit(job.request())
    for _ in range(200):
        if not events:
            pair.tick()
    (event, *_) = events
    assert (event is None) == (width == 1), "plain lengths are known without it"
    assert event is None or (event.fired and event.error is not None)
    pair.close()
