"""Clients of the openai and anthropic packages whose streams continue when a connection breaks.

    client = resuming(openai.OpenAI(base_url="http://127.0.0.1:8000/v1"))
    for chunk in client.chat.completions.create(..., stream=True): ...

The transport below the client asks for event ids. When a connection breaks, it asks again with Last-Event-ID, and the
client sees one stream: no event is missing, and none comes twice. With a server that sends no ids all is as it was.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, TypeVar

import httpx2

from stream_conformance.client import may_ask_again
from stream_conformance.sse import ContractBroken, Progress

C = TypeVar("C")
TRIES = 30  # failures in a row; an event that arrives begins the count anew
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0


class ResumeRefused(httpx2.TransportError):
    """The stream can't continue: the server refuses, it broke the contract, or it failed too often."""


def resuming(client: C, *servers: str) -> C:
    """Return a copy of an SDK's client whose streams continue. `servers`: others that may be asked after a failure.

    A proxy, certificates or limits of the client's own http_client are not taken over: for those, give the SDK an
    httpx2 client with one of the transports below.
    """
    if inspect.iscoroutinefunction(client.close):  # type: ignore[attr-defined]
        http: Any = httpx2.AsyncClient(transport=AsyncResumingTransport(*servers), follow_redirects=True)
    else:
        http = httpx2.Client(transport=ResumingTransport(*servers), follow_redirects=True)
    return client.copy(http_client=http)  # type: ignore[attr-defined, no-any-return]


class Course:
    """One stream's requests: which server is asked, how long to wait, when to give up. Without input or output."""

    BROKE_OFF = "the stream broke off"

    def __init__(self, request: httpx2.Request, content: bytes, servers: Sequence[str], tries: int) -> None:
        self._request, self._content, self._tries = request, content, tries
        self._urls = [request.url, *(request.url.copy_with(**origin(server)) for server in servers)]
        self.progress = Progress()
        self._failures = self._asked = 0

    def request(self) -> httpx2.Request:
        headers = self._request.headers.copy()
        headers.update({"Accept-Encoding": "identity", **self.progress.headers})
        url = self._urls[self._asked % len(self._urls)]
        if len(self._urls) > 1:
            headers["Host"] = url.netloc.decode()
        return httpx2.Request(
            self._request.method, url, headers=headers, content=self._content, extensions=self._request.extensions
        )

    def take(self, data: bytes) -> bytes:
        """Return the whole events of `data`. Raise ResumeRefused for a gap.

        Comments are left out: behind an event with an id, openai's decoder takes one for an event without data.
        """
        try:
            events = self.progress.take(data)
        except ContractBroken as error:
            raise ResumeRefused(f"the server broke the contract: {error}") from error
        if any(event.id for event in events):
            self._failures = 0
        return b"".join(event.raw for event in events if event.data)

    def goes_on(self, why: httpx2.TransportError | None) -> bool:
        """Whether to ask again after a connection's end. Raise `why` if the connection broke, and that can't help."""
        if self.progress.can_resume:
            return True
        if why is not None and not self.progress.has_ended:
            raise why
        return False

    def failed(self, why: BaseException | str, retry_after: str = "") -> float:
        """Return how long to wait before the next request. Raise ResumeRefused after too many failures in a row."""
        self._asked += 1
        self._failures += 1
        if self._failures > self._tries:
            raise ResumeRefused(f"the stream could not be read to its end: {why}")
        asked = float(retry_after) if retry_after.isdecimal() else 0.0
        pause = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 10))
        return asked + random.uniform(0.5, 1.0) * pause

    def may_read(self, response: httpx2.Response) -> bool:
        """Whether the response is a stream; False: ask again later. Raise ResumeRefused if the server refuses."""
        if response.status_code == 200:
            self.progress.begin()
            return True
        if may_ask_again(response.status_code):
            return False
        raise ResumeRefused(f"status {response.status_code}: this stream can't continue")


def origin(url: str) -> dict[str, Any]:
    parts = httpx2.URL(url)
    return {"scheme": parts.scheme, "host": parts.host, "port": parts.port}


def asks_for_stream(request: httpx2.Request, content: bytes) -> bool:
    if request.method != "POST" or b'"stream"' not in content:
        return False
    try:
        return json.loads(content).get("stream") is True
    except (ValueError, AttributeError):
        return False


def is_stream(response: httpx2.Response) -> bool:
    return response.status_code == 200 and "text/event-stream" in response.headers.get("content-type", "")


def as_one(response: httpx2.Response, stream: Any) -> httpx2.Response:
    return httpx2.Response(200, headers=response.headers, stream=stream, extensions=response.extensions)


class ResumingTransport(httpx2.BaseTransport):
    """`servers`: asked in turn after a failure. `inner`: sends the requests."""

    def __init__(self, *servers: str, inner: httpx2.BaseTransport | None = None, tries: int = TRIES) -> None:
        self._servers, self._tries = servers, tries
        self._inner = inner or httpx2.HTTPTransport()

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        content = request.read()
        if not asks_for_stream(request, content):
            return self._inner.handle_request(request)
        course = Course(request, content, self._servers, self._tries)
        response = self._inner.handle_request(course.request())
        return as_one(response, ResumedStream(self._inner, course, response)) if is_stream(response) else response

    def close(self) -> None:
        self._inner.close()


class ResumedStream(httpx2.SyncByteStream):
    def __init__(self, inner: httpx2.BaseTransport, course: Course, response: httpx2.Response) -> None:
        self._inner, self._course, self._response = inner, course, response

    def __iter__(self) -> Iterator[bytes]:
        course = self._course
        while True:
            why: httpx2.TransportError | None = None
            try:
                for data in self._response.stream:  # type: ignore[union-attr]
                    if taken := course.take(data):
                        yield taken
                    if course.progress.asks_again:
                        break
            except ResumeRefused:
                raise
            except httpx2.TransportError as error:
                why = error
            if not course.goes_on(why):
                return
            self._ask_again(why or course.BROKE_OFF)

    def _ask_again(self, why: BaseException | str) -> None:
        retry_after = ""
        while True:
            self._response.close()
            time.sleep(self._course.failed(why, retry_after))
            try:
                self._response = self._inner.handle_request(self._course.request())
            except httpx2.TransportError as error:
                why, retry_after = error, ""
                continue
            if self._course.may_read(self._response):
                return
            why, retry_after = f"status {self._response.status_code}", self._response.headers.get("retry-after", "")

    def close(self) -> None:
        self._response.close()


class AsyncResumingTransport(httpx2.AsyncBaseTransport):
    """The same for asyncio."""

    def __init__(self, *servers: str, inner: httpx2.AsyncBaseTransport | None = None, tries: int = TRIES) -> None:
        self._servers, self._tries = servers, tries
        self._inner = inner or httpx2.AsyncHTTPTransport()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        content = await request.aread()
        if not asks_for_stream(request, content):
            return await self._inner.handle_async_request(request)
        course = Course(request, content, self._servers, self._tries)
        response = await self._inner.handle_async_request(course.request())
        return as_one(response, AsyncResumedStream(self._inner, course, response)) if is_stream(response) else response

    async def aclose(self) -> None:
        await self._inner.aclose()


class AsyncResumedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncBaseTransport, course: Course, response: httpx2.Response) -> None:
        self._inner, self._course, self._response = inner, course, response

    async def __aiter__(self) -> AsyncIterator[bytes]:
        course = self._course
        while True:
            why: httpx2.TransportError | None = None
            try:
                async for data in self._response.stream:  # type: ignore[union-attr]
                    if taken := course.take(data):
                        yield taken
                    if course.progress.asks_again:
                        break
            except ResumeRefused:
                raise
            except httpx2.TransportError as error:
                why = error
            if not course.goes_on(why):
                return
            await self._ask_again(why or course.BROKE_OFF)

    async def _ask_again(self, why: BaseException | str) -> None:
        retry_after = ""
        while True:
            await self._response.aclose()
            await asyncio.sleep(self._course.failed(why, retry_after))
            try:
                self._response = await self._inner.handle_async_request(self._course.request())
            except httpx2.TransportError as error:
                why, retry_after = error, ""
                continue
            if self._course.may_read(self._response):
                return
            why, retry_after = f"status {self._response.status_code}", self._response.headers.get("retry-after", "")

    async def aclose(self) -> None:
        await self._response.aclose()
