"""What one connection may take of this process: memory for what it has sent and nobody has read, and a descriptor.

libzmq bounds a part and the number of whole messages, never an unfinished message: that grows as long as parts come.
So a thread compares what TCP has received on each descriptor with what was delivered from it:

    unread += received since the last look - delivered since then - what heartbeats may be;   never below zero

and shuts the connection down that goes beyond its bound; all of them together have another. A connection that says
nothing for `silent_s` is hung up, as are the oldest silent ones when there are too many, and of one peer the oldest.
Whole messages are no matter of it: a bound socket takes a few of each peer, and the rest stays with TCP.
Descriptors are reused, by anybody: before a shutdown the socket's inode must be the one that was accepted.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from shared.observe.metric_names import REFUSED_FLOOD, REFUSED_IDLE

LOOK_S = 0.05
INFO_BYTES = 136  # of struct tcp_info, up to tcpi_bytes_received (Linux 4.1 and later)
RECEIVED_AT = 128
MAX_SILENT = 512  # connections that have not said anything
MAX_OF_ONE_PEER = 16
HEARTBEAT_BYTES = 256  # of one interval, both directions, encrypted: they are received and never delivered
SHORT_BYTES = 255  # a part above it has a longer header
CURVE_BYTES = 33  # of each part: command name, nonce, code and flags


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """`silent_s`: infinite for connections of which nothing need come."""

    unread_bytes: int = 80 << 20
    unread_bytes_in_all: int = 192 << 20
    silent_s: float = 10.0
    heartbeat_s: float = 1.0


@dataclass(slots=True, eq=False)
class Connection:
    """One descriptor, from accept or connect until it closes. The loop's thread adds to `delivered`, the watch's own
    thread keeps `unread`."""

    fd: int
    inode: int
    since: float
    must_speak: bool
    peer: str = ""  # "": it has said nothing
    delivered: int = 0
    unread: float = 0.0
    is_shut: bool = False
    _received: int = 0
    _delivered: int = 0
    _looked_at: float = field(default=0.0)

    def look(self, now: float, heartbeat_rate: float) -> None:
        """Take what has come since the last look. What is delivered is read first: it never exceeds what came."""
        delivered, received = self.delivered, bytes_received(self.fd)
        if received is None:
            return
        since = now - (self._looked_at or self.since)
        news = (received - self._received) - (delivered - self._delivered) - heartbeat_rate * since
        self.unread = max(0.0, self.unread + news)
        self._received, self._delivered, self._looked_at = received, delivered, now


class Watch:
    """One per link. All but `look` is called by the loop's thread. A bound and a dialled socket tell of their ends
    separately, and late: the descriptor may be the other's by then."""

    def __init__(self, limits: WatchLimits, *, is_encrypted: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._refused: deque[tuple[str, str]] = deque()
        self._clock = clock
        self._header_bytes = CURVE_BYTES if is_encrypted else 0
        self._connections: dict[int, Connection] = {}
        self._of_peer: dict[str, list[Connection]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Returns when the thread has ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(LOOK_S):
            self.look()

    # ---- what the sockets tell

    def accepted(self, fd: int, port: int) -> None:
        """A connection that somebody else began, to this port of ours: it must say something soon."""
        self._add(fd, inode_of(fd, own_port=port), must_speak=True)

    def dialled(self, fd: int, port: int) -> Connection | None:
        """Return a connection to this port of a peer; None when it is over already."""
        return self._add(fd, inode_of(fd, peer_port=port), must_speak=False)

    def _add(self, fd: int, inode: int | None, *, must_speak: bool) -> Connection | None:
        self._forget(self._connections.get(fd))
        if inode is None:
            return None
        connection = self._connections[fd] = Connection(fd, inode, self._clock(), must_speak)
        return connection

    def accepted_closed(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is not None and connection.must_speak:
            self._forget(connection)

    def dialled_closed(self, connection: Connection | None) -> None:
        """None: it was not watched."""
        if connection is not None and self._connections.get(connection.fd) is connection:
            self._forget(connection)

    def _forget(self, connection: Connection | None) -> None:
        if connection is None:
            return
        del self._connections[connection.fd]
        others = self._of_peer.get(connection.peer)
        if others is not None:
            others.remove(connection)
            if not others:
                del self._of_peer[connection.peer]

    def take_refused(self) -> list[tuple[str, str]]:
        """Return why connections were shut down since the last call: reason, and words for the log."""
        return [self._refused.popleft() for _ in range(len(self._refused))]

    def delivered(self, fd: int, sizes: Iterable[int], peer: str) -> None:
        """A whole message has come out of this connection. `peer`: whose it is; "" when it is nobody's."""
        connection = self._connections.get(fd)
        if connection is None:
            return
        connection.delivered += sum(map(self._wire_bytes, sizes))
        if peer and not connection.peer:
            connection.peer = peer
            of_peer = self._of_peer.setdefault(peer, [])
            of_peer.append(connection)
            if len(of_peer) > MAX_OF_ONE_PEER:
                oldest = next((one for one in of_peer if not one.is_shut), connection)
                self._shut(oldest, REFUSED_IDLE, "a peer has too many connections: its oldest is closed")

    def _wire_bytes(self, size: int) -> int:
        size += self._header_bytes
        return size + (2 if size <= SHORT_BYTES else 9)

    # ---- looks

    def look(self) -> None:
        """Shut down what takes too much. Called every LOOK_S by the watch's own thread."""
        now, limits = self._clock(), self._limits
        connections = [one for one in list(self._connections.values()) if not one.is_shut]
        for one in connections:
            one.look(now, HEARTBEAT_BYTES / limits.heartbeat_s)
            if one.unread > limits.unread_bytes:
                self._shut(one, REFUSED_FLOOD, "a connection sent more than was read of it")
        self._bound_sum(connections)
        self._bound_silent(connections, now)

    def _bound_sum(self, connections: Sequence[Connection]) -> None:
        """The largest go first."""
        left = sorted((one for one in connections if not one.is_shut), key=lambda one: one.unread)
        total = sum(one.unread for one in left)
        while left and total > self._limits.unread_bytes_in_all:
            largest = left.pop()
            total -= largest.unread
            self._shut(largest, REFUSED_FLOOD, "connections sent more than was read of them")

    def _bound_silent(self, connections: Sequence[Connection], now: float) -> None:
        silent = sorted(
            (one for one in connections if one.must_speak and not one.peer and not one.is_shut),
            key=lambda one: one.since,
        )
        for index, one in enumerate(silent):
            if len(silent) - index > MAX_SILENT:
                self._shut(one, REFUSED_IDLE, "too many connections said nothing: the oldest is closed")
            elif now - one.since > self._limits.silent_s:
                self._shut(one, REFUSED_IDLE, f"a connection said nothing for {self._limits.silent_s:g} s")

    def _shut(self, connection: Connection, reason: str, why: str) -> None:
        """libzmq sees the end of the connection, and lets go of all that it held of it."""
        if not connection.is_shut:
            connection.is_shut = True
            if shut_down(connection.fd, connection.inode):
                self._refused.append((reason, why))


def tcp_port(endpoint: str) -> int | None:
    """None for ipc."""
    return int(endpoint.rpartition(":")[2]) if endpoint.startswith("tcp://") else None


def inode_of(fd: int, *, own_port: int | None = None, peer_port: int | None = None) -> int | None:
    """None: it is closed already, or it is no TCP connection with this port at its end: the descriptor is another's."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    except OSError:
        return None
    try:
        if own_port is not None and connection.getsockname()[1] != own_port:
            return None
        if peer_port is not None and connection.getpeername()[1] != peer_port:
            return None
        return os.fstat(fd).st_ino
    except (OSError, IndexError):
        return None
    finally:
        connection.detach()  # it is libzmq's


def bytes_received(fd: int) -> int | None:
    """All that TCP has received on it so far; None when it is closed, or no TCP connection (ipc)."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    except OSError:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    except OSError:
        return None
    finally:
        connection.detach()  # it is libzmq's
    return None if len(info) < INFO_BYTES else int(struct.unpack_from("=Q", info, RECEIVED_AT)[0])


def shut_down(fd: int, inode: int) -> bool:
    """Shut the socket down that has this inode; False when it is closed, and the descriptor may be another's."""
    try:
        own = os.dup(fd)  # what is looked at below stays what it is
    except OSError:
        return False
    try:
        if os.fstat(own).st_ino != inode:
            return False
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, own)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
        return True
    except OSError:
        return False
    finally:
        os.close(own)
