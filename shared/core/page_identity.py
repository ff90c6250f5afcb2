"""What a page's KV is a function of, as 16 bytes: the keys of its own tokens and of all tokens before them.

    ROOT -> identity of page 0 -> identity of page 1 -> ...         the last one may be of a page that is not full

A cryptographic hash, for the keys are token ids that clients choose: equal identities are taken for equal KV. Nodes
find cached pages by them, and routers the nodes that have them: so it needs no numpy, which routers lack.

A key is 64 bits, little-endian, one per token of a request:

    bits      62 .. 32: the token        31 .. 24: the adapter's slot      23 .. 0: the token after it
    without   62 .. 32: the slot         31 .. 0: the token
    salted    63: 1                      62 .. 0: all of that xor the salt
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator

IDENTITY_BYTES = 16
KEY_BYTES = 8
ROOT = bytes(IDENTITY_BYTES)
NEXT_BITS = 24  # of the token after it
MAX_VOCAB, MAX_ADAPTERS = 1 << NEXT_BITS, (1 << (32 - NEXT_BITS)) - 1
SLOT_BYTE, SLOT_BYTE_AHEAD = 4, 3  # of a key: the lowest byte of the slot
SALTED = 1 << 63


def prefix_keys(tokens: bytes, slot: int, lookahead: int, salt: int) -> bytes:
    """Make one key per token (`tokens`: 64 bits each), which says with which adapter its KV was made. With lookahead a
    key covers the token after it too, so the last one has none yet. A salt goes into the first key, for a page is
    found by way of all pages before it."""
    if lookahead:
        halves = array("I", tokens)
        halves[1::2] = halves[0::2]
        halves[0:-2:2] = halves[2::2]
        keys = bytearray(memoryview(halves).cast("B")[:-KEY_BYTES])
    else:
        keys = bytearray(tokens)
    if slot and keys:
        first = SLOT_BYTE_AHEAD if lookahead else SLOT_BYTE
        keys[first::KEY_BYTES] = bytes((slot,)) * (len(keys) // KEY_BYTES)
    if salt and keys:
        key = int.from_bytes(keys[:KEY_BYTES], "little") ^ (salt | SALTED)
        keys[:KEY_BYTES] = key.to_bytes(KEY_BYTES, "little")
    return bytes(keys)


def child_identity(parent: bytes, key: bytes) -> bytes:
    """Of the page whose keys are `key`, behind the page `parent`."""
    return hashlib.blake2b(parent + key, digest_size=IDENTITY_BYTES).digest()


def identities(keys: bytes, page_size: int) -> Iterator[bytes]:
    """Of each page that these keys, from a request's first token on, fill or begin."""
    width, parent = page_size * KEY_BYTES, ROOT
    for start in range(0, len(keys), width):
        parent = child_identity(parent, keys[start : start + width])
        yield parent
