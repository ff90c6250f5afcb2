"""Committed lengths of a batch's rows, on the host. No tensor mirrors them between steps: a plan carries a copy to the
device, or says that the relay has them, so there is nothing that planning could change under a step in flight (rule S7,
#26020)."""

from __future__ import annotations

import numpy as np

from shared.engine.plan import Int64s


class Lengths:
    """lo <= true length <= hi, (B,) each. Plain decoding keeps lo == hi. With speculation `lo` is what the last
    processed result said, and `hi` adds what is in flight."""

    def __init__(self, lengths: Int64s) -> None:
        self.lo = lengths.copy()
        self.hi = lengths.copy()

    def __len__(self) -> int:
        return len(self.lo)

    def advance(self, by: Int64s) -> None:
        """Move the rows by known amounts."""
        self.lo, self.hi = self.lo + by, self.hi + by

    def widen(self, rows: Int64s, width: int) -> None:
        """A step that may commit up to `width` tokens of these rows was launched."""
        self.hi = self.hi.copy()
        self.hi[rows] += width

    def narrow(self, index: int, committed: int, in_flight: int) -> None:
        """A result says that row `index` had `committed` tokens after its step; later steps add up to in_flight."""
        self.lo[index] = max(self.lo[index], committed)
        self.hi[index] = max(self.lo[index], min(self.hi[index], committed + in_flight))

    def set_exact(self, lengths: Int64s) -> None:
        """Take the lengths that `resolve_seq_lens_cpu` read."""
        self.lo = lengths.copy()
        self.hi = lengths.copy()

    def filter(self, keep: Int64s) -> None:
        """Keep these rows, in their order."""
        self.lo, self.hi = self.lo[keep], self.hi[keep]

    def merge(self, other: Lengths) -> None:
        """Append the rows of `other`."""
        self.lo, self.hi = np.concatenate([self.lo, other.lo]), np.concatenate([self.hi, other.hi])
