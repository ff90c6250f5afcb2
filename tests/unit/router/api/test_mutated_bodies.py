"""The tool that mutates request bodies: what it sends is repeatable and reaches every field; what it takes is right."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest
from starlette.routing import Route

from router.api.endpoint import EndpointRules
from router.api.fields.parse import BodyParser
from router.api.site.routes import build_routes
from router.api.site.tables import ALL_TABLES
from router.tenants.book import Tenants
from shared.core.errors import InvalidRequest
from tests.chaos.bodies import Tally, is_json
from tests.support.bodies.agent_turns import conversation
from tests.support.bodies.body_exchange import Answer, Client, Fault, judged
from tests.support.bodies.body_requests import Manner, Request, make_request
from tests.support.bodies.body_source import BodySource, Table, fields_of
from tests.support.bodies.body_values import MARK, RAW, to_json

HEADERS = {b"x-request-id": b"r"}
STREAM = {**HEADERS, b"content-type": b"text/event-stream; charset=utf-8"}
LINES = {**HEADERS, b"content-type": b"application/x-ndjson"}
ERROR = b'{"error":{"message":"m","type":"t","param":null,"code":"c"}}'
REQUEST = Request(0, "/tokenize", "plain", b"{}", [b"POST /tokenize HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"])
OLLAMA = dataclasses.replace(REQUEST, path="/api/chat")


def made(seed: int, count: int, tables: tuple[Table, ...] = ALL_TABLES) -> list[Request]:
    return [make_request(seed, index, tables, "hashlm") for index in range(count)]


# ---- what is sent


def test_every_endpoint_that_takes_a_body_is_among_them() -> None:
    """Those under /admin move nodes, so they are left out."""
    handlers = Mock(generation=Mock(by_path=dict))
    router = build_routes(EndpointRules(Mock(), Mock(), Tenants(), 1, 1.0), handlers, Tenants())
    methods = {one.path: one.app._methods for one in router.routes if isinstance(one, Route)}  # type: ignore[attr-defined]
    posts = [path for path, names in methods.items() if names == ("POST",)]
    assert "/tokenize" in posts
    assert {path for path in posts if not path.startswith("/admin/")} <= {table.path for table in ALL_TABLES}


def test_a_seed_and_a_number_give_the_same_request() -> None:
    assert made(3, 200) == made(3, 200)
    assert made(3, 200)[150] == make_request(3, 150, ALL_TABLES, "hashlm")
    assert made(3, 20) != made(4, 20)


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda table: table.path)
def test_every_field_is_sent_with_values_of_many_types(table: Table) -> None:
    types = defaultdict(set)
    for request in made(1, 4000, (table,)):
        if is_json(request.body) and isinstance(found := msgspec.json.decode(request.body), dict):
            for name, value in found.items():
                types[name].add(type(value))
    few = {name: types[name] for name in fields_of(table) if len(types[name]) < 3}
    assert not few


@pytest.mark.parametrize("table", ALL_TABLES, ids=lambda table: table.path)
def test_plain_bodies_are_valid(table: Table) -> None:
    """A new endpoint whose fields need special values gets them in BodySource."""
    parser, refused = BodyParser(table), []
    for index in range(400):
        body = BodySource(random.Random(index), "hashlm").plain(table)
        try:
            parser.parse(to_json(body, ascii_only=True))
        except InvalidRequest as error:
            refused.append(error.message)
    assert len(refused) < 20, refused


def test_shares_of_what_is_sent() -> None:
    requests = made(1, 1500)
    assert sum(is_json(request.body) for request in requests) > len(requests) / 2
    assert {request.manner for request in requests} == set(Manner)
    assert {request.kind for request in requests} == {"plain", "fields", "structure", "bytes"}
    assert 0.85 < sum(request.owed for request in requests) / len(requests) < 0.99
    assert any(b"chunked" in request.wire for request in requests if request.owed)


@pytest.mark.parametrize("number", range(len(RAW)))
@pytest.mark.parametrize("ascii_only", [False, True])
def test_what_no_encoder_writes_is_put_into_the_text(number: int, ascii_only: bool) -> None:
    assert to_json({"a": f"{MARK}{number}"}, ascii_only=ascii_only) == b'{"a": ' + RAW[number] + b"}"


def test_histories_of_agents_have_calls_parts_and_reasoning() -> None:
    turns = [turn for seed in range(200) for turn in conversation(random.Random(seed), lambda: "hi")]
    assert {turn["role"] for turn in turns} == {"system", "developer", "user", "assistant", "tool"}
    for name in ("tool_calls", "tool_call_id", "reasoning", "reasoning_content", "refusal"):
        assert any(name in turn for turn in turns), name
    assert {type(turn["content"]) for turn in turns} == {str, list, type(None)}


# ---- what is taken


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (Answer(200, HEADERS, b'{"choices":[]}'), "sampler"),
        (Answer(200, HEADERS, b'{"tokens":[]}'), "answered"),
        (Answer(200, STREAM, b'data: {"choices":[]}\n\n: waiting\n\ndata: [DONE]\n\n'), "sampler"),
        (Answer(400, HEADERS, ERROR), "field"),
        (Answer(400, HEADERS, ERROR.replace(b'"m"', b'"the request body is not valid JSON: x"')), "not JSON"),
        (Answer(400, HEADERS, ERROR.replace(b'"m"', b'"knows printable ASCII only"')), "tokenizer"),
        (Answer(404, HEADERS, ERROR), "404"),
        (Answer(429, HEADERS, ERROR), "429 c"),
        (Answer(503, HEADERS, ERROR), "503 c"),
    ],
)
def test_how_far_a_body_came(answer: Answer, end: str) -> None:
    assert judged(REQUEST, answer) == end


@pytest.mark.parametrize(
    "answer",
    [
        *(Answer(status, HEADERS, ERROR) for status in (500, 501, 502, 504)),
        Answer(200, {}, b"{}"),
        Answer(200, {b"x-request-id": b"\xff"}, b"{}"),
        Answer(200, HEADERS, b"{"),
        Answer(400, HEADERS, b"{}"),
        Answer(400, HEADERS, b'{"error":"no"}'),
        Answer(400, HEADERS, b"Invalid HTTP request received."),
        Answer(503, HEADERS, b"[]"),
        Answer(200, STREAM, b'data: {"choices":[]}\n\n'),
        Answer(200, STREAM, b'data: {"error":{}}\n\ndata: [DONE]\n\n'),
        Answer(200, LINES, b'{"done":false}\n'),
        Answer(200, LINES, b'{"done":true}\n{"done":true}\n'),
        Answer(200, LINES, b'{"done":true}'),
        Answer(200, LINES, b'{"error":"no"}\n'),
    ],
)
def test_answers_that_nobody_may_get(answer: Answer) -> None:
    with pytest.raises(Fault):
        judged(REQUEST, answer)


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (Answer(200, LINES, b'{"done":false}\n{"done":true}\n'), "sampler"),
        (Answer(200, HEADERS, b'{"done":true}'), "sampler"),
        (Answer(200, HEADERS, b'{"capabilities":[]}'), "answered"),
        (Answer(400, HEADERS, b'{"error":"no"}'), "field"),
        (Answer(503, HEADERS, b'{"error":"no"}'), "503 error"),
    ],
)
def test_how_far_a_body_came_in_ollama_s_form(answer: Answer, end: str) -> None:
    assert judged(OLLAMA, answer) == end


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def asked(script: Script, *requests: Request) -> list[str]:
    server = await asyncio.start_server(script, "127.0.0.1", 0)
    async with server:
        client = Client(*server.sockets[0].getsockname())
        try:
            return [await client.ask(request) for request in requests]
        finally:
            await client.close()


def scripted(*answers: bytes) -> Script:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await reader.readuntil(b"{}")
            writer.write(answer)
        writer.close()

    return serve


WHOLE = b"HTTP/1.1 200 OK\r\nx-request-id: r\r\ncontent-length: 2\r\n\r\n{}"
CHUNKED = b"HTTP/1.1 200 OK\r\nx-request-id: r\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"


def test_a_connection_is_kept_for_the_next_request() -> None:
    answers = scripted(WHOLE, b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED)
    assert asyncio.run(asked(answers, REQUEST, REQUEST)) == ["answered", "answered"]


@pytest.mark.parametrize("answer", [b"", WHOLE[:-1], CHUNKED[:-1], b"HTTP/1.1 2x0 OK\r\n\r\n"])
def test_an_answer_that_is_cut_is_a_fault_unless_none_was_owed(answer: bytes) -> None:
    with pytest.raises(Fault, match="no whole answer"):
        asyncio.run(asked(scripted(answer), REQUEST))
    assert asyncio.run(asked(scripted(answer), dataclasses.replace(REQUEST, owed=False))) == ["closed"]


def test_an_answer_that_does_not_come_is_a_fault(monkeypatch: Any) -> None:
    monkeypatch.setattr("tests.support.bodies.body_exchange.HANG_GUARD_S", 0.05)

    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    with pytest.raises(Fault, match="no answer"):
        asyncio.run(asked(nothing, REQUEST))


def test_shares_are_demanded_of_long_runs_only() -> None:
    tally = Tally()
    for _ in range(999):
        tally.note(REQUEST, "field")
    assert tally.has_shares()
    tally.note(REQUEST, "field")
    assert not tally.has_shares()
    for _ in range(112):
        tally.note(REQUEST, "sampler")
    assert tally.has_shares()


@pytest.mark.parametrize("coding", ["", "Transfer-Encoding: chunked\r\n", "Transfer-Encoding: gzip, chunked\r\n"])
def test_a_501_is_right_for_another_transfer_coding_only(coding: str) -> None:
    request = Request(0, "/x", "k", b"", [f"POST /x HTTP/1.1\r\nHost: a\r\n{coding}\r\n".encode()])
    answer = Answer(501, {b"x-request-id": b"r"})
    if "gzip" in coding:
        assert judged(request, answer) == "other coding"
    else:
        with pytest.raises(Fault, match="status 501"):
            judged(request, answer)
