"""Names that the API answers under, pages that may use it, and how much JSON a body may be: border and one beyond."""

from __future__ import annotations

import asyncio

import pytest

from router.api.fields.json_shape import MOST_CONTAINERS, check_shape
from router.http.body_budget import BodyBudget
from router.http.connection import Connection
from router.http.errors import BodiesFull, HostNotAllowed, MediaTypeRefused
from router.http.ignored import IGNORED, LOWERED, PLACEHOLDERS
from router.http.web_rules import WebRules
from shared.config.settings.http_settings import HttpConfig
from shared.core.errors import ConfigError, InvalidRequest

ELSEWHERE = "https://evil.example"


async def nothing(message: object = None) -> dict[str, object]:
    return {}


def request(
    method: str = "POST", bodies: BodyBudget | None = None, client: str = "127.0.0.1", **headers: str
) -> Connection:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "headers": sent, "client": (client, 1)}
    return Connection(scope, nothing, nothing, 1.0, bodies)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "127.9.9.9", "[::1]:8000", "a.b:9"])
def test_names_that_are_ours(host: str) -> None:
    WebRules(["A.b"], []).check(request("GET", host=host))


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:8000", "192.168.0.1", "", "[::2]", "a.b"])
def test_names_that_are_not(host: str) -> None:
    with pytest.raises(HostNotAllowed):
        WebRules([], []).check(request("GET", host=host))
    WebRules(["*"], []).check(request("GET", host=host))


def test_two_hosts_are_none() -> None:
    two = request("GET", host="localhost")
    two.scope["headers"].append((b"host", b"localhost"))
    with pytest.raises(HostNotAllowed):
        WebRules([], []).check(two)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"])
def test_what_a_page_sends_unasked_is_refused(kind: str) -> None:
    for origin in (ELSEWHERE, "null", "http://localhost:3000"):
        with pytest.raises(MediaTypeRefused):
            WebRules([], []).check(request(host="localhost:8000", origin=origin, content_type=kind))
    with pytest.raises(MediaTypeRefused):
        WebRules([], []).check(request(host="localhost:8000", origin=ELSEWHERE))
    for origin in ("http://localhost:8000", "https://LOCALHOST:8000"):
        WebRules([], []).check(request(host="localhost:8000", origin=origin, content_type=kind))
    WebRules([], [ELSEWHERE]).check(request(host="localhost", origin=ELSEWHERE, content_type=kind))


def test_json_needs_a_browsers_question_first_and_gets_no() -> None:
    rules = WebRules([], ["http://good.example"])
    rules.check(request(host="localhost", origin=ELSEWHERE, content_type="Application/JSON; charset=utf-8"))
    asks = {"access_control_request_method": "POST", "access_control_request_headers": "content-type"}
    assert rules.preflight(request("OPTIONS", origin=ELSEWHERE, **asks)) is None
    assert rules.headers(request(origin=ELSEWHERE)) == [(b"vary", b"Origin")] == rules.headers(request())
    assert WebRules([], []).headers(request(origin=ELSEWHERE)) == []
    assert WebRules([], []).preflight(request("OPTIONS", origin=ELSEWHERE, **asks)) is None
    answer = dict(rules.preflight(request("OPTIONS", origin="http://good.example", **asks)) or ())
    assert answer[b"access-control-allow-headers"] == b"content-type"
    assert dict(rules.headers(request(origin="http://good.example")))[b"access-control-allow-origin"] == (
        b"http://good.example"
    )
    assert dict(WebRules([], ["*"]).headers(request(origin=ELSEWHERE)))[b"access-control-allow-origin"] == b"*"


def test_flags_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="--allowed-hosts"):
        HttpConfig(allowed_hosts=("http://x",))
    for origin in ("x.example", "http://x.example/"):
        with pytest.raises(ConfigError, match="--cors-origins"):
            HttpConfig(cors_origins=(origin,))


@pytest.mark.parametrize("raw", [b'{"a":%s}', b'{"b":"[[\\"{{[[","a":%s}', b'{"a":%s,"c":"]]]]"}'])
def test_json_goes_so_deep(raw: bytes) -> None:
    check_shape(raw % (b"[" * 7 + b"]" * 7), 8)
    with pytest.raises(InvalidRequest, match="deep"):
        check_shape(raw % (b"[" * 8 + b"]" * 8), 8)


def test_json_has_so_many_parts() -> None:
    check_shape(b"[" + b"[]," * (MOST_CONTAINERS - 2) + b"{}]", 8)
    with pytest.raises(InvalidRequest, match="lists and objects"):
        check_shape(b"[" + b"[]," * (MOST_CONTAINERS - 1) + b"{}]", 8)


def test_a_text_full_of_brackets_is_a_text() -> None:
    check_shape(b'{"prompt":"' + b"[{" * MOST_CONTAINERS + b'"}', 8)


def test_a_text_without_an_end_is_looked_at_once() -> None:
    """Looking for its end from each quote in it would take hours."""
    check_shape(b"[" * 9 + b'"' + b'\\"' * 500_000, 9)


async def body_of(connection: Connection, *parts: bytes) -> bytes:
    queue = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    queue.append({"type": "http.request", "body": b"", "more_body": False})

    async def receive() -> dict[str, object]:
        return queue.pop(0)

    connection.body._receive = receive
    return await connection.body.read(100)


def test_bodies_share_a_sum() -> None:
    budget = BodyBudget(10)
    first, second = request(bodies=budget), request(bodies=budget, client="127.0.0.2")
    assert asyncio.run(body_of(first, b"abc", b"def")) == b"abcdef"
    assert asyncio.run(body_of(second, b"abcd")) == b"abcd"
    third = request(bodies=budget)
    with pytest.raises(BodiesFull) as caught:
        asyncio.run(body_of(third, b"x"))
    assert caught.value.status == 503
    for connection in (third, first, first):
        connection.body.hold.let_go()
    assert budget.used == 4
    fourth = request(bodies=budget)
    with pytest.raises(BodiesFull):
        asyncio.run(body_of(fourth, b"abcdef", b"x"))
    fourth.body.hold.let_go()
    assert budget.used == 4


def test_one_address_leaves_bodies_to_others() -> None:
    budget = BodyBudget(8)
    all_but_one = request(bodies=budget)
    assert asyncio.run(body_of(all_but_one, b"abc", b"def")) == b"abcdef", "at the border"
    same, other = request(bodies=budget), request(bodies=budget, client="127.0.0.2")
    with pytest.raises(BodiesFull, match="one address"):
        asyncio.run(body_of(same, b"x"))
    same.body.hold.let_go()
    assert asyncio.run(body_of(other, b"xy")) == b"xy"
    for connection in (all_but_one, other):
        connection.body.hold.let_go()
    assert budget.used == 0 and not budget._of_source


def test_the_largest_body_fits_for_everybody() -> None:
    budget = BodyBudget(8, largest=8)
    assert asyncio.run(body_of(request(bodies=budget), b"abcdefgh")) == b"abcdefgh"


def test_pages_may_read_what_was_changed_in_their_requests() -> None:
    headers = dict(WebRules([], [ELSEWHERE]).headers(request(origin=ELSEWHERE)))
    shown = headers[b"access-control-expose-headers"]
    assert {IGNORED, LOWERED, PLACEHOLDERS} <= set(shown.split(b", "))
