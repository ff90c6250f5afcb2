"""Get the answer of one line, with retries."""

from __future__ import annotations

import asyncio
import email.utils
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from deploy.router_url import Url, no_answer
from deploy.tools.generate.http_client import HttpAnswer, HttpClient
from deploy.tools.generate.line_file import BatchStopped, ErrorPart, OutputLine, ResponsePart
from deploy.tools.generate.lines import BadLine, BatchRequest

RETRYABLE = (429, 503)
LONGEST_RETRY_AFTER_S = 600.0
OK = 200
Sleep = Callable[[float], Awaitable[None]]
MAX_SHOWN = 500


@dataclass(frozen=True, slots=True)
class Backoff:
    """Double the wait before each retry, from `first_s` up to `longest_s`."""

    first_s: float = 0.5
    longest_s: float = 30.0

    def wait_s(self, attempt: int, asked_for_s: float, chance: float) -> float:
        """Return the seconds before retry `attempt`, counted from 0.

        `asked_for_s`: the server's Retry-After. `chance`: a random number from 0 to 1, which spreads retries.
        """
        doubled = min(self.longest_s, self.first_s * 2.0 ** min(attempt, 30))
        return max(min(asked_for_s, LONGEST_RETRY_AFTER_S), doubled * (0.5 + chance / 2))


@dataclass(frozen=True, slots=True)
class RetryLimits:
    retries: int
    timeout_s: float
    backoff: Backoff = Backoff()


@dataclass(frozen=True, slots=True)
class AskFailure:
    code: str
    message: str
    may_retry: bool


class BatchClient:
    """`num_answers` counts all HTTP answers, including refusals."""

    def __init__(self, client: HttpClient, url: Url, patience: RetryLimits, sleep: Sleep = asyncio.sleep) -> None:
        self.num_answers = 0
        self._client, self._url, self._patience, self._sleep = client, url, patience, sleep
        self._random = random.Random()

    async def answer(self, request: BatchRequest) -> OutputLine:
        """Return the line's result. Raise BatchStopped if all retries failed while no other line got an answer."""
        answers_before = self.num_answers
        attempt = 0
        while True:
            tried = await self._try(request)
            may_retry = tried.may_retry if isinstance(tried, AskFailure) else tried.status in RETRYABLE
            if not may_retry or attempt == self._patience.retries:
                break
            await self._sleep(self._wait_s(tried, attempt))
            attempt += 1
        if isinstance(tried, HttpAnswer):
            return line_of(request, tried)
        if tried.may_retry and self.num_answers == answers_before:
            raise BatchStopped(no_answer(self._url, OSError(tried.message)).message)
        return OutputLine(request.id, request.custom_id, None, ErrorPart(tried.code, tried.message))

    async def _try(self, request: BatchRequest) -> HttpAnswer | AskFailure:
        limit_s = self._patience.timeout_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._client.post(request.url, request.body)
        except TimeoutError:
            return AskFailure("timeout", f"no answer within {limit_s:g} s", may_retry=False)
        except OSError as error:
            return AskFailure("no_answer", str(error), may_retry=True)
        self.num_answers += 1
        return answer

    def _wait_s(self, tried: HttpAnswer | AskFailure, attempt: int) -> float:
        header = tried.headers.get("retry-after", "") if isinstance(tried, HttpAnswer) else ""
        asked_for_s = retry_after_s(header, time.time())
        return self._patience.backoff.wait_s(attempt, asked_for_s, self._random.random())


def line_of(request: BatchRequest, answer: HttpAnswer) -> OutputLine:
    """Make the output line. A status 200 without JSON becomes an error. Any other answer without JSON keeps its status
    and the body's beginning."""
    try:
        body: Any = msgspec.json.decode(bytes(answer.body))
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        text = bytes(answer.body[:MAX_SHOWN]).decode("utf-8", "replace")
        if answer.status == OK:
            return OutputLine(request.id, request.custom_id, None, ErrorPart("no_json", f"the answer is: {text}"))
        body = {"error": {"message": text}}
    request_id = answer.headers.get("x-request-id") or id_in(body)
    return OutputLine(request.id, request.custom_id, ResponsePart(answer.status, request_id, body), None)


def id_in(body: Any) -> str:
    found = body.get("id") if isinstance(body, dict) else None
    return found if isinstance(found, str) else ""


def line_of_bad(line: BadLine) -> OutputLine:
    return OutputLine(line.id, line.custom_id, None, ErrorPart("invalid_line", line.message))


def retry_after_s(header: str, now: float) -> float:
    """Return the seconds in a Retry-After header; 0.0 if malformed. `now`: seconds since 1970."""
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - now)
    except (ValueError, OverflowError):
        return 0.0
