"""The span of one answer, from its request's arrival to its last byte. It holds no text of prompts or answers.

    chat smollm2 ── receive ── tokenize ── queue, placement, attempts (router/requests/journey.py)
    chat         a request that was refused before its prompt was tokens; nothing is below it

Names follow OpenTelemetry's conventions for generative AI:
https://opentelemetry.io/docs/specs/semconv/gen-ai/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from router.api.answer.generation_plan import GenerationPlan
from router.api.answer.writer import Counts, Times
from router.http.connection import Connection
from router.requests.journey import Journey
from shared.core.errors import BatonError
from shared.core.states import FinishReason
from shared.observe.tracer import Attributes, OpenSpan, Tracer

COMPLETIONS = ("/v1/completions", "/api/generate")  # the other paths take messages
GOOD = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class BodyTimes:
    """Times of one request, in the process's seconds."""

    arrived: float
    read: float  # when its whole body was there


def begin_answer(
    tracer: Tracer, path: str, plan: GenerationPlan, times: BodyTimes, request_id: str, given: str
) -> AnswerSpan | None:
    """Call it when the prompt is tokens. Return None for a request that is not sampled. `given`: the client's
    traceparent, or ""."""
    operation = operation_of(path)
    span = tracer.begin_span(f"{operation} {plan.model}", given, times.arrived, is_server=True)
    if span is None:
        return None
    span.note(asked(operation, plan, request_id))
    tracer.add_span("receive", span.traceparent, times.arrived, times.read, {})
    tracer.add_span("tokenize", span.traceparent, times.read, tracer.clock(), {})
    return AnswerSpan(tracer, span)


@contextmanager
def refusals_traced(tracer: Tracer | None, path: str, arrived: float, connection: Connection) -> Iterator[None]:
    """Write a span of its own if the `with` block, in which the request has no other, refuses the request.

    It holds the error's code, but not its message, which may quote the request."""
    try:
        yield
    except BatonError as error:
        operation = operation_of(path)
        span = None if tracer is None else tracer.begin_span(operation, connection.trace, arrived, is_server=True)
        if tracer is not None and span is not None:
            facts: dict[str, str | int] = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "baton"}
            span.note({**facts, "baton.request_id": connection.request_id, "http.response.status_code": error.status})
            span.end_span(tracer.clock(), error.code)
        raise


def operation_of(path: str) -> str:
    return "text_completion" if path in COMPLETIONS else "chat"


def asked(operation: str, plan: GenerationPlan, request_id: str) -> Attributes:
    sampling = plan.sampling
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": plan.model,
        "gen_ai.request.stream": plan.show.stream,
        "gen_ai.request.choice.count": plan.num_sequences,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "baton.request_id": request_id,
    }


class AnswerSpan:
    def __init__(self, tracer: Tracer, span: OpenSpan) -> None:
        self._tracer = tracer
        self._span = span

    @property
    def traceparent(self) -> str:
        return self._span.traceparent

    def begin_journey(self) -> Journey:
        """Of one prompt, which is about to be queued."""
        return Journey(self._tracer, self.traceparent)

    def over(self, answer_id: str, outcome: str, reasons: Sequence[str], counts: Counts, times: Times) -> None:
        """`outcome`: a finish reason or an error's code. `reasons`: why each finished choice ended."""
        facts: dict[str, str | int | float | Sequence[str]] = {
            "gen_ai.response.id": answer_id,
            "gen_ai.response.finish_reasons": reasons,
            "gen_ai.usage.input_tokens": counts.prompt,
            "gen_ai.usage.output_tokens": counts.answer,
            "gen_ai.usage.cache_read.input_tokens": counts.cached,
        }
        if counts.reasoning is not None:
            facts["gen_ai.usage.reasoning.output_tokens"] = counts.reasoning
        if times.first > times.arrived:
            facts["gen_ai.response.time_to_first_chunk"] = times.first - times.arrived
        self._span.note(facts)
        self._span.end_span(self._tracer.clock(), "" if outcome in GOOD else outcome)
