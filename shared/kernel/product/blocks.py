"""Small steps between matrix products (norm, gate): the interface, and plain torch for any device.

The residual stream is float32 in every mode. A product's input has the model's dtype.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from shared.kernel.product.linear import Linear


class BlockKernels(Protocol):
    """Kernels on the forward stream. A result is valid until the method's next call."""

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        """Add delta (M, H) to residual (M, H) float32 in place. Return the sum's RMS norm times weight, in the model's
        dtype."""
        ...

    def norm(self, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the RMS norm of delta (M, H) times weight, in delta's dtype."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return silu (or gelu) of each row's first half, times its second half: (M, 2 * I) -> (M, I)."""
        ...

    def gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Return gate(linear(x)), perhaps in one launch."""
        ...


class TorchBlocks:
    def __init__(self, eps: float, dtype: torch.dtype, is_gelu: bool = False) -> None:
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

    def gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        return self.gate(linear(x))
