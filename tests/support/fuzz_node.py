"""A node that belongs to the cluster, has its key, and says anything to everybody: to routers and nodes that it dials,
and to nodes that dial it. One thread; it answers what it hears, in the same spirit."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import zmq

from shared.wire.key_files import NODE
from shared.wire.keyring import KeyRing
from shared.wire.link import NodeLinks
from shared.wire.link_options import LinkOptions
from shared.wire.messages import Fingerprint, Generate, Heartbeat, Hello, NodeLoad, Offer
from shared.wire.peers import PeerUp, Received
from tests.support.fuzz_messages import MessageSource

BURST = 20
HANG_UP = 0.002  # per burst: connections that come and go
LOAD = NodeLoad(100, {"free": 100}, 8, {"free": 8}, 0, 0, 1, {"steps": 1.0}, {}, {}, "")


class FuzzNode:
    """`prompts`: those of requests that it was given or offered, whose clients can't count on anything."""

    def __init__(
        self, keys: Path, name: str, routers: list[str], nodes: Mapping[str, str], fingerprint: Fingerprint, seed: int
    ) -> None:
        self.prompts: set[tuple[int, ...]] = set()
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._rng = random.Random(seed)
        self._routers, self._nodes, self._fingerprint = routers, dict(nodes), fingerprint
        self._epoch = time.time_ns() // 1000
        self._name = name
        self._links = NodeLinks(name, self._epoch, options=LinkOptions(ring=KeyRing(keys, NODE, name)))
        own = {"node_id": name, "epoch": self._epoch, "source_node": name, "source_epoch": self._epoch,
               "node_endpoint": self._links.endpoint}  # fmt: skip
        self._source = MessageSource(self._rng, own)
        self._connection = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def sent(self) -> int:
        return self.counts["sent"]

    def stop(self) -> None:
        """Its connections close; raises what its thread raised."""
        self._stopping.set()
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            self._dial()
            while not self._stopping.is_set():
                self._round()
        except BaseException as error:
            self.error = error
        finally:
            self._links.close()

    def _dial(self) -> None:
        for endpoint in (*self._routers, *self._nodes):
            self._links.dial(endpoint, self._nodes.get(endpoint, endpoint))

    def _round(self) -> None:
        for inbound in self._links.poll(0.002):
            if isinstance(inbound, PeerUp) and inbound.peer in self._routers:
                self._say_hello(inbound.peer)
            elif isinstance(inbound, Received):
                self._heard(inbound)
        for _ in range(BURST):
            self._say_anything(self._rng.choice([*self._routers, *self._nodes]))
        if self._rng.random() < HANG_UP:
            self._links.hang_up(self._rng.choice([*self._routers, *self._nodes]))
            self.counts["hung up"] += 1
        self._dial()

    def _say_hello(self, router: str) -> None:
        """As a node that fits, so that it is given requests; now and then only, for the others must be served too."""
        self._connection += 1
        role = self._rng.choice(["prefill", "decode"])
        hello = Hello(role, self._name, self._epoch, self._links.endpoint, self._fingerprint, 4096, 8, "h", ["zmq"],
                      self._connection, [])  # fmt: skip
        self._links.send(router, hello)
        draining = self._rng.random() < 0.7
        self._links.send(router, Heartbeat(self._name, self._epoch, LOAD, draining))
        self._source.hear(hello)

    def _heard(self, received: Received) -> None:
        self.counts[f"heard {type(received.message).__name__}"] += 1
        self._source.hear(received.message)
        if isinstance(received.message, Generate | Offer):
            self.prompts.add(tuple(received.message.prompt_ids))
        self._say_anything(received.peer)

    def _say_anything(self, peer: str) -> None:
        if peer in self._links._dealers:
            socket, route = self._links._dealers[peer].socket, []
        else:
            socket, route = self._links._router.socket, [self._links._router._routes.get(peer, b"")]
        try:
            socket.send_multipart([*route, *self._source.parts()], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counts["not sent"] += 1
        else:
            self.counts["sent"] += 1
