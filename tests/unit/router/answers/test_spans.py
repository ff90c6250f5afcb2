"""Spans of requests, kept in this process: which there are, whose children, what links a resumed attempt, and that
nothing of it happens for a request that is not sampled."""

from __future__ import annotations

import asyncio
import io
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from router.api.answer.answer_span import BodyTimes, begin_answer
from router.api.answer.generation_plan import GenerationPlan, PromptJob, ShowOptions, UsageShown
from router.api.answer.writer import Counts, Times
from router.requests.new_request import NewRequest
from shared.config.settings.trace_settings import TraceConfig
from shared.core import extras
from shared.core.errors import ConfigError, QueueFull, RateLimited
from shared.core.sampling_params import SamplingParams
from shared.core.trace_context import is_sampled
from shared.node.loop.node import Node
from shared.node.records.request_spans import MOST_TRACED, RequestSpans
from shared.observe.log import Logger
from shared.wire.messages import Offer
from shared.wire.peers import PeerClosed
from tests.support.cores.core_rig import CoreKnobs, Job
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.worlds.node_pair import Net, make_node
from tests.unit.router.dispatch.test_router_absence import Story
from tests.unit.router.http.test_held_bodies import Site

ROOT = Path(__file__).resolve().parents[4]
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01", f"00-{TRACE_ID}-{SPAN_ID}-00"
needs_otel = pytest.mark.skipif(not extras.is_here("otel"), reason="the extra otel is not installed")


def kept(share: float = 1.0) -> Any:
    from tests.support.clusters.kept_spans import KeptSpans

    ticks = itertools.count()
    return KeptSpans(share, lambda: float(next(ticks)))


def by_name(spans: list[Any]) -> dict[str, list[Any]]:
    names = sorted({span.name for span in spans})
    return {name: [span for span in spans if span.name == name] for name in names}


@pytest.mark.parametrize(
    ("given", "says"),
    [(SAMPLED, True), (SAMPLED[:-1] + "3", True), (UNSAMPLED, False), ("", False), ("x" * 54 + "1", False)],
)
def test_a_caller_s_flag_says_whether_it_records(given: str, says: bool) -> None:
    assert is_sampled(given) is says


def test_an_address_that_is_none_is_said_before_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in (
        "127.0.0.1:4318",
        "grpc://127.0.0.1:4317",
        "http://",
        "http://[::1",
        "http://c:43x8",
        "http://c:99999",
    ):
        with pytest.raises(ConfigError, match="--otlp-endpoint is "):
            TraceConfig(address)
    monkeypatch.setattr(extras, "is_here", lambda extra: False)
    with pytest.raises(ConfigError, match=r"--otlp-endpoint needs .*; to install it, type: .*\[otel\]"):
        TraceConfig("http://127.0.0.1:4318")
    assert not TraceConfig().otlp_endpoint


def test_the_signal_s_path_is_added_to_a_bare_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_here", lambda extra: True)
    given = ("http://c:4318", "http://c:4318/", "https://c/otlp/v1/traces")
    assert [TraceConfig(url).traces_url for url in given] == [
        "http://c:4318/v1/traces",
        "http://c:4318/v1/traces",
        "https://c/otlp/v1/traces",
    ]


def test_without_an_address_nothing_of_it_is_loaded() -> None:
    code = (
        "import sys, io\n"
        "import router.app, shared.observe.tracer as own, shared.node.records.request_spans\n"
        "from shared.config.settings.trace_settings import TraceConfig\n"
        "assert own.open_tracer('r', TraceConfig(), None) is None\n"
        "print(sorted(name for name in sys.modules if name.startswith('opentelemetry')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def plan() -> GenerationPlan:
    show = ShowOptions((), False, UsageShown.LAST, False, -1)
    return GenerationPlan("m", (PromptJob([1, 2, 3], 7, ""),), 1, SamplingParams(max_tokens=5), show)


@needs_otel
def test_an_answer_s_span_has_the_convention_s_names() -> None:
    spans = kept()
    answer = begin_answer(spans.tracer, "/v1/chat/completions", plan(), BodyTimes(-3.0, -2.0), "req-1", SAMPLED)
    assert answer is not None and answer.traceparent.split("-")[1] == TRACE_ID
    answer.over("chatcmpl-1", "stop", ["stop"], Counts(3, 5, 1, None), Times(0.0, 0.5, 2.0))
    found = by_name(spans.close())
    assert sorted(found) == ["chat m", "receive", "tokenize"]
    (root,) = found["chat m"]
    assert root.kind.name == "SERVER" and f"{root.parent.span_id:016x}" == SPAN_ID
    assert {span.parent.span_id for name in ("receive", "tokenize") for span in found[name]} == {root.context.span_id}
    facts = dict(root.attributes)
    assert facts["gen_ai.operation.name"] == "chat" and facts["gen_ai.request.model"] == "m"
    assert facts["gen_ai.request.max_tokens"] == 5 and facts["gen_ai.usage.input_tokens"] == 3
    assert facts["gen_ai.usage.output_tokens"] == 5 and facts["gen_ai.usage.cache_read.input_tokens"] == 1
    assert facts["gen_ai.response.finish_reasons"] == ("stop",) and facts["gen_ai.response.id"] == "chatcmpl-1"
    assert facts["gen_ai.response.time_to_first_chunk"] == 0.5 and "error.type" not in facts
    assert root.resource.attributes["service.name"] == "baton"


@needs_otel
def test_an_answer_that_failed_names_its_error() -> None:
    spans = kept()
    answer = begin_answer(spans.tracer, "/v1/completions", plan(), BodyTimes(-3.0, -2.0), "req-1", "")
    assert answer is not None
    answer.begin_journey().over(QueueFull("full"))
    answer.over("cmpl-1", "queue_full", [], Counts(3, 0, 0, None), Times(0.0, 0.0, 0.0))
    found = by_name(spans.close())
    (root,), (queue,) = found["text_completion m"], found["queue"]
    assert root.parent is None
    for span in (root, queue):
        assert span.attributes["error.type"] == "queue_full" and span.status.status_code.name == "ERROR"
    assert "gen_ai.response.time_to_first_chunk" not in root.attributes


def ask_once(site: Site, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    async def ask() -> None:
        async with asyncio.timeout(HANG_GUARD_S):
            await site.ask(body, list(headers), asyncio.Event())

    asyncio.run(ask())


def above_limit(site: Site) -> None:
    site.generation._desk = MagicMock()
    site.generation._desk.charge.side_effect = RateLimited("later")


def without_room(site: Site) -> None:
    site.gateway.check_room.side_effect = QueueFull("full")


def too_long(site: Site) -> None:
    site.generation._bodies = replace(site.bodies, max_bytes=1024)


GOOD_BODY = b'{"prompt": "x"}'
REFUSALS: list[tuple[bytes, Callable[[Site], None] | None, int, str]] = [
    (b"{", None, 400, "invalid_request_error"),
    (b'{"prompt": "x", "max_tokens": -2}', None, 400, "invalid_request_error"),
    (b'{"prompt": "x", "guided_regex": "("}', None, 400, "invalid_request_error"),
    (b" " * 1025, too_long, 413, "body_too_large"),
    (GOOD_BODY, above_limit, 429, "rate_limit_exceeded"),
    (GOOD_BODY, without_room, 503, "queue_full"),
]


@needs_otel
@pytest.mark.parametrize(("body", "prepare", "status", "code"), REFUSALS)
def test_a_refused_request_has_one_span_with_its_code(
    body: bytes, prepare: Callable[[Site], None] | None, status: int, code: str
) -> None:
    """It has no children, since a span that never began could not end."""
    spans, site = kept(), Site()
    site.generation._tracer = spans.tracer
    if prepare is not None:
        prepare(site)
    ask_once(site, body, (b"traceparent", SAMPLED.encode()), (b"x-request-id", b"mine"))
    assert site.sent[0]["status"] == status
    (span,) = spans.close()
    assert span.name == "text_completion" and f"{span.parent.span_id:016x}" == SPAN_ID
    assert span.status.status_code.name == "ERROR" and not span.status.description
    facts = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "baton", "baton.request_id": "mine"}
    assert dict(span.attributes) == {**facts, "http.response.status_code": status, "error.type": code}


@needs_otel
def test_a_request_that_fails_unexpectedly_ends_its_span() -> None:
    spans, site = kept(), Site()
    site.generation._tracer = spans.tracer
    site.gateway.open.side_effect = KeyError("a defect")
    ask_once(site, GOOD_BODY)
    assert site.sent[0]["status"] == 500
    (root,) = by_name(spans.close())["text_completion hashlm"]
    assert root.attributes["error.type"] == "internal_error" and root.status.status_code.name == "ERROR"


@needs_otel
@pytest.mark.parametrize(("share", "given"), [(1.0, UNSAMPLED), (0.0, "")])
def test_a_request_that_is_not_sampled_has_no_spans(share: float, given: str) -> None:
    spans = kept(share)
    assert begin_answer(spans.tracer, "/v1/completions", plan(), BodyTimes(0.0, 1.0), "req-1", given) is None
    assert spans.close() == []


@needs_otel
def test_a_resumed_attempt_is_linked_and_says_why() -> None:
    from router.requests.journey import Journey

    spans, story = kept(), Story(max_attempts=3)
    asked = NewRequest(
        [1, 2, 3], 1, SamplingParams(max_tokens=5), 7, trace=SAMPLED, journey=Journey(spans.tracer, SAMPLED)
    )
    mailbox = story.gateway.open([asked])
    story.gateway.handle(PeerClosed(story.link.generates[-1][0]))
    story.gateway.close(mailbox)
    found = by_name(spans.close())
    assert {name: len(found[name]) for name in found} == {"attempt": 2, "placement": 2, "queue": 1}
    first, second = found["attempt"]
    assert [one.trace for _, one in story.link.generates] == [
        f"00-{TRACE_ID}-{span.context.span_id:016x}-01" for span in (first, second)
    ]
    assert not first.links and [link.context.span_id for link in second.links] == [first.context.span_id]
    assert first.attributes["error.type"] == second.attributes["baton.resume.reason"] == "node_lost"
    assert first.attributes["baton.decode_node"] != second.attributes["baton.decode_node"]
    assert {f"{span.parent.span_id:016x}" for one in found.values() for span in one} == {SPAN_ID}


def traced_pair(spans: Any, *, prefill: bool = True) -> tuple[Node, Node]:
    knobs = CoreKnobs(chunk_size=32)
    nodes = make_node("prefill", "p0", knobs), make_node("decode", "d0", knobs)
    for node, is_traced in zip(nodes, (prefill, True), strict=True):
        if is_traced:
            node.ctx.spans = node._watch._spans = RequestSpans(spans.tracer)
    return nodes


def a_job() -> Job:
    return Job(0, tuple(range(70)), SamplingParams(max_tokens=9), 7)


@needs_otel
def test_both_nodes_write_spans_below_the_attempt() -> None:
    spans = kept()
    p, d = traced_pair(spans)
    net = Net([p, d])
    net.generate(p, a_job(), d, trace=SAMPLED)
    net.run()
    assert [offer.trace for offer in net.messages(Offer)] == [SAMPLED]  # type: ignore[attr-defined]
    found = by_name(spans.close())
    wanted = {
        "wait": 1,
        "offer": 1,
        "prompt chunk": 3,
        "hand-off": 1,
        "memory": 1,
        "transfer": 1,
        "install": 1,
        "decode": 1,
    }
    assert {name: len(found[name]) for name in found} == wanted
    assert {f"{span.context.trace_id:032x}" for one in found.values() for span in one} == {TRACE_ID}
    assert {f"{span.parent.span_id:016x}" for one in found.values() for span in one} == {SPAN_ID}
    (decode,) = found["decode"]
    assert decode.attributes["baton.output_tokens"] == 9 and decode.attributes["baton.finish_reason"] == "length"
    assert decode.attributes["baton.steps"] >= 8
    assert not p.ctx.spans.is_tracing and not d.ctx.spans.is_tracing


@needs_otel
def test_a_node_alone_writes_chunks_and_the_decode() -> None:
    spans = kept()
    _, d = traced_pair(spans)
    net = Net([d])
    net.generate(d, a_job(), trace=SAMPLED)
    net.run()
    found = by_name(spans.close())
    assert {name: len(found[name]) for name in found} == {"decode": 1, "prompt chunk": 3, "wait": 1}


@needs_otel
def test_an_unsampled_request_is_no_work_for_a_node() -> None:
    spans = kept()
    p, d = traced_pair(spans)
    net = Net([p, d])
    net.generate(p, a_job(), d, trace=UNSAMPLED)
    net.run(until=lambda: p.ctx.spans.is_tracing or d.ctx.spans.is_tracing)
    assert not p.ctx.spans.is_tracing and not d.ctx.spans.is_tracing and spans.close() == []


@needs_otel
def test_a_node_follows_a_bounded_number_of_requests() -> None:
    spans = kept()
    followed = RequestSpans(spans.tracer)
    net = Net([make_node("decode", "d0", CoreKnobs())])
    keys = [net.generate(next(iter(net.nodes.values())), a_job(), attempt=n) for n in range(MOST_TRACED + 1)]
    for key in keys:
        followed.follow(key, SAMPLED)  # type: ignore[arg-type]
    assert len(followed._traced) == MOST_TRACED and keys[0] not in followed._traced
    spans.close()


@needs_otel
def test_a_dead_collector_costs_spans_and_one_line() -> None:
    from opentelemetry.sdk.trace.export import SpanExportResult

    from shared.observe.tracer import TellingExporter, Tracer

    class Collector:
        is_up, batches = False, 0

        def export(self, spans: object) -> SpanExportResult:
            self.batches += 1
            return SpanExportResult.SUCCESS if self.is_up else SpanExportResult.FAILURE

        def shutdown(self) -> None: ...

    collector, lines = Collector(), io.StringIO()
    exporter = TellingExporter(collector, Logger("r", lines), "http://c/v1/traces")  # type: ignore[arg-type]
    tracer = Tracer("r", exporter)
    for is_up in (False, False, True, True):
        collector.is_up = is_up
        tracer.add_span("a", "", 0.0, 1.0, {})
        tracer._provider.force_flush()
    tracer.close()
    said = lines.getvalue().splitlines()
    assert collector.batches == 4 and len(said) == 2
    assert "WARNING r" in said[0] and "spans are lost" in said[0] and "takes spans again" in said[1]


@needs_otel
def test_a_collector_that_hangs_keeps_nobody_waiting() -> None:
    """Its one export never ends: the queue stays bounded, and the end of the process comes."""
    import threading

    from opentelemetry.sdk.trace.export import SpanExportResult

    from shared.observe.tracer import Tracer

    release, entered = threading.Event(), threading.Event()

    class Collector:
        def export(self, spans: object) -> SpanExportResult:
            entered.set()
            release.wait()
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None: ...

    tracer = Tracer("r", Collector())  # type: ignore[arg-type]
    for _ in range(5000):
        tracer.add_span("a", "", 0.0, 1.0, {})
    assert entered.wait(HANG_GUARD_S)
    queue = tracer._provider._active_span_processor._span_processors[0]._batch_processor._queue
    assert len(queue) <= 2048
    tracer.close()
    assert not release.is_set()
    release.set()
