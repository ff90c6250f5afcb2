"""Makes rotary position tables."""

from __future__ import annotations

import math

import torch


def inverse_frequencies(
    head_dim: int,
    theta: float,
    kind: str = "default",
    factor: float = 1.0,
    low_freq_factor: float = 1.0,
    high_freq_factor: float = 4.0,
    original_context: int = 8192,
) -> torch.Tensor:
    """Return (head_dim // 2,) float32 frequencies."""
    exponents = (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim).tolist()
    # Python's powers, because the last bit of torch's depends on the width of the processor's vectors
    inverse = 1.0 / torch.tensor([theta**exponent for exponent in exponents], dtype=torch.float32)
    if kind == "linear":
        return inverse / factor
    if kind == "llama3":
        return _stretch_low(inverse, factor, low_freq_factor, high_freq_factor, original_context)
    return inverse


def _stretch_low(inverse: torch.Tensor, factor: float, low: float, high: float, context: int) -> torch.Tensor:
    """Divide the frequencies of long waves (more than context / low) by `factor`, as Llama 3 does."""
    turns = context * inverse / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inverse * (blend + (1.0 - blend) / factor)


def yarn_frequencies(
    head_dim: int, theta: float, factor: float, context: int, fast: float, slow: float, truncate: bool
) -> torch.Tensor:
    """Return (head_dim // 2,) float32 frequencies of YaRN (arXiv 2309.00071, section 3.2).

    Dimensions with more than `fast` turns in the context keep their frequency. Frequencies with fewer than `slow` turns
    are divided by `factor`. Between them, the change is linear in the dimension."""
    inverse = inverse_frequencies(head_dim, theta)

    def dimension(turns: float) -> float:
        return head_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(fast), dimension(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001
    slowed = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)
    return inverse * (1.0 - slowed) + inverse / factor * slowed


def rope_tables(inverse: torch.Tensor, num_positions: int, length: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each (num_positions, head_dim // 2) float32, multiplied by `length`."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.int64).float(), inverse)
    return angles.cos() * length, angles.sin() * length
