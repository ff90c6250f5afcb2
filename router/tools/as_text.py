"""Tools for models whose chat template knows none: definitions, calls and results become text of the chat.

system   ... the functions, and how to call one
assistant  <tool_call>{"name": ..., "arguments": ...}</tool_call>
user       <tool_response>...</tool_response>
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router.text.conversation import Conversation, JsonObject
from router.text.interface import ChatTemplate

HERMES_EXAMPLE = """\
<tool_call>
{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}
</tool_call>"""
HOW = """\
You can call these functions. Each line is one, with the JSON schema of its arguments:
{functions}
To call one, write its name and arguments like this, and nothing else:
{example}
Call a function only if it helps with the request. Otherwise answer in your own words."""


@dataclass(frozen=True, slots=True)
class ToolsAsText:
    """A ChatTemplate around the model's own, which reads no tools.

    `example`: a call as the model shall write it. `keeps_calls`: the model's own template renders calls and results.
    """

    own: ChatTemplate
    example: str = HERMES_EXAMPLE
    keeps_calls: bool = False

    @property
    def sources(self) -> Mapping[str, str]:
        return self.own.sources

    def render(self, conversation: Conversation) -> str:
        has_system = any("system" in source for source in self.sources.values())
        if self.keeps_calls:
            return self.own.render(with_functions(conversation, self.example, has_system=has_system))
        return self.own.render(as_text(conversation, has_system=has_system))


@dataclass(frozen=True, slots=True)
class TextArguments:
    """A ChatTemplate around one that needs the arguments of calls as text, as some were written."""

    own: ChatTemplate

    @property
    def sources(self) -> Mapping[str, str]:
        return self.own.sources

    def render(self, conversation: Conversation) -> str:
        return self.own.render(replace(conversation, messages=list(map(with_text_arguments, conversation.messages))))


def with_text_arguments(message: JsonObject) -> JsonObject:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_text(call) if isinstance(call, Mapping) else call for call in calls]}


def _with_text(call: JsonObject) -> JsonObject:
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(function.get("arguments"), str):
        return call
    arguments = json.dumps(function.get("arguments"), ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def with_functions(conversation: Conversation, example: str, *, has_system: bool) -> Conversation:
    """Write the tools into the chat; calls and results stay as they are."""
    messages = list(conversation.messages)
    if conversation.tools:
        add_functions(messages, conversation.tools, "system" if has_system else "user", example)
    return replace(conversation, messages=messages, tools=None)


def as_text(conversation: Conversation, *, has_system: bool) -> Conversation:
    """`has_system`: whether the template takes a system message; else the first user's message has the functions."""
    messages: list[JsonObject] = []
    for message in conversation.messages:
        if message.get("role") == "tool":
            add_result(messages, message)
        else:
            messages.append(with_calls(message))
    if conversation.tools:
        add_functions(messages, conversation.tools, "system" if has_system else "user")
    return replace(conversation, messages=messages, tools=None)


def add_functions(
    messages: list[JsonObject], tools: Sequence[JsonObject], role: str, example: str = HERMES_EXAMPLE
) -> None:
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    how = HOW.format(functions="\n".join(lines), example=example)
    place = next((at for at, message in enumerate(messages) if message.get("role") == role), None)
    if place is None:
        messages.insert(0, {"role": role, "content": how})
    else:
        first, then = (content_of(messages[place]), how) if role == "system" else (how, content_of(messages[place]))
        messages[place] = {**messages[place], "content": f"{first}\n\n{then}"}


def with_calls(message: JsonObject) -> JsonObject:
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls:
        return message
    functions = [call.get("function", {}) for call in calls if isinstance(call, Mapping)]
    written = [{"name": one.get("name"), "arguments": one.get("arguments")} for one in functions]
    texts = [f"<tool_call>\n{json.dumps(one, ensure_ascii=False)}\n</tool_call>" for one in written]
    others = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**others, "content": "\n".join(filter(None, [content_of(message), *texts]))}


def add_result(messages: list[JsonObject], message: JsonObject) -> None:
    """Results of several calls are one message: many templates want turns to alternate."""
    result = f"<tool_response>\n{content_of(message)}\n</tool_response>"
    if messages and messages[-1].get("role") == "user" and str(messages[-1]["content"]).startswith("<tool_response>"):
        messages[-1] = {"role": "user", "content": f"{messages[-1]['content']}\n{result}"}
    else:
        messages.append({"role": "user", "content": result})


def content_of(message: JsonObject) -> str:
    content = message.get("content")
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
