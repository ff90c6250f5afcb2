"""Fit the library's exchange to clients of HTTP/1.0, and to clients that wait with the body."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


def fitted(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """Return the application for this exchange: usually `app` itself."""
    if cycle.scope["http_version"] == "1.0":
        return without_chunks(cycle, app)
    return closing_early(cycle, app) if cycle.waiting_for_100_continue else app


def without_chunks(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """HTTP/1.0 has no chunks: an answer without a length ends with the connection."""
    cycle.chunked_encoding = False

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_plain(message: Message) -> None:
            cycle.expected_content_length += len(message.get("body", b""))  # the library compares the lengths
            await send(message)

        await app(scope, receive, send_plain)

    return serve


def closing_early(cycle: RequestResponseCycle, app: ASGIApp) -> ASGIApp:
    """If the answer begins before the body was asked for, the client can't know whether it must still send the body."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if cycle.waiting_for_100_continue and not cycle.response_started:
                cycle.keep_alive = False
                cycle.default_headers = [one for one in cycle.default_headers if one[0] not in KEPT_NAMES]
            await send(message)

        await app(scope, receive, send_last)

    return serve


KEPT_NAMES = (b"connection", b"keep-alive")


def kept_headers(keep_alive_s: int) -> list[tuple[bytes, bytes]]:
    """Return the headers that tell a client how long its idle connection stays open."""
    return [(b"connection", b"keep-alive"), (b"keep-alive", b"timeout=%d" % keep_alive_s)]
