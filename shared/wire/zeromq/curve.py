"""Sets up CURVE on a socket."""

from __future__ import annotations

import zmq

from shared.wire.keys.key_files import KeyPair
from shared.wire.zeromq.zap import DOMAIN


def serve_curve(socket: zmq.Socket[bytes], pair: KeyPair) -> None:
    """Accept only peers that the authenticator allows. Without an authenticator accept no peer."""
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, pair.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, pair.secret)
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def dial_curve(socket: zmq.Socket[bytes], own: KeyPair, server: bytes) -> None:
    """Connect with our own key, and only to the holder of the secret key of `server`."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server)
