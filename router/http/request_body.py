"""A request's body, read within limits of time, of size and of all bodies together."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import Receive, Scope

from router.http.body_budget import BodyBudget, BodyHold
from router.http.codings import codings_of
from router.http.decoding import BodyDecoding
from router.http.errors import BodyTimeout, ClientGone
from shared.core.errors import BodyTooLarge

BODY_TIMEOUT_S = 30.0
DROP_S = 30.0  # time for the rest of a body after an early answer
DROP_BYTES = 64 << 20  # and limit on its size
BOM = b"\xef\xbb\xbf"


class RequestBody:
    """`hold` takes bytes from the budget `bodies`. The owner must end it."""

    def __init__(
        self, scope: Scope, receive: Receive, bodies: BodyBudget | None = None, decoding: BodyDecoding | None = None
    ) -> None:
        self._headers = scope["headers"]
        self._receive = receive
        self._decoding = decoding
        self.hold = BodyHold(bodies, (scope.get("client") or ("",))[0])
        self.is_read = False  # whether the whole body was received

    @property
    def is_coming(self) -> bool:
        return not self.is_read and any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)

    async def read(self, limit: int) -> bytes:
        """Return the decoded body, without a byte order mark.

        Raise BodyTooLarge, BodyTimeout, BodiesFull, CodingRefused, InvalidRequest or ClientGone."""
        codings = codings_of(value for name, value in self._headers if name == b"content-encoding")
        raw = await self._raw(limit)
        if codings:
            assert self._decoding is not None
            raw = await self._decoding.decoded(raw, reversed(codings), limit, self.hold)
        return raw.removeprefix(BOM)

    async def _raw(self, limit: int) -> bytes:
        declared = next((value for name, value in self._headers if name == b"content-length"), b"0")
        if declared.isdigit() and int(declared) > limit:
            raise BodyTooLarge(f"the request body is above the limit of {limit} bytes")
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._parts(limit)
        except TimeoutError:
            raise BodyTimeout("the request body did not come in time") from None

    async def _parts(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while not self.is_read:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part, self.is_read = message.get("body", b""), not message.get("more_body", False)
            size += len(part)
            if size > limit:
                raise BodyTooLarge(f"the request body is above the limit of {limit} bytes")
            self.hold.take(len(part))
            parts.append(part)
        return b"".join(parts)

    async def drop_rest(self) -> bool:
        """Read the rest of the body. Return False if it does not end. Raise ClientGone."""
        num_bytes = 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DROP_S):
                while num_bytes <= DROP_BYTES:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    num_bytes += len(message.get("body", b""))
                    if not message.get("more_body", False):
                        return True
        return False
