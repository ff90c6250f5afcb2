"""Conversations as agents send them: parts, tool calls and their results, reasoning, vendors' marks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

from tests.support.bodies.odd_histories import HISTORIES, with_texts

Message = dict[str, Any]
Text = Callable[[], str]
MARKS: tuple[Message, ...] = (
    {"refusal": None, "audio": None, "annotations": [], "function_call": None},
    {"cache_control": {"type": "ephemeral"}},
    {"reasoning": "hm"},
)


def conversation(rng: random.Random, text: Text) -> list[Message]:
    """Return a history in OpenAI's form, some messages with what vendors add to theirs."""
    turns: list[Message] = with_texts(rng.choice(list(HISTORIES.values())), text)
    for turn in turns:
        turn |= rng.choice(MARKS) if rng.random() < 0.2 else {}
    return [*turns, {"role": "user", "content": rng.choice((text(), content(rng, text)))}]


def content(rng: random.Random, text: Text) -> list[object]:
    marks = {"cache_control": {"type": "ephemeral"}} if rng.random() < 0.3 else {}
    kinds = ({"type": "text", "text": text(), **marks}, {"type": "input_text", "text": text()}, text())
    return [rng.choice(kinds) for _ in range(rng.randint(1, 3))]


def function(rng: random.Random, text: Text, *, is_claude: bool = False) -> Message:
    """A tool, in Anthropic's form or in OpenAI's flat one."""
    schema = {"type": "object", "properties": {"path": {"type": "string", "maxLength": 4}}, "required": ["path"]}
    name = f"look_up_{rng.randrange(1 << 30)}"
    if is_claude:
        return {"name": name, "description": text(), "input_schema": schema}
    return {"type": "function", "name": name, "description": text(), "parameters": schema}


def claude_conversation(rng: random.Random, text: Text) -> list[Message]:
    """The same kind of history in Anthropic's form."""
    turns: list[Message] = []
    for _ in range(rng.choice((0, 0, 1, 2))):
        call = {"type": "tool_use", "id": "toolu_1", "name": "look_up", "input": {"path": text()}}
        thought = {"type": "thinking", "thinking": text(), "signature": "c2ln"}
        said = {"type": "text", "text": text(), "cache_control": {"type": "ephemeral"}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": rng.choice((text(), [said]))}
        turns += [{"role": "user", "content": text()}, {"role": "assistant", "content": [thought, said, call]}]
        turns += [{"role": "user", "content": [result, said]}]
    return [*turns, {"role": "user", "content": rng.choice((text(), [{"type": "text", "text": text()}]))}]


def ollama_conversation(rng: random.Random, text: Text) -> list[Message]:
    """The same kind of history in Ollama's form."""
    turns: list[Message] = [{"role": "system", "content": text()}] if rng.random() < 0.3 else []
    for _ in range(rng.choice((0, 0, 1, 2))):
        call = {"function": {"name": "look_up", "arguments": {"path": text()}}}
        own = {"role": "assistant", "content": text(), "thinking": text(), "tool_calls": [call]}
        turns += [{"role": "user", "content": text()}, own, {"role": "tool", "tool_name": "look_up", "content": text()}]
    return [*turns, {"role": "user", "content": text()}]


def response_items(rng: random.Random, text: Text) -> list[Message]:
    """The same kind of history as items of /v1/responses."""
    items: list[Message] = [{"type": "message", "role": "developer", "content": text()}] if rng.random() < 0.3 else []
    for _ in range(rng.choice((0, 0, 1, 2))):
        call = {"type": "function_call", "call_id": "call_1", "name": "look_up", "arguments": json.dumps({"a": text()})}
        items += [
            {"role": "user", "content": [{"type": "input_text", "text": text()}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text()}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text()}]},
            call,
            {"type": "function_call_output", "call_id": "call_1", "output": text()},
        ]
    return [*items, {"role": "user", "content": text()}]
