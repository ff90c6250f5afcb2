"""A router's Drain: it counts for the node it names, which says so at once and takes nothing new."""

from __future__ import annotations

import pytest

from shared.core.sampling_params import SamplingParams
from shared.node.loop.node import Node
from shared.wire.messages import Drain, Heartbeat, Refuse
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.worlds.node_pair import ROUTER, Net, assert_clean, expected, make_node, name_of


def job(rid: int) -> Job:
    return Job(rid, tuple(range(40)), SamplingParams(max_tokens=6, temperature=0.0), rid)


@pytest.fixture(params=["prefill", "decode"])
def node(request: pytest.FixtureRequest) -> Node:
    return make_node(request.param, "n0", CoreKnobs())


def test_a_drain_of_another_node_is_dropped(node: Node) -> None:
    net = Net([node])
    net.to_node(name_of(node), Drain("n1", ""), ROUTER)
    key = net.generate(node, job(1))
    net.run()
    assert node.ctx.leaving is None and node.ctx.metrics.counters()["wire_errors"] == 1
    assert net.router.streams[key] == expected(job(1))


def test_a_draining_node_ends_what_it_has_and_takes_nothing_new(node: Node) -> None:
    net = Net([node])
    old = net.generate(node, job(1))
    net.tick(name_of(node))
    net.to_node(name_of(node), Drain("n0", "restart"), ROUTER)
    net.tick(name_of(node))
    assert node.ctx.leaving and node.ctx.leaving.then == "restart"
    (*_, last) = net.messages(Heartbeat)
    assert last.draining, "said at once, not a heartbeat later"
    new = net.generate(node, job(2))
    net.run()
    assert net.router.streams[old] == expected(job(1))
    assert net.router.end(new).error_code == "node_draining" and not net.router.streams[new]
    assert_clean(node)


def test_heartbeats_say_when_the_time_of_a_drain_is_over(node: Node) -> None:
    """To every router, for each has requests here that only it can move."""
    net = Net([node])
    net.generate(node, job(1))
    net.tick(name_of(node))
    net.at(10.0)
    net.to_node(name_of(node), Drain("n0", "stop", move_after_ms=3000), ROUTER)
    net.tick(name_of(node))
    net.at(1.0)
    net.tick(name_of(node))
    net.at(5.0)
    net.tick(name_of(node))
    assert [beat.move_after_ms for beat in net.messages(Heartbeat)] == [None, 3000, 2000, 0]


def test_who_is_left_at_the_end_of_a_drain_hears_of_it() -> None:
    """An offer that waits too: its prefill node need not wait for an answer."""
    p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs(max_running=1))
    net = Net([p, d])
    running = net.generate(d, job(1))
    net.run(until=lambda: bool(net.router.streams[running]))
    waiting = net.generate(p, job(2), d)
    net.run(until=lambda: bool(d.side.outside()))
    d.fail_all("its time is up")
    assert d.side.outside() == []
    net.tick(name_of(d))
    assert [(message.key, message.code) for message in net.messages(Refuse)] == [(waiting, "aborted")]
    ends = [net.router.end(key) for key in (running, waiting)]
    assert [(end.error_code, end.error_message) for end in ends] == [("node_draining", "its time is up")] * 2
    net.run()
    assert_clean(p, d)
