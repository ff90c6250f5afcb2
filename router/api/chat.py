"""POST /v1/chat/completions: its fields, what they come down to, and how its answer is written."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from router.api.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    Choice,
    TokenLogprob,
    TopLogprob,
)
from router.api.chat_messages import ABOUT_TEMPLATE, ChatMessage, conversation_of
from router.api.choice_text import Delta
from router.api.fields import (
    NOT_YET,
    NOTHING,
    GenerationFields,
    Positive,
    Refused,
    ShortText,
    TopLogprobs,
    generation_table,
)
from router.api.generation_plan import Contexts, GenerationPlan, ShowOptions
from router.api.resolve import Resolver
from router.api.shapes import PromptShown, TokenNames, shown_ids
from router.text.conversation import Scalar
from router.text.interface import Tokenizer
from shared.core.errors import InvalidRequest


class ChatRequest(GenerationFields, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None
    documents: list[dict[str, Any]] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: ShortText | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


CHAT = generation_table(
    "/v1/chat/completions",
    ChatRequest,
    about={
        "messages": "the conversation; text only. Histories of agents are taken as they are",
        "max_completion_tokens": "longest answer; the new name of max_tokens",
        "logprobs": "the log-probability of every token",
        "top_logprobs": "and of so many likeliest ones",
    }
    | ABOUT_TEMPLATE,
    ignored={
        "parallel_tool_calls": "no tools are called",
        "prediction": "it could only make the answer faster",
        "verbosity": "models served here don't know it",
    },
    refused={
        "tools": Refused(NOT_YET),
        "tool_choice": Refused(NOT_YET, (*NOTHING, "none", "auto")),
        "functions": Refused(NOT_YET),
        "function_call": Refused(NOT_YET, (*NOTHING, "none")),
        "modalities": Refused("this model writes text only", (*NOTHING, ["text"])),
        "audio": Refused("this model writes text only"),
        "moderation": Refused(NOT_YET),
        "web_search_options": Refused("this server never asks others"),
        "chat_template": Refused("templates are taken from the model only"),
        "add_special_tokens": Refused("a template writes its own begin token"),
        "echo": Refused("ask /v1/completions"),
        "best_of": Refused("ask for n", (None, 1)),
    },
)


class Chat:
    """See `router.api.generation_api.GenerationApi`."""

    table = CHAT

    def plan(self, body: ChatRequest, resolver: Resolver, contexts: Contexts) -> GenerationPlan:
        """An answer of no given length keeps to what any node can run; a longer prompt may use all there is."""
        if body.max_tokens and body.max_completion_tokens and body.max_tokens != body.max_completion_tokens:
            raise InvalidRequest("max_tokens and max_completion_tokens differ", param="max_completion_tokens")
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
        resolver.check_shared(body)
        wanted = body.max_completion_tokens or body.max_tokens
        field = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
        ids = resolver.chat_ids(conversation_of(body.messages, body))
        ids = resolver.truncated(ids, body.truncate_prompt_tokens, wanted or 1, contexts.largest)
        resolver.check_length(ids, "messages", contexts.largest)
        size = resolver.size(ids)
        default = (contexts.common if contexts.common > size else contexts.largest) - size
        max_tokens = resolver.max_tokens(wanted, field, contexts.largest - size, default=default)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else -1
        return resolver.plan(body, [(ids, "")], max_tokens, num_logprobs)

    def shape(self, tokenizer: Tokenizer, show: ShowOptions) -> ChatShape:
        return ChatShape(tokenizer, show)


class ChatShape:
    """See `router.api.shapes.Shape`."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_on_top = True

    def __init__(self, tokenizer: Tokenizer, show: ShowOptions) -> None:
        self._tokenizer = tokenizer
        self._show = show
        self._names = TokenNames(tokenizer, show)

    def opening(self, index: int, prompt: PromptShown) -> Choice | None:
        return ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))

    def chunk(self, index: int, delta: Delta) -> Choice:
        is_bare_end = delta.finish_reason is not None and not delta.text
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta() if is_bare_end else ChatDelta(content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            token_ids=shown_ids(delta, self._show),
        )

    def whole(self, index: int, delta: Delta, prompt: PromptShown) -> Choice:
        return ChatChoice(
            index=index,
            message=AssistantMessage(content=delta.text),
            logprobs=self._logprobs(delta),
            finish_reason=delta.finish_reason,
            token_ids=shown_ids(delta, self._show),
        )

    def _logprobs(self, delta: Delta) -> ChatLogprobs | None:
        if self._show.num_logprobs < 0 or not delta.logprobs:
            return None
        entries = [
            TokenLogprob(
                token=self._names.of(token),
                logprob=own.logprob,
                bytes=list(self._tokenizer.token_bytes(token)),
                top_logprobs=[self._top(*top) for top in zip(own.top_ids, own.top_logprobs, strict=True)],
            )
            for token, own in zip(delta.ids, delta.logprobs, strict=True)
        ]
        return ChatLogprobs(content=entries)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TopLogprob(token=self._names.of(token), logprob=logprob, bytes=list(raw))
