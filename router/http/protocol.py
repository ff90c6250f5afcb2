"""Limit connections, headers (bytes, count and time), chunk framing and pipelined requests in uvicorn's HTTP protocol.

connected -> head -> body -> answer -> head ...       each head must be complete within its deadline
"""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.http.connection import HANG_UP, REQUEST_ID, SEND_CHUNK, Header
from router.http.errors import (
    BadHttp,
    HeadersTooLarge,
    HeaderTimeout,
    TargetTooLong,
    TooManyConnections,
    error_headers,
    error_json,
)
from router.http.exchanges import fitted
from router.http.heads import check_head, origin_form, unreadable, without_upgrade
from shared.config.settings.http_settings import HttpConfig
from shared.core.errors import BatonError
from shared.observe.log_once import LogOnce
from shared.observe.metrics import RequestMetrics

MOST_AHEAD = 32  # pipelined requests on one connection
LINGER_S = 2.0  # time for a refused client to read the reason, while the rest of its input is dropped
LINGER_BYTES = 16 << 20  # limit on that input
MOST_LINGERING = 64  # connections above the limit that may linger
PER_HEADER = 4  # bytes of colon, space and line end
FRAMING_FACTOR = 2  # limit on framing bytes between pieces of a chunked body, in multiples of a head's limit


@dataclass(frozen=True, slots=True)
class HttpRules:
    limits: HttpConfig
    metrics: RequestMetrics
    once: LogOnce
    retry_after_s: int
    slow_reader_s: float


class LimitedProtocol(HttpToolsProtocol):
    """One connection. The library keeps unfinished headers of any length, so this class counts the parser's input.

    `_head_bytes`: bytes of the unfinished head. `_framing`: bytes of chunk framing since the body's last contents."""

    def __init__(
        self,
        rules: HttpRules,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config=config, server_state=server_state, app_state=app_state, _loop=_loop)
        self._rules = rules
        self._deadline: asyncio.TimerHandle | None = None
        self._is_in_head = True
        self._head_bytes = 0
        self._named_bytes = 0  # bytes of the request line and complete headers
        self._framing = 0
        self._passed_body = False  # whether this input began in a body, or contained a head's end
        self._has_contents = False
        self._refusal: BatonError | None = None
        self._answering: RequestResponseCycle | None = None  # the oldest open request; `cycle` is the newest
        self._num_answered = 0
        self._look: asyncio.TimerHandle | None = None  # the next look at a reader that is behind
        self._num_dropped: int | None = None  # input bytes since the refusal; None before it
        kept = b"timeout=%d" % rules.limits.keep_alive_s  # how long an idle connection stays open
        self._announced = [(b"connection", b"keep-alive"), (b"keep-alive", kept)]

    # ---- the transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        if len(self.connections) > self._rules.limits.max_connections:
            self._refuse(TooManyConnections("too many connections are open; try again"))
        else:
            self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        if self._look is not None:
            self._look.cancel()
        self._unset_keepalive_if_required()
        self._tell_gone()
        super().connection_lost(exc)
        self._forget_waiting()

    def data_received(self, data: bytes) -> None:
        if self._num_dropped is not None:
            self._drop(len(data))
        if self._is_over:
            return
        view, begin = memoryview(data), 0
        while begin < len(data) and self._refusal is None and not self._is_over:
            end = begin + self._room(len(data) - begin)
            self._passed_body, self._has_contents = not self._is_in_head, False
            self._feed(bytes(view[begin:end]))
            self._count(end - begin)
            begin = end
        if self._refusal is not None and not self._is_over:
            self._refuse(self._refusal)
        elif self._is_idle and self._deadline is None:
            self._arm()

    def _feed(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            while data:
                data = self._parse(data)
        except httptools.HttpParserError as error:
            self.send_400_response(str(error))

    def _parse(self, data: bytes) -> bytes:
        """Parse the input. The parser stops at a head with Upgrade: return this head without it, and the rest."""
        try:
            self.parser.feed_data(data)
            return b""
        except httptools.HttpParserUpgrade as stop:
            method, version = self.parser.get_method(), self.parser.get_http_version()
            head = without_upgrade(method, self.url, version, self.headers)
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the library's own
            return head + data[stop.args[0] :]

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP, or send the error that one of our callbacks raised."""
        self._refuse(self._refusal or unreadable(self.parser.get_http_version()))

    # ---- the parser's side

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = self._named_bytes = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._named(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Process one header line of the head or of a chunked body's trailers."""
        super().on_header(name, value)
        self._named(len(name) + len(value) + PER_HEADER)
        if len(self.headers) > self._rules.limits.max_headers:
            self._end_parsing(HeadersTooLarge(f"a request has at most {self._rules.limits.max_headers} headers"))

    def on_headers_complete(self) -> None:
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if self.parser.should_upgrade() and method != b"CONNECT":
            return  # this head is parsed again
        self._check_head(method, version)
        if len(self.pipeline) >= MOST_AHEAD:
            self._end_parsing(BadHttp(f"at most {MOST_AHEAD} requests are sent ahead of their answers"))
        self.scope["state"][HANG_UP] = self.transport.abort  # a method of `self` would form a cycle with the scope
        if version == "1.1":
            self.scope["state"][SEND_CHUNK] = partial(send_chunk, self.transport, self.flow)
        else:
            self.expect_100_continue = False
        super().on_headers_complete()  # if it raises (bad URL), `_is_in_head` stays true
        self.headers = list(self.headers)  # trailers go into this copy, which only counts them
        self._is_in_head = False
        self._head_bytes = 0
        self._passed_body = self._has_contents = True
        self._disarm()
        if self.pipeline and not self._has_enough_ahead:
            self.flow.resume_reading()  # else the client's hang-up is not seen

    def _check_head(self, method: bytes, version: str) -> None:
        try:
            check_head(method, version, self.headers)
            if not self.url.startswith(b"/"):
                self.url = origin_form(self.url, self.headers)
        except BatonError as error:
            self._end_parsing(error)

    def on_body(self, body: bytes) -> None:
        self._has_contents = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._is_in_head = True
        self._head_bytes = self._named_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Start the deadline of a head that began to arrive during an answer. Watch whether the client reads."""
        super().on_response_complete()
        self._num_answered += 1
        self._look_later(self.transport.get_write_buffer_size())
        if self._head_bytes and self._is_idle and self._deadline is None:
            self._arm()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        if cycle.keep_alive:
            cycle.default_headers = [*cycle.default_headers, *self._announced]
        super()._start_asgi_task(cycle, cast(Any, fitted(cycle, app)))

    def shutdown(self) -> None:
        super().shutdown()
        if self.cycle is not None:
            self.cycle.default_headers = self.server_state.default_headers  # without the promise to stay

    # ---- counting

    @property
    def _is_over(self) -> bool:
        """Whether no more requests are served on this connection."""
        return self._num_dropped is not None or self.transport.is_closing()

    @property
    def _is_idle(self) -> bool:
        return not self._is_over and (self.cycle is None or self.cycle.response_complete)

    @property
    def _has_enough_ahead(self) -> bool:
        """Whether enough pipelined requests wait. The budget of bodies does not count them."""
        num_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        return len(self.pipeline) >= MOST_AHEAD or num_bytes > HIGH_WATER_LIMIT

    def _room(self, num_bytes: int) -> int:
        limit = self._rules.limits.max_header_bytes
        return min(num_bytes, limit - self._head_bytes if self._is_in_head else limit)

    def _count(self, num_bytes: int) -> None:
        limit = self._rules.limits.max_header_bytes
        if self._is_in_head:
            self._head_bytes = self._named_bytes if self._passed_body else self._head_bytes + num_bytes
            is_over = self._head_bytes >= limit
        else:
            self._framing = 0 if self._has_contents else self._framing + num_bytes
            is_over = self._framing >= FRAMING_FACTOR * limit
        if is_over and self._refusal is None:
            self._refusal = self._too_large()

    def _named(self, num_bytes: int) -> None:
        self._named_bytes += num_bytes
        if self._named_bytes > self._rules.limits.max_header_bytes:
            self._end_parsing(self._too_large())

    def _too_large(self) -> BatonError:
        limit = self._rules.limits.max_header_bytes
        if not self.headers and len(self.url) > limit // 2:
            return TargetTooLong(f"the request's target is above the limit of {limit} bytes")
        return HeadersTooLarge(f"the request's headers are above the limit of {limit} bytes")

    def _end_parsing(self, error: BatonError) -> None:
        """Raise the error through the parser, which then calls `send_400_response`."""
        self._refusal = error
        raise error

    # ---- who reads

    def _look_later(self, num_bytes: int) -> None:
        if num_bytes and self._look is None:
            delay = self._rules.slow_reader_s
            self._look = self.loop.call_later(delay, self._look_at_reader, self._num_answered, num_bytes)

    def _look_at_reader(self, num_answered: int, before: int) -> None:
        """Hang up if, since the last look, the client read nothing and no other answer was written."""
        self._look = None
        num_bytes = self.transport.get_write_buffer_size()
        is_written = self._answering is not None and self._answering.response_complete
        if is_written and num_answered == self._num_answered and num_bytes >= before:
            self.transport.abort()
        else:
            self._look_later(num_bytes)

    # ---- ending

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(self._rules.limits.header_timeout_s, self._out_of_time)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _out_of_time(self) -> None:
        self._deadline = None
        if self._is_idle:
            self._refuse(HeaderTimeout("the request's headers did not arrive in time"), says_so=self._head_bytes > 0)

    def _refuse(self, error: BatonError, *, says_so: bool = True) -> None:
        """Hang up. If `says_so` and no other answer is under way, send the error first."""
        error.with_traceback(None)  # breaks the cycle of error, frames and connection
        self._rules.metrics.refused(error.code)
        self._rules.once.warning(error.code, "a connection was refused", code=error.code, why=error.message)
        self._disarm()
        is_own = self.cycle is None or self._has_its_answer() or self._is_reading_first()
        self._tell_gone()
        if says_so and is_own:
            has_body = self.parser.get_method() != b"HEAD"
            own = self.server_state.default_headers
            self.transport.write(refusal(error, self._rules.retry_after_s, own, has_body=has_body))
            self._linger()
        else:
            self.transport.close()
        self.loop.call_later(LINGER_S, self._hang_up)

    def _linger(self) -> None:
        """Close the sending side, but read on: unread input would make the kernel reset the connection, and the client
        would lose the reason."""
        if len(self.connections) > self._rules.limits.max_connections + MOST_LINGERING:
            self.transport.close()
            return
        self._num_dropped = 0
        self.flow.pause_writing()  # nothing can be written any more
        self.flow.resume_reading()
        self._end_writing()

    def _end_writing(self) -> None:
        self.transport.write_eof()

    def _drop(self, num_bytes: int) -> None:
        self._num_dropped = (self._num_dropped or 0) + num_bytes
        if self._num_dropped > LINGER_BYTES:
            self._hang_up()

    def _tell_gone(self) -> None:
        """Tell the oldest and the newest open request that the client is gone. The library tells only the newest."""
        for cycle in (self._answering, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.waiting_for_100_continue = False  # nothing can be written after `_linger`
                cycle.message_event.set()

    def _forget_waiting(self) -> None:
        """Drop pipelined requests that wait. They refer to this connection until they are answered."""
        if self.pipeline:
            self.pipeline.clear()
            self.cycle = cast(RequestResponseCycle, self._answering)

    def _hang_up(self) -> None:
        """Close without waiting for a client that does not read."""
        self.transport.abort()

    def _has_its_answer(self) -> bool:
        """Return whether the client has the newest request's whole answer. An early one is not complete for the library
        until the rest of the body has come."""
        cycle = self.cycle
        has_length = not cycle.chunked_encoding and cycle.scope["http_version"] != "1.0"
        is_sent = cycle.response_started and has_length and cycle.expected_content_length == 0
        return bool(cycle.response_complete or (is_sent and self._is_in_head))

    def _is_reading_first(self) -> bool:
        """Return whether the refused bytes are the body of the only open request, whose answer has not begun."""
        return not self._is_in_head and not self.pipeline and not self.cycle.response_started


def send_chunk(transport: asyncio.Transport, flow: FlowControl, data: bytes) -> bool:
    """Send a part of a chunked answer, unless the client is behind or gone."""
    if flow.write_paused or transport.is_closing():
        return False
    transport.write(b"%x\r\n%b\r\n" % (len(data), data))
    return True


def refusal(error: BatonError, retry_after_s: int, default_headers: list[Header], *, has_body: bool = True) -> bytes:
    body = error_json(error)
    length = (b"content-length", str(len(body)).encode())
    request_id = (REQUEST_ID, b"req-" + secrets.token_hex(12).encode())
    own = [*error_headers(error, retry_after_s), length, request_id, (b"connection", b"close")]
    lines = [name + b": " + value + b"\r\n" for name, value in [*default_headers, *own]]
    return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body if has_body else b""])
