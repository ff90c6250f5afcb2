"""Demands of RFC 9110 and 9112 that the other tests of HTTP leave out, on real sockets."""

from __future__ import annotations

import pytest
from starlette.types import Receive, Scope, Send

from router.http.connection import Connection
from router.http.errors import ClientGone, MediaTypeRefused, Unauthorized, error_headers
from tests.support.web.http_site import GET, LIMIT, SLOW_READER_S, Site, answers, dialled, sent, serve, status

LAST = b"Connection: close\r\n\r\n"


class Whole(Site):
    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = Connection(scope, receive, send, SLOW_READER_S)
        body = await connection.body.read(LIMIT)
        names = b" ".join(name for name, _ in scope["headers"])
        await connection.answer(200, b"%d %b" % (len(body), names))


def answer(*parts: bytes) -> bytes:
    return answers(*parts, make=Whole)


def headers_of(got: bytes) -> list[bytes]:
    return got.partition(b"\r\n\r\n")[0].split(b"\r\n")[1:]


def test_an_answer_has_each_header_once() -> None:
    lines = headers_of(answer(GET + LAST))
    names = [line.partition(b":")[0] for line in lines]
    assert len(set(names)) == len(names) and b"date: Sat, 28 Nov 2026 03:00:00 GMT" in lines


def test_a_head_request_has_the_length_of_get() -> None:
    full, empty = answer(GET + LAST), answer(b"HEAD" + GET[3:] + LAST)
    assert headers_of(full)[1:] == headers_of(empty)[1:] and b"content-length: 17" in headers_of(full)
    assert empty.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("version", [b"0.9", b"1.0", b"1.1", b"1.2", b"2.0", b"9.9"])
def test_other_versions_get_an_answer_in_ours(version: bytes) -> None:
    got = answer(b"GET / HTTP/" + version + b"\r\nHost: localhost\r\n" + LAST)
    assert got.startswith(b"HTTP/1.1 200 OK\r\n" if version in (b"1.0", b"1.1") else b"HTTP/1.1 505 ")


def test_trailers_are_no_headers() -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    got = answer(head, b"2\r\nab\r\n", b"0\r\nHost: evil.example\r\nAuthorization: x\r\n\r\n")
    assert status(got) == 200 and got.startswith(b"HTTP/1.1 200") and b"\r\n\r\n2 host" in got
    assert b"authorization" not in got.partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    "framing", [b"Content-Length: 5\r\n\r\nabc", b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n"]
)
def test_a_body_that_ends_early_is_not_served(framing: bytes) -> None:
    async def told(site: Site, port: int) -> None:
        async with dialled(port) as (reader, writer):
            writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\n" + framing)
            writer.write_eof()
            assert await reader.read() == b""

    serve(told, make=Whole)


class Noting(Whole):
    """Notes what ended each request, if not an answer."""

    ends: list[BaseException]

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().app(scope, receive, send)
        except Exception as error:
            self.ends.append(error)


def test_a_client_that_waits_for_100_is_gone_once_it_is_refused() -> None:
    """Nothing can be written any more: the sending side is closed."""
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nTransfer-Encoding: chunked\r\n\r\n"

    async def told(site: Site, port: int) -> None:
        assert isinstance(site, Noting)
        site.ends = []
        got = await sent(port, head + b"no number\r\n")
        assert status(got) == 400 and [type(end) for end in site.ends] == [ClientGone]

    serve(told, make=Noting)


def test_an_answer_without_a_key_names_the_scheme() -> None:
    assert (b"www-authenticate", b"Bearer") in error_headers(Unauthorized("no key"), 1)


def test_a_415_about_a_media_type_lists_no_codings() -> None:
    assert b"accept-encoding" not in dict(error_headers(MediaTypeRefused("no"), 1))
