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
