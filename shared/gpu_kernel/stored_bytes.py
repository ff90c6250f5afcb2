"""Read and write stored numbers: floats as they are, or bytes with a scale.

The bits equal shared/kernel/code/quantized.py's. This code makes and reads fp8's bits itself, so it also runs on chips
without an fp8 type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

AS_IS, INT8, FP8 = 0, 1, 2  # kinds of pools
KINDS = {torch.int8: INT8, torch.float8_e4m3fn: FP8}
ROUNDER = tl.constexpr(12582912.0)  # 1.5 * 2**23: adding it rounds away the fraction
TINY = tl.constexpr(1.1754943508222875e-38)  # smallest normal float32
IS_INT8, IS_FP8 = tl.constexpr(INT8), tl.constexpr(FP8)


def kind_of(pool: torch.Tensor) -> int:
    return KINDS.get(pool.dtype, AS_IS)


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """View fp8 numbers as int8."""
    return pool.view(torch.int8) if kind_of(pool) == FP8 else pool


@triton.jit
def scale_of(largest, KIND: tl.constexpr):
    """Return float32."""
    if KIND == IS_INT8:
        return tl.math.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    return tl.math.div_rn(largest, tl.full(largest.shape, 448.0, tl.float32))


@triton.jit
def to_bytes(values, scale, KIND: tl.constexpr):
    """Convert float32 (R, N) with scales (R,) to int8 (R, N): integers or the bits of fp8."""
    divisor = tl.broadcast_to(tl.maximum(scale, TINY)[:, None], values.shape)
    unit = tl.math.div_rn(values, divisor)
    if KIND == IS_INT8:
        return ((unit + ROUNDER) - ROUNDER).to(tl.int8)  # to the nearest integer, ties to even
    bits = unit.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - (141 << 23)
    code = tl.where(magnitude < (121 << 23), small, normal)
    code = tl.where(magnitude >= (1087 << 20), 0x7F, code)  # infinite or NaN
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def widened(stored, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Convert stored numbers to DTYPE without rounding. fp8 numbers become 1/256 of their value (see `unit_of`)."""
    if KIND == IS_FP8:  # move sign, exponent and fraction to where float16 has them
        return ((stored.to(tl.int16) << 7) & -16385).to(tl.float16, bitcast=True).to(DTYPE)
    return stored.to(DTYPE)


@triton.jit
def unit_of(scale, KIND: tl.constexpr):
    """Return the factor for the results of `widened`."""
    if KIND == IS_FP8:
        return scale * 256.0
    return scale
