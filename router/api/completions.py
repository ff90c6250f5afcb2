"""POST /v1/completions: its fields, what they come down to, and how its answer is written."""

from __future__ import annotations

from collections.abc import Sequence

from router.api.answers import Choice, CompletionChoice, CompletionLogprobs
from router.api.choice_text import Delta
from router.api.fields import GenerationFields, NotNegative, Positive, Refused, TopLogprobs, generation_table
from router.api.generation_plan import Contexts, GenerationPlan, ShowOptions
from router.api.resolve import Resolver
from router.api.shapes import TokenNames, list_or_unset, shown_ids
from router.text.interface import Tokenizer
from shared.core.errors import InvalidRequest

DEFAULT_TOKENS = 16  # OpenAI's default here; chat runs to the end of the context


class CompletionRequest(GenerationFields, frozen=True, kw_only=True):
    prompt: str | list[str | NotNegative | list[NotNegative]]
    echo: bool | None = None
    logprobs: TopLogprobs | None = None
    best_of: Positive | None = None
    add_special_tokens: bool | None = None


COMPLETIONS = generation_table(
    "/v1/completions",
    CompletionRequest,
    about={
        "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
        "echo": "the answer begins with the prompt",
        "logprobs": "the log-probability of every token, and of so many likeliest ones",
        "best_of": "only as many as n",
        "add_special_tokens": "false: no begin token before a prompt that is text",
    },
    ignored={},
    refused={"suffix": Refused("the served models can't fill in the middle")},
)


class Completions:
    """See `router.api.generation_api.GenerationApi`."""

    table = COMPLETIONS

    def plan(self, body: CompletionRequest, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        if body.echo and body.logprobs is not None:
            raise InvalidRequest("echo together with logprobs is not supported", param="echo")
        if body.best_of is not None and body.best_of != (body.n or 1):
            raise InvalidRequest("best_of is supported only when it equals n", param="best_of")
        resolver.check_shared(body)
        wanted, largest = body.max_tokens, contexts.largest
        prompts = []
        for ids, text in resolver.prompts(body.prompt, add_special=body.add_special_tokens is not False):
            kept = resolver.truncated(ids, body.truncate_prompt_tokens, wanted or DEFAULT_TOKENS, largest)
            resolver.check_length(kept, "prompt", largest)
            prompts.append((kept, resolver.echo(kept, text, is_whole=kept == ids) if body.echo else ""))
        room = largest - max(resolver.size(ids) for ids, _ in prompts)
        max_tokens = resolver.max_tokens(wanted, "max_tokens", room, default=DEFAULT_TOKENS)
        return resolver.plan(body, prompts, max_tokens, -1 if body.logprobs is None else body.logprobs)

    def shape(self, tokenizer: Tokenizer, show: ShowOptions) -> CompletionShape:
        return CompletionShape(tokenizer, show)


class CompletionShape:
    """See `router.api.shapes.Shape`."""

    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    prompt_ids_on_top = False

    def __init__(self, tokenizer: Tokenizer, show: ShowOptions) -> None:
        self._show = show
        self._names = TokenNames(tokenizer, show)

    def opening(self, index: int, echo: str, prompt_ids: Sequence[int] | None) -> Choice | None:
        if not echo and prompt_ids is None:
            return None
        return CompletionChoice(index=index, text=echo, prompt_token_ids=list_or_unset(prompt_ids))

    def chunk(self, index: int, delta: Delta) -> Choice:
        return self.whole(index, delta, "", None)

    def whole(self, index: int, delta: Delta, echo: str, prompt_ids: Sequence[int] | None) -> Choice:
        return CompletionChoice(
            index=index,
            text=echo + delta.text,
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            token_ids=shown_ids(delta, self._show),
            prompt_token_ids=list_or_unset(prompt_ids),
        )

    def _logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if self._show.num_logprobs < 0 or not delta.logprobs:
            return None
        name = self._names.of
        return CompletionLogprobs(
            tokens=[name(token) for token in delta.ids],
            token_logprobs=[own.logprob for own in delta.logprobs],
            top_logprobs=[
                {name(i): value for i, value in zip(own.top_ids, own.top_logprobs, strict=True)}
                for own in delta.logprobs
            ],
            text_offset=delta.offsets,
        )
