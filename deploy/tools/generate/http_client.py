"""Send POST requests over reused HTTP/1.1 connections, and read whole answers. The caller retries."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path

import httptools

from deploy.router_http import make_tls
from deploy.router_url import Url

READ_BYTES = 1 << 16
MAX_ANSWER_BYTES = 256 << 20


@dataclass(slots=True)
class HttpAnswer:
    """An answer, which grows as bytes arrive. `headers`: values by lower-case name."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytearray = field(default_factory=bytearray)


class HttpAnswerReader:
    def __init__(self) -> None:
        self.answer = HttpAnswer()
        self.is_over = False
        self.has_begun = False
        self.may_reuse = False
        self._parser = httptools.HttpResponseParser(self)

    def feed_bytes(self, data: bytes) -> None:
        """Parse bytes. Raise OSError if they are not HTTP, or if the answer is too long."""
        self.has_begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise OSError(f"not HTTP: {error.__context__ or error}") from None
        if len(self.answer.body) > MAX_ANSWER_BYTES:
            raise OSError(f"the answer is longer than {MAX_ANSWER_BYTES >> 20} MiB")

    # the HTTP parser calls these methods

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.answer.body += body

    def on_message_complete(self) -> None:
        self.is_over = self.answer.status >= 200  # 100 Continue and similar messages come before the answer
        self.may_reuse = self.is_over and self._parser.should_keep_alive()


@dataclass(slots=True)
class Kept:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class HttpClient:
    """Send any number of requests in parallel, each on its own connection."""

    def __init__(self, url: Url, api_key: str, ca: Path | None) -> None:
        self._url = url
        self._tls = make_tls(ca) if url.scheme == "https" else None
        self._authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: list[Kept] = []

    async def post(self, path: str, body: bytes) -> HttpAnswer:
        """Return the whole answer. Raise OSError if there is none."""
        message = self._head(path, len(body)) + body
        while self._idle:
            reader = HttpAnswerReader()
            try:
                return await self._ask(self._idle.pop(), message, reader)
            except OSError:
                # If no answer has begun, assume that the server had closed this idle connection: try another one.
                if reader.has_begun:
                    raise
        opened = await asyncio.open_connection(self._url.host, self._url.port, ssl=self._tls)
        return await self._ask(Kept(*opened), message, HttpAnswerReader())

    async def close(self) -> None:
        for kept in self._idle:
            kept.writer.close()
        for kept in self._idle:
            with contextlib.suppress(OSError):
                await kept.writer.wait_closed()
        self._idle.clear()

    async def _ask(self, kept: Kept, message: bytes, reader: HttpAnswerReader) -> HttpAnswer:
        try:
            kept.writer.write(message)
            await kept.writer.drain()
            while not reader.is_over:
                data = await kept.reader.read(READ_BYTES)
                if not data:
                    raise ConnectionResetError("the connection closed before the end of the answer")
                reader.feed_bytes(data)
        finally:
            if reader.may_reuse:
                self._idle.append(kept)
            else:
                kept.writer.transport.abort()  # this makes the router stop the request
        return reader.answer

    def _head(self, path: str, length: int) -> bytes:
        first = f"POST {self._url.prefix}{path} HTTP/1.1\r\nHost: {self._url.authority}\r\n"
        kind = f"Content-Type: application/json\r\nContent-Length: {length}\r\n"
        return f"{first}{kind}{self._authorization}\r\n".encode("latin-1")
