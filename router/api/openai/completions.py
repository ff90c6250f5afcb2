"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

from router.api.answer.answers import Choice, CompletionChoice, CompletionLogprobs
from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import Contexts, GenerationPlan, ShowOptions
from router.api.answer.shapes import NO_PROMPT, PromptShown, TokenNames, list_or_unset, shown_ids
from router.api.answer.writer import AnswerFacts, Writer
from router.api.ask.resolve import Resolver
from router.api.fields.fields import (
    GenerationFields,
    NotNegative,
    Positive,
    RefusedField,
    TopLogprobs,
    generation_table,
)
from router.api.openai.choices_writer import ChoicesWriter
from router.text.chat.interface import Tokenizer
from shared.core.errors import InvalidRequest

DEFAULT_TOKENS = 16  # OpenAI's default for completions only


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    prompt: str | list[str | NotNegative | list[NotNegative]]
    echo: bool | None = None
    logprobs: TopLogprobs | bool | None = None
    best_of: Positive | None = None
    add_special_tokens: bool | None = None


COMPLETIONS = generation_table(
    "/v1/completions",
    CompletionRequest,
    about={
        "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
        "echo": "the answer begins with the prompt; with logprobs, the prompt's tokens have theirs",
        "max_tokens": "longest answer; default: 16; 0: only what other fields ask about the prompt; -1: no limit",
        "logprobs": "the log-probability of every token, and of this many of the likeliest ones",
        "best_of": "must equal n",
        "add_special_tokens": "false: no begin token before a prompt that is text",
    },
    ignored={},
    refused={"suffix": RefusedField("the served models can't fill in the middle")},
)


class Completions:
    """See `router.api.ask.generation_api.GenerationApi`."""

    table = COMPLETIONS

    def plan(self, body: CompletionRequest, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InvalidRequest("best_of is supported only when it equals n", param="best_of")
        num_logprobs = num_logprobs_of(body)
        resolver.check_shared(body)
        wanted, largest = body.max_tokens, contexts.largest
        num_answer = DEFAULT_TOKENS if wanted is None else max(1, wanted)
        is_scored = body.echo and num_logprobs >= 0  # text_offset counts characters of decoded ids
        prompts = []
        for ids, text in resolver.prompts(body.prompt, add_special=body.add_special_tokens is not False):
            kept = resolver.truncated(ids, body.truncate_prompt_tokens, num_answer, largest)
            resolver.check_length(kept, "prompt", largest)
            echo = resolver.echo(kept, text, is_whole=kept == ids and not is_scored) if body.echo else ""
            prompts.append((kept, echo))
        room = largest - max(resolver.size(ids) for ids, _ in prompts)
        cap = resolver.cap(wanted, "max_tokens", room, default=DEFAULT_TOKENS if wanted is None else room)
        grammar, free = resolver.form(body)
        scored = bool(body.echo)
        return resolver.plan(body, prompts, cap, num_logprobs, echoes_logprobs=scored, grammar=grammar, unenforced=free)

    def skipped(self, body: CompletionRequest) -> Sequence[str]:
        return ()

    def writer(self, body: CompletionRequest, facts: AnswerFacts) -> Writer:
        return ChoicesWriter(CompletionShape(facts.tokenizer, facts.plan.show), facts)


def num_logprobs_of(body: CompletionRequest) -> int:
    """Return -1 for none. Some clients send the chats' `false`."""
    if body.logprobs is True:
        raise InvalidRequest("logprobs is the number of likeliest tokens here, not true", param="logprobs")
    return -1 if body.logprobs is None or body.logprobs is False else body.logprobs


class CompletionShape:
    """See `router.api.answer.shapes.AnswerShape`."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    prompt_on_top = False

    def __init__(self, tokenizer: Tokenizer, show: ShowOptions) -> None:
        self._show = show
        self._names = TokenNames(tokenizer, show)

    def opening(self, index: int, prompt: PromptShown) -> Choice | None:
        return None if prompt == NO_PROMPT else self.whole(index, Delta(), prompt)

    def chunk(self, index: int, delta: Delta) -> Choice:
        return self.whole(index, delta, NO_PROMPT)

    def whole(self, index: int, delta: Delta, prompt: PromptShown) -> Choice:
        return CompletionChoice(
            index=index,
            text=prompt.echo + delta.text,
            logprobs=self._logprobs(delta, prompt.echoed),
            finish_reason=delta.finish_reason,
            token_ids=shown_ids(delta, self._show),
            prompt_token_ids=list_or_unset(prompt.ids),
            prompt_logprobs=prompt.logprobs,
            certificate=delta.certificate,
        )

    def _logprobs(self, delta: Delta, echoed: Delta | None) -> CompletionLogprobs | None:
        if self._show.num_logprobs < 0 or not (delta.logprobs or echoed):
            return None
        name, first = self._names.of, echoed or Delta()
        unknown = [None] * (len(first.ids) - len(first.logprobs))  # the prompt's first token has no logprob
        logprobs = [*first.logprobs, *delta.logprobs]
        return CompletionLogprobs(
            tokens=[name(token) for token in (*first.ids, *delta.ids)],
            token_logprobs=[*unknown, *(own.logprob for own in logprobs)],
            top_logprobs=[
                *unknown,
                *({name(i): value for i, value in zip(own.top_ids, own.top_logprobs, strict=True)} for own in logprobs),
            ],
            text_offset=[*first.offsets, *delta.offsets],
        )
