"""Conversations drawn by seed: what agents send back, with nulls, parts, tools, reasoning and odd Unicode."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from router.text.chat.conversation import Conversation

TEXTS = (
    "hi",
    "",
    " ",
    "What is 2 + 2?\nAnswer briefly.  ",
    "\n\n  def f(x):\n\treturn {'a': x}\n",
    "<think>one\ntwo</think>\n\nthree",
    "</think> alone",
    "<tool_response>\nno such\n</tool_response>",
    'quote " backslash \\ braces {{ x }} {% if %} &amp; <b>',
    "déjà vu, ñandú, e\u0301 ﬁ ﷺ",
    "中文字符，日本語。한국어",
    "🦜👩‍👩‍👧‍👦 \U0001d518 \u200b\u200d\u202e\ufeff",
    "\u2028line\u2029 \x85 \x0b \x1f \xa0 end",
    "𠀀𠀁 \ue000\uf8ff \U000f0000 \U0010fffd",
    "null None true False 0",
)
NAMES = ("get_weather", "search", "résumé", "f_1")


def conversation(rng: random.Random) -> Conversation:
    tools = rng.choice([None, None, [], _tools(rng), _tools(rng)])
    messages = _messages(rng, bool(tools))
    if rng.random() < 0.6:
        messages = [_plain(message) for message in messages]
    continues = rng.random() < 0.15
    if continues:
        messages.append({"role": "assistant", "content": rng.choice([rng.choice(TEXTS), _content(rng)])})
    return Conversation(
        messages,
        tools=tools,
        documents=rng.choice([None, None, None, [], _documents(rng)]),
        kwargs=_kwargs(rng),
        add_generation_prompt=not continues and rng.random() < 0.8,
        continue_final_message=continues,
    )


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """For the many templates that take texts only, and tool arguments as mappings."""
    content = message["content"]
    text = "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
    calls = [
        {**call, "function": {**call["function"], "arguments": '{"a": 1}'}} for call in message.get("tool_calls") or []
    ]
    return {**message, "content": text} | ({"tool_calls": calls} if calls else {})


def as_hugging_face_gets_it(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with tool arguments as mappings, for a renderer that leaves this to its callers."""
    copied = json.loads(json.dumps(messages))
    for message in copied:
        for call in message.get("tool_calls") or []:
            arguments = call["function"]["arguments"]
            if isinstance(arguments, str):
                try:
                    parsed = json.loads(arguments) if arguments.strip() else {}
                except ValueError:
                    parsed = arguments
                call["function"]["arguments"] = parsed if isinstance(parsed, dict) else {"arguments": parsed}
    return copied


def _messages(rng: random.Random, has_tools: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "system", "developer"]), "content": _content(rng)})
    for _ in range(rng.randint(1, 4)):
        messages.append(_with_extras(rng, {"role": "user", "content": _content(rng)}))
        if has_tools and rng.random() < 0.6:
            messages += _tool_turn(rng)
        if rng.random() < 0.7:
            messages.append(_answer(rng))
    if rng.random() < 0.7:
        messages.append({"role": "user", "content": _content(rng)})
    if rng.random() < 0.05:
        rng.shuffle(messages)
    return messages


def _answer(rng: random.Random) -> dict[str, Any]:
    answer = {"role": "assistant", "content": _content(rng)}
    if rng.random() < 0.4:
        answer[rng.choice(["reasoning_content", "reasoning", "thinking"])] = rng.choice([*TEXTS, None])
    return _with_extras(rng, answer)


def _tool_turn(rng: random.Random) -> list[dict[str, Any]]:
    ids = [f"call{rng.randrange(10**9):09d}"[-9:] for _ in range(rng.randint(1, 2))]
    calls = [
        {"id": i, "type": "function", "function": {"name": rng.choice(NAMES), "arguments": _arguments(rng)}}
        for i in ids
    ]
    asking = {"role": "assistant", "content": rng.choice([None, "", rng.choice(TEXTS)]), "tool_calls": calls}
    if rng.random() < 0.3:
        asking["reasoning_content"] = rng.choice(TEXTS)
    answers = [{"role": "tool", "tool_call_id": i, "content": _content(rng)} for i in ids]
    if rng.random() < 0.5:
        answers = [{**answer, "name": rng.choice(NAMES)} for answer in answers]
    return [asking, *answers]


def _arguments(rng: random.Random) -> Any:
    given = {f"a{i}": _value(rng) for i in range(rng.randint(0, 3))}
    return rng.choice([given, json.dumps(given), json.dumps(given, ensure_ascii=False), "", "{broken", "[1]"])


def _value(rng: random.Random) -> Any:
    return rng.choice([None, True, 3, -0.5, 1e20, "x", rng.choice(TEXTS), [1, "é"], {"k": None, "ü": [False]}])


def _content(rng: random.Random) -> Any:
    kind = rng.random()
    if kind < 0.7:
        return " ".join(rng.choice(TEXTS) for _ in range(rng.randint(1, 2)))
    if kind < 0.8:
        return None
    return [{"type": "text", "text": rng.choice(TEXTS)} for _ in range(rng.randint(1, 3))]


def _with_extras(rng: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.2:
        message |= {rng.choice(["name", "cache_control", "refusal", "tool_calls"]): None}
    return message


def _tools(rng: random.Random) -> list[dict[str, Any]]:
    return [_tool(rng) for _ in range(rng.randint(1, 3))]


def _tool(rng: random.Random) -> dict[str, Any]:
    properties = {
        f"a{i}": {"type": rng.choice(["string", "integer", "array", "object"]), "description": rng.choice(TEXTS)}
        for i in range(rng.randint(0, 3))
    }
    for described in properties.values():
        described |= rng.choice([{}, {"enum": ["a", "ü"]}, {"default": None}, {"items": {"type": "number"}}])
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.6:
        schema["required"] = list(properties)[:2]
    function = {"name": rng.choice(NAMES), "description": rng.choice(TEXTS), "parameters": schema}
    if rng.random() < 0.3:
        function["strict"] = rng.choice([True, None])
    return {"type": "function", "function": function}


def _documents(rng: random.Random) -> list[dict[str, Any]]:
    return [{"title": rng.choice(TEXTS), "text": rng.choice(TEXTS), "doc_id": str(i)} for i in range(2)]


def _kwargs(rng: random.Random) -> dict[str, Any]:
    drawn = {
        "enable_thinking": rng.choice([True, False]),
        "thinking": rng.choice([True, False, "elaborate"]),
        "reasoning_effort": rng.choice(["low", "high", None]),
        "thinking_budget": rng.choice([0, 512]),
        "unknown_é": 1.5,
    }
    return {name: value for name, value in drawn.items() if rng.random() < 0.25}
