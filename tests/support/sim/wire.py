"""The simulated network: what ZMQ over TCP does to messages, and, in harsh mode, what no network of ours should.

    dealer (dials, keeps trying, queues)  ==== connection: two pipes, in order, lossless while it lives ====  port

A connection has two ends that may disagree about whether it lives. What breaks it loses what is in flight; an end
whose peer is mute for long closes; a new connection under the same name takes over from the old one without a word.
A message that has left in part only when its connection breaks is lost whole, and is not sent again. A dial that
nobody answers is tried for ever; its owner hears of it after `connect_s`. Knows nothing of what messages mean.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shared.config.settings.silence import LinkSilence
from shared.core.errors import WireError
from shared.wire.codec import BY_DECODE, DEFAULT_LIMITS, Buffer, WireLimits, decode_parts, encode
from shared.wire.messages import Message
from shared.wire.peers import Inbound, PeerClosed, PeerUp, Received, check_sender
from shared.wire.unreadable import unreadable
from tests.support.sim.timers import Timers
from tests.support.sim.trace import Trace

LOOKS_PER_PING = 2  # how often an end looks whether the other one still answers
RETRY_S, MAX_RETRY_S = 0.05, 1.0
SYN_AGAIN_S = 1.0
MAX_STRAY_S = 1.5  # harsh: how late a reordered or repeated message may come


@dataclass(eq=False, slots=True)
class Parcel:
    arrives: float
    message: Message
    data: bytes
    frames: tuple[Buffer, ...]
    is_fin: bool = False


@dataclass(eq=False)
class End:
    """One end of a connection. `inbound` is the pipe towards it."""

    port: Port
    peer: str  # what this end's owner calls the other
    is_open: bool = True
    heard: float = 0.0
    inbound: deque[Parcel] = field(default_factory=deque)
    backlog: int = 0  # delivered, not read yet
    last_arrival: float = 0.0


class Conn:
    """near dialled, far accepted."""

    def __init__(self, near: End, far: End, dealer: Dealer, latency: float) -> None:
        self.near, self.far, self.dealer, self.latency = near, far, dealer, latency
        self.has_spoken = False  # the acceptor learns a peer's name for its reports from the first message

    def other(self, end: End) -> End:
        return self.far if end is self.near else self.near

    @property
    def hosts(self) -> frozenset[str]:
        return frozenset((self.near.port.host, self.far.port.host))


@dataclass
class Harshness:
    """Chances per message."""

    drop: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    corrupt: float = 0.0

    @property
    def is_on(self) -> bool:
        return self.drop + self.repeat + self.reorder + self.corrupt > 0


class Network:
    """All hosts, connections and what is wrong with them."""

    def __init__(
        self,
        timers: Timers,
        rng: random.Random,
        trace: Trace,
        silence: LinkSilence,
        limit: int,
        connect_s: float = float("inf"),
    ) -> None:
        """`connect_s`: after so long a dial without an answer is said to be closed, and tried again."""
        self.timers, self.rng, self.trace = timers, rng, trace
        self.silence, self.limit, self.connect_s = silence, limit, connect_s
        self.ports: dict[str, Port] = {}  # endpoint -> who listens there now
        self.conns: list[Conn] = []
        self.blocked: set[frozenset[str]] = set()  # pairs of hosts that can't reach each other
        self.one_way: set[tuple[str, str]] = set()  # (from, to): nothing gets there, while the way back is open
        self.unanswered: set[tuple[str, str]] = set()  # (from, to): dials vanish; connections that are there live
        self.stuffed: set[Conn] = set()  # connections whose queues take nothing more; a new one's are empty
        self.cut_within: set[frozenset[str]] = set()  # pairs whose next message of several parts is cut in the middle
        self.dark: set[str] = set()  # hosts without power: no answer, not even a refusal
        self.extra_latency: dict[frozenset[str], float] = {}
        self.byte_s: dict[frozenset[str], float] = {}  # pair of hosts -> seconds for each byte of a frame
        self.harsh = Harshness()
        self.on_hit: Callable[[str, Message, frozenset[str]], None] = lambda kind, message, hosts: None
        self.on_slow: Callable[[Message, frozenset[str]], None] = lambda message, hosts: None  # its frames delay it
        # what a message becomes on its way, for itself, its bytes and the hosts; None: it is lost
        self.tamper: Callable[[Message, bytes, frozenset[str]], bytes | None] = lambda message, data, hosts: data
        self.on_send: Callable[[Port, str, Message, bool], None] = lambda port, peer, message, sent: None
        self.on_arrival: Callable[[Port, str, Message], None] = lambda port, peer, message: None
        self.events: Counter[str] = Counter()  # what happens to connections, by name
        self.num_delivered = 0
        self._look_s = silence.ping_ms / 1000 / LOOKS_PER_PING
        timers.after(self._look_s, self._beat)

    # ---- weather

    def passes(self, source: str, target: str) -> bool:
        is_blocked = frozenset((source, target)) in self.blocked or (source, target) in self.one_way
        return not is_blocked and not {source, target} & self.dark

    def reachable(self, first: str, second: str) -> bool:
        """There and back, as a handshake needs it."""
        return self.passes(first, second) and self.passes(second, first)

    def heal(self) -> None:
        """Every path is open again and nothing is lost any more; hosts in the dark stay there."""
        for broken in (self.blocked, self.one_way, self.unanswered, self.cut_within, self.stuffed):
            broken.clear()
        self.extra_latency.clear()
        self.byte_s.clear()
        self.harsh = Harshness()
        self.kick()

    def kick(self) -> None:
        for conn in list(self.conns):
            for end in (conn.near, conn.far):
                self._deliver(conn, end)

    def latency(self, conn: Conn) -> float:
        return conn.latency * self.rng.uniform(0.5, 2.0) + self.extra_latency.get(conn.hosts, 0.0)

    def _beat(self) -> None:
        """ZMTP heartbeats and TCP resets, seen by each end at its own time."""
        for conn in list(self.conns):
            for end in (conn.near, conn.far):
                if end.is_open and not end.port.is_frozen:
                    self._look(conn, end)
        self.timers.after(self._look_s * self.rng.uniform(0.8, 1.2), self._beat)

    def _look(self, conn: Conn, end: End) -> None:
        other, now = conn.other(end), self.timers.now
        if self.reachable(*self._pair(conn)) and not other.is_open and not end.inbound:
            self.close(conn, end, "was reset")
            return
        if self.passes(other.port.host, end.port.host) and other.is_open and not other.port.is_frozen:
            end.heard = now
        if now - end.heard > self.rng.uniform(self.silence.shortest_s, self.silence.longest_s):
            self.close(conn, end, "has heard nothing for too long")

    @staticmethod
    def _pair(conn: Conn) -> tuple[str, str]:
        return conn.near.port.host, conn.far.port.host

    # ---- connections

    def connect(self, dealer: Dealer) -> None:
        """One attempt; the dealer tries again by itself."""
        port = dealer.port
        if dealer.is_over or port.is_dead:
            return
        listener = self.ports.get(dealer.endpoint)
        host = listener.host if listener is not None else self._host_of(dealer.endpoint)
        if port.is_frozen or not self._answers(port.host, host):
            self._no_answer(dealer)  # a SYN is lost; the next one may not be
        elif listener is None or listener.is_dead:
            dealer.changed("closed")
            self.timers.after(dealer.next_retry(), lambda: self.connect(dealer))
        else:
            delay = self.rng.uniform(0.0005, 0.01)
            self.timers.after(delay, lambda: self._established(dealer, listener))

    def _answers(self, dialler: str, host: str) -> bool:
        return self.reachable(dialler, host) and (dialler, host) not in self.unanswered

    def _no_answer(self, dealer: Dealer) -> None:
        self.events["dial never answered"] += dealer.silent_s == 0.0
        dealer.silent_s += SYN_AGAIN_S
        if dealer.silent_s > self.connect_s:
            dealer.silent_s = 0.0
            dealer.changed("closed")
        self.timers.after(SYN_AGAIN_S, lambda: self.connect(dealer))

    def _host_of(self, endpoint: str) -> str:
        return endpoint.partition("//")[2].partition(":")[0]

    def _established(self, dealer: Dealer, listener: Port) -> None:
        if dealer.is_over or dealer.port.is_dead:
            return
        if listener.is_dead or not self._answers(dealer.port.host, listener.host):
            self.connect(dealer)
            return
        if listener.is_frozen:  # no handshake
            self.timers.after(SYN_AGAIN_S, lambda: self.connect(dealer))
            return
        now = self.timers.now
        near, far = End(dealer.port, dealer.name, heard=now), End(listener, dealer.port.identity, heard=now)
        conn = Conn(near, far, dealer, self.rng.choice((0.0002, 0.001, 0.004)))
        before = listener.accepted.get(far.peer)
        if before is not None and before.far.is_open:  # hand-over: the old one ends without a report
            self.events["connection taken over"] += 1
            before.far.is_open = False
            before.far.inbound.clear()
        listener.accepted[far.peer] = conn
        self.conns.append(conn)
        dealer.opened(conn)

    def close(self, conn: Conn, end: End, why: str, *, says_goodbye: bool = True) -> None:
        """This end gives the connection up. Of what it had sent, some may still arrive, then the other end knows."""
        if not end.is_open:
            return
        other = conn.other(end)
        self.trace.note(self.timers.now, end.port.name, f"connection to {end.peer} {why}")
        end.is_open = False
        end.inbound.clear()
        unsent = self._cut(other)
        if says_goodbye and other.is_open:
            self._push(conn, other, Parcel(0.0, FIN, b"", (), is_fin=True))
        if end is conn.near:
            conn.dealer.lost(unsent)
        else:
            end.port.lost(conn)
        if not other.is_open:
            self._bury(conn)

    def _cut(self, other: End) -> list[Parcel]:
        """How far what is on its way had come: the first ones will arrive, of the others some were never sent. The
        first of these may be half out: both ends drop it."""
        parcels = list(other.inbound)
        arrive = self.rng.randint(0, len(parcels))
        unsent = self.rng.randint(arrive, len(parcels))
        other.inbound = deque(parcels[:arrive])
        if unsent < len(parcels) and parcels[unsent].frames and self.rng.random() < 0.5:
            self.events["half a message dropped"] += 1
            unsent += 1
        return [parcel for parcel in parcels[unsent:] if not parcel.is_fin]

    def _bury(self, conn: Conn) -> None:
        if conn in self.conns:
            self.conns.remove(conn)

    # ---- messages

    def send(self, conn: Conn, end: End, message: Message, frames: Sequence[Buffer]) -> bool:
        """Towards `end`. False: its queue is full."""
        if len(end.inbound) + end.backlog >= self.limit or conn in self.stuffed:
            self.events["full queue"] += 1
            return False
        late = self.rng.random() < 0.5 and not self.harsh.is_on  # frames are views: libzmq may read them late
        data = self.tamper(message, encode(message), conn.hosts)
        if data is None:
            return True
        parcel = Parcel(0.0, message, data, tuple(frames) if late else tuple(map(bytes, frames)))
        if self.harsh.is_on and self._strays(conn, end, parcel):
            return True
        self._push(conn, end, parcel)
        if frames and conn.hosts in self.cut_within:
            self._cut_in_the_middle(conn, end, parcel)
        return True

    def _cut_in_the_middle(self, conn: Conn, end: End, parcel: Parcel) -> None:
        """What came before it arrives; of this one only a part has left. The sender knows it a moment later."""
        self.cut_within.discard(conn.hosts)
        end.inbound.remove(parcel)
        self.events["half a message dropped"] += 1
        self.timers.after(0.0, lambda: self.close(conn, conn.other(end), "was cut within a message"))

    def _push(self, conn: Conn, end: End, parcel: Parcel) -> None:
        frames_s = self.byte_s.get(conn.hosts, 0.0) * sum(memoryview(frame).nbytes for frame in parcel.frames)
        parcel.arrives = end.last_arrival = max(end.last_arrival, self.timers.now + self.latency(conn) + frames_s)
        end.inbound.append(parcel)
        if frames_s:
            self.on_slow(parcel.message, conn.hosts)
        self.timers.at(parcel.arrives, lambda: self._deliver(conn, end))

    def _strays(self, conn: Conn, end: End, parcel: Parcel) -> bool:
        """Harsh mode: lost, repeated, late or damaged, message by message."""
        harsh, rng = self.harsh, self.rng
        if rng.random() < harsh.drop:
            self.on_hit("drop", parcel.message, conn.hosts)
            self.trace.note(self.timers.now, end.port.name, f"FAULT lost, from {end.peer}:", parcel.message)
            return True
        if parcel.frames and rng.random() < harsh.corrupt:
            self.on_hit("corrupt", parcel.message, conn.hosts)
            self.trace.note(self.timers.now, end.port.name, f"FAULT damaged, from {end.peer}:", parcel.message)
            parcel.frames = (damaged(parcel.frames[0], rng), *parcel.frames[1:])
        if rng.random() < harsh.repeat:
            self.on_hit("repeat", parcel.message, conn.hosts)
            self.timers.after(rng.uniform(0, MAX_STRAY_S), lambda: self._hand(conn, end, parcel, "again"))
        if rng.random() < harsh.reorder:
            self.on_hit("reorder", parcel.message, conn.hosts)
            self.timers.after(rng.uniform(0, MAX_STRAY_S), lambda: self._hand(conn, end, parcel, "late"))
            return True
        return False

    def _deliver(self, conn: Conn, end: End) -> None:
        """Everything of this pipe that has come by now."""
        while end.is_open and end.inbound and end.inbound[0].arrives <= self.timers.now:
            if not self.passes(conn.other(end).port.host, end.port.host):
                return
            parcel = end.inbound.popleft()
            if parcel.is_fin:
                self.close(conn, end, "was closed by the other end")
                return
            self._hand(conn, end, parcel, "")

    def _hand(self, conn: Conn, end: End, parcel: Parcel, how: str) -> None:
        if end.port.is_dead:
            return
        end.heard = self.timers.now
        end.backlog += 1
        self.num_delivered += 1
        self.trace.note(self.timers.now, end.port.name, f"<- {end.peer} {how}", parcel.message)
        self.on_arrival(end.port, end.peer, parcel.message)
        end.port.arrived(conn, end, parcel)


FIN = Message()


def damaged(frame: Buffer, rng: random.Random) -> bytes:
    data = bytearray(frame)
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


class Dealer:
    """One dialled peer of a port. `state` is what its owner was told last."""

    def __init__(self, port: Port, name: str, endpoint: str, *, brings_pages: bool = False) -> None:
        self.port, self.name, self.endpoint = port, name, endpoint
        self.brings_pages = brings_pages
        self.state = "dialling"
        self.is_over = False
        self.conn: Conn | None = None
        self.queue: deque[tuple[Message, tuple[Buffer, ...]]] = deque()
        self.inbox: list[tuple[Conn, End, Parcel]] = []
        self._changes: list[Inbound] = []
        self._retry_s = RETRY_S
        self.silent_s = 0.0  # so long nobody answers

    def next_retry(self) -> float:
        self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        return self._retry_s

    def changed(self, state: str) -> None:
        if state != self.state and not self.is_over:
            self.state = state
            self._changes.append(PeerUp(self.name) if state == "up" else PeerClosed(self.name))
            self.port.wake()

    def opened(self, conn: Conn) -> None:
        self.conn, self._retry_s, self.silent_s = conn, RETRY_S, 0.0
        self.changed("up")
        while self.queue:
            message, frames = self.queue.popleft()
            self.port.net.send(conn, conn.far, message, frames)

    def lost(self, unsent: Sequence[Parcel]) -> None:
        """The connection is gone; what had not left waits for the next one."""
        self.conn = None
        if self.is_over or self.port.is_dead:
            return
        self.queue.extend((parcel.message, parcel.frames) for parcel in unsent)
        self.changed("closed")
        self.port.net.timers.after(RETRY_S, lambda: self.port.net.connect(self))

    def send(self, message: Message, frames: Sequence[Buffer]) -> bool:
        if self.conn is not None:
            return self.port.net.send(self.conn, self.conn.far, message, frames)
        if len(self.queue) >= self.port.net.limit:
            return False
        self.queue.append((message, tuple(map(bytes, frames))))
        return True

    def poll(self) -> list[Inbound]:
        inbox, self.inbox = self.inbox, []
        changes, self._changes = self._changes, []
        limits = DEFAULT_LIMITS if self.brings_pages or self.name == self.endpoint else BY_DECODE
        return [*opened(inbox, self.name, checks=False, limits=limits), *changes]

    def close(self) -> None:
        self.is_over = True
        if self.conn is not None:
            self.port.net.close(self.conn, self.conn.near, "was hung up")


class Port:
    """What one process (one life of it) has of the network: NodeLinks and RouterLink in one. Never blocks."""

    def __init__(self, net: Network, host: str, identity: str, endpoint: str, wake: Callable[[], None]) -> None:
        self.net, self.host, self.identity, self.endpoint = net, host, identity, endpoint
        self.name = identity
        self.wake = wake
        self.is_dead = False
        self.is_frozen = False
        self.was_refused = False
        self.told_gone: set[str] = set()  # peers reported as closed that have not been heard or dialled since
        self.lost_dials: set[str] = set()  # peers whose dialled connection was reported as closed and has not come back
        self.accepted: dict[str, Conn] = {}
        self._dealers: dict[str, Dealer] = {}
        self._inbox: list[tuple[Conn, End, Parcel]] = []
        self._gone: list[Conn] = []
        self._speaking: set[Conn] = set()
        net.ports[endpoint] = self

    @property
    def wakeup(self) -> Port:
        return self

    def set(self) -> None:
        self.wake()

    def dial(self, peer: str, endpoint: str, *, brings_pages: bool = False) -> None:
        if peer not in self._dealers:
            self.told_gone.discard(peer)
            self.lost_dials.discard(peer)
            self._dealers[peer] = Dealer(self, peer, endpoint, brings_pages=brings_pages)
            self.net.connect(self._dealers[peer])

    def hang_up(self, peer: str) -> None:
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            dealer.close()

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, back: bool = False) -> bool:
        sent = self._send(peer, message, frames, back=back)
        self.net.on_send(self, peer, message, sent)
        if not sent:
            self.net.trace.note(self.net.timers.now, self.name, f"can't send to {peer}:", message)
            self.was_refused = True
            self.wake()
        return sent

    def _send(self, peer: str, message: Message, frames: Sequence[Buffer], *, back: bool) -> bool:
        dealer = None if back else self._dealers.get(peer)
        if dealer is not None:
            return dealer.send(message, frames)
        conn = self.accepted.get(peer)
        return conn is not None and conn.far.is_open and self.net.send(conn, conn.near, message, frames)

    def poll(self, timeout_s: float = 0.0) -> list[Inbound]:
        """Accepted connections first: their messages, then who is gone; then the dialled ones, each the same."""
        inbox, self._inbox = self._inbox, []
        self._speaking.update(conn for conn, _, _ in inbox)
        inbound = [item for entry in inbox for item in opened([entry], entry[1].peer, checks=True)]
        gone, self._gone = self._gone, []
        heard = {conn for conn, _, _ in inbox}
        self._speaking = {conn for conn in self._speaking if conn.far.is_open}
        still = {conn.far.peer for conn in self._speaking}
        for conn in gone:
            if (conn.has_spoken or conn in heard) and conn.far.peer not in still:
                inbound.append(PeerClosed(conn.far.peer, accepted=True))
        for conn in heard:
            conn.has_spoken = True
        for dealer in list(self._dealers.values()):
            inbound.extend(dealer.poll())
        for item in inbound:
            self._tell(item)
        return inbound

    def _tell(self, item: Inbound) -> None:
        """A message may come over the other connection: it tells nothing of the dialled one."""
        if isinstance(item, PeerClosed):
            self.told_gone.add(item.peer)
            if not item.accepted:
                self.lost_dials.add(item.peer)
            return
        self.told_gone.discard(item.peer)
        if isinstance(item, PeerUp):
            self.lost_dials.discard(item.peer)

    def arrived(self, conn: Conn, end: End, parcel: Parcel) -> None:
        if end is conn.far:
            self._inbox.append((conn, end, parcel))
        elif not conn.dealer.is_over:
            conn.dealer.inbox.append((conn, end, parcel))
        self.wake()

    def lost(self, conn: Conn) -> None:
        if self.accepted.get(conn.far.peer) is conn:
            del self.accepted[conn.far.peer]
        self._gone.append(conn)
        self.wake()

    def thaw(self) -> None:
        """The time in which it was frozen is no silence of the others."""
        self.is_frozen = False
        for conn in self.connections():
            for end in (conn.near, conn.far):
                end.heard = self.net.timers.now if end.port is self else end.heard

    def die(self, *, in_the_dark: bool) -> None:
        """kill -9: the system closes every connection. In the dark nobody is told."""
        self.is_dead = True
        for conn in list(self.net.conns):
            for end in (conn.near, conn.far):
                if end.port is self:
                    self.net.close(conn, end, "died with its process", says_goodbye=not in_the_dark)

    def connections(self) -> list[Conn]:
        return [conn for conn in self.net.conns if self in (conn.near.port, conn.far.port)]


def opened(
    inbox: Sequence[tuple[Conn, End, Parcel]], name: str, *, checks: bool, limits: WireLimits = DEFAULT_LIMITS
) -> list[Inbound]:
    """Decoded and checked as the sockets do it."""
    inbound: list[Inbound] = []
    for _, end, parcel in inbox:
        end.backlog -= 1
        try:
            message, frames = decode_parts((parcel.data, *map(bytes, parcel.frames)), limits)
            if checks:
                check_sender(name, message)
        except WireError as error:
            if parcel.data == encode(parcel.message):
                raise AssertionError(f"{name} sent what its peer can't read: {error.message}") from error
            inbound.extend(unreadable(name, parcel.data, error))
            continue
        inbound.append(Received(name, message, frames))
    return inbound
