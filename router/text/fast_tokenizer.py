"""A tokenizer of the `tokenizers` library with our interface."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers

from router.text.chat.interface import VocabFacts
from router.text.guarded_encoder import GuardedEncoder, encoded


class FastTokenizer:
    """Decodes with a table of bytes, which is exact and needs one list access per token."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        tokens: Sequence[bytes],
        facts: VocabFacts,
        bos_id: int | None,
        eos_id: int | None = None,
    ) -> None:
        """`tokens`: the bytes of each id. `bos_id` begins and `eos_id` ends a text that is encoded with `add_special`;
        None: neither."""
        self.facts = facts
        self._inner = inner
        self._bos_id, self._eos_id = bos_id, eos_id
        self._bytes = tokens
        self._guarded = GuardedEncoder(inner)

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        ids: list[int] = encoded(self._inner, text, add_special=add_special).ids
        if add_special and self._bos_id is not None and (not ids or ids[0] != self._bos_id):
            ids.insert(0, self._bos_id)
        if add_special and self._eos_id is not None:
            ids.append(self._eos_id)
        return ids

    def encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        if len(pieces) == 1 and not self._guarded.always_needed:
            return self.encode(pieces[0], add_special=False)
        return self._guarded.encode(pieces)

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id]
