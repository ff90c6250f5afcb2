"""The shells around the sockets: NodeLinks waits with one poll, RouterLink with asyncio. Neither ever blocks in a send.

    node:   ROUTER (bound, peers dial in)  +  one DEALER per router  +  one DEALER per decode node it hands to
    router: ROUTER (bound, nodes dial in)

Know nothing of what the messages mean.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import zmq

from shared.core.errors import ConfigError
from shared.wire.codec import Buffer
from shared.wire.messages import Message
from shared.wire.peers import Inbound, WireStats, peer_name
from shared.wire.sockets import DealerSocket, LinkOptions, RouterSocket, has_input
from shared.wire.wakeup import Wakeup

DEFAULT_OPTIONS = LinkOptions()


class NodeLinks:
    """All connections of one node, used by its loop's thread only. `wakeup.set` may be called from any thread.

    Peers that dialled in are called `peer_name(node_id, epoch)`; a dialled one as its owner said in `dial`.
    """

    def __init__(
        self, node_id: str, epoch: int, bind: str = "tcp://127.0.0.1:*", options: LinkOptions = DEFAULT_OPTIONS
    ) -> None:
        self.identity = peer_name(node_id, epoch)
        self._options = options
        self._dealers: dict[str, DealerSocket] = {}
        self._context, self._router = open_router(bind, options)
        self._stats = self._router.stats
        self.wakeup = Wakeup()
        self._poller = zmq.Poller()
        for pollable in (self._router.socket, self._router.monitor, self.wakeup.fd):
            self._poller.register(pollable, zmq.POLLIN)

    @property
    def endpoint(self) -> str:
        """Where peers dial this node."""
        return self._router.endpoint

    @property
    def counts(self) -> Counter[str]:
        """wire_dropped, wire_sends_refused."""
        return self._stats.counts

    def dial(self, peer: str, endpoint: str) -> None:
        """Start connecting; PeerUp or PeerClosed follows. Dialling the same peer again changes nothing."""
        if peer in self._dealers:
            return
        dealer = DealerSocket(self._context, peer, endpoint, self.identity, self._options, self._stats)
        self._dealers[peer] = dealer
        self._poller.register(dealer.socket, zmq.POLLIN)
        self._poller.register(dealer.monitor, zmq.POLLIN)

    def hang_up(self, peer: str) -> None:
        """Close a dialled connection; what is still queued for it is lost, and no PeerClosed comes."""
        dealer = self._dealers.pop(peer, None)
        if dealer is not None:
            self._poller.unregister(dealer.socket)
            self._poller.unregister(dealer.monitor)
            dealer.close()

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """False: the queue is full or nobody of that name is there. Never blocks, never raises for a peer's fault."""
        dealer = self._dealers.get(peer)
        return self._router.send(peer, message, frames) if dealer is None else dealer.send(message, frames)

    def poll(self, timeout_s: float) -> list[Inbound]:
        """What happened; waits up to timeout_s for something, or for `wakeup`. 0: just look."""
        ready = {pollable for pollable, _ in self._poller.poll(max(0, round(timeout_s * 1000)))}
        inbound: list[Inbound] = []
        if self.wakeup.fd in ready:
            self.wakeup.clear()
        if self._router.socket in ready or self._router.monitor in ready:
            inbound.extend(self._router.receive())
        for dealer in self._dealers.values():
            if dealer.socket in ready or dealer.monitor in ready:
                inbound.extend(dealer.receive())
        return inbound

    def close(self) -> None:
        """Returns when the I/O thread has let go of every page frame."""
        for peer in list(self._dealers):
            self.hang_up(peer)
        self._router.close()
        self._context.term()
        self.wakeup.close()


class RouterLink:
    """The router's side: one bound ROUTER inside an asyncio (or uvloop) loop. One task receives."""

    def __init__(self, bind: str, options: LinkOptions = DEFAULT_OPTIONS) -> None:
        self._context, self._router = open_router(bind, options)
        self._waiter: asyncio.Future[None] | None = None

    @property
    def endpoint(self) -> str:
        return self._router.endpoint

    @property
    def stats(self) -> WireStats:
        return self._router.stats

    async def receive(self) -> list[Inbound]:
        """The next batch: messages in order, then closed peers."""
        await asyncio.sleep(0)  # a flood of messages must not keep other tasks from running
        while not (batch := self._router.receive()):
            await self._until_readable()
        return batch

    async def __aiter__(self) -> AsyncIterator[Inbound]:
        while True:
            for inbound in await self.receive():
                yield inbound

    def send(self, peer: str, message: Message, frames: Sequence[Buffer] = ()) -> bool:
        """False: the queue is full or nobody of that name is there."""
        sent = self._router.send(peer, message, frames)
        # ZMQ's descriptor is edge-triggered, and a send may swallow the edge of a message that came in meanwhile.
        if self._waiter is not None and self._router.readable():
            self._wake()
        return sent

    def close(self) -> None:
        self._router.close()
        self._context.term()

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        fds = [socket.fileno() for socket in (self._router.socket, self._router.monitor)]
        for fd in fds:
            loop.add_reader(fd, self._wake)
        try:
            # Asking for EVENTS arms the edges; what came before that is seen here.
            if self._router.readable() or has_input(self._router.monitor):
                return
            await self._waiter
        finally:
            self._waiter = None
            for fd in fds:
                loop.remove_reader(fd)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def open_router(bind: str, options: LinkOptions) -> tuple[zmq.Context[zmq.Socket[bytes]], RouterSocket]:
    """A context with a bound ROUTER in it; ConfigError when the address is taken, or not ours to use."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        return context, RouterSocket(context, with_free_port(bind), options)
    except BaseException:
        context.term()
        raise


def with_free_port(endpoint: str) -> str:
    """`tcp://host:*` is `tcp://host:0`: any free port."""
    if endpoint.startswith("tcp://") and endpoint.endswith(":*"):
        return f"{endpoint[:-1]}0"
    if not endpoint:
        raise ConfigError("an empty endpoint")
    return endpoint
