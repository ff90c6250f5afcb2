"""One allowed node can't fill a router's log, and the first line about each node comes at once."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from router.dispatch.gateway import NODE_LINES
from shared.wire.messages import Goodbye, Hello, Message, Unwelcome
from shared.wire.peers import PeerClosed, Received, peer_name
from tests.support.worlds.router_rig import FINGERPRINT, hello
from tests.unit.router.fleet.test_router_kinds import Cluster

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
    assert cluster.log.getvalue().count("node is lost") == NODE_LINES


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
