"""Whole links under watch: floods end, honest peers stay, and many peers need few sockets."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from shared.observe.process_memory import ProcessMemory
from shared.wire.codec import encode
from shared.wire.keys.key_files import NODE
from shared.wire.keys.keyring import KeyRing
from shared.wire.messages import Goodbye, Wait
from shared.wire.peers import PeerClosed, Received
from shared.wire.zeromq.link import NodeLinks
from shared.wire.zeromq.link_options import LinkOptions
from shared.wire.zeromq.tcp import bytes_waiting
from shared.wire.zeromq.watch import Watch
from tests.support.clusters.key_folders import make_keys
from tests.support.machine.own_process import printed
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.wire.raw_zmtp import RawPeer
from tests.support.wire.wire_samples import INLINE, WIRE_KEY

MIB = 1 << 20


def until(condition: Callable[[], bool], links: NodeLinks, seen: list[object] | None = None) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        seen = [] if seen is None else seen
        seen.extend(links.poll(0.02))


def flood(peer: RawPeer, links: NodeLinks, most: int, seen: list[object]) -> int:
    """Parts of a message that never ends, until the connection is shut; how many MiB went out."""
    for sent in range(most):
        try:
            peer.part(bytes(MIB))
        except OSError:
            return sent
        seen.extend(links.poll(0.0))
    return most


def test_a_message_that_never_ends_is_cut_off() -> None:
    """The defect: 881 MiB in 8 s, and nothing counted."""
    links = NodeLinks("d", 1, options=LinkOptions(unread_bytes=80 * MIB))
    try:
        peer, seen = RawPeer(links.endpoint, "p@1"), list[object]()
        peer.frame(encode(Goodbye("p", 1)))
        until(lambda: any(isinstance(one, Received) for one in seen), links, seen)
        assert flood(peer, links, 1000, seen) < 500
        until(lambda: links.counts["wire_refused.flood"] == 1, links, seen)
        until(lambda: PeerClosed("p@1", accepted=True) in seen, links, seen)
        again, heard = RawPeer(links.endpoint, "p@2"), list[object]()
        again.frame(encode(Goodbye("p", 2)))
        until(lambda: any(isinstance(one, Received) for one in heard), links, heard)
        again.close()
        peer.close()
    finally:
        links.close()


def counted_looks(patch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that every look of a watch appends to."""
    looks, look = list[float](), Watch.look

    def counted(watch: Watch) -> float:
        unread = look(watch)
        looks.append(unread)
        return unread

    patch.setattr(Watch, "look", counted)
    return looks


def wait_for_look(looks: list[float], links: NodeLinks, seen: list[object]) -> None:
    wanted = len(looks) + 1
    until(lambda: len(looks) >= wanted, links, seen)


def test_a_message_of_empty_parts_ends_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defect: each part takes 2 bytes of the wire and 64 of memory, so 80 MiB unread were 2.5 GiB.

    After each piece the peer waits for libzmq and for a look. Otherwise memory could pass the bound on a busy machine.
    """
    looks, memory = counted_looks(monkeypatch), ProcessMemory()
    links = NodeLinks("d", 1)
    with closing(memory), closing(links), closing(RawPeer(links.endpoint, "p@1")) as peer:
        seen = list[object]()
        peer.frame(encode(Goodbye("p", 1)))
        until(lambda: any(isinstance(one, Received) for one in seen), links, seen)
        (connection,) = links._watch._connections.values()
        before, num_pieces = memory(), 0
        while links.counts["wire_refused.flood"] == 0:
            num_pieces += 1
            assert num_pieces < 256 and memory() - before < 512 * MIB
            with suppress(OSError):  # the last look may have shut the connection
                peer.socket.sendall(b"\x01\x00" * (MIB // 8))
            until(lambda: not bytes_waiting(connection.fd), links, seen)
            wait_for_look(looks, links, seen)


LONG_HANDSHAKES = """
import itertools, threading
from shared.wire.codec import AT_ROUTER, encode
from shared.wire.zeromq.link import NodeLinks
from shared.wire.zeromq.link_options import LinkOptions
from shared.wire.messages import Goodbye
from shared.observe.process_memory import ProcessMemory
from tests.support.wire.raw_zmtp import COMMAND, GREETING, RawPeer, prop

names = map("".join, itertools.islice(itertools.product("abcdefghijklmnopqrstuvwxyz0123456789!#$%&", repeat=3), 60_000))
PROPERTIES = b"".join(bytes((3,)) + name.encode() + bytes(4) for name in names)

class LongPeer(RawPeer):
    def _shake_hands(self, name):
        self.socket.sendall(GREETING)
        self._read(len(GREETING))
        self.frame(b"\x05READY" + prop("Socket-Type", "DEALER") + prop("X-Peer", name) + PROPERTIES, COMMAND)
        self.frame(encode(Goodbye("x", 1)))

links, memory, peers = NodeLinks("d", 1, options=LinkOptions(limits=AT_ROUTER)), ProcessMemory(), []

def call():
    for number in range(60):
        try:
            peers.append(LongPeer(links.endpoint, f"x@{number + 1:x}"))
        except OSError:
            pass

thread = threading.Thread(target=call)
before = highest = memory()
thread.start()
while thread.is_alive() or links.counts["wire_refused.flood"] == 0 and highest - before < 512 << 20:
    links.poll(0.005)
    highest = max(highest, memory())
thread.join()
print((highest - before) >> 20)
links.close()
"""


def test_long_handshakes_end_by_the_memory_they_take() -> None:
    """The defect: libzmq keeps 40 bytes for each byte of their properties, which counted once."""
    assert int(printed(LONG_HANDSHAKES)) < 512


def test_a_connection_that_says_nothing_is_hung_up() -> None:
    links = NodeLinks("d", 1, options=LinkOptions(silent_s=0.3))
    try:
        mute, silent = RawPeer(links.endpoint, silent=True), RawPeer(links.endpoint, "p@1")
        until(lambda: not mute.is_open() and not silent.is_open(), links)
        until(lambda: links.counts["wire_refused.idle"] == 2, links)  # counted a moment later
        mute.close()
        silent.close()
    finally:
        links.close()


def test_dialled_peers_may_outnumber_libzmq_s_default_sockets() -> None:
    """The defect: the 341st ended the process."""
    links = NodeLinks("p", 1)
    try:
        for number in range(400):
            links.dial(f"d{number}@1", "tcp://127.0.0.1:9")
    finally:
        links.close()


OUT_OF_DESCRIPTORS = """
import resource
from shared.core.errors import PeerUnreachable
from shared.wire.keys.key_files import NODE
from shared.wire.keys.keyring import KeyRing
from shared.wire.zeromq.link import NodeLinks
from shared.wire.peers import PeerUp
links, d = NodeLinks("p", 1), NodeLinks("d", 1)
resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
refused = 0
for number in range(100):
    try:
        links.dial(f"d{number}@1", d.endpoint)
    except PeerUnreachable:
        refused += 1
    links.poll(0.0)
links.dial("tcp://127.0.0.1:9", "tcp://127.0.0.1:9")  # a router: it is tried again
for _ in range(30):
    links.poll(0.01)
    d.poll(0.0)
assert refused > 50, refused
for number in range(100):
    links.hang_up(f"d{number}@1")
seen = []
for _ in range(1000):
    try:  # libzmq closes what was hung up in its own time
        links.dial("d@1", d.endpoint)
    except PeerUnreachable:
        pass
    d.poll(0.0)
    seen += links.poll(0.01)
    if PeerUp("d@1") in seen and "tcp://127.0.0.1:9" in links._dealers:
        break
assert PeerUp("d@1") in seen, seen
assert "tcp://127.0.0.1:9" in links._dealers
links.close()
d.close()
print("fine")
"""


def test_without_descriptors_a_peer_is_out_of_reach_until_later() -> None:
    command = [sys.executable, "-c", OUT_OF_DESCRIPTORS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_GUARD_S)
    assert done.stdout == "fine\n", done.stderr


@pytest.mark.parametrize("keys", [False, True])
def test_honest_traffic_leaves_nothing_unread(tmp_path: Path, keys: bool) -> None:
    """What libzmq adds to each part is known to the byte: an error would add up and shut honest peers down."""
    folder = make_keys(tmp_path / "keys", nodes=("p", "d"))
    rings = {name: KeyRing(folder, NODE, name) if keys else None for name in ("p", "d")}
    p, d = (NodeLinks(name, 1, options=LinkOptions(ring=rings[name])) for name in ("p", "d"))
    try:
        p.dial("d@1", d.endpoint)
        at_d: list[object] = []
        at_p: list[object] = []
        sizes = (0, 1, 200, 222, 223, 255, 256, 5000, 100_000)
        for _ in range(20):
            for size in sizes:
                assert p.send("d@1", INLINE, [bytes(size), bytes(size + 1)])
        until(lambda: sum(isinstance(one, Received) for one in at_d) == 180, d, at_d)
        for _ in range(200):
            assert d.send("p@1", Wait(WIRE_KEY, "x" * 300))
        until(lambda: sum(isinstance(one, Received) for one in at_p) == 200, p, at_p)
        for links in (p, d):
            links._watch._stop.set()
            links._watch._thread.join()
            links._watch.look()
            (one,) = links._watch._connections.values()
            assert 0 <= one._last.received - one._last.delivered < 1000, "a handshake and some heartbeats"
            assert links.counts["wire_refused.flood"] == 0
    finally:
        p.close()
        d.close()


def test_a_dealer_s_connection_is_watched_until_it_ends() -> None:
    p, d = NodeLinks("p", 1), NodeLinks("d", 1)
    try:
        p.dial("d@1", d.endpoint)
        until(lambda: len(p._watch._connections) == 1, p)
        (one,) = p._watch._connections.values()
        assert not one.must_speak
        p.hang_up("d@1")
        assert not p._watch._connections
    finally:
        p.close()
        d.close()


def test_a_bound_socket_takes_no_larger_part_than_callers_send() -> None:
    links = NodeLinks("p", 1, options=LinkOptions(caller_bytes=1000))
    try:
        for size, is_open in ((1000, True), (1001, False)):
            peer = RawPeer(links.endpoint, "x@1")
            peer.frame(encode(Goodbye("x", 1)))
            until(lambda: bool(links._router._routes), links)
            peer.frame(bytes(size))
            if is_open:
                until(lambda: links.counts["wire_dropped"] == 1, links)
                assert peer.is_open()
            else:
                until(lambda peer=peer: not peer.is_open(), links)  # type: ignore[misc]
            peer.close()
    finally:
        links.close()
