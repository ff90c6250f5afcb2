"""Checks bounds before compiled kernels run: a wrong index there would be a wild address."""

from __future__ import annotations

import torch


def check_range(name: str, values: torch.Tensor, limit: int) -> None:
    """Raise IndexError unless all `values`, integers on the CPU, lie in 0 .. limit - 1."""
    numbers = values.numpy()
    if numbers.size == 0:
        return
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= limit:
        raise IndexError(f"{name} {low}..{high}, but only 0..{limit - 1} exist")
