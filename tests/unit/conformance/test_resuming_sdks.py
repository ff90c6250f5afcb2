"""Clients of openai and anthropic whose streams continue: connections are cut at random bytes, and no token is lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from stream_conformance import resume
from stream_conformance.reference import Json, Reference, events_of
from stream_conformance.resume import ResumeRefused, ResumingTransport, resuming
from tests.support.web import broken_streams as broken
from tests.support.web.broken_streams import serving

KILLS = 250  # per kind of client: 1,000 in all
TOKENS = 30
MOST_BYTES = 2000  # of a connection before it is cut; a whole answer has some 8,000
MESSAGE: Json = {"model": "m", "max_tokens": TOKENS, "messages": [{"role": "user", "content": "go"}], "stream": True}
EVENT = 'id: {token}{number}\ndata: {{"id": "x", "choices": [{{"index": 0, "delta": {{"content": "{number} "}}}}]}}\n\n'
END = "data: [DONE]\n\n"


class CutWriter:
    """Cuts the connection after so many bytes: closes it, or resets it."""

    def __init__(self, writer: asyncio.StreamWriter, num_bytes: int, *, resets: bool) -> None:
        self._writer, self._left, self._resets = writer, num_bytes, resets
        self.was_cut = False

    def write(self, data: bytes) -> None:
        self._writer.write(data[: self._left])
        self._left -= len(data)

    async def drain(self) -> None:
        await self._writer.drain()
        if self._left < 0:
            self.was_cut = True
            if self._resets:
                self._writer.transport.abort()
            raise ConnectionResetError

    def close(self) -> None:
        self._writer.close()


class CutReference(Reference):
    """Every connection is cut at a byte drawn by seed. `begun`: path, body and facts of the newest stream."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.drawn = random.Random(seed)
        self.num_cut = 0
        self.begun: tuple[str, Json, list[Any]] = ("", {}, [])

    async def stream(self, path: str, raw: bytes, headers: dict[str, str], writer: Any) -> None:
        least = 0 if "last-event-id" in headers else 200  # the SDKs themselves ask again for what never began
        cut = CutWriter(writer, self.drawn.randrange(least, MOST_BYTES), resets=self.drawn.random() < 0.5)
        try:
            await super().stream(path, raw, headers, cut)  # type: ignore[arg-type]
        finally:
            self.num_cut += cut.was_cut

    def events(self, path: str, body: Json, facts: list[Any]) -> list[str]:
        self.begun = path, body, facts
        return events_of(path, body, facts)

    def told(self) -> list[str]:
        """The tokens of the newest stream."""
        path, body, facts = self.begun
        datas = [event.partition("data: ")[2] for event in events_of(path, body, facts)]
        return tokens_of(json.loads(data) for data in datas if data.startswith("{"))


def tokens_of(events: Iterable[Any]) -> list[str]:
    """Works on what the SDKs return, and on plain JSON."""
    found = []
    for event in events:
        data = event if isinstance(event, dict) else event.model_dump()
        delta = data["choices"][0]["delta"] if data.get("choices") else data.get("delta") or {}
        text = delta.get("content") or delta.get("text")
        found += [text] if text else []
    return found


def asked(client: Any) -> Any:
    """A stream of either SDK; of their clients for asyncio, what to await for it."""
    of_anthropic = isinstance(client, anthropic.Anthropic | anthropic.AsyncAnthropic)
    return (client.messages if of_anthropic else client.chat.completions).create(**MESSAGE)


def made(make: Any, url: str) -> Any:
    return make(base_url=f"{url}/v1" if "OpenAI" in make.__name__ else url, api_key="k", max_retries=0)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "LONGEST_PAUSE_S", 0.0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("make", [openai.OpenAI, anthropic.Anthropic])
def test_five_hundred_kills_cost_no_token(make: Any) -> None:
    server = CutReference(seed=5)
    with serving(server) as (url,), resuming(made(make, url)) as client:
        while server.num_cut < KILLS:
            tokens = tokens_of(asked(client))
            assert tokens == server.told() and len(tokens) == TOKENS


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("make", [openai.AsyncOpenAI, anthropic.AsyncAnthropic])
def test_nor_do_five_hundred_with_asyncio(make: Any) -> None:
    server = CutReference(seed=6)

    async def check(url: str) -> None:
        async with resuming(made(make, url)) as client:
            while server.num_cut < KILLS:
                tokens = tokens_of([event async for event in await asked(client)])
                assert tokens == server.told() and len(tokens) == TOKENS

    with serving(server) as (url,):
        asyncio.run(check(url))


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("kind", [broken.Repeats, broken.Skips])
def test_a_gap_or_a_repetition_is_an_error(kind: type[Reference]) -> None:
    """Rather none than a wrong token."""

    class Cut(kind, CutReference):  # type: ignore[misc, valid-type]
        pass

    with (
        serving(Cut(seed=5)) as (url,),
        resuming(made(openai.OpenAI, url)) as client,
        pytest.raises(openai.APIConnectionError) as caught,
    ):
        tokens_of(asked(client))
    assert isinstance(caught.value.__cause__, ResumeRefused) and "broke the contract" in str(caught.value.__cause__)


class Answers:
    """Answers in turn, each (status, headers, text), or None: nobody is there. `waited`: the pauses before them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, dict[str, str], str] | None) -> None:
        self._answers = list(answers)
        self.asked: list[httpx2.Request] = []
        self.waited: list[float] = []
        monkeypatch.setattr(resume.time, "sleep", self.waited.append)

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.asked.append(request)
        answer = self._answers.pop(0)
        if answer is None:
            raise httpx2.ConnectError("refused")
        status, headers, text = answer
        return httpx2.Response(status, headers={"content-type": "text/event-stream", **headers}, text=text)

    def read(self, *servers: str, tries: int = 30) -> list[str]:
        transport = ResumingTransport(*servers, inner=httpx2.MockTransport(self), tries=tries)
        http = httpx2.Client(transport=transport)
        with openai.OpenAI(base_url="http://one:1/v1", api_key="k", max_retries=0, http_client=http) as client:
            return tokens_of(asked(client))

    @property
    def places(self) -> list[str]:
        return [request.headers.get("Last-Event-ID", "") for request in self.asked]


def events(first: int, last: int, token: str = "t/") -> str:
    """These events; the first one's id has the token."""
    return "".join(EVENT.format(token=token * (number == first), number=number) for number in range(first, last + 1))


def test_it_continues_behind_the_last_whole_event(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, (200, {}, events(1, 3)[:-5]), (200, {}, events(3, 4) + "id: 5\n" + END))
    assert answers.read() == ["1 ", "2 ", "3 ", "4 "]
    assert answers.places == ["", "t/2"] and len({request.content for request in answers.asked}) == 1


def test_it_waits_as_long_as_the_server_says(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = (503, {"Retry-After": "7"}, "")
    overloaded = (529, {}, "")  # Anthropic's
    rest = (200, {}, events(2, 2) + "id: 3\n" + END)
    answers = Answers(monkeypatch, (200, {}, events(1, 1)), busy, None, overloaded, rest)
    assert answers.read() == ["1 ", "2 "]
    assert [int(pause) for pause in answers.waited] == [0, 7, 0, 0]


def test_other_servers_are_asked_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, (200, {}, events(1, 1)), None, (200, {}, events(2, 2) + "id: 3\n" + END))
    assert answers.read("http://two:2") == ["1 ", "2 "]
    assert [f"{one.url.host}:{one.url.port}" for one in answers.asked] == ["one:1", "two:2", "one:1"]
    assert [one.headers["Host"] for one in answers.asked] == ["one:1", "two:2", "one:1"]
    assert {one.url.path for one in answers.asked} == {"/v1/chat/completions"}


def test_an_error_without_id_is_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = 'data: {"error": {"type": "server_error", "message": "node lost"}}\n\n'
    answers = Answers(monkeypatch, (200, {}, events(1, 1) + lost), (200, {}, events(2, 2) + "id: 3\n" + END))
    assert answers.read() == ["1 ", "2 "]


def test_a_final_error_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    final = 'data: {"error": {"type": "invalid_request_error", "message": "resume_mismatch: no"}}\n\n'
    answers = Answers(monkeypatch, (200, {}, events(1, 1) + final))
    with pytest.raises(openai.APIError, match="resume_mismatch"):
        answers.read()
    refused = Answers(monkeypatch, (200, {}, events(1, 1)), (422, {}, "{}"))
    with pytest.raises(openai.APIConnectionError) as caught:
        refused.read()
    assert "status 422" in str(caught.value.__cause__)


def test_it_gives_up_after_failures_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, (200, {}, events(1, 1)), None, (200, {}, events(2, 2)), None, None, None)
    with pytest.raises(openai.APIConnectionError):
        answers.read(tries=3)
    assert len(answers.asked) == 6 and answers.places[-1] == "t/2"


def test_a_stream_without_ids_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without the transport: it ends where the server ends, and its errors are the caller's."""
    plain = events(1, 2).replace("id: t/1\n", "").replace("id: 2\n", "")
    answers = Answers(monkeypatch, (200, {}, plain))
    assert answers.read() == ["1 ", "2 "] and len(answers.asked) == 1
    lost = 'data: {"error": {"type": "server_error", "message": "node lost"}}\n\n'
    with pytest.raises(openai.APIError, match="node lost"):
        Answers(monkeypatch, (200, {}, plain + lost)).read()


def test_a_continuation_that_begins_anew_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server of another kind stands behind the same address, and takes no notice of Last-Event-ID."""
    plain = events(1, 2, token="").replace("id: 1\n", "").replace("id: 2\n", "")
    with pytest.raises(openai.APIConnectionError) as caught:
        Answers(monkeypatch, (200, {}, events(1, 1)), (200, {}, plain + END)).read()
    assert "without an id" in str(caught.value.__cause__)


def test_an_error_of_null_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some servers put the field into every event."""
    plain = (
        events(1, 2).replace("id: t/1\n", "").replace("id: 2\n", "").replace('"id": "x"', '"id": "x", "error": null')
    )
    answers = Answers(monkeypatch, (200, {}, plain + END))
    assert answers.read() == ["1 ", "2 "] and len(answers.asked) == 1


def test_requests_that_are_no_streams_pass_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(monkeypatch, (200, {"content-type": "application/json"}, '{"id": "x", "choices": []}'))
    http = httpx2.Client(transport=ResumingTransport(inner=httpx2.MockTransport(answers)))
    with openai.OpenAI(base_url="http://one/v1", api_key="k", http_client=http) as client:
        client.chat.completions.create(**(MESSAGE | {"stream": False}))
    assert "X-Stream-Ids" not in answers.asked[0].headers
