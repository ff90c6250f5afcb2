"""Hand-offs with a common prefix: its pages travel once, and are held once."""

from __future__ import annotations

import pytest

from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Grant, Ready
from tests.support.core_rig import CoreKnobs, Job
from tests.support.faulty_pair import pair
from tests.support.node_pair import Net, assert_clean, expected, make_node
from tests.unit.test_sched_prefixes import tokens

NUM, STEM, OWN, PAGE = 8, 328, 10, 16
COMMON = STEM // PAGE


def jobs() -> list[Job]:
    answer = SamplingParams(max_tokens=6, temperature=0.0)
    return [Job(rid, tokens(0, STEM) + tokens(rid + 1, OWN), answer, rid) for rid in range(NUM)]


def num_sent(net: Net) -> int:
    return sum(len(ready.pages) for ready in net.messages(Ready))


def test_a_burst_s_prefix_travels_once() -> None:
    p, d = pair()
    net, asked = Net([p, d]), jobs()
    keys = [net.generate(p, job, d) for job in asked]
    net.run()
    for key, job in zip(keys, asked, strict=True):
        assert net.router.streams[key] == expected(job)
    assert num_sent(net) == COMMON + NUM * -(-(STEM + OWN - COMMON * PAGE) // PAGE)
    assert_clean(p, d)


@pytest.mark.parametrize("how", ["abort", "kill", "retract"])
def test_the_first_one_s_end_releases_the_others(how: str) -> None:
    """While its pages are on their way: those that came are cached, and the next request brings the rest."""
    p, d = pair()
    net, asked = Net([p, d]), jobs()[:4]
    keys = [net.generate(p, job, d) for job in asked]
    net.run(until=lambda: num_sent(net) >= 3)
    assert len(net.messages(Grant)) == 1, "the others wait"
    if how == "abort":
        net.abort(p, keys[0])
        net.abort(d, keys[0])
    elif how == "retract":
        (leader,) = d.ctx.core.scheduler.granted.values()
        d.ctx.core.scheduler.retract(leader)
    else:
        net.kill(p)
    net.run()
    living = [] if how == "kill" else list(zip(keys, asked, strict=True))[how == "abort" :]
    for key, job in living:
        assert net.router.streams[key] == expected(job)
    assert_clean(d, *([] if how == "kill" else [p]))


def test_nobody_waits_for_pages_from_another_node() -> None:
    """That node may have much to compute first."""
    knobs = CoreKnobs(chunk_size=32)
    busy, idle, d = (
        make_node(role, name, knobs) for role, name in (("prefill", "p0"), ("prefill", "p1"), ("decode", "d0"))
    )
    net, asked = Net([busy, idle, d]), jobs()[:2]
    keys = [net.generate(busy, asked[0], d)]
    net.hold = lambda src, dst, message: isinstance(message, Ready) and message.key == keys[0]
    net.run(until=lambda: bool(net.messages(Grant)))
    keys.append(net.generate(idle, asked[1], d))
    net.run()
    assert net.router.streams[keys[1]] == expected(asked[1]), "the other node's pages are not needed"
    net.hold = lambda src, dst, message: False
    net.release_held()
    net.run()
    for key, job in zip(keys, asked, strict=True):
        assert net.router.streams[key] == expected(job)
    assert_clean(busy, idle, d)


def test_a_grant_needs_only_what_it_shares() -> None:
    """The first one's own part is long; the second one's common pages have come long before its end."""
    p, d = pair()
    net, answer = Net([p, d]), SamplingParams(max_tokens=6, temperature=0.0)
    asked = [Job(0, tokens(0, 400), answer, 0), Job(1, tokens(0, 64) + tokens(2, OWN), answer, 1)]
    keys = [net.generate(p, job, d) for job in asked]
    net.run(until=lambda: len(net.messages(Grant)) == 2)
    assert not net.router.streams.get(keys[0]), "the first prompt is still being computed"
    net.run()
    for key, job in zip(keys, asked, strict=True):
        assert net.router.streams[key] == expected(job)
    assert_clean(p, d)
