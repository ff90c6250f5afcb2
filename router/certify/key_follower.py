"""Read the key that signs certificates again when its file changes. See router/tenants/book.py, which does the same.

file --read on a thread; another key?--> signs all later answers; an unusable file changes nothing
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from router.certify.signing import AnswerSigner, key_id, read_signing_key
from shared.core.errors import ConfigError
from shared.observe.log import Logger

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

FOLLOW_S = 1.0


class SigningKeyFollower:
    """Owned by the event loop. `read_key` may block, so it runs on a thread."""

    def __init__(self, path: str, signer: AnswerSigner, log: Logger) -> None:
        self._path, self._signer, self._log = path, signer, log
        self._complaint = ""

    async def follow(self) -> None:
        while True:
            await asyncio.sleep(FOLLOW_S)
            self.take_key(*await asyncio.to_thread(self.read_key))

    def read_key(self) -> tuple[Ed25519PrivateKey | None, str]:
        """Return the file's key, or None and why the file can't be used."""
        try:
            return read_signing_key(self._path), ""
        except ConfigError as error:
            return None, error.message

    def take_key(self, found: Ed25519PrivateKey | None, complaint: str) -> None:
        if complaint and complaint != self._complaint:
            self._log.warning("the key of certificates stays as it was", why=complaint)
        self._complaint = complaint
        if found is None:
            return
        key = key_id(found.public_key())
        if key != key_id(self._signer.secret.public_key()):
            self._signer.secret = found
            self._log.info("the key of certificates was read again", key=key)
