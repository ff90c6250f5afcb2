"""One HTTP exchange, without sockets: names of requests, comments while a prompt waits, failures that are logged."""

from __future__ import annotations

import asyncio
import io
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.api.answer.generation_plan import GenerationPlan, PromptJob, ShowOptions, UsageShown
from router.api.answer.stream_start import StreamStart
from router.api.answer.writer import COMMENT, AnswerFacts, Writer, ping_among_ids
from router.api.endpoint import Endpoint, EndpointRules, Handler
from router.api.openai.choices_writer import ChoicesWriter
from router.api.openai.completions import CompletionShape
from router.api.site import generation
from router.api.site.generation import DEADLINE, Generation
from router.http.body_budget import BodyHold
from router.http.connection import Connection
from router.http.work_threads import LONG_BODY_BYTES, BodyWork
from router.requests.effects import Failure, News, ScoredPrompt, Update
from router.requests.mailbox import Mailbox
from router.tenants.book import Tenants
from router.text.hashlm import HashTokenizer
from shared.core.errors import BatonError, HandoffFailed, InvalidRequest, Overloaded
from shared.core.sampling_params import SamplingParams
from shared.observe.log import Logger
from shared.observe.metrics import RequestMetrics
from shared.wire.messages import Begun, Key, SequenceEnd, TokenLogprob
from shared.wire.peers import PeerClosed, Received
from tests.support.web.written_answers import chunks_read
from tests.support.worlds.gateway_rig import GatewayRig
from tests.support.worlds.router_rig import RouterRig


class Exchange:
    """An ASGI client that hangs on until it has its answer."""

    def __init__(self, handler: Handler, *headers: tuple[bytes, bytes]) -> None:
        self.log = io.StringIO()
        metrics = RequestMetrics(CollectorRegistry())
        rules = EndpointRules(Logger("r", self.log), metrics, Tenants(), 1, 10.0)
        self.sent: list[dict[str, Any]] = []
        scope = {"type": "http", "method": "POST", "path": "/x", "headers": list(headers)}
        asyncio.run(Endpoint(rules, "POST", handler)(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def parts(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:]]


async def answer(connection: Connection) -> None:
    await connection.answer(200, b"{}")


@pytest.mark.parametrize(
    ("given", "returned"),
    [(b"mine-7", b"mine-7"), (b"a b\r\nc\xe9", b"abc"), (b"x" * 500, b"x" * 128)],
)
def test_a_client_s_name_of_a_request_comes_back(given: bytes, returned: bytes) -> None:
    assert Exchange(answer, (b"x-request-id", given)).headers[b"x-request-id"] == returned


@pytest.mark.parametrize("error", [HandoffFailed("the peer is gone"), Overloaded("full")])
def test_our_failures_are_logged_by_name_and_overloads_are_not(error: BatonError) -> None:
    async def fail(connection: Connection) -> None:
        raise error

    exchange = Exchange(fail, (b"x-request-id", b"mine-7"))
    assert exchange.headers[b"x-request-id"] == b"mine-7"
    assert ("request=mine-7" in exchange.log.getvalue()) == (error.status >= 500 and error.status != 503)


class Waiting:
    """A gateway with one request. Each of its news comes after a number of pings; without a number it comes at once."""

    def __init__(self, *news: Update | Failure | tuple[int, News]) -> None:
        self._news = [one if isinstance(one, tuple) else (0, one) for one in news]
        self._num_pings = 0

    def open(self, requests: Any, answer_id: str) -> Mailbox:
        self._mailbox = Mailbox(answer_id)
        self._mailbox.rids = ["r"]
        self._deliver()
        return self._mailbox

    def pinged(self) -> None:
        self._num_pings += 1
        self._deliver()

    def _deliver(self) -> None:
        while self._news and self._news[0][0] <= self._num_pings:
            self._mailbox.put(self._news.pop(0)[1])

    def close(self, mailbox: Mailbox) -> None:
        pass


SHOW = ShowOptions((), True, UsageShown.NEVER, return_token_ids=False, num_logprobs=-1)
PLAN = GenerationPlan("hashlm", (PromptJob([1], 0, ""),), 1, SamplingParams(max_tokens=5), SHOW)


def written(facts: AnswerFacts) -> Writer:
    return ChoicesWriter(CompletionShape(facts.tokenizer, facts.plan.show), facts)


def stream(
    gateway: Waiting, *, whole: bool = False, plan: GenerationPlan = PLAN, start: StreamStart | None = None
) -> Exchange:
    plan = replace(plan, show=replace(plan.show, stream=plan.show.stream and not whole))
    tokenizer = HashTokenizer()

    async def work(connection: Connection) -> None:
        write, metrics = connection.write, RequestMetrics(CollectorRegistry())

        async def counted(data: bytes, *, last: bool = False) -> None:
            await write(data, last=last)
            if data in (COMMENT, ping_among_ids(COMMENT)):
                gateway.pinged()

        connection.write = counted  # type: ignore[method-assign]
        answering = Generation(plan, written, tokenizer, gateway, metrics, 0.0, start=start)  # type: ignore[arg-type]
        await answering.run(connection)

    return Exchange(work, (b"x-request-id", b"mine-7"))


def token() -> Update:
    return Update("r", 0, [65], [], None)


def done(choice: int = 0) -> Update:
    key = Key("r", 1, "r", 0, choice)
    return Update("r", choice, [65], [], SequenceEnd(key, "stop", 1, 1, "", ""))


@pytest.mark.parametrize("start", [None, StreamStart("TOKEN", "t0", 1)])
def test_the_sdk_reads_a_stream_whose_second_choice_waits(
    monkeypatch: pytest.MonkeyPatch, start: StreamStart | None
) -> None:
    """The first choice's event may have an id, behind which the decoder ends an event at each blank line."""
    monkeypatch.setattr(generation, "PING_S", 0.01)
    exchange = stream(Waiting(done(0), (2, done(1))), plan=replace(PLAN, num_sequences=2), start=start)
    data = b"".join(exchange.parts)
    assert data.count(b": waiting\n", data.index(b"data: "), data.index(b"[DONE]")) >= 2
    assert (b"id: TOKEN/1." in data) == (start is not None)
    assert sorted(choice.index for chunk in chunks_read(data) for choice in chunk.choices) == [0, 1]


def test_early_failures_get_no_200_and_late_ones_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure("r", HandoffFailed("the peer is gone"))
    assert stream(Waiting(failure)).sent[0]["status"] == HandoffFailed.status
    monkeypatch.setattr(generation, "PING_S", 0.01)
    late = stream(Waiting((2, failure)))
    assert late.sent[0]["status"] == 200 and b"handoff_failed" in late.parts[-1]
    assert "request=mine-7" in late.log.getvalue()


def test_pings_go_on_before_and_after_a_scored_prompt_s_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "PING_S", 0.01)
    scored = SamplingParams(max_tokens=5, prompt_logprobs=0)
    show = replace(SHOW, num_logprobs=0, echoes_logprobs=True)
    entry = TokenLogprob(-1.0, (), ())
    news = [(2, ScoredPrompt("r", [entry])), (6, ScoredPrompt("r", [entry])), (9, done())]
    exchange = stream(Waiting(*news), plan=GenerationPlan("m", (PromptJob([65, 66, 67], 0, "abc"),), 1, scored, show))
    pings = [index for index, part in enumerate(exchange.parts) if part == COMMENT]
    opening = next(index for index, part in enumerate(exchange.parts) if b"text_offset" in part)
    assert len(pings) >= 9 and pings[-1] > opening > pings[4], "before the opening and behind it"


def test_a_hidden_answer_s_usage_counts_cached_tokens() -> None:
    show = replace(SHOW, stream=False, hides_answer=True)
    exchange = stream(Waiting(token(), done()), plan=replace(PLAN, show=show))
    answer = json.loads(exchange.parts[0])
    assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert answer["choices"][0] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}


def test_a_whole_answer_says_nothing_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PING_S", 0.01)
    assert len(stream(Waiting(done()), whole=True).parts) == 1


@pytest.mark.parametrize("length", [1, LONG_BODY_BYTES])
def test_what_is_too_deep_for_a_template_is_a_400(length: int) -> None:
    def dive() -> None:
        dive()

    with pytest.raises(InvalidRequest, match="nested too deeply"):
        asyncio.run(BodyWork().in_time(b"x" * length, dive, BodyHold(None, "")))


# ---- who pays for a prompt without a token


PROMPTS = ([1, 2, 3, 4], [5, 6])


class Answer(GatewayRig):
    """An answer to two prompts, from one decode node. The node begins only the first `num_begun` of them."""

    def __init__(self, num_begun: int, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(RouterRig())
        self.node = self.rig.join("decode", "d")
        plan = replace(PLAN, jobs=tuple(PromptJob(ids, 0, "") for ids in PROMPTS))
        metrics = RequestMetrics(CollectorRegistry())
        self.generation = Generation(plan, written, HashTokenizer(), self.gateway, metrics, time.monotonic())
        self._connection = Connection({"headers": list(headers)}, None, None, 5.0)  # type: ignore[arg-type]
        self._num_begun = num_begun

    async def run(self, ends: str) -> None:
        task = asyncio.create_task(self.generation.run(self._connection))
        await asyncio.sleep(0)
        keys = [generate.key for _, generate in self.link.generates[: self._num_begun]]
        self.gateway.handle(Received(self.node.peer, Begun("d", 1, keys)))
        if ends == "hangs up":
            task.cancel()
        elif ends == "is lost":
            self.gateway.handle(PeerClosed(self.node.peer))
        else:
            self.rig.now = 61.0  # the rig's time limit is 60 seconds
            self.rig.registry.seen(self.node, self.rig.now)
            self.gateway.tick()
        await asyncio.wait([task])
        assert task.cancelled() or task.exception() is not None


def num_used(num_begun: int, ends: str, *headers: tuple[bytes, bytes]) -> int:
    answer = Answer(num_begun, *headers)
    asyncio.run(answer.run(ends))
    return answer.generation.num_used


@pytest.mark.parametrize(("num_begun", "expected"), [(0, 0), (1, 4), (2, 6)])
def test_a_client_that_hangs_up_pays_the_prompts_begun(num_begun: int, expected: int) -> None:
    assert num_used(num_begun, "hangs up") == expected


def test_a_client_whose_own_deadline_passes_pays_too() -> None:
    assert num_used(2, "is late", (DEADLINE, b"30000")) == 6


@pytest.mark.parametrize("ends", ["is lost", "is late"])
def test_a_client_that_we_fail_pays_nothing(ends: str) -> None:
    assert num_used(2, ends) == 0
