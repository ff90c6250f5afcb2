"""A hostile client of the HTTP port: headers, framing, bodies, depth, requests sent ahead, connections without a word.
Every answer that comes is looked at: none may be a 500."""

from __future__ import annotations

import contextlib
import random
import re
import socket
from collections.abc import Callable

from tests.support.fuzz.fuzz_hammer import ACT_BYTES, MIB, Aim, Hammer

NUM_THREADS = 3
MOST_IDLE = 400
IDLE_S = 1.0
READ_S = 0.3
MOST_READ = 1 << 20
PIECE = 64 << 10
PATHS = ("/health", "/ready", "/metrics", "/v1/models", "/tokenize", "/v1/completions", "/v1/chat/completions",
         "/v1/embeddings", "/admin/nodes", "/", "/%00", "/" + "a" * 3000)  # fmt: skip
LENGTHS = ("Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999",
           "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked")  # fmt: skip
STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
FAULTS = (500, 502, 504)  # 501 and 505 name codings and versions of HTTP that are not spoken


class HttpOutsider(Hammer):
    """`api_key`: what half of its requests show; "" where the router has none."""

    def __init__(self, url: str, api_key: str = "", seed: int = 1) -> None:
        self._rng = random.Random(seed)
        self._key = api_key
        self.statuses: set[int] = set()
        self._makers: tuple[Callable[[], bytes], ...] = (
            self._broken_head,
            self._long_head,
            self._many_headers,
            self._two_lengths,
            self._chunked,
            self._long_extension,
            self._trailers,
            self._short_body,
            self._long_body,
            self._deep_body,
            self._wide_body,
            self._ahead,
            self._noise,
        )
        super().__init__(Aim([url]), [self._ask] * NUM_THREADS + [self._say_nothing, self._read_nothing])

    # ---- acts

    def _ask(self, url: str) -> None:
        make = self._rng.choice(self._makers)
        data = make()
        with contextlib.closing(connect(url)) as client:
            for begin in range(0, len(data), PIECE):
                self.spend(min(PIECE, len(data) - begin))
                client.sendall(data[begin : begin + PIECE])
            self.counts[make.__name__.removeprefix("_")] += 1
            self._read(client, make.__name__)

    def _read(self, client: socket.socket, what: str) -> None:
        client.settimeout(READ_S)
        got = b""
        with contextlib.suppress(TimeoutError):
            while len(got) < MOST_READ and (part := client.recv(PIECE)):
                got += part
        for found in STATUS.findall(got):
            self.statuses.add(int(found))
            assert int(found) not in FAULTS, f"{what}: {got[:2000]!r}"

    def _say_nothing(self, url: str) -> None:
        with contextlib.ExitStack() as held:
            for _ in range(MOST_IDLE):
                if not self.is_meant(url):
                    break
                self.spend(ACT_BYTES)
                client = held.enter_context(contextlib.closing(connect(url)))
                client.sendall(b"GET / HTTP/1.1\r\nX: "[: self._rng.randrange(18)])
                self.counts["idle"] += 1
            self.pause(IDLE_S)

    def _read_nothing(self, url: str) -> None:
        with contextlib.closing(socket.socket()) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.settimeout(IDLE_S)
            client.connect(address(url))
            data = self._request("GET", "/metrics") * 30
            while self.is_meant(url):
                self.spend(len(data) + ACT_BYTES)
                client.sendall(data)
                self.counts["unread answers"] += 30

    # ---- requests

    def _headers(self) -> str:
        return f"Authorization: Bearer {self._key}\r\n" if self._key and self._rng.random() < 0.5 else ""

    def _request(self, method: str, path: str, headers: str = "", body: bytes | None = None) -> bytes:
        """With the length of its body, where it has one."""
        length = "" if body is None else f"Content-Length: {len(body)}\r\n"
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n{self._headers()}{length}{headers}\r\n"
        return head.encode() + (body or b"")

    def _post(self, body: bytes) -> bytes:
        return self._request("POST", self._rng.choice(PATHS[4:8]), "Content-Type: application/json\r\n", body)

    def _broken_head(self) -> bytes:
        data = bytearray(self._request(self._rng.choice(["GET", "POST", "HEAD", "X", ""]), self._rng.choice(PATHS)))
        for _ in range(self._rng.choice([1, 2, 8, 40])):
            data[self._rng.randrange(len(data))] = self._rng.randrange(256)
        return bytes(data)

    def _long_head(self) -> bytes:
        size = self._rng.choice([30 << 10, 32 << 10, 33 << 10, MIB])
        end = self._rng.choice(["\r\n", ""])
        return f"GET /health HTTP/1.1\r\nHost: localhost\r\nX: {'x' * size}{end}{end}".encode()

    def _many_headers(self) -> bytes:
        num_headers = self._rng.choice([90, 99, 100, 5000])
        return self._request("GET", "/health", "".join(f"X-{i}: y\r\n" for i in range(num_headers)))

    def _two_lengths(self) -> bytes:
        other = self._rng.choice(LENGTHS)
        return self._request("POST", "/tokenize", f"{other}\r\n", b'{"prompt": "a"}')

    def _chunked(self) -> bytes:
        chunk = self._rng.choice([b"5\r\n{\"a\":\r\n", b"0\r\n\r\n", b"-1\r\n", b"ffffffffffffffff\r\n", b"zz\r\n\r\n",
                                  b"1\r\nx\r\n" * 20_000, b"100000\r\n" + bytes(MIB) + b"\r\n"])  # fmt: skip
        return self._request("POST", "/tokenize", "Transfer-Encoding: chunked\r\n") + chunk * self._rng.choice(
            [1, 3, 8]
        )

    def _long_extension(self) -> bytes:
        head = self._request("POST", "/tokenize", "Transfer-Encoding: chunked\r\n")
        return head + b"1;" + b"x" * self._rng.choice([1000, 70_000, MIB]) + b"\r\n{\r\n"

    def _trailers(self) -> bytes:
        head = self._request("POST", "/tokenize", "Transfer-Encoding: chunked\r\n")
        trailers = b"X: y\r\n" * self._rng.choice([10, 200, 100_000])
        return head + b'f\r\n{"prompt": "a"}\r\n0\r\n' + trailers + self._rng.choice([b"\r\n", b""])

    def _short_body(self) -> bytes:
        """Shorter than it says."""
        data = self._post(b'{"model": "hashlm", "prompt": "%s"}' % (b"a" * self._rng.choice([10, 100_000])))
        return data[: len(data) - self._rng.randrange(1, 30)]

    def _long_body(self) -> bytes:
        size = self._rng.choice([100_000, 4 * MIB - 100, 4 * MIB + 1, 8 * MIB])
        fill = self._rng.choice([b"a", b" ", b"\\u0000"])
        return self._post(b'{"model": "hashlm", "max_tokens": 1, "prompt": "%s"}' % (fill * (size // len(fill))))

    def _deep_body(self) -> bytes:
        depth = self._rng.choice([127, 128, 129, 100_000])
        opens, closes = self._rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
        return self._post(b'{"prompt": "a", "x": ' + opens * depth + b"1" + closes * depth + b"}")

    def _wide_body(self) -> bytes:
        part = self._rng.choice([b"[],", b"{},", b"1,", b'"",'])
        return self._post(b'{"prompt": "a", "x": [' + part * self._rng.choice([49_000, 51_000, 300_000]) + b"1]}")

    def _ahead(self) -> bytes:
        one = self._rng.choice([self._request("GET", "/health"), self._post(b'{"prompt": "a"}'), self._post(b"{")])
        return one * self._rng.choice([2, 31, 33, 300])

    def _noise(self) -> bytes:
        return self._rng.randbytes(self._rng.choice([1, 100, 10_000]))


def connect(url: str) -> socket.socket:
    return socket.create_connection(address(url), timeout=5.0)


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)
