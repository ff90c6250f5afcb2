"""Links over real loopback sockets: messages, frames, closed peers, full queues, malformed frames, silence."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import zmq

from shared.core.errors import ConfigError, WireError
from shared.core.keys import RequestKey
from shared.wire.codec import WireLimits, encode, to_wire
from shared.wire.keys.key_files import NODE, AllowedKeys, new_pair
from shared.wire.keys.keyring import KeyRing, Keys
from shared.wire.messages import Abort, Drain, Goodbye, Heartbeat, Message, NodeLoad, Ready, Welcome
from shared.wire.parts import PoolRef
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received, WireTotals, parse_peer, peer_name
from shared.wire.unreadable import Unreadable
from shared.wire.wakeup import Wakeup
from shared.wire.zeromq import link as link_module
from shared.wire.zeromq.budget import MAX_BATCH
from shared.wire.zeromq.link import NodeLinks, RouterLink
from shared.wire.zeromq.link_options import LinkOptions
from tests.support.clusters.key_folders import make_keys
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.wire.wire_samples import GENERATE

KEY = to_wire(RequestKey("r", 1, "rid", 0, 0))
LOAD = NodeLoad(0, {}, 0, {}, 0, 0, 1, {}, {}, {}, "")
Kind = TypeVar("Kind", Received, Unreadable, PeerUp, PeerClosed)


def inline_ready(pages: int) -> Ready:
    return Ready(KEY, 1, 0, list(range(1, pages + 1)), [1] * pages, [1] * pages, None, True, 0, 0, b"", 0)


class Inbox:
    """Polls one side until something of a kind came; keeps the rest."""

    def __init__(self, links: NodeLinks) -> None:
        self.links = links
        self.seen: list[Inbound] = []

    def next(self, kind: type[Kind]) -> Kind:
        end = time.monotonic() + HANG_GUARD_S
        while time.monotonic() < end:
            for i, inbound in enumerate(self.seen):
                if isinstance(inbound, kind):
                    return self.seen.pop(i)  # type: ignore[return-value]
            self.seen.extend(self.links.poll(0.05))
        raise AssertionError(f"no {kind.__name__}; got {self.seen}")


@pytest.fixture
def pair() -> Iterator[tuple[NodeLinks, NodeLinks]]:
    """(prefill, decode): prefill has dialled decode."""
    prefill, decode = NodeLinks("p", 7), NodeLinks("d", 8)
    prefill.dial("d@8", decode.endpoint)
    yield prefill, decode
    prefill.close(), decode.close()


def test_messages_and_frames_go_both_ways(pair: tuple[NodeLinks, NodeLinks]) -> None:
    prefill, decode = pair
    pages = [os.urandom(100_000), b"small"]
    assert prefill.send("d@8", inline_ready(2), pages)
    received = Inbox(decode).next(Received)
    assert received.peer == "p@7" and received.message == inline_ready(2)
    assert [bytes(frame) for frame in received.frames] == pages
    assert decode.send("p@7", Abort(KEY, False))
    inbox = Inbox(prefill)
    assert inbox.next(PeerUp).peer == "d@8"
    assert inbox.next(Received) == Received("d@8", Abort(KEY, False))


def test_a_dialled_peer_brings_pages_only_where_it_may() -> None:
    prefill, source, decode = NodeLinks("p", 7), NodeLinks("s", 8), NodeLinks("d", 9)
    prefill.dial("s@8", source.endpoint, brings_pages=True)
    prefill.dial("d@9", decode.endpoint)
    inbox = Inbox(prefill)
    for name, links in (("d@9", decode), ("s@8", source)):
        prefill.send(name, Abort(KEY, False))
        Inbox(links).next(Received)
        assert links.send("p@7", inline_ready(1), [b"page"], back=True)
    received = inbox.next(Received)
    assert received.peer == "s@8" and [bytes(frame) for frame in received.frames] == [b"page"]
    end = time.monotonic() + HANG_GUARD_S
    while not prefill.counts["wire_dropped"]:
        assert time.monotonic() < end
        prefill.poll(0.05)
    for links in (prefill, source, decode):
        links.close()


def test_an_answer_goes_back_though_its_peer_is_dialled_too() -> None:
    """Two prefill nodes may ask each other. What answers must not come to the socket that takes short messages only."""
    first, second = NodeLinks("p", 7), NodeLinks("s", 8)
    first.dial("s@8", second.endpoint, brings_pages=True)
    second.dial("p@7", first.endpoint, brings_pages=True)
    first.send("s@8", Abort(KEY, False))
    Inbox(second).next(Received)
    first._router.close()
    assert second.send("p@7", inline_ready(1), [b"page"], back=True)
    assert Inbox(first).next(Received).message == inline_ready(1)
    first.close(), second.close()


def test_a_closed_dialler_is_noticed_after_its_last_message(pair: tuple[NodeLinks, NodeLinks]) -> None:
    prefill, decode = pair
    inbox = Inbox(decode)
    prefill.send("d@8", Goodbye("p", 7))
    assert inbox.next(Received).message == Goodbye("p", 7)
    prefill.hang_up("d@8")
    assert inbox.next(PeerClosed).peer == "p@7"
    assert not decode.send("p@7", Abort(KEY, False))
    assert decode.counts["wire_sends_refused"] == 1


def test_a_closed_listener_is_noticed(pair: tuple[NodeLinks, NodeLinks]) -> None:
    prefill, decode = pair
    inbox = Inbox(prefill)
    inbox.next(PeerUp)
    decode._router.close()
    assert inbox.next(PeerClosed).peer == "d@8"


def test_an_absent_dialled_peer_is_reported_once_and_found_later(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/late"
    prefill = NodeLinks("p", 1, options=LinkOptions(reconnect_ms=5, reconnect_max_ms=20))
    prefill.dial("d", endpoint)
    prefill.dial("d", endpoint)
    inbox = Inbox(prefill)
    assert inbox.next(PeerClosed).peer == "d"
    for _ in range(5):
        inbox.seen.extend(prefill.poll(0.02))
    assert inbox.seen == []
    prefill.send("d", Drain("d", ""))
    decode = NodeLinks("d", 2, endpoint)
    assert inbox.next(PeerUp).peer == "d"
    assert Inbox(decode).next(Received).message == Drain("d", "")
    prefill.close(), decode.close()


def test_sends_are_refused_not_blocked_when_the_queue_is_full() -> None:
    sink = zmq.Context()
    frozen = sink.socket(zmq.ROUTER)  # accepts, but never reads
    frozen.setsockopt(zmq.RCVHWM, 1)
    frozen.bind("tcp://127.0.0.1:*")
    links = NodeLinks("p", 1, options=LinkOptions(queue_messages=4))
    links.dial("slow", frozen.getsockopt_string(zmq.LAST_ENDPOINT))
    frame = bytes(1 << 20)
    results = [links.send("slow", inline_ready(1), [frame]) for _ in range(200)]
    assert results[0] and not all(results)
    assert links.counts["wire_sends_refused"] == results.count(False)
    links.close()
    frozen.close(0), sink.term()


def test_an_unknown_peer_is_refused() -> None:
    links = NodeLinks("p", 1)
    assert not links.send("nobody@1", Drain("d", ""))
    links.close()


@contextlib.contextmanager
def raw_dealer(endpoint: str, identity: bytes | None) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    if identity is not None:
        socket.setsockopt(zmq.METADATA, b"X-Peer:" + identity)
    socket.connect(endpoint)
    yield socket
    socket.close(0)
    context.term()


@pytest.mark.parametrize("identity", [None, b"no epoch", b"\xff\xfe", b"a@xyz", b"a@01", b"@1", b"x" * 255])
def test_a_stranger_is_dropped(identity: bytes | None) -> None:
    links = NodeLinks("d", 1)
    inbox = Inbox(links)
    with raw_dealer(links.endpoint, identity) as stranger, raw_dealer(links.endpoint, b"p@1") as friend:
        stranger.send(encode(Drain("d", "")))
        wait_for_count(inbox, 1)
        friend.send(encode(Drain("d", "")))
        assert inbox.next(Received).peer == "p@1"
    links.close()


def wait_for_count(inbox: Inbox, dropped: int) -> None:
    end = time.monotonic() + HANG_GUARD_S
    while inbox.links.counts["wire_dropped"] < dropped and time.monotonic() < end:
        inbox.seen.extend(inbox.links.poll(0.02))
    assert inbox.links.counts["wire_dropped"] == dropped


def test_malformed_frames_are_dropped_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    links = NodeLinks("d", 1, options=LinkOptions(limits=WireLimits(max_control_bytes=1000)))
    inbox = Inbox(links)
    bad: list[list[bytes]] = [
        [b""], [b"\xc1"], [b"junk"], [b"junk"], [b"junk"], [encode(Drain("d", ""))[:-1]], [b"\x00" * 2000],
        [encode(Drain("d", "")), b"extra"], [encode(inline_ready(2)), b"one"],
        [encode(Heartbeat("other", 1, LOAD, False))], [encode(Heartbeat("p", 2, LOAD, False))],
    ]  # fmt: skip
    with raw_dealer(links.endpoint, b"p@1") as peer, caplog.at_level(logging.WARNING):
        for parts in bad:
            peer.send_multipart(parts)
        peer.send(encode(Heartbeat("p", 1, LOAD, False)))
        assert inbox.next(Received).message == Heartbeat("p", 1, LOAD, False)
    assert links.counts["wire_dropped"] == len(bad)
    logged = [record.getMessage() for record in caplog.records]
    assert 0 < len(logged) < len(bad) and len(logged) == len(set(logged))
    assert sum("not one of our messages" in line for line in logged) == 1
    links.close()


def test_a_malformed_answer_is_dropped_too(pair: tuple[NodeLinks, NodeLinks]) -> None:
    prefill, decode = pair
    prefill.send("d@8", Drain("d", ""))
    Inbox(decode).next(Received)
    decode._router.socket.send_multipart([decode._router._routes["p@7"], b"junk"])
    decode.send("p@7", Drain("p", ""))
    assert Inbox(prefill).next(Received).message == Drain("p", "")
    assert prefill.counts["wire_dropped"] == 1


@pytest.mark.rule("H47")
def test_an_unreadable_generate_is_reported_with_its_key(pair: tuple[NodeLinks, NodeLinks]) -> None:
    node, router = pair
    node.send("d@8", Drain("d", ""))
    Inbox(router).next(Received)
    router._router.socket.send_multipart([router._router._routes["p@7"], encode(GENERATE)[:-1]])
    found = Inbox(node).next(Unreadable)
    assert (found.peer, found.key) == ("d@8", GENERATE.key) and "Generate" in found.error.message
    assert node.counts["wire_dropped"] == 1


def test_an_oversized_frame_closes_only_its_connection() -> None:
    limits = WireLimits(max_frame_bytes=10_000, max_control_bytes=10_000)
    links = NodeLinks("d", 1, options=LinkOptions(limits=limits))
    inbox = Inbox(links)
    with raw_dealer(links.endpoint, b"big@1") as big, raw_dealer(links.endpoint, b"p@1") as peer:
        big.send(encode(Drain("d", "")))
        assert inbox.next(Received).peer == "big@1"
        big.send(bytes(20_000))
        assert inbox.next(PeerClosed).peer == "big@1"
        peer.send(encode(Drain("d", "")))
        assert inbox.next(Received).peer == "p@1"
    links.close()


def test_descriptors_are_reused_without_mixing_up_peers() -> None:
    """Peers come and go one after the other, so descriptors repeat: each is reported closed once, the living never."""
    links, closed = NodeLinks("d", 1), list[str]()
    inbox = Inbox(links)
    with raw_dealer(links.endpoint, b"stays@1") as stays:
        stays.send(encode(Drain("d", "")))
        inbox.next(Received)
        for i in range(30):
            with raw_dealer(links.endpoint, f"p{i}@1".encode()) as peer:
                peer.send(encode(Drain("d", "")))
                assert inbox.next(Received).peer == f"p{i}@1"
            if i % 3 == 0:  # sometimes at once, sometimes only when the next peer is there already
                while f"p{i}@1" not in closed:
                    closed.append(inbox.next(PeerClosed).peer)
        while len(closed) < 30:
            closed.append(inbox.next(PeerClosed).peer)
        assert sorted(closed) == sorted(f"p{i}@1" for i in range(30))
        assert links.send("stays@1", Drain("x", ""))
        assert [inbound for inbound in links.poll(0.05) if isinstance(inbound, PeerClosed)] == []
    assert inbox.next(PeerClosed).peer == "stays@1"
    links.close()


def test_a_peer_that_redials_between_two_receives_is_not_gone() -> None:
    """Its new connection most likely has the descriptor of the old one, whose end is reported with the new one's
    first message."""
    links = NodeLinks("d", 1)
    inbox = Inbox(links)
    for life in range(5):
        with raw_dealer(links.endpoint, b"p@1") as peer:
            peer.send(encode(Drain("d", "")))
            assert links._router.socket.poll(HANG_GUARD_S * 1000), "all of it has arrived when we look"
            assert inbox.next(Received).peer == "p@1"
            assert not inbox.seen + links.poll(0.05), f"gone, in life {life}"
            assert links.send("p@1", Drain("p", ""))
        assert links._router.monitor.poll(HANG_GUARD_S * 1000), "its end is reported, and we have not looked"
    assert inbox.next(PeerClosed).peer == "p@1"
    links.close()


def test_a_flood_comes_in_shares_and_its_end_is_reported_last() -> None:
    links, flood = NodeLinks("d", 1), 2 * MAX_BATCH + 100
    inbox = Inbox(links)
    with raw_dealer(links.endpoint, b"p@1") as peer:
        for _ in range(flood):
            peer.send(encode(Drain("d", "")))
        inbox.next(Received)
        end = time.monotonic() + HANG_GUARD_S
        while len(inbox.seen) < flood - 1 and time.monotonic() < end:
            share = links.poll(0.05)
            assert len(share) <= MAX_BATCH
            inbox.seen.extend(share)
    assert inbox.next(PeerClosed).peer == "p@1"
    assert len(inbox.seen) == flood - 1
    links.close()


def test_the_wakeup_ends_a_poll_from_another_thread() -> None:
    links = NodeLinks("d", 1)
    for _ in range(100_000):
        links.wakeup.set()  # never blocks, however full
    assert links.poll(HANG_GUARD_S) == []
    waker = threading.Timer(0.05, links.wakeup.set)
    started = time.monotonic()
    waker.start()
    assert links.poll(HANG_GUARD_S) == []
    assert time.monotonic() - started < HANG_GUARD_S / 2
    waker.join()
    links.close()
    links.wakeup.set()  # a late worker is no error


def test_wakeup_clears() -> None:
    wakeup = Wakeup()
    for _ in range(5000):
        wakeup.set()
    wakeup.clear()
    poller = zmq.Poller()
    poller.register(wakeup.fd, zmq.POLLIN)
    assert poller.poll(0) == []
    wakeup.set()
    assert poller.poll(0) != []
    wakeup.close()


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://10.1.2.3:70", "udp://127.0.0.1:1", ""])
def test_only_this_machine_is_bound_or_dialled(endpoint: str) -> None:
    with pytest.raises(ConfigError):
        NodeLinks("d", 1, endpoint)
    links = NodeLinks("d", 1)
    with pytest.raises(ConfigError):
        links.dial("x", endpoint)
    links.close()


def test_an_address_that_the_system_refuses_leaves_no_socket() -> None:
    """Such an address must not end the node that was asked to dial it."""
    links = NodeLinks("p", 1)
    for _ in range(2):
        with pytest.raises(ConfigError, match="can't dial"):
            links.dial("d", f"ipc:///tmp/{'x' * 200}")
    assert not links.send("d", Drain("d", ""))
    links.close()  # a socket left open would block here


def test_a_node_that_loses_its_key_is_closed_in_the_same_round(tmp_path: Path) -> None:
    """It has not answered yet: nobody else would tell of it."""
    ring = KeyRing(make_keys(tmp_path / "keys"), NODE, "p")
    links = NodeLinks("p", 7, options=LinkOptions(ring=ring))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        links.dial("d@8", f"tcp://127.0.0.1:{mute.getsockname()[1]}#{new_pair().public.hex()}")
        assert links.poll(0) == []
        left = (entry for entry in ring.now.allowed.entries if entry.name != "d")
        ring.now = Keys(ring.now.own, AllowedKeys(tuple(left)))
        inbound = links.poll(0)
        links.close()
    assert inbound == [PeerClosed("d@8")]


def test_a_taken_port_is_a_config_error() -> None:
    first = NodeLinks("d", 1)
    with pytest.raises(ConfigError, match="can't bind"):
        NodeLinks("d", 2, first.endpoint)
    first.close()


def test_totals_report_what_was_counted_since_the_last_time() -> None:
    totals, counts = WireTotals(), Counter({"wire_dropped": 3})
    assert totals.take(counts) == {"wire_errors": 3}
    assert totals.take(counts) == {}
    counts["wire_dropped"] += 4
    assert totals.take(counts) == {"wire_errors": 4}


def test_peer_names() -> None:
    assert parse_peer(peer_name("decode-1", 0xABC)) == ("decode-1", 0xABC)
    for bad in ("", "x", "x@", "@1", "x@-1", "x@0x1", "x@1@2", "x@ 1"):
        with pytest.raises(WireError):
            parse_peer(bad)
    for bad in ("", "a@b", "x" * 300):
        with pytest.raises(ConfigError):
            peer_name(bad, 1)


async def collect(link: RouterLink, kind: type[Kind], seen: list[Inbound]) -> Kind:
    while True:
        for i, inbound in enumerate(seen):
            if isinstance(inbound, kind):
                return seen.pop(i)  # type: ignore[return-value]
        seen.extend(await asyncio.wait_for(link.receive(), HANG_GUARD_S))


@pytest.mark.parametrize("loop_kind", ["asyncio", "uvloop"])
def test_the_router_link(loop_kind: str) -> None:
    async def scenario() -> None:
        link = RouterLink("tcp://127.0.0.1:*")
        node, seen = NodeLinks("d", 3), []
        node.dial("router", link.endpoint)
        node.send("router", Heartbeat("d", 3, LOAD, False))
        assert await collect(link, Received, seen) == Received("d@3", Heartbeat("d", 3, LOAD, False))
        assert link.send("d@3", Welcome("router", 1, 1))
        assert not link.send("d@4", Welcome("router", 1, 1))
        assert (await asyncio.to_thread(Inbox(node).next, Received)).message == Welcome("router", 1, 1)
        waiting = asyncio.create_task(collect(link, PeerClosed, seen))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await asyncio.to_thread(node.close)
        assert (await waiting).peer == "d@3"
        link.close()

    if loop_kind == "uvloop":
        import uvloop

        uvloop.run(scenario())
    else:
        asyncio.run(scenario())


def test_the_router_link_misses_no_edge_while_it_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ping-pong from a thread while the receiving task sends at random moments: nobody looks by the clock meanwhile."""
    monkeypatch.setattr(link_module, "LOOK_S", 10 * HANG_GUARD_S)

    async def scenario() -> None:
        link, node, rounds = RouterLink("tcp://127.0.0.1:*"), NodeLinks("d", 1), 300

        def pongs() -> None:
            inbox = Inbox(node)
            for _ in range(rounds):
                node.send("router", Drain("d", ""))
                while inbox.next(Received).message != Drain("d", ""):
                    pass

        async def noise() -> None:
            for number in itertools.count():
                while number >= 20 * len(seen):  # a slow thread's queue may not get full
                    await asyncio.sleep(0)
                assert link.send("d@1", Welcome("r", 1, 1))
                await asyncio.sleep(0)

        seen: list[Inbound] = []
        node.dial("router", link.endpoint)
        thread, noisy = asyncio.create_task(asyncio.to_thread(pongs)), asyncio.create_task(noise())
        async for inbound in link:
            seen.append(inbound)
            assert link.send("d@1", Drain("d", ""))
            if len(seen) == rounds:
                break
        await asyncio.wait_for(thread, HANG_GUARD_S)
        noisy.cancel()
        node.close(), link.close()

    try:
        asyncio.run(asyncio.wait_for(scenario(), HANG_GUARD_S))
    except TimeoutError:
        pytest.fail("an edge was swallowed")


PEER_PROCESS = """
import sys, time
from shared.wire.zeromq.link import NodeLinks
from shared.wire.messages import Drain
links = NodeLinks("p", 1)
links.dial("d", sys.argv[1])
links.send("d", Drain("d", ""))
while True:
    links.poll(1.0)
"""


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_frozen_process_is_noticed(stop: signal.Signals) -> None:
    links = NodeLinks("d", 1, options=LinkOptions(heartbeat_ms=100, heartbeat_timeout_ms=400))
    inbox = Inbox(links)
    process = subprocess.Popen([sys.executable, "-c", PEER_PROCESS, links.endpoint])
    try:
        assert inbox.next(Received).peer == "p@1"
        process.send_signal(stop)
        assert inbox.next(PeerClosed).peer == "p@1"
    finally:
        process.kill()
        process.wait()
        links.close()


LINGERING_PROGRAM = """
import time
from shared.wire.zeromq.link import NodeLinks
from shared.wire.messages import Drain
from shared.wire.peers import Received
from shared.wire.zeromq.link_options import LinkOptions

def dialled(word):
    peer = NodeLinks("p", 1)
    peer.dial("d", links.endpoint)
    say(peer, word)
    return peer

def say(peer, word):
    assert peer.send("d", Drain("d", word))
    while not any(isinstance(i, Received) and i.message == Drain("d", word) for i in links.poll(1.0)):
        pass

def listen(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        links.poll(0.02)

links = NodeLinks("d", 1, options=LinkOptions(heartbeat_ms=50))
first = dialled("stop")
again = dialled("restart")
assert links.send("p@1", Drain("p", ""))
while not any(isinstance(i, Received) for i in again.poll(1.0)):
    pass
assert first.send("d", Drain("d", "decode"))
listen(0.2)
first.close()
listen(0.4)
say(again, "prefill")
print("alive")
"""


def test_a_peer_that_is_back_while_its_old_connection_lingers() -> None:
    """Answers take the new one; what still comes on the old one, and its end, hurt nobody."""
    done = subprocess.run(
        [sys.executable, "-c", LINGERING_PROGRAM], capture_output=True, text=True, timeout=HANG_GUARD_S
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


BROKEN_PROGRAM = """
import socket, struct, sys, time
from shared.wire.zeromq.link import NodeLinks
from shared.wire.zeromq.link_options import LinkOptions
from tests.support.wire.raw_zmtp import COMMAND, RawPeer

how = sys.argv[1]
links = NodeLinks("d", 1, options=LinkOptions(heartbeat_ms=100))
peer = RawPeer(links.endpoint)
for _ in range(400):
    peer.frame(b"x")
if how == "pings":
    for _ in range(50):
        peer.frame(b"\\x04PING\\x00\\x00", COMMAND)
if how == "reset":
    peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
time.sleep(0.05)
peer.close()
time.sleep(0.3)
for _ in range(20):
    links.poll(0.05)
print("alive")
"""


@pytest.mark.parametrize("how", ["end", "reset", "pings"])
def test_a_peer_that_floods_and_goes_ends_nobody(how: str) -> None:
    """The defect: libzmq aborts if a connection breaks while its inbox is full and a ping is due, or has come in."""
    command = [sys.executable, "-c", BROKEN_PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


def test_no_message_of_ours_needs_a_frame_but_inline_ready() -> None:
    """The codec's frame rule and the sample below must not drift apart."""
    ready = Ready(KEY, 1, 0, [1], [1], [1], PoolRef(1, 1, 2, 64, 5), False, 0, 0, b"", 0)
    links, other = NodeLinks("d", 1), NodeLinks("p", 1)
    other.dial("d@1", links.endpoint)
    messages: list[Message] = [ready, msgspec.structs.replace(ready, inline=True, pool=None)]
    other.send("d@1", messages[0])
    other.send("d@1", messages[1], [b"page"])
    inbox = Inbox(links)
    assert [inbox.next(Received).message for _ in messages] == messages
    links.close(), other.close()
