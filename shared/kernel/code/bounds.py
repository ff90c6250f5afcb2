"""Checks bounds before compiled kernels run: a wrong index there would be a wild address."""

from __future__ import annotations

import numpy as np
import torch

UNSIGNED = {np.dtype(np.int64): np.uint64, np.dtype(np.int32): np.uint32}


def check_range(name: str, values: torch.Tensor, limit: int) -> None:
    """Raise IndexError unless all `values`, int32 or int64 on the CPU, lie in 0 .. limit - 1."""
    numbers = values.numpy()
    unsigned = numbers.view(UNSIGNED[numbers.dtype])  # negative numbers become large ones
    if numbers.size and unsigned.max() >= limit:
        raise IndexError(f"{name} {numbers.min()}..{numbers.max()}, but only 0..{limit - 1} exist")
