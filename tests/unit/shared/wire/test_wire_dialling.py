"""When a dialled peer is tried again, and under which key. Time and sockets are the test's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from shared.core.errors import ConfigError
from shared.wire.keys.key_files import NODE, ROUTER, KeyEntry, new_pair, read_allowed
from shared.wire.keys.keyring import KeyRing
from shared.wire.zeromq.dialling import PAUSE_S, Dialling
from tests.support.clusters.key_folders import edit_allowed, make_keys

ENDPOINT = "tcp://127.0.0.1:7001"


@dataclass
class Dealer:
    name: str = ENDPOINT
    endpoint: str = ENDPOINT
    server: bytes = b""
    state: str = "dialling"
    has_failed: bool = False
    own: object = None


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(make_keys(tmp_path / "keys", routers=("a", "b", "c")), NODE, "p")


def test_a_failed_handshake_is_retried_once_after_a_pause() -> None:
    clock = Clock()
    dialling, dealer = Dialling(None, clock), Dealer(state="closed", has_failed=True)
    dialling.note(dealer)
    assert dialling.due() == []
    clock.now = PAUSE_S / 2
    dialling.note(dealer)
    clock.now = PAUSE_S
    assert dialling.due() == [ENDPOINT]
    assert dialling.due() == []


def test_who_is_to_be_dialled_later_is_dialled_after_a_pause() -> None:
    clock = Clock()
    dialling = Dialling(None, clock)
    dialling.later(ENDPOINT)
    assert dialling.due() == []
    clock.now = PAUSE_S
    assert dialling.due() == [ENDPOINT]


def test_a_connection_that_came_about_after_all_is_left_alone() -> None:
    """libzmq goes on trying after a handshake that merely broke off: to dial again would cut the new connection."""
    clock = Clock()
    dialling, dealer = Dialling(None, clock), Dealer(state="closed", has_failed=True)
    dialling.note(dealer)
    dealer.state, dealer.has_failed = "up", False
    dialling.note(dealer)
    clock.now = 10.0
    assert dialling.due() == []


def test_one_that_was_hung_up_leaves_nothing_to_its_successor() -> None:
    clock = Clock()
    dialling = Dialling(None, clock)
    dialling.note(Dealer(state="closed", has_failed=True))
    dialling.forget(ENDPOINT)
    clock.now = 10.0
    assert dialling.due() == []


def test_routers_keys_in_turn_the_one_that_answered_first(ring: KeyRing) -> None:
    dialling, dealer = Dialling(ring), Dealer()
    keys = ring.router_keys()
    assert len(set(keys)) == 3
    address, dealer.server = dialling.choose(ENDPOINT, ENDPOINT)
    tried = [dealer.server]
    for _ in range(3):
        dealer.server = dialling.next_key(dealer)
        tried.append(dealer.server)
    assert (address, tried) == (ENDPOINT, [*keys, keys[0]])
    dealer.server, dealer.state = keys[1], "up"
    dialling.note(dealer)
    assert dialling.choose(ENDPOINT, ENDPOINT) == (ENDPOINT, keys[1])


def test_a_router_s_key_that_is_gone_or_new(ring: KeyRing, tmp_path: Path) -> None:
    """What a dealer shows, or goes to, no longer counts: it is stale. A node it goes to may change its key freely."""
    dialling, folder = Dialling(ring), tmp_path / "keys"
    old = ring.router_keys()[0]
    to_router = Dealer(server=old, own=ring.now.own)
    to_node = Dealer("d@1", ENDPOINT, new_pair().public, own=ring.now.own)
    entries = read_allowed(folder).entries
    edit_allowed(
        folder, [*(entry for entry in entries if entry.public != old), KeyEntry(ROUTER, "x", new_pair().public)]
    )
    assert not dialling.keys_changed() and ring.refresh() and dialling.keys_changed() and not dialling.keys_changed()
    assert dialling.is_stale(to_router) and not dialling.is_stale(to_node)
    edit_allowed(folder, [entry for entry in entries if entry.name != "d"])
    assert ring.refresh() and dialling.is_stale(to_node) and not dialling.is_stale(to_router)
    assert dialling.is_stale(Dealer(server=old, own=new_pair()))


def test_without_a_router_s_key_nothing_is_dialled(ring: KeyRing, tmp_path: Path) -> None:
    dialling, folder = Dialling(ring), tmp_path / "keys"
    dealer = Dealer(server=ring.router_keys()[0], own=ring.now.own)
    edit_allowed(folder, [entry for entry in read_allowed(folder).entries if entry.kind == NODE])
    assert ring.refresh() and dialling.keys_changed() and dialling.is_stale(dealer)
    assert dialling.next_key(dealer) is None
    assert dialling.choose(ENDPOINT, ENDPOINT) == (ENDPOINT, None)


def test_only_routers_keys_are_remembered(ring: KeyRing) -> None:
    """Nodes come and go, each life at another endpoint."""
    dialling = Dialling(ring)
    dialling.note(Dealer("d@1", server=new_pair().public, state="up"))
    assert dialling.choose(ENDPOINT, ENDPOINT) == (ENDPOINT, ring.router_keys()[0])
    assert not dialling._answered


@pytest.mark.parametrize(
    "address",
    [
        "ipc:///tmp/x",
        "tcp://node.example:7",
        "tcp://localhost:7",
        "tcp://1.2.3.4:x",
        "tcp://1.2.3.4:65536",
        "udp://1.2.3.4:7",
    ],
)
def test_nodes_are_dialled_by_number_and_over_tcp(address: str) -> None:
    """The defects: a name was looked up on the thread of all connections, and nothing limits a connection over ipc."""
    with pytest.raises(ConfigError, match="without names"):
        Dialling(None).choose("d@8", address)
