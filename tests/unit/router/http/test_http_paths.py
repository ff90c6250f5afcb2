"""What a path answers to methods that it does not have, and what is said where there is no path."""

from __future__ import annotations

import asyncio
import io
from unittest.mock import Mock

import pytest
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message

from router.api.endpoint import Endpoint, EndpointRules
from router.api.site.missing import NOT_SERVED, MissingPaths
from router.api.site.routes import build_routes
from router.http.connection import Connection
from router.tenants.book import Tenants
from router.tenants.keys_file import one_key
from shared.core.errors import InvalidRequest
from shared.observe.log import Logger
from shared.observe.metrics import RequestMetrics

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
SERVED = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/api/tags", "/tokenize", "/health")


def make_rules() -> EndpointRules:
    log = Logger("r", io.StringIO())
    return EndpointRules(log, RequestMetrics(CollectorRegistry()), Tenants(one_key("secret")), 1, 1.0)


def asked(app: ASGIApp, method: str, path: str, **headers: str) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b""}

    async def send(message: Message) -> None:
        sent.append(message)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": method, "path": path, "headers": raw, "root_path": "", "query_string": b""}
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


def whole_router() -> ASGIApp:
    handlers = Mock()
    handlers.generation.by_path.return_value = {"/v1/chat/completions": Mock()}
    return build_routes(make_rules(), handlers, Tenants(one_key("other")))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("path", "allowed"),
    [
        ("/v1/chat/completions", "POST, OPTIONS"),
        ("/v1/models", "GET, HEAD, OPTIONS"),
        ("/v1/models/a/b", "GET, HEAD, OPTIONS"),
        ("/health", "GET, HEAD, OPTIONS"),
        ("/admin/drain", "POST, OPTIONS"),
        ("/admin/adapters", "GET, HEAD, POST, OPTIONS"),
        ("/admin/adapters/a/b", "DELETE, OPTIONS"),
    ],
)
def test_a_path_names_its_methods(path: str, allowed: str, method: str) -> None:
    if method in allowed.split(", ")[:-1]:
        return
    status, headers, body = asked(whole_router(), method, path)
    assert headers[b"allow"].decode() == allowed
    assert status == (200 if method == "OPTIONS" else 405)
    assert bool(body) is (method != "OPTIONS")
    taken = " and ".join(name for name in allowed.split(", ") if name not in ("HEAD", "OPTIONS"))
    assert method == "OPTIONS" or f"takes {taken} only" in body.decode()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/messages/count_tokens", "/tokenize",
                                  "/api/tags", "/openapi.json", "/health", "/ready", "/status"])  # fmt: skip
def test_a_slash_at_the_end_changes_nothing(path: str) -> None:
    for method in ("PUT", "DELETE", "OPTIONS"):  # handlers are mocks
        with_slash, without = (asked(whole_router(), method, one, x_request_id="r") for one in (f"{path}/", path))
        assert with_slash == without and without[0] == (200 if method == "OPTIONS" else 405)


@pytest.mark.parametrize(
    "path", ["/metrics/", "/admin/status/", "/admin/drain/", "/admin/", "//", "/v1/", "/tokenizer/"]
)
def test_a_slash_opens_no_path_that_a_proxy_bars_by_name(path: str) -> None:
    """As `location = /metrics` in the chart's nginx does."""
    status, _, body = asked(whole_router(), "GET", path)
    assert status == 404 and b"there is nothing at" in body


@pytest.mark.parametrize("refused", [False, True], ids=["the handler reads it", "it is refused"])
def test_the_server_s_end_answers_who_has_sent_half_a_body(refused: bool) -> None:
    """uvicorn cancels what takes too long. Else it would log a traceback, and answer 500."""
    sent: list[Message] = []

    async def half(connection: Connection) -> None:
        if refused:
            raise InvalidRequest("no")
        await connection.body.read(1000)

    async def broken_off(endpoint: Endpoint) -> None:
        parts = asyncio.Queue[Message]()
        parts.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        headers = [(b"content-length", b"100"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}

        async def send(message: Message) -> None:
            sent.append(message)

        task = asyncio.create_task(endpoint(scope, parts.get, send))
        while not parts.empty():
            await asyncio.sleep(0)
        task.cancel()
        await task

    asyncio.run(broken_off(Endpoint(make_rules(), "POST", half)))
    start, *bodies = sent
    assert not bodies[-1]["more_body"]
    if refused:
        assert start["status"] == 400 and b"no" in bodies[0]["body"]
        return
    assert start["status"] == 503 and (b"connection", b"close") in start["headers"]
    assert b"this server is shutting down" in bodies[0]["body"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score",
                                  "/v1/audio/transcriptions", "/v1/audio/speech", "/v1/images/generations",
                                  "/v1/moderations", "/v1/files", "/v1/files/a", "/v1/batches", "/v1/messages/batches",
                                  "/v1/responses/resp_1", "/v1/complete", "/v1/realtime"])  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_api_that_is_not_served_is_named(path: str, method: str) -> None:
    status, _, body = asked(whole_router(), method, path)
    assert status == 404 and b"not served here" in body
    assert any(what.encode() in body and why.encode() in body for what, why in NOT_SERVED.values())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/chat/completions//", "did you mean /v1/chat/completions?"),
        ("/v1/model", "did you mean /v1/models?"),
        ("/healthz", "did you mean /health?"),
        ("/api/tag", "did you mean /api/tags?"),
        ("/api/event_logging/batch", "there is nothing at '/api/event_logging/batch'; the API is at"),
        ("/favicon.ico", f"the API is at {', '.join(SERVED)}"),
        ("/" + "x" * 10_000, f"the API is at {', '.join(SERVED)}"),
        ("", "the API is at"),
    ],
)
def test_a_path_that_is_missing_says_what_is_there(path: str, said: str) -> None:
    app = Endpoint(make_rules(), "", MissingPaths(SERVED).handle)
    status, headers, body = asked(app, "GET", path)
    assert status == 404 and said in body.decode() and len(body) < 600 and b"allow" not in headers


def test_who_asks_for_a_websocket_is_told_to_go_on_over_http() -> None:
    """RFC 9110 15.5.22: with the protocol that is spoken."""
    status, headers, body = asked(
        whole_router(), "GET", "/v1/chat/completions", sec_websocket_key="x3JJHMbDL1EzLkh9GBhXDw=="
    )
    assert (status, headers[b"upgrade"], headers[b"connection"]) == (426, b"HTTP/1.1", b"upgrade")
    assert b"no_websockets" in body
