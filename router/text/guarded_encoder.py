"""Tokenizes text of two kinds in one go: control tokens count in the template's, and are plain text in a client's."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

import tokenizers

NONCE_BYTES = 16


class GuardedEncoder:
    """A twin of a tokenizer that shares its vocabulary and knows control tokens only under names nobody can guess.

    The template's own control tokens get these names first; then one call encodes all of the text. So the twin cuts,
    normalizes and merges as the tokenizer does, and a control token that a client wrote is merged with its neighbours.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        added = dict(sorted(inner.get_added_tokens_decoder().items()))
        nonce = secrets.token_hex(NONCE_BYTES)
        self._model = inner.model
        self._names = {token.content: f"<{nonce}.{i}>" for i, token in added.items() if token.special}
        self._control = {i: token.content for i, token in added.items() if token.special}
        self._twin = _twin(inner, [self._renamed(token) for token in added.values()])
        self._own_ids = {
            self._twin.token_to_id(self._names.get(token.content, token.content)): i for i, token in added.items()
        }
        spellings = sorted((token.content for token in added.values()), key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, spellings)) or "(?!)")

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Each odd piece is a client's text, as `control_tokens` cuts it."""
        text = "".join(piece if i % 2 else self._spelled.sub(self._name, piece) for i, piece in enumerate(pieces))
        ids: list[int] = []
        for i in self._twin.encode(text, add_special_tokens=False).ids:
            if i in self._own_ids:
                ids.append(self._own_ids[i])
            elif i in self._control:
                ids += self._spelled_out(self._control[i])
            else:
                ids.append(i)
        return ids

    def _name(self, match: re.Match[str]) -> str:
        return self._names.get(match[0], match[0])

    def _renamed(self, token: tokenizers.AddedToken) -> tokenizers.AddedToken:
        return tokenizers.AddedToken(
            self._names.get(token.content, token.content),
            single_word=token.single_word,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            normalized=token.normalized,
            special=token.special,
        )

    def _spelled_out(self, spelling: str) -> list[int]:
        """A model that has a control token among its pieces, as Unigram may, finds it in plain text."""
        return [token.id for char in spelling for token in self._model.tokenize(char)]


def _twin(inner: tokenizers.Tokenizer, added: Sequence[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    twin = tokenizers.Tokenizer(inner.model)
    if inner.normalizer is not None:
        twin.normalizer = inner.normalizer
    if inner.pre_tokenizer is not None:
        twin.pre_tokenizer = inner.pre_tokenizer
    twin.add_tokens(list(added))
    return twin
