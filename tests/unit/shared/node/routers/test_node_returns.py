"""A node that dials in anew, seen from both sides: what it ran before is started again, and it is told so first."""

from __future__ import annotations

import io

from prometheus_client import CollectorRegistry

from router.dispatch.gateway import Gateway
from router.requests.new_request import NewRequest
from shared.core.sampling_params import SamplingParams
from shared.node.loop.membership import HELLO_AGAIN_S
from shared.node.loop.node import Node
from shared.observe.log import Logger
from shared.observe.metrics import ClusterMetrics
from shared.wire.codec import key_of
from shared.wire.messages import Abort, Drain, Generate, Heartbeat, Hello, Key, Message, Welcome
from shared.wire.peers import PeerClosed, PeerUp, Received, peer_name
from tests.support.cores.core_rig import CoreKnobs
from tests.support.worlds.node_pair import ROUTER, Net, make_node, name_of
from tests.support.worlds.router_rig import RouterRig, hello, load


class FakeLink:
    endpoint = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def send(self, peer: str, message: Message) -> bool:
        self.sent.append((peer, message))
        return True

    async def receive(self) -> list[Received]:
        return []


def gateway_of(rig: RouterRig) -> tuple[Gateway, FakeLink]:
    link, log = FakeLink(), Logger("r", io.StringIO())
    metrics = ClusterMetrics(CollectorRegistry())
    return Gateway(("r", 9), rig.registry, rig.dispatcher, link, metrics, log, lambda: rig.now), link


def say_hello(gateway: Gateway, epoch: int, connection: int = 1) -> None:
    gateway.handle(Received(peer_name("d", epoch), hello("decode", "d", epoch, connection=connection)))


def request() -> NewRequest:
    return NewRequest([1, 2, 3], 1, SamplingParams(max_tokens=5), seed=7)


def kinds(link: FakeLink, peer: str) -> list[type[Message]]:
    return [type(message) for name, message in link.sent if name == peer and isinstance(message, Welcome | Generate)]


def dialling() -> tuple[Node, Net, str]:
    """A node that has heard of no router yet."""
    node = make_node("decode", "d", CoreKnobs())
    net = Net([node])
    name = name_of(node)
    net.inboxes[name].clear()
    return node, net, name


def test_a_node_that_connects_anew_gets_its_requests_anew() -> None:
    """It has dropped them when the connection broke, and the router may never have seen that break."""
    gateway, link = gateway_of(RouterRig(max_attempts=3))
    say_hello(gateway, 1)
    gateway.open([request()])
    say_hello(gateway, 1, connection=2)
    assert kinds(link, peer_name("d", 1)) == [Welcome, Generate, Welcome, Generate]
    say_hello(gateway, 1, connection=1)
    assert len(kinds(link, peer_name("d", 1))) == 4, "late, of a connection that is over"


def test_a_hello_that_is_said_again_costs_nobody_anything() -> None:
    """The Welcome was on its way for longer than the node waits for it. It has dropped nothing, and a request that the
    router took away from it would be lost for no reason (simulation seed 22766)."""
    rig = RouterRig(max_attempts=1)
    gateway, link = gateway_of(rig)
    say_hello(gateway, 1)
    gateway.open([request()])
    say_hello(gateway, 1)
    assert kinds(link, peer_name("d", 1)) == [Welcome, Generate, Welcome]
    assert len(rig.journal) == 1


def test_a_drain_that_never_arrived_is_said_again() -> None:
    """It was lost with a connection, or met a full queue; else the node would stay, out of use, for ever."""
    rig = RouterRig()
    gateway, link = gateway_of(rig)
    say_hello(gateway, 1)
    node = next(iter(rig.registry))
    gateway.drain(node, Drain("d", "stop"), 5.0)
    said: list[int] = []
    for is_draining in (False, True, True):
        beat = Heartbeat("d", 1, load(), is_draining)
        gateway.handle(Received(peer_name("d", 1), beat))
        said.append(sum(isinstance(message, Drain) for _, message in link.sent))
    assert said == [2, 2, 2]


def test_a_welcome_of_an_earlier_connection_is_none() -> None:
    """Simulation seed 1003475: it was under way while the connection broke, the next Hello got lost, and the node, sure
    that its router knew it, never asked again."""
    node, net, name = dialling()
    net.inboxes[name].extend([PeerUp(ROUTER), PeerClosed(ROUTER), PeerUp(ROUTER)])
    net.to_node(name, Welcome("test", 1, connection=1))
    net.tick(name)
    assert not node.ctx.routers.welcomed()
    net.now = HELLO_AGAIN_S
    net.tick(name)
    assert [hello.connection for hello in net.messages(Hello)] == [1, 2, 2]
    net.to_node(name, Welcome("test", 1, connection=2))
    net.tick(name)
    assert node.ctx.routers.welcomed() == [ROUTER]


def test_nobody_drains_or_aborts_without_having_said_welcome() -> None:
    """Who said Welcome has proved under which name its key is allowed; whoever has not may be anybody's router."""
    node, net, name = dialling()
    net.inboxes[name].append(PeerUp(ROUTER))
    abort = Abort(Key("r", 1, "x", 0, 0), True)
    for message in (Drain("d", "stop"), abort):
        net.to_node(name, message)
    net.tick(name)
    assert node.ctx.leaving is None and not node.ctx.tombstones.covers(key_of(abort.key))
    net.to_node(name, Welcome("test", 1, connection=1))
    for message in (Drain("d", "stop"), abort):
        net.to_node(name, message)
    net.tick(name)
    assert node.ctx.leaving and node.ctx.tombstones.covers(key_of(abort.key))


def test_a_node_that_its_router_has_lost_is_asked_for_its_hello() -> None:
    """Its key left the list and came back: it is heard again, and its connection never broke."""
    gateway, link = gateway_of(RouterRig())
    peer = peer_name("d", 1)
    gateway.handle(Received(peer, Heartbeat("d", 1, load(), False)))
    assert link.sent == [(peer, Welcome("r", 9, connection=0))]
    say_hello(gateway, 1)
    gateway.handle(Received(peer, Heartbeat("d", 1, load(), False)))
    key = gateway._dispatcher.tickets.key_of(peer)
    assert link.sent[1:] == [(peer, Welcome("r", 9, connection=1, ticket_key=key))]


def test_a_node_that_is_asked_says_hello_and_not_too_often() -> None:
    node, net, name = dialling()
    net.inboxes[name].append(PeerUp(ROUTER))
    net.to_node(name, Welcome("test", 1, connection=1))
    net.tick(name)
    said = []
    for i in range(41):
        net.now = i * HELLO_AGAIN_S / 10
        net.to_node(name, Welcome("test", 1, connection=0))
        net.tick(name)
        said.append(len(net.messages(Hello)))
    assert said[9] == 1 and said[15] == 2 and said[-1] <= 1 + 40 // 10
    assert {hello.connection for hello in net.messages(Hello)} == {1}
    assert node.ctx.routers.welcomed() == [ROUTER]
    net.inboxes[name].append(PeerClosed(ROUTER))
    net.to_node(name, Welcome("test", 1, connection=0))
    net.at(10 * HELLO_AGAIN_S)
    net.tick(name)
    assert len(net.messages(Hello)) == said[-1], "nobody is there"
