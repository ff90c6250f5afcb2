"""What a node tells routers of its cache: everything at first, then changes; bounded, whatever routers miss."""

from __future__ import annotations

import random

import pytest

from router.fleet.prefix_index import PageIndex
from shared.core.sampling_params import SamplingParams
from shared.node.records import cache_teller
from shared.node.records.cache_teller import RING_BATCHES, CacheTeller
from shared.node.records.core import NodeCore
from shared.wire.messages import CacheEvents
from tests.support.cores.core_rig import CoreKnobs, Job, make_core

ROUTER = "tcp://r"


def run_one(core: NodeCore, rid: int, length: int = 40) -> None:
    prompt = tuple(random.Random(rid).randrange(95) for _ in range(length))
    core.scheduler.intake.submit(Job(rid, prompt, SamplingParams(max_tokens=4, temperature=0.0), 1).request())
    while core.queues.requests or not core.loop.idle:
        core.loop.step(block=True)
        core.take_events()


def told(teller: CacheTeller, *peers: str) -> list[CacheEvents]:
    messages = [message for _, message in teller.tell(peers or (ROUTER,))]
    while teller.has_more:
        messages += [message for _, message in teller.tell(peers or (ROUTER,))]
    return messages


def test_a_router_knows_the_cache_whatever_happens_to_it() -> None:
    """A small pool: pages are evicted all the time."""
    core, index = make_core(CoreKnobs(num_pages=24, page_size=8)), PageIndex()
    run_one(core, 0)
    teller = CacheTeller(core.kv, "a", 1)
    assert told(teller) == [] and core.kv.cache.listener is None, "nobody has asked"
    teller.asked(ROUTER, 0)
    evicted = 0
    for rid in range(1, 20):
        messages = told(teller)
        assert all(index.take_events(message) for message in messages)
        evicted += sum(len(message.removed) for message in messages)
        assert index._names == set(core.kv.cache.cached_names()) and index.seq == teller.seq(ROUTER)
        run_one(core, rid)
    core.kv.flush_cache()
    assert all(index.take_events(message) for message in told(teller)) and not len(index)
    assert evicted > 20


def test_what_was_missed_is_told_again_or_from_the_beginning() -> None:
    core, index = make_core(CoreKnobs(num_pages=400, page_size=8)), PageIndex()
    teller = CacheTeller(core.kv, "a", 1)
    teller.asked(ROUTER, 0)
    index.take_events(told(teller)[0])
    run_one(core, 1)
    lost = told(teller)
    teller.asked(ROUTER, index.seq)
    assert told(teller) == lost, "the ring has them"
    for rid in range(2, 2 * RING_BATCHES):
        run_one(core, rid)
        told(teller)
    teller.asked(ROUTER, index.seq)
    anew = told(teller)
    assert [one.cleared for one in anew] == [True]
    assert index.take_events(anew[0]) and index._names == set(core.kv.cache.cached_names())


def test_what_is_kept_for_a_router_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent for long, while every page is evicted many times over."""
    monkeypatch.setattr(cache_teller, "BATCH_PAGES", 5)
    core, index = make_core(CoreKnobs(num_pages=24, page_size=8)), PageIndex()
    teller = CacheTeller(core.kv, "a", 1)
    teller.asked(ROUTER, 0)
    for rid in range(30):
        run_one(core, rid)
        (stream,) = teller._streams.values()
        assert len(stream.changes) <= 2 * core.kv.allocator.num_total + 1
    messages = told(teller)
    assert max(len(one.stored) + len(one.removed) for one in messages) == 5
    assert all(index.take_events(message) for message in messages)
    assert index._names == set(core.kv.cache.cached_names())


def test_late_messages_of_a_lost_connection_change_nothing() -> None:
    """The node has forgotten the router, and tells it all anew. Then comes what it had sent before."""
    core, index = make_core(CoreKnobs(num_pages=24, page_size=8)), PageIndex()
    teller = CacheTeller(core.kv, "a", 1)
    teller.asked(ROUTER, 0)
    late = told(teller)
    for rid in range(1, 4):
        run_one(core, rid)
        late += told(teller)
    told(teller, "tcp://other")
    teller.asked(ROUTER, 0)
    anew = told(teller)
    for rid in range(4, 8):
        run_one(core, rid)
        anew += told(teller)
    assert index.take_events(anew[0]) and all(index.take_events(message) for message in late)
    assert all(index.take_events(message) for message in anew[1:])
    assert index._names == set(core.kv.cache.cached_names())
