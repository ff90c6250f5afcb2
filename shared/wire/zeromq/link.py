"""Owns the sockets of a node or router. NodeLinks waits in one poll call, and RouterLink waits in asyncio. Sends never
block.

node:   ROUTER (bound, peers dial in)  +  one DEALER per router and per node that it dials
router: ROUTER (bound, nodes dial in)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import zmq

from shared.core.errors import ConfigError, PeerUnreachable
from shared.wire.codec import Buffer
from shared.wire.messages import Message
from shared.wire.peers import Inbound, PeerClosed, WireStats, peer_name
from shared.wire.wakeup import Wakeup
from shared.wire.zeromq.dialling import Dialling
from shared.wire.zeromq.link_options import LinkOptions
from shared.wire.zeromq.monitor import has_input
from shared.wire.zeromq.publisher import Publisher
from shared.wire.zeromq.sockets import DealerSocket, RouterSocket
from shared.wire.zeromq.zap import Authenticator

DEFAULT_OPTIONS = LinkOptions()
LOOK_S = 0.5  # an idle router looks for changed keys and refused connections after this time
MAX_SOCKETS = 65_535  # per context; libzmq's default is 1,023, and a dialled peer takes three sockets
Context = zmq.Context[zmq.Socket[bytes]]


class NodeLinks:
    """One node's connections, used by its loop's thread. Any thread may call `wakeup.set`.

    A peer that dialled in is named `peer_name(node_id, epoch)`. The caller of `dial` names a dialled peer.
    """

    def __init__(
        self, node_id: str, epoch: int, bind: str = "tcp://127.0.0.1:*", options: LinkOptions = DEFAULT_OPTIONS
    ) -> None:
        self.identity = peer_name(node_id, epoch)
        self._options = options
        self._dealers: dict[str, DealerSocket] = {}
        self._waiting: set[str] = set()  # routers to dial once a router's key is allowed
        self._dialling = Dialling(options.ring)
        self._publishers: list[Publisher] = []
        self._context, self._authenticator, self._router = open_router(bind, options)
        self._stats, self._watch = self._router.stats, self._router.watch
        self.wakeup = Wakeup()
        self._poller = zmq.Poller()
        for pollable in (*self._router.pollables, self.wakeup.fd):
            self._poller.register(pollable, zmq.POLLIN)

    @property
    def endpoint(self) -> str:
        """Return the address that peers dial, with this node's key if there are keys."""
        return self._router.address

    @property
    def counts(self) -> Counter[str]:
        """Return wire_dropped, wire_sends_refused and wire_refused.<reason>."""
        return self._stats.counts

    def dial(self, peer: str, endpoint: str, *, brings_pages: bool = False) -> None:
        """Start connecting; PeerUp or PeerClosed follows. Dialling a peer again changes nothing.

        `brings_pages`: the peer's answers may have page frames. Raises ConfigError for a peer that must not be dialled,
        and PeerUnreachable for a node if no descriptor is left. A router is dialled later if no descriptor is left or
        no router's key is allowed.
        """
        if peer in self._dealers:
            return
        address, server = self._dialling.choose(peer, endpoint)
        if server is None:
            self._waiting.add(peer)
            return
        self._waiting.discard(peer)
        try:
            dealer = DealerSocket(
                self._context,
                peer,
                address,
                self.identity,
                replace(self._options, brings_pages=brings_pages),
                self._stats,
                server,
                self._watch,
            )
        except PeerUnreachable:
            if peer != endpoint:
                raise
            self._dialling.later(peer)
            return
        self._dealers[peer] = dealer
        self._watch_events(dealer)

    def open_publisher(self, endpoint: str, topic: str) -> Publisher:
        """Return a socket for subscribers, which closes with the links. Raise ConfigError."""
        self._publishers.append(Publisher(endpoint, topic))
        return self._publishers[-1]

    def hang_up(self, peer: str) -> None:
        """Close a dialled connection without a PeerClosed. Queued messages are lost."""
        dealer = self._dealers.pop(peer, None)
        self._waiting.discard(peer)
        self._dialling.forget(peer)
        if dealer is not None:
            self._unwatch(dealer)
            dealer.close()

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = (), *, back: bool = False) -> bool:
        """Return False if the queue is full or the peer is unknown. Never raise an error that a peer caused.

        `back`: send only over the connection that the peer dialled.
        """
        dealer = None if back else self._dealers.get(peer)
        return self._router.send(peer, message, frames) if dealer is None else dealer.send(message, frames)

    def poll(self, timeout_s: float) -> list[Inbound]:
        """Wait up to timeout_s for events or `wakeup`."""
        ready = {pollable for pollable, _ in self._poller.poll(max(0, round(timeout_s * 1000)))}
        inbound = self._follow_keys()
        if self.wakeup.fd in ready:
            self.wakeup.clear()
        if self._router.socket in ready or self._router.monitor in ready:
            inbound.extend(self._router.receive())
        for dealer in self._dealers.values():
            if dealer.socket in ready or dealer.monitor in ready:
                inbound.extend(dealer.receive())
                self._dialling.note(dealer)
        inbound.extend(self._dial_again(self._dialling.due()))
        self._router.note_refused()
        return inbound

    def _follow_keys(self) -> list[Inbound]:
        """If keys changed, close connections with outdated keys, and redial their peers where allowed."""
        if not self._dialling.keys_changed():
            return []
        inbound = self._router.receive()
        stale = [dealer for dealer in self._dealers.values() if self._dialling.is_stale(dealer)]
        inbound.extend(PeerClosed(dealer.name) for dealer in stale if dealer.state == "up")
        for dealer in stale:
            dealer.state = "closed"
        inbound.extend(self._dial_again([dealer.name for dealer in stale]))
        for peer in list(self._waiting):
            self.dial(peer, peer)
        return inbound

    def _dial_again(self, peers: Sequence[str]) -> list[Inbound]:
        """Return PeerClosed for nodes that can't or must not be dialled."""
        gone: list[Inbound] = []
        for peer in peers:
            if peer not in self._dealers:  # no descriptor was free for this router
                self.dial(peer, peer)
        for dealer in [self._dealers[peer] for peer in peers if peer in self._dealers]:
            server = self._dialling.next_key(dealer)
            if server is not None and self._open_again(dealer, server):
                continue
            self.hang_up(dealer.name)
            if dealer.name == dealer.endpoint:
                self._waiting.add(dealer.name)
            else:
                gone.append(PeerClosed(dealer.name))
        return gone

    def _open_again(self, dealer: DealerSocket, server: bytes) -> bool:
        """If no descriptor is free, return False for a node, and dial a router later."""
        self._unwatch(dealer)
        try:
            dealer.again(server)
        except PeerUnreachable:
            del self._dealers[dealer.name]
            if dealer.name != dealer.endpoint:
                return False
            self._dialling.later(dealer.name)
        else:
            self._watch_events(dealer)
        return True

    def _watch_events(self, dealer: DealerSocket) -> None:
        self._poller.register(dealer.socket, zmq.POLLIN)
        self._poller.register(dealer.monitor, zmq.POLLIN)

    def _unwatch(self, dealer: DealerSocket) -> None:
        self._poller.unregister(dealer.socket)
        self._poller.unregister(dealer.monitor)

    def close(self) -> None:
        """Close, and wait until the I/O thread has released every page frame."""
        for peer in list(self._dealers):
            self.hang_up(peer)
        for publisher in self._publishers:
            publisher.close()
        close_router(self._context, self._authenticator, self._router)
        self.wakeup.close()


class RouterLink:
    """One bound ROUTER in an asyncio (or uvloop) loop. Only one task may call `receive`."""

    def __init__(self, bind: str, options: LinkOptions = DEFAULT_OPTIONS) -> None:
        self._context, self._authenticator, self._router = open_router(bind, options)
        self._waiter: asyncio.Future[None] | None = None

    @property
    def endpoint(self) -> str:
        return self._router.endpoint

    @property
    def stats(self) -> WireStats:
        return self._router.stats

    async def receive(self) -> list[Inbound]:
        """Return the next batch: messages in order, then closed peers."""
        while True:
            await asyncio.sleep(0)  # lets other tasks run, even in a flood of messages that are all dropped
            if batch := self._router.receive():
                return batch
            await self._until_readable()

    async def __aiter__(self) -> AsyncIterator[Inbound]:
        while True:
            for inbound in await self.receive():
                yield inbound

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        sent = self._router.send(peer, message, frames)
        # The descriptor is edge-triggered, and a send may use up the edge that reports a new message.
        if self._waiter is not None and self._router.readable():
            self._wake()
        return sent

    def close(self) -> None:
        close_router(self._context, self._authenticator, self._router)

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        fds = [socket.fileno() for socket in self._router.pollables]
        for fd in fds:
            loop.add_reader(fd, self._wake)
        look = loop.call_later(LOOK_S, self._wake)
        try:
            # Reading EVENTS rearms the descriptor, and shows input that came earlier.
            if any(map(has_input, self._router.pollables)):
                return
            await self._waiter
        finally:
            self._waiter = None
            look.cancel()
            for fd in fds:
                loop.remove_reader(fd)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def open_router(bind: str, options: LinkOptions) -> tuple[Context, Authenticator | None, RouterSocket]:
    """Raise ConfigError if the address is in use or not this machine's."""
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    authenticator = None
    try:
        endpoint = with_free_port(bind)
        authenticator = Authenticator(context, options.ring) if options.ring is not None else None
        router = RouterSocket(context, endpoint, options)
        router.watch.start()
        return context, authenticator, router
    except BaseException:
        close_router(context, authenticator, None)
        raise


def close_router(context: Context, authenticator: Authenticator | None, router: RouterSocket | None) -> None:
    if router is not None:
        router.close()
    if authenticator is not None:
        authenticator.close()
    context.term()


def with_free_port(endpoint: str) -> str:
    """Turn `tcp://host:*` into `tcp://host:0`, which means any free port."""
    if endpoint.startswith("tcp://") and endpoint.endswith(":*"):
        return f"{endpoint[:-1]}0"
    if not endpoint:
        raise ConfigError("an empty endpoint")
    return endpoint
