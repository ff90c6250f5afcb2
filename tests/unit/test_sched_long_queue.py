"""A long queue in front of full memory: what a plan tries, and who may go before whom."""

from __future__ import annotations

import random

import pytest

from shared.core.request import Request
from shared.core.sampling_params import SamplingParams
from shared.node.core import NodeCore
from tests.support.core_rig import CoreKnobs, Job, make_core, run_local

WAITING = 1000
STEM = tuple(random.Random(1).randrange(95) for _ in range(32))


def prompt_of(rid: int, num_tokens: int, stem: tuple[int, ...] = ()) -> tuple[int, ...]:
    rng = random.Random(rid)
    return stem + tuple(rng.randrange(95) for _ in range(num_tokens - len(stem)))


def handoff(
    core: NodeCore, rid: int, num_tokens: int = 40, stem: tuple[int, ...] = (), granted: bool = False
) -> Request:
    job = Job(rid, prompt_of(rid, num_tokens, stem), SamplingParams(max_tokens=4, temperature=0.0), rid)
    req = job.request(handoff_to="decode")
    core.scheduler.intake.submit(req)
    if granted:
        core.queues.set_granted(req.key)
    return req


def settle(core: NodeCore) -> None:
    """All who fit are handed off, and wait for their decode nodes."""
    core.loop.step(block=True)
    while core.queues.prefilling or not core.loop.idle:
        core.loop.step(block=True)
    core.queues.take_events()


def count_tries(core: NodeCore) -> list[str]:
    """Who was looked up in the prefix cache from now on: the first that a try costs."""
    tried: list[str] = []
    match = core.kv.cache.match

    def counted(*args: object, **kwargs: object) -> object:
        tried.append(str(args[2]))
        return match(*args, **kwargs)  # type: ignore[arg-type]

    core.kv.cache.match = counted  # type: ignore[method-assign, assignment]
    return tried


@pytest.mark.parametrize("stem", [(), STEM], ids=["own prompts", "a cached prefix"])
@pytest.mark.parametrize("kind", ["ungranted", "granted", "both"])
def test_a_plan_tries_one_of_each_kind_in_vain(kind: str, stem: tuple[int, ...]) -> None:
    core = make_core(CoreKnobs(page_size=4, num_pages=21 if stem else 40, chunk_size=64))
    pinned = []
    for rid in range(3):
        pinned.append(handoff(core, rid, 40, stem, granted=True))
        settle(core)
    assert all(req.state.value == "handed_off" for req in pinned), "they keep the memory until it is taken over"
    for rid in range(3, 3 + WAITING):
        handoff(core, rid, 60, stem, granted=kind == "granted" or kind == "both" and rid % 2 == 0)
    tried = count_tries(core)
    assert core.scheduler.planner.plan() is None
    assert len(tried) <= 2 and len(core.queues.waiting) == WAITING
    for req in list(core.queues.requests.values()):
        core.queues.abort(req.key)
    core.close()


def test_a_small_ungranted_prompt_does_not_overtake_a_large_one() -> None:
    core = make_core(CoreKnobs(page_size=4, num_pages=24, prefix_cache=False))
    first = handoff(core, 0, 40)
    settle(core)
    large, small = handoff(core, 1, 60), handoff(core, 2, 8)
    settle(core)
    assert [req.state.value for req in (first, large, small)] == ["handed_off", "waiting", "waiting"]
    core.queues.complete_handoff(first.key)
    settle(core)
    assert [req.state.value for req in (large, small)] == ["handed_off", "handed_off"]
    for req in (large, small):
        core.queues.complete_handoff(req.key)
    run_local(core, [])
    core.close()


def test_one_with_a_grant_goes_before_those_who_are_held_back() -> None:
    core = make_core(CoreKnobs(page_size=4, num_pages=24, prefix_cache=False))
    first = handoff(core, 0, 40, granted=True)
    settle(core)
    large, granted = handoff(core, 1, 60), handoff(core, 2, 8, granted=True)
    settle(core)
    assert [req.state.value for req in (first, large, granted)] == ["handed_off", "waiting", "handed_off"]
    for req in (first, large, granted):
        core.queues.abort(req.key)
    run_local(core, [])
    core.close()
