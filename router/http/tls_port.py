"""Accept connections for TLS. The HTTP protocol gets a connection once its handshake is over.

accepted --first byte--> a TLS handshake --> HTTP      plain HTTP: 400      silent or failed: hung up, and counted

Handshakes count as open connections, and each has the time that a request's headers have. Above the limit the oldest
handshake ends, so that silent clients keep no others out.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sized
from functools import partial
from typing import cast

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT

from router.http.certificate import Certificate
from router.http.errors import PlainHttp, TlsFailed, TlsTimeout, TooManyConnections
from router.http.protocol import LINGER_S, MOST_LINGERING, HttpRules, LimitedProtocol
from shared.core.errors import BatonError

HANDSHAKE = 0x16  # the first byte that a TLS client sends
MOST_AT_ONCE = 64  # accepted before other work gets a turn
REST_S = 1.0  # without descriptors, the time until the next try
MakeProtocol = Callable[[], asyncio.Protocol]


class HttpsProtocol(LimitedProtocol):
    """One connection after its handshake."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).set_write_buffer_limits(HIGH_WATER_LIMIT)  # as without TLS
        super().connection_made(transport)

    def _end_writing(self) -> None:
        """TLS has no half-closed connections. The transport drops input until the client has closed too."""
        self.transport.close()


class PlainHttpRefusal(LimitedProtocol):
    """A connection without TLS: say so to a client that waits for plain HTTP."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._num_dropped is None and not transport.is_closing():
            self._refuse(PlainHttp("this port speaks HTTPS only: write https:// in the URL"))


class TlsPort:
    """`connections`: open ones, after their handshakes. `make_refusal`: a protocol that refuses plain HTTP."""

    def __init__(
        self,
        listener: socket.socket,
        certificate: Certificate,
        rules: HttpRules,
        connections: Sized,
        make_protocol: MakeProtocol,
        make_refusal: MakeProtocol,
    ) -> None:
        self._listener = listener
        self._certificate = certificate
        self._rules = rules
        self._connections = connections
        self._make_protocol, self._make_refusal = make_protocol, make_refusal
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._rest: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
        self._loop.remove_reader(self._listener)
        for task in self._handshakes:
            task.cancel()

    async def wait_closed(self) -> None:
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _listen(self) -> None:
        self._rest = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(MOST_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptor is left
                self._rules.once.warning("accept", "no connection can be accepted", why=error.strerror or "")
                if self._handshakes:
                    self._end_oldest()
                    return
                self._loop.remove_reader(self._listener)
                self._rest = self._loop.call_later(REST_S, self._listen)
                return
            accepted.setblocking(False)
            self._begin(accepted)

    def _begin(self, accepted: socket.socket) -> None:
        most = self._rules.limits.max_connections + MOST_LINGERING  # the protocol answers those above the limit
        if len(self._handshakes) + len(self._connections) >= most:
            self._refused(TooManyConnections("too many connections are open; try again"))
            if not self._handshakes:
                accepted.close()
                return
            self._end_oldest()
        task = self._loop.create_task(self._shake_hands(accepted))
        self._handshakes[task] = None
        task.add_done_callback(partial(self._is_over, accepted))

    def _is_over(self, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        self._handshakes.pop(task, None)
        if task.cancelled():  # perhaps before its first step
            accepted.close()

    def _end_oldest(self) -> None:
        """Forget it now, so that the next call ends another one."""
        oldest = next(iter(self._handshakes))
        del self._handshakes[oldest]
        oldest.cancel()

    async def _shake_hands(self, accepted: socket.socket) -> None:
        limit_s = self._rules.limits.header_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                first = await self._first_byte(accepted)
                if first == HANDSHAKE:
                    await self._loop.connect_accepted_socket(
                        self._make_protocol,
                        accepted,
                        ssl=self._certificate.context,
                        ssl_handshake_timeout=2 * limit_s,  # `limit_s` ends it before
                        ssl_shutdown_timeout=LINGER_S,
                    )
                elif first is not None:
                    await self._loop.connect_accepted_socket(self._make_refusal, accepted)
                else:
                    accepted.close()
        except TimeoutError:
            accepted.close()
            self._refused(TlsTimeout("the TLS handshake did not end in time"))
        except OSError as error:  # also SSLError
            accepted.close()
            self._refused(
                TlsFailed(
                    f"the TLS handshake failed: {getattr(error, 'reason', None) or error or type(error).__name__}"
                )
            )

    async def _first_byte(self, accepted: socket.socket) -> int | None:
        """Wait for the client's first byte and leave it to be read. Return None if the client has hung up."""
        is_readable = asyncio.Event()
        self._loop.add_reader(accepted, is_readable.set)
        try:
            await is_readable.wait()
        finally:
            self._loop.remove_reader(accepted)
        return next(iter(accepted.recv(1, socket.MSG_PEEK)), None)

    def _refused(self, error: BatonError) -> None:
        self._rules.metrics.refused(error.code)
        self._rules.once.warning(error.code, "a connection was refused", code=error.code, why=error.message)
