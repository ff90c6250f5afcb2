"""What the router asks of a tokenizer. Knows nothing of requests."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.text.control_tokens import ControlTokens
from router.text.conversation import Conversation

new_decoder = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class VocabFacts:
    """Fixed facts of one vocabulary. `context_length` is what the model was trained for; nodes may allow less."""

    vocab_size: int
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]  # never shown as text
    context_length: int
    start_ids: tuple[int, ...] = ()  # of a model with an encoder: they begin its decoder's text, behind every prompt
    drops_first_space: bool = False  # the first token's leading space is the tokenizer's, not the text's


class Tokenizer(Protocol):
    facts: VocabFacts

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """add_special: put the model's begin token in front where it wants one (chat templates write their own)."""
        ...

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Encode a rendered chat, whose odd pieces are plain text even where they spell a control token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for, special tokens included; a character may be split over tokens."""
        ...


class ChatTemplate(Protocol):
    @property
    def sources(self) -> Mapping[str, str]:
        """The texts of the template by name; {} where there is none."""
        ...

    def render(self, conversation: Conversation) -> str:
        """Return the prompt's text of a normalized conversation. Raises InvalidRequest for what it does not take."""
        ...


@dataclass(frozen=True, slots=True)
class TextModel:
    """Everything the router knows of a model."""

    tokenizer: Tokenizer
    template: ChatTemplate
    control_tokens: ControlTokens | None = None  # those that are text in a chat; None: they act as such there, too
    about: Mapping[str, object] = field(default_factory=dict)  # what /tokenizer_info tells, as tokenizer_config.json


def decode_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Return all of a finished sequence as text. Bytes that are no UTF-8 become U+FFFD; a character that is cut at the
    end is left out, as in a stream. Special tokens show nothing."""
    facts = tokenizer.facts
    data = b"".join(tokenizer.token_bytes(i) for i in ids if i not in facts.special_ids)
    text = new_decoder("replace").decode(data)
    return text.removeprefix(" ") if facts.drops_first_space else text
