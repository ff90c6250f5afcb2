"""Write calls and their results as text, for templates that have no place for them.

assistant  <tool_call>{"name": ..., "arguments": ...}</tool_call>
user       <tool_response>...</tool_response>
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Mapping, Sequence

from router.text.chat.conversation import JsonObject


def with_calls(message: JsonObject) -> JsonObject:
    """Return the message with its calls behind its text. Its thoughts stay."""
    texts = [f"<tool_call>\n{call}\n</tool_call>" for call in calls_as_json(message, ensure_ascii=False)]
    if not texts:
        return message
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, [content_of(message), *texts]))}


def calls_as_json(message: JsonObject, *, ensure_ascii: bool) -> list[str]:
    calls = message.get("tool_calls")
    given = [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    functions = [call.get("function") or {} for call in given]
    return [
        json.dumps({"name": one.get("name"), "arguments": one.get("arguments")}, ensure_ascii=ensure_ascii)
        for one in functions
    ]


def with_text_arguments(message: JsonObject) -> JsonObject:
    """Return the message with its calls' arguments as JSON text, which some templates need."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    return {**message, "tool_calls": [_with_text(call) if isinstance(call, Mapping) else call for call in calls]}


def _with_text(call: JsonObject) -> JsonObject:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def with_results(messages: Sequence[JsonObject], are_moved: Sequence[bool] | None = None) -> list[JsonObject]:
    """Make results turns of the user. Neighbouring results are one, because many templates want turns to alternate.

    `are_moved`: which messages are the results; default: those of the role `tool`."""
    flags = [message.get("role") == "tool" for message in messages] if are_moved is None else are_moved
    turns: list[JsonObject] = []
    for is_result, pairs in itertools.groupby(zip(messages, flags, strict=True), operator.itemgetter(1)):
        group = [message for message, _ in pairs]
        if is_result:
            texts = [f"<tool_response>\n{content_of(message)}\n</tool_response>" for message in group]
            group = [{"role": "user", "content": "\n".join(texts)}]
        turns += group
    return turns


def content_of(message: JsonObject) -> str:
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
