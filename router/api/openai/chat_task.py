"""The common form of chat requests at all endpoints."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from router.api.answer.generation_plan import AnswerForm, Contexts, GenerationPlan
from router.api.ask.answer_form import AnswerGrammar, described_form, form_of, format_of, grammar_of_answer
from router.api.ask.parts import Parts
from router.api.ask.resolve import Resolver
from router.api.ask.unenforced import left_free
from router.api.fields.fields import GenerationFields
from router.http.ignored import LOOSENED, LOST, MAX_PART_CHARS, NORMALIZED, PLACEHOLDERS, names_in_header
from router.text.chat.conversation import Conversation, JsonObject
from router.text.chat.normal_form import Form
from router.tools.calls.format_row import CallIds
from router.tools.schemas.choice import NO_TOOLS, ToolChoice
from shared.core.errors import InvalidRequest
from shared.observe.log_once import LogOnce

NUMBERS = re.compile(r"\[\d+\]")


@dataclass(frozen=True, slots=True)
class ChatTask:
    """`max_tokens_field`, `prompt_field`: the endpoint's field names."""

    conversation: Conversation
    choice: ToolChoice = NO_TOOLS
    allows_parallel: bool = True
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    prompt_field: str = "messages"
    num_logprobs: int = -1
    parts: Parts = field(default_factory=Parts)  # after it has read the conversation


def plan_of(task: ChatTask, fields: GenerationFields, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
    """Without a `max_tokens`, the smallest context of all nodes limits the answer.

    If the prompt fills this context, the largest context of all nodes is the limit."""
    resolver.check_shared(fields)
    conversation, wanted = task.conversation, task.max_tokens
    row = format_of(resolver.text, resolver.calls, task.choice, resolver.template)
    prompt = resolver.chat_prompt(conversation)
    continued = str(conversation.messages[-1].get("content")) if conversation.continue_final_message else ""
    if resolver.template is not None:
        form = described_form(resolver.text, resolver.template, task.choice, prompt.text, fields.request_id)
    else:
        form = form_of(resolver.text, row, task.choice, prompt.text, continued, fields.request_id)
    if row is not None and row.ids is CallIds.NAMED:
        form = replace(form, num_calls_before=num_calls(conversation.messages))
    grammar, free = grammar_or_free(task, fields, resolver, form)
    ids = resolver.truncated(prompt.ids, fields.truncate_prompt_tokens, max(1, wanted or 1), contexts.largest)
    resolver.check_length(ids, task.prompt_field, contexts.largest)
    size = resolver.size(ids)
    default = (contexts.common if contexts.common > size else contexts.largest) - size
    cap = resolver.cap(wanted, task.max_tokens_field, contexts.largest - size, default=default)
    headers = headers_of(task.parts.replaced, grammar.loosened) | form_headers(prompt.form)
    prompts, num_logprobs = [(ids, "")], task.num_logprobs
    return resolver.plan(
        fields, prompts, cap, num_logprobs, headers=headers, form=form, grammar=grammar.text, unenforced=free
    )


def grammar_or_free(
    task: ChatTask, fields: GenerationFields, resolver: Resolver, form: AnswerForm
) -> tuple[AnswerGrammar, tuple[str, ...]]:
    """Return the answer's grammar, and what `left_free` returns."""
    if resolver.no_grammar:
        return AnswerGrammar(""), left_free(fields, resolver.no_grammar, task.choice)
    grammar = grammar_of_answer(
        fields,
        resolver.text.tokenizer.facts,
        form,
        task.choice,
        allows_parallel=task.allows_parallel,
        opens_objects=resolver.opens_objects,
    )
    return grammar, ()


def num_calls(messages: Sequence[JsonObject]) -> int:
    calls = (message.get("tool_calls") for message in messages)
    return sum(len(of_message) for of_message in calls if isinstance(of_message, list))


def headers_of(replaced: Sequence[str], loosened: Sequence[str]) -> dict[bytes, bytes]:
    """Name what the model does not read, and what calls need not follow."""
    headers = {PLACEHOLDERS: names_in_header(replaced)} if replaced else {}
    return headers | ({LOOSENED: names_in_header(loosened, MAX_PART_CHARS)} if loosened else {})


def form_headers(form: Form) -> dict[bytes, bytes]:
    """Name the steps that rewrote the conversation, and the texts that the model does not read even so."""
    headers = {NORMALIZED: names_in_header(form.steps)} if form.steps else {}
    return headers | ({LOST: names_in_header(form.lost)} if form.lost else {})


def tell_form(once: LogOnce, headers: Mapping[bytes, bytes]) -> None:
    """Log what `form_headers` say. Places count without their numbers, so that there are few kinds of lines."""
    if NORMALIZED in headers:
        steps = headers[NORMALIZED].decode()
        once.info((NORMALIZED, steps), "a conversation was rewritten for the chat template", steps=steps)
    if LOST in headers:
        parts = ",".join(sorted({NUMBERS.sub("", place) for place in headers[LOST].decode().split(",")}))
        once.warning((LOST, parts), "the chat template drops texts of conversations", parts=parts)


@contextlib.contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in an InvalidRequest that the `with` block raises. `names`: our name -> the client's name."""
    try:
        yield
    except InvalidRequest as error:
        own = (error.param or "").partition(".")[0].partition("[")[0]
        if own not in names:
            raise
        error.param = names[own] + (error.param or "")[len(own) :]
        if error.message.startswith(own):
            error.message = names[own] + error.message[len(own) :]
        raise
