"""Checks before a compiled kernel runs: it looks at no bounds itself, and a wrong number would be a wild address."""

from __future__ import annotations

import torch


def check_range(name: str, values: torch.Tensor, limit: int) -> None:
    """Raise IndexError unless all of `values`, whole numbers on the CPU, lie in 0 .. limit - 1."""
    numbers = values.numpy()
    if numbers.size == 0:
        return
    low, high = int(numbers.min()), int(numbers.max())
    if low < 0 or high >= limit:
        raise IndexError(f"{name} {low}..{high} where 0..{limit - 1} are")
