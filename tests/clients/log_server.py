"""A server that keeps each request and answers as an API would: first with one call of a tool, then with a text."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from typing import Any

from tests.clients.agent_programs import Agent
from tests.support.web.serving import QuietHandler, serving

SAID = "all done"
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Kept:
    """One request, with the headers in their order and the body as it came."""

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes


@dataclass
class Log:
    agent: Agent
    requests: list[Kept] = field(default_factory=list)

    def answer(self, kept: Kept) -> tuple[int, str, bytes]:
        """Return status, media type and body. A WebSocket is refused: the client goes on without."""
        self.requests.append(kept)
        if any(name.lower() == "upgrade" for name, _ in kept.headers):
            return 426, "application/json", b"{}"
        is_over = b"tool_result" in kept.body or b"function_call_output" in kept.body
        if kept.path.startswith("/v1/messages?"):
            return 200, "text/event-stream", events(claude_s(None if is_over else self.agent))
        if kept.path == "/v1/responses":
            return 200, "text/event-stream", events(openai_s(None if is_over else self.agent))
        if kept.method == "HEAD":
            return 200, "text/plain", b""
        return 404, "application/json", b'{"error": {"message": "not there", "type": "not_found_error"}}'


@contextlib.contextmanager
def logging_server(listener: socket.socket, agent: Agent) -> Iterator[Log]:
    """Answer what comes to the socket, until the block ends."""
    log = Log(agent)

    class Handler(QuietHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            assert "transfer-encoding" not in self.headers, "a chunked body: this server can't read it"
            kept = Kept(self.command, self.path, tuple(self.headers.items()), body)
            status, media_type, answer = log.answer(kept)
            self.say(status, answer, ("content-type", media_type))

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    with serving(server):
        yield log


def events(all_of_them: list[Event]) -> bytes:
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in all_of_them).encode()


def claude_s(caller: Agent | None) -> list[Event]:
    """Return the events of /v1/messages: a call of this agent's tool, or a text."""
    if caller is None:
        block: Event = {"type": "text", "text": ""}
        delta = {"type": "text_delta", "text": SAID}
    else:
        block = {"type": "tool_use", "id": "toolu_1", "name": caller.tool, "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(dict(caller.given))}
    usage = {"input_tokens": 10, "output_tokens": 1}
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    end = {"stop_reason": "tool_use" if caller else "end_turn", "stop_sequence": None}
    return [
        {"type": "message_start", "message": message | {"stop_reason": None, "stop_sequence": None}},
        {"type": "content_block_start", "index": 0, "content_block": block},
        {"type": "content_block_delta", "index": 0, "delta": delta},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]


def openai_s(caller: Agent | None) -> list[Event]:
    """Return the events of /v1/responses: a call of this agent's tool, or a text."""
    if caller is None:
        text = {"type": "output_text", "text": SAID, "annotations": []}
        item: Event = {"type": "message", "id": "msg_1", "role": "assistant", "content": [text]}
    else:
        given = json.dumps(dict(caller.given))
        item = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": caller.tool, "arguments": given}
    item["status"] = "completed"
    response = {"id": "resp_1", "object": "response", "created_at": 1, "model": "m", "status": "in_progress"}
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    whole = response | {"status": "completed", "output": [item], "usage": usage}
    parts: list[Event] = [
        {"type": "response.created", "response": response | {"output": []}},
        {"type": "response.output_item.added", "output_index": 0, "item": item},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": whole},
    ]
    return [{"sequence_number": number, **part} for number, part in enumerate(parts)]
