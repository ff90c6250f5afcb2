"""A node that belongs to the cluster, has its key where there are keys, and says anything to everybody: to routers and
nodes that it dials, and to nodes that dial it. One thread; it answers what it hears, in the same spirit."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq

from shared.wire.keys.key_files import NODE
from shared.wire.keys.keyring import KeyRing
from shared.wire.messages import Fingerprint, Generate, Heartbeat, Hello, NodeLoad, Offer
from shared.wire.peers import PeerUp, Received
from shared.wire.zeromq.link import NodeLinks
from shared.wire.zeromq.link_options import LinkOptions
from tests.support.fuzz.fuzz_messages import MessageSource

BURST = 20
HANG_UP = 0.002  # per burst: connections that come and go
LOAD = NodeLoad(100, {"free": 100}, 8, {"free": 8}, 0, 0, 1, {"steps": 1.0}, {}, {}, "")


@dataclass(frozen=True, slots=True)
class NodeAim:
    """Whom a fuzzing node dials: routers' endpoints, and nodes by name. With `messages_per_s` it keeps to a pace, and
    is draining, so that it is given no requests: what it then costs others is its messages alone."""

    routers: tuple[str, ...]
    nodes: Mapping[str, str]
    messages_per_s: float = float("inf")

    @property
    def peers(self) -> list[str]:
        return [*self.routers, *self.nodes]


class FuzzNode:
    """`prompts`: those of requests that it was given or offered, whose clients can't count on anything."""

    def __init__(self, keys: Path | None, name: str, aim: NodeAim, fingerprint: Fingerprint, seed: int) -> None:
        """keys: None where the cluster has none."""
        self.prompts: set[tuple[int, ...]] = set()
        self.counts: Counter[str] = Counter()
        self.error: BaseException | None = None
        self._rng = random.Random(seed)
        self._aim = self._next_aim = aim
        self._fingerprint = fingerprint
        self._epoch = time.time_ns() // 1000
        self._name = name
        self._links = NodeLinks(name, self._epoch, options=LinkOptions(ring=keys and KeyRing(keys, NODE, name)))
        self._own: dict[str, Any] = {
            "node_id": name,
            "epoch": self._epoch,
            "source_node": name,
            "source_epoch": self._epoch,
            "node_endpoint": self._links.endpoint,
        }
        self._source = MessageSource(self._rng, self._own)
        self._connection = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def sent(self) -> int:
        return self.counts["sent"]

    @property
    def has_stopped(self) -> bool:
        return self.error is not None or self._stopping.is_set()

    def aim(self, aim: NodeAim) -> None:
        """Hang up on the present peers, and dial those of `aim`. The fuzzer's thread does it in its next round."""
        self._next_aim = aim

    def stop(self) -> None:
        """End the thread and close its connections. Raise what the thread raised."""
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
        for endpoint in self._aim.peers:
            self._links.dial(endpoint, self._aim.nodes.get(endpoint, endpoint))

    def _round(self) -> None:
        self._follow_aim()
        for inbound in self._links.poll(0.002):
            if isinstance(inbound, PeerUp) and inbound.peer in self._aim.routers:
                self._say_hello(inbound.peer)
            elif isinstance(inbound, Received):
                self._heard(inbound)
        for _ in range(BURST):
            self._say_anything(self._rng.choice(self._aim.peers))
        self._stopping.wait(BURST / self._aim.messages_per_s)
        if self._rng.random() < HANG_UP:
            self._links.hang_up(self._rng.choice(self._aim.peers))
            self.counts["hung up"] += 1
        self._dial()

    def _follow_aim(self) -> None:
        if self._aim is not self._next_aim:
            for peer in self._aim.peers:
                self._links.hang_up(peer)
            self._aim = self._next_aim
            if self._is_draining:
                self._own["draining"] = True
            else:
                self._own.pop("draining", None)
            self._dial()

    @property
    def _is_draining(self) -> bool:
        return self._aim.messages_per_s < float("inf")

    def _say_hello(self, router: str) -> None:
        """As a node that fits, so that it is given requests; now and then only, for the others must be served too."""
        self._connection += 1
        role = self._rng.choice(["prefill", "decode"])
        hello = Hello(role, self._name, self._epoch, self._links.endpoint, self._fingerprint, 4096, 8, "h", ["zmq"],
                      self._connection, [])  # fmt: skip
        self._links.send(router, hello)
        draining = self._is_draining or self._rng.random() < 0.7
        self._links.send(router, Heartbeat(self._name, self._epoch, LOAD, draining))
        self._source.hear(hello)

    def _heard(self, received: Received) -> None:
        self.counts[f"heard {type(received.message).__name__}"] += 1
        self._source.hear(received.message)
        if isinstance(received.message, Generate | Offer):
            self.prompts.add(tuple(received.message.prompt_ids))
        self._say_anything(received.peer)

    def _say_anything(self, peer: str) -> None:
        self._say(peer, self._source.parts())

    def _say(self, peer: str, parts: list[bytes]) -> None:
        if peer in self._links._dealers:
            socket, route = self._links._dealers[peer].socket, []
        else:
            socket, route = self._links._router.socket, [self._links._router._routes.get(peer, b"")]
        try:
            socket.send_multipart([*route, *parts], zmq.NOBLOCK)
        except zmq.ZMQError:
            self.counts["not sent"] += 1
        else:
            self.counts["sent"] += 1
            self.counts["bytes"] += sum(map(len, parts))
