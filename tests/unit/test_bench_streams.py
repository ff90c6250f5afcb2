"""Measurements of routers: clients count answers however they are cut, and a run without its load gives no result."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from subprocess import PIPE

import pytest

from benchmarks import beside_smg, open_streams
from benchmarks.beside_smg import check_streams, wait_for_models
from benchmarks.open_streams import Child, is_good
from benchmarks.sse_client import stream_completion
from benchmarks.stream_clients import Counts, Stream

HEAD = b"HTTP/1.1 %s\r\nContent-Type: text/event-stream\r\n\r\n"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); signal.pause()"
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


def test_streams_count_as_open_only_if_their_tokens_come() -> None:
    args = argparse.Namespace(streams=10, tokens_per_s=100.0)
    good = {"lag_ms": {"steady": {"p99_9": 9.0}}, "kb_per_stream": 9.0, "streams": 10, "lost": 0, "events_per_s": 95.0}
    assert is_good(good, args)
    worse = ({"events_per_s": 94.9}, {"streams": 9}, {"lost": 1}, {"kb_per_stream": 60.1})
    assert not any(is_good(good | change, args) for change in worse)


def test_refused_streams_are_no_load() -> None:
    check_streams({"begun": 2, "statuses": {"200": 5}}, 2)
    for begun, statuses in ((1, {"200": 2}), (2, {"200": 2, "503": 1}), (0, {"503": 2}), (0, {})):
        with pytest.raises(RuntimeError, match=f"{begun} of 2 streams began"):
            check_streams({"begun": begun, "statuses": statuses}, 2)


def test_a_child_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_streams, "STOP_S", 0.1)
    child = Child.__new__(Child)
    child.process = subprocess.Popen([sys.executable, "-c", DEAF], stdin=PIPE, stdout=PIPE, text=True)
    assert child.read() == {}
    child.stop()
    assert child.process.stdout is not None
    child.process.stdout.close()
    assert child.process.returncode == -signal.SIGKILL


def test_a_server_that_never_answers_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_smg, "START_S", 0.1)
    monkeypatch.setattr(beside_smg, "ANSWER_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as mute, pytest.raises(RuntimeError, match="did not start"):
        wait_for_models(mute.getsockname()[1], "mock")
