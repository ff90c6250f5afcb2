"""The ranges of all fields that travel. msgspec checks them at decode, never at construction."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from shared.core.page_identity import IDENTITY_BYTES
from shared.core.sampling_params import MAX_BAD_WORD_TOKENS

MAX_SEQUENCES = 128

MAX_TEXT = 16384
MAX_TOKENS = 1 << 20  # of one sequence; so many pages it may have, too
MAX_RUNS = 1 << 14  # of one message: rows of a node, tokens that a step adds to a row
MAX_NAMES = 256  # counters, histograms and states of one node
MAX_DRAFT_BYTES = 4 << 20
MAX_HANDLE_BYTES = 1 << 16
MAX_CODE_BYTES = 64  # of a key or a code of tickets
MAX_STORE_BYTES = 1 << 16  # of what two processes tell each other while they connect
MAX_SCORES = 1 << 13  # entries of one message
MAX_PAGE_NAMES = 1 << 12  # entries of one message
MAX_REAL = 3.4028234e38  # what float32 holds
MAX_MS = 10**12

# Ranges that the codec enforces on what comes in (msgspec checks them at decode, never at construction). Every field
# has one, a test walks them all; msgpack itself has no number above 64 bits.
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
PageName = Annotated[bytes, Meta(min_length=IDENTITY_BYTES, max_length=IDENTITY_BYTES)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
TokenIds = Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
BadWord = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]
Int32 = Annotated[int, Meta(ge=-(1 << 31), lt=1 << 31)]
Milliseconds = Annotated[int, Meta(ge=0, le=MAX_MS)]
Unsigned = Annotated[int, Meta(ge=0, extra={"bits": 64})]  # epochs, seeds, nonces, digests
Real = Annotated[float, Meta(ge=-MAX_REAL, le=MAX_REAL)]  # NaN and infinity are not
States = Annotated[dict[Name, Count], Meta(max_length=MAX_NAMES)]
Transports = Annotated[list[Name], Meta(max_length=16)]
