"""Tools for models whose chat template knows none: definitions, calls and results become text of the chat.

system   ... the functions, and how to call one
assistant  <tool_call>{"name": ..., "arguments": ...}</tool_call>
user       <tool_response>...</tool_response>
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router.text.chat.calls_in_text import content_of, with_calls, with_results, with_text_arguments
from router.text.chat.chat_texts import all_found
from router.text.chat.conversation import Conversation, JsonObject
from router.text.chat.interface import ChatTemplate, RenderingFailed
from router.tools.reasoning import ThoughtTags, thought_tags
from shared.core.errors import InvalidRequest

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
        """Results may be turns of the user here, behind which many templates drop thoughts. If this one would keep them
        before a result, write them into the content."""
        prompt = self._rendered(conversation)
        tags = thought_tags(self.sources)
        if self.keeps_calls or tags is None or tags.channels is not None:
            return prompt
        thoughts = open_thoughts(conversation.messages)
        if shows(prompt, thoughts):
            return prompt
        with contextlib.suppress(InvalidRequest):
            kept = self._with_told(conversation, thoughts, tags)
            return kept if shows(kept, thoughts) else prompt
        return prompt

    def _with_told(self, conversation: Conversation, thoughts: Mapping[int, str], tags: ThoughtTags) -> str:
        """Return "" if the template drops thoughts even before a result."""
        first = min(thoughts)
        begun = replace(conversation, messages=conversation.messages[: first + 1])
        if thoughts[first].strip() not in self._rendered(begun):
            return ""
        told = [
            _with_told_thought(message, thoughts[i], tags) if i in thoughts else message
            for i, message in enumerate(conversation.messages)
        ]
        return self._rendered(replace(conversation, messages=told))

    def _rendered(self, conversation: Conversation) -> str:
        has_system = any("system" in source for source in self.sources.values())
        try:
            return self.own.render(self._with_functions(conversation, has_system=has_system))
        except RenderingFailed:
            if not has_system or not conversation.tools:
                raise
            # it may name the role to refuse it
            return self.own.render(self._with_functions(conversation, has_system=False))

    def _with_functions(self, conversation: Conversation, *, has_system: bool) -> Conversation:
        if self.keeps_calls:
            return with_functions(conversation, self.example, has_system=has_system)
        return as_text(conversation, has_system=has_system)


def open_thoughts(messages: Sequence[JsonObject]) -> dict[int, str]:
    """Return the thoughts before calls behind the user's last turn, by the message's index."""
    last = max((i for i, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    return {
        i: str(message["reasoning_content"])
        for i, message in enumerate(messages)
        if i > last and message.get("tool_calls") and message.get("reasoning_content")
    }


def shows(prompt: str, thoughts: Mapping[int, str]) -> bool:
    return all_found([{"role": "user", "content": thought} for thought in thoughts.values()], prompt)


def _with_told_thought(message: JsonObject, thought: str, tags: ThoughtTags) -> JsonObject:
    others = {name: value for name, value in message.items() if name not in ("reasoning_content", "thinking")}
    return {**others, "content": f"{tags.opening.rstrip()}\n{thought}\n{tags.closing}\n\n{content_of(message)}"}


@dataclass(frozen=True, slots=True)
class TextArguments:
    """A ChatTemplate around one that needs the arguments of calls as text, as some were written."""

    own: ChatTemplate

    @property
    def sources(self) -> Mapping[str, str]:
        return self.own.sources

    def render(self, conversation: Conversation) -> str:
        return self.own.render(replace(conversation, messages=list(map(with_text_arguments, conversation.messages))))


def with_functions(conversation: Conversation, example: str, *, has_system: bool) -> Conversation:
    """Write the tools into the chat; calls and results stay as they are."""
    messages = list(conversation.messages)
    if conversation.tools:
        add_functions(messages, conversation.tools, "system" if has_system else "user", example)
    return replace(conversation, messages=messages, tools=None)


def as_text(conversation: Conversation, *, has_system: bool) -> Conversation:
    """`has_system`: whether the template takes a system message; else the first user's message has the functions."""
    messages = [with_calls(message) for message in with_results(conversation.messages)]
    return with_functions(replace(conversation, messages=messages), HERMES_EXAMPLE, has_system=has_system)


def add_functions(messages: list[JsonObject], tools: Sequence[JsonObject], role: str, example: str) -> None:
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    how = HOW.format(functions="\n".join(lines), example=example)
    place = next((at for at, message in enumerate(messages) if message.get("role") == role), None)
    if place is None:
        messages.insert(0, {"role": role, "content": how})
    else:
        first, then = (content_of(messages[place]), how) if role == "system" else (how, content_of(messages[place]))
        messages[place] = {**messages[place], "content": f"{first}\n\n{then}"}
