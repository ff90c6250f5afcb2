"""Sends and receives one message's parts, without waiting."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import zmq

from shared.wire.codec import Buffer
from shared.wire.peers import WireStats


def send_parts(socket: zmq.Socket[bytes], parts: Sequence[Buffer], stats: WireStats) -> bool:
    """Return False if the queue is full or the peer is unknown.

    pyzmq doesn't copy parts above its copy threshold, so these parts must not change until the peer has them.
    Pages stay pinned until Installed.
    """
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


def property_of(part: zmq.Frame, name: str) -> str:
    """Return "" for a missing property."""
    try:
        return str(part.get(name))
    except (zmq.ZMQError, UnicodeDecodeError):
        return ""
