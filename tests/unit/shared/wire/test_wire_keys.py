"""CURVE on every kind of socket: who has no key, another's key, or an older life gets in nowhere; keys change under
running links. Real loopback sockets."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
import zmq

from shared.core.errors import ConfigError
from shared.core.keys import RequestKey
from shared.wire.codec import encode, to_wire
from shared.wire.keys.key_files import NODE, ROUTER, KeyEntry, new_pair, read_allowed, read_pair, write_pair
from shared.wire.keys.keyring import KeyRing, Keys
from shared.wire.messages import Abort, Drain, Goodbye, Ready, Welcome
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received
from shared.wire.zeromq import sockets
from shared.wire.zeromq.dialling import PAUSE_S
from shared.wire.zeromq.link import NodeLinks, RouterLink, close_router, open_router
from shared.wire.zeromq.link_options import LinkOptions
from shared.wire.zeromq.parts import property_of
from shared.wire.zeromq.sockets import DealerSocket, RouterSocket
from tests.support.clusters.key_folders import edit_allowed, forged, make_keys
from tests.support.machine.patience import HANG_GUARD_S

KEY = to_wire(RequestKey("r", 1, "rid", 0, 0))
Kind = TypeVar("Kind", Received, PeerUp, PeerClosed)


def options(folder: Path, name: str, kind: str = NODE) -> LinkOptions:
    return LinkOptions(ring=KeyRing(folder, kind, name), heartbeat_ms=200, reconnect_ms=5, reconnect_max_ms=50)


def until(condition: Callable[[], object], *links: NodeLinks, what: str = "it") -> list[Inbound]:
    """Polls links until something has happened; gives what they bring meanwhile."""
    end = time.monotonic() + HANG_GUARD_S
    seen: list[Inbound] = []
    while not condition():
        assert time.monotonic() < end, f"never: {what}"
        for link in links:
            seen.extend(link.poll(0.01))
    return seen


def next_of(links: NodeLinks, kind: type[Kind], seen: list[Inbound]) -> Kind:
    end = time.monotonic() + HANG_GUARD_S
    while time.monotonic() < end:
        for i, inbound in enumerate(seen):
            if isinstance(inbound, kind):
                return seen.pop(i)  # type: ignore[return-value]
        seen.extend(links.poll(0.02))
    raise AssertionError(f"no {kind.__name__}; got {seen}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys", nodes=("p", "d"))


@pytest.fixture
def pair(folder: Path) -> Iterator[tuple[NodeLinks, NodeLinks]]:
    """(prefill, decode): prefill has dialled decode, as its Hello said."""
    prefill = NodeLinks("p", 7, options=options(folder, "p"))
    decode = NodeLinks("d", 8, options=options(folder, "d"))
    prefill.dial("d@8", decode.endpoint)
    yield prefill, decode
    prefill.close(), decode.close()


def test_pages_and_messages_go_both_ways_with_the_sender_s_key(pair: tuple[NodeLinks, NodeLinks], folder: Path) -> None:
    prefill, decode = pair
    pages, ready = [bytes(100_000), b"small"], Ready(KEY, 1, 0, [1, 2], [1, 1], [1, 1], None, True, 0, 0, b"", 0)
    assert prefill.send("d@8", ready, pages)
    received = next_of(decode, Received, [])
    assert (received.peer, received.message) == ("p@7", ready)
    assert [bytes(frame) for frame in received.frames] == pages
    assert property_of(received.frames[0].obj, "User-Id") == read_pair(folder, "p").public.hex()  # type: ignore[union-attr]
    assert decode.send("p@7", Abort(KEY, False))
    assert next_of(prefill, Received, []) == Received("d@8", Abort(KEY, False))


class Intruder:
    """Anybody who can reach a port: a plain DEALER, with or without keys of its own."""

    def __init__(self, address: str, peer: str, own: tuple[bytes, bytes] | None = None, server: bytes = b"") -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 20)
        self.socket.setsockopt(zmq.METADATA, f"X-Peer:{peer}".encode())
        if own is not None:
            self.socket.setsockopt(zmq.CURVE_PUBLICKEY, own[0])
            self.socket.setsockopt(zmq.CURVE_SECRETKEY, own[1])
            self.socket.setsockopt(zmq.CURVE_SERVERKEY, server)
        self.socket.connect(address.partition("#")[0])
        self.socket.send(encode(Goodbye(peer.partition("@")[0], 7)))

    def close(self) -> None:
        self.socket.close(0)
        self._context.term()


INTRUDERS = ("no key", "a key that is not allowed", "the key of a router", "another server's key")


def intrude(how: str, address: str, server: bytes, folder: Path) -> Intruder:
    own, stranger = read_pair(folder, "p"), new_pair()
    router = read_pair(folder, "router")
    return {
        "no key": lambda: Intruder(address, "p@7"),
        "a key that is not allowed": lambda: Intruder(address, "p@7", (stranger.public, stranger.secret), server),
        "the key of a router": lambda: Intruder(address, "p@7", (router.public, router.secret), server),
        "another server's key": lambda: Intruder(address, "p@7", (own.public, own.secret), new_pair().public),
    }[how]()


@pytest.mark.parametrize("how", INTRUDERS)
def test_intruders_at_a_node(folder: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """Where KV pages come in. Refused, counted and logged; nothing of theirs arrives; a friend is served meanwhile."""
    decode = NodeLinks("d", 8, options=options(folder, "d"))
    friend = NodeLinks("p", 9, options=options(folder, "p"))
    address, _, key = decode.endpoint.partition("#")
    intruder = intrude(how, address, bytes.fromhex(key), folder)
    try:
        with caplog.at_level(logging.WARNING):
            seen = until(lambda: decode.counts["wire_refused.key"], decode, what="a refusal")
        assert any("refused a connection" in record.getMessage() for record in caplog.records)
        friend.dial("d@8", decode.endpoint)
        friend.send("d@8", Goodbye("p", 9))
        assert next_of(decode, Received, seen).message == Goodbye("p", 9)
        assert seen == []
    finally:
        intruder.close()
        friend.close(), decode.close()


@pytest.mark.parametrize("how", INTRUDERS)
def test_intruders_at_a_router(folder: Path, how: str) -> None:
    async def scenario() -> None:
        link = RouterLink("tcp://127.0.0.1:*", options(folder, "router", ROUTER))
        intruder = intrude(how, link.endpoint, read_pair(folder, "router").public, folder)
        friend = NodeLinks("d", 1, options=options(folder, "d"))
        received = asyncio.create_task(link.receive())
        try:
            end = time.monotonic() + HANG_GUARD_S
            while not link.stats.counts["wire_refused.key"]:
                assert time.monotonic() < end and not received.done()
                await asyncio.sleep(0.01)
            friend.dial(link.endpoint, link.endpoint)
            friend.send(link.endpoint, Goodbye("d", 1))
            assert (await asyncio.wait_for(received, HANG_GUARD_S)) == [Received("d@1", Goodbye("d", 1))]
        finally:
            intruder.close()
            friend.close(), link.close()

    asyncio.run(scenario())


def test_a_node_without_keys_and_one_with_keys_do_not_meet(folder: Path) -> None:
    plain, keyed = NodeLinks("p", 7), NodeLinks("d", 8, options=options(folder, "d"))
    with pytest.raises(ConfigError, match="baton keys"):
        plain.dial("d@8", keyed.endpoint)
    with pytest.raises(ConfigError, match="a whole cluster, or none"):
        keyed.dial("p@7", plain.endpoint)
    keyed.dial(plain.endpoint, plain.endpoint)  # as if a router were there
    keyed.send(plain.endpoint, Goodbye("d", 8))
    seen = until(lambda: plain.counts["wire_refused.key"], plain, keyed)
    assert next_of(keyed, PeerClosed, seen).peer == plain.endpoint
    plain.close(), keyed.close()


@pytest.mark.parametrize("said", ["d", "other"])
def test_a_name_that_is_bound_to_another_key(folder: Path, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """An allowed node that says it is another: not listened to, counted, one line; under its own name it is served."""
    decode = NodeLinks("d", 8, options=options(folder, "d"))
    liar, honest = NodeLinks(said, 9, options=options(folder, "p")), NodeLinks("p", 9, options=options(folder, "p"))
    with caplog.at_level(logging.WARNING):
        for link in (liar, honest):
            link.dial("d@8", decode.endpoint)
        liar.send("d@8", Goodbye(said, 9))
        assert not until(lambda: decode.counts["wire_refused.identity"], decode)
        honest.send("d@8", Goodbye("p", 9))
        assert next_of(decode, Received, []).peer == "p@9"
    assert sum("its key is that of p" in record.getMessage() for record in caplog.records) == 1
    assert not decode.send(f"{said}@9", Goodbye("d", 8)), "nothing goes to it either"
    for link in (liar, honest, decode):
        link.close()


@pytest.mark.parametrize("keys", [True, False])
def test_an_older_life_is_ignored_while_a_newer_is_connected(folder: Path, keys: bool) -> None:
    def links(name: str, epoch: int) -> NodeLinks:
        return NodeLinks(name, epoch, options=options(folder, name) if keys else LinkOptions())

    decode, old, new = links("d", 8), links("p", 1), links("p", 2)
    seen: list[Inbound] = []
    for link in (old, new):
        link.dial("d@8", decode.endpoint)
        link.send("d@8", Goodbye("p", int(link.identity[2:], 16)))
        assert next_of(decode, Received, seen).peer == link.identity
    old.send("d@8", Goodbye("p", 1))
    seen += until(lambda: decode.counts["wire_refused.epoch"], decode)
    assert not [inbound for inbound in seen if isinstance(inbound, Received)]
    new.close()
    assert next_of(decode, PeerClosed, seen).peer == "p@2"
    old.send("d@8", Goodbye("p", 1))
    assert next_of(decode, Received, seen).peer == "p@1", "what was the newer life is gone"
    old.close(), decode.close()


def test_an_older_life_and_a_false_name_at_a_router(folder: Path) -> None:
    """The same door as a node's, under asyncio."""

    async def scenario() -> None:
        link = routers_of(folder)
        nodes = [NodeLinks("d", epoch, options=options(folder, "d")) for epoch in (2, 1)]
        nodes.append(NodeLinks("d", 3, options=options(folder, "p")))
        heard: list[Inbound] = []
        listening = asyncio.create_task(collect(link, heard))
        for node in nodes:
            node.dial(link.endpoint, link.endpoint)
            node.send(link.endpoint, Goodbye("d", int(node.identity[2:], 16)))
            while not heard:
                await asyncio.sleep(0.01)
        counts = link.stats.counts
        while not (counts["wire_refused.epoch"] and counts["wire_refused.identity"]):
            await asyncio.sleep(0.01)
        assert heard == [Received("d@2", Goodbye("d", 2))]
        listening.cancel()
        for node in nodes:
            node.close()
        link.close()

    asyncio.run(asyncio.wait_for(scenario(), HANG_GUARD_S))


def test_a_later_process_on_a_node_s_port_is_not_taken_for_it(folder: Path) -> None:
    """A node listens under a key of this life: an endpoint of the life before leads nowhere."""
    first = NodeLinks("d", 8, options=options(folder, "d"))
    endpoint = first.endpoint
    address, _, key = endpoint.partition("#")
    first.close()
    second = NodeLinks("d", 9, address, options(folder, "d"))
    assert second.endpoint.partition("#")[0] == address and second.endpoint != endpoint
    prefill = NodeLinks("p", 7, options=options(folder, "p"))
    prefill.dial("d@8", endpoint)
    prefill.send("d@8", Drain("d", ""))
    seen = until(lambda: second.counts["wire_refused.key"], prefill, second)
    assert next_of(prefill, PeerClosed, seen).peer == "d@8"
    prefill.close(), second.close()


@pytest.mark.parametrize(
    ("peer", "key"),
    [("d@8", "12"), ("d@8", "x" * 64), ("nobody@8", "ab" * 32), ("router@8", "ab" * 32), ("?", "ab" * 32)],
)
def test_only_nodes_of_the_list_are_dialled(folder: Path, peer: str, key: str) -> None:
    prefill = NodeLinks("p", 7, options=options(folder, "p"))
    with pytest.raises(ConfigError):
        prefill.dial(peer, f"tcp://127.0.0.1:7#{key}")
    prefill.close()


def routers_of(folder: Path, bind: str = "tcp://127.0.0.1:*", name: str = "router") -> RouterLink:
    return RouterLink(bind, options(folder, name, ROUTER))


def test_a_node_finds_the_router_whose_key_it_is_among_several(tmp_path: Path) -> None:
    """Its endpoint stands in a configuration, without a key: each router's key is tried."""
    folder = make_keys(tmp_path / "keys", routers=("a", "b", "c"))

    async def scenario() -> None:
        link = routers_of(folder, name="a")  # the last one tried
        node = NodeLinks("d", 1, options=options(folder, "d"))
        node.dial(link.endpoint, link.endpoint)
        received = asyncio.create_task(link.receive())
        while not any(isinstance(inbound, PeerUp) for inbound in node.poll(0.01)):
            await asyncio.sleep(0)
        node.send(link.endpoint, Goodbye("d", 1))
        assert await asyncio.wait_for(received, HANG_GUARD_S) == [Received("d@1", Goodbye("d", 1))]
        link.send("d@1", Welcome("b", 1, 1))
        link.send("d@1", Welcome("a", 1, 1))
        received_by_node = await asyncio.to_thread(next_of, node, Received, [])
        assert received_by_node.message == Welcome("a", 1, 1), "a router that says another's name"
        assert node.counts["wire_refused.identity"] == 1
        node.close(), link.close()

    asyncio.run(asyncio.wait_for(scenario(), HANG_GUARD_S))


def test_a_broken_off_handshake_costs_no_later_connection(folder: Path) -> None:
    """libzmq tries again by itself, and what came about so must not be dialled anew."""
    node = NodeLinks("d", 1, options=options(folder, "d"))
    with socket.create_server(("127.0.0.1", 0)) as passing:
        endpoint = f"tcp://127.0.0.1:{passing.getsockname()[1]}"
        node.dial(endpoint, endpoint)
        passing.accept()[0].close()
    context, authenticator, router = open_router(endpoint, options(folder, "router", ROUTER))
    seen = until(lambda: node._dealers[endpoint].state == "up", node)
    node.send(endpoint, Goodbye("d", 1))
    heard: list[Inbound] = []
    until(lambda: heard.extend(router.receive()) or heard, node)
    end = time.monotonic() + 3 * PAUSE_S
    while time.monotonic() < end:
        seen.extend(node.poll(0.02))
        heard.extend(router.receive())
    assert heard == [Received("d@1", Goodbye("d", 1))]
    assert [type(inbound) for inbound in seen] == [PeerClosed, PeerUp]
    node.close(), close_router(context, authenticator, router)


def test_a_forged_router_learns_nothing(folder: Path, tmp_path: Path) -> None:
    ring = forged(folder, ROUTER, "router", tmp_path / "forged")
    link = RouterLink("tcp://127.0.0.1:*", LinkOptions(ring=ring))
    node = NodeLinks("d", 1, options=options(folder, "d"))
    node.dial(link.endpoint, link.endpoint)
    assert next_of(node, PeerClosed, []).peer == link.endpoint

    async def nothing_comes() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(link.receive(), 0.3)

    asyncio.run(nothing_comes())
    assert link.stats.counts["wire_refused.key"]
    node.close(), link.close()


# ---- keys that change while links run


def add_key(folder: Path, kind: str, name: str) -> KeyEntry:
    """The first step of a rotation: a second key is allowed; its secret waits."""
    pair = new_pair()
    write_pair(folder, name, pair, ".next")
    entry = KeyEntry(kind, name, pair.public)
    edit_allowed(folder, [*read_allowed(folder).entries, entry])
    return entry


def use_key(folder: Path, name: str) -> None:
    (folder / f"{name}.next").rename(folder / f"{name}.secret")


def drop_old_keys(folder: Path, name: str) -> None:
    entries = read_allowed(folder).entries
    old = [entry for entry in entries if entry.name == name][:-1]
    edit_allowed(folder, [entry for entry in entries if entry not in old])


def exchange(prefill: NodeLinks, decode: NodeLinks, seen: list[Inbound]) -> None:
    assert prefill.send("d@8", Goodbye("p", 7))
    assert next_of(decode, Received, seen).peer == "p@7"


def test_a_node_s_key_is_rotated_under_its_links(pair: tuple[NodeLinks, NodeLinks], folder: Path) -> None:
    prefill, decode = pair
    seen: list[Inbound] = []
    exchange(prefill, decode, seen)
    new = add_key(folder, NODE, "p")
    until(lambda: len(decode._options.ring.now.allowed.entries) == 4, prefill, decode, what="both allowed")
    exchange(prefill, decode, seen)
    use_key(folder, "p")
    assert next_of(prefill, PeerClosed, []).peer == "d@8", "it dials again, as who it now is"
    assert next_of(prefill, PeerUp, []).peer == "d@8"
    drop_old_keys(folder, "p")
    until(lambda: len(decode._options.ring.now.allowed.entries) == 3, prefill, decode, what="the old one is gone")
    exchange(prefill, decode, seen)
    assert decode._router._gate.key_of["p@7"] == new.public
    assert not decode.counts["wire_refused.identity"]


def test_a_key_that_is_taken_away_ends_what_it_opened(pair: tuple[NodeLinks, NodeLinks], folder: Path) -> None:
    prefill, decode = pair
    seen: list[Inbound] = []
    exchange(prefill, decode, seen)
    edit_allowed(folder, [entry for entry in read_allowed(folder).entries if entry.name != "p"])
    assert next_of(decode, PeerClosed, seen).peer == "p@7"
    assert not decode.send("p@7", Abort(KEY, False))
    prefill.send("d@8", Goodbye("p", 7))
    until(lambda: decode.counts["wire_refused.identity"], decode, what="a message on the open connection is refused")


def test_a_restored_key_is_heard_on_the_connection_it_opened(pair: tuple[NodeLinks, NodeLinks], folder: Path) -> None:
    """Answers find it there, and its end is told as any other's."""
    prefill, decode = pair
    seen: list[Inbound] = []
    everything = read_allowed(folder).entries
    exchange(prefill, decode, seen)
    edit_allowed(folder, [entry for entry in everything if entry.name != "p"])
    assert next_of(decode, PeerClosed, seen).peer == "p@7"
    edit_allowed(folder, everything)
    until(lambda: len(decode._options.ring.now.allowed.entries) == 3, decode)
    exchange(prefill, decode, seen)
    assert decode.send("p@7", Abort(KEY, False))
    assert next_of(prefill, Received, []) == Received("d@8", Abort(KEY, False))
    prefill.hang_up("d@8")
    assert next_of(decode, PeerClosed, seen).peer == "p@7"


def test_a_node_ahead_of_its_key_is_let_in_when_the_key_is_there(folder: Path) -> None:
    everything = read_allowed(folder).entries
    decode = NodeLinks("d", 8, options=options(folder, "d"))
    late = NodeLinks("p", 7, options=options(folder, "p"))
    edit_allowed(folder, [entry for entry in everything if entry.name != "p"])
    until(lambda: len(decode._options.ring.now.allowed.entries) == 2, decode)
    late.dial("d@8", decode.endpoint)
    until(lambda: decode.counts["wire_refused.key"], decode, late)
    edit_allowed(folder, everything)
    assert next_of(late, PeerUp, []).peer == "d@8"
    late.close(), decode.close()


@pytest.mark.parametrize("is_up", [True, False])
def test_a_router_is_dialled_again_when_it_has_an_allowed_key(folder: Path, is_up: bool) -> None:
    """Nobody dials the key that was taken away meanwhile, whether a connection had come about under it or not."""
    everything = read_allowed(folder).entries
    opened = open_router("tcp://127.0.0.1:*", options(folder, "router", ROUTER))
    there = opened[2].endpoint
    if not is_up:
        close_router(*opened)
    node = NodeLinks("d", 1, options=options(folder, "d"))
    node.dial(there, there)
    seen = until(lambda: node._dealers[there].state == "up", node) if is_up else []
    edit_allowed(folder, [entry for entry in everything if entry.kind != ROUTER])
    seen += until(lambda: there not in node._dealers, node, what="nobody is dialled")
    assert PeerClosed(there) in seen or not is_up
    node.hang_up(there), node.dial(there, there)  # as a node does that is told so
    assert there not in node._dealers and not node.send(there, Goodbye("d", 1))
    edit_allowed(folder, everything)
    opened = opened if is_up else open_router(there, options(folder, "router", ROUTER))
    until(lambda: node._dealers and any_up(node), node, what="dialled again")
    node.send(there, Goodbye("d", 1))
    until(lambda: Received("d@1", Goodbye("d", 1)) in opened[2].receive(), node)
    node.close(), close_router(*opened)


def test_a_node_whose_key_is_taken_away_is_dialled_no_more(folder: Path) -> None:
    """Not even one that has not answered yet: what it would be sent is not for it any more."""
    prefill = NodeLinks("p", 7, options=options(folder, "p"))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        prefill.dial("d@8", f"tcp://127.0.0.1:{mute.getsockname()[1]}#{new_pair().public.hex()}")
        edit_allowed(folder, [entry for entry in read_allowed(folder).entries if entry.name != "d"])
        assert next_of(prefill, PeerClosed, []).peer == "d@8"
    assert not prefill._dealers and not prefill._waiting
    prefill.close()


def test_a_router_s_key_is_rotated_under_its_nodes(folder: Path) -> None:
    async def scenario() -> None:
        link, node = routers_of(folder), NodeLinks("d", 1, options=options(folder, "d"))
        endpoint = link.endpoint
        node.dial(endpoint, endpoint)
        heard: list[Inbound] = []
        listening = asyncio.create_task(collect(link, heard))

        async def says(what: str) -> None:
            end = time.monotonic() + HANG_GUARD_S
            while Received("d@1", Goodbye("d", 1)) not in heard:
                assert time.monotonic() < end, what
                node.send(endpoint, Goodbye("d", 1)) if any_up(node) else None
                await asyncio.sleep(0.02)
            heard.clear()

        await says("before")
        add_key(folder, ROUTER, "router")
        use_key(folder, "router")
        while not any(isinstance(inbound, PeerClosed) for inbound in heard):
            node.poll(0.01)
            await asyncio.sleep(0)
        heard.clear()
        await says("under the new key")
        drop_old_keys(folder, "router")
        await says("after")
        assert link.endpoint == endpoint
        listening.cancel()
        node.close(), link.close()

    asyncio.run(asyncio.wait_for(scenario(), HANG_GUARD_S))


def rotate(folder: Path, ring: KeyRing, name: str) -> None:
    """Until the ring has taken the new key."""
    new = add_key(folder, ROUTER, name)
    use_key(folder, name)
    until(lambda: ring.now.own.public == new.public, what="the new key is taken")


def test_a_router_s_key_may_change_again_before_it_listens_again(folder: Path) -> None:
    """And whoever it heard before is gone at once: libzmq tells nothing of connections that end with a bind."""
    settings = options(folder, "router", ROUTER)
    context, authenticator, router = open_router("tcp://127.0.0.1:*", settings)
    node = NodeLinks("d", 1, options=options(folder, "d"))
    node.dial(router.endpoint, router.endpoint)
    node.send(router.endpoint, Goodbye("d", 1))
    heard: list[Inbound] = []
    until(lambda: heard.extend(router.receive()) or heard, node)
    assert settings.ring is not None
    rotate(folder, settings.ring, "router")
    assert router.receive() == [PeerClosed("d@1", accepted=True)]
    rotate(folder, settings.ring, "router")
    assert router.receive() == []
    until(lambda: router.receive() or router._is_bound, what="listens again")
    until(lambda: node.poll(0.01) and node._dealers[router.endpoint].state == "up", what="a node is back")
    node.send(router.endpoint, Goodbye("d", 1))
    until(lambda: Received("d@1", Goodbye("d", 1)) in router.receive(), node)
    node.close(), close_router(context, authenticator, router)


def test_a_router_out_of_descriptors_takes_its_new_key_later(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: ZMQError ended the router; and the watch of its connections had ended with the old socket."""
    settings = options(folder, "router", ROUTER)
    link, node = RouterLink("tcp://127.0.0.1:*", settings), NodeLinks("d", 1, options=options(folder, "d"))
    heard: list[Inbound] = []
    opened = sockets.open_monitored
    refused: list[int] = []

    def refuse(context: object, kind: int, options: object, events: int) -> object:
        if kind == zmq.ROUTER and len(refused) < 3:
            refused.append(kind)
            raise zmq.ZMQError(errno.EMFILE)
        return opened(context, kind, options, events)  # type: ignore[arg-type]

    async def scenario() -> None:
        node.dial(link.endpoint, link.endpoint)
        listening = asyncio.create_task(collect(link, heard))
        await until_heard(Received("d@1", Goodbye("d", 1)))
        monkeypatch.setattr(sockets, "open_monitored", refuse)
        add_key(folder, ROUTER, "router")
        use_key(folder, "router")
        await until_heard(PeerClosed("d@1", accepted=True))
        await until_heard(Received("d@1", Goodbye("d", 1)))
        listening.cancel()

    async def until_heard(wanted: Inbound) -> None:
        heard.clear()
        while wanted not in heard:
            node.poll(0.01)
            node.send(link.endpoint, Goodbye("d", 1)) if any_up(node) else None
            await asyncio.sleep(0)

    try:
        asyncio.run(asyncio.wait_for(scenario(), HANG_GUARD_S))
        assert len(refused) == 3
        watch = link._router.watch
        assert watch._thread.is_alive() and len(watch._connections) == 1
    finally:
        node.close(), link.close()


class Restless(KeyRing):
    """Its files change whenever anybody looks."""

    reads = 0

    @property
    def now(self) -> Keys:
        self.reads += 1
        return Keys(new_pair(), self._allowed)

    @now.setter
    def now(self, keys: Keys) -> None:
        self._allowed = keys.allowed


@pytest.mark.parametrize(("kind", "name"), [(ROUTER, "router"), (NODE, "d")])
def test_a_socket_has_one_reading_of_its_keys(folder: Path, kind: str, name: str) -> None:
    """A public key with the secret of another opens nothing."""
    ring, context = Restless(folder, kind, name), zmq.Context()
    router = RouterSocket(context, "tcp://127.0.0.1:0", LinkOptions(ring=ring))
    assert ring.reads == 1
    dealer = DealerSocket(context, "x", router.endpoint, "d@1", LinkOptions(ring=ring), router.stats, bytes(32))
    assert ring.reads == 2
    dealer.close(), router.close(), context.term()


async def collect(link: RouterLink, into: list[Inbound]) -> None:
    while True:
        into.extend(await link.receive())


def any_up(node: NodeLinks) -> bool:
    node.poll(0.01)
    return any(dealer.state == "up" for dealer in node._dealers.values())
