"""A prefill and a decode node back to back: the streams are the reference's, and nothing is left behind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shared.core.keys import RequestKey
from shared.core.sampling_params import MAX_TOP_LOGPROBS, SamplingParams
from shared.node.records.convert import MESSAGE_BYTES, request_of, scores_of
from shared.sched.steps.events import Scored
from shared.wire.codec import encode
from shared.wire.messages import Grant, Installed, Offer, Ready, TokenLogprob, Wait
from tests.support.cores.core_rig import CoreKnobs, Job, draw_jobs
from tests.support.wire.wire_samples import MESSAGES
from tests.support.worlds.faulty_pair import LONG, job, linked
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


# ---- how likely a prompt was


LENGTH = 70


def scored(num_top: int = 2) -> Job:
    return job(1, LENGTH, replace(LONG, prompt_logprobs=num_top))


@pytest.mark.parametrize(("role", "num_sequences"), [("prefill", 3), ("decode", 1)])
def test_one_node_scores_a_prompt_once_for_all_its_sequences(role: str, num_sequences: int) -> None:
    """The net asserts their order, and that no token of the same sequence comes first."""
    node = make_node(role, "n0", CoreKnobs(chunk_size=32))
    net = Net([node])
    key = net.generate(node, scored(), num_sequences=num_sequences)
    net.run()
    assert {of: len(entries) for of, entries in net.router.scores.items()} == {key: LENGTH - 1}
    assert all(len(own.top_ids) == 2 for own in net.router.scores[key])
    for index in range(num_sequences):
        assert net.router.streams[sibling(key, index)] == expected(scored(), index)
    assert_clean(node)


def test_a_decode_node_does_not_rescore_a_recomputed_prompt() -> None:
    offer = next(message for message in MESSAGES if isinstance(message, Offer))
    assert offer.sampling.prompt_logprobs >= 0 and request_of(offer, 0, 0.0).first_unscored is None


@pytest.mark.parametrize("num_top", [0, MAX_TOP_LOGPROBS])
def test_no_message_is_large(num_top: int) -> None:
    worst = TokenLogprob(-1.25e-9, (2**31 - 1,) * num_top, (-3.3e38,) * num_top)
    event = Scored(RequestKey("r" * 200, 2**64 - 1, "x" * 200, 0, 0), 1, (worst,) * 8192)
    messages = scores_of(event, "n" * 200, 2**64 - 1)
    assert max(len(encode(message)) for message in messages) <= MESSAGE_BYTES + 2048
    assert sum(len(message.logprobs) for message in messages) == 8192
    edges = [message.first_pos for message in messages] + [8193]
    assert [edge + len(one.logprobs) for edge, one in zip(edges, messages, strict=False)] == edges[1:]
