"""The clients of router measurements: they count what they got however it was cut, and refuse a run that was not one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.bench.stream_clients import Counts, Stream

HEAD = b"HTTP/1.1 %s\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT, END = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"
SHORT = b"data: {}\n\n"  # a read may end with all of it, and the tail then begins before it


class Silent(asyncio.Transport):
    def write(self, data: object) -> None:
        """Nobody reads the requests."""


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
