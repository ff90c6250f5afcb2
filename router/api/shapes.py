"""How /v1/chat/completions and /v1/completions write the same deltas. Knows nothing of how those came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType

from router.api.answers import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    Choice,
    CompletionChoice,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)
from router.api.choice_text import Delta
from router.api.generation_plan import ShowOptions
from router.text.interface import Tokenizer


class Shape(Protocol):
    id_prefix: str
    object: str
    chunk_object: str
    prompt_ids_on_top: bool  # whether prompt token ids stand beside the choices or inside them

    def opening(self, index: int, echo: str, prompt_ids: Sequence[int] | None) -> Choice | None:
        """A first chunk that brings no token."""
        ...

    def chunk(self, index: int, delta: Delta) -> Choice:
        """A part of a streamed choice."""
        ...

    def whole(self, index: int, delta: Delta, echo: str, prompt_ids: Sequence[int] | None) -> Choice:
        """A choice that is complete."""
        ...


class ChatShape:
    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    prompt_ids_on_top = True

    def __init__(self, tokenizer: Tokenizer, show: ShowOptions) -> None:
        self._tokenizer = tokenizer
        self._show = show

    def opening(self, index: int, echo: str, prompt_ids: Sequence[int] | None) -> Choice | None:
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

    def whole(self, index: int, delta: Delta, echo: str, prompt_ids: Sequence[int] | None) -> Choice:
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
                token=token_text(self._tokenizer, token),
                logprob=own.logprob,
                bytes=list(self._tokenizer.token_bytes(token)),
                top_logprobs=[self._top(*top) for top in zip(own.top_ids, own.top_logprobs, strict=True)],
            )
            for token, own in zip(delta.ids, delta.logprobs, strict=True)
        ]
        return ChatLogprobs(content=entries)

    def _top(self, token: int, logprob: float) -> TopLogprob:
        raw = self._tokenizer.token_bytes(token)
        return TopLogprob(token=token_text(self._tokenizer, token), logprob=logprob, bytes=list(raw))


class CompletionShape:
    id_prefix = "cmpl-"
    object = "text_completion"
    chunk_object = "text_completion"
    prompt_ids_on_top = False

    def __init__(self, tokenizer: Tokenizer, show: ShowOptions) -> None:
        self._tokenizer = tokenizer
        self._show = show

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
        return CompletionLogprobs(
            tokens=[token_text(self._tokenizer, token) for token in delta.ids],
            token_logprobs=[own.logprob for own in delta.logprobs],
            top_logprobs=[
                {token_text(self._tokenizer, i): value for i, value in zip(own.top_ids, own.top_logprobs, strict=True)}
                for own in delta.logprobs
            ],
            text_offset=delta.offsets,
        )


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """A token alone. One that is half a character is written as its bytes, as OpenAI does."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def shown_ids(delta: Delta, show: ShowOptions) -> list[int] | UnsetType:
    return delta.ids if show.return_token_ids else UNSET


def list_or_unset(ids: Sequence[int] | None) -> list[int] | UnsetType:
    return UNSET if ids is None else list(ids)
