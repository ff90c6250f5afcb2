"""Adapters through scheduler, caches and hand-off, on HashLM: KV of one is never read by another."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Offer, Refuse
from tests.support.cores.core_rig import (
    CoreKnobs,
    Job,
    Outcome,
    assert_streams,
    assert_whole,
    draw_jobs,
    make_core,
    run_local,
)
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node

ADAPTERS = ("one", "two")
SAMPLING = SamplingParams(max_tokens=10, temperature=0.0)
PROMPT = tuple(random.Random(4).randrange(95) for _ in range(70))


def job(rid: int, adapter: str) -> Job:
    return Job(rid, PROMPT, SAMPLING, 5, adapter=adapter)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_one_batch_of_different_adapters(overlap: bool, width: int) -> None:
    """The same prompt for all of them, twice, with prefix cache: hits within an adapter only."""
    core = make_core(CoreKnobs(overlap=overlap, width=width, adapters=ADAPTERS))
    outcome = Outcome()
    for start in (0, 10):
        jobs = [job(start + n, adapter) for n, adapter in enumerate(("", "one", "two", "", "one", "two"))]
        assert len({tuple(one.expected()) for one in jobs}) == 3
        for one in jobs:
            core.scheduler.intake.submit(one.request())
        while core.queues.requests or not core.loop.idle:
            core.loop.step(block=True)
            outcome.take(core)
        for one in jobs:
            assert outcome.streams[f"r{one.rid}"] == one.expected()
    cached = [outcome.ends[f"r{10 + n}"].cached_tokens for n in range(6)]
    assert cached == [64] * 6
    core.check_integrity(idle=True)


@pytest.mark.parametrize("file_pages", [0, 40])
def test_cold_pages_of_different_adapters(file_pages: int) -> None:
    """The same prompts under all of them through a pool that is too small: what comes back is the adapter's own."""
    knobs = CoreKnobs(num_pages=16, cold_pages=20, cold_file_pages=file_pages, adapters=ADAPTERS)
    core, rng = make_core(knobs), random.Random(file_pages)
    stem = PROMPT[:48]
    for wave in range(4):
        jobs = [replace(job(10 * wave + n, adapter), prompt=stem) for n, adapter in enumerate(("", *ADAPTERS))]
        assert_streams(jobs, run_local(core, jobs, retract_every=5, rng=rng))
    counters = core.queues.counters
    assert counters.restored_pages >= 5 and counters.offload_failures == 0
    assert_whole(core)
    core.close()


@pytest.mark.parametrize("width", [1, 4])
def test_hand_offs_of_different_adapters(width: int) -> None:
    knobs = CoreKnobs(width=width, adapters=ADAPTERS)
    p, d = make_node("prefill", "p0", knobs), make_node("decode", "d0", replace(knobs, adapters=ADAPTERS[::-1]))
    net, rng = Net([p, d]), random.Random(width)
    jobs = [replace(one, adapter=rng.choice(("", *ADAPTERS))) for one in draw_jobs(rng, 9)]
    jobs += [job(20 + n, adapter) for n, adapter in enumerate(("one", "", "two", "one"))]
    keys = [net.generate(p, one, d) for one in jobs]
    net.run()
    assert [net.router.streams[key] for key in keys] == [one.expected() for one in jobs]
    assert [offer.adapter for offer in net.messages(Offer)] == [one.adapter for one in jobs]
    assert_clean(p, d)


def test_no_prefix_of_another_adapter_is_granted() -> None:
    """The decode node has the prompt's pages, of another adapter."""
    knobs = CoreKnobs(adapters=ADAPTERS)
    p, d = make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)
    net = Net([p, d])
    for rid, adapter in enumerate(("one", "two", "", "one")):
        key = net.generate(p, job(rid, adapter), d)
        net.run()
        assert net.router.streams[key] == job(rid, adapter).expected()
        assert net.router.end(key).cached_tokens == (64 if rid == 3 else 0)
    assert_clean(p, d)


def test_a_node_without_the_adapter_says_so() -> None:
    knobs = CoreKnobs(adapters=("one",))
    p, d = make_node("prefill", "p0", knobs), make_node("decode", "d0", replace(knobs, adapters=()))
    net = Net([p, d])
    missing = net.generate(p, job(0, "two"), d)
    net.run()
    end = net.router.end(missing)
    assert (end.reason, end.error_code) == ("error", "adapter_missing") and "two" in end.error_message
    refused = net.generate(p, job(1, "one"), d)
    net.run()
    (refusal,) = net.messages(Refuse)
    assert "does not have the adapter one" in refusal.reason
    assert net.router.end(refused).reason == "error"
    plain = net.generate(p, job(2, ""), d)
    net.run()
    assert net.router.streams[plain] == expected(job(2, ""))
    assert_clean(p, d)
