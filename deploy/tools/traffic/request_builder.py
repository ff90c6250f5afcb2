"""Build requests as bytes: OpenAI's chat and completions bodies, streamed. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from deploy.tools.traffic.driver import Messages
from deploy.tools.traffic.target import Target
from shared.core.sampling_params import NEUTRAL

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


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

    def message(self, messages: Messages, max_tokens: int) -> bytes:
        data = self.body(messages, max_tokens)
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
            body["messages"] = [{"role": role, "content": text} for role, text in messages]
        else:
            body["prompt"] = "\n".join(text for _, text in messages)
        if self.target.is_ours:
            body = asdict(NEUTRAL) | body | {"ignore_eos": True, "return_token_ids": True}
        return body
