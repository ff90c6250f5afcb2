"""A device's boundary on CPU tensors: what is copied, when, and that nobody reads a slot that has been given back."""

from __future__ import annotations

import torch

from shared.engine.boundary import PinnedCopies, Slots

GARBAGE = 0x5A


class PoisonedSlots(PinnedCopies):
    """Fills a slot with garbage when it comes back: a lease that gives one back too early shows in the streams."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), lambda size: torch.empty(size, dtype=torch.uint8))
        for slots in (self._into, self._out):
            _poison(slots)


def _poison(slots: Slots) -> None:
    give_back = slots.give_back

    def poisoned(slot: tuple[int, torch.Tensor | tuple[torch.Tensor, ...]]) -> None:
        for block in slot[1] if isinstance(slot[1], tuple) else (slot[1],):
            block.fill_(GARBAGE)
        give_back(slot)

    slots.give_back = poisoned  # type: ignore[method-assign]
