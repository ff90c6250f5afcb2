"""The tool that mutates request bodies: it reaches every endpoint, is repeatable, and takes no wrong answer."""

from __future__ import annotations

import random
from unittest.mock import Mock

import pytest
from starlette.routing import Route

from router.api.endpoint import EndpointRules
from router.api.fields.parse import BodyParser
from router.api.site.routes import build_routes
from router.api.site.tables import ALL_TABLES
from router.tenants.book import Tenants
from shared.core.errors import InvalidRequest
from tests.support.bodies.body_exchange import Answer, Fault, judged
from tests.support.bodies.body_requests import Request, make_request
from tests.support.bodies.body_source import BodySource, Table
from tests.support.bodies.body_values import to_json

HEADERS = {b"x-request-id": b"r"}
STREAM = {**HEADERS, b"content-type": b"text/event-stream; charset=utf-8"}
LINES = {**HEADERS, b"content-type": b"application/x-ndjson"}
ERROR = b'{"error":{"message":"m","type":"t","param":null,"code":"c"}}'
REQUEST = Request(0, "/tokenize", "plain", b"{}", [b"POST /tokenize HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"])


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


# ---- what is taken


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
