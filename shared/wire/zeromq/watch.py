"""Limits how many descriptors, and how much memory for unread bytes, this process's connections take.

libzmq limits the size of parts and the number of whole messages, but an unfinished message grows with each part. So a
thread compares the bytes that TCP has received on each descriptor with the bytes delivered from it:

    unread += received since the last look - delivered since then - an allowance for heartbeats;   never below zero

A part takes more memory than its bytes, and libzmq does not tell how many parts an unfinished message has. So the watch
also adds up the growth of the process's memory in two cases: while a connection brings bytes but no message, and while
it may have had a long handshake. libzmq keeps 40 bytes for each byte of a handshake.

docs/security.md says which connections the watch shuts down. It also shuts down a mute connection: TCP has received
nothing for `mute_s`, although the dialling peer pings, and nothing waits to be read.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shared.observe.metric_names import REFUSED_FLOOD, REFUSED_IDLE
from shared.observe.process_memory import ProcessMemory
from shared.wire.peers import EPOCH_MARK
from shared.wire.zeromq.tcp import Shears, bytes_waiting, inflow_of, inode_of

LOOK_S = 0.05
SOON_S = 0.005  # time to the next look while more than MUCH_BYTES are unread
MUCH_BYTES = 4 << 20
BURST_BYTES = 32 << 20  # the allocator may keep this much memory after a burst
CALM_S = 5.0
MAX_SILENT = 512  # limit on connections that have not sent a message
MAX_OF_ONE_PEER = 16
HEARTBEAT_BYTES = 256  # one interval's encrypted heartbeats, both ways, which libzmq never delivers
SHORT_BYTES = 255  # a larger part has a longer header
CURVE_BYTES = 33  # CURVE adds this to each part: command name, nonce, code and flags
PART_BYTES = 128  # memory of an unread part besides its bytes
MANY_PARTS = 256  # this many parts between two looks are a flood; control messages bring fewer
LONG_HANDSHAKE_BYTES = 64 << 10
MOST_BEFORE_MESSAGE = 16 << 20  # limit on a caller's bytes before its first message; the largest Offer fits
SWOLLEN = 4.0  # allowed growth of memory, in bytes per unread byte; page frames take 1
MOST_SWELLING = 64  # at most this growth counts, in bytes per received byte: an empty part of 2 bytes takes PART_BYTES
SWELLING_S = 1.0  # growth counts up to this time after the bytes, because libzmq may read them late


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """`caller_bytes`: limit for one accepted connection; 0 means `unread_bytes`. `callers_bytes_in_all`: limit for all
    accepted connections; 0 means `unread_bytes_in_all`. `silent_s` is infinite if peers need not send anything.
    `mute_s` is infinite if peers don't ping."""

    unread_bytes: int = 80 << 20
    unread_bytes_in_all: int = 192 << 20
    caller_bytes: int = 0
    callers_bytes_in_all: int = 0
    silent_s: float = 10.0
    heartbeat_s: float = 1.0
    mute_s: float = math.inf


class Look(NamedTuple):
    """What a connection's newest look saw, in bytes and parts since the connection began."""

    at: float = 0.0
    received: int = 0
    delivered: int = 0
    num_parts: int = 0


@dataclass(slots=True, eq=False)
class WatchedConnection:
    """One descriptor, from accept or connect to close. The loop's thread writes `delivered`. The watch's thread
    writes `unread`."""

    fd: int
    inode: int
    since: float
    must_speak: bool
    peer: str = ""  # "": no message yet
    delivered: int = 0
    num_parts: int = 0  # delivered parts
    unread: float = 0.0
    is_mute: bool = False
    is_shut: bool = False
    handshake: int = 0  # upper bound of the bytes outside of messages
    swollen: float = 0.0  # growth of memory in bytes since the last delivery, while much is unread
    _may_swell: float = 0.0  # growth in bytes that the newest bytes can still explain
    _swells_until: float = 0.0
    _part_bytes: float = math.inf  # average size of the newest parts in a flood, else infinite
    _last: Look = Look()

    def look(self, now: float, heartbeat_rate: float, mute_s: float, grown: int) -> None:
        """Read `delivered` before the received bytes, so that it can't exceed them. `grown`: growth of this process's
        memory in bytes since the last look."""
        delivered, num_parts, inflow = self.delivered, self.num_parts, inflow_of(self.fd)
        if inflow is None:
            return
        last = self._last
        since = now - (last.at or self.since)
        news = (inflow.received - last.received) - (delivered - last.delivered) - heartbeat_rate * since
        self.unread = max(0.0, self.unread + news)
        self.is_mute = bool(self.peer) and inflow.idle_s > mute_s
        behind, is_known = inflow.received - delivered, delivered > 0 and last.at > 0
        self.handshake = min(self.handshake, behind) if is_known else behind
        if delivered != last.delivered or self.unread <= MUCH_BYTES:
            self.swollen = self._may_swell = 0.0
        else:
            self._swell(now, inflow.received - last.received, grown)
        if (news_parts := num_parts - last.num_parts) > 0:
            is_flood = news_parts >= MANY_PARTS
            self._part_bytes = (delivered - last.delivered) / news_parts if is_flood else math.inf
        self._last = Look(now, inflow.received, delivered, num_parts)

    def _swell(self, now: float, received: int, grown: int) -> None:
        if received > 0:
            self._may_swell += MOST_SWELLING * received
            self._swells_until = now + SWELLING_S
        elif now > self._swells_until:
            self._may_swell = 0.0
        counted = min(grown, self._may_swell)
        self._may_swell -= counted
        self.swollen += counted

    @property
    def held(self) -> float:
        """Estimate the memory in bytes, as if the unread parts had the size of the newest parts."""
        return self.unread * (1 + PART_BYTES / self._part_bytes)


class Bursts:
    """Calls `after_burst` CALM_S seconds after the end of a burst of unread bytes."""

    def __init__(self, after_burst: Callable[[], None] | None, most_of_callers: int) -> None:
        self._after_burst = after_burst
        # several small bursts can leave as much memory allocated as a large one
        self._least_bytes = min(BURST_BYTES, most_of_callers // 4)
        self._most_seen, self._calm_since = 0.0, 0.0

    def note(self, unread: float, now: float) -> None:
        if unread > MUCH_BYTES:
            self._most_seen, self._calm_since = max(self._most_seen, unread), now
        elif self._most_seen >= self._least_bytes and now - self._calm_since >= CALM_S:
            self._most_seen = 0.0
            if self._after_burst is not None:
                self._after_burst()


class Watch:
    """Watches one link's connections. The link's loop thread calls all methods except `look`.

    Sockets may report a closed connection late. By then a connection of the other kind (bound or dialled) may have the
    same descriptor."""

    def __init__(
        self,
        limits: WatchLimits,
        *,
        is_encrypted: bool,
        clock: Callable[[], float] = time.monotonic,
        after_burst: Callable[[], None] | None = None,
        process_bytes: Callable[[], int] | None = None,
    ) -> None:
        """`after_burst`: see Bursts; the watch's thread calls it."""
        self._limits = limits
        self._most_of_caller = limits.caller_bytes or limits.unread_bytes
        self._most_of_callers = limits.callers_bytes_in_all or limits.unread_bytes_in_all
        self._bursts = Bursts(after_burst, self._most_of_callers)
        self._refused: deque[tuple[str, str]] = deque()
        self._clock = clock
        self._shears, self._memory = Shears(), ProcessMemory()
        self._process_bytes = process_bytes or self._memory
        self._bytes_before = 0
        self._handshake_growth = 0.0  # in bytes
        self._header_bytes = CURVE_BYTES if is_encrypted else 0
        self._connections: dict[int, WatchedConnection] = {}
        self._of_peer: dict[str, list[WatchedConnection]] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._shears.close()
        self._memory.close()

    def _run(self) -> None:
        wait_s = LOOK_S
        while not self._stop.wait(wait_s):
            wait_s = SOON_S if self.look() > MUCH_BYTES else LOOK_S

    # ---- reports of the sockets

    def accepted(self, fd: int, port: int) -> None:
        """Watch a peer's connection to our port. The peer must send a message within `silent_s`."""
        self._add(fd, inode_of(fd, own_port=port), must_speak=True)

    def dialled(self, fd: int, port: int) -> WatchedConnection | None:
        """Watch our connection to a peer's port. Return None if this connection is closed already."""
        return self._add(fd, inode_of(fd, peer_port=port), must_speak=False)

    def _add(self, fd: int, inode: int | None, *, must_speak: bool) -> WatchedConnection | None:
        self._forget(self._connections.get(fd))
        if inode is None:
            return None
        connection = self._connections[fd] = WatchedConnection(fd, inode, self._clock(), must_speak)
        return connection

    def accepted_closed(self, fd: int) -> None:
        connection = self._connections.get(fd)
        if connection is not None and connection.must_speak:
            self._forget(connection)

    def forget_accepted(self) -> None:
        """Forget the connections of a closed bound socket: they end without a report."""
        for connection in list(self._connections.values()):
            self.accepted_closed(connection.fd)

    def dialled_closed(self, connection: WatchedConnection | None) -> None:
        if connection is not None and self._connections.get(connection.fd) is connection:
            self._forget(connection)

    def _forget(self, connection: WatchedConnection | None) -> None:
        if connection is None:
            return
        del self._connections[connection.fd]
        others = self._of_peer.get(connection.peer)
        if others is not None:
            others.remove(connection)
            if not others:
                del self._of_peer[connection.peer]

    def take_refused(self) -> list[tuple[str, str]]:
        """Return (reason, log text) of the connections shut down since the last call."""
        return [self._refused.popleft() for _ in range(len(self._refused))]

    def delivered(self, fd: int, sizes: Iterable[int], peer: str) -> None:
        """`peer`: the message's sender; "" if unknown."""
        connection = self._connections.get(fd)
        if connection is None:
            return
        wire_bytes = [self._wire_bytes(size) for size in sizes]
        connection.delivered += sum(wire_bytes)
        connection.num_parts += len(wire_bytes)
        if peer and not connection.peer:
            connection.peer = peer.partition(EPOCH_MARK)[0]  # without the epoch, which a peer chooses in each handshake
            of_peer = self._of_peer.setdefault(connection.peer, [])
            of_peer.append(connection)
            if len(of_peer) > MAX_OF_ONE_PEER:
                oldest = next((one for one in of_peer if not one.is_shut), connection)
                self._shut(oldest, REFUSED_IDLE, "a peer has too many connections: its oldest is closed")

    def _wire_bytes(self, size: int) -> int:
        size += self._header_bytes
        return size + (2 if size <= SHORT_BYTES else 9)

    # ---- looks

    def look(self) -> float:
        """Shut down connections beyond their limits. Return the sum of unread bytes."""
        now, limits = self._clock(), self._limits
        connections = [one for one in list(self._connections.values()) if not one.is_shut]
        process_bytes = self._process_bytes()
        grown, self._bytes_before = max(0, process_bytes - self._bytes_before), process_bytes
        for one in connections:
            one.look(now, HEARTBEAT_BYTES / limits.heartbeat_s, limits.mute_s, grown)
        unread = sum(one.unread for one in connections)
        for one in connections:
            if one.held > (self._most_of_caller if one.must_speak else limits.unread_bytes):
                self._shut(one, REFUSED_FLOOD, "a connection sent more than was read from it")
        self._bound_sum([one for one in connections if one.must_speak], self._most_of_callers)
        self._bound_sum(connections, limits.unread_bytes_in_all)
        self._bound_swelling(connections)
        self._bound_handshakes(connections, grown)
        self._bound_silent(connections, now)
        self._close_mute(connections)
        self._bursts.note(unread, now)
        return unread

    def _bound_sum(self, connections: Sequence[WatchedConnection], most: int) -> None:
        left = sorted((one for one in connections if not one.is_shut), key=lambda one: one.held)
        total = sum(one.held for one in left)
        while left and total > most:
            largest = left.pop()
            total -= largest.held
            self._shut(largest, REFUSED_FLOOD, "connections sent more than was read from them")

    def _bound_swelling(self, connections: Sequence[WatchedConnection]) -> None:
        """Limit the memory of unfinished messages with many tiny parts."""
        left = [one for one in connections if not one.is_shut]
        most = max(self._limits.unread_bytes_in_all, SWOLLEN * sum(one.unread for one in left))
        worst = max(left, key=lambda one: one.swollen, default=None)
        if worst is not None and worst.swollen > most:
            self._shut(worst, REFUSED_FLOOD, "an unfinished message takes many times its bytes of memory")

    def _bound_handshakes(self, connections: Sequence[WatchedConnection], grown: int) -> None:
        callers = [one for one in connections if one.must_speak and not one.is_shut]
        left = sorted((one for one in callers if one.handshake > LONG_HANDSHAKE_BYTES), key=lambda one: one.handshake)
        total = sum(one.handshake for one in left)
        growth = self._handshake_growth + grown
        while left and (
            left[-1].handshake > MOST_BEFORE_MESSAGE
            or min(growth, MOST_SWELLING * total) > self._limits.unread_bytes_in_all
        ):
            total -= left[-1].handshake
            self._shut(left.pop(), REFUSED_FLOOD, "handshakes take many times their bytes of memory")
        self._handshake_growth = min(growth, MOST_SWELLING * total)

    def _bound_silent(self, connections: Sequence[WatchedConnection], now: float) -> None:
        silent = sorted(
            (one for one in connections if one.must_speak and not one.peer and not one.is_shut),
            key=lambda one: one.since,
        )
        for index, one in enumerate(silent):
            if len(silent) - index > MAX_SILENT:
                self._shut(one, REFUSED_IDLE, "too many connections said nothing: the oldest is closed")
            elif now - one.since > self._limits.silent_s:
                self._shut(one, REFUSED_IDLE, f"a connection said nothing for {self._limits.silent_s:g} s")

    def _close_mute(self, connections: Sequence[WatchedConnection]) -> None:
        """Close connections to lost or frozen hosts. If bytes wait in the kernel, this process reads late, and the
        host is not at fault."""
        for one in connections:
            if one.must_speak and one.is_mute and not one.is_shut and bytes_waiting(one.fd) == 0:
                one.is_shut = True
                self._shears.shut_down(one.fd, one.inode)

    def _shut(self, connection: WatchedConnection, reason: str, why: str) -> None:
        """End the connection, so that libzmq frees its memory."""
        if not connection.is_shut:
            connection.is_shut = True
            if self._shears.shut_down(connection.fd, connection.inode):
                self._refused.append((reason, why))


def tcp_port(endpoint: str) -> int | None:
    return int(endpoint.rpartition(":")[2]) if endpoint.startswith("tcp://") else None
