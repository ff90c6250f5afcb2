"""Sends and receives one message's parts, without waiting."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import zmq

from shared.wire.codec import Buffer, WireLimits
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


class PartReader:
    """Reads messages. An overlong one comes in pieces: its first parts, then each later part alone, with `is_rest`."""

    def __init__(self, socket: zmq.Socket[bytes], limits: WireLimits) -> None:
        self._socket = socket
        self._most_parts = limits.max_frames + 3  # 3: the routing id, the message, and one frame too many
        self._is_inside = self.is_rest = False

    def read(self) -> list[zmq.Frame] | None:
        self.is_rest = self._is_inside
        left = 1 if self.is_rest else self._most_parts
        parts: list[zmq.Frame] = []
        try:
            while left:
                part = self._socket.recv(zmq.NOBLOCK, copy=False)
                parts.append(part)
                left = left - 1 if part.more else 0
        except zmq.Again:
            return None
        self._is_inside = part.more
        return parts


def property_of(part: zmq.Frame, name: str) -> str:
    """Return "" for a missing property."""
    try:
        return str(part.get(name))
    except (zmq.ZMQError, UnicodeDecodeError):
        return ""
