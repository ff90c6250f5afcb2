"""Nobody knows the routing id that libzmq gives the next connection."""

from __future__ import annotations

import pytest

from shared.wire.zeromq import routing_ids
from tests.support.machine.own_process import printed

FIRST_IDS = """
from shared.wire.codec import encode
from shared.wire.zeromq.link import NodeLinks
from shared.wire.messages import Goodbye
from tests.support.wire.raw_zmtp import COMMAND, GREETING, RawPeer, prop

def first_heard(links, peer):
    name = peer.rpartition("@")[0]
    raw = RawPeer(links.endpoint, peer)
    raw.frame(encode(Goodbye(name, 1)))
    while peer not in links._router._routes:
        links.poll(0.02)
    return links._router._routes[peer]

links = NodeLinks("d", 1)
"""
TELL = 'print(first_heard(links, "p@1").hex())'
CLAIM = """
import struct

class Claimer(RawPeer):
    def _shake_hands(self, name):
        self.socket.sendall(GREETING)
        self._read(len(GREETING))
        claimed = b"\\0" + struct.pack(">I", 0x6B8B4567 + 1)  # the second id of an unseeded libzmq
        identity = b"\\x08Identity" + struct.pack(">I", len(claimed)) + claimed
        self.frame(b"\\x05READY" + prop("Socket-Type", "DEALER") + prop("X-Peer", name) + identity, COMMAND)
        self._read(2)
        self.frame(encode(Goodbye("evil", 1)))

evil = Claimer(links.endpoint, "evil@1")
while "evil@1" not in links._router._routes:
    links.poll(0.02)
for peer in ("p@1", "q@1", "r@1"):
    first_heard(links, peer)
print("alive")
"""


def test_each_process_begins_with_another_routing_id() -> None:
    """The defect: the first id was the same everywhere."""
    first_ids = [printed(FIRST_IDS + TELL) for _ in range(2)]
    assert first_ids[0] != first_ids[1]


def test_a_peer_that_claims_the_next_id_ends_nobody() -> None:
    """The defect: libzmq aborted when the second honest peer came."""
    assert printed(FIRST_IDS + CLAIM) == "alive"


class Libc:
    """Gives the numbers of a list after each seed."""

    def __init__(self, *numbers: list[int]) -> None:
        self._lists, self.seeds = list(numbers), list[int]()

    def srand(self, seed: int) -> None:
        if seed not in self.seeds:
            self.seeds.append(seed)
        self._left = list(self._lists[self.seeds.index(seed)])

    def rand(self) -> int:
        return self._left.pop(0)


def test_ids_begin_far_from_their_greatest_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later connections have greater ids, so the ids must not start again from zero."""
    libc = Libc([routing_ids.MOST_FIRST - (1 << 31) + 1, 1], [routing_ids.MOST_FIRST - (1 << 31), 1])
    monkeypatch.setattr(routing_ids.ctypes, "CDLL", lambda name: libc)
    routing_ids.draw_first_id()
    assert len(libc.seeds) == 2
    assert routing_ids.first_id(libc.rand(), libc.rand()) == routing_ids.MOST_FIRST, "seeded again"


def test_a_system_without_srand_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing_ids.ctypes, "CDLL", lambda name: object())
    routing_ids.draw_first_id()
