"""The common form of chat requests at all endpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from router.api.answer_form import form_of, format_of, grammar_of_answer
from router.api.fields import GenerationFields
from router.api.generation_plan import Contexts, GenerationPlan
from router.api.resolve import Resolver
from router.text.conversation import Conversation
from router.tools.choice import NO_TOOLS, ToolChoice
from shared.core.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ChatTask:
    """`max_tokens_field`, `prompt_field`: the endpoint's field names.

    `is_bound`: whether a `max_tokens` that does not fit after the prompt is lowered, not refused.
    """

    conversation: Conversation
    choice: ToolChoice = NO_TOOLS
    allows_parallel: bool = True
    max_tokens: int | None = None
    max_tokens_field: str = "max_tokens"
    is_bound: bool = False
    prompt_field: str = "messages"
    num_logprobs: int = -1


def plan_of(task: ChatTask, fields: GenerationFields, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
    """Without a `max_tokens`, the smallest context of all nodes limits the answer.

    If the prompt fills this context, the largest context of all nodes is the limit."""
    resolver.check_shared(fields)
    conversation, wanted = task.conversation, task.max_tokens
    row = format_of(resolver.text, resolver.tool_format, task.choice)
    ids, prompt = resolver.chat_prompt(conversation)
    continued = str(conversation.messages[-1].get("content")) if conversation.continue_final_message else ""
    form = form_of(resolver.text, row, task.choice, prompt, continued, fields.request_id)
    facts = resolver.text.tokenizer.facts
    grammar = grammar_of_answer(
        fields,
        facts,
        form,
        task.choice,
        allows_parallel=task.allows_parallel,
        opens_objects=resolver.opens_objects,
    )
    ids = resolver.truncated(ids, fields.truncate_prompt_tokens, wanted or 1, contexts.largest)
    resolver.check_length(ids, task.prompt_field, contexts.largest)
    size = resolver.size(ids)
    default = (contexts.common if contexts.common > size else contexts.largest) - size
    room = contexts.largest - size
    if wanted is not None and task.is_bound:
        wanted = min(wanted, room)
    max_tokens = resolver.max_tokens(wanted, task.max_tokens_field, room, default=default)
    plan = resolver.plan(fields, [(ids, "")], max_tokens, task.num_logprobs, form=form, grammar=grammar.text)
    return replace(plan, loosened=grammar.loosened)


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
