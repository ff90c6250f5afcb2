"""Send a driver's requests to a server in real time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from deploy.tools.traffic.client import Client
from deploy.tools.traffic.exchange import Exchange
from deploy.tools.traffic.figures.record import UNFINISHED, RequestRecord
from deploy.tools.traffic.request_builder import RequestBuilder
from deploy.tools.traffic.workloads.driver import Driver, LoadRequest


@dataclass(frozen=True, slots=True)
class Storm:
    """At `at_s`, clients hang up on the share `share` of the open requests."""

    at_s: float
    share: float


class LoadRunner:
    """`records` grows as requests are sent. Records in `open` are not complete."""

    def __init__(
        self, driver: Driver, client: Client, builder: RequestBuilder, *, until_s: float, storms: Sequence[Storm] = ()
    ) -> None:
        """At `until_s` the client leaves all open requests, and they count as failed."""
        self._driver, self._client, self._builder = driver, client, builder
        self._until_s, self._storms = until_s, storms
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.records: list[RequestRecord] = []
        self.open: dict[int, RequestRecord] = {}
        self.interrupted_at: float | None = None
        self._defect: BaseException | None = None  # an error in our own code; a server's faults are in the records

    def now(self) -> float:
        return self._client.now()

    async def run(self) -> list[RequestRecord]:
        with self._timers():
            while not self._driver.is_done and self._defect is None:
                for request in self._driver.take_requests(self.now()):
                    self._send(request)
                await self._until(self._driver.next_at())
        if self._defect is not None:
            raise self._defect
        return self.records

    def interrupt(self) -> None:
        if self.interrupted_at is None:
            self.interrupted_at = self.now()
        self._driver.stop()
        for number in list(self.open):
            self._client.hang_up(number)
        self._changed.set()

    def _end(self) -> None:
        self._driver.stop()
        for number, record in list(self.open.items()):
            self._client.hang_up(number)
            record.error, record.hung_up = UNFINISHED, False
        self._changed.set()

    @contextlib.contextmanager
    def _timers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handles = [loop.call_later(max(0.0, self._until_s - self.now()), self._end)]
        handles += [loop.call_later(max(0.0, s.at_s - self.now()), self._blow, s.share) for s in self._storms]
        try:
            yield
        finally:
            for handle in handles:
                handle.cancel()

    async def _until(self, at: float | None) -> None:
        self._changed.clear()
        if self._driver.is_done:
            return
        loop = asyncio.get_running_loop()
        timer = None if at is None else loop.call_later(max(0.0, at - self.now()), self._changed.set)
        await self._changed.wait()
        if timer is not None:
            timer.cancel()

    def _send(self, request: LoadRequest) -> None:
        record = RequestRecord(
            request.number, request.session, request.turn, request.due, request.max_tokens, request.probe
        )
        self.records.append(record)
        self.open[request.number] = record
        task = asyncio.get_running_loop().create_task(self._perform(request, record))
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._defect = task.exception()
            self._changed.set()

    async def _perform(self, request: LoadRequest, record: RequestRecord) -> None:
        message = self._builder.message(request.messages, request.max_tokens, request.tool_choice)
        await self._client.perform(Exchange(record, request.hang_up_after), message)
        del self.open[request.number]
        self._driver.ended(request.number, record.text, self.now(), may_go_on=record.is_whole, is_call=record.is_call)
        self._changed.set()

    def _blow(self, share: float) -> None:
        """Hang up on the oldest requests, which probably hold the most memory."""
        numbers = sorted(self.open)
        for number in numbers[: round(share * len(numbers))]:
            self._client.hang_up(number)
