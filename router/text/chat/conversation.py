"""The input of chat templates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from router.text.chat.call_arguments import as_object

Scalar = str | int | float | bool | None
JsonObject = Mapping[str, object]

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # the first one that is set is used

# `normalized` drops these fields if they are null, and else keeps them.
PLAIN_FIELDS = frozenset({"role", "content", "name", "tool_call_id"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """One chat from the API, as plain JSON values. Rendering never changes them.

    `tools` and `documents`: None if not sent, because a template may treat [] differently.
    """

    messages: Sequence[JsonObject]
    tools: Sequence[JsonObject] | None = None
    documents: Sequence[JsonObject] | None = None
    kwargs: Mapping[str, Scalar] = field(default_factory=dict)  # chat_template_kwargs of the request
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def normalized(conversation: Conversation) -> Conversation:
    """Return a conversation as templates expect it.

    Nulls are dropped. The reasoning text is named both `thinking` and `reasoning_content`. Tool arguments become
    mappings, whatever the client sent."""
    if all(_is_plain(message) for message in conversation.messages):
        return conversation
    return replace(conversation, messages=[_normalized(message) for message in conversation.messages])


def _normalized(message: JsonObject) -> JsonObject:
    if _is_plain(message):
        return message
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = next((given[name] for name in REASONING_FIELDS if name in given), None)
    if reasoning is not None:
        given = {"thinking": reasoning, **given, "reasoning_content": reasoning}
    calls = given.get("tool_calls")
    if isinstance(calls, list):
        given["tool_calls"] = [_call_with_mapping(call) for call in calls]
    return given


def _is_plain(message: JsonObject) -> bool:
    return message.keys() <= PLAIN_FIELDS and None not in message.values()


def _call_with_mapping(call: object) -> object:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"]
    given = function.get("arguments")
    arguments = as_object(given)
    return call if arguments is given else {**call, "function": {**function, "arguments": arguments}}
