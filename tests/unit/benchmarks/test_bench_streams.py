"""Measurements of routers: clients count answers however they are cut, and a run without its load gives no result."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from benchmarks.routers.beside_smg import check_streams
from benchmarks.routers.open_streams import is_good
from benchmarks.routers.stream_clients import Counts, Stream

HEAD = b"HTTP/1.1 %s\r\nContent-Type: text/event-stream\r\n\r\n"
EVENT, END = b'data: {"choices": []}\n\n', b"data: [DONE]\n\n"
SHORT = b"data: {}\n\n"  # a read may end with all of it, and the tail then begins before it


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
