"""The fault-injecting proxy: what passes is what was sent; each fault does what it says; a trap strikes once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shared.config.settings.endpoints import KEY_MARK
from shared.wire.keys.key_files import NODE, ROUTER, read_allowed
from shared.wire.keys.keyring import KeyRing
from shared.wire.messages import Abort, Goodbye, Key, Message, Ready, Welcome
from shared.wire.peers import PeerClosed, PeerUp, Received
from shared.wire.zeromq.link import NodeLinks, close_router, open_router
from shared.wire.zeromq.link_options import LinkOptions
from tests.support.clusters.key_folders import edit_allowed, make_keys
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.wire.curve_ends import Secrets
from tests.support.wire.proxy import FaultProxy, Seen, Trap

OPTIONS = LinkOptions(heartbeat_ms=100, heartbeat_timeout_ms=2000, reconnect_max_ms=100)


class Ends:
    """A node that dials a router through the proxy. `keys`: the folder of both, "" for none."""

    def __init__(self, keys: Path | None = None, rewrite: Callable[[Seen], Message | None] = lambda seen: None) -> None:
        self.proxy = FaultProxy(rewrite, keys and Secrets(keys))
        of_router = replace(OPTIONS, ring=keys and KeyRing(keys, ROUTER, "router"))
        self.context, self._authenticator, self.router = open_router("tcp://127.0.0.1:*", of_router)
        self.link = self.proxy.link("router", self.router.endpoint)
        self.node = NodeLinks("n", 7, options=replace(OPTIONS, ring=keys and KeyRing(keys, NODE, "n")))
        self.name = self.link.endpoint  # of the router, for the node
        self.node.dial(self.name, self.name)
        self.at_node: list[object] = []
        self.at_router: list[object] = []
        self.until(lambda: PeerUp(self.name) in self.at_node)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + HANG_GUARD_S
        while not condition():
            assert time.monotonic() < deadline, (self.at_node, self.at_router)
            self.look()

    def look(self) -> None:
        self.at_node += self.node.poll(0.01)
        self.at_router += self.router.receive()

    def kinds(self) -> list[str]:
        return [type(i.message).__name__ for i in self.at_router if isinstance(i, Received)]

    def close(self) -> None:
        self.node.close()
        close_router(self.context, self._authenticator, self.router)
        self.proxy.close()


@pytest.fixture(params=[False, True], ids=["plain", "keys"])
def keys(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return make_keys(tmp_path / "keys", nodes=("n", "m")) if request.param else None


@pytest.fixture
def ends(keys: Path | None) -> Iterator[Ends]:
    ends = Ends(keys)
    yield ends
    ends.close()


def abort(rid: str) -> Abort:
    return Abort(Key("r", 1, rid, 0, 0), all_sequences=True)


def ready(num_pages: int) -> Ready:
    numbers = list(range(num_pages))
    return Ready(Key("r", 1, "a", 0, 0), 1, 0, numbers, numbers, numbers, None, True, 0, 0, b"", 0)


def test_both_ways_and_with_page_frames(ends: Ends) -> None:
    pages = [bytes([i]) * size for i, size in enumerate((0, 255, 256, 100_000))]
    ends.node.send(ends.name, ready(4), pages)
    ends.until(lambda: len(ends.at_router) == 1)
    received = ends.at_router[0]
    assert isinstance(received, Received) and received.peer == "n@7"
    assert [bytes(frame) for frame in received.frames] == pages
    assert ends.router.send("n@7", Welcome("router", 1, 1))
    ends.until(lambda: Received(ends.name, Welcome("router", 1, 1)) in ends.at_node)
    assert ends.proxy.passed == {"Ready": 1, "Welcome": 1}


@pytest.mark.parametrize("passes_on", [True, False])
def test_a_trap_strikes_at_message_n_and_ends_the_connection(ends: Ends, passes_on: bool) -> None:
    struck: list[Seen] = []
    trap = Trap(lambda seen: isinstance(seen.message, Abort), struck.append, nth=2, passes_on=passes_on)
    ends.proxy.traps.append(trap)
    for message in (abort("1"), Goodbye("n", 7), abort("2")):
        ends.node.send(ends.name, message)
    ends.until(lambda: PeerClosed(ends.name) in ends.at_node and PeerClosed("n@7", accepted=True) in ends.at_router)
    assert ends.kinds() == ["Abort", "Goodbye", "Abort"][: 3 if passes_on else 2]
    assert [(seen.sender, seen.receiver, seen.message) for seen in struck] == [("n", "router", abort("2"))]
    ends.until(lambda: ends.at_node[-1] == PeerUp(ends.name))  # it dials again
    ends.node.send(ends.name, abort("3"))
    ends.until(lambda: ends.kinds()[-1:] == ["Abort"] and ends.at_router[-1] == Received("n@7", abort("3")))
    assert len(struck) == 1


def test_a_held_link_is_noticed_by_silence_and_lets_go_again(ends: Ends) -> None:
    ends.link.held = True
    ends.node.send(ends.name, abort("1"))
    ends.until(lambda: PeerClosed(ends.name) in ends.at_node)
    assert not ends.kinds()
    ends.link.held = False
    ends.until(lambda: ends.at_node[-1] == PeerUp(ends.name))


def test_a_cut_and_refused_link(ends: Ends) -> None:
    ends.node.send(ends.name, abort("1"))
    ends.until(lambda: ends.kinds() == ["Abort"])
    ends.link.refused = True
    ends.proxy.cut("router")
    ends.until(lambda: PeerClosed(ends.name) in ends.at_node and PeerClosed("n@7", accepted=True) in ends.at_router)
    ends.link.refused = False
    ends.until(lambda: ends.at_node[-1] == PeerUp(ends.name))


def test_a_slow_link_loses_nothing(ends: Ends) -> None:
    ends.link.delay_s, ends.link.bytes_per_s = 0.001, 1e6
    for i in range(50):
        ends.node.send(ends.name, abort(str(i)))
    ends.until(lambda: len(ends.kinds()) == 50)
    assert [i.message.key.rid for i in ends.at_router if isinstance(i, Received)] == [str(i) for i in range(50)]


@pytest.mark.parametrize("to_router", [True, False])
def test_a_link_that_is_held_one_way_lets_the_other_through(ends: Ends, to_router: bool) -> None:
    ends.node.send(ends.name, abort("1"))
    ends.until(lambda: ends.kinds() == ["Abort"])
    ends.link.held_way = to_router
    if to_router:
        assert ends.router.send("n@7", Welcome("router", 1, 1))
        ends.until(lambda: Received(ends.name, Welcome("router", 1, 1)) in ends.at_node)
        ends.node.send(ends.name, abort("2"))
    else:
        ends.node.send(ends.name, abort("2"))
        ends.until(lambda: len(ends.kinds()) == 2)
    ends.until(lambda: PeerClosed("n@7", accepted=True) in ends.at_router or PeerClosed(ends.name) in ends.at_node)
    assert len(ends.kinds()) == (1 if to_router else 2)
    ends.link.held_way = None
    ends.until(lambda: ends.at_node[-1] == PeerUp(ends.name))


def test_with_keys_the_proxy_is_whoever_has_dialled(tmp_path: Path) -> None:
    """A node whose key is not allowed comes no further than without the proxy."""
    keys = make_keys(tmp_path / "keys", nodes=("n", "m"))
    ends = Ends(keys)
    try:
        edit_allowed(keys, [entry for entry in read_allowed(keys).entries if entry.name != "n"])
        ends.until(lambda: PeerClosed(ends.name) in ends.at_node or PeerClosed("n@7", accepted=True) in ends.at_router)
    finally:
        ends.close()


def test_with_keys_a_node_is_dialled_under_a_key_of_the_proxy_s(tmp_path: Path) -> None:
    """That is what the proxy writes into a Hello, in place of the key of the node's own life."""
    keys = make_keys(tmp_path / "keys", nodes=("n", "m"))
    proxy = FaultProxy(secrets=Secrets(keys))
    dialler, target = (NodeLinks(name, 7, options=replace(OPTIONS, ring=KeyRing(keys, NODE, name))) for name in "nm")
    try:
        link = proxy.link("m@7", target.endpoint)
        dialler.dial("m@7", link.endpoint)
        assert link.endpoint.partition(KEY_MARK)[2] not in ("", target.endpoint.partition(KEY_MARK)[2])
        heard: list[object] = []
        deadline = time.monotonic() + HANG_GUARD_S
        dialler.send("m@7", abort("1"))
        while Received("n@7", abort("1")) not in heard:
            assert time.monotonic() < deadline, heard
            dialler.poll(0.01)
            heard += target.poll(0.01)
        assert proxy.passed == {"Abort": 1}
    finally:
        dialler.close(), target.close(), proxy.close()


def test_a_message_can_be_rewritten(keys: Path | None) -> None:
    ends = Ends(keys, lambda seen: abort("other") if isinstance(seen.message, Abort) else None)
    try:
        ends.node.send(ends.name, abort("one"))
        ends.until(lambda: ends.at_router == [Received("n@7", abort("other"))])
    finally:
        ends.close()
