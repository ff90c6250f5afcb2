"""Turn vocabulary entries into bytes. Entries have one of two spellings.

byte level   each byte is one printable character ("Ġ" is a space)
metaspace    plain text, except that "▁" is a space and <0xE2> a single byte
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

METASPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`tokens`: the bytes of each id; b"" for ids that only pad the embedding. `special_ids` are never text."""

    tokens: tuple[bytes, ...]
    eos_ids: tuple[int, ...]
    special_ids: frozenset[int]

    @property
    def digest(self) -> str:
        digest = hashlib.blake2b(repr((self.eos_ids, sorted(self.special_ids))).encode(), digest_size=8)
        for token in self.tokens:
            digest.update(len(token).to_bytes(4) + token)
        return digest.hexdigest()


def byte_level_alphabet() -> dict[str, int]:
    """Map characters to bytes. Printable Latin-1 characters stand for their own bytes. The other bytes have the
    characters U+0100, U+0101, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def byte_level_decoder() -> Callable[[str], bytes]:
    alphabet = byte_level_alphabet()

    def to_bytes(entry: str) -> bytes:
        try:
            return bytes([alphabet[char] for char in entry])
        except KeyError:  # an added token is plain text
            return entry.encode()

    return to_bytes


def metaspace_bytes(entry: str) -> bytes:
    single = _BYTE_TOKEN.fullmatch(entry)
    return bytes((int(single[1], 16),)) if single else entry.replace(METASPACE, " ").encode()


def byte_table(
    vocab: Mapping[str, int], literal: Collection[str], entry_bytes: Callable[[str], bytes], size: int
) -> list[bytes]:
    """Return the bytes of each id below `size`; b"" for ids without an entry."""
    table = [b""] * size
    for entry, index in vocab.items():
        if index < size:
            table[index] = entry.encode() if entry in literal else entry_bytes(entry)
    return table
