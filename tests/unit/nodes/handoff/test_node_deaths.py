"""Nodes that die; routers that restart or vanish; deadlines, leases and strays.

Each test ends with the same two questions: has every request that can still be heard ended once and rightly, and is
every page, row and book of the living nodes as before?
"""

from __future__ import annotations

import pytest

from shared.node.loop.node import Node
from shared.node.records.mail import HangUp, Outgoing
from shared.wire.messages import (
    Abort,
    Failed,
    Grant,
    Installed,
    Key,
    Offer,
    Prebuilt,
    Ready,
    Wait,
    Welcome,
)
from shared.wire.peers import PeerClosed, Received
from tests.support.worlds.faulty_pair import RELAY, counters, ends_of, job, linked, pair
from tests.support.worlds.node_pair import LEASE_S, ROUTER, ROUTER_ID, Net, assert_clean, expected, name_of, sibling

# ---- deaths


def test_nothing_is_sent_to_a_peer_that_is_gone() -> None:
    """It would wait in a queue for ever. One request has been offered, one is granted, one is behind its leader."""
    net, p, d = linked(prefix_cache=True, chunk_size=8)
    net.hold = lambda src, dst, message: isinstance(message, Grant) and message.key.rid == "r1"
    keys = [net.generate(p, job(0), d, num_sequences=2), net.generate(p, job(1), d)]
    net.run(until=lambda: bool(net.messages(Ready)))
    assert p.side.inflight.granted and p.side.bootstrap.offered and p.side.bootstrap._followers
    actions = p.tick([PeerClosed(name_of(d))], net.now)
    to_peer = [action for action in actions if getattr(action, "peer", "") == name_of(d)]
    assert to_peer == [HangUp(name_of(d))]
    for action in actions:
        if isinstance(action, Outgoing):
            net.deliver(name_of(p), action)
    net.kill(d)
    net.run()
    assert all(ends_of(net, key) == [("error", "peer_unreachable")] for key in [*keys, sibling(keys[0], 1)])
    assert_clean(p)


# ---- routers


def test_a_router_s_new_life_ends_the_requests_of_its_old_one() -> None:
    net, p, d = linked()
    net.generate(p, job(0), d)
    net.run(until=lambda: bool(net.messages(Installed)))
    net.generate(p, job(1), d)
    for node in (p, d):
        net.to_node(name_of(node), Welcome(ROUTER_ID, 2, 1))
    net.run()
    assert not net.router.ends
    late = net.generate(p, job(2), d)  # of epoch 1
    net.run()
    assert not net.router.streams[late] and [end.error_code for end in net.router.ends[late]] == ["overloaded"]
    assert_clean(p, d)


def test_a_closed_link_to_the_router_frees_everything() -> None:
    net, p, d = linked()
    net.hold = lambda src, dst, message: isinstance(message, Prebuilt)
    net.generate(p, job(), d, num_sequences=2)
    net.generate(d, job(3))
    net.run(until=lambda: bool(net.kept))
    for node in (p, d):
        net.inboxes[name_of(node)].append(PeerClosed(ROUTER))
    net.run()
    assert_clean(p, d)


@pytest.mark.parametrize("retracted", [False, True])
def test_a_prefill_node_without_router_ends_no_taken_hand_off(retracted: bool) -> None:
    """It has not heard Installed yet. The router has seen the decode node begin and leaves the request there, so the
    decode node must go on (simulation seed 21669)."""
    net, p, d = linked()
    net.hold = lambda src, dst, message: isinstance(message, Installed)
    if retracted:
        net.on_message = lambda src, dst, message: retract_granted(d) if isinstance(message, Prebuilt) else None
    key = net.generate(p, job(), d)
    net.run(until=lambda: bool(net.kept))
    net.inboxes[name_of(p)].append(PeerClosed(ROUTER))
    net.run()
    assert [message.key for message in net.messages(Abort)] == [key]
    assert net.router.streams[key] == expected(job()) and ends_of(net, key) == [("length", "")]
    net.release_held()
    net.run()
    assert counters(p)["wire_errors"] == 0
    assert_clean(p, d)


def test_an_offer_is_taken_back_by_its_source_alone() -> None:
    net, p, d = linked()
    d.side.prealloc.grant = lambda now, open_handoffs: []  # no memory
    key = net.generate(p, job(), d)
    net.run(until=lambda: bool(d.side.prealloc.requests()))
    net.inboxes[name_of(d)].append(Received("p9@1", Abort(key, False)))
    net.tick(name_of(d))
    assert d.side.prealloc.requests(), "p9 has nothing to do with it"
    net.inboxes[name_of(d)].append(Received(name_of(p), Abort(key, False)))
    net.tick(name_of(d))
    assert not d.side.prealloc.requests()


def retract_granted(node: Node) -> None:
    scheduler = node.ctx.core.scheduler
    for req in list(scheduler.queues.granted.values()):
        scheduler.queues.retract(req)


# ---- time


def test_a_deadline_ends_a_request_on_both_nodes() -> None:
    for at in RELAY[:4]:
        p, d = pair()
        net = Net([p, d])
        net.hold = lambda src, dst, message, at=at: isinstance(message, at)
        key = net.generate(p, job(), d, remaining_ms=5_000)
        net.run()
        net.at(6.0)
        net.run()
        assert ("error", "deadline_exceeded") in ends_of(net, key)
        net.release_held()
        net.run()
        assert_clean(p, d)


def test_a_long_queue_at_the_prefill_node_is_no_stall() -> None:
    net, p, d = linked()
    slow = p.ctx.core.loop.step
    p.ctx.core.loop.step = lambda block=False: False  # type: ignore[method-assign]
    key = net.generate(p, job(), d)
    for _ in range(20):
        net.at(LEASE_S / 5)
        net.run()
    p.ctx.core.loop.step = slow  # type: ignore[method-assign]
    net.run()
    assert net.router.streams[key] == expected(job())
    assert not net.router.end(key).error_code
    assert_clean(p, d)


def test_nonsense_is_dropped_and_counted() -> None:
    net, p, d = linked()
    net.run()
    stray = Key(ROUTER_ID, 1, "r99", 0, 0)
    for message in (Grant(stray, 0, 1, "zmq"), Installed(stray, 1), Failed(stray, 1, "handoff_failed", "?"), Offer):
        if not isinstance(message, type):
            net.to_node(name_of(p), message, name_of(d))
    net.to_node(name_of(p), Wait(stray, "?"), name_of(d))
    net.to_node(name_of(d), Grant(stray, 0, 1, "zmq"), name_of(p))
    net.to_node(name_of(d), Prebuilt(stray, 5, 1, [], 3, 0, b""), name_of(p))
    net.run()
    assert counters(p)["wire_errors"] == 3 and counters(d)["wire_errors"] == 2
    assert [message.key for message in net.messages(Abort)] == [stray], "an unknown grant is given back"
    assert_clean(p, d)
