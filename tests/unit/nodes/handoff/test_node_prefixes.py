"""Hand-offs with a common prefix: its pages travel once, and are held once."""

from __future__ import annotations

import pytest

from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Grant, Ready
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.faulty_pair import linked
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node, name_of
from tests.unit.shared.sched.test_sched_prefixes import tokens

NUM, STEM, OWN, PAGE = 8, 328, 10, 16
COMMON = STEM // PAGE


def jobs() -> list[Job]:
    answer = SamplingParams(max_tokens=6, temperature=0.0)
    return [Job(rid, tokens(0, STEM) + tokens(rid + 1, OWN), answer, rid) for rid in range(NUM)]


def num_sent(net: Net) -> int:
    return sum(len(ready.pages) for ready in net.messages(Ready))


def test_a_burst_s_prefix_travels_once() -> None:
    (net, p, d), asked = linked(), jobs()
    keys = [net.generate(p, job, d) for job in asked]
    net.run()
    for key, job in zip(keys, asked, strict=True):
        assert net.router.streams[key] == expected(job)
    assert num_sent(net) == COMMON + NUM * -(-(STEM + OWN - COMMON * PAGE) // PAGE)
    assert_clean(p, d)


@pytest.mark.parametrize("how", ["abort", "kill", "retract"])
def test_the_first_one_s_end_releases_the_others(how: str) -> None:
    """While its pages are on their way: those that came are cached, and the next request brings the rest."""
    (net, p, d), asked = linked(), jobs()[:4]
    keys = [net.generate(p, job, d) for job in asked]
    net.run(until=lambda: num_sent(net) >= 3)
    assert len(net.messages(Grant)) == 1, "the others wait"
    if how == "abort":
        net.abort(p, keys[0])
        net.abort(d, keys[0])
    elif how == "retract":
        (leader,) = d.ctx.core.queues.granted.values()
        d.ctx.core.queues.retract(leader)
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
    net.let_go()
    net.run()
    for key, job in zip(keys, asked, strict=True):
        assert net.router.streams[key] == expected(job)
    assert_clean(busy, idle, d)


def test_a_grant_needs_only_what_it_shares() -> None:
    """The first one's own part is long; the second one's common pages have come long before its end."""
    (net, p, d), answer = linked(), SamplingParams(max_tokens=6, temperature=0.0)
    asked = [Job(0, tokens(0, 400), answer, 0), Job(1, tokens(0, 64) + tokens(2, OWN), answer, 1)]
    keys = [net.generate(p, job, d) for job in asked]
    net.run(until=lambda: len(net.messages(Grant)) == 2)
    assert not net.router.streams.get(keys[0]), "the first prompt is still being computed"
    net.run()
    for key, job in zip(keys, asked, strict=True):
        assert net.router.streams[key] == expected(job)
    assert_clean(p, d)


def test_a_local_follower_keeps_no_offer_from_memory() -> None:
    """It holds none, and needs none yet."""
    (net, p, d), answer = linked(chunk_size=16), SamplingParams(max_tokens=6, temperature=0.0)
    asked = [Job(rid, tokens(0, 400) + tokens(rid + 1, OWN), answer, rid) for rid in range(2)]
    asked.append(Job(2, tokens(9, 40), answer, 2))
    scheduler = d.ctx.core.scheduler
    keys = [net.generate(d, job, None) for job in asked[:2]]
    net.run(until=lambda: bool(scheduler.queues.prefilling) and bool(scheduler.queues.waiting))
    keys.append(net.generate(p, asked[2], d))
    net.run(until=lambda: bool(net.messages(Grant)))
    assert scheduler.queues.prefilling and scheduler.queues.prefilling[0].computed < 200, (
        "the first prompt is not half computed"
    )
    net.run()
    for key, job in zip(keys, asked, strict=True):
        assert net.router.streams[key] == expected(job)
    assert_clean(p, d)


def test_an_offer_follows_for_a_while_only() -> None:
    """The first prompt can't begin on its node: its grammar compiles, say. The second one is computed."""
    (net, p, d), asked = linked(), jobs()[:2]
    keys = [net.generate(p, job, d) for job in asked]
    net.tick(name_of(p))
    first, _ = sorted(p.ctx.core.requests.values(), key=lambda req: req.arrival)
    p.ctx.core.queues.retract(first)
    first.awaits_prefix = True
    net.run()
    assert len(net.messages(Grant)) == 1 and len(net.router.streams[keys[1]]) == 1
    net.at(d.ctx.facts.lease_s / 2)
    net.run()
    assert net.router.streams[keys[1]] == expected(asked[1])
    first.awaits_prefix = False
    net.run()
    assert net.router.streams[keys[0]] == expected(asked[0])
    assert_clean(p, d)


def test_an_offer_that_ends_waits_no_more() -> None:
    (net, p, d), asked = linked(), jobs()[:2]
    keys = [net.generate(p, job, d) for job in asked]
    prefixes = d.ctx.core.queues.prefixes
    net.run(until=lambda: bool(prefixes._waits_for))
    net.abort(p, keys[1])
    net.abort(d, keys[1])
    net.run()
    assert not prefixes._waits_for and net.router.streams[keys[0]] == expected(asked[0])
    assert_clean(p, d)
