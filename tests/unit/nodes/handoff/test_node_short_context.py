"""Nodes of a model whose longer texts have other KV: hand-offs below, across and beyond the bound, a death at any
place, and pages that one prefill node copies from another."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from shared.core.page_identity import LONG
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Offer
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.faulty_pair import linked
from tests.support.worlds.node_pair import assert_clean, expected, sibling
from tests.support.worlds.prefix_pulls import PullPair
from tests.support.worlds.prefix_pulls import job as pulled_job

BOUND = 64
LENGTHS = (20, BOUND - 6, BOUND - 1, BOUND, BOUND + 1, BOUND + 40)
KNOBS = {"short_context": BOUND, "num_pages": 200}


def jobs(first: int = 0) -> list[Job]:
    stem, params = random.Random(4).choices(range(90), k=max(LENGTHS)), SamplingParams(12, temperature=0.8)
    return [
        Job(first + rid, tuple(stem[:length]), params, rid, short_context=BOUND) for rid, length in enumerate(LENGTHS)
    ]


@pytest.mark.parametrize("more", [{}, {"width": 4}, {"width": 4, "spec": "ngram"}])
def test_hand_offs_below_across_and_beyond(more: dict[str, object]) -> None:
    """Then again, with cached prompts."""
    net, p, d = linked(**KNOBS | more)
    for first in (0, 10):
        keys = [net.generate(p, one, d) for one in jobs(first)]
        net.run_until_ended(keys)
        for one, key in zip(jobs(first), keys, strict=True):
            assert net.router.streams[key] == expected(one)
            assert net.router.end(key).reason == "length"
    assert d.ctx.metrics.counters()["outgrown_contexts"] == 2 * 3
    assert len(net.messages(Offer)) == 2 * len(LENGTHS), "nothing was handed over again"
    net.run()
    assert_clean(p, d)


@pytest.mark.parametrize("length", [BOUND - 1, BOUND + 9])
def test_several_answers_to_one_prompt_share_its_pages(length: int) -> None:
    net, p, d = linked(**KNOBS)
    one = replace(jobs()[-1], prompt=jobs()[-1].prompt[:length])
    key = net.generate(p, one, d, num_sequences=3)
    net.run()
    for index in range(3):
        assert net.router.streams[sibling(key, index)] == expected(one, index)
    assert p.ctx.core.queues.counters.prompt_tokens < 2 * length
    assert_clean(p, d)


@pytest.mark.parametrize("num_known", [3, 6, 7, 9])
def test_an_answer_goes_on_after_a_death(num_known: int) -> None:
    """Below the bound, with its last token there, with the first one beyond, and beyond it."""
    net, p, d = linked(**KNOBS)
    one = jobs()[1]
    key = net.generate(p, one, d)
    net.run(until=lambda: len(net.router.streams[key]) >= num_known)
    net.kill(d)
    known = net.router.streams[key][:num_known]
    other = net.generate(p, one, attempt=1, output_ids=[known])
    net.router.streams[other].extend(known)
    net.run_until_ended([other])
    assert net.router.streams[other] == expected(one)


@pytest.mark.parametrize("tokens", [BOUND, 100])
def test_pulled_pages_are_of_the_text_s_kind(tokens: int) -> None:
    rig = PullPair(CoreKnobs(short_context=BOUND))
    first, second = (replace(pulled_job(number, tokens), short_context=BOUND) for number in (1, 2))
    rig.warm(first)
    named = replace(second, adapter=LONG if tokens > BOUND else "")
    key = rig.ask(second, rig.source(named, 3))
    rig.finish(key, second)
    assert rig.count("pull.pulled") == 1 and rig.count("pulled_pages") == 3


def test_an_answer_beyond_the_bound_asks_for_no_short_pages() -> None:
    """The router names pages by the prompt alone."""
    rig = PullPair(CoreKnobs(short_context=BOUND))
    first, second = (replace(pulled_job(number, BOUND, 9), short_context=BOUND) for number in (1, 2))
    rig.warm(first)
    known = expected(second)[:3]
    key = rig.net.generate(rig.p, second, output_ids=[known], source=rig.source(second, 3))
    rig.net.router.streams[key].extend(known)
    rig.finish(key, second)
    assert rig.count("pull.not_asked") == 1 and not rig.count("refused.ticket", rig.s)


def test_routers_hear_of_the_bound() -> None:
    net, _, _ = linked(**KNOBS)
    net.run()
    assert {hello.short_context for hello in net.router.hellos} == {BOUND}
