"""Apply TLS to bytes without I/O, so that https and http share their socket code."""

from __future__ import annotations

import ssl

READ_BYTES = 1 << 16


class Tls:
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
            while part := self._object.read(READ_BYTES):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return b"".join(parts)
