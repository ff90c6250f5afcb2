"""Conversations as agents send them: parts, tool calls and their results, reasoning, vendors' marks."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

Message = dict[str, Any]
Text = Callable[[], str]


def conversation(rng: random.Random, text: Text) -> list[Message]:
    """Return one to six messages; the last one is for the assistant to answer."""
    turns: list[Message] = [{"role": rng.choice(("system", "developer")), "content": text()}]
    turns = turns if rng.random() < 0.3 else []
    for _ in range(rng.choice((0, 0, 1, 2))):
        turns += [{"role": "user", "content": content(rng, text)}, *answer(rng, text)]
    return [*turns, {"role": "user", "content": content(rng, text)}]


def content(rng: random.Random, text: Text) -> object:
    if rng.random() < 0.6:
        return text()
    marks = {"cache_control": {"type": "ephemeral"}} if rng.random() < 0.3 else {}
    kinds = ({"type": "text", "text": text(), **marks}, {"type": "input_text", "text": text()}, text())
    return [rng.choice(kinds) for _ in range(rng.randint(1, 3))]


def answer(rng: random.Random, text: Text) -> list[Message]:
    """Return what an assistant said, with the results of the tools that it called."""
    said: Message = {"role": "assistant", "content": rng.choice((None, "", text(), [{"type": "text", "text": text()}]))}
    if rng.random() < 0.4:
        said[rng.choice(("reasoning", "reasoning_content"))] = text()
    if rng.random() < 0.2:
        said["content"] = [
            {"type": "thinking", "thinking": text(), "signature": "c2ln"},
            {"type": "text", "text": text()},
        ]
    if rng.random() < 0.2:
        said |= {"refusal": None, "audio": None, "annotations": [], "function_call": None}
    if rng.random() < 0.5:
        return [said]
    ids = [f"call_{rng.randrange(1000)}" for _ in range(rng.randint(1, 2))]
    said["tool_calls"] = [tool_call(rng, text, call_id) for call_id in ids]
    return [said, *({"role": "tool", "tool_call_id": call_id, "content": content(rng, text)} for call_id in ids)]


def tool_call(rng: random.Random, text: Text, call_id: str) -> Message:
    arguments = {"path": text(), "depth": rng.randrange(9), "all": None}
    given: object = arguments if rng.random() < 0.2 else json.dumps(arguments)
    return {"id": call_id, "type": "function", "function": {"name": "look_up", "arguments": given}}


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
