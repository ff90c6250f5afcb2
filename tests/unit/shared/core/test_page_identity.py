"""The keys of tokens, bit by bit, as routers and nodes make them."""

from __future__ import annotations

import hashlib
from array import array

from hypothesis import given
from hypothesis import strategies as st

from shared.core.page_identity import SALTED, identities, prefix_keys

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)
DIGESTS = st.sampled_from(["", "one", "two"])
SALTS = st.integers(0, 2**64 - 1)


def by_hand(keys: list[int], adapter: str, salt: int) -> list[int]:
    mask = hashlib.blake2b(adapter.encode(), digest_size=16).digest() if adapter else bytes(16)
    if adapter or salt:
        changes = (int.from_bytes(mask[8:]) ^ salt | SALTED, int.from_bytes(mask[:8]))
        keys[:2] = [key ^ change for key, change in zip(keys, changes, strict=False)]
    return keys


@given(TOKENS, DIGESTS, SALTS)
def test_a_key_says_token_and_adapter_and_the_next_token(tokens: list[int], adapter: str, salt: int) -> None:
    pairs = [token << 32 | after for token, after in zip(tokens, tokens[1:], strict=False)]
    for lookahead, keys in ((0, list(tokens)), (1, pairs)):
        made = prefix_keys(array("q", tokens).tobytes(), adapter, lookahead, salt)
        assert list(array("Q", made)) == by_hand(keys, adapter, salt)


@given(st.lists(st.integers(0, 94), min_size=32, max_size=32), st.integers(1, 2**63 - 1))
def test_no_salt_makes_an_adapter_s_pages_another_s(tokens: list[int], salt: int) -> None:
    """Not even a salt that undoes the first key's change."""
    ids = array("q", tokens).tobytes()
    theirs = prefix_keys(ids, "two", 0, 0)
    undone = int.from_bytes(prefix_keys(ids, "one", 0, 0)[:8], "little") ^ int.from_bytes(theirs[:8], "little")
    for chosen in (salt, undone):
        assert not set(identities(prefix_keys(ids, "one", 0, chosen), 16)) & set(identities(theirs, 16))
