"""Sends requests and fills their records: a thin shell around `exchange`. One task per request, connections kept."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from deploy.tools.load.connection import Address, ClientConnection, connect
from deploy.tools.load.exchange import Exchange

Clock = Callable[[], float]
PAUSE_S = 0.2  # before a broken stream is asked for again


class Client:
    """`zero`: the start of the run on time.monotonic(); records count from there."""

    def __init__(self, address: Address, timeout_s: float, *, resumes: bool = False) -> None:
        """`resumes`: a stream that breaks is gone on with, for `timeout_s` at most."""
        self._address, self._timeout_s, self._resumes = address, timeout_s, resumes
        self._idle: list[ClientConnection] = []
        self._leave: dict[int, Callable[[], None]] = {}  # what hanging up means, for each open request
        self.zero = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.zero

    async def perform(self, exchange: Exchange, message: bytes) -> None:
        """Returns when the answer is over, however it ended: the record says how."""
        record = exchange.record
        record.sent = self.now()
        self._leave[record.number] = lambda: exchange.leave(self.now())
        message = with_header(message, b"X-Stream-Ids", "1" if self._resumes else "")
        try:
            await self._ask(exchange, message)
            while self._resumes and exchange.can_go_on:
                await self._go_on(exchange, message)
        except OSError as error:  # ssl.SSLError and TimeoutError are some of these
            exchange.fail(f"no connection: {error.strerror or str(error) or 'timeout'}", self.now())
        finally:
            del self._leave[record.number]

    def hang_up(self, number: int) -> None:
        if number in self._leave:
            self._leave[number]()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _ask(self, exchange: Exchange, message: bytes) -> None:
        connection, is_used = await self._connection()
        await self._one(connection, exchange, message)
        if is_used and exchange.was_cut_off:
            # a server may close a kept connection at any time: what it never read goes out once more, on a new one
            exchange.reopen()
            await self._one(await self._connect(), exchange, message)

    async def _go_on(self, exchange: Exchange, message: bytes) -> None:
        """Once more, from where it broke, at whatever server answers at this address by then."""
        last_event_id = exchange.resume()
        connection: ClientConnection | None = None
        while connection is None and not exchange.is_over:
            await asyncio.sleep(PAUSE_S)
            if self.now() - exchange.record.sent > self._timeout_s:
                exchange.fail(f"no end within {self._timeout_s:g} s", self.now())
            with contextlib.suppress(OSError):
                connection = await self._connect()
        if connection is not None:
            await self._one(connection, exchange, with_header(message, b"Last-Event-ID", last_event_id))

    async def _connection(self) -> tuple[ClientConnection, bool]:
        """(one, whether it was used before)"""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection, True
        return await self._connect(), False

    async def _connect(self) -> ClientConnection:
        return await asyncio.wait_for(connect(asyncio.get_running_loop(), self._address), self._timeout_s)

    async def _one(self, connection: ClientConnection, exchange: Exchange, message: bytes) -> None:
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()

        def settle() -> None:
            if exchange.is_over and not over.done():
                over.set_result(None)

        def take(data: bytes, at: float, late: float) -> None:
            exchange.feed(data, at - self.zero, late)
            settle()

        def give_up(how: Callable[[float], None]) -> None:
            how(self.now())
            settle()

        connection.listen(take, lambda: give_up(exchange.end_of_stream))
        timer = loop.call_later(
            self._timeout_s, give_up, lambda at: exchange.fail(f"no end within {self._timeout_s:g} s", at)
        )
        self._leave[exchange.record.number] = lambda: give_up(exchange.leave)
        try:
            if not exchange.is_over:  # it may have been left while it was connecting
                connection.send(message)
                exchange.was_sent(self.now())
            settle()
            await over
        finally:
            timer.cancel()
            self._put_back(connection, exchange)

    def _put_back(self, connection: ClientConnection, exchange: Exchange) -> None:
        connection.rest()
        if exchange.may_reuse and connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()


def with_header(message: bytes, name: bytes, value: str) -> bytes:
    """Return a request with this header, where there is a value."""
    if not value:
        return message
    head, _, body = message.partition(b"\r\n\r\n")
    return b"%b\r\n%b: %b\r\n\r\n%b" % (head, name, value.encode(), body)
