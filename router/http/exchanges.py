"""Fit the library's exchange to each client.

Whole answers go out in one write, HTTP/1.0 gets no chunks, and a client that waits with its body learns of the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

Header = tuple[bytes, bytes]
SendWhole = Callable[[int, Sequence[Header], bytes], bool]
KEPT_NAMES = (b"connection", b"keep-alive")


def fitted(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Return the application with a `send` that fits this exchange."""
    send = sender_for(cycle)

    async def serve(scope: Scope, receive: Receive, _: Send) -> None:
        await app(scope, receive, send)

    return serve


def sender_for(cycle: RequestResponseCycle) -> Sender:
    if cycle.scope["http_version"] == "1.0":
        return PlainSender(cycle)
    return WaitingSender(cycle) if cycle.waiting_for_100_continue else WholeSender(cycle)


class Sender:
    """The `send` of one exchange. The exchange does not refer to it, so both are freed without a collection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    async def __call__(self, message: Message) -> None:
        await self._cycle.send(cast(Any, message))  # the library has its own types of the same messages


class WholeSender(Sender):
    def whole(self, status: int, headers: Sequence[Header], body: bytes) -> bool:
        """Send an answer in one write, or return False if it would have to wait. `headers`: with the length."""
        cycle = self._cycle
        if cycle.response_started or cycle.disconnected or cycle.flow.write_paused or cycle.transport.is_closing():
            return False
        head = head_of(status, [*cycle.default_headers, *headers], is_last=not cycle.keep_alive)
        cycle.transport.write(head if cycle.scope["method"] == "HEAD" else head + body)
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True


class PlainSender(Sender):
    """HTTP/1.0 has no chunks: an answer without a length ends with the connection."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        super().__init__(cycle)
        cycle.chunked_encoding = False

    async def __call__(self, message: Message) -> None:
        self._cycle.expected_content_length += len(message.get("body", b""))  # the library compares the lengths
        await super().__call__(message)


class WaitingSender(Sender):
    """Close after an answer that begins before the body was asked for: must the client still send the body?"""

    async def __call__(self, message: Message) -> None:
        cycle = self._cycle
        if cycle.waiting_for_100_continue and not cycle.response_started:
            cycle.keep_alive = False
            cycle.default_headers = [one for one in cycle.default_headers if one[0] not in KEPT_NAMES]
        await super().__call__(message)


def head_of(status: int, headers: Sequence[Header], *, is_last: bool) -> bytes:
    """Raise RuntimeError if a header would break the head."""
    lines = [b"%b: %b\r\n" % header for header in headers]
    head = b"".join([STATUS_LINE[status], *lines, b"connection: close\r\n\r\n" if is_last else b"\r\n"])
    if not head.count(b"\n") == head.count(b"\r") == len(lines) + 2 + is_last or b"\0" in head:
        raise RuntimeError("an answer's header has a line end in it")
    return head
