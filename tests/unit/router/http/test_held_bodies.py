"""What long bodies and bursts of bodies may take, and who holds their bytes in the budget."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry

from router.api.answer.stream_token import Signer
from router.api.ask.resolve import CHARS_PER_TOKEN, Resolver
from router.api.endpoint import Endpoint, EndpointRules
from router.api.openai.tokenization import MOST_PIECES
from router.api.site.body_reader import BodyReader
from router.api.site.generation_handlers import GenerationHandlers
from router.api.site.served_model import ServedModel
from router.api.site.token_handlers import TokenHandlers
from router.fleet.registry import Registry
from router.http.body_budget import BodyBudget, BodyHold
from router.http.work_threads import HUGE_BODY_BYTES, LONG_BODY_BYTES, MOST_AT_ONCE, NUM_THREADS
from router.queue.desk import Desk
from router.tenants.book import Tenants
from router.text.hashlm import hash_text_model
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import InvalidRequest, NoNodes, QueueFull
from shared.observe.log import Logger
from shared.observe.metrics import RequestMetrics
from tests.support.machine.patience import HANG_GUARD_S

PATH = "/v1/completions"
COUNT = "/v1/messages/count_tokens"
GRAMMAR = json.dumps({"prompt": "hi", "guided_regex": "a"}).encode()
LONG = json.dumps({"prompt": "a" * LONG_BODY_BYTES}).encode()
Headers = list[tuple[bytes, bytes]]


class Site:
    """The handlers of a router without nodes."""

    def __init__(self, max_context: int = 0) -> None:
        metrics, tenants = RequestMetrics(CollectorRegistry()), Tenants()
        self.gateway, self.tenant_metrics, self.once = Mock(), Mock(), Mock()
        self.gateway.open.side_effect = NoNodes("none")
        self.budget = BodyBudget(1 << 20)
        self.model = model = ServedModel(
            Resolver("hashlm", hash_text_model(), LimitsConfig()), Registry(10.0), max_context
        )
        self.bodies = bodies = BodyReader(metrics, self.once, LimitsConfig().max_body_bytes)
        desk = Desk(tenants, self.tenant_metrics, Mock())
        self.generation = GenerationHandlers(model, bodies, self.gateway, desk, Signer(""))
        self.tokens = TokenHandlers(model, bodies)
        self._rules = EndpointRules(Logger("r", Mock()), metrics, tenants, 1, 10.0, bodies=self.budget)
        self.sent: list[dict[str, object]] = []

    def ask(self, raw: bytes, headers: Headers, gone: asyncio.Event, path: str = PATH) -> asyncio.Task[None]:
        parts = [{"type": "http.request", "body": raw, "more_body": False}]

        async def receive() -> dict[str, object]:
            if not parts:
                await gone.wait()
            return parts.pop() if parts else {"type": "http.disconnect"}

        async def send(message: dict[str, object]) -> None:
            self.sent.append(message)

        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("a", 1)}
        others = {"/tokenize": self.tokens.tokenize, COUNT: self.tokens.count_tokens}
        handler = (self.generation.by_path() | others)[path]
        return asyncio.create_task(Endpoint(self._rules, "POST", handler)(scope, receive, send))  # type: ignore[arg-type]


def no_hold() -> BodyHold:
    return BodyHold(None, "")


def run(told: Callable[[Site, threading.Event], Awaitable[None]]) -> None:
    """`told` gets an event that ends blocked work."""

    async def main() -> None:
        go = threading.Event()
        try:
            async with asyncio.timeout(HANG_GUARD_S):
                await told(Site(), go)
        finally:
            go.set()

    asyncio.run(main())


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await asyncio.sleep(0.001)


def test_work_that_waits_for_a_thread_keeps_no_lost_body() -> None:
    """The defect: an executor's queue kept the bodies."""

    async def told(site: Site, go: threading.Event) -> None:
        work, gone = site.bodies.work, asyncio.Event()
        blockers = [asyncio.create_task(work.in_time(LONG, go.wait, no_hold())) for _ in range(NUM_THREADS)]
        await asyncio.sleep(0)
        before = sys.getrefcount(LONG)
        asked = [site.ask(LONG, [], gone) for _ in range(3)]
        await until(lambda: site.budget.used == 3 * len(LONG))
        await asyncio.sleep(0.01)
        gone.set()
        await asyncio.gather(*asked)
        del asked
        assert site.budget.used == 0 and sys.getrefcount(LONG) <= before
        go.set()
        await asyncio.gather(*blockers)

    run(told)


def test_a_running_thread_holds_the_body_that_it_reads() -> None:
    """The defect: a hang-up gave the bytes back."""

    async def told(site: Site, go: threading.Event) -> None:
        budget, begun = site.budget, threading.Event()
        hold = BodyHold(budget, "a")
        hold.take(5)

        def work() -> None:
            begun.set()
            go.wait()

        task = asyncio.create_task(site.bodies.work.in_time(LONG, work, hold))
        await until(begun.is_set)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        hold.let_go()
        assert budget.used == 5
        go.set()
        await until(lambda: not budget.used)

    run(told)


def test_an_error_for_a_client_that_left_is_not_logged() -> None:
    """The defect: asyncio logged it as an exception that was never retrieved."""
    complaints: list[dict[str, Any]] = []

    async def told(site: Site, go: threading.Event) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
        hold, begun = BodyHold(site.budget, "a"), threading.Event()
        hold.take(5)

        def work() -> None:
            begun.set()
            go.wait()
            raise InvalidRequest("no such tool")

        task = asyncio.create_task(site.bodies.work.in_time(LONG, work, hold))
        await until(begun.is_set)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        hold.let_go()
        go.set()
        await until(lambda: not site.budget.used)
        await asyncio.sleep(0)
        gc.collect()

    run(told)
    assert not complaints


def test_an_answer_without_a_client_holds_its_body() -> None:
    """The defect: with an Idempotency-Key such bodies piled up."""

    async def told(site: Site, go: threading.Event) -> None:
        blocker = asyncio.create_task(site.generation._checks.run(go.wait, no_hold()))
        await asyncio.sleep(0)
        gone = asyncio.Event()
        asked = site.ask(GRAMMAR, [(b"idempotency-key", b"k")], gone)
        await until(lambda: len(site.generation._kept) == 1)
        gone.set()
        await asked
        assert site.budget.used == len(GRAMMAR)
        go.set()
        await blocker
        await until(lambda: not site.budget.used)

    run(told)


def test_a_repeat_that_waits_holds_no_body() -> None:
    async def told(site: Site, go: threading.Event) -> None:
        kept, gone = site.generation._kept, asyncio.Event()
        kept.answer = Mock(wraps=kept.answer)  # type: ignore[method-assign]
        blocker = asyncio.create_task(site.generation._checks.run(go.wait, no_hold()))
        await asyncio.sleep(0)
        key = [(b"idempotency-key", b"k")]
        asked = [site.ask(raw, key, gone) for raw in (GRAMMAR, b" " + GRAMMAR)]
        await until(lambda: kept.answer.call_count == 2)  # type: ignore[attr-defined]  # a Mock's
        assert site.budget.used == len(GRAMMAR)
        go.set()
        await asyncio.gather(blocker, *asked)
        assert not site.budget.used

    run(told)


CONTEXT = 10
MOST_CHARS = CONTEXT * CHARS_PER_TOKEN


def turns(text: str) -> dict[str, Any]:
    """A conversation that the template renders as long as `text`."""
    return {"messages": [{"role": "user", "content": text[len("user:  assistant: ") :]}], "max_tokens": 1}


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize(
    ("path", "made"),
    [
        (PATH, lambda text: {"prompt": text}),
        (PATH, lambda text: {"prompt": text, "truncate_prompt_tokens": 1}),
        ("/v1/chat/completions", turns),
        ("/v1/messages", turns),
        ("/v1/responses", lambda text: {"input": text[len("user:  assistant: ") :]}),
        (COUNT, turns),
        ("/tokenize", lambda text: {"prompt": text}),
        ("/tokenize", lambda text: {"content": text}),
        ("/tokenize", turns),
    ],
)
def test_a_text_that_can_t_fit_is_not_tokenized(path: str, made: Callable[[str], dict[str, Any]], more: int) -> None:
    async def told() -> Site:
        site = Site(CONTEXT)
        raw = json.dumps(made("a" * (MOST_CHARS + more))).encode()
        await site.ask(raw, [(b"content-type", b"application/json")], asyncio.Event(), path)
        return site

    site = asyncio.run(told())
    answer = site.sent[-1]["body"]
    assert isinstance(answer, bytes)
    assert (b"characters" in answer and b"the prompt is too long" in answer) is bool(more), answer
    assert site.sent[0]["status"] == 400 if more else b"characters" not in answer


def test_pieces_are_written_for_so_many_tokens() -> None:
    async def status(num_chars: int) -> object:
        site = Site()
        raw = json.dumps({"prompt": "a" * num_chars, "with_pieces": True}).encode()
        await site.ask(raw, [], asyncio.Event(), "/tokenize")
        return site.sent[0]["status"]

    assert asyncio.run(status(MOST_PIECES)) == 200
    assert asyncio.run(status(MOST_PIECES + 1)) == 400


def test_huge_bodies_are_read_one_at_a_time() -> None:
    async def told(site: Site, go: threading.Event) -> None:
        work, seen = site.bodies.work, list[str]()
        huge = b"x" * (HUGE_BODY_BYTES + 1)
        first = asyncio.create_task(work.in_time(huge, go.wait, no_hold()))
        await asyncio.sleep(0)
        second = asyncio.create_task(work.in_time(huge, lambda: seen.append("second"), no_hold()))
        await asyncio.sleep(0)
        for _ in range(NUM_THREADS + 1):
            await work.in_time(huge[:-1], lambda: seen.append("shorter"), no_hold())
        assert "second" not in seen
        go.set()
        await asyncio.gather(first, second)
        assert "second" in seen

    run(told)


SHORT = {PATH: b'{"prompt": "hi"}', "/tokenize": b'{"prompt": "hi"}'}


@pytest.mark.parametrize("path", SHORT)
def test_a_burst_leaves_turns_of_the_loop_to_others(path: str) -> None:
    """The defect: nodes' messages waited until all bodies were parsed, and healthy nodes counted as silent."""

    async def told(site: Site, go: threading.Event) -> None:
        gone, num_answered = asyncio.Event(), [0]
        asked = [site.ask(SHORT[path], [], gone, path) for _ in range(10 * MOST_AT_ONCE)]
        while not all(task.done() for task in asked):
            await asyncio.sleep(0)
            num_answered.append(sum("status" in message for message in site.sent))
        assert num_answered[-1] == len(asked)
        assert max(after - before for before, after in pairwise(num_answered)) <= MOST_AT_ONCE

    run(told)


@pytest.mark.parametrize(("headers", "status"), [([], 503), ([(b"idempotency-key", b"k")], 400)])
def test_a_full_queue_is_told_before_a_body_is_parsed(headers: Headers, status: int) -> None:
    """A request with an Idempotency-Key may have a kept answer, which needs no room."""

    async def told(site: Site, go: threading.Event) -> None:
        site.gateway.check_room.side_effect = QueueFull("full")
        await site.ask(b"not JSON", headers, asyncio.Event())
        assert site.sent[0]["status"] == status
        assert site.tenant_metrics.refused.called == (status == 503)

    run(told)
