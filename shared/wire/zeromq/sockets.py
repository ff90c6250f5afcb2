"""ZMQ sockets that never block. Each socket has a monitor, and uses CURVE if there are keys."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import zmq

from shared.config.settings.endpoints import KEY_MARK, check_endpoint, is_ipv6
from shared.core.errors import ConfigError, PeerUnreachable, WireError
from shared.observe.metric_names import REFUSED_IDENTITY
from shared.wire.codec import BY_DECODE, Buffer, decode_parts
from shared.wire.keys.key_files import ROUTER
from shared.wire.messages import AnyMessage, Message, Welcome
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received, Refused, WireStats, check_sender, parse_peer
from shared.wire.unreadable import unreadable
from shared.wire.zeromq.budget import Budget
from shared.wire.zeromq.connections import Connections
from shared.wire.zeromq.curve import dial_curve, serve_curve
from shared.wire.zeromq.ipc_folder import require_private_folder
from shared.wire.zeromq.link_options import LinkOptions
from shared.wire.zeromq.monitor import drain_monitor, has_input, open_monitor
from shared.wire.zeromq.parts import NAME_PROPERTY, PartReader, introduce, property_of, send_message, version_of
from shared.wire.zeromq.peer_gate import PeerGate
from shared.wire.zeromq.routing_ids import draw_first_id
from shared.wire.zeromq.watch import Watch, WatchedConnection, tcp_port

SHUT_OUT = {  # handshakes that failed because of keys
    int(zmq.EVENT_HANDSHAKE_FAILED_AUTH): "its key is not allowed",
    int(
        zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    ): "it has no key and needs one, has one and needs none, or means another peer",
}
LEFT = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
LEFT_EARLY = "it left, or was too slow, before it had proved who it is"  # a peer that sees a wrong key leaves
ENDS = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
DEALER_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECT_RETRIED | ENDS
ROUTER_EVENTS = zmq.EVENT_ACCEPTED | ENDS
REPORTED_BIND_TRIES = 20
logger = logging.getLogger(__name__)
USER_PROPERTY = "User-Id"  # the public key, set by the authenticator
HANDSHAKE_MS = 10_000  # longest time for a handshake


def open_socket(context: zmq.Context[zmq.Socket[bytes]], kind: int, options: LinkOptions) -> zmq.Socket[bytes]:
    """Return a socket that is neither bound nor connected.

    libzmq 4.3.5 aborts the process (its issue 4364) if a connection breaks while its inbox is full and a ping is due or
    has come in. So only watch.py limits inboxes, and only a DEALER sends pings."""
    if kind == zmq.ROUTER:
        draw_first_id()
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDTIMEO, 0)
    socket.setsockopt(zmq.SNDHWM, options.queue_messages)
    socket.setsockopt(zmq.RCVHWM, 0)
    if kind == zmq.DEALER:
        socket.setsockopt(zmq.HEARTBEAT_IVL, options.heartbeat_ms)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, options.heartbeat_timeout_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, options.connect_ms)
    socket.setsockopt(zmq.RECONNECT_IVL, options.reconnect_ms)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, options.reconnect_max_ms)
    most = max(options.limits.max_frame_bytes, options.limits.max_control_bytes)
    socket.setsockopt(zmq.MAXMSGSIZE, options.caller_bytes or most if kind == zmq.ROUTER else most)
    return socket


def open_monitored(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, options: LinkOptions, events: int
) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Raise zmq.ZMQError, and leave neither socket open, if no descriptor is free."""
    socket = open_socket(context, kind, options)
    try:
        return socket, open_monitor(context, socket, events)
    except zmq.ZMQError:
        socket.close(0)
        raise


def close_socket(socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
    """Drop queued messages. Idempotent."""
    if not socket.closed:
        socket.disable_monitor()
        monitor.close(0)
        socket.close(0)


class RouterSocket:
    """A bound socket that names peers by a property of their connection. Used by one thread.

    libzmq makes each connection's routing id, and answers use the newest id. If a peer chose its id, it could dial
    again while its old connection is half open. libzmq 4.3.5 would then move the id to the new connection, and abort
    (`!_io_error`) when more data came on the old one. It also aborts if its next id is taken, so routing_ids.py makes
    ids random.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, options: LinkOptions) -> None:
        check_endpoint(endpoint, "endpoint", has_keys=options.ring is not None)
        require_private_folder(endpoint)
        self.stats = WireStats()
        is_encrypted = options.ring is not None
        self.watch = Watch(options.watch_limits, is_encrypted=is_encrypted, after_burst=options.after_burst)
        self._context = context
        self._options = options
        self._ring = options.ring
        self._keys = options.ring.now if options.ring is not None else None
        self._gate = PeerGate(options.ring)
        self._routes: dict[str, bytes] = {}  # peer -> routing id of its newest connection
        self._speaks: dict[str, int] = {}  # peer -> its protocol
        self._bind_tries = 0
        self.endpoint = endpoint
        self._make_socket()
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(f"can't bind {endpoint}: {error.strerror}") from error
        self._is_bound = True
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\x00")
        self._port = tcp_port(self.endpoint)

    def _make_socket(self) -> None:
        """The former socket must be closed."""
        self.socket, self.monitor = open_monitored(self._context, zmq.ROUTER, self._options, ROUTER_EVENTS)
        self._reader = PartReader(self.socket, self._options.limits)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        introduce(self.socket)
        self.socket.setsockopt(zmq.IPV6, is_ipv6(self.endpoint))
        if self._ring is not None and self._keys is not None:
            serve_curve(self.socket, self._ring.listener(self._keys))
        self._connections = Connections(self._drain)
        self._is_bound = False

    @property
    def address(self) -> str:
        """Return the endpoint and, for a node with keys, the key that it listens with."""
        if self._ring is None or self._keys is None or self._ring.kind == ROUTER:
            return self.endpoint
        return f"{self.endpoint}{KEY_MARK}{self._ring.listener(self._keys).public.hex()}"

    def receive(self) -> list[Inbound]:
        """Return a batch of messages within the Budget. Once the queue is empty, add PeerClosed for gone peers."""
        inbound: list[Inbound] = [PeerClosed(peer, accepted=True) for peer in self._follow_keys()]
        self.note_refused()
        if self.socket.closed:
            return inbound
        self._drain()
        budget = Budget()
        while not budget.is_spent:
            parts = self._reader.read()
            if parts is None:
                gone = self._connections.take_gone()
                for peer in gone:
                    self._forget(peer)
                inbound.extend(PeerClosed(peer, accepted=True) for peer in gone)
                break
            if self._reader.is_rest:
                budget.take(len(parts[0]))
                self.watch.delivered(int(parts[0].get(zmq.SRCFD)), map(len, parts), "")
                continue
            budget.take(len(parts[1]) if len(parts) > 1 else 0)
            received = self._open(parts)
            if received is not None:
                inbound.append(received)
        return inbound

    def note_refused(self) -> None:
        for reason, why in self.watch.take_refused():
            self.stats.shut_out(why, reason)

    @property
    def pollables(self) -> list[zmq.Socket[bytes]]:
        """The list is empty while no descriptor is free for a listening socket."""
        return [] if self.socket.closed else [self.socket, self.monitor]

    def readable(self) -> bool:
        return any(map(has_input, self.pollables[:1]))

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        route = self._routes.get(peer)
        if route is None:
            self.stats.refused()
            return False
        return send_message(self.socket, (route,), message, frames, self._speaks[peer], self.stats)

    def close(self) -> None:
        self.watch.close()
        close_socket(self.socket, self.monitor)

    def _open(self, parts: list[zmq.Frame]) -> Received | None:
        fd, name, speaker = int(parts[-1].get(zmq.SRCFD)), "a stranger", ""
        try:
            parse_peer(claimed := property_of(parts[-1], NAME_PROPERTY))
            name = claimed
            self._gate.check(name, property_of(parts[-1], USER_PROPERTY))
            self._connections.seen(fd, parts[0].bytes, name)
            speaker = name
            self._routes[name] = max(self._routes.get(name, b""), parts[0].bytes)  # routing ids only rise
            self._speaks[name] = version_of(parts[-1])
            message, frames = decode_parts([part.buffer for part in parts[1:]], self._options.limits)
            check_sender(name, message)
        except WireError as error:
            self.stats.dropped(name, error)
            return None
        finally:
            self.watch.delivered(fd, map(len, parts[1:]), speaker)
        return Received(name, message, frames)

    def _drain(self) -> None:
        for event, value in drain_monitor(self.monitor):
            if event == zmq.EVENT_ACCEPTED:
                self._connections.accepted(value)
                if self._port is not None:
                    self.watch.accepted(value, self._port)
            elif event == zmq.EVENT_DISCONNECTED:
                self._connections.closed(value)
                self.watch.accepted_closed(value)
            elif event in SHUT_OUT:
                self.stats.shut_out(SHUT_OUT[event])
            elif event == LEFT and self._ring is not None:
                self.stats.shut_out(LEFT_EARLY)

    def _forget(self, peer: str) -> None:
        self._routes.pop(peer, None)
        self._speaks.pop(peer, None)
        self._gate.gone(peer)

    # ---- keys that change

    def _follow_keys(self) -> list[str]:
        """Forget the peers whose keys are no longer allowed. Return these peers.

        After a change of a router's own key, return all peers: their connections have ended."""
        ring = self._ring
        if ring is None or self._keys is (now := ring.now):
            self._listen_again()
            return []
        before, self._keys = self._keys, now
        if ring.kind == ROUTER and before is not None and before.own != now.own:
            close_socket(self.socket, self.monitor)  # an unbind alone would keep its connections
            self.watch.forget_accepted()
            self._is_bound = False
            self._listen_again()
            out = list(self._routes)  # their connections ended with the old socket
        else:
            out = self._gate.not_allowed()
        for peer in out:
            self._forget(peer)
        return out

    def _listen_again(self) -> None:
        """Bind again. Binding fails until libzmq has released the address and a descriptor."""
        if self._is_bound:
            return
        try:
            if self.socket.closed:
                self._make_socket()
            self.socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            self._bind_tries += 1
            if self._bind_tries == REPORTED_BIND_TRIES:
                logger.error("can't listen at %s again (%s); will go on trying", self.endpoint, error.strerror)
        else:
            self._is_bound, self._bind_tries = True, 0


class DealerSocket:
    """Dials one endpoint and keeps trying. `name`: the owner's name for the peer. Used by one thread.

    With keys, the peer must hold the key `server`. libzmq gives up after a failed handshake. The owner then calls
    `again`, perhaps with another allowed key.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        name: str,
        endpoint: str,
        identity: str,
        options: LinkOptions,
        stats: WireStats,
        server: bytes = b"",
        watch: Watch | None = None,
    ) -> None:
        check_endpoint(endpoint, "endpoint", has_keys=options.ring is not None)
        self.name = name
        self.endpoint = endpoint
        self.server = server
        self.state = "dialling"  # later "up" or "closed"
        self.has_failed = False
        self._context = context
        self._identity = identity
        self._options = options if name == endpoint or options.brings_pages else replace(options, limits=BY_DECODE)
        self._stats = stats
        self._watch = watch or Watch(options.watch_limits, is_encrypted=options.ring is not None)
        self._connection: WatchedConnection | None = None  # None while the connection isn't watched
        self._events: list[int] = []
        self._connect()

    def again(self, server: bytes) -> None:
        """Open a new socket, with new descriptors; queued messages are lost.

        Raises the constructor's errors. After an error no socket is open until the next call."""
        self.close()
        self.server, self.has_failed = server, False
        self._events.clear()
        self._connect()

    def _connect(self) -> None:
        ring = self._options.ring
        try:
            self.socket, self.monitor = open_monitored(self._context, zmq.DEALER, self._options, DEALER_EVENTS)
        except zmq.ZMQError as error:
            raise PeerUnreachable(f"can't dial {self.endpoint[:200]}: {error.strerror}") from error
        self._reader = PartReader(self.socket, self._options.limits)
        self.socket.setsockopt(zmq.IPV6, is_ipv6(self.endpoint))
        introduce(self.socket, self._identity)
        self._speaks = 0  # until the peer has said its version
        self.own = ring.now.own if ring is not None else None  # the key that the peer sees
        if self.own is not None:
            dial_curve(self.socket, self.own, self.server)
        try:
            self.socket.connect(self.endpoint)
        except zmq.ZMQError as error:  # an ipc path is too long
            self.close()
            raise ConfigError(f"can't dial {self.endpoint[:200]}: {error.strerror}") from error

    def receive(self) -> list[Inbound]:
        """See `RouterSocket.receive`. PeerUp and PeerClosed come last."""
        self._drain()
        inbound: list[Inbound] = []
        budget = Budget()
        while not budget.is_spent:
            parts = self._reader.read()
            if parts is None:
                events, self._events = self._events, []
                return inbound + [change for event in events for change in self._transition(event)]
            budget.take(len(parts[0]))
            if self._connection is not None:
                self._watch.delivered(self._connection.fd, map(len, parts), "")
            if self._reader.is_rest:
                continue
            self._speaks = version_of(parts[-1])
            try:
                message, frames = decode_parts([part.buffer for part in parts], self._options.limits)
                self._check_router(message)
            except WireError as error:
                self._stats.dropped(self.name, error)
                inbound.extend(unreadable(self.name, parts[0].buffer, error))
            else:
                inbound.append(Received(self.name, message, frames))
        return inbound

    def _drain(self) -> None:
        for event, value in drain_monitor(self.monitor):
            if event == zmq.EVENT_CONNECTED:
                self._watch.dialled_closed(self._connection)
                port = tcp_port(self.endpoint)
                self._connection = None if port is None else self._watch.dialled(value, port)
            else:
                self._events.append(event)
                if event == zmq.EVENT_DISCONNECTED:
                    self._end_watch()

    def _end_watch(self) -> None:
        self._watch.dialled_closed(self._connection)
        self._connection = None

    def send(self, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """Before the first connection, the queue keeps up to queue_messages messages."""
        return send_message(self.socket, (), message, frames, self._speaks, self._stats)

    def close(self) -> None:
        self._end_watch()
        close_socket(self.socket, self.monitor)

    def _check_router(self, message: AnyMessage) -> None:
        """Raise Refused if a router claims a name to which its key does not belong."""
        ring = self._options.ring
        if ring is not None and isinstance(message, Welcome) and ring.router_of(self.server) != message.router_id:
            raise Refused(REFUSED_IDENTITY, f"router {message.router_id} does not hold the key that has this name")

    def _transition(self, event: int) -> list[Inbound]:
        if event in SHUT_OUT or (event == LEFT and self._options.ring is not None):
            self.has_failed = True
        state = "up" if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else "closed"
        if state == "up":
            self.has_failed = False
        if state == self.state:
            return []
        self.state = state
        return [PeerUp(self.name)] if state == "up" else [PeerClosed(self.name)]
