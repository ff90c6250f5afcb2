"""Number the leases of a node, for hand-offs or for pulls."""

from __future__ import annotations

LEASE_BITS = 32


class Leases:
    """Makes numbers that no lease has had in any epoch, so late messages match no newer lease."""

    def __init__(self, epoch: int) -> None:
        self._last = (epoch & ((1 << LEASE_BITS) - 1)) << LEASE_BITS

    def next(self) -> int:
        self._last += 1
        return self._last
