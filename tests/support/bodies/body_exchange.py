"""One client connection that sends requests and reads their answers, and what an answer may look like.

Status, headers and body are read from the wire, so that a broken answer is seen as the client sees it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.http.connection import REQUEST_ID
from router.http.errors import OLLAMA_PATHS, is_messages
from tests.support.bodies.body_requests import Manner, Request
from tests.support.machine.patience import HANG_GUARD_S

RETRYABLE = (429, 503)
NOT_JSON = ("the request body is not valid JSON", "the request body is nested too deeply")
UNREADABLE = "printable ASCII"  # HashLM's tokenizer, behind parser and template
NO_TOKEN = b"this model has no token for what comes next there"  # HashLM's are ASCII; found after a few tokens
DONE = b"data: [DONE]\n\n"
LAST_EVENTS = {b"message_stop", b"response.completed", b"response.incomplete"}  # of streams whose events have names
OTHER_CODING = re.compile(rb"\r\nTransfer-Encoding: (?!chunked\r\n|chunked$)", re.IGNORECASE)
RAW_REFUSAL = b"Invalid HTTP request received."


class Fault(Exception):
    """An answer that no request may get."""


@dataclass(slots=True)
class Answer:
    status: int
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""

    @property
    def is_stream(self) -> bool:
        return self.headers.get(b"content-type", b"").startswith(b"text/event-stream")

    @property
    def is_lines(self) -> bool:
        return self.headers.get(b"content-type") == b"application/x-ndjson"

    @property
    def closes(self) -> bool:
        return self.headers.get(b"connection", b"").lower() == b"close"


class Client:
    """Keeps its connection while the framing allows it."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: Request) -> str:
        """Return how far the request came. Raise Fault for an answer that is wrong, or does not come."""
        try:
            async with asyncio.timeout(HANG_GUARD_S):
                return await self._ask(request)
        except TimeoutError:
            await self.close()
            raise Fault(f"no answer after {HANG_GUARD_S:.0f} s") from None

    async def _ask(self, request: Request) -> str:
        try:
            answer = await self._exchange(request)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            await self.close()
            if request.owed and request.manner is not Manner.HANG_UP:
                raise Fault(f"no whole answer: {error!r}") from error
            return "closed"
        if request.manner is not Manner.KEEP or answer is None or answer.closes or not request.owed:
            await self.close()
        return "hung up" if answer is None else judged(request, answer)

    async def _exchange(self, request: Request) -> Answer | None:
        """Return None where the client reads no answer."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        assert self._reader is not None
        for part in request.parts:
            self._writer.write(part)
            if len(request.parts) > 1:
                await asyncio.sleep(0)  # what follows may come as a second segment
        if request.manner is Manner.HANG_UP:
            await self._writer.drain()
            return None
        if request.manner is Manner.CLOSE:
            self._writer.write_eof()
        return await read_answer(self._reader)

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """Read one final answer; 100 Continue comes before it."""
    answer = parsed_head(await reader.readuntil(b"\r\n\r\n"))
    while answer.status < 200:
        answer = parsed_head(await reader.readuntil(b"\r\n\r\n"))
    if answer.headers.get(b"transfer-encoding") == b"chunked":
        answer.body = await read_chunks(reader)
    elif b"content-length" in answer.headers:
        answer.body = await reader.readexactly(int(answer.headers[b"content-length"]))
    else:
        answer.body = await reader.read()
    return answer


def parsed_head(head: bytes) -> Answer:
    first, *lines = head[:-4].split(b"\r\n")
    pairs = (line.partition(b":") for line in lines)
    return Answer(int(first.split(b" ", 2)[1]), {name.lower(): value.strip() for name, _, value in pairs})


async def read_chunks(reader: asyncio.StreamReader) -> bytes:
    found = b""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        found += (await reader.readexactly(size + 2))[:-2]
    await reader.readexactly(2)
    return found


def judged(request: Request, answer: Answer) -> str:
    """Return how far the request came, or raise Fault."""
    if answer.status == 501 and OTHER_CODING.search(request.wire.partition(b"\r\n\r\n")[0]):
        return "other coding"  # RFC 9112 6.1
    if request.wire.startswith(b"OPTIONS ") and answer.status == 200 and not answer.body and b"allow" in answer.headers:
        return "methods"
    if answer.status >= 500 and answer.status not in RETRYABLE:
        raise Fault(f"status {answer.status}: {answer.body[:500]!r}")
    if answer.body == RAW_REFUSAL and not request.owed:
        return "bad HTTP"
    if not answer.headers.get(REQUEST_ID, b"").isascii() or REQUEST_ID not in answer.headers:
        raise Fault(f"no X-Request-Id: {answer.headers}")
    if answer.is_stream:
        return judged_stream(answer)
    if answer.is_lines:
        return judged_lines(answer)
    try:
        found = msgspec.json.decode(answer.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Fault(f"status {answer.status}, no JSON ({error}): {answer.body[:500]!r}") from error
    if answer.status == 200:
        return "sampler" if found.keys() & {"choices", "usage", "done"} else "answered"
    if request.path.startswith(OLLAMA_PATHS):
        found = with_code(found)
    return judged_error(answer.status, found, kind="type" if is_messages(request.path) else "code")


def with_code(found: Any) -> Any:
    """Return an error of Ollama's, which is only a text, in the form of the others."""
    error = found.get("error") if isinstance(found, dict) else None
    return {"error": {"message": error, "code": "error"}} if isinstance(error, str) else found


def judged_error(status: int, found: Any, kind: str) -> str:
    """`kind`: what tells errors apart in this form."""
    error = found.get("error") if isinstance(found, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or not error.get(kind):
        raise Fault(f"status {status}, but no error in the API's form: {str(found)[:500]}")
    if status in RETRYABLE:
        return f"{status} {error[kind]}"
    if status != 400:
        return str(status)
    if error["message"].startswith(NOT_JSON):
        return "not JSON"
    return "tokenizer" if UNREADABLE in error["message"] else "field"


def judged_lines(answer: Answer) -> str:
    """The last line, and only this one, says that the answer is complete."""
    lines = [msgspec.json.decode(line) for line in answer.body.splitlines()]
    if not answer.body.endswith(b"\n") or [line.get("done") for line in lines] != [False] * (len(lines) - 1) + [True]:
        raise Fault(f"lines without their end: {answer.body[-500:]!r}")
    return "sampler"


def judged_stream(answer: Answer) -> str:
    """Every event is JSON; the last one says that the answer is complete, for all nodes live."""
    events = answer.body.removesuffix(DONE).split(b"\n\n")
    named = events[-2].split(b"\n")[0].removeprefix(b"event: ") if len(events) > 1 else b""
    if len(events) > 1 and NO_TOKEN in events[-2]:
        return "tokenizer"
    if not answer.body.endswith(DONE) and named not in LAST_EVENTS:
        raise Fault(f"a stream without its end: {answer.body[-500:]!r}")
    for event in events:
        _, mark, data = event.rpartition(b"data: ")
        if mark and "error" in msgspec.json.decode(data):
            raise Fault(f"an error in a stream: {event[:500]!r}")
    return "sampler"
