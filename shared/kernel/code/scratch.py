"""Scratch memory of a program: one part per thread."""

from __future__ import annotations

import torch

LINE_BYTES = 64


class Scratch:
    """A part per thread, sized for the largest step so far. No program may run while the memory grows."""

    def __init__(self, num_workers: int) -> None:
        self.part_bytes = 0
        self._num_workers = num_workers
        self._memory = torch.empty(0)

    def reserve(self, num_bytes: int) -> None:
        needed = -(-num_bytes // LINE_BYTES) * LINE_BYTES
        if needed > self.part_bytes:
            self.part_bytes = needed
            self._memory = torch.empty(self._num_workers, needed, dtype=torch.uint8)

    @property
    def words(self) -> tuple[int, int]:
        """Return the address of thread 0's part, and the bytes per part."""
        return self._memory.data_ptr(), self.part_bytes
