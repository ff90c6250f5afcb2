"""Write spans with OpenTelemetry, and send them over OTLP from a thread of its own.

Only this module imports OpenTelemetry, and only once a process has an address for its spans. Times are the process's
monotonic seconds; a span gets the wall clock's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import TYPE_CHECKING, Any, cast

from shared.config.settings.trace_settings import TraceConfig
from shared.core.trace_context import is_sampled
from shared.observe.log import Logger

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, SpanContext

EXPORT_S = 5.0  # limit on one batch's way to the collector, its repetitions included
CLOSE_S = 2.0  # limit on sending the last spans when the process ends
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


def open_tracer(part: str, settings: TraceConfig, log: Logger, share: float = 1.0) -> Tracer | None:
    """Return None without an address for spans. `share`: of requests whose caller did not decide, 0 to 1."""
    if not settings.otlp_endpoint:
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    exporter = OTLPSpanExporter(endpoint=settings.traces_url, timeout=EXPORT_S)
    return Tracer(part, TellingExporter(exporter, log, settings.traces_url), share)


class TellingExporter:
    """Writes one line when spans begin to be lost, and one when they arrive again. The library's lines are dropped.

    Only the library's thread exports."""

    def __init__(self, exporter: SpanExporter, log: Logger, url: str) -> None:
        library = logging.getLogger("opentelemetry")
        library.propagate, library.handlers = False, [logging.NullHandler()]
        self._exporter = exporter
        self._log = log
        self._url = url
        self._is_lost = False

    def export(self, spans: Sequence[Any]) -> object:
        result = self._exporter.export(spans)
        is_lost = getattr(result, "name", "") != "SUCCESS"
        if is_lost and not self._is_lost:
            self._log.warning("spans are lost: the collector does not take them", url=self._url)
        elif self._is_lost and not is_lost:
            self._log.info("the collector takes spans again", url=self._url)
        self._is_lost = is_lost
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


class OpenSpan:
    """A span that has begun. Its caller ends it once."""

    def __init__(self, span: Span, wall: Callable[[float], int]) -> None:
        self._span = span
        self._wall = wall  # turns the process's seconds into the span's

    @property
    def context(self) -> SpanContext:
        return self._span.get_span_context()

    @property
    def traceparent(self) -> str:
        context = self.context
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def note(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def end_span(self, at: float, error: str = "") -> None:
        """`error`: a code of ours, or ""."""
        if error:
            from opentelemetry.trace import StatusCode

            self._span.set_attribute("error.type", error)
            self._span.set_status(StatusCode.ERROR)
        self._span.end(self._wall(at))


class Tracer:
    """Any thread may use it. No call waits: a full queue drops its oldest spans."""

    def __init__(
        self,
        part: str,
        exporter: SpanExporter | TellingExporter,
        share: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

        resource = Resource.create({"service.name": "baton", "service.instance.id": part})
        # not at exit: the library would wait for half a minute
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(share)), resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(cast("SpanExporter", exporter)))
        self._tracer = self._provider.get_tracer("baton")
        self.clock = clock

    def _wall(self, at: float) -> int:
        return time.time_ns() + int((at - self.clock()) * 1e9)

    def begin_span(
        self,
        name: str,
        parent: str,
        since: float,
        attributes: Attributes | None = None,
        *,
        is_server: bool = False,
        after: OpenSpan | None = None,
    ) -> OpenSpan | None:
        """Return None for a request that is not sampled. `parent`: a traceparent, or "" for a new trace. `attributes`:
        what costs nothing to make, since `note` takes the others. `after`: the span that this one is linked with.
        """
        if parent and not is_sampled(parent):
            return None
        from opentelemetry.trace import Link, SpanKind

        links = () if after is None else [Link(after.context)]
        span = self._tracer.start_span(
            name,
            _context_of(parent),
            kind=SpanKind.SERVER if is_server else SpanKind.INTERNAL,
            attributes=attributes,
            links=links,
            start_time=self._wall(since),
        )
        return OpenSpan(span, self._wall) if span.is_recording() else None

    def add_span(
        self, name: str, parent: str, since: float, until: float, attributes: Attributes, error: str = ""
    ) -> None:
        """Write a span that is over. The parent must be sampled."""
        span = self.begin_span(name, parent, since, attributes)
        if span is not None:
            span.end_span(until, error)

    def close(self) -> None:
        """Send the last spans, but don't wait long for a collector that does not answer."""
        last = Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(CLOSE_S)


def _context_of(traceparent: str) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if not traceparent:
        return Context()
    _, trace_id, span_id, _ = traceparent.split("-")
    flags = TraceFlags(TraceFlags.SAMPLED if is_sampled(traceparent) else TraceFlags.DEFAULT)
    parent = SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=flags)
    return set_span_in_context(NonRecordingSpan(parent), Context())
