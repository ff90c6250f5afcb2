"""Hundreds of nodes of a few kinds: who fits whom is asked once for two kinds, and told once."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

import msgspec

from router.dispatch.gateway import NODE_LINES
from router.fleet.registry import RegisteredNode, Registry, fitting
from router.fleet.strangers import FORGET_S, MAX_STRANGERS
from shared.wire.fitting import misfit
from shared.wire.messages import PROTOCOL_VERSION, Fingerprint, Goodbye, Hello, Message, Unwelcome
from shared.wire.peers import PeerClosed, Received, peer_name
from tests.support.worlds.gateway_rig import GatewayRig
from tests.support.worlds.router_rig import FINGERPRINT, RouterRig, hello

ROLES = ("prefill", "decode")
OTHERS = [
    FINGERPRINT,
    msgspec.structs.replace(FINGERPRINT, weights="other"),
    msgspec.structs.replace(FINGERPRINT, page_size=32),
    msgspec.structs.replace(FINGERPRINT, spec="eagle", page_layout="paged;draft"),
    msgspec.structs.replace(FINGERPRINT, spec="eagle", page_layout="paged;draft", build="newer"),
]


def calls_of(function: Callable[..., object], work: Callable[[], object]) -> int:
    """Return how often `work` comes by that function."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code is function.__code__

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


class Cluster(GatewayRig):
    """Nodes say Hello to it."""

    def __init__(self) -> None:
        super().__init__(RouterRig())

    def hello(self, role: str, node_id: str, fingerprint: Fingerprint) -> None:
        self.gateway.handle(Received(peer_name(node_id, 1), hello(role, node_id, fingerprint=fingerprint)))

    def gone(self, node_id: str) -> None:
        self.gateway.handle(PeerClosed(peer_name(node_id, 1)))

    @property
    def told(self) -> list[str]:
        return [line for line in self.log.getvalue().splitlines() if "nodes do not fit together" in line]


def sixty_nodes() -> Cluster:
    cluster = Cluster()
    for number in range(60):
        cluster.hello(ROLES[number % 2], f"n{number}", OTHERS[number % 3])
    return cluster


def test_hellos_compare_kinds_and_not_nodes() -> None:
    """A cluster of 200 nodes took 2 s for its Hellos, during which every stream stood still."""
    assert calls_of(misfit, sixty_nodes) <= 2 * 6 * 6


def test_two_kinds_that_do_not_fit_are_one_line() -> None:
    cluster = Cluster()
    for number in range(20):
        cluster.hello("decode", f"d{number}", FINGERPRINT)
    for number in range(20):
        cluster.hello("prefill", f"odd{number}", OTHERS[2])
    assert len(cluster.told) == 1 and "differs=page_size" in cluster.told[0]
    cluster.hello("prefill", "other", OTHERS[1])
    assert len(cluster.told) == 3, "with the decode nodes, and with the odd ones"


def node_named(registry: Registry, node_id: str) -> RegisteredNode:
    node = registry.named(node_id)
    assert node is not None
    return node


def test_a_node_returning_as_another_kind_is_of_that_kind_only() -> None:
    registry = Registry(5.0)
    registry.hello("d@1", hello("decode", "d"), 0.0)
    registry.hello("p@1", hello("prefill", "p", fingerprint=OTHERS[1]), 0.0)
    assert registry.misfits() == [("d", "p", "weights")]
    registry.hello("p@1", hello("prefill", "p", connection=2), 1.0)
    assert registry.misfits() == []
    assert fitting([node_named(registry, "p")], node_named(registry, "d")) == [node_named(registry, "p")]
    registry.hello("p@2", hello("prefill", "p", 2, fingerprint=OTHERS[2]), 2.0)
    assert registry.misfits() == [("d", "p", "page_size")]


def test_whatever_comes_and_goes_pairs_are_those_that_fit() -> None:
    """Against a comparison of all nodes, the way that was too slow."""
    rng, registry = random.Random(7), Registry(5.0)
    for epoch in range(1, 400):
        name = f"n{rng.randrange(12)}"
        node = registry.named(name)
        if node is not None and rng.random() < 0.4:
            registry.remove(node)
        else:
            said = hello(rng.choice(ROLES), name, epoch, fingerprint=rng.choice(OTHERS))
            registry.hello(f"{name}@{epoch:x}", said, 0.0)
        check_pairs(registry)


def check_pairs(registry: Registry) -> None:
    prefills = [node for node in registry if node.role == "prefill"]
    decodes = [node for node in registry if node.role == "decode"]
    apart = set()
    for decode in decodes:
        wanted = [p for p in prefills if misfit(p.hello.fingerprint, decode.hello.fingerprint) is None]
        assert fitting(prefills, decode) == wanted
        apart |= {node.node_id for node in prefills if node not in wanted}
    told = {name for one in registry.misfits() for name in one[:2]}
    assert not apart or told & apart


NEWER = msgspec.structs.replace(FINGERPRINT, protocol=PROTOCOL_VERSION + 2)


def test_a_node_of_another_protocol_gets_nothing_and_is_named() -> None:
    cluster = Cluster()
    registry = cluster.rig.registry
    for _ in range(3):  # it repeats its Hello until somebody answers
        cluster.hello("decode", "new", NEWER)
    assert not len(registry) and not cluster.link.sent, "no Welcome"
    (line,) = [line for line in cluster.log.getvalue().splitlines() if "speaks another protocol" in line]
    assert f"node=new speaks={PROTOCOL_VERSION + 2} ours={PROTOCOL_VERSION}" in line
    (shown,) = registry.strangers.shown(cluster.rig.now)
    assert shown == {
        "node": "new",
        "role": "decode",
        "protocol": PROTOCOL_VERSION + 2,
        "ours": PROTOCOL_VERSION,
    }
    assert not registry.strangers.shown(cluster.rig.now + FORGET_S + 1), "it has gone away"


def test_a_node_that_restarts_with_another_protocol_is_lost() -> None:
    cluster = Cluster()
    cluster.hello("decode", "d", FINGERPRINT)
    late = hello("decode", "d", fingerprint=NEWER)
    cluster.gateway.handle(Received(peer_name("d", 2), msgspec.structs.replace(late, epoch=2)))
    assert not len(cluster.rig.registry) and "it has restarted with another protocol" in cluster.log.getvalue()
    cluster.hello("decode", "d", FINGERPRINT)
    assert cluster.rig.registry.named("d") is not None
    cluster.hello("decode", "d", NEWER)
    assert cluster.rig.registry.named("d") is not None, "no later life of it has come"


def test_an_upgraded_node_is_no_stranger_any_more() -> None:
    cluster = Cluster()
    cluster.hello("decode", "d", NEWER)
    cluster.hello("decode", "d", FINGERPRINT)
    assert cluster.rig.registry.find("d", 1) is not None and not cluster.rig.registry.strangers.shown(cluster.rig.now)


def test_strangers_are_bounded() -> None:
    cluster = Cluster()
    for number in range(2 * MAX_STRANGERS):
        cluster.hello("decode", f"n{number}", NEWER)
    known = [one["node"] for one in cluster.rig.registry.strangers.shown(cluster.rig.now)]
    assert known == [f"n{number}" for number in range(MAX_STRANGERS, 2 * MAX_STRANGERS)]


# ---- one node does not fill the log


TIMES = 100
KIB = 1024


@dataclass
class Talker:
    """A node that says what it likes, and often."""

    cluster: Cluster
    node_id: str = "evil"

    def says(self, message: Message, epoch: int = 1) -> None:
        self.cluster.gateway.handle(Received(peer_name(self.node_id, epoch), message))

    def hello(self, number: int, model: str = "m") -> Hello:
        fingerprint = msgspec.structs.replace(FINGERPRINT, weights=model)
        return hello("prefill", self.node_id, number, fingerprint, connection=number)


def lines(cluster: Cluster) -> list[str]:
    return cluster.log.getvalue().splitlines()


def test_a_node_that_comes_and_goes_fills_no_log() -> None:
    cluster = Cluster()
    talker = Talker(cluster)
    for number in range(1, TIMES):
        talker.says(talker.hello(number), number)
        if number % 3 == 0:
            talker.says(Goodbye("evil", number), number)
        elif number % 3 == 1:
            cluster.gateway.handle(PeerClosed(peer_name("evil", number)))
    assert len(lines(cluster)) <= 3 * NODE_LINES, "it is here, it is lost, it is gone"
    assert not len(cluster.rig.registry), "its last word was a Goodbye"


def test_each_loss_of_a_node_that_flaps_is_logged() -> None:
    cluster = Cluster()
    for _ in range(NODE_LINES):
        cluster.hello("decode", "d", FINGERPRINT)
        cluster.gone("d")
    told = cluster.log.getvalue()
    assert told.count("node is here") == told.count("node is lost") == NODE_LINES


def test_a_node_of_ever_new_kinds_fills_no_log() -> None:
    cluster = Cluster()
    cluster.hello("decode", "d", FINGERPRINT)
    talker = Talker(cluster)
    for number in range(TIMES):
        talker.says(talker.hello(1, f"model {number}"))
    assert len(cluster.told) == 1


def test_a_node_that_refuses_us_fills_no_log() -> None:
    cluster = Cluster()
    talker = Talker(cluster)
    for number in range(TIMES):
        talker.says(Unwelcome("evil", 1, f"tcp://{number}" + "x" * 8 * KIB))
    assert len(lines(cluster)) == 1 and len(lines(cluster)[0]) < KIB
