"""What a request looks like in each API, and where an answer's parts stand in its events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from stream_conformance.sse import Event

Json = dict[str, Any]


def chat_text(data: Json) -> str:
    deltas = [choice.get("delta") or {} for choice in data.get("choices") or ()]
    return "".join(delta.get(name) or "" for delta in deltas for name in ("reasoning_content", "reasoning", "content"))


def completion_text(data: Json) -> str:
    return "".join(choice.get("text") or "" for choice in data.get("choices") or ())


def messages_text(data: Json) -> str:
    delta = data.get("delta") or {}
    return str(delta.get("text") or delta.get("thinking") or "")


def responses_text(data: Json) -> str:
    return str(data["delta"]) if data.get("type") == "response.output_text.delta" else ""


@dataclass(frozen=True, slots=True)
class Api:
    """`more`: fields beside the prompt. `limit`: the field that limits the answer's length. `has_seed`: whether the
    API has a field for it. `used`: the field of `usage` that counts the answer's tokens."""

    path: str
    prompt: Callable[[str], Json]
    text: Callable[[Json], str]
    limit: str = "max_tokens"
    used: str = "completion_tokens"
    has_seed: bool = True

    def body(self, model: str, prompt: str, max_tokens: int, temperature: float) -> Json:
        return {
            "model": model,
            **self.prompt(prompt),
            self.limit: max_tokens,
            "temperature": temperature,
            "stream": True,
        }


def as_message(prompt: str) -> Json:
    return {"messages": [{"role": "user", "content": prompt}]}


USAGE = {"stream_options": {"include_usage": True}}
APIS = {
    "chat": Api("/v1/chat/completions", lambda prompt: as_message(prompt) | USAGE, chat_text),
    "completions": Api("/v1/completions", lambda prompt: {"prompt": prompt} | USAGE, completion_text),
    "messages": Api("/v1/messages", as_message, messages_text, used="output_tokens", has_seed=False),
    "responses": Api(
        "/v1/responses",
        lambda prompt: {"input": prompt},
        responses_text,
        limit="max_output_tokens",
        used="output_tokens",
        has_seed=False,
    ),
}


def contents(events: Iterable[Event]) -> list[Json]:
    """Return the JSON of the events that have some."""
    return [json.loads(event.data) for event in events if event.data.startswith("{")]


def answer_ids(events: Iterable[Event]) -> set[str]:
    """Return the names and times that the events give to the answer. Items within an answer have ids of their own."""
    found = set()
    for data in contents(events):
        for part in (data, data.get("message"), data.get("response")):
            if isinstance(part, dict):
                found |= {f"{name}={part[name]}" for name in ("id", "created", "created_at") if part.get(name)}
    return found


def tokens_used(events: Iterable[Event], name: str) -> int | None:
    """Return the last count of the answer's tokens; None where the events have none."""
    found = None
    for data in contents(events):
        for part in (data, data.get("response")):
            usage = part.get("usage") if isinstance(part, dict) else None
            found = usage.get(name, found) if isinstance(usage, dict) else found
    return found


def end_reasons(events: Iterable[Event]) -> list[str]:
    """Return the reasons that the events give for the end of an answer."""
    found = []
    for data in contents(events):
        parts = [*(data.get("choices") or ()), data.get("delta"), data.get("response")]
        for part in parts:
            if isinstance(part, dict):
                found += [str(part[name]) for name in ("finish_reason", "stop_reason") if part.get(name)]
    return found
