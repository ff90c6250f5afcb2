"""What an answer may hold beside content: thoughts and calls of tools, by the model's template and the request."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from llguidance import LLMatcher

from router.api.fields import GenerationFields
from router.api.generation_plan import AnswerForm
from router.api.structured import blamed_on, grammar_of
from router.text import grammars
from router.text.interface import TextModel, Tokenizer, VocabFacts
from router.tools.choice import ChoiceMode, ToolChoice
from router.tools.formats import ToolFormat, tool_format
from router.tools.grammar import behind_thought, tool_grammar, with_body
from router.tools.reasoning import thought_of
from shared.core.errors import InvalidRequest


def format_of(text: TextModel, name: str, choice: ToolChoice) -> ToolFormat | None:
    """Return how the model calls tools, None where it may call none. `name`: of --tool-format, "" to ask the template.
    Raise InvalidRequest where nobody knows."""
    if choice.mode is ChoiceMode.NONE:
        return None
    row = tool_format(text.template.sources, name or None)
    if row is None:
        why = "the model's chat template shows no format of calls that is known here; --tool-format can name one"
        raise InvalidRequest(f"tools: {why}", param="tools")
    return row


def form_of(
    text: TextModel,
    row: ToolFormat | None,
    choice: ToolChoice,
    prompt: str,
    continued: str,
    request_id: str | None,
) -> AnswerForm:
    """Return how the answer to a rendered prompt is read. `continued`: the last message, where the answer goes on
    with it. `request_id`: the client's, which the ids of calls are made of."""
    thought = thought_of(text.template.sources, prompt, continued)
    if row is None and thought is None:
        return AnswerForm()
    wanted = row.markers if row is not None else frozenset()
    wanted |= {thought.tags.opening, thought.tags.closing} if thought is not None else set()
    return AnswerForm(
        row=row,
        tools=choice.tools if row is not None else (),
        is_named=choice.mode is ChoiceMode.NAMED,
        thought=thought,
        markers=special_tokens(text.tokenizer, wanted),
        request_id=request_id or secrets.token_hex(12),
    )


def grammar_of_answer(
    fields: GenerationFields, facts: VocabFacts, form: AnswerForm, choice: ToolChoice, *, allows_parallel: bool
) -> str:
    """Return what an answer follows, "" for anything: what the fields ask for, a thought before it where the model
    thinks, or calls of tools. Where a call must come, a response_format has nothing to say of it."""
    asked = grammar_of(fields, facts)
    if form.row is None:
        if asked and form.thought is not None:
            return grammars.checked(behind_thought(asked, form.thought, form.markers))
        return asked
    if fields.ignore_eos:
        raise InvalidRequest("ignore_eos can't be true where tools may be called", param="ignore_eos")
    must_call = choice.mode is not ChoiceMode.AUTO
    if asked and must_call and fields.response_format is None:
        raise InvalidRequest("an answer that must be a call can't follow another grammar too", param="tools")
    return grammar_of_calls(form, choice, "" if must_call else asked, allows_parallel=allows_parallel)


def grammar_of_calls(form: AnswerForm, choice: ToolChoice, body: str, *, allows_parallel: bool) -> str:
    """`body`: the grammar of an answer without calls, "" for any text. Raise InvalidRequest for a tool's schema that
    can't be followed."""
    assert form.row is not None
    with blamed_on("tools"):
        for tool in form.tools:
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
    with blamed_on("tools"):
        return grammars.checked(with_body(text, body) if body else LLMatcher.grammar_from_lark(text))


def special_tokens(tokenizer: Tokenizer, texts: frozenset[str]) -> Mapping[str, int]:
    """Return those of the texts that are special tokens of the vocabulary, with their ids."""
    spelled = {tokenizer.token_bytes(i).decode(errors="replace"): i for i in tokenizer.facts.special_ids}
    return {text: spelled[text] for text in texts if text in spelled}
