"""Define AnswerShape, which writes a choice of a completion or chat as JSON, and code that all shapes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, UnsetType

from router.api.answer.answers import Choice, PromptLogprobs
from router.api.answer.choice_text import Delta
from router.api.answer.generation_plan import ShowOptions
from router.text.chat.interface import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptShown:
    """`echoed`: the tokens of `echo`; the first one has no logprob."""

    echo: str = ""
    echoed: Delta | None = None
    ids: Sequence[int] | None = None
    logprobs: PromptLogprobs | UnsetType = UNSET


NO_PROMPT = PromptShown()


class AnswerShape(Protocol):
    id_prefix: str
    object: str
    chunk_object: str
    prompt_on_top: bool  # whether prompt ids and logprobs are outside the choices

    def opening(self, index: int, prompt: PromptShown) -> Choice | None:
        """The first chunk has no tokens of the answer."""
        ...

    def chunk(self, index: int, delta: Delta) -> Choice: ...

    def whole(self, index: int, delta: Delta, prompt: PromptShown) -> Choice: ...


class TokenNames:
    def __init__(self, tokenizer: Tokenizer, show: ShowOptions) -> None:
        self._tokenizer = tokenizer
        self._by_id = show.names_tokens_by_id

    def of(self, token: int) -> str:
        return f"token_id:{token}" if self._by_id else token_text(self._tokenizer, token)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text, or OpenAI's form of bytes that are not whole characters."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def shown_ids(delta: Delta, show: ShowOptions) -> list[int] | UnsetType:
    return delta.ids if show.return_token_ids else UNSET


def list_or_unset(ids: Sequence[int] | None) -> list[int] | UnsetType:
    return UNSET if ids is None else list(ids)
