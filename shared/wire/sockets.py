"""The two kinds of ZMQ sockets we use, never blocking, each with its monitor. How a ROUTER tells who has gone is in
connections.py. Knows nothing of loops or scheduling."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import zmq
from zmq.utils.monitor import recv_monitor_message

from shared.config.endpoints import check_endpoint
from shared.core.errors import ConfigError, WireError
from shared.wire.codec import DEFAULT_LIMITS, Buffer, WireLimits, decode_parts, encode
from shared.wire.connections import Connections
from shared.wire.messages import Message
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received, WireStats, check_sender, parse_peer

DEALER_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
MAX_BATCH = 1024
NAME_PROPERTY = "X-Peer"  # sent in the handshake of each connection


@dataclass(frozen=True, slots=True)
class LinkOptions:
    """`queue_messages`: most messages waiting in each direction per peer; beyond it sends are refused.

    A frozen peer is closed after heartbeat_ms + heartbeat_timeout_ms.
    """

    queue_messages: int = 4096
    heartbeat_ms: int = 1000
    heartbeat_timeout_ms: int = 3000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 1000
    limits: WireLimits = DEFAULT_LIMITS


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, options: LinkOptions) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDTIMEO, 0)
    socket.setsockopt(zmq.SNDHWM, options.queue_messages)
    socket.setsockopt(zmq.RCVHWM, options.queue_messages)
    socket.setsockopt(zmq.HEARTBEAT_IVL, options.heartbeat_ms)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, options.heartbeat_timeout_ms)
    socket.setsockopt(zmq.RECONNECT_IVL, options.reconnect_ms)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, options.reconnect_max_ms)
    socket.setsockopt(zmq.MAXMSGSIZE, max(options.limits.max_frame_bytes, options.limits.max_control_bytes))
    return socket


def close_socket(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Drops what is queued. Idempotent."""
    if not socket.closed:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)


def send_parts(socket: zmq.Socket[bytes], parts: Sequence[Buffer], stats: WireStats) -> bool:
    """False: queue full, or no such peer. Parts above pyzmq's copy threshold are sent from where they lie: they must
    not change until the peer has them (a page is pinned until Installed; its digest catches what breaks that)."""
    try:
        socket.send_multipart(parts, flags=zmq.NOBLOCK, copy=False)
    except zmq.ZMQError as error:
        if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
            raise
        stats.refused()
        return False
    return True


def receive_parts(socket: zmq.Socket[bytes]) -> list[zmq.Frame] | None:
    try:
        return socket.recv_multipart(zmq.NOBLOCK, copy=False)
    except zmq.Again:
        return None


def property_of(part: zmq.Frame) -> str:
    """What the connection that it came by says it is; "" when it says nothing."""
    try:
        return str(part.get(NAME_PROPERTY))
    except (zmq.ZMQError, UnicodeDecodeError):
        return ""


def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Also arms the socket's edge-triggered descriptor."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


def drain_monitor(monitor: zmq.Socket[bytes]) -> list[tuple[int, int]]:
    """(event, value) in the order in which they happened; the value of a DISCONNECTED is the descriptor."""
    events = []
    while has_input(monitor):
        event = recv_monitor_message(monitor, zmq.NOBLOCK)
        events.append((int(event["event"]), int(event["value"])))
    return events


class RouterSocket:
    """Bound; peers are named by a property of their connection. Used by one thread.

    Not by a routing id of their own: when a peer dials anew while its former connection lingers half open, libzmq
    would have to hand the id over, and aborts the process (4.3.5, `!_io_error`) if anything still comes in on the old
    one before it breaks. So every connection has an id that libzmq made; answers take the newest one.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, options: LinkOptions) -> None:
        check_endpoint(endpoint, "endpoint")
        self.stats = WireStats()
        self._limits = options.limits
        self.socket = open_socket(context, zmq.ROUTER, options)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._connections = Connections(self._drain)
        self._routes: dict[str, bytes] = {}  # peer -> routing id of its newest connection
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"can't bind {endpoint}: {error.strerror}") from error
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")

    def receive(self) -> list[Inbound]:
        """What has arrived (a fair share of it), then who is gone, once nothing of theirs can be left in the queue."""
        self._drain()
        inbound: list[Inbound] = []
        while len(inbound) < MAX_BATCH:
            parts = receive_parts(self.socket)
            if parts is None:
                gone = self._connections.take_gone()
                for peer in gone:
                    self._routes.pop(peer, None)
                inbound.extend(map(PeerClosed, gone))
                break
            received = self._open(parts)
            if received is not None:
                inbound.append(received)
        return inbound

    def readable(self) -> bool:
        return has_input(self.socket)

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        route = self._routes.get(peer)
        if route is None:
            self.stats.refused()
            return False
        return send_parts(self.socket, (route, encode(message), *frames), self.stats)

    def close(self) -> None:
        close_socket(self.socket, self.monitor)

    def _open(self, parts: list[zmq.Frame]) -> Received | None:
        name = "a stranger"
        try:
            parse_peer(claimed := property_of(parts[-1]))
            name = claimed
            self._connections.seen(int(parts[-1].get(zmq.SRCFD)), name)
            self._routes[name] = max(self._routes.get(name, b""), parts[0].bytes)  # libzmq counts them upwards
            message, frames = decode_parts([part.buffer for part in parts[1:]], self._limits)
            check_sender(name, message)
        except WireError as error:
            self.stats.dropped(name, error)
            return None
        return Received(name, message, frames)

    def _drain(self) -> None:
        self._connections.closed(fd for event, fd in drain_monitor(self.monitor) if event == zmq.EVENT_DISCONNECTED)


class DealerSocket:
    """Dials one endpoint and keeps trying. `name` is what its owner calls the peer. Used by one thread."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        endpoint: str,
        identity: str,
        options: LinkOptions,
        stats: WireStats,
    ) -> None:
        check_endpoint(endpoint, "endpoint")
        self.name = name
        self.endpoint = endpoint
        self._limits = options.limits
        self._stats = stats
        self._state = "dialling"  # -> up <-> closed
        self._events: list[int] = []
        self.socket = open_socket(context, zmq.DEALER, options)
        self.socket.setsockopt(zmq.METADATA, f"{NAME_PROPERTY}:{identity}".encode())
        self.monitor = self.socket.get_monitor_socket(DEALER_EVENTS)
        try:
            self.socket.connect(endpoint)
        except zmq.ZMQError as error:  # an ipc path too long, or no descriptor left
            self.close()
            raise ConfigError(f"can't dial {endpoint[:200]}: {error.strerror}") from error

    def receive(self) -> list[Inbound]:
        """What has arrived (a fair share of it), then, with the queue empty, how the connection fared meanwhile."""
        self._events.extend(event for event, _ in drain_monitor(self.monitor))
        inbound: list[Inbound] = []
        while len(inbound) < MAX_BATCH:
            parts = receive_parts(self.socket)
            if parts is None:
                events, self._events = self._events, []
                return inbound + [change for event in events for change in self._transition(event)]
            try:
                message, frames = decode_parts([part.buffer for part in parts], self._limits)
            except WireError as error:
                self._stats.dropped(self.name, error)
            else:
                inbound.append(Received(self.name, message, frames))
        return inbound

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Before the first connection messages wait in the queue, up to its mark."""
        return send_parts(self.socket, (encode(message), *frames), self._stats)

    def close(self) -> None:
        close_socket(self.socket, self.monitor)

    def _transition(self, event: int) -> list[Inbound]:
        state = "up" if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else "closed"
        if state == self._state:
            return []
        self._state = state
        return [PeerUp(self.name)] if state == "up" else [PeerClosed(self.name)]
