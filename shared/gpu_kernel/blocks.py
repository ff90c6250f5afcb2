"""BlockKernels in Triton."""

from __future__ import annotations

import torch

from shared.core.errors import KernelRefused
from shared.gpu_kernel.add_norm import add_norm
from shared.gpu_kernel.gate import gate
from shared.gpu_kernel.product import ByteLinear, FixedLinear
from shared.kernel.product.linear import Linear


class TritonBlocks:
    """Launch one kernel per norm or gate."""

    def __init__(self, eps: float, dtype: torch.dtype, is_gelu: bool = False) -> None:
        self._eps, self._dtype, self._is_gelu = eps, dtype, is_gelu

    def add_norm(self, residual: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor) -> torch.Tensor:
        if not residual.is_contiguous():
            raise KernelRefused("add_norm writes the residual stream in place: it must be contiguous")
        return add_norm(residual, None if delta is None else delta.contiguous(), weight, self._eps, self._dtype)

    def norm(self, delta: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return add_norm(delta.contiguous(), None, weight, self._eps, self._dtype)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        return gate(gate_up.contiguous(), self._is_gelu, self._dtype)

    def gated(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Our product kernels can gate their results; the library's products can't."""
        if isinstance(linear, FixedLinear | ByteLinear):
            return linear.gated(x, self._is_gelu)
        return self.gate(linear(x))
