"""Turns a growing sequence of tokens into text without ever showing half a character. Knows nothing of stops."""

from __future__ import annotations

import codecs

from router.text.interface import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """One per sequence. Every token is a fixed string of bytes, so text is a plain incremental UTF-8 decoding.

    The pieces of `feed` and the one of `flush` joined are exactly the decoding of all bytes at once: a tail that may
    still become a character is held back, and turns into U+FFFD only in `flush`.
    """

    __slots__ = ("_decoder", "_drops_space", "_special", "_token_bytes")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = _new_decoder("replace")
        self._special = tokenizer.facts.special_ids
        self._drops_space = tokenizer.facts.drops_first_space  # until the first token that shows
        self._token_bytes = tokenizer.token_bytes

    def feed(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        shown = self._token_bytes(token_id)
        if self._drops_space and shown:
            self._drops_space = False
            shown = shown.removeprefix(b" ")
        return self._decoder.decode(shown)

    def flush(self) -> str:
        """The end of the sequence: what is still held back can't become a character any more."""
        return self._decoder.decode(b"", True)
