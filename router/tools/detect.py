"""Find out how a model calls tools: by its chat template's own rendering of a call, which must read back as this call.

template(user, call)  ->  <|assistant|><tool_call>f<arg_key>...  ->  a row whose reader finds the same call

A template that renders no calls may show the format in words, or by a special token (`ToolFormat.signs`). A template
that reads tools is never replaced. For one that does not, the tools become text of the chat.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from router.text.chat.conversation import Conversation, JsonObject
from router.text.chat.interface import ChatTemplate, TextModel, special_spellings
from router.tools.answer import AnswerReader
from router.tools.as_text import HERMES_EXAMPLE, TextArguments, ToolsAsText
from router.tools.calls.deltas import WholeCall, whole_answer
from router.tools.calls.format_row import ToolFormat
from router.tools.calls.formats import BY_NAME, FORMATS
from router.tools.calls.json_calls import NamedJsonCalls
from router.tools.reasoning import framed
from router.tools.response_template import ResponseTemplate, response_template_of
from router.tools.schemas.declared import Tool
from shared.core.errors import ConfigError, InvalidRequest

AS_TEXT = BY_NAME["hermes"]  # the form of calls that most models have seen
READS_TOOLS = re.compile(r"\{[{%](?:(?![}%]\}).)*\btools\b", re.DOTALL)  # in code, not in a sentence of the prompt
USER: JsonObject = {"role": "user", "content": "What is the weather in Rome?"}
TEXT = "I look."
MAX_TURN_CHARS = 8192  # a longer turn with a call shows no format; to look through it would hold up the start
ARGUMENTS: dict[str, Any] = {"city": "Rome", "days": 2}
PROBE = Tool(
    "get_weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "a town"},
            "days": {"type": "integer", "description": "how many"},
        },
        "required": ["city"],
    },
)


@dataclass(frozen=True, slots=True)
class Speech:
    """`calls`: None if no row of the table is the model's format of calls. `source`: what told the format, for logs.

    `template`: the model's own description of its answers, if there is no row. `problem`: why it is of no use."""

    text: TextModel
    calls: ToolFormat | None
    source: str
    template: ResponseTemplate | None = None
    problem: str = ""


def speech_of(text: TextModel, asked: str = "") -> Speech:
    """`asked`: --tool-format, which wins. Raise ConfigError for an unknown name, and for another format than that of
    tools as text if the template reads no tools."""
    if asked and asked not in BY_NAME:
        raise ConfigError(f"there is no tool format {asked!r}: {', '.join(sorted(BY_NAME))}")
    sources = text.template.sources
    if not sources:
        return Speech(text, BY_NAME[asked] if asked else None, "--tool-format" if asked else "no chat template")
    probe = TemplateProbe(text.template)
    found = probe.found_call()
    if found is not None and found.wants_text:
        text = replace(text, template=TextArguments(text.template))
    if any(map(READS_TOOLS.search, sources.values())) and probe.takes_tools:
        if asked:
            return Speech(text, BY_NAME[asked], "--tool-format")
        if found is not None:
            return Speech(text, found.row, "the chat template's rendering of a call")
        signed = signed_row(text)
        told_by = "words of the chat template, or special tokens"
        return Speech(text, signed, told_by) if signed is not None else described_speech(text)
    kept = found if found is not None and found.keeps_calls else None
    row = kept.row if kept is not None else AS_TEXT
    if asked and asked != row.name:
        raise ConfigError(
            f"--tool-format {asked}: the model's chat template has no place for tools, so they are written into the "
            f"chat as text, and its calls are {row.name}: leave --tool-format out"
        )
    example = kept.example if kept is not None else HERMES_EXAMPLE
    template = ToolsAsText(text.template, example, keeps_calls=kept is not None)
    return Speech(replace(text, template=template), row, "tools as text: the chat template takes none")


def described_speech(text: TextModel) -> Speech:
    """Return the speech of a model that no row of the table knows."""
    described = text.about.get("response_template")
    if described is None:
        return Speech(text, None, "nothing")
    try:
        return Speech(text, None, "response_template", response_template_of(described))
    except ConfigError as error:
        return Speech(text, None, "nothing", problem=str(error))


def signed_row(text: TextModel) -> ToolFormat | None:
    """Return the first row whose signs the templates and the special tokens hold."""
    facts = "\0".join([*text.template.sources.values(), *special_spellings(text.tokenizer)])
    return next((row for row in FORMATS if is_signed(row, facts)), None)


def is_signed(row: ToolFormat, facts: str) -> bool:
    return any(all(sign in facts for sign in signs) for signs in row.signs)


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A template's rendering of a call, up to its end, and the first row that reads it back.

    `keeps_calls`: the template also renders a call beside a text. `wants_text`: it needs the arguments as text."""

    row: ToolFormat
    example: str
    keeps_calls: bool
    wants_text: bool


class TemplateProbe:
    """Renders a question with a tool, and answers that call it. Each rendering of a hostile template takes seconds."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._asked = self._render(USER)
        opened = self._render(USER, add_generation_prompt=True)
        self._begun = _behind_common(self._asked or "", opened or "")  # what begins the assistant's turn
        self.takes_tools = self._asked is not None or opened is not None  # else every request with tools would fail

    def found_call(self) -> FoundCall | None:
        facts = "\0".join(self._template.sources.values())
        signed = [row for row in FORMATS if is_signed(row, facts)]
        rows = [*signed, *(row for row in FORMATS if row not in signed and not _needs_signs(row))]
        for arguments in (ARGUMENTS, json.dumps(ARGUMENTS)):
            for turn in self._turns(arguments, "", None, TEXT):
                for row in rows:
                    if end := _end_of_call(row, turn):
                        keeps_calls = any(_end_of_call(row, told) for told in self._turns(arguments, TEXT))
                        return FoundCall(row, turn[:end].strip(), keeps_calls, isinstance(arguments, str))
        return None

    def _turns(self, arguments: object, *contents: str | None) -> Iterator[str]:
        """Yield the assistant's turn with a call, behind each content."""
        if self._asked is None:
            return
        for content in contents:
            turn = self._render(USER, _called(arguments, content))
            if turn is not None:
                yield _behind_common(self._begun, _behind_common(self._asked, turn))

    def _render(self, *messages: JsonObject, add_generation_prompt: bool = False) -> str | None:
        tools = [PROBE.for_template()]
        chat = Conversation(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        try:
            return self._template.render(chat)
        except InvalidRequest:
            return None


def _end_of_call(row: ToolFormat, turn: str) -> int:
    """Return how many characters the row's reader takes for the call; 0 if it does not find the call."""
    is_there = row.may_begin_bare or not row.begins or any(begin in turn for begin in row.begins)
    if not is_there or len(turn) > MAX_TURN_CHARS or not _reads_back(row, turn):
        return 0
    reader = _reader_of(row)
    for at, char in enumerate(turn):
        reader.feed(char)
        if reader.num_calls and not reader.is_in_call:
            return at + 1
    return 0


def _reads_back(row: ToolFormat, turn: str) -> bool:
    reader = _reader_of(row)
    calls = whole_answer([*reader.feed(turn), *reader.finish()]).calls
    return [_parsed(call) for call in calls] == [(PROBE.name, ARGUMENTS)]


def _reader_of(row: ToolFormat) -> AnswerReader:
    return AnswerReader(row, [PROBE], framed(row.shape), is_lenient=False)


def _called(arguments: object, content: str | None) -> JsonObject:
    function = {"name": PROBE.name, "arguments": arguments}
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"id": "call1abcd", "type": "function", "function": function}],
    }


def _needs_signs(row: ToolFormat) -> bool:
    """A bare name and JSON: too many formats look so."""
    return row.may_begin_bare and isinstance(row.shape, NamedJsonCalls)


def _parsed(call: WholeCall) -> tuple[str, object]:
    try:
        return call.name, json.loads(call.arguments)
    except ValueError:
        return call.name, None


def _behind_common(start: str, text: str) -> str:
    """Return what `text` has behind its common beginning with `start`. Marks stay whole."""
    shorter = min(len(start), len(text))
    common = next((at for at in range(shorter) if start[at] != text[at]), shorter)
    if common < len(start):
        common = max(start.rfind(mark, 0, common) for mark in ("\n", ">", "]")) + 1
    return text[common:]
