"""Rotary position tables. Rotation itself is in the block kernels."""

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
    """(head_dim // 2,) float32."""
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    if kind == "linear":
        return inverse / factor
    if kind == "llama3":
        return _stretch_low(inverse, factor, low_freq_factor, high_freq_factor, original_context)
    return inverse


def _stretch_low(inverse: torch.Tensor, factor: float, low: float, high: float, context: int) -> torch.Tensor:
    """Llama 3: waves longer than context / low are slowed by `factor`, shorter than context / high are kept, and
    between the two the change is linear in context / wavelength."""
    turns = context * inverse / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return inverse * (blend + (1.0 - blend) / factor)


def rope_tables(inverse: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of (num_positions, head_dim // 2), float32."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.int64).float(), inverse)
    return angles.cos(), angles.sin()
