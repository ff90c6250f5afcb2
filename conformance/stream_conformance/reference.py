"""A server that keeps the contract, with the standard library alone. Its model makes up words. serve.py starts it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hmac
import json
import secrets
import time
from hashlib import blake2b
from typing import Any

Json = dict[str, Any]
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
HEAD = "HTTP/1.1 %d -\r\nContent-Type: %s\r\nConnection: close\r\n%s\r\n\r\n"
MOST_KEPT = 1000  # whole answers, by their Idempotency-Key


def short(value: Any) -> str:
    return blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=6).hexdigest()


def events_of(path: str, body: Json, facts: list[Any]) -> list[str]:
    """Return all events of an answer, without ids. Its words depend on seed and request alone."""
    most, name, model = int(body.get("max_tokens") or 16), short(facts), body.get("model")
    words = [short([*facts[1:3], number])[:5] + " " for number in range(most)]
    if path == CHAT:
        base: Json = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": facts[0], "model": model}
        deltas = [{"role": "assistant", "content": ""}, *({"content": word} for word in words), {}]
        ends = [*(None for _ in range(most + 1)), "length"]
        chunks = [{"index": 0, "delta": d, "finish_reason": end} for d, end in zip(deltas, ends, strict=True)]
        usage = {"prompt_tokens": 1, "completion_tokens": most, "total_tokens": most + 1}
        choices: list[Json] = [*({"choices": [chunk]} for chunk in chunks), {"choices": [], "usage": usage}]
        return [f"data: {json.dumps(base | one)}\n\n" for one in choices] + ["data: [DONE]\n\n"]
    message: Json = {"id": f"msg_{name}", "type": "message", "role": "assistant", "model": model, "content": []}
    message |= {"stop_reason": None, "usage": {"input_tokens": 1, "output_tokens": 0}}
    told: list[Json] = [{"type": "message_start", "message": message}]
    told += [{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}]
    deltas = [{"type": "text_delta", "text": word} for word in words]
    told += [{"type": "content_block_delta", "index": 0, "delta": delta} for delta in deltas]
    told += [{"type": "content_block_stop", "index": 0}]
    told += [{"type": "message_delta", "delta": {"stop_reason": "max_tokens"}, "usage": {"output_tokens": most}}]
    return [f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in [*told, {"type": "message_stop"}]]


class Refused(Exception):
    """`args`: the status and the code."""


class Reference:
    """Keeps nothing of a stream: its token says all that is needed to make it again. `pace_s`: between events."""

    events = staticmethod(events_of)

    def __init__(self, secret: str = "", key: str = "", pace_s: float = 0.0) -> None:
        self.secret, self.key, self.pace_s = (secret or secrets.token_hex(16)).encode(), key, pace_s
        self.kept: dict[tuple[str, str], tuple[str, bytes]] = {}

    def digest(self, path: str, raw: bytes) -> str:
        return short([path, json.loads(raw)])

    def begin(self, body: Json, digest: str) -> str:
        """Return a new stream's token: when it began, its seed, its request's digest."""
        facts = [int(time.time()), body.get("seed", secrets.randbelow(2**31)), digest, secrets.token_hex(4)]
        told = base64.urlsafe_b64encode(json.dumps(facts).encode()).decode()
        return f"{told}.{self.mac(told)}"

    def mac(self, told: str) -> str:
        return hmac.digest(self.secret, told.encode(), "sha256").hex()[:32]

    def facts(self, token: str) -> list[Any]:
        told, _, mac = token.partition(".")
        if not hmac.compare_digest(mac.encode(), self.mac(told).encode()):
            raise Refused(400, "unknown_stream")
        return list(json.loads(base64.urlsafe_b64decode(told)))

    def resume(self, given: str, digest: str) -> tuple[str, str]:
        """Return the token and the position of a Last-Event-ID."""
        token, _, position = given.rpartition("/")
        if self.facts(token)[2] != digest:
            raise Refused(422, "resume_mismatch")
        return token, position

    def place(self, position: str, marks: list[str]) -> int:
        """Return how many of a stream's events the reader has. `marks`: the positions of all events."""
        if position not in marks:
            raise Refused(422, "resume_mismatch")
        return marks.index(position) + 1

    def mark(self, position: str, token: str, is_first: bool) -> str:
        return f"id: {token}/{position}\n" if is_first else f"id: {position}\n"

    def wants_ids(self, headers: dict[str, str]) -> bool:
        return "x-stream-ids" in headers or "last-event-id" in headers

    def may(self, headers: dict[str, str]) -> bool:
        given = (headers.get("authorization", "").removeprefix("Bearer "), headers.get("x-api-key", ""))
        return not self.key or self.key in given

    async def stream(self, path: str, raw: bytes, headers: dict[str, str], writer: asyncio.StreamWriter) -> None:
        body, given, digest = json.loads(raw), headers.get("last-event-id"), self.digest(path, raw)
        token, position = (self.begin(body, digest), "") if given is None else self.resume(given, digest)
        events = self.events(path, body, facts := self.facts(token))
        marks = [f"{number}.{short([facts, number])}" for number in range(1, len(events) + 1)]
        first = 0 if given is None else self.place(position, marks)
        writer.write((HEAD % (200, "text/event-stream", "Transfer-Encoding: chunked")).encode())
        for number in range(first, len(events)):
            own = self.mark(marks[number], token, number == first) if self.wants_ids(headers) else ""
            data = ((": waiting\n\n" if number == first else "") + own + events[number]).encode()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))
            await writer.drain()
            await asyncio.sleep(self.pace_s)
        writer.write(b"0\r\n\r\n")

    def whole(self, path: str, raw: bytes, headers: dict[str, str]) -> tuple[bytes, str]:
        """Return the answer, and a header if it was kept."""
        digest, name = self.digest(path, raw), (headers.get("authorization", ""), headers.get("idempotency-key", ""))
        before, kept = self.kept.get(name, (digest, b""))
        if before != digest:
            raise Refused(422, "idempotency_key_reused")
        answer = kept or json.dumps({"id": secrets.token_hex(6), "object": "chat.completion", "choices": []}).encode()
        if name[1] and len(self.kept) < MOST_KEPT:
            self.kept[name] = digest, answer
        return answer, "\r\nidempotent-replayed: true" if kept else ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One request per connection."""
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (one.partition(":") for one in lines)}
            path, raw = line.split(" ")[1], await reader.readexactly(int(headers.get("content-length", 0)))
            try:
                if path not in (CHAT, MESSAGES) or not self.may(headers):
                    raise Refused(*((404, "not_found") if self.may(headers) else (401, "unauthorized")))
                if json.loads(raw).get("stream"):
                    return await self.stream(path, raw, headers, writer)
                (answer, more), status = self.whole(path, raw, headers), 200
            except Refused as error:
                status, code = error.args
                answer, more = json.dumps({"error": {"message": code, "code": code}}).encode(), ""
            more = f"Content-Length: {len(answer)}{more}"
            writer.write((HEAD % (status, "application/json", more)).encode() + answer)
