"""The ranges of all wire fields. msgspec checks these ranges in decoding, but not in construction."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.core.page_identity import IDENTITY_BYTES
from shared.core.sampling_params import MAX_BAD_WORD_TOKENS

MAX_SEQUENCES = 128

MAX_NAME, MAX_TEXT = 256, 16384
MAX_TOKENS = 1 << 20  # limit on one sequence's tokens, and therefore on its pages
MAX_PULL_TOKENS = 1 << 17  # limit on the tokens of a pulled prefix
MAX_RUNS = 1 << 14  # limit on a node's rows in a message, and on a row's tokens in a step
MAX_TAKEN = 1 << 12  # keys of Generates in a heartbeat
MAX_NAMES = 256  # entries of one list or map, such as a node's counters or adapters
MAX_ORDERS = 16  # to load or remove adapters, in a heartbeat
MAX_DRAFT_BYTES = 4 << 20
MAX_HANDLE_BYTES = 1 << 16
MAX_CODE_BYTES = 64  # size of a ticket's key or code
MAX_STORE_BYTES = 1 << 16  # size of a StoreEntry's value
MAX_SCORES = 1 << 13  # log-probabilities in one Scores
MAX_SPENDING_BYTES = 1 << 16  # size of a Spending's body
MAX_PAGE_NAMES = 1 << 12  # page names in one list of a CacheEvents
MAX_REAL = 3.4028234e38  # the largest float32
MAX_MS = 10**12

# Every field has a range; a test checks this. msgpack's integers have at most 64 bits.
Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
TraceParent = Annotated[str, Meta(max_length=64)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
PageName = Annotated[bytes, Meta(min_length=IDENTITY_BYTES, max_length=IDENTITY_BYTES)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
BadWord = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_MS)]
Unsigned = Annotated[int, Meta(ge=0, extra={"bits": 64})]  # for epochs, seeds, nonces and digests
Real = Annotated[float, Meta(ge=-MAX_REAL, le=MAX_REAL)]  # neither NaN nor infinity
States = Annotated[dict[Name, Count], Meta(max_length=MAX_NAMES)]
Transports = Annotated[list[Name], Meta(max_length=16)]
