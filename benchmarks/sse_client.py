"""A lean streaming client: raw asyncio sockets, so that the measuring side costs little of the two cores it shares."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


class Refused(RuntimeError):
    """The server answered with an error instead of a stream. `code`: the error's code; "" if it has none."""

    def __init__(self, status: int, code: str = "") -> None:
        super().__init__(f"the server answered {status} {code}".rstrip())
        self.status, self.code = status, code


def code_of(answer: bytes) -> str:
    """Return the code of an error's JSON, which follows the headers."""
    try:
        return str(json.loads(answer.rpartition(b"\r\n\r\n")[2])["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


@dataclass
class Stream:
    """What one request saw. Times in seconds on the monotonic clock; token_times[i] is when token i arrived."""

    sent: float
    token_times: list[float] = field(default_factory=list)
    status: int = 0
    error: str = ""  # the stream's own word that it failed
    num_tokens: int = 0  # as the server counts them, where it was asked to (stream_options)

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def itls(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


def num_ids(event: dict[str, Any]) -> int:
    """Token ids in an event of a stream."""
    return sum(len(choice.get("token_ids") or ()) for choice in event.get("choices", ()))


async def stream_completion(
    port: int, body: dict[str, Any], num_tokens_of: Callable[[dict[str, Any]], int] = num_ids, key: str = ""
) -> Stream:
    """POST /v1/completions with stream on; one entry per token that arrives, by default per id (return_token_ids).
    `key`: the tenant's, if any."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    payload = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
    authorization = f"Authorization: Bearer {key}\r\n" if key else ""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(payload)}\r\nConnection: close\r\n{authorization}\r\n"
    )
    stream = Stream(time.monotonic())
    try:
        writer.write(head.encode() + payload)
        stream.status = int((await reader.readline()).split()[1])
        if stream.status != 200:
            raise Refused(stream.status, code_of(await reader.read()))
        while line := await reader.readline():
            now = time.monotonic()
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                stream.error = str(event["error"]["message"]) if "error" in event else ""
                stream.num_tokens = (event.get("usage") or {}).get("completion_tokens", stream.num_tokens)
                stream.token_times.extend([now] * num_tokens_of(event))
    finally:
        writer.close()
    return stream


def percentile(values: list[float], share: float) -> float:
    """Nearest-rank percentile; share in 0..1."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
