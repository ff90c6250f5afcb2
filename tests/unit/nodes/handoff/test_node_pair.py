"""A prefill and a decode node back to back: the streams are the reference's, and nothing is left behind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Grant, Installed, Offer, Ready, Wait
from tests.support.cores.core_rig import CoreKnobs, Job, draw_jobs
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node, sibling

LONG = SamplingParams(max_tokens=12, temperature=0.0)


def job(rid: int = 0, length: int = 70, sampling: SamplingParams = LONG) -> Job:
    rng = random.Random(rid)
    return Job(rid, tuple(rng.randrange(95) for _ in range(length)), sampling, rid + 7)


def pair(**changes: object) -> tuple:
    knobs = replace(CoreKnobs(), **changes)
    return make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)


@pytest.mark.rule("H22")
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_streams_equal_the_reference(width: int, prefix_cache: bool, page_size: int) -> None:
    p, d = pair(width=width, prefix_cache=prefix_cache, page_size=page_size, num_pages=200 if page_size > 1 else 3000)
    net = Net([p, d])
    jobs = draw_jobs(random.Random(width + page_size), 12)
    keys = [net.generate(p, one, d) for one in jobs]
    net.run()
    for one, key in zip(jobs, keys, strict=True):
        assert net.router.streams[key] == expected(one)
        assert net.router.end(key).reason in ("stop", "length")
        assert len(net.router.ends[key]) == 1
    assert net.messages(Installed)
    assert_clean(p, d)


@pytest.mark.parametrize("backend", ["cpu", "inline"])
@pytest.mark.parametrize("overlap", [True, False])
def test_streams_over_shared_memory(backend: str, overlap: bool) -> None:
    knobs = CoreKnobs(backend=backend, overlap=overlap, chunk_size=32)
    p = make_node("prefill", "p0", knobs, transport="shm")
    d = make_node("decode", "d0", knobs, transport="shm")
    net = Net([p, d])
    jobs = draw_jobs(random.Random(5), 8)
    keys = [net.generate(p, one, d) for one in jobs]
    net.run_until_ended(keys)
    assert [net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    net.settle(p, d)
    p.ctx.core.close()
    d.ctx.core.close()


def test_prefill_reports_the_first_token_and_decode_repeats_it() -> None:
    p, d = pair()
    net = Net([p, d])
    key = net.generate(p, job(), d)
    net.run()
    assert net.router.by_node["p0", key] == expected(job())[:1]
    assert net.router.by_node["d0", key] == expected(job())


@pytest.mark.rule("H21")
def test_chunks_are_announced_while_later_ones_compute() -> None:
    p, d = pair(chunk_size=32)
    net = Net([p, d])
    net.generate(p, job(length=100), d)
    net.run()
    readies = net.messages(Ready)
    assert [(ready.first_page, len(ready.pages)) for ready in readies] == [(0, 2), (2, 2), (4, 2), (6, 1)]


@pytest.mark.rule("H22", "H29")
def test_only_missing_pages_travel() -> None:
    p, d = pair()
    net = Net([p, d])
    first = net.generate(p, job(0, 70), d)
    net.run()
    again = replace(job(0, 70), rid=1)
    key = net.generate(p, again, d)
    before = len(net.messages(Ready))
    net.run()
    assert net.router.streams[key] == net.router.streams[first]
    assert [(ready.first_page, len(ready.pages)) for ready in net.messages(Ready)[before:]] == [(4, 1)]
    assert net.router.end(key).cached_tokens == 64
    assert_clean(p, d)


@pytest.mark.rule("H18")
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("width", [1, 4])
def test_several_sequences_share_the_prompt(prefix_cache: bool, width: int) -> None:
    p, d = pair(prefix_cache=prefix_cache, width=width)
    net = Net([p, d])
    one = job(0, 70, SamplingParams(max_tokens=9, temperature=0.8))
    key = net.generate(p, one, d, num_sequences=3)
    net.run()
    for index in range(3):
        assert net.router.streams[sibling(key, index)] == expected(one, index)
        assert len(net.router.ends[sibling(key, index)]) == 1
    pages = [len(ready.pages) for ready in net.messages(Ready)]
    assert sum(pages) == (5 + 1 + 1 if prefix_cache else 15)
    assert_clean(p, d)


def test_siblings_are_offered_when_the_first_is_installed() -> None:
    p, d = pair()
    net = Net([p, d])
    net.generate(p, job(), d, num_sequences=3)
    net.run()
    kinds = [type(message) for _, _, message in net.seen if isinstance(message, Offer | Installed)]
    assert kinds[:2] == [Offer, Installed]
    assert kinds.count(Offer) == 3


def test_siblings_of_a_one_token_leader_are_offered() -> None:
    p, d = pair()
    net = Net([p, d])
    one = job(0, 70, SamplingParams(max_tokens=9, temperature=0.8))
    stops = tuple({expected(one)[0]} - {expected(one, 1)[0]})
    one = replace(one, sampling=replace(one.sampling, stop_token_ids=stops))
    assert stops and len(expected(one)) == 1
    key = net.generate(p, one, d, num_sequences=2)
    net.run()
    assert [net.router.streams[sibling(key, i)] for i in range(2)] == [expected(one), expected(one, 1)]
    assert_clean(p, d)


def test_a_request_ended_by_its_first_token_is_never_installed() -> None:
    p, d = pair()
    net = Net([p, d])
    key = net.generate(p, job(sampling=SamplingParams(max_tokens=1)), d)
    net.run()
    assert not net.messages(Installed)
    assert net.router.end(key).reason == "length"
    assert ("d0", key) not in net.router.by_node
    assert_clean(p, d)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_either_node_runs_a_request_to_its_end(role: str) -> None:
    p, d = pair()
    net = Net([p, d])
    node = p if role == "prefill" else d
    key = net.generate(node, job(), num_sequences=2)
    net.run()
    assert [net.router.streams[sibling(key, i)] for i in range(2)] == [expected(job()), expected(job(), 1)]
    assert_clean(p, d)


def test_local_prompts_mix_with_arrivals() -> None:
    p, d = pair(chunk_size=16)
    net = Net([p, d])
    jobs = [job(rid, 50) for rid in range(6)]
    keys = [net.generate(d if one.rid % 2 else p, one, None if one.rid % 2 else d) for one in jobs]
    net.run()
    assert [net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    assert_clean(p, d)


def test_an_attempt_goes_on_where_the_one_before_stopped() -> None:
    p, d = pair()
    net = Net([p, d])
    said = expected(job())[:5]
    key = net.generate(p, job(), d, output_ids=[said], attempt=1)
    net.router.streams[key].extend(said)
    net.run()
    assert net.router.streams[key] == expected(job())
    assert net.router.end(key).num_output_tokens == len(expected(job()))
    assert_clean(p, d)


def test_draft_state_crosses_the_hand_off() -> None:
    """A verify at the same length accepts the same drafts, whether the prompt was computed here or there."""
    p, d = pair(width=4)
    net = Net([p, d])
    long = job(0, 70, SamplingParams(max_tokens=40, temperature=0.8))
    net.generate(p, long, d)
    net.run()
    alone, _ = pair(width=4)
    local = Net([alone])
    local.generate(alone, long)
    local.run()
    there, here = d.ctx.core.queues.counters, alone.ctx.core.queues.counters
    assert (there.spec_steps, there.spec_accepted_tokens) == (here.spec_steps, here.spec_accepted_tokens)
    assert there.spec_accepted_tokens > 10


def test_logprobs_of_the_first_token_come_from_both_nodes_alike() -> None:
    p, d = pair()
    net = Net([p, d])
    key = net.generate(p, job(sampling=SamplingParams(max_tokens=4, temperature=0.0, num_logprobs=2)), d)
    first = []
    net.on_message = lambda src, dst, m: first.extend(
        run.logprobs[0] for run in getattr(m, "runs", []) if run.first_pos == 0
    )
    net.run()
    assert len(first) == 2 and first[0] == first[1] and len(first[0].top_ids) == 2
    assert len(net.router.logprobs[key]) == 4


def test_offers_wait_for_a_full_decode_node_and_keep_their_order() -> None:
    knobs = CoreKnobs()
    p = make_node("prefill", "p0", knobs)
    d = make_node("decode", "d0", replace(knobs, num_pages=14, max_running=4))
    net = Net([p, d])
    jobs = [job(rid, 60) for rid in range(6)]
    keys = [net.generate(p, one, d) for one in jobs]
    net.run()
    assert net.messages(Wait)
    assert len(net.messages(Wait)) == len({message.key for message in net.messages(Wait)}), "told once each"
    assert [message.key for message in net.messages(Grant)] == keys
    assert [net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    assert_clean(p, d)


def test_a_crowded_pool_retracts_and_still_says_the_same() -> None:
    """Retracted requests are prefilled again where they are; granted ones lose their reservation and do the same."""
    knobs = CoreKnobs()
    p = make_node("prefill", "p0", knobs)
    d = make_node("decode", "d0", replace(knobs, num_pages=17, max_running=6))
    net = Net([p, d])
    jobs = [job(rid, 30 + rid, SamplingParams(max_tokens=60, temperature=0.8)) for rid in range(8)]
    keys = [net.generate(p, one, d) for one in jobs]
    net.run()
    assert d.ctx.core.queues.counters.retractions > 0
    assert [net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    assert_clean(p, d)


def test_a_capped_prefill_node_pins_little_while_decode_is_full() -> None:
    p = make_node("prefill", "p0", CoreKnobs(max_ungranted_pages=10))
    d = make_node("decode", "d0", CoreKnobs(num_pages=14))
    net = Net([p, d])
    jobs = [job(rid, 60) for rid in range(8)]
    most = 0

    def look(src: str, dst: str, message: object) -> None:
        nonlocal most
        scheduler = p.ctx.core.scheduler
        rows = [
            scheduler.queues.requests[key].row
            for key in scheduler.queues.ungranted
            if scheduler.queues.requests[key].row
        ]
        most = max(most, sum(int(p.ctx.core.kv.rows.num_pages[row]) for row in rows))

    net.on_message = look
    keys = [net.generate(p, one, d) for one in jobs]
    net.run()
    assert 0 < most <= 10
    assert [net.router.streams[key] for key in keys] == [expected(one) for one in jobs]
    assert_clean(p, d)


def test_heartbeats_partition_pages_and_rows() -> None:
    p, d = pair()
    net = Net([p, d])
    net.hold = lambda src, dst, message: isinstance(message, Ready)
    net.generate(p, job(), d)
    net.run()
    net.at(1.0)
    net.run()
    granted, pinned = net.router.heartbeats["d0"].load, net.router.heartbeats["p0"].load
    assert granted.rows["granted"] == 1 and granted.pages["granted"] == 5
    assert pinned.rows["held"] == 1
    net.release_held()
    net.run()
    net.at(1.0)
    net.run()
    load = net.router.heartbeats["d0"].load
    assert load.counters["handoffs"] == 1 and load.counters["handoff_bytes"] > 0 and load.counters["steps"] > 3
    assert len(load.observations["queue_seconds.transfer"]) == 1
    assert len(net.router.heartbeats["p0"].load.observations["handoff_seconds"]) == 1
    assert_clean(p, d)
