"""The interfaces of tokenizers and chat templates."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.text.chat.control_tokens import ControlTokens
from router.text.chat.conversation import Conversation
from shared.core.errors import InvalidRequest


class RenderingFailed(InvalidRequest):
    """The template refuses these messages, or fails on them. It may take them in another form."""


new_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class VocabFacts:
    """`context_length`: the length for which the model is trained. Nodes may allow less."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]  # tokens that are not shown as text by default
    context_length: int
    start_ids: tuple[int, ...] = ()  # appended to the prompt: an encoder-decoder model's decoder begins with them
    drops_first_space: bool = False  # whether to drop the first token's leading space


class Tokenizer(Protocol):
    facts: VocabFacts

    def __hash__(self) -> int:
        """Tokenizers are told apart by identity."""
        ...

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Prepend the begin token if `add_special`. Chat templates write this token themselves."""
        ...

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Encode a rendered chat. Pieces with an odd index are plain text, even if they spell control tokens."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return any token's bytes. A character may span several tokens."""
        ...


class ChatTemplate(Protocol):
    @property
    def sources(self) -> Mapping[str, str]:
        """The templates by name."""
        ...

    def render(self, conversation: Conversation) -> str:
        """Render a normalized conversation. Raise RenderingFailed if the template refuses it."""
        ...


@dataclass(frozen=True, slots=True)
class TextModel:
    tokenizer: Tokenizer
    template: ChatTemplate
    control_tokens: ControlTokens | None = None  # tokens to hide in chats
    about: Mapping[str, object] = field(default_factory=dict)  # members of tokenizer_config.json, for /tokenizer_info


def special_spellings(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens' ids by their text."""
    return {tokenizer.token_bytes(i).decode(errors="replace"): i for i in sorted(tokenizer.facts.special_ids)}


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return a finished sequence's text, without special tokens and without an incomplete last character."""
    facts = tokenizer.facts
    data = b"".join(tokenizer.token_bytes(i) for i in ids if i not in facts.special_ids)
    text = new_decoder("replace").decode(data)
    return text.removeprefix(" ") if facts.drops_first_space else text
