"""Wrap every handler: check method and key, answer errors as JSON, stop work after a hang-up."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.types import Receive, Scope, Send

from router.http.body_budget import BodyBudget
from router.http.connection import REQUEST_ID, Connection
from router.http.decoding import BodyDecoding
from router.http.errors import (
    RETRYABLE,
    ClientGone,
    HostNotAllowed,
    MediaTypeRefused,
    MethodNotAllowed,
    NoWebSockets,
    ResumeMismatch,
    Unauthorized,
    error_body,
    error_headers,
    internal_error,
    is_messages,
)
from router.http.web_rules import WebRules, is_preflight
from router.tenants.book import Tenants
from shared.core.errors import BatonError, NoNodes
from shared.core.trace_context import traced
from shared.observe.log import Logger
from shared.observe.log_once import LogOnce
from shared.observe.metrics import RequestMetrics

FOREIGN = (HostNotAllowed, MediaTypeRefused)  # refusals that every endpoint counts
METHODS = {
    "GET": ("GET", "HEAD"),
    "POST": ("POST",),
    "DELETE": ("DELETE",),
    "GET, POST": ("GET", "HEAD", "POST"),
    "*": ("GET", "HEAD", "POST", "DELETE"),
    "": (),
}  # a path's methods besides OPTIONS, by the one that it was made for
Handler = Callable[[Connection], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class EndpointRules:
    log: Logger
    metrics: RequestMetrics
    tenants: Tenants
    retry_after_s: int
    slow_reader_s: float
    web: WebRules = WebRules((), ())
    bodies: BodyBudget | None = None
    decoding: BodyDecoding = field(default_factory=BodyDecoding)


class Endpoint:
    """An ASGI application for one path. `counts`: whether baton_requests_total counts refusals."""

    def __init__(
        self, rules: EndpointRules, method: str, handler: Handler, *, needs_key: bool = False, counts: bool = False
    ) -> None:
        """`method`: "*" allows the methods that any path has, and "" all methods."""
        self._rules = rules
        self._methods = METHODS[method]
        self._allowed = ", ".join((*self._methods, "OPTIONS")).encode()
        self._handler = handler
        self._needs_key = needs_key
        self._counts = counts
        self._once = LogOnce(rules.log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        rules = self._rules
        connection = Connection(scope, receive, send, rules.slow_reader_s, rules.bodies, rules.decoding)
        connection.more_headers.update(self._rules.web.headers(connection))
        if is_messages(scope["path"]):
            connection.id_headers = (REQUEST_ID, b"request-id")
        connection.name(connection.header(REQUEST_ID))
        try:
            await self._exchange(connection)
        except asyncio.CancelledError:  # the server's end, which waits no longer for this client
            await self._break_off(connection)
        finally:
            connection.body.hold.let_go()
            self._exchange_over(connection)

    async def _exchange(self, connection: Connection) -> None:
        try:
            if not await self._told_rights(connection):
                self._admit(connection)
                await self._handler(connection)
                self._log(connection, connection.failure)
        except ClientGone:
            return
        except BatonError as error:
            self._log(connection, error)
            await self._refuse(connection, error)
            error.with_traceback(None)  # breaks the cycle of error and frames
        except Exception as error:
            self._rules.log.error(
                "a request failed unexpectedly",
                path=connection.scope["path"],
                request=connection.request_id,
                **traced(connection.trace),
                error=error,
            )
            await self._refuse(connection, internal_error())

    async def _break_off(self, connection: Connection) -> None:
        """Answer a client that has not sent its whole body, or end an answer, without waiting for the client."""
        error, data = NoNodes("this server is shutting down"), b""
        with contextlib.suppress(ClientGone):
            if connection.status is None:
                data = error_body(connection.scope["path"], error, connection.request_id)
                headers = [*error_headers(error, self._rules.retry_after_s), (b"connection", b"close")]
                headers.append((b"content-length", b"%d" % len(data)))
                await connection.start(error.status, headers)
            if not connection.is_answered:
                await connection.write(data, last=True)

    def _exchange_over(self, connection: Connection) -> None:
        """Do nothing: only /admin keeps account."""

    async def _told_rights(self, connection: Connection) -> bool:
        """Answer a question of what the path allows, and return whether it was one."""
        self._rules.web.check(connection)
        asked = self._rules.web.preflight(connection)
        if asked is None and self._methods and asks_for_methods(connection):
            asked = [(b"allow", self._allowed)]
        if asked is not None:
            await connection.answer(200, b"", asked)
        return asked is not None

    def _admit(self, connection: Connection) -> None:
        if self._methods and connection.scope["method"] not in self._methods:
            if connection.header(b"sec-websocket-key") is not None:
                raise NoWebSockets("this path speaks HTTP only")
            taken = " and ".join(method for method in self._methods if method != "HEAD")
            raise MethodNotAllowed(f"this path takes {taken} only", self._allowed)
        if self._needs_key:
            tenant = self._rules.tenants.find(keys_of(connection))
            if tenant is None:
                raise Unauthorized("the API key is missing or wrong")
            connection.tenant = tenant

    def _log(self, connection: Connection, error: BatonError | None) -> None:
        """Log our own failures and failed resumptions. Retryable errors come in floods, so only metrics show them."""
        if isinstance(error, FOREIGN):
            self._once.warning(error.code, "a web page's request was refused", code=error.code, why=error.message)
        is_ours = error is not None and error.status >= 500 and error.status not in RETRYABLE
        if error is not None and (is_ours or isinstance(error, ResumeMismatch)):
            self._rules.log.warning(
                "a request failed",
                request=connection.request_id,
                **traced(connection.trace),
                path=connection.scope["path"],
                code=error.code,
                why=error.message,
            )

    async def _refuse(self, connection: Connection, error: BatonError) -> None:
        """Answer with the error. Once headers are sent, do nothing: the stream contains the error."""
        if connection.status is not None:
            return
        if (self._counts or isinstance(error, FOREIGN)) and not connection.was_admitted:
            self._rules.metrics.refused(error.code)
        headers = error_headers(error, self._rules.retry_after_s)
        try:
            body = error_body(connection.scope["path"], error, connection.request_id)
            await connection.answer(error.status, body, headers)
        except ClientGone:
            return


def asks_for_methods(connection: Connection) -> bool:
    """A preflight asks for something else, and a page that may not use the API gets no answer to it."""
    return connection.scope["method"] == "OPTIONS" and not is_preflight(connection)


def given_keys(authorization: str | None, x_api_key: str | None) -> tuple[str, ...]:
    """Anthropic's clients send either header, or both."""
    scheme, _, given = (authorization or "").partition(" ")
    return (given.strip() if scheme.lower() == "bearer" else "", x_api_key or "")


def keys_of(connection: Connection) -> tuple[str, ...]:
    return given_keys(connection.header(b"authorization"), connection.header(b"x-api-key"))


async def until_hang_up(connection: Connection, work: Awaitable[None]) -> None:
    """When the client hangs up, cancel `work` and raise ClientGone."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def cancel(watcher: asyncio.Task[None]) -> None:
        nonlocal gone
        if not watcher.cancelled() and not connection.is_answered:
            gone = True
            task.cancel()

    watcher = asyncio.create_task(connection.hung_up())
    watcher.add_done_callback(cancel)
    try:
        await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        watcher.remove_done_callback(cancel)
        watcher.cancel()
