"""Text for the scripted model: its tokens are one to six bytes of UTF-8."""

from __future__ import annotations

from collections.abc import Sequence

from router.text.chat.interface import TextModel, VocabFacts
from router.text.hashlm import PlainTemplate
from shared.config.models.pieces import Pieces, make_pieces

CONTEXT_LENGTH = 65536


class PieceTokenizer:
    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        vocabulary = pieces.vocabulary
        self.facts = VocabFacts(
            vocab_size=len(vocabulary.tokens),
            eos_ids=vocabulary.eos_ids,
            special_ids=vocabulary.special_ids,
            context_length=CONTEXT_LENGTH,
        )

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return self._pieces.encode(text.encode(errors="replace"))

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        return self.encode("".join(pieces), add_special=False)

    def token_bytes(self, token_id: int) -> bytes:
        return self._pieces.vocabulary.tokens[token_id]


def scripted_text_model() -> TextModel:
    return TextModel(tokenizer=PieceTokenizer(make_pieces()), template=PlainTemplate())
