"""Sums in a fixed order: each number once, at any length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from shared.kernel.code.jit import FAST_MATH
from shared.kernel.code.sums import LANES, sum_of


@njit(fastmath=FAST_MATH)
def sum_floats(address: Any, count: Any) -> Any:
    return sum_of(address, count, False, False)


def by_lanes(numbers: np.ndarray) -> np.float32:
    """Return the sum as its definition says it, in float32."""
    whole = len(numbers) // LANES * LANES
    lanes = np.zeros(LANES, np.float32)
    for row in numbers[:whole].reshape(-1, LANES):
        lanes += row
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    total = lanes[0]
    for number in numbers[whole:]:
        total += number
    return total


LENGTHS = (0, 1, 7, 15, 16, 17, 31, 64, 576, 1000)


@pytest.mark.parametrize("count", LENGTHS)
def test_a_sum_has_the_bits_of_its_definition(count: int) -> None:
    numbers = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 100
    assert np.float32(sum_floats(numbers.data_ptr(), count)) == by_lanes(numbers.numpy())
