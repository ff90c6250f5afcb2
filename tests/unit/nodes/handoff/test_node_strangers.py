"""What an allowed node that behaves badly can take from others: no places, no requests, no time."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from prefill_node.side import PrefillSide
from router.requests.journal import Journal
from shared.core.errors import HandoffFailed
from shared.core.sampling_params import SamplingParams
from shared.node.loop.node import Node
from shared.transfer.transports import make_sender
from shared.wire.codec import encode
from shared.wire.messages import Abort, Grant, Installed, Key, Offer, Refuse
from shared.wire.ranges import MAX_TEXT
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.wire.wire_samples import MESSAGES
from tests.support.worlds.node_pair import ROUTER_ID, Net, assert_clean, expected, make_node, name_of

STRANGER = "x@1"
JOB = Job(1, tuple(range(60)), SamplingParams(max_tokens=6, temperature=0.0), 9)


@pytest.fixture
def net() -> Net:
    p, d = make_node("prefill", "p0", CoreKnobs()), make_node("decode", "d0", CoreKnobs(max_running=1))
    net = Net([p, d])
    net.drop = lambda source, target, message: target == STRANGER  # nobody is there in this net
    net.run()
    return net


def nodes(net: Net) -> tuple[Node, Node]:
    p, d = net.nodes.values()
    return p, d


def offer(net: Net, rid: str, **changes: object) -> Offer:
    """Like one of p0's, from a stranger."""
    p, _ = nodes(net)
    fields = {"prompt_ids": [1] * 40, "output_ids": [], "remaining_ms": 10**12, "source_node": "x", "source_epoch": 1}
    known = next(message for message in MESSAGES if isinstance(message, Offer))
    fields |= {"fingerprint": p.ctx.facts.fingerprint, "transports": ["zmq"], "adapter": ""}
    fields |= {"key": Key(ROUTER_ID, 1, rid, 0, 0)}
    return msgspec.structs.replace(known, **(fields | changes))


def test_one_node_does_not_take_all_places_of_offers_that_wait(net: Net) -> None:
    p, d = nodes(net)
    d.ctx.facts = replace(d.ctx.facts, max_waiting=8)
    for i in range(20):
        net.to_node(name_of(d), offer(net, f"s{i}", key=Key("elsewhere", 1, f"s{i}", 0, 0)), STRANGER)
    key = net.generate(p, JOB, d)
    net.run()
    assert len(d.side.outside()) == 6, "three quarters of the places"
    assert net.router.streams[key] == expected(JOB)


def test_offers_of_an_unknown_router_are_given_back_in_time(net: Net) -> None:
    _, d = nodes(net)
    net.to_node(name_of(d), offer(net, "s", key=Key("elsewhere", 1, "s", 0, 0)), STRANGER)
    net.run()
    net.now += d.ctx.facts.lease_s
    net.run()
    assert len(d.side.outside()) == 1, "a whole lease"
    net.now += 1
    net.run()
    assert d.side.outside() == []
    assert_clean(*nodes(net))


def test_a_refusal_is_short_whatever_the_offer_says(net: Net) -> None:
    """A reason beyond the limit would be dropped where it goes, and its offer would wait in vain."""
    p, d = nodes(net)
    fingerprint = msgspec.structs.replace(p.ctx.facts.fingerprint, weights="w" * MAX_TEXT)
    sent: list[Refuse] = []
    net.on_message = lambda src, dst, message: sent.append(message) if isinstance(message, Refuse) else None
    net.to_node(name_of(d), offer(net, "s", fingerprint=fingerprint), STRANGER)
    net.run()
    assert len(sent) == 1 and len(sent[0].reason) <= MAX_TEXT and encode(sent[0])


@pytest.mark.parametrize("lease", [0, 7])
def test_an_impossible_grant_can_not_be_completed(net: Net, lease: int) -> None:
    """The defect: the hand-off was kept with lease 0 and without a sender, so Installed ended the prefill node."""
    p, d = nodes(net)
    net.drop = lambda source, target, message: source == name_of(d)  # all of its messages come from this test
    key = net.generate(p, JOB, d)
    net.run()
    for message in (Grant(key, 0, 7, "bogus"), Installed(key, lease)):
        net.to_node(name_of(p), message, name_of(d))
    net.run()
    assert net.router.end(key).error_code == HandoffFailed.code
    assert net.messages(Abort), "the decode node frees what it reserved"
    assert_clean(p)


def test_contradictory_grants_do_not_end_the_node() -> None:
    """The defect: one after the other, all transports left the list, and choosing among none raised."""
    p, d = make_node("prefill", "p0", CoreKnobs(), transport="shm"), make_node("decode", "d0", CoreKnobs())
    net, names = Net([p, d]), ("shm", "zmq")
    p.ctx.facts = replace(p.ctx.facts, transports=names)
    p.side = PrefillSide(p.ctx, {name: make_sender(name, p.ctx.core.pool) for name in names})
    net.drop = lambda source, target, message: source == name_of(d)  # all of its messages come from this test
    first, second = (net.generate(p, replace(JOB, rid=rid), d) for rid in (1, 2))
    net.run()
    for message in (Grant(first, 0, 7, "shm"), Installed(first, 7)):
        net.to_node(name_of(p), message, name_of(d))
        net.run()
    third = net.generate(p, replace(JOB, rid=3), d)
    net.run()
    assert [m.transports for m in net.messages(Offer)] == [["shm", "zmq"], ["shm", "zmq"], ["zmq", "shm"]]
    for message in (Grant(third, 0, 8, "shm"), Grant(second, 0, 9, "zmq"), Installed(third, 8), Installed(second, 9)):
        net.to_node(name_of(p), message, name_of(d))
        net.run()
    assert_clean(p)
    p.ctx.core.close()


def test_rids_can_not_be_guessed() -> None:
    nonces = iter("abc")
    journal = Journal(lambda: next(nonces))
    assert [journal.new_rid() for _ in range(3)] == ["1.a", "2.b", "3.c"]
