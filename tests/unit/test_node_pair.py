"""A prefill and a decode node back to back: the streams are the reference's, and nothing is left behind."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from pair import Net, assert_clean, expected, make_node, sibling
from rig import CoreKnobs, Job, draw_jobs

from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Installed, Offer, Ready

LONG = SamplingParams(max_tokens=12, temperature=0.0)


def job(rid: int = 0, length: int = 70, sampling: SamplingParams = LONG) -> Job:
    rng = random.Random(rid)
    return Job(rid, tuple(rng.randrange(95) for _ in range(length)), sampling, rid + 7)


def pair(**changes: object) -> tuple:
    knobs = replace(CoreKnobs(), **changes)
    return make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)


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
