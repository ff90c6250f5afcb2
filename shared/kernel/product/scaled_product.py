"""Multiply fp8 rows by fp8 weights with torch's scaled product, which GPUs from compute capability 8.9 on have.

Each row of x and each row of the weight is rounded to fp8 (e4m3) with a float32 scale
(shared/kernel/code/quantized.py). Sums are float32. The field calls this FP8-dynamic, or W8A8. Because x is rounded
too, tokens differ from what weights in bytes alone give.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from shared.core.errors import ConfigError
from shared.kernel.code.quantized import DTYPES, quantize

NAME = "fp8-dynamic"  # a Formats.weights
MULTIPLE = 16  # what both sizes of a weight must be a multiple of
ROWS = functional.ScalingType.RowWise


class ScaledLinear:
    """A Linear of weight (out, in) and bias (out,) in x's dtype. Raises ConfigError for other sizes."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        if self.out_features % MULTIPLE or self.in_features % MULTIPLE:
            raise ConfigError(
                f"--weight-dtype {NAME}: a weight has {self.out_features} x {self.in_features} numbers, and GPUs "
                f"multiply fp8 in multiples of {MULTIPLE}: take fp8, which rounds weights alone"
            )
        data, scale = quantize(weight, DTYPES["fp8"])
        self._columns, self._scale, self._bias = data.T, scale[None], bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x.new_empty((0, self.out_features))
        data, scale = quantize(x, DTYPES["fp8"])
        return functional.scaled_mm(
            data, self._columns, scale[:, None], ROWS, self._scale, ROWS, bias=self._bias, output_dtype=x.dtype
        )


def why_not_scaled(device: torch.device, dtype: torch.dtype) -> str:
    """Return why the device can't multiply fp8, after one trial; "" if it can."""
    ones = torch.ones(MULTIPLE, MULTIPLE, dtype=dtype, device=device)
    try:
        ScaledLinear(ones)(ones)
    except (RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return ""
