"""The small steps between matrix products (norm, gate): the interface, and plain torch for any device.

The residual stream is float32 in every mode; what goes into a product is in the model's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional


class BlockKernels(Protocol):
    """Runs on the forward stream. Results are valid until the next call of the same method."""

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """residual (M, H) float32 += delta (M, H), in place; returns its RMS norm times weight, in the dtype."""
        ...

    def norm(self, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """(M, H) in the dtype -> its RMS norm times weight, in the dtype."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(M, 2 * I) -> silu(first half) * second half, or gelu of it, (M, I); any I."""
        ...


class TorchBlocks:
    def __init__(self, eps: float, dtype: torch.dtype, is_gelu: bool = False) -> None:
        """is_gelu: gelu in its tanh form, not silu."""
        self._eps, self._dtype, self._is_gelu = eps, dtype, is_gelu

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        if delta is not None:
            residual.add_(delta)
        scale = torch.rsqrt(residual.pow(2).mean(-1, keepdim=True) + self._eps)
        return (residual * scale * weight).to(self._dtype)

    def norm(self, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.add_norm(delta.float(), None, weight)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        bent = functional.gelu(gate, approximate="tanh") if self._is_gelu else functional.silu(gate)
        return (bent * up).to(self._dtype)
