"""Matrix products with weights that never change: the interface, and the library's for where ours does not run.

Weights are laid out once, at load. Knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from shared.kernel import block_weights
from shared.kernel.block_weights import BlockWeights
from shared.kernel.quantized import dequantize, quantize


class Linear(Protocol):
    """y = x W^T (+ bias) for x (M, in) -> (M, out), both in the weight's dtype."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


Weight = torch.Tensor | BlockWeights  # (out, in)
LinearFactory = Callable[[torch.Tensor, torch.Tensor | None], Linear]  # from weight (out, in) and bias (out,)
WeightFactory = Callable[[Weight, torch.Tensor | None], Linear]  # as LinearFactory, of blocks too
Columns = Callable[[torch.Tensor], torch.Tensor]  # (M, own) -> (M, all): of all ranks that share a product out
Head = Callable[[torch.Tensor], torch.Tensor]  # the last product: float32 whatever it is given, for bfloat16 ties
HeadFactory = Callable[[Weight], Head]


class PlainLinear:
    """torch's own product: any device."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """oneDNN with the weight reordered into its blocked layout at load.

    Against torch's own call on the CPU: bfloat16 saves the reorder of every call (half the time at M = 1), float32
    is twice as fast at every M above 1, because MKL takes a slow path on AMD processors. Its kernels add up a row in
    the same order at every M, M = 1 sometimes excepted: such a single row is doubled, which costs next to nothing,
    so that a token's result does not depend on how many others are in the step.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, double_one: bool = False) -> None:
        self.out_features, self.in_features = weight.shape
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._run = torch.ops.mkldnn._linear_pointwise.default
        self._double_one = double_one

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._double_one and len(x) == 1:
            return self.product(torch.cat((x, x)))[:1]
        return self.product(x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        # torch.ops has no types.
        return self._run(x, self._packed, self._bias, "none", [], "")  # type: ignore[no-any-return]


class PlainBlockLinear:
    """The definition of the product with weights in blocks, for any device: exact, and slow. `out_dtype`: that of x
    when not given."""

    def __init__(
        self, weight: BlockWeights, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._out_dtype = weight, out_dtype
        self._bias = weight.scales.new_zeros(self.out_features) if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return block_weights.product(x, self._weight, self._bias).to(self._out_dtype or x.dtype)


class QuantizedLinear:
    """The library's product, for any device: the weight becomes float32 again in every call, and a
    row's result may depend on how many there are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self._data, self._scale = quantize(weight, dtype)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.float(), dequantize(self._data, self._scale), self._bias).to(x.dtype)


class FloatHead:
    """x (M, in) of any float dtype -> (M, out) float32, through a float32 product."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.float())


class WideHead:
    """x (M, in) -> (M, out) float32 by one product of bfloat16 or float16 numbers, on CUDA. The weight, which a tied
    embedding may share, is read once and kept once."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._columns = weight.T

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._columns, out_dtype=torch.float32)


class PackedFactory:
    """Makes PackedLinears of one dtype; finds out once per shape whether a single row needs doubling."""

    def __init__(self) -> None:
        self._doubles: dict[tuple[int, ...], bool] = {}

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        key = tuple(weight.shape)
        if key not in self._doubles:
            self._doubles[key] = one_row_differs(PackedLinear(weight, bias), weight.dtype)
        return PackedLinear(weight, bias, self._doubles[key])


def one_row_differs(linear: PackedLinear, dtype: torch.dtype) -> bool:
    """Rounding hides most differences of bfloat16 sums, so it takes more rows to see one."""
    num_rows = 128 if dtype == torch.bfloat16 else 8
    steps = torch.arange(num_rows * linear.in_features, dtype=torch.float32).view(num_rows, -1)
    rows = torch.sin(steps * 1.7).to(dtype)
    return not torch.equal(torch.cat([linear.product(row[None]) for row in rows]), linear.product(rows))


def pick_linear(device: torch.device, dtype: torch.dtype) -> LinearFactory:
    """The fastest product that works here, found by trying: a build without oneDNN, or a processor on which it does
    not take this dtype, raises at the first call."""
    if device.type != "cpu":
        return PlainLinear
    try:
        probe = PackedLinear(torch.eye(32, dtype=dtype))
        works = torch.equal(probe(torch.ones(2, 32, dtype=dtype)), torch.ones(2, 32, dtype=dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        works = False
    return PackedFactory() if works else PlainLinear
