"""Request keys, and integer hashes with the same bits on every machine."""

from __future__ import annotations

from typing import NamedTuple

MASK64 = (1 << 64) - 1


class RequestKey(NamedTuple):
    """Identifies one attempt at one sequence of one request. Messages with another key never affect this attempt."""

    router_id: str
    router_epoch: int
    rid: str
    attempt: int
    seq_index: int

    def __str__(self) -> str:
        return f"{self.router_id}.{self.router_epoch:x}/{self.rid}#{self.attempt}.{self.seq_index}"

    def sibling(self, seq_index: int) -> RequestKey:
        return self._replace(seq_index=seq_index)


def mix64(value: int) -> int:
    """Apply splitmix64's finaliser: 64 bits in, 64 bits out."""
    value = (value + 0x9E3779B97F4A7C15) & MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK64
    return value ^ (value >> 31)


def sequence_seed(seed: int, seq_index: int) -> int:
    return seed & MASK64 if seq_index == 0 else mix64((seed & MASK64) ^ mix64(seq_index))
