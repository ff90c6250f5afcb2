"""What a connection may take before a request is read: bytes, headers, time, and its place among others. Real sockets,
an application that answers with what it read."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from functools import partial
from unittest.mock import Mock

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.server import ServerState

from router.http.protocol import MOST_AHEAD, HttpRules, LimitedProtocol
from shared.config.settings.http_settings import HttpConfig
from tests.support.web.http_site import GET, LIMIT, SLOW_READER_S, Site, answers, dialled, sent, serve, status

WAIT = b"GET /wait HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"


def head_of(num_bytes: int) -> bytes:
    start = GET + b"Connection: close\r\nX: "
    return start + b"x" * (num_bytes - len(start) - 4) + b"\r\n\r\n"


@pytest.mark.parametrize(("num_bytes", "expected"), [(LIMIT, 200), (LIMIT + 1, 431)])
@pytest.mark.parametrize("piece", [LIMIT * 2, 100, 1])
def test_a_head_has_so_many_bytes(num_bytes: int, expected: int, piece: int) -> None:
    async def told(site: Site, port: int) -> None:
        head = head_of(num_bytes)
        assert status(await sent(port, *(head[i : i + piece] for i in range(0, len(head), piece)))) == expected

    site = serve(told)
    assert site.metric("headers_too_large") is (expected == 431)
    assert ("headers_too_large" in site.log.getvalue()) is (expected == 431)


def test_a_header_without_an_end_is_not_kept() -> None:
    answer = answers(GET + b"X: " + b"x" * LIMIT)
    assert status(answer) == 431 and b'"code":"headers_too_large"' in answer


@pytest.mark.parametrize(("number", "expected"), [(8, 200), (9, 431)])
def test_a_request_has_so_many_headers(number: int, expected: int) -> None:
    assert status(answers(GET + b"Connection: close\r\n" + b"a: b\r\n" * (number - 2) + b"\r\n")) == expected


@pytest.mark.parametrize("rest", [b"0\r\nX: " + b"x" * 8 * LIMIT, b"1;" + b"x" * 8 * LIMIT, b"0\r\n" + b"a: b\r\n" * 9])
def test_what_follows_or_frames_a_body_is_no_way_round(rest: bytes) -> None:
    assert status(answers(CHUNKED, rest)) == 431


def test_a_body_in_tiny_chunks_is_read() -> None:
    head = CHUNKED.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    assert answers(head + b"1\r\nx\r\n" * 4 * LIMIT + b"0\r\n\r\n").endswith(str(4 * LIMIT).encode())


def test_many_requests_over_one_connection_are_no_large_head() -> None:
    assert answers((GET + b"\r\n") * 20 + GET + b"Connection: close\r\n\r\n").count(b"200 OK") == 21


@pytest.mark.parametrize("said", [b"", b"GET / HT", GET, b"\r\n"])
def test_a_connection_without_a_whole_head_is_hung_up(said: bytes) -> None:
    async def told(site: Site, port: int) -> None:
        answer = await sent(port, said)
        assert status(answer) == (408 if said else 0)

    assert serve(told, HttpConfig(header_timeout_s=0.1)).metric("header_timeout")


def test_a_head_begun_during_an_answer_is_timed_after_the_answer() -> None:
    async def told(site: Site, port: int) -> None:
        site.hold = asyncio.Event()
        task = asyncio.create_task(sent(port, GET + b"\r\n" + GET))
        await asyncio.sleep(0.3)  # three times a head's time, and the first request is served all the same
        site.hold.set()
        answer = await task
        assert answer.startswith(b"HTTP/1.1 200") and b" 408 " in answer

    serve(told, HttpConfig(header_timeout_s=0.1))


def test_an_idle_connection_that_says_a_little_is_hung_up() -> None:
    """What it says ends uvicorn's own wait for its next request."""

    async def told(site: Site, port: int) -> None:
        async with dialled(port) as (reader, writer):
            writer.write(GET + b"\r\n")
            await reader.readuntil(b"\r\n\r\n0")
            writer.write(b"\r\n")
            assert status(await reader.read()) == 408

    serve(told, HttpConfig(header_timeout_s=0.1))


@pytest.mark.parametrize(("others", "expected"), [(1, 200), (2, 503)])
def test_so_many_connections_are_open(others: int, expected: int) -> None:
    async def told(site: Site, port: int) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(others):
                await stack.enter_async_context(dialled(port))
            while len(site.state.connections) < others:
                await asyncio.sleep(0)
            answer = await sent(port, *([GET + b"Connection: close\r\n\r\n"] if expected == 200 else []))
        assert status(answer) == expected

    assert serve(told, HttpConfig(max_connections=2)).metric("too_many_connections") is (expected == 503)


def most_ahead(site: Site) -> int:
    return max((len(one.pipeline) for one in site.state.connections if isinstance(one, LimitedProtocol)), default=0)


@pytest.mark.parametrize(("ahead", "is_served"), [(MOST_AHEAD, True), (MOST_AHEAD + 1, False)])
def test_so_many_requests_are_sent_ahead(ahead: int, is_served: bool) -> None:
    async def told(site: Site, port: int) -> None:
        site.hold = asyncio.Event()
        task = asyncio.create_task(sent(port, (GET + b"\r\n") * ahead + GET + b"Connection: close\r\n\r\n"))
        while not is_served and not task.done() and most_ahead(site) <= MOST_AHEAD:
            await asyncio.sleep(0)
        site.hold.set()
        assert (await task).count(b"200 OK") == (ahead + 1 if is_served else 0)

    serve(told, HttpConfig(header_timeout_s=30.0))


@pytest.mark.parametrize("refused", [False, True])
def test_a_request_hears_its_client_leave_with_others_behind_it(refused: bool) -> None:
    """The defect: the newest request was told, and the work of the one before it went on to its end."""

    async def told(site: Site, port: int) -> None:
        async with dialled(port) as (_, writer):
            writer.write(WAIT + GET + b"\r\n")
            while not most_ahead(site):
                await asyncio.sleep(0)
            if refused:
                writer.write(b"\x00\r\n\r\n")
                await writer.drain()
            else:
                writer.close()
            await site.gone.wait()

    serve(told)


def test_a_request_hears_its_client_leave_after_a_later_one() -> None:
    """The defect: the library stops reading at the later one."""

    async def told(site: Site, port: int) -> None:
        async with dialled(port) as (_, writer):
            writer.write(WAIT)
            await site.waits.wait()
            writer.write(GET + b"\r\n")
            while not most_ahead(site):
                await asyncio.sleep(0)
            writer.close()
            await site.gone.wait()

    serve(told)


def test_requests_sent_ahead_have_little_body_together() -> None:
    length = HIGH_WATER_LIMIT - 1
    post = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length + bytes(length)

    async def told(site: Site, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(WAIT)
            await site.waits.wait()
            writer.write(post * (MOST_AHEAD - 1))
            (one,) = site.state.connections
            assert isinstance(one, LimitedProtocol)
            while len(one.pipeline) < 2 or not one.flow.read_paused:
                await asyncio.sleep(0)
            assert len(one.pipeline) < MOST_AHEAD / 2
        finally:
            writer.transport.abort()

    serve(told)


@pytest.mark.parametrize("bad", [b"GET http://a:99999/ HTTP/1.1\r\n\r\n", b"\x00\r\n\r\n"], ids=["url", "noise"])
def test_what_is_refused_behind_a_request_is_not_its_answer(bad: bytes) -> None:
    """The defect: a head with a bad URL was answered while the request before it waited for its own answer."""

    async def told(site: Site, port: int) -> None:
        site.hold = asyncio.Event()
        assert await sent(port, GET + b"\r\n" + bad) == b""
        site.hold.set()

    serve(told)


def test_who_reads_nothing_keeps_no_connection() -> None:
    serve_without_a_reader(b"/flood")


@pytest.mark.parametrize("said", [b"", b"Connection: close\r\n"], ids=["kept", "closing"])
def test_who_reads_no_whole_answer_keeps_no_connection(said: bytes) -> None:
    """The defect: only a stream waited for its reader."""
    serve_without_a_reader(b"/whole", said)


def serve_without_a_reader(path: bytes, said: bytes = b"") -> None:
    """Until the connection has gone."""

    async def told(site: Site, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.transport.pause_reading()  # type: ignore[attr-defined]  # of a read transport
            writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + said + b"\r\n")
            while not site.state.connections:
                await asyncio.sleep(0)
            while site.state.connections:
                await asyncio.sleep(0.01)
        finally:
            writer.transport.abort()

    serve(told)


@pytest.mark.parametrize(
    ("sizes", "is_hung_up"),
    [([5, 4, 1, 0], False), ([0], False), ([5, 5], True), ([5, 4, 4], True), ([5, 4, 6], True)],
)
def test_who_reads_an_answer_slowly_keeps_its_connection(sizes: list[int], is_hung_up: bool) -> None:
    """`sizes`: unsent bytes at each look."""
    protocol, transport, timers = watched()
    transport.get_write_buffer_size.side_effect = sizes
    protocol.on_response_complete()
    while timers:
        timers.pop()()
    assert transport.abort.called is is_hung_up
    assert transport.get_write_buffer_size.call_count == len(sizes)


def test_later_answers_are_no_sign_of_a_slow_reader() -> None:
    """The buffer grows although the client reads."""
    protocol, transport, timers = watched()
    transport.get_write_buffer_size.side_effect = [5, 9, 10, 10, 0]
    protocol.on_response_complete()
    protocol._answering = Mock(response_complete=False)
    timers.pop()()
    protocol._answering = Mock(response_complete=True)
    protocol.on_response_complete()
    while timers:
        timers.pop()()
    assert not transport.abort.called


def watched() -> tuple[LimitedProtocol, Mock, list[Callable[[], None]]]:
    """A connection with a complete answer, and its timers."""
    loop, timers = Mock(), list[Callable[[], None]]()

    def call_later(delay: float, call: Callable[..., None], *args: object) -> Mock:
        if delay == SLOW_READER_S:
            timers.append(partial(call, *args))
        return Mock()

    loop.call_later = call_later
    state, app = ServerState(), Mock()
    protocol = LimitedProtocol(
        HttpRules(HttpConfig(), Mock(), Mock(), 1, SLOW_READER_S),
        uvicorn.Config(app, lifespan="off", log_config=None),
        state,
        {},
        loop,
    )
    transport = protocol.transport = Mock()
    transport.is_closing.return_value = True
    protocol._answering = Mock(response_complete=True)
    return protocol, transport, timers


def test_what_is_no_http_gets_json() -> None:
    async def told(site: Site, port: int) -> None:
        answer = await sent(port, b"\x16\x03\x01nonsense\r\n\r\n")
        assert status(answer) == 400 and b'"code":"bad_http"' in answer

    assert serve(told).metric("bad_http")


@pytest.mark.parametrize(
    "said",
    [
        GET + b"\r\n",
        GET + b"a: b\r\n" * 8 + b"\r\n",
        b"\x00\r\n\r\n",
        b"GET http://a:99999/ HTTP/1.1\r\n\r\n",
        CHUNKED + b"no length",
        CHUNKED + b"1\r\na\r\n" + b"0;" + b"a" * 4 * LIMIT,
        WAIT + 3 * (GET + b"\r\n"),
        WAIT + (MOST_AHEAD + 1) * (GET + b"\r\n"),
    ],
    ids=["whole", "headers", "noise", "url", "chunk", "framing", "behind", "ahead"],
)
def test_a_connection_that_closed_leaves_no_garbage(said: bytes) -> None:
    """10,000 connections would otherwise wait for a collection that stops the event loop."""

    async def told(site: Site, port: int) -> None:
        async with dialled(port) as (reader, writer):
            writer.write(said)
            if said.startswith(WAIT):
                while not most_ahead(site) and not writer.transport.is_closing():
                    await asyncio.sleep(0)
            else:
                await reader.read(1)

    gc.disable()
    try:
        assert [protocol() for protocol in serve(told).made] == [None]
    finally:
        gc.enable()
