"""What a request says of single tokens, in a vocabulary that is larger than HashLM's."""

from __future__ import annotations

import pytest

from router.api.ask.token_rules import allowed_ids_of, bad_words_of
from shared.core.errors import InvalidRequest
from shared.core.sampling_params import MAX_ALLOWED_TOKEN_IDS

VOCAB = 50_000


def words(text: str) -> list[int]:
    """A tokenizer that has a token for each word with the space before it, as byte-level BPE has."""
    known = {"cat": [7], " cat": [8], "catalogue": [7, 9], " catalogue": [10]}
    return known[text]


def test_as_many_allowed_ids_as_a_message_holds() -> None:
    assert len(allowed_ids_of(list(range(MAX_ALLOWED_TOKEN_IDS)), VOCAB)) == MAX_ALLOWED_TOKEN_IDS
    with pytest.raises(InvalidRequest, match="more than 1024"):
        allowed_ids_of(list(range(MAX_ALLOWED_TOKEN_IDS + 1)), VOCAB)


def test_a_bad_word_is_barred_with_and_without_a_leading_space() -> None:
    assert bad_words_of(["cat", " catalogue"], words) == ((7,), (8,), (7, 9), (10,))
