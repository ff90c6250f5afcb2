"""Build requests as bytes: OpenAI's chat and completions bodies, streamed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from deploy.tools.traffic.target import Target
from deploy.tools.traffic.workloads.driver import CALL, Message, Messages
from shared.core.sampling_params import NEUTRAL

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
TOOL_NAME, CALL_ID = "run", "toolcall1"  # Mistral's templates want ids of nine letters and digits
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Run a command, and return what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "pattern": "^[a-z ]{20,60}$"}},
            "required": ["command"],
            "additionalProperties": False,
        },
    },
}
CALL_TOKENS = 256  # more than a call takes, because part of a call is none


@dataclass(frozen=True, slots=True)
class RequestBuilder:
    """The form of a run's requests. They are greedy by default, as golden answers need, and without the server's own
    defaults, as comparisons need. Only top_p is known to every server.
    """

    target: Target
    api: str = "chat"
    api_key: str = ""
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)  # fields that override others; null removes a field

    @property
    def path(self) -> str:
        return PATHS[self.api]

    def message(self, messages: Messages, max_tokens: int, tool_choice: str = "") -> bytes:
        data = self.body(messages, max_tokens, self._tools(max_tokens, tool_choice))
        url = self.target.url
        head = [
            f"POST {url.prefix}{self.path} HTTP/1.1",
            f"Host: {url.authority}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(data)}",
        ]
        if self.api_key:
            head.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*head, "", ""]).encode() + data

    def body(self, messages: Messages, max_tokens: int, more: Mapping[str, Any] | None = None) -> bytes:
        fields = self._fields(messages, max_tokens) | dict(more or {}) | dict(self.extra)
        return msgspec.json.encode({name: value for name, value in fields.items() if value is not None})

    def _fields(self, messages: Messages, max_tokens: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.target.model,
            "max_tokens": max_tokens,
            "top_p": NEUTRAL.top_p,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.api == "chat":
            body["messages"] = list(map(self._chat_message, messages))
        else:
            body["prompt"] = "\n".join(text for _, text in messages)
        if self.target.is_ours:
            body = asdict(NEUTRAL) | body | {"ignore_eos": True, "return_token_ids": True}
        return body

    def _tools(self, max_tokens: int, tool_choice: str) -> dict[str, Any]:
        """Where calls may come, Baton takes no `ignore_eos`: the call's grammar says where the answer ends."""
        if not tool_choice or self.api != "chat" or self.extra.get("tools", TOOL) is None:
            return {}
        tools = {"tools": [TOOL], "tool_choice": tool_choice, "parallel_tool_calls": False}
        limit = {"max_tokens": max(max_tokens, CALL_TOKENS)} if tool_choice == "required" else {}
        return tools | limit | ({"ignore_eos": False} if self.target.is_ours else {})

    @staticmethod
    def _chat_message(message: Message) -> dict[str, Any]:
        role, text = message
        if role == CALL:
            call = {"id": CALL_ID, "type": "function", "function": {"name": TOOL_NAME, "arguments": text}}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"role": role, "content": text} | ({"tool_call_id": CALL_ID} if role == "tool" else {})
