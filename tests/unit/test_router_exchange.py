"""One HTTP exchange, without sockets: names of requests, comments while a prompt waits, failures that are logged."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.api import generation
from router.api.completions import CompletionShape
from router.api.connection import Connection
from router.api.endpoint import Endpoint, EndpointRules, Handler
from router.api.generation import PING, Generation
from router.api.generation_plan import GenerationPlan, PromptJob, ShowOptions, UsageShown
from router.effects import Failure, Update
from router.mailbox import Mailbox
from router.text.hashlm import HashTokenizer
from shared.core.errors import BatonError, HandoffFailed, Overloaded
from shared.core.sampling_params import SamplingParams
from shared.observe.log import Logger
from shared.observe.metrics import RequestMetrics
from shared.wire.messages import Key, SequenceEnd


class Exchange:
    """An ASGI client that hangs on until it has its answer."""

    def __init__(self, handler: Handler, *headers: tuple[bytes, bytes]) -> None:
        self.log = io.StringIO()
        metrics = RequestMetrics(CollectorRegistry())
        rules = EndpointRules(Logger("r", self.log), metrics, "", 1, 10.0)
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


def test_a_request_without_a_name_gets_one() -> None:
    first, second = (Exchange(answer).headers[b"x-request-id"] for _ in range(2))
    assert first.startswith(b"req-") and first != second


@pytest.mark.parametrize("error", [HandoffFailed("the peer is gone"), Overloaded("full")])
def test_a_failure_of_ours_is_logged_with_the_name_and_an_overload_is_not(error: BatonError) -> None:
    async def fail(connection: Connection) -> None:
        raise error

    exchange = Exchange(fail, (b"x-request-id", b"mine-7"))
    assert exchange.headers[b"x-request-id"] == b"mine-7"
    assert ("request=mine-7" in exchange.log.getvalue()) == (error.status >= 500 and error.status != 503)


class Waiting:
    """A gateway whose one request gets its news after some pings."""

    def __init__(self, *news: Update | Failure) -> None:
        self._news = news

    def open(self, requests: Any, answer_id: str) -> Mailbox:
        mailbox = Mailbox(answer_id)
        mailbox.rids = ["r"]
        asyncio.get_running_loop().call_later(0.05, lambda: [mailbox.put(one) for one in self._news])
        return mailbox

    def close(self, mailbox: Mailbox) -> None:
        pass


def stream(gateway: Waiting, *, whole: bool = False) -> Exchange:
    show = ShowOptions((), not whole, UsageShown.NEVER, return_token_ids=False, num_logprobs=-1)
    plan = GenerationPlan("hashlm", (PromptJob([1], 0, ""),), 1, SamplingParams(max_tokens=5), show)
    tokenizer = HashTokenizer()

    async def work(connection: Connection) -> None:
        metrics, shape = RequestMetrics(CollectorRegistry()), CompletionShape(tokenizer, show)
        await Generation(plan, shape, tokenizer, gateway, metrics, 0.0).run(connection)  # type: ignore[arg-type]

    return Exchange(work, (b"x-request-id", b"mine-7"))


def done() -> Update:
    key = Key("r", 1, "r", 0, 0)
    return Update("r", 0, [65], [], SequenceEnd(key, "stop", 1, 0, "", ""))


def test_a_stream_whose_prompt_waits_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PING_S", 0.01)
    exchange = stream(Waiting(done()))
    assert exchange.sent[0]["status"] == 200 and exchange.parts[0] == PING
    assert exchange.parts.count(PING) >= 2 and exchange.parts[-1].endswith(b"data: [DONE]\n\n")


def test_what_fails_at_once_is_no_200_and_what_fails_late_is_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = Failure("r", HandoffFailed("the peer is gone"))
    assert stream(Waiting(failure)).sent[0]["status"] == HandoffFailed.status
    monkeypatch.setattr(generation, "PING_S", 0.01)
    late = stream(Waiting(failure))
    assert late.sent[0]["status"] == 200 and b"handoff_failed" in late.parts[-1]
    assert "request=mine-7" in late.log.getvalue()


def test_a_whole_answer_says_nothing_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PING_S", 0.01)
    assert len(stream(Waiting(done()), whole=True).parts) == 1
