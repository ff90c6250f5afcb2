"""The keys of tokens, bit by bit, as routers and nodes make them."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from shared.core.page_identity import MAX_ADAPTERS, MAX_VOCAB, SALTED, prefix_keys

TOKENS = st.lists(st.integers(0, MAX_VOCAB - 1), max_size=40)


def key_by_hand(token: int, after: int | None, slot: int, salt: int) -> int:
    key = slot << 32 | token if after is None else token << 32 | slot << 24 | after
    return key ^ (salt | SALTED) if salt else key


@given(TOKENS, st.integers(0, MAX_ADAPTERS), st.integers(0, 2**64 - 1))
def test_a_key_says_token_and_adapter(tokens: list[int], slot: int, salt: int) -> None:
    by_hand = [key_by_hand(token, None, slot, 0 if index else salt) for index, token in enumerate(tokens)]
    assert list(array("Q", prefix_keys(array("q", tokens).tobytes(), slot, 0, salt))) == by_hand


@given(TOKENS, st.integers(0, MAX_ADAPTERS), st.integers(0, 2**64 - 1))
def test_a_key_with_lookahead_says_the_next_token(tokens: list[int], slot: int, salt: int) -> None:
    pairs = zip(tokens, tokens[1:], strict=False)
    by_hand = [key_by_hand(token, after, slot, 0 if i else salt) for i, (token, after) in enumerate(pairs)]
    assert list(array("Q", prefix_keys(array("q", tokens).tobytes(), slot, 1, salt))) == by_hand
