"""Run the HTTP server and what answers its requests on one uvloop.

a stop signal -> new requests get 503 -> open ones may finish for shutdown_s -> the rest get an error -> sockets close
a second signal -> the rest get an error immediately
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from router.http.certificate import Certificate
from router.http.protocol import HttpRules, LimitedProtocol
from router.http.tls_port import HttpsProtocol, PlainHttpRefusal, TlsPort
from shared.config.settings.endpoints import bracketed
from shared.core.errors import BatonError, ConfigError, NoNodes
from shared.core.stop_signals import stop_signals
from shared.observe.log import Logger

CLOSE_TIMEOUT_S = 2
BACKLOG = 1024
POLL_S = 0.05


def bind_http(host: str, port: int) -> socket.socket:
    """Bind before slow work, so that a taken port is reported early. Raise ConfigError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit TCP_NODELAY: a token is smaller than a segment, and must not wait for the next token.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--host {host} --port {port}: can't listen there: {error.strerror}") from error
    listener.setblocking(False)
    return listener


class Answerer(Protocol):
    """What answers requests. While it `is_stopping`, it takes no new ones."""

    is_stopping: bool

    @property
    def node_endpoint(self) -> str: ...

    @property
    def num_open(self) -> int: ...

    async def run(self) -> None:
        """Run until it is cancelled; its end is a crash."""

    def fail_all(self, error: BatonError) -> None: ...


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers: `serve` decides when it stops.

    Without `certificate` it accepts connections itself; else a TlsPort does."""

    def __init__(self, config: uvicorn.Config, rules: HttpRules, certificate: Certificate | None = None) -> None:
        super().__init__(config)
        self._rules, self._certificate = rules, certificate

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._certificate is None:
            await super().startup(sockets)
            return
        await super().startup(sockets=[])
        make = [
            partial(
                kind, self._rules, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            )
            for kind in (HttpsProtocol, PlainHttpRefusal)
        ]
        for listener in sockets or []:
            port: Any = TlsPort(listener, self._certificate, self._rules, self.server_state.connections, *make)
            self.servers.append(port)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_http_server(app: ASGIApp, rules: HttpRules, certificate: Certificate | None = None) -> HttpServer:
    protocol: Any = partial(LimitedProtocol, rules)  # uvicorn expects a class here, and calls it
    config = uvicorn.Config(
        app,
        loop="none",
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # else a client behind a local proxy chooses its address in X-Forwarded-For
        timeout_graceful_shutdown=CLOSE_TIMEOUT_S,
        timeout_keep_alive=rules.limits.keep_alive_s,
    )
    return HttpServer(config, rules, certificate)


async def serve(
    app: ASGIApp,
    rules: HttpRules,
    listener: socket.socket,
    answerer: Answerer,
    log: Logger,
    shutdown_s: float,
    certificate: Certificate | None = None,
) -> int:
    """Serve until a signal or a crash, and return the exit code."""
    stops: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in stop_signals():
        loop.add_signal_handler(number, stops.put_nowait, number)
    server = make_http_server(app, rules, certificate)
    http = asyncio.create_task(server.serve(sockets=[listener]))
    nodes = asyncio.create_task(answerer.run())
    first_stop = asyncio.create_task(stops.get())
    host, port = listener.getsockname()[:2]
    scheme = "http" if certificate is None else "https"
    log.info("serving", url=f"{scheme}://{bracketed(host)}:{port}", nodes=answerer.node_endpoint)
    done, _ = await asyncio.wait({http, nodes, first_stop}, return_when=asyncio.FIRST_COMPLETED)
    crashed = [task for task in (http, nodes) if task in done]
    for task in crashed:
        log.error("a part of the router stopped", error=task.exception() or "no error")
    if not crashed:
        await drain(answerer, log, shutdown_s, stops)
    answerer.fail_all(NoNodes("this server is shutting down"))
    server.should_exit = True
    first_stop.cancel()
    with contextlib.suppress(Exception):  # logged above
        await http
    nodes.cancel()
    with contextlib.suppress(asyncio.CancelledError, Exception):
        await nodes
    return 1 if crashed else 0


async def drain(answerer: Answerer, log: Logger, shutdown_s: float, stops: asyncio.Queue[int]) -> None:
    answerer.is_stopping = True
    log.info("stopping", open_requests=answerer.num_open)
    deadline = asyncio.get_running_loop().time() + shutdown_s
    while answerer.num_open and stops.empty() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(POLL_S)
