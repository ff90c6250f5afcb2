"""Tools for models whose chat template knows none: definitions, calls and results become text of the chat.

system   ... the functions, and how to call one
assistant  <tool_call>{"name": ..., "arguments": ...}</tool_call>
user       <tool_response>...</tool_response>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from router.text.conversation import Conversation, JsonObject
from router.text.interface import ChatTemplate, TextModel
from router.tools.formats import BY_NAME, tool_format
from shared.core.errors import ConfigError

FORMAT = BY_NAME["hermes"]  # the form of calls that most models have seen
READS_TOOLS = re.compile(r"\{[{%](?:(?![}%]\}).)*\btools\b", re.DOTALL)  # in code, not in a sentence of the prompt
HOW = """\
You can call these functions. Each line is one, with the JSON schema of its arguments:
{functions}
To call one, write its name and arguments like this, and nothing else:
<tool_call>
{{"name": "FUNCTION", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>
Call a function only if it helps with the request. Otherwise answer in your own words."""


def with_tools(text: TextModel, asked: str) -> TextModel:
    """Return the model with tools as text, if its template shows no format of calls.

    `asked`: --tool-format. If it names the format, a template that reads the tools keeps them. Raise ConfigError for an
    unknown name, and for another format than that of tools as text if the template reads no tools."""
    sources = text.template.sources
    shown = tool_format(sources, asked or None)
    has_place = any(READS_TOOLS.search(source) for source in sources.values()) if asked else shown is not None
    if has_place or not sources:
        return text
    if asked and shown is not FORMAT:
        raise ConfigError(
            f"--tool-format {asked}: the model's chat template has no place for tools, so they are written into the "
            f"chat as text, and its calls are {FORMAT.name}: leave --tool-format out"
        )
    return replace(text, template=ToolsAsText(text.template))


@dataclass(frozen=True, slots=True)
class ToolsAsText:
    """A ChatTemplate around the model's own."""

    own: ChatTemplate

    @property
    def sources(self) -> Mapping[str, str]:
        return self.own.sources

    def render(self, conversation: Conversation) -> str:
        return self.own.render(as_text(conversation, has_system=any("system" in of for of in self.sources.values())))


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


def add_functions(messages: list[JsonObject], tools: Sequence[JsonObject], role: str) -> None:
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    how = HOW.format(functions="\n".join(lines))
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
