"""The small steps between matrix products (norm, gate): the interface, and plain torch for any device.

The residual stream is float32 in every mode; what goes into a product is in the model's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch


class BlockKernels(Protocol):
    """Runs on the forward stream. Results are valid until the next call of the same method."""

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """residual (M, H) float32 += delta (M, H), in place; returns its RMS norm times weight, in the dtype."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(M, 2 * I) -> silu(first half) * second half, (M, I)."""
        ...


class TorchBlocks:
    def __init__(self, eps: float, dtype: torch.dtype) -> None:
        self._eps, self._dtype = eps, dtype

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        if delta is not None:
            residual.add_(delta)
        scale = torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + self._eps)
        return (residual * scale * weight).to(self._dtype)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(self._dtype)
