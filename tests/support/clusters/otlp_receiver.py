"""A collector on loopback: takes OTLP over HTTP, and keeps the spans by trace. It needs the extra `otel`."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.web.serving import QuietHandler

LEAVES = ("tokenize", "queue", "placement", "prompt chunk", "hand-off", "install", "decode")


@dataclass(frozen=True, slots=True)
class TakenSpan:
    name: str
    part: str  # the router or node that wrote it
    span_id: str
    parent_id: str
    start_s: float
    end_s: float
    attributes: dict[str, Any]


class Receiver:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._traces: dict[str, list[TakenSpan]] = defaultdict(list)
        self.bodies: list[bytes] = []
        receiver = self

        class Handler(QuietHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                receiver.take(body)
                self.say(200, b"")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def take(self, body: bytes) -> None:
        with self._lock:
            self.bodies.append(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                part = str(values_of(resource.resource.attributes)["service.instance.id"])
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    times = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
                    ids = span.span_id.hex(), span.parent_span_id.hex()
                    taken = TakenSpan(span.name, part, *ids, *times, values_of(span.attributes))
                    self._traces[span.trace_id.hex()].append(taken)

    def of_trace(self, trace_id: str) -> list[TakenSpan]:
        with self._lock:
            return list(self._traces[trace_id])

    @property
    def num_spans(self) -> int:
        with self._lock:
            return sum(map(len, self._traces.values()))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def values_of(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def slow_place(spans: list[TakenSpan]) -> tuple[str, float]:
    """Return the name of the span in which most of the trace's time went, and these seconds.

    Each moment belongs to the span that began last of those that are open: a hand-off contains the installation."""
    leaves = [span for span in spans if span.name in LEAVES]
    edges = sorted({edge for span in leaves for edge in (span.start_s, span.end_s)})
    seconds: dict[str, float] = defaultdict(float)
    for begin, end in zip(edges, edges[1:], strict=False):
        open_spans = [span for span in leaves if span.start_s <= begin and span.end_s >= end]
        if open_spans:
            seconds[max(open_spans, key=lambda span: span.start_s).name] += end - begin
    return max(seconds.items(), key=lambda row: row[1])
