"""Keep the committed lengths of a batch's rows on the host.

A plan copies these lengths, or names the device's relay as their source. No tensor mirrors them, so planning can't
change a step in flight (rule S7, #26020).
"""

from __future__ import annotations

import numpy as np

from shared.engine.plan import Int64s


class Lengths:
    """Bounds of each row's true length: lo <= length <= hi, (B,) each. Without speculation the bounds are equal.

    With speculation `lo` comes from the last processed result, and `hi` also counts tokens in flight.
    """

    def __init__(self, lengths: Int64s) -> None:
        self.lo = lengths.copy()
        self.hi = lengths.copy()

    def __len__(self) -> int:
        return len(self.lo)

    def advance(self, by: Int64s) -> None:
        self.lo, self.hi = self.lo + by, self.hi + by

    def widen(self, rows: Int64s, width: int) -> None:
        self.hi = self.hi.copy()
        self.hi[rows] += width

    def narrow(self, index: int, committed: int, in_flight: int) -> None:
        """Record a result. Later steps add at most `in_flight` tokens."""
        self.lo[index] = max(self.lo[index], committed)
        self.hi[index] = max(self.lo[index], min(self.hi[index], committed + in_flight))

    def set_exact(self, lengths: Int64s) -> None:
        self.lo = lengths.copy()
        self.hi = lengths.copy()

    def filter(self, keep: Int64s) -> None:
        self.lo, self.hi = self.lo[keep], self.hi[keep]

    def merge(self, other: Lengths) -> None:
        self.lo, self.hi = np.concatenate([self.lo, other.lo]), np.concatenate([self.hi, other.hi])
