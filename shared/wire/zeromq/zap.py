"""Accepts one context's connections by their keys (ZAP, ZeroMQ RFC 27).

The authenticator has its own thread, so a busy loop delays no handshake. This thread also rereads the key files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import zmq

from shared.wire.keys.keyring import KeyRing
from shared.wire.wakeup import Wakeup

logger = logging.getLogger(__name__)
ENDPOINT = "inproc://zeromq.zap.01"
DOMAIN = b"baton"
REFRESH_MS = 500
MAX_LOGGED = 200
VERSION, CURVE = b"1.0", b"CURVE"


class Authenticator:
    """Make the authenticator before the context's first socket is bound: without its answer no peer can connect."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], ring: KeyRing) -> None:
        self._ring = ring
        self._logged: set[tuple[str, str]] = set()
        self._stop = Wakeup()
        self._stopping = False
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(ENDPOINT)
        self._thread = threading.Thread(target=self._run, name="keys", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping = True
        self._stop.set()
        self._thread.join()
        self._stop.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stop.fd, zmq.POLLIN)
        while not self._stopping:
            asked = any(pollable is self._socket for pollable, _ in poller.poll(REFRESH_MS))
            self._ring.refresh()
            if asked:
                self._socket.send_multipart(self.answer(self._socket.recv_multipart()))
        self._socket.close(0)

    def answer(self, request: Sequence[bytes]) -> list[bytes]:
        """libzmq attaches the reply's user id, which is the public key, to the connection's messages."""
        request_id, address, mechanism, credentials = request[1], request[3], request[5], request[6:]
        public = credentials[0] if mechanism == CURVE and len(credentials) == 1 else b""
        if self._ring.node_of(public) is None:
            self._log(address.decode("ascii", "replace"), public)
            return [VERSION, request_id, b"400", b"this key is not allowed", b"", b""]
        return [VERSION, request_id, b"200", b"OK", public.hex().encode(), b""]

    def _log(self, address: str, public: bytes) -> None:
        kind = (address, public.hex())
        if kind not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add(kind)
            owner = self._ring.router_of(public)
            why = f"router {owner}'s, and routers don't dial" if owner else "not an allowed node's"
            logger.warning("refused a connection from %s: key %s is %s (once per address)", address, kind[1][:16], why)
