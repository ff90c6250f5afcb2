"""Number formats of KV pages, and vector code that widens and rounds their bytes.

The bytes equal quantized.py's, so nodes with and without compiled kernels fill pages alike. After a norm a few keys
differ by one step.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import torch
from llvmlite import ir

from shared.kernel.code.quantized import LARGEST

EXPONENT = 2.0**120  # 2^(127 - 7): float32's and fp8's exponent biases
ROUNDING = 12582912.0  # 1.5 * 2^23: adding it puts the nearest integer into the low bits
MAGNITUDE = 0x7FFFFFFF
TOO_LARGE = 1087 << 20  # bits of 480, beyond fp8's numbers
SMALLEST_NORMAL = 121 << 23  # bits of 2^-6
DENORMAL = 141 << 23  # bits of 2^14: adding it rounds to fp8's smallest step


class Items(IntEnum):
    """A number format of pages, constant in compiled code."""

    FLOATS = 0
    HALVES = 1  # bfloat16, widened
    PAIRS = 2  # bfloat16, multiplied in pairs (simd.py)
    INT8 = 3  # widened
    FP8 = 4  # e4m3
    INTEGERS = 5  # int8, multiplied as integers (attend_bytes.py)

    @property
    def num_bytes(self) -> int:
        return (4, 2, 2, 1, 1, 1)[self]

    @property
    def has_scales(self) -> bool:
        return self >= Items.INT8

    @property
    def largest(self) -> float:
        return LARGEST[torch.float8_e4m3fn if self == Items.FP8 else torch.int8]


ITEMS = {
    torch.float32: Items.FLOATS,
    torch.bfloat16: Items.HALVES,
    torch.int8: Items.INT8,
    torch.float8_e4m3fn: Items.FP8,
}


def widened(builder: Any, data: Any, items: Items) -> Any:
    """Widen bytes to unscaled float32."""
    words, floats = _words(data.type.count), ir.VectorType(ir.FloatType(), data.type.count)
    if items == Items.INT8:
        return builder.sitofp(builder.sext(data, words), floats)
    # fp8's bits, moved to float32's places, mean 2^-120 times the number, denormals included.
    bits = builder.zext(data, words)
    sign = builder.shl(builder.and_(bits, _all(words, 0x80)), _all(words, 24))
    rest = builder.shl(builder.and_(bits, _all(words, 0x7F)), _all(words, 20))
    small = builder.bitcast(builder.or_(sign, rest), floats)
    return builder.fmul(small, _all(floats, EXPONENT))


def narrowed(builder: Any, numbers: Any, items: Items) -> Any:
    """Round float32 numbers, already divided by the scale, to the nearest bytes, ties to even.

    In int8 NaN becomes 0, and the row's scale is NaN."""
    words, data = _words(numbers.type.count), ir.VectorType(ir.IntType(8), numbers.type.count)
    if items != Items.FP8:
        shifted = builder.fadd(numbers, _all(numbers.type, ROUNDING))
        return builder.trunc(builder.bitcast(shifted, words), data)
    bits = builder.bitcast(numbers, words)
    rest = builder.and_(bits, _all(words, MAGNITUDE))
    sign = builder.lshr(builder.xor(bits, rest), _all(words, 24))
    is_odd = builder.and_(builder.lshr(rest, _all(words, 20)), _all(words, 1))
    half_a_step = _all(words, (((7 - 127) << 23) + 0x7FFFF) & 0xFFFFFFFF)  # also turns float32's bias into fp8's
    normal = builder.lshr(builder.add(builder.add(rest, half_a_step), is_odd), _all(words, 20))
    step = builder.bitcast(_all(words, DENORMAL), numbers.type)
    denormal = builder.fadd(builder.bitcast(rest, numbers.type), step)
    denormal = builder.sub(builder.bitcast(denormal, words), _all(words, DENORMAL))
    is_small = builder.icmp_unsigned("<", rest, _all(words, SMALLEST_NORMAL))
    byte = builder.select(is_small, denormal, normal)
    byte = builder.select(builder.icmp_unsigned(">=", rest, _all(words, TOO_LARGE)), _all(words, 0x7F), byte)
    return builder.trunc(builder.or_(byte, sign), data)


def magnitude_bits(builder: Any, numbers: Any) -> Any:
    """Return |x| as integers that sort like magnitudes, NaN highest."""
    words = _words(numbers.type.count)
    return builder.and_(builder.bitcast(numbers, words), _all(words, MAGNITUDE))


def _words(count: int) -> Any:
    return ir.VectorType(ir.IntType(32), count)


def _all(kind: Any, value: float) -> Any:
    return ir.Constant(kind, [value] * kind.count)
