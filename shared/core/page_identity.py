"""Computes a page's KV identity: a 16-byte hash of the keys of all tokens up to the page's end.

    ROOT -> identity of page 0 -> identity of page 1 -> ...         the last page may be partly full

The hash is cryptographic, because clients choose the token ids, and equal identities count as equal KV. This file can't
use numpy, because routers lack it.

Each token of a request has a key of 64 bits, little-endian. With lookahead, which some drafters need, the key also
covers the next token. An adapter's digest and a salt change the first two keys, and so every identity: an adapter's
name may pass to other weights, and its number in a node to another adapter, but their KV must never meet.

    lookahead      62 .. 32: the token        31 .. 0: the next token
    without        31 .. 0: the token
    first key      63: 1                      62 .. 0: these bits xor the salt xor the digest's hash
    second key     63 .. 0: these bits xor the rest of the digest's hash

Some models compute the KV of texts beyond a bound in another way, from the first token on (longrope). A text beyond the
bound has LONG for an adapter: such models take no other.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator

IDENTITY_BYTES = 16
KEY_BYTES = 8
ROOT = bytes(IDENTITY_BYTES)
SALTED = 1 << 63
LONG = "beyond short_context"


def prefix_keys(tokens: bytes, adapter: str, lookahead: int, salt: int) -> bytes:
    """Return one key per token. `tokens`: 64 bits per token. `adapter`: the digest of what makes the KV; "": none.

    With lookahead the last token has no key yet.
    """
    if lookahead:
        halves = array("I", tokens)
        halves[1::2] = ids = halves[0::2]
        halves[0:-2:2] = ids[1:]
        keys = bytearray(memoryview(halves).cast("B")[:-KEY_BYTES])
    else:
        keys = bytearray(tokens)
    if adapter or salt:
        head = keys[: 2 * KEY_BYTES]
        mask = (adapter_mask(adapter) ^ salt | SALTED).to_bytes(2 * KEY_BYTES, "little")
        keys[: len(head)] = bytes(one ^ other for one, other in zip(head, mask, strict=False))
    return bytes(keys)


def adapter_of(adapter: str, num_tokens: int, short_context: int) -> str:
    """Return the digest of what makes the KV of a text, if `num_tokens` of it are known. `short_context`: the bound; 0:
    none."""
    return LONG if 0 < short_context < num_tokens else adapter


def adapter_mask(digest: str) -> int:
    """Return 128 bits: with fewer, a client could search for a salt that makes an adapter's pages another's."""
    return int.from_bytes(hashlib.blake2b(digest.encode(), digest_size=2 * KEY_BYTES).digest()) if digest else 0


def child_identity(parent: bytes, key: bytes) -> bytes:
    """`parent`: the previous page's identity. `key`: the keys of the page's tokens."""
    return hashlib.blake2b(parent + key, digest_size=IDENTITY_BYTES).digest()


def identities(keys: bytes, page_size: int, parent: bytes = ROOT) -> Iterator[bytes]:
    """`parent`: the identity of the page before the keys' first."""
    width = page_size * KEY_BYTES
    for start in range(0, len(keys), width):
        parent = child_identity(parent, keys[start : start + width])
        yield parent
