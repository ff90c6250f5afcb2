"""The parts of one message into a socket and out of it, without ever waiting."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import zmq

from shared.wire.codec import Buffer
from shared.wire.peers import WireStats


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
