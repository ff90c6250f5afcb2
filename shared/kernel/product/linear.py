"""Matrix products with fixed weights: the interface, and products that need none of our kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch.nn import functional

from shared.kernel.code.quantized import dequantize, quantize
from shared.kernel.product import block_weights
from shared.kernel.product.block_weights import BlockWeights


class Linear(Protocol):
    """Computes y = x W^T (+ bias): x (M, in), y (M, out), both in the weight's dtype."""

    in_features: int
    out_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


Weight = torch.Tensor | BlockWeights  # (out, in)
LinearFactory = Callable[[torch.Tensor, torch.Tensor | None], Linear]  # takes weight (out, in) and bias (out,)
WeightFactory = Callable[[Weight, torch.Tensor | None], Linear]
Columns = Callable[[torch.Tensor], torch.Tensor]  # (M, own columns) -> (M, all ranks' columns)
Head = Callable[[torch.Tensor], torch.Tensor]  # makes float32 logits, because bfloat16 logits would tie
HeadFactory = Callable[[Weight], Head]


class PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self._bias)


class PackedLinear:
    """oneDNN's product on a CPU, with the weight reordered at load.

    In bfloat16 this saves a reorder per call. In float32 it avoids MKL's slow path on AMD processors. At M = 1, a row's
    sum may have another order. With `double_one`, a single row is passed twice."""

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
    """block_weights.py's product on any device, exact but slow. `out_dtype`: None means x's dtype."""

    def __init__(
        self, weight: BlockWeights, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
    ) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._out_dtype = weight, out_dtype
        self._bias = weight.scales.new_zeros(self.out_features) if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return block_weights.product(x, self._weight, self._bias).to(self._out_dtype or x.dtype)


class QuantizedLinear:
    """The library's product for byte weights, on any device. Each call widens the weight to float32.

    A row's result may depend on the number of rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self.out_features, self.in_features = weight.shape
        self._data, self._scale = quantize(weight, dtype)
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x.float(), dequantize(self._data, self._scale), self._bias).to(x.dtype)


class FloatHead:
    """x (M, in) of any float dtype -> (M, out) float32, by a float32 product."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.float())


class WideHead:
    """x (M, in) -> (M, out) float32 by one bfloat16 or float16 product, on CUDA.

    The weight is not copied, because it may be a tied embedding."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._columns = weight.T

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self._columns, out_dtype=torch.float32)


class PackedFactory:
    """Makes PackedLinears of one dtype. Tests once for each shape whether a single row must be doubled."""

    def __init__(self) -> None:
        self._doubles: dict[tuple[int, ...], bool] = {}

    def __call__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        key = tuple(weight.shape)
        if key not in self._doubles:
            self._doubles[key] = one_row_differs(PackedLinear(weight, bias), weight.dtype)
        return PackedLinear(weight, bias, self._doubles[key])


def one_row_differs(linear: PackedLinear, dtype: torch.dtype) -> bool:
    """Return whether rows multiplied one by one get other bits than rows multiplied together.

    In bfloat16 rounding hides most differences, so more rows are tried."""
    num_rows = 128 if dtype == torch.bfloat16 else 8
    steps = torch.arange(num_rows * linear.in_features, dtype=torch.float32).view(num_rows, -1)
    rows = torch.sin(steps * 1.7).to(dtype)
    return not torch.equal(torch.cat([linear.product(row[None]) for row in rows]), linear.product(rows))


def pick_linear(device: torch.device, dtype: torch.dtype) -> LinearFactory:
    """Return the fastest product that works here, after one trial call of oneDNN's product."""
    if device.type != "cpu":
        return PlainLinear
    try:
        probe = PackedLinear(torch.eye(32, dtype=dtype))
        works = torch.equal(probe(torch.ones(2, 32, dtype=dtype)), torch.ones(2, 32, dtype=dtype))
    except (RuntimeError, AttributeError, NotImplementedError):
        works = False
    return PackedFactory() if works else PlainLinear
