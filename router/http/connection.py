"""One HTTP exchange over ASGI: a bounded body (request_body.py), one answer, and the client's hang-up.

An answer that comes before the body's end is sent at once. Then the rest of the body is read and dropped for a while.
If the server closed the connection with unread bytes, the kernel would reset it, and the client would lose the answer.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Callable, Sequence

from starlette.types import Message, Receive, Scope, Send

from router.http.body_budget import BodyBudget
from router.http.decoding import BodyDecoding
from router.http.errors import JSON_TYPE, ClientGone
from router.http.exchanges import SendWhole
from router.http.request_body import RequestBody
from router.tenants.tenant import EVERYBODY, Tenant
from shared.core.errors import BatonError
from shared.core.trace_context import traceparent_of

Header = tuple[bytes, bytes]
SendChunk = Callable[[bytes], bool]  # sends a part of an answer, or returns False if it would have to wait
# names of values in an ASGI scope's `state`
HANG_UP = "hang_up"  # the function that closes the connection
SEND_CHUNK = "send_chunk"  # the SendChunk
REQUEST_ID = b"x-request-id"
TRACEPARENT = b"traceparent"
MAX_ID = 128
UNSAFE = re.compile(r"[^\x21-\x7e]")


class Connection:
    """`status` is None until the headers are sent.

    The handler sets `was_admitted` and `more_headers`. The owner must end `body.hold`.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        slow_reader_s: float,
        bodies: BodyBudget | None = None,
        decoding: BodyDecoding | None = None,
    ) -> None:
        self.scope = scope
        self.status: int | None = None
        self.failure: BatonError | None = None  # a stream's error, raised after the headers were sent
        self.request_id = ""
        self.id_headers: tuple[bytes, ...] = (REQUEST_ID,)
        self.more_headers: dict[bytes, bytes] = {}
        self.tenant: Tenant = EVERYBODY
        self.subject: dict[str, object] = {}  # what an operator's request names, for the log
        self.is_answered = False
        self.was_admitted = False
        self.body = RequestBody(scope, receive, bodies, decoding)
        self._receive = receive
        self._send = send
        self._send_whole: SendWhole | None = getattr(send, "whole", None)
        self._slow_reader_s = slow_reader_s
        self._send_chunk: SendChunk | None = scope.get("state", {}).get(SEND_CHUNK)

    @property
    def trace(self) -> str:
        """The client's W3C traceparent; "" without a valid one."""
        return traceparent_of([value.decode("latin-1") for key, value in self.scope["headers"] if key == TRACEPARENT])

    def name(self, given: str | None) -> None:
        """Use the client's request id, without unsafe characters."""
        safe = UNSAFE.sub("", (given or "")[:MAX_ID])
        self.request_id = safe or self.request_id or f"req-{secrets.token_hex(12)}"

    def header(self, name: bytes) -> str | None:
        values = [value for key, value in self.scope["headers"] if key == name]
        return values[0].decode("latin-1") if values else None

    async def hung_up(self) -> None:
        """Wait until the client closes the connection. Read the body first."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        self.status = status
        await self._out({"type": "http.response.start", "status": status, "headers": self._sent(headers)})

    def _sent(self, headers: Sequence[Header]) -> list[Header]:
        named = [(name, self.request_id.encode()) for name in self.id_headers]
        return [*headers, *named, *self.more_headers.items()]

    async def write(self, data: bytes, *, last: bool = False) -> None:
        """Send a part of the body. An answer with a content-length has one part.

        While the client keeps up, a stream's events bypass the timer and the server's checks."""
        if data and not last and self._send_chunk is not None and self._send_chunk(data):
            return
        self.is_answered = last
        await self._out({"type": "http.response.body", "body": data, "more_body": not last})

    async def answer(self, status: int, data: bytes, headers: Sequence[Header] = (JSON_TYPE,)) -> None:
        headers = [*headers, (b"content-length", str(len(data)).encode())]
        is_early = self.body.is_coming
        if self._send_whole is not None and not is_early and self._send_whole(status, self._sent(headers), data):
            self.status, self.is_answered = status, True
            return
        await self.start(status, headers)
        if is_early:
            await self._out({"type": "http.response.body", "body": data, "more_body": True})
            data = b""
            if not await self.body.drop_rest():
                self._hang_up()
                await self.hung_up()
                raise ClientGone
        await self.write(data, last=True)

    async def _out(self, message: Message) -> None:
        """If the client reads too slowly, hang up and raise ClientGone."""
        try:
            async with asyncio.timeout(self._slow_reader_s):
                await self._send(message)
        except (TimeoutError, OSError):
            self._hang_up()
            raise ClientGone from None

    def unsent(self) -> Unsent:
        """Return an exchange for the same request, which keeps the answer in `data`. Both share `more_headers`."""
        unsent = Unsent(self.scope, self._receive, self._slow_reader_s)
        unsent.tenant, unsent.request_id = self.tenant, self.request_id
        unsent.more_headers = self.more_headers
        return unsent

    def _hang_up(self) -> None:
        hang_up = self.scope.get("state", {}).get(HANG_UP)
        if hang_up is not None:
            hang_up()


class Unsent(Connection):
    def __init__(self, scope: Scope, receive: Receive, slow_reader_s: float) -> None:
        super().__init__(scope, receive, self._keep, slow_reader_s)
        self._send_chunk = None
        self.body.is_read = True  # by the exchange that it was made from
        self.data = b""

    async def _keep(self, message: Message) -> None:
        self.data += message.get("body", b"")
