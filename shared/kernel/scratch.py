"""Memory that a program's threads write to while they do a share: a part for each, however many shares a task has."""

from __future__ import annotations

import torch

LINE_BYTES = 64


class Scratch:
    """Grows to the largest step seen. Nothing may run while it grows."""

    def __init__(self, num_workers: int) -> None:
        self.part_bytes = 0
        self._num_workers = num_workers
        self._memory = torch.empty(0)

    def reserve(self, num_bytes: int) -> None:
        """Let each part have that many bytes."""
        needed = -(-num_bytes // LINE_BYTES) * LINE_BYTES
        if needed > self.part_bytes:
            self.part_bytes = needed
            self._memory = torch.empty(self._num_workers, needed, dtype=torch.uint8)

    @property
    def words(self) -> tuple[int, int]:
        """Address, and bytes from one worker's part to the next one's."""
        return self._memory.data_ptr(), self.part_bytes
