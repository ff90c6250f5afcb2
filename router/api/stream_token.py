"""The token of a stream: what another router must know to compute the same answer again. Signed, and without text.

created, seed, longest answer, digest of body and prompt, a number of its own   +   HMAC-SHA256, cut to 16 bytes

Routers that share a key file have the same secret, so that any of them reads what another one signed.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import struct
from dataclasses import dataclass
from hashlib import blake2b

from router.api.errors import UnknownStream

LAYOUT = struct.Struct(">BQQI8s16s")
VERSION = 1
MAC_BYTES = 16
PURPOSE = b"baton: tokens of streams"


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """`created`: seconds since 1970. `digest`: of the body as it was understood, and of the prompt's ids."""

    created: int
    seed: int
    max_tokens: int
    digest: bytes
    nonce: bytes


class Signer:
    """Signs tokens and reads them. `api_key` "": with a secret made now, so that no other router reads them."""

    def __init__(self, api_key: str) -> None:
        key = api_key.encode() if api_key else secrets.token_bytes(32)
        self._secret = hmac.digest(key, PURPOSE, "sha256")

    def sign(self, facts: StreamFacts) -> str:
        payload = LAYOUT.pack(VERSION, facts.created, facts.seed, facts.max_tokens, facts.nonce, facts.digest)
        return base64.urlsafe_b64encode(payload + self._mac(payload)).decode().rstrip("=")

    def read(self, token: str) -> StreamFacts:
        """Raise UnknownStream for a token that was not signed with this secret."""
        try:
            raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except ValueError:
            raw = b""
        payload, mac = raw[: LAYOUT.size], raw[LAYOUT.size :]
        if len(payload) < LAYOUT.size or not hmac.compare_digest(mac, self._mac(payload)):
            raise UnknownStream("this router knows no such stream: its token was signed with another key")
        version, created, seed, max_tokens, nonce, digest = LAYOUT.unpack(payload)
        if version != VERSION:
            raise UnknownStream("this router knows no such stream: its token is of another version")
        return StreamFacts(created, seed, max_tokens, digest, nonce)

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._secret, payload, "sha256")[:MAC_BYTES]


def name_of(token: str) -> str:
    """Return what the ids of a stream's answer are made of: the same on every router."""
    return blake2b(token.encode(), digest_size=12).hexdigest()
