"""One end of a ZMTP 3.1 connection without libzmq and without keys, for what libzmq itself would never send: messages
that do not end, connections that say nothing."""

from __future__ import annotations

import socket
import struct

MORE, LONG, COMMAND = 1, 2, 4
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\x00") + bytes(32)
CURVE_GREETING = GREETING.replace(b"NULL\x00", b"CURVE")  # of a client


class RawPeer:
    """Dials a ROUTER under a name. `silent`: only the TCP connection."""

    def __init__(self, endpoint: str, name: str = "x@1", *, silent: bool = False) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.settimeout(5.0)
        if not silent:
            try:
                self._shake_hands(name)
            except BaseException:
                self.socket.close()
                raise

    def _shake_hands(self, name: str) -> None:
        self.socket.sendall(GREETING)
        self._read(len(GREETING))
        properties = b"".join(map(prop, ("Socket-Type", "X-Peer"), ("DEALER", name)))
        self.frame(b"\x05READY" + properties, COMMAND)
        self._read(2)

    def _read(self, count: int) -> None:
        while count > 0:
            got = self.socket.recv(count)
            if not got:
                raise ConnectionError("the other end has closed the connection")
            count -= len(got)

    def frame(self, body: bytes, flags: int = 0) -> None:
        if len(body) > 255:
            self.socket.sendall(struct.pack(">BQ", flags | LONG, len(body)) + body)
        else:
            self.socket.sendall(bytes((flags, len(body))) + body)

    def part(self, body: bytes) -> None:
        """A part behind which another one follows."""
        self.frame(body, MORE)

    def is_open(self) -> bool:
        """Whether the other end has not closed it yet. What it said is thrown away."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(65536):
                pass
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self.socket.settimeout(5.0)
        return False

    def close(self) -> None:
        self.socket.close()


def prop(name: str, value: str) -> bytes:
    return bytes((len(name),)) + name.encode() + struct.pack(">I", len(value)) + value.encode()
