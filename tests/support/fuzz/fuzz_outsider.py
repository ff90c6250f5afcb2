"""Somebody without a key who reaches the ports between routers and nodes: connections that say nothing, handshakes that
stop or are garbage, wrong keys, messages that never end, whole ones that are huge. One thread per kind."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Mapping, Sequence

import zmq

from tests.support.fuzz.fuzz_hammer import ACT_BYTES, MIB, Aim, Hammer
from tests.support.wire.raw_zmtp import COMMAND, CURVE_GREETING, GREETING, LONG, MORE, RawPeer

MOST_SILENT = 600  # at a time, for each endpoint
SILENT_S = 3.0
PART = bytes(MIB)
NUM_PARTS = (70, 120)  # of whole messages: one that fits what a connection may have unread, and one beyond
GIANTS = (MIB, MIB + 1, 64 * MIB, 64 * MIB + 1)  # at the largest messages of routers and nodes, and one beyond
HELLO = b"\x05HELLO\x01\x00" + bytes(72)  # what a CURVE client says first, up to its key
CURVE_SIZES = (0, 1, 32, 118, 4096, MIB, 64 * MIB)
KEY_WAIT_S = 0.05


class Outsider(Hammer):
    """`servers`: the public key that is known to be at an endpoint. Without one handshakes of CURVE are tried all the
    same. `has_giants`: it sends huge whole messages, too."""

    def __init__(
        self,
        endpoints: Sequence[str],
        servers: Mapping[str, bytes] | None = None,
        seed: int = 1,
        *,
        has_giants: bool = True,
    ) -> None:
        self._servers = servers or {}
        self._rng = random.Random(seed)
        acts = [self._say_nothing, self._never_end, self._stop_early, self._garble_handshake, self._show_wrong_key]
        acts += [self._send_giants, self._send_many_parts] if has_giants else []
        super().__init__(Aim(endpoints), acts)

    def _say_nothing(self, endpoint: str) -> None:
        held: list[RawPeer] = []
        try:
            while len(held) < MOST_SILENT and self.is_meant(endpoint):
                self.spend(ACT_BYTES)
                held.append(RawPeer(endpoint, silent=True))
            self.counts["silent"] += len(held)
            self.pause(SILENT_S)
        finally:
            for peer in held:
                peer.close()

    def _never_end(self, endpoint: str) -> None:
        """Under a name of its own; where keys are needed it does not come so far."""
        peer = RawPeer(endpoint, "outsider@1")
        try:
            while self.is_meant(endpoint):
                self.spend(MIB)
                peer.part(PART)
                self.counts["MiB of messages that never end"] += 1
        except OSError:
            self.counts["cut off"] += 1
        finally:
            peer.close()

    def _stop_early(self, endpoint: str) -> None:
        peer = RawPeer(endpoint, silent=True)
        try:
            peer.socket.sendall(GREETING[: self.counts["early"] % len(GREETING)])
            self.counts["early"] += 1
            self.pause(0.01)
        finally:
            peer.close()

    def _send_giants(self, endpoint: str) -> None:
        size = GIANTS[self.counts["giants"] % len(GIANTS)]
        self.counts["giants"] += 1
        peer = RawPeer(endpoint, "giant@1")
        try:
            peer.socket.sendall(struct.pack(">BQ", LONG, size))
            self._fill(peer, endpoint, size)
        finally:
            peer.close()

    def _fill(self, peer: RawPeer, endpoint: str, size: int) -> None:
        while size > 0 and self.is_meant(endpoint):
            part = PART[:size]
            self.spend(len(part))
            peer.socket.sendall(part)
            size -= len(part)

    def _send_many_parts(self, endpoint: str) -> None:
        num_parts = NUM_PARTS[self.counts["whole messages"] % len(NUM_PARTS)]
        self.counts["whole messages"] += 1
        peer = RawPeer(endpoint, "parts@1")
        try:
            for _ in range(num_parts):
                if not self.is_meant(endpoint):
                    return
                self.spend(MIB)
                peer.frame(PART, MORE)
            peer.frame(b"")
        finally:
            peer.close()

    def _garble_handshake(self, endpoint: str) -> None:
        peer = RawPeer(endpoint, silent=True)
        try:
            peer.socket.sendall(CURVE_GREETING)
            size = CURVE_SIZES[self.counts["garbled handshakes"] % len(CURVE_SIZES)]
            self.counts["garbled handshakes"] += 1
            begin = HELLO if self._rng.random() < 0.5 else b""
            flags = COMMAND if self._rng.random() < 0.7 else self._rng.randrange(256)
            peer.socket.sendall(struct.pack(">BQ", flags | LONG, size) + begin[:size] + os.urandom(min(size, 200)))
            self._fill(peer, endpoint, size - len(begin) - 200)
        finally:
            peer.close()

    def _show_wrong_key(self, endpoint: str) -> None:
        """The server's key is right where it is known; ours is nobody's."""
        context = zmq.Context[zmq.Socket[bytes]]()
        try:
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 0)
            public, secret = zmq.curve_keypair()
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, secret)
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self._servers.get(endpoint, public))
            dealer.connect(endpoint)
            self.counts["wrong keys"] += 1
            self.pause(KEY_WAIT_S)
            dealer.close(0)
        finally:
            context.term()
