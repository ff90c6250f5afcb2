"""TLS between bytes and bytes, so that https is read from the same socket with the same arrival times. No I/O."""

from __future__ import annotations

import ssl

READ_BYTES = 1 << 16


class Tls:
    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def shake_hands(self, received: bytes) -> tuple[bool, bytes]:
        """(whether it is done, what to send). ssl.SSLError when it can't be."""
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
        """What is complete so far. ssl.SSLError for what is not TLS."""
        self._incoming.write(data)
        parts: list[bytes] = []
        try:
            while part := self._object.read(READ_BYTES):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return b"".join(parts)
