"""What endpoints share that write the same deltas as JSON. Knows nothing of how those came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec import UNSET, UnsetType

from router.api.answers import Choice, PromptLogprobs
from router.api.choice_text import Delta
from router.api.generation_plan import ShowOptions
from router.text.interface import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptShown:
    """What a choice shows of its prompt, as far as it was asked for. `echoed`: the tokens of `echo` with their
    logprobs, of which the first token has none."""

    echo: str = ""
    echoed: Delta | None = None
    ids: Sequence[int] | None = None
    logprobs: PromptLogprobs | UnsetType = UNSET


NO_PROMPT = PromptShown()


class Shape(Protocol):
    id_prefix: str
    object: str
    chunk_object: str
    prompt_on_top: bool  # whether a prompt's ids and logprobs stand beside the choices or inside them

    def opening(self, index: int, prompt: PromptShown) -> Choice | None:
        """A first chunk that brings no token of the answer."""
        ...

    def chunk(self, index: int, delta: Delta) -> Choice:
        """A part of a streamed choice."""
        ...

    def whole(self, index: int, delta: Delta, prompt: PromptShown) -> Choice:
        """A choice that is complete."""
        ...


class TokenNames:
    """How tokens are written in logprobs."""

    def __init__(self, tokenizer: Tokenizer, show: ShowOptions) -> None:
        self._tokenizer = tokenizer
        self._by_id = show.names_tokens_by_id

    def of(self, token: int) -> str:
        return f"token_id:{token}" if self._by_id else token_text(self._tokenizer, token)


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
