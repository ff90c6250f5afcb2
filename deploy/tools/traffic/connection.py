"""One connection: a plain socket on the event loop, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

READ_BYTES = 1 << 15
TLS_READ_BYTES = 1 << 16
SO_TIMESTAMPNS = 35  # the option's number on x86 and Arm; the socket module lacks this option
TIMESPEC = struct.Struct("qq")
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESPEC.size)
UNLIKELY_S = 60.0  # a longer delay is taken as a sign that the wall clock was changed


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address, resolved once, so that no run measures name look-ups."""

    family: socket.AddressFamily
    sockaddr: tuple[Any, ...]
    host: str  # the server's certificate must contain this name
    tls: ssl.SSLContext | None = None


class ClientConnection:
    """Serve one request at a time. Between requests, `is_open` becomes false when the server hangs up.

    `on_data` gets (bytes, arrival time by time.monotonic(), seconds since then). `on_end` reports the connection's end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, tls: Tls | None) -> None:
        self._loop, self._sock, self._tls = loop, sock, tls
        self._on_data: Callable[[bytes, float, float], None] | None = None
        self._on_end: Callable[[], None] | None = None
        self._unsent = b""
        self.is_open = True

    def start_reading(self) -> None:
        self._loop.add_reader(self._sock.fileno(), self._readable)

    def listen(self, on_data: Callable[[bytes, float, float], None], on_end: Callable[[], None]) -> None:
        self._on_data, self._on_end = on_data, on_end

    def rest(self) -> None:
        self._on_data = self._on_end = None

    def send(self, data: bytes) -> None:
        self._unsent += self._tls.encrypt(data) if self._tls else data
        self._writable()

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()

    def _writable(self) -> None:
        try:
            self._unsent = self._unsent[self._sock.send(self._unsent) :]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._lost()
            return
        if self._unsent:
            self._loop.add_writer(self._sock.fileno(), self._writable)
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(READ_BYTES, ANCILLARY_BYTES)
            now, late = time.monotonic(), lateness(ancillary)
            text = self._tls.decrypt(data) if self._tls and data else data
        except (BlockingIOError, InterruptedError):
            return
        except OSError:  # also ssl.SSLError
            data = text = b""
        if data and not text:
            return
        if not text or self._on_data is None:  # bytes that answer no request also mean a broken connection
            self._lost()
            return
        self._on_data(text, now if math.isnan(late) else now - late, late)

    def _lost(self) -> None:
        self.close()
        if self._on_end is not None:
            self._on_end()


async def connect(loop: asyncio.AbstractEventLoop, address: Address) -> ClientConnection:
    """Raise OSError on failure."""
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if sys.platform == "linux":  # let the kernel tell when bytes arrive, by the wall clock
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        await loop.sock_connect(sock, address.sockaddr)
        tls = await shake_hands(loop, sock, address) if address.tls else None
    except BaseException:
        sock.close()
        raise
    connection = ClientConnection(loop, sock, tls)
    connection.start_reading()
    return connection


async def shake_hands(loop: asyncio.AbstractEventLoop, sock: socket.socket, address: Address) -> Tls:
    assert address.tls is not None
    tls = Tls(address.tls, address.host)
    is_done, to_send = tls.shake_hands(b"")
    while not is_done:
        await loop.sock_sendall(sock, to_send)
        received = await loop.sock_recv(sock, READ_BYTES)
        if not received:
            raise ConnectionResetError("closed during the TLS handshake")
        is_done, to_send = tls.shake_hands(received)
    if to_send:
        await loop.sock_sendall(sock, to_send)
    return tls


def lateness(ancillary: list[tuple[int, int, bytes]]) -> float:
    """Return the seconds since the newest byte arrived; NaN if unknown."""
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = TIMESPEC.unpack(data)
            late = time.time() - (seconds + nanoseconds * 1e-9)
            return max(0.0, late) if late < UNLIKELY_S else math.nan
    return math.nan


class Tls:
    """Apply TLS to bytes without I/O, so that https and http share their socket code."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def shake_hands(self, received: bytes) -> tuple[bool, bytes]:
        """Return (whether the handshake is done, bytes to send). Raise ssl.SSLError on failure."""
        self._incoming.write(received)
        try:
            self._object.do_handshake()
        except ssl.SSLWantReadError:
            return False, self._outgoing.read()
        return True, self._outgoing.read()

    def encrypt(self, data: bytes) -> bytes:
        self._object.write(data)
        return self._outgoing.read()

    def decrypt(self, data: bytes) -> bytes:
        """Return the bytes decrypted so far. Raise ssl.SSLError for bytes that are not TLS."""
        self._incoming.write(data)
        parts: list[bytes] = []
        try:
            while part := self._object.read(TLS_READ_BYTES):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return b"".join(parts)
