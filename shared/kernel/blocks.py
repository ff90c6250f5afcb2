"""The small steps between matrix products (norm, rotation, gate): the interface, and plain torch for any device.

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

    def split_rotate(
        self, qkv: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv (T, q + k + v) -> q (T, heads, D), k and v (T, kv_heads, D); q and k normed per head and rotated."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """(M, 2 * I) -> silu(first half) * second half, (M, I)."""
        ...


class TorchBlocks:
    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        dtype: torch.dtype,
        tables: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        self._heads, self._kv_heads, self._head_dim = num_heads, num_kv_heads, head_dim
        self._eps, self._dtype = eps, dtype
        self._cos, self._sin = tables

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        if delta is not None:
            residual.add_(delta)
        return self._norm(residual, weight).to(self._dtype)

    def split_rotate(
        self, qkv: torch.Tensor, positions: torch.Tensor, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = qkv.view(len(qkv), self._heads + 2 * self._kv_heads, self._head_dim)
        q, k, v = heads.split((self._heads, self._kv_heads, self._kv_heads), dim=1)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        return self._rotate(q, q_norm, cos, sin), self._rotate(k, k_norm, cos, sin), v

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(self._dtype)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * weight

    def _rotate(
        self, x: torch.Tensor, norm: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        """(T, heads, D), the two rotated halves apart."""
        wide = x.float()
        if norm is not None:
            wide = self._norm(wide, norm)
        left, right = wide.chunk(2, dim=-1)
        turned = torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
        return turned.to(self._dtype)
