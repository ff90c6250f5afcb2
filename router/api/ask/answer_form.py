"""Decide which parts a chat's answer may have, and choose the answer's grammar."""

from __future__ import annotations

import functools
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from llguidance import LLMatcher

from router.api.answer.generation_plan import AnswerForm
from router.api.ask.structured import blamed_on, grammar_of
from router.api.fields.fields import GenerationFields
from router.text import grammars
from router.text.chat.interface import TextModel, Tokenizer, VocabFacts, special_spellings
from router.tools.calls.deltas import DeltaSink
from router.tools.calls.format_row import ToolFormat
from router.tools.grammar import behind_thought, tool_grammar, with_body
from router.tools.reasoning import Thought, framed, thought_of
from router.tools.response_template import ResponseTemplate
from router.tools.schemas.choice import ChoiceMode, ToolChoice
from router.tools.schemas.closed_objects import prepared
from router.tools.schemas.declared import Tool
from router.tools.schemas.loosened import loosened
from router.tools.template_reader import TemplateReader
from shared.core.errors import InvalidRequest

ONLY_READ = (
    "calls of this model are read as its response_template says, which can't enforce them; the operator can name a "
    "format with --tool-format"
)
UNKNOWN_FORMAT = "the format of this model's calls is not known; the operator can name one with --tool-format"


def format_of(
    text: TextModel, calls: ToolFormat | None, choice: ToolChoice, template: ResponseTemplate | None = None
) -> ToolFormat | None:
    """Return the model's format of tool calls, or None if no calls are read: none are allowed, or the template reads
    tools in a format that we don't know, so that calls are content.

    `calls`: the model's format, if it is known. `template`: else its own description of its answers. Raise
    InvalidRequest for a model without a chat template, and for a choice that must be enforced in an unknown format.
    """
    if choice.mode is ChoiceMode.NONE or calls is not None:
        return calls if choice.mode is not ChoiceMode.NONE else None
    if not text.template.sources:
        raise InvalidRequest(f"tools: the model has no chat template, so {UNKNOWN_FORMAT}", param="tools")
    if choice.mode is not ChoiceMode.AUTO:
        why = UNKNOWN_FORMAT if template is None else ONLY_READ
        raise InvalidRequest(f"tool_choice can only be auto or none: {why}", param="tool_choice")
    return None


def form_of(
    text: TextModel,
    row: ToolFormat | None,
    choice: ToolChoice,
    prompt: str,
    continued: str,
    request_id: str | None,
) -> AnswerForm:
    """`continued`: the message that the answer continues."""
    thought = thought_of(text.template.sources, prompt, continued)
    if row is not None and (thought is None or thought.tags.channels is None):
        thought = framed(row.shape) or thought  # of a format that --tool-format names
    if row is None and thought is None:
        return AnswerForm()
    wanted = row.markers if row is not None else frozenset()
    wanted |= thought.tags.markers if thought is not None else frozenset()
    return AnswerForm(
        row=row,
        tools=choice.tools if row is not None else (),
        is_named=choice.mode is ChoiceMode.NAMED,
        thought=thought,
        markers=special_tokens(text.tokenizer, wanted),
        request_id=request_id or secrets.token_hex(12),
        is_in_thought=thought is not None and thought.is_open,
    )


def described_form(
    text: TextModel, template: ResponseTemplate, choice: ToolChoice, prompt: str, request_id: str | None
) -> AnswerForm:
    """Return the form of an answer that the model's response template describes."""
    opened = template.opened_by(prompt)
    is_in_thought = TemplateReader(template, {}, DeltaSink(), opened).is_thinking
    tags = template.tags
    return AnswerForm(
        tools=choice.tools if choice.mode is not ChoiceMode.NONE else (),
        thought=Thought(tags, is_in_thought) if tags is not None else None,
        markers=special_tokens(text.tokenizer, template.markers),
        request_id=request_id or secrets.token_hex(12),
        template=template,
        opened=opened,
        is_in_thought=is_in_thought,
    )


@dataclass(frozen=True, slots=True)
class AnswerGrammar:
    """`text`: "" allows any text. `loosened`: the parts of tools' schemas that the grammar does not enforce."""

    text: str
    loosened: tuple[str, ...] = ()


def grammar_of_answer(
    fields: GenerationFields,
    facts: VocabFacts,
    form: AnswerForm,
    choice: ToolChoice,
    *,
    allows_parallel: bool,
    opens_objects: bool = False,
) -> AnswerGrammar:
    """Reasoning may come first. Then come calls, or text that follows the request's grammar. A required call overrides
    response_format."""
    asked = grammar_of(fields, facts, opens_objects=opens_objects)
    if form.row is None:
        if asked and form.thought is not None and not writes_marks(asked, form):
            asked = grammars.checked(behind_thought(asked, form.thought, form.markers))
        elif asked and form.thought is None and form.is_in_thought:
            raise InvalidRequest(
                "the prompt opens a thought, and the model's response_template does not say in words how it ends, so "
                "no grammar can follow it",
                param="response_format",
            )
        return AnswerGrammar(asked)
    if fields.ignore_eos:
        raise InvalidRequest("ignore_eos can't be true where tools may be called", param="ignore_eos")
    must_call = choice.mode is not ChoiceMode.AUTO
    if asked and must_call and fields.response_format is None:
        raise InvalidRequest("an answer that must be a call can't have another grammar", param="tools")
    tools = [prepared_tool(tool, opens_objects) for tool in choice.tools]
    body = "" if must_call else asked

    def grammar(tools: Sequence[Tool]) -> str:
        return grammar_of_calls(form, replace(choice, tools=tuple(tools)), body, allows_parallel=allows_parallel)

    with blamed_on("tools"):
        try:
            return AnswerGrammar(grammar(tools))
        except InvalidRequest:
            found = loosened(tools, grammar)
            return AnswerGrammar(found.grammar, found.names)


def writes_marks(grammar: str, form: AnswerForm) -> bool:
    """Whether a client's own grammar writes special tokens around thoughts, so that it describes the whole answer.

    `grammar`: llguidance's JSON."""
    larks = [part.get("lark_grammar") or "" for part in json.loads(grammar)["grammars"]]
    return any(mark in lark for lark in larks for mark in form.markers)


def prepared_tool(tool: Tool, opens_objects: bool) -> Tool:
    if tool.parameters is None:
        return tool
    return replace(tool, parameters=prepared(tool.parameters, opens_objects=opens_objects))


def grammar_of_calls(form: AnswerForm, choice: ToolChoice, body: str, *, allows_parallel: bool) -> str:
    """`body`: the grammar of an answer without calls; "" allows any text. Raise InvalidRequest for an unusable
    schema."""
    assert form.row is not None
    for tool in choice.tools:
        grammars.check_size(tool.schema)
    text = tool_grammar(
        form.row,
        choice,
        allows_parallel=allows_parallel,
        special_ids=form.markers,
        thought=form.thought,
        has_body=bool(body),
    )
    if text is None:
        return body
    return grammars.checked(with_body(text, body) if body else LLMatcher.grammar_from_lark(text))


@functools.lru_cache(maxsize=64)
def special_tokens(tokenizer: Tokenizer, marks: Collection[str]) -> Mapping[str, int]:
    """Return the special tokens in these marks, by their text."""
    spelled = special_spellings(tokenizer).items()
    return {text: token_id for text, token_id in spelled if text and any(text in mark for mark in marks)}
