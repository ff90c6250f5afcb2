"""Tokenize a rendered chat so that control tokens act only in the template's text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Sequence

import tokenizers

from router.text.chat.any_word import any_word

NONCE_BYTES = 16


class GuardedEncoder:
    """Encodes with a twin of the tokenizer. The twin has secret names for control tokens.

    The template's control tokens are renamed, then one call encodes all text. To the twin, a client's control token is
    plain text. If the twin finds control tokens in other places than the tokenizer, each piece is encoded alone.
    """

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        added = dict(sorted(inner.get_added_tokens_decoder().items()))
        nonce = secrets.token_hex(NONCE_BYTES)
        self._inner = inner
        self._names = {token.content: f"<{nonce}.{i}>" for i, token in added.items() if token.special}
        self._spellings = {i: token.content for i, token in added.items() if token.special}
        self._twin = _twin(inner, [self._renamed(token) for token in added.values()])
        self._own_ids = {
            self._twin.token_to_id(self._names.get(token.content, token.content)): i for i, token in added.items()
        }
        self._found_in_text = self._spellings.keys() - self._own_ids.keys()
        self._spelled = any_word({token.content: _end(token) for token in added.values()})
        normalized = [token.content for token in added.values() if token.special and token.normalized]
        self.has_twin = all(map(self._agrees, normalized))
        # Other spellings of control tokens were not hidden, and normalizing may turn them into control tokens.
        self.always_needed = self.has_twin and inner.normalizer is not None and bool(normalized)

    def encode(self, pieces: Sequence[str]) -> list[int]:
        """Return token ids. Pieces at odd indexes are client text."""
        return self._in_one_go(pieces) if self.has_twin else self._one_by_one(pieces)

    def _in_one_go(self, pieces: Sequence[str]) -> list[int]:
        text = "".join(piece if i % 2 else self._spelled.sub(self._name, piece) for i, piece in enumerate(pieces))
        found = encoded(self._twin, text)
        ids: list[int] = found.ids
        if self._found_in_text.isdisjoint(ids):
            return [self._own_ids.get(i, i) for i in ids]
        return self._without_found(text, found)

    def _without_found(self, text: str, found: tokenizers.Encoding) -> list[int]:
        """Return the ids of plain text. Where a Unigram model found a control token, encode the token's characters one
        by one. Keep the unknown token where it stands for unknown characters."""
        ids: list[int] = []
        for i, (start, end) in zip(found.ids, found.offsets, strict=True):
            if i in self._found_in_text and self._spellings[i] in text[start:end]:
                ids += self._spelled_out(self._spellings[i])
            else:
                ids.append(self._own_ids.get(i, i))
        return ids

    def _one_by_one(self, pieces: Sequence[str]) -> list[int]:
        ids: list[int] = []
        for i, piece in enumerate(pieces):
            ids += self._spelled_out(piece) if i % 2 else encoded(self._inner, piece).ids
        return ids

    def _spelled_out(self, text: str) -> list[int]:
        return [token.id for char in text for token in self._inner.model.tokenize(char)]

    def _agrees(self, spelling: str) -> bool:
        """Return whether both tokenizers find the token in the same places, at a text's start and inside a text."""
        texts = (f"{spelling}a", f"a{spelling}a")
        return all(self._in_one_go([text]) == encoded(self._inner, text).ids for text in texts)

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


def encoded(inner: tokenizers.Tokenizer, text: str, *, add_special: bool = False) -> tokenizers.Encoding:
    """Encode as a batch to release the GIL, because long texts take seconds."""
    return inner.encode_batch([text], add_special_tokens=add_special)[0]


def _end(token: tokenizers.AddedToken) -> str:
    """Return the pattern that must match after the token."""
    return rf"(?!\w)(?<!\w{re.escape(token.content)})" if token.single_word else ""


def _twin(inner: tokenizers.Tokenizer, added: Sequence[tokenizers.AddedToken]) -> tokenizers.Tokenizer:
    twin = tokenizers.Tokenizer(inner.model)
    if inner.normalizer is not None:
        twin.normalizer = inner.normalizer
    if inner.pre_tokenizer is not None:
        twin.pre_tokenizer = inner.pre_tokenizer
    twin.add_tokens(list(added))
    return twin
