"""A prefill and a decode node back to back: the streams are the reference's, and nothing is left behind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Grant, Installed, Ready, Wait
from tests.support.cores.core_rig import CoreKnobs, draw_jobs
from tests.support.worlds.faulty_pair import job, linked
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node, sibling


@pytest.mark.rule("H22")
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_streams_equal_the_reference(width: int, prefix_cache: bool, page_size: int) -> None:
    net, p, d = linked(
        width=width, prefix_cache=prefix_cache, page_size=page_size, num_pages=200 if page_size > 1 else 3000
    )
    jobs = draw_jobs(random.Random(width + page_size), 12)
    keys = [net.generate(p, one, d) for one in jobs]
    net.run()
    for one, key in zip(jobs, keys, strict=True):
        assert net.router.streams[key] == expected(one)
        assert net.router.end(key).reason in ("stop", "length")
        assert len(net.router.ends[key]) == 1
    assert net.messages(Installed)
    assert_clean(p, d)


@pytest.mark.rule("H21")
def test_chunks_are_announced_while_later_ones_compute() -> None:
    net, p, d = linked(chunk_size=32)
    net.generate(p, job(length=100), d)
    net.run()
    readies = net.messages(Ready)
    assert [(ready.first_page, len(ready.pages)) for ready in readies] == [(0, 2), (2, 2), (4, 2), (6, 1)]


@pytest.mark.rule("H22", "H29")
def test_only_missing_pages_travel() -> None:
    net, p, d = linked()
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
    net, p, d = linked(prefix_cache=prefix_cache, width=width)
    one = job(0, 70, SamplingParams(max_tokens=9, temperature=0.8))
    key = net.generate(p, one, d, num_sequences=3)
    net.run()
    for index in range(3):
        assert net.router.streams[sibling(key, index)] == expected(one, index)
        assert len(net.router.ends[sibling(key, index)]) == 1
    pages = [len(ready.pages) for ready in net.messages(Ready)]
    assert sum(pages) == (5 + 1 + 1 if prefix_cache else 15)
    assert_clean(p, d)


def test_siblings_of_a_one_token_leader_are_offered() -> None:
    net, p, d = linked()
    one = job(0, 70, SamplingParams(max_tokens=9, temperature=0.8))
    stops = tuple({expected(one)[0]} - {expected(one, 1)[0]})
    one = replace(one, sampling=replace(one.sampling, stop_token_ids=stops))
    assert stops and len(expected(one)) == 1
    key = net.generate(p, one, d, num_sequences=2)
    net.run()
    assert [net.router.streams[sibling(key, i)] for i in range(2)] == [expected(one), expected(one, 1)]
    assert_clean(p, d)


def test_an_attempt_goes_on_where_the_one_before_stopped() -> None:
    net, p, d = linked()
    said = expected(job())[:5]
    key = net.generate(p, job(), d, output_ids=[said], attempt=1)
    net.router.streams[key].extend(said)
    net.run()
    assert net.router.streams[key] == expected(job())
    assert net.router.end(key).num_output_tokens == len(expected(job()))
    assert_clean(p, d)


def test_logprobs_of_the_first_token_come_from_both_nodes_alike() -> None:
    net, p, d = linked()
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
