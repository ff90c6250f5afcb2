"""Measurements of routers: clients count an answer however it is cut, and a run whose load was not there is no result."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.bench.sse_client import stream_completion
from tests.bench.stream_clients import Counts, Stream

HEAD = b"HTTP/1.1 %s\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT, END = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"
SHORT = b"data: {}\n\n"  # a read may end with all of it, and the tail then begins before it


class Silent(asyncio.Transport):
    def write(self, data: object) -> None:
        """The requests are not read."""


def cuts(data: bytes) -> Iterator[tuple[bytes, ...]]:
    """Yield the data in two pieces, cut at each place; and in pieces of one length."""
    for at in range(1, len(data)):
        yield data[:at], data[at:]
    for size in range(1, 16):
        yield tuple(data[at : at + size] for at in range(0, len(data), size))


def test_a_client_counts_the_same_however_answers_are_cut() -> None:
    answer = HEAD % b"200 OK" + EVENT + SHORT * 3 + EVENT + END
    for pieces in cuts(answer):
        counts = Counts()
        stream = Stream(b"", counts, asks_again=False)
        for piece in pieces:
            stream.data_received(piece)
        stream.connection_lost(None)
        assert counts == Counts(events=5, begun=1, whole=1, statuses={"200": 1}), pieces


def test_a_client_counts_the_answers_of_one_connection() -> None:
    counts = Counts()
    stream = Stream(b"", counts, asks_again=True)
    stream.connection_made(Silent())
    for status in (b"200 OK", b"200 OK", b"503 Service Unavailable"):
        for piece in (HEAD % status, EVENT + END, b"0\r\n\r\n"):
            stream.data_received(piece)
    assert counts == Counts(events=3, begun=1, whole=3, statuses={"200": 2, "503": 1})


class Mute:
    """The writer of a connection whose server never answers. `asked`: once a request is written."""

    def __init__(self) -> None:
        self.asked, self.is_closed = asyncio.Event(), False

    def write(self, data: bytes) -> None:
        self.asked.set()

    def close(self) -> None:
        self.is_closed = True


def test_a_request_that_is_cancelled_while_it_waits_hangs_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def cancelled() -> bool:
        writer = Mute()

        async def connect(host: str, port: int) -> tuple[asyncio.StreamReader, Mute]:
            return asyncio.StreamReader(), writer

        monkeypatch.setattr(asyncio, "open_connection", connect)
        request = asyncio.create_task(stream_completion(1, {}))
        await writer.asked.wait()
        request.cancel()
        await asyncio.wait((request,))
        return writer.is_closed

    assert asyncio.run(cancelled())
