"""Quantized numbers: one byte each, int8 or fp8 (e4m3), and a float32 scale per row.

A scale maps the row's largest magnitude to the largest byte, so nothing is clipped.
"""

from __future__ import annotations

import torch

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize (..., n) floats to (..., n) bytes and (...) float32 scales. A row of zeros has scale 0."""
    wide = values.float()
    largest = wide.abs().amax(dim=-1)
    scale = largest / largest.new_full((), LARGEST[dtype])  # by a number, CUDA would multiply
    unit = wide / scale.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    return (unit.round() if dtype == torch.int8 else unit).to(dtype), scale


def dequantize(data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(..., n) bytes, (...) scales -> (..., n) float32."""
    return data.float() * scale[..., None]
