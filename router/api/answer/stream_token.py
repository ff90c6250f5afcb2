"""Sign and read a stream's token. With this token any router can recompute the answer. The token contains no text.

version, created, seed, longest answer, nonce, digest of body and prompt, sampling   +   HMAC-SHA256, cut to 16 bytes

Routers with the same key file read each other's tokens.
"""

from __future__ import annotations

import base64
import hmac
import secrets
import struct
from dataclasses import astuple, dataclass, fields
from hashlib import blake2b

from router.http.errors import UnknownStream
from shared.core.sampling_params import BY_NAME, SamplingValues

CODES = {int: "I", float: "d"}
LAYOUT = struct.Struct(">BQQI8s16s" + "".join(CODES[BY_NAME[one.name].kind] for one in fields(SamplingValues)))
VERSION = 2
MAC_BYTES = 16
PURPOSE = b"baton: tokens of streams"


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """`created`: seconds since 1970. `digest` covers body and prompt ids. `sampling`: with the first router's defaults,
    because another router may have others."""

    created: int
    seed: int
    max_tokens: int
    digest: bytes
    nonce: bytes
    sampling: SamplingValues


class Signer:
    """`secret`: shared by the cluster's routers. If it is "", the Signer draws a secret."""

    def __init__(self, secret: str) -> None:
        key = secret.encode() if secret else secrets.token_bytes(32)
        self._secret = hmac.digest(key, PURPOSE, "sha256")

    def sign(self, facts: StreamFacts) -> str:
        head = (VERSION, facts.created, facts.seed, facts.max_tokens, facts.nonce, facts.digest)
        payload = LAYOUT.pack(*head, *astuple(facts.sampling))
        return base64.urlsafe_b64encode(payload + self._mac(payload)).decode().rstrip("=")

    def read(self, token: str) -> StreamFacts:
        """Raise UnknownStream for a token that was not signed with this secret."""
        try:
            raw = base64.urlsafe_b64decode(token + "=" * (-len(token) % 4))
        except ValueError:
            raw = b""
        payload, mac = raw[:-MAC_BYTES], raw[-MAC_BYTES:]
        if not payload or not hmac.compare_digest(mac, self._mac(payload)):
            raise UnknownStream("this router knows no such stream: its token was signed with another key")
        if payload[0] != VERSION or len(payload) != LAYOUT.size:
            raise UnknownStream("this router knows no such stream: its token is of another version")
        _, created, seed, max_tokens, nonce, digest, *sampling = LAYOUT.unpack(payload)
        return StreamFacts(created, seed, max_tokens, digest, nonce, SamplingValues(*sampling))

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._secret, payload, "sha256")[:MAC_BYTES]


def name_of(token: str) -> str:
    return blake2b(token.encode(), digest_size=12).hexdigest()
