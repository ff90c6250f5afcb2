"""Asks Linux about libzmq's TCP connections, by descriptor, and shuts them down.

No function keeps or closes a descriptor of libzmq. Descriptors are reused, so callers remember a connection's inode and
pass it to `Shears.shut_down`.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import termios
import threading
from typing import NamedTuple

INFO_BYTES = 136  # length of struct tcp_info up to and including tcpi_bytes_received (Linux 4.1 and later)
RECEIVED_AT, IDLE_AT = 128, 52  # offsets of tcpi_bytes_received and tcpi_last_data_recv


def inode_of(fd: int, *, own_port: int | None = None, peer_port: int | None = None) -> int | None:
    """Return the inode of the descriptor's TCP connection; None if this connection is closed or has another port."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    except OSError:
        return None
    try:
        if own_port is not None and connection.getsockname()[1] != own_port:
            return None
        if peer_port is not None and connection.getpeername()[1] != peer_port:
            return None
        return os.fstat(fd).st_ino
    except (OSError, IndexError):
        return None
    finally:
        connection.detach()  # the descriptor is libzmq's


class Inflow(NamedTuple):
    """`received`: bytes that TCP has received. `idle_s`: seconds since the last byte."""

    received: int
    idle_s: float


def inflow_of(fd: int) -> Inflow | None:
    """Return None if the connection is closed or not TCP (ipc)."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, fd)
    except OSError:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, INFO_BYTES)
    except OSError:
        return None
    finally:
        connection.detach()
    if len(info) < INFO_BYTES:
        return None
    (received,), (idle_ms,) = struct.unpack_from("=Q", info, RECEIVED_AT), struct.unpack_from("=I", info, IDLE_AT)
    return Inflow(received, idle_ms / 1000)


def bytes_waiting(fd: int) -> int:
    """Count the bytes that TCP has received and libzmq has not read."""
    try:
        return int(struct.unpack("=i", fcntl.ioctl(fd, termios.FIONREAD, bytes(4)))[0])
    except OSError:
        return 0


class Shears:
    """Shuts down connections from any thread, even while no descriptor is free."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._own = os.dup(self._nothing)

    def shut_down(self, fd: int, inode: int) -> bool:
        """Shut down the descriptor's socket if it still has this inode.

        Return False if that socket is closed. The descriptor may then belong to another socket."""
        with self._lock:
            if self._is_closed:
                return False
            try:
                os.dup2(fd, self._own, inheritable=False)  # our copy stays the same socket until the shutdown
                return self._shut_down_own(inode)
            except OSError:
                return False
            finally:
                os.dup2(self._nothing, self._own, inheritable=False)

    def _shut_down_own(self, inode: int) -> bool:
        if os.fstat(self._own).st_ino != inode:
            return False
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, self._own)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
        return True

    def close(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._own)
                os.close(self._nothing)
