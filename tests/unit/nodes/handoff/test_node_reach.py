"""A decode node that its prefill node can't reach: a dial that nobody answers, a link that closes. No sockets."""

from __future__ import annotations

import io

from prefill_node.reach import Reach
from shared.node.loop.node import Node
from shared.node.records.mail import HangUp
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.wire.messages import Prebuilt
from shared.wire.peers import PeerClosed
from tests.support.cores.core_rig import CoreKnobs
from tests.support.worlds.faulty_pair import counters, ends_of, job, pair
from tests.support.worlds.node_pair import Net, assert_clean, expected, make_node, name_of

UNREACHABLE = [("error", "peer_unreachable")]


def cut_off() -> tuple[Net, Node, Node, io.StringIO]:
    """A pair whose prefill node dials into a black hole, and its log."""
    p, d = pair()
    log = io.StringIO()
    net = Net([p, d])
    p.ctx.log = LogOnce(Logger("p0", log), clock=lambda: net.now)
    net.no_way.add((name_of(p), name_of(d)))
    return net, p, d, log


def pass_time(net: Net, seconds: float) -> None:
    """In rounds as long as a node's own."""
    for _ in range(round(2 * seconds)):
        net.at(0.5)
        net.run()


def test_a_dial_that_nobody_answers_is_given_up_in_seconds() -> None:
    net, p, _, _ = cut_off()
    key = net.generate(p, job(), net.nodes["d0@1"])
    net.run()
    pass_time(net, p.ctx.facts.silence_s - 0.5)
    assert not ends_of(net, key)
    pass_time(net, 0.5)
    assert ends_of(net, key) == UNREACHABLE
    assert counters(p)["unreachable"] == 1
    assert_clean(p)


def test_a_flood_of_them_is_one_line_in_an_interval() -> None:
    net, p, d, log = cut_off()
    for moment in range(6):
        for rid in range(5):
            net.generate(p, job(10 * moment + rid), d)
        net.run()
        pass_time(net, 5.0)
    lines = [line for line in log.getvalue().splitlines() if "can't reach a node" in line]
    assert len(lines) == 1 and "d0@1" in lines[0]
    assert counters(p)["unreachable"] == 30


def test_what_was_hung_up_is_dialled_anew_with_the_next_offer() -> None:
    net, p, d, _ = cut_off()
    net.generate(p, job(0), d)
    net.run()
    net.at(2.4)
    net.run()
    net.at(2.4)
    actions = p.tick([], net.now)
    assert not [action for action in actions if isinstance(action, HangUp)]
    net.at(0.4)
    actions = p.tick([], net.now)
    assert [action.peer for action in actions if isinstance(action, HangUp)] == [name_of(d)]
    net.no_way.clear()
    key = net.generate(p, job(1), d)
    net.run()
    assert net.router.streams[key] == expected(job(1))
    assert_clean(p, d)


def test_a_link_that_closes_blames_neither_node() -> None:
    """Both of them see it, and say the same."""
    p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs())
    net = Net([p, d])
    net.hold = lambda source, target, message: isinstance(message, Prebuilt)
    key = net.generate(p, job(), d)
    net.run()
    for one, other in ((p, d), (d, p)):
        net.inboxes[name_of(one)].append(PeerClosed(name_of(other)))
    net.run()
    assert ends_of(net, key) == 2 * UNREACHABLE
    assert_clean(p, d)


# ---- whose absence it is


def test_a_round_that_comes_late_is_our_own_absence() -> None:
    """Frozen for ten seconds with an answer in the socket's queue, which the next round reads."""
    reach = Reach(5.0)
    reach.dialled("d@1", 0.0)
    assert not reach.overdue(0.0)
    assert not reach.overdue(10.0)
    assert not reach.overdue(12.4)
    assert reach.overdue(12.5) == ["d@1"]
