"""Spans that stay in this process. It needs the extra `otel`: import it inside of tests that are skipped without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shared.observe.tracer import Tracer


class KeptSpans:
    def __init__(self, share: float = 1.0, clock: Callable[[], float] | None = None) -> None:
        self._kept = InMemorySpanExporter()
        self.tracer = Tracer("here", self._kept, share, *([clock] if clock else []))

    def close(self) -> list[Any]:
        """All spans, in the order of their ends."""
        self.tracer.close()
        return list(self._kept.get_finished_spans())
