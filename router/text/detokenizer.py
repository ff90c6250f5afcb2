"""Turn a growing sequence of tokens into text without partial characters."""

from __future__ import annotations

from router.text.chat.interface import Tokenizer, new_decoder


class Detokenizer:
    """One per sequence. Tokens are fixed byte strings, so this is incremental UTF-8 decoding.

    An incomplete character is held back, and dropped at the end. Invalid bytes become U+FFFD.
    """

    __slots__ = ("_decoder", "_drops_space", "_special", "_token_bytes")

    def __init__(
        self, tokenizer: Tokenizer, *, shows_special: bool = False, shown_ids: frozenset[int] = frozenset()
    ) -> None:
        """`shown_ids`: special tokens that are always shown."""
        self._decoder = new_decoder("replace")
        self._special = frozenset() if shows_special else tokenizer.facts.special_ids - shown_ids
        self._drops_space = tokenizer.facts.drops_first_space
        self._token_bytes = tokenizer.token_bytes

    def feed(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        shown = self._token_bytes(token_id)
        if self._drops_space and shown:
            self._drops_space = False
            shown = shown.removeprefix(b" ")
        return self._decoder.decode(shown)
