"""A server of one test: our HTTP protocol on a real socket, with an application that answers with what it read."""

from __future__ import annotations

import asyncio
import contextlib
import io
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.http.connection import Connection
from router.http.errors import ClientGone
from router.http.protocol import HttpRules, LimitedProtocol
from shared.config.settings.http_settings import HttpConfig
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.metrics import RequestMetrics, render
from tests.support.machine.patience import HANG_GUARD_S

LIMIT = 1024
SLOW_READER_S = 0.1
MORE_THAN_BUFFERS = 20 << 20
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"


class Site:
    """A server of one test. `hold`: answers wait for it. `made`: all its connections."""

    def __init__(self, limits: HttpConfig) -> None:
        self.registry = CollectorRegistry()
        self.log = io.StringIO()
        self.state = ServerState()
        self.made: list[weakref.ref[LimitedProtocol]] = []
        self.hold: asyncio.Event | None = None
        self.waits = asyncio.Event()  # somebody waits for its client to go
        self.gone = asyncio.Event()  # and was told
        once = LogOnce(Logger("r", self.log))
        self._rules = HttpRules(limits, RequestMetrics(self.registry), once, 1, SLOW_READER_S)
        self.state.default_headers = [(b"date", b"Sat, 28 Nov 2026 03:00:00 GMT")]  # uvicorn's server sets it
        self._config = uvicorn.Config(
            self.app,
            interface="asgi3",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=limits.keep_alive_s,
        )

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/flood":
            with contextlib.suppress(ClientGone):
                await flood(Connection(scope, receive, send, SLOW_READER_S))
            return
        if scope["path"] == "/stream":
            await stream(Connection(scope, receive, send, SLOW_READER_S))
            return
        if scope["path"] == "/whole":
            await Connection(scope, receive, send, SLOW_READER_S).answer(200, bytes(MORE_THAN_BUFFERS))
            return
        num_bytes, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes, more = num_bytes + len(message["body"]), message["more_body"]
        if scope["path"] == "/wait":
            self.waits.set()
            assert (await receive())["type"] == "http.disconnect"
            self.gone.set()
            return
        if self.hold is not None:
            await self.hold.wait()
        body = str(num_bytes).encode()
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def connection(self) -> LimitedProtocol:
        protocol = LimitedProtocol(self._rules, self._config, self.state, {})
        self.made.append(weakref.ref(protocol))
        return protocol

    def metric(self, code: str) -> bool:
        return f'baton_requests_total{{outcome="{code}"}}' in render(self.registry).decode()


async def stream(connection: Connection) -> None:
    await connection.start(200, [])
    for part in (b"one", b"twelve letters", b""):
        await connection.write(part)
    await connection.write(b"end", last=True)


async def flood(connection: Connection) -> None:
    """More than anybody's buffers hold."""
    await connection.start(200, [])
    while True:
        await connection.write(b"x" * (1 << 20))


Told = Callable[[Site, int], Awaitable[None]]


def serve(told: Told, limits: HttpConfig | None = None, make: type[Site] = Site) -> Site:
    async def main() -> Site:
        site = make(limits or HttpConfig(max_header_bytes=LIMIT, max_headers=8))
        server = await asyncio.get_running_loop().create_server(site.connection, "127.0.0.1", 0)
        async with server, asyncio.timeout(HANG_GUARD_S):
            try:
                await told(site, server.sockets[0].getsockname()[1])
            finally:  # uvloop does not close a loop that has connections: it hangs
                for protocol in list(site.state.connections):
                    protocol.transport.abort()  # type: ignore[union-attr]  # ours
            while site.state.connections:
                await asyncio.sleep(0)
        return site

    try:
        return uvloop.run(main())
    except TimeoutError:
        raise AssertionError("it never happened") from None


def answers(*parts: bytes, limits: HttpConfig | None = None, make: type[Site] = Site) -> bytes:
    """What comes back for these parts until the server hangs up."""
    got = b""

    async def told(site: Site, port: int) -> None:
        nonlocal got
        got = await sent(port, *parts)

    serve(told, limits, make)
    return got


async def sent(port: int, *parts: bytes) -> bytes:
    """All that comes back until the server hangs up; it is told to after a whole answer."""
    async with dialled(port) as (reader, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()


@contextlib.asynccontextmanager
async def dialled(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def until_asked(site: Site) -> None:
    """A request is being answered."""
    while not [one for one in site.state.connections if one.cycle is not None]:  # type: ignore[union-attr]
        await asyncio.sleep(0)


def status(answer: bytes) -> int:
    return int(answer.split()[1]) if answer else 0
