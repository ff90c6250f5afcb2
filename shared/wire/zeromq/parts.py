"""Sends and receives one message's parts, without waiting. Knows what both ends of a connection say of themselves."""

from __future__ import annotations

import errno
from collections.abc import Sequence

import zmq

from shared.wire.codec import Buffer, WireLimits, encode
from shared.wire.messages import Message
from shared.wire.peers import WireStats
from shared.wire.versions import PROTOCOL_VERSION, knows

NAME_PROPERTY = "X-Peer"  # the dialling peer's name
VERSION_PROPERTY = "X-Protocol"
MOST_DIGITS = 9  # Python raises an error for thousands


def introduce(socket: zmq.Socket[bytes], name: str = "") -> None:
    """Let the next handshakes say who this is. Only a peer that dials has a name."""
    if name:
        socket.setsockopt(zmq.METADATA, f"{NAME_PROPERTY}:{name}".encode())
    socket.setsockopt(zmq.METADATA, f"{VERSION_PROPERTY}:{PROTOCOL_VERSION}".encode())


def version_of(part: zmq.Frame) -> int:
    """Return the protocol of a message's sender; 0 if it said none, or no number that could be one."""
    text = property_of(part, VERSION_PROPERTY)
    return int(text) if text.isdecimal() and len(text) <= MOST_DIGITS else 0


def send_message(
    socket: zmq.Socket[bytes],
    route: tuple[bytes, ...],
    message: Message,
    frames: Sequence[Buffer],
    version: int,
    stats: WireStats,
) -> bool:
    """Return False if the queue is full or the peer is unknown. Leave out a message that the peer's version lacks.

    pyzmq doesn't copy parts above its copy threshold, so these parts must not change until the peer has them.
    Pages stay pinned until Installed.
    """
    if not knows(version, type(message).__name__):
        return True
    try:
        socket.send_multipart((*route, encode(message), *frames), flags=zmq.NOBLOCK, copy=False)
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
