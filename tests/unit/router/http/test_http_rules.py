"""What RFC 9110 and 9112 ask of a server, on real sockets: versions, hosts, targets, framing, upgrades, ends."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import pytest
from starlette.types import Receive, Scope, Send

from router.http import protocol as http_protocol
from router.http.connection import Connection
from router.http.protocol import LINGER_BYTES, MOST_LINGERING
from shared.config.settings.http_settings import HttpConfig
from tests.support.web.http_site import (
    GET,
    LIMIT,
    SLOW_READER_S,
    Site,
    answers,
    dialled,
    sent,
    serve,
    status,
    until_asked,
)

LAST = b"Connection: close\r\n"
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\n"
NEXT = GET + LAST + b"\r\n"
BODIES = {
    "length": b"Content-Length: 5\r\n\r\nhello",
    "chunked": b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\nT: v\r\n\r\n",
}


def in_pieces(data: bytes, size: int) -> list[bytes]:
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


# ---- upgrades


@pytest.mark.parametrize("size", [1, 7, 90, 10_000])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_an_upgrade_is_ignored_and_its_body_read(body: bytes, size: int) -> None:
    """The defect: Java's client asks for h2c, and the parser stopped at the body."""
    got = answers(*in_pieces(POST + UPGRADE + body + POST + UPGRADE + body + NEXT, size))
    assert got.count(b"200 OK") == 3 and got.count(b"\r\n\r\n5HTTP") == 2 and b"upgrade" not in got.lower()


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_an_upgrade_with_its_body_in_a_later_packet(body: bytes) -> None:
    head, _, rest = body.partition(b"\r\n\r\n")

    async def told(site: Site, port: int) -> None:
        async with dialled(port) as (reader, writer):
            writer.write(POST + UPGRADE + head + b"\r\n\r\n")
            await until_asked(site)
            writer.write(rest + NEXT)
            assert (await reader.read()).count(b"200 OK") == 2

    serve(told)


def test_an_upgrade_behind_a_request_waits_for_its_turn() -> None:
    async def told(site: Site, port: int) -> None:
        site.hold = asyncio.Event()
        task = asyncio.create_task(sent(port, POST + BODIES["length"] + POST + UPGRADE + BODIES["length"] + NEXT))
        while not any(getattr(one, "pipeline", ()) for one in site.state.connections):
            await asyncio.sleep(0)
        site.hold.set()
        assert (await task).count(b"\r\n\r\n5HTTP") == 2

    serve(told)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
def test_an_upgrade_without_a_body_is_ignored(version: bytes) -> None:
    head = b"GET / HTTP/" + version + b"\r\nHost: localhost\r\nConnection: close, Upgrade\r\nUpgrade: websocket\r\n\r\n"
    assert status(answers(head)) == 200


# ---- heads

REFUSED = {
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (GET + b"Host: localhost\r\n\r\n", 400),
    "two hosts in 1.0": (b"GET / HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n", 400),
    "bad host": (b"GET / HTTP/1.1\r\nHost: a/b\r\n\r\n", 400),
    "bad port": (b"GET / HTTP/1.1\r\nHost: a:b\r\n\r\n", 400),
    "host with spaces": (b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
    "version 0.9": (b"GET / HTTP/0.9\r\nHost: a\r\n\r\n", 505),
    "version 2.0": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 505),
    "preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "connect": (b"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "connect without port": (b"CONNECT a: HTTP/1.1\r\nHost: a\r\n\r\n", 501),
    "gzip, chunked": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
    "gzip and chunked": (POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
    "chunked twice": (POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n", 400),
    "chunked is not last": (POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n", 400),
    "chunked in 1.0": (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "length and chunked": (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
    "list of lengths": (POST + b"Content-Length: 3, 4\r\n\r\nabc", 400),
    "negative length": (POST + b"Content-Length: -3\r\n\r\nabc", 400),
    "huge length": (POST + b"Content-Length: 99999999999999999999\r\n\r\n", 400),
    "huge chunk": (POST + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n", 400),
    "space before colon": (b"GET / HTTP/1.1\r\nHost : a\r\n\r\n", 400),
    "space before header": (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    "folded line": (GET + b"X: a\r\n b\r\n\r\n", 400),
    "bare CR": (GET + b"X: a\rb\r\n\r\n", 400),
    "NUL": (GET + b"X: a\0b\r\n\r\n", 400),
    "target without host": (b"GET http:///a HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    "target of another scheme": (b"GET ftp://a/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "long target": (b"GET /" + b"a" * LIMIT, 414),
    "long header": (GET + b"X: " + b"a" * LIMIT, 431),
    "long name": (GET + b"X" * LIMIT, 431),
}


@pytest.mark.parametrize(("head", "expected"), REFUSED.values(), ids=REFUSED.keys())
def test_a_head_that_breaks_a_rule_is_refused(head: bytes, expected: int) -> None:
    got = answers(head)
    assert status(got) == expected and b"connection: close" in got and got.count(b"HTTP/1.1 ") == 1
    assert b"\r\ndate: " in got


def test_a_refused_head_request_gets_no_body() -> None:
    got = answers(b"HEAD / HTTP/1.1\r\nHost: a/b\r\n\r\n")
    assert status(got) == 400 and got.endswith(b"\r\n\r\n") and b"content-length: " in got


class Teller(Site):
    """Answers with what it learned from the head."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, receive, send, SLOW_READER_S)
        host, query = connection.header(b"host"), scope["query_string"].decode()
        await connection.answer(200, f"{scope['path']} {query} {host}".encode())


def learned(head: bytes) -> bytes:
    got = answers(head, make=Teller)
    assert status(got) == 200, got
    return got.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (b"http://there.example/a?b=c", b"/a b=c there.example"),
        (b"http://there.example:80", b"/  there.example:80"),
        (b"HTTPS://me:secret@there.example?q", b"/ q there.example"),
        (b"http://[::1]:8/a", b"/a  [::1]:8"),
        (b"/a?b", b"/a b localhost"),
        (b"//a", b"//a  localhost"),
    ],
)
def test_an_absolute_target_has_the_host(target: bytes, expected: bytes) -> None:
    assert learned(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n" + LAST + b"\r\n") == expected


@pytest.mark.parametrize("host", [b"", b"a.example", b"a_b:80", b"127.0.0.1:1", b"[::1]:80", b"a:"])
def test_a_valid_host_is_taken(host: bytes) -> None:
    assert learned(b"GET / HTTP/1.1\r\nHost: " + host + b"\r\n" + LAST + b"\r\n") == b"/  " + host


# ---- HTTP/1.0


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_an_old_client_gets_no_chunks(method: bytes) -> None:
    head, _, body = answers(method + b" /stream HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head and b"connection: close" in head
    assert body == (b"onetwelve lettersend" if method == b"GET" else b"")


def test_an_old_client_gets_whole_answers_with_a_length() -> None:
    head, _, body = answers(b"POST / HTTP/1.0\r\nContent-Length: 5\r\n\r\nhello").partition(b"\r\n\r\n")
    assert b"content-length: 1" in head and body == b"5"


@pytest.mark.parametrize(("version", "is_told"), [(b"1.0", False), (b"1.1", True)])
def test_only_new_clients_are_told_to_continue(version: bytes, is_told: bool) -> None:
    head = POST.replace(b"1.1", version) + LAST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n"
    got = answers(head, b"hello")
    assert got.startswith(b"HTTP/1.1 100 Continue\r\n\r\n") is is_told and got.endswith(b"\r\n\r\n5")


# ---- persistence


def test_a_kept_connection_says_how_long() -> None:
    first, second = answers(GET + b"\r\n" + NEXT, limits=HttpConfig(keep_alive_s=90)).split(b"\r\n\r\n0HTTP")
    assert b"\r\nconnection: keep-alive\r\nkeep-alive: timeout=%d" % 90 in first
    assert b"connection: close" in second and b"keep-alive" not in second


def test_an_idle_connection_is_closed_in_time() -> None:
    assert b"keep-alive: timeout=%d\r\n" % 1 in answers(GET + b"\r\n", limits=HttpConfig(keep_alive_s=1))


def test_nothing_is_served_after_close() -> None:
    assert answers(NEXT + GET + b"\r\n").count(b"HTTP/1.1 ") == 1


def test_answers_come_in_the_order_of_requests() -> None:
    posts = [POST + b"Content-Length: %d\r\n\r\n" % size + b"x" * size for size in (3, 1, 2)]
    got = answers(*posts, NEXT)
    assert [part[:1] for part in got.split(b"\r\n\r\n")[1:]] == [b"3", b"1", b"2", b"0"]


def test_a_server_that_stops_promises_nothing() -> None:
    async def told(site: Site, port: int) -> None:
        site.hold = asyncio.Event()
        task = asyncio.create_task(sent(port, GET + b"\r\n"))
        await until_asked(site)
        for one in site.state.connections:
            one.shutdown()
        site.hold.set()
        got = await task
        assert b"connection: close" in got and b"keep-alive" not in got

    serve(told)


# ---- answers before the body's end


class Early(Site):
    """Answers without reading the body."""

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        await Connection(scope, receive, send, SLOW_READER_S).answer(413, b"too large")


def read_late(port: int, head: bytes, num_bytes: int) -> bytes:
    """Send everything before reading anything, as urllib does. A reset ends it."""
    got = b""
    with socket.create_connection(("127.0.0.1", port)) as client, contextlib.suppress(ConnectionError):
        client.sendall(head)
        for _ in range(num_bytes >> 16):
            client.sendall(bytes(1 << 16))
        while part := client.recv(1 << 16):
            got += part
    return got


@pytest.mark.parametrize("kept", [LAST, b""], ids=["closing", "kept"])
@pytest.mark.parametrize("num_bytes", [1 << 16, 20 << 20])
def test_an_early_answer_is_read_by_who_sends_first(num_bytes: int, kept: bytes) -> None:
    """The defect: the connection was closed with unread bytes, so the kernel reset it."""

    async def told(site: Site, port: int) -> None:
        head = POST + kept + b"Content-Length: %d\r\n\r\n" % num_bytes
        got = await asyncio.to_thread(read_late, port, head, num_bytes)
        assert status(got) == 413 and got.endswith(b"too large")

    serve(told, HttpConfig(keep_alive_s=1), make=Early)


def test_a_connection_serves_on_after_an_early_answer() -> None:
    body = b"Content-Length: 100000\r\n\r\n" + bytes(100_000)
    assert answers(POST + body, POST + LAST + body, make=Early).count(b" 413 ") == 2


@pytest.mark.parametrize(
    ("framing", "begun", "more", "wanted"),
    [
        (b"Content-Length: 5", b"1234", b"5" + POST + b"Host: again\r\n\r\n", b"HTTP/1.1 400 "),
        (b"Transfer-Encoding: chunked", b"4\r\n1234\r\n", b"no size\r\n", b""),
    ],
    ids=["next request", "same body"],
)
def test_bad_http_after_an_early_answer(framing: bytes, begun: bytes, more: bytes, wanted: bytes) -> None:
    """The next request is told why, though the server still reads the first body. One request has one answer."""

    async def told(site: Site, port: int) -> None:
        async with dialled(port) as (reader, writer):
            writer.write(POST + framing + b"\r\n\r\n" + begun)
            await reader.readuntil(b"too large")
            writer.write(more)
            rest = await reader.read()
        assert rest[: len(wanted)] == wanted and bool(rest) == bool(wanted)

    serve(told, make=Early)


def test_an_early_answer_to_who_waits_ends_the_connection() -> None:
    """Nobody can know whether the body will still come."""

    async def told(site: Site, port: int) -> None:
        async with dialled(port) as (reader, writer):
            writer.write(POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n")
            got = await reader.readuntil(b"too large")
        assert status(got) == 413 and b"connection: close" in got and b"keep-alive" not in got

    serve(told, make=Early)


@pytest.mark.parametrize("head", [b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n", GET + b"X: "], ids=["host", "headers"])
def test_a_refusal_is_read_by_who_sends_first(head: bytes) -> None:
    async def told(site: Site, port: int) -> None:
        assert status(await asyncio.to_thread(read_late, port, head, 8 << 20)) in (400, 431)

    serve(told)


def test_who_sends_without_end_is_hung_up_after_a_refusal() -> None:
    async def told(site: Site, port: int) -> None:
        head = b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n"
        assert await asyncio.to_thread(read_late, port, head, 8 * LINGER_BYTES) == b""

    serve(told)


def test_who_stays_after_a_refusal_is_hung_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LINGER_S", 0.1)

    async def told(site: Site, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nHost: a b\r\n\r\n")
        assert status(await reader.read()) == 400
        while site.state.connections:
            await asyncio.sleep(0.01)
        writer.transport.abort()

    serve(told)


def test_one_connection_too_many_is_told_so() -> None:
    """The defect: the request came after the close, so the client saw a reset instead of the 503."""

    async def told(site: Site, port: int) -> None:
        async with dialled(port):
            while not site.state.connections:
                await asyncio.sleep(0)
            for _ in range(20):
                assert status(await asyncio.to_thread(read_late, port, NEXT, 0)) == 503

    serve(told, HttpConfig(max_connections=1))


def test_few_connections_linger_above_the_limit() -> None:
    async def told(site: Site, port: int) -> None:
        ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(MOST_LINGERING + 20)]
        for reader, _ in ends[1:]:
            await reader.read()
        assert len(site.state.connections) <= MOST_LINGERING + 1
        for _, writer in ends:
            writer.transport.abort()

    serve(told, HttpConfig(max_connections=1))
