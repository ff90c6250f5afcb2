"""Measurements of routers: clients count answers however they are cut, and a run without its load gives no result."""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from benchmarks.compare import Figure
from benchmarks.routers import beside_smg, open_streams, traced_streams
from benchmarks.routers.beside_smg import check_streams, wait_for_models
from benchmarks.routers.open_streams import ROOT, Child, is_good
from benchmarks.routers.stream_clients import Counts, Stream, trace_headers
from benchmarks.sse_client import stream_completion
from shared.core.trace_context import is_sampled, traceparent_of

HEAD = b"HTTP/1.1 %s\r\nContent-Type: text/event-stream\r\n\r\n"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('{}', flush=True); signal.pause()"
EVENT, END = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"
SHORT = b"data: {}\n\n"  # a read may end with all of it, and the tail then begins before it


class Silent(asyncio.Transport):
    """The requests are kept, not read."""

    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(data)


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


def test_each_request_has_a_traceparent_of_its_own() -> None:
    headers, silent = trace_headers(random.Random(1), 0.01), Silent()
    stream = Stream(b"POST / HTTP/1.1\r\nHost: x\r\n\r\n", Counts(), asks_again=True, header=partial(next, headers))
    stream.connection_made(silent)
    for _ in range(299):
        stream.data_received(HEAD % b"200 OK" + EVENT + END)
    found = [data.split(b"\r\n")[1].decode().partition(": ") for data in silent.written]
    assert {name for name, _, _ in found} == {"traceparent"}
    traces = [traceparent_of([value]) for _, _, value in found]
    assert "" not in traces and len(set(traces)) == 300 and sum(map(is_sampled, traces)) == 3


def test_routers_take_turns_and_each_has_its_own_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def measure(checkout: Path, streams: int, seconds: float, traced: Sequence[str] = ()) -> dict[str, Any]:
        asked.append((checkout.name, " ".join(traced)))
        return dict.fromkeys(("cpu_us_per_token", "router_full_mb"), len(asked))

    monkeypatch.setattr(traced_streams, "measure", measure)
    tables = traced_streams.compare(Path("old"), 64, 2, 1.0)
    own = ROOT.name
    turn = [("old", ""), (own, ""), (own, "--traced 0.01")]
    assert asked == [*turn, *turn, ("old", "")]
    values = [(table["cpu_of_token_us"].old, table["cpu_of_token_us"].new) for table in tables.values()]
    assert values == [([1, 4, 7], [2, 5]), ([1, 4, 7], [3, 6])]


def test_memory_of_a_stream_is_what_more_streams_take() -> None:
    found = traced_streams.growth(Figure([90.0, 91.0], [80.0]), Figure([100.0, 111.0], [85.0]), 1000)
    assert found == Figure([10.0, 20.0], [5.0])


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
