"""No connection takes more of a process than its bound: unread bytes, and descriptors of those who say nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from shared.wire import watch
from shared.wire.codec import encode
from shared.wire.key_files import NODE
from shared.wire.keyring import KeyRing
from shared.wire.link import NodeLinks
from shared.wire.link_options import LinkOptions
from shared.wire.messages import Goodbye, Wait
from shared.wire.peers import PeerClosed, Received
from shared.wire.watch import Watch, WatchLimits, bytes_received, inode_of, shut_down
from tests.support.key_folders import make_keys
from tests.support.patience import HANG_GUARD_S
from tests.support.raw_zmtp import RawPeer
from tests.support.wire_samples import INLINE, WIRE_KEY

MIB = 1 << 20


class Ends:
    """A TCP connection on this machine, as it was accepted here."""

    def __init__(self) -> None:
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            self.port: int = listener.getsockname()[1]
            self.far = socket.create_connection(listener.getsockname())
            self.near, _ = listener.accept()
        self.near.settimeout(5.0)

    @property
    def fd(self) -> int:
        return self.near.fileno()

    def say(self, count: int) -> None:
        """Bytes that come in and are read from the kernel, as libzmq does."""
        before = bytes_received(self.fd) or 0
        self.far.sendall(bytes(count))
        left = count
        while left:
            left -= len(self.near.recv(left))
        assert bytes_received(self.fd) == before + count

    def is_shut(self) -> bool:
        self.far.settimeout(0.2)
        try:
            return self.far.recv(1) == b""
        except TimeoutError:
            return False


@pytest.fixture
def ends() -> Iterator[Callable[[], Ends]]:
    made: list[Ends] = []

    def make() -> Ends:
        made.append(Ends())
        return made[-1]

    yield make
    for one in made:
        one.far.close()
        one.near.close()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def watch_of(clock: Clock, *, encrypted: bool = False, **limits: float) -> Watch:
    fields = {"unread_bytes": 1000, "unread_bytes_in_all": 10_000, "silent_s": 10.0, "heartbeat_s": 1.0}
    return Watch(WatchLimits(**(fields | limits)), is_encrypted=encrypted, clock=clock)  # type: ignore[arg-type]


# ---- bytes


def test_what_nobody_has_read_has_a_bound(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock()), ends()
    own.accepted(one.fd, one.port)
    one.say(1000)
    own.look()
    assert own.take_refused() == [] and not one.is_shut(), "at the border"
    one.say(1)
    own.look()
    assert [reason for reason, _ in own.take_refused()] == ["flood"] and one.is_shut()
    own.look()
    assert own.take_refused() == [], "once"


def test_what_was_delivered_counts_no_more(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock()), ends()
    own.accepted(one.fd, one.port)
    for _ in range(10):
        one.say(900)
        own.look()
        own.delivered(one.fd, [255, 634], "a@1")  # with headers of 2 and 9
        own.look()
    assert own.take_refused() == [] and own._connections[one.fd].unread == 0


def test_encrypted_parts_have_longer_headers(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock(), encrypted=True), ends()
    own.accepted(one.fd, one.port)
    one.say((222 + 33 + 2) + (223 + 33 + 9))
    own.delivered(one.fd, [222, 223], "a@1")
    own.look()
    assert own._connections[one.fd].unread == 0


def test_a_silent_time_is_no_credit(ends: Callable[[], Ends]) -> None:
    clock = Clock()
    own, one = watch_of(clock), ends()
    own.accepted(one.fd, one.port)
    own.delivered(one.fd, [100], "a@1")
    clock.now += 3600.0
    own.look()
    one.say(1001)
    own.look()
    assert one.is_shut()


def test_heartbeats_never_add_up(ends: Callable[[], Ends]) -> None:
    """They are received and never delivered."""
    clock = Clock()
    own, one = watch_of(clock), ends()
    own.accepted(one.fd, one.port)
    own.delivered(one.fd, [], "a@1")
    for _ in range(50):
        clock.now += 1.0
        one.say(100)
        own.look()
    assert own._connections[one.fd].unread == 0


def test_all_connections_together_have_a_bound(ends: Callable[[], Ends]) -> None:
    """The largest goes first."""
    own, both = watch_of(Clock(), unread_bytes_in_all=1500), [ends(), ends()]
    for one, count in zip(both, (700, 800), strict=True):
        own.accepted(one.fd, one.port)
        one.say(count)
    own.look()
    assert own.take_refused() == [], "at the border"
    both[0].say(1)
    own.look()
    assert not both[0].is_shut() and both[1].is_shut()


# ---- descriptors


def test_who_says_nothing_is_hung_up(ends: Callable[[], Ends]) -> None:
    clock = Clock()
    own, mute, speaker, called = watch_of(clock), ends(), ends(), ends()
    own.accepted(mute.fd, mute.port)
    own.accepted(speaker.fd, speaker.port)
    own.dialled(called.fd, called.near.getpeername()[1])
    own.delivered(speaker.fd, [5], "a@1")
    clock.now += 10.0
    own.look()
    assert own.take_refused() == [], "at the border"
    clock.now += 0.01
    own.look()
    assert [reason for reason, _ in own.take_refused()] == ["idle"]
    assert mute.is_shut() and not speaker.is_shut() and not called.is_shut()


def test_too_many_silent_ones_push_the_oldest_out(ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_SILENT", 2)
    clock = Clock()
    own, all_ends = watch_of(clock), [ends() for _ in range(3)]
    for one in all_ends[:2]:
        own.accepted(one.fd, one.port)
        clock.now += 0.1
    own.look()
    assert own.take_refused() == [], "at the border"
    own.accepted(all_ends[2].fd, all_ends[2].port)
    own.look()
    assert [one.is_shut() for one in all_ends] == [True, False, False]


def test_a_peer_has_a_few_connections(ends: Callable[[], Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "MAX_OF_ONE_PEER", 2)
    own, all_ends = watch_of(Clock()), [ends() for _ in range(4)]
    for index, one in enumerate(all_ends):
        own.accepted(one.fd, one.port)
        own.delivered(one.fd, [5], "b@1" if index == 3 else "a@1")
    assert [one.is_shut() for one in all_ends] == [True, False, False, False]
    for one in all_ends:
        own.accepted_closed(one.fd)
    assert not own._of_peer and not own._connections


# ---- descriptors that are another's


def test_only_the_socket_that_was_accepted_is_shut_down(ends: Callable[[], Ends]) -> None:
    one, other = ends(), ends()
    inode = inode_of(one.fd)
    assert inode is not None
    os.dup2(other.fd, one.fd)  # closed, and its number given to another
    assert not shut_down(one.fd, inode) and not other.is_shut()


def test_a_descriptor_that_is_another_s_by_now_is_not_watched(ends: Callable[[], Ends]) -> None:
    own, one = watch_of(Clock()), ends()
    read_fd, write_fd = os.pipe()
    own.accepted(one.fd, one.port + 1)
    assert not own._connections
    own.dialled(one.fd, one.port)
    assert not own._connections
    own.accepted(read_fd, one.port)
    os.close(read_fd)
    os.close(write_fd)
    own.accepted(read_fd, one.port)
    assert not own._connections


# ---- whole links


def until(condition: Callable[[], bool], links: NodeLinks, seen: list[object] | None = None) -> None:
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        seen = [] if seen is None else seen
        seen.extend(links.poll(0.02))


def flood(peer: RawPeer, links: NodeLinks, most: int) -> int:
    """Parts of a message that never ends, until the connection is shut; how many MiB went out."""
    for sent in range(most):
        try:
            peer.part(bytes(MIB))
        except OSError:
            return sent
        links.poll(0.0)
    return most


def test_a_message_that_never_ends_is_cut_off() -> None:
    """The defect: 881 MiB in 8 s, and nothing counted."""
    links = NodeLinks("d", 1, options=LinkOptions(unread_bytes=80 * MIB))
    try:
        peer, seen = RawPeer(links.endpoint, "p@1"), []
        peer.frame(encode(Goodbye("p", 1)))
        until(lambda: any(isinstance(one, Received) for one in seen), links, seen)
        assert flood(peer, links, 1000) < 500
        until(lambda: links.counts["wire_refused.flood"] == 1, links, seen)
        until(lambda: PeerClosed("p@1") in seen, links, seen)
        again, heard = RawPeer(links.endpoint, "p@2"), []
        again.frame(encode(Goodbye("p", 2)))
        until(lambda: any(isinstance(one, Received) for one in heard), links, heard)
        again.close()
        peer.close()
    finally:
        links.close()


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


def test_more_peers_are_dialled_than_libzmq_has_sockets_by_default() -> None:
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
from shared.wire.key_files import NODE
from shared.wire.keyring import KeyRing
from shared.wire.link import NodeLinks
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


def test_out_of_descriptors_a_peer_can_t_be_reached_and_later_can() -> None:
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
            links._watch.close()
            links._watch.look()
            (one,) = links._watch._connections.values()
            assert 0 <= one._received - one._delivered < 1000, "a handshake and some heartbeats"
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


def test_an_end_that_is_told_late_is_not_taken_for_another_s(ends: Callable[[], Ends]) -> None:
    """Descriptors are reused between a bound socket and dialled ones, whose events come apart."""
    own, one = watch_of(Clock()), ends()
    dialled = own.dialled(one.fd, one.near.getpeername()[1])
    own.accepted_closed(one.fd)
    assert own._connections[one.fd] is dialled
    own.accepted(one.fd, one.port)
    own.dialled_closed(dialled)
    assert own._connections[one.fd].must_speak
    own.accepted_closed(one.fd)
    assert not own._connections


def test_a_bound_socket_of_a_node_leaves_what_it_can_t_read_with_its_peer() -> None:
    """Whole messages wait with TCP: a burst of pages is no flood, however slow the node is."""
    links = NodeLinks("d", 1, options=LinkOptions(inbox_messages=4, unread_bytes=80 * MIB))
    sender = NodeLinks("p", 1)
    try:
        sender.dial("d@1", links.endpoint)
        assert sender.send("d@1", Goodbye("p", 1))
        heard: list[object] = []
        until(lambda: any(isinstance(one, Received) for one in heard), links, heard)
        page = bytes(MIB)
        for _ in range(100):
            assert sender.send("d@1", INLINE, [page, page])
        time.sleep(1.0)  # 200 MiB, and nobody reads
        until(lambda: sum(isinstance(one, Received) for one in heard) == 101, links, heard)
        assert links.counts["wire_refused.flood"] == 0 and PeerClosed("p@1") not in heard
    finally:
        sender.close()
        links.close()
