"""Every Generate is answered: a node refuses what it can't read or handle, and its heartbeats tell what it took."""

from __future__ import annotations

import msgspec
import pytest

from shared.core.errors import StepFailed, WireError
from shared.core.sampling_params import SamplingParams
from shared.node.loop.node import TAKEN_AT_ONCE, Node
from shared.wire.messages import Generate, Heartbeat, Key, Welcome
from shared.wire.parts import Taken
from shared.wire.ranges import MAX_TAKEN
from shared.wire.unreadable import Unreadable
from shared.wire.zeromq.budget import MAX_BATCH
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.wire.wire_samples import GENERATE, WIRE_KEY
from tests.support.worlds.node_pair import (
    ROUTER,
    ROUTER_EPOCH,
    ROUTER_ID,
    Net,
    assert_clean,
    expected,
    make_node,
    name_of,
)

JOB = Job(0, (1, 2, 3), SamplingParams(max_tokens=5), 7)
BROKEN = WireError("broken")


@pytest.fixture
def node() -> Node:
    return make_node("decode", "d", CoreKnobs())


@pytest.fixture
def net(node: Node) -> Net:
    net = Net([node])
    net.run()
    return net


def codes(net: Net, key: Key) -> list[str]:
    return [end.error_code for end in net.router.ends[key]]


def taken(net: Net) -> list[Taken]:
    return [beat.taken for _, _, beat in net.seen if isinstance(beat, Heartbeat)]


@pytest.mark.rule("H47")
def test_an_unreadable_generate_is_answered_with_an_error(node: Node, net: Net) -> None:
    net.inboxes[name_of(node)].append(Unreadable(ROUTER, WIRE_KEY, BROKEN))
    net.run()
    assert codes(net, WIRE_KEY) == ["wire_error"]


def test_who_is_no_router_gets_no_answer(node: Node, net: Net) -> None:
    targets: list[str] = []
    net.on_message = lambda source, target, message: targets.append(target)
    net.drop = lambda source, target, message: target == "x@1"
    net.inboxes[name_of(node)].append(Unreadable("x@1", WIRE_KEY, BROKEN))
    net.run()
    assert not targets


def test_a_generate_whose_handling_fails_is_answered_not_taken(
    node: Node, net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(generate: Generate, peer: str, now: float) -> None:
        raise StepFailed("a bug")

    monkeypatch.setattr(node, "_take_generate", fail)
    key = net.generate(node, JOB)
    net.run()
    assert codes(net, key) == ["step_failed"]
    net.now = 1.0
    net.tick(name_of(node))
    assert [one.keys for one in taken(net)][-1] == []


@pytest.mark.rule("H47")
def test_a_generate_of_another_life_is_answered(node: Node, net: Net) -> None:
    """Its router has restarted, and its new Welcome was lost."""
    key = Key(ROUTER_ID, ROUTER_EPOCH + 1, "x", 0, 0)
    net.to_node(name_of(node), msgspec.structs.replace(GENERATE, key=key))
    net.run()
    assert codes(net, key) == ["overloaded"]
    assert_clean(node)


def test_a_heartbeat_tells_what_was_taken_once(node: Node, net: Net) -> None:
    first, second = net.generate(node, JOB), net.generate(node, Job(1, JOB.prompt, JOB.sampling, 7))
    net.run()
    for now in (1.0, 2.0):
        net.now = now
        net.tick(name_of(node))
    assert [one.keys for one in taken(net)][-2:] == [[first, second], []]
    assert net.router.streams[first] == expected(JOB)


def test_a_welcome_is_answered_at_once_with_its_clock(node: Node, net: Net) -> None:
    key = net.generate(node, JOB)
    net.to_node(name_of(node), Welcome(ROUTER_ID, ROUTER_EPOCH, 1, b"k", 77))
    net.tick(name_of(node))
    assert taken(net)[-1] == Taken(77, [key])


def test_a_full_list_is_told_at_once(node: Node, net: Net) -> None:
    """Or a heartbeat would have more keys than its receiver reads."""
    assert TAKEN_AT_ONCE - 1 + MAX_BATCH <= MAX_TAKEN
    before = len(taken(net))
    link = node.ctx.routers.dialled[ROUTER]
    link.session.taken = [WIRE_KEY] * (TAKEN_AT_ONCE - 2)
    for rid in range(2):
        net.generate(node, Job(rid, JOB.prompt, JOB.sampling, 7))
        net.tick(name_of(node))
    assert [len(one.keys) for one in taken(net)[before:]] == [TAKEN_AT_ONCE]
