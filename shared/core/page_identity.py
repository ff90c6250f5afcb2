"""Computes a page's KV identity: a 16-byte hash of the keys of all tokens up to the page's end.

    ROOT -> identity of page 0 -> identity of page 1 -> ...         the last page may be partly full

The hash is cryptographic, because clients choose the token ids, and equal identities count as equal KV. This file can't
use numpy, because routers lack it.

Each token of a request has a key of 64 bits, little-endian. With lookahead, which some drafters need, the key also
covers the next token:

    lookahead   62 .. 32: the token        31 .. 24: the adapter's slot      23 .. 0: the next token
    without     62 .. 32: the slot         31 .. 0: the token
    salted      63: 1                      62 .. 0: these bits xor the salt
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator

IDENTITY_BYTES = 16
KEY_BYTES = 8
ROOT = bytes(IDENTITY_BYTES)
NEXT_BITS = 24
MAX_VOCAB, MAX_ADAPTERS = 1 << NEXT_BITS, (1 << (32 - NEXT_BITS)) - 1
SLOT_BYTE, SLOT_BYTE_AHEAD = 4, 3  # index of the slot's lowest byte in a key, without and with lookahead
SALTED = 1 << 63


def prefix_keys(tokens: bytes, slot: int, lookahead: int, salt: int) -> bytes:
    """Return one key per token. `tokens`: 64 bits per token. `slot`: the slot of the adapter that makes the KV.

    With lookahead the last token has no key yet. A salt changes only the first key, because a page's
    identity covers all earlier pages, too.
    """
    if lookahead:
        halves = array("I", tokens)
        halves[1::2] = ids = halves[0::2]
        halves[0:-2:2] = ids[1:]
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
    """`parent`: the previous page's identity. `key`: the keys of the page's tokens."""
    return hashlib.blake2b(parent + key, digest_size=IDENTITY_BYTES).digest()


def identities(keys: bytes, page_size: int, parent: bytes = ROOT) -> Iterator[bytes]:
    """`parent`: the identity of the page before the keys' first."""
    width = page_size * KEY_BYTES
    for start in range(0, len(keys), width):
        parent = child_identity(parent, keys[start : start + width])
        yield parent
