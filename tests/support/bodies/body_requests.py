"""Bodies as HTTP/1.1 requests, some of them framed wrongly. A request is made from a seed and its number alone."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.support.bodies.body_source import BodySource, Table

BIG = 1 << 20  # seldom, a field of this many bytes
ODD_HEADERS = (
    b"Content-Type: text/plain", b"Content-Type: application/json; charset=utf-16", b"Content-Type: \xff",
    b"Content-Encoding: gzip", b"Expect: 100-continue", b"Accept: \xe2\x82\xac", b"Authorization: Bearer \xff\xfe",
    b"Authorization:", b"Cookie: " + b"a=b; " * 500, b"X-" + b"y" * 300 + b": z", b"Connection: keep-alive, x",
    b"traceparent: 00-zz-zz-01", b"Host: again", b"Accept-Encoding: gzip, br;q=nan", b"Range: bytes=-1",
)  # fmt: skip
BAD_LENGTHS = (b"-1", b"+5", b"1e3", b"0x10", b"\xb2", b"9" * 5000, b"99999999999999999999", b"", b"5, 5", b"4 2")
CONTROL = bytes((*range(32), 127))
METHODS = (b"PUT", b"GET", b"DELETE", b"PATCH", b"OPTIONS", b"post")
QUERIES = (b"?", b"?a=%ff", b"?a=\xe9", b"#x", b"/", b"//", b"/%2e%2e/x", b"%00")


class Manner(enum.Enum):
    """How the client goes on once it has sent everything."""

    KEEP = "reads the answer and keeps the connection"
    CLOSE = "sends its end, and reads until the server closes"
    HANG_UP = "closes without reading"


@dataclass(frozen=True, slots=True)
class Request:
    """`owed`: the framing is right, so an answer in JSON or as events must come."""

    index: int
    path: str
    kind: str
    body: bytes
    parts: Sequence[bytes]  # what goes over the wire, in one write each
    manner: Manner = Manner.KEEP
    owed: bool = True

    @property
    def wire(self) -> bytes:
        return b"".join(self.parts)


def make_request(seed: int, index: int, tables: Sequence[Table], model: str) -> Request:
    rng = random.Random((seed << 40) + index)
    table = rng.choice(tables)
    kind, body = BodySource(rng, model).body(table)
    if rng.random() < 0.0005:
        body = b'{"metadata":"' + b"m" * rng.choice((BIG, 5 * BIG)) + b'",' + body[1:]
    return Framer(rng, index, table.path, kind, body).request()


class Framer:
    def __init__(self, rng: random.Random, index: int, path: str, kind: str, body: bytes) -> None:
        self._rng = rng
        self._index = index
        self._path = path
        self._kind = kind
        self._body = body
        self._is_clean = True  # no header that a server may refuse

    def request(self) -> Request:
        """Most requests are plain, for bodies are the subject here."""
        draw = self._rng.random()
        if draw < 0.90:
            return self._made(self._split(self._head(self._length()), self._body))
        if draw < 0.94:
            return self._made([self._head(b"Transfer-Encoding: chunked"), *self._chunks()])
        if draw < 0.96:
            return self._made([self._head(self._length()), self._body], Manner.HANG_UP)
        if draw < 0.98:
            return self._wrong_length()
        if draw < 0.99:
            return self._wrong_chunks()
        return self._wrong_line()

    def _made(self, parts: Sequence[bytes], manner: Manner = Manner.KEEP, *, owed: bool = True) -> Request:
        return Request(self._index, self._path, self._kind, self._body, parts, manner, owed=owed and self._is_clean)

    def _length(self, size: int | None = None) -> bytes:
        return b"Content-Length: %d" % (len(self._body) if size is None else size)

    def _head(self, framing: bytes, method: bytes = b"POST", after_path: bytes = b"") -> bytes:
        target = self._path.encode() + after_path
        lines = [method + b" " + target + b" HTTP/1.1", b"Host: localhost", framing]
        if self._rng.random() < 0.1:
            lines.append(b"X-Request-Id: " + self._odd_id())
        if self._rng.random() < 0.05:
            lines.append(self._rng.choice(ODD_HEADERS))
        else:
            lines.append(b"Content-Type: application/json")
        return b"\r\n".join([*lines, b"", b""])

    def _odd_id(self) -> bytes:
        """Return bytes without a line end. Most of the time they are bytes that a header may have."""
        rng = self._rng
        given = rng.randbytes(rng.choice((0, 1, 16, 128, 129, 3000)))
        if rng.random() < 0.1:
            self._is_clean = not set(given) & set(CONTROL)
            return given.translate(None, b"\r\n")
        return given.translate(None, CONTROL)

    def _split(self, *parts: bytes) -> list[bytes]:
        """One write mostly; now and then the body comes in pieces."""
        whole = b"".join(parts)
        if self._rng.random() < 0.95:
            return [whole]
        place = self._rng.randint(1, len(whole) - 1)
        return [whole[:place], whole[place:]]

    def _chunks(self) -> list[bytes]:
        places = sorted(self._rng.randint(0, len(self._body)) for _ in range(self._rng.choice((0, 1, 5))))
        pieces = [self._body[a:b] for a, b in zip([0, *places], [*places, len(self._body)], strict=True)]
        sized = [b"%x%s\r\n%s\r\n" % (len(piece), self._extension(), piece) for piece in pieces if piece]
        return [b"".join(sized) + b"0\r\n" + self._rng.choice((b"", b"X-Sum: 1\r\n")) + b"\r\n"]

    def _extension(self) -> bytes:
        return self._rng.choice((b"", b"", b";a=b", b';q="x"'))

    def _wrong_length(self) -> Request:
        """Return a Content-Length that is too short, too long, or not a number."""
        rng, size = self._rng, len(self._body)
        draw = rng.randrange(3)
        if draw == 2:
            head = self._head(b"Content-Length: " + rng.choice(BAD_LENGTHS))
        else:
            head = self._head(self._length(rng.randint(0, size) if draw == 0 else size + rng.choice((1, 70, 10**7))))
        return self._made([head, self._body], Manner.CLOSE, owed=False)

    def _wrong_chunks(self) -> Request:
        rng = self._rng
        framing = rng.choice((b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
                              b"Transfer-Encoding: x", b"Content-Length: 5\r\nTransfer-Encoding: chunked"))  # fmt: skip
        wire = bytearray(b"".join(self._chunks()))
        for _ in range(rng.choice((1, 3))):
            wire[rng.randrange(len(wire))] = rng.randrange(256)
        return self._made([self._head(framing), bytes(wire)], Manner.CLOSE, owed=False)

    def _wrong_line(self) -> Request:
        if self._rng.random() < 0.5:
            head = self._head(self._length(), method=self._rng.choice(METHODS))
        else:
            head = self._head(self._length(), after_path=self._rng.choice(QUERIES))
        return self._made([head, self._body], Manner.CLOSE, owed=False)
