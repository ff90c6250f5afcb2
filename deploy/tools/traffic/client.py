"""Send requests, each in a task, over reused connections, and fill their records."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from deploy.tools.traffic.connection import Address, ClientConnection, connect
from deploy.tools.traffic.exchange import Exchange

PAUSE_S = 0.2  # wait between attempts to resume a stream


class Client:
    """`zero`: the run's start by time.monotonic(). Times in records are seconds since `zero`."""

    def __init__(self, addresses: Sequence[Address], timeout_s: float, *, resumes: bool = False) -> None:
        """`addresses`: routers with the same nodes, used in turn.

        `resumes`: whether to resume a broken stream at the next address, within `timeout_s`.
        """
        self._addresses, self._timeout_s, self._resumes = addresses, timeout_s, resumes
        self._idle: list[list[ClientConnection]] = [[] for _ in addresses]
        self._leave: dict[int, Callable[[], None]] = {}  # request number -> the function that hangs up
        self.zero = time.monotonic()

    def now(self) -> float:
        return time.monotonic() - self.zero

    async def perform(self, exchange: Exchange, message: bytes) -> None:
        """Wait until the answer is over."""
        record = exchange.record
        record.sent = self.now()
        self._leave[record.number] = lambda: exchange.leave(self.now())
        message = with_header(message, b"X-Stream-Ids", "1" if self._resumes else "")
        try:
            await self._ask(exchange, message)
            while self._resumes and exchange.can_go_on:
                await self._go_on(exchange, message)
        except OSError as error:  # its subclasses include ssl.SSLError and TimeoutError
            exchange.fail(f"no connection: {error.strerror or str(error) or 'timeout'}", self.now())
        finally:
            del self._leave[record.number]

    def hang_up(self, number: int) -> None:
        if number in self._leave:
            self._leave[number]()

    def close(self) -> None:
        for idle in self._idle:
            for connection in idle:
                connection.close()
            idle.clear()

    async def _ask(self, exchange: Exchange, message: bytes) -> None:
        place = exchange.record.number % len(self._addresses)
        connection, is_used = await self._connection(place)
        await self._one(connection, place, exchange, message)
        if is_used and exchange.was_cut_off:
            # The server had closed the idle connection: send the request again on a new one.
            exchange.reopen()
            await self._one(await self._connect(place), place, exchange, message)

    async def _go_on(self, exchange: Exchange, message: bytes) -> None:
        """Resume a broken stream at the first server that answers, starting after the failed server."""
        last_event_id = exchange.resume()
        place = exchange.record.number + exchange.record.num_resumed - 1
        connection: ClientConnection | None = None
        while connection is None and not exchange.is_over:
            await asyncio.sleep(PAUSE_S)
            if self.now() - exchange.record.sent > self._timeout_s:
                exchange.fail(f"no end within {self._timeout_s:g} s", self.now())
            place = (place + 1) % len(self._addresses)
            with contextlib.suppress(OSError):
                connection = await self._connect(place)
        if connection is not None:
            await self._one(connection, place, exchange, with_header(message, b"Last-Event-ID", last_event_id))

    async def _connection(self, place: int) -> tuple[ClientConnection, bool]:
        while self._idle[place]:
            connection = self._idle[place].pop()
            if connection.is_open:
                return connection, True
        return await self._connect(place), False

    async def _connect(self, place: int) -> ClientConnection:
        return await asyncio.wait_for(connect(asyncio.get_running_loop(), self._addresses[place]), self._timeout_s)

    async def _one(self, connection: ClientConnection, place: int, exchange: Exchange, message: bytes) -> None:
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
            if not exchange.is_over:  # the exchange may have ended while the connection was made
                connection.send(message)
                exchange.was_sent(self.now())
            settle()
            await over
        finally:
            timer.cancel()
            self._put_back(connection, place, exchange)

    def _put_back(self, connection: ClientConnection, place: int, exchange: Exchange) -> None:
        connection.rest()
        if exchange.may_reuse and connection.is_open:
            self._idle[place].append(connection)
        else:
            connection.close()


def with_header(message: bytes, name: bytes, value: str) -> bytes:
    if not value:
        return message
    head, _, body = message.partition(b"\r\n\r\n")
    return b"%b\r\n%b: %b\r\n\r\n%b" % (head, name, value.encode(), body)
